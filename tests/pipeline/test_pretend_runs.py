"""Whole runs on the pretend device: as on the CPU up to rounding, also on one that lacks what MPS lacks, or spread over
two; and what is said where its memory runs out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from trainings import metrics

from distill.engines.torch.hugging_face import settle_types
from distill.recipe import load_recipe
from distill.run import Run
from distill.training import loop
from distill.training.setup import set_up

TIMED = {"time", "seconds", "tokens_per_second", "memory_bytes", "eta_seconds"}


pytestmark = pytest.mark.usefixtures("one_thread")


def losses(run: Path) -> list[Any]:
    """What a training's log says of each step, without times."""
    return [{name: value for name, value in one.items() if name not in TIMED} for one in metrics(run)]


def figures(run: Path) -> Any:
    """What eval.json says of the test files and answers."""
    return json.loads((run / "eval.json").read_text())["domains"]


def close(found: Any, expected: Any) -> bool:
    """Whether both are the same up to the rounding of fp32."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(close(found[name], expected[name]) for name in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(close, found, expected))
    return bool(found == (pytest.approx(expected, rel=1e-3, abs=1e-4) if isinstance(expected, float) else expected))


@pytest.fixture
def trained(world: Path, ready: Path, tmp_path: Path) -> Callable[..., Path]:
    """Copies the run that lacks its training, and trains with these overrides on a device."""

    def train(device: str, *overrides: str) -> Path:
        runs = tmp_path / device.replace(":", "-")
        shutil.copytree(ready, runs / "tiny")
        arguments = ("--runs", runs, f"device={device}", *overrides, "--until", "train")
        assert tiny.call("train", world / "recipe.yaml", *arguments) == 0
        return runs / "tiny"

    return train


def test_a_run_from_corpus_to_report(pretend: Any, world: Path, finished: Path, tmp_path: Path) -> None:
    with pretend.counting() as counts:
        assert tiny.call("train", world / "recipe.yaml", "device=auto", "--runs", tmp_path) == 0
    run = tmp_path / "tiny"
    assert counts.launches > 80_000 and counts.synchronisations == 0
    for folder in ("corpus", "answers"):
        assert tiny.contents(run / folder) == tiny.contents(finished / folder)
    assert close(losses(run), losses(finished)) and close(figures(run), figures(finished))
    # The memory of the device, not of the process, in which torch alone takes more.
    assert all(0 < one["memory_bytes"] < 2**26 for one in metrics(run))
    assert "Pretend Accelerator" in (run / "provenance.json").read_text()
    assert (run / "report.html").is_file() and (run / "draft" / "README.md").is_file()


@pytest.mark.parametrize(
    ("overrides", "noise"),
    [
        (("train.adapter={rank: 4}",), 1e-3),
        (("train.steps=50", "train.sparsity={mlp_width: 32}", "train.acceptance=null"), 1e-3),
        (("train.optimizer=muon", "train.checkpointing=true", "train.micro_batch=1"), 0.05),
        (("train.dtype=bfloat16",), 0.1),  # autocast computes products in it
    ],
    ids=["LoRA", "narrowed", "muon", "bfloat16"],
)
def test_trainings(pretend: Any, trained: Callable[..., Path], overrides: tuple[str, ...], noise: float) -> None:
    found, expected = ([one["loss"] for one in losses(trained(name, *overrides))] for name in ("pretend", "cpu"))
    assert found == pytest.approx(expected, rel=noise)


@pytest.mark.parametrize(
    "overrides",
    [
        ("train.optimizer=adamw", "train.micro_batch=2"),
        ("train.optimizer=muon", "train.checkpointing=true"),
        ("train.dtype=bfloat16", "train.loss={lk_hybrid: 0.9, cross_entropy: 0.1}"),
        ("train.adapter={rank: 4}",),
    ],
    ids=["AdamW", "Muon", "bfloat16", "LoRA"],
)
def test_a_step_never_waits_for_the_device(
    pretend: Any, world: Path, ready: Path, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    """It fetches nothing, copies only from pinned memory, and the figures of several steps come by one transfer."""
    shutil.copytree(ready, tmp_path / "tiny")
    given = ["device=auto", "train.acceptance=null", *overrides]
    recipe = settle_types(load_recipe(world / "recipe.yaml", given))
    work = set_up(recipe, Run(tmp_path / "tiny", recipe))
    with pretend.counting() as counts:
        pending = [loop.Pending(step, 1.0, loop.one_step(work, step, work.rate), {}) for step in range(4)]
    assert counts.launches > 2000 and counts.to_device > 0
    found = (counts.waits, counts.to_host, counts.synchronisations, counts.unpinned_to_device)
    assert found == (0, 0, 0, 0), counts.operations
    with pretend.counting() as counts:
        assert all(own["tokens"] > 0 for own in loop.fetched(work, pending))
    assert (counts.waits, counts.to_host, counts.unpinned_to_device) == (1, 1, 0), counts.operations


def test_ten_steps_wait_once_for_the_log(pretend: Any, trained: Callable[..., Path]) -> None:
    """In the whole loop, whatever it does before its first step and after its last."""
    waits = []
    for device, steps in (("pretend:0", 10), ("pretend:1", 30)):
        with pretend.counting() as counts:
            run = trained(device, f"train.steps={steps}", "train.acceptance=null", "train.save_every=99")
        assert [line["step"] for line in losses(run)] == list(range(1, steps + 1))
        waits.append((counts.waits, counts.to_host, counts.unpinned_to_device))
    one, other = waits
    assert [late - early for early, late in zip(one, other, strict=True)] == [2, 2, 0]


def test_a_device_that_lacks_what_mps_lacks(pretend: Any, world: Path, finished: Path, tmp_path: Path) -> None:
    overrides = ("device=auto", "teacher.kind=exact", "pytorch.static=true", "--until", "eval")
    with pretend.without("float64", pretend.SORTS, *pretend.lacking("MPS")):
        assert tiny.call("train", world / "recipe.yaml", *overrides, "--runs", tmp_path) == 0
    assert tiny.contents(tmp_path / "tiny" / "answers") == tiny.contents(finished / "answers")


def test_a_target_spread_over_two_devices(pretend: Any, world: Path, finished: Path, tmp_path: Path) -> None:
    overrides = ("device=auto", "target.shard=true", "pytorch.draft_device=pretend:1", "--until", "eval")
    torch.accelerator.reset_peak_memory_stats(1)
    with pretend.available(2):
        assert tiny.call("train", world / "recipe.yaml", *overrides, "--runs", tmp_path) == 0
    assert torch.accelerator.max_memory_allocated(1) > 100_000
    run = tmp_path / "tiny"
    assert tiny.contents(run / "answers") == tiny.contents(finished / "answers")
    assert close(losses(run), losses(finished)) and close(figures(run), figures(finished))


@pytest.mark.parametrize(
    ("more", "overrides", "said"),
    [
        (520_000, ("answers.batch=12",), "in stage answers: pretend out of memory|lower answers.batch (now 12)"),
        (800_000, ("answers.batch=1",), "in stage teacher: pretend out of memory|lower teacher.batch (now 8)"),
        (4_000_000, (), "in a step, after step 0: pretend out of memory|lower train.micro_batch (now 4)"),
    ],
    ids=["answers", "teacher", "train"],
)
def test_memory_that_runs_out(
    pretend: Any, world: Path, tmp_path: Path, capsys: Any, more: int, overrides: tuple[str, ...], said: str
) -> None:
    arguments = ("train", world / "recipe.yaml", "--runs", tmp_path, "device=auto", *overrides, "--until", "train")
    with pretend.memory(more):
        words = tiny.refused(capsys, *arguments)
    assert all(part in words for part in said.split("|")), words


def test_memory_that_runs_out_in_a_command(pretend: Any, finished: Path, world: Path, capsys: Any) -> None:
    pair = ("speedup", world / "target", finished / "draft", "--count", 4, "--tokens", 8)
    with pretend.memory(100_000):
        assert "memory ran out in this command" in tiny.refused(capsys, *pair, "--prompts", world / "corpus" / "test")
