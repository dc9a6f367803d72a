"""Importance matrices, by which llama.cpp's quantiser weighs the columns of a matrix: which ones meet large inputs."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distill.engines.torch.hugging_face import encode_text, load_model, load_tokenizer
from distill.errors import DataError
from distill.files import read_utf8
from distill.folders import Floats
from distill.gguf.head import open_head
from distill.gguf.shape import read_shape

AGAIN = "make one for this model with llama.cpp's llama-imatrix, or give a text to measure it on"
MAX_TOKENS, WINDOW = 16_384, 512  # of the text that a matrix is measured on


def importance_of(path: Path, folder: Path) -> dict[str, Floats]:
    """GGUF tensor name -> mean squares of the inputs of its columns, fp32.

    From a file of llama.cpp's llama-imatrix (GGUF, or its older .dat), or measured with the model in `folder` on a
    text. Raises DataError for a file that is none of them, or whose matrix is not of this model.
    """
    try:
        with path.open("rb") as file:
            begin = file.read(2**12)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", "give an importance matrix or a text") from None
    if begin[:4] != b"GGUF" and b"\0" not in begin:
        return _measured(folder, read_utf8(path), path)
    means = _stored(path) if begin[:4] == b"GGUF" else _older(path)
    _require_own(path, means, folder)
    return means


def _stored(path: Path) -> dict[str, Floats]:
    import gguf

    open_head(path)  # reports a damaged file with our own message
    arrays = {tensor.name: np.array(tensor.data, dtype=np.float32) for tensor in gguf.GGUFReader(path).tensors}
    result = {}
    for name, sums in arrays.items():
        counts = arrays.get(name.removesuffix(".in_sum2") + ".counts")
        # A matrix that met no input is left out: zeros would say that its columns do not matter.
        if name.endswith(".in_sum2") and counts is not None and counts.size and (counts > 0).all():
            means = sums.reshape(counts.size, -1) / counts.reshape(-1, 1)
            result[name.removesuffix(".in_sum2")] = np.ascontiguousarray(means.ravel(), dtype=np.float32)
    if not result:
        raise DataError(f"{path} holds no importance matrix", AGAIN)
    return result


def _older(path: Path) -> dict[str, Floats]:
    """The .dat of llama-imatrix until 2025: entries of a name, a number of calls, and sums over the calls."""
    data, at, result = path.read_bytes(), 4, dict[str, Floats]()
    try:
        (entries,) = struct.unpack_from("<i", data)
        for _ in range(entries):
            (length,) = struct.unpack_from("<i", data, at)
            name = data[at + 4 : at + 4 + max(length, 0)].decode()
            calls, values = struct.unpack_from("<ii", data, at + 4 + len(name.encode()))
            if not name or values < 1:
                raise ValueError(f"entry {len(result) + 1} has {values} values")
            sums = np.frombuffer(data, "<f4", values, at + 12 + length)
            at += 12 + length + 4 * values
            result[name] = (sums / np.float32(max(calls, 1))).astype(np.float32)
        if entries < 1:
            raise ValueError("it has no entries")
    except (struct.error, ValueError) as error:
        raise DataError(f"{path} is neither a text nor an importance matrix: {error}", AGAIN) from None
    return result


def _require_own(path: Path, means: Mapping[str, Floats], folder: Path) -> None:
    """Raise DataError for a matrix of another model: llama.cpp looks names up and ignores the rest."""
    shape = read_shape(folder)
    expected = {shape.gguf_name(name): size for name, size in shape.expected_tensors(()).items() if len(size) == 2}
    missing = [name for name in expected if name not in means and str(name).startswith("blk.")]
    other = [name for name in means if name not in (*expected, "output.weight")]
    if missing or other:
        lacks = f"has nothing for {len(missing)} of its tensors, first {missing[0]}" if missing else ""
        more = f"is for {len(other)} tensors that it lacks, first {other[0]}" if other else ""
        raise DataError(f"{path} does not belong to {folder}: it {' and '.join(filter(None, (lacks, more)))}", AGAIN)
    for name, values in means.items():
        width = expected.get(name, (0, shape.hidden))[1]
        if len(values) != width:
            raise DataError(f"{path} does not belong to {folder}: {name} has {len(values)} columns, not {width}", AGAIN)
        if not np.isfinite(values).all() or (values < 0).any():
            raise DataError(f"{path}: {name} holds values that are no mean squares", AGAIN)


def _measured(folder: Path, text: str, path: Path) -> dict[str, Floats]:
    shape = read_shape(folder)
    ids = encode_text(load_tokenizer(str(folder)), text)[:MAX_TOKENS]
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
