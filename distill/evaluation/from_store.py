"""Stage `eval` where the target is not loaded: the drafts against the target's stored distributions, and its answers.

A compact store holds the K likeliest tokens and the mass of the rest, so each measure has a least and a largest value
between which the exact one lies, the rounding of the stored numbers included. Legend: N positions, c of them at once, V
vocabulary, M measures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from distill import divergences
from distill.errors import DataError
from distill.evaluation.measure import Measured, sum_by_document
from distill.evaluation.metrics import METRICS, Values
from distill.evaluation.pairs import as_report
from distill.intervals import ratio_interval
from distill.models.hugging_face import load_model, pick_device
from distill.models.packed_forward import hidden_states
from distill.models.server_commands import DRAWN_AMONG
from distill.packing import Packed, scored_documents
from distill.recipe import Recipe
from distill.results.evaluation_results import Bounds, EvaluationReport, StoredMeasures
from distill.run import Run
from distill.sampler import Sampler
from distill.teacher.distributions import TeacherChunk
from distill.teacher.held_out import held_out
from distill.teacher.store import TeacherStore, redo

CHUNK = 256  # positions whose logits are held at once
HALF, SMALLEST = 2.0**-11, 2.0**-25  # relative and absolute rounding of a logarithm to fp16


def stored_metrics(chunk: TeacherChunk, draft_logits: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest value [c, M] of METRICS at temperature 1, from draft logits [c, V].

    NaN where a store gives no bound: the reverse KL, which depends on the target's rarest tokens, and the KL of a draft
    with a trimmed head, which is between distributions over the tokens that it has.
    """
    ids, logs, tail = chunk.ids, chunk.log_probabilities, chunk.log_tail
    assert ids is not None, "a compact store has ids"
    error = logs.abs() * HALF + SMALLEST
    low, high = logs - error, logs + error
    absent = torch.isneginf(draft_logits)
    unknown = torch.full_like(tail, torch.nan)
    agreement = (ids[:, 0] == draft_logits.argmax(-1)).to(tail.dtype)

    def bounded(bounds: Callable[..., tuple[Tensor, Tensor]], logits: Tensor) -> tuple[Tensor, Tensor]:
        return bounds(ids, low, tail, logits)[0], bounds(ids, high, tail, logits)[1].clamp(max=1)

    accepted = bounded(divergences.acceptance_bounds, draft_logits)
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
        "acceptance_drawn": bounded(divergences.acceptance_bounds, divergences.likeliest(draft_logits, DRAWN_AMONG)),
        "acceptance_match": bounded(divergences.acceptance_match_bounds, draft_logits),
        "acceptance_greedy": (agreement, agreement),
        "acceptance_ceiling": ceiling,
    }
    least, most = (torch.stack([found[name][side] for name in METRICS], -1) for side in (0, 1))
    return least, most


def stored_values(store: TeacherStore, blocks: Packed, index: range, name: str, draft: Any) -> Iterator[Values]:
    """Of a draft against the stored distributions of the blocks at `index`; `blocks` are the store's, with the numbers
    of their documents."""
    for block in index:
        one = blocks.take(slice(block, block + 1))
        hidden = hidden_states(draft, one)
        hidden = hidden[one.mask.to(hidden.device)]
        labels = one.labels()[one.mask]
        teacher = store.teacher(torch.tensor([block]), hidden.device)
        end = 0  # among the block's scored positions, which run through its documents in turn
        for _, document, here in scored_documents(one):
            number = one.number(0, document)
            start, end = end, end + int(here.sum())
            for at in range(start, end, CHUNK):
                rows = slice(at, min(at + CHUNK, end))
                logits = draft.lm_head(hidden[rows]).float()[:, : store.vocabulary]
                hits = int((logits.argmax(-1).cpu() == labels[rows]).sum())
                yield name, number, *stored_metrics(teacher.chunk(rows), logits), hits


def evaluate_stored(recipe: Recipe, run: Run) -> EvaluationReport:
    """The report of stage `eval` from test/, without the target.

    Raises DataError where the store does not hold the blocks of the held-out texts.
    """
    device = pick_device(recipe.device)
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
            measured[domain] |= sum_by_document(stored_values(store, blocks, index, name, draft))
        del draft  # one at a time in memory
    left_out = {f"answers ({reason})": count for reason, count in texts.dropped.items()}
    unscored = texts.blocks.mask.sum() - store.packed.mask.sum()
    if int(unscored):
        left_out["positions of documents that are read as other tokens when sent as text"] = int(unscored)
    stored = StoredMeasures(
        source=_source(store.manifest.get("origin") or {}),
        temperature=1.0,
        entries=store.manifest["k"],
        served=Sampler.of(recipe.sampler).describe(),
        bounds={
            domain: {
                name: {of: Bounds(low.mean, high.mean) for of, (low, high) in found.bounds().items()}
                for name, found in drafts.items()
            }
            for domain, drafts in measured.items()
        },
        sampled={name: ratio_interval(found.hits, found.counts) for name, found in measured["answers"].items()},
        left_out=left_out,
    )
    classes = [", ".join(filter(None, (answer.label, answer.mode))) for answer in texts.answers]
    return as_report(measured, {}, Sampler(), recipe.eval, run.command, classes, stored)


def _source(origin: dict[str, Any]) -> str:
    """What gave the distributions, in words."""
    if origin.get("kind") == "gguf":
        return f"the GGUF file {origin.get('path')}"
    return f"{origin.get('model')} on a server" if origin.get("kind") == "server" else "the stored target"
