"""Recipe sections: the donor, and the cuts that make a draft of it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from distill.recipe.gguf import OutType
from distill.recipe.section import Section


class Transplant(Section):
    """Give the donor the target's vocabulary, byte for byte."""

    method: Literal["subtokens", "pursuit"] = Field(
        "subtokens",
        description="rows of tokens that the donor lacks: subtokens: from the donor's tokens for the same bytes; "
        "pursuit: orthogonal matching pursuit over the shared tokens (reads the target's embeddings)",
    )
    overrides: dict[str, str] = Field(
        {}, description="target token, such as a turn marker: text whose donor tokens initialise it"
    )
    decay: float = Field(
        1.0,
        gt=0,
        le=1,
        description="subtokens: in the head, weight of each subtoken relative to the previous one; 1: their mean, "
        "which loses least (docs/benchmarks/cuts.md)",
    )


class Trim(Section):
    """Restrict the draft to tokens that the target writes often; distill's decoders compute only their logits."""

    size: int | None = Field(None, ge=256, description="tokens to keep; null: chosen `by` mass or price")
    by: Literal["mass", "price"] = Field(
        "mass",
        description="mass: as few as cover `mass` of every domain; price: as many as give most tokens per second",
    )
    mass: float = Field(
        0.995, gt=0, le=1, description="share of the tokens written by the target that is covered in each domain"
    )


class Search(Section):
    """Try several cuts, train each for a few steps, predict its speed, and take the fastest."""

    layers: tuple[int, ...] = Field(min_length=1, description="layer counts tried")
    mlp_width: tuple[int, ...] = Field(
        (), description="MLP widths tried with each layer count; empty: cut.mlp_width alone"
    )
    heal_steps: int = Field(60, ge=0, description="training steps of each cut before it is measured")
    backend: Literal["pytorch", "gguf"] = Field("pytorch", description="backend whose step costs are used")
    outtypes: tuple[OutType, ...] = Field(("f16",), description="gguf: file types of the draft tried with each cut")
    max_length: int = Field(16, ge=1, le=63, description="longest draft length in a prediction")


class Cut(Section):
    """The donor and its cuts, made in this order: transplant, layers, widths, head."""

    donor: str = Field(
        "target", description="`target` (the target itself), or a folder, hub name or GGUF file, as target.model"
    )
    transplant: Transplant | None = Field(None, description="for a donor with another vocabulary; null: off")
    vocabulary_rows: Literal["target", "donor"] = Field(
        "target",
        description="rows of embeddings and head: as many as the target's, padding rows appended or removed, which "
        "vLLM asks for; donor: as they are. A transplanted draft has the target's",
    )
    layers: int | None = Field(None, ge=1, description="layers to keep; null: all")
    layer_rule: Literal["auto", "greedy", "influence", "last-but-one"] = Field(
        "auto",
        description="layers to drop: greedy: one at a time, the layer whose removal adds least KL to the target; "
        "influence: those of least influence; last-but-one: the last ones before the final layer; auto: greedy up to "
        "28 layers, above that influence, because greedy takes long",
    )
    drop_layers: str | None = Field(None, description="layers to drop, by number, such as `14-21` or `3,7,9-11`")
    layer_repair: bool = Field(
        True,
        description="adjust down_proj of the kept layers by least squares, so that each makes up for those dropped "
        "behind it",
    )
    mlp_width: int | None = Field(
        None, ge=32, description="MLP neurons to keep per layer: those that add most to the residual stream; null: all"
    )
    trim: Trim | None = Field(None, description="trim the head; null: off")
    search: Search | None = Field(None, description="search for layers and mlp_width; null: off")
    allow_full_size: bool = Field(
        False, description="allow a draft that costs as much as its target, for instance without any cut"
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
        if self.transplant is not None and self.vocabulary_rows == "donor":
            raise ValueError("a transplanted draft has the target's rows; leave vocabulary_rows out")
        return self
