"""Recipe sections: the target, the distribution it serves with, its own text and its distributions."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, field_validator, model_validator

from distill.recipe.section import Section
from distill.recipe.traffic import Traffic


class Target(Section):
    """The big model that is to be made faster."""

    model: str = Field(description="folder (starting with . / or ~) or hub name")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="what it runs in")
    quantise: Literal["int8", "int4"] | None = Field(
        None, description="load its weights in 8 or 4 bits (bitsandbytes; needs that package); null: as they are"
    )
    shard: bool = Field(False, description="spread its layers over all accelerators of this machine; one process")


class SamplerSettings(Section):
    """The distribution the target serves with; answers, evaluation and decoding all use it."""

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
    """The target's distributions on the train blocks, and in which form they are kept."""

    kind: Literal["compact", "exact", "online"] = Field(
        "compact",
        description="compact: the top-k log-probabilities and the log of the tail's mass are stored; exact: the last "
        "hidden states and the head are, which give whole distributions; online: nothing is stored, the target "
        "runs while training",
    )
    top_k: int = Field(256, ge=1, description="compact: entries stored per position; with `mass`, at most")
    mass: float | None = Field(
        0.99,
        gt=0,
        lt=1,
        description="compact: store as few entries as hold this mass on average over a sample of positions; "
        "null: `top_k`",
    )
    temperatures: tuple[float, ...] = Field(
        (1.0,),
        description="compact: temperatures at which the tail's mass is stored, 1 among them; losses use no other",
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="exact: what the hidden states are stored in; null: the target's"
    )
    shard_blocks: int = Field(64, ge=1, description="blocks per shard; also the unit of resuming")
    batch: int = Field(8, ge=1, description="blocks per forward pass")

    @field_validator("temperatures")
    @classmethod
    def _temperatures_hold_one(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if any(not (temperature > 0 and math.isfinite(temperature)) for temperature in value):
            raise ValueError("temperatures must be positive")
        if 1 not in value or len(set(value)) < len(value):
            raise ValueError("temperatures must hold 1, and none twice")
        return value

    @model_validator(mode="after")
    def _settings_of_other_kinds(self) -> TeacherStore:
        for name, kind in (("mass", "compact"), ("temperatures", "compact"), ("dtype", "exact")):
            if self.kind != kind and getattr(self, name) not in (None, type(self).model_fields[name].default):
                raise ValueError(f"{name} is a setting of kind {kind}, and kind is {self.kind}")
        return self
