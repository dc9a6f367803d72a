"""The optimizer, AdamW or Muon for the matrices of the layers and AdamW for the rest, and its learning rates."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from distill.devices import process_count, process_index
from distill.machine import has_instructions
from distill.recipe import Recipe, Train

BETAS, MOMENTUM = (0.9, 0.95), 0.95  # AdamW's betas, and Muon's momentum


class Muon(torch.optim.Muon):
    """torch's Muon with another orthogonalisation, computed in the type `kind`.

    `kind` is bfloat16, or float32 for processors without bfloat16 instructions, on which bfloat16 would take three
    quarters of a step. All processes have the same gradients, and each orthogonalises its share of the matrices.
    """

    kind = torch.bfloat16

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step. A closure is not supported."""
        assert closure is None
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            for parameters in by_shape.values():
                for start in range(0, len(parameters), process_count()):
                    self._step(parameters[start : start + process_count()], group)

    def _step(self, parameters: list[torch.nn.Parameter], group: dict[str, Any]) -> None:
        """One step of at most as many matrices of one shape as there are processes."""
        updates = []
        for parameter in parameters:
            gradient, state = parameter.grad, self.state[parameter]
            assert gradient is not None
            if not state:
                state["momentum_buffer"] = torch.zeros_like(gradient)
            buffer = state["momentum_buffer"]
            buffer.lerp_(gradient, 1 - group["momentum"])
            updates.append(gradient.lerp(buffer, group["momentum"]).to(self.kind))
        settings = group["ns_coefficients"], group["ns_steps"], group["eps"]
        for parameter, update in zip(parameters, each_orthogonalised(updates, *settings), strict=True):
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(parameter.shape)))


def each_orthogonalised(
    matrices: list[Tensor], coefficients: tuple[float, float, float], steps: int, eps: float
) -> list[Tensor]:
    """Orthogonalise matrices of one shape, each in one process, and gather all of them in every process.

    There are at most as many matrices as processes.
    """
    index = process_index()
    result = orthogonalised(matrices[index], coefficients, steps, eps) if index < len(matrices) else matrices[0]
    if process_count() == 1:
        return [result]
    result = result.contiguous()
    gathered = [torch.empty_like(result) for _ in range(process_count())]
    torch.distributed.all_gather(gathered, result)
    return gathered[: len(matrices)]


def orthogonalised(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Bring the singular values of a matrix [M, N] near 1 by Newton–Schulz iterations (Jordan 2024), in its own type.

    For an oblong matrix, most iterations work on the square matrix of inner products, and give the factor of the matrix
    (Gram Newton–Schulz; Zhang et al. 2026). The inner products are computed again after two iterations, because their
    smallest eigenvalues drift in bfloat16.
    """
    linear, cubic, quintic = coefficients
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    oblong = 2 * wide.shape[1] > 3 * wide.shape[0]  # Other matrices would need more products.
    wide = wide / wide.norm().clamp(min=eps)
    for span in (2, steps - 2) if oblong else (1,) * steps:
        gram = wide @ wide.T
        factor = torch.addmm(gram, gram, gram, beta=cubic, alpha=quintic)
        if span == 1:
            wide = torch.addmm(wide, factor, wide, beta=linear)
            continue
        product = factor.clone()  # the product of the factors so far
        product.diagonal().add_(linear)
        for _ in range(span - 1):
            half = torch.addmm(gram, factor, gram, beta=linear)
            gram = torch.addmm(half, half, factor, beta=linear)
            factor = torch.addmm(gram, gram, gram, beta=cubic, alpha=quintic)
            product = torch.addmm(product, factor, product, beta=linear)
        wide = product @ wide
    return wide.T if matrix.shape[0] > matrix.shape[1] else wide


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for the groups with `muon`, torch's AdamW for the others, with one state and one list of groups.

    Muon (Jordan 2024) orthogonalises the momentum of each matrix. `match_rms_adamw` (Liu et al. 2025, section 2.2)
    gives its updates the size of AdamW's, so that one learning rate serves both.
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
        """One step of both optimizers. A closure is not supported."""
        assert closure is None
        for part, muon in zip(self.parts, (True, False), strict=False):
            # Loading a state replaces both, and so do libraries that wrap the optimizer.
            part.state, part.param_groups = self.state, [group for group in self.param_groups if group["muon"] is muon]
            part.step()


def make_optimizer(model: Any, settings: Train) -> torch.optim.AdamW | MuonAndAdamW:
    """The recipe's optimizer for the parameters that learn."""
    assert settings.rate is not None, "see with_rate"
    if settings.optimizer == "muon":
        return MuonAndAdamW(parameter_groups(model, muon=True), settings.rate)
    return torch.optim.AdamW(parameter_groups(model), lr=settings.rate, betas=BETAS)


def parameter_groups(model: Any, *, muon: bool = False) -> list[dict[str, Any]]:
    """The parameters that learn, in groups without weight decay.

    Embeddings and head are the group `outer`, which may have another rate. With `muon`, the group of the layers'
    matrices is marked. Parameters without gradient are in no group.
    """
    outer = {id(model.get_input_embeddings().weight), id(model.lm_head.weight)}
    # Muon is for maps between activations. A table of positions is none.
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
    """Set the rates of a step: `rate` for embeddings and head, `body_rate` for the other parameters."""
    for group in optimizer.param_groups:
        group["lr"] = rate if group["outer"] else body_rate


# ── Learning rates ──

# The share of the donor's layers that a draft keeps, and the best peak rate, as measured (docs/training.md#the-rate).
RATES = (1 / 6, 1.5e-3), (1.0, 1.5e-5)
# Adapters learn best at ten times the rate of whole weights (Schulman et al. 2025, LoRA Without Regret). Higher rates
# than MAX_ADAPTER_RATE were not measured (docs/benchmarks.md#losses-on-every-protocol-at-equal-tokens).
ADAPTER_RATE_RATIO, MAX_ADAPTER_RATE = 10, {"adamw": 2e-3, "muon": 8e-3}
WARMUP_SHARE, DECAY_SHARE = 0.03, 0.2  # shares of the steps


def peak_rate(kept: float) -> float:
    """The peak learning rate, to two digits, of a draft that keeps the share `kept` of its donor's layers.

    The logarithm of the rate is linear in the share between both ends of RATES.
    """
    (few, high), (whole, low) = RATES
    place = min(max((kept - few) / (whole - few), 0), 1)
    return float(f"{high * (low / high) ** place:.1e}")


def with_rate(settings: Train, kept: float) -> Train:
    """The settings with a rate: by default that of a draft that keeps the share `kept` of its donor's layers."""
    if settings.rate is not None:
        return settings
    rate = peak_rate(kept)
    if settings.adapter is not None:
        rate = min(ADAPTER_RATE_RATIO * rate, MAX_ADAPTER_RATE[settings.optimizer])
    return settings.model_copy(update={"rate": rate})


def outer_share(recipe: Recipe, rate: float) -> float:
    """The peak rate of embeddings and head, as a share of the rate of the other weights.

    A transplant creates these rows. New rows need the high rate of a draft with few layers.
    """
    if recipe.train.embedding_rate is not None:
        return recipe.train.embedding_rate
    return 1.0 if recipe.cut.transplant is None else RATES[0][1] / rate


def rate_share(step: int, steps: int) -> float:
    """The share of the peak rate in step `step` (from 0) of `steps`.

    The rate rises linearly in the warm-up, is constant, and falls linearly to 0 in the last fifth.
    """
    warm, falling = max(1, round(WARMUP_SHARE * steps)), max(1, round(DECAY_SHARE * steps))
    return min(1.0, (step + 1) / warm, (steps - step) / falling)
