"""The distributions that a draft learns, whatever the kind of teacher."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from distill.errors import DataError
from distill.files import digest, reference_digest
from distill.models.hugging_face import load_target, load_tokenizer
from distill.models.packed.packed_forward import hidden_states
from distill.packing import Packed
from distill.recipe import Recipe
from distill.run import Run
from distill.teacher.distributions import Head, Teacher, require_head
from distill.teacher.store import TeacherStore

REDO = "make it again with `distill train RECIPE --redo teacher`, or go back to the recipe that it was made with"


class TeacherSource(Protocol):
    """Packed blocks and the target's distributions on them."""

    packed: Packed
    blocks: int
    vocabulary: int
    manifest: dict[str, Any]

    def teacher(self, index: Tensor, device: torch.device) -> Teacher:
        """The distributions of the N positions that packed.mask scores in the blocks at `index` [b], block by block."""
        ...


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
        if self._head.weight.device != device:
            self._head = self._head.to(device)
        return self._head.teacher(torch.cat(states))


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


def require_fit(
    manifest: dict[str, Any], recipe: Recipe, draft_config: Any, temperatures: Iterable[float] = (1.0,)
) -> None:
    """Raise DataError when a teacher is not of the recipe's target, tokenizer, sampler or kind, covers more tokens
    than the draft has, or lacks one of the `temperatures` at which losses will ask for its distributions."""
    metadata = target_metadata(recipe)
    names = {
        "target_digest": "target",
        "tokenizer_digest": "tokenizer",
        "dtype": "target.dtype",
        "quantise": "target.quantise",
    }
    for key, name in names.items():
        if manifest[key] != metadata[key]:
            was, now = (manifest["target"], metadata["target"]) if "digest" in key else (manifest[key], metadata[key])
            other = " with other content" if was == now else ""
            raise DataError(f"the teacher was made with {name} {was}{other}, the recipe has {now}", REDO)
    if manifest["kind"] != recipe.teacher.kind:
        raise DataError(f"the teacher is {manifest['kind']}, the recipe asks for {recipe.teacher.kind}", REDO)
    sampler = recipe.sampler.model_dump(mode="json")
    if manifest["sampler"] != sampler:
        changed = [
            f"{key} {manifest['sampler'].get(key)} -> {value}"
            for key, value in sampler.items()
            if manifest["sampler"].get(key) != value
        ]
        raise DataError(
            f"the target wrote the answers under another sampler than the recipe's ({', '.join(changed)})",
            "write them again with `distill train RECIPE --redo answers`, or go back to the sampler they came from",
        )
    if manifest["vocabulary"] > draft_config.vocab_size:
        raise DataError(
            f"the teacher's distributions cover {manifest['vocabulary']} tokens, "
            f"the draft has {draft_config.vocab_size}",
            "give the draft the target's vocabulary (cut.transplant), or make the teacher again (--redo teacher)",
        )
    if manifest["kind"] != "compact":
        return
    stored = manifest["temperatures"]
    lacking = [value for value in temperatures if value not in stored]
    if lacking:
        raise DataError(
            f"the losses ask for distributions at temperature {', '.join(f'{value:g}' for value in lacking)}, "
            f"and the teacher store holds {', '.join(f'{value:g}' for value in stored)}: "
            "the mass of its tail is unknown at others",
            "add it to teacher.temperatures, or use teacher.kind exact or online; then --redo teacher",
        )
