"""Tensors in the safetensors files of a model folder: names, types and shapes from the headers, values in parts."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from torch import Tensor

from distill.errors import DataError
from distill.faults import reading
from distill.files import read_object

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
        with reading(self.path):
            data = numpy.fromfile(
                self.path, numpy.uint8, values * kind.itemsize, offset=self.start + first * kind.itemsize
            )
        flat = torch.from_numpy(data).view(kind)
        return flat.view(self.shape) if count is None else flat


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
