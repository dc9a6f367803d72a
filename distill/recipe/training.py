"""Recipe sections: how the draft learns."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, field_validator, model_validator

from distill.recipe.adapter import Adapter
from distill.recipe.section import Section


class Sparsity(Section):
    """L1 while fine-tuning: neurons (or single weights) are driven to zero, cut, and the rest debiased."""

    method: Literal["group", "unstructured"] = Field(
        "group",
        description="group: whole MLP neurons, cut out at the end; unstructured: single weights, which stay "
        "as zeros and make nothing faster",
    )
    mlp_width: int | None = Field(None, ge=32, description="group: neurons left per layer")
    share: float | None = Field(None, gt=0, lt=1, description="unstructured: share of the weights that become zero")
    ramp: float = Field(0.2, gt=0, le=1, description="share of the steps over which the penalty grows")

    @model_validator(mode="after")
    def _wants_one_goal(self) -> Sparsity:
        wanted, other = ("mlp_width", "share") if self.method == "group" else ("share", "mlp_width")
        if getattr(self, wanted) is None or getattr(self, other) is not None:
            raise ValueError(f"method {self.method} needs {wanted} and no {other}")
        return self


LossName = Literal[
    "forward_kl",
    "reverse_kl",
    "jsd",
    "total_variation",
    "nla",
    "lk_hybrid",
    "match",
    "argmax_cross_entropy",
    "top_k_hinge",
    "cross_entropy",
]
Loss = dict[LossName, float]
Protocol = Literal["auto", "sampling", "match", "greedy"]


def _weighs_something(value: Loss | None) -> Loss | None:
    if value is not None and (any(not 0 <= w < math.inf for w in value.values()) or sum(value.values()) <= 0):
        raise ValueError("weights must be finite, >= 0 and not all 0")
    return value


class Part(Section):
    """One part of the training: a loss, for so long. Warm-up and cosine run over all parts, at each part's own peak."""

    name: str = Field(pattern=r"^[a-z0-9-]+$", description="what it is called, such as align or accept")
    share: float | None = Field(None, gt=0, le=1, description="length: a share of train.steps; or steps, or tokens")
    steps: int | None = Field(None, ge=1, description="length: optimizer steps")
    tokens: int | None = Field(None, ge=1, description="length: positions the draft sees, rounded up to whole steps")
    loss: Loss | None = Field(
        None,
        description="weights of the losses; null: what served train.protocol best, jsd for sampling, forward_kl "
        "for match and greedy",
    )
    rate: float | None = Field(None, gt=0, description="peak learning rate; null: train.rate")
    temperature: float = Field(
        1.0,
        gt=0,
        description="of both distributions in forward_kl, reverse_kl and jsd, which are then multiplied by its square",
    )
    weights: Literal["uniform", "block-acceptance", "top-fraction"] = Field(
        "uniform",
        description="of tokens: all alike; by what a token's acceptance adds to the expected tokens per "
        "round; only the fraction of each block with the largest KL",
    )
    fraction: float = Field(0.5, gt=0, le=1, description="top-fraction: share of the tokens that count")

    _loss = field_validator("loss")(_weighs_something)

    @model_validator(mode="after")
    def _has_one_length(self) -> Part:
        if sum(value is not None for value in (self.share, self.steps, self.tokens)) != 1:
            raise ValueError(f"part {self.name} needs exactly one of share, steps and tokens")
        return self


class Acceptance(Section):
    """A small decoded evaluation on the validation split, which chooses the best weights and may end a part early."""

    every: int = Field(100, ge=1, description="steps between evaluations; each part's end is evaluated too")
    prompts: int = Field(16, ge=2, description="validation prompts, decoded together")
    new_tokens: int = Field(48, ge=8, description="tokens decoded of each")
    length: int = Field(4, ge=1, description="draft length")
    patience: int | None = Field(
        None, ge=1, description="a part ends after this many evaluations without a better one; null: never early"
    )


class Replay(Section):
    """Learn once more where the decoder rejected the draft; kept only if tokens per round rise on validation
    prompts."""

    prompts: int = Field(
        64, ge=1, description="prompts of train answers, generated or served, decoded to find rejected positions"
    )
    new_tokens: int = Field(128, ge=8, description="tokens decoded of each")
    length: int = Field(4, ge=1, description="draft length while decoding")
    steps: int = Field(50, ge=1, description="optimizer steps")
    share: float = Field(0.25, gt=0, le=1, description="share of a step's blocks that hold rejected positions")
    rate: float | None = Field(None, gt=0, description="peak learning rate; null: a third of train.rate")
    loss: Loss | None = Field(None, description="as in a part; null: what served train.protocol best")
    judges: int = Field(32, ge=4, description="validation prompts on which the draft before and after is decoded")

    _loss = field_validator("loss")(_weighs_something)


class Train(Section):
    """How the draft learns from the target's distributions."""

    protocol: Protocol = Field(
        "auto",
        description="how drafts will be verified: rejection sampling of sampled drafts; match of argmax drafts "
        "with a sampled target; greedy; auto: greedy at temperature 0, else sampling. It sets the loss where "
        "none is given and what the best weights are chosen by",
    )
    steps: int = Field(300, ge=1, description="optimizer steps")
    batch: int = Field(4, ge=1, description="blocks per step, over all processes")
    micro_batch: int | None = Field(
        None, ge=1, description="blocks that one process takes at once, gradients added up; null: all of its share"
    )
    rate: float = Field(5e-5, gt=0, description="peak learning rate of AdamW; small demo models want more")
    warmup: float = Field(0.03, ge=0, lt=1, description="share of the steps spent warming up, linearly")
    final: float = Field(0.1, ge=0, le=1, description="the cosine ends at this share of the rate")
    loss: Loss | None = Field(
        None, description="weights of the losses, without parts; null: what served the protocol best, as in a part"
    )
    parts: tuple[Part, ...] = Field((), description="one after another; empty: all steps with train.loss at train.rate")
    jsd_beta: float = Field(0.5, gt=0, lt=1, description="jsd: the target's share of the mixture")
    lk_decay: float = Field(
        3.0, ge=0, description="lk_hybrid: e^(-this · acceptance) of a token is forward KL, the rest TV"
    )
    match_temperature: float = Field(
        0.5, gt=0, description="match: of the draft's distribution that stands for its argmax"
    )
    hinge_k: int = Field(4, ge=1, description="top_k_hinge: the target's tokens are pushed into the draft's best k")
    hinge_margin: float = Field(1.0, ge=0, description="top_k_hinge: by this much, in logits")
    clip: float = Field(1.0, gt=0, description="gradient norm is clipped to this")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW")
    weight_decay: float = Field(0.0, ge=0, description="AdamW, on matrices")
    chunk: int = Field(256, ge=1, description="positions of the head computed at once")
    save_every: int = Field(100, ge=1, description="steps between checkpoints")
    keep: int = Field(2, ge=1, description="checkpoints kept")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="autocast type; the weights stay float32")
    checkpointing: bool = Field(False, description="compute activations again in the backward pass, to save memory")
    compile: bool = Field(False, description="torch.compile the draft's body")
    embedding_steps: int = Field(
        0, ge=0, description="first steps that move the embeddings and head alone, as after a transplant"
    )
    acceptance: Acceptance | None = Field(
        Acceptance(), description="choose the best weights; null, or with sparsity: the last"
    )
    adapter: Adapter | None = Field(None, description="LoRA in place of full training; null: off")
    replay: Replay | None = Field(None, description="a last part on rejected positions; null: off")
    sparsity: Sparsity | None = Field(None, description="L1 while training; null: off")
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = Field(
        (),
        description="also sent there, through accelerate: into trackers/ of the run, for trackio into its own "
        "folder; metrics.jsonl is always written",
    )

    _loss = field_validator("loss")(_weighs_something)

    @model_validator(mode="after")
    def _parts_fit(self) -> Train:
        names = [part.name for part in self.parts]
        if len({*names, "replay"}) <= len(names):
            raise ValueError(f"parts need names of their own, and `replay` is taken: got {', '.join(names)}")
        if self.parts and self.loss is not None:
            raise ValueError("train.loss is for a training without parts; give each part its loss")
        shares = sum(part.share or 0 for part in self.parts)
        if shares > 1 + 1e-9:
            raise ValueError(f"the parts' shares of train.steps add up to {shares:g}, more than 1")
        if self.sparsity is not None and self.replay is not None:
            raise ValueError("sparsity cuts the last weights, which a replay may take back; leave one of them out")
        if self.sparsity is not None and self.acceptance is not None and self.acceptance.patience is not None:
            raise ValueError("sparsity follows the steps; leave acceptance.patience out")
        return self
