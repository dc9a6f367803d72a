"""Layers, heads, hidden size and MLP width of a loaded model, cut in this order, and of any folder without a recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from distill.errors import DataError
from distill.files import write_folder
from distill.models.hugging_face import encode, load_config, load_model, load_tokenizer, local_folder, real_tokens
from distill.models.model_files import copy_tokenizer
from distill.packing import Packed, pack
from distill.recipe import Cut
from distill.results.cut_results import Change
from distill.surgery.change import read_changes, record_change, require_supported, size_of
from distill.surgery.checks import check_shape
from distill.surgery.cuts.attention import drop_kv_groups
from distill.surgery.cuts.hidden import narrow_hidden
from distill.surgery.cuts.layers import choose_layers, keep_layers
from distill.surgery.cuts.refit import refit_layers, states_behind
from distill.surgery.cuts.width import narrow
from distill.surgery.divergence import TargetDistributions

BLOCK = 512  # positions per block of a folder's texts, or the model's context where that is shorter
GREEDY_LAYERS = 28  # greedy removal costs layers × removals passes over the blocks
# Of the least-squares repairs; the one of least KL on validation text is taken. That of layers, which asks more of the
# neurons that are left, must hold them nearer to what they were (docs/benchmarks.md, Layers that are repaired).
RIDGES = (1e-4, 1e-3, 1e-2)
LAYER_RIDGES = (0.1, 0.3, 1.0)


class Cutter:
    """Applies the cuts of a recipe to loaded models and records each change."""

    def __init__(self, blocks: Packed, distributions: TargetDistributions) -> None:
        self.blocks, self.distributions = blocks, distributions
        self.changes: list[Change] = []

    def __call__(self, model: Any, settings: Cut) -> None:
        """Cut a model in place: layers, KV groups, hidden size, MLP width."""
        self.changes = []
        if settings.layers is not None or settings.drop_layers is not None:
            self._apply("layers", model, lambda: self._layers(model, settings))
        heads, hidden = settings.kv_heads, settings.hidden
        if heads is not None:
            self._apply("KV groups", model, lambda: drop_kv_groups(model, self.blocks, heads))
        if hidden is not None:
            self._apply("hidden size", model, lambda: narrow_hidden(model, self.blocks, hidden))
        if settings.mlp_width is not None:
            self._apply("MLP width", model, lambda: self._width(model, settings))

    def _apply(self, name: str, model: Any, cut: Callable[[], dict[str, Any]]) -> None:
        before = size_of(model)
        kl_before = self.changes[-1].kl_after if self.changes else self.distributions.kl(model)
        details = cut()
        self.changes.append(Change(name, before, size_of(model), kl_before, self.distributions.kl(model), details))

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
        repair = refit_layers(model, kept, ends, self.blocks, ridges=LAYER_RIDGES, loss=self.distributions.kl)
        return found | {"repair": repair}

    def _width(self, model: Any, settings: Cut) -> dict[str, Any]:
        assert settings.mlp_width is not None
        details = narrow(
            model,
            self.blocks,
            settings.mlp_width,
            score=settings.mlp_rule,
            repair=settings.mlp_repair,
            ridges=RIDGES,
            loss=self.distributions.kl,
        )
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
