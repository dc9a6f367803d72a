"""The price of a cut: its acceptance after a short training, the cost of its steps here, and the speed of both.

A round drafts γ tokens and verifies them in one step of γ + 1. With acceptance α at every position it gives
1 + α + … + α^γ tokens in T(γ + 1) + γ·D seconds (Leviathan et al. 2023, eq. 1, with measured times): the best γ gives
the cut's tokens per second. The figures of each cut are kept in a file, so that a killed comparison resumes.

Legend: γ drafted tokens, T(m) seconds of a target step of m tokens, D seconds of a draft step.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from distill import divergences
from distill.files import read_json, write_json
from distill.models.base import Model
from distill.models.conversion.writer import export_gguf, target_file
from distill.models.gguf.model import GgufModel
from distill.models.hugging_face import text_folder
from distill.models.loaded import growing_decoder
from distill.models.model_files import copy_tokenizer
from distill.models.trimmed_head import KeptHead
from distill.recipe import Cut, Recipe
from distill.results.cut_results import Comparison, PricedCut
from distill.results.serialise import read_result, write_result
from distill.run import Run
from distill.sampler import Sampler
from distill.speculative.costs.curve import measure_steps, predicted_speedups
from distill.surgery.checks import kept_share
from distill.surgery.divergence import TargetDistributions, scored_logits
from distill.surgery.vocabulary.trim import Counts, keep, sizes_between
from distill.tables import document
from distill.teacher.source import TeacherSource, open_teacher
from distill.training.adapters import adapted
from distill.training.plan import loss_settings, with_rate
from distill.training.step import heal

LONGEST = 16  # drafted tokens that a price considers

ApplyCut = Callable[[Any, Cut], object]  # alters a model in place


def price(
    name: str,
    parameters: int,
    kl: float | None,
    acceptance: float,
    target_seconds: Sequence[float],
    draft_seconds: float,
) -> PricedCut:
    """The predicted speed of one cut, with the figures it follows from; `target_seconds` are T(1) to T(γ + 1)."""
    speedups = predicted_speedups(target_seconds, draft_seconds, [acceptance] * (len(target_seconds) - 1))
    speedup = max(speedups)
    length = speedups.index(speedup)
    return PricedCut(name, parameters, kl, acceptance, draft_seconds, length, speedup / target_seconds[0], speedup)


def compare_cuts(
    recipe: Recipe, run: Run, donor: Any, target: Any, distributions: TargetDistributions, apply_cut: ApplyCut
) -> None:
    """Price each cut that the recipe lists, and write compared/compared.json; the table is shown.

    `donor` and `target` are loaded models; `apply_cut` is called on copies of the donor. Steps are those of GGUF files
    of type speedup.outtype where the recipe measures the speedup of those, else PyTorch's.
    """
    backend: Literal["pytorch", "gguf"] = "gguf" if "gguf" in recipe.speedup.backends else "pytorch"
    folder = run.path("compared")
    costs_path = folder / "target.json"
    if not costs_path.exists():
        write_json(costs_path, _target_seconds(recipe, target, backend))
    costs = [float(seconds) for seconds in read_json(costs_path)]
    source = open_teacher(run, recipe, next(target.parameters()).device, target)
    cuts = []
    for choice in recipe.cut.compare:
        path = folder / f"{choice.name.replace(', ', '-').replace(' ', '')}.json"
        if not path.exists():
            model = copy.deepcopy(donor)
            apply_cut(model, recipe.cut.model_copy(update={"drop_layers": None, **choice.model_dump()}))
            _heal(recipe, model, source)
            parameters, kl = sum(p.numel() for p in model.parameters()), distributions.kl(model)
            accepted = acceptance(recipe, target, distributions, model)
            step = _draft_seconds(recipe, model, backend)
            write_result(path, price(choice.name, parameters, kl, accepted, costs, step))
        cuts.append(read_result(path, PricedCut))
        run.say(f"  {choice.name}: acceptance {cuts[-1].acceptance:.3f}, predicted {cuts[-1].speedup:.2f}x")
    comparison = Comparison(backend, recipe.cut.heal_steps, costs, cuts, run.command)
    write_result(folder / "compared.json", comparison)
    run.say(document([comparison.table()]))


def price_vocabulary(
    recipe: Recipe,
    run: Run,
    model: Any,
    target: Any,
    distributions: TargetDistributions,
    counts: Mapping[str, Counts],
    order: Sequence[int],
    least: int,
) -> tuple[int, list[dict[str, float]]]:
    """The number of kept tokens with the most predicted tokens per second, and every number tried.

    A copy of the cut model is healed once with its full head; α of a trimmed one is taken as α times the smallest
    share of a domain's target-written tokens that is kept. Its step is measured with each head, in PyTorch.
    """
    healed = copy.deepcopy(model)
    _heal(recipe, healed, open_teacher(run, recipe, next(model.parameters()).device, target))
    whole = acceptance(recipe, target, distributions, healed)
    costs = _target_seconds(recipe, target, "pytorch")
    tried = []
    full = healed.lm_head
    for size in sizes_between(least, len(order)):
        kept, shares = keep(counts, order, size)
        healed.lm_head = full if size == len(order) else KeptHead(full, torch.tensor(kept))
        mass = min(shares.values())
        step = _draft_seconds(recipe, healed, "pytorch")
        point = price(f"head of {size}", size, None, whole * mass, costs, step)
        rate = point.tokens_per_second
        figures = {"acceptance": whole * mass, "draft_seconds": step, "length": point.length, "tokens_per_second": rate}
        tried.append({"size": size, "mass": mass, **figures})
        run.say(f"  {point.name}: {mass:.2%} of the target's tokens, step {step * 1e3:.2f} ms, {rate:.1f} tokens/s")
    best = max(tried, key=lambda row: row["tokens_per_second"])
    return int(best["size"]), tried


def _heal(recipe: Recipe, model: Any, source: TeacherSource) -> None:
    """Train a cut for a few steps, with adapters where the draft will be trained with them."""
    with adapted(model, recipe.train.adapter, recipe.seed):
        settings = with_rate(recipe.train, kept_share(recipe, model.config))
        loss = loss_settings(settings, recipe.sampler.temperature)
        heal(model, source, settings, loss, recipe.cut.heal_steps, recipe.seed)


def _seconds(recipe: Recipe, model: Model, counts: Sequence[int]) -> list[float]:
    """Median seconds of steps of `counts` tokens at the recipe's depth."""
    depth = min(recipe.speedup.depth, model.capacity - max(counts))
    seconds = measure_steps(model, counts, depth, recipe.speedup.repeats, model.vocabulary_size)
    return [seconds[m][0] for m in counts]


def _gguf_seconds(recipe: Recipe, path: Path, role: Literal["target", "draft"], counts: Sequence[int]) -> list[float]:
    with GgufModel(path, context=recipe.corpus.block + 64, options=recipe.gguf_options(role)) as model:
        return _seconds(recipe, model, counts)


def _target_seconds(recipe: Recipe, target: Any, backend: Literal["pytorch", "gguf"]) -> list[float]:
    """T(m) of each m that a price needs."""
    counts = range(1, LONGEST + 2)
    if backend == "pytorch":
        return _seconds(recipe, growing_decoder(target, prepack=recipe.pytorch.prepack), counts)
    with tempfile.TemporaryDirectory() as temporary:
        path, _ = target_file(recipe, Path(temporary) / "target.gguf")
        return _gguf_seconds(recipe, path, "target", counts)


def _draft_seconds(recipe: Recipe, model: Any, backend: Literal["pytorch", "gguf"]) -> float:
    """D of a loaded draft."""
    if backend == "pytorch":
        return _seconds(recipe, growing_decoder(model, prepack=recipe.pytorch.prepack), [1])[0]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model.save_pretrained(folder)
        copy_tokenizer(text_folder(recipe.target.model), folder)
        export_gguf(folder, folder / "draft.gguf", recipe.speedup.outtype)
        return _gguf_seconds(recipe, folder / "draft.gguf", "draft", [1])[0]


@torch.inference_mode()
def acceptance(recipe: Recipe, target: Any, distributions: TargetDistributions, draft: Any, batch: int = 2) -> float:
    """Mean Σ min(p, q) over the scored positions of the blocks, both distributions through the recipe's sampler."""
    blocks, vocabulary, sampler = distributions.blocks, distributions.vocabulary, Sampler.of(recipe.sampler)
    total, count = 0.0, 0
    for start in range(0, len(blocks), batch):
        part = blocks.take(slice(start, start + batch))
        p, q = (sampler.probabilities(scored_logits(model, part)[:, :vocabulary]) for model in (target, draft))
        total += float(divergences.acceptance_sampling(p, q.to(p.device)).double().sum())
        count += len(p)
    return total / max(1, count)
