"""Next tokens sampled through `decode` and `decode_batch` by every drafter, against the target's distribution: χ², V =
50.

The everyday suite takes some hundred tokens of each kind of drafter and verifier; the slow tests take 100 000 of each,
alone and under each sampler chain. A token's distribution hangs on the one before it, so that each is a draw from a
known distribution. Legend: V vocabulary.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from table_model import TableModel
from tables import TableRows, goodness

from distill.decoding.batch import decode_batch
from distill.decoding.decode import Decoded, decode
from distill.decoding.drafters import Drafter, FallbackDrafter, LookupDrafter, ModelDrafter
from distill.decoding.lengths import Fixed, LengthRule, ProbabilityFloor
from distill.decoding.rules import Rules
from distill.decoding.trees import Shape, TreeDrafter
from distill.decoding.verify import Random
from distill.sampler import Sampler

torch.set_num_threads(1)

SIZE, CLASSES = 50, 4
FIRST = SIZE - 1  # ends the prompt
TEXT = 250  # tokens of a text, and
ROOM = 40  # how many more it may have: a tree must fit
ROWS = 25
Make = Callable[[TableModel, Sampler, Random], Drafter]
SHAPE = Shape((-1, -1, -1, 0, 0, 1))


def chain(rule: LengthRule, argmax: bool = False) -> Make:
    return lambda draft, sampler, draws: ModelDrafter(draft, rule, sampler, draws, argmax)


def tree(nodes: int, **settings: Any) -> Make:
    return lambda draft, sampler, draws: TreeDrafter(draft, sampler, draws, nodes, **settings)


KINDS: dict[str, tuple[str, Make]] = {
    "token": ("token", chain(Fixed(3))),
    "token, floor": ("token", chain(ProbabilityFloor(3, 0.15))),
    "block": ("block", chain(Fixed(3))),
    "match": ("match", chain(Fixed(2))),
    "match, best": ("match", chain(Fixed(2), True)),
    "lookup": ("match", lambda *_: LookupDrafter(3)),
    "lookup, token": ("token", lambda *_: LookupDrafter(2)),
    "lookup, then draft": ("block", lambda *given: FallbackDrafter(LookupDrafter(2, 2), chain(Fixed(2))(*given))),
    "tree of draws": ("token", tree(6, shape=SHAPE)),
    "tree of distinct": ("distinct", tree(6, shape=SHAPE, distinct=True)),
    "tree of the best": ("match", tree(5, branching=3)),
}
BATCHES = {"batch, token": ("token", False), "batch, block": ("block", False), "batch, match": ("match", True)}
SAMPLERS = {
    "top-k": Sampler(0.9, top_k=8),
    "top-p": Sampler(1.2, top_p=0.8),
    "min-p": Sampler(min_p=0.1),
}
WARM = Sampler(0.8)
TESTS = (len(KINDS) + len(BATCHES)) * (1 + len(SAMPLERS))


def pair() -> tuple[TableModel, TableModel]:
    """A target that says 0 after the prompt, for sure; other tokens have one of four distributions after them."""
    target = TableModel(SIZE, 1, memory=1, sharpness=1.5)
    draft = target.near(1.0, 2)
    for model in (target, draft):
        model.table = model.table[torch.arange(SIZE + 1) % CLASSES].clone()
    target.table[FIRST] = -math.inf
    target.table[FIRST, 0] = 0
    target.table[:FIRST, FIRST] = -math.inf  # nor does it come back to the prompt
    return target, draft


def prompt(target: TableModel) -> list[int]:
    """What is likely after 0, so that a lookup finds it again, and then the token that 0 follows for sure."""
    second = int(target.table[0].argmax())
    return [0, second, int(target.table[second].argmax()), FIRST]


def texts(make: Make, verifier: str, sampler: Sampler, count: int, length: int, seed: int) -> list[Decoded]:
    """So many texts of `length` tokens or a few more, but for the prefill's."""
    draws, found = random.Random(seed).random, []
    target, draft = pair()
    drafter, rules = make(draft, sampler, draws), Rules(sampler, verifier, random=draws)
    for _ in range(count):
        result = Decoded()
        for _ in decode(target, drafter, prompt(target), length + ROOM, rules, result, lossy=True):
            if len(result.tokens) > length:
                break
        found.append(result)
    return found


def batches(verifier: str, argmax: bool, sampler: Sampler, count: int, length: int, seed: int) -> list[Decoded]:
    """The same, so many times ROWS texts at once; each row has random numbers of its own."""
    target, draft = pair()
    found: list[Decoded] = []
    for batch in range(count):
        draws = [random.Random(f"{seed}/{batch}/{row}").random for row in range(ROWS)]
        rows, prompts = (TableRows(target, ROWS), TableRows(draft, ROWS)), [prompt(target)] * ROWS
        found += decode_batch(*rows, prompts, length + 1, Rules(sampler, verifier), 3, draws, argmax)
    return found


def p_value(found: list[Decoded], sampler: Sampler) -> float:
    """Of every token of a text but its first, which the prefill said, given the one before it."""
    target, _ = pair()
    counts = torch.zeros(CLASSES, SIZE, dtype=torch.float64)
    for tokens in (torch.tensor(text.tokens) for text in found):
        counts.view(-1).index_add_(0, tokens[:-1] % CLASSES * SIZE + tokens[1:], torch.ones(len(tokens) - 1).double())
    return goodness(counts, sampler.probabilities(target.table[:CLASSES]))


def sampled(kind: str, sampler: Sampler, tokens: int) -> float:
    """p of about so many tokens of a kind."""
    if kind in BATCHES:
        found = batches(*BATCHES[kind], sampler, -(-tokens // (ROWS * TEXT)), min(TEXT, tokens // ROWS), len(kind))
    else:
        verifier, make = KINDS[kind]
        found = texts(make, verifier, sampler, max(1, tokens // TEXT), min(tokens, TEXT), len(kind))
    rounds = [one for text in found for one in text.rounds]
    least = 0.05 if "lookup" in kind else 0.3  # a lookup that finds nothing drafts nothing
    assert sum(one.drafted for one in rounds) > least * tokens < 15 * sum(one.accepted for one in rounds)
    return p_value(found, sampler)


AT_LENGTH = pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])


@pytest.mark.parametrize("kind", [*KINDS, *BATCHES])
@pytest.mark.parametrize("tokens", [800, AT_LENGTH])
def test_every_kind(kind: str, tokens: int) -> None:
    assert sampled(kind, WARM, tokens) > 1e-3 / TESTS


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", [*KINDS, *BATCHES])
@pytest.mark.parametrize("chain", SAMPLERS)
def test_every_kind_under_every_sampler(kind: str, chain: str) -> None:
    assert sampled(kind, SAMPLERS[chain], 100_000) > 1e-3 / TESTS


def test_trees_and_penalties_do_not_meet() -> None:
    for _, make in (KINDS[kind] for kind in KINDS if "tree" in kind):
        with pytest.raises(ValueError, match="repetition penalty"):
            make(pair()[1], Sampler(0.9, repetition_penalty=1.5), random.random)


LOSSY: dict[str, tuple[str, Make]] = {
    "token, drafts dropped": ("token", chain(ProbabilityFloor(2, 0.0, 0.3, n_min=2))),
    "block, drafts dropped": ("block", chain(ProbabilityFloor(2, 0.0, 0.3, n_min=2))),
    "tree of draws, the target's best tokens": ("greedy", tree(6, shape=SHAPE)),
}


@pytest.mark.parametrize("name", LOSSY)
def test_lossy_drafts_are_rejected(name: str) -> None:
    """By the same test."""
    verifier, make = LOSSY[name]
    assert p_value(texts(make, verifier, WARM, 8, TEXT, 3), WARM) < 1e-6
