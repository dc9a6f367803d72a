"""The tensors of a Hugging Face folder under llama.cpp's names: read and converted in parts by a few threads, written.

A tensor is read, checked and converted a few million values at a time, so that memory does not grow with the model.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np

from distill.errors import DataError
from distill.folders import Floats, Stored, stored_tensors, to_floats
from distill.gguf.families import part_of
from distill.gguf.fields import rope_tensors
from distill.gguf.head import tensor_bytes
from distill.gguf.shape import Shape
from distill.progress import Progress

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

F16_MAX = 65504.0
PART_VALUES = 2**21  # converted at a time, when written by each thread
CHECK = "check that config.json belongs to these weights"


@dataclass(frozen=True)
class GgufTensor:
    """One tensor under its GGUF name: `read(first, count)` gives rows of its first dimension as fp32, checked.

    `whole`: it can only be read at once. `dtype` is the type in safetensors.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[int, int], Floats]
    whole: bool = False


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
        read = _reader(name, tensor, shape, folder, heads)
        tensors.append(GgufTensor(gguf_name, tensor.shape, tensor.dtype, read, heads > 0))
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


class Output(NamedTuple):
    """A file whose head is written, and the type of each tensor in it, in order."""

    file: BinaryIO
    kinds: Sequence[GGMLQuantizationType]


def write_tensors(tensors: list[GgufTensor], outputs: Sequence[Output]) -> None:
    """Append the tensors to each file, each padded to GGUF's alignment; a part is read once for all files.

    Raises DataError for values that are not finite or too large for a type, OSError for a full disk.
    """
    progress = Progress("tensors", len(tensors), brief=True)
    workers = min(4, os.cpu_count() or 1)
    waiting: deque[Future[list[bytes]]] = deque()

    def write_first() -> None:
        for output, data in zip(outputs, waiting.popleft().result(), strict=True):
            output.file.write(data)

    with ThreadPoolExecutor(workers) as pool:
        for tensor, *kinds in zip(tensors, *(output.kinds for output in outputs), strict=True):
            rows = tensor.shape[0]
            step = rows if tensor.whole else max(1, PART_VALUES // math.prod(tensor.shape[1:]))
            for first in range(0, rows, step):
                waiting.append(pool.submit(_converted, tensor, first, min(step, rows - first), kinds))
                if len(waiting) > 2 * workers:
                    write_first()
            progress.step()
        while waiting:
            write_first()


def _converted(tensor: GgufTensor, first: int, count: int, kinds: Sequence[GGMLQuantizationType]) -> list[bytes]:
    """Rows of a tensor in each of the types, the last ones with the padding behind the tensor."""
    import gguf

    floats, parts = np.ascontiguousarray(tensor.read(first, count)), []
    for kind in kinds:
        _require_range(tensor.name, floats, kind)
        last = first + count == tensor.shape[0]
        padding = -tensor_bytes(tensor.shape, kind) % gguf.GGUF_DEFAULT_ALIGNMENT if last else 0
        parts.append(gguf.quants.quantize(floats, kind).tobytes() + bytes(padding))
    return parts


def _require_range(name: str, array: Floats, kind: GGMLQuantizationType) -> None:
    """DataError for values that overflow a type; the scales of blocks are f16, and a part of the largest value."""
    if kind.name in ("F32", "BF16"):
        return
    limit = F16_MAX * {"Q8_0": 127, "Q4_0": 8, "Q5_0": 16}.get(kind.name, 1)
    largest = max(float(array.max()), -float(array.min()))
    if largest > limit:
        raise DataError(f"{name} reaches {largest:.3g}, too large for {kind.name}", hint="export as bf16 or f32")
