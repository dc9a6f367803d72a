"""`distill eval --parity`: the ways in which a pair can be scored, put together from the rooms that they belong to."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from distill import divergences
from distill.errors import DistillError
from distill.evaluation.parity import (
    ParityTable,
    Sums,
    Text,
    Way,
    compare_ways,
    file_ways,
    steps_of_decoders,
    whole_texts,
)
from distill.evaluation.stage import continue_all
from distill.evaluation.standalone import PromptedPair
from distill.evaluation.types import files_of_types
from distill.models.conversion.importing import file_type, is_gguf
from distill.models.hugging_face import (
    end_ids,
    load_model,
    load_target,
    load_tokenizer,
    pick_device,
    real_tokens,
    text_folder,
)
from distill.models.trimmed_head import read_kept
from distill.packing import pack
from distill.serving.clients import LlamaClient
from distill.serving.http import Http
from distill.texts import prompt_seed
from distill.training.step import on_device, scored_by_loss

TEXTS, TOKENS = 8, 32  # texts, and tokens of each that are scored: the logits of all of them are held
LISTED = 500  # likeliest tokens that a server is asked for
SECONDS = 120  # that a server's reply may take

FOLDERS, TRAINING, DECODER, WHOLE = "transformers", "training's loss", "our decoder", "transformers, whole head"


def load(pair: PromptedPair, trimmed: bool = True) -> tuple[Any, Any]:
    """Both models of transformers; the target serves as its own draft."""
    device = pick_device(pair.device)
    big = load_target(pair.target, device)
    if pair.draft == pair.target.model:
        return big, big
    return big, load_model(pair.draft, pair.target.dtype, device, trimmed=trimmed)


def measure_parity(pair: PromptedPair, url: str | None, threads: int | None, command: str) -> ParityTable:
    """The same tokens in every way that is possible here; what is not is said."""
    if url is not None:
        LlamaClient(Http(url, SECONDS)).build()  # before minutes of work
    tokenizer = load_tokenizer(pair.target.model)
    big = load_target(pair.target, pick_device(pair.device))
    vocabulary = real_tokens(big.config, tokenizer)
    ids = [prompt.ids for prompt in pair.prompts]
    seeds = [prompt_seed(pair.seed, prompt.id) for prompt in pair.prompts]
    ends = end_ids(pair.target.model, tokenizer)
    written = continue_all(big, ids, pair.sampler, TOKENS, seeds, ends, TEXTS, vocabulary)
    del big
    texts = [Text(prompt + text, len(prompt)) for prompt, text in zip(ids, written, strict=True) if text]
    trim = None if is_gguf(pair.draft) else read_kept(text_folder(pair.draft))
    kept = None if trim is None else trim["kept"]
    types = pair.target.dtype
    ways = [
        Way(FOLDERS, types, lambda texts: whole_texts(load(pair), vocabulary, texts)),
        Way(TRAINING, pair.training_type, partial(losses_of, pair, vocabulary, kept), FOLDERS),
        Way(DECODER, types, lambda texts: steps_of_decoders(load(pair), vocabulary, texts), FOLDERS),
    ]
    if kept is not None:  # which llama.cpp and servers do not know
        ways.append(Way(WHOLE, types, lambda texts: whole_texts(load(pair, trimmed=False), vocabulary, texts), FOLDERS))
    whole, missing = ways[-1].name if kept is not None else FOLDERS, []
    with tempfile.TemporaryDirectory() as scratch:
        try:
            targets = files_of_types(pair.target.model, ["f16"], Path(scratch), "target", pair.written)
            room = max(len(text.ids) for text in texts) + 1
            ways += file_ways([*targets.values()], _draft_files(pair, Path(scratch)), room, threads, whole)
        except DistillError as error:
            missing.append(f"llama.cpp: {error.what}")
        if url is None:
            missing.append("a server: name a llama-server of the target with --url")
        else:
            ways.append(Way("llama-server", f"its file, {types}", partial(_served, pair, url, vocabulary), whole))
        return compare_ways(ways, texts, missing, command)


def _draft_files(pair: PromptedPair, scratch: Path) -> dict[str, Path]:
    """The draft's files by type: what a run has exported, else one in f16."""
    found = sorted(pair.written.glob("draft-*.gguf")) if pair.written is not None else []
    if found:
        return {file_type(path): path for path in found}
    return files_of_types(pair.draft, ["f16"], scratch, "draft", None)


def losses_of(pair: PromptedPair, vocabulary: int, kept: list[int] | None, texts: Sequence[Text]) -> list[Sums]:
    """The training's forward pass and loss: each text stands behind a copy of itself in one block."""
    big, small = load(pair, trimmed=False)
    device, found = pick_device(pair.device), []
    for text in texts:
        blocks = on_device(pack([(text.ids, text.first)] * 2, 2 * len(text.ids), False), device)
        with torch.autocast(device.type, torch.bfloat16, enabled=pair.training_type == "bfloat16"):
            sums = scored_by_loss(big, small, blocks, vocabulary, kept)
        accepted = float(sums["acceptance"]) / 2
        # With a trimmed head these two are among its tokens, so they are other figures than those of the other ways.
        agreement, kl = (float(sums[of]) / 2 if kept is None else math.nan for of in ("agreement", "forward_kl"))
        found.append(Sums(accepted, accepted, agreement, kl))
    return found


def _served(pair: PromptedPair, url: str, vocabulary: int, texts: Sequence[Text]) -> list[Sums]:
    """A llama-server's distributions, a token at a time, with the folder's draft."""
    client, count = LlamaClient(Http(url, SECONDS)), min(LISTED, vocabulary - 1)
    draft = load(pair, trimmed=False)[1]
    found = []
    for text, logits in zip(texts, whole_texts([draft, draft], vocabulary, texts), strict=True):
        listed = [client.likeliest(text.ids[:place], count) for place in range(text.first, len(text.ids))]
        found.append(bounds_of(listed, logits.draft))
    return found


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
