"""`distill serve-check`: a pair on the user's own server, with and without its draft, and what explains a shortfall.

The servers are started here, or already run. Legend: τ tokens per round.
"""

from __future__ import annotations

import itertools
import os
import random
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy
from numpy.typing import NDArray

from distill.engines.server_commands import SAMPLING
from distill.errors import ServingError
from distill.intervals import CONFIDENCE, RESAMPLES, Interval, percentiles
from distill.progress import Progress, note
from distill.sampler import Sampler
from distill.serving import findings as differences
from distill.serving.clients import (
    DRAFT,
    PLAIN,
    Addresses,
    Client,
    LlamaClient,
    Reply,
    ServerRules,
    connected,
    interleaved,
    opened,
    warm,
)
from distill.serving.findings import CheckSettings, Findings, Reference, report
from distill.serving.llama_server import LlamaServer, without_options
from distill.serving.load import Load, apart, speeds_under
from distill.serving.results import (
    ChosenSettings,
    ConfirmedSettings,
    DraftSettings,
    ServeReport,
    Text,
    TextCounts,
    TriedSettings,
    acceptance,
    counts_of,
    rise_of_tokens,
)

# ── The fastest n_max, p_min and way to draft on validation prompts, by successive halving, then confirmed on
# others ──
# llama-server reads them only at its start, so each combination is a server of its own. One server runs at a time,
# as a real target fills the memory. The servers of a round are visited in a random order and then in its reverse (a
# few servers twice), so that slow and fast periods of the machine favour none of them.

N_MAX = range(1, 9)
P_MIN = (0.0, 0.5, 0.75)
SHARES = (0.25, 0.5, 1.0)  # of the prompts in each round of halving
KEPT = (12, 5)  # settings that draft, after the first and the second round; plain decoding stays in all of them
FINALISTS = 3
MIN_PROMPTS = 2  # prompts of a round
FEW_CANDIDATES = 6  # candidates that are visited four times
OF_SETTINGS = {"--spec-draft-n-max", "--spec-draft-p-min", "--draft-p-min"}


PLAIN_SETTINGS = DraftSettings(0, 0.0)


@dataclass(frozen=True)
class Trials:
    """The texts that settings are timed on: up to `limit` tokens behind each prompt, `samples` of them where they are
    sampled."""

    prompts: Sequence[Sequence[int]]
    limit: int
    samples: int = 1


Opened = Callable[[LlamaServer], AbstractContextManager[Client]]


@dataclass
class Candidate:
    """Settings with their replies so far, `texts[text][visit]`; the texts of a visit are the same in every one."""

    settings: DraftSettings
    texts: list[list[Reply]] = field(default_factory=list)
    rounds: int = 0

    @property
    def rate(self) -> float:
        """Tokens per second, to be compared among candidates of the same round.

        The fastest reply to each text counts: other programs make replies slower, never faster, and for seconds at a
        time, so a sum would penalise the settings that happened to run then.
        """
        fastest = [min(replies, key=lambda reply: reply.seconds) for replies in self.texts]
        return sum(reply.count for reply in fastest) / sum(reply.seconds for reply in fastest)

    def over(self, base: Candidate) -> Interval:
        """Its speed over another's on the same prompts; prompts and the replies to each of them are resampled."""
        if base is self:
            return Interval(1.0, 1.0, 1.0)
        draws = numpy.random.default_rng(0)
        places = draws.integers(0, len(self.texts), size=(RESAMPLES, len(self.texts)))  # both meet the same prompts
        own, other = self._resampled(places, draws), base._resampled(places, draws)
        return percentiles(self.rate / base.rate, own / other, CONFIDENCE)

    def _resampled(self, places: NDArray[numpy.int64], draws: numpy.random.Generator) -> NDArray[numpy.float64]:
        """Rates [R] on the prompts of `places` [R, P], of replies drawn anew for each."""
        seconds = numpy.array([[reply.seconds for reply in replies] for replies in self.texts])
        counts = numpy.array([replies[0].count for replies in self.texts])
        visits = draws.integers(0, seconds.shape[1], size=(*places.shape, seconds.shape[1]))
        fastest = numpy.take_along_axis(seconds[places], visits, axis=2).min(axis=2)
        rates: NDArray[numpy.float64] = counts[places].sum(axis=1) / fastest.sum(axis=1)
        return rates


def grid(draws: bool = False) -> list[DraftSettings]:
    """Plain decoding and all settings, with `draws` those of drawn drafts too."""
    every = itertools.product((False, True) if draws else (False,), N_MAX, P_MIN)
    return [PLAIN_SETTINGS, *(DraftSettings(n_max, p_min, drawn) for drawn, n_max, p_min in every)]


def with_settings(server: LlamaServer, settings: DraftSettings) -> LlamaServer:
    """The server for one request at a time with these settings, those among the user's own arguments left out."""
    further = without_options(server.further, OF_SETTINGS.__contains__)
    one = replace(server, **vars(settings), parallel=1, further=further)
    return one.plain if settings == PLAIN_SETTINGS else one


def visit(candidates: Sequence[Candidate], server: LlamaServer, trials: Trials, opened: Opened, title: str) -> None:
    """Every candidate on these texts: in a random order and in its reverse, FEW_CANDIDATES twice."""
    draws, orders = random.Random(len(candidates)), list[list[Candidate]]()
    for _ in range(2 if len(candidates) <= FEW_CANDIDATES else 1):
        order = draws.sample(candidates, len(candidates))
        orders += [order, order[::-1]]
    progress = Progress(title, len(orders) * len(candidates))
    texts = [(prompt, seed) for prompt in trials.prompts for seed in range(trials.samples)]
    for one in candidates:
        one.rounds += 1
        one.texts += [[] for _ in range(len(texts) - len(one.texts))]
    for order in orders:
        for one in order:
            with opened(with_settings(server, one.settings)) as client:
                warm(client, trials.prompts)
                for place, (prompt, seed) in enumerate(texts):
                    one.texts[place].append(client.complete(prompt, trials.limit, seed))
            progress.step()


def choose(
    server: LlamaServer,
    validation: Trials,
    held_out: Trials,
    opened: Opened,
    settings: Sequence[DraftSettings],
) -> ChosenSettings:
    """Of `settings` those that were fastest on `validation`, with their speed on `held_out` beside that of the
    finalists, of plain decoding and of the fastest that draft the other way."""
    started = time.monotonic()
    tried = [Candidate(one) for one in settings]
    alive = tried
    for number, share in enumerate(SHARES):
        size = max(MIN_PROMPTS, round(share * len(validation.prompts)))
        part = replace(validation, prompts=validation.prompts[:size])
        visit(alive, server, part, opened, f"settings, round {number + 1} of {len(SHARES)}")
        drafting = sorted((one for one in alive if one.settings != PLAIN_SETTINGS), key=lambda one: -one.rate)
        plain = next(one for one in alive if one.settings == PLAIN_SETTINGS)
        kept = drafting[: KEPT[number] if number < len(KEPT) else None]
        # The fastest that drafts the other way stays, so that the gain of drawing drafts is known.
        other = [one for one in drafting if one.settings.probabilistic != kept[0].settings.probabilistic]
        alive = [plain, *kept, *(one for one in other[:1] if one not in kept)]
    best = max(alive, key=lambda one: one.rate)
    rivals = [Candidate(one) for one in _finalists(best, alive)]
    visit(rivals, server, held_out, opened, "settings, held-out prompts")
    confirmed = [ConfirmedSettings(one.settings, one.rate, rivals[0].over(one)) for one in rivals]
    return ChosenSettings(
        settings=best.settings,
        tried=[TriedSettings(one.settings, one.rounds, len(one.texts), one.rate) for one in tried],
        confirmed=confirmed,
        sentence=_sentence(best.settings, confirmed),
        command=_command(server, best.settings),
        seconds=time.monotonic() - started,
    )


def _finalists(best: Candidate, candidates: Sequence[Candidate]) -> list[DraftSettings]:
    """The best, plain decoding, the fastest of the candidates, and the fastest of those that draft in either way."""
    ranked = [one.settings for one in sorted(candidates, key=lambda one: -one.rate)]
    ways = [
        next((one for one in ranked if one != PLAIN_SETTINGS and one.probabilistic == drawn), PLAIN_SETTINGS)
        for drawn in (False, True)
    ]
    return list(dict.fromkeys([best.settings, PLAIN_SETTINGS, *ranked[:FINALISTS], *ways]))


def _sentence(best: DraftSettings, confirmed: Sequence[ConfirmedSettings]) -> str:
    plain = next(one for one in confirmed if one.settings == PLAIN_SETTINGS)
    fastest = max(confirmed, key=lambda one: one.tokens_per_second)
    if best == PLAIN_SETTINGS:
        text = "Plain decoding was the fastest on the validation prompts: serve this target without the draft here."
        if fastest.against.high < 1:
            return (
                f"{text} But {fastest.settings.title} is faster on the held-out prompts, over which plain decoding "
                f"has {_ratio(fastest.against)}: give more validation prompts, more --tokens, and a quiet machine."
            )
        drafting = [max(ways, key=lambda one: one.tokens_per_second) for ways in _ways(confirmed) if ways]
        beside = " and ".join(f"{_ratio(one.against)} {one.settings.title}" for one in drafting)
        return f"{text} It has {beside}." if beside else text
    text = (
        f"{best.title}: the fastest on the validation prompts, {_ratio(plain.against)} plain decoding on held-out ones"
    )
    if others := _ways(confirmed)[not best.probabilistic]:
        other = max(others, key=lambda one: one.tokens_per_second)
        text += f" and {_ratio(other.against)} {other.settings.title}"
    if fastest.settings == best:
        return f"{text}; nothing that was tried is faster there."
    rival = fastest.settings.title
    within = "within the interval" if fastest.against.high >= 1 else "beyond the interval: give more validation prompts"
    return f"{text}; the fastest there is {rival}, over which it has {_ratio(fastest.against)}, {within}."


def _ways(confirmed: Sequence[ConfirmedSettings]) -> list[list[ConfirmedSettings]]:
    """The settings that draft best tokens, and those that draw their drafts."""
    drafting = [one for one in confirmed if one.settings.n_max]
    return [[one for one in drafting if one.settings.probabilistic == drawn] for drawn in (False, True)]


def _ratio(found: Interval) -> str:
    return f"{found.mean:.3f}× [{found.low:.3f}, {found.high:.3f}]"


def _command(server: LlamaServer, settings: DraftSettings) -> str:
    """The command that serves with these settings, with the user's own options."""
    one = with_settings(server, settings)
    return shlex.join(["llama-server", *replace(one, p_min=one.p_min or None).served])


# ── `distill serve-check`: a pair on the user's own server, with and without its draft, and what explains a
# shortfall ──

Keep = Callable[[ServeReport], object]  # is given the findings so far after each part: the next one may fail


def check_started(settings: CheckSettings, server: LlamaServer, keep: Keep = lambda found: None) -> ServeReport:
    """Start llama-server with and without the draft and compare them; ServingError for one that fails to serve."""
    assert server.draft is not None

    def found(choice: ChosenSettings | None = None) -> ServeReport:
        return report(settings, replace(findings, server=replace(server, parallel=1)), "llama-server", choice)

    many = replace(server, parallel=max(settings.concurrency))
    with ExitStack() as stack:
        clients: dict[str, Client] = {
            name: stack.enter_context(opened(one, settings.seconds, settings.sampler))
            for name, one in ((PLAIN, many.plain), (DRAFT, many))
        }
        findings = _replay(settings, clients, many, (server.target, server.draft))
        keep(found())
        _compare(settings, clients, findings, lambda: keep(found()))
    keep(found())
    if settings.sampler.temperature:
        _other_drafts(settings, many, findings)
        keep(found())
    for difference, without in differences.option_differences(many, os.environ):
        note(f"without a difference: {' '.join(without.further)}")
        loss = rise_of_tokens(findings.texts, _counts_on(settings, without))
        findings.differences.append(differences.measured(difference, loss))
        keep(found())
    choice = None
    if settings.choosing:
        choice = choose(
            many,
            Trials(settings.choosing, settings.limit),
            Trials(settings.ids, settings.limit, settings.samples),
            lambda one: opened(one, settings.seconds, settings.sampler),
            grid(settings.sampler.temperature > 0 and server.has(SAMPLING)),
        )
    return found(choice)


def check_addresses(settings: CheckSettings, places: Addresses, keep: Keep = lambda found: None) -> ServeReport:
    """Compare servers that run; ServingError for one that does not answer, refuses, or does not draft."""
    with ExitStack() as stack:
        clients = connected(places, settings.seconds[1], stack, settings.sampler, settings.ids)
        kind = clients[DRAFT].kind
        target, draft = places.files or (Path(places.model or places.url), Path("?"))
        server = LlamaServer(
            Path(kind), target, draft, places.n_max or 0, probabilistic=places.probabilistic, threads=places.threads
        )
        findings = _replay(settings, clients, server, places.files)
        findings.differences += differences.early_ends(clients[DRAFT].totals(), findings.server.n_max)
        keep(report(settings, findings, kind))
        _compare(settings, clients, findings, lambda: keep(report(settings, findings, kind)))
    return report(settings, findings, kind)


def _replay(
    settings: CheckSettings, clients: Mapping[str, Client], server: LlamaServer, files: tuple[Path, Path] | None
) -> Findings:
    """All prompts one at a time on each server: speeds, and the acceptance of the one that drafts.

    A draft length that is not known (n_max 0) is read from the counters, which have a place for each drafted token.
    """
    ids, drafting = settings.ids, clients[DRAFT]
    for client in clients.values():
        warm(client, ids)
    before = drafting.totals()
    title = f"{len(clients)} servers, one request at a time"
    replayed = interleaved(clients, ids, settings.limit, settings.repeats, title)
    after = drafting.totals()
    totals = None if before is None or after is None else after.since(before)
    texts, notes = counts_of([replies[: settings.samples] for replies in replayed[DRAFT]]), list[str]()
    counted = sum(reply.counts.accepted for own in replayed[DRAFT] for reply in own)
    if totals is not None and totals.accepted != counted:
        totals = None
        notes.append(
            "the counters did not rise by what the replies say: several servers answer at this address, or others use "
            "it, so acceptance by position is not known"
        )
    if not any(text.drafted for text in texts):
        raise ServingError(
            f"{drafting.url} drafted nothing: it serves without a draft",
            "start it with the draft (llama-server: -md FILE --spec-type draft-simple; vLLM: --speculative-config); "
            "of several vLLM servers behind one address give that of one: counters are one server's",
        )
    own = acceptance(f"{drafting.kind}, its own counts", texts, totals)
    server = replace(server, n_max=server.n_max or len(own.by_position or ()))
    speeds, _ = speeds_under(clients, ids, settings.limit, (), settings.repeats, replayed)
    return Findings(server, drafting.build(), replayed, texts, files, [own], speeds=speeds, notes=notes)


def _compare(
    settings: CheckSettings, clients: Mapping[str, Client], findings: Findings, keep: Callable[[], object]
) -> None:
    """Add what our decoder accepts, how files and templates differ, and the speeds under load."""
    if findings.files is not None:
        _decode_ours(settings, findings.files, findings, clients[DRAFT].kind == "vllm")
        keep()
    if isinstance(drafting := clients[DRAFT], LlamaClient):
        _compare_template(settings, drafting, findings)
    for client in clients.values():
        client.alone = False
    loads = [*(Load(count) for count in settings.concurrency if count > 1), *settings.arrivals]
    findings.speeds, steps = speeds_under(
        clients, settings.ids, settings.limit, loads, settings.repeats, findings.replayed
    )
    if isinstance(clients.get(PLAIN), LlamaClient):
        findings.notes += filter(None, [apart(steps)])


def _decoded(
    settings: CheckSettings, findings: Findings, source: str, files: tuple[Path, Path], rules: ServerRules
) -> list[list[Text]]:
    """The texts of our decoder with these files; what it accepts is added."""
    texts = rules.decode_files(*files, settings.ids, settings.limit, settings.samples, findings.server.threads)
    findings.acceptance.append(acceptance(f"distill, {source}", counts_of(texts)))
    return texts


def _decode_ours(settings: CheckSettings, files: tuple[Path, Path], findings: Findings, vllm: bool) -> None:
    """Add what our decoder accepts with the served files and, where they are others, with the run's own, and how the
    files differ, with the loss."""
    from_run = differences.from_run(files, settings.made)
    in_pair = differences.in_pair(files, settings.made is None)
    length = findings.server.n_max
    if not length:
        findings.differences += from_run + in_pair
        findings.notes.append(
            "the server does not say how many tokens it drafts: give --n-max for our decoder's figures"
        )
        return
    rules = ServerRules(Sampler.of(settings.sampler), length, findings.server.probabilistic, vllm)

    def refer_to(which: str, pair: tuple[Path, Path]) -> list[list[Text]]:
        texts = _decoded(settings, findings, which, pair, rules)
        short = rise_of_tokens(findings.texts, counts_of(texts))
        findings.reference = Reference(which, findings.acceptance[-1], short)
        return texts

    served = refer_to("the same files", files)
    if not settings.sampler.temperature:
        same = sum(
            ours.tokens == replies[0].tokens for (ours,), replies in zip(served, findings.replayed[DRAFT], strict=True)
        )
        if same < len(served):
            findings.notes.append(f"our decoder's text is the server's on {same} of {len(served)} prompts")
    if from_run:
        assert settings.made is not None
        loss = rise_of_tokens(counts_of(served), counts_of(refer_to("the run's own files", settings.made)))
        from_run = [differences.measured(difference, loss) for difference in from_run]
    findings.differences += from_run + in_pair


def _counts_on(settings: CheckSettings, server: LlamaServer) -> list[TextCounts]:
    """What is drafted and accepted by a server that is started for this alone."""
    with opened(replace(server, parallel=1), settings.seconds, settings.sampler) as client:
        return settings.replies(client, settings.ids)


def _other_drafts(settings: CheckSettings, server: LlamaServer, findings: Findings) -> None:
    """Add what the server accepts whose drafts are made the other way, drawn or not, and the tokens per round that
    drawing them adds; of a build that cannot draw them what our decoder accepts so, where the files are known."""
    assert server.draft is not None
    if not server.has(SAMPLING):
        rules = ServerRules(Sampler.of(settings.sampler), server.n_max, probabilistic=True)
        _decoded(settings, findings, "as a server that draws its drafts", (server.target, server.draft), rules)
        findings.notes.append(
            f"this build has no {SAMPLING}, which builds since October 2026 have: it drafts the draft's best tokens"
        )
        return
    other = replace(server, probabilistic=not server.probabilistic)
    note(f"the same with {other.title}")
    counts = _counts_on(settings, other)
    kind = "drawn drafts" if other.probabilistic else "best tokens drafted"
    findings.acceptance.insert(1, acceptance(f"llama-server, {kind}", counts))
    findings.drawn = rise_of_tokens(*((findings.texts, counts) if other.probabilistic else (counts, findings.texts)))


def _compare_template(settings: CheckSettings, client: LlamaClient, findings: Findings) -> None:
    """Add the difference of the server's chat template from the pair's own, and what it costs on conversations."""
    if settings.template is None:
        return
    messages = [{"role": "user", "content": differences.PROBE}]
    try:
        ours, theirs = settings.template.text(messages), client.rendered(messages)
    except (ServingError, ValueError):
        findings.notes.append("the server renders no conversation, so templates were not compared")
        return
    difference = differences.template_difference(ours, theirs)
    before, there, behind = ours.partition(differences.PROBE)
    if difference is None or not there:
        return
    conversations = {}  # the user's message of each prompt that is a conversation of one, by the prompt's place
    for place, prompt in enumerate(settings.prompts):
        text = settings.template.tokenizer.decode(prompt.ids)
        if text.startswith(before) and text.endswith(behind) and len(text) > len(before) + len(behind):
            conversations[place] = text[len(before) : len(text) - len(behind)]
    if not conversations:
        findings.notes.append("no prompt is a conversation of one message, so the template's cost was not measured")
        findings.differences.append(difference)
        return
    asked = [client.rendered([{"role": "user", "content": text}]) for text in conversations.values()]
    texts = settings.replies(client, [client.tokenize(text) for text in asked])
    findings.acceptance.append(acceptance(f"{client.kind}, through its own template", texts))
    loss = rise_of_tokens(texts, [findings.texts[place] for place in conversations])
    findings.differences.append(differences.measured(difference, loss))
