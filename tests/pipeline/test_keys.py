"""What a stage's key holds, and which artifacts still belong to the draft."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import question_worlds
import recipe_reads
import tiny
from tiny import Capture, Patch

from distill import files
from distill.engines.torch.hugging_face import text_folder
from distill.errors import DataError
from distill.files import reference_digest
from distill.pipeline.stages import difference, find_stage, key_parts, recorded_parts
from distill.recipe import GgufOptions, PyTorch, Sampler, load_recipe
from distill.recipe.recipe import local_weights
from distill.report.card import gather
from distill.run import Run

pytestmark = pytest.mark.usefixtures("one_thread")


def opened(folder: Path, *overrides: str) -> Run:
    return Run(folder, load_recipe(folder / "config.yaml", overrides))


def names(run: Run, stage: str) -> set[str]:
    return {*key_parts(find_stage(stage), run.recipe, run)}


def test_keys_hold_what_their_stages_read(finished: Path, tmp_path: Path) -> None:
    """And nothing else, so that finished runs of recipes without these settings stay finished."""
    (tmp_path / "log.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    before, after = opened(finished), opened(finished, f"answers.traffic={tmp_path / 'log.jsonl'}")
    added = {"corpus.validation", "corpus.test", "chat", "traffic (content)"}
    for stage, more in (("answers", added), ("teacher", set())):
        assert names(after, stage) - names(before, stage) == more


def test_a_change_of_one_item_has_the_name_that_an_override_takes() -> None:
    before, after = ({"lengths": [1, n], "configurations": [{"length": n}]} for n in (2, 3))
    found = difference({"speedup": before}, {"speedup": after})
    assert found == ["speedup.lengths: [1, 2] -> [1, 3]", "speedup.configurations.0.length: 2 -> 3"]


def test_the_key_of_a_tree_is_of_the_files_that_it_reads(world: Path, tmp_path: Path) -> None:
    for name in ("a.py", "b.py", "old/c.py", "notes.txt"):
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text(name)
    source = {"kind": "tree", "path": str(tmp_path / "tree"), "pattern": "**/*.py", "exclude": ["old"]}
    recipe = load_recipe(world / "recipe.yaml", [f"corpus.sources={json.dumps([source])}"])
    run = Run(tmp_path / "run", recipe)

    def content() -> Any:
        return key_parts(find_stage("corpus"), recipe, run)["corpus.sources (content)"]

    first = content()
    (tmp_path / "tree" / "notes.txt").write_text("other")
    (tmp_path / "tree" / "old" / "d.py").write_text("other")
    assert content() == first
    (tmp_path / "tree" / "b.py").write_text("other")
    assert content() != first


def test_hidden_files_are_no_content_of_a_model(tmp_path: Path) -> None:
    """git and the hub's client rewrite theirs while nothing else changes."""
    (tmp_path / "config.json").write_text("{}")
    before = reference_digest(str(tmp_path))
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "index").write_text("1")
    (tmp_path / ".DS_Store").write_text("2")
    assert reference_digest(str(tmp_path)) == before
    (tmp_path / "more.json").write_text("{}")
    assert reference_digest(str(tmp_path)) != before


def test_a_donor_that_was_moved_is_the_same(world: Path, finished: Path, tmp_path: Path) -> None:
    """Its content is in the key, so a path alone changes nothing, and another content does."""
    shutil.copytree(world / "target", tmp_path / "elsewhere")
    recipe = load_recipe(world / "recipe.yaml")
    assert recipe.cut.donor == "target"
    run, stage = Run(finished, recipe), find_stage("cut")
    before = key_parts(stage, recipe, run)
    moved = load_recipe(world / "recipe.yaml", [f"cut.donor={tmp_path / 'elsewhere'}"])
    assert key_parts(stage, moved, run) == before == recorded_parts(run, stage)
    (tmp_path / "elsewhere" / "more.json").write_text("{}")
    changed = key_parts(stage, moved, run)
    assert changed["cut"]["donor"] == str(tmp_path / "elsewhere") and changed != before


def test_only_the_weights_that_are_loaded_count(tmp_path: Path) -> None:
    """Whether a machine can load a target is decided by their size."""
    for name in ("model-1.safetensors", "consolidated.safetensors", "training_args.bin"):
        (tmp_path / name).write_bytes(b"x")
    assert not local_weights(str(tmp_path))
    index = {"weight_map": {"a": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert local_weights(str(tmp_path)) == [tmp_path / "model-1.safetensors"]
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "pytorch_model.bin").write_bytes(b"x")
    assert local_weights(str(tmp_path / "old")) == [tmp_path / "old" / "pytorch_model.bin"]


def test_a_large_file_is_hashed_whole_and_once(tmp_path: Path, monkeypatch: Patch) -> None:
    """Two models of equal shapes differ in the middle alone; a file that was rewritten is read again, whatever its
    time says. Where nothing can be kept, it is hashed each time."""
    monkeypatch.setattr(files, "LARGE", 1000)
    monkeypatch.setenv("DISTILL_CACHE", str(tmp_path / "cache"))
    file, read, hashed = tmp_path / "model.safetensors", [], files.file_digest
    monkeypatch.setattr(files, "file_digest", lambda path: (read.append(path), hashed(path))[1])
    file.write_bytes(bytes(5_000_000))
    state = file.stat()
    first = reference_digest(str(file))
    assert reference_digest(str(file)) == first and len(read) == 1
    with file.open("r+b") as handle:
        handle.seek(2_500_000)
        handle.write(b"merged again")
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    second = reference_digest(str(file))
    assert second != first and len(read) == 2
    (kept,) = (tmp_path / "cache").rglob("*.json")
    (tmp_path / "no folder").write_text("")
    for cache, content, times in (("cache", kept.read_text(), 2), ("cache", '{"state": [', 3), ("no folder", "", 4)):
        kept.write_text(content)
        monkeypatch.setenv("DISTILL_CACHE", str(tmp_path / cache))
        files._digest_at.cache_clear()  # as another process
        assert [reference_digest(str(file)) for _ in range(2)] == [second] * 2 and len(read) == times


def test_a_hub_name_is_keyed_by_its_commit(tmp_path: Path, monkeypatch: Patch) -> None:
    """Of a model by the one in the hub's cache, whose files are read, of a data set by the hub's newest one; where
    nobody can be asked, by the name alone."""
    from huggingface_hub import HfApi, constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(HfApi, "repo_info", lambda *_, **__: SimpleNamespace(sha="c3"))
    place = tmp_path / "models--me--small" / "refs" / "main"
    place.parent.mkdir(parents=True)
    found = []
    for commit in ("a1", "b2"):
        place.write_text(commit)
        files.hub_commit.cache_clear()
        found.append(reference_digest("me/small"))
    assert found == ["me/small@a1", "me/small@b2"]
    asked = list[Any]()

    def download(name: str, revision: Any = None, **_: Any) -> str:
        asked.append(revision)
        files.hub_reference(name).parent.mkdir(parents=True, exist_ok=True)
        files.hub_reference(name).write_text("d4")
        return str(tmp_path / f"models--{name.replace('/', '--')}" / "snapshots" / (revision or "d4"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    for _ in range(2):  # The hub moved on. This process reads the files that its keys name.
        assert text_folder("me/small").name == "b2" and reference_digest("me/small") == "me/small@b2"
    assert asked == ["b2", "b2"] and reference_digest("me/new") == "me/new@c3"
    with pytest.raises(DataError, match="me/new changed on the hub during this command, from commit c3 to d4"):
        text_folder("me/new")
    assert reference_digest("me/texts", "dataset") == "me/texts@c3"

    def gone(*_: Any, **__: Any) -> None:
        raise OSError

    monkeypatch.setattr(HfApi, "repo_info", gone)
    files.hub_commit.cache_clear()
    assert (
        reference_digest("me/absent") == "me/absent"
        and reference_digest("not a name/at all/x") == "not a name/at all/x"
    )


def test_figures_of_an_earlier_draft_are_not_those_of_a_new_one(copied: Path, capsys: Capture) -> None:
    """After `--redo train --until train`, stages that follow have artifacts, but of a draft that is gone."""
    run = opened(copied)
    assert not any(run.outdated(stage) for stage in tiny.STAGES)
    assert gather(run.recipe, run).evaluation is not None
    record = json.loads((copied / "stages" / "train.json").read_text())
    record["artifacts"]["draft/model.safetensors"]["sha256"] = "0" * 64
    (copied / "stages" / "train.json").write_text(json.dumps(record))
    stale = {stage for stage in tiny.STAGES if run.outdated(stage)}
    assert stale == {"eval", "export", "speedup", "report"}
    found = gather(run.recipe, run)
    assert (found.evaluation, found.export, found.speedup) == (None, None, None)
    said = tiny.told(capsys, "report", "tiny", "--runs", copied.parent)
    assert "left out: eval, export, speedup, made from what has been replaced" in said
    command = shlex.split(said.split("`")[1])
    assert command[:2] == ["distill", "train"] and tiny.call(*command[1:], "--dry-run") == 0
    served = ("serve-check", "tiny", "--runs", copied.parent, "--server", "nowhere")
    assert "has files of an earlier draft" in tiny.refused(capsys, *served)
    (copied / "stages" / "train.json").unlink()
    assert {stage for stage in tiny.STAGES if run.outdated(stage)} == stale | {"train"}


# What stages read beside their keys, and why their artifacts do not hang on it.
BY_CONTENT = {"target.model", "cut.donor"}  # the content of the models is part of the key, not their place
BY_PLACE = {"name", "device", "threads", "target.shard"}  # where a run computes changes rounding alone
BY_PLACE |= {"answers.batch", "teacher.batch"}  # and how much memory it takes
BY_PLACE |= {f"pytorch.{name}" for name in PyTorch.model_fields}
BY_PLACE |= {f"gguf.{role}.{name}" for role in ("target", "draft") for name in GgufOptions.model_fields}
# Questions have a sampler and limits of their own, written over these; blocks without room for one are refused.
OF_QUESTIONS = {f"sampler.{name}" for name in Sampler.model_fields} | {"corpus.block"}
OF_QUESTIONS |= {f"answers.{name}" for name in ("new_tokens", "stop", "repetition_penalty", "keep_truncated")}
WHO_RUNS_THE_TARGET = {"answers.writer", "answers.prompts", "teacher.kind", "teacher.gguf", "teacher.server"}
BY_INPUTS = {  # these change artifacts that the stage reads, and are part of the keys of their stages
    "questions": {"corpus.sources.kind"} | OF_QUESTIONS,
    # They decide whether servers are asked for distributions, of which the key of `answers` then has the number.
    "answers": {"teacher.kind", "teacher.gguf", "teacher.server"},
    "teacher": {"answers.writer", "answers.prompts", "answers.new_tokens"},
    "cut": {"corpus.block", "target.dtype", "target.quantise"},
    "train": {"corpus.block", "target.quantise", "teacher.kind", "cut.transplant"},
    # Whether any steps: declared where there are none. The others decide what the stores of held-out texts hold.
    "eval": {"corpus.block", "train.steps", "answers.new_tokens"} | WHO_RUNS_THE_TARGET,
    # For the head of a file: a hub's names, whose change begins another corpus. Whether the target is written is asked
    # of the machine.
    "export": {"corpus.sources.kind"} | WHO_RUNS_THE_TARGET,
    "speedup": {"corpus.block"},
    "report": {"corpus.sources.kind", "train.steps"} | WHO_RUNS_THE_TARGET,  # stages that are left out are named
}


@pytest.mark.parametrize(
    ("asked", "overrides"),
    [(False, ["--until", "report"]), (True, ["--until", "answers"])],
)
def test_every_key_that_a_stage_reads_is_declared(
    world: Path, tmp_path: Path, monkeypatch: Patch, asked: bool, overrides: list[str]
) -> None:
    path = question_worlds.build(tmp_path) if asked else world / "recipe.yaml"
    with recipe_reads.recorded(monkeypatch) as reads:
        assert tiny.call("train", path, "--runs", tmp_path / "runs", *overrides) == 0
    assert "sampler.temperature" in reads["answers"]
    recipe = load_recipe(path, overrides[2:])
    for stage, keys in recipe_reads.undeclared(recipe, reads).items():
        assert keys <= BY_CONTENT | BY_PLACE | BY_INPUTS.get(stage, set()), stage


def test_a_key_that_is_not_declared_is_seen(world: Path) -> None:
    recorder = recipe_reads.Recorder(recipe := load_recipe(world / "recipe.yaml"))
    recorder.read(recipe.answers, "group", 4)
    recorder.read(recipe.eval, "length", 3)
    assert recipe_reads.undeclared(recipe, {"answers": recorder.found}) == {"answers": {"eval.length"}}
