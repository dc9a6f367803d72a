"""The loss of a recipe's training, and the checks before the training starts."""

from __future__ import annotations

from distill.errors import RecipeError
from distill.recipe import Loss, Recipe, Train
from distill.recipe.training import Protocol
from distill.surgery.cutter import kept_share
from distill.surgery.sparsity import require_ramp
from distill.training.losses import LossSettings
from distill.training.optimizer import outer_share, with_rate

# The default loss. On the demo pair no loss gave more acceptance than forward KL under match and greedy, and
# the JSD gave the most under sampling (docs/benchmarks.md#training).
PROTOCOL_LOSS: dict[Protocol, Loss] = {
    "sampling": {"jsd": 1.0},
    "match": {"forward_kl": 1.0},
    "greedy": {"forward_kl": 1.0},
}


def protocol_of(settings: Train, temperature: float) -> Protocol:
    """The protocol that verifies drafts. The served sampler's temperature resolves `auto`."""
    if settings.protocol == "auto":
        return "greedy" if temperature == 0 else "sampling"
    return settings.protocol


def loss_settings(settings: Train, temperature: float) -> LossSettings:
    """The mixture of losses with a weight above 0. `temperature` is the served sampler's."""
    loss = settings.loss or PROTOCOL_LOSS[protocol_of(settings, temperature)]
    return LossSettings({name: weight for name, weight in loss.items() if weight > 0}, settings.temperature)


def check_training(recipe: Recipe) -> list[str]:
    """The plan of the recipe's training, in lines to print. Raises RecipeError for settings that exclude each other."""
    settings, teacher = with_rate(recipe.train, kept_share(recipe)), recipe.teacher
    assert settings.rate is not None
    if teacher.kind == "compact" and settings.temperature != 1:
        what = f"train.temperature is {settings.temperature:g}, and a compact teacher keeps distributions at 1 alone"
        raise RecipeError(what, "use teacher.kind exact, or leave train.temperature at 1")
    if settings.sparsity is not None:
        require_ramp(settings.steps, settings.sparsity.ramp)
    positions = settings.batch * recipe.corpus.block
    mixture = loss_settings(settings, recipe.sampler.temperature).losses
    loss = ", ".join(f"{weight:g} {name}" for name, weight in mixture.items())
    lines = [f"train: {settings.steps} steps of {positions} positions at up to {settings.rate:g}: {loss}"]
    if (share := outer_share(recipe, settings.rate)) != 1:
        lines.append(f"train: embeddings and head at up to {share * settings.rate:g}")
    if settings.optimizer == "muon":
        lines.append("train: the layers' matrices learn by Muon")
    chosen = "the last weights are taken"
    if settings.acceptance is not None and settings.sparsity is None:
        verifying = protocol_of(settings, recipe.sampler.temperature)
        chosen = (
            f"the weights of the highest expected acceptance ({verifying} verification, the recipe's sampler) on "
            f"stored answers to {settings.acceptance.prompts} validation prompts are taken"
        )
    return [*lines, f"train: {chosen}"]
