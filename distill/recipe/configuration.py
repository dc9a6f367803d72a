"""A configuration: one way to decode, by its drafter, how many tokens it drafts, its verifier and its sampler.

Recipes, `distill speedup`, `distill generate` and the distribution test all say it with these words.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal

from pydantic import Field, model_validator

from distill.recipe.target import Section

DrafterName = Literal["none", "draft", "lookup", "lookup+draft", "tree", "lookup+tree", "table", "string"]
RuleName = Literal["fixed", "p_min", "start-continue", "ratio", "beta", "expected-value"]
VerifierName = Literal["greedy", "match", "token", "block", "distinct"]

# Which settings each length rule reads, beside `length`.
RULES: dict[str, tuple[str, ...]] = {
    "fixed": (),
    "p_min": ("p_min",),
    "start-continue": ("start", "more"),
    "ratio": (),
    "beta": ("start", "floor"),
    "expected-value": (),
}
TREES = ("tree", "lookup+tree")
DETERMINISTIC = ("lookup", *TREES, "table", "string")  # drafters whose tokens come without a distribution of their own
# What a setting that is left out means, where something reads it.
LENGTH, P_MIN, START, MORE, FLOOR = 8, 0.5, 0.5, 0.7, 0.3
USUAL_LENGTH = 4  # Tokens drafted a round if nothing was measured and no option says otherwise.
NODES, TABLE_NODES = 12, 15  # of the draft's trees, and of a table's
# Of configurations of one kind: what their names say where they differ in it, and how.
DISTINGUISHING = (*("rule", "length", "widths", "nodes", "p_min", "start", "more", "floor", "n_min", "verifier"),)
ADAPTIVE = "adaptive"
SAID, MOST_WORDS = {"expected-value": ADAPTIVE}, 3


class Configuration(Section):
    """One way to decode. Settings that its drafter and rule do not use must be left out."""

    drafter: DrafterName = Field(
        "draft",
        description="what proposes tokens ([decoding](decoding.md)). draft: the draft model; tree: a tree of its "
        "likeliest tokens; lookup: what followed the longest earlier match in the text; lookup+draft, lookup+tree: "
        "these where the lookup finds nothing; table: n-grams of the target's answers and the text; none: plain "
        "decoding; string: the text of a draft of another vocabulary (`generate`, `speedup` of any two models)",
    )
    rule: RuleName | None = Field(
        None,
        description="decides how many tokens are drafted ([decoding](decoding.md#how-many-tokens-are-drafted)); "
        "null: fixed, for a tree that is not drawn expected-value",
    )
    length: int | None = Field(
        None, ge=1, le=63, description=f"maximum tokens drafted in a row, of a tree on a path; null: {LENGTH}"
    )
    nodes: int | None = Field(
        None, ge=1, le=63, description=f"maximum tokens of a tree; null: {NODES}, of a table's {TABLE_NODES}"
    )
    widths: tuple[int, ...] | None = Field(
        None,
        min_length=1,
        description="tree: children of every node, by level, drawn from the draft's distribution; verified by token, "
        "or by distinct if drawn without replacement",
    )
    p_min: float | None = Field(None, gt=0, le=1, description=f"p_min: the threshold; null: {P_MIN}")
    n_min: int | None = Field(
        None,
        ge=1,
        le=63,
        description="draft, lookup+draft: drop drafts of fewer tokens, as llama.cpp does; lossy when verified by "
        "token or block; null: 0",
    )
    start: float | None = Field(
        None,
        ge=0,
        le=1,
        description=f"threshold at the first position; null: {START} (start-continue), or `floor` (beta)",
    )
    more: float | None = Field(
        None, ge=0, le=1, description=f"start-continue: threshold at later positions; null: {MORE}"
    )
    floor: float | None = Field(None, ge=0, le=1, description=f"beta: the threshold; null: {FLOOR}")
    verifier: VerifierName | None = Field(
        None, description="null: greedy; when sampling, token, or match for a lookup and for trees that are not drawn"
    )
    sampler: Literal["greedy", "recipe"] = Field("greedy", description="recipe: the served sampler")

    @model_validator(mode="after")
    def _only_settings_that_are_read(self) -> Configuration:
        priced = self.rule == "expected-value" and (self.drafter in ("lookup", "table") or self._grows)
        if self.rule not in (None, "fixed") and self.drafter not in ("draft", "lookup+draft") and not priced:
            raise ValueError(f"rule {self.rule} asks a draft position by position; drafter {self.drafter} has none")
        read = self._read()
        for name in type(self).model_fields:
            if name not in read and getattr(self, name) is not None:
                raise ValueError(f"{name} is not read by {self._described()}: leave it out")
        if self.drafter == "tree" and self.widths is not None and (min(self.widths) < 1 or self.most_nodes > 63):
            raise ValueError(f"widths {list(self.widths)} make {self.most_nodes} nodes: 1 to 63 are possible")
        if self.n_min is not None and self.n_min > self.longest:
            raise ValueError(f"n_min {self.n_min} drops every draft of at most {self.longest} tokens: lower it")
        return self

    def _read(self) -> set[str]:
        """The settings that this drafter and rule read."""
        sized = ("verifier", "rule", "length")
        grown, chain = (*sized, "nodes"), (*sized, *RULES[self.length_rule])
        read: dict[str, tuple[str, ...]] = {
            "none": (),
            "lookup": sized,
            "table": (*sized, "nodes"),
            "tree": grown if self.widths is None else ("verifier", "widths"),
            "lookup+tree": grown,
            "string": chain,
        }
        return {"drafter", "sampler", *read.get(self.drafter, (*chain, "n_min"))}

    def _described(self) -> str:
        if self.drafter == "tree":
            return "drafter tree" + (" of widths" if self.widths is not None else "")
        return f"drafter {self.drafter}" + (f" with rule {self.length_rule}" if self.drafts else "")

    @property
    def length_rule(self) -> RuleName:
        """The length rule, the default spelled out."""
        return self.rule or ("expected-value" if self._grows else "fixed")

    @property
    def longest(self) -> int:
        """Tokens drafted in a row (of a tree: on a path) at most: the default spelled out."""
        return LENGTH if self.length is None else self.length

    @property
    def drafts(self) -> bool:
        """Whether anything is drafted."""
        return self.drafter != "none"

    @property
    def asks_the_draft(self) -> bool:
        """Whether it uses a draft of the target's vocabulary."""
        return self.drafter in ("draft", "lookup+draft", *TREES)

    @property
    def other_vocabulary(self) -> bool:
        """Whether it uses a draft of another vocabulary."""
        return self.drafter == "string"

    @property
    def branches(self) -> bool:
        """Whether it drafts trees."""
        return self.drafter in TREES

    @property
    def _grows(self) -> bool:
        """Whether it drafts trees of the draft's likeliest tokens."""
        return self.branches and self.widths is None

    @property
    def looks_up(self) -> bool:
        """Whether a lookup comes before another drafter."""
        return self.counts_ngrams or self.drafter in ("lookup+draft", "lookup+tree")

    @property
    def counts_ngrams(self) -> bool:
        """Whether it drafts from a table of n-grams."""
        return self.drafter == "table"

    @property
    def most_nodes(self) -> int:
        """Nodes of a tree at most, the default spelled out; 0 where none is drafted."""
        if self.widths is not None:
            return sum(accumulate(self.widths, operator.mul))
        if not self.branches and not self.counts_ngrams:
            return 0
        return self.nodes or (NODES if self.branches else TABLE_NODES)

    @property
    def longest_round(self) -> int:
        """Largest number of drafted tokens that needs a price."""
        return max(self.most_nodes, self.longest)

    @property
    def needs_costs(self) -> bool:
        """Whether it needs the measured costs of steps and rounds."""
        return self.length_rule == "expected-value"

    @property
    def kind(self) -> str:
        """What it is called where no other is like it."""
        if not self.drafts:
            return "plain"
        if self.drafter not in ("draft", "string"):
            return self.drafter.replace("+", " + ") if self.widths is None else "drawn tree"
        named = {"fixed": f"{self.longest}", "expected-value": ADAPTIVE}
        return f"{self.drafter} {named.get(self.length_rule, self.length_rule)}"

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that it reads, the defaults spelled out; different configurations have different ones."""
        first = START if self.rule != "beta" else FLOOR if self.floor is None else self.floor
        usual: dict[str, Any] = {"rule": self.length_rule, "length": self.longest, "nodes": self.most_nodes}
        usual |= {"p_min": P_MIN, "start": first, "more": MORE, "floor": FLOOR}
        found = usual | {"verifier": self.verified_by} | self.model_dump(exclude_none=True)
        return {name: found[name] for name in type(self).model_fields if name in self._read() and name in found}

    @property
    def described(self) -> str:
        """Its settings in words, for messages."""
        return described(self.settings)

    @property
    def verified_by(self) -> VerifierName:
        """The verifier, the default spelled out."""
        if self.verifier is not None:
            return self.verifier
        if self.sampler == "greedy":
            return "greedy"
        return "match" if self.drafter in DETERMINISTIC and self.widths is None else "token"


def described(settings: Mapping[str, Any]) -> str:
    """A configuration's settings in words; what is greedy where all is goes without saying."""
    greedy = settings["sampler"] == "greedy"
    return ", ".join(f"{name} {_word(value)}" for name, value in settings.items() if not greedy or value != "greedy")


def _word(value: Any) -> str:
    return "×".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def names(configurations: Sequence[Configuration]) -> list[str]:
    """What the configurations of one table are called, in three words at most: their kind, and of several of a kind the
    one setting that sets each apart, or a number where it takes more than one."""
    kinds = [(one.kind, " sampled" * (one.sampler == "recipe")) for one in configurations]
    found = ["".join(kind) for kind in kinds]
    for kind, sampled in {kind for kind in kinds if kinds.count(kind) > 1}:
        places = [at for at, one in enumerate(kinds) if one == (kind, sampled)]
        for marks in (*([configurations[at].settings.get(name) for at in places] for name in DISTINGUISHING), None):
            if marks is None or (None not in marks and len({*map(str, marks)}) == len(marks)):
                break
        room = len(f"{kind}{sampled}".replace("+", "").split()) < MOST_WORDS
        for number, at in enumerate(places):
            mark = _word(marks[number]) if marks and room else f"({number + 1})"
            found[at] = f"{kind} {SAID.get(mark, mark)}{sampled}"
    return found


PLAIN = Configuration(drafter="none")
PLAIN_SAMPLED = Configuration(drafter="none", sampler="recipe")
