"""Put the tables of a finished run into docs/benchmarks.md, between their markers.

    python scripts/fill_figures.py runs/demo

Each table stands between `<!-- NAME -->` and `<!-- end -->`, where NAME begins with the run's name, such as
`demo speedup`. Nothing else of the page is changed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from distill.export import ExportedFile, ExportReport
from distill.files import read_result
from distill.tables import Cell, Row, Table, markdown

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
LEFT_OUT = ("**by group", "**conditional", "**rounds")  # tables of eval.md
ROWS_LEFT_OUT = r"[^|\n]*: difference to the first|KL\(draft|acceptance probability, llama|ceiling|share of the sampled"
COLUMNS_LEFT_OUT = {"pair", "plain tokens/s", "same text", "distribution"}  # of the tables of speedup.md


def tables(run: Path) -> dict[str, str]:
    """The text of each marker, as far as the run has got."""
    found: dict[str, str] = {}
    if not (run / "speedup.md").exists():
        return found
    return found | {
        "evaluation": _of_documents(_without_command(run / "eval.md")),
        "speedup": _without_columns(_without_command(run / "speedup.md")),
        "parity": _parity(read_result(run / "gguf" / "export.json", ExportReport).files),
    }


def _without_command(path: Path) -> str:
    """The text of a table file less the commands, which the documents name themselves; of a speedup's explanations,
    rounds, steps and depths nothing. A list before the first table stays: it says what was measured."""
    text = path.read_text(encoding="utf-8")
    first = text.index("\n**")
    tables = re.split(r"\n- |\n(?:[^\n]*:\n\n)?\*\*a round\*\*", text[first:])[0]
    return re.sub(r"\n`distill [^`]*`\n", "\n", text[:first] + tables).strip()


def _of_documents(evaluation: str) -> str:
    """The tables of eval.md that the documents show: the measures without their differences."""
    rows = re.sub(rf"\n\| (?:{ROWS_LEFT_OUT})[^\n]*|\nTop-1 agreement [^\n]*\n", "", evaluation)
    sections = re.split(r"\n(?=\*\*)", rows)
    return "\n".join(one for one in sections if not one.startswith(LEFT_OUT))


def _without_columns(text: str) -> str:
    """Drop from a speedup's text the columns of COLUMNS_LEFT_OUT, and what only the run's own page needs."""
    lines, kept = [], []
    left_out = re.compile(r"\n(?:Calibrated on|Up to) [^\n]*\n|^\*\*engines.*?(?=^\*\*conf)", flags=re.M | re.S)
    for line in left_out.sub("", text).splitlines():
        cells = line.split("|")[1:-1]
        if not lines or not lines[-1].startswith("|"):  # a table begins here, if one does
            kept = [column for column, head in enumerate(cells) if head.strip() not in COLUMNS_LEFT_OUT]
        lines.append("|" + "|".join(cells[column] for column in kept) + "|" if cells else line)
    return "\n".join(lines)


def _parity(files: list[ExportedFile]) -> str:
    """Each GGUF file against Hugging Face fp32."""
    heads = ["file", "MB", "top-1 agreement", "mean abs. difference of log p", "texts with other token ids"]
    rows: list[Row] = [
        [
            f"{file.model} {file.outtype}",
            Cell(file.bytes / 1e6, ".1f"),
            Cell(parity.top1_agreement, ".2%"),
            Cell(parity.mean_abs_dlogprob, ".5f"),
            f"{len(parity.tokenizer_mismatches)} of {parity.tokenizer_texts}",
        ]
        for file in files
        if (parity := file.parity) is not None
    ]
    return markdown(Table(heads, rows))


def filled(text: str, name: str, found: dict[str, str]) -> str:
    """`text` with every table of the run called `name` between its markers."""
    for marker, table in found.items():
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
