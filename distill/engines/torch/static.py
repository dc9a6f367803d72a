"""Decoding with a cache of fixed size: steps of few tokens have few shapes, so that they can be compiled.

A step has the same number of columns in every row. A row that takes fewer tokens has padding in its last columns. The
padding is written after the row's tokens. No mask ever shows it, and the next tokens overwrite it. Padding, rejected
tokens and rows without tokens are therefore all rolled back by a length that the host keeps.

Legend: R rows, m columns of a step, n wanted tokens, S slots, H heads of keys and values, D width of a head, W nodes of
a tree rounded up, V vocabulary.
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
# The slots of the cache are written by number, so that a rollback is a smaller length and moves nothing. A compiled
# step is a graph of one shape: a number of columns over a cache of one size. On a GPU, torch records it as a CUDA
# graph. Prompts are never compiled, because each has another length.

LONGEST_STEP = 64  # columns of the longest compiled step. Longer steps read prompts.
EXACT_COLUMNS = 9  # Up to this number, each number of columns has its own graph. Larger ones are rounded up:
COLUMN_MULTIPLE = 8


class SlotLayer(StaticLayer):  # type: ignore[misc]
    """One layer's keys and values [R, H, S, D]: slot s of a row holds its token at position s.

    transformers' layer counts the tokens of all rows together, and only forwards. Here, the cache names the slots.
    """

    def write(self, keys: Tensor, values: Tensor, slots: Tensor, shown: int) -> tuple[Tensor, Tensor]:
        """Store keys and values [R, H, m, D] in slots [R, m], and return the first `shown` slots."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)  # The cache begins with zeros, because a mask does not hide NaN.
        slots = slots.to(keys.device)  # The layers of a sharded model lie on several devices.
        for held, new in ((self.keys, keys), (self.values, values)):
            if len(slots) == 1:
                held.index_copy_(2, slots[0], new)
            else:
                held.scatter_(2, slots[:, None, :, None].expand_as(new), new)
        return self.keys[:, :, :shown], self.values[:, :, :shown]

    def grow(self, size: int) -> None:
        """Take a larger S and keep the stored tokens."""
        self.max_cache_len = size
        if self.is_initialized:
            keys, values = self.keys, self.values
            self.lazy_initialization(keys, values)
            self.keys[:, :, : keys.shape[2]] = keys
            self.values[:, :, : values.shape[2]] = values


class SlotCache(Cache):  # type: ignore[misc]
    """The layers of a model. A step writes its tokens to `slots` [R, m], and attends to the first `shown` slots."""

    def __init__(self, layers: int, size: int) -> None:
        super().__init__(layers=[SlotLayer(max_cache_len=size) for _ in range(layers)])
        self.size = self.shown = size
        self.slots: Tensor

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store keys and values. The attention of layer `layer_idx` calls this."""
        return self.layers[layer_idx].write(keys, values, self.slots, self.shown)

    def grow(self, size: int) -> None:
        """Take a larger S in one layer after another, so that only one layer is in memory twice."""
        self.size = size
        for layer in self.layers:
            layer.grow(size)

    def clear(self) -> None:
        """Fill the cache with zeros. NaN from a text that overflowed must not reach the next text."""
        for layer in self.layers:
            layer.reset()

    def free(self) -> None:
        """Free the memory. The next step allocates it again."""
        for layer in self.layers:
            layer.keys = layer.values = None
            layer.is_initialized = False


class Steps:
    """The forward passes of one model over its cache."""

    def __init__(self, model: Any, cache: SlotCache, compiled: bool) -> None:
        self.model, self.cache, self.compiled = model, cache, compiled
        # Compiled steps with the tensors from which they read slots and inputs. Addresses and strides stay the same. A
        # part of a larger tensor has other strides, for which torch would compile the step again.
        self._graphs: dict[tuple[Any, ...], tuple[Callable[..., Tensor], list[Tensor]]] = {}

    def forget(self) -> None:
        """Drop the compiled steps, because the cache to which they write has been replaced."""
        self._graphs.clear()

    def chain(
        self, ids: Tensor, counts: Tensor, starts: Tensor, end: int, keep: Tensor | int, prompt: bool = False
    ) -> Tensor:
        """Return logits [R, m, V], or of fewer columns with `keep`, for tokens [R, m]. See `StaticTorchModel.step`."""
        columns = ids.shape[1]
        wide = columns if prompt else self._columns(columns)
        self._show(end, not prompt and self._compiles(columns))
        # If the last column is a token, only its logits are computed: the head of two tokens costs more than of one.
        kept = keep if wide == columns > 1 else 0
        ids = torch.nn.functional.pad(ids, (0, wide - columns)) if wide > columns else ids
        self.cache.slots = starts[:, None] + torch.arange(wide, device=starts.device)
        run = self._chain if prompt else partial(self._run, "chain", wide)
        logits = run(kept, ids, counts, starts)
        if wide == columns:
            return logits
        return logits[:, :columns] if isinstance(keep, int) and not keep else logits[:, columns - 1 : columns]

    def tree(self, ids: Tensor, depths: Tensor, seen: Tensor, committed: int, first: int) -> Tensor:
        """Return logits [1, m, V] of the last m nodes of a tree, which go to the slots from `first` on.

        They attend to the committed tokens, and to the nodes that `seen` [m, W] marks. `depths` [W] are those of all
        nodes.
        """
        columns = len(ids)
        wide = self._columns(columns)
        self._show(first + columns, self._compiles(columns))
        if wide > columns:
            ids = torch.nn.functional.pad(ids, (0, wide - columns))
            seen = torch.nn.functional.pad(seen, (0, 0, 0, wide - columns))
        offsets = torch.arange(wide + 1, device=ids.device)
        self.cache.slots = (offsets[:wide] + first)[None]
        # The committed length is a tensor, because a number would become part of the compiled graph.
        return self._run("tree", wide, 0, ids[None], depths, seen, offsets[:1] + committed)[:, :columns]

    def _show(self, end: int, compiled: bool) -> None:
        """Let a step attend to the slots before `end`. A compiled step has fixed shapes and attends to all S."""
        self.cache.shown = self.cache.size if compiled else _rounded(end)

    def _columns(self, columns: int) -> int:
        """Return the columns of the graph that takes this many tokens; `columns` if no graph is compiled."""
        if not self._compiles(columns) or columns <= EXACT_COLUMNS:
            return columns
        return -(-columns // COLUMN_MULTIPLE) * COLUMN_MULTIPLE

    def _compiles(self, columns: int) -> bool:
        # The first step allocates the cache. A graph needs the cache at a fixed address.
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
        except torch._dynamo.exc.TorchDynamoException as error:  # A faulty model fails before, with its prompt.
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise RunError(
                f"torch cannot compile a step of {columns} tokens of this model: {first}",
                "leave compile off: the same steps run uncompiled",
            ) from error
        # The next replay of any graph, of any model, overwrites this output.
        return logits.clone() if records_graphs(logits.device) else logits

    def _chain(self, keep: Tensor | int, ids: Tensor, counts: Tensor, starts: Tensor) -> Tensor:
        slots = self.cache.slots
        # Padding repeats the last position, because some models fail beyond their largest position.
        positions = torch.minimum(slots, (starts + counts - 1).clamp(min=0)[:, None])
        places = torch.arange(self.cache.shown, device=ids.device)
        return self._forward(keep, ids, positions, places <= slots[..., None], places)

    def _tree(self, keep: Tensor | int, ids: Tensor, depths: Tensor, seen: Tensor, committed: Tensor) -> Tensor:
        places = torch.arange(self.cache.shown, device=ids.device)
        nodes = (places - committed).clamp(0, len(depths) - 1)
        inside = (places >= committed) & (places < committed + len(depths))
        of = torch.where(inside, committed + depths[nodes] - 1, places)
        # Every node sees all committed tokens. Otherwise the softmax of a node of padding would be empty.
        visible = (places < committed) | (inside & seen[:, nodes])
        own = (self.cache.slots - committed).clamp(max=len(depths) - 1)
        return self._forward(keep, ids, committed + depths[own] - 1, visible[None], of)

    def _forward(self, keep: Tensor | int, ids: Tensor, positions: Tensor, visible: Tensor, of: Tensor) -> Tensor:
        """Return logits of tokens [R, m] that attend to the slots `visible` [R, m, shown] at positions `of` [shown]."""
        return logits_of(
            self.model,
            keep,
            input_ids=ids,
            attention_mask=layer_masks(self.model, visible, positions, of),
            position_ids=positions,
            past_key_values=self.cache,
        )


def _place(like: Tensor) -> Tensor:
    """Return a new tensor of the same shape whose address a CUDA graph may read."""
    made = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    torch._dynamo.mark_static_address(made)
    return made


def _compiled(step: Any, name: str, device: torch.device) -> Callable[..., Tensor]:
    """Return the bound method compiled for one shape.

    The code is copied under another name. torch keeps graphs by code, and stops compiling code that has many graphs.
    """
    function = step.__func__
    copy = types.FunctionType(
        function.__code__.replace(co_name=name), function.__globals__, name, function.__defaults__, function.__closure__
    )
    mode = "reduce-overhead" if records_graphs(device) else None
    made: Callable[..., Tensor] = torch.compile(types.MethodType(copy, step.__self__), dynamic=False, mode=mode)
    return made


# ── The model ──

PROMPT_COLUMNS = 512  # columns of a step that reads a prompt, so that its mask [m, S] stays small
FIRST_SIZE = 256  # slots of a new cache if the length of the texts is unknown


def refusal(model: Any) -> str | None:
    """Return the reason why a model cannot decode with slots; None if it can."""
    return state_refusal(type(model), model.config, empty=False) or mask_refusal(model.config)


def require_static(model: Any, name: str) -> None:
    """Raise DataError for a model that cannot decode with slots. The model may have no weights."""
    if (reason := refusal(model)) is not None:
        raise DataError(f"{name} cannot decode with a static cache: {reason}", "leave static off")


class StaticTorchModel(TorchModel):
    """R sequences of different lengths in a Hugging Face model, with a cache of fixed size.

    See `Model`. Trees need a model of one row. `size` is the expected number of tokens of a row. The cache doubles if a
    row holds more. With `compiled`, torch compiles steps of up to LONGEST_STEP tokens after a prompt, one for each
    number of columns. DataError for a model that cannot decode with slots.
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
        """Return logits [n, V] after the `wanted` tokens (row, column in its text).

        The texts are read in steps of at most PROMPT_COLUMNS columns.
        """
        chunks: list[Tensor] = []
        order: list[int] = []
        for start in range(0, max(map(len, texts)), PROMPT_COLUMNS):
            parts = [text[start : start + PROMPT_COLUMNS] for text in texts]
            here = [i for i, (_, column) in enumerate(wanted) if start <= column < start + PROMPT_COLUMNS]
            places = [(wanted[i][0], wanted[i][1] - start) for i in here]
            chunks.append(self._chunk(parts, [length + start for length in self._lengths], places))
            order += here
        logits = chunks[0] if len(chunks) == 1 else torch.cat(chunks)
        return _picked(logits, sorted(range(len(order)), key=order.__getitem__))

    def _chunk(
        self, parts: Sequence[Sequence[int]], starts: Sequence[int], wanted: Sequence[tuple[int, int]]
    ) -> Tensor:
        """Return logits [n, V] of one step. Row r takes the tokens parts[r], from slot starts[r] on."""
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
        """Return logits [R, m, V] of tokens [R, m] on the device. Nothing is committed before `commit` is called.

        Row r holds counts[r] tokens, then padding. They go to the slots from starts[r] on. All these slots lie before
        `end`, a number on the host. `keep` is transformers' logits_to_keep: 0 for all columns, 1 for the last column,
        or the columns. The step of a `prompt` is never compiled. The host does not wait for the device.
        """
        self._reserve(end)
        return self._steps.chain(ids, counts, starts, end, keep, prompt)[..., : self.vocabulary_size]

    def commit(self, lengths: Sequence[int]) -> None:
        """Commit the tokens that steps have written. `lengths` are the new lengths of the rows."""
        self._lengths = [int(length) for length in lengths]

    def _extend_tree(self, tokens: list[int], counts: Ints | None, parents: Ints, want: Ints | None) -> TorchLogits:
        if not self.max_leaves:
            raise ValueError(f"{self.rows} rows take chains, not trees")
        check_call(tokens, counts, parents, want, self.vocabulary_size)
        old, length = len(self._tree), self._lengths[0]
        tree = self._tree.grown(parents, length, self.capacity)
        depths = [length + depth for depth in tree.depths[old:]]
        # One transfer [1 + m, W + 1]: the depths of all nodes, then for each new node what it sees, and its token.
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
        """Return the places of logits, for messages, from their rows and from the number of tokens before each."""
        name = model_name(self.model)
        if self.rows == 1:
            return place_of(name, lengths)
        return lambda index: f"{name}, row {rows[index]}, after {lengths[index]} tokens"

    def _reserve(self, slots: int) -> None:
        """Grow the cache if it cannot hold `slots` and the padding of a step."""
        if slots + COLUMN_MULTIPLE > self._cache.size:
            self._steps.forget()
            limit = _rounded(self.capacity + SPARE_NODES)
            self._cache.grow(max(_rounded(slots + SPARE_NODES), min(2 * self._cache.size, limit)))

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Commit one path of each row's tree. Rows that take no trees have empty paths."""
        if self.max_leaves:
            super().keep(paths)
        elif list(map(list, paths)) != [[]] * self.rows:
            raise ValueError(f"no tree is pending: paths must be {[[]] * self.rows}, got {list(paths)}")

    def _drop_tree(self, kept: int) -> None:
        self._lengths[0] += kept
        self._tree = PendingTree()

    @torch.inference_mode()
    def rollback(self, lengths: Sequence[int]) -> None:
        """Drop a pending tree and the tokens of each row after `lengths`. ValueError for more tokens than a row has.

        The memory stays allocated, because compiled steps hold its addresses.
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
    """Return the next multiple of SPARE_NODES. Attention kernels need masks of even widths."""
    return -(-slots // SPARE_NODES) * SPARE_NODES


def _picked(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """Return rows [n, V] of logits, as a view if they are consecutive."""
    first = rows[0] if rows else 0
    if list(rows) == list(range(first, first + len(rows))):
        return logits[first : first + len(rows)]
    return logits[send(list(rows), logits.device)]
