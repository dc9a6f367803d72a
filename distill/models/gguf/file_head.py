"""The head of a GGUF file, its metadata and list of tensors, read without llama.cpp and without weights."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from distill.errors import DataError

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


class FileHead:
    """The head of a GGUF file, read in order: metadata and the list of tensors.

    gguf.GGUFReader makes arrays of every string, seconds for a real vocabulary, and can read on past the end of a
    damaged file. Format: ggml's docs/gguf.md, versions 2 and 3.

    `shapes`, `kinds` and `offsets` are of the tensors by name: lengths with the fastest first, the number of a
    gguf.GGMLQuantizationType, and the first byte behind `start`, where the tensors' data begins.
    """

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0
        if data[:4] != b"GGUF":
            raise ValueError("it is not a GGUF file")
        self.at = 4
        version = self.number("I")
        if version not in (2, 3):
            raise ValueError("it is big-endian" if version & 0xFFFF == 0 else f"its version {version} is not 2 or 3")
        tensors, keys = self.number("Q"), self.number("Q")
        self.values = {self.text().decode("utf-8", "replace"): self.value(self.number("I")) for _ in range(keys)}
        self.shapes: dict[str, list[int]] = {}
        self.kinds: dict[str, int] = {}
        self.offsets: dict[str, int] = {}
        end = 0
        for _ in range(tensors):
            name = self.text().decode("utf-8", "replace")
            shape = list(self.numbers("Q", self.number("I")))
            kind, offset = self.number("I"), self.number("Q")
            self.shapes[name], self.kinds[name], self.offsets[name] = shape, kind, offset
            end = max(end, offset + _tensor_bytes(shape, kind))
        align = self.values.get("general.alignment", 32)
        if not isinstance(align, int) or align < 1:
            raise ValueError(f"general.alignment is {align!r}")
        self.require(-self.at % align + end if tensors else 0)
        self.start = self.at + -self.at % align

    def require(self, count: int) -> None:
        """Raise ValueError when fewer than `count` bytes are left."""
        if self.at + count > len(self.data):
            raise ValueError(f"it ends after {len(self.data)} bytes where it needs {self.at + count}")

    def number(self, code: str) -> Any:
        return self.numbers(code, 1)[0]

    def numbers(self, code: str, count: int) -> tuple[Any, ...]:
        size = struct.calcsize(f"<{code}") * count
        self.require(size)
        found = struct.unpack_from(f"<{count}{code}", self.data, self.at)
        self.at += size
        return found

    def text(self) -> bytes:
        size = self.number("Q")
        self.require(size)
        self.at += size
        return self.data[self.at - size : self.at]

    def value(self, kind: int) -> Any:
        """A value of GGUF's type `kind`: a number, bytes, or a list of either."""
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            inner, count = self.number("I"), self.number("Q")
            if inner in SCALARS:
                return list(self.numbers(SCALARS[inner], count))
            if inner == STRING:
                return [self.text() for _ in range(count)]
            kind = inner
        raise ValueError(f"value type {kind} at byte {self.at} is unknown")


def _tensor_bytes(shape: list[int], kind: int) -> int:
    """Bytes of a tensor's data; 0 for types that the gguf package does not know yet."""
    import gguf

    try:
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        return 0
    count = 1
    for length in shape:
        count *= length
    return int(count // block * size)


def open_head(path: Path) -> FileHead:
    """The head of a GGUF file; raises DataError where the file is missing, damaged or cut short."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return FileHead(data)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", "give a GGUF file") from None
    except (ValueError, OverflowError, MemoryError, struct.error) as error:
        raise DataError(f"{path} cannot be read as GGUF: {error}", "copy or export the file again") from None
