"""The elements of the report page; every string that is not Html is escaped."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from html import escape

from distill.errors import DataError
from distill.tables import Table, clean, html, placeless


class Html(str):
    """Text that is markup already; every other string is escaped before it enters the page."""


def as_text(value: object) -> str:
    return escape(clean(value))


def as_code(value: object) -> Html:
    return Html(f"<code>{as_text(value)}</code>")


def as_sentence(value: object) -> str:
    """Words in which backticks enclose code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", as_text(value))


def as_paragraph(value: object) -> Html:
    return Html(f"<p>{as_sentence(value)}</p>")


def as_command(command: object) -> Html:
    """The command that measured what stands above."""
    return Html(f'<p class="command">{as_text(placeless(command))}</p>')


def as_table(table: Table) -> Html:
    return Html(html(table))


def as_tables(tables: Iterable[Table]) -> Html:
    return Html("".join(map(as_table, tables)))


def as_plot(draw: Callable[[], str], caption: str) -> Html:
    try:
        drawn = draw()
    except DataError as error:
        return Html(f'<p class="notrun">Plot not drawn: {as_text(error.what)}. {as_code(error.hint)}</p>')
    return Html(f"<figure>{drawn}<figcaption>{as_text(caption)}</figcaption></figure>")


def as_plots(*drawn: Html) -> Html:
    return Html(f'<div class="plots">{"".join(drawn)}</div>')


def as_list(sentences: Sequence[str]) -> Html:
    """Sentences as a list; nothing where there are none."""
    return Html(f"<ul>{''.join(f'<li>{as_sentence(one)}</li>' for one in sentences)}</ul>" if sentences else "")


def as_details(summary: str, inner: str) -> Html:
    return Html(f"<details><summary>{as_text(summary)}</summary>{inner}</details>")


def absent(markup: str) -> Html:
    """The line in place of results that there are none of."""
    return Html(f'<p class="notrun">{markup}</p>')


def not_run(stage: str, reason: str | None = None) -> Html:
    """The line in place of the results of a stage; `reason` why the run has no such stage."""
    if reason is not None:
        return absent(f"The stage <code>{stage}</code> was not run: {as_text(reason)}.")
    return absent(f"The stage <code>{stage}</code> has not run, so there is nothing to show here.")
