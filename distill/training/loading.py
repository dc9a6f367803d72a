"""The draft that training begins with."""

from __future__ import annotations

from typing import Any

import torch

from distill.errors import DataError
from distill.models.hugging_face import load_model, recompute_activations
from distill.recipe import Recipe
from distill.run import Run
from distill.teacher.distributions import LogitForm, logit_form
from distill.training.adapters import attach, load_base
from distill.training.plan import check_adapter


def require_plain_logits(config: Any) -> None:
    """Raise DataError for a draft of a configuration that caps or scales its logits."""
    if logit_form(config) != LogitForm():
        raise DataError(
            f"the draft, a {config.model_type}, caps or scales its logits, which the losses do not support",
            "choose a donor of another architecture, such as qwen2, qwen3 or llama",
        )


def load_draft(recipe: Recipe, run: Run, device: torch.device) -> Any:
    """The cut donor, whole head included, with adapters where the recipe asks for them."""
    settings, init = recipe.train, run.path("cut")
    if settings.adapter is None:
        draft = load_model(str(init), "float32", device, trimmed=False)
    else:
        check_adapter(settings)
        draft = attach(load_base(init, settings.adapter, device), settings.adapter, recipe.seed)
    require_plain_logits(draft.config)
    if settings.checkpointing:
        recompute_activations(draft)
    if settings.compile:
        draft.model.compile()
    return draft
