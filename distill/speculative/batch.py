"""Many texts at once: one call of a model serves all rows, and each row gets the text that it would get alone.

Both loops are those of `decode.py`, with a list of rows instead of one. Legend: B prompts, γ drafted tokens of a
round, N distributions of a call (row by row, in the order of the rows), V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from distill.models.base import Logits, Model
from distill.speculative.decode import Decoded, Round, add_tokens
from distill.speculative.draft import NONE, ChainDraft, ModelDrafter, distribution_sampler, largest_logit_decides
from distill.speculative.lengths import Fixed, LengthRule
from distill.speculative.on_device.device_round import DeviceRounds, RowRound, rounds_on_device
from distill.speculative.proposal import NGramIndex, Proposal
from distill.speculative.rules import Rules, require_lossless
from distill.speculative.verify import Random, draw_chain, draw_token, verify_greedy

CHUNK = 256  # tokens of a prompt that one call reads


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


def plain_batch(
    target: Model, prompts: Sequence[Sequence[int]], limit: int, rules: Rules, randoms: Sequence[Random] | None = None
) -> list[Decoded]:
    """Plain decoding of B prompts at once from a cold cache, each as `plain` would decode it alone.

    Row b draws from randoms[b] instead of `rules.random`; they may be left out at temperature 0. Each row's `seconds`
    run until that row ended, so the largest of them is the time of the batch.
    """
    rows = _rows([target], prompts, rules, randoms, lambda: Fixed(0))
    _prefill(rows, rules, target)
    prefilled = time.perf_counter()
    rounds = None if rules.by_argmax else rounds_on_device(target, rules, None)
    while live := _unfinished(rows, target, limit):
        if rounds is not None:
            played = rounds.run([RowRound(row.number, row.context[-1:], row.random) for row in live])
            tokens = [outcome.token for outcome in played]
        else:
            tokens = _next_tokens(extend_rows(target, {row.number: row.context[-1:] for row in live}), live, rules)
        seconds = time.perf_counter() - prefilled
        for row, token in zip(live, tokens, strict=True):
            row.add([token], 0, rules)
            row.result.seconds = seconds
    return [row.result for row in rows]


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
    row's `seconds` run until that row ended, so the largest of them is the time of the batch. DataError for a verifier
    and rule that would change the target's distribution.
    """
    new_rule = length if callable(length) else lambda: Fixed(length)
    drafter = ModelDrafter(draft, new_rule(), rules.sampler, rules.random, argmax)
    require_lossless(drafter, rules)
    rows = _rows([target, draft], prompts, rules, randoms, new_rule)
    _prefill(rows, rules, target, draft)
    rounds = rounds_on_device(target, rules, draft, drafter.argmax, [row.rule for row in rows])
    while live := _unfinished(rows, target, limit):
        round_started = time.perf_counter()
        depths = target.lengths
        limits = _draft_limits(target, draft, live, limit)
        if rounds is not None:
            verdicts = _play(rounds, live, limits, rules, drafter.argmax)
        else:
            _draft(draft, live, limits, rules, drafter.argmax)
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
    return [row.result for row in rows]


def _rows(
    models: Sequence[Model],
    prompts: Sequence[Sequence[int]],
    rules: Rules,
    randoms: Sequence[Random] | None,
    new_rule: Callable[[], LengthRule],
) -> list[_Row]:
    """A row for each prompt; the caches of the models are emptied."""
    assert rules.constraint is None, "a grammar constrains one text at a time"
    assert all(map(len, prompts)), "a prompt is empty"
    if randoms is None and rules.sampler.temperature == 0:
        randoms = [rules.random] * len(prompts)
    assert randoms is not None and len(randoms) == len(prompts), "each prompt needs random numbers of its own"
    for model in models:
        assert len(prompts) <= model.rows, f"{len(prompts)} prompts for a model of {model.rows} rows"
        model.rollback([0] * model.rows)
    return [
        _Row(number, list(prompt), random, new_rule())
        for number, (prompt, random) in enumerate(zip(prompts, randoms, strict=True))
    ]


def _unfinished(rows: Sequence[_Row], target: Model, limit: int) -> list[_Row]:
    lengths = target.lengths
    return [
        row
        for row in rows
        if not row.ended and len(row.result.tokens) < limit and lengths[row.number] < target.capacity
    ]


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


def _read(model: Model, texts: Mapping[int, Sequence[int]]) -> Iterator[tuple[list[int], Logits]]:
    """Read each row's text in chunks; yields the rows that end with a chunk, and the logits after their last tokens.

    With chunks short texts are not padded to the full length of long ones, and masks stay small.
    """
    for start in range(0, max(map(len, texts.values()), default=0), CHUNK):
        parts = {row: text[start : start + CHUNK] for row, text in texts.items() if len(text) > start}
        ended = [row for row in parts if len(texts[row]) <= start + CHUNK]
        yield ended, extend_rows(model, parts, ended)


def _prefill(rows: Sequence[_Row], rules: Rules, target: Model, draft: Model | None = None) -> None:
    """Read the prompts, time that, and add the first new token of each row."""
    firsts: dict[int, int] = {}
    started = time.perf_counter()
    for ended, logits in _read(target, {row.number: row.context for row in rows}):
        if ended:
            firsts |= zip(ended, _next_tokens(logits, [rows[number] for number in ended], rules), strict=True)
    if draft is not None:
        # The first step reads the last token of a prompt. A draft without room behind a prompt does not read it at all.
        for _ in _read(draft, {row.number: row.context[:-1] for row in rows if len(row.context) < draft.capacity}):
            pass
    seconds = time.perf_counter() - started
    for row in rows:
        row.result.prefill_seconds = seconds
        row.add([firsts[row.number]], 0, rules)


def _rollback(model: Model, lengths: Mapping[int, int]) -> None:
    """Forget the tokens of rows beyond `lengths`; rows that hold fewer, or are not named, stay as they are."""
    model.rollback([min(held, lengths.get(row, held)) for row, held in enumerate(model.lengths)])


def _next_tokens(logits: Logits, live: Sequence[_Row], rules: Rules) -> list[int]:
    """The target's own next token of each row, from logits [B, V]."""
    if rules.by_argmax:
        return logits.argmax()
    distributions = rules.sampler.distributions(logits, [row.context for row in live])
    return [draw_token(distribution, row.random) for distribution, row in zip(distributions, live, strict=True)]


def _draft_limits(target: Model, draft: Model, live: Sequence[_Row], limit: int) -> dict[int, int]:
    """How many drafted tokens each row can still use: the round emits one token beyond those accepted."""
    capacity, depths = min(target.capacity, draft.capacity), target.lengths
    return {row.number: min(limit - len(row.result.tokens), capacity - depths[row.number]) - 1 for row in live}


def _play(
    rounds: DeviceRounds, live: Sequence[_Row], limits: Mapping[int, int], rules: Rules, argmax: bool
) -> list[tuple[int, int]]:
    """`_draft` and `_verify` on the device."""
    rows = []
    for row in live:
        if rounds.draft is not None and rounds.draft.looks:
            row.index.read(row.context)
        chain = ChainDraft(row.rule, row.random, argmax, limits[row.number], rules.ends)
        rows.append(RowRound(row.number, row.context, row.random, chain, index=row.index))
    played = rounds.run(rows)
    for row, outcome in zip(live, played, strict=True):
        row.proposal = outcome.proposal
    return [(outcome.accepted, outcome.token) for outcome in played]


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
