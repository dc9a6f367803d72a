"""`distill serve-check`: a pair on the user's own server, with and without its draft, and what explains a shortfall.

The servers are started here, or already run. Legend: τ tokens per round.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from distill.errors import ServingError
from distill.models.server_commands import SAMPLING
from distill.progress import note
from distill.results.serving_results import (
    ChosenSettings,
    ServeReport,
)
from distill.sampler import Sampler
from distill.serving import differences
from distill.serving.choose import Trials, choose, grid
from distill.serving.clients import DRAFT, PLAIN, Addresses, Client, LlamaClient, connected, opened
from distill.serving.counts import Text, TextCounts, acceptance, counts_of, rise_of_tokens
from distill.serving.findings import CheckSettings, Findings, report
from distill.serving.llama_server import LlamaServer
from distill.serving.load import Load, apart, speeds_under
from distill.serving.markdown import Reference
from distill.serving.replaying import ServerRules, interleaved, warm

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
