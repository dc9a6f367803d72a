"""`distill eval --parity`: the ways in which a pair can be scored, put together from the rooms that they belong to."""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from distill import divergences
from distill.errors import DistillError
from distill.evaluation.parity import (
    Read,
    Reader,
    Sums,
    Text,
    Way,
    compare_ways,
    file_ways,
    steps_of_decoders,
    whole_texts,
)
from distill.evaluation.stage import continue_all
from distill.evaluation.standalone import corpus_of, prompts_of
from distill.evaluation.types import files_of_types
from distill.models.conversion.importing import file_type, is_gguf
from distill.models.hugging_face import end_ids, load_model, load_target, load_tokenizer, pick_device, real_tokens
from distill.models.pairs import require_pair
from distill.models.trimmed_head import read_kept
from distill.packing import pack
from distill.recipe import Recipe, Target
from distill.results.parity_results import ParityTable
from distill.run import Run
from distill.sampler import Sampler
from distill.serving.clients import LlamaClient
from distill.serving.http import Http
from distill.texts import Prompt, prompt_seed, read_prompts
from distill.training.step import on_device, scored_by_loss

TEXTS, TOKENS = 8, 32  # texts, and tokens of each that are scored: the logits of all of them are held
LISTED = 500  # likeliest tokens that a server is asked for
SECONDS = 120  # that a server's reply may take

FOLDERS, TRAINING, DECODER, WHOLE = "transformers", "training's loss", "our decoder", "transformers, whole head"


@dataclass(frozen=True)
class Scored:
    """A pair to be scored: how its models are loaded, what it was exported to, and what it is scored on."""

    target: Target
    draft: str
    device: torch.device
    prompts: Sequence[Prompt]
    sampler: Sampler
    seed: int
    training_type: str
    written: Path | None  # a run's exported files
    threads: int | None

    def load(self, trimmed: bool = True) -> tuple[Any, Any]:
        """Both models of transformers; the target serves as its own draft."""
        big = load_target(self.target, self.device)
        if self.draft == self.target.model:
            return big, big
        return big, load_model(self.draft, self.target.dtype, self.device, trimmed=trimmed)


def of_run(recipe: Recipe, run: Run, threads: int | None) -> Scored:
    """A run's target and trained draft, on its first test prompts."""
    return Scored(
        recipe.target,
        str(run.path("draft")),
        pick_device(recipe.device),
        read_prompts(run, "test")[:TEXTS],
        Sampler.of(recipe.sampler),
        recipe.seed,
        recipe.train.dtype,
        run.path("gguf"),
        threads,
    )


def of_models(target: str, draft: str, text: Sequence[Path], temperature: float, threads: int | None) -> Scored:
    """Any two models, on prompts cut from texts."""
    require_pair(target, draft)
    corpus = corpus_of(text)
    prompts = prompts_of(target, corpus, TEXTS, corpus.block).measured
    place = pick_device("auto")
    return Scored(Target(model=target), draft, place, prompts, Sampler(temperature), 0, "float32", None, threads)


def measure_parity(pair: Scored, url: str | None) -> ParityTable:
    """The same tokens in every way that is possible here; what is not is said."""
    if url is not None:
        LlamaClient(Http(url, SECONDS)).build()  # before minutes of work
    tokenizer = load_tokenizer(pair.target.model)
    big = load_target(pair.target, pair.device)
    vocabulary = real_tokens(big.config, tokenizer)
    ids = [prompt.ids for prompt in pair.prompts]
    seeds = [prompt_seed(pair.seed, prompt.id) for prompt in pair.prompts]
    written = continue_all(big, ids, pair.sampler, TOKENS, seeds, end_ids(big.config, tokenizer), TEXTS, vocabulary)
    del big
    texts = [Text(prompt + text, len(prompt)) for prompt, text in zip(ids, written, strict=True) if text]
    trim = None if is_gguf(pair.draft) else read_kept(Path(pair.draft))
    kept = None if trim is None else trim["kept"]
    types = pair.target.dtype
    ways = [
        Way(FOLDERS, types, lambda: whole_texts(pair.load, vocabulary)),
        Way(TRAINING, pair.training_type, lambda: losses_of(pair, vocabulary, kept), FOLDERS),
        Way(DECODER, types, lambda: steps_of_decoders(pair.load, vocabulary), FOLDERS),
    ]
    if kept is not None:  # which llama.cpp and servers do not know
        ways.append(Way(WHOLE, types, lambda: whole_texts(lambda: pair.load(trimmed=False), vocabulary), FOLDERS))
    whole, missing = ways[-1].name if kept is not None else FOLDERS, []
    with tempfile.TemporaryDirectory() as scratch:
        try:
            targets = files_of_types(pair.target.model, ["f16"], Path(scratch), "target", pair.written)
            room = max(len(text.ids) for text in texts) + 1
            ways += file_ways([*targets.values()], _draft_files(pair, Path(scratch)), room, pair.threads, whole)
        except DistillError as error:
            missing.append(f"llama.cpp: {error.what}")
        if url is None:
            missing.append("a server: name a llama-server of the target with --url")
        else:
            ways.append(Way("llama-server", f"its file, {types}", lambda: _served(pair, url, vocabulary), whole))
        return compare_ways(ways, texts, missing, "distill " + " ".join(sys.argv[1:]))


def _draft_files(pair: Scored, scratch: Path) -> dict[str, Path]:
    """The draft's files by type: what a run has exported, else one in f16."""
    found = sorted(pair.written.glob("draft-*.gguf")) if pair.written is not None else []
    if found:
        return {file_type(path): path for path in found}
    return files_of_types(pair.draft, ["f16"], scratch, "draft", None)


@contextmanager
def losses_of(pair: Scored, vocabulary: int, kept: list[int] | None) -> Iterator[Reader]:
    """The training's forward pass and loss: each text stands behind a copy of itself in one block."""
    big, small = pair.load(trimmed=False)

    def read(text: Text) -> Sums:
        blocks = pack([(text.ids, text.first)] * 2, 2 * len(text.ids), False)
        half, blocks = pair.training_type == "bfloat16", on_device(blocks, pair.device)
        with torch.autocast(pair.device.type, torch.bfloat16, enabled=half):
            sums = scored_by_loss(big, small, blocks, vocabulary, kept)
        accepted = float(sums["acceptance"]) / 2
        # With a trimmed head these two are among its tokens, so they are other figures than those of the other ways.
        agreement, kl = (float(sums[of]) / 2 if kept is None else math.nan for of in ("agreement", "forward_kl"))
        return Sums(accepted, accepted, agreement, kl)

    yield read


@contextmanager
def _served(pair: Scored, url: str, vocabulary: int) -> Iterator[Reader]:
    """A llama-server's distributions, a token at a time, with the folder's draft."""
    client = LlamaClient(Http(url, SECONDS))
    draft = pair.load(trimmed=False)[1]
    with whole_texts(lambda: (draft, draft), vocabulary) as own:

        def read(text: Text) -> Sums:
            found = [
                client.likeliest(text.ids[:place], min(LISTED, vocabulary - 1))
                for place in range(text.first, len(text.ids))
            ]
            logits = own(text)
            assert isinstance(logits, Read)
            return bounds_of(found, logits.draft)

        yield read


def bounds_of(listed: Sequence[dict[int, float]], draft: torch.Tensor) -> Sums:
    """The sums over positions whose target is known by its likeliest tokens, with draft logits [N, V]."""
    low = most = agreement = 0.0
    for own, logits in zip(listed, draft, strict=True):
        ids = torch.tensor([[*own]])
        logs = torch.tensor([[*own.values()]])
        tail = torch.log1p(-logs.double().exp().sum(-1).clamp(max=1 - 1e-12)).float()
        bounds = divergences.acceptance_bounds(ids, logs, tail, logits[None])
        low, most = low + float(bounds[0]), most + float(bounds[1])
        agreement += float(max(own, key=own.__getitem__) == int(logits.argmax()))
    return Sums(low, most, agreement, math.nan)
