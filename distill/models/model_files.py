"""The files of a model folder beside its weights: config.json, checked when read, and those of the tokenizer."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.errors import DataError
from distill.files import copy_file, has_form, kind_of, read_object, write_json, write_text
from distill.vocabulary.tokenizer_files import tokenizer_settings

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
