"""Proposals of drafters, the features of a position, and the length rules: how many tokens to draft.

Each rule is a small state that reads no clock and draws no numbers. A round calls `limit()`, then for each position
`step_on(position)` before the draft's step is paid and `go_on(position, features)` after it, before the token is drawn;
and at its end `observe(drafted, accepted, features, seconds)`. Positions count from 0 within a round.

Whether a position is verified must be decided before its token is drawn, or the output no longer follows the target's
distribution. `n_min` drops drafts after their draw, as llama.cpp does; a draft that samples under it is refused
wherever that would change the output (`verify.refusal`).

Legend: n nodes, V vocabulary. A chain is the tree in which every node's parent is the node before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from distill.engines.torch.model import fetch
from distill.sampler import largest

ROOT = -1  # the committed end of the context, parent of the first nodes


@dataclass(frozen=True)
class Features:
    """Features of the draft's distribution at one position, after the sampler, before its token is drawn.

    `top` and `second` are the two largest probabilities, `entropy` is in nats. `match` is the length of the longest
    n-gram before the position that occurred earlier in the text: positive where the best token followed it there,
    negative where another one did, 0 where none occurred or nobody searched (`TextIndex.agreement`). Of a table
    of n-grams it is the length of the longest context that was counted, and `count` how many counts follow that.
    """

    top: float
    second: float
    entropy: float
    match: int = 0
    count: float = 0.0


def features_of(distribution: Tensor) -> tuple[Features, int]:
    """Features of a distribution [V], and its best token; an empty one is 0 everywhere."""
    ((tokens, best),) = best_tokens(distribution[None], 2)
    top, second = (*best, 0.0, 0.0)[:2]
    return Features(top, second, float(entropies(distribution))), tokens[0] if tokens else 0


def entropies(distributions: Tensor) -> Tensor:
    """−Σ p ln p [...] of distributions [..., V], in nats; special.entr takes twice the time."""
    return -(distributions * distributions.clamp(min=torch.finfo(distributions.dtype).tiny).log()).sum(-1)


def best_tokens(distributions: Tensor, count: int) -> list[tuple[list[int], list[float]]]:
    """Up to `count` possible tokens of each distribution [m, V] and their probabilities, by one transfer; best first,
    smaller ids on ties."""
    values, ids = (part.tolist() for part in fetch(*largest(distributions, min(count + 1, distributions.shape[-1]))))
    best = []
    for row, chances in enumerate(values):
        candidates = list(zip(chances, ids[row], strict=True))
        if len(candidates) > count and chances[count] == chances[count - 1] > 0:
            # Any of the tokens that tie for the last place may be taken: compare all of them.
            tied = torch.nonzero(distributions[row] >= chances[count]).flatten()
            candidates = list(zip(distributions[row, tied].tolist(), tied.tolist(), strict=True))
        candidates = sorted(((p, i) for p, i in candidates if p > 0), key=lambda pair: (-pair[0], pair[1]))[:count]
        best.append(([i for _, i in candidates], [p for p, _ in candidates]))
    return best


def children_of(parents: Sequence[int]) -> dict[int, list[int]]:
    """The nodes below each node that has some, and below ROOT, in order."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    return children


@dataclass(frozen=True)
class Proposal:
    """Tokens [n] with parents before their children, `parents` [n] as indices (ROOT: the committed end).

    `distributions` [n, V] are the distributions that the tokens were drawn from, after the sampler. None means that the
    tokens were chosen without chance: each distribution is 1 at its token. `features` [n] are those of chains whose
    length rule reads them, else empty. `reading` are the seconds in which a draft read the text's prompt for it.
    """

    tokens: list[int]
    parents: list[int]
    distributions: Tensor | None = None
    features: list[Features] = field(default_factory=list)
    reading: float = 0.0

    @classmethod
    def chain(
        cls, tokens: list[int], distributions: Tensor | None = None, features: list[Features] | None = None
    ) -> Proposal:
        """The chain of these tokens."""
        return cls(tokens, list(range(ROOT, len(tokens) - 1)), distributions, features or [])

    def after(self, reading: float) -> Proposal:
        """This proposal, for which a draft read the prompt."""
        return replace(self, reading=reading) if reading else self

    @property
    def is_chain(self) -> bool:
        """Whether every node follows the one before it."""
        return self.parents == list(range(ROOT, len(self.tokens) - 1))

    def children(self) -> dict[int, list[int]]:
        """The nodes below each node (and below ROOT), in the order in which they were proposed."""
        return children_of(self.parents)

    def histories(self, context: Sequence[int]) -> list[list[int]]:
        """The tokens [n + 1] before each next token: the context, then the context and the path down to each node."""
        histories = [list(context)]
        for token, parent in zip(self.tokens, self.parents, strict=True):
            histories.append([*histories[parent + 1], token])
        return histories


# ── Length rules ──


@dataclass(kw_only=True)
class LengthRule:
    """What every rule decides for the decoder: here without a limit of its own, drafting everything, learning nothing.

    `n_min`: a draft of fewer tokens is dropped whole. `reads_features`: the rule reads features; making the
    distribution that they come from takes time.
    """

    n_min: int = 0
    reads_features: ClassVar[bool] = True

    def limit(self) -> int:
        """The most tokens to draft this round; 0 decodes plainly."""
        raise NotImplementedError

    def behind(self, unread: int, left: float = math.inf) -> None:
        """The round's first step will read this many tokens of the context: one, two after a round that was accepted
        whole, more after rounds without the draft, or all. At most `left` tokens will be drafted in this text."""

    def step_on(self, position: int) -> bool:
        """Whether the draft's step for `position` is worth its time; callers may skip this question."""
        return True

    def go_on(self, position: int, features: Features) -> bool:
        """Whether `position` is drafted, asked before its token is drawn."""
        return True

    def observe(self, drafted: int, accepted: int, features: Sequence[Features], seconds: float) -> None:
        """The round's end: tokens verified and accepted, the verified positions' features, the round's seconds."""

    def caught_up(self, seconds: float) -> None:
        """The draft has read text that was decoded without it; `observe` is not told of these seconds."""


@dataclass
class Fixed(LengthRule):
    """Always the same length; 0 is plain decoding."""

    length: int
    reads_features = False

    def limit(self) -> int:
        """The length."""
        return self.length


@dataclass
class ProbabilityFloor(Fixed):
    """Draft while the draft's largest probability is at least a floor, read before the draw: lossless for every draft.

    `later` is the floor after the first position, where it is another than `p_min`.
    """

    p_min: float
    later: float | None = None
    reads_features = True

    def go_on(self, position: int, features: Features) -> bool:
        """Top probability ≥ the position's floor."""
        return features.top >= (self.p_min if not position or self.later is None else self.later)


@dataclass
class AcceptedRatio(Fixed):
    """One longer while accepted ÷ drafted is at least a floor that rises with the length, else one shorter.

    The ratio is over the last rounds: each new round multiplies the weight of those before by `keep`. The floor is
    `base + rise·length`, at most 0.95.
    """

    length: int = 4
    base: float = 0.4
    rise: float = 0.03
    keep: float = 0.9
    shortest: int = 1
    longest: int = 16
    _drafted: float = field(default=0.0, init=False)
    _accepted: float = field(default=0.0, init=False)

    def observe(self, drafted: int, accepted: int, features: Sequence[Features], seconds: float) -> None:
        """Update the ratio, then step the length within [shortest, longest]."""
        if not drafted:
            return
        self._drafted = self.keep * self._drafted + drafted
        self._accepted = self.keep * self._accepted + accepted
        floor = min(self.base + self.rise * self.length, 0.95)
        step = 1 if self._accepted >= floor * self._drafted else -1
        self.length = min(max(self.length + step, self.shortest), self.longest)


@dataclass
class BetaFilter(Fixed):
    """Acceptance counted per (position, confidence bin); draft while the product of its means is at least `floor`.

    Drafting begins where the first position's mean is at least `start`; None: `floor`, too.

    A cell starts as a Beta prior worth `weight` observations at the bin's middle. Each judged token multiplies the
    cell's older counts by `keep`. Position j is judged only if it was drafted and reached.
    """

    floor: float = 0.3
    bins: int = 8
    weight: float = 4.0
    keep: float = 0.98
    start: float | None = None
    reads_features = True
    counts: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict, init=False)  # accepted, judged
    _survival: float = field(default=1.0, init=False)

    def cell(self, position: int, features: Features) -> tuple[int, int]:
        """Where a position with these features is counted."""
        return position, min(int(features.top * self.bins), self.bins - 1)

    def accept(self, position: int, features: Features) -> float:
        """The cell's posterior mean."""
        cell = self.cell(position, features)
        accepted, judged = self.counts.get(cell, (0.0, 0.0))
        return (accepted + self.weight * (cell[1] + 0.5) / self.bins) / (judged + self.weight)

    def go_on(self, position: int, features: Features) -> bool:
        """Whether this and all before it are expected to be accepted with probability ≥ the position's threshold."""
        self._survival = (self._survival if position else 1.0) * self.accept(position, features)
        return self._survival >= (self.floor if position or self.start is None else self.start)

    def observe(self, drafted: int, accepted: int, features: Sequence[Features], seconds: float) -> None:
        """Count the judged positions."""
        for position in range(min(drafted, accepted + 1)):
            cell = self.cell(position, features[position])
            old, judged = self.counts.get(cell, (0.0, 0.0))
            self.counts[cell] = (self.keep * old + (position < accepted), self.keep * judged + 1)
