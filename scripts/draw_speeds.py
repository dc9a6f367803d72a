"""Draw docs/speeds.svg, the picture of the README, from the tables in docs/.

python scripts/draw_speeds.py

Every bar is a speedup in docs/benchmarks.md or docs/tuned-target.md. Every point of the lines and every ring is a
figure of the table in docs/benchmarks.md that has the cost of larger targets. If a table or figure is missing, the
script ends.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
COLOURS = {"plain": "#8a8f98", "lookup": "#b59a1d", "stock sibling": "#3aa8b8", "trained draft": "#2f81d6"}
# The lines of the right picture, and what heads their columns in the table. Sizes are first cells of its rows.
GROWN = {"lookup": "lookup", "stock sibling": "the official 0.5B", "trained draft": "the adapted 0.5B"}
SIZES = ("1.5B", "3B", "7B")
Bar = tuple[str, float]  # how the target is decoded, and the speedup over plain decoding


def cell(page: str, row: str, column: str) -> float:
    """Return the first number of a table's cell in docs/`page`, found by its row's first cell and its column's head.

    If several tables have this cell, the first one counts. A missing cell ends the script.
    """
    head: list[str] = []
    for line in (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines():
        cells = [part.strip(" *") for part in line.split("|")[1:-1]]
        if not cells:
            head = []
        elif not head:
            head = cells
        elif cells[0] == row and column in head:
            number = re.match(r"[\d.]+", cells[head.index(column)])
            if number:
                return float(number[0])
    sys.exit(f"docs/{page} has no figure in row {row!r} and column {column!r}")


def groups() -> dict[str, list[Bar]]:
    """Return the bars of each pair and text, by title. `scripts/demo.sh --tuned` measures the first group."""
    pair, tuned, column = "benchmarks.md", "tuned-target.md", "speedup over plain decoding"
    bars: dict[str, list[Bar]] = {
        "Tuned to answer in JSON\n(bfloat16, adaptive length)": [
            ("stock sibling", cell(tuned, "the official 0.5B", column)),
            ("trained draft", cell(tuned, "the adapted 0.5B", column)),
        ]
    }
    for title, column in (
        ("Chat, target in bfloat16\n({} tokens/s plain)", "bfloat16, chat"),
        ("Code that repeats its prompt\n(4-bit file, {} tokens/s plain)", "file's bits, code"),
    ):
        bars[title.format(cell(pair, "plain, tokens/s", column))] = [
            ("lookup", cell(pair, "lookup", column)),
            ("stock sibling", cell(pair, "draft adaptive", column)),
        ]
    engine = "PyTorch, the file's bits"
    bars[f"Chat, target's 4-bit file\n({cell(pair, 'plain, tokens/s', engine)} tokens/s plain)"] = [
        ("lookup", cell(pair, "lookup", engine)),
        ("stock sibling", cell(pair, "the sibling as it is", "adaptive")),
        ("trained draft", cell(pair, "half of its MLPs, 130,272 tokens", "adaptive")),
    ]
    return bars


def draw(path: Path) -> None:
    """Write the picture: bars of measured pairs on the left, drafters by the cost of the target on the right."""
    matplotlib.rcParams.update({"svg.hashsalt": "distill", "font.size": 10, "svg.fonttype": "none"})
    figure = Figure(figsize=(9.6, 4.2), layout="constrained", facecolor="white")
    measured, grown = figure.subplots(1, 2, width_ratios=(3, 1.6))
    height, ticks = 0.0, []
    for title, bars in groups().items():
        rows: list[Bar] = [("plain", 1.0), *bars]
        ticks.append((height + (len(rows) - 1) / 2, title))
        for name, speedup in rows:
            measured.barh(height, speedup, height=0.8, color=COLOURS[name])
            label = name if name == "plain" else f"{name} {speedup:.2f}×"
            measured.annotate(label, (speedup, height), (4, 0), textcoords="offset points", va="center")
            height += 1
        height += 0.7
    measured.axvline(1.0, color="#444444", linewidth=1, linestyle=(0, (3, 2)))
    measured.set_yticks([place for place, _ in ticks], [title for _, title in ticks])
    measured.invert_yaxis()
    measured.set_xlim(0, 4.6)
    measured.set_title("Measured: Qwen2.5-Coder-1.5B, 2 CPU cores", loc="left", fontsize=11)
    measured.set_xlabel("tokens per second, plain decoding = 1")

    for name, column in GROWN.items():
        speedups = [cell("benchmarks.md", size, column) for size in SIZES]
        grown.plot(SIZES, speedups, "o-", markersize=4, color=COLOURS[name])
        label, place = f"{name} {speedups[-1]:.2f}×", (SIZES[-1], speedups[-1])
        below = name == "lookup"  # Its line ends under the stock sibling's.
        grown.annotate(label, place, (4, -24 if below else 8), textcoords="offset points", ha="right", fontsize=9)
        if name != "lookup":
            predictions = [cell("benchmarks.md", size, f"{column}, predicted") for size in SIZES]
            grown.plot(SIZES, predictions, "o", markersize=8, fillstyle="none", color=COLOURS[name])
    grown.axhline(1.0, color="#444444", linewidth=1, linestyle=(0, (3, 2)))
    grown.set_ylim(0.9, 2.25)
    grown.set_title("Tuned to German answers,\nat the cost of larger targets", loc="left", fontsize=11)
    grown.set_xlabel("four tokens drafted")
    measured.xaxis.set_major_formatter("{x:.1f}×")
    grown.yaxis.set_major_formatter("{x:.1f}×")
    for axes in (measured, grown):
        axes.spines[["top", "right"]].set_visible(False)
    measured.tick_params(axis="y", length=0)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    draw(ROOT / "docs" / "speeds.svg")
    print("wrote docs/speeds.svg")
