"""The fastest n_max, p_min and way to draft on validation prompts, by successive halving, then confirmed on others.

llama-server reads them only at its start, so each combination is a server of its own. One server runs at a time, as a
real target fills the memory. The servers of a round are visited in a random order and then in its reverse (a few
servers twice), so that slow and fast periods of the machine favour none of them.
"""

from __future__ import annotations

import itertools
import random
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from distill.progress import Progress
from distill.serving.clients import Client, Reply, warm
from distill.serving.results import ChosenSettings, DraftSettings, SettingsSpeed
from distill.serving.server import LlamaServer, without_options
from distill.tables import Interval, speed_ratio

N_MAX = range(1, 9)
P_MIN = (0.0, 0.5, 0.75)
ROUND_SHARES = (0.25, 0.5, 1.0)  # of the prompts in each round of halving
# Settings that draft, after the first and the second round; plain decoding stays in all of them.
KEPT_DRAFTING = (12, 5)
FINALISTS = 3
MIN_PROMPTS = 2  # prompts of a round
FEW_CANDIDATES = 6  # candidates that are visited four times
OPTIONS_OF_SETTINGS = {"--spec-draft-n-max", "--spec-draft-p-min", "--draft-p-min"}
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

    @property
    def rate(self) -> float:
        """Tokens per second, to be compared among candidates of the same round.

        The fastest reply to each text counts: other programs make replies slower, never faster, and for seconds at a
        time, so a sum would penalise the settings that happened to run then.
        """
        tokens, seconds = self._fastest()
        return sum(tokens) / sum(seconds)

    def over(self, base: Candidate) -> Interval:
        """Its speed over another's on the same texts, which are resampled together."""
        return speed_ratio(*self._fastest(), *base._fastest())

    def _fastest(self) -> tuple[list[float], list[float]]:
        """Tokens and seconds of the fastest reply to each text."""
        fastest = [min(replies, key=lambda reply: reply.seconds) for replies in self.texts]
        return [reply.count for reply in fastest], [reply.seconds for reply in fastest]


def grid(draws: bool = False) -> list[DraftSettings]:
    """Plain decoding and all settings, with `draws` those of drawn drafts too."""
    every = itertools.product((False, True) if draws else (False,), N_MAX, P_MIN)
    return [PLAIN_SETTINGS, *(DraftSettings(n_max, p_min, drawn) for drawn, n_max, p_min in every)]


def with_settings(server: LlamaServer, settings: DraftSettings) -> LlamaServer:
    """The server for one request at a time with these settings, those among the user's own arguments left out."""
    further = without_options(server.further, OPTIONS_OF_SETTINGS.__contains__)
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
    for number, share in enumerate(ROUND_SHARES):
        size = max(MIN_PROMPTS, round(share * len(validation.prompts)))
        part = replace(validation, prompts=validation.prompts[:size])
        visit(alive, server, part, opened, f"settings, round {number + 1} of {len(ROUND_SHARES)}")
        drafting = sorted((one for one in alive if one.settings.n_max), key=lambda one: -one.rate)
        plain = next(one for one in alive if one.settings == PLAIN_SETTINGS)
        kept = drafting[: KEPT_DRAFTING[number] if number < len(KEPT_DRAFTING) else None]
        # The fastest that drafts the other way stays, so that the gain of drawing drafts is known.
        other = [one for one in drafting if one.settings.probabilistic != kept[0].settings.probabilistic]
        alive = [plain, *kept, *(one for one in other[:1] if one not in kept)]
    best = max(alive, key=lambda one: one.rate)
    rivals = [Candidate(one) for one in _finalists(best, alive)]
    visit(rivals, server, held_out, opened, "settings, held-out prompts")
    confirmed = [SettingsSpeed(one.settings, one.rate, rivals[0].over(one)) for one in rivals]
    return ChosenSettings(
        settings=best.settings,
        tried=[SettingsSpeed(one.settings, one.rate) for one in tried],
        confirmed=confirmed,
        sentence=_sentence(best.settings, confirmed),
        command=_command(server, best.settings),
        seconds=time.monotonic() - started,
    )


def _finalists(best: Candidate, candidates: Sequence[Candidate]) -> list[DraftSettings]:
    """The best, plain decoding, the fastest of the candidates, and the fastest of those that draft in either way."""
    ranked = [one.settings for one in sorted(candidates, key=lambda one: -one.rate)]
    ways = [
        next((one for one in ranked if one.n_max and one.probabilistic == drawn), PLAIN_SETTINGS)
        for drawn in (False, True)
    ]
    return list(dict.fromkeys([best.settings, PLAIN_SETTINGS, *ranked[:FINALISTS], *ways]))


def _sentence(best: DraftSettings, confirmed: Sequence[SettingsSpeed]) -> str:
    """The choice, with its speed over plain decoding, and the fastest on held-out prompts where that is another."""
    text = f"{best.title}: the fastest on the validation prompts"
    if best.n_max:
        plain = next(one.against for one in confirmed if one.settings == PLAIN_SETTINGS)
        text += f", {plain.mean:.3f}× [{plain.low:.3f}, {plain.high:.3f}] plain decoding on held-out ones"
    else:
        text = f"Serve this target without the draft here. {text}"
    fastest = max(confirmed, key=lambda one: one.tokens_per_second)
    if fastest.settings != best:
        within = "within" if fastest.against.high >= 1 else "beyond"
        text += f"; there {fastest.settings.title} is faster, {within} the interval"
    return f"{text}."


def _command(server: LlamaServer, settings: DraftSettings) -> str:
    """The command that serves with these settings, with the user's own options."""
    one = with_settings(server, settings)
    return shlex.join(["llama-server", *replace(one, p_min=one.p_min or None).served])
