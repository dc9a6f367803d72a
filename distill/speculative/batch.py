"""Many texts at once: one call of a model serves all rows, and each row's text is the one it would have alone.

Both loops are those of `decode.py`, with a list of rows in the place of one. Legend: B prompts, γ drafted tokens of a
round, N distributions of a call (row by row, in the order of the rows), V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count

import torch
from torch import Tensor

from distill.errors import DataError
from distill.models.base import Logits, Model
from distill.speculative.decode import Decoded, Round, Rules, require_lossless, take, verify_greedy
from distill.speculative.draft import ModelDrafter, distribution_sampler, features_after
from distill.speculative.lengths import Fixed, LengthRule
from distill.speculative.n_grams import LONGEST, Earlier
from distill.speculative.proposal import Features
from distill.speculative.verify import CHAINS, Random, draw, draw_token

PIECE = 256  # tokens of a prompt that one call reads


@dataclass
class _Row:
    """One text on its way, with its own random numbers and length rule, and what is drafted for it this round."""

    number: int
    context: list[int]
    random: Random
    rule: LengthRule
    result: Decoded = field(default_factory=Decoded)
    ended: bool = False
    drafted: list[int] = field(default_factory=list)
    distributions: list[Tensor] = field(default_factory=list)  # [V] each; none where tokens are chosen without chance
    seen: list[Features] = field(default_factory=list)
    earlier: Earlier = field(default_factory=Earlier)

    def say(self, new: list[int], accepted: int, rules: Rules) -> None:
        """Take a round's new tokens, of which `accepted` come from the draft, up to where the text ends."""
        _, self.ended = take(self.result, new, accepted, rules)
        self.context += new


def plain_batch(
    target: Model, prompts: Sequence[Sequence[int]], limit: int, rules: Rules, randoms: Sequence[Random] | None = None
) -> list[Decoded]:
    """Plain decoding of B prompts at once from a cold cache, each as `plain` would decode it alone.

    Row b draws from randoms[b], in place of `rules.random`; they may be left out at temperature 0. Each row's `seconds`
    run until that row ended, whoever shared them, so that the batch took the largest. ValueError for more prompts than
    rows, an empty prompt, or chance without random numbers for each row.
    """
    rows = _rows(target, prompts, rules, randoms, lambda: Fixed(0))
    if not rows:
        return []
    target.rollback([0] * target.rows)
    started = time.perf_counter()
    firsts = _prefill(target, rows, rules)
    prefilled = time.perf_counter()
    for row in rows:
        row.result.prefill_seconds = prefilled - started
        row.say([firsts[row.number]], 0, rules)
    while live := _unfinished(rows, target, limit):
        tokens = _choose(_extend(target, {row.number: row.context[-1:] for row in live}), live, rules)
        seconds = time.perf_counter() - prefilled
        for row, token in zip(live, tokens, strict=True):
            row.say([token], 0, rules)
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

    Rows advance by rounds together: drafts grow in step, one target call verifies them all, each row keeps what it
    accepts; a row that has ended takes no part. `length` is γ, or makes a length rule for each row. Row b draws from
    randoms[b] (draft and verifier, in the order of `decode`), in place of `rules.random`; they may be left out at
    temperature 0. `argmax` drafts the best tokens at any temperature.

    A round's seconds are those of the whole batch, the same in each row that took part, and so are the prefill's: each
    row's `seconds` run until that row ended, and the batch took the largest. DataError for a verifier and rule that
    would change the target's distribution, or a rule that drops drawn tokens; ValueError for more prompts than rows, an
    empty prompt, or chance without random numbers for each row.
    """
    new_rule = length if callable(length) else lambda: Fixed(length)
    drafter = ModelDrafter(draft, new_rule(), rules.sampler, rules.random, argmax)
    require_lossless(drafter, rules)
    if drafter.kind == "cut":
        raise DataError("a length rule that drops drawn tokens is not offered in batches", "decide before the draw")
    rows = _rows(target, prompts, rules, randoms, new_rule)
    if len(rows) > draft.rows:
        raise ValueError(f"{len(rows)} prompts for a draft of {draft.rows} rows")
    if not rows:
        return []
    target.rollback([0] * target.rows)
    draft.rollback([0] * draft.rows)
    started = time.perf_counter()
    firsts = _prefill(target, rows, rules)
    # The last token of a prompt goes in with the first step; a draft without room behind a prompt need not read it.
    for _ in _read(draft, {row.number: row.context[:-1] for row in rows if len(row.context) < draft.capacity}):
        pass
    prefill_seconds = time.perf_counter() - started
    for row in rows:
        row.result.prefill_seconds = prefill_seconds
        row.say([firsts[row.number]], 0, rules)
    while live := _unfinished(rows, target, limit):
        round_started = time.perf_counter()
        depths = target.lengths
        # No more than can still be used: the round emits one token beyond those accepted.
        most = {}
        for row in live:
            room = min(target.capacity, draft.capacity) - depths[row.number]
            most[row.number] = min(limit - len(row.result.tokens), room) - 1
        _draft(draft, live, most, rules, drafter.argmax)
        verdicts = _verify(target, live, rules)
        for row, (accepted, token) in zip(live, verdicts, strict=True):
            row.say([*row.drafted[:accepted], token], accepted, rules)
        # Forget what did not stand; the last drafted token was never read.
        _rollback(draft, {row.number: len(row.context) - 1 for row in live})
        seconds = time.perf_counter() - round_started
        for row, (accepted, _) in zip(live, verdicts, strict=True):
            row.rule.observe(len(row.drafted), accepted, row.seen, seconds)
            row.result.seconds += seconds
            row.result.rounds.append(Round(depths[row.number], len(row.drafted), accepted, seconds))
    return [row.result for row in rows]


def _rows(
    target: Model,
    prompts: Sequence[Sequence[int]],
    rules: Rules,
    randoms: Sequence[Random] | None,
    new_rule: Callable[[], LengthRule],
) -> list[_Row]:
    """A row for each prompt."""
    if rules.constraint is not None:
        raise DataError("a grammar follows one text at a time, not a batch", "decode these texts one by one")
    if len(prompts) > target.rows:
        raise ValueError(f"{len(prompts)} prompts for a target of {target.rows} rows")
    if empty := [number for number, prompt in enumerate(prompts) if not len(prompt)]:
        raise ValueError(f"prompt {empty[0]} is empty")
    if randoms is None and rules.sampler.temperature == 0:
        randoms = [rules.random] * len(prompts)
    if randoms is None or len(randoms) != len(prompts):
        given = "none" if randoms is None else f"{len(randoms)}"
        raise ValueError(f"{len(prompts)} prompts need random numbers of their own each, got {given}")
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


def _extend(model: Model, pieces: Mapping[int, Sequence[int]], last: Collection[int] | None = None) -> Logits:
    """Each row's own tokens (rows in ascending order) in one call; logits after the last of the rows in `last`.

    Without `last` they are those after every token.
    """
    counts = [len(pieces.get(row, ())) for row in range(model.rows)]
    tokens = [token for piece in pieces.values() for token in piece]
    ends = accumulate(len(piece) for piece in pieces.values())
    want = None if last is None else [end - 1 for row, end in zip(pieces, ends, strict=True) if row in last]
    return model.extend(tokens, counts, want=want)


def _read(model: Model, texts: Mapping[int, Sequence[int]]) -> Iterator[tuple[list[int], Logits]]:
    """Read each row's text piece by piece; the rows that end with a piece, and the logits after their last tokens.

    Pieces, so that short texts do not wait for long ones at their full length, and masks stay small.
    """
    for start in range(0, max(map(len, texts.values()), default=0), PIECE):
        pieces = {row: text[start : start + PIECE] for row, text in texts.items() if len(text) > start}
        ended = [row for row in pieces if len(texts[row]) <= start + PIECE]
        yield ended, _extend(model, pieces, ended)


def _prefill(target: Model, rows: Sequence[_Row], rules: Rules) -> dict[int, int]:
    """Read the prompts; the first new token of each row."""
    found: dict[int, int] = {}
    for ended, logits in _read(target, {row.number: row.context for row in rows}):
        if ended:
            found |= zip(ended, _choose(logits, [rows[number] for number in ended], rules), strict=True)
    return found


def _rollback(model: Model, lengths: Mapping[int, int]) -> None:
    """Forget what rows hold beyond `lengths`; rows that hold less, or are not named, stay as they are."""
    model.rollback([min(held, lengths.get(row, held)) for row, held in enumerate(model.lengths)])


def _choose(logits: Logits, live: Sequence[_Row], rules: Rules) -> list[int]:
    """The target's own next token of each row, from logits [B, V]."""
    if rules.by_argmax:
        return logits.argmax()
    distributions = rules.sampler.probabilities(logits.full(), [row.context for row in live])
    return [draw_token(distribution, row.random) for distribution, row in zip(distributions, live, strict=True)]


def _draft(draft: Model, live: Sequence[_Row], most: Mapping[int, int], rules: Rules, argmax: bool) -> None:
    """Draft for every row, one position of all rows a step; a row that has stopped takes no more tokens."""
    held = draft.lengths
    for row in live:
        row.drafted, row.distributions, row.seen = [], [], []
    limits = {row.number: min(most[row.number], row.rule.limit()) for row in live if most[row.number] > 0}
    drafting = [row for row in live if row.number in limits]
    # Nothing asks for the distribution: the largest logit is enough, and much faster to find.
    by_argmax = argmax and rules.sampler.repetition_penalty == 1 and all(type(row.rule) is Fixed for row in live)
    if not by_argmax:
        for row in drafting:
            row.earlier.read(row.context)
    for position in count():
        drafting = [row for row in drafting if position < limits[row.number] and row.rule.step_on(position)]
        if not drafting:
            break
        # What was not read yet (one token, or two after a fully accepted round) goes in first.
        fresh = {row.number: row.drafted[-1:] or row.context[held[row.number] :] for row in drafting}
        logits = _extend(draft, fresh, fresh)
        if by_argmax:
            for row, token in zip(drafting, logits.argmax(), strict=True):
                row.drafted.append(token)
        else:
            histories = [[*row.context, *row.drafted] for row in drafting]
            distributions = distribution_sampler(rules.sampler).probabilities(logits.full(), histories)
            drafting = [
                row
                for row, distribution in zip(drafting, distributions, strict=True)
                if _draft_token(row, distribution, position, argmax)
            ]
        drafting = [row for row in drafting if row.drafted[-1] not in rules.ends]
    if argmax and not by_argmax:
        for row in live:
            keep = row.rule.submit(row.seen)
            row.drafted, row.seen = row.drafted[:keep], row.seen[:keep]


def _draft_token(row: _Row, distribution: Tensor, position: int, argmax: bool) -> bool:
    """Draft a row's token from its distribution [V], unless the row's rule stops before the draw."""
    features = features_after(distribution, row.earlier, [*row.context[-LONGEST:], *row.drafted])
    if not row.rule.go_on(position, features):
        return False
    row.seen.append(features)
    row.drafted.append(int(distribution.argmax()) if argmax else draw_token(distribution, row.random))
    if not argmax:
        row.distributions.append(distribution)
    return True


def _verify(target: Model, live: Sequence[_Row], rules: Rules) -> list[tuple[int, int]]:
    """One target call over all rows' last tokens and drafts: how many stand in each row, and the token after them.

    The target is left with everything committed but those tokens.
    """
    depths = target.lengths
    logits = _extend(target, {row.number: [row.context[-1], *row.drafted] for row in live})
    ends = list(accumulate(len(row.drafted) + 1 for row in live))
    parts = [slice(end - len(row.drafted) - 1, end) for row, end in zip(live, ends, strict=True)]
    found: list[tuple[int, int]] = []
    if rules.by_argmax:
        choices = logits.argmax()
        for row, part in zip(live, parts, strict=True):
            accepted = verify_greedy(choices[part], row.drafted)
            found.append((accepted, choices[part][accepted]))
    else:
        histories = None
        if rules.sampler.repetition_penalty != 1:
            histories = [[*row.context, *row.drafted[:i]] for row in live for i in range(len(row.drafted) + 1)]
        distributions = rules.sampler.probabilities(logits.full(), histories)  # [N, V]
        for row, part in zip(live, parts, strict=True):
            p = distributions[part]
            q = torch.stack(row.distributions).to(p) if row.distributions else None
            drafted = p.new_tensor(row.drafted).long()
            found.append(draw(CHAINS[rules.verifier](p, q, drafted), row.random))
    _rollback(target, {row.number: depths[row.number] + 1 + got for row, (got, _) in zip(live, found, strict=True)})
    return found
