"""The base class of recipe sections."""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

LARGEST = 2**63 - 1  # the largest integer that the libraries below take


class Section(BaseModel):
    """Immutable, without unknown keys, and with finite numbers that are not given as true or false."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _numbers_are_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        if info.field_name is not None and _takes_numbers(cls, info.field_name):
            for part in _parts(value):
                if isinstance(part, bool):
                    raise ValueError("a number is needed")
                if isinstance(part, int) and abs(part) > LARGEST:
                    raise ValueError(f"integers up to {LARGEST} can be used")
        return value


@functools.cache
def _takes_numbers(section: type[Section], name: str) -> bool:
    """Whether a key takes numbers, alone or in lists and mappings, and neither true nor false."""
    kinds = set(_kinds(section.model_fields[name].annotation))
    return bool(kinds & {int, float}) and bool not in kinds


def _kinds(annotation: Any) -> Iterator[Any]:
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal or not arguments:
        yield annotation if isinstance(annotation, type) else None
        return
    for argument in arguments:
        yield from _kinds(argument)


def _parts(value: Any) -> Iterator[Any]:
    """The values in nested lists and mappings, or the value itself."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _parts(part)
    else:
        yield value
