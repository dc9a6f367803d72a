"""One step of a training: the loss on blocks of a teacher, over the whole head or over a trimmed one's kept columns;
and the optimizer, with its rates.

Legend: b blocks, S positions, N scored positions, H hidden, V vocabulary, C columns of the head that take part.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from distill.data.packing import PADDING, Packed, epoch_order, scored_states
from distill.errors import RecipeError
from distill.machine import has_instructions
from distill.recipe import Loss, Recipe, Train
from distill.recipe.recipe import REASON
from distill.surgery.cutter import kept_share
from distill.surgery.sparsity import require_ramp
from distill.teacher.distributions import Teacher, logit_form
from distill.training.losses import LossSettings, LossSums, head_loss
from distill.training.saved import part_of, whole_of

# ── The optimizer: AdamW, or Muon for the matrices of the layers and AdamW for all else; its rates ──

BETAS, MOMENTUM = (0.9, 0.95), 0.95  # of AdamW, and of Muon


class Muon(torch.optim.Muon):
    """torch's Muon, but for how it orthogonalises, and in `kind`: in bfloat16, or in float32 for processors without
    instructions for it, where bfloat16 takes three quarters of a step."""

    kind = torch.bfloat16

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
                update = whole_of(gradient.lerp(buffer, group["momentum"]).to(self.kind))
                update = orthogonalised(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
                update = part_of(update, parameter)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(parameter.shape)))


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


# ── The loss that a recipe's training takes, and what is checked of a training before it starts ──

Verifying = Literal["sampling", "match", "greedy"]

# The default loss. On the demo pair no loss gave more acceptance than forward KL under match and greedy, and
# the JSD gave the most under sampling (docs/benchmarks.md#training).
PROTOCOL_LOSS: dict[Verifying, Loss] = {
    "sampling": {"jsd": 1.0},
    "match": {"forward_kl": 1.0},
    "greedy": {"forward_kl": 1.0},
}


def protocol_of(settings: Train, temperature: float) -> Verifying:
    """How drafts will be verified, `auto` resolved by the served sampler's temperature."""
    if settings.protocol == "auto":
        return "greedy" if temperature == 0 else "sampling"
    return settings.protocol


def loss_settings(settings: Train, temperature: float) -> LossSettings:
    """The mixture of losses, without those of weight 0; `temperature` is the served sampler's."""
    loss = settings.loss or PROTOCOL_LOSS[protocol_of(settings, temperature)]
    return LossSettings({name: weight for name, weight in loss.items() if weight > 0}, settings.temperature)


def check_training(recipe: Recipe) -> list[str]:
    """The plan of the recipe's training as lines to print; RecipeError for settings that exclude each other."""
    settings, teacher = with_rate(recipe.train, kept_share(recipe)), recipe.teacher
    assert settings.rate is not None
    if teacher.kind == "compact" and settings.temperature != 1:
        what = f"train.temperature is {settings.temperature:g}, and a compact teacher keeps distributions at 1 alone"
        raise RecipeError(what, "use teacher.kind exact or online, or leave train.temperature at 1")
    if settings.sparsity is not None:
        require_ramp(settings.steps, settings.sparsity.ramp)
    positions = settings.batch * recipe.corpus.block
    mixture = loss_settings(settings, recipe.sampler.temperature).losses
    loss = ", ".join(f"{weight:g} {name}" for name, weight in mixture.items())
    lines = [f"train: {settings.steps} steps of {positions} positions at up to {settings.rate:g}: {loss}"]
    if (share := outer_share(recipe, settings.rate)) != 1:
        lines.append(f"train: embeddings and head at up to {share * settings.rate:g}")
    if settings.optimizer == "muon":
        lines.append("train: the layers' matrices learn by Muon")
    chosen = "the last weights are taken"
    if settings.acceptance is not None and settings.sparsity is None:
        verifying = protocol_of(settings, recipe.sampler.temperature)
        stored = f"stored distributions of validation answers are taken, no rounds are decoded: {REASON}"
        chosen = f"the weights of the highest acceptance probability ({verifying} verification) on " + (
            "validation prompts are taken" if recipe.target.load else stored
        )
    return [*lines, f"train: {chosen}"]


# ── One training step's loss on blocks of a teacher, over the whole head or over a trimmed one's kept columns ──

CHUNK = 256  # positions of the head and its loss that are computed at once
CLIP = 1.0  # the largest norm of a gradient


class Columns:
    """The head's columns that learn: the first `vocabulary`, or the kept ones of a trimmed head.

    For a trimmed head, the target's mass on the other tokens goes to the tail, and these tokens are no labels.
    """

    def __init__(self, vocabulary: int, kept: list[int] | None, device: torch.device) -> None:
        self.count = vocabulary if kept is None else len(kept)
        self.kept = None if kept is None else torch.tensor(kept, device=device)
        self.place: Tensor | None = None
        if self.kept is not None:  # the column of each id; the column after the last stands for all trimmed ids
            self.place = torch.full((vocabulary,), self.count, dtype=torch.long, device=device)
            self.place[self.kept] = torch.arange(self.count, device=device)

    def rows(self, head: Tensor) -> Tensor:
        """The rows of the head's weight [V, H] or bias [V] that take part."""
        return head if self.kept is None else head[self.kept]

    def first(self, head: Tensor) -> Tensor:
        """These rows of a weight or bias whose first ones they are."""
        return head[: self.count]

    def teacher(self, teacher: Teacher) -> Teacher:
        """The same distributions over these columns."""
        return teacher if self.kept is None else teacher.restrict(self.kept)

    def labels(self, labels: Tensor) -> Tensor:
        """The columns of labels [N]; C where a label is not among them."""
        return labels if self.place is None else self.place[labels]


class Learner(torch.nn.Module):
    """The draft with its loss.

    With the `ids` that occur in the blocks, a draft with a trimmed head holds only the rows of its embeddings and head
    that can learn, the kept ones first: of all others every gradient is zero, and they would cost as much again in
    gradients, moments and time. `whole` puts the rows back.
    """

    def __init__(self, draft: Any, columns: Columns, chunk: int, ids: Tensor | None = None) -> None:
        super().__init__()
        self.draft = draft
        self.columns, self.chunk = columns, chunk
        self.place: Tensor | None = None  # the row of each id
        self._tables: list[tuple[torch.nn.Module, str, torch.nn.Parameter]] = []
        table = draft.get_input_embeddings()
        # Of several tables another may be read by ids, too.
        alone = sum(isinstance(module, torch.nn.Embedding) for module in draft.modules()) == 1
        if ids is not None and columns.kept is not None and alone and table.weight.requires_grad:
            self._narrow(torch.cat([columns.kept, ids.to(columns.kept.device)]), table)

    def _narrow(self, ids: Tensor, table: Any) -> None:
        self.place = torch.full((len(table.weight),), PADDING, dtype=torch.long, device=ids.device)
        self.place[self.columns.kept] = torch.arange(self.columns.count, device=ids.device)
        others = ids[self.place[ids] == PADDING].unique()
        self.place[others] = torch.arange(len(others), device=ids.device) + self.columns.count
        self.ids = torch.cat([ids[: self.columns.count], others])
        if table.padding_idx is not None:  # whose row has no gradient as an embedding
            row = int(self.place[table.padding_idx])
            table.padding_idx = None if row == PADDING else row
        head, narrow = self.draft.lm_head, dict[int, torch.nn.Parameter]()  # tied ones stay tied
        for module, name in ((table, "weight"), (head, "weight"), (head, "bias")):
            if (whole := getattr(module, name, None)) is not None:
                own = torch.nn.Parameter(whole.detach()[self.ids], whole.requires_grad)
                self._tables.append((module, name, whole))
                setattr(module, name, narrow.setdefault(id(whole), own))

    @contextlib.contextmanager
    def whole(self) -> Iterator[Any]:
        """Within the block, the draft with all rows."""
        narrow = [getattr(module, name) for module, name, _ in self._tables]
        for (module, name, whole), own in zip(self._tables, narrow, strict=True):
            whole.data[self.ids] = own.data
            setattr(module, name, whole)
        try:
            yield self.draft
        finally:
            for (module, name, _), own in zip(self._tables, narrow, strict=True):
                setattr(module, name, own)

    def forward(self, blocks: Packed, teacher: Teacher, loss: LossSettings) -> tuple[Tensor, LossSums]:
        """Σ ℓ over the N scored positions, and the sums for the log; divide by their number over the whole step."""
        labels = self.columns.labels(blocks.labels().long()[blocks.mask])
        rows = self.columns.rows
        if self.place is not None:
            blocks, rows = replace(blocks, ids=self.place[blocks.ids.long()]), self.columns.first
        hidden = scored_states(self.draft, blocks)  # [N, H]
        head = self.draft.lm_head
        bias = None if getattr(head, "bias", None) is None else rows(head.bias)
        teacher, form = self.columns.teacher(teacher), logit_form(self.draft.config)
        return head_loss(hidden, rows(head.weight), teacher, labels, loss, self.chunk, bias, form)


def batch_blocks(step: int, batch: int, count: int, seed: int) -> Tensor:
    """Indices [b] of the blocks of one step: a pure function, so that a resumed run sees the same data."""
    places = [divmod(number, count) for number in range(step * batch, (step + 1) * batch)]
    orders = {epoch: epoch_order(count, seed, epoch) for epoch in {epoch for epoch, _ in places}}
    return torch.tensor([int(orders[epoch][place]) for epoch, place in places], dtype=torch.long)
