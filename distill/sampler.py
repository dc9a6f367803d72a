"""The sampler: from logits to the distribution that tokens are drawn from.

Answers, losses, evaluation and verification use the same functions. Legend: N rows, V vocabulary, H tokens of history.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from distill.devices import CPU
from distill.errors import DataError
from distill.recipe import Sampler

# ── Logits that are not finite: one check, and one message that names the model and the position ──
# Logits of −∞ are legal (trimmed heads, grammars) if the row has a larger logit. NaN counts as the largest.

Place = Callable[[int], str]  # row of logits -> its model and position


def place_of(model: str, lengths: Sequence[int]) -> Place:
    """Return the places of rows that a model computed after these numbers of tokens."""
    return lambda row: f"{model} after {lengths[row]} tokens"


def place_from(place: Place | None, first: int) -> Place | None:
    """Return the places of the rows from `first` on."""
    return None if place is None else lambda row: place(first + row)


def finite_argmax(ids: list[int], largest: list[float], place: Place | None, empty: int | None) -> list[int]:
    """Return the ids of the rows' largest logits, and `empty` for rows that are −∞ everywhere.

    Raises DataError as `require_finite` does.
    """
    require_finite(largest, place, empty is not None)
    if empty is None:
        return ids
    return [token if value > -math.inf else empty for token, value in zip(ids, largest, strict=True)]


def shrunk(largest: Tensor) -> Tensor:
    """Return largest logits in two bytes each. `require_finite` gives the same result for them."""
    return (largest.float() * 1e-30).bfloat16()


def require_finite(largest: Iterable[float], place: Place | None = None, empty: bool = False) -> None:
    """Raise DataError unless the largest logit of each row is finite. `empty` also allows −∞."""
    for row, value in enumerate(largest):
        if -math.inf < value < math.inf or (empty and value == -math.inf):
            continue
        where = "a model" if place is None else place(row)
        if value == -math.inf:
            hint = "a trimmed head or a grammar leaves no token that the model has: allow more tokens"
            raise DataError(f"no token can follow: the logits of {where} are -inf everywhere", hint)
        hint = "the weights are damaged or their dtype overflows: get the model again, or load it in float32"
        raise DataError(f"the logits of {where} are not finite: the largest is {value}", hint)


# ── The sampler ──


class Logits(Protocol):
    """Logits [n, V] on the device where they were computed, in the order of `want`. Valid until the next `extend`."""

    def __len__(self) -> int:
        """Return the number n of rows."""

    @property
    def place(self) -> Place | None:
        """The model and the position of each row, for messages."""

    def argmax(self, empty: int | None = None) -> list[int]:
        """Return the best id of each row (the smallest id on ties), and `empty` for a row that is −∞ everywhere.

        Raises DataError for NaN or +∞ and, without `empty`, for a row that is −∞ everywhere.
        """

    def full(self) -> Tensor:
        """Return all logits [n, V] as a copy on the CPU, in fp32 (or fp64 if computed so). They are not checked."""


GROUP = 64  # The largest of this many neighbours decides whether all of them are searched.


def largest(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return `rows.topk(count)` of rows [N, V], values and indices.

    A CPU searches only the groups with the largest numbers. For a large vocabulary, this takes a fifth of the time.
    """
    size, whole = rows.shape[-1], rows.shape[-1] // GROUP
    if rows.device.type != CPU or whole < 4 * count:
        best = rows.topk(count)
        return best.values, best.indices
    groups = rows[:, : whole * GROUP].unflatten(-1, (whole, GROUP))
    among = groups.amax(-1).topk(count).indices.unsqueeze(-1)
    values = torch.cat((groups.gather(1, among.expand(-1, -1, GROUP)).flatten(1), rows[:, whole * GROUP :]), 1)
    places = torch.arange(whole * GROUP, size).expand(len(rows), -1)
    places = torch.cat(((among * GROUP + torch.arange(GROUP)).flatten(1), places), 1)
    best = values.topk(count)
    return best.values, places.gather(1, best.indices)


NUCLEUS = 128  # Top-p first searches this many of the likeliest tokens.


def distributions_of(
    sampler: Sampler, logits: Logits, histories: Sequence[Sequence[int]] | None = None, empty: bool = False
) -> Tensor:
    """Return `probabilities_of` a model's logits. An error names the model and the position."""
    return probabilities_of(sampler, logits.full(), histories, logits.place, empty)


def probabilities_of(
    sampler: Sampler,
    logits: Tensor,
    histories: Sequence[Sequence[int]] | Tensor | None = None,
    place: Place | None = None,
    empty: bool = False,
) -> Tensor:
    """Return the probabilities [N, V] of the next token in fp32 (fp64 if the logits are), from logits [N, V].

    Repetition penalty, temperature, top-k, top-p and min-p apply in this order. Temperature 0 is greedy: all mass is on
    the first largest logit, and top-k, top-p and min-p have no effect. A temperature so small that the largest logit
    divided by it overflows is greedy too. The penalty divides positive logits of tokens in the history and multiplies
    negative ones, as in transformers and llama.cpp.

    `histories` are each row's tokens so far, or a tensor [N, H] of them padded with −1. Only a repetition penalty reads
    them. It raises ValueError if they are missing or not one per row.

    Raises DataError, naming the row's `place`, if a logit is NaN or +∞, or if all are −∞. With `empty`, for drafts, a
    row of −∞ has no distribution: it is 0 everywhere.
    """
    values = logits if logits.dtype == torch.float64 else logits.float()
    if sampler.repetition_penalty != 1:
        values = _penalised(sampler.repetition_penalty, values, histories)
    distributions, invalid = _shaped(sampler, values)
    if not bool(invalid.any()):
        return distributions
    largest = values.amax(-1)
    require_finite(largest.flatten().tolist(), place, empty)
    return _settled(distributions, values, invalid, largest)


def unchecked_probabilities(sampler: Sampler, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return `probabilities_of` logits [..., V] that the host does not look at, and each row's largest logit [...].

    The caller must pass the largest logits to `require_finite`. If one is −∞, the distribution is 0 everywhere. Raises
    ValueError under a repetition penalty, which reads histories.
    """
    if sampler.repetition_penalty != 1:
        raise ValueError("a repetition penalty reads the tokens so far: use probabilities_of")
    values = logits if logits.dtype == torch.float64 else logits.float()
    distributions, invalid = _shaped(sampler, values, looks=False)
    largest = values.amax(-1)
    return _settled(distributions, values, invalid, largest), largest


def _shaped(sampler: Sampler, logits: Tensor, looks: bool = True) -> tuple[Tensor, Tensor]:
    """Return the distributions of logits after the penalty, and whether each [...] is invalid.

    Without `looks`, no computed value decides what is computed next, so the host never waits for a device.
    """
    if sampler.temperature == 0:
        best = logits.argmax(-1, keepdim=True)
        distributions = torch.zeros_like(logits).scatter(-1, best, 1)
        return distributions, ~logits.gather(-1, best).squeeze(-1).isfinite()
    logits, top_k = logits / sampler.temperature, sampler.top_k
    if looks and logits.device.type == CPU and 0 < top_k <= NUCLEUS and top_k < logits.shape[-1]:
        values, ids = largest(logits.reshape(-1, logits.shape[-1]), top_k + 1)
        if bool((values[:, -1] < values[:, -2]).all()):  # Without a tie with the k-th, all other tokens are out.
            ids, order = ids[:, :-1].sort()  # Of equal logits, the smaller id comes first.
            few, invalid = _narrowed(sampler, values.gather(1, order), looks)
            distributions = torch.zeros_like(logits).view(len(ids), -1).scatter(1, ids, few)
            return distributions.view(logits.shape), invalid.view(logits.shape[:-1])
    if 0 < top_k < logits.shape[-1]:
        # Ties with the k-th are kept, so that the distribution does not depend on the order of equal logits.
        kth = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -math.inf)
    return _narrowed(sampler, logits, looks)


def _narrowed(sampler: Sampler, logits: Tensor, looks: bool) -> tuple[Tensor, Tensor]:
    """Return the distributions of logits that top-p and min-p narrow, and whether each [...] is invalid."""
    if sampler.top_p < 1:
        logits = logits.masked_fill(_outside(logits.softmax(-1), sampler.top_p, looks), -math.inf)
    if sampler.min_p > 0:
        floor = logits.max(-1, keepdim=True).values + math.log(sampler.min_p)
        logits = logits.masked_fill(logits < floor, -math.inf)
    distributions = logits.softmax(-1)
    return distributions, distributions[..., 0].isnan()  # NaN, +∞, or only −∞ makes the whole row NaN.


def _settled(distributions: Tensor, logits: Tensor, invalid: Tensor, largest: Tensor) -> Tensor:
    """Return the distributions: greedy for rows that overflow at this temperature, and 0 for empty rows."""
    greedy = torch.zeros_like(distributions).scatter(-1, logits.argmax(-1, keepdim=True), 1)
    distributions = torch.where(invalid.unsqueeze(-1), greedy, distributions)
    return distributions.masked_fill(torch.isneginf(largest).unsqueeze(-1), 0)


def _penalised(penalty: float, logits: Tensor, histories: Sequence[Sequence[int]] | Tensor | None) -> Tensor:
    """Return the logits [N, V] with the penalty on the tokens of each row's history."""
    if histories is None or logits.ndim != 2 or len(histories) != len(logits):
        given = "no histories" if histories is None else f"{len(histories)} histories"
        raise ValueError(
            f"a repetition penalty of {penalty:g} needs the tokens so far of each row, but "
            f"got {given} for logits {list(logits.shape)}; pass histories, or set repetition_penalty to 1"
        )
    if not isinstance(histories, Tensor):
        longest = max(map(len, histories), default=0)
        padded = [[*row, *[-1] * (longest - len(row))] for row in histories]
        histories = torch.tensor(padded, dtype=torch.long).reshape(len(padded), longest)
    size = logits.shape[-1]
    ids = histories.to(logits.device)
    # Ids without a logit (−1, or padding of the vocabulary) go to an extra column, which is dropped afterwards.
    column = torch.where((ids >= 0) & (ids < size), ids, size)
    seen = torch.zeros(len(logits), size + 1, dtype=torch.bool, device=logits.device)
    seen = seen.scatter(-1, column, True)[:, :size]
    less = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, less, logits)


def _outside(probabilities: Tensor, top_p: float, looks: bool) -> Tensor:
    """Return which tokens [N, V] top-p drops. Likelier tokens come first, and smaller ids first on ties.

    A token stays if the mass before it is below `top_p`. The first token always stays. If a row's likeliest K reach
    that mass, they decide, because sorting a whole vocabulary takes longer than a step of a small model. This has to be
    looked at: without `looks` all tokens are sorted. A row of NaN drops nothing.
    """
    size = probabilities.shape[-1]
    rows = probabilities.detach().reshape(-1, size)
    least, count = _smallest(rows, top_p, NUCLEUS if looks else size)
    dropped = rows < least
    # Logits of two bytes often tie. A row in which more tokens are left than stay drops the last tied ones.
    excess = size - dropped.count_nonzero(dim=-1) > count
    if looks and rows.device.type == CPU:
        for row in excess.nonzero().flatten().tolist():
            tied = (rows[row] == least[row]).nonzero().flatten()
            likelier = int((rows[row] > least[row]).count_nonzero())
            dropped[row, tied[int(count[row]) - likelier :]] = True
    elif not looks or bool(excess.any()):
        tied = rows == least
        last = count.unsqueeze(-1) - (rows > least).sum(-1, keepdim=True)
        dropped |= tied & (tied.cumsum(-1) > last)
    return dropped.reshape(probabilities.shape)


def _smallest(rows: Tensor, top_p: float, among: int) -> tuple[Tensor, Tensor]:
    """Return each row's smallest probability that stays [N, 1], and how many tokens stay [N], from rows [N, V].

    The search starts with `among` of the likeliest. If these are too few, a CPU ignores tokens below (1 − top-p) ÷ V,
    which together have less mass than 1 − top-p. Other devices sort these rows completely.
    """
    size = rows.shape[-1]
    least, count, whole = _last_that_stays(_falling(rows) if among >= size else largest(rows, among)[0], top_p)
    if among >= size or bool(whole.all()):
        return least, count.clamp(min=1)
    if rows.device.type != CPU:
        least[~whole], count[~whole], _ = _last_that_stays(_falling(rows[~whole]), top_p)
        return least, count.clamp(min=1)
    for row in (~whole).nonzero().flatten().tolist():
        for floor in ((1 - top_p) / size, 0.0):  # The second is needed if rounding left a sum below top-p.
            values = rows[row]
            least[row], count[row], enough = _last_that_stays(_falling(values[values >= floor]), top_p)
            if bool(enough):
                break
    return least, count.clamp(min=1)


def _last_that_stays(values: Tensor, top_p: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the last of falling probabilities [..., K] that stays [..., 1], how many stay [...], and if one drops."""
    stays = values.cumsum(-1) - values < top_p
    count = stays.sum(-1)
    return values.gather(-1, count.unsqueeze(-1).sub(1).clamp_(min=0)), count, ~stays[..., -1]


def _falling(rows: Tensor) -> Tensor:
    """Sort each row [..., V] in falling order, NaN first. On a CPU numpy is much faster (it keeps no indices)."""
    if rows.device.type != CPU:
        return rows.sort(dim=-1, descending=True).values
    return torch.from_numpy(np.sort(rows.numpy(), axis=-1)).flip(-1)
