"""Many sequences at once: rows of different lengths, each with the logits that it would get alone.

Legend: R rows, A of them that take tokens in a call, n tokens of a call, q the most that one row takes, S slots of the
cache, H heads of keys and values, D their width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from distill.engines.torch.hugging_face import logits_of
from distill.engines.torch.model import layer_masks, mask_refusal, model_name, send, state_refusal
from distill.engines.torch.static import SlotCache, StaticTorchModel


class _RowCache(SlotCache):
    """Slots of which a step writes those of its tokens alone, so that other rows stay as they are, and no mask ever
    shows the remains of a failed call."""

    active: Tensor | None  # [A], None where all rows take tokens
    places: tuple[Tensor, Tensor, Tensor, Tensor]  # [n] each: rows of the R, slots, entries of the A, columns of the q
    rows: int

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store the step's part of keys and values [A, H, q, D]; returns all of the A rows' [A, H, shown, D] so far."""
        layer = self.layers[layer_idx]
        if not layer.is_initialized:
            layer.lazy_initialization(*(part[:1].expand(self.rows, -1, -1, -1) for part in (keys, values)))
        # The layers of a sharded model lie on several devices.
        rows, slots, entries, columns = (place.to(keys.device) for place in self.places)
        layer.keys[rows, :, slots] = keys[entries, :, columns]  # [n, H, D]
        layer.values[rows, :, slots] = values[entries, :, columns]
        used = layer.keys[:, :, : self.shown], layer.values[:, :, : self.shown]
        if self.active is None:
            return used
        active = self.active.to(keys.device)
        return used[0].index_select(0, active), used[1].index_select(0, active)


class BatchedTorchModel(StaticTorchModel):
    """R sequences of different lengths decoded together by a Hugging Face model; chains only.

    A row that takes no token in a call is left out of it, and shapes follow the texts: nothing is compiled. ValueError
    for a model that takes no mask of ours.
    """

    cache_kind = _RowCache

    def __init__(self, model: Any, rows: int, vocabulary: int | None = None) -> None:
        super().__init__(model, vocabulary, rows, size=1)  # shapes follow the texts: rows begin short
        self._cache.rows = rows
        self.max_leaves, self.steps_on_device = 0, False

    @staticmethod
    def _require_layers(model: Any) -> None:
        if (reason := state_refusal(type(model), model.config)) is not None:
            raise ValueError(f"rows of different lengths cannot be decoded together: {reason}")
        if (reason := mask_refusal(model.config)) is not None:
            raise ValueError(f"{model_name(model)} decodes its prompts one by one: {reason}")

    def _read(self, texts: Sequence[Sequence[int]], wanted: Sequence[tuple[int, int]]) -> Tensor:
        """Logits [n, V] after the `wanted` tokens (row, number in its text).

        Rows end in the same column, so that the logits after their last tokens are one column of the batch.
        """
        active, longest = [row for row, text in enumerate(texts) if text], max(map(len, texts))
        entry = {row: place for place, row in enumerate(active)}
        first = {row: longest - len(texts[row]) for row in active}  # column of a row's first token
        places = [
            (row, self._lengths[row] + i, entry[row], first[row] + i) for row in active for i in range(len(texts[row]))
        ]
        rows, slots, entries, columns = send(list(zip(*places, strict=True)), self.device)
        ids = torch.zeros(len(active), longest, dtype=torch.long, device=self.device)
        ids[entries, columns] = send([token for text in texts for token in text], self.device)
        ends = [self._lengths[row] + len(texts[row]) for row in active]
        # Columns left of a row's tokens are padding whose output is never read. They attend to slot 0, because a
        # softmax over no slot at all would give NaN.
        before = torch.arange(longest, device=self.device) - longest
        positions = (send(ends, self.device)[:, None] + before).clamp(min=0)  # [A, q]
        self._reserve(max(ends))
        held = torch.arange(max(ends), device=self.device)
        self._cache.shown, self._cache.places = max(ends), (rows, slots, entries, columns)
        self._cache.active = None if len(active) == self.rows else send(active, self.device)
        kept = sorted({first[row] + number for row, number in wanted})
        logits = logits_of(
            self.model,
            1 if kept == [longest - 1] else send(kept, self.device),
            input_ids=ids,
            attention_mask=layer_masks(self.model, held <= positions[..., None], positions, held),
            position_ids=positions,
            past_key_values=self._cache,
        )[..., : self.vocabulary_size]
        which = {column: index for index, column in enumerate(kept)}
        found = [(entry[row], which[first[row] + number]) for row, number in wanted]
        return logits[send([row for row, _ in found], self.device), send([column for _, column in found], self.device)]
