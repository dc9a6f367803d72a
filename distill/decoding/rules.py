"""How a text is decoded, whatever drafts it: the sampler, the verifier, what ends it, where chance comes from, and
models under a grammar.

Stop strings end a text by its bytes, not by decoded tokens: a tokenizer that decodes single tokens drops the space
before a word (SentencePiece) and breaks characters that several tokens share. Legend: L bytes of the longest stop
string, V vocabulary, n tokens of a call.
"""

from __future__ import annotations

import codecs
import sys
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from distill.decoding.drafters import NOTHING, Drafter
from distill.decoding.grammar import Constraint, State
from distill.decoding.proposals import Proposal
from distill.decoding.verify import Random
from distill.engines.loaded import LoadedPair
from distill.engines.model import ROOT, Ints, Model
from distill.engines.torch.model import TorchLogits
from distill.errors import DataError
from distill.recipe import Sampler
from distill.vocabulary.vocabulary import Vocabulary

BytesOf = Callable[[int], bytes]


def token_bytes(vocabulary: Vocabulary, silent: Collection[int] = ()) -> BytesOf:
    """The bytes of each token; none for the `silent` ones and for ids without a token."""
    return lambda token: b"" if token in silent else vocabulary.text_bytes([token])


def characters() -> codecs.IncrementalDecoder:
    """Bytes to text as they come: the bytes of an unfinished character wait. What is no UTF-8, or stays unfinished at
    the end, becomes U+FFFD."""
    return codecs.getincrementaldecoder("utf-8")("replace")


@dataclass(frozen=True)
class Stopped:
    """A stop function's verdict on a text: its first `kept` tokens are certain to be part of it.

    Where the text `ended`, they are the whole of it, followed by `rest`: the bytes of the next token before the place
    where the text ends. Else the tokens after them may be the beginning of a stop string, and wait.
    """

    kept: int
    ended: bool = False
    rest: bytes = b""


# From all new tokens, and how many of them an earlier call has read without an end. `kept` never falls between calls.
Stop = Callable[[Sequence[int], int], Stopped]


def stop_before(bytes_of: BytesOf, texts: Sequence[str]) -> Stop | None:
    """A function that ends a text before the stop string that is complete first; of several, before the longest.

    None without `texts`. A call reads the new tokens and L − 1 bytes before them. Raises DataError for an empty stop
    string.
    """
    if not texts:
        return None
    if not all(texts):
        raise DataError("an empty stop string would end every text before it begins", "give some text to stop before")
    stops = [text.encode() for text in texts]
    longest = max(map(len, stops))

    def stop(tokens: Sequence[int], seen: int) -> Stopped:
        start, before = seen, 0
        while start and before < longest - 1:
            start -= 1
            before += len(bytes_of(tokens[start]))
        parts = [bytes_of(token) for token in tokens[start:]]
        read, ends = b"".join(parts), list(accumulate(map(len, parts)))
        matches = [(place + len(text), place) for text in stops if (place := read.find(text)) >= 0]
        place = min(matches)[1] if matches else len(read) - _begun(read, stops, longest)
        whole = bisect_right(ends, place)
        rest = read[ends[whole - 1] if whole else 0 : place] if matches else b""
        return Stopped(start + whole, bool(matches), rest)

    return stop


def _begun(read: bytes, stops: Sequence[bytes], longest: int) -> int:
    """How many bytes at the end may be the beginning of a stop string."""
    for size in range(min(longest - 1, len(read)), 0, -1):
        if any(len(text) > size and text.startswith(read[-size:]) for text in stops):
            return size
    return 0


GREEDY = Sampler(temperature=0)


@dataclass(frozen=True)
class Rules:
    """How a text is decoded: the served sampler, the verifier, what ends it, and where chance comes from.

    `stop` is called after every round, for stop strings and the like (`stop_before`). A round may add several
    tokens, so it must find the first place to stop instead of reading the end alone. A `constraint` masks the target's
    logits before the sampler; a draft under the same constraint (`Constrained`) is accepted more often.
    """

    sampler: Sampler = GREEDY
    verifier: str = "greedy"
    ends: Collection[int] = ()
    random: Random = lambda: 0.0
    stop: Stop | None = None
    constraint: Constraint | None = None

    @property
    def by_argmax(self) -> bool:
        """Whether the target's largest logit alone decides, so that no distribution is computed."""
        return self.sampler.temperature == 0 and self.sampler.repetition_penalty == 1 and self.verifier == "greedy"


def rules_of_pair(pair: LoadedPair, sampler: Sampler = GREEDY, draws: Random = Rules.random) -> Rules:
    """How a pair's target writes texts: every text ends where the target ends it."""
    verifier = "token" if sampler.temperature else "greedy"
    return Rules(sampler, verifier, pair.ends, draws, stop_before(pair.token_bytes, pair.text_ends))


# ── A model under a grammar, and a drafter that proposes forced tokens for free ──
# The mask is applied to the logits, before the sampler: target and draft both sample from the sampler's distribution
# over the allowed tokens.

RUN = 64  # forced tokens of a round at most: as many as every backend takes in one call


class Constrained:
    """A model of one row under a constraint: its logits are −∞ where the grammar allows no token, all else is its own.

    Call `Constraint.begin` before the first tokens of a text, which are its prompt.
    """

    def __init__(self, model: Model, constraint: Constraint) -> None:
        self._inner, self.constraint = model, constraint
        # After each committed token; None inside the prompt, of which the model may hold the beginning.
        self._states: list[State | None] = [None] * model.lengths[0]
        self._nodes: list[State] = []  # after each node of the pending tree

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def extend(
        self, tokens: Ints, counts: Ints | None = None, parents: Ints | None = None, want: Ints | None = None
    ) -> TorchLogits:
        """Logits [n, V] as the model's `extend`, −∞ where the grammar allows no token; the same errors."""
        depth, start = self._inner.lengths[0], self.constraint.start
        logits = self._inner.extend(tokens, counts, parents, want)
        # Tokens that the model held before this text are part of its prompt.
        self._states += [None] * (depth - len(self._states))
        last = (self._states[depth - 1] if depth >= start else None) or self.constraint.root
        states: list[State | None] = []
        for number, token in enumerate(tokens):
            if parents is not None:
                above = last if parents[number] == ROOT else self._nodes[parents[number]]
                self._nodes.append(self.constraint.next(above, token))
                states.append(self._nodes[-1])
            elif depth + number < start - 1:  # inside the prompt everything is allowed
                states.append(None)
            else:
                last = self.constraint.next(last, token) if depth + number >= start else last
                states.append(last)
        if parents is None:
            self._states += states
        wanted = states if want is None else [states[index] for index in want]
        values, place = logits.full(), logits.place
        masked = {row: state for row, state in enumerate(wanted) if state is not None}
        if masked:
            values[list(masked)] = self.constraint.masked(values[list(masked)], list(masked.values()))
        return TorchLogits(values, lambda row: f"{'a model' if place is None else place(row)}, under the grammar")

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """See `Model`."""
        self._inner.keep(paths)
        self._states += [self._nodes[node] for node in paths[0]]
        self._nodes = []

    def rollback(self, lengths: Sequence[int]) -> None:
        """See `Model`."""
        self._inner.rollback(lengths)
        del self._states[lengths[0] :]
        self._nodes = []


class Forced:
    """A drafter that proposes the tokens that the grammar forces, and another drafter's tokens in between.

    Forced tokens come before the other's proposal and, for a chain, after it; they do not count in its length. Their
    distribution is 1 at the token, for the target too, so every verifier accepts them.
    """

    def __init__(self, drafter: Drafter, constraint: Constraint) -> None:
        self.drafter, self.constraint = drafter, constraint
        self.tree = drafter.tree
        self._before = 0  # forced tokens before the other drafter's proposal
        self._asked: Proposal | None = None  # None if not asked this round

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
        return _joined(forced, asked, later).after(asked.reading)

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
                return Proposal.chain(proposal.tokens[:count])
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
