"""Narrower MLPs: which neurons stay, and a down projection that makes up for those removed.

A neuron is a row of gate_proj and up_proj and a column of down_proj. Legend: L layers, H hidden, F neurons, K kept,
R removed, G [F, F] Gram matrix of the inputs of down_proj.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from distill.errors import DataError, RecipeError
from distill.packing import Packed
from distill.surgery.change import decoder_layers, require_supported
from distill.surgery.cuts.layers import Loss
from distill.surgery.observe import walk_grams

MULTIPLE = 32  # of neurons: GGUF's quantised types store rows in blocks of 32
Matrices = list[dict[str, tuple[torch.nn.Parameter, torch.nn.Parameter | None]]]  # weight, bias by name, per layer


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


def set_matrix(module: Any, weight: Tensor, bias: Tensor | None = None) -> None:
    """Give a Linear another weight [out, in], and another bias where one is given."""
    module.weight = torch.nn.Parameter(weight, requires_grad=module.weight.requires_grad)
    module.out_features, module.in_features = weight.shape
    if bias is not None:
        module.bias = torch.nn.Parameter(bias, requires_grad=module.bias.requires_grad)


def take(module: Any, index: Tensor, dim: int) -> None:
    """Keep those outputs (dim 0, with their biases) or inputs (dim 1; the bias stays) of a Linear."""
    bias = module.bias.detach().index_select(0, index) if dim == 0 and module.bias is not None else None
    set_matrix(module, module.weight.detach().index_select(dim, index), bias)


def layer_scores(layer: Any, score: str, squares: Tensor | None = None) -> Tensor:
    """The importance [F] of a layer's neurons.

    activation  E[a²]·‖down column‖²: the mean square it adds to the residual stream; `squares` is E[a²] [F].
    magnitude   ‖gate row∘γ‖·‖up row∘γ‖·‖down column‖, γ the scale of the norm before the MLP: weights only.
    first       F, F − 1, …: keeps the first, as naive slicing does. A baseline.
    """
    mlp = layer.mlp
    columns = mlp.down_proj.weight.detach().float().square().sum(0)
    if score == "activation":
        assert squares is not None
        return squares.float() * columns
    if score == "magnitude":
        scale = layer.post_attention_layernorm.weight.detach().float()
        rows = [(linear.weight.detach().float() * scale).norm(dim=1) for linear in (mlp.gate_proj, mlp.up_proj)]
        return rows[0] * rows[1] * columns.sqrt()
    assert score == "first", score
    return torch.arange(len(columns), 0, -1, device=columns.device, dtype=torch.float32)


def lost_output(weight: Tensor, gram: Tensor, kept: Tensor) -> float:
    """E‖W[:, R] a_R‖²: what the output of down_proj, weight [H, F], loses with the neurons that are not kept [K]."""
    gone = torch.ones(len(gram), dtype=torch.bool, device=gram.device)
    gone[kept] = False
    lost = weight[:, gone].float()
    return float((lost @ gram[gone][:, gone] * lost).sum())


def repaired_down(weight: Tensor, gram: Tensor, kept: Tensor, ridge: float) -> tuple[Tensor, float]:
    """W[:, S] + W[:, R] G[R, S] (G[S, S] + λ mean(diag G) I)⁻¹, [H, K], and the E‖lost output‖² that it leaves.

    The ridge regression, in fp64, of the full output on the kept inputs. With λ = 0, or where G[S, S] cannot be
    factored, the pseudo-inverse stands for the inverse, at the precision of an fp32 G.
    """
    device = torch.device("cpu") if gram.device.type == "mps" else gram.device  # MPS has no fp64
    g, w, kept = gram.to(device, torch.float64), weight.to(device, torch.float64), kept.to(device)
    gone = torch.ones(len(g), dtype=torch.bool, device=device)
    gone[kept] = False
    lost = w[:, gone]
    shrink = ridge * float(g.diagonal().mean())
    inner, cross = g[kept][:, kept], g[kept][:, gone] @ lost.T  # [K, K], [K, H]
    factor, failed = torch.linalg.cholesky_ex(inner + shrink * torch.eye(len(kept), dtype=g.dtype, device=device))
    if ridge > 0 and not int(failed):
        solved = torch.cholesky_solve(cross, factor)
    else:
        tolerance = len(kept) * torch.finfo(torch.float32).eps
        solved = torch.linalg.pinv(inner, rtol=tolerance, hermitian=True) @ cross
        shrink = 0.0
    # E‖lost − Xᵀa_S‖² by the normal equations (G_SS + μ) X = c: E‖lost‖² − ⟨X, c⟩ − μ‖X‖².
    left = float((lost @ g[gone][:, gone] * lost).sum() - (solved * cross).sum() - shrink * solved.square().sum())
    return (w[:, kept] + solved.T).to(weight.device, weight.dtype), max(left, 0.0)


def narrow(
    model: Any,
    blocks: Packed,
    width: int,
    *,
    score: str = "activation",
    repair: bool = True,
    ridges: Sequence[float] = (1e-3,),
    sequential: bool = True,
    loss: Loss | None = None,
    batch: int = 4,
) -> dict[str, Any]:
    """Keep `width` neurons of every layer's MLP, each layer its own, in their order; the model is changed in place.

    `repair` refits down_proj to the full output (see repaired_down; its bias stays). With `sequential` each layer is
    scored and refitted on the outputs of the layers before it as already cut; else on the uncut model. Both take about
    one pass over the blocks; without repair, other scores than `activation` take none. Of several ridges the one of
    least `loss(model)` is taken: measure the loss on other blocks.

    Returns JSON-able details: neurons kept per layer, the share of its score they hold, and where Gram matrices were
    collected E‖lost output‖² / E‖output‖² per layer, without and with repair. Raises RecipeError for a width that is
    not possible (see check_width).
    """
    check_width(model.config, width)
    tried: list[float | None] = [*ridges] if repair else [None]
    start, losses, least = _mlps(model), [], math.inf
    chosen: tuple[float | None, dict[str, Any], Matrices] | None = None
    for value in tried:
        _restore(model, start)
        report = _cut(model, blocks, width, score, value, sequential, batch)
        losses.append(0.0 if len(tried) == 1 or loss is None else float(loss(model)))
        if losses[-1] < least:
            least, chosen = losses[-1], (value, report, _mlps(model))
    if chosen is None:
        raise DataError(f"the loss is not finite with any ridge of {[*ridges]}", "check the donor's weights")
    _restore(model, chosen[2])
    widths = [width] * len(decoder_layers(model))
    choice = {"score": score, "repair": repair, "ridge": chosen[0], "sequential": sequential, "widths": widths}
    return {**choice, **({"ridges": [*ridges], "losses": losses} if len(tried) > 1 else {}), **chosen[1]}


def _cut(
    model: Any, blocks: Packed, width: int, score: str, ridge: float | None, sequential: bool, batch: int
) -> dict[str, Any]:
    """Cut every layer's MLP to `width` neurons, with repair where a ridge is given."""
    observed = score == "activation" or ridge is not None
    report: dict[str, list[Any]] = {"neurons": [], "score_kept": []}
    if observed:
        report |= {"lost_without_repair": [], "lost": []}

    @torch.no_grad()
    def visit(index: int, gram: Tensor | None) -> None:
        layer = decoder_layers(model)[index]
        scores = layer_scores(layer, score, None if gram is None else gram.diagonal())
        kept = scores.sort(descending=True, stable=True).indices[:width].sort().values
        report["neurons"].append(kept.tolist())
        mass = float(scores.sum())
        report["score_kept"].append(float(scores[kept].sum()) / mass if mass else 1.0)
        down = None
        if gram is not None:
            full = layer.mlp.down_proj.weight.detach()
            power = float((full.float() @ gram * full.float()).sum())
            left = without = lost_output(full, gram, kept)
            if ridge is not None and len(kept) < len(scores):
                down, left = repaired_down(full, gram, kept, ridge)
            report["lost_without_repair"].append(without / power if power else 0.0)
            report["lost"].append(left / power if power else 0.0)
        _keep_neurons(layer.mlp, kept, down)

    if observed:
        walk_grams(model, blocks, visit, sequential=sequential, batch=batch)
    else:
        for index in range(len(decoder_layers(model))):
            visit(index, None)
    model.config.intermediate_size = width
    return report


def keep_neurons(model: Any, neurons: Sequence[Sequence[int]]) -> None:
    """Keep those neurons of each layer's MLP (equally many, ascending); the model is changed in place."""
    for layer, kept in zip(decoder_layers(model), neurons, strict=True):
        index = torch.tensor(kept, dtype=torch.long, device=layer.mlp.down_proj.weight.device)
        _keep_neurons(layer.mlp, index, None)
    model.config.intermediate_size = len(neurons[0])


def _keep_neurons(mlp: Any, kept: Tensor, down: Tensor | None) -> None:
    """Cut an MLP to `kept`, with another down projection [H, K] where one is given."""
    for linear, dim in ((mlp.gate_proj, 0), (mlp.up_proj, 0), (mlp.down_proj, 1)):
        if len(kept) < linear.weight.shape[dim]:
            take(linear, kept, dim)
    if down is not None:
        set_matrix(mlp.down_proj, down)
    mlp.intermediate_size = len(kept)


def _mlps(model: Any) -> Matrices:
    """The matrices of every MLP, as they are; cutting makes new ones."""
    return [
        {name: (linear.weight, linear.bias) for name, linear in layer.mlp.named_children() if hasattr(linear, "weight")}
        for layer in decoder_layers(model)
    ]


def _restore(model: Any, saved: Matrices) -> None:
    for layer, own in zip(decoder_layers(model), saved, strict=True):
        for name, (weight, bias) in own.items():
            linear = getattr(layer.mlp, name)
            linear.weight, linear.bias = weight, bias
            linear.out_features, linear.in_features = weight.shape
        layer.mlp.intermediate_size = own["gate_proj"][0].shape[0]
