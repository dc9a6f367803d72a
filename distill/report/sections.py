"""The sections of the report page: tables with plots, sentences and samples about them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from html import escape
from itertools import starmap

from distill.data.samples import QuestionTexts
from distill.errors import DataError
from distill.export import ExportReport
from distill.measuring.evaluation_results import (
    EvaluationReport,
    calibration_table,
    divergence_tables,
    position_tables,
)
from distill.measuring.speedup_results import Sample, SpeedupPart, SpeedupReport
from distill.measuring.speedup_tables import measurement_table, step_table
from distill.recipe.recipe import REASON
from distill.report import plots
from distill.report import tables as draft_tables
from distill.report.tables import RunResults
from distill.tables import Table, clean, html, known, listed, number, percent, placeless, size
from distill.training.saved import STORED, TrainingStep, TrainingSummary, trained_tokens

# ── The elements of the report page; every string that is not Html is escaped ──


class Html(str):
    """Text that is markup already; every other string is escaped before it enters the page."""


def as_text(value: object) -> str:
    return escape(clean(value))


def as_code(value: object) -> Html:
    return Html(f"<code>{as_text(value)}</code>")


def as_sentence(value: object) -> str:
    """Words in which backticks enclose code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", as_text(value))


def as_paragraph(value: object) -> Html:
    return Html(f"<p>{as_sentence(value)}</p>")


def as_command(command: object) -> Html:
    """The command that measured what stands above."""
    return Html(f'<p class="command">{as_text(placeless(command))}</p>')


def as_table(table: Table) -> Html:
    return Html(html(table))


def as_tables(tables: Iterable[Table]) -> Html:
    return Html("".join(map(as_table, tables)))


def as_plot(draw: Callable[[], str], caption: str) -> Html:
    try:
        drawn = draw()
    except DataError as error:
        return Html(f'<p class="notrun">Plot not drawn: {as_text(error.what)}. {as_code(error.hint)}</p>')
    return Html(f"<figure>{drawn}<figcaption>{as_text(caption)}</figcaption></figure>")


def as_plots(*drawn: Html) -> Html:
    return Html(f'<div class="plots">{"".join(drawn)}</div>')


def as_list(sentences: Sequence[str]) -> Html:
    """Sentences as a list; nothing where there are none."""
    return Html(f"<ul>{''.join(f'<li>{as_sentence(one)}</li>' for one in sentences)}</ul>" if sentences else "")


def as_details(summary: str, inner: str) -> Html:
    return Html(f"<details><summary>{as_text(summary)}</summary>{inner}</details>")


def absent(sentence: str) -> Html:
    """The line in place of results that there are none of."""
    return Html(f'<p class="notrun">{as_sentence(sentence)}</p>')


# ── The sections of the report page: tables with plots, sentences and samples about them ──


def texts(results: RunResults) -> Html:
    """What the draft learnt from and was measured on, and everything that was left out."""
    corpus, answers = results.corpus, results.answers
    assert corpus is not None
    notes = [f"Left out of the corpus: {listed(corpus.dropped)}."] if corpus.dropped else []
    if answers is not None and answers.answers:
        cut = f"{number(answers.not_ended)} of {number(answers.answers)} answers were cut short by a limit."
        notes.append(f"Answers by {answers.writer or 'the target'}: {cut}")
        if answers.dropped:
            notes.append(f"Answers left out: {listed(answers.dropped)}.")
    for split, held_out in results.held_out.items():
        out = f"; left out: {listed(held_out.dropped)}" if held_out.dropped else ""
        notes.append(
            f"Held out ({split}): {number(held_out.answers)} answers of {number(held_out.answer_tokens)} tokens, whose "
            f"distributions are stored and not learnt from{out}."
        )
    own = Html("") if results.questions is None else _questions(results.questions, results.command)
    return Html(as_tables(draft_tables.texts(results)) + own + as_list(notes))


def _questions(found: QuestionTexts, command: str) -> Html:
    """The questions that the target wrote itself, some of them, and what was left out."""
    notes = [f"Questions by {found.writer}, for instance: “{text}”" for one in found.sources for text in one.examples]
    for one in found.sources:
        if one.dropped:
            notes.append(f"Texts left out of {one.file}: {listed(one.dropped)}.")
    return Html(as_table(draft_tables.questions(found.sources, command)) + as_list(notes))


def cuts(results: RunResults) -> Html:
    """Sizes and KL after each operation on the donor."""
    return as_table(draft_tables.cuts(results))


def sparsity(results: RunResults) -> Html:
    """How the penalty spread over the layers and tensors."""
    assert results.sparsity is not None
    return Html(
        as_paragraph(results.sparsity.sentence) + as_tables(draft_tables.sparsity(results.sparsity, results.command))
    )


def training(results: RunResults) -> Html:
    """The curves of the training, its first and last step, and the weights that were taken."""
    steps, evaluated, summary = results.steps, results.evaluated, results.training
    if not steps:
        return absent(results.absence("train"))
    block = plots.block_length(steps)
    each = "every step" if block == 1 else f"each point the mean of {block} steps"
    stored = any(weights.measure == STORED for weights in evaluated)
    chosen_by = (
        "Acceptance probability on stored distributions of validation answers, bars are bounds; no rounds were decoded."
        if stored
        else "On validation prompts: conditional acceptance of decoded rounds, bars are 95 % intervals, and acceptance "
        "probability on texts that are the same for all steps."
    )
    drawn = [
        as_plot(partial(plots.training_curve, steps, "loss"), f"Loss on training batches, {each}."),
        as_plot(partial(plots.training_curve, steps, "agreement"), f"Agreement on training batches, {each}."),
        as_plot(partial(plots.validation_curve, evaluated), chosen_by),
    ]
    outcome = "" if summary is None else as_list(_outcome(summary))
    ends = as_table(draft_tables.ends(steps, results.command))
    return Html(as_plots(*drawn) + as_paragraph(_pace(steps)) + outcome + ends)


def _pace(steps: list[TrainingStep]) -> str:
    """One line on the length, speed and memory of the training."""
    rates = sorted(step.tokens_per_second for step in steps if known(step.tokens_per_second))
    memory = [step.memory_bytes for step in steps if step.memory_bytes is not None]
    return (
        f"{number(len(steps))} steps, {number(trained_tokens(steps))} tokens, median "
        f"{number(rates[len(rates) // 2] if rates else None, 0)} tokens/s, peak memory "
        f"{size(max(memory, default=None))}; first step {steps[0].time}, last step {steps[-1].time}."
    )


def _outcome(training: TrainingSummary) -> list[str]:
    """What was trained, and the weights that were taken."""
    loss = " + ".join(f"{weight:g} {name}" for name, weight in training.loss.items())
    sentences = [f"{number(training.steps)} steps at a peak rate of {training.rate:g}; loss: {loss}."]
    if best := training.best:
        reason = f", {REASON}" if best.measure == STORED else ""
        sentences.append(f"The weights of step {number(best.step)} were taken: {best.words}{reason}.")
    if training.warning:
        sentences.append(training.warning)
    return sentences


def positions(evaluation: EvaluationReport) -> Html:
    """Conditional acceptance of the trained draft by position."""
    rows = evaluation.positions.get("after", [])
    if not rows and evaluation.stored is not None:
        return absent(f"No rounds were decoded: {REASON}.")
    if not rows:
        return absent("No conditional acceptance by position was measured (`eval --acceptance`).")
    drawn = as_plot(partial(plots.acceptance_by_position, rows), "Of the trained draft; bars are intervals.")
    tables = position_tables(evaluation) + ([calibration_table(evaluation)] if evaluation.calibration_error else [])
    return Html(as_plots(drawn) + as_tables(tables))


def divergence(evaluation: EvaluationReport) -> Html:
    """Every measure by domain, before and after the training."""
    words = f"Before is the draft as cut from the donor, after is the trained draft; {evaluation.sampler_words}."
    stored = as_list(evaluation.stored.sentences) if evaluation.stored else ""
    return Html(as_paragraph(words) + stored + as_tables(divergence_tables(evaluation)))


def cost(report: SpeedupReport) -> Html:
    """Seconds of a step of both models, each timed alone."""
    drawn = [
        as_plot(
            partial(plots.cost_curves, part),
            f"{part.backend}: median time of one step of m tokens, with {part.steps.depth} in the cache. The "
            "flatter the curve, the more drafting pays.",
        )
        for part in report.parts
    ]
    return Html(as_plots(*drawn) + as_table(step_table(report.parts, report.command)))


def speedup(report: SpeedupReport) -> Html:
    """Speculative beside plain decoding by draft length, then the other configurations."""
    caption = "measured with intervals, predicted dashed; 1 is plain decoding of the same target."
    drawn = [
        as_plot(partial(plots.speedup_by_length, report.sweep, backend), f"{backend}: {caption}")
        for backend in dict.fromkeys(one.backend for one in report.sweep if one.length)
    ]
    note = (
        f"{number(report.prompts)} prompts, up to {number(report.new_tokens)} new tokens each; every configuration "
        "beside the plain run of the same sampler. The fastest way of each pair to the target's greedy text is bold. "
        "Greedy texts are compared with those of the plain run: a tie is a text that diverges where two logits are "
        "equal within rounding. Sampled texts differ by chance, so none is compared."
    )
    return Html(
        as_plots(*drawn)
        + as_paragraph(note)
        + as_table(measurement_table(report.measurements, report.command, report.best))
    )


def gguf(export: ExportReport) -> Html:
    """The files, and how closely llama.cpp reproduces their models' distributions and tokens."""
    mismatches = "".join(
        f"<li>{as_code(f'{file.path}: text {text}, first different token {token}')}</li>"
        for file in export.files
        for text, token in (file.parity.tokenizer_mismatches if file.parity else [])
    )
    return Html(
        as_table(draft_tables.files(export))
        + (as_details("Tokenizer mismatches", f"<ul>{mismatches}</ul>") if mismatches else "")
    )


def samples(report: SpeedupReport) -> Html:
    """Decoded texts, with the draft's tokens marked."""
    if not report.samples:
        return absent("No samples were kept.")
    legend = "<p><mark>Marked</mark>: drafted and accepted. Unmarked: the target's own. Pale: the prompt.</p>"
    return Html(legend + "".join(starmap(_sample, report.samples)) + as_command(report.command))


def _sample(part: SpeedupPart, sample: Sample) -> str:
    accepted = sum(len(part.text) for part in sample.segments if part.kind == "accepted")
    written = sum(len(part.text) for part in sample.segments)
    text = "".join(
        f"<mark>{as_text(part.text)}</mark>" if part.kind == "accepted" else as_text(part.text)
        for part in sample.segments
    )
    share = f", {percent(accepted / written)} of the characters from the draft" if written else ", nothing written"
    return (
        f"<h3>{as_text(part.pair)}</h3>"
        f'<p class="soft">{as_text(part.backend)}{share}</p>'
        f'<pre><span class="prompt">{as_text(sample.prompt)}</span>{text}</pre>'
    )
