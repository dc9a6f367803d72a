"""What became of the donor: surgery.json beside its weights, cut/cut.json and draft/sparsity.json as dataclasses."""

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
    """Sizes of a model. `mlp` is the width per layer; `bytes_per_step` counts the weights read to decode one token:
    all of them, except that an untied input embedding gives one row, and that a trimmed head is read where it is kept.
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
    """How near a model is to the target: KL(target ‖ model) in nats, a mean over positions, and its top-1 agreement
    with it by kind of text, new or repeated (`repetition`); a kind without positions is left out."""

    kl: Figure
    agreement: dict[str, float]


@dataclass(frozen=True)
class Change:
    """One operation: its name, the sizes before and after, how close the model was to the target before and after where
    it was measured, and its choices, in words and numbers that JSON can hold."""

    operation: str
    before: Size
    after: Size
    close_before: Closeness | None = None
    close_after: Closeness | None = None
    details: dict[str, Any] = field(default_factory=dict)

    def sentence(self) -> str:
        """One line for the log."""
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


# ── The record of an operation on a model: its sizes and its divergence from the target, before and after ──
# Every operation of this room makes a model folder from a model folder and returns Changes: `vocabulary.transplant`
# streams files, `cutter.cut_folder` cuts a loaded model.

RECORD = "surgery.json"  # beside the weights: the changes to a folder, oldest first


def size_of(model: Any, kept_vocabulary: int | None = None) -> Size:
    """The sizes of a loaded model; `kept_vocabulary` is the size of a trimmed head."""
    own, head = list(model.parameters()), model.get_output_embeddings().weight
    total = sum(p.numel() * p.element_size() for p in own)
    row, tied = head.shape[1] * head.element_size(), model.get_input_embeddings().weight is head
    return sizes_by(model.config.to_dict(), sum(p.numel() for p in own), total, row, tied, kept_vocabulary)


def sizes_by(
    config: Mapping[str, Any], parameters: int, total: int, row: int, tied: bool, kept_vocabulary: int | None = None
) -> Size:
    """The sizes of a model by its config.json; `total` are the bytes of its weights, `row` those of a token's row."""
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
