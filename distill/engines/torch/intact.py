"""Whether a loaded model is the one that its config.json describes, with each tensor from its files.

transformers fills a tensor that it does not find, or finds in another shape, with random numbers and only logs it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distill.errors import DataError
from distill.folders import COMPUTED
from distill.progress import is_verbose, warn_once

VALUES_PER_BYTE = 16  # more than any quantised type stores
SHOWN = 3  # tensors named in a message
AGAIN = "copy or download the folder again; config.json and weights must be of one model"


def require_own_type(reference: str, config: Any) -> None:
    """Raise DataError for a config.json whose model_type and `architectures` are of different models."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    named = (getattr(config, "architectures", None) or [None])[0]
    types = [kind for kind, name in CLASSES.items() if named in (name if isinstance(name, tuple) else (name,))]
    if types and config.model_type not in types:
        raise DataError(
            f"{reference}/config.json: model_type is {config.model_type}, but its weights are of a {named} "
            f"({', '.join(types)})",
            AGAIN,
        )


def require_language_model(reference: str, config: Any) -> None:
    """Raise DataError for a config.json that describes no language model alone, or does not say how long its texts
    may be."""
    if not hasattr(config, "vocab_size"):
        raise DataError(
            f"{reference} is a {config.model_type}, whose language model is only one of its parts",
            "name a folder or GGUF file of the language model alone",
        )
    if not hasattr(config, "max_position_embeddings"):
        raise DataError(
            f"{reference}/config.json names no max_position_embeddings",
            "add it: the number of tokens that the model was made for",
        )


def require_possible(reference: str, config: Any) -> None:
    """Raise DataError for a config.json of a folder whose largest tensors cannot be in its weight files.

    transformers makes tensors of those sizes before it compares any shape.
    """
    folder, inner = Path(reference), config.get_text_config()
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    hidden, heads, size, mlp, rows = (
        value if isinstance(value := getattr(inner, name, None), int) else 1
        for name in ("hidden_size", "num_attention_heads", "head_dim", "intermediate_size", "vocab_size")
    )
    largest = hidden * max(rows, mlp, heads * size, hidden)
    if stored and largest > VALUES_PER_BYTE * stored:
        raise DataError(
            f"{reference}/config.json: a tensor of {largest} values cannot be in weight files of {stored} bytes",
            AGAIN,
        )


def require_whole(reference: str, model: Any, info: dict[str, Any]) -> None:
    """Raise DataError unless every tensor of a model came from its files; `info` is transformers' loading info.

    Missing tensors, tensors of another shape, and tensors of the files that belong into a layer of the model, which
    has no place for them, are refused. Other tensors without a place are only named on stderr.
    """
    missing, shapes, extra = (sorted(info[f"{what}_keys"]) for what in ("missing", "mismatched", "unexpected"))
    misplaced = [] if is_quantised(model.config) else [name for name in extra if _inside_a_layer(model, name)]
    kind, fault = model.config.model_type, None
    if missing:
        fault = f"missing in the weights: {_count(missing)} of the {kind} that config.json describes"
    elif shapes:
        name, stored, expected = shapes[0]
        more = f" (and {len(shapes) - 1} more tensors)" if len(shapes) > 1 else ""
        fault = f"{name} is {list(stored)} in the weights and {list(expected)} by config.json{more}"
    elif info.get("error_msgs"):
        fault = f"its tensors do not make a {kind}: {str(info['error_msgs'][0]).strip().splitlines()[0]}"
    elif misplaced:
        fault = f"the weights hold {_count(misplaced)} for which a {kind} has no place in its layers: "
        fault += "config.json is of another model type than the weights"
    if fault is not None:
        raise DataError(f"{reference}: {fault}", AGAIN)
    if extra:
        warn_once(f"warning: {reference} holds {_count(extra)} for which a {kind} has no place; not used")


def _count(names: list[str]) -> str:
    """`3 tensors (a, b, c)`, the first ones only where there are many."""
    shown = ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''} ({shown})"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Within a `with` block transformers reports only errors, and shows no bar: `require_whole` names the rest."""
    from transformers.utils import logging

    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    if not is_verbose():
        logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


def is_quantised(config: Any) -> bool:
    """Whether a configuration is of weights that are stored quantised."""
    return getattr(config, "quantization_config", None) is not None


def _inside_a_layer(model: Any, name: str) -> bool:
    """Whether a tensor's name lies below a numbered layer that the model has."""
    parts = name.split(".")
    if parts[-1] in COMPUTED:
        return False
    modules = dict(model.named_modules())
    prefix = f"{model.base_model_prefix}."
    for depth in range(len(parts) - 1, 0, -1):
        place = ".".join(parts[:depth])
        if any(part.isdigit() for part in parts[:depth]) and (place in modules or prefix + place in modules):
            return True
    return False
