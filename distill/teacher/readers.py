"""Readers of the target's likeliest tokens at scored positions: a model in transformers, quantised weights in
llama.cpp, or servers.

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
from distill.teacher.scores import ScoreFiles, Scores, joined_scores
from distill.teacher.texts import SplitBlocks
from distill.teacher.writers import require_gguf

ROWS = 512  # positions whose logits are read at once
CACHED = 2**20  # cells of logits, 4 MB


# ids int32 [N, K], log-probabilities [N, K] and the log of the others' mass [N], at temperature 1, on the CPU.
Entries = tuple[Tensor, ...]


def joined(parts: Sequence[Entries], k: int) -> Entries:
    """The parts one after the other; without any, entries of no position."""
    none = (torch.empty(0, k, dtype=torch.int32), torch.empty(0, k), torch.empty(0))
    return tuple(map(torch.cat, zip(*(parts or [none]), strict=True)))


def entries_of(rows: Iterable[Tensor], k: int, vocabulary: int) -> Entries:
    """The entries of distributions given as logits [c, V], part by part."""
    parts = []
    for part in rows:
        # A processor takes pieces that its cache holds, several times quicker.
        size = CACHED // part.shape[-1] if part.device.type == "cpu" else len(part)
        for logits in part.split(max(1, size)):
            chunk = compress(logits, k, vocabulary)
            assert chunk.ids is not None
            parts.append((chunk.ids.cpu(), chunk.log_probabilities.cpu(), chunk.log_tail.cpu()))
    return joined(parts, k)


# ── Readers: a target that gives its distributions on packed blocks; `origin` goes into the store's manifest ──


class ModelReader:
    """A loaded model of transformers; the first `vocabulary` rows of its head are tokens."""

    def __init__(self, model: Any, vocabulary: int) -> None:
        self.model, self.vocabulary = model, vocabulary
        self.origin: dict[str, Any] = {"kind": "model"}

    @torch.inference_mode()
    def __call__(self, blocks: Packed, k: int) -> Entries:
        """The k likeliest tokens at the scored positions of some blocks, block by block."""
        logits = packed_logits(self.model, blocks).flatten(0, 1)  # [n·S, V]
        scored = blocks.mask.flatten().nonzero().squeeze(-1).to(logits.device)
        return entries_of((logits[rows] for rows in scored.split(ROWS)), k, self.vocabulary)

    def close(self) -> None:
        """Nothing to free: the model goes with its last reference."""


@dataclass(frozen=True)
class ScoredDocument:
    """One packed document with scored positions: its ids up to the last of them and the token after that, and which
    positions are scored."""

    ids: list[int]
    scored: list[int]


def listed_documents(blocks: Packed) -> list[ScoredDocument]:
    """The documents of some blocks that have scored positions, in the order in which a mask lists those."""
    listed = []
    for block, number, here in scored_documents(blocks):
        own = blocks.documents[block] == number
        scored = here[own].nonzero().squeeze(-1).tolist()
        listed.append(ScoredDocument(blocks.ids[block][own][: scored[-1] + 2].tolist(), scored))
    return listed


def require_teacher_file(path: str, target: str, block: int) -> str:
    """A line about the teacher's GGUF file; raises as `require_gguf`, and DataError for a context shorter than a
    block."""
    found = require_gguf(target, path, "teacher.gguf")
    if found.context is not None and found.context < block:
        raise DataError(f"corpus.block is {block}, the context of {path} {found.context}", "lower corpus.block")
    return f"teacher: {path}, {found.architecture}, has the target's {found.real_tokens} tokens"


class GgufReader:
    """A GGUF file that reads each document on its own, in pieces, with the logits of one piece in memory at a time.

    llama.cpp computes a lone token, and a lone output, with other kernels than several. Both are avoided, so that the
    stored numbers do not depend on how a document falls into pieces. Loads the weights.
    """

    def __init__(self, path: str, target: str, block: int, vocabulary: int, options: GgufOptions) -> None:
        require_teacher_file(path, target, block)
        self.vocabulary = vocabulary
        capacity = max(block, 2)
        # One token more than a document has: the one beside a lone last token.
        self.model = GgufModel(path, context=capacity + 1, batch=min(ROWS, capacity), options=options)
        self.origin: dict[str, Any] = {"kind": "gguf", "path": str(Path(path)), "digest": reference_digest(path)}
        changing = {name: value for name, value in options.given().items() if name in CHANGES_LOGITS}
        if changing:
            self.origin["options"] = changing

    def __call__(self, blocks: Packed, k: int) -> Entries:
        """As of ModelReader."""
        return entries_of(self._rows(blocks), k, self.vocabulary)

    def _rows(self, blocks: Packed) -> Iterator[Tensor]:
        """Logits [c, V] of the scored positions; valid until the next are asked for."""
        for document in listed_documents(blocks):
            self.model.rollback([0])
            ids = document.ids[: document.scored[-1] + 1]  # the token after the last scored position is not read
            for start in range(0, len(ids), ROWS):
                piece = ids[start : start + ROWS]
                want = [position - start for position in document.scored if start <= position < start + len(piece)]
                beside = [want[0] - 1 if want[0] else 1] if len(want) == 1 else []
                logits = self.model.extend(piece * 2 if len(piece) == 1 else piece, want=[*want, *beside])
                if want:
                    yield logits.full()[: len(want)]

    def close(self) -> None:
        """Free the weights."""
        self.model.close()


# ── A served target: the log-probabilities of prompts that vLLM's /v1/completions returns ──
# A request sends a document as the prompt and asks for `prompt_logprobs`. The reply lists for each prompt token the
# K likeliest tokens at its place, given the tokens before, and the token itself: {"ID": {"logprob": …, "rank": …}};
# the first token has none. vLLM applies no temperature to them.
# Legend: N scored positions, K entries, V tokens.

MAX_PADDING = 32  # entries asked for beyond K, for padding rows that may be among the likeliest
EXCESS = 1e-3  # by which rounding may lift a sum of probabilities above 1
NO_LOGPROBS = (
    "vLLM returns them; llama-server, SGLang's OpenAI API and most gateways do not. From those take the answers alone, "
    "and make the distributions from the weights (target.model) or a GGUF file (teacher.gguf)"
)


class TokenScore(TypedDict):
    """One of the likeliest tokens at a place of a prompt."""

    logprob: float


class ScoredPrompt(BaseModel):
    """The choice of a reply; log-probabilities by id at each token of the prompt, none at the first."""

    prompt_logprobs: list[dict[int, TokenScore] | None] | None = None
    prompt_token_ids: list[int] | None = None


class ScoredPrompts(FromModel):
    """The reply of /v1/completions: one choice, as was asked."""

    choices: list[ScoredPrompt] = Field(min_length=1, max_length=1)


class ServerReader:
    """The servers of a recipe's teacher, checked when opened with one short request each: each has the model, and gives
    log-probabilities of these very ids.

    A request asks for the entries of the store and `padding` more; vLLM's --max-logprobs must allow it.
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
            needed = recipe.corpus.block + 1  # one token is generated
            for url, _, context in self.endpoint.served():
                if context is not None and context < needed:
                    what = f"{url} serves a context of {context} tokens, and corpus.block + 1 = {needed} are needed"
                    raise EndpointError(what, f"start vLLM with --max-model-len {needed}, or lower corpus.block")
            for _ in self.settings.urls:  # requests take turns: each server gets one
                self._read(ScoredDocument([0, 1 % self.vocabulary], [0]), k)
        except BaseException:
            self.close()
            raise

    def __call__(self, blocks: Packed, k: int) -> Entries:
        """As of ModelReader."""
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
            "max_tokens": 1,  # 0 is refused by some versions
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
        by_place, own = choice.prompt_logprobs, choice.prompt_token_ids
        if by_place is None:
            what = "log-probabilities of prompts (choices[0].prompt_logprobs)"
            raise EndpointError(f"the server of {self.settings.model} returns no {what}", NO_LOGPROBS)
        if len(by_place) != len(ids) or own not in (None, ids):
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
        """Ids int32 and log-probabilities [N, k] of the k likeliest real tokens at the places `scored` [N]."""
        found = [places[place] for place in scored]
        counts = numpy.array([len(one) for one in found])
        tokens = numpy.fromiter(chain.from_iterable(found), numpy.int64, counts.sum())
        logs = numpy.fromiter((one["logprob"] for own in found for one in own.values()), float, counts.sum())
        rows = numpy.arange(len(found)).repeat(counts)
        real = (tokens >= 0) & (tokens < self.vocabulary)
        enough = numpy.bincount(rows[real], minlength=len(found))
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
    """The distributions beside the files of answers, for the blocks that the answers are packed into."""

    def __init__(self, run: Run, texts: Mapping[Split, SplitBlocks]) -> None:
        self.texts = texts
        self.files = {split: ScoreFiles(run, split) for split in texts}
        self.origin: dict[str, Any] = {"kind": "answers"}

    def scored(
        self, split: Split, first: int, blocks: Packed, mass: float | None, most: int
    ) -> tuple[Packed, dict[str, Tensor]]:
        """Blocks from number `first` on, and the tensors of their scored positions: of each position the fewest entries
        that hold `mass`, at most `most`.

        A server may give a token no distribution. Of train answers such a token is learnt from as it was drawn. A
        position of a held-out answer is not scored then, unless its document had no other.
        """
        texts = self.texts[split]
        rows = [own for block in texts.documents[first : first + len(blocks)] for own in block]
        parts, known = list[Scores](), list[Any]()
        for own in rows:
            turns = [self._answer(split, number) for number in own]
            unknown = split == "train" or not any(scores.counts.any() for scores, _ in turns)
            for scores, ids in turns:
                known.append((scores.counts > 0) | unknown)
                parts.append(scores.filled(ids) if unknown else scores)
        every = joined_scores(parts)
        kept = torch.from_numpy(numpy.concatenate(known or [numpy.empty(0, bool)]))
        if len(kept) != int(blocks.mask.sum()):
            raise DataError("the distributions beside the answers are of other answers", how_to_redo("answers"))
        mask = blocks.mask.clone()
        mask[blocks.mask] = kept
        found = every.trimmed(mass, most)
        tensors = {
            "entries": torch.from_numpy(found.counts[kept.numpy()]),
            "top_ids": torch.from_numpy(found.ids),
            "top_log_probabilities": torch.from_numpy(found.logs.astype(numpy.float16)),
            "log_tails": torch.from_numpy(found.tails[kept.numpy()]),
        }
        return replace(blocks, mask=mask), tensors

    def _answer(self, split: Split, number: int) -> tuple[Scores, Any]:
        """The scores of an answer's scored tokens, and their ids: without a prompt, nothing predicts the first."""
        answers = self.texts[split].answers
        prompt, ids = answers.ids(number)
        found = self.files[split].of(answers.row(number))
        if len(found.counts) != len(ids):
            raise DataError("the distributions beside the answers are of other answers", how_to_redo("answers"))
        return (found, ids) if len(prompt) else (found.without_first(), ids[1:])

    def close(self) -> None:
        """Nothing to free."""


Reader = ModelReader | GgufReader | ServerReader | AnswerReader


def open_reader(recipe: Recipe, run: Run, vocabulary: int) -> GgufReader | ServerReader:
    """The GGUF file or the servers that a recipe's teacher names."""
    settings = recipe.teacher
    if settings.gguf is not None:
        run.say(f"  distributions from {settings.gguf}")
        options = recipe.gguf_options("target")
        return GgufReader(settings.gguf, recipe.target.model, recipe.corpus.block, vocabulary, options)
    assert settings.server is not None, "the target in PyTorch needs no reader of its own"
    run.say(f"  distributions from {len(settings.server.urls)} server(s) of {settings.server.model}, at temperature 1")
    return ServerReader(recipe)


def check_teacher(recipe: Recipe, offline: bool) -> list[str]:
    """The teacher's GGUF file has the target's tokens, or its servers answer with log-probabilities of prompts."""
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
    """The log of 1 − Σ p [N] from log p [N, K] of the likeliest tokens, in fp64.

    The server rounds log p to fp32, so that 1 − Σ p is known up to the rounding of the sum: a smaller tail counts as
    that rounding, about 1e-7.
    """
    logs = logs.double()
    rounding = (logs.exp() * (1 + logs.abs())).sum(-1) * torch.finfo(torch.float32).eps
    return torch.maximum(-torch.expm1(logs.logsumexp(-1)), rounding).log()
