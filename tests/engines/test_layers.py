"""Layers of few operators on an accelerator: the logits of the CPU by transformers' own, and what is left as it is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from toys import toy

from distill.engines.loaded import torch_decoder
from distill.engines.torch.model import TorchModel
from distill.engines.torch.products import Layer, Norm, in_few_operators
from distill.recipe import PyTorch

torch.set_num_threads(1)


def norms(model: Any) -> int:
    return sum(type(module) is Norm for module in model.modules())


@pytest.mark.parametrize(
    ("kind", "layers", "found"),
    [
        ("qwen3", True, 1),  # those inside its layers are functions
        ("gemma3", True, 1),
        ("mistral", True, 1),
        ("gemma2", False, 9),
        ("olmo2", False, 9),
        pytest.param("gemma4_text", False, 16, marks=pytest.mark.slow),
        ("starcoder2", False, 0),
    ],
)
def test_logits_are_those_of_the_cpu(kind: str, layers: bool, found: int, pretend: Any) -> None:
    """Chains, trees and windows, with both caches; the model itself stays what it was, and shares its tensors."""
    changes = {"sliding_window": 6} if kind == "mistral" else {}
    here = toy(kind, **changes)
    there = copy.deepcopy(here).to("pretend")
    names = [type(module).__name__ for module in there.modules()]
    expected = TorchModel(here)
    decoders = [torch_decoder(there, pytorch=PyTorch(static=static), tokens=60) for static in (False, True)]
    assert all(isinstance(one.model.model.layers[0], Layer) is layers for one in decoders)  # type: ignore[attr-defined]
    assert norms(decoders[0].model) == found  # type: ignore[attr-defined]
    for tokens in ([3, 1, 4, 1, 5], [9], [2, 6, 5], [3, 5, 8, 9, 7]):
        for decoder in decoders:
            logits = decoder.extend(tokens).full()
            torch.testing.assert_close(logits, (wanted := expected.extend(tokens).full()), atol=1e-4, rtol=1e-4)
            tree = [one.extend([1, 2, 3], parents=[-1, -1, 0]).full() for one in (decoder, expected)]
            torch.testing.assert_close(tree[0], tree[1], atol=1e-4, rtol=1e-4)
            for one in (decoder, expected):
                one.keep([[]])
            expected.rollback([expected.lengths[0] - len(wanted)])
        expected.extend(tokens)
    assert [type(module).__name__ for module in there.modules()] == names
    shared = {parameter.data_ptr() for parameter in there.parameters()}
    assert all(parameter.data_ptr() in shared for parameter in decoders[0].model.parameters())  # type: ignore[attr-defined]


def test_what_computes_something_else_is_left_alone(pretend: Any) -> None:
    """A norm of another kind, one that is told more, hooks, and weights of several types."""
    model = toy("olmo2").to("pretend")
    kind = type(model.model.norm)

    class CenteredRMSNorm(kind):  # type: ignore[misc, valid-type]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x - x.mean(-1, keepdim=True))

    class GatedRMSNorm(kind):  # type: ignore[misc, valid-type]
        def forward(self, x: torch.Tensor, gate: Any = None) -> torch.Tensor:
            return super().forward(x)

    for other in (CenteredRMSNorm, GatedRMSNorm):
        model.model.norm.__class__ = other
        changed = in_few_operators(model)
        assert type(changed.model.norm) is other and norms(changed) == 8
    model.model.norm.register_forward_hook(lambda *_: None)
    assert in_few_operators(model) is model
    mixed = toy("llama").to("pretend")
    mixed.model.embed_tokens.half()
    assert in_few_operators(mixed) is mixed
