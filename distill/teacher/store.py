"""The target's likeliest tokens at scored positions: read from a model in transformers, from quantised weights in
llama.cpp, or from a server; and the teacher store: the packed blocks and the target's distributions on them, in
checksummed shards.

Legend: n blocks (of a shard), S positions, N of them scored, c at once, K entries, V vocabulary, H the target's hidden
size. A shard is a safetensors file with the packed blocks (ids int32, documents int16 where that holds their numbers,
mask), `rows` int64 [n + 1], the first of each block's scored positions among all of the shard, and of these alone,
where its kind is

- compact: top_ids int32 [N, K], top_log_probabilities fp16 [N, K], log_tails fp32 [N];
- exact: hidden [N, H], after the final norm; the head stands in head.safetensors, once;
- online: nothing else.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy
import torch
from pydantic import BaseModel, Field
from torch import Tensor
from typing_extensions import TypedDict

from distill.data.packing import (
    Blocks,
    Deferred,
    Packed,
    concatenate,
    pack,
    packed_logits,
    planned,
    scored_documents,
    scored_states,
)
from distill.data.samples import (
    TEXT_FAULTS,
    Sample,
    Samples,
    decoded,
    how_to_redo,
    joined_samples,
    listed,
    read_answers,
    read_prompts,
)
from distill.decoding.ngrams import ORDER, Expected, NGramTable, count_ngrams, write_table
from distill.devices import as_float64, barrier, part_of, pick_device, process_count, process_index
from distill.engines.llama_cpp.model import GgufModel
from distill.engines.server_commands import IK_INSERTED, suffix_depth
from distill.engines.torch.hugging_face import DTYPES, load_config, load_target, load_tokenizer, real_tokens
from distill.errors import DataError, EndpointError, RunError
from distill.files import digest, read_json, reference_digest, write_atomically, write_json
from distill.http import Refused, Unanswered
from distill.progress import Progress
from distill.recipe import GgufOptions, Recipe
from distill.recipe.measuring import CHANGES_LOGITS
from distill.recipe.target import TYPE_BYTES, TeacherSettings
from distill.run import Run
from distill.teacher.distributions import CompactTeacher, Head, LogitForm, Teacher, compress, require_head
from distill.teacher.endpoint import Endpoint, FromModel, reply_bytes
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
class Document:
    """One packed document with scored positions: its ids up to the last of them and the token after that, and which
    positions are scored."""

    ids: list[int]
    scored: list[int]


def listed_documents(blocks: Packed) -> list[Document]:
    """The documents of some blocks that have scored positions, in the order in which a mask lists those."""
    listed = []
    for block, number, here in scored_documents(blocks):
        own = blocks.documents[block] == number
        scored = here[own].nonzero().squeeze(-1).tolist()
        listed.append(Document(blocks.ids[block][own][: scored[-1] + 2].tolist(), scored))
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
                self._read(Document([0, 1 % self.vocabulary], [0]), k)
        except BaseException:
            self.close()
            raise

    def __call__(self, blocks: Packed, k: int) -> Entries:
        """As of ModelReader."""
        return joined(self.endpoint.each(lambda document: self._read(document, k), listed_documents(blocks)), k)

    def close(self) -> None:
        """End the connections."""
        self.endpoint.close()

    def _read(self, document: Document, k: int) -> Entries:
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


Reader = ModelReader | GgufReader | ServerReader


def open_reader(recipe: Recipe, run: Run, vocabulary: int) -> Reader:
    """The target as the recipe's teacher reads it."""
    settings = recipe.teacher
    if settings.gguf is not None:
        run.say(f"  distributions from {settings.gguf}")
        options = recipe.gguf_options("target")
        return GgufReader(settings.gguf, recipe.target.model, recipe.corpus.block, vocabulary, options)
    if settings.server is None:
        return ModelReader(load_target(recipe.target, pick_device(recipe.device)), vocabulary)
    run.say(f"  distributions from {len(settings.server.urls)} server(s) of {settings.server.model}, at temperature 1")
    return ServerReader(recipe)


def check_teacher(recipe: Recipe, offline: bool) -> list[str]:
    """The teacher's GGUF file has the target's tokens, or its servers answer with log-probabilities of prompts."""
    settings = recipe.teacher
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


def compact_distributions(reader: Reader, blocks: Packed, k: int) -> dict[str, Tensor]:
    """top_ids, top_log_probabilities [N, K] and log_tails [N] of the scored positions."""
    ids, probabilities, tail = reader(blocks, k)
    return {"top_ids": ids.to(torch.int32), "top_log_probabilities": probabilities.half(), "log_tails": tail.float()}


def mean_masses(reader: Reader, blocks: Packed, k: int) -> Tensor:
    """The mass [K] of the 1, 2, … likeliest tokens, the mean over the scored positions of some blocks, in fp64."""
    _, logs, _ = reader(blocks, k)
    return logs.double().exp().cumsum(-1).sum(0) / max(1, len(logs))


def log_tails(logs: Tensor) -> Tensor:
    """The log of 1 − Σ p [N] from log p [N, K] of the likeliest tokens, in fp64.

    The server rounds log p to fp32, so that 1 − Σ p is known up to the rounding of the sum: a smaller tail counts as
    that rounding, about 1e-7.
    """
    logs = logs.double()
    rounding = (logs.exp() * (1 + logs.abs())).sum(-1) * torch.finfo(torch.float32).eps
    return torch.maximum(-torch.expm1(logs.logsumexp(-1)), rounding).log()


# ── The teacher and its store ──


FORMAT = 3
PACKED_BYTES = 4 + 2 + 1  # a position's id, document and mask


def bytes_per_row(settings: TeacherSettings, hidden: int, dtype: str, k: int | None = None) -> int:
    """Bytes of a scored position's distribution in a store of these settings, with a target of that hidden size and
    type; PACKED_BYTES of each position come to them.

    `k` is the number of entries of a compact store, where it is known to be below `top_k`.
    """
    if settings.kind == "compact":
        return (k or settings.top_k) * (4 + 2) + 4
    return hidden * TYPE_BYTES[dtype] if settings.kind == "exact" else 0


def planned_bytes(recipe: Recipe, prompts: int) -> dict[str, int]:
    """What the stores that a run writes take on disk, by stage, each of the answers to `prompts` as long as it may get:
    for training, and held out where the target is not loaded."""
    answers, block = recipe.answers, recipe.corpus.block
    hidden = load_config(recipe.target.model).get_text_config().hidden_size
    each = bytes_per_row(recipe.teacher, hidden, recipe.target.dtype)
    asked = {"teacher": (prompts, answers.new_tokens, recipe.corpus.tokens)}
    splits: tuple[Split, ...] = () if recipe.target.load else ("validation", "test")
    for split in splits:
        count, tokens, blocks = sizes(recipe, split)
        asked[split] = (count, tokens, blocks * block)
    return {
        stage: (count * tokens + given) * (each + PACKED_BYTES) + count * answers.prompt_tokens * PACKED_BYTES
        for stage, (count, tokens, given) in asked.items()
    }


def read_manifest(run: Run, stage: str = "teacher") -> dict[str, Any]:
    """manifest.json of a teacher store; raises DataError when it is missing, or not as its stage wrote it."""
    path = run.path(stage, "manifest.json")
    if run.done(stage) is None:
        raise DataError(f"{path} was not written by a finished `{stage}` stage", "run `distill train` again")
    run.verify(stage, f"{stage}/manifest.json")
    return read_json(path)


class TeacherStore:
    """The finished shards of a run, mapped and read where they are asked for; each is the one that its stage recorded.

    `stage` wrote them: `teacher` those of the train blocks, others those of held-out ones.
    """

    def __init__(self, run: Run, stage: str = "teacher") -> None:
        self.folder = run.path(stage)
        self.manifest = read_manifest(run, stage)
        run.verify(stage, f"{stage}/*.safetensors")
        self.vocabulary: int = self.manifest["vocabulary"]
        self._shards = [
            _mapped(shard_path(self.folder, number)) for number in range(len(self.manifest["shard_blocks"]))
        ]
        self.blocks: int = sum(self.manifest["shard_blocks"])
        self.packed = Deferred(
            self.blocks, self._packed, lambda: torch.cat([one["rows"].diff() for one in self._shards])
        )
        self._head: Head | None = None
        self._sums: dict[int, Tensor] = {}  # by block
        if self.manifest["kind"] == "exact":
            found = _mapped(head_path(self.folder))
            self._head = Head(found["weight"], found.get("bias"), LogitForm(**self.manifest["logit_form"]))

    def _places(self, blocks: list[int]) -> list[tuple[dict[str, Tensor], int]]:
        """The shard of each block, and its number there; all shards but the last have the same number of blocks."""
        size = self.manifest["shard_blocks"][0]
        return [(self._shards[block // size], block % size) for block in blocks]

    def _packed(self, blocks: list[int]) -> Packed:
        """These blocks, read from the maps."""
        names = ("ids", "documents", "mask")
        ids, documents, mask = (torch.stack([shard[name][at] for shard, at in self._places(blocks)]) for name in names)
        return Packed(ids, documents.int(), mask)

    def _scored(self, names: tuple[str, ...], index: Tensor) -> list[Tensor]:
        """Tensors [N, …] of the scored positions of the blocks at `index` [b]."""
        places = self._places(index.tolist())
        rows = [(shard, slice(*shard["rows"][block : block + 2].tolist())) for shard, block in places]
        return [torch.cat([shard[name][own] for shard, own in rows]) for name in names]

    def teacher(self, index: Tensor, device: torch.device) -> Teacher:
        """The distributions of the N scored positions of the blocks at `index` [b], block by block, on a device."""
        if self.manifest["kind"] == "compact":
            names = ("top_ids", "top_log_probabilities", "log_tails")
            ids, logs, tails = (found.to(device) for found in self._scored(names, index))
            return CompactTeacher(ids, logs, tails, self.vocabulary)
        assert self._head is not None, "an online teacher has no distributions on disk"
        self._head = self._head.to(device)
        (hidden,) = self._scored(("hidden",), index)
        return replace(self._head.teacher(hidden.to(device)), log_sums=partial(self._sums_of, index, device))

    @torch.no_grad()
    def _sums_of(self, index: Tensor, device: torch.device) -> Tensor:
        """The log of Σ exp over the logits [N] at the scored positions of the blocks at `index`.

        Computed when a block is first asked for, and block by block: a resumed training finds the same numbers.
        """
        for block in {*index.tolist()} - self._sums.keys():
            (hidden,) = self._scored(("hidden",), torch.tensor([block]))
            assert self._head is not None
            self._sums[block] = self._head.log_sums(hidden.to(device)).cpu()
        return torch.cat([self._sums[block] for block in index.tolist()]).to(device)


def _mapped(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file as views of its mapped content."""
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - a handle, no mapping


def shard_path(folder: Path, number: int) -> Path:
    """The path of a shard."""
    return folder / f"shard-{number:05d}.safetensors"


def head_path(folder: Path) -> Path:
    """The path of the head of an exact store."""
    return folder / "head.safetensors"


# ── Held-out texts of a run that never loads the target ──

Split = Literal["validation", "test"]
ANSWERS = "answers"  # the name of the files of answers
# Reasons for which an answer is not learnt from, but says what the target wrote.
READABLE = ("", "truncated", *TEXT_FAULTS)


@dataclass(frozen=True)
class HeldOut:
    """Held-out texts: the answers, and their blocks, one document each; the given text's blocks; what was left out."""

    answers: Samples
    own: Packed
    given: Packed
    dropped: dict[str, int]

    @property
    def blocks(self) -> Packed:
        """All blocks, the answers' first; their documents are numbered where those of the given text are."""
        return concatenate([part for part in (self.own, self.given) if len(part)])


def held_out(recipe: Recipe, run: Run, split: Split) -> HeldOut:
    """The texts of a finished or begun held-out stage, a pure function of its files and those of stage `corpus`.

    An answer counts as the target wrote it, also where it ends in a loop or was cut short. Raises DataError where no
    answer is left.
    """
    count, _, blocks = sizes(recipe, split)
    found = joined_samples([served_answers(run, split)[:count], read_answers(run, ANSWERS, split)])
    reasons = found.column("dropped")
    readable = numpy.isin(reasons, READABLE) & (found.column("answer") > 0)
    answers, dropped = found.take(readable), Counter(reason or "empty" for reason in reasons[~readable])
    if not answers:
        hint = f"correct answers.writer and use --redo {split}, or give more served lines (answers.traffic)"
        raise DataError(f"no answer to a {split} prompt is left: {listed(dropped, ' × ') or 'there was none'}", hint)
    texts = [(numpy.concatenate(turn), len(turn[0])) for turn in map(answers.ids, range(len(answers)))]
    own = pack(texts, recipe.corpus.block, split_long=False)
    given = Packed.load(run.path("corpus", f"text-{split}.safetensors")).take(slice(0, blocks))
    return HeldOut(answers, own, given, dict(sorted(dropped.items())))


def sizes(recipe: Recipe, split: Split) -> tuple[int, int, int]:
    """How many prompts are answered, with at most how many tokens each, and how many blocks of given text there are."""
    if split == "test":
        return recipe.eval.prompts, recipe.eval.new_tokens, recipe.eval.file_blocks
    assert recipe.train.acceptance is not None, "recipes without it are refused"
    return recipe.train.acceptance.prompts, recipe.train.acceptance.new_tokens, recipe.cut.score_blocks


def served_answers(run: Run, split: Split) -> Samples:
    """Held-out answers of served traffic: the target has written them already."""
    prompts = read_prompts(run, split)
    return prompts.take(prompts.column("answer") > 0)


# ── The distributions that a draft learns ──


class OnlineTarget:
    """A loaded target on packed blocks; raises DataError where its head and hidden states do not give its logits."""

    def __init__(self, model: Any, packed: Blocks, manifest: dict[str, Any], batch: int) -> None:
        self.model, self.packed, self.manifest, self.batch = model, packed, manifest, batch
        self.blocks = len(packed)
        self.vocabulary: int = manifest["vocabulary"]
        self._head = Head.of(model, self.vocabulary)
        require_head(model, self._head, packed.take(slice(0, 1)))

    @torch.no_grad()
    def teacher(self, index: Tensor, device: torch.device) -> Teacher:
        """The distributions of the N scored positions of the blocks at `index` [b], block by block, on a device.

        The target takes `batch` blocks at once; its logits exist only chunk by chunk.
        """
        parts = self.packed.take(index).batches(self.batch)
        states = [scored_states(self.model, part).to(device) for part in parts]
        self._head = self._head.to(device)
        return self._head.teacher(torch.cat(states))


# Packed blocks, and the target's distributions on them.
TeacherSource = TeacherStore | OnlineTarget


def open_teacher(run: Run, recipe: Recipe, device: torch.device, model: Any = None) -> TeacherSource:
    """The teacher that stage `teacher` wrote into a run.

    An online one runs `model`, the target, which is loaded onto `device` when none is given. Raises DataError when a
    file is damaged.
    """
    store = TeacherStore(run)
    if store.manifest["kind"] != "online":
        return store
    target = load_target(recipe.target, device) if model is None else model
    return OnlineTarget(target, store.packed, store.manifest, recipe.teacher.batch)


def tokenizer_digest(target: str) -> str:
    """Of the vocabulary that a target's texts are written in."""
    return digest(load_tokenizer(target).get_vocab())


def target_metadata(recipe: Recipe) -> dict[str, Any]:
    """The identity of a target: its content, its tokenizer's vocabulary, and how it runs."""
    return {
        "target": recipe.target.model,
        "target_digest": reference_digest(recipe.target.model),
        "tokenizer_digest": tokenizer_digest(recipe.target.model),
        "dtype": recipe.target.dtype,
        "quantise": recipe.target.quantise,
    }


def require_fit(manifest: dict[str, Any], recipe: Recipe) -> None:
    """Raise DataError where a teacher's tokenizer is not the target's as it is now: of a hub name, another revision may
    have come since. All else that a teacher was made with is part of its stage's key."""
    if manifest["tokenizer_digest"] != tokenizer_digest(recipe.target.model):
        what = f"the teacher was made with another tokenizer of {manifest['target']} than the recipe has now"
        raise DataError(what, how_to_redo("teacher"))


# ── Stage `teacher` ──

Distributions = Callable[[Packed], dict[str, Tensor]]


def training_blocks(recipe: Recipe, run: Run) -> tuple[Blocks, int]:
    """The blocks that the draft learns from: the target's answers (prompts masked), then the corpus text; and the
    scored positions of the answers."""
    own = answer_blocks(learnt_answers(run), recipe)[0]
    text = Packed.load(run.path("corpus", "text-train.safetensors"))
    return own.before(text), int(own.scored.sum())


def learnt_answers(run: Run) -> Samples:
    """The answers that training learns from, never held-out ones; at least one."""
    answers = read_answers(run, "train")
    return answers.take(answers.column("dropped") == "")


def answer_blocks(answers: Samples, recipe: Recipe) -> tuple[Deferred, list[list[list[int]]]]:
    """Answers in the blocks in which they are learnt from; and the numbers of those in each document of each block."""
    return planned(answers.ids, len(answers), recipe.corpus.block)


def packed_order(answers: Samples, recipe: Recipe) -> Samples:
    """The answers in the order in which blocks hold them."""
    rows = answer_blocks(answers, recipe)[1]
    return answers.take([one for row in rows for own in row for one in own])


def teacher(recipe: Recipe, run: Run, part: tuple[int, int] | None = None) -> list[Path]:
    """Write teacher/shard-NNNNN.safetensors and manifest.json; the unit of resuming is the shard.

    With several processes, `part` = (index, count) makes this one write every count-th shard; the first process writes
    the manifest when all are done. None: the part of this process among those it was launched with.
    """
    part = part or (process_index(), process_count())
    blocks, own = training_blocks(recipe, run)
    return write_store(recipe, run, blocks, part, answers=own)


def write_store(
    recipe: Recipe,
    run: Run,
    blocks: Blocks,
    part: tuple[int, int],
    stage: str = "teacher",
    all_entries: bool = False,
    answers: int = 0,
) -> list[Path]:
    """Write this process's part of the shards of a stage's blocks, and as the first process manifest.json.

    `answers` are the scored positions of answers. `all_entries`: of a compact store, teacher.top_k entries a position,
    whatever teacher.mass says.
    """
    main, settings, folder = part[0] == 0, recipe.teacher, run.path(stage)
    config = load_config(recipe.target.model)
    vocabulary = real_tokens(config.get_text_config(), load_tokenizer(recipe.target.model))
    size, scored = settings.shard_blocks, int(blocks.scored.sum())
    parts = [(shard_path(folder, at // size), slice(at, at + size)) for at in range(0, len(blocks), size)]
    mine = part_of(parts, part, "teacher shards", "teacher.shard_blocks")
    # A server is sent a whole shard at once, so that it always has requests waiting.
    batch = settings.batch if settings.server is None else size
    with ExitStack() as opened:
        metadata, distributions = _maker(recipe, run, blocks, vocabulary, main, all_entries, opened, folder)
        if main:
            hidden = config.get_text_config().hidden_size
            each = bytes_per_row(settings, hidden, recipe.target.dtype, metadata.get("k"))
            mixed = f", {scored - answers} of them of given text" if answers and scored > answers else ""
            taken = scored * each + len(blocks) * recipe.corpus.block * PACKED_BYTES
            run.say(
                f"  {scored} scored positions in {len(blocks)} blocks{mixed}; the store takes {taken / 1e6:.0f} MB in "
                f"{len(parts)} shards"
            )
        progress = Progress(f"{stage}, shards" + (f" of process {part[0]}" if part[1] > 1 else ""), len(mine))
        for path, rows in mine:
            exists = path.exists()
            if not exists:
                save_shard(path, shard_tensors(blocks.take(rows), distributions, batch))
            progress.step(note="(exists)" if exists else "")
        if part[1] > 1:
            barrier()
        if main:
            lacking = next((path for path, _ in parts if not path.exists()), None)
            if lacking is not None:
                what = f"{lacking} was not written by the process it was assigned to"
                raise RunError(what, "run the same command again")
            manifest = {
                "format": FORMAT,
                "kind": settings.kind,
                **metadata,
                "vocabulary": vocabulary,
                **target_metadata(recipe),
                "sampler": read_json(run.path("answers", "manifest.json"), {"sampler": dict})["sampler"],
                "shard_blocks": [len(range(len(blocks))[part]) for _, part in parts],
                "scored_positions": scored,
                "answer_positions": answers,
            }
            write_json(folder / "manifest.json", manifest)
    return [folder]


def _maker(
    recipe: Recipe,
    run: Run,
    blocks: Blocks,
    vocabulary: int,
    main: bool,
    all_entries: bool,
    opened: ExitStack,
    folder: Path,
) -> tuple[dict[str, Any], Distributions]:
    """The manifest's entries for a kind of store, and the function from blocks to the tensors of their shard."""
    settings = recipe.teacher
    if settings.kind == "online":
        return {}, lambda part: {}
    if settings.kind == "exact":
        model = load_target(recipe.target, pick_device(recipe.device))
        head = Head.of(model, vocabulary)
        require_head(model, head, blocks.take(slice(0, 1)))
        path = head_path(folder)
        if main and not path.exists():
            tensors = {"weight": head.weight} | ({} if head.bias is None else {"bias": head.bias})
            save_shard(path, {name: value.cpu().clone() for name, value in tensors.items()})
        dtype = recipe.target.dtype
        metadata: dict[str, Any] = {"hidden_dtype": dtype, "logit_form": asdict(head.form)}
        return metadata, lambda part: exact_distributions(model, part, DTYPES[dtype])
    reader = open_reader(recipe, run, vocabulary)
    opened.callback(reader.close)
    if isinstance(reader, ServerReader):
        reader.endpoint.require_same(folder)
    k = min(settings.top_k, vocabulary - 1)
    mass = None if all_entries else settings.mass
    if mass is not None:
        k = _entries(recipe, run, reader, blocks, k, mass, main)
    metadata = {"k": k, "mass": mass, "origin": reader.origin}
    return metadata, lambda part: compact_distributions(reader, part, k)


def shard_tensors(blocks: Packed, distributions: Distributions, batch: int) -> dict[str, Tensor]:
    """The tensors of one shard: its blocks and the target's distributions on them, made `batch` blocks at a time."""
    parts = [distributions(part) for part in blocks.batches(batch)]
    tensors = blocks.tensors() | {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    tensors["rows"] = torch.cat([torch.zeros(1, dtype=torch.int64), blocks.scored.cumsum(0)])
    if blocks.documents.shape[1] <= torch.iinfo(torch.int16).max:
        tensors["documents"] = blocks.documents.to(torch.int16)
    return {name: value.contiguous() for name, value in tensors.items()}


@torch.no_grad()
def exact_distributions(model: Any, blocks: Packed, dtype: torch.dtype) -> dict[str, Tensor]:
    """hidden [N, H] in `dtype`; raises DataError where that type cannot hold them."""
    hidden = scored_states(model, blocks).cpu().to(dtype)
    if not bool(hidden.isfinite().all()):
        hint = "set target.dtype to bfloat16 or float32"
        raise DataError(f"hidden states of the target are not finite in {str(dtype).removeprefix('torch.')}", hint)
    return {"hidden": hidden.contiguous()}


def _entries(recipe: Recipe, run: Run, reader: Reader, blocks: Blocks, cap: int, mass: float, main: bool) -> int:
    """K of a compact store: the fewest entries, up to `cap`, that hold the mass on average over some blocks.

    The main process chooses, once, for all processes and for a run that goes on later.
    """
    path = run.path("teacher", "entries.json")
    if main and not path.exists():
        count = min(len(blocks), recipe.teacher.batch)
        sample = blocks.take(torch.linspace(0, len(blocks) - 1, count).round().long().unique())
        masses = mean_masses(reader, sample, cap)
        enough = (masses >= mass).nonzero().flatten().tolist()
        k = enough[0] + 1 if enough else cap
        run.say(
            f"  {k} entries hold {float(masses[k - 1]):.4f} of the mass on average over {int(sample.mask.sum())} "
            "positions" + ("" if enough else f", less than teacher.mass = {mass:g}: teacher.top_k is the cap")
        )
        write_json(path, {"k": k, "mass": float(masses[k - 1]), "positions": int(sample.mask.sum())})
    barrier()
    return int(read_json(path, {"k": int})["k"])


def save_shard(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file."""
    from safetensors.torch import save_file

    write_atomically(path, lambda temporary: save_file(tensors, str(temporary)))


# ── Stage `table` ──

LIKELIEST = 12  # tokens of the target's distribution that may count
AT_ONCE = 128  # distributions that are read at once
TABLE_FILE = ("table", "ngrams.safetensors")  # in a run


def table(recipe: Recipe, run: Run) -> list[Path]:
    """Count n-grams of the run's train answers.

    Where the teacher store has the target's distributions, its likeliest tokens count in place of the drawn ones.
    """
    kept = packed_order(learnt_answers(run), recipe)
    expected = None
    if read_manifest(run)["kind"] != "online":
        expected = expected_tokens(TeacherStore(run), kept, pick_device(recipe.device))
    levels = count_ngrams([*map(counted_text, kept)], expected=expected)
    path = run.path(*TABLE_FILE)
    about = {"target": recipe.target.model, "tokenizer": tokenizer_digest(recipe.target.model)}
    tokens = sum(len(answer.answer) for answer in kept)
    write_table(path, levels, about | {"texts": str(len(kept)), "tokens": str(tokens)})
    ngrams = sum(len(level.tokens) for level in levels)
    kind = "" if expected is None else ", by the teacher's probabilities"
    run.say(f"  {len(kept)} answers of {tokens} tokens: {ngrams} n-grams{kind}, {path.stat().st_size / 1e6:.1f} MB")
    return [path]


def counted_text(answer: Sample) -> list[int]:
    """The ids that n-grams are counted of: an answer behind the last tokens of its prompt."""
    return [*answer.prompt[-ORDER:], *answer.answer]


def expected_tokens(store: TeacherStore, answers: Samples, device: torch.device) -> list[Expected]:
    """The target's likeliest tokens at each token of the answers, which a store holds in this order, before its text;
    DataError where it holds others."""
    turns = map(answers.ids, range(len(answers)))
    scored = [answer if len(prompt) else answer[1:] for prompt, answer in turns]
    written = torch.from_numpy(numpy.concatenate(scored))
    found, ids, chances, read = list[Tensor](), list[Tensor](), list[Tensor](), 0
    for block in range(store.blocks):
        if read >= len(written):
            break
        own = store.packed.take(torch.tensor([block]))
        found.append(own.labels()[own.mask])
        teacher = store.teacher(torch.tensor([block]), device)
        for start in range(0, len(teacher), AT_ONCE):
            chunk = teacher.chunk(slice(start, start + AT_ONCE))
            best, columns = chunk.log_probabilities.topk(min(LIKELIEST, chunk.log_probabilities.shape[-1]))
            ids.append((columns if chunk.ids is None else chunk.ids.gather(-1, columns)).long().cpu())
            chances.append(as_float64(best.exp()).cpu())
        read += len(teacher)
    if not torch.equal(torch.cat(found)[: len(written)], written):
        raise DataError(f"{store.folder} holds the distributions of other answers", how_to_redo("teacher"))
    lengths = [len(one) for one in scored]
    parts = (torch.cat(some)[: len(written)].split(lengths) for some in (ids, chances))
    return [Expected(tokens.numpy(), probabilities.numpy()) for tokens, probabilities in zip(*parts, strict=True)]


def open_table(path: Path, target: str) -> NGramTable:
    """The table in a file, or of a run's folder, for this target; DataError where it is of another vocabulary, or
    damaged."""
    if path.is_dir():
        path = path.joinpath(*TABLE_FILE)
    return NGramTable.open(path, tokenizer_digest(target))


# ── Files for servers ──

NO_TOKEN = -1  # llama.cpp's places of an n-gram of four that a bigram leaves free
SHALLOWEST = 6  # tree of ik_llama.cpp's that can draft: a token behind a match of 5


def export_lookup(recipe: Recipe, run: Run, server: str, path: Path) -> tuple[str, int, int]:
    """Write the file of one of `FORMS`; returns what it has, from how many answers and tokens.

    Raises RunError for a run whose answers are not finished, DataError where nothing is left of them or the server
    does not take so much.
    """
    if run.done("answers") is None:
        raise RunError(f"{run.folder} has no finished answers", f"`{run.again('--until', 'answers')}` writes them")
    run.verify("answers", "answers/train-*")
    answers = learnt_answers(run)
    data, content, tokens = FORMS[server][1](recipe, answers)
    write_atomically(path, lambda temporary: temporary.write_bytes(data))
    return content, len(answers), tokens


Written = tuple[bytes, str, int]  # the file, what it has, and how many tokens


def _static_cache(recipe: Recipe, answers: Sequence[Sample]) -> Written:
    """llama.cpp's static lookup cache: of each bigram int32 ids[4], the number of tokens that follow it, and of each
    of those its id and count."""
    texts = [counted_text(answer) for answer in answers]
    first, second, third = count_ngrams(texts)[:3]
    starts, sizes = second.first[:-1], numpy.diff(second.first)  # [G], of the tokens that follow each
    heads = numpy.stack([first.tokens.repeat(numpy.diff(first.first)), second.tokens], 1)  # [G, 2]
    known = sizes > 0
    starts, sizes, heads = starts[known], sizes[known], heads[known]
    lengths = 5 + 2 * sizes
    places = numpy.cumsum(lengths) - lengths
    found = numpy.empty(int(lengths.sum()), "<i4")
    for offset, values in enumerate((heads[:, 0], heads[:, 1], NO_TOKEN, NO_TOKEN, sizes)):
        found[places + offset] = values
    following = (places + 5 - 2 * starts).repeat(sizes) + 2 * numpy.arange(len(third.tokens))  # [F]
    found[following], found[following + 1] = third.tokens, third.counts
    return found.tobytes(), f"{len(sizes)} bigrams, {len(third.tokens)} tokens after them", sum(map(len, texts))


def _suffix_corpus(recipe: Recipe, answers: Sequence[Sample]) -> Written:
    """ik_llama.cpp's binary corpus: int32 ids, one text after the other; it knows no mark between them."""
    ids = numpy.concatenate([numpy.asarray(counted_text(answer), "<i4") for answer in answers])
    if suffix_depth(len(ids)) < SHALLOWEST:
        most = IK_INSERTED // SHALLOWEST
        raise DataError(f"{len(ids)} tokens of answers: ik_llama.cpp reads at most {most}", "export from a smaller run")
    return ids.tobytes(), f"{len(ids)} ids", len(ids)


def _external_corpus(recipe: Recipe, answers: Sequence[Sample]) -> Written:
    """SGLang's JSON lines: the text of each, special tokens included, which SGLang tokenizes again."""
    tokenizer = load_tokenizer(recipe.target.model)
    texts = [counted_text(answer) for answer in answers]
    lines = [decoded(tokenizer, ids) for ids in texts]
    again = [list(tokenizer.encode(line, add_special_tokens=False)) for line in lines]
    other = sum(left != right for left, right in zip(texts, again, strict=True))
    content = f"{len(lines)} texts" + (f", {other} of which have other ids when they are tokenized again" * bool(other))
    return _json_lines(lines), content, sum(map(len, again))


def _requests(recipe: Recipe, answers: Sequence[Sample]) -> Written:
    """Requests to /v1/completions for texts like the answers: vLLM's cache holds what it wrote itself, nothing else."""
    stop = {"stop": list(recipe.answers.stop)} if recipe.answers.stop else {}
    requests = [
        {"prompt": answer.prompt, "max_tokens": len(answer.answer), **recipe.sampling, **stop, "seed": number}
        for number, answer in enumerate(answers)
    ]
    return _json_lines(requests), f"{len(requests)} requests", sum(len(answer.answer) for answer in answers)


def _json_lines(values: Sequence[Any]) -> bytes:
    return "".join(json.dumps(value) + "\n" for value in values).encode()


FORMS: dict[str, tuple[str, Callable[[Recipe, Sequence[Sample]], Written]]] = {  # by server: the file's usual name
    "llama.cpp": ("llama.cpp-static.bin", _static_cache),
    "ik_llama": ("ik_llama-corpus.bin", _suffix_corpus),
    "sglang": ("sglang-corpus.jsonl", _external_corpus),
    "vllm": ("vllm-requests.jsonl", _requests),
}
