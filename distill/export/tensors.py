"""The tensors of a Hugging Face folder under llama.cpp's names, read in parts.

A tensor is read, checked and converted a few million values at a time, so that memory does not grow with the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distill.errors import DataError
from distill.export.head.model_fields import rope_tensors
from distill.export.model_shape import Shape
from distill.faults import reading
from distill.models.gguf.families import OUTER_NAMES, QKV
from distill.models.tensor_files import Stored, stored_tensors

LAYER_PATTERN = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
CHECK = "check that config.json belongs to these weights"
Floats = NDArray[np.float32]


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

    def load(self) -> Floats:
        """All of it."""
        return self.read(0, self.shape[0])


def expected_tensors(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every tensor the architecture must have (other biases and untied heads aside)."""
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    sizes = {
        "H": shape.hidden,
        "Q": queries,
        "K": keys,
        "D": shape.head_size,
        "F": shape.mlp,
        "G": queries + 2 * keys,
        "T": 2 * shape.mlp,
    }
    layer = {part: tuple(sizes[letter] for letter in letters) for part, (_, letters) in shape.family.parts.items()}
    expected: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocabulary, shape.hidden)}
    for index in range(shape.layers):
        expected |= {f"model.layers.{index}.{name}.weight": size for name, size in layer.items()}
        expected |= {f"model.layers.{index}.{name}.bias": layer[name][:1] for name in sorted(shape.family.biases)}
    expected["model.norm.weight"] = (shape.hidden,)
    if not shape.tied:
        expected["lm_head.weight"] = (shape.vocabulary, shape.hidden)
    return expected


def read_tensors(folder: Path, shape: Shape) -> list[GgufTensor]:
    """The folder's tensors under their GGUF names; only the headers of the files are read here.

    Raises DataError when a tensor is missing, has another shape than config.json gives, or has no place in GGUF.
    """
    stored = {name: one for name, one in stored_tensors(folder).items() if not name.endswith("rotary_emb.inv_freq")}
    if shape.tied:
        stored.pop("lm_head.weight", None)  # a tied checkpoint may still carry the copy
    expected = expected_tensors(shape)
    missing = [name for name in expected if name not in stored]
    if missing:
        raise DataError(f"{folder}: {len(missing)} tensors are missing, first {missing[0]}", hint=CHECK)
    tensors = []
    for name in [*expected, *sorted(name for name in stored if name not in expected)]:
        if name in expected and stored[name].shape != expected[name]:
            raise DataError(
                f"{folder}: {name} has shape {list(stored[name].shape)}, by config.json it is {list(expected[name])}",
                hint=CHECK,
            )
        gguf_name = _gguf_name(name, name in expected, shape, folder)
        heads = _permuted_heads(name, shape)
        if heads and stored[name].shape[0] % (2 * heads):
            raise DataError(f"{folder}: {name} has {stored[name].shape[0]} rows, not pairs for {heads} heads", CHECK)
        one, reader = stored[name], _reader(name, stored[name], shape, folder, heads)
        halves = one.dtype in ("F16", "BF16") and not heads and len(one.shape) > 1
        tensors.append(
            GgufTensor(gguf_name, one.shape, one.dtype, reader, heads > 0, _bits_reader(one) if halves else None)
        )
    for name, factors in rope_tensors(shape).items():
        tensors.append(GgufTensor(name, factors.shape, "F32", _constant(factors), True))
    return tensors


def _gguf_name(name: str, expected: bool, shape: Shape, folder: Path) -> str:
    if expected and name in OUTER_NAMES:
        return OUTER_NAMES[name]
    match = LAYER_PATTERN.fullmatch(name)
    if match and match[2] in shape.family.parts and int(match[1]) < shape.layers:
        layer, part, kind = match.groups()
        # The weights of the architecture are all expected; of the rest only some biases are read by llama.cpp.
        if expected or (kind == "bias" and part in shape.family.more_biases):
            return f"blk.{layer}.{shape.family.parts[part][0]}.{kind}"
    raise DataError(
        f"{folder}: tensor {name} has no place in a GGUF {shape.architecture}",
        hint="check that config.json belongs to these weights; adapters must be merged first",
    )


def _permuted_heads(name: str, shape: Shape) -> int:
    """The heads whose rows are reordered; 0 for tensors that keep their order."""
    part = name.rsplit(".", 1)[0].split(".", 3)[-1]
    if not shape.family.interleaved or part not in QKV - {"self_attn.v_proj"}:
        return 0
    return shape.heads if part.endswith("q_proj") else shape.kv_heads


def permute_for_llama(weights: Floats, heads: int) -> Floats:
    """Reorder q or k rows [A*D, ...] from Hugging Face's half-split rope to llama.cpp's interleaved one."""
    half = weights.shape[0] // heads // 2
    return weights.reshape(heads, 2, half, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def _reader(name: str, stored: Stored, shape: Shape, folder: Path, heads: int) -> Callable[[int, int], Floats]:
    shift = shape.family.norm_shift if name.endswith("norm.weight") else 0.0

    def read(first: int, count: int) -> Floats:
        values = read_rows(stored, first, count)
        if not np.isfinite(values).all():
            raise DataError(f"{folder}: {name} holds NaN or infinity", hint="export an earlier checkpoint")
        if shift:
            values = values + np.float32(shift)
        return permute_for_llama(values, heads) if heads else values

    return read


def _bits_reader(stored: Stored) -> Callable[[int, int], NDArray[np.uint16]]:
    return lambda first, count: _read_stored(stored, first, count, np.dtype("<u2"))


def _constant(values: Floats) -> Callable[[int, int], Floats]:
    return lambda first, count: values[first : first + count]


NUMPY_TYPES: Mapping[str, str] = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def read_rows(stored: Stored, first: int, count: int) -> Floats:
    """`count` rows of a stored tensor from `first` on, as fp32; DataError for a type that holds no weights."""
    if stored.dtype not in NUMPY_TYPES:
        raise DataError(f"{stored.path}: a tensor is stored as {stored.dtype}", "give a model that is not quantised")
    data = _read_stored(stored, first, count, np.dtype(NUMPY_TYPES[stored.dtype]))
    if stored.dtype == "BF16":
        data = (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float32, copy=False)


def _read_stored(stored: Stored, first: int, count: int, kind: np.dtype[Any]) -> NDArray[Any]:
    width = int(np.prod(stored.shape[1:], dtype=np.int64))
    with reading(stored.path):
        data = np.fromfile(stored.path, kind, count * width, offset=stored.start + first * width * kind.itemsize)
    return data.reshape(count, *stored.shape[1:])
