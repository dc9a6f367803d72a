"""Several runs side by side: a line for each draft in each engine, the fastest first, and for each engine a picture of
what a draft costs and gains: its greedy acceptance against the cost of a step, over lines of equal predicted speed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from distill.data.samples import NEW, SEEN
from distill.decoding.costs import tokens_per_round
from distill.folders import read_config
from distill.measuring.speedup_results import Measurement, SpeedupPart, SpeedupReport, StepFigures, speedup_of
from distill.measuring.verdict import WITHOUT, engine_of, leader, next_steps
from distill.recipe import Recipe
from distill.report import plots
from distill.report.card import gather
from distill.report.tables import RunResults
from distill.run import Run
from distill.tables import Block, Cell, Code, Interval, Plot, Table

NOTE = (
    "The fastest lossless greedy way of each draft, plain decoding, and what needs no draft. D: a draft's step, in "
    "plain steps. Predicted: the best fixed length by D, the target's steps and the greedy acceptance."
)
FORMS = {
    "measured": "×",
    "acceptance": "%",
    "predicted": "×",
    f"on {NEW} text": "%",
    f"on {SEEN} text": "%",
    "greedy": "%",
}
HEADS = ("run", "#", "engine", "fastest way", "tokens/s", *FORMS, "D", "layers, M", "head, M", "training, min")
SHORT = 7  # columns up to the acceptance, which fit on a page beside each other
Line = dict[str, Any]  # a row by head: a draft in an engine, or a way without one


def beside_blocks(opened: Sequence[tuple[Recipe, Run]]) -> tuple[Table, list[Block], list[Plot]]:
    """The table; what makes these runs incomparable or, where target and prompts are the same, the run that gains most,
    in its own words and commands; and then the pictures, that of its engine first."""
    lines, parts, timed = list[Line](), dict[str, SpeedupPart](), dict[str, SpeedupReport]()
    facts: dict[str, set[Any]] = defaultdict(set)
    for number, (recipe, run) in enumerate(opened, 1):
        results = None if run.done("cut") is None else gather(recipe, run)
        lines += lines_of(run, results, {"#": number, "run": run.folder.name})
        if results and results.speedup and results.speedup.plain:
            timed[run.folder.name] = results.speedup
        for part in results.speedup.parts if results and results.speedup else ():
            parts.setdefault(engine_of(part), part)
        for what, value in facts_of(run, results).items():
            facts[what].add(value)
    most = max(timed, key=lambda name: gain(timed[name]), default="")
    parts |= {engine_of(part): part for part in (timed[most].parts if timed else ())}
    for engine, part in parts.items():
        own = [one for one in part.measurements if one.sampler is None and one.drafter in (None, *WITHOUT)]
        lines += [{"run": "no draft", "engine": engine} | measured(one) for one in own]
    order = [*parts, ""]
    lines.sort(key=lambda line: (order.index(line.get("engine", "")), -speed(line)))
    best = [next(line for line in lines if line.get("engine") == engine) for engine in parts]
    classes = ["best" if line in best else "" if "#" in line else "plain" for line in lines]
    rows = [[Cell(line.get(head), FORMS.get(head, "")) for head in HEADS] for line in lines]
    unlike = [what for what, found in facts.items() if len(found) > 1]
    said: list[Block] = []
    if unlike:
        said = [f"These runs have different {' and '.join(unlike)}: figures that depend on them do not compare."]
    table = Table(HEADS, rows, note=NOTE, classes=classes)
    if {"targets", "test prompts"} & {*unlike} or not timed:
        return table, said, []
    first = engine_of(leader(timed[most])[0])
    order.sort(key=lambda engine: engine != first)
    said += [f"{most}: {timed[most].verdict}", Code(next_steps(timed[most]), "sh")]
    return table, said, [picture(lines, parts[engine]) for engine in order if engine]


def gain(report: SpeedupReport) -> float:
    """The ratio of a run's fastest way to the fastest plain decoding."""
    _, _, best, plain, _ = leader(report)
    return best / plain


def lines_of(run: Run, results: RunResults | None, line: Line) -> Iterator[Line]:
    """What a run has measured: a line for each engine, or one alone."""
    found, timed = (results.evaluation, results.speedup) if results else (None, None)
    if results:
        draft, trained = results.draft, run.done("train")
        kept = results.cuts[-1].after.kept_vocabulary if results.cuts else draft.vocabulary
        tied = read_config(run.path("cut")).get("tie_word_embeddings", False)
        body = draft.parameters - draft.vocabulary * draft.hidden * (1 if tied else 2)
        line |= {"layers, M": body / 1e6, "head, M": kept * draft.hidden / 1e6}
        line["training, min"] = trained["seconds"] / 60 if trained else None
    if found and (own := found.domains.get("answers", {}).get("after")):
        line |= {"acceptance": own.measure(found.acceptance_measure), "greedy": own.acceptance_greedy}
        line |= {f"on {one.label} text": one.acceptance.get("after") for one in found.groups if one.of == "repetition"}
    for part in timed.parts if timed else ():
        rivals = [one for one in timed.rivals if one.key == part.key and one.drafter not in WITHOUT] if timed else []
        line |= {"engine": engine_of(part), "D": None, "predicted": None}
        if 1 in part.steps.draft:
            line["D"] = part.steps.draft[1] / part.steps.target[1]
            if rate := line.get("greedy"):
                bounds = (promise(part.steps, line["D"], one) for one in (rate.mean, rate.low, rate.high))
                line["predicted"] = Interval(*bounds)
        yield line | (measured(max(rivals, key=lambda one: one.speedup)) if rivals else {})
    if timed is None:
        yield line | {"fastest way": "not measured yet"}


def measured(one: Measurement) -> Line:
    """A way to decode in a line."""
    gain = 1.0 if one.is_plain else speedup_of(one)
    return {"fastest way": one.configuration, "measured": gain, "tokens/s": one.tokens_per_second}


def speed(line: Line) -> float:
    """The speedup of a line, 0 where none was measured."""
    found = line.get("measured")
    return found.mean if isinstance(found, Interval) else found or 0.0


def promise(steps: StepFigures, cost: float, rate: float) -> float:
    """The speedup of the best fixed length, or of none, at an acceptance that is the same at every position and a draft
    step that costs this many plain steps."""
    tokens = {m: tokens_per_round([rate] * (m - 1)) for m in steps.target}
    return max(tokens[m] / (steps.target[m] / steps.target[1] + (m - 1) * cost) for m in tokens)


def facts_of(run: Run, results: RunResults | None) -> dict[str, Any]:
    """What must be the same of runs that are compared, as far as it is known."""
    corpus = run.done("corpus") or {"inputs": {}}
    facts = {
        "targets": corpus["inputs"].get("target.model"),
        "test prompts": run.artifacts_digest("corpus", "corpus/*-test.*"),
        "samplers": results.evaluation.sampler_words if results and results.evaluation else None,
        "machines": results.speedup.machine.get("cpu") if results and results.speedup else None,
    }
    return {what: value for what, value in facts.items() if value is not None}


def picture(lines: Sequence[Line], part: SpeedupPart) -> Plot:
    """The drafts of one engine."""
    engine, plain = engine_of(part), part.plain.tokens_per_second
    drawn = [one for one in lines if one.get("engine") == engine and one.get("predicted")]
    points = [(f"{one['#']}", one["D"], one["greedy"]) for one in drawn]
    caption = f"{engine}: the drafts by their number (#), over lines of equal predicted tokens per second."
    return Plot(partial(plots.drafts, points, lambda *at: plain * promise(part.steps, *at), engine), caption)
