"""Trimmed heads: what is kept, that nothing else changes, and that training sees only the kept columns."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from toys import random_prompts, save_toy, speculative, toy, toy_tokenizer
from transformers import AutoModelForCausalLM

from distill import divergences
from distill.data.samples import Sample, read_samples, write_samples
from distill.decoding.decode import plain
from distill.engines.torch.hugging_face import load_model, trim_head, trimmed_head, write_kept
from distill.engines.torch.model import TorchModel
from distill.errors import RecipeError
from distill.measuring.evaluation import METRICS, position_metrics
from distill.recipe import Sampler
from distill.surgery.layers import FAMILIES
from distill.surgery.vocabulary import (
    always_kept,
    check_size,
    count_tokens,
    expected_shares,
    largest_shares,
    rank_tokens,
    smallest_size,
)
from distill.teacher.distributions import CompactTeacher, DenseTeacher, Head, compress
from distill.training.learner import Columns
from distill.training.losses import head_loss
from distill.vocabulary.vocabulary import Vocabulary

torch.set_num_threads(1)
V, N, H, K = 61, 40, 16, 23
CPU = torch.device("cpu")


def kept_ids(seed: int = 0) -> list[int]:
    return sorted(numpy.random.default_rng(seed).permutation(V)[:K].tolist())


@pytest.mark.parametrize("kind, tied", [("llama", False), *((kind, True) for kind in FAMILIES)])
def test_kept_logits_are_the_full_ones(kind: str, tied: bool, tmp_path: Path) -> None:
    model = toy(kind, V, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    write_kept(tmp_path, kept_ids(), V, {})
    ids = torch.tensor([random_prompts(1, V, 0)[0]])
    full, trimmed = model(ids).logits, load_model(str(tmp_path), "float32", CPU)(ids).logits
    kept = torch.tensor(kept_ids())
    torch.testing.assert_close(trimmed[..., kept], full[..., kept], rtol=1e-6, atol=1e-6)
    assert int(torch.isneginf(trimmed).sum()) == full.shape[1] * (V - K)
    with trimmed_head(model, kept_ids()):
        assert torch.equal(model(ids).logits, trimmed)
    assert torch.equal(model(ids).logits, full)
    # Everyone else still loads the full head.
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path).eval()(ids).logits, full)
    assert torch.equal(load_model(str(tmp_path), "float32", CPU, trimmed=False)(ids).logits, full)


def test_speculative_text_of_a_trimmed_draft_is_the_targets() -> None:
    target = toy("qwen2", V, seed=0)
    draft = trim_head(copy.deepcopy(target), kept_ids())
    accepted = 0
    for prompt in random_prompts(6, V, 2):
        wanted = plain(TorchModel(target), prompt, 20, ())
        made = speculative(TorchModel(target), TorchModel(draft), prompt, 20, 4, ())
        assert made.tokens == wanted.tokens
        accepted += sum(r.accepted for r in made.rounds)
        # The draft is the target: it misses exactly where the target says what the draft cannot.
        assert all(token in kept_ids() for token, own in zip(made.tokens, made.from_draft, strict=True) if own)
    assert accepted > 0


@pytest.mark.parametrize("stored", [3, 8])
def test_loss_over_kept_columns(stored: int) -> None:
    """That of a head, labels and distributions cut by hand; tests/training/test_losses.py has its formulas. The other
    rows of the head learn nothing."""
    generator, kept = torch.Generator().manual_seed(stored), kept_ids(3)
    hidden, head, target = (torch.randn(*shape, generator=generator) for shape in ((N, H), (V, H), (N, V)))
    labels = torch.randint(0, V, (N,), generator=generator)
    found = compress(3 * target, stored, V)
    teacher = CompactTeacher(found.ids, found.log_probabilities, found.log_tail, V)
    columns, settings = Columns(V, kept, CPU), {"forward_kl": 0.9, "cross_entropy": 0.1}
    by_hand = torch.tensor([kept.index(label) if label in kept else K for label in labels.tolist()])
    assert torch.equal(columns.labels(labels), by_hand) and columns.count == K
    losses, gradients = [], []
    for whole in (True, False):
        own = (head if whole else head[kept]).clone().requires_grad_()
        rows = columns.rows(own) if whole else own
        spoken = columns.restrict(teacher) if whole else teacher.restrict(torch.tensor(kept))
        loss, _ = head_loss(hidden, rows, spoken, columns.labels(labels) if whole else by_hand, settings, 7)
        loss.backward()
        assert own.grad is not None
        losses.append(loss)
        gradients.append(own.grad)
    assert torch.equal(losses[0], losses[1]) and torch.equal(gradients[0][kept], gradients[1])
    gone = sorted(set(range(V)) - set(kept))
    assert torch.equal(gradients[0][gone], torch.zeros(len(gone), H))


def test_ceiling_bounds_acceptance() -> None:
    generator = torch.Generator().manual_seed(5)
    target, draft = (2 * torch.randn(N, V, generator=generator) for _ in range(2))
    silent = torch.ones(V, dtype=torch.bool)
    silent[kept_ids()] = False
    trimmed = draft.masked_fill(silent, -torch.inf)
    sampler = Sampler(temperature=0.7)

    def metrics(logits: torch.Tensor) -> dict[str, torch.Tensor]:
        return dict(zip(METRICS, position_metrics(target, logits, sampler, V).double().T, strict=True))

    got = metrics(trimmed)
    assert all(bool(values.isfinite().all()) for values in got.values())
    distribution = (target.double() / 0.7).softmax(-1)
    torch.testing.assert_close(got["acceptance_ceiling"], distribution[:, kept_ids()].sum(-1), rtol=1e-5, atol=1e-6)
    assert bool((got["acceptance_sampling"] <= got["acceptance_ceiling"] + 1e-6).all())
    # A draft that says the target's distribution on the kept tokens reaches the ceiling: Σ min(p, p / mass) = mass.
    best = metrics(target.masked_fill(silent, -torch.inf))
    torch.testing.assert_close(best["acceptance_sampling"], best["acceptance_ceiling"], rtol=1e-5, atol=1e-6)
    assert float(best["forward_kl"].abs().max()) < 1e-5
    p, q = (x[:, kept_ids()].double().log_softmax(-1) for x in (target, draft))
    torch.testing.assert_close(got["forward_kl"], divergences.forward_kl(p, q), rtol=1e-4, atol=1e-5)


def test_sizes_cover_every_domain(tmp_path: Path) -> None:
    """Two domains that write different tokens: the mass is reached in both, by no smaller multiple."""
    size = 4096
    draw = numpy.random.default_rng(0)
    code = (draw.zipf(1.3, 20_000) % 2000).tolist()
    prose = (2000 + draw.zipf(1.5, 4_000) % 2000).tolist()
    written = [Sample("x", [1, 2], code, source="code"), Sample("x", [1, 2], prose, source="prose")]
    write_samples(tmp_path / "answers.arrow", written)
    counts = count_tokens(read_samples(tmp_path / "answers.arrow", "answers"), size)
    assert {name: int(own.sum()) for name, own in counts.items()} == {"code": 20_000, "prose": 4_000}
    forced = list(range(4000, 4090))
    order = rank_tokens(counts, forced)
    assert sorted(order) == list(range(size)) and set(order[:90]) == set(forced)
    found = smallest_size(counts, order, len(forced), 0.99)
    (kept, mass), (less, less_mass) = largest_shares(counts, order, found), largest_shares(counts, order, found - 256)
    assert found % 256 == 0 and min(mass.values()) >= 0.99 > min(less_mass.values())
    assert set(forced) <= set(less) and kept == sorted(set(kept)) and len(kept) == found
    assert largest_shares(counts, order, size) == (list(range(size)), {"code": 1.0, "prose": 1.0})


@pytest.mark.parametrize("kind", ["dense", "compact"])
def test_expected_shares_are_the_mean_distribution(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against softmax in fp64; blocks weigh by their scored positions, and an unwritten token has its share."""
    draw = numpy.random.default_rng(0)
    scored, vocabulary, width = [3, 0, 300, 17], 40, 6
    head, states = draw.normal(size=(vocabulary, width)), [draw.normal(size=(count, width)) for count in scored]
    logits = numpy.concatenate(states) @ head.T
    exact = numpy.exp(logits) / numpy.exp(logits).sum(-1, keepdims=True)

    def distributions(index: torch.Tensor) -> DenseTeacher | CompactTeacher:
        hidden = torch.tensor(states[int(index)], dtype=torch.float32)
        dense = DenseTeacher(hidden, Head(torch.tensor(head, dtype=torch.float32)[:vocabulary]))
        if kind == "dense" or not len(hidden):
            return dense
        found = compress(dense.chunk(slice(0, len(hidden))).log_probabilities, 8, vocabulary)
        return CompactTeacher(found.ids, found.log_probabilities, found.log_tail, vocabulary)

    mask = torch.zeros(4, 300, dtype=torch.bool)
    for block, count in enumerate(scored):
        mask[block, :count] = True
    source: Any = SimpleNamespace(
        packed=SimpleNamespace(scored=mask.sum(1)),
        blocks=4,
        vocabulary=vocabulary,
        read=lambda index: SimpleNamespace(distributions=lambda _: distributions(index)),
    )
    found = expected_shares(source, torch.device("cpu"))
    if kind == "compact":
        top = numpy.argsort(-exact, axis=-1)[:, 8:]
        numpy.put_along_axis(exact, top, 0, axis=-1)
    numpy.testing.assert_allclose(found, exact.mean(0), atol=1e-6)
    monkeypatch.setattr("distill.surgery.vocabulary.MAX_POSITIONS", 160)
    fewer = expected_shares(source, torch.device("cpu"))  # every second block: 3 and 300 positions
    numpy.testing.assert_allclose(fewer, exact[:303].mean(0), atol=1e-6)
    counts = {"answers": numpy.eye(vocabulary, dtype=numpy.int64)[5]}
    likeliest = int(numpy.argmax(numpy.delete(found, 5)))
    assert rank_tokens(counts, [], found)[:2] == [5, likeliest + (likeliest >= 5)]
    assert rank_tokens(counts, [7], found)[:2] == [7, 5]


def test_always_kept(tmp_path: Path) -> None:
    tokenizer = toy_tokenizer(330)
    folder = save_toy(toy("qwen2", 330), tokenizer, tmp_path)
    vocabulary = Vocabulary.read(folder)
    kept = set(always_kept(vocabulary))
    assert {tokenizer.eos_token_id} <= kept
    assert {bytes([b]) for b in range(256)} <= {vocabulary.bytes_of[i] for i in kept}
    words = {i for i, content in enumerate(vocabulary.bytes_of) if content and len(content) > 1 and content.isalpha()}
    assert words and not words & (kept - {tokenizer.eos_token_id})


@pytest.mark.parametrize("size", [300, 256, 512 + 256 * 8])
def test_impossible_sizes(size: int) -> None:
    with pytest.raises(RecipeError, match=r"cut\.trim is"):
        check_size(size, forced=290, vocabulary=2000, stored=32)
    check_size(512, forced=290, vocabulary=2000, stored=32)
    check_size(None, forced=290, vocabulary=2000, stored=32)
