"""Write a Hugging Face folder as one GGUF file, whole or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from distill.errors import DataError
from distill.export.general_fields import add_general_fields
from distill.export.gguf_head import write_head
from distill.export.importance import importance_of
from distill.export.model_fields import add_model_fields
from distill.export.model_shape import Shape, read_shape
from distill.export.quantise import quantise_file
from distill.export.tensor_data import write_tensors
from distill.export.tensors import GgufTensor, read_tensors
from distill.export.tokenizer import GgufTokenizer, add_tokenizer, read_tokenizer
from distill.files import write_atomically
from distill.recipe.outtypes import DIRECT, OUTTYPES

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType


@dataclass(frozen=True)
class ExportReport:
    """The file written: its size in bytes, the number of tensors kept in another type because theirs did not fit, and
    what llama.cpp leaves out of the model."""

    path: Path
    outtype: str
    bytes: int
    tensors: int
    fallback_tensors: int
    notes: tuple[str, ...] = ()


def export_gguf(
    folder: Path,
    output: Path,
    outtype: str,
    source_model_name: str | None = None,
    tensor_types: tuple[tuple[str, str], ...] = (),
    importance: Path | None = None,
) -> ExportReport:
    """Write the model in `folder` to the GGUF file `output` in one of OUTTYPES; see docs/export.md.

    Vectors stay f32. `tensor_types` (pattern, type) and `importance`, the file of a matrix or a text to measure one on,
    leave the type to llama.cpp's quantiser. Raises DataError when the model cannot be exported, RunError when the file
    cannot be written; a file that stood at `output` is then intact.
    """
    if outtype not in OUTTYPES:
        raise DataError(f"outtype {outtype!r} is unknown", hint=f"use one of {', '.join(OUTTYPES)}")
    folder, output = Path(folder), Path(output)
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder", hint="give a Hugging Face model folder")
    shape = read_shape(folder)
    tokenizer = read_tokenizer(folder, shape.vocabulary, shape.architecture)
    tensors = read_tensors(folder, shape)
    by_llama = outtype not in DIRECT or tensor_types or importance is not None
    written = _lossless(tensors) if by_llama else outtype
    types = [_tensor_type(tensor, written) for tensor in tensors]

    def write(path: Path) -> None:
        _write(path, folder, written, source_model_name, shape, tokenizer, tensors, types)

    fallback = sum(_is_fallback(tensor, kind, written) for tensor, kind in zip(tensors, types, strict=True))
    if by_llama:
        matrix = None if importance is None else importance_of(importance, folder)
        fallback = quantise_file(write, output, outtype, tensor_types, matrix)
    else:
        write_atomically(output, write, several=True)
    return ExportReport(output, outtype, output.stat().st_size, len(types), fallback, shape.notes)


def _lossless(tensors: list[GgufTensor]) -> str:
    """The smallest type that holds every matrix exactly, from which llama.cpp quantises."""
    found = {tensor.dtype for tensor in tensors if len(tensor.shape) > 1}
    return {frozenset({"F16"}): "f16", frozenset({"BF16"}): "bf16"}.get(frozenset(found), "f32")


def _tensor_type(tensor: GgufTensor, outtype: str) -> GGMLQuantizationType:
    import gguf

    if len(tensor.shape) == 1:
        return gguf.GGMLQuantizationType.F32
    kind = gguf.GGMLQuantizationType[outtype.upper()]
    return gguf.GGMLQuantizationType.F16 if tensor.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] else kind


def _is_fallback(tensor: GgufTensor, kind: GGMLQuantizationType, outtype: str) -> bool:
    return len(tensor.shape) > 1 and kind.name != outtype.upper()


def _write(
    path: Path,
    folder: Path,
    outtype: str,
    name: str | None,
    shape: Shape,
    tokenizer: GgufTokenizer,
    tensors: list[GgufTensor],
    types: list[GGMLQuantizationType],
) -> None:
    import gguf

    writer = gguf.GGUFWriter(path=None, arch=shape.architecture)
    try:
        add_general_fields(writer, folder, name, outtype, sum(int(np.prod(tensor.shape)) for tensor in tensors))
        add_model_fields(writer, shape)
        add_tokenizer(writer, tokenizer)
        sizes = [_bytes(tensor.shape, kind) for tensor, kind in zip(tensors, types, strict=True)]
        with path.open("wb") as file:
            rows = [(one.name, one.shape, kind, size) for one, kind, size in zip(tensors, types, sizes, strict=True)]
            write_head(file, writer, rows)
            file.flush()
            write_tensors(file, tensors, types, sizes)
    finally:
        writer.close()


def _bytes(shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
    import gguf

    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    return int(np.prod(shape)) // block * block_bytes
