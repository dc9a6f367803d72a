"""User errors and faults of the machine: exit 2, one message, no traceback, and no finished work is lost."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import yaml
from tiny import Capture, Patch

from distill.errors import DataError, RunError, disk_fault, server_words
from distill.files import cache_folder, digest, read_json, remember, remove_left, write_atomically, write_folder
from distill.progress import warn_once
from distill.recipe import load_recipe
from distill.run import Run

STEPS = (
    "corpus/prompts-train",
    "answers/train/00001",
    "teacher/train/shard-00002",
    "cut",
    "step-000004",
    "draft",
    "eval.md",
)

pytestmark = pytest.mark.usefixtures("one_thread")


def train(world: Path, runs: Path, *more: object) -> int:
    return tiny.call("train", world / "recipe.yaml", "--runs", runs, *more)


def refused(capsys: Capture, world: Path, runs: Path, *more: object) -> str:
    return tiny.refused(capsys, "train", world / "recipe.yaml", "--runs", runs, *more)


# ── changed inputs; other refusals of recipes and inputs: tests/cli/test_check.py ──


def test_a_run_of_another_version_is_refused_with_a_reason(world: Path, copied: Path, capsys: Capture) -> None:
    """A setting that only one version knows, null here, is a difference too."""
    path = copied / "stages" / "train.json"
    record = json.loads(path.read_text())
    del record["inputs"]["train"]["acceptance"]["patience"]
    path.write_text(json.dumps(record | {"key": digest(record["inputs"])}))
    assert "another version of distill made this run" in tiny.refused(
        capsys, "train", world / "recipe.yaml", "--runs", copied.parent, "--dry-run"
    )


def as_an_older_version_left_it(run: Path, settings: bool) -> None:
    """A run with answers of an older form, and with the settings that distill no longer has."""
    record = json.loads((run / "stages" / "answers.json").read_text())
    record["inputs"]["version"] = 1
    (run / "stages" / "answers.json").write_text(json.dumps(record | {"key": digest(record["inputs"])}))
    if settings:
        config = yaml.safe_load((run / "config.yaml").read_text())
        config["target"]["load"], config["teacher"]["kind"] = True, "online"
        config["train"]["acceptance"]["new_tokens"] = 48
        (run / "config.yaml").write_text(yaml.safe_dump(config))


@pytest.mark.parametrize("settings", [True, False])
def test_an_older_run_says_how_to_keep_its_draft(
    world: Path, copied: Path, tmp_path: Path, capsys: Capture, settings: bool
) -> None:
    """Whether its settings are gone or its files have another form; what the message names works."""
    as_an_older_version_left_it(copied, settings)
    before, draft, runs = tiny.contents(copied), copied / "draft", ("--runs", copied.parent)
    train = ("train", world / "recipe.yaml", *runs)
    commands = [train, (*train, "--dry-run"), (*train, "--redo", "train"), (*train, "eval.prompts=5")]
    for command in (*commands, *([("eval", copied), ("speedup", copied), ("report", copied)] if settings else [])):
        said = tiny.refused(capsys, *command)
        assert f"{copied} was made by an older version of distill" in said and "its draft loads on its own" in said
        named = re.findall("`distill (.*?)`", said)
        assert named == [
            f"eval TARGET {draft} --prompts FILE",
            f"export-gguf {draft}",
            f"train RECIPE name=OTHER cut.donor={draft}",
        ]
    assert tiny.contents(copied) == before
    if not settings:
        return
    assert tiny.call(*named[1].split(), "--outtype", "f16", "--to", tmp_path / "files") == 0
    text = "\n\n".join(path.read_text() for path in (world / "corpus" / "test").iterdir())
    (tmp_path / "texts.txt").write_text(text[:6000])
    measured = named[0].replace("TARGET", str(world / "target")).replace("FILE", str(tmp_path / "texts.txt"))
    assert tiny.call(*measured.split(), "--kl", "--count", "4") == 0
    again = named[2].replace("RECIPE", str(world / "recipe.yaml")).replace("OTHER", "other").split()
    assert tiny.call(*again, *runs, "--until", "cut") == 0
    assert tiny.contents(copied) == before


def test_a_changed_target_is_refused_by_the_name_of_its_file(world: Path, tmp_path: Path, capsys: Capture) -> None:
    """As a new chat template or another tokenizer under the same path: answers are not mixed with those of before."""
    target = Path(shutil.copytree(world / "target", tmp_path / "target"))
    recipe = tiny.write_recipe(tmp_path / "recipe.yaml", tiny.recipe_values(world, elsewhere=True))
    begin = ("train", recipe, f"target.model={target}", "--runs", tmp_path, "--until", "answers")
    assert tiny.call(*begin) == 0
    before = tiny.contents(tmp_path / "tiny" / "answers")
    for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        path, content = target / name, (target / name).read_bytes()
        path.write_bytes(content + b" ")
        said = tiny.refused(capsys, *begin)
        assert "target.model has other content\n" in said and "--redo corpus" in said
        assert tiny.contents(tmp_path / "tiny" / "answers") == before
        path.write_bytes(content)


def test_donor_of_another_tokenizer(world: Path, copied: Path, tmp_path: Path, capsys: Capture) -> None:
    tiny.build_model(tmp_path / "donor", layers=2, vocabulary=380, seeds=range(500, 502))
    before, override = tiny.contents(copied), f"cut.donor={tmp_path / 'donor'}"
    said = tiny.refused(capsys, "check", world / "recipe.yaml", override)
    assert "does not fit the target" in said and "token " in said
    assert "does not fit the target" in refused(capsys, world, tmp_path / "new", override, "--until", "cut")
    refused(capsys, world, copied.parent, override)
    assert tiny.contents(copied) == before


# ── damaged artifacts ──


def flip(path: Path) -> None:
    """Turn over the bits of one byte in the middle: same size, other content."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("answers/train/00001.arrow", "teacher"),
        ("corpus/prompts-test.arrow", "speedup"),
        ("cut/model.safetensors", "train"),
        ("draft/model.safetensors", "eval"),
        ("draft/model.safetensors", "generate"),
        ("draft/model.safetensors", "export-gguf"),
    ],
)
def test_a_flipped_bit_is_found(world: Path, copied: Path, capsys: Capture, name: str, stage: str) -> None:
    flip(copied / name)
    commands: dict[str, tuple[object, ...]] = {
        "generate": ("generate", "def", copied, "--tokens", 2),
        "export-gguf": ("export-gguf", copied, "--outtype", "f16"),
    }
    again = ("train", world / "recipe.yaml", "--runs", copied.parent, "--redo", stage, "--until", stage)
    said = tiny.refused(capsys, *commands.get(stage, again))
    assert f"{name} is damaged" in said and "--verify" in said


def test_corrupted_teacher_shard(world: Path, copied: Path, capsys: Capture) -> None:
    whole = tiny.contents(copied, "README.md")
    flip(copied / "teacher" / "train" / "shard-00001.safetensors")
    before = {name: d for name, d in tiny.contents(copied).items() if name.startswith(("teacher", "answers", "draft"))}
    said = refused(capsys, world, copied.parent, "train.steps=10", "--redo", "train")
    assert "shard-00001.safetensors" in said
    (command,) = re.findall(r"`distill (train .* --verify)`", said)
    assert before.items() <= {**tiny.contents(copied), **{n: d for n, d in before.items() if "draft" in n}}.items()
    assert tiny.call(*shlex.split(command), "train.steps=8", "--until", "train") == 0
    after = tiny.contents(copied)
    assert all(after[name] == whole[name] for name in whole if name.startswith(("teacher/", "draft/")))


def test_truncated_answers(world: Path, copied: Path, capsys: Capture) -> None:
    """Only the damaged file is made again."""
    whole = tiny.contents(copied / "answers")
    path = copied / "answers" / "train" / "00001.arrow"
    untouched = (copied / "answers" / "train" / "00000.arrow").stat().st_mtime_ns
    path.write_bytes(path.read_bytes()[:-30])
    assert train(world, copied.parent, "--until", "train") == 0
    said = capsys.readouterr().err
    assert "train/00001.arrow" in said and "5 of 6 groups exist" in said
    assert tiny.contents(copied / "answers") == whole
    assert (copied / "answers" / "train" / "00000.arrow").stat().st_mtime_ns == untouched
    assert "train: up to date" in said


def test_a_lost_draft_is_made_from_the_last_whole_checkpoint(world: Path, copied: Path, capsys: Capture) -> None:
    draft, newest = copied / "draft" / "model.safetensors", copied / "checkpoints" / "step-000008"
    whole = tiny.digest(draft)
    for step in (8, 6):
        draft.unlink()
        if step == 6:
            flip(newest / "optimizer.pt")
            said = refused(capsys, world, copied.parent, "--until", "train")
            assert "step-000008 is damaged" in said and f"delete {newest}" in said
            shutil.rmtree(newest)
        assert train(world, copied.parent, "--until", "train") == 0
        assert f"resuming at step {step} of 8" in capsys.readouterr().err
        assert tiny.digest(draft) == whole


@pytest.mark.parametrize("name", ["stages/train.json", "eval.json", "config.yaml"])
def test_damaged_records(copied: Path, capsys: Capture, name: str) -> None:
    text = (copied / name).read_text()
    (copied / name).write_text(text.replace(":", "", 1)[: len(text) // 2] if name.endswith("json") else "train: {")
    if name == "eval.json":  # of another size: the stage sees it and measures again
        assert tiny.call("eval", "tiny", "--runs", copied.parent, "-o", "json") == 0
        json.loads(capsys.readouterr().out)
    else:
        said = tiny.refused(capsys, "eval", "tiny", "--runs", copied.parent)
        assert Path(name).name in said


# ── faults of the disk, at the write function ──


class Fault:
    """os.replace that fails for one name; what is written before stays."""

    def __init__(self, number: int, part: str) -> None:
        self.number, self.part, self.hits = number, part, 0
        self.replace = os.replace

    def __call__(self, source: Any, target: Any, **rest: Any) -> None:
        if self.part in str(target):
            self.hits += 1
            raise OSError(self.number, os.strerror(self.number), str(target))
        self.replace(source, target, **rest)


def test_full_disk_and_read_only_folder_at_every_stage(
    world: Path, finished: Path, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    """One run meets a fault at each of several writes, in turn, and goes on where it was when the fault is gone."""
    capsys.readouterr()
    for index, part in enumerate(STEPS):
        number = (errno.ENOSPC, errno.EROFS, errno.EACCES)[index % 3]
        with monkeypatch.context() as patch:
            fault = Fault(number, part)
            patch.setattr(os, "replace", fault)
            said = refused(capsys, world, tmp_path, "--until", "eval")
        assert fault.hits == 1 and part in said, (part, said)
        assert ("the disk is full" if number == errno.ENOSPC else "no permission to write") in said
        assert not [p for p in tmp_path.rglob("*.tmp") if part in p.name], part
    assert train(world, tmp_path, "--until", "train") == 0
    for name in ("corpus", "answers", "teacher", "cut", "draft"):
        assert tiny.contents(tmp_path / "tiny" / name) == tiny.contents(finished / name, "README.md"), name


@pytest.mark.parametrize(
    ("part", "stage"),
    [
        ("target-f16.gguf", "export"),
        pytest.param("speedup.json", "speedup", marks=pytest.mark.slow),
        *(pytest.param(part, "report", marks=pytest.mark.slow) for part in ("report.html", "draft/README.md")),
    ],
)
def test_full_disk_after_training(
    world: Path, copied: Path, capsys: Capture, monkeypatch: Patch, part: str, stage: str
) -> None:
    weights = tiny.digest(copied / "draft" / "model.safetensors")
    with monkeypatch.context() as patch:
        fault = Fault(errno.ENOSPC, part)
        patch.setattr(os, "replace", fault)
        said = refused(capsys, world, copied.parent, "--redo", stage, "--until", stage)
    assert fault.hits == 1 and Path(part).name in said, said
    assert train(world, copied.parent, "--redo", stage, "--until", stage) == 0
    assert tiny.digest(copied / "draft" / "model.safetensors") == weights


@pytest.mark.parametrize("stage", ["teacher", "train", "cut"])
def test_a_write_that_really_fails(world: Path, copied: Path, capsys: Capture, stage: str) -> None:
    """The libraries' own writers (safetensors, tokenizers, torch) each meet a limit on the size of files."""
    whole = tiny.contents(copied)
    small = 3000 if stage == "teacher" else 20_000
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for name in ("log.txt", "metrics.jsonl"):
        (copied / name).write_text("")
    (copied / "provenance.json").write_text("[]")  # it grows with every start, past the limit that is meant for shards
    resource.setrlimit(resource.RLIMIT_FSIZE, (small, before[1]))
    try:
        said = refused(capsys, world, copied.parent, "--redo", stage, "--until", stage)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "cannot write" in said or "cannot be written" in said, said
    assert train(world, copied.parent, "--redo", stage, "--until", "train") == 0
    after = tiny.contents(copied)
    kept = [n for n in whole if n.startswith(("answers/", "teacher/", "cut/", "draft/")) and "README" not in n]
    assert all(after[name] == whole[name] for name in kept)


def test_log_on_a_full_disk(world: Path, copied: Path, capsys: Capture) -> None:
    """A log that cannot be flushed must not hide its own message when it is closed."""
    (copied / "log.txt").unlink()
    (copied / "log.txt").symlink_to("/dev/full")
    assert "the disk is full" in refused(capsys, world, copied.parent)


# ── a kill between the two renames of a folder ──

KILLED = """
import os, pathlib, signal, sys
from distill import files
path, number, replace = pathlib.Path(sys.argv[1]), iter(range(9)), os.replace
def rename(*names):
    if next(number) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*names)
files.os.replace = rename
files.write_folder(path, lambda folder: (folder / "config.json").write_text("new"))
"""


def name_model(path: Path) -> None:
    from distill.engines.torch.hugging_face import check_folder

    check_folder(str(path))


def lock_run(path: Path) -> None:
    run: Any = None  # the lock does not read the recipe
    with Run(path.parent, run).locked():
        pass


def fail_to_write(path: Path) -> None:
    with pytest.raises(RunError, match="the disk is full"):
        write_folder(path, lambda _: Path("/dev/full").write_text("a"))


@pytest.mark.parametrize("start", [name_model, lock_run, fail_to_write])
def test_the_next_start_completes_a_folder(tmp_path: Path, start: Callable[[Path], object]) -> None:
    path = tmp_path / "draft"
    write_folder(path, lambda folder: (folder / "config.json").write_text("old"))
    code = subprocess.run([sys.executable, "-c", KILLED, path], cwd=Path(__file__).parents[2]).returncode
    assert code == -signal.SIGKILL and not path.exists()
    assert (tmp_path / ".draft.old" / "config.json").read_text() == "old"
    start(path)
    assert (path / "config.json").read_text() == "new"
    write_folder(path, lambda folder: (folder / "config.json").write_text("newer"))
    assert (path / "config.json").read_text() == "newer"
    assert {one.name for one in tmp_path.iterdir()} <= {"draft", ".lock"}


def test_a_rename_that_fails_leaves_the_old_folder(tmp_path: Path, monkeypatch: Patch) -> None:
    path = tmp_path / "draft"
    write_folder(path, lambda folder: (folder / "a").write_text("old"))
    replace = os.replace

    def rename(source: Path, destination: Path) -> None:
        if source.name.endswith(".tmp"):
            raise OSError(errno.EIO, "Input/output error")
        replace(source, destination)

    monkeypatch.setattr("distill.files.os.replace", rename)
    with pytest.raises(RunError, match="cannot write"):
        write_folder(path, lambda folder: (folder / "a").write_text("new"))
    assert (path / "a").read_text() == "old" and [one.name for one in tmp_path.iterdir()] == ["draft"]


def test_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    """Of processes that are gone, and not before ten minutes: another machine may share the folder."""
    gone, ours = 2**22 + 1, os.getpid()  # behind the largest number of a process
    names = {f".big.{gone}.tmp": False, f".big.{ours}.tmp": True, f".other.{gone}.tmp": True, ".big.x.tmp": True}
    for name in names:
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (time.time() - 3600,) * 2)
    (tmp_path / f".big.{gone + 1}.tmp").write_text("")  # written to just now
    (tmp_path / f".big.{gone + 2}.tmp" / "part").mkdir(parents=True)
    os.utime(tmp_path / f".big.{gone + 2}.tmp", (0, 0))
    remove_left(tmp_path, "big", "tmp")
    assert {name: (tmp_path / name).exists() for name in names} == names
    assert (tmp_path / f".big.{gone + 1}.tmp").exists() and not (tmp_path / f".big.{gone + 2}.tmp").exists()
    os.utime(tmp_path / f".big.{gone + 1}.tmp", (0, 0))
    write_atomically(tmp_path / "big", lambda place: place.write_text("new"), several=True)
    assert (tmp_path / "big").read_text() == "new" and not (tmp_path / f".big.{gone + 1}.tmp").exists()


# ── two processes ──


@pytest.mark.parametrize(
    "name", ["../../victim.txt", f"{os.sep}victim.txt", "answers/../../x", ".", "", "outside/victim.txt"]
)
def test_nothing_outside_a_foreign_run_is_removed(
    world: Path, copied: Path, tmp_path: Path, capsys: Capture, name: str
) -> None:
    (tmp_path / "kept").mkdir()
    for victim in (tmp_path / "kept" / "victim.txt", copied.parent.parent / "victim.txt"):
        victim.write_text("mine")
    (copied / "outside").symlink_to(tmp_path / "kept")
    path = copied / "stages" / "teacher.json"
    record = json.loads(path.read_text())
    record["artifacts"][name] = {"bytes": 9, "sha256": "0"}
    path.write_text(json.dumps(record))
    said = tiny.refused(capsys, "train", world / "recipe.yaml", "--runs", copied.parent)
    assert "outside its folder" in said or "a link leads to another folder" in said
    assert all(
        one.read_text() == "mine" for one in (tmp_path / "kept" / "victim.txt", copied.parent.parent / "victim.txt")
    )


@pytest.mark.parametrize("name", ["../x", "/x", "a/b", ""])
def test_the_name_of_a_parent_is_one_name(copied: Path, name: str) -> None:
    parent = {"generation": 2, "run": name, "digest": "0", "files": {}}
    (copied / "parent.json").write_text(json.dumps(parent))
    with pytest.raises(DataError, match="outside its folder"):
        Run(copied, load_recipe(copied / "config.yaml")).parent()


def test_what_cannot_be_remembered_is_said_once(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    warn_once.cache_clear()
    (tmp_path / "file").touch()
    monkeypatch.setenv("DISTILL_CACHE", str(tmp_path / "file" / "cache"))
    for kind in ("weights", "batches"):
        remember(cache_folder(kind) / "x.json", {"a": math.nan})
    said = capsys.readouterr().err
    assert said.count("not kept for later commands") == 1 and f"{tmp_path / 'file' / 'cache'} is not writable" in said
    assert "Set DISTILL_CACHE to another folder" in said
    monkeypatch.setenv("DISTILL_CACHE", str(tmp_path / "new"))
    remember(cache_folder("weights") / "x.json", {"a": math.nan})
    assert read_json(tmp_path / "new" / "weights" / "x.json") == {"a": None}
    for name in ("DISTILL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # a user without a home
    assert cache_folder("weights") == Path("/nonexistent/.cache/distill/weights")


def test_two_processes_on_one_run(world: Path, copied: Path, capsys: Capture) -> None:
    before = tiny.contents(copied)
    with open(copied / ".lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        for more in ((), ("--fresh",)):
            assert "another process" in refused(capsys, world, copied.parent, *more)
        assert "another process" in tiny.refused(capsys, "eval", "tiny", "--runs", copied.parent)
    assert tiny.contents(copied) == before
    assert train(world, copied.parent) == 0


# ── errors of libraries, by what little they say ──

WORDS = ("basic_ios::clear: iostream error", "[enforce fail at inline_container.cc:664] . unexpected pos")


@pytest.mark.parametrize("error", [*map(RuntimeError, WORDS), Exception("Input/output error (os error 5)")])
def test_a_library_that_cannot_write(tmp_path: Path, error: Exception) -> None:
    def write(temporary: Path) -> None:
        temporary.write_text("half")
        raise error

    with pytest.raises(RunError, match=r"cannot write .*whole\.bin"):
        write_atomically(tmp_path / "whole.bin", write)
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_read_now_is_not_to_be_deleted() -> None:
    try:
        try:
            raise OSError(errno.EIO, "Input/output error")
        except OSError:
            raise DataError("checkpoint a is damaged", "delete it") from None
    except DataError as error:
        found = disk_fault(error)
        assert isinstance(found, DataError) and found.what == error.what
        assert found.hint is not None and "the disk" in found.hint and "delete" not in found.hint
    assert disk_fault(DataError("b is damaged", "delete it")) is None
    assert disk_fault(AssertionError("a bug")) is None
    raw = disk_fault(OSError(errno.ENOSPC, "No space left on device", "/c"))
    assert raw is not None and raw.what == "the disk is full: cannot write /c"
    raw = disk_fault(Exception("Error while reading (os error 5)"))  # as safetensors words it
    assert raw is not None and "a file cannot be used: Input/output error" in raw.what


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b'{"error": {"message": "too  long\\nby 3", "type": "x"}}', "too long by 3"),
        (b'{"error": "no such model"}', "no such model"),
        (b'{"object": "error", "message": "bad", "code": 400}', "bad"),
        (b'{"detail": [{"loc": ["body"], "msg": "missing"}]}', '[{"loc": ["body"], "msg": "missing"}]'),
        (b'{"error": {"type": "x"}}', '{"error": {"type": "x"}}'),
        (b"<html>502 Bad Gateway</html>\r\n", "<html>502 Bad Gateway</html>"),
        (b"\xff\x1b[31m", "\ufffd [31m"),
        (b"", "no message"),
        (b"a" * 290 + b" own-secret in it", "a" * 290 + " *** in it"),
        (
            b"Incorrect API key sk-proj-abc***xyz, Authorization: Bearer abc.def",
            "Incorrect API key ***, Authorization: Bearer ***",
        ),
        (b"[" * 100_000, "[" * 300),
    ],
)
def test_the_words_of_a_server(body: bytes, shown: str) -> None:
    """Its message, else its body: one line, 300 characters, no key."""
    assert server_words(body, ["own-secret", ""]) == shown
