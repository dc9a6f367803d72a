"""Narrower MLPs: which neurons stay.

A neuron is a row of gate_proj and up_proj and a column of down_proj. Legend: L layers, T tokens, F neurons, a [T, F]
the inputs of down_proj.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distill.errors import RecipeError
from distill.packing import Packed
from distill.surgery.change import decoder_layers, require_supported
from distill.surgery.observe import observe

MULTIPLE = 32  # of neurons: GGUF's quantised types store rows in blocks of 32


def check_width(config: Any, width: int) -> None:
    """Raise RecipeError when an MLP of this configuration cannot be cut to `width`: its own, or a multiple below it."""
    require_supported(config.model_type)
    full = config.intermediate_size
    possible = [*range(MULTIPLE, full, MULTIPLE), full]
    if width not in possible:
        near = sorted(sorted(possible, key=lambda w: abs(w - width))[:2])
        raise RecipeError(
            f"an MLP of {full} neurons cannot be cut to {width}",
            f"ask for a multiple of {MULTIPLE} (better 256) below {full}, or all: {' or '.join(map(str, near))}",
        )


def take(module: Any, index: Tensor, dim: int) -> None:
    """Keep those outputs (dim 0, with their biases) or inputs (dim 1; the bias stays) of a Linear."""
    weight = module.weight.detach().index_select(dim, index)
    module.weight = torch.nn.Parameter(weight, requires_grad=module.weight.requires_grad)
    module.out_features, module.in_features = weight.shape
    if dim == 0 and module.bias is not None:
        bias = module.bias.detach().index_select(0, index)
        module.bias = torch.nn.Parameter(bias, requires_grad=module.bias.requires_grad)


def neuron_scores(model: Any, blocks: Packed, batch: int = 4) -> list[Tensor]:
    """E[a²]·‖down column‖² [F] of each layer's neurons: the mean square that each adds to the residual stream."""
    downs = [layer.mlp.down_proj for layer in decoder_layers(model)]
    squares = [torch.zeros(down.in_features, device=down.weight.device) for down in downs]

    def add(total: Tensor, a: Tensor) -> None:
        total.add_(a.square().sum(0))

    watches = [(down, partial(add, total)) for down, total in zip(downs, squares, strict=True)]
    count = observe(model, blocks, watches, batch)
    columns = [down.weight.detach().float().square().sum(0) for down in downs]
    return [total / count * column for total, column in zip(squares, columns, strict=True)]


def narrow(model: Any, blocks: Packed, width: int, batch: int = 4) -> dict[str, Any]:
    """Keep `width` neurons of every layer's MLP, those of largest score in their order; the model is changed in place.

    Returns JSON-able details: neurons kept per layer, and the share of its score they hold. Raises RecipeError for a
    width that is not possible (see check_width), and DataError when the blocks hold no token.
    """
    check_width(model.config, width)
    neurons, shares = [], []
    for scores in neuron_scores(model, blocks, batch):
        kept = scores.sort(descending=True, stable=True).indices[:width].sort().values
        mass = float(scores.sum())
        neurons.append(kept.tolist())
        shares.append(float(scores[kept].sum()) / mass if mass else 1.0)
    keep_neurons(model, neurons)
    return {"widths": [width] * len(neurons), "neurons": neurons, "score_kept": shares}


def keep_neurons(model: Any, neurons: Sequence[Sequence[int]]) -> None:
    """Keep those neurons of each layer's MLP (equally many, ascending); the model is changed in place."""
    for layer, kept in zip(decoder_layers(model), neurons, strict=True):
        mlp = layer.mlp
        index = torch.tensor(kept, dtype=torch.long, device=mlp.down_proj.weight.device)
        for linear, dim in ((mlp.gate_proj, 0), (mlp.up_proj, 0), (mlp.down_proj, 1)):
            if len(kept) < linear.weight.shape[dim]:
                take(linear, index, dim)
        mlp.intermediate_size = len(kept)
    model.config.intermediate_size = len(neurons[0])
