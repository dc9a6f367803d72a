"""Put the tables of a finished run into README.md and the benchmarks in docs/, between their markers.

    python scripts/fill_figures.py runs/demo

Each table stands between `<!-- NAME -->` and `<!-- end -->`, where NAME begins with the run's name, such as
`demo headline`. Nothing else of the documents is changed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from distill.export import ExportedFile, ExportReport
from distill.files import read_result
from distill.measuring.speedup_results import Measurement, SpeedupReport
from distill.tables import Cell, Interval, Row, Table, markdown, shown

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("README.md", "docs/benchmarks.md")
BACKENDS = {"pytorch": "PyTorch", "gguf": "llama.cpp", "ik:q8_0": "ik_llama.cpp, q8_0"}
# What the headline shows: settled beforehand, not the best of many. llama-server drafts 3 tokens by default, recipes 4:
# the first of these lengths that was measured.
HEADLINE = ("| acceptance probability, rejection sampling", "| acceptance probability, greedy")  # rows of eval.md
LEFT_OUT = ("**by group", "**conditional", "**rounds")  # tables of eval.md
RULE, LENGTHS = "expected-value", (3, 4, 1)


def tables(run: Path) -> dict[str, str]:
    """The text of each marker, as far as the run has got."""
    found: dict[str, str] = {}
    if not (run / "speedup.md").exists():
        return found
    evaluation = _of_documents(_without_command(run / "eval.md"))
    speedup = read_result(run / "speedup.json", SpeedupReport)
    return found | {
        "headline": f"{_acceptances(evaluation)}\n\n{_speedups(speedup)}",
        "evaluation": evaluation,
        "speedup": _without_command(run / "speedup.md"),
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
    sections = re.split(r"\n(?=\*\*)", re.sub(r"\n\|[^|\n]*: difference to the first[^\n]*", "", evaluation))
    return "\n".join(one for one in sections if not one.startswith(LEFT_OUT))


def _acceptances(evaluation: str) -> str:
    """Two acceptance probabilities of eval.md on the target's own text, with the table's head."""
    answers = evaluation[evaluation.index("**answers**") :].split("\n**", 1)[0]
    rows = [line for line in answers.splitlines() if line.startswith("|")]
    return "\n".join([*rows[:2], *(row for row in rows[2:] if row.startswith(HEADLINE))])


def _speedups(report: SpeedupReport) -> str:
    """The speedup of each pair by each backend: with a fixed draft length, with lengths that `RULE` chooses, and with
    tokens that are looked up."""
    rows: dict[str, dict[str, Measurement]] = {}
    measured = {one.length for one in report.measurements}
    fixed = next((length for length in LENGTHS if length in measured), None)
    for measurement in report.measurements:
        kind = _kind(measurement, fixed)
        if kind is not None:
            rows.setdefault(kind, {}).setdefault(measurement.backend, measurement)
    backends = [name for name in BACKENDS if any(name in row for row in rows.values())]
    heads = [f"speedup over plain decoding, greedy, {report.prompts} prompts", *(BACKENDS[name] for name in backends)]
    cells = [[kind, *(_interval(row[name]) if name in row else "" for name in backends)] for kind, row in rows.items()]
    return markdown(Table(heads, cells))


WITH_TREES = {
    "tree": "the draft's likeliest tokens, verified together",
    "lookup+tree": "repeated text looked up, else the draft's likeliest tokens, verified together",
    "table": "repeated text looked up, else the likeliest tokens by n-grams of other answers, no draft",
}


def _kind(one: Measurement, fixed: int | None) -> str | None:
    """What the headline calls a configuration; None for one that it leaves out. `fixed` is the length that it shows."""
    if one.sampler is not None:
        return None
    if fixed is not None and one.length == fixed:
        return f"fixed length {fixed}" + " (servers' default)" * (fixed == 1)
    if one.drafter == "lookup":
        return "repeated text looked up, no draft"
    if one.drafter in WITH_TREES:
        return WITH_TREES[one.drafter]
    if one.rule == RULE:
        return "adaptive length, repeated text looked up" if one.drafter == "lookup+draft" else "adaptive length"
    return None


def _interval(measurement: Measurement) -> str:
    return shown(Interval(measurement.speedup, measurement.speedup_low, measurement.speedup_high))


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
    """Fill every document in place."""
    run = Path(sys.argv[1])
    found = tables(run)
    for document in DOCUMENTS:
        path = ROOT / document
        path.write_text(filled(path.read_text(encoding="utf-8"), run.name, found), encoding="utf-8")


if __name__ == "__main__":
    main()
