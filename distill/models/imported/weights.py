"""The tensors of a GGUF file as model.safetensors: dequantised and put back into Hugging Face's order, in parts.

A tensor is read, converted and written some rows at a time, so that memory does not grow with the model.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from distill.errors import DataError
from distill.faults import reading
from distill.models.gguf.families import OUTER_NAMES, QKV, Family
from distill.models.gguf.file_head import FileHead
from distill.models.imported.keys import Keys
from distill.progress import Progress

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

PART_VALUES = 2**21  # converted at a time
REPORTED_VALUES = 2**28  # below, a file is written too fast for lines of progress
ROTARY = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
Dtype = Literal["float32", "bfloat16", "float16"]
NAMES: dict[str, Dtype] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # GGUF's and safetensors' alike
CODES = {name: code for code, name in NAMES.items()}
BYTES = {"F32": 4, "BF16": 2, "F16": 2}
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Source:
    """A tensor of a file: its type, its first byte, its shape [rows, …] as Hugging Face writes it.

    `heads`: rows of so many heads are reordered; 0: none are. `shift` was added to the values by the exporter.
    """

    path: Path
    name: str
    kind: GGMLQuantizationType
    start: int
    shape: tuple[int, ...]
    heads: int = 0
    shift: float = 0.0

    @property
    def values(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    def parts(self) -> Iterator[Floats]:
        """The rows in order, some at a time, as fp32; of reordered tensors whole heads at a time."""
        import gguf

        block, size = gguf.GGML_QUANT_SIZES[self.kind]
        width = math.prod(self.shape[1:]) if len(self.shape) > 1 else self.shape[0]
        rows = self.shape[0] if len(self.shape) > 1 else 1
        if self.heads and len(self.shape) == 1:  # a bias: one value a row
            width, rows = 1, self.shape[0]
        unit = rows // self.heads if self.heads else 1
        step = unit * max(1, PART_VALUES // (width * unit))
        row_bytes = width // block * size
        for first in range(0, rows, step):
            count = min(step, rows - first)
            with reading(self.path):
                data = np.fromfile(self.path, np.uint8, count * row_bytes, offset=self.start + first * row_bytes)
            if len(data) < count * row_bytes:
                raise DataError(f"{self.path} is cut short within {self.name}", "copy the file again")
            floats = dequantised(data.reshape(count, row_bytes), self.kind)
            if not np.isfinite(floats).all():
                raise DataError(f"{self.path}: {self.name} holds NaN or infinity", "copy or convert the file again")
            if self.heads:
                floats = unpermuted(floats, count // unit)
            yield floats - np.float32(self.shift) if self.shift else floats


def dequantised(data: NDArray[np.uint8], kind: GGMLQuantizationType) -> Floats:
    """Rows of bytes [N, bytes] as fp32 [N, width], by the gguf package."""
    import gguf

    if kind == gguf.GGMLQuantizationType.F32:
        return data.view("<f4")
    return np.ascontiguousarray(gguf.quants.dequantize(data, kind), np.float32)


def unpermuted(rows: Floats, heads: int) -> Floats:
    """Rows [heads·D, …] from llama.cpp's order, which rotates neighbours, to Hugging Face's, which rotates halves."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def sources(keys: Keys, head: FileHead, family: Family, config: Mapping[str, Any]) -> dict[str, Source]:
    """The tensors of a file by their Hugging Face names, in the order of the model.

    Raises DataError, with the name, for a tensor that the family does not have, that is missing, of another shape than
    the metadata give, or of a type that the gguf package cannot read.
    """
    parts = {gguf_name: part for part, (gguf_name, _) in family.parts.items()}
    outer = {gguf_name: name for name, gguf_name in OUTER_NAMES.items()}
    found: dict[str, Source] = {}
    shapes = _shapes(family, config)
    for name in head.shapes:
        if name in ROTARY:
            continue
        match = LAYER.fullmatch(name)
        if name in outer:
            own = outer[name]
        elif match and match[2] in parts and int(match[1]) < config["num_hidden_layers"]:
            own = f"model.layers.{match[1]}.{parts[match[2]]}.{match[3]}"
        else:
            keys.refuse(f"tensor {name} has no place in a {config['model_type']} of transformers")
        part = own.rsplit(".", 1)[0].split(".", 3)[-1]
        expected = shapes[own if own in shapes else part]
        expected = expected[:1] if own.endswith(".bias") else expected
        shape = tuple(reversed(head.shapes[name]))
        if shape != expected:
            keys.refuse(f"{name} is {list(shape)}, by the metadata it is {list(expected)}", "copy the file again")
        turned = family.interleaved and part in QKV - {"self_attn.v_proj"}
        heads = config["num_attention_heads" if part.endswith("q_proj") else "num_key_value_heads"] if turned else 0
        shift = family.norm_shift if own.endswith("norm.weight") else 0.0
        kind, start = _kind(keys, name, head.kinds[name], shape[-1]), head.start + head.offsets[name]
        found[own] = Source(keys.path, name, kind, start, shape, heads, shift)
    _require_all(keys, family, config, found)
    return dict(sorted(found.items(), key=lambda item: _place(item[0])))


def _shapes(family: Family, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes by Hugging Face's names: of the outer tensors, and of a layer's parts."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    queries, mlp = heads * size, config["intermediate_size"]
    kept = config["num_key_value_heads"] * size
    sizes = {"H": hidden, "Q": queries, "K": kept, "D": size, "F": mlp, "G": queries + 2 * kept, "T": 2 * mlp}
    table = (config["vocab_size"], hidden)
    outer = {"model.embed_tokens.weight": table, "lm_head.weight": table, "model.norm.weight": (hidden,)}
    return outer | {part: tuple(sizes[letter] for letter in letters) for part, (_, letters) in family.parts.items()}


def _kind(keys: Keys, name: str, number: int, width: int) -> GGMLQuantizationType:
    import gguf

    try:
        kind = gguf.GGMLQuantizationType(number)
    except ValueError:
        keys.refuse(f"{name} has the type {number}, which the gguf package does not know", "pip install -U gguf")
    if kind.name not in BYTES and kind not in gguf.quants._type_traits:
        keys.refuse(f"{name} is {kind.name}, which the gguf package cannot dequantise", "quantise it to another type")
    block = gguf.GGML_QUANT_SIZES[kind][0]
    if width % block:
        keys.refuse(
            f"{name} is {kind.name}, in blocks of {block} values, and its rows have {width}", "copy the file again"
        )
    return kind


def _require_all(keys: Keys, family: Family, config: Mapping[str, Any], found: Mapping[str, Source]) -> None:
    biases = set(family.biases)
    if config.get("attention_bias"):
        biases |= {f"self_attn.{part}_proj" for part in "qkvo"}
    if config.get("mlp_bias"):
        biases |= {f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    needed = ["model.embed_tokens.weight", "model.norm.weight"]
    for index in range(config["num_hidden_layers"]):
        needed += [f"model.layers.{index}.{part}.weight" for part in family.parts]
        needed += [f"model.layers.{index}.{part}.bias" for part in sorted(biases)]
    missing = [name for name in needed if name not in found]
    if missing:
        keys.refuse(f"{len(missing)} tensors are missing, the first is {missing[0]} by its Hugging Face name")
    strange = [name for name in found if name.endswith(".bias") and name.split(".", 3)[-1][:-5] not in biases]
    if strange:
        keys.refuse(f"a {config['model_type']} of transformers has no {strange[0]}")


def _place(name: str) -> tuple[int, int]:
    parts = name.split(".")
    return (1, int(parts[2])) if parts[1] == "layers" else (0 if "embed" in name else 2, 0)


def rotary_factors(path: Path, head: FileHead) -> dict[str, Floats]:
    """The tensors of rotary factors by name; they stand in config.json, not among the weights."""
    import gguf

    kinds = {name: gguf.GGMLQuantizationType(head.kinds[name]) for name in ROTARY if name in head.shapes}
    return {
        name: next(Source(path, name, kind, head.start + head.offsets[name], (head.shapes[name][0],)).parts())[0]
        for name, kind in kinds.items()
    }


def stored_types(found: Mapping[str, Source], dtype: Dtype | None) -> dict[str, str]:
    """The type in which each tensor is stored, as safetensors names it.

    With `dtype`, that one. Else floats stay as they are and quantised tensors become F32; vectors, which GGUF keeps in
    F32, take the type of the matrices where all of those have one of 16 bits and no vector loses a digit by it.
    """
    if dtype is not None:
        return dict.fromkeys(found, CODES[dtype])
    types = {name: one.kind.name if one.kind.name in BYTES else "F32" for name, one in found.items()}
    matrices = {types[name] for name, one in found.items() if len(one.shape) > 1}
    vectors = [name for name, one in found.items() if len(one.shape) == 1]
    if len(matrices) == 1 and (narrow := matrices.pop()) != "F32":
        exact = all(
            (as_floats(converted(part, narrow), narrow) == part).all()
            for name in vectors
            for part in found[name].parts()
        )
        types |= dict.fromkeys(vectors, narrow) if exact else {}
    return types


def converted(floats: Floats, code: str) -> NDArray[Any]:
    """fp32 values in a type of safetensors, rounded to the nearest; BF16 as its bits."""
    import gguf

    if code == "BF16":
        return np.ascontiguousarray(gguf.quants.quantize(floats, gguf.GGMLQuantizationType.BF16)).view("<u2")
    with np.errstate(over="ignore"):
        return floats.astype("<f4" if code == "F32" else "<f2", copy=False)


def as_floats(values: NDArray[Any], code: str) -> Floats:
    """The inverse of `converted`."""
    if code == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def write_weights(place: Path, found: Mapping[str, Source], types: Mapping[str, str]) -> None:
    """Write a safetensors file; DataError for a value that its type cannot hold."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, one in found.items():
        size = one.values * BYTES[types[name]]
        entries[name] = {"dtype": types[name], "shape": list(one.shape), "data_offsets": [at, at + size]}
        at += size
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    total = sum(one.values for one in found.values())
    progress = Progress("million values", max(1, total // 10**6)) if total > REPORTED_VALUES else None
    done = 0
    with place.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name, one in found.items():
            for part in one.parts():
                values = converted(part, types[name])
                if not np.isfinite(as_floats(values, types[name])).all():
                    raise DataError(
                        f"{one.path}: {one.name} holds values too large for {NAMES[types[name]]}", "use --dtype float32"
                    )
                file.write(values.data.cast("B"))
                before, done = done // 10**6, done + part.size
                if progress is not None and done // 10**6 > before:
                    progress.step(done // 10**6 - before)
