"""Compiled steps: the same logits, one graph for each number of tokens, and the whole decoder on top of them.

The everyday tests let torch trace each step into its graph and run that uncompiled; the slow ones compile it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_device_rounds import DRAFTS, MODELS, least_p
from test_tree_cache import Mirror, close, prefill
from toys import blurred, random_prompts, speculative, toy

from distill.decoding.decode import Decoded, decode, plain
from distill.decoding.drafters import ModelDrafter
from distill.decoding.lengths import Fixed
from distill.decoding.rules import Rules
from distill.engines.torch import static
from distill.engines.torch.model import TorchModel
from distill.engines.torch.static import StaticTorchModel
from distill.errors import RunError
from distill.sampler import Sampler

torch.set_num_threads(1)
SMALL = toy("qwen2", layers=1, seed=3)  # tracing takes a second a layer
HUGGING_FACE = {kind: toy(kind, seed=3) for kind in ("qwen2", "qwen3", "llama", "mistral", "gemma2", "gemma3")}


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
    mirror, _ = walk(SMALL, [[1], [4], [2, 3], [5, 6]])
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
def test_layers_with_windows_are_traced(traced: list[str]) -> None:
    mirror, _ = walk(HUGGING_FACE["gemma3"], [[1]])
    for token in range(8):  # past the window of 6
        mirror.chain([token])
    assert traced == ["chain_1"]


@pytest.mark.slow
def test_a_cache_that_doubles_is_traced_again(traced: list[str]) -> None:
    mirror, model = walk(toy(layers=1, seed=3, max_position_embeddings=400), [[1]], size=1)
    before = model.size
    mirror.chain([5] * 150)
    mirror.chain([2])
    assert model.size > before and traced == ["chain_1", "chain_1"]


@pytest.mark.slow
def test_rounds_on_traced_steps(traced: list[str]) -> None:
    """The draft's steps of one and two tokens, the target's of up to three."""
    target = toy("qwen2", layers=1, seed=3).double()
    draft, prompt = blurred(target, 6, 0.03), random_prompts(1, 61, seed=1)[0]
    expected = speculative(TorchModel(target), TorchModel(draft), prompt, 23, 2)
    found = speculative(StaticTorchModel(target, compiled=True), StaticTorchModel(draft, compiled=True), prompt, 23, 2)
    assert found.tokens == expected.tokens and {r.accepted for r in found.rounds} >= {0, 2}
    assert set(traced) == {"chain_1", "chain_2", "chain_3"} and len(traced) <= 5


def test_what_torch_cannot_compile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Callable[..., Any]:
        def fail(*_: Any) -> Any:
            raise torch._dynamo.exc.Unsupported("a call that cannot be traced\nand a long trace")

        return fail

    monkeypatch.setattr(torch, "compile", broken)
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
@pytest.mark.parametrize("kind", HUGGING_FACE)
def test_compiled_steps_after_anything(kind: str) -> None:
    """Chains of few lengths, trees and roll-backs at random, compiled."""
    hugging_face, draws = HUGGING_FACE[kind], random.Random(2)
    mirror, model = walk(hugging_face, [[1], [2, 3]], size=150)
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


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_compiled_rounds_give_the_uncompiled_texts(temperature: float) -> None:
    """The same numbers give the same texts; in fp64 rounding changes none of them."""
    models = [[StaticTorchModel(pair["qwen2"], compiled=c) for pair in (MODELS, DRAFTS)] for c in (False, True)]
    for prompt in random_prompts(3, 61, seed=4):
        texts = []
        for target, draft in models:
            rules = Rules(Sampler(temperature), "token" if temperature else "greedy", random=random.Random(1).random)
            result = Decoded()
            drafter = ModelDrafter(draft, Fixed(2), rules.sampler, rules.random)
            list(decode(target, drafter, prompt, 24, rules, result))
            texts.append(result.tokens)
        assert texts[0] == texts[1]
        if not temperature:
            assert texts[0] == plain(TorchModel(MODELS["qwen2"]), prompt, 24).tokens


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_compiled_samples_follow_the_models_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    model, draft = (toy("qwen2", vocabulary=5, seed=seed, initializer_range=0.15) for seed in (4, 9))
    true_init = StaticTorchModel.__init__
    monkeypatch.setattr(
        StaticTorchModel, "__init__", lambda self, *a, **options: true_init(self, *a, **options, compiled=True)
    )
    assert least_p(model, draft, "token", [1, 2, 3], 1920, False) > 1e-3
