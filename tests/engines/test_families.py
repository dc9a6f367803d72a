"""The family matrix: with any drafter and in any cache, a family's texts are transformers' own, or it is refused.

A family is a line of `toys.FAMILIES`; all but those named here take chains, trees, rows and the static cache.
Legend: V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from test_batch import any_calls
from test_tree_cache import Mirror, check_levels, close, prefill, within
from toys import FAMILIES, blurred, toy

from distill.decoding.decode import decode_text, plain
from distill.decoding.drafters import Drafter, ModelDrafter
from distill.decoding.lengths import Fixed
from distill.decoding.rules import Rules
from distill.decoding.trees import TreeDrafter
from distill.engines.loaded import BatchedTorchModel, growing_decoder
from distill.engines.torch.model import TorchModel
from distill.engines.torch.static import StaticTorchModel
from distill.errors import DataError
from distill.recipe import Sampler

torch.set_num_threads(1)

V = 61
RECURRENT = (
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "nemotron_h", "granitemoehybrid", "falcon_h1"),
    *("olmo_hybrid", "bamba", "lfm2"),
)
CHAINS = {"llama4_text": "of the kind chunked_attention", "gpt_neo": "of the kind global"}  # and nothing else, and why
CHAINS |= dict.fromkeys(RECURRENT, "state") | dict.fromkeys(("bloom", "mpt", "falcon"), "of its own kind")
REFUSED = {"mamba": "recurrent state|state in its own way"}
PROMPT = [random.Random(2).randrange(V) for _ in range(24)]  # longer than the windows
NEW = 12


def growing(model: Any) -> TorchModel:
    """The model with a growing cache."""
    return growing_decoder(model, prepack=False)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in REFUSED])
def test_family(family: str) -> None:
    """In fp64 texts are equal without exception; layers with a recurrent state compute in fp32. That verifiers follow
    the logits is held by test_exact_decoding.py."""
    model = toy(family, seed=3)
    model = model if family in RECURRENT else model.double()
    draft = blurred(model, 6, 0.03)
    if family in CHAINS:
        assert growing(model).max_leaves == 0
        with pytest.raises(ValueError, match=CHAINS[family]):
            growing(model).extend([1], parents=[-1])
        with pytest.raises(ValueError, match=CHAINS[family]):
            BatchedTorchModel(model, 2)
        with pytest.raises(DataError, match=CHAINS[family]):
            StaticTorchModel(model)
    kinds = [growing] if family in CHAINS else [growing, StaticTorchModel]
    for kind in kinds:
        check_logits(model, kind, random.Random(7))
        check_greedy(kind(model), kind(draft), generated(model))


def check_logits(model: Any, kind: Any, draws: random.Random) -> None:
    """After chains, trees and roll-backs at random, and level by level, logits are those of a fresh forward pass."""
    alone = kind(model)
    mirror = Mirror(alone, lambda text: prefill(model, text), close if alone.max_leaves else within(5e-4))
    mirror.chain(PROMPT, [len(PROMPT) - 1])
    if alone.max_leaves:
        # Two branches deeper than the windows, whose nodes take turns: a window that counted columns would be half.
        mirror.tree([draws.randrange(V) for _ in range(14)], [-1, -1, *range(12)], [10, 13])
        mirror.keep(range(1, 14, 2))
    for _ in range(5 if alone.max_leaves else 40):
        mirror.step(draws, 99 if alone.max_leaves else 0)
    if alone.max_leaves:
        check_levels(alone, draws, close)
        any_calls(model, 2, draws, 4, StaticTorchModel if kind is StaticTorchModel else BatchedTorchModel)


def generated(model: Any) -> list[int]:
    """The text that transformers generates."""
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return model.generate(torch.tensor([PROMPT]), **options)[0, len(PROMPT) :].tolist()


def check_greedy(target: Any, draft: Any, text: Sequence[int]) -> None:
    """Plain, with a chain, and with a tree where the model takes one."""
    assert plain(target, PROMPT, NEW).tokens == text
    drafters: list[Drafter] = [ModelDrafter(draft, Fixed(3), Sampler(temperature=0), lambda: 0.0)]
    if target.max_leaves:
        drafters.append(TreeDrafter(draft, Sampler(temperature=0), lambda: 0.0, 6, rule=Fixed(3)))
    for drafter in drafters:
        found = decode_text(target, drafter, PROMPT, NEW, Rules())
        assert found.tokens == text and any(one.accepted for one in found.rounds)


@pytest.mark.parametrize("family", REFUSED)
def test_refused(family: str) -> None:
    model = toy(family)
    for kind in (growing, StaticTorchModel):
        with pytest.raises(DataError, match=REFUSED[family]):
            kind(model)
