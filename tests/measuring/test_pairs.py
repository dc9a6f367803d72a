"""`distill eval` with several drafts, targets or GGUF types: each pair as it is alone, and beside the first."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny

Capture = pytest.CaptureFixture[str]
pytestmark = pytest.mark.usefixtures("short_texts")


def measured(capsys: Capture, *arguments: object) -> Any:
    capsys.readouterr()
    return json.loads(tiny.shown(capsys, "eval", *arguments, "-o", "json"))


def acceptance(report: Any) -> dict[str, float]:
    return {name: one["acceptance_sampling"]["mean"] for name, one in report["domains"]["answers"].items()}


def test_drafts_are_paired_by_prompt(finished: Path, world: Path, capsys: Capture, tmp_path: Path) -> None:
    """Each is measured as alone, slices included; the difference is that of the means, and nothing in any resample for
    the same draft in another place."""
    before, after = finished / "cut", finished / "draft"
    again = shutil.copytree(before, tmp_path / "cut")
    text = ["--prompts", world / "corpus", "--count", 4]
    common = [world / "target"]
    report = measured(capsys, *common, before, after, again, *text)
    names = [str(before), str(after), str(again)]  # two have one short name
    assert [*report["differences"]] == names[1:] and not report["positions"] and set(report["domains"]) == {"answers"}
    for name, draft in zip(names, (before, after), strict=False):
        alone = measured(capsys, *common, draft, "--kl", *text)
        assert report["domains"]["answers"][name] == alone["domains"]["answers"]["draft"]
        for one, own in zip(report["groups"], alone["groups"], strict=True):
            assert one["acceptance"][name] == own["acceptance"]["draft"]
    (gap, same), means = report["differences"].values(), acceptance(report)
    assert gap["mean"] == pytest.approx(means[names[1]] - means[names[0]])
    assert gap["low"] <= gap["mean"] <= gap["high"]
    assert same == {"mean": 0, "low": 0, "high": 0}


def test_a_target_as_its_own_draft(finished: Path, world: Path, capsys: Capture) -> None:
    """It accepts all of it, the other draft less; with --acceptance rounds are decoded."""
    pair = [world / "target", finished / "cut", world / "target", "--prompts", world / "corpus", "--count", 4]
    report = measured(capsys, *pair, "--kl", "--acceptance")
    assert acceptance(report)["target"] == pytest.approx(1, abs=1e-5)
    assert report["differences"]["target"]["low"] > 0
    assert [*report["positions"]] == ["cut", "target"]
    assert report["tokens_per_round"]["target"]["mean"] > report["tokens_per_round"]["cut"]["mean"]
    assert "difference to the first, by prompt" in tiny.shown(capsys, "eval", *pair)


def test_a_pair_in_several_types(world: Path, tmp_path: Path, capsys: Capture) -> None:
    """The target as its own draft differs by its type alone: not at all in f32, more in q4_0 than in q8_0."""
    assert tiny.call("export-gguf", world / "target", "--outtype", "f32", "--to", tmp_path) == 0
    (target,) = tmp_path.glob("*.gguf")
    pair = [target, world / "target", "--prompts", world / "corpus", "--count", 4]
    report = measured(capsys, *pair, "--types", "f32,q8_0,q4_0")
    assert len(report["differences"]) == 2
    kl = {name: one["forward_kl"]["mean"] for name, one in report["domains"]["answers"].items()}
    accepted = acceptance(report)
    assert kl["f32"] == 0 < kl["q8_0"] < kl["q4_0"]
    assert accepted["f32"] == pytest.approx(1, abs=1e-6)
    assert accepted["q4_0"] < accepted["q8_0"] < 1


def test_types_agree_with_the_evaluation_of_the_files(
    finished: Path, world: Path, capsys: Capture, tmp_path: Path
) -> None:
    """The same files, evaluated as a pair of GGUF files on the same prompts; of a run, on its own prompts."""
    for name, folder in (("target", world / "target"), ("draft", finished / "draft")):
        assert tiny.call("export-gguf", folder, "--outtype", "f16", "--to", tmp_path / name) == 0
    files = [next((tmp_path / name).glob("*.gguf")) for name in ("target", "draft")]
    text = ["--prompts", world / "corpus", "--count", 4]
    pair = [files[0], files[1], *text]
    folders = [world / "target", finished / "draft", *text]
    own = measured(capsys, *pair, "--kl")["domains"]["answers"]["draft"]
    for form in (pair, folders):
        found = measured(capsys, *form, "--types", "f16")["domains"]["answers"]["f16"]
        assert found["tokens"] == own["tokens"]
        for name in ("forward_kl", "acceptance_sampling"):
            assert found[name]["mean"] == pytest.approx(own[name]["mean"], rel=1e-3)
    again = measured(capsys, *pair, "--types", "f16,q8_0")["domains"]["answers"]
    assert [*again] == ["f16", "q8_0 (from f16)"] and again["f16"]["forward_kl"] == own["forward_kl"]
    printed = tiny.shown(capsys, "eval", finished, "--types", "f16,q8_0")
    assert "difference to the first, by prompt" in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a", "b"], "models need TARGET, DRAFT and --prompts FILE"),
        (["--types", "q9"], "--types q9 is unknown"),
    ],
)
def test_mistakes(arguments: list[str], words: str, capsys: Capture) -> None:
    assert words in tiny.refused(capsys, "eval", *arguments)
