"""The section on what the draft learnt from and was measured on: documents, prompts and answers by class and mode."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from distill.report.html import Html, as_list, as_table
from distill.report.text import NOTHING, number, percent
from distill.results.run_results import RunResults
from distill.results.text_results import QuestionTexts, TextCount


def texts(results: RunResults) -> Html:
    """The splits of the corpus, the prompts and answers by class and mode, and everything that was left out."""
    corpus, answers = results.corpus, results.answers
    assert corpus is not None
    splits = {"train": corpus.train, "validation": corpus.validation, "test": corpus.test}
    table = as_table(
        ["split", "documents", "tokens of given text", "prompts"],
        [[name, *map(number, (one.documents, one.tokens, one.prompts))] for name, one in splits.items()],
        results.command,
    )
    own = {} if answers is None else _by_class(answers.by_class)
    asked = _by_class(corpus.train.asked)
    rows: list[list[object]] = [
        [name, *_cells(asked.get(name)), *_cells(own.get(name))] for name in dict.fromkeys([*asked, *own])
    ]
    heads = ["train prompts", "prompts", "their tokens", "answers kept", "their tokens"]
    parts = [table, as_table(heads, rows, results.command) if rows else Html("")]
    notes = [f"Left out of the corpus: {_listed(corpus.dropped)}."] if corpus.dropped else []
    if answers is not None and answers.answers:
        cut = f"{number(answers.not_ended)} of {number(answers.answers)} answers were cut short by answers.new_tokens."
        notes.append(f"Answers by {answers.writer or 'the target'}: {cut}")
        if answers.dropped:
            notes.append(f"Answers left out: {_listed(answers.dropped)}.")
    for split, texts in results.held_out.items():
        out = f"; left out: {_listed(texts.dropped)}" if texts.dropped else ""
        notes.append(
            f"Held out ({split}): {number(texts.answers)} answers of {number(texts.answer_tokens)} tokens, whose "
            f"distributions are stored and not learnt from{out}."
        )
    if results.questions is not None:
        parts.append(_questions(results.questions, results.command))
    return Html("".join(parts) + (as_list(notes) if notes else ""))


def _questions(found: QuestionTexts, command: str) -> Html:
    """The questions that the target wrote itself: how many, how varied, some of them, and what was left out."""
    heads = [
        "self-asked questions",
        *("wanted", "texts written", "usable", "used", "median tokens", "90th percentile"),
        *("different words", "2-grams", "3-grams", "repeats"),
    ]
    rows: list[list[object]] = [
        [
            f"{one.file}, T {one.temperature:g}, top-p {one.top_p:g}",
            *map(number, (one.wanted, one.asked, one.usable, one.kept)),
            *(number(length, 1) for length in (one.median_tokens, one.most_tokens)),
            *map(percent, (*one.distinct, one.repeated)),
        ]
        for one in found.sources
    ]
    notes = [f"Questions by {found.writer}, for instance: “{text}”" for one in found.sources for text in one.examples]
    for one in found.sources:
        if one.dropped:
            notes.append(f"Texts left out of {one.file}: {_listed(one.dropped)}.")
        if len(one.turns) > 1 or one.dropped_turns:
            turns = ", ".join(f"{number(count)} of {turn}" for turn, count in one.turns.items())
            over = f"; ended early: {_listed(one.dropped_turns)}" if one.dropped_turns else ""
            notes.append(f"User's turns of the conversations in {one.file}: {turns}{over}.")
    return Html(as_table(heads, rows, command) + as_list(notes))


def _by_class(counts: Iterable[TextCount]) -> dict[str, TextCount]:
    return {", ".join(part for part in (one.label, one.mode) if part) or "all": one for one in counts}


def _cells(count: TextCount | None) -> list[object]:
    return [NOTHING, NOTHING] if count is None else [number(count.texts), number(count.tokens)]


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number(count)} {reason}" for reason, count in counts.items())
