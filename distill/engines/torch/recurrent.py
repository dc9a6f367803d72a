"""One sequence decoded by a model with recurrent layers, whose state cannot be cut: it returns to copies of it.

Legend: V vocabulary, n tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distill.devices import doubled
from distill.engines.model import NO_TREES, Ints, Retold, check_chain, check_lengths
from distill.engines.torch.model import TorchLogits, TorchModel, model_name
from distill.errors import DataError

HINT = "leave it on a server or in a GGUF file (target.load: false), or name another model"


class RecurrentTorchModel(TorchModel):
    """A model some or all of whose layers keep a recurrent state in the place of keys and values; chains only.

    Before calls the states are copied (`Retold.due`). Where tokens are rolled back, the states return to the latest
    copy, keys and values are cut there, and the committed tokens after it are computed again with those of the next
    call: `resent`.
    DataError for layers of other kinds, and for a model whose logits from its cache are not those of the whole text.
    """

    resends = True

    def __init__(self, model: Any, vocabulary: int | None = None) -> None:
        super().__init__(model, vocabulary)
        self.max_leaves, self.steps_on_device = 0, False  # what a state has read cannot be cut
        self._new_cache = partial(growing_cache, model.config, model_name(model))
        self._cache = self._new_cache()
        self._text = Retold()
        self._require_equal()

    @staticmethod
    def _require_layers(model: Any) -> None:
        """The layers are looked at where the cache is made."""

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of the one row."""
        return [len(self._text.tokens)]

    @property
    def resent(self) -> int:
        """Committed tokens that the next call computes again."""
        return len(self._text.tokens) - self._length

    @torch.inference_mode()
    def extend(
        self, tokens: Ints, counts: Ints | None = None, parents: Ints | None = None, want: Ints | None = None
    ) -> TorchLogits:
        """Append `tokens`; logits for those in `want` (None: all). Raises as `TorchModel.extend`, and for a tree."""
        if parents is not None:
            raise ValueError(NO_TREES)
        text, tokens = self._text, list(tokens)
        check_chain(tokens, counts, want, self.lengths, self.capacity, self.model.config.vocab_size)
        if text.due(self._length, len(tokens)):
            text.copied(self._length, [_state(layer) for layer in self._cache.layers])
        again = text.tokens[self._length :]
        if again:
            want = [len(again) + index for index in (range(len(tokens)) if want is None else want)]
        # Given, because some models count positions from 0 in every call.
        positions = torch.arange(self._length, self._length + len(again) + len(tokens), device=self.device)
        logits = self._forward([*again, *tokens], want, position_ids=positions.unsqueeze(0))
        text.tokens += tokens
        self._length = len(text.tokens)
        return logits

    def _trim(self, size: int) -> None:
        """Return to the latest copy of at most `size` tokens."""
        self._length, states = self._text.latest(size)
        if states is None:
            self._cache = self._new_cache()
            return
        for layer, state in zip(self._cache.layers, states, strict=True):
            vars(layer).update({name: _copy(value) for name, value in state.items()})
            if getattr(layer, "keys", None) is not None:
                layer.keys, layer.values = (held[..., : self._length, :] for held in (layer.keys, layer.values))

    def rollback(self, lengths: Sequence[int]) -> None:
        """Forget the tokens after the first `lengths[0]`; ValueError outside 0..the committed."""
        (length,) = check_lengths(lengths, self.lengths)
        del self._text.tokens[length:]
        if length < self._length or length == 0:
            self._trim(length)

    def _require_equal(self) -> None:
        """Raise DataError unless logits from the cache, and from a copy of it, are those of the whole text.

        Up to rounding: of each position, the root of the mean square of the difference over the logits' spread; the
        median of the positions, because where experts are chosen, rounding may choose others.
        """
        tokens = [(11 * place + 3) % self.vocabulary_size for place in range(12)]
        name = model_name(self.model)
        try:
            with torch.inference_mode():
                ids = torch.tensor([tokens], device=self.device)
                whole = doubled(self.model(input_ids=ids, use_cache=False).logits[0, :, : self.vocabulary_size])
            self.extend(tokens[:4])
            found = [self.extend(tokens[4:8]).full(), self.extend(tokens[8:9]).full()]
            self.rollback([6])
            found.append(self.extend(tokens[6:]).full())
        except Exception as error:  # of any kind, from code that was not written for such calls
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise DataError(f"{name} cannot be decoded here: its cache cannot be continued ({first})", HINT) from error
        self.rollback([0])
        expected = whole[[*range(4, 9), *range(6, 12)]].cpu()
        differences = (torch.cat(found).double() - expected).square().mean(-1).sqrt() / expected.std(-1)
        # Recurrences are computed in fp32 in wider types, too.
        limit = max(torch.finfo(self.model.dtype).eps, torch.finfo(torch.float32).eps) ** 0.5
        if not (difference := float(differences.median())) <= limit:
            raise DataError(
                f"{name} cannot be decoded here: its logits from a cache differ from those of the whole text by "
                f"{difference:.2g} of their spread (rounding: less than {limit:.1g})",
                HINT,
            )


def growing_cache(config: Any, name: str) -> Any:
    """An empty cache of a model's kinds of layers; keys and values outside a window are hidden in it, not dropped.

    DataError for layers that keep something else than keys and values or a recurrent state.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DummyLayer, DynamicLayer, LinearAttentionAndFullAttentionLayer
    from transformers.cache_utils import LinearAttentionLayer as Linear

    try:
        cache = DynamicCache(config=config)
    except KeyError as error:  # a kind of layer that transformers keeps in a cache of its own
        raise DataError(f"{name} cannot be decoded here: it has layers of kind {error.args[0]}", HINT) from None
    for index, layer in enumerate(cache.layers):
        kind = type(layer)
        if isinstance(layer, Linear) and isinstance(layer, DynamicLayer):
            cache.layers[index] = LinearAttentionAndFullAttentionLayer(number_of_states=layer.number_of_states)
        elif kind.__name__ == "DynamicSlidingWindowLayer":
            cache.layers[index] = DynamicLayer()
        elif kind not in (DynamicLayer, Linear, DummyLayer):
            raise DataError(f"{name} cannot be decoded here: it has layers of kind {kind.__name__}", HINT)
    return cache


def _state(layer: Any) -> dict[str, Any]:
    """A copy of what a layer keeps beside keys and values."""
    if not hasattr(layer, "conv_states"):
        return {}
    return {name: _copy(value) for name, value in vars(layer).items() if name not in ("keys", "values")}


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return {key: _copy(one) for key, one in value.items()} if isinstance(value, dict) else value
