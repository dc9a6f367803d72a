"""Random tables as targets: the exact distributions of their texts, and many rows of one table at once.

Legend: C contexts, H their tokens, l tokens of a text, V vocabulary. A text of l tokens is a number of l digits in
base V.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from table_model import TableModel
from torch import Tensor

from distill.decoding.verify import Verdict
from distill.engines.torch.model import TorchLogits
from distill.recipe import Sampler
from distill.sampler import probabilities_of


def digits(vocabulary: int, count: int) -> Tensor:
    """All texts [V^count, count]."""
    return torch.cartesian_prod(*[torch.arange(vocabulary)] * count).view(-1, count)


def number(text: Sequence[int], vocabulary: int) -> int:
    found = 0
    for token in text:
        found = found * vocabulary + token
    return found


def distributions_after(model: TableModel, sampler: Sampler, contexts: Tensor) -> Tensor:
    """The sampled distributions [C, V] after contexts [C, H] that are no shorter than the table's memory."""
    places = torch.zeros(len(contexts), dtype=torch.long)
    for column in contexts[:, -model.memory :].T:
        places = places * (model.vocabulary_size + 1) + column
    return probabilities_of(sampler, model.table[places], contexts)


def target_distributions(model: TableModel, sampler: Sampler, prompt: Sequence[int], depth: int) -> list[Tensor]:
    """The distributions [V^l, V] after every text of l = 0..depth tokens behind the prompt."""
    found = []
    for count in range(depth + 1):
        texts = digits(model.vocabulary_size, count) if count else torch.zeros(1, 0, dtype=torch.long)
        found.append(
            distributions_after(model, sampler, torch.cat([torch.tensor(prompt).expand(len(texts), -1), texts], -1))
        )
    return found


def distance(output: Sequence[Tensor], distributions: Sequence[Tensor]) -> float:
    """How far the distribution of an output, `output[l]` [V^l] being that of its texts of l tokens, is from the
    target's.

    Texts end at different lengths: each is continued by the target to the longest one.
    """
    reached, truth = output[0], torch.ones(1, dtype=torch.float64)
    for length, mass in enumerate(output[1:]):
        reached = (reached.unsqueeze(-1) * distributions[length]).flatten() + mass
        truth = (truth.unsqueeze(-1) * distributions[length]).flatten()
    return float((reached - truth).abs().max())


def accepted_counts(verdict: Verdict) -> Tensor:
    """The distribution [..., γ + 1] of how many tokens of a chain are accepted."""
    hit, miss, one = verdict.acceptance, 1 - verdict.acceptance, torch.ones_like(verdict.p[..., :1, 0])
    if verdict.last_hit:
        later = torch.cat([miss.flip(-1).cumprod(-1).flip(-1), one], -1)  # no hit from position i on
        return torch.cat([one, hit], -1) * later
    return torch.cat([one, hit.cumprod(-1)], -1) * torch.cat([miss, one], -1)


def goodness(counts: Tensor, distributions: Tensor, rare: float = 5) -> float:
    """p of χ² of counts [R, cells] against distributions [R, cells] given each row's total; cells of a row that expect
    fewer than `rare` are pooled."""
    expected = distributions * counts.sum(-1, keepdim=True)
    if bool((counts[distributions == 0] > 0).any()):
        return 0.0
    statistic, freedom = 0.0, 0
    for seen, due in zip(counts, expected, strict=True):
        small = due < rare
        cells = torch.cat([due[~small], due[small].sum().view(1)])
        found = torch.cat([seen[~small], seen[small].sum().view(1)])
        found, cells = found[cells > 0], cells[cells > 0]
        statistic += float(((found - cells) ** 2 / cells).sum())
        freedom += max(len(cells) - 1, 0)
    half = torch.tensor(freedom / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, torch.tensor(statistic / 2, dtype=torch.float64)))


class TableRows:
    """Rows of one table, each with a context of its own, as a batched model offers them."""

    def __init__(self, model: TableModel, rows: int) -> None:
        self.model, self.rows, self.capacity, self.vocabulary_size = model, rows, model.capacity, model.vocabulary_size
        self.contexts: list[list[int]] = [[] for _ in range(rows)]

    @property
    def lengths(self) -> list[int]:
        return [len(context) for context in self.contexts]

    def extend(
        self,
        tokens: Sequence[int],
        counts: Sequence[int] | None = None,
        parents: None = None,
        want: Sequence[int] | None = None,
    ) -> TorchLogits:
        counts = [len(tokens)] if counts is None else counts  # of a single row
        assert len(counts) == self.rows and sum(counts) == len(tokens) > 0
        wanted = range(len(tokens)) if want is None else want
        assert list(wanted) == sorted(wanted)
        places, number = [], 0
        for context, count in zip(self.contexts, counts, strict=True):
            for token in tokens[number : number + count]:
                context.append(token)
                places.append(self.model.place(context))
            number += count
        return TorchLogits(self.model.table[torch.tensor([places[i] for i in wanted], dtype=torch.long)])

    def rollback(self, lengths: Sequence[int]) -> None:
        for context, length in zip(self.contexts, lengths, strict=True):
            assert 0 <= length <= len(context)
            del context[length:]
