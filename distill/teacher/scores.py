"""The target's distributions at tokens that a server generated, as in replies, journals and files next to answers.

Legend: T tokens, M entries of all tokens.
"""

from __future__ import annotations

import base64
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy

from distill.data.samples import Split, how_to_redo
from distill.errors import DataError
from distill.files import write_atomically
from distill.run import Run

STORED_MASS = 0.9999  # The fewest likeliest tokens with this mass are kept, and the rest is in the tail.
LEAST_LOG = -100.0  # Smaller logs mean no mass. Servers write -9999 or -3.4e38 for the log of 0.
EXCESS = 1e-3  # Rounding may lift a sum of probabilities this far above 1.
ROUNDING = float(numpy.finfo(numpy.float32).eps)

Row = tuple[Sequence[int], Sequence[float]]  # ids and natural logarithms at one token, in any order


class NotDistributions(Exception):
    """A reply's numbers are not the log-probabilities of its tokens. The message names the fault."""


@dataclass(frozen=True)
class Scores:
    """The target's distributions at T generated tokens.

    counts int32 [T] counts the entries of each token. ids int32 [M] and logs float32 [M] have the entries token by
    token, likeliest first. tails float32 [T] is the log of the mass of all other tokens. The distribution at a token
    without entries is unknown.
    """

    counts: Any
    ids: Any
    logs: Any
    tails: Any

    def fitted(self, tokens: int) -> Scores:
        """The scores of the first `tokens` tokens. Tokens beyond the last one get no entries."""
        more = max(0, tokens - len(self.counts))
        counts = numpy.concatenate([self.counts[:tokens], numpy.zeros(more, numpy.int32)])
        tails = numpy.concatenate([self.tails[:tokens], numpy.zeros(more, numpy.float32)])
        entries = int(counts.sum())
        return Scores(counts, self.ids[:entries], self.logs[:entries], tails)

    def trimmed(self, mass: float | None, most: int) -> Scores:
        """Keep the fewest likeliest entries with `mass` (None: all) of each token, at most `most`.

        The mass of the others is added to the tail.
        """
        firsts = (self.counts.cumsum() - self.counts).repeat(self.counts)
        places, shares = numpy.arange(len(self.counts)).repeat(self.counts), numpy.exp(self.logs.astype(float))
        before = shares.cumsum() - shares
        kept = numpy.arange(len(places)) - firsts < most
        if mass is not None:
            kept &= before - before[firsts] < mass
        left = numpy.bincount(places[~kept], shares[~kept], len(self.counts))
        return Scores(
            numpy.bincount(places[kept], minlength=len(self.counts)).astype(numpy.int32),
            self.ids[kept],
            self.logs[kept],
            numpy.log(numpy.exp(self.tails.astype(float)) + left).astype(numpy.float32),
        )

    def without_first(self) -> Scores:
        """All tokens but the first."""
        first = int(self.counts[0])
        return Scores(self.counts[1:], self.ids[first:], self.logs[first:], self.tails[1:])

    def filled(self, tokens: Any) -> Scores:
        """Give each token without entries one entry with the whole mass: its own id, from `tokens` [T]."""
        counts = numpy.maximum(self.counts, 1)
        lone = self.counts == 0
        at = (counts.cumsum() - counts)[lone]
        known = numpy.ones(int(counts.sum()), bool)
        known[at] = False
        ids, logs = numpy.empty(len(known), numpy.int32), numpy.zeros(len(known), self.logs.dtype)
        ids[known], logs[known], ids[at] = self.ids, self.logs, numpy.asarray(tokens)[lone]
        return Scores(counts, ids, logs, numpy.where(lone, LEAST_LOG, self.tails).astype(numpy.float32))

    def packed(self) -> str:
        """The scores as text for a journal, with logarithms in half precision, as in stores."""
        parts = (self.counts.astype("<i4"), self.ids.astype("<i4"), self.logs.astype("<f2"), self.tails.astype("<f4"))
        return base64.b64encode(b"".join(part.tobytes() for part in parts)).decode()

    @classmethod
    def unpacked(cls, text: str, tokens: int) -> Scores:
        """The scores of `tokens` tokens from their text. Raises ValueError for another number of tokens."""
        data = base64.b64decode(text, validate=True)
        counts = numpy.frombuffer(data, "<i4", tokens)
        entries = int(counts.sum())
        if (counts < 0).any() or len(data) != 8 * tokens + 6 * entries:
            raise ValueError("the text holds the scores of another number of tokens")
        ids = numpy.frombuffer(data, "<i4", entries, 4 * tokens)
        logs = numpy.frombuffer(data, "<f2", entries, 4 * tokens + 4 * entries)
        return cls(counts, ids, logs, numpy.frombuffer(data, "<f4", tokens, 4 * tokens + 6 * entries))


def scores_of(rows: Sequence[Row | None], vocabulary: int) -> Scores:
    """The scores of tokens from a row each, or None for an unknown distribution. Ids from `vocabulary` on are padding.

    Raises NotDistributions for a row whose numbers are no log-probabilities.
    """
    known = [row or ((), ()) for row in rows]
    lengths = numpy.array([len(ids) for ids, _ in known], int)
    ids = numpy.fromiter(chain.from_iterable(ids for ids, _ in known), numpy.int64, lengths.sum())
    logs = numpy.fromiter(chain.from_iterable(logs for _, logs in known), float, lengths.sum())
    places = numpy.arange(len(known)).repeat(lengths)
    _require_normalised(places, logs, len(known))
    real = (ids >= 0) & (ids < vocabulary) & (logs > LEAST_LOG)
    order = real.nonzero()[0]
    order = order[numpy.lexsort((ids[order], -logs[order], places[order]))]
    ids, logs, places = ids[order], logs[order], places[order]
    shares = numpy.exp(logs)
    mass = numpy.bincount(places, shares, len(known))
    # A server rounds logarithms to float32, so that a smaller tail is unknown.
    rounding = numpy.bincount(places, shares * (1 + abs(logs)), len(known)) * ROUNDING
    counts = numpy.bincount(places, minlength=len(known))
    tails = numpy.where(counts > 0, numpy.log(numpy.maximum(1 - mass, numpy.maximum(rounding, ROUNDING))), 0.0)
    whole = Scores(
        counts.astype(numpy.int32), ids.astype(numpy.int32), logs.astype(numpy.float32), tails.astype(numpy.float32)
    )
    return whole.trimmed(STORED_MASS, vocabulary)


def _require_normalised(places: Any, logs: Any, tokens: int) -> None:
    """Raise NotDistributions unless the probabilities at each token are at most 1 and add up to at most 1."""
    shares = numpy.exp(numpy.minimum(logs, 1.0))
    totals = numpy.bincount(places, shares, tokens)
    wrong = numpy.bincount(places, ~numpy.isfinite(logs) | (logs > EXCESS), tokens) + (totals > 1 + EXCESS)
    if wrong.any():
        bad = int(wrong.argmax())
        raise NotDistributions(
            f"at generated token {bad} the numbers are not log-probabilities: the largest is "
            f"{logs[places == bad].max():g}, and their probabilities add up to {totals[bad]:g}"
        )


def largest_difference(left: Scores, right: Scores) -> float:
    """The largest difference of logarithms at the first token, over the likeliest entries of both."""
    logs = [
        dict(zip(scores.ids[: scores.counts[0]].tolist(), scores.logs[: scores.counts[0]].tolist(), strict=True))
        for scores in (left, right)
    ]
    largest = 0.0
    for first, second in (logs, logs[::-1]):
        for token in list(first)[:COMPARED]:
            largest = max(largest, abs(first[token] - second.get(token, LEAST_LOG)))
    return largest


COMPARED = 3  # likeliest tokens
LEAST_DIFFERENCE = 0.1  # Batches and narrow types change logarithms by less, a sampler by more.


# ── Files next to the files of answers, with the scores of their rows in order ──

NAMES = {"entries": "counts", "top_ids": "ids", "top_log_probabilities": "logs", "log_tails": "tails"}


def scores_path(answers: Path) -> Path:
    """The file with the scores of a file of answers."""
    return answers.with_suffix(".safetensors")


def joined_scores(parts: Sequence[Scores]) -> Scores:
    """The scores of several texts in one."""
    kinds = {"counts": numpy.int32, "ids": numpy.int32, "logs": numpy.float32, "tails": numpy.float32}
    return Scores(
        *(
            numpy.concatenate([numpy.empty(0, kind), *(getattr(part, name) for part in parts)]).astype(kind)
            for name, kind in kinds.items()
        )
    )


def write_scores(path: Path, parts: Sequence[Scores]) -> None:
    """Write the scores of n texts as a safetensors file.

    It has entries int32 [T], top_ids int32 [M], top_log_probabilities fp16 [M], log_tails fp32 [T], and the first token
    and the first entry of each text, rows and row_entries int64 [n + 1].
    """
    from safetensors.numpy import save_file

    every = joined_scores(parts)
    tensors = {name: getattr(every, field) for name, field in NAMES.items()}
    tensors["top_log_probabilities"] = every.logs.astype(numpy.float16)
    for name, sizes in (
        ("rows", [len(part.counts) for part in parts]),
        ("row_entries", [len(part.ids) for part in parts]),
    ):
        tensors[name] = numpy.array([*accumulate(sizes, initial=0)], numpy.int64)
    write_atomically(path, lambda temporary: save_file(tensors, str(temporary)))


class ScoreFiles:
    """The scores next to the files of a split's answers. A file is open only while an answer of it is read, because
    mapped files count as memory.

    Raises DataError for a file that is missing or damaged, and for an answer that has no scores.
    """

    def __init__(self, run: Run, split: Split) -> None:
        self.folder = run.path("answers", split)
        self.paths = [scores_path(path) for path in sorted(self.folder.glob("*.arrow"))]
        self._places = [self._index(number) for number in range(len(self.paths))]
        self._firsts = [*accumulate((len(tokens) - 1 for tokens, _ in self._places), initial=0)]

    def _mapped(self, number: int) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            return safe_open(str(self.paths[number]), framework="numpy")
        except (OSError, SafetensorError) as error:
            raise DataError(f"{self.paths[number]} cannot be read: {error}", how_to_redo("answers")) from None

    def _index(self, number: int) -> tuple[Any, Any]:
        """The first token and entry of each answer in a file."""
        file = self._mapped(number)
        return file.get_tensor("rows"), file.get_tensor("row_entries")

    def of(self, row: int) -> Scores:
        """The scores of an answer by its row. Rows count through all files in order."""
        if row >= self._firsts[-1]:
            what = f"{self.folder} has the distributions of {self._firsts[-1]} answers, and no others"
            raise DataError(what, how_to_redo("answers"))
        number = bisect_right(self._firsts, row) - 1
        place = row - self._firsts[number]
        tokens, entries = (slice(*first[place : place + 2].tolist()) for first in self._places[number])
        file = self._mapped(number)
        counts, tails = (file.get_slice(name)[tokens] for name in ("entries", "log_tails"))
        ids, logs = (file.get_slice(name)[entries] for name in ("top_ids", "top_log_probabilities"))
        return Scores(counts, ids, logs.astype(numpy.float32), tails)
