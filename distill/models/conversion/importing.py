"""A GGUF file imported: into a folder that the user names, or into the cache, where every reader of folders finds it.

The cache holds a folder for each file, by its path, size, time and head: config.json and the tokenizer once the file is
named, the weights once they are read. It can be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.errors import DataError, RunError
from distill.files import write_atomically, write_folder, write_json, write_text
from distill.models.conversion.imported_config import configuration
from distill.models.conversion.imported_tokenizer import ImportedTokenizer, read_tokenizer
from distill.models.conversion.imported_weights import (
    DTYPES,
    Dtype,
    Source,
    rotary_factors,
    sources,
    stored_types,
    write_weights,
)
from distill.models.gguf.file import require_loadable
from distill.models.gguf.file_head import open_head
from distill.models.model_files import pin_tokenizer
from distill.models.tensor_files import ITEM_BYTES
from distill.progress import note

WEIGHTS = "model.safetensors"
FORMAT = 1  # of the folders in the cache


def is_gguf(reference: str) -> bool:
    """Whether a model is named by a GGUF file."""
    return reference.endswith(".gguf")


def file_type(path: Path) -> str:
    """The type that a GGUF file names for its weights, such as q4_k_m, or that of most of its matrices."""
    import gguf

    head = open_head(path)
    try:
        name = gguf.LlamaFileType(head.values["general.file_type"]).name
        return name.removeprefix("MOSTLY_").removeprefix("ALL_").lower()
    except (KeyError, ValueError):
        kinds = Counter(head.kinds[name] for name, shape in head.shapes.items() if len(shape) > 1)
        return gguf.GGMLQuantizationType(kinds.most_common(1)[0][0]).name.lower() if kinds else "unknown"


def one_engine(target: str, draft: str) -> tuple[str, str]:
    """The references of a pair that decodes in one engine: a GGUF file beside a folder is imported, for PyTorch.

    Two GGUF files stay, for llama.cpp.
    """
    if is_gguf(target) == is_gguf(draft):
        return target, draft
    target, draft = (str(folder_of(reference)) if is_gguf(reference) else reference for reference in (target, draft))
    return target, draft


@dataclass(frozen=True)
class Import:
    """What a file holds but for the tensors' data: config.json, tokenizer, and tensors by Hugging Face's names."""

    path: Path
    config: dict[str, Any]
    tokenizer: ImportedTokenizer
    tensors: dict[str, Source]
    types: dict[str, str]

    @property
    def bytes(self) -> int:
        """Size of the weights as they are stored."""
        return sum(source.values * ITEM_BYTES[self.types[name]] for name, source in self.tensors.items())

    @property
    def quantised(self) -> list[str]:
        """The types of the file's tensors that are no floats, by name."""
        return sorted({source.kind.name for source in self.tensors.values()} - set(DTYPES))


def read_import(path: Path, dtype: Dtype | None = None) -> Import:
    """What a GGUF file would be as a folder, its weights stored as `dtype` (None: as `stored_types` says).

    Raises DataError, by name, for an architecture, a pre-tokenizer, a tensor or a type that cannot be imported.
    """
    head = open_head(path)
    require_loadable(head)
    config = configuration(head, rotary_factors(head))
    tokenizer = read_tokenizer(head)
    tensors = sources(head, config)
    types = stored_types(tensors, dtype)
    main_type = Counter(types[name] for name in tensors).most_common(1)[0][0]
    ids = {f"{role}_token_id": tokenizer.ids.get(role) for role in ("bos", "pad")}
    ends = tokenizer.ends
    config |= ids | {"eos_token_id": ends if len(ends) > 1 else ends[0], "dtype": DTYPES[main_type]}
    return Import(path, config, tokenizer, tensors, types)


def write_import(imported: Import, out: Path) -> None:
    """Write what `read_import` found as a Hugging Face folder `out`, whole or not at all.

    Raises RunError for a disk that is too small, before anything is written.
    """
    _require_room(imported, out)

    def write(folder: Path) -> None:
        _write_small(folder, imported)
        write_weights(folder / WEIGHTS, imported.tensors, imported.types)

    write_folder(out, write)


def folder_of(reference: str, weights: bool = True) -> Path:
    """The folder in the cache of a GGUF file, imported if it is not there; without `weights`, its small files alone.

    Raises DataError for a file that cannot be imported, RunError where the disk is too small.
    """
    path = Path(reference)
    folder = cache_folder() / _name_of(path)
    if not (folder / "config.json").is_file():
        imported = read_import(path)
        _into(folder, lambda place: _write_small(place, imported))
    if weights and not (folder / WEIGHTS).is_file():
        imported = read_import(path)
        _require_room(imported, folder)
        note(
            f"importing {path.name} to {folder} ({imported.bytes / 1e6:.0f} MB; the folder can be deleted at any time)"
        )
        write_atomically(
            folder / WEIGHTS, lambda place: write_weights(place, imported.tensors, imported.types), several=True
        )
    return folder


def cache_folder() -> Path:
    """Where imported files are kept: DISTILL_CACHE, else `distill` in the user's cache folder."""
    own = os.environ.get("DISTILL_CACHE")
    if own:
        return Path(own).expanduser().absolute() / "imported"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "distill" / "imported"


def _name_of(path: Path) -> str:
    """The folder's name: that of the file, and a digest of what tells it from another file of that name."""
    try:
        with path.open("rb") as file:
            head, state = file.read(2**16), os.fstat(file.fileno())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", "give a GGUF file or a model folder") from None
    parts = [str(path.resolve()), state.st_size, state.st_mtime_ns, FORMAT, hashlib.sha256(head).hexdigest()]
    return f"{path.stem[:60]}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:12]}"


def _into(folder: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a folder that several processes may make at once: the first one stays."""
    place = folder.with_name(f"{folder.name}.{os.getpid()}")
    try:
        write_folder(place, write)
        with contextlib.suppress(OSError):  # another process was first
            place.rename(folder)
    finally:
        shutil.rmtree(place, ignore_errors=True)


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
    return f"weights of {reference}: {len(imported.tensors)} tensors fit its metadata{kinds}"
