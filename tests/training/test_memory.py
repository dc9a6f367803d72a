"""Memory of what runs for hours on a CPU: oneDNN's cache of primitives is bounded, and few shapes come into it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import tiny
import torch

from distill.teacher.distributions import DenseTeacher, Head
from distill.training import losses

SHAPES = """
import torch, distill, sys
for shapes in map(int, sys.argv[1:]):
    print("round", flush=True)
    for rows in range(8, shapes + 8):  # a few rows are multiplied without oneDNN
        torch.ones(rows, 32, dtype=torch.bfloat16) @ torch.ones(32, 32, dtype=torch.bfloat16)
"""


def compiled(*rounds: int, **environment: str) -> list[int]:
    """Primitives that oneDNN compiled in rounds over so many shapes each; torch is imported first."""
    kept = {name: value for name, value in os.environ.items() if not name.endswith("PRIMITIVE_CACHE_CAPACITY")}
    settings = {**kept, "ONEDNN_VERBOSE": "2", "PYTHONPATH": str(tiny.ROOT), **environment}
    command = [sys.executable, "-c", SHAPES, *map(str, rounds)]
    result = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=120, check=True)
    found = [part.count("create:cache_miss") for part in result.stdout.split("round")[1:]]
    if not found[0]:
        pytest.skip("torch multiplies bf16 without oneDNN here")
    return found


def test_shapes_beyond_the_capacity_are_forgotten() -> None:
    *kept, forgotten = compiled(400, 400, 600, 600)
    assert kept == [400, 0, 200] and forgotten > 0  # what decoding needs stays


@pytest.mark.parametrize("name", ["ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY"])
def test_the_users_capacity_counts(name: str) -> None:
    assert compiled(20, 20, **{name: "5"}) == [20, 20]


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
        teacher = DenseTeacher(hidden, Head(head.detach()))
        labels = torch.zeros(count, dtype=torch.long)
        losses.head_loss(hidden, head, teacher, labels, {"jsd": 1.0}, 256)
    assert rows == {64, 128, 192, 256}
