"""The tables of `distill eval`: for the terminal, eval.md, the report page and the model card."""

from __future__ import annotations

from collections.abc import Callable

from distill.intervals import Interval
from distill.measuring.evaluation_results import (
    CEILING,
    FEW_PROMPTS,
    MEASURES,
    RATES,
    RELIABILITIES,
    SAMPLED,
    SAMPLED_MEANS,
    SIDES,
    SLICES,
    ClassResult,
    Divergences,
    EvaluationReport,
    PositionAcceptance,
    Reliability,
    StoredMeasures,
    shown_measures,
)
from distill.tables import NOTHING, Block, Cell, Columns, Row, Table, Value, bullets, counted, known, table_of

PREDICTED = (
    "T(1) is a step of the target over one token, D one of the draft. Speedups are predicted from measured steps, with "
    "the acceptance probability of a single position at every drafted one; they leave out what a round costs beside "
    "its steps. `distill speedup` measures."
)
TRIMMED = "A trimmed draft: KL(target ‖ draft) is between the distributions over the tokens it can propose."


def divergence_tables(report: EvaluationReport) -> list[Table]:
    """Every measure by domain; of a store also its bounds; then the acceptance probability by class and by slice."""
    tables = [_divergences(domain, drafts, report.command) for domain, drafts in report.domains.items()]
    if report.stored is not None:
        tables += _stored(report.stored, report.command)
    tables += [_classes(report)] if report.classes else []
    return tables + ([_slices(report)] if report.slices else [])


def form_of(measure: str) -> str:
    """The form of a measure's figures."""
    return "%" if measure in RATES else ".4f"


def _divergences(domain: str, drafts: dict[str, Divergences], command: str) -> Table:
    """The drafts side by side; of a run also what the training changed."""
    both = drafts.keys() >= {*SIDES}
    rows: list[Row] = []
    for name in shown_measures(drafts.values()):
        measured = {draft: found.measure(name) for draft, found in drafts.items()}
        change = [_change(name, *(measured[side] for side in SIDES))] if both else []
        rows.append([MEASURES[name], *(Cell(one, form_of(name)) for one in measured.values()), *change])
    counts = [f"{counted(one.tokens, 'token')}, {counted(one.prompts, 'prompt')}" for one in drafts.values()]
    rows.append(["measured on", *counts, *[""] * both])
    note = TRIMMED if any(draft.trimmed for draft in drafts.values()) else ""
    return Table(["", *drafts, *["change"] * both], rows, command, domain, note)


def _change(measure: str, before: Interval, after: Interval) -> str:
    rise = after.mean - before.mean
    if not known(rise):
        return NOTHING
    return f"{100 * rise:+.1f} points" if measure in RATES else f"{rise:+.4f}"


def pair_blocks(report: EvaluationReport) -> list[Block]:
    """Each pair beside the first, what its steps predict, and the stretches that it is accepted least on."""
    answers, measure = report.domains["answers"], report.acceptance_measure
    costs = {name: one.costs for name, one in report.pairs.items() if one.costs is not None}
    columns: dict[str, Callable[[str], Cell | Value]] = {
        "pair": lambda name: name,
        "KL, nats": lambda name: Cell(answers[name].forward_kl, ".4f"),
        "acceptance probability": lambda name: Cell(answers[name].measure(measure), "%"),
        "difference to the first, by prompt": lambda name: Cell(report.pairs[name].difference, "+.4f"),
    }
    if costs:
        columns |= {
            "target": lambda name: Cell(costs[name].target_bytes, "size"),
            "draft": lambda name: Cell(costs[name].draft_bytes, "size"),
            "T(1), ms": lambda name: costs[name].target_seconds[0] * 1e3,
            "D, ms": lambda name: costs[name].draft_seconds * 1e3,
            "drafted": lambda name: costs[name].length,
            "speedup": lambda name: Cell(costs[name].speedup, "×"),
            "tokens/s": lambda name: Cell(costs[name].tokens_per_second, ".1f"),
        }
    fastest = max(costs, key=lambda name: costs[name].tokens_per_second, default=None)
    best = ["best" if name == fastest and costs[name].length else "" for name in report.pairs]
    worst = [
        f"{name}: {stretch.acceptance:.3f} in {stretch.text!r}"
        for name, one in report.pairs.items()
        for stretch in one.worst
    ]
    note = f"Acceptance probability: {_of_acceptance(report)}{f' {PREDICTED}' if costs else ''}"
    table = table_of(report.pairs, columns, report.command, "all pairs", note, best)
    return [table, "Accepted least:", bullets(worst)]


def _stored(stored: StoredMeasures, command: str) -> list[Table]:
    """The bounds that the store gives for each mean, and what the sampled answers show."""
    tables = []
    for domain, drafts in stored.bounds.items():
        rows: list[Row] = [
            [MEASURES[name], draft, Cell(one.least, form_of(name)), Cell(one.most, form_of(name))]
            for draft, found in drafts.items()
            for name, one in found.items()
            if name != CEILING
        ]
        tables.append(Table(["", "draft", "least", "most"], rows, command, f"{domain}, bounds of the means"))
    row: Row = [SAMPLED, *(Cell(found, "%") for found in stored.sampled.values())]
    return [*tables, Table(["", *stored.sampled], [row], command, "sampled answers", SAMPLED_MEANS)]


def _of_acceptance(report: EvaluationReport) -> str:
    return f"{MEASURES[report.acceptance_measure]}, on the target's own text."


def _classes(report: EvaluationReport) -> Table:
    """Acceptance probability and tokens per round by class of prompt, intervals where a class has enough prompts."""
    first = report.classes[0]

    def figure(one: ClassResult, found: Interval, form: str) -> Cell:
        return Cell(found if one.prompts >= FEW_PROMPTS else found.mean, form)

    rows: list[Row] = [
        [
            one.name or "none",
            one.prompts,
            one.tokens,
            *(figure(one, one.acceptance[draft], "%") for draft in first.acceptance),
            *(figure(one, one.tokens_per_round[draft], ".2f") for draft in first.tokens_per_round),
        ]
        for one in report.classes
    ]
    heads = ["class", "prompts", "tokens", *first.acceptance]
    heads += [f"{draft}, tokens per round" for draft in first.tokens_per_round]
    few = any(one.prompts < FEW_PROMPTS for one in report.classes)
    note = f" Classes of fewer than {FEW_PROMPTS} prompts have no interval." if few else ""
    return Table(heads, rows, report.command, "by class of prompt", _of_acceptance(report) + note)


def _slices(report: EvaluationReport) -> Table:
    """Acceptance probability by slice of positions."""
    rows: list[Row] = [
        [
            f"{SLICES[one.slice]}: {one.label}",
            one.tokens,
            Cell(one.share, "%"),
            *(Cell(found, "%") for found in one.acceptance.values()),
        ]
        for one in report.slices
    ]
    heads = ["positions", "tokens", "share", *report.slices[0].acceptance]
    return Table(heads, rows, report.command, "by slice of positions", _of_acceptance(report))


def position_tables(report: EvaluationReport) -> list[Table]:
    """Conditional acceptance by drafted position, and what a round gives."""
    columns: Columns[tuple[str, PositionAcceptance]] = {
        "draft": lambda one: one[0],
        "position": lambda one: one[1].position,
        "reached": lambda one: one[1].drafted,
        "accepted": lambda one: one[1].accepted,
        "conditional acceptance": lambda one: Cell(one[1].rate, "%"),
    }
    rows = [(draft, one) for draft, positions in report.positions.items() for one in positions]
    note = f"Accepted ÷ reached; greedy, up to {report.length} drafted. A token after a rejected one is not reached."
    rounds: list[Row] = [[draft, found] for draft, found in report.tokens_per_round.items()]
    return [
        table_of(rows, columns, report.command, "conditional acceptance by draft position", note),
        *([Table(["draft", "tokens per round"], rounds, report.command, "rounds")] if rounds else []),
    ]


def reliability_table(report: EvaluationReport) -> Table:
    """What a draft's probabilities promise, beside what was accepted: of all tokens, and by bin."""
    columns: Columns[tuple[str, Reliability]] = {
        "draft": lambda one: one[0],
        "probability of": lambda one: RELIABILITIES[one[1].of],
        "tokens": lambda one: one[1].tokens,
        "promised": lambda one: Cell(one[1].promised, "%"),
        "accepted": lambda one: Cell(one[1].accepted, "%"),
        "calibration error": lambda one: Cell(one[1].error, ".3f"),
        "by chance alone": lambda one: Cell(one[1].error_of_chance, ".3f"),
    }
    found = [(draft, one) for draft, parts in report.reliability.items() for one in parts]
    return table_of(found, columns, report.command, "the draft's own probabilities")


def bin_table(report: EvaluationReport) -> Table:
    """The same by bin of the promised probability."""
    rows: list[Row] = [
        [
            draft,
            RELIABILITIES[part.of],
            f"{one.low:.1f} to {one.high:.1f}",
            one.tokens,
            Cell(one.promised, "%"),
            Cell(one.accepted, "%"),
        ]
        for draft, parts in report.reliability.items()
        for part in parts
        for one in part.bins
    ]
    heads = ["draft", "probability of", "between", "tokens", "promised", "accepted"]
    return Table(heads, rows, report.command, "the draft's own probabilities, by bin")


def evaluation_blocks(report: EvaluationReport) -> list[Block]:
    """eval.md, which the terminal shows too."""
    return [
        f"Sampler: {report.sampler_words}. Intervals resample prompts or documents.",
        *([bullets(report.stored.sentences)] if report.stored is not None else []),
        *divergence_tables(report),
        *(pair_blocks(report) if report.pairs else []),
        *(position_tables(report) if report.positions else []),
        *([reliability_table(report), bin_table(report)] if report.reliability else []),
    ]
