"""Samples and summaries of texts, as stages write them into the run directory; prompts' seeds; what repeats in one."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any, Literal

import numpy

from distill.errors import DataError
from distill.files import written_atomically
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
    attempt may bring one. `scores` has the target's distributions at the ids, packed as text, if they were asked for.
    """

    id: str
    ids: list[int]
    ended: bool
    dropped: str = ""
    detail: str = ""
    lasting: bool = True
    scores: str = ""


TEXT_FAULTS = "looping", "empty"


def fault_of(answer: Sequence[int]) -> str:
    """The reason why an answer is not learnt from, whoever wrote it; empty for one that is."""
    looping, empty = TEXT_FAULTS
    return looping if is_looping(answer) else empty if len(answer) < 2 else ""


LONGEST_PERIOD, COPIES = 16, 6  # tokens; copies


def is_looping(ids: Sequence[int]) -> bool:
    """Whether a text ends in COPIES copies of the same at most LONGEST_PERIOD tokens."""
    for period in range(1, LONGEST_PERIOD + 1):
        tail = ids[-period * COPIES :]
        if len(tail) == period * COPIES and all(tail[i] == tail[i - period] for i in range(period, len(tail))):
            return True
    return False


def count_texts(labels: Iterable[str], lengths: Iterable[int]) -> dict[str, TextCount]:
    """Texts and their tokens by label, from the label and the tokens of each, in the order of their first."""
    found: dict[str, list[int]] = {}
    for label, length in zip(labels, lengths, strict=True):
        found.setdefault(label, []).append(int(length))
    return {label: TextCount(len(own), sum(own)) for label, own in found.items()}


def listed(counts: Mapping[str, int], sign: str = " ") -> str:
    """Counts and what they count, for a message."""
    return ", ".join(f"{count}{sign}{name}" for name, count in sorted(counts.items()))


def decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of token ids as it stands, special tokens included."""
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def last_tokens(prompt: list[int], count: int, opening: list[int]) -> list[int]:
    """The last `count` ids of a prompt of more, behind the `opening` (bos) that it begins with."""
    if len(prompt) <= count:
        return prompt
    kept = opening if prompt[: len(opening)] == opening else []
    return [*kept, *prompt[len(prompt) - count + len(kept) :]]


def prompt_seed(seed: int, prompt_id: str) -> int:
    """The seed of one prompt's own random numbers."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{prompt_id}".encode()).digest()[:7], "big")


# ── Files of samples: Arrow, a row a sample ──


def _schema() -> Any:
    import pyarrow

    ids, text = pyarrow.list_(pyarrow.int32()), pyarrow.string()
    kinds = {"prompt": ids, "answer": ids, "ended": pyarrow.bool_(), "number": pyarrow.int32()}
    return pyarrow.schema([(one.name, kinds.get(one.name, text)) for one in fields(Sample)])


ROWS = 1024  # that are written at once


def write_samples(path: Path, samples: Iterable[Sample]) -> None:
    """Write samples to a file, atomically, some rows in memory at a time; `chat` as JSON."""
    with adding_samples(path) as add:
        for one in samples:
            add(one)


@contextmanager
def adding_samples(path: Path) -> Iterator[Callable[[Sample], None]]:
    """What adds samples to a file, one by one, as write_samples does."""
    import pyarrow

    rows: list[dict[str, Any]] = []
    with written_atomically(path) as temporary, pyarrow.ipc.new_file(str(temporary), _schema()) as file:

        def write() -> None:
            file.write_batch(pyarrow.RecordBatch.from_pylist(rows, _schema()))
            rows.clear()

        def add(one: Sample) -> None:
            rows.append({**vars(one), "chat": one.chat and json.dumps(one.chat)})
            if len(rows) == ROWS:
                write()

        yield add
        if rows:
            write()


class Samples(Sequence[Sample]):
    """Rows of mapped Arrow files, which are samples where they are looked at: nothing is kept in memory.

    `order` [N] numbers the rows of all `batches`, one after the other; None: all of them.
    """

    def __init__(self, batches: Sequence[Any], order: Any = None) -> None:
        self._batches = batches
        self._starts = [0, *accumulate(map(len, batches))]
        self._order = numpy.arange(self._starts[-1]) if order is None else order

    def _place(self, index: int) -> tuple[int, int]:
        """The batch that holds a row, and its number there."""
        number = int(self._order[index])
        part = bisect_right(self._starts, number) - 1
        return part, number - self._starts[part]

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.take(index)
        part, number = self._place(index)
        row = self._batches[part].slice(number, 1).to_pylist()[0]
        return Sample(**{**row, "chat": row["chat"] and json.loads(row["chat"])})

    def ids(self, index: int) -> tuple[Any, Any]:
        """The ids of a row's prompt and answer, int32 as they lie in the file."""
        part, row = self._place(index)
        prompt, answer = (self._batches[part][name][row].values.to_numpy() for name in ("prompt", "answer"))
        return prompt, answer

    def row(self, index: int) -> int:
        """The number of a row among those of all batches."""
        return int(self._order[index])

    def take(self, index: Any) -> Samples:
        """The rows that `index` numbers, or for which it is true."""
        return Samples(self._batches, self._order[index])

    def column(self, name: str) -> Any:
        """A field of each row [N], as numpy has it; of a text its number of tokens."""
        import pyarrow.compute

        if not self._batches:
            return numpy.empty(0, object)
        parts = [batch[name] for batch in self._batches]
        if name in ("prompt", "answer"):
            parts = [pyarrow.compute.list_value_length(part) for part in parts]
        found = [part.to_numpy(zero_copy_only=False) for part in parts]
        return numpy.concatenate(found)[self._order]


def joined_samples(parts: Sequence[Samples]) -> Samples:
    """The rows of several, one after the other."""
    parts = [part for part in parts if len(part)]
    starts = accumulate((part._starts[-1] for part in parts), initial=0)
    orders = [part._order + start for part, start in zip(parts, starts, strict=False)]
    return Samples([batch for part in parts for batch in part._batches], numpy.concatenate([*orders, []]).astype(int))


def read_samples(path: Path, stage: str) -> Samples:
    """The samples in a file of a stage; raises DataError where it is damaged."""
    import pyarrow.feather

    try:
        table = pyarrow.feather.read_table(path, memory_map=True)
        table.validate(full=True)
        if table.schema != _schema():
            raise ValueError("it does not hold what this version writes")
        return Samples(table.to_batches())
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        first = str(error).splitlines()[0][:200]
        raise DataError(f"{path} is damaged: {first}", how_to_redo(stage)) from None


def how_to_redo(stage: str) -> str:
    """The remedy for files of a stage that cannot be used."""
    return f"make it again with `distill train RECIPE --redo {stage}`"


def read_prompts(run: Run, split: Split) -> Samples:
    """The prompts of a split: held-out ones of served traffic first, with their answers, then those of stage `corpus`.

    Raises DataError when a file is damaged.
    """
    served = run.path("answers", f"prompts-{split}.arrow")
    own = [read_samples(served, "answers")] if served.exists() else []
    return joined_samples([*own, read_samples(run.path("corpus", f"prompts-{split}.arrow"), "corpus")])


def read_answers(run: Run, split: Split) -> Samples:
    """All answers to the prompts of a split that stage `answers` wrote, in prompt order, served ones last.

    Raises DataError when a file is damaged.
    """
    return read_groups(sorted(run.path("answers", split).glob("*.arrow")), "answers")


def learnt_answers(run: Run) -> Samples:
    """The train answers that are learnt from; at least one."""
    answers = read_answers(run, "train")
    return answers.take(answers.column("dropped") == "")


def read_groups(paths: Sequence[Path], stage: str) -> Samples:
    """The samples in some files of a stage, by their numbers; those without one come last."""
    answers = joined_samples([read_samples(path, stage) for path in paths])
    numbers = answers.column("number").astype(float)  # NaN, which comes last, where there is none
    return answers.take(numpy.argsort(numbers, kind="stable"))


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


# ── What repeats ──


REPEATED = 3  # tokens in a row that stood in the text before: the last of them is repeated
NEW, SEEN = "new", "repeated"


def repetition(ids: Sequence[int]) -> list[str]:
    """Whether each token ends REPEATED tokens that stood in the text before."""
    known: set[tuple[int, ...]] = set()
    found = []
    for place in range(len(ids)):
        last = tuple(ids[max(0, place - REPEATED + 1) : place + 1])
        found.append(SEEN if last in known else NEW)
        if len(last) == REPEATED:
            known.add(last)
    return found
