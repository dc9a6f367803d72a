"""`distill serve-check`: a pair on the user's own server, with and without its draft, and what explains a shortfall.

Legend: τ tokens per round.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from distill.errors import ServingError
from distill.intervals import Interval
from distill.machine import machine
from distill.models.pairs import compare_pair
from distill.progress import note
from distill.results.serving_results import (
    ChosenSettings,
    Difference,
    ServedAcceptance,
    ServedClass,
    ServedSpeed,
    ServeReport,
)
from distill.serving.choose import choose
from distill.serving.client import Client
from distill.serving.counts import TextCounts, acceptance, counted, rise_of_tokens
from distill.serving.differences import (
    PROBE,
    build_of,
    file_differences,
    measured,
    option_differences,
    template_difference,
    template_parts,
)
from distill.serving.findings import sentences
from distill.serving.llama_client import LlamaClient
from distill.serving.llama_server import LlamaServer, Running, started
from distill.serving.ours import decode_files
from distill.serving.replaying import Replayed, alone_speed, interleaved, shared_speeds, warm
from distill.texts import Prompt

PLAIN = "plain"


@dataclass(frozen=True)
class Conversation:
    """How the pair's own chat template writes messages, and the text of ids."""

    render: Callable[[list[dict[str, str]]], str]
    text: Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Wanted:
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
    predicted: float = float("nan")
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
    """What was measured so far; `texts` are the counts of the server that drafts, `ours` those of our decoder."""

    replayed: dict[str, Replayed]
    acceptance: list[ServedAcceptance]
    texts: list[TextCounts]
    reference: list[TextCounts]
    speeds: list[ServedSpeed]
    differences: list[Difference]
    notes: list[str] = field(default_factory=list)


def check_started(wanted: Wanted, settings: LlamaServer) -> ServeReport:
    """Start llama-server with and without the draft and compare them; ServingError for one that fails to serve."""
    ids = wanted.ids
    settings = replace(settings, parallel=max(wanted.concurrency))
    with ExitStack() as stack:
        clients: dict[str, Client] = {}
        for name, one in ((PLAIN, settings.plain), ("draft", settings)):
            client = stack.enter_context(opened(one, wanted.seconds))
            clients[name] = client
        drafting = clients["draft"]
        assert isinstance(drafting, LlamaClient)
        properties = drafting.properties()
        found = replayed_on(wanted, clients, settings.title)
        by_file = ours_of(wanted, found, settings)
        note_template(wanted, drafting, found)
        found.speeds += shared(wanted, clients, settings.title)
    found.differences = by_file + found.differences + undone(wanted, settings, found)
    choice = None
    if wanted.choosing:
        choice = choose(
            settings, wanted.choosing, ids, wanted.limit, lambda one: opened(one, wanted.seconds), wanted.whole_grid
        )
    served = replace(settings, parallel=1)
    return report(wanted, found, "llama-server", build_of(properties), served, choice)


@contextmanager
def opened(settings: LlamaServer, seconds: tuple[float, float]) -> Iterator[LlamaClient]:
    """A client of a llama-server that runs within the block; ServingError where it has a draft and leaves it unused."""
    with started(settings, seconds[0]) as running:

        def death() -> str | None:
            found = running.death()
            return None if found is None else f"{settings.binary} ended ({found}); its last lines:\n{running.tail()}"

        client = LlamaClient(running.url, seconds[1], death=death)
        try:
            if settings.draft is not None and client.drafts() is False:
                raise unused(settings, running)
            yield client
        finally:
            client.close()


def unused(settings: LlamaServer, running: Running) -> ServingError:
    """Why a server runs without the draft that it was given: llama-server says so in its log alone."""
    reason = None if settings.draft is None else compare_pair(str(settings.target), str(settings.draft)).llama_cpp
    words = ("draft", "specul", "vocab")
    lines = [line for line in running.text().splitlines() if " I " not in line and any(word in line for word in words)]
    shown = "".join(f"\n    {line[:200]}" for line in lines[-4:])
    what = f": {reason}" if reason else ""
    return ServingError(
        f"{settings.binary} serves {settings.target} without its draft{what}{shown}",
        "transplant the target's vocabulary into the draft (`distill transplant`)" if reason else "see its whole log",
    )


def replayed_on(wanted: Wanted, clients: Mapping[str, Client], title: str) -> Findings:
    """All prompts one at a time on each server: speeds, and the acceptance of the one that drafts."""
    ids = wanted.ids
    for client in clients.values():
        warm(client, ids)
    before = clients["draft"].totals()
    replayed = interleaved(clients, ids, wanted.limit, wanted.repeats, f"{len(clients)} servers, one request at a time")
    after = clients["draft"].totals()
    totals = None if before is None or after is None else after.since(before)
    texts = counted(replayed["draft"].first)
    drafts = replayed["draft"]
    if not any(text.drafted for text in texts):
        raise ServingError(
            f"{clients['draft'].url} drafted nothing: it serves without a draft",
            "start it with the draft (llama-server: -md FILE --spec-type draft-simple; vLLM: --speculative-config)",
        )
    base = replayed.get(PLAIN)
    speeds = [] if base is None else [alone_speed(PLAIN, base, None)]
    speeds.append(alone_speed(title, drafts, base))
    own = acceptance(f"{clients['draft'].kind}, its own counts", texts, totals)
    return Findings(replayed, [own], texts, [], speeds, [])


def ours_of(wanted: Wanted, found: Findings, settings: LlamaServer) -> list[Difference]:
    """Add what our decoder accepts with the served files and, where they are others, with the run's own; returns how
    the files differ, with the loss of each."""
    assert settings.draft is not None
    ids = wanted.ids
    served = decode_files(settings.target, settings.draft, ids, wanted.limit, settings.n_max, None, settings.threads)
    texts = [text.counts for text in served]
    found.acceptance.append(acceptance("distill, the same files", texts))
    found.reference = texts
    same = sum(text.tokens == reply.tokens for text, reply in zip(served, found.replayed["draft"].first, strict=True))
    if same < len(ids):
        found.notes.append(f"our decoder's text is the server's on {same} of {len(ids)} prompts")
    differences = file_differences(settings.target, settings.draft, wanted.made)
    if wanted.made is None or tuple(map(Path.resolve, wanted.made)) == (
        settings.target.resolve(),
        settings.draft.resolve(),
    ):
        return differences
    made = decode_files(*wanted.made, ids, wanted.limit, settings.n_max, None, settings.threads)
    found.reference = [text.counts for text in made]
    found.acceptance.append(acceptance("distill, the run's own files", found.reference))
    loss = rise_of_tokens(texts, found.reference)
    return [measured(one, loss) if one.what.endswith("'s file") else one for one in differences]


def undone(wanted: Wanted, settings: LlamaServer, found: Findings) -> list[Difference]:
    """Each option that differs from the server's default, with what it costs: the prompts are replayed without it."""
    differing = option_differences(settings, os.environ)
    return [measured(one, _loss(wanted, without, found)) for one, without in differing]


def _loss(wanted: Wanted, without: LlamaServer, found: Findings) -> Interval:
    note(f"without a difference: {' '.join(without.further)}")
    with opened(replace(without, parallel=1), wanted.seconds) as client:
        replies = [client.complete(prompt, wanted.limit) for prompt in wanted.ids]
    return rise_of_tokens(found.texts, counted(replies))


def note_template(wanted: Wanted, client: LlamaClient, found: Findings) -> None:
    """Add the difference of the server's chat template from the pair's own, and what it costs on conversations."""
    if wanted.conversation is None:
        return
    messages = [{"role": "user", "content": PROBE}]
    try:
        ours, theirs = wanted.conversation.render(messages), client.rendered(messages)
    except (ServingError, ValueError):
        found.notes.append("the server renders no conversation, so templates were not compared")
        return
    advice = "serve with the target's own template: leave --chat-template out (it takes Jinja: a name is taken as text)"
    difference = template_difference(ours, theirs, advice)
    parts = template_parts(ours)
    if difference is None or parts is None:
        return
    places = _conversations(wanted, parts)
    if not places:
        found.notes.append("no prompt is a conversation of one message, so the template's cost was not measured")
        found.differences.append(difference)
        return
    replies = []
    for text in places.values():
        rendered = client.rendered([{"role": "user", "content": text}])
        replies.append(client.complete(client.tokenize(rendered), wanted.limit))
    texts = counted(replies)
    found.acceptance.append(acceptance(f"{client.kind}, through its own template", texts))
    loss = rise_of_tokens(texts, [found.texts[place] for place in places])
    found.differences.append(measured(difference, loss))


def _conversations(wanted: Wanted, parts: tuple[str, str]) -> dict[int, str]:
    """The user's message of each prompt that is a conversation of one, by the prompt's place."""
    assert wanted.conversation is not None
    found = {}
    for place, prompt in enumerate(wanted.prompts):
        text = wanted.conversation.text(prompt.ids)
        if text.startswith(parts[0]) and text.endswith(parts[1]) and len(text) > sum(map(len, parts)):
            found[place] = text[len(parts[0]) : len(text) - len(parts[1])]
    return found


def shared(wanted: Wanted, clients: Mapping[str, Client], title: str) -> list[ServedSpeed]:
    """The speeds of each server with several requests at once."""
    found = []
    for count in wanted.concurrency:
        if count > 1:
            for one in shared_speeds(clients, wanted.ids, wanted.limit, count, wanted.repeats):
                found.append(replace(one, configuration=title if one.configuration == "draft" else PLAIN))
    return found


def by_class(wanted: Wanted, found: Findings) -> list[ServedClass]:
    """The figures of each class of prompts, where there are several; without intervals for a class of one prompt."""

    def shown(interval: Interval, prompts: int) -> Interval:
        return interval if prompts > 1 else replace(interval, low=math.nan, high=math.nan)

    names = [prompt.kind or prompt.source or "prompts" for prompt in wanted.prompts]
    drafts, base = found.replayed["draft"], found.replayed.get(PLAIN)
    classes = []
    for name in dict.fromkeys(names) if len(set(names)) > 1 else ():
        places = [place for place, one in enumerate(names) if one == name]
        own = acceptance(name, [found.texts[place] for place in places])
        some = Replayed([drafts.texts[place] for place in places])
        rise = Interval(*[float("nan")] * 3)
        if base is not None:
            rise = some.over(Replayed([base.texts[place] for place in places]))
        figures = (shown(one, len(places)) for one in (own.rate, own.tokens_per_round, rise))
        classes.append(ServedClass(name, len(places), *figures))
    return classes


def report(
    wanted: Wanted,
    found: Findings,
    server: str,
    build: str,
    settings: LlamaServer,
    choice: ChosenSettings | None = None,
) -> ServeReport:
    """Everything that was found."""
    base, drafts = found.replayed.get(PLAIN), found.replayed["draft"]
    pairs = [] if base is None else list(zip(base.first, drafts.first, strict=True))
    same = sum(plain.tokens == draft.tokens for plain, draft in pairs)
    made = ServeReport(
        command=wanted.command,
        machine=machine(),
        server=server,
        build=build,
        served=" ".join(settings.served),
        target=str(settings.target),
        draft=str(settings.draft or ""),
        n_max=settings.n_max,
        p_min=settings.p_min or 0.0,
        prompts=len(wanted.prompts),
        new_tokens=wanted.limit,
        left_out=wanted.left_out,
        acceptance=found.acceptance,
        predicted=wanted.predicted,
        speeds=found.speeds,
        classes=by_class(wanted, found),
        differences=found.differences,
        same_texts=same,
        texts=len(pairs),
        sentences=[],
        choice=choice,
        notes=found.notes,
    )
    short = rise_of_tokens(found.texts, found.reference) if found.reference else None
    return replace(made, sentences=sentences(made, short))
