"""Chance made exact: a program that draws is run once for every way in which its draws can fall.

Production code draws in two ways only, `random() < h` and `draw_token(distribution, random)`; here both take every turn
that has a probability, one run after another. Legend: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar
from unittest import mock

from torch import Tensor

from distill.decoding import verify

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

    def token(self, distribution: Tensor, uniform: Tensor) -> int:
        """In the place of `inverse_transform`, whose own draws test_verify.py holds against the distribution."""
        return self.choose((distribution.double() / distribution.double().sum()).tolist())

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
