"""Hostile GGUF files for fuzz.py: a valid file is split into its entries, edited, and joined again."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fuzz_inputs import WORDS, fractions
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gguf_reference import Reader

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # type of number -> bytes
STRING, ARRAY, ALIGNMENT = 8, 9, 32


@dataclass(frozen=True)
class Entry:
    """A key with its type and its value as stored."""

    key: bytes
    kind: int
    payload: bytes


@dataclass(frozen=True)
class Tensor:
    """A tensor of the list: name, lengths, type and offset."""

    name: bytes
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class Parts:
    """A file in parts. `counts` replace the true numbers of tensors and keys in its head."""

    entries: tuple[Entry, ...]
    tensors: tuple[Tensor, ...]
    data: bytes
    version: int = 3
    counts: tuple[int | None, int | None] = (None, None)

    def bytes(self) -> bytes:
        """Return the file."""
        tensors, keys = (
            len(own) if claimed is None else claimed
            for own, claimed in zip((self.tensors, self.entries), self.counts, strict=True)
        )
        found = [b"GGUF", struct.pack("<IQQ", self.version, tensors, keys)]
        for entry in self.entries:
            found += [text(entry.key), struct.pack("<I", entry.kind), entry.payload]
        for one in self.tensors:
            lengths = struct.pack(f"<I{len(one.shape)}Q", len(one.shape), *one.shape)
            found += [text(one.name), lengths, struct.pack("<IQ", one.kind, one.offset)]
        head = b"".join(found)
        return head + bytes(-len(head) % ALIGNMENT) + self.data


def text(data: bytes) -> bytes:
    """Return a string as GGUF stores it."""
    return struct.pack("<Q", len(data)) + data


def take_apart(path: Path) -> tuple[Parts, int]:
    """Return the parts of a valid file of version 3, and the size of its head."""
    file = Reader(path)
    _, tensors, keys = file.numbers("IQQ")
    entries = []
    for _ in range(keys):
        key, begin = file.text(), file.at
        file.field()
        value = file.data[begin : file.at]
        entries.append(Entry(key.encode(), int.from_bytes(value[:4], "little"), value[4:]))
    listed = [Tensor(name.encode(), *rest) for name, *rest in (file.tensor() for _ in range(tensors))]
    head = file.at + -file.at % ALIGNMENT
    return Parts(tuple(entries), tuple(listed), file.data[head:]), head


@st.composite
def payloads(draw: Callable[..., Any]) -> tuple[int, bytes]:
    """Return a type and a value of it, or a value that does not fit it."""
    kind = draw(st.sampled_from([4, 4, 5, 6, 6, 7, 10, 11, 12, 0, 3, STRING, ARRAY, 13, 2**31]))
    word = draw(st.sampled_from(WORDS))
    if kind in (6, 12):
        number = draw(st.sampled_from([0.0, -1.0, 1e-30, 1e30, float("nan"), float("inf"), 1.5]))
        return kind, struct.pack("<f" if kind == 6 else "<d", number)
    if kind == STRING:
        data = draw(st.one_of(st.binary(max_size=12), st.sampled_from([b"llama", b"gpt2", b"bert", b"x" * 5000])))
        return kind, text(data)
    if kind == ARRAY:
        inner = draw(st.sampled_from([4, 5, 6, STRING, ARRAY, 0, 99]))
        count = draw(st.sampled_from([0, 1, 3, 400, 2**20, 2**32, 2**61, 2**64 - 1]))
        return kind, struct.pack("<IQ", inner, count) + draw(st.binary(max_size=40))
    return kind, word.to_bytes(8, "little")[: SIZES.get(kind, 8)]


LENGTHS = [0, 1, 2, 31, 32, 63, 64, 65, 128, 400, 401, 2**16, 2**31, 2**32, 2**40, 2**62, 2**63, 2**64 - 1]


@st.composite
def hostile(draw: Callable[..., Any], base: Parts) -> bytes:
    """Return a file with one to three edits of entries, tensors or counts."""
    found = base
    for _ in range(draw(st.integers(1, 3))):
        edit, place = draw(st.integers(0, 13)), draw(fractions)
        entries, tensors = list(found.entries), list(found.tensors)
        number = place % max(1, len(entries) if edit < 7 else len(tensors))
        if edit < 7 and entries:
            old = entries[number]
            if edit <= 3:  # another value, mostly of the same type
                kind, payload = draw(payloads())
                if edit == 3 or old.kind not in SIZES:
                    entries[number] = replace(old, kind=kind, payload=payload)
                else:
                    word = draw(st.sampled_from(WORDS)).to_bytes(8, "little") * 1
                    entries[number] = replace(old, payload=word[: SIZES[old.kind]])
            elif edit == 4:
                del entries[number]
            elif edit == 5:
                other = entries[draw(fractions) % len(entries)]
                entries[number] = replace(old, kind=other.kind, payload=other.payload)
            else:
                raw = bytearray(old.payload)
                for _ in range(draw(st.integers(1, 8)) if raw else 0):
                    raw[draw(fractions) % len(raw)] = draw(st.integers(0, 255))
                entries[number] = replace(old, payload=bytes(raw))
        elif edit < 12 and tensors:
            old_tensor = tensors[number]
            if edit <= 8:
                shape = list(old_tensor.shape) or [1]
                shape[draw(fractions) % len(shape)] = draw(st.sampled_from(LENGTHS))
                shape *= draw(st.sampled_from([1, 1, 1, 0, 2, 5]))
                tensors[number] = replace(old_tensor, shape=tuple(shape))
            elif edit == 9:
                tensors[number] = replace(old_tensor, kind=draw(st.integers(0, 45) | st.sampled_from(WORDS[4:])))
            elif edit == 10:
                offset = old_tensor.offset + draw(st.sampled_from([1, 32, -32, 2**31, 2**40, 2**62]))
                tensors[number] = replace(old_tensor, offset=offset % 2**64)
            else:
                other_tensor = tensors[draw(fractions) % len(tensors)]
                tensors[number] = replace(old_tensor, name=draw(st.sampled_from([other_tensor.name, b"x", b""])))
            if draw(st.integers(0, 9)) == 0:
                del tensors[number]
        elif edit == 12:
            counts = [*found.counts]
            counts[place % 2] = draw(st.sampled_from([*WORDS[:-2], 30]))
            found = replace(found, counts=(counts[0], counts[1]))
        else:
            found = replace(found, version=draw(st.sampled_from([0, 1, 2, 3, 4, 0x03000000])))
        if draw(st.integers(0, 19)) == 0:
            raw = bytearray(found.data)
            raw[place * 7919 % max(1, len(raw)) :] = b"\xff" * draw(st.integers(0, 64))
            found = replace(found, data=bytes(raw))
        tensors = [replace(one, kind=one.kind % 2**32) for one in tensors]
        entries = [replace(one, kind=one.kind % 2**32) for one in entries]
        found = replace(found, entries=tuple(entries), tensors=tuple(tensors))
    return found.bytes()
