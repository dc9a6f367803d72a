"""The decoder: plain, and speculative with any drafter, verifier and sampler. Read `decode` from top to bottom.

A model needs `extend`, `rollback` and, for trees, `keep`. Legend: γ drafted tokens of a round, n nodes of a tree,
V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from distill.decoding.drafters import NOTHING, Drafter, NoDrafter
from distill.decoding.on_device import device_verifier
from distill.decoding.proposals import ROOT, Proposal
from distill.decoding.rules import Constrained, Rules
from distill.decoding.verify import CHAINS, TREES, draw_chain, draw_token, verify_greedy, walk, walk_greedy
from distill.engines.model import Model, resent
from distill.engines.torch.model import for_sampler
from distill.sampler import Logits, distributions_of, probabilities_of

FIRST_ROW = (0,)  # The logits of a lone token.
MOST_RESENT = 4  # If the target must recompute more tokens than this, the round drafts nothing.


class Round(NamedTuple):
    """One round: tokens in the target's context before it, drafted, accepted, and seconds."""

    depth: int
    drafted: int
    accepted: int
    seconds: float


@dataclass
class Decoded:
    """Tokens after a prompt, with the rounds that made them.

    An end token is the last of `tokens`. A text that a stop string ends keeps the whole tokens before that string.
    `rest` keeps the bytes of the next token before the string. The last tokens may still be removed while decoding
    goes on. `from_draft[i]` is true where token i was drafted and accepted. `prefill_seconds`
    (the prompt and the first token) and `seconds` (all later tokens) are apart, because speculation changes only the
    second. The clock stood at `prefilled` between them. If a draft reads the prompt later, when a round first wants it,
    `prefill_seconds` include that time, and `reading` is that time alone.
    """

    tokens: list[int] = field(default_factory=list)
    from_draft: list[bool] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    prefill_seconds: float = 0.0
    prefilled: float = 0.0
    reading: float = 0.0
    seconds: float = 0.0
    rest: bytes = b""

    def tokens_per_second(self) -> float:
        """Speed after the first token."""
        return max(len(self.tokens) - 1, 0) / self.seconds if self.seconds else 0.0


def room_for(target: Model, draft: Model, prompt: int, limit: int) -> int:
    """Number of new tokens that fit both contexts, at most `limit`."""
    return min(limit, target.capacity - prompt, draft.capacity - prompt)


def constrained(target: Model, prompt: Sequence[int], rules: Rules) -> Model:
    """The target at the start of a text, under the constraint if there is one."""
    if rules.constraint is None:
        return target
    rules.constraint.begin(len(prompt), target.vocabulary_size)
    under_grammar: Any = Constrained(target, rules.constraint)
    return under_grammar


def next_token(logits: Logits, history: Sequence[int], rules: Rules) -> int:
    """The target's own next token from logits [1, V]."""
    if rules.by_argmax:
        return logits.argmax()[0]
    return draw_token(distributions_of(rules.sampler, logits, [history])[0], rules.random)


def add_tokens(result: Decoded, new: Sequence[int], accepted: int, rules: Rules) -> tuple[int, bool]:
    """Add a round's new tokens, of which `accepted` come from the draft, up to where the text ends.

    Returns the number of tokens that no stop string can remove any more, and whether the text ends.
    """
    before = len(result.tokens)
    count = next((i + 1 for i, token in enumerate(new) if token in rules.ends), None)
    result.tokens += new[:count]
    result.from_draft += [i < accepted for i in range(len(result.tokens) - before)]
    if rules.stop is not None:
        stopped = rules.stop(result.tokens, before)
        if stopped.ended:
            del result.tokens[stopped.kept :], result.from_draft[stopped.kept :]
            result.rest = stopped.rest
        if stopped.ended or count is None:
            return stopped.kept, stopped.ended
    return len(result.tokens), count is not None


def plain(
    target: Model, prompt: Sequence[int], limit: int, ends: Collection[int] = (), rules: Rules | None = None
) -> Decoded:
    """Plain decoding, one token a step, from a cold cache; up to `limit` tokens, the end token included.

    Without `rules` it is greedy and stops at `ends`.
    """
    return decode_text(target, NoDrafter(), prompt, limit, rules or Rules(ends=ends))


def decode(
    target: Model, drafter: Drafter, prompt: Sequence[int], limit: int, rules: Rules, result: Decoded, held: int = 0
) -> Iterator[list[int]]:
    """Decode into `result` by rounds: propose, verify, add the tokens, learn. Yields the tokens that became certain.

    Tokens that may begin a stop string wait for later rounds. All yielded tokens together are `result.tokens`. Caches
    are cold, except that the target holds the first `held` tokens of the prompt. A drafter without room after the
    context proposes nothing.
    If the verifier goes with the drafter (`verify.refusal`), the output follows the target's distribution under the
    sampler exactly. Greedily it is the target's own text, up to rounding between batches of one and of several tokens.
    """
    target = constrained(target, prompt, rules)
    target.rollback([held])
    started = time.perf_counter()
    first = next_token(target.extend(prompt[held:], want=[len(prompt) - held - 1]), prompt, rules)
    drafter.begin(prompt)
    result.prefilled = time.perf_counter()
    result.prefill_seconds = result.prefilled - started
    context = [*prompt, first]
    certain, ended = add_tokens(result, [first], 0, rules)
    on_device = device_verifier(target, drafter, rules)
    verify = partial(verify_proposal, target, rules) if on_device is None else on_device.verify
    yielded = 0
    while len(result.tokens) < limit and not ended and target.lengths[0] < target.capacity:
        yield result.tokens[yielded:certain]
        yielded = certain
        round_started = time.perf_counter()
        depth = target.lengths[0]
        # No more than can still be used: the round emits one token beyond those accepted.
        room = min(limit - len(result.tokens) - 1, target.capacity - depth - 1, drafter.room(depth + 1))
        room = 0 if resent(target) > MOST_RESENT else room
        proposal = drafter.propose(context, room, rules.ends) if room > 0 else NOTHING
        proposal, accepted, token = verify(context, proposal)
        new = [*(proposal.tokens[node] for node in accepted), token]
        certain, ended = add_tokens(result, new, len(accepted), rules)
        context += new
        result.reading += proposal.reading
        result.prefill_seconds += proposal.reading
        round_started += proposal.reading
        seconds = time.perf_counter() - round_started
        drafter.accepted(proposal, len(accepted), len(context), seconds)
        seconds = time.perf_counter() - round_started
        result.seconds += seconds
        if not isinstance(drafter, NoDrafter):
            result.rounds.append(Round(depth, len(proposal.tokens), len(accepted), seconds))
    yield result.tokens[yielded:]


def verify_proposal(
    target: Model, rules: Rules, context: Sequence[int], proposal: Proposal
) -> tuple[Proposal, list[int], int]:
    """One target step over the last token and the proposal: the proposal, its accepted nodes and the token after them.

    The target is left with everything committed but that token.
    """
    if not proposal.tokens and rules.by_argmax:  # with small models, what follows takes a thirtieth of a step
        return proposal, [], target.extend(context[-1:], want=FIRST_ROW).argmax()[0]
    tokens = [context[-1], *proposal.tokens]
    depth = target.lengths[0]
    # Without siblings, distinct and token are the same.
    verifier = "token" if rules.verifier == "distinct" else rules.verifier
    if proposal.is_chain and verifier in CHAINS:
        logits = target.extend(tokens)
        if rules.by_argmax:
            choices = logits.argmax()
            count = verify_greedy(choices, proposal.tokens)
            token = choices[count]
        else:
            p = _distributions(logits, context, proposal, rules)
            count, token = draw_chain(verifier, p, proposal, rules.random)
        if count < len(proposal.tokens):
            target.rollback([depth + 1 + count])
        return proposal, list(range(count)), token
    # The last token is node 0 of the pending tree, and the parent of the proposal's roots.
    logits = target.extend(tokens, parents=[ROOT, *(parent + 1 for parent in proposal.parents)])
    if rules.by_argmax:
        path, token = walk_greedy(logits.argmax(), proposal)
    else:
        path, token = walk(
            TREES[rules.verifier], _distributions(logits, context, proposal, rules), proposal, rules.random
        )
    target.keep([[0, *(node + 1 for node in path)]])
    return proposal, path, token


def _distributions(logits: Logits, context: Sequence[int], proposal: Proposal, rules: Rules) -> Tensor:
    """The target's distributions [n + 1, V] after the context and after each node, after the sampler."""
    histories = None if rules.sampler.repetition_penalty == 1 else proposal.histories(context)
    return probabilities_of(rules.sampler, for_sampler(logits), histories, logits.place)


def decode_text(target: Model, drafter: Drafter, prompt: Sequence[int], limit: int, rules: Rules) -> Decoded:
    """The whole text that `decode` makes."""
    result = Decoded()
    for _ in decode(target, drafter, prompt, limit, rules, result):
        pass
    return result
