"""Acceptance and divergences of targets with their drafts, measured after prompts: of a run (stage `eval`: before and
after training, on the stored test answers of its target), and of any target with its drafts, also in several GGUF
types.

Whatever gives a position's values (models of transformers, GGUF files, a store of distributions), `sum_by_document`
adds them up. Whoever opens the pairs, `evaluate_pairs` lets the target write its texts, measures the drafts on them and
counts the rounds in which decoding would have written them; `as_report` makes the report.

Legend: n blocks, S positions, N scored ones, c rows, H hidden, V vocabulary, M measures, U units (documents), γ drafted
tokens.
"""

from __future__ import annotations

import functools
import math
import random
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from distill import divergences
from distill.data.packing import pack, scored_documents
from distill.data.prompts import UserPrompts, read_user_prompts
from distill.data.samples import NEW, SEEN, Request, Sample, how_to_redo, prompt_seed, read_prompts, repetition
from distill.data.suites import Suite, SuitePrompts, suite_prompts
from distill.decoding.batch import refill
from distill.decoding.calibration import Recorded, Recorder
from distill.decoding.decode import Round, decode_text, room_for
from distill.decoding.drafters import ModelDrafter, distribution_sampler
from distill.decoding.lengths import Features, features_of
from distill.decoding.rules import GREEDY, Rules, rules_of_pair
from distill.decoding.text_index import LONGEST, TextIndex
from distill.decoding.verify import Random
from distill.devices import as_float64, pick_device
from distill.engines.ends import target_ends
from distill.engines.loaded import LoadedPair, context_of, growing_decoder, load_pair, pair_of_models, with_rows
from distill.engines.model import Model
from distill.engines.pairs import require_pair
from distill.engines.server_commands import DRAWN_AMONG
from distill.engines.tokenizer import open_tokenizer
from distill.engines.torch.blocks import Packed, hidden_states, packed_logits, scored_states
from distill.engines.torch.hugging_face import encode_text, load_model, load_tokenizer, read_kept, settled_target
from distill.engines.torch.model import model_name
from distill.errors import DataError
from distill.files import is_gguf, write_result, write_text
from distill.gguf.importing import file_type, folder_of
from distill.measuring.evaluation_results import (
    ALL,
    MEASURES,
    SLICES,
    Bounds,
    ByText,
    CategoryFigures,
    Divergences,
    EvaluationReport,
    Group,
    PositionAcceptance,
    StoredMeasures,
    depth_label,
    evaluation_blocks,
    measured_of,
)
from distill.measuring.identity import files_in_types
from distill.progress import Progress
from distill.recipe import Chat, Corpus, Evaluate, Gguf, PyTorch, Recipe, Target, is_path
from distill.run import Run
from distill.sampler import Sampler, place_of, require_finite
from distill.tables import Interval, document, paired_ratio_interval, ratio_interval
from distill.teacher.acceptance import HALF, SMALLEST, match_bounds, sampling_bounds, served_entries
from distill.teacher.distributions import TeacherChunk, head_logits
from distill.teacher.store import TeacherStore
from distill.teacher.texts import held_out
from distill.vocabulary.vocabulary import opening_of

CHUNK = 64  # positions that models that read single texts take at once
LONGEST_BLOCK = 4096  # tokens; a mask of longer blocks fills the memory, so their texts are read one after another
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
        sums = torch.stack([as_float64(least).sum(0), as_float64(most).sum(0)]).cpu().numpy()
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
    for block, place, here in documents:
        number, own = blocks.number(block, place), blocks.documents[block] == place
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
        longest = int(blocks.positions.max()) if len(blocks) else 0
        for block, place, here in scored_documents(blocks):
            number, own = blocks.number(block, place), blocks.documents[block] == place
            ids = blocks.ids[block][own].tolist()
            depths = [depth_label(place, longest) for place in range(len(ids))]
            found = {"depth": depths, "repetition": repetition(ids)}
            places = (here[own].nonzero()[:, 0] + 1).tolist()
            kept = labels.setdefault(number, {name: [] for name in SLICES})
            for name, of_tokens in found.items():
                kept[name] += [of_tokens[place] for place in places]
        return cls(labels)

    def watch(self, values: Iterable[Values]) -> Iterator[Values]:
        """The values, unchanged, once they have been noted; of bounds the middle."""
        for draft, number, least, most, hits in values:
            self.values.setdefault(draft, {}).setdefault(number, []).append(as_float64(least + most).cpu() / 2)
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
    for reply in refill(rows or target, waiting, rules.sampler, rules.ends, vocabulary, rules.stop):
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
    rounds, index, first = list[Recorded](), TextIndex(), at
    # A last token that is no end is never drafted: a round emits one beyond those accepted.
    last = len(text) - (1 if text[-1] in ends else 2)
    while at < last:
        index.read(text[: at + 1])
        seen, accepted = list[Features](), 0
        for place in range(at, min(at + length, last)):
            distribution, before = distributions[place - first], text[max(0, place + 1 - LONGEST) : place + 1]
            features, best = features_of(distribution)
            if not features.top:
                break
            seen.append(replace(features, match=index.agreement(before, best)))
            if not (best == text[place + 1] if hits is None else hits[place - first]):
                break
            accepted += 1
            if text[place + 1] in ends:
                break
        rounds.append(Recorded(seen, accepted))
        at += accepted + 1
    return [*rounds, Recorded([], 0)] if at == len(text) - 2 else rounds


# ── Targets with their drafts, measured behind prompts ──


@dataclass(frozen=True)
class EvaluationOptions:
    """What is measured of every pair; `grid`: whether rounds of its lengths and samplers are counted."""

    sampler: Sampler
    settings: Evaluate
    command: str
    divergences: bool = True
    seed: int = 0
    grid: bool = True


@dataclass(frozen=True)
class TargetWithDrafts:
    """A target with its drafts by name, loaded, and what they are measured on: prompts with their classes, and `given`
    text in blocks of `block` tokens, which no text exceeds. Rounds are counted of the drafts called `decoded`. `units`
    number the questions of a suite, whose turns are prompts."""

    pairs: Mapping[str, LoadedPair]
    prompts: Sequence[Sample]
    block: int
    classes: Sequence[str] = ()
    given: Packed | None = None
    decoded: Sequence[str] = ()
    units: Sequence[int] = ()


def evaluate_pairs(opened: TargetWithDrafts, options: EvaluationOptions) -> EvaluationReport:
    """The report of a target with each of its drafts."""
    measured: dict[str, dict[str, Measured]] = {}
    rounds: dict[str, list[list[Recorded]]] = {}
    texts: list[list[int]] = []
    sampled: list[list[int]] = []
    sliced: SlicedValues | None = None
    pairs, ids = opened.pairs, [sample.prompt for sample in opened.prompts]
    first = next(iter(pairs.values()))
    size = min(model.vocabulary_size for pair in pairs.values() for model in (pair.target, pair.draft))
    if options.divergences:
        seeds = [prompt_seed(options.seed, prompt.id) for prompt in opened.prompts]
        limit = min(options.settings.new_tokens, opened.block - max(map(len, ids)))  # served prompts may be long
        rules = rules_of_pair(first, options.sampler)
        texts = sampled = write_texts(first.target, ids, limit, rules, size, seeds)
        answers = zip(ids, texts, strict=True)  # each prompt with its text behind it, which is scored
        own = pack((([*prompt, *text], len(prompt)) for prompt, text in answers), opened.block, False)
        sliced = SlicedValues.of(own)
        measured["answers"] = sum_by_document(sliced.watch(_values(pairs, own, options.sampler, size, "answers")))
        if opened.given is not None and len(opened.given):
            measured["files"] = sum_by_document(_values(pairs, opened.given, options.sampler, size, "files"))
    if opened.decoded and (options.sampler != GREEDY or not texts):
        texts = write_texts(first.target, ids, options.settings.new_tokens, rules_of_pair(first), size)
    written = [*zip(ids, texts, strict=False)]  # none where nothing is asked for
    for name in opened.decoded:
        rounds[name] = record_rounds(pairs[name].draft, written, first.ends, length=options.settings.length)
    report = as_report(measured, rounds, options, len(ids), opened.classes, sliced=sliced, texts=written)
    categories = by_category(opened, options, rounds, [*zip(ids, sampled, strict=False)]) if opened.units else []
    return replace(report, categories=categories)


def by_category(
    opened: TargetWithDrafts,
    options: EvaluationOptions,
    greedy: Mapping[str, Sequence[Sequence[Recorded]]],
    sampled: Sequence[Text],
) -> list[CategoryFigures]:
    """Tokens per round of each category of a suite and of all: of the `greedy` rounds, and where the sampler draws, of
    drawn drafts in the `sampled` texts. A unit of the intervals is a question with all its turns."""
    found = {(name, 0.0): own for name, own in greedy.items()}
    if options.sampler.temperature and sampled:
        for name in opened.decoded:
            pair, draws = opened.pairs[name], random.Random(f"{options.seed}/{name}").random
            found[name, options.sampler.temperature] = record_rounds(
                pair.draft, sampled, pair.ends, options.sampler, pair.target, draws, options.settings.length
            )
    categories = [*dict.fromkeys(opened.classes)]
    figures = []
    for category in [*(categories if len(categories) > 1 else []), ALL]:
        places = [at for at, name in enumerate(opened.classes) if category in (name, ALL)]
        for (draft, temperature), rounds in found.items():
            questions: dict[int, list[Recorded]] = {}
            for place in places:
                questions.setdefault(opened.units[place], []).extend(rounds[place])
            tokens = tokens_per_round([*questions.values()])
            if len(questions) == 1:
                tokens = replace(tokens, low=math.nan, high=math.nan)
            figures.append(CategoryFigures(category, len(questions), draft, temperature, tokens))
    return figures


def _values(pairs: Mapping[str, LoadedPair], blocks: Packed, sampler: Sampler, size: int, domain: str) -> Any:
    """What a target's drafts are at each position: of whole blocks where the models can read them."""
    first = next(iter(pairs.values()))
    if first.hugging_face is None or blocks.ids.shape[1] > LONGEST_BLOCK:
        drafts = {name: pair.draft for name, pair in pairs.items()}
        return text_values(first.target, drafts, blocks, sampler, size, domain)
    models = {name: pair.hugging_face[1] for name, pair in pairs.items() if pair.hugging_face is not None}
    return block_values(first.hugging_face[0], models, blocks, sampler, size)


# ── The report ──


def as_report(
    measured: Mapping[str, Mapping[str, Measured]],
    rounds: Mapping[str, Sequence[Sequence[Recorded]]],
    options: EvaluationOptions,
    prompts: int,
    classes: Sequence[str] = (),
    stored: StoredMeasures | None = None,
    sliced: SlicedValues | None = None,
    texts: Sequence[Text] = (),
) -> EvaluationReport:
    """The report of what was measured of each draft in each domain, and of the rounds of each draft.

    `classes` names that of each document of domain `answers`, which are the `prompts` of `decoded`; none, where they
    are not distinguished. `sliced` has seen the values of domain `answers`; `texts` are those of the rounds.
    """
    length = options.settings.length
    judged = {name: judged_positions(found, texts) for name, found in rounds.items()}
    report = EvaluationReport(
        command=options.command,
        sampler=options.sampler.describe(),
        length=length,
        domains={
            domain: {name: own.divergences() for name, own in drafts.items()} for domain, drafts in measured.items()
        },
        positions={name: position_acceptance(own, length) for name, own in judged.items()},
        positions_by_text={name: positions_by_text(own, length) for name, own in judged.items()},
        tokens_per_round={name: tokens_per_round(own) for name, own in rounds.items()},
        stored=stored,
    )
    answers, measure = measured.get("answers", {}), report.acceptance_measure
    groups = by_class(classes, answers, rounds, measure) if classes and answers else []
    groups += [] if sliced is None else sliced.results(measure)
    agreed = [] if sliced is None else sliced.results("acceptance_greedy")
    agreed = [one for one in agreed if one.of == "repetition"]
    drafts = agreed[0].acceptance if agreed else ()
    agreement = {name: {one.label: one.acceptance[name] for one in agreed} for name in drafts}
    # Each draft's acceptance beside that of the first, paired by prompt.
    sums = {name: by_unit(own, measure, prompts) for name, own in answers.items()}
    first = next(iter(sums.values()), None)
    differences = {
        name: paired_ratio_interval(*first, *own) for name, own in sums.items() if first and own is not first
    }
    return replace(report, groups=groups, differences=differences, agreement=agreement)


def by_unit(measured: Measured, measure: str, units: int) -> tuple[Any, Any]:
    """Sums of a measure, of bounds the middle, and counts [U] of all prompts, 0 for one whose text is empty."""
    sums, counts, column = numpy.zeros(units), numpy.zeros(units), METRICS.index(measure)
    sums[measured.units] = (measured.least[:, column] + measured.most[:, column]) / 2
    counts[measured.units] = measured.counts
    return sums, counts


def by_class(
    classes: Sequence[str],
    answers: Mapping[str, Measured],
    rounds: Mapping[str, Sequence[Sequence[Recorded]]],
    measure: str,
) -> list[Group]:
    """Acceptance and tokens per round of each class of documents, of `classes` by number; none where all are alike."""
    units = next(iter(answers.values())).units
    names = list(dict.fromkeys(classes[unit] for unit in units))
    found = []
    for name in names if len(names) > 1 else ():
        rows = [row for row, unit in enumerate(units) if classes[unit] == name]
        results = {draft: one.take(rows).divergences() for draft, one in answers.items()}
        tokens = next(iter(results.values())).tokens
        accepted = {draft: result.measure(measure) for draft, result in results.items()}
        decoded = {draft: tokens_per_round([one[units[row]] for row in rows]) for draft, one in rounds.items()}
        found.append(Group("class", name, len(rows), tokens, accepted, decoded))
    return found


# ── Stage `eval`: the drafts of a run against the target's stored distributions on its own test answers ──
# A compact store holds a position's likeliest tokens and the mass of the rest, so a measure may have a least and a
# largest value between which the exact one lies, the rounding of the stored numbers included. Legend: N positions,
# c of them at once, V vocabulary, M measures.

AT_ONCE = 256  # positions whose logits are held at once


def evaluate(recipe: Recipe, run: Run) -> list[Path]:
    """Write eval.json and eval.md: the draft before (cut/) and after (draft/) training, on the stored test answers.

    Raises DataError where the store does not hold the blocks of the held-out texts.
    """
    context = context_of(recipe.target.model)
    beyond = measured_of(
        recipe.corpus.block, context, "the target takes", "raise corpus.block if you serve longer texts"
    )
    report = replace(evaluate_stored(recipe, run), beyond=beyond)
    write_result(run.path("eval.json"), report)
    write_text(run.path("eval.md"), document(evaluation_blocks(report)))
    return [run.path("eval.json"), run.path("eval.md")]


def drafts_of(recipe: Recipe, run: Run, device: torch.device) -> Iterator[tuple[str, Any]]:
    """The drafts of a run by name, loaded one at a time; one alone where nothing is trained."""
    sides = {"before": "cut", "after": "draft"} if recipe.train.steps else {"after": "draft"}
    for name, folder in sides.items():
        yield name, load_model(str(run.path(folder)), recipe.target.dtype, device)
    if read_kept(run.path("draft")) is not None:  # as llama.cpp and others run it, without the trimmed head
        yield "after, full head", load_model(str(run.path("draft")), recipe.target.dtype, device, trimmed=False)


def evaluate_stored(recipe: Recipe, run: Run) -> EvaluationReport:
    """The report of stage `eval`."""
    device, sampler = pick_device(recipe.device), Sampler.of(recipe.sampler)
    store, texts = TeacherStore(run, "test"), held_out(recipe, run, "test")
    blocks, stored = texts.blocks, store.packed.take(slice(None))
    if len(blocks) != len(stored) or not torch.equal(stored.ids, blocks.ids):
        raise DataError(f"{store.folder} holds other texts than those of this run", how_to_redo("teacher"))
    if not len(blocks):
        hint = "raise eval.prompts, or give the test split documents (corpus.sources)"
        raise DataError("there is neither an answer nor text of the test split to measure", hint)
    blocks = replace(blocks, mask=stored.mask)  # without documents that could not be sent as text
    own = len(texts.answered)
    domains = {"answers": range(own), "files": range(own, len(blocks))}
    measured: dict[str, dict[str, Measured]] = {domain: {} for domain, index in domains.items() if index}
    sliced = SlicedValues.of(texts.answered)
    written: list[Text] = [
        (prompt.tolist(), answer.tolist()) for prompt, answer in map(texts.answers.ids, range(len(texts.answers)))
    ]
    ends = target_ends(recipe.target.model, load_tokenizer(recipe.target.model)).ids
    rounds: dict[str, list[list[Recorded]]] = {}
    for name, draft in drafts_of(recipe, run, device):
        for domain, drafts in measured.items():
            values = stored_values(store, blocks, domains[domain], name, draft, sampler)
            drafts |= sum_by_document(sliced.watch(values) if domain == "answers" else values)
        if name == "after" and written:  # almost nothing of an untrained cut is accepted
            model = growing_decoder(draft, store.vocabulary, prepack=False)
            rounds[name] = record_rounds(model, written, ends, length=recipe.eval.length)
    left_out = {f"answers ({reason})": count for reason, count in texts.dropped.items()}
    unscored = texts.blocks.mask.sum() - blocks.mask.sum()
    if int(unscored):
        left_out["positions of documents that are read as other tokens when sent as text"] = int(unscored)
    about = StoredMeasures(
        source=_source(store.manifest),
        exact=store.exact,
        bounds={
            domain: {
                name: {of: Bounds(low.mean, high.mean) for of, (low, high) in found.bounds().items()}
                for name, found in drafts.items()
            }
            for domain, drafts in measured.items()
        },
        sampled={name: ratio_interval(found.hits, found.counts) for name, found in measured.get("answers", {}).items()},
        left_out=left_out,
    )
    classes = [answer.label for answer in texts.answers]
    options = EvaluationOptions(sampler, recipe.eval, run.command)
    return as_report(measured, rounds, options, len(classes), classes, about, sliced, written)


def _source(manifest: dict[str, Any]) -> str:
    """What gave the distributions, in words."""
    origin = manifest.get("origin") or {}
    kind = origin.get("kind")
    if kind == "gguf":
        return f"the GGUF file {origin.get('path')}"
    return f"{origin.get('model')} on a server" if kind == "server" else f"the target in {manifest['dtype']}"


def stored_values(
    store: TeacherStore, blocks: Packed, index: range, name: str, draft: Any, sampler: Sampler
) -> Iterator[Values]:
    """Of a draft against the stored distributions of the blocks at `index`; `blocks` are the store's, with the numbers
    of their documents."""
    for block in index:
        one = blocks.take(slice(block, block + 1))
        hidden = scored_states(draft, one)
        labels, teacher = one.labels(), store.read(torch.tensor([block])).distributions(hidden.device)
        end = 0  # among the block's scored positions, which run through its documents in turn
        for _, place, here in scored_documents(one):
            number = one.number(0, place)
            start, end = end, end + int(here.sum())
            for at in range(start, end, AT_ONCE):
                rows = slice(at, min(at + AT_ONCE, end))
                logits = head_logits(draft, hidden[rows])[:, : store.vocabulary]
                hits = int((logits.argmax(-1).cpu() == labels[rows]).sum())
                yield name, number, *stored_metrics(teacher.chunk(rows), logits, sampler), hits


def stored_metrics(chunk: TeacherChunk, draft_logits: Tensor, sampler: Sampler) -> tuple[Tensor, Tensor]:
    """The least and the largest value [c, M] of METRICS from draft logits [c, V]; equal for a whole distribution.

    NaN where a store gives no bound: the reverse KL, which depends on the target's rarest tokens, and the KL of a draft
    with a trimmed head, which is between distributions over the tokens that it has.
    """
    if chunk.ids is None:
        exact = all_metrics(chunk.log_probabilities, draft_logits, sampler, draft_logits.shape[-1])
        return exact, exact
    ids, logs, tail = chunk.ids, chunk.log_probabilities, chunk.log_tail
    unknown = torch.full_like(tail, torch.nan)
    absent = torch.isneginf(draft_logits)
    served = served_entries(chunk, sampler, draft_logits.shape[-1])
    kl, ceiling = (unknown, unknown), (torch.ones_like(tail), torch.ones_like(tail))
    if bool(absent.any()):
        ceiling = served.mass_on(~absent)
    else:
        present = ids < draft_logits.shape[-1]
        error = (logs.abs() * HALF + SMALLEST).masked_fill(~present, 0)
        least, most = divergences.forward_kl_bounds(ids, logs, tail, draft_logits)
        # p log(p / q) has the slope log(p / q) + 1, so that rounding moves each term by at most this.
        drafted = draft_logits.log_softmax(-1).gather(-1, ids.clamp(max=draft_logits.shape[-1] - 1))
        ratio = (logs - drafted).abs().masked_fill(~present, 0)
        slack = (logs.exp() * torch.expm1(error) * (ratio + 1 + error)).sum(-1)
        kl = (least - slack).clamp(min=0), most + slack
    drawn = unknown, unknown
    if sampler.temperature:
        few = divergences.likeliest(draft_logits, DRAWN_AMONG)
        drawn = sampling_bounds(served, Sampler(sampler.temperature).probabilities(few))
    agreement = (ids[:, 0] == draft_logits.argmax(-1)).to(tail.dtype)
    found = {
        "forward_kl": kl,
        "reverse_kl": (unknown, unknown),
        "acceptance_sampling": sampling_bounds(served, sampler.probabilities(draft_logits)),
        "acceptance_drawn": drawn,
        "acceptance_match": match_bounds(served, draft_logits),
        "acceptance_greedy": (agreement, agreement),
        "acceptance_ceiling": ceiling,
    }
    least, most = (torch.stack([found[name][side] for name in METRICS], -1) for side in (0, 1))
    return least, most


# ── Any target with its drafts on given texts, also in several GGUF types, without a recipe ──

PROMPT_TOKENS, SEED = 64, 0  # tokens of a prompt cut from a text, and the seed of the order of texts

Prompts = Callable[[str, int], UserPrompts | SuitePrompts]  # of a target, with room for this many tokens


@dataclass(frozen=True)
class Grid:
    """A target with every draft; where `types` of the draft are given, as GGUF files. `block` is the
    most tokens of a text, unless `prompts_are_whole`, up to the context of the models. `written` holds files that a run
    has exported."""

    target: str
    drafts: Sequence[str]
    block: int
    types: Sequence[str] = ()
    written: Path | None = None
    threads: int | None = None
    gguf: Gguf | None = None
    prompts_are_whole: bool = True
    dtype: str = "auto"  # of folders


def evaluate_grid(grid: Grid, prompts: Prompts, options: EvaluationOptions) -> EvaluationReport:
    """The report of every draft of the grid.

    Raises PairError for models that do not fit, DataError for fewer than 4 prompts.
    """
    for draft in grid.drafts:
        require_pair(grid.target, draft)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        (target,) = _files([grid.target], (), grid, Path(scratch, "target")).values()
        drafts = _files(grid.drafts, grid.types, grid, Path(scratch, "draft"))
        if not all(map(is_gguf, (target, *drafts.values()))):  # one engine for all
            target = str(folder_of(target)) if is_gguf(target) else target
            drafts = {name: str(folder_of(path)) if is_gguf(path) else path for name, path in drafts.items()}
        if len(drafts) == 1 and not grid.types:
            drafts = dict(zip(["draft"], drafts.values(), strict=True))
        contexts = [context for model in (target, *drafts.values()) if (context := context_of(model)) is not None]
        context = min(contexts, default=grid.block)
        context = context if grid.prompts_are_whole else min(context, grid.block)
        found = prompts(target, context)
        longest = found.longest + min(options.settings.new_tokens, context // 2)
        block = min(context, max(grid.block, longest))
        pairs = _load(target, drafts, grid, block, stack)
        block = min(block, *(model.capacity for one in pairs.values() for model in (one.target, one.draft)))
        first, suite, units = next(iter(pairs.values())), "", list[int]()
        if isinstance(found, SuitePrompts):
            suite = f"{found.words}, up to {options.settings.new_tokens} new tokens a turn"
            found, units = every_turn(found, first, options)
        blocks = options.settings.file_blocks
        given = _given(first, found.texts, min(block, grid.block), blocks) if len(pairs) == 1 else None
        decoded = [*pairs] if options.grid else []
        opened = TargetWithDrafts(pairs, found.measured, block, found.classes(), given, decoded, units)
        report = evaluate_pairs(opened, options)
        beyond = measured_of(longest, min(contexts, default=None), "the models take", "give longer prompts")
        return replace(report, suite=suite, beyond=beyond)


def every_turn(asked: SuitePrompts, pair: LoadedPair, options: EvaluationOptions) -> tuple[UserPrompts, list[int]]:
    """The prompts of all turns of a suite, later ones after the target's greedy answers; the question of each."""
    new_tokens, rules = options.settings.new_tokens, rules_of_pair(pair)
    write = functools.partial(write_texts, pair.target, new_tokens=new_tokens, rules=rules)
    turns, units = asked.all_turns(write, pair.text)
    found = UserPrompts(turns, [], dict(asked.dropped), [])
    tell_left_out(found)
    return found, units


def tell_left_out(found: UserPrompts) -> None:
    """Print what was left out of the prompts, and why."""
    for reason, number in found.dropped.items():
        print(f"{number} left out: {reason}", file=sys.stderr)


def _files(models: Sequence[str], types: Sequence[str], grid: Grid, scratch: Path) -> dict[str, str]:
    """Each model, or its file of each type, by a name for tables; files are written to `scratch`, a role's folder."""
    found = {}
    short = [Path(model).name if is_path(model) else model for model in models]
    names = short if len(set(short)) == len(short) else models
    for number, (name, model) in enumerate(dict(zip(names, models, strict=True)).items()):
        if not grid.types:
            found[name] = model
            continue
        folder = scratch / str(number)
        folder.mkdir(parents=True)

        def place(kind: str, folder: Path = folder) -> Path:
            exported = None if grid.written is None else grid.written / f"{scratch.name}-{kind}.gguf"
            return exported if exported is not None and exported.is_file() else folder / f"{scratch.name}-{kind}.gguf"

        kinds = types or [file_type(Path(model)) if is_gguf(model) else "f16"]
        files = files_in_types(model, kinds, place)
        found |= {kind if len(models) == 1 else f"{name}, {kind}": str(path) for kind, path in files.items()}
    return found


def _load(target: str, drafts: Mapping[str, str], grid: Grid, tokens: int, stack: ExitStack) -> dict[str, LoadedPair]:
    """A target with each of its drafts; the layers of models that decode are laid out later."""
    gguf = grid.gguf or Gguf()
    if not is_gguf(target):
        device = pick_device("auto")
        place = settled_target(target, grid.dtype)
        big = stack.enter_context(load_pair(place, pytorch=PyTorch(prepack=False, draft_weights=None)))
        assert big.hugging_face is not None
        models = {name: load_model(draft, place.dtype, device) for name, draft in drafts.items()}
        parts = big.reference, big.hugging_face[0]
        return {name: pair_of_models(*parts, model, big.tokenizer, big.pytorch) for name, model in models.items()}
    small = {}
    for name, draft in drafts.items():
        options = Gguf(target=gguf.of("draft"))
        alone = load_pair(Target(model=draft), tokens=tokens, threads=grid.threads, gguf=options)
        small[name] = stack.enter_context(alone).target
    big = stack.enter_context(load_pair(Target(model=target), tokens=tokens, threads=grid.threads, gguf=gguf))
    return {name: replace(big, draft=draft) for name, draft in small.items()}


def _given(pair: LoadedPair, texts: Sequence[str], block: int, blocks: int) -> Packed | None:
    """Plain texts in blocks, in an order drawn from the seed."""
    order = list(texts)
    random.Random(SEED).shuffle(order)
    with open_tokenizer(pair.reference) as tokenizer:
        sequences = [(encode_text(tokenizer, text), 1) for text in order]
        return pack(sequences, block, True, opening_of(tokenizer)).take(slice(0, blocks)) if order else None


def prompts_of(corpus: Corpus, count: int) -> Prompts:
    """Prompts of files for a target, with room for their answers in a block; DataError for fewer than 4."""
    answer = Evaluate().new_tokens

    def read(target: str, block: int) -> UserPrompts:
        room = block - min(answer, block // 2)
        found = read_user_prompts(target, corpus, Chat(), count, 0, PROMPT_TOKENS, room, answer=answer, least=4)
        tell_left_out(found)
        print(f"prompts: {found.asked}", file=sys.stderr)
        return found

    return read


def prompts_of_suite(suite: Suite, count: int | None, seed: int) -> Prompts:
    """`count` questions of each category of a suite (None: all) for a target, with room for their answers."""
    answer = Evaluate().new_tokens

    def read(target: str, block: int) -> SuitePrompts:
        return suite_prompts(suite, target, Chat(), count, seed, block - min(answer, block // 2), answer)

    return read


def evaluate_types(
    recipe: Recipe,
    run: Run,
    types: Sequence[str],
    threads: int | None,
    gguf: Gguf | None,
    command: str,
    kl: bool,
    acceptance: bool,
) -> EvaluationReport:
    """The report of a run's target and trained draft in the grid's types, behind the run's test prompts."""
    found = UserPrompts([*read_prompts(run, "test")[: recipe.eval.prompts]], [], {}, [])
    written = None if run.outdated("export") else run.path("gguf")
    models = recipe.target.model, [str(run.path("draft"))]
    grid = Grid(*models, recipe.corpus.block, types, written, threads, gguf, prompts_are_whole=False)
    sampler, seed = Sampler.of(recipe.sampler), recipe.seed
    options = EvaluationOptions(sampler, recipe.eval, command, kl, seed=seed, grid=acceptance)
    return evaluate_grid(grid, lambda *_: found, options)
