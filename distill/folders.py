"""The files of a model folder: config.json, checked when read, the tokenizer's, and the tensors."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy
from numpy.typing import NDArray

from distill.errors import DataError, DistillError
from distill.files import ADAPTER, copy_file, has_form, kind_of, read_object, write_json, write_text
from distill.progress import warn_once
from distill.vocabulary.encoding import QWEN2
from distill.vocabulary.vocabulary import tokenizer_content, tokenizer_settings

HINT = "correct config.json, or copy the folder again"
FORMS: dict[str, tuple[Any, str]] = {
    "model_type": (str, "text"),
    "architectures": ([str], "a list of names"),
    "layer_types": ([str], "a list of names"),
    **dict.fromkeys(("text_config", "rope_parameters", "rope_scaling", "quantization_config"), (dict, "an object")),
}
# Upper bounds for the models of a decade. Lists and empty models get these sizes before any weight is read.
LARGEST_SIZES = {
    "vocab_size": 2**22,
    "num_hidden_layers": 2**10,
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), 2**16),
    **dict.fromkeys(("hidden_size", "intermediate_size"), 2**20),
    "max_position_embeddings": 2**40,
}
TEMPLATE_FILES = "chat_template.jinja", "chat_template.json"
MORE_TEMPLATES = "additional_chat_templates"  # a folder
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *(*TEMPLATE_FILES, "vocab.json", "merges.txt", "tokenizer.model"),
)
PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")  # They read tokenizer.json, and add nothing.
PLAIN_MODULE = "plain_tokenizer"
PLAIN_CLASS = '''from transformers import PreTrainedTokenizerFast


class PlainTokenizer(PreTrainedTokenizerFast):
    """The unchanged tokenizer.json of this folder."""
'''


@dataclass(frozen=True)
class ModelSizes:
    """A model and its sizes. `mlp` is the width in its configuration."""

    path: str
    architecture: str
    parameters: int
    layers: int
    hidden: int
    mlp: int
    vocabulary: int
    bytes: int


def read_config(folder: Path) -> dict[str, Any]:
    """The unchanged config.json of a folder. Raises DataError, with the key, for a damaged or too large value."""
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
    weights = config.get("transformers_weights")
    if weights not in (None, SINGLE):
        what = f"{path}: {prefix}transformers_weights names {weights!r} as the weights, and other programs ignore it"
        raise DataError(what, f"delete the key, and name the file {SINGLE}")
    _check_rope(path, config, prefix)


def _check_rope(path: Path, config: dict[str, Any], prefix: str) -> None:
    """Raise DataError if rope_parameters and rope_scaling differ, because transformers takes all of rope_scaling."""
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    if not new or not old:
        return
    if isinstance(new.get("full_attention"), dict):  # one entry for each kind of layer
        new = new["full_attention"]
    theta = {"rope_theta": config.get("rope_theta")}
    whole = [theta | rope | {"rope_type": rope.get("rope_type", rope.get("type"))} for rope in (new, old)]
    settings = [{key: value for key, value in rope.items() if key != "type" and value is not None} for rope in whole]
    differing = [key for key in settings[0] | settings[1] if settings[0].get(key) != settings[1].get(key)]
    if differing:
        key = differing[0]
        values = " and ".join(f"{rope.get(key)!r:.60}" for rope in settings)
        raise DataError(
            f"{path}: {prefix}rope_parameters and {prefix}rope_scaling differ: {key} is {values}",
            "write all settings of the rotary embedding, rope_theta among them, into rope_parameters, and delete "
            "rope_scaling",
        )


def copy_tokenizer(source: Path, destination: Path) -> None:
    """Copy the tokenizer and chat templates of `source` into the model folder `destination`, and pin it there.

    The files are not changed. transformers may change a tokenizer when it loads and saves it.
    """
    for name in (*TOKENIZER_FILES, f"{PLAIN_MODULE}.py"):
        if (source / name).is_file():
            copy_file(source / name, destination / name)
    if (source / MORE_TEMPLATES).is_dir():
        shutil.copytree(source / MORE_TEMPLATES, destination / MORE_TEMPLATES, dirs_exist_ok=True)
    pin_tokenizer(destination)


def pin_tokenizer(folder: Path) -> None:
    """Make AutoTokenizer use the unchanged tokenizer.json of a model folder.

    The classes of architectures replace the file's normalizer and pre-tokenizer. transformers takes the class of the
    architecture if the folder names no class. For Qwen 2 and 3.5 it takes that class always, unless auto_map has an
    entry. The entry is followed only with trust_remote_code, so it names a class that adds nothing.
    """
    path, settings = folder / "tokenizer.json", tokenizer_settings(folder)
    content = tokenizer_content(path) if path.is_file() else {}
    named = settings.get("tokenizer_class") or PLAIN_CLASSES[0]
    nfc = content.get("normalizer") == {"type": "NFC"}
    as_qwen2 = nfc and json.dumps(QWEN2) in json.dumps(content.get("pre_tokenizer"))
    fits = as_qwen2 and named.removesuffix("Fast") == "Qwen2Tokenizer"
    settings["tokenizer_class"] = named if fits or named in PLAIN_CLASSES else PLAIN_CLASSES[0]
    kind = str(read_config(folder).get("model_type"))
    if (kind == "qwen2" and not fits) or kind.startswith("qwen3_5"):
        settings.setdefault("auto_map", {"AutoTokenizer": [None, f"{PLAIN_MODULE}.PlainTokenizer"]})
        write_text(folder / f"{PLAIN_MODULE}.py", PLAIN_CLASS)
    write_json(folder / "tokenizer_config.json", settings)


# ── Tensors in safetensors files: names, types and shapes from the headers, values in parts ──

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Bytes of a value by safetensors' name of its type.
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
NUMPY_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # numpy has no bf16, so its bits are read.
Floats = NDArray[numpy.float32]


def torch_type(name: str) -> torch.dtype:
    """torch's type for safetensors' name. torch is imported here, because an export does not need it."""
    import torch

    special = {"BF16": torch.bfloat16, "BOOL": torch.bool, "U8": torch.uint8}
    kinds = {"F": "float", "I": "int"}
    return special.get(name) or getattr(torch, f"{kinds[name[0]]}{name[1:]}")


@dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file, whose values are read on demand. `dtype` is safetensors' name of its type."""

    path: Path
    name: str
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
        """Return `count` rows from `first` on as numpy holds them (bf16: its bits). DataError for integers."""
        if self.dtype not in NUMPY_FLOATS:
            raise DataError(f"{self.path}: a tensor is stored as {self.dtype}", "give a model that is not quantised")
        import torch
        from safetensors import safe_open

        with safe_open(self.path, "pt") as file:
            part = file.get_slice(self.name)[first : first + count]
        values: NDArray[Any] = (part.view(torch.int16) if self.dtype == "BF16" else part).numpy()
        return values.view(NUMPY_FLOATS[self.dtype])

    def read(self) -> Tensor:
        """Return the whole tensor, mapped into memory from the file."""
        from safetensors import safe_open

        with safe_open(self.path, "pt") as file:
            tensor: Tensor = file.get_tensor(self.name)
        return tensor


# Every command reads weights through these functions. Other programs choose differently among several files, so that
# files that disagree are refused with their names.
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
AS_SAFETENSORS = "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW)"
COMPUTED = ("inv_freq", "masked_bias")  # buffers that old versions of transformers saved
EMBEDDINGS = ("embed_tokens.weight", "embed_in.weight", "wte.weight", "word_embeddings.weight")
HEADS = ("lm_head.weight", "embed_out.weight")
COMPARED_VALUES = 2**22


def refuse_adapter(folder: Path) -> None:
    """Raise DataError for a folder with an adapter, with or without the model that the adapter changes."""
    path = folder / ADAPTER
    if not path.is_file():
        return
    base = read_object(path, "delete it, or copy the folder again").get("base_model_name_or_path")
    named = "name the model that it was trained on, and this folder as its adapter (target.adapter, --adapter)"
    if (folder / "config.json").is_file():
        named = f"move its files to a folder of their own and {named}, or delete them to use the model without it"
    raise DataError(
        f"{folder} holds an adapter ({ADAPTER}, for {str(base)[:200]}), which is not read as a model", named
    )


def weight_files(folder: Path) -> list[Path]:
    """The expected safetensors files of a model folder: model.safetensors, or the files of its index.

    Raises DataError if both exist and disagree.
    """
    refuse_adapter(folder)
    names = sorted(set(_weight_map(folder).values())) or [SINGLE]
    if (folder / SINGLE).is_file() and names != [SINGLE]:
        other = next(name for name in names if name != SINGLE)
        what = f"{folder} holds {SINGLE} and {INDEX}, which names {other}; it is unclear which are the weights"
        raise DataError(what, f"delete the weights that you do not want: {SINGLE}, or the index and its files")
    return [folder / name for name in names]


def _weight_map(folder: Path) -> dict[str, str]:
    """The file of each tensor in model.safetensors.index.json. Empty without an index."""
    index = folder / INDEX
    if not index.is_file():
        return {}
    content = read_object(index)
    if not has_form(content, {"weight_map": {...: str}}):
        raise DataError(f"{index} is damaged: `weight_map` must give a file for each tensor", "copy the folder again")
    files: dict[str, str] = content["weight_map"]
    wrong = [name for name in files.values() if not name or Path(name).name != name or "\0" in name]
    if wrong or not files:
        fault = f"{wrong[0][:60]!r} is no name of a file" if wrong else "it names no files"
        raise DataError(f"{index} is damaged: {fault}", "copy the folder again")
    return files


def present_files(folder: Path) -> list[Path]:
    """The files of `weight_files`. Raises DataError if one is missing. Other weights are named on stderr."""
    files = weight_files(folder)
    missing = [path.name for path in files if not path.is_file()]
    if not missing:
        others = {path for kind in ("*.safetensors", "pytorch_model*.bin") for path in folder.glob(kind)}
        if unread := sorted(path.name for path in others - set(files)):
            read = files[0].name if len(files) == 1 else f"the {len(files)} files of {INDEX}"
            more = f" and {len(unread) - 3} more files" if len(unread) > 3 else ""
            warn_once(f"warning: the weights of {folder} are {read}; not read: {', '.join(unread[:3])}{more}")
        return files
    shards = sorted(path.name for path in folder.glob("model-*.safetensors"))
    if missing != [SINGLE]:
        what = f"{folder}: {len(missing)} of the {len(files)} files that {INDEX} names are missing, first {missing[0]}"
        raise DataError(what, "copy or download them, too")
    if shards:
        raise DataError(f"{folder} holds {shards[0]} without {INDEX}", "copy the index, too")
    raise DataError(
        f"{folder} has no weights: no {SINGLE}",
        "give a whole Hugging Face model folder; weights in pytorch_model.bin must be saved again as safetensors: "
        f"{AS_SAFETENSORS}",
    )


def stored_tensors(folder: Path, tied: bool) -> dict[str, Stored]:
    """The tensors of a model folder by name, from the files' headers. `tied`: config.json makes the head the embedding.

    Raises DataError for missing or damaged files, and for files that disagree: a tensor in two files, in another file
    than the index names, or beyond the index. A tied model must not store another head. Only that check reads values.
    Weights of whole numbers need a scale, and are refused.
    """
    stored: dict[str, Stored] = {}
    for file in present_files(folder):
        for name, tensor in read_header(file).items():
            if name in stored:
                hint = "delete the file of another model, and name only the others in the index"
                raise DataError(f"{folder}: {name} is in {stored[name].path.name} and in {file.name}", hint)
            stored[name] = tensor
    places = _weight_map(folder)
    lacking = [name for name, file in places.items() if name not in stored or stored[name].path.name != file]
    beyond = [name for name in stored if places and name not in places and not name.endswith(COMPUTED)]
    if lacking or beyond:
        name = (lacking or beyond)[0]
        fault = (
            f"{INDEX} places {name} in {places[name]}, which does not hold it"
            if lacking
            else (f"{stored[name].path.name} holds {name}, which {INDEX} does not name")
        )
        more = len(lacking) + len(beyond) - 1
        hint = "the index and its files must be of one save: copy or download the folder again"
        raise DataError(f"{folder}: {fault}" + (f" ({more} more such tensors)" if more else ""), hint)
    for name, tensor in stored.items():
        if tensor.dtype not in NUMPY_FLOATS and name.endswith(".weight"):
            what = f"{tensor.path}: {name} is stored as {tensor.dtype}, and config.json names no quantisation"
            raise DataError(what, "give a model that is not quantised")
    if tied:
        _require_one_head(folder, stored)
    return stored


def _require_one_head(folder: Path, stored: Mapping[str, Stored]) -> None:
    """Raise DataError if the head of a tied model has other values than its embedding."""
    embedding, head = (next((name for name in stored if name.endswith(ends)), None) for ends in (EMBEDDINGS, HEADS))
    if embedding is None or head is None:
        return
    ours, theirs = stored[embedding], stored[head]
    rows = ours.shape[0] if ours.shape and ours.numel else 0
    step = max(1, COMPARED_VALUES // max(1, math.prod(ours.shape[1:])))

    def values(of: Stored, first: int) -> Floats:
        return to_floats(of.rows(first, min(step, rows - first)), of.dtype)

    if ours.shape != theirs.shape or not all(
        numpy.array_equal(values(ours, first), values(theirs, first), equal_nan=True) for first in range(0, rows, step)
    ):
        raise DataError(
            f"{folder}: tie_word_embeddings in config.json makes the head the embedding, but {head} differs from "
            f"{embedding}",
            "set tie_word_embeddings: false to use the head, or save the model again without it",
        )


def read_header(path: Path) -> dict[str, Stored]:
    """Return the tensors of a safetensors file by name, without their values.

    Raises DataError for a file that is missing, damaged or cut short, and for a type that is not read here.
    """
    from safetensors import SafetensorError, safe_open

    hint = "copy or download the file again"
    try:
        path.open("rb").close()  # safetensors calls every file missing that it cannot open.
        with safe_open(path, "numpy") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - a handle, no mapping
            tensors = {
                name: Stored(path, name, part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()
            }
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}", hint) from None
    except SafetensorError as error:
        raise DataError(f"{path} is cut short or damaged: {error}", hint) from None
    for name, tensor in tensors.items():
        if tensor.dtype not in ITEM_BYTES:
            raise DataError(f"{path}: {name} is stored as {tensor.dtype}", "give a model that is not quantised")
    return tensors


def is_whole(path: Path) -> bool:
    """Whether a safetensors file exists and has its whole length."""
    try:
        return bool(read_header(path))
    except (DataError, OSError):
        return False


def write_header(file: BinaryIO, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Write the header of a safetensors file with these types and shapes. The data follows in this order."""
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
    """Values in numpy's type (for bf16, its bits) as fp32."""
    if dtype == "BF16":
        return (values.astype(numpy.uint32) << 16).view(numpy.float32)
    return values.astype(numpy.float32, copy=False)


def from_floats(values: Floats, dtype: str) -> NDArray[Any]:
    """fp32 values in F32, F16 or BF16, rounded to the nearest value. Values that are too large become infinity."""
    if dtype == "BF16":
        import gguf

        return numpy.ascontiguousarray(gguf.quants.quantize(values, gguf.GGMLQuantizationType.BF16)).view("<u2")
    with numpy.errstate(over="ignore"):
        return values.astype(NUMPY_FLOATS[dtype], copy=False)


# ── Folders that hold a draft head, and no model ──

# Words in the `architectures`, model_type or keys of a head's config.json, with the name of the kind of head. The
# pattern below matches tensors that a whole model lacks.
HEAD_WORDS = {
    "eagle3": "EAGLE-3",
    "eagle": "EAGLE",
    "dflash": "DFlash",
    "medusa": "Medusa",
    "speculator": "speculators",
    "nextn": "multi-token prediction",
    "mtp": "multi-token prediction",
}
_HEAD_ALONE = re.compile(r"^(model\.)?(fc\.weight|d2t|t2d|midlayer\..*|medusa_head\..*|\d+\.0\.linear\.weight)$")


def refuse_head(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise DataError for a folder that holds a draft head, and no model that decodes by itself."""
    stated = [*(config.get("architectures") or []), config.get("model_type"), config.get("speculators_model_type")]
    words = " ".join(map(str, (*stated, *(key for key in config if key.endswith("_config"))))).lower()
    kind = next((kind for kind in HEAD_WORDS if kind in words.replace("mtp_num", "")), None)
    if kind is None and config.get("num_hidden_layers") in (0, 1) and (folder / "model.safetensors").is_file():
        with contextlib.suppress(DistillError):
            tensor = next(filter(_HEAD_ALONE.match, read_header(folder / "model.safetensors")), None)
            kind = None if tensor is None else "medusa" if "medusa" in tensor or "linear" in tensor else "eagle"
    if kind is None:
        return
    method = {"mtp": "mtp", "nextn": "mtp", "speculator": "eagle3"}.get(kind, kind)
    used = {"method": method, "model": str(folder), "num_speculative_tokens": 3}
    raise DataError(
        f"{folder} is a head ({HEAD_WORDS[kind]}), which drafts from the hidden states of its target: it cannot decode "
        "by itself",
        f"serve it with its target: vllm serve TARGET --speculative-config {shlex.quote(json.dumps(used))}; "
        "to draft here, give a whole model",
    )
