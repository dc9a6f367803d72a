"""The optimizer of a training: AdamW, or Muon for the matrices of the layers and AdamW for all else; its rates."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from distill.machine import has_instructions
from distill.recipe import Train

BETAS, MOMENTUM = (0.9, 0.95), 0.95  # of AdamW, and of Muon


class SingleMuon(torch.optim.Muon):
    """torch's Muon in float32, for processors without instructions for bfloat16, in which torch orthogonalises: there
    that takes three quarters of a training step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step; a closure is not supported."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient, state = parameter.grad, self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(gradient)
                buffer = state["momentum_buffer"]
                buffer.lerp_(gradient, 1 - group["momentum"])
                update = orthogonalised(
                    gradient.lerp(buffer, group["momentum"]), group["ns_coefficients"], group["ns_steps"], group["eps"]
                )
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(parameter.shape)))


def orthogonalised(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """A matrix [M, N] with its singular values near 1, by Newton–Schulz iterations of an odd polynomial (Jordan 2024),
    in its own type."""
    linear, cubic, quintic = coefficients
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    wide = wide / wide.norm().clamp(min=eps)
    for _ in range(steps):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=cubic, alpha=quintic), wide, beta=linear)
    return wide.T if matrix.shape[0] > matrix.shape[1] else wide


class MuonAndAdamW(torch.optim.Optimizer):
    """torch's Muon for the groups with `muon`, torch's AdamW for the others: one state and one list of groups.

    Muon (Jordan 2024) orthogonalises the momentum of each matrix. `match_rms_adamw` (Liu et al. 2025, section 2.2)
    gives its update the size that AdamW's has, so that one learning rate serves both.
    """

    def __init__(self, groups: list[dict[str, Any]], rate: float) -> None:
        matrices, others = ([group for group in groups if group["muon"] is muon] for muon in (True, False))
        on_cpu = matrices[0]["params"][0].device.type == "cpu"
        kind = SingleMuon if on_cpu and has_instructions("bfloat16") is False else torch.optim.Muon
        parts: list[torch.optim.Optimizer] = [
            kind(matrices, lr=rate, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw")
        ]
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
        scale = (settings.matrix_rate or settings.rate) / settings.rate
        return MuonAndAdamW(parameter_groups(model, muon=True, scale=scale), settings.rate)
    return torch.optim.AdamW(parameter_groups(model), lr=settings.rate, betas=BETAS)


def parameter_groups(model: Any, *, muon: bool = False, scale: float = 1.0) -> list[dict[str, Any]]:
    """The parameters that learn, in groups without weight decay.

    Embeddings and head are a group of their own (`outer`), because they may learn before the rest. With `muon`, the
    matrices of the layers are marked so and learn at `scale` times the rate. Parameters without gradient are in no
    group.
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
        {
            "params": kinds[is_outer, orthogonal],
            "weight_decay": 0.0,
            "outer": is_outer,
            "muon": orthogonal,
            "scale": scale if orthogonal else 1.0,
        }
        for is_outer, orthogonal in sorted(kinds, reverse=True)
    ]


def set_rates(optimizer: Any, rate: float, body_rate: float) -> None:
    """Give the groups the rates of a step: embeddings and head, and the body."""
    for group in optimizer.param_groups:
        group["lr"] = (rate if group["outer"] else body_rate) * group["scale"]


# ── Learning rates ──

# Shares of the donor's layers that a draft keeps, and peak rates: the first measured, the second as published for whole
# donors (docs/training.md#the-rate).
RATES = (1 / 6, 1.5e-3), (1.0, 5e-5)
WARMUP, DECAY_SHARE = 0.03, 0.2  # shares of the steps: of the warm-up, and of the fall at the end of schedule wsd


def peak_rate(kept: float) -> float:
    """The peak learning rate, to two digits, of a draft that keeps this share of its donor's layers, 0 to 1.

    Between both ends of RATES the logarithm of the rate is linear in the share.
    """
    (few, high), (whole, low) = RATES
    place = min(max((kept - few) / (whole - few), 0), 1)
    return float(f"{high * (low / high) ** place:.1e}")


def with_rate(settings: Train, kept: float) -> Train:
    """The settings with the rate that null stands for, in a draft that keeps this share of its donor's layers."""
    return settings if settings.rate is not None else settings.model_copy(update={"rate": peak_rate(kept)})


def rate_share(step: int, steps: int, settings: Train) -> float:
    """The share of the peak rate in step `step` of `steps` (from 0): a line up over the warm-up, then the schedule."""
    warm, final = max(1, round(WARMUP * steps)), settings.final_rate_share
    if step < warm:
        return (step + 1) / warm
    if settings.schedule == "wsd":
        constant_end = steps - max(1, round(DECAY_SHARE * steps))
        return 1 - (1 - final) * max(0, step - constant_end) / (steps - constant_end)
    progress = (step - warm) / max(1, steps - warm)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))


def body_share(step: int, settings: Train) -> float:
    """The share of the rate for the body (all but embeddings and head): 0 at first, then a warm-up of its own.

    Adam's first steps have full size whatever the gradient; without the warm-up they undo the embeddings' progress.
    """
    if step < settings.embedding_steps:
        return 0.0
    if not settings.embedding_steps:
        return 1.0
    warm = max(10, round(WARMUP * settings.steps))
    return min(1.0, (step - settings.embedding_steps + 1) / warm)
