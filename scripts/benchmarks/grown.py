"""Measure drafters of one target at the costs of larger ones, which are grown from it and write the same text.

    python scripts/benchmarks/grown.py TARGET.gguf --to grown/ --draft stock=SIBLING.gguf --draft adapted=FOLDER \\
        --texts code=FILE --texts chat=FILE
    python scripts/benchmarks/grown.py TARGET.gguf --to grown/ … --sizes 3B=1x56 --engines llama.cpp --count 2
    python scripts/benchmarks/grown.py TARGET.gguf --to grown/ … --table         # what is measured so far

The acceptance is that of the small target and its drafts. The costs are those of a larger target's file. A size
NAME=TILExLAYERS is what scripts/grow_target.py makes of the small file. The defaults suit Qwen2.5-1.5B.

A part is one `distill speedup` of a size, an engine, a text and a draft: four drafted tokens and the adaptive length.
With the last draft it also measures a lookup, and both together. A part is measured once, and a killed script goes on
with the part that was not finished. A grown file is removed when all its parts are measured. Time it alone.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from grow_file import grow_file

from distill.files import read_result, write_atomically
from distill.measuring.speedup_results import SpeedupReport, speedup_of
from distill.tables import Cell, Row, Table, document

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"1.5B": (1, 28), "3B": (1, 56), "7B": (2, 36), "14B": (2, 74)}
ENGINES = {"PyTorch": ("--pytorch", "target_weights=file"), "llama.cpp": ()}
ADAPTIVE = ("-C", "rule=expected-value,length=8")
LOOKUPS = ("-C", "drafter=lookup,rule=expected-value", "-C", "drafter=lookup+draft,rule=expected-value,length=8")


class Part:
    """One command: a size, an engine, a text and a draft."""

    def __init__(self, asked: argparse.Namespace, size: str, engine: str, text: str, draft: str) -> None:
        self.asked, self.size, self.engine, self.text, self.draft = asked, size, engine, text, draft
        self.result = asked.to / f"{size}-{engine}-{text}-{draft}.json"
        self.target = asked.to / f"{size}.gguf"

    def measure(self) -> None:
        """Grow the target's file if it is missing, and run the command. If it fails, end the script."""
        if not self.target.exists():
            tile, layers = self.asked.sizes[self.size]
            grow_file(self.asked.target, self.target, tile, layers)
        last = self.draft == [*self.asked.draft][-1]
        command = [sys.executable, "-m", "distill", "speedup", self.target, self.asked.draft[self.draft]]
        command += ["--prompts", self.asked.texts[self.text], "--count", self.asked.count, "--lengths", 4]
        command += ["--tokens", self.asked.tokens, *ADAPTIVE, *(LOOKUPS if last else ()), *ENGINES[self.engine]]
        done = subprocess.run([*map(str, command), "-o", "json"], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        if done.returncode:
            sys.exit(f"{self.result.stem} ended with status {done.returncode}; the same command goes on")
        write_atomically(self.result, lambda path: path.write_text(done.stdout, encoding="utf-8"))

    def row(self) -> Row:
        """Return the table's row."""
        rows = {row.configuration: row for row in read_result(self.result, SpeedupReport).measurements}
        plain, fixed = rows["plain"], rows["draft 4"]
        ways = [rows.get(name) for name in ("draft 4", "draft adaptive", "lookup", "lookup + draft")]
        return [
            *(self.size, self.engine, self.text, self.draft, Cell(plain.tokens_per_second, ".2f")),
            *(None if way is None else Cell(speedup_of(way), ".2f") for way in ways),
            *(Cell(fixed.predicted, ".2f"), Cell(fixed.acceptance, "%"), Cell(plain.prompt_share, "%")),
        ]


HEADS = [
    *("cost of", "engine", "text", "draft", "plain, tokens/s", "four drafted", "adaptive", "lookup", "lookup + draft"),
    *("four, predicted", "drafted tokens accepted", "prompt, of plain time"),
]


def pairs(words: list[str]) -> dict[str, Path]:
    """Return NAME=PATH options as paths by name."""
    return {name: Path(path).resolve() for name, _, path in (word.partition("=") for word in words)}


def main() -> None:
    """Measure the parts that are missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="the small target's file")
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--draft", action="append", required=True, metavar="NAME=MODEL")
    parser.add_argument("--texts", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--sizes", default=",".join(f"{name}={tile}x{n}" for name, (tile, n) in SIZES.items()))
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--count", type=int, default=4, help="prompts of a text")
    parser.add_argument("--tokens", type=int, default=256, help="new tokens of a prompt, at most")
    parser.add_argument("--table", action="store_true", help="only print the table so far")
    asked = parser.parse_args()
    asked.target, asked.draft, asked.texts = asked.target.resolve(), pairs(asked.draft), pairs(asked.texts)
    asked.to = asked.to.resolve()
    asked.sizes = {
        name: tuple(map(int, size.split("x"))) for name, _, size in (w.partition("=") for w in asked.sizes.split(","))
    }
    asked.to.mkdir(parents=True, exist_ok=True)
    parts = []
    for size in asked.sizes:
        ways = itertools.product(asked.engines.split(","), asked.texts, asked.draft)
        of_size = [Part(asked, size, *way) for way in ways]
        for part in of_size:
            if not part.result.exists() and not asked.table:
                part.measure()
        if not asked.table:
            (asked.to / f"{size}.gguf").unlink(missing_ok=True)
        parts += of_size
    rows = [part.row() for part in parts if part.result.exists()]
    print(document([Table(HEADS, rows, " ".join(["python", "scripts/benchmarks/grown.py", *sys.argv[1:]]))]))


if __name__ == "__main__":
    main()
