"""What `distill speedup --target A --draft B` measures."""

from __future__ import annotations

from dataclasses import dataclass

from distill.recipe import Configuration


@dataclass(frozen=True)
class Wanted:
    """What is measured: the sweep (one configuration a length), other configurations, and batch sizes.

    `rates` are synthetic acceptance rates, None where the target decides. `library` times the library's own plain
    generation too, which loads a GGUF file a second time. `lossy` allows what changes the target's distribution.
    """

    sweep: tuple[Configuration, ...]
    others: tuple[Configuration, ...]
    batches: tuple[int, ...] = ()
    rates: tuple[float, ...] | None = None
    library: bool = False
    command: str = ""
    lossy: bool = False

    @property
    def configurations(self) -> tuple[Configuration, ...]:
        """All that draft."""
        return *self.sweep, *self.others

    @property
    def fitted(self) -> bool:
        """Whether some configuration reads what is measured on other prompts beforehand."""
        return any(one.learns or one.chosen or one.priced for one in self.configurations)
