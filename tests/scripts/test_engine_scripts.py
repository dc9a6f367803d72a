"""The engine's script on a tiny run: rounds against their bound."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_scripts import run, script

from distill.decoding.decode import Decoded, Round


def test_shares_of_the_bound_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = script("benchmarks/engine", monkeypatch)
    # Three rounds of two and a last one that the limit cut short; the first is accepted whole.
    rounds = [Round(8, 2, 2, 10.0), Round(11, 2, 1, 8.0), Round(13, 2, 0, 8.0), Round(14, 1, 1, 5.0)]
    result = Decoded([0] * 9, [], rounds, prefill_seconds=4.0, seconds=31.0)
    assert engine.share_of_bound(result, 6.0, 2) == (6 / 3, 18 / 26)


def test_shares_of_a_tiny_run_and_their_resuming(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = script("benchmarks/engine", monkeypatch)
    monkeypatch.setattr(engine, "CAPACITY", 64)
    cases = "--case pytorch-own-demo --case gguf-own-same --lengths 1,2 --repeats 1 --tokens 10"
    asked = (copied, "--to", tmp_path / "engine.json", *f"{cases} --prompt-tokens 6 --threads 1".split())
    run(engine, monkeypatch, *asked)
    printed = capsys.readouterr().out
    rows = [line.split(" | ") for line in printed.splitlines() if line.startswith(("| pytorch", "| gguf"))]
    assert [row[3] for row in rows] == ["1", "2", "1", "2"]
    assert [row[4] for row in rows[2:]] == ["2.00", "3.00"]  # the target drafting for itself is accepted whole
    assert all(float(row[5]) > 0 for row in rows)
    # transformers' assisted generation is the peer of the one; of the other none was asked for.
    assert all(float(row[6].rstrip(" |")) > 0 for row in rows[:2]) and all(row[6] == "– |" for row in rows[2:])
    monkeypatch.setattr(engine, "measure", None)  # finished cases are kept
    run(engine, monkeypatch, *asked)
    assert capsys.readouterr().out == printed
