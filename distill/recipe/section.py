"""The base class of recipe sections, and the mistakes in one in this project's words: where, what, and the value."""

from __future__ import annotations

import difflib
import functools
import reprlib
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from distill.errors import RecipeError
from distill.files import LARGEST


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


# ── mistakes ──

SomeSection = typing.TypeVar("SomeSection", bound=Section)

_SHORT = reprlib.Repr()
_SHORT.maxstring, _SHORT.maxother, _SHORT.maxlevel, _SHORT.maxdict, _SHORT.maxlong = 80, 80, 3, 6, 40

# What each type of error that pydantic reports means, in our words. One that is not listed says only that the value
# cannot be used: its own words are never shown.
_INTEGER, _NUMBER, _TEXT = "an integer is needed", "a number is needed", "text is needed"
_LIST, _SECTION = "a list is needed", "a section is needed, with a key and a value on each line"
WORDS: dict[str, Callable[[dict[str, Any]], str]] = {
    "greater_than_equal": lambda c: f"must be at least {c['ge']}",
    "greater_than": lambda c: f"must be above {c['gt']}",
    "less_than_equal": lambda c: f"must be at most {c['le']}",
    "less_than": lambda c: f"must be below {c['lt']}",
    "finite_number": lambda c: "must be a finite number",
    "string_pattern_mismatch": lambda c: f"must match {c['pattern']}",
    "string_too_long": lambda c: f"must have at most {c['max_length']} characters",
    "string_unicode": lambda c: "must be text without lone surrogates",
    "too_short": lambda c: (
        f"needs at least {c['min_length']} entries" if c["min_length"] != 1 else "needs at least 1 entry"
    ),
    "too_long": lambda c: f"must have at most {c['max_length']} entries",
    "recursion_loop": lambda c: "contains itself",
    "invalid_key": lambda c: "a key must be text",
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float", "int_parsing_size"), lambda c: _INTEGER),
    **dict.fromkeys(("float_type", "float_parsing"), lambda c: _NUMBER),
    **dict.fromkeys(("string_type", "string_sub_type"), lambda c: _TEXT),
    **dict.fromkeys(("bool_type", "bool_parsing"), lambda c: "true or false is needed"),
    **dict.fromkeys(("tuple_type", "list_type"), lambda c: _LIST),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type", "mapping_type"), lambda c: _SECTION),
}


def shown(value: Any) -> str:
    """A value as a message shows it: short, at few levels, and as YAML writes true, false and null."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return _SHORT.repr(value).encode("utf-8", "backslashreplace").decode()


def _section_at(root: type[BaseModel], location: tuple[Any, ...]) -> type[BaseModel] | None:
    """The section that the last name of an error's location belongs to."""
    place: Any = root
    for part in location[:-1]:
        if isinstance(part, int):
            continue
        if not (isinstance(place, type) and issubclass(place, BaseModel)) or part not in place.model_fields:
            return None
        place = place.model_fields[part].annotation
        while typing.get_origin(place) in (tuple, list, typing.Union, types.UnionType):
            place = next(a for a in typing.get_args(place) if a not in (type(None), Ellipsis))
    return place if isinstance(place, type) and issubclass(place, BaseModel) else None


def _explain(root: type[BaseModel], error: Any) -> str:
    kind, given = error["type"], shown(error["input"])
    location = ".".join(str(part) for part in error["loc"]) or "recipe"
    location = location if len(location) <= 200 else f"{location[:200]}…"
    if kind == "extra_forbidden":
        section = _section_at(root, error["loc"])
        names = list(section.model_fields) if section else []
        near = difflib.get_close_matches(str(error["loc"][-1])[:100], names, n=1, cutoff=0.5)
        advice = f"did you mean `{near[0]}`?" if near else f"known: {', '.join(names)}"
        return f"{location}: unknown key; {advice}"
    if kind == "missing":
        return f"{location}: is missing"
    if kind == "literal_error":
        known = error["ctx"]["expected"].replace(" or ", ", ").replace("'", "")
        return f"{location}: there is no {error['loc'][-1]} {given}; known: {known}"
    if kind == "value_error":  # raised by a check of ours
        message = error["msg"].removeprefix("Value error, ")
        return f"{location}: {message} (got {given})" if error["loc"] else f"{location}: {message}"
    words = WORDS[kind](error.get("ctx", {})) if kind in WORDS else "cannot be used here"
    return f"{location}: {words} (got {given})"


def parse_section(section: type[SomeSection], raw: dict[str, Any], where: str = "the options") -> SomeSection:
    """A section from a mapping; raises one RecipeError with every mistake."""
    try:
        return section.model_validate(raw)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        # pydantic also calls a list too short when its elements are faulty: report the elements alone.
        parents = {fault["loc"][:depth] for fault in errors for depth in range(len(fault["loc"]))}
        found = [fault for fault in errors if fault["type"] != "too_short" or fault["loc"] not in parents]
        faults = [_explain(section, fault) for fault in found]
        count = f"{len(faults)} mistakes" if len(faults) > 1 else "1 mistake"
        what = f"{where}: {count}\n  - " + "\n  - ".join(faults)
        raise RecipeError(what, "docs/recipes.md lists every key") from error
