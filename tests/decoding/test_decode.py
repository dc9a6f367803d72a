"""Decoding: speculative text is plain text, rounds add up, caches roll back; PyTorch and GGUF."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_export import needs_llama
from toys import Scripted, blurred, random_prompts, save_toy, speculative, toy, toy_tokenizer

from distill.data.samples import first_difference
from distill.decoding.decode import Decoded, plain, room_for
from distill.decoding.verify import verify_greedy
from distill.engines.llama_cpp.model import GgufModel
from distill.engines.torch.model import TorchLogits, TorchModel
from distill.gguf.writer import export_gguf
from distill.measuring.identity import rounding_noise, top_gap

torch.set_num_threads(1)

V = 61
LENGTHS = range(1, 9)
TIE = 1e-4  # fp32: two logits this close are a rounding tie


def check_rounds(result: Decoded, prompt: Sequence[int], limit: int, length: int, ends: Sequence[int] = ()) -> None:
    """What must hold of any speculative result."""
    assert 1 <= len(result.tokens) <= limit and len(result.from_draft) == len(result.tokens)
    assert not set(result.tokens[:-1]) & set(ends)
    assert result.from_draft[0] is False and result.prefill_seconds > 0
    depth, flags = len(prompt), [False]
    for number, r in enumerate(result.rounds):
        assert r.depth == depth and 0 <= r.accepted <= r.drafted <= length and r.seconds > 0
        depth += r.accepted + 1
        flags += [True] * r.accepted + [False]
        if number < len(result.rounds) - 1:
            assert len(flags) < limit
    # Only the last round may have more tokens than were kept: those after an end token.
    assert len(flags) >= len(result.tokens) and result.from_draft == flags[: len(result.tokens)]
    assert len(flags) == len(result.tokens) or result.tokens[-1] in ends
    assert result.seconds == pytest.approx(sum(r.seconds for r in result.rounds))


# Scripted models: exact and fast.


def rule(seed: int, agreement: float, vocabulary: int, context: tuple[int, ...]) -> int:
    """The true next token, or with probability 1 − agreement another one, decided by the context alone."""
    truth = random.Random(f"{context[-3:]}/{len(context)}").randrange(vocabulary)
    draws = random.Random(f"{seed}/{context[-4:]}/{len(context)}")
    return truth if draws.random() < agreement else (truth + draws.randrange(1, vocabulary)) % vocabulary


@settings(max_examples=250, deadline=None)
@given(
    st.integers(0, 99),
    st.sampled_from([0.0, 0.3, 0.7, 0.95, 1.0]),
    st.integers(1, 6),
    st.integers(1, 40),
    st.integers(1, 8),
    st.integers(1, 50),
    st.integers(1, 50),
    st.sampled_from([(), (3,), (0, 7)]),
)
def test_speculative_is_plain(
    seed: int, agreement: float, start: int, limit: int, length: int, room: int, draft_room: int, ends: tuple[int, ...]
) -> None:
    vocabulary = 9
    prompt = [random.Random(seed + i).randrange(vocabulary) for i in range(start)]
    target = Scripted(functools.partial(rule, 0, 1.0, vocabulary), start + room, vocabulary)
    draft = Scripted(functools.partial(rule, seed, agreement, vocabulary), start + draft_room, vocabulary)
    expected = plain(target, prompt, limit, ends)
    truth, context = [], list(prompt)
    while len(truth) < min(limit, room + 1) and not (truth and truth[-1] in ends):
        truth.append(rule(0, 1.0, vocabulary, tuple(context)))
        context.append(truth[-1])
    assert expected.tokens == truth and expected.rounds == [] and not any(expected.from_draft)
    for _ in range(2):  # a used pair starts anew
        result = speculative(target, draft, prompt, limit, length, ends)
        assert result.tokens == truth
        check_rounds(result, prompt, limit, length, ends)
    if agreement == 1:
        assert all(r.accepted == r.drafted for r in result.rounds)
    if agreement == 0:
        assert all(r.accepted == 0 for r in result.rounds)
        assert len(result.rounds) == len(result.tokens) - 1


def test_full_rounds_of_a_perfect_draft() -> None:
    """Every round but the last drafts γ, accepts γ, and costs the target one call."""
    true = functools.partial(rule, 0, 1.0, 50)
    for length, limit in itertools.product(LENGTHS, (1, 2, 3, 30, 100)):
        target, draft = Scripted(true, 200, 50), Scripted(true, 200, 50)
        result = speculative(target, draft, [1, 2, 3], limit, length)
        assert len(result.tokens) == limit
        assert all(r.drafted == r.accepted == length for r in result.rounds[:-1])
        assert target.calls == [3, *(r.drafted + 1 for r in result.rounds)]
        assert len(result.rounds) == -(-(limit - 1) // (length + 1))


def test_verify_and_room() -> None:
    assert [verify_greedy([1, 2, 3, 4], p) for p in ([1, 2, 3], [1, 2, 9], [9, 2, 3], [1], [])] == [3, 2, 0, 1, 0]
    small, large = Scripted(len, 20, 9), Scripted(len, 30, 9)
    assert room_for(small, large, 5, 100) == 15 == room_for(large, small, 5, 100)
    assert room_for(large, large, 5, 7) == 7 and room_for(small, large, 25, 9) < 0


# PyTorch.


def check_pair(
    target: Any, draft: Any, cases: Iterable[tuple[int, list[int]]], tokens: int, noise: float = TIE
) -> None:
    """Speculative texts, by length and prompt, are plain ones; one in fifty may part from it at a rounding tie."""
    texts: dict[tuple[int, ...], list[int]] = {}
    ties = count = drafted = accepted = 0
    for length, prompt in cases:
        if (key := tuple(prompt)) not in texts:
            texts[key] = plain(target, prompt, tokens).tokens
        text = texts[key]
        result = speculative(target, draft, prompt, tokens, length)
        check_rounds(result, prompt, tokens, length)
        where = first_difference(text, result.tokens)
        if where is not None:
            gap = top_gap(target, [*prompt, *text[:where]])
            assert gap <= noise, (where, gap)
            ties += 1
        count += 1
        drafted += sum(r.drafted for r in result.rounds)
        accepted += sum(r.accepted for r in result.rounds)
    assert ties <= 0.02 * count
    assert 0.2 < accepted / drafted < 0.98  # a draft that is right some of the time, or this tests little


def test_torch_speculative_is_plain() -> None:
    """In fp32; test_families.py has all families, exactly, and plain text as transformers'."""
    hugging_face = toy(seed=5)
    target, draft = TorchModel(hugging_face), TorchModel(blurred(hugging_face, 6, 0.015))
    check_pair(target, draft, zip([*LENGTHS] * 2, random_prompts(16, V, seed=7), strict=True), 40)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_torch_logits_with_ties(dtype: torch.dtype) -> None:
    values = torch.tensor([[0, 2, 1, 2, 1, 1, 0], [5, 5, 5, 5, 5, 5, 5]], dtype=dtype)
    logits = TorchLogits(values)
    assert logits.argmax() == [1, 0]
    assert logits.full().dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    logits.full().zero_()
    assert torch.equal(logits.values, torch.tensor([[0, 2, 1, 2, 1, 1, 0], [5] * 7], dtype=dtype))  # full is a copy


# GGUF.


@needs_llama
def test_gguf_speculative_is_plain(gguf_toys: tuple[Path, Path]) -> None:
    """Every γ, to the end of both contexts; up to measured rounding ties."""
    with (
        GgufModel(gguf_toys[0], context=96, threads=1) as target,
        GgufModel(gguf_toys[1], context=80, threads=1) as draft,
    ):
        prompts = random_prompts(8, target.vocabulary_size, seed=13)
        noise = max(rounding_noise(target, prompt, plain(target, prompt, 9).tokens) for prompt in prompts)
        assert 0 < noise < 1e-2
        check_pair(target, draft, itertools.product(LENGTHS, prompts), 100, noise)


# Padding rows: no part in any distribution.


def padded(tokenizer: Any) -> Any:
    """A model with 20 rows more than tokens, the last of which would win everywhere."""
    model = toy("llama", len(tokenizer) + 20, tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight[-3] = 4 * model.lm_head.weight[:-20].abs().amax(0)
        model.lm_head.weight[-4] = -model.lm_head.weight[-3]
    return model


def test_torch_never_says_padding() -> None:
    tokenizer = toy_tokenizer()
    model, real = padded(tokenizer), len(tokenizer)
    prompt = tokenizer("def f(self)")["input_ids"]
    assert max(plain(TorchModel(model), prompt, 30).tokens) >= real  # else this tests nothing
    masked = TorchModel(model, real)
    assert masked.vocabulary_size == real and masked.extend(prompt).full().shape == (len(prompt), real)
    masked.rollback([0])
    assert max(plain(masked, prompt, 30).tokens) < real


@needs_llama
def test_gguf_never_says_padding(tmp_path: Path) -> None:
    tokenizer = toy_tokenizer()
    model, real = padded(tokenizer), len(tokenizer)
    export_gguf(save_toy(model, tokenizer, tmp_path / "padded"), tmp_path / "padded.gguf", "f32")
    prompt = tokenizer("def f(self)")["input_ids"]
    with GgufModel(tmp_path / "padded.gguf", context=64) as quantised:
        assert (quantised.file.head_rows, quantised.vocabulary_size) == (real + 20, real)
        assert plain(quantised, prompt, 30).tokens == plain(TorchModel(model, real), prompt, 30).tokens
        quantised.rollback([0])
        logits = quantised.extend(prompt).full()
        expected = model(torch.tensor([prompt])).logits[0, :, :real]
        torch.testing.assert_close(logits, expected, rtol=1e-2, atol=2e-2)  # the cache is f16


@needs_llama
def test_after_a_signal_a_new_text_begins_in_an_empty_cache(
    gguf_toys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        GgufModel(gguf_toys[0], context=32, threads=1) as model,
        GgufModel(gguf_toys[0], context=32, threads=1) as fresh,
    ):
        expected = fresh.extend([5, 3, 8]).full()
        step = model._context.decode_few

        def interrupted(*arguments: Any) -> Any:
            step(*arguments)
            raise KeyboardInterrupt

        monkeypatch.setattr(model._context, "decode_few", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.extend([9, 9, 9, 9])
        monkeypatch.undo()
        assert model.lengths == [0] and torch.equal(model.extend([5, 3, 8]).full(), expected)
        model._length = 0  # the signal came after llama.cpp's step and before our count of it
        model.rollback([0])
        assert torch.equal(model.extend([5, 3, 8]).full(), expected)
