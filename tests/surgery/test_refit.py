"""Kept layers that make up for dropped ones, against least squares on the states that transformers returns."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from test_cuts import BLOCKS, CASES, IDS, logits, small

from distill.data.packing import Packed, pack
from distill.errors import DataError
from distill.surgery.cutter import refit_layers, states_behind
from distill.surgery.layers import keep_layers, tokens

RIDGE = 0.1
ALONE = pack([([*row], 1) for row in IDS.tolist()], IDS.shape[1], split_long=False)  # one document a block


@torch.no_grad()
def streams(model: Any, ids: torch.Tensor = IDS) -> list[torch.Tensor]:
    """The stream before every layer and behind the last one, from transformers alone."""
    last: list[torch.Tensor] = []
    handle = model.model.norm.register_forward_pre_hook(lambda _, given: last.append(given[0]))
    states = model(ids, output_hidden_states=True, use_cache=False).hidden_states
    handle.remove()
    return [*states[:-1], last[0]]


def refitted(model: Any, kept: list[int], blocks: Packed = ALONE, **settings: Any) -> tuple[Any, dict[str, Any]]:
    ends, cut = states_behind(model, kept, blocks), copy.deepcopy(model)
    keep_layers(cut, kept)
    losses = iter([2.0, 1.0, 3.0])  # the first ridge wins
    settings = {"ridges": (RIDGE, 10.0), "loss": lambda _: next(losses), **settings}
    return cut, refit_layers(cut, kept, ends, blocks, **settings)


@torch.no_grad()
def expected_weight(cut: Any, index: int, wanted: torch.Tensor) -> tuple[torch.Tensor, float]:
    """down_proj of a layer, its own input being final, by an augmented least-squares problem in fp64; the error."""
    neurons: list[torch.Tensor] = []
    layer = cut.model.layers[index]
    handle = layer.mlp.down_proj.register_forward_pre_hook(lambda _, given: neurons.append(given[0]))
    output = streams(cut)[index + 1].flatten(0, 1).double()
    handle.remove()
    share = 1 / wanted.flatten(0, 1).double().norm(dim=1, keepdim=True)
    a, missing = neurons[0].flatten(0, 1).double() * share, (wanted.flatten(0, 1).double() - output) * share
    penalty = math.sqrt(RIDGE * float(a.square().sum()) / a.shape[1]) * torch.eye(a.shape[1], dtype=torch.float64)
    change = torch.linalg.lstsq(
        torch.cat([a, penalty]), torch.cat([missing, 0 * penalty[:, : missing.shape[1]]])
    ).solution
    error = float((missing - a @ change).square().sum()) / len(a)
    return layer.mlp.down_proj.weight.double() + change.T, error


@pytest.mark.parametrize("case", CASES)
def test_each_layer_is_the_least_squares_answer_to_its_own_input(case: str) -> None:
    model = small(case, layers=6)
    kept = [0, 1, 4]  # a gap behind layers 1 and 4
    cut, report = refitted(model, kept)
    before, uncut = copy.deepcopy(model), streams(model)
    keep_layers(before, kept)
    assert torch.equal(cut.model.layers[0].mlp.down_proj.weight, before.model.layers[0].mlp.down_proj.weight)
    for index, end in ((1, 4), (2, 6)):
        weight, error = expected_weight(before, index, uncut[end])
        own = cut.model.layers[index].mlp.down_proj.weight.detach()
        assert float((own.double() - weight).abs().max()) <= 1e-3 * float(weight.abs().max())
        assert report["lost"][index - 1] == pytest.approx(error, rel=1e-3)
        assert report["lost"][index - 1] < report["lost_without_refit"][index - 1]
        before.model.layers[index].load_state_dict(cut.model.layers[index].state_dict())
    assert torch.equal(logits(cut), logits(before)) and report["ridge"] == RIDGE


def test_states_are_those_of_documents_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distill.surgery.layers.BATCH", 3)
    model = small("llama", layers=4)
    ends = states_behind(model, [0, 2], BLOCKS)
    assert [len(one) for one in ends] == [math.ceil(len(BLOCKS) / 3)] * 2
    for which, end in ((0, 2), (1, 4)):
        states = torch.cat(ends[which])
        for block in range(len(BLOCKS)):
            used = BLOCKS.documents[block]
            for document in set(used[tokens(used)].tolist()):
                place = used == document
                alone = streams(model, BLOCKS.ids[block][place][None].long())[end][0]
                assert torch.allclose(states[block][place], alone, atol=1e-4)


def test_a_refit_that_does_not_lower_the_loss_is_undone() -> None:
    model = small("qwen2", layers=4)
    losses = iter([1.0, 2.0, math.nan])
    cut, report = refitted(model, [0, 3], loss=lambda _: next(losses))
    plain = copy.deepcopy(model)
    keep_layers(plain, [0, 3])
    assert torch.equal(logits(cut), logits(plain))
    assert report["ridge"] is None and report["losses"] == [1.0, 2.0, None]


def test_nothing_is_missing_where_no_layer_goes() -> None:
    model = small("llama", layers=3)
    cut, report = refitted(model, [0, 1, 2])
    assert torch.equal(logits(cut), logits(model)) and max(report["lost_without_refit"]) == 0


def test_a_loss_that_is_never_finite() -> None:
    with pytest.raises(DataError, match="not finite"):
        refitted(small("llama", layers=3), [0, 2], loss=lambda _: math.nan)
