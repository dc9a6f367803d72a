"""The record of an operation on a model: its sizes and its divergence from the target, before and after.

Every operation of this room makes a model folder from a model folder and returns Changes: `transplant.transplant`
streams files, `cut_folder.cut_folder` cuts a loaded model.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from distill.errors import DataError
from distill.files import write_json

SUPPORTED = ("qwen2", "qwen3", "llama", "mistral")
RECORD = "surgery.json"  # beside the weights: the changes to a folder, oldest first


@dataclass(frozen=True)
class Size:
    """Sizes of a model. `mlp` is the width per layer; `bytes_per_step` counts the weights that decoding one token
    reads: all of them, but one row of an untied input embedding, and only the kept rows of a
    trimmed head.
    """

    parameters: int
    bytes_per_step: int
    layers: int
    hidden: int
    mlp: tuple[int, ...]
    heads: int
    kv_heads: int
    vocabulary: int
    kept_vocabulary: int
    tied: bool


@dataclass(frozen=True)
class Change:
    """One operation: its name, the sizes before and after, KL(target ‖ model) in nats before and after where it was
    measured, and its choices, in words and numbers that JSON can hold."""

    operation: str
    before: Size
    after: Size
    kl_before: float | None = None
    kl_after: float | None = None
    details: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """For surgery.json and reports."""
        return asdict(self)

    def sentence(self) -> str:
        """One line for the log."""
        old, new = self.before, self.after

        def moved(name: str, before: object, after: object) -> list[str]:
            return [f"{name} {before} -> {after}"] if before != after else []

        parts = [
            *moved("layers", old.layers, new.layers),
            *moved("hidden", old.hidden, new.hidden),
            *moved("MLP", _widths(old.mlp), _widths(new.mlp)),
            *moved("KV heads", old.kv_heads, new.kv_heads),
            *moved("vocabulary", old.vocabulary, new.vocabulary),
            *moved("kept vocabulary", old.kept_vocabulary, new.kept_vocabulary),
            f"parameters {old.parameters / 1e6:.2f}M -> {new.parameters / 1e6:.2f}M",
            f"bytes per step {old.bytes_per_step / 1e6:.2f} MB -> {new.bytes_per_step / 1e6:.2f} MB",
        ]
        if self.kl_after is not None:
            before = "not comparable" if self.kl_before is None else f"{self.kl_before:.4f}"
            parts.append(f"KL to the target {before} -> {self.kl_after:.4f}")
        return f"{self.operation}: " + ", ".join(parts)


def _widths(mlp: tuple[int, ...]) -> str:
    return str(mlp[0]) if len(set(mlp)) == 1 else f"{min(mlp)}..{max(mlp)}"


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
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["changes"]
    return found


def record_change(folder: Path, previous: list[dict[str, Any]], *changes: Change) -> None:
    """Write surgery.json: the previous changes and these."""
    write_json(folder / RECORD, {"changes": [*previous, *(change.as_json() for change in changes)]})
