"""Evaluation of any two models on given texts, without a recipe or a run: Hugging Face folders, or GGUF files."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from distill.documents.user_prompts import UserPrompts, read_user_prompts, sources_of
from distill.evaluation.measure import (
    Measured,
    as_report,
    block_values,
    decode_rounds,
    sum_by_document,
    text_values,
)
from distill.evaluation.slices import SlicedValues
from distill.evaluation.stage import continue_all
from distill.models.conversion.importing import one_engine
from distill.models.gguf.model import GgufModel
from distill.models.hugging_face import encode
from distill.models.loaded import GROWING, LoadedPair, growing_decoder, load_pair
from distill.models.pairs import require_pair
from distill.packing import Packed, pack
from distill.progress import Progress
from distill.recipe import Chat, Corpus, Evaluate, Gguf, PyTorch, Target
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
    """The report for a loaded pair on the test documents of `corpus`: prompts go through the target's chat template,
    texts are cut into prompts, and measured as they are, too.

    Raises DataError for fewer than 4 prompts.
    """
    settings = Evaluate()
    vocabulary = min(pair.target.vocabulary_size, pair.draft.vocabulary_size)
    block = min(corpus.block, pair.target.capacity, pair.draft.capacity)
    found = prompts_of(pair.reference, corpus, prompts, block)
    ids = [prompt.ids for prompt in found.measured]
    domains: dict[str, Packed] = {}
    if divergence:
        seeds = [prompt_seed(SEED, prompt.id) for prompt in found.measured]
        room = min(settings.new_tokens, block - max(map(len, ids)))
        texts = continued(pair, ids, sampler, room, seeds, vocabulary)
        domains["answers"] = pack(((p + t, len(p)) for p, t in zip(ids, texts, strict=True)), block, False)
        if found.texts:
            to_ids, order = tokenizer_of(pair), list(found.texts)
            random.Random(SEED).shuffle(order)
            files = pack(((to_ids(text), 1) for text in order), block, True)
            domains["files"] = files.take(slice(0, settings.file_blocks))
    sliced = SlicedValues.of(domains["answers"], pair.token_bytes, pair.ends) if divergence else None
    measured = {
        name: measured_values(pair, blocks, sampler, vocabulary, name, sliced if name == "answers" else None)
        for name, blocks in domains.items()
    }
    rounds = {}
    if acceptance:
        target, draft, title = pair.target, pair.draft, "rounds, prompts"
        if pair.hugging_face is not None:  # with the layers laid out, without which the pair was loaded
            target, draft = (growing_decoder(model, vocabulary) for model in pair.hugging_face)
            title = "rounds draft, prompts"
        rounds["draft"] = decode_rounds(target, draft, ids, settings, pair.ends, title)
    return as_report(measured, rounds, sampler, settings, command, found.classes(), sliced=sliced)


@contextmanager
def open_pair(target: str, draft: str, block: int, threads: int | None, gguf: Gguf | None) -> Iterator[LoadedPair]:
    """A pair of any two models, to be measured on blocks of so many tokens; PairError where they do not fit."""
    require_pair(target, draft)
    target, draft = one_engine(target, draft)
    in_torch = not target.endswith(".gguf")
    # The layers of the models that decode are laid out later: blocks are read without.
    pytorch, size = (PyTorch(prepack=False), None) if in_torch else (GROWING, block)
    with load_pair(Target(model=target), draft, tokens=size, threads=threads, gguf=gguf, pytorch=pytorch) as pair:
        yield pair


def tokenizer_of(pair: LoadedPair) -> Callable[[str], list[int]]:
    """What makes token ids of a text."""
    return pair.target.tokenize if isinstance(pair.target, GgufModel) else functools.partial(encode, pair.tokenizer)


def corpus_of(paths: Sequence[Path]) -> Corpus:
    """Files and folders as a corpus whose documents are all test documents."""
    return Corpus(sources=sources_of(paths, "--text"))


def prompts_of(target: str, corpus: Corpus, count: int, block: int) -> UserPrompts:
    """Prompts for a target, with room for their answers in a block; DataError for fewer than 4."""
    answer = Evaluate().new_tokens
    room = block - min(answer, block // 2)
    found = read_user_prompts(target, corpus, Chat(), count, 0, PROMPT_TOKENS, room, answer=answer, least=4)
    for reason, number in found.dropped.items():
        print(f"{number} left out: {reason}", file=sys.stderr)
    return found


def measured_values(
    pair: LoadedPair,
    blocks: Packed,
    sampler: Sampler,
    vocabulary: int,
    domain: str,
    sliced: SlicedValues | None,
) -> dict[str, Measured]:
    """What was measured of the draft, of whole blocks where the models can read them."""
    if pair.hugging_face is None:
        values = text_values(pair.target, {"draft": pair.draft}, blocks, sampler, vocabulary, domain)
    else:
        target, draft = pair.hugging_face
        values = block_values(target, {"draft": draft}, blocks, sampler, vocabulary)
    return sum_by_document(values if sliced is None else sliced.watch(values))


def continued(
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
