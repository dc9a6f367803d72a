"""Token weights against derivatives of the expected tokens per round, written out."""

from __future__ import annotations

import pytest
import torch

from distill.training.losses.weights import block_acceptance, token_weights, top_fraction


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_block_acceptance_is_the_derivative_of_expected_tokens(length: int) -> None:
    torch.manual_seed(length)
    alpha = torch.rand(2, 9, dtype=torch.float64)
    alpha[0, 4] = alpha[1, 8] = alpha[1, 0] = 0.0  # documents end there
    alpha.requires_grad_()
    total = alpha.new_zeros(())
    for row in alpha:
        for start in range(9):
            alive = alpha.new_ones(())
            for step in range(length):
                if start + step < 9:
                    alive = alive * row[start + step]
                    total = total + alive
    (expected,) = torch.autograd.grad(total, alpha)
    found = block_acceptance(alpha.detach(), length)
    assert torch.allclose(found, expected, atol=1e-12)


def test_top_fraction_takes_the_largest_of_each_block() -> None:
    divergence = torch.tensor([[5.0, 1.0, 9.0, 2.0], [4.0, 3.0, 2.0, 1.0]])
    scored = torch.tensor([[False, True, True, True], [True, True, False, False]])
    assert top_fraction(divergence, scored, 0.5).tolist() == [[0, 0, 1, 1], [1, 0, 0, 0]]
    assert torch.equal(top_fraction(divergence, scored, 1.0), scored.float())


def test_weights_follow_the_order_of_the_scored_positions() -> None:
    scored = torch.tensor([[True, False, True], [False, True, True]])
    values = torch.tensor([0.1, 0.4, 0.3, 0.2])
    assert token_weights("uniform", values, values, scored, 4, 0.5).tolist() == [1, 1, 1, 1]
    assert token_weights("top-fraction", values, values, scored, 4, 0.5).tolist() == [0, 1, 1, 0]
    single = token_weights("block-acceptance", values, values, scored, 1, 0.5)
    assert single.tolist() == [1, 1, 1, 1]  # with one drafted token every position is worth the same
    double = token_weights("block-acceptance", values, values, scored, 2, 0.5)
    # Alone: a round that starts there, at most one more token; of two neighbours each also gains from the other.
    assert double.tolist() == pytest.approx([1, 1, 1.2, 1.3])
