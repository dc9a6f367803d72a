"""Samples and summaries of texts in the run directory, seeds of prompts, and repeated tokens of a text."""

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
    """A text to learn from or to measure: the token ids of a prompt, and of the target's answer.

    `id` is the prompt's origin (`name@character`). `source` is the name of the corpus source. `label` is the class of
    text in reports, with the template's thinking on or off. `ended` is whether the target ended the answer, by an end
    token or a stop string. `dropped` is the reason why the answer is not learnt from. `number` is the place in the list
    of prompts; None for served prompts. `chat` renders the further turns of a conversation (see data/chat_template.py).
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
    """The new ids after a request's prompt, with the end token if the target generated one.

    `ended` is whether an end token or a stop string ended them. `dropped` is the reason why there is no answer, and
    `detail` the server's own words. `lasting` is false if another attempt may succeed. `scores` has the target's
    distributions at the ids, packed as text, if they were requested.
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
    """The reason in an answer's text why it is not learnt from; empty if it is."""
    looping, empty = TEXT_FAULTS
    return looping if is_looping(answer) else empty if len(answer) < 2 else ""


MAX_PERIOD_TOKENS, COPIES = 16, 6


def is_looping(ids: Sequence[int]) -> bool:
    """Whether a text ends in COPIES copies of the same tokens, at most MAX_PERIOD_TOKENS."""
    for period in range(1, MAX_PERIOD_TOKENS + 1):
        tail = ids[-period * COPIES :]
        if len(tail) == period * COPIES and all(tail[i] == tail[i - period] for i in range(period, len(tail))):
            return True
    return False


def count_texts(labels: Iterable[str], lengths: Iterable[int]) -> dict[str, TextCount]:
    """The number of texts and tokens by label, from the label and the tokens of each text."""
    by_label: dict[str, list[int]] = {}
    for label, length in zip(labels, lengths, strict=True):
        by_label.setdefault(label, []).append(int(length))
    return {label: TextCount(len(lengths), sum(lengths)) for label, lengths in by_label.items()}


def listed(counts: Mapping[str, int], sign: str = " ") -> str:
    """Counts by name, as a message lists them."""
    return ", ".join(f"{count}{sign}{name}" for name, count in sorted(counts.items()))


def decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    """The unchanged text of token ids, with special tokens."""
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def last_tokens(prompt: list[int], count: int, opening: list[int]) -> list[int]:
    """The last `count` ids of a longer prompt. They include the `opening` (bos) if the prompt begins with it."""
    if len(prompt) <= count:
        return prompt
    kept = opening if prompt[: len(opening)] == opening else []
    return [*kept, *prompt[len(prompt) - count + len(kept) :]]


def prompt_seed(seed: int, prompt_id: str) -> int:
    """The seed of one prompt's own random numbers."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{prompt_id}".encode()).digest()[:7], "big")


# ── Arrow files with a row per sample ──


def _schema() -> Any:
    import pyarrow

    ids, text = pyarrow.list_(pyarrow.int32()), pyarrow.string()
    kinds = {"prompt": ids, "answer": ids, "ended": pyarrow.bool_(), "number": pyarrow.int32()}
    return pyarrow.schema([(field.name, kinds.get(field.name, text)) for field in fields(Sample)])


ROWS = 1024  # rows that are written at once


def write_samples(path: Path, samples: Iterable[Sample]) -> None:
    """Write samples to a file atomically, with ROWS of them in memory at a time and `chat` as JSON."""
    with adding_samples(path) as add:
        for sample in samples:
            add(sample)


@contextmanager
def adding_samples(path: Path) -> Iterator[Callable[[Sample], None]]:
    """Yield a function that adds a sample to a file, which is written as by `write_samples`."""
    import pyarrow

    rows: list[dict[str, Any]] = []
    with written_atomically(path) as temporary, pyarrow.ipc.new_file(str(temporary), _schema()) as file:

        def write() -> None:
            file.write_batch(pyarrow.RecordBatch.from_pylist(rows, _schema()))
            rows.clear()

        def add(sample: Sample) -> None:
            rows.append({**vars(sample), "chat": sample.chat and json.dumps(sample.chat)})
            if len(rows) == ROWS:
                write()

        yield add
        if rows:
            write()


class Samples(Sequence[Sample]):
    """Rows of mapped Arrow files. A row becomes a sample when it is read, and nothing is kept in memory.

    `order` [N] has the numbers of rows, which count through all `batches`. None takes all rows.
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
        """The ids of a row's prompt and answer, as int32 views of the file."""
        part, row = self._place(index)
        prompt, answer = (self._batches[part][name][row].values.to_numpy() for name in ("prompt", "answer"))
        return prompt, answer

    def row(self, index: int) -> int:
        """The number of a row among the rows of all batches."""
        return int(self._order[index])

    def take(self, index: Any) -> Samples:
        """The rows with the numbers `index`, or for which `index` is true."""
        return Samples(self._batches, self._order[index])

    def column(self, name: str) -> Any:
        """A field of all rows [N] as a numpy array: the number of tokens for `prompt` and `answer`."""
        import pyarrow.compute

        if not self._batches:
            return numpy.empty(0, object)
        parts = [batch[name] for batch in self._batches]
        if name in ("prompt", "answer"):
            parts = [pyarrow.compute.list_value_length(part) for part in parts]
        return numpy.concatenate([part.to_numpy(zero_copy_only=False) for part in parts])[self._order]


def joined_samples(parts: Sequence[Samples]) -> Samples:
    """The rows of several parts in one."""
    parts = [part for part in parts if len(part)]
    starts = accumulate((part._starts[-1] for part in parts), initial=0)
    orders = [part._order + start for part, start in zip(parts, starts, strict=False)]
    return Samples([batch for part in parts for batch in part._batches], numpy.concatenate([*orders, []]).astype(int))


def read_samples(path: Path, stage: str) -> Samples:
    """The samples in a file of a stage. Raises DataError for a damaged file."""
    import pyarrow.feather

    try:
        table = pyarrow.feather.read_table(path, memory_map=True)
        table.validate(full=True)
        if table.schema != _schema():
            raise ValueError("this version writes other columns")
        return Samples(table.to_batches())
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        first = str(error).splitlines()[0][:200]
        raise DataError(f"{path} is damaged: {first}", how_to_redo(stage)) from None


def how_to_redo(stage: str) -> str:
    """The hint for files of a stage that cannot be used."""
    return f"make it again with `distill train RECIPE --redo {stage}`"


def read_prompts(run: Run, split: Split) -> Samples:
    """The prompts of a split: held-out prompts of served traffic with their answers, then those of stage `corpus`.

    Raises DataError for a damaged file.
    """
    path = run.path("answers", f"prompts-{split}.arrow")
    served = [read_samples(path, "answers")] if path.exists() else []
    return joined_samples([*served, read_samples(run.path("corpus", f"prompts-{split}.arrow"), "corpus")])


def read_answers(run: Run, split: Split) -> Samples:
    """All answers of stage `answers` to the prompts of a split, in the order of the prompts, served ones last.

    Raises DataError for a damaged file.
    """
    return read_groups(sorted(run.path("answers", split).glob("*.arrow")), "answers")


def learnt_answers(run: Run) -> Samples:
    """The train answers that are learnt from; at least one."""
    answers = read_answers(run, "train")
    return answers.take(answers.column("dropped") == "")


def read_groups(paths: Sequence[Path], stage: str) -> Samples:
    """The samples in some files of a stage, ordered by their numbers. Samples without a number come last."""
    answers = joined_samples([read_samples(path, stage) for path in paths])
    numbers = answers.column("number").astype(float)  # A missing number becomes NaN, which is sorted last.
    return answers.take(numpy.argsort(numbers, kind="stable"))


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """The first position where two texts differ, or where the shorter one ends; None for equal texts."""
    return next((at for at, (a, b) in enumerate(zip_longest(left, right)) if a != b), None)


# ── Summaries of stages questions, corpus and answers ──


@dataclass(frozen=True)
class TextCount:
    """A number of texts, and of their tokens."""

    texts: int
    tokens: int


@dataclass(frozen=True)
class SplitTexts:
    """A split of the corpus: documents, kept tokens of given text, prompts, and the asked prompts by class."""

    documents: int
    tokens: int
    prompts: int
    asked: dict[str, TextCount] = field(default_factory=dict)


@dataclass(frozen=True)
class CorpusTexts:
    """The content of corpus/summary.json. `dropped` counts documents and conversations by reason."""

    dropped: dict[str, int]
    train: SplitTexts
    validation: SplitTexts
    test: SplitTexts


@dataclass(frozen=True)
class AskedQuestions:
    """The questions that the target wrote for a source of kind target.

    The recipe wants `wanted` questions. The target wrote `asked` texts, and `usable` of them passed the filters.
    The first `kept` usable texts are used. `dropped` counts the others by reason.
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
    """The content of questions/summary.json: the writer, and the questions of each source of kind target."""

    writer: str
    sources: list[AskedQuestions] = field(default_factory=list)


@dataclass(frozen=True)
class AnswerTexts:
    """The counts of the target's answers to train prompts in answers/manifest.json."""

    answers: int = 0
    answer_tokens: int = 0
    not_ended: int = 0
    writer: str = ""
    dropped: dict[str, int] = field(default_factory=dict)
    by_class: dict[str, TextCount] = field(default_factory=dict)


# ── Repeated tokens ──


REPEATED = 3  # A token is repeated if it and the two tokens before it occurred earlier in the text, in this order.
NEW, SEEN = "new", "repeated"


def repetition(ids: Sequence[int]) -> list[str]:
    """Label each token SEEN if it ends REPEATED tokens that came earlier in the text, else NEW."""
    known: set[tuple[int, ...]] = set()
    labels = []
    for place in range(len(ids)):
        last = tuple(ids[max(0, place - REPEATED + 1) : place + 1])
        labels.append(SEEN if last in known else NEW)
        if len(last) == REPEATED:
            known.add(last)
    return labels
