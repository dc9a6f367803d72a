"""Layers and MLP width of a loaded model, cut in this order, and of any folder without a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from distill.errors import DataError
from distill.files import require_new_folder, write_folder
from distill.models.hugging_face import encode, load_config, load_model, load_tokenizer, real_tokens, text_folder
from distill.models.model_files import copy_tokenizer
from distill.models.pairs import require_pair
from distill.packing import Packed, pack
from distill.recipe import Cut
from distill.results.cut_results import Change
from distill.surgery.change import read_changes, record_change, require_supported, size_of
from distill.surgery.checks import check_shape
from distill.surgery.cuts.layers import Loss, choose_layers, keep_layers
from distill.surgery.cuts.refit import refit_layers, states_behind
from distill.surgery.cuts.width import narrow
from distill.surgery.divergence import TargetDistributions

BLOCK = 512  # positions per block of a folder's texts, or the model's context where that is shorter
GREEDY_LAYERS = 28  # greedy removal costs layers × removals passes over the blocks
RIDGES = (0.1, 0.3, 1.0)  # of the repair of layers; the one of least KL on validation text is taken


def cut_model(model: Any, settings: Cut, blocks: Packed, distributions: TargetDistributions, own: bool) -> list[Change]:
    """Apply the cuts of a recipe to a loaded model in place: layers, then MLP width.

    `own`: the model is the target itself, so that nobody needs a KL from before the first cut.
    """
    cuts = [("layers", _cut_layers)] if settings.layers is not None or settings.drop_layers is not None else []
    cuts += [("MLP width", _cut_width)] if settings.mlp_width is not None else []
    kl = None if own or not cuts else distributions.kl(model)
    changes = []
    for name, cut in cuts:
        size, kl_before = size_of(model), kl
        details = cut(model, settings, blocks, distributions.kl)
        kl = distributions.kl(model)
        changes.append(Change(name, size, size_of(model), kl_before, kl, details))
    return changes


def _cut_layers(model: Any, settings: Cut, blocks: Packed, loss: Loss) -> dict[str, Any]:
    rule: str = settings.layer_rule
    if settings.drop_layers is not None:
        rule = "explicit"
    elif rule == "auto":
        rule = "greedy" if model.config.num_hidden_layers <= GREEDY_LAYERS else "influence"
    kept, report = choose_layers(model, settings.layers, rule, blocks=blocks, loss=loss, drop=settings.drop_layers)
    details = {"rule": rule, "kept": kept, **report}
    if not settings.layer_repair or len(kept) == report["layers"]:
        keep_layers(model, kept)
        return details
    ends = states_behind(model, kept, blocks)
    keep_layers(model, kept)
    return details | {"repair": refit_layers(model, kept, ends, blocks, ridges=RIDGES, loss=loss)}


def _cut_width(model: Any, settings: Cut, blocks: Packed, loss: Loss) -> dict[str, Any]:
    assert settings.mlp_width is not None
    details = narrow(model, blocks, settings.mlp_width)
    return {name: value for name, value in details.items() if name != "neurons"}  # thousands of numbers


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
    require_new_folder(destination)
    if target is not None:
        require_pair(target, source)
    tokenizer = load_tokenizer(source)
    block = min(BLOCK, config.max_position_embeddings)
    blocks = pack(((encode(tokenizer, text), 1) for text in texts if text.strip()), block, split_long=True)
    if len(blocks) < 2:
        raise DataError(f"the texts give {len(blocks)} blocks of {block} tokens", "give more text: two blocks at least")
    half = min(len(blocks) // 2, settings.score_blocks)
    model = load_model(source, "float32", torch.device("cpu"), trimmed=False)
    teacher = model if target is None else load_model(target, "float32", torch.device("cpu"))
    compared = blocks.take(slice(half, 2 * half))
    distributions = TargetDistributions.measure(teacher, compared, real_tokens(config, tokenizer))
    changes = cut_model(model, settings, blocks.take(slice(0, half)), distributions, own=target is None)
    before = read_changes(text_folder(source))

    def save(folder: Path) -> None:
        model.save_pretrained(folder)
        copy_tokenizer(text_folder(source), folder)
        record_change(folder, before, *changes)

    write_folder(destination, save)
    return changes
