"""The engine's script on a tiny run: rounds against their bound."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_scripts import run, script

from distill.decoding.decode import Decoded, Round
from distill.engines.model import Step
from distill.files import read_json, write_json


def test_shares_of_the_bound_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = script("benchmarks/engine", monkeypatch)
    # Three rounds of two and a last one that the limit cut short; the first is accepted whole.
    rounds = [Round(8, 2, 2, 10.0), Round(11, 2, 1, 8.0), Round(13, 2, 0, 8.0), Round(14, 1, 1, 5.0)]
    result = Decoded([0] * 9, [], rounds, prefill_seconds=4.0, seconds=31.0)
    steps = [Step(8, 3, 0.0, 20.0), Step(8, 1, 0.0, 7.0)]
    found = engine.text_shares(steps, result, (6.0, 7.5), 2, 5.0)
    assert found["share"] == 18 / 26 and found["with_two"] == 19.5 / 26 and found["alone"] == 15 / 26
    assert found["tokens_per_round"] == 6 / 3 and found["round"] == 26 / 3
    assert found["overhead"] == 31 / 4 - 27 / 4
    assert found["rate"] == 8 / 31 and found["whole_rate"] == 9 / 35


def test_shares_of_a_tiny_run_and_their_resuming(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = script("benchmarks/engine", monkeypatch)
    monkeypatch.setattr(engine, "CAPACITY", 64)
    cases = "--case pytorch-own-demo --case gguf-own-same --lengths 1,2 --repeats 1 --peer-repeats 1 --tokens 10"
    rest = "--prompt-tokens 6 --threads 1 --rule-tokens 9 --rule-repeats 1"
    asked = (copied, "--to", tmp_path / "engine.json", *f"{cases} {rest}".split())
    run(engine, monkeypatch, *asked)
    printed = capsys.readouterr().out
    rows = [line.split(" | ") for line in printed.splitlines() if line.startswith(("| pytorch", "| gguf"))]
    assert [row[3] for row in rows if not row[3].startswith("rule")] == ["1", "2", "1", "2"]
    assert [row[3].endswith("1 texts of 9") for row in rows] == [False, False, True, False, False, True]
    same = [float(row[4]) for row in rows[3:5]]
    assert same == [2.0, 3.0]  # the target drafting for itself is accepted whole
    lengths = [row for row in rows if not row[3].startswith("rule")]
    assert all(0 < float(row[5]) <= float(row[6]) for row in lengths)
    # transformers' assisted generation is the peer of the one; of the other none was asked for.
    assert [float(row[9]) > 0 if row[0].endswith("pytorch") else row[9] == "\u2013" for row in lengths] == [True] * 4
    kept = read_json(tmp_path / "engine.json")
    del kept["cases"]["gguf-own-same"]["rule"]
    write_json(tmp_path / "engine.json", kept)
    monkeypatch.setattr(engine, "PARTS", engine.PARTS | {"rows": None, "peers": None})  # finished parts are kept
    run(engine, monkeypatch, *asked)
    again = capsys.readouterr().out.splitlines()
    assert again[:-1] == printed.splitlines()[:-1] and "1 texts of 9" in again[-1]
