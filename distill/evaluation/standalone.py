"""Evaluation of any two models on given texts, without a recipe or a run: Hugging Face folders, or GGUF files."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from distill.evaluation.stage import continue_all, pack_answers
from distill.models.conversion.importing import one_engine
from distill.models.gguf.model import GgufModel
from distill.models.hugging_face import encode
from distill.models.loaded import GROWING, LoadedPair, growing_decoder, load_pair
from distill.models.pairs import require_pair
from distill.packing import Packed, pack
from distill.progress import Progress
from distill.recipe import Chat, Corpus, Evaluate, Gguf, PyTorch, Recipe, Target
from distill.results.evaluation_results import EvaluationReport
from distill.run import Run
from distill.sampler import Sampler
from distill.speculative.decode import plain, room_for
from distill.speculative.rules import Rules
from distill.texts import Prompt, prompt_seed, read_prompts

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
        room = min(settings.new_tokens, block - max(map(len, ids)))
        texts = continued(pair, found.measured, sampler, room, vocabulary)
        domains["answers"] = pack_answers(ids, texts, block)
        if found.texts:
            order = list(found.texts)
            random.Random(SEED).shuffle(order)
            files = pack(((_encoded(pair, text), 1) for text in order), block, True)
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


def _encoded(pair: LoadedPair, text: str) -> list[int]:
    return pair.target.tokenize(text, True) if isinstance(pair.target, GgufModel) else encode(pair.tokenizer, text)


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
    pair: LoadedPair, prompts: Sequence[Prompt], sampler: Sampler, limit: int, vocabulary: int
) -> list[list[int]]:
    """The target's own continuations, each drawn with its own seed."""
    seeds = [prompt_seed(SEED, prompt.id) for prompt in prompts]
    if pair.hugging_face is not None:
        ids = [prompt.ids for prompt in prompts]
        return continue_all(pair.hugging_face[0], ids, sampler, limit, seeds, pair.ends, BATCH, vocabulary)
    progress, texts = Progress("the target continues prompts", len(prompts)), []
    for prompt, seed in zip(prompts, seeds, strict=True):
        rules = Rules(sampler, "token" if sampler.temperature else "greedy", pair.ends, random.Random(seed).random)
        room = room_for(pair.target, pair.target, len(prompt.ids), limit)
        texts.append(plain(pair.target, prompt.ids, room, rules=rules).tokens)
        progress.step()
    return texts


@dataclass(frozen=True)
class PromptedPair:
    """A pair and the prompts that it is measured behind: of a run, with its recipe's settings, or of any two models.

    `training_type` is that of the training's autocast; `written` holds GGUF files that a run has exported.
    """

    target: Target
    draft: str
    prompts: Sequence[Prompt]
    sampler: Sampler
    settings: Evaluate
    device: str = "auto"
    seed: int = SEED
    training_type: str = "float32"
    written: Path | None = None


def of_run(recipe: Recipe, run: Run, count: int) -> PromptedPair:
    """A run's target and trained draft, on its first test prompts."""
    return PromptedPair(
        recipe.target,
        str(run.path("draft")),
        read_prompts(run, "test")[:count],
        Sampler.of(recipe.sampler),
        recipe.eval,
        recipe.device,
        recipe.seed,
        recipe.train.dtype,
        None if run.outdated("export") else run.path("gguf"),
    )


def of_models(target: str, draft: str, text: Sequence[Path], count: int, sampler: Sampler) -> PromptedPair:
    """Any two models, on prompts of files and folders. PairError where they do not fit."""
    require_pair(target, draft)
    corpus = corpus_of(text)
    prompts = prompts_of(target, corpus, count, corpus.block).measured
    return PromptedPair(Target(model=target), draft, prompts, sampler, Evaluate())
