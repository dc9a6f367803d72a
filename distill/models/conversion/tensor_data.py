"""The data of a GGUF file's tensors: read, converted and written in parts by a few threads."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distill.errors import DataError
from distill.models.conversion.tensors import GgufTensor
from distill.models.tensor_files import Floats, from_floats, to_floats
from distill.progress import Progress

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

F16_MAX = 65504.0
PART_VALUES = 2**21  # converted at a time, when written by each thread
REPORTED_VALUES = 2**28  # below, a file is written too fast for lines of progress
_SEEKING = threading.Lock()
EXPONENTS = {"F16": 0x7C00, "BF16": 0x7F80}  # all set: infinity or NaN


class Output(NamedTuple):
    """A file that is written: the type and the bytes of each tensor, in order."""

    file: BinaryIO
    types: list[GGMLQuantizationType]
    sizes: list[int]


class _Place(NamedTuple):
    """Where rows go: the file, its type for them, and their first byte."""

    descriptor: int
    kind: GGMLQuantizationType
    first_byte: int


class _Part(NamedTuple):
    """Rows of a tensor, read once for all the files that they are written to."""

    tensor: GgufTensor
    first: int
    rows: int
    places: list[_Place]

    @property
    def values(self) -> int:
        """Number of values, counted once for each file."""
        return len(self.places) * self.rows * _width(self.tensor)


def write_tensors(tensors: list[GgufTensor], outputs: Sequence[Output]) -> None:
    """Write the tensors to each file from its position on, each padded to GGUF's alignment.

    Raises DataError for values that are not finite or too large for a type, OSError for a full disk.
    """
    starts = [output.file.tell() for output in outputs]
    parts = list(_parts(tensors, outputs, starts))
    for output, start in zip(outputs, starts, strict=True):
        os.ftruncate(output.file.fileno(), start + sum(_padded(size) for size in output.sizes))
    progress = ValuesProgress(sum(part.values for part in parts))
    workers = min(4, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool:
        waiting: deque[tuple[Future[None], _Part]] = deque()
        try:
            for part in parts:
                waiting.append((pool.submit(_write_part, part), part))
                while len(waiting) > (2 * workers if part is not parts[-1] else 0):
                    future, done = waiting.popleft()
                    future.result()
                    progress.add(done.values)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


class ValuesProgress:
    """Lines of progress in millions of values; none for a file that is written too fast for them."""

    def __init__(self, total: int) -> None:
        self._done = 0
        self._lines = Progress("million values", max(1, total // 10**6)) if total > REPORTED_VALUES else None

    def add(self, count: int) -> None:
        """Count so many values more."""
        before, self._done = self._done // 10**6, self._done + count
        if self._lines is not None and self._done // 10**6 > before:
            self._lines.step(self._done // 10**6 - before)


def _padded(size: int) -> int:
    import gguf

    return int(size + -size % gguf.GGUF_DEFAULT_ALIGNMENT)


def _width(tensor: GgufTensor) -> int:
    return int(np.prod(tensor.shape[1:], dtype=np.int64))


def _parts(tensors: list[GgufTensor], outputs: Sequence[Output], starts: list[int]) -> Iterator[_Part]:
    starts = list(starts)
    for index, tensor in enumerate(tensors):
        rows = tensor.shape[0]
        step = rows if tensor.whole else max(1, PART_VALUES // _width(tensor))
        for first in range(0, rows, step):
            places = [
                _Place(output.file.fileno(), output.types[index], start + first * (output.sizes[index] // rows))
                for output, start in zip(outputs, starts, strict=True)
            ]
            yield _Part(tensor, first, min(step, rows - first), places)
        starts = [start + _padded(output.sizes[index]) for output, start in zip(outputs, starts, strict=True)]


def _write_part(part: _Part) -> None:
    tensor = part.tensor
    floats = cache(lambda: np.ascontiguousarray(tensor.read(part.first, part.rows)))
    bits = cache(lambda: None if tensor.bits is None else tensor.bits(part.first, part.rows))
    for place in part.places:
        halves = _halves(tensor.dtype, place.kind, bits, floats) if place.kind.name in EXPONENTS else None
        data = (_converted(tensor.name, place.kind, floats()) if halves is None else halves).data.cast("B")
        at = place.first_byte
        while data:
            written = _write_at(place.descriptor, data, at)
            data, at = data[written:], at + written


def _write_at(descriptor: int, data: memoryview, at: int) -> int:
    """The bytes written of those given, from byte `at` of a file that several threads write to."""
    if hasattr(os, "pwrite"):
        return os.pwrite(descriptor, data, at)
    with _SEEKING:  # Windows writes only where the file stands
        os.lseek(descriptor, at, os.SEEK_SET)
        return os.write(descriptor, data)


def _halves(
    dtype: str,
    kind: GGMLQuantizationType,
    bits: Callable[[], NDArray[np.uint16] | None],
    floats: Callable[[], Floats],
) -> NDArray[np.uint16] | None:
    """Values of one 16-bit type in another; None where that needs fp32, or where one of them is not finite."""
    stored = bits()
    if stored is None:
        return None
    if dtype == kind.name:
        halves = stored
    else:
        halves = _bf16_as_f16()[stored] if kind.name == "F16" else from_floats(floats(), "BF16")
    exponent = EXPONENTS[kind.name]
    # Values that are not finite go through fp32, whose checks name them.
    return None if ((halves & exponent) == exponent).any() else halves


def _converted(name: str, kind: GGMLQuantizationType, floats: Floats) -> NDArray[np.uint8]:
    from gguf import quants

    _require_range(name, floats, kind)
    return np.ascontiguousarray(quants.quantize(floats, kind)).view(np.uint8)


@cache
def _bf16_as_f16() -> NDArray[np.uint16]:
    """f16 for each of the 65,536 bf16 values, as bits: the rounding of numpy, looked up."""
    return from_floats(to_floats(np.arange(2**16), "BF16"), "F16").view(np.uint16)


def _require_range(name: str, array: Floats, kind: GGMLQuantizationType) -> None:
    """DataError for values that overflow a type; the scales of blocks are f16, and a part of the largest value."""
    if kind.name in ("F32", "BF16"):
        return
    limit = F16_MAX * {"Q8_0": 127, "Q4_0": 8, "Q5_0": 16}.get(kind.name, 1)
    largest = max(float(array.max()), -float(array.min()))
    if largest > limit:
        raise DataError(f"{name} reaches {largest:.3g}, too large for {kind.name}", hint="export as bf16 or f32")
