"""Figures with intervals, and documents of results: a list of blocks with several renderings.

The terminal, Markdown files, the model card, csv and lines of JSON are rendered here, and the report page in
`report.page`. A figure is put into a table once, as a value. Legend: U units (prompts or documents), R resamples.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, TypeVar

import numpy
from numpy.typing import NDArray

from distill.files import Figure, without_nan

# ── Bootstrap intervals that resample prompts or documents, never single tokens (which are not independent) ──


@dataclass(frozen=True)
class Interval:
    """A mean with the bounds of its interval. All are NaN if nothing was counted."""

    mean: Figure
    low: Figure
    high: Figure


Numbers = NDArray[numpy.float64]
Column = Sequence[float] | Numbers  # one number for each of U units
DRAWS = 2**22  # draws held in memory at once
RESAMPLES, CONFIDENCE = 2000, 0.95  # for every interval that is reported
UNKNOWN = Interval(float("nan"), float("nan"), float("nan"))


def ratio_interval(sums: Column, counts: Column) -> Interval:
    """Return the mean Σ sums / Σ counts over U units with its percentile interval.

    Units with count 0 take part in the resampling, because a new draw of prompts may contain such units too. Resamples
    whose counts sum to 0 are left out. All is NaN if all counts are 0.
    """
    return _interval((sums, counts), [1], lambda s: s[0] / s[1])


def paired_ratio_interval(sums: Column, counts: Column, new_sums: Column, new_counts: Column) -> Interval:
    """Return the rise of Σ sums / Σ counts between two measurements of the same U units, with its interval.

    Both are resampled with the same draws. Resamples in which the counts of either sum to 0 are left out. All is NaN if
    all counts of either are 0.
    """
    return _interval((sums, counts, new_sums, new_counts), [1, 3], lambda s: s[2] / s[3] - s[0] / s[1])


def speed_ratio(tokens: Column, seconds: Column, base_tokens: Column, base_seconds: Column) -> Interval:
    """Return tokens per second divided by the base's on the same U prompts, which are resampled together.

    Resamples without tokens or seconds of either are left out. All is NaN without prompts.
    """
    columns = (tokens, seconds, base_tokens, base_seconds)
    return _interval(columns, range(4), lambda s: (s[0] / s[1]) / (s[2] / s[3]))


def _interval(columns: Sequence[Column], divisors: Sequence[int], figure: Callable[[Numbers], Any]) -> Interval:
    """Return a figure of the sums of C columns [U] with its percentile interval. `figure` takes sums [C] or [C, R].

    Resamples in which one of the `divisors` (columns by number) sums to 0 are left out. All is NaN if every one does.
    """
    arrays = [numpy.asarray(column, float) for column in columns]
    totals = numpy.array([array.sum() for array in arrays])
    if not all(totals[[*divisors]]):
        return UNKNOWN
    sums = numpy.stack(_resampled(arrays))  # [C, R]
    usable = (sums[[*divisors]] > 0).all(0)
    edge = edge_of(len(arrays[0]))
    low, high = numpy.quantile(figure(sums[:, usable]), [edge, 1 - edge])
    return Interval(float(figure(totals)), float(low), float(high))


def edge_of(units: int) -> float:
    """Return the share of resamples that an interval of this many units leaves out at each end.

    The 95 % percentiles of few units are too narrow, because their spread is that of a population. They are widened to
    Student's t (Hesterberg 2015, The American Statistician 69). scripts/benchmarks/intervals.py compares both.
    """
    from scipy.special import ndtr, stdtrit  # type: ignore[import-untyped]

    others = max(1, units - 1)
    return float(ndtr(-math.sqrt(units / others) * stdtrit(others, (1 + CONFIDENCE) / 2)))


def _resampled(columns: Sequence[Numbers]) -> list[Numbers]:
    """Return the sums [R] of each column [U] over the same R draws of U units. Few draws at a time limit the memory."""
    units, random = len(columns[0]), numpy.random.default_rng(0)
    sums = [numpy.empty(RESAMPLES) for _ in columns]
    at_once = max(1, DRAWS // units)
    for start in range(0, RESAMPLES, at_once):
        size = min(at_once, RESAMPLES - start)
        drawn = random.integers(0, units, size=(size, units))
        for column, column_sums in zip(columns, sums, strict=True):
            column_sums[start : start + size] = column[drawn].sum(1)
    return sums


# ── Tables and the other blocks of a document ──

Item = TypeVar("Item")
Value = str | int | float | Interval | None
DASH = "–"

_ABSOLUTE = re.compile(r"(?<![^\s='\"\[,])/(?:[^\s/'\",\]]+/)+([^\s/'\",\]]+)")  # a path within a command
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ufffe\uffff]")


@dataclass(frozen=True)
class Cell:
    """A value and the format of its figure. `form` is a key of FORMS or a Python format. `bad` marks a warning.

    A bare value in a row is a Cell without a form. Whole numbers are then shown in full, and others with two decimals.
    """

    value: Value
    form: str = ""
    bad: bool = False


Row = Sequence[Cell | Value]
Columns = Mapping[str, Callable[[Item], Cell | Value]]  # column head -> the cell of an item


@dataclass(frozen=True)
class Table:
    """Rows under their heads, which contain the units, and the command that measured them.

    `title` and `note` stand above the table. `classes` may name the style of each row: `plain`, `best` or none.
    """

    heads: Sequence[str]
    rows: Sequence[Row]
    command: str = ""
    title: str = ""
    note: str = ""
    classes: Sequence[str] = ()


@dataclass(frozen=True)
class Code:
    """Text that is shown unchanged, as a code block in a language. With `folded` (a title), only the page shows it."""

    text: str
    language: str = ""
    folded: str = ""


@dataclass(frozen=True)
class Plot:
    """A picture of figures, which only the page shows. `draw` returns an SVG, or raises DataError."""

    draw: Callable[[], str]
    caption: str


Block = str | list[str] | Table | Code | Plot  # A string is a paragraph of a document, and a list of strings a list.


def table_of(
    items: Iterable[Item],
    columns: Columns[Item],
    command: str = "",
    title: str = "",
    note: str = "",
    classes: Sequence[str] = (),
) -> Table:
    """Return a table with a row for each item."""
    rows = [[of(item) for of in columns.values()] for item in items]
    return Table(list(columns), rows, command, title, note, classes)


# ── Figures ──


def known(value: Any) -> TypeGuard[float]:
    """Whether a figure was measured: a finite number, not None."""
    return isinstance(value, (int, float)) and math.isfinite(value)


def number(value: Any, digits: int = 2) -> str:
    """Return a number with thousands separators, or a dash if nothing was measured."""
    if not known(value):
        return DASH
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"


def significant(value: Any) -> str:
    """Return three significant digits, for figures of any size."""
    if not known(value):
        return DASH
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e6:
        return f"{value:.2e}"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def percent(value: Any) -> str:
    """Return per cent with one decimal. A share below 1 is never rounded up to 100."""
    if not known(value):
        return DASH
    digits = next((digits for digits in (1, 2, 3) if value >= 1 or float(f"{100 * value:.{digits}f}") < 100), 4)
    return f"{100 * value:.{digits}f} %"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, in the plural unless it is one."""
    return f"{number(count)} {noun}{'s' * (count != 1)}"


def size(value: Any) -> str:
    """Return bytes in decimal units."""
    if not known(value):
        return DASH
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= factor:
            return f"{value / factor:.{1 if value < 100 * factor else 0}f} {unit}"
    return f"{value:.0f} bytes"


FORMS: dict[str, Callable[[float], str]] = {
    "": number,
    "%": percent,
    "×": lambda value: f"{value:.2f}×",
    "significant": significant,
    "size": size,
    "bytes": lambda value: f"{value:,} ({size(value)})",
}


def shown(cell: Cell | Value, form: str = "") -> str:
    """Return a value as all outputs for readers show it. An interval is `1.52× [1.44, 1.60]`, no value is a dash."""
    if isinstance(cell, Cell):
        return shown(cell.value, cell.form)
    if isinstance(cell, str):
        return cell
    show = FORMS.get(form) or (lambda value: format(value, form))
    if not isinstance(cell, Interval):
        return show(cell) if known(cell) else DASH
    if not known(cell.mean):
        return DASH
    if not known(cell.low) or not known(cell.high) or cell.low == cell.high:  # There was one text, or all were alike.
        return show(cell.mean)
    low, high = (show(bound).rstrip(" %×") for bound in (cell.low, cell.high))
    return f"{show(cell.mean)} [{low}, {high}]"


def listed(counts: Mapping[str, int]) -> str:
    """Return counts by reason in one line."""
    return "; ".join(f"{number(count)} {reason}" for reason, count in counts.items())


# ── Foreign text ──


def clean(value: object) -> str:
    """Return text that is safe to print. Control characters and lone surrogates become visible signs."""
    text = str(value).replace("\r\n", "\n").encode("utf-8", "replace").decode("utf-8")
    return _CONTROL.sub(lambda match: chr(0x2400 + ord(match[0])) if ord(match[0]) < 32 else "\ufffd", text)


def placeless(value: Any) -> Any:
    """Return text, also in lists and dicts, without this machine's folders: absolute paths keep their last name."""
    if isinstance(value, dict):
        return {key: placeless(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [placeless(inner) for inner in value]
    if not isinstance(value, str):
        return value
    if os.path.isabs(value):
        return os.path.basename(os.path.normpath(value)) or value
    return _ABSOLUTE.sub(lambda match: match[1], value)


# ── The outputs ──


def _values(table: Table) -> list[list[Value]]:
    return [[cell.value if isinstance(cell, Cell) else cell for cell in row] for row in table.rows]


def columns_of_words(table: Table) -> list[bool]:
    """Whether each column contains only words. Words are aligned left, figures right."""
    return [
        at == 0 or all(isinstance(row[at], str) for row in rows) if (rows := _values(table)) else True
        for at in range(len(table.heads))
    ]


def commands_of(blocks: Iterable[Block]) -> list[str]:
    """Return the commands that measured the tables, each once."""
    return [*dict.fromkeys(block.command for block in blocks if isinstance(block, Table) and block.command)]


def in_a_cell(text: str) -> str:
    """Return text that does not end a cell of a Markdown table."""
    return text.replace("|", "/").replace("\n", " ")


def markdown(table: Table, word: Callable[[str], str] = in_a_cell, sentence: Callable[[str], str] = str) -> str:
    """Return a table as Markdown, with title and note above it. `word` and `sentence` make foreign text harmless."""

    def line(row: Row, bold: bool = False) -> str:
        cells = [
            word(value) if isinstance(value := cell.value if isinstance(cell, Cell) else cell, str) else shown(cell)
            for cell in row
        ]
        return "| " + " | ".join(f"**{cell}**" if bold and cell else cell for cell in cells) + " |"

    rule = "|" + "".join("---|" if words else "--:|" for words in columns_of_words(table))
    classes = table.classes or [""] * len(table.rows)
    rows = [line(row, name == "best") for row, name in zip(table.rows, classes, strict=True)]
    above = [f"**{word(table.title)}**"] * bool(table.title) + [sentence(table.note)] * bool(table.note)
    return "\n\n".join([*above, "\n".join([line(table.heads), rule, *rows])])


def document(blocks: Iterable[Block], escaped: bool = False) -> str:
    """Return blocks as Markdown, for the terminal and for eval.md, speedup.md and others. The commands come last.

    `escaped` is for Markdown that is rendered elsewhere. Foreign text then cannot break out of it, and commands name no
    folders of this machine.
    """
    blocks = [block for block in blocks if block]
    word, sentence = (words, sentence_of_words) if escaped else (in_a_cell, str)

    def part(block: Block) -> str:
        if isinstance(block, str):
            return sentence(block)
        if isinstance(block, list):
            return "\n".join(f"- {sentence(item)}" for item in block)
        if isinstance(block, Code):
            return code_block(block.language, block.text)
        assert isinstance(block, Table)
        return markdown(block, word, sentence)

    only_on_page = [isinstance(block, Plot) or (isinstance(block, Code) and bool(block.folded)) for block in blocks]
    parts = [part(block) for block, left_out in zip(blocks, only_on_page, strict=True) if not left_out]
    commands = [code(placeless(command)) if escaped else f"`{command}`" for command in commands_of(blocks)]
    return "\n\n".join([*parts, *commands]) + "\n"


# ── Markdown that foreign text cannot break out of ──


def words(text: object) -> str:
    """Return foreign text as plain Markdown words on one line, with all markup escaped, including HTML."""
    return _escaped(" ".join(clean(text).split()))


def sentence_of_words(text: str) -> str:
    """Return a sentence in which backticks enclose code. All other markup is escaped."""
    parts = re.split("`([^`]+)`", " ".join(clean(text).split()))
    return "".join(code(part) if at % 2 else _escaped(part) for at, part in enumerate(parts))


def _escaped(text: str) -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]#|~$])", r"\\\1", text)


def code(text: object) -> str:
    """Return a code span whose fence is longer than any run of backticks inside. Bars are safe for tables."""
    inner = " ".join(clean(text).split()).replace("|", "\\|")
    fence = "`" * (1 + _longest_fence(inner))
    space = " " if "`" in inner else ""
    return f"{fence}{space}{inner}{space}{fence}"


def code_block(language: str, text: str) -> str:
    """Return a code block whose fence is longer than any run of backticks inside."""
    text = clean(text)
    fence = "`" * max(3, 1 + _longest_fence(text))
    return f"{fence}{language}\n{text}\n{fence}"


def _longest_fence(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)


def records(blocks: Iterable[Block]) -> list[dict[str, Any]]:
    """Return every row as an object: values by head, intervals also with their bounds. An unknown figure is None.

    With several tables, each object has the title of its table.
    """
    tables = [block for block in blocks if isinstance(block, Table)]
    objects: list[dict[str, Any]] = []
    for table in tables:
        for row in _values(table):
            record: dict[str, Any] = {"table": table.title} if len(tables) > 1 else {}
            for head, value in zip(table.heads, row, strict=True):
                if isinstance(value, Interval):
                    record |= {head: value.mean, f"{head}, low": value.low, f"{head}, high": value.high}
                else:
                    record[head] = value
            objects.append(without_nan(record))
    return objects


def rendered(blocks: Sequence[Block], value: Any, output: str) -> str:
    """Return results as text: `md`, `jsonl` or `csv` of the blocks, or `value` as `json`."""
    if output == "md":
        return document(blocks)
    if output == "json":
        return json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    rows = records(blocks)
    if output == "jsonl":
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(head for row in rows for head in row)))
    if rows:
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue()
