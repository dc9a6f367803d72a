"""The target's distributions at the scored positions of a batch: compact, or whole from hidden states.

Legend: N scored positions of a batch, c of them in a chunk, H the target's hidden size, V its vocabulary, K stored
entries, C columns of the draft's head (V, or the kept tokens of a trimmed head).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from distill.engines.torch.blocks import Packed, hidden_states, packed_logits
from distill.engines.torch.model import model_name
from distill.engines.torch.products import filled
from distill.errors import DataError
from distill.sampler import require_finite

SUMMED = 2**20  # logits that are summed at once
NOISE = 1e-4  # The relative error of logits in fp32. In narrower types it is the error of one rounding.
EMPTY = -1e4  # The log of an empty tail is finite, so that 0 · log stays 0.


@dataclass(frozen=True)
class TeacherChunk:
    """The target's distributions at c positions, as natural logarithms in fp32.

    With `ids` [c, K], `log_probabilities` [c, K] are those of the columns `ids`, likeliest first. An id beyond the
    columns stands for no column, and has no mass. Without `ids`, `log_probabilities` [c, C] are those of all columns.
    `log_tail` [c] is the log of the mass in no named column, or EMPTY. The draft can have mass outside the `ids`. It
    has no mass outside the columns of a whole distribution, because a trimmed head cannot generate those tokens.
    """

    ids: Tensor | None
    log_probabilities: Tensor
    log_tail: Tensor


FAINT = 1e-30  # Smaller sums of exponentials have lost bits in fp32.


def compress(logits: Tensor, k: int, vocabulary: int) -> TeacherChunk:
    """The k likeliest tokens of distributions given as logits [N, V], at temperature 1, with ids in int32.

    Columns from `vocabulary` on are padding without mass. The tail is a sum over the tokens outside the k likeliest,
    because one minus the sum of the others would lose digits. Raises DataError for logits that are not finite.
    """
    logits = logits.float()
    if vocabulary < logits.shape[-1]:
        logits = logits.clone()
        logits[:, vocabulary:] = -math.inf
    values, ids = logits.topk(k, dim=-1)
    if not bool(values[:, 0].isfinite().all()):
        require_finite(values[:, 0].tolist(), lambda row: f"the target at scored position {row} of a batch")
    shares = (logits - values[:, :1]).exp_()  # Both sums share the exponentials, which are most of the work.
    total = shares.sum(-1, keepdim=True)
    outside = shares.scatter_(-1, ids, 0).sum(-1, keepdim=True)
    tail = (outside / total).log().squeeze(-1)
    deep = (outside.squeeze(-1) < FAINT).nonzero().squeeze(-1)
    if len(deep):  # Next to the largest share, such a tail would be lost in fp32.
        left = logits[deep].scatter(-1, ids[deep], -torch.inf).logsumexp(-1)
        tail[deep] = left - values[deep, 0] - total[deep, 0].log()
    return TeacherChunk(ids.to(torch.int32), values - values[:, :1] - total.log(), tail.clamp(min=EMPTY))


@dataclass(frozen=True)
class CompactTeacher:
    """Distributions from a compact store at temperature 1: ids [N, K], log p [N, K], and log of the others' mass [N].

    Unused places of a position with fewer entries have the id `columns`, which no token has, and the log of 0. After
    `restrict`, `place` [V + 1] is the column of each id, and `columns` for trimmed ids and unused places.
    """

    ids: Tensor
    log_probabilities: Tensor
    log_tail: Tensor
    columns: int
    place: Tensor | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.ids)

    def chunk(self, rows: slice) -> TeacherChunk:
        """The distributions at some positions."""
        ids, logs = self.ids[rows].long(), self.log_probabilities[rows].float()
        tail = self.log_tail[rows].float().clamp(min=EMPTY)
        if self.place is not None:
            ids = self.place[ids]
            gone = ids == self.columns
            moved = logs.masked_fill(~gone, -math.inf).logsumexp(-1)
            logs, tail = logs.masked_fill(gone, -math.inf), torch.logaddexp(tail, moved)
        return TeacherChunk(ids, logs, tail)

    def restrict(self, kept: Tensor) -> CompactTeacher:
        """The same distributions over the columns of the kept ids [C], which are ascending.

        The mass of trimmed ids goes to the tail. They get column C, which the head does not have.
        """
        assert self.place is None, "these distributions are trimmed already"
        kept = kept.to(self.ids.device)
        place = torch.full((self.columns + 1,), len(kept), dtype=torch.long, device=kept.device)
        place[kept] = torch.arange(len(kept), device=kept.device)
        return replace(self, columns=len(kept), place=place)


@dataclass(frozen=True)
class LogitForm:
    """The step from head · hidden to logits: times `scale`, then capped at ±`soft_cap` (0: no cap)."""

    scale: float = 1.0
    soft_cap: float = 0.0

    def apply(self, products: Tensor) -> Tensor:
        """Logits [..., V] from products [..., V], in fp32 (fp64 if those are fp64)."""
        logits = products.to(torch.promote_types(products.dtype, torch.float32))
        logits = logits * self.scale if self.scale != 1 else logits
        return self.soft_cap * torch.tanh(logits / self.soft_cap) if self.soft_cap else logits

    def slope(self, logits: Tensor) -> Tensor | float:
        """The derivative of the logits [..., V] with respect to the products, before the logits are overwritten."""
        return self.scale * (1 - (logits / self.soft_cap).square()) if self.soft_cap else self.scale


def logit_form(config: Any) -> LogitForm:
    """The form of a model's logits, from its configuration, as in the modelling files of transformers.

    `logit_scale` multiplies (Cohere), `logits_scaling` divides (Granite), `final_logit_softcapping` caps (Gemma).
    `require_head` finds anything else that an architecture does after its head.
    """
    config = config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    divisor = float(getattr(config, "logits_scaling", None) or 1.0)
    return LogitForm(scale / divisor, float(getattr(config, "final_logit_softcapping", None) or 0.0))


def head_logits(model: Any, hidden: Tensor) -> Tensor:
    """The logits [..., V] in fp32 of hidden states [..., H] after the final norm, by the model's own head."""
    return logit_form(model.config).apply(model.get_output_embeddings()(hidden))


@dataclass(frozen=True)
class Head:
    """A head without padding: weight [V, H] in the target's type, bias [V] or none, and the form of its logits."""

    weight: Tensor
    bias: Tensor | None = None
    form: LogitForm = LogitForm()

    @classmethod
    def of(cls, model: Any, vocabulary: int) -> Head:
        """The head of a loaded model, in the model's memory. Rows from `vocabulary` on are padding."""
        layer = model.get_output_embeddings()
        weight = getattr(layer, "weight", None)
        if weight is None or not weight.is_floating_point() or weight.shape[0] < vocabulary:
            raise _unlike(model, f"its head is a {type(layer).__name__} without a row for each token")
        bias = getattr(layer, "bias", None)
        rows = slice(0, vocabulary)
        form = logit_form(model.config)
        return cls(weight.detach()[rows], None if bias is None else bias.detach()[rows], form)

    def to(self, device: torch.device) -> Head:
        """The same head on another device."""
        return replace(self, weight=self.weight.to(device), bias=None if self.bias is None else self.bias.to(device))

    def rows(self, rows: slice | Tensor) -> Head:
        """The head of some tokens."""
        return replace(self, weight=self.weight[rows], bias=None if self.bias is None else self.bias[rows])

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits [N, V] of hidden states [N, H], in fp32."""
        products = torch.nn.functional.linear(filled(hidden.to(self.weight.dtype)), self.weight, self.bias)
        return self.form.apply(products[: len(hidden)])

    def log_sums(self, hidden: Tensor) -> Tensor:
        """The log of Σ exp over the logits [N] of hidden states [N, H], in parts that fit a CPU's cache."""
        width = max(1, SUMMED // max(1, len(hidden)))
        parts = [self.rows(slice(at, at + width)).logits(hidden) for at in range(0, len(self.weight), width)]
        return torch.stack([part.logsumexp(-1) for part in parts]).logsumexp(0)


@dataclass(frozen=True)
class DenseTeacher:
    """Distributions from hidden states [N, H] after the final norm, and the target's head.

    `log_sums` returns the log of Σ exp over all logits [N]. With it, distributions over the kept columns of a trimmed
    head need products with these columns only.
    """

    hidden: Tensor
    head: Head
    kept: Tensor | None = field(default=None, repr=False)
    log_sums: Callable[[], Tensor] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.hidden)

    @property
    def columns(self) -> int:
        """The number of columns of a chunk."""
        return len(self.head.weight if self.kept is None else self.kept)

    @cached_property
    def _kept_head(self) -> Head:
        """The head of the kept columns."""
        assert self.kept is not None
        return self.head.rows(self.kept)

    @torch.no_grad()
    def chunk(self, rows: slice) -> TeacherChunk:
        """The distributions at some positions."""
        if self.kept is not None and self.log_sums is not None:
            logs = self._kept_head.logits(self.hidden[rows]) - self.log_sums()[rows].unsqueeze(-1)
            others = torch.log1p(-logs.exp().sum(-1).clamp(max=1))
            return TeacherChunk(None, logs, others.clamp(min=EMPTY))
        logs = self.head.logits(self.hidden[rows]).log_softmax(-1)
        if self.kept is None:
            return TeacherChunk(None, logs, logs.new_full(logs.shape[:1], EMPTY))
        kept = logs[:, self.kept]
        logs[:, self.kept] = -math.inf
        return TeacherChunk(None, kept, logs.logsumexp(-1).clamp(min=EMPTY))

    def restrict(self, kept: Tensor) -> DenseTeacher:
        """See CompactTeacher."""
        return replace(self, kept=kept.to(self.head.weight.device))


Teacher = CompactTeacher | DenseTeacher  # the distributions of N scored positions over C columns


@torch.no_grad()
def require_head(model: Any, head: Head, blocks: Packed) -> None:
    """Raise DataError unless `head` and the first block's hidden states give the model's own logits."""
    first = blocks.take(slice(0, 1))
    expected = packed_logits(model, first)[..., : len(head.weight)].float()
    require_finite([float(expected.amax())], lambda row: model_name(model))
    logits = head.logits(hidden_states(model, first)[0].to(head.weight.device)).to(expected.device)
    error = float((logits - expected).square().mean().sqrt() / expected.square().mean().sqrt().clamp(min=1e-12))
    if not error <= max(NOISE, 2 * torch.finfo(model.dtype).eps):
        raise _unlike(model, f"its logits differ by {error:.1%} from those of its head with {head.form}")


def _unlike(model: Any, what: str) -> DataError:
    return DataError(
        f"the distributions of a {model.config.model_type} cannot be computed from its last hidden states: {what}",
        "use teacher.kind: compact, which stores the model's own probabilities",
    )
