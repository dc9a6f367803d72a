"""Drafts rounded by our kernel: the head over a large vocabulary against the whole one, and texts decoded with it."""

from __future__ import annotations

import pytest
import torch
from test_packed import needs_kernel
from toys import speculative, toy

from distill.decoding.decode import plain
from distill.engines.loaded import torch_decoder
from distill.engines.torch.hugging_face import KeptHead, trim_head
from distill.engines.torch.products import models, shortlist
from distill.engines.torch.products.shortlist import ShortlistHead, factors, own_states
from distill.recipe import PyTorch

torch.set_num_threads(1)


def test_factors_lose_what_no_factors_of_their_rank_keep() -> None:
    numbers = torch.Generator().manual_seed(1)
    weight, states = torch.randn(500, 320, generator=numbers), torch.randn(900, 320, generator=numbers) + 1
    narrow, wide = (one.double() for one in factors(weight, states))
    square = states.double().T @ states.double() / len(states)
    square += shortlist.RIDGE * square.diagonal().mean() * torch.eye(320)
    lost = weight.double() - wide @ narrow
    singular = torch.linalg.svdvals(weight.double() @ torch.linalg.cholesky(square))
    assert narrow.shape == (64, 320)
    least = singular[64:].square().sum()  # Eckart and Young
    assert torch.einsum("vh,hg,vg", lost, square, lost) == pytest.approx(float(least), rel=1e-3)


@needs_kernel
@pytest.mark.parametrize(("vocabulary", "count"), [(70_003, 512), (3000, 30), (1000, 1000), (37, 512)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_logits_of_a_shortlist(monkeypatch: pytest.MonkeyPatch, vocabulary: int, count: int, with_bias: bool) -> None:
    """Exact at tokens that hold the largest rough logits, −∞ at others, for every number of rows."""
    monkeypatch.setattr(shortlist, "TOKENS", count)
    numbers = torch.Generator().manual_seed(2)
    weight, x = (torch.randn(n, 64, generator=numbers).bfloat16() for n in (vocabulary, 5))
    bias = torch.randn(vocabulary, generator=numbers).bfloat16() if with_bias else None
    head = ShortlistHead(weight, bias, torch.randn(400, 64, generator=numbers))
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    for rows in (x, x[:1], x[None, :2]):
        logits, rough = head(rows), head._rough(torch.nn.functional.linear(rows, head._narrow))
        listed = logits.isfinite()
        assert logits.shape == rough.shape == (*rows.shape[:-1], vocabulary)
        least = rough.masked_fill(~listed, torch.inf).amin(-1, keepdim=True)
        assert (listed == (rough >= least)).all()
        sizes = listed.sum(-1)
        assert (sizes >= min(count, vocabulary)).all() and (sizes <= max(4 * count, 64)).all()
        near = exact.view(-1, 5, vocabulary)[:, : logits[..., 0].numel()].view_as(logits)
        torch.testing.assert_close(logits.double()[listed], near[listed], rtol=5e-3, atol=5e-2)


@needs_kernel
def test_all_rough_logits_alike() -> None:
    weight = torch.ones(2000, 64).bfloat16()
    head = ShortlistHead(weight, None, torch.ones(4, 64))
    assert (head(torch.ones(1, 64).bfloat16()) == 64).all()  # ties are all listed


@needs_kernel
@pytest.mark.parametrize(("kind", "trimmed"), [("llama", False), ("llama", True), ("gemma3_text", False)])
def test_a_draft_with_a_shortlist(monkeypatch: pytest.MonkeyPatch, kind: str, trimmed: bool) -> None:
    monkeypatch.setattr(models, "MIN_VALUES", 1)
    monkeypatch.setattr(shortlist, "TOKENS", 16)
    sizes = {"hidden_size": 128, "intermediate_size": 96, "head_dim": 32}
    target, settings = torch_decoder(toy(kind, vocabulary=2000, **sizes)), PyTorch(draft_weights="int4")
    model = toy(kind, vocabulary=2000, **sizes).bfloat16()
    if trimmed:
        model = trim_head(model, range(0, 2000, 2))
    whole = torch_decoder(model, None, settings, is_draft=True)
    monkeypatch.setattr(models, "MIN_VOCABULARY", 1000)
    draft = torch_decoder(model, None, settings, is_draft=True)
    head = draft.model.lm_head  # type: ignore[attr-defined]
    assert isinstance(head.product if trimmed else head, ShortlistHead) and isinstance(head, KeptHead) is trimmed
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    logits, exact = draft.extend(ids).full(), whole.extend(ids).full()
    listed = logits.isfinite()
    assert (listed.sum(-1) < 200).all() and (listed <= exact.isfinite()).all()
    error = (logits - exact)[listed]  # the whole head is rounded to 4 bits
    assert error.abs().mean() < 0.15 * exact[exact.isfinite()].std()
    assert speculative(target, draft, [3, 1, 4], 24, 3).tokens == plain(target, [3, 1, 4], 24).tokens


def test_own_states_are_those_before_the_head() -> None:
    model = toy("qwen3", vocabulary=300)
    states = own_states(model)
    assert states.shape == (shortlist.TEXTS * shortlist.TEXT_TOKENS, 32)
    first = torch.randint(0, 300, (shortlist.TEXTS, 1), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(model.lm_head(states[: shortlist.TEXTS]), model(first).logits[:, -1])
    assert torch.equal(states, own_states(model))  # the same for every command
