"""`distill serve-check`: a pair on the user's own server, with and without its draft, and what explains a shortfall.

The servers are started here, or run already. Legend: τ tokens per round.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from distill.errors import ServingError
from distill.intervals import UNKNOWN, Interval
from distill.machine import machine
from distill.progress import note
from distill.results.serving_results import (
    ChosenSettings,
    Difference,
    ServedAcceptance,
    ServedClass,
    ServedSpeed,
    ServeReport,
)
from distill.serving import differences, replaying
from distill.serving.choose import choose
from distill.serving.clients import Client, LlamaClient
from distill.serving.llama_server import LlamaServer
from distill.serving.markdown import Reference, sentences
from distill.serving.opening import DRAFT, PLAIN, Addresses, connected, opened, require_vocabulary
from distill.texts import Prompt


@dataclass(frozen=True)
class Conversation:
    """How the pair's own chat template writes messages, and the text of ids."""

    render: Callable[[list[dict[str, str]]], str]
    text: Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class CheckSettings:
    """What is checked: the prompts, how many tokens behind each, and how often.

    `made` are the run's own target and draft, where there is a run; `predicted` its acceptance at this draft length.
    `choosing` are validation prompts, none where no settings are to be chosen. `seconds` are those that a server's
    start and a reply may take.
    """

    prompts: Sequence[Prompt]
    limit: int
    repeats: int = 3
    concurrency: tuple[int, ...] = (1, 4, 16)
    choosing: Sequence[Sequence[int]] = ()
    whole_grid: bool = False
    made: tuple[Path, Path] | None = None
    predicted: float = math.nan
    conversation: Conversation | None = None
    seconds: tuple[float, float] = (300.0, 300.0)
    left_out: dict[str, int] = field(default_factory=dict)
    command: str = ""

    @property
    def ids(self) -> list[list[int]]:
        """The token ids of the prompts."""
        return [prompt.ids for prompt in self.prompts]


@dataclass
class Findings:
    """What was measured so far; `texts` are the counts of the server that drafts, `build` its own word for itself.

    `files` are target and draft, where they are known; `reference` is our decoder with them, or with the run's own.
    """

    server: LlamaServer
    build: str
    replayed: dict[str, replaying.Replayed]
    texts: list[replaying.TextCounts]
    files: tuple[Path, Path] | None = None
    acceptance: list[ServedAcceptance] = field(default_factory=list)
    reference: Reference | None = None
    speeds: list[ServedSpeed] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check_started(settings: CheckSettings, server: LlamaServer) -> ServeReport:
    """Start llama-server with and without the draft and compare them; ServingError for one that fails to serve."""
    assert server.draft is not None
    many = replace(server, parallel=max(settings.concurrency))
    with ExitStack() as stack:
        clients: dict[str, Client] = {
            name: stack.enter_context(opened(one, settings.seconds))
            for name, one in ((PLAIN, many.plain), (DRAFT, many))
        }
        found = _replay(settings, clients, many, (server.target, server.draft))
        _compare(settings, clients, found)
    for difference, without in differences.option_differences(many, os.environ):
        found.differences.append(differences.measured(difference, _loss(settings, without, found)))
    choice = None
    if settings.choosing:
        choice = choose(
            many,
            settings.choosing,
            settings.ids,
            settings.limit,
            lambda one: opened(one, settings.seconds),
            settings.whole_grid,
        )
    return report(settings, replace(found, server=replace(server, parallel=1)), "llama-server", choice)


def check_addresses(settings: CheckSettings, places: Addresses) -> ServeReport:
    """Compare servers that run; ServingError for one that does not answer, refuses, or does not draft."""
    with ExitStack() as stack:
        clients = connected(places, settings.seconds[1], stack)
        require_vocabulary(clients, settings.ids)
        kind = clients[DRAFT].kind
        target, draft = places.files or (Path(places.model or places.url), Path("?"))
        server = LlamaServer(Path(kind), target, draft, n_max=places.n_max or 0, threads=places.threads)
        found = _replay(settings, clients, server, places.files)
        _compare(settings, clients, found, differences.early_ends(clients[DRAFT].totals(), found.server.n_max))
    return report(settings, found, kind)


def _replay(
    settings: CheckSettings, clients: Mapping[str, Client], server: LlamaServer, files: tuple[Path, Path] | None
) -> Findings:
    """All prompts one at a time on each server: speeds, and the acceptance of the one that drafts.

    A draft length that is not known (n_max 0) is read from the counters, which have a place for each drafted token.
    """
    ids, drafting = settings.ids, clients[DRAFT]
    for client in clients.values():
        replaying.warm(client, ids)
    before = drafting.totals()
    title = f"{len(clients)} servers, one request at a time"
    replayed = replaying.interleaved(clients, ids, settings.limit, settings.repeats, title)
    after = drafting.totals()
    totals = None if before is None or after is None else after.since(before)
    texts = replaying.counted(replayed[DRAFT].first)
    if not any(text.drafted for text in texts):
        raise ServingError(
            f"{drafting.url} drafted nothing: it serves without a draft",
            "start it with the draft (llama-server: -md FILE --spec-type draft-simple; vLLM: --speculative-config)",
        )
    own = replaying.acceptance(f"{drafting.kind}, its own counts", texts, totals)
    server = replace(server, n_max=server.n_max or len(own.by_position or ()))
    found = Findings(server, drafting.build(), replayed, texts, files, [own])
    base = replayed.get(PLAIN)
    found.speeds = [] if base is None else [replaying.alone_speed(PLAIN, base, None)]
    found.speeds.append(replaying.alone_speed(DRAFT, replayed[DRAFT], base))
    return found


def _compare(
    settings: CheckSettings, clients: Mapping[str, Client], found: Findings, early: Sequence[Difference] = ()
) -> None:
    """Add what our decoder accepts, how files and templates differ, and the speeds of several requests at once."""
    if found.files is not None:
        _decode_ours(settings, found.files, found)
    found.differences += early
    if isinstance(drafting := clients[DRAFT], LlamaClient):
        _compare_template(settings, drafting, found)
    for client in clients.values():
        client.alone = False
    for count in settings.concurrency:
        if count > 1:
            found.speeds += replaying.shared_speeds(clients, settings.ids, settings.limit, count, settings.repeats)


def _decode_ours(settings: CheckSettings, files: tuple[Path, Path], found: Findings) -> None:
    """Add what our decoder accepts with the served files and, where they are others, with the run's own, and how the
    files differ, with the loss."""
    from_run = differences.from_run(files, settings.made)
    in_pair = differences.in_pair(files, settings.made is None)
    length, ids = found.server.n_max, settings.ids
    if not length:
        found.differences += from_run + in_pair
        found.notes.append("the server does not say how many tokens it drafts: give --n-max for our decoder's figures")
        return

    def decode(which: str, pair: tuple[Path, Path]) -> list[list[int]]:
        texts = replaying.decode_files(*pair, ids, settings.limit, length, found.server.threads)
        counts = [text.counts for text in texts]
        found.acceptance.append(replaying.acceptance(f"distill, {which}", counts))
        found.reference = Reference(which, found.acceptance[-1], counts, replaying.rise_of_tokens(found.texts, counts))
        return [text.tokens for text in texts]

    served = decode("the same files", files)
    same = sum(tokens == reply.tokens for tokens, reply in zip(served, found.replayed[DRAFT].first, strict=True))
    if same < len(ids):
        found.notes.append(f"our decoder's text is the server's on {same} of {len(ids)} prompts")
    if from_run:
        assert settings.made is not None and found.reference is not None
        with_served = found.reference.counts
        decode("the run's own files", settings.made)
        loss = replaying.rise_of_tokens(with_served, found.reference.counts)
        from_run = [differences.measured(one, loss) for one in from_run]
    found.differences += from_run + in_pair


def _loss(settings: CheckSettings, without: LlamaServer, found: Findings) -> Interval:
    """The tokens per round that a difference costs: the prompts are replayed on a server without it."""
    note(f"without a difference: {' '.join(without.further)}")
    with opened(replace(without, parallel=1), settings.seconds) as client:
        replies = [client.complete(prompt, settings.limit) for prompt in settings.ids]
    return replaying.rise_of_tokens(found.texts, replaying.counted(replies))


def _compare_template(settings: CheckSettings, client: LlamaClient, found: Findings) -> None:
    """Add the difference of the server's chat template from the pair's own, and what it costs on conversations."""
    if settings.conversation is None:
        return
    messages = [{"role": "user", "content": differences.PROBE}]
    try:
        ours, theirs = settings.conversation.render(messages), client.rendered(messages)
    except (ServingError, ValueError):
        found.notes.append("the server renders no conversation, so templates were not compared")
        return
    difference, parts = differences.template_difference(ours, theirs), differences.template_parts(ours)
    if difference is None or parts is None:
        return
    conversations = {}  # the user's message of each prompt that is a conversation of one, by the prompt's place
    for place, prompt in enumerate(settings.prompts):
        text = settings.conversation.text(prompt.ids)
        if text.startswith(parts[0]) and text.endswith(parts[1]) and len(text) > sum(map(len, parts)):
            conversations[place] = text[len(parts[0]) : len(text) - len(parts[1])]
    if not conversations:
        found.notes.append("no prompt is a conversation of one message, so the template's cost was not measured")
        found.differences.append(difference)
        return
    replies = []
    for text in conversations.values():
        rendered = client.rendered([{"role": "user", "content": text}])
        replies.append(client.complete(client.tokenize(rendered), settings.limit))
    texts = replaying.counted(replies)
    found.acceptance.append(replaying.acceptance(f"{client.kind}, through its own template", texts))
    loss = replaying.rise_of_tokens(texts, [found.texts[place] for place in conversations])
    found.differences.append(differences.measured(difference, loss))


def by_class(
    prompts: Sequence[Prompt], texts: Sequence[replaying.TextCounts], replayed: Mapping[str, replaying.Replayed]
) -> list[ServedClass]:
    """The figures of each class of prompts, where there are several; without intervals for a class of one prompt."""
    names = [prompt.kind or prompt.source or "prompts" for prompt in prompts]
    classes = []
    for name in dict.fromkeys(names) if len(set(names)) > 1 else ():
        places = [place for place, one in enumerate(names) if one == name]
        some = {key: replaying.Replayed([one.texts[place] for place in places]) for key, one in replayed.items()}
        own = replaying.acceptance(name, [texts[place] for place in places])
        rise = some[DRAFT].over(some[PLAIN]) if PLAIN in some else UNKNOWN
        figures = [own.rate, own.tokens_per_round, rise]
        if len(places) == 1:
            figures = [Interval(one.mean, math.nan, math.nan) for one in figures]
        classes.append(ServedClass(name, len(places), *figures))
    return classes


def report(settings: CheckSettings, found: Findings, kind: str, choice: ChosenSettings | None = None) -> ServeReport:
    """Everything that was found."""
    server, base = found.server, found.replayed.get(PLAIN)
    pairs = [] if base is None else list(zip(base.first, found.replayed[DRAFT].first, strict=True))
    title = server.title if server.n_max else DRAFT
    made = ServeReport(
        command=settings.command,
        machine=machine(),
        server=kind,
        build=found.build,
        served=" ".join(server.served),
        target=str(server.target),
        draft=str(server.draft or ""),
        n_max=server.n_max,
        p_min=server.p_min or 0.0,
        prompts=len(settings.prompts),
        new_tokens=settings.limit,
        left_out=settings.left_out,
        acceptance=found.acceptance,
        predicted=settings.predicted,
        speeds=[replace(one, configuration=title) if one.configuration == DRAFT else one for one in found.speeds],
        classes=by_class(settings.prompts, found.texts, found.replayed),
        differences=found.differences,
        same_texts=sum(plain.tokens == draft.tokens for plain, draft in pairs),
        texts=len(pairs),
        sentences=[],
        choice=choice,
        notes=found.notes,
    )
    return replace(made, sentences=sentences(made, found.reference))
