"""Prompts replayed on servers and by our own decoder (token ids, greedy, cold caches), and the acceptance counted.

Servers take turns, with one request or several at once. Legend: τ tokens per round.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import numpy

from distill.errors import ServingError
from distill.intervals import UNKNOWN, Interval, paired_ratio_interval, ratio_interval, speed_ratio
from distill.models.loaded import load_pair
from distill.progress import Progress
from distill.recipe import Target, parse_section
from distill.results.serving_results import ServedAcceptance, ServedSpeed
from distill.serving.clients import Client
from distill.serving.http import Reply, Totals
from distill.speculative.decode import Decoded, decode
from distill.speculative.draft import ModelDrafter
from distill.speculative.lengths import Fixed
from distill.speculative.proposal import Proposal
from distill.speculative.rules import GREEDY, Rules

WARM_TOKENS = 8
PASSES = 2  # requests for each that is sent at once, at least
RESAMPLES, CONFIDENCE = 2000, 0.95


# ── counts ──


@dataclass(frozen=True)
class TextCounts:
    """One text: its tokens, and how many were drafted and accepted.

    The first token comes from the prompt's step. Of every later step one token is the target's own, so the steps are
    the tokens that were not accepted: llama-server shows no count of steps for a request.
    """

    tokens: int
    drafted: int
    accepted: int

    @property
    def later(self) -> int:
        """Tokens behind the first."""
        return max(0, self.tokens - 1)

    @property
    def rounds(self) -> int:
        """Steps of the target behind the prompt. A text that ends within a round accepted more than it has."""
        return max(min(1, self.later), self.later - self.accepted)


def counted(replies: Sequence[Reply]) -> list[TextCounts]:
    """The counts of replies that have them."""
    return [TextCounts(reply.count, reply.drafted or 0, reply.accepted or 0) for reply in replies]


def acceptance(source: str, texts: Sequence[TextCounts], totals: Totals | None = None) -> ServedAcceptance:
    """Both rates with their intervals over prompts; `totals` of the same texts give the positions."""
    drafted, accepted = [text.drafted for text in texts], [text.accepted for text in texts]
    later, rounds = [text.later for text in texts], [text.rounds for text in texts]
    positions = None
    if totals is not None and totals.rounds and totals.by_position:
        positions = [accepted_there / totals.rounds for accepted_there in totals.by_position]
    return ServedAcceptance(
        source=source,
        prompts=len(texts),
        drafted=sum(drafted),
        accepted=sum(accepted),
        rate=ratio_interval(accepted, drafted, RESAMPLES, CONFIDENCE),
        tokens_per_round=ratio_interval(later, rounds, RESAMPLES, CONFIDENCE),
        by_position=positions,
    )


def rise_of_tokens(before: Sequence[TextCounts], after: Sequence[TextCounts]) -> Interval:
    """τ of `after` less τ of `before`, of the same prompts."""
    sides = [([text.later for text in side], [text.rounds for text in side]) for side in (before, after)]
    return paired_ratio_interval(*sides[0], *sides[1], RESAMPLES, CONFIDENCE)


# ── servers ──


@dataclass(frozen=True)
class Replayed:
    """The replies of one configuration by prompt, one request at a time: `texts[prompt][repeat]`."""

    texts: list[list[Reply]]

    @property
    def first(self) -> list[Reply]:
        """The first reply to each prompt."""
        return [replies[0] for replies in self.texts]

    @property
    def tokens(self) -> list[int]:
        """Tokens of all replies, by prompt."""
        return [sum(reply.count for reply in replies) for replies in self.texts]

    @property
    def seconds(self) -> list[float]:
        """Seconds of all replies, by prompt."""
        return [sum(reply.seconds for reply in replies) for replies in self.texts]

    def over(self, base: Replayed) -> Interval:
        """Its speed over another's, of the same prompts."""
        return speed_ratio(self.tokens, self.seconds, base.tokens, base.seconds, RESAMPLES, CONFIDENCE)


def warm(client: Client, prompts: Sequence[Sequence[int]]) -> None:
    """One throw-away text: lazily made buffers and kernels are not to be measured."""
    client.complete(prompts[0], WARM_TOKENS)


def interleaved(
    clients: Mapping[str, Client], prompts: Sequence[Sequence[int]], limit: int, repeats: int, title: str
) -> dict[str, Replayed]:
    """Every prompt on every server, one request at a time; the servers' order turns from prompt to prompt."""
    found: dict[str, list[list[Reply]]] = {name: [[] for _ in prompts] for name in clients}
    order = list(clients.items())
    progress = Progress(title, repeats * len(prompts))
    for repeat in range(repeats):
        for place, prompt in enumerate(prompts):
            turn = (place + repeat) % len(order)
            for name, client in order[turn:] + order[:turn]:
                reply = client.complete(prompt, limit)
                _require_cold(client, reply)
                found[name][place].append(reply)
            progress.step()
    return {name: Replayed(texts) for name, texts in found.items()}


def _require_cold(client: Client, reply: Reply) -> None:
    if reply.cached:
        raise ServingError(
            f"{client.url} took {reply.cached} tokens of a prompt from its cache, though it was asked not to",
            "switch its prompt cache off: the times would be of a warm one",
        )


def together(
    client: Client, prompts: Sequence[Sequence[int]], limit: int, concurrency: int
) -> tuple[list[Reply], float]:
    """Every prompt at least once, `concurrency` requests at a time; prompts are taken again until there are enough.

    The replies, and the seconds from the first one's start to the last's end.
    """
    count = max(len(prompts), PASSES * concurrency)
    work = [prompts[number % len(prompts)] for number in range(count)]
    with ThreadPoolExecutor(max_workers=concurrency) as pool:
        started = time.perf_counter()
        futures = [pool.submit(client.complete, prompt, limit) for prompt in work]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        try:
            for future in done:
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        seconds = time.perf_counter() - started
    return [future.result() for future in futures], seconds


def alone_speed(title: str, replayed: Replayed, base: Replayed | None) -> ServedSpeed:
    """The figures of requests sent one at a time."""
    return ServedSpeed(
        configuration=title,
        concurrency=1,
        requests=sum(map(len, replayed.texts)),
        tokens=sum(replayed.tokens),
        tokens_per_second=sum(replayed.tokens) / sum(replayed.seconds),
        first_seconds=_latency([reply for replies in replayed.texts for reply in replies]),
        speedup=UNKNOWN if base is None else replayed.over(base),
    )


def shared_speeds(
    clients: Mapping[str, Client], prompts: Sequence[Sequence[int]], limit: int, concurrency: int, repeats: int
) -> list[ServedSpeed]:
    """The figures of requests that share each server, the servers in turn; speedups over the first of them."""
    replies: dict[str, list[Reply]] = {name: [] for name in clients}
    seconds = dict.fromkeys(clients, 0.0)
    progress = Progress(f"{concurrency} requests at once", repeats * len(clients))
    order = list(clients)
    for repeat in range(repeats):
        for name in order if repeat % 2 == 0 else order[::-1]:
            own, taken = together(clients[name], prompts, limit, concurrency)
            replies[name] += own
            seconds[name] += taken
            progress.step()
    tokens = {name: sum(reply.count for reply in own) for name, own in replies.items()}
    rates = {name: tokens[name] / seconds[name] for name in clients}
    return [
        ServedSpeed(
            configuration=name,
            concurrency=concurrency,
            requests=len(own),
            tokens=tokens[name],
            tokens_per_second=rates[name],
            first_seconds=_latency(own),
            speedup=UNKNOWN
            if name == order[0]
            else Interval(rates[name] / rates[order[0]], float("nan"), float("nan")),
        )
        for name, own in replies.items()
    ]


def _latency(replies: Sequence[Reply]) -> tuple[float, float]:
    first = [reply.first_seconds for reply in replies]
    return float(numpy.median(first)), float(numpy.quantile(first, 0.9))


# ── our decoder ──


class ServerDrafter(ModelDrafter):
    """A draft that goes on behind an end token, as llama-server's does: its drafted tokens are counted alike."""

    def propose(self, context: Sequence[int], limit: int, ends: Collection[int]) -> Proposal:
        """A chain, whatever ends a text."""
        return super().propose(context, limit, ())


@dataclass(frozen=True)
class OurText:
    """A text of our decoder, with its counts."""

    tokens: list[int]
    counts: TextCounts


def decode_files(
    target: Path, draft: Path, prompts: Sequence[Sequence[int]], limit: int, n_max: int, threads: int | None
) -> list[OurText]:
    """Each prompt continued greedily with up to `n_max` drafted tokens a round, from cold caches."""
    place = parse_section(Target, {"model": str(target)})
    room = max(map(len, prompts)) + limit + n_max + 1
    progress = Progress(f"{draft.name}, our decoder", len(prompts))
    texts = []
    with load_pair(place, str(draft), tokens=room, threads=threads) as pair:
        drafter = ServerDrafter(pair.draft, Fixed(n_max), GREEDY, lambda: 0.0)
        for prompt in prompts:
            result = Decoded()
            for _ in decode(pair.target, drafter, prompt, limit, Rules(ends=pair.ends), result):
                pass
            texts.append(our_text(result))
            progress.step()
    return texts


def our_text(result: Decoded) -> OurText:
    """A decoded text with the counts that llama-server has for it.

    Tokens behind the end of a text are drafted, and not accepted. Nor is a drafted end token, unless it is the last of
    its round (common_sampler_sample_and_accept_n): it counts as the target's own.
    """
    drafted, accepted = sum(r.drafted for r in result.rounds), sum(result.from_draft)
    last = next((place for place, drawn in enumerate(reversed(result.from_draft)) if not drawn), 0)
    if last and last < result.rounds[-1].drafted and result.rounds[-1].accepted >= last:
        accepted -= 1
    return OurText(result.tokens, TextCounts(len(result.tokens), drafted, accepted))
