"""Scripts that no other test runs: each can be imported, and those of blocks and sources run at toy size."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny

SCRIPTS = tiny.ROOT / "scripts"
NAMES = sorted(path.relative_to(SCRIPTS).with_suffix("").as_posix() for path in SCRIPTS.rglob("*.py"))


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A script by its path below scripts/, imported as it imports its neighbours: by name."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    monkeypatch.syspath_prepend(str((SCRIPTS / name).parent))
    return importlib.import_module(Path(name).name)


def run(module: Any, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    """A script's main with these arguments, on one thread."""
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
    with tiny.one_thread():
        module.main()


@pytest.mark.parametrize("name", NAMES)
def test_it_finds_what_it_uses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (script(name, monkeypatch).__doc__ or "").strip()


def test_blocks_at_toy_size(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = script("benchmarks/blocks", monkeypatch)
    attention = importlib.import_module("distill.models.packed_forward")
    monkeypatch.setattr(attention, "masked_below", attention.masked_below)  # measure() changes it for --mask
    small = "--vocabulary 300 --layers 1 --k 8 --threads 1"
    with tiny.one_thread():
        for mask in ([], ["--mask"]):
            monkeypatch.setattr(sys, "argv", ["blocks", *small.split(), *mask])
            found = measured.measure(measured.parse(), 512)
            assert 20e3 < found["bytes_per_token"] < 2e6 and found["seconds"] > 0


@pytest.mark.slow
def test_a_draft_learns_as_much_from_a_servers_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The demo target's answers, written here, by a GGUF file and by a real server: acceptance rises alike."""
    measured = script("benchmarks/sources", monkeypatch)
    small = (
        "threads=1 corpus.block=256 corpus.tokens=0 answers.prompts=96 answers.prompt_tokens=32 answers.new_tokens=96"
    )
    small += " eval.prompts=32 train.acceptance=null train.steps=40 train.batch=4"
    recipe = tiny.ROOT / "recipes" / "demo.yaml"
    assert tiny.call("train", recipe, "--runs", tmp_path, "--until", "cut", *small.split()) == 0
    with tiny.one_thread():
        found = measured.compare(
            measured.parsed([str(tmp_path / "demo"), "--to", str(tmp_path / "to"), "--seeds", "0"])
        )
    with capsys.disabled():
        print("\n" + measured.table(found))
    before = found["cut"]["alpha"].mean
    assert found["transformers"]["alpha"].mean > before + 0.05
    for source in ("GGUF file", "server"):
        assert found[source]["alpha"].mean > before + 0.05
        assert found[source]["gain"].low < 0.01 and found[source]["gain"].high > -0.01, found[source]
