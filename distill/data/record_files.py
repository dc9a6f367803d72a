"""Records one by one, from files of JSON (an object a line, or one array), csv and parquet, and from hub data sets."""

from __future__ import annotations

import csv
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from distill.data.records import LISTS, PROMPTS, form_of
from distill.errors import DataError
from distill.files import has_form, kind_of, parse_json
from distill.recipe import Source

Record = tuple[str, dict[str, Any]]  # where it stands, and its fields


def read_records(source: Source, paths: list[Path], dropped: Counter[str]) -> Iterator[Record]:
    """All records of a source; `paths` are its files, none for a hub data set.

    Counts in `dropped` what the files lack. Raises DataError for a file that cannot be read, is of another format, or
    is empty.
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
    """Whether a file, whatever its name, is JSON whose first record holds a text, a prompt or messages."""
    try:
        found = next(read_json_records(path), None)
    except (DataError, OSError):
        return False
    return found is not None and form_of(found[1], Source(kind="jsonl", path=str(path))) is not None


# ── JSON: a record a line, or one array of records, on one line or indented ──


def read_json_records(path: Path) -> Iterator[Record]:
    """The records of a file of JSON, which may hold halves of characters; a list of messages in the place of a record
    is one with `messages`."""
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
    """The records of a file that is one indented JSON value; `fault` is what its first line alone has."""
    try:
        found = _records_of(parse_json(path.read_bytes(), halves=True))
    except ValueError as error:
        indented = first.rstrip()[-1:] in (b"[", b"{", b",")
        raise (DataError(f"{path}: {error}", "correct it") if indented else _line_fault(path, number, fault)) from None
    if isinstance(found, str):
        raise DataError(f"{path}: {found}", "give one JSON object a line, or one array of objects")
    for at, record in enumerate(found, 1):
        yield f"record {at}", record


def _records_of(value: Any) -> list[dict[str, Any]] | str:
    """The records in a JSON value: an object, a list of messages, or an array of these; else what is wrong."""
    if isinstance(value, dict):
        return [value]
    if _is_messages(value):
        return [{"messages": value}]
    if isinstance(value, list) and all(isinstance(one, dict) or _is_messages(one) for one in value):
        return [one if isinstance(one, dict) else {"messages": one} for one in value]
    return f"a JSON object is needed, got {kind_of(value)}"


def _is_messages(value: Any) -> bool:
    return bool(value) and has_form(value, [{}]) and all({"role", "from"} & set(one) for one in value)


# ── csv ──

DELIMITERS = ",;\t|"


def _csv(wanted: set[str], dropped: Counter[str], path: Path) -> Iterator[Record]:
    """Rows by the names in the first line, which shows the delimiter, too."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a text may be longer than the module's default of 128 kB
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
                found = {name: cell for name, cell in row.items() if cell is not None}
                if len(found) < len(names):
                    dropped["csv rows shorter than their header: the fields that they lack"] += 1
                yield place, found
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8", "convert it") from error
    except csv.Error as error:
        line = before + (rows.reader.line_num if rows else 1)
        raise DataError(f"{path}: line {line}: {error}", "correct the quotes, or use jsonl") from error


def delimiter_of(first: str, wanted: Iterable[str]) -> str:
    """The delimiter of a header line: one that separates a wanted name, else one that separates anything."""
    headers = {sign: [cell.strip() for cell in next(csv.reader([first], delimiter=sign), [])] for sign in DELIMITERS}
    known = [sign for sign in DELIMITERS if set(wanted) & set(headers[sign])]
    several = [sign for sign in DELIMITERS if len(headers[sign]) > 1]
    return (known or several or [","])[0]


def _header(path: Path, cells: Sequence[str], wanted: set[str]) -> list[str]:
    """The names of the columns, those without one numbered; DataError for a line that is no header."""
    names = [cell.strip() or f"column {number}" for number, cell in enumerate(cells, 1)]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if names and (twice or not wanted & set(names)):
        what = f"names the column {twice[0][:40]!r} twice" if twice else "names no column that is read"
        shown = " | ".join(name[:60] for name in names[:6])
        raise DataError(
            f"{path}: the first line {what}: {shown}",
            "put a line with the columns' names before the rows, such as `prompt,answer`, or name them in a recipe: "
            + (f"`field: {names[0]}`" if len(names) == 1 else "`fields`"),
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
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # the DataError below reports its faults, once
    try:
        found = datasets.load_dataset(source.path, source.subset, split=source.hub_split, streaming=True)
        for number, record in enumerate(found, 1):
            yield f"record {number}", _without_nulls(record)
    except Exception as error:  # the hub client raises many kinds; each means that the data set is not available
        kind = type(error).__name__
        wanted = f"subset {source.subset}, split {source.hub_split}"
        raise DataError(
            f"cannot read data set {source.path} ({wanted}): `datasets` stopped with {kind}",
            "check its name, its subset, its split and the network",
        ) from error


def _without_nulls(value: Any) -> Any:
    """A value of Arrow without the nulls that it gives every struct for the fields of all others."""
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
