"""Recipe sections: the donor, and the cuts that make a draft of it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from distill.recipe.section import Section


class Transplant(Section):
    """Give the donor the target's vocabulary, byte for byte."""

    overrides: dict[str, str] = Field(
        {}, description="for target tokens such as turn markers: text whose donor tokens initialise them"
    )
    decay: float = Field(
        1.0,
        gt=0,
        le=1,
        description="weight of each donor subtoken in the head's row of a token that the donor lacks, relative to the "
        "one before; 1: their mean, which measured best (docs/benchmarks.md#cuts-and-transplants)",
    )


class Trim(Section):
    """Restrict the draft to tokens the target writes often; distill's decoders compute only their logits."""

    size: int | None = Field(None, ge=256, description="tokens to keep; null: decided by `by`")
    by: Literal["mass", "price"] = Field(
        "mass",
        description="mass: the fewest tokens that cover `mass` in every domain; price: the number predicted to decode "
        "fastest",
    )
    mass: float = Field(0.995, gt=0, le=1, description="share of the target's written tokens to cover in every domain")


class ComparedCut(Section):
    """One of the cuts that are priced; null: all."""

    layers: int | None = Field(None, ge=1, description="layers to keep")
    mlp_width: int | None = Field(None, ge=32, description="MLP neurons to keep per layer")

    @property
    def name(self) -> str:
        """What it keeps, in words."""
        layers = "all layers" if self.layers is None else f"{self.layers} layers"
        return layers if self.mlp_width is None else f"{layers}, MLP {self.mlp_width}"


class Cut(Section):
    """The donor and how it is cut, in this order: transplant, layers, widths, head."""

    donor: str = Field(
        "target", description="`target` for the target itself, or another model, given as target.model is"
    )
    transplant: Transplant | None = Field(None, description="needed if the donor has another vocabulary; null: off")
    layers: int | None = Field(None, ge=1, description="layers to keep; null: all")
    layer_rule: Literal["auto", "greedy", "influence", "last-but-one"] = Field(
        "auto",
        description="which layers are dropped. greedy: one at a time, the layer whose removal adds least KL to the "
        "target; influence: those that change the hidden state least; last-but-one: the last ones before the final "
        "layer; auto: greedy up to 28 layers, influence for deeper models, where greedy takes too long",
    )
    drop_layers: str | None = Field(
        None, description="layers to drop, by number (the first is 0), such as `14-21` or `3,7,9-11`"
    )
    layer_repair: bool = Field(
        True,
        description="refit down_proj of the kept layers by ridge regression, so that each makes up for the layers "
        "dropped after it",
    )
    mlp_width: int | None = Field(
        None, ge=32, description="MLP neurons to keep per layer, those that add most to the residual stream; null: all"
    )
    trim: Trim | None = Field(None, description="restrict the head to frequent tokens; null: off")
    compare: tuple[ComparedCut, ...] = Field(
        (),
        description="cuts to price before the one above is made: each is trained briefly, and its acceptance and step "
        "cost predict its tokens per second, in one table",
    )
    heal_steps: int = Field(60, ge=0, description="training steps for each cut that is priced, by compare or trim")
    allow_full_size: bool = Field(
        False, description="allow a draft as costly as its target, such as one without any cut"
    )
    score_blocks: int = Field(16, ge=1, description="blocks on which cuts are scored and measured")

    @model_validator(mode="after")
    def _layers_are_given_once(self) -> Cut:
        if self.drop_layers is not None and self.layers is not None:
            raise ValueError("drop_layers names the layers; leave layers out")
        return self
