"""The target's last hidden states, and its head, which turns them into its distributions.

Legend: n blocks, S positions, N positions of any kind, H the target's hidden size, V its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from distill.errors import DataError
from distill.models.finite import require_finite
from distill.models.packed_forward import hidden_states, packed_inputs
from distill.models.torch_model import model_name
from distill.packing import Packed
from distill.target.distributions import DenseTeacher, LogitForm, logit_form

NOISE = 1e-4  # relative error of logits in fp32; in narrower types that of one rounding


@dataclass(frozen=True)
class Head:
    """Weight [V, H] of the tokens alone, in the target's type, bias [V] or none, and the form of its logits."""

    weight: Tensor
    bias: Tensor | None
    form: LogitForm

    @classmethod
    def of(cls, model: Any, vocabulary: int) -> Head:
        """The head of a loaded model; rows from `vocabulary` on are padding. Shares the model's memory."""
        layer = model.get_output_embeddings()
        weight = getattr(layer, "weight", None)
        if weight is None or not weight.is_floating_point() or weight.shape[0] < vocabulary:
            raise _unlike(model, f"its head is a {type(layer).__name__} without a row for each token")
        bias = getattr(layer, "bias", None)
        rows = slice(0, vocabulary)
        form = logit_form(model.config)
        return cls(weight.detach()[rows], None if bias is None else bias.detach()[rows], form)

    def to(self, device: torch.device) -> Head:
        """The same on another device."""
        return replace(self, weight=self.weight.to(device), bias=None if self.bias is None else self.bias.to(device))

    def teacher(self, hidden: Tensor) -> DenseTeacher:
        """The distributions of hidden states [N, H]."""
        return DenseTeacher(hidden, self.weight, len(self.weight), self.form, self.bias)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., H], in fp32."""
        return self.form.apply(torch.nn.functional.linear(hidden.to(self.weight.dtype), self.weight, self.bias))


@torch.no_grad()
def require_head(model: Any, head: Head, blocks: Packed) -> None:
    """Raise DataError unless `head` and the first block's hidden states give the model's own logits."""
    first = blocks.take(slice(0, 1))
    expected = model(**packed_inputs(model, first)).logits[..., : len(head.weight)].float()
    require_finite([float(expected.amax())], lambda row: model_name(model))
    found = head.logits(hidden_states(model, first).to(head.weight.device)).to(expected.device)
    error = float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt().clamp(min=1e-12))
    if not error <= max(NOISE, 2 * torch.finfo(model.dtype).eps):
        raise _unlike(model, f"its logits differ by {error:.1%} from those of its head with {head.form}")


def _unlike(model: Any, what: str) -> DataError:
    return DataError(
        f"the distributions of a {model.config.model_type} cannot be computed from its last hidden states: {what}",
        "use teacher.kind: compact, which stores the model's own probabilities",
    )
