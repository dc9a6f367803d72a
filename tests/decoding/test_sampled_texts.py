"""Sampled texts are of the target's own distribution, on whole texts; test_exact_decoding.py enumerates verifiers."""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import sampled_texts
import tiny
from sampled_texts import homogeneity, least_p
from table_model import TableModel

from distill.data.texts import read_prompts
from distill.decoding.drafters import ModelDrafter
from distill.decoding.lengths import Fixed
from distill.engines.loaded import load_pair
from distill.recipe import Target, load_recipe
from distill.run import Run
from distill.sampler import Sampler

LEVEL = 1e-3  # over all tests of one call


def test_p_values() -> None:
    """2 × 2: χ² = N(ad − bc)² / (row and column sums); p of one degree of freedom is erfc(√(χ²/2))."""
    expected = 200 * (30 * 55 - 70 * 45) ** 2 / (75 * 125 * 100 * 100)
    found = homogeneity(Counter({0: 30, 1: 70}), Counter({0: 45, 1: 55}))
    assert found == pytest.approx(math.erfc(math.sqrt(expected / 2)))
    assert homogeneity(Counter({3: 50}), Counter({3: 60})) == 1.0
    rare, others = ({token + start: 1 for token in range(12)} for start in (0, 20))
    assert homogeneity(Counter(rare | {50: 30}), Counter(others | {50: 30})) == 1.0  # tokens seen once are one cell
    draws = random.Random(0)
    weights = [8, 4, 2, 1, 1]
    same = [homogeneity(*(Counter(draws.choices(range(5), weights, k=300)) for _ in range(2))) for _ in range(200)]
    assert 0.3 < sum(p < 0.5 for p in same) / 200 < 0.7 and min(same) > 1e-4
    assert homogeneity(*(Counter(draws.choices(range(5), w, k=3000)) for w in (weights, [6, 6, 2, 1, 1]))) < 1e-6


@pytest.mark.parametrize("name", sampled_texts.SAMPLED)
def test_texts_follow_the_targets_distribution(name: str) -> None:
    pair: Any = TableModel(5, 1), TableModel(5, 2)
    for prompt in ([0, 1], [3, 4, 2]):
        p, drafted = least_p(*pair, prompt, Sampler(1.0), sampled_texts.SAMPLED[name], 150)
        assert p > LEVEL / (2 * 4 * 3) and drafted >= (6 if "tree" in name else 2)


def test_a_draft_that_says_another_distribution_than_it_draws_from_is_found() -> None:
    class Sharper(ModelDrafter):
        def propose(self, context, limit, ends):  # type: ignore[no-untyped-def]
            proposal = super().propose(context, limit, ends)
            if proposal.distributions is not None and len(proposal.tokens):
                proposal.distributions.fill_(1 / 5)
            return proposal

    pair: Any = TableModel(5, 1), TableModel(5, 2)
    sharper: Any = lambda one, draft, sampler, draws: Sharper(draft, Fixed(3), sampler, draws)  # noqa: E731
    token = sampled_texts.SAMPLED["token"]
    assert min(least_p(*pair, prompt, Sampler(1.0), token, 700, sharper)[0] for prompt in ([0, 1], [3, 4, 2])) < 1e-6


@pytest.mark.slow
def test_a_trained_pair_follows_its_targets_distribution(copied: Path) -> None:
    """Under the sampler of its recipe, in PyTorch."""
    recipe = load_recipe(copied / "config.yaml")
    prompts = [prompt.ids[:24] for prompt in read_prompts(Run(copied, recipe), "test")][:3]
    sampler = Sampler.of(recipe.sampler)
    with tiny.one_thread(), load_pair(Target(model=recipe.target.model), str(copied / "draft")) as pair:
        for configuration in sampled_texts.SAMPLED.values():
            for prompt in prompts:
                p, _ = least_p(pair.target, pair.draft, prompt, sampler, configuration, 200)
                assert p > LEVEL / (len(sampled_texts.SAMPLED) * len(prompts) * 3), configuration.title
