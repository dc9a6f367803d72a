"""Recipe sections: training."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from distill.errors import RecipeError
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


class Sparsity(Section):
    """An L1 penalty in training drives neurons or single weights to zero; they are removed and the rest debiased."""

    method: Literal["group", "unstructured"] = Field(
        "group",
        description="group: whole MLP neurons, removed at the end; unstructured: single weights, which stay as zeros "
        "and give no speedup",
    )
    mlp_width: int | None = Field(None, ge=32, description="group: neurons that remain per layer")
    share: float | None = Field(None, gt=0, lt=1, description="unstructured: share of weights that become zero")
    ramp: float = Field(0.2, gt=0, le=1, description="share of the steps over which the penalty grows")

    @model_validator(mode="after")
    def _wants_one_goal(self) -> Sparsity:
        goal, other = ("mlp_width", "share") if self.method == "group" else ("share", "mlp_width")
        if getattr(self, goal) is None or getattr(self, other) is not None:
            raise ValueError(f"method {self.method} needs {goal} and no {other}")
        return self


LossName = Literal["forward_kl", "reverse_kl", "jsd", "total_variation", "nla", "lk_hybrid", "cross_entropy"]
Loss = dict[LossName, float]
Protocol = Literal["auto", "sampling", "match", "greedy"]


def _weighs_something(value: Loss | None) -> Loss | None:
    if value is not None and (any(not 0 <= w <= 1e6 for w in value.values()) or sum(value.values()) <= 0):
        raise ValueError("weights must lie between 0 and 1e6, and not all 0")
    return value


class Acceptance(Section):
    """Decode validation prompts during training, to choose the best weights and, with `patience`, to end early."""

    every: int = Field(100, ge=1, description="steps between evaluations; the end is also evaluated")
    prompts: int = Field(16, ge=2, description="validation prompts, decoded as one batch")
    new_tokens: int = Field(48, ge=8, description="tokens decoded of each")
    length: int = Field(4, ge=1, description="draft length")
    patience: int | None = Field(
        None, ge=1, description="the training ends after this many evaluations without improvement; null: never early"
    )


class HiddenStates(Section):
    """A loss on the final hidden state, which the head reads: its squared distance from the target's, relative to that.

    For a draft of the target's hidden size and a teacher of kind exact or online. Its weight falls in a line to 0.
    """

    weight: float = Field(0.1, gt=0, le=1e6, description="weight at the first step, beside that of the other losses")
    end: float = Field(0.8, gt=0, le=1, description="share of the steps after which the weight is 0")


FEWEST_JUDGES = 4  # as train.replay.judges; an interval over fewer prompts is meaningless


class Replay(Section):
    """Train further on positions where the decoder rejected the draft.

    Kept only if tokens per round rise on validation prompts.
    """

    prompts: int = Field(
        64,
        ge=1,
        description="prompts of train answers, generated or served, that are decoded to find rejected positions",
    )
    new_tokens: int = Field(128, ge=8, description="tokens decoded of each")
    length: int = Field(4, ge=1, description="draft length while decoding")
    steps: int = Field(50, ge=1, description="optimizer steps")
    share: float = Field(0.25, gt=0, le=1, description="share of a step's blocks that contain rejected positions")
    rate: float | None = Field(None, gt=0, le=10, description="peak learning rate; null: a third of train.rate")
    loss: Loss | None = Field(None, description="as train.loss")
    judges: int = Field(
        32, ge=FEWEST_JUDGES, description="validation prompts on which the drafts before and after are compared"
    )

    _loss = field_validator("loss")(_weighs_something)


class Train(Section):
    """How the draft is trained on the target's distributions."""

    protocol: Protocol = Field(
        "auto",
        description="how drafts will be verified: sampling: sampled drafts, rejection sampling; match: argmax drafts, "
        "compared with the sampled target; greedy; auto: greedy at temperature 0, else sampling. It sets the default "
        "loss and the measure by which the best weights are chosen",
    )
    steps: int = Field(300, ge=1, description="optimizer steps")
    batch: int = Field(4, ge=1, description="blocks per step, in all processes together")
    micro_batch: int | None = Field(
        None,
        ge=1,
        description="blocks per forward pass of a process, whose gradients are added; null: all of its blocks",
    )
    optimizer: Literal["adamw", "muon"] = Field(
        "muon",
        description="muon: for the matrices of the layers, with AdamW for embeddings, head, norms and biases; its "
        "steps are as large as AdamW's at the same rate",
    )
    rate: float | None = Field(
        None,
        gt=0,
        le=10,
        description="peak learning rate; null: by how much of its donor the cut leaves, from 5e-5 for a whole one to "
        "1.5e-3 for a sixth of its layers or less",
    )
    matrix_rate: float | None = Field(
        None,
        gt=0,
        le=10,
        description="muon: peak rate of the layers' matrices where train.rate is the peak, and in proportion in a "
        "replay; null: the same rate",
    )
    warmup: float = Field(0.03, ge=0, lt=1, description="share of the steps for a linear warm-up")
    schedule: Literal["cosine", "wsd"] = Field(
        "cosine",
        description="of the rate after the warm-up: cosine: down to `final_rate_share` along a cosine; wsd: constant, "
        "then down in a line over the last `decay_share` of the steps",
    )
    decay_share: float = Field(0.2, gt=0, le=1, description="wsd: share of the steps in which the rate falls")
    final_rate_share: float = Field(0.1, ge=0, le=1, description="share of its peak that the rate falls to")
    loss: Loss | None = Field(
        None,
        description="weights of the losses; null: the best known for protocol: jsd for sampling, forward_kl for match "
        "and greedy",
    )
    temperature: float = Field(
        1.0,
        gt=0,
        le=100,
        description="temperature of both distributions in forward_kl, reverse_kl and jsd, whose losses are multiplied "
        "by its square",
    )
    hidden_states: HiddenStates | None = Field(
        None, description="also learn the target's final hidden states, but in a replay; null: off"
    )
    jsd_beta: float = Field(0.5, gt=0, lt=1, description="jsd: share of the target in the mixture")
    lk_decay: float = Field(
        3.0,
        ge=0,
        le=1000,
        description="lk_hybrid: weight e^(-lk_decay · acceptance) for a token's forward KL, the rest for its TV",
    )
    clip: float = Field(1.0, gt=0, le=1e12, description="largest gradient norm")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW")
    momentum: float = Field(0.95, ge=0, lt=1, description="muon")
    weight_decay: float = Field(0.0, ge=0, le=10, description="decoupled, on matrices")
    chunk: int = Field(256, ge=1, description="positions for which the head is computed at once")
    save_every: int = Field(100, ge=1, description="steps between checkpoints")
    keep: int = Field(2, ge=1, description="checkpoints kept")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "float32", description="type of autocast; the weights stay float32; auto: as for target.dtype"
    )
    checkpointing: bool = Field(False, description="recompute activations in the backward pass, to save memory")
    compile: bool = Field(False, description="torch.compile the draft's body")
    embedding_steps: int = Field(
        0, ge=0, description="first steps, which train embeddings and head alone, as useful after a transplant"
    )
    acceptance: Acceptance | None = Field(
        Acceptance(), description="choose the best weights; null, or with sparsity: take the last"
    )
    adapter: Adapter | None = Field(None, description="LoRA instead of full training; null: off")
    replay: Replay | None = Field(None, description="further steps on rejected positions; null: off")
    sparsity: Sparsity | None = Field(None, description="L1 penalty during training; null: off")
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = Field(
        (),
        description="also send metrics to these, through accelerate; they write to trackers/ of the run, trackio to "
        "its own folder; metrics.jsonl is always written",
    )

    _loss = field_validator("loss")(_weighs_something)

    @model_validator(mode="after")
    def _settings_fit(self) -> Train:
        if self.matrix_rate is not None and self.optimizer != "muon":
            raise ValueError(f"matrix_rate is for optimizer muon; optimizer is {self.optimizer}")
        if self.schedule == "wsd" and self.warmup + self.decay_share > 1:
            raise ValueError(f"warmup {self.warmup:g} and decay_share {self.decay_share:g} take more than all steps")
        if self.adapter is not None and self.sparsity is not None:
            raise ValueError("sparsity changes the draft's own weights, which adapters freeze; leave one out")
        if self.adapter is not None and self.embedding_steps and not self.adapter.train_outer:
            raise ValueError(
                "embedding_steps trains embeddings and head alone, which adapters freeze; set adapter.train_outer"
            )
        if self.sparsity is not None and self.replay is not None:
            raise ValueError("sparsity removes parts of the last weights, and replay may discard those; leave one out")
        if self.sparsity is not None and self.acceptance is not None and self.acceptance.patience is not None:
            raise ValueError("sparsity needs all steps; leave acceptance.patience out")
        return self

    def require_judges(self, prompts: int) -> None:
        """Raise RecipeError where too few of so many validation prompts are left to judge a replay."""
        chosen = self.acceptance.prompts if self.acceptance else 0
        if self.replay is not None and prompts < chosen + FEWEST_JUDGES:
            raise RecipeError(
                f"there are {prompts} validation prompts, of which train.acceptance.prompts takes {chosen}: a replay "
                f"is judged on at least {FEWEST_JUDGES} others",
                "raise corpus.validation, lower train.acceptance.prompts, or leave train.replay out",
            )
