"""A lookup before a draft against each of them alone and plain decoding, on simulated texts and measured costs.

python scripts/benchmarks/joined.py [--tokens 400] [--seeds 3] [--worst 10]

A text is new tokens and copies of earlier stretches; at each place the draft's best token is right with a probability
that it knows. Drafters, rule and λ are the real ones, time is simulated. All ways decode the same texts. Printed is the
joined way's speed over the fastest of the others in each cell.
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

from distill.decoding.configured import Fitted, make_drafter
from distill.decoding.costs import Costs
from distill.decoding.lengths import Proposal
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
}


class Text:
    """Tokens, and at each place the chance that the draft's best token is right, and whether it is."""

    def __init__(self, copied: float, accepted: float, seed: int, length: int) -> None:
        draw = random.Random(f"{copied}/{accepted}/{seed}")
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
        chances = [draw.betavariate(2 * accepted, 2 * (1 - accepted)) for _ in range(length)]
        self.chances = [min(max(chance, 0.02), 0.98) for chance in chances]
        self.hits = [draw.random() < chance for chance in self.chances]


class Draft:
    """A draft of a text, as `Model`; `seconds` is the time of its steps, which grow with their tokens as `curve`."""

    rows, capacity, vocabulary_size = 1, 1 << 20, VOCABULARY

    def __init__(self, text: Text, step: float, curve: Sequence[float]) -> None:
        self.text, self.step, self.curve = text, step, curve
        self.lengths, self.seconds = [0], 0.0

    def rollback(self, lengths: Sequence[int]) -> None:
        """Forget what is beyond."""
        self.lengths = [min(lengths[0], self.lengths[0])]

    def extend(self, tokens: Sequence[int], want: Sequence[int] | None = None) -> TorchLogits:
        """Its distribution after the tokens, which must be a beginning of the text, or wrong at their end."""
        count, curve = len(tokens), self.curve
        more = (curve[-1] - curve[1]) / (len(curve) - 2) / 2  # of a token, in steps beyond the curve
        self.seconds += self.step * (curve[min(count, len(curve)) - 1] + max(count - len(curve), 0) * more)
        self.lengths = [place := self.lengths[0] + count]
        chance = self.text.chances[place]
        best = self.text.tokens[place] if self.text.hits[place] else (self.text.tokens[place] + 1) % VOCABULARY
        logits = torch.full((1, VOCABULARY), (1 - chance) / (VOCABULARY - 1)).log()
        logits[0, best] = torch.tensor(chance).log()
        return TorchLogits(logits)


def seconds_of(configuration: Configuration, text: Text, costs: Costs, curve: Sequence[float], count: int) -> float:
    """The time of `count` tokens after the prompt; the last round may make more, and counts by its share."""
    draft, place, seconds = Draft(text, costs.draft, curve), PROMPT, 0.0
    drafter = make_drafter(configuration, draft, Sampler(temperature=0), lambda: 0.0, Fitted(costs))  # type: ignore[arg-type]
    drafter.begin(text.tokens[:place])
    while place < PROMPT + count:
        draft.seconds = 0.0
        tokens = drafter.propose(text.tokens[:place], LONGEST, ()).tokens
        right = next((i for i, one in enumerate(tokens) if one != text.tokens[place + i]), len(tokens))
        taken = draft.seconds + costs.target[len(tokens)]
        place += right + 1
        drafter.accepted(Proposal.chain(tokens), right, place, taken)
        seconds += taken
    return seconds * count / (place - PROMPT)


@dataclass(frozen=True)
class Cell:
    """Speeds over plain decoding."""

    where: tuple[str, float, float, float]
    speeds: dict[str, float]

    @property
    def ratio(self) -> float:
        """The joined way over the fastest other one."""
        return self.speeds["joined"] / max(1.0, self.speeds["draft"], self.speeds["lookup"])


def simulate(tokens: int, seeds: int, copied: Sequence[float] = COPIED) -> list[Cell]:
    """A cell for each share of copies, acceptance, cost curve and draft; summed over `seeds` texts."""
    cells = []
    for share, accepted in itertools.product(copied, ACCEPTED):
        texts = [Text(share, accepted, seed, PROMPT + tokens + 2 * LONGEST + 2) for seed in range(seeds)]
        for (name, curve), draft in itertools.product(CURVES.items(), DRAFTS):
            target = tuple(0.1 * step for step in curve)
            costs = Costs(target, 0.1 * draft, 0.1 * draft * curve[1], draft_prompt=0.005 * draft)
            plain = 0.1 * tokens * seeds
            taken = {
                way: sum(seconds_of(one, text, costs, curve, tokens) for text in texts) for way, one in WAYS.items()
            }
            cells.append(Cell((name, share, accepted, draft), {way: plain / own for way, own in taken.items()}))
    return cells


def main() -> None:
    """Print how many cells are below the goal, and the worst ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=400, help="tokens of a text")
    parser.add_argument("--seeds", type=int, default=3, help="texts of a cell")
    parser.add_argument("--worst", type=int, default=8, help="cells printed")
    asked = parser.parse_args()
    cells = sorted(simulate(asked.tokens, asked.seeds), key=lambda cell: cell.ratio)
    ratios = [cell.ratio for cell in cells]
    print("| cells | least | median | mean | most | below .98 |")
    print("|--:|--:|--:|--:|--:|--:|")
    figures = ratios[0], statistics.median(ratios), statistics.fmean(ratios), ratios[-1]
    print(f"| {len(cells)} | {' | '.join(f'{f:.3f}' for f in figures)} | {sum(ratio < 0.98 for ratio in ratios)} |")
    for cell in cells[: asked.worst]:
        name, share, accepted, draft = cell.where
        speeds = ", ".join(f"{way} {speed:.3f}" for way, speed in cell.speeds.items())
        print(f"{cell.ratio:.3f}: {name}, draft {draft}, copied {share}, acceptance {accepted}: {speeds}")


if __name__ == "__main__":
    main()
