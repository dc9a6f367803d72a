"""llama.cpp's own quantiser, through llama-cpp-python, and importance matrices, by which it weighs columns.

An importance matrix says which columns of a matrix meet large inputs.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distill.errors import DataError
from distill.files import read_utf8, write_atomically
from distill.machine import usable_cores
from distill.models.conversion.fields import file_type_number
from distill.models.conversion.model_shape import read_shape
from distill.models.gguf.file_head import open_head
from distill.models.gguf.library import ERRORS, last_errors, library
from distill.models.tensor_files import Floats

# Blocks of 256 values; where a tensor's rows do not divide, llama.cpp takes another type for it.
K_BLOCK = 256
MAX_TOKENS, WINDOW = 16_384, 512  # of the text that an importance matrix is measured on
WRITE_FAULT, ALMOST_NONE = "iostream error", 2**20  # llama.cpp's words, and bytes left on a disk that is full


def quantise_file(
    exact: Path,
    output: Path,
    outtype: str,
    tensor_types: Sequence[tuple[str, str]] = (),
    importance: Mapping[str, Floats] | None = None,
) -> int:
    """Quantise the GGUF file `exact` into `output`.

    Returns the number of matrices whose rows do not fit blocks of 256 where the type has such blocks. Raises DataError
    when llama.cpp refuses, RunError when the disk is full.
    """
    llama = library()
    parameters = llama.llama_model_quantize_default_params()
    parameters.nthread = usable_cores()
    parameters.ftype = file_type_number(outtype)
    overrides = (llama.llama_model_tensor_override * (len(tensor_types) + 1))()  # the last one, empty, ends the list
    for slot, (pattern, kind) in zip(overrides, tensor_types, strict=False):
        slot.pattern, slot.type = pattern.encode(), int(_tensor_type(kind))
    if tensor_types:
        parameters.tt_overrides = overrides
    matrix = importance or {}
    entries = (llama.llama_model_imatrix_data * (len(matrix) + 1))()
    for entry, (name, values) in zip(entries, matrix.items(), strict=False):
        entry.name, entry.size = name.encode(), values.size
        entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    if matrix:
        parameters.imatrix = entries

    write_atomically(output, lambda path: _quantise(llama, exact, path, parameters, outtype), several=True)
    if "k" not in outtype and outtype != "iq4_xs":
        return 0
    shapes = open_head(output).shapes
    return sum(len(shape) > 1 and shape[0] % K_BLOCK > 0 for shape in shapes.values())


def _quantise(llama: Any, source: Path, path: Path, parameters: Any, outtype: str) -> None:
    ERRORS.clear()
    if not llama.llama_model_quantize(os.fsencode(source), os.fsencode(path), ctypes.byref(parameters)):
        return
    if WRITE_FAULT in last_errors():  # which does not say what the fault was
        full = shutil.disk_usage(path.parent).free < ALMOST_NONE
        raise OSError(errno.ENOSPC if full else errno.EIO, os.strerror(errno.ENOSPC if full else errno.EIO))
    raise DataError(f"llama.cpp cannot quantise to {outtype}: {last_errors()}", "see the types in docs/export.md")


def _tensor_type(kind: str) -> Any:
    import gguf

    try:
        return gguf.GGMLQuantizationType[kind.upper()]
    except KeyError:
        raise DataError(f"tensor type {kind!r} is unknown", "use a type of ggml, such as q8_0, q6_k or f16") from None


def importance_of(path: Path, folder: Path) -> dict[str, Floats]:
    """GGUF tensor name -> mean squares of the inputs of its columns, fp32.

    From the file of llama.cpp's llama-imatrix (GGUF), or measured with the model in `folder` on a text. Raises
    DataError for a file that is neither.
    """
    try:
        with path.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF"
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", "give an importance matrix or a text") from None
    return _read(path) if is_gguf else _measure(folder, read_utf8(path), path)


def _read(path: Path) -> dict[str, Floats]:
    import gguf

    open_head(path)  # reports a damaged file with our own message
    arrays = {tensor.name: np.array(tensor.data, dtype=np.float32) for tensor in gguf.GGUFReader(path).tensors}
    result = {}
    for name, sums in arrays.items():
        counts = arrays.get(name.removesuffix(".in_sum2") + ".counts")
        if name.endswith(".in_sum2") and counts is not None and counts.size:
            means = sums.reshape(counts.size, -1) / np.maximum(counts.reshape(-1, 1), 1)
            result[name.removesuffix(".in_sum2")] = np.ascontiguousarray(means.ravel(), dtype=np.float32)
    if not result:
        raise DataError(f"{path} holds no importance matrix", "make one with llama.cpp's llama-imatrix, or give a text")
    return result


def _measure(folder: Path, text: str, path: Path) -> dict[str, Floats]:
    import torch

    from distill.models.hugging_face import load_model, load_tokenizer

    shape = read_shape(folder)
    ids = load_tokenizer(str(folder))(text, verbose=False)["input_ids"][:MAX_TOKENS]
    if len(ids) < 2:
        raise DataError(f"{path} is too short to measure an importance matrix on", "give some thousand words")
    model: Any = load_model(str(folder), "float32", torch.device("cpu"), trimmed=False)
    modules = {} if shape.tied else {"output.weight": model.lm_head}
    for number, layer in enumerate(model.model.layers):
        for part, (name, letters) in shape.family.parts.items():
            if len(letters) == 2:
                modules[f"blk.{number}.{name}.weight"] = layer.get_submodule(part)
    sums: dict[str, Any] = {}

    def watch(name: str) -> Any:
        def add(_: Any, inputs: tuple[Any, ...]) -> None:
            squares = inputs[0].detach().double().square().flatten(0, -2).sum(0)
            sums[name] = sums[name] + squares if name in sums else squares

        return add

    hooks = [module.register_forward_pre_hook(watch(name)) for name, module in modules.items()]
    window = min(WINDOW, shape.context)
    with torch.inference_mode():
        for start in range(0, len(ids), window):
            model(torch.tensor([ids[start : start + window]]))
    for hook in hooks:
        hook.remove()
    return {name: (total / len(ids)).float().numpy() for name, total in sums.items()}
