"""Whether a transplant is possible, and all that it needs from the files of both models; no weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.errors import DataError
from distill.files import has_form
from distill.models.hugging_face import check_folder
from distill.models.model_files import read_config
from distill.models.tensor_files import NUMPY_FLOATS, Stored, stored_tensors
from distill.surgery.change import require_supported
from distill.surgery.vocabulary.subtokens import check_overrides, require_bytes
from distill.vocabulary import Vocabulary

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


@dataclass(frozen=True)
class Plan:
    """A transplant found possible, with everything read from the files of both models."""

    donor: Vocabulary
    target: Vocabulary
    tensors: dict[str, Stored]
    config: dict[str, Any]
    target_config: dict[str, Any]
    tied: bool
    rows: int


def check_transplant(
    donor: Path,
    target: Path,
    overrides: Mapping[str, str] | None = None,
    *,
    rows: int | None = None,
) -> Plan:
    """Read the files that a transplant needs, no weights; raises DataError for an impossible transplant.

    `donor` is a model folder, `target` a model or tokenizer folder, `rows` the rows to write where the target has no
    config.json.
    """
    check_folder(str(donor.absolute()))
    config = read_config(donor)
    require_supported(str(config.get("model_type")))
    for key in SIZES:
        if not has_form(config.get(key), int):
            raise DataError(f"{donor}/config.json: {key} must be an integer", "give a whole folder")
    tensors = stored_tensors(donor)
    tied = bool(config.get("tie_word_embeddings", False))
    _check_matrices(donor, config, tensors, tied)
    target_config = read_config(target) if (target / "config.json").is_file() else {}
    ours, theirs = Vocabulary.read(donor).within(tensors[EMBEDDING].shape[0]), Vocabulary.read(target)
    if isinstance(stated := _stated_rows(target_config), int):
        theirs = theirs.within(stated)
    require_bytes(ours)
    if ours.size > tensors[EMBEDDING].shape[0]:
        raise DataError(
            f"the donor's tokenizer has {ours.size} tokens, its embedding {tensors[EMBEDDING].shape[0]} rows"
        )
    check_overrides(theirs, overrides or {})
    return Plan(
        donor=ours,
        target=theirs,
        tensors=tensors,
        config=config,
        target_config=target_config,
        tied=tied,
        rows=_row_count(target, theirs, target_config, rows),
    )


def _check_matrices(donor: Path, config: Mapping[str, Any], tensors: Mapping[str, Stored], tied: bool) -> None:
    hint = "give a whole folder as save_pretrained writes it"
    if "quantization_config" in config:
        raise DataError(f"the model in {donor} is quantised", "give it in float32, bfloat16 or float16")
    expected = (config.get("vocab_size"), config.get("hidden_size"))
    for name in (EMBEDDING,) if tied else (EMBEDDING, HEAD):
        if name not in tensors:
            raise DataError(f"the weights in {donor} hold no {name}", hint)
        if tensors[name].shape != expected:
            raise DataError(
                f"{name} in {donor} is {tensors[name].shape}; its config.json has vocab_size, hidden_size {expected}",
                hint,
            )
        if tensors[name].dtype not in NUMPY_FLOATS:
            raise DataError(f"{name} in {donor} is stored as {tensors[name].dtype}", "give a model in floating point")


def _stated_rows(config: Mapping[str, Any]) -> Any:
    return config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")


def _row_count(folder: Path, target: Vocabulary, config: Mapping[str, Any], rows: int | None) -> int:
    configured = _stated_rows(config)
    if configured is not None and rows is not None and rows != configured:
        raise DataError(f"rows is {rows}, but vocab_size in {folder}/config.json is {configured}", "leave rows out")
    count = configured or rows or target.size
    if not isinstance(count, int):
        raise DataError(f"{folder}/config.json: vocab_size must be an integer", "correct config.json")
    if count < target.size:
        raise DataError(f"{count} rows are too few for the {target.size} tokens of {folder}")
    return count
