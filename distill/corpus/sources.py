"""Where documents come from: source trees, text files, jsonl and hub data sets."""

from __future__ import annotations

import hashlib
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.corpus.pieces import PIECE, cut_text
from distill.corpus.splits import SPLITS, Split, split_of
from distill.errors import DataError
from distill.files import names_of, parse_object, read_utf8
from distill.recipe import Corpus, Source


@dataclass(frozen=True)
class Document:
    """A text, its name within its source, the split it belongs to, and the source's own name."""

    name: str
    split: Split
    text: str
    source: str = ""


def source_path(source: Source) -> Path:
    """The folder or file of a local source; raises DataError when it does not exist."""
    if source.path == "python:stdlib":
        return Path(sysconfig.get_paths()["stdlib"])
    path = Path(source.path)
    if not path.exists():
        raise DataError(f"corpus source {path} does not exist", "correct corpus.sources in the recipe")
    if source.kind == "tree" and not path.is_dir():
        raise DataError(f"corpus source {path} is a file, but its kind is tree", "use kind: text or kind: jsonl")
    if source.kind != "tree" and path.is_dir():
        raise DataError(f"corpus source {path} is a folder, but its kind is {source.kind}", "use kind: tree")
    return path


def _tree(source: Source, dropped: Counter[str]) -> Iterator[tuple[str, str]]:
    root = source_path(source)
    for path in sorted(root.glob(source.pattern)):
        name = path.relative_to(root)
        if not path.is_file() or set(source.exclude) & set(name.parts):
            continue
        try:
            yield name.as_posix(), path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            dropped["not UTF-8"] += 1
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}", "exclude it, or correct it") from error


def _hub_records(source: Source) -> Iterator[dict[str, Any]]:
    """Records of a hub data set, through `datasets`."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # the DataError below reports its faults, once
    try:
        yield from datasets.load_dataset(source.path, source.subset, split=source.hub_split, streaming=True)
    except Exception as error:  # the hub client raises many kinds; each means that the data set is not available
        kind = type(error).__name__
        wanted = f"subset {source.subset}, split {source.hub_split}"
        raise DataError(
            f"cannot read data set {source.path} ({wanted}): `datasets` stopped with {kind}",
            "check its name, its subset, its split and the network",
        ) from error


def _jsonl_records(source: Source) -> Iterator[tuple[int, dict[str, Any]]]:
    """The line number and the object of every line of a jsonl file that is not blank."""
    path, empty = source_path(source), True
    try:
        with open(path, "rb") as handle:
            for number, raw in enumerate(handle, 1):
                if not raw.strip():
                    continue
                record, empty = parse_object(raw), False
                if isinstance(record, str):
                    raise DataError(f"{path}: line {number}: {record}", "each line must be one JSON object")
                yield number, record
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", "correct corpus.sources in the recipe") from error
    if empty:
        raise DataError(f"{path}: the file is empty", "each line must be one JSON object")


def _text(source: Source) -> Iterator[tuple[str, str]]:
    """A text file: a document of its own, or in pieces that are, named by content as the lines of jsonl are."""
    path = source_path(source)
    parts = list(cut_text(read_utf8(path)))
    for part in parts:
        yield path.name if len(parts) == 1 else f"{path.name}#{_fingerprint(part)}", part


def _fingerprint(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _texts(source: Source, dropped: Counter[str]) -> Iterator[tuple[str, str]]:
    """Names and texts of a source's documents; raises DataError where it has none at all."""
    before, files, found = dropped.total(), 0, False
    for name, text in _all_texts(source, dropped):
        files, found = files + 1, found or bool(text.strip())
        yield name, text
    if not found:
        tree, other = source.kind == "tree", dropped.total() - before
        excluded = f" outside {', '.join(source.exclude)}" if tree and source.exclude else ""
        none = tree and not files and not other
        what = f"no file that matches {source.pattern}{excluded}" if none else "no text"
        why = f": {other} files are not UTF-8" if other else ""
        raise DataError(
            f"corpus source {source.path} has {what}{why}",
            "correct its pattern" if none else "correct it, or leave it out",
        )


def _all_texts(source: Source, dropped: Counter[str]) -> Iterator[tuple[str, str]]:
    if source.kind == "tree":
        yield from _tree(source, dropped)
    elif source.kind == "text":
        yield from _text(source)
    else:
        records = enumerate(_hub_records(source), 1) if source.kind == "hub" else _jsonl_records(source)
        for number, record in records:
            text = record.get(source.field)
            if not isinstance(text, str):
                what = f"{'record' if source.kind == 'hub' else 'line'} {number} has no text in field `{source.field}`"
                raise DataError(
                    f"{source.path}: {what} (it has: {names_of(record)})", "set `field` of this corpus source"
                )
            # The name comes from the content, so that a growing or reordered file keeps every document in its split.
            yield f"{Path(source.path).name}#{_fingerprint(text)}", text


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
        for taken, (name, text) in enumerate(_texts(source, dropped)):
            if taken >= corpus.max_documents:
                dropped[UNREAD] += 1
                break
            split: Split = split_of(name, corpus.validation, corpus.test) if source.split == "by-name" else source.split
            content = hashlib.sha256(text.encode()).digest()
            if not text.strip():
                dropped["empty"] += 1
            elif split not in source.keep:
                dropped[f"of split {split}, not kept"] += 1
            elif content in texts:
                dropped["duplicate"] += 1
            else:
                origin = Path(source.path).name
                if name in names:  # another text of that name, from another source
                    name = f"{origin}/{name}#{content.hex()[:8]}"
                names.add(name)
                texts.add(content)
                documents.append(Document(name, split, text, origin))
    require_splits(documents, dropped, needed)
    return documents, dropped


def require_splits(documents: list[Document], dropped: Counter[str], needed: tuple[Split, ...] = SPLITS) -> None:
    """Raise DataError for a corpus without a document of a needed split."""
    for split in needed:
        if not any(document.split == split for document in documents):
            why = "".join(f", {count} dropped: {reason}" for reason, count in dropped.items())
            short = any(one.name == one.source for one in documents)
            raise DataError(
                f"the corpus has no {split} document ({len(documents)} documents in all{why})",
                "add a source, or change corpus.validation / corpus.test"
                + (f"; a text file of at most {2 * PIECE:,} characters is one document" if short else ""),
            )
