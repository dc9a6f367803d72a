"""eval.json as dataclasses, a label for every measure, and the tables for terminal, eval.md, page and model card."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from distill.data.samples import NEW, REPEATED, SEEN
from distill.files import Figure
from distill.tables import Block, Cell, Columns, Interval, Row, Table, counted, table_of

CEILING = "acceptance_ceiling"  # shown only if a draft is trimmed
DRAWN = "acceptance_drawn"  # shown only if a sampler draws

# The label of every measure, in the order of the tables and of the columns of `position_metrics`.
MEASURES = {
    "forward_kl": "KL(target ‖ draft), nats",
    "reverse_kl": "KL(draft ‖ target), nats",
    "acceptance_sampling": "acceptance probability, rejection sampling",
    DRAWN: "acceptance probability, llama-server's probabilistic drafts",
    "acceptance_match": "acceptance probability, draft's argmax = sampled token",
    "acceptance_greedy": "acceptance probability, greedy",
    CEILING: "ceiling of the acceptance probability: the target's mass on tokens the draft can propose",
}
RATES = {"acceptance_sampling", DRAWN, "acceptance_match", "acceptance_greedy"}  # shown in per cent

AGREEMENT = "top-1 agreement"  # the label if it is not an acceptance probability

# Groups of positions by name (the class of their prompt, or a slice), and the words with which their rows begin.
SLICES = {"depth": "tokens before it", "repetition": "in the text before"}
GROUPS = {"class": "class", **SLICES}

ALL = "all"  # the category of all questions of a suite
CONTEXT_CLASSES = 5  # classes of context lengths, each twice as long as the class before


def depth_label(place: int, longest: int) -> str:
    """Return the class of a position with this many tokens before it. Five classes double up to the `longest`."""
    top = 1 << max(longest.bit_length() - 1, CONTEXT_CLASSES - 2)
    least = top >> (CONTEXT_CLASSES - 2)
    low = 0 if place < least else 1 << (place.bit_length() - 1)
    return f"{low} to {(2 * low or least) - 1}"


def measured_of(longest: int, context: int | None, who: str, advice: str) -> str:
    """Return a sentence about a context that is at least twice as long as anything measured, or an empty text."""
    if context is None or longest >= context // 2:
        return ""
    return f"Nothing beyond {longest:,} tokens was measured, and {who} {context:,}: {advice}."


FEW_PROMPTS = 8  # An interval over fewer prompts is meaningless.
SIDES = ("before", "after")  # names of a run's drafts: as cut, and as trained


@dataclass(frozen=True)
class Divergences:
    """Every measure of one draft on the texts of one domain: means per token, with intervals that resample units.

    A unit is a prompt's text or a document. `prompts` counts the units, `tokens` their positions.
    """

    tokens: int
    prompts: int
    forward_kl: Interval
    reverse_kl: Interval
    acceptance_sampling: Interval
    acceptance_match: Interval
    acceptance_greedy: Interval
    acceptance_ceiling: Interval
    acceptance_drawn: Interval

    def measure(self, name: str) -> Interval:
        """Return one of MEASURES."""
        interval: Interval = getattr(self, name)
        return interval

    @property
    def trimmed(self) -> bool:
        """Whether the draft cannot propose every token of the target."""
        return self.acceptance_ceiling.mean < 1 - 1e-6


@dataclass(frozen=True)
class PositionAcceptance:
    """Conditional acceptance at one drafted position. `rate` is accepted ÷ drafted, among rounds that reached it."""

    position: int
    drafted: int
    accepted: int
    rate: Interval


ByText = dict[str, list[PositionAcceptance]]  # by kind of text, new and repeated


@dataclass(frozen=True)
class Group:
    """Positions of domain `answers` that share a label. `of` is one of GROUPS.

    `acceptance` is the acceptance probability as served, by draft. For a class of prompts, such as `math, thinking`,
    there are tokens per round by draft.
    """

    of: str
    label: str
    prompts: int
    tokens: int
    acceptance: dict[str, Interval]
    tokens_per_round: dict[str, Interval] = field(default_factory=dict)


@dataclass(frozen=True)
class CategoryFigures:
    """Tokens per round (accepted + 1) of a draft on the questions of a suite's category, at a temperature."""

    category: str
    questions: int
    draft: str
    temperature: float
    tokens_per_round: Interval


@dataclass(frozen=True)
class Bounds:
    """The lower and the upper mean that a compact store allows. NaN if it gives no bound."""

    least: Figure
    most: Figure


@dataclass(frozen=True)
class StoredMeasures:
    """What a run's evaluation rests on: the target's test answers, and its stored distributions on them.

    `source` gave the distributions. `exact` says that they are whole. `bounds` are by domain, draft and measure.
    `sampled` is, by draft, the share of the answers' tokens that equal the draft's argmax. `left_out` counts answers
    and documents that were not measured, by reason.
    """

    source: str
    exact: bool
    bounds: dict[str, dict[str, dict[str, Bounds]]]
    sampled: dict[str, Interval]
    left_out: dict[str, int] = field(default_factory=dict)

    @property
    def sentences(self) -> list[str]:
        """Return what a reader must know before quoting the figures."""
        sentences = [f"Measured on the target's own answers and the stored distributions of {self.source}."]
        if not self.exact:
            sentences.append(
                "The store has the likeliest tokens of a position and the mass of all others. The served sampler is "
                "applied to the stored tokens. Acceptance probabilities are exact if it draws only from these. "
                "Otherwise they are bounds: the table shows the middle, and the interval covers both. KL from draft to "
                "target, and any KL of a trimmed draft, cannot be bounded and is not measured."
            )
        sampled = [measures["acceptance_sampling"] for drafts in self.bounds.values() for measures in drafts.values()]
        widths = [bounds.most - bounds.least for bounds in sampled]
        if not self.exact and max(widths, default=0.0) > WIDE:
            sentences.append(
                f"The bounds of the acceptance probability are up to {max(widths):.2f} apart: a larger teacher.top_k "
                "narrows them (for servers, with a larger --max-logprobs)."
            )
        elif not self.exact:
            sentences.append(
                f"Here the bounds of the acceptance probability are at most {max(widths, default=0):.4f} apart."
            )
        if self.left_out:
            listed = ", ".join(f"{count} {reason}" for reason, count in self.left_out.items())
            sentences.append(f"Not measured: {listed}.")
        return sentences


WIDE = 0.05  # Bounds of an acceptance probability that are further apart are nearly meaningless.
SAMPLED = "share of the sampled answers' tokens that are the draft's argmax"  # label of StoredMeasures.sampled


@dataclass(frozen=True)
class EvaluationReport:
    """eval.json. Dictionaries without a domain are by draft.

    `length` is γ of the decoded rounds. `domains` is empty if no divergences were requested, and `positions` and
    `tokens_per_round` are empty if no rounds were. `groups` is empty if all prompts and positions are alike. `stored`
    belongs to a run, whose target is not run again. `differences` compare each draft's acceptance probability on
    `answers` with the first draft's, by prompt. `agreement` is, by draft, the top-1 agreement on the target's new and
    repeated text. `positions_by_text` are the positions in each. `beyond` says how much of the models' context was not
    measured. `suite` names a published suite and the part that was used, and `categories` are its figures. Both are
    empty for other prompts.
    """

    command: str
    sampler: dict[str, int | float]
    length: int
    domains: dict[str, dict[str, Divergences]]
    positions: dict[str, list[PositionAcceptance]]
    tokens_per_round: dict[str, Interval]
    stored: StoredMeasures | None = None
    groups: list[Group] = field(default_factory=list)
    differences: dict[str, Interval] = field(default_factory=dict)
    agreement: dict[str, dict[str, Interval]] = field(default_factory=dict)
    positions_by_text: dict[str, ByText] = field(default_factory=dict)
    beyond: str = ""
    suite: str = ""
    categories: list[CategoryFigures] = field(default_factory=list)
    version: Literal[1] = 1

    def __post_init__(self) -> None:
        if not all(self.domains.values()):
            raise ValueError("a domain without drafts")

    @property
    def by_position(self) -> dict[str, ByText]:
        """The positions of each draft, by kind of text if the kinds were distinguished."""
        return {name: self.positions_by_text.get(name, {"": found}) for name, found in self.positions.items()}

    @property
    def sampler_words(self) -> str:
        """The sampler's settings in words."""
        return ", ".join(f"{name} {value}" for name, value in self.sampler.items()) or "sampler not recorded"

    @property
    def acceptance_measure(self) -> str:
        """The acceptance probability that fits the sampler: greedy at temperature 0, otherwise rejection sampling."""
        return "acceptance_sampling" if self.sampler.get("temperature") else "acceptance_greedy"

    @property
    def agreement_words(self) -> list[str]:
        """A sentence with the top-1 agreement of each draft on new and repeated text. Empty if it is not known."""
        pairs = [
            f"{name}: " + ", ".join(f"{label} text {interval.mean:.1%}" for label, interval in by_kind.items())
            for name, by_kind in self.agreement.items()
        ]
        words = (
            f"{AGREEMENT.capitalize()} with the target on its own text (repeated: tokens that end {REPEATED} tokens "
        )
        return [f"{words}which occurred earlier, prompt included): {'; '.join(pairs)}."] if pairs else []


def shown_measures(drafts: Collection[Divergences]) -> list[str]:
    """Return the measures that have a row. The ceiling needs a trimmed draft, probabilistic drafts a measurement."""
    left_out = set() if any(draft.trimmed for draft in drafts) else {CEILING}
    if all(math.isnan(draft.acceptance_drawn.mean) for draft in drafts):
        left_out.add(DRAWN)
    return [name for name in MEASURES if name not in left_out]


BEFORE = "Before: the draft as cut from the donor; after: the trained draft."
TRIMMED = "A trimmed draft: KL(target ‖ draft) is between the distributions over the tokens that it can propose."


def form_of(measure: str) -> str:
    """Return the number format of a measure's figures."""
    return "%" if measure in RATES else ".4f"


def _divergences(domain: str, report: EvaluationReport) -> Table:
    """Return the table of a domain's measures, with a column for each draft."""
    drafts = report.domains[domain]
    rows: list[Row] = [
        [MEASURES[name], *(Cell(figures.measure(name), form_of(name)) for figures in drafts.values())]
        for name in shown_measures(drafts.values())
    ]
    if domain == "answers" and report.differences:
        label = f"{MEASURES[report.acceptance_measure]}: difference to the first, by prompt"
        rows.append([label, *(Cell(report.differences.get(name), "+.4f") for name in drafts)])
    if domain == "answers" and report.stored is not None:
        rows.append([SAMPLED, *(Cell(report.stored.sampled[name], "%") for name in drafts)])
    counts = [f"{counted(draft.tokens, 'token')}, {counted(draft.prompts, 'prompt')}" for draft in drafts.values()]
    rows.append(["measured on", *counts])
    notes = [BEFORE] * (drafts.keys() >= {*SIDES}) + [TRIMMED] * any(draft.trimmed for draft in drafts.values())
    return Table(["", *drafts], rows, report.command, domain, " ".join(notes))


def _of_acceptance(report: EvaluationReport) -> str:
    return f"{MEASURES[report.acceptance_measure]}, on the target's own text."


def _groups(report: EvaluationReport) -> Table:
    """Return acceptance probabilities by group of positions, with intervals for groups of enough prompts."""
    rounds = dict.fromkeys(draft for group in report.groups for draft in group.tokens_per_round)

    def figure(group: Group, interval: Interval | None, form: str) -> Cell:
        return Cell(interval if group.prompts >= FEW_PROMPTS or interval is None else interval.mean, form)

    rows: list[Row] = [
        [
            f"{GROUPS[group.of]}: {group.label or 'none'}",
            group.prompts,
            group.tokens,
            *(figure(group, interval, "%") for interval in group.acceptance.values()),
            *(figure(group, group.tokens_per_round.get(draft), ".2f") for draft in rounds),
        ]
        for group in report.groups
    ]
    heads = ["positions", "prompts", "tokens", *report.groups[0].acceptance]
    heads += [f"{draft}, tokens per round" for draft in rounds]
    few = any(group.prompts < FEW_PROMPTS for group in report.groups)
    note = f" Groups of fewer than {FEW_PROMPTS} prompts have no interval." if few else ""
    return Table(heads, rows, report.command, "by group of positions", _of_acceptance(report) + note)


def _positions(report: EvaluationReport) -> Table:
    """Return the conditional acceptance by drafted position."""
    columns: Columns[tuple[str, PositionAcceptance, dict[str, Interval]]] = {
        "draft": lambda row: row[0],
        "position": lambda row: row[1].position,
        "reached": lambda row: row[1].drafted,
        "accepted": lambda row: row[1].accepted,
        "conditional acceptance": lambda row: Cell(row[1].rate, "%"),
        "new text": lambda row: Cell(row[2].get(NEW), "%"),
        "repeated text": lambda row: Cell(row[2].get(SEEN), "%"),
    }
    rows = [
        (draft, acceptance, {kind: of[at].rate for kind, of in report.positions_by_text.get(draft, {}).items()})
        for draft, positions in report.positions.items()
        for at, acceptance in enumerate(positions)
    ]
    how = "greedy" if report.stored is None else "the draft's argmax against the target's own token"
    note = f"Accepted ÷ reached; {how}, up to {report.length} drafted. Tokens after a rejected token are not reached."
    return table_of(rows, columns, report.command, "conditional acceptance by draft position", note)


def _categories(report: EvaluationReport) -> list[Block]:
    """Return the table that papers print of a suite, and a line with suite, questions, tokens and verifiers."""
    if not report.suite:
        return []
    words = {True: "verifier token (rejection sampling)", False: "verifier greedy (the target's best token decides)"}
    temperatures = dict.fromkeys(figures.temperature for figures in report.categories)
    decided = [f"temperature {temperature:g}: {words[temperature > 0]}" for temperature in temperatures]
    columns: Columns[CategoryFigures] = {
        "category": lambda figures: figures.category,
        "draft": lambda figures: figures.draft,
        "temperature": lambda figures: Cell(figures.temperature, "g"),
        "questions": lambda figures: figures.questions,
        "tokens per round": lambda figures: figures.tokens_per_round,
    }
    note = (
        f"Accepted + 1, the mean accepted tokens of papers, with up to {report.length} drafted tokens; intervals "
        "resample questions. `distill speedup --suite` measures speed."
    )
    table = table_of(report.categories, columns, report.command, "by category", note)
    return [f"{'. '.join([report.suite, '; '.join(decided)])}.", table] if report.categories else [f"{report.suite}."]


def _rounds(report: EvaluationReport) -> Table:
    """Return the table of tokens per round."""
    columns: Columns[str] = {"draft": lambda name: name, "tokens per round": lambda name: report.tokens_per_round[name]}
    return table_of(report.tokens_per_round, columns, report.command, "rounds")


def evaluation_blocks(report: EvaluationReport) -> list[Block]:
    """Return the blocks of eval.md, which the terminal shows too."""
    return [
        *_categories(report),
        f"Sampler: {report.sampler_words}. Intervals resample prompts or documents.",
        *report.agreement_words,
        *([report.stored.sentences] if report.stored is not None else []),
        *(_divergences(domain, report) for domain in report.domains),
        *([_groups(report)] if report.groups else []),
        *([report.beyond] if report.beyond else []),
        *([_positions(report)] if report.positions else []),
        *([_rounds(report)] if report.tokens_per_round else []),
    ]
