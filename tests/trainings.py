"""Trainings of the tiny world: a run trained in a copy, interrupted, and compared with another."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file

from distill.training import loop
from distill.training.saved import newest_checkpoint

Trainer = Callable[..., Path]
TORCHRUN = ["torch.distributed.run", "--nproc_per_node", "2", "--rdzv_backend", "c10d"]
TORCHRUN += ["--rdzv_endpoint", "localhost:0"]
MIXED = "train.loss={lk_hybrid: 0.9, cross_entropy: 0.1}"


def command(world: Path, runs: Path, *overrides: str) -> list[str]:
    """The arguments of an interpreter that trains up to the draft, after `-m`."""
    return ["distill", "train", str(world / "recipe.yaml"), "--runs", str(runs), "--until", "train", *overrides]


def trained(world: Path, ready: Path, folder: Path, *overrides: str, status: int = 0) -> Path:
    """Train in a copy of a run, which ends with this exit status; the run."""
    run = folder / "tiny"
    if not run.exists():
        shutil.copytree(ready, run)
    with tiny.one_thread():
        assert tiny.call(*command(world, folder, *overrides)[1:]) == status
    return run


def two_processes(
    world: Path,
    runs: Path,
    *overrides: str,
    launcher: Sequence[str] = TORCHRUN,
    program: Sequence[str] = ("-m", "distill"),
) -> subprocess.CompletedProcess[str]:
    """`distill train` up to the trained draft in two CPU processes, to their end."""
    environment = {**os.environ, "PYTHONPATH": str(tiny.ROOT), "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, "-m", *launcher, *program, *command(world, runs, *overrides)[1:]]
    settings: dict[str, Any] = {"cwd": tiny.ROOT, "timeout": 300, "env": environment}
    return subprocess.run(arguments, capture_output=True, text=True, **settings)


def accelerate(config: str) -> list[str]:
    """The launcher with one of the files of recipes/accelerate/."""
    options = ["--config_file", f"recipes/accelerate/{config}.yaml", "--num_processes", "2", "--main_process_port", "0"]
    return ["accelerate.commands.launch", *options]


def trained_by_two(world: Path, ready: Path, folder: Path, *overrides: str) -> tuple[Path, str]:
    """The same by two CPU processes; the run, and what they said."""
    shutil.copytree(ready, folder / "tiny")
    result = two_processes(world, folder, *overrides)
    assert result.returncode == 0, result.stderr
    assert json.loads((folder / "tiny" / "training.json").read_text())["processes"] == 2
    return folder / "tiny", result.stderr


def same_up_to_rounding(run: Path, whole: Path) -> None:
    """Every step's figures, draft and last weights."""
    for a, b in zip(metrics(run), metrics(whole), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=2e-5) and a["tokens"] == b["tokens"]
        assert a["losses"] == pytest.approx(b["losses"], rel=2e-5)
        assert a["gradient_norm"] == pytest.approx(b["gradient_norm"], rel=2e-4)
    assert largest_difference(run, whole) < 2e-5


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "draft" / "model.safetensors")


@contextlib.contextmanager
def interrupted_after(step: int | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ctrl-C when this step is reported, before it is saved; None: never."""
    step_of = loop.report_step

    def interrupted(work: Any, *rest: Any) -> None:
        step_of(work, *rest)
        if work.state["step"] == step:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(loop, "report_step", interrupted)
        yield


def last_weights(run: Path) -> dict[str, torch.Tensor]:
    """The weights of the newest checkpoint, which may be none of those that were chosen."""
    newest = newest_checkpoint(run / "checkpoints")
    assert newest is not None
    return torch.load(newest / "model.pt", weights_only=True)  # type: ignore[no-any-return]


def largest_difference(one: Path, other: Path) -> float:
    """Of two runs' drafts and last weights: the draft alone may be the untrained cut in both."""
    differences = []
    for of in (weights, last_weights):
        a, b = of(one), of(other)
        assert a.keys() == b.keys()
        differences += [float((a[name] - b[name]).abs().max()) for name in a]
    return max(differences)


def metrics(run: Path, stage: str = "train") -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["stage"] == stage]
