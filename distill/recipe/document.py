"""Documentation of the schema: each key of a recipe with its values, default and meaning."""

from __future__ import annotations

import inspect
import types
import typing
from typing import Any, Literal

import yaml

from distill.recipe import Recipe, Section


def describe_schema() -> str:
    """Each key with its values, default and meaning, as Markdown; docs/recipes.md is made from it."""
    lines: list[str] = []

    def walk(section: type[Section], title: str, prefix: str) -> None:
        lines.extend([f"## {title}", "", inspect.cleandoc(section.__doc__ or ""), ""])
        lines.extend(["| key | takes | default | meaning |", "|---|---|---|---|"])
        nested: list[tuple[type[Section], str]] = []
        for name, field in section.model_fields.items():
            inner = _section_in(field.annotation)
            if inner is not None:
                nested.append((inner, prefix + name))
            cells = (f"`{name}`", _takes(field.annotation, field.metadata, prefix + name), _default(field))
            meaning = field.description or (inspect.cleandoc(inner.__doc__ or "").split("\n\n")[0] if inner else "")
            lines.append(
                "| " + " | ".join(cell.replace("|", "\\|") for cell in (*cells, " ".join(meaning.split()))) + " |"
            )
        lines.append("")
        for inner, name in nested:
            walk(inner, name, f"{name}.")

    walk(Recipe, "The recipe itself", "")
    return "\n".join(lines)


def _section_in(annotation: Any) -> type[Section] | None:
    """The section that a key holds, alone, in a list or as an alternative to null; None for other keys."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(_section_in, typing.get_args(annotation))), None)


def _takes(annotation: Any, metadata: typing.Sequence[Any], name: str) -> str:
    """The values that a key takes: type, choices and bounds."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    bounds = [
        f"{sign} {getattr(bound, attribute)}"
        for bound in metadata
        for attribute, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
        if getattr(bound, attribute, None) is not None
    ]
    if origin in (typing.Union, types.UnionType):
        some = [_takes(argument, metadata, name) for argument in arguments if argument is not type(None)]
        return " or ".join([*some, "`null`"] if type(None) in arguments else some)
    if origin is Literal:
        return ", ".join(f"`{argument}`" for argument in arguments)
    if origin is tuple:
        return f"list of {_takes(arguments[0], (), name)}"
    if origin is dict:
        return f"mapping of {_takes(arguments[0], (), name)} to {_takes(arguments[1], (), name)}"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return f"[section](#{name.replace('.', '')})"
    words = {str: "text", int: "integer", float: "number", bool: "`true`, `false`"}
    return " ".join([words.get(annotation, str(annotation)), ", ".join(bounds)]).strip()


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    return "as listed there" if isinstance(field.default, Section) else f"`{_plain(field.default)}`"


def _plain(value: Any) -> str:
    """A value as in a recipe, on one line."""
    shown = [_short(item) for item in value] if isinstance(value, tuple) else value
    return yaml.safe_dump(shown, default_flow_style=True, width=1000, allow_unicode=True).split("\n")[0]


def _short(value: Any) -> Any:
    """An item of a list; a section without the keys that have their defaults."""
    return value.model_dump(mode="json", exclude_defaults=True) if isinstance(value, Section) else value
