"""Structured cuts: exact where nothing goes, equal to a masked model where something does, best by independent sums."""

from __future__ import annotations

import copy
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from toys import random_prompts, save_toy, toy, toy_tokenizer
from transformers import AutoModelForCausalLM

from distill.data.packing import pack
from distill.errors import DataError, RecipeError
from distill.gguf.families import orders
from distill.gguf.writer import export_gguf
from distill.recipe import parse_recipe
from distill.surgery.cutter import check_cut, cut_folder, scored_logits
from distill.surgery.layers import (
    FAMILIES,
    block_influence,
    check_layers,
    check_width,
    choose_layers,
    choose_neurons,
    cut_parts,
    keep_layers,
    neuron_scores,
    require_floats,
)
from distill.surgery.results import size_of

torch.set_num_threads(1)

V = 61
IDS = torch.randint(0, V, (2, 24), generator=torch.Generator().manual_seed(0))
PROMPTS = random_prompts(18, V, seed=2, shortest=2, longest=28)
BLOCKS = pack([(p, 1) for p in PROMPTS], 32, split_long=False)
TOKENS = sum(map(len, PROMPTS))
CASES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen2 untied": {"tie_word_embeddings": False},
    "qwen3": {},
    "qwen3 tied": {"tie_word_embeddings": True, "head_dim": 24},
    "llama": {},
    "llama tied, with biases": {"mlp_bias": True, "attention_bias": True, "tie_word_embeddings": True},
    "mistral": {},
}
KINDS = [name for name in CASES if " " not in name]
SETTINGS: dict[str, dict[str, Any]] = {  # beside those of toys.FAMILIES
    "gemma3_text": {"tie_word_embeddings": True},
    "gemma2": {"tie_word_embeddings": True},
    "granite": {
        **{"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2},
        "mlp_bias": True,
    },
    "cohere2": {"tie_word_embeddings": True, "sliding_window": 5},
    "seed_oss": {"mlp_bias": True},
}
PLAIN, ODD = [*CASES], ["gemma3_text", "granite", "cohere2"]  # of the others, those of most parts of their own
CASES |= {name: SETTINGS.get(name, {}) for name in FAMILIES if name not in KINDS}


def small(case: str, layers: int = 3, seed: int = 0, **changes: Any) -> Any:
    settings = {"hidden_size": 64, "intermediate_size": 96, "initializer_range": 0.15, **CASES[case], **changes}
    return toy(case.split()[0], vocabulary=V, layers=layers, seed=seed, **settings)


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    return model(ids).logits


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Equal to `tolerance` of the largest value."""
    assert float((found - expected).abs().max()) <= tolerance * float(expected.abs().max())


def works_when_loaded(model: Any, folder: Path) -> Any:
    """Saved and loaded by plain AutoModelForCausalLM: equal logits, and a cache that changes nothing."""
    assert not any(module._forward_pre_hooks for module in model.modules())  # none left behind
    model.save_pretrained(folder)
    again = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert torch.equal(logits(again), logits(model))
    ids = IDS[:1, :6]
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    plain = ids
    for _ in range(6):
        plain = torch.cat([plain, logits(model, plain)[:, -1:].argmax(-1)], 1)
    assert torch.equal(model.generate(ids, **settings), plain)
    out = model(IDS, output_hidden_states=True, use_cache=False)
    assert len(out.hidden_states) == model.config.num_hidden_layers + 1
    out.logits.square().mean().backward()  # what was cut can be trained
    assert all(p.grad is not None for p in model.parameters())
    model.zero_grad()
    return again


def one_by_one(model: Any, module: Any) -> torch.Tensor:
    """Inputs [tokens, ·] in fp64 of a module, each document passed alone as transformers masks it."""
    seen: list[torch.Tensor] = []
    handle = module.register_forward_pre_hook(lambda _m, a: seen.append(a[0][0].double()))
    with torch.no_grad():
        for prompt in PROMPTS:
            model(torch.tensor([prompt]))
    handle.remove()
    return torch.cat(seen)


def silence(layer: Any) -> None:
    """Make a layer the identity."""
    with torch.no_grad():
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight.zero_()
            if linear.bias is not None:
                linear.bias.zero_()


# ---- observing ----


@pytest.mark.parametrize("case", [*KINDS, "qwen2 windows", "qwen3 windows", "mistral windows"])
def test_influence_by_hidden_states(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    windows: dict[str, Any] = {}
    if "windows" in case:
        windows = {"sliding_window": 5}
        if "mistral" not in case:
            windows |= {"use_sliding_window": True, "max_window_layers": 1}
    model = small(case.split()[0], **windows)
    raw = copy.deepcopy(model)
    raw.model.norm = torch.nn.Identity()  # so that the last hidden state is the last layer's output
    with torch.no_grad():
        states = [raw.model(torch.tensor([p]), output_hidden_states=True).hidden_states for p in PROMPTS]
    pairs = [[(s[low][0].double(), s[low + 1][0].double()) for s in states] for low in range(3)]
    cosines = [torch.cat([torch.cosine_similarity(a, b, dim=-1) for a, b in layer]) for layer in pairs]
    for batch in (1, 5):
        monkeypatch.setattr("distill.surgery.layers.BATCH", batch)
        found = block_influence(model, BLOCKS)
        assert found == pytest.approx([1 - float(layer.mean()) for layer in cosines], rel=1e-4, abs=1e-7)


# ---- layers ----


@pytest.mark.parametrize("case", KINDS)
def test_cut_layers_leave_a_model_that_works(case: str, tmp_path: Path) -> None:
    model = small(case, layers=4)
    before, config = logits(model), model.config.to_dict()
    kept, report = choose_layers(model, 2, BLOCKS)
    assert (
        len(kept) == 2 and kept == sorted(kept) == report["kept"] and sorted(kept + report["dropped"]) == [0, 1, 2, 3]
    )
    json.dumps(report, allow_nan=False)
    assert torch.equal(logits(model), before) and model.config.to_dict() == config  # choosing changes nothing
    silent = copy.deepcopy(model)
    for index in report["dropped"]:
        silence(silent.model.layers[index])
    keep_layers(model, kept)
    assert torch.equal(logits(model), logits(silent))
    again = works_when_loaded(model, tmp_path)
    assert again.config.num_hidden_layers == 2 == len(again.model.layers)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_kinds_of_layers_are_cut(kind: str, tmp_path: Path) -> None:
    model = small(kind, layers=5, use_sliding_window=True, sliding_window=6, max_window_layers=2)
    kinds = list(model.config.layer_types)
    assert kinds == ["full_attention"] * 2 + ["sliding_attention"] * 3
    for kept in ([0, 2, 4], [0, 1, 3], [3, 4], [0, 1], [1, 2, 3, 4]):
        cut, silent = copy.deepcopy(model), copy.deepcopy(model)
        for index in set(range(5)) - set(kept):
            silence(silent.model.layers[index])
        keep_layers(cut, kept)
        assert cut.config.layer_types == [kinds[i] for i in kept]
        assert cut.config.max_window_layers == sum(kinds[i] == "full_attention" for i in kept)
        assert cut.model.has_sliding_layers == ("sliding_attention" in cut.config.layer_types)
        close(logits(cut), logits(silent))
        again = works_when_loaded(cut, tmp_path / "-".join(map(str, kept)))
        assert again.config.layer_types == cut.config.layer_types
    before, config = logits(model), model.config.to_dict()
    choose_layers(model, 2, BLOCKS)
    assert torch.equal(logits(model), before) and model.config.to_dict() == config and model.model.has_sliding_layers
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == [0, 1, 2, 3, 4]


def test_layers_of_least_influence_go() -> None:
    """For every number that stays; the first and the last one at the end."""
    model = small("qwen2", layers=6)
    scores = block_influence(model, BLOCKS)
    for keep in range(1, 6):
        kept, report = choose_layers(model, keep, BLOCKS)
        assert report["influence"] == scores and len(kept) == keep and 0 in kept and (5 in kept or keep == 1)
        gone = set(report["dropped"]) - {0, 5}
        assert max([scores[i] for i in gone], default=-1) <= min([scores[i] for i in {1, 2, 3, 4} - gone], default=9)
    assert choose_layers(model, 6, BLOCKS)[0] == [*range(6)]
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[5] = math.nan
    with pytest.raises(DataError, match="not finite"):
        choose_layers(model, 2, BLOCKS)


@pytest.mark.parametrize("case", ["gemma3_text", "cohere2", "smollm3"])
def test_kinds_of_layers_stay_in_an_order_that_gguf_states(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    order = [False, False, False, True, False, False, False, True]  # True: without a window, or without positions
    kinds: dict[str, Any] = {"layer_types": [["sliding_attention", "full_attention"][own] for own in order]}
    kinds = {"no_rope_layers": [int(not own) for own in order]} if case == "smollm3" else kinds
    model = small(case, layers=8, **kinds)
    for layer in (1, 4, 5, 6):  # the order that would stay is none
        silence(model.model.layers[layer])
    kept, _ = choose_layers(model, 4, BLOCKS)
    assert [order[i] for i in kept] in orders(case, 4)
    monkeypatch.setattr("distill.surgery.layers.kinds_of", lambda _: [])
    assert choose_layers(model, 4, BLOCKS)[0] == [0, 2, 3, 7] and [order[i] for i in (0, 2, 3, 7)] not in orders(
        case, 4
    )


# ---- MLP width ----


@pytest.mark.parametrize("case", CASES)
def test_narrow_equals_the_masked_model(case: str, tmp_path: Path) -> None:
    model = small(case)
    masked = copy.deepcopy(model)
    neurons, _ = choose_neurons(model, BLOCKS, 64)
    cut_parts(model, [0, 1, 2], neurons)
    with torch.no_grad():
        for layer, kept in zip(masked.model.layers, neurons, strict=True):
            assert len(kept) == 64 and kept == sorted(set(kept))
            layer.mlp.down_proj.weight[:, sorted(set(range(96)) - set(kept))] = 0
    close(logits(model), logits(masked))
    again = works_when_loaded(model, tmp_path)
    assert again.config.intermediate_size == 64 and size_of(again).mlp == (64, 64, 64)


@pytest.mark.parametrize("case", [*PLAIN, *ODD])
def test_neurons_stay_by_what_they_write(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(case)
    inputs = [one_by_one(model, layer.mlp.down_proj) for layer in model.model.layers]
    assert len(inputs[0]) == TOKENS < BLOCKS.ids.numel()  # padding is there and does not count
    written = [  # the mean length of what each neuron adds to the stream, [F]
        a.abs().mean(0) * layer.mlp.down_proj.weight.detach().double().norm(dim=0)
        for a, layer in zip(inputs, model.model.layers, strict=True)
    ]
    for batch in (1, 4, 100):
        monkeypatch.setattr("distill.surgery.layers.BATCH", batch)
        for scores, expected in zip(neuron_scores(model, BLOCKS), written, strict=True):
            close(scores.double(), expected)
    neurons, shares = choose_neurons(model, BLOCKS, 32)
    assert neurons == [own.topk(32).indices.sort().values.tolist() for own in written]
    assert shares == pytest.approx([float(own.topk(32).values.sum() / own.sum()) for own in written])


# ---- what cannot be ----


QUANTISED: dict[str, dict[str, Any]] = {
    "gptq": {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    "fp8": {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
    "affine": {"quantization": {"group_size": 64, "bits": 4, "mode": "affine"}},  # MLX
    "hf_quant_config.json": {},  # ModelOpt
    "I8": {},  # said by nothing but the files
}


@pytest.mark.parametrize("how", QUANTISED)
def test_a_quantised_donor_is_refused_before_any_work(how: str, tmp_path: Path) -> None:
    """However it says so; a model in floats passes, and its GGUF file, which is imported as floats."""
    folder = save_toy(toy("qwen2", 330), toy_tokenizer(330), tmp_path / "model")
    require_floats(str(folder))
    export_gguf(folder, tmp_path / "model.gguf", "q8_0")
    require_floats(str(tmp_path / "model.gguf"))
    config = json.loads((folder / "config.json").read_text()) | QUANTISED[how]
    (folder / "config.json").write_text(json.dumps(config))
    if how.endswith(".json"):
        (folder / how).write_text("{}")
    if how == "I8":
        save_file({"model.layers.0.mlp.up_proj.weight": torch.ones(4, 4).char()}, folder / "model.safetensors")
    sources = {"sources": [{"kind": "text", "path": "/t"}]}
    values = {"name": "n", "target": {"model": str(folder)}, "cut": {"donor": str(folder)}, "corpus": sources}
    recipe = parse_recipe(values, "test")
    words = rf"quantised \({how}\)[^\n]*\n.*name the model that it was quantised from"
    for check in (lambda: check_cut(recipe), lambda: cut_folder(str(folder), tmp_path / "cut", recipe.cut, [])):
        with pytest.raises(DataError, match=words):
            check()


@pytest.mark.parametrize("kind", KINDS)
def test_cuts_that_cannot_be(kind: str) -> None:
    model = small(kind, hidden_size=256, num_attention_heads=8, num_key_value_heads=4)
    config = model.config
    before, settings = logits(model), config.to_dict()
    check_layers(config, 1), check_layers(config, 3), check_width(config, 96), check_width(config, 32)
    refused: list[tuple[Any, str]] = [
        (lambda: check_layers(config, 0), "1 to 2; 3 would cut none"),
        (lambda: check_layers(config, 4), "1 to 2"),
        (lambda: check_width(config, 128), "64 or 96"),
        *((partial(check_width, config, width), "32 or 64") for width in (40, 0, -32)),
        (lambda: choose_layers(model, 4, BLOCKS), "1 to 2"),
        (lambda: choose_neurons(model, BLOCKS, 40), "32 or 64"),
    ]
    for act, says in refused:
        with pytest.raises(RecipeError, match=says):
            act()
    assert torch.equal(logits(model), before) and config.to_dict() == settings  # refused before anything changed
    config.model_type, config.vocab_size = "gpt_neox", 151_936
    for act in (
        lambda: check_layers(config, 1),
        lambda: check_width(config, 32),
        lambda: choose_layers(model, 1, BLOCKS),
        lambda: choose_neurons(model, BLOCKS, 32),
    ):
        with pytest.raises(DataError, match="`gpt_neox` is not supported") as raised:
            act()
        assert "Qwen/Qwen3-0.6B" in raised.value.hint and ", ".join(FAMILIES) in raised.value.hint


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("granite", {"logits_scaling": 3.0}),
        ("cohere", {"logit_scale": 0.25, "tie_word_embeddings": True}),
        ("gemma2", {"query_pre_attn_scalar": 8, "final_logit_softcapping": 4.0, "tie_word_embeddings": True}),
        ("llama", {}),
    ],
)
def test_logits_of_a_cut_are_the_models_own(kind: str, settings: dict[str, Any]) -> None:
    model = toy(kind, vocabulary=61, **settings)
    ids = [1 + 7 * place % 59 for place in range(12)]
    with torch.no_grad():
        found = scored_logits(model, pack([(ids, 4)], 12, split_long=False))
        own = model(input_ids=torch.tensor([ids])).logits[0, 3:-1]
    assert torch.allclose(found, own, atol=1e-4)
