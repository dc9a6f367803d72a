"""Slices of positions by which acceptance is shown: the kind of the next token, how deep in the text it stands, whether
it was there before, in which part of a reply and in which language of code it lies.

They say where a draft is weak, and whether a good figure is made of repetition.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Self

import numpy
import torch
from torch import Tensor

from distill import divergences
from distill.data.packing import Packed, scored_documents
from distill.decoding.costs import range_start
from distill.devices import doubled
from distill.engines.server_commands import DRAWN_AMONG
from distill.measuring.evaluation_results import MEASURES, SLICES, SliceResult
from distill.sampler import Sampler
from distill.tables import ratio_interval

# ── Every measure of single positions, from the logits of both models ──
# Legend: N positions, V vocabulary, M measures.

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


# ── Slices of positions: what kind of token, how deep, whether repeated, in which part and language ──

REPEATED = 3  # tokens in a row that stood in the text before: the last of them is repeated
LONGEST_LOOP = 32  # tokens after which a loop begins again
SHORTEST_RUN = 6  # tokens that repeat what stood a period before, and twice the period, until it is called a loop

SHALLOWEST = 64  # tokens of the first bucket of depths
RARE, OTHER = 0.01, "other"  # of a slice's positions: labels that are joined

SPECIAL, WHITESPACE, NUMBER, PUNCTUATION = "end of text", "whitespace", "number", "punctuation"
FIRST, INNER = "first piece of a word", "inner piece of a word"
NEW, SEEN, LOOP = "new", "repeated", "loop"

PARTS = {"thinking": ("<think>", "</think>"), "tool call": ("<tool_call>", "</tool_call>")}
FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+#.-]*)[^\n]*$", re.MULTILINE)


@dataclass(frozen=True)
class SlicedValues:
    """Values of single positions, of documents that pass through `watch`.

    `labels` are, by document and slice, those of the tokens that its scored positions predict; `values` are the METRICS
    [N, M] by draft and document, in parts.
    """

    labels: dict[int, dict[str, list[str]]]
    values: dict[str, dict[int, list[Tensor]]] = field(default_factory=dict)

    @classmethod
    def of(cls, blocks: Packed, token_bytes: Callable[[int], bytes], ends: Collection[int]) -> Self:
        """For the scored documents of `blocks`. `token_bytes` gives the bytes that a token stands for, `ends` end a
        text."""
        labels: dict[int, dict[str, list[str]]] = {}
        for block, document, here in scored_documents(blocks):
            number, own = blocks.number(block, document), blocks.documents[block] == document
            found = slice_labels(blocks.ids[block][own].tolist(), token_bytes, ends)
            places = (here[own].nonzero()[:, 0] + 1).tolist()
            kept = labels.setdefault(number, {name: [] for name in SLICES})
            for name, of_tokens in found.items():
                kept[name] += [of_tokens[place] for place in places]
        return cls(labels)

    def watch(self, values: Iterable[Values]) -> Iterator[Values]:
        """The values, unchanged, once they have been noted; of bounds the middle."""
        for draft, number, least, most, hits in values:
            self.values.setdefault(draft, {}).setdefault(number, []).append(doubled(least + most).cpu() / 2)
            yield draft, number, least, most, hits

    def results(self, measure: str) -> list[SliceResult]:
        """The mean of one of METRICS for each label of each slice, the most frequent first (depths in their order).

        A slice with a single label is left out; labels of less than RARE of the positions are joined as OTHER.
        """
        units = numpy.repeat(numpy.arange(len(self.labels)), [len(own["token"]) for own in self.labels.values()])
        column = METRICS.index(measure)
        values = {
            draft: torch.cat([part[:, column] for number in self.labels for part in own[number]]).numpy()
            for draft, own in self.values.items()
        }
        found = []
        for name in SLICES:
            given = [label for own in self.labels.values() for label in own[name]]
            frequent = {label for label, count in Counter(given).items() if count >= RARE * len(given)}
            names = numpy.array([label if label in frequent else OTHER for label in given])
            counts = Counter(names.tolist())
            order = [label for label, _ in counts.most_common()]
            if name == "depth":
                order.sort(key=lambda label: math.inf if label == OTHER else int(label.split()[0]))
            for label in order if len(order) > 1 else ():
                here = names == label
                tokens = numpy.bincount(units[here], minlength=len(self.labels)).astype(float)
                acceptance = {}
                for draft, own in values.items():
                    sums = numpy.bincount(units[here], own[here], len(self.labels)).astype(float)
                    acceptance[draft] = ratio_interval(sums, tokens)
                found.append(SliceResult(name, label, counts[label], counts[label] / len(names), acceptance))
        return found


def slice_labels(
    ids: Sequence[int], token_bytes: Callable[[int], bytes], ends: Collection[int]
) -> dict[str, list[str]]:
    """The label of every token of a text in each of SLICES."""
    texts = [token_bytes(token).decode("utf-8", "replace") for token in ids]
    whole, starts = "".join(texts), [0]
    for text in texts:
        starts.append(starts[-1] + len(text))
    return {
        "token": token_kinds(texts, [token in ends for token in ids]),
        "depth": [depth_label(place) for place in range(len(ids))],
        "repetition": repetition(ids),
        "part": _inside(_parts(whole), starts, "answer"),
        "language": _inside(_fenced(whole), starts, "text"),
    }


def token_kinds(texts: Sequence[str], specials: Sequence[bool]) -> list[str]:
    """What each token is; an inner piece of a word begins with a letter or digit behind a letter or digit."""
    found = []
    for before, text, special in zip(["", *texts], texts, specials, strict=False):
        bare = text.strip()
        if special or not text:
            found.append(SPECIAL)
        elif not bare:
            found.append(WHITESPACE)
        elif not any(letter.isalnum() or letter in "_\N{REPLACEMENT CHARACTER}" for letter in bare):
            found.append(PUNCTUATION)
        elif all(letter.isnumeric() or letter in ".," for letter in bare):
            found.append(NUMBER)
        else:
            goes_on = text[0].isalnum() and before[-1:].isalnum()
            found.append(INNER if goes_on else FIRST)
    return found


def depth_label(place: int) -> str:
    """The bucket of so many tokens before: the first ones, then doubling."""
    low = range_start(place, SHALLOWEST)
    return f"{low} to {(2 * low or SHALLOWEST) - 1}"


def repetition(ids: Sequence[int]) -> list[str]:
    """Whether each token is part of a loop, else whether it ends REPEATED tokens that stood in the text before."""
    known: set[tuple[int, ...]] = set()
    runs = [0] * (LONGEST_LOOP + 1)  # by period: the tokens in a row, up to here, that stand a period before, too
    found = []
    for place, token in enumerate(ids):
        looping = False
        for period in range(1, min(LONGEST_LOOP, place) + 1):
            runs[period] = runs[period] + 1 if ids[place - period] == token else 0
            looping |= runs[period] >= max(2 * period, SHORTEST_RUN)
        last = tuple(ids[max(0, place - REPEATED + 1) : place + 1])
        found.append(LOOP if looping else SEEN if last in known else NEW)
        if len(last) == REPEATED:
            known.add(last)
    return found


def _parts(text: str) -> list[tuple[int, int, str]]:
    """Spans of thinking and tool calls: begin, end and name."""
    found = []
    for name, (opened, closed) in PARTS.items():
        at = text.find(opened)
        while at >= 0:
            end = text.find(closed, at)
            end = len(text) if end < 0 else end + len(closed)
            found.append((at, end, name))
            at = text.find(opened, end)
    return sorted(found)


def _fenced(text: str) -> list[tuple[int, int, str]]:
    """Spans of fenced code with the language that the fence names; one that is never closed runs to the end."""
    fences = [*FENCE.finditer(text)]
    ends = [*(fence.start() for fence in fences), len(text)]
    spans = [(fence.end(), end, fence[1].lower()) for fence, end in zip(fences, ends[1:], strict=True)]
    return [(begin, end, f"code, {name or 'unnamed'}") for begin, end, name in spans[::2]]


def _inside(spans: Sequence[tuple[int, int, str]], starts: Sequence[int], outside: str) -> list[str]:
    """Of each token, the name of the span in which its first character lies."""
    return [
        next((name for low, high, name in spans if low <= begin < high or (begin == end == low)), outside)
        for begin, end in pairwise(starts)
    ]
