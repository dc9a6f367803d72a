"""The proposal of a drafter in one round, the features that a length rule may read, and the n-grams of a text.

Legend: n nodes, V vocabulary. A chain is the tree in which every node's parent is the node before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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
