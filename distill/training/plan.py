"""The loss and the learning rates that a recipe's training takes, and what is checked of both before it starts."""

from __future__ import annotations

import math
from typing import Literal

from distill.errors import RecipeError
from distill.models.hugging_face import load_config
from distill.recipe import Loss, Recipe, Train
from distill.recipe.recipe import REASON
from distill.surgery.checks import kept_share
from distill.surgery.sparsity.ramp import require_ramp
from distill.training.losses.bucket import LossSettings

Verifying = Literal["sampling", "match", "greedy"]

# The default loss. On the demo pair no loss gave more acceptance than forward KL under match and greedy, and
# the JSD gave the most under sampling (docs/benchmarks.md#training).
PROTOCOL_LOSS: dict[Verifying, Loss] = {
    "sampling": {"jsd": 1.0},
    "match": {"forward_kl": 1.0},
    "greedy": {"forward_kl": 1.0},
}
# Shares of the donor's layers that a draft keeps, and peak rates: the first measured, the second as published for whole
# donors (docs/training.md#the-rate).
RATES = (1 / 6, 1.5e-3), (1.0, 5e-5)
WARMUP, DECAY_SHARE = 0.03, 0.2  # shares of the steps: of the warm-up, and of the fall at the end of schedule wsd


def protocol_of(settings: Train, temperature: float) -> Verifying:
    """How drafts will be verified, `auto` resolved by the served sampler's temperature."""
    if settings.protocol == "auto":
        return "greedy" if temperature == 0 else "sampling"
    return settings.protocol


def loss_settings(settings: Train, temperature: float) -> LossSettings:
    """The mixture of losses, without those of weight 0; `temperature` is the served sampler's."""
    loss = settings.loss or PROTOCOL_LOSS[protocol_of(settings, temperature)]
    return LossSettings({name: weight for name, weight in loss.items() if weight > 0}, settings.temperature)


def peak_rate(kept: float) -> float:
    """The peak learning rate, to two digits, of a draft that keeps this share of its donor's layers, 0 to 1.

    Between both ends of RATES the logarithm of the rate is linear in the share.
    """
    (few, high), (whole, low) = RATES
    place = min(max((kept - few) / (whole - few), 0), 1)
    return float(f"{high * (low / high) ** place:.1e}")


def with_rate(settings: Train, kept: float) -> Train:
    """The settings with the rate that null stands for, in a draft that keeps this share of its donor's layers."""
    return settings if settings.rate is not None else settings.model_copy(update={"rate": peak_rate(kept)})


def rate_share(step: int, steps: int, settings: Train) -> float:
    """The share of the peak rate in step `step` of `steps` (from 0): a line up over the warm-up, then the schedule."""
    warm, final = max(1, round(WARMUP * steps)), settings.final_rate_share
    if step < warm:
        return (step + 1) / warm
    if settings.schedule == "wsd":
        constant_end = steps - max(1, round(DECAY_SHARE * steps))
        return 1 - (1 - final) * max(0, step - constant_end) / (steps - constant_end)
    progress = (step - warm) / max(1, steps - warm)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))


def body_share(step: int, settings: Train) -> float:
    """The share of the rate for the body (all but embeddings and head): 0 at first, then a warm-up of its own.

    Adam's first steps have full size whatever the gradient; without the warm-up they undo the embeddings' progress.
    """
    if step < settings.embedding_steps:
        return 0.0
    if not settings.embedding_steps:
        return 1.0
    warm = max(10, round(WARMUP * settings.steps))
    return min(1.0, (step - settings.embedding_steps + 1) / warm)


def states_weight(step: int, settings: Train) -> float:
    """The weight of the loss on hidden states in a step: a line from the first step down to 0."""
    states = settings.hidden_states
    if states is None:
        return 0.0
    return states.weight * max(0.0, 1 - step / (states.end * settings.steps))


def check_hidden_states(settings: Train, kind: str, draft: int, target: int) -> None:
    """Raise RecipeError for a loss on hidden states that a teacher's kind or the hidden sizes exclude."""
    if settings.hidden_states is None:
        return
    if kind == "compact":
        raise RecipeError(
            "train.hidden_states needs the target's hidden states, which a compact teacher does not keep",
            "use teacher.kind exact or online, or leave train.hidden_states out",
        )
    if draft != target:
        raise RecipeError(
            f"train.hidden_states needs one hidden size on both sides; the draft's is {draft}, the target's {target}",
            "leave it out, or cut the draft from the target",
        )


def check_training(recipe: Recipe) -> list[str]:
    """The plan of the recipe's training as lines to print; RecipeError for settings that exclude each other."""
    settings, teacher = with_rate(recipe.train, kept_share(recipe)), recipe.teacher
    lacking = {1.0, settings.temperature} - set(teacher.temperatures)
    if teacher.kind == "compact" and lacking:
        raise RecipeError(
            f"the losses ask for distributions at temperature {', '.join(f'{value:g}' for value in sorted(lacking))}, "
            "which a compact teacher does not keep",
            "add it to teacher.temperatures, or use teacher.kind exact or online",
        )
    if settings.hidden_states is not None:
        target, donor = (load_config(name).get_text_config() for name in (recipe.target.model, recipe.donor_model))
        check_hidden_states(settings, teacher.kind, donor.hidden_size, target.hidden_size)
    if settings.sparsity is not None:
        require_ramp(settings.steps, settings.embedding_steps, settings.sparsity.ramp)
    positions = settings.batch * recipe.corpus.block
    mixture = loss_settings(settings, recipe.sampler.temperature).losses
    loss = ", ".join(f"{weight:g} {name}" for name, weight in mixture.items())
    lines = [f"train: {settings.steps} steps of {positions} positions at up to {settings.rate:g}: {loss}"]
    if settings.optimizer == "muon":
        assert settings.rate is not None
        scale = (settings.matrix_rate or settings.rate) / settings.rate
        lines.append("train: the layers' matrices learn by Muon" + (f", at {scale:g} times the rate" * (scale != 1)))
    if settings.hidden_states is not None:
        weight, last = settings.hidden_states.weight, round(settings.hidden_states.end * settings.steps)
        lines.append(f"train: {weight:g} of the loss on hidden states at first, none from step {last} on")
    chosen = "the last weights are taken"
    if settings.acceptance is not None and settings.sparsity is None:
        verifying = protocol_of(settings, recipe.sampler.temperature)
        chosen = f"the weights accepted most on validation prompts are taken ({verifying} verification)"
        if not recipe.target.load:
            chosen = (
                f"the weights of the highest α ({verifying} verification) on stored distributions of validation "
                f"answers are taken, no rounds are decoded: {REASON}"
            )
    return [*lines, f"train: {chosen}"]
