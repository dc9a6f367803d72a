"""A PEFT adapter merged into its base: once, into the cache, where every reader of folders finds the result.

The cache holds a folder for each pair of base and adapter, by the names, sizes and times of their files: config.json
and the tokenizer once the pair is named, the weights once they are read. It can be deleted at any time.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from distill.errors import DataError, DistillError, RunError
from distill.files import ADAPTER, cache_folder, copy_file, digest, remove_left, write_atomically, write_json
from distill.folders import (
    MORE_TEMPLATES,
    SINGLE,
    TEMPLATE_FILES,
    copy_tokenizer,
    is_whole,
    read_config,
    read_header,
    stored_tensors,
)
from distill.progress import note
from distill.vocabulary.vocabulary import tokenizer_settings

FORMAT = 2  # of the folders in the cache
TENSORS = "adapter_model.safetensors"
WRITTEN = "merged.json"  # written last of the small files: what was merged
WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5")
STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
SCRATCH = "folder"  # ending of the folder that transformers writes a merged model into
OUTER = (".embed_tokens.", ".lm_head.")  # in names of tensors
SAME_BASE = "name the model that the adapter was trained on as its base"


def merged_folder(
    base: Path, own: bool, adapter: Path, empty: Callable[[Path], Any], load: Callable[[Path, str], Any] | None
) -> Path:
    """The folder in the cache of a base with an adapter merged into it, made if it is not there or damaged; without
    `load`, its small files alone.

    `own`: the base is the user's folder, whose files tell whether it changed; others change their names with their
    content. `empty` gives a folder's model without weights, `load` with them in a type. The weights keep the base's
    type, in which PEFT adds up. Raises DataError, by name, for an adapter that cannot be merged into this base,
    RunError where the disk is too small.
    """
    if not (adapter / ADAPTER).is_file():
        state = f"holds no {ADAPTER}" if adapter.is_dir() else "does not exist"
        raise DataError(f"the adapter {adapter} {state}", "give the folder that PEFT's save_pretrained wrote")
    identity = [FORMAT, str(base.resolve()), _state(base) if own else [], str(adapter.resolve()), _state(adapter)]
    folder = cache_folder("merged") / f"{adapter.name[:60]}-{digest(identity)[:12]}"
    remove_left(folder, SINGLE, SCRATCH)
    small, whole = (folder / WRITTEN).is_file(), load is None or is_whole(folder / SINGLE)
    if small and whole:
        return folder
    with _explained(adapter, base):
        settings = require_mergeable(base, adapter, empty)
        if not small:
            _write_small(folder, base, adapter)
        if not whole and load is not None:
            size = _require_room(base, folder)
            what = f"{settings.peft_type.value}, trained on {settings.base_model_name_or_path}"
            kept = f"{folder} ({size / 1e6:.0f} MB; `distill doctor --clear merged` deletes it)"
            note(f"merging the adapter {adapter} ({what}) into {base}: {kept}")
            with warnings.catch_warnings(action="ignore"):
                merged = _merged(base, adapter, load)
            write_atomically(folder / SINGLE, lambda place: _write_weights(place, merged), several=True)
    return folder


def _state(folder: Path) -> list[Any]:
    """Names, sizes and times of the files of a folder, which tell a change without reading it."""
    files = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file() and path.name[0] != "."]
    return [[name, found.st_size, found.st_mtime_ns] for name, found in files]


@contextlib.contextmanager
def _explained(adapter: Path, base: Path) -> Iterator[None]:
    """Turn the errors of PEFT, which are of many kinds, into a DataError."""
    try:
        yield
    except (DistillError, OSError):
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0][:300] or type(error).__name__
        raise DataError(f"the adapter {adapter} cannot be merged into {base}: {first}", SAME_BASE) from error


def require_mergeable(base: Path, adapter: Path, empty: Callable[[Path], Any]) -> Any:
    """PEFT's settings of an adapter whose tensors are, by name and shape, those that this base takes.

    Reads headers alone. Raises DataError for an adapter without a merge, a quantised base, a head that is tied, and
    tensors that are missing, unknown or of another shape.
    """
    from peft import PeftConfig, get_peft_model, get_peft_model_state_dict

    settings: Any = PeftConfig.from_pretrained(str(adapter))
    kind = settings.peft_type.value
    if settings.is_prompt_learning or settings.is_adaption_prompt:
        what = f"the adapter {adapter} is of the kind {kind}, which has no weights to add to a model's"
        raise DataError(what, "LoRA and its relatives can be merged; others cannot be a target here")
    if "quantization_config" in read_config(base):
        what = f"the adapter {adapter} cannot be merged into {base}, whose weights are quantised"
        raise DataError(what, "name the model in floating point that it was quantised from; target.quantise rounds it")
    if not (adapter / TENSORS).is_file():
        hint = "save it again with safetensors: PeftModel.from_pretrained(MODEL, FOLDER).save_pretrained(NEW)"
        raise DataError(f"the adapter {adapter} holds no {TENSORS}", hint)
    stored = {name: tensor.shape for name, tensor in read_header(adapter / TENSORS).items()}
    outer = any(".base_layer." in name and any(part in name for part in OUTER) for name in stored)
    with warnings.catch_warnings(action="ignore"):
        model = get_peft_model(empty(base), settings)
        state = get_peft_model_state_dict(model, save_embedding_layers=outer)
    expected = {name: tuple(tensor.shape) for name, tensor in state.items()}
    tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    if tied and (changed := next((name for name in expected if any(part in name for part in OUTER)), None)):
        what = f"the adapter {adapter} changes {changed}, and the head of {base} is its embedding (tie_word_embeddings)"
        raise DataError(what, "save the base with a head of its own, and tune it without embeddings and head")
    missing, unknown = [sorted(a - b) for a, b in ((expected.keys(), stored.keys()), (stored.keys(), expected.keys()))]
    if missing:
        what = f"the adapter {adapter} lacks {len(missing)} tensors that {base} takes, the first is {missing[0]}"
        raise DataError(what, f"copy it again, or {SAME_BASE}")
    if unknown:
        what = f"{base} has no place for {len(unknown)} tensors of the adapter {adapter}, the first is {unknown[0]}"
        raise DataError(what, SAME_BASE)
    if other := next((name for name in expected if expected[name] != stored[name]), None):
        shapes = f"{list(stored[other])} in the adapter {adapter}, and {list(expected[other])} for {base}"
        raise DataError(f"{other} is {shapes}", SAME_BASE)
    return settings


def _write_small(folder: Path, base: Path, adapter: Path) -> None:
    """All but the weights: the base's files, with the tokenizer and the chat template of the adapter where it has them.

    Other processes may write or read the folder; each file is written whole or not at all, WRITTEN last.
    """
    tokenizer = (adapter / "tokenizer.json").is_file()
    inline = tokenizer and bool(tokenizer_settings(adapter).get("chat_template"))
    templates = [name for name in TEMPLATE_FILES if (adapter / name).is_file()]
    # transformers prefers a file to the text in tokenizer_config.json, so the base's files would hide the adapter's.
    replaced = TEMPLATE_FILES if inline or templates else ()
    for path in sorted(base.iterdir()):
        left_out = path.name.endswith(WEIGHTS) or path.name[0] == "." or path.name in replaced
        if path.is_file() and not left_out:
            write_atomically(folder / path.name, functools.partial(copy_file, path), several=True)
    if (base / MORE_TEMPLATES).is_dir() and not replaced:
        shutil.copytree(base / MORE_TEMPLATES, folder / MORE_TEMPLATES, dirs_exist_ok=True)
    if tokenizer:
        copy_tokenizer(adapter, folder)
    for name in templates:
        copy_file(adapter / name, folder / name)
    write_json(folder / WRITTEN, {"base": str(base), "adapter": str(adapter)})


def _require_room(base: Path, folder: Path) -> int:
    """Bytes of the merged weights; RunError where the disk has less."""
    size = sum(tensor.bytes for tensor in stored_tensors(base, tied=False).values())
    free = shutil.disk_usage(folder).free
    if size > free:
        what = f"the merged model takes {size / 1e9:.1f} GB, and {folder} has {free / 1e9:.1f} GB"
        raise RunError(what, "free some, or set DISTILL_CACHE to another disk")
    return size


def _merged(base: Path, adapter: Path, load: Callable[[Path, str], Any]) -> Any:
    """The model with the adapter's product added, in the type of most of the base's weights."""
    from peft import PeftModel

    types: Counter[str] = Counter()
    for tensor in stored_tensors(base, tied=False).values():
        types[tensor.dtype] += tensor.numel
    model = load(base, STORED.get(types.most_common(1)[0][0], "float32"))
    merged = PeftModel.from_pretrained(model, str(adapter), torch_device="cpu").merge_and_unload()
    if broken := next((name for name, value in merged.named_parameters() if not value.isfinite().all()), None):
        raise DataError(f"the adapter {adapter} makes {broken} of {base} infinite or NaN", "copy or train it again")
    return merged


def _write_weights(place: Path, model: Any) -> None:
    """One safetensors file of a model, under the names that transformers writes."""
    scratch = place.with_name(f".{SINGLE}.{os.getpid()}.{SCRATCH}")
    try:
        model.save_pretrained(scratch, max_shard_size="1000TB")
        os.replace(scratch / SINGLE, place)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
