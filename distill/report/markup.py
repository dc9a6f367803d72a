"""Markdown of the model card; foreign text cannot break out of it."""

from __future__ import annotations

import re
from collections.abc import Iterable

from distill.report.text import clean, placeless
from distill.results.tables import Cell, Table

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def flat(text: object) -> str:
    """Text on one line, without HTML."""
    return " ".join(clean(text).split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def words(text: object) -> str:
    """Foreign text as plain Markdown words on one line, with all markup escaped."""
    return re.sub(r"([\\`*_\[\]#|~$])", r"\\\1", flat(text))


def code(text: object) -> str:
    """A code span whose fence is longer than any run of backticks inside; bars are safe for tables."""
    inner = " ".join(clean(text).split()).replace("|", "\\|")
    fence = "`" * (1 + _longest_fence(inner))
    space = " " if "`" in inner else ""
    return f"{fence}{space}{inner}{space}{fence}"


def block(language: str, text: str) -> str:
    """A code block whose fence is longer than any run of backticks inside."""
    fence = "`" * max(3, 1 + _longest_fence(text))
    return f"{fence}{language}\n{text}\n{fence}"


def bullets(sentences: Iterable[str]) -> str:
    """A list of sentences."""
    return "\n".join(f"- {words(sentence)}" for sentence in sentences)


def cell(value: Cell | str) -> str:
    """A cell of a table; of our own words only bars are escaped."""
    if isinstance(value, str):
        return flat(value).replace("|", "\\|")
    mark = f" **({value.mark})**" if value.mark else ""
    small = f" {flat(value.small) if value.below else f'({flat(value.small)})'}" if value.small else ""
    return (code(value.text) if value.style == "code" else words(value.text)) + mark + small


def table(table: Table) -> str:
    """A table under its title and note, with its command below."""
    above = [f"**{words(table.title)}**"] * bool(table.title) + [table.note] * bool(table.note)
    lines = [f"| {' | '.join(map(cell, row))} |" for row in (table.heads, *table.rows)]
    lines.insert(1, "|" + "---|" * len(table.heads))
    return "\n\n".join([*above, "\n".join(lines), block("sh", " ".join(clean(placeless(table.command)).split()))])


def _longest_fence(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)
