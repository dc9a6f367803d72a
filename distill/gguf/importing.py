"""Import a GGUF file as a model folder: a folder that the user names, or one in the cache that other readers use.

The cache has one folder for each file. Its name depends on the file's path, size, times, inode and head. config.json
and the tokenizer are written when the file is first named, the weights when they are first read. The cache can be
deleted at any time.
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

# ── The tensors as model.safetensors: dequantised, in Hugging Face's order ──
# Tensors are read, converted and written a few rows at a time, so that memory does not grow with the model.

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

PART_VALUES = 2**21  # values of a tensor that one thread converts at a time
ROTARY = (LLAMA3_FACTORS, LONG_FACTORS, SHORT_FACTORS)
Dtype = Literal["float32", "bfloat16", "float16"]
DTYPES: dict[str, Dtype] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # GGUF's and safetensors' names
FLOAT_BITS = {"F32": 24, "BF16": 8, "F16": 11}  # bits of the significand
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# The difference of two roundings of one matrix, in steps of the types. llama.cpp's files have at most 1.1 for a matrix
# quantised twice. A matrix that differs by 3 % of its standard deviation has 1.8.
MAX_STEPS = 1.5


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a file. `shape` is that of Hugging Face, [rows, …], and `start` the first byte of the data.

    `heads`: number of heads whose rows are reordered, 0 for none. `shift`: what the exporter added to the values.
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
        """Bits of a quantised value without its share of scales, or bits of a float's significand."""
        import gguf

        block, size = gguf.GGML_QUANT_SIZES[self.kind]
        return FLOAT_BITS.get(self.kind.name, 8 * size // block)

    def blocks(self) -> NDArray[np.uint8]:
        """Rows of a matrix in blocks of the file's type [rows, blocks, bytes]. The file is read when they are used."""
        import gguf

        block, size = gguf.GGML_QUANT_SIZES[self.kind]
        shape = (self.shape[0], self.shape[1] // block, size)
        return np.memmap(self.path, np.uint8, "r", self.start, shape)

    def parts(self) -> Iterator[Floats]:
        """Yield the rows in order, some at a time, as fp32. Reordered tensors come in whole heads."""
        import gguf

        block, size = gguf.GGML_QUANT_SIZES[self.kind]
        rows = (
            1 if len(self.shape) == 1 and not self.heads else self.shape[0]
        )  # A reordered bias has one value per row.
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
    """Reorder rows [heads·D, …] from llama.cpp's rope (neighbours rotate) to Hugging Face's (halves rotate)."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def are_one_matrix(first: FileTensor, second: FileTensor) -> bool:
    """Whether two tensors are one matrix, rounded to two types: no value differs by more than MAX_STEPS.

    A step is the range of 32 neighbours divided by the levels of the type, summed over both types. Rounding moves a
    value by half a step, and by up to another half where scales are rounded and ends are clipped.
    """
    width = math.gcd(32, first.shape[-1])

    def agree(first_values: Floats, second_values: Floats) -> bool:
        groups = np.arange(0, first_values.size, width)
        steps = np.zeros(len(groups), np.float32)
        for values, bits in ((first_values, first.bits), (second_values, second.bits)):
            low, high = np.minimum.reduceat(values, groups), np.maximum.reduceat(values, groups)
            steps += (high.clip(min=0) - low.clip(max=0)) / np.float32(2**bits - 1)
        differences = np.maximum.reduceat(abs(first_values - second_values), groups)
        return bool((differences <= MAX_STEPS * steps).all())

    parts = zip(first.parts(), second.parts(), strict=True)
    return all(agree(first_rows.ravel(), second_rows.ravel()) for first_rows, second_rows in parts)


def sources(head: FileHead, config: Mapping[str, Any]) -> dict[str, FileTensor]:
    """Return the tensors of a file by their Hugging Face names, in the order of the model.

    Raises DataError, with the tensor's name, if the family has no such tensor, if one is missing, if its shape differs
    from the metadata, or if the gguf package cannot read its type.
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
        hf_name = sizes.hugging_face_name(name)
        if hf_name is None:
            head.refuse(f"{model} has no tensor for {name}")
        if hf_name not in expected:
            head.refuse(f"{model} has no {hf_name}")
        shape = tuple(reversed(head.shapes[name]))
        if shape != expected[hf_name]:
            what = f"{name} is {list(shape)}, but by the metadata it is {list(expected[hf_name])}"
            head.refuse(what, "copy the file again")
        path, start = head.places[name]
        heads, shift = sizes.reordered_heads(hf_name), sizes.norm_shift(hf_name)
        tensors[hf_name] = FileTensor(path, name, _kind(head, name, shape[-1]), start, shape, heads, shift)
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
            f"{name} is nvfp4, a type that keeps some scales in other tensors", "quantise the model to another type"
        )
    block = gguf.GGML_QUANT_SIZES[kind][0]
    if width % block:
        head.refuse(
            f"{name} is {kind.name}, whose blocks of {block} values do not divide rows of {width}",
            "copy the file again",
        )
    return kind


def rotary_factors(head: FileHead) -> dict[str, Floats]:
    """Return the tensors of rotary factors by name. They go into config.json, not into the weights."""
    tensors = {}
    for name in ROTARY:
        if name in head.shapes:
            width = head.shapes[name][0]
            path, start = head.places[name]
            source = FileTensor(path, name, _kind(head, name, width), start, (width,))
            tensors[name] = next(source.parts())[0]
    return tensors


def stored_types(tensors: Mapping[str, FileTensor], dtype: Dtype | None, quantised: str) -> dict[str, str]:
    """Return the dtype in which each tensor is stored, in safetensors' names.

    `dtype` sets one for all. With None, floats keep their type and quantised tensors become `quantised`. GGUF keeps
    vectors in F32: they take the 16-bit type of the matrices if all matrices share one and no vector loses a digit.
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
    """Write a safetensors file. Raises DataError for a value that does not fit its type."""
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
CONTENT = "content.json"  # digests of the small files, written after them
FORMAT = 4  # version of the folders in the cache


def file_type(path: Path) -> str:
    """Return the type that a GGUF file states for its weights, such as q4_k_m, or its matrices' commonest type."""
    import gguf

    head = open_head(path)
    try:
        name = gguf.LlamaFileType(head.values["general.file_type"]).name
        return name.removeprefix("MOSTLY_").removeprefix("ALL_").lower()
    except (KeyError, ValueError):
        kinds = Counter(head.kinds[name] for name, shape in head.shapes.items() if len(shape) > 1)
        return type_name(kinds.most_common(1)[0][0]) if kinds else "unknown"


def one_engine(target: str, draft: str, in_bits: bool = False) -> tuple[str, str]:
    """Return the references of a pair that one engine decodes. If one is a GGUF file, it is imported for PyTorch.

    Two GGUF files stay as they are, for llama.cpp. With `in_bits`, PyTorch decodes the files themselves.
    """
    if in_bits or is_gguf(target) == is_gguf(draft):
        return target, draft
    target, draft = (str(folder_of(reference)) if is_gguf(reference) else reference for reference in (target, draft))
    return target, draft


@dataclass(frozen=True)
class Import:
    """The content of a file without the tensors' data: config.json, tokenizer, and tensors by Hugging Face's names.

    `tied` says that the file holds the same matrix as embeddings and head. It is empty if it does not.
    """

    path: Path
    config: dict[str, Any]
    tokenizer: ImportedTokenizer
    tensors: dict[str, FileTensor]
    types: dict[str, str]
    tied: str = ""

    @property
    def bytes(self) -> int:
        """Size of the weights in the types in which they are stored."""
        return sum(source.values * ITEM_BYTES[self.types[name]] for name, source in self.tensors.items())

    @property
    def quantised(self) -> list[str]:
        """Names of the quantised types in the file."""
        return sorted({source.kind.name for source in self.tensors.values()} - set(DTYPES))

    @property
    def retyped(self) -> str:
        """State which tokens llama.cpp treats differently from the file's types, to append to a line. Empty if none."""
        tokens = self.tokenizer.retyped
        shown = ", ".join(tokens[:3]) + (" and others" if len(tokens) > 3 else "")
        return f"; llama.cpp treats these as special by name, against the file's types: {shown}" if tokens else ""


def read_import(path: Path, dtype: Dtype | None = None, quantised: str = "F32") -> Import:
    """Read a GGUF file for an import. The weights will be stored as `dtype`, or as `stored_types` says for None.

    Raises DataError, with the name, for an architecture, pre-tokenizer, tensor or type that cannot be imported.
    """
    head = open_head(path)
    require_loadable(head)
    config = configuration(head, rotary_factors(head))
    tokenizer = imported_tokenizer(head)
    tensors, tied = sources(head, config), ""
    matrices = [tensors[name] for name in (EMBEDDING, HEAD) if name in tensors]
    if len(matrices) == 2 and FAMILIES[config["model_type"]].tied is not False and are_one_matrix(*matrices):
        del tensors[HEAD]
        tensors[EMBEDDING] = max(matrices, key=lambda matrix: matrix.bits)
        config["tie_word_embeddings"] = True
        kinds = " and ".join(f"{matrix.name} ({matrix.kind.name})" for matrix in matrices)
        tied = f"; {kinds} are the same matrix apart from rounding, kept once as {tensors[EMBEDDING].kind.name}"
    types = stored_types(tensors, dtype, quantised)
    main_type = Counter(types[name] for name in tensors).most_common(1)[0][0]
    ids = {f"{role}_token_id": tokenizer.ids.get(role) for role in ("bos", "pad")}
    ends = tokenizer.ends
    config |= ids | {"eos_token_id": ends if len(ends) > 1 else ends[0], "dtype": DTYPES[main_type]}
    return Import(path, config, tokenizer, tensors, types, tied)


def write_import(imported: Import, out: Path) -> None:
    """Write the result of `read_import` to a Hugging Face folder `out`, completely or not at all.

    Raises RunError before the first write if the disk is too small.
    """
    _require_room(imported, out)

    def write(folder: Path) -> None:
        _write_small(folder, imported)
        write_weights(folder / WEIGHTS, imported)

    write_folder(out, write)


def folder_of(reference: str, weights: bool = True) -> Path:
    """Return the cache folder of a GGUF file. The file is imported if the folder is absent or damaged.

    Without `weights`, only the small files are written. Quantised weights are stored in bfloat16, which rounds them
    (8 bits) by less than their own types did. Raises DataError for a file that cannot be imported and RunError if the
    disk is too small.
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
        note(f"importing {path.name} to {folder} ({size}{imported.tied}; `distill doctor --clear imported` deletes it)")
        write_atomically(folder / WEIGHTS, lambda place: write_weights(place, imported), several=True)
    return folder


def _is_intact(folder: Path) -> bool:
    """Whether the small files of a cache folder are those that were written."""
    try:
        known = read_json(folder / CONTENT, {...: str})
        return digests_of({name: folder / name for name in known}) == known
    except (DataError, OSError):
        return False


def _into(folder: Path, imported: Import) -> None:
    """Write the small files one by one, each atomically. Other processes may write or read the same folder."""
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
    """Return a file's name in the cache: its own name and a digest that differs for another file of that name."""
    try:
        with path.open("rb") as file:
            head = file.read(2**16)
        states = [part.stat() for part in split_parts(path) if part.exists()]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", "give a GGUF file or a model folder") from None
    # A replaced file can have the same size, time of writing and head, but its inode and the inode's time differ.
    stated = [(state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino) for state in states]
    parts = [str(path.resolve()), stated, FORMAT, hashlib.sha256(head).hexdigest()]
    return f"{path.stem[:60]}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:12]}"


def _write_small(folder: Path, imported: Import) -> None:
    """Write all files except the weights."""
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
            f"but {place} has {free / 1e9:.1f} GB",
            f"free some space, set DISTILL_CACHE to another disk, or store 16 bits per weight: "
            f"distill import-gguf {imported.path} OUT --dtype bfloat16, and name OUT instead of the file",
        )


def check_import(reference: str) -> str:
    """Return a line saying that a GGUF file can be imported. Raises what `read_import` raises. Reads no weights."""
    imported = read_import(Path(reference))
    kinds = f", {', '.join(imported.quantised)} dequantised" if imported.quantised else ""
    more = kinds + imported.tied + imported.retyped
    return f"weights of {reference}: {len(imported.tensors)} tensors fit its metadata{more}"
