"""The target's distributions on a few blocks, computed once and compared with many cuts of a donor.

Legend: n blocks, S positions, N scored positions, k stored entries, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distill import divergences
from distill.models.packed_forward import hidden_states
from distill.packing import Packed
from distill.progress import Progress
from distill.recipe import Recipe
from distill.run import Run
from distill.teacher.distributions import TeacherChunk, logit_form
from distill.teacher.held_out import held_out
from distill.teacher.store import TeacherStore, compress

STORED = 256  # entries per position: nearly the whole distribution, at a small part of its size


@dataclass(frozen=True)
class TargetDistributions:
    """Blocks and the target's compact distributions at their N scored positions, in order; ids from `vocabulary` on are
    padding."""

    blocks: Packed
    distributions: TeacherChunk
    vocabulary: int

    @classmethod
    @torch.inference_mode()
    def measure(cls, target: Any, blocks: Packed, vocabulary: int, batch: int = 4) -> TargetDistributions:
        """One forward pass of the target over the blocks."""
        parts, starts = [], range(0, len(blocks), batch)
        progress = Progress("the target's distributions, batches", len(starts), brief=True)
        for i in starts:
            logits = scored_logits(target, blocks.take(slice(i, i + batch)))
            parts.append(compress(logits, min(STORED, vocabulary - 1), vocabulary))
            progress.step()
        columns = (torch.cat([getattr(p, name).cpu() for p in parts]) for name in TeacherChunk.__dataclass_fields__)
        return cls(blocks, TeacherChunk(*columns), vocabulary)

    @classmethod
    def stored(cls, recipe: Recipe, run: Run) -> TargetDistributions:
        """Those of the validation store: on its given text, or on the answers where the corpus has questions alone."""
        store, texts = TeacherStore(run, "validation"), held_out(recipe, run, "validation")
        answers = torch.arange(len(texts.own))
        index = torch.arange(len(texts.own), store.blocks) if len(texts.given) else answers
        index = index[: recipe.cut.score_blocks]
        distributions = store.teacher(index, torch.device("cpu")).chunk(slice(None))
        return cls(store.packed.take(index), distributions, store.vocabulary)

    @torch.inference_mode()
    def kl(self, model: Any, batch: int = 4) -> float:
        """KL(target ‖ model) in nats, the mean over the scored positions. All tokens outside the stored entries are one
        bucket, so it is a lower bound of the full KL, and close to it with this many entries."""
        total, at = 0.0, 0
        for start in range(0, len(self.blocks), batch):
            logits = scored_logits(model, self.blocks.take(slice(start, start + batch))).float()
            logits[:, self.vocabulary :] = -torch.inf
            rows = slice(at, at + len(logits))
            at += len(logits)
            stored = self.distributions
            assert stored.ids is not None
            parts = (stored.ids.long(), stored.log_probabilities, stored.log_tail)
            ids, logs, tail = (part[rows].to(logits.device) for part in parts)
            total += float(divergences.bucketed_forward_kl(ids, logs, tail, logits).double().sum())
        return total / max(1, at)


def scored_logits(model: Any, part: Packed) -> Tensor:
    """Logits [N, V] of a model at the scored positions of some blocks, in order."""
    hidden = hidden_states(model, part)
    return logit_form(model.config).apply(model.get_output_embeddings()(hidden[part.mask.to(hidden.device)]))
