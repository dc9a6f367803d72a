"""Every measure of single positions, from the logits of both models.

Legend: N positions, V vocabulary, M measures.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from distill import divergences
from distill.models.server_commands import DRAWN_AMONG
from distill.results.evaluation_results import MEASURES
from distill.sampler import Sampler

METRICS = tuple(MEASURES)  # columns of `position_metrics`
CACHED = 2**20  # logits that the cache of a processor holds

# Of positions of one document: the draft's name, the document's number, the METRICS' least and largest values [N, M],
# and how many of the text's tokens are the draft's argmax.
Values = tuple[str, int, Tensor, Tensor, int]


def position_metrics(target_logits: Tensor, draft_logits: Tensor, sampler: Sampler, vocabulary: int) -> Tensor:
    """All METRICS per position [N, M] in fp32 from logits [N, V_target] and [N, V_draft].

    Columns from `vocabulary` on are padding in both models and get no mass. KL and TV compare the untruncated
    distributions at temperature 1. The acceptances of rejection sampling and of the draft's argmax use the
    distributions after the served sampler; llama-server's probabilistic drafts are drawn from the draft's DRAWN_AMONG
    likeliest tokens at its temperature (NaN under a greedy sampler). Greedy acceptance is that of temperature 0, which
    is the top-1 agreement by definition. A trimmed draft has −inf at the tokens it cannot propose. The KL from the
    target would be infinite there, so it is taken between the distributions over the tokens that the draft can propose;
    the served target's mass on those tokens is the ceiling of its acceptance (1 for a full head).
    """
    target = target_logits[:, :vocabulary].float()
    draft = draft_logits[:, :vocabulary].float()
    log_p, log_q = target.log_softmax(-1), draft.log_softmax(-1)
    served_p, served_q = sampler.probabilities(target), sampler.probabilities(draft)
    absent = torch.isneginf(draft)
    shared_p = log_p.masked_fill(absent, -torch.inf).log_softmax(-1) if bool(absent.any()) else log_p
    agreement = divergences.acceptance_greedy(target, draft)
    accepted = divergences.acceptance_sampling(served_p, served_q)
    drawn = torch.full_like(accepted, torch.nan)
    if sampler.temperature:
        few = divergences.likeliest(draft, DRAWN_AMONG)
        drawn = divergences.acceptance_sampling(served_p, Sampler(sampler.temperature).probabilities(few))
    return torch.stack(
        [
            divergences.forward_kl(shared_p, log_q),
            divergences.reverse_kl(log_p, log_q),
            divergences.total_variation(log_p.exp(), log_q.exp()),
            agreement,
            accepted,
            drawn,
            divergences.acceptance_match(served_p, draft),
            agreement,
            served_p.masked_fill(absent, 0).sum(-1),
        ],
        dim=-1,
    )


def all_metrics(
    target_logits: Tensor,
    draft_logits: Tensor,
    sampler: Sampler,
    vocabulary: int,
    unusual: Callable[[], None] = lambda: None,
) -> Tensor:
    """`position_metrics`, on a CPU in pieces that its cache holds, with fewer passes where all logits are finite.

    Where some are not, `unusual` is called first, which may raise.
    """
    target, draft = target_logits[:, :vocabulary], draft_logits[:, :vocabulary]
    rows = max(1, CACHED // target.shape[-1]) if target.device.type == "cpu" else max(1, len(target))
    found = []
    for p, q in zip(target.split(rows), draft.split(rows), strict=True):
        values = _finite_metrics(p.float(), q.float(), sampler) if vocabulary > DRAWN_AMONG else None
        if values is None:
            unusual()
            values = position_metrics(p, q, sampler, vocabulary)
        found.append(values)
    return torch.cat(found)


def _finite_metrics(target: Tensor, draft: Tensor, sampler: Sampler) -> Tensor | None:
    """All METRICS of finite logits [N, V] in fp32; None where some are not."""
    p, q = target.softmax(-1), draft.softmax(-1)
    ratio = target - draft  # log p − log q but for a constant of each row
    expected = torch.stack([torch.linalg.vecdot(p, ratio), -torch.linalg.vecdot(q, ratio)], -1)
    if not bool(expected.isfinite().all()):
        return None
    values, ids = draft.topk(DRAWN_AMONG + 1, dim=-1)
    # A maximum without its place takes a tenth of the time of one with it: places are looked up where that decides.
    best, proposed = target.amax(-1), ids[:, 0]
    several = values[:, 0] == values[:, 1]
    if bool(several.any()):
        proposed[several] = draft[several].argmax(-1)
    agreement = target.gather(-1, proposed[:, None])[:, 0] == best
    if bool(agreement.any()):
        agreement[agreement.clone()] = target[agreement].argmax(-1) == proposed[agreement]
    agreement = agreement.float()
    # The log of a row's sum of exponentials, from its largest logit and that one's probability.
    constant = best - p.amax(-1).log() - (values[:, 0] - q.amax(-1).log())
    accepted = torch.minimum(p, q).sum(-1)
    served_p, shared = p, accepted
    if sampler != Sampler():
        served_p = sampler.probabilities(target)
        shared = divergences.acceptance_sampling(served_p, sampler.probabilities(draft))
    drawn = torch.full_like(accepted, torch.nan)
    if sampler.temperature:
        few = (values[:, :-1] / sampler.temperature).softmax(-1)
        drawn = torch.minimum(served_p.gather(-1, ids[:, :-1]), few).sum(-1)
        tied = values[:, -1] == values[:, -2]  # then more tokens are drawn among
        if bool(tied.any()):
            among = divergences.likeliest(draft[tied], DRAWN_AMONG)
            drawn[tied] = torch.minimum(served_p[tied], Sampler(sampler.temperature).probabilities(among)).sum(-1)
    return torch.stack(
        [
            expected[:, 0] - constant,
            expected[:, 1] + constant,
            (1 - accepted).clamp(min=0),
            agreement,
            shared,
            drawn,
            served_p.gather(-1, proposed[:, None])[:, 0],
            agreement,
            served_p.sum(-1),
        ],
        dim=-1,
    )
