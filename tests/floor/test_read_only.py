"""A run on a disk that cannot be written: what is finished is shown, what would have to be made is refused first."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny

# A process whose first argument is a folder: mounted read-only there, for this process alone, before anything is run.
MOUNTED = """
import json, os, subprocess, sys
folder = sys.argv[1]
for options in (["--bind", folder, folder], ["-o", "remount,bind,ro", folder]):
    if subprocess.run(["mount", *options]).returncode:
        sys.exit(77)
sys.path.insert(0, os.path.join(os.getcwd(), "tests"))
import contextlib, io
import tiny
import torch
torch.set_num_threads(1)
for line in sys.stdin:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = tiny.call(*json.loads(line))
    print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
"""


class Mounted:
    """Commands in a process that sees a folder mounted read-only."""

    def __init__(self, folder: Path) -> None:
        command = ["unshare", "--mount", sys.executable, "-c", MOUNTED, str(folder)]
        if shutil.which("unshare") is None:
            pytest.skip("needs unshare, to mount a folder read-only")
        self.process = subprocess.Popen(
            command, cwd=tiny.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def call(self, *arguments: object) -> tuple[int, str, str]:
        """Exit status, stdout and stderr of a command."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps([str(argument) for argument in arguments]) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        line = self.process.stdout.readline()
        if not line:
            assert self.process.stderr is not None
            said = self.process.stderr.read()
            if self.process.wait() == 77 or "unshare failed" in said:
                pytest.skip(f"this user cannot mount: {said.strip()[-200:]}")
            raise AssertionError(said)
        code, out, err = json.loads(line)
        return code, out, err

    def close(self) -> None:
        self.process.communicate()


@pytest.fixture(scope="module")
def runs(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run `tiny` and a copy `half` of it without its last stages."""
    folder = tmp_path_factory.mktemp("disk")
    shutil.copytree(finished, folder / "tiny")
    shutil.copytree(finished, folder / "half")
    (folder / "half" / "stages" / "speedup.json").unlink()
    return folder


@pytest.fixture(scope="module")
def mounted(runs: Path) -> Iterator[Mounted]:
    found = Mounted(runs)
    yield found
    found.close()


def test_what_is_finished_is_shown(world: Path, runs: Path, mounted: Mounted) -> None:
    before = tiny.contents(runs)
    for arguments, words in {
        ("eval", "tiny", "--runs", runs): "acceptance",
        ("speedup", "tiny", "--runs", runs): "speedup",
        ("report", "tiny", "--runs", runs): "report.html",
        ("runs", "--runs", runs): "finished",
        ("train", world / "recipe.yaml", "--runs", runs): "report.html",
        ("generate", "def alpha", "--run", "tiny", "--runs", runs, "--tokens", "4"): "def alpha",
    }.items():
        code, out, err = mounted.call(*arguments)
        assert code == 0 and words in out, (arguments, err)
        assert "writing to" not in err, arguments
        assert ("cannot be written" in err) == (arguments[0] not in ("runs", "generate")), (arguments, err)
    assert tiny.contents(runs) == before


def test_what_would_have_to_be_made_is_refused_before_it_starts(world: Path, runs: Path, mounted: Mounted) -> None:
    for arguments, words in {
        ("speedup", "half", "--runs", runs): "stage `speedup` would have to run",
        ("speedup", "tiny", "--runs", runs, "--again"): "stage `speedup` would have to run",
        ("train", world / "recipe.yaml", "--runs", runs, "eval.new_tokens=9"): "stage `eval` would have to run",
        ("train", world / "recipe.yaml", "--runs", runs, "name=new"): "no permission to write",
        ("export-gguf", "tiny", "--runs", runs, "--outtype", "f16"): "no permission to write",
        ("runs", "--runs", runs, "--delete", "tiny", "--yes"): "no permission to write",
        ("train", world / "recipe.yaml", "--runs", runs, "--fresh"): "no permission to write",
    }.items():
        code, out, err = mounted.call(*arguments)
        assert code == 2 and words in err and err.count("distill: ") == 1, (arguments, out, err)
        assert "Traceback" not in err and "runs again" not in err, (arguments, err)


def test_a_run_that_is_read_only_by_its_permissions(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For a user who is not root; as root, permissions do not bind."""
    if os.geteuid() == 0:
        pytest.skip("as root, permissions do not bind: the tests above mount the disk instead")
    copied.chmod(0o555)
    try:
        assert tiny.call("eval", "tiny", "--runs", copied.parent) == 0
        assert "cannot be written" in capsys.readouterr().err
    finally:
        copied.chmod(0o755)
