"""Put the tables of a finished run into docs/benchmarks.md, between their markers.

    python scripts/fill_figures.py runs/demo

Each table stands between `<!-- NAME -->` and `<!-- end -->`, where NAME begins with the run's name, such as
`demo speedup`. Nothing else of the page is changed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
LEFT_OUT = ("**by group", "**conditional", "**rounds")  # tables of eval.md
ROWS_LEFT_OUT = r"[^|\n]*: difference to the first|KL\(draft|acceptance probability, llama|ceiling|share of the sampled"
COLUMNS_LEFT_OUT = {"pair", "plain tokens/s", "same text", "distribution"}  # of the tables of speedup.md


def tables(run: Path) -> dict[str, str]:
    """Return the text of each marker. A run without a finished `speedup` gives none."""
    if not (run / "speedup.md").exists():
        return {}
    return {
        "evaluation": _without_rows(_without_command(run / "eval.md")),
        "speedup": _without_columns(_without_command(run / "speedup.md")),
    }


def _without_command(path: Path) -> str:
    """Return the tables of a file without its commands, and without the sections that follow the measured tables.

    A list before the first table says what was measured, so it stays.
    """
    text = path.read_text(encoding="utf-8")
    first = text.index("\n**")
    tables = re.split(r"\n- |\n(?:[^\n]*:\n\n)?\*\*a round\*\*", text[first:])[0]
    return re.sub(r"\n`distill [^`]*`\n", "\n", text[:first] + tables).strip()


def _without_rows(evaluation: str) -> str:
    """Drop the sections of LEFT_OUT and the rows of ROWS_LEFT_OUT from the text of eval.md."""
    rows = re.sub(rf"\n\| (?:{ROWS_LEFT_OUT})[^\n]*|\nTop-1 agreement [^\n]*\n", "", evaluation)
    sections = re.split(r"\n(?=\*\*)", rows)
    return "\n".join(section for section in sections if not section.startswith(LEFT_OUT))


def _without_columns(text: str) -> str:
    """Drop the columns of COLUMNS_LEFT_OUT and the parts that only the run's own page needs from a speedup's text."""
    lines, kept = [], []
    left_out = re.compile(r"\n(?:Calibrated on|Up to) [^\n]*\n|^\*\*engines.*?(?=^\*\*conf)", flags=re.M | re.S)
    for line in left_out.sub("", text).splitlines():
        cells = line.split("|")[1:-1]
        if not lines or not lines[-1].startswith("|"):  # This line may begin a table.
            kept = [column for column, head in enumerate(cells) if head.strip() not in COLUMNS_LEFT_OUT]
        lines.append("|" + "|".join(cells[column] for column in kept) + "|" if cells else line)
    return "\n".join(lines)


def filled(text: str, name: str, by_marker: dict[str, str]) -> str:
    """Return `text` with every table of the run called `name` between its markers."""
    for marker, table in by_marker.items():
        begin, _, rest = text.partition(f"<!-- {name} {marker} -->\n")
        if rest:
            _, end, after = rest.partition("\n<!-- end -->")
            text = f"{begin}<!-- {name} {marker} -->\n{table}{end}{after}"
    return text


def main() -> None:
    """Fill the page in place."""
    run = Path(sys.argv[1])
    text = BENCHMARKS.read_text(encoding="utf-8")
    BENCHMARKS.write_text(filled(text, run.name, tables(run)), encoding="utf-8")


if __name__ == "__main__":
    main()
