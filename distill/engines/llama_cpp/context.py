"""A llama.cpp context: the cells that cache decoded tokens, the batch of tokens to decode, and their logits.

A cell belongs to one or several sequences. This module does not check arguments, and llama.cpp aborts the process if
they are out of range. Legend: m tokens of one call, V vocabulary.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from distill.engines.model import ROOT, SPARE_NODES, PendingTree
from distill.errors import DataError
from distill.gguf.library import ERRORS, GgufFile, fill_context, last_errors
from distill.recipe import GgufOptions
from distill.sampler import Place, finite_argmax, place_of

NO_SLOT = 1  # llama_decode returns this if the cache has no cells for the tokens.
UNDOABLE = 16  # requested number of a call's last tokens that a recurrent model can take back
FEW = 64  # the most tokens of a step or verification. Longer calls are prompts, for which overhead does not matter.


class GgufContext:
    """A cache of `capacity` tokens and `sequences` sequences for a file, with the types in `options`.

    `cells` is the size of the cache in tokens. `batch_size` is the most tokens of one call. `generation` counts calls
    that overwrite earlier logits. `undoable` is the number of a call's last tokens that llama.cpp can take back from a
    recurrent state. Raises DataError if there is not enough memory.
    """

    def __init__(self, file: GgufFile, capacity: int, batch: int, sequences: int, options: GgufOptions) -> None:
        self._batch: Any = None
        self.path, self.generation = file.path, 0
        self._file, self._library = file, file.engine
        llama = self._library
        settings = llama.llama_context_default_params()
        spare = SPARE_NODES if sequences > 1 else 0
        settings.n_ctx = capacity + spare
        settings.n_batch = min(batch, capacity + spare)
        settings.n_seq_max = sequences
        fill_context(settings, options)
        if file.recurrent:
            settings.n_rs_seq = min(UNDOABLE, settings.n_ubatch - 1)
        ERRORS.clear()
        self._context: Any = llama.llama_init_from_model(file.model, settings)
        if not self._context:
            hint = "ask for a shorter context or free memory"
            raise DataError(f"{file.path}: no room for a context of {capacity} tokens: {last_errors()}", hint)
        self._memory = llama.llama_get_memory(self._context)
        # ik_llama.cpp needs adjacent cells for the tokens of a call.
        self._defragment = getattr(llama, "llama_kv_cache_defrag", None)
        self.undoable = int(llama.llama_n_rs_seq(self._context)) if file.recurrent else 0  # 0 for some architectures
        self.batch_size = int(llama.llama_n_batch(self._context))
        self.cells = int(llama.llama_n_ctx(self._context))
        self._batch = llama.llama_batch_init(self.batch_size, 0, sequences)
        view, size = np.ctypeslib.as_array, (self.batch_size,)
        self._token, self._position = view(self._batch.token, size), view(self._batch.pos, size)
        self._output = view(self._batch.logits, size)
        self._sequences = view(self._batch.n_seq_id, size)  # the number of sequences of each token
        self._sequences[:] = 1
        for index in range(self.batch_size):
            self._batch.seq_id[index][0] = 0
        self._ascending = np.arange(capacity, dtype=np.int32)
        self._view = np.empty((0, file.head_rows), dtype=np.float32)
        self._view_address = 0

    def decode_few(self, tokens: Sequence[int], start: int, last_only: bool) -> NDArray[np.float32]:
        """Decode a short chain at `start` in sequence 0. Return a view [m or 1, V] of llama.cpp's buffer.

        This is the common case (a step or a verification) without bookkeeping that costs a tenth of a small step.
        """
        count = len(tokens)
        if count == 1:
            self._token[0], self._position[0] = tokens[0], start
        else:
            self._token[:count] = tokens
            self._position[:count] = self._ascending[start : start + count]
            self._output[: count - 1] = not last_only
        self._output[count - 1] = 1
        self._run(count, start)
        row_count = 1 if last_only else count
        buffer = self._library.llama_get_logits(self._context)
        address = ctypes.addressof(buffer.contents)
        if address != self._view_address or row_count > len(self._view):
            # llama.cpp rarely moves or grows its buffer. Making a view takes longer than the rest of this function.
            rows = np.ctypeslib.as_array(buffer, (row_count, self._file.head_rows))
            self._view = rows[:, : self._file.vocabulary_size]
            self._view_address = address
        return self._view[:row_count]

    def decode_chain(self, ids: NDArray[np.int64], mask: NDArray[np.int8], start: int) -> NDArray[np.float32]:
        """Decode ids [m] in order from `start` in sequence 0. Return a view [rows requested by mask [m], V]."""
        return self._decode(ids, mask, self._ascending[start : start + len(ids)])

    def decode_nodes(
        self, ids: NDArray[np.int64], mask: NDArray[np.int8], positions: NDArray[np.int32], through: list[list[int]]
    ) -> NDArray[np.float32]:
        """Decode ids [m] at `positions` [m], each into its sequences in `through`. Return a view as `decode_chain`."""
        for index, sequences in enumerate(through):
            self._sequences[index] = len(sequences)
            for place, sequence in enumerate(sequences):
                self._batch.seq_id[index][place] = sequence
        try:
            return self._decode(ids, mask, positions)
        finally:
            self._sequences[: len(ids)] = 1
            for index in range(len(ids)):
                self._batch.seq_id[index][0] = 0

    def _decode(
        self, ids: NDArray[np.int64], mask: NDArray[np.int8], positions: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        """Decode one chunk. Its sequences are set in the batch."""
        count, outputs = len(ids), int(mask.sum())
        self._token[:count], self._position[:count], self._output[:count] = ids, positions, mask
        self._run(count, int(positions[0]))
        if not outputs:
            return np.empty((0, self._file.vocabulary_size), dtype=np.float32)
        buffer = self._library.llama_get_logits(self._context)
        logits = np.ctypeslib.as_array(buffer, (outputs, self._file.head_rows))
        return logits[:, : self._file.vocabulary_size]

    def _run(self, count: int, start: int) -> None:
        """Decode the first `count` tokens of the batch, which begin at `start`. Raises DataError on failure."""
        self._batch.n_tokens = count
        self.generation += 1
        ERRORS.clear()
        code = self._library.llama_decode(self._context, self._batch)
        if code == NO_SLOT and self._defragment is not None:
            self.close_gaps()
            code = self._library.llama_decode(self._context, self._batch)
        if code != 0:
            what = f"{self.path}: llama.cpp could not decode {count} tokens at {start} (code {code}): {last_errors()}"
            raise DataError(what, "ask for a larger context, or free memory")

    def close_gaps(self) -> None:
        """Let the next call move the tokens of ik_llama.cpp's cache together.

        It looks for the last used cell in steps of 32 or 256 cells. If a cell at a step is empty, the tokens after it
        are lost (August 2026, llama_kv_cache_cell_max). llama.cpp does not need this.
        """
        if self._defragment is not None:
            self._defragment(self._context)

    def add_owner(self, source: int, sequence: int, begin: int, end: int) -> None:
        """Add `sequence` to the owners of the cells of `source` at positions `begin`..`end` − 1."""
        self._library.llama_memory_seq_cp(self._memory, source, sequence, begin, end)

    def remove(self, sequence: int, begin: int) -> None:
        """Remove `sequence` from its cells from position `begin` on. DataError if the cache cannot do that."""
        if not self.withdraw(sequence, begin):
            raise DataError(f"{self.path}: this model's cache cannot be rolled back", hint="use a transformer")

    def state(self) -> NDArray[np.uint8]:
        """Return a copy of the recurrent state of sequence 0."""
        llama = self._library
        flags = llama.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        copied = np.empty(llama.llama_state_seq_get_size_ext(self._context, 0, flags), dtype=np.uint8)
        llama.llama_state_seq_get_data_ext(self._context, _bytes(copied), copied.size, 0, flags)
        return copied

    def restore(self, state: NDArray[np.uint8], length: int) -> None:
        """Restore the state, with the keys and values of the first `length` tokens."""
        llama = self._library
        flags = llama.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        if not llama.llama_state_seq_set_data_ext(self._context, _bytes(state), state.size, 0, flags):
            raise DataError(f"{self.path}: llama.cpp does not restore its own state: {last_errors()}")
        self.remove(0, length)

    def withdraw(self, sequence: int, begin: int) -> bool:
        """Do what `remove` does, but return False instead of raising, so that an earlier failure is reported."""
        return bool(self._library.llama_memory_seq_rm(self._memory, sequence, begin, -1))

    def close(self) -> None:
        """Free the batch and the cache. A second call does nothing."""
        self.generation += 1
        if self._batch is not None:
            # The views point into the batch.
            del self._token, self._position, self._output, self._sequences
            self._library.llama_batch_free(self._batch)
            self._batch = None
        if self._context:
            self._library.llama_free(self._context)
        self._context = None


def _bytes(array: NDArray[np.uint8]) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


class GgufLogits:
    """Logits [n, V] as a view of llama.cpp's buffer. See `distill.engines.model.Logits`."""

    def __init__(self, context: GgufContext, rows: NDArray[np.float32], lengths: Sequence[int]) -> None:
        self._context = context
        self._generation = context.generation
        self._array = rows
        self._lengths = lengths  # lengths of the texts before the rows' next tokens

    def __len__(self) -> int:
        return len(self._array)

    @property
    def place(self) -> Place:
        """The file and the position of each row, for messages."""
        return place_of(str(self._context.path), self._lengths)

    def _rows(self) -> NDArray[np.float32]:
        if self._generation != self._context.generation:
            raise ValueError("these logits were overwritten: read them before the next extend or close")
        return self._array

    def argmax(self, empty: int | None = None) -> list[int]:
        """Return the best id of each row (the smallest id on ties), and `empty` for a row that is −∞ everywhere."""
        rows = self._array
        if len(rows) == 1 and self._generation == self._context.generation:
            # Few calls are used here, because between the steps of a large model their code leaves the cache.
            best = int(rows.argmax())
            if -math.inf < rows.item(best) < math.inf:
                return [best]
        rows = self._rows()
        ids: list[int] = rows.argmax(axis=1).tolist()
        return finite_argmax(ids, [rows.item(row, token) for row, token in enumerate(ids)], self.place, empty)

    def full(self) -> torch.Tensor:
        """Return all logits [n, V] as an fp32 copy."""
        return torch.from_numpy(self._rows().copy())


# ── A pending tree in the sequences of one llama.cpp cache ──
# Sequence 0 is the committed row. The others are branches. A branch owns the cells of its path from the first token to
# its leaf, and every node belongs to all branches through it.


class Branches:
    """The nodes of the pending tree after a committed row, and up to `max_branches` sequences that contain them.

    `length` is always the number of committed tokens.
    """

    def __init__(self, context: GgufContext, max_branches: int) -> None:
        self._context, self._max_branches = context, max_branches
        self.tree = PendingTree()
        self._through: list[list[int]] = []  # by node, the sequences through it
        self._shared = [0] * (
            max_branches + 1
        )  # by sequence except 0, the number of committed tokens that it also owns

    def __len__(self) -> int:
        return len(self.tree)

    @contextmanager
    def growing(self, tree: PendingTree, length: int) -> Iterator[list[list[int]]]:
        """Within the context, decode `tree`'s new nodes, each into the sequences through it. Then `tree` is pending.

        If the block fails, everything is as before. Raises ValueError for more than `max_branches` branches.
        """
        through, sources = self._grown(tree, length)
        try:
            for sequence, (source, end) in sources.items():
                # From an earlier tree, it may already own the beginning of the committed row.
                self._context.add_owner(source, sequence, self._shared[sequence], end)
            yield through[len(self.tree) :]
        except BaseException:
            for sequence in {sequence for sequences in through for sequence in sequences}:
                pending = zip(self.tree.depths, self._through, strict=True)
                decoded = max((depth for depth, sequences in pending if sequence in sequences), default=0)
                end = self._shared[sequence] if sequence in sources else length + decoded
                self._context.withdraw(sequence, end)
            raise
        self._shared = [length if sequence in sources else shared for sequence, shared in enumerate(self._shared)]
        self.tree, self._through = tree, through

    def _grown(self, tree: PendingTree, length: int) -> tuple[list[list[int]], dict[int, tuple[int, int]]]:
        """Return the sequences through each node of `tree`, and what each new sequence copies.

        A first child continues its parent's sequence. Any other child starts a new one. A copy is (source, end): the
        source's cells before position `end`, with the committed row and the decoded part of the path.
        """
        old, through = len(self.tree), [list(sequences) for sequences in self._through]
        used = {sequence for sequences in through for sequence in sequences}
        free = [sequence for sequence in range(1, self._max_branches + 1) if sequence not in used]
        inner = {parent for parent in tree.parents[:old] if parent != ROOT}
        sources: dict[int, tuple[int, int]] = {}
        for node in range(old, len(tree)):
            parent = tree.parents[node]
            if parent != ROOT and parent not in inner:
                inner.add(parent)
                through.append([through[parent][0]])
                continue
            if not free:
                raise ValueError(f"more than {self._max_branches} branches: open the model with a larger max_leaves")
            sequence, source = free.pop(0), (0, length)
            while parent != ROOT:
                if parent < old and source[0] == 0:
                    source = (through[parent][0], length + tree.depths[parent])
                through[parent].append(sequence)
                parent = tree.parents[parent]
            through.append([sequence])
            sources[sequence] = source
        return through, sources

    def commit(self, paths: Sequence[Sequence[int]], length: int) -> int:
        """Give sequence 0 the only path in `paths`, drop the tree, and return its length. ValueError for no path."""
        path = self.tree.only_path(paths)
        if path:
            self._context.add_owner(self._through[path[-1]][0], 0, length, length + len(path))
        self.drop(length)
        if path != list(range(len(path))):  # Nodes before or between the kept ones leave gaps.
            self._context.close_gaps()
        return len(path)

    def drop(self, length: int) -> None:
        """Cut every branch back to the committed tokens, which it keeps owning, so that the next tree copies less."""
        for sequence in {sequence for sequences in self._through for sequence in sequences}:
            self._context.remove(sequence, length)
        self.tree, self._through = PendingTree(), []

    def shorten(self, length: int) -> None:
        """Remove committed tokens beyond `length`, which were rolled back, from every branch."""
        for sequence, shared in enumerate(self._shared):
            if shared > length:
                self._context.remove(sequence, length)
                self._shared[sequence] = length
