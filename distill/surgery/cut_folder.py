"""Cuts of any model folder on given texts, without a recipe or a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from distill.errors import DataError
from distill.files import write_folder
from distill.models.hugging_face import encode, load_config, load_model, load_tokenizer, local_folder, real_tokens
from distill.models.model_files import copy_tokenizer
from distill.packing import pack
from distill.recipe import Cut
from distill.results.cut_results import Change
from distill.surgery.change import read_changes, record_change, require_supported
from distill.surgery.divergence import TargetDistributions
from distill.surgery.stage import Cutter, check_shape

BLOCK = 512  # positions per block, or the model's context where that is shorter


def cut_folder(
    source: str, destination: Path, settings: Cut, texts: Sequence[str], target: str | None = None
) -> list[Change]:
    """Cut `source` into `destination`; KL is that to `target`, by default the uncut model itself.

    The first half of the texts' blocks gives the scores, the second the losses. Raises RecipeError for impossible cuts
    before any work, and DataError for texts of less than two blocks.
    """
    config = load_config(source)
    require_supported(config.model_type)
    check_shape(config, settings)
    if destination.exists() and any(destination.iterdir()):
        raise DataError(f"{destination} is not empty", "name a new folder")
    tokenizer = load_tokenizer(source)
    block = min(BLOCK, config.max_position_embeddings)
    blocks = pack(((encode(tokenizer, text), 1) for text in texts if text.strip()), block, split_long=True)
    if len(blocks) < 2:
        raise DataError(f"the texts give {len(blocks)} blocks of {block} tokens", "give more text: two blocks at least")
    half = min(len(blocks) // 2, settings.score_blocks)
    model = load_model(source, "float32", torch.device("cpu"), trimmed=False)
    judge = model if target is None else load_model(target, "float32", torch.device("cpu"))
    distributions = TargetDistributions.measure(
        judge, blocks.take(slice(half, 2 * half)), real_tokens(config, tokenizer)
    )
    cutter = Cutter(blocks.take(slice(0, half)), distributions)
    cutter(model, settings)
    before = read_changes(local_folder(source))

    def save(folder: Path) -> None:
        model.save_pretrained(folder)
        copy_tokenizer(local_folder(source), folder)
        record_change(folder, before, *cutter.changes)

    write_folder(destination, save)
    return cutter.changes
