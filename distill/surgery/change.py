"""The record of an operation on a model: its sizes and its divergence from the target, before and after.

Every operation of this room makes a model folder from a model folder and returns Changes: `transplant.transplant`
streams files, `cutter.cut_folder` cuts a loaded model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distill.errors import DataError
from distill.files import has_form, read_object, write_json
from distill.results.cut_results import Change, Size

SUPPORTED = ("qwen2", "qwen3", "llama", "mistral")
RECORD = "surgery.json"  # beside the weights: the changes to a folder, oldest first


def decoder_layers(model: Any) -> Any:
    """The blocks of a supported model; raises DataError for an architecture that cannot be cut."""
    require_supported(model.config.model_type)
    return model.model.layers


def require_supported(architecture: str) -> None:
    """Raise DataError for an architecture that cannot be cut."""
    if architecture not in SUPPORTED:
        raise DataError(
            f"surgery on architecture `{architecture}` is not supported",
            f"supported: {', '.join(SUPPORTED)}; choose a donor of one of these",
        )


def size_of(model: Any, kept_vocabulary: int | None = None) -> Size:
    """The sizes of a loaded model; `kept_vocabulary` is the size of a trimmed head."""
    config = model.config
    head = model.get_output_embeddings().weight
    tied = model.get_input_embeddings().weight is head
    kept = head.shape[0] if kept_vocabulary is None else kept_vocabulary
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    unread = (head.shape[0] - kept) * head.shape[1] * head.element_size()
    embedding = model.get_input_embeddings().weight
    if not tied:
        unread += (embedding.shape[0] - 1) * embedding.shape[1] * embedding.element_size()
    return Size(
        parameters=sum(p.numel() for p in model.parameters()),
        bytes_per_step=total - unread,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        mlp=(config.intermediate_size,) * config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        vocabulary=config.vocab_size,
        kept_vocabulary=kept,
        tied=tied,
    )


def read_changes(folder: Path) -> list[dict[str, Any]]:
    """The recorded changes of a folder, oldest first; none for a model that no operation made."""
    path = folder / RECORD
    if not path.exists():
        return []
    changes: list[dict[str, Any]] = read_object(path).get("changes", [])
    if not has_form(changes, [dict]):
        raise DataError(f"{path} is damaged: `changes` must be a list of objects", "copy the folder again")
    return changes


def record_change(folder: Path, before: list[dict[str, Any]], *changes: Change) -> None:
    """Write surgery.json: the changes before, and these."""
    write_json(folder / RECORD, {"changes": [*before, *(change.as_json() for change in changes)]})
