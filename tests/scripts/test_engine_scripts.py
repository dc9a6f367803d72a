"""The engine's scripts on a tiny run: identity of every configuration, rounds against their bound, and the soak."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from test_scripts import run, script

from distill.benchmark.watch import Step
from distill.files import read_json, write_json
from distill.speculative.decode import Decoded, Round, decode


def test_identity_of_every_configuration_and_its_resuming(
    copied: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check = script("benchmarks/identity", monkeypatch)
    asked = (copied, "--prompts", 2, "--tokens", 6)
    run(check, monkeypatch, *asked)
    first = capsys.readouterr().out
    cells = re.findall(r"^\| (.+) \| (\d+) \| (\d+) \| (\d+) \|$", first, flags=re.M)
    assert len(cells) == len(check.CONFIGURATIONS) + len(check.BATCHED) + 1 and cells[-1][0] == "all"
    assert int(cells[-1][3]) == 0 and int(cells[-1][1]) + int(cells[-1][2]) == 2 * (len(cells) - 1)
    # Everything is kept: nothing is decoded again, and a text that differs is called so.
    path = copied / "identity-pytorch.json"
    kept = read_json(path)
    kept["texts"]["draft, γ = 3"]["1"][2] ^= 1
    write_json(path, kept)
    monkeypatch.setattr(check, "decode_text", None)
    monkeypatch.setattr(check, "plain", None)
    monkeypatch.setattr(check, "TORCH_NOISE", -1.0)  # no tie excuses
    run(check, monkeypatch, *asked)
    again = re.findall(r"^\| (.+) \| (\d+) \| (\d+) \| (\d+) \|$", capsys.readouterr().out, flags=re.M)
    assert [row for row in again if row[0] == "draft, γ = 3"] == [("draft, γ = 3", "1", "0", "1")]


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


@pytest.mark.parametrize("backend", ["pytorch", pytest.param("static", marks=pytest.mark.slow), "gguf"])
def test_the_soak_goes_on_where_it_stopped_and_finds_faults(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    soak = script("fuzz/soak", monkeypatch)
    monkeypatch.setattr(soak, "NOTED", 5)
    monkeypatch.setattr(soak, "LOOKED_AT", 2)
    asked = ("--backend", backend, "--to", tmp_path / "soak.json", "--prompts")
    run(soak, monkeypatch, *asked, 10)
    kept = read_json(tmp_path / "soak.json")
    assert kept["next"] == 10 and len(kept["memory"]) == 1 and kept["counts"]["looked at"] > 0
    run(soak, monkeypatch, *asked, 15)
    assert f"{backend}: 15 prompts" in capsys.readouterr().out
    kept = read_json(tmp_path / "soak.json")
    assert kept["next"] == 15 and [len(one) for one in kept["memory"]] == [2, 1]

    # A decoder that loses the last token of a text, and a cache that holds another text than it says, are found.
    def shorter(*given: Any) -> Any:
        yield from decode(*given)
        given[5].tokens.pop()

    monkeypatch.setattr(soak, "decode", shorter)
    with pytest.raises(AssertionError, match="tokens instead of"):
        run(soak, monkeypatch, *asked, 20)

    def other(target: Any, *given: Any) -> Any:
        yield from decode(target, *given)
        held = target.lengths[0]
        target.rollback([0])
        target.extend([7] * held, want=[held - 1])

    monkeypatch.setattr(soak, "decode", other)
    with pytest.raises(AssertionError, match="the cache has drifted"):
        run(soak, monkeypatch, *asked, 20)
