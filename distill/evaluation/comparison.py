"""Several drafts of a target, or one draft on several targets, on the same prompts: differences paired by prompt.

Which of two drafts is better? Does the draft of a model still serve its fine-tune?
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from distill.errors import DataError
from distill.evaluation.measure import Measured
from distill.evaluation.metrics import METRICS
from distill.evaluation.slices import SlicedValues
from distill.evaluation.stage import pack_answers
from distill.evaluation.standalone import continued, corpus_of, measured_values, open_pair, prompts_of
from distill.intervals import Interval, paired_ratio_interval
from distill.recipe import Evaluate, Gguf, is_path
from distill.results.evaluation_results import MEASURES
from distill.results.tables import markdown_table
from distill.sampler import Sampler
from distill.texts import Prompt

STRETCH = 16  # tokens of a stretch
WORST = 3  # stretches shown, each of another prompt


@dataclass(frozen=True)
class Stretch:
    """A stretch of a target's own text, with the mean acceptance of its tokens."""

    text: str
    acceptance: float


@dataclass(frozen=True)
class ComparedDraft:
    """A draft on its target's own text behind the prompts.

    `difference` is its acceptance less that of the first row, paired by prompt; None for the first. `worst` are the
    stretches that it is accepted least on.
    """

    target: str
    draft: str
    tokens: int
    forward_kl: Interval
    acceptance: Interval
    difference: Interval | None
    worst: list[Stretch]


@dataclass(frozen=True)
class DraftComparison:
    """All rows, on `prompts` prompts; `measure` is the acceptance that fits the sampler."""

    command: str
    sampler: dict[str, int | float]
    measure: str
    prompts: int
    rows: list[ComparedDraft]


def compare(
    pairs: Sequence[tuple[str, str]],
    text: Sequence[Path],
    sampler: Sampler,
    prompts: int,
    command: str,
    threads: int | None,
    gguf: Gguf | None,
) -> DraftComparison:
    """Pairs of target and draft, each on its target's own text behind the same prompts.

    Raises DataError where the texts give fewer than 4 prompts, PairError for a draft of another vocabulary.
    """
    corpus = corpus_of(text)
    settings, texts = Evaluate(), dict[str, list[list[int]]]()
    measure = "acceptance_sampling" if sampler.temperature else "acceptance_greedy"
    column = METRICS.index(measure)
    read: dict[tuple[str, int], list[Prompt]] = {}
    asked: list[str] = []
    rows: list[ComparedDraft] = []
    first: Measured | None = None
    for target, draft in pairs:
        with open_pair(target, draft, corpus.block, threads, gguf) as pair:
            size = min(pair.target.vocabulary_size, pair.draft.vocabulary_size)
            room = min(corpus.block, pair.target.capacity, pair.draft.capacity)
            if (pair.reference, room) not in read:
                read[pair.reference, room] = prompts_of(pair.reference, corpus, prompts, room).measured
            found = read[pair.reference, room]
            ids, names = [one.ids for one in found], [one.id for one in found]
            if asked and asked != names:
                raise DataError(
                    f"{short_name(target)} and {short_name(draft)} have room for other prompts than the models before",
                    "give prompts that fit all of them",
                )
            asked = names
            if target not in texts:
                limit = min(settings.new_tokens, room - max(map(len, ids)))
                texts[target] = continued(pair, found, sampler, limit, size)
            own = texts[target]
            blocks = pack_answers(ids, own, room)
            sliced = SlicedValues.of(blocks, pair.token_bytes, pair.ends)
            measured = measured_values(pair, blocks, sampler, size, "answers", sliced)["draft"]
            result = measured.divergences()
            difference = None
            if first is not None:
                sums = [by_unit(one, column, len(ids)) for one in (first, measured)]
                difference = paired_ratio_interval(*sums[0], *sums[1])
            worst = worst_stretches(sliced, column, own, pair.token_bytes)
        first = first or measured
        rows.append(
            ComparedDraft(
                short_name(target),
                short_name(draft),
                result.tokens,
                result.forward_kl,
                result.measure(measure),
                difference,
                worst,
            )
        )
    return DraftComparison(command, sampler.describe(), measure, len(ids), rows)


def short_name(reference: str) -> str:
    """A model without the folders it lies in."""
    return Path(reference).name if is_path(reference) else reference


def by_unit(measured: Measured, column: int, units: int) -> tuple[Any, Any]:
    """Sums of a measure and counts [U] of all prompts, 0 for one whose text is empty."""
    sums, counts = numpy.zeros(units), numpy.zeros(units)
    sums[measured.units], counts[measured.units] = measured.least[:, column], measured.counts
    return sums, counts


def worst_stretches(
    sliced: SlicedValues, column: int, texts: Sequence[Sequence[int]], token_bytes: Callable[[int], bytes]
) -> list[Stretch]:
    """The stretch of least acceptance of each prompt's text; of these the least accepted."""
    found = []
    for number, parts in sliced.values["draft"].items():
        accepted = numpy.concatenate([part[:, column].numpy() for part in parts])
        ends = range(STRETCH, len(accepted) + 1) or [len(accepted)]
        at = min(ends, key=lambda end: accepted[max(0, end - STRETCH) : end].mean())
        tokens = texts[number][max(0, at - STRETCH) : at]
        text = b"".join(map(token_bytes, tokens)).decode("utf-8", "replace")
        found.append(Stretch(text, float(accepted[max(0, at - STRETCH) : at].mean())))
    return sorted(found, key=lambda stretch: stretch.acceptance)[:WORST]


def as_markdown(comparison: DraftComparison) -> str:
    """A row for each pair, then the stretches that each is accepted least on."""
    served = ", ".join(f"{name} {value}" for name, value in comparison.sampler.items())
    title = f"{MEASURES[comparison.measure]}, on the targets' own text behind {comparison.prompts} prompts; {served}"
    rows = []
    for row in comparison.rows:
        figures = [f"{one.mean:.4f} [{one.low:.4f}, {one.high:.4f}]" for one in (row.forward_kl, row.acceptance)]
        gap = row.difference
        rise = "" if gap is None else f"{gap.mean:+.4f} [{gap.low:+.4f}, {gap.high:+.4f}]"
        rows.append([row.target, row.draft, str(row.tokens), *figures, rise])
    heads = ["target", "draft", "tokens", "KL, nats", "acceptance", "difference to the first, by prompt"]
    blocks = [title, markdown_table(heads, rows, "llr"), f"Stretches of {STRETCH} tokens that are accepted least:"]
    blocks.append(
        "\n".join(
            f"- {row.draft} for {row.target}: {stretch.acceptance:.3f} in {stretch.text!r}"
            for row in comparison.rows
            for stretch in row.worst
        )
    )
    return "\n\n".join([*blocks, f"`{comparison.command}`"]) + "\n"


def flat_rows(comparison: DraftComparison) -> list[dict[str, Any]]:
    """A row for each pair, for jsonl and csv."""
    flat = []
    for row in comparison.rows:
        values: dict[str, Any] = {"target": row.target, "draft": row.draft, "tokens": row.tokens}
        for name in ("forward_kl", "acceptance", "difference"):
            interval = getattr(row, name)
            for part in ("mean", "low", "high"):
                values[f"{name}_{part}"] = None if interval is None else getattr(interval, part)
        flat.append(values)
    return flat
