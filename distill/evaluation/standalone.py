"""Evaluation of any two models on given texts, without a recipe or a run: Hugging Face folders, or GGUF files."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence

from distill.documents.prompts import cut_prompts
from distill.documents.sources import read_documents
from distill.errors import DataError
from distill.evaluation.by_decoding import continue_texts, measure_texts
from distill.evaluation.stage import as_report, continue_all, decode_rounds, evaluate_pair
from distill.models.gguf.model import GgufModel
from distill.models.hugging_face import encode
from distill.models.loaded import LoadedPair
from distill.packing import Packed, pack
from distill.recipe import Corpus, Evaluate
from distill.results.evaluation_results import EvaluationReport
from distill.sampler import Sampler
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
    """The report of `evaluate_pair` for a loaded pair on the test documents of `corpus`.

    Raises DataError where the texts give fewer than 4 prompts.
    """
    settings = Evaluate()
    vocabulary = min(pair.target.vocabulary_size, pair.draft.vocabulary_size)
    to_ids = _tokenizer(pair)
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
    if pair.hugging_face is None:
        drafts = {"draft": pair.draft}
        sums = {
            name: measure_texts(pair.target, drafts, blocks, sampler, vocabulary, name)
            for name, blocks in domains.items()
        }
        title = "rounds, prompts"
        rounds = (
            {"draft": decode_rounds(pair.target, pair.draft, ids, settings, pair.ends, title)} if acceptance else {}
        )
        return as_report(sums, rounds, sampler, settings, command)
    target, draft = pair.hugging_face
    report, _ = evaluate_pair(
        target,
        {"draft": draft},
        domains,
        ids,
        sampler,
        settings,
        vocabulary,
        pair.ends,
        command,
        decoded=["draft"] if acceptance else [],
    )
    return report


def _tokenizer(pair: LoadedPair) -> Callable[[str], list[int]]:
    if pair.hugging_face is not None:
        return functools.partial(encode, pair.tokenizer)
    assert isinstance(pair.target, GgufModel)
    return pair.target.tokenize


def _continued(
    pair: LoadedPair,
    prompts: Sequence[list[int]],
    sampler: Sampler,
    limit: int,
    seeds: Sequence[int],
    vocabulary: int,
) -> list[list[int]]:
    """The target's own continuations, each drawn with its own seed."""
    if pair.hugging_face is None:
        return continue_texts(pair.target, prompts, sampler, limit, seeds, pair.ends)
    return continue_all(pair.hugging_face[0], prompts, sampler, limit, seeds, pair.ends, BATCH, vocabulary)
