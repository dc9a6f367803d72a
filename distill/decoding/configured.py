"""From a configuration's words to its drafter, length rule and verifier, and whether it is lossless.

Legend: γ or n drafted tokens of a round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distill.decoding.calibration import Calibration
from distill.decoding.costs import StepCosts
from distill.decoding.drafters import Drafter, FallbackDrafter, ModelDrafter
from distill.decoding.lengths import (
    AcceptedRatio,
    BetaFilter,
    Features,
    Fixed,
    LengthRule,
    LookupDrafter,
    LookupPrice,
    ProbabilityFloor,
)
from distill.decoding.other_vocabulary import Reader, other_vocabulary_drafter
from distill.decoding.trees import Shape, TreeDrafter
from distill.decoding.verify import Random, refusal
from distill.engines.model import Model
from distill.engines.torch.hugging_face import load_config
from distill.engines.torch.model import shortest_window
from distill.errors import DataError, RecipeError
from distill.recipe import Configuration, Recipe, SamplerSettings, Speedup
from distill.sampler import Sampler

# ── The length rule of greatest expected value, from measured costs and calibrated features ──
# Legend: n tokens drafted, E expected tokens of a round, T target, λ tokens per second in the long run.

LONGEST_REST = 1024  # tokens of plain decoding before another try
PRIOR = 2.0  # tokens that the usual acceptance counts for, beside those of the round


@dataclass
class ExpectedValue(LengthRule):
    """The length of greatest E − λ·seconds, from measured costs and calibrated features (profile-guided lengths).

    Drafting goes on while up to `look_ahead` + 1 more tokens could beat the best length so far, if each were accepted
    with probability `optimism` + (1 − optimism)·(the mean so far). look_ahead 0 is the myopic rule. optimism 1 gives an
    upper bound of the gain, and drafts too much where drafting costs. All drafted tokens are submitted. λ is a moving
    average in which a token counts half after `memory` more; it starts at 1/T(1). The mean acceptance starts at
    `usual`.

    The rule decodes plainly for `probe` tokens after `patience` rounds in which nothing was worth submitting, or when
    the rounds together lost `allowance` tokens' time against plain decoding, and more than chance explains: `doubt`
    times the root of the sum of their squared losses. Then it tries again. It gives up after `tries` rounds or a
    quarter of the allowance, unless a round drafts something or the loss is made up for. While drafting has lost more
    than it gained in the whole text, each loss doubles the time of plain decoding. `usual`, `allowance` and `doubt`
    were chosen on validation traces: with 24 tokens and no doubt, pairs that cannot gain lost up to a tenth.
    """

    costs: StepCosts
    calibration: Calibration = field(default_factory=Calibration)
    longest: int = 15
    look_ahead: int = 15
    optimism: float = 0.3
    memory: float = 400.0
    patience: int = 8
    tries: int = 4
    probe: int = 32
    allowance: float = 3.0
    doubt: float = 2.5
    usual: float = 0.6
    rate: float = field(default=0.0, init=False)  # λ, tokens per second
    _drafted: int = field(default=0, init=False)  # n so far in this round
    _expected: float = field(default=1.0, init=False)  # E of the round as it stands
    _survival: float = field(default=1.0, init=False)
    _tokens: float = field(default=0.0, init=False)
    _seconds: float = field(default=0.0, init=False)
    _usual: float = field(init=False)
    _idle: int = field(default=0, init=False)
    _loss: float = field(default=0.0, init=False)
    _squares: float = field(default=0.0, init=False)  # of the rounds' losses since there was none
    _gained: float = field(default=0.0, init=False)  # tokens' time that drafting has gained in all
    _whole: bool = field(default=False, init=False)  # the last round was accepted whole
    _plain: int = field(default=0, init=False)  # tokens of plain decoding left
    _rest: int = field(init=False)  # tokens of plain decoding after the next time it gives up

    def __post_init__(self) -> None:
        self._usual, self._rest = self.usual, self.probe
        self._tokens, self._seconds = 16.0, 16.0 * self.costs.target[0]
        self.rate = self._tokens / self._seconds

    def limit(self) -> int:
        """`longest`, as far as the curve reaches; 0 while decoding plainly."""
        return 0 if self._plain > 0 else min(self.longest, len(self.costs.target) - 1)

    def _start(self, position: int) -> None:
        if position == 0:
            self._drafted, self._expected, self._survival = 0, 1.0, 1.0

    def _value(self, drafted: int, expected: float) -> float:
        """E − λ·T(n + 1); the time of drafting is spent already."""
        return expected - self.rate * self.costs.target[drafted]

    def _beatable(self, drafted: int, expected: float, survival: float, best: float, ahead: int) -> bool:
        """Whether 1..`ahead` tokens after `drafted` ones could beat the value `best`, with the time of their steps."""
        # Predict the next tokens from this round: its geometric mean, with the usual acceptance as PRIOR more tokens.
        mean = (self._usual**PRIOR * survival) ** (1 / (PRIOR + drafted))
        hoped = self.optimism + (1 - self.optimism) * mean
        step = self.rate * self.costs.draft
        if drafted == 0:  # the round's overhead, and a first step of two tokens, are still to be paid
            extra = self.costs.draft_two - self.costs.draft if self._whole else 0.0
            expected -= self.rate * (self.costs.overhead + extra)
        for n in range(drafted + 1, min(drafted + ahead, len(self.costs.target) - 1, self.longest) + 1):
            survival *= hoped
            expected += survival - step
            if self._value(n, expected) > best:
                return True
        return False

    def step_on(self, position: int) -> bool:
        """Whether drafting more could beat the tokens drafted so far."""
        self._start(position)
        best = self._value(self._drafted, self._expected)
        return self._beatable(self._drafted, self._expected, self._survival, best, self.look_ahead + 1)

    def go_on(self, position: int, features: Features) -> bool:
        """Whether this token, alone or with more, could beat the tokens drafted so far."""
        self._start(position)
        best = self._value(self._drafted, self._expected)
        drafted, survival = self._drafted + 1, self._survival * self.calibration.accept(position, features)
        expected = self._expected + survival
        if self._value(drafted, expected) <= best and not self._beatable(
            drafted, expected, survival, best, self.look_ahead
        ):
            return False
        self._drafted, self._expected, self._survival = drafted, expected, survival
        return True

    def caught_up(self, seconds: float) -> None:
        """Reading what was decoded without the draft has to be made up for, too."""
        self._loss += seconds / self.costs.target[0]
        self._gained -= seconds / self.costs.target[0]

    def resting(self) -> int:
        """The tokens of plain decoding left."""
        return self._plain

    def rested(self, tokens: int, seconds: float) -> None:
        """Learn λ, as from so many rounds of a token each that took equally long."""
        each = 0.5 ** (1 / self.memory)
        self._learn_rate(tokens, seconds, (1 - each**tokens) / ((1 - each) * max(tokens, 1)))
        self._whole = False
        self._plain -= tokens

    def _learn_rate(self, tokens: int, seconds: float, weight: float = 1.0) -> None:
        keep = 0.5 ** (tokens / self.memory)
        self._tokens = keep * self._tokens + weight * tokens
        self._seconds = keep * self._seconds + weight * seconds
        self.rate = self._tokens / self._seconds

    def observe(self, drafted: int, accepted: int, features: Sequence[Features], seconds: float) -> None:
        """Learn λ and the usual acceptance; switch to plain decoding, or back from it."""
        tokens = accepted + 1
        self._whole = accepted == drafted > 0
        self._learn_rate(tokens, seconds)
        if self._plain > 0:
            self._plain -= tokens
            return
        for position in range(min(drafted, accepted + 1)):
            self._usual += 0.02 * ((position < accepted) - self._usual)
        self._idle = 0 if drafted else self._idle + 1
        lost = seconds / self.costs.target[0] - tokens
        self._loss, self._squares = max(self._loss + lost, 0.0), self._squares + lost * lost
        self._gained -= lost
        if self._loss == 0:
            self._squares = 0.0
        if self._gained > 0:
            self._rest = self.probe
        lossy = self._loss >= max(self.allowance, self.doubt * self._squares**0.5)
        if lossy or self._idle >= self.patience:
            self._plain, self._idle = self._rest if lossy else self.probe, max(self.patience - self.tries, 0)
            self._rest = min(2 * self._rest, LONGEST_REST) if lossy else self._rest
            self._loss, self._squares = 0.75 * self.allowance, 0.0


# ── From a configuration's words to its drafter, length rule and verifier, and whether it is lossless ──

NO_COSTS = StepCosts((1.0, 1.0), 0.0, 0.0)
CHAINS_ONLY = "draft chains: another drafter than tree"
Tree = int | Shape  # what is chosen of a tree before it decodes: how many nodes, or its shape


def configured_sampler(configuration: Configuration, settings: SamplerSettings) -> Sampler:
    """The sampler that a configuration decodes under: greedy, or the recipe's."""
    return Sampler(temperature=0) if configuration.sampler == "greedy" else Sampler.of(settings)


def configured_calibration(configuration: Configuration, fitted: Mapping[str, Calibration]) -> Calibration:
    """The calibration that a configuration names; q itself where it was not fitted."""
    return fitted.get(configuration.calibrated_by, Calibration())


def make_rule(configuration: Configuration, costs: StepCosts, fitted: Mapping[str, Calibration]) -> LengthRule:
    """The length rule in its first state; only the expected-value rule reads `costs` and `fitted`."""
    rule, longest, n_min = configuration.length_rule, configuration.max_length, configuration.n_min or 0
    if rule == "p_min":
        return ProbabilityFloor(longest, configuration.setting("p_min"), n_min=n_min)
    if rule == "start-continue":
        return ProbabilityFloor(longest, configuration.setting("start"), configuration.setting("more"), n_min=n_min)
    if rule == "ratio":
        length, shortest = min(max(4, n_min), longest), max(1, n_min)
        return AcceptedRatio(length, shortest=shortest, longest=longest, n_min=n_min)
    if rule == "beta":
        return BetaFilter(longest, configuration.setting("floor"), start=configuration.start, n_min=n_min)
    if rule == "expected-value":
        return ExpectedValue(costs, configured_calibration(configuration, fitted), longest=longest, n_min=n_min)
    return Fixed(longest, n_min=n_min)


def make_drafter(
    configuration: Configuration,
    draft: Model | Reader,
    sampler: Sampler,
    random: Random,
    costs: StepCosts = NO_COSTS,
    fitted: Mapping[str, Calibration] | None = None,
    tree: Tree | None = None,
) -> Drafter:
    """The drafter that a configuration names, as at the start of a session; under `match` a draft gives its best token.

    A draft of another vocabulary is given as its `Reader`. `tree` is the one that was chosen for a configuration that
    leaves it open (`chosen`). ValueError for a tree under a repetition penalty.
    """
    fitted = fitted or {}
    if configuration.other_vocabulary:
        assert isinstance(draft, Reader)
        return other_vocabulary_drafter(configuration, draft, sampler, random)
    if configuration.drafter.startswith("lookup"):
        price = LookupPrice(costs) if configuration.rule == "expected-value" else None
        if configuration.drafter == "lookup":
            return LookupDrafter(configuration.max_length, price=price)
        chain = configuration.model_copy(update={"drafter": "draft"})
        second = configuration.tree_alone if configuration.branches else chain
        own = make_drafter(second, draft, sampler, random, costs, fitted, tree)
        return FallbackDrafter(LookupDrafter(configuration.max_length, 2, price), own)
    assert not isinstance(draft, Reader), f"`{configuration.title}` needs a draft of the target's vocabulary"
    if configuration.widths is not None:
        shape = Shape.of_widths(configuration.widths)
        distinct = configuration.verified_by == "distinct"
        return TreeDrafter(draft, sampler, random, len(shape), shape=shape, distinct=distinct)
    if configuration.drafter == "tree":
        calibration = (
            configured_calibration(configuration, fitted) if configuration.needs_calibration and fitted else None
        )
        tree = configuration.nodes if tree is None else tree
        assert tree is not None and isinstance(tree, Shape) == configuration.ranked, (
            f"no tree was chosen for `{configuration.title}`"
        )
        if isinstance(tree, Shape):
            return TreeDrafter(draft, sampler, random, len(tree), shape=tree, best=True)
        return TreeDrafter(draft, sampler, random, tree, depth=configuration.max_length, calibration=calibration)
    assert configuration.drafter == "draft", f"`{configuration.title}` has no drafter of its own here"
    argmax = sampler.temperature == 0 or configuration.verified_by == "match"
    if configuration.draft_top_k is not None:
        sampler = Sampler(sampler.temperature, configuration.draft_top_k)
    return ModelDrafter(draft, make_rule(configuration, costs, fitted), sampler, random, argmax)


def lossy_reason(configuration: Configuration, sampler: Sampler) -> str | None:
    """Why this configuration would change the target's distribution; None when it is lossless.

    ValueError for a drafter and verifier that do not go together.
    """
    if not configuration.drafts:
        return None
    # The kind of the drafted tokens depends on no model and on no tree's size.
    nobody: Any = None
    tree = Shape(()) if configuration.ranked else 1
    some = tree if configuration.needs_tree_choice else None
    drafter = make_drafter(configuration, nobody, sampler, lambda: 0.0, tree=some)
    return refusal(configuration.verified_by, drafter.kind, sampler.temperature, drafter.tree)


def require_trees(target: Model, draft: Model) -> None:
    """Raise DataError where one of the models takes no trees: before any text is decoded with a tree."""
    for role, model in (("target", target), ("draft", draft)):
        if model.max_leaves < 1:
            raise DataError(
                f"the {role} takes no trees of drafted tokens: some of its layers do not see the whole context, or its "
                "attention takes no mask of ours (it is neither sdpa nor eager)",
                CHAINS_ONLY,
            )


def check_trees(recipe: Recipe, donor: str) -> None:
    """Raise RecipeError where a configuration's trees are too much for the target or the donor in PyTorch.

    Reads the models' configuration files alone; `require_trees` asks the loaded models.
    """
    trees = [configuration for configuration in recipe.speedup.configurations if configuration.branches]
    if not trees or "pytorch" not in recipe.speedup.backends:
        return
    for role, reference in (("target", recipe.target.model), ("donor", donor)):
        config = load_config(reference).get_text_config()
        context, window = config.max_position_embeddings, shortest_window(config)
        if window < context:
            raise RecipeError(
                f"speedup.configurations: `{trees[0].title}` cannot be decoded: the {role} {reference} takes no trees, "
                f"some of its layers see {window} tokens of a context of {context}",
                CHAINS_ONLY,
            )


def check_configurations(
    settings: Speedup,
    sampler: SamplerSettings,
    configurations: Sequence[Configuration] | None = None,
    where: str = "speedup.configurations",
) -> list[str]:
    """A line for each configuration that is lossy and allowed to be; RecipeError where it is not allowed or impossible.

    Loads nothing, so that a recipe is refused before hours are spent on it. Without `configurations`: the settings'
    own; `where` is the place that messages name.
    """
    lines = []
    for configuration in settings.configurations if configurations is None else configurations:
        title, nodes = configuration.title, configuration.nodes
        if configuration.ranked and nodes is not None and nodes >= settings.max_tokens:
            raise RecipeError(
                f"{where}: `{title}` is shaped by costs of {nodes + 1} tokens a step, and "
                f"speedup.max_tokens is {settings.max_tokens}",
                f"speedup.max_tokens={nodes + 1}, or fewer nodes",
            )
        try:
            reason = lossy_reason(configuration, configured_sampler(configuration, sampler))
        except ValueError as error:
            raise RecipeError(f"{where}: `{title}` cannot be decoded: {error}", "change it") from None
        if reason is None:
            continue
        if not settings.allow_lossy:
            raise RecipeError(
                f"{where}: `{title}` would change the target's distribution: {reason}",
                "change it, or ask for it as lossy: speedup.allow_lossy=true, or --allow-lossy",
            )
        lines.append(f"LOSSY configuration `{title}`: {reason}")
    return lines
