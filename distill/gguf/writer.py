"""Write a Hugging Face folder as GGUF files, each completely or not at all.

Tensors are read, checked and converted a few million values at a time, so that memory does not grow with the model.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import os
import shutil
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from distill.errors import DataError
from distill.files import is_gguf, remove_left, write_atomically, written_atomically
from distill.folders import Floats, Stored, stored_tensors, to_floats
from distill.gguf.families import layer_part
from distill.gguf.fields import (
    NO_ORIGIN,
    Origin,
    Shape,
    add_general_fields,
    add_model_fields,
    file_type_number,
    read_shape,
    rope_tensors,
)
from distill.gguf.head import ggml_type, tensor_bytes, write_head
from distill.gguf.importing import PART_VALUES
from distill.gguf.library import ERRORS, last_errors, library
from distill.gguf.tokenizer import add_tokenizer, read_tokenizer
from distill.machine import usable_cores
from distill.progress import Progress
from distill.recipe import Recipe
from distill.recipe.measuring import DIRECT, OUTTYPES

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

# ── The tensors under llama.cpp's names: read and converted in parts by a few threads, then written ──

F16_MAX = 65504.0
CHECK = "check that config.json belongs to these weights"


@dataclass(frozen=True)
class GgufTensor:
    """One tensor under its GGUF name. `read(first, count)` returns rows of the first dimension as checked fp32 values.

    `whole`: the tensor can only be read at once. `dtype` is the dtype in safetensors.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[int, int], Floats]
    whole: bool = False


def read_tensors(folder: Path, shape: Shape) -> list[GgufTensor]:
    """Return the folder's tensors under their GGUF names. Reads only the headers of the files.

    Raises DataError if a tensor is missing, has another shape than config.json gives, or has no place in GGUF.
    """
    stored = {
        name: tensor
        for name, tensor in stored_tensors(folder, shape.tied).items()
        if not name.endswith("rotary_emb.inv_freq")
    }
    if shape.tied:
        stored.pop("lm_head.weight", None)  # A tied checkpoint may still contain the copy.
    expected = shape.expected_tensors(shape.family.biases)
    missing = [name for name in expected if name not in stored]
    if missing:
        raise DataError(f"{folder}: {len(missing)} tensors are missing, first {missing[0]}", hint=CHECK)
    tensors = []
    for name in [*expected, *sorted(name for name in stored if name not in expected)]:
        tensor = stored[name]
        if name in expected and tensor.shape != expected[name]:
            what = f"{folder}: {name} has shape {list(tensor.shape)}, but config.json gives {list(expected[name])}"
            raise DataError(what, CHECK)
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
    # Every weight of the architecture is in `expected`. llama.cpp reads only some biases besides.
    if gguf_name is not None and (
        expected or (name.endswith(".bias") and layer_part(name) in shape.family.more_biases)
    ):
        return gguf_name
    hint = "check that config.json belongs to these weights; adapters must be merged first"
    raise DataError(f"{folder}: tensor {name} has no place in a GGUF {shape.architecture}", hint)


def permute_for_llama(weights: Floats, heads: int) -> Floats:
    """Reorder q or k rows [heads·D, …] from Hugging Face's rope (halves rotate) to llama.cpp's (neighbours rotate)."""
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


def write_tensors(
    tensors: list[GgufTensor], outputs: Sequence[tuple[BinaryIO, Sequence[GGMLQuantizationType]]]
) -> None:
    """Append the tensors to the files, each in the file's type for it and padded to GGUF's alignment.

    A part of a tensor is read once for all files. Raises DataError for values that are not finite or too large for a
    type, and OSError for a full disk.
    """
    progress = Progress("tensors", len(tensors), brief=True)
    workers = min(4, os.cpu_count() or 1)
    waiting: deque[Future[list[bytes]]] = deque()

    def write_first() -> None:
        for (file, _), data in zip(outputs, waiting.popleft().result(), strict=True):
            file.write(data)

    with ThreadPoolExecutor(workers) as pool:
        for tensor, *kinds in zip(tensors, *(kinds for _, kinds in outputs), strict=True):
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
    """Return rows of a tensor in each of the types. The last rows include the padding after the tensor."""
    import gguf

    floats, parts = np.ascontiguousarray(tensor.read(first, count)), []
    for kind in kinds:
        _require_range(tensor.name, floats, kind)
        last = first + count == tensor.shape[0]
        padding = -tensor_bytes(tensor.shape, kind) % gguf.GGUF_DEFAULT_ALIGNMENT if last else 0
        parts.append(gguf.quants.quantize(floats, kind).tobytes() + bytes(padding))
    return parts


def _require_range(name: str, array: Floats, kind: GGMLQuantizationType) -> None:
    """Raise DataError for values that overflow a type. The scales of blocks are f16 fractions of the largest value."""
    if kind.name in ("F32", "BF16"):
        return
    limit = F16_MAX * {"Q8_0": 127, "Q4_0": 8, "Q5_0": 16}.get(kind.name, 1)
    largest = max(float(array.max()), -float(array.min()))
    if largest > limit:
        raise DataError(f"{name} reaches {largest:.3g}, too large for {kind.name}", hint="export as bf16 or f32")


# ── llama.cpp's quantiser, through llama-cpp-python ──

K_BLOCK = 256  # values of a block. If it does not divide a tensor's rows, llama.cpp uses another type for the tensor.
WRITE_FAULT = "iostream error"  # llama.cpp's message
FULL_DISK_BYTES = 2**20  # A disk with less free space is full.


def quantise_file(
    exact: Path,
    output: Path,
    outtype: str,
    tensor_types: Sequence[tuple[str, str]] = (),
    importance: Mapping[str, Floats] | None = None,
) -> None:
    """Quantise the GGUF file `exact` into `output`. DataError if llama.cpp refuses, RunError for a full disk."""
    llama = library()
    parameters = llama.llama_model_quantize_default_params()
    parameters.nthread = usable_cores()
    parameters.ftype = file_type_number(outtype)
    overrides = (llama.llama_model_tensor_override * (len(tensor_types) + 1))()  # An empty entry ends the list.
    for slot, (pattern, kind) in zip(overrides, tensor_types, strict=False):
        slot.pattern, slot.type = pattern.encode(), int(ggml_type(kind))
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


def _quantise(llama: Any, source: Path, path: Path, parameters: Any, outtype: str) -> None:
    ERRORS.clear()
    if not llama.llama_model_quantize(os.fsencode(source), os.fsencode(path), ctypes.byref(parameters)):
        return
    if WRITE_FAULT in last_errors():  # The message does not give the cause.
        full = shutil.disk_usage(path.parent).free < FULL_DISK_BYTES
        raise OSError(errno.ENOSPC if full else errno.EIO, os.strerror(errno.ENOSPC if full else errno.EIO))
    raise DataError(f"llama.cpp cannot quantise to {outtype}: {last_errors()}", "see the types in docs/export.md")


# ── The files ──


@dataclass(frozen=True)
class WrittenFile:
    """A file that was written, its type, and its size in bytes.

    `fallback_tensors`: tensors stored in another type because the type did not fit their rows. `notes`: what llama.cpp
    ignores of the model.
    """

    path: Path
    outtype: str
    bytes: int
    tensors: int
    fallback_tensors: int
    notes: tuple[str, ...] = ()


def export_gguf(folder: Path, output: Path, outtype: str) -> WrittenFile:
    """Write the model in `folder` to one GGUF file. See `export_files`."""
    return export_files(folder, {output: outtype})[0]


def export_files(
    folder: Path,
    outputs: Mapping[Path, str],
    origin: Origin = NO_ORIGIN,
    tensor_types: tuple[tuple[str, str], ...] = (),
    importance: Mapping[str, Floats] | None = None,
) -> list[WrittenFile]:
    """Write the model in `folder` to GGUF files, `outputs` by path, each in one of OUTTYPES. See docs/export.md.

    Each tensor is read once for all types in DIRECT. llama.cpp's quantiser makes the other types from one exact file,
    which is one of the outputs if it has the exact type. Vectors stay f32. `tensor_types` (pattern, type) or
    `importance` (tensor -> mean squares of its columns' inputs) make the quantiser write every file. Raises DataError
    if the model cannot be exported and RunError if a file cannot be written. Existing files then stay intact.
    """
    import gguf

    for outtype in outputs.values():
        if outtype not in OUTTYPES:
            raise DataError(f"outtype {outtype!r} is unknown", hint=f"use one of {', '.join(OUTTYPES)}")
    shape = read_shape(folder)
    tokenizer = read_tokenizer(folder, shape.vocabulary, shape.architecture)
    tensors = read_tensors(folder, shape)
    parameters = sum(math.prod(tensor.shape) for tensor in tensors)

    def fields(outtype: str) -> Any:
        writer = gguf.GGUFWriter(path=None, arch=shape.architecture)
        add_general_fields(writer, folder, origin, outtype, parameters)
        add_model_fields(writer, shape)
        add_tokenizer(writer, tokenizer)
        return writer

    adjusted = bool(tensor_types) or importance is not None
    by_quantiser = {path: kind for path, kind in outputs.items() if adjusted or kind not in DIRECT}
    direct = {path: kind for path, kind in outputs.items() if path not in by_quantiser}
    if by_quantiser:
        library()  # Without llama-cpp-python, the error comes before anything is written.
    exact_type = _lossless(tensors)
    exact = next((path for path, kind in direct.items() if kind == exact_type), None)
    with contextlib.ExitStack() as stack:
        written = dict(direct)
        if by_quantiser and exact is None:
            first = next(iter(by_quantiser))
            remove_left(first.parent, first.name, "exact.gguf")
            exact = first.with_name(f".{first.name}.{os.getpid()}.exact.gguf")
            stack.callback(exact.unlink, missing_ok=True)
            written[exact] = exact_type
        with contextlib.ExitStack() as files:  # The files are renamed together, when all are complete.
            places = {files.enter_context(written_atomically(path, several=True)): written[path] for path in written}
            if places:
                _write(tensors, fields, places)
        for path, kind in by_quantiser.items():
            assert exact is not None
            quantise_file(exact, path, kind, tensor_types, importance)
    matrices = [tensor for tensor in tensors if len(tensor.shape) > 1]
    misfits = {kind: sum(tensor.shape[-1] % _block(kind) > 0 for tensor in matrices) for kind in outputs.values()}
    return [
        WrittenFile(path, kind, path.stat().st_size, len(tensors), misfits[kind], shape.notes)
        for path, kind in outputs.items()
    ]


def target_gguf(recipe: Recipe) -> Path | None:
    """The recipe's target if it is a GGUF file, or None for a folder or a hub name."""
    return Path(recipe.target.model) if is_gguf(recipe.target.model) else None


def _lossless(tensors: list[GgufTensor]) -> str:
    """Return the smallest type that holds every matrix exactly. llama.cpp quantises from it."""
    types = {tensor.dtype for tensor in tensors if len(tensor.shape) > 1}
    return {frozenset({"F16"}): "f16", frozenset({"BF16"}): "bf16"}.get(frozenset(types), "f32")


def _block(outtype: str) -> int:
    """Return how many values of a row a file type stores together. For llama.cpp's mixtures, the largest number."""
    import gguf

    kind = gguf.GGMLQuantizationType.__members__.get(outtype.upper())
    return K_BLOCK if kind is None else int(gguf.GGML_QUANT_SIZES[kind][0])


def _tensor_type(tensor: GgufTensor, outtype: str) -> GGMLQuantizationType:
    import gguf

    if len(tensor.shape) == 1:
        return gguf.GGMLQuantizationType.F32
    return gguf.GGMLQuantizationType.F16 if tensor.shape[-1] % _block(outtype) else ggml_type(outtype)


def _write(tensors: list[GgufTensor], fields: Callable[[str], Any], types: Mapping[Path, str]) -> None:
    """Write a file of each type: the heads first, with the `fields` of a gguf.GGUFWriter, then every tensor to all."""
    with contextlib.ExitStack() as stack:
        outputs = []
        for path, outtype in types.items():
            kinds = [_tensor_type(tensor, outtype) for tensor in tensors]
            rows = [
                (t.name, t.shape, kind, tensor_bytes(t.shape, kind)) for t, kind in zip(tensors, kinds, strict=True)
            ]
            write_head(path, fields(outtype), rows)
            file = stack.enter_context(path.open("r+b"))
            file.seek(0, os.SEEK_END)
            outputs.append((file, kinds))
        write_tensors(tensors, outputs)
