"""The documents of a corpus and the split of each: from source trees, text files, and records and conversations."""

from __future__ import annotations

import csv
import glob
import hashlib
import pickle
import random
import re
import sys
import sysconfig
import tempfile
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from distill.data.records import (
    BEGINNING,
    LISTS,
    PROMPTS,
    RENDERED,
    UNANSWERED,
    Messages,
    count_fields,
    form_of,
    questions,
    read_conversation,
    unread_fields,
)
from distill.data.samples import SPLITS, Split
from distill.errors import DataError, faults_explained
from distill.files import has_form, has_halves, hub_commit, kind_of, names_of, parse_json, utf8_text
from distill.recipe import Corpus, Source

# ── Records one by one, from files of JSON (an object a line, or one array), csv and parquet, and from hub data sets ──

Record = tuple[str, dict[str, Any]]  # its place, and its fields


def read_records(source: Source, paths: list[Path], dropped: Counter[str]) -> Iterator[Record]:
    """All records of a source. `paths` are its files. A hub data set has none.

    `dropped` counts what the files lack. Raises DataError for a file that is unreadable, empty or of another format.
    """
    if source.kind == "hub":
        yield from _hub(source)
        return
    tables: dict[str, Callable[[Path], Iterator[Record]]]
    wanted = {"text", *PROMPTS, *LISTS, *source.fields.values()}
    tables = {"csv": partial(_csv, wanted, dropped), "parquet": _parquet}
    read = tables.get(source.kind, read_json_records)
    for path in paths:
        empty = True
        try:
            for record in read(path):
                empty = False
                yield record
        except OSError as error:
            hint = "correct corpus.sources in the recipe"
            raise DataError(f"{path} cannot be read: {error.strerror or error}", hint) from error
        if empty:
            raise DataError(f"{path}: the file is empty", f"give a {source.kind} file with at least one record")


def holds_records(path: Path) -> bool:
    """Whether a file is JSON, under any name, and its first record holds a text, a prompt or messages."""
    try:
        first = next(read_json_records(path), None)
    except (DataError, OSError):
        return False
    return first is not None and form_of(first[1], Source(kind="jsonl", path=str(path))) is not None


# ── JSON: a record a line, or one array of records, on one line or indented ──


def read_json_records(path: Path) -> Iterator[Record]:
    """The records of a file of JSON, which may hold halves of characters.

    A list of messages in place of a record becomes a record with `messages`.
    """
    begun = False
    with open(path, "rb") as handle:
        for number, raw in enumerate(handle, 1):
            if not raw.strip():
                continue
            try:
                value = parse_json(raw, halves=True)
            except ValueError as error:
                if begun or raw.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] not in (b"[", b"{"):
                    raise _line_fault(path, number, str(error)) from None
                yield from _whole_file(path, number, raw, str(error))
                return
            begun = True
            several = _records_of(value)
            if isinstance(several, str):
                raise _line_fault(path, number, several)
            for at, record in enumerate(several, 1):
                yield f"line {number}" + (f", record {at}" if len(several) > 1 else ""), record


def _line_fault(path: Path, number: int, fault: str) -> DataError:
    return DataError(f"{path}: line {number}: {fault}", "each line must be one JSON object, or the file one array")


def _whole_file(path: Path, number: int, first: bytes, fault: str) -> Iterator[Record]:
    """The records of a file that is one indented JSON value. `fault` is that of its first line alone."""
    try:
        records = _records_of(parse_json(path.read_bytes(), halves=True))
    except ValueError as error:
        indented = first.rstrip()[-1:] in (b"[", b"{", b",")
        raise (DataError(f"{path}: {error}", "correct it") if indented else _line_fault(path, number, fault)) from None
    if isinstance(records, str):
        raise DataError(f"{path}: {records}", "give one JSON object a line, or one array of objects")
    for at, record in enumerate(records, 1):
        yield f"record {at}", record


def _records_of(value: Any) -> list[dict[str, Any]] | str:
    """The records in a JSON value: an object, a list of messages, or an array of these. Otherwise the fault."""
    if isinstance(value, dict):
        return [value]
    if _is_messages(value):
        return [{"messages": value}]
    if isinstance(value, list) and all(isinstance(each, dict) or _is_messages(each) for each in value):
        return [each if isinstance(each, dict) else {"messages": each} for each in value]
    return f"a JSON object is needed, got {kind_of(value)}"


def _is_messages(value: Any) -> bool:
    return bool(value) and has_form(value, [{}]) and all({"role", "from"} & set(each) for each in value)


# ── csv ──

DELIMITERS = ",;\t|"


def _csv(wanted: set[str], dropped: Counter[str], path: Path) -> Iterator[Record]:
    """Rows by the names in the first line, which also shows the delimiter."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # A text may be longer than the module's default of 128 kB.
    before, rows = 0, None
    try:
        with open(path, encoding="utf-8-sig", newline="") as handle:
            first = handle.readline()
            # Excel's line before the header
            sign = first[4:5].strip("\r\n") if first.lower().startswith("sep=") else ""
            before = int(bool(sign))
            if not sign:
                handle.seek(0)
            rows = csv.DictReader(handle, delimiter=sign or delimiter_of(first, wanted), strict=True)
            rows.fieldnames = names = _header(path, rows.fieldnames or (), wanted)
            for row in rows:
                place = f"line {rows.line_num + before}"
                further = row.pop(None, [])  # cells beyond the header
                if any(cell.strip() for cell in further):
                    raise DataError(
                        f"{path}: {place} has {len(names) + len(further)} fields, and the header {len(names)}: "
                        f"{', '.join(names)[:200]}",
                        "put quotation marks around a text that holds the delimiter, or use jsonl",
                    )
                record = {name: cell for name, cell in row.items() if cell is not None}
                if len(record) < len(names):
                    dropped["csv rows shorter than their header: the fields that they lack"] += 1
                yield place, record
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8", "convert it") from error
    except csv.Error as error:
        line = before + (rows.reader.line_num if rows else 1)
        raise DataError(f"{path}: line {line}: {error}", "correct the quotes, or use jsonl") from error


def delimiter_of(first: str, wanted: Iterable[str]) -> str:
    """The delimiter of a header line: a sign that separates a wanted name, or else a sign that separates anything."""
    headers = {sign: [cell.strip() for cell in next(csv.reader([first], delimiter=sign), [])] for sign in DELIMITERS}
    known = [sign for sign in DELIMITERS if set(wanted) & set(headers[sign])]
    several = [sign for sign in DELIMITERS if len(headers[sign]) > 1]
    return (known or several or [","])[0]


def _header(path: Path, cells: Sequence[str], wanted: set[str]) -> list[str]:
    """The names of the columns. Unnamed columns are numbered. DataError for a line that is no header."""
    names = [cell.strip() or f"column {number}" for number, cell in enumerate(cells, 1)]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if names and (twice or not wanted & set(names)):
        what = f"names the column {twice[0][:40]!r} twice" if twice else "names no column that is read"
        shown = " | ".join(name[:60] for name in names[:6])
        raise DataError(
            f"{path}: the first line {what}: {shown}",
            "put a line with the columns' names before the rows, such as `prompt,answer`, or name them in a recipe: "
            + (f"`fields: {{prompt: {names[0]}}}`" if len(names) == 1 else "`fields`"),
        )
    return names


# ── parquet, and data sets of the hub ──


def _parquet(path: Path) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(256):
                for record in batch.to_pylist():
                    number += 1
                    yield f"row {number}", _without_nulls(record)
    except pyarrow.ArrowException as error:
        first = str(error).splitlines()[0][:200]
        raise DataError(f"{path} is not a readable parquet file: {first}", "copy it again, or use jsonl") from error


def _hub(source: Source) -> Iterator[Record]:
    """Records of a hub data set, streamed through `datasets`."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # The DataError below reports its faults once.
    try:
        # Keys of stages name this commit.
        at = {} if Path(source.path).exists() else {"revision": hub_commit(source.path, "dataset")}
        records = datasets.load_dataset(source.path, source.subset, split=source.hub_split, streaming=True, **at)
        for number, record in enumerate(records, 1):
            yield f"record {number}", _without_nulls(record)
    except Exception as error:  # The hub client raises many kinds. Each means that the data set is not available.
        kind = type(error).__name__
        wanted = f"subset {source.subset}, split {source.hub_split}"
        what = f"cannot read data set {source.path} ({wanted}): `datasets` stopped with {kind}"
        raise DataError(what, "check its name, its subset, its split and the network") from error


def _without_nulls(record: dict[str, Any]) -> dict[str, Any]:
    """A row of Arrow without nulls. Arrow gives every struct the fields of all structs of a column."""

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: without(inner) for name, inner in value.items() if inner is not None}
        return [without(inner) for inner in value] if isinstance(value, list) else value

    return {name: without(value) for name, value in record.items()}


# ── Documents and their splits ──

PIECE = 16_384  # characters, some 4,000 tokens: several blocks, and hundreds of pieces in a book or a log


@dataclass(frozen=True)
class Document:
    """A text with its name within its source, its split and the name of its source.

    The `messages` of a conversation end with a question or an answer, and its text is the questions alone. `arguments`
    are those that the record gives the chat template, `tools` and `documents` included. Reports show the class `label`.
    `own`: the target wrote the conversation with its answers.
    """

    name: str
    split: Split
    text: str
    source: str = ""
    messages: Messages | None = None
    label: str = ""
    own: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def has_answer(self) -> bool:
        """Whether it gives text to learn from: a plain text does, and a conversation with an answer that is learnt."""
        return self.messages is None or any(
            message["role"] == "assistant" and message.get("weight") != 0 for message in self.messages
        )

    @property
    def plain_text(self) -> str:
        """Its text without roles and templates."""
        return (
            self.text
            if self.messages is None
            else "\n\n".join(message["content"] for message in self.messages if message != UNANSWERED)
        )


class Documents(Sequence[Document]):
    """Documents in an unnamed file in `folder`, which vanishes with the process. Memory holds some bytes of each.

    All documents are appended before `sealed`, and read after it.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or Path(tempfile.gettempdir())
        with faults_explained(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - closed with the last reference
        weakref.finalize(self, self._file.raw.close)  # The raw file skips a last write, which a full disk would refuse.
        self._ends, self._splits, self._numbers = array("Q", [0]), bytearray(), array("Q")
        self._of: Documents | None = None

    def append(self, document: Document) -> None:
        """Add a document at the end."""
        with faults_explained(self._folder):
            self._ends.append(self._ends[-1] + self._file.write(pickle.dumps(document)))
        self._splits.append(SPLITS.index(document.split))
        self._numbers.append(len(self._numbers))

    def sealed(self) -> Documents:
        """Write all documents to the disk, and return them."""
        with faults_explained(self._folder):
            self._file.flush()
        return self

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(len(self))[index]]
        number = self._numbers[index]
        self._file.seek(self._ends[number])
        return pickle.loads(self._file.read(self._ends[number + 1] - self._ends[number]))

    def shuffled(self, split: Split, seed: int) -> Documents:
        """The documents of a split, in an order that the seed draws."""
        part, wanted = copy(self), SPLITS.index(split)
        part._of = self  # keeps the file open
        part._numbers = array("Q", (number for number in self._numbers if self._splits[number] == wanted))
        random.Random(seed).shuffle(part._numbers)
        return part


def fingerprint(text: str) -> str:
    """A name for a text by its content."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def split_of(name: str, validation: float, test: float) -> Split:
    """Split of the document called `name`, the same on every machine and in every version of the corpus.

    `validation` and `test` are the fractions of names (0 to 1) that go to those splits. Only the name is hashed, so
    that a document keeps its split if its text or its place changes.
    """
    point = int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:8], "big") / 2**64
    if point < test:
        return "test"
    return "validation" if point < test + validation else "train"


def source_path(source: Source) -> Path:
    """The folder or file of a local source. Raises DataError if it does not exist."""
    if source.path == "python:stdlib":
        return Path(sysconfig.get_paths()["stdlib"])
    path = Path(source.path)
    if not path.exists():
        raise DataError(f"corpus source {path} does not exist", "correct corpus.sources in the recipe")
    if path.is_dir() != (source.kind == "tree"):
        what = f"{'a folder' if path.is_dir() else 'a file'}, but its kind is {source.kind}"
        raise DataError(f"corpus source {path} is {what}", "use kind: tree for a folder, text or jsonl for a file")
    return path


def with_questions(corpus: Corpus, folder: Path) -> Corpus:
    """The corpus with the files of stage `questions`, which lie in `folder`, as the paths of sources of kind target."""
    files = (str(folder / name) for name in question_files(corpus))
    sources = tuple(
        source.model_copy(update={"path": next(files), "form": "auto"}) if source.kind == "target" else source
        for source in corpus.sources
    )
    return corpus.model_copy(update={"sources": sources})


def question_files(corpus: Corpus) -> list[str]:
    """The names of the files that hold the questions of a corpus's sources of kind target, in their order."""
    return [f"target{'' if not number else f'-{number + 1}'}.jsonl" for number in range(len(corpus.asked))]


def source_files(source: Source) -> list[Path]:
    """The files of a source that is neither a tree nor a hub data set: the file, or all files that match its path.

    Raises DataError without a file.
    """
    if not any(sign in source.path for sign in "*?[") or Path(source.path).exists():
        return [source_path(source)]
    try:
        files = sorted(path for path in map(Path, glob.glob(source.path, recursive=True)) if path.is_file())
    except (OSError, ValueError, re.error):
        files = []
    if not files:
        raise DataError(f"corpus source {source.path} matches no file", "correct corpus.sources in the recipe")
    return files


_BLANK = re.compile(r"\n\r?\n")


def cut_text(text: str, size: int = PIECE) -> Iterator[str]:
    """Pieces of `size` to 2 · `size` characters, cut at paragraph breaks if possible, or else at line breaks.

    A text of at most 2 · `size` characters is one piece. A cut depends only on the text before it, so that a growing
    file keeps all pieces except the last.
    """
    start = 0
    while len(text) - start > 2 * size:
        window = start + size, start + 2 * size
        blank, line = _BLANK.search(text, *window), text.find("\n", *window)
        end = blank.end() if blank else line + 1 if line >= 0 else window[1]
        yield text[start:end]
        start = end
    yield text[start:]


def question_name(question: str) -> str:
    """The name that decides a conversation's split, by its first question, so that no prompt is in two splits."""
    return f"question#{fingerprint(question.strip())}"


def _document(corpus: Corpus, source: Source, name: str, text: str, **more: Any) -> Document:
    """A document of a source. The source, its first question or its name decides the split."""
    asked = [message["content"] for message in more.get("messages", ()) if message["role"] == "user"]
    by_name = split_of(question_name(asked[0]) if asked else name, corpus.validation, corpus.test)
    split = by_name if source.split == "by-name" else source.split
    return Document(name, split, text, Path(source.path).name, own=source.kind == "target", **more)


def tree_files(source: Source) -> dict[str, Path]:
    """The files of a tree that match its pattern and are not excluded, in order, by their paths below its folder."""
    root = source_path(source)
    places = ((path.relative_to(root), path) for path in sorted(root.glob(source.pattern)) if path.is_file())
    return {place.as_posix(): path for place, path in places if not set(source.exclude) & set(place.parts)}


MARK = "\ufeff"  # a byte order mark


def without_mark(text: str, dropped: Counter[str]) -> str:
    """The text of a file without the byte order mark at its beginning."""
    if text.startswith(MARK):
        dropped["byte order mark before a text that is kept"] += 1
    return text.removeprefix(MARK)


def _tree(corpus: Corpus, source: Source, dropped: Counter[str]) -> Iterator[Document]:
    """The files of a tree. Files of JSON records are read as records, unless the source has form text."""
    for name, path in tree_files(source).items():
        try:
            text = without_mark(path.read_bytes().decode("utf-8"), dropped)  # Line ends are kept.
        except UnicodeDecodeError:
            dropped["not UTF-8"] += 1
            continue
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}", "exclude it, or correct it") from error
        if source.form != "text" and text.lstrip()[:1] in ("[", "{") and holds_records(path):
            records = source.model_copy(update={"path": str(path), "kind": "jsonl", "form": "auto"})
            for document in _records(corpus, records, read_json_records(path), dropped):
                yield replace(document, source=Path(source.path).name)
        else:
            yield _file(corpus, source, name, text)


def _texts(corpus: Corpus, source: Source, dropped: Counter[str]) -> Iterator[Document]:
    """Text files. Pieces of long files are named by their content, like records."""
    for path in source_files(source):
        try:
            text = without_mark(utf8_text(path.read_bytes(), str(path)), dropped)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}", "give a text file") from error
        pieces = [text] if source.form == "prompt" else list(cut_text(text))
        for piece in pieces:
            yield _file(corpus, source, path.name if len(pieces) == 1 else f"{path.name}#{fingerprint(piece)}", piece)


def _file(corpus: Corpus, source: Source, name: str, text: str) -> Document:
    """A text, or with form prompt a user's message."""
    if source.form != "prompt":
        return _document(corpus, source, name, text)
    messages = ({"role": "user", "content": text},)
    return _document(corpus, source, name, text, messages=messages, label=source.label or "")


def _records(corpus: Corpus, source: Source, records: Iterable[Record], dropped: Counter[str]) -> Iterator[Document]:
    """Records as texts or conversations. `dropped` counts records that are neither.

    Raises DataError for a first record without a field that is read.
    """
    origin, named = Path(source.path).name, source.fields.get("label", "category")
    field, first = source.fields.get("text", "text"), True
    for place, record in records:
        if has_halves(record):
            dropped["records with half of a character (a lone surrogate)"] += 1
            continue
        form = form_of(record, source)
        label = source.label or record.get(named)
        more: dict[str, Any] = {"label": label if isinstance(label, str) else ""}
        if form == "text" and isinstance(record.get(field), str):
            text = record[field]
            aside = {field, *([named] if isinstance(record.get(named), str) else [])}
            count_fields(unread_fields(record, aside), "records", dropped)
        elif form not in (None, "text"):
            try:
                messages, arguments = read_conversation(record, str(form), source, dropped)
            except ValueError as error:
                dropped[str(error)] += 1
                first = False
                continue
            messages = messages if source.given else _asked_alone(messages)
            text = questions(messages, arguments)
            more |= {"messages": messages, "arguments": arguments}
        else:
            empty = [name for name in (field, *PROMPTS, *LISTS) if name in record and record[name] is None]
            if first and not empty:
                hint = _way_to_text(record, form, source)
                raise DataError(
                    f"{source.path}: {place} has no text in field `{field}` (it has: {names_of(record)})", hint
                )
            reason = (
                f"whose `{empty[0]}` is null" if empty else f"without a text in `{field}` or another field that is read"
            )
            dropped[f"records {reason}"] += 1
            continue
        first = False
        # Named by its content, so that a growing or reordered file keeps every document in its split.
        yield _document(corpus, source, f"{origin}#{fingerprint(text)}", text, **more)


def _asked_alone(messages: Messages) -> Messages:
    """The messages with empty answers, up to the last question."""
    while messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    return tuple(UNANSWERED if message["role"] == "assistant" else message for message in messages)


def _way_to_text(record: Mapping[str, Any], form: str | None, source: Source) -> str:
    """The next step for a record without a text. A single field of text gives the line that names it."""
    names = [name for name, value in record.items() if isinstance(value, str)]
    if len(names) != 1:
        return "set `fields` or `form` of this corpus source"
    ways = [f"`fields: {{text: {names[0]}}}` for text"] if form == "text" or "prompt" not in source.fields else []
    ways += [f"`fields: {{prompt: {names[0]}}}` for prompts"] if form is None else []
    return f"write {' or '.join(ways)} into this corpus source"


def _read_source(corpus: Corpus, source: Source, dropped: Counter[str]) -> Iterator[Document]:
    """A source's documents. Raises DataError if it has no text."""
    before, files, has_text = dropped.copy(), 0, False
    if source.kind in ("tree", "text"):
        documents = (_tree if source.kind == "tree" else _texts)(corpus, source, dropped)
    else:
        paths = [] if source.kind == "hub" else source_files(source)
        documents = _records(corpus, source, read_records(source, paths, dropped), dropped)
    for document in documents:
        files, has_text = files + 1, has_text or bool(document.text.strip())
        yield document
    if not has_text:
        left = ", ".join(f"{count} {reason}" for reason, count in (dropped - before).items())
        excluded = f" outside {', '.join(source.exclude)}" if source.exclude else ""
        none = source.kind == "tree" and not files and not left
        what = f"no file that matches {source.pattern}{excluded}" if none else f"no text{left and ': '}{left}"
        hint = "correct its pattern" if none else "correct it, or leave it out"
        raise DataError(f"corpus source {source.path} has {what}", hint)


UNREAD = "beyond corpus.max_documents (rest of a source unread)"  # a reason for dropped documents


def _unrendered(
    corpus: Corpus, source: Source, read: Document, talk_of: Callable[[str], Messages | None], dropped: Counter[str]
) -> Document:
    """The conversation of a text that the target's chat template has rendered, or the document unchanged."""
    if read.messages is not None or source.form != "auto" or read.own:
        return read
    try:
        messages, reason = talk_of(read.text), ""
    except ValueError as error:
        messages, reason = None, str(error)
    if messages is not None:
        messages = messages if source.given else _asked_alone(messages)
        text = questions(messages)
        name = f"{read.source}#{fingerprint(text)}"
        return _document(corpus, source, name, text, messages=messages, label=read.label)
    if not reason and (mark := RENDERED.search(read.text[:BEGINNING])):
        reason = f"texts that look rendered by another chat template (`{mark[0]}`)"
    if reason:
        dropped[f"{reason}: read as plain text"] += 1
    return read


def source_names(corpus: Corpus) -> list[str]:
    """Return a name for each source: the last part of its path, with its folder or a number where others end alike."""
    names = [Path(source.path).name for source in corpus.sources]
    twice = {name for name, count in Counter(names).items() if count > 1}
    longer = [
        "/".join(Path(source.path).parts[-2:]) if name in twice else name
        for source, name in zip(corpus.sources, names, strict=True)
    ]
    again, seen = Counter(longer), Counter[str]()
    for place, name in enumerate(longer):
        seen[name] += 1
        if again[name] > 1:
            longer[place] = f"{name} ({seen[name]})"
    return longer


def read_documents(
    corpus: Corpus,
    needed: tuple[Split, ...] = SPLITS,
    folder: Path | None = None,
    talk_of: Callable[[str], Messages | None] | None = None,
) -> tuple[Documents, Counter[str]]:
    """All documents of a corpus in a fixed order, stored in `folder`, and the number of dropped documents by reason.

    `talk_of` returns the conversation that the target's chat template has rendered as a text, or None. Without
    `talk_of`, all texts are plain texts.

    Raises DataError for a missing or unreadable source and for a corpus without a needed split, RunError for a full
    disk.
    """
    documents = Documents(folder)
    dropped: Counter[str] = Counter()
    names: set[str] = set()
    texts: set[bytes] = set()
    for source, called in zip(corpus.sources, source_names(corpus), strict=True):
        for taken, read in enumerate(_read_source(corpus, source, dropped)):
            if taken >= corpus.max_documents:
                dropped[UNREAD] += 1
                break
            document = read if talk_of is None else _unrendered(corpus, source, read, talk_of, dropped)
            content = hashlib.sha256(document.text.encode()).digest()
            if not document.text.strip():
                dropped["empty"] += 1
            elif document.split not in source.keep:
                dropped[f"of split {document.split}, not kept"] += 1
            elif content in texts:
                dropped["duplicate"] += 1
            else:
                if document.name in names:  # Another source has another text of that name.
                    document = replace(document, name=f"{document.source}/{document.name}#{content.hex()[:8]}")
                names.add(document.name)
                texts.add(content)
                documents.append(replace(document, source=called))
    require_splits(documents.sealed(), dropped, needed)
    return documents, dropped


def require_splits(documents: Sequence[Document], dropped: Counter[str], needed: tuple[Split, ...] = SPLITS) -> None:
    """Raise DataError for a corpus without a document of a needed split."""
    for split in needed:
        if not any(document.split == split for document in documents):
            why = "".join(f", {count} dropped: {reason}" for reason, count in dropped.items())
            short = any(document.name == document.source for document in documents)
            counts = ", ".join(f"{sum(each.split == name for each in documents)} {name}" for name in SPLITS)
            raise DataError(
                f"the corpus has no {split} document ({len(documents)} documents in all: {counts}{why})",
                "add documents: tens are needed, because a hash of their names divides them by corpus.validation and "
                "corpus.test; or give a source its `split`"
                + (f"; a text file of at most {2 * PIECE:,} characters is one document" if short else ""),
            )
