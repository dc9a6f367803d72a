"""Group lasso while fine-tuning: MLP neurons shrink to exactly zero and are cut out (λ follows the schedule in
`ramp`).

Legend: L layers, F neurons of an MLP, H hidden, |g| elements of a group.
"""

from __future__ import annotations

import math
from typing import Any

import numpy
import torch
from torch import Tensor

from distill.errors import RecipeError
from distill.surgery.change import decoder_layers
from distill.surgery.cuts.width import keep_neurons
from distill.surgery.sparsity.ramp import HAIR, Penalty


def group_parts(layer: Any) -> list[Tensor]:
    """Views of the parameters that hold the groups of a layer, with one neuron a row [F, ·]."""
    gate, up, down = layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj
    biases = [linear.bias.detach().unsqueeze(1) for linear in (gate, up) if linear.bias is not None]
    return [gate.weight.detach(), up.weight.detach(), down.weight.detach().T, *biases]


def _lengths(part: Tensor) -> Tensor:
    """The norm of each neuron's elements in one part [F]."""
    return torch.linalg.vector_norm(part, dim=1)


def group_size(layer: Any) -> int:
    """Elements of one group: 3H, and two more where gate and up have biases."""
    return sum(part.shape[1] for part in group_parts(layer))


def group_norms(layer: Any) -> Tensor:
    """‖g‖ of every neuron, fp64 on the CPU [F]."""
    return torch.stack([_lengths(part).cpu().double() for part in group_parts(layer)]).square().sum(0).sqrt()


def zero_groups(layer: Any) -> Tensor:
    """Which neurons are zero in every element, boolean on the CPU [F]."""
    return ~torch.stack([(part != 0).any(1) for part in group_parts(layer)]).any(0).cpu()


def balance(model: Any) -> None:
    """Make ‖up_j‖ = ‖down_j‖ for every neuron: up_j·c and down_j/c are the same function, c the root of their ratio.

    The bias of up scales with its row and counts in its norm. A neuron with one of the two at zero is left alone.
    """
    for layer in decoder_layers(model):
        _, up, down, *biases = group_parts(layer)
        rows = [up, *biases[1:]]
        size = torch.stack([_lengths(part) for part in rows]).norm(dim=0)
        ratio = _lengths(down) / size
        scale = torch.where(torch.isfinite(ratio) & (ratio > 0), ratio, 1.0).sqrt().unsqueeze(1)  # [F, 1]
        for part in rows:
            part.mul_(scale)
        down.div_(scale)


def shrink_factor(norms: Tensor, threshold: float) -> Tensor:
    """max(0, 1 − threshold/‖g‖) [F]: the proximal operator of threshold·‖g‖ (group lasso: Yuan and Lin 2006)."""
    return torch.where(norms > threshold, 1 - threshold / norms, 0.0)


class GroupLasso(Penalty):
    """Group lasso over MLP neurons, to `width` neurons in every layer; group j = gate row, up row, down column j.

    Building it balances the model, so build it before the optimizer, and restore a checkpoint's weights afterwards.
    Only the groups that rank among those to go are shrunk, ranked anew at every step (the trimmed penalty: Yun et al.,
    ICML 2019). The neurons of trained models have similar norms, so the textbook penalty, which shrinks all groups,
    shrinks the remaining neurons nearly as far as the removed ones; trimming in turn gives the norms at the start more
    weight in the choice.
    Raises RecipeError for an impossible width or schedule, DataError for an unknown architecture.
    """

    def __init__(self, model: Any, width: int, steps: int, *, start: float = 0.0, ramp: float = 0.2) -> None:
        self.layers = list(decoder_layers(model))
        self.neurons = int(self.layers[0].mlp.down_proj.in_features)
        if not 0 < width < self.neurons or width % 32:
            raise RecipeError(
                f"sparsity: width is {width}; it must be a multiple of 32 and less than the {self.neurons} neurons "
                "that each layer has",
                f"for instance {max(32, (self.neurons // 2) // 32 * 32)}" if self.neurons > 32 else "leave width out",
            )
        super().__init__(steps, start, ramp)
        self.width = width
        self.to_remove = self.neurons - width
        self.root = math.sqrt(group_size(self.layers[0]))
        self.frozen_at: int | None = None
        self.kept: list[Tensor] = []  # boolean [F] per layer, once frozen
        self.missing: list[int] = []  # groups per layer that had to be removed and were not zero
        self.first: list[float] = []  # d at the first and at the last ramp step, and the sum of λ, per layer
        self.last: list[float] = []
        self.pressed = [0.0] * len(self.layers)
        balance(model)

    def _press(self, left: int, rate: float) -> float:
        strengths, distances = [], []
        for layer in self.layers:
            norms = group_norms(layer)
            order = norms.argsort(stable=True)
            distance = float(norms[order[self.to_remove - 1]])
            strength = HAIR * distance / (left * rate * self.root) if rate > 0 else 0.0
            factor = shrink_factor(norms, rate * strength * self.root)
            factor[order[self.to_remove :]] = 1.0  # also of neurons equal to one that goes: a grown donor has them
            for part in group_parts(layer):
                part.mul_(factor.to(part).unsqueeze(1))
            strengths.append(strength)
            distances.append(distance)
        self.first, self.last = self.first or distances, distances
        self.pressed = [total + strength for total, strength in zip(self.pressed, strengths, strict=True)]
        return sum(strengths) / len(strengths)

    def _zero_shares(self) -> tuple[dict[str, float], bool]:
        """Zero groups as a share of the groups to remove: zero_share the mean over layers, zero_share_least of the
        layer where it is least."""
        zeros = [self.to_remove if self.frozen else int(zero_groups(layer).sum()) for layer in self.layers]
        shares = [min(1.0, count / self.to_remove) for count in zeros]
        return {"zero_share": sum(shares) / len(shares), "zero_share_least": min(shares)}, min(zeros) >= self.to_remove

    def _freeze(self) -> None:
        """Keep the `width` largest groups of every layer for good and zero the others."""
        self.kept, self.missing = [], []
        for layer in self.layers:
            kept = torch.zeros(self.neurons, dtype=torch.bool)
            kept[group_norms(layer).argsort(stable=True)[self.to_remove :]] = True
            self.missing.append(int((~zero_groups(layer) & ~kept).sum()))
            self.kept.append(kept)
        self.frozen, self.frozen_at = True, self.step
        self._hold()

    def _hold(self) -> None:
        for layer, kept in zip(self.layers, self.kept, strict=True):
            removed = (~kept).nonzero().view(-1)
            for part in group_parts(layer):
                part.index_fill_(0, removed.to(part.device), 0.0)

    def state_dict(self) -> dict[str, Any]:
        """See `Penalty`."""
        return {
            "step": self.step,
            "width": self.width,
            "frozen_at": self.frozen_at,
            "kept": [numpy.packbits(kept.numpy()).tobytes().hex() for kept in self.kept],
            "missing": self.missing,
            "first": self.first,
            "last": self.last,
            "pressed": self.pressed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Penalty`."""
        bits = [numpy.frombuffer(bytes.fromhex(text), dtype=numpy.uint8) for text in state["kept"]]
        self.kept = [torch.from_numpy(numpy.unpackbits(row, count=self.neurons).astype(bool)) for row in bits]
        self.frozen = state["frozen_at"] is not None
        for name in ("step", "frozen_at", "missing", "first", "last", "pressed"):
            setattr(self, name, state[name])

    @torch.no_grad()
    def cut(self, model: Any) -> dict[str, Any]:
        """Remove the zero neurons from `model`, the one this was built on; returns details. The logits stay.

        Details: `removed_zero_share` by layer, the share of the removed groups that the lasso had brought to exactly
        zero, and `removed_not_zero`, how many it had not; `lambda_by_layer`, the mean λ of the ramp (what it took);
        `last_step_share`, the largest share of its norm that the last group lost in the last step. A ramp that has not
        ended is cut off here, which these figures show.
        """
        assert [id(layer) for layer in decoder_layers(model)] == [id(layer) for layer in self.layers]
        if not self.frozen:
            self._freeze()
        keep_neurons(model, [kept.nonzero().view(-1).tolist() for kept in self.kept])
        ramp_steps = max(1, min(self.step, self.frozen_at or 0) - self.dense)
        return {
            "width_before": self.neurons,
            "width": self.width,
            "frozen_at_step": self.frozen_at,
            "removed_zero_share": [1 - count / self.to_remove for count in self.missing],
            "removed_not_zero": self.missing,
            "lambda_by_layer": [total / ramp_steps for total in self.pressed],
            "last_step_share": max((b / a for a, b in zip(self.first, self.last, strict=True) if a), default=0.0),
        }
