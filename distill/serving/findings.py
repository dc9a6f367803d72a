"""What `distill serve-check` is asked to check, and what it has found so far."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from distill.documents.chat_template import ChatTemplate
from distill.intervals import UNKNOWN, Interval
from distill.machine import machine
from distill.recipe import SamplerSettings
from distill.results.serving_results import (
    ChosenSettings,
    Difference,
    ServedAcceptance,
    ServedSpeed,
    ServeReport,
)
from distill.serving.clients import DRAFT, GREEDY, PLAIN, Client
from distill.serving.counts import TextCounts, counts_of
from distill.serving.llama_server import LlamaServer
from distill.serving.load import Load
from distill.serving.markdown import Reference, sentences
from distill.serving.replaying import Replayed, by_class
from distill.texts import Prompt


@dataclass(frozen=True)
class CheckSettings:
    """What is checked: the prompts, up to `limit` new tokens after each, `repeats` times.

    Under a sampler that is not greedy, each repeat of a prompt is a text of its own. `made` are the run's own target
    and draft, where there is a run; `predicted` is its greedy acceptance at this draft length. Settings are chosen on
    the validation prompts `choosing`; without any, none are chosen. `template` is the pair's own. `seconds` limit a
    server's start and a reply.
    """

    prompts: Sequence[Prompt]
    limit: int
    repeats: int = 3
    sampler: SamplerSettings = GREEDY
    concurrency: tuple[int, ...] = (1, 4, 16)
    arrivals: tuple[Load, ...] = ()
    choosing: Sequence[Sequence[int]] = ()
    made: tuple[Path, Path] | None = None
    predicted: float = math.nan
    template: ChatTemplate | None = None
    seconds: tuple[float, float] = (300.0, 300.0)
    left_out: dict[str, int] = field(default_factory=dict)
    command: str = ""

    @property
    def ids(self) -> list[list[int]]:
        """The token ids of the prompts."""
        return [prompt.ids for prompt in self.prompts]

    @property
    def samples(self) -> int:
        """Different texts behind each prompt."""
        return self.repeats if self.sampler.temperature else 1

    def replies(self, client: Client, prompts: Sequence[Sequence[int]]) -> list[TextCounts]:
        """What is drafted and accepted behind each of these prompts."""
        return counts_of(
            [[client.complete(prompt, self.limit, seed) for seed in range(self.samples)] for prompt in prompts]
        )


@dataclass
class Findings:
    """What was measured so far; `texts` are the counts of the server that drafts, `build` is the build that it names.

    `files` are target and draft, where they are known; `reference` is our decoder with them, or with the run's own.
    """

    server: LlamaServer
    build: str
    replayed: Mapping[str, Replayed]
    texts: list[TextCounts]
    files: tuple[Path, Path] | None = None
    acceptance: list[ServedAcceptance] = field(default_factory=list)
    reference: Reference | None = None
    speeds: list[ServedSpeed] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    drawn: Interval = UNKNOWN
    notes: list[str] = field(default_factory=list)


def report(settings: CheckSettings, findings: Findings, kind: str, choice: ChosenSettings | None = None) -> ServeReport:
    """All findings as one result."""
    server, base = findings.server, findings.replayed.get(PLAIN)
    greedy = not settings.sampler.temperature
    pairs = [] if base is None or not greedy else list(zip(base, findings.replayed[DRAFT], strict=True))
    title = server.title if server.n_max else DRAFT
    made = ServeReport(
        command=settings.command,
        machine=machine(),
        server=kind,
        build=findings.build,
        served=server.title if kind == "vllm" else " ".join(server.served),
        target=str(server.target),
        draft=str(server.draft or ""),
        n_max=server.n_max,
        p_min=server.p_min or 0.0,
        probabilistic=server.probabilistic,
        sampler=settings.sampler.model_dump(),
        drawn=findings.drawn,
        prompts=len(settings.prompts),
        new_tokens=settings.limit,
        left_out=settings.left_out,
        acceptance=[*findings.acceptance],
        predicted=settings.predicted if greedy else math.nan,
        speeds=[replace(one, configuration=title) if one.configuration == DRAFT else one for one in findings.speeds],
        classes=by_class(settings.prompts, findings.texts, findings.replayed),
        differences=[*findings.differences],
        same_texts=sum(plain[0].tokens == draft[0].tokens for plain, draft in pairs),
        texts=len(pairs),
        sentences=[],
        choice=choice,
        notes=[*findings.notes],
    )
    return replace(made, sentences=sentences(made, findings.reference))
