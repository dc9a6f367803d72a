"""The sparsity penalty of a training: made before the optimizer, stepped after it, and turned into a cut at the end."""

from __future__ import annotations

from typing import Any

from distill.recipe import Train
from distill.surgery.change import size_of
from distill.surgery.sparsity.group_lasso import GroupLasso
from distill.surgery.sparsity.unstructured import UnstructuredL1
from distill.surgery.sparsity.zeros import sparsity_by_tensor

Penalty = GroupLasso | UnstructuredL1


def penalty_of(model: Any, settings: Train) -> Penalty | None:
    """The penalty that a recipe asks for; None without one."""
    wanted = settings.sparsity
    if wanted is None:
        return None
    start = settings.embedding_steps / settings.steps  # frozen neurons cannot adapt to a penalty
    if wanted.method == "group":
        assert wanted.mlp_width is not None
        return GroupLasso(model, wanted.mlp_width, settings.steps, start=start, ramp=wanted.ramp)
    assert wanted.share is not None
    return UnstructuredL1(model, settings.steps, sparsity=wanted.share, start=start, ramp=wanted.ramp)


def finish_penalty(model: Any, penalty: Penalty | None) -> dict[str, Any] | None:
    """Cut removed neurons out of the trained model; the details for sparsity.json, or None without a penalty."""
    if penalty is None:
        return None
    before = size_of(model)
    if isinstance(penalty, GroupLasso):
        details = penalty.cut(model)
        words = (
            f"MLP {details['width_before']} -> {details['width']}; of the neurons removed "
            f"{min(details['removed_zero_share']):.1%} or more per layer were exactly zero"
        )
    else:
        shares = sparsity_by_tensor(model)  # its `layers.N` cover all weights of a layer; whole neurons hardly vanish
        layers = [shares[f"layers.{index}"] for index in range(model.config.num_hidden_layers)]
        details = penalty.details() | {"by_layer": layers, "by_tensor": shares}
        words = f"{details['zero_share']:.1%} of the blocks' weights are zero, which makes no step faster"
    after = size_of(model)
    return {"parameters": [before.parameters, after.parameters], "details": details, "sentence": words}
