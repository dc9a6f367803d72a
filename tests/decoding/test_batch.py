"""Many sequences at once: every row's logits, texts, rounds and draws are those that it would have alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toys import blurred, decode_at_once, random_prompts, toy

from distill.data.samples import first_difference
from distill.decoding.decode import Decoded, decode_text, plain
from distill.decoding.drafters import ModelDrafter
from distill.decoding.lengths import AcceptedRatio, Fixed, LengthRule, ProbabilityFloor
from distill.decoding.rules import Rules
from distill.engines.loaded import BatchedTorchModel
from distill.engines.torch.model import TorchModel
from distill.engines.torch.static import StaticTorchModel
from distill.measuring.identity import top_gap
from distill.recipe import Sampler

torch.set_num_threads(1)

V = 61
TIE = 1e-4  # fp32: two logits this close are a rounding tie
KINDS = ("qwen2", "qwen3", "llama", "gemma2")  # of all families: test_families.py
HUGGING_FACE = {kind: toy(kind, seed=3) for kind in KINDS}
# In fp64 the logits, which are read in fp32, are the same however many rows and columns a call has: texts are equal
# without exception.
EXACT = {kind: toy(kind, seed=3).double() for kind in KINDS}
DRAFTS = {kind: blurred(model, 6, 0.03) for kind, model in EXACT.items()}


def prefill(hugging_face: Any, context: Sequence[int]) -> torch.Tensor:
    """Logits [S, V] after each token of `context`, computed from nothing and without a cache."""
    with torch.inference_mode():
        return hugging_face(torch.tensor([list(context)]), use_cache=False).logits[0]


# The model.


def any_calls(hugging_face: Any, rows: int, draws: random.Random, calls: int, make: Any = BatchedTorchModel) -> None:
    """Extend and roll back at random; after every call the logits are those of fresh prefills, row by row."""
    model = make(hugging_face, rows=rows)
    contexts: list[list[int]] = [[] for _ in range(rows)]
    for _ in range(calls):
        if draws.random() < 0.4:
            for context in contexts:
                size = len(context)
                del context[draws.choice([size, size, draws.randrange(size + 1), max(0, size - 2), 0]) :]
            model.rollback([len(context) for context in contexts])
        counts = [min(draws.choice([0, 0, 1, 1, 2, 5, 9, 40]), model.capacity - len(c)) for c in contexts]
        total = sum(counts)
        if total == 0:
            continue
        tokens = [draws.randrange(V) for _ in range(total)]
        want = draws.choice([None, None, [total - 1], [0, total - 1], [total - 1, 0, 0], []])
        got = model.extend(tokens, counts, want=want).full()
        expected, start = [], 0
        for context, taken in zip(contexts, counts, strict=True):
            context += tokens[start : start + taken]
            start += taken
            if taken:
                expected.append(prefill(hugging_face, context)[-taken:])
        fresh = torch.cat(expected)
        torch.testing.assert_close(got, fresh if want is None else fresh[want], rtol=0, atol=TIE)
        assert model.lengths == [len(context) for context in contexts]


@pytest.mark.parametrize("kind", ["qwen2", "gemma2"])
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 10**6), st.integers(1, 5))
def test_rows_after_anything_are_fresh_prefills(kind: str, seed: int, rows: int) -> None:
    any_calls(HUGGING_FACE[kind], rows, random.Random(seed), 12)


def test_eager_attention() -> None:
    hugging_face = toy("qwen3", seed=3, attn_implementation="eager")
    assert hugging_face.config._attn_implementation == "eager"
    any_calls(hugging_face, 3, random.Random(1), 15)


@pytest.mark.parametrize("make", [BatchedTorchModel, StaticTorchModel])
def test_padding_has_no_logits_and_messages_name_the_place(make: Any) -> None:
    model = make(HUGGING_FACE["qwen2"], rows=2, vocabulary=50)
    logits = model.extend([1, 2, 3], [1, 2])
    assert model.vocabulary_size == 50 and logits.full().shape == (3, 50)
    assert logits.place(2).endswith("row 1, after 2 tokens")
    assert (model.rows, model.capacity, model.max_leaves) == (2, 160, 0)


@pytest.mark.parametrize("make", [BatchedTorchModel, StaticTorchModel])
def test_refusals_change_nothing(make: Any) -> None:
    model = make(toy(max_position_embeddings=16), rows=2)
    model.extend([1, 2, 3, 4], [1, 3])
    bad: list[Callable[[], Any]] = [
        lambda: model.extend([], [0, 0]),
        lambda: model.extend([1, 2]),
        lambda: model.extend([1, 2], [2]),
        lambda: model.extend([1, 2], [1, 2]),
        lambda: model.extend([1, 2], [3, -1]),
        lambda: model.extend([1] * 15, [1, 14]),
        lambda: model.extend([V], [0, 1]),
        lambda: model.extend([-1], [0, 1]),
        lambda: model.extend([1, 2], [1, 1], want=[2]),
        lambda: model.extend([1, 2], [1, 1], want=[-1]),
        lambda: model.extend([1, 2], [1, 1], parents=[-1, -1]),
        lambda: model.keep([[0], []]),
        lambda: model.keep([[]]),
        lambda: model.rollback([1]),
        lambda: model.rollback([1, 3, 0]),
        lambda: model.rollback([2, 3]),
        lambda: model.rollback([0, -1]),
        lambda: make(model.model, rows=0),
    ]
    for call in bad:
        with pytest.raises(ValueError):
            call()
        assert model.lengths == [1, 3]
    model.keep([[], []])
    assert len(model.extend([5], [0, 1], want=[])) == 0 and model.lengths == [1, 4]
    torch.testing.assert_close(model.extend([6], [0, 1]).full()[0], prefill(model.model, [2, 3, 4, 5, 6])[-1])
    model.close()
    assert model.lengths == [0, 0]
    model.extend([1] * 32, [16, 16])


def test_a_call_that_fails_leaves_no_trace() -> None:
    hugging_face = toy(seed=3)
    model = BatchedTorchModel(hugging_face, 2)
    model.extend([1, 2, 3, 4], [1, 3])

    def out_of_memory(*_: Any) -> None:
        raise RuntimeError("out of memory")

    hook = hugging_face.model.layers[1].register_forward_pre_hook(out_of_memory)
    with pytest.raises(RuntimeError, match="out of memory"):
        model.extend([9] * 100, [50, 50])
    hook.remove()
    assert model.lengths == [1, 3]
    got = model.extend([5, 6], [1, 1]).full()
    expected = torch.stack([prefill(hugging_face, text)[-1] for text in ([1, 5], [2, 3, 4, 6])])
    torch.testing.assert_close(got, expected, rtol=0, atol=TIE)


# The loops.


def streams(count: int, seed: int) -> list[Callable[[], float]]:
    return [random.Random(f"{seed}/{row}").random for row in range(count)]


def summary(result: Decoded) -> tuple[Any, ...]:
    """Everything but the time."""
    rounds = [(r.depth, r.drafted, r.accepted) for r in result.rounds]
    return result.tokens, result.from_draft, rounds


def check_batch(
    pair: tuple[Any, Any],
    prompts: list[list[int]],
    limit: int,
    rules: Rules,
    length: int | Callable[[], LengthRule],
    argmax: bool = False,
    idle: int = 0,
    seed: int = 0,
) -> list[Decoded]:
    """Decode a batch and each of its prompts alone, and compare all that is not time."""
    rows = len(prompts) + idle
    batch = [BatchedTorchModel(model, rows) for model in pair]
    target, draft = (TorchModel(model) for model in pair)
    results = decode_at_once(*batch, prompts, limit, rules, length, streams(len(prompts), seed), argmax)
    assert len(results) == len(prompts)
    for prompt, result, draws in zip(prompts, results, streams(len(prompts), seed), strict=True):
        rule = length() if callable(length) else Fixed(length)
        drafter = ModelDrafter(draft, rule, rules.sampler, draws, argmax)
        expected = decode_text(target, drafter, prompt, limit, replace(rules, random=draws))
        assert summary(result) == summary(expected)
        assert result.prefill_seconds > 0 and result.seconds == pytest.approx(sum(r.seconds for r in result.rounds))
    return results


def share(results: Sequence[Decoded]) -> float:
    """Accepted ÷ drafted."""
    rounds = [r for result in results for r in result.rounds]
    return sum(r.accepted for r in rounds) / sum(r.drafted for r in rounds)


@pytest.mark.parametrize("kind", ["qwen2", "gemma2"])
def test_greedy_is_alone(kind: str) -> None:
    shares = []
    for length in range(1, 6):
        prompts = random_prompts(4, V, seed=length, shortest=1, longest=20)
        results = check_batch((EXACT[kind], DRAFTS[kind]), prompts, 20, Rules(), length, idle=length % 2)
        assert all(len(result.tokens) == 20 for result in results)
        shares.append(share(results))
    assert 0.1 < sum(shares) / 5 < 0.95  # a draft that is right some of the time, or this tests little


def test_end_tokens_inside_drafts() -> None:
    """Rows end at different times, some of them in the middle of an accepted draft; the others go on."""
    pair, prompts = (EXACT["qwen2"], blurred(EXACT["qwen2"], 6, 0.005)), random_prompts(6, V, seed=2)
    texts = [plain(TorchModel(pair[0]), prompt, 40).tokens for prompt in prompts]
    inside = 0
    for length, step in ((2, 4), (5, 1), (5, 9)):
        ends = {text[step + row] for row, text in enumerate(texts[:3])}
        results = check_batch(pair, prompts, 40, Rules(ends=ends), length)
        sizes = {len(result.tokens) for result in results}
        assert len(sizes) > 1
        inside += sum(result.tokens[-1] in ends and result.from_draft[-1] for result in results)
    assert inside >= 2


def test_context_ends() -> None:
    """Of the target, of the draft, and prompts that fill the context."""
    changes = {"seed": 5, "max_position_embeddings": 32}
    small = toy(**changes).double()
    large = toy(**{**changes, "max_position_embeddings": 48}).double()
    prompts = [random_prompts(1, V, seed=size, shortest=size, longest=size)[0] for size in (1, 20, 30, 31, 32)]
    for pair, length in (((small, large), 1), ((large, small), 4), ((small, small), 3)):
        results = check_batch(pair, prompts, 100, Rules(), length)
        room = pair[0].config.max_position_embeddings + 1
        assert [len(r.tokens) for r in results] == [room - len(prompt) for prompt in prompts]
    for limit in (1, 2):
        check_batch((large, small), prompts, limit, Rules(), 3)


class Counting(BatchedTorchModel):
    """Notes the counts of every call."""

    calls: list[list[int]]

    def extend(self, tokens: Any, counts: Any = None, parents: Any = None, want: Any = None) -> Any:
        self.calls.append(list(counts))
        return super().extend(tokens, counts, parents, want)


def test_one_target_call_a_round_and_none_for_ended_rows() -> None:
    target, draft = Counting(EXACT["qwen2"], 3), Counting(EXACT["qwen2"], 3)
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    text = plain(TorchModel(EXACT["qwen2"]), prompts[1], 20).tokens
    target.calls, draft.calls = [], []
    results = decode_at_once(target, draft, prompts, 20, Rules(ends=[text[4]]), 3)
    assert len(target.calls) == 1 + max(len(result.rounds) for result in results)
    assert target.calls[0] == [3, 1, 5]
    for row, result in enumerate(results):
        taken = [r.drafted + 1 for r in result.rounds]
        assert [calls[row] for calls in target.calls[1:]] == [*taken, *[0] * (len(target.calls) - 1 - len(taken))]
        assert all(r.accepted == r.drafted for r in result.rounds)  # a draft that is the target is always right
        asked = [r.drafted for r in result.rounds]
        # A round starts with two tokens: the prompt's last and the first new one, or those after full acceptance.
        read = len(prompts[row]) - 1 + sum(asked) + sum(1 for n in asked if n)
        assert sum(calls[row] for calls in draft.calls) == read
    assert len(results[1].tokens) == 5 < len(results[0].tokens)
    assert len(results[1].rounds) < len(results[0].rounds)
    assert results[1].seconds < results[0].seconds  # an ended row's clock stands still


SAMPLERS = {
    "temperature": Sampler(temperature=1.0),
    "truncated": Sampler(temperature=1.2, top_k=12, top_p=0.95),
    "penalty": Sampler(temperature=1.0).penalised(1.2),
}
CASES: dict[str, tuple[str, int | Callable[[], LengthRule], bool]] = {
    "token": ("token", 4, False),
    "block": ("block", 4, False),
    "match": ("match", 3, False),
    "match, argmax": ("match", 3, True),
    "token, floor before the draw": ("token", lambda: ProbabilityFloor(5, 0.1), False),
    "block, a length that learns": ("block", lambda: AcceptedRatio(3), False),
    "match, argmax with a floor": ("match", lambda: ProbabilityFloor(5, 0.3), True),
}


PAIRS = [
    *((case, "temperature") for case in CASES),
    *((case, "truncated") for case in ("token", "block", "match, argmax")),
    *((case, "penalty") for case in ("token", "match, argmax with a floor")),
]


@pytest.mark.parametrize(("case", "sampler"), PAIRS)
def test_sampled_is_alone(case: str, sampler: str) -> None:
    verifier, length, argmax = CASES[case]
    kind = KINDS[list(CASES).index(case) % len(KINDS)]
    prompts = random_prompts(4, V, seed=len(case), shortest=1, longest=15)
    rules = Rules(SAMPLERS[sampler], verifier, ends=[7, 11])
    results = check_batch((EXACT[kind], DRAFTS[kind]), prompts, 20, rules, length, argmax, seed=len(sampler))
    assert 0.02 < share(results) < 0.98


def test_penalty_and_floors_for_greedy_texts() -> None:
    pair, prompts = (EXACT["llama"], DRAFTS["llama"]), random_prompts(4, V, seed=3)
    check_batch(pair, prompts, 16, Rules(Sampler(temperature=0).penalised(1.3)), 3)
    check_batch(pair, prompts, 16, Rules(), lambda: ProbabilityFloor(6, 0.4))
    check_batch(pair, prompts, 16, Rules(), lambda: AcceptedRatio(2))
    check_batch(pair, prompts, 16, Rules(Sampler(temperature=0), "match"), 3)
    assert all(not r.drafted for result in check_batch(pair, prompts, 9, Rules(), 0) for r in result.rounds)


def test_prompts_are_read_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """All end with the last one, at the edge of a chunk too."""
    monkeypatch.setattr("distill.decoding.batch.PROMPT_TOKENS", 4)
    prompts = [random_prompts(1, V, seed=size, shortest=size, longest=size)[0] for size in (9, 1, 4, 5, 8)]
    for rules in (Rules(), Rules(Sampler(temperature=0.8), "block")):
        check_batch((EXACT["qwen3"], DRAFTS["qwen3"]), prompts, 8, rules, 3)
    target, draft = Counting(EXACT["qwen3"], 5), BatchedTorchModel(EXACT["qwen3"], 5)
    target.calls = []
    decode_at_once(target, draft, prompts, 1, Rules(), 3)
    assert target.calls == [[1, 0, 0, 0, 0], [4, 0, 0, 1, 4], [4, 1, 4, 4, 4]]


def test_batch_of_one() -> None:
    check_batch((EXACT["qwen2"], DRAFTS["qwen2"]), [[3]], 12, Rules(Sampler(temperature=1.0), "block"), 3)


# fp32, where batches of other shapes round in another way.


def test_single_precision_up_to_ties() -> None:
    hugging_face, prompts, width = toy(seed=5, max_position_embeddings=256), random_prompts(12, V, seed=7), 6
    single = TorchModel(hugging_face)
    target, draft = BatchedTorchModel(hugging_face, width), BatchedTorchModel(blurred(hugging_face, 6, 0.015), width)
    ties = 0
    for start in (0, width):  # a used pair starts anew
        some = prompts[start : start + width]
        for prompt, result in zip(some, decode_at_once(target, draft, some, 50, Rules(), 1 + start), strict=True):
            expected = plain(single, prompt, 50).tokens
            where = first_difference(expected, result.tokens)
            if where is not None:
                assert top_gap(single, [*prompt, *expected[:where]]) <= TIE
                ties += 1
    assert ties <= 1
