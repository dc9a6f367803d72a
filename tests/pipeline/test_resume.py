"""Runs that are killed, repeated, changed and asked for again; scripts/fuzz/kill_runs.py kills many more."""

from __future__ import annotations

import json
import pydoc
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
from killed_runs import run_jobs
from tiny import Capture, Patch

from distill.data.samples import read_answers
from distill.errors import RunError
from distill.pipeline.running import plan_run, run_pipeline, with_others
from distill.recipe import load_recipe
from distill.run import Run
from distill.training import loop

SEED = 20
EVENTS = 104  # moments before and after renames up to the end of the tiny run's training, and a few less


def assert_same_work(run: Path, whole: Path, label: object, finished: bool) -> None:
    """Weights, answers, teacher and cut are those of an uninterrupted run, and nothing temporary is recorded."""
    for name in ("corpus", "answers", "teacher", "cut", "draft"):
        assert tiny.contents(run / name, "README.md") == tiny.contents(whole / name, "README.md"), (label, name)
    for stage in tiny.STAGES if finished else tiny.STAGES[:5]:
        record = json.loads((run / "stages" / f"{stage}.json").read_text())
        assert not [n for n in record["artifacts"] if ".tmp" in n or "/." in n], (label, stage)
    assert not [p.name for p in (run / "stages").iterdir() if "begun" in p.name or p.name == "redo.json"], label
    assert {p.name for p in (run / "checkpoints").glob("step-*")} == {"step-000006", "step-000008"}, label
    steps = [m["step"] for m in Run(run, load_recipe(run / "config.yaml")).metrics() if m["stage"] == "train"]
    assert sorted(steps) == list(range(1, 9)), label


def test_kills_leave_the_weights_bit_equal(world: Path, finished: Path, copied: Path) -> None:
    """At a rename up to the end of training, and at one of the last three stages, of which only those are made anew."""
    draw, runs = random.Random(SEED), copied.parent
    argv = ["train", str(world / "recipe.yaml"), "--runs", str(runs)]
    begun = [*argv, "name=killed", "--until", "train"]
    moments = draw.randrange(EVENTS), 7 + draw.randrange(8)  # a command begins with six events of its own
    jobs = [{"argv": begun, "event": moments[0]}, {"argv": begun}]
    jobs += [{"argv": [*argv, "--redo", "export"], "event": moments[1]}, {"argv": argv}]
    assert [job["code"] for job in run_jobs(runs, jobs)] == [-9, 0, -9, 0], moments
    assert_same_work(runs / "killed", finished, moments, finished=False)
    assert_same_work(copied, finished, moments, finished=True)


# ── finished runs ──


pytestmark = pytest.mark.usefixtures("one_thread")


def train(world: Path, run: Path, *more: str) -> int:
    return tiny.call("train", world / "recipe.yaml", "--runs", run.parent, *more)


def states(text: str) -> dict[str, str]:
    """The first line that a command printed about each stage."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(": ")
        if name in tiny.STAGES:
            found.setdefault(name, rest)
    return found


def test_what_is_up_to_date_is_left_alone(world: Path, copied: Path, capsys: Capture) -> None:
    """With fewer test prompts what is held out is asked and stored again: all that is learnt from stays untouched."""

    def times() -> dict[Path, int]:
        own = ("config.yaml", "recipe.yaml", "provenance.json", "log.txt", ".lock")
        return {p: p.stat().st_mtime_ns for p in copied.rglob("*") if p.is_file() and p.name not in own}

    before, whole = times(), tiny.contents(copied)
    assert train(world, copied) == 0
    assert states(capsys.readouterr().err) == dict.fromkeys(tiny.STAGES, "up to date")
    assert times() == before
    assert train(world, copied, "eval.prompts=5", "--until", "eval") == 0
    found = states(capsys.readouterr().err)
    assert {name for name, state in found.items() if state != "up to date"} == {"corpus", "answers", "teacher", "eval"}
    updated = "makes its held-out files again ("
    assert found["answers"].startswith(updated) and found["teacher"].startswith(updated)
    after = times()
    splits = [f"{name}/{split}" for name in ("answers", "teacher") for split in ("train", "validation")]
    kept = tuple(f"{copied / name}/" for name in (*splits, "teacher/head.safetensors", "cut", "draft", "checkpoints"))
    untouched = [path for path in before if f"{path}/".startswith(kept)]
    found_now = tiny.contents(copied)
    assert all(whole[name] == found_now[name] for name in (str(path.relative_to(copied)) for path in untouched))
    assert all(after[path] == before[path] for path in untouched if path.name != "manifest.json")
    answers = read_answers(Run(copied, load_recipe(copied / "config.yaml")), "test")
    assert len(answers) == 5 and json.loads((copied / "eval.json").read_text())["domains"]["answers"]["after"][
        "tokens"
    ] == sum(len(one.answer) for one in answers)


def test_other_validation_prompts_train_again_on_what_there_is(world: Path, copied: Path, capsys: Capture) -> None:
    """Weights are chosen by these prompts, so the training must be asked for; nothing that is learnt from changes."""
    before = tiny.contents(copied)
    change = ("train.acceptance.prompts=3",)
    said = tiny.refused(capsys, "train", world / "recipe.yaml", "--runs", copied.parent, *change)
    assert "train.acceptance.prompts: 2 -> 3" in said and "--redo train" in said
    assert tiny.contents(copied) == before
    assert train(world, copied, *change, "--redo", "train", "--until", "train") == 0
    found = states(capsys.readouterr().err)
    updated = "makes its held-out files again (train.acceptance.prompts: 2 -> 3; "
    assert found["answers"].startswith(updated) and found["teacher"].startswith(updated)
    after = tiny.contents(copied)
    changed = {name.rpartition("/")[0] for name in before if before[name] != after.get(name)}
    assert changed.isdisjoint({f"{name}/{split}" for name in ("answers", "teacher") for split in ("train", "test")})
    assert {"answers/validation", "teacher/validation"} <= changed and before["cut/model.safetensors"] == (
        after["cut/model.safetensors"]
    )
    assert len(read_answers(Run(copied, load_recipe(copied / "config.yaml")), "validation")) == 3


ADVICE = {  # by stage: what memory suffices for three times, and the setting that the message says to lower
    "answers": ("distill.teacher.answers.write_samples", "answers.batch", 1),
    "teacher": ("distill.teacher.store.save_shard", "teacher.batch", 2),
    "train": ("distill.training.learner.Learner.forward", "train.micro_batch", 2),
}


@pytest.mark.parametrize("stage", ADVICE)
def test_the_advice_when_memory_runs_out_can_be_followed(
    world: Path, copied: Path, capsys: Capture, monkeypatch: Patch, stage: str
) -> None:
    """The next command, with the setting lowered as the message says, is refused nothing and keeps finished files."""
    place, setting, lower = ADVICE[stage]
    function: Any = pydoc.locate(place)
    calls = iter(range(100))

    def until_memory_runs_out(*arguments: Any, **named: Any) -> Any:
        if next(calls) == 3:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")
        return function(*arguments, **named)

    whole = tiny.contents(copied)
    command = ("train", world / "recipe.yaml", "--runs", copied.parent, "--until", stage)
    with monkeypatch.context() as patch:
        patch.setattr(place, until_memory_runs_out)
        said = tiny.refused(capsys, *command, "--redo", stage)
    assert f"lower {setting} (now {2 * lower if stage != 'teacher' else 8})" in said
    left = tiny.contents(copied)
    assert tiny.call(*command, f"{setting}={lower}") == 0
    said = capsys.readouterr().err
    assert f"\n{stage}: resumes\n" in said
    after = tiny.contents(copied)
    if stage == "train":
        assert "resuming at step 2 of 8" in said
        return
    kept = {name for name in left if name.startswith(f"{stage}/")}
    assert len(kept) > 3 and all(after[name] == left[name] for name in kept)
    assert after.keys() == whole.keys()


@pytest.mark.parametrize(
    ("override", "line", "redo"),
    [
        ("train.steps=9", "train.steps: 8 -> 9", "train"),
        ("answers.new_tokens=20", "answers.new_tokens: 24 -> 20", "corpus"),
        ("sampler.temperature=0.5", "sampler.temperature: 1.0 -> 0.5", "answers"),
        ("teacher.top_k=4", "teacher.top_k: 8 -> 4", "teacher"),
        ("cut.layers=1", "cut.layers: 2 -> 1", "cut"),
        ("corpus.tokens=1000", "corpus.tokens: 1500 -> 1000", "corpus"),
    ],
)
def test_precious_work_is_not_superseded(
    world: Path, copied: Path, capsys: Capture, override: str, line: str, redo: str
) -> None:
    """Also where the key belongs to a cheap stage that precious ones rest on; not a byte of the run is touched."""
    before = tiny.contents(copied)
    said = tiny.refused(capsys, "train", world / "recipe.yaml", "--runs", copied.parent, override)
    assert all(words in said for words in (line, f"--redo {redo}", "name=", "--fresh")), said
    assert tiny.contents(copied) == before


def test_redo_supersedes_and_goes_on_after_an_interruption(
    world: Path, copied: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    answers, save = tiny.contents(copied / "answers"), loop.save_checkpoint

    def interrupted(run: Any, step: int, *rest: Any) -> None:
        save(run, step, *rest)
        if step == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(loop, "save_checkpoint", interrupted)
        assert train(world, copied, "train.steps=9", "--redo", "train") == 130
    assert train(world, copied, "train.steps=9", "--redo", "train", "--until", "train") == 0
    said = capsys.readouterr().err
    assert "resuming at step 4 of 9" in said and states(said)["answers"] == "up to date"
    assert tiny.contents(copied / "answers") == answers
    assert train(world, copied, "train.steps=9", "--until", "train", "--redo", "train") == 0  # finished: begins anew
    assert "resuming" not in capsys.readouterr().err


def test_fresh_moves_the_old_run_aside(world: Path, copied: Path, capsys: Capture) -> None:
    """After the checks, and also where the recipe is that of the old run."""
    before, own = tiny.contents(copied), copied / "draft"
    fresh = (capsys, "train", copied / "config.yaml", "--runs", copied.parent, "--fresh")
    assert "cut.layers" in tiny.refused(*fresh, "cut={layers: 90}")
    assert "which --fresh moves aside" in tiny.refused(*fresh, f"cut.donor={own}", "cut.layers=1")
    assert tiny.contents(copied) == before and [path.name for path in copied.parent.iterdir()] == ["tiny"]
    assert tiny.call(*fresh[1:], "answers.prompts=8", "--until", "corpus") == 0
    aside = [path for path in copied.parent.iterdir() if path.name != "tiny"]
    assert len(aside) == 1 and str(aside[0]) in capsys.readouterr().err
    assert tiny.contents(aside[0]) == before
    assert not (copied / "answers").exists()


def test_work_without_a_record_is_renamed_and_never_deleted(world: Path, copied: Path, capsys: Capture) -> None:
    """As in a run that was copied without stages/: it is made anew beside what was there."""
    for name in ("answers", "teacher", "train"):
        (copied / "stages" / f"{name}.json").unlink()
    whole = tiny.contents(copied / "answers")
    (copied / "answers" / "train" / "00001.arrow").write_text("{}\n")
    before = tiny.contents(copied / "answers")
    assert train(world, copied, "--until", "answers") == 0
    assert tiny.contents(copied / "answers") == whole
    assert tiny.contents(copied / "answers.unrecorded-1") == before
    assert "answers has no record in stages/: it is kept as" in capsys.readouterr().err


def test_a_repair_that_is_killed_loses_nothing(world: Path, copied: Path, monkeypatch: Patch) -> None:
    """At its first line behind the removal of the record: what the stage began with is noted before."""
    whole, damaged = tiny.contents(copied / "answers"), copied / "answers" / "train" / "00001.arrow"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    recipe = load_recipe(world / "recipe.yaml")

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("distill.pipeline.running.with_others", killed)
        run_pipeline(recipe, Run(copied, recipe, silent=True), "answers")
    assert not damaged.exists() and not (copied / "stages" / "answers.json").exists()
    kept = {name: value for name, value in whole.items() if name != "train/00001.arrow"}
    assert kept.items() <= tiny.contents(copied / "answers").items()
    assert train(world, copied, "--until", "answers") == 0
    assert tiny.contents(copied / "answers") == whole and not list(copied.glob("*.unrecorded*"))


def test_what_a_killed_removal_left_is_not_taken_for_work(world: Path, copied: Path) -> None:
    """`--redo answers` died within the removal: hidden files of it go with the next one."""
    whole = tiny.contents(copied / "answers")
    (copied / "answers").rename(copied / ".answers.removed")
    for name in ("answers", "teacher", "train"):
        (copied / "stages" / f"{name}.json").unlink()
    assert train(world, copied, "--until", "answers") == 0
    assert tiny.contents(copied / "answers") == whole and not list(copied.glob("*.unrecorded*"))


def test_a_shard_that_was_cut_off_is_made_again_before_its_stage_ends(
    world: Path, copied: Path, capsys: Capture
) -> None:
    whole, record = tiny.contents(copied / "teacher"), copied / "stages" / "teacher.json"
    (copied / "stages" / "teacher.begun.json").write_text(json.dumps(json.loads(record.read_text())["inputs"]))
    record.unlink()
    shard = max((copied / "teacher" / "train").glob("shard-*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-9])
    assert train(world, copied, "--until", "teacher") == 0
    assert f"{shard} is damaged" in capsys.readouterr().err
    assert tiny.contents(copied / "teacher") == whole


def test_two_checkpoints_are_kept(world: Path, copied: Path) -> None:
    assert train(world, copied, "train.save_every=3", "--redo", "train", "--until", "train") == 0
    assert {path.name for path in (copied / "checkpoints").iterdir()} == {"best", "step-000006", "step-000008"}


def test_metrics_with_a_torn_last_line(world: Path, copied: Path) -> None:
    run = Run(copied, load_recipe(copied / "config.yaml"))
    before = run.metrics()
    path = copied / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert run.metrics() == before[:-1]
    run.record("train", step=9, loss=1.0)  # a step of its own: a step done again takes the place of its first line
    *rest, last = run.metrics()
    assert rest == before[:-1] and (last["step"], last["loss"]) == (9, 1.0)
    assert tiny.call("report", "tiny", "--runs", copied.parent) == 0


def test_a_backend_that_was_measured_is_kept(world: Path, copied: Path, capsys: Capture) -> None:
    """Parts of the speedup stage are units of resuming."""
    record = json.loads((copied / "stages" / "speedup.json").read_text())
    (copied / "stages" / "speedup.json").rename(copied / "stages" / "speedup.json.lost")
    (copied / "stages" / "speedup.begun.json").write_text(json.dumps(record["inputs"]))
    (copied / "speedup" / "gguf.json").unlink()
    assert train(world, copied) == 0
    said = capsys.readouterr().err
    assert "pytorch: measured before" in said and "gguf: measured before" not in said


# ── the plan ──


def test_the_plan_of_each_state(world: Path, copied: Path) -> None:
    """Planning changes nothing; a stage whose inputs are not written yet waits, one beside them does not."""

    def planned(*redo: str, until: str | None = None, **changes: Any) -> dict[str, str]:
        recipe = load_recipe(world / "recipe.yaml", [f"{name.replace('__', '.')}={v}" for name, v in changes.items()])
        return {action.stage.name: action.kind for action in plan_run(recipe, Run(copied, recipe), until, redo)}

    before = tiny.contents(copied)
    done = dict.fromkeys(tiny.STAGES, "skip")
    assert planned() == done
    assert planned(until="cut") == dict.fromkeys(tiny.STAGES[:4], "skip")
    assert planned(eval__length=2) == {**done, "eval": "redo", "report": "wait"}
    behind = dict.fromkeys(("teacher", "cut", "train", "eval", "export", "speedup", "report"), "wait")
    assert planned(eval__new_tokens=10) == {"corpus": "skip", "answers": "update", **behind}
    assert planned(answers__new_tokens=20) == {"corpus": "refuse"}
    assert planned(train__steps=9) == {**dict.fromkeys(tiny.STAGES[:4], "skip"), "train": "refuse"}
    waiting = dict.fromkeys(("eval", "export", "speedup", "report"), "wait")
    assert planned("train", train__steps=9) == {**done, "train": "redo", **waiting}
    assert tiny.contents(copied) == before

    (copied / "answers" / "train" / "00001.arrow").unlink()
    (copied / "gguf" / "export.json").unlink()
    waiting = dict.fromkeys(("teacher", "cut", "train", "eval", "export", "speedup", "report"), "wait")
    assert planned() == {"corpus": "skip", "answers": "mend", **waiting}
    assert planned("answers") == {"corpus": "skip", "answers": "redo", **waiting}

    record = json.loads((copied / "stages" / "corpus.json").read_text())
    (copied / "stages" / "corpus.begun.json").write_text(json.dumps(record["inputs"]))
    (copied / "stages" / "corpus.json").unlink()
    assert planned() == {"corpus": "resume", "answers": "wait", **waiting}


def test_a_stage_that_was_killed_before_its_first_file_keeps_nothing(world: Path, copied: Path) -> None:
    """Other settings of it, and of what it reads, need no --redo."""
    for stage in tiny.STAGES[1:]:
        (copied / "stages" / f"{stage}.json").unlink()
    for name in ("answers", "teacher", "checkpoints", "draft"):
        shutil.rmtree(copied / name)
    (copied / "training.json").unlink()
    (copied / "answers").mkdir()
    recipe = load_recipe(world / "recipe.yaml", ["answers.prompts=7"])
    run = Run(copied, recipe)
    (copied / "stages" / "answers.begun.json").write_text('{"version": 1}')
    assert [action.kind for action in plan_run(recipe, run)][:3] == ["redo", "wait", "wait"]
    (copied / "answers" / "train").mkdir()
    (copied / "answers" / "train" / "00000.arrow").write_text("")
    refused = plan_run(recipe, run)
    assert [action.kind for action in refused] == ["refuse"] and "answers depend on it" in str(refused[0].error)


@pytest.mark.parametrize(
    ("processes", "words", "said"),
    [
        (2, "[pair.cc:553] Connection closed by peer [127.0.0.1]:41134", RunError),
        (2, "NCCL error: remote process exited", RunError),
        (1, "Connection closed by peer", RuntimeError),
        (2, "the sizes of tensors differ", RuntimeError),
    ],
)
def test_the_end_of_another_process_is_no_bug_of_this_one(
    monkeypatch: Patch, processes: int, words: str, said: type[Exception]
) -> None:
    monkeypatch.setattr("distill.pipeline.running.process_count", lambda: processes)
    with pytest.raises((RunError, RuntimeError)) as caught, with_others():
        raise RuntimeError(words)
    assert caught.type is said
