"""Plain sampling of many prompts in the rows of one model: a finished text makes room for the next prompt.

Legend: R rows of the model, N rows of a call, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from distill.models.base import Logits, Model
from distill.models.torch_logits import TorchLogits
from distill.sampler import Sampler
from distill.speculative.sample import uniform_numbers
from distill.speculative.stop_strings import Stop
from distill.speculative.verify import unchecked_transform
from distill.texts import Reply, Request

CHUNK = 256  # tokens of a prompt that one call reads


@dataclass
class _Row:
    """A text that is being written, with a random number for each of its tokens."""

    request: Request
    numbers: list[float]
    tokens: list[int] = field(default_factory=list)
    stopped: Reply | None = None

    def add(self, token: int, ends: Collection[int], stop: Stop | None) -> None:
        """Add a token; `stopped` is the reply where the text is over."""
        seen = len(self.tokens)
        self.tokens.append(token)
        if token in ends:
            self.stopped = Reply(self.request.id, self.tokens, True)
            return
        if stop is not None and (found := stop(self.tokens, seen)).ended:
            self.stopped = Reply(self.request.id, self.tokens[: found.kept], True)
        elif len(self.tokens) >= self.request.limit:
            self.stopped = Reply(self.request.id, self.tokens, False)


def refill(
    model: Model,
    waiting: deque[Request],
    sampler: Sampler,
    ends: Collection[int],
    vocabulary: int | None = None,
    stop: Stop | None = None,
) -> Iterator[Reply]:
    """Continue every request that waits, R at a time, and yield each reply when its text ends.

    A text that ends keeps its end token as the last. Its draws depend on the request's seed and on its own
    distributions alone; the other rows affect it only through rounding, and the order of requests decides which those
    are. The caller may append to `waiting` between replies. Ids from `vocabulary` on are padding and never drawn.
    ValueError for a request that the model's context cannot hold.
    """
    rows: list[_Row | None] = [None] * model.rows
    while True:
        fresh = []
        for place, row in enumerate(rows):
            if row is None and waiting:
                rows[place] = _seated(model, waiting.popleft())
                fresh.append(place)
        reading = fresh or [place for place, row in enumerate(rows) if row is not None]
        if not reading:
            return
        live = [row for place in reading if (row := rows[place]) is not None]
        logits = _read_prompts(model, reading, live) if fresh else _step(model, reading, live)
        for row, token in zip(live, _drawn(logits, live, sampler, vocabulary), strict=True):
            row.add(token, ends, stop)
        for place, row in zip(reading, live, strict=True):
            if row.stopped is not None:
                rows[place] = None
                yield row.stopped


def _seated(model: Model, request: Request) -> _Row:
    # The last token is never read.
    if not request.ids or request.limit < 1 or len(request.ids) + request.limit - 1 > model.capacity:
        raise ValueError(
            f"{len(request.ids)} tokens of a prompt and {request.limit} more do not fit a context of {model.capacity}"
        )
    return _Row(request, uniform_numbers(request.seed, request.limit).tolist())


def _extend(model: Model, tokens: dict[int, Sequence[int]], want_last: bool) -> Logits:
    """Append tokens to rows, by number; the logits after the last token of each, or none at all."""
    counts = [len(tokens.get(row, ())) for row in range(model.rows)]
    flat = [token for row in sorted(tokens) for token in tokens[row]]
    ends, want = 0, []
    for count in filter(None, counts):
        ends += count
        want.append(ends - 1)
    # With one row, counts are left out: llama.cpp's short steps skip the bookkeeping then.
    return model.extend(flat, counts if model.rows > 1 else None, want=want if want_last else [])


def _read_prompts(model: Model, places: Sequence[int], rows: Sequence[_Row]) -> Logits:
    """Read the prompts of fresh rows in chunks, all of which end in the last one."""
    model.rollback([0 if place in places else length for place, length in enumerate(model.lengths)])
    longest = max(len(row.request.ids) for row in rows)
    left = -(-longest // CHUNK)
    while True:
        left -= 1
        part: dict[int, Sequence[int]] = {}
        for place, row in zip(places, rows, strict=True):
            ids = row.request.ids
            piece = ids[max(0, len(ids) - (left + 1) * CHUNK) : max(0, len(ids) - left * CHUNK)]
            if piece:
                part[place] = piece
        logits = _extend(model, part, want_last=left == 0)
        if left == 0:
            return logits


def _step(model: Model, places: Sequence[int], rows: Sequence[_Row]) -> Logits:
    return _extend(model, {place: row.tokens[-1:] for place, row in zip(places, rows, strict=True)}, want_last=True)


@torch.inference_mode()
def _drawn(logits: Logits, rows: Sequence[_Row], sampler: Sampler, vocabulary: int | None) -> list[int]:
    """The next token of each row, from logits [N, V]."""
    values: Tensor = logits.values if isinstance(logits, TorchLogits) else logits.full()
    histories = [row.request.ids + row.tokens for row in rows] if sampler.repetition_penalty != 1 else None
    probabilities = sampler.probabilities(values[:, :vocabulary], histories, logits.place)
    numbers = torch.tensor([row.numbers[len(row.tokens)] for row in rows], dtype=torch.float64, device=values.device)
    found: list[int] = unchecked_transform(probabilities, numbers).tolist()
    return found
