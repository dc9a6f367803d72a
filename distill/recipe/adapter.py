"""Recipe section: adapters, which train low-rank matrices instead of the draft's own weights."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from distill.recipe.section import Section


class Adapter(Section):
    """LoRA, or QLoRA over a quantised base: for drafts whose full training does not fit the memory. Merged at the end.

    The merged draft has full precision. Where the base was quantised during training, the merged draft differs from the
    trained one: it lacks the rounding of the base.
    """

    rank: int = Field(16, ge=1, description="r of the two matrices [out, r] and [r, in] added to each layer")
    alpha: float = Field(32.0, gt=0, le=1e6, description="their product is multiplied by alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on the input of an adapter during training")
    targets: tuple[str, ...] = Field(
        (), description="last names of the layers, such as `q_proj`; empty: all linear layers of the body"
    )
    base: Literal["int8", "int4"] | None = Field(
        None, description="QLoRA: bitsandbytes holds the frozen weights in 8 bits, or in 4 (NF4); null: not quantised"
    )
    train_outer: bool = Field(
        False, description="also train embeddings and head, in full, as a transplanted vocabulary needs"
    )

    def clash(self, sparsity: bool, embedding_steps: int) -> str | None:
        """Why other settings of a training cannot be combined with adapters, with a remedy; None when they can."""
        if sparsity:
            return "train.sparsity changes the draft's own weights, which adapters freeze; leave one out"
        if embedding_steps and not self.train_outer:
            return "embedding_steps trains embeddings and head alone, which adapters freeze; set adapter.train_outer"
        return None
