"""A lookup before a draft against each of them alone and plain decoding, and a draft's tree against its chain, on
simulated texts and measured costs.

python scripts/benchmarks/joined.py [--tokens 400] [--seeds 3] [--worst 10]

A text is new tokens and copies of earlier stretches; at each place the draft's best token is right with a probability
that it knows, the next ones with half of what is left each. Drafters, rule and λ are the real ones, time is simulated.
All ways decode the same texts. Printed is a way's speed over the fastest of the others in each cell.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rules import CURVES, LONGEST

from distill.decoding.configured import DrafterInputs, make_drafter
from distill.decoding.costs import Costs
from distill.decoding.lengths import ROOT, Proposal
from distill.engines.torch.model import TorchLogits
from distill.recipe import Configuration
from distill.sampler import Sampler

VOCABULARY, PROMPT = 64, 400
COPIED = 0.1, 0.3, 0.6, 0.9  # share of a text that is copied, in stretches of 24 tokens in the mean
ACCEPTED = 0.5, 0.7, 0.9
DRAFTS = 0.1, 0.2, 0.45  # a draft's step over T(1)
WAYS = {
    "draft": Configuration(drafter="draft", rule="expected-value", length=LONGEST),
    "lookup": Configuration(drafter="lookup", rule="expected-value", length=LONGEST),
    "joined": Configuration(drafter="lookup+draft", rule="expected-value", length=LONGEST),
    "tree": Configuration(drafter="tree", length=LONGEST),
}
COMPARED = {"joined": ("draft", "lookup"), "tree": ("draft",)}


class Text:
    """Tokens, and at each place the chance that the draft's best token is right, and at which rank the right one is."""

    def __init__(self, copied: float, mean: float, seed: int, length: int) -> None:
        draw = random.Random(f"{copied}/{mean}/{seed}")
        weights = [1 / (token + 1) for token in range(VOCABULARY)]
        self.tokens = draw.choices(range(VOCABULARY), weights, k=60)
        copying, left, place = False, 30.0, 0
        while len(self.tokens) < length:
            if left <= 0:
                copying, left = not copying, draw.expovariate(1 / 20) + 4
                place = draw.randrange(len(self.tokens) - 20)
                left *= 1 if copying else (1 - copied) / copied
            left -= 1
            copies = copying and place < len(self.tokens)
            self.tokens.append(self.tokens[place] if copies else draw.choices(range(VOCABULARY), weights)[0])
            place += copies
        chances = [draw.betavariate(2 * mean, 2 * (1 - mean)) for _ in range(length)]
        self.chances = [min(max(chance, 0.02), 0.98) for chance in chances]
        self.ranks = [draw.choices(range(4), self.spread(chance))[0] for chance in self.chances]

    @staticmethod
    def spread(chance: float) -> list[float]:
        """The chances of the draft's three best tokens, and of all others together."""
        return [chance, (1 - chance) / 2, (1 - chance) / 4, (1 - chance) / 4]

    def logits(self, place: int, on_it: bool) -> torch.Tensor:
        """The draft's logits [V] of the token at a place, where all before it is as in this text; or anything."""
        right = self.tokens[place] + (0 if on_it else 7)
        order = [(right + other) % VOCABULARY for other in (1, 2, 3)]
        if self.ranks[place] < 3:
            order[self.ranks[place]] = right % VOCABULARY
        *best, rest = self.spread(self.chances[place])
        chances = torch.full((VOCABULARY,), rest / (VOCABULARY - 3))
        chances[order] = torch.tensor(best)
        return chances.log()


class Draft:
    """A draft of a text, as `Model`; `seconds` is the time of its steps, which grow with their tokens as `curve`."""

    rows, capacity, vocabulary_size, max_leaves = 1, 1 << 20, VOCABULARY, 1 << 20

    def __init__(self, text: Text, step: float, curve: Sequence[float]) -> None:
        self.text, self.step, self.curve = text, step, curve
        self.lengths, self.seconds = [0], 0.0
        self._nodes: list[tuple[int, bool]] = []  # depth, and whether the text goes so

    def rollback(self, lengths: Sequence[int]) -> None:
        """Forget what is beyond."""
        self.lengths, self._nodes = [min(lengths[0], self.lengths[0])], []

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep a path of the tree."""
        self.lengths, self._nodes = [self.lengths[0] + len(paths[0])], []

    def extend(
        self, tokens: Sequence[int], parents: Sequence[int] | None = None, want: Sequence[int] | None = None
    ) -> TorchLogits:
        """Logits after the last of the tokens, or after each node."""
        count, curve = len(tokens), self.curve
        more = (curve[-1] - curve[1]) / (len(curve) - 2) / 2  # of a token, in steps beyond the curve
        self.seconds += self.step * (curve[min(count, len(curve)) - 1] + max(count - len(curve), 0) * more)
        if parents is None:
            self.lengths = [self.lengths[0] + count]
            return TorchLogits(self.text.logits(self.lengths[0], True)[None])
        found = []
        for token, parent in zip(tokens, parents, strict=True):
            depth, right = self._nodes[parent] if parent >= 0 else (0, True)
            place = self.lengths[0] + depth
            self._nodes.append((depth + 1, right and token == self.text.tokens[place]))
            found.append(self.text.logits(place + 1, self._nodes[-1][1]))
        return TorchLogits(torch.stack(found))


def accepted(proposal: Proposal, text: Sequence[int]) -> int:
    """How deep the proposal goes as the text does."""
    children, node = proposal.children(), ROOT
    for depth, token in enumerate(text):
        following = [child for child in children.get(node, []) if proposal.tokens[child] == token]
        if not following:
            return depth
        node = following[0]
    return len(text)


def seconds_of(configuration: Configuration, text: Text, costs: Costs, curve: Sequence[float], count: int) -> float:
    """The time of `count` tokens after the prompt; the last round may make more, and counts by its share."""
    draft, place, seconds = Draft(text, costs.draft, curve), PROMPT, 0.0
    drafter = make_drafter(configuration, draft, Sampler(temperature=0), lambda: 0.0, DrafterInputs(costs))  # type: ignore[arg-type]
    drafter.begin(text.tokens[:place])
    while place < PROMPT + count:
        draft.seconds = 0.0
        proposal = drafter.propose(text.tokens[:place], LONGEST, ())
        right = accepted(proposal, text.tokens[place : place + LONGEST])
        taken = draft.seconds + costs.target[len(proposal.tokens)]
        place += right + 1
        drafter.accepted(proposal, right, place, taken)
        seconds += taken
    return seconds * count / (place - PROMPT)


@dataclass(frozen=True)
class Cell:
    """Speeds over plain decoding."""

    where: tuple[str, float, float, float]
    speeds: dict[str, float]

    def ratio(self, way: str) -> float:
        """A way over the fastest of those that it is compared with; the joined one also over plain decoding."""
        others = [self.speeds[other] for other in COMPARED[way]]
        return self.speeds[way] / max(*others, 1.0 if way == "joined" else 0.0)


def simulate(tokens: int, seeds: int, copied: Sequence[float] = COPIED) -> list[Cell]:
    """A cell for each share of copies, acceptance, cost curve and draft; summed over `seeds` texts."""
    cells = []
    for share, mean in itertools.product(copied, ACCEPTED):
        texts = [Text(share, mean, seed, PROMPT + tokens + 2 * LONGEST + 2) for seed in range(seeds)]
        for (name, curve), draft in itertools.product(CURVES.items(), DRAFTS):
            curve = (*curve, *[curve[-1] + (curve[-1] - curve[4]) / 4 * more for more in range(1, 5)])
            target = tuple(0.1 * step for step in curve)
            costs = Costs(target, 0.1 * draft, 0.1 * draft * curve[1], draft_prompt=0.005 * draft)
            plain = 0.1 * tokens * seeds
            taken = {
                way: sum(seconds_of(one, text, costs, curve, tokens) for text in texts) for way, one in WAYS.items()
            }
            cells.append(Cell((name, share, mean, draft), {way: plain / own for way, own in taken.items()}))
    return cells


def main() -> None:
    """Print how many cells are below the goal, and the worst ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=400, help="tokens of a text")
    parser.add_argument("--seeds", type=int, default=3, help="texts of a cell")
    parser.add_argument("--worst", type=int, default=8, help="cells printed")
    asked = parser.parse_args()
    cells = simulate(asked.tokens, asked.seeds)
    print("| way | cells | least | median | mean | most | below .98 |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for way in COMPARED:
        ratios = sorted(cell.ratio(way) for cell in cells)
        figures = ratios[0], statistics.median(ratios), statistics.fmean(ratios), ratios[-1]
        low = sum(ratio < 0.98 for ratio in ratios)
        print(f"| {way} | {len(cells)} | {' | '.join(f'{f:.3f}' for f in figures)} | {low} |")
    for way in COMPARED:
        for cell in sorted(cells, key=lambda cell: cell.ratio(way))[: asked.worst]:
            name, share, mean, draft = cell.where
            speeds = ", ".join(f"{other} {speed:.3f}" for other, speed in cell.speeds.items())
            print(f"{way} {cell.ratio(way):.3f}: {name}, draft {draft}, copied {share}, acceptance {mean}: {speeds}")


if __name__ == "__main__":
    main()
