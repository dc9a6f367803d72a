"""Decoding one sequence with a Hugging Face model: chains and trees of tokens, recurrent layers, and our masks.

Legend: V vocabulary, n tokens of a call, C committed tokens, N nodes of a pending tree, A rows of a call, m columns of
a call, S slots or keys.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache, partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from distill.devices import CPU, as_float64, has_float64, has_pinned_memory
from distill.engines.model import NO_TREES, Ints, PendingTree, StateSnapshots, check_call, check_chain, check_lengths
from distill.engines.torch.hugging_face import UNDECODABLE, context_length, logits_of
from distill.errors import DataError
from distill.gguf.families import LAYER_KINDS
from distill.sampler import Logits, Place, finite_argmax, place_of

# ── Numbers between the host and a device ──
# The host waits for a device only in `fetch`, which counts its calls. One `fetch` is one synchronisation, and `count`
# holds their number. Tensors on the CPU take the same path and are counted, too.


class Count:
    """The number of times that the host has waited for a device in this process."""

    def __init__(self) -> None:
        self.fetches = 0


count = Count()


def fetch(*tensors: Tensor) -> list[Tensor]:
    """Return tensors of one device on the CPU, of the same types and shapes, in one transfer."""
    count.fetches += 1
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return list(tensors)
    return unpacked(packed(tensors).cpu(), tensors)


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """Return all tensors in one buffer of bytes, because each separate transfer would be another wait."""
    return torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])


def unpacked(together: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that `packed` put into a buffer, of the types and shapes of `like`."""
    parts = together.split([tensor.numel() * tensor.element_size() for tensor in like])
    # The parts are copied, because a view of another type must begin at a multiple of its width.
    return [
        part.clone().view(original.dtype).reshape(original.shape) for part, original in zip(parts, like, strict=True)
    ]


def send(numbers: Sequence[Any], device: torch.device, kind: torch.dtype = torch.long) -> Tensor:
    """Return numbers of the host as a tensor on a device. The host does not wait if the device has pinned memory."""
    if not has_pinned_memory(device.type):
        return torch.tensor(numbers, dtype=kind, device=device)
    return torch.tensor(numbers, dtype=kind, pin_memory=True).to(device, non_blocking=True)


class TorchLogits:
    """Logits [n, V] where they were computed; see `distill.engines.model.Logits`."""

    def __init__(self, values: Tensor, place: Place | None = None) -> None:
        self.values, self.place = values, place

    def __len__(self) -> int:
        return self.values.shape[0]

    def argmax(self, empty: int | None = None) -> list[int]:
        """Return the best id of each row, the smallest on ties. A row that is −∞ everywhere gives `empty`."""
        # torch's argmax of bfloat16 takes five times as long on a CPU.
        best = (self.values.float() if self.values.device.type == CPU else self.values).argmax(-1)
        ids, largest = fetch(best, self.values.gather(-1, best.unsqueeze(-1)).squeeze(-1))
        return finite_argmax(ids.tolist(), largest.tolist(), self.place, empty)

    def full(self) -> Tensor:
        """Return a copy [n, V] on the CPU: in fp64 if the logits are fp64, otherwise in fp32."""
        values = self.values if self.values.dtype == torch.float64 else self.values.float()
        return fetch(values)[0].clone()


def for_sampler(logits: Logits) -> Tensor:
    """Return logits [n, V] for a sampler: on their accelerator if it has fp64, otherwise on the CPU as from `full`."""
    there = isinstance(logits, TorchLogits) and logits.values.device.type != CPU and has_float64(logits.values.device)
    return logits.values if there else logits.full()  # type: ignore[attr-defined]


# ── Our masks: what the layers of each kind see of a tree, or of rows of different lengths ──
# transformers applies an explicit mask unchanged: one for all layers, or a dict with one for each kind of layer. The
# windows of a model therefore become part of the mask here. They count positions, because the nodes of a tree stand
# next to each other in the cache.


def layer_kinds(config: Any) -> set[str]:
    """Return the kinds of a model's layers under transformers' names."""
    default = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    return set(getattr(config, "layer_types", None) or getattr(config, "attention_layers", None) or [default])


def mask_refusal(config: Any) -> str | None:
    """Return the reason why a model with this configuration takes no mask of ours; None if it takes them."""
    kind = config._attn_implementation or "sdpa"  # A configuration file does not name it.
    if kind not in ("sdpa", "eager"):
        return f"its attention implementation is {kind}, neither sdpa nor eager"
    if getattr(config, "alibi", False):
        return "its attention reads the distance of tokens in the cache (ALiBi)"
    if strange := layer_kinds(config) - LAYER_KINDS:
        return f"it has layers of the kind {min(strange)}"
    kind_of_config: Any = type(config)
    if not _takes_masks(kind_of_config):
        return "its attention is of its own kind, which takes no masks and positions of others"
    return None


@cache
def _takes_masks(kind: type) -> bool:
    """Whether a configuration's model has transformers' shared attention, which applies masks unchanged."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(kind, None)
    return (
        bool(getattr(model, "_supports_attention_backend", False))
        and "position_ids" in signature(model.forward).parameters
    )


def shortest_window(config: Any) -> int:
    """Return the shortest attention window of all layers in tokens; sys.maxsize if no layer has a window."""
    sizes = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    windows = [getattr(config, sizes[kind], None) for kind in layer_kinds(config) & set(sizes)]
    return min((int(size) for size in windows if size), default=sys.maxsize)


def in_window(kind: str, config: Any, at: Tensor, of: Tensor) -> Tensor | bool:
    """Whether queries at positions `at` are near enough to see keys at `of` in a kind of layer, in broadcast."""
    windowed = kind == "sliding_attention" and config.sliding_window
    return of > at - config.sliding_window if windowed else True


def layer_masks(model: Any, visible: Tensor, at: Tensor, of: Tensor) -> Tensor | dict[str, Tensor]:
    """Return the masks [A, 1, m, S] for queries at positions `at` [A, m] that may see the keys `visible` [A, m, S].

    `of` [..., S] are the positions of the keys. The masks are additive, because eager attention adds its mask.
    """
    nothing = torch.zeros((), dtype=model.dtype, device=visible.device)
    masks = {}
    for kind in sorted(layer_kinds(model.config)):
        seen = visible & in_window(kind, model.config, at[..., None], of)
        masks[kind] = torch.where(seen, nothing, torch.finfo(model.dtype).min)[:, None]
    return masks if len(masks) > 1 else next(iter(masks.values()))


# ── One sequence, with rollback and trees of tokens ──


def state_refusal(kind: type, config: Any, empty: bool = True) -> str | None:
    """Return the reason why the cache of a kind of model cannot be rolled back; None if it can.

    It can if all layers have keys and values. With `empty`, layers may also have none: they have no attention, or read
    the keys of another layer.
    """
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
    return f"it has layers whose state is not a list of keys and values ({min(kinds)})" if kinds else None


def model_name(model: Any) -> str:
    """Return the folder or hub name from which a model of transformers was loaded, or its class."""
    return str(getattr(model.config, "_name_or_path", "") or type(model).__name__)


class TorchModel:
    """One sequence decoded by a Hugging Face model with a cache that can be rolled back, and trees of tokens.

    See `Model`. The logits equal those of a fresh prefill up to rounding. A tree may have any number of leaves. A model
    takes no trees if a mask cannot express its attention. Ids from `vocabulary` on are padding and have no logits. The
    cache holds the N nodes of a pending tree after the C committed tokens.
    """

    rows = 1

    def __init__(self, model: Any, vocabulary: int | None = None) -> None:
        from transformers import DynamicCache

        self.model = model
        self.device = next(model.parameters()).device
        self.vocabulary_size: int = min(model.config.vocab_size, vocabulary or model.config.vocab_size)
        self.capacity: int = context_length(model.config) or model.config.max_position_embeddings
        self.max_leaves = sys.maxsize if mask_refusal(model.config) is None else 0
        # Whether rounds on the device call `step`. On a CPU, they gain nothing.
        self.steps_on_device = self.device.type != CPU
        self._new_cache = DynamicCache
        self._cache: Any = DynamicCache()
        self._length = 0
        self._tree = PendingTree()

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of the one row."""
        return [self._length]

    @torch.inference_mode()
    def extend(
        self, tokens: Ints, counts: Ints | None = None, parents: Ints | None = None, want: Ints | None = None
    ) -> TorchLogits:
        """Append `counts[r]` (0 allowed) of the flat `tokens` to each row, or add them to the tree below `parents`.

        Returns the logits after the tokens in `want`, or after all if it is None. Raises ValueError and changes nothing
        past the capacity, for counts that do not add up, for no tokens, for ids outside the vocabulary, for `want`
        outside the tokens, for a chain below a pending tree, and for a tree in a model that takes none.
        """
        tokens = list(tokens)
        if parents is not None:
            return self._extend_tree(tokens, counts, parents, want)
        vocabulary = self.model.config.vocab_size
        counts = check_chain(tokens, counts, want, self.lengths, self.capacity, vocabulary, self._tree)
        return self._extend_chain(tokens, counts, want)

    def _extend_chain(self, tokens: list[int], counts: list[int], want: Ints | None) -> TorchLogits:
        logits = self._forward(tokens, want)
        self._length += len(tokens)
        return logits

    def _extend_tree(self, tokens: list[int], counts: Ints | None, parents: Ints, want: Ints | None) -> TorchLogits:
        if (reason := mask_refusal(self.model.config)) is not None:
            raise ValueError(f"{model_name(self.model)} takes no trees: {reason}")
        check_call(tokens, counts, parents, want, self.vocabulary_size)
        old, tree = len(self._tree), self._tree.grown(parents, self._length, self.capacity)
        seen, depths = send(tree.seen(old, len(tree)), self.device, torch.bool), send(tree.depths, self.device)
        visible = torch.nn.functional.pad(seen[None], (self._length, 0), value=True)  # [1, m, C + N]
        places = depths + (self._length - 1)
        of = torch.cat([torch.arange(self._length, device=self.device), places])
        positions = places[None, old:]
        masks = layer_masks(self.model, visible, positions, of)
        ids, kept = send([tokens], self.device), self._kept(len(tokens), want)
        logits = self._computed(ids, kept, attention_mask=masks, position_ids=positions)[0]
        self._tree = tree
        return TorchLogits(logits, self._place([self._length + depth for depth in tree.depths[old:]], want))

    def _forward(self, tokens: list[int], want: Ints | None, **inputs: Any) -> TorchLogits:
        """Run the model on a chain. The cache stays unchanged if that fails."""
        ids = send([tokens], self.device)
        logits = self._computed(ids, self._kept(len(tokens), want), **inputs)[0]
        return TorchLogits(logits, self._place(range(self._length + 1, self._length + len(tokens) + 1), want))

    def _kept(self, count: int, want: Ints | None) -> int | Tensor:
        """Return transformers' logits_to_keep for the wanted ones of `count` tokens."""
        if want is None:
            return 0
        return 1 if list(want) == [count - 1] else send(list(want), self.device)

    def _place(self, lengths: Sequence[int], want: Ints | None) -> Place:
        """Return the places, for messages, of the wanted tokens, which end texts of these `lengths`."""
        return place_of(model_name(self.model), lengths if want is None else [lengths[index] for index in want])

    # Rounds on a device call these two methods, as those of StaticTorchModel, with tokens that lie on the device.

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
        """See `StaticTorchModel.step`. Tokens [1, m] follow those of the steps since the last `commit`."""
        return self._computed(ids, keep)

    def commit(self, lengths: Sequence[int]) -> None:
        """Commit the tokens of steps up to this length, and drop the rest."""
        (self._length,) = lengths
        self._trim(self._length)

    def _computed(self, ids: Tensor, keep: Tensor | int, **inputs: Any) -> Tensor:
        """Return logits [1, m, V] of tokens on the device, of all columns or those of `keep`.

        A failure leaves the committed tokens in the cache.
        """
        try:
            logits = logits_of(self.model, keep, input_ids=ids, past_key_values=self._cache, **inputs)
        except BaseException:
            self._trim(self._length + len(self._tree))
            raise
        return logits[..., : self.vocabulary_size]

    def _trim(self, size: int) -> None:
        """Cut every layer to its first `size` entries. After a failed call, only some layers have more."""
        if size == 0:
            self._cache = self._new_cache()
            return
        for layer in self._cache.layers:
            if layer.is_initialized:
                layer.keys, layer.values = layer.keys[..., :size, :], layer.values[..., :size, :]

    @torch.inference_mode()
    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Commit one path of the pending tree and drop its other nodes. ValueError for nodes that are no path."""
        path, start = self._tree.only_path(paths), self.lengths[0]
        if path != list(range(len(path))):
            places = send(path, self.device) + start
            for layer in self._cache.layers:
                for held in (layer.keys, layer.values) if layer.is_initialized else ():
                    # index_select copies, so that the path is read before it is overwritten. The layers of a sharded
                    # model lie on several devices.
                    held[..., start : start + len(path), :] = held.index_select(-2, places.to(held.device))
        self._drop_tree(len(path))

    def _drop_tree(self, kept: int) -> None:
        """Commit the first `kept` entries of the pending tree and drop the rest."""
        self._length += kept
        if len(self._tree) > kept:
            self._trim(self._length)
        self._tree = PendingTree()

    def rollback(self, lengths: Sequence[int]) -> None:
        """Drop a pending tree and the tokens after the first `lengths[0]`. ValueError for more than are committed."""
        (length,) = check_lengths(lengths, [self._length])
        if self._tree.parents:
            self._drop_tree(0)
        if length == 0:  # Every timed prompt starts from such a cold cache.
            self._trim(0)
            self._length = 0
        elif length < self._length:
            # A negative count drops that many tokens in every supported version. A positive count changed its meaning.
            self._cache.crop(length - self._length)
            self._length = length

    def require_equal(self) -> None:
        """Raise DataError unless logits from the cache, also after a rollback, are those of the whole text.

        A position's difference is its root mean square, divided by the spread of the logits. The median over positions
        must be within rounding. A median is used because rounding may choose other experts at some positions.
        """
        tokens = [(11 * place + 3) % self.vocabulary_size for place in range(12)]
        name = model_name(self.model)
        try:
            with torch.inference_mode():
                ids = torch.tensor([tokens], device=self.device)
                whole = as_float64(self.model(input_ids=ids, use_cache=False).logits[0, :, : self.vocabulary_size])
            self.extend(tokens[:4])
            found = [self.extend(tokens[4:8]).full(), self.extend(tokens[8:9]).full()]
            self.rollback([6])
            found.append(self.extend(tokens[6:]).full())
        except Exception as error:  # Code that was not written for such calls raises any kind.
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise DataError(
                f"{name} cannot be decoded here: its cache cannot be continued ({first})", UNDECODABLE
            ) from error
        self.rollback([0])
        expected = whole[[*range(4, 9), *range(6, 12)]].cpu()
        differences = (torch.cat(found).double() - expected).square().mean(-1).sqrt() / expected.std(-1)
        # Recurrences are computed in fp32 even if the model's type is wider.
        limit = max(torch.finfo(self.model.dtype).eps, torch.finfo(torch.float32).eps) ** 0.5
        if not (difference := float(differences.median())) <= limit:
            raise DataError(
                f"{name} cannot be decoded here: its logits from a cache differ from those of the whole text by "
                f"{difference:.2g} of their spread (rounding: less than {limit:.1g})",
                UNDECODABLE,
            )

    def close(self) -> None:
        """Free the cache."""
        self.rollback([0])


# ── One sequence through recurrent layers: their state cannot be cut, but returns to a copy ──


class RecurrentTorchModel(TorchModel):
    """One sequence decoded by a model with layers that keep a recurrent state instead of keys and values; chains only.

    States are copied before some calls (`StateSnapshots.due`). A rollback restores the latest copy and cuts keys and
    values there. The next call computes the committed tokens after the copy again (`resent`).
    DataError for layers of other kinds, and for a model whose logits from its cache are not those of the whole text.
    """

    resends = True

    def __init__(self, model: Any, vocabulary: int | None = None) -> None:
        super().__init__(model, vocabulary)
        self.max_leaves, self.steps_on_device = 0, False  # A state cannot forget single tokens.
        self._new_cache = partial(growing_cache, model.config, model_name(model))
        self._cache = self._new_cache()
        self._text = StateSnapshots()
        self.require_equal()

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of the one row."""
        return [len(self._text.tokens)]

    @property
    def resent(self) -> int:
        """Number of committed tokens that the next call computes again."""
        return len(self._text.tokens) - self._length

    @torch.inference_mode()
    def extend(
        self, tokens: Ints, counts: Ints | None = None, parents: Ints | None = None, want: Ints | None = None
    ) -> TorchLogits:
        """Append `tokens` and return the logits of `want`. Raises as `TorchModel.extend` does, and for a tree."""
        if parents is not None:
            raise ValueError(NO_TREES)
        text, tokens = self._text, list(tokens)
        check_chain(tokens, counts, want, self.lengths, self.capacity, self.model.config.vocab_size)
        if text.due(self._length, len(tokens)):
            text.copied(self._length, [_state(layer) for layer in self._cache.layers])
        again = text.tokens[self._length :]
        if again:
            want = [len(again) + index for index in (range(len(tokens)) if want is None else want)]
        # Positions are given, because some models count them from 0 in every call.
        positions = torch.arange(self._length, self._length + len(again) + len(tokens), device=self.device)
        logits = self._forward([*again, *tokens], want, position_ids=positions.unsqueeze(0))
        text.tokens += tokens
        self._length = len(text.tokens)
        return logits

    def _trim(self, size: int) -> None:
        """Return the states to the latest copy of at most `size` tokens."""
        self._length, states = self._text.latest(size)
        if states is None:
            self._cache = self._new_cache()
            return
        for layer, state in zip(self._cache.layers, states, strict=True):
            vars(layer).update({name: _copy(value) for name, value in state.items()})
            if getattr(layer, "keys", None) is not None:
                layer.keys, layer.values = (held[..., : self._length, :] for held in (layer.keys, layer.values))

    def rollback(self, lengths: Sequence[int]) -> None:
        """Drop the tokens after the first `lengths[0]`. ValueError for more than are committed."""
        (length,) = check_lengths(lengths, self.lengths)
        del self._text.tokens[length:]
        if length < self._length or length == 0:
            self._trim(length)


def growing_cache(config: Any, name: str) -> Any:
    """Return an empty cache for a model's kinds of layers. Tokens outside a window are hidden, but not dropped.

    DataError for layers that keep anything except keys and values or a recurrent state.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, DynamicCache
    from transformers.cache_utils import DynamicLayer, LinearAttentionAndFullAttentionLayer
    from transformers.cache_utils import LinearAttentionLayer as Linear

    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model is not None and "past_key_values" not in signature(model.forward).parameters:
        raise DataError(f"{name} cannot be decoded here: it keeps its state in its own way", UNDECODABLE)
    try:
        cache = DynamicCache(config=config)
    except KeyError as error:  # a kind of layer with a special cache
        raise DataError(f"{name} cannot be decoded here: it has layers of kind {error.args[0]}", UNDECODABLE) from None
    for index, layer in enumerate(cache.layers):
        kind = type(layer)
        if isinstance(layer, Linear) and isinstance(layer, DynamicLayer):
            cache.layers[index] = LinearAttentionAndFullAttentionLayer(number_of_states=layer.number_of_states)
        elif kind.__name__ == "DynamicSlidingWindowLayer":
            cache.layers[index] = DynamicLayer()
        elif kind not in (DynamicLayer, Linear) and kind.__name__ != "DummyLayer":  # not in transformers 5.17
            raise DataError(f"{name} cannot be decoded here: it has layers of kind {kind.__name__}", UNDECODABLE)
    return cache


def _state(layer: Any) -> dict[str, Any]:
    """Return a copy of a layer's state except its keys and values."""
    if not hasattr(layer, "conv_states"):
        return {}
    return {name: _copy(value) for name, value in vars(layer).items() if name not in ("keys", "values")}


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return {key: _copy(one) for key, one in value.items()} if isinstance(value, dict) else value
