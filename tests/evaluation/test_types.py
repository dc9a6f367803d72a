"""distill/evaluation/types.py and `distill eval --outtype`: a pair in several GGUF types."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny

from distill.speculative.costs.curve import predicted_speedups

Capture = pytest.CaptureFixture[str]


def compared(capsys: Capture, *arguments: object) -> dict[str, object]:
    assert tiny.call("eval", *arguments, "-o", "json") == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_a_pair_in_several_types(finished: Path, world: Path, capsys: Capture) -> None:
    """The target as its own draft differs by its type and cache alone: not at all in f32, more in q4_0 than in q8_0.
    Predictions follow from the steps in the table."""
    text = world / "corpus"
    kinds = [word for kind in ("f32", "q8_0", "q4_0") for word in ("--outtype", kind)]
    pair = ["--target", world / "target", "--draft", world / "target", "--text", text, "--prompts", 6]
    table = compared(capsys, *pair, *kinds, "--target-outtype", "f32", "--cache-type", "f32", "--cache-type", "f16")
    rows = {(row["draft"], row["cache"]): row for row in table["rows"]}  # type: ignore[attr-defined]
    assert len(rows) == 6 and table["tokens"] > 0  # type: ignore[operator]
    kl = {key: row["forward_kl"]["mean"] for key, row in rows.items()}
    assert kl["f32", "f16"] == 0  # the target's cache is of f16, too
    assert 0 < kl["f32", "f32"] < 1e-5 < kl["q8_0", "f16"] < kl["q4_0", "f16"]
    accepted = {key: row["acceptance"]["mean"] for key, row in rows.items()}
    assert (
        accepted["f32", "f16"] == pytest.approx(1, abs=1e-6) and accepted["q4_0", "f16"] < accepted["q8_0", "f16"] < 1
    )
    (target,) = table["targets"]  # type: ignore[misc]
    for row in rows.values():
        speeds = predicted_speedups(target["seconds"], row["draft_seconds"], [row["acceptance"]["mean"]] * 8)
        assert row["speedup"] == pytest.approx(max(speeds)) and row["length"] == speeds.index(max(speeds))
        assert row["tokens_per_second"] == pytest.approx(max(speeds) / target["seconds"][0])
    assert rows["q4_0", "f16"]["draft_bytes"] < rows["q8_0", "f16"]["draft_bytes"] < rows["f32", "f16"]["draft_bytes"]


def test_types_agree_with_the_evaluation_of_the_files(
    finished: Path, world: Path, capsys: Capture, tmp_path: Path
) -> None:
    """The same files, evaluated as a pair of GGUF files on the same prompts."""
    for name, folder in (("target", world / "target"), ("draft", finished / "draft")):
        assert tiny.call("export-gguf", folder, "--outtype", "f16", "--to", tmp_path / name) == 0
    files = [next((tmp_path / name).glob("*.gguf")) for name in ("target", "draft")]
    capsys.readouterr()
    pair = ["--target", files[0], "--draft", files[1], "--text", world / "corpus", "--prompts", 6]
    report, table = compared(capsys, *pair, "--kl"), compared(capsys, *pair, "--cache-type", "f16")
    (row,) = table["rows"]  # type: ignore[misc]
    own = report["domains"]["answers"]["draft"]  # type: ignore[index]
    for name, measure in (("forward_kl", "forward_kl"), ("acceptance", "acceptance_sampling")):
        assert row[name]["mean"] == pytest.approx(own[measure]["mean"], rel=1e-3)
    assert table["tokens"] == own["tokens"]
    assert tiny.call("eval", *pair, "--outtype", "q8_0") == 2
    assert "has its types already" in capsys.readouterr().err


def test_a_run_in_several_types(finished: Path, capsys: Capture) -> None:
    assert tiny.call("eval", finished, "--outtype", "f16", "--outtype", "q8_0") == 0
    printed = capsys.readouterr().out
    assert printed.count("| f16 | q8_0 | f16 |") + printed.count("**f16** | **q8_0** | **f16**") == 1
    assert "predicted from measured steps" in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--outtype", "q9"], "--outtype q9 is unknown"),
        (["--outtype", "f16", "--cache-type", "q2_k"], "--cache-type q2_k is unknown"),
        (["--outtype", "f16", "--target", "x"], "needs --target, --draft and --text"),
    ],
)
def test_types_that_do_not_exist(arguments: list[str], words: str, capsys: Capture) -> None:
    assert tiny.call("eval", *arguments) == 2
    assert words in capsys.readouterr().err
