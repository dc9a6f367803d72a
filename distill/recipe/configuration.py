"""A way to decode speculatively: who drafts, how many tokens, and who verifies."""

from __future__ import annotations

import operator
from itertools import accumulate
from typing import Literal

from pydantic import Field, model_validator

from distill.recipe.section import Section

# Which settings each length rule reads, beside `length`.
RULES: dict[str, tuple[str, ...]] = {
    "fixed": (),
    "p_min": ("p_min",),
    "p_min-after": ("p_min",),
    "start-continue": ("start", "more"),
    "plus-minus": (),
    "ratio": (),
    "entropy": ("floor",),
    "beta": ("floor",),
    "expected-value": ("calibration", "online"),
}
RuleName = Literal[
    "fixed", "p_min", "p_min-after", "start-continue", "plus-minus", "ratio", "entropy", "beta", "expected-value"
]
CalibrationName = Literal["none", "power", "margin", "features", "context", "sequential"]


class Trial(Section):
    """One way to decode speculatively, measured beside plain decoding; only what its rule reads may be set."""

    drafter: Literal["draft", "lookup", "lookup+draft", "tree"] = Field(
        "draft",
        description="lookup: what followed the same tokens earlier in the text; lookup+draft: the draft where "
        "that finds nothing; tree: the draft's best tokens, branching",
    )
    rule: RuleName = Field(
        "fixed",
        description="how many tokens to draft. p_min: while the largest probability is at least p_min; "
        "p_min-after: the same of the drawn token, dropped after its draw (as llama.cpp does: lossy when sampled); "
        "start-continue: two floors; plus-minus: +2 or −1; ratio: accepted ÷ drafted; entropy: AdaEDL; beta: counted "
        "acceptance; expected-value: measured costs and calibrated probabilities",
    )
    length: int = Field(8, ge=1, le=63, description="tokens drafted at most; of a tree, its depth")
    nodes: int | None = Field(
        None,
        ge=1,
        le=63,
        description="tree: tokens verified in a round; null: as many, below `profile.max_tokens`, "
        "as the measured costs and probabilities of acceptance make fastest on validation text",
    )
    shape: Literal["best-first", "static"] = Field(
        "best-first",
        description="tree: the likeliest nodes of each round; or always the shape that is best for the "
        "acceptance by rank, as tallied on validation text (Sequoia)",
    )
    widths: tuple[int, ...] | None = Field(
        None,
        min_length=1,
        description="tree: drawn instead, every node of a level with so many children from the "
        "draft's distribution; verified by token, or by distinct when drawn without replacement",
    )
    p_min: float = Field(0.5, gt=0, le=1, description="p_min, p_min-after: the floor")
    start: float = Field(0.5, ge=0, le=1, description="start-continue: the first position's floor")
    more: float = Field(0.7, ge=0, le=1, description="start-continue: the floor of later positions")
    floor: float | None = Field(None, ge=0, le=1, description="entropy, beta: the floor; null: 0.4 and 0.3")
    calibration: CalibrationName = Field(
        "features",
        description="expected-value, tree: from draft probabilities to acceptance, fitted on validation "
        "text: q^k; logistic on the margin, on all features of the distribution, or also (context) on what followed "
        "the same tokens earlier in the text; temperature of the product; none: q itself",
    )
    online: bool = Field(False, description="expected-value: all but none and sequential go on learning")
    verifier: Literal["greedy", "match", "token", "block", "distinct"] | None = Field(
        None, description="null: greedy; under a sampler token, and match for lookup and trees that are not drawn"
    )
    sampler: Literal["greedy", "recipe"] = Field("greedy", description="recipe: the recipe's own sampler")

    @model_validator(mode="after")
    def _only_what_is_read(self) -> Trial:
        if self.drafter in ("lookup", "tree") and self.rule != "fixed":
            raise ValueError(f"rule {self.rule} asks a draft position by position; drafter {self.drafter} has none")
        read = {"drafter", "rule", "length", "verifier", "sampler", *RULES[self.rule]}
        if self.drafter == "tree":
            read |= {"nodes", "shape", "widths"} | (set() if self.ranked else {"calibration"})
        if self.drafter == "tree" and self.widths is not None:
            read = {"drafter", "rule", "verifier", "sampler", "widths"}
            if min(self.widths) < 1 or self.drawn_nodes > 63:
                raise ValueError(f"widths {list(self.widths)} make {self.drawn_nodes} nodes: 1 to 63 are possible")
        for name, field in type(self).model_fields.items():
            if name not in read and getattr(self, name) != field.default:
                drafter = "tree of static shape" if self.ranked else "tree of widths" if self.widths else self.drafter
                raise ValueError(f"{name} is not read by drafter {drafter} with rule {self.rule}: leave it out")
        if self.drafter == "tree" and self.calibration == "context":
            raise ValueError("a tree's branches have different texts before them: use another calibration than context")
        if self.online and self.calibration in ("none", "sequential"):
            raise ValueError(f"calibration {self.calibration} learns nothing online: use power, margin or features")
        return self

    @property
    def learns(self) -> bool:
        """Whether it wants a calibration fitted beforehand."""
        grown = self.drafter == "tree" and not self.ranked and self.widths is None
        return (self.rule == "expected-value" or grown) and self.calibration != "none"

    @property
    def ranked(self) -> bool:
        """Whether it wants the acceptance by rank tallied beforehand."""
        return self.drafter == "tree" and self.shape == "static"

    @property
    def drawn_nodes(self) -> int:
        """Nodes of a tree of `widths`; 0 for every other."""
        return sum(accumulate(self.widths or (), operator.mul))

    @property
    def chosen(self) -> bool:
        """Whether its tree is settled by measuring, before it decodes: how large it is, or its shape."""
        return self.drafter == "tree" and self.widths is None and (self.nodes is None or self.ranked)

    @property
    def priced(self) -> bool:
        """Whether it wants the measured costs of steps and rounds."""
        return self.rule == "expected-value" or self.chosen

    @property
    def title(self) -> str:
        """How tables call it; different trials have different titles."""
        if self.drafter == "lookup":
            parts = [f"lookup, ≤ {self.length}"]
        elif self.widths is not None:
            parts = [f"drawn tree {'×'.join(map(str, self.widths))}"]
        elif self.drafter == "tree":
            size = "" if self.nodes is None else f" of {self.nodes}"
            kind = f"static tree{size}" if self.ranked else f"tree{size}"
            parts = [kind, f"depth ≤ {self.length}", *([] if self.ranked else [self.calibration])]
        else:
            told = " ".join(filter(None, [self.rule.replace("-", " "), *map(self._told, RULES[self.rule])]))
            parts = [self.drafter, *([f"γ = {self.length}"] if self.rule == "fixed" else [told, f"≤ {self.length}"])]
        if self.verifier is not None or self.sampler == "recipe":
            parts.append(f"verifier {self.verified_by}")
        return ", ".join(parts + (["sampled"] if self.sampler == "recipe" else []))

    def _told(self, name: str) -> str:
        value = getattr(self, name)
        return "" if value is None or value is False else name if value is True else f"{value}"

    @property
    def verified_by(self) -> str:
        """The verifier, the default spelled out."""
        usual = "token" if self.drafter in ("draft", "lookup+draft") or self.widths else "match"
        return self.verifier or ("greedy" if self.sampler == "greedy" else usual)
