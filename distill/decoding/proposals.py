"""What drafters propose: chains and trees of tokens, and the likeliest tokens of a draft's distributions.

Legend: n nodes, m distributions, V vocabulary. A chain is the tree in which every node's parent is the node before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from distill.engines.torch.model import fetch
from distill.sampler import largest

ROOT = -1  # the committed end of the context, parent of the first nodes


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


def likeliest(distribution: Tensor) -> tuple[int, float]:
    """The best token of a distribution [V] and its probability; 0 and 0 for an empty one."""
    ((tokens, chances),) = best_tokens(distribution[None], 1)
    return (tokens[0], chances[0]) if tokens else (0, 0.0)


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
    tokens were chosen without chance: each distribution is 1 at its token. `reading` are the seconds in which a draft
    read the text's prompt for it.
    """

    tokens: list[int]
    parents: list[int]
    distributions: Tensor | None = None
    reading: float = 0.0

    @classmethod
    def chain(cls, tokens: list[int], distributions: Tensor | None = None) -> Proposal:
        """The chain of these tokens."""
        return cls(tokens, list(range(ROOT, len(tokens) - 1)), distributions)

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
