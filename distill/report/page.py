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
    Heading,
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
:root { color-scheme: light dark; --paper: #f6f7f9; --card: #ffffff; --ink: #1b1f24; --soft: #59626e; --line: #dde1e7;
  --accent: #1f6fc5; --bad: #b3363e; --mark: #c9efd9; --mark-line: #2f9e77;
  --code: #eef0f4; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #111418; --card: #1a1f25; --ink: #e4e8ee; --soft: #a0a9b5; --line: #303843; --accent: #74b3f2;
    --bad: #f0868c; --mark: #17492f; --mark-line: #4cc48d; --code: #242b33; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main, header, footer { max-width: 72rem; margin: 0 auto; padding: 0 1.25rem; }
header { padding-top: 2.2rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 0 0 .7rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .4rem; }
a { color: var(--accent); }
.soft, figcaption, .command { color: var(--soft); }
nav { display: flex; flex-wrap: wrap; gap: .35rem .9rem; margin: 1rem 0 0; font-size: .92rem; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 1.2rem;
  margin: 1.1rem 0; }
code, pre, .command { font-family: ui-monospace, monospace; }
code { background: var(--code); border-radius: 4px; padding: .08em .35em; font-size: .88em; overflow-wrap: anywhere; }
pre { background: var(--code); border-radius: 8px; padding: .8rem 1rem; margin: .5rem 0; font-size: .82rem;
  white-space: pre-wrap; overflow-wrap: anywhere; }
figcaption { margin: .2rem 0 0; font-size: .9rem; }
.bad { color: var(--bad); }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(24rem, 100%), 1fr)); gap: 1rem; }
figure { margin: 0; max-width: 40rem; min-width: 0; }
figure svg { display: block; width: 100%; height: auto; color: var(--ink); }
figure svg text { font-family: inherit !important; }
.scroll { overflow-x: auto; margin: .6rem 0 .2rem; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; min-width: 100%; }
th, td { text-align: right; padding: .38rem .7rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th, td:first-child { white-space: normal; min-width: 3.4rem; }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
td.text, th.text { text-align: left; }
tr.plain td { color: var(--soft); }
tr.best td { font-weight: 650; }
.command { font-size: .78rem; margin: .2rem 0 1rem; overflow-wrap: anywhere; }
.command::before { content: "$ "; }
details { margin: .6rem 0; } summary { cursor: pointer; color: var(--accent); }
.mark { background: var(--mark); border-bottom: 2px solid var(--mark-line); border-radius: 2px; }
.prompt { opacity: .65; }
footer { color: var(--soft); font-size: .85rem; padding-bottom: 2.5rem; }
@media (max-width: 40rem) {
  main, header, footer { padding-left: .7rem; padding-right: .7rem; } th, td { padding: .35rem .4rem; }
}
"""


def build_page(results: RunResults) -> str:
    """The whole page. Raises nothing for stages that have not run: each leaves one line that names it."""
    parts = {title: ("-".join(title.lower().split()), section(blocks)) for title, blocks in sections(results).items()}
    links = " ".join(f'<a href="#{key}">{escape(title)}</a>' for title, (key, _) in parts.items())
    body = "\n".join(
        f'<section id="{key}"><h2>{escape(title)}</h2>{inner}</section>' for title, (key, inner) in parts.items()
    )
    name = as_text(results.name)
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
<header><h1>{name}</h1><p class="soft">Draft model for speculative decoding, {as_text(results.date)}</p>
<nav aria-label="Sections">{links}</nav></header>
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
    if isinstance(block, Heading):
        return f"<h3>{as_text(block.text)}</h3>"
    if isinstance(block, Code):
        pieces = ((as_text(text), style) for text, style in block.pieces)
        text = "".join(f'<span class="{style}">{text}</span>' if style else text for text, style in pieces)
        inner = f"<pre>{text}</pre>"
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
        + f'<div class="scroll"><table><thead>{line("th", table.heads)}</thead><tbody>{body}</tbody></table></div>'
    )
