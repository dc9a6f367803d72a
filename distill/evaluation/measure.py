"""Measures between a target and a draft: divergences and acceptance of single positions, and acceptance by position in
the draft.

Legend: n blocks, S positions, N scored positions, V vocabulary, U units (prompts or documents), γ drafted tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from distill import divergences
from distill.errors import DataError
from distill.intervals import Interval, ratio_interval
from distill.models.finite import place_of, require_finite
from distill.models.packed_forward import packed_inputs
from distill.models.torch_model import model_name
from distill.packing import Packed
from distill.results.evaluation_results import MEASURES, Divergences, PositionAcceptance
from distill.sampler import Sampler
from distill.speculative.decode import Round

METRICS = tuple(MEASURES)  # columns of `position_metrics`


def position_metrics(target_logits: Tensor, draft_logits: Tensor, sampler: Sampler, vocabulary: int) -> Tensor:
    """All METRICS per position [N, 8] in fp32 from logits [N, V_target] and [N, V_draft].

    Columns from `vocabulary` on are padding in both models and get no mass. KL and TV compare the untruncated
    distributions at temperature 1. The acceptances of rejection sampling and of the draft's argmax use the
    distributions after the served sampler. Greedy acceptance is that of temperature 0, which is the top-1 agreement by
    definition. A trimmed draft has −inf at the tokens it cannot propose. The KL from the target would be infinite
    there, so it is taken between the distributions over the tokens that the draft can propose; the served target's
    mass on those tokens is the ceiling of its acceptance (1 for a full head).
    """
    target = target_logits[:, :vocabulary].float()
    draft = draft_logits[:, :vocabulary].float()
    log_p, log_q = target.log_softmax(-1), draft.log_softmax(-1)
    served_p, served_q = sampler.probabilities(target), sampler.probabilities(draft)
    absent = torch.isneginf(draft)
    shared_p = log_p.masked_fill(absent, -torch.inf).log_softmax(-1) if bool(absent.any()) else log_p
    agreement = divergences.acceptance_greedy(target, draft)
    return torch.stack(
        [
            divergences.forward_kl(shared_p, log_q),
            divergences.reverse_kl(log_p, log_q),
            divergences.total_variation(log_p.exp(), log_q.exp()),
            agreement,
            divergences.acceptance_sampling(served_p, served_q),
            divergences.acceptance_match(served_p, draft),
            agreement,
            served_p.masked_fill(absent, 0).sum(-1),
        ],
        dim=-1,
    )


@torch.inference_mode()
def measure_blocks(
    target: Any, drafts: dict[str, Any], blocks: Packed, sampler: Sampler, vocabulary: int, batch: int = 2
) -> dict[str, tuple[numpy.ndarray, numpy.ndarray]]:
    """Sums [U, 8] and counts [U] of the metrics for each draft; a unit is one document, over all its blocks.

    Raises DataError for blocks that do not number their documents.
    """
    device = next(target.parameters()).device
    sums: dict[str, dict[int, numpy.ndarray]] = {name: {} for name in drafts}
    counts: dict[int, int] = {}
    for start in range(0, len(blocks), batch):
        part = blocks.take(slice(start, start + batch))
        units = list(scored_documents(part))
        for _, number, here in units:
            counts[number] = counts.get(number, 0) + int(here.sum())
        expected = target(**packed_inputs(target, part)).logits
        _require_finite(expected, part, target)
        for name, draft in drafts.items():
            got = draft(**packed_inputs(draft, part)).logits
            _require_finite(got, part, draft)
            for block, number, here in units:
                where = here.to(device)
                values = position_metrics(expected[block][where], got[block][where], sampler, vocabulary)
                total = values.double().sum(0).cpu().numpy()
                sums[name][number] = sums[name][number] + total if number in sums[name] else total
    weights = numpy.array(list(counts.values()))
    return {name: (numpy.stack(list(found.values())), weights) for name, found in sums.items()}


def _require_finite(logits: Tensor, part: Packed, model: Any) -> None:
    """Raise DataError, naming model and position, unless the largest logits [n, S] at scored positions are finite."""
    mask = part.mask.to(logits.device)
    largest = logits.amax(-1)[mask]
    if not bool(largest.isfinite().all()):
        lengths = (part.positions[part.mask] + 1).tolist()
        require_finite(largest.tolist(), place_of(model_name(model), lengths))


def scored_documents(part: Packed) -> Iterator[tuple[int, int, Tensor]]:
    """Each document of each block that has scored positions: the block's index, the document's number among all
    documents, and those positions [S], boolean. Raises DataError for blocks that do not number their documents."""
    if part.first is None:
        raise DataError("these blocks do not number their documents", "make them again: `--redo corpus`")
    for block in range(len(part)):
        for document in range(int(part.documents[block].max()) + 1):
            here = part.mask[block] & (part.documents[block] == document)
            if bool(here.any()):
                yield block, int(part.first[block]) + document, here


def summarise(sums: numpy.ndarray, counts: numpy.ndarray, resamples: int, confidence: float) -> Divergences:
    """Each metric's mean with its interval, and the number of tokens and units behind it."""
    found = {
        name: ratio_interval(sums[:, column], counts, resamples, confidence) for column, name in enumerate(METRICS)
    }
    return Divergences(int(counts.sum()), len(counts), **found)


def position_acceptance(
    rounds: Sequence[Sequence[Round]], length: int, resamples: int, confidence: float
) -> list[PositionAcceptance]:
    """Acceptance at each drafted position 1..γ, given that it was drafted and all positions before it were accepted.

    `rounds` holds the rounds of each prompt; a position after a rejection was never reached and does not count.
    """
    table = []
    for position in range(1, length + 1):
        reached = [sum(r.drafted >= position and r.accepted >= position - 1 for r in own) for own in rounds]
        accepted = [sum(r.accepted >= position for r in own) for own in rounds]
        rate = ratio_interval(accepted, reached, resamples, confidence)
        table.append(PositionAcceptance(position, sum(reached), sum(accepted), rate))
    return table


def tokens_per_round(rounds: Sequence[Sequence[Round]], resamples: int, confidence: float) -> Interval:
    """Accepted + 1, the mean over rounds, with its interval over prompts."""
    emitted = [sum(r.accepted + 1 for r in own) for own in rounds]
    return ratio_interval(emitted, [len(own) for own in rounds], resamples, confidence)
