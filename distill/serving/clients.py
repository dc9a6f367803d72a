"""Servers under test, started here or running, and prompts replayed on them and by our own decoder.

Completions of token ids come with llama-server's own counts, or vLLM's from its /metrics. vLLM's formats are those of
the version in server_commands.VLLM.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from pydantic import BaseModel, TypeAdapter, ValidationError

from distill.decoding.decode import Decoded, decode_text
from distill.decoding.drafters import ModelDrafter
from distill.decoding.lengths import Fixed, Proposal
from distill.decoding.rules import Rules
from distill.engines.loaded import load_pair
from distill.engines.pairs import compare_pair
from distill.engines.server_commands import DRAWN_AMONG
from distill.errors import ServingError
from distill.http import Received
from distill.progress import Progress
from distill.recipe import SamplerSettings, Target, parse_section
from distill.sampler import Sampler
from distill.serving.results import Counts, Text, totals_of
from distill.serving.server import Event, Http, LlamaServer, Running, started
from distill.tables import Numbers

# Whatever else could shape a distribution is switched off: a server has defaults of its own, vLLM's from the model's
# generation_config.json. llama-server's samplers come in the order of this list, which is the order of ours.
LLAMA_PLAIN: dict[str, Any] = {
    "samplers": ["temperature", "top_k", "top_p", "min_p"],
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
    "mirostat": 0,
}
VLLM_PLAIN: dict[str, Any] = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
GREEDY = SamplerSettings(temperature=0)
PLAIN_SERVER, DRAFT_SERVER = "plain", "draft"  # names of the two servers
SETTLED_SECONDS, PATIENCE_SECONDS = 0.05, 2.0  # vLLM's counters are written by another task of it than replies
WARM_TOKENS = 8


@dataclass(frozen=True)
class Reply(Text):
    """One completion: `count` tokens, seconds until the first of them and until the end, as this client saw them.

    `cached` are the tokens of the prompt that the server did not compute again, `later_seconds` those that it took for
    all tokens behind the first, by its own clock. `started` is the moment at which the request was sent, `times` are
    those of its events with tokens (perf_counter): a llama-server sends one for each token, vLLM for each step. The
    counts of a server that counts for no single request are those of a text without a draft; `own` are vLLM's with it.
    """

    count: int
    first_seconds: float
    seconds: float
    started: float = 0.0
    times: Sequence[float] = ()
    cached: int = 0
    later_seconds: float | None = None
    own: Counts | None = None

    @property
    def end(self) -> float:
        """The moment at which it was complete."""
        return self.started + self.seconds


class Client(ABC):
    """A server that continues token ids under `sampler`; threads may share it once `alone` is false.

    While `alone` is true, requests come one at a time.
    """

    kind: str
    prefix: str  # of its metrics

    def __init__(self, http: Http, sampler: SamplerSettings = GREEDY) -> None:
        self.http, self.url, self.sampler, self.alone = http, http.url, sampler, True

    def sampling(self, seed: int) -> dict[str, Any]:
        """The sampler's settings and a seed, as both kinds of server name them."""
        return self.sampler.model_dump() | {"seed": seed}

    @abstractmethod
    def complete(self, ids: Sequence[int], limit: int, seed: int = 0) -> Reply:
        """Up to `limit` tokens after these, from a cold cache; `seed` is that of a sampled text."""

    @abstractmethod
    def drafts(self) -> bool | None:
        """Whether it speculates; None where it does not say."""

    @abstractmethod
    def build(self) -> str:
        """The build or version that it names."""

    def totals(self) -> Counts | None:
        """Its counters of speculation, summed over engines; None where it shows none."""
        received = self.http.get("/metrics")
        return totals_of(received.content.decode("utf-8", "replace"), self.prefix) if received.status == 200 else None


def _timed(written: Sequence[Sequence[int]], received: Received) -> tuple[list[int], float, Sequence[float]]:
    """The tokens of a reply's events, the seconds until the first of them, and the moments of those that hold some.

    What follows them at once, such as the counts of tokens, would look like a step that took no time.
    """
    times, holding = received.times, sum(map(bool, written))
    first_seconds = times[0] - received.started if times else received.seconds
    return [token for tokens in written for token in tokens], first_seconds, times[: holding or None]


class LlamaTimings(BaseModel):
    """What llama-server counts for a request: generated, drafted and accepted tokens, cached ones of the prompt."""

    predicted_n: int | None = None
    predicted_ms: float = 0.0
    draft_n: int = 0
    draft_n_accepted: int = 0
    cache_n: int = 0


class LlamaEvent(Event):
    """An event of /completion; the last has the timings."""

    tokens: Sequence[int] = ()
    timings: LlamaTimings | None = None


class LlamaModelMeta(BaseModel):
    """What llama-server says of its model."""

    n_vocab: int | None = None


class ServedModel(BaseModel):
    """A model of /v1/models."""

    id: str
    meta: LlamaModelMeta | None = None


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
    """A llama-server, started by us (with --metrics) or by the user."""

    kind, prefix = "llama-server", "llamacpp"

    def complete(self, ids: Sequence[int], limit: int, seed: int = 0) -> Reply:
        """Up to `limit` tokens, without the prompt cache."""
        body = LLAMA_PLAIN | self.sampling(seed) | {"prompt": list(ids), "n_predict": limit}
        body |= {"cache_prompt": False, "return_tokens": True}
        events, received = self.http.stream("/completion", LlamaEvent, body | {"stream": True})
        timings = events[-1].timings
        if timings is None:
            raise ServingError(f"{self.url} gives no timings with its replies", "llama-server of this year does")
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

    def drafts(self) -> bool | None:
        """Whether its slots speculate."""
        received = self.http.get("/slots")
        try:
            slots = LlamaSlots.validate_json(received.content if received.status == 200 else b"[]")
        except ValidationError:
            return None
        said = [slot.speculative for slot in slots if slot.speculative is not None]
        return any(said) if said else None

    def vocabulary_size(self) -> int | None:
        """Tokens of its model; None where it does not say."""
        return next((one.meta.n_vocab for one in self.http.find("/v1/models", ServedModels).data if one.meta), None)

    def tokenize(self, text: str) -> list[int]:
        """The ids of a text as the server reads it, control tokens in it as such."""
        return self.http.read(
            "/tokenize", LlamaIds, {"content": text, "add_special": False, "parse_special": True}
        ).tokens

    def rendered(self, messages: list[dict[str, str]]) -> str:
        """A conversation through the server's chat template."""
        return self.http.read("/apply-template", LlamaPrompt, {"messages": messages}).prompt


class LlamaSlot(BaseModel):
    """What a slot says of itself."""

    speculative: bool | None = None


LlamaSlots = TypeAdapter(list[LlamaSlot])  # /slots


class PromptTokens(BaseModel):
    """Of the tokens of a prompt."""

    cached_tokens: int | None = None


class VllmUsage(BaseModel):
    """What vLLM counts for a request."""

    completion_tokens: int | None = None
    prompt_tokens_details: PromptTokens | None = None


class VllmChoice(BaseModel):
    """The tokens of an event."""

    token_ids: list[int] | None = None


class VllmDrafting(BaseModel):
    """What vLLM drafted for one request: the rounds that accepted 0, 1, … tokens, and their sums."""

    acceptance_histogram: list[int]
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int

    @property
    def counts(self) -> Counts:
        """As of a server's counters."""
        exactly = self.acceptance_histogram
        by_position = tuple(sum(exactly[place:]) for place in range(1, len(exactly)))
        return Counts(self.num_spec_steps, self.num_draft_tokens, self.num_accepted_draft_tokens, by_position)


class VllmMetrics(BaseModel):
    """Of a server that was started with --per-request-spec-decode-metrics."""

    speculative_decoding: VllmDrafting | None = None


class VllmEvent(Event):
    """An event of /v1/completions; the last ones have usage and metrics."""

    choices: Sequence[VllmChoice] = ()
    usage: VllmUsage | None = None
    metrics: VllmMetrics | None = None


class VllmVersion(BaseModel):
    """/version."""

    version: str | None = None


class VllmClient(Client):
    """A vLLM server that the user started.

    A reply without counts of its own gets, while `alone` is true, what the server's counters rose by.
    """

    kind, prefix, counts_requests = "vllm", "vllm", False

    def __init__(self, http: Http, sampler: SamplerSettings = GREEDY, model: str | None = None) -> None:
        super().__init__(http, sampler)
        names = [model] if model else [one.id for one in http.read("/v1/models", ServedModels).data]
        if len(names) != 1:
            raise ServingError(f"{self.url} serves {len(names)} models: {', '.join(names)[:200]}", "name one: --model")
        self.model = names[0]

    def complete(self, ids: Sequence[int], limit: int, seed: int = 0) -> Reply:
        """Up to `limit` tokens; a salt of its own keeps the request out of the prefix cache."""
        body = VLLM_PLAIN | self.sampling(seed)
        body |= {"top_k": self.sampler.top_k or -1}  # which every vLLM takes for none; some refuse 0
        body |= {"model": self.model, "prompt": list(ids), "max_tokens": limit}
        body |= {"cache_salt": secrets.token_hex(16), "return_token_ids": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        before = self.totals() if self.alone and not self.counts_requests else None
        events, received = self.http.stream("/v1/completions", VllmEvent, body)
        written = [[token for one in event.choices for token in one.token_ids or ()] for event in events]
        tokens, first_seconds, times = _timed(written, received)
        usage = next((event.usage for event in reversed(events) if event.usage is not None), VllmUsage())
        count = len(tokens) if usage.completion_tokens is None else usage.completion_tokens
        cached = (usage.prompt_tokens_details or PromptTokens()).cached_tokens or 0
        drafting = (event.metrics.speculative_decoding for event in events if event.metrics is not None)
        own = next((one.counts for one in drafting if one is not None), None)
        self.counts_requests = own is not None
        risen = own if own is not None or before is None else self._risen(before)
        counts = Counts.of_text(count, *((risen.drafted, risen.accepted, risen.rounds) if risen else ()))
        return Reply(tokens, counts, count, first_seconds, received.seconds, received.started, times, cached, own=own)

    def _risen(self, before: Counts) -> Counts:
        """What the counters rose by."""
        risen = self._settled(before) - before
        if min(risen.rounds, risen.drafted, risen.accepted) < 0:
            what = f"the counters of {self.url} fell: another server answered, or it was started again"
            raise ServingError(what, "they are one server's: give the address of one of them, not of a load balancer")
        return risen

    def _settled(self, before: Counts) -> Counts:
        """The counters once they stand still."""
        deadline, last = time.monotonic() + PATIENCE_SECONDS, before
        while True:
            found = self.totals() or before
            if (found == last and found != before) or time.monotonic() > deadline:
                return found
            last = found
            time.sleep(SETTLED_SECONDS)

    def build(self) -> str:
        """/version; empty where there is none."""
        return self.http.find("/version", VllmVersion).version or ""

    def drafts(self) -> bool:
        """Whether it speculates: its counters exist then alone."""
        return self.totals() is not None


def client_of(http: Http, sampler: SamplerSettings = GREEDY, model: str | None = None) -> Client:
    """The client of a server that runs, of the kind that it is found to be."""
    if kind_of_server(http) == "vllm":
        return VllmClient(http, sampler, model)
    return LlamaClient(http, sampler)


def kind_of_server(http: Http) -> str:
    """llama-server or vllm, by what only one of them has; ServingError for another server, or none."""
    if http.find("/props", LlamaProps).build_info is not None:
        return "llama-server"
    if http.find("/version", VllmVersion).version is not None:
        return "vllm"
    said = http.words(http.get("/props").content)
    raise ServingError(
        f"{http.url} is neither llama-server nor vLLM, by /props ({said}) and /version",
        "correct the address",
    )


# ── clients of servers that are started here, and of those that run ──


@dataclass(frozen=True)
class Addresses:
    """Where servers run. `files` are target and draft as GGUF, for our decoder,
    `n_max` the draft length that the server was started with, None: found in its counters; `probabilistic`: it draws
    its drafts."""

    url: str
    plain: str | None = None
    key: str | None = None
    model: str | None = None
    files: tuple[Path, Path] | None = None
    n_max: int | None = None
    probabilistic: bool = False
    threads: int | None = None


@contextmanager
def opened(
    server: LlamaServer, seconds: tuple[float, float], sampler: SamplerSettings = GREEDY
) -> Iterator[LlamaClient]:
    """A client of a llama-server that runs within the block; ServingError where it has a draft and leaves it unused."""
    with started(server, seconds[0]) as running:

        def death() -> str | None:
            found = running.death()
            return None if found is None else f"{server.binary} ended ({found}); its last lines:\n{running.tail()}"

        with contextlib.closing(Http(running.url, seconds[1], death=death)) as http:
            client = LlamaClient(http, sampler)
            if server.draft is not None and client.drafts() is False:
                raise _unused(server, running)
            yield client


def _unused(server: LlamaServer, running: Running) -> ServingError:
    """Why a server runs without the draft that it was given: llama-server says so in its log alone."""
    reason = compare_pair(str(server.target), str(server.draft)).llama_cpp
    words = ("draft", "specul", "vocab")
    lines = [line for line in running.text().splitlines() if " I " not in line and any(word in line for word in words)]
    shown = "".join(f"\n    {line[:200]}" for line in lines[-4:])
    return ServingError(
        f"{server.binary} serves {server.target} without its draft{f': {reason}' if reason else ''}{shown}",
        "transplant the target's vocabulary into the draft (`distill transplant`)" if reason else "see its whole log",
    )


def connected(
    places: Addresses, seconds: float, stack: ExitStack, sampler: SamplerSettings, prompts: Sequence[Sequence[int]]
) -> dict[str, Client]:
    """Clients of the servers that run; ServingError for one in the other's place, or whose model lacks an id of the
    prompts: it would answer with the text of another."""
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
            raise ServingError(
                f"{client.url} serves without a draft: it says so itself",
                "start it with the draft; llama-server drops one whose vocabulary does not fit and only logs it",
            )
        size = client.vocabulary_size() if isinstance(client, LlamaClient) else None
        if size is not None and largest >= size:
            raise ServingError(
                f"{client.url} serves a model of {size} tokens, and the prompts have token {largest}",
                "it is another model than the prompts are for: correct --url, or the run",
            )
    return clients


# ── prompts replayed on servers: cold caches, one request at a time ──

Replayed = Sequence[Sequence[Reply]]  # of one configuration, by prompt and repeat, one request at a time


def sums_of(texts: Replayed) -> tuple[Numbers, Numbers]:
    """Tokens [P] and seconds [P] of all replies, by prompt."""
    tokens, seconds = ([sum(getattr(reply, name) for reply in own) for own in texts] for name in ("count", "seconds"))
    return numpy.array(tokens, float), numpy.array(seconds, float)


def warm(client: Client, prompts: Sequence[Sequence[int]]) -> None:
    """One throw-away text: lazily made buffers and kernels are not to be measured."""
    client.complete(prompts[0], WARM_TOKENS)


def interleaved(
    clients: Mapping[str, Client], prompts: Sequence[Sequence[int]], limit: int, repeats: int, title: str
) -> dict[str, list[list[Reply]]]:
    """Every prompt on every server, one request at a time; the servers' order turns from prompt to prompt.

    Sampled texts of one prompt differ by their seed, which is the number of the repeat.
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
                        f"{client.url} took {reply.cached} tokens of a prompt from its cache, though it was asked not "
                        "to",
                        "switch its prompt cache off: the times would be of a warm one",
                    )
                replayed[name][place].append(reply)
            progress.step()
    return replayed


# ── the same prompts by our decoder, counted as the server counts ──


class ServerDrafter(ModelDrafter):
    """A draft that goes on behind an end token, as llama-server's does: its drafted tokens are counted alike."""

    def propose(self, context: Sequence[int], limit: int, ends: Collection[int]) -> Proposal:
        """A chain, whatever ends a text."""
        return super().propose(context, limit, ())


@dataclass(frozen=True)
class ServerRules:
    """How a server decodes: its sampler, tokens drafted at most, and whether drafts are drawn or the best tokens.

    Drawn ones (`probabilistic`) come from the draft at the served temperature, whatever else the sampler does, of a
    llama-server from its DRAWN_AMONG likeliest tokens, and are verified by rejection sampling. Best ones are compared
    with the target's own draw by llama-server; vLLM rejects them as drafts of certainty, which accepts as many.
    """

    sampler: Sampler
    n_max: int
    probabilistic: bool = False
    vllm: bool = False

    def decode_files(
        self, target: Path, draft: Path, prompts: Sequence[Sequence[int]], limit: int, samples: int, threads: int | None
    ) -> list[list[Text]]:
        """Our decoder's `samples` texts behind each prompt, from cold caches."""
        place = parse_section(Target, {"model": str(target)})
        room = max(map(len, prompts)) + limit + 2 * self.n_max + 1
        drawn = Sampler(self.sampler.temperature, 0 if self.vllm else DRAWN_AMONG)
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
    """A decoded text with the counts that llama-server has for it.

    Tokens behind the end of a text are drafted, and not accepted. Nor is a drafted end token, unless it is the last of
    its round (common_sampler_sample_and_accept_n): it counts as the target's own.
    """
    drafted, accepted = sum(r.drafted for r in result.rounds), sum(result.from_draft)
    last = next((place for place, drawn in enumerate(reversed(result.from_draft)) if not drawn), 0)
    if last and last < result.rounds[-1].drafted and result.rounds[-1].accepted >= last:
        accepted -= 1
    return Text(result.tokens, Counts.of_text(len(result.tokens), drafted, accepted))


def vllm_text(result: Decoded, prompt: int, limit: int, ends: Collection[int]) -> Text:
    """A text that was decoded beyond its end, cut there, with the counts that vLLM has for it: every round that began
    before the end, whole (v1/core/sched/scheduler.py). `prompt` are the tokens before the text."""
    stop = next((place for place, token in enumerate(result.tokens) if token in ends), limit - 1) + 1
    stop = min(stop, limit, len(result.tokens))
    # The target's context lacks the text's last token, which the round's step reads.
    rounds = [r for r in result.rounds if r.depth - prompt + 1 < stop]
    drafted, accepted = sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)
    return Text(result.tokens[:stop], Counts.of_text(stop, drafted, accepted, len(rounds)))
