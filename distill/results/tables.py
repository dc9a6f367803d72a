"""Tables of results, made once and written as HTML, as Markdown that foreign text cannot break, or for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True)
class Cell:
    """Foreign text in a table, such as the name of a model or file; figures and words of our own are plain strings.

    `style` is `code` for paths, `bad` for a warning's colour. `mark` follows it as a badge. `small` is set in small
    type beside it, or in a line of its own (`below`).
    """

    text: str
    style: Literal["", "code", "bad"] = ""
    mark: Literal["", "chosen"] = ""
    small: str = ""
    below: bool = False


Row = Sequence[Cell | str]


@dataclass(frozen=True)
class Table:
    """Rows under their heads, and the command that measured them.

    The first `words` columns hold words, the others figures. `classes` names the style of each row, where there are
    any. `title` and `note` stand above.
    """

    heads: Sequence[str]
    rows: Sequence[Row]
    command: str
    words: int = 1
    classes: Sequence[str] = ()
    title: str = ""
    note: str = ""


Columns = Mapping[str, Callable[[Item], Cell | str]]  # by head, the cell of an item


def table_of(
    items: Iterable[Item], columns: Columns[Item], command: str, words: int = 1, classes: Sequence[str] = ()
) -> Table:
    """A table with a row for each item."""
    rows = [[cell(item) for cell in columns.values()] for item in items]
    return Table(list(columns), rows, command, words, classes)


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]], align: str = "") -> str:
    """A table for the terminal and for eval.md, speedup.md and their like; foreign bars become strokes.

    `align` has a letter for each column: l or r; columns behind its end are as its last one, l without one.
    """
    sides = (align or "l").ljust(len(heads), (align or "l")[-1])
    rule = "|" + "".join("--:|" if side == "r" else "---|" for side in sides[: len(heads)])
    lines = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in (heads, *rows)]
    return "\n".join([lines[0], rule, *lines[1:]])
