"""Length rules measured on this machine, beside the simulation on its own curve: a part of lengths.py.

Every rule decodes the same prompts of three classes, the same number of tokens of each, in turn with plain decoding,
steps given the cheapest way, as a run's speedup stage does; adaptive rules read costs that were timed before. The
simulation replays the same texts at what rounds of validation prompts of the same classes, timed between these texts,
paid: T(m), D(1), D(2) and round overhead, for rules that read no features without the draft's distributions. Speeds
exclude the prompt. A rule's measured speed is exactly

    simulated · (tokens per round, measured ÷ simulated) · (plain step ÷ T(1)) · (round's seconds, simulated ÷ measured)

so the gap is the product of these three. The last of them is split further: rounds of the same lengths at the curve's
own costs, and the remainder. Legend: γ or n drafted tokens, m tokens of a step, T target, D draft.
"""

from __future__ import annotations

import argparse
import copy
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lengths as simulation
import numpy

from distill.benchmark.calibrate import load_calibrations, record_rounds, validation_prompts
from distill.intervals import Interval, speed_ratio
from distill.models.base import Model
from distill.progress import Progress
from distill.recipe import load_recipe
from distill.run import Run
from distill.speculative.calibration import FITTED, Calibration, fit_calibration
from distill.speculative.costs.cheapest import cheapest_pair
from distill.speculative.costs.curve import StepCosts
from distill.speculative.costs.paid import PaidCosts, PaidMeter
from distill.speculative.decode import Decoded, decode, plain
from distill.speculative.draft import ModelDrafter
from distill.speculative.expected_value import ExpectedValue
from distill.speculative.lengths import Fixed, LengthRule
from distill.speculative.rules import GREEDY, Rules

DEPTH = 128
RESAMPLES, CONFIDENCE = 2000, 0.95
PLAIN = "plain"


@dataclass(frozen=True)
class Text:
    """A prompt of a class and its recorded trace."""

    kind: str
    prompt: list[int]
    trace: simulation.Trace


@contextmanager
def pairs(run: Run, backend: str, grown: bool) -> Iterator[tuple[Model, Model]]:
    """Target and draft, the target grown by the recipe's settings if asked for; files of a grown model are removed."""
    import torch

    from distill.models.conversion.writer import export_gguf
    from distill.models.gguf.model import GgufModel
    from distill.models.hugging_face import load_model, load_tokenizer, real_tokens
    from distill.models.torch_model import TorchModel
    from distill.surgery.grow import grow

    recipe, scratch = run.recipe, Path(tempfile.mkdtemp())
    tokenizer = load_tokenizer(recipe.target.model)
    big: Any = load_model(recipe.target.model, "float32", torch.device("cpu"))
    vocabulary = real_tokens(big.config, tokenizer)
    if grown:
        assert recipe.speedup.grown is not None
        big = grow(big, recipe.speedup.grown.tile, recipe.speedup.grown.layers)
    models: list[Model] = []
    try:
        if backend == "pytorch":
            small = load_model(str(run.path("draft")), "float32", torch.device("cpu"))
            models += [TorchModel(big, vocabulary), TorchModel(small, vocabulary)]
        else:
            path = run.path("gguf", f"target-{recipe.speedup.outtype}.gguf")
            if grown:
                big.save_pretrained(scratch / "grown")
                tokenizer.save_pretrained(scratch / "grown")
                path = scratch / "grown.gguf"
                export_gguf(scratch / "grown", path, recipe.speedup.outtype, "grown target")
            small_path = run.path("gguf", f"draft-{recipe.speedup.outtype}.gguf")
            models += [GgufModel(file, context=512, threads=recipe.threads) for file in (path, small_path)]
        del big
        yield models[0], models[1]
    finally:
        for model in models:
            model.close()
        shutil.rmtree(scratch, ignore_errors=True)


def texts_of(run: Run, data: Path, count: int, tokens: int) -> list[Text]:
    """`count` test prompts of each class with traces of `tokens` positions, recorded in PyTorch, classes in turn."""
    from distill.models.hugging_face import encode, load_tokenizer

    tokenizer = load_tokenizer(run.recipe.target.model)
    prompts = list(simulation.prompts_of(data / "test", lambda text: encode(tokenizer, text), count))
    found: dict[str, list[Text]] = {kind: [] for kind in simulation.CLASSES}
    with pairs(run, "pytorch", False) as (target, draft):
        for kind, prompt in prompts:
            rows = simulation.record_trace(target, draft, prompt, tokens, ())
            trace = [(row["run"], [simulation.Features(*values) for values in row["features"]]) for row in rows]
            found[kind].append(Text(kind, prompt, trace))
    return [text for turn in zip(*found.values(), strict=True) for text in turn]


def validation_texts(run: Run, data: Path) -> list[list[int]]:
    """A validation prompt of each class: those of copied text are long, and deeper rounds cost more."""
    from distill.models.hugging_face import encode, load_tokenizer

    tokenizer = load_tokenizer(run.recipe.target.model)
    return [ids for _, ids in simulation.prompts_of(data / "validation", lambda text: encode(tokenizer, text), 1)]


def costs_of(paid: PaidCosts, features: bool) -> StepCosts:
    """What rounds paid whose rule reads features, for which the draft makes distributions, or none."""
    steps = paid.by_distribution if features else paid.by_argmax
    costs = replace(paid, by_distribution=steps).step_costs()
    return replace(costs, target=costs.target[: simulation.AHEAD])


def calibration_for(run: Run) -> Calibration:
    """The calibration of the run's speedup stage; if there is none, one fitted now on 16 validation texts."""
    path = run.path("speedup", "calibration.json")
    if path.exists():
        return load_calibrations(path)["context"]
    texts = validation_prompts(run, run.recipe.answers.prompt_tokens, 16)
    with pairs(run, "pytorch", False) as (target, draft):
        own = record_rounds(target, draft, texts, 96, Rules())
    return fit_calibration([one for recorder in own for one in recorder.rounds], FITTED["context"])


def rules_of(costs: StepCosts, calibration: Calibration) -> dict[str, Callable[[], LengthRule]]:
    """The rules that are measured: some fixed lengths, one rule of each kind, expected value and its myopic variant."""
    adaptive = simulation.rules_for(costs, calibration)
    wanted = ("p_min .5", "accepted ratio", "Beta filter", "expected value, myopic")
    return {
        **{f"γ = {n}": (lambda n=n: Fixed(n)) for n in (2, 4, 8)},
        **{name: adaptive[name] for name in wanted},
        "expected value": lambda: ExpectedValue(costs, copy.deepcopy(calibration)),
    }


@dataclass
class Clock:
    """One rule's figures for one text: tokens after the first, seconds after the prompt, rounds, their curve price, and
    the tokens drafted in each."""

    tokens: int
    seconds: float
    rounds: int
    at_prices: float = 0.0
    drafted: tuple[int, ...] = ()


def measure(
    target: Model,
    draft: Model,
    texts: Sequence[Text],
    tokens: int,
    rules: dict[str, Callable[[], LengthRule]],
    title: str,
    between: Callable[[float], None],
) -> dict[str, list[Clock]]:
    """Every text by plain decoding and by each rule, in an order that turns; a rule keeps what it learns.

    After each text `between` is told which share of all is done.
    """
    drafters = {name: ModelDrafter(draft, make(), GREEDY, lambda: 0.0) for name, make in rules.items()}
    names = [PLAIN, *drafters]

    def run(name: str, drafter: ModelDrafter | None, prompt: list[int], limit: int) -> Decoded:
        result = Decoded()
        if drafter is None:
            return plain(target, prompt, limit)
        for _ in decode(target, drafter, prompt, limit, Rules(), result):
            pass
        return result

    run(PLAIN, None, texts[0].prompt, 8)
    run("", ModelDrafter(draft, Fixed(4), GREEDY, lambda: 0.0), texts[0].prompt, 8)
    found: dict[str, list[Clock]] = {name: [] for name in names}
    progress = Progress(title, len(texts))
    for index, text in enumerate(texts):
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            done = run(name, drafters.get(name), text.prompt, tokens)
            drafted = tuple(one.drafted for one in done.rounds)
            found[name].append(Clock(len(done.tokens) - 1, done.seconds, len(done.rounds), 0.0, drafted))
        between((index + 1) / len(texts))
        progress.step()
    return found


def priced(clocks: Sequence[Clock], costs: StepCosts) -> list[Clock]:
    """The same figures, with what rounds of these lengths cost."""
    prices = [[costs.round_seconds(n) if n else costs.target[0] for n in clock.drafted] for clock in clocks]
    return [replace(clock, at_prices=sum(own)) for clock, own in zip(clocks, prices, strict=True)]


def simulate(texts: Sequence[Text], costs: StepCosts, make: Callable[[], LengthRule]) -> list[Clock]:
    """The same texts replayed by a rule in its first state."""
    rule, found = make(), []
    for text in texts:
        before = Counted(rule)
        tokens, seconds, _ = simulation.replay(before, text.trace, costs)
        found.append(Clock(tokens, seconds, before.rounds))
    return found


class Counted:
    """A rule, and the number of rounds it has observed."""

    def __init__(self, rule: LengthRule) -> None:
        self.rule, self.rounds = rule, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rule, name)

    def observe(self, *values: Any) -> None:
        """Count and pass on."""
        self.rounds += 1
        self.rule.observe(*values)


def ratio(mine: Sequence[Clock], base: Sequence[Clock]) -> Interval:
    """Speed over the base's with its interval, prompts resampled in pairs."""
    parts = [
        numpy.array([getattr(clock, name) for clock in clocks], float)
        for clocks in (mine, base)
        for name in ("tokens", "seconds")
    ]
    return speed_ratio(*parts, RESAMPLES, CONFIDENCE)


def total(clocks: Sequence[Clock], name: str) -> float:
    return float(sum(getattr(clock, name) for clock in clocks))


def report(
    title: str,
    texts: Sequence[Text],
    costs: StepCosts,
    measured: dict[str, list[Clock]],
    simulated: dict[str, list[Clock]],
) -> str:
    """The table of one pair and backend, and the gap in words."""
    kinds = simulation.CLASSES
    first = costs.target[0]
    curve = ", ".join(f"{seconds / first:.2f}" for seconds in costs.target)
    lines = [
        f"\n**{title}** (speed after the prompt, plain decoding = 1)\n",
        f"T(1) = {1e3 * first:.2f} ms; T(m)/T(1) for m = 1..{len(costs.target)}: {curve}; "
        f"D = {costs.draft / first:.2f} T(1); round overhead {costs.overhead / first:.2f} T(1)\n",
        f"| rule | {' | '.join(kinds)} | mixed, measured | simulated | gap | tokens/round | plain step | round |",
        f"|---|{'--:|' * (len(kinds) + 6)}",
    ]
    base, gaps = measured[PLAIN], {}
    for name, own in simulated.items():
        mine = measured[name]
        by_kind = [
            ratio(*([clocks[i] for i, text in enumerate(texts) if text.kind == kind] for clocks in (mine, base))).mean
            for kind in kinds
        ]
        found = ratio(mine, base)
        speed, low, high = found.mean, found.low, found.high
        expected = first * total(own, "tokens") / total(own, "seconds")
        per_round = [total(clocks, "tokens") / total(clocks, "rounds") for clocks in (mine, own)]
        seconds = [total(clocks, "seconds") / total(clocks, "rounds") for clocks in (mine, own)]
        step = total(base, "seconds") / total(base, "tokens") / first
        parts = (per_round[0] / per_round[1], step, seconds[1] / seconds[0])
        gaps[name] = (speed / expected, *parts, total(mine, "seconds") / total(mine, "at_prices"))
        cells = [*(f"{value:.2f}" for value in by_kind), f"{speed:.2f} [{low:.2f}, {high:.2f}]", f"{expected:.2f}"]
        lines.append(f"| {' | '.join([name, *cells, *(f'×{part:.2f}' for part in (speed / expected, *parts))])} |")
    return "\n".join([*lines, "", *(f"- {sentence}" for sentence in explained(gaps, len(texts)))])


def explained(gaps: dict[str, tuple[float, float, float, float, float]], texts: int) -> list[str]:
    """The gap between measured and simulated speed in words, every figure computed."""
    values = numpy.array(list(gaps.values()))
    step = values[0, 2]
    found = [
        f"Measured ÷ simulated lies between {values[:, 0].min():.2f} ({min(gaps, key=lambda n: gaps[n][0])}) and "
        f"{values[:, 0].max():.2f} ({max(gaps, key=lambda n: gaps[n][0])}), median "
        f"{float(numpy.median(values[:, 0])):.2f}, over {texts} texts.",
        f"A plain step took {step:.2f} of the curve's T(1) at depth {DEPTH}: this alone moves every rule's speed by "
        f"{step - 1:+.0%}.",
        f"Rounds took {float(numpy.median(values[:, 4])):.2f} times the curve's seconds for rounds that verify as many "
        f"tokens ({values[:, 4].min():.2f} to {values[:, 4].max():.2f}); draft steps whose token was not verified are "
        "included.",
    ]
    names = {
        1: "other tokens per round than in the simulation (its λ follows the simulated clock)",
        2: "plain steps slower or faster than the curve's T(1)",
        3: "rounds slower or faster than the simulated ones",
    }
    for name in ("γ = 4", "expected value"):
        logs = numpy.abs(numpy.log(values[list(gaps).index(name), 1:4]))
        found.append(
            f"{name}: the largest part of its gap of ×{gaps[name][0]:.2f} is ×"
            f"{gaps[name][1 + int(logs.argmax())]:.2f}, {names[1 + int(logs.argmax())]}."
        )
    return found


def main(arguments: argparse.Namespace) -> None:
    run = Run(arguments.run_folder.resolve(), load_recipe(arguments.run_folder / "config.yaml"))
    started = time.monotonic()
    import torch

    from distill.machine import thread_count

    torch.set_num_threads(thread_count(run.recipe.threads))
    texts = texts_of(run, arguments.data, arguments.prompts, arguments.tokens)
    calibration, others = calibration_for(run), validation_texts(run, arguments.data)
    count = sum(len(text.trace) for text in texts)
    print(f"{len(texts)} test texts, {count} positions, {arguments.tokens} tokens of each decoded.", flush=True)
    for backend in arguments.backends:
        for grown in (False, True):
            if (grown and arguments.pairs == "shipped") or (not grown and arguments.pairs == "grown"):
                continue
            with pairs(run, backend, grown) as (target, draft):
                title = f"{'grown' if grown else 'shipped'} target, {backend}"
                cheapest = cheapest_pair(target, draft, simulation.AHEAD, DEPTH, arguments.repeats)
                pair = cheapest.target, cheapest.draft
                before = PaidMeter(*pair, others, range(1, simulation.AHEAD + 1))
                before.until(arguments.repeats)
                rules = rules_of(costs_of(before.costs(), True), calibration)
                meter = PaidMeter(*pair, others, range(1, simulation.AHEAD + 1))

                def between(share: float, meter: PaidMeter = meter) -> None:
                    meter.until(round(share * arguments.repeats))

                measured = measure(*pair, texts, arguments.tokens, rules, f"{title}, texts", between)
            costs = {name: costs_of(meter.costs(), make().reads_features) for name, make in rules.items()}
            simulated = {name: simulate(texts, costs[name], make) for name, make in rules.items()}
            measured |= {name: priced(measured[name], prices) for name, prices in costs.items()}
            print(report(title, texts, costs["expected value"], measured, simulated), flush=True)
            print("".join(f"- Padded or split steps: {line}.\n" for line in cheapest.describe()), flush=True)
    print(f"\nTook {time.monotonic() - started:.0f} s.")
