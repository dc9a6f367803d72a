"""`distill serve-check`: a pair on the user's own server, with and without its draft, and what explains a shortfall.

The servers are started here, or already run.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy

from distill.data.chat_template import ChatTemplate
from distill.data.samples import Sample
from distill.engines.server_commands import SAMPLING
from distill.errors import ServingError
from distill.http import Unanswered, at_once
from distill.machine import machine
from distill.progress import Progress, note
from distill.recipe import SamplerSettings
from distill.sampler import Sampler
from distill.serving import results
from distill.serving.clients import (
    DRAFT_SERVER,
    GREEDY,
    PLAIN_SERVER,
    Addresses,
    Client,
    LlamaClient,
    Replayed,
    Reply,
    ServerRules,
    connected,
    interleaved,
    opened,
    sums_of,
    warm,
)
from distill.serving.results import Counts, ServedSpeed, ServeReport, acceptance, counts_of, rise_of_tokens, summed
from distill.serving.server import LlamaServer
from distill.tables import UNKNOWN, Numbers, speed_ratio

PASSES = 2  # requests for each that is sent at once, at least


# ── Servers under load: a fixed number of requests at once, each followed by the next, and what users wait for ──


@dataclass(frozen=True)
class Answered:
    """A request to a prompt, by its place, that was answered."""

    prompt: int
    reply: Reply

    def tokens_by(self, moment: float) -> float:
        """The tokens that had arrived by then."""
        if self.reply.end <= moment or not len(self.reply.times):
            return self.reply.count
        arrived = sum(one <= moment for one in self.reply.times)
        return self.reply.count * arrived / len(self.reply.times)


def send(client: Client, prompts: Sequence[Sequence[int]], limit: int, together: int) -> list[Answered]:
    """The requests of one replay, answered, this many at once; prompts are taken again where they are fewer.

    The first fault ends all.
    """
    ended = threading.Event()

    def ask(number: int) -> tuple[int, Answered]:
        turn, prompt = divmod(number, len(prompts))
        if ended.is_set():
            raise Unanswered("the load ended")
        return number, Answered(prompt, client.complete(prompts[prompt], limit, turn))

    waiting = deque(range(max(len(prompts), PASSES * together)))
    with contextlib.closing(at_once(ask, waiting, lambda: together, ended.set)) as answered:
        return [request for _, request in sorted(answered, key=lambda one: one[0])]


@dataclass(frozen=True)
class Served:
    """What a configuration did under a load: the `wall` seconds that the load was on, with the tokens [P] and seconds
    [P] of the requests to each of P prompts in that time; and all replies."""

    replies: Sequence[Reply]
    tokens: Numbers
    seconds: Numbers
    wall: float

    @classmethod
    def alone(cls, replayed: Replayed) -> Served:
        """Of requests that were sent one at a time, other servers' between them."""
        tokens, seconds = sums_of(replayed)
        return cls([reply for own in replayed for reply in own], tokens, seconds, float(seconds.sum()))

    @classmethod
    def under(cls, replays: Sequence[Sequence[Answered]], prompts: int) -> Served:
        """Of whole replays. A load of this many at once is on until the first request ends that none follows: the rest
        would count a server that is less and less loaded."""
        tokens, seconds, wall = numpy.zeros(prompts), numpy.zeros(prompts), 0.0
        for replay in replays:
            last = max(one.reply.started for one in replay)
            until = min(one.reply.end for one in replay if one.reply.end > last)
            wall += until - min(one.reply.started for one in replay)
            for one in replay:
                tokens[one.prompt] += one.tokens_by(until)
                seconds[one.prompt] += min(one.reply.end, until) - one.reply.started
        return cls([one.reply for replay in replays for one in replay], tokens, seconds, float(wall))

    def speed(self, configuration: str, together: int, base: Served | None) -> ServedSpeed:
        """The figures, with the speedup over `base` of the same prompts."""
        count, rate = sum(reply.count for reply in self.replies), float(self.tokens.sum()) / self.wall
        later = [(one.seconds - one.first_seconds) / (one.count - 1) for one in self.replies if one.count > 1]
        columns = None if base is None else (self.tokens, self.seconds, base.tokens, base.seconds)
        return ServedSpeed(
            configuration=configuration,
            concurrency=together,
            requests=len(self.replies),
            requests_per_second=rate * len(self.replies) / max(count, 1),
            tokens_per_second=rate,
            in_flight=float(self.seconds.sum()) / self.wall,
            first_seconds=percentiles([one.first_seconds for one in self.replies]),
            token_seconds=percentiles(later),
            speedup=UNKNOWN if columns is None else speed_ratio(*columns),
        )


def percentiles(values: Sequence[float]) -> tuple[float, float]:
    """The median and the 95th percentile; NaN of none."""
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
    """Every load on each server, behind what was `replayed` one at a time; `title` is what the server that drafts is
    called.

    Loads and servers take turns in every repeat, so that a slow spell of the machine meets all of them.
    """
    served = {(1, name): Served.alone(own) for name, own in replayed.items()}
    replays: dict[tuple[int, str], list[list[Answered]]] = {(load, name): [] for load in loads for name in clients}
    progress, order = Progress("under load", repeats * len(replays)), list(replays)
    for repeat in range(repeats):
        for load, name in order if repeat % 2 == 0 else order[::-1]:
            replays[load, name].append(send(clients[name], prompts, limit, load))
            progress.step(note=f"{load} at once")
    served |= {of: Served.under(found, len(prompts)) for of, found in replays.items()}
    return [
        own.speed(
            name if name == PLAIN_SERVER else title,
            load,
            served.get((load, PLAIN_SERVER)) if name != PLAIN_SERVER else None,
        )
        for (load, name), own in served.items()
    ]


@dataclass(frozen=True)
class CheckSettings:
    """What is checked: the prompts, up to `limit` new tokens after each, `repeats` times.

    Under a sampler that is not greedy, each repeat of a prompt is a text of its own. `made` are the run's own target
    and draft, where there is a run; `predicted` is its greedy acceptance rate at this draft length. `template` is the
    pair's own. `seconds` limit a server's start and a reply.
    """

    prompts: Sequence[Sample]
    limit: int
    repeats: int = 3
    sampler: SamplerSettings = GREEDY
    concurrency: tuple[int, ...] = (1, 4, 16)
    made: tuple[Path, Path] | None = None
    predicted: float = math.nan
    template: ChatTemplate | None = None
    seconds: tuple[float, float] = (300.0, 300.0)
    left_out: dict[str, int] = field(default_factory=dict)
    command: str = ""

    @property
    def ids(self) -> list[list[int]]:
        """The token ids of the prompts."""
        return [one.prompt for one in self.prompts]

    @property
    def samples(self) -> int:
        """Different texts behind each prompt."""
        return self.repeats if self.sampler.temperature else 1

    def replies(self, client: Client, prompts: Sequence[Sequence[int]]) -> list[Counts]:
        """What is drafted and accepted behind each of these prompts."""
        return counts_of(
            [[client.complete(prompt, self.limit, seed) for seed in range(self.samples)] for prompt in prompts]
        )


Begun = Callable[[ServeReport], object]  # is given the report with its first figures: a part that adds to it may fail


@dataclass
class Check:
    """A check in progress: its parts add to `report`.

    `texts` are the counts of the server that drafts. `files` are target and draft, where they are known.
    """

    settings: CheckSettings
    server: LlamaServer
    replayed: Mapping[str, Replayed]
    texts: list[Counts]
    files: tuple[Path, Path] | None
    report: ServeReport


def check_started(settings: CheckSettings, server: LlamaServer, begun: Begun = lambda report: None) -> ServeReport:
    """Start llama-server with and without the draft and compare them; ServingError for one that fails to serve."""
    assert server.draft is not None
    files = server.target, server.draft
    server = replace(server, parallel=max(settings.concurrency))
    with ExitStack() as stack:
        clients: dict[str, Client] = {
            name: stack.enter_context(opened(one, settings.seconds, settings.sampler))
            for name, one in ((PLAIN_SERVER, server.plain), (DRAFT_SERVER, server))
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
    """Compare servers that run; ServingError for one that does not answer, refuses, or does not draft."""
    with ExitStack() as stack:
        clients = connected(places, settings.seconds[1], stack, settings.sampler, settings.ids)
        target, draft = places.files or (Path(places.model or places.url), Path("?"))
        server = LlamaServer(
            Path(clients[DRAFT_SERVER].kind),
            target,
            draft,
            places.n_max or 0,
            probabilistic=places.probabilistic,
            threads=places.threads,
        )
        check = _replay(settings, clients, server, places.files)
        begun(check.report)
        _compare(check, clients)
    return check.report


def _replay(
    settings: CheckSettings, clients: Mapping[str, Client], server: LlamaServer, files: tuple[Path, Path] | None
) -> Check:
    """All prompts one at a time on each server: speeds, and the acceptance rate of the one that drafts.

    A draft length that is not known (n_max 0) is read from the counters, which have a place for each drafted token.
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
    replies = [reply for own in replayed[DRAFT_SERVER] for reply in own]
    given = [reply.own for reply in replies if reply.own is not None]
    if len(given) == len(replies):  # whoever else uses the server
        totals = summed(given)
    if totals is not None and totals.accepted != sum(reply.counts.accepted for reply in replies):
        totals = None
        notes.append(
            "the counters did not rise by what the replies say: several servers answer at this address, or others use "
            "it, so the rounds that accepted each position are not known"
        )
    if not any(text.drafted for text in texts):
        raise ServingError(
            f"{drafting.url} drafted nothing: it serves without a draft",
            "start it with the draft (llama-server: -md FILE --spec-type draft-simple; vLLM: --speculative-config); "
            "of several vLLM servers behind one address give that of one: counters are one server's",
        )
    own = acceptance(f"{drafting.kind}, its own counts", texts, totals)
    server = replace(server, n_max=server.n_max or len(own.by_position or ()))
    speeds = speeds_under(clients, ids, settings.limit, (), settings.repeats, replayed, _title(server))
    greedy = not settings.sampler.temperature
    pairs = (
        list(zip(replayed[PLAIN_SERVER], replayed[DRAFT_SERVER], strict=True))
        if greedy and PLAIN_SERVER in replayed
        else []
    )
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
        acceptance=[own],
        predicted=settings.predicted if greedy else math.nan,
        speeds=speeds,
        same_texts=sum(plain[0].tokens == draft[0].tokens for plain, draft in pairs),
        texts=len(pairs),
        notes=notes,
    )
    return Check(settings, server, replayed, texts, files, report)


def _title(server: LlamaServer) -> str:
    return server.title if server.n_max else DRAFT_SERVER


def _compare(check: Check, clients: Mapping[str, Client]) -> None:
    """Add what our decoder accepts, how files and templates differ, and the speeds under load."""
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
    """Add what our decoder accepts with the served files and, where they are others, with the run's own, and how the
    files differ, with the loss."""
    settings, report, length = check.settings, check.report, check.server.n_max
    from_run = results.from_run(files, settings.made)
    in_pair = results.in_pair(files)
    if not length:
        report.differences += from_run + in_pair
        report.notes.append("the server does not say how many tokens it drafts: give --n-max for our decoder's figures")
        return
    rules = ServerRules(Sampler.of(settings.sampler), length, check.server.probabilistic, vllm)

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
    """What is drafted and accepted by a server that is started for this alone."""
    with opened(replace(server, parallel=1), settings.seconds, settings.sampler) as client:
        return settings.replies(client, settings.ids)


def _other_drafts(check: Check) -> None:
    """Add what the server accepts whose drafts are made the other way, drawn or not."""
    server, report = check.server, check.report
    if not server.has(SAMPLING):
        report.notes.append(f"this build has no {SAMPLING}, which newer builds have: it drafts the draft's best tokens")
        return
    other = replace(server, probabilistic=not server.probabilistic)
    note(f"the same with {other.title}")
    counts = _counts_on(check.settings, other)
    kind = "drawn drafts" if other.probabilistic else "best tokens drafted"
    report.acceptance.insert(1, acceptance(f"llama-server, {kind}", counts))


def _compare_template(check: Check, client: LlamaClient) -> None:
    """Add the difference of the server's chat template from the pair's own, and what it costs on conversations."""
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
    before, there, behind = ours.partition(results.PROBE)
    if difference is None or not there:
        return
    conversations = {}  # the user's message of each prompt that is a conversation of one, by the prompt's place
    for place, prompt in enumerate(settings.prompts):
        text = template.tokenizer.decode(prompt.prompt)
        if text.startswith(before) and text.endswith(behind) and len(text) > len(before) + len(behind):
            conversations[place] = text[len(before) : len(text) - len(behind)]
    if not conversations:
        report.notes.append("no prompt is a conversation of one message, so the template's cost was not measured")
        report.differences.append(difference)
        return
    asked = [client.rendered([{"role": "user", "content": text}]) for text in conversations.values()]
    texts = settings.replies(client, [client.tokenize(text) for text in asked])
    report.acceptance.append(acceptance(f"{client.kind}, through its own template", texts))
    loss = rise_of_tokens(texts, [check.texts[place] for place in conversations])
    report.differences.append(replace(difference, loss=loss))
