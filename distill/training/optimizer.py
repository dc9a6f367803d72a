"""The optimizer, AdamW or Muon for the matrices of the layers and AdamW for the rest, and its learning rates."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from distill.devices import process_count, process_index
from distill.machine import has_instructions
from distill.recipe import Recipe, Train

# ── The optimizer: AdamW, or Muon for the matrices of the layers and AdamW for all else; its rates ──

BETAS, MOMENTUM = (0.9, 0.95), 0.95  # of AdamW, and of Muon


class Muon(torch.optim.Muon):
    """torch's Muon, but for how it orthogonalises, and in `kind`: in bfloat16, or in float32 for processors without
    instructions for it, where bfloat16 takes three quarters of a step.

    Of several processes, which all have the same gradients, each orthogonalises its share of the matrices.
    """

    kind = torch.bfloat16

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step; a closure is not supported."""
        assert closure is None
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.nn.Parameter]] = {}  # of layers that are alike
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            for parameters in by_shape.values():
                for start in range(0, len(parameters), process_count()):
                    self._step(parameters[start : start + process_count()], group)

    def _step(self, parameters: list[torch.nn.Parameter], group: dict[str, Any]) -> None:
        """One step of matrices of one shape, as many as there are processes, or fewer."""
        updates = []
        for parameter in parameters:
            gradient, state = parameter.grad, self.state[parameter]
            assert gradient is not None
            if not state:
                state["momentum_buffer"] = torch.zeros_like(gradient)
            buffer = state["momentum_buffer"]
            buffer.lerp_(gradient, 1 - group["momentum"])
            updates.append(gradient.lerp(buffer, group["momentum"]).to(self.kind))
        how = group["ns_coefficients"], group["ns_steps"], group["eps"]
        for parameter, update in zip(parameters, each_orthogonalised(updates, *how), strict=True):
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(parameter.shape)))


def each_orthogonalised(
    matrices: list[Tensor], coefficients: tuple[float, float, float], steps: int, eps: float
) -> list[Tensor]:
    """At most as many matrices of one shape as there are processes, orthogonalised, each by one of them, in all."""
    mine = process_index()
    own = orthogonalised(matrices[mine], coefficients, steps, eps) if mine < len(matrices) else matrices[0]
    if process_count() == 1:
        return [own]
    own = own.contiguous()
    gathered = [torch.empty_like(own) for _ in range(process_count())]
    torch.distributed.all_gather(gathered, own)
    return gathered[: len(matrices)]


def orthogonalised(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """A matrix [M, N] with its singular values near 1, by Newton–Schulz iterations of an odd polynomial (Jordan 2024),
    in its own type.

    Of an oblong matrix most of them are done on its square of inner products, which then says what the matrix is
    multiplied by (Gram Newton–Schulz; Zhang et al. 2026). The squares are made anew after two iterations, because in
    bfloat16 their smallest eigenvalues drift.
    """
    linear, cubic, quintic = coefficients
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    oblong = 2 * wide.shape[1] > 3 * wide.shape[0]  # of others it would be more products
    wide = wide / wide.norm().clamp(min=eps)
    for span in (2, steps - 2) if oblong else (1,) * steps:
        gram = wide @ wide.T
        factor = torch.addmm(gram, gram, gram, beta=cubic, alpha=quintic)
        if span == 1:
            wide = torch.addmm(wide, factor, wide, beta=linear)
            continue
        product = factor.clone()  # of the factors so far
        product.diagonal().add_(linear)
        for _ in range(span - 1):
            half = torch.addmm(gram, factor, gram, beta=linear)
            gram = torch.addmm(half, half, factor, beta=linear)
            factor = torch.addmm(gram, gram, gram, beta=cubic, alpha=quintic)
            product = torch.addmm(product, factor, product, beta=linear)
        wide = product @ wide
    return wide.T if matrix.shape[0] > matrix.shape[1] else wide


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for the groups with `muon`, torch's AdamW for the others: one state and one list of groups.

    Muon (Jordan 2024) orthogonalises the momentum of each matrix. `match_rms_adamw` (Liu et al. 2025, section 2.2)
    gives its update the size that AdamW's has, so that one learning rate serves both.
    """

    def __init__(self, groups: list[dict[str, Any]], rate: float) -> None:
        matrices, others = ([group for group in groups if group["muon"] is muon] for muon in (True, False))
        muon = Muon(matrices, lr=rate, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw")
        if matrices[0]["params"][0].device.type == "cpu" and has_instructions("bfloat16") is False:
            muon.kind = torch.float32
        parts: list[torch.optim.Optimizer] = [muon]
        if others:
            parts.append(torch.optim.AdamW(others, lr=rate, betas=BETAS))
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of both; a closure is not supported."""
        assert closure is None
        for part, muon in zip(self.parts, (True, False), strict=False):
            # Both are replaced when a state is loaded and by libraries that wrap the optimizer.
            part.state, part.param_groups = self.state, [group for group in self.param_groups if group["muon"] is muon]
            part.step()


def make_optimizer(model: Any, settings: Train) -> torch.optim.AdamW | MuonAndAdamW:
    """The recipe's optimizer of the parameters that learn."""
    assert settings.rate is not None, "see with_rate"
    if settings.optimizer == "muon":
        return MuonAndAdamW(parameter_groups(model, muon=True), settings.rate)
    return torch.optim.AdamW(parameter_groups(model), lr=settings.rate, betas=BETAS)


def parameter_groups(model: Any, *, muon: bool = False) -> list[dict[str, Any]]:
    """The parameters that learn, in groups without weight decay.

    Embeddings and head are a group of their own (`outer`), which may have another rate. With `muon`, the
    matrices of the layers are marked so. Parameters without gradient are in no group.
    """
    outer = {id(model.get_input_embeddings().weight), id(model.lm_head.weight)}
    # A table of positions is no map between activations either.
    tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    kinds: dict[tuple[bool, bool], list[torch.nn.Parameter]] = {}  # by outer and muon
    for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
        is_outer = id(parameter) in outer
        orthogonal = muon and not is_outer and parameter.ndim == 2 and id(parameter) not in tables
        kinds.setdefault((is_outer, orthogonal), []).append(parameter)
    return [
        {"params": kinds[is_outer, orthogonal], "weight_decay": 0.0, "outer": is_outer, "muon": orthogonal}
        for is_outer, orthogonal in sorted(kinds, reverse=True)
    ]


def set_rates(optimizer: Any, rate: float, body_rate: float) -> None:
    """Give the groups the rates of a step: embeddings and head, and the body."""
    for group in optimizer.param_groups:
        group["lr"] = rate if group["outer"] else body_rate


# ── Learning rates ──

# Shares of the donor's layers that a draft keeps, and peak rates, both measured (docs/training.md#the-rate).
RATES = (1 / 6, 1.5e-3), (1.0, 1.5e-5)
# Adapters learn best at ten times the rate of whole weights (Schulman et al. 2025, LoRA Without Regret), up to what was
# measured (docs/benchmarks.md#optimizers).
ADAPTER, MOST_OF_ADAPTER = 10, {"adamw": 2e-3, "muon": 8e-3}
WARMUP, DECAY_SHARE = 0.03, 0.2  # shares of the steps: of the warm-up, and of the fall at the end


def peak_rate(kept: float) -> float:
    """The peak learning rate, to two digits, of a draft that keeps this share of its donor's layers, 0 to 1.

    Between both ends of RATES the logarithm of the rate is linear in the share.
    """
    (few, high), (whole, low) = RATES
    place = min(max((kept - few) / (whole - few), 0), 1)
    return float(f"{high * (low / high) ** place:.1e}")


def with_rate(settings: Train, kept: float) -> Train:
    """The settings with the default rate filled in, of a draft that keeps this share of its donor's layers."""
    if settings.rate is not None:
        return settings
    rate = peak_rate(kept)
    if settings.adapter is not None:
        rate = min(ADAPTER * rate, MOST_OF_ADAPTER[settings.optimizer])
    return settings.model_copy(update={"rate": rate})


def outer_share(recipe: Recipe, rate: float) -> float:
    """The peak rate of embeddings and head, as a share of the rate of the rest. A transplant made their rows anew: they
    have as much to relearn as a draft of few layers, whatever the rest has."""
    if recipe.train.embedding_rate is not None:
        return recipe.train.embedding_rate
    return 1.0 if recipe.cut.transplant is None else RATES[0][1] / rate


def rate_share(step: int, steps: int) -> float:
    """The share of the peak rate in step `step` of `steps` (from 0): a line up over the warm-up, constant, and over the
    last fifth a line to 0."""
    warm, falling = max(1, round(WARMUP * steps)), max(1, round(DECAY_SHARE * steps))
    return min(1.0, (step + 1) / warm, (steps - step) / falling)
