"""Recipe sections: what the draft is cut from, and how far."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from distill.recipe.outtypes import OutType
from distill.recipe.section import Section


class Transplant(Section):
    """The donor gets the target's vocabulary, byte for byte."""

    method: Literal["subtokens", "pursuit"] = Field(
        "subtokens",
        description="rows that are no copies: subtokens: from the donor's own subtokens of the token's bytes; "
        "pursuit: orthogonal matching pursuit over the shared tokens (reads the target's embeddings)",
    )
    overrides: dict[str, str] = Field(
        {}, description="a target token, such as a turn marker, to the text whose donor tokens it starts from"
    )
    decay: float = Field(
        0.5, gt=0, le=1, description="subtokens: weight of each subtoken over the one before, in the head"
    )


class Trim(Section):
    """The draft speaks only tokens that the target writes often; our decoders compute their logits alone."""

    size: int | None = Field(None, ge=256, description="tokens kept; null: chosen `by` mass or price")
    by: Literal["mass", "price"] = Field(
        "mass", description="mass: the fewest that hold `mass` of every domain; price: the most tokens per second"
    )
    mass: float = Field(0.995, gt=0, le=1, description="share of the target-written tokens of each domain to cover")


class Search(Section):
    """Cuts tried before the draft is made: each healed for a few steps, measured and priced; the best is taken."""

    layers: tuple[int, ...] = Field(min_length=1, description="layer counts tried")
    mlp_width: tuple[int, ...] = Field((), description="MLP widths tried with each; empty: cut.mlp_width alone")
    heal_steps: int = Field(60, ge=0, description="training steps each cut gets before it is measured")
    backend: Literal["pytorch", "gguf"] = Field("pytorch", description="whose step costs count")
    outtypes: tuple[OutType, ...] = Field(("f16",), description="gguf: file types of the draft tried with every cut")
    max_length: int = Field(16, ge=1, le=63, description="longest draft length that a prediction may choose")


class Cut(Section):
    """What the draft is cut from, and how far: transplant, then layers, then widths, then the head."""

    donor: str = Field("target", description="`target`, a folder, or a hub name")
    transplant: Transplant | None = Field(None, description="needed when the donor's vocabulary is another; null: off")
    layers: int | None = Field(None, ge=1, description="layers kept; null: all")
    layer_rule: Literal["auto", "greedy", "influence", "angular", "last-but-one"] = Field(
        "auto",
        description="greedy: remove, one by one, the layer whose loss costs the least KL to the target; "
        "influence: drop the least influential; angular: the run of layers that turns the state least; "
        "last-but-one: the last n but one; auto: greedy for up to 28 layers, influence beyond, where greedy takes long",
    )
    drop_layers: str | None = Field(None, description="layers dropped by number instead, such as `14-21` or `3,7,9-11`")
    mlp_width: int | None = Field(None, ge=32, description="MLP neurons kept per layer; null: all")
    mlp_rule: Literal["activation", "magnitude", "first"] = Field(
        "activation", description="which neurons: by what they add to the residual stream; by weights alone; the first"
    )
    mlp_repair: bool = Field(True, description="least-squares repair of down_proj for the neurons removed")
    kv_heads: int | None = Field(None, ge=1, description="KV heads kept, each with its query heads; null: all")
    hidden: int | None = Field(None, ge=64, description="hidden size kept; null: all")
    trim: Trim | None = Field(None, description="trimmed head; null: off")
    search: Search | None = Field(None, description="search over cuts, which then sets layers and mlp_width; null: off")
    score_blocks: int = Field(16, ge=1, description="blocks that scores and losses of cuts are collected on")

    @model_validator(mode="after")
    def _layers_are_said_once(self) -> Cut:
        if self.drop_layers is not None and (self.layers is not None or self.search is not None):
            raise ValueError("drop_layers names the layers; leave layers and search out")
        if self.search is not None and self.layers is not None:
            raise ValueError("search sets the layers; leave layers out")
        if self.search is not None and self.search.mlp_width and self.mlp_width is not None:
            raise ValueError("search.mlp_width sets the widths; leave mlp_width out")
        return self
