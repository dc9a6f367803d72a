"""Steps taken in the cheapest way that a model's cost curve shows: at once, split in two, or padded and rolled back.

Curves are jagged: kernels for 2 tokens can take longer than those for 4, or than two steps of 1.

Legend: m tokens of a step, T(m) its seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distill.models.base import AroundModel, Logits, Model
from distill.progress import Progress
from distill.speculative.costs.curve import measure_steps

Steps = Mapping[int, tuple[float, float, float]]  # T(m) by m: median, fastest and slowest of several repeats
WORTH = 0.9  # of T(m): what replaces one step must be cheaper than this, or noise in the curve would choose


def cheapest_sizes(seconds: Mapping[int, float], whole: bool) -> dict[int, tuple[int, ...]]:
    """For each m that has a cheaper way, the sizes of the steps that give it: one larger size, or two that add up to m.

    With `whole` all m rows of logits are wanted, and steps are not split: the second would overwrite the first's.
    """
    cheaper: dict[int, tuple[int, ...]] = {}
    for m, at_once in seconds.items():
        choices: dict[tuple[int, ...], float] = {(size,): cost for size, cost in seconds.items() if size > m}
        if not whole:
            rests = {first: seconds.get(m - first) for first in seconds if first < m}
            choices |= {(first, m - first): seconds[first] + rest for first, rest in rests.items() if rest is not None}
        best = min(choices, key=lambda sizes: (choices[sizes], sizes), default=(m,))
        if best != (m,) and choices[best] < WORTH * at_once:
            cheaper[m] = best
    return cheaper


class CheapestSteps(AroundModel):
    """A model of one row whose chains of m tokens are committed the cheapest way that the times of its steps show.

    The fastest of several repeats decides, as other programs can only slow a step down; the medians must agree, which
    keeps one lucky repeat among many sizes from deciding. Logits are those of the model, up to the rounding of steps of
    other sizes. Trees pass unchanged.
    """

    def __init__(self, model: Model, steps: Steps) -> None:
        super().__init__(model)
        self.steps = steps
        medians = {m: median for m, (median, _, _) in steps.items()}

        def chosen(whole: bool) -> dict[int, tuple[int, ...]]:
            """The cheapest ways, less those that the medians do not bear out."""
            found = cheapest_sizes({m: fastest for m, (_, fastest, _) in steps.items()}, whole)
            return {m: sizes for m, sizes in found.items() if sum(medians[n] for n in sizes) < WORTH * medians[m]}

        self.padded = {m: sizes[0] for m, sizes in chosen(whole=True).items()}
        self.last_only = chosen(whole=False)

    def extend(
        self,
        tokens: Sequence[int],
        counts: Sequence[int] | None = None,
        parents: Sequence[int] | None = None,
        want: Sequence[int] | None = None,
    ) -> Logits:
        """See `Model`."""
        m = len(tokens)
        if parents is not None or not m:
            return self.model.extend(tokens, counts, parents, want)
        if want is not None and list(want) == [m - 1]:
            sizes = self.last_only.get(m, (m,))
            if len(sizes) == 2:
                self.model.extend(tokens[: sizes[0]], want=[sizes[0] - 1])
                return self.model.extend(tokens[sizes[0] :], want=[sizes[1] - 1])
            return self._padded(tokens, sizes[0], counts, want)
        return self._padded(tokens, self.padded.get(m, m), counts, want)

    def _padded(
        self, tokens: Sequence[int], size: int, counts: Sequence[int] | None, want: Sequence[int] | None
    ) -> Logits:
        """A step of `size` tokens, the last one repeated, rolled back to the tokens themselves."""
        m, before = len(tokens), self.model.lengths[0]
        if size == m or before + size > self.capacity:
            return self.model.extend(tokens, counts, None, want)
        logits = self.model.extend([*tokens, *[tokens[-1]] * (size - m)], want=range(m) if want is None else want)
        self.model.rollback([before + m])
        return logits

    def describe(self, name: str) -> str:
        """The steps that are padded or split, for a log; empty where none is."""
        choices = [f"{m} padded to {size}" for m, size in self.padded.items()]
        split = {m: sizes for m, sizes in self.last_only.items() if len(sizes) == 2}
        choices += [
            f"{m} as {first} + {second} where the last logits alone are read" for m, (first, second) in split.items()
        ]
        return f"{name}: steps of {', '.join(choices)}" if choices else ""


DRAFT_STEPS = range(1, 5)  # sizes that a draft's step of 1 or 2 tokens may be padded to


def cheapest_pair(
    target: Model, draft: Model, max_tokens: int, depth: int, repeats: int, progress: Progress | None = None
) -> tuple[CheapestSteps, CheapestSteps]:
    """Time the steps of both models at a depth, the target's of up to `max_tokens` tokens; they are left at that depth.

    A draft that is the target itself is given its steps.
    """
    steps = measure_steps(target, range(1, max_tokens + 1), depth, repeats, target.vocabulary_size, progress)
    cheapest = CheapestSteps(target, steps)
    if draft is target:
        return cheapest, cheapest
    return cheapest, CheapestSteps(
        draft, measure_steps(draft, DRAFT_STEPS, depth, repeats, draft.vocabulary_size, progress)
    )
