"""The expected-value rule against the best fixed length in hindsight: scripts/benchmarks/rules.py at a small size."""

from __future__ import annotations

import importlib.util
import statistics
import sys
from pathlib import Path

PATH = Path(__file__).parents[2] / "scripts" / "benchmarks" / "rules.py"


def test_the_rule_loses_little_to_the_best_length_and_to_plain_decoding() -> None:
    spec = importlib.util.spec_from_file_location("rules_benchmark", PATH)
    assert spec is not None and spec.loader is not None
    rules = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rules)
    cells = rules.simulate(200, kinds=("constant", "told"), accepted=(0.3, 0.8, 0.95), seeds=3)
    assert len(cells) == 2 * (2 + 2 + 3) * 9
    worst = min(cells, key=lambda cell: cell.ratio)
    assert worst.ratio > 0.94, worst
    assert statistics.fmean(cell.ratio for cell in cells) > 0.99
