"""The report of a run as one HTML page, page.html, that needs no other file: no network, no scripts, no fonts."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

from distill.errors import DataError
from distill.report.sections import sections
from distill.report.tables import RunResults
from distill.tables import Block, Code, Plot, Table, clean, columns_of_words, commands_of, placeless, shown


def build_page(results: RunResults) -> str:
    """Return the whole page. A stage that has not run leaves one line that names it."""
    return whole_page(results.name, results.date, sections(results))


def whole_page(name: str, date: str, blocks: Mapping[str, Sequence[Block]]) -> str:
    """Return a page of sections by title. The first is open, and the others open by a click."""
    return str(_template().page(name, date, blocks)).lstrip()


def section(blocks: Sequence[Block]) -> str:
    """Return blocks as HTML in their order. Adjacent plots share a row, and the commands come last."""
    return str(_template().section(blocks))


@functools.cache
def _template() -> Any:
    """Return the macros of page.html. Every expression in them is cleaned and escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, finalize=_finalized
    )
    environment.filters.update(sentence=_sentence, placeless=placeless, shown=shown)
    environment.tests.update(code=lambda block: isinstance(block, Code), table=lambda block: isinstance(block, Table))
    functions: dict[str, Any] = {"grouped": _grouped, "drawn": _drawn, "commands_of": commands_of}
    environment.globals.update(functions, columns_of_words=columns_of_words)
    return environment.get_template("page.html").module


def _finalized(value: Any) -> Any:
    return value if isinstance(value, Markup) else clean(value)


def _sentence(value: object) -> Markup:
    """Return words in which backticks enclose code."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(clean(value)))))


def _grouped(blocks: Sequence[Block]) -> Iterator[tuple[bool, list[Block]]]:
    """Yield runs of blocks that are plots, or are not."""
    for are_plots, group in groupby([one for one in blocks if one], lambda block: isinstance(block, Plot)):
        yield are_plots, list(group)


def _drawn(plot: Plot) -> tuple[Markup | None, str, str]:
    """Draw a plot. Without a picture, return the fault and its remedy."""
    try:
        return Markup(plot.draw()), "", ""
    except DataError as error:
        return None, error.what, error.hint or ""
