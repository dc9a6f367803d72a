"""Several runs side by side.

The table has a line for each draft in each engine, the fastest first. Each engine also has a picture of what a draft
costs and gains: its greedy acceptance against the cost of a step, over lines of equal predicted speed.
"""

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
SHORT = 7  # This many columns, up to the acceptance, fit on a page.
Line = dict[str, Any]  # The row of a draft in an engine, or of decoding without a draft, by column head.


def beside_blocks(opened: Sequence[tuple[Recipe, Run]]) -> tuple[Table, list[Block], list[Plot]]:
    """Return the table, the blocks of text, and the pictures of runs that are compared.

    The text names the facts in which the runs differ. If target and test prompts are the same, it also has the verdict
    and the commands of the run that gains most, and there are pictures, the first of that run's engine.
    """
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
        greedy = [row for row in part.measurements if row.sampler is None]
        without_draft = [row for row in greedy if row.drafter in (None, *WITHOUT)]
        lines += [{"run": "no draft", "engine": engine} | measured(row) for row in without_draft]
    order = [*parts, ""]
    lines.sort(key=lambda line: (order.index(line.get("engine", "")), -speed(line)))
    best = [next(line for line in lines if line.get("engine") == engine) for engine in parts]
    classes = ["best" if line in best else "" if "#" in line else "plain" for line in lines]
    rows = [[Cell(line.get(head), FORMS.get(head, "")) for head in HEADS] for line in lines]
    unlike = [what for what, values in facts.items() if len(values) > 1]
    blocks: list[Block] = []
    if unlike:
        blocks = [f"These runs have different {' and '.join(unlike)}: figures that depend on them do not compare."]
    table = Table(HEADS, rows, note=NOTE, classes=classes)
    if {"targets", "test prompts"} & {*unlike} or not timed:
        return table, blocks, []
    first = engine_of(leader(timed[most])[0])
    order.sort(key=lambda engine: engine != first)
    blocks += [f"{most}: {timed[most].verdict}", Code(next_steps(timed[most]), "sh")]
    return table, blocks, [picture(lines, parts[engine]) for engine in order if engine]


def gain(report: SpeedupReport) -> float:
    """Return the ratio of the speed of a run's fastest way to that of the fastest plain decoding."""
    _, _, best, plain, _ = leader(report)
    return best / plain


def lines_of(run: Run, results: RunResults | None, line: Line) -> Iterator[Line]:
    """Yield a line for each engine that a run measured, or a single line without one."""
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
        by_text = [group for group in found.groups if group.of == "repetition"]
        line |= {f"on {group.label} text": group.acceptance.get("after") for group in by_text}
    for part in timed.parts if timed else ():
        rivals = [row for row in timed.rivals if row.key == part.key and row.drafter not in WITHOUT] if timed else []
        line |= {"engine": engine_of(part), "D": None, "predicted": None}
        if 1 in part.steps.draft:
            line["D"] = part.steps.draft[1] / part.steps.target[1]
            if rate := line.get("greedy"):
                bounds = (promise(part.steps, line["D"], value) for value in (rate.mean, rate.low, rate.high))
                line["predicted"] = Interval(*bounds)
        yield line | (measured(max(rivals, key=lambda row: row.speedup)) if rivals else {})
    if timed is None or not timed.parts:
        yield line | {"fastest way": "not measured yet"}


def measured(row: Measurement) -> Line:
    """Return the part of a line that a measured configuration fills."""
    gain = 1.0 if row.is_plain else speedup_of(row)
    return {"fastest way": row.configuration, "measured": gain, "tokens/s": row.tokens_per_second}


def speed(line: Line) -> float:
    """Return the speedup of a line, or 0 if none was measured."""
    gain = line.get("measured")
    return gain.mean if isinstance(gain, Interval) else gain or 0.0


def promise(steps: StepFigures, cost: float, rate: float) -> float:
    """Predict the speedup of the best fixed length, including length 0.

    `rate` is the acceptance, the same at every position. `cost` is that of a draft step, in plain steps.
    """
    tokens = {m: tokens_per_round([rate] * (m - 1)) for m in steps.target}
    return max(tokens[m] / (steps.target[m] / steps.target[1] + (m - 1) * cost) for m in tokens)


def facts_of(run: Run, results: RunResults | None) -> dict[str, Any]:
    """Return the facts that must be equal for a comparison of runs, as far as they are known."""
    corpus = run.done("corpus") or {"inputs": {}}
    facts = {
        "targets": corpus["inputs"].get("target.model"),
        "test prompts": run.artifacts_digest("corpus", "corpus/*-test.*"),
        "samplers": results.evaluation.sampler_words if results and results.evaluation else None,
        "machines": results.speedup.machine.get("cpu") if results and results.speedup else None,
    }
    return {what: value for what, value in facts.items() if value is not None}


def picture(lines: Sequence[Line], part: SpeedupPart) -> Plot:
    """Return the picture of the drafts of one engine."""
    engine, plain = engine_of(part), part.plain.tokens_per_second
    drawn = [line for line in lines if line.get("engine") == engine and line.get("predicted")]
    points = [(f"{line['#']}", line["D"], line["greedy"]) for line in drawn]
    caption = f"{engine}: the drafts by their number (#), over lines of equal predicted tokens per second."
    return Plot(partial(plots.drafts, points, lambda *at: plain * promise(part.steps, *at), engine), caption)
