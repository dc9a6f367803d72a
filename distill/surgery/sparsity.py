"""Group lasso while fine-tuning: MLP neurons shrink to exactly zero, stay zero, and are cut out.

Legend: L layers, F neurons of an MLP, H hidden, |g| elements of a group.
"""

from __future__ import annotations

import math
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
# Each layer has its own λ. Let d be the norm of the largest group that is still to be removed, and r the number of
# remaining ramp steps, including this one: λ = d / (r·rate·√|g|). The threshold is then d/r. Undisturbed, d falls to
# zero in a straight line. If the loss holds neurons back, d stays above that line and λ rises until d is zero. λ
# depends only on the weights and the step, so a resume changes nothing, and no learning rate is too small. Every layer
# reaches its count in the last step of the ramp, or earlier.

RAMP = 0.2  # share of the steps
MIN_RAMP_STEPS = 10  # With fewer proximal steps, this would be pruning in one go.
ROUNDING_MARGIN = 1 + 1e-6  # a factor of λ, so that rounding does not leave the last group alive


def require_ramp(steps: int, ramp: float) -> None:
    """Raise RecipeError if a training of this many steps has no room for a ramp."""
    if round(ramp * steps) < MIN_RAMP_STEPS:
        what = f"train.steps is {steps}, and the penalty's ramp, {ramp:.0%} of them, needs {MIN_RAMP_STEPS} steps"
        raise RecipeError(what, f"train for at least {math.ceil(MIN_RAMP_STEPS / ramp)} steps")


def require_fewer(width: int, neurons: int) -> None:
    """Raise RecipeError unless a group lasso can leave `width` of each layer's neurons."""
    if not 0 < width < neurons or width % NEURON_MULTIPLE:
        half = max(1, neurons // 2 // NEURON_MULTIPLE) * NEURON_MULTIPLE
        hint = f"ask for a multiple of {NEURON_MULTIPLE} below that, such as {half}"
        raise RecipeError(f"train.sparsity.mlp_width is {width}; training starts with {neurons} neurons a layer", hint)


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


class GroupLasso:
    """Group lasso over MLP neurons, to `width` neurons in every layer. Group j is gate row, up row and down column j.

    Building it balances the model. Build it before the optimizer, and restore a checkpoint's weights afterwards.
    Only the groups that rank among those to remove are shrunk, and every step ranks them again (the trimmed penalty:
    Yun et al., ICML 2019). The textbook penalty shrinks all groups. The neurons of trained models have similar norms,
    so it would shrink the remaining neurons nearly as far as the removed ones. In return, trimming lets the norms at
    the start weigh more in the choice.
    `ramp` is a share of the steps. Raises RecipeError for an impossible width or schedule, DataError for an unknown
    architecture.
    """

    def __init__(self, model: Any, width: int, steps: int, *, ramp: float | None = None) -> None:
        ramp = RAMP if ramp is None else ramp
        self.layers = list(layers_of(model))
        self.neurons = int(self.layers[0].mlp.down_proj.in_features)
        require_fewer(width, self.neurons)
        require_ramp(steps, ramp)
        self.ramp = round(ramp * steps)  # steps
        self.step = 0
        self.frozen = False
        self.width = width
        self.to_remove = self.neurons - width
        self.root = math.sqrt(sum(part.shape[1] for part in group_parts(self.layers[0])))  # √|g|
        self.frozen_at: int | None = None
        self.kept: list[Tensor] = []  # boolean [F] per layer, after freezing
        self.missing: list[int] = []  # groups per layer that were removed although they were not zero
        balance(model)

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

    def _press(self, left: int, rate: float) -> float:
        """Take one proximal step, with `left` steps of the ramp to go. Return λ, the mean over layers."""
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
        """Put back to zero what the optimizer's moments have moved, although its gradient is zero."""
        for layer, kept in zip(self.layers, self.kept, strict=True):
            removed = (~kept).nonzero().view(-1)
            for part in group_parts(layer):
                part.index_fill_(0, removed.to(part.device), 0.0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the model's weights do not hold, for JSON."""
        return {
            "step": self.step,
            "width": self.width,
            "frozen_at": self.frozen_at,
            "kept": [numpy.packbits(kept.numpy()).tobytes().hex() for kept in self.kept],
            "missing": self.missing,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`, after the model's weights."""
        bits = [numpy.frombuffer(bytes.fromhex(text), dtype=numpy.uint8) for text in state["kept"]]
        self.kept = [torch.from_numpy(numpy.unpackbits(row, count=self.neurons).astype(bool)) for row in bits]
        self.frozen = state["frozen_at"] is not None
        for name in ("step", "frozen_at", "missing"):
            setattr(self, name, state[name])

    @torch.no_grad()
    def finish(self, model: Any) -> tuple[str, dict[str, Any]]:
        """Cut the zero neurons out of `model`, the one this was built on. Returns a sentence and details.

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
