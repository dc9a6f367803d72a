"""L1 on single weights while fine-tuning: they shrink to exactly zero and stay there (λ follows the schedule in
`ramp`)."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from distill.errors import RecipeError, RunError
from distill.surgery.change import decoder_layers
from distill.surgery.sparsity.ramp import HAIR, plan, require_float32


def kth_smallest_magnitude(tensors: Sequence[Tensor], k: int) -> float:
    """The k-th smallest |w| (k from 1) in all fp32 tensors together, exact, without joining them.

    The bit patterns of positive floats are ordered as the floats are: counts of their upper, then their lower 16 bits
    find the value.
    """

    def rank(counts: Tensor, k: int) -> tuple[int, int]:
        total = counts.cumsum(0)
        at = int(torch.searchsorted(total, k))
        return at, k - (int(total[at - 1]) if at else 0)

    def bits(tensor: Tensor) -> Tensor:
        return tensor.detach().reshape(-1).view(torch.int32) & 0x7FFFFFFF

    def count(values: Iterable[Tensor]) -> Tensor:
        return torch.stack([torch.bincount(value, minlength=1 << 16).cpu() for value in values]).sum(0)

    upper, k = rank(count(bits(t) >> 16 for t in tensors), k)
    lower, _ = rank(count(b[(b >> 16) == upper] & 0xFFFF for b in map(bits, tensors)), k)
    found: float = struct.unpack("<f", struct.pack("<I", upper << 16 | lower))[0]
    return found


class UnstructuredL1:
    """L1 on every single weight of the blocks' matrices (not embeddings, norms, biases, head): w ← soft(w, rate·λ).

    It makes nothing faster in GGUF or on common hardware: zeros are stored and multiplied like any number. It is here
    for measurements. `sparsity` is the zero share asked for; one λ for all matrices follows the schedule of `ramp`,
    with single weights as groups, so that the spread over layers is left to the training. Only the weights that rank
    among those to go are shrunk, as in GroupLasso. Raises RecipeError for settings out of range, DataError for an
    unknown architecture.
    """

    def __init__(
        self,
        model: Any,
        steps: int,
        *,
        sparsity: float,
        start: float = 0.0,
        ramp: float = 0.2,
    ) -> None:
        self.matrices = block_matrices(model)
        if not 0 < sparsity < 1:
            raise RecipeError(f"sparsity: the zero share wanted is {sparsity}", "ask for a share between 0 and 1")
        self.schedule = plan(steps, start, ramp)
        require_float32(self.parameters())
        self.weights = sum(weight.numel() for weight in self.matrices.values())
        self.wanted = max(1, round(sparsity * self.weights))
        self.step = 0
        self.frozen = False
        self.pressed = 0.0
        self.removed: list[Tensor] = []  # boolean, as the matrices, once frozen

    def parameters(self) -> list[torch.nn.Parameter]:
        """The matrices that are shrunk: they get no weight decay."""
        return list(self.matrices.values())

    def zeros(self) -> int:
        """Weights that are exactly zero."""
        return self.weights - sum(int(weight.count_nonzero()) for weight in self.matrices.values())

    @torch.no_grad()
    def after_step(self, step: int, rate: float) -> dict[str, Any]:
        """As for GroupLasso; zero_share is the share of all these weights that are zero."""
        assert step == self.step, f"step {step} after {self.step} steps"
        self.step += 1
        left = self.schedule.left(self.step)
        strength = 0.0
        if self.frozen:
            for weight, removed in zip(self.matrices.values(), self.removed, strict=True):
                weight.masked_fill_(removed, 0.0)
                removed.logical_or_(weight == 0)  # so that the mask is the zeros of the weights, as a resume reads it
        elif left:
            strength = self._press(left, rate)
        zeros = self.zeros()
        if not self.frozen and (left == 1 or (left and zeros >= self.wanted)):
            self.frozen = True
            self.removed = [weight == 0 for weight in self.matrices.values()]
        return {
            "phase": "debias" if self.frozen else "ramp" if left else "dense",
            "lambda": strength,
            "zero_share": zeros / self.weights,
        }

    def _press(self, left: int, rate: float) -> float:
        distance = kth_smallest_magnitude(self.parameters(), self.wanted)
        strength = HAIR * distance / (left * rate) if rate > 0 else 0.0
        for weight in self.matrices.values():
            shrunk = torch.nn.functional.softshrink(weight, rate * strength)
            weight.copy_(torch.where(weight.abs() <= distance, shrunk, weight))
        self.pressed += strength
        return strength

    def state_dict(self) -> dict[str, Any]:
        """The state beyond the model and the step, for JSON; the mask is the zeros of the weights."""
        return {"step": self.step, "frozen": self.frozen, "zeros": self.zeros(), "pressed": self.pressed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`, after the model's weights; raises RunError when the zeros are not those."""
        if self.zeros() != state["zeros"]:
            raise RunError(
                f"the weights have {self.zeros()} zeros, their checkpoint's sparsity {state['zeros']}",
                "the checkpoint is damaged: delete it to go on from the one before",
            )
        self.step, self.frozen, self.pressed = int(state["step"]), bool(state["frozen"]), float(state["pressed"])
        self.removed = [weight == 0 for weight in self.matrices.values()] if self.frozen else []

    def details(self) -> dict[str, Any]:
        """For the record of changes: the zero share reached, its spread over the layers, the mean λ of the ramp."""
        by_layer = weight_shares_by_layer(self.matrices)
        mean = sum(by_layer) / len(by_layer)
        deviation = math.sqrt(sum((share - mean) ** 2 for share in by_layer) / len(by_layer))
        ramp_steps = min(max(1, self.step - self.schedule.dense), self.schedule.ramp)
        return {
            "zero_share": self.zeros() / self.weights,
            "least_layer": min(by_layer),
            "most_layer": max(by_layer),
            "variation_over_layers": deviation / mean if mean else 0.0,
            "lambda": self.pressed / ramp_steps,
            "trimmed": True,
            "faster": False,
        }


def block_matrices(model: Any) -> dict[str, torch.nn.Parameter]:
    """The weights of all linear layers of the blocks by name, `layers.0.mlp.up_proj` and so on."""
    return {
        f"layers.{index}.{name.removesuffix('.weight')}": parameter
        for index, layer in enumerate(decoder_layers(model))
        for name, parameter in layer.named_parameters()
        if parameter.ndim == 2
    }


def sparsity_by_tensor(model: Any) -> dict[str, float]:
    """Zero share of each matrix of the blocks, and of each layer's matrices together (`layers.0` and so on)."""
    matrices = block_matrices(model)
    shares = {name: float((weight == 0).sum()) / weight.numel() for name, weight in matrices.items()}
    layers = weight_shares_by_layer(matrices)
    return {**{f"layers.{index}": share for index, share in enumerate(layers)}, **shares}


def weight_shares_by_layer(matrices: dict[str, torch.nn.Parameter]) -> list[float]:
    """Zero share of each layer's weights together [L], from `block_matrices`."""
    zeros: dict[int, list[int]] = {}
    for name, weight in matrices.items():
        found = zeros.setdefault(int(name.split(".")[1]), [0, 0])
        found[0] += weight.numel() - int(weight.count_nonzero())
        found[1] += weight.numel()
    return [zero / total for _, (zero, total) in sorted(zeros.items())]
