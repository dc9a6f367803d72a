"""Whether the draft that a recipe asks for is smaller than its target, from their configurations."""

from __future__ import annotations

from typing import Any

from distill.errors import RecipeError
from distill.recipe import Recipe
from distill.surgery.cuts.layers import parse_layers

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # such a model's step does not read all its weights
SHAPE = {
    "layers": "num_hidden_layers",
    "hidden size": "hidden_size",
    "MLP width": "intermediate_size",
    "KV heads": "num_key_value_heads",
    "rows": "vocab_size",
}


def _shape(config: Any) -> dict[str, int] | None:
    """The sizes that a step's cost depends on; None for a model that does not name them all, or has experts."""
    config = config.get_text_config()
    found = {word: getattr(config, name, None) for word, name in SHAPE.items()}
    if any(getattr(config, name, None) for name in EXPERTS):
        return None
    return {word: size for word, size in found.items() if isinstance(size, int)} if all(found.values()) else None


def check_smaller(recipe: Recipe, target: Any, donor: Any) -> None:
    """Raise RecipeError for a draft that is in no size below its target; of a search, the smallest candidate counts."""
    cut, sparsity = recipe.cut, recipe.train.sparsity
    ours, draft = _shape(target), _shape(donor)
    if ours is None or draft is None or cut.trim is not None:
        return
    layers = [draft["layers"], *filter(None, [cut.layers]), *(cut.search.layers if cut.search else ())]
    widths = [draft["MLP width"], *filter(None, [cut.mlp_width]), *(cut.search.mlp_width if cut.search else ())]
    if sparsity is not None and sparsity.mlp_width is not None:
        widths.append(sparsity.mlp_width)
    dropped = 0 if cut.drop_layers is None else len(parse_layers(cut.drop_layers, draft["layers"]))
    draft = {
        "layers": min(layers) - dropped,
        "hidden size": cut.hidden or draft["hidden size"],
        "MLP width": min(widths),
        "KV heads": cut.kv_heads or draft["KV heads"],
        "rows": draft["rows"] if cut.vocabulary_rows == "donor" else ours["rows"],
    }
    if all(draft[word] >= ours[word] for word in SHAPE):
        sizes = ", ".join(
            f"{draft[word]} {word}" if word in ("layers", "rows") else f"{word} {draft[word]}" for word in SHAPE
        )
        raise RecipeError(
            f"cut: the draft costs as much as its target ({sizes}): drafting with it cannot save time",
            "cut it, for instance cut.layers="
            f"{max(1, ours['layers'] // 4)}, or name a smaller cut.donor, or set cut.allow_full_size: true",
        )
