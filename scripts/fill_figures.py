"""Put a finished demo run's tables into README.md and docs/benchmarks.md, between their markers.

    python scripts/fill_figures.py runs/demo

Each table stands between `<!-- NAME -->` and `<!-- end -->`; nothing else of the documents is touched.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from distill.files import read_json

ROOT = Path(__file__).resolve().parent.parent


def tables(run: Path) -> dict[str, str]:
    """The text of each marker, as far as the run has got."""

    def read(path: Path) -> str:
        """Without the command, which the documents say themselves."""
        return re.sub(r"\n`distill [^`]*`\n", "\n", path.read_text(encoding="utf-8")).strip()

    found: dict[str, str] = {}
    if (run / "search" / "search.md").exists():
        found["search"] = read(run / "search" / "search.md")
    if not (run / "speedup.md").exists():
        return found
    evaluation = read(run / "eval.md")
    found |= {
        "answers": evaluation[evaluation.index("**answers**") : evaluation.index("**files**")].strip(),
        "positions": evaluation[evaluation.index("**Acceptance by") :].strip(),
        "evaluation": evaluation,
        "speedup": read(run / "speedup.md"),
    }
    rows = [
        "| file | MB | top-1 agreement | mean abs. difference of log p | texts with other token ids |",
        "|---|--:|--:|--:|--:|",
    ]
    for file in read_json(run / "gguf" / "export.json")["files"]:
        parity = file["parity"]
        rows.append(
            f"| {file['model']} {file['outtype']} | {file['bytes'] / 1e6:.1f} | {parity['top1_agreement']:.2%} "
            f"| {parity['mean_abs_dlogprob']:.5f} | {len(parity['tokenizer_mismatches'])} of "
            f"{parity['tokenizer_texts']} |"
        )
    return found | {"parity": "\n".join(rows)}


def main() -> None:
    run = Path(sys.argv[1])
    prefix = run.name  # markers read `demo answers`
    for name in ("README.md", "docs/benchmarks.md"):
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        for marker, table in tables(run).items():
            pattern = re.compile(rf"(<!-- {re.escape(prefix)} {marker} -->\n).*?(\n<!-- end -->)", re.DOTALL)
            text = pattern.sub(lambda match, table=table: match.group(1) + table + match.group(2), text)  # type: ignore[misc]
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
