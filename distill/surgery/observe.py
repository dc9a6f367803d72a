"""Measurements of a loaded model on text: angles between its layers, their influence, and the inputs of its MLPs.

Every function passes packed blocks through the model, documents apart, and counts only positions that hold a token.
Sums are kept in fp32 or better on the model's device. Legend: L layers, n blocks, S positions, T tokens of one batch,
H hidden, F neurons of an MLP.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from distill.errors import DataError
from distill.models.packed_forward import hidden_states, separation
from distill.packing import Packed
from distill.surgery.change import decoder_layers

Watch = tuple[Any, Callable[[Tensor], None]]  # a module, and the function that gets its inputs


def tokens(documents: Tensor) -> Tensor:
    """Positions [n, S] that hold a token."""
    return documents >= 0


@contextmanager
def watching(watches: Sequence[Watch]) -> Iterator[None]:
    """Within the block, each function is called with the first input of its module at every forward pass."""

    def hook(see: Callable[[Tensor], None]) -> Callable[..., None]:
        return lambda _module, arguments: see(arguments[0])

    handles = [module.register_forward_pre_hook(hook(see)) for module, see in watches]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def parts_of(model: Any, blocks: Packed, batch: int) -> list[Packed]:
    """The blocks in batches on the model's device; raises DataError when they hold no token."""
    if not bool(tokens(blocks.documents).any()):
        raise DataError("the blocks to observe the model on hold no token", "give it text: enlarge the corpus")
    device = next(model.parameters()).device
    parts = (blocks.take(slice(start, start + batch)) for start in range(0, len(blocks), batch))
    return [Packed(*(x.to(device) for x in (p.ids.long(), p.documents, p.positions.long(), p.mask))) for p in parts]


@torch.no_grad()
def observe(
    model: Any,
    blocks: Packed,
    watches: Sequence[Watch],
    batch: int = 4,
) -> int:
    """One pass over the blocks; each watch gets its module's inputs [T, ·] in fp32, at the positions with a token.

    Returns the number of these positions. Raises DataError when the blocks hold no token.
    """
    used = torch.zeros(0, dtype=torch.bool)

    def only_used(see: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        return lambda values: see(values[used].float())

    total = 0
    with watching([(module, only_used(see)) for module, see in watches]):
        for part in parts_of(model, blocks, batch):
            used = tokens(part.documents)
            total += int(used.sum())
            hidden_states(model, part)
    return total


def _chords(model: Any, blocks: Packed, batch: int, every: bool, see: Callable[[int, int, Tensor], None]) -> int:
    """Call see(l, n, |u_l - u_{l+n}|) with u the unit vectors along the states; only n = 1 unless `every`.

    Chords are exact at small angles, where cosines of fp32 vectors lose their digits.
    """
    layers = decoder_layers(model)
    units: list[Tensor] = []

    def keep(state: Tensor) -> None:
        units.append(torch.nn.functional.normalize(state, dim=-1))

    def finish(state: Tensor) -> None:
        keep(state)
        for low in range(len(layers)):
            for high in range(low + 1, len(units) if every else low + 2):
                see(low, high - low, (units[low] - units[high]).norm(dim=-1).clamp(max=2))
        units.clear()

    return observe(model, blocks, [*((layer, keep) for layer in layers), (model.model.norm, finish)], batch)


def angular_distances(model: Any, blocks: Packed, batch: int = 4) -> Tensor:
    """d(l, n) = mean arccos(cos(h_l, h_{l+n})) / π as [L, L + 1] fp64, h_l being the input of layer l, all in one pass.

    Entries with l + n > L are infinite. arXiv 2403.17887 (eq. 7) takes only the last token of each sequence; here all
    positions count, which needs far less text for the same noise. Raises DataError when the blocks hold no token.
    """
    count = len(decoder_layers(model))
    angles = torch.full((count, count + 1), math.inf, dtype=torch.float64)
    for low in range(count):
        angles[low, : count + 1 - low] = 0

    def see(low: int, apart: int, chord: Tensor) -> None:
        angles[low, apart] += float((2 * torch.asin(chord / 2)).sum())

    total = _chords(model, blocks, batch, True, see)
    return angles / (total * math.pi)


def block_influence(model: Any, blocks: Packed, batch: int = 4) -> list[float]:
    """1 − mean cosine of each layer's input and output, [L] (block influence, Men et al. 2024, arXiv 2403.03853)."""
    found = [0.0] * len(decoder_layers(model))

    def see(low: int, _apart: int, chord: Tensor) -> None:
        found[low] += float((chord.square() / 2).sum())

    total = _chords(model, blocks, batch, False, see)
    return [value / total for value in found]


@torch.no_grad()
def walk_grams(
    model: Any,
    blocks: Packed,
    visit: Callable[[int, Tensor], None],
    *,
    sequential: bool,
    batch: int = 4,
) -> None:
    """Call `visit(layer, G)` layer by layer with G = Σ a aᵀ / tokens [F, F], a the input of its down_proj.

    `visit` may cut that MLP: with `sequential` the later layers run on the cut model, else on the model as it was.
    Hidden states of all blocks are held between layers (n·S·H numbers), so that every layer is run once, and its MLP
    once more when `sequential`. Raises DataError when the blocks hold no token.
    """
    parts = parts_of(model, blocks, batch)
    states = [model.model.embed_tokens(part.ids) for part in parts]
    count = sum(int(tokens(part.documents).sum()) for part in parts)
    for index, layer in enumerate(decoder_layers(model)):
        down = layer.mlp.down_proj
        gram = torch.zeros(down.in_features, down.in_features, dtype=torch.float32, device=down.weight.device)
        for at, part in enumerate(parts):
            seen: list[Tensor] = []
            before_mlp: list[Tensor] = []
            with watching([(down, seen.append), (layer.post_attention_layernorm, before_mlp.append)]):
                output = run_layer(model, index, part, states[at])
            a = seen[0][tokens(part.documents)].float()
            gram.addmm_(a.T, a)
            states[at] = before_mlp[0] if sequential else output
        visit(index, gram / count)
        if sequential:
            for at, state in enumerate(states):
                states[at] = state + layer.mlp(layer.post_attention_layernorm(state))


def run_layer(model: Any, index: int, part: Packed, state: Tensor) -> Tensor:
    """The output [n, S, H] of one layer for the states [n, S, H] of a batch of blocks."""
    masks = separation(model, part.documents, state.device)
    output = decoder_layers(model)[index](
        state,
        attention_mask=masks[model.config.layer_types[index]] if isinstance(masks, dict) else masks,
        position_ids=part.positions,
        position_embeddings=model.model.rotary_emb(state, part.positions),
        use_cache=False,
    )
    return output
