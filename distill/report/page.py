"""The report of a run as one HTML page that needs no other file: no network, no scripts, no fonts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from itertools import groupby

from distill.errors import DataError
from distill.report.sections import sections
from distill.report.tables import RunResults
from distill.tables import (
    Block,
    Cell,
    Code,
    Plot,
    Row,
    Table,
    Value,
    clean,
    columns_of_words,
    commands_of,
    placeless,
    shown,
)

# ── The look of the report page: one style sheet, no fonts or pictures from elsewhere ──

CSS = """
:root { color-scheme: light dark; --line: color-mix(in srgb, CanvasText 18%, Canvas);
  --soft: color-mix(in srgb, CanvasText 65%, Canvas); --code: color-mix(in srgb, CanvasText 7%, Canvas); }
* { box-sizing: border-box; }
body { max-width: 72rem; margin: 0 auto; padding: 1rem; background: Canvas; color: CanvasText;
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1, h2, h3 { line-height: 1.25; margin: 1.2rem 0 .4rem; }
h1, header p { margin: 0; }
h3 { font-size: 1rem; }
h2, .first > p:first-of-type { font-size: 1.2rem; }
main > details { border-top: 1px solid var(--line); }
summary { padding: .6rem 0; }
summary h2 { display: inline; }
figcaption, .command, footer, th, tr.plain td { color: var(--soft); }
code, pre, .command { font-family: ui-monospace, monospace; font-size: .85em; }
code, pre { background: var(--code); border-radius: 4px; padding: .1em .35em; }
pre { padding: .8rem 1rem; white-space: pre-wrap; }
.command::before { content: "$ "; }
.bad { color: color-mix(in srgb, red 65%, CanvasText); }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(21rem, 100%), 1fr)); gap: 1rem;
  margin: 1rem 0; }
figure { margin: 0; max-width: 28rem; min-width: 0; }
figure svg { display: block; width: 100%; height: auto; color: CanvasText; }
figure svg text { font-family: inherit !important; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { text-align: right; padding: .2rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th, td:first-child { white-space: normal; min-width: 3.4rem; }
th:first-child, td:first-child, .text { text-align: left; }
tr.best td { font-weight: 650; }
@media print { details::details-content { content-visibility: visible; block-size: auto; }
  figure, tr { break-inside: avoid; } td:first-child { overflow-wrap: anywhere; }
  .scroll { overflow: visible; } table { font-size: .52rem; }
  th, td, td:first-child { white-space: normal; min-width: 0; padding: .2rem .25rem; } }
"""


def build_page(results: RunResults) -> str:
    """The whole page. Raises nothing for stages that have not run: each leaves one line that names it."""
    first, *folded = ((escape(title), section(blocks)) for title, blocks in sections(results).items())
    body = f'<section class="first"><h2>{first[0]}</h2>{first[1]}</section>'
    return whole_page(results.name, results.date, body + "".join(fold(title, inner) for title, inner in folded))


def fold(title: str, inner: str) -> str:
    """A section that opens by a click; both are escaped already."""
    return f"\n<details><summary><h2>{title}</h2></summary>{inner}</details>"


def whole_page(name: str, date: str, body: str) -> str:
    """A page with this title and body, which is escaped already."""
    name = as_text(name)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{name} · distill report</title>
<style>{CSS}</style>
</head>
<body>
<header><h1>{name}</h1><p>Draft model for speculative decoding, {as_text(date)}</p></header>
<main>
{body}
</main>
<footer><p>Made by <code>distill report</code>. Brackets hold intervals; a dash means not measured.</p></footer>
</body>
</html>
"""


# ── The blocks of a document as elements of the page; all their text is escaped ──


def section(blocks: Sequence[Block]) -> str:
    """Blocks in their order, plots beside each other; the commands stand last."""
    parts = []
    for are_plots, group in groupby([one for one in blocks if one], lambda block: isinstance(block, Plot)):
        inner = "".join(element(block) for block in group)
        parts.append(f'<div class="plots">{inner}</div>' if are_plots else inner)
    commands = [f'<p class="command">{as_text(placeless(command))}</p>' for command in commands_of(blocks)]
    return "".join([*parts, *commands])


def element(block: Block) -> str:
    """One block of a document."""
    if isinstance(block, str):
        return f"<p>{as_sentence(block)}</p>"
    if isinstance(block, list):
        return f"<ul>{''.join(f'<li>{as_sentence(one)}</li>' for one in block)}</ul>"
    if isinstance(block, Code):
        inner = f"<pre>{as_text(placeless(block.text))}</pre>"
        return f"<details><summary>{as_text(block.folded)}</summary>{inner}</details>" if block.folded else inner
    return _figure(block) if isinstance(block, Plot) else _table(block)


def as_text(value: object) -> str:
    return escape(clean(value))


def as_sentence(value: object) -> str:
    """Words in which backticks enclose code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", as_text(value))


def _figure(plot: Plot) -> str:
    try:
        drawn = plot.draw()
    except DataError as error:
        return f"<p>Plot not drawn: {as_text(error.what)}. {as_sentence(f'`{error.hint}`')}</p>"
    return f"<figure>{drawn}<figcaption>{as_text(plot.caption)}</figcaption></figure>"


def _table(table: Table) -> str:
    """A table under its title and note."""
    kinds = [' class="text"' if at and words else "" for at, words in enumerate(columns_of_words(table))]

    def shown_in(cell: Cell | Value) -> str:
        text = as_text(shown(cell))
        return f'<span class="bad">{text}</span>' if isinstance(cell, Cell) and cell.bad else text

    def line(tag: str, cells: Row, name: str = "") -> str:
        inner = "".join(f"<{tag}{kind}>{shown_in(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))
        return f'<tr class="{name}">{inner}</tr>' if name else f"<tr>{inner}</tr>"

    classes = table.classes or [""] * len(table.rows)
    body = "".join(line("td", cells, name) for cells, name in zip(table.rows, classes, strict=True))
    return (
        (f"<h3>{as_text(table.title)}</h3>" if table.title else "")
        + (f"<p>{as_sentence(table.note)}</p>" if table.note else "")
        + f'<div class="scroll" tabindex="0" role="group" aria-label="{as_text(table.title or "table")}">'
        + f"<table><thead>{line('th', table.heads)}</thead><tbody>{body}</tbody></table></div>"
    )
