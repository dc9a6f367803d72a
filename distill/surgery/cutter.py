"""Layers and MLP width of a loaded model, cut in this order, and of any folder without a recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from distill.errors import DataError
from distill.files import require_new_folder, write_folder
from distill.models.hugging_face import encode, load_config, load_model, load_tokenizer, local_folder, real_tokens
from distill.models.model_files import copy_tokenizer
from distill.packing import Packed, pack
from distill.recipe import Cut
from distill.results.cut_results import Change
from distill.surgery.change import read_changes, record_change, require_supported, size_of
from distill.surgery.checks import check_shape
from distill.surgery.cuts.layers import choose_layers, keep_layers
from distill.surgery.cuts.refit import refit_layers, states_behind
from distill.surgery.cuts.width import narrow
from distill.surgery.divergence import TargetDistributions

BLOCK = 512  # positions per block of a folder's texts, or the model's context where that is shorter
GREEDY_LAYERS = 28  # greedy removal costs layers × removals passes over the blocks
RIDGES = (0.1, 0.3, 1.0)  # of the repair of layers; the one of least KL on validation text is taken


class Cutter:
    """Applies the cuts of a recipe to loaded models and records each change.

    `own`: the models are the target itself, so that nobody needs a KL from before the first cut.
    """

    def __init__(self, blocks: Packed, distributions: TargetDistributions, own: bool) -> None:
        self.blocks, self.distributions, self.own = blocks, distributions, own
        self.changes: list[Change] = []

    def __call__(self, model: Any, settings: Cut) -> None:
        """Cut a model in place: layers, MLP width."""
        self.changes = []
        if settings.layers is not None or settings.drop_layers is not None:
            self._apply("layers", model, lambda: self._layers(model, settings))
        width = settings.mlp_width
        if width is not None:
            self._apply("MLP width", model, lambda: self._width(model, width))

    def _apply(self, name: str, model: Any, cut: Callable[[], dict[str, Any]]) -> None:
        before = size_of(model)
        kl_before = None
        if self.changes or not self.own:
            kl_before = self.changes[-1].kl_after if self.changes else self.distributions.kl(model)
        details = cut()
        kl_after = _loss_taken(details)
        if kl_after is None:
            kl_after = self.distributions.kl(model)
        self.changes.append(Change(name, before, size_of(model), kl_before, kl_after, details))

    def _layers(self, model: Any, settings: Cut) -> dict[str, Any]:
        rule: str = settings.layer_rule
        if settings.drop_layers is not None:
            rule = "explicit"
        elif rule == "auto":
            rule = "greedy" if model.config.num_hidden_layers <= GREEDY_LAYERS else "influence"
        kept, report = choose_layers(
            model, settings.layers, rule, blocks=self.blocks, loss=self.distributions.kl, drop=settings.drop_layers
        )
        found = {"rule": rule, "kept": kept, **report}
        if not settings.layer_repair or len(kept) == report["layers"]:
            keep_layers(model, kept)
            return found
        ends = states_behind(model, kept, self.blocks)
        keep_layers(model, kept)
        repair = refit_layers(model, kept, ends, self.blocks, ridges=RIDGES, loss=self.distributions.kl)
        return found | {"repair": repair}

    def _width(self, model: Any, width: int) -> dict[str, Any]:
        details = narrow(model, self.blocks, width)
        return {name: value for name, value in details.items() if name != "neurons"}  # thousands of numbers


def _loss_taken(details: dict[str, Any]) -> float | None:
    """The loss with the ridge that a repair chose, where there was one: the KL of the model that it left."""
    repair = details.get("repair")
    return None if repair is None else repair["losses"][repair["ridges"].index(repair["ridge"])]


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
    cutter = Cutter(blocks.take(slice(0, half)), distributions, own=target is None)
    cutter(model, settings)
    before = read_changes(local_folder(source))

    def save(folder: Path) -> None:
        model.save_pretrained(folder)
        copy_tokenizer(local_folder(source), folder)
        record_change(folder, before, *cutter.changes)

    write_folder(destination, save)
    return cutter.changes
