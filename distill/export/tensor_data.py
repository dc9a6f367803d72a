"""The data of a GGUF file's tensors: read, converted and written in parts by a few threads."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distill.errors import DataError
from distill.export.tensors import Floats, GgufTensor
from distill.progress import Progress

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

F16_MAX = 65504.0
PART_VALUES = 2**21  # converted at a time by each thread
REPORTED_VALUES = 2**28  # below, a file is written too fast for lines of progress
EXPONENTS = {"F16": 0x7C00, "BF16": 0x7F80}  # all set: infinity or NaN


class _Part(NamedTuple):
    """Rows of a tensor, and the byte of the file where they go."""

    tensor: GgufTensor
    kind: GGMLQuantizationType
    first: int
    rows: int
    place: int


def write_tensors(
    file: BinaryIO, tensors: list[GgufTensor], types: list[GGMLQuantizationType], sizes: list[int]
) -> None:
    """Write the tensors from the file's position on, each padded to GGUF's alignment.

    Raises DataError for values that are not finite or too large for their type, OSError for a full disk.
    """
    start = file.tell()
    parts = list(_parts(tensors, types, sizes, start))
    os.ftruncate(file.fileno(), start + sum(_padded(size) for size in sizes))
    values = sum(part.rows * _width(part.tensor) for part in parts)
    progress = Progress("million values", max(1, values // 10**6)) if values > REPORTED_VALUES else None
    workers = min(4, os.cpu_count() or 1)
    done = 0
    with ThreadPoolExecutor(workers) as pool:
        waiting: deque[tuple[Future[None], int]] = deque()
        try:
            for part in parts:
                waiting.append((pool.submit(_write_part, file.fileno(), part), part.rows * _width(part.tensor)))
                while len(waiting) > (2 * workers if part is not parts[-1] else 0):
                    future, count = waiting.popleft()
                    future.result()
                    before, done = done // 10**6, done + count
                    if progress is not None and done // 10**6 > before:
                        progress.step(done // 10**6 - before)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _padded(size: int) -> int:
    import gguf

    return int(size + -size % gguf.GGUF_DEFAULT_ALIGNMENT)


def _width(tensor: GgufTensor) -> int:
    return int(np.prod(tensor.shape[1:], dtype=np.int64))


def _parts(
    tensors: list[GgufTensor], types: list[GGMLQuantizationType], sizes: list[int], start: int
) -> Iterator[_Part]:
    for tensor, kind, size in zip(tensors, types, sizes, strict=True):
        rows = tensor.shape[0]
        step = rows if tensor.whole else max(1, PART_VALUES // _width(tensor))
        for first in range(0, rows, step):
            yield _Part(tensor, kind, first, min(step, rows - first), start + first * (size // rows))
        start += _padded(size)


def _write_part(descriptor: int, part: _Part) -> None:
    data = _convert(part).data.cast("B")
    place = part.place
    while data:
        written = os.pwrite(descriptor, data, place)
        data, place = data[written:], place + written


def _convert(part: _Part) -> NDArray[Any]:
    import gguf
    from gguf import quants

    tensor, kind = part.tensor, part.kind
    if tensor.bits is not None and kind.name in EXPONENTS:
        stored = tensor.bits(part.first, part.rows)
        exponent = EXPONENTS[kind.name]
        if tensor.dtype == kind.name:
            found = stored
        elif kind is gguf.GGMLQuantizationType.F16:
            found = _bf16_as_f16()[stored]
        else:
            found = _as_bf16(tensor.read(part.first, part.rows))
        # One look at the result: what is not finite there is told apart on the long way.
        if not ((found & exponent) == exponent).any():
            return found
    array = np.ascontiguousarray(tensor.read(part.first, part.rows))
    _require_range(tensor.name, array, kind)
    return np.ascontiguousarray(quants.quantize(array, kind)).view(np.uint8)


@cache
def _bf16_as_f16() -> NDArray[np.uint16]:
    """f16 for each of the 65,536 bf16 values, as bits: the rounding of numpy, looked up."""
    with np.errstate(over="ignore"):
        floats = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32).astype(np.float16)
    return floats.view(np.uint16)


def _as_bf16(array: Floats) -> NDArray[np.uint16]:
    import gguf
    from gguf import quants

    return np.ascontiguousarray(quants.quantize(array, gguf.GGMLQuantizationType.BF16)).view(np.uint16)


def _require_range(name: str, array: Floats, kind: GGMLQuantizationType) -> None:
    """DataError for values that overflow a type; the scales of blocks are f16, and a part of the largest value."""
    if kind.name in ("F32", "BF16"):
        return
    limit = F16_MAX * {"Q8_0": 127, "Q4_0": 8, "Q5_0": 16}.get(kind.name, 1)
    largest = max(float(array.max()), -float(array.min()))
    if largest > limit:
        raise DataError(f"{name} reaches {largest:.3g}, too large for {kind.name}", hint="export as bf16 or f32")
