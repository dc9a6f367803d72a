"""What `distill serve-check` found on the user's own server, as dataclasses: tables and JSON are made from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from distill.intervals import UNKNOWN, Interval
from distill.results.serialise import Figure


@dataclass(frozen=True)
class ServedAcceptance:
    """Drafted and accepted tokens of the same prompts, as `source` counts them.

    `rate` is accepted ÷ drafted. `tokens_per_round` counts all steps of the target behind the prompt, those without a
    draft too. Intervals resample prompts. `by_position` holds, of the rounds that drafted, the share that accepted the
    token at each position; None where the source does not say.
    """

    source: str
    prompts: int
    drafted: int
    accepted: int
    rate: Interval
    tokens_per_round: Interval
    by_position: list[float] | None = None


@dataclass(frozen=True)
class ServedSpeed:
    """One configuration under one load: `concurrency` requests at once, each followed by the next, or (0) requests that
    arrived, `offered` a second.

    `in_flight` is the mean number of them. `first_seconds`, until the first token, and `token_seconds`, for each behind
    it, are the median and the 95th percentile over requests, from the moment at which each was due. The speedup is over
    the plain server, in tokens per second of a request's time; NaN for that itself.
    """

    configuration: str
    concurrency: int
    offered: Figure
    requests: int
    tokens: int
    requests_per_second: float
    tokens_per_second: float
    in_flight: float
    first_seconds: tuple[float, float]
    token_seconds: tuple[Figure, Figure]
    speedup: Interval = UNKNOWN


@dataclass(frozen=True)
class ServedClass:
    """The prompts of one class on the server that drafts."""

    name: str
    prompts: int
    rate: Interval
    tokens_per_round: Interval
    speedup: Interval


@dataclass(frozen=True)
class Difference:
    """Something that differs from what the draft was made and measured for.

    `loss` are the tokens per round that it costs: measured with the difference and without, on the same prompts; NaN
    where it was not measured. `explains`: the whole interval of the loss lies above zero.
    """

    what: str
    found: str
    expected: str
    advice: str
    loss: Interval = UNKNOWN
    explains: bool = False


@dataclass(frozen=True)
class DraftSettings:
    """What a server drafts: at most `n_max` tokens (0: plain decoding) of at least `p_min`, `probabilistic` ones drawn
    from the draft."""

    n_max: int
    p_min: float
    probabilistic: bool = False

    @property
    def title(self) -> str:
        """In words."""
        if not self.n_max:
            return "plain decoding"
        return f"n_max {self.n_max}, p_min {self.p_min:g}{', probabilistic' if self.probabilistic else ''}"


@dataclass(frozen=True)
class TriedSettings:
    """Settings with their speed on validation prompts in the last round that they took part in, and how many rounds and
    prompts these were."""

    settings: DraftSettings
    rounds: int
    prompts: int
    tokens_per_second: float


@dataclass(frozen=True)
class ConfirmedSettings:
    """Settings on held-out prompts; `against` is the speed of the chosen settings over theirs."""

    settings: DraftSettings
    tokens_per_second: float
    against: Interval


@dataclass(frozen=True)
class ChosenSettings:
    """The fastest settings on validation prompts, and how they do on others."""

    settings: DraftSettings
    tried: list[TriedSettings]
    confirmed: list[ConfirmedSettings]
    sentence: str
    command: str
    seconds: float


@dataclass(frozen=True)
class ServeReport:
    """A pair on the user's server, with and without its draft, under `sampler` and from cold caches.

    `acceptance` holds the server's own counts first. `probabilistic`: its drafts were drawn from the draft; `drawn` are
    the tokens per round that this adds to drafts of its best tokens, NaN where one of them was not measured.
    `predicted` is what the run measured for the same draft length on its own test prompts; NaN where there is no run,
    and of sampled requests. `same_texts` of `texts` have the tokens of the plain server. `sentences` say what was
    found, in order of weight.
    """

    command: str
    machine: dict[str, Any]
    server: str
    build: str
    served: str
    target: str
    draft: str
    n_max: int
    p_min: float
    probabilistic: bool
    sampler: dict[str, Any]
    drawn: Interval
    prompts: int
    new_tokens: int
    left_out: dict[str, int]
    acceptance: list[ServedAcceptance]
    predicted: Figure
    speeds: list[ServedSpeed]
    classes: list[ServedClass]
    differences: list[Difference]
    same_texts: int
    texts: int
    sentences: list[str]
    choice: ChosenSettings | None = None
    notes: list[str] = field(default_factory=list)
