"""L1 on single weights while fine-tuning: they shrink to exactly zero and stay there (λ follows the schedule in
`ramp`)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from distill.surgery.change import decoder_layers
from distill.surgery.sparsity.ramp import HAIR, Penalty


class UnstructuredL1(Penalty):
    """L1 on every single weight of the blocks' matrices (not embeddings, norms, biases, head): w ← soft(w, rate·λ).

    It makes nothing faster in GGUF or on common hardware: zeros are stored and multiplied like any number. It is here
    for measurements. `sparsity` is the zero share asked for; one λ for all matrices follows the schedule of `ramp`,
    with single weights as groups, so that the spread over layers is left to the training. Only the weights that rank
    among those to go are shrunk, as in GroupLasso. Raises RecipeError for an impossible schedule, DataError for an
    unknown architecture.
    """

    def __init__(self, model: Any, steps: int, *, sparsity: float, start: float = 0.0, ramp: float = 0.2) -> None:
        self.matrices = block_matrices(model)
        super().__init__(steps, start, ramp)
        self.weights = sum(weight.numel() for weight in self.matrices.values())
        self.to_remove = max(1, round(sparsity * self.weights))
        self.pressed = 0.0
        self.removed: list[Tensor] = []  # boolean, as the matrices, once frozen

    def zeros(self) -> int:
        """Weights that are exactly zero."""
        return self.weights - sum(int(weight.count_nonzero()) for weight in self.matrices.values())

    def _press(self, left: int, rate: float) -> float:
        magnitudes = torch.cat([weight.abs().flatten() for weight in self.matrices.values()])
        distance = float(magnitudes.kthvalue(self.to_remove).values)
        strength = HAIR * distance / (left * rate) if rate > 0 else 0.0
        for weight in self.matrices.values():
            shrunk = torch.nn.functional.softshrink(weight, rate * strength)
            weight.copy_(torch.where(weight.abs() <= distance, shrunk, weight))
        self.pressed += strength
        return strength

    def _zero_shares(self) -> tuple[dict[str, float], bool]:
        """zero_share is the share of all these weights."""
        zeros = self.zeros()
        return {"zero_share": zeros / self.weights}, zeros >= self.to_remove

    def _freeze(self) -> None:
        self.frozen = True
        self.removed = [weight == 0 for weight in self.matrices.values()]

    def _hold(self) -> None:
        for weight, removed in zip(self.matrices.values(), self.removed, strict=True):
            weight.masked_fill_(removed, 0.0)
            removed.logical_or_(weight == 0)  # so that the mask is the zeros of the weights, as a resume reads it

    def state_dict(self) -> dict[str, Any]:
        """See `Penalty`; the mask is the zeros of the weights."""
        return {"step": self.step, "frozen": self.frozen, "zeros": self.zeros(), "pressed": self.pressed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Penalty`."""
        assert self.zeros() == state["zeros"], "the weights are not those of the checkpoint"
        self.step, self.pressed = state["step"], state["pressed"]
        if state["frozen"]:
            self._freeze()

    def details(self) -> dict[str, Any]:
        """For the record of changes: the zero share reached, its spread over the layers and tensors, the mean λ of the
        ramp."""
        by_layer = weight_shares_by_layer(self.matrices)
        mean = sum(by_layer) / len(by_layer)
        deviation = math.sqrt(sum((share - mean) ** 2 for share in by_layer) / len(by_layer))
        return {
            "zero_share": self.zeros() / self.weights,
            "least_layer": min(by_layer),
            "most_layer": max(by_layer),
            "variation_over_layers": deviation / mean if mean else 0.0,
            "lambda": self.pressed / min(max(1, self.step - self.dense), self.ramp),
            "by_layer": by_layer,
            "by_tensor": sparsity_by_tensor(self.matrices),
        }


def block_matrices(model: Any) -> dict[str, torch.nn.Parameter]:
    """The weights of all linear layers of the blocks by name, `layers.0.mlp.up_proj` and so on."""
    return {
        f"layers.{index}.{name.removesuffix('.weight')}": parameter
        for index, layer in enumerate(decoder_layers(model))
        for name, parameter in layer.named_parameters()
        if parameter.ndim == 2
    }


def sparsity_by_tensor(matrices: dict[str, torch.nn.Parameter]) -> dict[str, float]:
    """Zero share of each layer (`layers.0` and so on) and of each matrix, from `block_matrices`."""
    layers = {f"layers.{index}": share for index, share in enumerate(weight_shares_by_layer(matrices))}
    return layers | {name: float((weight == 0).sum()) / weight.numel() for name, weight in matrices.items()}


def weight_shares_by_layer(matrices: dict[str, torch.nn.Parameter]) -> list[float]:
    """Zero share of each layer's weights together [L], from `block_matrices`, which holds them in order."""
    layers: dict[str, list[Tensor]] = {}
    for name, weight in matrices.items():
        layers.setdefault(name.split(".")[1], []).append(weight == 0)
    return [sum(int(zeros.sum()) for zeros in own) / sum(zeros.numel() for zeros in own) for own in layers.values()]
