"""A cache of fixed size whose slots are written by number, so that a roll-back is a smaller length and moves nothing.

Legend: R rows, H heads of keys and values, S slots, D width, m tokens of a step.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, StaticCache, StaticLayer, StaticSlidingWindowLayer


class SlotLayer(StaticLayer):  # type: ignore[misc]
    """One layer's keys and values [R, H, S, D]: slot s of a row holds its token at position s.

    Transformers' own layer counts the tokens of all rows together and only forwards. Here the cache names the slots.
    """

    def write(self, keys: Tensor, values: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values [R, H, m, D] in slots [R, m]; returns all S, of which the mask shows what counts."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)  # zeros, because a mask hides any number except NaN
        slots = slots.to(keys.device)  # the layers of a sharded model lie on several devices
        for held, new in ((self.keys, keys), (self.values, values)):
            if len(slots) == 1:
                held.index_copy_(2, slots[0], new)
            else:
                held.scatter_(2, slots[:, None, :, None].expand_as(new), new)
        return self.keys, self.values

    def grow(self, size: int) -> None:
        """Take a larger S and keep what is stored."""
        self.max_cache_len = size
        if self.is_initialized:
            keys, values = self.keys, self.values
            self.lazy_initialization(keys, values)
            self.keys[:, :, : keys.shape[2]] = keys
            self.values[:, :, : values.shape[2]] = values

    def move(self, old: Tensor, start: int) -> None:
        """Copy what the slots `old` [k] hold into those from `start` on."""
        if self.is_initialized:
            index = old.to(self.keys.device)
            for held in (self.keys, self.values):
                # Read before it is written: index_select copies.
                held[:, :, start : start + len(old)] = held.index_select(2, index)


class SlotCache(Cache):  # type: ignore[misc]
    """The layers of a model; `slots` [R, m] are those that the step's tokens go to."""

    def __init__(self, layers: int, size: int) -> None:
        super().__init__(layers=[SlotLayer(max_cache_len=size) for _ in range(layers)])
        self.size = size
        self.slots: Tensor

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """What the attention of layer `layer_idx` calls."""
        return self.layers[layer_idx].write(keys, values, self.slots)

    @property
    def ready(self) -> bool:
        """Whether any layer holds memory: a step that is compiled must find it."""
        return any(layer.is_initialized for layer in self.layers)

    def grow(self, size: int) -> None:
        """Take a larger S in every layer, one after another, so that only one is held twice."""
        self.size = size
        for layer in self.layers:
            layer.grow(size)

    def clear(self) -> None:
        """Zeros everywhere: what a text that overflowed left must not reach the next one."""
        for layer in self.layers:
            layer.reset()

    def free(self) -> None:
        """Give the memory back; the next step takes it anew."""
        for layer in self.layers:
            layer.keys = layer.values = None
            layer.is_initialized = False


def unsupported(config: Any) -> str | None:
    """The kind of a layer whose state no slots hold, such as a recurrent one; None where all have keys and values."""
    try:
        layers = StaticCache(config=config, max_cache_len=1).layers
    except KeyError as error:  # a kind of layer for which transformers has no cache of fixed size
        return str(error.args[0])
    kinds = {type(layer) for layer in layers} - {StaticLayer, StaticSlidingWindowLayer}
    return min((kind.__name__ for kind in kinds), default=None)
