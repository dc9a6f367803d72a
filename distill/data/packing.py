"""Token sequences packed into blocks, whose document borders attention and losses respect.

Legend: n blocks, S positions per block, N scored positions.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy
import torch
from torch import Tensor

from distill.data.samples import SEEN, repetition
from distill.engines.torch.blocks import PADDING, Packed

READ = 1024  # Blocks that are in memory at once while all of them are read.

# The tokens of a sequence that are scored: all from an index on, or those of spans (first, behind the last).
Scored = int | Sequence[tuple[int, int]]
Text = tuple[Sequence[int] | Any, Scored]  # ids, a list or an array, and those that are scored


def pack(sequences: Iterable[Text], block: int, split_long: bool, opening: Sequence[int] = ()) -> Packed:
    """Pack sequences, in the order given, into blocks of `block` positions.

    A sequence's first token is never scored. With `split_long` one that does not fit continues in the next block as a
    new document, which begins with `opening` (a text's bos), and is scored from an index on; otherwise it moves there
    whole, and must be no longer than a block.
    """
    rows: list[list[Text]] = []
    begun = []  # the number of each row's first document
    room = 0
    for number, (ids, scored) in enumerate(sequence for sequence in sequences if len(sequence[0])):
        start = 0
        while start < len(ids):
            left = len(ids) - start
            if room < 2 or (left > room and not split_long):
                assert split_long or left <= block, "a sequence is longer than a block"
                rows.append([])
                begun.append(number)
                room = block
            before = list(opening) if start else []
            piece = [*before, *ids[start : start + room - len(before)]] if split_long else ids
            rows[-1].append((piece, len(before) + max(1, scored - start) if isinstance(scored, int) else scored))
            room -= len(piece)
            start += len(piece) - len(before)
    return pack_rows(rows, block, begun)


def pack_rows(rows: Sequence[Sequence[Text]], block: int, first: Sequence[int]) -> Packed:
    """Blocks of these sequences each, whole; `first` numbers the first of each."""
    n = len(rows)
    ids = numpy.zeros((n, block), numpy.int32)
    documents = numpy.full((n, block), PADDING, numpy.int32)
    mask = numpy.zeros((n, block), bool)
    for index, row in enumerate(rows):
        at = 0
        for document, (piece, scored) in enumerate(row):
            end = at + len(piece)
            ids[index, at:end] = piece
            documents[index, at:end] = document
            for start, behind in [(scored, len(piece))] if isinstance(scored, int) else scored:
                mask[index, at + max(1, start) - 1 : at + behind - 1] = True
            at = end
    packed = Packed(torch.from_numpy(ids), torch.from_numpy(documents), torch.from_numpy(mask))
    return replace(packed, first=torch.tensor(first, dtype=torch.int64))


@dataclass(frozen=True)
class Deferred:
    """`count` blocks that are made where they are taken: `read` makes those of some numbers, `counted` the scored
    positions of each [n]."""

    count: int
    read: Callable[[list[int]], Packed]
    counted: Callable[[], Tensor]

    def __len__(self) -> int:
        return self.count

    @property
    def scored(self) -> Tensor:
        """As of Packed."""
        return self.counted()

    def take(self, index: Tensor | slice) -> Packed:
        """As of Packed."""
        return self.read(torch.arange(self.count)[index].tolist())

    def before(self, text: Packed) -> Deferred:
        """These blocks, and those of a text behind them; taken in ascending order, and their documents not numbered."""

        def read(numbers: list[int]) -> Packed:
            own = bisect_left(numbers, self.count)
            parts = self.read(numbers[:own]), text.take(torch.tensor(numbers[own:], dtype=torch.int64) - self.count)
            return concatenate([replace(part, first=None) for part in parts if len(part)] or [text.take(slice(0, 0))])

        return Deferred(self.count + len(text), read, lambda: torch.cat([self.scored, text.scored]))


Blocks = Packed | Deferred


def token_ids(blocks: Blocks, vocabulary: int) -> Tensor:
    """The ids that occur in blocks, ascending."""
    seen = torch.zeros(vocabulary, dtype=torch.bool)
    for start in range(0, len(blocks), READ):
        seen[blocks.take(slice(start, start + READ)).ids.long()] = True
    return seen.nonzero().squeeze(-1)


def scored_documents(blocks: Packed) -> Iterator[tuple[int, int, Tensor]]:
    """Each document that has scored positions: its block's index, its number there and those positions [S], boolean."""
    for block in range(len(blocks)):
        for number in blocks.documents[block][blocks.mask[block]].unique().tolist():
            yield block, number, blocks.mask[block] & (blocks.documents[block] == number)


def repeated_next(blocks: Packed) -> Tensor:
    """Of each scored position [N], in order, whether the token that it predicts is repeated in its document."""
    found = torch.zeros_like(blocks.mask)
    for block, document, _ in scored_documents(blocks):
        own = (blocks.documents[block] == document).nonzero()[:, 0]
        labels = repetition(blocks.ids[block][own].tolist())
        found[block][own[:-1]] = torch.tensor([label == SEEN for label in labels[1:]], dtype=torch.bool)
    return found[blocks.mask]


def fitted_rows(lengths: Sequence[int], block: int) -> list[list[int]]:
    """Whole sequences in blocks that they fill nearly: the longest first, each into the fullest block that still has
    room, of equal ones the first (best fit decreasing)."""
    rooms: list[tuple[int, int]] = []  # of the blocks begun: positions left, number; ascending
    rows: list[list[int]] = []
    order: list[int] = numpy.argsort(-numpy.asarray(lengths, int), kind="stable").tolist()
    for index in order:
        at = bisect_left(rooms, (lengths[index], 0))
        room, row = rooms.pop(at) if at < len(rooms) else (block, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        if room - lengths[index] >= lengths[order[-1]]:  # else nothing fits any more
            insort(rooms, (room - lengths[index], row))
    return rows


Turn = tuple[Any, Any]  # the ids of a prompt and of its answer, lists or arrays


def joined_turns(count: int, turn: Callable[[int], Turn]) -> list[list[int]]:
    """Numbers of answers in their order, put together where the next one's prompt begins with all that came before, as
    the turns of a conversation do whose template keeps what was said: the last one's text holds all of them."""
    texts: list[list[int]] = []
    before, answer = (), ()  # of the last one
    for number in range(count):
        prompt, following = turn(number)
        end = len(before) + len(answer)
        goes_on = len(answer) and end <= len(prompt) and numpy.array_equal(prompt[len(before) : end], answer)
        if goes_on and numpy.array_equal(prompt[: len(before)], before):
            texts[-1].append(number)
        else:
            texts.append([number])
        before, answer = prompt, following
    return texts


def planned(turns: Callable[[int], Turn], count: int, block: int) -> tuple[Deferred, list[list[list[int]]]]:
    """Blocks of `count` answers behind their prompts, which are not scored; and the numbers of the answers that each
    document of each block holds, in order."""
    texts = joined_turns(count, turns)
    rows = fitted_rows([sum(map(len, turns(own[-1]))) for own in texts], block)
    ordered = [[texts[one] for one in row] for row in rows]
    first = [*accumulate(map(len, rows), initial=0)]

    def text(own: list[int]) -> Text:
        parts = [turns(one) for one in own]
        return numpy.concatenate(parts[-1]), [(len(prompt), len(prompt) + len(answer)) for prompt, answer in parts]

    def read(numbers: list[int]) -> Packed:
        return pack_rows([[*map(text, ordered[one])] for one in numbers], block, [first[one] for one in numbers])

    def counted() -> Tensor:
        counts = [len(answer) - (not len(prompt)) for prompt, answer in map(turns, range(count))]
        return torch.tensor([sum(counts[one] for own in row for one in own) for row in ordered], dtype=torch.int64)

    return Deferred(len(rows), read, counted), ordered


def concatenate(parts: list[Packed]) -> Packed:
    """The blocks of several packs of the same width, in order; numbered on from pack to pack where all are."""
    columns = zip(*(part.tensors().values() for part in parts), strict=True)
    joined = Packed(*map(torch.cat, columns))
    first: list[Tensor] = []
    start = 0
    for part in parts:
        if part.first is None:
            return joined
        first.append(part.first + start)
        if len(part):
            start += int(part.first[-1]) + int(part.documents[-1].max()) + 1
    return replace(joined, first=torch.cat(first))
