"""One training step's loss on blocks of a teacher, over the whole head or over a trimmed one's kept columns.

Legend: b blocks, S positions, N scored positions, H hidden, V vocabulary, C columns of the head that take part.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from distill.data.packing import Packed, epoch_order, scored_states
from distill.engines.torch.hugging_face import load_config
from distill.errors import DataError, RecipeError
from distill.recipe import Loss, Recipe, Train
from distill.recipe.recipe import REASON
from distill.surgery.cutter import kept_share
from distill.surgery.sparsity import require_ramp
from distill.teacher.distributions import CompactTeacher, DenseTeacher, Teacher, logit_form
from distill.teacher.store import TeacherSource
from distill.training.losses import LossSettings, LossSums, head_loss
from distill.training.optimizer import make_optimizer, rate_share, set_rates, with_rate

# ── The loss that a recipe's training takes, and what is checked of a training before it starts ──

Verifying = Literal["sampling", "match", "greedy"]

# The default loss. On the demo pair no loss gave more acceptance than forward KL under match and greedy, and
# the JSD gave the most under sampling (docs/benchmarks.md#training).
PROTOCOL_LOSS: dict[Verifying, Loss] = {
    "sampling": {"jsd": 1.0},
    "match": {"forward_kl": 1.0},
    "greedy": {"forward_kl": 1.0},
}


def protocol_of(settings: Train, temperature: float) -> Verifying:
    """How drafts will be verified, `auto` resolved by the served sampler's temperature."""
    if settings.protocol == "auto":
        return "greedy" if temperature == 0 else "sampling"
    return settings.protocol


def loss_settings(settings: Train, temperature: float) -> LossSettings:
    """The mixture of losses, without those of weight 0; `temperature` is the served sampler's."""
    loss = settings.loss or PROTOCOL_LOSS[protocol_of(settings, temperature)]
    return LossSettings({name: weight for name, weight in loss.items() if weight > 0}, settings.temperature)


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
                f"the weights of the highest acceptance probability ({verifying} verification) on stored distributions "
                f"of validation answers are taken, no rounds are decoded: {REASON}"
            )
    return [*lines, f"train: {chosen}"]


# ── One training step's loss on blocks of a teacher, over the whole head or over a trimmed one's kept columns ──

STATES = "hidden_states"  # the name of the loss on them
CLIP = 1.0  # the largest norm of a gradient


class Columns:
    """The head's columns that learn: the first `vocabulary`, or the kept ones of a trimmed head.

    For a trimmed head, the target's mass on the other tokens goes to the tail, and these tokens are no labels.
    """

    def __init__(self, vocabulary: int, kept: list[int] | None, device: torch.device) -> None:
        self.count = vocabulary if kept is None else len(kept)
        self.kept = None if kept is None else torch.tensor(kept, device=device)
        self.place: Tensor | None = None
        if self.kept is not None:  # the column of each id; the column after the last stands for all trimmed ids
            self.place = torch.full((vocabulary,), self.count, dtype=torch.long, device=device)
            self.place[self.kept] = torch.arange(self.count, device=device)

    def rows(self, head: Tensor) -> Tensor:
        """The rows of the head's weight [V, H] or bias [V] that take part."""
        return head if self.kept is None else head[self.kept]

    def teacher(self, teacher: Teacher) -> Teacher:
        """The same distributions over these columns."""
        return teacher if self.kept is None else teacher.restrict(self.kept)

    def labels(self, labels: Tensor) -> Tensor:
        """The columns of labels [N]; C where a label is not among them."""
        return labels if self.place is None else self.place[labels]


class Learner(torch.nn.Module):
    """The draft with its loss."""

    def __init__(self, draft: Any, columns: Columns, chunk: int) -> None:
        super().__init__()
        self.draft = draft
        self.columns, self.chunk = columns, chunk

    def forward(
        self, blocks: Packed, teacher: Teacher, loss: LossSettings, states_weight: float = 0.0
    ) -> tuple[Tensor, LossSums]:
        """Σ ℓ over the N scored positions, and the sums for the log; divide by their number over the whole step.

        `states_weight` is the weight of the loss on hidden states.
        """
        hidden = scored_states(self.draft, blocks)  # [N, H]
        head = self.draft.lm_head
        weight = self.columns.rows(head.weight)
        bias = None if getattr(head, "bias", None) is None else self.columns.rows(head.bias)
        teacher = self.columns.teacher(teacher)
        labels = self.columns.labels(blocks.labels().long()[blocks.mask])
        total, sums = head_loss(hidden, weight, teacher, labels, loss, self.chunk, bias, logit_form(self.draft.config))
        if states_weight:
            error = state_error(hidden, target_states(teacher, hidden))
            total = total + states_weight * error
            sums[f"loss/{STATES}"] = error.detach().to(sums["positions"])
        return total, sums


def target_states(teacher: Teacher, like: Tensor) -> Tensor:
    """The target's final hidden states at the positions of a teacher, in the form of the draft's [N, H]."""
    if not len(teacher):  # a process without blocks has no states either
        return torch.zeros_like(like)
    assert isinstance(teacher, DenseTeacher), "a compact teacher keeps no hidden states"
    return teacher.hidden.to(like.device)


def state_error(hidden: Tensor, target: Tensor) -> Tensor:
    """Σ ‖h − h*‖² / ‖h*‖² over the positions, in fp32: hidden h and target h* [N, H].

    Relative to each position's own state, so that neither the scale of the states nor the split into micro-batches
    counts.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        expected = target.detach().float()
        error = (hidden.float() - expected).square().sum(-1) / expected.square().sum(-1).clamp(min=1e-12)
        return error.sum()


def batch_blocks(step: int, batch: int, count: int, seed: int) -> Tensor:
    """Indices [b] of the blocks of one step: a pure function, so that a resumed run sees the same data."""
    places = [divmod(number, count) for number in range(step * batch, (step + 1) * batch)]
    orders = {epoch: epoch_order(count, seed, epoch) for epoch in {epoch for epoch, _ in places}}
    return torch.tensor([int(orders[epoch][place]) for epoch, place in places], dtype=torch.long)


def split_blocks(blocks: Tensor, rank: int, ranks: int, size: int | None) -> list[Tensor]:
    """The blocks [b] of process `rank` of `ranks`, in pieces of up to `size` (None: all at once).

    There are as many pieces in every process; the last one is empty where a process has no blocks left for it.
    """
    share = -(-len(blocks) // ranks)
    own = blocks[rank::ranks]
    size = size or max(1, share)
    return [own[start : start + size] for start in range(0, share, size)]


def scored_blocks(source: TeacherSource, index: Tensor, device: torch.device) -> tuple[Packed, Teacher]:
    """The blocks at `index` [b] and the distributions at their scored positions, on a device.

    Without blocks, one block that scores nothing takes their place: the other processes wait for its forward pass.
    """
    if len(index):
        return source.packed.take(index).to(device), source.teacher(index, device)
    blocks = source.packed.take(torch.zeros(1, dtype=torch.long)).to(device)
    none = torch.empty(0, device=device)
    distributions = CompactTeacher(none.long().view(0, 1), none.view(0, 1), {1.0: none}, source.vocabulary)
    return replace(blocks, mask=torch.zeros_like(blocks.mask)), distributions


def heal(model: Any, source: TeacherSource, settings: Train, loss: LossSettings, steps: int, seed: int) -> None:
    """Train a cut model in place for a few steps, to compare cuts.

    Rate, optimizer and schedule are those of `settings`, the schedule over these steps alone; fp32, one process.
    """
    assert settings.rate is not None, "see with_rate"
    device = next(model.parameters()).device
    learner = Learner(model, Columns(source.vocabulary, None, device), settings.chunk)
    optimizer = make_optimizer(model, settings)
    model.train()
    for step in range(steps):
        index = batch_blocks(step, settings.batch, source.blocks, seed)
        blocks = source.packed.take(index).to(device)
        total, sums = learner(blocks, source.teacher(index, device), loss)
        mean = total / sums["positions"].clamp(min=1)
        mean.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        rate = settings.rate * rate_share(step, steps, settings)
        set_rates(optimizer, rate, rate)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if not math.isfinite(mean.item()):
            raise DataError(
                f"the loss is not finite at step {step} of the healing that compares cuts (loss {mean.item()})",
                "check the target's and the donor's weights, or lower train.rate",
            )
    model.eval()
