"""Attention document by document equals that with a mask (test_packing.py: documents do not see each other), gradients
too, and its memory grows with the block alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from toys import toy

from distill.data import packing
from distill.data.packing import (
    Packed,
    attend_within,
    attention_mask,
    document_segments,
    hidden_states,
    pack,
    separation,
)
from distill.training.setup import recompute_activations

torch.set_num_threads(1)

MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "head_dim": 8}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {},
    "llama": {"num_key_value_heads": 4},
    "mistral": {"sliding_window": 5},
    "gemma3": MIXED | {"query_pre_attn_scalar": 8},
}


def blocks(*lengths: int, width: int = 40) -> Packed:
    generator = torch.Generator().manual_seed(0)
    texts = [(torch.randint(0, 61, (n,), generator=generator).tolist(), 1) for n in lengths]
    return pack(texts, width, split_long=False)


def states(model: Any, packed: Packed, long: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, list[Tensor]]:
    """Hidden states at all positions of documents, and the gradients of a function of them."""
    monkeypatch.setattr(packing, "masked_below", lambda device: long)
    given = separation(model, packed.documents, torch.device("cpu"))
    first = next(iter(given.values())) if isinstance(given, dict) else given
    assert (first.dtype == torch.int32) is (long == 1)
    found = hidden_states(model, packed)[packed.documents >= 0]
    model.zero_grad()
    (found * torch.linspace(-1, 1, found.shape[-1])).sum().square().backward()
    return found.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_as_with_a_mask(kind: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents shorter and longer than a window, of one token, and padding between two blocks."""
    model = toy(kind, **MODELS[kind])
    if checkpointing:
        recompute_activations(model)
        model.train()
    packed = blocks(7, 3, 12, 1, 5, 33, 2, 40, 21)
    expected, gradients = states(model, packed, 10**6, monkeypatch)
    found, own = states(model, packed, 1, monkeypatch)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert len(own) == len(gradients) > 10
    for one, other in zip(own, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


def test_segments() -> None:
    documents = torch.tensor([[0, 0, 1, 1, 1, -1], [-1, -1, -1, -1, -1, -1], [0, 1, 2, 2, -1, -1]])
    expected = [[2, 3], [3, 3], [1, -1], [6, -1], [1, 3], [1, 3], [2, 3], [2, -1]]
    found = document_segments(documents, 3)
    assert found.shape == (1, 1, 8, 2) and found[0, 0].tolist() == expected
    assert document_segments(documents, None)[0, 0, :, 1].tolist() == [0, 0, -1, -1, 0, 0, 0, -1]
    query = torch.randn(3, 2, 6, 4)
    output = attend_within(query, query[:, :1], query[:, :1], found)
    assert bool((output.abs().sum((-1, -2)) > 0).eq(documents >= 0).all()), "padding attends to nothing"


def test_under_autocast_a_cpu_still_computes_in_fp32() -> None:
    """As trainings in bf16 call it: inputs and output in bf16, all between in fp32, gradients in the inputs' type."""
    torch.manual_seed(0)
    documents = torch.tensor([[0] * 9 + [1] * 5 + [-1] * 2, [0] * 3 + [1] * 13])
    segments = document_segments(documents, None)
    inputs = [torch.randn(2, heads, 16, 8, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attend_within(*inputs, segments)
    assert found.dtype == torch.bfloat16
    (found.float() * torch.linspace(-1, 1, 8)).sum().backward()
    wide = [x.detach().float().requires_grad_() for x in inputs]
    keys, values = (x.repeat_interleave(2, 1) for x in wide[1:])
    mask = attention_mask(documents)
    expected = scaled_dot_product_attention(wide[0], keys, values, attn_mask=mask).transpose(1, 2)
    inside = (documents >= 0)[..., None, None]
    (expected.to(torch.bfloat16).float() * inside * torch.linspace(-1, 1, 8)).sum().backward()
    assert torch.equal(found, (expected * inside).to(torch.bfloat16))
    for one, other in zip(inputs, wide, strict=True):
        assert one.grad is not None and one.grad.dtype == torch.bfloat16 and other.grad is not None
        torch.testing.assert_close(one.grad.float(), other.grad, rtol=1e-2, atol=1e-2 * float(other.grad.abs().max()))


def test_segments_are_no_mask_for_others() -> None:
    """A model that does not ask our function must not take a list of segments for a mask."""
    query = torch.randn(1, 1, 4, 8)
    segments = document_segments(torch.zeros(1, 4, dtype=torch.int32), None)
    with pytest.raises(RuntimeError, match="attn_mask"):
        scaled_dot_product_attention(query, query, query, attn_mask=segments)


def test_masks_stay_where_they_are_cheap_or_needed() -> None:
    short, long = blocks(7, width=64).documents, blocks(7, width=packing.LONG).documents
    cpu = torch.device("cpu")
    assert separation(toy("qwen2"), short, cpu).dtype == torch.int32
    meta = torch.device("meta")
    assert separation(toy("qwen2"), short, meta).dtype == torch.bool
    assert separation(toy("qwen2"), long, meta).dtype == torch.int32
    eager = toy("qwen2")
    eager.config._attn_implementation = "eager"
    assert separation(eager, long, cpu).is_floating_point()
    compiled = toy("qwen2")
    compiled.model._compiled_call_impl = hidden_states  # as Module.compile sets it
    assert separation(compiled, long, cpu).dtype == torch.bool


def saved_bytes(model: Any, packed: Packed) -> int:
    """Bytes that a forward pass keeps for the backward pass, beside the weights; each storage once."""
    kept: dict[int, int] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack_hook(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda tensor: tensor):
        output = hidden_states(model, packed)
        found = sum(kept.values())
    assert output.requires_grad
    return found


def test_memory_grows_with_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Per token, eight times the block takes no more; with a mask it takes several times as much."""
    model = toy("qwen2", max_position_embeddings=4096)
    for long, least, most in ((1, 0.9, 1.02), (10**6, 1.5, 100)):
        monkeypatch.setattr(packing, "masked_below", lambda device, long=long: long)
        each = [
            saved_bytes(model, blocks(width // 2, width // 4, width // 4, width=width)) / width for width in (256, 2048)
        ]
        assert least < each[1] / each[0] < most, each
