"""A model under a grammar, and a drafter that proposes forced tokens for free.

The mask is applied to the logits, before the sampler: target and draft both sample from the sampler's distribution over
the allowed tokens. Where only one token is allowed, the model is not called; it reads that token with its next call.
Legend: V vocabulary, n tokens of a call.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from distill.decoding.drafters import NOTHING, Drafter
from distill.decoding.grammar import Constraint, State
from distill.decoding.lengths import Proposal
from distill.engines.model import ROOT, AroundModel, Ints, Model, PendingTree, check_call, check_chain, check_lengths
from distill.engines.torch.model import TorchLogits
from distill.sampler import Place

RUN = 64  # forced tokens of a round at most: as many as every backend takes in one call


class Constrained(AroundModel):
    """A model under a constraint; tokens that its cache lacks are read with the next call that needs them.

    One row. Call `Constraint.begin` before the first tokens of a text, which are its prompt.
    """

    def __init__(self, model: Model, constraint: Constraint) -> None:
        super().__init__(model)
        self.constraint = constraint
        self._states: list[State] = []  # after each committed token from the prompt's last one on
        self._tree = PendingTree()
        self._nodes: list[tuple[int, State]] = []  # the tokens of the tree, and the states after them
        self._read: dict[int, int] = {}  # nodes that the model has read, to its numbers for them
        self._dtype: torch.dtype | None = None

    def extend(
        self, tokens: Ints, counts: Ints | None = None, parents: Ints | None = None, want: Ints | None = None
    ) -> TorchLogits:
        """Logits [n, V] as the model's `extend`, −∞ where the grammar allows no token; the same errors."""
        wanted = list(range(len(tokens)) if want is None else want)
        if parents is None:
            check_chain(tokens, counts, want, self.lengths, self.capacity, self.vocabulary_size, self._tree)
            return self._extend_chain(list(tokens), wanted)
        check_call(tokens, counts, parents, want, self.vocabulary_size)
        return self._extend_tree(list(tokens), list(parents), wanted)

    def _extend_chain(self, tokens: list[int], want: list[int]) -> TorchLogits:
        depth, start = len(self.text), self.constraint.start
        states: list[State | None] = []
        state = self._last()
        for place, token in enumerate(tokens, start=depth):
            if place >= start:
                state = self.constraint.next(state, token)
            states.append(None if place < start - 1 else state)  # inside the prompt everything is allowed
        asked = [index for index in want if (after := states[index]) is None or after.forced is None]
        logits = None
        if asked or depth == 0:  # the prompt is read at once, whatever follows it
            owed = self.text[self.model.lengths[0] :]
            logits = self.model.extend([*owed, *tokens], want=[len(owed) + index for index in asked])
        values = None if logits is None else (logits.full(), logits.place)
        self.text += tokens
        self._states += [state for state in states if state is not None]
        return self._logits(values, [states[index] for index in want])

    def _last(self) -> State:
        return self._states[-1] if self._states else self.constraint.root

    def _extend_tree(self, tokens: list[int], parents: list[int], want: list[int]) -> TorchLogits:
        tree, first = self._tree.grown(parents, len(self.text), self.capacity), len(self._tree)
        nodes = list(self._nodes)
        for token, parent in zip(tokens, parents, strict=True):
            above = self._last() if parent == ROOT else nodes[parent][1]
            # A state before the prompt's last token exists only while the prompt is read, as a chain.
            nodes.append((token, self.constraint.next(above, token)))
        asked = [index for index in want if nodes[first + index][1].forced is None]
        values = self._ask(tree, nodes, [first + index for index in asked]) if asked else None
        self._tree, self._nodes = tree, nodes
        return self._logits(values, [nodes[first + index][1] for index in want])

    def _ask(self, tree: PendingTree, nodes: list[tuple[int, State]], asked: list[int]) -> tuple[Tensor, Place | None]:
        """Let the model read these nodes and the unread nodes above them; its logits after them, and their places."""
        needed: set[int] = set()
        for node in asked:
            while node != ROOT and node not in self._read and node not in needed:
                needed.add(node)
                node = tree.parents[node]
        owed = self.text[self.model.lengths[0] :]
        if owed:
            self.model.extend(owed, want=[])
        order = sorted(needed)
        numbers = self._read | {node: len(self._read) + place for place, node in enumerate(order)}
        logits = self.model.extend(
            [nodes[node][0] for node in order],
            parents=[numbers.get(tree.parents[node], ROOT) for node in order],
            want=[order.index(node) for node in asked],
        )
        self._read = numbers
        return logits.full(), logits.place

    def _logits(self, read: tuple[Tensor, Place | None] | None, states: Sequence[State | None]) -> TorchLogits:
        """Logits for each state: the model's under the mask where it was called, the forced token elsewhere.

        `read` are the model's logits after the states that allow several tokens, and their places.
        """
        values, place = (None, None) if read is None else read
        if values is not None:
            self._dtype = values.dtype
        logits = torch.zeros(len(states), self.vocabulary_size, dtype=self._dtype or torch.float32)
        called = [row for row, state in enumerate(states) if state is None or state.forced is None]
        if values is not None and called:
            logits[called] = values
        masked = {row: state for row, state in enumerate(states) if state is not None}
        if masked:
            logits[list(masked)] = self.constraint.masked(logits[list(masked)], list(masked.values()))

        def under_grammar(row: int) -> str:
            model = "a model" if place is None or row not in called else place(called.index(row))
            return f"{model}, under the grammar"

        return TorchLogits(logits, under_grammar)

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """As the model's `keep`; tokens of the path that it has not read stay owed."""
        path = self._tree.only_path(paths)
        read = [self._read[node] for node in path if node in self._read]
        if self._read:
            self.model.keep([read])
        self.text += [self._nodes[node][0] for node in path]
        self._states += [self._nodes[node][1] for node in path]
        self._drop_tree()

    def _drop_tree(self) -> None:
        self._tree, self._nodes, self._read = PendingTree(), [], {}

    def rollback(self, lengths: Sequence[int]) -> None:
        """Forget the tree and the tokens beyond `lengths[0]`; ValueError outside 0..the committed length."""
        (length,) = check_lengths(lengths, self.lengths)
        # Also where nothing was committed through here: the model may hold a text from before.
        self.model.rollback([min(length, self.model.lengths[0])])
        del self.text[length:]
        del self._states[max(0, length - max(self.constraint.start, 1) + 1) :]
        self._drop_tree()


class Forced:
    """A drafter that proposes the tokens that the grammar forces, and another drafter's tokens in between.

    Forced tokens come before the other's proposal and, for a chain, after it; they do not count in its length. Their
    distribution is 1 at the token, for the target too, so every verifier accepts them.
    """

    def __init__(self, drafter: Drafter, constraint: Constraint) -> None:
        self.drafter, self.constraint = drafter, constraint
        self.tree, self.kind = drafter.tree, drafter.kind
        self._before = 0  # forced tokens before the other drafter's proposal
        self._asked: Proposal | None = None  # which is None in a round in which it was not asked

    def begin(self, prompt: Sequence[int]) -> None:
        """The other drafter reads the prompt."""
        self.drafter.begin(prompt)

    def room(self, length: int) -> int:
        """No bound: forced tokens need no draft."""
        return sys.maxsize

    def propose(self, context: Sequence[int], limit: int, ends: Collection[int]) -> Proposal:
        """Forced tokens, the other's proposal, and after a chain the tokens that are then forced."""
        state = self.constraint.state(context)
        forced, state = self._run(state, min(limit, RUN))
        self._before, self._asked = len(forced), None
        context = [*context, *forced]
        room = min(limit - len(forced), self.drafter.room(len(context)))
        if room > 0 and not state.over and state.forced is None:
            self._asked = self._legal(self.drafter.propose(context, room, ends), state)
        asked = self._asked or NOTHING
        later: list[int] = []
        if asked.tokens and asked.is_chain:
            for token in asked.tokens:
                state = self.constraint.next(state, token)
            later, _ = self._run(state, min(limit - len(forced) - len(asked.tokens), RUN))
        if not forced and not later:
            return asked
        return _joined(forced, asked, later)

    def _run(self, state: State, limit: int) -> tuple[list[int], State]:
        """Tokens that are the only ones allowed, one after the other, and the state after them."""
        tokens: list[int] = []
        while len(tokens) < limit and state.forced is not None and not state.over:
            tokens.append(state.forced)
            state = self.constraint.next(state, state.forced)
        return tokens, state

    def _legal(self, proposal: Proposal, state: State) -> Proposal:
        """The proposal; a chain without distributions is cut before the first token that the grammar rules out."""
        if proposal.distributions is not None or not proposal.is_chain:
            return proposal
        for count, token in enumerate(proposal.tokens):
            if not state.allows(token):
                return Proposal.chain(proposal.tokens[:count], None, proposal.features[:count])
            state = self.constraint.next(state, token)
        return proposal

    def accepted(self, proposal: Proposal, count: int, length: int, seconds: float) -> None:
        """Tell the other drafter how many of its own tokens were accepted, unless it was not asked in this round.

        Forced tokens do not count: they are drafted with or without it, at almost no cost.
        """
        if self._asked is not None:
            own = min(max(count - self._before, 0), len(self._asked.tokens))
            self.drafter.accepted(self._asked, own, length, seconds)
            self._asked = None


def _joined(forced: list[int], asked: Proposal, later: list[int]) -> Proposal:
    """One proposal: forced tokens, another proposal below the last of them, and forced tokens after a chain."""
    tokens = [*forced, *asked.tokens, *later]
    above = len(forced) - 1  # ROOT where there are none
    parents = [*range(ROOT, above), *(above if parent == ROOT else parent + len(forced) for parent in asked.parents)]
    parents += range(len(parents) - 1, len(tokens) - 1)
    distributions = asked.distributions
    if distributions is not None:
        certain = [
            torch.nn.functional.one_hot(torch.tensor(part, dtype=torch.long), distributions.shape[-1]).to(distributions)
            for part in (forced, later)
        ]
        distributions = torch.cat([certain[0], distributions, certain[1]])
    return Proposal(tokens, parents, distributions)
