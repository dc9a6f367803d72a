"""Rounds on a GPU: the texts of the CPU, and no wait for the device but the one transfer of a round."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_device_rounds import DRAFTS, MODELS
from toys import random_prompts

from distill.decoding import device_trees, on_device
from distill.decoding.decode import Decoded, decode, plain
from distill.decoding.drafters import Drafter, ModelDrafter
from distill.decoding.lengths import Fixed
from distill.decoding.rules import Rules
from distill.decoding.trees import Shape, TreeDrafter
from distill.engines.torch.model import TorchModel
from distill.engines.torch.static import StaticTorchModel
from distill.sampler import Sampler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]


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

    for module in (on_device, device_trees):
        monkeypatch.setattr(module, "fetch", fetch)
    yield
    torch.cuda.set_sync_debug_mode("default")


def drafter_of(kind: str, draft: Any, rules: Rules) -> Drafter:
    if kind == "chain":
        return ModelDrafter(draft, Fixed(3), rules.sampler, rules.random)
    shape = None if kind == "best-first" else Shape.of_widths([2, 2])
    best = rules.sampler.temperature == 0
    return TreeDrafter(draft, rules.sampler, rules.random, 6, shape=shape, best=best, depth=3)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("draft_device", "kind"), [("cuda", "chain"), ("cpu", "chain"), ("cuda", "best-first"), ("cuda", "drawn")]
)
def test_rounds_wait_once(compiled: bool, temperature: float, draft_device: str, kind: str, strict: None) -> None:
    target: Any = StaticTorchModel(copy.deepcopy(MODELS["qwen2"]).cuda(), compiled=compiled)
    draft: Any = StaticTorchModel(copy.deepcopy(DRAFTS["qwen2"]).to(draft_device), compiled=compiled)
    prompt = random_prompts(1, 61, seed=4)[0]
    for repeat in range(3):  # graphs are compiled, then recorded, then replayed
        rules = Rules(Sampler(temperature), "token" if temperature else "greedy", random=random.Random(1).random)
        result = Decoded()
        rounds = decode(target, drafter_of(kind, draft, rules), prompt, 24, rules, result)
        next(rounds)
        # A chain that a CPU drafted is copied to the target's device, for which CUDA waits.
        if repeat == 2 and draft_device == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        list(rounds)
        torch.cuda.set_sync_debug_mode("default")
        if not temperature:
            assert result.tokens == plain(TorchModel(MODELS["qwen2"]), prompt, 24).tokens
