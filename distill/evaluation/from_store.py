"""Stage `eval` where the target is not loaded: the drafts against the target's stored distributions, and its answers.

A compact store holds the K likeliest tokens and the mass of the rest, so each measure has a least and a largest value
between which the exact one lies, the rounding of the stored numbers included. Legend: N positions, c of them at once, V
vocabulary, U units (documents), M measures.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from distill import divergences
from distill.errors import DataError
from distill.evaluation.measure import METRICS
from distill.intervals import Interval, ratio_interval
from distill.models.hugging_face import load_model, pick_device
from distill.models.packed_forward import hidden_states
from distill.packing import Packed
from distill.recipe import Recipe
from distill.results.evaluation_results import Bounds, ClassResult, Divergences, EvaluationReport, StoredMeasures
from distill.run import Run
from distill.sampler import Sampler
from distill.teacher.distributions import TeacherChunk
from distill.teacher.held_out import HeldOut, held_out
from distill.teacher.store import TeacherStore, redo

CHUNK = 256  # positions whose logits are held at once
HALF, SMALLEST = 2.0**-11, 2.0**-25  # relative and absolute rounding of a logarithm to fp16
Sums = NDArray[numpy.float64]


def stored_metrics(chunk: TeacherChunk, draft_logits: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest value [c, M] of METRICS at temperature 1, from draft logits [c, V].

    NaN where a store tells nothing: the reverse KL, which hangs on the target's rarest tokens, and the KL of a draft
    with a trimmed head, which is between distributions over the tokens that it has.
    """
    ids, logs, tail = chunk.ids, chunk.log_probabilities, chunk.log_tail
    assert ids is not None, "a compact store has ids"
    error = logs.abs() * HALF + SMALLEST
    low, high = logs - error, logs + error
    absent = torch.isneginf(draft_logits)
    unknown = torch.full_like(tail, torch.nan)
    agreement = (ids[:, 0] == draft_logits.argmax(-1)).to(tail.dtype)
    accepted = (
        divergences.acceptance_bounds(ids, low, tail, draft_logits)[0],
        divergences.acceptance_bounds(ids, high, tail, draft_logits)[1].clamp(max=1),
    )
    matched = (
        divergences.acceptance_match_bounds(ids, low, tail, draft_logits)[0],
        divergences.acceptance_match_bounds(ids, high, tail, draft_logits)[1].clamp(max=1),
    )
    if bool(absent.any()):
        kept = ~absent.gather(-1, ids)
        kl = (unknown, unknown)
        ceiling = (low.exp() * kept).sum(-1), ((high.exp() * kept).sum(-1) + tail.exp()).clamp(max=1)
    else:
        least, most = divergences.forward_kl_bounds(ids, logs, tail, draft_logits)
        # p log(p / q) has the slope log(p / q) + 1, so that rounding moves each term by at most this.
        ratio = (logs - draft_logits.log_softmax(-1).gather(-1, ids)).abs()
        slack = (logs.exp() * torch.expm1(error) * (ratio + 1 + error)).sum(-1)
        kl = (least - slack).clamp(min=0), most + slack
        ceiling = (torch.ones_like(tail),) * 2
    found = {
        "forward_kl": kl,
        "reverse_kl": (unknown, unknown),
        "total_variation": (1 - accepted[1], 1 - accepted[0]),
        "top1_agreement": (agreement, agreement),
        "acceptance_sampling": accepted,
        "acceptance_match": matched,
        "acceptance_greedy": (agreement, agreement),
        "acceptance_ceiling": ceiling,
    }
    least, most = (torch.stack([found[name][side] for name in METRICS], -1) for side in (0, 1))
    return least, most


@dataclass(frozen=True)
class Measured:
    """Of one draft on one domain: sums [U, M] of the least and of the largest values, tokens [U] of each unit, how many
    of them are the draft's argmax [U], and the units' numbers [U] among all documents."""

    least: Sums
    most: Sums
    counts: Sums
    hits: Sums
    units: list[int]

    def take(self, rows: list[int]) -> Measured:
        """Some of the units."""
        units = [self.units[row] for row in rows]
        return Measured(self.least[rows], self.most[rows], self.counts[rows], self.hits[rows], units)

    def divergences(self, resamples: int, confidence: float) -> tuple[Divergences, dict[str, Bounds]]:
        """Each measure's middle, with an interval that covers both bounds, and the bounds themselves."""
        intervals, bounds = {}, {}
        for column, name in enumerate(METRICS):
            low, high = (
                ratio_interval(sums[:, column], self.counts, resamples, confidence) for sums in (self.least, self.most)
            )
            bounds[name] = Bounds(low.mean, high.mean)
            intervals[name] = Interval((low.mean + high.mean) / 2, low.low, high.high)
        return Divergences(int(self.counts.sum()), len(self.counts), **intervals), bounds


@torch.inference_mode()
def measure_store(store: TeacherStore, blocks: Packed, index: range, draft: Any) -> Measured:
    """A draft against the stored distributions of the blocks at `index`; `blocks` are the store's, with the numbers of
    their documents."""
    assert blocks.first is not None
    part = blocks.take(slice(index.start, index.stop))
    assert part.first is not None
    numbers, unit = (part.first.unsqueeze(1) + part.documents)[part.mask].unique(return_inverse=True)
    sums = torch.zeros(3, len(numbers), len(METRICS), dtype=torch.float64)
    hits = torch.zeros(len(numbers), dtype=torch.float64)
    at = 0
    for block in index:
        one = blocks.take(slice(block, block + 1))
        hidden = hidden_states(draft, one)
        hidden = hidden[one.mask.to(hidden.device)]
        labels = one.labels()[one.mask]
        teacher = store.teacher(torch.tensor([block]), hidden.device)
        for start in range(0, len(hidden), CHUNK):
            rows = slice(start, start + CHUNK)
            logits = draft.lm_head(hidden[rows]).float()[:, : store.vocabulary]
            values = stored_metrics(teacher.chunk(rows), logits)
            own = unit[at : at + len(logits)]
            at += len(logits)
            for side, value in enumerate(values):
                sums[side].index_add_(0, own, value.double().cpu())
            hits.index_add_(0, own, (logits.argmax(-1).cpu() == labels[rows]).double())
    counts = torch.bincount(unit, minlength=len(numbers)).double()
    return Measured(sums[0].numpy(), sums[1].numpy(), counts.numpy(), hits.numpy(), numbers.tolist())


def evaluate_stored(recipe: Recipe, run: Run) -> EvaluationReport:
    """The report of stage `eval` from test/, without the target.

    Raises DataError where the store does not hold the blocks of the held-out texts.
    """
    device, accuracy = pick_device(recipe.device), (recipe.eval.resamples, recipe.eval.confidence)
    store, texts = TeacherStore(run, "test"), held_out(recipe, run, "test")
    blocks = texts.blocks
    if not torch.equal(store.packed.ids, blocks.ids):
        raise DataError(f"{store.folder} holds other texts than those of this run", redo("test"))
    blocks = replace(blocks, mask=store.packed.mask)  # without documents that could not be sent as text
    own = len(texts.own)
    domains = {"answers": range(own), **({"files": range(own, len(blocks))} if len(blocks) > own else {})}
    measured: dict[str, dict[str, Measured]] = {domain: {} for domain in domains}
    for name, folder in (("before", "cut"), ("after", "draft")):
        draft = load_model(str(run.path(folder)), recipe.target.dtype, device)
        for domain, index in domains.items():
            measured[domain][name] = measure_store(store, blocks, index, draft)
        del draft  # one at a time in memory
    results: dict[str, dict[str, Divergences]] = {}
    bounds: dict[str, dict[str, dict[str, Bounds]]] = {}
    for domain, drafts in measured.items():
        both = {name: found.divergences(*accuracy) for name, found in drafts.items()}
        results[domain] = {name: one[0] for name, one in both.items()}
        bounds[domain] = {name: one[1] for name, one in both.items()}
    answers = measured["answers"]
    left_out = {f"answers ({reason})": count for reason, count in texts.dropped.items()}
    unscored = texts.blocks.mask.sum() - store.packed.mask.sum()
    if int(unscored):
        left_out["positions of documents that are read as other tokens when sent as text"] = int(unscored)
    stored = StoredMeasures(
        source=_source(store.manifest.get("origin") or {}),
        temperature=1.0,
        entries=store.manifest["k"],
        served=Sampler.of(recipe.sampler).describe(),
        bounds=bounds,
        sampled={name: ratio_interval(found.hits, found.counts, *accuracy) for name, found in answers.items()},
        left_out=left_out,
    )
    report = EvaluationReport(
        command=run.command,
        sampler=Sampler().describe(),
        length=recipe.eval.length,
        domains=results,
        positions={},
        tokens_per_round={},
        stored=stored,
    )
    return replace(report, classes=_by_class(texts, answers, report.acceptance_measure, accuracy))


def _by_class(
    texts: HeldOut, measured: dict[str, Measured], measure: str, accuracy: tuple[int, float]
) -> list[ClassResult]:
    """α by the answers' class and mode; none where all are the same."""
    units = next(iter(measured.values())).units
    names = [", ".join(filter(None, (texts.answers[unit].label, texts.answers[unit].mode))) for unit in units]
    if len(set(names)) < 2:
        return []
    found = []
    for name in dict.fromkeys(names):
        rows = [row for row, one in enumerate(names) if one == name]
        own = {draft: one.take(rows).divergences(*accuracy)[0] for draft, one in measured.items()}
        tokens = next(iter(own.values())).tokens
        accepted = {draft: one.measure(measure) for draft, one in own.items()}
        found.append(ClassResult(name, len(rows), tokens, accepted, {}))
    return found


def _source(origin: dict[str, Any]) -> str:
    """What gave the distributions, in words."""
    if origin.get("kind") == "gguf":
        return f"the GGUF file {origin.get('path')}"
    return f"{origin.get('model')} on a server" if origin.get("kind") == "server" else "the stored target"
