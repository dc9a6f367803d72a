"""The interface of every model backend, the bookkeeping of a pending tree of tokens, and models that record steps.

Legend: n rows of logits (one per wanted token), V vocabulary, k candidates, m tokens of a step. Nodes are numbered in
the order in which they were added since the last keep, rollback or committing extend. ROOT is the committed end.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from distill.sampler import Logits

Ints = Sequence[int]


class Model(Protocol):
    """A language model that gives logits, with a cache that grows and rolls back.

    Tokens enter as a chain that is committed at once, or as nodes of a tree. One path of the tree is committed later:

        extend(prompt)                             commits
        extend([5, 7], parents=[-1, -1])           nodes 0 and 1 after the prompt
        extend([2, 3], parents=[0, 2])             node 2 below node 0, node 3 below node 2
        keep([[0, 2]])                             commits 5, 2; nodes 1 and 3 are gone

    After any calls, logits equal those of a fresh prefill of the same path up to rounding. A mistake of the caller
    (ValueError) changes nothing.
    """

    @property
    def vocabulary_size(self) -> int:
        """The number V of ids that the logits cover."""

    @property
    def capacity(self) -> int:
        """The most tokens that a row can hold."""

    @property
    def rows(self) -> int:
        """The number of sequences that are kept at once."""

    @property
    def max_leaves(self) -> int:
        """The most branches (leaves) that a tree may have at once. 0 means no trees."""

    @property
    def lengths(self) -> list[int]:
        """The number of committed tokens of each row, without nodes of a pending tree."""

    def extend(
        self, tokens: Ints, counts: Ints | None = None, parents: Ints | None = None, want: Ints | None = None
    ) -> Logits:
        """Add `tokens` (all rows flat, `counts` per row) and return the logits after those that `want` indexes.

        `want` indexes the tokens of this call (None: all). Without `parents`, the tokens of a row follow each other and
        are committed. With `parents`, one node number (or ROOT) per token, they join the pending tree and nothing is
        committed. Raises ValueError, with nothing changed, for tokens that do not fit, and without `parents` while a
        tree is pending.
        """

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Commit one path of the pending tree per row and drop its other nodes.

        A path is a list of node numbers from a child of ROOT downwards. An empty path drops the whole tree.
        """

    def rollback(self, lengths: Sequence[int]) -> None:
        """Forget the pending tree and the tokens of each row beyond `lengths`."""

    def close(self) -> None:
        """Free the model's memory. The model cannot be used afterwards."""


def resent(model: Model) -> int:
    """Return the number of committed tokens that the next call computes again (see `StateSnapshots`). Usually 0."""
    count: int = getattr(model, "resent", 0)
    return count


ROOT = -1
SPARE_NODES = 64  # nodes of a tree that every model with trees holds in addition to `capacity` tokens


@dataclass(frozen=True)
class PendingTree:
    """Nodes below the committed end of one row, each with its parent and its depth (1 for a child of ROOT).

    `paths` are sets of nodes as bits: a node's path from the root, including the node.
    """

    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    paths: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.parents)

    def grown(self, parents: Sequence[int], committed: int = 0, capacity: int = sys.maxsize) -> PendingTree:
        """Return this tree with new nodes below `parents`.

        Raises ValueError for a parent that is neither ROOT nor an earlier node, and for a path that exceeds the
        capacity together with the committed tokens.
        """
        grown = PendingTree([*self.parents, *(int(parent) for parent in parents)], [*self.depths], [*self.paths])
        for node in range(len(self), len(grown)):
            parent = grown.parents[node]
            if not ROOT <= parent < node:
                raise ValueError(f"the parent of node {node} must be {ROOT} or an earlier node, got {parent}")
            above, path = (0, 0) if parent == ROOT else (grown.depths[parent], grown.paths[parent])
            grown.depths.append(above + 1)
            grown.paths.append(path | 1 << node)
        if committed + max(grown.depths) > capacity:
            raise ValueError(f"{committed} + {max(grown.depths)} tokens do not fit a context of {capacity}")
        return grown

    def seen(self, first: int, width: int) -> list[list[int]]:
        """Return 1 or 0 for each node from `first` on and each of `width` nodes: whether it attends to that node."""
        return [[path >> node & 1 for node in range(width)] for path in self.paths[first:]]

    def only_path(self, paths: Sequence[Sequence[int]]) -> list[int]:
        """Return the path of the only row in `paths`. ValueError if it does not lead down from ROOT node by node."""
        if len(paths) != 1:
            raise ValueError(f"one path for one row, got {len(paths)}")
        above, path = ROOT, [int(node) for node in paths[0]]
        for node in path:
            if not 0 <= node < len(self) or self.parents[node] != above:
                raise ValueError(f"{path} is not a path from {ROOT} in a tree with parents {self.parents}")
            above = node
        return path


SNAPSHOTS = 16  # copies per row, so that a draft can return to the place before any of its last tokens
NO_TREES = "trees need layers of keys and values, but some of this model's layers have a recurrent state"


class StateSnapshots:
    """The committed text of a cache that cannot be cut, and copies of its state at its last lengths.

    To go back, the cache returns to a copy. The committed tokens after the copy are computed again in the next call.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._copies: deque[tuple[int, Any]] = deque(maxlen=SNAPSHOTS)
        self._alone = 0  # calls of one token since the last other call or return

    def due(self, taken: int, count: int) -> bool:
        """Whether the state after `taken` tokens (all of the cache) should be copied before a call of `count` tokens.

        It is not copied if that copy exists. Plain decoding takes one token after another and needs no copies.
        """
        self._alone = self._alone + 1 if count == 1 else 0
        return taken > 0 and self._alone <= SNAPSHOTS and not (self._copies and self._copies[-1][0] == taken)

    def copied(self, taken: int, state: Any) -> None:
        """Keep a copy of the state after `taken` tokens. The oldest copy is forgotten if there are too many."""
        self._copies.append((taken, state))

    def latest(self, length: int) -> tuple[int, Any]:
        """Return tokens and state of the latest copy of at most `length` tokens, or (0, None).

        Later copies are forgotten.
        """
        self._alone = 0
        while self._copies and self._copies[-1][0] > length:
            self._copies.pop()
        return self._copies[-1] if self._copies else (0, None)


def check_call(tokens: Ints, counts: Ints | None, parents: Ints, want: Ints | None, vocabulary: int) -> None:
    """Raise ValueError unless one row takes all tokens, with a parent for each, and `check_tokens` passes."""
    if counts is not None and list(counts) != [len(tokens)]:
        raise ValueError(f"this model keeps one row: counts must be [{len(tokens)}], got {list(counts)}")
    if len(parents) != len(tokens):
        raise ValueError(f"one parent for each token, got {len(parents)} for {len(tokens)}")
    check_tokens(tokens, want, vocabulary)


def check_tokens(tokens: Ints, want: Ints | None, vocabulary: int) -> None:
    """Raise ValueError unless there are tokens, all in [0, V), and `want` indexes them."""
    if not len(tokens):
        raise ValueError("extend needs at least one token")
    if min(tokens) < 0 or max(tokens) >= vocabulary:
        raise ValueError(f"token ids must lie in [0, {vocabulary}), got {min(tokens)}..{max(tokens)}")
    if want is not None and len(want) and not (min(want) >= 0 and max(want) < len(tokens)):
        raise ValueError(f"want must index the {len(tokens)} tokens, got {min(want)}..{max(want)}")


def check_chain(
    tokens: Ints,
    counts: Ints | None,
    want: Ints | None,
    lengths: Ints,
    capacity: int,
    vocabulary: int,
    pending: Sized = (),
) -> list[int]:
    """Return the number of tokens that each row takes: `counts`, or all tokens for one row.

    Raises ValueError as `check_tokens` does, for counts that do not add up, beyond the capacity, and while a tree is
    `pending`.
    """
    if len(pending):
        raise ValueError("a tree is pending: keep a path of it or roll back first")
    if counts is None:
        counts = [len(tokens)] if len(lengths) == 1 else []
    if len(counts) != len(lengths) or min(counts) < 0 or sum(counts) != len(tokens):
        raise ValueError(f"counts must divide the {len(tokens)} tokens among {len(lengths)} rows, got {list(counts)}")
    check_tokens(tokens, want, vocabulary)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        if length + count > capacity:
            raise ValueError(f"row {row}: {length} + {count} tokens do not fit a context of {capacity}")
    return list(counts)


def check_lengths(lengths: Sequence[int], committed: Sequence[int]) -> list[int]:
    """Return the lengths to which rows go back. ValueError unless there is one for each row, within its committed."""
    pairs = zip(lengths, committed, strict=False)
    if len(lengths) != len(committed) or any(not 0 <= new <= old for new, old in pairs):
        raise ValueError(f"lengths must lie within the committed {list(committed)}, got {list(lengths)}")
    return [int(length) for length in lengths]


# ── Recording the steps of both models while texts are decoded ──


class Step(NamedTuple):
    """One call of a model: committed tokens before it, tokens taken, start time, and seconds taken."""

    depth: int
    tokens: int
    started: float
    seconds: float


class Noted:
    """A model of one row whose steps are recorded. All else is the model's, so that either can continue a text."""

    def __init__(self, model: Any, steps: list[Step]) -> None:
        self._inner, self.steps = model, steps  # An attribute `model` would hide that of the model.

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _noted(self, tokens: int, call: Callable[..., Any], *arguments: Any) -> Any:
        # The cost of watching counts as the model's time. Between steps it would distort the round's own time.
        started, depth = time.perf_counter(), self._inner.lengths[0]
        logits = call(*arguments)
        self.steps.append(Step(depth, tokens, started, time.perf_counter() - started))
        return logits

    def extend(
        self, tokens: Ints, counts: Ints | None = None, parents: Ints | None = None, want: Ints | None = None
    ) -> Any:
        """See `Model`."""
        return self._noted(len(tokens), self._inner.extend, tokens, counts, parents, want)

    # Rounds on a device call the model without `extend`.

    def step(self, ids: Tensor, *arguments: Any) -> Any:
        """See `StaticTorchModel`."""
        return self._noted(ids.shape[1], self._inner.step, ids, *arguments)


class Watch:
    """The steps of a target and a draft since they were last `taken`."""

    def __init__(self) -> None:
        self.target: list[Step] = []
        self.draft: list[Step] = []

    def models(self, target: Model, draft: Model) -> tuple[Model, Model]:
        """Return both models, with their steps recorded here. If they are the same, it records as the target."""
        watched: Any = Noted(target, self.target)
        return watched, watched if draft is target else Noted(draft, self.draft)

    def take(self, since: float = 0.0) -> tuple[list[Step], list[Step]]:
        """Return the steps of target and draft that began at `since` or later, and forget all steps."""
        taken = tuple([step for step in steps if step.started >= since] for steps in (self.target, self.draft))
        self.target.clear()
        self.draft.clear()
        return taken[0], taken[1]
