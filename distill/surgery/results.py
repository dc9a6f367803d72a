"""Records of what was done to a donor: surgery.json next to its weights, cut/cut.json and draft/sparsity.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from distill.errors import DataError
from distill.files import Figure, has_form, read_object, write_json
from distill.folders import ModelSizes


@dataclass(frozen=True)
class Size:
    """Sizes of a model. `mlp` is the width per layer. `bytes_per_step` counts the weights read to decode one token.

    These are all weights, except that an untied input embedding gives one row, and a trimmed head only its kept rows.
    """

    parameters: int
    bytes_per_step: int
    layers: int
    mlp: tuple[int, ...]
    vocabulary: int
    kept_vocabulary: int
    tied: bool


@dataclass(frozen=True)
class Closeness:
    """Closeness of a model to the target: KL(target ‖ model) in nats per position, and top-1 agreement by kind of text.

    The kinds are new and repeated text (`repetition`). A kind without positions is omitted.
    """

    kl: Figure
    agreement: dict[str, float]


@dataclass(frozen=True)
class Change:
    """One operation: its name, sizes before and after, closeness to the target (if measured), and its choices.

    `details` holds the choices in words and numbers that JSON can store.
    """

    operation: str
    before: Size
    after: Size
    close_before: Closeness | None = None
    close_after: Closeness | None = None
    details: dict[str, Any] = field(default_factory=dict)

    def sentence(self) -> str:
        """Return one line for the log."""
        old, new = self.before, self.after
        sizes = {
            "layers": (old.layers, new.layers),
            "MLP": (old.mlp[0], new.mlp[0]),
            "vocabulary": (old.vocabulary, new.vocabulary),
            "kept vocabulary": (old.kept_vocabulary, new.kept_vocabulary),
        }
        parts = [
            *(f"{name} {before} -> {after}" for name, (before, after) in sizes.items() if before != after),
            f"parameters {old.parameters / 1e6:.2f}M -> {new.parameters / 1e6:.2f}M",
            f"bytes per step {old.bytes_per_step / 1e6:.2f} MB -> {new.bytes_per_step / 1e6:.2f} MB",
        ]
        if (now := self.close_after) is not None:
            was = self.close_before
            parts.append(f"KL to the target {'' if was is None else f'{was.kl:.4f} -> '}{now.kl:.4f}")
            parts += [
                f"agreement with it on {kind} text {'' if was is None else f'{was.agreement[kind]:.3f} -> '}{share:.3f}"
                for kind, share in now.agreement.items()
            ]
        return f"{self.operation}: " + ", ".join(parts)


# ── Surgery.json: what operations did to a model ──
# Every operation of this room makes a model folder from a model folder and returns Changes: `vocabulary.transplant`
# streams files, `cutter.cut_folder` cuts a loaded model.

RECORD = "surgery.json"  # The changes of a folder stand next to its weights, oldest first.


def size_of(model: Any, kept_vocabulary: int | None = None) -> Size:
    """Return the sizes of a loaded model. `kept_vocabulary` is the size of a trimmed head."""
    parameters, head = list(model.parameters()), model.get_output_embeddings().weight
    total = sum(p.numel() * p.element_size() for p in parameters)
    row, tied = head.shape[1] * head.element_size(), model.get_input_embeddings().weight is head
    count = sum(p.numel() for p in parameters)
    return sizes_by(model.config.to_dict(), count, total, row, tied, kept_vocabulary)


def sizes_by(
    config: Mapping[str, Any], parameters: int, total: int, row: int, tied: bool, kept_vocabulary: int | None = None
) -> Size:
    """Return a model's sizes, from its config.json, the bytes of its weights (`total`) and of one token's `row`."""
    layers, vocabulary = config["num_hidden_layers"], config["vocab_size"]
    kept = vocabulary if kept_vocabulary is None else kept_vocabulary
    return Size(
        parameters=parameters,
        bytes_per_step=total - (vocabulary - kept) * row - (0 if tied else (vocabulary - 1) * row),
        layers=layers,
        mlp=(config["intermediate_size"],) * layers,
        vocabulary=vocabulary,
        kept_vocabulary=kept,
        tied=tied,
    )


def read_changes(folder: Path) -> list[dict[str, Any]]:
    """Return the recorded changes of a folder, oldest first. Empty for a model that no operation made."""
    path = folder / RECORD
    if not path.exists():
        return []
    changes: list[dict[str, Any]] = read_object(path).get("changes", [])
    if not has_form(changes, [dict]):
        raise DataError(f"{path} is damaged: `changes` must be a list of objects", "copy the folder again")
    return changes


def record_change(folder: Path, before: list[dict[str, Any]], *changes: Change) -> None:
    """Write surgery.json with the changes before and these changes."""
    write_json(folder / RECORD, {"changes": [*before, *(asdict(change) for change in changes)]})


# ── Reports of a run ──


@dataclass(frozen=True)
class CutReport:
    """cut/cut.json: donor and draft, and every operation between them."""

    donor: ModelSizes
    draft: ModelSizes
    changes: list[Change]


@dataclass(frozen=True)
class SparsityReport:
    """draft/sparsity.json, as far as it is shown."""

    sentence: str
