"""Does the decoder sample the target's own distribution? A χ² test of speculative against plain sampling, on a user's
pair.

For each prompt, texts of a few tokens are drawn plainly and speculatively, and the counts of every position's token are
compared (homogeneity of two samples, cells of fewer than 5 expected counts pooled). A difference is called at the
level 0.001 over all tests together (Bonferroni). Greedy texts are compared token by token. Texts have room for more
tokens than are counted, so that drafts and trees have all their levels.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy
import torch

from distill.benchmark.identity import TORCH_NOISE, Identity
from distill.models.base import Model
from distill.models.loaded import load_pair
from distill.progress import Progress
from distill.recipe import Configuration, Recipe
from distill.results.tables import markdown_table
from distill.run import Run
from distill.sampler import Sampler
from distill.speculative.configured import make_drafter
from distill.speculative.decode import Decoded, Round, decode, plain, speculative
from distill.speculative.rules import Rules
from distill.texts import read_prompts

LEVEL = 1e-3
NEW_TOKENS = 4  # counted: the first comes from the prompt alone, the others from rounds
ROOM = 8  # tokens after those: what a round may draft
PROMPT_TOKENS = 24  # short prompts: every sample reads its prompt anew
PROMPTS = 3
GREEDY_PROMPTS, GREEDY_TOKENS, GREEDY_LENGTH = 8, 48, 4

# Short drafts of every kind of verifier; all sample.
CONFIGURATIONS: dict[str, Configuration] = {
    "token": Configuration(length=3, verifier="token", sampler="recipe"),
    "block": Configuration(length=3, verifier="block", sampler="recipe"),
    "match": Configuration(length=3, verifier="match", sampler="recipe"),
    "tree, distinct": Configuration(drafter="tree", widths=(2, 2), verifier="distinct", sampler="recipe"),
}


@dataclass(frozen=True)
class PromptTest:
    """The sharpest of the tests of one configuration after one prompt: its p-value, χ² and degrees of freedom."""

    prompt: int
    configuration: str
    samples: int
    positions: int
    chi_squared: float
    freedom: int
    p: float
    same: bool
    drafted_per_round: float


@dataclass(frozen=True)
class DistributionTest:
    """All tests, the level below which a p-value is a difference, the greedy texts, and the verdict."""

    tests: list[PromptTest]
    skipped: list[str]
    level: float
    greedy: Identity
    sampler: dict[str, float]

    @property
    def lossless(self) -> bool:
        """Whether no difference was found."""
        return all(test.same for test in self.tests) and not self.greedy.different


def homogeneity(left: Counter[Any], right: Counter[Any]) -> tuple[float, int, float]:
    """χ², its degrees of freedom and p-value for two samples of one distribution; 1.0 where only one cell is left."""
    table = numpy.array([[left[token], right[token]] for token in sorted({*left, *right})], float)  # [tokens, 2]
    sizes = table.sum(0)
    often = table.sum(1) * sizes.min() / sizes.sum() >= 5
    cells, rest = table[often], table[~often].sum(0)
    if rest.sum() * sizes.min() / sizes.sum() >= 5:
        cells = numpy.vstack([cells, rest])
    expected = cells.sum(1, keepdims=True) * sizes / sizes.sum()
    statistic, freedom = float(((cells - expected) ** 2 / expected).sum()), len(cells) - 1
    if freedom < 1:
        return 0.0, 0, 1.0
    half, value = (torch.tensor(x / 2, dtype=torch.float64) for x in (freedom, statistic))
    return statistic, freedom, float(torch.special.gammaincc(half, value))


def verify_distribution(
    target: Model,
    draft: Model,
    prompts: Sequence[Sequence[int]],
    sampler: Sampler,
    samples: int,
    seed: int,
    rounded: bool = False,
) -> DistributionTest:
    """Test every configuration after every prompt: the smallest p-value over positions, against the level.

    Trees take part where both models take them. The rounding that excuses a first difference of greedy texts is that of
    fp32, or measured for that text where the target is `rounded` (computed in a shorter type).
    """
    short = [list(prompt[:PROMPT_TOKENS]) for prompt in prompts[:PROMPTS]]
    tested = dict(CONFIGURATIONS) if sampler.temperature > 0 else {}
    skipped = [name for name in tested if "tree" in name and not (target.max_leaves and draft.max_leaves)]
    for name in skipped:
        del tested[name]
    level = LEVEL / max(1, len(tested) * len(short) * (NEW_TOKENS - 1))
    progress = Progress("distribution, samples", samples * len(short) * (len(tested) + 1) if tested else 0)
    tests = []
    for number, prompt in enumerate(short if tested else []):
        sample = partial(_draw, target, draft, prompt, sampler, samples, progress)
        base, _ = sample(f"{seed}/{number}/plain")
        for name, configuration in tested.items():
            counts, drafted = sample(f"{seed}/{number}/{name}", configuration)
            positions = range(1, NEW_TOKENS)
            statistic, freedom, p = min((homogeneity(base[i], counts[i]) for i in positions), key=lambda test: test[2])
            tests.append(PromptTest(number, name, samples, len(positions), statistic, freedom, p, p >= level, drafted))
    greedy = _greedy_identity(target, draft, prompts[:GREEDY_PROMPTS], rounded)
    return DistributionTest(tests, skipped, level, greedy, sampler.describe())


def _draw(
    target: Model,
    draft: Model,
    prompt: list[int],
    sampler: Sampler,
    samples: int,
    progress: Progress,
    seed: str,
    configuration: Configuration | None = None,
) -> tuple[list[Counter[int]], float]:
    """Draw texts by a configuration, plainly without one: each position's tokens, and the tokens drafted a round."""
    draws = random.Random(seed).random
    rules = Rules(sampler, "token" if configuration is None else configuration.verified_by, random=draws)
    drafter = None if configuration is None else make_drafter(configuration, draft, sampler, draws)
    counts: list[Counter[int]] = [Counter() for _ in range(NEW_TOKENS)]
    rounds: list[Round] = []
    for _ in range(samples):
        text = Decoded()
        if drafter is None:
            text = plain(target, prompt, NEW_TOKENS, rules=rules)
        else:  # whole rounds, until there are enough tokens, or the context ends
            for _ in decode(target, drafter, prompt, NEW_TOKENS + ROOM, rules, text):
                if len(text.tokens) >= NEW_TOKENS:
                    break
        for count, token in zip(counts, text.tokens, strict=False):
            count[token] += 1
        rounds += text.rounds
        progress.step()
    return counts, sum(one.drafted for one in rounds) / max(1, len(rounds))


def _greedy_identity(target: Model, draft: Model, prompts: Sequence[Sequence[int]], rounded: bool) -> Identity:
    """Greedy speculative texts against plain ones; a first difference at a rounding tie is excused."""
    identity, sizes = Identity(), range(2, GREEDY_LENGTH + 2) if rounded else ()
    for prompt in prompts:
        greedy = plain(target, prompt, GREEDY_TOKENS).tokens
        other = speculative(target, draft, prompt, GREEDY_TOKENS, GREEDY_LENGTH).tokens
        identity.count(target, prompt, greedy, other, TORCH_NOISE, sizes)
    return identity


def verify_run_distribution(recipe: Recipe, run: Run, samples: int) -> DistributionTest:
    """`verify_distribution` of a run's target and trained draft under its own sampler, on test prompts, in PyTorch."""
    prompts = [prompt.ids for prompt in read_prompts(run, "test")]
    rounded = recipe.target.dtype != "float32" or recipe.target.quantise is not None
    with load_pair(recipe.target, str(run.path("draft")), device=recipe.device, pytorch=recipe.pytorch) as pair:
        return verify_distribution(
            pair.target, pair.draft, prompts, Sampler.of(recipe.sampler), samples, recipe.seed, rounded
        )


def distribution_markdown(found: DistributionTest) -> str:
    """The verdict and the figures behind it."""
    settings = ", ".join(f"{name} {value:g}" for name, value in found.sampler.items())
    blocks = [
        f"Sampler: {settings}. Speculative against plain sampling; a p-value below {found.level:.1e} "
        "would be a difference."
    ]
    if found.tests:
        heads = ["prompt", "verifier", "samples each", "drafted a round", "least p", "χ²", "freedom", "verdict"]
        rows = []
        for test in found.tests:
            sizes = [str(test.samples), f"{test.drafted_per_round:.2f}"]
            figures = [f"{test.p:.3g}", f"{test.chi_squared:.1f}", str(test.freedom)]
            verdict = "same distribution" if test.same else "another distribution"
            rows.append([str(test.prompt + 1), test.configuration, *sizes, *figures, verdict])
        blocks.append(markdown_table(heads, rows, "rlrrrrrl"))
        if found.skipped:
            blocks.append(f"Not tested, because a model takes no trees: {', '.join(found.skipped)}.")
    else:
        blocks.append("The recipe's sampler is greedy: nothing is sampled, so only texts are compared.")
    greedy = found.greedy
    verdict = "Lossless, as far as these samples can show." if found.lossless else "NOT lossless: please report this."
    blocks.append(
        f"Greedy texts: {greedy.identical} identical, {greedy.excused} differing first at a rounding tie, "
        f"{greedy.different} differing otherwise.\n{verdict}"
    )
    return "\n\n".join(blocks) + "\n"
