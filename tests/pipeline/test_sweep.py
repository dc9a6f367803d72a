"""Sweeps: a run for each value of a key. What the values do not reach is done once, and each run stays whole alone."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from tiny import Capture, Patch

from distill.errors import DataError
from distill.pipeline import running
from distill.pipeline.sweep import combinations
from distill.recipe import load_recipe
from distill.run import Run
from distill.surgery import cutter

pytestmark = pytest.mark.usefixtures("one_thread")
OPTIONS = ("train.steps=0", "--sweep", "cut.layers=1,2", "--until", "train")


def sweep(world: Path, runs: Path, *more: object) -> int:
    return tiny.call("train", world / "recipe.yaml", "--runs", runs, *more)


def work(run: Path) -> dict[str, str]:
    """Digests of all files that the run's stages made."""
    names = ("corpus", "answers", "teacher", "cut", "draft")
    return {f"{name}/{file}": value for name in names for file, value in tiny.contents(run / name).items()}


def failing(function: Callable[..., Any], error: BaseException, calls: int) -> Callable[..., Any]:
    """The function, which raises an error from its n-th call on."""
    left = iter(range(calls))

    def called(*arguments: Any, **rest: Any) -> Any:
        if next(left, None) is None:
            raise error
        return function(*arguments, **rest)

    return called


def test_a_sweep_is_killed_resumed_and_each_run_stays_whole(
    world: Path, ready: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    """Beside the run of the recipe itself, which has all that is shared, and the cut to two layers."""
    shutil.copytree(ready, tmp_path / "tiny")
    one, other = tmp_path / "tiny-cut.layers=2", tmp_path / "tiny-cut.layers=1"
    with monkeypatch.context() as patch:  # killed in the middle of a stage that is taken over
        patch.setattr(running, "link_file", failing(running.link_file, KeyboardInterrupt(), 4))
        assert sweep(world, tmp_path, *OPTIONS) == 130
    monkeypatch.setattr("os.link", failing(str, PermissionError(errno.EPERM, "no hard links"), 0))
    assert sweep(world, tmp_path, *OPTIONS) == 0
    said = capsys.readouterr().err
    assert (
        said.count("teacher: runs") == 0 and said.count("cut: runs") == said.count("cut: taken over (from tiny)") == 1
    )
    assert {name: found for name, found in work(one).items() if name[:5] != "draft"} == work(ready)
    for folder, same in ((one, ready), (other, other)):  # nothing was trained
        weights = [(place / "model.safetensors").read_bytes() for place in (folder / "draft", same / "cut")]
        assert weights[0] == weights[1]
    shutil.rmtree(other)
    shutil.rmtree(tmp_path / "tiny")
    before = work(one)
    assert tiny.call("train", one / "config.yaml", "--runs", tmp_path, "--until", "eval") == 0
    assert capsys.readouterr().err.count(": up to date") == 5 and work(one) == before
    assert "before" not in json.loads((one / "eval.json").read_text())["domains"]["answers"]


def test_a_training_is_taken_over_with_its_log_and_damage_is_not(world: Path, copied: Path, capsys: Capture) -> None:
    shutil.copytree(copied, copied.with_name("tiny-old"))
    for name in ("tiny", "tiny-old"):
        weights = copied.with_name(name) / "cut" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    assert sweep(world, copied.parent, "--sweep", "export.outtypes=[f16]", *OPTIONS[-2:]) == 0
    said, (made,) = capsys.readouterr().err, copied.parent.glob("tiny-export*")
    assert said.count("cut: runs") == said.count("train: taken over") == 1
    steps = [Run(run, load_recipe(copied / "config.yaml")).metrics() for run in (copied, made)]
    assert steps[0] == steps[1] and len(steps[0]) > 8
    assert (made / "draft" / "model.safetensors").stat().st_nlink == 2
    shutil.rmtree(copied)  # so a run of the recipe itself takes over from the sweep
    assert tiny.call("train", world / "recipe.yaml", "--runs", copied.parent, *OPTIONS[-2:]) == 0
    assert capsys.readouterr().err.count("taken over (from tiny-export") == 5


def test_a_run_that_fails_is_named_and_the_others_go_on(
    world: Path, ready: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    """The same command makes it, once its cause is mended, and nothing else."""
    shutil.copytree(ready, tmp_path / "tiny")
    cut = cutter.cut

    def faulty(recipe: Any, run: Run) -> Any:
        if recipe.cut.layers == 1:
            raise DataError("this donor is damaged", "mend it")
        return cut(recipe, run)

    with monkeypatch.context() as patch:
        patch.setattr(cutter, "cut", faulty)
        code, (shown, said) = sweep(world, tmp_path, *OPTIONS), capsys.readouterr()
    assert code == 2 and "Traceback" not in said
    assert said.count("1 of 2 runs failed: tiny-cut.layers=1: this donor is damaged\n  mend it") == 1
    assert re.search(r"tiny-cut.layers=1 failed.*\n(.*\n)*run tiny-cut.layers=2\n", said)
    assert shown.count("not measured yet") == 2
    assert [(tmp_path / f"tiny-cut.layers={n}" / "draft").is_dir() for n in (1, 2)] == [False, True]
    before = work(tmp_path / "tiny-cut.layers=2")
    assert sweep(world, tmp_path, *OPTIONS) == 0
    assert capsys.readouterr().err.count("cut: resumes") == 1 and work(tmp_path / "tiny-cut.layers=2") == before


def test_a_full_disk_leaves_what_is_whole(
    world: Path, ready: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    shutil.copytree(ready, tmp_path / "tiny")
    first = tmp_path / "tiny-train.steps=0"
    options = ("--sweep", "train.steps=0,1", "--until", "cut")
    full = OSError(errno.ENOSPC, "No space left on device")
    count = len(json.loads((tmp_path / "tiny" / "stages" / "corpus.json").read_text())["artifacts"])
    with monkeypatch.context() as patch:
        patch.setattr("os.link", failing(os.link, full, count + 1))
        patch.setattr("distill.files.copy_file", failing(shutil.copyfile, full, 0))
        said = tiny.refused(capsys, "train", world / "recipe.yaml", "--runs", tmp_path, *options)
    assert "the disk is full: cannot write" in said and "run the same command again" in said
    assert [one.name for one in (first / "stages").iterdir()] == ["corpus.json"]
    assert sweep(world, tmp_path, *options) == 0
    assert work(first) == work(tmp_path / "tiny-train.steps=1") == work(ready)


REFUSED = {
    "cut.layer=1,2": "cut.layer.*did you mean",
    "target.model=./target,./corpus": "changes target: ",
    "eval.prompts=6,8": "changes eval: ",
    "answers={prompt_tokens: 8, new_tokens: 9},{prompt_tokens: 9, new_tokens: 9}": "changes answers.prompt_tokens",
    "cut.layers": "expected KEY=V1,V2",
    "cut.layers=": "expected KEY=V1,V2",
    "name=a,b": "each key can be given once",
    "cut.layers=1,9": "donor has 3",
    "cut.layers=1,[": "is not YAML",
    "train.rate=" + ",".join(f"{n}e-4" for n in range(1, 14)): "asks for more than 12 runs",
}


@pytest.mark.parametrize("option", REFUSED)
def test_refusals_come_before_anything_runs(world: Path, tmp_path: Path, capsys: Capture, option: str) -> None:
    said = tiny.refused(capsys, "train", world / "recipe.yaml", "--runs", tmp_path / "runs", "--sweep", option)
    assert re.search(REFUSED[option], said), said
    assert not (tmp_path / "runs").exists()


def test_names_of_runs() -> None:
    long = "corpus/of a very long name.jsonl"
    made = list(combinations([f"cut.donor=null,'{long}',../a", "train.rate=1e-4,{a: 1}"], None))
    assert made[0] == "-cut.donor=null-train.rate=0.0001" and len({*made}) == 6
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789_.=-") for name in made), made
    assert json.loads(combinations(["a.b='x y',2"], None)[made and "-a.b=2"][0].partition("=")[2]) == 2
