"""A configuration made ready for one pair: the rules it decodes under, and its drafter."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from distill.models.base import Model
from distill.recipe import Configuration, Recipe
from distill.recipe.configuration import PLAIN, PLAIN_SAMPLED
from distill.sampler import Sampler
from distill.speculative.calibration import Calibration
from distill.speculative.configured import NO_COSTS, Tree, configured_sampler, lossy_reason, make_drafter
from distill.speculative.costs.curve import StepCosts
from distill.speculative.decode import Decoded, decode_text, plain
from distill.speculative.draft import Drafter
from distill.speculative.other_vocabulary.drafters import Reader
from distill.speculative.rules import Rules
from distill.speculative.verify import refusal


@dataclass(frozen=True)
class Fitted:
    """What configurations read that is measured beforehand: costs, calibrations by name, chosen trees by title."""

    costs: StepCosts = NO_COSTS
    calibrations: Mapping[str, Calibration] = field(default_factory=dict)
    trees: Mapping[str, Tree] = field(default_factory=dict)


@dataclass(frozen=True)
class Prepared:
    """A configuration with the rules it decodes under; `make` gives its drafter, None for plain decoding.

    The drafter is made as at the start of a session; what it learns it keeps from prompt to prompt. `lossy` is the
    reason why the text would not follow the target's distribution, None where it does. `length` is γ of a configuration
    of the greedy sweep (0: plain), None for every other. `name` is what tables show instead of the configuration's own
    title.
    """

    configuration: Configuration
    rules: Rules
    make: Callable[[], Drafter] | None
    lossy: str | None = None
    length: int | None = None
    name: str | None = None

    @property
    def title(self) -> str:
        """Its name in tables, and that of its texts."""
        return self.name or self.configuration.title

    @property
    def sampled(self) -> bool:
        """Whether its texts are drawn, so that they are no copies of the greedy text."""
        return self.rules.sampler.temperature > 0

    @property
    def base(self) -> str:
        """The title of plain decoding under the same sampler, over which its speedup is."""
        return PLAIN_SAMPLED.title if self.sampled else PLAIN.title

    def decode(self, target: Model, drafter: Drafter | None, prompt: Sequence[int], limit: int) -> Decoded:
        """Decode a prompt from cold caches, by a drafter that `make` gave; plainly without one."""
        if drafter is None:
            return plain(target, prompt, limit, rules=self.rules)
        return decode_text(target, drafter, prompt, limit, self.rules, self.lossy is not None)


def prepare(
    recipe: Recipe,
    configuration: Configuration,
    draft: Model | Reader,
    ends: Collection[int],
    fitted: Fitted,
) -> Prepared:
    """Make a configuration ready under the recipe's seed and sampler; a `Reader` is a draft of another vocabulary."""
    sampler = configured_sampler(configuration, recipe.sampler)
    draws = random.Random(f"{recipe.seed}/{configuration.title}").random
    if not configuration.drafts:
        return Prepared(configuration, Rules(sampler, "token" if sampler.temperature else "greedy", ends, draws), None)
    rules = Rules(sampler, configuration.verified_by, ends, draws)
    tree = fitted.trees.get(configuration.title)
    make = partial(make_drafter, configuration, draft, sampler, draws, fitted.costs, fitted.calibrations, tree)
    if configuration.other_vocabulary:
        return Prepared(configuration, rules, make, refusal(rules.verifier, make().kind, sampler.temperature))
    return Prepared(configuration, rules, make, lossy_reason(configuration, sampler))


def prepare_all(
    recipe: Recipe,
    sweep: Sequence[Configuration],
    others: Sequence[Configuration],
    draft: Model | Reader,
    ends: Collection[int],
    fitted: Fitted,
) -> list[Prepared]:
    """Plain greedy decoding, the sweep (a configuration a length), and all others.

    Where some of these are sampled, plain sampling stands before them, as their base.
    """
    ready = partial(prepare, recipe, draft=draft, ends=ends, fitted=fitted)
    lengths = [replace(ready(PLAIN), length=0), *(replace(ready(one), length=one.max_length) for one in sweep)]
    sampled = Sampler.of(recipe.sampler).temperature > 0 and any(one.sampler == "recipe" for one in others)
    return [*lengths, *map(ready, [*([PLAIN_SAMPLED] if sampled else []), *others])]
