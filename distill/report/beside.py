"""Several runs side by side: a line for each draft in each engine, the fastest first, and for each engine a picture of
what a draft costs and gains: its greedy acceptance against the cost of a step, over lines of equal predicted speed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from distill.data.repetition import NEW, SEEN
from distill.decoding.costs import tokens_per_round
from distill.folders import read_config
from distill.measuring.speedup_results import Measurement, SpeedupPart, StepFigures, speedup_of
from distill.measuring.verdict import WITHOUT, engine_of
from distill.recipe import Recipe
from distill.report import plots
from distill.report.card import gather
from distill.report.tables import RunResults
from distill.run import Run
from distill.tables import Block, Cell, Interval, Plot, Table, placeless

MOST_KEYS = 3  # keys in which recipes differ that have a column each
NOTE = (
    "The fastest lossless greedy way of each draft, plain decoding, and what needs no draft. D: a draft's step, in "
    "plain steps. Predicted: the best fixed length by D, the target's steps and the greedy acceptance."
)
ACCEPTED = ("acceptance", f"on {NEW} text", f"on {SEEN} text", "greedy")
FORMS = dict.fromkeys(("measured", "predicted"), "×") | dict.fromkeys(ACCEPTED, "%")
COLUMNS = ("measured", "predicted", "tokens/s", "D", "layers, M", "head, M", *ACCEPTED, "training, min")
Line = dict[str, Any]  # a row, by head: a draft in an engine, or a way without one


def beside_blocks(opened: Sequence[tuple[Recipe, Run]]) -> list[Block]:
    """The table, what makes these runs incomparable, and the pictures, where target and prompts are the same."""
    keys, lines = differing([recipe for recipe, _ in opened]), list[Line]()
    parts: dict[str, SpeedupPart] = {}
    facts: dict[str, dict[Any, list[str]]] = {}
    for at, (recipe, run) in enumerate(opened):
        results = None if run.done("cut") is None else gather(recipe, run)
        lines += lines_of(run, results, {"#": at + 1, "run": run.folder.name} | {key: keys[key][at] for key in keys})
        for part in results.speedup.parts if results and results.speedup else ():
            parts.setdefault(engine_of(part), part)
        for what, value in facts_of(run, results).items():
            facts.setdefault(what, {}).setdefault(value, []).append(run.folder.name)
    for engine, part in parts.items():
        own = [one for one in part.measurements if one.sampler is None and one.drafter in (None, *WITHOUT)]
        lines += [{"run": "no draft", "engine": engine} | measured(one) for one in own]
    order = [*parts, ""]
    lines.sort(key=lambda line: (order.index(line.get("engine", "")), -speed(line)))
    every = ("#", "run", *(keys if len(keys) <= MOST_KEYS else ()), "engine", "fastest way", *COLUMNS)
    heads = [head for head in every if any(line.get(head) is not None for line in lines)]
    best = [next(line for line in lines if line.get("engine") == engine) for engine in parts]
    classes = ["best" if line in best else "" if "#" in line else "plain" for line in lines]
    rows = [[Cell(line.get(head), FORMS.get(head, "")) for head in heads] for line in lines]
    notes = [
        f"These runs have different {what}, and figures that depend on them do not compare: "
        + " | ".join(", ".join(names[:3]) + ", …" * (len(names) > 3) for names in found.values())
        for what, found in facts.items()
        if len(found) > 1
    ]
    notes += [f"Their recipes differ in {len(keys)} keys: {', '.join(keys)}"] * (len(keys) > MOST_KEYS)
    alike = all(len(facts.get(what, ())) < 2 for what in ("targets", "test prompts"))
    drawn = [picture(lines, part) for part in parts.values()] if alike else []
    return [Table(heads, rows, note=NOTE, classes=classes), notes, *drawn]


def speed(line: Line) -> float:
    """The speedup of a line, 0 where none was measured."""
    found = line.get("measured")
    return found.mean if isinstance(found, Interval) else found or 0.0


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
        own_line = line | {"engine": engine_of(part)}
        if 1 in part.steps.draft:
            own_line["D"] = cost = part.steps.draft[1] / part.steps.target[1]
            if rate := line.get("greedy"):
                bounds = (promise(part.steps, cost, one) for one in (rate.mean, rate.low, rate.high))
                own_line["predicted"] = Interval(*bounds)
        yield own_line | (measured(max(rivals, key=lambda one: one.speedup)) if rivals else {})
    if timed is None:
        yield line | {"fastest way": "not measured yet"}


def measured(one: Measurement) -> Line:
    """A way to decode in a line."""
    gain = 1.0 if one.is_plain else speedup_of(one)
    return {"fastest way": one.configuration, "measured": gain, "tokens/s": one.tokens_per_second}


def promise(steps: StepFigures, cost: float, rate: float) -> float:
    """The speedup of the best fixed length, or of none, at an acceptance that is the same at every position and a draft
    step of so many plain steps."""
    tokens = {m: tokens_per_round([rate] * (m - 1)) for m in steps.target}
    return max(tokens[m] / (steps.target[m] / steps.target[1] + (m - 1) * cost) for m in tokens)


def facts_of(run: Run, results: RunResults | None) -> dict[str, Any]:
    """What must be the same of runs that are compared, as far as it is known."""
    corpus, facts = run.done("corpus"), dict[str, Any]()
    if corpus is not None:
        facts["targets"] = corpus["inputs"].get("target.model")
        facts["test prompts"] = run.artifacts_digest("corpus", "corpus/*-test.*")
    if results and results.evaluation:
        facts["samplers"] = results.evaluation.sampler_words
    if results and (timed := results.speedup):
        facts["machines"] = (timed.machine.get("cpu"), timed.machine.get("cores"))
        facts["numbers of prompts or tokens"] = (timed.prompts, timed.new_tokens)
    return facts


def differing(recipes: Sequence[Recipe]) -> dict[str, list[str]]:
    """The keys in which recipes differ, but for their names, with the value in each."""

    def flat(value: Any, key: str) -> Iterator[tuple[str, str]]:
        if isinstance(value, dict) and value:
            for name, inner in value.items():
                yield from flat(inner, f"{key}.{name}".lstrip("."))
        else:
            yield key, value if isinstance(value, str) else json.dumps(value)

    every = [dict(flat(placeless(one.model_dump(mode="json", exclude={"name"})), "")) for one in recipes]
    keys = dict.fromkeys(key for one in every for key in one)
    return {key: values for key in keys if len({*(values := [one.get(key, "–") for one in every])}) > 1}


def picture(lines: Sequence[Line], part: SpeedupPart) -> Plot:
    """The drafts of one engine."""
    engine, plain = engine_of(part), part.plain.tokens_per_second
    points = [
        (f"{one['#']}: {speed(one):.2f}× ({one['predicted'].mean:.2f})", one["D"], one["greedy"])
        for one in lines
        if one.get("engine") == engine and "predicted" in one
    ]
    caption = f"{engine}: drafts by number, with the speedup measured (predicted), over lines of equal tokens/s."
    return Plot(partial(plots.drafts, points, lambda *at: plain * promise(part.steps, *at), engine), caption)
