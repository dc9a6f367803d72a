"""One training step's loss on blocks of a teacher, over the whole head or over a trimmed one's kept columns.

Legend: b blocks, S positions, N scored positions, H hidden, V vocabulary, C columns of the head that take part.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from distill.errors import DataError
from distill.models.packed_forward import hidden_states
from distill.packing import Packed, epoch_order
from distill.recipe import Train
from distill.teacher.distributions import CompactTeacher, DenseTeacher, Teacher
from distill.teacher.source import TeacherSource
from distill.training.losses.bucket import LossSettings, LossSums
from distill.training.losses.fused import head_loss
from distill.training.optimizer import make_optimizer, set_rates
from distill.training.plan import rate_share

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
        hidden = hidden_states(self.draft, blocks)[blocks.mask]  # [N, H]
        head = self.draft.lm_head
        weight = self.columns.rows(head.weight)
        bias = None if getattr(head, "bias", None) is None else self.columns.rows(head.bias)
        teacher = self.columns.teacher(teacher)
        labels = self.columns.labels(blocks.labels().long()[blocks.mask])
        total, sums = head_loss(hidden, weight, teacher, labels, loss, self.chunk, bias)
        if states_weight:
            error = state_error(hidden, target_states(teacher, hidden))
            total, sums = total + states_weight * error, sums.joined(f"loss/{STATES}", error)
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


def on_device(blocks: Packed, device: torch.device) -> Packed:
    """The same blocks on a device."""
    return Packed(*(tensor.to(device) for tensor in blocks.tensors().values()))


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
        return on_device(source.packed.take(index), device), source.teacher(index, device)
    blocks = on_device(source.packed.take(torch.zeros(1, dtype=torch.long)), device)
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
        blocks = on_device(source.packed.take(index), device)
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
