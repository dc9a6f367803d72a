"""Chance made exact: a program that draws is run once for every way in which its draws can fall.

Production code draws in two ways only, `random() < h` and `draw_token(law, random)`; here both take every turn that has
a probability, one run after another. Legend: l tokens of a text, V vocabulary. A text of l tokens is a number of l
digits in base V.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar
from unittest import mock

import torch
from torch import Tensor

from distill.models.table import TableModel
from distill.sampler import Sampler
from distill.speculative import verify

T = TypeVar("T")


class Branches:
    """The turns of one run after another, depth first; `weight` is the probability of those of the present run."""

    def __init__(self) -> None:
        self.left: list[list[int]] = []  # at each turn what was not tried yet, the present one first
        self.place, self.weight = 0, 1.0

    def choose(self, chances: Sequence[float]) -> int:
        if self.place == len(self.left):
            self.left.append([i for i, chance in enumerate(chances) if chance > 0])
        taken = self.left[self.place][0]
        self.place += 1
        self.weight *= chances[taken]
        return taken

    def random(self) -> float:
        return Uniform(self)

    def token(self, law: Tensor, uniform: Tensor) -> int:
        """In the place of `inverse_transform`, whose own draws test_verify.py holds against the law."""
        return self.choose((law.double() / law.double().sum()).tolist())

    def next(self) -> bool:
        while self.left and len(self.left[-1]) == 1:
            self.left.pop()
        if self.left:
            self.left[-1].pop(0)
        self.place, self.weight = 0, 1.0
        return bool(self.left)


class Uniform(float):
    """A number in [0, 1) that nobody has drawn yet: to be below h, or not, are two turns."""

    branches: Branches

    def __new__(cls, branches: Branches) -> Uniform:
        made = super().__new__(cls, 0.5)
        made.branches = branches
        return made

    def __lt__(self, chance: float) -> bool:
        return self.branches.choose([chance, 1 - chance]) == 0

    def __ge__(self, chance: float) -> bool:
        return not self < chance


def every(run: Callable[[verify.Random], T]) -> Iterator[tuple[float, T]]:
    """The probability and the result of every way that a run can go; given the same numbers it must do the same."""
    branches = Branches()
    more = True
    while more:
        with mock.patch.object(verify, "inverse_transform", branches.token):
            result = run(branches.random)
        assert branches.place == len(branches.left)
        yield branches.weight, result
        more = branches.next()


def digits(vocabulary: int, count: int) -> Tensor:
    """All texts [V^count, count]."""
    return torch.cartesian_prod(*[torch.arange(vocabulary)] * count).view(-1, count)


def number(text: Sequence[int], vocabulary: int) -> int:
    found = 0
    for token in text:
        found = found * vocabulary + token
    return found


def laws_after(model: TableModel, sampler: Sampler, contexts: Tensor) -> Tensor:
    """The sampled laws [C, V] after contexts [C, H] that are no shorter than the table's memory."""
    places = torch.zeros(len(contexts), dtype=torch.long)
    for column in contexts[:, -model.memory :].T:
        places = places * (model.vocabulary_size + 1) + column
    return sampler.law(model.table[places], contexts)


def target_laws(model: TableModel, sampler: Sampler, prompt: Sequence[int], depth: int) -> list[Tensor]:
    """The laws [V^l, V] after every text of l = 0..depth tokens behind the prompt."""
    found = []
    for count in range(depth + 1):
        texts = digits(model.vocabulary_size, count) if count else torch.zeros(1, 0, dtype=torch.long)
        found.append(laws_after(model, sampler, torch.cat([torch.tensor(prompt).expand(len(texts), -1), texts], -1)))
    return found


def distance(output: Sequence[Tensor], laws: Sequence[Tensor]) -> float:
    """How far the law of an output, `output[l]` [V^l] being that of its texts of l tokens, is from the target's.

    Texts end at different lengths: each is continued by the target to the longest one.
    """
    reached, truth = output[0], torch.ones(1, dtype=torch.float64)
    for length, mass in enumerate(output[1:]):
        reached = (reached.unsqueeze(-1) * laws[length]).flatten() + mass
        truth = (truth.unsqueeze(-1) * laws[length]).flatten()
    return float((reached - truth).abs().max())
