"""L1 while fine-tuning: MLP neurons (group lasso) or single weights shrink to exactly zero and stay zero.

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
# A run has two phases. In the ramp, a proximal step follows every optimizer step. In debias, λ is 0, zeros stay zero
# and the other weights learn on. The proximal step is decoupled from the gradient, as weight decay is in AdamW. Its
# threshold is rate·λ·√|g|, in units of what Adam moves a group in one step.
# Each layer has its own λ (all single weights share one). Let d be the norm of the largest group that is still to be
# removed, and r the number of remaining ramp steps, including this one: λ = d / (r·rate·√|g|). The threshold is then
# d/r. Undisturbed, d falls to zero in a straight line. If the loss holds neurons back, d stays above that line and λ
# rises until d is zero. λ depends only on the weights and the step, so a resume changes nothing, and no learning rate
# is too small. Every layer reaches its count in the last step of the ramp, or earlier.

MIN_RAMP_STEPS = 10  # With fewer proximal steps, this would be pruning in one go.
ROUNDING_MARGIN = 1 + 1e-6  # a factor of λ, so that rounding does not leave the last group alive


def require_ramp(steps: int, ramp: float) -> None:
    """Raise RecipeError if a training of this many steps has too few steps for the ramp."""
    if round(ramp * steps) < MIN_RAMP_STEPS:
        raise RecipeError(
            f"train.steps is {steps}, but a ramp of {ramp:g} (train.sparsity.ramp) needs {MIN_RAMP_STEPS} steps",
            f"train for at least {math.ceil(MIN_RAMP_STEPS / ramp)} steps, or ramp over a larger share of them",
        )


def require_fewer(width: int, neurons: int) -> None:
    """Raise RecipeError unless a group lasso can leave `width` of each layer's neurons."""
    if not 0 < width < neurons or width % NEURON_MULTIPLE:
        half = max(1, neurons // 2 // NEURON_MULTIPLE) * NEURON_MULTIPLE
        hint = f"ask for a multiple of {NEURON_MULTIPLE} below that, such as {half}"
        raise RecipeError(f"train.sparsity.mlp_width is {width}; training starts with {neurons} neurons a layer", hint)


class Penalty(ABC):
    """The phases of a penalty over the steps of a training. `ramp` is the share of steps in the first phase.

    Raises RecipeError if the ramp has too few steps.
    """

    def __init__(self, steps: int, ramp: float) -> None:
        require_ramp(steps, ramp)
        self.ramp = round(ramp * steps)  # steps
        self.step = 0
        self.frozen = False

    @torch.no_grad()
    def after_step(self, step: int, rate: float) -> dict[str, Any]:
        """Take the proximal step after optimizer step `step` (from 0) at learning rate `rate`. Return figures to log.

        `phase` is ramp or debias. `lambda` is the mean over layers. `_zero_shares` gives the others.
        """
        assert step == self.step, f"step {step} after {self.step} steps"
        self.step += 1
        left = max(0, self.ramp + 1 - self.step)  # including this step
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
        """Return the state besides the model's weights, for JSON."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`, after the model's weights were loaded."""

    @abstractmethod
    def finish(self, model: Any) -> tuple[str, dict[str, Any]]:
        """Remove zero parts of `model`, for which this was built, as far as possible. Return a sentence and details."""

    @abstractmethod
    def _press(self, left: int, rate: float) -> float:
        """Take one proximal step, with `left` steps of the ramp to go. Return λ, the mean over layers."""

    @abstractmethod
    def _zero_shares(self) -> tuple[dict[str, float], bool]:
        """Return how much is zero, for the log, and whether everything that has to go is zero."""

    @abstractmethod
    def _freeze(self) -> None:
        """Fix the set of removed parts."""

    @abstractmethod
    def _hold(self) -> None:
        """Set removed parts to zero again. The optimizer's moments move them although their gradient is zero."""


# ── Group lasso: MLP neurons shrink to exactly zero and are cut out ──


def group_parts(layer: Any) -> list[Tensor]:
    """Return views of the parameters that hold a layer's groups, with one neuron per row [F, ·]."""
    readers = gate_and_up(layer)
    weights = [linear.weight.detach()[rows] for linear, rows in readers]
    biases = [linear.bias.detach()[rows].unsqueeze(1) for linear, rows in readers if linear.bias is not None]
    return [*weights, layer.mlp.down_proj.weight.detach().T, *biases]


def _lengths(part: Tensor) -> Tensor:
    """Return the norm of each neuron's elements in one part [F]."""
    return torch.linalg.vector_norm(part, dim=1)


def group_norms(layer: Any) -> Tensor:
    """Return ‖g‖ of every neuron [F], as fp64 on the CPU."""
    return torch.stack([_lengths(part).cpu().double() for part in group_parts(layer)]).square().sum(0).sqrt()


def zero_groups(layer: Any) -> Tensor:
    """Return which neurons are zero in every element [F], as booleans on the CPU."""
    return ~torch.stack([(part != 0).any(1) for part in group_parts(layer)]).any(0).cpu()


def balance(model: Any) -> None:
    """Make ‖up_j‖ = ‖down_j‖ for every neuron. up_j·c and down_j/c are the same function, with c² the norms' ratio.

    The bias of up scales with its row and counts in its norm. A neuron with a norm of zero does not change.
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
    """Group lasso over MLP neurons, to `width` neurons in every layer. Group j is gate row, up row and down column j.

    Building it balances the model. Build it before the optimizer, and restore a checkpoint's weights afterwards.
    Only the groups that rank among those to remove are shrunk, and every step ranks them again (the trimmed penalty:
    Yun et al., ICML 2019). The textbook penalty shrinks all groups. The neurons of trained models have similar norms,
    so it would shrink the remaining neurons nearly as far as the removed ones. In return, trimming lets the norms at
    the start weigh more in the choice.
    Raises RecipeError for an impossible width or schedule, DataError for an unknown architecture.
    """

    def __init__(self, model: Any, width: int, steps: int, *, ramp: float = 0.2) -> None:
        self.layers = list(layers_of(model))
        self.neurons = int(self.layers[0].mlp.down_proj.in_features)
        require_fewer(width, self.neurons)
        super().__init__(steps, ramp)
        self.width = width
        self.to_remove = self.neurons - width
        self.root = math.sqrt(sum(part.shape[1] for part in group_parts(self.layers[0])))  # √|g|
        self.frozen_at: int | None = None
        self.kept: list[Tensor] = []  # boolean [F] per layer, after freezing
        self.missing: list[int] = []  # groups per layer that were removed although they were not zero
        balance(model)

    def _press(self, left: int, rate: float) -> float:
        strengths = []
        for layer in self.layers:
            norms = group_norms(layer)
            order = norms.argsort(stable=True)
            distance = float(norms[order[self.to_remove - 1]])
            strength = ROUNDING_MARGIN * distance / (left * rate * self.root) if rate > 0 else 0.0
            # The proximal operator of threshold·‖g‖ is max(0, 1 − threshold/‖g‖) (group lasso: Yuan and Lin 2006).
            threshold = rate * strength * self.root
            factor = torch.where(norms > threshold, 1 - threshold / norms, 0.0)
            factor[order[self.to_remove :]] = 1.0  # Kept neurons can have the norm of a removed one in a grown donor.
            for part in group_parts(layer):
                part.mul_(factor.to(part).unsqueeze(1))
            strengths.append(strength)
        return sum(strengths) / len(strengths)

    def _zero_shares(self) -> tuple[dict[str, float], bool]:
        """Return zero groups as a share of the groups to remove, and whether all are zero.

        `zero_share` is the mean over layers and `zero_share_least` the smallest share of a layer.
        """
        zeros = [self.to_remove if self.frozen else int(zero_groups(layer).sum()) for layer in self.layers]
        shares = [min(1.0, count / self.to_remove) for count in zeros]
        return {"zero_share": sum(shares) / len(shares), "zero_share_least": min(shares)}, min(zeros) >= self.to_remove

    def _freeze(self) -> None:
        """Keep the `width` largest groups of every layer from now on, and set the others to zero."""
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
        """See `Penalty`. Zero neurons are removed, so the logits stay.

        `removed_zero_share` in the details is, by layer, the share of removed groups that the lasso had brought to
        exactly zero. It is below 1 if the ramp had not ended.
        """
        assert [id(layer) for layer in layers_of(model)] == [id(layer) for layer in self.layers]
        if not self.frozen:
            self._freeze()
        neurons = [kept.nonzero().view(-1).tolist() for kept in self.kept]
        cut_parts(model, range(len(neurons)), neurons)
        zeros = [1 - count / self.to_remove for count in self.missing]
        zero = f"in each layer, at least {min(zeros):.1%} of the removed neurons were exactly zero"
        facts = {"width_before": self.neurons, "width": self.width, "frozen_at_step": self.frozen_at}
        return f"MLP {self.neurons} -> {self.width}; {zero}", facts | {"removed_zero_share": zeros}


# ── L1 on single weights ──


class UnstructuredL1(Penalty):
    """L1 on every single weight of the layers' matrices (no embeddings, norms, biases or head): w ← soft(w, rate·λ).

    It speeds up nothing in GGUF or on common hardware, because zeros are stored and multiplied like other numbers. It
    serves measurements. `sparsity` is the requested share of zeros. One λ for all matrices follows the schedule of
    `ramp`, with single weights as groups, so that training decides how zeros spread over layers. Only the weights that
    rank among those to remove are shrunk, as in GroupLasso. Raises RecipeError for an impossible schedule, DataError
    for an unknown architecture.
    """

    def __init__(self, model: Any, steps: int, *, sparsity: float, ramp: float = 0.2) -> None:
        self.matrices = block_matrices(model)
        super().__init__(steps, ramp)
        self.weights = sum(weight.numel() for weight in self.matrices.values())
        self.to_remove = max(1, round(sparsity * self.weights))
        self.removed: list[Tensor] = []  # booleans with the matrices' shapes, after freezing

    def zeros(self) -> int:
        """Count the weights that are exactly zero."""
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
        """Return the share of zeros in all these weights, and whether it is reached."""
        zeros = self.zeros()
        return {"zero_share": zeros / self.weights}, zeros >= self.to_remove

    def _freeze(self) -> None:
        self.frozen = True
        self.removed = [weight == 0 for weight in self.matrices.values()]

    def _hold(self) -> None:
        for weight, removed in zip(self.matrices.values(), self.removed, strict=True):
            weight.masked_fill_(removed, 0.0)
            removed.logical_or_(weight == 0)  # A resume reads the mask from the weights, so both must agree.

    def state_dict(self) -> dict[str, Any]:
        """See `Penalty`. The zeros of the weights are the mask."""
        return {"step": self.step, "frozen": self.frozen, "zeros": self.zeros()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Penalty`."""
        assert self.zeros() == state["zeros"], "the weights are not those of the checkpoint"
        self.step = state["step"]
        if state["frozen"]:
            self._freeze()

    def finish(self, model: Any) -> tuple[str, dict[str, Any]]:
        """See `Penalty`. Nothing can be removed."""
        share = self.zeros() / self.weights
        return f"{share:.1%} of the layers' weights are zero, which makes no step faster", {"zero_share": share}


def block_matrices(model: Any) -> dict[str, torch.nn.Parameter]:
    """Return the weights of all linear layers of the model's layers by name, such as `layers.0.mlp.up_proj`."""
    return {
        f"layers.{index}.{name.removesuffix('.weight')}": parameter
        for index, layer in enumerate(layers_of(model))
        for name, parameter in layer.named_parameters()
        if parameter.ndim == 2
    }
