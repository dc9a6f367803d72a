"""Write a Hugging Face folder as one GGUF file, whole or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from distill.errors import DataError
from distill.export.tensors import GgufTensor, add_metadata, open_tensors, read_shape
from distill.export.tokenizer import add_tokenizer, read_tokenizer
from distill.files import write_atomically
from distill.recipe.outtypes import OUTTYPES

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

Q8_BLOCK = 32
F16_MAX = 65504.0


@dataclass(frozen=True)
class ExportReport:
    """The file written: its size in bytes, and the number of tensors kept in f16 because q8_0 did not fit."""

    path: Path
    outtype: str
    bytes: int
    tensors: int
    fallback_tensors: int


def export_gguf(folder: Path, output: Path, outtype: str, source_model_name: str | None = None) -> ExportReport:
    """Write `folder` (qwen2, qwen3 or llama, byte-level BPE) to the GGUF file `output` as f32, f16, bf16 or q8_0.

    Vectors stay f32. Raises DataError when the model cannot be exported, RunError when the file cannot be written; a
    file that stood at `output` is then intact.
    """
    import gguf

    if outtype not in OUTTYPES:
        raise DataError(f"outtype {outtype!r} is unknown", hint=f"use one of {', '.join(OUTTYPES)}")
    folder, output = Path(folder), Path(output)
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder", hint="give a Hugging Face model folder")
    shape = read_shape(folder)
    tokenizer = read_tokenizer(folder, shape.vocabulary)
    writer = gguf.GGUFWriter(path=None, arch=shape.architecture)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(source_model_name or folder.resolve().name)
    writer.add_file_type(int(_file_type(outtype)))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_metadata(writer, shape)
    add_tokenizer(writer, tokenizer)
    try:
        with open_tensors(folder, shape) as tensors:
            types = [_tensor_type(tensor, outtype) for tensor in tensors]
            write_atomically(output, lambda temporary: _write(writer, temporary, tensors, types), several=True)
    finally:
        writer.close()
    return ExportReport(
        path=output,
        outtype=outtype,
        bytes=output.stat().st_size,
        tensors=len(types),
        fallback_tensors=sum(outtype == "q8_0" and kind is gguf.GGMLQuantizationType.F16 for kind in types),
    )


def _file_type(outtype: str) -> Any:
    import gguf

    return {
        "f32": gguf.LlamaFileType.ALL_F32,
        "f16": gguf.LlamaFileType.MOSTLY_F16,
        "bf16": gguf.LlamaFileType.MOSTLY_BF16,
        "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    }[outtype]


def _tensor_type(tensor: GgufTensor, outtype: str) -> GGMLQuantizationType:
    import gguf

    types = gguf.GGMLQuantizationType
    if len(tensor.shape) == 1:
        return types.F32
    if outtype == "q8_0" and tensor.shape[-1] % Q8_BLOCK:
        return types.F16
    return {"f32": types.F32, "f16": types.F16, "bf16": types.BF16, "q8_0": types.Q8_0}[outtype]


def _write(writer: Any, path: Path, tensors: list[GgufTensor], types: list[GGMLQuantizationType]) -> None:
    import gguf

    for tensor, kind in zip(tensors, types, strict=True):
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        size = int(np.prod(tensor.shape)) // block * block_bytes
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), size, raw_dtype=kind)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor, kind in zip(tensors, types, strict=True):
        writer.write_tensor_data(_convert(tensor, kind))
    writer.flush()


def _convert(tensor: GgufTensor, kind: GGMLQuantizationType) -> NDArray[Any]:
    import gguf
    from gguf import quants

    array = tensor.load()
    if kind in (gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.Q8_0):
        # q8_0 scales are f16 too, of magnitude max/127.
        limit = F16_MAX if kind is gguf.GGMLQuantizationType.F16 else F16_MAX * 127
        largest = float(np.abs(array).max())
        if largest > limit:
            raise DataError(
                f"{tensor.name} reaches {largest:.3g}, too large for {kind.name}", hint="export as bf16 or f32"
            )
    return np.ascontiguousarray(quants.quantize(np.ascontiguousarray(array), kind))
