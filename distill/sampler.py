"""The sampler: from logits to the distribution that tokens are drawn from.

The same object serves answers, losses, evaluation and verification.

Legend: N rows, V vocabulary, H tokens of history.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from distill.devices import CPU
from distill.errors import DataError, RecipeError
from distill.recipe import SamplerSettings

# ── Logits that are not finite: one check and one message, which names the model and the position ──
# Logits of −∞ are legal (trimmed heads, grammars) as long as a row has a larger one. NaN counts as the largest.

Place = Callable[[int], str]  # from a row of logits: the model and the position that they belong to


def place_of(model: str, lengths: Sequence[int]) -> Place:
    """The places of rows that a model computed after this many tokens each."""
    return lambda row: f"{model} after {lengths[row]} tokens"


def place_from(place: Place | None, first: int) -> Place | None:
    """The places of some rows of many, `first` on."""
    return None if place is None else lambda row: place(first + row)


def finite_argmax(ids: list[int], largest: list[float], place: Place | None, empty: int | None) -> list[int]:
    """The ids of the rows' largest logits, `empty` for those that are −∞ everywhere; DataError as `require_finite`."""
    require_finite(largest, place, empty is not None)
    if empty is None:
        return ids
    return [token if value > -math.inf else empty for token, value in zip(ids, largest, strict=True)]


def shrunk(largest: Tensor) -> Tensor:
    """Largest logits in two bytes each, of which `require_finite` says the same."""
    return (largest.float() * 1e-30).bfloat16()


def require_finite(largest: Iterable[float], place: Place | None = None, empty: bool = False) -> None:
    """Raise DataError unless the largest logit of each row is finite; −∞ is allowed with `empty`."""
    for row, value in enumerate(largest):
        if -math.inf < value < math.inf or (empty and value == -math.inf):
            continue
        where = "a model" if place is None else place(row)
        if value == -math.inf:
            hint = "a trimmed head or a grammar leaves no token that the model has: allow more tokens"
            raise DataError(f"no token can follow: the logits of {where} are -inf everywhere", hint)
        hint = "the weights are damaged or their type overflows: get the model again, or load it in float32"
        raise DataError(f"the logits of {where} are not finite: the largest is {value}", hint)


# ── The sampler: from logits to the distribution that tokens are drawn from ──


class Logits(Protocol):
    """Logits [n, V] where they were computed, rows in the order of `want`; valid until the model's next extend."""

    def __len__(self) -> int:
        """How many rows n there are."""

    @property
    def place(self) -> Place | None:
        """The model and the position of each row, for messages."""

    def argmax(self, empty: int | None = None) -> list[int]:
        """The best id of each row, the smallest id on ties; `empty` where a row is −∞ everywhere.

        DataError for NaN or +∞ and, without `empty`, for a row that is −∞ everywhere.
        """

    def full(self) -> Tensor:
        """All logits [n, V] as a copy on the CPU, in fp32, or fp64 where they were computed so; not checked."""


GROUP = 64  # numbers whose largest one tells whether any of them is looked at


def largest(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`rows.topk(count)` of rows [N, V], values and indices. A CPU looks only at the chunks with the largest numbers,
    which takes a fifth of the time for a large vocabulary."""
    size, whole = rows.shape[-1], rows.shape[-1] // GROUP
    if rows.device.type != CPU or whole < 4 * count:
        found = rows.topk(count)
        return found.values, found.indices
    chunks = rows[:, : whole * GROUP].unflatten(-1, (whole, GROUP))
    among = chunks.amax(-1).topk(count).indices.unsqueeze(-1)
    values = torch.cat((chunks.gather(1, among.expand(-1, -1, GROUP)).flatten(1), rows[:, whole * GROUP :]), 1)
    places = torch.arange(whole * GROUP, size).expand(len(rows), -1)
    places = torch.cat(((among * GROUP + torch.arange(GROUP)).flatten(1), places), 1)
    found = values.topk(count)
    return found.values, places.gather(1, found.indices)


HIGHEST = float(torch.finfo(torch.float32).max)
NUCLEUS = 128  # likeliest tokens among which top-p is looked for first


@dataclass(frozen=True)
class Sampler:
    """Repetition penalty, temperature, then top-k, top-p and min-p, in that order; 1, –, 0, 1 and 0 switch them off.

    Temperature 0 is greedy: all mass on the first largest logit; top-k, top-p and min-p have no effect. So is one so
    small that the largest logit divided by it overflows. The penalty divides the positive logits of tokens in the
    history and multiplies the negative ones, as transformers and llama.cpp do. RecipeError for a temperature below 0 or
    beyond fp32.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        settings = self.describe() | {"repetition_penalty": self.repetition_penalty}
        for name, value in settings.items():
            if not math.isfinite(value):
                raise RecipeError(f"{name} is {value}", "give a finite number")
        if not 0 <= self.temperature <= HIGHEST:
            raise RecipeError(f"the sampler's temperature is {self.temperature}", f"give one from 0 to {HIGHEST:.1g}")

    @classmethod
    def of(cls, settings: SamplerSettings) -> Sampler:
        """The sampler that a recipe's section describes."""
        return cls(settings.temperature, settings.top_k, settings.top_p, settings.min_p)

    def distributions(
        self, logits: Logits, histories: Sequence[Sequence[int]] | None = None, empty: bool = False
    ) -> Tensor:
        """`probabilities` of a model's logits; an error names that model and the position."""
        return self.probabilities(logits.full(), histories, logits.place, empty)

    def probabilities(
        self,
        logits: Tensor,
        histories: Sequence[Sequence[int]] | Tensor | None = None,
        place: Place | None = None,
        empty: bool = False,
    ) -> Tensor:
        """Probabilities [N, V] in fp32 (fp64 if the logits are) of the next token, from logits [N, V].

        `histories` are each row's tokens so far, or a tensor of them [N, H] padded with −1. Only a repetition penalty
        reads them, and raises ValueError where they are missing or not one per row.

        DataError, naming the `place` of the row, where a logit is NaN or +∞ or all are −∞. With `empty`, for drafts,
        the last kind of row has no distribution: 0 everywhere.
        """
        values = logits if logits.dtype == torch.float64 else logits.float()
        if self.repetition_penalty != 1:
            values = self._penalised(values, histories)
        distributions, invalid = self._shaped(values)
        if not bool(invalid.any()):
            return distributions
        largest = values.amax(-1)
        require_finite(largest.flatten().tolist(), place, empty)
        return self._settled(distributions, values, invalid, largest)

    def unchecked(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """`probabilities` of logits [..., V] that the host does not look at, and the largest logit [...] of each row.

        The caller has to hand these to `require_finite`, which `probabilities` does itself; where one is −∞, the
        distribution is 0 everywhere. ValueError under a repetition penalty, which reads histories.
        """
        if self.repetition_penalty != 1:
            raise ValueError("a repetition penalty reads the tokens so far: use probabilities")
        values = logits if logits.dtype == torch.float64 else logits.float()
        distributions, invalid = self._shaped(values, looks=False)
        largest = values.amax(-1)
        return self._settled(distributions, values, invalid, largest), largest

    def _shaped(self, logits: Tensor, looks: bool = True) -> tuple[Tensor, Tensor]:
        """The distributions of logits after the penalty, and which of them [...] are invalid.

        Without `looks` nothing that is computed decides what is computed next: no device is waited for.
        """
        if self.temperature == 0:
            best = logits.argmax(-1, keepdim=True)
            distributions = torch.zeros_like(logits).scatter(-1, best, 1)
            return distributions, ~logits.gather(-1, best).squeeze(-1).isfinite()
        logits = logits / self.temperature
        if looks and logits.device.type == CPU and 0 < self.top_k <= NUCLEUS and self.top_k < logits.shape[-1]:
            values, ids = largest(logits.reshape(-1, logits.shape[-1]), self.top_k + 1)
            if bool((values[:, -1] < values[:, -2]).all()):  # no tie with the k-th: the others are out of it
                ids, order = ids[:, :-1].sort()  # of equal ones the smaller id comes first
                few, invalid = replace(self, temperature=1.0, top_k=0)._shaped(values.gather(1, order))
                distributions = torch.zeros_like(logits).view(len(ids), -1).scatter(1, ids, few)
                return distributions.view(logits.shape), invalid.view(logits.shape[:-1])
        if 0 < self.top_k < logits.shape[-1]:
            # Ties with the k-th are kept, so that the distribution does not depend on the order of equal logits.
            kth = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < kth, -math.inf)
        if self.top_p < 1:
            logits = logits.masked_fill(_outside(logits.softmax(-1), self.top_p, looks), -math.inf)
        if self.min_p > 0:
            floor = logits.max(-1, keepdim=True).values + math.log(self.min_p)
            logits = logits.masked_fill(logits < floor, -math.inf)
        distributions = logits.softmax(-1)
        return distributions, distributions[..., 0].isnan()  # one NaN or +∞, or nothing but −∞, makes the whole row NaN

    def _settled(self, distributions: Tensor, logits: Tensor, invalid: Tensor, largest: Tensor) -> Tensor:
        """The distributions, of rows whose logits overflow at this temperature the greedy one, of empty rows 0."""
        greedy = torch.zeros_like(distributions).scatter(-1, logits.argmax(-1, keepdim=True), 1)
        distributions = torch.where(invalid.unsqueeze(-1), greedy, distributions)
        return distributions.masked_fill(torch.isneginf(largest).unsqueeze(-1), 0)

    def _penalised(self, logits: Tensor, histories: Sequence[Sequence[int]] | Tensor | None) -> Tensor:
        if histories is None or logits.ndim != 2 or len(histories) != len(logits):
            given = "no histories" if histories is None else f"{len(histories)} histories"
            raise ValueError(
                f"a repetition penalty of {self.repetition_penalty:g} needs the tokens so far of each row: "
                f"got {given} for logits {list(logits.shape)}; pass histories, or set repetition_penalty to 1"
            )
        if not isinstance(histories, Tensor):
            longest = max(map(len, histories), default=0)
            padded = [[*row, *[-1] * (longest - len(row))] for row in histories]
            histories = torch.tensor(padded, dtype=torch.long).reshape(len(padded), longest)
        size = logits.shape[-1]
        ids = histories.to(logits.device)
        # Ids without a logit (−1, or padding of the vocabulary) go to an extra column that is dropped afterwards.
        column = torch.where((ids >= 0) & (ids < size), ids, size)
        seen = torch.zeros(len(logits), size + 1, dtype=torch.bool, device=logits.device)
        seen = seen.scatter(-1, column, True)[:, :size]
        less = torch.where(logits > 0, logits / self.repetition_penalty, logits * self.repetition_penalty)
        return torch.where(seen, less, logits)

    def describe(self) -> dict[str, float]:
        """The settings, for tables and manifests; the penalty only where it is not 1."""
        settings = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        return settings | ({"repetition_penalty": self.repetition_penalty} if self.repetition_penalty != 1 else {})


def _outside(probabilities: Tensor, top_p: float, looks: bool) -> Tensor:
    """Which tokens [N, V] top-p drops: one stays while the mass before it is below `top_p`, likelier ones first and
    smaller ids first on ties; the first one always stays.

    A row's likeliest K tell, where they reach that mass: sorting a whole vocabulary takes longer than a step of a small
    model. Whether they do has to be looked at: without `looks` all are sorted. A row of NaN drops nothing.
    """
    size = probabilities.shape[-1]
    rows = probabilities.detach().reshape(-1, size)
    least, count = _smallest(rows, top_p, NUCLEUS if looks else size)
    dropped = rows < least
    # Logits of two bytes often tie: rows where more are left than stay drop the last ones of these.
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
    """Of each row [N, V] the smallest probability that stays [N, 1], and how many tokens stay [N].

    Looked for among the likeliest, this many at first. Where these are too few, a CPU leaves out tokens below
    (1 − top-p) ÷ V, all of which together hold less than 1 − top-p; other devices sort those rows at once.
    """
    size = rows.shape[-1]
    least, count, whole = _last_that_stays(_falling(rows) if among >= size else largest(rows, among)[0], top_p)
    if among >= size or bool(whole.all()):
        return least, count.clamp(min=1)
    if rows.device.type != CPU:
        least[~whole], count[~whole], _ = _last_that_stays(_falling(rows[~whole]), top_p)
        return least, count.clamp(min=1)
    for row in (~whole).nonzero().flatten().tolist():
        for floor in ((1 - top_p) / size, 0.0):  # the latter where rounding left a sum below top-p
            values = rows[row]
            least[row], count[row], enough = _last_that_stays(_falling(values[values >= floor]), top_p)
            if bool(enough):
                break
    return least, count.clamp(min=1)


def _last_that_stays(values: Tensor, top_p: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of falling probabilities [..., K] the last that stays [..., 1], how many do [...], and whether one did not."""
    stays = values.cumsum(-1) - values < top_p
    count = stays.sum(-1)
    return values.gather(-1, count.unsqueeze(-1).sub(1).clamp_(min=0)), count, ~stays[..., -1]


def _falling(rows: Tensor) -> Tensor:
    """Each row [..., V] in falling order, NaN first. On a CPU numpy sorts many times faster: it keeps no indices."""
    if rows.device.type != CPU:
        return rows.sort(dim=-1, descending=True).values
    return torch.from_numpy(np.sort(rows.numpy(), axis=-1)).flip(-1)
