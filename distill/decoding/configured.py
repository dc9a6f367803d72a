"""From a configuration's words to its drafter, length rule and verifier, and whether it is lossless; and the drafter
that reads a table of n-grams.

Legend: γ or n drafted tokens of a round; n nodes, T target, E expected tokens of a round, λ tokens per second in the
long run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from distill.decoding.calibration import UNFITTED, Calibration, Correction, Recorded
from distill.decoding.costs import Costs
from distill.decoding.decode import Decoded, decode, decode_text
from distill.decoding.drafters import NOTHING, Drafter, FallbackDrafter, LookupDrafter, ModelDrafter, NoDrafter
from distill.decoding.lengths import AcceptedRatio, BetaFilter, Features, Fixed, LengthRule, ProbabilityFloor, Proposal
from distill.decoding.ngrams import ORDER, Guess, Mixture, NGramTable
from distill.decoding.other_vocabulary import DraftReader, StringMatchDrafter
from distill.decoding.rules import GREEDY, Rules
from distill.decoding.trees import Choices, Shape, TreeDrafter, best_first, by_chance, calibrated
from distill.decoding.verify import Random, refusal
from distill.decoding.worth import WITH_CALIBRATION, WITHOUT_CALIBRATION, ExpectedValue, Losses, Size, Worth
from distill.engines.model import SPARE_NODES, Model
from distill.engines.torch.hugging_face import load_config
from distill.engines.torch.model import mask_refusal
from distill.errors import DataError, RecipeError
from distill.recipe import Configuration, Recipe, SamplerSettings, Speedup
from distill.sampler import Sampler

# ── A tree of the likeliest tokens by counts of the target's own texts and of this one ──
# No model runs, so that drafting costs less than a millisecond a round.

BRANCHING = 8  # children of a node that are looked at


def features_of_guess(guess: Guess) -> Features:
    """What a calibration reads of a guess."""
    top, second = (*guess.chances[:2], 0.0, 0.0)[:2]
    return Features(top, second, 0.0, guess.known, guess.count)


@dataclass(frozen=True)
class TableCalibration:
    """The chance that a node's likeliest token is right, and where it is wrong, that one of the others looked at is.

    Without `others` these share the rest as in the mixture, which promises too much: often none of them is right.
    """

    first: Calibration
    others: Calibration | None = None

    def chances(self, guess: Guess, position: int) -> list[float]:
        """The chance of each token of a guess, `position` nodes below the root."""
        features, rest = features_of_guess(guess), sum(guess.chances[1:])
        if self.others is None or not rest:
            return calibrated(guess.chances, features, position, self.first)
        first = self.first.accept(position, features)
        scale = (1 - first) * self.others.accept(position, features) / rest
        return [first, *[chance * scale for chance in guess.chances[1:]]]


def names_of_fits(sampled: bool) -> tuple[str, str]:
    """What a table's two calibrations are called among the others: fitted on drawn texts, or on greedy ones."""
    return ("table, sampled", "table, others, sampled") if sampled else ("table", "table, others")


class _Place(NamedTuple):
    """Where a tree of a table has come: the last tokens, their place in the table, and how many nodes are above."""

    tail: tuple[int, ...]
    place: Sequence[int]
    depth: int


class TableDrafter:
    """The `nodes` likeliest nodes by a mixture of counts, of at most `longest` tokens on a path.

    By its `worth` as many of them as are worth verifying, at chances that this session's text corrects, drafted or not,
    and none where that has lost more than `Losses` allows. `max_leaves` 1 makes chains, for models that take no trees.
    """

    kind = "deterministic"

    def __init__(
        self,
        table: NGramTable | None,
        nodes: int,
        longest: int,
        *,
        calibration: TableCalibration | None = None,
        worth: Worth | None = None,
        max_leaves: int = sys.maxsize,
    ) -> None:
        self.mixture, self.nodes, self.longest = Mixture(table), nodes, longest
        self.calibration, self.worth, self.max_leaves = calibration, worth, max_leaves
        self.tree = max_leaves > 1
        self._losses = Losses()
        self._correction = Correction(WITHOUT_CALIBRATION if calibration is None else WITH_CALIBRATION)
        # Of the nodes looked at behind `_length` tokens, by depth and last tokens: the likeliest next one, its chance.
        self._guessed: dict[tuple[int, tuple[int, ...]], tuple[int, float]] = {}
        self._length = 0

    def begin(self, prompt: Sequence[int]) -> None:
        """Forget the last text; the prompt is read with the first proposal."""
        self.mixture.begin()
        self._guessed, self._length = {}, len(prompt)

    def room(self, length: int) -> int:
        """Always the full length: there is no context that could be full."""
        return self.longest

    def propose(self, context: Sequence[int], limit: int, ends: Collection[int]) -> Proposal:
        """The likeliest nodes, parents first; an end token has no children."""
        if self.worth is not None:
            self._judge(context)
        self.mixture.read(context)
        # The target holds a path of limit + 1 nodes and SPARE_NODES beside it; the context's last token is one of them.
        most = min(self.nodes, limit + SPARE_NODES - 2) if self.tree else min(self.nodes, limit)
        if self.worth is not None:
            most = min(most, len(self.worth.costs.undrafted) - 1)
        longest = min(self.longest, limit)
        if most <= 0 or longest <= 0:
            return NOTHING
        if not self._losses.affordable():
            most = 0  # the tree is grown all the same: its nodes tell how good the counts are

        def below(place: _Place, token: int) -> Choices:
            if token in ends:
                return Choices([], [])
            tail = (*place.tail, token)[-ORDER:]
            return self._choices(_Place(tail, self.mixture.after(place.place, token), place.depth + 1))

        root = self._choices(_Place(self.mixture.tail, self.mixture.place, 0))
        return best_first(root, below, most, longest, Size(self.worth, most), self.max_leaves).proposal()

    def _choices(self, place: _Place) -> Choices:
        guess = self.mixture.guess(place.tail, place.place, BRANCHING)
        chances = guess.chances
        if self.calibration is not None and guess.tokens:
            chances = self.calibration.chances(guess, place.depth)
        if self.worth is not None and guess.tokens:
            first = chances[0]
            self._guessed[place.depth, place.tail] = guess.tokens[0], first
            corrected = self._correction.probability(first)
            scale = (1 - corrected) / (1 - first) if first < 1 else 0.0
            chances = [corrected, *[chance * scale for chance in chances[1:]]]
        return by_chance(guess.tokens, chances, place)

    def _judge(self, context: Sequence[int]) -> None:
        """Learn from the text since the last round, drafted or not, as far as its nodes were looked at."""
        new = range(self._length, len(context))
        for depth, end in enumerate(new):
            found = self._guessed.get((depth, tuple(context[max(end - ORDER, 0) : end])))
            if found is None:
                break
            token, chance = found
            self._correction.learn(chance, token == context[end])
        self._correction.age(len(new))
        self._losses.age(len(new))
        self._guessed, self._length = {}, len(context)

    def accepted(self, proposal: Proposal, count: int, length: int, seconds: float) -> None:
        """Learn what rounds give; their tokens are counted with the next proposal."""
        if self.worth is not None:
            self._losses.learn(self.worth, len(proposal.tokens), count + 1, seconds)


def guesses(
    table: NGramTable | None, prompt: Sequence[int], new: Sequence[int]
) -> tuple[list[Recorded], list[Recorded]]:
    """What the counts made of each token `new` that the target wrote after a prompt.

    Rounds in which the likeliest token was drafted, and the likeliest after it; and for those in which the first was
    wrong, whether another one that is looked at was right.
    """
    first, others = list[Recorded](), list[Recorded]()
    mixture, text = Mixture(table), [*prompt, *new]
    for end in range(len(prompt), len(text)):
        mixture.read(text[:end])
        tail, place = mixture.tail, mixture.place
        guess = mixture.guess(tail, place, BRANCHING)
        if not guess.tokens:
            continue
        features, right = [features_of_guess(guess)], int(guess.tokens[0] == text[end])
        if not right and len(guess.tokens) > 1:
            others.append(Recorded(features, int(text[end] in guess.tokens)))
        if right and end + 1 < len(text):
            after = mixture.guess((*tail, text[end])[-ORDER:], mixture.after(place, text[end]), BRANCHING)
            features += [features_of_guess(after)] if after.tokens else []
            right += after.tokens[:1] == [text[end + 1]]
        first.append(Recorded(features, right))
    return first, others


# ── From words to parts ──

LOOKED_UP = 2  # tokens of a match that is followed before another drafter, where its worth is not compared with theirs
NO_COSTS = Costs((1.0, 1.0), 0.0, 0.0)
CHAINS_ONLY = "draft chains: another drafter than tree"


def name_of_fit(configuration: Configuration, sampler: Sampler) -> str:
    """What a calibration is called among the others: a drawn text accepts other tokens of a draft than a greedy one, by
    its sampler and its verifier."""
    if configuration.counts_ngrams:
        return names_of_fits(sampler.temperature > 0)[0]
    if sampler.temperature == 0:
        return configuration.calibrated_by
    usual = Sampler().describe()
    settings = [f"{name} {value:g}" for name, value in sampler.describe().items() if value != usual.get(name)]
    return ", ".join([configuration.calibrated_by, configuration.verified_by, *settings])


@dataclass(frozen=True)
class DrafterInputs:
    """What configurations read that is measured beforehand: costs, calibrations by name; the table of n-grams (None:
    those of the text alone), and how far the target's trees may branch."""

    costs: Costs = NO_COSTS
    calibrations: Mapping[str, Calibration] = field(default_factory=dict)
    table: NGramTable | None = None
    max_leaves: int = sys.maxsize

    def calibration(self, configuration: Configuration, sampler: Sampler) -> Calibration:
        """The calibration that a configuration names; q itself where it was not fitted."""
        return self.calibrations.get(name_of_fit(configuration, sampler), UNFITTED)


NO_INPUTS = DrafterInputs()


def configured_sampler(configuration: Configuration, settings: SamplerSettings) -> Sampler:
    """The sampler that a configuration decodes under: greedy, or the recipe's."""
    return Sampler(temperature=0) if configuration.sampler == "greedy" else Sampler.of(settings)


def table_calibration(calibrations: Mapping[str, Calibration], sampler: Sampler) -> TableCalibration | None:
    """A table's calibration on texts of this sampler; on greedy ones where there is no other, None without both."""
    for sampled in (True, False) if sampler.temperature else (False,):
        first, others = (calibrations.get(name) for name in names_of_fits(sampled))
        if first is not None:
            return TableCalibration(first, others)
    return None


def make_rule(
    configuration: Configuration, inputs: DrafterInputs, worth: Worth | None = None, sampler: Sampler = GREEDY
) -> LengthRule:
    """The length rule in its first state; only the expected-value rule reads `inputs`."""
    rule, longest, n_min = configuration.length_rule, configuration.longest, configuration.n_min or 0
    if rule == "p_min":
        return ProbabilityFloor(longest, configuration.settings["p_min"], n_min=n_min)
    if rule == "start-continue":
        return ProbabilityFloor(longest, configuration.settings["start"], configuration.settings["more"], n_min=n_min)
    if rule == "ratio":
        length, shortest = min(max(4, n_min), longest), max(1, n_min)
        return AcceptedRatio(length, shortest=shortest, longest=longest, n_min=n_min)
    if rule == "beta":
        return BetaFilter(longest, configuration.settings["floor"], start=configuration.start, n_min=n_min)
    if rule == "expected-value":
        worth = worth or Worth(inputs.costs)
        return ExpectedValue(worth, inputs.calibration(configuration, sampler), longest=longest, n_min=n_min)
    return Fixed(longest, n_min=n_min)


def make_drafter(
    configuration: Configuration,
    draft: Model | DraftReader,
    sampler: Sampler,
    random: Random,
    inputs: DrafterInputs = NO_INPUTS,
) -> Drafter:
    """The drafter that a configuration names, as at the start of a session; under `match` a draft gives its best token.

    A draft of another vocabulary is given as its `DraftReader`. A table of n-grams makes trees of at most the target's
    `max_leaves`, chains where it takes none. ValueError for a tree under a repetition penalty.
    """
    if not configuration.drafts:
        return NoDrafter()
    if configuration.other_vocabulary:
        assert isinstance(draft, DraftReader)
        argmax = configuration.verified_by == "match"
        return StringMatchDrafter(draft, configuration.longest, sampler, random, argmax)
    worth = Worth(inputs.costs) if configuration.needs_costs and inputs.costs is not NO_COSTS else None
    if configuration.drafter == "lookup":
        return LookupDrafter(configuration.longest, worth=worth)
    if configuration.counts_ngrams:
        own: Drafter = TableDrafter(
            inputs.table,
            configuration.most_nodes,
            configuration.longest,
            calibration=table_calibration(inputs.calibrations, sampler),
            worth=worth,
            max_leaves=max(inputs.max_leaves, 1),
        )
    else:
        assert not isinstance(draft, DraftReader), (
            f"`{configuration.described}` needs a draft of the target's vocabulary"
        )
        own = _model_drafter(configuration, draft, sampler, random, inputs, worth)
    if configuration.looks_up:
        shortest = LOOKED_UP if worth is None or configuration.counts_ngrams else 1
        return FallbackDrafter(LookupDrafter(configuration.longest, shortest, worth), own)
    return own


def _model_drafter(
    configuration: Configuration,
    draft: Model,
    sampler: Sampler,
    random: Random,
    inputs: DrafterInputs,
    worth: Worth | None,
) -> TreeDrafter | ModelDrafter:
    """The part of a drafter that asks a draft."""
    if configuration.widths is not None:
        shape = Shape.of_widths(configuration.widths)
        distinct = configuration.verified_by == "distinct"
        return TreeDrafter(draft, sampler, random, len(shape), shape=shape, distinct=distinct)
    calibration = inputs.calibration(configuration, sampler)
    if configuration.branches:
        longest = configuration.longest
        rule = None if worth is None else ExpectedValue(worth, calibration, longest=longest)
        return TreeDrafter(
            draft, sampler, random, configuration.most_nodes, longest=longest, calibration=calibration, rule=rule
        )
    argmax = sampler.temperature == 0 or configuration.verified_by == "match"
    return ModelDrafter(draft, make_rule(configuration, inputs, worth, sampler), sampler, random, argmax)


def lossy_reason(configuration: Configuration, sampler: Sampler) -> str | None:
    """Why this configuration would change the target's distribution; None when it is lossless.

    ValueError for a drafter and verifier that do not go together.
    """
    if not configuration.drafts:
        return None
    unasked: Any = None  # a model: the kind of the drafted tokens follows from the configuration alone
    string = configuration.other_vocabulary
    drafter = StringMatchDrafter if string else make_drafter(configuration, unasked, sampler, lambda: 0.0)
    return refusal(configuration.verified_by, drafter.kind, sampler.temperature, drafter.tree)


@dataclass(eq=False)
class Session:
    """A target, a configuration and the rules of its sampler and seed: what decodes.

    `make` gives its drafter, which keeps what it learns from prompt to prompt; ValueError as `make_drafter` and
    `lossy_reason`, which says why the text does not follow the target's distribution.
    """

    target: Model
    configuration: Configuration
    rules: Rules
    make: Callable[[], Drafter] = NoDrafter

    def __post_init__(self) -> None:
        self.drafter = self.make()
        self.lossy = lossy_reason(self.configuration, self.rules.sampler)

    def stream(self, prompt: Sequence[int], limit: int, result: Decoded, held: int = 0) -> Iterator[list[int]]:
        """Continue a prompt into `result`, yielding after each round the tokens that became certain; see `decode`."""
        return decode(self.target, self.drafter, prompt, limit, self.rules, result, held)

    def text(self, prompt: Sequence[int], limit: int) -> Decoded:
        """The whole text after a prompt."""
        return decode_text(self.target, self.drafter, prompt, limit, self.rules)


def require_trees(target: Model, draft: Model) -> None:
    """Raise DataError where one of the models takes no trees: before any text is decoded with a tree."""
    for role, model in (("target", target), ("draft", draft)):
        if model.max_leaves < 1:
            raise DataError(
                f"the {role} takes no trees of drafted tokens: its attention takes no mask of ours, or its library "
                "computes them otherwise than single tokens",
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
        if (reason := mask_refusal(load_config(reference).get_text_config())) is not None:
            raise RecipeError(
                f"speedup.configurations: `{trees[0].described}` cannot be decoded: the {role} {reference} takes no "
                f"trees: {reason}",
                CHAINS_ONLY,
            )


def check_configurations(
    settings: Speedup, sampler: SamplerSettings, where: str = "speedup.configurations"
) -> list[str]:
    """A line for each configuration that is lossy and allowed to be; RecipeError where it is not allowed or impossible.

    Loads nothing, so that a recipe is refused before hours are spent on it. `where` is the place that messages name.
    """
    lines = []
    for configuration in settings.configurations:
        described = configuration.described
        try:
            reason = lossy_reason(configuration, configured_sampler(configuration, sampler))
        except ValueError as error:
            raise RecipeError(f"{where}: `{described}` cannot be decoded: {error}", "change it") from None
        if reason is None:
            continue
        if not settings.allow_lossy:
            hint = "change it, or ask for it as lossy: speedup.allow_lossy=true, or --allow-lossy"
            raise RecipeError(f"{where}: `{described}` would change the target's distribution: {reason}", hint)
        lines.append(f"LOSSY configuration `{described}`: {reason}")
    return lines
