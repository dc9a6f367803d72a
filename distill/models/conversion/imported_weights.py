"""The tensors of a GGUF file as model.safetensors: dequantised and put back into Hugging Face's order, in parts.

A tensor is read, converted and written some rows at a time, so that memory does not grow with the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from distill.errors import DataError
from distill.models.conversion.families import ATTENTION, LLAMA3_FACTORS, LONG_FACTORS, MLP, SHORT_FACTORS
from distill.models.conversion.imported_config import sizes_of
from distill.models.conversion.tensors import PART_VALUES, ValuesProgress
from distill.models.gguf.file_head import FileHead
from distill.models.tensor_files import Floats, from_floats, to_floats, write_header

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

ROTARY = (LLAMA3_FACTORS, LONG_FACTORS, SHORT_FACTORS)
Dtype = Literal["float32", "bfloat16", "float16"]
DTYPES: dict[str, Dtype] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # GGUF's and safetensors' names


@dataclass(frozen=True)
class Source:
    """A tensor of a file: its type, its first byte, its shape [rows, …] as Hugging Face writes it.

    `heads`: rows of so many heads are reordered; 0: none are. `shift` was added to the values by the exporter.
    """

    path: Path
    name: str
    kind: GGMLQuantizationType
    start: int
    shape: tuple[int, ...]
    heads: int = 0
    shift: float = 0.0

    @property
    def values(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    def parts(self) -> Iterator[Floats]:
        """The rows in order, some at a time, as fp32; of reordered tensors whole heads at a time."""
        import gguf

        block, size = gguf.GGML_QUANT_SIZES[self.kind]
        rows = 1 if len(self.shape) == 1 and not self.heads else self.shape[0]  # a reordered bias has one value a row
        width = self.values // rows
        unit = rows // self.heads if self.heads else 1
        step = unit * max(1, PART_VALUES // (width * unit))
        row_bytes = width // block * size
        for first in range(0, rows, step):
            count = min(step, rows - first)
            data = np.fromfile(self.path, np.uint8, count * row_bytes, offset=self.start + first * row_bytes)
            if len(data) < count * row_bytes:
                raise DataError(f"{self.path} is cut short within {self.name}", "copy the file again")
            floats = np.ascontiguousarray(gguf.quants.dequantize(data.reshape(count, row_bytes), self.kind), np.float32)
            if not np.isfinite(floats).all():
                raise DataError(f"{self.path}: {self.name} holds NaN or infinity", "copy or convert the file again")
            if self.heads:
                floats = unpermuted(floats, count // unit)
            yield floats - np.float32(self.shift) if self.shift else floats


def unpermuted(rows: Floats, heads: int) -> Floats:
    """Rows [heads·D, …] from llama.cpp's order, which rotates neighbours, to Hugging Face's, which rotates halves."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def sources(head: FileHead, config: Mapping[str, Any]) -> dict[str, Source]:
    """The tensors of a file by their Hugging Face names, in the order of the model.

    Raises DataError, with the name, for a tensor that the family does not have, that is missing, of another shape than
    the metadata give, or of a type that the gguf package cannot read.
    """
    sizes, model = sizes_of(config), f"a {config['model_type']} of transformers"
    biases = {*sizes.family.biases}
    biases |= {*ATTENTION} if config.get("attention_bias") else set()
    biases |= {*MLP} if config.get("mlp_bias") else set()
    expected = sizes.expected_tensors(biases)
    tensors: dict[str, Source] = {}
    for name in head.shapes:
        if name in ROTARY:
            continue
        own = sizes.hugging_face_name(name)
        if own is None:
            head.refuse(f"tensor {name} has no place in {model}")
        if own not in expected:
            head.refuse(f"{model} has no {own}")
        shape = tuple(reversed(head.shapes[name]))
        if shape != expected[own]:
            head.refuse(f"{name} is {list(shape)}, by the metadata it is {list(expected[own])}", "copy the file again")
        kind, start = _kind(head, name, shape[-1]), head.start + head.offsets[name]
        tensors[own] = Source(head.path, name, kind, start, shape, sizes.reordered_heads(own), sizes.norm_shift(own))
    missing = [name for name in expected if name not in tensors]
    if missing:
        head.refuse(f"{len(missing)} tensors are missing, the first is {missing[0]} by its Hugging Face name")
    return dict(sorted(tensors.items(), key=lambda item: _place(item[0])))


def _place(name: str) -> tuple[int, int]:
    parts = name.split(".")
    return (1, int(parts[2])) if parts[1] == "layers" else (0 if "embed" in name else 2, 0)


def _kind(head: FileHead, name: str, width: int) -> GGMLQuantizationType:
    import gguf

    number = head.kinds[name]
    try:
        kind = gguf.GGMLQuantizationType(number)
    except ValueError:
        head.refuse(f"{name} has the type {number}, which the gguf package does not know", "pip install -U gguf")
    if kind.name not in DTYPES and kind not in gguf.quants._type_traits:
        head.refuse(f"{name} is {kind.name}, which the gguf package cannot dequantise", "quantise it to another type")
    block = gguf.GGML_QUANT_SIZES[kind][0]
    if width % block:
        head.refuse(
            f"{name} is {kind.name}, in blocks of {block} values, and its rows have {width}", "copy the file again"
        )
    return kind


def rotary_factors(head: FileHead) -> dict[str, Floats]:
    """The tensors of rotary factors by name; they stand in config.json, not among the weights."""
    tensors = {}
    for name in ROTARY:
        if name in head.shapes:
            width = head.shapes[name][0]
            source = Source(head.path, name, _kind(head, name, width), head.start + head.offsets[name], (width,))
            tensors[name] = next(source.parts())[0]
    return tensors


def stored_types(tensors: Mapping[str, Source], dtype: Dtype | None) -> dict[str, str]:
    """The type in which each tensor is stored, as safetensors names it.

    With `dtype`, that one. Else floats stay as they are and quantised tensors become F32; vectors, which GGUF keeps in
    F32, take the type of the matrices where all of those have one of 16 bits and no vector loses a digit by it.
    """
    if dtype is not None:
        return dict.fromkeys(tensors, next(code for code, name in DTYPES.items() if name == dtype))
    types = {name: source.kind.name if source.kind.name in DTYPES else "F32" for name, source in tensors.items()}
    matrices = {types[name] for name, source in tensors.items() if len(source.shape) > 1}
    vectors = [name for name, source in tensors.items() if len(source.shape) == 1]
    if len(matrices) == 1 and (narrow := matrices.pop()) != "F32":
        exact = all(
            (to_floats(from_floats(part, narrow), narrow) == part).all()
            for name in vectors
            for part in tensors[name].parts()
        )
        types |= dict.fromkeys(vectors, narrow) if exact else {}
    return types


def write_weights(place: Path, tensors: Mapping[str, Source], types: Mapping[str, str]) -> None:
    """Write a safetensors file; DataError for a value that its type cannot hold."""
    progress = ValuesProgress(sum(source.values for source in tensors.values()))
    with place.open("wb") as file:
        write_header(file, {name: (types[name], source.shape) for name, source in tensors.items()})
        for name, source in tensors.items():
            for part in source.parts():
                values: NDArray[Any] = from_floats(part, types[name])
                if not np.isfinite(to_floats(values, types[name])).all():
                    raise DataError(
                        f"{source.path}: {source.name} holds values too large for {DTYPES[types[name]]}",
                        "use --dtype float32",
                    )
                file.write(values.data.cast("B"))
                progress.add(part.size)
