"""Several texts at once, plain and speculative, in PyTorch.

Legend: B texts of a batch.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from functools import partial

from distill.benchmark.compare import acceptance
from distill.benchmark.prepared import Fitted, Prepared
from distill.errors import RecipeError
from distill.models.base import Model
from distill.models.batched import BatchedTorchModel
from distill.models.loaded import LoadedPair
from distill.models.static.static_model import StaticTorchModel
from distill.models.torch_model import TorchModel, model_name
from distill.progress import Progress
from distill.recipe import Recipe
from distill.results.pair_results import BatchFigures
from distill.speculative.batch import decode_batch, plain_batch
from distill.speculative.configured import make_rule
from distill.speculative.decode import Decoded
from distill.speculative.rules import Rules
from distill.speculative.verify import CHAINS, Random

BatchRun = Callable[..., list[Decoded]]  # of prompts, at most so many new tokens, and `randoms`


def require_rows(pair: LoadedPair) -> None:
    """Raise RecipeError where a model cannot decode texts of different lengths at once."""
    for model in (pair.target, pair.draft):
        if isinstance(model, TorchModel) and not model.max_leaves:
            raise RecipeError(
                f"--batch: {model_name(model.model)} has attention windows, or an attention of its own, which take no "
                "texts of different lengths",
                "add --static, which many such models can, or leave --batch out",
            )


def not_batched(prepared: Sequence[Prepared]) -> list[str]:
    """A sentence for each configuration that cannot decode several texts at once."""
    return [
        f"`{one.configuration.title}`: {why}"
        for one in prepared
        if one.make is not None and (why := _refusal(one)) is not None
    ]


def _refusal(one: Prepared) -> str | None:
    configuration = one.configuration
    if configuration.drafter != "draft":
        return f"drafter {configuration.drafter} drafts for one text at a time"
    return None if configuration.verified_by in CHAINS else f"verifier {configuration.verified_by} is for trees"


def measure_batches(
    recipe: Recipe,
    pair: LoadedPair,
    prompts: Sequence[Sequence[int]],
    sizes: Sequence[int],
    prepared: Sequence[Prepared],
    fitted: Fitted,
) -> list[BatchFigures]:
    """Every configuration that can at each size B, over groups of B prompts; the last prompts that fill none are left.

    Each group is decoded plainly and by each configuration in turn.
    """
    able = [one for one in prepared if one.make is not None and _refusal(one) is None]
    new_tokens, figures = recipe.speedup.new_tokens, list[BatchFigures]()
    for size in sizes if able else ():
        groups = [prompts[start : start + size] for start in range(0, len(prompts) - size + 1, size)]
        target, draft = (_with_rows(model, size, recipe.pytorch.compile) for model in (pair.target, pair.draft))
        runs: dict[str, BatchRun] = {}
        for one in able:
            verifier = "token" if one.sampled else "greedy"
            rules = Rules(one.rules.sampler, verifier, one.rules.ends)
            runs.setdefault(one.base, partial(plain_batch, target, rules=rules))
        for one in able:
            rule = partial(make_rule, one.configuration, fitted.costs, fitted.calibrations)
            argmax = one.rules.verifier == "match"
            runs[one.title] = partial(decode_batch, target, draft, rules=one.rules, length=rule, argmax=argmax)
        seconds: dict[str, float] = dict.fromkeys(runs, 0.0)
        texts: dict[str, list[Decoded]] = {title: [] for title in runs}
        for run in runs.values():  # a throw-away text each
            run(groups[0], min(8, new_tokens), randoms=_randoms(recipe.seed, size))
        order = list(runs.items())
        progress = Progress(f"batches of {size}", len(groups))
        for index, group in enumerate(groups):
            turn = index % len(order)
            limit = min(new_tokens, min(target.capacity, draft.capacity) - max(map(len, group)))
            for title, run in order[turn:] + order[:turn]:
                started = time.perf_counter()
                texts[title] += run(group, limit, randoms=_randoms(recipe.seed + index, size))
                seconds[title] += time.perf_counter() - started
            progress.step()
        figures += [_figures(size, one, texts, seconds) for one in able]
        target.close()
        draft.close()
    return figures


def _with_rows(model: Model, rows: int, compiled: bool) -> Model:
    """A model of `rows` texts with the weights of a PyTorch model of one, prepacked where they are."""
    if isinstance(model, StaticTorchModel):
        return StaticTorchModel(model.model, model.vocabulary_size, rows, model.size, compiled)
    assert isinstance(model, TorchModel)
    return BatchedTorchModel(model.model, rows, model.vocabulary_size)


def _randoms(seed: int, rows: int) -> list[Random]:
    return [random.Random(f"{seed}/{row}").random for row in range(rows)]


def _figures(size: int, one: Prepared, texts: dict[str, list[Decoded]], seconds: dict[str, float]) -> BatchFigures:
    each, accepted = acceptance([r for text in texts[one.title] for r in text.rounds])
    tokens, plain = (sum(len(text.tokens) for text in texts[title]) for title in (one.title, one.base))
    rate, plain_rate = tokens / seconds[one.title], plain / seconds[one.base]
    return BatchFigures(size, one.title, tokens, rate, plain_rate, each or 0.0, accepted, rate / plain_rate)
