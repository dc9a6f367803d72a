"""Figures with their intervals, and documents of results: one list of blocks, of which the terminal, Markdown files,
the model card, csv and lines of JSON are renderings here, and the report page one in `report.page`.

A result's figures are put into a table once, as values. Legend: U units (prompts or documents), R resamples.
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
    """A mean with the bounds of its interval; NaN throughout where nothing was counted."""

    mean: Figure
    low: Figure
    high: Figure


Numbers = NDArray[numpy.float64]
Column = Sequence[float] | Numbers  # a number for each of U units
DRAWS = 2**22  # draws held in memory at once
RESAMPLES, CONFIDENCE = 2000, 0.95  # of every interval that is reported
UNKNOWN = Interval(float("nan"), float("nan"), float("nan"))


def ratio_interval(sums: Column, counts: Column) -> Interval:
    """Mean Σ sums / Σ counts over U units with its percentile interval.

    Units with count 0 take part in the resampling, because a new draw of prompts may contain such units too. Resamples
    whose counts sum to 0 are left out. NaN throughout where all counts are 0.
    """
    return _interval((sums, counts), [1], lambda s: s[0] / s[1])


def paired_ratio_interval(sums: Column, counts: Column, new_sums: Column, new_counts: Column) -> Interval:
    """The rise of Σ sums / Σ counts from one measurement of U units to another of the same units, with its interval.

    Both are resampled with the same draws. Resamples in which the counts of either sum to 0 are left out. NaN
    throughout where all counts of either are 0.
    """
    return _interval((sums, counts, new_sums, new_counts), [1, 3], lambda s: s[2] / s[3] - s[0] / s[1])


def speed_ratio(tokens: Column, seconds: Column, base_tokens: Column, base_seconds: Column) -> Interval:
    """Tokens per second over the base's on the same U prompts, which are resampled together.

    Resamples without tokens or seconds of either are left out. NaN throughout for no prompt.
    """
    columns = (tokens, seconds, base_tokens, base_seconds)
    return _interval(columns, range(4), lambda s: (s[0] / s[1]) / (s[2] / s[3]))


def _interval(columns: Sequence[Column], divisors: Sequence[int], figure: Callable[[Numbers], Any]) -> Interval:
    """A figure of the sums of C columns [U], computed from the sums [C] or [C, R], with its percentile interval.

    Resamples in which one of the `divisors`, columns by number, sums to 0 are left out; NaN throughout where all do.
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
    """The share of the resamples of this many units that an interval leaves out at each end.

    Of few units the percentiles of 95 % are too narrow, as their spread is that of a population: they are widened to
    Student's t (Hesterberg 2015, The American Statistician 69). scripts/benchmarks/intervals.py compares.
    """
    from scipy.special import ndtr, stdtrit  # type: ignore[import-untyped]

    others = max(1, units - 1)
    return float(ndtr(-math.sqrt(units / others) * stdtrit(others, (1 + CONFIDENCE) / 2)))


def _resampled(columns: Sequence[Numbers]) -> list[Numbers]:
    """The sums [R] of each column [U] over the same R draws of U units, some draws at a time to bound the memory."""
    units, random = len(columns[0]), numpy.random.default_rng(0)
    sums = [numpy.empty(RESAMPLES) for _ in columns]
    at_once = max(1, DRAWS // units)
    for start in range(0, RESAMPLES, at_once):
        size = min(at_once, RESAMPLES - start)
        drawn = random.integers(0, units, size=(size, units))
        for column, own in zip(columns, sums, strict=True):
            own[start : start + size] = column[drawn].sum(1)
    return sums


# ── Tables and the other blocks of a document ──

Item = TypeVar("Item")
Value = str | int | float | Interval | None
DASH = "–"

_ABSOLUTE = re.compile(r"(?<![^\s='\"\[,])/(?:[^\s/'\",\]]+/)+([^\s/'\",\]]+)")  # within a command
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ufffe\uffff]")


@dataclass(frozen=True)
class Cell:
    """A value and how its figure is shown: `form` is a key of FORMS or a format of Python; `bad` is a warning.

    A bare value in a row is a Cell without a form: whole numbers are shown in full, others with two decimals.
    """

    value: Value
    form: str = ""
    bad: bool = False


Row = Sequence[Cell | Value]
Columns = Mapping[str, Callable[[Item], Cell | Value]]  # by head, the cell of an item


@dataclass(frozen=True)
class Table:
    """Rows under their heads, which hold the units, and the command that measured them.

    `title` and `note` stand above. `classes` names the style of each row, `plain`, `best` or none, where there are any.
    """

    heads: Sequence[str]
    rows: Sequence[Row]
    command: str = ""
    title: str = ""
    note: str = ""
    classes: Sequence[str] = ()


@dataclass(frozen=True)
class Code:
    """Text that is shown as it is, in the language of a code block; with `folded`, a title, the page alone has it,
    folded."""

    text: str
    language: str = ""
    folded: str = ""


@dataclass(frozen=True)
class Plot:
    """A picture of figures, which the page alone shows: `draw` gives an SVG, or raises DataError."""

    draw: Callable[[], str]
    caption: str


Block = str | list[str] | Table | Code | Plot  # of a document: a string is a paragraph, several are a list


def table_of(
    items: Iterable[Item],
    columns: Columns[Item],
    command: str = "",
    title: str = "",
    note: str = "",
    classes: Sequence[str] = (),
) -> Table:
    """A table with a row for each item."""
    rows = [[of(item) for of in columns.values()] for item in items]
    return Table(list(columns), rows, command, title, note, classes)


# ── figures ──


def known(value: Any) -> TypeGuard[float]:
    """Whether a figure was measured: a finite number, not None."""
    return isinstance(value, (int, float)) and math.isfinite(value)


def number(value: Any, digits: int = 2) -> str:
    """A number with thousands separators; a dash where nothing was measured."""
    if not known(value):
        return DASH
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"


def significant(value: Any) -> str:
    """Three significant digits, for figures of any size."""
    if not known(value):
        return DASH
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e6:
        return f"{value:.2e}"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def percent(value: Any) -> str:
    """Per cent to one decimal; a share below 1 is never rounded up to 100."""
    if not known(value):
        return DASH
    digits = next((digits for digits in (1, 2, 3) if value >= 1 or float(f"{100 * value:.{digits}f}") < 100), 4)
    return f"{100 * value:.{digits}f} %"


def counted(count: int, noun: str) -> str:
    """A count with its noun, in the plural but for one."""
    return f"{number(count)} {noun}{'s' * (count != 1)}"


def size(value: Any) -> str:
    """Bytes in decimal units."""
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
    """A value as every output for readers shows it, an interval as `1.52× [1.44, 1.60]`; a dash for none."""
    if isinstance(cell, Cell):
        return shown(cell.value, cell.form)
    if isinstance(cell, str):
        return cell
    show = FORMS.get(form) or (lambda value: format(value, form))
    if not isinstance(cell, Interval):
        return show(cell) if known(cell) else DASH
    if not known(cell.mean):
        return DASH
    if not known(cell.low) or not known(cell.high) or cell.low == cell.high:  # of one text, or of texts that are alike
        return show(cell.mean)
    low, high = (show(bound).rstrip(" %×") for bound in (cell.low, cell.high))
    return f"{show(cell.mean)} [{low}, {high}]"


def listed(counts: Mapping[str, int]) -> str:
    """Counts by reason, in a row."""
    return "; ".join(f"{number(count)} {reason}" for reason, count in counts.items())


# ── foreign text ──


def clean(value: object) -> str:
    """Text that is safe to print: control characters and lone surrogates become visible signs."""
    text = str(value).replace("\r\n", "\n").encode("utf-8", "replace").decode("utf-8")
    return _CONTROL.sub(lambda match: chr(0x2400 + ord(match[0])) if ord(match[0]) < 32 else "\ufffd", text)


def placeless(value: Any) -> Any:
    """Text without the folders of this machine: absolute paths become their last name; in lists and dicts too."""
    if isinstance(value, dict):
        return {key: placeless(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [placeless(one) for one in value]
    if not isinstance(value, str):
        return value
    if os.path.isabs(value):
        return os.path.basename(os.path.normpath(value)) or value
    return _ABSOLUTE.sub(lambda match: match[1], value)


# ── the outputs ──


def _values(table: Table) -> list[list[Value]]:
    return [[cell.value if isinstance(cell, Cell) else cell for cell in row] for row in table.rows]


def columns_of_words(table: Table) -> list[bool]:
    """Whether a column holds words alone: these stand left, figures right."""
    return [
        at == 0 or all(isinstance(row[at], str) for row in rows) if (rows := _values(table)) else True
        for at in range(len(table.heads))
    ]


def commands_of(blocks: Iterable[Block]) -> list[str]:
    """The commands that measured what the tables show, each once."""
    return [*dict.fromkeys(block.command for block in blocks if isinstance(block, Table) and block.command)]


def in_a_cell(text: str) -> str:
    """Text that does not end a cell of a table in Markdown."""
    return text.replace("|", "/").replace("\n", " ")


def markdown(table: Table, word: Callable[[str], str] = in_a_cell, sentence: Callable[[str], str] = str) -> str:
    """A table as Markdown, its title and note above; `word` and `sentence` make text harmless that is no figure."""

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
    """Blocks as Markdown, for the terminal and for eval.md, speedup.md and their like; the commands stand last.

    `escaped` is for Markdown that is rendered elsewhere: foreign text cannot break out of it, and commands name no
    folders of this machine.
    """
    blocks = [block for block in blocks if block]
    word, sentence = (words, sentence_of_words) if escaped else (in_a_cell, str)

    def part(block: Block) -> str:
        if isinstance(block, str):
            return sentence(block)
        if isinstance(block, list):
            return "\n".join(f"- {sentence(one)}" for one in block)
        if isinstance(block, Code):
            return code_block(block.language, block.text)
        assert isinstance(block, Table)
        return markdown(block, word, sentence)

    on_page_alone = [isinstance(block, Plot) or (isinstance(block, Code) and bool(block.folded)) for block in blocks]
    parts = [part(block) for block, left_out in zip(blocks, on_page_alone, strict=True) if not left_out]
    commands = [code(placeless(one)) if escaped else f"`{one}`" for one in commands_of(blocks)]
    return "\n\n".join([*parts, *commands]) + "\n"


# Markdown that foreign text cannot break out of.


def words(text: object) -> str:
    """Foreign text as plain Markdown words on one line, with all markup escaped, HTML's too."""
    return _escaped(" ".join(clean(text).split()))


def sentence_of_words(text: str) -> str:
    """A sentence in which backticks enclose code, all other markup escaped."""
    parts = re.split("`([^`]+)`", " ".join(clean(text).split()))
    return "".join(code(part) if at % 2 else _escaped(part) for at, part in enumerate(parts))


def _escaped(text: str) -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]#|~$])", r"\\\1", text)


def code(text: object) -> str:
    """A code span whose fence is longer than any run of backticks inside; bars are safe for tables."""
    inner = " ".join(clean(text).split()).replace("|", "\\|")
    fence = "`" * (1 + _longest_fence(inner))
    space = " " if "`" in inner else ""
    return f"{fence}{space}{inner}{space}{fence}"


def code_block(language: str, text: str) -> str:
    """A code block whose fence is longer than any run of backticks inside."""
    text = clean(text)
    fence = "`" * max(3, 1 + _longest_fence(text))
    return f"{fence}{language}\n{text}\n{fence}"


def _longest_fence(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)


def records(blocks: Iterable[Block]) -> list[dict[str, Any]]:
    """Every row as an object: its values by head, an interval also with its bounds; of several tables with the title.

    A figure that could not be had is None.
    """
    tables = [block for block in blocks if isinstance(block, Table)]
    found: list[dict[str, Any]] = []
    for table in tables:
        for row in _values(table):
            record: dict[str, Any] = {"table": table.title} if len(tables) > 1 else {}
            for head, value in zip(table.heads, row, strict=True):
                if isinstance(value, Interval):
                    record |= {head: value.mean, f"{head}, low": value.low, f"{head}, high": value.high}
                else:
                    record[head] = value
            found.append(without_nan(record))
    return found


def rendered(blocks: Sequence[Block], value: Any, output: str) -> str:
    """Results as text: `md`, `jsonl` or `csv` of the blocks, or `value` as `json`."""
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
