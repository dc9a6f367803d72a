"""Print the Markdown table of the demo data's files and SHA-256 hashes, for data/README.md."""

from __future__ import annotations

from pathlib import Path

from distill.files import file_digest, reference_digest

DATA = Path(__file__).resolve().parent.parent / "data"

if __name__ == "__main__":
    print("| what | bytes | SHA-256 |\n|---|--:|---|")
    for folder in ("demo-target", "demo-donor"):
        for name in ("model.safetensors", "tokenizer.json"):
            path = DATA / folder / name
            if path.exists():
                print(f"| `{folder}/{name}` | {path.stat().st_size:,} | `{file_digest(path)}` |")
    for split in ("validation", "test"):
        files = [path for path in (DATA / split).rglob("*.py") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        print(f"| `{split}/`, {len(files)} files | {size:,} | `{reference_digest(str(DATA / split))}` (whole folder) |")
    questions = DATA / "questions.jsonl"
    print(f"| `{questions.name}` | {questions.stat().st_size:,} | `{file_digest(questions)}` |")
