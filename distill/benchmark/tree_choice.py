"""The size or shape of a configuration's tree, chosen on validation text by expected tokens and measured seconds.

Legend: n nodes, d levels, T target, D draft.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

from distill.benchmark.calibrate import Text
from distill.models.base import Model
from distill.progress import Progress
from distill.recipe import Configuration, Recipe
from distill.results.speedup_results import ChosenTree, ComparedTree, PairMeasured
from distill.speculative.calibration import Calibration
from distill.speculative.configured import Tree, configured_sampler, lossy_reason, make_drafter
from distill.speculative.costs.curve import StepCosts
from distill.speculative.decode import Decoded, decode, room_for
from distill.speculative.draft import Drafter
from distill.speculative.proposal import ROOT, Proposal
from distill.speculative.rules import Rules
from distill.speculative.trees.shape import Shape, choose_shape, expected_accepted
from distill.speculative.trees.tree import TreeDrafter

# Trees that are timed; each costs a few texts, and what lies between two of them is hardly faster than both.
SIZES = (1, 2, 3, 4, 6, 8, 11, 15, 21, 29, 40, 63)
ROUNDS = 128  # of the draft alone, in which it is seen what values the nodes of trees have
TIMED = 2, 5  # prompts, and rounds after each that are timed with trees of every size


@dataclass(frozen=True)
class Choice:
    """The tree chosen for the configuration of that title, its predicted figures, and all it was chosen from.

    `seconds` and `tokens` are of a round, `speedup` is over plain decoding after the prompt. Without nodes the
    configuration decodes plainly.
    """

    title: str
    tree: Tree
    tokens: float
    seconds: float
    speedup: float
    compared: list[ComparedTree]

    @property
    def nodes(self) -> int:
        """How many nodes the tree has."""
        return len(self.tree) if isinstance(self.tree, Shape) else self.tree

    @property
    def title_with_tree(self) -> str:
        """The configuration's title, and the tree that was chosen."""
        levels = ""
        if isinstance(self.tree, Shape) and self.nodes:
            counts = Counter(self.tree.depths)
            levels = f" in levels of {', '.join(str(counts[level]) for level in sorted(counts))}"
        return f"{self.title}: {self.nodes} node{'s' if self.nodes != 1 else ''}{levels}"

    def sentence(self, of_texts: str, counted: float | None) -> str:
        """The choice and its reason; `of_texts` names what it was made on, `counted` are the tokens of a round that it
        then had, None where none was decoded."""
        if not self.nodes:
            return (
                f"`{self.title}`: on {of_texts} no tree size is predicted to be faster than plain decoding, "
                "so no tree is drafted."
            )
        return (
            f"`{self.title_with_tree}`, the fastest by its prediction on {of_texts}: {self.tokens:.2f} tokens "
            f"in {self.seconds * 1e3:.2f} ms a round, {self.speedup:.2f}x plain decoding after the prompt."
            + (f" The measured rounds had {counted:.2f} tokens." if counted is not None else "")
        )

    def as_result(self, pair: PairMeasured) -> ChosenTree:
        """For speedup.json."""
        parents = list(self.tree.parents) if isinstance(self.tree, Shape) else None
        return ChosenTree(
            *pair.key, self.title, self.nodes, parents, self.tokens, self.seconds, self.speedup, self.compared
        )


def time_rounds(
    target: Model,
    draft: Model,
    prompts: Sequence[Sequence[int]],
    rounds: int,
    rules: Rules,
    make: Callable[[Tree], Drafter],
    trees: Mapping[int, Tree],
    lossy: bool = False,
) -> dict[int, float]:
    """Median seconds of a round of n drafted nodes, for each size n of `trees` that rounds came to.

    After every prompt `rounds` are decoded with each tree, in the order of sizes; `make` gives the drafter of a tree.
    Smaller trees, for which alone the end of a context leaves room, do not count.
    """
    seconds: dict[int, list[float]] = {size: [] for size in sorted(trees)}
    progress = Progress("rounds of trees, sizes", len(prompts) * len(seconds), brief=True)
    for prompt in prompts:
        room = room_for(target, draft, len(prompt), (rounds + 1) * (max(trees, default=0) + 1))
        for size in seconds:
            result = Decoded()
            for _ in decode(target, make(trees[size]), prompt, room, rules, result, lossy):
                if result.rounds and result.rounds[-1].drafted == size:
                    seconds[size].append(result.rounds[-1].seconds)
                if len(result.rounds) >= rounds:
                    break
            progress.step()
    return {size: statistics.median(taken) for size, taken in seconds.items() if taken}


def mean_values(
    drafter: TreeDrafter, texts: Sequence[Text], nodes: int, ends: Collection[int], max_rounds: int = ROUNDS
) -> list[float]:
    """The mean value of the n-th best node of a round, for n up to `nodes`, over rounds of given texts.

    A round starts behind the token at which the text left the tree of the one before, as rounds do that are decoded
    greedily; no target is asked.
    """
    values: list[list[float]] = []
    for prompt, new in texts:
        text, at = [*prompt, *new], len(prompt)  # at: the last committed token
        drafter.begin(prompt)
        while at + 1 < len(text) and drafter.room(at + 1) > nodes and len(values) < max_rounds:
            proposal = drafter.propose(text[: at + 1], nodes, ends)
            values.append([*drafter.values, *[0.0] * (nodes - len(drafter.values))])
            accepted = follow(proposal, text[at + 1 :])
            at += accepted + 1
            drafter.accepted(proposal, accepted, at + 1, 0.0)
    return [statistics.fmean(column) for column in zip(*values, strict=True)]


def follow(proposal: Proposal, text: Sequence[int]) -> int:
    """How many tokens of a text a tree holds from the top down."""
    children, here = proposal.children(), ROOT
    for count, token in enumerate(text):
        hit = next((child for child in children.get(here, []) if proposal.tokens[child] == token), None)
        if hit is None:
            return count
        here = hit
    return len(text)


def best_shapes(rates: Sequence[float], sizes: Sequence[int], depth: int, costs: StepCosts) -> dict[int, Shape]:
    """By its nodes, the shape of the most tokens per second of each size, at an acceptance by rank: see `choose_shape`.

    Drafting d levels is taken to cost d draft steps and a round's overhead. A size that `depth` levels have no room for
    gives the largest that they have.
    """
    room = sum(len(rates) ** level for level in range(1, depth + 1))
    return {
        n: choose_shape(rates, n, depth, {n + 1: costs.target[n]}, lambda d: costs.overhead + d * costs.draft)
        for n in {min(size, room) for size in sizes}
    }


def shape_values(shapes: Mapping[int, Shape], rates: Sequence[float]) -> list[float]:
    """Values of which the first n sum up to the expected accepted tokens of the shape of n nodes."""
    values, before = [0.0] * max(shapes, default=0), 0.0
    for n, shape in sorted(shapes.items()):
        values[n - 1] = expected_accepted(shape, rates) - before
        before += values[n - 1]
    return values


def choose_tree(
    title: str, trees: Mapping[int, Tree], values: Sequence[float], seconds: Mapping[int, float], costs: StepCosts
) -> Choice:
    """The tree of the most tokens per second among `trees` by their nodes, the smallest on ties; 0 is plain decoding.

    The first n `values` sum up to the expected accepted tokens of n nodes. A round of n takes T(n + 1) and the part of
    the timed `seconds` beyond it: drafting, and walking the tree. Sizes that no round came to are left out.
    """
    expected = list(accumulate(values, initial=1.0))
    known = min(len(expected), len(costs.target))
    compared = [
        ComparedTree(n, expected[n], costs.target[n], max(seconds[n] - costs.target[n], 0.0) if n else 0.0)
        for n in sorted(trees)
        if n < known and (n == 0 or n in seconds)
    ]
    best = max(compared, key=lambda one: one.tokens / (one.target_seconds + one.other_seconds))
    spent = best.target_seconds + best.other_seconds
    return Choice(title, trees[best.nodes], best.tokens, spent, best.tokens * costs.target[0] / spent, compared)


def choose_trees(
    recipe: Recipe,
    configurations: Sequence[Configuration],
    target: Model,
    draft: Model,
    texts: Sequence[Text],
    ends: Collection[int],
    costs: StepCosts,
    fitted: Mapping[str, Calibration],
    rates: Sequence[float],
    timed: tuple[int, int] = TIMED,
) -> list[Choice]:
    """A choice for each configuration that leaves its tree open, of fewer nodes than `speedup.max_tokens`.

    `texts` are prompts of the validation split, each with the target's text after it; `timed` (prompts, rounds) is
    after how many of them how many rounds are timed. `rates` are the acceptance by rank.
    """
    costs = replace(costs, target=costs.target[: recipe.speedup.max_tokens])
    max_nodes = len(costs.target) - 1
    prompts = [prompt for prompt, _ in texts[: timed[0]]]
    choices = []
    for configuration in configurations:
        if not configuration.needs_tree_choice:
            continue
        title = configuration.title
        sampler = configured_sampler(configuration, recipe.sampler)
        draws = random.Random(f"{recipe.seed}/{title}/timed").random
        rules = Rules(sampler, configuration.verified_by, ends, draws)
        sizes = sorted({*(size for size in SIZES if size < max_nodes), max_nodes})
        trees: dict[int, Tree] = {size: size for size in sizes}
        if configuration.ranked:
            nodes = sizes if configuration.nodes is None else [configuration.nodes]
            shapes = best_shapes(rates, nodes, configuration.max_length, costs)
            trees = {**shapes}
        make = partial(make_drafter, configuration.tree_alone, draft, sampler, draws, costs, fitted)
        lossy = lossy_reason(configuration, sampler) is not None
        seconds = time_rounds(target, draft, prompts, timed[1], rules, make, trees, lossy)
        if configuration.ranked:
            values = shape_values(shapes, rates)
        else:
            drafter = make(max_nodes)
            assert isinstance(drafter, TreeDrafter)
            values = mean_values(drafter, texts, max_nodes, ends)
        plainly: Tree = Shape(()) if configuration.ranked else 0
        if configuration.nodes is None or not seconds:
            trees[0] = plainly
        choices.append(choose_tree(title, trees, values, seconds, costs))
    return choices
