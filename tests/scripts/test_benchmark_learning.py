"""What scripts/benchmarks/learning.py trains and compares: the product's own training, once, at equal blocks."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_scripts
import tiny
import torch
from safetensors.torch import load_file
from test_scripts import run
from tiny import Capture, Patch
from trainings import trained

from distill.recipe import dump_recipe, load_recipe


@pytest.fixture
def script(monkeypatch: Patch) -> Any:
    return test_scripts.script("benchmarks/learning", monkeypatch)


SMALL = ("--steps", 3, "--batch", 2, "--new-tokens", 8)


def test_overrides_take_multiples_of_the_rate(script: Any) -> None:
    assert script.overrides_of("", 0.1) == []
    text = "train.optimizer=muon train.acceptance={every: 5, prompts: 9} train.temperature=@25"
    assert script.overrides_of(text, 0.002) == [
        "train.optimizer=muon",
        "train.acceptance={every: 5, prompts: 9}",
        "train.temperature=0.05",
    ]


def test_every_configuration_starts_from_adamw(script: Any, tmp_path: Path) -> None:
    """The demo's own recipe trains with Muon: that must not reach the others."""
    recipe = load_recipe(tiny.ROOT / "recipes" / "demo.yaml")
    assert recipe.train.optimizer == "muon"
    (tmp_path / "config.yaml").write_text(dump_recipe(recipe))
    options = SimpleNamespace(run=tmp_path, steps=30, batch=2, of_recipe=False)
    for name, text in script.CONFIGURATIONS.items():
        train = script.recipe_of(options, text, 1e-3, 0).train
        assert train.optimizer == ("muon" if "muon" in name else "adamw")


@pytest.mark.slow
def test_each_training_is_that_of_the_stage_and_is_made_once(
    script: Any, world: Path, ready: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    """One in a process of its own, as all are; the others here."""
    apart, drafts = script.train_apart, {}

    def here(source: Path, folder: Path, recipe: Any) -> None:
        (script.train if drafts else apart)(source, folder, recipe)
        drafts[folder.name] = load_file(folder / "draft" / "model.safetensors")

    monkeypatch.setattr(script, "train_apart", here)
    to = tmp_path / "to"
    asked = ("--only", "adamw", "high muon", "--add", "high muon: train.optimizer=muon train.rate=@2")
    grid = ("--rates", 0.001, 0.02, "--seeds", 0, 1)
    run(script, monkeypatch, ready, "--to", to, *SMALL, *asked, *grid)
    output = capsys.readouterr().out
    assert len(drafts) == 6 and not list((to / "work").iterdir())  # two rates, then the best with the other seed
    overrides = ("train.steps=3", "train.batch=2", "train.rate=0.02", "train.acceptance=null", "train.optimizer=muon")
    made = trained(world, ready, tmp_path / "own", *overrides, "train.rate=0.04")
    own = load_file(made / "draft" / "model.safetensors")
    assert all(torch.equal(value, own[name]) for name, value in drafts["high_muon-0.02-0"].items())
    found = {path.stem: json.loads(path.read_text()) for path in to.glob("*.json")}
    assert {(one["method"], one["rate"]) for one in found.values() if one["seed"] == 0} == {
        (name, rate) for name in ("adamw", "high muon") for rate in (0.001, 0.02)
    }
    for name in ("adamw", "high muon"):
        own = [one for one in found.values() if one["method"] == name]
        assert [one["seed"] for one in script.at_best_rate(own)] == [0, 1], "the other seed takes the best rate alone"
    assert len({one["tokens"] for one in found.values() if one["seed"] == 0}) == 1  # at equal tokens
    assert all(one["seconds_per_step"] > 0 for one in found.values())
    rows = [line.split(" | ")[0] for line in output.splitlines() if line.startswith("| ")]
    assert rows.count("| adamw") == rows.count("| high muon") == 1
    assert "The difference is to adamw, with its 95 % interval, paired by prompt" in output

    monkeypatch.setattr(script, "train_apart", None)  # nothing is trained again
    run(script, monkeypatch, ready, "--to", to, *SMALL, *asked, *grid)
    assert capsys.readouterr().out == output
    run(script, monkeypatch, ready, "--to", to, "--table", "--base", "high muon")
    assert "The difference is to high muon" in capsys.readouterr().out
    other = ("--only", "high muon", "--add", "high muon: train.optimizer=muon")
    with pytest.raises(SystemExit, match=r"holds high muon with .*rate"):
        run(script, monkeypatch, ready, "--to", to, *SMALL, *other, *grid)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--only", "lion"), "there is no configuration lion; known: adamw"),
        (("--add", "x=y"), "write `NAME: a.b=c d.e=f`"),
        (("--only", "x", "--add", "x: train.optimiser=muon"), "did you mean `optimizer`"),
        (("--table",), "has no training of adamw"),
    ],
)
def test_what_cannot_be_compared_is_named(
    script: Any, ready: Path, tmp_path: Path, monkeypatch: Patch, arguments: tuple[str, ...], words: str
) -> None:
    (tmp_path / "to").mkdir()
    with pytest.raises(SystemExit, match=words):
        run(script, monkeypatch, ready, "--to", tmp_path / "to", *arguments)
