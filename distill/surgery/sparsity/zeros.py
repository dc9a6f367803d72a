"""How many weights of a model are zero, and how evenly over its layers and matrices.

Legend: L layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from distill.surgery.change import decoder_layers


def block_matrices(model: Any) -> dict[str, torch.nn.Parameter]:
    """The weights of all linear layers of the blocks by name, `layers.0.mlp.up_proj` and so on."""
    return {
        f"layers.{index}.{name.removesuffix('.weight')}": parameter
        for index, layer in enumerate(decoder_layers(model))
        for name, parameter in layer.named_parameters()
        if parameter.ndim == 2
    }


@dataclass(frozen=True)
class Evenness:
    """How evenly zeros spread over layers: least and most zero share, and standard deviation ÷ mean."""

    least: float
    most: float
    variation: float


def evenness(shares: Sequence[float]) -> Evenness:
    """Of zero shares, one per layer; the variation of a model without zeros is 0."""
    mean = sum(shares) / len(shares)
    deviation = math.sqrt(sum((share - mean) ** 2 for share in shares) / len(shares))
    return Evenness(min(shares), max(shares), deviation / mean if mean else 0.0)


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
