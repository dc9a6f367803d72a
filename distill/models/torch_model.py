"""Step-by-step decoding with a Hugging Face model, with rollback and trees of tokens.

Legend: V vocabulary, n tokens of one call, C committed tokens, N nodes of a pending tree.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from distill.errors import DataError
from distill.models.base import Ints, PendingTree, check_call, check_chain, check_lengths
from distill.models.finite import place_of
from distill.models.torch_logits import TorchLogits


def shortest_window(config: Any) -> int:
    """The attention window in tokens of the layer with the shortest one; sys.maxsize where no layer has one."""
    kinds = getattr(config, "layer_types", None) or ["sliding_attention", "chunked_attention"]
    sizes = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    windows = [getattr(config, sizes[kind], None) for kind in set(kinds) & set(sizes)]
    return min((int(size) for size in windows if size), default=sys.maxsize)


def state_refusal(kind: type, config: Any, empty: bool = True) -> str | None:
    """The reason why the cache of such a model cannot be rolled back; None where all layers have keys and values, or,
    with `empty`, nothing: those without attention, and those that read what another layer has stored."""
    from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer

    if getattr(kind, "_is_stateful", False):
        return "it has a recurrent state, which cannot be rolled back"
    try:
        layers = StaticCache(config=config, max_cache_len=1).layers
    except KeyError as error:  # a kind of layer for which transformers has no cache of fixed size
        kinds = {str(error.args[0])}
    else:
        kinds = {type(layer).__name__ for layer in layers if type(layer) not in (StaticLayer, StaticSlidingWindowLayer)}
    kinds -= {"DummyLayer"} if empty else set()
    return f"it has layers whose state is no list of keys and values ({min(kinds)})" if kinds else None


def model_name(model: Any) -> str:
    """The folder or hub name that a model of transformers was loaded from, else its class."""
    return str(getattr(model.config, "_name_or_path", "") or type(model).__name__)


class TorchModel:
    """One sequence decoded by a Hugging Face model with a cache that can be rolled back, and trees of tokens.

    See `distill.models.base.Model`. Its logits equal those of a fresh prefill up to rounding; ids from `vocabulary` on
    are padding and have no logits. The cache holds the N nodes of a pending tree behind the C committed tokens.
    """

    rows = 1

    def __init__(self, model: Any, vocabulary: int | None = None) -> None:
        from transformers import DynamicCache

        if (reason := state_refusal(type(model), model.config)) is not None:
            raise DataError(f"{model_name(model)} cannot be decoded here: {reason}", "name a model of attention layers")
        self.model = model
        self.device = next(model.parameters()).device
        self.vocabulary_size: int = min(model.config.vocab_size, vocabulary or model.config.vocab_size)
        self.capacity: int = model.config.max_position_embeddings
        self._new_cache = DynamicCache
        self._cache = DynamicCache()
        self._length = 0
        self._tree = PendingTree()

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of the one row."""
        return [self._length]

    @property
    def max_leaves(self) -> int:
        """No limit, or 0 where a tree's mask could not express the model's own attention."""
        return sys.maxsize if self._refusal() is None else 0

    def _refusal(self) -> str | None:
        """The reason why this model takes no trees; None where it takes them."""
        kind = self.model.config._attn_implementation
        if kind not in ("sdpa", "eager"):
            return f"trees need the attention implementation sdpa or eager, this model runs {kind}"
        if (window := shortest_window(self.model.config)) < self.capacity:
            return f"trees need layers that see the whole context of {self.capacity}, some see {window} tokens"
        return None

    @torch.inference_mode()
    def extend(
        self, tokens: Ints, counts: Ints | None = None, parents: Ints | None = None, want: Ints | None = None
    ) -> TorchLogits:
        """Append `tokens`, or add them to the tree below `parents`; logits for those in `want` (None: all).

        Raises ValueError, with nothing changed, past the capacity, for more than one row, for `want` outside the
        tokens, for a chain below a pending tree, and for a tree in a model that takes none.
        """
        tokens = list(tokens)
        if parents is not None:
            return self._extend_tree(tokens, counts, parents, want)
        check_chain(tokens, counts, want, [self._length], self.capacity, self.model.config.vocab_size)
        if self._tree.parents:
            raise ValueError("a tree is pending: keep a path of it or roll back first")
        logits = self._forward(tokens, want)
        self._length += len(tokens)
        return logits

    def _extend_tree(self, tokens: list[int], counts: Ints | None, parents: Ints, want: Ints | None) -> TorchLogits:
        if (refusal := self._refusal()) is not None:
            raise ValueError(refusal)
        check_call(tokens, counts, parents, want, self.vocabulary_size)
        old, tree = len(self._tree), self._tree.grown(parents, self._length, self.capacity)
        # Additive, because eager attention adds whatever mask it is given. [1, 1, n, C + N]
        dtype = self.model.dtype
        mask = torch.zeros(1, 1, len(tokens), self._length + len(tree), dtype=dtype)
        hidden = torch.tensor(tree.seen(old, len(tree))) == 0
        mask[..., self._length :].masked_fill_(hidden, torch.finfo(dtype).min)
        lengths = [self._length + depth for depth in tree.depths[old:]]
        positions = torch.tensor([lengths], device=self.device) - 1
        logits = self._forward(tokens, want, lengths, attention_mask=mask.to(self.device), position_ids=positions)
        self._tree = tree
        return logits

    def _forward(self, tokens: list[int], want: Ints | None, lengths: Ints | None = None, **inputs: Any) -> TorchLogits:
        """Run the model on `tokens`; the cache stays unchanged when that fails.

        `lengths` are those of the texts that the tokens end (None: the tokens are a chain).
        """
        ids = torch.tensor([tokens], device=self.device)
        keep: int | Tensor = 0
        if want is not None:
            last = list(want) == [len(tokens) - 1]
            keep = 1 if last else torch.tensor(list(want), dtype=torch.long, device=self.device)
        try:
            logits = self.model(
                input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=keep, **inputs
            ).logits[0]
        except BaseException:
            self._trim(self._length + len(self._tree))
            raise
        read = range(self._length + 1, self._length + len(tokens) + 1) if lengths is None else lengths
        wanted = read if want is None else [read[index] for index in want]
        return TorchLogits(logits[:, : self.vocabulary_size], place_of(model_name(self.model), wanted))

    def _trim(self, size: int) -> None:
        """Cut every layer to its first `size` entries; after a failed call only some layers have more."""
        if size == 0:
            self._cache = self._new_cache()
            return
        for layer in self._cache.layers:
            if layer.is_initialized:
                layer.keys, layer.values = layer.keys[..., :size, :], layer.values[..., :size, :]

    @torch.inference_mode()
    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Commit one path of the pending tree and drop its other nodes; ValueError for no path from the root."""
        path = self._tree.only_path(paths)
        if path != list(range(len(path))):
            start, end = self._length, self._length + len(path)
            places = torch.tensor(path) + start
            for layer in self._cache.layers:
                index = places.to(layer.keys.device)  # the layers of a sharded model lie on several devices
                # The path is read before it is written: index_select copies.
                layer.keys[..., start:end, :] = layer.keys.index_select(-2, index)
                layer.values[..., start:end, :] = layer.values.index_select(-2, index)
        self._drop_tree(len(path))

    def _drop_tree(self, kept: int) -> None:
        """Commit the first `kept` entries behind the committed ones and forget the rest of the tree."""
        self._length += kept
        if len(self._tree) > kept:
            self._trim(self._length)
        self._tree = PendingTree()

    def rollback(self, lengths: Sequence[int]) -> None:
        """Drop a pending tree and the tokens after the first `lengths[0]`; ValueError outside 0..the committed."""
        (length,) = check_lengths(lengths, [self._length])
        if self._tree.parents:
            self._drop_tree(0)
        if length == 0:
            self.reset()
        elif length < self._length:
            # A negative count means "drop that many" in every version we support; a positive one changed meaning.
            self._cache.crop(length - self._length)
            self._length = length

    def reset(self) -> None:
        """Forget everything; every timed prompt starts from such a cold cache."""
        self._cache = self._new_cache()
        self._length = 0
        self._tree = PendingTree()

    def close(self) -> None:
        """Free the cache."""
        self.reset()
