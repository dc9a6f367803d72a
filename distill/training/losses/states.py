"""The loss on final hidden states: those of the draft, which its head reads, against the target's.

Legend: N scored positions, H the hidden size of both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from distill.target.distributions import DenseTeacher, Teacher

NAME = "hidden_states"


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
