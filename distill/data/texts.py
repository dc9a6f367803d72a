"""Prompts, answers and summaries of texts as stages write them into the run directory, and the seed of each prompt."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from distill.errors import DataError
from distill.files import Result, from_json, parse_object, write_text
from distill.run import Run

Ids = list[Annotated[int, Field(strict=True, ge=0, lt=2**31)]]  # token ids are stored as int32
LACKING = 0.25  # see lacking_classes


@dataclass(frozen=True)
class Prompt:
    """The origin of a prompt (`name@character`, and the corpus source) and its token ids.

    Of a conversation, `chat` has what renders its further turns (see data/chat_template.py). `label` is the
    class of text that reports show.
    """

    id: str
    ids: Ids
    source: str = ""
    chat: dict[str, Any] | None = None
    label: str = ""

    @property
    def mode(self) -> str:
        """`thinking` or `no thinking` where the template was told; else empty."""
        thinking = None if self.chat is None else self.chat.get("thinking")
        return "" if thinking is None else "thinking" if thinking else "no thinking"

    @property
    def kind(self) -> str:
        """Label and mode, for tables; empty where it has neither."""
        return ", ".join(part for part in (self.label, self.mode) if part)

    def line(self) -> dict[str, Any]:
        """The line of a prompts file; fields that say nothing are left out."""
        return {name: value for name, value in asdict(self).items() if value not in (None, "") or name == "source"}


@dataclass(frozen=True)
class Answer:
    """The target's text after a prompt; `looping` marks a text whose end repeats itself.

    `ended`: the target ended it, by an end token or a stop string; else it was cut short. `label` is the class of text,
    `mode` the prompt's (see Prompt), `number` its place in the list of prompts, None for served ones. `dropped` is the
    reason for which the writer's answer is not learnt from.
    """

    id: str
    prompt: Ids
    answer: Ids
    looping: bool
    source: str = ""
    ended: bool = True
    label: str = ""
    number: int | None = None
    dropped: str = ""
    mode: str = ""


@dataclass(frozen=True)
class RawText:
    """A document of a held-out split, for the checks of an export."""

    name: str
    text: str


@dataclass(frozen=True)
class Request:
    """A prompt to continue: its token ids, the seed of its random numbers, and the most new tokens.

    `messages` are those that the prompt was rendered from, with the template's further `arguments` (such as
    enable_thinking); None where it is not a chat.
    """

    id: str
    ids: list[int]
    seed: int
    limit: int
    messages: list[dict[str, Any]] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """New ids after a request's prompt, an end token included where the target gave one (`ended`: or a stop string).

    `dropped` is a reason why there is no answer, `detail` what a server said about it, `lasting` false where another
    attempt may bring one. `prompt` are the ids that the target read where they are not those of the request.
    """

    id: str
    ids: list[int]
    ended: bool
    dropped: str = ""
    detail: str = ""
    lasting: bool = True
    prompt: list[int] | None = None


def drop_reason(answer: Answer) -> str:
    """The reason why an answer is not learnt from; empty for one that is."""
    if answer.dropped:
        return answer.dropped
    return "looping" if answer.looping else "empty" if len(answer.answer) < 2 else ""


LONGEST_PERIOD, REPEATS = 16, 6  # tokens; copies


def is_looping(ids: Sequence[int]) -> bool:
    """Whether a text ends in REPEATS copies of the same at most LONGEST_PERIOD tokens."""
    for period in range(1, LONGEST_PERIOD + 1):
        tail = ids[-period * REPEATS :]
        if len(tail) == period * REPEATS and all(tail[i] == tail[i - period] for i in range(period, len(tail))):
            return True
    return False


def count_texts(texts: Iterable[tuple[str, str, int]]) -> list[TextCount]:
    """Texts and their tokens by label and mode, from (label, mode, tokens) of each, in the order of their first."""
    found: dict[tuple[str, str], list[int]] = {}
    for label, mode, tokens in texts:
        found.setdefault((label, mode), []).append(tokens)
    return [TextCount(*kind, len(own), sum(own)) for kind, own in found.items()]


def lacking_classes(learnt: Mapping[str, int], asked: Mapping[str, int]) -> list[str]:
    """Classes of the prompts that are `asked` whose share of what is `learnt` is below LACKING of their share there.

    Counts by label, of whatever unit. What has no label says nothing of any class: without labels on one of the sides,
    none is lacking.
    """
    total, wanted = sum(learnt.values()), {label: count for label, count in asked.items() if label and count}
    if not any(label and count for label, count in learnt.items()):
        return []
    every = sum(wanted.values())
    return [label for label, count in wanted.items() if learnt.get(label, 0) / total < LACKING * count / every]


def listed(counts: Mapping[str, int], sign: str = " ") -> str:
    """Counts and what they count, for a message."""
    return ", ".join(f"{count}{sign}{name}" for name, count in sorted(counts.items()))


def decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of token ids as it stands, special tokens included."""
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def prompt_seed(seed: int, prompt_id: str) -> int:
    """The seed of one prompt's own random numbers."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{prompt_id}".encode()).digest()[:7], "big")


def _read_lines(path: Path, stage: str, kind: type[Result]) -> list[Result]:
    """The lines of a jsonl file, whose unknown fields do not count."""
    again = f"make it again with `distill train RECIPE --redo {stage}`"
    records = []
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", again) from None
    for number, line in enumerate(lines if lines[-1] else lines[:-1], 1):
        record = parse_object(line)
        if isinstance(record, str):
            raise DataError(f"{path} is damaged: line {number}: {record}", again)
        records.append(from_json(record, kind, f"{path} is damaged: line {number}", again))
    return records


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write a jsonl file, atomically."""
    write_text(path, "".join(json.dumps(record) + "\n" for record in records))


def read_prompts(run: Run, split: str) -> list[Prompt]:
    """The prompts of a split: held-out ones of served traffic first, then those of stage `corpus`.

    Raises DataError when a file is damaged.
    """
    prompts = []
    for stage in ("answers", "corpus"):
        path = run.path(stage, f"prompts-{split}.jsonl")
        if stage == "answers" and not path.exists():
            continue
        prompts += _read_lines(path, stage, Prompt)
    return prompts


def read_answers(run: Run, name: str, stage: str = "answers") -> list[Answer]:
    """All answers that a stage wrote into files called `name`, in prompt order, served ones last.

    Stage `answers` has those to `train` prompts. Raises DataError when a file is damaged.
    """
    paths = sorted(run.path(stage).glob(f"{name}-*.jsonl"))
    answers = [answer for path in paths for answer in _read_lines(path, stage, Answer)]
    return sorted(answers, key=lambda answer: (answer.number is None, answer.number or 0))


def read_documents_of(run: Run, split: str) -> list[str]:
    """The raw texts of a held-out split from stage `corpus`."""
    return [one.text for one in _read_lines(run.path("corpus", f"documents-{split}.jsonl"), "corpus", RawText)]


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """The first position where two texts differ, a shorter one ending early included; None when equal."""
    return next((at for at, (a, b) in enumerate(zip_longest(left, right)) if a != b), None)


# ── Summaries of stages questions, corpus and answers ──


@dataclass(frozen=True)
class TextCount:
    """Texts of one class and mode, and their tokens."""

    label: str
    mode: str
    texts: int
    tokens: int


@dataclass(frozen=True)
class SplitTexts:
    """A split of the corpus: documents, tokens of given text kept (by class and by text, prompt or answer), prompts."""

    documents: int
    tokens: int
    blocks: int
    prompts: int
    given: dict[str, dict[str, int]] = field(default_factory=dict)
    asked: list[TextCount] = field(default_factory=list)


@dataclass(frozen=True)
class CorpusTexts:
    """corpus/summary.json; `dropped` counts documents and conversations by reason."""

    dropped: dict[str, int]
    train: SplitTexts
    validation: SplitTexts
    test: SplitTexts


@dataclass(frozen=True)
class AskedQuestions:
    """The questions that the target wrote for one source of kind target.

    Of `asked` texts `usable` passed the filters, and the first `kept` of them are used; `wanted` were requested.
    `dropped` counts the others by reason.
    `median_tokens` and `most_tokens` are the lengths that half and nine tenths of the questions do not exceed,
    `distinct` the shares of different 1-, 2- and 3-grams of words among all, `repeated` the share of texts asked for
    that repeat others or nearly do.
    """

    file: str
    header: str
    temperature: float
    top_p: float
    tokens: int
    wanted: int
    asked: int
    usable: int
    kept: int
    dropped: dict[str, int]
    median_tokens: float
    most_tokens: float
    distinct: list[float]
    repeated: float
    examples: list[str]


@dataclass(frozen=True)
class QuestionTexts:
    """questions/summary.json: what wrote the questions, and those of each source of kind target."""

    writer: str
    sources: list[AskedQuestions] = field(default_factory=list)


@dataclass(frozen=True)
class AnswerTexts:
    """What answers/manifest.json says of the target's own answers to train prompts."""

    answers: int = 0
    answer_tokens: int = 0
    not_ended: int = 0
    writer: str = ""
    dropped: dict[str, int] = field(default_factory=dict)
    by_class: list[TextCount] = field(default_factory=list)
