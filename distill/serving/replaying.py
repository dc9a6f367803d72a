"""Prompts replayed on servers and by our own decoder (token ids, cold caches), and the acceptance counted.

Servers take turns, with one request at a time. Legend: τ tokens per round.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from distill.errors import ServingError
from distill.intervals import UNKNOWN, Interval, paired_ratio_interval, ratio_interval, speed_ratio
from distill.models.loaded import load_pair
from distill.models.server_commands import DRAWN_AMONG
from distill.progress import Progress
from distill.recipe import Target, parse_section
from distill.results.serving_results import ServedAcceptance, ServedClass
from distill.sampler import Sampler
from distill.serving.clients import Client
from distill.serving.http import Reply, Totals
from distill.serving.opening import DRAFT, PLAIN
from distill.speculative.decode import Decoded, decode
from distill.speculative.draft import ModelDrafter
from distill.speculative.lengths import Fixed
from distill.speculative.proposal import Proposal
from distill.speculative.rules import Rules
from distill.texts import Prompt

WARM_TOKENS = 8
RESAMPLES, CONFIDENCE = 2000, 0.95


# ── counts ──


@dataclass(frozen=True)
class TextCounts:
    """What was drafted and accepted in the texts behind one prompt, in `later` tokens and `rounds`."""

    later: int
    drafted: int
    accepted: int
    rounds: int

    @classmethod
    def of(cls, tokens: int, drafted: int, accepted: int, rounds: int | None = None) -> TextCounts:
        """Of one text of `tokens`. The first comes from the prompt's step. Where the rounds are not counted, as
        llama-server counts none for a request, they are the tokens that were not accepted: of every later step one
        token is the target's own. A text that ends within a round accepted more than it has."""
        later = max(0, tokens - 1)
        return cls(later, drafted, accepted, max(min(1, later), later - accepted) if rounds is None else rounds)

    def __add__(self, other: TextCounts) -> TextCounts:
        return TextCounts(
            self.later + other.later,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
            self.rounds + other.rounds,
        )


NO_COUNTS = TextCounts(0, 0, 0, 0)


def counted(replies: Sequence[Sequence[Reply]]) -> list[TextCounts]:
    """The counts of replies that have them, summed over those to each prompt."""
    return [
        sum(
            (TextCounts.of(reply.count, reply.drafted or 0, reply.accepted or 0, reply.rounds) for reply in own),
            NO_COUNTS,
        )
        for own in replies
    ]


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
    """Every prompt on every server, one request at a time; the servers' order turns from prompt to prompt.

    Sampled texts of one prompt differ by their seed, which is the number of the repeat.
    """
    found: dict[str, list[list[Reply]]] = {name: [[] for _ in prompts] for name in clients}
    order = list(clients.items())
    progress = Progress(title, repeats * len(prompts))
    for repeat in range(repeats):
        for place, prompt in enumerate(prompts):
            turn = (place + repeat) % len(order)
            for name, client in order[turn:] + order[:turn]:
                reply = client.complete(prompt, limit, repeat)
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


def by_class(
    prompts: Sequence[Prompt], texts: Sequence[TextCounts], replayed: Mapping[str, Replayed]
) -> list[ServedClass]:
    """The figures of each class of prompts, where there are several; without intervals for a class of one prompt."""
    names = [prompt.kind or prompt.source or "prompts" for prompt in prompts]
    classes = []
    for name in dict.fromkeys(names) if len(set(names)) > 1 else ():
        places = [place for place, one in enumerate(names) if one == name]
        some = {key: Replayed([one.texts[place] for place in places]) for key, one in replayed.items()}
        own = acceptance(name, [texts[place] for place in places])
        rise = some[DRAFT].over(some[PLAIN]) if PLAIN in some else UNKNOWN
        figures = [own.rate, own.tokens_per_round, rise]
        if len(places) == 1:
            figures = [Interval(one.mean, math.nan, math.nan) for one in figures]
        classes.append(ServedClass(name, len(places), *figures))
    return classes


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


def counts_of(texts: Sequence[Sequence[OurText]]) -> list[TextCounts]:
    """The counts of texts, summed over those behind each prompt."""
    return [sum((text.counts for text in own), NO_COUNTS) for own in texts]


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
        self,
        target: Path,
        draft: Path,
        prompts: Sequence[Sequence[int]],
        limit: int,
        samples: int,
        threads: int | None,
    ) -> list[list[OurText]]:
        """Our decoder's `samples` texts behind each prompt, from cold caches."""
        place = parse_section(Target, {"model": str(target)})
        room = max(map(len, prompts)) + limit + 2 * self.n_max + 1
        drawn = Sampler(self.sampler.temperature, 0 if self.vllm else DRAWN_AMONG)
        verifier = "token" if self.probabilistic else "match" if self.sampler.temperature else "greedy"
        kind = "drawn drafts" if self.probabilistic else "best tokens drafted" if self.sampler.temperature else "greedy"
        progress = Progress(f"{draft.name}, our decoder, {kind}", len(prompts))
        texts = []
        with load_pair(place, str(draft), tokens=room, threads=threads) as pair:
            for number, prompt in enumerate(prompts):
                own = []
                for sample in range(samples):
                    chance = random.Random(f"{number}, {sample}").random
                    rules = Rules(self.sampler, verifier, ends=() if self.vllm else pair.ends, random=chance)
                    drafter = ServerDrafter(pair.draft, Fixed(self.n_max), drawn, chance, not self.probabilistic)
                    result, most = Decoded(), limit + self.n_max * self.vllm
                    for _ in decode(pair.target, drafter, prompt, most, rules, result):
                        pass
                    own.append(vllm_text(result, len(prompt), limit, pair.ends) if self.vllm else our_text(result))
                texts.append(own)
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
    return OurText(result.tokens, TextCounts.of(len(result.tokens), drafted, accepted))


def vllm_text(result: Decoded, prompt: int, limit: int, ends: Collection[int]) -> OurText:
    """A text that was decoded beyond its end, cut there, with the counts that vLLM has for it: every round that began
    before the end, whole (v1/core/sched/scheduler.py). `prompt` are the tokens before the text."""
    stop = next((place for place, token in enumerate(result.tokens) if token in ends), limit - 1) + 1
    stop = min(stop, limit, len(result.tokens))
    # The target's context lacks the text's last token, which the round's step reads.
    rounds = [r for r in result.rounds if r.depth - prompt + 1 < stop]
    drafted, accepted = sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)
    return OurText(result.tokens[:stop], TextCounts.of(stop, drafted, accepted, len(rounds)))
