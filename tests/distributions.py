"""Problems for the losses over the head, in fp64: hidden states, a head, a target's distributions whole, stored or
trimmed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from distill import divergences
from distill.teacher.distributions import EMPTY, LogitForm, Teacher, TeacherChunk
from distill.training.losses import PLAIN_LOGITS, LossSums, Mixture, head_loss

N, H, V = 17, 8, 29
KINDS = ("random", "aligned", "one-hot")


@dataclass
class Distributions:
    """A target's distributions at N positions as a `Teacher`, from its logits [N, V] over all tokens, by sorting and
    adding up.

    k entries are stored (None: every column); of a trimmed draft, `kept` are the tokens that it speaks.
    """

    logits: Tensor
    k: int | None = None
    kept: list[int] | None = None
    kind: torch.dtype = torch.float64
    asked: list[slice] = field(default_factory=list)

    @property
    def columns(self) -> int:
        return self.logits.shape[-1] if self.kept is None else len(self.kept)

    def __len__(self) -> int:
        return len(self.logits)

    def restrict(self, kept: Tensor) -> Distributions:
        return Distributions(self.logits, self.k, kept.tolist(), self.kind)

    def dense(self) -> Tensor:
        """log p [N, C], without what the draft cannot speak."""
        distribution = self.logits.log_softmax(-1)
        return distribution if self.kept is None else distribution[:, self.kept]

    def chunk(self, rows: slice) -> TeacherChunk:
        self.asked.append(rows)
        distribution = self.logits[rows].log_softmax(-1)
        if self.k is None:
            dense = self.dense()[rows]
            tail = (1 - dense.exp().sum(-1)).clamp(min=1e-30).log()
            return TeacherChunk(None, dense.to(self.kind), tail.to(self.kind))
        ids = distribution.argsort(-1, descending=True)[:, : self.k]
        logs = distribution.gather(-1, ids)
        outside = distribution.scatter(-1, ids, -math.inf)
        if self.kept is not None:
            place = torch.full((distribution.shape[-1],), len(self.kept))
            place[self.kept] = torch.arange(len(self.kept))
            ids = place[ids]
            gone = ids == len(self.kept)
            outside = torch.cat([outside, logs.masked_fill(~gone, -math.inf)], -1)
            logs = logs.masked_fill(gone, -math.inf)
        return TeacherChunk(ids, logs.to(self.kind), outside.logsumexp(-1).clamp(min=EMPTY).to(self.kind))


class Problem:
    """Random hidden states [N, H] and a head [C + padding, H], and distributions that may be near the draft's."""

    def __init__(
        self, k: int | None, kind: str = "random", seed: int = 0, padding: int = 0, trimmed: int | None = None
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        kept = None if trimmed is None else sorted(torch.randperm(V, generator=self.generator)[:trimmed].tolist())
        self.columns = V if kept is None else len(kept)
        self.hidden = self.random(N, H)
        self.head = self.random(self.columns + padding, H) * 0.8
        self.head[self.columns :] *= 5  # padding that would win if it had logits
        target = 3 * self.random(N, V)
        if kind == "aligned":
            target = 0.02 * self.random(N, V)
            own = self.hidden @ self.head[: self.columns].T
            if kept is None:
                target += own
            else:
                target[:, kept] += own
        if kind == "one-hot":
            target[torch.arange(N), torch.randint(0, V, (N,), generator=self.generator)] += 40
        self.teacher = Distributions(target, k, kept)
        self.labels = torch.randint(0, self.columns + 3, (N,), generator=self.generator)  # some are no columns

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def outcomes(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """log p and log q [N, M] over the outcomes, position by position with Python's own lists."""
        chunk = self.teacher.chunk(slice(0, N))
        if chunk.ids is None:
            return chunk.log_probabilities, logits.log_softmax(-1)
        width = chunk.ids.shape[-1] + 1
        rows: list[tuple[Tensor, Tensor]] = []
        for ids, own, tail, row in zip(chunk.ids, chunk.log_probabilities, chunk.log_tail, logits, strict=True):
            distribution = row.log_softmax(-1)
            here = ids < len(distribution)
            rest = torch.tensor([i for i in range(len(distribution)) if i not in set(ids.tolist())], dtype=torch.long)
            p, q = own[here], distribution[ids[here]]
            if len(rest):
                p, q = torch.cat([p, tail[None]]), torch.cat([q, distribution[rest].logsumexp(-1, keepdim=True)])
            none = (0, width - len(p))
            p = torch.where(p > EMPTY, p, -math.inf)
            rows.append(tuple(torch.nn.functional.pad(x, none, value=-math.inf) for x in (p, q)))  # type: ignore[arg-type]
        return torch.stack([p for p, _ in rows]), torch.stack([q for _, q in rows])

    def named(self) -> Tensor:
        """p [N, C] with the mass of what is not stored left out."""
        chunk = self.teacher.chunk(slice(0, N))
        if chunk.ids is None:
            return chunk.log_probabilities.exp()
        wide = torch.zeros(N, self.columns + 1, dtype=torch.float64)
        return wide.scatter_add(-1, chunk.ids, chunk.log_probabilities.exp())[:, : self.columns]

    def oracle(self, name: str, logits: Tensor) -> Tensor:
        """One loss [N] from logits [N, C], by the plain formulas."""
        if name == "cross_entropy":
            labelled = self.labels < self.columns
            return divergences.cross_entropy(logits, self.labels.where(labelled, 0)) * labelled
        log_p, log_q = self.outcomes(logits)
        if name in ("total_variation", "nla"):
            return getattr(divergences, name)(log_p.exp(), log_q.exp())
        if name in ("forward_kl", "jsd", "lk_hybrid"):
            return getattr(divergences, name)(log_p, log_q)
        raise KeyError(f"no plain formula of {name}")

    def expected(
        self, settings: Mixture, form: LogitForm = PLAIN_LOGITS
    ) -> tuple[Tensor, dict[str, Tensor], Tensor, Tensor, Tensor]:
        """Total, losses [N] by name, d_hidden, d_head and d_bias, by autograd in fp64."""
        hidden, head = self.hidden.clone().requires_grad_(), self.head.clone().requires_grad_()
        bias = torch.zeros(len(head), dtype=torch.float64, requires_grad=True)
        logits = form.apply((hidden @ head.T + bias)[:, : self.columns])
        losses = {name: self.oracle(name, logits) for name in settings}
        total = torch.stack([settings[name] * own.sum() for name, own in losses.items()]).sum()
        total.backward()
        assert hidden.grad is not None and head.grad is not None and bias.grad is not None
        return total.detach(), {n: x.detach() for n, x in losses.items()}, hidden.grad, head.grad, bias.grad


def fused(
    problem: Problem,
    settings: Mixture,
    chunk: int = 7,
    kind: torch.dtype = torch.float64,
    teacher: Teacher | None = None,
    form: LogitForm = PLAIN_LOGITS,
) -> tuple[Tensor, LossSums, Tensor, Tensor, Tensor]:
    """Total, sums, d_hidden, d_head and d_bias of the loss under test, over a problem's own teacher or another."""
    problem.teacher.kind = torch.promote_types(kind, torch.float32)
    hidden, head = (x.to(kind, copy=True).requires_grad_() for x in (problem.hidden, problem.head))
    bias = torch.zeros(len(head), dtype=kind, requires_grad=True)
    total, sums = head_loss(hidden, head, teacher or problem.teacher, problem.labels, settings, chunk, bias, form)
    total.backward()
    problem.teacher.kind = torch.float64
    assert hidden.grad is not None and head.grad is not None and bias.grad is not None
    assert hidden.grad.dtype == head.grad.dtype == kind
    return total.detach(), sums, hidden.grad, head.grad, bias.grad


def near(left: Tensor, right: Tensor, tolerance: float, least: float = 0.0) -> None:
    """Differences relative to the largest entry, which counts as `least` if it is smaller."""
    assert left.shape == right.shape and bool(left.isfinite().all())
    assert float((left.double() - right).abs().max()) <= tolerance * max(least, float(right.abs().max()))
