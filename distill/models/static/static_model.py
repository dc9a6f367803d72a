"""Decoding with a cache of fixed size: the steps of a few tokens have few shapes, so that they can be compiled.

Legend: R rows, m columns of a step, n wanted tokens, S slots, W nodes of a tree rounded up, V vocabulary. A step has
the same number of columns in every row. A row that takes fewer tokens leaves the last columns to padding, which is
written behind the row's tokens: no mask ever shows it, and the next tokens overwrite it. So padding, rejected tokens
and the rows that take no part all roll back by a length that the host keeps.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from distill.errors import DataError
from distill.models.base import (
    SPARE_NODES,
    Ints,
    PendingTree,
    check_call,
    check_chain,
    check_lengths,
    check_no_paths,
)
from distill.models.finite import Place, place_of
from distill.models.static.steps import COARSE, LONGEST_STEP, SlotCache, Steps
from distill.models.static.transfers import send
from distill.models.torch_logits import TorchLogits
from distill.models.torch_model import TorchModel, model_name, shortest_window, state_refusal

CHUNK = 512  # tokens of a row that one step of a prompt reads, so that its mask [m, S] stays small
FIRST_SIZE = 256  # slots that a model begins with where nobody says how long its texts get
# Models that take one mask for the layers with a window and one for the others, or have one kind of layer alone.
WINDOWED = ("gemma2", "gemma3_text", "mistral", "qwen2", "qwen3")


def refusal(model: Any) -> str | None:
    """The reason why a model cannot decode with slots; None where it can."""
    kind, config = model.config._attn_implementation, model.config
    if kind not in ("sdpa", "eager"):
        return f"its attention takes no mask of ours: it is {kind}, neither sdpa nor eager"
    if (reason := state_refusal(type(model), config, empty=False)) is not None:
        return reason
    if shortest_window(config) < config.max_position_embeddings and config.model_type not in WINDOWED:
        return f"attention windows were tested for {', '.join(WINDOWED)} alone, and it is {config.model_type}"
    return None


def require_static(model: Any, name: str) -> None:
    """Raise DataError for a model that cannot decode with slots; it may be one without weights."""
    if (reason := refusal(model)) is not None:
        raise DataError(f"{name} cannot decode with a static cache: {reason}", "leave static off")


class StaticTorchModel:
    """R sequences of different lengths in a Hugging Face model, with a cache of fixed size.

    See `distill.models.base.Model`. One row takes trees, except in models with attention windows. `size` is the number
    of tokens that a row is expected to hold; where it holds more, the cache doubles. With `compiled`, steps of up to
    LONGEST_STEP tokens behind a prompt are compiled by torch, one for each number of tokens. DataError for a model that
    cannot decode with slots.
    """

    def __init__(
        self,
        model: Any,
        vocabulary: int | None = None,
        rows: int = 1,
        size: int | None = None,
        compiled: bool = False,
    ) -> None:
        if rows < 1:
            raise ValueError(f"a batch has at least one row, got {rows}")
        require_static(model, model_name(model))
        alone = TorchModel(model, vocabulary)
        self.model, self.rows, self.device = model, rows, alone.device
        self.vocabulary_size, self.capacity = alone.vocabulary_size, alone.capacity
        self.max_leaves = sys.maxsize if alone.max_leaves and rows == 1 else 0
        expected = min(size or FIRST_SIZE, self.capacity)
        self._cache = SlotCache(model.config.num_hidden_layers, _rounded(expected + SPARE_NODES))
        self._steps = Steps(model, self._cache, compiled)
        self._lengths = [0] * rows
        self._tree = PendingTree()

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of each row."""
        return list(self._lengths)

    @property
    def size(self) -> int:
        """Slots S of a row."""
        return self._cache.size

    @torch.inference_mode()
    def extend(
        self, tokens: Ints, counts: Ints | None = None, parents: Ints | None = None, want: Ints | None = None
    ) -> TorchLogits:
        """Append `counts[r]` (0 allowed) of the flat `tokens` to each row, or add them to the tree below `parents`.

        Logits for those in `want` (None: all). Raises ValueError, with nothing changed, past the capacity, for counts
        that do not add up, for no tokens, for ids outside the vocabulary, for `want` outside the tokens, for a chain
        below a pending tree, and for a tree in a model that takes none.
        """
        tokens = list(tokens)
        if parents is not None:
            return self._extend_tree(tokens, counts, parents, want)
        counts = check_chain(tokens, counts, want, self._lengths, self.capacity, self.model.config.vocab_size)
        if self._tree.parents:
            raise ValueError("a tree is pending: keep a path of it or roll back first")
        ends = list(accumulate(counts))
        texts = [tokens[end - count : end] for end, count in zip(ends, counts, strict=True)]
        places = [(row, column) for row, text in enumerate(texts) for column in range(len(text))]
        wanted = places if want is None else [places[index] for index in want]
        logits = self._read(texts, wanted)
        read = [self._lengths[row] + column + 1 for row, column in wanted]
        place = self._place([row for row, _ in wanted], read)
        self._lengths = [length + count for length, count in zip(self._lengths, counts, strict=True)]
        return TorchLogits(logits, place)

    def _read(self, texts: Sequence[Sequence[int]], wanted: Sequence[tuple[int, int]]) -> Tensor:
        """Logits [n, V] after the `wanted` tokens (row, number in its text), read in steps of at most CHUNK columns."""
        chunks: list[Tensor] = []
        order: list[int] = []
        for start in range(0, max(map(len, texts)), CHUNK):
            parts = [text[start : start + CHUNK] for text in texts]
            here = [i for i, (_, column) in enumerate(wanted) if start <= column < start + CHUNK]
            places = [(wanted[i][0], wanted[i][1] - start) for i in here]
            chunks.append(self._chunk(parts, [length + start for length in self._lengths], places))
            order += here
        logits = chunks[0] if len(chunks) == 1 else torch.cat(chunks)
        return _picked(logits, sorted(range(len(order)), key=order.__getitem__))

    def _chunk(
        self, parts: Sequence[Sequence[int]], starts: Sequence[int], wanted: Sequence[tuple[int, int]]
    ) -> Tensor:
        """Logits [n, V] of one step, whose row r holds parts[r] from slot starts[r] on."""
        longest = max(map(len, parts))
        filled = [
            [*part, *[0] * (longest - len(part)), len(part), start] for part, start in zip(parts, starts, strict=True)
        ]
        sent = send(filled, self.device)  # [R, m + 2]
        columns: Sequence[int] = sorted({column for _, column in wanted})
        keep: Tensor | int = 0
        if not columns or columns == [longest - 1]:
            columns, keep = [longest - 1], 1
        elif longest <= LONGEST_STEP:
            columns = range(longest)
        else:
            keep = send(columns, self.device)
        prompt = not any(self._lengths)
        logits = self.step(sent[:, :longest], sent[:, -2], sent[:, -1], max(starts) + longest, keep, prompt)
        which = {column: index for index, column in enumerate(columns)}
        return _picked(logits.flatten(0, 1), [row * len(columns) + which[column] for row, column in wanted])

    @torch.inference_mode()
    def step(
        self,
        ids: Tensor,
        counts: Tensor,
        starts: Tensor,
        end: int,
        keep: Tensor | int = 0,
        prompt: bool = False,
    ) -> Tensor:
        """Logits [R, m, V] of tokens [R, m] on the device. It commits nothing: `commit` says afterwards what counts.

        Row r holds counts[r] tokens, then padding; they go to the slots from starts[r] on. `end` is beyond all of
        these slots, as the host knows it. `keep` as of transformers: 0 for the logits of all columns, 1 for those of
        the last, or the columns. The step of a `prompt` is never compiled. Nothing here waits for the device.
        """
        self._reserve(end)
        return self._steps.chain(ids, counts, starts, keep, prompt)[..., : self.vocabulary_size]

    def commit(self, lengths: Sequence[int]) -> None:
        """Count as committed what steps wrote: the rows are `lengths` long."""
        self._lengths = [int(length) for length in lengths]

    def _extend_tree(self, tokens: list[int], counts: Ints | None, parents: Ints, want: Ints | None) -> TorchLogits:
        if not self.max_leaves:
            kind = f"{self.rows} rows take chains" if self.rows > 1 else "attention windows take chains"
            raise ValueError(f"{kind}, not trees")
        check_call(tokens, counts, parents, want, self.vocabulary_size)
        old, length = len(self._tree), self._lengths[0]
        tree = self._tree.grown(parents, length, self.capacity)
        depths = [length + depth for depth in tree.depths[old:]]
        # One transfer: the tokens, their positions, and W columns of what they see. [m, 2 + W]
        width = _rounded(len(tree))
        rows = [
            [token, depth - 1, *seen] for token, depth, seen in zip(tokens, depths, tree.seen(old, width), strict=True)
        ]
        sent = send(rows, self.device)
        self._reserve(length + len(tree))
        logits = self._steps.tree(sent[:, 0], sent[:, 1], sent[:, 2:].bool(), length, length + old)
        self._tree = tree
        read = depths if want is None else [depths[index] for index in want]
        picked = _picked(logits[0, :, : self.vocabulary_size], range(len(tokens)) if want is None else want)
        return TorchLogits(picked, self._place([0] * len(read), read))

    def _place(self, rows: Sequence[int], lengths: Sequence[int]) -> Place:
        """The places of logits, by their rows and by how many tokens each of them follows."""
        name = model_name(self.model)
        if self.rows == 1:
            return place_of(name, lengths)
        return lambda index: f"{name}, row {rows[index]}, after {lengths[index]} tokens"

    def _reserve(self, slots: int) -> None:
        """Let the cache hold `slots` and a step's padding behind them."""
        if slots + COARSE > self._cache.size:
            self._steps.forget()
            limit = _rounded(self.capacity + SPARE_NODES)
            self._cache.grow(max(_rounded(slots + SPARE_NODES), min(2 * self._cache.size, limit)))

    @torch.inference_mode()
    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Commit one path of the pending tree and drop its other nodes; ValueError for no path from the root.

        Rows that take no trees have only empty paths.
        """
        if self.rows > 1:
            check_no_paths(paths, self.rows)
            return
        path = self._tree.only_path(paths)
        if path != list(range(len(path))):
            old = send(path, self.device) + self._lengths[0]
            for layer in self._cache.layers:
                layer.move(old, self._lengths[0])
        self._lengths[0] += len(path)
        self._tree = PendingTree()

    @torch.inference_mode()
    def rollback(self, lengths: Sequence[int]) -> None:
        """Drop a pending tree and the tokens of each row beyond `lengths`; ValueError for more than a row has."""
        self._lengths = check_lengths(lengths, self._lengths)
        self._tree = PendingTree()
        if not any(self._lengths):
            self._cache.clear()

    def reset(self) -> None:
        """Forget everything; the memory is kept, and its addresses, because compiled steps hold them."""
        self.rollback([0] * self.rows)

    def close(self) -> None:
        """Free the cache."""
        self._lengths = [0] * self.rows
        self._tree = PendingTree()
        self._steps.forget()
        self._cache.free()


def _rounded(slots: int) -> int:
    """The next multiple of SPARE_NODES, because kernels of attention want masks of even widths."""
    return -(-slots // SPARE_NODES) * SPARE_NODES


def _picked(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """The rows [n, V] of logits; a view where they follow each other."""
    first = rows[0] if rows else 0
    if list(rows) == list(range(first, first + len(rows))):
        return logits[first : first + len(rows)]
    return logits[send(list(rows), logits.device)]
