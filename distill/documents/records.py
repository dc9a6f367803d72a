"""Records of jsonl, csv and parquet files and of hub data sets, one mapping each, with the place that messages name."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distill.errors import DataError
from distill.files import parse_object
from distill.recipe import Source

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
        raise DataError(f"{path} is no readable parquet file: {first}", "copy it again, or use jsonl") from error


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
