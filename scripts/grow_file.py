"""Write a larger GGUF file of a Qwen2 model with the same function, in the file's bits. See scripts/grow_target.py.

Quantised weights cannot be divided without rounding. In a GGUF file all matrices are therefore repeated byte by byte,
and the whole hidden state becomes r times as large instead: o_proj and down_proj add r copies of each product, and the
embedding's scales are multiplied by r. RMSNorm removes the factor again if its epsilon is multiplied by r². The norms'
weights are divided by r, because the layers behind them read r copies. If r is a power of two, all of this is exact.

Legend: r tile.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
from grow_target import places_of

from distill.errors import DataError
from distill.files import written_atomically

# Where the blocks of a type hold their factors, counted in numbers of two bytes.
FACTORS = {"Q4_0": [0], "Q5_0": [0], "Q8_0": [0], "Q4_K": [0, 1], "Q5_K": [0, 1], "Q6_K": [104]}
FLOATS = "F32", "F16"
ARCHITECTURE = "qwen2"
TABLES = "token_embd", "output"  # one row for each token
TILED = "embedding_length", "feed_forward_length", "attention.head_count", "attention.head_count_kv"
EPSILON = "attention.layer_norm_rms_epsilon"


def scaled(tensor: gguf.ReaderTensor, factor: int) -> np.ndarray:
    """Return a tensor's rows with all values multiplied."""
    kind = tensor.tensor_type
    if kind.name in FLOATS:
        return np.asarray(tensor.data * tensor.data.dtype.type(factor))
    blocks = np.array(tensor.data).view(np.float16).reshape(-1, gguf.GGML_QUANT_SIZES[kind][1] // 2)
    blocks[:, FACTORS[kind.name]] *= np.float16(factor)
    return np.asarray(blocks.view(np.uint8).reshape(tensor.data.shape))


class GrownFile:
    """A GGUF file of a Qwen2 model, and what `tile` and `layers` make of it, as in `grow`.

    Raises DataError for another architecture, fewer layers, or an embedding of a type whose factors are unknown.
    """

    def __init__(self, source: Path, tile: int, layers: int) -> None:
        self.reader, self.tile, self.layers = gguf.GGUFReader(source), tile, layers
        self.tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        fields = {name: field.contents() for name, field in self.reader.fields.items()}
        if (kind := fields["general.architecture"]) != ARCHITECTURE:
            raise DataError(f"{source} is a {kind}: only {ARCHITECTURE} files can be grown", "give such a file")
        if (embedding := self.tensors["token_embd.weight"].tensor_type.name) not in (known := (*FACTORS, *FLOATS)):
            raise DataError(f"the embedding has the type {embedding}", f"give a file with one of {', '.join(known)}")
        self.places = places_of(fields[f"{ARCHITECTURE}.block_count"], layers)
        changed = {name: fields[f"{ARCHITECTURE}.{name}"] * tile for name in TILED}
        changed |= {"block_count": layers, EPSILON: fields[f"{ARCHITECTURE}.{EPSILON}"] * tile**2}
        self.fields = fields | {f"{ARCHITECTURE}.{name}": value for name, value in changed.items()}

    def sources(self) -> Iterator[tuple[str, gguf.ReaderTensor, bool]]:
        """Yield each tensor's name, the tensor that it is made of, and whether its layer is added."""
        for name, tensor in self.tensors.items():
            if not name.startswith("blk."):
                yield name, tensor, False
        for place in range(self.layers):
            template = f"blk.{self.places.get(place, 0)}."
            for name, tensor in self.tensors.items():
                if name.startswith(template):
                    yield f"blk.{place}.{name.removeprefix(template)}", tensor, place not in self.places

    def shape(self, name: str, tensor: gguf.ReaderTensor) -> list[int]:
        """Return the grown tensor's shape. Tables of tokens keep their rows."""
        rows, *columns = reversed(tensor.shape.tolist())
        return [rows * (1 if part_of(name) in TABLES else self.tile), *(column * self.tile for column in columns)]

    def content(self, name: str, tensor: gguf.ReaderTensor, added: bool) -> np.ndarray:
        """Return the grown tensor's rows."""
        part, tile = part_of(name), self.tile
        if part.endswith("norm"):
            # A head that is the embedding has the embedding's factor, too.
            twice = part == "output_norm" and "output.weight" not in self.tensors
            return np.tile(tensor.data / np.float32(tile**2 if twice else tile), tile)
        values = scaled(tensor, tile) if part == "token_embd" else tensor.data
        grown = np.tile(values, (1, tile) if part in TABLES else (tile,) * values.ndim)
        return np.zeros_like(grown) if added and part in ("attn_output", "ffn_down") else grown


def part_of(name: str) -> str:
    """Return the part of a layer or model that a tensor belongs to, such as attn_q."""
    return name.split(".")[-2]


def grow_file(source: Path, output: Path, tile: int, layers: int) -> None:
    """Write a larger GGUF file with the same logits and types. One tensor at a time is in memory. See `GrownFile`."""
    grown = GrownFile(source, tile, layers)
    with written_atomically(output) as temporary:
        write(grown, temporary)


def write(grown: GrownFile, path: Path) -> None:
    """Write the fields and the tensors of a grown file."""
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    for name, field in grown.reader.fields.items():
        if name != "general.architecture" and not name.startswith("GGUF."):
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, grown.fields[name], field.types[0], sub_type=inner)
    for name, tensor, _ in grown.sources():
        kind, shape = tensor.tensor_type, grown.shape(name, tensor)
        size, width = gguf.GGML_QUANT_SIZES[kind]
        nbytes = math.prod(shape) // size * width
        writer.add_tensor_info(name, shape, np.dtype(np.float32), nbytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    with contextlib.closing(writer):
        for name, tensor, added in grown.sources():
            writer.write_tensor_data(grown.content(name, tensor, added))
