"""Does the decoder sample the target's own law? A χ² test of speculative against plain sampling, on a user's pair.

For each prompt, texts of a few tokens are drawn plainly and speculatively, and the counts of every position's token are
compared (homogeneity of two samples, cells of fewer than 5 expected counts pooled). A difference is called at the
level 0.001 over all tests together (Bonferroni). Greedy texts are compared token by token.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from distill.benchmark.compare import TORCH_NOISE, first_difference, top_gap
from distill.models.base import Model
from distill.models.hugging_face import load_model, load_target, load_tokenizer, pick_device, real_tokens
from distill.models.torch_model import TorchModel
from distill.progress import Progress
from distill.recipe import Recipe
from distill.run import Run
from distill.sampler import Sampler
from distill.speculative.decode import Decoded, Rules, decode, plain
from distill.speculative.draft import Drafter, ModelDrafter, TreeDrafter
from distill.speculative.lengths import Fixed
from distill.speculative.tree import Shape
from distill.speculative.verify import Random
from distill.texts import read_prompts

LEVEL = 1e-3
NEW_TOKENS = 4  # the first comes from the prompt alone; the others from rounds
PROMPT_TOKENS = 24  # short prompts: every sample reads its prompt anew
PROMPTS = 3
GREEDY_PROMPTS, GREEDY_TOKENS = 8, 48

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
    """χ², its degrees of freedom and p-value for two samples of one law; 1.0 where only one cell is left."""
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


def verify_law(
    target: Model, draft: Model, prompts: Sequence[Sequence[int]], sampler: Sampler, samples: int, seed: int
) -> dict[str, Any]:
    """A row per arm and prompt: the smallest p-value over positions, and whether it is below the level."""
    short = [list(prompt[:PROMPT_TOKENS]) for prompt in prompts[:PROMPTS]]
    rows: list[dict[str, Any]] = []
    arms = ARMS if sampler.temperature > 0 else {}
    level = LEVEL / max(1, len(arms) * len(short) * (NEW_TOKENS - 1))
    progress = Progress("law, samples", samples * len(short) * (len(arms) + 1) if arms else 0)
    for number, prompt in enumerate(short):
        base: list[Counter[int]] = []
        for arm in ["plain", *arms] if arms else []:
            draws = random.Random(f"{seed}/{number}/{arm}").random
            rules = Rules(sampler, "token" if arm == "plain" else arms[arm][0], random=draws)
            drafter = None if arm == "plain" else arms[arm][1](draft, sampler, draws)
            counts = [Counter[int]() for _ in range(NEW_TOKENS)]
            for _ in range(samples):
                for position, token in enumerate(_sample(target, drafter, prompt, rules)):
                    counts[position][token] += 1
                progress.step()
            if drafter is None:
                base = counts
                continue
            tests = [homogeneity(base[position], counts[position]) for position in range(1, NEW_TOKENS)]
            statistic, freedom, least = min(tests, key=lambda test: test[2])
            found = {"chi_squared": statistic, "freedom": freedom, "p": least, "lawful": least >= level}
            rows.append({"prompt": number, "verifier": arm, "samples": samples, "positions": len(tests), **found})
    greedy = _greedy_identity(target, draft, prompts[:GREEDY_PROMPTS])
    return {
        "rows": rows,
        "level": level,
        "greedy": greedy,
        "sampler": sampler.describe(),
        "lawful": all(row["lawful"] for row in rows) and not greedy["different"],
    }


def _sample(target: Model, drafter: Drafter | None, prompt: list[int], rules: Rules) -> list[int]:
    if drafter is None:
        return plain(target, prompt, NEW_TOKENS, rules=rules).tokens
    result = Decoded()
    for _ in decode(target, drafter, prompt, NEW_TOKENS, rules, result):
        pass
    return result.tokens


def _greedy_identity(target: Model, draft: Model, prompts: Sequence[Sequence[int]]) -> dict[str, int]:
    """Greedy speculative texts against plain ones; a first difference at a rounding tie is excused."""
    found = {"identical": 0, "excused": 0, "different": 0}
    for prompt in prompts:
        rules = Rules()
        wanted = plain(target, prompt, GREEDY_TOKENS).tokens
        result = Decoded()
        for _ in decode(target, ModelDrafter(draft, Fixed(4), rules.sampler, rules.random), prompt, GREEDY_TOKENS,
                        rules, result):  # fmt: skip
            pass
        where = first_difference(wanted, result.tokens)
        if where is None:
            found["identical"] += 1
        elif top_gap(target, [*prompt, *wanted[:where]]) <= TORCH_NOISE:
            found["excused"] += 1
        else:
            found["different"] += 1
    return found


def verify_run_law(recipe: Recipe, run: Run, samples: int) -> dict[str, Any]:
    """`verify_law` of a run's target and trained draft under its own sampler, on report prompts, in PyTorch."""
    device = pick_device(recipe.device)
    tokenizer = load_tokenizer(recipe.target.model)
    big = load_target(recipe.target, device)
    vocabulary = real_tokens(big.config, tokenizer)
    target = TorchModel(big, vocabulary)
    draft = TorchModel(load_model(str(run.path("draft")), recipe.target.dtype, device), vocabulary)
    prompts = [prompt.ids for prompt in read_prompts(run, "report")]
    return verify_law(target, draft, prompts, Sampler.of(recipe.sampler), samples, recipe.seed)


def law_markdown(table: dict[str, Any]) -> str:
    """The verdict and what it rests on."""
    greedy = table["greedy"]
    lines = [f"Sampler: {table['sampler']}. Speculative against plain sampling; a p-value below {table['level']:.1e} "
             "would be a difference.", ""]  # fmt: skip
    if table["rows"]:
        lines.append("| prompt | verifier | samples each | least p | χ² | freedom | verdict |")
        lines.append("|--:|---|--:|--:|--:|--:|---|")
        lines += [
            f"| {row['prompt'] + 1} | {row['verifier']} | {row['samples']} | {row['p']:.3g} | {row['chi_squared']:.1f} "
            f"| {row['freedom']} | {'same law' if row['lawful'] else 'another law'} |"
            for row in table["rows"]
        ]
        lines.append("")
    else:
        lines += ["The recipe's sampler is greedy: there is no law to sample, only the text to compare.", ""]
    lines.append(
        f"Greedy texts: {greedy['identical']} identical, {greedy['excused']} differing first at a rounding tie, "
        f"{greedy['different']} differing otherwise."
    )
    fine = "Lossless, as far as these samples can tell."
    lines.append(fine if table["lawful"] else "NOT lossless: please report this.")
    return "\n".join(lines) + "\n"
