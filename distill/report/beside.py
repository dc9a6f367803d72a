"""Several runs side by side: what each draft is, how much of it is accepted, and what it gains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distill.results.evaluation_results import MEASURES
from distill.results.evaluation_tables import form_of
from distill.results.run_results import RunResults
from distill.results.speedup_tables import speedup_of
from distill.results.training_results import trained_tokens
from distill.tables import Block, Cell, Row, Table, Value, bullets


def _figures(results: RunResults) -> dict[str, Cell | Value]:
    """The figures of one run; of each text domain acceptance, as the run's sampler decides it, and KL; of each pair and
    backend the fastest way and its speedup."""
    draft, evaluation = results.draft, results.evaluation
    figures: dict[str, Cell | Value] = {
        "target": results.target.path,
        "parameters": draft.parameters,
        "layers": draft.layers,
    }
    if results.steps:
        figures["tokens trained on"] = trained_tokens(results.steps)
    if evaluation is not None:
        for name, sides in evaluation.domains.items():
            for measure in (evaluation.acceptance_measure, "forward_kl"):
                figures[f"{MEASURES[measure]}, {name}"] = Cell(sides["after"].measure(measure), form_of(measure))
    for best in results.speedup.best if results.speedup else ():
        figures[f"fastest, {best.pair}, {best.backend}"] = best.configuration
        figures[f"speedup, {best.pair}, {best.backend}"] = Cell(speedup_of(best), "×")
    return figures


def beside_blocks(runs: Sequence[RunResults]) -> list[Block]:
    """A column for each run, a row for each figure; below it what makes them incomparable."""
    columns = [_figures(results) for results in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    rows: list[Row] = [[name, *(column.get(name) for column in columns)] for name in names]
    return [Table(["figure", *(results.name for results in runs)], rows), bullets(differences(runs))]


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
