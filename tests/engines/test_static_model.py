"""The model with a cache of fixed size: whatever was extended, kept or rolled back, logits are a fresh prefill's.

The everyday tests of compiled steps let torch trace each step into its graph and run that uncompiled; the slow ones
compile it. On a GPU, rounds give the texts of the CPU, and wait for the device for one transfer alone.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_batch import any_calls
from test_device_rounds import DRAFTS, MODELS
from test_tree_cache import Mirror, close, prefill
from toys import random_prompts, toy

from distill.decoding import on_device
from distill.decoding.decode import Decoded, decode, plain
from distill.decoding.drafters import ModelDrafter
from distill.decoding.lengths import Fixed
from distill.decoding.rules import Rules
from distill.engines.torch import static
from distill.engines.torch.model import TorchModel, count, fetch, packed, send, unpacked
from distill.engines.torch.static import FIRST_SIZE, StaticTorchModel
from distill.errors import DataError, RunError
from distill.recipe import Sampler

torch.set_num_threads(1)

HUGGING_FACE = {kind: toy(kind, seed=3) for kind in ("qwen2", "gemma2")}  # all: test_families.py
HUGGING_FACE["eager"] = toy("llama", seed=3, attn_implementation="eager")


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


def test_long_prompts_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is asked of a part, of one row or of several."""
    monkeypatch.setattr(static, "PROMPT_COLUMNS", 7)
    monkeypatch.setattr(static, "LONGEST_STEP", 3)
    for seed in range(4):
        check(HUGGING_FACE["qwen2"], seed)
        any_calls(HUGGING_FACE["gemma2"], 3, random.Random(seed), 8, StaticTorchModel)


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


def test_models_that_are_refused() -> None:
    """test_families.py has those of a recurrent state."""
    mixed = toy("qwen2", seed=3)
    mixed.config.layer_types = ["linear_attention", "full_attention"]
    strange = toy("qwen2", seed=3)
    strange.config.layer_types = ["of_tomorrow", "full_attention"]
    flexible = toy(seed=3)
    flexible.config._attn_implementation = "flash_attention_2"
    for model, reason in (
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


# ── compiled steps: one graph for each number of tokens ──


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The steps' graphs, which must be whole and traced once; the names of those that were made."""
    made: list[str] = []
    torch._dynamo.reset()
    compile_it = torch.compile

    def trace(step: Any, dynamic: bool, mode: str | None) -> Any:
        made.append(step.__func__.__code__.co_name)
        assert not dynamic and mode is None  # CUDA graphs are for CUDA
        return compile_it(step, backend="eager", dynamic=False, fullgraph=True)

    monkeypatch.setattr(torch, "compile", trace)
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield made


def walk(hugging_face: Any, calls: list[list[int]], **options: Any) -> tuple[Mirror, StaticTorchModel]:
    """A prompt, then these chains, each compared with a fresh prefill."""
    model = StaticTorchModel(hugging_face, compiled=True, **options)
    mirror = Mirror(model, lambda text: prefill(hugging_face, text), close)
    mirror.chain([1, 2, 3])
    for tokens in calls:
        mirror.chain(tokens)
    return mirror, model


def test_a_graph_for_each_number_of_tokens(traced: list[str]) -> None:
    """Any text, any length: nothing is traced twice. Tokens beyond nine are padded, prompts are not traced."""
    mirror, _ = walk(toy("qwen2", layers=1, seed=3), [[1], [4], [2, 3], [5, 6]])
    assert traced == ["chain_1", "chain_2"]
    mirror.tree([1, 2, 3], [-1, -1, 0])
    mirror.tree([4, 5, 6], [-1, 2, 0])
    mirror.keep([0, 2, 4])
    mirror.rollback(4)
    mirror.chain([7])
    mirror.chain(list(range(10, 20)))
    mirror.chain(list(range(20, 33)), want=[12])
    mirror.chain([5] * 70)
    mirror.rollback(0)
    mirror.chain([5, 6, 7])
    mirror.chain([8])
    assert traced == ["chain_1", "chain_2", "tree_3", "chain_16"]


@pytest.mark.slow
def test_a_cache_that_doubles_is_traced_again(traced: list[str]) -> None:
    mirror, model = walk(toy(layers=1, seed=3, max_position_embeddings=400), [[1]], size=1)
    before = model.size
    mirror.chain([5] * 150)
    mirror.chain([2])
    assert model.size > before and traced == ["chain_1", "chain_1"]


def test_what_torch_cannot_compile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise torch._dynamo.exc.Unsupported("a call that cannot be traced\nand a long trace")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: fail)
    model = StaticTorchModel(HUGGING_FACE["qwen2"], compiled=True)
    model.extend([1, 2, 3])
    with pytest.raises(RunError, match="a step of 1 tokens of this model: a call that cannot be traced") as caught:
        model.extend([4])
    assert "leave compile off" in str(caught.value) and model.lengths == [3]


def test_cuda_records_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mode that records CUDA graphs is asked for on CUDA alone."""
    modes: list[str | None] = []
    monkeypatch.setattr(torch, "compile", lambda step, dynamic, mode: modes.append(mode) or step)
    step = StaticTorchModel(HUGGING_FACE["qwen2"])._steps._chain
    for device in ("cuda", "cpu"):
        static._compiled(step, "chain_1", torch.device(device))
    assert modes == ["reduce-overhead", None]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "mistral", "gemma2", "gemma3"])
def test_compiled_steps_after_anything(kind: str) -> None:
    """Chains of few lengths, trees and roll-backs at random, compiled."""
    draws = random.Random(2)
    mirror, model = walk(toy(kind, seed=3), [[1], [2, 3]], size=150)
    for _ in range(40):
        choice = draws.random()
        if mirror.nodes:
            mirror.keep(mirror.path(draws.randrange(-1, len(mirror.nodes))))
        elif choice < 0.2 or len(mirror.context) > 140:
            mirror.rollback(draws.randrange(3, len(mirror.context) + 1))
        elif choice < 0.4 and model.max_leaves:
            mirror.tree([draws.randrange(61) for _ in range(4)], [draws.randrange(-1, i) for i in range(4)])
        else:
            mirror.chain([draws.randrange(61) for _ in range(draws.choice([1, 1, 2, 5]))])


# ── on a GPU ──


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Any wait but those of `fetch` is an error of torch, once `set_sync_debug_mode` says so."""
    true_fetch = on_device.fetch

    def fetch(*tensors: torch.Tensor) -> list[torch.Tensor]:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        try:
            return true_fetch(*tensors)
        finally:
            torch.cuda.set_sync_debug_mode(before)

    monkeypatch.setattr(on_device, "fetch", fetch)
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("draft_device", ["cuda", "cpu"])
def test_rounds_wait_once(compiled: bool, temperature: float, draft_device: str, strict: None) -> None:
    target: Any = StaticTorchModel(copy.deepcopy(MODELS["qwen2"]).cuda(), compiled=compiled)
    draft: Any = StaticTorchModel(copy.deepcopy(DRAFTS["qwen2"]).to(draft_device), compiled=compiled)
    prompt = random_prompts(1, 61, seed=4)[0]
    for repeat in range(3):  # graphs are compiled, then recorded, then replayed
        rules = Rules(
            Sampler(temperature=temperature), "token" if temperature else "greedy", random=random.Random(1).random
        )
        result = Decoded()
        drafter = ModelDrafter(draft, Fixed(3), rules.sampler, rules.random)
        rounds = decode(target, drafter, prompt, 24, rules, result)
        next(rounds)
        # A chain that a CPU drafted is copied to the target's device, for which CUDA waits.
        if repeat == 2 and draft_device == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        list(rounds)
        torch.cuda.set_sync_debug_mode("default")
        if not temperature:
            assert result.tokens == plain(TorchModel(MODELS["qwen2"]), prompt, 24).tokens
