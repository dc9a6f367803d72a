"""Are two samples of texts of one distribution? χ² tests of speculative against plain sampling."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy
from scipy.stats import chi2_contingency

from distill.decoding.configured import make_drafter
from distill.decoding.decode import Decoded, decode, plain
from distill.decoding.rules import Rules
from distill.engines.model import Model
from distill.recipe import Configuration
from distill.sampler import Sampler

NEW_TOKENS = 4  # counted: the first comes from the prompt alone, the others from rounds
ROOM = 8  # tokens after those, so that drafts and trees have all their levels

# Short drafts of every kind of verifier that samples.
SAMPLED: dict[str, Configuration] = {
    "token": Configuration(length=3, verifier="token", sampler="recipe"),
    "block": Configuration(length=3, verifier="block", sampler="recipe"),
    "match": Configuration(length=3, verifier="match", sampler="recipe"),
    "tree, distinct": Configuration(drafter="tree", widths=(2, 2), verifier="distinct", sampler="recipe"),
}


def homogeneity(left: Counter[Any], right: Counter[Any]) -> float:
    """The p-value of two samples under one distribution, cells of fewer than 5 expected counts pooled; 1.0 where only
    one cell is left."""
    table = numpy.array([[left[token], right[token]] for token in sorted({*left, *right})], float)  # [tokens, 2]
    smaller = table.sum(0).min() / table.sum()
    often = table.sum(1) * smaller >= 5
    cells, rest = table[often], table[~often].sum(0)
    if rest.sum() * smaller >= 5:
        cells = numpy.vstack([cells, rest])
    return float(chi2_contingency(cells, correction=False).pvalue) if len(cells) > 1 else 1.0


def least_p(
    target: Model,
    draft: Model,
    prompt: Sequence[int],
    sampler: Sampler,
    configuration: Configuration,
    samples: int,
    make: Callable[..., Any] = make_drafter,
) -> tuple[float, float]:
    """The least p-value of the counted positions behind the first, and the tokens drafted in a round."""
    draws = random.Random(f"0/{configuration.title}").random
    rules = Rules(sampler, configuration.verified_by, random=draws)
    drafter = make(configuration, draft, sampler, draws)
    counts: list[list[Counter[int]]] = [[Counter() for _ in range(NEW_TOKENS)] for _ in range(2)]
    rounds = []
    for _ in range(samples):
        text = Decoded()
        for _ in decode(target, drafter, prompt, NEW_TOKENS + ROOM, rules, text):  # whole rounds
            if len(text.tokens) >= NEW_TOKENS:
                break
        rounds += text.rounds
        alone = plain(target, prompt, NEW_TOKENS, rules=Rules(sampler, "token", random=draws))
        for own, tokens in zip(counts, (text.tokens, alone.tokens), strict=True):
            for position, token in zip(own, tokens, strict=False):
                position[token] += 1
    return (
        min(homogeneity(one, other) for one, other in zip(counts[0][1:], counts[1][1:], strict=True)),
        sum(one.drafted for one in rounds) / max(1, len(rounds)),
    )
