"""The cache of a model with slots, and its steps: chains of R rows and nodes of a tree, as they are or compiled.

The slots of the cache are written by number, so that a roll-back is a smaller length and moves nothing. A compiled
step is a graph of one shape: of so many columns, over a cache of one size. On a GPU torch records it as a CUDA graph.
Prompts are never compiled, because each has a length of its own. Legend: R rows, m columns, H heads of keys and
values, S slots, D width, W nodes of a tree rounded up, V vocabulary.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, StaticLayer

from distill.errors import RunError
from distill.models.torch_model import shortest_window

LONGEST_STEP = 64  # columns of a step that is compiled; longer ones read prompts
EXACT = 9  # up to so many columns each number has a graph of its own; above, multiples of COARSE
COARSE = 8


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


class Steps:
    """The forward passes of one model over its cache."""

    def __init__(self, model: Any, cache: SlotCache, compiled: bool) -> None:
        self.model, self.cache, self.compiled = model, cache, compiled
        config = model.config
        window = shortest_window(config)
        self.window = window if window < config.max_position_embeddings else 0
        kinds = set(getattr(config, "layer_types", None) or ()) if self.window else set()
        self.kinds = sorted(kinds) if len(kinds) > 1 else []  # where they differ, each kind has a mask of its own
        # Compiled steps, and the tensors that they read slots and inputs from: the same addresses and strides always. A
        # part of a larger tensor has strides of its own, for which torch would compile the step again.
        self._graphs: dict[tuple[str, int, int], tuple[Callable[..., Tensor], list[Tensor]]] = {}

    def forget(self) -> None:
        """Drop the compiled steps: the cache that they wrote to is another one now."""
        self._graphs.clear()

    def chain(self, ids: Tensor, counts: Tensor, starts: Tensor, keep: Tensor | int, prompt: bool = False) -> Tensor:
        """Logits [R, m, V] (1 or fewer columns with `keep`) of tokens [R, m]; see `StaticTorchModel.step`."""
        columns = ids.shape[1]
        wide = columns if prompt else self._columns(columns)
        # Logits of the last column alone, where it is a token's: the head of two tokens costs more than that of one.
        kept = keep if wide == columns > 1 else 0
        ids = torch.nn.functional.pad(ids, (0, wide - columns)) if wide > columns else ids
        self.cache.slots = starts[:, None] + torch.arange(wide, device=starts.device)
        run = self._chain if prompt else partial(self._run, "chain", wide)
        logits = run(kept, ids, counts, starts)
        if wide == columns:
            return logits
        return logits[:, :columns] if isinstance(keep, int) and not keep else logits[:, columns - 1 : columns]

    def tree(self, ids: Tensor, positions: Tensor, seen: Tensor, committed: int, first: int) -> Tensor:
        """Logits [1, m, V] of a tree's nodes [m] from slot `first` on, which see the committed and what `seen` says."""
        columns = len(ids)
        wide = self._columns(columns)
        if wide > columns:
            ids, positions = (torch.nn.functional.pad(x, (0, wide - columns)) for x in (ids, positions))
            seen = torch.nn.functional.pad(seen, (0, 0, 0, wide - columns))
        offsets = torch.arange(wide + 1, device=ids.device)
        self.cache.slots = (offsets[:wide] + first)[None]
        # A tensor, because a number would be part of the compiled graph.
        return self._run("tree", wide, 0, ids[None], positions[None], seen, offsets[:1] + committed)[:, :columns]

    def _columns(self, columns: int) -> int:
        """The columns of the graph that takes so many tokens; as many where none is compiled."""
        if not self._compiles(columns) or columns <= EXACT:
            return columns
        return -(-columns // COARSE) * COARSE

    def _compiles(self, columns: int) -> bool:
        # The first step takes the cache's memory, which a graph has to find in its place.
        return self.compiled and self.cache.ready and columns <= LONGEST_STEP

    def _run(self, kind: str, columns: int, keep: Tensor | int, *inputs: Tensor) -> Tensor:
        step = self._chain if kind == "chain" else self._tree
        if not self._compiles(columns) or isinstance(keep, Tensor):
            return step(keep, *inputs)
        name = kind, columns, keep
        if name not in self._graphs:
            function = _compiled(step, f"{kind}_{columns}", inputs[0].device.type)
            self._graphs[name] = function, [_place(tensor) for tensor in (self.cache.slots, *inputs)]
        graph, places = self._graphs[name]
        for place, tensor in zip(places, (self.cache.slots, *inputs), strict=True):
            place.copy_(tensor)
        self.cache.slots = places[0]
        torch.compiler.cudagraph_mark_step_begin()
        try:
            logits = graph(keep, *places[1:])
        except torch._dynamo.exc.TorchDynamoException as error:  # a faulty model fails uncompiled, with its prompt
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise RunError(
                f"torch cannot compile a step of {columns} tokens of this model: {first}",
                "leave compile off: the same steps run uncompiled",
            ) from error
        # A graph's next replay, of whichever model, overwrites its output.
        return logits.clone() if logits.is_cuda else logits

    def _chain(self, keep: Tensor | int, ids: Tensor, counts: Tensor, starts: Tensor) -> Tensor:
        slots = self.cache.slots
        # Padding repeats the last position: models whose positions are limited must not see one beyond.
        positions = torch.minimum(slots, (starts + counts - 1).clamp(min=0)[:, None])
        places = torch.arange(self.cache.size, device=ids.device)
        return self._forward(keep, ids, positions, places <= slots[..., None])

    def _tree(self, keep: Tensor | int, ids: Tensor, positions: Tensor, seen: Tensor, committed: Tensor) -> Tensor:
        places = torch.arange(self.cache.size, device=ids.device)
        nodes = (places - committed).clamp(0, seen.shape[1] - 1)
        inside = (places >= committed) & (places < committed + seen.shape[1])
        # A node of padding sees its slot alone or nothing at all: everything committed, lest its softmax be empty.
        visible = (places < committed) | (inside & seen[:, nodes])
        return self._forward(keep, ids, positions, visible[None])

    def _forward(self, keep: Tensor | int, ids: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        """Logits of tokens [R, m] that attend to the slots in `visible` [R, m, S]."""
        masks = {kind: self._mask(visible, kind == "sliding_attention") for kind in self.kinds}
        return self.model(
            input_ids=ids,
            attention_mask=masks or self._mask(visible, self.window > 0),
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=keep,
        ).logits

    def _mask(self, visible: Tensor, windowed: bool) -> Tensor:
        """The additive mask [R, 1, m, S]; additive, because eager attention adds what it is given."""
        if windowed:
            places = torch.arange(self.cache.size, device=visible.device)
            visible = visible & (places > self.cache.slots[..., None] - self.window)
        dtype = self.model.dtype
        nothing = torch.zeros((), dtype=dtype, device=visible.device)
        return torch.where(visible, nothing, torch.finfo(dtype).min)[:, None]


def _place(like: Tensor) -> Tensor:
    """A tensor of its own, of this shape, that a CUDA graph may read where it lies."""
    made = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    torch._dynamo.mark_static_address(made)
    return made


def _compiled(step: Any, name: str, device: str) -> Callable[..., Tensor]:
    """The bound method compiled for one shape.

    Its code is a copy under a name of its own: torch keeps graphs by code, and gives up on one with more than a few.
    """
    function = step.__func__
    copy = types.FunctionType(
        function.__code__.replace(co_name=name), function.__globals__, name, function.__defaults__, function.__closure__
    )
    mode = "reduce-overhead" if device == "cuda" else None  # records CUDA graphs
    made: Callable[..., Tensor] = torch.compile(types.MethodType(copy, step.__self__), dynamic=False, mode=mode)
    return made
