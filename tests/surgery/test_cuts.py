"""Structured cuts: exact where nothing goes, equal to a masked model where something does, best by independent sums."""

from __future__ import annotations

import copy
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import random_prompts, toy
from transformers import AutoModelForCausalLM

from distill.errors import DataError, RecipeError
from distill.packing import Packed, pack
from distill.surgery.change import size_of
from distill.surgery.cuts.attention import check_kv_heads, drop_kv_groups, group_scores, keep_kv_groups
from distill.surgery.cuts.hidden import check_hidden, hidden_scores, narrow_hidden, norm_ratios
from distill.surgery.cuts.layers import check_layers, choose_layers, keep_layers, parse_layers
from distill.surgery.cuts.width import check_width, layer_scores, narrow, repaired_down
from distill.surgery.observe import angular_distances, block_influence, observe, walk_grams

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
RULES = ("last-but-one", "influence", "angular", "greedy", "explicit")


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


def kl_to(model: Any) -> Any:
    distribution = logits(model).log_softmax(-1)
    return lambda draft: float((distribution.exp() * (distribution - logits(draft).log_softmax(-1))).sum(-1).mean())


def chosen(model: Any, keep: int | None, rule: str, **changes: Any) -> tuple[list[int], dict[str, Any]]:
    """`choose_layers` on BLOCKS, by the KL to the model itself."""
    return choose_layers(model, keep, rule, **{"blocks": BLOCKS, "loss": kl_to(model), **changes})


def silence(layer: Any) -> None:
    """Make a layer the identity."""
    with torch.no_grad():
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight.zero_()
            if linear.bias is not None:
                linear.bias.zero_()


# ---- nothing cut ----


@pytest.mark.parametrize("case", CASES)
def test_keeping_everything_changes_nothing(case: str) -> None:
    model = small(case)
    before, parameters = logits(model), {name: value.clone() for name, value in model.state_dict().items()}
    keep_layers(model, [0, 1, 2])
    for ridge, sequential in ((0.0, True), (1e-3, False), (10.0, True)):
        found = narrow(model, BLOCKS, 96, ridges=[ridge], sequential=sequential)
        assert found["lost"] == found["lost_without_repair"] == [0, 0, 0] and found["score_kept"] == [1, 1, 1]
    drop_kv_groups(model, BLOCKS, 2)
    narrow_hidden(model, BLOCKS, 64)
    assert torch.equal(logits(model), before)
    assert all(torch.equal(value, parameters[name]) for name, value in model.state_dict().items())
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert tied == bool(model.config.tie_word_embeddings)


# ---- observing ----


@pytest.mark.parametrize("case", [*KINDS, "qwen2 windows", "qwen3 windows", "mistral windows"])
def test_angles_and_influence_by_hidden_states(case: str) -> None:
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
    influence = block_influence(model, BLOCKS, 5)
    for batch in (1, 5):
        found = angular_distances(model, BLOCKS, batch)
        assert found.shape == (3, 4)
        for low, apart in itertools.product(range(3), range(4)):
            if low + apart > 3:
                assert found[low, apart] == math.inf
                continue
            pairs = [(s[low][0].double(), s[low + apart][0].double()) for s in states]
            cosines = torch.cat([torch.cosine_similarity(a, b, dim=-1) for a, b in pairs]).clamp(-1, 1)
            assert float(found[low, apart]) == pytest.approx(float(cosines.arccos().mean() / math.pi), abs=1e-6)
            if apart == 1:
                assert influence[low] == pytest.approx(1 - float(cosines.mean()), rel=1e-4, abs=1e-7)


def whole_gram(model: Any, blocks: Packed, index: int = 0) -> torch.Tensor:
    """Σ a aᵀ / tokens [F, F] of one layer, a being the input of down_proj, by a whole pass of the model."""
    down = model.model.layers[index].mlp.down_proj
    total = torch.zeros(down.in_features, down.in_features)

    def add(a: torch.Tensor) -> None:
        total.addmm_(a.T, a)

    return total / observe(model, blocks, [(down, add)])


@pytest.mark.parametrize("case", KINDS)
def test_grams_by_documents(case: str) -> None:
    model = small(case)
    inputs = [one_by_one(model, layer.mlp.down_proj) for layer in model.model.layers]
    assert len(inputs[0]) == TOKENS < BLOCKS.ids.numel()  # padding is there and does not count
    for batch, sequential in ((1, True), (4, False), (100, True)):
        found: dict[int, torch.Tensor] = {}
        walk_grams(model, BLOCKS, found.__setitem__, sequential=sequential, batch=batch)
        assert list(found) == [0, 1, 2]
        for index, gram in found.items():
            assert gram.dtype == torch.float32
            close(gram, (inputs[index].T @ inputs[index] / TOKENS).float())


def test_blocks_without_tokens_are_refused() -> None:
    empty = Packed(*(x[:1] for x in (BLOCKS.ids, torch.full_like(BLOCKS.documents, -1), BLOCKS.positions, BLOCKS.mask)))
    for act in (block_influence, whole_gram, lambda m, b: narrow(m, b, 32), lambda m, b: drop_kv_groups(m, b, 1)):
        with pytest.raises(DataError, match="no token"):
            act(small("qwen2"), empty)


# ---- layers ----


@pytest.mark.parametrize("case", KINDS)
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_leaves_a_model_that_works(case: str, rule: str, tmp_path: Path) -> None:
    model = small(case, layers=4)
    before, config = logits(model), model.config.to_dict()
    arguments: dict[str, Any] = {"drop": "1-2"} if rule == "explicit" else {}
    kept, report = chosen(model, 2, rule, **arguments)
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
    kept, _ = chosen(model, 2, "greedy")  # with windows that come and go
    assert torch.equal(logits(model), before) and model.config.to_dict() == config and model.model.has_sliding_layers
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("case", "planted"), [*zip(CASES, itertools.cycle((1, 2)), strict=False)])
def test_a_planted_identity_goes_first(case: str, planted: int) -> None:
    model = small(case, layers=4)
    silence(model.model.layers[planted])
    assert block_influence(model, BLOCKS)[planted] == 0 == angular_distances(model, BLOCKS)[planted, 1]
    for rule in ("influence", "angular", "greedy"):
        kept, report = chosen(model, 3, rule)
        assert report["dropped"] == [planted], rule
    before = logits(model)
    keep_layers(model, kept)
    assert torch.equal(logits(model), before)


def test_a_planted_run_is_found_whole() -> None:
    """Angular takes the run of two that together do nothing, though each alone does much."""
    model = small("llama", layers=5)
    silence(model.model.layers[1])
    silence(model.model.layers[2])
    shift = torch.zeros(64)
    shift[:8] = 3.0
    handles = [
        model.model.layers[1].register_forward_hook(lambda _m, _a, out: out + shift),
        model.model.layers[2].register_forward_hook(lambda _m, _a, out: out - shift),
    ]
    distances = angular_distances(model, BLOCKS)
    kept, report = chosen(model, 3, "angular")
    for handle in handles:
        handle.remove()
    assert distances[1, 1] > 0.05 and distances[2, 1] > 0.05 and distances[1, 2] < 1e-4
    assert kept == [0, 3, 4] and report["distance"] == pytest.approx(float(distances[1, 2]))


def test_greedy_by_brute_force() -> None:
    model = small("qwen3", layers=5)
    loss = kl_to(small("qwen3", layers=5, seed=1))
    kept, report = chosen(model, 3, "greedy", loss=loss)
    assert report["evaluations"] == 9

    def without(dropped: set[int]) -> float:
        cut = copy.deepcopy(model)
        keep_layers(cut, [i for i in range(5) if i not in dropped])
        return float(loss(cut))

    gone: set[int] = set()
    for step in report["steps"]:
        losses = {i: without(gone | {i}) for i in range(5) if i not in gone}
        assert step == {"removed": min(losses, key=lambda i: losses[i]), "loss": pytest.approx(min(losses.values()))}
        gone.add(step["removed"])
    assert set(kept) == set(range(5)) - gone
    with pytest.raises(DataError, match="not finite"):
        chosen(model, 4, "greedy", loss=lambda _m: math.nan)

    def broken(_model: Any) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chosen(model, 4, "greedy", loss=broken)
    assert len(model.model.layers) == 5 == model.config.num_hidden_layers  # put back


def test_layer_rules_for_every_number() -> None:
    model = small("qwen2", layers=6)
    influence = block_influence(model, BLOCKS)
    distances = angular_distances(model, BLOCKS)
    for keep in range(1, 7):
        n = 6 - keep
        kept, _ = chosen(model, keep, "last-but-one")
        assert kept == [i for i in range(6) if not 5 - n <= i < 5]
        kept, report = chosen(model, keep, "influence")
        assert report["influence"] == influence and len(kept) == keep and 0 in kept and (5 in kept or keep == 1)
        gone = set(report["dropped"]) - {0, 5}
        assert max([influence[i] for i in gone], default=-1) <= min(
            [influence[i] for i in {1, 2, 3, 4} - gone], default=9
        )
        kept, report = chosen(model, keep, "angular")
        gone_run = report["dropped"]
        assert 5 in kept and gone_run == list(range(gone_run[0], gone_run[0] + n)) if n else kept == list(range(6))
        assert report["distance"] == min(float(distances[low, n]) for low in range(6 - n if n else 1))


def test_parse_layers() -> None:
    assert parse_layers("14-21", 24) == list(range(14, 22))
    assert parse_layers("3,7", 24) == [3, 7] == parse_layers(" 7, 3 ", 24)
    assert parse_layers("9, 0-2", 24) == [0, 1, 2, 9]
    for text, says in (
        ("24", "no layer 24"),
        ("20-30", "no layer 30"),
        ("3,2-4", "twice: 3"),
        ("0-23", "all 24 layers"),
        ("7-3", "names no layers"),
        ("", "names no layers"),
        ("3,,4", "names no layers"),
        ("a-b", "names no layers"),
        ("1-2-3", "names no layers"),
        ("-1", "names no layers"),
    ):
        with pytest.raises(RecipeError, match=says):
            parse_layers(text, 24)


# ---- MLP width ----


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("score", ["activation", "magnitude", "first"])
def test_narrow_equals_the_masked_model(case: str, score: str, tmp_path: Path) -> None:
    model = small(case)
    masked = copy.deepcopy(model)
    found = narrow(model, BLOCKS, 64, score=score, repair=False)
    json.dumps(found, allow_nan=False)
    with torch.no_grad():
        for layer, kept in zip(masked.model.layers, found["neurons"], strict=True):
            assert len(kept) == 64 and kept == sorted(set(kept))
            layer.mlp.down_proj.weight[:, sorted(set(range(96)) - set(kept))] = 0
    assert (found["neurons"] == [list(range(64))] * 3) == (score == "first")
    close(logits(model), logits(masked))
    again = works_when_loaded(model, tmp_path)
    assert again.config.intermediate_size == 64 and size_of(again).mlp == (64, 64, 64)


@pytest.mark.parametrize("case", KINDS)
def test_neuron_scores_by_definition(case: str) -> None:
    model = small(case)
    for layer in model.model.layers:
        a, mlp = one_by_one(model, layer.mlp.down_proj), layer.mlp
        activation = layer_scores(layer, "activation", a.square().mean(0))
        magnitude = layer_scores(layer, "magnitude")
        for j in (0, 17, 95):
            column = mlp.down_proj.weight[:, j].detach().double()
            written = a[:, j, None] * column  # what the neuron adds to the stream, token by token
            assert float(activation[j]) == pytest.approx(float(written.square().sum(1).mean()), rel=1e-4)
            scale = layer.post_attention_layernorm.weight.detach()
            rows = [float((linear.weight.detach()[j] * scale).norm()) for linear in (mlp.gate_proj, mlp.up_proj)]
            assert float(magnitude[j]) == pytest.approx(rows[0] * rows[1] * float(column.norm()), rel=1e-4)


@pytest.mark.parametrize("case", ["qwen2", "qwen3", "llama tied, with biases", "mistral"])
@pytest.mark.parametrize("ridge", [1e-3, 0.1])
def test_repair_by_least_squares(case: str, ridge: float, tmp_path: Path) -> None:
    """The first layer against lstsq in fp64 on the inputs themselves, and what it does to the MLP's output."""
    model = small(case)
    original = copy.deepcopy(model)
    plain, first = copy.deepcopy(model), original.model.layers[0].mlp
    found = narrow(model, BLOCKS, 64, ridges=[ridge])
    unrepaired = narrow(plain, BLOCKS, 64, repair=False)
    kept = found["neurons"][0]
    assert kept == unrepaired["neurons"][0]
    gone = sorted(set(range(96)) - set(kept))
    a, x = one_by_one(original, first.down_proj), one_by_one(original, first)
    weight = first.down_proj.weight.detach().double()
    root = math.sqrt(ridge * float(a.square().mean()) * len(a))
    rows = torch.cat([a[:, kept], root * torch.eye(64, dtype=torch.float64)])
    wanted = torch.cat([a[:, gone] @ weight[:, gone].T, torch.zeros(64, 64, dtype=torch.float64)])
    expected = weight[:, kept] + torch.linalg.lstsq(rows, wanted, driver="gelsd").solution.T
    close(model.model.layers[0].mlp.down_proj.weight.detach().double(), expected, 1e-4)
    if first.down_proj.bias is not None:
        assert torch.equal(model.model.layers[0].mlp.down_proj.bias, first.down_proj.bias)
    with torch.no_grad():
        x = x.float()
        full = first(x)
        bias = 0 if first.down_proj.bias is None else first.down_proj.bias
        errors = [
            float((m.model.layers[0].mlp(x) - full).square().sum() / (full - bias).square().sum())
            for m in (model, plain)
        ]
    assert errors == pytest.approx([found["lost"][0], found["lost_without_repair"][0]], rel=1e-3)
    assert all(low < high for low, high in zip(found["lost"], found["lost_without_repair"], strict=True))
    assert unrepaired["lost"] == unrepaired["lost_without_repair"]
    works_when_loaded(model, tmp_path)


@pytest.mark.parametrize("sequential", [True, False])
@pytest.mark.parametrize("case", ["qwen2", "mistral", "llama tied, with biases"])
def test_walking_equals_a_pass_per_layer(case: str, sequential: bool) -> None:
    """Against the Gram matrix of the model cut so far (or uncut), one whole pass for each layer."""
    model = small(case)
    uncut, cut = copy.deepcopy(model), copy.deepcopy(model)
    found = narrow(model, BLOCKS, 32, sequential=sequential, batch=3)
    for index, layer in enumerate(cut.model.layers):
        gram = whole_gram(cut if sequential else uncut, BLOCKS, index)
        kept = layer_scores(layer, "activation", gram.diagonal()).topk(32).indices.sort().values
        assert kept.tolist() == found["neurons"][index]
        weight, _ = repaired_down(layer.mlp.down_proj.weight.detach(), gram, kept, 1e-3)
        close(model.model.layers[index].mlp.down_proj.weight.detach(), weight, 1e-3)
        with torch.no_grad():  # the same function, by masking
            layer.mlp.down_proj.weight.zero_()
            layer.mlp.down_proj.weight[:, kept] = model.model.layers[index].mlp.down_proj.weight
    close(logits(model), logits(cut))


def test_planted_neurons_are_found() -> None:
    """A third of the neurons dead, the rest in pairs of duplicates: both go without loss."""
    for case in ("qwen2", "qwen3", "llama tied, with biases"):
        model = small(case, layers=2)
        generator = torch.Generator().manual_seed(3)
        planted = []
        with torch.no_grad():
            for layer in model.model.layers:
                order = torch.randperm(96, generator=generator)
                dead, ones, twins = order[:32], order[32:64], order[64:]
                mlp = layer.mlp
                for linear in (mlp.gate_proj, mlp.up_proj):
                    linear.weight[twins] = linear.weight[ones]
                    linear.weight[dead] = 0
                    if linear.bias is not None:
                        linear.bias[twins] = linear.bias[ones]
                        linear.bias[dead] = 0
                mlp.down_proj.weight[:, twins] = mlp.down_proj.weight[:, ones].flip(0) * 0.05  # other outputs, and weak
                planted.append((sorted(ones.tolist()), sorted(ones.tolist() + twins.tolist())))
        before = logits(model)
        for score in ("activation", "magnitude"):
            for sequential in (True, False):
                without_dead, without_twins = copy.deepcopy(model), copy.deepcopy(model)
                found = narrow(without_dead, BLOCKS, 64, score=score, repair=False, sequential=sequential)
                assert found["neurons"] == [both for _, both in planted]
                assert found["score_kept"] == pytest.approx([1, 1])
                close(logits(without_dead), before)
                plain = copy.deepcopy(model)
                assert narrow(plain, BLOCKS, 32, score=score, repair=False)["neurons"] == [ones for ones, _ in planted]
                loss = float((logits(plain) - before).abs().max())
                for ridge in (0.0, 1e-6):
                    repaired = copy.deepcopy(without_twins)
                    found = narrow(repaired, BLOCKS, 32, score=score, ridges=[ridge], sequential=sequential)
                    assert found["neurons"] == [ones for ones, _ in planted] and max(found["lost"]) < 1e-7
                    close(logits(repaired), before, 1e-4)
                    assert float((logits(repaired) - before).abs().max()) < 0.01 * loss


def test_ridge_is_chosen_by_loss() -> None:
    model = small("qwen2")
    target = kl_to(model)
    single = {}
    for ridge in (1e-4, 1e-2, 1.0):
        single[ridge] = copy.deepcopy(model)
        narrow(single[ridge], BLOCKS, 64, ridges=[ridge])
    losses = [target(m) for m in single.values()]
    chosen = copy.deepcopy(model)
    found = narrow(chosen, BLOCKS, 64, ridges=list(single), loss=target)
    assert found["losses"] == losses and found["ridge"] == list(single)[losses.index(min(losses))]
    assert torch.equal(logits(chosen), logits(single[found["ridge"]]))
    worst = narrow(model, BLOCKS, 64, ridges=list(single), loss=lambda m: -target(m))  # not just the first or last
    assert worst["ridge"] == list(single)[losses.index(max(losses))] != found["ridge"]
    assert torch.equal(logits(model), logits(single[worst["ridge"]]))
    with pytest.raises(DataError, match="not finite"):
        narrow(small("qwen2"), BLOCKS, 64, ridges=[0.1, 1.0], loss=lambda _m: math.nan)


# ---- attention ----


@pytest.mark.parametrize(("case", "keep"), [*zip(CASES, itertools.cycle((1, 2)), strict=False)])
def test_kv_groups_equal_the_masked_model(case: str, keep: int, tmp_path: Path) -> None:
    model = small(case, num_attention_heads=8, num_key_value_heads=4)
    size = model.model.layers[0].self_attn.head_dim
    masked = copy.deepcopy(model)
    scores = group_scores(model, BLOCKS)
    for index, layer in enumerate(model.model.layers):
        projection = layer.self_attn.o_proj
        x = one_by_one(model, projection)
        for group in range(4):
            part = slice(group * 2 * size, (group + 1) * 2 * size)
            written = x[:, part] @ projection.weight.detach().double()[:, part].T
            assert scores[index][group] == pytest.approx(float(written.square().sum(1).mean()), rel=1e-4)
    found = drop_kv_groups(model, BLOCKS, keep)
    json.dumps(found, allow_nan=False)
    with torch.no_grad():
        for layer, own, groups in zip(masked.model.layers, scores, found["groups"], strict=True):
            gone = sorted(range(4), key=lambda i: own[i])[: 4 - keep]
            assert groups == sorted(set(range(4)) - set(gone))
            for group in gone:
                layer.self_attn.o_proj.weight[:, group * 2 * size : (group + 1) * 2 * size] = 0
    close(logits(model), logits(masked))
    again = works_when_loaded(model, tmp_path)
    config = again.config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (2 * keep, keep, size)
    assert again.model.layers[0].self_attn.q_proj.weight.shape == (2 * keep * size, 64)


def test_a_silent_group_goes_first() -> None:
    model = small("qwen2", num_attention_heads=8, num_key_value_heads=4)
    with torch.no_grad():
        for layer, silent in zip(model.model.layers, (2, 0, 3), strict=True):
            layer.self_attn.o_proj.weight[:, silent * 16 : silent * 16 + 16] = 0
    before = logits(model)
    found = drop_kv_groups(model, BLOCKS, 3)
    assert found["groups"] == [[0, 1, 3], [1, 2, 3], [0, 1, 2]]
    assert found["score_kept"] == [1, 1, 1]
    close(logits(model), before)


# ---- hidden size ----


@pytest.mark.parametrize("case", CASES)
def test_hidden_equals_the_masked_model(case: str, tmp_path: Path) -> None:
    model = small(case, layers=2, hidden_size=128)
    tied = bool(model.config.tie_word_embeddings)
    masked = copy.deepcopy(model)
    found = narrow_hidden(model, BLOCKS, 64)
    json.dumps(found, allow_nan=False)
    kept = torch.zeros(128, dtype=torch.bool)
    kept[found["dimensions"]] = True
    assert int(kept.sum()) == 64
    norms = [n for layer in masked.model.layers for n in (layer.input_layernorm, layer.post_attention_layernorm)]
    for norm, ratio in zip([*norms, masked.model.norm], found["norm_ratios"], strict=True):
        with torch.no_grad():  # zeros stand in the mean square of the masked model: half of it is left
            norm.weight *= ratio * math.sqrt(0.5)
    with torch.no_grad():
        masked.model.embed_tokens.weight[:, ~kept] = 0
        for layer in masked.model.layers:
            for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
                linear.weight[~kept] = 0
                if linear.bias is not None:
                    linear.bias[~kept] = 0
    close(logits(model), logits(masked), 1e-4)  # ε weighs twice as much in the masked mean square
    again = works_when_loaded(model, tmp_path)
    assert again.lm_head.weight.shape == (V, 64)
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert again.config.hidden_size == 64
    assert (
        again.model.layers[0].self_attn.q_proj.weight.shape[0] == masked.model.layers[0].self_attn.q_proj.out_features
    )


@pytest.mark.parametrize("case", ["qwen2", "qwen3", "llama tied, with biases"])
def test_hidden_scores_and_ratios_by_definition(case: str) -> None:
    model = small(case, layers=2)
    places = [
        place
        for layer in model.model.layers
        for place in (
            (layer.input_layernorm, [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]),
            (layer.post_attention_layernorm, [layer.mlp.gate_proj, layer.mlp.up_proj]),
        )
    ]
    places.append((model.model.norm, [model.lm_head]))
    kept = torch.arange(0, 64, 3)
    expected = torch.zeros(64, dtype=torch.float64)
    ratios = norm_ratios(model, BLOCKS, kept)
    for (norm, matrices), ratio in zip(places, ratios, strict=True):
        state = one_by_one(model, norm)
        with torch.no_grad():
            read = norm(state.float()).double()
        stacked = torch.cat([matrix.weight.detach().double() for matrix in matrices])
        own = read.square().mean(0) * stacked.square().sum(0)
        expected += own / own.sum() / len(places)
        # The best scale, by least squares of the norm over the kept dimensions on the full one, row by row.
        part, full = state[:, kept], state[:, kept] / state.square().mean(1, keepdim=True).sqrt()
        part = part / part.square().mean(1, keepdim=True).sqrt()
        assert ratio == pytest.approx(float((part * full).sum() / part.square().sum()), rel=1e-4)
    close(hidden_scores(model, BLOCKS), expected.float(), 1e-4)


@pytest.mark.parametrize("case", CASES)
def test_silent_dimensions_go_without_loss(case: str) -> None:
    model = small(case, layers=2, hidden_size=128)
    silent = torch.randperm(128, generator=torch.Generator().manual_seed(1))[:64]
    with torch.no_grad():
        model.model.embed_tokens.weight[:, silent] = 0
        for layer in model.model.layers:
            for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
                linear.weight[silent] = 0
                if linear.bias is not None:
                    linear.bias[silent] = 0
    before = logits(model)
    found = narrow_hidden(model, BLOCKS, 64)
    assert found["dimensions"] == sorted(set(range(128)) - set(silent.tolist()))
    assert found["norm_ratios"] == pytest.approx([math.sqrt(2)] * 5, rel=1e-4)
    assert found["score_kept"] == pytest.approx(1)
    close(logits(model), before, 1e-4)


# ---- together, and what cannot be ----


@pytest.mark.parametrize("case", CASES)
def test_all_cuts_together(case: str, tmp_path: Path) -> None:
    model = small(case, layers=4, hidden_size=128, num_attention_heads=8, num_key_value_heads=4)
    before = size_of(model)
    keep_layers(model, chosen(model, 2, "angular")[0])
    drop_kv_groups(model, BLOCKS, 2)
    narrow_hidden(model, BLOCKS, 64)
    narrow(model, BLOCKS, 64)
    after = size_of(works_when_loaded(model, tmp_path))
    assert (after.layers, after.hidden, after.mlp, after.heads, after.kv_heads) == (2, 64, (64, 64), 4, 2)
    assert after.parameters < before.parameters / 2 and after.tied == before.tied


@pytest.mark.parametrize("kind", KINDS)
def test_cuts_that_cannot_be(kind: str) -> None:
    model = small(kind, hidden_size=256, num_attention_heads=8, num_key_value_heads=4)
    config = model.config
    before, settings = logits(model), config.to_dict()
    check_layers(config, 1), check_layers(config, 3), check_width(config, 96), check_width(config, 32)
    (
        check_kv_heads(config, 2),
        check_hidden(config, 128),
        check_hidden(config, 256),
    )
    refused: list[tuple[Any, str]] = [
        (lambda: check_layers(config, 0), "1 to 3"),
        (lambda: check_layers(config, 4), "1 to 3"),
        (lambda: check_width(config, 40), "32 or 64"),
        (lambda: check_width(config, 128), "64 or 96"),
        (lambda: check_width(config, 0), "32"),
        (lambda: check_width(config, -32), "32"),
        (lambda: check_kv_heads(config, 0), "possible: 1, 2"),
        (lambda: check_kv_heads(config, 5), "possible: 1, 2"),
        (lambda: check_hidden(config, 100), "64 or 128"),
        (lambda: check_hidden(config, 320), "192 or 256"),
        (lambda: check_hidden(config, 0), "64"),
        (lambda: chosen(model, 4, "greedy", loss=kl_to(model)), "1 to 3"),
        (lambda: keep_layers(model, []), "0 to 2"),
        (lambda: keep_layers(model, [0, 3]), "0 to 2"),
        (lambda: keep_layers(model, [1, 0]), "ascending"),
        (lambda: narrow(model, BLOCKS, 40), "32 or 64"),
        (lambda: drop_kv_groups(model, BLOCKS, 5), "possible"),
        (lambda: keep_kv_groups(model, [[0], [0, 1], [0]]), "equally many"),
        (lambda: keep_kv_groups(model, [[0], [4], [0]]), "0 to 3"),
        (lambda: keep_kv_groups(model, [[], [], []]), "possible"),
        (lambda: narrow_hidden(model, BLOCKS, 100), "64 or 128"),
    ]
    for act, says in refused:
        with pytest.raises(RecipeError, match=says):
            act()
    assert torch.equal(logits(model), before) and config.to_dict() == settings  # refused before anything changed
    config.model_type = "gpt_neox"
    for act in (
        lambda: check_layers(config, 1),
        lambda: check_width(config, 32),
        lambda: check_kv_heads(config, 1),
        lambda: check_hidden(config, 64),
        lambda: chosen(model, 1, "last-but-one"),
        lambda: narrow(model, BLOCKS, 32),
    ):
        with pytest.raises(DataError, match="supported: qwen2, qwen3, llama, mistral"):
            act()


def test_llama_needs_heads_that_divide_the_hidden_size() -> None:
    """transformers loads no other; the other architectures it does."""
    for kind in KINDS:
        config = small(kind, num_attention_heads=8, num_key_value_heads=4).config
        if kind == "llama":
            with pytest.raises(RecipeError, match="possible: 1, 2, 4"):
                check_kv_heads(config, 3)
        else:
            check_kv_heads(config, 3)
    config = small("llama", hidden_size=384, num_attention_heads=12, num_key_value_heads=4).config
    check_hidden(config, 192)
    with pytest.raises(RecipeError, match="192 or 384"):
        check_hidden(config, 256)
