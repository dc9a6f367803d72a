"""The adaptive rule against the best fixed length in hindsight, and a lookup before a draft against its parts:
scripts/benchmarks/rules.py and joined.py at a small size."""

from __future__ import annotations

import importlib
import statistics
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts" / "benchmarks"


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module(name)


def test_the_rule_loses_little_to_the_best_length_and_to_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = script("rules", monkeypatch).simulate(200, kinds=("constant", "told"), accepted=(0.3, 0.8, 0.95), seeds=3)
    assert len(cells) == 2 * 3 * 9
    worst = min(cells, key=lambda cell: cell.ratio)
    assert worst.ratio > 0.94, worst
    assert statistics.fmean(cell.ratio for cell in cells) > 0.99


def test_the_sessions_rounds_correct_costs_that_were_timed_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    """As wrong by a factor as they may be, the rule is about as fast as with the right ones; it was .92 and .97."""
    found = script("rules", monkeypatch).mistimed(300, seeds=1, kinds=("constant", "told"))
    right, long, short = (statistics.fmean(ratios) for ratios in list(found.values())[:3])
    assert right > 1.0 and long > right - 0.02 and short > right - 0.02


def test_a_lookup_before_a_draft_and_a_tree_lose_little_to_their_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft's prompts are a part of the time; where the lookup gains most, they were a fifth of it."""
    cells = script("joined", monkeypatch).simulate(64, 3, copied=(0.3, 0.9), sessions=3)
    assert len(cells) == 2 * 3 * 9
    for way, least, mean in (("joined", 0.87, 1.03), ("tree", 0.92, 1.05)):
        worst = min(cells, key=lambda cell: cell.ratio(way))
        assert worst.ratio(way) > least, (way, worst)
        assert statistics.fmean(cell.ratio(way) for cell in cells) > mean
