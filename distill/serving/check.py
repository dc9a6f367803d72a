"""`distill serve-check`: a pair on the user's server, with and without its draft, and the reasons for a shortfall.

The servers are started here, or already run. The same prompts are replayed on the servers and by distill's decoder.
llama-server counts drafted tokens for each request. vLLM's counts come from its /metrics. vLLM's formats are those of
the version in server_commands.VLLM.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy
from pydantic import BaseModel, TypeAdapter, ValidationError

from distill.data.chat_template import ChatTemplate
from distill.data.samples import Sample
from distill.decoding.decode import Decoded, decode_text
from distill.decoding.drafters import ModelDrafter
from distill.decoding.lengths import Fixed
from distill.decoding.proposals import Proposal
from distill.decoding.rules import Rules
from distill.engines.loaded import load_pair
from distill.engines.pairs import compare_pair
from distill.engines.server_commands import DRAWN_AMONG, SAMPLING
from distill.errors import ServingError
from distill.http import Received, Unanswered, at_once
from distill.machine import machine
from distill.progress import Progress, note
from distill.recipe import Sampler, Target, parse_section
from distill.serving import results
from distill.serving.history import digest_of
from distill.serving.results import (
    Counts,
    ServedSpeed,
    ServeReport,
    Text,
    acceptance,
    counts_of,
    rise_of_tokens,
    summed,
    totals_of,
)
from distill.serving.server import Event, Http, LlamaServer, Running, started
from distill.tables import UNKNOWN, Numbers, speed_ratio

# Every other setting that shapes a distribution is switched off. Servers have defaults, which vLLM reads from the
# model's generation_config.json. llama-server applies its samplers in the order of this list, as distill does.
LLAMA_PLAIN: dict[str, Any] = {
    "samplers": ["temperature", "top_k", "top_p", "min_p"],
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
    "mirostat": 0,
}
VLLM_PLAIN: dict[str, Any] = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
GREEDY = Sampler(temperature=0)
PLAIN_SERVER, DRAFT_SERVER = "plain", "draft"  # names of the two servers
SETTLED_SECONDS, PATIENCE_SECONDS = 0.05, 2.0  # Another task of vLLM than that of replies writes its counters.
WARM_TOKENS = 8


@dataclass(frozen=True)
class Reply(Text):
    """One completion: `count` tokens, seconds to the first token and to the end, by this client's clock.

    `cached` tokens of the prompt came from the server's cache. `later_seconds` is the time of all tokens after the
    first, by the server's clock. `started` is the moment of the request, and `times` are the moments of the events with
    tokens (perf_counter). llama-server sends an event for each token, and vLLM for each step. If a server does not
    count single requests, the counts are those of a text without a draft. `request_counts` are vLLM's for the request.
    """

    count: int
    first_seconds: float
    seconds: float
    started: float = 0.0
    times: Sequence[float] = ()
    cached: int = 0
    later_seconds: float | None = None
    request_counts: Counts | None = None

    @property
    def end(self) -> float:
        """The moment at which the reply was complete."""
        return self.started + self.seconds


class Client(ABC):
    """A server that continues token ids under `sampler`.

    While `alone` is true, requests are sent one at a time. Otherwise threads may share the client.
    """

    kind: str
    prefix: str  # of its metrics

    def __init__(self, http: Http, sampler: Sampler = GREEDY) -> None:
        self.http, self.url, self.sampler, self.alone = http, http.url, sampler, True

    def sampling(self, seed: int) -> dict[str, Any]:
        """The sampler's settings and a seed, under the names of both kinds of server."""
        return self.sampler.model_dump() | {"seed": seed}

    @abstractmethod
    def complete(self, ids: Sequence[int], limit: int, seed: int = 0) -> Reply:
        """Up to `limit` tokens after these, from a cold cache. `seed` is that of a sampled text."""

    @abstractmethod
    def drafts(self) -> bool | None:
        """Whether the server speculates. None if it does not show that."""

    @abstractmethod
    def build(self) -> str:
        """The server's build or version."""

    @abstractmethod
    def context(self) -> int | None:
        """The maximum tokens of a text. None if the server does not show it."""

    def totals(self) -> Counts | None:
        """The server's counters of speculation, summed over engines. None if it has none."""
        received = self.http.get("/metrics")
        return totals_of(received.content.decode("utf-8", "replace"), self.prefix) if received.status == 200 else None


def _timed(written: Sequence[Sequence[int]], received: Received) -> tuple[list[int], float, Sequence[float]]:
    """The tokens of a reply's events, the seconds to the first event, and the moments of the events with tokens."""
    times, holding = received.times, sum(map(bool, written))
    first_seconds = times[0] - received.started if times else received.seconds
    return [token for tokens in written for token in tokens], first_seconds, times[: holding or None]


class LlamaTimings(BaseModel):
    """llama-server's counts of a request: generated, drafted and accepted tokens, and cached tokens of the prompt."""

    predicted_n: int | None = None
    predicted_ms: float = 0.0
    draft_n: int = 0
    draft_n_accepted: int = 0
    cache_n: int = 0


class LlamaEvent(Event):
    """An event of /completion. The last event has the timings."""

    tokens: Sequence[int] = ()
    timings: LlamaTimings | None = None


class LlamaModelMeta(BaseModel):
    """llama-server's description of its model."""

    n_vocab: int | None = None


class ServedModel(BaseModel):
    """A model of /v1/models."""

    id: str
    meta: LlamaModelMeta | None = None
    max_model_len: int | None = None


class ServedModels(BaseModel):
    """/v1/models."""

    data: Sequence[ServedModel] = ()


class LlamaProps(BaseModel):
    """/props."""

    build_info: str | None = None


class LlamaIds(BaseModel):
    """/tokenize."""

    tokens: list[int]


class LlamaPrompt(BaseModel):
    """/apply-template."""

    prompt: str


class LlamaClient(Client):
    """A llama-server, started here (with --metrics) or by the user."""

    kind, prefix = "llama-server", "llamacpp"

    def complete(self, ids: Sequence[int], limit: int, seed: int = 0) -> Reply:
        """Up to `limit` tokens, without the prompt cache."""
        body = LLAMA_PLAIN | self.sampling(seed) | {"prompt": list(ids), "n_predict": limit}
        body |= {"cache_prompt": False, "return_tokens": True}
        events, received = self.http.stream("/completion", LlamaEvent, body | {"stream": True})
        timings = events[-1].timings
        if timings is None:
            raise ServingError(f"{self.url} gives no timings with its replies", "use a llama-server from 2026 or later")
        tokens, first_seconds, times = _timed([event.tokens for event in events], received)
        count = len(tokens) if timings.predicted_n is None else timings.predicted_n
        counts = Counts.of_text(count, timings.draft_n, timings.draft_n_accepted)
        cached, later_seconds = max(0, timings.cache_n), timings.predicted_ms / 1e3
        return Reply(
            tokens, counts, count, first_seconds, received.seconds, received.started, times, cached, later_seconds
        )

    def build(self) -> str:
        """The build that /props names."""
        return self.http.find("/props", LlamaProps).build_info or "a build that does not name itself"

    def slots(self) -> list[LlamaSlot]:
        """The server's slots. Empty if it does not show them."""
        received = self.http.get("/slots")
        try:
            return LlamaSlots.validate_json(received.content if received.status == 200 else b"[]")
        except ValidationError:
            return []

    def drafts(self) -> bool | None:
        """Whether the server's slots speculate."""
        speculative = [slot.speculative for slot in self.slots() if slot.speculative is not None]
        return any(speculative) if speculative else None

    def context(self) -> int | None:
        """The tokens of the smallest slot."""
        return min((slot.n_ctx for slot in self.slots() if slot.n_ctx is not None), default=None)

    def vocabulary_size(self) -> int | None:
        """Tokens of the model's vocabulary. None if the server does not show it."""
        served = self.http.find("/v1/models", ServedModels).data
        return next((model.meta.n_vocab for model in served if model.meta), None)

    def tokenize(self, text: str) -> list[int]:
        """The server's ids of a text. Control tokens in it are read as such."""
        return self.http.read(
            "/tokenize", LlamaIds, {"content": text, "add_special": False, "parse_special": True}
        ).tokens

    def rendered(self, messages: list[dict[str, str]]) -> str:
        """A conversation through the server's chat template."""
        return self.http.read("/apply-template", LlamaPrompt, {"messages": messages}).prompt


class LlamaSlot(BaseModel):
    """A slot. It takes `n_ctx` tokens."""

    speculative: bool | None = None
    n_ctx: int | None = None


LlamaSlots = TypeAdapter(list[LlamaSlot])  # /slots


class PromptTokens(BaseModel):
    """Counts of a prompt's tokens."""

    cached_tokens: int | None = None


class VllmUsage(BaseModel):
    """vLLM's counts of a request."""

    completion_tokens: int | None = None
    prompt_tokens_details: PromptTokens | None = None


class VllmChoice(BaseModel):
    """The tokens of an event."""

    token_ids: list[int] | None = None


class VllmDrafting(BaseModel):
    """vLLM's drafting of one request: the number of rounds that accepted 0, 1, … tokens, and sums."""

    acceptance_histogram: list[int]
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int

    @property
    def counts(self) -> Counts:
        """The same counts as those of a server's counters."""
        exactly = self.acceptance_histogram
        by_position = tuple(sum(exactly[place:]) for place in range(1, len(exactly)))
        return Counts(self.num_spec_steps, self.num_draft_tokens, self.num_accepted_draft_tokens, by_position)


class VllmMetrics(BaseModel):
    """Metrics of a server that was started with --per-request-spec-decode-metrics."""

    speculative_decoding: VllmDrafting | None = None


class VllmEvent(Event):
    """An event of /v1/completions. The last events have usage and metrics."""

    choices: Sequence[VllmChoice] = ()
    usage: VllmUsage | None = None
    metrics: VllmMetrics | None = None


class VllmVersion(BaseModel):
    """/version."""

    version: str | None = None


class VllmClient(Client):
    """A vLLM server that the user started.

    If a reply has no counts and `alone` is true, it gets the increase of the server's counters.
    """

    kind, prefix, counts_requests = "vllm", "vllm", False

    def __init__(self, http: Http, sampler: Sampler = GREEDY, model: str | None = None) -> None:
        super().__init__(http, sampler)
        names = [model] if model else [served.id for served in http.read("/v1/models", ServedModels).data]
        if len(names) != 1:
            raise ServingError(f"{self.url} serves {len(names)} models: {', '.join(names)[:200]}", "name one: --model")
        self.model = names[0]

    def complete(self, ids: Sequence[int], limit: int, seed: int = 0) -> Reply:
        """Up to `limit` tokens. A fresh salt keeps the request out of the prefix cache."""
        body = VLLM_PLAIN | self.sampling(seed)
        body |= {"top_k": self.sampler.top_k or -1}  # Every vLLM takes -1 for no top-k, and some refuse 0.
        body |= {"model": self.model, "prompt": list(ids), "max_tokens": limit}
        body |= {"cache_salt": secrets.token_hex(16), "return_token_ids": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        before = self.totals() if self.alone and not self.counts_requests else None
        events, received = self.http.stream("/v1/completions", VllmEvent, body)
        written = [[token for choice in event.choices for token in choice.token_ids or ()] for event in events]
        tokens, first_seconds, times = _timed(written, received)
        usage = next((event.usage for event in reversed(events) if event.usage is not None), VllmUsage())
        count = len(tokens) if usage.completion_tokens is None else usage.completion_tokens
        cached = (usage.prompt_tokens_details or PromptTokens()).cached_tokens or 0
        drafting = (event.metrics.speculative_decoding for event in events if event.metrics is not None)
        request_counts = next((part.counts for part in drafting if part is not None), None)
        self.counts_requests = request_counts is not None
        rise = request_counts if request_counts is not None or before is None else self._rise(before)
        counts = Counts.of_text(count, *((rise.drafted, rise.accepted, rise.rounds) if rise else ()))
        return Reply(
            *(tokens, counts, count, first_seconds, received.seconds, received.started, times, cached),
            request_counts=request_counts,
        )

    def _rise(self, before: Counts) -> Counts:
        """The increase of the server's counters."""
        rise = self._settled(before) - before
        if min(rise.rounds, rise.drafted, rise.accepted) < 0:
            what = f"the counters of {self.url} fell: another server answered, or the server was restarted"
            raise ServingError(what, "each server has its counters: give the address of one, not of a load balancer")
        return rise

    def _settled(self, before: Counts) -> Counts:
        """The counters after they stop changing."""
        deadline, last = time.monotonic() + PATIENCE_SECONDS, before
        while True:
            totals = self.totals() or before
            if (totals == last and totals != before) or time.monotonic() > deadline:
                return totals
            last = totals
            time.sleep(SETTLED_SECONDS)

    def context(self) -> int | None:
        """The max_model_len of the model."""
        served = self.http.find("/v1/models", ServedModels).data
        return next((model.max_model_len for model in served if model.id == self.model), None)

    def build(self) -> str:
        """The version of /version. Empty without one."""
        return self.http.find("/version", VllmVersion).version or ""

    def drafts(self) -> bool:
        """Whether the server speculates. Only then its counters exist."""
        return self.totals() is not None


def client_of(http: Http, sampler: Sampler = GREEDY, model: str | None = None) -> Client:
    """The client of a running server, of the kind that the server turns out to be."""
    if kind_of_server(http) == "vllm":
        return VllmClient(http, sampler, model)
    return LlamaClient(http, sampler)


def kind_of_server(http: Http) -> str:
    """llama-server or vllm, by a route that only one of them has. ServingError for another server, or none."""
    if http.find("/props", LlamaProps).build_info is not None:
        return "llama-server"
    if http.find("/version", VllmVersion).version is not None:
        return "vllm"
    words, hint = http.words(http.get("/props").content), "correct the address"
    raise ServingError(f"{http.url} is neither llama-server nor vLLM, by /props ({words}) and /version", hint)


# ── Clients of servers that are started here, and of running servers ──


@dataclass(frozen=True)
class Addresses:
    """Addresses of running servers, and the GGUF `files` of target and draft for distill's decoder.

    `n_max` is the server's draft length. None takes it from the counters. A `probabilistic` server draws its drafts.
    """

    url: str
    plain: str | None = None
    key: str | None = None
    model: str | None = None
    files: tuple[Path, Path] | None = None
    n_max: int | None = None
    probabilistic: bool = False
    threads: int | None = None


@contextmanager
def opened(server: LlamaServer, seconds: tuple[float, float], sampler: Sampler = GREEDY) -> Iterator[LlamaClient]:
    """A client of a llama-server that runs within the block. ServingError if the server does not use its draft."""
    with started(server, seconds[0]) as running:

        def death() -> str | None:
            reason = running.death()
            return None if reason is None else f"{server.binary} ended ({reason}); its last lines:\n{running.tail()}"

        with contextlib.closing(Http(running.url, seconds[1], death=death)) as http:
            client = LlamaClient(http, sampler)
            if server.draft is not None and client.drafts() is False:
                raise _unused(server, running)
            yield client


def _unused(server: LlamaServer, running: Running) -> ServingError:
    """The error that a server runs without its draft. Only llama-server's log names the reason."""
    reason = compare_pair(str(server.target), str(server.draft)).llama_cpp
    words = ("draft", "specul", "vocab")
    lines = [line for line in running.text().splitlines() if " I " not in line and any(word in line for word in words)]
    shown = "".join(f"\n    {line[:200]}" for line in lines[-4:])
    return ServingError(
        f"{server.binary} serves {server.target} without its draft{f': {reason}' if reason else ''}{shown}",
        "transplant the target's vocabulary into the draft (`distill transplant`)" if reason else "see its whole log",
    )


def connected(
    places: Addresses, seconds: float, stack: ExitStack, sampler: Sampler, prompts: Sequence[Sequence[int]]
) -> dict[str, Client]:
    """Clients of running servers. ServingError for exchanged addresses, and if a model lacks an id of the prompts."""
    largest = max(map(max, prompts))
    clients: dict[str, Client] = {}
    for name, url in ((PLAIN_SERVER, places.plain), (DRAFT_SERVER, places.url)):
        if url is not None:
            http = stack.enter_context(contextlib.closing(Http(url, seconds, places.key)))
            clients[name] = client_of(http, sampler, places.model)
    for name, client in clients.items():
        drafts = client.drafts()
        if name == PLAIN_SERVER and drafts:
            raise ServingError(f"{client.url} drafts, and was given as the plain server", "correct --plain-url")
        if name != PLAIN_SERVER and drafts is False:
            hint = "start it with the draft; llama-server drops a draft of another vocabulary, and only logs that"
            raise ServingError(f"{client.url} reports that it serves without a draft", hint)
        size = client.vocabulary_size() if isinstance(client, LlamaClient) else None
        if size is not None and largest >= size:
            what = f"{client.url} serves a model of {size} tokens, and the prompts have token {largest}"
            raise ServingError(what, "the prompts are for another model: correct --url, or the run")
    return clients


# ── Prompts replayed on servers: cold caches, one request at a time ──

Replayed = Sequence[Sequence[Reply]]  # replies of a configuration by prompt and repeat


def sums_of(texts: Replayed) -> tuple[Numbers, Numbers]:
    """Tokens [P] and seconds [P] of all replies, by prompt."""
    tokens = [sum(reply.count for reply in replies) for replies in texts]
    seconds = [sum(reply.seconds for reply in replies) for replies in texts]
    return numpy.array(tokens, float), numpy.array(seconds, float)


def warm(client: Client, prompts: Sequence[Sequence[int]]) -> None:
    """Request one untimed text, because the first text creates buffers and kernels."""
    client.complete(prompts[0], WARM_TOKENS)


def interleaved(
    clients: Mapping[str, Client], prompts: Sequence[Sequence[int]], limit: int, repeats: int, title: str
) -> dict[str, list[list[Reply]]]:
    """Send every prompt to every server, one request at a time. The servers' order rotates from prompt to prompt.

    The number of the repeat is the seed of a sampled text.
    """
    replayed: dict[str, list[list[Reply]]] = {name: [[] for _ in prompts] for name in clients}
    order = list(clients.items())
    progress = Progress(title, repeats * len(prompts))
    for repeat in range(repeats):
        for place, prompt in enumerate(prompts):
            turn = (place + repeat) % len(order)
            for name, client in order[turn:] + order[:turn]:
                reply = client.complete(prompt, limit, repeat)
                if reply.cached:
                    raise ServingError(
                        f"{client.url} took {reply.cached} tokens of a prompt from its cache against the request",
                        "switch its prompt cache off, because a warm cache shortens the times",
                    )
                replayed[name][place].append(reply)
            progress.step()
    return replayed


# ── The same prompts by distill's decoder, with the server's way of counting ──


class ServerDrafter(ModelDrafter):
    """A draft that continues after an end token, as llama-server's does, so that drafted tokens are counted alike."""

    def propose(self, context: Sequence[int], limit: int, ends: Collection[int]) -> Proposal:
        """A chain that no end token stops."""
        return super().propose(context, limit, ())


@dataclass(frozen=True)
class ServerRules:
    """A server's way of decoding: its sampler, the maximum of drafted tokens, and whether drafts are drawn.

    `probabilistic` drafts are drawn from the draft at the served temperature, without the other settings of the
    sampler. llama-server draws among the DRAWN_AMONG likeliest tokens. Rejection sampling verifies them. Otherwise the
    draft's best tokens are drafted. llama-server compares them with the target's draw. vLLM treats them as drafts with
    probability 1, which accepts as many.
    """

    sampler: Sampler
    n_max: int
    probabilistic: bool = False
    vllm: bool = False

    def decode_files(
        self, target: Path, draft: Path, prompts: Sequence[Sequence[int]], limit: int, samples: int, threads: int | None
    ) -> list[list[Text]]:
        """The texts of distill's decoder: `samples` after each prompt, from cold caches."""
        place = parse_section(Target, {"model": str(target)})
        room = max(map(len, prompts)) + limit + 2 * self.n_max + 1
        drawn = Sampler(temperature=self.sampler.temperature, top_k=0 if self.vllm else DRAWN_AMONG)
        verifier = "token" if self.probabilistic else "match" if self.sampler.temperature else "greedy"
        kind = "drawn drafts" if self.probabilistic else "best tokens drafted" if self.sampler.temperature else "greedy"
        progress = Progress(f"{draft.name}, our decoder, {kind}", len(prompts))
        texts: list[list[Text]] = []
        with load_pair(place, str(draft), tokens=room, threads=threads) as pair:
            for number, prompt in enumerate(prompts):
                texts.append([])
                for sample in range(samples):
                    chance = random.Random(f"{number}, {sample}").random
                    rules = Rules(self.sampler, verifier, ends=() if self.vllm else pair.ends, random=chance)
                    drafter = ServerDrafter(pair.draft, Fixed(self.n_max), drawn, chance, not self.probabilistic)
                    result = decode_text(pair.target, drafter, prompt, limit + self.n_max * self.vllm, rules)
                    texts[-1].append(
                        vllm_text(result, len(prompt), limit, pair.ends) if self.vllm else our_text(result)
                    )
                progress.step()
        return texts


def our_text(result: Decoded) -> Text:
    """A decoded text with llama-server's counts.

    Tokens after the end of a text are drafted and not accepted. A drafted end token counts as the target's, and not as
    accepted, unless it is the last token of its round (common_sampler_sample_and_accept_n).
    """
    drafted, accepted = sum(r.drafted for r in result.rounds), sum(result.from_draft)
    last = next((place for place, drawn in enumerate(reversed(result.from_draft)) if not drawn), 0)
    if last and last < result.rounds[-1].drafted and result.rounds[-1].accepted >= last:
        accepted -= 1
    return Text(result.tokens, Counts.of_text(len(result.tokens), drafted, accepted))


def vllm_text(result: Decoded, prompt: int, limit: int, ends: Collection[int]) -> Text:
    """A text after `prompt` tokens, cut at its end, with vLLM's counts: all of every round that began before the end
    (v1/core/sched/scheduler.py)."""
    stop = next((place for place, token in enumerate(result.tokens) if token in ends), limit - 1) + 1
    stop = min(stop, limit, len(result.tokens))
    # The target's context lacks the text's last token, which the round's step reads.
    rounds = [r for r in result.rounds if r.depth - prompt + 1 < stop]
    drafted, accepted = sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)
    return Text(result.tokens[:stop], Counts.of_text(stop, drafted, accepted, len(rounds)))


PASSES = 2  # A load sends at least this many times the number of concurrent requests.


# ── Servers under load: a fixed number of concurrent requests, and the times that users wait ──


@dataclass(frozen=True)
class Answered:
    """The reply to the prompt with this number."""

    prompt: int
    reply: Reply

    def tokens_by(self, moment: float) -> float:
        """The tokens that had arrived by a moment."""
        if self.reply.end <= moment or not len(self.reply.times):
            return self.reply.count
        arrived = sum(time <= moment for time in self.reply.times)
        return self.reply.count * arrived / len(self.reply.times)


def send(client: Client, prompts: Sequence[Sequence[int]], limit: int, together: int) -> list[Answered]:
    """Send the requests of one replay, `together` at once, and return the replies. Few prompts are repeated.

    The first fault ends the replay.
    """
    ended = threading.Event()

    def ask(number: int) -> tuple[int, Answered]:
        turn, prompt = divmod(number, len(prompts))
        if ended.is_set():
            raise Unanswered("the load ended")
        return number, Answered(prompt, client.complete(prompts[prompt], limit, turn))

    waiting = deque(range(max(len(prompts), PASSES * together)))
    with contextlib.closing(at_once(ask, waiting, together, ended.set)) as answered:
        return [request for _, request in sorted(answered, key=lambda numbered: numbered[0])]


@dataclass(frozen=True)
class Served:
    """All replies under a load of `wall` seconds, with the tokens [P] and seconds [P] of each prompt in that time."""

    replies: Sequence[Reply]
    tokens: Numbers
    seconds: Numbers
    wall: float

    @classmethod
    def alone(cls, replayed: Replayed) -> Served:
        """The load of requests that were sent one at a time, alternately with other servers' requests."""
        tokens, seconds = sums_of(replayed)
        return cls([reply for replies in replayed for reply in replies], tokens, seconds, float(seconds.sum()))

    @classmethod
    def under(cls, replays: Sequence[Sequence[Answered]], prompts: int) -> Served:
        """The load of whole replays. It ends with the first request that no further request follows."""
        tokens, seconds, wall = numpy.zeros(prompts), numpy.zeros(prompts), 0.0
        for replay in replays:
            last = max(answered.reply.started for answered in replay)
            until = min(answered.reply.end for answered in replay if answered.reply.end > last)
            wall += until - min(answered.reply.started for answered in replay)
            for answered in replay:
                tokens[answered.prompt] += answered.tokens_by(until)
                seconds[answered.prompt] += min(answered.reply.end, until) - answered.reply.started
        return cls([answered.reply for replay in replays for answered in replay], tokens, seconds, float(wall))

    def speed(self, configuration: str, together: int, base: Served | None) -> ServedSpeed:
        """The figures, with the speedup over `base` on the same prompts."""
        count, rate = sum(reply.count for reply in self.replies), float(self.tokens.sum()) / self.wall
        several = [reply for reply in self.replies if reply.count > 1]
        later = [(reply.seconds - reply.first_seconds) / (reply.count - 1) for reply in several]
        columns = None if base is None else (self.tokens, self.seconds, base.tokens, base.seconds)
        return ServedSpeed(
            configuration=configuration,
            concurrency=together,
            requests=len(self.replies),
            requests_per_second=rate * len(self.replies) / max(count, 1),
            tokens_per_second=rate,
            in_flight=float(self.seconds.sum()) / self.wall,
            first_seconds=percentiles([reply.first_seconds for reply in self.replies]),
            token_seconds=percentiles(later),
            speedup=UNKNOWN if columns is None else speed_ratio(*columns),
        )


def percentiles(values: Sequence[float]) -> tuple[float, float]:
    """The median and the 95th percentile. NaN without values."""
    if not values:
        return math.nan, math.nan
    return float(numpy.median(values)), float(numpy.quantile(values, 0.95))


def speeds_under(
    clients: Mapping[str, Client],
    prompts: Sequence[Sequence[int]],
    limit: int,
    loads: Sequence[int],
    repeats: int,
    replayed: Mapping[str, Replayed],
    title: str,
) -> list[ServedSpeed]:
    """The speeds of every load on each server, after those of the requests `replayed` one at a time.

    `title` names the server that drafts. Loads and servers alternate in every repeat, so that a slow phase of the
    machine affects all of them.
    """
    served = {(1, name): Served.alone(texts) for name, texts in replayed.items()}
    replays: dict[tuple[int, str], list[list[Answered]]] = {(load, name): [] for load in loads for name in clients}
    progress, order = Progress("under load", repeats * len(replays)), list(replays)
    for repeat in range(repeats):
        for load, name in order if repeat % 2 == 0 else order[::-1]:
            replays[load, name].append(send(clients[name], prompts, limit, load))
            progress.step(note=f"{load} at once")
    served |= {of: Served.under(answered, len(prompts)) for of, answered in replays.items()}
    plain = {load: figures for (load, name), figures in served.items() if name == PLAIN_SERVER}
    return [
        figures.speed(name, load, None) if name == PLAIN_SERVER else figures.speed(title, load, plain.get(load))
        for (load, name), figures in served.items()
    ]


@dataclass(frozen=True)
class CheckSettings:
    """Settings of a check: the prompts, with up to `limit` new tokens after each, `repeats` times.

    If the sampler is not greedy, each repeat of a prompt gives another text. `made` are target and draft of the run, if
    there is a run. `predicted` is the run's greedy acceptance rate at this draft length. `template` is the pair's.
    `seconds` limit a server's start and a reply. `context` is the pair's context, if the check starts the server.
    """

    prompts: Sequence[Sample]
    limit: int
    repeats: int = 3
    sampler: Sampler = GREEDY
    concurrency: tuple[int, ...] = (1, 4, 16)
    made: tuple[Path, Path] | None = None
    predicted: float = math.nan
    template: ChatTemplate | None = None
    seconds: tuple[float, float] = (300.0, 300.0)
    left_out: dict[str, int] = field(default_factory=dict)
    command: str = ""
    context: int | None = None

    @property
    def ids(self) -> list[list[int]]:
        """The token ids of the prompts."""
        return [sample.prompt for sample in self.prompts]

    @property
    def samples(self) -> int:
        """The number of different texts after each prompt."""
        return self.repeats if self.sampler.temperature else 1

    def replies(self, client: Client, prompts: Sequence[Sequence[int]]) -> list[Counts]:
        """The counts of drafted and accepted tokens after each of these prompts."""
        return counts_of(
            [[client.complete(prompt, self.limit, seed) for seed in range(self.samples)] for prompt in prompts]
        )


Begun = Callable[[ServeReport], object]  # gets the report with its first figures, because a later part may fail


@dataclass
class Check:
    """A check in progress. Its parts add to `report`.

    `texts` are the counts of the server that drafts. `files` are target and draft, if they are known.
    """

    settings: CheckSettings
    server: LlamaServer
    replayed: Mapping[str, Replayed]
    texts: list[Counts]
    files: tuple[Path, Path] | None
    report: ServeReport


def check_started(settings: CheckSettings, server: LlamaServer, begun: Begun = lambda report: None) -> ServeReport:
    """Start llama-server with and without the draft and compare them. ServingError if a server fails to serve."""
    assert server.draft is not None
    files = server.target, server.draft
    server = replace(server, parallel=max(settings.concurrency))
    with ExitStack() as stack:
        clients: dict[str, Client] = {
            name: stack.enter_context(opened(started_server, settings.seconds, settings.sampler))
            for name, started_server in ((PLAIN_SERVER, server.plain), (DRAFT_SERVER, server))
        }
        check = _replay(settings, clients, server, files)
        begun(check.report)
        _compare(check, clients)
    if settings.sampler.temperature:
        _other_drafts(check)
    for difference, without in results.option_differences(server, os.environ):
        note(f"without a difference: {' '.join(without.further)}")
        loss = rise_of_tokens(check.texts, _counts_on(settings, without))
        check.report.differences.append(replace(difference, loss=loss))
    return check.report


def check_addresses(settings: CheckSettings, places: Addresses, begun: Begun = lambda report: None) -> ServeReport:
    """Compare running servers. ServingError for a server that does not answer, refuses, or does not draft."""
    with ExitStack() as stack:
        clients = connected(places, settings.seconds[1], stack, settings.sampler, settings.ids)
        target, draft = places.files or (Path(places.model or places.url), Path("?"))
        kind, drawn = Path(clients[DRAFT_SERVER].kind), places.probabilistic
        server = LlamaServer(kind, target, draft, places.n_max or 0, probabilistic=drawn, threads=places.threads)
        check = _replay(settings, clients, server, places.files)
        begun(check.report)
        _compare(check, clients)
    return check.report


def _replay(
    settings: CheckSettings, clients: Mapping[str, Client], server: LlamaServer, files: tuple[Path, Path] | None
) -> Check:
    """Send all prompts one at a time to each server, and report speeds and the acceptance rate.

    An unknown draft length (n_max 0) is read from the counters, which have a place for each drafted token.
    """
    ids, drafting = settings.ids, clients[DRAFT_SERVER]
    for client in clients.values():
        warm(client, ids)
    before = drafting.totals()
    title = f"{len(clients)} servers, one request at a time"
    replayed = interleaved(clients, ids, settings.limit, settings.repeats, title)
    after = drafting.totals()
    totals = None if before is None or after is None else after - before
    texts, notes = counts_of([replies[: settings.samples] for replies in replayed[DRAFT_SERVER]]), list[str]()
    replies = [reply for repeated in replayed[DRAFT_SERVER] for reply in repeated]
    counted = [reply.request_counts for reply in replies if reply.request_counts is not None]
    if len(counted) == len(replies):  # Other users of the server do not change these counts.
        totals = summed(counted)
    if totals is not None and totals.accepted != sum(reply.counts.accepted for reply in replies):
        totals = None
        notes.append(
            "the counters did not rise by the counts of the replies, because several servers answer at this address "
            "or others use it: the rounds that accepted each position are not known"
        )
    if not any(text.drafted for text in texts):
        raise ServingError(
            f"{drafting.url} drafted nothing: it serves without a draft",
            "start it with the draft (llama-server: -md FILE --spec-type draft-simple; vLLM: --speculative-config); "
            "if one address stands for several vLLM servers, give the address of one server, because each has counters",
        )
    accepted = acceptance(f"{drafting.kind}, its own counts", texts, totals)
    server = replace(server, n_max=server.n_max or len(accepted.by_position or ()))
    speeds = speeds_under(clients, ids, settings.limit, (), settings.repeats, replayed, _title(server))
    greedy = not settings.sampler.temperature
    plain = replayed[PLAIN_SERVER] if greedy and PLAIN_SERVER in replayed else []
    pairs = list(zip(plain, replayed[DRAFT_SERVER], strict=True)) if plain else []
    report = ServeReport(
        command=settings.command,
        machine=machine(),
        server=drafting.kind,
        build=drafting.build(),
        served=server.title if drafting.kind == "vllm" else " ".join(server.served),
        n_max=server.n_max,
        sampler=settings.sampler.model_dump(),
        prompts=len(settings.prompts),
        new_tokens=settings.limit,
        left_out=settings.left_out,
        acceptance=[accepted],
        predicted=settings.predicted if greedy else math.nan,
        speeds=speeds,
        same_texts=sum(plain[0].tokens == draft[0].tokens for plain, draft in pairs),
        texts=len(pairs),
        notes=notes,
        digest=digest_of(ids),
        lengths=[*map(len, ids)],
        by_prompt=texts,
        context=settings.context or drafting.context(),
    )
    return Check(settings, server, replayed, texts, files, report)


def _title(server: LlamaServer) -> str:
    return server.title if server.n_max else DRAFT_SERVER


def _compare(check: Check, clients: Mapping[str, Client]) -> None:
    """Add the acceptance of distill's decoder, the differences of files and templates, and the speeds under load."""
    settings, report = check.settings, check.report
    if check.files is not None:
        _decode_ours(check, check.files, clients[DRAFT_SERVER].kind == "vllm")
    if isinstance(drafting := clients[DRAFT_SERVER], LlamaClient):
        _compare_template(check, drafting)
    for client in clients.values():
        client.alone = False
    loads = [count for count in settings.concurrency if count > 1]
    report.speeds = speeds_under(
        clients, settings.ids, settings.limit, loads, settings.repeats, check.replayed, _title(check.server)
    )


def _decode_ours(check: Check, files: tuple[Path, Path], vllm: bool) -> None:
    """Add the acceptance of distill's decoder with the served files and with differing files of the run."""
    settings, report, length = check.settings, check.report, check.server.n_max
    from_run = results.from_run(files, settings.made)
    in_pair = results.in_pair(files)
    if not length:
        report.differences += from_run + in_pair
        report.notes.append("the server does not show its draft length: give --n-max for the figures of our decoder")
        return
    rules = ServerRules(settings.sampler, length, check.server.probabilistic, vllm)

    def refer_to(which: str, pair: tuple[Path, Path]) -> list[Counts]:
        texts = rules.decode_files(*pair, settings.ids, settings.limit, settings.samples, check.server.threads)
        counts = counts_of(texts)
        report.reference = acceptance(results.OURS + which, counts)
        report.acceptance.append(report.reference)
        report.short = rise_of_tokens(check.texts, counts)
        return counts

    served = refer_to("the same files", files)
    if from_run:
        assert settings.made is not None
        loss = rise_of_tokens(served, refer_to("the run's own files", settings.made))
        from_run = [replace(difference, loss=loss) for difference in from_run]
    report.differences += from_run + in_pair


def _counts_on(settings: CheckSettings, server: LlamaServer) -> list[Counts]:
    """The counts of drafted and accepted tokens of a server that is started for this measurement."""
    with opened(replace(server, parallel=1), settings.seconds, settings.sampler) as client:
        return settings.replies(client, settings.ids)


def _other_drafts(check: Check) -> None:
    """Add the acceptance of a server that makes drafts in the other way: drawn, or the best tokens."""
    server, report = check.server, check.report
    if not server.has(SAMPLING):
        report.notes.append(f"this build lacks {SAMPLING} of newer builds: it drafts the draft's best tokens")
        return
    other = replace(server, probabilistic=not server.probabilistic)
    note(f"the same with {other.title}")
    counts = _counts_on(check.settings, other)
    kind = "drawn drafts" if other.probabilistic else "best tokens drafted"
    report.acceptance.insert(1, acceptance(f"llama-server, {kind}", counts))


def _compare_template(check: Check, client: LlamaClient) -> None:
    """Add the difference of the server's chat template from the pair's, and its cost on conversations."""
    settings, report, template = check.settings, check.report, check.settings.template
    if template is None:
        return
    messages = [{"role": "user", "content": results.PROBE}]
    try:
        ours, theirs = template.text(messages), client.rendered(messages)
    except (ServingError, ValueError):
        report.notes.append("the server renders no conversation, so templates were not compared")
        return
    difference = results.template_difference(ours, theirs)
    before, there, after = ours.partition(results.PROBE)
    if difference is None or not there:
        return
    conversations = {}  # The user's message of each prompt with one message, by the prompt's number.
    for place, prompt in enumerate(settings.prompts):
        text = template.tokenizer.decode(prompt.prompt)
        if text.startswith(before) and text.endswith(after) and len(text) > len(before) + len(after):
            conversations[place] = text[len(before) : len(text) - len(after)]
    if not conversations:
        report.notes.append("no prompt is a conversation of one message, so the template's cost was not measured")
        report.differences.append(difference)
        return
    asked = [client.rendered([{"role": "user", "content": text}]) for text in conversations.values()]
    texts = settings.replies(client, [client.tokenize(text) for text in asked])
    report.acceptance.append(acceptance(f"{client.kind}, through its own template", texts))
    loss = rise_of_tokens(texts, [check.texts[place] for place in conversations])
    report.differences.append(replace(difference, loss=loss))
