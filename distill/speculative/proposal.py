"""The proposal of a drafter in one round, and the features that a length rule may read.

Legend: n nodes, V vocabulary. A chain is the tree in which every node's parent is the node before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

ROOT = -1  # the committed end of the context, parent of the first nodes


@dataclass(frozen=True)
class Features:
    """Features of the draft's distribution at one position, after the sampler, before its token is drawn.

    `top` and `second` are the two largest probabilities, `entropy` is in nats. `match` is the length of the longest
    n-gram before the position that occurred earlier in the text: positive where the best token followed it there,
    negative where another one did, 0 where none occurred or nobody searched (`n_grams.NGramIndex.match`).
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
        found: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            found.setdefault(parent, []).append(node)
        return found

    def histories(self, context: Sequence[int]) -> list[list[int]]:
        """The tokens [n + 1] before each next token: the context, then the context and the path down to each node."""
        found = [list(context)]
        for token, parent in zip(self.tokens, self.parents, strict=True):
            found.append([*found[parent + 1], token])
        return found
