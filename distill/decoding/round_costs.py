"""Costs measured inside rounds: both models decode texts in turn, and every part of a round is timed.

A curve of one model alone (costs.py) is measured with its weights in cache and without the calls around a step. In a
round the other model has just run, distributions are read and caches rolled back: with small models that is half the
time.

Legend: n tokens drafted in a round, T target, D draft.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from distill.decoding.costs import Costs, measure_steps, range_start, rising, steady, step_seconds
from distill.decoding.decode import decode_text, plain, room_for
from distill.decoding.drafters import ModelDrafter
from distill.decoding.lengths import Features, LengthRule
from distill.decoding.rules import GREEDY, Rules
from distill.engines.loaded import LoadedPair
from distill.engines.model import Model
from distill.errors import DataError
from distill.files import cache_folder, digest, from_json, read_object, remember
from distill.progress import Progress, warn

PROMPTS = 4  # after which rounds are timed
TOKENS = 96  # decoded after a prompt, so that rounds are timed at the depths of requests
WARM_UP = 8
HELD_UP = 3  # times the median: what took longer was held up by something else


def typical(seconds: Sequence[float]) -> float:
    """The mean without what lies HELD_UP above the median: requests take the sum of many rounds, not their median."""
    limit = HELD_UP * statistics.median(seconds)
    return statistics.fmean(value for value in seconds if value <= limit)


@dataclass
class Timer(LengthRule):
    """Drafts the lengths of `order` in turn, and notes when each step begins.

    A round is its length (−1 where the text's limit cut it short), the seconds of its steps but the last, which ends
    unseen, and how many tokens the draft had read before (−1 where no step was seen, as where a device drafts the whole
    chain).
    """

    draft: Model
    order: Sequence[int]
    distributions: bool
    rounds: list[tuple[int, list[float], int]] = field(default_factory=list, init=False)
    _marks: list[float] = field(default_factory=list, init=False)
    _read: int = field(default=-1, init=False)
    _turn: int = field(default=0, init=False)

    @property
    def reads_features(self) -> bool:  # type: ignore[override]
        """Whether the draft's distributions are made."""
        return self.distributions

    def limit(self) -> int:
        """The length of the round at hand."""
        self._marks, self._read = [], -1
        return self.order[self._turn % len(self.order)]

    def step_on(self, position: int) -> bool:
        """Note the time."""
        if position == 0:
            self._read = self.draft.lengths[0]
        self._marks.append(time.perf_counter())
        return True

    def observe(self, drafted: int, accepted: int, features: Sequence[Features], seconds: float) -> None:
        """Keep the round."""
        taken = [after - before for before, after in itertools.pairwise(self._marks)]
        whole = drafted == self.order[self._turn % len(self.order)]
        self.rounds.append((drafted if whole else -1, taken, self._read))
        self._turn += whole  # the next text begins with a length that this one had no room for


class RoundCostMeter:
    """Times the parts of rounds on greedy texts, plain ones and ones with rounds of all lengths in mixed order.

    Lengths go up to `longest`, to 3 in any case, for the draft's steps. With `distributions` those of the draft are
    made and read; without, its largest logit decides. Texts are of `tokens` new tokens, or of as many as two rounds may
    make; they go on after end tokens, and a prompt that leaves too little room is shortened. Raises DataError for
    contexts that have no room for a round.
    """

    def __init__(
        self,
        target: Model,
        draft: Model,
        prompts: Sequence[Sequence[int]],
        longest: int,
        distributions: bool,
        tokens: int = TOKENS,
    ) -> None:
        longest = max(longest, 3)
        capacity, tokens = min(target.capacity, draft.capacity), max(tokens, 2 * longest + 2)
        if capacity < longest + 4:
            raise DataError(f"a context of {capacity} tokens has no room to time rounds of {longest} drafted tokens")
        self._models, self._tokens = (target, draft), tokens
        self._prompts = [prompt[: max(1, capacity - tokens)] for prompt in prompts]
        # In mixed order a slow spell of the machine hits all lengths.
        order = random.Random(0).sample(range(1, longest + 1), longest)
        self._rules = Rules(GREEDY, "greedy")
        self._timer = Timer(draft, order, distributions)
        self._drafter = ModelDrafter(draft, self._timer, GREEDY, self._rules.random)
        # Seconds without the steps seen, and the kind of the last one.
        self._rounds: dict[int, list[tuple[float, str]]] = {n: [] for n in range(1, longest + 1)}
        self._steps: dict[str, list[float]] = {"first": [], "first_two": [], "other": [], "later": []}
        self._plain: list[float] = []
        self._reading: list[float] = []
        self._both: list[float] = []
        self.passes = 0

    def _least(self, known: int) -> int:
        """How often the length that was timed least was timed; one whose rounds are steady counts as `known` times."""
        rounds = [[seconds for seconds, *_ in own] for own in self._rounds.values()]
        return min(known if steady(own) else len(own) for own in rounds) if self._plain else 0

    def text(self) -> None:
        """Time one text; the prompts are taken in turn."""
        target, draft = self._models
        prompt = self._prompts[self.passes % len(self._prompts)]
        limit = room_for(target, draft, len(prompt), self._tokens)
        if not self.passes:  # lazily made buffers and kernels are not to be timed
            plain(target, prompt, min(limit, WARM_UP))
            decode_text(target, self._drafter, prompt, min(limit, WARM_UP), self._rules)
        self.passes += 1
        # In turn, because machines drift; half a text, since all plain steps are alike.
        single = plain(target, prompt, max(2, limit // 2))
        self._plain.append(single.seconds / (len(single.tokens) - 1))
        self._timer.rounds.clear()
        result = decode_text(target, self._drafter, prompt, limit, self._rules)
        self._reading.append(single.prefill_seconds / len(prompt))
        self._both.append(result.prefill_seconds / len(prompt))
        for (drafted, taken, read), done in zip(self._timer.rounds, result.rounds, strict=False):
            if drafted < 1:
                continue
            kind = {1: "first", 2: "first_two"}.get(done.depth + 1 - read, "other") if read >= 0 else "nothing"
            own_kind = kind if drafted == 1 else "later"
            self._rounds[drafted].append((done.seconds - sum(taken), own_kind))
            if taken:
                self._steps[kind].append(taken[0])
                self._steps["later"] += taken[1:]

    def until(self, repeats: int) -> None:
        """Time texts until each length was timed `repeats` times or, where that is enough, is `steady`; DataError for a
        draft that proposes too little."""
        progress = Progress("rounds, repeats of every length", repeats, done=self._least(repeats), brief=True)
        while self._least(repeats) < repeats:
            if self.passes > 2 * repeats * len(self._timer.order):  # each text has room for one round at least
                raise DataError(
                    "the draft proposes fewer tokens than it is asked for: rounds of "
                    f"{self._timer.limit()} could not be timed"
                )
            self.text()
            progress.step(max(min(self._least(repeats), repeats) - progress.done, 0))

    def costs(self) -> Costs:
        """The costs measured on all texts so far.

        What the first draft step costs beyond the others is the round's overhead. Rounds of more tokens are taken to
        cost no less (a shorter one could always be padded), which few repeats show only up to noise: see `rising`.
        """
        medians = {kind: statistics.median(seconds) for kind, seconds in self._steps.items() if seconds}
        later = medians.get("later", 0.0)  # 0 where no step was seen, because steps are then part of the round
        first = medians.get("first", later)
        two = medians.get("first_two", first)
        # A second token costs nothing or more, where a first step was seen without one, too.
        steps = {"nothing": 0.0, "first": first, "first_two": max(two, first) if "first" in medians else two}
        steps["later"] = later
        # Of a round's steps all but the last were seen; that one takes as long as the median of its kind.
        verified = [
            statistics.median(seconds - steps[last] for seconds, last in rounds if last in steps)
            for rounds in self._rounds.values()
        ]
        own = typical(self._reading)
        return Costs(
            (typical(self._plain), *rising(verified)),
            later,
            later + max(steps["first_two"] - first, 0.0),
            max(first - later, 0.0),
            target_prompt=own,
            draft_prompt=max(typical(self._both) - own, 0.0),
        )


def measure_costs(
    target: Model, draft: Model, prompts: Sequence[Sequence[int]], longest: int, repeats: int, tokens: int = TOKENS
) -> Costs:
    """The costs of rounds whose draft's distributions are read, once each length up to `longest` was timed `repeats`
    times or is steady, and of the steps that verify what no model drafted; raises as RoundCostMeter.

    Of a target alone (`draft` is the target) those steps are all there is, because no cache holds two texts. Of steps
    the fastest repeats count, of all sizes in the same rounds: what disturbs some of them, or a slow minute, must not
    decide which lengths look cheap. A plain step follows one of its own size, as most do; steps of another size than
    the last one cost more in llama.cpp.
    """
    costs = None
    if draft is not target:
        meter = RoundCostMeter(target, draft, prompts, longest, True, min(tokens, TOKENS))
        meter.until(repeats)
        costs = meter.costs()
    longest = min(longest, target.capacity - 2)
    depth = len(prompts[len(prompts) // 2]) + tokens // 2
    depth = max(1, min(depth, target.capacity - longest - 1))
    seconds = step_seconds(target, [1, *range(1, longest + 2)], depth, repeats)
    fastest = tuple(rising([min(seconds[m]) for m in range(1, longest + 2)]))
    return Costs(fastest, 0.0, 0.0) if costs is None else replace(costs, target_only=fastest)


# ── Costs kept: in the loaded pair, and in a file beside the imported GGUF files ──

FORMAT = 3  # of the files
SHALLOW = 16  # tokens behind which a plain step is timed, to see whether the machine is as fast as it was
CHECKS = 5  # times
OFF = 1.2  # a step that takes this many times longer or less asks for new costs
COST_REPEATS = 2  # of every length, before texts, whose own rounds correct the costs: a second on a small pair
FIRST_DEPTH = 512  # tokens at which the second range of depths begins; each later range is twice as long


@dataclass(frozen=True)
class KeptCosts:
    """Costs of a pair by depth (the first one of a range) under the conditions in which they were timed, when a plain
    step behind SHALLOW tokens took `step` seconds."""

    format: int
    conditions: dict[str, Any]
    step: float
    by_depth: dict[int, Costs]


def pair_costs(pair: LoadedPair, prompts: Sequence[Sequence[int]], longest: int, tokens: int = TOKENS) -> Costs:
    """What rounds of up to `longest` tokens cost in the first `tokens` behind prompts: as the pair has them from texts
    before, as a file keeps them, or timed now and kept. A file that is damaged, of other conditions or of a machine
    that has become faster or slower is not used, and stderr says so."""
    _read_kept(pair)
    depth = len(prompts[len(prompts) // 2])
    found = pair.costs.get(range_start(depth, FIRST_DEPTH))
    if found is None or len(found.target) <= min(longest, pair.target.capacity - 2):
        found = measure_costs(pair.target, pair.draft, prompts, longest, COST_REPEATS, tokens)
        keep_costs(pair, depth, found)
    return found.of_target(pair.target)


def keep_costs(pair: LoadedPair, depth: int, costs: Costs) -> None:
    """Keep costs at a depth for later texts of this pair and, with its others, in the file for later processes."""
    pair.costs[range_start(depth, FIRST_DEPTH)] = costs
    if pair.conditions is None:
        return
    path, step = _file_of(pair.conditions), _plain_step(pair)
    with contextlib.suppress(DataError):  # there is none, or it cannot be used
        kept = from_json(read_object(path), KeptCosts, str(path))
        same = (kept.format, kept.conditions) == (FORMAT, pair.conditions)
        if same and step / OFF <= kept.step <= step * OFF:  # by another process meanwhile
            pair.costs.update(kept.by_depth | pair.costs)
    remember(path, asdict(KeptCosts(FORMAT, pair.conditions, step, pair.costs)))


def _read_kept(pair: LoadedPair) -> None:
    """Give a pair that has no costs those of its file."""
    if pair.costs or pair.conditions is None or not os.path.exists(path := _file_of(pair.conditions)):
        return
    try:
        kept = from_json(read_object(path), KeptCosts, str(path))
    except DataError as error:
        warn(f"{error.what}: costs are timed again")
        return
    if (kept.format, kept.conditions) != (FORMAT, pair.conditions) or not kept.step > 0:
        warn(f"{path} keeps costs of other models, of another machine or version: they are timed again")
        return
    now = _plain_step(pair)
    if not 1 / OFF <= now / kept.step <= OFF:
        was = f"{kept.step * 1e3:.1f} ms when the costs in {path} were timed"
        warn(f"a plain step takes {now * 1e3:.1f} ms, and took {was}: they are timed again")
        return
    pair.costs.update(kept.by_depth)


def _file_of(conditions: Mapping[str, Any]) -> Path:
    return cache_folder("costs") / f"{digest(conditions)}.json"


def _plain_step(pair: LoadedPair) -> float:
    target = pair.target
    depth = max(1, min(SHALLOW, target.capacity - 2))
    return measure_steps(target, [1], depth, CHECKS)[1]
