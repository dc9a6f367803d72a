"""The tensors of a Hugging Face folder under llama.cpp's names, read in parts.

A tensor is read, checked and converted a few million values at a time, so that memory does not grow with the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from distill.errors import DataError
from distill.models.conversion.families import part_of
from distill.models.conversion.model_fields import rope_tensors
from distill.models.conversion.model_shape import Shape
from distill.models.tensor_files import Floats, Stored, stored_tensors, to_floats

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
        name: tensor for name, tensor in stored_tensors(folder).items() if not name.endswith("rotary_emb.inv_freq")
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
        read = _reader(name, tensor, shape, folder, heads)
        tensors.append(
            GgufTensor(gguf_name, tensor.shape, tensor.dtype, read, heads > 0, _bits_reader(tensor) if halves else None)
        )
    for name, factors in rope_tensors(shape).items():
        tensors.append(GgufTensor(name, factors.shape, "F32", _constant(factors), True))
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


def _bits_reader(stored: Stored) -> Callable[[int, int], NDArray[np.uint16]]:
    return lambda first, count: stored.rows(first, count).view(np.uint16)


def _constant(values: Floats) -> Callable[[int, int], Floats]:
    return lambda first, count: values[first : first + count]
