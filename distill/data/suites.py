"""Published suites of questions: Spec-Bench, MT-Bench and SPEED-Bench, as their files are published.

A record has `question_id`, `category` and `turns`, the user's messages. The second turn is asked after the target's
own answer to the first.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from distill.data.chat_template import ChatTemplate, next_prompt
from distill.data.prompts import ENDINGS, SEED, ChatPrompts
from distill.data.records import turns_of
from distill.data.samples import Sample, last_tokens
from distill.data.sources import Document, read_records
from distill.engines.tokenizer import open_tokenizer
from distill.errors import DataError
from distill.files import file_digest, has_form, names_of, require_path
from distill.recipe import Chat, Source

FORM = {"category": str, "turns": [str]}
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
SPEC_BENCH = (*MT_BENCH, "translation", "summarization", "qa", "math_reasoning", "rag")
SPEED_BENCH = (*(name for name in MT_BENCH if name != "extraction"), "summarization", "qa", "rag", "multilingual")
NAMES = {
    frozenset(MT_BENCH): "MT-Bench",
    frozenset(SPEC_BENCH): "Spec-Bench",
    frozenset(SPEED_BENCH): "SPEED-Bench",
}
# SPEED-Bench's files hold this text in place of questions that NVIDIA may not pass on.
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"


@dataclass(frozen=True)
class Question:
    """A question of a suite. `kind` is the category in the file, and `category` is the category in papers."""

    id: str
    category: str
    kind: str
    turns: tuple[str, ...]


@dataclass(frozen=True)
class Suite:
    """A suite and the questions in its file. `digest` is the beginning of the file's SHA-256."""

    name: str
    file: str
    digest: str
    questions: list[Question]

    def take(self, count: int | None, seed: int) -> list[Question]:
        """Return `count` questions of each category (None: all questions).

        The seed draws the questions. Kinds alternate within a category, and categories alternate in the result, so that
        any beginning of it resembles the whole.
        """
        drawn = sorted(self.questions, key=lambda each: hashlib.sha256(f"{seed}/{each.id}".encode()).digest())
        categories = dict.fromkeys(question.category for question in self.questions)
        ordered = [in_turns([each for each in drawn if each.category == name], "kind") for name in categories]
        return in_turns(chain.from_iterable(part[:count] for part in ordered), "category")

    def words(self, chosen: Sequence[Question], turns: int, seed: int) -> str:
        """Return a phrase with the name of the suite and the numbers of chosen questions."""
        counts = Counter(question.category for question in chosen)
        each = {*counts.values()}
        share = f"{counts.most_common()[-1][1]} to {max(each)}" if len(each) > 1 else f"{max(each)}"
        whole = "all" if len(chosen) == len(self.questions) else f"{len(chosen)} of {len(self.questions)}"
        draw = "" if len(chosen) == len(self.questions) else f", seed {seed}"
        return (
            f"{self.name} ({self.file}, SHA-256 {self.digest}): {whole} questions, {share} of each of {len(counts)} "
            f"categories{draw}, {turns} turns"
        )


def in_turns(questions: Iterable[Question], name: str) -> list[Question]:
    """Return the questions in an order in which the values of an attribute alternate."""
    groups: dict[str, list[Question]] = {}
    for question in questions:
        groups.setdefault(getattr(question, name), []).append(question)
    return [question for row in zip_longest(*groups.values()) for question in row if question is not None]


def read_suite(path: Path, option: str = "--suite") -> Suite:
    """Read the file of a suite.

    MT-Bench's eight categories count as one category of Spec-Bench, as in its paper. Raises DataError for a file of
    another form, for repeated questions, and for placeholders in place of questions.
    """
    require_path(path, option)
    if not path.is_file():
        raise DataError(f"there is no file {path}", f"correct {option}")
    kind: Any = ENDINGS.get(path.suffix.lower(), "jsonl")
    questions: list[Question] = []
    placeholders = 0
    for number, (place, record) in enumerate(read_records(Source(kind=kind, path=str(path)), [path], Counter()), 1):
        if not has_form(record, FORM) or not record["turns"] or not all(map(str.strip, record["turns"])):
            raise DataError(
                f"{path}: {place} is not a question of a suite (it has: {names_of(record)})",
                "a record needs `category` (a text) and `turns` (a list of texts); --prompts reads other records",
            )
        placeholders += any(PLACEHOLDER in turn for turn in record["turns"])
        name = str(record.get("question_id", number))
        questions.append(Question(name, record["category"], record["category"], tuple(record["turns"])))
    if placeholders:
        raise DataError(
            f"{path}: {placeholders} of {len(questions)} questions are placeholders",
            "complete the file with NVIDIA's specdec_bench (prepare_data.py)",
        )
    twice = [name for name, count in Counter(question.id for question in questions).items() if count > 1]
    if twice:
        raise DataError(f"{path}: question_id {twice[0][:40]} occurs twice", "correct the file")
    kinds = {question.kind for question in questions}
    if kinds > {*MT_BENCH}:
        questions = [replace(each, category="MT-Bench") if each.kind in MT_BENCH else each for each in questions]
    return Suite(NAMES.get(frozenset(kinds), path.stem), path.name, file_digest(path)[:12], questions)


@dataclass(frozen=True)
class SuitePrompts:
    """The questions of a suite as prompts of a target: the first turns of the `asked` questions.

    `longest` is the maximum number of tokens of a prompt, later turns included. `words` names the suite.
    """

    suite: Suite
    chat: Chat
    target: str
    asked: list[Sample]
    room: int
    longest: int
    words: str
    dropped: Counter[str]

    def all_turns(
        self,
        write: Callable[[list[list[int]]], list[list[int]]],
        text_of: Callable[[Sequence[int]], str],
    ) -> tuple[list[Sample], list[int]]:
        """Return the prompts of all turns, and the number of the question of each.

        `write` continues prompts as the target does, and `text_of` decodes an answer. A turn that the chat template
        refuses ends its question, and a long prompt keeps its last tokens. Both are counted in `dropped`.
        """
        asked = [[first] for first in self.asked]
        answers: list[list[str]] = [[] for _ in self.asked]
        with open_tokenizer(self.target) as tokenizer:
            prompts = ChatPrompts(ChatTemplate(tokenizer, self.chat), self.room, SEED)
            for turn in range(1, self.chat.turns):
                going_on = [at for at, asks in enumerate(asked) if len(asks) == turn and len(_further(asks[0])) >= turn]
                written = write([asked[at][-1].prompt for at in going_on]) if going_on else []
                for at, ids in zip(going_on, written, strict=True):
                    answers[at].append(text_of(ids))
                    following = self._next(prompts, asked[at][0], answers[at])
                    asked[at] += [] if following is None else [following]
        return [prompt for turns in asked for prompt in turns], [at for at, turns in enumerate(asked) for _ in turns]

    def _next(self, prompts: ChatPrompts, first: Sample, answers: Sequence[str]) -> Sample | None:
        """Return the prompt of the turn after these answers. None if the template refuses it."""
        try:
            ids = next_prompt(prompts.template, first.chat or {}, answers)
        except ValueError as error:
            self.dropped[f"later turns: {error}"] += 1
            return None
        assert ids is not None
        if len(ids) > self.room:
            self.dropped[f"beginnings of prompts of more than {self.room} tokens"] += 1
        return replace(first, id=f"{first.id}/{len(answers)}", prompt=last_tokens(ids, self.room, prompts.opening))


def _further(prompt: Sample) -> list[str]:
    """Return the turns after the first."""
    turns: list[str] = [] if prompt.chat is None else prompt.chat["turns"]
    return turns


def suite_prompts(
    suite: Suite, target: str, chat: Chat, count: int | None, seed: int, room: int, new_tokens: int
) -> SuitePrompts:
    """Render the first turns of `count` questions of each category by the target's template.

    A prompt has `room` tokens at most. An answer to it has `new_tokens` at most. Loads no weights. Raises DataError for
    a target without a chat template and for a question that its template refuses.
    """
    chosen = suite.take(count, seed)
    chat = chat.model_copy(update={"turns": max(len(question.turns) for question in suite.questions)})
    with open_tokenizer(target) as tokenizer:
        prompts = ChatPrompts(ChatTemplate(tokenizer, chat), room, SEED)
        asked = [_first(prompts, suite, question) for question in chosen]
        dropped = Counter(prompts.dropped)
        longest = max(_longest(prompts.template, prompt, new_tokens) for prompt in asked)
    turns = sum(len(question.turns) for question in chosen)
    words = suite.words(chosen, turns, seed)
    return SuitePrompts(suite, chat, target, asked, room, min(longest, room), words, dropped)


SLACK = 16  # tokens by which an answer may grow when its text is tokenized again


def _longest(template: ChatTemplate, prompt: Sample, new_tokens: int) -> int:
    """Return the maximum number of tokens of a prompt of the question."""
    later = len(_further(prompt))
    try:
        last = next_prompt(template, prompt.chat, ["a"] * later) if prompt.chat and later else None
    except ValueError:  # The question ends before a turn that the template refuses.
        last = None
    return max(len(prompt.prompt), len(last or ()) + later * (new_tokens + SLACK))


def _first(prompts: ChatPrompts, suite: Suite, question: Question) -> Sample:
    """Return the prompt of a question's first turn."""
    messages = tuple(turns_of(question.turns))
    name = f"{suite.file}#{question.id}"
    document = Document(name, "test", "\n\n".join(question.turns), suite.file, messages, question.category)
    prompt = prompts.prompt(document)
    if prompt is None:
        reason = next(reversed(prompts.dropped))
        raise DataError(f"question {question.id} of {suite.file}: {reason}", "give a target whose template takes it")
    return replace(prompt, label=question.category)
