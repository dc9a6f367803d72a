"""Make the drafter, the length rule and the verifier that a configuration names, and decide if it is lossless."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distill.decoding.costs import Costs, measure_costs
from distill.decoding.decode import Decoded, decode, decode_text
from distill.decoding.drafters import Drafter, FallbackDrafter, LookupDrafter, ModelDrafter, NoDrafter
from distill.decoding.lengths import AcceptedRatio, Adaptive, BetaFilter, Fixed, LengthRule, ProbabilityFloor
from distill.decoding.ngrams import NGramTable
from distill.decoding.other_vocabulary import DraftReader, StringMatchDrafter
from distill.decoding.rules import Rules
from distill.decoding.table_drafter import TableDrafter
from distill.decoding.trees import Shape, TreeDrafter, require_tree_sampler
from distill.decoding.verify import Random, refusal
from distill.engines.loaded import LoadedPair
from distill.engines.model import Model
from distill.engines.torch.hugging_face import load_config
from distill.engines.torch.model import mask_refusal
from distill.errors import DataError, RecipeError
from distill.recipe import Configuration, Recipe, Sampler, Speedup
from distill.recipe.configuration import DETERMINISTIC

# A lookup follows matches of at least this many tokens. If the rule compares a match with the draft, 1 is enough.
MIN_MATCH = 2
NO_COSTS = Costs((1.0, 1.0), 0.0, 0.0)
CHAINS_ONLY = "draft chains: another drafter than tree"


@dataclass(frozen=True)
class DrafterInputs:
    """Inputs of a configuration that exist before a session opens.

    They are the measured costs, the table of n-grams (None: only the n-grams of the text itself), and the largest
    number of branches of a tree that the target can verify.
    """

    costs: Costs = NO_COSTS
    table: NGramTable | None = None
    max_leaves: int = sys.maxsize


NO_INPUTS = DrafterInputs()


def configured_sampler(configuration: Configuration, settings: Sampler) -> Sampler:
    """Return the sampler of a configuration, which is greedy or the recipe's."""
    return Sampler(temperature=0) if configuration.sampler == "greedy" else settings


def make_rule(configuration: Configuration, inputs: DrafterInputs = NO_INPUTS) -> LengthRule:
    """Return the length rule in its first state.

    Only the adaptive rule reads `inputs`. Without measured costs, a fixed length takes its place.
    """
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
    if rule == "expected-value" and inputs.costs is not NO_COSTS:
        return Adaptive(inputs.costs, longest, n_min=n_min)
    return Fixed(longest, n_min=n_min)


def make_drafter(
    configuration: Configuration,
    draft: Model | DraftReader,
    sampler: Sampler,
    random: Random,
    inputs: DrafterInputs = NO_INPUTS,
) -> Drafter:
    """Return the drafter that a configuration names, in the state in which a session starts.

    Under verifier `match` a draft proposes its best tokens. A draft of another vocabulary is given as its
    `DraftReader`. A table of n-grams makes trees with at most the target's `max_leaves`. If the target takes no trees,
    the table makes chains. Raises ValueError for a tree under a repetition penalty.
    """
    if not configuration.drafts:
        return NoDrafter()
    if configuration.other_vocabulary:
        assert isinstance(draft, DraftReader)
        argmax = configuration.verified_by == "match"
        return StringMatchDrafter(draft, configuration.longest, sampler, random, argmax)
    rule = make_rule(configuration, inputs)
    if configuration.drafter == "lookup":
        return LookupDrafter(configuration.longest, rule=rule)
    if configuration.counts_ngrams:
        leaves = max(inputs.max_leaves, 1)
        after_lookup: Drafter = TableDrafter(
            inputs.table, configuration.most_nodes, configuration.longest, rule=rule, max_leaves=leaves
        )
    else:
        assert not isinstance(draft, DraftReader), (
            f"`{configuration.described}` needs a draft of the target's vocabulary"
        )
        after_lookup = _model_drafter(configuration, draft, sampler, random, rule)
    if configuration.looks_up:
        compared = isinstance(rule, Adaptive) and not configuration.counts_ngrams
        lookup = LookupDrafter(configuration.longest, 1 if compared else MIN_MATCH, rule)
        return FallbackDrafter(lookup, after_lookup)
    return after_lookup


def _model_drafter(
    configuration: Configuration, draft: Model, sampler: Sampler, random: Random, rule: LengthRule
) -> TreeDrafter | ModelDrafter:
    """Return the part of a drafter that runs a draft model."""
    if configuration.widths is not None:
        shape = Shape.of_widths(configuration.widths)
        distinct = configuration.verified_by == "distinct"
        return TreeDrafter(draft, sampler, random, len(shape), shape=shape, distinct=distinct)
    if configuration.branches:
        return TreeDrafter(draft, sampler, random, configuration.most_nodes, rule=rule)
    return ModelDrafter(draft, rule, sampler, random, sampler.temperature == 0 or configuration.verified_by == "match")


def pair_costs(pair: LoadedPair, longest: int) -> Costs:
    """Return the costs of rounds of up to `longest` tokens. They are timed once for each loaded pair."""
    if longest not in pair.costs:
        pair.costs[longest] = measure_costs(pair.target, pair.draft, longest)
    return pair.costs[longest].of_target(pair.target)


def lossy_reason(configuration: Configuration, sampler: Sampler) -> str | None:
    """Return why this configuration would change the target's distribution, or None if it is lossless.

    The configuration's names decide, and no model is loaded. Raises ValueError for a drafter, a verifier and a sampler
    that do not go together.
    """
    if not configuration.drafts:
        return None
    drawn, verifier = configuration.widths is not None, configuration.verified_by
    if configuration.branches:
        require_tree_sampler(sampler, drawn)
    if drawn:
        kind = "distinct" if verifier == "distinct" else "sampled"
    elif configuration.drafter in DETERMINISTIC or sampler.temperature == 0 or verifier == "match":
        kind = "deterministic"
    else:
        kind = "cut" if (configuration.n_min or 0) > 1 else "sampled"
    tree = configuration.branches or configuration.counts_ngrams
    return refusal(verifier, kind, sampler.temperature, tree)


@dataclass(eq=False)
class Session:
    """An open session: the target, the drafter, and the rules of the sampler. The drafter learns across texts."""

    target: Model
    drafter: Drafter
    rules: Rules

    def stream(self, prompt: Sequence[int], limit: int, result: Decoded, held: int = 0) -> Iterator[list[int]]:
        """Continue a prompt into `result`. Yield the tokens that became certain after each round. See `decode`."""
        return decode(self.target, self.drafter, prompt, limit, self.rules, result, held)

    def text(self, prompt: Sequence[int], limit: int) -> Decoded:
        """Return the whole text after a prompt."""
        return decode_text(self.target, self.drafter, prompt, limit, self.rules)


def require_trees(target: Model, draft: Model) -> None:
    """Raise DataError if one of the models takes no trees. Callers ask before they decode a text with a tree."""
    for role, model in (("target", target), ("draft", draft)):
        if model.max_leaves < 1:
            raise DataError(
                f"the {role} takes no trees of drafted tokens: its attention takes no mask of ours, or its library "
                "computes them otherwise than single tokens",
                CHAINS_ONLY,
            )


def check_trees(recipe: Recipe, donor: str) -> None:
    """Raise RecipeError if a configuration drafts trees, and the target or the donor takes none in PyTorch.

    The check reads only the models' configuration files. `require_trees` checks the loaded models.
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


def check_configurations(settings: Speedup, sampler: Sampler, where: str = "speedup.configurations") -> list[str]:
    """Return a line for each lossy configuration. Raise RecipeError for an impossible one.

    A lossy configuration that the recipe does not allow raises RecipeError too. No model is loaded, so that a recipe is
    refused before hours are spent on it. Messages name the place `where`.
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
