"""The fastest n_max and p_min on validation prompts, by successive halving, then confirmed on others.

llama-server takes both at its start alone, so each pair of them is a server of its own. One runs at a time, as the
memory of a real target wants it; the servers of a round are visited in a random order and then in its reverse, and few
of them twice so, that no spell of the machine is an advantage.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import numpy
from numpy.typing import NDArray

from distill.intervals import Interval, percentiles
from distill.models.server_commands import llama_server, option_arguments
from distill.progress import Progress
from distill.results.serving_results import ChosenSettings, ConfirmedSettings, TriedSettings
from distill.serving.clients import Client
from distill.serving.http import Reply
from distill.serving.llama_server import LlamaServer
from distill.serving.replaying import CONFIDENCE, RESAMPLES, warm

N_MAX = range(1, 9)
P_MIN = (0.0, 0.5, 0.75)
PLAIN = (0, 0.0)  # n_max and p_min of plain decoding
SHARES = (0.25, 0.5, 1.0)  # of the prompts in each round of halving
KEPT = (12, 5)  # settings that draft, after the first and the second round; plain decoding stays in all of them
FINALISTS = 3
LEAST = 2  # prompts of a round
FEW = 6  # candidates that are visited four times
OF_SETTINGS = {"--spec-draft-n-max", "--spec-draft-p-min", "--draft-p-min"}

Settings = tuple[int, float]
Opened = Callable[[LlamaServer], AbstractContextManager[Client]]


@dataclass
class Candidate:
    """One pair of settings with its replies so far, `texts[prompt][visit]`."""

    settings: Settings
    texts: list[list[Reply]] = field(default_factory=list)
    rounds: int = 0

    @property
    def rate(self) -> float:
        """Tokens per second, to be compared among candidates of the same round.

        Of a prompt the fastest reply counts: what else runs on the machine makes replies slower, never faster, and for
        seconds at a time, so that a sum would drop the settings that it met.
        """
        fastest = [min(replies, key=lambda reply: reply.seconds) for replies in self.texts]
        return sum(reply.count for reply in fastest) / sum(reply.seconds for reply in fastest)

    def over(self, base: Candidate) -> Interval:
        """Its speed over another's, of the same prompts; resampled are the prompts and the replies to each of them."""
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


def grid() -> list[Settings]:
    """Plain decoding and every pair of settings."""
    return [PLAIN, *((n, p) for n in N_MAX for p in P_MIN)]


def with_settings(server: LlamaServer, settings: Settings) -> LlamaServer:
    """The server for one request at a time with these settings, those among the user's own arguments left out."""
    n_max, p_min = settings
    drop = {place + step for place, one in enumerate(server.further) if one in OF_SETTINGS for step in (0, 1)}
    further = tuple(one for place, one in enumerate(server.further) if place not in drop)
    one = replace(server, n_max=n_max, p_min=p_min, parallel=1, further=further)
    return one.plain if settings == PLAIN else one


def visit(
    candidates: Sequence[Candidate],
    server: LlamaServer,
    prompts: Sequence[Sequence[int]],
    limit: int,
    opened: Opened,
    title: str,
) -> None:
    """Every candidate on these prompts: in a random order and in its reverse, and twice so where they are FEW."""
    draws, orders = random.Random(len(candidates)), list[list[Candidate]]()
    for _ in range(2 if len(candidates) <= FEW else 1):
        order = draws.sample(candidates, len(candidates))
        orders += [order, order[::-1]]
    progress = Progress(title, len(orders) * len(candidates))
    for one in candidates:
        one.rounds += 1
        one.texts += [[] for _ in range(len(prompts) - len(one.texts))]
    for order in orders:
        for one in order:
            with opened(with_settings(server, one.settings)) as client:
                warm(client, prompts)
                for place, prompt in enumerate(prompts):
                    one.texts[place].append(client.complete(prompt, limit))
            progress.step()


def choose(
    server: LlamaServer,
    validation: Sequence[Sequence[int]],
    held_out: Sequence[Sequence[int]],
    limit: int,
    opened: Opened,
    whole_grid: bool = False,
) -> ChosenSettings:
    """The settings that were fastest on `validation`, with their speed on `held_out` beside that of the finalists, or
    of the whole grid."""
    started = time.monotonic()
    tried = [Candidate(settings) for settings in grid()]
    alive = tried
    for number, share in enumerate(SHARES):
        size = min(len(validation), max(LEAST, round(share * len(validation))))
        visit(alive, server, validation[:size], limit, opened, f"settings, round {number + 1} of {len(SHARES)}")
        drafting = sorted((one for one in alive if one.settings != PLAIN), key=lambda one: -one.rate)
        plain = next(one for one in alive if one.settings == PLAIN)
        alive = [plain, *drafting[: KEPT[number] if number < len(KEPT) else None]]
    best = max(alive, key=lambda one: one.rate)
    ranked = sorted(alive, key=lambda one: -one.rate)
    finalists = grid() if whole_grid else [one.settings for one in ranked[:FINALISTS]]
    rivals = [Candidate(one) for one in dict.fromkeys([best.settings, PLAIN, *finalists])]
    visit(rivals, server, held_out, limit, opened, "settings, held-out prompts")
    confirmed, others = _beside_the_first(rivals), list[ConfirmedSettings]()
    if whole_grid:
        # The fastest of many is in part the luckiest, so that those of the grid are judged by new replies.
        ranked = sorted(rivals, key=lambda one: -one.rate)
        again = dict.fromkeys([best.settings, PLAIN, *(one.settings for one in ranked[:FINALISTS])])
        judged = [Candidate(one) for one in again]
        visit(judged, server, held_out, limit, opened, "settings, the fastest again")
        others = [one for one in confirmed if (one.n_max, one.p_min) not in again]
        confirmed = _beside_the_first(judged)
    return ChosenSettings(
        n_max=best.settings[0],
        p_min=best.settings[1],
        tried=[TriedSettings(*one.settings, one.rounds, len(one.texts), one.rate) for one in tried],
        confirmed=[*confirmed, *others],
        sentence=_sentence(best.settings, confirmed),
        command=_command(server, best.settings),
        seconds=time.monotonic() - started,
    )


def _beside_the_first(candidates: Sequence[Candidate]) -> list[ConfirmedSettings]:
    first = candidates[0]
    return [ConfirmedSettings(*one.settings, one.rate, first.over(one)) for one in candidates]


def named(settings: Settings) -> str:
    """Settings in words."""
    return "plain decoding" if settings == PLAIN else f"n_max {settings[0]}, p_min {settings[1]:g}"


def _sentence(best: Settings, confirmed: Sequence[ConfirmedSettings]) -> str:
    plain = next(one for one in confirmed if (one.n_max, one.p_min) == PLAIN)
    fastest = max(confirmed, key=lambda one: one.tokens_per_second)
    if best == PLAIN:
        text = "Plain decoding was the fastest on the validation prompts: serve this target without the draft here."
        if fastest.against.high >= 1:
            return text
        return (
            f"{text} But {named((fastest.n_max, fastest.p_min))} is faster on the held-out prompts, over which plain "
            f"decoding has {_ratio(fastest.against)}: give more validation prompts, more --tokens, and a quiet machine."
        )
    text = (
        f"{named(best)}: the fastest on the validation prompts, {_ratio(plain.against)} plain decoding on held-out ones"
    )
    if (fastest.n_max, fastest.p_min) == best:
        return f"{text}, where nothing that was tried is faster."
    rival = named((fastest.n_max, fastest.p_min))
    within = "within the interval" if fastest.against.high >= 1 else "beyond the interval: give more validation prompts"
    return f"{text}; the fastest there is {rival}, over which it has {_ratio(fastest.against)}, {within}."


def _ratio(found: Interval) -> str:
    return f"{found.mean:.3f}× [{found.low:.3f}, {found.high:.3f}]"


def _command(server: LlamaServer, settings: Settings) -> str:
    """The command that serves with these settings, with the user's own options."""
    one = with_settings(server, settings)
    drafts = one.draft is not None
    further = [*option_arguments(one.gguf, drafts), *one.further]
    if not drafts:
        return llama_server(str(one.target), None, 0, None, further)
    return llama_server(str(one.target), str(one.draft), one.n_max, one.p_min or None, further)
