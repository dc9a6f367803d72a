"""The tensors of a Hugging Face folder under llama.cpp's names: read, converted and written in parts by a few threads.

A tensor is read, checked and converted a few million values at a time, so that memory does not grow with the model.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distill.errors import DataError
from distill.folders import Floats, Stored, from_floats, stored_tensors, to_floats
from distill.gguf.families import part_of
from distill.gguf.fields import rope_tensors
from distill.gguf.shape import Shape
from distill.progress import Progress

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

    from distill.gguf.head import TensorRow

F16_MAX = 65504.0
PART_VALUES = 2**21  # converted at a time, when written by each thread
REPORTED_VALUES = 2**28  # below, a file is written too fast for lines of progress
_SEEKING = threading.Lock()
EXPONENTS = {"F16": 0x7C00, "BF16": 0x7F80}  # all set: infinity or NaN
CHECK = "check that config.json belongs to these weights"


@dataclass(frozen=True)
class GgufTensor:
    """One tensor under its GGUF name: `read(first, count)` gives rows of its first dimension as fp32, checked.

    `whole`: it can only be read at once. `dtype` is the type in safetensors. `bits(first, count)` gives the rows as
    they are stored, for conversions between types of 16 bits; None where values or order change.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[int, int], Floats]
    whole: bool = False
    bits: Callable[[int, int], NDArray[np.uint16]] | None = None


def read_tensors(folder: Path, shape: Shape) -> list[GgufTensor]:
    """The folder's tensors under their GGUF names; only the headers of the files are read here.

    Raises DataError when a tensor is missing, has another shape than config.json gives, or has no place in GGUF.
    """
    stored = {
        name: tensor
        for name, tensor in stored_tensors(folder, shape.tied).items()
        if not name.endswith("rotary_emb.inv_freq")
    }
    if shape.tied:
        stored.pop("lm_head.weight", None)  # a tied checkpoint may still carry the copy
    expected = shape.expected_tensors(shape.family.biases)
    missing = [name for name in expected if name not in stored]
    if missing:
        raise DataError(f"{folder}: {len(missing)} tensors are missing, first {missing[0]}", hint=CHECK)
    tensors = []
    for name in [*expected, *sorted(name for name in stored if name not in expected)]:
        tensor = stored[name]
        if name in expected and tensor.shape != expected[name]:
            raise DataError(
                f"{folder}: {name} has shape {list(tensor.shape)}, by config.json it is {list(expected[name])}",
                hint=CHECK,
            )
        gguf_name = _gguf_name(name, name in expected, shape, folder)
        heads = shape.reordered_heads(name)
        if heads and tensor.shape[0] % (2 * heads):
            raise DataError(f"{folder}: {name} has {tensor.shape[0]} rows, not pairs for {heads} heads", CHECK)
        halves = tensor.dtype in ("F16", "BF16") and not heads and len(tensor.shape) > 1
        read, bits = _reader(name, tensor, shape, folder, heads), partial(_bits, tensor) if halves else None
        tensors.append(GgufTensor(gguf_name, tensor.shape, tensor.dtype, read, heads > 0, bits))
    for name, factors in rope_tensors(shape).items():
        tensors.append(GgufTensor(name, factors.shape, "F32", partial(_constant, factors), True))
    return tensors


def _gguf_name(name: str, expected: bool, shape: Shape, folder: Path) -> str:
    gguf_name = shape.gguf_name(name)
    # The weights of the architecture are all expected; of the rest only some biases are read by llama.cpp.
    if gguf_name is not None and (expected or (name.endswith(".bias") and part_of(name) in shape.family.more_biases)):
        return gguf_name
    raise DataError(
        f"{folder}: tensor {name} has no place in a GGUF {shape.architecture}",
        hint="check that config.json belongs to these weights; adapters must be merged first",
    )


def permute_for_llama(weights: Floats, heads: int) -> Floats:
    """Reorder q or k rows [A*D, ...] from Hugging Face's half-split rope to llama.cpp's interleaved one."""
    half = weights.shape[0] // heads // 2
    return weights.reshape(heads, 2, half, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def _reader(name: str, stored: Stored, shape: Shape, folder: Path, heads: int) -> Callable[[int, int], Floats]:
    shift = shape.norm_shift(name)

    def read(first: int, count: int) -> Floats:
        values = to_floats(stored.rows(first, count), stored.dtype)
        if not np.isfinite(values).all():
            raise DataError(f"{folder}: {name} holds NaN or infinity", hint="export an earlier checkpoint")
        if shift:
            values = values + np.float32(shift)
        return permute_for_llama(values, heads) if heads else values

    return read


def _constant(values: Floats, first: int, count: int) -> Floats:
    return values[first : first + count]


def _bits(stored: Stored, first: int, count: int) -> NDArray[np.uint16]:
    return stored.rows(first, count).view(np.uint16)


class Output(NamedTuple):
    """A file that is written, and the name, shape, type and bytes of each tensor, in order."""

    file: BinaryIO
    rows: list[TensorRow]


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
    parts = list(_parts(tensors, outputs))
    for output in outputs:
        os.ftruncate(output.file.fileno(), output.file.tell() + sum(_padded(size) for *_, size in output.rows))
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


def _parts(tensors: list[GgufTensor], outputs: Sequence[Output]) -> Iterator[_Part]:
    starts = [output.file.tell() for output in outputs]
    for index, tensor in enumerate(tensors):
        rows, written = tensor.shape[0], [output.rows[index] for output in outputs]
        step = rows if tensor.whole else max(1, PART_VALUES // _width(tensor))
        for first in range(0, rows, step):
            places = [
                _Place(output.file.fileno(), kind, start + first * (size // rows))
                for output, (*_, kind, size), start in zip(outputs, written, starts, strict=True)
            ]
            yield _Part(tensor, first, min(step, rows - first), places)
        starts = [start + _padded(size) for start, (*_, size) in zip(starts, written, strict=True)]


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
