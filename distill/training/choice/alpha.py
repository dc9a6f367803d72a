"""The choice of weights where the target is not loaded: α on stored distributions of validation answers.

Nothing is decoded. At each position of the target's own answers, the stored distribution and the draft's give the
chance that a drafted token is accepted; weights are chosen by the mean. Legend: c positions at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distill import divergences
from distill.models.packed_forward import hidden_states
from distill.recipe import Recipe
from distill.results.training_results import STORED
from distill.run import Run
from distill.target.distributions import TeacherChunk
from distill.target.held_out import held_out
from distill.target.store import TeacherStore
from distill.training.plan import Verifying


def accepted(chunk: TeacherChunk, draft_logits: Tensor, protocol: Verifying) -> tuple[Tensor, Tensor]:
    """The least and the largest chance [c] that a drafted token is accepted, as far as stored entries tell."""
    assert chunk.ids is not None, "a compact store has ids"
    if protocol == "greedy":
        same = (chunk.ids[:, 0] == draft_logits.argmax(-1)).to(draft_logits.dtype)
        return same, same
    bounds = divergences.acceptance_bounds if protocol == "sampling" else divergences.acceptance_match_bounds
    return bounds(chunk.ids, chunk.log_probabilities, chunk.log_tail, draft_logits)


class StoredAnswers:
    """The validation answers of a run with the target's distributions on them, in memory-mapped shards."""

    def __init__(self, recipe: Recipe, run: Run) -> None:
        self.store = TeacherStore(run, "validation")
        self.blocks = len(held_out(recipe, run, "validation").own)  # the first ones of the store

    @torch.inference_mode()
    def rates(self, draft: Any, protocol: Verifying, chunk: int) -> dict[str, Any]:
        """α of a draft: the mean of the least chances, by which weights are chosen, and that of the largest."""
        least = most = 0.0
        positions = 0
        for block in range(self.blocks):
            index = torch.tensor([block])
            part = self.store.packed.take(index)
            if not bool(part.mask.any()):
                continue
            hidden = hidden_states(draft, part)
            hidden = hidden[part.mask.to(hidden.device)]
            teacher = self.store.teacher(index, hidden.device)
            for start in range(0, len(hidden), chunk):
                rows = slice(start, start + chunk)
                logits = draft.lm_head(hidden[rows]).float()
                logits[:, self.store.vocabulary :] = -torch.inf
                low, high = accepted(teacher.chunk(rows), logits, protocol)
                least, most = least + float(low.double().sum()), most + float(high.double().sum())
            positions += len(hidden)
        count = max(1, positions)
        return {"acceptance": least / count, "most": most / count, "positions": positions, "measure": STORED}
