"""Markdown of the model card; foreign text cannot break out of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from distill.report.text import clean, placeless

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def words(text: object) -> str:
    """Foreign text as plain Markdown words on one line, with all markup escaped."""
    flat = " ".join(clean(text).split())
    return re.sub(r"([\\`*_\[\]#|~$])", r"\\\1", flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))


def code(text: object) -> str:
    """A code span whose fence is longer than any run of backticks inside; bars are safe for tables."""
    flat = " ".join(clean(text).split()).replace("|", "\\|")
    fence = "`" * (1 + _longest_fence(flat))
    space = " " if "`" in flat else ""
    return f"{fence}{space}{flat}{space}{fence}"


def block(language: str, text: str) -> str:
    """A code block whose fence is longer than any run of backticks inside."""
    fence = "`" * max(3, 1 + _longest_fence(text))
    return f"{fence}{language}\n{text}\n{fence}"


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], command: object) -> str:
    """A table with its command below."""
    lines = [f"| {' | '.join(headers)} |", "|" + "---|" * len(headers)]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + f"\n\n{block('sh', ' '.join(clean(placeless(command)).split()))}"


def _longest_fence(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)
