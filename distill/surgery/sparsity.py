"""L1 while fine-tuning: MLP neurons (group lasso) or single weights shrink to exactly zero and then stay zero.

Legend: L layers, F neurons of an MLP, H hidden, |g| elements of a group.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy
import torch
from torch import Tensor

from distill.errors import RecipeError
from distill.surgery.layers import NEURON_MULTIPLE, cut_parts, gate_and_up, layers_of

# ── The phases of a training and the schedule of λ ──
# A run has two phases: ramp (a proximal step after every optimizer step), debias (λ = 0, zeros stay zero, the rest
# learns on). The proximal step is decoupled from the gradient as weight decay is in AdamW, so its threshold is
# rate·λ·√|g|, in units of what Adam moves a group in a step.
# Schedule of λ, one per layer (one for all single weights). Let d be the norm of the largest group that is still to
# be removed, and r the ramp steps that remain, this one included: λ = d / (r·rate·√|g|). The threshold is then d/r:
# undisturbed, d falls to zero in a straight line; where the loss holds neurons back, d stays above that line and λ
# rises until d is zero. λ depends on the weights and the step alone, so a resume changes nothing, and no learning
# rate is too small. Every layer reaches its count in the last step of the ramp, or earlier.

LEAST_RAMP = 10  # proximal steps; fewer would be pruning in one go
ROUNDING_MARGIN = 1 + 1e-6  # on λ, so that rounding does not leave the last group alive


def require_ramp(steps: int, ramp: float) -> None:
    """Raise RecipeError where a training of this many steps has no room for a ramp."""
    if round(ramp * steps) < LEAST_RAMP:
        raise RecipeError(
            f"train.steps is {steps}, and a ramp of {ramp:g} (train.sparsity.ramp) needs {LEAST_RAMP} steps",
            f"train for at least {math.ceil(LEAST_RAMP / ramp)} steps, or ramp over a larger share of them",
        )


def require_fewer(width: int, neurons: int) -> None:
    """Raise RecipeError unless a group lasso can leave `width` of each layer's neurons."""
    if not 0 < width < neurons or width % NEURON_MULTIPLE:
        half = max(1, neurons // 2 // NEURON_MULTIPLE) * NEURON_MULTIPLE
        hint = f"ask for a multiple of {NEURON_MULTIPLE} below that, such as {half}"
        raise RecipeError(f"train.sparsity.mlp_width is {width}; training starts with {neurons} neurons a layer", hint)


class Penalty(ABC):
    """The phases of a penalty over the steps of a training, of which `ramp` is a share.

    Raises RecipeError for a ramp of too few steps.
    """

    def __init__(self, steps: int, ramp: float) -> None:
        require_ramp(steps, ramp)
        self.ramp = round(ramp * steps)  # steps
        self.step = 0
        self.frozen = False

    @torch.no_grad()
    def after_step(self, step: int, rate: float) -> dict[str, Any]:
        """The proximal step that follows optimizer step `step` (from 0), taken at `rate`; figures for the log.

        phase: ramp or debias; lambda: the mean over layers; and those of `_zero_shares`.
        """
        assert step == self.step, f"step {step} after {self.step} steps"
        self.step += 1
        left = max(0, self.ramp + 1 - self.step)  # with this one
        strength = 0.0
        if self.frozen:
            self._hold()
        elif left:
            strength = self._press(left, rate)
        shares, reached = self._zero_shares()
        if left and not self.frozen and (left == 1 or reached):
            self._freeze()
        return {"phase": "debias" if self.frozen else "ramp", "lambda": strength, **shares}

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The state beyond the model, for JSON."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`, after the model's weights."""

    @abstractmethod
    def finish(self, model: Any) -> tuple[str, dict[str, Any]]:
        """Cut what is zero out of `model`, the one this was built on, as far as that can be; a sentence and details."""

    @abstractmethod
    def _press(self, left: int, rate: float) -> float:
        """One proximal step, with `left` steps of the ramp to go; λ, the mean over layers."""

    @abstractmethod
    def _zero_shares(self) -> tuple[dict[str, float], bool]:
        """How much is zero, for the log, and whether that is all that is to go."""

    @abstractmethod
    def _freeze(self) -> None:
        """Fix what is removed."""

    @abstractmethod
    def _hold(self) -> None:
        """Put back to zero what the optimizer's moments have moved, although its gradient is zero."""


# ── Group lasso: MLP neurons shrink to exactly zero and are cut out ──


def group_parts(layer: Any) -> list[Tensor]:
    """Views of the parameters that hold the groups of a layer, with one neuron a row [F, ·]."""
    readers = gate_and_up(layer)
    weights = [linear.weight.detach()[rows] for linear, rows in readers]
    biases = [linear.bias.detach()[rows].unsqueeze(1) for linear, rows in readers if linear.bias is not None]
    return [*weights, layer.mlp.down_proj.weight.detach().T, *biases]


def _lengths(part: Tensor) -> Tensor:
    """The norm of each neuron's elements in one part [F]."""
    return torch.linalg.vector_norm(part, dim=1)


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
    for layer in layers_of(model):
        _, up, down, *biases = group_parts(layer)
        rows = [up, *biases[1:]]
        size = torch.stack([_lengths(part) for part in rows]).norm(dim=0)
        ratio = _lengths(down) / size
        scale = torch.where(torch.isfinite(ratio) & (ratio > 0), ratio, 1.0).sqrt().unsqueeze(1)  # [F, 1]
        for part in rows:
            part.mul_(scale)
        down.div_(scale)


class GroupLasso(Penalty):
    """Group lasso over MLP neurons, to `width` neurons in every layer; group j = gate row, up row, down column j.

    Building it balances the model, so build it before the optimizer, and restore a checkpoint's weights afterwards.
    Only the groups that rank among those to go are shrunk, ranked anew at every step (the trimmed penalty: Yun et al.,
    ICML 2019). The neurons of trained models have similar norms, so the textbook penalty, which shrinks all groups,
    shrinks the remaining neurons nearly as far as the removed ones; trimming in turn gives the norms at the start more
    weight in the choice.
    Raises RecipeError for an impossible width or schedule, DataError for an unknown architecture.
    """

    def __init__(self, model: Any, width: int, steps: int, *, ramp: float = 0.2) -> None:
        self.layers = list(layers_of(model))
        self.neurons = int(self.layers[0].mlp.down_proj.in_features)
        require_fewer(width, self.neurons)
        super().__init__(steps, ramp)
        self.width = width
        self.to_remove = self.neurons - width
        self.root = math.sqrt(sum(part.shape[1] for part in group_parts(self.layers[0])))  # of a group's elements
        self.frozen_at: int | None = None
        self.kept: list[Tensor] = []  # boolean [F] per layer, once frozen
        self.missing: list[int] = []  # groups per layer that had to be removed and were not zero
        balance(model)

    def _press(self, left: int, rate: float) -> float:
        strengths = []
        for layer in self.layers:
            norms = group_norms(layer)
            order = norms.argsort(stable=True)
            distance = float(norms[order[self.to_remove - 1]])
            strength = ROUNDING_MARGIN * distance / (left * rate * self.root) if rate > 0 else 0.0
            # The proximal operator of threshold·‖g‖, max(0, 1 − threshold/‖g‖) (group lasso: Yuan and Lin 2006).
            threshold = rate * strength * self.root
            factor = torch.where(norms > threshold, 1 - threshold / norms, 0.0)
            factor[order[self.to_remove :]] = 1.0  # also of neurons equal to one that goes: a grown donor has them
            for part in group_parts(layer):
                part.mul_(factor.to(part).unsqueeze(1))
            strengths.append(strength)
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
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Penalty`."""
        bits = [numpy.frombuffer(bytes.fromhex(text), dtype=numpy.uint8) for text in state["kept"]]
        self.kept = [torch.from_numpy(numpy.unpackbits(row, count=self.neurons).astype(bool)) for row in bits]
        self.frozen = state["frozen_at"] is not None
        for name in ("step", "frozen_at", "missing"):
            setattr(self, name, state[name])

    @torch.no_grad()
    def finish(self, model: Any) -> tuple[str, dict[str, Any]]:
        """See `Penalty`: zero neurons are removed, and the logits stay.

        Details: `removed_zero_share` by layer, the share of the removed groups that the lasso had brought to exactly
        zero. A ramp that has not ended is cut off here, which it shows.
        """
        assert [id(layer) for layer in layers_of(model)] == [id(layer) for layer in self.layers]
        if not self.frozen:
            self._freeze()
        neurons = [kept.nonzero().view(-1).tolist() for kept in self.kept]
        cut_parts(model, range(len(neurons)), neurons)
        zeros = [1 - count / self.to_remove for count in self.missing]
        zero = f"of the neurons removed {min(zeros):.1%} or more per layer were exactly zero"
        facts = {"width_before": self.neurons, "width": self.width, "frozen_at_step": self.frozen_at}
        return f"MLP {self.neurons} -> {self.width}; {zero}", facts | {"removed_zero_share": zeros}


# ── L1 on single weights ──


class UnstructuredL1(Penalty):
    """L1 on every single weight of the blocks' matrices (not embeddings, norms, biases, head): w ← soft(w, rate·λ).

    It makes nothing faster in GGUF or on common hardware: zeros are stored and multiplied like any number. It is here
    for measurements. `sparsity` is the zero share asked for; one λ for all matrices follows the schedule of `ramp`,
    with single weights as groups, so that the spread over layers is left to the training. Only the weights that rank
    among those to go are shrunk, as in GroupLasso. Raises RecipeError for an impossible schedule, DataError for an
    unknown architecture.
    """

    def __init__(self, model: Any, steps: int, *, sparsity: float, ramp: float = 0.2) -> None:
        self.matrices = block_matrices(model)
        super().__init__(steps, ramp)
        self.weights = sum(weight.numel() for weight in self.matrices.values())
        self.to_remove = max(1, round(sparsity * self.weights))
        self.removed: list[Tensor] = []  # boolean, as the matrices, once frozen

    def zeros(self) -> int:
        """Weights that are exactly zero."""
        return self.weights - sum(int(weight.count_nonzero()) for weight in self.matrices.values())

    def _press(self, left: int, rate: float) -> float:
        magnitudes = torch.cat([weight.abs().flatten() for weight in self.matrices.values()])
        distance = float(magnitudes.kthvalue(self.to_remove).values)
        strength = ROUNDING_MARGIN * distance / (left * rate) if rate > 0 else 0.0
        for weight in self.matrices.values():
            shrunk = torch.nn.functional.softshrink(weight, rate * strength)
            weight.copy_(torch.where(weight.abs() <= distance, shrunk, weight))
        return strength

    def _zero_shares(self) -> tuple[dict[str, float], bool]:
        """zero_share is the share of all these weights."""
        zeros = self.zeros()
        return {"zero_share": zeros / self.weights}, zeros >= self.to_remove

    def _freeze(self) -> None:
        self.frozen = True
        self.removed = [weight == 0 for weight in self.matrices.values()]

    def _hold(self) -> None:
        for weight, removed in zip(self.matrices.values(), self.removed, strict=True):
            weight.masked_fill_(removed, 0.0)
            removed.logical_or_(weight == 0)  # so that the mask is the zeros of the weights, as a resume reads it

    def state_dict(self) -> dict[str, Any]:
        """See `Penalty`; the mask is the zeros of the weights."""
        return {"step": self.step, "frozen": self.frozen, "zeros": self.zeros()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Penalty`."""
        assert self.zeros() == state["zeros"], "the weights are not those of the checkpoint"
        self.step = state["step"]
        if state["frozen"]:
            self._freeze()

    def finish(self, model: Any) -> tuple[str, dict[str, Any]]:
        """See `Penalty`: nothing can be cut."""
        share = self.zeros() / self.weights
        return f"{share:.1%} of the blocks' weights are zero, which makes no step faster", {"zero_share": share}


def block_matrices(model: Any) -> dict[str, torch.nn.Parameter]:
    """The weights of all linear layers of the blocks by name, `layers.0.mlp.up_proj` and so on."""
    return {
        f"layers.{index}.{name.removesuffix('.weight')}": parameter
        for index, layer in enumerate(layers_of(model))
        for name, parameter in layer.named_parameters()
        if parameter.ndim == 2
    }
