"""distill/evaluation/comparison.py and `distill eval` with several drafts or targets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import tiny
import torch

from distill.evaluation.comparison import STRETCH, worst_stretches
from distill.evaluation.metrics import METRICS
from distill.evaluation.slices import SlicedValues

Capture = pytest.CaptureFixture[str]


def compared(capsys: Capture, *arguments: object) -> Any:
    assert tiny.call("eval", *arguments, "-o", "json") == 0
    return json.loads(capsys.readouterr().out)


def test_drafts_are_paired_by_prompt(finished: Path, world: Path, capsys: Capture) -> None:
    """Each row is what `distill eval` says of the pair alone, the difference that of the means; a draft beside itself
    differs by nothing in any resample."""
    before, after = finished / "cut", finished / "draft"
    common = ["--target", world / "target", "--text", world / "corpus", "--prompts", 8]
    found = compared(capsys, *common, "--draft", before, "--draft", after, "--draft", before)
    rows = found["rows"]
    assert [row["draft"] for row in rows] == ["cut", "draft", "cut"] and rows[0]["difference"] is None
    for row, draft in zip(rows, (before, after), strict=False):
        alone = compared(capsys, *common, "--draft", draft, "--kl")["domains"]["answers"]["draft"]
        assert row["tokens"] == alone["tokens"]
        for name, measure in (("acceptance", "acceptance_sampling"), ("forward_kl", "forward_kl")):
            assert row[name] == pytest.approx(alone[measure])
    gap = rows[1]["difference"]
    assert gap["mean"] == pytest.approx(rows[1]["acceptance"]["mean"] - rows[0]["acceptance"]["mean"])
    assert gap["low"] <= gap["mean"] <= gap["high"]
    assert rows[2]["difference"] == {"mean": 0, "low": 0, "high": 0}
    assert all(0 <= one["acceptance"] <= row["acceptance"]["mean"] for row in rows for one in row["worst"][:1])


def test_a_draft_on_several_targets(finished: Path, world: Path, capsys: Capture) -> None:
    """The draft itself as a target accepts all of it, the other target less."""
    pair = ["--target", world / "target", "--target", finished / "draft", "--draft", finished / "draft"]
    rows = compared(capsys, *pair, "--text", world / "corpus", "--prompts", 6)["rows"]
    assert [row["target"] for row in rows] == ["target", "draft"]
    assert rows[1]["acceptance"]["mean"] == pytest.approx(1, abs=1e-5) and rows[1]["difference"]["low"] > 0
    assert tiny.call("eval", *pair, "--text", world / "corpus", "--prompts", 6) == 0
    printed = capsys.readouterr().out
    assert "difference to the first, by prompt" in printed and "draft for target: " in printed


def test_the_worst_stretch_is_found() -> None:
    """Against every stretch of every text, in two parts each."""
    draws = numpy.random.default_rng(3)
    texts = [draws.integers(0, 26, size).tolist() for size in (40, 9, 70, 31)]
    values = {number: torch.from_numpy(draws.random((len(text), len(METRICS)))) for number, text in enumerate(texts)}
    sliced = SlicedValues({}, {"draft": {number: [own[:5], own[5:]] for number, own in values.items()}})
    found = worst_stretches(sliced, 4, texts, lambda token: bytes([97 + token]))
    least = []
    for number, text in enumerate(texts):
        own = values[number][:, 4].tolist()
        size = min(STRETCH, len(text))
        means = {at: sum(own[at : at + size]) / size for at in range(len(text) - size + 1)}
        at = min(means, key=lambda at: means[at])
        least.append((means[at], "".join(chr(97 + token) for token in text[at : at + size])))
    assert [(pytest.approx(one.acceptance), one.text) for one in found] == sorted(least)[:3]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--draft", "a", "--draft", "b"], "needs --target, --draft and --text"),
        (["--target", "a", "--target", "b", "--draft", "c", "--draft", "d", "--text", "t"], "2 targets and 2 drafts"),
        (["--target", "a", "--draft", "c", "--draft", "d", "--text", "t", "--by", "token"], "one target and draft"),
    ],
)
def test_what_cannot_be_compared(arguments: list[str], words: str, capsys: Capture) -> None:
    assert tiny.call("eval", *arguments) == 2
    assert words in capsys.readouterr().err
