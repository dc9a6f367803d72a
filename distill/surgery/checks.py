"""What a recipe's cuts need, checked from configurations alone: possible sizes, and a draft smaller than its target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distill.engines.pairs import require_pair
from distill.engines.torch.hugging_face import load_config, local_folder, text_folder
from distill.errors import RecipeError
from distill.recipe import Cut, Recipe
from distill.surgery.layers import check_layers, check_width, parse_layers, require_supported
from distill.surgery.subtokens import check_transplant
from distill.surgery.trim import always_kept, check_size
from distill.vocabulary import Vocabulary

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # such a model's step does not read all its weights
SHAPE = {
    "layers": "num_hidden_layers",
    "hidden size": "hidden_size",
    "MLP width": "intermediate_size",
    "KV heads": "num_key_value_heads",
    "rows": "vocab_size",
}


def check_shape(config: Any, settings: Cut) -> None:
    """Raise RecipeError for cuts that a model of this configuration does not allow, with the possible ones."""
    checks: list[tuple[str, Callable[[Any, Any], object], Any]] = [
        *(("compare.layers", check_layers, one.layers) for one in settings.compare),
        *(("compare.mlp_width", check_width, one.mlp_width) for one in settings.compare),
        ("layers", check_layers, settings.layers),
        ("drop_layers", lambda config, text: parse_layers(text, config.num_hidden_layers), settings.drop_layers),
        ("mlp_width", check_width, settings.mlp_width),
    ]
    for key, check, value in checks:
        if value is not None:
            try:
                check(config, value)
            except RecipeError as error:
                raise RecipeError(f"cut.{key}: {error.what}", error.hint) from None


def check_cut(recipe: Recipe) -> list[str]:
    """The planned draft, in lines to print; raises for an impossible donor or cut. Loads no weights."""
    settings, donor = recipe.cut, recipe.donor_model
    config = load_config(donor)
    require_supported(config.model_type)
    lines = []
    if settings.transplant is not None:
        check_transplant(local_folder(donor), text_folder(recipe.target.model), settings.transplant.overrides)
        lines.append(f"transplant: {donor} gets the vocabulary of {recipe.target.model}")
    else:
        require_pair(recipe.target.model, donor)
        rows = load_config(recipe.target.model).get_text_config().vocab_size
        if rows != config.vocab_size:
            lines.append(
                f"rows: the draft gets the target's {rows} rows instead of the donor's {config.vocab_size}, so that "
                "vLLM takes it too; only padding differs"
            )
    check_shape(config, settings)
    if settings.trim is not None:
        vocabulary = Vocabulary.read(text_folder(recipe.target.model))
        check_size(settings.trim.size, len(always_kept(vocabulary)), vocabulary.size, recipe.teacher.top_k)
    sparsity, full = recipe.train.sparsity, settings.mlp_width or config.intermediate_size
    width = None if sparsity is None else sparsity.mlp_width
    if width is not None and (not 0 < width < full or width % 32):
        raise RecipeError(
            f"train.sparsity.mlp_width is {width}; training starts with {full} neurons a layer",
            f"ask for a multiple of 32 below that, for instance {max(32, full // 2 // 32 * 32)}",
        )
    if settings.compare:
        lines.append(f"compared before the cut: {'; '.join(one.name for one in settings.compare)}")
    layers = config.num_hidden_layers
    kept, _ = _left(settings, layers, full)
    return [*lines, f"cut: {layers} layers -> {kept}, MLP {config.intermediate_size} -> {full}"]


def _shape(config: Any) -> dict[str, int] | None:
    """The sizes that a step's cost depends on; None for a model that does not name them all, or has experts."""
    config = config.get_text_config()
    sizes = {word: getattr(config, name, None) for word, name in SHAPE.items()}
    if any(getattr(config, name, None) for name in EXPERTS):
        return None
    return {word: size for word, size in sizes.items() if isinstance(size, int)} if all(sizes.values()) else None


def _left(cut: Cut, layers: int, width: int) -> tuple[int, int]:
    """Layers and MLP width that a cut leaves of a donor's."""
    dropped = 0 if cut.drop_layers is None else len(parse_layers(cut.drop_layers, layers))
    return (cut.layers or layers) - dropped, cut.mlp_width or width


def planned_sizes(recipe: Recipe, target: Any, donor: Any) -> dict[str, int] | None:
    """The sizes of the draft that a recipe cuts, by the words of SHAPE; None for a model that does not name its own."""
    cut, sparsity, draft = recipe.cut, recipe.train.sparsity, _shape(donor)
    if draft is None:
        return None
    layers, width = _left(cut, draft["layers"], draft["MLP width"])
    if sparsity is not None and sparsity.mlp_width is not None:
        width = min(width, sparsity.mlp_width)
    return draft | {
        "layers": layers,
        "MLP width": width,
        "rows": target.get_text_config().vocab_size,
    }


def kept_share(recipe: Recipe, draft: Any = None) -> float:
    """The share of the donor's layers that a cut leaves, narrower MLPs in proportion: that of the configuration of a
    `draft`, else that of the recipe's cut."""
    donor = load_config(recipe.donor_model).get_text_config()
    layers, width = donor.num_hidden_layers, donor.intermediate_size
    if draft is not None:
        return float(draft.num_hidden_layers * draft.intermediate_size / (layers * width))
    left, narrower = _left(recipe.cut, layers, width)
    return float(left * narrower / (layers * width))


def check_smaller(recipe: Recipe, target: Any, donor: Any) -> None:
    """Raise RecipeError for a draft that is in no size below its target."""
    full, draft = _shape(target), planned_sizes(recipe, target, donor)
    if full is None or draft is None or recipe.cut.trim is not None:
        return
    if all(draft[word] >= full[word] for word in SHAPE):
        sizes = ", ".join(
            f"{draft[word]} {word}" if word in ("layers", "rows") else f"{word} {draft[word]}" for word in SHAPE
        )
        raise RecipeError(
            f"cut: the draft costs as much as its target ({sizes}): drafting with it cannot save time",
            "cut it, for instance cut.layers="
            f"{max(1, full['layers'] // 4)}, or name a smaller cut.donor, or set cut.allow_full_size: true",
        )
