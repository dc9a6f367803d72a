"""Token sequences packed into blocks, with document borders that attention and losses respect.

Legend: n blocks, S positions per block.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from distill.errors import DataError

PADDING = -1  # document number of positions that hold no token


@dataclass(frozen=True)
class Packed:
    """Blocks of documents.

    ids [n, S]; documents [n, S], numbered within the block, -1 at padding; positions [n, S], from 0 in each
    document; mask [n, S], true where the distribution of the *next* token counts; that token is at the next
    position. first [n] is the number of each block's first document among all documents: document d of block b has
    number first[b] + d, also where it continues in the next block. None where nobody needs it.
    """

    ids: Tensor
    documents: Tensor
    positions: Tensor
    mask: Tensor
    first: Tensor | None = None

    def __len__(self) -> int:
        return self.ids.shape[0]

    def take(self, index: Tensor | slice) -> Packed:
        """The blocks at `index`."""
        first = None if self.first is None else self.first[index]
        return Packed(self.ids[index], self.documents[index], self.positions[index], self.mask[index], first)

    def labels(self) -> Tensor:
        """The next token [n, S]; meaningless where `mask` is false."""
        return torch.roll(self.ids, -1, dims=1)

    def number(self, block: int, document: int) -> int:
        """The number of a block's document among all; DataError for blocks that do not number their documents."""
        if self.first is None:
            raise DataError("these blocks do not number their documents", "make them again: `--redo corpus`")
        return int(self.first[block]) + document

    def tensors(self) -> dict[str, Tensor]:
        """As named tensors, for safetensors files; without `first`, which training does not read."""
        return {"ids": self.ids, "documents": self.documents, "positions": self.positions, "mask": self.mask}

    def save(self, path: Path, numbered: bool = False) -> None:
        """Write a safetensors file; `numbered`: with `first`."""
        from safetensors.torch import save_file

        more = {"first": self.first} if numbered and self.first is not None else {}
        save_file({name: value.contiguous() for name, value in {**self.tensors(), **more}.items()}, str(path))

    @classmethod
    def load(cls, path: Path) -> Packed:
        """Read what `save` wrote."""
        from safetensors.torch import load_file

        found = load_file(str(path))
        return cls(found["ids"], found["documents"], found["positions"], found["mask"], found.get("first"))


def pack(sequences: Iterable[tuple[list[int], int]], block: int, split_long: bool) -> Packed:
    """Pack sequences, in the order given, into blocks of `block` positions.

    Each sequence is (ids, first): its tokens from index `first` on (at least 1) are scored. With `split_long` a
    sequence that does not fit continues in the next block as a new document; otherwise it moves there whole, and must
    be no longer than a block.
    """
    rows: list[list[tuple[list[int], int]]] = []
    begun = []  # the number of each row's first document
    room = 0
    for number, (ids, first) in enumerate(sequence for sequence in sequences if sequence[0]):
        start = 0
        while start < len(ids):
            left = len(ids) - start
            if room < 2 or (left > room and not split_long):
                assert split_long or left <= block, "a sequence is longer than a block"
                rows.append([])
                begun.append(number)
                room = block
            piece = ids[start : start + room]
            rows[-1].append((piece, max(1, first - start)))
            room -= len(piece)
            start += len(piece)
    n = len(rows)
    packed = Packed(
        torch.zeros(n, block, dtype=torch.int32),
        torch.full((n, block), PADDING, dtype=torch.int32),
        torch.zeros(n, block, dtype=torch.int32),
        torch.zeros(n, block, dtype=torch.bool),
        torch.tensor(begun, dtype=torch.int64),
    )
    for index, row in enumerate(rows):
        at = 0
        for document, (piece, first) in enumerate(row):
            end = at + len(piece)
            packed.ids[index, at:end] = torch.tensor(piece, dtype=torch.int32)
            packed.documents[index, at:end] = document
            packed.positions[index, at:end] = torch.arange(len(piece), dtype=torch.int32)
            packed.mask[index, at + first - 1 : end - 1] = True
            at = end
    return packed


def scored_documents(blocks: Packed) -> Iterator[tuple[int, int, Tensor]]:
    """Each document that has scored positions: its block's index, its number there and those positions [S], boolean."""
    for block in range(len(blocks)):
        for number in blocks.documents[block][blocks.mask[block]].unique().tolist():
            yield block, number, blocks.mask[block] & (blocks.documents[block] == number)


def fitted_order(lengths: Sequence[int], block: int) -> list[int]:
    """The order of whole sequences in which `pack` fills blocks nearly whole: the longest first, each into the fullest
    block that still has room (best fit decreasing)."""
    rooms: list[tuple[int, int]] = []  # of the blocks begun: positions left, number; ascending
    rows: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        at = bisect_left(rooms, (lengths[index], 0))
        room, row = rooms.pop(at) if at < len(rooms) else (block, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        insort(rooms, (room - lengths[index], row))
    return [index for row in rows for index in row]


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


def attention_mask(documents: Tensor) -> Tensor:
    """Boolean [n, 1, S, S], true where a position may attend: to itself and earlier ones of the same document.

    Explicit, because packed position ids alone isolate documents only on some paths of transformers. Padding positions
    attend to themselves, so that no softmax is empty.
    """
    width = documents.shape[1]
    same = documents.unsqueeze(2) == documents.unsqueeze(1)
    causal = torch.ones(width, width, dtype=torch.bool, device=documents.device).tril()
    return (same & causal).unsqueeze(1)


def epoch_order(count: int, seed: int, epoch: int) -> Tensor:
    """The order [count] in which an epoch visits the blocks: a pure function, so that a resume can seek."""
    mixed = int.from_bytes(hashlib.sha256(f"{seed}/{epoch}".encode()).digest()[:7], "big")
    return torch.randperm(count, generator=torch.Generator().manual_seed(mixed))
