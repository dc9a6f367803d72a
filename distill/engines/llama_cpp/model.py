"""GGUF models: one row of tokens, and trees of tokens, decoded by llama.cpp.

llama.cpp aborts the process if arguments are out of range. Ids, lengths and indices are therefore checked here first.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from distill.divergences import forward_kl
from distill.engines.llama_cpp.context import FEW, Branches, GgufContext, GgufLogits
from distill.engines.model import (
    NO_TREES,
    ROOT,
    Ints,
    PendingTree,
    StateSnapshots,
    check_call,
    check_chain,
    check_lengths,
)
from distill.errors import DataError
from distill.files import cache_folder, digest, read_result, remember
from distill.gguf.importing import file_name
from distill.gguf.library import GgufFile
from distill.machine import machine
from distill.progress import duration, note
from distill.recipe import GgufOptions
from distill.recipe.measuring import MOST_KL, ON_CPU

# ── Whether a library computes several tokens at once as it computes single tokens. This is measured before use. ──
# A wrong kernel for batches gives text that looks right, and speculative decoding verifies in batches. An example is
# ik_llama.cpp 0.1.5 with q4_1 files: from 32 tokens on, the KL was 1.6 nats on one processor.

SIZES = (2, 8, 16, 31, 32, 64)
BRANCHED = (ROOT, 0, 0)  # parents of the nodes in the tested trees
ALONG = 32  # This many tokens of the text are tested as paths through trees.
TEXT = (
    "The bicycle was invented in the nineteenth century, when builders in several countries tried to make machines "
    "that a rider moves with the feet. The first ones were heavy, made of wood and hard to steer; later ones had "
    "pedals, chains and tyres of rubber, and soon millions of people used them every day to go to work or to see more."
)


@dataclass(frozen=True)
class BatchCheck:
    """Differences between a file's tokens in batches of each size and single tokens, for one library.

    `kl` is the mean KL in nats (single ‖ batch) by size. `trees` is the mean KL if the text is a path through trees, or
    None for a recurrent model.
    """

    library: str
    kl: dict[int, float]
    trees: float | None

    @property
    def largest(self) -> int | None:
        """The most tokens that may be computed at once. None means that every tested size is correct."""
        sound = list(takewhile(lambda size: self.kl[size] <= MOST_KL, sorted(self.kl)))
        return None if len(sound) == len(self.kl) else max(sound, default=1)

    @property
    def takes_trees(self) -> bool:
        """Whether trees give the logits of single tokens, up to MOST_KL."""
        return self.trees is not None and self.trees <= MOST_KL

    def describe(self) -> str:
        """Describe the faults and their consequences in a sentence."""
        faults, worst = [], max(self.kl, key=lambda size: self.kl[size])
        if self.largest is not None:
            faults.append(
                f"{worst} tokens at once differ from single tokens by a KL of {self.kl[worst]:.2g}, so at most "
                f"{self.largest} are computed at once"
            )
        if self.trees is not None and not self.takes_trees:
            faults.append(f"trees are wrong (KL {self.trees:.2g}) and not used")
        return f"{self.library}: {'; '.join(faults)}"


def checked_batches(file: GgufFile, options: GgufOptions) -> BatchCheck | None:
    """Compare batches with single tokens, once for each file, build, processor and set of options.

    Returns None if every token is computed alone. Raises DataError if two tokens already differ from single tokens.
    """
    sizes = [size for size in SIZES if size <= min(options.ubatch_size or size, file.context_length)]
    if not sizes:
        return None
    library = "ik_llama.cpp" if options.library == "ik" else "llama.cpp"
    given = {name: value for name, value in options.given().items() if not name.startswith("threads")}
    conditions = [file.build, machine()["cpu"], given, sizes]
    place = cache_folder("batches") / f"{file_name(file.path)}-{digest(conditions)[:12]}.json"
    try:
        check = read_result(place, BatchCheck)
    except DataError:
        name, started = Path(file.path).name, time.monotonic()
        note(f"{name}: comparing batches of 2 to {sizes[-1]} tokens with single tokens, once for this {library}")
        check = _measure(file, library, options, sizes)
        note(f"{name}: compared in {duration(time.monotonic() - started)}")
        remember(place, asdict(check))
    if check.largest == 1:
        what = f"{file.path}: {library} computes 2 tokens at once differently from single tokens"
        hint = "use another library or type of file; ubatch_size 1 computes tokens one at a time, without a gain"
        raise DataError(f"{what} (KL {check.kl[2]:.2g} nats)", hint)
    return check


def _measure(file: GgufFile, library: str, options: GgufOptions, sizes: list[int]) -> BatchCheck:
    count = max(sizes)
    ids = np.resize(np.array(file.tokenize(TEXT) or [0]), count)
    context = GgufContext(file, count, count, 1, options.model_copy(update={"ubatch_size": count}))
    try:
        rows, states = [], {}
        for place in range(count):
            if file.recurrent and place and count - place in sizes:
                states[place] = context.state()
            rows.append(_rows(context, ids[place : place + 1], place))
        single = np.concatenate(rows)
        kl = {}
        for size in sizes:  # The sizes ascend, so each one removes the tokens of the size before it.
            if count - size in states:
                context.restore(states[count - size], count - size)
            else:
                context.remove(0, count - size)
            together = _rows(context, ids[count - size :], count - size)
            kl[size] = _mean_kl(single[count - size :], together)
    finally:
        context.close()
    return BatchCheck(library, kl, None if file.recurrent else _kl_of_trees(file, options, ids, single))


def _kl_of_trees(file: GgufFile, options: GgufOptions, ids: NDArray[np.int64], single: NDArray[np.float32]) -> float:
    """Return the mean KL from the text's single-token logits [n, V] to those in trees of two of its tokens.

    Another token stands between the two. The rejected nodes leave gaps at every place of the cache.
    """
    context = GgufContext(
        file, 2 * len(ids), len(BRANCHED), 3, options.model_copy(update={"ubatch_size": len(BRANCHED)})
    )
    try:
        branches, rows = Branches(context, 2), []
        for place in range(0, min(ALONG, len(ids)) - 1, 2):
            first, second = ids[place : place + 2]
            positions = np.array([place, place + 1, place + 1], dtype=np.int32)
            with branches.growing(PendingTree().grown(BRANCHED), place) as through:
                nodes = np.array([first, (second + 1) % file.vocabulary_size, second])
                rows.append(context.decode_nodes(nodes, np.ones(3, dtype=np.int8), positions, through)[[0, 2]])
            branches.commit([[0, 2]], place)
    finally:
        context.close()
    return _mean_kl(single[: 2 * len(rows)], np.concatenate(rows))


def _rows(context: GgufContext, ids: NDArray[np.int64], start: int) -> NDArray[np.float32]:
    return context.decode_chain(ids, np.ones(len(ids), dtype=np.int8), start).copy()


def _mean_kl(p: NDArray[np.float32], q: NDArray[np.float32]) -> float:
    """Return the mean KL(p ‖ q) in nats, from logits [n, V]."""
    first, second = (torch.from_numpy(rows).double().log_softmax(-1) for rows in (p, q))
    return float(forward_kl(first, second).mean())


# ── The model ──

MOST_LEAVES = 255  # llama.cpp has at most 256 sequences, including the committed row.


class GgufModel:
    """A GGUF file with a cache of one row, and trees of up to `max_leaves` branches.

    `context` is the capacity in tokens. `batch` is the most tokens decoded at once. `options` are llama.cpp's (by
    default no GPU, an f16 cache, and flash attention off). `threads` applies if the options give none. Logits depend on
    the division of a text into calls only by rounding, because llama.cpp has other kernels for a single token and a
    single output.

    A recurrent model takes no trees. It returns to copies of its state (`StateSnapshots`). For some architectures,
    llama.cpp takes back the last tokens of a call by itself, and nothing is computed again.

    Raises DataError if llama-cpp-python is missing or the file is missing, damaged or of an unsupported kind, and
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
        self._text = StateSnapshots() if self.file.recurrent else None
        max_leaves = 0 if self.file.recurrent else max_leaves
        self._undoable = 0  # last tokens that llama.cpp can take back, or −1 if it has just taken some back
        self.vocabulary_size = self.file.vocabulary_size
        self.build = self.file.build  # the build of the library that computes
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
        # Whether a rejection makes the model compute committed tokens again.
        self.resends = self._text is not None and not self._context.undoable
        self.max_leaves = max_leaves
        self._branches = Branches(self._context, max_leaves)

    @property
    def lengths(self) -> list[int]:
        """The number of committed tokens of the one row."""
        return [self._length if self._text is None else len(self._text.tokens)]

    @property
    def resent(self) -> int:
        """The number of committed tokens that a recurrent model computes again in the next call."""
        return 0 if self._text is None else len(self._text.tokens) - self._length

    def extend(
        self, tokens: Ints, counts: Ints | None = None, parents: Ints | None = None, want: Ints | None = None
    ) -> GgufLogits:
        """Commit `tokens`, or add them to the tree below `parents`. Return logits [n, V] for `want` (None: all).

        Raises ValueError, with nothing changed, for no tokens, ids outside [0, V), too many tokens for the capacity,
        indices outside the tokens, a chain below a pending tree, more than `max_leaves` branches, or more nodes than
        the cache has cells or a batch has tokens. Raises DataError if llama.cpp fails.
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
        self, text: StateSnapshots, tokens: list[int], counts: Ints | None, parents: Ints | None, want: Ints | None
    ) -> GgufLogits:
        """Do `extend` for a recurrent model."""
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
        last = (len(again) + len(tokens) - 1) % self._context.batch_size  # A prompt is decoded in chunks.
        self._undoable = min(self._context.undoable, last)
        return logits

    def _return(self, text: StateSnapshots, length: int) -> None:
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
        """Whether a chain is a valid step or verification, which needs no bookkeeping for prompts and trees."""
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
        """Commit one path of the pending tree and drop its other nodes. ValueError for no path from the root."""
        self.file.require_open()
        self._length += self._branches.commit(paths, self._length)

    def _decode_all(self, tokens: Sequence[int], want: Sequence[int] | None) -> NDArray[np.float32]:
        """Decode in chunks. Return logits [n, V], as a view if one chunk has them all in order."""
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
        """Return bounds of chunks of at most the batch size. If possible, the last chunk has several tokens."""
        size = self._context.batch_size
        bounds = [*range(0, count, size), count]
        if len(bounds) > 2 and bounds[-1] - bounds[-2] == 1 and size > 2:
            bounds[-2] -= 1
        return list(itertools.pairwise(bounds))

    def rollback(self, lengths: Sequence[int]) -> None:
        """Forget a pending tree, and the tokens beyond `lengths` (one number). ValueError for a number out of range."""
        self.file.require_open()
        (length,) = check_lengths(lengths, self.lengths)
        if self._text is not None:
            del self._text.tokens[length:]
            if length < self._length or length == 0:
                self._return(self._text, length)
            return
        if len(self._branches):
            self._branches.drop(self._length)
        # A signal may come between llama.cpp's step and our count of it, so a new text begins in an empty cache.
        if length < self._length or length == 0:
            self._context.remove(0, length)
            self._length = length
            self._branches.shorten(length)

    def close(self) -> None:
        """Free the model. A second call does nothing. Logits returned before become unreadable."""
        self._context.close()
        self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _outputs(count: int, want: Sequence[int] | None) -> tuple[NDArray[np.int8], NDArray[np.intp] | None]:
    """Return which of `count` tokens need logits [count], and the row of each wanted token. None means all in order."""
    wanted = np.arange(count) if want is None else np.asarray(want, dtype=np.int64)
    needed, order = np.unique(wanted, return_inverse=True)
    mask = np.zeros(count, dtype=np.int8)
    mask[needed] = 1
    return mask, None if np.array_equal(wanted, needed) else order


def token_bytes_of(model: GgufModel) -> list[bytes]:
    """Return the bytes [V] of each token, empty for control tokens and unused tokens."""
    llama, vocabulary = model.file.library, model.file.vocabulary
    silent = llama.LLAMA_TOKEN_ATTR_CONTROL | llama.LLAMA_TOKEN_ATTR_UNUSED | llama.LLAMA_TOKEN_ATTR_UNKNOWN
    return [
        b"" if llama.llama_vocab_get_attr(vocabulary, token) & silent else model.file.detokenize([token])
        for token in range(model.vocabulary_size)
    ]
