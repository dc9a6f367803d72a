"""The chains of a draft, made on the device: one step a token, without the host where the length rule asks nothing.

Legend: R rows, γ drafted tokens of a round, w unread tokens of the draft, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distill.models.finite import place_of, require_finite
from distill.models.static.static_model import StaticTorchModel
from distill.models.static.transfers import fetch, send
from distill.models.torch_model import model_name
from distill.sampler import Sampler
from distill.speculative import verify
from distill.speculative.draft import NONE, ChainDraft
from distill.speculative.proposal import Features, NGramIndex, Proposal
from distill.speculative.trees.tree import entropies


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

    def __init__(
        self, model: StaticTorchModel, sampler: Sampler, argmax: bool, looks: bool, ends: Collection[int]
    ) -> None:
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
        shown = fetch(token, distribution.argmax(-1), peak, two, entropies(distribution))
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
