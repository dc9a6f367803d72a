"""A GGUF file imported: into a folder that the user names, or into the cache, where every reader of folders finds it.

The cache holds a folder for each file, by its path, size, times, inode and head: config.json and the tokenizer once the
file is named, the weights once they are read. It can be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from distill.errors import DataError, RunError
from distill.files import (
    cache_folder,
    digests_of,
    is_gguf,
    read_json,
    split_parts,
    write_atomically,
    write_folder,
    write_json,
    write_text,
)
from distill.folders import ITEM_BYTES, Floats, from_floats, is_whole, pin_tokenizer, to_floats, write_header
from distill.gguf.families import ATTENTION, FAMILIES, LLAMA3_FACTORS, LONG_FACTORS, MLP, SHORT_FACTORS, Sizes
from distill.gguf.fields import configuration
from distill.gguf.head import FileHead, known_type, open_head, type_name
from distill.gguf.library import require_loadable
from distill.gguf.tokenizer import ImportedTokenizer, imported_tokenizer
from distill.progress import Progress, note

# ── The tensors as model.safetensors: dequantised and put back into Hugging Face's order ──
# A tensor is read, converted and written some rows at a time, so that memory does not grow with the model.

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

PART_VALUES = 2**21  # values of a tensor converted at a time, when written by each thread
ROTARY = (LLAMA3_FACTORS, LONG_FACTORS, SHORT_FACTORS)
Dtype = Literal["float32", "bfloat16", "float16"]
DTYPES: dict[str, Dtype] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # GGUF's and safetensors' names
FLOAT_BITS = {"F32": 24, "BF16": 8, "F16": 11}  # of a significand
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
MOST_STEPS = 1.5  # llama.cpp's files: 1.1 at most for a matrix quantised twice; another by 3 % of its deviation: 1.8


@dataclass(frozen=True)
class FileTensor:
    """A tensor: its file, its type, its first byte, its shape [rows, …] as Hugging Face writes it.

    `heads`: rows of this many heads are reordered; 0: none are. `shift` was added to the values by the exporter.
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

    @property
    def bits(self) -> int:
        """Bits of a value, its share of scales left out; of a float those of its significand."""
        import gguf

        block, size = gguf.GGML_QUANT_SIZES[self.kind]
        return FLOAT_BITS.get(self.kind.name, 8 * size // block)

    def blocks(self) -> NDArray[np.uint8]:
        """The rows of a matrix as the file has them, in blocks of its type [rows, blocks, bytes]; read when used."""
        import gguf

        block, size = gguf.GGML_QUANT_SIZES[self.kind]
        shape = (self.shape[0], self.shape[1] // block, size)
        return np.memmap(self.path, np.uint8, "r", self.start, shape)

    def parts(self) -> Iterator[Floats]:
        """The rows in order, some at a time, as fp32; of reordered tensors whole heads at a time."""
        import gguf

        block, size = gguf.GGML_QUANT_SIZES[self.kind]
        rows = 1 if len(self.shape) == 1 and not self.heads else self.shape[0]  # a reordered bias has one value a row
        width = self.values // rows
        unit = rows // self.heads if self.heads else 1
        step = unit * max(1, PART_VALUES // (width * unit))
        row_bytes = width // block * size
        for first in range(0, rows, step):
            count = min(step, rows - first)
            data = np.fromfile(self.path, np.uint8, count * row_bytes, offset=self.start + first * row_bytes)
            floats = np.ascontiguousarray(gguf.quants.dequantize(data.reshape(count, row_bytes), self.kind), np.float32)
            if not np.isfinite(floats).all():
                raise DataError(f"{self.path}: {self.name} holds NaN or infinity", "copy or convert the file again")
            if self.heads:
                floats = unpermuted(floats, count // unit)
            yield floats - np.float32(self.shift) if self.shift else floats


def unpermuted(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows [heads·D, …] from llama.cpp's order, which rotates neighbours, to Hugging Face's, which rotates halves."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def are_one(first: FileTensor, second: FileTensor) -> bool:
    """Whether two matrices of a shape are one that was rounded to two types: no value differs by more than MOST_STEPS.

    A step is the range of 32 neighbours over its type's levels, the sum for both types. A value is off by half a step,
    and by less than another half where scales are rounded and ends clipped.
    """

    width = math.gcd(32, first.shape[-1])

    def agree(one: Floats, other: Floats) -> bool:
        groups = np.arange(0, one.size, width)
        steps = np.zeros(len(groups), np.float32)
        for values, bits in ((one, first.bits), (other, second.bits)):
            low, high = (of.reduceat(values, groups) for of in (np.minimum, np.maximum))
            steps += (high.clip(min=0) - low.clip(max=0)) / np.float32(2**bits - 1)
        return bool((np.maximum.reduceat(abs(one - other), groups) <= MOST_STEPS * steps).all())

    parts = zip(first.parts(), second.parts(), strict=True)
    return all(agree(one.ravel(), other.ravel()) for one, other in parts)


def sources(head: FileHead, config: Mapping[str, Any]) -> dict[str, FileTensor]:
    """The tensors of a file by their Hugging Face names, in the order of the model.

    Raises DataError, with the name, for a tensor that the family does not have, that is missing, of another shape than
    the metadata give, or of a type that the gguf package cannot read.
    """
    sizes, model = Sizes.of(config), f"a {config['model_type']} of transformers"
    biases = {*sizes.family.biases}
    for name, parts in (("attention_bias", ATTENTION), ("mlp_bias", MLP)):
        biases |= parts.keys() & sizes.family.more_biases if config.get(name) else set()
    expected = sizes.expected_tensors(biases)
    tensors: dict[str, FileTensor] = {}
    for name in head.shapes:
        if name in ROTARY:
            continue
        own = sizes.hugging_face_name(name)
        if own is None:
            head.refuse(f"tensor {name} has no place in {model}")
        if own not in expected:
            head.refuse(f"{model} has no {own}")
        shape = tuple(reversed(head.shapes[name]))
        if shape != expected[own]:
            head.refuse(f"{name} is {list(shape)}, by the metadata it is {list(expected[own])}", "copy the file again")
        path, start = head.places[name]
        heads, shift = sizes.reordered_heads(own), sizes.norm_shift(own)
        tensors[own] = FileTensor(path, name, _kind(head, name, shape[-1]), start, shape, heads, shift)
    missing = [name for name in expected if name not in tensors]
    if missing:
        head.refuse(f"{len(missing)} tensors are missing, the first is {missing[0]} by its Hugging Face name")
    return dict(sorted(tensors.items(), key=lambda item: _place(item[0])))


def _place(name: str) -> tuple[int, int]:
    parts = name.split(".")
    return (1, int(parts[2])) if parts[1] == "layers" else (0 if "embed" in name else 2, 0)


def _kind(head: FileHead, name: str, width: int) -> GGMLQuantizationType:
    import gguf

    kind = known_type(head.kinds[name])
    if kind is None or (kind.name not in DTYPES and kind not in gguf.quants._type_traits):
        what = f"{name} is {type_name(head.kinds[name])}, which the gguf package cannot dequantise"
        head.refuse(what, "quantise the model to another type, such as q8_0")
    if kind.name == "NVFP4":
        head.refuse(
            f"{name} is nvfp4, whose scales stand partly in other tensors", "quantise the model to another type"
        )
    block = gguf.GGML_QUANT_SIZES[kind][0]
    if width % block:
        head.refuse(
            f"{name} is {kind.name}, in blocks of {block} values, and its rows have {width}", "copy the file again"
        )
    return kind


def rotary_factors(head: FileHead) -> dict[str, Floats]:
    """The tensors of rotary factors by name; they stand in config.json, not among the weights."""
    tensors = {}
    for name in ROTARY:
        if name in head.shapes:
            width = head.shapes[name][0]
            path, start = head.places[name]
            source = FileTensor(path, name, _kind(head, name, width), start, (width,))
            tensors[name] = next(source.parts())[0]
    return tensors


def stored_types(tensors: Mapping[str, FileTensor], dtype: Dtype | None, quantised: str) -> dict[str, str]:
    """The type in which each tensor is stored, as safetensors names it.

    With `dtype`, that one. Else floats stay as they are and quantised tensors become `quantised`; vectors, which GGUF
    keeps in F32, take the type of the matrices where all of those have one of 16 bits and no vector loses a digit by
    it.
    """
    if dtype is not None:
        return dict.fromkeys(tensors, next(code for code, name in DTYPES.items() if name == dtype))
    types = {name: source.kind.name if source.kind.name in DTYPES else quantised for name, source in tensors.items()}
    matrices = {types[name] for name, source in tensors.items() if len(source.shape) > 1}
    vectors = [name for name, source in tensors.items() if len(source.shape) == 1]
    if len(matrices) == 1 and (narrow := matrices.pop()) != "F32":
        exact = all(
            (to_floats(from_floats(part, narrow), narrow) == part).all()
            for name in vectors
            for part in tensors[name].parts()
        )
        types |= dict.fromkeys(vectors, narrow) if exact else {}
    return types


def write_weights(place: Path, imported: Import) -> None:
    """Write a safetensors file; DataError for a value that its type cannot hold."""
    tensors, types = imported.tensors, imported.types
    progress = Progress("tensors", len(tensors), brief=True)
    with place.open("wb") as file:
        write_header(file, {name: (types[name], source.shape) for name, source in tensors.items()})
        for name, source in tensors.items():
            for part in source.parts():
                values: NDArray[Any] = from_floats(part, types[name])
                if not np.isfinite(to_floats(values, types[name])).all():
                    what = f"{source.path}: {source.name} holds values too large for {DTYPES[types[name]]}"
                    raise DataError(what, "use --dtype float32")
                file.write(values.data.cast("B"))
            progress.step()


# ── The folder: one that the user names, or one in the cache ──

WEIGHTS = "model.safetensors"
CONTENT = "content.json"  # the digests of the small files, written last
FORMAT = 4  # of the folders in the cache


def file_type(path: Path) -> str:
    """The type that a GGUF file names for its weights, such as q4_k_m, or that of most of its matrices."""
    import gguf

    head = open_head(path)
    try:
        name = gguf.LlamaFileType(head.values["general.file_type"]).name
        return name.removeprefix("MOSTLY_").removeprefix("ALL_").lower()
    except (KeyError, ValueError):
        kinds = Counter(head.kinds[name] for name, shape in head.shapes.items() if len(shape) > 1)
        return type_name(kinds.most_common(1)[0][0]) if kinds else "unknown"


def one_engine(target: str, draft: str, in_bits: bool = False) -> tuple[str, str]:
    """The references of a pair that decodes in one engine: a GGUF file beside a folder is imported, for PyTorch.

    Two GGUF files stay, for llama.cpp; files that PyTorch decodes `in_bits` of their own stay, too.
    """
    if in_bits or is_gguf(target) == is_gguf(draft):
        return target, draft
    target, draft = (str(folder_of(reference)) if is_gguf(reference) else reference for reference in (target, draft))
    return target, draft


@dataclass(frozen=True)
class Import:
    """What a file holds but for the tensors' data: config.json, tokenizer, and tensors by Hugging Face's names.

    `tied`: that the file holds one matrix as embedding and as head, in words; empty where it does not.
    """

    path: Path
    config: dict[str, Any]
    tokenizer: ImportedTokenizer
    tensors: dict[str, FileTensor]
    types: dict[str, str]
    tied: str = ""

    @property
    def bytes(self) -> int:
        """Size of the weights as they are stored."""
        return sum(source.values * ITEM_BYTES[self.types[name]] for name, source in self.tensors.items())

    @property
    def quantised(self) -> list[str]:
        """The types of the file's tensors that are no floats, by name."""
        return sorted({source.kind.name for source in self.tensors.values()} - set(DTYPES))

    @property
    def retyped(self) -> str:
        """What llama.cpp reads otherwise than the file says, to be put behind a line; empty where there is nothing."""
        tokens = self.tokenizer.retyped
        shown = ", ".join(tokens[:3]) + (" and others" if len(tokens) > 3 else "")
        return f"; special by name, as in llama.cpp, against the file's types: {shown}" if tokens else ""


def read_import(path: Path, dtype: Dtype | None = None, quantised: str = "F32") -> Import:
    """What a GGUF file would be as a folder, its weights stored as `dtype` (None: as `stored_types` says).

    Raises DataError, by name, for an architecture, a pre-tokenizer, a tensor or a type that cannot be imported.
    """
    head = open_head(path)
    require_loadable(head)
    config = configuration(head, rotary_factors(head))
    tokenizer = imported_tokenizer(head)
    tensors, tied = sources(head, config), ""
    twice = [tensors[name] for name in (EMBEDDING, HEAD) if name in tensors]
    if len(twice) == 2 and FAMILIES[config["model_type"]].tied is not False and are_one(*twice):
        del tensors[HEAD]
        tensors[EMBEDDING] = max(twice, key=lambda one: one.bits)
        config["tie_word_embeddings"] = True
        kinds = " and ".join(f"{one.name} ({one.kind.name})" for one in twice)
        tied = f"; {kinds} are one matrix within their rounding, kept once as {tensors[EMBEDDING].kind.name}"
    types = stored_types(tensors, dtype, quantised)
    main_type = Counter(types[name] for name in tensors).most_common(1)[0][0]
    ids = {f"{role}_token_id": tokenizer.ids.get(role) for role in ("bos", "pad")}
    ends = tokenizer.ends
    config |= ids | {"eos_token_id": ends if len(ends) > 1 else ends[0], "dtype": DTYPES[main_type]}
    return Import(path, config, tokenizer, tensors, types, tied)


def write_import(imported: Import, out: Path) -> None:
    """Write what `read_import` found as a Hugging Face folder `out`, whole or not at all.

    Raises RunError for a disk that is too small, before anything is written.
    """
    _require_room(imported, out)

    def write(folder: Path) -> None:
        _write_small(folder, imported)
        write_weights(folder / WEIGHTS, imported)

    write_folder(out, write)


def folder_of(reference: str, weights: bool = True) -> Path:
    """The folder in the cache of a GGUF file, imported if it is not there or damaged; without `weights`, its small
    files alone.

    Quantised weights are stored in bfloat16, whose 8 bits round them by less than their own types did. Raises DataError
    for a file that cannot be imported, RunError where the disk is too small.
    """
    path = Path(reference)
    folder = cache_folder("imported") / file_name(path)
    small, whole = _is_intact(folder), not weights or is_whole(folder / WEIGHTS)
    if small and whole:
        return folder
    imported = read_import(path, quantised="BF16")
    if not small:
        _into(folder, imported)
    if not whole:
        _require_room(imported, folder)
        size = f"{imported.bytes / 1e6:.0f} MB{' in bfloat16' if imported.quantised else ''}"
        note(f"importing {path.name} to {folder} ({size}{imported.tied}; `distill cache --clear imported` deletes it)")
        write_atomically(folder / WEIGHTS, lambda place: write_weights(place, imported), several=True)
    return folder


def _is_intact(folder: Path) -> bool:
    """Whether the small files of a folder in the cache are those that were written."""
    try:
        known = read_json(folder / CONTENT, {...: str})
        return digests_of({name: folder / name for name in known}) == known
    except (DataError, OSError):
        return False


def _into(folder: Path, imported: Import) -> None:
    """Write the small files of a folder that other processes may be making or reading, each whole or not at all."""
    place = folder.with_name(f"{folder.name}.{os.getpid()}")
    try:
        write_folder(place, lambda temporary: _write_small(temporary, imported))
        files = {path.relative_to(place).as_posix(): path for path in place.rglob("*") if path.is_file()}
        write_json(place / CONTENT, digests_of(files))
        for name in (*files, CONTENT):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(place / name, folder / name)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def file_name(path: Path) -> str:
    """The name of a file in the cache: its own, and a digest of what tells it from another file of that name."""
    try:
        with path.open("rb") as file:
            head = file.read(2**16)
        states = [part.stat() for part in split_parts(path) if part.exists()]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", "give a GGUF file or a model folder") from None
    # A replaced file may have the old one's size, time of writing and head: its inode and the inode's time differ.
    stated = [(state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino) for state in states]
    parts = [str(path.resolve()), stated, FORMAT, hashlib.sha256(head).hexdigest()]
    return f"{path.stem[:60]}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:12]}"


def _write_small(folder: Path, imported: Import) -> None:
    """Everything but the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", imported.config)
    content = json.dumps(imported.tokenizer.content, ensure_ascii=False, separators=(",", ":"))
    write_text(folder / "tokenizer.json", content)
    write_json(folder / "tokenizer_config.json", imported.tokenizer.settings)
    for name, text in imported.tokenizer.templates.items():
        place = "chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja"
        write_text(folder / place, text)
    pin_tokenizer(folder)


def _require_room(imported: Import, out: Path) -> None:
    place = next(folder for folder in (out, *out.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(place).free
    if imported.bytes > free:
        raise RunError(
            f"{imported.path.name} needs {imported.bytes / 1e9:.1f} GB as a folder, "
            f"and {place} has {free / 1e9:.1f} GB",
            f"free some, set DISTILL_CACHE to another disk, or store 16 bits a weight: "
            f"distill import-gguf {imported.path} OUT --dtype bfloat16, and name OUT instead of the file",
        )


def check_import(reference: str) -> str:
    """A line that a GGUF file can be imported; raises what `read_import` raises. No weights are read."""
    imported = read_import(Path(reference))
    kinds = f", {', '.join(imported.quantised)} dequantised" if imported.quantised else ""
    more = kinds + imported.tied + imported.retyped
    return f"weights of {reference}: {len(imported.tensors)} tensors fit its metadata{more}"
