"""Many sequences in one PyTorch model: rows of different lengths, each with the logits that it would get alone.

Legend: R rows, A of them that take tokens in a call, n tokens of a call, q the most that one row takes, S slots of the
cache, H heads of keys and values, D their width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distill.models.base import Ints, check_chain, check_lengths, check_no_paths
from distill.models.torch_logits import TorchLogits
from distill.models.torch_model import TorchModel, model_name


@dataclass(frozen=True)
class _Step:
    """The places of one call's tokens in the batch [A, q] that the model reads, and their slots in the cache."""

    active: Tensor | None  # [A], None where all rows take tokens
    entries: Tensor  # [n], which of the A
    columns: Tensor  # [n]
    rows: Tensor  # [n], which of the R
    slots: Tensor  # [n]
    size: int  # slots in use afterwards, in the longest of the A rows


class _Layer:
    """One layer's keys and values [R, H, S, D]: slot s of a row holds its token at position s.

    It has the methods that `transformers.Cache` calls on a layer when mask and positions are given. Only the slots of
    the step's tokens are written, so other rows stay as they are, and no mask ever shows the remains of a failed call.
    """

    def __init__(self, rows: int, capacity: int) -> None:
        self.rows, self.capacity = rows, capacity
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.step: _Step

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store the step's part of keys and values [A, H, q, D]; returns all of the A rows' [A, H, size, D] so far."""
        self.keys, self.values = self._stored(self.keys, keys), self._stored(self.values, values)
        return self._read(self.keys), self._read(self.values)

    def _stored(self, held: Tensor | None, new: Tensor) -> Tensor:
        step, old = self.step, 0 if held is None else held.shape[2]
        if held is None or old < step.size:
            # Zeros, because a mask hides any number from the sum except NaN.
            room = min(max(step.size, 2 * old, 64), self.capacity)
            grown = new.new_zeros(self.rows, new.shape[1], room, new.shape[3])
            if held is not None:
                grown[:, :, :old] = held
            held = grown
        # The layers of a sharded model lie on several devices.
        rows, slots, entries, columns = (x.to(held.device) for x in (step.rows, step.slots, step.entries, step.columns))
        held[rows, :, slots] = new[entries, :, columns]  # [n, H, D]
        return held

    def _read(self, held: Tensor) -> Tensor:
        used = held[:, :, : self.step.size]
        return used if self.step.active is None else used.index_select(0, self.step.active.to(held.device))


class BatchedTorchModel:
    """R sequences of different lengths decoded together by a Hugging Face model; chains only.

    See `distill.models.base.Model`. A row that takes no token in a call is left out of it. ValueError for a model whose
    layers do not accept an explicit mask: attention other than sdpa or eager, or windows shorter than the context.
    """

    max_leaves = 0

    def __init__(self, model: Any, rows: int, vocabulary: int | None = None) -> None:
        from transformers import Cache

        if rows < 1:
            raise ValueError(f"a batch has at least one row, got {rows}")
        alone = TorchModel(model, vocabulary)
        if not alone.max_leaves:  # masks of rows and masks of trees need the same kind of attention
            config = model.config
            raise ValueError(
                f"rows of different lengths need the attention implementation sdpa or eager, in layers that see the "
                f"whole context of {alone.capacity}; this model runs {config._attn_implementation} with a window of "
                f"{getattr(config, 'sliding_window', None)}: decode its prompts one by one"
            )
        self.model, self.rows, self.device = model, rows, alone.device
        self.vocabulary_size, self.capacity = alone.vocabulary_size, alone.capacity
        self._layers = [_Layer(rows, self.capacity) for _ in range(model.config.num_hidden_layers)]
        self._cache = Cache(layers=self._layers)
        self._lengths = [0] * rows

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of each row."""
        return list(self._lengths)

    @torch.inference_mode()
    def extend(
        self, tokens: Ints, counts: Ints | None = None, parents: Ints | None = None, want: Ints | None = None
    ) -> TorchLogits:
        """Append `counts[r]` (0 allowed) of the flat `tokens` to each row; logits for those in `want` (None: all).

        Raises ValueError, with nothing changed, past the capacity, for counts that do not add up, for no tokens, for
        ids outside the vocabulary, for `want` outside the tokens, and for trees.
        """
        tokens = list(tokens)
        if parents is not None:
            raise ValueError("a batch of rows takes chains, not trees")
        counts = check_chain(tokens, counts, want, self._lengths, self.capacity, self.model.config.vocab_size)
        active = [row for row, count in enumerate(counts) if count]
        longest = max(counts)
        # Rows end in the same column, so that the logits after their last tokens are one column of the batch.
        places = [
            (entry, longest - counts[row] + i, row, self._lengths[row] + i)
            for entry, row in enumerate(active)
            for i in range(counts[row])
        ]
        entries, columns, rows, slots = self._tensor(list(zip(*places, strict=True)))
        ids = torch.zeros(len(active), longest, dtype=torch.long, device=self.device)
        ids[entries, columns] = self._tensor(tokens)
        ends = self._tensor([self._lengths[row] + counts[row] for row in active])  # [A]
        # Columns left of a row's tokens are padding whose output is never read. They attend to slot 0, because a
        # softmax over no slot at all would give NaN.
        positions = (ends[:, None] - longest + torch.arange(longest, device=self.device)).clamp(min=0)  # [A, q]
        size = int(max(self._lengths[row] + counts[row] for row in active))
        dtype = self.model.dtype
        mask = torch.zeros(len(active), 1, longest, size, dtype=dtype, device=self.device)
        hidden = torch.arange(size, device=self.device) > positions[:, None, :, None]
        mask.masked_fill_(hidden, torch.finfo(dtype).min)  # additive, because eager attention adds what it is given
        subset = None if len(active) == self.rows else self._tensor(active)
        for layer in self._layers:
            layer.step = _Step(subset, entries, columns, rows, slots, size)
        read = [places[i] for i in (range(len(tokens)) if want is None else want)]
        wanted = [(entry, column) for entry, column, _, _ in read]
        kept = sorted({column for _, column in wanted})
        logits = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1 if kept == [longest - 1] else self._tensor(kept),
        ).logits[..., : self.vocabulary_size]
        self._lengths = [length + count for length, count in zip(self._lengths, counts, strict=True)]
        which = {column: index for index, column in enumerate(kept)}
        return TorchLogits(
            logits[self._tensor([e for e, _ in wanted]), self._tensor([which[c] for _, c in wanted])],
            lambda index: f"{model_name(self.model)}, row {read[index][2]}, after {read[index][3] + 1} tokens",
        )

    def _tensor(self, numbers: Sequence[Any]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self.device)

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Do nothing, because no tree is ever pending; ValueError for a path that is not empty."""
        check_no_paths(paths, self.rows)

    def rollback(self, lengths: Sequence[int]) -> None:
        """Forget the tokens of each row beyond `lengths`; ValueError, with nothing changed, for more than a row has."""
        self._lengths = check_lengths(lengths, self._lengths)

    def reset(self) -> None:
        """Forget everything and free the cache's memory."""
        self._lengths = [0] * self.rows
        for layer in self._layers:
            layer.keys = layer.values = None

    def close(self) -> None:
        """Free the cache."""
        self.reset()
