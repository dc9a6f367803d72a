"""Prepacked linear layers: the logits of torch's own, tensors shared, and what is left as it is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from toys import toy

from distill.engines.loaded import torch_decoder
from distill.engines.torch import cpu_products as module
from distill.engines.torch.cpu_products import PrepackedLinear, prepacked, works
from distill.engines.torch.hugging_face import KeptHead
from distill.engines.torch.model import BatchedTorchModel, TorchModel
from distill.engines.torch.static import StaticTorchModel
from distill.recipe import PyTorch

# Skipped only where torch itself says that it cannot: a `works` that is wrong must fail here, not hide these tests.
pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_VALUES", 1)


def linear_layers(model: Any) -> list[str]:
    return [name for name, one in model.named_modules() if type(one) is torch.nn.Linear]


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


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma3"])
def test_decoding_steps_give_the_logits_of_the_model(kind: str) -> None:
    model = toy(kind)
    before = copy.deepcopy(model.state_dict())
    plain, fast = TorchModel(model), torch_decoder(model)
    assert isinstance(fast, TorchModel) and fast.model is not model and not linear_layers(fast.model)
    for tokens in ([3, 1, 4, 1, 5], [9], [2, 6], [5, 3, 5, 8, 9, 7, 9, 3]):
        expected, found = plain.extend(tokens).full(), fast.extend(tokens).full()
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        length = plain.lengths[0] - 1
        plain.rollback([length])
        fast.rollback([length])
    assert linear_layers(model)  # the model itself is what it was
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    shared = {parameter.data_ptr() for parameter in model.parameters()}
    assert all(parameter.data_ptr() in shared for parameter in fast.model.parameters())


def test_static_caches_decode_with_them_unless_compiled() -> None:
    model = toy("llama")
    fast = torch_decoder(model, pytorch=PyTorch(static=True), tokens=40)
    assert isinstance(fast, StaticTorchModel) and not linear_layers(fast.model)
    plain = TorchModel(model)
    for tokens in ([3, 1, 4, 1, 5], [9], [2, 6]):
        torch.testing.assert_close(fast.extend(tokens).full(), plain.extend(tokens).full(), atol=1e-4, rtol=1e-4)
    for settings in (PyTorch(static=True, compile=True), PyTorch(static=True, prepack=False)):
        left = torch_decoder(model, pytorch=settings, tokens=40)
        assert isinstance(left, StaticTorchModel) and left.model is model


def test_trimmed_heads_and_rows_of_batches() -> None:
    model = toy("llama")
    model.lm_head = KeptHead(model.lm_head, torch.tensor([1, 4, 7, 11]))
    fast, reason = prepacked(model)
    assert reason == "" and fast.lm_head.product is not None and model.lm_head.product is None
    tokens, counts = [3, 1, 4, 9, 2], [3, 2]
    found = [BatchedTorchModel(one, 2).extend(tokens, counts).full() for one in (model, fast)]
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)
    assert torch.isinf(found[1]).sum() == found[1].shape[0] * (found[1].shape[1] - 4)


def test_weights_that_change_later_do_not_reach_the_copy() -> None:
    model = toy("llama")
    fast = torch_decoder(model)
    first = fast.extend([1, 2, 3]).full()
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    fast.rollback([0])
    assert torch.equal(fast.extend([1, 2, 3]).full(), first)


def test_what_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model = toy("llama")
    off = torch_decoder(model, pytorch=PyTorch(prepack=False))
    assert isinstance(off, TorchModel) and off.model is model
    monkeypatch.setattr(module, "MIN_VALUES", model.lm_head.weight.numel())
    assert "lm_head" not in linear_layers(prepacked(model)[0]) and len(linear_layers(prepacked(model)[0])) > 3
    monkeypatch.setattr(module, "MIN_VALUES", 1)
    double = copy.deepcopy(model).double()
    assert prepacked(double) == (double, "")
    hooked = copy.deepcopy(model)
    hooked.lm_head.register_forward_hook(lambda *_: None)
    assert linear_layers(prepacked(hooked)[0]) == ["lm_head"]
    monkeypatch.setattr(module, "SHARE", 0.0)
    short = torch_decoder(model)
    assert isinstance(short, TorchModel) and short.model is model
    assert "linear layers are not prepacked" in capsys.readouterr().err
    monkeypatch.setattr(module, "SHARE", 0.5)
    monkeypatch.setattr(module.PrepackedLinear, "forward", _refuses)
    assert not works(torch.float32) and prepacked(model) == (model, "")


def _refuses(*_: Any) -> torch.Tensor:
    raise RuntimeError("no such operator")
