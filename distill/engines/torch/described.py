"""Whether a loaded model is the one that its folder describes: each tensor from its files, and only the kept tokens.

Legend: V vocabulary, K kept tokens, H hidden.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distill.errors import DataError
from distill.files import has_form, read_object, write_json
from distill.folders import COMPUTED, LARGEST_SIZES, read_config
from distill.progress import is_verbose, warn_once

# ── Each tensor as config.json says and from the weight files ──
# transformers fills a tensor that it does not find, or finds in another shape, with random numbers and only logs it.

VALUES_PER_BYTE = 16  # more than any quantised type stores
SHOWN = 3  # tensors named in a message
AGAIN = "copy or download the folder again; config.json and weights must be of one model"


def empty_model(config: Any) -> Any:
    """The model of a configuration without weights: its layers, names and shapes."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


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


# Sizes that families name otherwise, where transformers gives them no usual name.
OWN_NAMES = {
    "max_position_embeddings": ("max_seq_len", "seq_length", "n_positions", "n_ctx", "context_length"),
    "intermediate_size": ("ffn_dim", "ffn_hidden_size", "n_inner"),
}


def with_usual_names(config: Any) -> Any:
    """A configuration whose sizes have their usual names as well; an MLP that it does not state is four times as wide
    as its hidden states."""
    inner = config.get_text_config()
    for name, others in OWN_NAMES.items():
        if getattr(inner, name, None) is None:
            stated = [size for other in others if isinstance(size := getattr(inner, other, None), int)]
            if not stated and name == "intermediate_size" and hasattr(inner, "hidden_size"):
                stated = [4 * inner.hidden_size]
            if stated:
                setattr(inner, name, stated[0])
    return config


def require_language_model(reference: str, config: Any) -> None:
    """Raise DataError for a config.json that describes no language model alone, or does not say how long its texts
    may be."""
    if not hasattr(config, "vocab_size"):
        raise DataError(
            f"{reference} is a {config.model_type}, whose language model is only one of its parts",
            "name a folder or GGUF file of the language model alone",
        )
    if (getattr(config, "max_position_embeddings", None) or 0) < 1:
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
        config, own = read_config(Path(reference)), getattr(model.config, "attribute_map", {})
        if lacking := [key for key in LARGEST_SIZES if key != "head_dim" and config.get(own.get(key, key)) is None]:
            fault += f"; config.json names no {', '.join(lacking)}"
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


# ── Trimmed heads: a draft proposes only the kept tokens; its folder still holds the full head ──
# `kept_tokens.json` beside the weights lists the kept ids. Our loader computes only their logits and gives the others
# −inf; plain transformers and llama.cpp ignore the file and use the full head.

FILE = "kept_tokens.json"
CAP = "final_logit_softcapping"


def write_kept(folder: Path, kept: list[int], vocabulary: int, metadata: dict[str, Any]) -> None:
    """Write kept_tokens.json: `kept` ids, ascending, of `vocabulary` rows; `metadata` records how they were chosen."""
    write_json(folder / FILE, {"format": 1, "vocabulary": vocabulary, "kept": kept, **metadata})


def read_kept(folder: Path) -> dict[str, Any] | None:
    """kept_tokens.json of a model folder, None where there is none; raises DataError when it is damaged."""
    path = folder / FILE
    if not path.is_file():
        return None
    hint = f"delete it to use the full head, or trim {folder} again"
    content = read_object(path, hint)
    if not has_form(content, {"kept": [int], "vocabulary": int}):
        raise DataError(f"{path} is damaged: `kept` must be a list of ids, `vocabulary` a number", hint)
    kept, size = content["kept"], content["vocabulary"]
    if not kept or not all(a < b for a, b in itertools.pairwise(kept)) or kept[0] < 0 or kept[-1] >= size:
        raise DataError(f"{path} is damaged: the kept ids are not ascending ids of the vocabulary", hint)
    return content


class KeptHead(torch.nn.Module):
    """A head that multiplies only the kept rows [K, H] and spreads the result over V columns, −inf elsewhere."""

    kept: Tensor
    weight: Any  # a tensor, or what other bits hold

    def __init__(self, head: torch.nn.Linear, kept: Tensor, cap: float | None = None) -> None:
        super().__init__()
        self.cap = cap  # of the logits, which would make −inf a number if it were applied behind this head
        self.rows = head.weight.shape[0]
        self.product: torch.nn.Module | None = None  # what multiplies instead of torch's own product
        self.register_buffer("kept", kept.to(head.weight.device), persistent=False)
        self.register_buffer("weight", head.weight.detach()[kept.to(head.weight.device)].clone(), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., H]."""
        if self.product is not None:
            kept_logits = self.product(hidden)
        else:
            kept_logits = torch.nn.functional.linear(hidden, self.weight)
        if self.cap is not None:
            kept_logits = self.cap * torch.tanh(kept_logits / self.cap)
        logits = kept_logits.new_full((*kept_logits.shape[:-1], self.rows), -torch.inf)
        return logits.index_copy_(-1, self.kept, kept_logits)


def trim_head(model: Any, kept: Sequence[int]) -> Any:
    """Let a loaded model compute only the kept tokens' logits; for inference, since such a model cannot be saved."""
    rows = model.lm_head.weight.shape[0]
    if kept[-1] >= rows:
        raise DataError(f"{FILE} keeps token {kept[-1]}, the head has {rows} rows", "trim this folder again")
    cap = getattr(model.config, CAP, None)
    model.lm_head = KeptHead(model.lm_head, torch.tensor(kept), cap)
    if cap is not None:
        setattr(model.config, CAP, None)
    return model


@contextlib.contextmanager
def trimmed_head(model: Any, kept: Sequence[int]) -> Iterator[Any]:
    """Within the block, the model with its head trimmed as by `trim_head`."""
    head, cap = model.lm_head, getattr(model.config, CAP, None)
    try:
        yield trim_head(model, kept)
    finally:
        model.lm_head = head
        if cap is not None:
            setattr(model.config, CAP, cap)
