"""Kept layers that make up for the dropped ones behind them.

A layer adds the outputs of its attention and of its MLP, W a, to the stream. Where the layers behind it are gone, W
(down_proj) is refitted by ridge regression, so that the stream comes near to the uncut model's where the next kept
layer reads it. Legend: L layers, n blocks, S positions, T tokens, H hidden, F neurons, W [H, F], a [F].
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from distill.errors import DataError
from distill.packing import Packed
from distill.progress import Progress
from distill.surgery.change import decoder_layers
from distill.surgery.cuts.layers import Loss
from distill.surgery.observe import parts_of, run_layer, tokens, watching

States = list[list[Tensor]]  # of each kept layer, of each batch of blocks, [n, S, H]


@torch.no_grad()
def states_behind(model: Any, kept: Sequence[int], blocks: Packed, batch: int = 4) -> States:
    """The stream of the uncut model where each of the `kept` layers (ascending) is to end: what the next one reads, and
    behind the last layer.

    Raises DataError when the blocks hold no token.
    """
    ends = [*kept[1:], len(decoder_layers(model))]
    states: dict[int, list[Tensor]] = {end: [] for end in ends}
    for part in parts_of(model, blocks, batch):
        state = model.model.embed_tokens(part.ids)
        for index in range(ends[-1]):
            state = run_layer(model, index, part, state)
            if index + 1 in states:
                states[index + 1].append(state)
    return [states[end] for end in ends]


@torch.no_grad()
def refit_layers(
    model: Any,
    kept: Sequence[int],
    ends: States,
    blocks: Packed,
    *,
    ridges: Sequence[float],
    loss: Loss,
    batch: int = 4,
) -> dict[str, Any]:
    """Refit down_proj of the layers of `model`, which are the `kept` ones of the model whose `ends` are given.

    Layers before the first gap stay as they are. The others are refitted in turn, on the outputs of those before them
    as already refitted, so that errors do not add up. Every position counts alike: errors are relative to the length of
    its state. Of several ridges, and of no refit, the one of least `loss(model)` is taken: measure the loss on other
    blocks.

    Returns JSON-able details: the ridge taken (null: none helped), all losses, and per refitted layer the mean squared
    error of the stream behind it, relative to the stream, without its refit and with it. Raises DataError where the
    loss is never finite, or the blocks hold no token.
    """
    downs = [layer.mlp.down_proj for layer in decoder_layers(model)]
    start = [down.weight.detach() for down in downs]
    choices: list[tuple[float | None, float, dict[str, Any], list[Tensor]]] = [(None, float(loss(model)), {}, start)]
    progress = Progress("layers: refitted", len(ridges) * (len(kept) - _gap(kept)), brief=True)
    for ridge in ridges:
        _set_weights(downs, start)
        errors = _refit(model, kept, ends, blocks, ridge, batch, progress)
        choices.append((ridge, float(loss(model)), errors, [down.weight.detach() for down in downs]))
    finite = [choice for choice in choices if math.isfinite(choice[1])]
    if not finite:
        raise DataError("the loss of the cut model is not finite", "check the donor's weights")
    ridge_taken, _, errors, weights = min(finite, key=lambda choice: choice[1])
    _set_weights(downs, weights)
    losses = [value if math.isfinite(value) else None for _, value, _, _ in choices]
    return {"ridge": ridge_taken, "ridges": [None, *ridges], "losses": losses, **errors}


def _set_weights(downs: Sequence[Any], weights: Sequence[Tensor]) -> None:
    for down, weight in zip(downs, weights, strict=True):
        down.weight = torch.nn.Parameter(weight, requires_grad=down.weight.requires_grad)


def _gap(kept: Sequence[int]) -> int:
    """The first of the kept layers behind which one is missing; else the last."""
    return next((i for i, (own, after) in enumerate(itertools.pairwise(kept)) if after > own + 1), len(kept) - 1)


def _refit(
    model: Any, kept: Sequence[int], ends: States, blocks: Packed, ridge: float, batch: int, progress: Progress
) -> dict[str, list[float]]:
    """Refit every layer from the first gap on; the relative errors."""
    parts = parts_of(model, blocks, batch)
    streams = [model.model.embed_tokens(part.ids) for part in parts]
    report: dict[str, list[float]] = {"lost_without_refit": [], "lost": []}
    count = sum(int(tokens(part.documents).sum()) for part in parts)
    gap = _gap(kept)
    for index in range(gap):
        streams = [run_layer(model, index, part, stream) for part, stream in zip(parts, streams, strict=True)]
    for index, layer in enumerate(decoder_layers(model)[gap:], gap):
        down = layer.mlp.down_proj
        gram = torch.zeros(down.in_features, down.in_features, dtype=torch.float32, device=down.weight.device)
        cross = torch.zeros(down.in_features, down.out_features, dtype=torch.float32, device=down.weight.device)
        missing_power = 0.0
        for at, (part, end) in enumerate(zip(parts, ends[index], strict=True)):
            neurons: list[Tensor] = []
            before_mlp: list[Tensor] = []
            with watching([(down, neurons.append), (layer.post_attention_layernorm, before_mlp.append)]):
                output = run_layer(model, index, part, streams[at])
            used = tokens(part.documents)
            uncut = end[used].float()
            share = uncut.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny).reciprocal()  # [T, 1]
            a, missing = neurons[0][used].float() * share, (uncut - output[used].float()) * share
            gram.addmm_(a.T, a)
            cross.addmm_(a.T, missing)
            missing_power += float(missing.square().sum())
            streams[at] = before_mlp[0]
        change, explained = _ridge(gram, cross, ridge)
        weight = (down.weight.detach().float() + change.T).to(down.weight.dtype)
        down.weight = torch.nn.Parameter(weight, requires_grad=down.weight.requires_grad)
        streams = [state + layer.mlp(layer.post_attention_layernorm(state)) for state in streams]
        report["lost_without_refit"].append(missing_power / count)
        report["lost"].append(max(missing_power - explained, 0.0) / count)
        progress.step()
    return report


def _ridge(gram: Tensor, cross: Tensor, ridge: float) -> tuple[Tensor, float]:
    """X = (G + μ I)⁻¹ C [F, H] with μ = ridge · mean diag G, and by how much it lowers Σ‖missing‖²; solved in fp64."""
    device = torch.device("cpu") if gram.device.type == "mps" else gram.device  # MPS has no fp64
    g, c = gram.to(device, torch.float64), cross.to(device, torch.float64)
    shrink = max(ridge * float(g.diagonal().mean()), torch.finfo(g.dtype).tiny)  # of neurons that are all zero
    factor = torch.linalg.cholesky(g + shrink * torch.eye(len(g), dtype=g.dtype, device=device))
    solved = torch.cholesky_solve(c, factor)
    # Σ‖m − Xᵀa‖² by the normal equations (G + μ) X = C: Σ‖m‖² − ⟨X, C⟩ − μ‖X‖².
    explained = float((solved * c).sum() + shrink * solved.square().sum())
    return solved.to(cross.device, torch.float32), explained
