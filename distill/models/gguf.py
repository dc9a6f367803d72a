"""GGUF models through the low-level API of llama-cpp-python.

llama.cpp aborts the process on arguments out of range, so ids, lengths and indices are checked here first.

A tree lives in several sequences of one cache: sequence 0 is the committed row, the others are branches. A branch owns
the cells of its path from the first token to its leaf, and every node belongs to all branches through it.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import os
from collections import deque
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from distill.errors import DataError
from distill.models.base import ROOT, PendingTree, check_call

LOG_LEVEL_ERROR, LOG_LEVEL_CONTINUED = 4, 5
MOST_LEAVES = 255  # llama.cpp knows 256 sequences, and the committed row takes one
FEW = 64  # tokens of a step or verification; longer calls are prompts, where overhead is nothing
ERRORS: deque[str] = deque(maxlen=4)


@cache
def library() -> Any:
    """The llama_cpp module, quiet and initialised; DataError when it is not installed.

    Cached for ever because the log callback must outlive every call into the library.
    """
    # Without this a failed assertion inside ggml starts a debugger before it aborts.
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    try:
        module: Any = importlib.import_module("llama_cpp")
    except ImportError as error:
        raise DataError(f"GGUF needs llama-cpp-python ({error})", hint="pip install 'distill[llama]'") from None

    level_before = [0]

    def remember(level: int, text: bytes, _user_data: Any) -> None:
        if level == LOG_LEVEL_CONTINUED:
            level = level_before[0]
        level_before[0] = level
        line = text.decode("utf-8", "replace").strip()
        if level == LOG_LEVEL_ERROR and line:
            ERRORS.append(line)

    module.distill_log_callback = module.llama_log_callback(remember)
    module.llama_log_set(module.distill_log_callback, ctypes.c_void_p(0))
    module.llama_backend_init()
    return module


def usable_cores() -> int:
    """Cores this process may run on; more threads than that make llama.cpp many times slower."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class GgufLogits:
    """Logits [n, V] as a view of llama.cpp's own buffer; see `distill.models.base.Logits`."""

    def __init__(self, model: GgufModel, rows: NDArray[np.float32]) -> None:
        self._model = model
        self._generation = model.generation
        self._array = rows

    def __len__(self) -> int:
        return len(self._array)

    def _rows(self) -> NDArray[np.float32]:
        if self._generation != self._model.generation:
            raise ValueError("these logits were overwritten: read them before the next extend or close")
        return self._array

    def argmax(self) -> list[int]:
        """The best id of each row, the smallest id on ties."""
        ids: list[int] = self._rows().argmax(axis=1).tolist()
        return ids

    def top(self, k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The k best ids [n, k] and their logits [n, k], best first, smaller ids first on ties; 1 <= k <= V."""
        rows = self._rows()
        size = rows.shape[1]
        if not 1 <= k <= size:
            raise ValueError(f"k must lie in 1..{size}, got {k}")
        if k == 1:
            ids = rows.argmax(axis=1, keepdims=True)
            return ids, np.take_along_axis(rows, ids, axis=1)
        ids = np.empty((len(rows), k), dtype=np.int64)
        for index, row in enumerate(rows):
            best = np.argpartition(row, size - k)[size - k :]
            least = row[best].min()
            # A tie at the k-th place leaves argpartition a choice; take every candidate, then the smaller ids.
            candidates = np.flatnonzero(row >= least)
            ids[index] = candidates[np.argsort(-row[candidates], kind="stable")[:k]]
        return ids, np.take_along_axis(rows, ids, axis=1)

    def gather(self, ids: NDArray[Any] | Sequence[int] | Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """The logits of `ids` [n] or [n, k], row by row, in the same shape; ValueError for ids outside [0, V)."""
        rows = self._rows()
        wanted = np.asarray(ids, dtype=np.int64)
        if wanted.ndim not in (1, 2) or len(wanted) != len(rows):
            raise ValueError(f"ids must be [{len(rows)}] or [{len(rows)}, k], got shape {list(wanted.shape)}")
        if wanted.size and (wanted.min() < 0 or wanted.max() >= rows.shape[1]):
            raise ValueError(f"ids must lie in [0, {rows.shape[1]})")
        if wanted.ndim == 1:
            return rows[np.arange(len(rows)), wanted]
        return np.take_along_axis(rows, wanted, axis=1)

    def full(self) -> torch.Tensor:
        """All logits [n, V] as an fp32 copy."""
        return torch.from_numpy(self._rows().copy())


class GgufModel:
    """A GGUF file with a cache of one row, and trees of up to `max_leaves` branches; flash attention off, f16 cache.

    `context` is the capacity in tokens, `batch` the most tokens decoded at once. llama.cpp computes a lone token, and a
    lone output, with other kernels than two or more; with `pad_single` neither ever happens, so that logits do not
    depend, bit for bit, on how a text was cut into calls (for f32, f16, bf16, q8_0, q4_0 files on a CPU). After a tree
    that holds only up to rounding: a kept path may lie in the cache in another order.

    Raises DataError when llama-cpp-python is missing or the file is missing, damaged or of an unsupported kind.
    """

    rows = 1

    def __init__(
        self,
        path: Path | str,
        *,
        context: int = 1024,
        batch: int = 512,
        threads: int | None = None,
        pad_single: bool = False,
        max_leaves: int = 0,
    ) -> None:
        self._batch: Any = None
        self._context: Any = None
        self._model: Any = None
        self.generation = 0  # counts what invalidates logits handed out earlier
        self.path = Path(path)
        if context < 2 or batch < 2:
            raise ValueError(f"context and batch must be at least 2, got {context} and {batch}")
        if threads is not None and threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}")
        if not 0 <= max_leaves <= MOST_LEAVES or (max_leaves and max_leaves >= min(batch, context)):
            raise ValueError(f"max_leaves must lie in 0..{MOST_LEAVES} and below batch and context, got {max_leaves}")
        self.capacity = context
        self.pad_single = pad_single
        self.max_leaves = max_leaves
        self._length = 0
        self._tree = PendingTree()
        self._branches: list[list[int]] = []  # of each node of the tree: the sequences through it
        self._shared = [0] * (max_leaves + 1)  # of each sequence but 0: committed tokens that it owns too
        self._library = library()
        try:
            self._open(context, batch, threads or usable_cores())
        except BaseException:
            self.close()
            raise

    def _open(self, context: int, batch: int, threads: int) -> None:
        llama = self._library
        self._check_file()
        ERRORS.clear()
        parameters = llama.llama_model_default_params()
        parameters.n_gpu_layers = 0
        parameters.check_tensors = True  # damaged weights load silently otherwise
        self._model = llama.llama_model_load_from_file(os.fsencode(self.path), parameters)
        if not self._model:
            raise DataError(
                f"{self.path} cannot be loaded: {self._last_errors()}", hint="export or copy the file again"
            )
        if llama.llama_model_is_recurrent(self._model) or llama.llama_model_is_hybrid(self._model):
            raise DataError(f"{self.path} is a recurrent model, which cannot be rolled back", hint="use a transformer")
        self._vocabulary = llama.llama_model_get_vocab(self._model)
        self.head_rows = int(llama.llama_vocab_n_tokens(self._vocabulary))
        self.vocabulary_size = self.head_rows - self._padding_rows()
        settings = llama.llama_context_default_params()
        # The dummy token of pad_single needs a cell of its own even when the row is full.
        settings.n_ctx = context + int(self.pad_single) + (FEW if self.max_leaves else 0)
        settings.n_batch = settings.n_ubatch = min(batch, context)
        settings.n_seq_max = self.max_leaves + 1
        settings.kv_unified = self.max_leaves > 0
        settings.n_threads = settings.n_threads_batch = threads
        settings.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
        settings.type_k = settings.type_v = llama.GGML_TYPE_F16
        self._context = llama.llama_init_from_model(self._model, settings)
        if not self._context:
            raise DataError(
                f"{self.path}: no room for a context of {context} tokens: {self._last_errors()}",
                hint="ask for a shorter context or free memory",
            )
        self._memory = llama.llama_get_memory(self._context)
        self._batch_size = min(int(llama.llama_n_batch(self._context)), int(llama.llama_n_ubatch(self._context)))
        self._cells = int(llama.llama_n_ctx(self._context))
        self._batch = llama.llama_batch_init(self._batch_size, 0, self.max_leaves + 1)
        view, size = np.ctypeslib.as_array, (self._batch_size,)
        self._token, self._position = view(self._batch.token, size), view(self._batch.pos, size)
        self._output = view(self._batch.logits, size)
        self._sequences = view(self._batch.n_seq_id, size)  # how many each token belongs to
        self._sequences[:] = 1
        self._ascending = np.arange(context, dtype=np.int32)
        self._view = np.empty((0, self.head_rows), dtype=np.float32)
        self._view_address = 0
        for index in range(self._batch_size):
            self._batch.seq_id[index][0] = 0

    def _padding_rows(self) -> int:
        """Rows at the end that stand for no token: converters name them `[PAD<id>]` and mark them unused."""
        llama, count = self._library, 0
        for index in range(self.head_rows - 1, -1, -1):
            unused = llama.llama_vocab_get_attr(self._vocabulary, index) & llama.LLAMA_TOKEN_ATTR_UNUSED
            if not unused or llama.llama_vocab_get_text(self._vocabulary, index) != b"[PAD%d]" % index:
                break
            count += 1
        return count

    def _check_file(self) -> None:
        try:
            with self.path.open("rb") as file:
                magic = file.read(4)
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror}", hint="give a GGUF file") from None
        if magic != b"GGUF":
            raise DataError(f"{self.path} is not a GGUF file", hint="make one with distill export-gguf")

    def _last_errors(self) -> str:
        return "; ".join(ERRORS) or "llama.cpp gave no reason"

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of the one row."""
        return [self._length]

    @property
    def training_context(self) -> int:
        """The context length in tokens that the file's metadata gives; nothing stops longer use."""
        self._require_open()
        return int(self._library.llama_model_n_ctx_train(self._model))

    def extend(
        self,
        tokens: Sequence[int],
        counts: Sequence[int] | None = None,
        parents: Sequence[int] | None = None,
        want: Sequence[int] | None = None,
    ) -> GgufLogits:
        """Commit `tokens`, or hang them into the tree below `parents`; logits [n, V] for those in `want` (None: all).

        Raises ValueError, with nothing changed, for no tokens, ids outside [0, V), too many tokens for the capacity,
        indices outside the tokens, a chain below a pending tree, more than `max_leaves` branches, or more nodes than
        the cache has cells or a batch has tokens; DataError when llama.cpp fails.
        """
        self._require_open()
        last_only = want is not None and len(want) == 1 and want[0] == len(tokens) - 1
        if (
            (want is None or last_only)
            and parents is None
            and counts is None
            and not self.pad_single
            and not self._branches
            and 0 < len(tokens) <= min(FEW, self._batch_size, self.capacity - self._length)
            and min(tokens) >= 0
            and max(tokens) < self.vocabulary_size
        ):
            return GgufLogits(self, self._decode_few(tokens, last_only))
        count = len(tokens)
        if counts is not None and list(counts) != [count]:
            raise ValueError(f"counts must be [{count}] for one row of {count} tokens, got {list(counts)}")
        if parents is not None:
            return self._extend_tree(tokens, parents, want)
        if self._branches:
            raise ValueError("a tree is pending: keep a path of it or roll back first")
        if count == 0:
            raise ValueError("extend needs at least one token")
        if self._length + count > self.capacity:
            raise ValueError(f"{self._length} + {count} tokens exceed the context of {self.capacity}")
        ids = np.asarray(tokens, dtype=np.int64)
        if ids.min() < 0 or ids.max() >= self.vocabulary_size:
            raise ValueError(f"token ids must lie in [0, {self.vocabulary_size}), got {ids.min()}..{ids.max()}")
        wanted = None if want is None else np.asarray(want, dtype=np.int64)
        if wanted is not None and wanted.size and (wanted.min() < 0 or wanted.max() >= count):
            raise ValueError(f"want must index the {count} tokens, got {wanted.min()}..{wanted.max()}")
        self.generation += 1
        start = self._length
        try:
            return GgufLogits(self, self._decode_all(ids, wanted))
        except BaseException:
            self._library.llama_memory_seq_rm(self._memory, 0, start, -1)
            self._length = start
            raise

    def _extend_tree(self, tokens: Sequence[int], parents: Sequence[int], want: Sequence[int] | None) -> GgufLogits:
        if not self.max_leaves:
            raise ValueError("this model was opened without room for trees: give it max_leaves")
        check_call(tokens, parents, want, self.vocabulary_size)
        old, count, tree = len(self._tree), len(tokens), self._tree.grown(parents)
        if self._length + max(tree.depths) > self.capacity:
            raise ValueError(f"{self._length} + {max(tree.depths)} tokens exceed the context of {self.capacity}")
        room = min(self._cells - self._length - old, self._batch_size) - int(self.pad_single and count == 1)
        if count > room:
            raise ValueError(f"{count} more nodes do not fit: there is room for {room} in the cache and the batch")
        branches, sources = self._grow(tree)
        self.generation += 1
        try:
            for sequence, (source, end) in sources.items():
                # It may own a beginning of the committed row already, from an earlier tree.
                self._library.llama_memory_seq_cp(self._memory, source, sequence, self._shared[sequence], end)
            rows = self._decode_nodes(tokens, tree.depths[old:], branches[old:], want)
        except BaseException:
            self._withdraw(branches, sources)
            raise
        for sequence in sources:
            self._shared[sequence] = self._length
        self._tree, self._branches = tree, branches
        return GgufLogits(self, rows)

    def _grow(self, tree: PendingTree) -> tuple[list[list[int]], dict[int, tuple[int, int]]]:
        """Sequences through each node of the grown `tree`, and of each new sequence what it begins as a copy of.

        A first child goes on in its parent's sequence, any other child opens one. The copy is (source, end): what the
        source holds before position `end`, which is the committed row and the decoded part of the path.
        """
        old, branches = len(self._tree), [list(through) for through in self._branches]
        used = {sequence for through in branches for sequence in through}
        free = [sequence for sequence in range(1, self.max_leaves + 1) if sequence not in used]
        inner = {parent for parent in tree.parents[:old] if parent != ROOT}
        sources: dict[int, tuple[int, int]] = {}
        for node in range(old, len(tree)):
            parent = tree.parents[node]
            if parent != ROOT and parent not in inner:
                inner.add(parent)
                branches.append([branches[parent][0]])
                continue
            if not free:
                raise ValueError(f"more than {self.max_leaves} branches: open the model with a larger max_leaves")
            sequence, source = free.pop(0), (0, self._length)
            while parent != ROOT:
                if parent < old and source[0] == 0:
                    source = (branches[parent][0], self._length + tree.depths[parent])
                branches[parent].append(sequence)
                parent = tree.parents[parent]
            branches.append([sequence])
            sources[sequence] = source
        return branches, sources

    def _decode_nodes(
        self, tokens: Sequence[int], depths: Sequence[int], branches: list[list[int]], want: Sequence[int] | None
    ) -> NDArray[np.float32]:
        """Decode nodes of these depths in these sequences; logits [n, V] in the order of `want`."""
        ids = np.asarray(tokens, dtype=np.int64)
        wanted = np.arange(len(ids)) if want is None else np.asarray(want, dtype=np.int64)
        needed, order = np.unique(wanted, return_inverse=True)
        mask = np.zeros(len(ids), dtype=np.int8)
        mask[needed] = 1
        for index, through in enumerate(branches):
            self._sequences[index] = len(through)
            for place, sequence in enumerate(through):
                self._batch.seq_id[index][place] = sequence
        if self.pad_single and len(ids) == 1:
            self._batch.seq_id[1][0] = branches[0][0]
        positions = np.asarray(depths, dtype=np.int32) + (self._length - 1)
        try:
            rows = self._decode(ids, mask, positions, branches[0][0])
        finally:
            self._sequences[: len(ids)] = 1
            for index in range(min(len(ids) + 1, self._batch_size)):
                self._batch.seq_id[index][0] = 0
        return rows if np.array_equal(wanted, needed) else rows[order]

    def _withdraw(self, branches: list[list[int]], sources: dict[int, tuple[int, int]]) -> None:
        """Take what a failed call may have put into these sequences out of the cache again."""
        for sequence in {sequence for through in branches for sequence in through}:
            if sequence in sources:
                end = self._shared[sequence]
            else:
                pending = zip(self._tree.depths, self._branches, strict=True)
                end = self._length + max(depth for depth, through in pending if sequence in through)
            self._library.llama_memory_seq_rm(self._memory, sequence, end, -1)

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Commit one path of the pending tree and drop its other nodes; ValueError for no path from the root."""
        self._require_open()
        path = self._tree.only_path(paths)
        if path:
            end = self._length + len(path)
            self._library.llama_memory_seq_cp(self._memory, self._branches[path[-1]][0], 0, self._length, end)
        self._drop_tree()
        self._length += len(path)

    def _drop_tree(self) -> None:
        """Take every branch back to the committed tokens, which it goes on owning: the next tree copies less."""
        for sequence in {sequence for through in self._branches for sequence in through}:
            self._remove(self._length, sequence)
        self._tree, self._branches = PendingTree(), []

    def _decode_few(self, tokens: Sequence[int], last_only: bool) -> NDArray[np.float32]:
        """The common case, a step or a verification, without the bookkeeping that costs a tenth of a small step."""
        count = len(tokens)
        self.generation += 1
        self._token[:count] = tokens
        self._position[:count] = self._ascending[self._length : self._length + count]
        self._output[:count] = not last_only
        self._output[count - 1] = 1
        self._batch.n_tokens = count
        ERRORS.clear()
        code = self._library.llama_decode(self._context, self._batch)
        if code != 0:
            self._library.llama_memory_seq_rm(self._memory, 0, self._length, -1)
            raise self._decode_failure(count, code)
        self._length += count
        asked = 1 if last_only else count
        buffer = self._library.llama_get_logits(self._context)
        address = ctypes.addressof(buffer.contents)
        if address != self._view_address or asked > len(self._view):
            # llama.cpp moves or grows its buffer rarely; making a view costs more than all else here.
            self._view = np.ctypeslib.as_array(buffer, (asked, self.head_rows))[:, : self.vocabulary_size]
            self._view_address = address
        return self._view[:asked]

    def _decode_failure(self, count: int, code: int) -> DataError:
        return DataError(
            f"{self.path}: llama.cpp could not decode {count} tokens at {self._length} (code {code}): "
            f"{self._last_errors()}",
            hint="ask for a larger context, or free memory",
        )

    def _decode_all(self, ids: NDArray[np.int64], wanted: NDArray[np.int64] | None) -> NDArray[np.float32]:
        """Decode in chunks; logits [n, V], a view when one chunk holds them all in order."""
        needed = None if wanted is None else np.unique(wanted)
        parts: list[NDArray[np.float32]] = []
        bounds = self._chunks(len(ids))
        for begin, end in bounds:
            if needed is None:
                mask = np.ones(end - begin, dtype=np.int8)
            else:
                mask = np.zeros(end - begin, dtype=np.int8)
                mask[needed[(needed >= begin) & (needed < end)] - begin] = 1
            rows = self._decode(ids[begin:end], mask)
            # The buffer is overwritten by the next chunk.
            parts.append(rows if len(bounds) == 1 else rows.copy())
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if wanted is None or needed is None or np.array_equal(wanted, needed):
            return rows
        return rows[np.searchsorted(needed, wanted)]

    def _chunks(self, count: int) -> list[tuple[int, int]]:
        """Bounds of chunks of at most the batch size, with no lone token at the end where that can be avoided."""
        bounds = [*range(0, count, self._batch_size), count]
        if len(bounds) > 2 and bounds[-1] - bounds[-2] == 1 and self._batch_size > 2:
            bounds[-2] -= 1
        return list(itertools.pairwise(bounds))

    def _decode(
        self,
        ids: NDArray[np.int64],
        mask: NDArray[np.int8],
        positions: NDArray[np.int32] | None = None,
        sequence: int = 0,
    ) -> NDArray[np.float32]:
        """Decode one chunk [m]; view [rows asked for by mask [m], V] of llama.cpp's buffer.

        Without positions [m] it follows the committed tokens and is committed. A dummy joins `sequence`.
        """
        count, outputs, first = len(ids), int(mask.sum()), 0
        dummy = self.pad_single and count == 1
        size = count + dummy
        start = self._length if positions is None else int(positions[0])
        self._token[:count] = ids
        self._position[:size] = np.arange(start, start + size)
        if positions is not None:
            self._position[:count] = positions
        self._output[:count] = mask
        asked = outputs
        if dummy:
            self._token[1] = ids[0]
            self._output[1] = 1
            asked += 1
        if self.pad_single and asked == 1:
            # A lone output takes the other kernel in the head: ask a neighbour too, and skip it.
            only = int(np.flatnonzero(self._output[:size])[0])
            extra = only - 1 if only else only + 1
            self._output[extra] = 1
            first, asked = int(extra < only), 2
            if dummy and not outputs:
                first = 0
        self._batch.n_tokens = size
        ERRORS.clear()
        code = self._library.llama_decode(self._context, self._batch)
        if code != 0:
            raise self._decode_failure(count, code)
        if dummy:
            self._remove(start + 1, sequence)
        if positions is None:
            self._length += count
        if not outputs:
            return np.empty((0, self.vocabulary_size), dtype=np.float32)
        buffer = self._library.llama_get_logits(self._context)
        logits = np.ctypeslib.as_array(buffer, (asked, self.head_rows))
        return logits[first : first + outputs, : self.vocabulary_size]

    def _remove(self, start: int, sequence: int = 0) -> None:
        if not self._library.llama_memory_seq_rm(self._memory, sequence, start, -1):
            raise DataError(f"{self.path}: this model's cache cannot be rolled back", hint="use a transformer")

    def rollback(self, lengths: Sequence[int]) -> None:
        """Forget a pending tree and the tokens beyond `lengths` (one number); ValueError outside 0..the committed."""
        self._require_open()
        if len(lengths) != 1 or not 0 <= lengths[0] <= self._length:
            raise ValueError(f"lengths must be [L] with 0 <= L <= {self._length}, got {list(lengths)}")
        if self._branches:
            self._drop_tree()
        if lengths[0] < self._length:
            self._remove(lengths[0])
            self._length = lengths[0]
            if self.max_leaves:
                self._forget_shared(lengths[0])

    def _forget_shared(self, length: int) -> None:
        for sequence, shared in enumerate(self._shared):
            if shared > length:
                self._remove(length, sequence)
                self._shared[sequence] = length

    def reset(self) -> None:
        """Forget all tokens."""
        self.rollback([0])

    def tokenize(self, text: str, parse_special: bool = False) -> list[int]:
        """The file's own ids for `text`, nothing added around; `parse_special` reads control tokens in the text."""
        self._require_open()
        data = text.encode("utf-8")
        size = len(data) + 8
        while True:
            ids = (ctypes.c_int32 * size)()
            count = self._library.llama_tokenize(self._vocabulary, data, len(data), ids, size, False, parse_special)
            if count >= 0:
                return list(ids[:count])
            size = -count

    def detokenize(self, ids: Sequence[int]) -> bytes:
        """The exact bytes of `ids`, special tokens as written; ValueError for ids outside the rows."""
        self._require_open()
        if len(ids) and (min(ids) < 0 or max(ids) >= self.head_rows):
            raise ValueError(f"token ids must lie in [0, {self.head_rows})")
        # Joined pieces, because llama_detokenize cleans up spaces for some tokenizers.
        return b"".join(self._piece(int(token)) for token in ids)

    def _piece(self, token: int) -> bytes:
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            count = self._library.llama_token_to_piece(self._vocabulary, token, buffer, size, 0, True)
            if count >= 0:
                return buffer.raw[:count]
            size = -count

    def library_and_vocabulary(self) -> tuple[Any, Any]:
        """llama_cpp and the vocabulary's handle, for what else llama.cpp does with tokens; ValueError once closed."""
        self._require_open()
        return self._library, self._vocabulary

    def _require_open(self) -> None:
        if self._batch is None:
            raise ValueError(f"{self.path} is closed")

    def close(self) -> None:
        """Free the model; safe to call twice. Logits handed out earlier become unreadable."""
        self.generation += 1
        if self._batch is not None:
            # The views point into the batch.
            del self._token, self._position, self._output, self._sequences
            self._library.llama_batch_free(self._batch)
            self._batch = None
        if self._context:
            self._library.llama_free(self._context)
        self._context = None
        if self._model:
            self._library.llama_model_free(self._model)
        self._model = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
