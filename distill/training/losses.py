"""Losses over the outcomes of a position, with gradients in closed form. The oracle is distill/divergences.py.

Legend: r positions of a block, C columns of the draft's head, K stored entries, M outcomes, L losses.
z are the draft's logits [r, C]; p and q the distributions of target and draft over the outcomes [r, M].

If the target's distribution is whole, the outcomes are the columns. If a store has K entries and the mass of all other
tokens, the outcomes are the entries and one bucket, M = K + 1. The bucket's logit is logsumexp(z) over the columns
outside the entries. A loss has a gradient g with respect to the logits of the outcomes. At a stored column, dz = g.
At the other columns, dz is g_bucket times the softmax among them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_args

import torch
from torch import Tensor

from distill.devices import has_float64
from distill.divergences import LEAST_ACCEPTANCE, LK_DECAY
from distill.engines.torch.products import filled_count
from distill.recipe import Loss, Train
from distill.recipe.training import LossName, Protocol
from distill.teacher.distributions import EMPTY, LogitForm, Teacher, TeacherChunk

# distill/divergences.py has the formulas by the same names.
LOSSES: tuple[str, ...] = get_args(LossName)
STATISTICS = ("forward_kl", "cross_entropy", "acceptance", "agreement", "match")
PLAIN_LOGITS = LogitForm()


Term = tuple[Tensor, Callable[[], Tensor]]  # a loss [r], and its gradient [r, M], computed on demand


Mixture = Mapping[str, float]  # the weights of losses by name

# The default loss. On the demo pair no loss gave more acceptance than forward KL under match and greedy, and
# the JSD gave the most under sampling (docs/benchmarks.md#training).
PROTOCOL_LOSS: dict[Protocol, Loss] = {
    "sampling": {"jsd": 1.0},
    "match": {"forward_kl": 1.0},
    "greedy": {"forward_kl": 1.0},
}


def protocol_of(settings: Train, temperature: float) -> Protocol:
    """The protocol that verifies drafts. The served sampler's temperature resolves `auto`."""
    if settings.protocol == "auto":
        return "greedy" if temperature == 0 else "sampling"
    return settings.protocol


def loss_settings(settings: Train, temperature: float) -> Mixture:
    """The mixture of losses with a weight above 0. `temperature` is the served sampler's."""
    loss = settings.loss or PROTOCOL_LOSS[protocol_of(settings, temperature)]
    return {name: weight for name, weight in loss.items() if weight > 0}


# Sums over the N positions of a batch, as detached scalars in fp64, or in fp32 on a device without fp64. The sums of
# batches and processes are added before the division. `positions` is N. The STATISTICS mean the same under every
# mixture: forward KL and cross-entropy (nats; 0 at a position without label), `acceptance` Σ min(p, q) (the upper bound
# with a stored tail), `agreement` of the argmaxes over the columns, and `match` p(argmax q) (the lower bound: 0 for a
# token that is not stored). `loss/NAME` is Σ loss without its weight in the mixture.
LossSums = dict[str, Tensor]


class DraftOutcomes:
    """The draft's logits [r, C] of a block as outcomes: the columns if `ids` is None, else K entries and a bucket.

    With ids, the given logits are overwritten with −inf at the stored columns. The id C stands for a trimmed token, an
    outcome without mass.
    """

    def __init__(self, logits: Tensor, ids: Tensor | None) -> None:
        self.logits = logits
        self.ids = ids
        if ids is None:
            self.top = logits.argmax(-1)  # the outcome [r] with the largest logit
            return
        gone = ids >= logits.shape[-1]
        self.columns = ids.masked_fill(gone, 0)
        self.inside = logits.gather(-1, self.columns).masked_fill_(gone, -math.inf)
        # −inf is added. Column 0 stands in for trimmed ids, which add 0 and so keep its value.
        logits.scatter_add_(-1, self.columns, torch.full_like(self.inside, -math.inf).masked_fill_(gone, 0))
        self.best = logits.amax(-1, keepdim=True)
        largest, place = self.inside.max(-1)
        self.top = torch.where(largest >= self.best.squeeze(-1), place, ids.shape[-1])
        self.full = torch.isneginf(self.best)  # [r, 1]: every column is stored
        self.best.masked_fill_(self.full, 0)

    def distribution(self) -> Tensor:
        """log q [r, M] of softmax(z)."""
        if self.ids is None:
            return self.logits.log_softmax(-1)
        self.shares = (self.logits - self.best).exp_()
        self.total = self.shares.sum(-1, keepdim=True)
        outcomes = torch.cat([self.inside, self.best + self.total.log()], -1)
        return outcomes.log_softmax(-1).clamp_(min=EMPTY)

    def log_probability(self, log_q: Tensor, column: Tensor, logit: Tensor) -> Tensor:
        """log q [r] at the columns [r, 1], from the distribution and the columns' original logits [r, 1]."""
        if self.ids is None:
            return log_q.gather(-1, column).squeeze(-1)
        outside = self.best + self.total.log()
        return logit.squeeze(-1) - torch.cat([self.inside, outside], -1).logsumexp(-1)

    def gradient(self, part: Tensor) -> Tensor:
        """dz [r, C] from gradients [r, M] with respect to the outcomes' logits, after `distribution`."""
        if self.ids is None:
            return part
        self.shares.mul_((part[:, -1:] / self.total).masked_fill(self.full, 0))
        return self.shares.scatter_add_(-1, self.columns, part[:, :-1])


class Distributions:
    """Both distributions over the outcomes of a block, and the quantities that losses share."""

    def __init__(self, log_p: Tensor, log_q: Tensor) -> None:
        self.log_p, self.log_q = log_p, log_q
        self.p = log_p.exp()
        self.q = log_q.exp()

    @cached_property
    def forward_kl(self) -> Tensor:
        """KL(p ‖ q) [r]."""
        return (self.log_p - self.log_q).mul_(self.p).sum(-1)

    @cached_property
    def acceptance(self) -> Tensor:
        """Σ min(p, q) [r]."""
        return torch.minimum(self.p, self.q).sum(-1)

    @cached_property
    def excess(self) -> Tensor:
        """(q − p)⁺ [r, M]."""
        return (self.q - self.p).relu_()

    def forward_kl_gradient(self) -> Tensor:
        """q − p if p sums to 1."""
        return (self.q * self.p.sum(-1, keepdim=True)).sub_(self.p)

    def variation_gradient(self) -> Tensor:
        """q S at outcomes with q > p and −q (1 − S) at the others. S is the sum of q over the others."""
        over = self.excess > 0
        above = (self.q * over).sum(-1, keepdim=True)
        below = (self.q * ~over).sum(-1, keepdim=True)  # 1 − above would lose its digits at a low acceptance.
        return torch.where(over, below, -above).mul_(self.q)


def _jsd(distributions: Distributions) -> Term:
    mixed = torch.logaddexp(distributions.log_p + math.log(0.5), distributions.log_q + math.log(0.5))
    ratio = distributions.log_q - mixed
    reverse = (distributions.q * ratio).sum(-1)
    value = 0.5 * (distributions.log_p - mixed).mul_(distributions.p).sum(-1) + 0.5 * reverse
    return value, lambda: (ratio - reverse.unsqueeze(-1)).mul_(distributions.q).mul_(0.5)


def _nla(distributions: Distributions) -> Term:
    held = distributions.acceptance.clamp(min=LEAST_ACCEPTANCE)
    slope = torch.where(distributions.acceptance >= LEAST_ACCEPTANCE, 1 / held, 0).unsqueeze(-1)
    return -held.log(), lambda: distributions.variation_gradient().mul_(slope)


def _lk_hybrid(distributions: Distributions) -> Term:
    blend = (-LK_DECAY * distributions.acceptance).exp()
    value = blend * distributions.forward_kl + (1 - blend) * distributions.excess.sum(-1)
    weight = blend.unsqueeze(-1)
    return value, lambda: (distributions.forward_kl_gradient().mul_(weight)).add_(
        distributions.variation_gradient().mul_(1 - weight)
    )


# The losses of two distributions. The cross-entropy reads the draft's distribution only.
DIVERGENCES: dict[str, Callable[[Distributions], Term]] = {
    "forward_kl": lambda both: (both.forward_kl, both.forward_kl_gradient),
    "jsd": _jsd,
    "total_variation": lambda both: (both.excess.sum(-1), both.variation_gradient),
    "nla": _nla,
    "lk_hybrid": _lk_hybrid,
}


def score_block(
    logits: Tensor, target: TeacherChunk, labels: Tensor, settings: Mixture, with_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """STATISTICS and losses [r, 5 + L] of a block, and dz [r, C] on request. The logits [r, C] are overwritten.

    A position whose label [r] is outside the columns has no cross-entropy.
    """
    labelled = (labels >= 0) & (labels < logits.shape[-1])
    column = labels.masked_fill(~labelled, 0).unsqueeze(-1)  # [r, 1]
    label_logit = logits.gather(-1, column)
    draft = DraftOutcomes(logits, target.ids)
    log_p = target.log_probabilities
    if target.ids is not None:  # If the draft has nothing outside the stored columns, p must have nothing there.
        log_p = torch.cat([log_p, target.log_tail.unsqueeze(-1).masked_fill(draft.full, EMPTY)], -1)
    pair = Distributions(log_p.clamp(min=EMPTY), draft.distribution())
    entropy = -draft.log_probability(pair.log_q, column, label_logit) * labelled

    losses: dict[str, Tensor] = {}
    whole: Tensor | None = None  # the gradient with respect to outcome logits
    for name in LOSSES:  # One loss at a time saves memory.
        if name not in settings:
            continue
        if name == "cross_entropy":  # The gradient at the label's column is added below.
            losses[name], gradient_of = entropy, lambda: pair.q * labelled.unsqueeze(-1)
        else:
            losses[name], gradient_of = DIVERGENCES[name](pair)
        if with_gradient and (weight := settings[name]):
            part = gradient_of().mul_(weight)
            whole = part if whole is None else whole.add_(part)

    named = pair.p  # p of the outcomes that are tokens
    if target.ids is not None:
        named = torch.cat([named[:, :-1], torch.zeros_like(named[:, -1:])], -1)
    likeliest, best = named.max(-1)
    agreement = (likeliest > 0) & (draft.top == best)
    match = named.gather(-1, draft.top.unsqueeze(-1)).squeeze(-1)
    columns = [pair.forward_kl, entropy, pair.acceptance, agreement, match, *(losses[n] for n in settings)]
    values = torch.stack([column.to(logits.dtype) for column in columns], -1)
    if not with_gradient:
        return values, None
    assert whole is not None
    gradient = draft.gradient(whole)
    if "cross_entropy" in settings:
        at_label = -settings["cross_entropy"] * labelled.to(gradient.dtype)
        gradient.scatter_add_(-1, column, at_label.unsqueeze(-1))
    return values, gradient


# ── Losses over the head in chunks, with gradients in the same pass ──
# Legend: N scored positions, n of them in a chunk and r in a block, H hidden, R rows of the draft's head, C of them
# columns of the distributions, M outcomes, L losses.
# A chunk is a matrix product of at most `chunk` positions. Its logits are replaced by their gradients block by block,
# in closed form and without a graph. The temporaries [r, C] of a block stay in a CPU's cache. Head rows from C on are
# padding: they have no mass and no logits here.

CACHED = 2**20  # entries of a block per CPU thread: 4 MB in fp32
STREAMED = 2**24  # entries of a block on an accelerator, which needs large kernels


@dataclass(frozen=True)
class _Scoring:
    """The settings of a call: at most `chunk` of the N positions are scored at once, with products in type `kind`."""

    teacher: Teacher
    labels: Tensor  # [N]
    settings: Mixture
    chunk: int
    kind: torch.dtype
    wide: torch.dtype  # the type of everything but the products
    form: LogitForm


@torch.no_grad()
def _positions(
    hidden: Tensor,
    head: Tensor,
    bias: Tensor | None,
    scoring: _Scoring,
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
) -> Tensor:
    """STATISTICS and losses [N, 5 + L] of every position. Adds to the given gradients (d_hidden, d_head, d_bias)."""
    teacher, settings, kind, wide = scoring.teacher, scoring.settings, scoring.kind, scoring.wide
    count, columns = len(hidden), teacher.columns
    d_hidden, d_head, d_bias = gradients
    with_gradient = any(gradient is not None for gradient in gradients)
    rows = head[:columns].to(kind)
    shift = None if bias is None else bias[:columns].to(kind)
    # One buffer serves all chunks, because the last chunk of each step has another number of rows.
    buffer = torch.empty(min(scoring.chunk, filled_count(count, hidden)), columns, dtype=kind, device=hidden.device)
    threads = torch.get_num_threads()
    size = max(1, (CACHED * threads if hidden.device.type == "cpu" else STREAMED) // columns)
    values = torch.empty(count, len(STATISTICS) + len(settings), dtype=wide, device=hidden.device)
    for start in range(0, count, scoring.chunk):
        here = slice(start, min(start + scoring.chunk, count))
        scored = here.stop - start
        logits = buffer[: filled_count(scored, hidden)]
        part = torch.nn.functional.pad(hidden[here].to(kind), (0, 0, 0, len(logits) - scored))
        torch.mm(part, rows.T, out=logits)
        logits[scored:] = 0
        if shift is not None:
            logits[:scored] += shift
        target = teacher.chunk(here)
        for first in range(0, scored, size):
            block = slice(first, min(first + size, scored))
            at = slice(start + block.start, start + block.stop)
            ids = None if target.ids is None else target.ids[block]
            chunk = TeacherChunk(ids, target.log_probabilities[block], target.log_tail[block])
            formed = scoring.form.apply(logits[block].to(wide))
            slope = scoring.form.slope(formed)
            values[at], gradient = score_block(formed, chunk, scoring.labels[at], settings, with_gradient)
            if gradient is not None:
                logits[block] = gradient if scoring.form == PLAIN_LOGITS else gradient * slope
        del target
        d_logits = logits  # The gradients have replaced the logits.
        if d_hidden is not None:
            d_hidden[here] = (d_logits @ rows)[:scored]
        if d_head is not None:
            _add_product(d_head[:columns], d_logits, part)
        if d_bias is not None:
            d_bias[:columns] += d_logits.sum(0, dtype=wide)
    return values


def _add_product(total: Tensor, gradient: Tensor, hidden: Tensor) -> None:
    """total [C, H] += gradientᵀ [C, n] · hidden [n, H], summed in the type of the total."""
    if total.dtype == gradient.dtype:
        total.addmm_(gradient.T, hidden)
        return
    step = max(1, CACHED * 16 // total.shape[-1])  # The product of so many rows takes 64 MB in fp32.
    for start in range(0, len(total), step):
        rows = slice(start, start + step)
        total[rows] += gradient[:, rows].T @ hidden


class _HeadLoss(torch.autograd.Function):
    """Σ loss and the values of every position. The forward pass computes the gradients."""

    @staticmethod
    def forward(
        context: Any, hidden: Tensor, head: Tensor, bias: Tensor | None, scoring: _Scoring
    ) -> tuple[Tensor, Tensor]:
        inputs = (hidden, head, bias)
        gradients = [
            torch.zeros_like(x, memory_format=torch.contiguous_format) if x is not None and needed else None
            for x, needed in zip(inputs, context.needs_input_grad, strict=False)
        ]
        values = _positions(hidden, head, bias, scoring, (gradients[0], gradients[1], gradients[2]))
        context.mark_non_differentiable(values)
        # The gradients are no saved tensors, so that they are passed on without a copy of [R, H].
        context.gradients = gradients
        return _total(values, scoring), values

    @staticmethod
    def backward(context: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        if context.gradients is None:
            raise RuntimeError("backward ran a second time over the head's loss, whose gradients exist only once")
        gradients, context.gradients = context.gradients, None
        return (*(None if x is None else x.mul_(above[0]) for x in gradients), None)


def _widest(values: Tensor) -> Tensor:
    """The values in fp64, or unchanged on a device without fp64. A copy to the host would wait for the device."""
    return values.double() if has_float64(values.device) else values


def _total(values: Tensor, scoring: _Scoring) -> Tensor:
    """Σ loss, in the type of the values."""
    shares = scoring.settings.values()
    parts = [values[:, column] * share for column, share in enumerate(shares, len(STATISTICS))]
    return _widest(torch.stack(parts, -1)).sum(-1).sum().to(values.dtype)


def head_loss(
    hidden: Tensor,
    head: Tensor,
    teacher: Teacher,
    labels: Tensor,
    settings: Mixture,
    chunk: int,
    bias: Tensor | None = None,
    form: LogitForm = PLAIN_LOGITS,
) -> tuple[Tensor, LossSums]:
    """Σ loss over the positions, and the sums for the log.

    hidden [N, H] are the states after the final norm. The first teacher.columns rows of head [R, H] and bias [R] learn.
    labels [N] are columns; other numbers are no labels. At most `chunk` positions are computed at once. The products
    are in the type of `hidden`, or of an enclosing autocast. The rest is in fp32, or in fp64 if `hidden` is. Gradients
    flow once, to those of hidden, head and bias that need them.
    """
    assert len(teacher) == len(hidden) == len(labels) and teacher.columns <= len(head) and chunk >= 1
    automatic = torch.is_autocast_enabled(hidden.device.type)
    kind = torch.get_autocast_dtype(hidden.device.type) if automatic else hidden.dtype
    scoring = _Scoring(teacher, labels.long(), settings, chunk, kind, torch.promote_types(kind, torch.float32), form)
    with torch.autocast(hidden.device.type, enabled=False):  # Neither the teacher nor the logs may be rounded.
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (hidden, head, bias)):
            total, values = _HeadLoss.apply(hidden, head, bias, scoring)
        else:
            values = _positions(hidden, head, bias, scoring)
            total = _total(values, scoring)
        return total, _sums(values, scoring)


def _sums(values: Tensor, scoring: _Scoring) -> LossSums:
    settings = scoring.settings
    wide = _widest(values)
    names = (*STATISTICS, *(f"loss/{name}" for name in settings))
    return {"positions": wide.new_full((), len(wide)), **dict(zip(names, wide.sum(0), strict=True))}
