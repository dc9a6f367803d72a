"""Acceptance and divergences of targets with their drafts, measured after prompts.

Stage `eval` measures a run before and after training, on its target's stored test answers. `distill eval` measures any
target with its drafts, also in several GGUF types.

Values of positions come from models of transformers, GGUF files or a store of distributions. `sum_by_document` adds
them up. `evaluate_pairs` lets the target write texts, measures the drafts on them, and counts the rounds in which
decoding would have written them. `as_report` makes the report.

Legend: n blocks, S positions, N scored positions, c rows, H hidden, V vocabulary, M measures, U units (documents), γ
drafted tokens.
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
from distill.decoding.decode import Round, room_for
from distill.decoding.drafters import distribution_sampler
from distill.decoding.proposals import likeliest
from distill.decoding.rules import GREEDY, Rules, rules_of_pair
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
from distill.recipe import Chat, Corpus, Evaluate, Gguf, PyTorch, Recipe, Sampler, Target, is_path
from distill.run import Run
from distill.sampler import distributions_of, place_of, probabilities_of, require_finite
from distill.tables import Interval, document, paired_ratio_interval, ratio_interval
from distill.teacher.acceptance import HALF, SMALLEST, match_bounds, sampling_bounds, served_entries
from distill.teacher.distributions import TeacherChunk, head_logits
from distill.teacher.store import TeacherStore
from distill.teacher.texts import held_out
from distill.vocabulary.vocabulary import opening_of

STEP_POSITIONS = 64  # positions per step of models that read single texts
LONGEST_BLOCK = 4096  # tokens. The mask of a longer block fills the memory, so its texts are read one at a time.
LOGITS_HELD = 5 * 2**24  # logits per model that are held at once (320 MiB, or 512 rows of 152k) if models read blocks
POSITIONS_COMPARED = 16  # positions on which a model's head is compared with the model's logits
Rows = Callable[[int, Tensor], Tensor]  # a block's index and its positions [c] → logits [c, V]
Sums = NDArray[numpy.float64]

# ── Every measure of single positions, from the logits of both models ──

METRICS = tuple(MEASURES)  # columns of `position_metrics`
CACHED_LOGITS = 2**20  # logits that fit into a processor's cache

# Values of the positions of one document: the draft's name, the document's number, the METRICS' lower and upper values
# [N, M], and the number of the text's tokens that are the draft's argmax.
Values = tuple[str, int, Tensor, Tensor, int]


def position_metrics(target_logits: Tensor, draft_logits: Tensor, sampler: Sampler, vocabulary: int) -> Tensor:
    """Return all METRICS per position [N, M] in fp32, from logits [N, V_target] and [N, V_draft].

    Columns from `vocabulary` on are padding in both models and get no mass. KL compares the untruncated distributions
    at temperature 1. The acceptances of rejection sampling and of the draft's argmax use the distributions after the
    served sampler. llama-server draws probabilistic drafts from the draft's DRAWN_AMONG likeliest tokens at its
    temperature (NaN for a greedy sampler). Greedy acceptance is that of temperature 0, which equals top-1 agreement.
    A trimmed draft has −inf at tokens that it cannot propose. The KL from the target would be infinite there, so it is
    taken between the distributions over the tokens that the draft can propose. The served target's mass on these
    tokens is the ceiling of the draft's acceptance (1 for a full head).
    """
    target = target_logits[:, :vocabulary].float()
    draft = draft_logits[:, :vocabulary].float()
    log_p, log_q = target.log_softmax(-1), draft.log_softmax(-1)
    served_p, served_q = probabilities_of(sampler, target), probabilities_of(sampler, draft)
    absent = torch.isneginf(draft)
    shared_p = log_p.masked_fill(absent, -torch.inf).log_softmax(-1) if bool(absent.any()) else log_p
    accepted = divergences.acceptance_sampling(served_p, served_q)
    drawn = torch.full_like(accepted, torch.nan)
    if sampler.temperature:
        few = divergences.likeliest(draft, DRAWN_AMONG)
        drawn = divergences.acceptance_sampling(
            served_p, probabilities_of(Sampler(temperature=sampler.temperature), few)
        )
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
    """Return `position_metrics`. On a CPU, compute it in pieces that fit into the cache."""
    rows = max(1, CACHED_LOGITS // vocabulary) if target_logits.device.type == "cpu" else max(1, len(target_logits))
    pieces = zip(target_logits.split(rows), draft_logits.split(rows), strict=True)
    return torch.cat([position_metrics(p, q, sampler, vocabulary) for p, q in pieces])


# ── Sums by document ──


@dataclass(frozen=True)
class Measured:
    """One draft in one domain: sums of METRICS over the positions of each unit (a document with all its blocks).

    `least` and `most` [U, M] are the bounds that a compact store allows. They are equal if the target was read.
    `counts` [U] are the units' positions. `hits` [U] count positions whose next token in the text is the draft's argmax
    (0 if not counted). `units` [U] are the units' numbers among all documents.
    """

    least: Sums
    most: Sums
    counts: Sums
    hits: Sums
    units: list[int]

    def take(self, rows: Sequence[int]) -> Measured:
        """Return some of the units."""
        units = [self.units[row] for row in rows]
        return Measured(self.least[rows], self.most[rows], self.counts[rows], self.hits[rows], units)

    def bounds(self) -> dict[str, tuple[Interval, Interval]]:
        """Return the intervals of each measure's lower and upper mean."""
        intervals = {}
        for name, least, most in zip(METRICS, self.least.T, self.most.T, strict=True):
            low = ratio_interval(least, self.counts)
            same = numpy.array_equal(least, most)
            intervals[name] = low, low if same else ratio_interval(most, self.counts)
        return intervals

    def divergences(self) -> Divergences:
        """Return each measure's mean (the middle of its bounds) with an interval that covers both bounds."""
        figures = {
            name: Interval((low.mean + high.mean) / 2, low.low, high.high)
            for name, (low, high) in self.bounds().items()
        }
        return Divergences(int(self.counts.sum()), len(self.counts), **figures)


@torch.inference_mode()
def sum_by_document(values: Iterable[Values], units: Sequence[int] = ()) -> dict[str, Measured]:
    """Return the sums for each draft, by name. The documents keep the order in which they come.

    With `units`, documents of the same unit are summed.
    """
    totals: dict[str, dict[int, Sums]] = {}
    for draft, number, least, most, hits in values:
        sums = torch.stack([as_float64(least).sum(0), as_float64(most).sum(0)]).cpu().numpy()
        row = numpy.append(sums, [len(least), hits])  # [2 M + 2]
        documents, number = totals.setdefault(draft, {}), units[number] if units else number
        documents[number] = documents[number] + row if number in documents else row
    measured = {}
    for draft, documents in totals.items():
        columns = numpy.split(numpy.stack([*documents.values()]), [len(METRICS), 2 * len(METRICS)], axis=1)
        measured[draft] = Measured(columns[0], columns[1], columns[2][:, 0], columns[2][:, 1], [*documents])
    return measured


class RowLogits:
    """A model of transformers whose head multiplies only the requested rows.

    The logits of whole blocks would fill gigabytes with a vocabulary of 150,000 tokens. The first block shows whether
    the head gives the model's own logits. If it does not, whole blocks are computed.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._by_rows: bool | None = None

    def of(self, blocks: Packed) -> Rows:
        """Return a function for the logits of these blocks. It holds their hidden states [n, S, H]."""
        if self._by_rows is None:
            self._by_rows = self._head_gives_logits(blocks)
        if not self._by_rows:
            logits = packed_logits(self.model, blocks)
            return lambda block, rows: logits[block][rows.to(logits.device)]
        states = hidden_states(self.model, blocks)
        return lambda block, rows: head_logits(self.model, states[block][rows.to(states.device)])

    def _head_gives_logits(self, blocks: Packed) -> bool:
        """Whether the head gives the model's own logits at the first positions of the first block."""
        size = min(POSITIONS_COMPARED, blocks.ids.shape[1])
        parts = {name: value[:1, :size] for name, value in blocks.tensors().items()}
        few = replace(blocks.take(slice(0, 1)), **parts)
        expected = packed_logits(self.model, few).float()
        by_head = head_logits(self.model, hidden_states(self.model, few))
        if by_head.shape != expected.shape:
            return False
        largest = float(expected.nan_to_num(0, 0, 0).abs().max())  # Infinite logits must be equal in both.
        allowed = largest * max(1e-4, 4 * torch.finfo(self.model.dtype).eps)
        return torch.allclose(by_head.to(expected), expected, rtol=0, atol=allowed, equal_nan=True)


def block_values(
    target: Any, drafts: Mapping[str, Any], blocks: Packed, sampler: Sampler, vocabulary: int, batch: int = 2
) -> Iterator[Values]:
    """Yield the values of models of transformers, which read whole blocks.

    Raises DataError for logits that are not finite, and for blocks that do not number their documents.
    """
    big, small = RowLogits(target), {name: RowLogits(draft) for name, draft in drafts.items()}
    for start in range(0, len(blocks), batch):
        part = blocks.take(slice(start, start + batch))
        documents = [(block, part.number(block, place), here) for block, place, here in scored_documents(part)]
        expected, positions = big.of(part), part.positions
        for name, draft in small.items():
            got = draft.of(part)
            for block, number, here in documents:
                for rows in here.nonzero()[:, 0].split(max(1, LOGITS_HELD // vocabulary)):
                    lengths = (positions[block, rows] + 1).tolist()
                    p, q = expected(block, rows), got(block, rows)
                    _require_finite(((target, p), (draft.model, q)), lengths)
                    values = all_metrics(p, q.to(p.device), sampler, vocabulary)
                    del p, q  # The next logits need the memory.
                    yield name, number, values, values, 0


def text_values(
    target: Model, drafts: Mapping[str, Model], blocks: Packed, sampler: Sampler, vocabulary: int, domain: str
) -> Iterator[Values]:
    """Yield the values of models that read one text after another, such as GGUF files.

    Each document of a block is read alone. Raises DataError as `block_values` does.
    """
    documents = list(scored_documents(blocks))
    progress = Progress(f"logits of texts, {domain}", len(documents))
    for block, place, here in documents:
        number, in_document = blocks.number(block, place), blocks.documents[block] == place
        ids, scored = blocks.ids[block][in_document].tolist(), here[in_document]
        for model in (target, *drafts.values()):
            model.rollback([0])
        for start in range(0, int(scored.nonzero().max()) + 1, STEP_POSITIONS):
            part, where = ids[start : start + STEP_POSITIONS], scored[start : start + STEP_POSITIONS]
            expected = target.extend(part)
            expected.argmax()  # It raises an error that names the position of logits that are not finite.
            for name, draft in drafts.items():
                got = draft.extend(part)
                got.argmax()
                values = all_metrics(expected.full()[where], got.full()[where], sampler, vocabulary)
                yield name, number, values, values, 0
        progress.step()


def _require_finite(logits: Sequence[tuple[Any, Tensor]], lengths: Sequence[int]) -> None:
    """Raise DataError, naming model and position, for a row [c, V] of a model whose largest logit is not finite."""
    for model, rows in logits:
        require_finite(rows.amax(-1).tolist(), place_of(model_name(model), lengths))


# ── Slices of positions: their depth in the text, and whether their text is repeated ──


@dataclass(frozen=True)
class SlicedValues:
    """Values of single positions of the documents that pass through `watch`.

    `labels` are, by document and slice, the labels of the tokens that its scored positions predict. `values` are the
    METRICS [N, M] by draft and document, in parts.
    """

    labels: dict[int, dict[str, list[str]]]
    values: dict[str, dict[int, list[Tensor]]] = field(default_factory=dict)

    @classmethod
    def of(cls, blocks: Packed) -> Self:
        """Prepare the labels of the scored documents of `blocks`."""
        labels: dict[int, dict[str, list[str]]] = {}
        longest = int(blocks.positions.max()) if len(blocks) else 0
        for block, place, here in scored_documents(blocks):
            number, in_document = blocks.number(block, place), blocks.documents[block] == place
            ids = blocks.ids[block][in_document].tolist()
            depths = [depth_label(depth, longest) for depth in range(len(ids))]
            slices = {"depth": depths, "repetition": repetition(ids)}
            places = (here[in_document].nonzero()[:, 0] + 1).tolist()
            kept = labels.setdefault(number, {name: [] for name in SLICES})
            for name, of_tokens in slices.items():
                kept[name] += [of_tokens[place] for place in places]
        return cls(labels)

    def watch(self, values: Iterable[Values]) -> Iterator[Values]:
        """Yield the values unchanged and record them. Of bounds, the middle is recorded."""
        for draft, number, least, most, hits in values:
            self.values.setdefault(draft, {}).setdefault(number, []).append(as_float64(least + most).cpu() / 2)
            yield draft, number, least, most, hits

    def results(self, measure: str, units: Sequence[int] = ()) -> list[Group]:
        """Return the mean of one of METRICS for each label of each slice. A slice with a single label is omitted.

        Intervals resample documents or, with `units`, the unit that each document belongs to.
        """
        owners = [units[number] for number in self.labels] if units else [*range(len(self.labels))]
        total = max(owners, default=-1) + 1
        owner = numpy.repeat(owners, [len(slices["depth"]) for slices in self.labels.values()])
        column = METRICS.index(measure)
        values = {
            draft: torch.cat([part[:, column] for number in self.labels for part in documents[number]]).numpy()
            for draft, documents in self.values.items()
        }
        groups = []
        for name in SLICES:
            names = numpy.array([label for slices in self.labels.values() for label in slices[name]])
            order = sorted({*names.tolist()}, key=lambda label: (len(label), label))
            for label in order if len(order) > 1 else ():
                here = names == label
                tokens = numpy.bincount(owner[here], minlength=total).astype(float)
                acceptance = {
                    draft: ratio_interval(numpy.bincount(owner[here], column_values[here], total).astype(float), tokens)
                    for draft, column_values in values.items()
                }
                groups.append(Group(name, label, int((tokens > 0).sum()), int(tokens.sum()), acceptance))
        return groups


# ── Decoded rounds ──

Text = tuple[Sequence[int], list[int]]  # a prompt, and the target's text after it

Judged = list[list[tuple[int, str, bool]]]  # by prompt: position, kind of text, whether the draft's token was accepted


def judged_positions(rounds: Sequence[Sequence[Round]], texts: Sequence[Text]) -> Judged:
    """Return the drafted positions 1..γ of each text's rounds up to the first rejection.

    The kind of text says whether the target's token at the position repeats earlier text.
    """
    by_text = Judged()
    for text_rounds, (prompt, new) in zip(rounds, texts, strict=True):
        kinds, positions = iter(repetition([*prompt, *new])[len(prompt) + 1 :]), list[tuple[int, str, bool]]()
        for r in text_rounds:
            judged = zip(range(1, r.accepted + 2), kinds, strict=False)
            positions += [
                (position, kind, position <= r.accepted) for position, kind in judged if position <= r.drafted
            ]
        by_text.append(positions)
    return by_text


def position_acceptance(judged: Judged, length: int, of: Collection[str] = (NEW, SEEN)) -> list[PositionAcceptance]:
    """Return the acceptance at each drafted position 1..γ in text of these kinds."""
    table = []
    for position in range(1, length + 1):
        here = [[hit for at, kind, hit in positions if at == position and kind in of] for positions in judged]
        reached, accepted = [*map(len, here)], [*map(sum, here)]
        table.append(PositionAcceptance(position, sum(reached), sum(accepted), ratio_interval(accepted, reached)))
    return table


def positions_by_text(judged: Judged, length: int) -> ByText:
    """Return `position_acceptance` of new and of repeated text."""
    return {kind: position_acceptance(judged, length, {kind}) for kind in (NEW, SEEN)}


def joined(parts: Sequence[Sequence[Any]], units: Sequence[int]) -> list[list[Any]]:
    """Join the parts of the prompts that belong to the same unit, in the order of the units' numbers."""
    if not units:
        return [[*part] for part in parts]
    found: dict[int, list[Any]] = {unit: [] for unit in sorted({*units})}
    for unit, part in zip(units, parts, strict=True):
        found[unit] += part
    return [*found.values()]


def tokens_per_round(rounds: Sequence[Sequence[Round]]) -> Interval:
    """Return accepted + 1, the mean over rounds, with its interval over prompts."""
    emitted = [sum(r.accepted + 1 for r in text_rounds) for text_rounds in rounds]
    return ratio_interval(emitted, [len(text_rounds) for text_rounds in rounds])


# ── Texts that the target writes, and the rounds in which greedy decoding would have written them ──

ROWS = 16  # texts written at once
LENGTH = 8  # tokens drafted in every recorded round


def write_texts(
    target: Model,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    rules: Rules,
    vocabulary: int | None = None,
    seeds: Sequence[int] | None = None,
) -> list[list[int]]:
    """Return the target's text after each prompt, within its context. If possible, ROWS texts are written at once.

    Raises DataError for a prompt that leaves no room.
    """
    progress, written = Progress("the target's texts", len(prompts), brief=True), dict[str, list[int]]()
    seeds = seeds or [int(rules.random() * 2**32) for _ in prompts]
    limits = [room_for(target, target, len(ids), new_tokens) for ids in prompts]
    if min(limits, default=1) < 1:
        raise DataError("the prompts fill the target's context", "lower answers.prompt_tokens")
    rows = with_rows(target, min(ROWS, len(prompts))) if len(prompts) > 1 else None
    requests = enumerate(zip(prompts, seeds, limits, strict=True))
    waiting = deque(Request(str(number), list(ids), seed, limit) for number, (ids, seed, limit) in requests)
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
) -> list[list[Round]]:
    """Return the rounds, with `length` drafted tokens each, in which decoding under a sampler writes each text.

    The draft's best tokens are proposed. With a `target`, drawn tokens are proposed and judged by verifier token.

    Each model reads each text once, because at every position that a round judges, all earlier tokens were accepted.
    Verifier token accepts a drafted token x with probability min(p(x), q(x)) / q(x). A share min(1, q(x) / p(x)) of the
    tokens x in a text was therefore drafted.
    """
    recorded, sampler = list[list[Round]](), distribution_sampler(sampler)
    progress = Progress("rounds of other texts, prompts", len(texts), brief=True)
    for prompt, new in texts:
        text = [*prompt, *new][: draft.capacity]
        places = range(len(prompt), len(text) - 1)

        def read(model: Model, text: list[int] = text, places: range = places) -> Tensor:
            model.rollback([0])
            return distributions_of(sampler, model.extend(text[:-1], want=places), empty=True)

        accepted, following = list[bool | None](), text[places.start + 1 :]
        if places:
            q = read(draft)
            best = [likeliest(distribution) for distribution in q]
            hits = [token == own for (token, _), own in zip(best, following, strict=True)]
            if target is not None:
                x = torch.tensor(following)[:, None]
                hits = [draws() < chance for chance in (q.gather(1, x) / read(target).gather(1, x))[:, 0].tolist()]
            accepted = [hit if chance else None for hit, (_, chance) in zip(hits, best, strict=True)]
        # A last token that is no end is never drafted: a round emits one beyond those accepted.
        more = bool(places) and text[-1] not in ends
        recorded.append(rounds_in_text(len(prompt), accepted[:-1] if more else accepted, length, more))
        progress.step()
    return recorded


def rounds_in_text(first: int, accepted: Sequence[bool | None], length: int, more: bool) -> list[Round]:
    """Count the rounds of `length` drafted tokens that would have written a text after its token number `first`.

    `accepted` says of each later token whether the draft's would be accepted there, None if there is none. `more`: one
    more token follows, which is never drafted.
    """
    rounds, at = list[Round](), 0
    while at < len(accepted):
        drafted = hits = 0
        for hit in accepted[at : at + length]:
            drafted += hit is not None
            if not hit:
                break
            hits += 1
        rounds.append(Round(first + at, drafted, hits, 0.0))
        at += hits + 1
    return [*rounds, Round(first + at, 0, 0, 0.0)] if more and at == len(accepted) else rounds


# ── Targets with their drafts, measured after prompts ──


@dataclass(frozen=True)
class EvaluationOptions:
    """What is measured of every pair. `grid`: whether rounds are counted."""

    sampler: Sampler
    settings: Evaluate
    command: str
    divergences: bool = True
    seed: int = 0
    grid: bool = True


@dataclass(frozen=True)
class TargetWithDrafts:
    """A loaded target with its drafts by name, and the texts on which they are measured.

    `prompts` have `classes`. `given` is text in blocks. No text exceeds `block` tokens. Rounds are counted for the
    drafts named in `decoded`. `units` number the questions of a suite, whose turns are prompts.
    """

    pairs: Mapping[str, LoadedPair]
    prompts: Sequence[Sample]
    block: int
    classes: Sequence[str] = ()
    given: Packed | None = None
    decoded: Sequence[str] = ()
    units: Sequence[int] = ()


def evaluate_pairs(opened: TargetWithDrafts, options: EvaluationOptions) -> EvaluationReport:
    """Return the report of a target with each of its drafts."""
    measured: dict[str, dict[str, Measured]] = {}
    rounds: dict[str, list[list[Round]]] = {}
    texts: list[list[int]] = []
    sampled: list[list[int]] = []
    sliced: SlicedValues | None = None
    pairs, ids = opened.pairs, [sample.prompt for sample in opened.prompts]
    first = next(iter(pairs.values()))
    size = min(model.vocabulary_size for pair in pairs.values() for model in (pair.target, pair.draft))
    if options.divergences:
        seeds = [prompt_seed(options.seed, prompt.id) for prompt in opened.prompts]
        limit = min(options.settings.new_tokens, opened.block - max(map(len, ids)))  # Served prompts may be long.
        rules = rules_of_pair(first, options.sampler)
        texts = sampled = write_texts(first.target, ids, limit, rules, size, seeds)
        answers = zip(ids, texts, strict=True)  # Each text is scored after its prompt.
        blocks = pack((([*prompt, *text], len(prompt)) for prompt, text in answers), opened.block, False)
        sliced = SlicedValues.of(blocks)
        values = sliced.watch(_values(pairs, blocks, options.sampler, size, "answers"))
        measured["answers"] = sum_by_document(values, opened.units)
        if opened.given is not None and len(opened.given):
            measured["files"] = sum_by_document(_values(pairs, opened.given, options.sampler, size, "files"))
    if opened.decoded and (options.sampler != GREEDY or not texts):
        texts = write_texts(first.target, ids, options.settings.new_tokens, rules_of_pair(first), size)
    written = [*zip(ids, texts, strict=False)]  # empty if nothing was requested
    for name in opened.decoded:
        rounds[name] = record_rounds(pairs[name].draft, written, first.ends, length=options.settings.length)
    report = as_report(
        measured, rounds, options, len(ids), opened.classes, sliced=sliced, texts=written, units=opened.units
    )
    categories = by_category(opened, options, rounds, [*zip(ids, sampled, strict=False)]) if opened.units else []
    return replace(report, categories=categories)


def by_category(
    opened: TargetWithDrafts,
    options: EvaluationOptions,
    greedy: Mapping[str, Sequence[Sequence[Round]]],
    sampled: Sequence[Text],
) -> list[CategoryFigures]:
    """Return tokens per round of each category of a suite, and of all categories.

    They come from the `greedy` rounds and, if the sampler draws, from drawn drafts in the `sampled` texts. A question
    with all its turns is a unit of the intervals.
    """
    by_draft = {(name, 0.0): rounds for name, rounds in greedy.items()}
    if options.sampler.temperature and sampled:
        for name in opened.decoded:
            pair, draws = opened.pairs[name], random.Random(f"{options.seed}/{name}").random
            by_draft[name, options.sampler.temperature] = record_rounds(
                pair.draft, sampled, pair.ends, options.sampler, pair.target, draws, options.settings.length
            )
    categories = [*dict.fromkeys(opened.classes)]
    figures = []
    for category in [*(categories if len(categories) > 1 else []), ALL]:
        places = [place for place, name in enumerate(opened.classes) if category in (name, ALL)]
        for (draft, temperature), rounds in by_draft.items():
            questions = joined([rounds[place] for place in places], [opened.units[place] for place in places])
            tokens = tokens_per_round(questions)
            if len(questions) == 1:
                tokens = replace(tokens, low=math.nan, high=math.nan)
            figures.append(CategoryFigures(category, len(questions), draft, temperature, tokens))
    return figures


def _values(pairs: Mapping[str, LoadedPair], blocks: Packed, sampler: Sampler, size: int, domain: str) -> Any:
    """Yield the values of a target's drafts, from whole blocks if the models can read them."""
    first = next(iter(pairs.values()))
    if first.hugging_face is None or blocks.ids.shape[1] > LONGEST_BLOCK:
        drafts = {name: pair.draft for name, pair in pairs.items()}
        return text_values(first.target, drafts, blocks, sampler, size, domain)
    models = {name: pair.hugging_face[1] for name, pair in pairs.items() if pair.hugging_face is not None}
    return block_values(first.hugging_face[0], models, blocks, sampler, size)


# ── The report ──


def as_report(
    measured: Mapping[str, Mapping[str, Measured]],
    rounds: Mapping[str, Sequence[Sequence[Round]]],
    options: EvaluationOptions,
    prompts: int,
    classes: Sequence[str] = (),
    stored: StoredMeasures | None = None,
    sliced: SlicedValues | None = None,
    texts: Sequence[Text] = (),
    units: Sequence[int] = (),
) -> EvaluationReport:
    """Return the report of the values of each draft in each domain, and of each draft's rounds.

    `classes` names the class of each document of domain `answers`, or is empty if they have none. The documents are the
    `prompts` of `rounds`. `sliced` has recorded the values of domain `answers`. `texts` are those of the rounds.
    With `units`, the documents are the turns of questions 0, 1, …, which intervals resample, and the values of domain
    `answers` are numbered by question.
    """
    length = options.settings.length
    judged = {name: joined(judged_positions(of_draft, texts), units) for name, of_draft in rounds.items()}
    if units:
        rounds = {name: joined(of_draft, units) for name, of_draft in rounds.items()}
        classes = [classes[units.index(unit)] for unit in sorted({*units})] if classes else ()
        prompts = len({*units})
    report = EvaluationReport(
        command=options.command,
        sampler=options.sampler.describe(),
        length=length,
        domains={
            domain: {name: sums.divergences() for name, sums in drafts.items()} for domain, drafts in measured.items()
        },
        positions={name: position_acceptance(positions, length) for name, positions in judged.items()},
        positions_by_text={name: positions_by_text(positions, length) for name, positions in judged.items()},
        tokens_per_round={name: tokens_per_round(draft_rounds) for name, draft_rounds in rounds.items()},
        stored=stored,
    )
    answers, measure = measured.get("answers", {}), report.acceptance_measure
    groups = by_class(classes, answers, rounds, measure) if classes and answers else []
    groups += [] if sliced is None else sliced.results(measure, units)
    agreed = [] if sliced is None else sliced.results("acceptance_greedy", units)
    agreed = [group for group in agreed if group.of == "repetition"]
    drafts = agreed[0].acceptance if agreed else ()
    agreement = {name: {group.label: group.acceptance[name] for group in agreed} for name in drafts}
    # Differences of each draft's acceptance from that of the first, paired by prompt.
    sums = {name: by_unit(of_draft, measure, prompts) for name, of_draft in answers.items()}
    first = next(iter(sums.values()), None)
    differences = {
        name: paired_ratio_interval(*first, *others) for name, others in sums.items() if first and others is not first
    }
    return replace(report, groups=groups, differences=differences, agreement=agreement)


def by_unit(measured: Measured, measure: str, units: int) -> tuple[Any, Any]:
    """Return the sums of a measure (the middle of bounds) and the counts [U] of all prompts, 0 for an empty text."""
    sums, counts, column = numpy.zeros(units), numpy.zeros(units), METRICS.index(measure)
    sums[measured.units] = (measured.least[:, column] + measured.most[:, column]) / 2
    counts[measured.units] = measured.counts
    return sums, counts


def by_class(
    classes: Sequence[str],
    answers: Mapping[str, Measured],
    rounds: Mapping[str, Sequence[Sequence[Round]]],
    measure: str,
) -> list[Group]:
    """Return acceptance and tokens per round for each class of documents. Empty if all have the same class."""
    units = next(iter(answers.values())).units
    names = list(dict.fromkeys(classes[unit] for unit in units))
    groups = []
    for name in names if len(names) > 1 else ():
        rows = [row for row, unit in enumerate(units) if classes[unit] == name]
        results = {draft: sums.take(rows).divergences() for draft, sums in answers.items()}
        tokens = next(iter(results.values())).tokens
        accepted = {draft: result.measure(measure) for draft, result in results.items()}
        decoded = {
            draft: tokens_per_round([draft_rounds[units[row]] for row in rows])
            for draft, draft_rounds in rounds.items()
        }
        groups.append(Group("class", name, len(rows), tokens, accepted, decoded))
    return groups


# ── Stage `eval`: the drafts of a run against the target's stored distributions on its test answers ──
# A compact store holds a position's likeliest tokens and the mass of all others. A measure may therefore have a lower
# and an upper bound, which also cover the rounding of the stored numbers. Legend: N positions, c of them at once,
# V vocabulary, M measures.

MORE_TEST_TEXTS = (
    "raise eval.prompts, give documents for the test split (corpus.sources), or a larger share of served answers "
    "(corpus.test)"
)
POSITIONS_AT_ONCE = 256  # positions whose logits are held at once


def evaluate(recipe: Recipe, run: Run) -> list[Path]:
    """Write eval.json and eval.md: the draft before (cut/) and after (draft/) training, on the stored test answers.

    Raises DataError if the store does not hold the blocks of the held-out texts.
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
    """Yield a run's drafts by name, loaded one at a time. There is only one if nothing is trained."""
    sides = {"before": "cut", "after": "draft"} if recipe.train.steps else {"after": "draft"}
    for name, folder in sides.items():
        yield name, load_model(str(run.path(folder)), recipe.target.dtype, device)
    if read_kept(run.path("draft")) is not None:  # llama.cpp and others run it without the trimmed head.
        yield "after, full head", load_model(str(run.path("draft")), recipe.target.dtype, device, trimmed=False)


def evaluate_stored(recipe: Recipe, run: Run) -> EvaluationReport:
    """Return the report of stage `eval`."""
    device, sampler = pick_device(recipe.device), recipe.sampler
    store, texts = TeacherStore(run, "test"), held_out(recipe, run, "test")
    blocks, stored = texts.blocks, store.packed.take(slice(None))
    if not len(blocks):
        raise DataError("there is neither an answer nor text of the test split to measure", MORE_TEST_TEXTS)
    if len(blocks) != len(stored) or not torch.equal(stored.ids, blocks.ids):
        raise DataError(f"{store.folder} holds other texts than this run", how_to_redo("teacher"))
    # The mask leaves out documents that a server could not read as text, and tokens without a distribution.
    blocks = replace(blocks, mask=stored.mask)
    answer_blocks = len(texts.answered)
    domains = {"answers": range(answer_blocks), "files": range(answer_blocks, len(blocks))}
    measured: dict[str, dict[str, Measured]] = {domain: {} for domain, index in domains.items() if index}
    sliced = SlicedValues.of(blocks.take(slice(0, answer_blocks)))
    written: list[Text] = [
        (prompt.tolist(), answer.tolist()) for prompt, answer in map(texts.answers.ids, range(len(texts.answers)))
    ]
    ends = target_ends(recipe.target.model, load_tokenizer(recipe.target.model)).ids
    rounds: dict[str, list[list[Round]]] = {}
    for name, draft in drafts_of(recipe, run, device):
        for domain, drafts in measured.items():
            values = stored_values(store, blocks, domains[domain], name, draft, sampler)
            drafts |= sum_by_document(sliced.watch(values) if domain == "answers" else values)
        if name == "after" and written:  # An untrained cut has almost nothing accepted.
            model = growing_decoder(draft, store.vocabulary, prepack=False)
            rounds[name] = record_rounds(model, written, ends, length=recipe.eval.length)
    left_out = {f"answers ({reason})": count for reason, count in texts.dropped.items()}
    unscored = texts.blocks.mask.sum() - blocks.mask.sum()
    if int(unscored):
        left_out["positions without a distribution from the server"] = int(unscored)
    about = StoredMeasures(
        source=_source(store.manifest),
        exact=store.exact,
        bounds={
            domain: {
                name: {of: Bounds(low.mean, high.mean) for of, (low, high) in sums.bounds().items()}
                for name, sums in drafts.items()
            }
            for domain, drafts in measured.items()
        },
        sampled={name: ratio_interval(sums.hits, sums.counts) for name, sums in measured.get("answers", {}).items()},
        left_out=left_out,
    )
    classes = [answer.label for answer in texts.answers]
    options = EvaluationOptions(sampler, recipe.eval, run.command)
    return as_report(measured, rounds, options, len(classes), classes, about, sliced, written)


def _source(manifest: dict[str, Any]) -> str:
    """Say in words what gave the distributions."""
    origin = manifest.get("origin") or {}
    kind = origin.get("kind")
    if kind == "gguf":
        return f"the GGUF file {origin.get('path')}"
    return f"{origin.get('model')} on a server" if kind == "server" else f"the target in {manifest['dtype']}"


def stored_values(
    store: TeacherStore, blocks: Packed, index: range, name: str, draft: Any, sampler: Sampler
) -> Iterator[Values]:
    """Yield the values of a draft against the stored distributions of the blocks at `index`.

    `blocks` are the store's blocks, with the numbers of their documents.
    """
    for block in index:
        packed = blocks.take(slice(block, block + 1))
        hidden = scored_states(draft, packed)
        labels, teacher = packed.labels(), store.read(torch.tensor([block])).distributions(hidden.device)
        end = 0  # The block's scored positions follow the order of its documents.
        for _, place, here in scored_documents(packed):
            number = packed.number(0, place)
            start, end = end, end + int(here.sum())
            for at in range(start, end, POSITIONS_AT_ONCE):
                rows = slice(at, min(at + POSITIONS_AT_ONCE, end))
                logits = head_logits(draft, hidden[rows])[:, : store.vocabulary]
                hits = int((logits.argmax(-1).cpu() == labels[rows]).sum())
                yield name, number, *stored_metrics(teacher.chunk(rows), logits, sampler), hits


def stored_metrics(chunk: TeacherChunk, draft_logits: Tensor, sampler: Sampler) -> tuple[Tensor, Tensor]:
    """Return the lower and upper values [c, M] of METRICS from draft logits [c, V]. Exact stores give equal values.

    A value is NaN if a compact store gives no bound. This concerns the reverse KL, which depends on the target's rarest
    tokens, and the KL of a draft with a trimmed head, which is taken over the tokens that the draft has.
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
        # p log(p / q) has the slope log(p / q) + 1. Rounding therefore moves each term by at most this much.
        drafted = draft_logits.log_softmax(-1).gather(-1, ids.clamp(max=draft_logits.shape[-1] - 1))
        ratio = (logs - drafted).abs().masked_fill(~present, 0)
        slack = (logs.exp() * torch.expm1(error) * (ratio + 1 + error)).sum(-1)
        kl = (least - slack).clamp(min=0), most + slack
    drawn = unknown, unknown
    if sampler.temperature:
        few = divergences.likeliest(draft_logits, DRAWN_AMONG)
        drawn = sampling_bounds(served, probabilities_of(Sampler(temperature=sampler.temperature), few))
    agreement = (ids[:, 0] == draft_logits.argmax(-1)).to(tail.dtype)
    bounds = {
        "forward_kl": kl,
        "reverse_kl": (unknown, unknown),
        "acceptance_sampling": sampling_bounds(served, probabilities_of(sampler, draft_logits)),
        "acceptance_drawn": drawn,
        "acceptance_match": match_bounds(served, draft_logits),
        "acceptance_greedy": (agreement, agreement),
        "acceptance_ceiling": ceiling,
    }
    least, most = (torch.stack([bounds[name][side] for name in METRICS], -1) for side in (0, 1))
    return least, most


# ── Any target with its drafts on given texts, also in several GGUF types, without a recipe ──

PROMPT_TOKENS, SEED = 64, 0  # tokens of a prompt cut from a text, and the seed of the order of texts

Prompts = Callable[[str, int], UserPrompts | SuitePrompts]  # (target, room in tokens) → prompts


@dataclass(frozen=True)
class Grid:
    """A target with every draft. If `types` are given, the draft is measured as a GGUF file of each type.

    `block` is the maximum number of tokens of a text. If `prompts_are_whole`, the models' context is the maximum
    instead. `written` is a folder of files that a run has exported. `dtype` is for folders.
    """

    target: str
    drafts: Sequence[str]
    block: int
    types: Sequence[str] = ()
    written: Path | None = None
    threads: int | None = None
    gguf: Gguf | None = None
    prompts_are_whole: bool = True
    dtype: str = "auto"


def evaluate_grid(grid: Grid, prompts: Prompts, options: EvaluationOptions) -> EvaluationReport:
    """Return the report of every draft of the grid.

    Raises PairError for models that do not fit, and DataError for fewer than 4 prompts.
    """
    for draft in grid.drafts:
        require_pair(grid.target, draft)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        (target,) = _files([grid.target], (), grid, Path(scratch, "target")).values()
        drafts = _files(grid.drafts, grid.types, grid, Path(scratch, "draft"))
        if not all(map(is_gguf, (target, *drafts.values()))):  # One engine must decode all models.
            target = str(folder_of(target)) if is_gguf(target) else target
            drafts = {name: str(folder_of(path)) if is_gguf(path) else path for name, path in drafts.items()}
        if len(drafts) == 1 and not grid.types:
            drafts = dict(zip(["draft"], drafts.values(), strict=True))
        contexts = [context for model in (target, *drafts.values()) if (context := context_of(model)) is not None]
        context = min(contexts, default=grid.block)
        context = context if grid.prompts_are_whole else min(context, grid.block)
        asked = prompts(target, context)
        longest = asked.longest + min(options.settings.new_tokens, context // 2)
        block = min(context, max(grid.block, longest))
        pairs = _load(target, drafts, grid, block, stack)
        block = min(block, *(model.capacity for pair in pairs.values() for model in (pair.target, pair.draft)))
        first, suite, units = next(iter(pairs.values())), "", list[int]()
        if isinstance(asked, SuitePrompts):
            suite = f"{asked.words}, up to {options.settings.new_tokens} new tokens a turn"
            asked, units = every_turn(asked, first, options)
        blocks = options.settings.file_blocks
        given = _given(first, asked.texts, min(block, grid.block), blocks) if len(pairs) == 1 else None
        decoded = [*pairs] if options.grid else []
        opened = TargetWithDrafts(pairs, asked.measured, block, asked.classes(), given, decoded, units)
        report = evaluate_pairs(opened, options)
        beyond = measured_of(longest, min(contexts, default=None), "the models take", "give longer prompts")
        return replace(report, suite=suite, beyond=beyond)


def every_turn(asked: SuitePrompts, pair: LoadedPair, options: EvaluationOptions) -> tuple[UserPrompts, list[int]]:
    """Return the prompts of all turns of a suite, and their questions. Turns follow the target's greedy answers."""
    new_tokens, rules = options.settings.new_tokens, rules_of_pair(pair)
    write = functools.partial(write_texts, pair.target, new_tokens=new_tokens, rules=rules)
    turns, units = asked.all_turns(write, pair.text)
    prompts = UserPrompts(turns, dict(asked.dropped), [])
    print_left_out(prompts)
    return prompts, units


def print_left_out(prompts: UserPrompts) -> None:
    """Print the number of prompts that were left out, by reason."""
    for reason, number in prompts.dropped.items():
        print(f"{number} left out: {reason}", file=sys.stderr)


def _files(models: Sequence[str], types: Sequence[str], grid: Grid, scratch: Path) -> dict[str, str]:
    """Return each model, or its file of each type, by a name for tables. Files are written to `scratch`."""
    models_by_name = {}
    short = [Path(model).name if is_path(model) else model for model in models]
    names = short if len(set(short)) == len(short) else models
    for number, (name, model) in enumerate(dict(zip(names, models, strict=True)).items()):
        if not grid.types:
            models_by_name[name] = model
            continue
        folder = scratch / str(number)
        folder.mkdir(parents=True)

        def place(kind: str, folder: Path = folder) -> Path:
            exported = None if grid.written is None else grid.written / f"{scratch.name}-{kind}.gguf"
            return exported if exported is not None and exported.is_file() else folder / f"{scratch.name}-{kind}.gguf"

        kinds = types or [file_type(Path(model)) if is_gguf(model) else "f16"]
        files = files_in_types(model, kinds, place)
        models_by_name |= {kind if len(models) == 1 else f"{name}, {kind}": str(path) for kind, path in files.items()}
    return models_by_name


def _load(target: str, drafts: Mapping[str, str], grid: Grid, tokens: int, stack: ExitStack) -> dict[str, LoadedPair]:
    """Load a target with each of its drafts. The layers of models that decode are laid out later."""
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
        draft_alone = load_pair(Target(model=draft), tokens=tokens, threads=grid.threads, gguf=options)
        small[name] = stack.enter_context(draft_alone).target
    big = stack.enter_context(load_pair(Target(model=target), tokens=tokens, threads=grid.threads, gguf=gguf))
    return {name: replace(big, draft=draft) for name, draft in small.items()}


def _given(pair: LoadedPair, texts: Sequence[str], block: int, blocks: int) -> Packed | None:
    """Pack plain texts into blocks, in an order drawn from the seed."""
    order = list(texts)
    random.Random(SEED).shuffle(order)
    with open_tokenizer(pair.reference) as tokenizer:
        sequences = [(encode_text(tokenizer, text), 1) for text in order]
        return pack(sequences, block, True, opening_of(tokenizer)).take(slice(0, blocks)) if order else None


def prompts_of(corpus: Corpus, count: int) -> Prompts:
    """Return a reader of prompts from files, with room for their answers. It raises DataError for fewer than 4."""
    answer = Evaluate().new_tokens

    def read(target: str, block: int) -> UserPrompts:
        room = block - min(answer, block // 2)
        prompts = read_user_prompts(target, corpus, Chat(), count, PROMPT_TOKENS, room, answer=answer, least=4)
        print_left_out(prompts)
        print(f"prompts: {prompts.asked}", file=sys.stderr)
        return prompts

    return read


def prompts_of_suite(suite: Suite, count: int | None, seed: int) -> Prompts:
    """Return a reader of `count` questions (None: all) of each category of a suite, with room for their answers."""
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
    """Return the report of a run's target and trained draft in the grid's types, after the run's test prompts."""
    prompts = UserPrompts([*read_prompts(run, "test")[: recipe.eval.prompts]], {}, [])
    written = None if run.outdated("export") else run.path("gguf")
    models = recipe.target.model, [str(run.path("draft"))]
    grid = Grid(*models, recipe.corpus.block, types, written, threads, gguf, prompts_are_whole=False)
    sampler, seed = recipe.sampler, recipe.seed
    options = EvaluationOptions(sampler, recipe.eval, command, kl, seed=seed, grid=acceptance)
    return evaluate_grid(grid, lambda *_: prompts, options)
