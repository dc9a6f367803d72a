"""The commands that decode and time on a finished run: `generate`, `profile`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny


def test_the_commands(copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = ("--runs", copied.parent)
    texts = []
    for options in (
        (),
        *(("--drafter", name) for name in ("tree", "lookup", "lookup+draft", "lookup+tree")),
        ("--length", 0),
    ):
        assert tiny.call("generate", "def alpha(", "--run", "tiny", *runs, "--tokens", 12, *options) == 0
        texts.append(capsys.readouterr().out)
    assert len(set(texts)) == 1  # greedy, whoever drafts
    sampled = ("--temperature", 0.9, "--top-k", 50)
    for options in ((), ("--verifier", "block"), ("--verifier", "match"), ("--drafter", "tree"), ("--length", 0)):
        assert tiny.call("generate", "def alpha(", "--run", "tiny", *runs, "--tokens", 8, *sampled, *options) == 0
        assert capsys.readouterr().out.startswith("def alpha(")
    for options, words in (
        (("--verifier", "greedy", *sampled), "would change the target's distribution"),
        (("--verifier", "nonsense"), "there is no verifier 'nonsense'"),
        (("--drafter", "nonsense"), "there is no drafter"),
        (("--drafter", "tree", "--repetition-penalty", 1.2), "repetition penalty"),
    ):
        assert tiny.call("generate", "def alpha(", "--run", "tiny", *runs, *options) == 2
        assert words in capsys.readouterr().err
    text = texts[0]
    stop = text[len("def alpha(") :].strip("\n")[3:6]
    assert tiny.call("generate", "def alpha(", "--run", "tiny", *runs, "--tokens", 12, "--stop", stop) == 0
    said = capsys.readouterr().out
    assert stop not in said[len("def alpha(") :] and text.startswith(said.rstrip("\n"))


def test_profile(copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--depths", "8,16", "--max-tokens", 3, "--repeats", 5, "--threads", 1)
    assert tiny.call("profile", copied / "draft", *options, "--out", tmp_path / "c.json") == 0
    said = capsys.readouterr().out
    assert said.count("\n| 8 |") == 3 == said.count("\n| 16 |")
    saved = json.loads((tmp_path / "c.json").read_text())
    assert saved["depths"] == [8, 16] and len(saved["seconds"][0]) == 3
    assert tiny.call("profile", copied / "draft", *options, "--static", "--dtype", "bfloat16") == 0
    assert "draft, static cache, bfloat16, pytorch" in capsys.readouterr().out
    for arguments, words in (
        ((copied / "draft", "--compile"), "set static, too"),
        ((copied / "draft", "--dtype", "int8"), "there is no dtype 'int8'"),
        ((copied / "nothing.gguf", "--static"), "runs in llama.cpp, not in PyTorch"),
        ((copied / "draft", "--depths", "x"), "expected numbers separated by commas"),
        ((copied / "draft", "--depths", "9999"), "no room"),
        ((copied / "nothing.gguf",), "there is no file"),
    ):
        assert tiny.call("profile", *arguments) == 2
        assert words in capsys.readouterr().err


def test_a_draft_of_another_vocabulary_as_it_is(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not (world / "donor").exists():
        tiny.build_model(world / "donor", layers=2, vocabulary=350, seeds=range(40, 60))
    pair = ("--target", world / "target", "--draft", world / "donor", "--tokens", 10)
    texts = []
    for options in (("--drafter", "intersection"), ("--drafter", "string"), ("--drafter", "lookup")):
        assert tiny.call("generate", "def alpha(", *pair, *options) == (2 if "lookup" in options else 0)
        seen = capsys.readouterr()
        texts.append(seen.out)
    assert texts[0] == texts[1] and texts[0].startswith("def alpha(")
    assert "does not fit the target" in seen.err  # a drafter that reads the draft's ids as the target's own
    for drafter in ("intersection", "string"):
        assert tiny.call("generate", "def alpha(", *pair, "--drafter", drafter, "--temperature", 0.8) == 0
        assert capsys.readouterr().out.startswith("def alpha(")
