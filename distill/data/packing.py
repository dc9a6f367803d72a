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

# The scored tokens of a sequence: all tokens from an index on, or spans (first token, token after the last).
Scored = int | Sequence[tuple[int, int]]
Text = tuple[Sequence[int] | Any, Scored]  # ids as a list or an array, and the scored tokens


def pack(sequences: Iterable[Text], block: int, split_long: bool, opening: Sequence[int] = ()) -> Packed:
    """Pack sequences in their order into blocks of `block` positions.

    A sequence's first token is never scored. With `split_long`, a sequence that does not fit continues in the next
    block as a new document, which begins with `opening` (a text's bos token). Such a sequence is scored from an index
    on. Without `split_long`, a sequence that does not fit moves to the next block, and must fit there.
    """
    rows: list[list[Text]] = []
    first = []  # the number of each row's first document
    room = 0
    for number, (ids, scored) in enumerate(sequence for sequence in sequences if len(sequence[0])):
        start = 0
        while start < len(ids):
            left = len(ids) - start
            if room < 2 or (left > room and not split_long):
                assert split_long or left <= block, "a sequence is longer than a block"
                rows.append([])
                first.append(number)
                room = block
            before = list(opening) if start else []
            piece = [*before, *ids[start : start + room - len(before)]] if split_long else ids
            rows[-1].append((piece, len(before) + max(1, scored - start) if isinstance(scored, int) else scored))
            room -= len(piece)
            start += len(piece) - len(before)
    return pack_rows(rows, block, first)


def pack_rows(rows: Sequence[Sequence[Text]], block: int, first: Sequence[int]) -> Packed:
    """A block of whole sequences for each row. `first` has the number of each row's first sequence."""
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
            for start, stop in [(scored, len(piece))] if isinstance(scored, int) else scored:
                mask[index, at + max(1, start) - 1 : at + stop - 1] = True
            at = end
    packed = Packed(torch.from_numpy(ids), torch.from_numpy(documents), torch.from_numpy(mask))
    return replace(packed, first=torch.tensor(first, dtype=torch.int64))


@dataclass(frozen=True)
class Deferred:
    """`count` blocks that are made when they are taken.

    `read` makes the blocks of some numbers. `counted` returns the number of scored positions of each block [n].
    """

    count: int
    read: Callable[[list[int]], Packed]
    counted: Callable[[], Tensor]

    def __len__(self) -> int:
        return self.count

    @property
    def scored(self) -> Tensor:
        """See Packed."""
        return self.counted()

    def take(self, index: Tensor | slice) -> Packed:
        """See Packed."""
        return self.read(torch.arange(self.count)[index].tolist())

    def before(self, text: Packed) -> Deferred:
        """These blocks, then those of a text. They are taken in ascending order, without numbers of documents."""

        def read(numbers: list[int]) -> Packed:
            split = bisect_left(numbers, self.count)
            after = torch.tensor(numbers[split:], dtype=torch.int64) - self.count
            parts = self.read(numbers[:split]), text.take(after)
            return concatenate([replace(part, first=None) for part in parts if len(part)] or [text.take(slice(0, 0))])

        return Deferred(self.count + len(text), read, lambda: torch.cat([self.scored, text.scored]))


Blocks = Packed | Deferred


def token_ids(blocks: Blocks, vocabulary: int) -> Tensor:
    """The ids in blocks, ascending."""
    seen = torch.zeros(vocabulary, dtype=torch.bool)
    for start in range(0, len(blocks), READ):
        seen[blocks.take(slice(start, start + READ)).ids.long()] = True
    return seen.nonzero().squeeze(-1)


def scored_documents(blocks: Packed) -> Iterator[tuple[int, int, Tensor]]:
    """Each document with scored positions: its block's index, its number there, and a mask [S] of the positions."""
    for block in range(len(blocks)):
        for number in blocks.documents[block][blocks.mask[block]].unique().tolist():
            yield block, number, blocks.mask[block] & (blocks.documents[block] == number)


def repeated_next(blocks: Packed) -> Tensor:
    """Whether the token after each scored position [N] is repeated in its document."""
    repeated = torch.zeros_like(blocks.mask)
    for block, document, _ in scored_documents(blocks):
        places = (blocks.documents[block] == document).nonzero()[:, 0]
        labels = repetition(blocks.ids[block][places].tolist())
        repeated[block][places[:-1]] = torch.tensor([label == SEEN for label in labels[1:]], dtype=torch.bool)
    return repeated[blocks.mask]


def fitted_rows(lengths: Sequence[int], block: int) -> list[list[int]]:
    """Assign whole sequences to nearly full blocks (best fit decreasing). Returns the sequences of each block.

    The longest sequence comes first. Each goes to the fullest block with enough room, or to the first of equal ones.
    """
    rooms: list[tuple[int, int]] = []  # the free positions and the number of each open block, ascending
    rows: list[list[int]] = []
    order: list[int] = numpy.argsort(-numpy.asarray(lengths, int), kind="stable").tolist()
    for index in order:
        at = bisect_left(rooms, (lengths[index], 0))
        room, row = rooms.pop(at) if at < len(rooms) else (block, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        if room - lengths[index] >= lengths[order[-1]]:  # Otherwise no sequence fits any more.
            insort(rooms, (room - lengths[index], row))
    return rows


Turn = tuple[Any, Any]  # the ids of a prompt and of its answer, as lists or arrays


def joined_turns(count: int, turn: Callable[[int], Turn]) -> list[list[int]]:
    """Group the numbers of answers in their order. The last answer's text holds all answers of its group.

    An answer joins a group if its prompt begins with the group's whole text. In a conversation this is so if the chat
    template keeps earlier turns unchanged.
    """
    texts: list[list[int]] = []
    before, answer = (), ()  # the last prompt and its answer
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
    """Pack `count` prompts with their answers into blocks. Only the tokens of the answers are scored.

    Returns the blocks, and the numbers of the answers in each document of each block, in order.
    """
    texts = joined_turns(count, turns)
    rows = fitted_rows([sum(map(len, turns(text[-1]))) for text in texts], block)
    documents = [[texts[number] for number in row] for row in rows]
    first = [*accumulate(map(len, rows), initial=0)]

    def text_of(document: list[int]) -> Text:
        parts = [turns(number) for number in document]
        return numpy.concatenate(parts[-1]), [(len(prompt), len(prompt) + len(answer)) for prompt, answer in parts]

    def read(blocks: list[int]) -> Packed:
        return pack_rows([[*map(text_of, documents[row])] for row in blocks], block, [first[row] for row in blocks])

    def counted() -> Tensor:
        counts = [len(answer) - (not len(prompt)) for prompt, answer in map(turns, range(count))]
        sums = [sum(counts[number] for document in row for number in document) for row in documents]
        return torch.tensor(sums, dtype=torch.int64)

    return Deferred(len(rows), read, counted), documents


def concatenate(parts: list[Packed]) -> Packed:
    """The blocks of several packs of one width, in order. Documents are numbered on if those of all packs are."""
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
