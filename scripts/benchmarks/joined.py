"""Compare lookup + draft with each of them alone and with plain decoding, and a draft's tree with its chain.

Texts are simulated, and costs are measured.

python scripts/benchmarks/joined.py [--tokens 64,400] [--prompt 200] [--seeds 4] [--sessions 1] [--every 1]

A text consists of new tokens and copies of earlier stretches. At each place the draft's best token is right with a
probability that the draft knows. Its second token is right with half of the rest, and its third with half of what
remains. Drafters and rule are the real ones. Time is simulated and includes the draft's reading of prompts. All ways
decode the same texts, in sessions of several texts. The output is a way's speed in each cell, divided by that of the
fastest other way. `--every` takes every n-th cell.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from rules import CURVES, LONGEST

from distill.decoding import drafters
from distill.decoding.configured import DrafterInputs, make_drafter
from distill.decoding.costs import Costs
from distill.decoding.proposals import ROOT, Proposal
from distill.engines.torch.model import TorchLogits
from distill.recipe import Configuration, Sampler

VOCABULARY, READ = 64, 0.1  # READ: share of a draft step that reading a token of a prompt takes
COPIED = 0.1, 0.3, 0.6, 0.9  # share of a text that is copied, in stretches of 24 tokens on average
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
    """Tokens. For each place: the chance that the draft's best token is right, and the rank of the right token."""

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
        self._logits: dict[tuple[int, bool], torch.Tensor] = {}  # All ways and all costs decode the same text.

    @staticmethod
    def spread(chance: float) -> list[float]:
        """Return the chances of the draft's three best tokens, and of all others together."""
        return [chance, (1 - chance) / 2, (1 - chance) / 4, (1 - chance) / 4]

    def logits(self, place: int, on_text: bool) -> torch.Tensor:
        """Return the draft's logits [V] at a place. They favour wrong tokens if an earlier token is not the text's."""
        if (place, on_text) not in self._logits:
            right = self.tokens[place] + (0 if on_text else 7)
            order = [(right + other) % VOCABULARY for other in (1, 2, 3)]
            if self.ranks[place] < 3:
                order[self.ranks[place]] = right % VOCABULARY
            *best, rest = self.spread(self.chances[place])
            chances = torch.full((VOCABULARY,), rest / (VOCABULARY - 3))
            chances[order] = torch.tensor(best)
            self._logits[place, on_text] = chances.log()
        return self._logits[place, on_text]


class Draft:
    """A draft of a text, as `Model`. `seconds` is the time of its steps.

    The time grows with the tokens as `curve` does, and beyond the curve by READ.
    """

    rows, capacity, vocabulary_size, max_leaves = 1, 1 << 20, VOCABULARY, 1 << 20

    text: Text

    def __init__(self, step: float, curve: Sequence[float]) -> None:
        self.step, self.curve = step, curve
        self.lengths, self.seconds = [0], 0.0
        self._nodes: list[tuple[int, bool]] = []  # (depth, whether the text has all tokens down to the node)

    def rollback(self, lengths: Sequence[int]) -> None:
        """Forget the tokens beyond `lengths`."""
        self.lengths, self._nodes = [min(lengths[0], self.lengths[0])], []

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep a path of the tree."""
        self.lengths, self._nodes = [self.lengths[0] + len(paths[0])], []

    def extend(
        self, tokens: Sequence[int], parents: Sequence[int] | None = None, want: Sequence[int] | None = None
    ) -> TorchLogits:
        """Return logits after the last of the tokens, or after each node."""
        count, curve = len(tokens), self.curve
        self.seconds += self.step * (curve[min(count, len(curve)) - 1] + max(count - len(curve), 0) * READ)
        if parents is None:
            self.lengths = [self.lengths[0] + count]
            return TorchLogits(self.text.logits(self.lengths[0], True)[None])
        logits = []
        for token, parent in zip(tokens, parents, strict=True):
            depth, right = self._nodes[parent] if parent >= 0 else (0, True)
            place = self.lengths[0] + depth
            self._nodes.append((depth + 1, right and token == self.text.tokens[place]))
            logits.append(self.text.logits(place + 1, self._nodes[-1][1]))
        return TorchLogits(torch.stack(logits))


def accepted(proposal: Proposal, text: Sequence[int]) -> int:
    """Return the depth to which the proposal agrees with the text."""
    children, node = proposal.children(), ROOT
    for depth, token in enumerate(text):
        following = [child for child in children.get(node, []) if proposal.tokens[child] == token]
        if not following:
            return depth
        node = following[0]
    return len(text)


def seconds_of(
    configuration: Configuration,
    texts: Sequence[Text],
    inputs: DrafterInputs,
    curve: Sequence[float],
    prompt: int,
    count: int,
) -> float:
    """Return the seconds of `count` tokens after each text's prompt. A longer last round counts by its share."""
    costs = inputs.costs
    draft, sampler, total = Draft(costs.draft, curve), Sampler(temperature=0), 0.0
    drafters.time = SimpleNamespace(perf_counter=lambda: draft.seconds)  # type: ignore[assignment]
    drafter = make_drafter(configuration, draft, sampler, lambda: 0.0, inputs)  # type: ignore[arg-type]
    for text in texts:
        draft.text, place, rounds, begun = text, prompt, 0.0, draft.seconds
        drafter.begin(text.tokens[:place])
        total += draft.seconds - begun
        while place < prompt + count:
            started = draft.seconds
            proposal = drafter.propose(text.tokens[:place], max(prompt + count - place, LONGEST), ())
            right = accepted(proposal, text.tokens[place : place + LONGEST])
            taken = draft.seconds - started - proposal.reading + costs.target[len(proposal.tokens)]
            place += right + 1
            drafter.accepted(proposal, right, place, taken)
            rounds, total = rounds + taken, total + proposal.reading
        total += rounds * count / (place - prompt)
    return total


@dataclass(frozen=True)
class Cell:
    """Speeds over plain decoding."""

    where: tuple[str, float, float, float]
    tokens: int
    speeds: dict[str, float]

    def ratio(self, way: str) -> float:
        """Return a way's speed over the fastest that it is compared with. The joined way also competes with plain."""
        others = [self.speeds[other] for other in COMPARED[way]]
        return self.speeds[way] / max(*others, 1.0 if way == "joined" else 0.0)


def simulate(
    tokens: int,
    seeds: int,
    copied: Sequence[float] = COPIED,
    prompt: int = 200,
    sessions: int = 1,
    every: int = 1,
) -> list[Cell]:
    """Return a cell for each share of copies, acceptance, cost curve and draft: sessions of `seeds` texts."""
    cells, number = [], 0
    for share, mean in itertools.product(copied, ACCEPTED):
        texts = [Text(share, mean, seed, prompt + tokens + 2 * LONGEST + 2) for seed in range(sessions * seeds)]
        parts = [texts[start : start + seeds] for start in range(0, len(texts), seeds)]
        for (name, curve), draft in itertools.product(CURVES.items(), DRAFTS):
            number += 1
            if number % every:
                continue
            curve = (*curve, *[curve[-1] + (curve[-1] - curve[4]) / 4 * more for more in range(1, 5)])
            target = tuple(0.1 * step for step in curve)
            costs = Costs(target, 0.1 * draft, 0.1 * draft * curve[1], draft_prompt=0.1 * draft * READ)
            inputs, plain = DrafterInputs(costs), 0.1 * tokens * len(texts)
            taken = {
                way: sum(seconds_of(configuration, part, inputs, curve, prompt, tokens) for part in parts)
                for way, configuration in WAYS.items()
            }
            speeds = {way: plain / seconds for way, seconds in taken.items()}
            cells.append(Cell((name, share, mean, draft), tokens, speeds))
    return cells


def main() -> None:
    """Print how many cells are below the goal, and the worst ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="64,400", help="tokens of a text; several with commas")
    parser.add_argument("--prompt", type=int, default=200, help="tokens of a prompt")
    parser.add_argument("--seeds", type=int, default=4, help="texts of a session")
    parser.add_argument("--sessions", type=int, default=1, help="sessions of a cell")
    parser.add_argument("--every", type=int, default=1, help="only every n-th cell")
    parser.add_argument("--worst", type=int, default=8, help="cells printed")
    asked = parser.parse_args()
    simulated = [
        simulate(int(tokens), asked.seeds, COPIED, asked.prompt, asked.sessions, asked.every)
        for tokens in asked.tokens.split(",")
    ]
    print("| tokens | way | cells | least | median | mean | most | below .98 |")
    print("|--:|---|--:|--:|--:|--:|--:|--:|")
    for cells, way in itertools.product(simulated, COMPARED):
        ratios = sorted(cell.ratio(way) for cell in cells)
        figures = ratios[0], statistics.median(ratios), statistics.fmean(ratios), ratios[-1]
        low = sum(ratio < 0.98 for ratio in ratios)
        print(f"| {cells[0].tokens} | {way} | {len(cells)} | {' | '.join(f'{f:.3f}' for f in figures)} | {low} |")
    for cells, way in itertools.product(simulated, COMPARED):
        for cell in sorted(cells, key=lambda cell: cell.ratio(way))[: asked.worst]:
            name, share, mean, draft = cell.where
            speeds = ", ".join(f"{other} {speed:.3f}" for other, speed in cell.speeds.items())
            where = f"{name}, draft {draft}, copied {share}, acceptance {mean}: {speeds}"
            print(f"{way} {cell.ratio(way):.3f} in {cell.tokens} tokens: {where}")


if __name__ == "__main__":
    main()
