"""Evaluation of any two models on given texts, without a recipe or a run: Hugging Face folders, or GGUF files."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

from distill.documents.prompts import cut_prompts
from distill.documents.sources import read_documents
from distill.errors import DataError
from distill.evaluation.measure import (
    Measured,
    as_report,
    block_values,
    decode_rounds,
    sum_by_document,
    text_values,
)
from distill.evaluation.stage import continue_all
from distill.models.gguf.model import GgufModel
from distill.models.hugging_face import encode
from distill.models.loaded import LoadedPair, growing_decoder
from distill.packing import Packed, pack
from distill.progress import Progress
from distill.recipe import Corpus, Evaluate
from distill.results.evaluation_results import EvaluationReport
from distill.sampler import Sampler
from distill.speculative.decode import plain, room_for
from distill.speculative.rules import Rules
from distill.texts import prompt_seed

PROMPT_TOKENS, BATCH, SEED = 64, 32, 0  # tokens of a prompt, prompts continued at once, and the seed of their draws


def evaluate_standalone(
    pair: LoadedPair,
    corpus: Corpus,
    sampler: Sampler,
    prompts: int,
    divergence: bool,
    acceptance: bool,
    command: str,
) -> EvaluationReport:
    """The report for a loaded pair on the test documents of `corpus`.

    Raises DataError where the texts give fewer than 4 prompts.
    """
    settings = Evaluate()
    vocabulary = min(pair.target.vocabulary_size, pair.draft.vocabulary_size)
    gguf = pair.target if isinstance(pair.target, GgufModel) else None
    to_ids = functools.partial(encode, pair.tokenizer) if gguf is None else gguf.tokenize
    documents, _ = read_documents(corpus, needed=("test",))
    stride = 4 * (PROMPT_TOKENS + settings.new_tokens)
    found = cut_prompts(documents, to_ids, prompts, PROMPT_TOKENS, stride, SEED)
    if len(found) < 4:
        raise DataError(
            f"the texts give {len(found)} prompts of {PROMPT_TOKENS} tokens", "give more or longer texts (4 at least)"
        )
    ids = [prompt.ids for prompt in found]
    block = min(corpus.block, pair.target.capacity, pair.draft.capacity)
    domains: dict[str, Packed] = {}
    if divergence:
        seeds = [prompt_seed(SEED, prompt.id) for prompt in found]
        room = min(settings.new_tokens, block - PROMPT_TOKENS)
        texts = _continued(pair, ids, sampler, room, seeds, vocabulary)
        domains["answers"] = pack(((p + t, len(p)) for p, t in zip(ids, texts, strict=True)), block, False)
        order = list(documents)
        random.Random(SEED).shuffle(order)
        files = pack(((to_ids(document.text), 1) for document in order), block, True)
        domains["files"] = files.take(slice(0, settings.file_blocks))
    measured = {name: _measured(pair, blocks, sampler, vocabulary, name) for name, blocks in domains.items()}
    rounds = {}
    if acceptance:
        target, draft, title = pair.target, pair.draft, "rounds, prompts"
        if pair.hugging_face is not None:  # with the layers laid out, without which the pair was loaded
            target, draft = (growing_decoder(model, vocabulary) for model in pair.hugging_face)
            title = "rounds draft, prompts"
        rounds["draft"] = decode_rounds(target, draft, ids, settings, pair.ends, title)
    return as_report(measured, rounds, sampler, settings, command)


def _measured(pair: LoadedPair, blocks: Packed, sampler: Sampler, vocabulary: int, domain: str) -> dict[str, Measured]:
    """What was measured of the draft, of whole blocks where the models can read them."""
    if pair.hugging_face is None:
        return sum_by_document(text_values(pair.target, {"draft": pair.draft}, blocks, sampler, vocabulary, domain))
    target, draft = pair.hugging_face
    return sum_by_document(block_values(target, {"draft": draft}, blocks, sampler, vocabulary))


def _continued(
    pair: LoadedPair,
    prompts: Sequence[list[int]],
    sampler: Sampler,
    limit: int,
    seeds: Sequence[int],
    vocabulary: int,
) -> list[list[int]]:
    """The target's own continuations, each drawn with its own seed."""
    if pair.hugging_face is not None:
        return continue_all(pair.hugging_face[0], prompts, sampler, limit, seeds, pair.ends, BATCH, vocabulary)
    progress, texts = Progress("the target continues prompts", len(prompts)), []
    for prompt, seed in zip(prompts, seeds, strict=True):
        rules = Rules(sampler, "token" if sampler.temperature else "greedy", pair.ends, random.Random(seed).random)
        room = room_for(pair.target, pair.target, len(prompt), limit)
        texts.append(plain(pair.target, prompt, room, rules=rules).tokens)
        progress.step()
    return texts
