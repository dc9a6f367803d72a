"""The chunked head loss against autograd through the plain oracle in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from distill import divergences
from distill.target.store import EMPTY, compress
from distill.training.fused import head_loss

torch.set_num_threads(1)

N, H, V = 23, 12, 37
MIXTURES = [
    {"forward_kl": 1.0},
    {"cross_entropy": 1.0},
    {"forward_kl": 0.9, "cross_entropy": 0.1},
    {"forward_kl": 0.0, "cross_entropy": 2.5},
]


class Problem:
    """Random hidden states and head (fp64) and a target's compact law from logits that may be near the draft's."""

    def __init__(self, k: int, padding: int = 0, kind: str = "random", seed: int = 0, half: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.vocabulary = V
        self.hidden = random(N, H)
        self.head = random(V + padding, H) * 0.8
        own = self.hidden @ self.head.T
        if kind == "random":
            target = 3 * random(N, V + padding)
        elif kind == "aligned":
            target = own + 1e-3 * random(N, V + padding)
        elif kind == "one-hot":  # of the target, the draft going along half of the time
            target = random(N, V + padding)
            target[torch.arange(N), torch.randint(0, V, (N,), generator=generator)] += 40
        elif kind == "sure draft":
            self.head *= 12
            target = random(N, V + padding)
        else:
            raise AssertionError(kind)
        if padding:
            self.head[V:] *= 5  # padding rows that would win if they were not masked
        target = target[:, :V]
        chunk = compress(target, k, V)  # only its ids: the law itself is made here in fp64
        self.ids = chunk.ids
        law = target.log_softmax(-1)
        self.logs = law.gather(-1, self.ids.long())
        self.tail = law.scatter(-1, self.ids.long(), -math.inf).logsumexp(-1).clamp(min=EMPTY)
        if half:  # as the store keeps it: the mass is not quite 1
            self.logs = self.logs.half().double()
        self.labels = torch.randint(0, V, (N,), generator=generator)

    def oracle(self, weights: dict[str, float]) -> tuple[float, Tensor, Tensor, float, float]:
        hidden, head = self.hidden.clone().requires_grad_(), self.head.clone().requires_grad_()
        logits = (hidden @ head.T)[:, : self.vocabulary]
        kl = divergences.bucketed_forward_kl(self.ids.long(), self.logs, self.tail, logits).sum()
        ce = divergences.cross_entropy(logits, self.labels).sum()
        loss = weights.get("forward_kl", 0.0) * kl + weights.get("cross_entropy", 0.0) * ce
        loss.backward()
        assert hidden.grad is not None and head.grad is not None
        return loss.item(), hidden.grad, head.grad, kl.item(), ce.item()

    def fused(self, weights: dict[str, float], chunk: int, dtype: torch.dtype) -> tuple[float, Tensor, Tensor, Tensor]:
        hidden, head = (x.to(dtype).clone().requires_grad_() for x in (self.hidden, self.head))
        loss, sums = head_loss(
            hidden, head, self.ids, self.logs.float(), self.tail.float(), self.labels, weights, self.vocabulary, chunk
        )
        loss.backward()
        assert hidden.grad is not None and head.grad is not None and hidden.grad.dtype == dtype
        return loss.item(), hidden.grad.double(), head.grad.double(), sums

    def agrees(self, weights: dict[str, float], chunk: int, dtype: torch.dtype, tolerance: float = 1e-5) -> None:
        loss, d_hidden, d_head, sums = self.fused(weights, chunk, dtype)
        expected, e_hidden, e_head, kl, ce = self.oracle(weights)
        assert loss == pytest.approx(expected, rel=tolerance, abs=tolerance * N)
        assert sums[:2].tolist() == pytest.approx([kl, ce], rel=tolerance, abs=tolerance * N)
        near(d_hidden, e_hidden, tolerance)
        near(d_head, e_head, tolerance)


def near(left: Tensor, right: Tensor, tolerance: float) -> None:
    assert bool(left.isfinite().all())
    assert float((left - right).abs().max()) <= tolerance * max(1.0, float(right.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", ["random", "aligned", "one-hot"])
@pytest.mark.parametrize("k", [1, 6, V - 1, V])
def test_value_and_gradients(k: int, kind: str, dtype: torch.dtype) -> None:
    problem = Problem(k, kind=kind, seed=k)
    for weights in MIXTURES:
        problem.agrees(weights, 7, dtype)


@pytest.mark.parametrize("padding", [1, 9])
@pytest.mark.parametrize("k", [4, V - 1, V])
def test_padded_columns(k: int, padding: int) -> None:
    problem = Problem(k, padding=padding, seed=50 + k)
    for weights in MIXTURES:
        problem.agrees(weights, 5, torch.float64)
    _, _, d_head, _ = problem.fused(MIXTURES[2], 5, torch.float64)
    assert torch.equal(d_head[V:], torch.zeros(padding, H, dtype=torch.float64))


@pytest.mark.parametrize("chunk", [1, 2, 5, 22, 23, 24, 1000])
def test_chunks(chunk: int) -> None:
    problem = Problem(8, padding=3, seed=9)
    problem.agrees(MIXTURES[2], chunk, torch.float64)
    one, two = problem.fused(MIXTURES[2], chunk, torch.float64), problem.fused(MIXTURES[2], N, torch.float64)
    assert one[0] == pytest.approx(two[0], rel=1e-6)
    near(one[1], two[1], 1e-6)
    near(one[2], two[2], 1e-6)
    assert one[3][2] == two[3][2]


def test_masses_rounded_to_half_precision() -> None:
    problem = Problem(8, kind="random", seed=3, half=True)
    assert float((problem.logs.exp().sum(-1) + problem.tail.exp() - 1).abs().max()) > 1e-5
    problem.agrees(MIXTURES[0], 6, torch.float64)


def test_sure_draft_gives_finite_gradients() -> None:
    """A draft with less than e^-88 of its mass outside the stored tokens: q_t is 0 in fp32 and p_t / q_t infinite."""
    problem = Problem(2, kind="sure draft", seed=4)
    # The draft is sure of a token that the target stores, so that all of the rest is far below.
    problem.hidden = problem.hidden * 6
    logits = problem.hidden @ problem.head.T
    top = logits.argmax(-1)
    law = torch.zeros(N, V, dtype=torch.float64).scatter(-1, top.unsqueeze(-1), 1.0).log_softmax(-1)
    values, ids = law.topk(2, dim=-1)
    problem.ids, problem.logs = ids.to(torch.int32), values
    problem.tail = law.scatter(-1, ids, -math.inf).logsumexp(-1)
    outside = logits.log_softmax(-1).scatter(-1, ids, -math.inf).logsumexp(-1)
    assert float(outside.min()) < -110  # else this tests nothing
    problem.agrees(MIXTURES[2], 7, torch.float64)


def test_agreement_counts_the_teachers_first() -> None:
    problem = Problem(5, seed=5)
    sums = problem.fused(MIXTURES[0], 4, torch.float64)[3]
    logits = problem.hidden @ problem.head.T
    assert int(sums[2]) == sum(int(row.argmax()) == int(ids[0]) for row, ids in zip(logits, problem.ids, strict=True))


def test_finite_differences() -> None:
    """Gradients against central differences of the loss itself, in random directions."""
    problem = Problem(6, seed=6)
    weights = MIXTURES[2]
    _, d_hidden, d_head, _ = problem.fused(weights, 7, torch.float64)
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        a = torch.randn(N, H, generator=generator, dtype=torch.float64)
        b = torch.randn(V, H, generator=generator, dtype=torch.float64)
        step, values = 1e-6, []
        hidden, head = problem.hidden, problem.head
        for sign in (1, -1):
            problem.hidden, problem.head = hidden + sign * step * a, head + sign * step * b
            values.append(problem.oracle(weights)[0])
        problem.hidden, problem.head = hidden, head
        slope = (values[0] - values[1]) / (2 * step)
        assert slope == pytest.approx(float((d_hidden * a).sum() + (d_head * b).sum()), rel=1e-5, abs=1e-4)


def test_gradient_is_scaled_by_what_comes_from_above() -> None:
    problem = Problem(6, seed=7)
    grads = []
    for scale in (1.0, 0.125):
        hidden, head = problem.hidden.clone().requires_grad_(), problem.head.clone().requires_grad_()
        loss, _ = head_loss(
            hidden, head, problem.ids, problem.logs.float(), problem.tail.float(), problem.labels, MIXTURES[2], V, 7
        )
        (loss * scale).backward()
        grads.append((hidden.grad, head.grad))
    for one, two in zip(*grads, strict=True):
        assert one is not None and two is not None and torch.equal(one * 0.125, two)
