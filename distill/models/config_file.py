"""config.json of a model folder, with the forms and sizes checked that every reader of it relies on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distill.errors import DataError
from distill.files import has_form, kind_of, read_object

HINT = "correct config.json, or copy the folder again"
FORMS: dict[str, tuple[Any, str]] = {
    "model_type": (str, "text"),
    "architectures": ([str], "a list of names"),
    "layer_types": ([str], "a list of names"),
    **dict.fromkeys(("text_config", "rope_parameters", "rope_scaling", "quantization_config"), (dict, "an object")),
}
# What a model of the next decade stays below. Lists and empty models are made in these sizes before any weight is read.
LARGEST = {
    "vocab_size": 2**22,
    "num_hidden_layers": 2**10,
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), 2**16),
    **dict.fromkeys(("hidden_size", "intermediate_size"), 2**20),
    "max_position_embeddings": 2**40,
}


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder as it stands; raises DataError, with the key, where it is damaged or out of bounds."""
    path = folder / "config.json"
    found = read_object(path)
    _check(path, found, "")
    if found.get("text_config") is not None:
        _check(path, found["text_config"], "text_config.")
    return found


def _check(path: Path, config: dict[str, Any], prefix: str) -> None:
    for key, (form, words) in FORMS.items():
        value = config.get(key)
        if value is not None and not has_form(value, form):
            raise DataError(f"{path}: {prefix}{key} must be {words}, got {kind_of(value)}", HINT)
    for key, most in LARGEST.items():
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and not 0 <= value <= most:
            raise DataError(f"{path}: {prefix}{key} is {value}, must lie between 0 and {most}", HINT)
