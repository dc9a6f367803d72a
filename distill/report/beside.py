"""Several runs side by side: what each draft is, how much of it is accepted, and what it gains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distill.report.text import NOTHING, interval, known, number, speedup_interval
from distill.results.evaluation_results import MEASURES
from distill.results.run_results import RunResults
from distill.results.tables import markdown_table
from distill.results.training_results import trained_tokens

Figure = tuple[str, str, dict[str, Any]]  # what it is, as it is shown, and in numbers


def _figures(results: RunResults) -> list[Figure]:
    """The figures of one run; of each text domain acceptance, as the run's sampler decides it, and KL; of each pair and
    backend the speedup of the fastest way."""
    draft, evaluation = results.draft, results.evaluation
    figures: list[Figure] = [
        ("target", results.target.path, {"value": results.target.path}),
        ("parameters", number(draft.parameters), {"value": draft.parameters}),
        ("layers", number(draft.layers), {"value": draft.layers}),
    ]
    if results.steps:
        tokens = trained_tokens(results.steps)
        figures.append(("tokens trained on", number(tokens), {"value": tokens}))
    if evaluation is not None:
        for name, sides in evaluation.domains.items():
            for measure in (evaluation.acceptance_measure, "forward_kl"):
                after = sides["after"].measure(measure)
                shown = {"value": after.mean, "low": after.low, "high": after.high}
                figures.append((f"{MEASURES[measure]}, {name}", interval(after), shown))
    for best in results.speedup.best if results.speedup else ():
        shown = {"value": best.speedup, "low": best.speedup_low, "high": best.speedup_high}
        words = f"{speedup_interval(best)}: {best.configuration}"
        figures.append((f"speedup, {best.pair}, {best.backend}", words, shown | {"of": best.configuration}))
    return figures


def rows(runs: Sequence[RunResults]) -> list[dict[str, Any]]:
    """One row for each run and figure, in numbers; None where there is none."""
    empty = dict.fromkeys(("value", "low", "high", "of"))
    return [
        {"run": results.name, "figure": name}
        | empty
        | {key: one if isinstance(one, str) or known(one) else None for key, one in values.items()}
        for results in runs
        for name, _, values in _figures(results)
    ]


def table(runs: Sequence[RunResults]) -> str:
    """Markdown: a column for each run, a row for each figure; below it what makes them incomparable."""
    columns = [{name: shown for name, shown, _ in _figures(results)} for results in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    cells = [[name, *(column.get(name, NOTHING) for column in columns)] for name in names]
    found = markdown_table(["", *(results.name for results in runs)], cells)
    notes = [f"- {sentence}" for sentence in differences(runs)]
    return "\n".join([found, *([""] if notes else []), *notes])


def differences(runs: Sequence[RunResults]) -> list[str]:
    """Why figures of these runs cannot be compared, one sentence each."""
    evaluated = [results.evaluation for results in runs if results.evaluation is not None]
    timed = [results.speedup for results in runs if results.speedup is not None]
    told: dict[str, dict[str, set[Any]]] = {
        "acceptance": {
            "targets": {results.target.path for results in runs},
            "samplers": {one.sampler_words for one in evaluated},
            "test texts": {tuple((k, v["after"].tokens) for k, v in one.domains.items()) for one in evaluated},
        },
        "speedup": {
            "machines": {(one.machine.get("cpu"), one.machine.get("cores")) for one in timed},
            "numbers of prompts": {(one.prompts, one.new_tokens) for one in timed},
        },
    }
    return [
        f"These runs have different {' and '.join(names)}: a difference in {figure} may come from that."
        for figure, sets in told.items()
        if (names := [name for name, found in sets.items() if len(found) > 1])
    ]
