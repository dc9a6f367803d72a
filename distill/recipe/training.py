"""Recipe sections: how the draft learns."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from distill.recipe.section import Section


class Sparsity(Section):
    """L1 while fine-tuning: neurons (or single weights) are driven to zero, cut, and the rest debiased."""

    method: Literal["group", "unstructured"] = Field(
        "group", description="group: whole MLP neurons, cut out at the end; unstructured: single weights, which stay "
        "as zeros and make nothing faster"
    )  # fmt: skip
    mlp_width: int | None = Field(None, ge=32, description="group: neurons left per layer")
    share: float | None = Field(None, gt=0, lt=1, description="unstructured: share of the weights that become zero")
    ramp: float = Field(0.2, gt=0, le=1, description="share of the steps over which the penalty grows")

    @model_validator(mode="after")
    def _wants_one_goal(self) -> Sparsity:
        wanted, other = ("mlp_width", "share") if self.method == "group" else ("share", "mlp_width")
        if getattr(self, wanted) is None or getattr(self, other) is not None:
            raise ValueError(f"method {self.method} needs {wanted} and no {other}")
        return self


class Train(Section):
    """Distillation of the draft."""

    steps: int = Field(300, ge=1, description="optimizer steps")
    batch: int = Field(4, ge=1, description="blocks per step")
    rate: float = Field(5e-5, gt=0, description="peak learning rate of AdamW; small demo models want more")
    warmup: float = Field(0.03, ge=0, lt=1, description="share of the steps spent warming up, linearly")
    final: float = Field(0.1, ge=0, le=1, description="the cosine ends at this share of the rate")
    loss: dict[Literal["forward_kl", "cross_entropy"], float] = Field(
        {"forward_kl": 0.9, "cross_entropy": 0.1}, description="weights of the losses"
    )
    clip: float = Field(1.0, gt=0, description="gradient norm is clipped to this")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW")
    weight_decay: float = Field(0.0, ge=0, description="AdamW, on matrices")
    chunk: int = Field(1024, ge=1, description="positions of the head computed at once")
    save_every: int = Field(100, ge=1, description="steps between checkpoints")
    keep: int = Field(2, ge=1, description="checkpoints kept")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="autocast type; the weights stay float32")
    embedding_steps: int = Field(
        0, ge=0, description="first steps that move the embeddings and head alone, as after a transplant"
    )
    sparsity: Sparsity | None = Field(None, description="L1 while training; null: off")

    @field_validator("loss")
    @classmethod
    def _loss_weighs_something(cls, value: dict[str, float]) -> dict[str, float]:
        if any(weight < 0 for weight in value.values()) or sum(value.values()) <= 0:
            raise ValueError("weights must be >= 0 and not all 0")
        return value
