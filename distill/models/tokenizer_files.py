"""The files of a tokenizer, copied unchanged: loading and saving a tokenizer through transformers may change it."""

from __future__ import annotations

import shutil
from pathlib import Path

from distill.files import copy_file, write_json, write_text
from distill.models.config_file import read_config
from distill.vocabulary.reading import tokenizer_settings

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


def copy_tokenizer(source: Path, destination: Path) -> None:
    """Copy the tokenizer and chat templates of `source` into the model folder `destination`, and pin it there."""
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
