"""Many texts at once: one call of a model serves all rows, and each row gets the text that it would get alone.

`decode_batch` is the loop of `decode.py`, with a list of rows instead of one. `refill` samples many texts without
drafts, each with random numbers of its own; new ones begin as finished texts make room. Legend: B prompts, R rows of a
model, γ drafted tokens of a round, N distributions of a call (row by row, in the order of the rows), V vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from distill.data.samples import Reply, Request
from distill.decoding.decode import Decoded, Round, add_tokens
from distill.decoding.drafters import NONE, ChainDraft, distribution_sampler, largest_logit_decides
from distill.decoding.lengths import Fixed, LengthRule, NGramIndex, Proposal
from distill.decoding.rules import Rules, Stop
from distill.decoding.verify import Random, draw_chain, draw_token, unchecked_transform, verify_greedy
from distill.devices import CPU, float64_device
from distill.engines.model import Model
from distill.engines.torch.model import TorchLogits, send
from distill.sampler import Logits, Sampler, place_from

CHUNK = 256  # tokens of a prompt that one call reads
CACHED = 2**20  # logits of rows that a processor shapes at once: its caches hold these and what is made of them


@dataclass
class _Row:
    """One text of the batch, with its own random numbers, length rule and index, and its proposal of this round."""

    number: int
    context: list[int]
    random: Random
    rule: LengthRule
    result: Decoded = field(default_factory=Decoded)
    ended: bool = False
    proposal: Proposal = field(default_factory=lambda: Proposal.chain([]))
    index: NGramIndex = field(default_factory=NGramIndex)

    def add(self, new: list[int], accepted: int, rules: Rules) -> None:
        """Add a round's new tokens, of which `accepted` come from the draft, up to where the text ends."""
        _, self.ended = add_tokens(self.result, new, accepted, rules)
        self.context += new


def decode_batch(
    target: Model,
    draft: Model,
    prompts: Sequence[Sequence[int]],
    limit: int,
    rules: Rules,
    length: int | Callable[[], LengthRule],
    randoms: Sequence[Random] | None = None,
    argmax: bool = False,
) -> list[Decoded]:
    """Speculative decoding of B prompts at once from cold caches, each as `decode` with a ModelDrafter would alone.

    All rows go through a round together: drafts grow in step, one target call verifies them all, and each row keeps
    its accepted tokens; a row that has ended takes no part. `length` is γ, or makes a length rule for each row. Row b
    draws from randoms[b] (draft and verifier, in the order of `decode`) instead of `rules.random`; they may be left out
    at temperature 0. `argmax` drafts the best tokens at any temperature.

    The seconds of a round, and of the prefill, are those of the whole batch, the same in each row that took part. Each
    row's `seconds` run until that row ended, so the largest of them is the time of the batch.
    """
    new_rule = length if callable(length) else lambda: Fixed(length)
    argmax = argmax or rules.sampler.temperature == 0
    assert rules.constraint is None, "a grammar constrains one text at a time"
    if randoms is None and rules.sampler.temperature == 0:
        randoms = [rules.random] * len(prompts)
    assert randoms is not None, "each prompt needs random numbers of its own"
    for model in (target, draft):
        model.rollback([0] * model.rows)
    rows = [
        _Row(number, list(prompt), random, new_rule())
        for number, (prompt, random) in enumerate(zip(prompts, randoms, strict=True))
    ]
    _prefill(rows, rules, target, draft)
    capacity = min(target.capacity, draft.capacity)
    while True:
        depths = target.lengths
        open_rows = (row for row in rows if not row.ended and len(row.result.tokens) < limit)
        live = [row for row in open_rows if depths[row.number] < target.capacity]
        if not live:
            return [row.result for row in rows]
        round_started = time.perf_counter()
        # No more than can still be used: the round emits one token beyond those accepted.
        limits = {row.number: min(limit - len(row.result.tokens), capacity - depths[row.number]) - 1 for row in live}
        _draft(draft, live, limits, rules, argmax)
        verdicts = _verify(target, live, rules)
        for row, (accepted, token) in zip(live, verdicts, strict=True):
            row.add([*row.proposal.tokens[:accepted], token], accepted, rules)
        # Forget the rejected tokens; the last drafted token was never read.
        _rollback(draft, {row.number: len(row.context) - 1 for row in live})
        seconds = time.perf_counter() - round_started
        for row, (accepted, _) in zip(live, verdicts, strict=True):
            drafted = len(row.proposal.tokens)
            row.rule.observe(drafted, accepted, row.proposal.features, seconds)
            row.result.seconds += seconds
            row.result.rounds.append(Round(depths[row.number], drafted, accepted, seconds))


def extend_rows(model: Model, parts: Mapping[int, Sequence[int]], last: Collection[int] | None = None) -> Logits:
    """Extend each row by its own tokens (rows in ascending order) in one call.

    Returns the logits after the last token of each row in `last`; without `last`, those after every token.
    """
    counts = [len(parts.get(row, ())) for row in range(model.rows)]
    tokens = [token for part in parts.values() for token in part]
    ends = accumulate(len(part) for part in parts.values())
    want = None if last is None else [end - 1 for row, end in zip(parts, ends, strict=True) if row in last]
    # With one row, counts are left out: llama.cpp's short steps skip the bookkeeping then.
    return model.extend(tokens, counts if model.rows > 1 else None, want=want)


def read_together(model: Model, texts: Mapping[int, Sequence[int]]) -> Logits:
    """Read each row's text (rows in ascending order) in chunks that all end in the last one; the logits after it.

    With chunks, masks stay small.
    """
    for left in range(-(-max(map(len, texts.values())) // CHUNK) - 1, -1, -1):
        pieces = {
            row: text[max(0, len(text) - (left + 1) * CHUNK) : max(0, len(text) - left * CHUNK)]
            for row, text in texts.items()
        }
        part = {row: piece for row, piece in pieces.items() if len(piece)}
        logits = extend_rows(model, part, () if left else part)
    return logits


def _prefill(rows: Sequence[_Row], rules: Rules, target: Model, draft: Model) -> None:
    """Read the prompts, time that, and add the first new token of each row."""
    started = time.perf_counter()
    firsts = _next_tokens(read_together(target, {row.number: row.context for row in rows}), rows, rules)
    # The first step reads the last token of a prompt. A draft without room after a prompt does not read it at all.
    prompts = {row.number: row.context[:-1] for row in rows if 1 < len(row.context) < draft.capacity}
    if prompts:
        read_together(draft, prompts)
    seconds = time.perf_counter() - started
    for row, first in zip(rows, firsts, strict=True):
        row.result.prefill_seconds = seconds
        row.add([first], 0, rules)


def _rollback(model: Model, lengths: Mapping[int, int]) -> None:
    """Forget the tokens of rows beyond `lengths`; rows that hold fewer, or are not named, stay as they are."""
    model.rollback([min(held, lengths.get(row, held)) for row, held in enumerate(model.lengths)])


def _next_tokens(logits: Logits, live: Sequence[_Row], rules: Rules) -> list[int]:
    """The target's own next token of each row, from logits [B, V]."""
    if rules.by_argmax:
        return logits.argmax()
    distributions = rules.sampler.distributions(logits, [row.context for row in live])
    return [draw_token(distribution, row.random) for distribution, row in zip(distributions, live, strict=True)]


def _draft(draft: Model, live: Sequence[_Row], limits: Mapping[int, int], rules: Rules, argmax: bool) -> None:
    """Draft for every row, one position of all rows a step; a row that has stopped takes no more tokens."""
    read = draft.lengths
    by_argmax = largest_logit_decides(argmax, rules.sampler, [row.rule for row in live])
    if not by_argmax:
        for row in live:
            row.index.read(row.context)
    chains = {row.number: ChainDraft(row.rule, row.random, argmax, limits[row.number], rules.ends) for row in live}
    drafting = list(live)
    while drafting := [row for row in drafting if chains[row.number].goes_on()]:
        fresh = {row.number: chains[row.number].unread(row.context, read[row.number]) for row in drafting}
        logits = extend_rows(draft, fresh, fresh)
        if by_argmax:
            for row, token in zip(drafting, logits.argmax(NONE), strict=True):
                chains[row.number].add(token)
        else:
            histories = [[*row.context, *chains[row.number].tokens] for row in drafting]
            distributions = distribution_sampler(rules.sampler).distributions(logits, histories, empty=True)
            for row, distribution in zip(drafting, distributions, strict=True):
                chains[row.number].add_from(distribution, row.index, row.context)
    for row in live:
        row.proposal = chains[row.number].proposal()


def _verify(target: Model, live: Sequence[_Row], rules: Rules) -> list[tuple[int, int]]:
    """One target call over all rows' last tokens and drafts: how many each row accepts, and the token after them.

    The target is left with everything committed but those tokens.
    """
    depths = target.lengths
    logits = extend_rows(target, {row.number: [row.context[-1], *row.proposal.tokens] for row in live})
    ends = list(accumulate(len(row.proposal.tokens) + 1 for row in live))
    places = [slice(end - len(row.proposal.tokens) - 1, end) for row, end in zip(live, ends, strict=True)]
    verdicts: list[tuple[int, int]] = []
    if rules.by_argmax:
        choices = logits.argmax()
        for row, place in zip(live, places, strict=True):
            accepted = verify_greedy(choices[place], row.proposal.tokens)
            verdicts.append((accepted, choices[place][accepted]))
    else:
        histories = None
        if rules.sampler.repetition_penalty != 1:
            histories = [history for row in live for history in row.proposal.histories(row.context)]
        distributions = rules.sampler.distributions(logits, histories)  # [N, V]
        for row, place in zip(live, places, strict=True):
            verdicts.append(draw_chain(rules.verifier, distributions[place], row.proposal, row.random))
    lengths = {row.number: depths[row.number] + 1 + count for row, (count, _) in zip(live, verdicts, strict=True)}
    _rollback(target, lengths)
    return verdicts


# ── Sampling many prompts without drafts ──


def uniform_numbers(seed: int, count: int) -> torch.Tensor:
    """The first `count` uniform numbers [count], fp64, that a text with this seed is drawn with, one for each token."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass
class _Writing:
    """A text that is being written, with a random number for each of its tokens."""

    request: Request
    numbers: list[float]
    tokens: list[int] = field(default_factory=list)
    stopped: Reply | None = None

    def add(self, token: int, ends: Collection[int], stop: Stop | None) -> None:
        """Add a token; `stopped` is the reply where the text is over."""
        seen = len(self.tokens)
        self.tokens.append(token)
        if token in ends:
            self.stopped = Reply(self.request.id, self.tokens, True)
            return
        if stop is not None and (found := stop(self.tokens, seen)).ended:
            self.stopped = Reply(self.request.id, self.tokens[: found.kept], True)
        elif len(self.tokens) >= self.request.limit:
            self.stopped = Reply(self.request.id, self.tokens, False)


def refill(
    model: Model,
    waiting: deque[Request],
    sampler: Sampler,
    ends: Collection[int],
    vocabulary: int | None = None,
    stop: Stop | None = None,
) -> Iterator[Reply]:
    """Continue every request that waits, R at a time, and yield each reply when its text ends.

    A text that ends keeps its end token as the last. Its draws depend on the request's seed and on its own
    distributions alone; the other rows affect it only through rounding, and the order of requests decides which those
    are. The caller may append to `waiting` between replies. Ids from `vocabulary` on are padding and never drawn.
    ValueError for a request that the model's context cannot hold.
    """
    rows: list[_Writing | None] = [None] * model.rows
    while True:
        fresh = []
        for place, row in enumerate(rows):
            if row is None and waiting:
                rows[place] = _seated(model, waiting.popleft())
                fresh.append(place)
        reading = fresh or [place for place, row in enumerate(rows) if row is not None]
        if not reading:
            return
        live = [row for place in reading if (row := rows[place]) is not None]
        if fresh:
            model.rollback([0 if place in fresh else length for place, length in enumerate(model.lengths)])
            logits = read_together(model, {place: row.request.ids for place, row in zip(reading, live, strict=True)})
        else:
            last = {place: row.tokens[-1:] for place, row in zip(reading, live, strict=True)}
            logits = extend_rows(model, last, last)
        for row, token in zip(live, _drawn(logits, live, sampler, vocabulary), strict=True):
            row.add(token, ends, stop)
        for place, row in zip(reading, live, strict=True):
            if row.stopped is not None:
                rows[place] = None
                yield row.stopped


def _seated(model: Model, request: Request) -> _Writing:
    # The last token is never read.
    if not request.ids or request.limit < 1 or len(request.ids) + request.limit - 1 > model.capacity:
        raise ValueError(
            f"{len(request.ids)} tokens of a prompt and {request.limit} more do not fit a context of {model.capacity}"
        )
    return _Writing(request, uniform_numbers(request.seed, request.limit).tolist())


@torch.inference_mode()
def _drawn(logits: Logits, rows: Sequence[_Writing], sampler: Sampler, vocabulary: int | None) -> list[int]:
    """The next token of each row, from logits [N, V]."""
    values: Tensor = (logits.values if isinstance(logits, TorchLogits) else logits.full())[:, :vocabulary]
    histories = [row.request.ids + row.tokens for row in rows] if sampler.repetition_penalty != 1 else None
    numbers = send([row.numbers[len(row.tokens)] for row in rows], float64_device(values.device), torch.float64)
    size = max(1, CACHED // values.shape[-1]) if values.device.type == CPU else len(rows)
    tokens: list[int] = []
    for start in range(0, len(values), size):
        part = slice(start, start + size)
        place = place_from(logits.place, start)
        probabilities = sampler.probabilities(values[part], histories and histories[part], place)
        tokens += unchecked_transform(probabilities, numbers[part]).tolist()
    return tokens
