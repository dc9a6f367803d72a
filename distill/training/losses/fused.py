"""Losses over the head in chunks: logits of at most `chunk` positions exist at once; gradients come in the same pass.

Legend: N scored positions, n of them in a chunk and r in a block, H hidden, R rows of the draft's head, C of them that
are columns of the distributions, M outcomes, L losses. A chunk is a matrix product; its logits are replaced by their
gradients block by block, in closed form and without a graph, in blocks small enough for the temporaries of [r, C] to
stay in a processor's cache. The losses are in bucket.py, their oracle in distill/divergences.py.

Head rows from C on are padding: no distribution gives them mass, and they have no logits here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distill.errors import DataError
from distill.models.cpu_products import filled_count
from distill.teacher.distributions import Teacher, TeacherChunk
from distill.training.losses.bucket import STATISTICS, LossSettings, LossSums, score_block

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
            values[at], gradient = score_block(logits[block].to(wide), own, scoring.labels[at], settings, with_gradient)
            if gradient is not None:
                logits[block] = gradient
        del target
        if d_hidden is not None:
            d_hidden[here] = (logits @ rows)[:scored]
        if d_head is not None:
            _add_product(d_head[:columns], logits, part)
        if d_bias is not None:
            d_bias[:columns] += logits.sum(0, dtype=wide)
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


def _exact(values: Tensor) -> Tensor:
    """The values in fp64, on the processor where the device has none."""
    return (values.cpu() if values.device.type == "mps" else values).double()


def _total(values: Tensor, scoring: _Scoring) -> Tensor:
    """Σ loss, in the type of the values."""
    shares = torch.tensor([*scoring.settings.losses.values()], dtype=values.dtype, device=values.device)
    own = _exact(values[:, len(STATISTICS) :] * shares)
    return own.sum(-1).sum().to(values.device, values.dtype)


def head_loss(
    hidden: Tensor,
    head: Tensor,
    teacher: Teacher,
    labels: Tensor,
    settings: LossSettings,
    chunk: int,
    bias: Tensor | None = None,
) -> tuple[Tensor, LossSums]:
    """Σ loss over the positions, and the sums for the log.

    hidden [N, H] after the final norm, head [R, H] and bias [R] of which the first teacher.columns rows learn, labels
    [N] as columns (outside them: no label), chunk positions at once. The products are in the type of `hidden`, or of an
    enclosing autocast; the rest is in fp32 (fp64 if that is fp64). Gradients reach hidden, head and bias, once; none is
    computed where none is needed. Raises DataError for a reverse KL that is infinite and for a temperature that the
    teacher lacks.
    """
    assert len(teacher) == len(hidden) == len(labels) and teacher.columns <= len(head) and chunk >= 1
    automatic = torch.is_autocast_enabled(hidden.device.type)
    kind = torch.get_autocast_dtype(hidden.device.type) if automatic else hidden.dtype
    scoring = _Scoring(teacher, labels.long(), settings, chunk, kind, torch.promote_types(kind, torch.float32))
    with torch.autocast(hidden.device.type, enabled=False):  # so that neither the teacher nor the logs are rounded
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (hidden, head, bias)):
            total, values = _HeadLoss.apply(hidden, head, bias, scoring)
        else:
            values = _positions(hidden, head, bias, scoring)
            total = _total(values, scoring)
        return total, _sums(values, scoring)


def _sums(values: Tensor, scoring: _Scoring) -> LossSums:
    settings = scoring.settings
    if "reverse_kl" in settings.losses:
        place = len(STATISTICS) + list(settings.losses).index("reverse_kl")
        infinite = int(torch.isposinf(values[:, place]).sum())
        if infinite:
            raise DataError(
                f"the reverse KL is infinite at {infinite} of {len(values)} positions: the target gives no mass to "
                "tokens of the draft's",
                "train on forward_kl or jsd, or on a store with fewer entries than tokens",
            )
    own = _exact(values)
    vector = torch.cat([own.new_tensor([len(own)]), own.sum(0)])
    return LossSums(("positions", *STATISTICS, *(f"loss/{name}" for name in settings.losses)), vector)
