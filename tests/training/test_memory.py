"""Memory of what runs for hours on a CPU: oneDNN's cache of primitives is bounded, and few shapes come into it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import tiny
import torch

import distill
from distill.teacher.distributions import Head
from distill.training import losses
from distill.training.losses import LossSettings

VARIABLE = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
SHAPES = """
import torch, distill, os
for _ in range(2):
    print("round", flush=True)
    for rows in range(8, SHAPES + 8):  # a few rows are multiplied without oneDNN
        torch.ones(rows, 32, dtype=torch.bfloat16) @ torch.ones(32, 32, dtype=torch.bfloat16)
"""


def compiled(shapes: int, **environment: str) -> tuple[int, int]:
    """Primitives that oneDNN compiled in a first and in a second round over so many shapes; torch is imported first."""
    kept = {name: value for name, value in os.environ.items() if not name.endswith("PRIMITIVE_CACHE_CAPACITY")}
    command = [sys.executable, "-c", SHAPES.replace("SHAPES", str(shapes))]
    settings = {**kept, "ONEDNN_VERBOSE": "2", "PYTHONPATH": str(tiny.ROOT), **environment}
    result = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=120, check=True)
    first, second = (part.count("create:cache_miss") for part in result.stdout.split("round")[1:])
    if not first:
        pytest.skip("torch multiplies bf16 without oneDNN here")
    return first, second


def test_shapes_beyond_the_capacity_are_forgotten() -> None:
    assert compiled(400) == (400, 0)  # what decoding needs stays
    first, second = compiled(600)
    assert first == 600 and second > 0


@pytest.mark.parametrize(
    ("name", "capacity", "shapes", "found"),
    [(VARIABLE, "700", 600, (600, 0)), ("DNNL_PRIMITIVE_CACHE_CAPACITY", "5", 20, (20, 20))],
)
def test_the_users_capacity_counts(name: str, capacity: str, shapes: int, found: tuple[int, int]) -> None:
    assert compiled(shapes, **{name: capacity}) == found


def test_processes_started_from_here_inherit_it() -> None:
    assert distill.__version__ and (VARIABLE in os.environ or "DNNL_PRIMITIVE_CACHE_CAPACITY" in os.environ)


def test_a_batchs_number_of_positions_makes_few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply, rows = torch.mm, set()

    def recorded(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> Any:
        rows.add(len(left))
        return multiply(left, right, out=out)

    monkeypatch.setattr(torch, "mm", recorded)
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(11, 8, generator=generator, requires_grad=True)
    for count in range(1, 500, 7):
        hidden = torch.randn(count, 8, generator=generator)
        teacher = Head(head.detach()).teacher(hidden)
        labels = torch.zeros(count, dtype=torch.long)
        losses.head_loss(hidden, head, teacher, labels, LossSettings({"jsd": 1.0}), 256)
    assert rows == {64, 128, 192, 256}
