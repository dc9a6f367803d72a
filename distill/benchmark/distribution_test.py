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
from collections.abc import Callable, Sequence
from typing import Any

import torch

from distill.benchmark.compare import TORCH_NOISE, first_difference, is_tie
from distill.models.base import Model
from distill.models.hugging_face import load_model, load_target, load_tokenizer, pick_device, real_tokens
from distill.models.torch_model import TorchModel
from distill.progress import Progress
from distill.recipe import Recipe
from distill.run import Run
from distill.sampler import Sampler
from distill.speculative.decode import Decoded, Rules, decode, plain
from distill.speculative.draft import Drafter, ModelDrafter
from distill.speculative.lengths import Fixed
from distill.speculative.trees.shape import Shape
from distill.speculative.trees.tree_drafter import TreeDrafter
from distill.speculative.verify import Random
from distill.texts import read_prompts

LEVEL = 1e-3
NEW_TOKENS = 4  # counted: the first comes from the prompt alone, the others from rounds
ROOM = 8  # tokens after those: what a round may draft
PROMPT_TOKENS = 24  # short prompts: every sample reads its prompt anew
PROMPTS = 3
GREEDY_PROMPTS, GREEDY_TOKENS, GREEDY_LENGTH = 8, 48, 4

Make = Callable[[Model, Sampler, Random], Drafter]
ARMS: dict[str, tuple[str, Make]] = {
    "token": ("token", lambda draft, sampler, draws: ModelDrafter(draft, Fixed(3), sampler, draws)),
    "block": ("block", lambda draft, sampler, draws: ModelDrafter(draft, Fixed(3), sampler, draws)),
    "match": ("match", lambda draft, sampler, draws: ModelDrafter(draft, Fixed(3), sampler, draws, argmax=True)),
    "tree, distinct": (
        "distinct",
        lambda draft, sampler, draws: TreeDrafter(
            draft, sampler, draws, 6, shape=Shape.of_widths([2, 2]), distinct=True
        ),
    ),
}


def homogeneity(left: Counter[int], right: Counter[int]) -> tuple[float, int, float]:
    """χ², its degrees of freedom and p-value for two samples of one distribution; 1.0 where only one cell is left."""
    sizes = [sum(left.values()), sum(right.values())]
    total = sum(sizes)
    cells: list[list[float]] = []
    rest = [0.0, 0.0]
    for token in sorted({*left, *right}):
        pair = [float(left[token]), float(right[token])]
        if sum(pair) * min(sizes) / total >= 5:
            cells.append(pair)
        else:
            rest = [rest[0] + pair[0], rest[1] + pair[1]]
    if sum(rest) * min(sizes) / total >= 5:
        cells.append(rest)
    statistic = 0.0
    for pair in cells:
        for seen, size in zip(pair, sizes, strict=True):
            expected = sum(pair) * size / total
            statistic += (seen - expected) ** 2 / expected
    freedom = len(cells) - 1
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
) -> dict[str, Any]:
    """A row per arm and prompt: the smallest p-value over positions, and whether it is below the level.

    Trees take part where both models take them. The rounding that excuses a first difference of greedy texts is that of
    fp32, or measured for that text where the target is `rounded` (computed in a shorter type).
    """
    short = [list(prompt[:PROMPT_TOKENS]) for prompt in prompts[:PROMPTS]]
    rows: list[dict[str, Any]] = []
    arms = ARMS if sampler.temperature > 0 else {}
    skipped = [arm for arm in arms if "tree" in arm and not (target.max_leaves and draft.max_leaves)]
    arms = {arm: made for arm, made in arms.items() if arm not in skipped}
    level = LEVEL / max(1, len(arms) * len(short) * (NEW_TOKENS - 1))
    progress = Progress("distribution, samples", samples * len(short) * (len(arms) + 1) if arms else 0)
    for number, prompt in enumerate(short):
        base: list[Counter[int]] = []
        for arm in ["plain", *arms] if arms else []:
            draws = random.Random(f"{seed}/{number}/{arm}").random
            rules = Rules(sampler, "token" if arm == "plain" else arms[arm][0], random=draws)
            drafter = None if arm == "plain" else arms[arm][1](draft, sampler, draws)
            counts, drafted, rounds = [Counter[int]() for _ in range(NEW_TOKENS)], 0, 0
            for _ in range(samples):
                decoded = _sample(target, drafter, prompt, rules)
                for position, token in enumerate(decoded.tokens[:NEW_TOKENS]):
                    counts[position][token] += 1
                drafted += sum(one.drafted for one in decoded.rounds)
                rounds += len(decoded.rounds)
                progress.step()
            if drafter is None:
                base = counts
                continue
            tests = [homogeneity(base[position], counts[position]) for position in range(1, NEW_TOKENS)]
            statistic, freedom, least = min(tests, key=lambda test: test[2])
            found = {"chi_squared": statistic, "freedom": freedom, "p": least, "lossless": least >= level}
            row = {"prompt": number, "verifier": arm, "samples": samples, "positions": len(tests), **found}
            rows.append(row | {"drafted_per_round": drafted / max(1, rounds)})
    greedy = _greedy_identity(target, draft, prompts[:GREEDY_PROMPTS], rounded)
    return {
        "rows": rows,
        "skipped": skipped,
        "level": level,
        "greedy": greedy,
        "sampler": sampler.describe(),
        "lossless": all(row["lossless"] for row in rows) and not greedy["different"],
    }


def _sample(target: Model, drafter: Drafter | None, prompt: list[int], rules: Rules) -> Decoded:
    """At least NEW_TOKENS tokens, as whole rounds give them; fewer where the context ends."""
    if drafter is None:
        return plain(target, prompt, NEW_TOKENS, rules=rules)
    result = Decoded()
    for _ in decode(target, drafter, prompt, NEW_TOKENS + ROOM, rules, result):
        if len(result.tokens) >= NEW_TOKENS:
            break
    return result


def _greedy_identity(target: Model, draft: Model, prompts: Sequence[Sequence[int]], rounded: bool) -> dict[str, int]:
    """Greedy speculative texts against plain ones; a first difference at a rounding tie is excused."""
    found = {"identical": 0, "excused": 0, "different": 0}
    for prompt in prompts:
        rules = Rules()
        wanted = plain(target, prompt, GREEDY_TOKENS).tokens
        result = Decoded()
        drafter = ModelDrafter(draft, Fixed(GREEDY_LENGTH), rules.sampler, rules.random)
        for _ in decode(target, drafter, prompt, GREEDY_TOKENS, rules, result):
            pass
        where = first_difference(wanted, result.tokens)
        if where is None:
            found["identical"] += 1
        elif is_tie(target, prompt, wanted, result.tokens, where, TORCH_NOISE, GREEDY_LENGTH + 1 if rounded else 0):
            found["excused"] += 1
        else:
            found["different"] += 1
    return found


def verify_run_distribution(recipe: Recipe, run: Run, samples: int) -> dict[str, Any]:
    """`verify_distribution` of a run's target and trained draft under its own sampler, on test prompts, in PyTorch."""
    device = pick_device(recipe.device)
    tokenizer = load_tokenizer(recipe.target.model)
    big = load_target(recipe.target, device)
    vocabulary = real_tokens(big.config, tokenizer)
    target = TorchModel(big, vocabulary)
    draft = TorchModel(load_model(str(run.path("draft")), recipe.target.dtype, device), vocabulary)
    prompts = [prompt.ids for prompt in read_prompts(run, "test")]
    rounded = recipe.target.dtype != "float32" or recipe.target.quantise is not None
    return verify_distribution(target, draft, prompts, Sampler.of(recipe.sampler), samples, recipe.seed, rounded)


def distribution_markdown(table: dict[str, Any]) -> str:
    """The verdict and what it rests on."""
    greedy = table["greedy"]
    words = ", ".join(f"{name} {value:g}" for name, value in table["sampler"].items())
    lines = [
        f"Sampler: {words}. Speculative against plain sampling; a p-value below {table['level']:.1e} "
        "would be a difference.",
        "",
    ]
    if table["rows"]:
        lines.append("| prompt | verifier | samples each | drafted a round | least p | χ² | freedom | verdict |")
        lines.append("|--:|---|--:|--:|--:|--:|--:|---|")
        lines += [
            f"| {row['prompt'] + 1} | {row['verifier']} | {row['samples']} | {row['drafted_per_round']:.2f} "
            f"| {row['p']:.3g} | {row['chi_squared']:.1f} | {row['freedom']} "
            f"| {'same distribution' if row['lossless'] else 'another distribution'} |"
            for row in table["rows"]
        ]
        lines.append("")
        if table["skipped"]:
            lines += [f"Not tested, for a model that takes no trees: {', '.join(table['skipped'])}.", ""]
    else:
        lines += ["The recipe's sampler is greedy: there is no distribution to sample, only the text to compare.", ""]
    lines.append(
        f"Greedy texts: {greedy['identical']} identical, {greedy['excused']} differing first at a rounding tie, "
        f"{greedy['different']} differing otherwise."
    )
    fine = "Lossless, as far as these samples can tell."
    lines.append(fine if table["lossless"] else "NOT lossless: please report this.")
    return "\n".join(lines) + "\n"
