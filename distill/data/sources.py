"""The documents of a corpus and the split of each: from source trees, text files, and records and conversations.

Records stand in jsonl, csv and parquet files, and in hub data sets.
"""

from __future__ import annotations

import contextlib
import csv
import glob
import hashlib
import json
import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from distill.errors import DataError
from distill.files import has_form, names_of, parse_object, read_utf8
from distill.recipe import Corpus, Source

# ── Records of files and hub data sets ──

Record = tuple[str, dict[str, Any]]  # where it stands, and its fields


def read_records(source: Source, paths: list[Path]) -> Iterator[Record]:
    """All records of a source; `paths` are its files, none for a hub data set.

    Raises DataError for a file that cannot be read, is of another format, or is empty.
    """
    if source.kind == "hub":
        yield from _hub(source)
        return
    read = {"jsonl": _jsonl, "csv": _csv, "parquet": _parquet, "target": _jsonl}[source.kind]
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


def _jsonl(path: Path) -> Iterator[Record]:
    with open(path, "rb") as handle:
        for number, raw in enumerate(handle, 1):
            if not raw.strip():
                continue
            record = parse_object(raw)
            if isinstance(record, str):
                raise DataError(f"{path}: line {number}: {record}", "each line must be one JSON object")
            yield f"line {number}", record


def _csv(path: Path) -> Iterator[Record]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a text may be longer than the module's default of 128 kB
    try:
        with open(path, encoding="utf-8-sig", newline="") as handle:
            reader = csv.DictReader(handle, strict=True)
            for record in reader:
                yield f"line {reader.line_num}", {name: value for name, value in record.items() if name is not None}
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8", "convert it") from error
    except csv.Error as error:
        raise DataError(f"{path}: line {reader.line_num}: {error}", "correct the quotes, or use jsonl") from error


def _parquet(path: Path) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(256):
                for record in batch.to_pylist():
                    number += 1
                    yield f"row {number}", record
    except pyarrow.ArrowException as error:
        first = str(error).splitlines()[0][:200]
        raise DataError(f"{path} is not a readable parquet file: {first}", "copy it again, or use jsonl") from error


def _hub(source: Source) -> Iterator[Record]:
    """Records of a hub data set, streamed through `datasets`."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # the DataError below reports its faults, once
    try:
        found = datasets.load_dataset(source.path, source.subset, split=source.hub_split, streaming=True)
        for number, record in enumerate(found, 1):
            yield f"record {number}", record
    except Exception as error:  # the hub client raises many kinds; each means that the data set is not available
        kind = type(error).__name__
        wanted = f"subset {source.subset}, split {source.hub_split}"
        raise DataError(
            f"cannot read data set {source.path} ({wanted}): `datasets` stopped with {kind}",
            "check its name, its subset, its split and the network",
        ) from error


# ── Conversations: chat messages, ShareGPT, lists of turns, prompt and answer, plain prompts ──

Messages = tuple[dict[str, Any], ...]  # role, content, and whatever else the template reads

# The names under which data sets keep a speaker.
SPEAKERS = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}
LISTS = ("messages", "conversations", "turns")
PROMPTS = ("prompt", "instruction", "question", "query")
ANSWERS = ("answer", "completion", "response", "output")
EXTRA = ("reasoning_content", "tool_calls", "tool_call_id", "name")  # of a message, kept for the template


def form_of(record: Mapping[str, Any], source: Source) -> str | None:
    """How a record holds its text: the source's `form`, or what its fields say; None where no field is known."""
    if source.form != "auto":
        return source.form
    names: Mapping[Any, str] = source.fields
    for form in LISTS:
        if isinstance(record.get(names.get(form, form)), list):
            return form
    if isinstance(record.get(source.field), str) and "prompt" not in names:
        return "text"
    return "prompt" if _first(record, names, "prompt", PROMPTS) is not None else None


def read_conversation(record: Mapping[str, Any], form: str, source: Source) -> Messages:
    """The messages of a record, ending with an answer or with a question; ValueError, with the reason, where it has
    none."""
    names: Mapping[Any, str] = source.fields
    if form == "prompt":
        prompt, answer = _first(record, names, "prompt", PROMPTS), _first(record, names, "answer", ANSWERS)
        if isinstance(prompt, list):  # messages before the answer, as preference data sets have them
            messages = _messages(prompt)
        elif isinstance(prompt, str):
            messages = [{"role": "user", "content": prompt}]
        else:
            raise ValueError("no prompt that is text")
        if isinstance(answer, list):
            messages += _messages(answer)
        elif isinstance(answer, str) and answer:
            messages.append({"role": "assistant", "content": answer})
    elif form == "turns":
        turns: Any = record.get(names.get("turns", "turns"))
        if not has_form(turns, [str]):
            raise ValueError("turns that are not text")
        messages = [{"role": "user", "content": turn} for turn in turns]
    else:
        messages = _messages(record.get(names.get(form, form)))
    system = record.get(names.get("system", "system"))
    if isinstance(system, str) and system.strip() and not any(one["role"] == "system" for one in messages):
        messages.insert(0, {"role": "system", "content": system})
    return _usable(tuple(messages))


def _first(record: Mapping[str, Any], names: Mapping[Any, str], kind: str, known: tuple[str, ...]) -> Any:
    if kind in names:
        return record.get(names[kind])
    return next((record[name] for name in known if record.get(name) is not None), None)


def _messages(value: Any) -> list[dict[str, Any]]:
    """Messages of role and content, or of ShareGPT's from and value."""
    if isinstance(value, str):  # some data sets keep the list as JSON text
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if not isinstance(value, list):
        raise ValueError("messages that are not a list")
    messages = []
    for one in value:
        if not isinstance(one, dict):
            raise ValueError("a message that is not a mapping")
        role = str(one.get("role", one.get("from")))
        if role.lower() not in SPEAKERS:
            raise ValueError(f"a message of the unknown role {role[:20]!r}")
        content = _text(one["content"] if "content" in one else one.get("value"))
        if content is None and not one.get("tool_calls"):
            raise ValueError("a message whose content is not text")
        extra = {name: one[name] for name in EXTRA if one.get(name)}
        messages.append({"role": SPEAKERS[role.lower()], "content": content or "", **extra})
    return messages


def _text(content: Any) -> str | None:
    """The text of a message: itself, or its parts of type text; None for anything else, such as images."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    return "".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else None


def _usable(messages: Messages) -> Messages:
    """The messages up to the last question or answer; ValueError where a model cannot be asked them."""
    roles = [one["role"] for one in messages]
    while roles and roles[-1] in ("system", "tool"):
        roles.pop()
    if "user" not in roles:
        raise ValueError("no user's turn")
    if "assistant" in roles and roles.index("assistant") < roles.index("user"):
        raise ValueError("an answer before the first question")
    if not all(one["content"].strip() for one in messages[: len(roles)] if one["role"] == "user"):
        raise ValueError("an empty question")
    return messages[: len(roles)]


def questions(messages: Messages) -> str:
    """The text that names a conversation and gives its split: all but answers, so that no question is in two splits."""
    return json.dumps([[one["role"], one["content"]] for one in messages if one["role"] != "assistant"])


def fingerprint(text: str) -> str:
    """A name for a text by its content."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ── Documents and their splits ──

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
PIECE = 16_384  # characters, some 4,000 tokens: several blocks, and hundreds of pieces in a book or a log


@dataclass(frozen=True)
class Document:
    """A text, its name within its source, the split it belongs to, and the source's own name.

    A conversation has its `messages`, which end with a question or an answer; its text is then the questions alone.
    `label` is the class that reports show. `own`: the target wrote the conversation, its answers included.
    """

    name: str
    split: Split
    text: str
    source: str = ""
    messages: Messages | None = None
    label: str = ""
    own: bool = False

    @property
    def plain_text(self) -> str:
        """Its text without roles and templates."""
        return self.text if self.messages is None else "\n\n".join(one["content"] for one in self.messages)


def split_of(name: str, validation: float, test: float) -> Split:
    """Split of the document called `name`, the same on every machine and in every version of the corpus.

    `validation` and `test` are the fractions of names (0 to 1) that go to those splits. Only the name is
    hashed, never the text or its rank, so a document that changes or moves among others keeps its split.
    """
    point = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64
    if point < test:
        return "test"
    return "validation" if point < test + validation else "train"


def source_path(source: Source) -> Path:
    """The folder or file of a local source; raises DataError when it does not exist."""
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
        source.model_copy(update={"path": next(files), "form": "messages"}) if source.kind == "target" else source
        for source in corpus.sources
    )
    return corpus.model_copy(update={"sources": sources})


def question_files(corpus: Corpus) -> list[str]:
    """The names of the files that hold the questions of a corpus's sources of kind target, in their order."""
    return [f"target{'' if not number else f'-{number + 1}'}.jsonl" for number in range(len(corpus.asked))]


def source_files(source: Source) -> list[Path]:
    """The files of a source that is neither a tree nor a hub data set: one, or all that match its path.

    Raises DataError where there is none.
    """
    if not any(sign in source.path for sign in "*?[") or Path(source.path).exists():
        return [source_path(source)]
    try:
        found = sorted(path for path in map(Path, glob.glob(source.path, recursive=True)) if path.is_file())
    except (OSError, ValueError, re.error):
        found = []
    if not found:
        raise DataError(f"corpus source {source.path} matches no file", "correct corpus.sources in the recipe")
    return found


def cut_text(text: str, size: int = PIECE) -> Iterator[str]:
    """The text in pieces of `size` to 2 · `size` characters, each from a paragraph on where there are any, else a line.

    A text of at most 2 · `size` characters is one piece. Cuts depend on the text before them alone: a file that grows
    keeps its pieces but the last.
    """
    start = 0
    while len(text) - start > 2 * size:
        window = start + size, start + 2 * size
        blank, line = text.find("\n\n", *window), text.find("\n", *window)
        end = blank + 2 if blank >= 0 else line + 1 if line >= 0 else window[1]
        yield text[start:end]
        start = end
    yield text[start:]


def _document(
    corpus: Corpus, source: Source, name: str, text: str, messages: Messages | None = None, label: str = ""
) -> Document:
    """A document of a source, in the split that its name or the source gives it."""
    split = split_of(name, corpus.validation, corpus.test) if source.split == "by-name" else source.split
    return Document(name, split, text, Path(source.path).name, messages, label, source.kind == "target")


def tree_files(source: Source) -> dict[str, Path]:
    """The files of a tree that match its pattern and are not excluded, in order, by their names below its folder."""
    root = source_path(source)
    places = ((path.relative_to(root), path) for path in sorted(root.glob(source.pattern)) if path.is_file())
    return {place.as_posix(): path for place, path in places if not set(source.exclude) & set(place.parts)}


def _tree_texts(source: Source, dropped: Counter[str]) -> Iterator[tuple[str, str]]:
    """Names and texts of the files of a tree."""
    for name, path in tree_files(source).items():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            dropped["not UTF-8"] += 1
            continue
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}", "exclude it, or correct it") from error
        yield name, text


def _text_pieces(source: Source) -> Iterator[tuple[str, str]]:
    """Names and texts of text files; pieces of long ones are named by content, as records are."""
    for path in source_files(source):
        text = read_utf8(path)
        pieces = [text] if source.form == "prompt" else list(cut_text(text))
        for piece in pieces:
            yield path.name if len(pieces) == 1 else f"{path.name}#{fingerprint(piece)}", piece


def _files(corpus: Corpus, source: Source, dropped: Counter[str]) -> Iterator[Document]:
    """Files of a tree, or text files; with form prompt, each is a user's message."""
    for name, text in _tree_texts(source, dropped) if source.kind == "tree" else _text_pieces(source):
        if source.form == "prompt":
            yield _document(corpus, source, name, text, ({"role": "user", "content": text},), source.label or "")
        else:
            yield _document(corpus, source, name, text)


def _records(corpus: Corpus, source: Source, dropped: Counter[str]) -> Iterator[Document]:
    """Records as texts or conversations; those that are neither are counted in `dropped`."""
    origin = Path(source.path).name
    for place, record in read_records(source, [] if source.kind == "hub" else source_files(source)):
        form = form_of(record, source)
        label = source.label or record.get(source.fields.get("label", "category"))
        messages: Messages | None = None
        if form == "text" and isinstance(record.get(source.field), str):
            text = record[source.field]
        elif form not in (None, "text"):
            try:
                found = read_conversation(record, str(form), source)
            except ValueError as error:
                dropped[str(error)] += 1
                continue
            messages = tuple(one for one in found if source.given or one["role"] in ("system", "user"))
            text = questions(messages)
        else:
            raise DataError(
                f"{source.path}: {place} has no text in field `{source.field}` (it has: {names_of(record)})",
                _way_to_text(record, form, source),
            )
        # Named by its content, so that a growing or reordered file keeps every document in its split.
        name = f"{origin}#{fingerprint(text)}"
        yield _document(corpus, source, name, text, messages, label if isinstance(label, str) else "")


def _way_to_text(record: Mapping[str, Any], form: str | None, source: Source) -> str:
    """The next step for a record without a text; of one with a single field of text, the line that names it."""
    names = [name for name, value in record.items() if isinstance(value, str)]
    if len(names) != 1:
        return "set `field` or `form` and `fields` of this corpus source"
    ways = [f"`field: {names[0]}` for text"] if form == "text" or "prompt" not in source.fields else []
    ways += [f"`fields: {{prompt: {names[0]}}}` for prompts"] if form is None else []
    return f"write {' or '.join(ways)} into this corpus source"


def _read_source(corpus: Corpus, source: Source, dropped: Counter[str]) -> Iterator[Document]:
    """A source's documents; raises DataError where it has none at all."""
    before, files, found = dropped.total(), 0, False
    for document in (_files if source.kind in ("tree", "text") else _records)(corpus, source, dropped):
        files, found = files + 1, found or bool(document.text.strip())
        yield document
    if not found:
        tree, other = source.kind == "tree", dropped.total() - before
        excluded = f" outside {', '.join(source.exclude)}" if tree and source.exclude else ""
        none = tree and not files and not other
        what = f"no file that matches {source.pattern}{excluded}" if none else "no text"
        why = f": {other} {'files are not UTF-8' if tree else 'records were dropped: ' + str(dict(dropped))}"
        raise DataError(
            f"corpus source {source.path} has {what}{why if other else ''}",
            "correct its pattern" if none else "correct it, or leave it out",
        )


UNREAD = "beyond corpus.max_documents (rest of a source unread)"  # a reason for dropped documents


def read_documents(corpus: Corpus, needed: tuple[Split, ...] = SPLITS) -> tuple[list[Document], Counter[str]]:
    """All documents of a corpus in a fixed order, and the number of dropped ones by reason.

    Raises DataError for a missing or unreadable source and for a corpus without a needed split.
    """
    documents: list[Document] = []
    dropped: Counter[str] = Counter()
    names: set[str] = set()
    texts: set[bytes] = set()
    for source in corpus.sources:
        for taken, one in enumerate(_read_source(corpus, source, dropped)):
            if taken >= corpus.max_documents:
                dropped[UNREAD] += 1
                break
            content = hashlib.sha256(one.text.encode()).digest()
            if not one.text.strip():
                dropped["empty"] += 1
            elif one.split not in source.keep:
                dropped[f"of split {one.split}, not kept"] += 1
            elif content in texts:
                dropped["duplicate"] += 1
            else:
                if one.name in names:  # another text of that name, from another source
                    one = replace(one, name=f"{one.source}/{one.name}#{content.hex()[:8]}")
                names.add(one.name)
                texts.add(content)
                documents.append(one)
    require_splits(documents, dropped, needed)
    return documents, dropped


def require_splits(documents: list[Document], dropped: Counter[str], needed: tuple[Split, ...] = SPLITS) -> None:
    """Raise DataError for a corpus without a document of a needed split."""
    for split in needed:
        if not any(document.split == split for document in documents):
            why = "".join(f", {count} dropped: {reason}" for reason, count in dropped.items())
            short = any(one.name == one.source for one in documents)
            counts = ", ".join(f"{sum(one.split == name for one in documents)} {name}" for name in SPLITS)
            raise DataError(
                f"the corpus has no {split} document ({len(documents)} documents in all: {counts}{why})",
                "add documents: tens are needed, as a hash of their names divides them by corpus.validation and "
                "corpus.test; or give a source its `split`"
                + (f"; a text file of at most {2 * PIECE:,} characters is one document" if short else ""),
            )
