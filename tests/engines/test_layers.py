"""Decoders whose layers compute in few operators or in prepacked products: the logits of transformers' own.

The model itself stays what it was, tensors are shared, and what computes something else is left as it is.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from table_model import TableModel
from toys import speculative, toy

from distill.decoding.decode import plain
from distill.engines import loaded
from distill.engines.loaded import BatchedTorchModel, torch_decoder
from distill.engines.torch.hugging_face import KeptHead
from distill.engines.torch.model import TorchModel
from distill.engines.torch.products import Bits, choice, linear, models
from distill.engines.torch.products.layers import Layer
from distill.engines.torch.products.linear import GROUP, Norm, PrepackedLinear, rounded_linear, works
from distill.engines.torch.products.models import pack
from distill.engines.torch.static import StaticTorchModel
from distill.errors import DataError, RecipeError
from distill.recipe import PyTorch, Target
from distill.recipe.target import parse_section

torch.set_num_threads(1)
# Skipped only where torch itself says that it cannot: a `works` that is wrong must fail here, not hide these tests.
pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "MIN_VALUES", 1)


def linear_layers(model: Any) -> list[str]:
    return [name for name, one in model.named_modules() if type(one) is torch.nn.Linear]


def norms(model: Any) -> int:
    return sum(type(module) is Norm for module in model.modules())


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def check_decoders(own: TorchModel, others: Iterable[Any], model: Any) -> None:
    """Chains, trees and roll-backs of each of the others give the logits of `own`; `model` is theirs to leave alone."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    kinds = [type(one) for one in model.modules()]
    for other in others:
        own.rollback([0])
        for tokens in ([3, 1, 4, 1, 5], [9], [2, 6], [5, 3, 5, 8, 9, 7, 9, 3], [8], [4] * 12, [7, 7]):
            near(other.extend(tokens).full(), own.extend(tokens).full())
            trees = [one.extend([1, 2, 3], parents=[-1, -1, 0], want=[0, 2]).full() for one in (own, other)]
            near(trees[1], trees[0])
            for one in (own, other):
                one.keep([[1]])
                one.rollback([one.lengths[0] - 1])
        shared = {parameter.data_ptr() for parameter in model.parameters()}
        assert all(parameter.data_ptr() in shared for parameter in other.model.parameters())
    assert [type(one) for one in model.modules()] == kinds
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


# ── few operators, on an accelerator ──


@pytest.mark.parametrize(
    ("kind", "layers", "found"),
    [
        ("qwen3", True, 1),  # those inside its layers are functions
        ("gemma3", True, 1),
        ("mistral", True, 1),
        ("gemma2", False, 0),
    ],
)
def test_logits_on_an_accelerator_are_those_of_the_cpu(kind: str, layers: bool, found: int, pretend: Any) -> None:
    here = toy(kind, **({"sliding_window": 6} if kind == "mistral" else {}))
    there = copy.deepcopy(here).to("pretend")
    decoders: list[Any] = [torch_decoder(there, pytorch=PyTorch(static=one), tokens=60) for one in (False, True)]
    assert all(isinstance(one.model.model.layers[0], Layer) is layers for one in decoders)
    assert norms(decoders[0].model) == found
    check_decoders(TorchModel(here), decoders, there)


def test_what_computes_something_else_is_left_alone(pretend: Any) -> None:
    """Hooks, and weights of several types."""
    hooked, mixed = toy("llama").to("pretend"), toy("llama").to("pretend")
    hooked.model.norm.register_forward_hook(lambda *_: None)
    mixed.model.embed_tokens.half()
    assert pack(hooked) is hooked and pack(mixed) is mixed


# ── prepacked products, on a CPU ──


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 5, 9, 33])
def test_products_equal_those_of_double_precision(dtype: torch.dtype, count: int) -> None:
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor has no bf16 products")
    assert works(dtype)
    numbers = torch.Generator().manual_seed(count)
    weight, bias = torch.randn(96, 64, generator=numbers).to(dtype), torch.randn(96, generator=numbers).to(dtype)
    x = torch.randn(2, count, 64, generator=numbers).to(dtype)
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    found = PrepackedLinear(weight, bias)(x)
    assert found.dtype == dtype and found.shape == exact.shape
    # Sums in fp32 in any order, then one rounding to the type (Higham 2002, section 3.1).
    sums = torch.nn.functional.linear(x.double().abs(), weight.double().abs(), bias.double().abs())
    allowed = 65 * torch.finfo(torch.float32).eps * sums + torch.finfo(dtype).eps * exact.abs()
    assert ((found.double() - exact).abs() <= allowed).all()


CASES: list[tuple[str, dict[str, Any], bool]] = [
    *((kind, {}, True) for kind in ("llama", "mistral", "qwen2", "qwen3", "gemma3")),
    ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}, True),
    ("mistral", {"sliding_window": 6}, True),  # longer texts than the window
    ("gemma3", {"final_logit_softcapping": 5.0}, False),
    ("llama", {"hidden_act": "relu"}, False),
    ("llama", {"attn_implementation": "eager"}, False),
    ("gemma2", {}, False),
]


@pytest.mark.parametrize(("kind", "changes", "few"), CASES)
def test_decoding_steps_give_the_logits_of_the_model(kind: str, changes: dict[str, Any], few: bool) -> None:
    model = toy(kind, **changes)
    growing, static = (torch_decoder(model, pytorch=PyTorch(static=one), tokens=80) for one in (False, True))
    assert isinstance(growing, TorchModel) and isinstance(static, StaticTorchModel)
    for fast in (growing, static):
        assert fast.model is not model and not linear_layers(fast.model)
        assert isinstance(fast.model.model.layers[0], Layer) is few  # type: ignore[attr-defined]
    check_decoders(TorchModel(model), [growing, static], model)


def test_compiled_steps_have_the_models_own_layers() -> None:
    model = toy("llama")
    for settings in (PyTorch(static=True, compile=True), PyTorch(static=True, prepack=False)):
        left = torch_decoder(model, pytorch=settings, tokens=40)
        assert isinstance(left, StaticTorchModel) and left.model is model


def test_trimmed_heads_and_rows_of_batches() -> None:
    model = toy("llama")
    model.lm_head = KeptHead(model.lm_head, torch.tensor([1, 4, 7, 11]))
    fast = pack(model)
    assert fast.lm_head.product is not None and model.lm_head.product is None
    tokens, counts = [3, 1, 4, 9, 2], [3, 2]
    found = [BatchedTorchModel(one, 2).extend(tokens, counts).full() for one in (model, fast)]
    near(found[1], found[0])
    assert torch.isinf(found[1]).sum() == found[1].shape[0] * (found[1].shape[1] - 4)


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_levels_are_chosen_with_the_scales_that_multiply_them(bits: Bits) -> None:
    """A scale of 8 bits is off by up to 1/512, which at level 120 is a quarter of a level."""
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight[3], weight[4, :32] = 0, 0.75
    product = rounded_linear(bits, weight, None)
    held = product(torch.eye(64, dtype=torch.bfloat16)).T.double()
    exact = weight.double()
    groups = exact if bits == "int8" else exact.unflatten(1, (-1, GROUP))
    reach = groups.abs().amax(-1) / 127 if bits == "int8" else (groups.amax(-1) - groups.amin(-1)) / 15
    half = (reach / 2).repeat_interleave(64 if bits == "int8" else GROUP).view(64, -1)
    # Half a level, and half a digit of the result; of four bits also of the zero, and one end may lie outside.
    allowed = 1.01 * half + exact.abs() / 256 + (0 if bits == "int8" else exact.abs().amax(1, keepdim=True) / 128)
    assert ((held - exact).abs() <= allowed + 1e-6).all()
    assert torch.equal(held[3], exact[3]) and torch.allclose(held[4, :32], exact[4, :32], atol=4e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_rounded_products_are_those_of_the_rounded_weight(bits: Bits, dtype: torch.dtype) -> None:
    numbers = torch.Generator().manual_seed(3)
    weight, bias = torch.randn(50, 64, generator=numbers).to(dtype), torch.randn(50, generator=numbers).to(dtype)
    x = torch.randn(2, 3, 64, generator=numbers).to(dtype)
    product = rounded_linear(bits, weight, bias)
    zero = PrepackedLinear(weight, None)(x)  # what the product is combined with
    rows = weight.double()
    if bits == "int8":  # half a level of each row's largest
        allowed = rows.abs().amax(1, keepdim=True).expand_as(rows) / 127 / 2
    else:  # half of 15 levels between the least and the most of each 32
        groups = rows.unflatten(1, (-1, GROUP))
        allowed = ((groups.amax(-1) - groups.amin(-1)) / 15 / 2).repeat_interleave(GROUP, 1)
    allowed = allowed + 4 * torch.finfo(dtype).eps * rows.abs().amax()  # scales and zeros are of the weight's type
    exact = torch.nn.functional.linear(x.double(), rows, bias.double())
    error = (product(x).double() - exact).abs()
    bound = torch.nn.functional.linear(x.double().abs(), allowed) + 4 * torch.finfo(dtype).eps * (1 + exact.abs())
    assert product(x).shape == exact.shape and (error <= bound).all()
    assert error.max() > 1e-3  # it is rounded
    torch.testing.assert_close(product(x, zero), product(x) + zero)
    torch.testing.assert_close(product(x, zero, "mul"), product(x) * zero)
    torch.testing.assert_close(
        rounded_linear(bits, weight, bias, "silu")(x), torch.nn.functional.silu(product(x)), rtol=1e-2, atol=1e-2
    )


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_a_rounded_draft_leaves_the_text_as_it_is(monkeypatch: pytest.MonkeyPatch, bits: Bits) -> None:
    """In float32, for which no kernel is compiled."""
    monkeypatch.setattr(models, "kernel_fault", lambda: pytest.fail("the compiler ran"))
    for kind in ("llama", "gemma2"):  # in few operators, and in transformers' own
        model = toy(kind, intermediate_size=64)
        settings = PyTorch(draft_weights=bits)
        target, draft = torch_decoder(model), torch_decoder(model, None, settings, is_draft=True)
        assert isinstance(draft, TorchModel) and not linear_layers(draft.model)
        logits = draft.extend([3, 1, 4, 1, 5]).full()
        exact = target.extend([3, 1, 4, 1, 5]).full()
        shared = torch.minimum(logits.softmax(-1), exact.softmax(-1)).sum(-1)
        assert shared.min() > 0.6 and not torch.allclose(logits, exact, atol=1e-3)
        assert speculative(target, draft, [3, 1, 4], 24, 3).tokens == plain(target, [3, 1, 4], 24).tokens


def test_refusals_of_rounded_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = PyTorch(draft_weights="int8")
    for model, reason in (
        (toy("llama"), "rows of a multiple of 32 numbers, and some of its have 48"),
        (toy("llama", intermediate_size=64).double(), "does not multiply float64 by int8"),
        (toy("llama").to("meta"), "not all of one type and on a CPU"),
    ):
        with pytest.raises(DataError, match=reason):
            torch_decoder(model, None, settings, is_draft=True)
    assert isinstance(torch_decoder(toy("llama"), None, settings), TorchModel)  # the target is not rounded
    monkeypatch.setattr(torch, "_weight_int8pack_mm", _refuses)
    with pytest.raises(DataError, match="does not multiply float32 by int8"):
        torch_decoder(toy("llama", intermediate_size=64), None, settings, is_draft=True)
    with pytest.raises(RecipeError, match="draft_weights int4 is for caches that grow"):
        parse_section(PyTorch, {"draft_weights": "int4", "static": True})


def test_what_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model = toy("llama")
    off = torch_decoder(model, pytorch=PyTorch(prepack=False))
    assert isinstance(off, TorchModel) and off.model is model
    monkeypatch.setattr(models, "MIN_VALUES", model.lm_head.weight.numel())
    assert "lm_head" not in linear_layers(pack(model)) and len(linear_layers(pack(model))) > 3
    monkeypatch.setattr(models, "MIN_VALUES", 1)
    double = copy.deepcopy(model).double()
    assert pack(double) is double
    hooked = copy.deepcopy(model)
    hooked.lm_head.register_forward_hook(lambda *_: None)
    assert linear_layers(pack(hooked)) == ["lm_head"]
    monkeypatch.setattr(models, "MEMORY_SHARE", 0.0)
    short = torch_decoder(model)
    assert isinstance(short, TorchModel) and short.model is model
    assert "linear layers are not prepacked" in capsys.readouterr().err
    monkeypatch.setattr(models, "MEMORY_SHARE", 0.5)
    monkeypatch.setattr(linear.PrepackedLinear, "forward", _refuses)
    assert not works(torch.float32) and pack(model) is model


def _refuses(*_: Any) -> torch.Tensor:
    raise RuntimeError("no such operator")


# ── draft_weights: auto ──


def test_the_weights_that_draft_fastest_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """By measured steps and acceptance: against the best length by hand; a gain below 2 % is none."""
    target = TableModel(11, seed=1, sharpness=3.0)
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    for steps, unlike, chosen in (
        ((50.0, 30.0, 25.0), (0.1, 0.1, 0.1), "int4"),
        ((50.0, 30.0, 25.0), (0.1, 0.1, 4.0), "int8"),  # int4 is accepted too seldom
        ((50.0, 49.9, 49.9), (0.1, 0.1, 0.1), None),
        ((5000.0, 3000.0, 2500.0), (0.1, 0.1, 0.1), None),  # none of them is worth drafting
    ):
        drafts = [target.near(distance, seed=2) for distance in unlike]
        costs = {id(target): 100.0} | {id(draft): step for draft, step in zip(drafts, steps, strict=True)}
        monkeypatch.setattr(choice, "_step_seconds", lambda model, ids, count, costs=costs: costs[id(model)])
        found = choice.best_weights(target, dict(zip((None, "int8", "int4"), drafts, strict=True)), ids)
        assert found.chosen == chosen, found.words
        accepted = torch.minimum(target.extend(ids).full().softmax(-1), drafts[0].extend(ids).full().softmax(-1))
        assert f"acceptance {accepted.sum(-1).mean():.2f}" in found.words
        target.rollback([0])
    assert choice.best_weights(target, {None: target}, ids) == choice.Weights(None, "")
    model = target.near(0.1, seed=2)
    monkeypatch.undo()
    assert choice._step_seconds(model, ids, 3) > 0 and model.lengths == [0]


def test_chosen_weights_are_kept(tmp_path: Path, world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the models' content: a second command measures nothing, another draft does. A small one stays as it is."""
    monkeypatch.setenv("DISTILL_CACHE", str(tmp_path / "cache"))
    asked = list[int]()

    def best(target: Any, candidates: dict[Any, Any], ids: Any) -> choice.Weights:
        asked.append(len(candidates))
        return choice.Weights("int8", "told")

    monkeypatch.setattr(loaded, "best_weights", best)
    target, draft = Target(model=str(world / "target")), tmp_path / "draft"
    shutil.copytree(world / "target", draft)
    with loaded.load_pair(target, str(draft)) as pair:
        assert pair.pytorch.draft_weights is None and not asked
    monkeypatch.setattr(loaded, "MIN_WEIGHTS", 0)
    model = toy("llama", vocab_size=pair.target.vocabulary_size, intermediate_size=64)
    for seed, times in ((0, 1), (0, 1), (1, 2)):
        torch.manual_seed(seed)
        torch.nn.init.normal_(model.model.embed_tokens.weight)
        model.save_pretrained(draft)
        with loaded.load_pair(target, str(draft)) as pair:
            assert pair.pytorch.draft_weights == "int8" and pair.options is not None
            assert pair.options["draft_weights"] == "int8" and not linear_layers(pair.draft.model)  # type: ignore[attr-defined]
        assert asked == [3] * times
