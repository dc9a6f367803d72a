"""Ctrl-C and SIGTERM: one line that says how to go on, nothing half-written, and no signal lost."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tiny
from killed_runs import run_jobs

PROGRAM = """
import os, signal, sys, time
from distill.cli import app

def ready():
    print("ready", flush=True)

def plainly():
    ready()
    work()

def in_a_library():
    try:
        ready()
        time.sleep(30)
    except:
        pass
    from distill.progress import Progress
    progress = Progress("work", 10**9)
    while True:
        progress.step()

def in_its_ending():
    try:
        ready()
        time.sleep(30)
    finally:
        ready()
        time.sleep(30)

def turned_into_another():
    try:
        ready()
        time.sleep(30)
    except BaseException:
        raise ImportError("a library's own") from None

def work():
    while True:
        time.sleep(0.01)

app.app = lambda **_: globals()[sys.argv[1]]()
app.main()
"""


def begin(what: str, program: str = PROGRAM) -> subprocess.Popen[str]:
    """A command that is inside `what` when this returns."""
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", program, what], cwd=tiny.ROOT, **pipes)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(0.1)
    return process


def end_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit status and stderr."""
    try:
        said = process.communicate(timeout=120)[1]
    finally:
        process.kill()
    return process.returncode, said


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("what", ["plainly", "in_a_library", "turned_into_another"])
def test_no_signal_is_lost(what: str, number: int, status: int) -> None:
    process = begin(what)
    process.send_signal(number)
    code, said = end_of(process)
    assert code == status, said
    assert said.strip() == "distill: interrupted; nothing was left half-written; start the same command again"


def test_the_second_signal_ends_at_once() -> None:
    process = begin("in_its_ending")
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert end_of(process)[0] == -signal.SIGINT


def test_an_ignored_signal_stays_ignored() -> None:
    """As under nohup, and in the background of a script."""
    ending = PROGRAM.replace("time.sleep(30)", "time.sleep(0.5); os._exit(7)")
    process = begin("in_a_library", f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n{ending}")
    process.send_signal(signal.SIGINT)
    assert end_of(process)[0] == 7


# ── the commands themselves ──


@pytest.mark.slow
def test_commands_say_how_to_go_on(world: Path, copied: Path, tmp_path: Path) -> None:
    """In the middle of their work."""
    runs, target, out = copied.parent, str(world / "target"), tmp_path / "out"
    text = str(world / "corpus" / "test")
    (copied / "stages" / "eval.json").unlink()
    jobs: list[dict[str, object]] = [
        {"argv": ["generate", "def alpha", "--runs", str(runs), "--tokens", "400"], "after": "def alpha"},
        {"argv": ["eval", "--runs", str(runs)], "after": "the target continues"},
        {"argv": ["eval", target, str(copied / "draft"), "--prompts", text], "after": "round"},
        {"argv": ["cut", target, str(out / "cut"), "--text", text, "--layers", "2"], "after": "writing to"},
        {"argv": ["transplant", target, target, str(out / "transplant")], "after": "writing to"},
        {"argv": ["export-gguf", target, "--to", str(out / "gguf")], "after": "writing to"},
    ]
    for index, job in enumerate(jobs):
        job["signal"] = (signal.SIGTERM, signal.SIGINT)[index % 2]
    for job, outcome in zip(jobs, run_jobs(tmp_path, jobs), strict=True):
        said, argv = outcome["output"], job["argv"]
        assert isinstance(argv, list) and isinstance(job["signal"], int)
        resumes = argv[0] == "eval" and "--prompts" not in argv
        how = "the same command resumes" if resumes else "nothing was left half-written; start the same command again"
        assert outcome["code"] == 128 + job["signal"], (job, said)
        assert said.endswith(f"\ndistill: interrupted; {how}\n") and said.count("distill: ") == 1, (job, said)
        assert "Traceback" not in said and "Exception ignored" not in said, (job, said)
    assert not [path for path in tmp_path.rglob("*") if ".tmp" in path.name], "nothing temporary is left"
    assert not [path for path in out.rglob("*") if path.is_file()], "no result was begun"
