"""Cuts of layers and of MLP width whose kept layers make up for what is gone, against least squares on the states that
transformers returns."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from test_cuts import BLOCKS, CASES, IDS, logits, silence, small

from distill.data.packing import pack
from distill.engines.torch.blocks import Packed
from distill.errors import DataError
from distill.recipe import parse_section
from distill.recipe.training import Cut
from distill.surgery.cutter import TargetDistributions, cut_model, repair
from distill.surgery.layers import FAMILIES, choose_neurons, cut_parts, layer_calls

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


@pytest.mark.parametrize("width", [None, 64])
@pytest.mark.parametrize("case", CASES)
def test_each_layer_is_the_least_squares_answer_to_its_own_input(case: str, width: int | None) -> None:
    """Of layers alone those from the first gap on; of narrower MLPs all, biases and norms included."""
    model, kept = small(case, layers=6), [0, 1, 4]  # a gap behind layers 1 and 4
    neurons = None if width is None else choose_neurons(model, ALONE, width)[0]
    cut, before, uncut = copy.deepcopy(model), copy.deepcopy(model), streams(model)
    plain, report = repair(cut, kept, neurons, ALONE, RIDGE)
    cut_parts(before, kept, neurons)
    for own, layer in zip(plain, before.model.layers, strict=True):
        assert torch.equal(own, layer.mlp.down_proj.weight)
    refitted = [(1, 4), (2, 6)] if neurons is None else [(0, 1), (1, 4), (2, 6)]
    if neurons is None:
        assert torch.equal(cut.model.layers[0].mlp.down_proj.weight, plain[0])
    for place, (index, end) in enumerate(refitted):
        weight = expected_weight(before, index, uncut[end])
        own = cut.model.layers[index].mlp.down_proj.weight.detach()
        assert float((own.double() - weight).abs().max()) <= 1e-3 * float(weight.abs().max())
        for name in ("lost_without_refit", "lost"):
            error = (streams(before)[index + 1] - uncut[end]).norm(dim=-1) / uncut[end].norm(dim=-1)
            assert report[name][place] == pytest.approx(float(error.square().mean()), rel=1e-3)
            before.model.layers[index].load_state_dict(cut.model.layers[index].state_dict())
        assert report["lost"][place] < report["lost_without_refit"][place]
    assert torch.equal(logits(cut), logits(before)) and cut.config.num_hidden_layers == 3
    assert cut.config.intermediate_size == (width or 96) and len(report["lost"]) == len(refitted)


def test_the_first_layers_may_be_gone() -> None:
    """Then every layer makes up for what is missing before it."""
    model = small("llama", layers=3)
    cut, before, uncut = copy.deepcopy(model), copy.deepcopy(model), streams(model)
    _, report = repair(cut, [1, 2], None, ALONE, RIDGE)
    cut_parts(before, [1, 2])
    weight = expected_weight(before, 0, uncut[2])
    own = cut.model.layers[0].mlp.down_proj.weight.detach()
    assert float((own.double() - weight).abs().max()) <= 1e-3 * float(weight.abs().max()) and len(report["lost"]) == 2


@pytest.mark.parametrize("case", ["llama", "gemma3_text"])
def test_layers_are_called_as_the_model_calls_them(case: str) -> None:
    """Documents apart and each kind of layer by its own mask, without a layer having computed."""
    model = small(case, layers=4)
    states, calls = layer_calls(model, BLOCKS)
    with torch.no_grad():
        for layer, others in zip(model.model.layers, calls, strict=True):
            states = layer(states, **others)
    for block in range(len(BLOCKS)):
        for document in set(BLOCKS.documents[block].tolist()) - {-1}:
            place = BLOCKS.documents[block] == document
            alone = streams(model, BLOCKS.ids[block][place][None].long())[-1][0]
            assert torch.allclose(states[block][place], alone, atol=1e-4)


def compared(model: Any, blocks: Packed = BLOCKS) -> TargetDistributions:
    return TargetDistributions.measure(model, blocks, 61)


def test_a_repair_that_does_not_help_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small("qwen2", layers=4)
    distributions, plain = compared(model), copy.deepcopy(model)
    monkeypatch.setattr("distill.surgery.cutter.RIDGE", 0.3)
    monkeypatch.setattr("distill.surgery.cutter._ridge", lambda gram, cross, _: torch.full_like(cross, 9.0))
    cut, settings = copy.deepcopy(model), parse_section(Cut, {"layers": 2, "mlp_width": 64})
    (change,) = cut_model(cut, settings, BLOCKS, distributions, is_target=False)
    cut_parts(plain, [0, 3], choose_neurons(plain, BLOCKS, 64)[0])
    assert torch.equal(logits(cut), logits(plain)) and change.operation == "layers, MLP width"
    assert change.close_before is not None and change.close_before.kl == pytest.approx(0, abs=1e-4)


def test_nothing_is_missing_where_nothing_goes() -> None:
    model = small("llama", layers=3)
    cut = copy.deepcopy(model)
    settings = parse_section(Cut, {"layers": 3, "mlp_width": 96})
    (change,) = cut_model(cut, settings, BLOCKS, compared(model), is_target=True)
    assert torch.equal(logits(cut), logits(model)) and change.before == change.after and change.close_after is None


def test_a_loss_that_is_not_finite() -> None:
    model = small("llama", layers=3)
    distributions = compared(model)
    with torch.no_grad():
        model.lm_head.weight[5] = math.nan
    for cut in ({"layers": 2}, {"mlp_width": 64}):
        with pytest.raises(DataError, match="not finite"):
            cut_model(copy.deepcopy(model), parse_section(Cut, cut), BLOCKS, distributions, is_target=True)


def test_a_silent_layer_goes_first_and_costs_nothing() -> None:
    model = small("qwen3", layers=5)
    silence(model.model.layers[2])
    cut = copy.deepcopy(model)
    (change,) = cut_model(cut, parse_section(Cut, {"layers": 4}), BLOCKS, compared(model), is_target=False)
    assert change.details["dropped"] == [2] and torch.allclose(logits(cut), logits(model), atol=1e-5)
    assert change.close_after is not None and {*change.close_after.agreement.values()} == {1.0}
