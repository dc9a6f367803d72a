"""scripts/benchmarks/scale.py, small: killed on the way; everything is there once, and is what the server said."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import tiny


@pytest.mark.slow
def test_a_small_way_killed_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(tiny.ROOT / "scripts" / "benchmarks"))
    found = importlib.import_module("scale").measure(12_000, 1, tmp_path)
    assert found["kills"] == 1 and found["answers"] == 30 and found["MiB"] < 2048
