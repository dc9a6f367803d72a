"""Several texts at once: one call of a model serves all of them, and each gets the text that it would get alone.

`at_once` runs texts that `decode` writes, each over one row of its models (`OneRow`). A text runs until it calls a
model. Once every text waits for a call, all calls of one model become a single one. `refill` samples many texts without
drafts, each with random numbers of its own; new ones begin as finished texts make room. Legend: R rows of a model, N
distributions of a call (row by row, in the order of the rows), V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor

from distill.data.samples import Reply, Request
from distill.decoding.rules import Stop
from distill.decoding.verify import unchecked_transform
from distill.devices import CPU, float64_device
from distill.engines.model import Ints, Model
from distill.engines.torch.model import TorchLogits, send
from distill.recipe import Sampler
from distill.sampler import Logits, place_from, probabilities_of

PROMPT_TOKENS = 256  # Tokens of a prompt that one call reads.
CACHED = 2**20  # logits of rows that a processor shapes at once: its caches hold these and what is made of them
Text = TypeVar("Text")


class Call(NamedTuple):
    """A text's call of a model: its row, the tokens to read, and the indices of those whose logits are wanted."""

    model: Model
    row: int
    tokens: Sequence[int]
    want: Sequence[int]


class OneRow:
    """One row of a model of several rows, as a model of one text that takes chains, for the texts of `at_once`."""

    rows, max_leaves = 1, 0

    def __init__(self, model: Model, row: int) -> None:
        self.model, self.row = model, row
        self.capacity, self.vocabulary_size = model.capacity, model.vocabulary_size

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of the row."""
        return [self.model.lengths[self.row]]

    def extend(
        self, tokens: Ints, counts: Ints | None = None, parents: Ints | None = None, want: Ints | None = None
    ) -> Logits:
        """See `Model`. The call waits for those of the other texts."""
        if parents is not None:
            raise ValueError("a row of several texts takes chains, not trees")
        wanted = range(len(tokens)) if want is None else want
        logits: Logits = getcurrent().parent.switch(Call(self.model, self.row, tokens, wanted))
        return logits

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """See `Model`. There are no trees."""
        assert not any(paths), paths

    def rollback(self, lengths: Sequence[int]) -> None:
        """See `Model`."""
        (length,) = lengths
        self.model.rollback([length if row == self.row else held for row, held in enumerate(self.model.lengths)])

    def close(self) -> None:
        """Nothing: the model of all rows is closed."""


def rows_of(model: Model) -> list[Model]:
    """The rows of a model, each as a model of one text; a model of one row is its only row."""
    return [model] if model.rows == 1 else [OneRow(model, row) for row in range(model.rows)]


class _RowLogits(TorchLogits):
    """Some rows [n, V] of logits that several texts share. The largest ids are fetched once for all texts."""

    def __init__(self, shared: TorchLogits, largest: Callable[[int | None], list[int]], part: slice) -> None:
        super().__init__(shared.values[part], place_from(shared.place, part.start))
        self._largest, self._part = largest, part

    def argmax(self, empty: int | None = None) -> list[int]:
        """The best id of each row, the smallest id on ties; `empty` if a row is −∞ everywhere."""
        return self._largest(empty)[self._part]


def at_once(texts: Sequence[Callable[[], Text]], models: Sequence[Model]) -> list[Text]:
    """Run functions that each decode a text over rows of these models; what they return, in their order.

    While texts wait for different models, the first of `models` is called first. The draft comes before the target, so
    that all texts are verified together. An error of one text ends all.
    """
    running, done, waiting = [greenlet(text) for text in texts], dict[int, Text](), dict[int, Call]()

    def go_on(number: int, *logits: Logits) -> None:
        outcome = running[number].switch(*logits)
        if running[number].dead:
            done[number] = outcome
        else:
            waiting[number] = outcome

    for number in range(len(texts)):
        go_on(number)
    while waiting:
        model = next(model for model in models if any(call.model is model for call in waiting.values()))
        numbers = sorted((n for n, call in waiting.items() if call.model is model), key=lambda n: waiting[n].row)
        calls = [waiting.pop(number) for number in numbers]
        for number, logits in zip(numbers, _served(model, calls), strict=True):
            go_on(number, logits)
    return [done[number] for number in range(len(texts))]


def _served(model: Model, calls: Sequence[Call]) -> list[_RowLogits]:
    """The logits of each call, by one call of the model; rows ascend."""
    logits = extend_rows(model, {call.row: call.tokens for call in calls}, {call.row: call.want for call in calls})
    assert isinstance(logits, TorchLogits)
    largest, ends = cache(logits.argmax), accumulate((len(call.want) for call in calls), initial=0)
    return [_RowLogits(logits, largest, slice(*part)) for part in pairwise(ends)]


def extend_rows(
    model: Model, texts: Mapping[int, Sequence[int]], want: Mapping[int, Sequence[int]] | None = None
) -> Logits:
    """Extend each row by its own tokens (rows in ascending order).

    Returns the logits after each row's last token, or after those that `want` indexes in each row's tokens, which are
    among the last PROMPT_TOKENS. Long texts are read in parts that all end in the last one, so that masks stay small.
    """
    for left in range(-(-max(map(len, texts.values())) // PROMPT_TOKENS) - 1, -1, -1):
        pieces = {
            row: text[max(0, len(text) - (left + 1) * PROMPT_TOKENS) : max(0, len(text) - left * PROMPT_TOKENS)]
            for row, text in texts.items()
        }
        tokens, places = [token for piece in pieces.values() for token in piece], list[int]()
        for row, end in zip(pieces, accumulate(map(len, pieces.values())), strict=True):
            size = len(texts[row])
            wanted = [size - 1] if want is None else want[row]
            places += [] if left else [end - size + index for index in wanted]
        counts = [len(pieces.get(row, ())) for row in range(model.rows)]
        # With one row, counts are left out: llama.cpp's short steps skip the bookkeeping then.
        logits = model.extend(tokens, counts if model.rows > 1 else None, want=places)
    return logits


# ── Sampling many prompts without drafts ──


def uniform_numbers(seed: int, count: int) -> torch.Tensor:
    """The first `count` uniform numbers [count], fp64, that a text with this seed is drawn with, one for each token."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass
class _Writing:
    """A text that is being written, with a random number for each of its tokens."""

    request: Request
    numbers: list[float]
    tokens: list[int] = field(default_factory=list)
    stopped: Reply | None = None

    def add(self, token: int, ends: Collection[int], stop: Stop | None) -> None:
        """Add a token; `stopped` is the reply if the text is over."""
        seen = len(self.tokens)
        self.tokens.append(token)
        if token in ends:
            self.stopped = Reply(self.request.id, self.tokens, True)
            return
        if stop is not None and (outcome := stop(self.tokens, seen)).ended:
            self.stopped = Reply(self.request.id, self.tokens[: outcome.kept], True)
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
    rows: list[_Writing | None] = [None] * model.rows
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
        if fresh:
            model.rollback([0 if place in fresh else length for place, length in enumerate(model.lengths)])
            read = {place: row.request.ids for place, row in zip(reading, live, strict=True)}
        else:
            read = {place: row.tokens[-1:] for place, row in zip(reading, live, strict=True)}
        for row, token in zip(live, _drawn(extend_rows(model, read), live, sampler, vocabulary), strict=True):
            row.add(token, ends, stop)
        for place, row in zip(reading, live, strict=True):
            if row.stopped is not None:
                rows[place] = None
                yield row.stopped


def _seated(model: Model, request: Request) -> _Writing:
    # The last token is never read.
    if not request.ids or request.limit < 1 or len(request.ids) + request.limit - 1 > model.capacity:
        raise ValueError(
            f"{len(request.ids)} tokens of a prompt and {request.limit} more do not fit a context of {model.capacity}"
        )
    return _Writing(request, uniform_numbers(request.seed, request.limit).tolist())


@torch.inference_mode()
def _drawn(logits: Logits, rows: Sequence[_Writing], sampler: Sampler, vocabulary: int | None) -> list[int]:
    """The next token of each row, from logits [N, V]."""
    values: Tensor = (logits.values if isinstance(logits, TorchLogits) else logits.full())[:, :vocabulary]
    histories = [row.request.ids + row.tokens for row in rows] if sampler.repetition_penalty != 1 else None
    numbers = send([row.numbers[len(row.tokens)] for row in rows], float64_device(values.device), torch.float64)
    size = max(1, CACHED // values.shape[-1]) if values.device.type == CPU else len(rows)
    tokens: list[int] = []
    for start in range(0, len(values), size):
        part = slice(start, start + size)
        place = place_from(logits.place, start)
        probabilities = probabilities_of(sampler, values[part], histories and histories[part], place)
        tokens += unchecked_transform(probabilities, numbers[part]).tolist()
    return tokens
