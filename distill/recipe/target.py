"""Recipe sections: the target, the law it serves with, its own text and its distributions."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from distill.recipe.section import Section
from distill.recipe.traffic import Traffic


class Target(Section):
    """The big model that is to be made faster."""

    model: str = Field(description="folder (starting with . / or ~) or hub name")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="what it runs in")


class SamplerSettings(Section):
    """The law the target serves with; answers, evaluation and decoding all use it."""

    temperature: float = Field(1.0, ge=0, description="0 is greedy")
    top_k: int = Field(0, ge=0, description="0: off")
    top_p: float = Field(1.0, gt=0, le=1, description="1: off")
    min_p: float = Field(0.0, ge=0, lt=1, description="0: off")


class Answers(Section):
    """The target continues prompts of the train split: its own text."""

    prompts: int = Field(256, ge=0, description="train prompts; 0: traffic alone")
    prompt_tokens: int = Field(64, ge=1, description="tokens of a document's beginning, or of a later piece of it")
    new_tokens: int = Field(192, ge=1, description="tokens generated at most")
    batch: int = Field(32, ge=1, description="prompts generated together; also the unit of resuming")
    traffic: Traffic | None = Field(None, description="served answers beside the generated ones; null: off")

    @model_validator(mode="after")
    def _have_a_source(self) -> Answers:
        if self.prompts == 0 and self.traffic is None:
            raise ValueError("prompts: 0 leaves no answers; give some prompts, or answers.traffic")
        return self


class TeacherStore(Section):
    """The target's distributions on the train blocks: top-k log-probabilities and the log of the tail's mass."""

    top_k: int = Field(32, ge=1, description="entries stored per position")
    shard_blocks: int = Field(64, ge=1, description="blocks per shard; also the unit of resuming")
    batch: int = Field(8, ge=1, description="blocks per forward pass")
