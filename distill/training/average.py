"""A running average of the weights that learn: one more copy of them, which is evaluated as a candidate of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from distill.recipe import Average
from distill.training.checkpoint import plain


class WeightAverage:
    """The mean of the weights after each step of the last `share` of `steps` (tail), or with more weight on late ones.

    The exponential average (ema) is the plain mean until 1 / (1 - decay) weights are in it, so that it never holds the
    weights from before the first step. `count` weights are in it. Sharded weights have a sharded average.
    """

    def __init__(self, learner: torch.nn.Module, settings: Average, steps: int) -> None:
        self.parameters = {name: p for name, p in plain(learner).named_parameters() if p.requires_grad}
        self.values = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.count = 0
        self.first, self.least = 0, 0.0  # the step whose weights are the first, and the least share of new weights
        if settings.kind == "tail":
            assert settings.share is not None
            self.first = steps - max(1, round(settings.share * steps)) + 1
        else:
            assert settings.decay is not None
            self.least = 1 - settings.decay

    @property
    def is_candidate(self) -> bool:
        """Whether it differs from the last weights."""
        return self.count > 1

    @torch.no_grad()
    def update(self, done: int) -> None:
        """Take in the weights after `done` steps."""
        if done < self.first:
            return
        self.count += 1
        share = max(self.least, 1 / self.count)
        for name, value in self.values.items():
            value.lerp_(self.parameters[name].detach(), share)

    @torch.no_grad()
    def _exchange(self) -> None:
        """Exchange the weights with their average, one tensor at a time."""
        for name, parameter in self.parameters.items():
            weights = parameter.detach().clone()
            parameter.copy_(self.values[name])
            self.values[name].copy_(weights)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block, the learner's weights are the average."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def take(self) -> None:
        """Make the average the learner's weights."""
        for name, parameter in self.parameters.items():
            parameter.copy_(self.values[name])

    def state_dict(self) -> dict[str, Tensor]:
        """The average, whole and on the CPU, by the names of parameters; every process must call it."""
        from torch.distributed.tensor import DTensor

        return {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).cpu()
            for name, value in self.values.items()
        }

    def load_state_dict(self, values: dict[str, Tensor], count: int) -> None:
        """Go on from `state_dict()` of `count` weights; raises a KeyError or ValueError where it does not fit."""
        from torch.distributed.tensor import DTensor, distribute_tensor

        for name, own in self.values.items():
            value: Any = values[name]
            if value.shape != own.shape:
                raise ValueError(f"the average of {name} is {[*value.shape]}, not {[*own.shape]}")
            if isinstance(own, DTensor):  # each process has read the whole
                value = distribute_tensor(value.to(own.device), own.device_mesh, own.placements, src_data_rank=None)
            own.copy_(value)
        self.count = count
