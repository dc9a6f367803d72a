"""How large a trial's tree is, or of what shape, settled on selection text by what tokens and seconds promise.

Legend: n nodes, d levels, T target, D draft.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from distill.models.base import Model
from distill.recipe import Recipe, Trial
from distill.speculative.calibration import Calibration
from distill.speculative.cost import StepCosts
from distill.speculative.decode import Decoded, Rules, decode, room_for
from distill.speculative.draft import Drafter, TreeDrafter
from distill.speculative.tree import Shape, choose_budget, choose_shape, expected_accepted
from distill.speculative.trial import Tree, lossy_reason, make_drafter, trial_sampler

# Trees that are decoded with; each costs a few texts, and what lies between two of them is hardly faster than both.
SIZES = (1, 2, 3, 4, 6, 8, 11, 15, 21, 29, 40, 63)


@dataclass(frozen=True)
class Survey:
    """Best-first trees on some texts: the mean value of a round's n-th best node, and median seconds of rounds by n."""

    values: list[float]
    seconds: dict[int, float]
    rounds: int


@dataclass(frozen=True)
class Choice:
    """What was settled of the tree of the trial `way`, what a round of it promises, and all that was compared.

    `seconds` and `tokens` are of a round, `speedup` is over plain decoding after the prompt. Without nodes the trial
    decodes plainly.
    """

    way: str
    tree: Tree
    tokens: float
    seconds: float
    speedup: float
    compared: list[dict[str, float]]

    @property
    def nodes(self) -> int:
        """How many."""
        return len(self.tree) if isinstance(self.tree, Shape) else self.tree

    @property
    def told(self) -> str:
        """How tables call the trial: its own title, and what was settled."""
        levels = ""
        if isinstance(self.tree, Shape) and self.nodes:
            counts = Counter(self.tree.depths)
            levels = f" in levels of {', '.join(str(counts[level]) for level in sorted(counts))}"
        return f"{self.way}: {self.nodes} node{'s' if self.nodes != 1 else ''}{levels}"

    def sentence(self) -> str:
        """What was chosen and why."""
        if not self.nodes:
            return f"`{self.way}`: on selection text no tree promises to beat plain decoding, so that it drafts none."
        return (
            f"`{self.told}`, which promise the most on selection text: {self.tokens:.2f} tokens in "
            f"{self.seconds * 1e3:.2f} ms a round, {self.speedup:.2f}x plain decoding after the prompt."
        )

    def as_facts(self) -> dict[str, Any]:
        """For speedup.json; `parents` of a static shape, null for one that each round grows."""
        parents = list(self.tree.parents) if isinstance(self.tree, Shape) else None
        return {
            "way": self.way, "nodes": self.nodes, "parents": parents, "tokens": self.tokens, "seconds": self.seconds,
            "speedup": self.speedup, "compared": self.compared,
        }  # fmt: skip


def survey(
    target: Model,
    draft: Model,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    rules: Rules,
    make: Callable[[int], Drafter],
    sizes: Sequence[int],
    lossy: bool = False,
) -> Survey:
    """Decode about `new_tokens` after every prompt with best-first trees of each size, the sizes in turn.

    `make` gives the drafter of a size. Rounds whose trees the end of the context made smaller do not count.
    """
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    values: list[list[float]] = []
    for prompt in prompts:
        for size in sizes:
            drafter = make(size)
            assert isinstance(drafter, TreeDrafter)
            room, before, result = room_for(target, draft, len(prompt), new_tokens + max(sizes)), 0, Decoded()
            for _ in decode(target, drafter, prompt, room, rules, result, lossy):
                if before and room - before - 1 >= size:
                    if result.rounds[-1].drafted == size:
                        seconds[size].append(result.rounds[-1].seconds)
                    if size == max(sizes):
                        values.append([*drafter.values, *[0.0] * (size - len(drafter.values))])
                before = len(result.tokens)
                if before >= new_tokens:
                    break
    means = [statistics.fmean(column) for column in zip(*values, strict=True)]
    return Survey(means, {n: statistics.median(taken) for n, taken in seconds.items() if taken}, len(values))


def choose_nodes(way: str, found: Survey, costs: StepCosts) -> Choice:
    """The size of the most tokens per second, none where plain decoding is as fast: see `choose_budget`.

    A round takes T(n + 1) and what the survey's rounds took beyond it: drafting, and walking the tree.
    """
    sizes = [n for n in sorted(found.seconds) if n < len(costs.target)]
    target = {1: costs.target[0], **{n + 1: costs.target[n] for n in sizes}}
    beyond = {0: 0.0, **{n: max(found.seconds[n] - costs.target[n], 0.0) for n in sizes}}
    expected = list(accumulate(found.values, initial=1.0))
    nodes = choose_budget(found.values, target, lambda n: beyond.get(n, 0.0))
    compared = [
        {"nodes": n, "tokens": expected[n], "target_seconds": target[n + 1], "other_seconds": beyond[n]}
        for n in (0, *sizes)
    ]
    spent = target[nodes + 1] + beyond[nodes]
    return Choice(way, nodes, expected[nodes], spent, expected[nodes] * target[1] / spent, compared)


def choose_static(
    way: str, rates: Sequence[float], nodes: int | None, depth: int, costs: StepCosts, most_leaves: int
) -> Choice:
    """The shape of the most tokens per second for an acceptance by rank; with `nodes` the best one of that size.

    Of a size that the levels have no room for, the largest that they have. Drafting d levels takes d draft steps and a
    round's overhead. Where a model takes no branches at all, no node.
    """
    most = len(costs.target) - 1
    if nodes is not None:
        most = min(most, nodes, sum(len(rates) ** level for level in range(1, depth + 1)))
    sizes = range(most + 1) if nodes is None else [most]

    def drafting(levels: int) -> float:
        return costs.overhead + levels * costs.draft if levels else 0.0

    shape = Shape(())
    if most_leaves:
        shape = choose_shape(rates, most, depth, {n + 1: costs.target[n] for n in sizes}, drafting)
    tokens = 1 + expected_accepted(shape, rates)
    spent = costs.target[len(shape)] + drafting(max(shape.depths, default=0))
    return Choice(way, shape, tokens, spent, tokens * costs.target[0] / spent, [])


def settle_trees(
    recipe: Recipe,
    ways: Sequence[Trial],
    target: Model,
    draft: Model,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    ends: Collection[int],
    costs: StepCosts,
    fitted: Mapping[str, Calibration],
    rates: Sequence[float],
) -> list[Choice]:
    """A choice for each trial that leaves its tree to be chosen, of fewer nodes than `profile.max_tokens`.

    `prompts` are of the selection split, `rates` the acceptance by rank.
    """
    costs = replace(costs, target=costs.target[: recipe.profile.max_tokens])  # a grown pair's may go on
    choices = []
    for way in ways:
        if not way.chosen:
            continue
        if way.ranked:
            leaves = min(target.max_leaves, draft.max_leaves)
            choices.append(choose_static(way.title, rates, way.nodes, way.length, costs, leaves))
            continue
        sampler = trial_sampler(way, recipe.sampler)
        draws = random.Random(f"{recipe.seed}/{way.title}/survey").random
        rules = Rules(sampler, way.verified_by, ends, draws)
        lossy = lossy_reason(way, sampler) is not None
        most = len(costs.target) - 1
        sizes = sorted({*(size for size in SIZES if size < most), most})

        def make(size: int, way: Trial = way, rules: Rules = rules) -> Drafter:
            return make_drafter(way, draft, rules.sampler, rules.random, costs, fitted, size)

        found = survey(target, draft, prompts, new_tokens, rules, make, sizes, lossy)
        choices.append(choose_nodes(way.title, found, costs))
    return choices
