"""Tensors in safetensors files, read and written in parts, so that no model has to fit into memory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy
import torch
from torch import Tensor

from distill.errors import DataError
from distill.files import read_object, write_json
from distill.progress import Progress

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
FLOATS = ("F64", "F32", "F16", "BF16")
WRITTEN = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file: where its bytes start, its type there and its shape."""

    path: Path
    start: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size in the file."""
        return self.numel * DTYPES[self.dtype].itemsize

    def read(self, first: int = 0, count: int | None = None) -> Tensor:
        """`count` values from `first` on, flat; all of them, in shape, when None."""
        kind = DTYPES[self.dtype]
        values = self.numel if count is None else count
        data = numpy.fromfile(self.path, numpy.uint8, values * kind.itemsize, offset=self.start + first * kind.itemsize)
        flat = torch.from_numpy(data).view(kind)
        return flat.view(self.shape) if count is None else flat


@dataclass(frozen=True)
class Written:
    """A tensor to be written: its type, its shape, and its values a part at a time."""

    dtype: str
    shape: tuple[int, ...]
    parts: Callable[[], Iterator[Tensor]]

    @property
    def bytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """The tensors of a model folder by name, from the files' headers; raises DataError for missing or damaged files."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(read_object(index).get("weight_map", {}).values()))
    elif (folder / "model.safetensors").is_file():
        names = ["model.safetensors"]
    elif any(folder.glob("pytorch_model*.bin*")):
        raise DataError(
            f"{folder} holds pytorch_model.bin, not safetensors",
            "save it again: AutoModelForCausalLM.from_pretrained(...).save_pretrained(..., safe_serialization=True)",
        )
    else:
        raise DataError(f"{folder} has no model.safetensors", "give a whole Hugging Face model folder")
    return {name: tensor for file in names for name, tensor in _read_header(folder / file).items()}


def _read_header(path: Path) -> dict[str, Stored]:
    hint = "copy or download the file again"
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            if length > size:
                raise DataError(f"{path} is no safetensors file, or only a part of one", hint)
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        found = {
            name: (Stored(path, 8 + length + entry["data_offsets"][0], entry["dtype"], tuple(entry["shape"])), entry)
            for name, entry in header.items()
        }
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", hint) from None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} has a damaged header: {error}", hint) from None
    for name, (tensor, entry) in found.items():
        if tensor.dtype not in DTYPES:
            raise DataError(f"{path}: {name} is stored as {tensor.dtype}", "give a model that is not quantised")
        end = tensor.start + tensor.bytes
        if end != 8 + length + entry["data_offsets"][1] or end > size:
            raise DataError(f"{path} is cut short or damaged: {name} does not fit into it", hint)
    return {name: tensor for name, (tensor, _) in found.items()}


def write_tensors(folder: Path, outputs: Mapping[str, Written], shard_bytes: int) -> None:
    """Write tensors to safetensors files of about `shard_bytes` each, with an index where there are several."""
    shards: list[dict[str, Written]] = [{}]
    for name, tensor in outputs.items():
        if shards[-1] and sum(t.bytes for t in shards[-1].values()) + tensor.bytes > shard_bytes:
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
