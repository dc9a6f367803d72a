"""A narrower residual stream: the same dimensions kept everywhere, norms rescaled to the mean square that is left.

Legend: L layers, T tokens, H hidden, K kept, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from distill.errors import RecipeError
from distill.packing import Packed
from distill.surgery.change import decoder_layers, require_supported
from distill.surgery.cuts.attention import head_size
from distill.surgery.cuts.width import take
from distill.surgery.observe import observe

MULTIPLE = 64  # of residual dimensions


def check_hidden(config: Any, hidden: int) -> None:
    """Raise RecipeError when a model of this configuration cannot be cut to `hidden` residual dimensions."""
    require_supported(config.model_type)
    full, heads = config.hidden_size, config.num_attention_heads
    whole = config.model_type == "llama"  # transformers loads a llama only if its hidden size / heads is whole
    possible = [n for n in range(MULTIPLE, full, MULTIPLE) if not whole or n % heads == 0] + [full]
    if hidden not in possible:
        near = sorted(sorted(possible, key=lambda n: abs(n - hidden))[:2])
        raise RecipeError(
            f"the hidden size of {full} cannot be cut to {hidden}",
            f"ask for a multiple of {MULTIPLE} (better 256)"
            + (f" that {heads} heads divide" if whole else "")
            + f" up to {full}; nearest: {' or '.join(map(str, near))}",
        )


def readers(model: Any) -> list[tuple[Any, list[Any]]]:
    """Every RMSNorm over the residual stream, 2L + 1, and the matrices that read it."""
    found: list[tuple[Any, list[Any]]] = []
    for layer in decoder_layers(model):
        attention, mlp = layer.self_attn, layer.mlp
        found.append((layer.input_layernorm, [attention.q_proj, attention.k_proj, attention.v_proj]))
        found.append((layer.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj]))
    return [*found, (model.model.norm, [model.lm_head])]


def hidden_scores(model: Any, blocks: Packed, batch: int = 4) -> Tensor:
    """The importance [H] of each residual dimension, summing to 1.

    At each norm, with x the normalised and scaled stream and W its readers stacked: E[x_i²]·‖W column i‖², the mean
    square that dimension i adds to the readers' output, as a share of that norm's sum; then the mean over the norms, so
    that each counts the same, however large the stream is at its depth. One pass over the blocks.
    """
    sums = [torch.zeros_like(norm.weight, dtype=torch.float32) for norm, _ in readers(model)]

    def watch(norm: Any, total: Tensor) -> Callable[[Tensor], None]:
        def see(state: Tensor) -> None:
            total.add_((state.square() / _power(norm, state)).sum(0))

        return see

    observe(model, blocks, [(norm, watch(norm, t)) for (norm, _), t in zip(readers(model), sums, strict=True)], batch)
    scores = torch.zeros_like(sums[0])
    for (norm, matrices), total in zip(readers(model), sums, strict=True):
        columns = sum(matrix.weight.detach().float().square().sum(0) for matrix in matrices)
        own = total * norm.weight.detach().float().square() * columns
        scores += own / own.sum().clamp(min=torch.finfo(torch.float32).tiny)
    return scores / len(sums)


def norm_ratios(model: Any, blocks: Packed, kept: Tensor, batch: int = 4) -> list[float]:
    """Per norm, E[rms over the kept dimensions / rms over all], both with the norm's ε. One pass over the blocks.

    Multiplied into the scale of a norm over the kept dimensions only, it gives the least-squares match of the full
    norm's output in those dimensions, every token weighing the same.
    """
    norms = [norm for norm, _ in readers(model)]
    sums = [0.0] * len(norms)

    def watch(index: int, norm: Any) -> Callable[[Tensor], None]:
        def see(state: Tensor) -> None:
            sums[index] += float((_power(norm, state[:, kept]) / _power(norm, state)).sqrt().sum())

        return see

    total = observe(model, blocks, [(norm, watch(i, norm)) for i, norm in enumerate(norms)], batch)
    return [value / total for value in sums]


def _power(norm: Any, state: Tensor) -> Tensor:
    return state.square().mean(-1, keepdim=True) + norm.variance_epsilon


def narrow_hidden(model: Any, blocks: Packed, hidden: int, batch: int = 4) -> dict[str, Any]:
    """Keep the `hidden` residual dimensions of highest `hidden_scores`, in their order; the model changes in place.

    Embeddings, head, norms and every matrix that reads or writes the stream are cut, and each norm's scale is
    multiplied by its `norm_ratios`, measured in the uncut model, so that the readers' inputs keep their size. Heads
    keep their number and size; the size is then written into the configuration. Keeping all dimensions changes nothing.
    Two passes over the blocks.

    Returns the dimensions kept, the share of the score they hold and the ratios. Raises RecipeError as check_hidden.
    """
    check_hidden(model.config, hidden)
    full = model.config.hidden_size
    scores = hidden_scores(model, blocks, batch)
    kept = scores.sort(descending=True, stable=True).indices[:hidden].sort().values
    ratios = [1.0] * len(readers(model))
    if hidden < full:
        ratios = norm_ratios(model, blocks, kept, batch)
        _keep_dimensions(model, kept, ratios)
    return {"dimensions": kept.tolist(), "score_kept": float(scores[kept].sum() / scores.sum()), "norm_ratios": ratios}


@torch.no_grad()
def _keep_dimensions(model: Any, kept: Tensor, ratios: list[float]) -> None:
    config, size = model.config, head_size(model.config)
    embedding = model.model.embed_tokens
    tied = model.lm_head.weight is embedding.weight
    for (norm, matrices), ratio in zip(readers(model), ratios, strict=True):
        norm.weight = torch.nn.Parameter(norm.weight[kept] * ratio)
        for matrix in matrices:
            take(matrix, kept, 1)
    embedding.weight = torch.nn.Parameter(embedding.weight[:, kept])
    embedding.embedding_dim = len(kept)
    if tied:
        model.lm_head.weight = embedding.weight
    for layer in decoder_layers(model):
        take(layer.self_attn.o_proj, kept, 0)
        take(layer.mlp.down_proj, kept, 0)
        layer.hidden_size = layer.mlp.hidden_size = len(kept)
    config.head_dim = size
    config.hidden_size = len(kept)
