"""L1 while fine-tuning: MLP neurons (group lasso) or single weights shrink to exactly zero and are then held there.

A run has three phases: dense (the first `start` of the steps), ramp (the proximal step presses after every optimizer
step), debias (λ = 0, what is zero stays zero, the rest learns on). The proximal step is decoupled from the gradient as
weight decay is in AdamW, so its threshold is rate·λ·√|g|, in units of what Adam moves a group in a step.

Law of λ, one per layer (one in all for single weights). Let d be the norm of the largest group that still has to go,
that is of the wanted-th smallest, and r the ramp steps that remain, this one included: λ = d / (r·rate·√|g|). The
threshold is then d/r: undisturbed, d walks to zero in a straight line; where the loss holds neurons back, d stays
behind that line and λ rises until it is there. The law reads nothing but the weights and the step, so a resume changes
nothing, and no learning rate is too small for it. Every layer reaches its count in the last step of the ramp, if not
earlier.

Legend: L layers, F neurons of an MLP, H hidden, |g| elements of a group.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from distill.errors import RecipeError, RunError
from distill.surgery.change import decoder_layers
from distill.surgery.width import keep_neurons

LEAST_RAMP = 10  # proximal steps; fewer would be pruning at a blow
HAIR = 1 + 1e-6  # on λ, so that rounding does not leave the last group alive


@dataclass(frozen=True)
class Schedule:
    """Steps of the dense phase and of the ramp."""

    dense: int
    ramp: int

    def left(self, done: int) -> int:
        """Ramp steps that remained before the last of `done` steps; 0 outside the ramp."""
        return max(0, self.dense + self.ramp + 1 - done) if done > self.dense else 0


def plan(steps: int, start: float, ramp: float) -> Schedule:
    """The phases of a run; `start` and `ramp` are shares of its steps. Raises RecipeError for what cannot be."""
    if not 0 < ramp <= 1:
        raise RecipeError(f"sparsity: ramp is {ramp}; it is a share of the steps", "ask for 0 < ramp <= 1, say 0.2")
    if not 0 <= start <= 1 - ramp:
        raise RecipeError(
            f"sparsity: start is {start}; with a ramp of {ramp} it leaves no room", f"ask for 0 to {1 - ramp:g}"
        )
    count = round(ramp * steps)
    if count < LEAST_RAMP:
        raise RecipeError(
            f"sparsity: {steps} steps are too few: a ramp of {ramp} needs {LEAST_RAMP} proximal steps",
            f"train for at least {math.ceil(LEAST_RAMP / ramp)} steps, or ramp over a larger share of them",
        )
    return Schedule(min(round(start * steps), steps - count), count)


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


def _require_float32(parameters: Sequence[Tensor]) -> None:
    wrong = {str(p.dtype) for p in parameters} - {"torch.float32"}
    if wrong:
        raise RecipeError(
            f"sparsity: proximal steps need float32 weights, these are {', '.join(sorted(wrong))}",
            "load the model in float32; mixed precision may still compute in bfloat16",
        )


class GroupLasso:
    """Group lasso over MLP neurons, to `width` neurons in every layer; group j = gate row, up row, down column j.

    Building it balances the model, so build it before the optimizer, restore a checkpoint's weights afterwards and
    give `parameters()` no weight decay.
    With `trimmed` only the groups that rank among those to go are shrunk, ranked anew at every step (the trimmed
    penalty: Yun et al., ICML 2019); without, all of them are, as in the textbook. The neurons of trained models have
    much the same norm, so that the textbook's way shrinks what stays nearly as far as what goes, and the model with it;
    trimming in turn gives the norms at the start more weight in the choice.
    Raises RecipeError for a width, schedule or dtype that cannot be, DataError for an unknown architecture.
    """

    def __init__(
        self, model: Any, width: int, steps: int, *, start: float = 0.0, ramp: float = 0.2, trimmed: bool = True
    ) -> None:
        self.layers = list(decoder_layers(model))
        self.neurons = int(self.layers[0].mlp.down_proj.in_features)
        if not 0 < width < self.neurons or width % 32:
            raise RecipeError(
                f"sparsity: width is {width}; it must be a multiple of 32 and less than the {self.neurons} neurons "
                "that each layer has",
                f"for instance {max(32, (self.neurons // 2) // 32 * 32)}" if self.neurons > 32 else "leave width out",
            )
        self.schedule = plan(steps, start, ramp)
        _require_float32(self.parameters())
        self.width, self.trimmed = width, trimmed
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

        lambda: mean over layers; zero_share: share of the groups that have to go that are zero, and of the layer where
        it is least; phase: dense, ramp or debias.
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
            spared = order[self.wanted :]
            # Equal neurons (a grown donor has them) must not go together: none beyond the wanted count is zeroed.
            factor[spared] = 1.0 if self.trimmed else torch.where(factor[spared] > 0, factor[spared], 1.0)
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
        """What the model and the step do not tell, for JSON."""
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
        """Remove the zero neurons from `model`, the one this was built on, and say how; the logits stay.

        Details: `removed_zero_share` by layer, the share of the removed groups that the lasso had brought to exactly
        zero, and `removed_not_zero`, how many it had not; `lambda_by_layer`, the mean λ of the ramp (what it took);
        `last_step_share`, the largest share of its way that the last group went in the last step. A ramp that has not
        ended is cut off here, and these figures say so.
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
            "trimmed": self.trimmed,
        }


def block_matrices(model: Any) -> dict[str, torch.nn.Parameter]:
    """The weights of all linear layers of the blocks by name, `layers.0.mlp.up_proj` and so on."""
    return {
        f"layers.{index}.{name.removesuffix('.weight')}": parameter
        for index, layer in enumerate(decoder_layers(model))
        for name, parameter in layer.named_parameters()
        if parameter.ndim == 2
    }


def kth_smallest_magnitude(tensors: Sequence[Tensor], k: int) -> float:
    """The k-th smallest |w| (k from 1) in all fp32 tensors together, exact, without joining them.

    The bit patterns of positive floats are ordered as the floats are: counting their upper, then their lower 16 bits
    finds the one.
    """

    def rank(counts: Tensor, k: int) -> tuple[int, int]:
        total = counts.cumsum(0)
        at = int(torch.searchsorted(total, k))
        return at, k - (int(total[at - 1]) if at else 0)

    def bits(tensor: Tensor) -> Tensor:
        return tensor.detach().reshape(-1).view(torch.int32) & 0x7FFFFFFF

    def count(values: Iterable[Tensor]) -> Tensor:
        return torch.stack([torch.bincount(value, minlength=1 << 16).cpu() for value in values]).sum(0)

    upper, k = rank(count(bits(t) >> 16 for t in tensors), k)
    lower, _ = rank(count(b[(b >> 16) == upper] & 0xFFFF for b in map(bits, tensors)), k)
    found: float = struct.unpack("<f", struct.pack("<I", upper << 16 | lower))[0]
    return found


class UnstructuredL1:
    """L1 on every single weight of the blocks' matrices (not embeddings, norms, biases, head): w ← soft(w, rate·λ).

    It makes nothing faster in GGUF or on common hardware: zeros are stored and multiplied like any number. It is here
    to be measured. Either the zero share `sparsity` is asked for, and one λ for all matrices follows the law above with
    single weights as groups; or `strength` fixes λ for the whole ramp, and the share is what comes of it. The one λ
    leaves the spread over layers to the training. `trimmed` is as for GroupLasso, and has no say at a fixed strength.
    Raises RecipeError for settings that cannot be, DataError for an unknown architecture.
    """

    def __init__(
        self,
        model: Any,
        steps: int,
        *,
        sparsity: float | None = None,
        strength: float | None = None,
        start: float = 0.0,
        ramp: float = 0.2,
        trimmed: bool = True,
    ) -> None:
        self.matrices = block_matrices(model)
        if (sparsity is None) == (strength is None):
            raise RecipeError("sparsity: give either the zero share wanted or a fixed strength", "one of the two")
        if sparsity is not None and not 0 < sparsity < 1:
            raise RecipeError(f"sparsity: the zero share wanted is {sparsity}", "ask for a share between 0 and 1")
        if strength is not None and not 0 < strength < math.inf:
            raise RecipeError(f"sparsity: strength is {strength}", "ask for a positive strength, say 0.5")
        self.schedule = plan(steps, start, ramp)
        _require_float32(self.parameters())
        self.strength, self.trimmed = strength, trimmed and strength is None
        self.weights = sum(weight.numel() for weight in self.matrices.values())
        self.wanted = None if sparsity is None else max(1, round(sparsity * self.weights))
        self.step = 0
        self.frozen = False
        self.pressed = 0.0
        self.removed: list[Tensor] = []  # boolean, as the matrices, once frozen

    def parameters(self) -> list[torch.nn.Parameter]:
        """The matrices that are shrunk: they get no weight decay."""
        return list(self.matrices.values())

    def zeros(self) -> int:
        """Weights that are exactly zero."""
        return self.weights - sum(int(weight.count_nonzero()) for weight in self.matrices.values())

    @torch.no_grad()
    def after_step(self, step: int, rate: float) -> dict[str, Any]:
        """As for GroupLasso; zero_share is the share of all these weights that are zero."""
        assert step == self.step, f"step {step} after {self.step} steps"
        self.step += 1
        left = self.schedule.left(self.step)
        strength = 0.0
        if self.frozen:
            for weight, removed in zip(self.matrices.values(), self.removed, strict=True):
                weight.masked_fill_(removed, 0.0)
                removed.logical_or_(weight == 0)  # so that the mask is the zeros of the weights, as a resume reads it
        elif left:
            strength = self._press(left, rate)
        zeros = self.zeros()
        if not self.frozen and (left == 1 or (left and self.wanted is not None and zeros >= self.wanted)):
            self.frozen = True
            self.removed = [weight == 0 for weight in self.matrices.values()]
        return {
            "phase": "debias" if self.frozen else "ramp" if left else "dense",
            "lambda": strength,
            "zero_share": zeros / self.weights,
        }

    def _press(self, left: int, rate: float) -> float:
        distance = math.inf
        strength = self.strength
        if self.wanted is not None:
            distance = kth_smallest_magnitude(self.parameters(), self.wanted)
            strength = HAIR * distance / (left * rate) if rate > 0 else 0.0
        assert strength is not None
        for weight in self.matrices.values():
            shrunk = torch.nn.functional.softshrink(weight, rate * strength)
            weight.copy_(torch.where(weight.abs() <= distance, shrunk, weight) if self.trimmed else shrunk)
        self.pressed += strength
        return strength

    def state_dict(self) -> dict[str, Any]:
        """What the model and the step do not tell, for JSON; the mask is the zeros of the weights."""
        return {"step": self.step, "frozen": self.frozen, "zeros": self.zeros(), "pressed": self.pressed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`, after the model's weights; raises RunError when the zeros are not those."""
        if self.zeros() != state["zeros"]:
            raise RunError(
                f"the weights have {self.zeros()} zeros, their checkpoint's sparsity {state['zeros']}",
                "the checkpoint is damaged: delete it to go on from the one before",
            )
        self.step, self.frozen, self.pressed = int(state["step"]), bool(state["frozen"]), float(state["pressed"])
        self.removed = [weight == 0 for weight in self.matrices.values()] if self.frozen else []

    def details(self) -> dict[str, Any]:
        """For the record of changes: the zero share reached, its spread over the layers, the mean λ of the ramp."""
        shares = self.zeros() / self.weights
        spread = evenness(_weight_shares_by_layer(self.matrices))
        ramp_steps = min(max(1, self.step - self.schedule.dense), self.schedule.ramp)
        return {
            "zero_share": shares,
            "least_layer": spread.least,
            "most_layer": spread.most,
            "variation_over_layers": spread.variation,
            "lambda": self.pressed / ramp_steps,
            "trimmed": self.trimmed,
            "faster": False,
        }


@dataclass(frozen=True)
class Evenness:
    """How evenly zeros spread over layers: least and most zero share, and standard deviation ÷ mean."""

    least: float
    most: float
    variation: float


def evenness(shares: Sequence[float]) -> Evenness:
    """Of zero shares, one per layer; the variation of a model without zeros is 0."""
    mean = sum(shares) / len(shares)
    deviation = math.sqrt(sum((share - mean) ** 2 for share in shares) / len(shares))
    return Evenness(min(shares), max(shares), deviation / mean if mean else 0.0)


def sparsity_by_tensor(model: Any) -> dict[str, float]:
    """Zero share of each matrix of the blocks, and of each layer's matrices together (`layers.0` and so on)."""
    matrices = block_matrices(model)
    shares = {name: float((weight == 0).sum()) / weight.numel() for name, weight in matrices.items()}
    layers = _weight_shares_by_layer(matrices)
    return {**{f"layers.{index}": share for index, share in enumerate(layers)}, **shares}


def _weight_shares_by_layer(matrices: dict[str, torch.nn.Parameter]) -> list[float]:
    zeros: dict[int, list[int]] = {}
    for name, weight in matrices.items():
        found = zeros.setdefault(int(name.split(".")[1]), [0, 0])
        found[0] += weight.numel() - int(weight.count_nonzero())
        found[1] += weight.numel()
    return [zero / total for _, (zero, total) in sorted(zeros.items())]
