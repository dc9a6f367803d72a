"""Whether the tensors of a model folder are those that its config.json asks for, from safetensors headers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distill.errors import DataError
from distill.models.conversion.importing import check_import, is_gguf
from distill.models.hugging_face import load_config, local_snapshot
from distill.models.intact import is_quantised, quiet, require_own_type, require_whole
from distill.models.tensor_files import stored_tensors, torch_type


def check_weights(reference: str) -> str:
    """A line about the tensors of a model, from the headers of its safetensors files; reads no weights.

    The names and shapes go through transformers' own loader, on the meta device, so that renamed and fused layouts are
    understood. Raises DataError as `require_whole` does; where headers prove nothing, the line says so.
    """
    if is_gguf(reference):
        return check_import(reference)
    folder = local_snapshot(reference)
    unproven = f"tensors of {reference}: not checked before they are loaded,"
    if folder is None:
        return f"{unproven} because they are not on this machine yet"
    config = load_config(str(folder))
    require_own_type(reference, config)
    if is_quantised(config):
        return f"{unproven} because headers prove nothing about quantised weights"
    if not any(folder.glob("*.safetensors*")):
        if any(folder.glob("*.bin")):
            return f"{unproven} because they are in .bin files, not safetensors"
        raise DataError(f"{folder} has no weights: no model.safetensors", "give a whole Hugging Face model folder")
    return _check_headers(reference, folder, config) or (
        f"{unproven} because headers prove nothing about this {config.model_type} layout"
    )


def _check_headers(reference: str, folder: Path, config: Any) -> str | None:
    """The line about a folder whose headers prove that its tensors are whole; None where they prove nothing."""
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    stored = stored_tensors(folder)
    empty = {
        name: torch.empty(tensor.shape, dtype=torch_type(tensor.dtype), device="meta")
        for name, tensor in stored.items()
    }
    try:
        with quiet():
            model, info = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
                None,
                config=config,
                state_dict=empty,
                device_map={"": "meta"},
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except Exception:  # whatever a layout makes transformers raise without values says nothing about the values
        return None
    require_whole(reference, model, info)
    return f"tensors of {reference}: all {len(stored)} have the names and shapes that config.json asks for"
