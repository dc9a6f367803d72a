"""L1 while fine-tuning: what is removed was zero, what is cut changes nothing, and a resume is no different."""

from __future__ import annotations

import copy
import json
import math
from functools import cache
from typing import Any

import pytest
import torch
from toys import blurred, toy
from transformers import GPT2Config, GPT2LMHeadModel

from distill.errors import DataError, RecipeError
from distill.surgery.sparsity import GroupLasso, balance, zero_groups

torch.set_num_threads(1)

V, WIDE, WIDTH, STEPS, RAMP = 61, 96, 32, 120, 0.4
HELD_OUT = torch.randint(0, V, (16, 24), generator=torch.Generator().manual_seed(99))


@cache
def teacher(kind: str) -> Any:
    changes = {"mlp_bias": True} if "biases" in kind else {}
    return toy(kind.split()[0], vocabulary=V, intermediate_size=WIDE, **changes)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(HELD_OUT).logits


def divergence(model: Any, kind: str, ids: torch.Tensor) -> torch.Tensor:
    """Mean KL(teacher ‖ model)."""
    with torch.no_grad():
        wanted = teacher(kind)(ids).logits.log_softmax(-1)
    found = model(ids).logits.log_softmax(-1)
    return (wanted.exp() * (wanted - found)).sum(-1).mean()


class Training:
    """The training loop in small: AdamW on the KL to a fixed teacher, random tokens, warm-up, the penalty after each
    step. `steps` goes on to a step; `save` and `restore` are a checkpoint."""

    def __init__(self, kind: str, rate: float = 1e-3) -> None:
        self.kind, self.rate, self.done = kind, rate, 0
        self.model = blurred(teacher(kind), seed=5, scale=0.3)
        self.penalty = GroupLasso(self.model, WIDTH, STEPS, ramp=RAMP)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
        self.log: list[dict[str, Any]] = []

    def steps(self, until: int) -> Training:
        while self.done < until:
            rate = self.rate * min(1.0, (self.done + 1) / 10)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            ids = torch.randint(0, V, (6, 16), generator=torch.Generator().manual_seed(self.done))
            divergence(self.model, self.kind, ids).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.log.append(self.penalty.after_step(self.done, rate))
            self.done += 1
        return self

    def save(self) -> Any:
        weights = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        return *weights, json.dumps(self.penalty.state_dict()), self.done

    def restore(self, saved: Any) -> Training:
        weights, moments, text, self.done = copy.deepcopy(saved)
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(moments)
        self.penalty.load_state_dict(json.loads(text))
        return self


def gate_and_up(mlp: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of each, of a fused matrix by transformers' order."""
    if hasattr(mlp, "gate_up_proj"):
        gate, up = mlp.gate_up_proj.weight.chunk(2)
        return gate, up
    return mlp.gate_proj.weight, mlp.up_proj.weight


def groups(layer: Any) -> list[torch.Tensor]:
    """The groups one by one, fp64."""
    mlp = layer.mlp
    gate, up = gate_and_up(mlp)
    found = []
    for j in range(len(gate)):
        parts = [gate[j], up[j], mlp.down_proj.weight[:, j]]
        if hasattr(mlp, "gate_proj") and mlp.gate_proj.bias is not None:
            parts += [mlp.gate_proj.bias[j : j + 1], mlp.up_proj.bias[j : j + 1]]
        found.append(torch.cat(parts).detach().double())
    return found


def dead(layer: Any) -> list[int]:
    return [j for j, group in enumerate(groups(layer)) if not group.any()]


KINDS = ("phi3", "llama with biases")  # gate and up fused, and apart


@pytest.mark.parametrize("kind", KINDS)
def test_the_lasso_from_the_ramp_to_the_cut(kind: str) -> None:
    run = Training(kind)
    lasso, before_freeze = run.penalty, []
    freeze = lasso._freeze

    def watched() -> None:
        before_freeze.extend(len(dead(layer)) for layer in run.model.model.layers)
        freeze()

    lasso._freeze = watched
    end = round(STEPS * RAMP)
    run.steps(end)
    assert all(count >= 0.95 * (WIDE - WIDTH) for count in before_freeze) and len(before_freeze) == 2
    removed = [dead(layer) for layer in run.model.model.layers]
    assert [len(own) for own in removed] == [WIDE - WIDTH] * 2 and removed[0] != removed[1]
    at_freeze = divergence(run.model, kind, HELD_OUT).item()
    # The moments of what was removed still move it: holding it is not for nothing.
    moment = run.optimizer.state[run.model.model.layers[0].mlp.down_proj.weight]["exp_avg"].T
    assert moment[removed[0]].abs().max() > 0
    for step in range(end, STEPS):
        run.steps(step + 1)
        assert [dead(layer) for layer in run.model.model.layers] == removed
    assert {figures["phase"] for figures in run.log[: end - 1]} == {"ramp"}
    assert {figures["phase"] for figures in run.log[end:]} == {"debias"}
    assert all(figures["lambda"] > 0 for figures in run.log[:end])
    assert all(figures["lambda"] == 0 and figures["zero_share"] == 1 for figures in run.log[end:])
    assert [int(zero_groups(layer).sum()) for layer in run.model.model.layers] == [WIDE - WIDTH] * 2
    after = divergence(run.model, kind, HELD_OUT).item()
    assert after < 0.9 * at_freeze

    masked, expected = copy.deepcopy(run.model), logits(run.model)
    _, details = lasso.finish(run.model)
    torch.testing.assert_close(logits(run.model), expected, rtol=1e-5, atol=1e-5)
    assert run.model.config.intermediate_size == WIDTH
    for layer, old, gone in zip(run.model.model.layers, masked.model.layers, removed, strict=True):
        kept = [j for j in range(WIDE) if j not in gone]
        assert [*map(len, gate_and_up(layer.mlp))] == [WIDTH] * 2 and layer.mlp.down_proj.weight.shape == (32, WIDTH)
        assert torch.equal(torch.stack(groups(layer)), torch.stack(groups(old))[kept])
    assert details["removed_zero_share"] == [count / (WIDE - WIDTH) for count in before_freeze]
    assert details["frozen_at_step"] == end
    json.dumps(details)


@pytest.mark.parametrize("bias", [False, True])
def test_the_proximal_step_by_hand(bias: bool) -> None:
    model = toy("llama", layers=1, intermediate_size=WIDE, mlp_bias=bias)
    generator = torch.Generator().manual_seed(3)
    layer, scale = model.model.layers[0], torch.exp(2 * torch.randn(WIDE, generator=generator))
    with torch.no_grad():  # norms over several decades, so that one step zeroes some
        for part in (layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight, layer.mlp.down_proj.weight.T):
            part.mul_(scale[:, None])
    lasso = GroupLasso(model, WIDTH, 50, ramp=0.4)
    before = groups(layer)
    norms = [math.sqrt(sum(x * x for x in group.tolist())) for group in before]
    figures = lasso.after_step(0, 3e-4)
    size = 3 * 32 + 2 * bias
    strength = sorted(norms)[WIDE - WIDTH - 1] / 20 / (3e-4 * math.sqrt(size))
    assert figures["lambda"] == pytest.approx(strength, rel=1e-5)
    largest = sorted(norms)[WIDE - WIDTH - 1]  # of those that go; the others are spared
    expected = [
        group * max(0.0, 1 - 3e-4 * figures["lambda"] * math.sqrt(size) / norm) if norm <= largest else group
        for group, norm in zip(before, norms, strict=True)
    ]
    zeros = sum(not group.any() for group in expected)
    assert 5 < zeros < WIDE - WIDTH
    torch.testing.assert_close(torch.stack(groups(layer)), torch.stack(expected), rtol=2e-6, atol=1e-7)
    assert len(dead(layer)) == zeros == round(figures["zero_share"] * (WIDE - WIDTH))


@pytest.mark.parametrize("kind", [*KINDS, "qwen2", "qwen3", "mistral", "gemma3", "glm4"])
def test_balancing_changes_norms_and_nothing_else(kind: str) -> None:
    changes = {"mlp_bias": True} if "biases" in kind else {}
    model = toy(kind.split()[0], vocabulary=V, **changes).double()
    layer = model.model.layers[0].mlp
    with torch.no_grad():  # dead in one half: nothing to balance
        layer.down_proj.weight[:, 3] = 0
        gate_and_up(layer)[1][5] = 0
        if changes:
            layer.up_proj.bias[5] = 0
    untouched = [groups(model.model.layers[0])[j] for j in (3, 5)]
    gates = [gate_and_up(layer.mlp)[0].clone() for layer in model.model.layers]
    before = logits(model)
    balance(model)
    torch.testing.assert_close(logits(model), before, rtol=1e-11, atol=1e-11)
    assert all(torch.equal(groups(model.model.layers[0])[j], old) for j, old in zip((3, 5), untouched, strict=True))
    for index, (layer, gate) in enumerate(zip((each.mlp for each in model.model.layers), gates, strict=True)):
        up = gate_and_up(layer)[1].square().sum(1)
        if changes:
            up = up + layer.up_proj.bias.square()
        alive = [j for j in range(48) if index or j not in (3, 5)]
        torch.testing.assert_close(up[alive], layer.down_proj.weight.square().sum(0)[alive], rtol=1e-12, atol=0)
        assert torch.equal(gate_and_up(layer)[0], gate)


def test_resumed_equals_uninterrupted() -> None:
    whole = Training("qwen2")
    saved = [whole.steps(moment).save() for moment in (20, 52)]
    whole.steps(62)
    for moment in saved:
        resumed = Training("qwen2").restore(moment).steps(62)
        assert resumed.log == whole.log[moment[-1] :]
        assert resumed.penalty.state_dict() == whole.penalty.state_dict()
        for name, weight in resumed.model.state_dict().items():
            assert torch.equal(weight, whole.model.state_dict()[name]), name
    assert resumed.penalty.finish(resumed.model) == whole.penalty.finish(whole.model)


def test_equal_neurons_do_not_go_together() -> None:
    """A grown donor holds every neuron several times; the layer must still keep `width` that live."""
    model = toy("llama", layers=2, intermediate_size=WIDE)
    with torch.no_grad():
        for layer in model.model.layers:
            for linear, dim in ((layer.mlp.gate_proj, 0), (layer.mlp.up_proj, 0), (layer.mlp.down_proj, 1)):
                first = linear.weight.narrow(dim, 0, 1)
                linear.weight.copy_(first.expand_as(linear.weight).clone())
    lasso = GroupLasso(model, WIDTH, 25, ramp=0.4)
    for step in range(10):
        lasso.after_step(step, 1e-3)
    assert [len(dead(layer)) for layer in model.model.layers] == [WIDE - WIDTH] * 2
    assert lasso.finish(model)[1]["removed_zero_share"] == [1.0, 1.0]


def test_a_ramp_without_rate_is_cut_and_said() -> None:
    """Nothing shrinks at rate 0: the cut is by norm alone, and the details do not hide it."""
    model = toy("llama", layers=1, intermediate_size=WIDE)
    lasso = GroupLasso(model, WIDTH, 50)
    largest = torch.stack(groups(model.model.layers[0])).norm(dim=1).argsort()[-WIDTH:].sort().values
    gates = model.model.layers[0].mlp.gate_proj.weight.detach().clone()
    for step in range(3):
        assert lasso.after_step(step, 0.0)["lambda"] == 0
    _, details = lasso.finish(model)
    assert details["removed_zero_share"] == [0.0] and details["frozen_at_step"] == 3
    assert torch.equal(model.model.layers[0].mlp.gate_proj.weight, gates[largest])


def test_refusals() -> None:
    model = toy("qwen2", layers=1, intermediate_size=WIDE)
    before = logits(model)
    for width in (0, -32, 40, WIDE, 128):
        with pytest.raises(
            RecipeError, match=rf"width is {width}; .* 96 neurons[\s\S]*multiple of 32 below that, such as 32"
        ):
            GroupLasso(model, width, 100)
    with pytest.raises(RecipeError, match=r"train.steps is 30.*\n.*at least 50 steps"):
        GroupLasso(model, WIDTH, 30)
    GroupLasso(toy("qwen2", intermediate_size=WIDE), WIDTH, 50)  # the least it names is enough
    assert torch.equal(logits(model), before)  # refused before anything changes
    other = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    with pytest.raises(DataError, match="`gpt2` is not supported"):
        GroupLasso(other, WIDTH, 100)
