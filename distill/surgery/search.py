"""The search of stage `cut`: every cut of a grid is healed, measured and priced.

Each cut's figures are kept in a file, so that a killed search resumes.

Legend: γ drafted tokens, T(m) seconds of a target step of m tokens, D seconds of a draft step.
"""

from __future__ import annotations

import copy
import functools
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
from distill.results.cut_results import Priced, SearchReport
from distill.results.serialise import as_json, read_result, write_result
from distill.run import Run
from distill.sampler import Sampler
from distill.speculative.costs.curve import measure_steps
from distill.surgery.divergence import TargetDistributions, scored_logits
from distill.surgery.price import as_markdown, best_length, explain, pareto, price
from distill.surgery.vocabulary.trim import Counts, keep, sizes_between
from distill.teacher.source import TeacherSource, open_teacher
from distill.training.adapters import adapted
from distill.training.plan import first_part
from distill.training.step import heal

ApplyCut = Callable[[Any, Cut], None]  # alters a model in place


def grid(settings: Cut) -> list[dict[str, int | None]]:
    """The cuts that a search tries: every layer count with every MLP width."""
    assert settings.search is not None
    widths: Sequence[int | None] = settings.search.mlp_width or (settings.mlp_width,)
    return [{"layers": layers, "mlp_width": width} for layers in settings.search.layers for width in widths]


def search(recipe: Recipe, run: Run, donor: Any, target: Any, distributions: TargetDistributions, cut: ApplyCut) -> Cut:
    """Try the grid and write search/search.json and search.md; returns the cut settings with the chosen size.

    `donor` and `target` are loaded models, `cut` alters a copy of the donor in place.
    """
    settings = recipe.cut.search
    assert settings is not None
    folder = run.path("search", "cuts")
    costs_path = folder / "target.json"
    if not costs_path.exists():
        write_json(costs_path, _target_seconds(recipe, target, settings.max_length))
    seconds = read_json(costs_path)
    costs = {m: float(seconds[m - 1]) for m in range(1, settings.max_length + 2)}
    source = open_teacher(run, recipe, next(target.parameters()).device, target)
    progress = Progress("search, cuts", len(grid(recipe.cut)))
    points: list[Priced] = []
    for choice in grid(recipe.cut):
        name = f"{choice['layers']} layers" + (f", MLP {choice['mlp_width']}" if choice["mlp_width"] else "")
        path = folder / f"{name.replace(', ', '-').replace(' ', '')}.json"
        if not path.exists():
            model = copy.deepcopy(donor)
            cut(model, recipe.cut.model_copy(update=choice | {"search": None}))
            _heal(recipe, model, source, settings.heal_steps)
            parameters, kl = sum(p.numel() for p in model.parameters()), distributions.kl(model)
            found = [
                price(label, choice, parameters, kl, accepted, costs, draft_seconds, settings.max_length)
                for label, accepted, draft_seconds in _measure(recipe, model, target, distributions, name)
            ]
            write_json(path, [as_json(point) for point in found])
            for point in found:
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
        target_seconds=[costs[m] for m in sorted(costs)],
        points=points,
        front=[point.name for point in pareto(points)],
        chosen=chosen.name,
        explanations=explain(points, chosen, costs[1]),
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
    longest = recipe.cut.search.max_length if recipe.cut.search else 16
    healed = copy.deepcopy(model)
    steps = recipe.cut.search.heal_steps if recipe.cut.search else 60
    _heal(recipe, healed, open_teacher(run, recipe, next(model.parameters()).device, target), steps)
    whole = acceptance(recipe, target, distributions, lambda part: scored_logits(healed, part))
    seconds = _pytorch_steps(recipe, target, range(1, longest + 2))
    costs = {m: seconds[m - 1] for m in range(1, longest + 2)}
    tried = []
    full = healed.lm_head
    for size in sizes_between(least, len(order)):
        kept = keep(counts, order, size)
        healed.lm_head = full if size == len(order) else KeptHead(full, torch.tensor(kept.ids))
        mass = min(kept.mass.values())
        step = _pytorch_steps(recipe, healed, [1])[0]
        length, rate = best_length(costs, step, whole * mass, longest)
        tried.append(
            {
                "size": size,
                "mass": mass,
                "acceptance": whole * mass,
                "draft_seconds": step,
                "length": length,
                "tokens_per_second": rate,
            }
        )
        run.say(f"  head of {size}: {mass:.2%} of the target's tokens, step {step * 1e3:.2f} ms, {rate:.1f} tokens/s")
    best = max(tried, key=lambda row: row["tokens_per_second"])
    return int(best["size"]), tried


def _heal(recipe: Recipe, model: Any, source: TeacherSource, steps: int) -> None:
    """Train a cut for a few steps, with adapters where the draft will be trained with them."""
    with adapted(model, recipe.train.adapter, recipe.seed):
        heal(model, source, recipe.train, first_part(recipe), steps, recipe.seed, source.vocabulary)


def _pytorch_steps(recipe: Recipe, model: Any, counts: Sequence[int]) -> list[float]:
    """`_steps` of a loaded model, in PyTorch."""
    return _steps(recipe, growing_decoder(model, prepack=recipe.pytorch.prepack), counts)


def _steps(recipe: Recipe, model: Model, counts: Sequence[int]) -> list[float]:
    """Median seconds of steps of `counts` tokens at the recipe's depth."""
    depth = min(recipe.profile.depth, model.capacity - max(counts))
    found = measure_steps(model, counts, depth, recipe.profile.repeats, model.vocabulary_size)
    return [found[m][0] for m in counts]


def _target_seconds(recipe: Recipe, target: Any, longest: int) -> list[float]:
    settings = recipe.cut.search
    assert settings is not None
    counts = range(1, longest + 2)
    if settings.backend == "pytorch":
        return _pytorch_steps(recipe, target, counts)
    with tempfile.TemporaryDirectory() as temporary:
        path, _ = target_file(recipe, Path(temporary) / "target.gguf")
        with _open(recipe, path, "target") as model:
            return _steps(recipe, model, counts)


def _open(recipe: Recipe, path: Path, role: Literal["target", "draft"]) -> GgufModel:
    return GgufModel(path, context=recipe.corpus.block + 64, options=recipe.gguf_options(role))


def _measure(
    recipe: Recipe, model: Any, target: Any, distributions: TargetDistributions, name: str
) -> list[tuple[str, float, float]]:
    """Name, acceptance and D of a healed cut: one, or one per GGUF type."""
    settings = recipe.cut.search
    assert settings is not None
    if settings.backend == "pytorch":
        accepted = acceptance(recipe, target, distributions, lambda part: scored_logits(model, part))
        return [(name, accepted, _pytorch_steps(recipe, model, [1])[0])]
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model.save_pretrained(folder)
        copy_tokenizer(text_folder(recipe.target.model), folder)
        for outtype in settings.outtypes:
            path = folder / f"{outtype}.gguf"
            export_gguf(folder, path, outtype)
            with _open(recipe, path, "draft") as quantised:
                accepted = acceptance(recipe, target, distributions, functools.partial(gguf_logits, quantised))
                found.append((f"{name}, {outtype}", accepted, _steps(recipe, quantised, [1])[0]))
    return found


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
