"""Costs as rounds pay them: texts decoded by both models in turn, every part of a round timed where it happens.

A curve of one model alone (curve.py) is taken with its weights in cache and without the calls around a step. In a round
the other model has just run, distributions are read and caches rolled back: of small models that is half the time.

Legend: n tokens drafted in a round, T target, D draft.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from distill.errors import DataError
from distill.models.base import Model
from distill.speculative.costs.curve import StepCosts
from distill.speculative.decode import GREEDY, Decoded, Rules, decode, plain, room_for
from distill.speculative.draft import ModelDrafter
from distill.speculative.lengths import Rule
from distill.speculative.proposal import Features

TOKENS = 96  # decoded after a prompt, so that rounds are timed at the depths of requests
PLAIN_TOKENS = 32  # of them decoded plainly, too
WARM_UP = 8


@dataclass(frozen=True)
class DraftSteps:
    """Seconds of a draft's steps: the first of a round, with one token and with two to read, and a later one."""

    first: float
    first_two: float
    later: float


@dataclass(frozen=True)
class PaidCosts:
    """Median seconds of a pair's requests.

    `token`: of plain decoding; `verify[n]`: of a round of n drafted tokens without its draft steps. `by_argmax`: draft
    steps whose largest logit alone decides, as those of fixed lengths; `by_distribution`: those whose distribution is
    made and read. `target_prompt`, `draft_prompt`: of reading a token of the prompt.
    """

    token: float
    verify: Mapping[int, float]
    by_argmax: DraftSteps
    by_distribution: DraftSteps
    target_prompt: float
    draft_prompt: float

    def step_costs(self) -> StepCosts:
        """What length rules and trees reckon with, up to the first length that was not timed.

        What the first draft step costs beyond the others is the round's overhead.
        """
        steps = self.by_distribution
        verified: list[float] = []
        while len(verified) + 1 in self.verify:
            verified.append(self.verify[len(verified) + 1])
        two = steps.later + max(steps.first_two - steps.first, 0.0)
        return StepCosts((self.token, *verified), steps.later, two, max(steps.first - steps.later, 0.0))

    def round_seconds(self, length: int, whole: float) -> float:
        """Of a round of fixed `length` > 0, a share `whole` of which follow a round that was accepted whole."""
        steps = self.by_argmax
        first = steps.first + whole * (steps.first_two - steps.first)
        return self.verify[length] + first + (length - 1) * steps.later

    def predicted_speedup(self, length: int, accepted: Sequence[float], prompt: int, new: int) -> float:
        """Speed of a fixed `length` > 0 over plain decoding, for `new` tokens after `prompt` tokens that both read.

        accepted[i] is the acceptance at position i, given that it was reached.
        """
        survive, tokens = 1.0, 1.0
        for rate in accepted[:length]:
            survive *= rate
            tokens += survive
        plain_seconds = prompt * self.target_prompt + (new - 1) * self.token
        rounds = (new - 1) / tokens
        reading = prompt * (self.target_prompt + self.draft_prompt)
        return plain_seconds / (reading + rounds * self.round_seconds(length, survive))


@dataclass
class Timer(Rule):
    """Drafts the lengths of `order` in turn, with or without reading distributions, and notes when each step begins."""

    draft: Model
    order: Sequence[tuple[int, bool]]
    rounds: list[tuple[int, bool, list[float], int]] = field(default_factory=list, init=False)
    _marks: list[float] = field(default_factory=list, init=False)
    _read: list[int] = field(default_factory=list, init=False)  # tokens that the draft had read at each mark
    _turn: int = field(default=0, init=False)

    @property
    def reads_features(self) -> bool:  # type: ignore[override]
        """Whether the round at hand makes the draft's distributions."""
        return self.order[self._turn % len(self.order)][1]

    @property
    def wanted(self) -> int:
        """The length of the round at hand."""
        return self.order[self._turn % len(self.order)][0]

    def limit(self) -> int:
        """One more than is drafted, so that the end of the last step is noted, too."""
        self._marks, self._read = [], []
        return self.wanted + 1

    def step_on(self, position: int) -> bool:
        """Note the time; stop at the round's length."""
        self._marks.append(time.perf_counter())
        self._read.append(self.draft.lengths[0])
        return position < self.wanted

    def observe(self, drafted: int, accepted: int, features: Sequence[Features], seconds: float) -> None:
        """Keep the round: its length, the seconds of its steps, and how many tokens the first one read.

        The length is −1 where the text's limit cut the round short.
        """
        taken = [after - before for before, after in zip(self._marks, self._marks[1:], strict=False)]
        first = self._read[1] - self._read[0] if taken else 0
        complete = drafted == self.wanted == len(taken)
        self.rounds.append((drafted if complete else -1, self.reads_features, taken, first))
        self._turn += 1


def measure_paid(
    target: Model, draft: Model, prompts: Sequence[Sequence[int]], lengths: Sequence[int], repeats: int
) -> PaidCosts:
    """Decode the prompts greedily, plainly and with rounds of all lengths in mixed order, until each length was timed
    `repeats` times; 1 and 2 are timed in any case.

    Texts go on behind end tokens and are begun again when the prompts are used up. A prompt that leaves too little room
    is shortened. Raises DataError for contexts that have no room for a round.
    """
    wanted = sorted({1, 2, *lengths} - {0})
    capacity, tokens = min(target.capacity, draft.capacity), max(TOKENS, 2 * wanted[-1] + 2)
    if capacity < wanted[-1] + 4:
        raise DataError(
            f"a context of {capacity} tokens has no room to time rounds of {wanted[-1]} drafted tokens",
            "draft fewer tokens, or give models of a larger context",
        )
    order = [(n, mode) for n in wanted for mode in (False, True)]
    random.Random(0).shuffle(order)  # a slow spell of the machine hits all lengths
    rules = Rules(GREEDY, "greedy")
    timer = Timer(draft, order)
    drafter = ModelDrafter(draft, timer, GREEDY, rules.random)
    verify: dict[int, list[float]] = {n: [] for n in wanted}
    steps: dict[tuple[bool, str], list[float]] = {}
    alone: list[float] = []
    reading: list[float] = []
    both: list[float] = []
    passes = 0
    while not alone or any(len(found) < repeats for found in verify.values()):
        prompt = prompts[passes % len(prompts)][: max(1, capacity - tokens)]
        limit = room_for(target, draft, len(prompt), tokens)
        if not passes:  # lazily made buffers and kernels are not to be timed
            plain(target, prompt, min(limit, WARM_UP))
            _round_after_round(target, drafter, prompt, min(limit, WARM_UP), rules)
            timer.rounds.clear()
        passes += 1
        single = plain(target, prompt, min(limit, PLAIN_TOKENS))
        alone.append(single.seconds / (len(single.tokens) - 1))
        timer.rounds.clear()
        result = _round_after_round(target, drafter, prompt, limit, rules)
        reading.append(single.prefill_seconds / len(prompt))
        both.append(result.prefill_seconds / len(prompt))
        for (drafted, mode, taken, first), done in zip(timer.rounds, result.rounds, strict=True):
            if drafted > 0:
                verify[drafted].append(done.seconds - sum(taken))
                steps.setdefault((mode, {1: "first", 2: "first_two"}.get(first, "other")), []).append(taken[0])
                steps.setdefault((mode, "later"), []).extend(taken[1:])
    median = statistics.median
    own = median(reading)
    return PaidCosts(
        token=median(alone),
        verify={n: median(found) for n, found in verify.items()},
        by_argmax=_steps(steps, False),
        by_distribution=_steps(steps, True),
        target_prompt=own,
        draft_prompt=max(median(both) - own, 0.0),
    )


def _round_after_round(
    target: Model, drafter: ModelDrafter, prompt: Sequence[int], limit: int, rules: Rules
) -> Decoded:
    result = Decoded()
    for _ in decode(target, drafter, prompt, limit, rules, result):
        pass
    return result


def _steps(taken: Mapping[tuple[bool, str], Sequence[float]], mode: bool) -> DraftSteps:
    """The medians of one way to draft; a first step of a kind that never came counts as the other kind."""
    found = {name: taken.get((mode, name), ()) for name in ("first", "first_two", "later")}
    one, two = found["first"] or found["first_two"], found["first_two"] or found["first"]
    return DraftSteps(statistics.median(one), statistics.median(two), statistics.median(found["later"] or one))
