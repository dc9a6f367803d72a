"""Trees whose rounds stay on the device: those of the host where nothing is drawn, and the target's distribution.

Legend: V vocabulary.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from branches import Branches, every
from static_table import StaticTable
from test_device_rounds import DRAFTS, MODELS, Waits, static
from test_exact_decoding import EXACT, PROMPT, SEEN, TEXT, Seen, output_distribution, pair
from torch import Tensor
from toys import blurred, random_prompts, toy

from distill.decoding import device_trees, verify
from distill.decoding.calibration import FEATURE_TERMS, Calibration
from distill.decoding.configured import TableDrafter
from distill.decoding.decode import Decoded, decode, decode_text, plain
from distill.decoding.drafters import Drafter, FallbackDrafter, LookupDrafter
from distill.decoding.lengths import Features
from distill.decoding.rules import Rules
from distill.decoding.trees import Shape, TreeDrafter
from distill.engines.torch.model import TorchModel, count
from distill.engines.torch.static import StaticTorchModel
from distill.errors import DataError
from distill.sampler import Sampler

torch.set_num_threads(1)

V = 61
Make = Callable[[Any, Rules], Drafter]


def tree(nodes: int, **settings: Any) -> Make:
    return lambda draft, rules: TreeDrafter(draft, rules.sampler, rules.random, nodes, **settings)


def after_lookups(make: Make) -> Make:
    return lambda draft, rules: FallbackDrafter(LookupDrafter(3, shortest=2), make(draft, rules))


FITTED = Calibration(0.3, (0.5, 0.2, -0.3, 0.4, 0.1), FEATURE_TERMS)
MIXED = Shape((-1, 0, -1, 1, 2, 0, 3))  # siblings apart, and a level that is not in one piece
GREEDY: dict[str, Make] = {
    "best-first": tree(9, depth=3, branching=5),
    "best-first, calibrated": tree(9, depth=3, calibration=FITTED),
    "one level": tree(9, depth=1),
    "one node": tree(1),
    "shape": tree(7, shape=MIXED, best=True),
    "shape of one level": tree(3, shape=Shape((-1, -1, -1)), best=True),
    "lookup, best-first": after_lookups(tree(9, depth=3)),
    "table": lambda *_: TableDrafter(None, 7, 3),
}


def outline(result: Decoded) -> tuple[Any, ...]:
    return result.tokens, result.from_draft, [(one.depth, one.drafted, one.accepted) for one in result.rounds]


@pytest.mark.parametrize("name", GREEDY)
@pytest.mark.parametrize("kind", ["qwen3", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_greedy_trees_are_those_of_the_host(kind: str, name: str) -> None:
    """Every round drafts and accepts as many, in one transfer and without another wait."""
    accepted, on_host, on_device = 0, (TorchModel(MODELS[kind]), TorchModel(DRAFTS[kind])), static(kind)
    prompts = [*random_prompts(1, V, seed=1, shortest=1), [5, 6, 7, 8] * 3]
    for prompt in prompts:
        rules, result = Rules(ends=(7,)), Decoded()
        expected = decode_text(on_host[0], GREEDY[name](on_host[1], rules), prompt, 16, rules)
        rounds = decode(on_device[0], GREEDY[name](on_device[1], rules), prompt, 16, rules, result)
        next(rounds)
        before = count.fetches
        with Waits() as waits:
            list(rounds)
        assert outline(result) == outline(expected) and not waits.found
        assert count.fetches - before == len(result.rounds) > 0
        accepted += sum(one.accepted for one in result.rounds)
    assert accepted > 1


def test_a_best_first_tree_takes_one_level_more_than_the_last_had_use_for() -> None:
    """Its text is the target's own whatever the levels are."""
    target, draft = static("llama")
    taken, drafter = list[int](), tree(6, depth=6, branching=4)(draft, Rules())
    step, grow = draft.step, draft.grow
    with mock.patch.object(draft, "grow", lambda *given: (taken.append(len(given[0])), grow(*given))[1]):
        text = decode_text(target, drafter, [1, 2, 3], 24, Rules())
    assert step == draft.step and text.tokens == plain(TorchModel(MODELS["llama"]), [1, 2, 3], 24).tokens
    assert max(taken) == 5 and len(text.rounds) < len(taken) < 5 * len(text.rounds)


def test_calibrated_chances_are_those_of_single_distributions() -> None:
    found = torch.tensor([[0.7, 0.2], [0.99999, 1e-7], [1.0, 0.0], [0.3, 0.3]], dtype=torch.float64)
    entropy = torch.tensor([0.9, 0.001, 0.0, 2.0], dtype=torch.float64)
    for position in (0, 3):
        expected = [
            FITTED.accept(position, Features(top, second, nats))
            for (top, second), nats in zip(found.tolist(), entropy.tolist(), strict=True)
        ]
        assert FITTED.accept_all(position, found, entropy).tolist() == pytest.approx(expected, rel=1e-12)


# The output's distribution, by enumeration.


def every_draw(branches: Branches) -> Any:
    """Each number that a round takes, below its chance or not; each token that it may draw."""

    def below(uniforms: Tensor, chances: Tensor) -> Tensor:
        turns = [branches.choose([chance, 1 - chance]) == 0 for chance in chances.flatten().tolist()]
        return torch.tensor(turns).view(chances.shape)

    def drawn(distributions: Tensor, uniforms: Tensor) -> Tensor:
        assert distributions.shape[:-1] == uniforms.shape
        rows = distributions.double() / distributions.double().sum(-1, keepdim=True)
        return torch.tensor([0 if row.isnan().any() else branches.choose(row.tolist()) for row in rows])

    return mock.patch.multiple(verify, below=below, unchecked_transform=drawn)


def enumerated(make: Make, verifier: str, sampler: Sampler, rounds: int = 1, vocabulary: int = 2) -> float:
    """How far the prefill's token, which is sure, and these rounds are from the target's distribution."""
    tables, seen = pair(vocabulary, 4), Seen()

    def run(chance: verify.Random) -> Decoded:
        target, draft = (StaticTable(table) for table in tables)
        rules, result = Rules(sampler, verifier, random=chance), Decoded()
        with every_draw(chance.__self__):  # type: ignore[attr-defined]
            for _ in itertools.islice(
                decode(target, make(draft, rules), PROMPT, TEXT, rules, result, True), rounds + 1
            ):
                pass
        return result

    results = list(every(run))
    for _, result in results:
        seen.add(result)
    assert seen.drafted > 1 and seen.accepted > 0
    return output_distribution(tables[0], sampler, [(weight, result.tokens) for weight, result in results])


@pytest.mark.parametrize(
    ("make", "verifier", "sampler", "rounds", "vocabulary"),
    [
        (tree(3, depth=2, branching=2), "match", Sampler(), 2, 2),
        (tree(2, depth=2, calibration=FITTED), "token", Sampler(1.2), 1, 3),
        (tree(3, shape=Shape((-1, 0, -1)), best=True), "distinct", Sampler(0.8), 1, 2),
        (tree(3, depth=2, branching=2), "greedy", Sampler(0.0), 2, 2),
        (tree(2, shape=Shape((-1, -1))), "token", Sampler(), 1, 2),
        (tree(2, shape=Shape((-1, 0))), "token", Sampler(1.3), 1, 2),
        (tree(2, shape=Shape((-1, -1))), "match", Sampler(), 1, 2),
        (tree(3, shape=Shape((-1, -1, 0)), distinct=True), "distinct", Sampler(), 1, 2),
        (tree(4, shape=Shape((-1, -1, -1, 0)), distinct=True), "distinct", Sampler(), 1, 2),
    ],
)
def test_the_output_follows_the_targets_distribution(
    make: Make, verifier: str, sampler: Sampler, rounds: int, vocabulary: int
) -> None:
    """The last shape asks for more siblings than there are tokens."""
    assert enumerated(make, verifier, sampler, rounds, vocabulary) < EXACT


def test_mistakes_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """A q that the tokens were not drawn from, and the target's own distribution in the place of the residual."""
    make = tree(2, shape=Shape((-1, -1)), distinct=True)
    assert enumerated(make, "distinct", Sampler()) < EXACT
    true_drawn = device_trees._drawn
    with monkeypatch.context() as patch:
        patch.setattr(device_trees, "_drawn", lambda *a: ((f := true_drawn(*a))[0], (f[1] + 0.5) / 2))
        assert enumerated(make, "distinct", Sampler()) > SEEN
    true_rejected = device_trees.DeviceTrees._rejected

    def of_p(self: Any, grown: Any, tokens: Tensor, logits: Tensor, random: Any) -> Any:
        largest, hits, _ = true_rejected(self, grown, tokens, logits, random)
        p = self.rules.sampler.unchecked(logits)[0]
        return largest, hits, verify.unchecked_transform(p, torch.zeros(len(p)))

    monkeypatch.setattr(device_trees.DeviceTrees, "_rejected", of_p)
    assert enumerated(tree(2, shape=Shape((-1, -1))), "token", Sampler()) > SEEN


# Faults.


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("make", [tree(4, depth=2), tree(3, shape=Shape((-1, -1, 0)))], ids=["best-first", "drawn"])
def test_logits_that_are_no_numbers_are_named(role: str, make: Make) -> None:
    models = {"target": toy(seed=3), "draft": blurred(toy(seed=3), 6, 0.03)}
    decoders = {name: StaticTorchModel(model) for name, model in models.items()}
    rules = Rules(Sampler(1.0), "token", random=random.Random(1).random)
    rounds = decode(decoders["target"], make(decoders["draft"], rules), [1, 2, 3], 16, rules, Decoded())
    next(rounds)
    models[role].config._name_or_path = f"the {role}"
    with torch.no_grad():
        models[role].model.norm.weight[0] = torch.nan
    before = decoders["target"].lengths
    with pytest.raises(DataError, match=rf"the {role} after {before[0] + 1} tokens are not finite: .* nan"):
        next(rounds)
    assert decoders["target"].lengths == before


@pytest.mark.parametrize("everywhere", [True, False])
def test_a_draft_without_tokens_proposes_what_there_is(everywhere: bool) -> None:
    """A trimmed head may leave −∞ everywhere, or all but one token: nodes without one are left out."""
    tables = pair(3, 1)
    tables[1].table[:, 0 if everywhere else 1 :] = -torch.inf
    makes = [tree(4, depth=2), tree(3, shape=Shape((-1, -1, 0)), best=True)]
    makes += [tree(3, shape=Shape((-1, -1, 0)), distinct=distinct) for distinct in (True, False)]
    for number, make in enumerate(makes):
        target, draft = (StaticTable(table) for table in tables)
        verifier = ("match", "match", "distinct", "token")[number]
        rules = Rules(Sampler(), verifier, random=random.Random(3).random)
        result = decode_text(target, make(draft, rules), PROMPT, 12, rules)
        drafted = {one.drafted for one in result.rounds}
        assert len(result.tokens) == 12 and max(drafted) == (0 if everywhere else 3 if verifier == "token" else 2)
