"""The measures of single positions between models that read one text after another, such as GGUF files.

Legend: S positions of a text, N scored ones, V vocabulary, U units (documents).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy
import torch

from distill.evaluation.measure import position_metrics, scored_documents
from distill.models.base import Model
from distill.packing import Packed
from distill.progress import Progress
from distill.sampler import Sampler
from distill.speculative.decode import Rules, plain, room_for

CHUNK = 64  # positions whose logits [64, V] are held at once


def continue_texts(
    target: Model,
    prompts: Sequence[Sequence[int]],
    sampler: Sampler,
    limit: int,
    seeds: Sequence[int],
    ends: Sequence[int],
) -> list[list[int]]:
    """The target's own continuations of prompts, one after another, each drawn with a seed of its own."""
    progress, texts = Progress("the target continues prompts", len(prompts)), []
    for prompt, seed in zip(prompts, seeds, strict=True):
        rules = Rules(sampler, "token" if sampler.temperature else "greedy", ends, random.Random(seed).random)
        texts.append(plain(target, prompt, room_for(target, target, len(prompt), limit), rules=rules).tokens)
        progress.step()
    return texts


@torch.inference_mode()
def measure_texts(
    target: Model, drafts: Mapping[str, Model], blocks: Packed, sampler: Sampler, vocabulary: int, domain: str
) -> dict[str, tuple[numpy.ndarray, numpy.ndarray]]:
    """Sums [U, 8] and counts [U] of the metrics for each draft, as `measure_blocks` of models of transformers.

    Each document of a block is read by itself. Raises DataError for blocks that do not number their documents, and for
    logits that are not finite.
    """
    sums: dict[str, dict[int, numpy.ndarray]] = {name: {} for name in drafts}
    counts: dict[int, int] = {}
    found = list(scored_documents(blocks))
    assert blocks.first is not None  # scored_documents has looked
    progress = Progress(f"logits of texts, {domain}", len(found))
    for block, number, here in found:
        own = blocks.documents[block] == number - int(blocks.first[block])
        ids, scored = blocks.ids[block][own].tolist(), here[own]
        counts[number] = counts.get(number, 0) + int(scored.sum())
        for model in (target, *drafts.values()):
            model.rollback([0])
        for start in range(0, int(scored.nonzero().max()) + 1, CHUNK):
            part, where = ids[start : start + CHUNK], scored[start : start + CHUNK]
            expected = target.extend(part)
            expected.argmax()  # which names the place of logits that are not finite
            for name, draft in drafts.items():
                got = draft.extend(part)
                got.argmax()
                values = position_metrics(expected.full()[where], got.full()[where], sampler, vocabulary)
                total = values.double().sum(0).numpy()
                sums[name][number] = sums[name].get(number, 0) + total
        progress.step()
    weights = numpy.array(list(counts.values()))
    return {name: (numpy.stack(list(of.values())), weights) for name, of in sums.items()}
