"""Counts of the tokens that follow n-grams: in the target's own texts (a table, one file), and in the text so far.

Both are mixed by Witten–Bell back-off: after a context that N counts follow in U different tokens, a token has the
share c / (N + U) of its own count c and U / (N + U) of what the context without its first token gives it. Legend: k
tokens of a context, G different n-grams of one length, N counts, U different tokens after a context.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy
from numpy.typing import NDArray

from distill.decoding.text_index import LONGEST, TextIndex
from distill.engines.torch.hugging_face import tokenizer_digest
from distill.errors import DataError
from distill.files import write_atomically
from distill.folders import read_header

ORDER = LONGEST  # tokens of the longest context
FORMAT = "1"
MOST_FOLLOWERS = 12  # Likeliest tokens after a context that are looked at.
OWN_WEIGHT = 16.0  # counts of the table that one of the text so far is worth
SINGLES_UP_TO = 40_000_000  # n-grams of a table; a larger one loses those of three tokens and more that occur once
MIN_PROBABILITY = 0.01  # of an expected token that counts
CHECKED = 256 * 2**20  # bytes of a table whose checksum is taken when it is opened: a fifth of a second
CACHED = 200_000  # contexts whose likeliest tokens are kept in memory
TABLE_FILE = ("table", "ngrams.safetensors")  # in a run
REMAKE = "make it again (in a run: `--redo table`)"

Ints = NDArray[numpy.int64]
STORED = {
    **{f"tokens.{size}": "I32" for size in range(1, ORDER + 2)},
    **{f"counts.{size}": "F32" for size in range(1, ORDER + 2)},
    **{f"first.{size}": "I64" for size in range(1, ORDER + 1)},
}


class Following(NamedTuple):
    """Counts of the tokens after a context: their sum, the number of different tokens, and of the likeliest tokens
    the counts and the numbers of the n-grams that they make of the context."""

    total: float
    different: int
    best: dict[int, float]
    numbers: dict[int, int]


UNSEEN = Following(0.0, 0, {}, {})


@dataclass(frozen=True)
class Level:
    """The n-grams of one length, sorted: children of an n-gram of the level before stand together, by token."""

    tokens: NDArray[numpy.int32]  # [G], the last token of each
    counts: NDArray[numpy.float32]  # [G]
    first: NDArray[numpy.int64]  # [G + 1] of the children of each in the next level; of the last level, empty


class NGramTable:
    """Counts of the tokens after each context of up to ORDER tokens, from a file that is mapped into memory.

    A place in a text is a list: the number of the n-gram that its last 1, 2, … tokens are in their level, up to the
    first that the table does not have.
    """

    def __init__(self, levels: Sequence[Level], about: dict[str, str]) -> None:
        self.levels, self.about = levels, about
        self._known: dict[tuple[int, int], Following] = {}

    @classmethod
    def open(cls, path: Path, tokenizer: str) -> NGramTable:
        """A table that `write_table` wrote in the vocabulary of this digest; DataError for every other file."""
        from safetensors import safe_open

        tensors = read_header(path)
        with safe_open(path, "pt") as file:
            about: dict[str, str] = file.metadata() or {}
            # torch maps the file into memory. Parts of numpy's own mapping take ten times as long to make.
            arrays = {name: file.get_tensor(name).flatten().numpy() for name in tensors if name in STORED}
        if about.get("ngrams") != FORMAT or {name: one.dtype for name, one in tensors.items()} != STORED:
            raise DataError(f"{path} is not a table of n-grams of format {FORMAT}", REMAKE)
        if about.get("tokenizer") != tokenizer:
            raise DataError(
                f"{path} was counted in another vocabulary, that of {about.get('target', 'an unknown target')}: "
                f"{str(about.get('tokenizer'))[:12]}, this target's is {tokenizer[:12]}",
                "make a table of this target's own texts",
            )

        levels = []
        for size in range(1, ORDER + 2):
            first = arrays[f"first.{size}"] if size <= ORDER else numpy.zeros(0, numpy.int64)
            levels.append(Level(arrays[f"tokens.{size}"], arrays[f"counts.{size}"], first))
        whole = path.stat().st_size > CHECKED or about.get("sha256") == _checksum(levels)
        if not whole or not all(map(_fits, levels, [*levels[1:], None])):
            raise DataError(f"{path} is damaged: its counts are not those that were written", REMAKE)
        return cls(levels, about)

    def child(self, size: int, ngram: int, token: int) -> int:
        """The number of the n-gram of `size` + 1 tokens that continues one of `size` with `token`; −1 for none."""
        known = self._known.get((size, ngram))
        if known is not None and (token in known.numbers or known.different == len(known.numbers)):
            return known.numbers.get(token, -1)
        start, end = self._children(size, ngram)
        tokens = self.levels[size].tokens
        # Of the array's own type: another one would convert the whole part.
        place = start + int(tokens[start:end].searchsorted(numpy.int32(token)))
        return place if place < end and tokens[place] == token else -1

    def _children(self, size: int, ngram: int) -> tuple[int, int]:
        if not size:
            return 0, len(self.levels[0].tokens)
        first = self.levels[size - 1].first
        return int(first[ngram]), int(first[ngram + 1])

    def after(self, place: Sequence[int], token: int) -> list[int]:
        """The place after `token` in a text that was at `place`."""
        new: list[int] = []
        for size, ngram in enumerate([0, *place[: ORDER - 1]]):
            number = self.child(size, ngram, token)
            if number < 0:
                break
            new.append(number)
        return new

    def following(self, size: int, ngram: int) -> Following:
        """The counts after an n-gram of `size` tokens."""
        known = self._known.get((size, ngram))
        if known is None:
            start, end = self._children(size, ngram)
            tokens, counts = self.levels[size].tokens[start:end], self.levels[size].counts[start:end]
            numbers: Sequence[int] = range(start, end)
            if end - start > MOST_FOLLOWERS:
                total = float(counts.sum(dtype=numpy.float64))
                best = numpy.argpartition(-counts, MOST_FOLLOWERS - 1)[:MOST_FOLLOWERS]
                tokens, counts, numbers = tokens[best], counts[best], (best + start).tolist()
            ids, each = tokens.tolist(), counts.tolist()
            if end - start <= MOST_FOLLOWERS:  # of most contexts: numpy would take longer
                total = sum(each)
            known = Following(
                total, end - start, dict(zip(ids, each, strict=True)), dict(zip(ids, numbers, strict=True))
            )
            if len(self._known) >= CACHED:
                self._known.clear()
            self._known[size, ngram] = known
        return known


def _fits(level: Level, following: Level | None) -> bool:
    """Whether a level's parts belong together, and to the next level: seen from their sizes and ends."""
    tokens, first = len(level.tokens), level.first
    if len(level.counts) != tokens or following is None:
        return len(level.counts) == tokens
    return len(first) == tokens + 1 and first[0] == 0 and first[-1] == len(following.tokens)


def _checksum(levels: Sequence[Level]) -> str:
    checksum = hashlib.sha256()
    for level in levels:
        for part in (level.tokens, level.counts, level.first):
            checksum.update(part.tobytes())
    return checksum.hexdigest()


class Expected(NamedTuple):
    """The target's K likeliest tokens at each of the last n places of a text, and their probabilities."""

    tokens: Ints  # [n, K]
    probabilities: NDArray[numpy.float64]  # [n, K]


def count_ngrams(texts: Sequence[Sequence[int]], expected: Sequence[Expected] | None = None) -> list[Level]:
    """The n-grams of 1 to ORDER + 1 tokens within each of the texts (token ids).

    With what is `expected` in each text, its likely tokens count by their probabilities in place of the one that was
    drawn, as the last of an n-gram. With more than SINGLES_UP_TO n-grams, those of three and more tokens that occur
    once are left out.
    """
    arrays = [numpy.asarray(text, numpy.int64) for text in texts]
    tokens = numpy.concatenate([*arrays, numpy.zeros(0, numpy.int64)])
    offsets = numpy.concatenate([*(numpy.arange(len(text)) for text in arrays), numpy.zeros(0, numpy.int64)])
    places, last, weights = numpy.arange(len(tokens)), tokens, numpy.ones(len(tokens))  # what counts, where, how much
    if expected is not None:
        places, last, weights = _likely(arrays, expected)
    before = numpy.zeros(len(tokens), numpy.int64)  # the n-gram that ends before each token, by its number in its level
    keys: list[tuple[Ints, Ints, Any]] = []  # of each level: parents, last tokens, counts, all [G]
    for size in range(1, ORDER + 2):
        fits = offsets[places] >= size - 1
        places, last, weights = places[fits], last[fits], weights[fits]
        ngrams, numbers = numpy.unique((before[places] << 32) | last, return_inverse=True)
        keys.append((ngrams >> 32, ngrams & 0xFFFFFFFF, numpy.bincount(numbers, weights, len(ngrams))))
        before = numpy.concatenate([[0], ngrams.searchsorted((before << 32) | tokens)])[: len(tokens)]
    if sum(len(counts) for *_, counts in keys) > SINGLES_UP_TO:
        keys = _without_singles(keys)
    levels = []
    for size, (_, token, counts) in enumerate(keys, start=1):
        first = numpy.zeros(0, numpy.int64)
        if size <= ORDER:
            first = numpy.searchsorted(keys[size][0], numpy.arange(len(token) + 1)).astype(numpy.int64)
        levels.append(Level(token.astype(numpy.int32), counts.astype(numpy.float32), first))
    return levels


def _likely(arrays: Sequence[Ints], expected: Sequence[Expected]) -> tuple[Ints, Ints, NDArray[numpy.float64]]:
    """Places [E] in the texts one after the other, tokens that count there, and how much.

    Tokens of at least MIN_PROBABILITY count, and the drawn one always does, because the text goes on after it. It
    counts alone if nothing is expected.
    """
    parts, start = [], 0
    for text, (tokens, probabilities) in zip(arrays, expected, strict=True):
        known = len(text) - len(tokens)
        parts.append((numpy.arange(start, start + known), text[:known], numpy.ones(known)))
        drawn = tokens == text[known:, None]
        rows, columns = ((probabilities >= MIN_PROBABILITY) | drawn).nonzero()
        weights = numpy.maximum(probabilities[rows, columns], MIN_PROBABILITY)
        parts.append((start + known + rows, tokens[rows, columns], weights))
        (unlikely,) = (~drawn.any(1)).nonzero()
        parts.append((start + known + unlikely, text[known + unlikely], numpy.full(len(unlikely), MIN_PROBABILITY)))
        start += len(text)
    empty = numpy.zeros(0, numpy.int64)
    places, last, weights = zip(*parts, (empty, empty, empty.astype(float)), strict=True)
    return numpy.concatenate(places), numpy.concatenate(last), numpy.concatenate(weights)


def _without_singles(keys: list[tuple[Ints, Ints, Any]]) -> list[tuple[Ints, Ints, Any]]:
    """The levels without n-grams of three and more tokens that count once or less, and without their continuations."""
    kept = keys[:2]
    stayed = numpy.ones(len(keys[1][2]), bool)
    for parents, last, counts in keys[2:]:
        stay = (counts > 1) & stayed[parents]
        kept.append(((numpy.cumsum(stayed) - 1)[parents[stay]], last[stay], counts[stay]))
        stayed = stay
    return kept


def write_table(path: Path, levels: Sequence[Level], about: dict[str, str]) -> None:
    """Write counts as one safetensors file; `about` says what was counted."""
    from safetensors.numpy import save_file

    arrays: dict[str, Any] = {}
    for size, level in enumerate(levels, start=1):
        arrays |= {f"tokens.{size}": level.tokens, f"counts.{size}": level.counts}
        if size <= ORDER:
            arrays[f"first.{size}"] = level.first
    about = {"ngrams": FORMAT, "sha256": _checksum(levels), **about}
    write_atomically(path, lambda temporary: save_file(arrays, str(temporary), about))


def open_table(path: Path, target: str) -> NGramTable:
    """The table in a file, or of a run's folder, for this target; DataError where it is of another vocabulary, or
    damaged."""
    if path.is_dir():
        path = path.joinpath(*TABLE_FILE)
    return NGramTable.open(path, tokenizer_digest(target))


@dataclass(frozen=True)
class Guess:
    """The likeliest next tokens with their chances, best first; how many tokens of context were known, and how many
    counts follow the longest of them."""

    tokens: list[int]
    chances: list[float]
    known: int
    count: float


class Mixture:
    """The next token by a table (None: there is none) and by the text so far, which counts `own_weight` times.

    `tail` are the last tokens of the text, `place` is theirs in the table.
    """

    def __init__(self, table: NGramTable | None, own_weight: float = OWN_WEIGHT) -> None:
        self.table, self.own_weight, self.index = table, own_weight, TextIndex()
        self.begin()

    def begin(self) -> None:
        """Forget the text so far."""
        self.index.begin()
        self.tail: tuple[int, ...] = ()
        self.place: list[int] = []

    def read(self, text: Sequence[int]) -> None:
        """Read the part of `text`, which only grows, that was not read before."""
        for token in text[max(len(self.index.text), len(text) - ORDER) :]:
            self.place = self.after(self.place, token)
        self.index.read(text)
        self.tail = tuple(text[-ORDER:])

    def after(self, place: Sequence[int], token: int) -> list[int]:
        """The place in the table after `token`; without a table there is none."""
        return [] if self.table is None else self.table.after(place, token)

    def guess(self, tail: tuple[int, ...], place: Sequence[int], count: int) -> Guess:
        """The `count` likeliest tokens after the last tokens `tail` of a text, at their `place` in the table."""
        levels: list[tuple[dict[int, int], Following]] = []
        followers = self.index.followers(tail)
        for size in range(1, len(tail) + 1):
            text = followers[size - 1] if size <= len(followers) else {}
            table = UNSEEN
            if self.table is not None and size <= len(place):
                table = self.table.following(size, place[size - 1])
            if not text and not table.total:
                break
            levels.append((text, table))
        chances: dict[int, float] = {}
        left, counted = 1.0, 0.0  # left: what the longer contexts leave to this one
        for text, table in reversed(levels):
            total, different = table.total, table.different
            for token, n in text.items():
                total += self.own_weight * n
                different += token not in table.best
            share = left / (total + different)
            left, counted = share * different, counted or total
            for token, c in table.best.items():
                chances[token] = chances.get(token, 0.0) + share * c
            share *= self.own_weight
            for token, n in text.items():
                chances[token] = chances.get(token, 0.0) + share * n
        tokens = sorted(chances, key=chances.__getitem__, reverse=True)[:count]
        return Guess(tokens, [chances[token] for token in tokens], len(levels), counted)
