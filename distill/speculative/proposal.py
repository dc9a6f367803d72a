"""What a drafter proposes in one round, and what a length rule may see of it.

Legend: n nodes, V vocabulary. A chain is the tree in which every node's parent is the node before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

ROOT = -1  # the committed end of the context, parent of the first nodes


@dataclass(frozen=True)
class Features:
    """What is known of a draft position before its token is drawn: of the draft's distribution there, after the
    sampler.

    `top` and `second` are the two largest probabilities, `entropy` is in nats. `match` tells whether the best token is
    what followed the last tokens earlier in the text (earlier.py); 0 where nobody looked.
    """

    top: float
    second: float
    entropy: float
    match: int = 0


@dataclass(frozen=True)
class Proposal:
    """Tokens [n] with parents before their children, `parents` [n] as indices (ROOT: the committed end).

    `distributions` [n, V] are the distributions that the tokens were drawn from, through the sampler; None when they
    were chosen without chance, which is the distribution that is 1 at the token. `features` [n] where the drafter knows
    them.
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
