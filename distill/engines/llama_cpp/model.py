"""GGUF models: one row of tokens, and trees of them, decoded by llama.cpp.

llama.cpp aborts the process on arguments out of range, so ids, lengths and indices are checked here first.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from distill.engines.llama_cpp.batches import checked_batches
from distill.engines.llama_cpp.context import FEW, Branches, GgufContext, GgufLogits
from distill.engines.model import NO_TREES, Ints, Retold, check_call, check_chain, check_lengths
from distill.gguf.head import open_head, token_key
from distill.gguf.library import GgufFile
from distill.progress import note
from distill.recipe import GgufOptions
from distill.recipe.measuring import ON_CPU

MOST_LEAVES = 255  # llama.cpp has at most 256 sequences, and the committed row is one of them


class GgufModel:
    """A GGUF file with a cache of one row, and trees of up to `max_leaves` branches.

    `context` is the capacity in tokens, `batch` the most tokens decoded at once; `options` are llama.cpp's (by default
    no GPU, an f16 cache, flash attention off), `threads` those where the options name none. Logits depend on how a text
    was divided into calls by rounding alone: llama.cpp computes a lone token, and a lone output, with other kernels.

    A recurrent model takes no trees. It returns to copies of its state (`Retold`); where llama.cpp
    takes back the last tokens of a call by itself, which depends on the architecture, nothing is computed again.

    Raises DataError when llama-cpp-python is missing or the file is missing, damaged or of an unsupported kind,
    RecipeError for options that this build or this file does not allow.
    """

    rows = 1

    def __init__(
        self,
        path: Path | str,
        *,
        context: int = 1024,
        batch: int = 512,
        threads: int | None = None,
        max_leaves: int = 0,
        options: GgufOptions = ON_CPU,
    ) -> None:
        self.path = Path(path)
        if context < 2 or batch < 2:
            raise ValueError(f"context and batch must be at least 2, got {context} and {batch}")
        if threads is not None and threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}")
        if not 0 <= max_leaves <= MOST_LEAVES or (max_leaves and max_leaves >= min(batch, context)):
            raise ValueError(f"max_leaves must lie in 0..{MOST_LEAVES} and below batch and context, got {max_leaves}")
        self.capacity = context
        self._length = 0
        self.file = GgufFile(self.path, options=options)
        self._text = Retold() if self.file.recurrent else None
        max_leaves = 0 if self.file.recurrent else max_leaves
        self._undoable = 0  # of the last tokens, by llama.cpp itself; −1 where it has just taken some back
        self.vocabulary_size = self.file.vocabulary_size
        self.build = self.file.build  # of the library that computes
        try:
            options = options.model_copy(update={"threads": options.threads or threads})
            self.batches = checked_batches(self.file, options)
            if self.batches is not None:
                if self.batches.largest is not None or (max_leaves and not self.batches.takes_trees):
                    note(f"{self.path.name}: {self.batches.describe()}")
                options = options.model_copy(update={"ubatch_size": self.batches.largest or options.ubatch_size})
                max_leaves = max_leaves if self.batches.takes_trees else 0
            self._context = GgufContext(self.file, context, batch, max_leaves + 1, options)
        except BaseException:
            self.file.close()
            raise
        # Whether rejected tokens leave others that are computed again.
        self.resends = self._text is not None and not self._context.undoable
        self.max_leaves = max_leaves
        self._branches = Branches(self._context, max_leaves)

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of the one row."""
        return [self._length if self._text is None else len(self._text.tokens)]

    @property
    def resent(self) -> int:
        """Committed tokens of a recurrent model that the next call computes again."""
        return 0 if self._text is None else len(self._text.tokens) - self._length

    def extend(
        self, tokens: Ints, counts: Ints | None = None, parents: Ints | None = None, want: Ints | None = None
    ) -> GgufLogits:
        """Commit `tokens`, or add them to the tree below `parents`; logits [n, V] for those in `want` (None: all).

        Raises ValueError, with nothing changed, for no tokens, ids outside [0, V), too many tokens for the capacity,
        indices outside the tokens, a chain below a pending tree, more than `max_leaves` branches, or more nodes than
        the cache has cells or a batch has tokens; DataError when llama.cpp fails.
        """
        self.file.require_open()
        if self._text is not None:
            return self._extend_text(self._text, list(tokens), counts, parents, want)
        return self._extend(tokens, counts, parents, want)

    def _extend(self, tokens: Ints, counts: Ints | None, parents: Ints | None, want: Ints | None) -> GgufLogits:
        if parents is not None:
            return self._extend_tree(tokens, counts, parents, want)
        start, context = self._length, self._context
        short = counts is None and self._is_short_step(tokens, want)
        if not short:
            check_chain(tokens, counts, want, [start], self.capacity, self.vocabulary_size, self._branches)
        try:
            rows = context.decode_few(tokens, start, want is not None) if short else self._decode_all(tokens, want)
        except BaseException:
            context.withdraw(0, start)
            raise
        self._length += len(tokens)
        lengths = range(start + 1, self._length + 1)
        return GgufLogits(context, rows, lengths if want is None else [lengths[index] for index in want])

    def _extend_text(
        self, text: Retold, tokens: list[int], counts: Ints | None, parents: Ints | None, want: Ints | None
    ) -> GgufLogits:
        """`extend` of a recurrent model."""
        if parents is not None:
            raise ValueError(NO_TREES)
        check_chain(tokens, counts, want, self.lengths, self.capacity, self.vocabulary_size)
        if text.due(self._length, len(tokens)) and self._undoable >= 0:
            text.copied(self._length, self._context.state())
        again = text.tokens[self._length :]
        if again:
            want = [len(again) + index for index in (range(len(tokens)) if want is None else want)]
        try:
            logits = self._extend([*again, *tokens], None, None, want)
        except BaseException:
            self._undoable = 0
            self._return(text, self._length)
            raise
        text.tokens += tokens
        last = (len(again) + len(tokens) - 1) % self._context.batch_size  # a prompt is decoded in chunks
        self._undoable = min(self._context.undoable, last)
        return logits

    def _return(self, text: Retold, length: int) -> None:
        """Go back to `length` tokens, or to the latest copy before them."""
        size, state = text.latest(length)
        if 0 < self._length - length <= self._undoable and length and self._context.withdraw(0, length):
            self._length, self._undoable = length, -1
            return
        self._length, self._undoable = size, 0
        if state is None:
            self._context.remove(0, 0)
        else:
            self._context.restore(state, size)

    def _is_short_step(self, tokens: Ints, want: Ints | None) -> bool:
        """Whether a chain is a valid step or verification, which can skip the bookkeeping of prompts and trees."""
        return (
            (want is None or (len(want) == 1 and want[0] == len(tokens) - 1))
            and not len(self._branches)
            and 0 < len(tokens) <= min(FEW, self._context.batch_size, self.capacity - self._length)
            and min(tokens) >= 0
            and max(tokens) < self.vocabulary_size
        )

    def _extend_tree(self, tokens: Ints, counts: Ints | None, parents: Ints, want: Ints | None) -> GgufLogits:
        if not self.max_leaves:
            raise ValueError("this model was opened without room for trees: give it max_leaves")
        check_call(tokens, counts, parents, want, self.vocabulary_size)
        old, count = len(self._branches), len(tokens)
        tree = self._branches.tree.grown(parents, self._length, self.capacity)
        room = min(self._context.cells - self._length - old, self._context.batch_size)
        if count > room:
            raise ValueError(f"{count} more nodes do not fit: there is room for {room} in the cache and the batch")
        lengths = [self._length + depth for depth in tree.depths[old:]]
        mask, order = _outputs(count, want)
        with self._branches.growing(tree, self._length) as through:
            ids, positions = np.asarray(tokens, dtype=np.int64), np.asarray(lengths, dtype=np.int32) - 1
            rows = self._context.decode_nodes(ids, mask, positions, through)
        rows = rows if order is None else rows[order]
        return GgufLogits(self._context, rows, lengths if want is None else [lengths[index] for index in want])

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Commit one path of the pending tree and drop its other nodes; ValueError for no path from the root."""
        self.file.require_open()
        self._length += self._branches.commit(paths, self._length)

    def _decode_all(self, tokens: Sequence[int], want: Sequence[int] | None) -> NDArray[np.float32]:
        """Decode in chunks; logits [n, V], a view when one chunk holds them all in order."""
        ids, (mask, order) = np.asarray(tokens, dtype=np.int64), _outputs(len(tokens), want)
        parts: list[NDArray[np.float32]] = []
        bounds = self._chunks(len(ids))
        for begin, end in bounds:
            rows = self._context.decode_chain(ids[begin:end], mask[begin:end], self._length + begin)
            # The next chunk overwrites the buffer.
            parts.append(rows if len(bounds) == 1 else rows.copy())
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return rows if order is None else rows[order]

    def _chunks(self, count: int) -> list[tuple[int, int]]:
        """Bounds of chunks of at most the batch size, with no lone token at the end where that can be avoided."""
        size = self._context.batch_size
        bounds = [*range(0, count, size), count]
        if len(bounds) > 2 and bounds[-1] - bounds[-2] == 1 and size > 2:
            bounds[-2] -= 1
        return list(itertools.pairwise(bounds))

    def rollback(self, lengths: Sequence[int]) -> None:
        """Forget a pending tree and the tokens beyond `lengths` (one number); ValueError outside 0..the committed."""
        self.file.require_open()
        (length,) = check_lengths(lengths, self.lengths)
        if self._text is not None:
            del self._text.tokens[length:]
            if length < self._length or length == 0:
                self._return(self._text, length)
            return
        if len(self._branches):
            self._branches.drop(self._length)
        # A signal may have come between llama.cpp's step and our count of it: a new text begins in an empty cache.
        if length < self._length or length == 0:
            self._context.remove(0, length)
            self._length = length
            self._branches.shorten(length)

    def close(self) -> None:
        """Free the model; safe to call twice. Logits returned before become unreadable."""
        self._context.close()
        self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _outputs(count: int, want: Sequence[int] | None) -> tuple[NDArray[np.int8], NDArray[np.intp] | None]:
    """Which of `count` tokens need logits [count], and the row of each wanted one among them; None for all in order."""
    wanted = np.arange(count) if want is None else np.asarray(want, dtype=np.int64)
    needed, order = np.unique(wanted, return_inverse=True)
    mask = np.zeros(count, dtype=np.int8)
    mask[needed] = 1
    return mask, None if np.array_equal(wanted, needed) else order


def token_bytes_of(model: GgufModel) -> list[bytes]:
    """The bytes [V] of each token, empty for control tokens and unused ones."""
    llama, vocabulary = model.file.library, model.file.vocabulary
    silent = llama.LLAMA_TOKEN_ATTR_CONTROL | llama.LLAMA_TOKEN_ATTR_UNUSED | llama.LLAMA_TOKEN_ATTR_UNKNOWN
    return [
        b"" if llama.llama_vocab_get_attr(vocabulary, token) & silent else model.file.detokenize([token])
        for token in range(model.vocabulary_size)
    ]


def ends_of(model: GgufModel) -> list[int]:
    """The ids that end a text; without the ordinary token, often a comma, that llama.cpp takes for eos where the file
    names none."""
    llama, vocabulary = model.file.library, model.file.vocabulary
    named = token_key("eos") in open_head(model.path).values
    eos = -1 if named else llama.llama_vocab_eos(vocabulary)
    ends = [token for token in range(model.vocabulary_size) if llama.llama_vocab_is_eog(vocabulary, token)]
    return [token for token in ends if token != eos or llama.llama_vocab_is_control(vocabulary, token)]
