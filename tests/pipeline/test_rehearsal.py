"""`distill train RECIPE --rehearse`: all stages on a few prompts, and what it says of the whole run."""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import re
import shutil
import time
from pathlib import Path
from unittest import mock

import pytest
import tiny
from tiny import Capture, Patch

from distill.errors import RunError
from distill.files import read_result
from distill.pipeline.preflight import (
    RESULT,
    MemoryWatch,
    Rehearsal,
    expected_lines,
    expected_stages,
    rehearse,
    shortened,
)
from distill.pipeline.running import forget_begun
from distill.pipeline.stages import begun_path, find_stage
from distill.planning.hours import Rehearsed, StageEstimate, rehearsed_hours, time_left
from distill.progress import Progress, duration, watched
from distill.recipe import load_recipe
from distill.run import Run
from distill.surgery.sparsity import RAMP, require_ramp
from distill.tables import size

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_rehearsal_has_room_for_a_ramp(world: Path) -> None:
    recipe = load_recipe(world / "recipe.yaml", ["train.sparsity={mlp_width: 32}", "train.steps=90"])
    short = shortened(recipe, world)
    assert short.train.steps == 50
    require_ramp(short.train.steps, RAMP)


def test_a_recipe_without_lengths_is_rehearsed(world: Path, tmp_path: Path) -> None:
    assert shortened(load_recipe(world / "recipe.yaml", ["speedup.lengths=[]"]), tmp_path).speedup.lengths == ()
    assert shortened(load_recipe(world / "recipe.yaml", ["speedup.lengths=[4, 2]"]), tmp_path).speedup.lengths == (4,)


def test_each_process_of_a_rehearsal_has_work(world: Path, monkeypatch: Patch) -> None:
    recipe = load_recipe(world / "recipe.yaml")
    one = shortened(recipe, world)
    assert (one.answers.group, one.teacher.shard_blocks) == (recipe.answers.group, recipe.teacher.shard_blocks)
    monkeypatch.setattr("distill.pipeline.preflight.process_count", lambda: 2)
    two = shortened(recipe, world)
    assert two.answers.group is not None and two.answers.group <= 2 and two.teacher.shard_blocks == 1


@pytest.fixture(scope="module")
def rehearsed(world: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A rehearsal of the world's recipe up to its answers, then whole, killed after its stage `cut` and started again;
    its folder and its table."""
    runs = tmp_path_factory.mktemp("runs")
    recipe = load_recipe(world / "recipe.yaml")
    short = shortened(recipe, runs)
    run = Run(runs / short.name, short)
    with tiny.one_thread():
        assert "cut" not in rehearse(recipe, short, run, "answers")
        run.close()
        assert [one.split(":")[0] for one in expected_lines(*expected_stages(recipe, runs / "tiny"))] == [
            "corpus",
            "answers",
        ]
        with mock.patch("distill.training.loop.train", side_effect=KeyboardInterrupt):
            with pytest.raises(KeyboardInterrupt):
                rehearse(recipe, short, run)
            run.close()
        assert [one.stage for one in read_result(run.path(RESULT), Rehearsal).stages] == list(tiny.STAGES[:4])
        table = rehearse(recipe, short, run)
        run.close()
    return run.folder, table


def test_every_stage_is_measured(rehearsed: tuple[Path, str], finished: Path) -> None:
    """What is expected on the disk is what the whole run wrote: the same stages, with 3 times the prompts."""
    folder, table = rehearsed
    found = read_result(folder / RESULT, Rehearsal)
    assert tuple(one.stage for one in found.stages) == tiny.STAGES == tuple(one.stage for one in found.expected)
    assert all(one.memory_bytes > 50e6 for one in found.stages), "what the process itself takes"
    assert all(one.low <= one.high + 1e-9 and math.isfinite(one.high) for one in found.expected)
    assert all(f"| {stage} |" in table for stage in (*tiny.STAGES, "**all**"))
    assert "disk: fits" in table and "memory: fits" in table and (folder / "rehearsal.md").read_text() == table
    expected = {one.stage: one.disk_bytes for one in found.expected}
    for stage, name in (("teacher", "teacher"), ("cut", "cut"), ("export", "gguf")):
        real = sum(path.stat().st_size for path in (finished / name).rglob("*") if path.is_file())
        assert 0.5 < expected[stage] / real < 2, (stage, expected[stage], real)


def test_expected_seconds_follow_the_counts(world: Path, rehearsed: tuple[Path, str]) -> None:
    """A training of 8 steps, 3 evaluations and 4 checkpoints from one of 3 steps, by hand."""
    recipe = load_recipe(world / "recipe.yaml")
    runs = rehearsed[0].parent
    short = shortened(recipe, runs)
    run = Run(rehearsed[0], short)
    steps, judged, saved = (
        [line["seconds"] for line in run.metrics() if line["stage"] == stage and "seconds" in line]
        for stage in ("train", "acceptance", "checkpoint")
    )
    assert (len(steps), len(judged), len(saved)) == (3, 2, 1)
    stages = [Rehearsed("train", 100.0, 0, 1, 0, 30), Rehearsed("answers", 10.0, 8.0, 1, 0, 5)]
    train, answers = rehearsed_hours(recipe, short, run, stages)
    rest = 100 - sum(steps) - sum(judged) - sum(saved)
    expected = rest + 8 * (steps[1] + steps[2]) / 2 + 3 * judged[1] + 4 * saved[0]
    assert train.low == train.high == pytest.approx(expected)
    assert train.disk_bytes == 45, "two checkpoints and the best weights, of which the rehearsal had two"
    grown = (12 + 2 + 6) / (4 + 4 + 4)  # prompts of train, validation and test
    assert answers.low == answers.high == pytest.approx(2 + grown * 8)
    assert answers.disk_bytes == round(grown * 5)


def test_what_a_killed_stage_wrote_is_removed(world: Path, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", load_recipe(world / "recipe.yaml"))
    teacher = run.path("teacher", "shard-00000.json")
    with contextlib.closing(run):
        run.open("")
        for path in (teacher, run.path("corpus", "train.jsonl"), begun_path(run, find_stage("teacher"))):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}")
        forget_begun(run)
    assert not teacher.parent.exists() and run.path("corpus", "train.jsonl").exists()


def test_again_it_only_shows(world: Path, rehearsed: tuple[Path, str], capsys: Capture) -> None:
    folder, table = rehearsed
    before = read_result(folder / RESULT, Rehearsal).stages
    assert tiny.call("train", world / "recipe.yaml", "--runs", folder.parent, "--rehearse") == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[:12] == table.splitlines()[:12] and "holds the rehearsal" in said.err
    assert read_result(folder / RESULT, Rehearsal).stages == before


def test_check_and_train_show_it_for_its_own_recipe(
    world: Path, rehearsed: tuple[Path, str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(rehearsed[0].parent.parent)
    monkeypatch.setattr("distill.cli.shared.DEFAULT_RUNS", rehearsed[0].parent)
    shown = tiny.shown(capsys, "check", world / "recipe.yaml")
    for one in read_result(rehearsed[0] / RESULT, Rehearsal).expected:
        (line,) = [line for line in shown.splitlines() if line.startswith(f"{one.stage}: ") and "rehearsal" in line]
        assert duration(one.low) in line and size(one.memory_bytes) in line and size(one.disk_bytes) in line
    recipe = load_recipe(world / "recipe.yaml")
    assert len(expected_lines(*expected_stages(recipe, rehearsed[0].with_name("tiny")))) == len(tiny.STAGES)
    other = load_recipe(world / "recipe.yaml", ["cut.layers=1"])
    assert expected_stages(other, rehearsed[0].with_name("tiny")) == ([], "")
    assert "recipe.yaml --rehearse`" in tiny.shown(capsys, "check", world / "recipe.yaml", "cut.layers=1")
    # A run says what is left of the whole at each stage, without a rehearsal by counts and sizes.
    corpus = ("train", world / "recipe.yaml", "--runs", rehearsed[0].parent, "--until", "corpus")
    told = tiny.told(capsys, *corpus)
    assert re.search(r"corpus: runs\n  the whole run: \d+s( to \d+s)? left\n", told)
    told = tiny.told(capsys, *corpus, "cut.layers=1", "name=other")
    assert re.search(r"corpus: runs\n  the whole run: \d+s left\n", told)
    for name in ("tiny", "other"):
        shutil.rmtree(rehearsed[0].with_name(name))


def test_the_time_left_follows_the_stages_that_are_done() -> None:
    """By hand: stages took 120 s instead of 60, with a minute of doubt 1.5 times the estimates."""
    known = {"answers": (50, 70), "train": (600, 600), "eval": (20, 40)}
    expected = [StageEstimate(name, low, high, 0, 0, 0) for name, (low, high) in known.items()]
    begun: dict[str, float | None] = {"answers": 120, "train": None, "eval": None}
    assert time_left(expected, begun) == "15m30s to 16m00s left"
    assert time_left(expected, begun | {"train": 1.0, "eval": 1.0}) == ""
    unknown = "the time of export is not known without a rehearsal (--rehearse)"
    assert time_left(expected, begun | {"export": None}) == f"15m30s to 16m00s left; {unknown}"
    assert time_left([], {"cut": 3.0, "export": None}) == unknown


@pytest.mark.slow
def test_another_recipe_replaces_it_and_runs_are_left_alone(world: Path, copied: Path, capsys: Capture) -> None:
    recipe = load_recipe(world / "recipe.yaml")
    short = shortened(recipe, copied.parent)
    run = Run(copied, short)  # a run of that name, which no rehearsal made
    before = tiny.contents(copied)
    with pytest.raises(RunError, match="is a run, not a rehearsal"):
        rehearse(recipe, short, run)
    assert tiny.contents(copied) == before
    folder = copied.parent / "tiny-rehearsal"
    folder.mkdir()
    old = {"recipe": "tiny", "config": "of another", "stages": [], "expected": []}
    (folder / RESULT).write_text(json.dumps(old))
    (folder / "old.txt").write_text("of the earlier rehearsal")
    command = ("train", world / "recipe.yaml", "--runs", copied.parent, "--rehearse", "speedup.backends=[pytorch]")
    assert tiny.call(*command) == 0 and not (folder / "old.txt").exists()


def test_every_section_is_shortened(world: Path, tmp_path: Path) -> None:
    """Lengths of texts, blocks and the training's batch stay: memory depends on them."""
    traffic = tmp_path / "log.jsonl"
    traffic.write_text('{"prompt": "a", "answer": "b"}\n' * 100)
    values = tiny.recipe_values(world)
    values["answers"]["traffic"] = str(traffic)
    recipe = load_recipe(tiny.write_recipe(tmp_path / "recipe.yaml", values))
    short = shortened(recipe, tmp_path / "runs")
    assert short.train.steps == 3
    assert short.answers.prompts == 4 and short.speedup.prompts == 2 and short.speedup.lengths == (3,)
    kept = ("block", "prompt_tokens", "new_tokens", "batch", "micro_batch", "depth")
    for section in ("corpus", "answers", "train", "eval", "speedup"):
        for key in kept:
            assert getattr(getattr(short, section), key, None) == getattr(getattr(recipe, section), key, None)
    assert load_recipe(tiny.write_recipe(tmp_path / "again.yaml", short.model_dump(mode="json"))) == short


def test_loops_and_peaks_are_told_apart() -> None:
    with MemoryWatch() as memory, watched() as loops:
        before, _ = memory.take()
        # Pages of its own: malloc could hand out memory that earlier tests have freed and that is resident already.
        block = mmap.mmap(-1, 200_000_000)
        for offset in range(0, len(block), mmap.PAGESIZE):
            block[offset] = 1
        deadline = time.monotonic() + 30
        while memory._peak < before + 150e6 and time.monotonic() < deadline:
            time.sleep(0.01)  # a sample is taken while the block is there
        block.close()
        high, device = memory.take()
        progress = Progress("steps", 2)
        progress.step()
        low, _ = memory.take()
    Progress("outside", 1)
    assert high - low > 150e6 and device == 0
    assert [one.title for one in loops] == ["steps"] and loops[0].seconds >= 0
