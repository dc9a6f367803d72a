"""Rounds on the device: the same texts as on the host where nothing is drawn, the same distribution where tokens are,
and one transfer a round.

Legend: γ drafted tokens, V vocabulary.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from branches import Branches, every
from static_table import StaticTable
from tables import goodness
from test_batch import streams, summary
from test_exact_decoding import EXACT, PROMPT, SEEN, TEXT, Seen, chains, output_distribution, pair
from test_rounds import RECIPE
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from toys import KINDS, blurred, random_prompts, speculative, toy

from distill.decoding import on_device as device_round
from distill.decoding import verify
from distill.decoding.batch import decode_batch, plain_batch
from distill.decoding.decode import Decoded, decode, decode_text, plain
from distill.decoding.drafters import Drafter, FallbackDrafter, LookupDrafter, ModelDrafter
from distill.decoding.lengths import AcceptedRatio, Fixed, LengthRule, ProbabilityFloor
from distill.decoding.on_device import DeviceDraft, Drafted, RowRound, rounds_on_device
from distill.decoding.rules import Rules
from distill.engines.loaded import BatchedTorchModel
from distill.engines.torch.model import TorchModel, count
from distill.engines.torch.static import StaticTorchModel
from distill.errors import DataError
from distill.sampler import Sampler

torch.set_num_threads(1)

V = 61
# In fp64 the logits are the same however many rows and columns a call has: texts are equal without exception.
MODELS = {kind: toy(kind, seed=3).double() for kind in (*KINDS, "gemma2", "gemma3")}
SOME = [kind if kind in ("qwen3", "gemma3") else pytest.param(kind, marks=pytest.mark.slow) for kind in MODELS]
DRAFTS = {kind: blurred(model, 6, 0.03) for kind, model in MODELS.items()}


def static(kind: str, rows: int = 1) -> tuple[StaticTorchModel, StaticTorchModel]:
    return StaticTorchModel(MODELS[kind], rows=rows), StaticTorchModel(DRAFTS[kind], rows=rows)


# Greedy texts are those of the host.


@pytest.mark.parametrize("kind", SOME)
def test_greedy_texts_and_rounds_are_those_of_the_host(kind: str) -> None:
    on_host = TorchModel(MODELS[kind]), TorchModel(DRAFTS[kind])
    on_device, accepted = static(kind), 0
    for number, prompt in enumerate(random_prompts(4, V, seed=1, shortest=1)):
        expected = speculative(*on_host, prompt, 24, number + 1, [7])
        found = speculative(*on_device, prompt, 24, number + 1, [7])
        assert summary(found) == summary(expected) and found.tokens == plain(on_device[0], prompt, 24, [7]).tokens
        accepted += sum(r.accepted for r in found.rounds)
    assert accepted > 5


RULES: dict[str, Callable[[], LengthRule]] = {
    "ratio": lambda: AcceptedRatio(3, longest=5),
    "p_min": lambda: ProbabilityFloor(4, 0.2),
    "expected-value": RECIPE["expected-value, fitted"],
    "beta": RECIPE["beta"],
    "n_min": lambda: ProbabilityFloor(4, 0.1, n_min=3),
}


@pytest.mark.parametrize("name", RULES)
def test_length_rules_see_what_they_see_on_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Features, ends inside drafts, tokens that are dropped after all: every round drafts as many."""
    from types import SimpleNamespace

    from distill.decoding import decode as decode_module

    monkeypatch.setattr(decode_module, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    drafted: set[int] = set()
    for prompt in random_prompts(3, V, seed=2, longest=30):
        found = []
        for make in (TorchModel, StaticTorchModel):
            rules = Rules(ends=(7, 9))
            drafter = ModelDrafter(make(DRAFTS["qwen2"]), RULES[name](), rules.sampler, rules.random)
            result = decode_text(make(MODELS["qwen2"]), drafter, prompt, 24, rules)
            found.append(summary(result))
            drafted |= {r.drafted for r in result.rounds}
        assert found[0] == found[1]
    assert len(drafted) > 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_other_drafters_are_verified_on_the_device(temperature: float) -> None:
    """Their tokens come from the host; sampled, a lookup's texts follow from the same numbers as on the host."""
    repeated = [5, 6, 7, 8] * 4
    verifier = "match" if temperature else "greedy"
    target, draft = static("qwen2")
    for make in (
        lambda r: LookupDrafter(3),
        lambda r: FallbackDrafter(
            LookupDrafter(3, shortest=2), ModelDrafter(draft, Fixed(2), r.sampler, r.random, True)
        ),
    ):
        rules = Rules(Sampler(temperature), verifier, random=random.Random(1).random)
        result = decode_text(target, make(rules), repeated, 20, rules)
        assert sum(r.drafted for r in result.rounds) > 5 and len(result.tokens) == 20
        if not temperature:
            assert result.tokens == plain(TorchModel(MODELS["qwen2"]), repeated, 20).tokens


# The output's distribution, by enumeration.


def on_device(branches: Branches) -> Any:
    """Both ways to draw, taken in every way for row 0; the other rows' numbers are fixed."""
    true_below, true_draw = verify.below, verify.unchecked_transform

    def below(uniforms: Tensor, chances: Tensor) -> Tensor:
        first = [branches.choose([chance, 1 - chance]) == 0 for chance in chances[0].tolist()]
        return torch.cat([torch.tensor([first], dtype=torch.bool), true_below(uniforms[1:], chances[1:])])

    def drawn(distribution: Tensor, uniforms: Tensor) -> Tensor:
        mass = float(distribution[0].sum())
        first = branches.choose((distribution[0] / mass).tolist()) if mass else 0
        return torch.cat([torch.tensor([first]), true_draw(distribution[1:], uniforms[1:])])

    return mock.patch.multiple(verify, below=below, unchecked_transform=drawn)


def enumerated(
    make: Callable[[Any, Sampler, verify.Random], Drafter], verifier: str, sampler: Sampler, seen: Seen
) -> float:
    """How far the prefill's token and two rounds of `decode` are from the target's distribution; V = 2."""
    tables = pair(2, 1)

    def run(chance: verify.Random) -> Decoded:
        target, draft = (StaticTable(table) for table in tables)
        rules, result = Rules(sampler, verifier, random=chance), Decoded()
        with on_device(chance.__self__):  # type: ignore[attr-defined]
            rounds = decode(target, make(draft, sampler, chance), PROMPT, TEXT, rules, result, lossy=True)
            for _ in itertools.islice(rounds, 3):
                pass
        return result

    results = list(every(run))
    for _, result in results:
        seen.add(result)
    return output_distribution(tables[0], sampler, [(weight, result.tokens) for weight, result in results])


@pytest.mark.parametrize(
    ("name", "verifier", "argmax", "sampler"),
    [
        ("fixed", "token", False, Sampler()),
        ("fixed", "block", False, Sampler(1.3)),
        ("fixed", "match", True, Sampler(0.7)),
        ("fixed", "greedy", True, Sampler(0.0)),
        ("ratio", "token", False, Sampler(top_p=0.8)),
        ("p_min", "token", False, Sampler()),
        ("p_min", "block", False, Sampler()),
        ("expected-value", "match", True, Sampler()),
    ],
)
def test_the_output_follows_the_targets_distribution(name: str, verifier: str, argmax: bool, sampler: Sampler) -> None:
    seen = Seen()
    assert enumerated(chains(name, argmax), verifier, sampler, seen) < EXACT
    # Greedy, one way exists, in which this draft is wrong at once.
    assert seen.drafted == 2 and seen.accepted == (2 if sampler.temperature else 0)


def test_a_lookup_follows_the_targets_distribution() -> None:
    seen = Seen()
    assert enumerated(lambda *_: LookupDrafter(2), "token", Sampler(1.1), seen) < EXACT
    assert seen.drafted > 0


def test_a_draft_with_a_sampler_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, own = Seen(), Sampler(0.4)
    asked = list[Sampler]()
    unchecked = Sampler.unchecked
    monkeypatch.setattr(Sampler, "unchecked", lambda self, logits: (asked.append(self), unchecked(self, logits))[1])
    made = enumerated(lambda draft, _, chance: ModelDrafter(draft, Fixed(2), own, chance), "token", Sampler(1.2), seen)
    assert made < EXACT and seen.accepted == 2 and set(asked) == {own, Sampler(1.2)}


def test_mistakes_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """A q that the tokens were not drawn from, a residual that is p itself, and a greedy verifier under a sampler."""
    true_chains, true_residual = DeviceDraft.chains, verify.Verdict.residual

    def flattened(self: DeviceDraft, *arguments: Any) -> Drafted | None:
        found = true_chains(self, *arguments)
        assert found is not None and found.distributions is not None
        return replace(found, distributions=(found.distributions + 0.5) / 2)

    with monkeypatch.context() as patch:
        patch.setattr(DeviceDraft, "chains", flattened)
        assert enumerated(chains("fixed", False), "token", Sampler(), Seen()) > SEEN
    with monkeypatch.context() as patch:
        patch.setattr(verify.Verdict, "residual", lambda self, accepted: verify._position(self.p, accepted))
        assert enumerated(chains("fixed", False), "token", Sampler(), Seen()) > SEEN
    assert true_residual is verify.Verdict.residual
    assert enumerated(chains("fixed", True), "greedy", Sampler(), Seen()) > SEEN


def test_the_first_row_of_a_batch_follows_the_targets_distribution() -> None:
    """Texts of four tokens, beside a row of another length."""
    tables = pair(2, 1)

    def run(chance: verify.Random) -> list[int]:
        some = StaticTable(tables[0], 2), StaticTable(tables[1], 2)
        with on_device(chance.__self__):  # type: ignore[attr-defined]
            randoms = [chance, lambda: 0.25]
            prompts = [PROMPT, [1, 0, 1]]
            return decode_batch(*some, prompts, 4, Rules(Sampler(), "token"), 2, randoms)[0].tokens

    assert output_distribution(tables[0], Sampler(), list(every(run))) < EXACT


# The output's distribution, by sampling from a model.


def least_p(
    model: Any, draft: Any, verifier: str, prompt: list[int], samples: int, argmax: bool, make: Any = StaticTorchModel
) -> float:
    """The p-value of Pearson's χ² of the first three tokens after a prompt, against the model's own distribution."""
    size, rows, seen = model.config.vocab_size, 64, torch.zeros(model.config.vocab_size**3)
    pair_of_rows = make(model, rows=rows), make(draft, rows=rows)
    rules = Rules(Sampler(), verifier)
    for start in range(0, samples, rows):
        texts = decode_batch(*pair_of_rows, [prompt] * rows, 4, rules, 2, streams(rows, start), argmax)
        for text in texts:
            a, b, c = text.tokens[:3]
            seen[(a * size + b) * size + c] += 1
    texts_of_two = [[a, b] for a in range(size) for b in range(size)]
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *text] for text in texts_of_two]), use_cache=False).logits
    chances = logits[:, len(prompt) - 1 :].double().softmax(-1).view(size, size, 3, size)
    expected = chances[0, 0, 0][:, None, None] * chances[:, 0, 1][:, :, None] * chances[:, :, 2]
    return goodness(seen.double()[None], expected.flatten()[None], rare=8)


@pytest.mark.parametrize(
    ("kind", "verifier", "argmax"),
    [pytest.param("qwen2", "token", False, marks=pytest.mark.slow), ("gemma3", "block", False)],
)
def test_sampled_texts_follow_the_models_distribution(
    kind: str, verifier: str, argmax: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = toy(kind, vocabulary=5, seed=4, initializer_range=0.15)
    draft = toy(kind, vocabulary=5, seed=9, initializer_range=0.15)
    assert least_p(model, draft, verifier, [1, 2, 3], 1920, argmax) > 1e-3
    # The next token's number is the last acceptance's: what is accepted narrows where it falls.
    true_numbers = device_round.DeviceRounds._numbers

    def shared(self: Any, rows: Any, longest: int) -> list[list[float]]:
        return [[*line[:-1], line[-2:][0]] for line in true_numbers(self, rows, longest)]

    monkeypatch.setattr(device_round.DeviceRounds, "_numbers", shared)
    assert least_p(model, draft, verifier, [1, 2, 3], 1920, argmax) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(("verifier", "argmax"), [("token", False), ("block", False), ("match", True)])
def test_texts_that_the_host_samples_follow_the_models_distribution(verifier: str, argmax: bool) -> None:
    model, draft = (toy("llama", vocabulary=5, seed=seed, initializer_range=0.15) for seed in (4, 9))
    assert least_p(model, draft, verifier, [1, 2, 3], 1920, argmax, BatchedTorchModel) > 1e-3


# Rows.


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
@pytest.mark.parametrize("case", ["greedy", "token", "block, p_min", "match, ratio"])
def test_a_row_gets_the_text_that_it_would_get_alone(kind: str, case: str) -> None:
    sampler = Sampler(0.0) if case == "greedy" else Sampler(0.9, top_k=20)
    verifier, argmax = case.split(",")[0], case.startswith("match")
    rule: Callable[[], LengthRule] = lambda: (  # noqa: E731
        ProbabilityFloor(3, 0.1) if "p_min" in case else AcceptedRatio(2, longest=4) if "ratio" in case else Fixed(3)
    )
    rules = Rules(sampler, verifier, ends=(7,))
    prompts = random_prompts(5, V, seed=3, shortest=1, longest=20)
    results = decode_batch(*static(kind, 6), prompts, 16, rules, rule, streams(5, 0), argmax)
    single = static(kind)
    for prompt, result, draws in zip(prompts, results, streams(5, 0), strict=True):
        drafter = ModelDrafter(single[1], rule(), sampler, draws, argmax)
        alone = decode_text(single[0], drafter, prompt, 16, replace(rules, random=draws))
        assert summary(result) == summary(alone)
    assert sum(r.accepted for result in results for r in result.rounds) > 5


def test_plain_rows_are_plain_texts_of_the_host() -> None:
    """Plain sampling takes one number a token here as there."""
    rules, prompts = Rules(Sampler(0.8), "token"), random_prompts(4, V, seed=5)
    results = plain_batch(StaticTorchModel(MODELS["llama"], rows=4), prompts, 12, rules, streams(4, 1))
    for prompt, result, draws, again in zip(prompts, results, streams(4, 1), streams(4, 1), strict=True):
        for make, numbers in ((TorchModel, draws), (StaticTorchModel, again)):
            alone = plain(make(MODELS["llama"]), prompt, 12, rules=replace(rules, random=numbers))
            assert result.tokens == alone.tokens


# One transfer a round.


class Waits(TorchDispatchMode):
    """Operations whose result the host would have to wait for: a number that is read, a shape that depends on data."""

    NAMES = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique", "item")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if any(name == wait or name.startswith(f"_{wait}") for wait in self.NAMES):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def transfers(kind: str, drafter: Callable[[Any, Rules], Drafter], rules: Rules) -> list[tuple[int, int]]:
    """Of each round: tokens drafted, and transfers to the host. Nothing else may wait for the device."""
    target, draft = static(kind)
    result, found, before = Decoded(), [], 0
    for number, _ in enumerate(decode(target, drafter(draft, rules), [1, 2, 3], 16, rules, result)):
        if number:
            found.append((result.rounds[-1].drafted, count.fetches - before))
        before = count.fetches
    rounds = decode(target, drafter(draft, rules), [1, 2, 3], 16, rules, Decoded())
    next(rounds)  # the prompt, and the first token, which is drawn on the host
    with Waits() as waits:
        list(rounds)
    assert not waits.found
    return found


@pytest.mark.parametrize("kind", SOME)
def test_one_transfer_a_round(kind: str) -> None:
    for rules in (Rules(), Rules(Sampler(0.9, 20, 0.95, 0.01), "token", random=random.Random(1).random)):
        found = transfers(kind, lambda draft, r: ModelDrafter(draft, Fixed(3), r.sampler, r.random), rules)
        assert len(found) > 3 and all(waits == 1 for _, waits in found)


def test_a_rule_that_looks_costs_one_transfer_a_token() -> None:
    rules = Rules(Sampler(0.9), "block", random=random.Random(1).random)
    found = transfers(
        "qwen2", lambda draft, r: ModelDrafter(draft, ProbabilityFloor(3, 0.3), r.sampler, r.random), rules
    )
    assert all(drafted <= waits - 1 <= min(drafted + 1, 3) for drafted, waits in found) and any(d for d, _ in found)


def test_plain_sampling_costs_one_transfer_a_token() -> None:
    model, rules = StaticTorchModel(MODELS["llama"]), Rules(Sampler(0.9), "token", random=random.Random(1).random)
    before = count.fetches
    assert len(plain(model, [1, 2], 11, rules=rules).tokens) == 11 and count.fetches - before == 11


# Faults, and what stays on the host.


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("rule", [Fixed(2), ProbabilityFloor(2, 0.0)], ids=["fixed", "p_min"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_named(role: str, rule: LengthRule, temperature: float) -> None:
    models = {"target": toy(seed=3), "draft": blurred(toy(seed=3), 6, 0.03)}
    decoders = {name: StaticTorchModel(model) for name, model in models.items()}
    rules = Rules(Sampler(temperature), "token" if temperature else "greedy", random=random.Random(1).random)
    drafter = ModelDrafter(decoders["draft"], rule, rules.sampler, rules.random)
    rounds = decode(decoders["target"], drafter, [1, 2, 3], 16, rules, Decoded())
    next(rounds)
    models[role].config._name_or_path = f"the {role}"
    with torch.no_grad():
        models[role].model.norm.weight[0] = torch.nan
    before = decoders["target"].lengths
    with pytest.raises(DataError, match=rf"the {role} after {before[0] + 1} tokens are not finite"):
        next(rounds)
    assert decoders["target"].lengths == before
    if role == "target" and temperature:
        before[0] += 1
        plainly = rounds_on_device(decoders["target"], rules, None)
        assert plainly is not None
        with pytest.raises(DataError, match=rf"the target after {before[0]} tokens are not finite"):
            plainly.run([RowRound(0, [5], rules.random)])


def test_a_draft_without_tokens_proposes_nothing() -> None:
    """A trimmed head may leave −∞ everywhere: the round goes on with what there is."""
    tables = pair(3, 1)
    tables[1].table[:] = -torch.inf
    for rule, sampler in itertools.product((Fixed(2), ProbabilityFloor(2, 0.0)), (Sampler(0.0), Sampler())):
        target, draft = (StaticTable(table) for table in tables)
        rules = Rules(sampler, "token" if sampler.temperature else "greedy", random=random.Random(3).random)
        result = decode_text(target, ModelDrafter(draft, rule, sampler, rules.random), PROMPT, 8, rules)
        assert len(result.tokens) == 8 and not any(r.drafted for r in result.rounds)


def test_what_reads_the_text_stays_on_the_host() -> None:
    target, draft = static("qwen2")
    assert rounds_on_device(target, Rules(), draft) is not None
    penalised = Rules(Sampler(1.0, repetition_penalty=1.2), "token", random=random.Random(1).random)
    assert rounds_on_device(target, penalised, draft) is None
    assert rounds_on_device(TorchModel(MODELS["qwen2"]), Rules(), draft) is None
    assert rounds_on_device(target, Rules(), TorchModel(DRAFTS["qwen2"])) is None
    assert rounds_on_device(target, Rules(), StaticTorchModel(DRAFTS["qwen2"], rows=2)) is None
    texts = []
    for models in ((target, draft), (TorchModel(MODELS["qwen2"]), TorchModel(DRAFTS["qwen2"]))):
        rules = replace(penalised, random=random.Random(1).random)
        drafter = ModelDrafter(models[1], Fixed(3), rules.sampler, rules.random)
        texts.append(summary(decode_text(models[0], drafter, [1, 2, 3], 12, rules)))
    assert texts[0] == texts[1]
    with pytest.raises(ValueError, match="tokens so far"):
        penalised.sampler.unchecked(torch.zeros(1, 3))


def test_contexts_end() -> None:
    """Rounds get shorter where a context ends, of the target or of the draft."""
    small = [toy("qwen2", seed=3, max_position_embeddings=size).double() for size in (24, 18)]
    for target, draft in (small, small[::-1]):
        for make in (TorchModel, StaticTorchModel):
            found = speculative(make(target), make(draft), [1, 2, 3], 99, 4)
            assert found.tokens == plain(TorchModel(target), [1, 2, 3], 99).tokens
