"""Several texts at once, plain and speculative, in PyTorch.

Legend: B texts of a batch.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from distill.benchmark.prepared import Prepared
from distill.models.base import Model
from distill.models.batched import BatchedTorchModel
from distill.models.static.static_model import StaticTorchModel
from distill.models.torch_model import TorchModel
from distill.progress import Progress
from distill.results.pair_results import BatchFigures
from distill.speculative.batch import decode_batch, plain_batch
from distill.speculative.calibration import Calibration
from distill.speculative.configured import make_rule
from distill.speculative.costs.curve import StepCosts
from distill.speculative.decode import Decoded
from distill.speculative.lengths import LengthRule
from distill.speculative.rules import Rules
from distill.speculative.verify import CHAINS, Random

Run = Callable[[Sequence[Sequence[int]], int, Sequence[Random]], list[Decoded]]  # prompts, new tokens at most, chance


def batched(one: Prepared) -> str | None:
    """Why a configuration cannot decode several texts at once; None where it can."""
    configuration = one.configuration
    if configuration.drafter != "draft":
        return f"drafter {configuration.drafter} drafts for one text at a time"
    if configuration.length_rule == "p_min-after":
        return "a rule that drops drawn tokens drafts for one text at a time"
    return None if configuration.verified_by in CHAINS else f"verifier {configuration.verified_by} is for trees"


def with_rows(model: Model, rows: int, compiled: bool) -> Model:
    """A model of `rows` texts with the weights of a PyTorch model of one, prepacked where they are."""
    if isinstance(model, StaticTorchModel):
        return StaticTorchModel(model.model, model.vocabulary_size, rows, model.size, compiled)
    assert isinstance(model, TorchModel)
    return BatchedTorchModel(model.model, rows, model.vocabulary_size)


def measure_batches(
    models: Callable[[int], tuple[Model, Model]],
    prompts: Sequence[Sequence[int]],
    sizes: Sequence[int],
    prepared: Sequence[Prepared],
    new_tokens: int,
    seed: int,
    costs: StepCosts,
    fitted: Mapping[str, Calibration],
) -> list[BatchFigures]:
    """Every batched configuration at each size B, over groups of B prompts; the last prompts that fill none are left.

    `models` makes target and draft of B rows. Each group is decoded plainly and by each configuration in turn.
    """
    able = [one for one in prepared if one.make is not None and batched(one) is None]
    found: list[BatchFigures] = []
    for size in sizes if able else ():
        groups = [prompts[start : start + size] for start in range(0, len(prompts) - size + 1, size)]
        target, draft = models(size)
        runs, bases = _runs(able, target, draft, costs, fitted)
        seconds: dict[str, float] = dict.fromkeys(runs, 0.0)
        texts: dict[str, list[Decoded]] = {title: [] for title in runs}
        for run in runs.values():  # a throw-away text each
            run(groups[0], min(8, new_tokens), _randoms(seed, groups[0]))
        order = list(runs.items())
        progress = Progress(f"batches of {size}", len(groups))
        for index, group in enumerate(groups):
            turn = index % len(order)
            limit = min(new_tokens, min(target.capacity, draft.capacity) - max(map(len, group)))
            for title, run in order[turn:] + order[:turn]:
                started = time.perf_counter()
                texts[title] += run(group, limit, _randoms(seed + index, group))
                seconds[title] += time.perf_counter() - started
            progress.step()
        found += [_figures(size, one.title, texts, seconds, bases[one.title]) for one in able]
        target.close()
        draft.close()
    return found


def _runs(
    able: Sequence[Prepared], target: Model, draft: Model, costs: StepCosts, fitted: Mapping[str, Calibration]
) -> tuple[dict[str, Run], dict[str, str]]:
    """How each configuration and its base decode a batch, by title, and the base of each configuration."""
    runs: dict[str, Run] = {}
    bases: dict[str, str] = {}
    for one in able:
        base = f"plain under {one.rules.sampler}"
        rules = Rules(one.rules.sampler, "token" if one.sampled else "greedy", one.rules.ends)
        runs[base] = partial(_plain, target, rules)
        bases[one.title] = base
    for one in able:
        rule = partial(make_rule, one.configuration, costs, fitted)
        runs[one.title] = partial(_speculative, target, draft, one.rules, rule)
    return runs, bases


def _randoms(seed: int, group: Sequence[object]) -> list[Random]:
    return [random.Random(f"{seed}/{row}").random for row in range(len(group))]


def _plain(
    target: Model, rules: Rules, prompts: Sequence[Sequence[int]], limit: int, randoms: Sequence[Random]
) -> list[Decoded]:
    return plain_batch(target, prompts, limit, rules, randoms)


def _speculative(
    target: Model,
    draft: Model,
    rules: Rules,
    rule: Callable[[], LengthRule],
    prompts: Sequence[Sequence[int]],
    limit: int,
    randoms: Sequence[Random],
) -> list[Decoded]:
    return decode_batch(target, draft, prompts, limit, rules, rule, randoms, argmax=rules.verifier == "match")


def _figures(
    size: int, title: str, texts: dict[str, list[Decoded]], seconds: dict[str, float], base: str
) -> BatchFigures:
    rounds = [r for text in texts[title] for r in text.rounds]
    drafted, accepted = sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)
    tokens, plain = (sum(len(text.tokens) for text in texts[one]) for one in (title, base))
    rate, slow = tokens / seconds[title], plain / seconds[base]
    return BatchFigures(
        size,
        title,
        tokens,
        rate,
        slow,
        (accepted + len(rounds)) / max(len(rounds), 1),
        accepted / drafted if drafted else None,
        rate / slow,
    )
