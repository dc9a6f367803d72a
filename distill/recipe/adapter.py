"""Recipe section: adapters, which train a few low-rank matrices instead of the draft's own."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from distill.recipe.section import Section


class Adapter(Section):
    """LoRA, or QLoRA over a quantised base: for drafts whose full training does not fit the memory. Merged at the end.

    The merged draft has full precision also where the base was quantised while training, and is then not exactly what
    was trained: it lacks the base's rounding.
    """

    rank: int = Field(16, ge=1, description="r of the two matrices [out, r] and [r, in] beside each layer")
    alpha: float = Field(32.0, gt=0, description="their product is scaled by alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="of what goes into an adapter, while training")
    targets: tuple[str, ...] = Field(
        (), description="layers by their last name, such as `q_proj`; empty: all linear layers of the body"
    )
    base: Literal["int8", "int4"] | None = Field(
        None, description="QLoRA: the frozen weights are held in 8 bits, or 4 (NF4), by bitsandbytes; null: as they are"
    )
    train_outer: bool = Field(
        False, description="embeddings and head are trained too, fully, as a transplanted vocabulary needs"
    )

    def clash(self, sparsity: bool, embedding_steps: int) -> str | None:
        """What in the rest of a training's settings cannot go with adapters, with the way out; None when all can."""
        if sparsity:
            return "a sparsity penalty shrinks the draft's own weights, which adapters hold still; leave one out"
        if embedding_steps and not self.train_outer:
            return "embedding_steps moves embeddings and head alone, which adapters hold still; set adapter.train_outer"
        return None
