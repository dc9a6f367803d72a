"""Cutting and growing: exact where nothing changes, equal to a masked model where something does."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from toys import KINDS, disturb, random_prompts, toy
from transformers import AutoModelForCausalLM

from distill.errors import DataError, RecipeError
from distill.packing import pack
from distill.surgery.cut import check_cut, choose_layers, decoder_layers, keep_layers, narrow_mlp, score
from distill.surgery.grow import grow

torch.set_num_threads(1)

V = 61
IDS = torch.randint(0, V, (3, 40), generator=torch.Generator().manual_seed(0))


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    return model(IDS).logits


def reloaded(model: Any, folder: Path) -> Any:
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_keeping_everything_changes_nothing(kind: str, tmp_path: Path) -> None:
    model = toy(kind, layers=4)
    before, config = logits(model), model.config.to_dict()
    if config.get("max_window_layers"):  # beyond the last layer it says no more than all
        config["max_window_layers"] = 4
    keep_layers(model, [0, 1, 2, 3])
    narrow_mlp(model, [list(range(48))] * 4)
    assert torch.equal(logits(model), before)
    assert model.config.to_dict() == config
    assert torch.equal(logits(reloaded(model, tmp_path)), before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kept", [[0, 3], [1, 2, 3], [2], [0, 1, 3]])
def test_kept_layers_are_those_layers(kind: str, kept: list[int], tmp_path: Path) -> None:
    model = toy(kind, layers=4)
    # The same function without surgery: dropped layers write nothing.
    silent = copy.deepcopy(model)
    with torch.no_grad():
        for i in set(range(4)) - set(kept):
            silent.model.layers[i].self_attn.o_proj.weight.zero_()
            silent.model.layers[i].mlp.down_proj.weight.zero_()
    expected = logits(silent)
    keep_layers(model, kept)
    assert torch.equal(logits(model), expected)
    with torch.inference_mode():  # the cache is addressed by layer
        steps, cache = [], None
        for i in range(0, 40, 10):
            out = model(IDS[:, i : i + 10], past_key_values=cache, use_cache=True)
            steps.append(out.logits)
            cache = out.past_key_values
    torch.testing.assert_close(torch.cat(steps, 1), expected, rtol=1e-4, atol=1e-4)
    again = reloaded(model, tmp_path)
    assert again.config.num_hidden_layers == len(kept) == len(again.model.layers)
    assert torch.equal(logits(again), expected)


def test_sliding_layers_keep_their_kind(tmp_path: Path) -> None:
    """qwen2 with windows in its later layers: layer_types and max_window_layers are cut with the layers."""
    model = toy("qwen2", layers=5, use_sliding_window=True, sliding_window=6, max_window_layers=2)
    kinds = list(model.config.layer_types)
    assert kinds == ["full_attention"] * 2 + ["sliding_attention"] * 3
    for kept in ([0, 2, 4], [0, 1, 3], [3, 4], [0, 1]):
        cut, silent = copy.deepcopy(model), copy.deepcopy(model)
        with torch.no_grad():
            for i in set(range(5)) - set(kept):
                silent.model.layers[i].self_attn.o_proj.weight.zero_()
                silent.model.layers[i].mlp.down_proj.weight.zero_()
        keep_layers(cut, kept)
        assert cut.config.layer_types == [kinds[i] for i in kept]
        assert cut.config.max_window_layers == sum(kinds[i] == "full_attention" for i in kept)
        torch.testing.assert_close(logits(cut), logits(silent), rtol=1e-6, atol=1e-6)
        again = reloaded(cut, tmp_path / "-".join(map(str, kept)))
        assert again.config.layer_types == [kinds[i] for i in kept]
        torch.testing.assert_close(logits(again), logits(silent), rtol=1e-6, atol=1e-6)


def test_layer_rules() -> None:
    even = [0.5] * 6
    assert choose_layers(even, 6, "last-but-one") == [0, 1, 2, 3, 4, 5] == choose_layers(even, 6, "influence")
    assert choose_layers(even, 4, "last-but-one") == [0, 1, 2, 5]
    assert choose_layers(even, 2, "last-but-one") == [0, 5]
    assert choose_layers(even, 1, "last-but-one") == [5]
    found = [0.0, 0.4, 0.1, 0.9, 0.2, 0.0]  # the least influential are the first and the last, which stay
    assert choose_layers(found, 5, "influence") == [0, 1, 3, 4, 5]
    assert choose_layers(found, 4, "influence") == [0, 1, 3, 5]
    assert choose_layers(found, 3, "influence") == [0, 3, 5]
    assert choose_layers(found, 2, "influence") == [0, 5]
    assert choose_layers(found, 1, "influence") == [0]
    assert choose_layers([0.3], 1, "influence") == [0] == choose_layers([0.3], 1, "last-but-one")
    for rule in ("influence", "last-but-one"):
        for keep in range(1, 7):
            kept = choose_layers(found, keep, rule)
            assert len(kept) == keep and kept == sorted(set(kept))


@pytest.mark.parametrize("kind", [*KINDS, "llama with biases"])
def test_narrow_mlp_equals_the_masked_model(kind: str, tmp_path: Path) -> None:
    changes = {"mlp_bias": True, "attention_bias": True} if "biases" in kind else {}
    model = toy(kind.split()[0], layers=3, **changes)
    generator = torch.Generator().manual_seed(4)
    kept = [torch.randperm(48, generator=generator)[:32].sort().values.tolist() for _ in range(3)]
    masked = copy.deepcopy(model)
    with torch.no_grad():
        for layer, own in zip(masked.model.layers, kept, strict=True):
            gone = sorted(set(range(48)) - set(own))
            layer.mlp.down_proj.weight[:, gone] = 0
    narrow_mlp(model, kept)
    torch.testing.assert_close(logits(model), logits(masked), rtol=1e-5, atol=2e-5)
    again = reloaded(model, tmp_path)
    assert again.config.intermediate_size == 32
    assert again.model.layers[0].mlp.gate_proj.weight.shape == (32, 32)
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("kind", KINDS)
def test_scores_by_hidden_states(kind: str) -> None:
    """Against one document at a time, hidden states as the library returns them and MLP inputs worked out from them."""
    model = toy(kind, layers=3)
    prompts = random_prompts(11, V, seed=2, shortest=2, longest=20)
    blocks = pack([(p, 1) for p in prompts], 24, split_long=False)
    assert int((blocks.documents < 0).sum()) > 0  # padding must not count
    cosines: list[list[float]] = [[] for _ in range(3)]
    squares = [torch.zeros(48, dtype=torch.float64) for _ in range(3)]
    outputs: list[torch.Tensor] = []
    # The library's last hidden state is taken after the final norm: take the block's own output.
    handle = model.model.layers[-1].register_forward_hook(
        lambda _m, _a, out: outputs.append(out[0] if isinstance(out, tuple) else out)
    )
    with torch.inference_mode():
        for prompt in prompts:
            found = model.model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
            states = [h.reshape(len(prompt), -1) for h in (*found[:3], outputs.pop())]
            for i in range(3):
                before, after = states[i].double(), states[i + 1].double()
                cosines[i] += ((before * after).sum(-1) / before.norm(dim=-1) / after.norm(dim=-1)).tolist()
    handle.remove()
    with torch.inference_mode():
        for prompt in prompts:
            seen: list[torch.Tensor] = []
            handles = [
                layer.mlp.register_forward_pre_hook(lambda _m, a, s=seen: s.append(a[0]))
                for layer in model.model.layers
            ]
            model.model(torch.tensor([prompt]))
            for h in handles:
                h.remove()
            for i, (x, layer) in enumerate(zip(seen, model.model.layers, strict=True)):
                gate, up = x[0] @ layer.mlp.gate_proj.weight.T, x[0] @ layer.mlp.up_proj.weight.T
                squares[i] += (gate * torch.sigmoid(gate) * up).double().square().sum(0)
    total = sum(map(len, prompts))
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    for batch in (1, 4):
        influence, neurons = score(model, blocks, batch)
        assert influence == pytest.approx([1 - sum(c) / total for c in cosines], rel=1e-4, abs=1e-5)
        for i, layer in enumerate(model.model.layers):
            columns = layer.mlp.down_proj.weight.detach().double().square().sum(0)
            torch.testing.assert_close(neurons[i], squares[i] / total * columns, rtol=1e-4, atol=1e-8)
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks  # none left behind


def test_cuts_that_are_refused() -> None:
    def recipe(layers: int, width: int | None) -> Any:
        return SimpleNamespace(draft=SimpleNamespace(layers=layers, mlp_width=width))

    check_cut(recipe(4, None), 4, 96)
    check_cut(recipe(1, 96), 4, 96)
    for layers, width in ((5, None), (2, 128), (2, 40)):
        with pytest.raises(RecipeError):
            check_cut(recipe(layers, width), 4, 96)
    other = toy()
    other.config.model_type = "gpt_neox"
    with pytest.raises(DataError, match="gpt_neox"):
        decoder_layers(other)


@pytest.mark.parametrize("layers", [2, 3, 5, 8])
@pytest.mark.parametrize("tile", [1, 2, 3, 4])
def test_grown_models_say_the_same(tile: int, layers: int) -> None:
    model = toy("qwen2", layers=2, seed=tile)
    disturb(model, 99, 0.3)
    before = copy.deepcopy(model.state_dict())
    larger = grow(model, tile, layers)
    assert larger.config.hidden_size == 32 * tile and larger.config.intermediate_size == 48 * tile
    assert larger.config.num_hidden_layers == layers == len(larger.model.layers)
    expected, found = logits(model), logits(larger)
    # relative to the logits' size: sums are over more terms
    assert float((expected - found).abs().max()) <= 1e-5 * max(1.0, float(expected.abs().max()))
    assert not larger.training and larger.lm_head.weight is larger.model.embed_tokens.weight
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_grown_models_decode_and_reload(tmp_path: Path) -> None:
    model = toy("qwen2", layers=3, seed=5)
    larger = grow(model, 3, 5)
    ids = IDS[:1, :5]

    def greedy(m: Any) -> list[int]:
        return m.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False, pad_token_id=0)[
            0
        ].tolist()

    assert greedy(larger) == greedy(model)
    torch.testing.assert_close(logits(reloaded(larger, tmp_path)), logits(larger), rtol=1e-6, atol=1e-6)


def test_grown_sliding_windows() -> None:
    """Windows shorter than the text stay where they were."""
    model = toy("qwen2", layers=3, use_sliding_window=True, sliding_window=6, max_window_layers=1)
    for layers in (3, 5):
        larger = grow(model, 2, layers)
        torch.testing.assert_close(logits(larger), logits(model), rtol=1e-4, atol=1e-4)


def test_growth_that_is_refused() -> None:
    with pytest.raises(DataError, match="already has 2"):
        grow(toy("qwen2"), 2, 1)
    for other in (toy("llama"), toy("qwen3"), toy("qwen2", tie_word_embeddings=False)):
        with pytest.raises(DataError, match="only qwen2"):
            grow(other, 2, 2)
