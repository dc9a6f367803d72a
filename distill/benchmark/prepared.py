"""A configuration made ready for one pair: the rules it decodes under, and its drafter."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from distill.models.base import Model
from distill.recipe import Configuration, Recipe
from distill.recipe.configuration import PLAIN_SAMPLED
from distill.recipe.measuring import fixed_length
from distill.sampler import Sampler
from distill.speculative.calibration import Calibration
from distill.speculative.configured import NO_COSTS, Tree, configured_sampler, lossy_reason, make_drafter
from distill.speculative.costs.curve import StepCosts
from distill.speculative.decode import Decoded, decode, plain
from distill.speculative.draft import Drafter
from distill.speculative.rules import Rules


@dataclass(frozen=True)
class Prepared:
    """A configuration with the rules it decodes under; `make` gives its drafter, None for plain decoding.

    The drafter is made as at the start of a session; what it learns it keeps from prompt to prompt. `lossy` is the
    reason why the text would not follow the target's distribution, None where it does. `length` is γ of a configuration
    of the greedy sweep (0: plain), None for every other.
    """

    configuration: Configuration
    rules: Rules
    make: Callable[[], Drafter] | None
    lossy: str | None = None
    length: int | None = None

    @property
    def title(self) -> str:
        """The configuration's name in tables."""
        return self.configuration.title

    @property
    def sampled(self) -> bool:
        """Whether its texts are drawn, so that they are no copies of the greedy text."""
        return self.rules.sampler.temperature > 0

    def decode(self, target: Model, drafter: Drafter | None, prompt: Sequence[int], limit: int) -> Decoded:
        """Decode a prompt from cold caches, by a drafter that `make` gave; plainly without one."""
        if drafter is None:
            return plain(target, prompt, limit, rules=self.rules)
        result = Decoded()
        for _ in decode(target, drafter, prompt, limit, self.rules, result, self.lossy is not None):
            pass
        return result


def prepare(
    recipe: Recipe,
    configuration: Configuration,
    draft: Model,
    ends: Collection[int],
    costs: StepCosts = NO_COSTS,
    fitted: Mapping[str, Calibration] | None = None,
    tree: Tree | None = None,
) -> Prepared:
    """Make a configuration ready under the recipe's seed and sampler.

    `costs` and `fitted` calibrations are for those that read them, `tree` is the one that was chosen for it.
    """
    sampler = configured_sampler(configuration, recipe.sampler)
    draws = random.Random(f"{recipe.seed}/{configuration.title}").random
    if not configuration.drafts:
        return Prepared(configuration, Rules(sampler, "token" if sampler.temperature else "greedy", ends, draws), None)
    rules = Rules(sampler, configuration.verified_by, ends, draws)
    make = partial(make_drafter, configuration, draft, sampler, draws, costs, fitted or {}, tree)
    return Prepared(configuration, rules, make, lossy_reason(configuration, sampler))


def prepare_sweep(recipe: Recipe, lengths: Sequence[int], draft: Model, ends: Collection[int]) -> list[Prepared]:
    """Plain greedy decoding, and greedy drafts of each fixed length."""
    return [replace(prepare(recipe, fixed_length(n), draft, ends), length=n) for n in (0, *lengths)]


def prepare_others(
    recipe: Recipe,
    configurations: Sequence[Configuration],
    draft: Model,
    ends: Collection[int],
    costs: StepCosts,
    fitted: Mapping[str, Calibration],
    trees: Mapping[str, Tree] | None = None,
) -> list[Prepared]:
    """Every configuration made ready and, where some are sampled, plain sampling before them, as their base.

    `trees` are those that were chosen, by the configuration's title.
    """
    sampled = Sampler.of(recipe.sampler).temperature > 0 and any(one.sampler == "recipe" for one in configurations)
    base = [PLAIN_SAMPLED] if sampled else []
    return [
        prepare(recipe, one, draft, ends, costs, fitted, (trees or {}).get(one.title))
        for one in (*base, *configurations)
    ]
