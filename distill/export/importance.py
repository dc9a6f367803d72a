"""Importance matrices, by which llama.cpp's quantiser weighs the columns of a matrix: which ones meet large inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from distill.engines.torch.hugging_face import load_model, load_tokenizer
from distill.errors import DataError
from distill.files import read_utf8
from distill.folders import Floats
from distill.gguf.families import read_shape
from distill.gguf.head import open_head

MAX_TOKENS, WINDOW = 16_384, 512  # of the text that a matrix is measured on


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
    return _stored(path) if is_gguf else _measured(folder, read_utf8(path), path)


def _stored(path: Path) -> dict[str, Floats]:
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


def _measured(folder: Path, text: str, path: Path) -> dict[str, Floats]:
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
