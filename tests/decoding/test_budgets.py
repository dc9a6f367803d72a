"""What decoding asks of an accelerator, counted exactly on the pretend one: waits and bytes of rounds, launches of
steps. docs/decoding.md has the tables that these counts make. The texts are the CPU's: test_pretend_rounds.py.

Legend: V vocabulary.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from test_device_rounds import V
from toys import EXPERTS, FAMILIES, SHORT, toy

from distill.decoding.decode import Decoded, decode
from distill.decoding.drafters import Drafter, FallbackDrafter, LookupDrafter, ModelDrafter, NoDrafter
from distill.decoding.lengths import AcceptedRatio, Fixed, ProbabilityFloor
from distill.decoding.proposals import Proposal
from distill.decoding.rules import Rules
from distill.decoding.table_drafter import TableDrafter
from distill.decoding.trees import Shape, TreeDrafter
from distill.engines.loaded import torch_decoder, with_rows
from distill.engines.torch.static import StaticTorchModel
from distill.recipe import PyTorch, Sampler

torch.set_num_threads(1)

Make = Callable[[Any, Rules], Drafter]


def chain(rule: Callable[[], Any]) -> Make:
    return lambda draft, rules: ModelDrafter(draft, rule(), rules.sampler, rules.random)


class OfTable(TableDrafter):
    """Its trees are of one size, whatever was counted: they come from the host as all do."""

    def propose(self, context: Sequence[int], limit: int, ends: Any) -> Proposal:
        return Proposal([5, 6, 7, 8, 5, 6, 7], [-1, -1, 0, 0, 1, 2, 4]) if limit > 2 else Proposal.chain([])


class Case(NamedTuple):
    """A configuration and the tokens of a whole draft. A round waits `waits` times and sends `size` bytes to the host.

    Trees wait as often at most, greedily (None: they are only drawn) and sampled.
    """

    make: Make | None
    drafted: int
    waits: int | tuple[int | None, int]
    size: int = 0
    verifier: str = "token"  # where it samples
    samples: bool | None = None  # None: greedily and sampled
    looks: bool = False


CASES: dict[str, Case] = {
    "plain, greedy": Case(None, 0, 1, 12, samples=False),
    "plain, sampled": Case(None, 0, 1, 7, samples=True),
    "`fixed`, `ratio`: 4 tokens": Case(chain(lambda: AcceptedRatio(4, shortest=4, longest=4)), 4, 1, 39),
    "`lookup`: 4 tokens": Case(lambda draft, rules: LookupDrafter(4), 4, 1, 15),
    "`lookup+draft`: 4 tokens of the draft": Case(
        lambda d, r: FallbackDrafter(LookupDrafter(4, shortest=30), chain(lambda: Fixed(4))(d, r)), 4, 1, 39
    ),
    "`p_min`, `start-continue`, `beta`, `expected-value`: 4 tokens": Case(
        chain(lambda: ProbabilityFloor(4, 0.0)), 4, 5, 79, looks=True
    ),
}
SHAPE = Shape.of_widths([2, 2, 1])  # 10 nodes
TREES: dict[str, Case] = {
    "best-first tree of 8 nodes, 3 levels": Case(
        lambda draft, rules: TreeDrafter(draft, rules.sampler, rules.random, 8, rule=Fixed(3)),
        8,
        (5, 12),
        verifier="match",
    ),
    "drawn tree of 10 nodes, 3 levels": Case(
        lambda draft, rules: TreeDrafter(draft, rules.sampler, rules.random, 10, shape=SHAPE, distinct=True),
        10,
        (None, 37),
        verifier="distinct",
        samples=True,
    ),
    "`table`: a tree of 7 nodes": Case(lambda *_: OfTable(None, 7, 3), 7, (1, 5), verifier="match"),
}
PROMPT = [5, 6, 7, 8, 5, 6, 9, 8] * 2  # lookups and counts of n-grams find something
# What a device needs in the types that it decodes in.
SMALL = {"target": toy(seed=3).float(), "draft": toy(seed=3).float()}


def rounds_of(case: Case, cache: str, sampler: Sampler, pretend: Any) -> list[tuple[int, Any]]:
    """Of each round: tokens drafted, and what the device was asked; of plain decoding, of each token."""
    models = {role: copy.deepcopy(model).to("pretend") for role, model in SMALL.items()}
    target, draft = (torch_decoder(model, V, PyTorch(static=cache == "static"), tokens=80) for model in models.values())
    rules = Rules(sampler, case.verifier if sampler.temperature else "greedy", random=random.Random(3).random)
    result, found = Decoded(), []
    drafter, limit = (NoDrafter(), 6) if case.make is None else (case.make(draft, rules), 14)
    steps = decode(target, drafter, PROMPT, limit, rules, result)
    next(steps)
    while True:
        with pretend.counting() as counts:
            if next(steps, None) is None:
                return found
        found.append((result.rounds[-1].drafted if result.rounds else 0, counts))


@pytest.mark.parametrize("name", CASES)
def test_rounds(name: str, pretend: Any) -> None:
    """A growing cache on an accelerator and a static one are asked the same, greedily and sampled."""
    case = CASES[name]
    kinds = (
        [Sampler(temperature=0.0), Sampler(temperature=0.9)]
        if case.samples is None
        else [Sampler(temperature=0.9 if case.samples else 0.0)]
    )
    for cache, sampler in ((cache, sampler) for cache in ("growing", "static") for sampler in kinds):
        rounds = rounds_of(case, cache, sampler, pretend)
        assert len(rounds) > 2
        for drafted, counts in rounds:
            looked = counts.waits - 1
            assert drafted <= looked <= min(drafted + 1, 4) if case.looks else not looked
        whole = [counts for drafted, counts in rounds if drafted == case.drafted]
        waits, size = whole[0].waits, max(counts.bytes_to_host for counts in whole)
        assert all(counts.waits == waits for counts in whole)
        assert case.looks or size <= 16 * max(case.drafted, 1)
        assert (waits, size) == (case.waits, case.size)


@pytest.mark.parametrize("name", TREES)
def test_rounds_of_trees(name: str, pretend: Any) -> None:
    """They are grown on the host."""
    case = TREES[name]
    assert isinstance(case.waits, tuple)
    for temperature, most in zip((0.0, 0.9), case.waits, strict=True):
        if most is None:
            continue
        sampler = Sampler(temperature=temperature)
        found = [one for cache in ("growing", "static") for one in rounds_of(case, cache, sampler, pretend)]
        assert max(counts.waits for _, counts in found) == most
        assert case.drafted in [drafted for drafted, _ in found]


def test_rows_of_a_growing_cache_are_static_there(pretend: Any) -> None:
    model = torch_decoder(copy.deepcopy(SMALL["target"]).to("pretend"), V)
    assert not isinstance(model, StaticTorchModel) and isinstance(with_rows(model, 3), StaticTorchModel)


# Launches of a step.

OURS = ("llama", "qwen3", "gemma3")
LAUNCHES = 45  # of a layer and step, the most


WAYS = {"ours": PyTorch(static=True), "transformers'": PyTorch(static=True, prepack=False)}


def launches(kind: str, pretend: Any, ways: Mapping[str, PyTorch] = WAYS) -> dict[str, list[tuple[int, int]]]:
    """Launches in bfloat16 of a step of one token and of five: of a layer, and besides all layers.

    But for transformers' plain mixtures of experts, which loop over them, a step waits for nothing."""
    counted: dict[str, list[list[int]]] = {name: [] for name in ways}
    for layers in (2, 4):
        own = FAMILIES[SHORT.get(kind, kind)]
        both = {name: own[name] * (layers // 2) for name in ("layer_types", "no_rope_layers") if name in own}
        model = toy(kind, layers=layers, **both).bfloat16().to("pretend")
        for name, pytorch in ways.items():
            decoder, found = torch_decoder(model, V, pytorch, tokens=40), []
            decoder.extend([1, 2, 3])
            for tokens in (1, 5):
                with pretend.counting() as counts:
                    decoder.extend(list(range(tokens)))
                assert not counts.waits or EXPERTS.keys() <= own.keys(), counts.operations
                found.append(counts.launches)
            counted[name].append(found)
    return {
        name: [((b - a) // 2, 2 * a - b) for a, b in zip(two, four, strict=True)]
        for name, (two, four) in counted.items()
    }


@pytest.mark.parametrize("kind", OURS)
def test_launches_of_a_step(kind: str, pretend: Any) -> None:
    """Of the layers that are ours."""
    found = launches(kind, pretend)
    for (ours, _), (theirs, _) in zip(found["ours"], found["transformers'"], strict=True):
        assert ours <= LAUNCHES and ours < 0.6 * theirs


def test_like_families_launch_alike(pretend: Any) -> None:
    static = {"ours": WAYS["ours"]}
    llama, *others = (launches(kind, pretend, static) for kind in ("llama", "mistral", "qwen2"))
    assert all(other == llama for other in others)
