"""Evaluation of any two Hugging Face models on given texts, without a recipe or a run."""

from __future__ import annotations

import functools
import random

from distill.corpus.prompts import cut_prompts
from distill.corpus.sources import read_documents
from distill.errors import DataError
from distill.evaluation.stage import continue_all, evaluate_pair
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

    Raises DataError for GGUF files, and where the texts give fewer than 4 prompts.
    """
    if pair.hugging_face is None:
        raise DataError(f"{pair.reference}: GGUF files cannot be evaluated yet", "give the Hugging Face folders")
    target, draft = pair.hugging_face
    settings = Evaluate()
    vocabulary = min(pair.target.vocabulary_size, pair.draft.vocabulary_size)
    to_ids = functools.partial(encode, pair.tokenizer)
    documents, _ = read_documents(corpus, needed=("test",))
    stride = 4 * (PROMPT_TOKENS + settings.new_tokens)
    found = cut_prompts(documents, to_ids, prompts, PROMPT_TOKENS, stride, SEED)
    if len(found) < 4:
        raise DataError(
            f"the texts give {len(found)} prompts of {PROMPT_TOKENS} tokens", "give more or longer texts (4 at least)"
        )
    ids = [prompt.ids for prompt in found]
    block = min(corpus.block, target.config.max_position_embeddings, draft.config.max_position_embeddings)
    domains: dict[str, Packed] = {}
    if divergence:
        seeds = [prompt_seed(SEED, prompt.id) for prompt in found]
        room = min(settings.new_tokens, block - PROMPT_TOKENS)
        texts = continue_all(target, ids, sampler, room, seeds, pair.ends, BATCH, vocabulary)
        domains["answers"] = pack(((p + t, len(p)) for p, t in zip(ids, texts, strict=True)), block, False)
        order = list(documents)
        random.Random(SEED).shuffle(order)
        files = pack(((to_ids(document.text), 1) for document in order), block, True)
        domains["files"] = files.take(slice(0, settings.file_blocks))
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
        acceptance,
    )
    return report
