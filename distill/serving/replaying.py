"""Prompts replayed on servers and by our own decoder: token ids, cold caches, one request at a time."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy

from distill.errors import ServingError
from distill.intervals import UNKNOWN, Interval, Numbers, speed_ratio
from distill.models.loaded import load_pair
from distill.models.server_commands import DRAWN_AMONG
from distill.progress import Progress
from distill.recipe import Target, parse_section
from distill.results.serving_results import ServedClass
from distill.sampler import Sampler
from distill.serving.clients import DRAFT, PLAIN, Client, Reply
from distill.serving.counts import Text, TextCounts, acceptance
from distill.speculative.decode import Decoded, decode
from distill.speculative.draft import ModelDrafter
from distill.speculative.lengths import Fixed
from distill.speculative.proposal import Proposal
from distill.speculative.rules import Rules
from distill.texts import Prompt

WARM_TOKENS = 8


# ── servers ──


Replayed = Sequence[Sequence[Reply]]  # of one configuration, by prompt and repeat, one request at a time


def sums_of(texts: Replayed) -> tuple[Numbers, Numbers]:
    """Tokens [P] and seconds [P] of all replies, by prompt."""
    tokens, seconds = ([sum(getattr(reply, name) for reply in own) for own in texts] for name in ("count", "seconds"))
    return numpy.array(tokens, float), numpy.array(seconds, float)


def warm(client: Client, prompts: Sequence[Sequence[int]]) -> None:
    """One throw-away text: lazily made buffers and kernels are not to be measured."""
    client.complete(prompts[0], WARM_TOKENS)


def interleaved(
    clients: Mapping[str, Client], prompts: Sequence[Sequence[int]], limit: int, repeats: int, title: str
) -> dict[str, list[list[Reply]]]:
    """Every prompt on every server, one request at a time; the servers' order turns from prompt to prompt.

    Sampled texts of one prompt differ by their seed, which is the number of the repeat.
    """
    replayed: dict[str, list[list[Reply]]] = {name: [[] for _ in prompts] for name in clients}
    order = list(clients.items())
    progress = Progress(title, repeats * len(prompts))
    for repeat in range(repeats):
        for place, prompt in enumerate(prompts):
            turn = (place + repeat) % len(order)
            for name, client in order[turn:] + order[:turn]:
                reply = client.complete(prompt, limit, repeat)
                if reply.cached:
                    raise ServingError(
                        f"{client.url} took {reply.cached} tokens of a prompt from its cache, though it was asked not "
                        "to",
                        "switch its prompt cache off: the times would be of a warm one",
                    )
                replayed[name][place].append(reply)
            progress.step()
    return replayed


def by_class(
    prompts: Sequence[Prompt], texts: Sequence[TextCounts], replayed: Mapping[str, Replayed]
) -> list[ServedClass]:
    """The figures of each class of prompts, where there are several; without intervals for a class of one prompt."""
    names = [prompt.kind or prompt.source or "prompts" for prompt in prompts]
    classes = []
    for name in dict.fromkeys(names) if len(set(names)) > 1 else ():
        places = [place for place, other in enumerate(names) if other == name]
        own = acceptance(name, [texts[place] for place in places])
        sums = [
            sums_of([replayed[server][place] for place in places]) for server in (DRAFT, PLAIN) if server in replayed
        ]
        rise = speed_ratio(*sums[0], *sums[1]) if PLAIN in replayed else UNKNOWN
        figures = [own.rate, own.tokens_per_round, rise]
        if len(places) == 1:
            figures = [Interval(figure.mean, math.nan, math.nan) for figure in figures]
        classes.append(ServedClass(name, len(places), *figures))
    return classes


# ── our decoder ──


class ServerDrafter(ModelDrafter):
    """A draft that goes on behind an end token, as llama-server's does: its drafted tokens are counted alike."""

    def propose(self, context: Sequence[int], limit: int, ends: Collection[int]) -> Proposal:
        """A chain, whatever ends a text."""
        return super().propose(context, limit, ())


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
        self, target: Path, draft: Path, prompts: Sequence[Sequence[int]], limit: int, samples: int, threads: int | None
    ) -> list[list[Text]]:
        """Our decoder's `samples` texts behind each prompt, from cold caches."""
        place = parse_section(Target, {"model": str(target)})
        room = max(map(len, prompts)) + limit + 2 * self.n_max + 1
        drawn = Sampler(self.sampler.temperature, 0 if self.vllm else DRAWN_AMONG)
        verifier = "token" if self.probabilistic else "match" if self.sampler.temperature else "greedy"
        kind = "drawn drafts" if self.probabilistic else "best tokens drafted" if self.sampler.temperature else "greedy"
        progress = Progress(f"{draft.name}, our decoder, {kind}", len(prompts))
        texts: list[list[Text]] = []
        with load_pair(place, str(draft), tokens=room, threads=threads) as pair:
            for number, prompt in enumerate(prompts):
                texts.append([])
                for sample in range(samples):
                    chance = random.Random(f"{number}, {sample}").random
                    rules = Rules(self.sampler, verifier, ends=() if self.vllm else pair.ends, random=chance)
                    drafter = ServerDrafter(pair.draft, Fixed(self.n_max), drawn, chance, not self.probabilistic)
                    result, length = Decoded(), limit + self.n_max * self.vllm
                    for _ in decode(pair.target, drafter, prompt, length, rules, result):
                        pass
                    texts[-1].append(
                        vllm_text(result, len(prompt), limit, pair.ends) if self.vllm else our_text(result)
                    )
                progress.step()
        return texts


def our_text(result: Decoded) -> Text:
    """A decoded text with the counts that llama-server has for it.

    Tokens behind the end of a text are drafted, and not accepted. Nor is a drafted end token, unless it is the last of
    its round (common_sampler_sample_and_accept_n): it counts as the target's own.
    """
    drafted, accepted = sum(r.drafted for r in result.rounds), sum(result.from_draft)
    last = next((place for place, drawn in enumerate(reversed(result.from_draft)) if not drawn), 0)
    if last and last < result.rounds[-1].drafted and result.rounds[-1].accepted >= last:
        accepted -= 1
    return Text(result.tokens, TextCounts.of(len(result.tokens), drafted, accepted))


def vllm_text(result: Decoded, prompt: int, limit: int, ends: Collection[int]) -> Text:
    """A text that was decoded beyond its end, cut there, with the counts that vLLM has for it: every round that began
    before the end, whole (v1/core/sched/scheduler.py). `prompt` are the tokens before the text."""
    stop = next((place for place, token in enumerate(result.tokens) if token in ends), limit - 1) + 1
    stop = min(stop, limit, len(result.tokens))
    # The target's context lacks the text's last token, which the round's step reads.
    rounds = [r for r in result.rounds if r.depth - prompt + 1 < stop]
    drafted, accepted = sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)
    return Text(result.tokens[:stop], TextCounts.of(stop, drafted, accepted, len(rounds)))
