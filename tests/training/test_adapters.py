"""LoRA and QLoRA: nothing at the start, only adapters learn, and the merged draft is a plain model of the same
distribution."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor
from toys import KINDS, toy

from distill.data.packing import pack
from distill.engines.torch.blocks import Packed, hidden_states
from distill.engines.torch.hugging_face import load_model
from distill.errors import RecipeError, RunError
from distill.recipe import Adapter, Train, load_recipe, parse_section
from distill.teacher.distributions import DenseTeacher, Head
from distill.training import setup
from distill.training.learner import Columns, Learner
from distill.training.losses import loss_settings
from distill.training.setup import attach, layer_names, load_base, merge

torch.set_num_threads(1)

CPU = torch.device("cpu")
V = 61
TRAIN = Train(batch=2, steps=6, rate=1e-2, loss={"forward_kl": 0.9, "cross_entropy": 0.1})
LOSS = loss_settings(TRAIN, 1.0)


def data(seed: int = 0) -> Packed:
    generator = torch.Generator().manual_seed(seed)
    sequences = [torch.randint(0, V, (20,), generator=generator).tolist() for _ in range(6)]
    return pack(((ids, 2) for ids in sequences), 40, split_long=False)


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that learn, by name: those of the adapters and, with `outer`, embeddings and head."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def store_of(target: Any, blocks: Packed) -> Any:
    """What a training reads of a teacher, from a target at hand."""
    head = Head.of(target, V)

    def read(index: Tensor) -> Any:
        part = blocks.take(index)
        with torch.no_grad():
            teacher = DenseTeacher(hidden_states(target, part)[part.mask], head)
        return SimpleNamespace(blocks=part, distributions=lambda device: teacher)

    return SimpleNamespace(blocks=len(blocks), read=read)


def loss_of(model: Any, store: Any, index: Tensor) -> Tensor:
    """The mean loss of some blocks."""
    learner = Learner(model, Columns(V, None, CPU), 64)
    stored = store.read(index)
    total, sums = learner(stored.blocks, stored.distributions(CPU), LOSS)
    return total / sums["positions"]


def logits(model: Any) -> Tensor:
    ids = torch.randint(0, V, (2, 16), generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def trained(model: Any, settings: Adapter, outer: bool = False, steps: int = 3, seed: int = 0) -> Any:
    """The model with adapters, which change no bit at first, after a few steps on the product's own loss."""
    before = logits(model)
    attach(model, settings, seed, outer)
    assert torch.equal(logits(model), before)
    store = store_of(toy(seed=5), data())
    optimizer = torch.optim.AdamW(trainable(model).values(), lr=1e-2)
    for _ in range(steps):
        loss_of(model, store, torch.arange(2)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outer", [False, True])
def test_merged_is_what_was_trained(kind: str, outer: bool, tmp_path: Path) -> None:
    plain = toy(kind)
    before = logits(plain)
    shapes = {name: value.shape for name, value in plain.state_dict().items()}
    model = trained(plain, Adapter(rank=4), outer)
    learnt = logits(model)
    assert float((learnt - before).abs().max()) > 0.05
    done = merge(model)
    torch.testing.assert_close(logits(done), learnt, rtol=1e-5, atol=1e-5)
    assert {name: value.shape for name, value in done.state_dict().items()} == shapes
    assert type(done) is type(toy(kind)) and all(p.requires_grad for p in done.parameters())
    done.save_pretrained(tmp_path / "draft")
    assert not [path for path in (tmp_path / "draft").iterdir() if "adapter" in path.name]
    assert torch.equal(logits(load_model(str(tmp_path / "draft"), "float32", CPU)), logits(done))


@pytest.mark.parametrize("outer", [False, True])
def test_only_adapters_learn(outer: bool) -> None:
    model = toy("llama")
    attach(model, Adapter(rank=2), outer=outer)
    store = store_of(toy(seed=5), data())
    index = torch.arange(2)
    loss_of(model, store, index).backward()
    own = trainable(model)
    assert len(layer_names(toy("llama"))) == 2 * 7, "every linear layer of the body"
    expected = {f"{layer}.lora_{side}.{setup.ADAPTER}.weight" for layer in layer_names(toy("llama")) for side in "AB"}
    assert own.keys() == expected | ({"model.embed_tokens.weight", "lm_head.weight"} if outer else set())
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (name in own), name
        if name in own and ".lora_A." not in name:  # A learns only once B is no longer 0
            assert float(parameter.grad.abs().max()) > 0, name


def test_the_start_depends_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = trainable(attach(toy(), Adapter(rank=2), seed=3))
    model = toy()
    state = torch.get_rng_state()
    second = trainable(attach(model, Adapter(rank=2), seed=3))
    assert torch.equal(torch.get_rng_state(), state)  # and leaves the random numbers of the training alone
    other = trainable(attach(toy(), Adapter(rank=2), seed=4))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_settings_that_clash() -> None:
    with pytest.raises(RecipeError, match="sparsity changes the draft's own weights"):
        parse_section(Train, {"adapter": {}, "sparsity": {"mlp_width": 32}})
    rated = ["train.adapter={}", "train.embedding_rate=5"]
    with pytest.raises(RecipeError, match="adapters freeze embeddings and head"):
        load_recipe(tiny.ROOT / "recipes" / "demo.yaml", rated)
    load_recipe(tiny.ROOT / "recipes" / "demo-transplant.yaml", rated)


def test_a_quantised_base_is_refused_where_it_cannot_be() -> None:
    pytest.importorskip("bitsandbytes")
    with pytest.raises(RunError, match="not vulkan"):
        load_base(Path("nowhere"), Adapter(base="int8"), torch.device("vulkan"))


@pytest.mark.parametrize("base", ["int8", "int4"])
@pytest.mark.parametrize("kind", ["qwen2", "llama"])  # tied embeddings and untied
def test_a_quantised_base_is_merged_in_full_precision(base: Any, kind: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    exact = toy(kind, hidden_size=64, intermediate_size=128)
    exact.save_pretrained(tmp_path / "cut")
    settings = Adapter(rank=4, base=base)
    half = load_base(tmp_path / "cut", settings, CPU, "bfloat16").model.layers[0].mlp.up_proj
    assert getattr(half, "compute_dtype", torch.bfloat16) == torch.bfloat16  # with 8 bits it is not chosen
    model = load_base(tmp_path / "cut", settings, CPU)
    held = model.model.layers[0].mlp.up_proj.weight
    assert held.dtype == (torch.int8 if base == "int8" else torch.uint8)
    assert model.lm_head.weight.dtype == model.model.embed_tokens.weight.dtype == torch.float32
    first = logits(model)
    assert float((first - logits(exact)).abs().max()) > 0  # rounding, and not only of the last bit
    trained(model, settings, outer=True)
    assert not torch.equal(logits(model), first)
    done = merge(model, tmp_path / "cut")
    assert {name: value.dtype for name, value in done.state_dict().items()} == {
        name: torch.float32 for name in exact.state_dict()
    }
    state, learnt = exact.state_dict(), trainable(model)
    for name, value in done.state_dict().items():
        place = name.removesuffix(".weight")
        if f"{place}.lora_A.{setup.ADAPTER}.weight" in learnt:
            up, down = (learnt[f"{place}.lora_{side}.{setup.ADAPTER}.weight"] for side in "BA")
            torch.testing.assert_close(value, state[name] + 2.0 * up @ down, rtol=0, atol=1e-6)
            assert not torch.equal(value, state[name])
        elif name in ("lm_head.weight", "model.embed_tokens.weight"):
            assert torch.equal(value, model.lm_head.weight if "head" in name else model.model.embed_tokens.weight)
            assert not torch.equal(value, state[name])
        else:
            assert torch.equal(value, state[name]), name
