"""The distributions that a draft learns, whatever the kind of teacher."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distill.errors import DataError
from distill.files import digest, reference_digest
from distill.models.hugging_face import load_target, load_tokenizer
from distill.models.packed_forward import hidden_states
from distill.packing import Packed
from distill.recipe import Recipe
from distill.run import Run
from distill.teacher.distributions import Head, Teacher, require_head
from distill.teacher.store import TeacherStore

REDO = "make it again with `distill train RECIPE --redo teacher`, or go back to the recipe that it was made with"


class OnlineTarget:
    """A loaded target on packed blocks; raises DataError where its head and hidden states do not give its logits."""

    def __init__(self, model: Any, packed: Packed, manifest: dict[str, Any], batch: int) -> None:
        self.model, self.packed, self.manifest, self.batch = model, packed, manifest, batch
        self.blocks = len(packed)
        self.vocabulary: int = manifest["vocabulary"]
        self._head = Head.of(model, self.vocabulary)
        require_head(model, self._head, packed)

    @torch.no_grad()
    def teacher(self, index: Tensor, device: torch.device) -> Teacher:
        """The distributions of the N scored positions of the blocks at `index` [b], block by block, on a device.

        The target takes `batch` blocks at once; its logits exist only chunk by chunk.
        """
        states = []
        for start in range(0, len(index), self.batch):
            part = self.packed.take(index[start : start + self.batch])
            found = hidden_states(self.model, part)
            states.append(found[part.mask.to(found.device)].to(device))
        self._head = self._head.to(device)
        return self._head.teacher(torch.cat(states))


# Packed blocks, and the target's distributions on them.
TeacherSource = TeacherStore | OnlineTarget


def open_teacher(run: Run, recipe: Recipe, device: torch.device, model: Any = None) -> TeacherSource:
    """The teacher that stage `teacher` wrote into a run.

    An online one runs `model`, the target, which is loaded onto `device` when none is given. Raises DataError when a
    file is damaged.
    """
    store = TeacherStore(run)
    if store.manifest["kind"] != "online":
        return store
    target = load_target(recipe.target, device) if model is None else model
    return OnlineTarget(target, store.packed, store.manifest, recipe.teacher.batch)


def target_metadata(recipe: Recipe) -> dict[str, Any]:
    """The identity of a target: its content, its tokenizer's vocabulary, and how it runs."""
    tokenizer = load_tokenizer(recipe.target.model)
    return {
        "target": recipe.target.model,
        "target_digest": reference_digest(recipe.target.model),
        "tokenizer_digest": digest(tokenizer.get_vocab()),
        "dtype": recipe.target.dtype,
        "quantise": recipe.target.quantise,
    }


def require_fit(manifest: dict[str, Any], recipe: Recipe, draft_config: Any) -> None:
    """Raise DataError when a teacher is not of the recipe's target and tokenizer as they are now, or covers more tokens
    than the draft has. The settings that it was made with are part of its stage's key."""
    metadata = target_metadata(recipe)
    for key, name in (("target_digest", "target"), ("tokenizer_digest", "tokenizer")):
        if manifest[key] != metadata[key]:
            was, now = manifest["target"], metadata["target"]
            other = " with other content" if was == now else ""
            raise DataError(f"the teacher was made with {name} {was}{other}, the recipe has {now}", REDO)
    if manifest["vocabulary"] > draft_config.vocab_size:
        raise DataError(
            f"the teacher's distributions cover {manifest['vocabulary']} tokens, "
            f"the draft has {draft_config.vocab_size}",
            "give the draft the target's vocabulary (cut.transplant), or make the teacher again (--redo teacher)",
        )
