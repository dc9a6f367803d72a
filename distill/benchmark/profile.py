"""Stage `profile`: cost curves of the target and of the cut draft, in both backends."""

from __future__ import annotations

import tempfile
from pathlib import Path

from distill.machine import machine
from distill.models.base import Model
from distill.models.conversion.writer import export_gguf, target_file
from distill.models.gguf.model import GgufModel
from distill.models.hugging_face import load_model, load_target, local_folder, pick_device
from distill.models.loaded import torch_decoder
from distill.progress import Progress
from distill.recipe import Profile, Recipe
from distill.results.profile_results import MeasuredCurve, ProfileReport
from distill.results.serialise import write_result
from distill.run import Run
from distill.speculative.costs.curve import doubt, measure_steps


def profile_entry(
    model: Model, title: str, backend: str, dtype: str, settings: Profile, options: str = ""
) -> MeasuredCurve:
    """The measured curve of one model as profile.json keeps it; its lists run over m = 1..max_tokens.

    It is measured at the recipe's depth, or at the deepest that the model's context leaves room for.
    """
    depth, sizes = min(settings.depth, model.capacity - settings.max_tokens), range(1, settings.max_tokens + 1)
    progress = Progress(
        f"{title}, {backend}: passes over 1..{settings.max_tokens} tokens", settings.repeats + 1, brief=True
    )
    steps = measure_steps(model, sizes, depth, settings.repeats, model.vocabulary_size, progress)
    medians, fastest, slowest = (list(times) for times in zip(*steps.values(), strict=True))
    note = doubt(medians, fastest)
    return MeasuredCurve(
        title, backend, dtype, depth, settings.repeats, [*sizes], medians, fastest, slowest, note, options
    )


def profile(recipe: Recipe, run: Run) -> list[Path]:
    """Write profile.json. The draft's weights do not affect its cost, so the untrained draft of stage cut is timed."""
    settings = recipe.profile
    curves: list[MeasuredCurve] = []
    folders = {"target": local_folder(recipe.target.model), "draft": run.path("cut")}
    for title, folder in folders.items():
        own = title == "target"
        if "pytorch" in recipe.speedup.backends:
            device = pick_device(recipe.device if own else recipe.pytorch.draft_device or recipe.device)
            weights = (
                load_target(recipe.target, device) if own else load_model(str(folder), recipe.target.dtype, device)
            )
            model = torch_decoder(weights, None, recipe.pytorch, settings.depth + settings.max_tokens)
            curves.append(profile_entry(model, title, "pytorch", recipe.target.dtype, settings))
        if "gguf" in recipe.speedup.backends:
            with tempfile.TemporaryDirectory() as temporary:
                path, kind = Path(temporary) / "model.gguf", str(recipe.speedup.outtype)
                if own:
                    path, kind = target_file(recipe, path)
                else:
                    export_gguf(folder, path, kind)
                room, options = settings.depth + settings.max_tokens, recipe.gguf_options("target" if own else "draft")
                with GgufModel(path, context=room, options=options) as quantised:
                    named = (recipe.gguf.target if own else recipe.gguf.draft).described()
                    curves.append(profile_entry(quantised, title, "gguf", kind, settings, named))
    for curve in curves:
        first = curve.seconds[0]
        run.say(
            f"  {curve.model}, {curve.backend} {curve.dtype}: T(1) {first * 1e3:.2f} ms, "
            f"T({curve.tokens[-1]}) = {curve.seconds[-1] / first:.2f} T(1)"
        )
        if curve.doubt:
            run.say(f"    {curve.doubt} (`{run.again('--redo', 'profile')}`)", warning=True)
    write_result(run.path("profile.json"), ProfileReport(run.command, machine(), curves))
    return [run.path("profile.json")]
