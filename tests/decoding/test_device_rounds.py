"""Rounds on the device: the same texts as on the host where nothing is drawn, and the same
distribution where tokens are. How often the host waits for them: test_budgets.py.

Legend: γ drafted tokens, V vocabulary.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from static_table import StaticTable
from test_batch import summary
from test_exact_decoding import EXACT, PROMPT, RECIPE, SEEN, Make, chains, decoded, pair
from toys import blurred, random_prompts, speculative, toy

from distill.decoding import decode as decode_module
from distill.decoding import verify
from distill.decoding.decode import Decoded, decode, decode_text, plain
from distill.decoding.drafters import NOTHING, FallbackDrafter, LookupDrafter, ModelDrafter, NoDrafter
from distill.decoding.lengths import AcceptedRatio, Fixed, LengthRule, ProbabilityFloor
from distill.decoding.on_device import device_verifier
from distill.decoding.rules import Rules
from distill.decoding.trees import TreeDrafter
from distill.engines.torch.model import TorchModel
from distill.engines.torch.static import StaticTorchModel
from distill.errors import DataError
from distill.recipe import Sampler
from distill.sampler import unchecked_probabilities

torch.set_num_threads(1)

V = 61
# In fp64 the logits are the same however many rows and columns a call has: texts are equal without exception. All
# families: test_families.py.
MODELS = {kind: toy(kind, seed=3).double() for kind in ("qwen2", "qwen3", "llama", "gemma2", "gemma3")}
DRAFTS = {kind: blurred(model, 6, 0.03) for kind, model in MODELS.items()}


def static(kind: str) -> tuple[StaticTorchModel, StaticTorchModel]:
    return StaticTorchModel(MODELS[kind]), StaticTorchModel(DRAFTS[kind])


# Greedy texts are those of the host.


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
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
    "expected-value": RECIPE["expected-value"],
    "beta": RECIPE["beta"],
    "n_min": lambda: ProbabilityFloor(4, 0.1, n_min=3),
}


@pytest.mark.parametrize("name", RULES)
def test_length_rules_see_what_they_see_on_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends inside drafts, tokens that are dropped after all: every round drafts as many."""
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


# The output's distribution, by enumeration.


def after_lookups(draft: Any, sampler: Sampler, chance: verify.Random) -> FallbackDrafter:
    return FallbackDrafter(LookupDrafter(2, 2), chains("fixed", False)(draft, sampler, chance))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "verifier", "sampler", "rounds", "vocabulary"),
    [
        (chains("fixed", False), "token", Sampler(), 2, 2),
        (chains("fixed", False), "block", Sampler(temperature=1.3), 2, 2),
        (chains("fixed", True), "match", Sampler(temperature=0.7), 2, 2),
        (chains("fixed", True), "greedy", Sampler(temperature=0.0), 2, 2),
        (chains("ratio", False), "token", Sampler(top_p=0.8), 2, 2),
        (chains("p_min", False), "token", Sampler(), 2, 2),
        (chains("p_min", False), "block", Sampler(), 2, 2),
        (chains("expected-value", True), "match", Sampler(), 2, 2),
        (lambda *_: LookupDrafter(2), "token", Sampler(temperature=1.1), 2, 2),
        (after_lookups, "block", Sampler(), 2, 2),
    ],
)
def test_the_output_follows_the_targets_distribution(
    make: Make, verifier: str, sampler: Sampler, rounds: int, vocabulary: int
) -> None:
    found, drafted, accepted = decoded(vocabulary, make, verifier, sampler, 4, rounds, on_device=True)
    assert found < EXACT and drafted > 1 and accepted > 0


def test_pairs_that_are_refused_show() -> None:
    assert decoded(3, chains("fixed", True), "greedy", Sampler(), 4, rounds=1, on_device=True)[0] > SEEN


# Faults, and what stays on the host.


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("drafts", ["chain", "chain that looks"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_named(role: str, drafts: str, temperature: float) -> None:
    models = {"target": toy(seed=3), "draft": blurred(toy(seed=3), 6, 0.03)}
    target, draft = (StaticTorchModel(model) for model in models.values())
    rules = Rules(
        Sampler(temperature=temperature), "token" if temperature else "greedy", random=random.Random(1).random
    )
    rule = Fixed(2) if drafts == "chain" else ProbabilityFloor(2, 0.0)
    drafter = ModelDrafter(draft, rule, rules.sampler, rules.random)
    rounds = decode(target, drafter, [1, 2, 3], 16, rules, Decoded())
    next(rounds)
    models[role].config._name_or_path = f"the {role}"
    with torch.no_grad():
        models[role].model.norm.weight[0] = torch.nan
    (before,) = target.lengths
    with pytest.raises(DataError, match=rf"the {role} after {before + 1} tokens are not finite: .* nan"):
        next(rounds)
    assert target.lengths == [before]
    if role == "target" and temperature:
        plainly = device_verifier(target, NoDrafter(), rules)
        assert plainly is not None
        with pytest.raises(DataError, match=rf"the target after {before + 1} tokens are not finite"):
            plainly.verify([5], NOTHING)


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize(
    ("rule", "verifier"),
    [
        (Fixed(2), "token"),
        (ProbabilityFloor(2, 0.0), "token"),
        (Fixed(2), "greedy"),
        (ProbabilityFloor(2, 0.0), "greedy"),
    ],
)
def test_a_draft_without_tokens_proposes_what_there_is(rule: LengthRule, verifier: str, everywhere: bool) -> None:
    """A trimmed head may leave −∞ everywhere, or all but one token: the round goes on with what there is."""
    tables = pair(3, 1)
    tables[1].table[:, 0 if everywhere else 1 :] = -torch.inf
    target, draft = (StaticTable(table) for table in tables)
    rules = Rules(Sampler(temperature=0.0 if verifier == "greedy" else 1.0), verifier, random=random.Random(3).random)
    result = decode_text(target, ModelDrafter(draft, rule, rules.sampler, rules.random), PROMPT, 12, rules)
    assert len(result.tokens) == 12 and max(one.drafted for one in result.rounds) == (0 if everywhere else 2)


def test_what_reads_the_text_stays_on_the_host() -> None:
    target, draft = static("qwen2")

    def drafter(model: Any, rules: Rules, rule: LengthRule | None = None) -> ModelDrafter:
        return ModelDrafter(model, rule or Fixed(3), rules.sampler, rules.random)

    def on_device(target: Any, drafter: Any, rules: Rules) -> tuple[bool, bool]:
        """Whether texts are verified on the device, and drafted."""
        verifier = device_verifier(target, drafter, rules)
        return verifier is not None, getattr(drafter, "on_device", None) is not None

    rules = Rules()
    on_host = TorchModel(DRAFTS["qwen2"])
    assert on_device(target, drafter(draft, rules), rules) == (True, True)
    penalised = Rules(Sampler(temperature=1.0).penalised(1.2), "token", random=random.Random(1).random)
    used = drafter(draft, rules)
    assert on_device(target, used, rules)[1] and on_device(target, used, penalised) == (False, False)
    assert on_device(target, drafter(draft, rules, ProbabilityFloor(4, 0.1, n_min=3)), rules) == (True, False)
    assert on_device(TorchModel(MODELS["qwen2"]), drafter(draft, rules), rules) == (False, False)
    assert on_device(target, drafter(on_host, rules), rules) == (True, False)
    assert on_device(target, TreeDrafter(draft, rules.sampler, rules.random, 4), rules) == (False, False)
    texts = []
    for models in ((target, draft), (TorchModel(MODELS["qwen2"]), on_host)):
        rules = replace(penalised, random=random.Random(1).random)
        texts.append(summary(decode_text(models[0], drafter(models[1], rules), [1, 2, 3], 12, rules)))
    assert texts[0] == texts[1]
    with pytest.raises(ValueError, match="tokens so far"):
        unchecked_probabilities(penalised.sampler, torch.zeros(1, 3))


def test_contexts_end() -> None:
    """Rounds get shorter where a context ends, of the target or of the draft."""
    small = [toy("qwen2", seed=3, max_position_embeddings=size).double() for size in (24, 18)]
    for target, draft in (small, small[::-1]):
        for make in (TorchModel, StaticTorchModel):
            found = speculative(make(target), make(draft), [1, 2, 3], 99, 4)
            assert found.tokens == plain(TorchModel(target), [1, 2, 3], 99).tokens
