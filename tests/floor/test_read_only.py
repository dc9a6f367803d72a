"""A run on a disk that cannot be written: what is finished is shown, what would have to be made is refused first."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
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


def mounted(folder: Path, commands: Iterable[tuple[object, ...]]) -> list[tuple[int, str, str]]:
    """Exit status, stdout and stderr of commands in a process that sees a folder mounted read-only."""
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare, to mount a folder read-only")
    lines = "".join(json.dumps([str(argument) for argument in arguments]) + "\n" for arguments in commands)
    process = ["unshare", "--mount", sys.executable, "-c", MOUNTED, str(folder)]
    result = subprocess.run(process, cwd=tiny.ROOT, input=lines, capture_output=True, text=True)
    if result.returncode == 77 or "unshare failed" in result.stderr:
        pytest.skip(f"this user cannot mount: {result.stderr.strip()[-200:]}")
    assert result.returncode == 0, result.stderr
    return [tuple(json.loads(line)) for line in result.stdout.splitlines()]


def test_finished_work_is_shown_and_other_work_refused_before_it_starts(
    world: Path, finished: Path, tmp_path: Path
) -> None:
    """In a folder with a finished run `tiny` and a copy `half` of it without its last stages."""
    for name in ("tiny", "half"):
        shutil.copytree(finished, tmp_path / name)
    (tmp_path / "half" / "stages" / "speedup.json").unlink()
    runs = ("--runs", tmp_path)
    shown: dict[tuple[object, ...], str] = {
        ("eval", "tiny", *runs): "acceptance",
        ("speedup", "tiny", *runs): "speedup",
        ("report", "tiny", *runs): "report.html",
        ("runs", *runs): "finished",
        ("train", world / "recipe.yaml", *runs): "report.html",
        ("generate", "def alpha", "tiny", *runs, "--tokens", "4"): "def alpha",
    }
    refused: dict[tuple[object, ...], str] = {
        ("speedup", "half", *runs): "stage `speedup` would have to run",
        ("train", world / "recipe.yaml", *runs, "eval.length=2"): "stage `eval` would have to run",
        ("train", world / "recipe.yaml", *runs, "name=new"): "no permission to write",
        ("export-gguf", "tiny", *runs, "--outtype", "f16"): "no permission to write",
        ("train", world / "recipe.yaml", *runs, "--fresh"): "no permission to write",
    }
    before = tiny.contents(tmp_path)
    outcomes = mounted(tmp_path, [*shown, *refused])
    assert len(outcomes) == len(shown) + len(refused) and tiny.contents(tmp_path) == before
    for (arguments, words), (code, out, err) in zip(shown.items(), outcomes, strict=False):
        assert code == 0 and words in out and "writing to" not in err, (arguments, err)
        assert ("is not writable" in err) == (arguments[0] not in ("runs", "generate")), (arguments, err)
    for (arguments, words), (code, out, err) in zip(refused.items(), outcomes[len(shown) :], strict=True):
        assert code == 2 and words in err and err.count("distill: ") == 1, (arguments, out, err)
        assert "Traceback" not in err and "runs again" not in err, (arguments, err)
