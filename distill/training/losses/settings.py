"""The losses of a batch with their weights, and the sums that come back for the log."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from distill.errors import RecipeError
from distill.recipe.training import LossName

# Formulas in distill/divergences.py under the same names (match: match_loss).
LOSSES: tuple[str, ...] = get_args(LossName)
STATISTICS = ("forward_kl", "cross_entropy", "acceptance", "agreement", "match")


@dataclass(frozen=True)
class LossSettings:
    """Weights of the losses of a mixture, and the settings of the losses.

    The target's distribution p is taken at `temperature`, and so is q = softmax(z / temperature) in forward_kl,
    reverse_kl and jsd, which are multiplied by temperature², and in total_variation, nla and lk_hybrid, which are not;
    match takes softmax(z / match_temperature), the cross-entropies and the hinge take z itself. Raises RecipeError for
    a loss that does not exist, weights that are negative or all 0, and settings out of range.
    """

    losses: Mapping[str, float]
    temperature: float = 1.0
    jsd_beta: float = 0.5
    lk_decay: float = 3.0
    match_temperature: float = 0.5
    hinge_k: int = 4
    hinge_margin: float = 1.0

    def __post_init__(self) -> None:
        self._check_weights()
        if not 0 < self.jsd_beta < 1:
            raise RecipeError(
                f"jsd_beta is {self.jsd_beta}, not between 0 and 1", "at its ends the JSD is 0: take a KL there"
            )
        for name in ("temperature", "match_temperature"):
            if not 0 < getattr(self, name) < math.inf:
                raise RecipeError(f"{name} is {getattr(self, name)}", "temperatures are > 0")
        for name in ("lk_decay", "hinge_margin"):
            if not 0 <= getattr(self, name) < math.inf:
                raise RecipeError(f"{name} is {getattr(self, name)}", "it is >= 0")
        if self.hinge_k < 1:
            raise RecipeError(f"hinge_k is {self.hinge_k}", "it is the branches of a tree's node, 1 or more")

    def _check_weights(self) -> None:
        for name, weight in self.losses.items():
            if name not in LOSSES:
                raise RecipeError(f"there is no loss {name!r}", f"the losses are {', '.join(LOSSES)}")
            if not math.isfinite(weight) or weight < 0:
                raise RecipeError(f"loss {name} has weight {weight}", "weights are numbers >= 0")
        if not any(self.losses.values()):
            raise RecipeError("the weights of the losses sum to 0: nothing would be learned", "give one a weight > 0")

    def require_columns(self, columns: int) -> None:
        """Raise RecipeError for a hinge over more columns than the draft has."""
        if "top_k_hinge" in self.losses and self.hinge_k >= columns:
            raise RecipeError(
                f"hinge_k is {self.hinge_k}, but the draft speaks only {columns} tokens", "lower train.hinge_k"
            )

    def scale(self, name: str) -> float:
        """The factor that keeps a loss's gradient from shrinking with the temperature (Hinton et al. 2015)."""
        return self.temperature**2 if name in ("forward_kl", "reverse_kl", "jsd") else 1.0


@dataclass(frozen=True)
class LossSums:
    """Sums over the N positions of a batch, fp64 and detached: add the vectors of batches and processes, then divide.

    `positions` is N and `weight` Σ w. The STATISTICS are unweighted, of the distributions at the temperature of the
    settings, so that they mean the same under every mixture and weighting: forward KL and cross-entropy (nats; 0 where
    a position has no label), `acceptance` Σ min(p, q) (upper end with a stored tail), `agreement` of the argmaxes over
    the columns, and `match` p(argmax q) (lower end: 0 where that is not stored). `loss/NAME` is Σ w · loss, with its
    temperature² but without its weight in the mixture.
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
