"""The losses of a batch with their weights, and the sums that come back for the log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from distill.recipe.training import LossName

# Formulas in distill/divergences.py under the same names.
LOSSES: tuple[str, ...] = get_args(LossName)
STATISTICS = ("forward_kl", "cross_entropy", "acceptance", "agreement", "match")


@dataclass(frozen=True)
class LossSettings:
    """Weights of the losses of a mixture, and the settings of the losses.

    The target's distribution p is taken at `temperature`, and so is q = softmax(z / temperature) in forward_kl,
    reverse_kl and jsd, which are multiplied by temperature², and in total_variation, nla and lk_hybrid, which are not;
    the cross-entropy takes z itself.
    """

    losses: Mapping[str, float]
    temperature: float = 1.0

    def scale(self, name: str) -> float:
        """The factor that keeps a loss's gradient from shrinking with the temperature (Hinton et al. 2015)."""
        return self.temperature**2 if name in ("forward_kl", "reverse_kl", "jsd") else 1.0


@dataclass(frozen=True)
class LossSums:
    """Sums over the N positions of a batch, fp64 and detached: add the vectors of batches and processes, then divide.

    `positions` is N. The STATISTICS are of the distributions at the temperature of the settings, so that they mean the
    same under every mixture: forward KL and cross-entropy (nats; 0 where a position has no label), `acceptance`
    Σ min(p, q) (upper end with a stored tail), `agreement` of the argmaxes over the columns, and `match` p(argmax q)
    (lower end: 0 where that is not stored). `loss/NAME` is Σ loss, with its temperature² but without its weight in the
    mixture.
    """

    names: tuple[str, ...]
    vector: Tensor

    def __getitem__(self, name: str) -> Tensor:
        return self.vector[self.names.index(name)]

    def joined(self, name: str, value: Tensor) -> LossSums:
        """With one more sum."""
        return LossSums((*self.names, name), torch.cat([self.vector, value.detach().to(self.vector).view(1)]))

    def values(self) -> dict[str, float]:
        """Every sum by its name."""
        return dict(zip(self.names, self.vector.tolist(), strict=True))
