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

from distill.errors import RecipeError, RunError
from distill.surgery.change import decoder_layers
from distill.surgery.cuts.width import keep_neurons
from distill.surgery.sparsity.ramp import HAIR, plan, require_float32


def group_parts(layer: Any) -> list[tuple[torch.nn.Parameter, int]]:
    """The parameters that hold the groups of a layer, with the dimension that counts its neurons."""
    mlp = layer.mlp
    parts = [(mlp.gate_proj.weight, 0), (mlp.up_proj.weight, 0), (mlp.down_proj.weight, 1)]
    return parts + [(linear.bias, 0) for linear in (mlp.gate_proj, mlp.up_proj) if linear.bias is not None]


def _lengths(part: Tensor, dim: int) -> Tensor:
    """The norm of each neuron's elements in one parameter [F]."""
    return part.detach().abs() if part.ndim == 1 else torch.linalg.vector_norm(part.detach(), dim=1 - dim)


def _spread(values: Tensor, part: Tensor, dim: int) -> Tensor:
    """Values per neuron [F] in the shape that multiplies a parameter neuron by neuron."""
    return values.to(part.dtype).to(part.device).view(-1, *[1] * (part.ndim - 1 - dim))


def group_size(layer: Any) -> int:
    """Elements of one group: 3H, and two more where gate and up have biases."""
    return sum(part.numel() // part.shape[dim] for part, dim in group_parts(layer))


def group_norms(layer: Any) -> Tensor:
    """‖g‖ of every neuron, fp64 on the CPU [F]."""
    norms = [_lengths(part, dim).cpu().double() for part, dim in group_parts(layer)]
    return torch.stack(norms).square().sum(0).sqrt()


def zero_groups(layer: Any) -> Tensor:
    """Which neurons are zero in every element, boolean on the CPU [F]."""
    parts = [(part != 0, dim) for part, dim in group_parts(layer)]
    return ~torch.stack([alive if alive.ndim == 1 else alive.any(1 - dim) for alive, dim in parts]).any(0).cpu()


@torch.no_grad()
def balance(model: Any) -> None:
    """Make ‖up_j‖ = ‖down_j‖ for every neuron: up_j·c and down_j/c are the same function, c the root of their ratio.

    The bias of up scales with its row and counts in its norm. A neuron with one of the two at zero is left alone.
    """
    for layer in decoder_layers(model):
        up, down = layer.mlp.up_proj, layer.mlp.down_proj
        rows = [up.weight] if up.bias is None else [up.weight, up.bias]
        size = torch.stack([_lengths(part, 0) for part in rows]).norm(dim=0)
        ratio = _lengths(down.weight, 1) / size
        scale = torch.where(torch.isfinite(ratio) & (ratio > 0), ratio, 1.0).sqrt()  # [F]
        for part in rows:
            part.mul_(_spread(scale, part, 0))
        down.weight.div_(scale)


def shrink_factor(norms: Tensor, threshold: float) -> Tensor:
    """max(0, 1 − threshold/‖g‖) [F]: the proximal operator of threshold·‖g‖ (group lasso: Yuan and Lin 2006)."""
    return torch.where(norms > threshold, 1 - threshold / norms, 0.0)


class GroupLasso:
    """Group lasso over MLP neurons, to `width` neurons in every layer; group j = gate row, up row, down column j.

    Building it balances the model, so build it before the optimizer, restore a checkpoint's weights afterwards and
    give `parameters()` no weight decay.
    Only the groups that rank among those to go are shrunk, ranked anew at every step (the trimmed penalty: Yun et al.,
    ICML 2019). The neurons of trained models have similar norms, so the textbook penalty, which shrinks all groups,
    shrinks the remaining neurons nearly as far as the removed ones; trimming in turn gives the norms at the start more
    weight in the choice.
    Raises RecipeError for an impossible width, schedule or dtype, DataError for an unknown architecture.
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
        self.schedule = plan(steps, start, ramp)
        require_float32(self.parameters())
        self.width = width
        self.wanted = self.neurons - width
        self.root = math.sqrt(group_size(self.layers[0]))
        self.step = 0
        self.frozen_at: int | None = None
        self.kept: list[Tensor] = []  # boolean [F] per layer, once frozen
        self.missing: list[int] = []  # groups per layer that had to be removed and were not zero
        self.first: list[float] = []  # d at the first and at the last ramp step, and the sum of λ, per layer
        self.last: list[float] = []
        self.pressed = [0.0] * len(self.layers)
        balance(model)

    def parameters(self) -> list[torch.nn.Parameter]:
        """The tensors that consist of groups: they get no weight decay."""
        return [part for layer in self.layers for part, _ in group_parts(layer)]

    @torch.no_grad()
    def after_step(self, step: int, rate: float) -> dict[str, Any]:
        """The proximal step that follows optimizer step `step` (from 0), taken at `rate`; figures for the log.

        lambda: mean over layers; zero_share: zero groups as a share of the groups to remove, and zero_share_least: that
        of the layer where it is least; phase: dense, ramp or debias.
        """
        assert step == self.step, f"step {step} after {self.step} steps"
        self.step += 1
        left = self.schedule.left(self.step)
        strengths = [0.0] * len(self.layers)
        if self.frozen_at is not None:
            self._hold()
        elif left:
            strengths = self._press(left, rate)
        zeros = [self.wanted if self.kept else int(zero_groups(layer).sum()) for layer in self.layers]
        if left and self.frozen_at is None and (left == 1 or min(zeros) >= self.wanted):
            self._freeze()
        shares = [min(1.0, count / self.wanted) for count in zeros]
        return {
            "phase": "debias" if self.frozen_at is not None else "ramp" if left else "dense",
            "lambda": sum(strengths) / len(strengths),
            "zero_share": sum(shares) / len(shares),
            "zero_share_least": min(shares),
        }

    def _press(self, left: int, rate: float) -> list[float]:
        """One proximal step on every layer; the λ of each."""
        strengths, distances = [], []
        for layer in self.layers:
            norms = group_norms(layer)
            order = norms.argsort(stable=True)
            distance = float(norms[order[self.wanted - 1]])
            strength = HAIR * distance / (left * rate * self.root) if rate > 0 else 0.0
            factor = shrink_factor(norms, rate * strength * self.root)
            factor[order[self.wanted :]] = 1.0  # also of neurons equal to one that goes: a grown donor has them
            for part, dim in group_parts(layer):
                part.mul_(_spread(factor, part, dim))
            strengths.append(strength)
            distances.append(distance)
        self.first, self.last = self.first or distances, distances
        self.pressed = [total + strength for total, strength in zip(self.pressed, strengths, strict=True)]
        return strengths

    def _freeze(self) -> None:
        """Keep the `width` largest groups of every layer for good and zero the others."""
        self.kept, self.missing = [], []
        for layer in self.layers:
            kept = torch.zeros(self.neurons, dtype=torch.bool)
            kept[group_norms(layer).argsort(stable=True)[self.wanted :]] = True
            self.missing.append(int((~zero_groups(layer) & ~kept).sum()))
            self.kept.append(kept)
        self.frozen_at = self.step
        self._hold()

    def _hold(self) -> None:
        """The optimizer's moments move removed groups even where their gradient is zero: put them back."""
        for layer, kept in zip(self.layers, self.kept, strict=True):
            removed = (~kept).nonzero().view(-1)
            for part, dim in group_parts(layer):
                part.index_fill_(dim, removed.to(part.device), 0.0)

    def state_dict(self) -> dict[str, Any]:
        """The state beyond the model and the step, for JSON."""
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
        """Go on from `state_dict()`; raises RunError for another model's or width's."""
        if state["width"] != self.width or len(state["pressed"]) != len(self.layers):
            raise RunError(
                f"the checkpoint's sparsity is of {len(state['pressed'])} layers to width {state['width']}, "
                f"the recipe's of {len(self.layers)} to {self.width}",
                "go back to the recipe it was trained with, or train again with `--redo train`",
            )
        bits = [numpy.frombuffer(bytes.fromhex(text), dtype=numpy.uint8) for text in state["kept"]]
        self.kept = [torch.from_numpy(numpy.unpackbits(row, count=self.neurons).astype(bool)) for row in bits]
        self.step, self.frozen_at = int(state["step"]), state["frozen_at"]
        self.missing, self.pressed = list(state["missing"]), list(state["pressed"])
        self.first, self.last = list(state["first"]), list(state["last"])

    @torch.no_grad()
    def cut(self, model: Any) -> dict[str, Any]:
        """Remove the zero neurons from `model`, the one this was built on; returns details. The logits stay.

        Details: `removed_zero_share` by layer, the share of the removed groups that the lasso had brought to exactly
        zero, and `removed_not_zero`, how many it had not; `lambda_by_layer`, the mean λ of the ramp (what it took);
        `last_step_share`, the largest share of its norm that the last group lost in the last step. A ramp that has not
        ended is cut off here, which these figures show.
        """
        assert [id(layer) for layer in decoder_layers(model)] == [id(layer) for layer in self.layers]
        if self.frozen_at is None:
            self._freeze()
        keep_neurons(model, [kept.nonzero().view(-1).tolist() for kept in self.kept])
        ramp_steps = max(1, min(self.step, self.frozen_at or 0) - self.schedule.dense)
        return {
            "width_before": self.neurons,
            "width": self.width,
            "frozen_at_step": self.frozen_at,
            "removed_zero_share": [1 - count / self.wanted for count in self.missing],
            "removed_not_zero": self.missing,
            "lambda_by_layer": [total / ramp_steps for total in self.pressed],
            "last_step_share": max((b / a for a, b in zip(self.first, self.last, strict=True) if a), default=0.0),
            "trimmed": True,
        }
