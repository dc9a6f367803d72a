"""The proposal of a drafter in one round, the features that a length rule may read, and the n-grams of a text.

Legend: n nodes, V vocabulary. A chain is the tree in which every node's parent is the node before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

ROOT = -1  # the committed end of the context, parent of the first nodes
LONGEST = 6  # tokens of an n-gram that features look for


@dataclass(frozen=True)
class Features:
    """Features of the draft's distribution at one position, after the sampler, before its token is drawn.

    `top` and `second` are the two largest probabilities, `entropy` is in nats. `match` is the length of the longest
    n-gram before the position that occurred earlier in the text: positive where the best token followed it there,
    negative where another one did, 0 where none occurred or nobody searched (`NGramIndex.match`).
    """

    top: float
    second: float
    entropy: float
    match: int = 0


def features_of(distribution: Tensor) -> Features:
    """Features of a distribution [V]."""
    return features_from(distribution, best_tokens(distribution, 2)[1])


def features_from(distribution: Tensor, best: Sequence[float]) -> Features:
    """Features of a distribution [V] whose `best` probabilities, two or more, are known."""
    entropy = entropies(distribution)
    top, second = (*best[:2], 0.0, 0.0)[:2]  # none where an empty distribution is 0 everywhere
    return Features(top, second, float(entropy))


def entropies(distributions: Tensor) -> Tensor:
    """−Σ p ln p [...] of distributions [..., V], in nats; special.entr takes twice the time."""
    return -(distributions * distributions.clamp(min=torch.finfo(distributions.dtype).tiny).log()).sum(-1)


def best_tokens(distribution: Tensor, count: int) -> tuple[list[int], list[float]]:
    """Up to `count` possible tokens of a distribution [V] and their probabilities; best first, smaller ids on ties."""
    values, ids = distribution.topk(min(count + 1, distribution.shape[-1]))
    candidates = list(zip(values.tolist(), ids.tolist(), strict=True))
    if len(candidates) > count and candidates[count][0] == candidates[count - 1][0] > 0:
        # topk may take any of the tokens that tie for the last place: compare all of them.
        ids = torch.nonzero(distribution >= values[-1]).flatten()
        candidates = list(zip(distribution[ids].tolist(), ids.tolist(), strict=True))
    candidates = sorted(((p, i) for p, i in candidates if p > 0), key=lambda pair: (-pair[0], pair[1]))[:count]
    return [i for _, i in candidates], [p for p, _ in candidates]


@dataclass(frozen=True)
class Proposal:
    """Tokens [n] with parents before their children, `parents` [n] as indices (ROOT: the committed end).

    `distributions` [n, V] are the distributions that the tokens were drawn from, after the sampler. None means that the
    tokens were chosen without chance: each distribution is 1 at its token. `features` [n] are left empty by drafters
    that do not compute them.
    """

    tokens: list[int]
    parents: list[int]
    distributions: Tensor | None = None
    features: list[Features] = field(default_factory=list)

    @classmethod
    def chain(
        cls, tokens: list[int], distributions: Tensor | None = None, features: list[Features] | None = None
    ) -> Proposal:
        """The chain of these tokens."""
        return cls(tokens, list(range(ROOT, len(tokens) - 1)), distributions, features or [])

    @property
    def is_chain(self) -> bool:
        """Whether every node follows the one before it."""
        return self.parents == list(range(ROOT, len(self.tokens) - 1))

    def children(self) -> dict[int, list[int]]:
        """The nodes below each node (and below ROOT), in the order in which they were proposed."""
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(node)
        return children

    def histories(self, context: Sequence[int]) -> list[list[int]]:
        """The tokens [n + 1] before each next token: the context, then the context and the path down to each node."""
        histories = [list(context)]
        for token, parent in zip(self.tokens, self.parents, strict=True):
            histories.append([*histories[parent + 1], token])
        return histories


class NGramIndex:
    """The latest place of every n-gram of up to LONGEST tokens in a text that only grows."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget the text."""
        self._text: list[int] = []
        self._places: dict[tuple[int, ...], int] = {}  # index of the token after the n-gram

    def read(self, text: Sequence[int]) -> None:
        """Index what `text` has beyond the part read before; later places replace older ones.

        The n-grams that end the text are left out, because no token follows them yet.
        """
        known = len(self._text)
        self._text += text[known:]
        for place in range(max(known, 1), len(self._text)):
            for size in range(1, min(LONGEST, place) + 1):
                self._places[tuple(self._text[place - size : place])] = place

    def match(self, tail: Sequence[int], token: int) -> int:
        """Length of the longest indexed n-gram that ends `tail`: positive where `token` followed it, negative where
        another token did; 0 where none is indexed."""
        for size in range(min(LONGEST, len(tail)), 0, -1):
            place = self._places.get(tuple(tail[-size:]))
            if place is not None:
                return size if self._text[place] == token else -size
        return 0
