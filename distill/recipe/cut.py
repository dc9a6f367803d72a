"""Recipe sections: the donor, and the cuts that make a draft of it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from distill.recipe.gguf import OutType
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


class Search(Section):
    """Try several cuts: train each briefly, predict its speed, and keep the fastest."""

    layers: tuple[int, ...] = Field(min_length=1, description="layer counts tried")
    mlp_width: tuple[int, ...] = Field(
        (), description="MLP widths tried with each layer count; empty: only cut.mlp_width"
    )
    heal_steps: int = Field(60, ge=0, description="training steps for each cut before it is measured")
    backend: Literal["pytorch", "gguf"] = Field("pytorch", description="backend whose step costs are used")
    outtypes: tuple[OutType, ...] = Field(
        ("f16",), description="gguf: file types of the draft, each tried with every cut"
    )
    max_length: int = Field(16, ge=1, le=63, description="longest draft length that predictions consider")


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
    search: Search | None = Field(None, description="search for the best layers and mlp_width; null: off")
    allow_full_size: bool = Field(
        False, description="allow a draft as costly as its target, such as one without any cut"
    )
    score_blocks: int = Field(16, ge=1, description="blocks on which cuts are scored and measured")

    @model_validator(mode="after")
    def _layers_are_given_once(self) -> Cut:
        if self.drop_layers is not None and (self.layers is not None or self.search is not None):
            raise ValueError("drop_layers names the layers; leave layers and search out")
        if self.search is not None and self.layers is not None:
            raise ValueError("search sets the layers; leave layers out")
        if self.search is not None and self.search.mlp_width and self.mlp_width is not None:
            raise ValueError("search.mlp_width sets the widths; leave mlp_width out")
        return self
