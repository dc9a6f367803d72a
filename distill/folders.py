"""The files of a model folder: config.json, checked when read, the tokenizer's, and the tensors."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy
from numpy.typing import NDArray

from distill.errors import DataError
from distill.files import LARGEST, copy_file, has_form, kind_of, parse_json, read_object, write_json, write_text
from distill.vocabulary.files import tokenizer_settings

HINT = "correct config.json, or copy the folder again"
FORMS: dict[str, tuple[Any, str]] = {
    "model_type": (str, "text"),
    "architectures": ([str], "a list of names"),
    "layer_types": ([str], "a list of names"),
    **dict.fromkeys(("text_config", "rope_parameters", "rope_scaling", "quantization_config"), (dict, "an object")),
}
# What a model of the next decade stays below. Lists and empty models are made in these sizes before any weight is read.
LARGEST_SIZES = {
    "vocab_size": 2**22,
    "num_hidden_layers": 2**10,
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), 2**16),
    **dict.fromkeys(("hidden_size", "intermediate_size"), 2**20),
    "max_position_embeddings": 2**40,
}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
PLAIN_MODULE = "plain_tokenizer"
PLAIN_CLASS = '''from transformers import PreTrainedTokenizerFast


class PlainTokenizer(PreTrainedTokenizerFast):
    """The tokenizer.json beside this file, as it stands."""
'''


@dataclass(frozen=True)
class ModelSizes:
    """A model and its sizes; `mlp` is the width that its configuration names."""

    path: str
    architecture: str
    parameters: int
    layers: int
    hidden: int
    mlp: int
    vocabulary: int
    bytes: int


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder as it stands; raises DataError, with the key, where it is damaged or out of bounds."""
    path = folder / "config.json"
    config = read_object(path)
    _check(path, config, "")
    if config.get("text_config") is not None:
        _check(path, config["text_config"], "text_config.")
    return config


def _check(path: Path, config: dict[str, Any], prefix: str) -> None:
    for key, (form, words) in FORMS.items():
        value = config.get(key)
        if value is not None and not has_form(value, form):
            raise DataError(f"{path}: {prefix}{key} must be {words}, got {kind_of(value)}", HINT)
    for key, largest in LARGEST_SIZES.items():
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and not 0 <= value <= largest:
            raise DataError(f"{path}: {prefix}{key} is {value}, must lie between 0 and {largest}", HINT)


def copy_tokenizer(source: Path, destination: Path) -> None:
    """Copy the tokenizer and chat templates of `source` into the model folder `destination`, and pin it there.

    The files stay as they are: loading and saving a tokenizer through transformers may change it.
    """
    for name in (*TOKENIZER_FILES, f"{PLAIN_MODULE}.py"):
        if (source / name).is_file():
            copy_file(source / name, destination / name)
    if (source / "additional_chat_templates").is_dir():
        shutil.copytree(source / "additional_chat_templates", destination / "additional_chat_templates")
    pin_tokenizer(destination)


def pin_tokenizer(folder: Path) -> None:
    """Make AutoTokenizer use the tokenizer.json of a model folder, not the tokenizer class of its architecture.

    Without a class in tokenizer_config.json, transformers takes the architecture's own. For qwen2 it does so whatever
    class is named, and splits text as Qwen2 does over any vocabulary, unless auto_map has an entry. The entry is
    followed only with trust_remote_code, so it names a class that adds nothing.
    """
    settings = tokenizer_settings(folder)
    named = settings["tokenizer_class"] = settings.get("tokenizer_class") or "PreTrainedTokenizerFast"
    kind = read_config(folder).get("model_type")
    if kind == "qwen2" and named.removesuffix("Fast") != "Qwen2Tokenizer":
        settings.setdefault("auto_map", {"AutoTokenizer": [None, f"{PLAIN_MODULE}.PlainTokenizer"]})
        write_text(folder / f"{PLAIN_MODULE}.py", PLAIN_CLASS)
    write_json(folder / "tokenizer_config.json", settings)


# ── Tensors in safetensors files: names, types and shapes from the headers, values in parts ──

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Bytes of a value, by safetensors' name of its type.
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
NUMPY_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # numpy has no bf16: its bits
Floats = NDArray[numpy.float32]


def torch_type(name: str) -> torch.dtype:
    """torch's type of safetensors' name; torch is loaded here and not above, because an export needs none of it."""
    import torch

    special = {"BF16": torch.bfloat16, "BOOL": torch.bool, "U8": torch.uint8}
    kinds = {"F": "float", "I": "int"}
    dtype: torch.dtype = special.get(name) or getattr(torch, f"{kinds[name[0]]}{name[1:]}")
    return dtype


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
        return self.numel * ITEM_BYTES[self.dtype]

    def rows(self, first: int, count: int) -> NDArray[Any]:
        """`count` rows of a tensor of floats from `first` on, as numpy holds them; DataError for other types."""
        if self.dtype not in NUMPY_FLOATS:
            raise DataError(f"{self.path}: a tensor is stored as {self.dtype}", "give a model that is not quantised")
        kind = numpy.dtype(NUMPY_FLOATS[self.dtype])
        width = math.prod(self.shape[1:])
        data = numpy.fromfile(self.path, kind, count * width, offset=self.start + first * width * kind.itemsize)
        return data.reshape(count, *self.shape[1:])

    def read(self, first: int = 0, count: int | None = None) -> Tensor:
        """`count` values from `first` on, flat; all of them, in shape, when None."""
        import torch

        kind, width = torch_type(self.dtype), ITEM_BYTES[self.dtype]
        values = self.numel if count is None else count
        data = numpy.fromfile(self.path, numpy.uint8, values * width, offset=self.start + first * width)
        flat = torch.from_numpy(data).view(kind)
        return flat.view(self.shape) if count is None else flat


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder that exist or should; DataError for an index that names no files.

    The files that model.safetensors.index.json names, or model.safetensors.
    """
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return [folder / "model.safetensors"]
    content = read_object(index)
    if not has_form(content, {"weight_map": {...: str}}):
        raise DataError(f"{index} is damaged: `weight_map` must give a file for each tensor", "copy the folder again")
    names = sorted(set(content["weight_map"].values()))
    wrong = [name for name in names if not name or Path(name).name != name or "\0" in name]
    if wrong or not names:
        fault = f"{wrong[0][:60]!r} is no name of a file" if wrong else "it names no files"
        raise DataError(f"{index} is damaged: {fault}", "copy the folder again")
    return [folder / name for name in names]


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """The tensors of a model folder by name, from the files' headers; raises DataError for missing or damaged files."""
    files = weight_files(folder)
    if files == [folder / "model.safetensors"] and not files[0].is_file():
        if any(folder.glob("pytorch_model*.bin*")):
            raise DataError(
                f"{folder} holds pytorch_model.bin, not safetensors",
                "save it again: AutoModelForCausalLM.from_pretrained(...).save_pretrained(..., "
                "safe_serialization=True)",
            )
        raise DataError(f"{folder} has no model.safetensors", "give a whole Hugging Face model folder")
    return {name: tensor for file in files for name, tensor in read_header(file).items()}


HEADER = {...: {"dtype": str, "shape": [int], "data_offsets": [int]}}  # the form of a header, but for __metadata__


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file by name; raises DataError for a missing, damaged or shortened file."""
    hint = "copy or download the file again"
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            if length > size - 8:
                raise DataError(f"{path} is no safetensors file, or only a part of one", hint)
            header = parse_json(file.read(length), LARGEST)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", hint) from None
    except ValueError as error:
        raise DataError(f"{path} has a damaged header: {error}", hint) from None
    if isinstance(header, dict):
        header.pop("__metadata__", None)
    if not has_form(header, HEADER):
        raise DataError(f"{path} has a damaged header: each tensor needs dtype, shape and data_offsets", hint)
    tensors: dict[str, Stored] = {}
    for name, entry in header.items():
        if entry["dtype"] not in ITEM_BYTES:
            raise DataError(f"{path}: {name} is stored as {entry['dtype']}", "give a model that is not quantised")
        first, *last = entry["data_offsets"] or [0]
        tensor = tensors[name] = Stored(path, 8 + length + first, entry["dtype"], tuple(entry["shape"]))
        negative = first < 0 or min(tensor.shape, default=0) < 0
        if negative or last != [first + tensor.bytes] or tensor.start + tensor.bytes > size:
            raise DataError(f"{path} is cut short or damaged: {name} does not fit into it", hint)
    return tensors


def write_header(file: BinaryIO, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Begin a safetensors file of these types and shapes, whose data follows in this order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * ITEM_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    file.write(len(header).to_bytes(8, "little") + header)


def to_floats(values: NDArray[Any], dtype: str) -> Floats:
    """Values as numpy holds them (bf16: its bits) in fp32."""
    if dtype == "BF16":
        return (values.astype(numpy.uint32) << 16).view(numpy.float32)
    return values.astype(numpy.float32, copy=False)


def from_floats(values: Floats, dtype: str) -> NDArray[Any]:
    """fp32 values in F32, F16 or BF16, rounded to the nearest; infinity for those too large."""
    if dtype == "BF16":
        import gguf

        return numpy.ascontiguousarray(gguf.quants.quantize(values, gguf.GGMLQuantizationType.BF16)).view("<u2")
    with numpy.errstate(over="ignore"):
        return values.astype(NUMPY_FLOATS[dtype], copy=False)
