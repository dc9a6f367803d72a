"""Every formula of distill.divergences against torch's own kl_div and plain loops in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distill import divergences
from distill.recipe.training import LossName
from distill.teacher.distributions import compress

torch.set_num_threads(1)


Formula = Callable[[Tensor, Tensor], Tensor]


def logits(rows: int, columns: int, seed: int, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def stored(target: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """ids, log-probabilities and log tail in fp64, by sorting and adding up."""
    ids = target.argsort(-1, descending=True)[:, :k]
    parts = merged(target.softmax(-1), ids).log()
    return ids, parts[:, :-1], parts[:, -1]


def merged(distribution: Tensor, ids: Tensor) -> Tensor:
    """The distribution with all columns outside ids merged into one last column."""
    rest = distribution.scatter(-1, ids, 0.0).sum(-1, keepdim=True)
    return torch.cat([distribution.gather(-1, ids), rest], -1)


def kl(p: Tensor, q: Tensor) -> Tensor:
    return torch.nn.functional.kl_div(q.log(), p, reduction="none").sum(-1)


def close(left: Tensor, right: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


# ── each formula, from logits, against a loop over two distributions with Python's own numbers ──


def of_logs(function: Formula) -> Formula:
    return lambda a, b: function(a.log_softmax(-1), b.log_softmax(-1))


def of_shares(function: Formula) -> Formula:
    return lambda a, b: function(a.softmax(-1), b.softmax(-1))


def kl_loop(p: list[float], q: list[float]) -> float:
    return math.fsum(x * math.log(x / y) for x, y in zip(p, q, strict=True) if x > 0)


def overlap(p: list[float], q: list[float]) -> float:
    return math.fsum(map(min, p, q))


def entropies(p: list[float], q: list[float], beta: float) -> float:
    """β KL(p ‖ m) + (1 − β) KL(q ‖ m)."""
    mixed = [beta * x + (1 - beta) * y for x, y in zip(p, q, strict=True)]
    return beta * kl_loop(p, mixed) + (1 - beta) * kl_loop(q, mixed)


def hybrid(p: list[float], q: list[float]) -> float:
    share = math.exp(-3 * overlap(p, q))
    return share * kl_loop(p, q) + (1 - share) * (1 - overlap(p, q))


FORMULAS: dict[str, tuple[Formula, Callable[[list[float], list[float]], float]]] = {
    "forward_kl": (of_logs(divergences.forward_kl), kl_loop),
    "reverse_kl": (of_logs(divergences.reverse_kl), lambda p, q: kl_loop(q, p)),
    "jsd": (of_logs(divergences.jsd), lambda p, q: entropies(p, q, 0.5)),
    "uneven_jsd": (of_logs(partial(divergences.jsd, beta=0.1)), lambda p, q: entropies(p, q, 0.1)),
    "total_variation": (of_shares(divergences.total_variation), lambda p, q: 1 - overlap(p, q)),
    "sampling": (of_shares(divergences.acceptance_sampling), overlap),
    "match": (lambda a, b: divergences.acceptance_match(a.softmax(-1), b), lambda p, q: p[q.index(max(q))]),
    "greedy": (divergences.acceptance_greedy, lambda p, q: float(p.index(max(p)) == q.index(max(q)))),
    "nla": (of_shares(divergences.nla), lambda p, q: -math.log(max(overlap(p, q), 1e-5))),
    "lk_hybrid": (of_logs(divergences.lk_hybrid), hybrid),
}


def looped(name: str, a: Tensor, b: Tensor) -> Tensor:
    rows = zip(a.softmax(-1).tolist(), b.softmax(-1).tolist(), strict=True)
    return torch.tensor([FORMULAS[name][1](p, q) for p, q in rows], dtype=torch.float64)


def padded(values: Tensor) -> Tensor:
    return torch.nn.functional.pad(values, (0, 4), value=-math.inf)


@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula_is_its_loop(name: str) -> None:
    """On distributions far apart, on equal ones, and with columns of padding; logits are free up to a constant."""
    ours = FORMULAS[name][0]
    a, b = logits(30, 17, 1), logits(30, 17, 2)
    b[0, a[0].argmin()] += 60  # an acceptance below the least of NLA
    close(ours(a, b), looped(name, a, b))
    close(ours(padded(a), padded(b + 5)), looped(name, a, b))
    close(ours(a, a), looped(name, a, a), 1e-14)


@pytest.mark.parametrize("name", [name for name in FORMULAS if name != "reverse_kl"])
def test_one_hot_targets(name: str) -> None:
    b, hot = logits(7, 7, 10), torch.full((7, 7), -math.inf, dtype=torch.float64).fill_diagonal_(0.0)
    close(FORMULAS[name][0](hot, b), looped(name, hot, b))
    close(FORMULAS[name][0](hot, hot), looped(name, hot, hot))


def test_infinite_divergences() -> None:
    hot = torch.full((7, 7), -math.inf, dtype=torch.float64).fill_diagonal_(0.0)
    assert torch.equal(divergences.reverse_kl(hot, hot), torch.zeros(7, dtype=torch.float64))
    with pytest.raises(ValueError, match="infinite at 7 positions"):
        divergences.reverse_kl(hot, logits(7, 7, 10).log_softmax(-1))
    assert bool(divergences.forward_kl(hot, hot.roll(1, 0)).isposinf().all())


def test_cross_entropy() -> None:
    b, tokens = logits(20, 11, 4), torch.arange(20) % 11
    for own in (b, padded(b)):
        close(divergences.cross_entropy(own, tokens), torch.nn.functional.cross_entropy(b, tokens, reduction="none"))


# ── the KL of a stored target ──


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(2, 24), st.floats(0.05, 10), st.data())
def test_bucketed_is_the_kl_of_merged_distributions(seed: int, columns: int, scale: float, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, columns - 1))
    a, b = logits(5, columns, seed, scale), logits(5, columns, seed + 1, scale)
    ids, logs, tail = stored(a, k)
    got = divergences.bucketed_forward_kl(ids, logs, tail, b)
    close(divergences.bucketed_forward_kl(ids, logs, tail, padded(b)), got)
    close(divergences.bucketed_forward_kl(ids, logs, tail, a + 100), torch.zeros(5, dtype=torch.float64))
    close(got, kl(merged(a.softmax(-1), ids), merged(b.softmax(-1), ids)), 1e-9)
    full = divergences.forward_kl(a.log_softmax(-1), b.log_softmax(-1))
    assert bool((got <= full + 1e-9).all())
    if k == columns - 1:  # a bucket of one token is that token
        close(got, full, 1e-9)


def test_bucketed_takes_what_the_store_holds() -> None:
    """compress is the fp32 twin of the definition used here."""
    a, b = logits(30, 40, 7), logits(30, 40, 8)
    for k in (1, 5, 39, 40):
        chunk = compress(a.float(), k, 40)
        got = divergences.bucketed_forward_kl(chunk.ids.long(), chunk.log_probabilities, chunk.log_tail, b.float())
        ids = chunk.ids.long()
        p, q = (merged(x.softmax(-1), ids) for x in (a, b))
        # xlogy-like: an empty bucket is nothing
        expected = torch.where(p > 0, p * (p / q).log(), torch.zeros_like(p)).sum(-1)
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=2e-6)


LOSSES = {*get_args(LossName), "reverse_kl", "uneven_jsd"} - {"cross_entropy"}  # A new name needs a loop in FORMULAS.


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_gradients_of_the_losses(name: str) -> None:
    """Against finite differences; the hybrid's share is a constant of its step."""
    a, b, direction = logits(12, 9, 24), logits(12, 9, 25), logits(12, 9, 26)
    shares = (-3 * divergences.acceptance_sampling(a.softmax(-1), b.softmax(-1))).exp()

    def loss(z: Tensor) -> Tensor:
        if name != "lk_hybrid":
            return FORMULAS[name][0](a, z)
        return shares * FORMULAS["forward_kl"][0](a, z) + (1 - shares) * FORMULAS["total_variation"][0](a, z)

    z, step = b.clone().requires_grad_(), 1e-6
    (slope,) = torch.autograd.grad(FORMULAS[name][0](a, z).sum(), z)
    difference = (loss(b + step * direction) - loss(b - step * direction)) / (2 * step)
    torch.testing.assert_close((slope * direction).sum(-1), difference, rtol=1e-6, atol=1e-7)


def test_a_distribution_that_is_not_whole() -> None:
    """Of a trimmed head: sums over what it can speak, TV with what it cannot; no NaN where neither has mass."""
    a, b = logits(15, 10, 27), logits(15, 6, 28)
    p, q = a.softmax(-1)[:, :6], b.softmax(-1)
    assert float(p.sum(-1).max()) < 0.999
    close(divergences.total_variation(p, q), 1 - torch.minimum(p, q).sum(-1))
    close(divergences.forward_kl(p.log(), q.log()), (p * (p / q).log()).sum(-1))
    wide = torch.nn.functional.pad(q, (0, 4))
    whole = torch.stack(
        [torch.tensor(entropies(x, y, 0.5)) for x, y in zip(a.softmax(-1).tolist(), wide.tolist(), strict=True)]
    )
    gone = 1 - p.sum(-1)
    torch.testing.assert_close(
        divergences.jsd(p.log(), q.log()), whole.double() - 0.5 * math.log(2) * gone, rtol=1e-5, atol=1e-6
    )
    z = torch.nn.functional.pad(b, (0, 4), value=-math.inf).requires_grad_()
    none = torch.nn.functional.pad(p.log(), (0, 4), value=-math.inf)
    for function in (divergences.forward_kl, divergences.reverse_kl, divergences.jsd, divergences.lk_hybrid):
        own: Tensor = function(none, z.log_softmax(-1))
        (slope,) = torch.autograd.grad(own.sum(), z)
        assert bool(own.isfinite().all()) and bool(slope.isfinite().all())
