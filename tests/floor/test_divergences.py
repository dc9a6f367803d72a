"""Every formula of distill.divergences against torch's own kl_div and plain loops in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distill import divergences
from distill.teacher.store import compress

torch.set_num_threads(1)


def logits(rows: int, columns: int, seed: int, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def stored(target: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """ids, log-probabilities and log tail in fp64, by sorting and adding up."""
    distribution = target.softmax(-1)
    ids = distribution.argsort(-1, descending=True)[:, :k]
    tail = torch.stack(
        [
            sum((row[j] for j in range(len(row)) if j not in set(own.tolist())), torch.tensor(0.0).double())
            for row, own in zip(distribution, ids, strict=True)
        ]
    )
    return ids, distribution.gather(-1, ids).log(), tail.log()


def merged(distribution: Tensor, ids: Tensor) -> Tensor:
    """The distribution with all columns outside ids merged into one last column."""
    rows = []
    for row, own in zip(distribution.tolist(), ids.tolist(), strict=True):
        rest = math.fsum(value for index, value in enumerate(row) if index not in set(own))
        rows.append([row[i] for i in own] + [rest])
    return torch.tensor(rows, dtype=torch.float64)


def kl(p: Tensor, q: Tensor) -> Tensor:
    return torch.nn.functional.kl_div(q.log(), p, reduction="none").sum(-1)


def close(left: Tensor, right: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


def test_kl_both_ways() -> None:
    a, b = logits(50, 23, 1), logits(50, 23, 2)
    close(divergences.forward_kl(a.log_softmax(-1), b.log_softmax(-1)), kl(a.softmax(-1), b.softmax(-1)))
    close(divergences.reverse_kl(a.log_softmax(-1), b.log_softmax(-1)), kl(b.softmax(-1), a.softmax(-1)))


def test_sums_by_loops() -> None:
    a, b = logits(20, 11, 3), logits(20, 11, 4)
    p, q = a.softmax(-1), b.softmax(-1)
    variation = divergences.total_variation(p, q)
    sampling = divergences.acceptance_sampling(p, q)
    match = divergences.acceptance_match(p, b)
    greedy = divergences.acceptance_greedy(a, b)
    tokens = torch.arange(20) % 11
    entropy = divergences.cross_entropy(b, tokens)
    for i in range(20):
        one, two = p[i].tolist(), q[i].tolist()
        assert variation[i].item() == pytest.approx(0.5 * math.fsum(abs(x - y) for x, y in zip(one, two, strict=True)))
        assert sampling[i].item() == pytest.approx(math.fsum(min(x, y) for x, y in zip(one, two, strict=True)))
        assert match[i].item() == pytest.approx(one[two.index(max(two))])
        assert greedy[i].item() == float(one.index(max(one)) == two.index(max(two)))
        assert entropy[i].item() == pytest.approx(-math.log(two[i % 11]))
    close(entropy, torch.nn.functional.cross_entropy(b, tokens, reduction="none"))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(2, 40), st.floats(0.01, 30))
def test_one_minus_variation_is_acceptance(seed: int, columns: int, scale: float) -> None:
    p, q = logits(8, columns, seed, scale).softmax(-1), logits(8, columns, seed + 1, scale).softmax(-1)
    close(1 - divergences.total_variation(p, q), divergences.acceptance_sampling(p, q))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(2, 24), st.floats(0.05, 10), st.data())
def test_bucketed_is_the_kl_of_merged_distributions(seed: int, columns: int, scale: float, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, columns - 1))
    a, b = logits(5, columns, seed, scale), logits(5, columns, seed + 1, scale)
    ids, logs, tail = stored(a, k)
    got = divergences.bucketed_forward_kl(ids, logs, tail, b)
    close(got, kl(merged(a.softmax(-1), ids), merged(b.softmax(-1), ids)), 1e-9)
    full = divergences.forward_kl(a.log_softmax(-1), b.log_softmax(-1))
    assert bool((got <= full + 1e-9).all())
    if k == columns - 1:  # a bucket of one token is that token
        close(got, full, 1e-9)


def test_bucketed_at_full_vocabulary_is_the_full_kl() -> None:
    a, b = logits(30, 17, 5), logits(30, 17, 6)
    ids, logs, _ = stored(a, 17)
    for empty in (-1e4, -math.inf):
        got = divergences.bucketed_forward_kl(ids, logs, torch.full((30,), empty, dtype=torch.float64), b)
        close(got, divergences.forward_kl(a.log_softmax(-1), b.log_softmax(-1)), 1e-11)


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


def test_aligned_distributions_are_zero_apart() -> None:
    a = logits(40, 19, 9)
    log_p, p = a.log_softmax(-1), a.softmax(-1)
    zero = torch.zeros(40, dtype=torch.float64)
    assert torch.equal(divergences.forward_kl(log_p, log_p), zero)
    assert torch.equal(divergences.reverse_kl(log_p, log_p), zero)
    assert torch.equal(divergences.total_variation(p, p), zero)
    close(divergences.acceptance_sampling(p, p), zero + 1)
    assert torch.equal(divergences.acceptance_greedy(a, a + 5), zero + 1)
    ids, logs, tail = stored(a, 6)
    close(divergences.bucketed_forward_kl(ids, logs, tail, a), zero, 1e-13)
    close(divergences.bucketed_forward_kl(ids, logs, tail, a + 100), zero, 1e-12)  # logits are free up to a constant


def test_one_hot_distributions() -> None:
    """Target one-hot: KL is minus the log of the draft's probability there, the other way infinite."""
    b = logits(7, 7, 10)
    hot = torch.full((7, 7), -math.inf, dtype=torch.float64).fill_diagonal_(0.0)
    q = b.softmax(-1)
    close(divergences.forward_kl(hot, b.log_softmax(-1)), -q.diagonal().log())
    with pytest.raises(ValueError, match="infinite at 7 positions"):
        divergences.reverse_kl(hot, b.log_softmax(-1))
    close(divergences.total_variation(hot.exp(), q), 1 - q.diagonal())
    close(divergences.acceptance_sampling(hot.exp(), q), q.diagonal())
    close(divergences.acceptance_match(hot.exp(), b), (b.argmax(-1) == torch.arange(7)).double())
    assert torch.equal(divergences.forward_kl(hot, hot), torch.zeros(7, dtype=torch.float64))
    assert torch.equal(divergences.reverse_kl(hot, hot), torch.zeros(7, dtype=torch.float64))
    other = hot.roll(1, 0)
    assert bool(divergences.forward_kl(hot, other).isposinf().all())
    close(divergences.total_variation(hot.exp(), other.exp()), torch.ones(7, dtype=torch.float64))


def test_padding_columns_change_nothing() -> None:
    a, b = logits(12, 9, 11), logits(12, 9, 12)
    wide = [torch.nn.functional.pad(x, (0, 4), value=-math.inf) for x in (a, b)]
    for function in (divergences.forward_kl, divergences.reverse_kl):
        close(function(*(x.log_softmax(-1) for x in wide)), function(a.log_softmax(-1), b.log_softmax(-1)))
    for function in (divergences.total_variation, divergences.acceptance_sampling):
        close(function(*(x.softmax(-1) for x in wide)), function(a.softmax(-1), b.softmax(-1)))
    assert torch.equal(divergences.acceptance_greedy(*wide), divergences.acceptance_greedy(a, b))
    close(divergences.acceptance_match(wide[0].softmax(-1), wide[1]), divergences.acceptance_match(a.softmax(-1), b))
    for k in (3, 8, 9):
        ids, logs, _ = stored(a, k)
        tail = stored(a, k)[2] if k < 9 else torch.full((12,), -math.inf, dtype=torch.float64)
        close(
            divergences.bucketed_forward_kl(ids, logs, tail, wide[1]),
            divergences.bucketed_forward_kl(ids, logs, tail, b),
        )
    close(divergences.cross_entropy(wide[1], torch.arange(12) % 9), divergences.cross_entropy(b, torch.arange(12) % 9))


def entropies(p: list[float], q: list[float], beta: float) -> float:
    """β KL(p ‖ m) + (1 − β) KL(q ‖ m) with Python's own numbers."""
    mixed = [beta * x + (1 - beta) * y for x, y in zip(p, q, strict=True)]
    one, two = (
        math.fsum(x * math.log(x / m) for x, m in zip(distribution, mixed, strict=True) if x > 0)
        for distribution in (p, q)
    )
    return beta * one + (1 - beta) * two


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.8])
def test_jsd(beta: float) -> None:
    a, b = logits(30, 17, 20), logits(30, 17, 21)
    a[3] = torch.full((17,), -math.inf).scatter(-1, torch.tensor([5]), 0.0)
    p, q = a.softmax(-1), b.softmax(-1)
    got = divergences.jsd(a.log_softmax(-1), b.log_softmax(-1), beta)
    for row in range(30):
        assert got[row].item() == pytest.approx(entropies(p[row].tolist(), q[row].tolist(), beta), rel=1e-12)
    close(got, divergences.jsd(b.log_softmax(-1), a.log_softmax(-1), 1 - beta), 1e-12)


def test_losses_of_acceptance_by_loops() -> None:
    a, b = logits(20, 11, 22), logits(20, 11, 23)
    b[0, a[0].argmin()] += 60  # an acceptance below the least
    p, q = a.softmax(-1), b.softmax(-1)
    nla = divergences.nla(p, q)
    lk = divergences.lk_hybrid(p.log(), q.log(), 3.0)
    for i in range(20):
        one, two = p[i].tolist(), q[i].tolist()
        alpha = math.fsum(min(x, y) for x, y in zip(one, two, strict=True))
        kl_ = math.fsum(x * math.log(x / y) for x, y in zip(one, two, strict=True))
        assert nla[i].item() == pytest.approx(-math.log(max(alpha, 1e-5)), rel=1e-12)
        assert lk[i].item() == pytest.approx(
            math.exp(-3 * alpha) * kl_ + (1 - math.exp(-3 * alpha)) * (1 - alpha), rel=1e-12
        )
    assert nla[0].item() == pytest.approx(-math.log(1e-5))


def test_gradients_of_the_losses() -> None:
    """Autograd through the plain forms against the closed ones of the field, and against finite differences."""
    a, b = logits(12, 9, 24), logits(12, 9, 25)
    p, log_p = a.softmax(-1), a.log_softmax(-1)
    q = b.softmax(-1)

    def slope(loss: Callable[[Tensor], Tensor]) -> Tensor:
        z = b.clone().requires_grad_()
        loss(z).sum().backward()
        assert z.grad is not None
        return z.grad

    close(slope(lambda z: divergences.forward_kl(log_p, z.log_softmax(-1))), q - p)
    reverse = divergences.reverse_kl(log_p, q.log()).unsqueeze(-1)
    close(slope(lambda z: divergences.reverse_kl(log_p, z.log_softmax(-1))), q * ((q / p).log() - reverse))
    m = (p + q) / 2
    close(
        slope(lambda z: divergences.jsd(log_p, z.log_softmax(-1))),
        q * ((q / m).log() - (q * (q / m).log()).sum(-1, keepdim=True)) / 2,
    )
    under = (q <= p).double()
    variation = -q * (under - (q * under).sum(-1, keepdim=True))
    close(slope(lambda z: divergences.total_variation(p, z.softmax(-1))), variation)
    alpha = divergences.acceptance_sampling(p, q).unsqueeze(-1)
    close(slope(lambda z: divergences.nla(p, z.softmax(-1))), variation / alpha)
    share = (-3 * alpha).exp()
    close(slope(lambda z: divergences.lk_hybrid(log_p, z.log_softmax(-1))), share * (q - p) + (1 - share) * variation)
    direction, step = logits(12, 9, 26), 1e-6

    def uneven(z: Tensor) -> Tensor:
        return divergences.jsd(log_p, z.log_softmax(-1), 0.2)

    difference = (uneven(b + step * direction) - uneven(b - step * direction)) / (2 * step)
    torch.testing.assert_close((slope(uneven) * direction).sum(-1), difference, rtol=1e-6, atol=1e-7)


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
