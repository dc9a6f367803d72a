"""Who proposes: a model (greedy or sampled), earlier text of the same context, or one before the other.

A drafter is asked once a round and told afterwards how much of the context is committed, so that it forgets the rest.
Legend: V vocabulary, n tokens of a chain.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from distill.models.base import SPARE_NODES, Logits, Model
from distill.sampler import Sampler
from distill.speculative.lengths import Fixed, LengthRule
from distill.speculative.n_grams import LONGEST, Earlier
from distill.speculative.proposal import Features, Proposal
from distill.speculative.trees.shape import Shape
from distill.speculative.trees.tree import Calibrate, best_first, features_of, sampled_tree, top_tree
from distill.speculative.verify import Random, draw_token


class Drafter(Protocol):
    """Proposes chains, or trees, for a context that only grows between `begin`s."""

    @property
    def tree(self) -> bool:
        """Whether its proposals branch."""
        ...

    @property
    def kind(self) -> str:
        """How its tokens come about: a key of verify.KINDS."""
        ...

    def begin(self, prompt: Sequence[int]) -> None:
        """A new context starts with this prompt; the work of reading it belongs to the prefill."""
        ...

    def room(self, length: int) -> int:
        """How many tokens can be drafted after a context of `length`; below 1 it is not asked."""
        ...

    def propose(self, context: Sequence[int], limit: int, ends: Collection[int]) -> Proposal:
        """Tokens after `context`, at most `limit` on a path; an end token of a chain is the last one proposed."""
        ...

    def accepted(self, proposal: Proposal, count: int, length: int, seconds: float) -> None:
        """The round's end: `count` tokens of the proposal stand, the committed context is `length` long."""
        ...


def distribution_sampler(sampler: Sampler) -> Sampler:
    """The sampler that a draft's probabilities are read under: the served one, or temperature 1 for a greedy one."""
    return sampler if sampler.temperature else Sampler(1.0, repetition_penalty=sampler.repetition_penalty)


def features_after(distribution: Tensor, earlier: Earlier, history: Sequence[int]) -> Features:
    """What a rule is told of the draft's distribution [V] after `history`, with what `earlier` read of the same
    text."""
    return replace(features_of(distribution), match=earlier.match(history[-LONGEST:], int(distribution.argmax())))


class ModelDrafter:
    """A model that continues the context, for as long as its length rule says.

    With `sampler` temperature 0, or with `argmax`, its best token is taken; else tokens are drawn from its distribution
    after the sampler, which the proposal then holds. A repetition penalty reads the context as the target's does.
    """

    tree = False

    def __init__(self, model: Model, rule: LengthRule, sampler: Sampler, random: Random, argmax: bool = False) -> None:
        self.model, self.rule, self.sampler, self.random = model, rule, sampler, random
        self.argmax = argmax or sampler.temperature == 0
        self.earlier = Earlier()

    @property
    def kind(self) -> str:
        """Deterministic, sampled, or sampled and then cut by a rule that looks at what was drawn."""
        if self.argmax:
            return "deterministic"
        return "cut" if self.rule.anticipates else "sampled"

    def begin(self, prompt: Sequence[int]) -> None:
        """Read the prompt but for its last token, which goes in with the first step; nothing where it has no room."""
        self.model.rollback([0])
        self.earlier.begin()
        if 1 < len(prompt) < self.model.capacity:
            self.model.extend(prompt[:-1], want=[len(prompt) - 2])

    def room(self, length: int) -> int:
        """What the draft's context leaves; the last drafted token is never read."""
        return self.model.capacity - length

    def propose(self, context: Sequence[int], limit: int, ends: Collection[int]) -> Proposal:
        """Step by step; what was not read yet (one token, or two after a fully accepted round) goes in first."""
        limit = min(limit, self.rule.limit())
        fresh = list(context[self.model.lengths[0] :])
        tokens: list[int] = []
        if self.argmax and type(self.rule) is Fixed and self.sampler.repetition_penalty == 1:
            # Nothing asks for the distribution: the largest logit is enough, and much faster to find.
            for _ in range(limit):
                tokens.append(self.model.extend(fresh, want=[len(fresh) - 1]).argmax()[0])
                fresh = tokens[-1:]
                if tokens[-1] in ends:
                    break
            return Proposal.chain(tokens)
        self.earlier.read(context)
        distributions: list[Tensor] = []
        seen: list[Features] = []
        for position in range(limit):
            if not self.rule.step_on(position):
                break
            logits = self.model.extend(fresh, want=[len(fresh) - 1])
            token, distribution, features = self._next(logits, [*context, *tokens], position)
            if token is None:
                break
            tokens.append(token)
            distributions.append(distribution)
            seen.append(features)
            fresh = [token]
            if token in ends:
                break
        if self.argmax:
            count = self.rule.submit(seen)
            return Proposal.chain(tokens[:count], None, seen[:count])
        count = self._cut(tokens, distributions, seen)
        return Proposal.chain(tokens[:count], torch.stack(distributions[:count]) if count else None, seen[:count])

    def _next(self, logits: Logits, history: Sequence[int], position: int) -> tuple[int | None, Tensor, Features]:
        """The token at a position, its distribution and its features; no token where the rule stops before the draw."""
        distribution = self._distribution(logits, history)
        features = features_after(distribution, self.earlier, history)
        if not self.rule.go_on(position, features):
            return None, distribution, features
        return (
            (int(distribution.argmax()) if self.argmax else draw_token(distribution, self.random)),
            distribution,
            features,
        )

    def _distribution(self, logits: Logits, history: Sequence[int]) -> Tensor:
        """The draft's distribution [V]; without chance it is the softmax at the served temperature, or at 1 for
        greedy."""
        return distribution_sampler(self.sampler).probabilities(logits.full(), [history])[0]

    def _cut(self, tokens: list[int], distributions: list[Tensor], seen: list[Features]) -> int:
        """Where a rule that looks at drawn tokens ends the draft: lossy, and refused unless asked for."""
        keeps = getattr(self.rule, "keeps", None)
        if keeps is None:
            return self.rule.submit(seen)  # all, unless the rule looks at distributions behind drawn tokens
        for index, (token, distribution) in enumerate(zip(tokens, distributions, strict=True)):
            if not keeps(float(distribution[token])):
                return index
        return len(tokens)

    def accepted(self, proposal: Proposal, count: int, length: int, seconds: float) -> None:
        """Forget what did not stand (the last token was never read) and let the rule learn."""
        self.model.rollback([min(self.model.lengths[0], length - 1)])
        self.rule.observe(len(proposal.tokens), count, proposal.features, seconds)


class LookupDrafter:
    """Prompt lookup: what followed the context's last tokens where they stood before (Saxena 2023). Needs no model.

    The longest match of at most `longest` and at least `shortest` tokens counts, the latest of equals.
    """

    kind = "deterministic"
    tree = False

    def __init__(self, length: int = 8, longest: int = 3, shortest: int = 1) -> None:
        self.length, self.longest, self.shortest = length, longest, shortest
        self._places: dict[tuple[int, ...], int] = {}
        self._read = 0

    def begin(self, prompt: Sequence[int]) -> None:
        """Forget the last context."""
        self._places, self._read = {}, 0

    def room(self, length: int) -> int:
        """Anything."""
        return self.length

    def propose(self, context: Sequence[int], limit: int, ends: Collection[int]) -> Proposal:
        """What followed last time, up to an end token."""
        # Every n-gram but those that end the context, each with the place after it; later ones replace earlier ones.
        for end in range(max(self._read, 1), len(context)):
            for size in range(self.shortest, self.longest + 1):
                if size <= end:
                    self._places[tuple(context[end - size : end])] = end
        self._read = len(context)
        for size in range(self.longest, self.shortest - 1, -1):
            place = self._places.get(tuple(context[-size:])) if size <= len(context) else None
            if place is not None:
                found = list(context[place : place + min(limit, self.length)])
                stop = next((i + 1 for i, token in enumerate(found) if token in ends), len(found))
                return Proposal.chain(found[:stop])
        return Proposal.chain([])

    def accepted(self, proposal: Proposal, count: int, length: int, seconds: float) -> None:
        """Nothing to forget: the context itself is the memory."""


class FirstThen:
    """The first drafter where it has something to propose, else the second: lookup before a model, say."""

    tree = False

    def __init__(self, first: Drafter, second: Drafter) -> None:
        if first.kind != second.kind and "deterministic" not in (first.kind, second.kind):
            raise ValueError(f"one verifier cannot serve drafters that are {first.kind} and {second.kind}")
        self.first, self.second = first, second
        self._last = second

    @property
    def kind(self) -> str:
        """That of the less deterministic one."""
        return self.second.kind if self.first.kind == "deterministic" else self.first.kind

    def begin(self, prompt: Sequence[int]) -> None:
        """Both read the prompt."""
        self.first.begin(prompt)
        self.second.begin(prompt)

    def room(self, length: int) -> int:
        """What either has."""
        return max(self.first.room(length), self.second.room(length))

    def propose(self, context: Sequence[int], limit: int, ends: Collection[int]) -> Proposal:
        """The first one's proposal unless it is empty."""
        proposal = self.first.propose(context, min(limit, self.first.room(len(context))), ends)
        self._last = self.first
        if not proposal.tokens:
            proposal = self.second.propose(context, min(limit, self.second.room(len(context))), ends)
            self._last = self.second
        return proposal

    def accepted(self, proposal: Proposal, count: int, length: int, seconds: float) -> None:
        """Only the one that proposed learns; the other reads the new tokens when it is next asked."""
        self._last.accepted(proposal, count, length, seconds)


class TreeDrafter:
    """A model that proposes trees: the best tokens by the product of their probabilities, or draws in a fixed shape.

    Without a `shape` the tree has the `nodes` nodes of greatest value (deterministic children). With one, children are
    the best tokens where `best`, else drawn from the draft's distribution, without replacement where `distinct`.
    `values` are those of the last tree of greatest value, best first.
    """

    tree = True

    def __init__(
        self,
        model: Model,
        sampler: Sampler,
        random: Random,
        nodes: int,
        *,
        shape: Shape | None = None,
        best: bool = False,
        distinct: bool = False,
        branching: int = 4,
        depth: int = 8,
        calibrate: Calibrate | None = None,
    ) -> None:
        if sampler.repetition_penalty != 1:
            raise ValueError("trees are not drafted under a repetition penalty: branches have different histories")
        if shape is not None and not best and sampler.temperature == 0:
            raise ValueError("a greedy sampler draws nothing: ask for trees of the best tokens")
        self.model, self.sampler, self.random, self.nodes = model, distribution_sampler(sampler), random, nodes
        self.shape, self.best, self.distinct = shape, best, distinct
        self.values: list[float] = []
        self.branching, self.depth, self.calibrate = branching, depth, calibrate

    @property
    def kind(self) -> str:
        """Deterministic, sampled or distinct."""
        return "deterministic" if self.shape is None or self.best else "distinct" if self.distinct else "sampled"

    def begin(self, prompt: Sequence[int]) -> None:
        """Read the prompt but for its last token; nothing where it has no room."""
        self.model.rollback([0])
        if 1 < len(prompt) < self.model.capacity:
            self.model.extend(prompt[:-1], want=[len(prompt) - 2])

    def room(self, length: int) -> int:
        """What the draft's context leaves; it holds every node it expands."""
        return self.model.capacity - length

    def propose(self, context: Sequence[int], limit: int, ends: Collection[int]) -> Proposal:
        """A tree of at most `limit` levels; of a shape, the levels that are left. Its size is known before a draw."""
        shape = None if self.shape is None else self.shape.within(limit)
        most = self.nodes if shape is None else len(shape)
        # The target holds a path of limit + 1 and SPARE_NODES beside it; its last token is a node of the tree too.
        room = limit + SPARE_NODES - 2
        if limit <= 0 or most == 0 or (shape is not None and most > room):
            return Proposal.chain([])
        fresh = list(context[self.model.lengths[0] :])
        root = self.sampler.probabilities(self.model.extend(fresh, want=[len(fresh) - 1]).full())[0]

        def expand(tokens: list[int], parents: list[int]) -> Tensor:
            return self.sampler.probabilities(self.model.extend(tokens, parents=parents).full())

        if shape is not None and self.best:
            return top_tree(shape, root, expand)
        if shape is not None:
            return sampled_tree(shape, root, expand, self.random, not self.distinct)
        proposal, self.values = best_first(
            root,
            expand,
            min(most, room),
            branching=self.branching,
            depth=min(self.depth, limit),
            calibrate=self.calibrate,
            max_leaves=self.model.max_leaves,
        )
        return proposal

    def accepted(self, proposal: Proposal, count: int, length: int, seconds: float) -> None:
        """Drop the tree; the accepted path is read again with the next token, in one step."""
        self.model.rollback([min(self.model.lengths[0], length - 1)])
