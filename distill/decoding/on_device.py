"""A round that stays on the device: the draft's chain, the target's step, the verdict, and one transfer of its result.

The host learns the drafted tokens, how many were accepted and the token after them together, at the round's end. A
length rule that reads the draft's distribution is asked after each of the draft's steps: one transfer for each.

Chance: at the beginning of a round, each row takes numbers from its own `random()`, whatever becomes of them: γ to draw
the drafted tokens with (none where they are the draft's best, or another drafter's), γ for their acceptance, and one
for the token after them, where γ is the most that this row may draft. Greedy rounds take none. Each position has
numbers of its own, independent of all else, so the output follows the target's distribution exactly as in rounds on the
host, which draw only what they need.

Legend: R rows, γ drafted tokens of a round, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distill.decoding import verify
from distill.decoding.drafters import (
    NONE,
    NOTHING,
    ChainDraft,
    Drafter,
    FallbackDrafter,
    ModelDrafter,
    NoDrafter,
    distribution_sampler,
)
from distill.decoding.lengths import Features, LengthRule, NGramIndex, Proposal, entropies
from distill.decoding.rules import Rules
from distill.devices import has_float64
from distill.engines.model import Model
from distill.engines.torch.model import TorchModel, fetch, model_name, send
from distill.errors import DataError
from distill.sampler import Place, Sampler, place_of, require_finite, shrunk

Stepped = TorchModel  # one whose `steps_on_device`
KNOWN = (*verify.CHAINS, "distinct")
UNDRAWN = 0.5  # in the place of numbers that nobody draws


@dataclass(frozen=True)
class RowRound:
    """What a round needs to know of one row: its text so far, its chain or another drafter's proposal, its chance.

    `index` has read the text where the chain's rule reads features.
    """

    number: int
    context: Sequence[int]
    random: verify.Random
    chain: ChainDraft | None = None
    proposed: Proposal | None = None
    index: NGramIndex | None = None

    @property
    def limit(self) -> int:
        """γ of this row: how many tokens are drafted at most."""
        if self.chain is not None:
            return self.chain.limit
        return 0 if self.proposed is None else len(self.proposed.tokens)


@dataclass(frozen=True)
class Drafted:
    """Chains on the device: tokens [R, γ] (NONE where there is none), what they were drawn from, largest logits.

    `read` are the tokens that each row of the draft has read before the first of them.
    """

    tokens: Tensor
    distributions: Tensor | None  # [R, γ, V]; None: each is 1 at its token
    largest: Tensor  # [R, γ]; 0 where there is no token
    read: Mapping[int, int]


class DeviceDraft:
    """A model that drafts for rows; `looks` where their length rules read its distributions, one transfer a token.

    With `argmax` its best tokens are taken; else they are drawn from its distribution after the `sampler`.
    """

    def __init__(self, model: Stepped, sampler: Sampler, argmax: bool, looks: bool, ends: Collection[int]) -> None:
        self.model, self.sampler, self.argmax, self.looks = model, sampler, argmax, looks
        self._ends = send(sorted(ends), model.device)

    def chains(self, rows: Sequence[RowRound], uniforms: Sequence[Sequence[float]]) -> Drafted | None:
        """A chain for each row, with the row's `uniforms` [R, ≥ γ]; None where no row drafts."""
        model = self.model
        drawing = {row.number: row for row in rows if row.chain is not None and row.chain.goes_on()}
        if not drawing:
            return None
        lengths, device = model.lengths, model.device
        unread = {r: row.chain.unread(row.context, lengths[r]) for r, row in drawing.items() if row.chain is not None}
        read = {r: lengths[r] + len(part) for r, part in unread.items()}
        wide, longest = max(map(len, unread.values())), max(row.limit for row in drawing.values())
        lines = []
        for r in range(model.rows):
            part, limit = unread.get(r, ()), drawing[r].limit if r in drawing else 0
            lines.append([*part, *[0] * (wide - len(part)), len(part), lengths[r], limit])
        sent = send(lines, device)  # [R, w + 3]
        counts, starts, limits = sent[:, wide], sent[:, wide + 1], sent[:, wide + 2]
        chances = None if self.argmax else send(uniforms, device, torch.float64)
        even = all(len(part) == wide for part in unread.values())
        bound = max(lengths) + wide + longest
        logits = model.step(sent[:, :wide], counts, starts, bound, 1 if even else 0)
        last = logits[:, -1] if even else _column(logits, (counts - 1).clamp(min=0))
        starts = starts + counts
        alive, one = torch.ones_like(counts, dtype=torch.bool), torch.ones_like(counts)
        tokens: list[Tensor] = []
        largest: list[Tensor] = []
        distributions: list[Tensor] = []
        while True:
            position = len(tokens)
            token, distribution, peak = self._chosen(last, None if chances is None else chances[:, position])
            alive = alive & (position < limits)
            if self.looks:
                drawing = self._asked(drawing, token, distribution, peak)
                alive = alive & send([r in drawing for r in range(model.rows)], device, torch.bool)
            tokens.append(token.masked_fill(~alive, NONE))
            largest.append(peak.masked_fill(~alive, 0))
            if distribution is not None and not self.argmax:
                distributions.append(distribution)
            alive = alive & (token >= 0) & ~(token[:, None] == self._ends).any(-1)
            if self.looks:
                drawing = {r: row for r, row in drawing.items() if row.chain is not None and row.chain.goes_on()}
                alive = alive & send([r in drawing for r in range(model.rows)], device, torch.bool)
            if len(tokens) == longest or not drawing:
                break
            last = model.step(tokens[-1].clamp(min=0)[:, None], one, starts, bound, 1)[:, -1]
            starts = starts + 1
        drawn_from = torch.stack(distributions, 1) if distributions else None
        return Drafted(torch.stack(tokens, 1), drawn_from, torch.stack(largest, 1), read)

    def _chosen(self, logits: Tensor, uniforms: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        """A token [R] of each row's logits [R, V], NONE where all are −∞; its distribution if asked; the largest."""
        if self.argmax and not self.looks:
            best = logits.argmax(-1)
            peak = logits.gather(-1, best[:, None])[:, 0].float()
            return best.masked_fill(peak == -math.inf, NONE), None, peak
        distribution, peak = self.sampler.unchecked(logits)
        token = distribution.argmax(-1) if uniforms is None else verify.unchecked_transform(distribution, uniforms)
        return token.masked_fill(peak == -math.inf, NONE), distribution, peak.float()

    def _asked(
        self, drawing: Mapping[int, RowRound], token: Tensor, distribution: Tensor | None, peak: Tensor
    ) -> dict[int, RowRound]:
        """The rows whose length rule takes this token, which was drawn, but is not shown to it."""
        assert distribution is not None
        two = distribution.topk(min(2, distribution.shape[-1])).values
        shown = fetch(token.int(), distribution.argmax(-1).int(), shrunk(peak), two, entropies(distribution))
        tokens, best, peaks, tops, entropy = (part.tolist() for part in shown)
        going_on = {}
        for r, row in drawing.items():
            assert row.chain is not None and row.index is not None
            place = place_of(model_name(self.model.model), [len(row.context) + len(row.chain.tokens)])
            require_finite([peaks[r]], place, empty=True)
            features = Features(tops[r][0], tops[r][1] if len(tops[r]) > 1 else 0.0, entropy[r])
            if row.chain.decides(features, best[r], row.index, row.context):
                row.chain.tokens.append(tokens[r])
                going_on[r] = row
        return going_on


def _column(logits: Tensor, columns: Tensor) -> Tensor:
    """Of logits [R, w, V], those of one column [R] in each row: [R, V]."""
    return logits.gather(1, columns[:, None, None].expand(-1, 1, logits.shape[-1]))[:, 0]


@dataclass(frozen=True)
class Outcome:
    """What became of one row: the proposal, how many of its tokens were accepted, and the token after them."""

    proposal: Proposal
    accepted: int
    token: int


class DeviceRounds:
    """The rounds of a text, or of the texts of a batch; `draft` is None where no model drafts on the device."""

    def __init__(self, target: Stepped, rules: Rules, draft: DeviceDraft | None) -> None:
        self.target, self.draft, self.sampler, self.by_argmax = target, draft, rules.sampler, rules.by_argmax
        # Without siblings, distinct and token are the same.
        self.verifier = verify.CHAINS["token" if rules.verifier == "distinct" else rules.verifier]

    @torch.inference_mode()
    def run(self, rows: Sequence[RowRound]) -> list[Outcome]:
        """One round of these rows.

        The target is left with everything committed but the tokens after the accepted ones. The draft is left with what
        it has read, of which the caller drops what was rejected.
        """
        longest = max(row.limit for row in rows)
        numbers = self._numbers(rows, longest)
        drafted = self._proposed(rows)
        if drafted is None and self.draft is not None and longest:
            drafted = self.draft.chains(rows, numbers)
        results = self._verified(rows, drafted, longest, numbers)
        if drafted is not None:
            results += [drafted.tokens.to(self.target.device).int(), shrunk(drafted.largest.to(self.target.device))]
        return self._concluded(rows, drafted, [part.tolist() for part in fetch(*results)])

    def _numbers(self, rows: Sequence[RowRound], longest: int) -> list[list[float]]:
        """Each row's numbers [R, 2γ + 1]: to draw tokens with, to accept them, to draw the next token."""
        numbers = [[UNDRAWN] * (2 * longest + 1) for _ in range(self.target.rows)]
        if self.by_argmax:
            return numbers
        for row in rows:
            own = numbers[row.number]
            if row.chain is not None and self.draft is not None and not self.draft.argmax:
                own[: row.limit] = [row.chain.random() for _ in range(row.limit)]
            own[longest : longest + row.limit] = [row.random() for _ in range(row.limit)]
            own[-1] = row.random()
        return numbers

    def _proposed(self, rows: Sequence[RowRound]) -> Drafted | None:
        """The chain of another drafter, which drafts for one text alone, sent to the device; None without one."""
        proposed = rows[0].proposed
        if proposed is None or not proposed.tokens:
            return None
        device, q = self.target.device, proposed.distributions
        tokens = send([proposed.tokens], device)
        distributions = None if q is None else q.to(device).unsqueeze(0)
        return Drafted(tokens, distributions, torch.zeros(tokens.shape, device=device), {})

    def _verified(
        self, rows: Sequence[RowRound], drafted: Drafted | None, longest: int, numbers: Sequence[Sequence[float]]
    ) -> list[Tensor]:
        """How many tokens each row accepts [R], the tokens after them [R], the target's largest logits [R, γ + 1]."""
        target, lengths = self.target, self.target.lengths
        device = target.device
        context = {row.number: row.context for row in rows}
        last = [[context[r][-1] if r in context else 0, lengths[r], int(r in context)] for r in range(target.rows)]
        sent = send(last, device)  # [R, 3]
        ids, starts, takes = sent[:, :1], sent[:, 1], sent[:, 2]
        tokens = ids[:, :0] if drafted is None else drafted.tokens.to(device)
        counts = takes * (1 + (tokens >= 0).sum(-1))
        ids = torch.cat([ids, tokens.clamp(min=0)], 1)
        columns = ids.shape[1]
        logits = target.step(ids, counts, starts, max(lengths) + columns)  # [R, γ + 1, V]
        read = torch.arange(columns, device=device) < counts[:, None]
        if self.by_argmax:
            choices = logits.argmax(-1)
            largest = logits.gather(-1, choices[..., None])[..., 0].float()
            accepted = (choices[:, :-1] == tokens).long().cumprod(-1).sum(-1)
            following = choices.gather(-1, accepted[:, None])[:, 0]
        else:
            p, largest = self.sampler.unchecked(logits)
            q = None if drafted is None or drafted.distributions is None else drafted.distributions.to(p)
            used = [[*line[longest : longest + columns - 1], line[-1]] for line in numbers]
            uniforms = send(used, device, torch.float64)
            accepted, following = verify.draw_rows(self.verifier(p, q, tokens), uniforms)
        return [accepted.to(torch.int8), following.int(), shrunk(largest.masked_fill(~read, 0))]

    def _concluded(self, rows: Sequence[RowRound], drafted: Drafted | None, results: Sequence[Any]) -> list[Outcome]:
        """The outcomes, from what the device gave; nothing is committed where a logit is not finite."""
        accepted, following, largest = results[:3]
        tokens, peaks = results[3:] if drafted is not None else ([[]] * self.target.rows, [[]] * self.target.rows)
        lengths, outcomes = self.target.lengths, []
        read = {} if self.draft is None else dict(enumerate(self.draft.model.lengths))
        for row in rows:
            r, depth = row.number, lengths[row.number] + 1
            own = [token for token in tokens[r] if token != NONE]
            try:
                if self.draft is not None:
                    require_finite(peaks[r], _place(self.draft.model, depth), empty=True)
                require_finite(largest[r][: len(own) + 1], _place(self.target, depth))
            except DataError:
                self.target.commit(self.target.lengths)  # nothing of this round
                raise
            lengths[r] += 1 + accepted[r]
            if drafted is not None and r in drafted.read:
                read[r] = drafted.read[r] + max(len(own) - 1, 0)
            if row.chain is not None and self.draft is not None and self.draft.looks:
                proposal = row.chain.proposal()
            else:
                proposal = row.proposed or Proposal.chain(own)
            outcomes.append(Outcome(proposal, accepted[r], following[r]))
        self.target.commit(lengths)
        if self.draft is not None:
            self.draft.model.commit([read[r] for r in range(len(read))])
        return outcomes


def _place(model: Stepped, depth: int) -> Place:
    """The places of logits [γ] or [γ + 1] of a row, the first of them after `depth` tokens."""
    return lambda index: f"{model_name(model.model)} after {depth + index} tokens"


def rounds_on_device(
    target: Model, rules: Rules, draft: Model | None, argmax: bool = False, lengths: Sequence[LengthRule] = ()
) -> DeviceRounds | None:
    """The rounds of this target on its device, with a draft there or without one; None where the host takes part.

    That is for models on a CPU with a growing cache and those of other engines, under a grammar or a repetition
    penalty, which read the text, with n_min, and on a device without fp64. `lengths` are the draft's length rules;
    with `argmax` its best tokens are taken, else they are drawn.
    """
    models: list[Any] = [target] if draft is None else [target, draft]
    counted = any(rule.n_min > 1 for rule in lengths)  # on the host, before drafts are verified
    if counted or not driven(models, rules) or models[-1].rows != target.rows:
        return None
    if draft is None:
        return DeviceRounds(models[0], rules, None)
    looks = any(rule.reads_features for rule in lengths)
    own = distribution_sampler(rules.sampler)
    return DeviceRounds(models[0], rules, DeviceDraft(models[1], own, argmax, looks, rules.ends))


def driven(models: Sequence[Any], rules: Rules) -> bool:
    """Whether these models take steps of tokens that lie on a device, and nothing in the rules reads the text."""
    reads_text = rules.constraint is not None or rules.sampler.repetition_penalty != 1
    if reads_text or rules.verifier not in KNOWN:
        return False
    return all(getattr(model, "steps_on_device", False) and has_float64(model.device) for model in models)


def rounds_of_text(target: Model, drafter: Drafter, rules: Rules) -> DeviceRounds | None:
    """The rounds of this text on the target's device, the draft's part too where it is there; None on the host, which
    grows trees."""
    if isinstance(drafter, NoDrafter) and rules.by_argmax:
        return None  # the largest logit is read from the device as it is; a distribution would be copied whole
    own = drafter.second if isinstance(drafter, FallbackDrafter) else drafter
    chains = None
    if type(own) is ModelDrafter:
        chains = rounds_on_device(target, rules, own.model, own.argmax, [own.rule])
    return chains or (None if own.tree else rounds_on_device(target, rules, None))


def play(
    rounds: DeviceRounds, drafter: Drafter, rules: Rules, context: Sequence[int], limit: int
) -> tuple[Proposal, list[int], int]:
    """A round: the proposal, its accepted tokens, and the token after them. Chains of a drafter whose model is not
    driven on the device come from the host."""
    own, proposed, chain, index, reading = drafter, None, None, None, 0.0
    if isinstance(drafter, FallbackDrafter):
        own = drafter.second
        found = drafter.look_up(context, limit, rules.ends) if limit > 0 else NOTHING
        proposed = found if found.tokens else None
    if proposed is None and (limit := min(limit, own.room(len(context)))) > 0:
        if rounds.draft is None:
            proposed = own.propose(context, limit, rules.ends)
        else:
            assert isinstance(own, ModelDrafter)
            index, rounds.draft.looks = own.index, own.rule.reads_features
            if rounds.draft.looks:
                index.read(context)
            chain = ChainDraft(own.rule, own.random, own.argmax, limit, rules.ends)
            own.rule.behind(own.unread(context), limit)
            if own.unread(context) > 1 and chain.goes_on():
                reading = own.catch_up(context, together=2)
    outcome = rounds.run([RowRound(0, context, rules.random, chain, proposed, index)])[0]
    return outcome.proposal.after(reading), list(range(outcome.accepted)), outcome.token
