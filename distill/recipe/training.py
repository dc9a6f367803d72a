"""Recipe sections: training, the donor, and the cuts that make a draft of it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from distill.recipe.target import Section


class Adapter(Section):
    """LoRA, or QLoRA on a quantised base, for drafts too large to train in full. Merged at the end.

    Embeddings and head are frozen, but for a transplanted vocabulary (`cut.transplant`), whose rows are new.

    The merged draft has full precision. After QLoRA it differs from the draft as trained, which included the
    quantisation error of the base.
    """

    rank: int = Field(
        16,
        ge=1,
        description="rank r of the two matrices [out, r] and [r, in] added to each layer, whose product counts twice",
    )
    base: Literal["int8", "int4"] | None = Field(
        None, description="QLoRA: bitsandbytes keeps the frozen weights in 8 or 4 bits (NF4); null: not quantised"
    )


class Sparsity(Section):
    """A group lasso during training drives MLP neurons to zero. They are cut out, and the rest is debiased."""

    mlp_width: int = Field(ge=32, description="MLP neurons left per layer; the others are removed at the end")


LossName = Literal["forward_kl", "jsd", "total_variation", "nla", "lk_hybrid", "cross_entropy"]
Loss = dict[LossName, float]
Protocol = Literal["auto", "sampling", "match", "greedy"]


def _weighs_something(value: Loss | None) -> Loss | None:
    if value is not None and (any(not 0 <= w <= 1e6 for w in value.values()) or sum(value.values()) <= 0):
        raise ValueError("weights must lie between 0 and 1e6, and not all 0")
    return value


class Acceptance(Section):
    """Measure the expected acceptance on stored validation answers during training, to keep the best weights and, with
    `patience`, to stop early."""

    every: int = Field(100, ge=1, description="steps between evaluations; the last step is always evaluated")
    prompts: int = Field(
        64, ge=2, description="validation prompts that the target answers; about 20,000 tokens tell 0.005 apart"
    )
    patience: int | None = Field(
        None, ge=1, description="stop after this many evaluations without improvement; null: never"
    )


class Train(Section):
    """How the draft is trained on the target's distributions."""

    protocol: Protocol = Field(
        "auto",
        description="how drafted tokens will be verified ([training](training.md#protocols-and-losses)); auto: "
        "greedy at temperature 0, else sampling",
    )
    steps: int = Field(300, ge=0, description="optimizer steps; 0: the draft is the cut as it is")
    batch: int = Field(4, ge=1, description="blocks per step, over all processes")
    micro_batch: int | None = Field(
        None,
        ge=1,
        description="blocks per forward pass of a process; gradients are accumulated; null: all of its blocks",
    )
    optimizer: Literal["adamw", "muon"] = Field(
        "muon", description="muon: Muon for the matrices of the layers, AdamW for the rest"
    )
    rate: float | None = Field(
        None,
        gt=0,
        le=10,
        description="peak learning rate; null: by the share of the donor that is left "
        "([training](training.md#the-rate))",
    )
    loss: Loss | None = Field(None, description="weights of the losses; null: by the protocol")
    save_every: int = Field(100, ge=1, description="steps between checkpoints, of which two are kept")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="autocast type; the weights stay float32; auto: as for target.dtype"
    )
    checkpointing: bool = Field(False, description="recompute activations in the backward pass to save memory")
    compile: bool = Field(False, description="use torch.compile on the draft's body")
    embedding_rate: float | None = Field(
        None,
        gt=0,
        le=1000,
        description="peak rate of embeddings and head, as a factor of `rate`; null: 1, or 1.5e-3 in all after a "
        "transplant",
    )
    acceptance: Acceptance | None = Field(
        Acceptance(), description="keep the best weights; null, or with sparsity: keep the last"
    )
    adapter: Adapter | None = Field(None, description="train LoRA adapters instead of all weights")
    sparsity: Sparsity | None = Field(None, description="remove MLP neurons during training")

    _loss = field_validator("loss")(_weighs_something)

    @model_validator(mode="after")
    def _settings_fit(self) -> Train:
        if self.adapter is not None and self.sparsity is not None:
            raise ValueError("sparsity changes the draft's own weights, which adapters freeze; leave one out")
        if self.sparsity is not None and self.patience is not None:
            raise ValueError("sparsity needs all steps; leave acceptance.patience out")
        return self

    @property
    def patience(self) -> int | None:
        """The evaluations without improvement after which training stops. None: it makes all steps."""
        return None if self.acceptance is None else self.acceptance.patience


# ── The donor and its cuts ──


class Cut(Section):
    """The donor and how it is cut, in this order: transplant, layers, widths, head."""

    donor: str = Field(
        "target", description="`target` for the target itself, or another model, given as target.model is"
    )
    transplant: dict[str, str] | None = Field(
        None,
        description="give the donor the target's vocabulary, needed if it has another; `{}`, or for target tokens such "
        "as turn markers a text whose donor tokens initialise them",
    )
    layers: int | None = Field(
        None, ge=1, description="layers to keep, those of most influence ([cuts](surgery.md#cuts)); null: all"
    )
    mlp_width: int | None = Field(
        None, ge=32, description="MLP neurons to keep per layer, those that add most to the residual stream; null: all"
    )
    trim: float | None = Field(
        None,
        gt=0,
        description="restrict the head to tokens that the target writes often: their number, or the share of its text "
        "to cover in every source, such as 0.995. Only distill's decoders use it",
    )
    allow_full_size: bool = Field(
        False, description="allow a draft as costly as its target, such as one without any cut"
    )
    score_blocks: int = Field(16, ge=1, description="blocks on which cuts are scored and measured")

    @property
    def trim_size(self) -> int | None:
        """The number of tokens that a trim keeps; None where it covers a share."""
        return None if self.trim is None or self.trim <= 1 else round(self.trim)

    @model_validator(mode="after")
    def _trim_is_a_share_or_a_number(self) -> Cut:
        if self.trim is not None and self.trim > 1 and (self.trim < 256 or self.trim != round(self.trim)):
            raise ValueError("trim is a share up to 1, or a number of tokens from 256 on")
        return self
