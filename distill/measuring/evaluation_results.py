"""What the evaluation measures: eval.json as dataclasses, and one label for every measure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from distill.engines.server_commands import SAMPLING
from distill.files import Figure
from distill.intervals import Interval

CEILING = "acceptance_ceiling"  # shown of trimmed drafts only
DRAWN = "acceptance_drawn"  # shown under a sampler only

# The label of every measure, in the order of the tables and of the columns of `position_metrics`.
MEASURES = {
    "forward_kl": "KL(target ‖ draft), nats",
    "reverse_kl": "KL(draft ‖ target), nats",
    "total_variation": "total variation",
    "top1_agreement": "top-1 agreement",
    "acceptance_sampling": "acceptance probability, rejection sampling",
    DRAWN: "acceptance probability, llama-server's probabilistic drafts",
    "acceptance_match": "acceptance probability, draft's argmax = sampled token",
    "acceptance_greedy": "acceptance probability, greedy",
    CEILING: "ceiling of the acceptance probability: the target's mass on tokens the draft can propose",
}
RATES = {"top1_agreement", "acceptance_sampling", DRAWN, "acceptance_match", "acceptance_greedy"}  # shown in per cent

# The slices of positions by name, with what their tables are headed by.
SLICES = {
    "token": "kind of token",
    "depth": "tokens before it",
    "repetition": "in the text before",
    "part": "part of the reply",
    "language": "text or code",
}

# What `Reliability` is of, and its label.
RELIABILITIES = {"token": "drafted token", "product": "running product"}

FEW_PROMPTS = 8  # an interval over fewer says nothing
SIDES = ("before", "after")  # the drafts of a run: as cut, and as trained


@dataclass(frozen=True)
class Divergences:
    """Every measure of one draft on the texts of one domain: means per token, whose intervals resample the units.

    `tokens` and `prompts` count what was measured; a unit is a prompt's text or a document (`prompts` counts either).
    """

    tokens: int
    prompts: int
    forward_kl: Interval
    reverse_kl: Interval
    total_variation: Interval
    top1_agreement: Interval
    acceptance_sampling: Interval
    acceptance_match: Interval
    acceptance_greedy: Interval
    acceptance_ceiling: Interval
    acceptance_drawn: Interval

    def measure(self, name: str) -> Interval:
        """One of MEASURES."""
        found: Interval = getattr(self, name)
        return found

    @property
    def trimmed(self) -> bool:
        """Whether the draft cannot propose every token of the target."""
        return self.acceptance_ceiling.mean < 1 - 1e-6


@dataclass(frozen=True)
class PositionAcceptance:
    """Conditional acceptance at one drafted position: `rate` is accepted ÷ drafted, counted where it was reached."""

    position: int
    drafted: int
    accepted: int
    rate: Interval


@dataclass(frozen=True)
class ClassResult:
    """The target's own text of one class of prompts: acceptance probability as served and tokens per round, by draft.

    `name` is the prompts' label and mode, such as `math, thinking`.
    """

    name: str
    prompts: int
    tokens: int
    acceptance: dict[str, Interval]
    tokens_per_round: dict[str, Interval]


@dataclass(frozen=True)
class SliceResult:
    """The positions of domain `answers` that share a label of a slice (`evaluation.slices`): acceptance probability as
    served, by draft; `share` is that of all positions."""

    slice: str
    label: str
    tokens: int
    share: float
    acceptance: dict[str, Interval]


@dataclass(frozen=True)
class ReliabilityBin:
    """The tokens whose promised probability lies from `low` to `high`: its mean, and the share that was accepted."""

    low: Figure
    high: Figure
    tokens: int
    promised: Figure
    accepted: Interval


@dataclass(frozen=True)
class Reliability:
    """How a draft's own probabilities compare with what was accepted, on greedily decoded rounds.

    `of` is one of RELIABILITIES. `error` is the expected calibration error, `error_of_chance` what it would be on
    average if every probability were right: so few tokens give it by chance alone.
    """

    of: str
    tokens: int
    promised: Figure
    accepted: Interval
    error: Figure
    error_of_chance: Figure
    bins: list[ReliabilityBin]


@dataclass(frozen=True)
class Bounds:
    """The least and the largest mean that a compact store allows; NaN where it gives no bound."""

    least: Figure
    most: Figure


@dataclass(frozen=True)
class StoredMeasures:
    """What an evaluation without the target's weights rests on: stored distributions, and the target's own answers.

    `source` gave the distributions, `entries` likeliest tokens a position at `temperature`; `served` is the sampler
    that wrote the answers. `bounds` are by domain, draft and measure; `sampled` is, by draft, the share of the answers'
    tokens that equal the draft's argmax. `left_out` counts answers and documents that were not measured, by reason.
    """

    source: str
    temperature: float
    entries: int
    served: dict[str, int | float]
    bounds: dict[str, dict[str, dict[str, Bounds]]]
    sampled: dict[str, Interval]
    left_out: dict[str, int] = field(default_factory=dict)

    @property
    def sentences(self) -> list[str]:
        """What a reader must know before quoting the figures."""
        served = ", ".join(f"{name} {value}" for name, value in self.served.items())
        found = [
            f"The target's weights were not loaded (target.load: false): no rounds were decoded, and its distributions "
            f"are those of {self.source}, {self.entries} likeliest tokens a position and the mass of the rest.",
            f"These distributions hold at temperature {self.temperature:g}, and so do KL and acceptance probabilities; "
            f"the answers were sampled as served ({served}).",
            "A store without every token gives bounds: each mean lies between them, the table shows their middle, and "
            "its interval runs from the least's lower end to the largest's upper end. What it cannot bound is not "
            "measured: the KL from draft to target, and any KL of a trimmed draft.",
        ]
        widths = [
            found["acceptance_sampling"].most - found["acceptance_sampling"].least
            for drafts in self.bounds.values()
            for found in drafts.values()
        ]
        if max(widths, default=0.0) > WIDE:
            found.append(
                f"The bounds of the acceptance probability are up to {max(widths):.2f} apart: a larger teacher.top_k "
                "narrows them (for servers, with a larger --max-logprobs)."
            )
        if self.left_out:
            listed = ", ".join(f"{count} {reason}" for reason, count in self.left_out.items())
            found.append(f"Not measured: {listed}.")
        return found


WIDE = 0.05  # bounds of an acceptance probability further apart say little
SAMPLED = "share of the sampled answers' tokens that are the draft's argmax"  # label of StoredMeasures.sampled
SAMPLED_MEANS = (
    "It estimates, without bias, the acceptance probability of the match protocol (the draft's argmax compared with a "
    "sampled token) at the served sampler."
)


@dataclass(frozen=True)
class Stretch:
    """A stretch of a target's own text, with the mean acceptance probability of its tokens."""

    text: str
    acceptance: Figure


@dataclass(frozen=True)
class PairCosts:
    """Of a pair of GGUF files: their sizes, the target's T(1), T(2), … and the draft's step, in seconds.

    `speedup` over plain decoding is predicted, with `length` tokens drafted a round (0: plain decoding is faster) and
    the acceptance probability the same at each position.
    """

    target_bytes: int
    draft_bytes: int
    target_seconds: list[float]
    draft_seconds: float
    length: int
    speedup: float

    @property
    def tokens_per_second(self) -> float:
        """Predicted, with that draft length."""
        return self.speedup / self.target_seconds[0]


@dataclass(frozen=True)
class ComparedPair:
    """One of several pairs, on its target's own text.

    `difference` is its acceptance probability less that of the first pair, by prompt; None for the first. `worst`
    are the stretches that it is accepted least on; `costs` is None where no steps were timed.
    """

    difference: Interval | None
    worst: list[Stretch]
    costs: PairCosts | None = None


@dataclass(frozen=True)
class EvaluationReport:
    """eval.json. `length` is γ of the decoded rounds; the dictionaries without a domain are by draft.

    `domains` is empty where no divergences were asked for; `positions` and `tokens_per_round` where no rounds were;
    `classes` where the prompts have no labels and modes, or all the same; `slices` where all positions are alike.
    `stored` where the target was not loaded; `sampler` is then that of the stored distributions. `pairs` where several
    were compared, or their steps timed; the names of drafts then name pairs.
    """

    command: str
    sampler: dict[str, int | float]
    length: int
    domains: dict[str, dict[str, Divergences]]
    positions: dict[str, list[PositionAcceptance]]
    tokens_per_round: dict[str, Interval]
    classes: list[ClassResult] = field(default_factory=list)
    stored: StoredMeasures | None = None
    slices: list[SliceResult] = field(default_factory=list)
    reliability: dict[str, list[Reliability]] = field(default_factory=dict)
    pairs: dict[str, ComparedPair] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not all(self.domains.values()):
            raise ValueError("a domain without drafts")

    @property
    def sampler_words(self) -> str:
        """The sampler's settings in a row."""
        return ", ".join(f"{name} {value}" for name, value in self.sampler.items()) or "sampler not recorded"

    @property
    def acceptance_measure(self) -> str:
        """The acceptance probability that fits the sampler: greedy at temperature 0, else of rejection sampling."""
        served = self.sampler if self.stored is None else self.stored.served
        return "acceptance_sampling" if served.get("temperature") else "acceptance_greedy"

    @property
    def probabilistic(self) -> str | None:
        """What llama-server gains from drawing its drafts, in words; None where that was not measured."""
        answers = self.domains.get("answers", {})
        found = answers.get("after", next(iter(answers.values()), None))
        if found is None or math.isnan(found.acceptance_drawn.mean):
            return None
        return (
            "Under the served sampler llama-server compares the target's draw with the draft's best tokens, of which "
            f"{found.acceptance_match.mean:.1%} are expected to be accepted; builds since October 2026 can draw the "
            f"drafts instead ({SAMPLING} probabilistic): {found.acceptance_drawn.mean:.1%}."
        )


def shown_measures(drafts: Iterable[Divergences]) -> list[str]:
    """The measures that have a row: the ceiling only where one of the drafts has a trimmed head, probabilistic drafts
    only where they were measured."""
    drafts = list(drafts)
    left_out = set() if any(draft.trimmed for draft in drafts) else {CEILING}
    if all(math.isnan(draft.acceptance_drawn.mean) for draft in drafts):
        left_out.add(DRAWN)
    return [name for name in MEASURES if name not in left_out]
