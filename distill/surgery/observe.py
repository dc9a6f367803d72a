"""Measurements of a loaded model on text: the influence of its layers, and the inputs of its MLPs.

Every function passes packed blocks through the model, documents apart, and counts only positions that hold a token.
Sums are kept in fp32 or better on the model's device. Legend: L layers, n blocks, S positions, T tokens of one batch,
H hidden, F neurons of an MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
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

    def hook(see: Callable[[Tensor], None], _module: Any, arguments: tuple[Tensor, ...]) -> None:
        see(arguments[0])

    handles = [module.register_forward_pre_hook(partial(hook, see)) for module, see in watches]
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
    parts = [blocks.take(slice(start, start + batch)) for start in range(0, len(blocks), batch)]
    return [Packed(*(x.to(device) for x in (p.ids.long(), p.documents, p.positions.long(), p.mask))) for p in parts]


@torch.no_grad()
def observe(model: Any, blocks: Packed, watches: Sequence[Watch], batch: int = 4) -> int:
    """One pass over the blocks; each watch gets its module's inputs [T, ·] in fp32, at the positions with a token.

    Returns the number of these positions. Raises DataError when the blocks hold no token.
    """
    used = torch.zeros(0, dtype=torch.bool)

    def see_used(see: Callable[[Tensor], None], values: Tensor) -> None:
        see(values[used].float())

    total = 0
    with watching([(module, partial(see_used, see)) for module, see in watches]):
        for part in parts_of(model, blocks, batch):
            used = tokens(part.documents)
            total += int(used.sum())
            hidden_states(model, part)
    return total


def block_influence(model: Any, blocks: Packed, batch: int = 4) -> list[float]:
    """1 − mean cosine of each layer's input and output, [L] (block influence, Men et al. 2024, arXiv 2403.03853).

    Raises DataError when the blocks hold no token.
    """
    layers = decoder_layers(model)
    influence = [0.0] * len(layers)
    units: list[Tensor] = []  # along the states that the layers read, and at last along the last one's output

    def keep(state: Tensor) -> None:
        units.append(torch.nn.functional.normalize(state, dim=-1))

    def finish(state: Tensor) -> None:
        keep(state)
        for index in range(len(layers)):
            # By the chord |u − v|, exact at small angles, where cosines of fp32 vectors lose their digits.
            chord = (units[index] - units[index + 1]).norm(dim=-1).clamp(max=2)
            influence[index] += float((chord.square() / 2).sum())
        units.clear()

    total = observe(model, blocks, [*((layer, keep) for layer in layers), (model.model.norm, finish)], batch)
    return [value / total for value in influence]


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
