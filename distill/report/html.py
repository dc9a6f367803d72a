"""The elements of the report page; every string that is not Html is escaped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape

from distill.errors import DataError
from distill.report.text import clean, placeless


class Html(str):
    """Text that is markup already; every other string is escaped before it enters the page."""


def as_text(value: object) -> str:
    return escape(clean(value))


def as_cell(value: object) -> str:
    return value if isinstance(value, Html) else as_text(value)


def as_code(value: object) -> Html:
    return Html(f"<code>{as_text(value)}</code>")


def as_bad(value: object) -> Html:
    """A figure or words in the colour of a warning."""
    return Html(f'<span class="bad">{as_text(value)}</span>')


def as_table(
    headers: Sequence[object],
    rows: Iterable[Sequence[object]],
    command: object,
    words: int = 1,
    classes: Sequence[str] = (),
) -> Html:
    """A table with its command below; the first `words` columns are text, the others figures."""

    def line(tag: str, cells: Sequence[object], name: str = "") -> str:
        kinds = [' class="text"' if 0 < at < words else "" for at in range(len(cells))]
        inner = "".join(f"<{tag}{kind}>{as_cell(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))
        return f'<tr class="{name}">{inner}</tr>' if name else f"<tr>{inner}</tr>"

    body = "".join(line("td", cells, classes[at] if classes else "") for at, cells in enumerate(rows))
    return Html(
        f'<div class="scroll"><table><thead>{line("th", headers)}</thead><tbody>{body}</tbody></table></div>'
        f'<p class="command">{as_text(placeless(command))}</p>'
    )


def as_plot(draw: Callable[[], str], caption: str) -> Html:
    try:
        drawn = draw()
    except DataError as error:
        return Html(f'<p class="notrun">Plot not drawn: {as_text(error.what)}. {as_code(error.hint)}</p>')
    return Html(f"<figure>{drawn}<figcaption>{as_text(caption)}</figcaption></figure>")


def as_plots(*drawn: Html) -> Html:
    return Html(f'<div class="plots">{"".join(drawn)}</div>')


def as_list(sentences: Iterable[str]) -> Html:
    return Html("<ul>" + "".join(f"<li>{as_text(sentence)}</li>" for sentence in sentences) + "</ul>")


def not_run(stage: str, reason: str | None = None) -> Html:
    """The line in place of the results of a stage; `reason` why the run has no such stage."""
    if reason is not None:
        return Html(f'<p class="notrun">The stage <code>{stage}</code> was not run: {as_text(reason)}.</p>')
    return Html(f'<p class="notrun">The stage <code>{stage}</code> has not run, so there is nothing to show here.</p>')


def badged(shown: object, grown: bool) -> Html:
    """A name, with a badge if its target was grown."""
    return Html(as_cell(shown) + (' <span class="grown">grown</span>' if grown else ""))
