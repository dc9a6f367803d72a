"""Compare the adaptive rule with the best fixed length in hindsight, on simulated drafts and measured costs.

python scripts/benchmarks/rules.py [--rounds 64,400] [--seeds 8] [--prompt 0] [--every 1] [--worst 8]
    [--others | --mistimed | --constants]

A text is a sequence of places. At each place the target accepts the draft's token with a probability that only the
simulation knows, and the draft gives its best token a probability. All rules decode the same texts. The best fixed
length (0 to 8, where 0 is plain decoding) decodes each text for the given rounds. The other rules decode as many tokens
of the text. The output is the rule's tokens/s divided by those of the fixed length.

With `--prompt`, a draft reads that many tokens before its first step, each in READ of a step. The texts of a cell are
then one session. `--every` takes every n-th cell. Three options replace the comparison: `--others` replays the rules
without costs on the same texts, `--mistimed` replays the adaptive rule with wrongly timed costs, and `--constants`
halves and doubles each constant of the adaptive rule.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from distill.decoding import lengths
from distill.decoding.costs import Costs
from distill.decoding.drafters import ChainDraft
from distill.decoding.lengths import AcceptedRatio, Adaptive, BetaFilter, Drafting, Fixed, LengthRule, ProbabilityFloor
from distill.recipe.configuration import FLOOR, MORE, P_MIN, START

LONGEST = 8
CURVES = {  # T(1), …, T(9) over T(1) of Qwen2.5-Coder-1.5B on 2 cores
    "PyTorch": (1, 1.0, 1.005, 1.01, 1.02, 1.02, 1.03, 1.04, 1.06),
    "ik_llama.cpp": (1, 1.30, 1.35, 1.34, 1.33, 1.36, 1.46, 1.58, 1.70),
    "llama.cpp": (1, 1.50, 1.60, 1.63, 2.16, 2.40, 2.65, 2.91, 3.1),
}
DRAFTS = 0.05, 0.2, 0.45  # cost of a draft step in T(1)
READ = 0.1  # share of a draft step that reading a token of a prompt takes
ACCEPTED = 0.3, 0.6, 0.8, 0.95, 0.99
KINDS = "constant", "blind", "told", "overconfident", "changing"
SEEDS = 8
ADAPTIVE = "adaptive"
OTHERS: dict[str, Callable[[], LengthRule]] = {
    "fixed, 2": lambda: Fixed(2),
    "fixed, 4": lambda: Fixed(4),
    "fixed, 8": lambda: Fixed(LONGEST),
    f"p_min {P_MIN}": lambda: ProbabilityFloor(LONGEST, P_MIN),
    f"start-continue {START}, {MORE}": lambda: ProbabilityFloor(LONGEST, START, MORE),
    "ratio": lambda: AcceptedRatio(longest=LONGEST),
    f"beta {FLOOR}": lambda: BetaFilter(LONGEST, FLOOR),
}


def places(kind: str, mean: float, draw: random.Random) -> Iterator[tuple[float, float]]:
    """Yield the acceptance at each place of a text, and the draft's largest probability there.

    The kinds of texts are:

    - constant, blind: The acceptance is always `mean`. The draft knows `mean` (constant), or gives 0.6 (blind).
    - told: The acceptance is spread around `mean`, and the draft knows it.
    - overconfident: The acceptance is spread in the same way, and the draft gives higher probabilities.
    - changing: Stretches of 60 places on average have more or less acceptance. The draft knows half of the places.
    """
    good, left = draw.random() < 0.5, 0.0
    while True:
        if kind in ("constant", "blind"):
            yield mean, mean if kind == "constant" else 0.6
        elif kind == "changing":
            if left <= 0:
                good, left = not good, draw.expovariate(1 / 60)
            left -= 1
            accepted = min(mean + 0.25, 0.99) if good else max(mean - 0.35, 0.05)
            yield accepted, accepted if draw.random() < 0.5 else mean
        else:
            accepted = min(max(draw.betavariate(1.2 * mean, 1.2 * (1 - mean)), 1e-4), 1 - 1e-4)
            shown = 1.5 * math.log(accepted / (1 - accepted)) + 1.0
            yield accepted, accepted if kind == "told" else 1 / (1 + math.exp(-shown))


class Text:
    """The places of a text: what the draft shows there, and how many tokens in a row are accepted from there on."""

    def __init__(self, kind: str, mean: float, seed: int, length: int) -> None:
        draw = random.Random(f"{kind}/{mean}/{seed}")
        drawn = [*itertools.islice(places(kind, mean, draw), length)]
        self.shown = [top for _, top in drawn]
        self.run = [0] * (length + 1)
        for place in range(length - 1, -1, -1):
            self.run[place] = self.run[place + 1] + 1 if draw.random() < drawn[place][0] else 0


def decode(rule: LengthRule, costs: Costs, text: Text, tokens: int, prompt: int = 0) -> float:
    """Return a rule's seconds for so many tokens of a text. The draft reads the prompt when it is first used."""
    place, seconds, whole, unread = 0, 0.0, False, bool(prompt)
    longest = len(costs.target) - 1
    while place < tokens:
        drafting = Drafting(prompt + place + 1 if unread else 2 if whole else 1, tokens - place)
        chain, taken = ChainDraft(rule, random.random, True, longest, (), drafting), 0.0
        while chain.goes_on():
            if unread:
                drafting.read, drafting.unread, unread = drafting.unread - 1, 1, False
                drafting.reading = drafting.read * costs.draft_prompt
            drafting.steps.append(1 if drafting.steps else drafting.unread)
            taken += costs.draft_step(drafting.steps[-1])
            if chain.decides(text.shown[place + len(chain.tokens)]):
                chain.tokens.append(0)
        drafted = len(chain.tokens)
        accepted = min(text.run[place], drafted)
        chain.judge(drafted, accepted)
        taken += costs.target[drafted]
        rule.observe(drafting, drafted, accepted, taken)
        whole, place, seconds = accepted == drafted > 0, place + accepted + 1, seconds + taken + drafting.reading
    return seconds


def decode_fixed(length: int, costs: Costs, text: Text, rounds: int) -> tuple[int, float]:
    """Return tokens and seconds of this many rounds of a fixed length."""
    place, seconds, whole = 0, 0.0, False
    for _ in range(rounds):
        accepted = min(text.run[place], length)
        seconds += costs.target[length] + length * costs.draft
        seconds += costs.draft_two - costs.draft if whole else 0.0
        whole, place = accepted == length > 0, place + accepted + 1
    return place, seconds


@dataclass(frozen=True)
class Cell:
    """The rule's speed over the best fixed length's, and that length."""

    ratio: float
    rounds: int
    where: tuple[str, str, float, float]
    length: int


def simulate(
    rounds: int,
    kinds: Sequence[str] = KINDS,
    accepted: Sequence[float] = ACCEPTED,
    seeds: int = SEEDS,
    prompt: int = 0,
    every: int = 1,
) -> list[Cell]:
    """Return a cell for each kind of text, acceptance, cost curve and draft."""
    cells, number = [], 0
    for kind, mean in itertools.product(kinds, accepted):
        texts = [Text(kind, mean, seed, (LONGEST + 1) * (rounds + 1)) for seed in range(seeds)]
        for (curve, draft), costs in priced():
            number += 1
            if number % every:
                continue
            best, tokens, length = best_fixed(costs, texts, rounds, prompt)
            rules = [Adaptive(costs, LONGEST)] * seeds if prompt else [Adaptive(costs, LONGEST) for _ in texts]
            one_by_one = zip(rules, texts, tokens, strict=True)
            seconds = sum(decode(rule, costs, text, made, prompt) for rule, text, made in one_by_one)
            cells.append(Cell(sum(tokens) / seconds / best, rounds, (curve, kind, mean, draft), length))
    return cells


def priced() -> Iterator[tuple[tuple[str, float], Costs]]:
    """Yield the costs of every curve and draft."""
    for (curve, relative), draft in itertools.product(CURVES.items(), DRAFTS):
        step, target = 0.1 * draft, tuple(0.1 * ratio for ratio in relative)
        yield (curve, draft), Costs(target, step, 1.05 * step, draft_prompt=READ * step)


def best_fixed(costs: Costs, texts: Sequence[Text], rounds: int, prompt: int = 0) -> tuple[float, list[int], int]:
    """Return tokens/s of the best fixed length in hindsight, the tokens it makes of each text, and the length."""
    best, tokens, length = 0.0, list[int](), 0
    for fixed in range(LONGEST + 1):
        decoded = [decode_fixed(fixed, costs, text, rounds) for text in texts]
        reading = prompt * costs.draft_prompt * (fixed > 0)
        rate = sum(made for made, _ in decoded) / sum(taken + reading for _, taken in decoded)
        if rate > best:
            best, tokens, length = rate, [made for made, _ in decoded], fixed
    return best, tokens, length


def replay(rounds: int) -> dict[str, list[float]]:
    """Return, for each rule, its speed over the best fixed length's in every cell."""
    by_rule: dict[str, list[float]] = {}
    for kind, mean in itertools.product(KINDS, ACCEPTED):
        texts = [Text(kind, mean, seed, (LONGEST + 1) * (rounds + 1)) for seed in range(SEEDS)]
        for _, costs in priced():
            best, tokens, _ = best_fixed(costs, texts, rounds)
            makers = OTHERS | {ADAPTIVE: lambda costs=costs: Adaptive(costs, LONGEST)}
            for name, make in makers.items():
                seconds = sum(decode(make(), costs, text, made) for text, made in zip(texts, tokens, strict=True))
                by_rule.setdefault(name, []).append(sum(tokens) / seconds / best)
    return by_rule


def print_others(rounds: int) -> None:
    """Print every rule's figures, and in how many cells it is faster than the adaptive rule."""
    by_rule = replay(rounds)
    print(f"| {rounds} rounds | least | median | mean | most | faster than {ADAPTIVE} by .01 |")
    print("|---|--:|--:|--:|--:|--:|")
    for name, ratios in by_rule.items():
        figures = min(ratios), statistics.median(ratios), statistics.fmean(ratios), max(ratios)
        ahead = sum(ratio > adaptive + 0.01 for ratio, adaptive in zip(ratios, by_rule[ADAPTIVE], strict=True))
        print(f"| {name} | {' | '.join(f'{f:.2f}' for f in figures)} | {ahead} of {len(ratios)} |")


MISTIMED = {  # factors by which plain steps, and rounds with a draft, are mistimed
    "as they are": (1.0, 1.0),
    "all timed 1.6 times too long": (1.6, 1.6),
    "all .6": (0.6, 0.6),
    "rounds with a draft .7": (1.0, 0.7),
    "rounds with a draft 1.4": (1.0, 1.4),
    "plain steps 1.5": (1.5, 1.0),
}


def mistimed(
    rounds: int, seeds: int = 4, kinds: Sequence[str] = ("constant", "told", "changing")
) -> dict[str, list[float]]:
    """Return, for each wrong timing, the rule's speed over the best fixed length's in every cell."""
    by_timing: dict[str, list[float]] = {}
    for kind, mean in itertools.product(kinds, (0.3, 0.6, 0.8, 0.95)):
        texts = [Text(kind, mean, seed, (LONGEST + 1) * (rounds + 1)) for seed in range(seeds)]
        for _, costs in priced():
            best, tokens, _ = best_fixed(costs, texts, rounds)
            for name, (plain, drafted) in MISTIMED.items():
                first, *others = costs.target
                curve = (first * plain, *[drafted * other for other in others])
                timed = replace(costs, target=curve, draft=costs.draft * drafted, draft_two=costs.draft_two * drafted)
                seconds = sum(
                    decode(Adaptive(timed, LONGEST), costs, text, made)
                    for text, made in zip(texts, tokens, strict=True)
                )
                by_timing.setdefault(name, []).append(sum(tokens) / seconds / best)
    return by_timing


def print_mistimed(rounds: int) -> None:
    """Print what wrong timings cost."""
    print(f"| {rounds} rounds | least | mean | below .95 | below .98 |")
    print("|---|--:|--:|--:|--:|")
    for name, ratios in mistimed(rounds).items():
        low = [sum(ratio < goal for ratio in ratios) for goal in (0.95, 0.98)]
        print(f"| {name} | {min(ratios):.2f} | {statistics.fmean(ratios):.3f} | {low[0]} | {low[1]} |")


CONSTANTS = "START_ACCEPTANCE", "START_TOKENS", "MEMORY", "CONFIDENCES", "SHARE", "BUDGET", "RATIO_ROUNDS", "MOST_DELAY"
OF_ONE = "START_ACCEPTANCE", "MEMORY"  # For these constants, the distance to 1 is halved and doubled.


def print_constants(rounds: Sequence[int], seeds: int, every: int) -> None:
    """Print the least and the mean cell with each constant as it is, halved and doubled."""

    def figures() -> str:
        right = [[cell.ratio for cell in simulate(count, seeds=seeds, every=every)] for count in rounds]
        wrong = [*itertools.chain.from_iterable(mistimed(min(rounds), 1, ("told",)).values())]
        return " | ".join(f"{min(ratios):.3f} | {statistics.fmean(ratios):.4f}" for ratios in [*right, wrong])

    heads = [*(f"{count} rounds" for count in rounds), f"{min(rounds)} rounds, mistimed"]
    print("| constant | value |", " | ".join(f"{head}: least | mean" for head in heads), "|")
    print("|---|--:|", "--:|--:|" * len(heads), sep="")
    print("| as they are | |", figures(), "|")
    for name in CONSTANTS:
        usual = getattr(lengths, name)
        for factor in (0.5, 2.0):
            value = 1 - factor * (1 - usual) if name in OF_ONE else type(usual)(factor * usual)
            setattr(lengths, name, value)
            print(f"| {name} | {value:g} |", figures(), "|", flush=True)
        setattr(lengths, name, usual)


def main() -> None:
    """Print the share of cells below the goals, and the worst cells."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", default="64,400", help="rounds of the fixed length; several with commas")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="texts of a cell")
    parser.add_argument("--prompt", type=int, default=0, help="tokens of a prompt that the draft reads")
    parser.add_argument("--worst", type=int, default=8, help="cells printed")
    parser.add_argument("--every", type=int, default=1, help="only every n-th cell")
    parser.add_argument("--constants", action="store_true", help="halve and double every constant of the rule")
    parser.add_argument("--others", action="store_true", help="replay the rules without costs")
    parser.add_argument("--mistimed", action="store_true", help="replay the rule with wrongly timed costs")
    asked = parser.parse_args()
    if asked.constants:
        print_constants([*map(int, asked.rounds.split(","))], asked.seeds, asked.every)
        return
    if asked.others or asked.mistimed:
        for rounds in asked.rounds.split(","):
            (print_others if asked.others else print_mistimed)(int(rounds))
        return
    print("| rounds | cells | least | a twentieth below | median | mean | below .95 | below .98 |")
    print("|--:|--:|--:|--:|--:|--:|--:|--:|")
    worst = []
    for rounds in map(int, asked.rounds.split(",")):
        cells = sorted(
            simulate(rounds, seeds=asked.seeds, prompt=asked.prompt, every=asked.every), key=lambda cell: cell.ratio
        )
        ratios = [cell.ratio for cell in cells]
        figures = ratios[0], ratios[len(ratios) // 20], statistics.median(ratios), statistics.fmean(ratios)
        low = [sum(ratio < goal for ratio in ratios) for goal in (0.95, 0.98)]
        print(f"| {rounds} | {len(cells)} | {' | '.join(f'{f:.3f}' for f in figures)} | {low[0]} | {low[1]} |")
        worst += cells[: asked.worst]
    for cell in worst:
        curve, kind, mean, draft = cell.where
        where = f"{curve}, draft {draft}, {kind} {mean}"
        print(f"{cell.ratio:.3f} in {cell.rounds} rounds: {where}; best length {cell.length}")


if __name__ == "__main__":
    main()
