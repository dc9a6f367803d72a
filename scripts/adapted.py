"""Print the last sentence of `scripts/demo.sh --tuned`, which compares the official draft with the adapted one.

.venv/bin/python scripts/adapted.py SIBLING_RUN ADAPTED_RUN

Both runs measured the same prompts. The acceptance comes from their evaluation, the speed from their fastest
configuration that drafts only with the model, and the minutes from the adapted run's stages up to its training.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from distill.files import read_json, read_result
from distill.measuring.evaluation_results import EvaluationReport
from distill.measuring.speedup_results import SpeedupReport

STAGES = ("questions", "corpus", "answers", "teacher", "cut", "train")


def speed(run: Path) -> float:
    """Return tokens/s of the fastest configuration in which the draft model drafts, over all engines."""
    report = read_result(run / "speedup.json", SpeedupReport)
    drafting = [row for part in report.parts for row in part.measurements if row.drafter == "draft"]
    if not drafting:
        sys.exit(f"{run} measured no configuration that drafts with the model")
    return max(row.tokens_per_second for row in drafting)


def acceptance(run: Path, which: str) -> float:
    """Return the acceptance probability of a run's draft `before` or `after` training, on answers to test prompts."""
    report = read_result(run / "eval.json", EvaluationReport)
    return float(getattr(report.domains["answers"][which], report.acceptance_measure).mean)


def minutes(run: Path) -> float:
    """Return the minutes of a run's stages up to its training."""
    records = (run / "stages" / f"{name}.json" for name in STAGES)
    return sum(json.loads(path.read_text())["seconds"] for path in records if path.is_file()) / 60


def sentence(sibling: Path, adapted: Path) -> str:
    """Return the comparison in one line."""
    tokens = read_json(adapted / "answers" / "manifest.json")["answer_tokens"]
    return (
        f"The official draft: {speed(sibling):.1f} tokens/s (acceptance {acceptance(adapted, 'before'):.2f}). "
        f"After {minutes(adapted):.0f} minutes on {tokens:,} tokens of your model's answers: "
        f"{speed(adapted):.1f} tokens/s (acceptance {acceptance(adapted, 'after'):.2f})."
    )


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    print(sentence(Path(sys.argv[1]), Path(sys.argv[2])))
