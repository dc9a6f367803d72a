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
from distill.surgery.layers import FAMILIES, has_token, keep_layers

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
def expected_weight(cut: Any, index: int, wanted: torch.Tensor) -> torch.Tensor:
    """down_proj of a layer, its own input being final, by an augmented least-squares problem in fp64; what the layer
    makes of the MLP's output is observed."""
    layer, found = cut.model.layers[index], dict[str, torch.Tensor]()
    behind = getattr(layer, FAMILIES[cut.config.model_type] or "mlp")
    places = {"neurons": layer.mlp.down_proj, "before": layer.mlp, "added": behind}

    def keep(name: str) -> Any:
        def see(_: Any, given: Any, output: torch.Tensor) -> None:
            found[name] = (given[0] if name == "neurons" else output).flatten(0, 1).double()

        return see

    handles = [module.register_forward_hook(keep(name)) for name, module in places.items()]
    output = streams(cut)[index + 1].flatten(0, 1).double()
    for handle in handles:
        handle.remove()
    sizes = torch.ones(len(output), 1)  # what a norm divides by
    if behind is not layer.mlp:
        sizes = found["before"].square().mean(1, keepdim=True).sqrt()
    channels = (found["added"] / found["before"] * sizes).mean(0) * getattr(cut.config, "residual_multiplier", 1)
    share = 1 / wanted.flatten(0, 1).double().norm(dim=1, keepdim=True)
    missing = (wanted.flatten(0, 1).double() - output) * share / channels
    a = found["neurons"] / sizes * share
    penalty = math.sqrt(RIDGE * float(a.square().sum()) / a.shape[1]) * torch.eye(a.shape[1], dtype=torch.float64)
    change = torch.linalg.lstsq(
        torch.cat([a, penalty]), torch.cat([missing, torch.zeros(a.shape[1], missing.shape[1])])
    ).solution
    return layer.mlp.down_proj.weight.double() + change.T


@pytest.mark.parametrize("case", CASES)
def test_each_layer_is_the_least_squares_answer_to_its_own_input(case: str) -> None:
    model = small(case, layers=6)
    kept = [0, 1, 4]  # a gap behind layers 1 and 4
    cut, report = refitted(model, kept)
    before, uncut = copy.deepcopy(model), streams(model)
    keep_layers(before, kept)
    assert torch.equal(cut.model.layers[0].mlp.down_proj.weight, before.model.layers[0].mlp.down_proj.weight)
    for index, end in ((1, 4), (2, 6)):
        weight = expected_weight(before, index, uncut[end])
        own = cut.model.layers[index].mlp.down_proj.weight.detach()
        assert float((own.double() - weight).abs().max()) <= 1e-3 * float(weight.abs().max())
        for name in ("lost_without_refit", "lost"):
            error = (streams(before)[index + 1] - uncut[end]).norm(dim=-1) / uncut[end].norm(dim=-1)
            assert report[name][index - 1] == pytest.approx(float(error.square().mean()), rel=1e-3)
            before.model.layers[index].load_state_dict(cut.model.layers[index].state_dict())
        assert report["lost"][index - 1] < report["lost_without_refit"][index - 1]
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
            for document in set(used[has_token(used)].tolist()):
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
