"""The decoder: plain, and speculative with a chain of drafted tokens. Any two models with `extend` and `rollback` do.

Verification here is greedy: the target's argmax at every position, so the output is the target's own greedy text.
Legend: γ drafted tokens of a round.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from distill.models.base import Model


@dataclass(frozen=True)
class Round:
    """One round: tokens in the target's context before it, drafted, accepted, and seconds."""

    depth: int
    drafted: int
    accepted: int
    seconds: float


@dataclass
class Decoded:
    """Tokens after a prompt, with the rounds that made them.

    `from_draft[i]` tells whether token i was drafted and accepted. `prefill_seconds` (the prompt) and `seconds` (all
    later tokens) are apart, because speculation only touches the second. The first token belongs to the prefill.
    """

    tokens: list[int] = field(default_factory=list)
    from_draft: list[bool] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    prefill_seconds: float = 0.0
    seconds: float = 0.0

    def tokens_per_second(self) -> float:
        """Speed after the first token."""
        return (len(self.tokens) - 1) / self.seconds if self.seconds else 0.0


def verify_greedy(choices: Sequence[int], proposal: Sequence[int]) -> int:
    """How many proposed tokens stand, from the target's argmaxes [γ + 1] at each position."""
    for index, token in enumerate(proposal):
        if choices[index] != token:
            return index
    return len(proposal)


def room_for(target: Model, draft: Model, prompt: int, limit: int) -> int:
    """New tokens that both contexts leave room for, at most `limit`."""
    return min(limit, target.capacity - prompt, draft.capacity - prompt)


def plain(target: Model, prompt: Sequence[int], limit: int, ends: Collection[int] = ()) -> Decoded:
    """Greedy decoding, one token a step, from a cold cache; up to `limit` tokens, the end token included."""
    result = Decoded()
    target.rollback([0])
    started = time.perf_counter()
    token = target.extend(prompt, want=[len(prompt) - 1]).argmax()[0]
    prefilled = time.perf_counter()
    result.prefill_seconds = prefilled - started
    result.tokens.append(token)
    only = [0]
    while len(result.tokens) < limit and token not in ends and target.lengths[0] < target.capacity:
        token = target.extend([token], want=only).argmax()[0]
        result.tokens.append(token)
    result.seconds = time.perf_counter() - prefilled
    result.from_draft = [False] * len(result.tokens)
    return result


def propose(draft: Model, context: Sequence[int], count: int, ends: Collection[int] = ()) -> list[int]:
    """The draft's greedy continuation of `context`, of which it has committed some beginning; up to `count` tokens.

    An end token is the last one proposed: what follows it could never be used and must not count as drafted.

    What it has not seen yet (the last token, or two after a fully accepted round) goes in with the first step.
    """
    fresh = list(context[draft.lengths[0] :])
    proposal: list[int] = []
    for _ in range(count):
        proposal.append(draft.extend(fresh, want=[len(fresh) - 1]).argmax()[0])
        if proposal[-1] in ends:
            break
        fresh = proposal[-1:]
    return proposal


def speculative_rounds(
    target: Model, draft: Model, prompt: Sequence[int], limit: int, length: int, ends: Collection[int], result: Decoded
) -> Iterator[list[int]]:
    """Decode round by round into `result`, yielding each round's new tokens; see `speculative`."""
    target.rollback([0])
    draft.rollback([0])
    started = time.perf_counter()
    first = target.extend(prompt, want=[len(prompt) - 1]).argmax()[0]
    if len(prompt) > 1:
        draft.extend(prompt[:-1], want=[len(prompt) - 2])
    result.prefill_seconds = time.perf_counter() - started
    context = [*prompt, first]
    result.tokens.append(first)
    result.from_draft.append(False)
    yield [first]
    while len(result.tokens) < limit and result.tokens[-1] not in ends and target.lengths[0] < target.capacity:
        round_started = time.perf_counter()
        depth = target.lengths[0]
        # No more than can still be used: the round emits one token beyond those accepted.
        count = min(length, limit - len(result.tokens) - 1, target.capacity - depth - 1, draft.capacity - depth - 1)
        proposal = propose(draft, context, count, ends) if count > 0 else []
        choices = target.extend([context[-1], *proposal]).argmax()
        accepted = verify_greedy(choices, proposal)
        new = [*proposal[:accepted], choices[accepted]]
        stop = next((i + 1 for i, token in enumerate(new) if token in ends), len(new))
        context += new[:stop]
        result.tokens += new[:stop]
        result.from_draft += [i < accepted for i in range(stop)]
        target.rollback([depth + 1 + accepted])
        # The draft never saw its own last token; everything after the accepted ones goes.
        draft.rollback([min(draft.lengths[0], depth + 1 + accepted)])
        seconds = time.perf_counter() - round_started
        result.seconds += seconds
        result.rounds.append(Round(depth, len(proposal), accepted, seconds))
        yield new[:stop]


def speculative(
    target: Model, draft: Model, prompt: Sequence[int], limit: int, length: int, ends: Collection[int] = ()
) -> Decoded:
    """Greedy speculative decoding from cold caches with up to `length` drafted tokens a round.

    The tokens are those of `plain`, except where the target's two best logits lie within the rounding difference
    between batches of one and of several tokens.
    """
    result = Decoded()
    for _ in speculative_rounds(target, draft, prompt, limit, length, ends, result):
        pass
    return result
