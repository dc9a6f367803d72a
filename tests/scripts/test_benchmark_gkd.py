"""What scripts/benchmarks/gkd.py gives trl's trainer: the blocks' documents, scored as there, and prompts."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import tiny
import torch

from distill.data.packing import pack
from distill.engines.torch.blocks import Packed


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(tiny.ROOT / "scripts" / "benchmarks"))
    return importlib.import_module("gkd")


def blocks() -> Packed:
    sequences = [(list(range(10, 24)), 5), (list(range(30, 42)), 1), ([50], 1), (list(range(60, 85)), 1)]
    return pack(sequences, 16, split_long=True)


def test_the_batch_scores_the_same_tokens_after_the_same_texts(script: Any) -> None:
    packed = blocks()
    expected = []  # (text before, token) of every scored position, straight from the blocks
    for block, position in packed.mask.nonzero().tolist():
        own = packed.documents[block] == packed.documents[block, position]
        before = packed.ids[block, : position + 1][own[: position + 1]]
        expected.append((before.tolist(), int(packed.ids[block, position + 1])))
    batch = script.batch_of(script.rows_of(packed), [[1, 2], [3]], padding=99)
    found = []
    for ids, seen, labels in zip(batch["input_ids"], batch["attention_mask"].bool(), batch["labels"], strict=True):
        assert bool((ids[~seen] == 99).all()) and bool((labels[~seen] == script.UNSCORED).all())
        for position in (labels != script.UNSCORED).nonzero().flatten().tolist():
            assert labels[position] == ids[position]
            found.append((ids[:position][seen[:position]].tolist(), int(labels[position])))
    assert found == expected and len(found) == int(packed.mask.sum()) > 30
    assert torch.equal(batch["prompts"], torch.tensor([[1, 2], [99, 3]]))
    assert torch.equal(batch["prompt_attention_mask"], torch.tensor([[1, 1], [0, 1]]))


def test_prompts_and_their_answers_fill_the_positions(script: Any) -> None:
    rows = [(list(range(100, 125)), 1), (list(range(200, 207)), 3), (list(range(300, 310)), 4)]
    # Pieces of 4 + 6: 100.., 110.., 120.. (5 long), 200.. (7 long), 300..; the longest first, in order where equal.
    assert script.prompts_of(rows, 45, 4, 6) == [
        [100, 101, 102, 103],
        [110, 111, 112, 113],
        [300, 301, 302, 303],
        [200, 201, 202, 203],
    ]
    assert script.prompts_of(rows, 50, 4, 6)[-1] == [120, 121, 122]  # half of a short piece
    assert script.prompts_of(rows[1:2], 5, 4, 6) == [[200, 201, 202, 203]]  # never none
