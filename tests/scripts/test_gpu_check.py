"""scripts/gpu_check.py at toy size, on the CPU and on the pretend device: the code that a GPU runs, and its tables."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_scripts
import tiny
import torch
from test_scripts import run

SMALL = ("--toy", "--prompts", "1", "--tokens", "8")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    return test_scripts.script("gpu_check", monkeypatch)


# What a machine with a GPU may lack: nothing of the check may need it, at import or later.
WITHOUT = ["datasets", "gguf", "llama_cpp", "matplotlib", "llguidance", "bitsandbytes", "typer", "pyarrow"]
WITHOUT_THEM = """
import runpy, sys
sys.modules.update(dict.fromkeys({without}))
sys.argv = {arguments}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def without(packages: list[str], *arguments: object) -> subprocess.CompletedProcess[str]:
    """The script where these packages are missing."""
    program = [str(tiny.ROOT / "scripts" / "gpu_check.py"), *map(str, arguments)]
    code = WITHOUT_THEM.format(without=packages, arguments=program)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_every_decoder_writes_the_same_text(tmp_path: Path) -> None:
    """And products in four bits are beside bfloat16."""
    done = without(WITHOUT, "--to", tmp_path, *SMALL, "--part", "bits", "--part", "toy")
    assert done.returncode == 0, done.stderr
    row = next(line for line in done.stdout.splitlines() if "| 4 bits |" in line)
    assert float(row.split("|")[3]) < 1e-2
    found = json.loads((tmp_path / "the-CPU" / "toy.json").read_text())
    rows = [row for row in found["rows"] if "texts" in row]
    engines = {(row["engine"], row["configuration"]) for row in rows}
    assert {
        ("growing", "plain"),
        ("static", "γ = 4"),
        ("static", "tree of 8"),
        ("growing", "table, tree of 8"),
    } < engines
    assert ("transformers", "assisted, γ = 4") in engines and len(rows) == 14
    assert all(row["texts"] == rows[0]["texts"] for row in rows) and found["finished"] and found["date"]
    assert "| 1 | static | tree of 8 |" in done.stdout and "| D(m) | static |" in done.stdout


def test_it_runs_on_an_accelerator(
    pretend: Any, script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "LENGTHS", (2,))
    monkeypatch.setattr(script, "COUNTS", (1, 2))
    parts = [word for part in ("bits", "toy", "toy-batches", "training") for word in ("--part", part)]
    run(script, monkeypatch, "--to", tmp_path, *SMALL, *parts)
    said = capsys.readouterr().out
    assert "torch has no operator for 4 bits on pretend" in said or "| 4 bits |" in said
    assert "## Pretend Accelerator" in said and "| 2 | static | γ = 4 |" in said and "| compact |" in said
    found = json.loads((tmp_path / "Pretend-Accelerator" / "toy.json").read_text())
    rows = [row for row in found["rows"] if "texts" in row]
    assert all(row["texts"] == rows[0]["texts"] and row["peak_bytes"] > 10**7 for row in rows) and len(rows) >= 9


@pytest.mark.slow
def test_the_pipeline_is_timed_by_stage(script: Any, tmp_path: Path) -> None:
    done = without([], "--to", tmp_path, *SMALL, "--part", "pipeline")
    assert done.returncode == 0, done.stderr
    assert "| teacher |" in done.stdout and "Training: 2 steps" in done.stdout and "| plain |" in done.stdout
    assert "report: done" in (tmp_path / "the-CPU" / "pipeline.log").read_text()
    assert json.loads((tmp_path / "the-CPU" / "pipeline.json").read_text())["finished"]


def test_packages_that_are_missing_are_named(tmp_path: Path) -> None:
    done = without(["torch"], "--to", tmp_path, "--toy")
    assert done.returncode == 1 and "needs the package torch" in done.stderr and "Traceback" not in done.stderr


def test_a_part_goes_on_where_it_was(script: Any, tmp_path: Path) -> None:
    def options(minutes: float) -> Any:
        return SimpleNamespace(minutes=minutes, device=torch.device("cpu"))

    def fails() -> Any:
        raise RuntimeError("no such kernel\nand more")

    path = tmp_path / "part.json"
    part = script.Part(path, options(1))
    part.add("one", "static", lambda: {"steps": {}})
    part.add("two", "static", fails)
    part = script.Part(path, options(-1))
    assert part.found["left_out"] == [] and [row["configuration"] for row in part.rows] == ["one"]
    part.add("one", "static", fails)
    part.add("two", "static", fails)
    assert part.found["left_out"] == ["static: two, 1 at once: no time"]
    part = script.Part(path, options(1))
    part.add("two", "static", fails)
    assert part.found["left_out"] == ["static: two, 1 at once: RuntimeError: no such kernel"]


def test_what_cannot_be_asked(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="there is no part nothing; there are bits, toy"):
        run(script, monkeypatch, "--to", tmp_path, "--toy", "--part", "nothing")
    with pytest.raises(SystemExit, match=r"holds no config\.json"):
        run(script, monkeypatch, "--to", tmp_path, "--toy", "--draft", tmp_path / "none")
    if not torch.accelerator.is_available():
        with pytest.raises(SystemExit, match="torch sees no accelerator"):
            run(script, monkeypatch, "--to", tmp_path)
