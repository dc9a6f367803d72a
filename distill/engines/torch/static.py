"""Decoding with a cache of fixed size: the steps of a few tokens have few shapes, so that they can be compiled.

Legend: R rows, m columns of a step, n wanted tokens, S slots, W nodes of a tree rounded up, V vocabulary. A step has
the same number of columns in every row. A row that takes fewer tokens leaves the last columns to padding, which is
written after the row's tokens: no mask ever shows it, and the next tokens overwrite it. So padding, rejected tokens
and the rows that take no part all roll back by a length that the host keeps.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, StaticLayer

from distill.devices import begin_replay, records_graphs
from distill.engines.model import SPARE_NODES, Ints, PendingTree, check_call, check_lengths
from distill.engines.torch.hugging_face import logits_of
from distill.engines.torch.model import (
    TorchLogits,
    TorchModel,
    layer_masks,
    mask_refusal,
    model_name,
    send,
    state_refusal,
)
from distill.errors import DataError, RunError
from distill.sampler import Place, place_of

# ── The cache and its steps: chains of R rows and nodes of a tree, as they are or compiled ──
# The slots of the cache are written by number, so that a roll-back is a smaller length and moves nothing. A
# compiled step is a graph of one shape: of a number of columns, over a cache of one size. On a GPU torch records it as
# a CUDA graph. Prompts are never compiled, because each has a length of its own. Legend: R rows, m columns, H heads
# of keys and values, S slots, D width, W nodes of a tree rounded up, V vocabulary.

LONGEST_STEP = 64  # columns of a step that is compiled; longer ones read prompts
EXACT = 9  # up to this many columns each number has a graph of its own; above, multiples of COARSE
COARSE = 8


class SlotLayer(StaticLayer):  # type: ignore[misc]
    """One layer's keys and values [R, H, S, D]: slot s of a row holds its token at position s.

    Transformers' own layer counts the tokens of all rows together and only forwards. Here the cache names the slots.
    """

    def write(self, keys: Tensor, values: Tensor, slots: Tensor, shown: int) -> tuple[Tensor, Tensor]:
        """Store keys and values [R, H, m, D] in slots [R, m]; returns the first `shown`, of which a mask hides some."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)  # zeros, because a mask hides any number except NaN
        slots = slots.to(keys.device)  # the layers of a sharded model lie on several devices
        for held, new in ((self.keys, keys), (self.values, values)):
            if len(slots) == 1:
                held.index_copy_(2, slots[0], new)
            else:
                held.scatter_(2, slots[:, None, :, None].expand_as(new), new)
        return self.keys[:, :, :shown], self.values[:, :, :shown]

    def grow(self, size: int) -> None:
        """Take a larger S and keep what is stored."""
        self.max_cache_len = size
        if self.is_initialized:
            keys, values = self.keys, self.values
            self.lazy_initialization(keys, values)
            self.keys[:, :, : keys.shape[2]] = keys
            self.values[:, :, : values.shape[2]] = values


class SlotCache(Cache):  # type: ignore[misc]
    """The layers of a model; `slots` [R, m] are those that the step's tokens go to, `shown` how many it attends to."""

    def __init__(self, layers: int, size: int) -> None:
        super().__init__(layers=[SlotLayer(max_cache_len=size) for _ in range(layers)])
        self.size = self.shown = size
        self.slots: Tensor

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """What the attention of layer `layer_idx` calls."""
        return self.layers[layer_idx].write(keys, values, self.slots, self.shown)

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
        # Compiled steps, and the tensors that they read slots and inputs from: the same addresses and strides always. A
        # part of a larger tensor has strides of its own, for which torch would compile the step again.
        self._graphs: dict[tuple[Any, ...], tuple[Callable[..., Tensor], list[Tensor]]] = {}

    def forget(self) -> None:
        """Drop the compiled steps: the cache that they wrote to is another one now."""
        self._graphs.clear()

    def chain(
        self, ids: Tensor, counts: Tensor, starts: Tensor, end: int, keep: Tensor | int, prompt: bool = False
    ) -> Tensor:
        """Logits [R, m, V] (1 or fewer columns with `keep`) of tokens [R, m]; see `StaticTorchModel.step`."""
        columns = ids.shape[1]
        wide = columns if prompt else self._columns(columns)
        self._show(end, not prompt and self._compiles(columns))
        # Logits of the last column alone, where it is a token's: the head of two tokens costs more than that of one.
        kept = keep if wide == columns > 1 else 0
        ids = torch.nn.functional.pad(ids, (0, wide - columns)) if wide > columns else ids
        self.cache.slots = starts[:, None] + torch.arange(wide, device=starts.device)
        run = self._chain if prompt else partial(self._run, "chain", wide)
        logits = run(kept, ids, counts, starts)
        if wide == columns:
            return logits
        return logits[:, :columns] if isinstance(keep, int) and not keep else logits[:, columns - 1 : columns]

    def tree(self, ids: Tensor, depths: Tensor, seen: Tensor, committed: int, first: int) -> Tensor:
        """Logits [1, m, V] of the last m nodes of a tree, from slot `first` on: they see the committed and what `seen`
        [m, W] says. `depths` [W] are those of all its nodes."""
        columns = len(ids)
        wide = self._columns(columns)
        self._show(first + columns, self._compiles(columns))
        if wide > columns:
            ids = torch.nn.functional.pad(ids, (0, wide - columns))
            seen = torch.nn.functional.pad(seen, (0, 0, 0, wide - columns))
        offsets = torch.arange(wide + 1, device=ids.device)
        self.cache.slots = (offsets[:wide] + first)[None]
        # A tensor, because a number would be part of the compiled graph.
        return self._run("tree", wide, 0, ids[None], depths, seen, offsets[:1] + committed)[:, :columns]

    def _show(self, end: int, compiled: bool) -> None:
        """Let a step attend to the slots before `end`; a compiled one to all S, because its shapes are fixed."""
        self.cache.shown = self.cache.size if compiled else _rounded(end)

    def _columns(self, columns: int) -> int:
        """The columns of the graph that takes this many tokens; as many where none is compiled."""
        if not self._compiles(columns) or columns <= EXACT:
            return columns
        return -(-columns // COARSE) * COARSE

    def _compiles(self, columns: int) -> bool:
        # The first step takes the cache's memory, which a graph has to find in its place.
        ready = self.compiled and any(layer.is_initialized for layer in self.cache.layers)
        return ready and columns <= LONGEST_STEP

    def _run(self, kind: str, columns: int, keep: Tensor | int, *inputs: Tensor) -> Tensor:
        step = self._chain if kind == "chain" else self._tree
        if not self._compiles(columns) or isinstance(keep, Tensor):
            return step(keep, *inputs)
        name = kind, columns, keep, *(inputs[1].shape if kind == "tree" else ())
        if name not in self._graphs:
            function = _compiled(step, f"{kind}_{columns}", inputs[0].device)
            self._graphs[name] = function, [_place(tensor) for tensor in (self.cache.slots, *inputs)]
        graph, places = self._graphs[name]
        for place, tensor in zip(places, (self.cache.slots, *inputs), strict=True):
            place.copy_(tensor)
        self.cache.slots = places[0]
        begin_replay(self.cache.slots.device)
        try:
            logits = graph(keep, *places[1:])
        except torch._dynamo.exc.TorchDynamoException as error:  # a faulty model fails uncompiled, with its prompt
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise RunError(
                f"torch cannot compile a step of {columns} tokens of this model: {first}",
                "leave compile off: the same steps run uncompiled",
            ) from error
        # A graph's next replay, of whichever model, overwrites its output.
        return logits.clone() if records_graphs(logits.device) else logits

    def _chain(self, keep: Tensor | int, ids: Tensor, counts: Tensor, starts: Tensor) -> Tensor:
        slots = self.cache.slots
        # Padding repeats the last position: models whose positions are limited must not see one beyond.
        positions = torch.minimum(slots, (starts + counts - 1).clamp(min=0)[:, None])
        places = torch.arange(self.cache.shown, device=ids.device)
        return self._forward(keep, ids, positions, places <= slots[..., None], places)

    def _tree(self, keep: Tensor | int, ids: Tensor, depths: Tensor, seen: Tensor, committed: Tensor) -> Tensor:
        places = torch.arange(self.cache.shown, device=ids.device)
        nodes = (places - committed).clamp(0, len(depths) - 1)
        inside = (places >= committed) & (places < committed + len(depths))
        of = torch.where(inside, committed + depths[nodes] - 1, places)
        # A node of padding sees its slot alone or nothing at all: everything committed, lest its softmax be empty.
        visible = (places < committed) | (inside & seen[:, nodes])
        own = (self.cache.slots - committed).clamp(max=len(depths) - 1)
        return self._forward(keep, ids, committed + depths[own] - 1, visible[None], of)

    def _forward(self, keep: Tensor | int, ids: Tensor, positions: Tensor, visible: Tensor, of: Tensor) -> Tensor:
        """Logits of tokens [R, m] that attend to the slots in `visible` [R, m, shown], at positions `of` [shown]."""
        return logits_of(
            self.model,
            keep,
            input_ids=ids,
            attention_mask=layer_masks(self.model, visible, positions, of),
            position_ids=positions,
            past_key_values=self.cache,
        )


def _place(like: Tensor) -> Tensor:
    """A tensor of its own, of this shape, that a CUDA graph may read where it lies."""
    made = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    torch._dynamo.mark_static_address(made)
    return made


def _compiled(step: Any, name: str, device: torch.device) -> Callable[..., Tensor]:
    """The bound method compiled for one shape.

    Its code is a copy under a name of its own: torch keeps graphs by code, and gives up on one with more than a few.
    """
    function = step.__func__
    copy = types.FunctionType(
        function.__code__.replace(co_name=name), function.__globals__, name, function.__defaults__, function.__closure__
    )
    mode = "reduce-overhead" if records_graphs(device) else None
    made: Callable[..., Tensor] = torch.compile(types.MethodType(copy, step.__self__), dynamic=False, mode=mode)
    return made


# ── The model ──

CHUNK = 512  # tokens of a row that one step of a prompt reads, so that its mask [m, S] stays small
FIRST_SIZE = 256  # slots that a model begins with where nobody says how long its texts get


def refusal(model: Any) -> str | None:
    """The reason why a model cannot decode with slots; None where it can."""
    return state_refusal(type(model), model.config, empty=False) or mask_refusal(model.config)


def require_static(model: Any, name: str) -> None:
    """Raise DataError for a model that cannot decode with slots; it may be one without weights."""
    if (reason := refusal(model)) is not None:
        raise DataError(f"{name} cannot decode with a static cache: {reason}", "leave static off")


class StaticTorchModel(TorchModel):
    """R sequences of different lengths in a Hugging Face model, with a cache of fixed size.

    See `Model`. One row takes trees. `size` is the number of tokens that a row is expected to hold; where it holds
    more, the cache doubles. With `compiled`, steps of up to LONGEST_STEP tokens after a prompt are compiled by torch,
    one for each number of tokens. DataError for a model that cannot decode with slots.
    """

    cache_kind: type[SlotCache] = SlotCache

    def __init__(
        self,
        model: Any,
        vocabulary: int | None = None,
        rows: int = 1,
        size: int | None = None,
        compiled: bool = False,
        on_device: bool = True,
    ) -> None:
        if rows < 1:
            raise ValueError(f"a batch has at least one row, got {rows}")
        self._require_layers(model)
        super().__init__(model, vocabulary)
        self.rows, self.steps_on_device = rows, on_device
        self.max_leaves = sys.maxsize if rows == 1 else 0
        expected = min(size or FIRST_SIZE, self.capacity)
        self._cache = self.cache_kind(model.config.num_hidden_layers, _rounded(expected + SPARE_NODES))
        self._steps = Steps(model, self._cache, compiled)
        self._lengths = [0] * rows

    @staticmethod
    def _require_layers(model: Any) -> None:
        require_static(model, model_name(model))

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of each row."""
        return list(self._lengths)

    @property
    def size(self) -> int:
        """Slots S of a row."""
        return self._cache.size

    def _extend_chain(self, tokens: list[int], counts: list[int], want: Ints | None) -> TorchLogits:
        ends = list(accumulate(counts))
        texts = [tokens[end - count : end] for end, count in zip(ends, counts, strict=True)]
        places = [(row, column) for row, text in enumerate(texts) for column in range(len(text))]
        wanted = places if want is None else [places[index] for index in want]
        logits = self._read(texts, wanted)
        read = [self._lengths[row] + column + 1 for row, column in wanted]
        place = self._places([row for row, _ in wanted], read)
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
        return self._steps.chain(ids, counts, starts, end, keep, prompt)[..., : self.vocabulary_size]

    def commit(self, lengths: Sequence[int]) -> None:
        """Count as committed what steps wrote: the rows are `lengths` long."""
        self._lengths = [int(length) for length in lengths]

    def _extend_tree(self, tokens: list[int], counts: Ints | None, parents: Ints, want: Ints | None) -> TorchLogits:
        if not self.max_leaves:
            raise ValueError(f"{self.rows} rows take chains, not trees")
        check_call(tokens, counts, parents, want, self.vocabulary_size)
        old, length = len(self._tree), self._lengths[0]
        tree = self._tree.grown(parents, length, self.capacity)
        depths = [length + depth for depth in tree.depths[old:]]
        # One transfer: the depths of all nodes, and of each new one what it sees and its token. [1 + m, W + 1]
        width = _rounded(len(tree))
        rows = [[*seen, token] for token, seen in zip(tokens, tree.seen(old, width), strict=True)]
        sent = send([[*tree.depths, *[1] * (width + 1 - len(tree))], *rows], self.device)
        self._reserve(length + width)
        logits = self._steps.tree(sent[1:, -1], sent[0, :-1], sent[1:, :-1].bool(), length, length + old)
        logits = logits[0, :, : self.vocabulary_size]
        self._tree = tree
        read = depths if want is None else [depths[index] for index in want]
        picked = _picked(logits, range(len(tokens)) if want is None else want)
        return TorchLogits(picked, self._places([0] * len(read), read))

    def _places(self, rows: Sequence[int], lengths: Sequence[int]) -> Place:
        """The places of logits, by their rows and by how many tokens each of them follows."""
        name = model_name(self.model)
        if self.rows == 1:
            return place_of(name, lengths)
        return lambda index: f"{name}, row {rows[index]}, after {lengths[index]} tokens"

    def _reserve(self, slots: int) -> None:
        """Let the cache hold `slots` and a step's padding after them."""
        if slots + COARSE > self._cache.size:
            self._steps.forget()
            limit = _rounded(self.capacity + SPARE_NODES)
            self._cache.grow(max(_rounded(slots + SPARE_NODES), min(2 * self._cache.size, limit)))

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """As of `TorchModel`; rows that take no trees have only empty paths."""
        if self.max_leaves:
            super().keep(paths)
        elif list(map(list, paths)) != [[]] * self.rows:
            raise ValueError(f"no tree is pending: paths must be {[[]] * self.rows}, got {list(paths)}")

    def _drop_tree(self, kept: int) -> None:
        self._lengths[0] += kept
        self._tree = PendingTree()

    @torch.inference_mode()
    def rollback(self, lengths: Sequence[int]) -> None:
        """Drop a pending tree and the tokens of each row beyond `lengths`; ValueError for more than a row has.

        The memory is kept, and its addresses, because compiled steps hold them.
        """
        self._lengths = check_lengths(lengths, self._lengths)
        self._tree = PendingTree()
        if not any(self._lengths):
            self._cache.clear()

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
