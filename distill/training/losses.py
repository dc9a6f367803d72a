"""Losses over the outcomes of a position with closed-form gradients, and gradients of outcomes as those of logits.

Legend: r positions of a block, C columns of the draft's head, K stored entries, M outcomes, L losses, t a temperature.
z are the draft's logits [r, C]; p and q the distributions of target and draft over the outcomes [r, M].

Where the target's distribution is whole, the outcomes are the columns. Where a store has K entries and the mass of the
rest, the outcomes are those entries and one bucket, M = K + 1, whose logit is logsumexp(z / t) over the columns
outside. A loss over outcomes has a gradient g with respect to their logits, and dz = g / t at a stored column, g_bucket
/ t times the softmax among the columns outside elsewhere. The oracle is distill/divergences.py.
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
from distill.recipe.training import LossName
from distill.teacher.distributions import EMPTY, LogitForm, Teacher, TeacherChunk

# ── Losses over the outcomes of a position with closed-form gradients ──

# Formulas in distill/divergences.py under the same names.
LOSSES: tuple[str, ...] = get_args(LossName)
STATISTICS = ("forward_kl", "cross_entropy", "acceptance", "agreement", "match")
PLAIN_LOGITS = LogitForm()


Term = tuple[Tensor, Callable[[], Tensor]]  # a loss [r], and its gradient [r, M], computed on demand


@dataclass(frozen=True)
class LossSettings:
    """Weights of the losses of a mixture, and the settings of the losses.

    The target's distribution p is taken at `temperature`, and so is q = softmax(z / temperature) in forward_kl
    and jsd, which are multiplied by temperature², and in total_variation, nla and lk_hybrid, which are not; the
    cross-entropy takes z itself.
    """

    losses: Mapping[str, float]
    temperature: float = 1.0

    def scale(self, name: str) -> float:
        """The factor that keeps a loss's gradient from shrinking with the temperature (Hinton et al. 2015)."""
        return self.temperature**2 if name in ("forward_kl", "jsd") else 1.0


# Sums over the N positions of a batch, detached scalars in fp64 (in fp32 on a device without fp64). Add the sums of
# batches and processes, then divide. `positions` is N. The STATISTICS are of the distributions at the temperature of
# the settings, so that they mean the same under every mixture: forward KL and cross-entropy (nats; 0 where a position
# has no label), `acceptance` Σ min(p, q) (upper end with a stored tail), `agreement` of the argmaxes over the columns,
# and `match` p(argmax q) (lower end: 0 where that is not stored). `loss/NAME` is Σ loss, with its temperature² but
# without its weight in the mixture.
LossSums = dict[str, Tensor]


class DraftOutcomes:
    """Logits [r, C] of a block as outcomes: the columns where `ids` is None, else K entries and a bucket.

    With ids, the given logits are overwritten with −inf at the stored columns. An id of C was trimmed away: an outcome
    without mass.
    """

    def __init__(self, logits: Tensor, ids: Tensor | None) -> None:
        self.logits = logits
        self.ids = ids
        self.shares: dict[float, tuple[Tensor, Tensor]] = {}
        if ids is None:
            self.top = logits.argmax(-1)  # the outcome [r] with the largest logit
            return
        gone = ids >= logits.shape[-1]
        self.columns = ids.masked_fill(gone, 0)
        self.inside = logits.gather(-1, self.columns).masked_fill_(gone, -math.inf)
        # Added and not written: column 0, the stand-in for trimmed ids, gets 0 from them and keeps its own value.
        logits.scatter_add_(-1, self.columns, torch.full_like(self.inside, -math.inf).masked_fill_(gone, 0))
        self.best = logits.amax(-1, keepdim=True)
        largest, place = self.inside.max(-1)
        self.top = torch.where(largest >= self.best.squeeze(-1), place, ids.shape[-1])
        self.full = torch.isneginf(self.best)  # [r, 1]: every column is stored, and nothing is outside
        self.best.masked_fill_(self.full, 0)

    def distribution(self, t: float) -> Tensor:
        """log q [r, M] of softmax(z / t)."""
        if self.ids is None:
            return (self.logits if t == 1 else self.logits / t).log_softmax(-1)
        shares = self.logits - self.best
        if t != 1:
            shares.div_(t)
        total = shares.exp_().sum(-1, keepdim=True)
        self.shares[t] = shares, total
        outcomes = torch.cat([self.inside / t, self.best / t + total.log()], -1)
        return outcomes.log_softmax(-1).clamp_(min=EMPTY)

    def log_probability(self, log_q: Tensor, column: Tensor, logit: Tensor) -> Tensor:
        """log q(column) [r] from the distribution at t = 1, the columns [r, 1] and their original logits [r, 1]."""
        if self.ids is None:
            return log_q.gather(-1, column).squeeze(-1)
        _, total = self.shares[1.0]
        outside = self.best + total.log()
        return logit.squeeze(-1) - torch.cat([self.inside, outside], -1).logsumexp(-1)

    def gradient(self, parts: Mapping[float, Tensor]) -> Tensor:
        """dz [r, C] from gradients [r, M] with respect to outcome logits, by temperature; `distribution` was called at
        each of them."""
        if self.ids is None:
            whole = [part if t == 1 else part.div_(t) for t, part in parts.items()]
            for part in whole[1:]:
                whole[0].add_(part)
            return whole[0]
        result: Tensor | None = None
        stored = torch.zeros_like(self.inside)
        for t, part in parts.items():
            shares, total = self.shares[t]
            shares.mul_((part[:, -1:] / (t * total)).masked_fill(self.full, 0))
            result = shares if result is None else result.add_(shares)
            stored += part[:, :-1] / t
        assert result is not None
        return result.scatter_add_(-1, self.columns, stored)


class Distributions:
    """Both distributions over the outcomes of a block at one temperature, with the quantities that losses share."""

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
        """q − p where p sums to 1."""
        return (self.q * self.p.sum(-1, keepdim=True)).sub_(self.p)

    def variation_gradient(self) -> Tensor:
        """q S where q > p and −q (1 − S) elsewhere, S the sum of q elsewhere."""
        over = self.excess > 0
        above = (self.q * over).sum(-1, keepdim=True)
        below = (self.q * ~over).sum(-1, keepdim=True)  # not 1 − above, which loses its digits where acceptance is low
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


# Losses of the two distributions at the settings' temperature; the cross-entropy reads the draft's alone.
DIVERGENCES: dict[str, Callable[[Distributions], Term]] = {
    "forward_kl": lambda both: (both.forward_kl, both.forward_kl_gradient),
    "jsd": _jsd,
    "total_variation": lambda both: (both.excess.sum(-1), both.variation_gradient),
    "nla": _nla,
    "lk_hybrid": _lk_hybrid,
}


def score_block(
    logits: Tensor, target: TeacherChunk, labels: Tensor, settings: LossSettings, with_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """STATISTICS and losses [r, 5 + L] of a block, and on request dz [r, C]; the logits [r, C] are overwritten.

    Labels [r] outside the columns are unknown: their positions have no cross-entropy.
    """
    labelled = (labels >= 0) & (labels < logits.shape[-1])
    column = labels.masked_fill(~labelled, 0).unsqueeze(-1)  # [r, 1]
    label_logit = logits.gather(-1, column)
    draft = DraftOutcomes(logits, target.ids)
    log_p = target.log_probabilities
    if target.ids is not None:  # where the draft has nothing outside the stored columns, neither has p
        log_p = torch.cat([log_p, target.log_tail.unsqueeze(-1).masked_fill(draft.full, EMPTY)], -1)
    pair = Distributions(log_p.clamp(min=EMPTY), draft.distribution(settings.temperature))
    log_q = pair.log_q if settings.temperature == 1 else draft.distribution(1.0)
    q = pair.q if log_q is pair.log_q else log_q.exp()
    entropy = -draft.log_probability(log_q, column, label_logit) * labelled

    losses: dict[str, Tensor] = {}
    parts: dict[float, Tensor] = {}  # gradients with respect to outcome logits, by temperature
    for name in LOSSES:  # one at a time, to save memory
        if name not in settings.losses:
            continue
        if name == "cross_entropy":  # its gradient at the label's column is added below
            t, (loss, gradient_of) = 1.0, (entropy, lambda: q * labelled.unsqueeze(-1))
        else:
            t, (loss, gradient_of) = settings.temperature, DIVERGENCES[name](pair)
        losses[name] = loss * settings.scale(name)
        weight = settings.losses[name] * settings.scale(name)
        if with_gradient and weight:
            part = gradient_of().mul_(weight)
            parts[t] = parts[t].add_(part) if t in parts else part

    named = pair.p  # p of the outcomes that are tokens: the bucket has none
    if target.ids is not None:
        named = torch.cat([named[:, :-1], torch.zeros_like(named[:, -1:])], -1)
    likeliest, best = named.max(-1)
    agreement = (likeliest > 0) & (draft.top == best)
    match = named.gather(-1, draft.top.unsqueeze(-1)).squeeze(-1)
    columns = [pair.forward_kl, entropy, pair.acceptance, agreement, match, *(losses[n] for n in settings.losses)]
    values = torch.stack([own.to(logits.dtype) for own in columns], -1)
    if not with_gradient:
        return values, None
    gradient = draft.gradient(parts)
    if "cross_entropy" in settings.losses:
        at_label = -settings.losses["cross_entropy"] * labelled.to(gradient.dtype)
        gradient.scatter_add_(-1, column, at_label.unsqueeze(-1))
    return values, gradient


# ── Losses over the head in chunks; gradients come in the same pass ──
# Logits of at most `chunk` positions exist at once.
# Legend: N scored positions, n of them in a chunk and r in a block, H hidden, R rows of the draft's head, C of them
# that are columns of the distributions, M outcomes, L losses. A chunk is a matrix product; its logits are replaced
# by their gradients block by block, in closed form and without a graph, in blocks small enough for the temporaries
# of [r, C] to stay in a processor's cache. The oracle of the losses is distill/divergences.py.
# Head rows from C on are padding: no distribution gives them mass, and they have no logits here.

CACHED = 2**20  # entries of a block for each thread of a processor: 4 MB in fp32
STREAMED = 2**24  # entries of a block on an accelerator, which needs large kernels


@dataclass(frozen=True)
class _Scoring:
    """How the N positions of a call are scored: at most `chunk` at once, with products in type `kind`."""

    teacher: Teacher
    labels: Tensor  # [N]
    settings: LossSettings
    chunk: int
    kind: torch.dtype
    wide: torch.dtype  # of everything but the products
    form: LogitForm


@torch.no_grad()
def _positions(
    hidden: Tensor,
    head: Tensor,
    bias: Tensor | None,
    scoring: _Scoring,
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
) -> Tensor:
    """STATISTICS and losses [N, 5 + L] of every position; adds to the gradients (d_hidden, d_head, d_bias) given."""
    teacher, settings, kind, wide = scoring.teacher, scoring.settings, scoring.kind, scoring.wide
    count, columns = len(hidden), teacher.columns
    d_hidden, d_head, d_bias = gradients
    with_gradient = any(gradient is not None for gradient in gradients)
    rows = head[:columns].to(kind)
    shift = None if bias is None else bias[:columns].to(kind)
    # The last chunk of a batch has another number of rows at every step.
    buffer = torch.empty(min(scoring.chunk, filled_count(count, hidden)), columns, dtype=kind, device=hidden.device)
    threads = torch.get_num_threads()
    size = max(1, (CACHED * threads if hidden.device.type == "cpu" else STREAMED) // columns)
    values = torch.empty(count, len(STATISTICS) + len(settings.losses), dtype=wide, device=hidden.device)
    for start in range(0, count, scoring.chunk):
        here = slice(start, min(start + scoring.chunk, count))
        scored = here.stop - start
        logits = buffer[: filled_count(scored, hidden)]  # of a chunk of fewer rows: the whole buffer
        part = torch.nn.functional.pad(hidden[here].to(kind), (0, 0, 0, len(logits) - scored))
        torch.mm(part, rows.T, out=logits)
        logits[scored:] = 0
        if shift is not None:
            logits[:scored] += shift
        target = teacher.chunk(here, settings.temperature)
        for first in range(0, scored, size):
            block = slice(first, min(first + size, scored))
            at = slice(start + block.start, start + block.stop)
            ids = None if target.ids is None else target.ids[block]
            own = TeacherChunk(ids, target.log_probabilities[block], target.log_tail[block])
            formed = scoring.form.apply(logits[block].to(wide))
            slope = scoring.form.slope(formed)
            values[at], gradient = score_block(formed, own, scoring.labels[at], settings, with_gradient)
            if gradient is not None:
                logits[block] = gradient if scoring.form == PLAIN_LOGITS else gradient * slope
        del target
        d_logits = logits  # whose rows were replaced by their gradients
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
    step = max(1, CACHED * 16 // total.shape[-1])  # rows whose product in the other type is held: 64 MB in fp32
    for start in range(0, len(total), step):
        rows = slice(start, start + step)
        total[rows] += gradient[:, rows].T @ hidden


class _HeadLoss(torch.autograd.Function):
    """Σ loss, with the gradients computed in the forward pass, and the values of every position."""

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
        # Not saved as tensors: the gradient is passed on without a copy, so that a second [R, H] never exists.
        context.gradients = gradients
        return _total(values, scoring), values

    @staticmethod
    def backward(context: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        if context.gradients is None:
            raise RuntimeError("backward ran a second time over the head's loss, whose gradients exist only once")
        gradients, context.gradients = context.gradients, None
        return (*(None if x is None else x.mul_(above[0]) for x in gradients), None)


def _widest(values: Tensor) -> Tensor:
    """The values in fp64, on a device without it as they are: a copy to the host would wait for the device."""
    return values.double() if has_float64(values.device) else values


def _total(values: Tensor, scoring: _Scoring) -> Tensor:
    """Σ loss, in the type of the values."""
    shares = scoring.settings.losses.values()
    parts = [values[:, column] * share for column, share in enumerate(shares, len(STATISTICS))]
    return _widest(torch.stack(parts, -1)).sum(-1).sum().to(values.dtype)


def head_loss(
    hidden: Tensor,
    head: Tensor,
    teacher: Teacher,
    labels: Tensor,
    settings: LossSettings,
    chunk: int,
    bias: Tensor | None = None,
    form: LogitForm = PLAIN_LOGITS,
) -> tuple[Tensor, LossSums]:
    """Σ loss over the positions, and the sums for the log.

    hidden [N, H] after the final norm, head [R, H] and bias [R] of which the first teacher.columns rows learn, labels
    [N] as columns (outside them: no label), chunk positions at once. The products are in the type of `hidden`, or of an
    enclosing autocast; the rest is in fp32 (fp64 if that is fp64). Gradients reach hidden, head and bias, once; none is
    computed where none is needed. Raises DataError for a temperature that the teacher lacks.
    """
    assert len(teacher) == len(hidden) == len(labels) and teacher.columns <= len(head) and chunk >= 1
    automatic = torch.is_autocast_enabled(hidden.device.type)
    kind = torch.get_autocast_dtype(hidden.device.type) if automatic else hidden.dtype
    scoring = _Scoring(teacher, labels.long(), settings, chunk, kind, torch.promote_types(kind, torch.float32), form)
    with torch.autocast(hidden.device.type, enabled=False):  # so that neither the teacher nor the logs are rounded
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (hidden, head, bias)):
            total, values = _HeadLoss.apply(hidden, head, bias, scoring)
        else:
            values = _positions(hidden, head, bias, scoring)
            total = _total(values, scoring)
        return total, _sums(values, scoring)


def _sums(values: Tensor, scoring: _Scoring) -> LossSums:
    settings = scoring.settings
    own = _widest(values)
    names = (*STATISTICS, *(f"loss/{name}" for name in settings.losses))
    return {"positions": own.new_full((), len(own)), **dict(zip(names, own.sum(0), strict=True))}
