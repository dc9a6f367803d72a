"""Trainings of the tiny world: a run trained in a copy, interrupted, and compared with another."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file

from distill.training import loop
from distill.training.checkpoint import newest_checkpoint

MIXED = "train.loss={lk_hybrid: 0.9, cross_entropy: 0.1}"
REPLAY = (
    "train.replay.prompts=6",
    "train.replay.new_tokens=16",
    "train.replay.judges=4",
    "train.replay.steps=2",
    "train.replay.share=0.5",
)


def trained(world: Path, ready: Path, folder: Path, *overrides: str) -> tuple[int, Path]:
    """Train in a copy of a run; the exit status and the run."""
    run = folder / "tiny"
    if not run.exists():
        shutil.copytree(ready, run)
    with tiny.one_thread():
        return tiny.call("train", world / "recipe.yaml", "--runs", folder, "--until", "train", *overrides), run


def two_processes(world: Path, runs: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """`distill train` up to the trained draft in two CPU processes."""
    launcher = ["torch.distributed.run", "--nproc_per_node", "2", "--rdzv_backend", "c10d"]
    recipe, until = str(world / "recipe.yaml"), ["--until", "train"]
    command = ["-m", "distill", "train", recipe, "--runs", str(runs), *until, *overrides]
    return subprocess.run(
        [sys.executable, "-m", *launcher, "--rdzv_endpoint", "localhost:0", *command],
        cwd=tiny.ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "draft" / "model.safetensors")


@contextlib.contextmanager
def interrupted_after(step: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ctrl-C when this step is reported, before it is saved."""
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
