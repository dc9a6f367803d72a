"""The search of stage `cut`: every cut of a grid is healed, measured and priced.

Each cut's figures are kept in a file, so that a killed search resumes.

Legend: γ drafted tokens, T(m) seconds of a target step of m tokens, D seconds of a draft step.
"""

from __future__ import annotations

import copy
import functools
import itertools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from distill import divergences
from distill.files import read_json, write_json, write_text
from distill.models.base import Model
from distill.models.conversion.writer import export_gguf, target_file
from distill.models.gguf.model import GgufModel
from distill.models.hugging_face import text_folder
from distill.models.loaded import growing_decoder
from distill.models.model_files import copy_tokenizer
from distill.models.trimmed_head import KeptHead
from distill.packing import Packed
from distill.progress import Progress
from distill.recipe import Cut, Recipe
from distill.recipe.cut import Search
from distill.results.cut_results import Priced, SearchReport
from distill.results.serialise import as_json, read_result, write_result
from distill.run import Run
from distill.sampler import Sampler
from distill.speculative.costs.curve import measure_steps
from distill.surgery.checks import kept_share
from distill.surgery.divergence import TargetDistributions, scored_logits
from distill.surgery.price import as_markdown, explain, pareto, price
from distill.surgery.vocabulary.trim import Counts, keep, sizes_between
from distill.teacher.source import TeacherSource, open_teacher
from distill.training.adapters import adapted
from distill.training.plan import planned, with_rate
from distill.training.step import heal

ApplyCut = Callable[[Any, Cut], object]  # alters a model in place


def search(recipe: Recipe, run: Run, donor: Any, target: Any, distributions: TargetDistributions, cut: ApplyCut) -> Cut:
    """Try every layer count with every MLP width, and write search/search.json and search.md; returns the cut settings
    with the chosen size.

    `donor` and `target` are loaded models, `cut` alters a copy of the donor in place.
    """
    settings = recipe.cut.search
    assert settings is not None
    folder = run.path("search", "cuts")
    costs_path = folder / "target.json"
    if not costs_path.exists():
        write_json(costs_path, _target_seconds(recipe, target, settings))
    costs = [float(seconds) for seconds in read_json(costs_path)[: settings.max_length + 1]]  # T(1..)
    source = open_teacher(run, recipe, next(target.parameters()).device, target)
    widths: Sequence[int | None] = settings.mlp_width or (recipe.cut.mlp_width,)
    choices = list(itertools.product(settings.layers, widths))
    progress = Progress("search, cuts", len(choices))
    points: list[Priced] = []
    for layers, width in choices:
        choice = {"layers": layers, "mlp_width": width}
        name = f"{layers} layers" + (f", MLP {width}" if width else "")
        path = folder / f"{name.replace(', ', '-').replace(' ', '')}.json"
        if not path.exists():
            model = copy.deepcopy(donor)
            cut(model, recipe.cut.model_copy(update=choice | {"search": None}))
            _heal(recipe, model, source, settings.heal_steps)
            parameters, kl = sum(p.numel() for p in model.parameters()), distributions.kl(model)
            own = [
                price(label, choice, parameters, kl, accepted, costs, draft_seconds)
                for label, accepted, draft_seconds in _measure(recipe, model, target, distributions, name, settings)
            ]
            write_json(path, [as_json(point) for point in own])
            for point in own:
                run.say(
                    f"  {point.name}: KL {kl:.3f}, acceptance {point.acceptance:.3f}, step "
                    f"{point.draft_seconds * 1e3:.2f} ms, predicted {point.speedup:.2f}x"
                )
        points += read_result(path, list[Priced])
        progress.step()
    chosen = max(points, key=lambda point: (point.tokens_per_second, point.drafting))
    report = SearchReport(
        backend=settings.backend,
        heal_steps=settings.heal_steps,
        target_seconds=costs,
        points=points,
        front=[point.name for point in pareto(points)],
        chosen=chosen.name,
        explanations=explain(points, chosen, costs[0]),
        command=run.command,
    )
    write_result(run.path("search", "search.json"), report)
    write_text(run.path("search", "search.md"), as_markdown(report))
    for sentence in report.explanations:
        run.say(f"  {sentence}")
    return recipe.cut.model_copy(update=chosen.settings | {"search": None})


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
    settings = recipe.cut.search or Search(layers=(1,))
    healed = copy.deepcopy(model)
    _heal(recipe, healed, open_teacher(run, recipe, next(model.parameters()).device, target), settings.heal_steps)
    whole = acceptance(recipe, target, distributions, lambda part: scored_logits(healed, part))
    costs = _pytorch_steps(recipe, target, range(1, settings.max_length + 2))
    tried = []
    full = healed.lm_head
    for size in sizes_between(least, len(order)):
        kept, shares = keep(counts, order, size)
        healed.lm_head = full if size == len(order) else KeptHead(full, torch.tensor(kept))
        mass = min(shares.values())
        step = _pytorch_steps(recipe, healed, [1])[0]
        point = price(f"head of {size}", {}, size, None, whole * mass, costs, step)
        rate = point.tokens_per_second
        figures = {"acceptance": whole * mass, "draft_seconds": step, "length": point.length, "tokens_per_second": rate}
        tried.append({"size": size, "mass": mass, **figures})
        run.say(f"  {point.name}: {mass:.2%} of the target's tokens, step {step * 1e3:.2f} ms, {rate:.1f} tokens/s")
    best = max(tried, key=lambda row: row["tokens_per_second"])
    return int(best["size"]), tried


def _heal(recipe: Recipe, model: Any, source: TeacherSource, steps: int) -> None:
    """Train a cut for a few steps, with adapters where the draft will be trained with them."""
    with adapted(model, recipe.train.adapter, recipe.seed):
        settings = with_rate(recipe.train, kept_share(recipe, model.config))
        heal(model, source, settings, planned(settings, recipe.sampler.temperature), steps, recipe.seed)


def _pytorch_steps(recipe: Recipe, model: Any, counts: Sequence[int]) -> list[float]:
    """`_steps` of a loaded model, in PyTorch."""
    return _steps(recipe, growing_decoder(model, prepack=recipe.pytorch.prepack), counts)


def _steps(recipe: Recipe, model: Model, counts: Sequence[int]) -> list[float]:
    """Median seconds of steps of `counts` tokens at the recipe's depth."""
    depth = min(recipe.speedup.depth, model.capacity - max(counts))
    seconds = measure_steps(model, counts, depth, recipe.speedup.repeats, model.vocabulary_size)
    return [seconds[m][0] for m in counts]


def _target_seconds(recipe: Recipe, target: Any, settings: Search) -> list[float]:
    """T(m) of each m that the search needs."""
    counts = range(1, settings.max_length + 2)
    if settings.backend == "pytorch":
        return _pytorch_steps(recipe, target, counts)
    with tempfile.TemporaryDirectory() as temporary:
        path, _ = target_file(recipe, Path(temporary) / "target.gguf")
        with _open(recipe, path, "target") as model:
            return _steps(recipe, model, counts)


def _open(recipe: Recipe, path: Path, role: Literal["target", "draft"]) -> GgufModel:
    return GgufModel(path, context=recipe.corpus.block + 64, options=recipe.gguf_options(role))


def _measure(
    recipe: Recipe, model: Any, target: Any, distributions: TargetDistributions, name: str, settings: Search
) -> list[tuple[str, float, float]]:
    """Name, acceptance and D of a healed cut: one, or one per GGUF type."""
    if settings.backend == "pytorch":
        accepted = acceptance(recipe, target, distributions, lambda part: scored_logits(model, part))
        return [(name, accepted, _pytorch_steps(recipe, model, [1])[0])]
    measured = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model.save_pretrained(folder)
        copy_tokenizer(text_folder(recipe.target.model), folder)
        for outtype in settings.outtypes:
            path = folder / f"{outtype}.gguf"
            export_gguf(folder, path, outtype)
            with _open(recipe, path, "draft") as quantised:
                accepted = acceptance(recipe, target, distributions, functools.partial(gguf_logits, quantised))
                measured.append((f"{name}, {outtype}", accepted, _steps(recipe, quantised, [1])[0]))
    return measured


@torch.inference_mode()
def acceptance(
    recipe: Recipe,
    target: Any,
    distributions: TargetDistributions,
    logits_of: Callable[[Packed], Tensor],
    batch: int = 2,
) -> float:
    """Mean Σ min(p, q) over the scored positions of the blocks, both distributions through the recipe's sampler."""
    blocks, vocabulary, sampler = distributions.blocks, distributions.vocabulary, Sampler.of(recipe.sampler)
    total, count = 0.0, 0
    for start in range(0, len(blocks), batch):
        part = blocks.take(slice(start, start + batch))
        p = sampler.probabilities(scored_logits(target, part)[:, :vocabulary])
        q = sampler.probabilities(logits_of(part)[:, :vocabulary]).to(p.device)
        total += float(divergences.acceptance_sampling(p, q).double().sum())
        count += len(p)
    return total / max(1, count)


def gguf_logits(model: Model, part: Packed) -> Tensor:
    """Logits [N, V] of a GGUF model at the scored positions of some blocks, document by document."""
    rows = []
    for block in range(len(part)):
        documents = part.documents[block]
        for document in range(int(documents.max()) + 1):
            here = documents == document
            ids = part.ids[block][here].tolist()
            want = part.mask[block][here].nonzero().flatten().tolist()
            model.rollback([0])
            if want:
                rows.append(model.extend(ids, want=want).full())
    return torch.cat(rows)
