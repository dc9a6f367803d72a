"""`distill speedup --target A --draft B --prompts FILE`: from the options to what is measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from distill.commands.shared import numbers
from distill.errors import DataError, RecipeError
from distill.files import require_path

if TYPE_CHECKING:
    from distill.benchmark.any_pair import PairRequest
    from distill.recipe import Configuration, SamplerSettings


class Configurations(NamedTuple):
    """The sweep of lengths and all others; under a sampler the sweep belongs to the others."""

    sweep: tuple[Configuration, ...]
    others: tuple[Configuration, ...]

    @property
    def all(self) -> tuple[Configuration, ...]:
        """Both."""
        return *self.sweep, *self.others


def require_sampler_used(sampler: SamplerSettings) -> None:
    """Raise RecipeError for settings that do nothing, because nothing is sampled."""
    for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
        if not sampler.temperature and getattr(sampler, name) != off:
            raise RecipeError(f"--{name.replace('_', '-')} does nothing without --temperature", "give both, or neither")


def configurations(
    lengths: str, drafter: str, verifier: str | None, texts: Sequence[str], sampled: bool
) -> Configurations:
    """The configurations that the options name; RecipeError for what cannot be, or what nothing is measured of."""
    from distill.recipe import Configuration, parse_section
    from distill.recipe.load import read_yaml

    fixed: dict[str, Any] = {"drafter": drafter}
    if verifier is not None:
        fixed["verifier"] = verifier
    if sampled:
        fixed["sampler"] = "recipe"
    swept = sorted({length for length in numbers(lengths, "--lengths", int, "1,2,4") if length})
    sweep = tuple(parse_section(Configuration, fixed | {"length": length}, "--lengths") for length in swept)
    others: list[Configuration] = []
    for text in texts:
        raw = read_yaml(text, "--configuration")
        if not isinstance(raw, dict):
            raise RecipeError(f"--configuration {text[:60]}: not a mapping", "such as '{rule: p_min, length: 8}'")
        others.append(parse_section(Configuration, raw, f"--configuration {text[:60]}"))
    titles = [one.title for one in (*sweep, *others)]
    for one in (*sweep, *others):
        if titles.count(one.title) > 1:
            raise RecipeError(f"the configuration `{one.title}` is asked for twice", "leave one of them out")
        if one.sampler == "recipe" and not sampled:
            raise RecipeError(f"`{one.title}` is sampled", "give the sampler's --temperature")
        if not one.drafts:
            raise RecipeError(f"`{one.title}` is always measured", "leave it out")
    if not titles:
        raise RecipeError("nothing is to be measured but plain decoding", "give --lengths or --configuration")
    return Configurations((), (*sweep, *others)) if sampled else Configurations(sweep, tuple(others))


def require_folder(to: Path | None) -> None:
    """Raise DataError where --to names a file in a folder that is not there."""
    if to is not None:
        require_path(to, "--to")
        if not to.resolve().parent.is_dir():
            raise DataError(f"there is no folder {to.resolve().parent}", "make it, or correct --to")


def require_dtype_used(dtype: str, target: str) -> None:
    """Raise RecipeError for a type of folders that was given for a GGUF file."""
    if target.endswith(".gguf") and dtype != "float32":
        raise RecipeError(f"--dtype {dtype} is for folders; a GGUF file has types of its own", "leave it out")


def batch_sizes(text: str | None, target: str) -> tuple[int, ...]:
    """The sizes of --batch, in order; RecipeError for what cannot be."""
    if text is None:
        return ()
    sizes = sorted(set(numbers(text, "--batch", int, "1,4,16")))
    if sizes[0] < 1:
        raise RecipeError(f"--batch {text}: at least 1 text", "for instance --batch 1,4")
    if target.endswith(".gguf"):
        raise RecipeError("GGUF files are decoded text by text: --batch is for folders", "leave --batch out")
    return tuple(sizes)


def acceptance_rates(text: str | None) -> tuple[float, ...] | None:
    """The rates of --synthetic-acceptance by position; None where the target decides."""
    if text is None:
        return None
    rates = tuple(numbers(text, "--synthetic-acceptance", float, "0.8,0.7"))
    if not all(0 <= rate <= 1 for rate in rates):
        raise RecipeError(f"--synthetic-acceptance {text}: rates lie between 0 and 1", "for instance 0.8 or 0.8,0.7")
    return rates


def require_meaning(request: PairRequest) -> None:
    """Raise RecipeError for what synthetic acceptance would make meaningless."""
    if request.rates is None:
        return
    learning = next((one for one in request.configurations if one.learns or one.chosen), None)
    if learning is not None:
        raise RecipeError(
            f"`{learning.title}` is fitted to what the target accepts, and synthetic acceptance is not that",
            "use `calibration: none`, or a configuration that fits nothing",
        )
    if request.batches:
        raise RecipeError("--batch decodes with the target's own acceptance", "leave --synthetic-acceptance out")
