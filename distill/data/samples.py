"""Samples, and summaries of texts, as stages write them into the run directory; the seed of each prompt."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from distill.errors import DataError
from distill.files import write_atomically
from distill.run import Run

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


@dataclass(frozen=True)
class Sample:
    """One text to learn from or to measure: the token ids of a prompt, and of the target's answer to it.

    `id` is the prompt's origin (`name@character`), `source` the corpus source's name, `label` the class of text that
    reports show, with thinking on or off where the template was told. `ended`: the target ended the answer, by an end
    token or a stop string; else it was cut short. `dropped` is the reason for which the answer is not learnt from,
    `number` the place in the list of prompts, None for served ones. Of a conversation, `chat` has what renders its
    further turns (see data/chat_template.py).
    """

    id: str
    prompt: list[int]
    answer: list[int] = field(default_factory=list)
    split: Split = "train"
    source: str = ""
    label: str = ""
    ended: bool = True
    dropped: str = ""
    number: int | None = None
    chat: dict[str, Any] | None = None


@dataclass(frozen=True)
class Request:
    """A prompt to continue: its token ids, the seed of its random numbers, and the most new tokens."""

    id: str
    ids: list[int]
    seed: int
    limit: int


@dataclass(frozen=True)
class Reply:
    """New ids after a request's prompt, an end token included where the target gave one (`ended`: or a stop string).

    `dropped` is a reason why there is no answer, `detail` what a server said about it, `lasting` false where another
    attempt may bring one.
    """

    id: str
    ids: list[int]
    ended: bool
    dropped: str = ""
    detail: str = ""
    lasting: bool = True


TEXT_FAULTS = "looping", "empty"


def fault_of(answer: Sequence[int]) -> str:
    """The reason why an answer is not learnt from, whoever wrote it; empty for one that is."""
    looping, empty = TEXT_FAULTS
    return looping if is_looping(answer) else empty if len(answer) < 2 else ""


LONGEST_PERIOD, REPEATS = 16, 6  # tokens; copies


def is_looping(ids: Sequence[int]) -> bool:
    """Whether a text ends in REPEATS copies of the same at most LONGEST_PERIOD tokens."""
    for period in range(1, LONGEST_PERIOD + 1):
        tail = ids[-period * REPEATS :]
        if len(tail) == period * REPEATS and all(tail[i] == tail[i - period] for i in range(period, len(tail))):
            return True
    return False


def count_texts(texts: Iterable[tuple[str, Sequence[int]]]) -> dict[str, TextCount]:
    """Texts and their tokens by label, from the label and the ids of each, in the order of their first."""
    found: dict[str, list[int]] = {}
    for label, ids in texts:
        found.setdefault(label, []).append(len(ids))
    return {label: TextCount(len(own), sum(own)) for label, own in found.items()}


def listed(counts: Mapping[str, int], sign: str = " ") -> str:
    """Counts and what they count, for a message."""
    return ", ".join(f"{count}{sign}{name}" for name, count in sorted(counts.items()))


def decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of token ids as it stands, special tokens included."""
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def prompt_seed(seed: int, prompt_id: str) -> int:
    """The seed of one prompt's own random numbers."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{prompt_id}".encode()).digest()[:7], "big")


# ── Files of samples: Arrow, a row a sample ──


def _schema() -> Any:
    import pyarrow

    ids, text = pyarrow.list_(pyarrow.int32()), pyarrow.string()
    kinds = {"prompt": ids, "answer": ids, "ended": pyarrow.bool_(), "number": pyarrow.int32()}
    return pyarrow.schema([(one.name, kinds.get(one.name, text)) for one in fields(Sample)])


def write_samples(path: Path, samples: Iterable[Sample]) -> None:
    """Write samples to a file, atomically; `chat` as JSON."""
    import pyarrow.feather

    rows = [{**vars(one), "chat": one.chat and json.dumps(one.chat)} for one in samples]
    table = pyarrow.Table.from_pylist(rows, _schema())
    write_atomically(path, lambda temporary: pyarrow.feather.write_feather(table, str(temporary), "uncompressed"))


def read_samples(path: Path, stage: str) -> list[Sample]:
    """The samples in a file of a stage; raises DataError where it is damaged."""
    import pyarrow.feather

    try:
        table = pyarrow.feather.read_table(path, memory_map=False)
        table.validate(full=True)
        if table.schema != _schema():
            raise ValueError("it does not hold what this version writes")
        rows = table.to_pylist()
        return [Sample(**{**row, "chat": row["chat"] and json.loads(row["chat"])}) for row in rows]
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        first = str(error).splitlines()[0][:200]
        raise DataError(f"{path} is damaged: {first}", _again(stage)) from None


def _again(stage: str) -> str:
    return f"make it again with `distill train RECIPE --redo {stage}`"


def read_prompts(run: Run, split: Split) -> list[Sample]:
    """The prompts of a split: held-out ones of served traffic first, with their answers, then those of stage `corpus`.

    Raises DataError when a file is damaged.
    """
    served = run.path("answers", f"prompts-{split}.arrow")
    own = read_samples(served, "answers") if served.exists() else []
    return own + read_samples(run.path("corpus", f"prompts-{split}.arrow"), "corpus")


def read_answers(run: Run, name: str, stage: str = "answers") -> list[Sample]:
    """All answers that a stage wrote into files called `name`, in prompt order, served ones last.

    Stage `answers` has those to `train` prompts. Raises DataError when a file is damaged.
    """
    paths = sorted(run.path(stage).glob(f"{name}-*.arrow"))
    answers = [answer for path in paths for answer in read_samples(path, stage)]
    return sorted(answers, key=lambda answer: (answer.number is None, answer.number or 0))


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """The first position where two texts differ, a shorter one ending early included; None when equal."""
    return next((at for at, (a, b) in enumerate(zip_longest(left, right)) if a != b), None)


# ── Summaries of stages questions, corpus and answers ──


@dataclass(frozen=True)
class TextCount:
    """The number of some texts, and of their tokens."""

    texts: int
    tokens: int


@dataclass(frozen=True)
class SplitTexts:
    """A split of the corpus: documents, tokens of given text kept, prompts, and those that are asked by class."""

    documents: int
    tokens: int
    prompts: int
    asked: dict[str, TextCount] = field(default_factory=dict)


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
    by_class: dict[str, TextCount] = field(default_factory=dict)
