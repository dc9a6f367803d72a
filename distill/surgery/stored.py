"""Tensors written to safetensors files in parts, so that no model has to fit into memory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from distill.errors import DataError
from distill.files import write_json
from distill.models.tensor_files import ITEM_BYTES
from distill.progress import Progress

FLOATS = ("F64", "F32", "F16", "BF16")
WRITTEN = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class Written:
    """A tensor to be written: its type, its shape, and its values a part at a time."""

    dtype: str
    shape: tuple[int, ...]
    parts: Callable[[], Iterator[Tensor]]

    @property
    def bytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def write_tensors(folder: Path, outputs: Mapping[str, Written]) -> None:
    """Write tensors to safetensors files of about SHARD_BYTES each, with an index where there are several."""
    shards: list[dict[str, Written]] = [{}]
    for name, tensor in outputs.items():
        if shards[-1] and sum(t.bytes for t in shards[-1].values()) + tensor.bytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = tensor
    progress = Progress("transplant: tensors", len(outputs))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        single = len(shards) == 1
        path = folder / ("model.safetensors" if single else f"model-{number:05d}-of-{len(shards):05d}.safetensors")
        weight_map |= dict.fromkeys(shard, path.name)
        with open(path, "wb") as file:
            _write_shard(file, shard, progress)
    if len(shards) > 1:
        total = sum(tensor.bytes for tensor in outputs.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(folder / "model.safetensors.index.json", index)


def _write_shard(file: BinaryIO, shard: Mapping[str, Written], progress: Progress) -> None:
    """One file: the header's length, the header, the values (https://huggingface.co/docs/safetensors)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in shard.items():
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [at, at + tensor.bytes]}
        at += tensor.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name, tensor in shard.items():
        for part in tensor.parts():
            if tensor.dtype == "F16" and not bool(part.isfinite().all()):
                raise DataError(f"values of {name} do not fit float16", "write bfloat16 or float32")
            file.write(part.contiguous().view(-1).view(torch.uint8).numpy().data)
        progress.step()
