"""The model with a cache of fixed size: whatever was extended, kept or rolled back, logits are a fresh prefill's."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_batch import any_calls
from test_tree_cache import Mirror, close, prefill
from toys import toy
from transformers import MambaConfig, MambaForCausalLM

from distill.engines.torch import static
from distill.engines.torch.model import count, fetch, packed, send, unpacked
from distill.engines.torch.static import FIRST_SIZE, StaticTorchModel
from distill.errors import DataError

torch.set_num_threads(1)

HUGGING_FACE = {kind: toy(kind, seed=3) for kind in ("qwen2", "gemma2")}  # all: test_families.py


def check(hugging_face: Any, seed: int, steps: int = 14, **options: Any) -> StaticTorchModel:
    """Do what a decoder could do, at random, and compare all logits with those of fresh prefills."""
    draws = random.Random(seed)
    model = StaticTorchModel(hugging_face, size=draws.choice([1, 30, 70, None]), **options)
    mirror = Mirror(model, lambda text: prefill(hugging_face, text), close)
    for _ in range(steps):
        mirror.step(draws, model.max_leaves)
    if mirror.nodes:
        mirror.keep(mirror.path(len(mirror.nodes) - 1))
    if len(mirror.context) < model.capacity - 1:
        mirror.chain([1, 2])
    return model


@pytest.mark.parametrize("kind", HUGGING_FACE)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 10**6))
def test_after_anything_is_a_fresh_prefill(kind: str, seed: int) -> None:
    check(HUGGING_FACE[kind], seed)


@pytest.mark.parametrize("kind", HUGGING_FACE)
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 10**6), st.integers(1, 5))
def test_rows_after_anything_are_fresh_prefills(kind: str, seed: int, rows: int) -> None:
    any_calls(HUGGING_FACE[kind], rows, random.Random(seed), 10, StaticTorchModel)


def test_long_prompts_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is asked of a part, of one row or of several."""
    monkeypatch.setattr(static, "CHUNK", 7)
    monkeypatch.setattr(static, "LONGEST_STEP", 3)
    for seed in range(4):
        check(HUGGING_FACE["qwen2"], seed)
        any_calls(HUGGING_FACE["gemma2"], 3, random.Random(seed), 8, StaticTorchModel)


def test_eager_attention_and_trees() -> None:
    hugging_face = toy("llama", seed=3, attn_implementation="eager")
    assert hugging_face.config._attn_implementation == "eager"
    for seed in range(3):
        assert check(hugging_face, seed).max_leaves > 1000


def test_an_overflow_does_not_reach_the_next_text() -> None:
    """A mask hides any number but NaN, which an overflow leaves behind the tokens that count."""
    hugging_face = HUGGING_FACE["qwen2"]
    model = StaticTorchModel(hugging_face)
    model.extend([1, 2, 3])
    with torch.inference_mode():
        for layer in model._cache.layers:
            layer.values.fill_(torch.nan)
    assert model.extend([4]).full().isnan().all()
    model.rollback([0])
    close(model.extend([5, 6]).full()[-1], prefill(hugging_face, [5, 6]))


def test_the_cache_doubles_and_then_stays() -> None:
    """Memory is taken when a text needs it, in doublings, and does not grow with the number of texts."""
    model, sizes = StaticTorchModel(toy(seed=3, max_position_embeddings=2000)), []
    assert model.size == FIRST_SIZE + 64
    for _ in range(3):
        model.rollback([0])
        for _ in range(90):
            model.extend([5] * 10)
            sizes.append(model.size)
    assert sorted(set(sizes)) == [320, 640, 1280] and sizes[90:] == [1280] * 180
    assert all(layer.keys.shape[2] == 1280 for layer in model._cache.layers)
    exact = StaticTorchModel(model.model, size=900)
    before = exact.size
    exact.extend([5] * 900)
    assert before == exact.size == 1024  # 900, a step behind them, and up to the next 64
    shapes = []
    hook = exact.model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, given, named: shapes.append(tuple(named["attention_mask"].shape)), with_kwargs=True
    )
    for start in (500, 3):  # a step attends to the slots that are written, however large the cache is
        exact.rollback([start])
        exact.extend([5])
        exact.extend([5, 6], parents=[-1, -1])
    hook.remove()
    assert shapes == [(1, 1, 1, 512), (1, 1, 2, 512), (1, 1, 1, 64), (1, 1, 2, 64)]
    whole = StaticTorchModel(toy(seed=3), size=10**6)
    assert whole.size == 256  # the context of 160, and a step behind it
    model.close()
    assert model._cache.layers[0].keys is None


@pytest.mark.parametrize(("kind", "tolerance"), [(torch.bfloat16, 0.25), (torch.float16, 0.03), (torch.float64, 1e-9)])
def test_other_types(kind: torch.dtype, tolerance: float) -> None:
    """Logits lie as near those of a prefill as the type allows; fp64 shows that no other error enters."""
    hugging_face = toy("llama", seed=3).to(kind)
    draws = random.Random(1)

    def compare(got: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(got.double(), expected.double(), rtol=0, atol=tolerance)

    mirror = Mirror(StaticTorchModel(hugging_face), lambda text: prefill(hugging_face, text), compare)
    for _ in range(14):
        mirror.step(draws, 99)


def test_models_that_are_refused() -> None:
    small: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 20}
    recurrent = MambaForCausalLM(MambaConfig(**small))
    mixed = toy("qwen2", seed=3)
    mixed.config.layer_types = ["linear_attention", "full_attention"]
    strange = toy("qwen2", seed=3)
    strange.config.layer_types = ["of_tomorrow", "full_attention"]
    flexible = toy(seed=3)
    flexible.config._attn_implementation = "flash_attention_2"
    for model, reason in (
        (recurrent, "recurrent state"),
        (strange, "of_tomorrow"),
        (mixed, "LinearAttentionLayer"),
        (flexible, "flash_attention_2"),
    ):
        with pytest.raises(DataError, match=reason):
            StaticTorchModel(model)


def test_a_fetch_brings_all_types_at_once() -> None:
    given = [torch.tensor([[1, 2**62]]), torch.tensor([True]), torch.tensor([0.1, -torch.inf]), torch.zeros(0, 3)]
    before = count.fetches
    for found in (fetch(*given), unpacked(packed(given), given)):
        for got, expected in zip(found, given, strict=True):
            assert got.dtype == expected.dtype and torch.equal(got, expected)
    assert count.fetches == before + 1
    assert torch.equal(send([[1, 2]], torch.device("cpu")), torch.tensor([[1, 2]]))
