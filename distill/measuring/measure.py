"""Measures between a target and its drafts: of single positions, summed by document, and of decoded rounds.

Whatever gives a position's values (models of transformers, GGUF files, a store of distributions), `sum_by_document`
adds them up.

Legend: n blocks, S positions, N scored ones, c rows, H hidden, V vocabulary, M measures, U units (documents), γ drafted
tokens.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from distill import divergences
from distill.data.packing import Packed, hidden_states, packed_logits, scored_documents
from distill.data.repetition import NEW, SEEN, repetition
from distill.data.samples import Request
from distill.decoding.batch import refill
from distill.decoding.calibration import Recorded, Recorder
from distill.decoding.costs import range_start
from distill.decoding.decode import Round, decode_text, room_for
from distill.decoding.drafters import ModelDrafter, distribution_sampler
from distill.decoding.lengths import LONGEST, Features, NGramIndex, features_of
from distill.decoding.rules import GREEDY, Rules
from distill.decoding.verify import Random
from distill.devices import doubled
from distill.engines.loaded import with_rows
from distill.engines.model import Model
from distill.engines.server_commands import DRAWN_AMONG
from distill.engines.torch.model import model_name
from distill.errors import DataError
from distill.measuring.evaluation_results import MEASURES, SLICES, ByText, Divergences, Group, PositionAcceptance
from distill.progress import Progress
from distill.sampler import Sampler, place_of, require_finite
from distill.tables import Interval, ratio_interval
from distill.teacher.distributions import head_logits

CHUNK = 64  # positions that models that read single texts take at once
HELD = 5 * 2**24  # logits of each model that are held at once of models that read blocks: 320 MiB, 512 rows of 152k
TRIED = 16  # positions on which a model's head is compared with its own logits
Rows = Callable[[int, Tensor], Tensor]  # a block's index and its positions [c] → logits [c, V]
Sums = NDArray[numpy.float64]

# ── Every measure of single positions, from the logits of both models ──

METRICS = tuple(MEASURES)  # columns of `position_metrics`
CACHED = 2**20  # logits that the cache of a processor holds

# Of positions of one document: the draft's name, the document's number, the METRICS' least and largest values [N, M],
# and how many of the text's tokens are the draft's argmax.
Values = tuple[str, int, Tensor, Tensor, int]


def position_metrics(target_logits: Tensor, draft_logits: Tensor, sampler: Sampler, vocabulary: int) -> Tensor:
    """All METRICS per position [N, M] in fp32 from logits [N, V_target] and [N, V_draft].

    Columns from `vocabulary` on are padding in both models and get no mass. KL compares the untruncated
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
    accepted = divergences.acceptance_sampling(served_p, served_q)
    drawn = torch.full_like(accepted, torch.nan)
    if sampler.temperature:
        few = divergences.likeliest(draft, DRAWN_AMONG)
        drawn = divergences.acceptance_sampling(served_p, Sampler(sampler.temperature).probabilities(few))
    return torch.stack(
        [
            divergences.forward_kl(shared_p, log_q),
            divergences.reverse_kl(log_p, log_q),
            accepted,
            drawn,
            divergences.acceptance_match(served_p, draft),
            divergences.acceptance_greedy(target, draft),
            served_p.masked_fill(absent, 0).sum(-1),
        ],
        dim=-1,
    )


def all_metrics(target_logits: Tensor, draft_logits: Tensor, sampler: Sampler, vocabulary: int) -> Tensor:
    """`position_metrics`, on a CPU in pieces that its cache holds."""
    rows = max(1, CACHED // vocabulary) if target_logits.device.type == "cpu" else max(1, len(target_logits))
    pieces = zip(target_logits.split(rows), draft_logits.split(rows), strict=True)
    return torch.cat([position_metrics(p, q, sampler, vocabulary) for p, q in pieces])


# ── Sums by document ──


@dataclass(frozen=True)
class Measured:
    """One draft on one domain: sums of METRICS over the positions of each unit, a document over all its blocks.

    `least` and `most` [U, M] are of what a compact store allows, the same where the target was read; `counts` [U] are
    the units' positions, `hits` [U] those whose next token in the text is the draft's argmax (0 if not counted),
    `units` [U] the units' numbers among all documents.
    """

    least: Sums
    most: Sums
    counts: Sums
    hits: Sums
    units: list[int]

    def take(self, rows: Sequence[int]) -> Measured:
        """Some of the units."""
        units = [self.units[row] for row in rows]
        return Measured(self.least[rows], self.most[rows], self.counts[rows], self.hits[rows], units)

    def bounds(self) -> dict[str, tuple[Interval, Interval]]:
        """The intervals of each measure's least and largest mean."""
        intervals = {}
        for name, least, most in zip(METRICS, self.least.T, self.most.T, strict=True):
            low = ratio_interval(least, self.counts)
            same = numpy.array_equal(least, most)
            intervals[name] = low, low if same else ratio_interval(most, self.counts)
        return intervals

    def divergences(self) -> Divergences:
        """Each measure's mean, of bounds their middle, with an interval that covers both."""
        figures = {
            name: Interval((low.mean + high.mean) / 2, low.low, high.high)
            for name, (low, high) in self.bounds().items()
        }
        return Divergences(int(self.counts.sum()), len(self.counts), **figures)


@torch.inference_mode()
def sum_by_document(values: Iterable[Values]) -> dict[str, Measured]:
    """What was measured of each draft; the documents stand in the order in which they come."""
    totals: dict[str, dict[int, Sums]] = {}
    for draft, number, least, most, hits in values:
        sums = torch.stack([doubled(least).sum(0), doubled(most).sum(0)]).cpu().numpy()
        row = numpy.append(sums, [len(least), hits])  # [2 M + 2]
        own = totals.setdefault(draft, {})
        own[number] = own[number] + row if number in own else row
    measured = {}
    for draft, own in totals.items():
        columns = numpy.split(numpy.stack([*own.values()]), [len(METRICS), 2 * len(METRICS)], axis=1)
        measured[draft] = Measured(columns[0], columns[1], columns[2][:, 0], columns[2][:, 1], [*own])
    return measured


class RowLogits:
    """A model of transformers whose head multiplies the rows that are asked for: of a vocabulary of 150,000 tokens, the
    logits of whole blocks fill gigabytes.

    Where that does not give the model's own logits, which is tried on the first blocks, whole blocks are computed.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._by_rows: bool | None = None

    def of(self, blocks: Packed) -> Rows:
        """The logits of these blocks; their hidden states [n, S, H] are held."""
        if self._by_rows is None:
            self._by_rows = self._own(blocks)
        if not self._by_rows:
            logits = packed_logits(self.model, blocks)
            return lambda block, rows: logits[block][rows.to(logits.device)]
        states = hidden_states(self.model, blocks)
        return lambda block, rows: head_logits(self.model, states[block][rows.to(states.device)])

    def _own(self, blocks: Packed) -> bool:
        """Whether the head gives the model's own logits at the first positions of the first block."""
        size = min(TRIED, blocks.ids.shape[1])
        parts = {name: value[:1, :size] for name, value in blocks.tensors().items()}
        few = replace(blocks.take(slice(0, 1)), **parts)
        own = packed_logits(self.model, few).float()
        found = head_logits(self.model, hidden_states(self.model, few))
        if found.shape != own.shape:
            return False
        largest = float(own.nan_to_num(0, 0, 0).abs().max())  # −∞ is the same in both, or they differ
        allowed = largest * max(1e-4, 4 * torch.finfo(self.model.dtype).eps)
        return torch.allclose(found.to(own), own, rtol=0, atol=allowed, equal_nan=True)


def block_values(
    target: Any, drafts: Mapping[str, Any], blocks: Packed, sampler: Sampler, vocabulary: int, batch: int = 2
) -> Iterator[Values]:
    """Of models of transformers, which read whole blocks. DataError for logits that are not finite, and for blocks that
    do not number their documents."""
    big, small = RowLogits(target), {name: RowLogits(draft) for name, draft in drafts.items()}
    for start in range(0, len(blocks), batch):
        part = blocks.take(slice(start, start + batch))
        documents = [(block, part.number(block, own), here) for block, own, here in scored_documents(part)]
        expected, positions = big.of(part), part.positions
        for name, draft in small.items():
            got = draft.of(part)
            for block, number, here in documents:
                for rows in here.nonzero()[:, 0].split(max(1, HELD // vocabulary)):
                    lengths = (positions[block, rows] + 1).tolist()
                    p, q = expected(block, rows), got(block, rows)
                    _require_finite(((target, p), (draft.model, q)), lengths)
                    values = all_metrics(p, q.to(p.device), sampler, vocabulary)
                    del p, q  # before the next are made
                    yield name, number, values, values, 0


def text_values(
    target: Model, drafts: Mapping[str, Model], blocks: Packed, sampler: Sampler, vocabulary: int, domain: str
) -> Iterator[Values]:
    """Of models that read one text after another, such as GGUF files: each document of a block by itself. DataError as
    of `block_values`."""
    documents = list(scored_documents(blocks))
    progress = Progress(f"logits of texts, {domain}", len(documents))
    for block, document, here in documents:
        number, own = blocks.number(block, document), blocks.documents[block] == document
        ids, scored = blocks.ids[block][own].tolist(), here[own]
        for model in (target, *drafts.values()):
            model.rollback([0])
        for start in range(0, int(scored.nonzero().max()) + 1, CHUNK):
            part, where = ids[start : start + CHUNK], scored[start : start + CHUNK]
            expected = target.extend(part)
            expected.argmax()  # which names the place of logits that are not finite
            for name, draft in drafts.items():
                got = draft.extend(part)
                got.argmax()
                values = all_metrics(expected.full()[where], got.full()[where], sampler, vocabulary)
                yield name, number, values, values, 0
        progress.step()


def _require_finite(logits: Sequence[tuple[Any, Tensor]], lengths: Sequence[int]) -> None:
    """Raise DataError, naming model and position, unless each row [c, V] of each model has a finite largest logit."""
    for model, rows in logits:
        require_finite(rows.amax(-1).tolist(), place_of(model_name(model), lengths))


# ── Slices of positions: how deep in the text they stand, and whether their text was there before ──

SHALLOWEST = 64  # tokens of the first bucket of depths


@dataclass(frozen=True)
class SlicedValues:
    """Values of single positions, of documents that pass through `watch`.

    `labels` are, by document and slice, those of the tokens that its scored positions predict; `values` are the METRICS
    [N, M] by draft and document, in parts.
    """

    labels: dict[int, dict[str, list[str]]]
    values: dict[str, dict[int, list[Tensor]]] = field(default_factory=dict)

    @classmethod
    def of(cls, blocks: Packed) -> Self:
        """For the scored documents of `blocks`."""
        labels: dict[int, dict[str, list[str]]] = {}
        for block, document, here in scored_documents(blocks):
            number, own = blocks.number(block, document), blocks.documents[block] == document
            ids = blocks.ids[block][own].tolist()
            found = {"depth": [depth_label(place) for place in range(len(ids))], "repetition": repetition(ids)}
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

    def results(self, measure: str) -> list[Group]:
        """The mean of one of METRICS for each label of each slice; a slice with a single label is left out."""
        units = numpy.repeat(numpy.arange(len(self.labels)), [len(own["depth"]) for own in self.labels.values()])
        column = METRICS.index(measure)
        values = {
            draft: torch.cat([part[:, column] for number in self.labels for part in own[number]]).numpy()
            for draft, own in self.values.items()
        }
        found = []
        for name in SLICES:
            names = numpy.array([label for own in self.labels.values() for label in own[name]])
            order = sorted({*names.tolist()}, key=lambda label: (len(label), label))
            for label in order if len(order) > 1 else ():
                here = names == label
                tokens = numpy.bincount(units[here], minlength=len(self.labels)).astype(float)
                acceptance = {
                    draft: ratio_interval(
                        numpy.bincount(units[here], own[here], len(self.labels)).astype(float), tokens
                    )
                    for draft, own in values.items()
                }
                found.append(Group(name, label, int((tokens > 0).sum()), int(tokens.sum()), acceptance))
        return found


def depth_label(place: int) -> str:
    """The bucket of this many tokens before: the first ones, then doubling."""
    low = range_start(place, SHALLOWEST)
    return f"{low} to {(2 * low or SHALLOWEST) - 1}"


# ── Decoded rounds ──

Text = tuple[Sequence[int], list[int]]  # a prompt, and what the target wrote after it

Judged = list[list[tuple[int, str, bool]]]  # by prompt: position, kind of text, whether the draft's token was accepted


def judged_positions(rounds: Sequence[Sequence[Round | Recorded]], texts: Sequence[Text]) -> Judged:
    """The positions 1..γ of each text's rounds that were drafted, and before which all were accepted; whether the
    target's own token there repeats the text before it."""
    found = Judged()
    for own, (prompt, new) in zip(rounds, texts, strict=True):
        kinds, here = iter(repetition([*prompt, *new])[len(prompt) + 1 :]), list[tuple[int, str, bool]]()
        for one in own:
            after = zip(range(1, one.accepted + 2), kinds, strict=False)
            here += [(at, kind, at <= one.accepted) for at, kind in after if at <= one.drafted]
        found.append(here)
    return found


def position_acceptance(judged: Judged, length: int, of: Collection[str] = (NEW, SEEN)) -> list[PositionAcceptance]:
    """Acceptance at each drafted position 1..γ in text `of` these kinds."""
    table = []
    for position in range(1, length + 1):
        here = [[hit for at, kind, hit in own if at == position and kind in of] for own in judged]
        reached, accepted = [*map(len, here)], [*map(sum, here)]
        table.append(PositionAcceptance(position, sum(reached), sum(accepted), ratio_interval(accepted, reached)))
    return table


def positions_by_text(judged: Judged, length: int) -> ByText:
    """`position_acceptance` of new and of repeated text."""
    return {kind: position_acceptance(judged, length, {kind}) for kind in (NEW, SEEN)}


def tokens_per_round(rounds: Sequence[Sequence[Round | Recorded]]) -> Interval:
    """Accepted + 1, the mean over rounds, with its interval over prompts."""
    emitted = [sum(r.accepted + 1 for r in own) for own in rounds]
    return ratio_interval(emitted, [len(own) for own in rounds])


def decode_rounds(
    target: Model,
    draft: Model,
    prompts: Sequence[Sequence[int]],
    length: int,
    new_tokens: int,
    rules: Rules,
    title: str,
) -> list[list[Recorded]]:
    """Speculative decoding of every prompt from cold caches, with rounds of one `length`; verifier match gets the
    draft's best tokens."""
    progress, found = Progress(title, len(prompts)), list[list[Recorded]]()
    for prompt in prompts:
        recorder = Recorder(length)
        drafter = ModelDrafter(draft, recorder, rules.sampler, rules.random, rules.verifier == "match")
        limit = room_for(target, draft, len(prompt), new_tokens)
        decode_text(target, drafter, prompt, limit, rules)
        found.append(recorder.rounds)
        progress.step()
    return found


# ── Texts that the target writes, and the rounds in which greedy decoding would have written them ──

ROWS = 16  # texts that are written at once
LENGTH = 8  # tokens drafted in every recorded round


def write_texts(
    target: Model,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    rules: Rules,
    vocabulary: int | None = None,
    seeds: Sequence[int] | None = None,
) -> list[list[int]]:
    """What the target writes after each prompt, as far as its context has room: ROWS texts at once where it can.

    DataError for a prompt that leaves none.
    """
    progress, written = Progress("the target's texts", len(prompts), brief=True), dict[str, list[int]]()
    seeds = seeds or [int(rules.random() * 2**32) for _ in prompts]
    limits = [room_for(target, target, len(ids), new_tokens) for ids in prompts]
    if min(limits, default=1) < 1:
        raise DataError("the prompts fill the target's context", "lower answers.prompt_tokens")
    rows = with_rows(target, min(ROWS, len(prompts))) if len(prompts) > 1 else None
    asked = enumerate(zip(prompts, seeds, limits, strict=True))
    waiting = deque(Request(str(number), list(ids), seed, limit) for number, (ids, seed, limit) in asked)
    for reply in refill(rows or target, waiting, rules.sampler, rules.ends, vocabulary):
        written[reply.id] = reply.ids
        progress.step()
    if rows is not None:
        rows.close()
    return [written[str(number)] for number in range(len(prompts))]


def record_rounds(
    draft: Model,
    texts: Sequence[Text],
    ends: Collection[int],
    sampler: Sampler = GREEDY,
    target: Model | None = None,
    draws: Random = random.random,
    length: int = LENGTH,
) -> list[list[Recorded]]:
    """The rounds of `length` drafted tokens in which decoding under a sampler writes each text, by the draft's best
    tokens; with a `target`, by drawn ones that verifier token judges.

    Each model reads each text once: at every position that a round judges, all before it were accepted. That verifier
    lets a token x of the draft stand with min(p(x), q(x)), so that it drafted min(1, q(x) / p(x)) of the x in a text.
    """
    recorded, sampler = list[list[Recorded]](), distribution_sampler(sampler)
    progress = Progress("rounds of other texts, prompts", len(texts), brief=True)
    for prompt, new in texts:
        text = [*prompt, *new][: draft.capacity]
        places = range(len(prompt), len(text) - 1)

        def read(model: Model, text: list[int] = text, places: range = places) -> Tensor:
            model.rollback([0])
            return sampler.distributions(model.extend(text[:-1], want=places), empty=True)

        q, hits = read(draft) if places else torch.zeros(0, 1), None
        if target is not None and places:
            x = torch.tensor(text[len(prompt) + 1 :])[:, None]
            chances = q.gather(1, x) / read(target).gather(1, x)
            hits = [draws() < chance for chance in chances[:, 0].tolist()]
        recorded.append(rounds_of(text, len(prompt), [*q], ends, length, hits))
        progress.step()
    return recorded


def rounds_of(
    text: Sequence[int],
    at: int,
    distributions: Sequence[Tensor],
    ends: Collection[int],
    length: int,
    hits: Sequence[bool] | None = None,
) -> list[Recorded]:
    """The rounds of `length` drafted tokens from the first new token, `at`, on; `distributions` are the draft's after
    it and after later ones. `hits`: whether a drafted token stands there; None: where the best one is the text's."""
    rounds, index, first = list[Recorded](), NGramIndex(), at
    # A last token that is no end is never drafted: a round emits one beyond those accepted.
    last = len(text) - (1 if text[-1] in ends else 2)
    while at < last:
        index.read(text[: at + 1])
        seen, accepted = list[Features](), 0
        for place in range(at, min(at + length, last)):
            distribution, before = distributions[place - first], text[max(0, place + 1 - LONGEST) : place + 1]
            features, best = features_of(distribution), int(distribution.argmax())
            if not features.top:
                break
            seen.append(replace(features, match=index.match(before, best)))
            if not (best == text[place + 1] if hits is None else hits[place - first]):
                break
            accepted += 1
            if text[place + 1] in ends:
                break
        rounds.append(Recorded(seen, accepted))
        at += accepted + 1
    return [*rounds, Recorded([], 0)] if at == len(text) - 2 else rounds
