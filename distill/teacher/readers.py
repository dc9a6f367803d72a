"""Readers of the target's likeliest tokens at scored positions, from a model, a GGUF file or servers.

Legend: n blocks, S positions, N of them scored, c at once, K entries, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy
import torch
from pydantic import BaseModel, Field
from torch import Tensor
from typing_extensions import TypedDict

from distill.data.packing import scored_documents
from distill.data.samples import Split, how_to_redo
from distill.engines.llama_cpp.model import GgufModel
from distill.engines.torch.blocks import Packed, packed_logits
from distill.engines.torch.hugging_face import load_config, load_tokenizer, real_tokens
from distill.errors import DataError, EndpointError
from distill.files import reference_digest
from distill.http import Refused, Unanswered
from distill.recipe import GgufOptions, Recipe
from distill.recipe.measuring import CHANGES_LOGITS
from distill.run import Run
from distill.teacher.distributions import compress
from distill.teacher.endpoint import Endpoint, FromModel, reply_bytes
from distill.teacher.scores import EXCESS, ScoreFiles, Scores, joined_scores
from distill.teacher.texts import SplitBlocks
from distill.teacher.writers import require_gguf

ROWS = 512  # positions whose logits are read at once
CACHED = 2**20  # Logits of 4 MB fit a CPU's cache.


# ids int32 [N, K], log-probabilities [N, K] and the log of the mass of all other tokens [N]; temperature 1, on the CPU
Entries = tuple[Tensor, ...]


def joined(parts: Sequence[Entries], k: int) -> Entries:
    """The entries of several parts in one. No part gives entries of no position."""
    none = (torch.empty(0, k, dtype=torch.int32), torch.empty(0, k), torch.empty(0))
    return tuple(map(torch.cat, zip(*(parts or [none]), strict=True)))


def entries_of(rows: Iterable[Tensor], k: int, vocabulary: int) -> Entries:
    """The entries of distributions given as parts of logits [c, V]."""
    parts = []
    for part in rows:
        # A CPU is several times faster on pieces that fit its cache.
        size = CACHED // part.shape[-1] if part.device.type == "cpu" else len(part)
        for logits in part.split(max(1, size)):
            chunk = compress(logits, k, vocabulary)
            assert chunk.ids is not None
            parts.append((chunk.ids.cpu(), chunk.log_probabilities.cpu(), chunk.log_tail.cpu()))
    return joined(parts, k)


# ── Readers return the target's distributions on packed blocks; a store's manifest records their `origin` ──


class ModelReader:
    """A loaded model of transformers. The first `vocabulary` rows of its head are tokens."""

    def __init__(self, model: Any, vocabulary: int) -> None:
        self.model, self.vocabulary = model, vocabulary
        self.origin: dict[str, Any] = {"kind": "model"}

    @torch.inference_mode()
    def __call__(self, blocks: Packed, k: int) -> Entries:
        """The k likeliest tokens at the scored positions of some blocks."""
        logits = packed_logits(self.model, blocks).flatten(0, 1)  # [n·S, V]
        scored = blocks.mask.flatten().nonzero().squeeze(-1).to(logits.device)
        return entries_of((logits[rows] for rows in scored.split(ROWS)), k, self.vocabulary)

    def close(self) -> None:
        """Do nothing: the model is freed with its last reference."""


@dataclass(frozen=True)
class ScoredDocument:
    """A packed document with scored positions: its ids up to the token after the last of them, and the positions."""

    ids: list[int]
    scored: list[int]


def listed_documents(blocks: Packed) -> list[ScoredDocument]:
    """The documents with scored positions of some blocks, in the order of the positions."""
    listed = []
    for block, number, here in scored_documents(blocks):
        inside = blocks.documents[block] == number
        scored = here[inside].nonzero().squeeze(-1).tolist()
        listed.append(ScoredDocument(blocks.ids[block][inside][: scored[-1] + 2].tolist(), scored))
    return listed


def require_teacher_file(path: str, target: str, block: int) -> str:
    """Describe the teacher's GGUF file. Raises as `require_gguf`, and DataError for a context shorter than a block."""
    file = require_gguf(target, path, "teacher.gguf")
    if file.context is not None and file.context < block:
        raise DataError(f"corpus.block is {block}, the context of {path} {file.context}", "lower corpus.block")
    return f"teacher: {path}, {file.architecture}, has the target's {file.real_tokens} tokens"


class GgufReader:
    """A loaded GGUF file that reads each document in pieces, with the logits of one piece in memory.

    llama.cpp uses other kernels for a single token or a single output. Both are avoided, so that the stored numbers do
    not depend on the pieces of a document.
    """

    def __init__(self, path: str, target: str, block: int, vocabulary: int, options: GgufOptions) -> None:
        require_teacher_file(path, target, block)
        self.vocabulary = vocabulary
        capacity = max(block, 2)
        # A single last token is read with one more token.
        self.model = GgufModel(path, context=capacity + 1, batch=min(ROWS, capacity), options=options)
        self.origin: dict[str, Any] = {"kind": "gguf", "path": str(Path(path)), "digest": reference_digest(path)}
        changing = {name: value for name, value in options.given().items() if name in CHANGES_LOGITS}
        if changing:
            self.origin["options"] = changing

    def __call__(self, blocks: Packed, k: int) -> Entries:
        """See ModelReader."""
        return entries_of(self._rows(blocks), k, self.vocabulary)

    def _rows(self, blocks: Packed) -> Iterator[Tensor]:
        """Yield logits [c, V] of the scored positions. They are valid until the next ones are requested."""
        for document in listed_documents(blocks):
            self.model.rollback([0])
            ids = document.ids[: document.scored[-1] + 1]  # The token after the last scored position is not read.
            for start in range(0, len(ids), ROWS):
                piece = ids[start : start + ROWS]
                want = [position - start for position in document.scored if start <= position < start + len(piece)]
                extra = [want[0] - 1 if want[0] else 1] if len(want) == 1 else []
                logits = self.model.extend(piece * 2 if len(piece) == 1 else piece, want=[*want, *extra])
                if want:
                    yield logits.full()[: len(want)]

    def close(self) -> None:
        """Free the weights."""
        self.model.close()


# ── A served target: the log-probabilities of prompts from vLLM's /v1/completions ──
# A request sends a document as the prompt, with `prompt_logprobs`. For each prompt token, the reply lists the token and
# the K likeliest tokens after the tokens before it: {"ID": {"logprob": …, "rank": …}}. The first token has none. vLLM
# applies no temperature to these numbers.

MAX_PADDING = 32  # Padding rows may be among the likeliest, so that a request asks for up to this many more entries.
NO_LOGPROBS = (
    "vLLM returns them; llama-server, SGLang's OpenAI API and most gateways do not. From those take the answers alone, "
    "and make the distributions from the weights (target.model) or a GGUF file (teacher.gguf)"
)


class TokenScore(TypedDict):
    """A likely token at a place of a prompt."""

    logprob: float


class ScoredPrompt(BaseModel):
    """The choice of a reply, with log-probabilities by id at each token of the prompt but the first."""

    prompt_logprobs: list[dict[int, TokenScore] | None] | None = None
    prompt_token_ids: list[int] | None = None


class ScoredPrompts(FromModel):
    """The reply of /v1/completions with one choice."""

    choices: list[ScoredPrompt] = Field(min_length=1, max_length=1)


class ServerReader:
    """The servers of a recipe's teacher.

    Each server is checked with a short request: it must have the model, and return log-probabilities of the same ids.
    A request asks for the entries of the store and `padding` more, which vLLM's --max-logprobs must allow.
    """

    def __init__(self, recipe: Recipe) -> None:
        assert recipe.teacher.server is not None
        self.settings = recipe.teacher.server
        config = load_config(recipe.target.model).get_text_config()
        self.vocabulary = real_tokens(config, load_tokenizer(recipe.target.model))
        self.padding = min(config.vocab_size - self.vocabulary, MAX_PADDING)
        k = min(recipe.teacher.top_k, self.vocabulary - 1)
        self.largest_request = k + self.padding
        self.endpoint = Endpoint(self.settings, "teacher.server")
        self.origin: dict[str, Any] = {"kind": "server", "model": self.settings.model}
        try:
            needed = recipe.corpus.block + 1  # A request generates one token.
            for url, _, context in self.endpoint.served():
                if context is not None and context < needed:
                    what = f"{url} serves a context of {context} tokens, and corpus.block + 1 = {needed} are needed"
                    raise EndpointError(what, f"start vLLM with --max-model-len {needed}, or lower corpus.block")
            for _ in self.settings.urls:  # Requests go to the servers in turn, so that each server gets one.
                self._read(ScoredDocument([0, 1 % self.vocabulary], [0]), k)
        except BaseException:
            self.close()
            raise

    def __call__(self, blocks: Packed, k: int) -> Entries:
        """See ModelReader."""
        return joined(self.endpoint.each(lambda document: self._read(document, k), listed_documents(blocks)), k)

    def close(self) -> None:
        """End the connections."""
        self.endpoint.close()

    def _read(self, document: ScoredDocument, k: int) -> Entries:
        """The entries of one document's scored positions."""
        body = {
            "model": self.settings.model,
            "prompt": document.ids,
            "prompt_logprobs": k + self.padding,
            "max_tokens": 1,  # Some versions refuse 0.
            "temperature": 0,
            "add_special_tokens": False,
            "return_token_ids": True,
        }
        size = reply_bytes(len(document.ids), k + self.padding + 1)
        places = self._places(self._choice(body, size), document.ids)
        tokens, logs = map(torch.from_numpy, self._entries(places, numpy.array(document.scored) + 1, k))
        return tokens, logs.float(), log_tails(logs).float()

    def _choice(self, body: dict[str, Any], most_bytes: int) -> ScoredPrompt:
        """A server's reply; EndpointError, with what to do, where none comes."""
        try:
            return self.endpoint.post("completions", body, ScoredPrompts, most_bytes).choices[0]
        except Refused as refusal:
            hint = "see the server's log"
            if "greater than max allowed" in refusal.detail:
                hint = "start vLLM with a larger --max-logprobs, or lower teacher.top_k"
            elif refusal.reason == "status 422":
                hint = "the server may take no token ids as a prompt: use vLLM, which does"
            raise EndpointError(
                f"a server of {self.settings.model} refused a request ({refusal.reason}): {refusal.detail}", hint
            ) from None
        except Unanswered as fault:
            raise EndpointError(
                f"the servers of {self.settings.model} gave no usable reply, {self.settings.retries + 1} times in a "
                f"row, the last time: {fault.reason} {fault.detail}".rstrip(),
                "see the server's log; the same command goes on with what is missing. teacher.server.connections, "
                "retries and timeout can be changed without losing anything",
            ) from None

    def _places(self, choice: ScoredPrompt, ids: list[int]) -> list[dict[int, TokenScore]]:
        """The log-probabilities by id at each prompt token [S]; EndpointError unless they are those of these ids."""
        by_place, read = choice.prompt_logprobs, choice.prompt_token_ids
        if by_place is None:
            what = "log-probabilities of prompts (choices[0].prompt_logprobs)"
            raise EndpointError(f"the server of {self.settings.model} returns no {what}", NO_LOGPROBS)
        if len(by_place) != len(ids) or read not in (None, ids):
            raise self._other_ids(f"{len(by_place)} tokens" if len(by_place) != len(ids) else "other tokens", len(ids))
        places: list[dict[int, TokenScore]] = [{}]
        for place, (entries, token) in enumerate(zip(by_place[1:], ids[1:], strict=True), 1):
            if entries is None:
                raise EndpointError(
                    f"the server of {self.settings.model} returns no log-probabilities at prompt token {place}",
                    "start vLLM with --no-enable-prefix-caching",
                )
            if token not in entries:
                raise self._other_ids(f"no token {token} at place {place}", len(ids))
            places.append(entries)
        return places

    def _other_ids(self, what: str, count: int) -> EndpointError:
        return EndpointError(
            f"the server read {what} from a prompt of {count} tokens: its ids are not those of the target's tokenizer",
            "serve the target with the tokenizer of target.model, without added tokens (add_special_tokens)",
        )

    def _entries(self, places: list[dict[int, TokenScore]], scored: Any, k: int) -> tuple[Any, Any]:
        """The ids int32 and log-probabilities [N, k] of the k likeliest real tokens at the places `scored` [N]."""
        lists = [places[place] for place in scored]
        counts = numpy.array([len(scores) for scores in lists])
        tokens = numpy.fromiter(chain.from_iterable(lists), numpy.int64, counts.sum())
        logs = numpy.fromiter((score["logprob"] for scores in lists for score in scores.values()), float, counts.sum())
        rows = numpy.arange(len(lists)).repeat(counts)
        real = (tokens >= 0) & (tokens < self.vocabulary)
        enough = numpy.bincount(rows[real], minlength=len(lists))
        if (enough < k).any():
            few = int((enough < k).argmax())
            raise EndpointError(
                f"the server returned {counts[few]} log-probabilities at prompt token {scored[few]}, of which "
                f"{enough[few]} are of tokens, and {k} are needed",
                f"start vLLM with --max-logprobs {k + self.padding}, or lower teacher.top_k",
            )
        order = real.nonzero()[0]
        order = order[numpy.lexsort((tokens[order], -logs[order], rows[order]))]
        chosen = order[(enough.cumsum() - enough)[:, None] + numpy.arange(k)]
        tokens, logs = tokens[chosen].astype(numpy.int32), logs[chosen]
        totals = numpy.exp(logs, where=logs < 1, out=numpy.zeros_like(logs)).sum(1)
        sound = (numpy.isfinite(logs) & (logs <= EXCESS)).all(1) & (totals <= 1 + EXCESS)
        if not sound.all():
            bad = int(sound.argmin())
            raise EndpointError(
                f"the numbers at prompt token {scored[bad]} are not log-probabilities: the largest is "
                f"{logs[bad, 0]:g}, their probabilities add up to {totals[bad]:g}",
                "start vLLM with --logprobs-mode raw_logprobs, its default",
            )
        return tokens, logs


# ── Distributions that servers gave with the answers ──


class AnswerReader:
    """The distributions that servers returned with the answers, for the blocks of these answers."""

    def __init__(self, run: Run, texts: Mapping[Split, SplitBlocks]) -> None:
        self.texts = texts
        self.files = {split: ScoreFiles(run, split) for split in texts}
        self.origin: dict[str, Any] = {"kind": "answers"}

    def scored(
        self, split: Split, first: int, blocks: Packed, mass: float | None, most: int
    ) -> tuple[Packed, dict[str, Tensor]]:
        """Blocks from number `first` on, and the tensors of their scored positions.

        Each position keeps the fewest entries with `mass`, at most `most`. A server may return no distribution at a
        token. In a train answer, such a token itself is learnt from. In a held-out answer, its position is not scored,
        unless the document has no other.
        """
        texts = self.texts[split]
        documents = [document for block in texts.documents[first : first + len(blocks)] for document in block]
        parts, known = list[Scores](), list[Any]()
        for document in documents:
            turns = [self._answer(split, number) for number in document]
            unknown = split == "train" or not any(scores.counts.any() for scores, _ in turns)
            for scores, ids in turns:
                known.append((scores.counts > 0) | unknown)
                parts.append(scores.filled(ids) if unknown else scores)
        every = joined_scores(parts)
        kept = torch.from_numpy(numpy.concatenate(known or [numpy.empty(0, bool)]))
        if len(kept) != int(blocks.mask.sum()):
            raise DataError("the distributions next to the answers belong to others", how_to_redo("answers"))
        mask = blocks.mask.clone()
        mask[blocks.mask] = kept
        trimmed = every.trimmed(mass, most)
        tensors = {
            "entries": torch.from_numpy(trimmed.counts[kept.numpy()]),
            "top_ids": torch.from_numpy(trimmed.ids),
            "top_log_probabilities": torch.from_numpy(trimmed.logs.astype(numpy.float16)),
            "log_tails": torch.from_numpy(trimmed.tails[kept.numpy()]),
        }
        return replace(blocks, mask=mask), tensors

    def _answer(self, split: Split, number: int) -> tuple[Scores, Any]:
        """The scores and the ids of an answer's scored tokens: all but the first of an answer without a prompt."""
        answers = self.texts[split].answers
        prompt, ids = answers.ids(number)
        scores = self.files[split].of(answers.row(number))
        if len(scores.counts) != len(ids):
            raise DataError("the distributions next to the answers belong to others", how_to_redo("answers"))
        return (scores, ids) if len(prompt) else (scores.without_first(), ids[1:])

    def close(self) -> None:
        """Do nothing."""


Reader = ModelReader | GgufReader | ServerReader | AnswerReader


def open_reader(recipe: Recipe, run: Run, vocabulary: int) -> GgufReader | ServerReader:
    """Open the GGUF file or the servers that a recipe's teacher names."""
    settings = recipe.teacher
    if settings.gguf is not None:
        run.say(f"  distributions from {settings.gguf}")
        options = recipe.gguf_options("target")
        return GgufReader(settings.gguf, recipe.target.model, recipe.corpus.block, vocabulary, options)
    assert settings.server is not None, "the target in PyTorch needs no reader of its own"
    run.say(f"  distributions from {len(settings.server.urls)} server(s) of {settings.server.model}, at temperature 1")
    return ServerReader(recipe)


def check_teacher(recipe: Recipe, offline: bool) -> list[str]:
    """Check the teacher's GGUF file, or that its servers score prompts. Returns lines to print."""
    settings = recipe.teacher
    if recipe.writer_teaches:
        return ["teacher: the distributions come with the answers, at temperature 1, whatever sampler writes"]
    if settings.gguf is not None:
        return [require_teacher_file(settings.gguf, recipe.target.model, recipe.corpus.block)]
    if settings.server is None:
        return []
    at_one = "its distributions hold at temperature 1, whatever sampler it serves with"
    if offline:
        return [f"teacher: {settings.server.model} on {len(settings.server.urls)} server(s), not asked; {at_one}"]
    with closing(ServerReader(recipe)) as reader:
        return [
            f"teacher: {settings.server.model} answers on {len(settings.server.urls)} server(s), with "
            f"{reader.largest_request} log-probabilities a token; {at_one}"
        ]


def log_tails(logs: Tensor) -> Tensor:
    """The log of 1 − Σ p [N] in fp64, from log p [N, K] of the likeliest tokens.

    The server rounds log p to fp32. A tail below the rounding of the sum, about 1e-7, counts as that rounding.
    """
    logs = logs.double()
    rounding = (logs.exp() * (1 + logs.abs())).sum(-1) * torch.finfo(torch.float32).eps
    return torch.maximum(-torch.expm1(logs.logsumexp(-1)), rounding).log()
