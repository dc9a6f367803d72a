"""Results between dataclasses and JSON artifacts: written once, read back with every field checked."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from distill.errors import DataError
from distill.files import read_json, without_nan, write_json

Result = TypeVar("Result")

# A number that may be unknown: NaN in a dataclass, null in JSON, which has no NaN.
Figure = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]


def as_json(result: Any) -> Any:
    """A dataclass as plain JSON values; a figure that could not be had (NaN) is None."""
    return without_nan(asdict(result))


def write_result(path: Path, result: Any) -> None:
    """Write a dataclass as JSON, atomically."""
    write_json(path, asdict(result))


def read_result(path: Path, kind: type[Result]) -> Result:
    """Read what `write_result` wrote; raises DataError where it is missing, damaged or of another version's form."""
    return from_json(read_json(path), kind, str(path))


def from_json(value: Any, kind: type[Result], source: str) -> Result:
    """A dataclass from JSON values, nested ones too; raises DataError, which names `source`, for another form."""
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise DataError(
            f"{source} does not hold what this version writes: {where or 'it'} is missing or of another kind",
            "make it again: `distill train RECIPE --redo STAGE`, with the stage that wrote it",
        ) from error
