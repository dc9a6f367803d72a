"""The random table: its distributions depend on the last tokens alone, however they got there."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from table_model import TableModel
from test_tree_cache import Mirror, check_refusals

from distill.engines.model import Model

torch.set_num_threads(1)


def by_hand(model: TableModel, context: Sequence[int]) -> list[float]:
    """The logits after a context, by walking digit by digit."""
    index = 0
    for back in range(model.memory, 0, -1):
        digit = context[-back] if back <= len(context) else model.vocabulary_size
        index += digit * (model.vocabulary_size + 1) ** (back - 1)
    return model.table[index].tolist()


def test_a_draft_is_near_its_target() -> None:
    model: Model = TableModel(4, seed=3)
    assert isinstance(model, TableModel) and torch.equal(TableModel(4, seed=3).table, model.table)
    assert 0.3 < float((model.near(0.5, seed=9).table - model.table).std()) < 0.7


def equal(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(got, expected)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 4))
def test_any_sequence_of_calls_gives_the_distributions_of_the_paths(seed: int, memory: int) -> None:
    draws = random.Random(seed)
    model = TableModel(4, seed=seed % 7, memory=memory, capacity=60)
    mirror = Mirror(model, lambda text: torch.tensor(by_hand(model, text), dtype=torch.float64), equal)
    for _ in range(12):
        mirror.step(draws, 99)


def test_refusals_change_nothing() -> None:
    check_refusals(TableModel(12, memory=2, capacity=16), equal)
    model = TableModel(4, capacity=5)
    model.extend([1, 2, 3])
    model.extend([0, 1], parents=[-1, -1])  # branches share a position
    model.extend([2], parents=[1])
    with pytest.raises(ValueError, match="do not fit"):
        model.extend([1], parents=[2])  # the sixth token of its path
    model.keep([[1, 2]])
    with pytest.raises(ValueError, match="do not fit"):
        model.extend([0])
    model.rollback([4])
    assert model.extend([0]).full()[0].tolist() == by_hand(model, [1, 0])
