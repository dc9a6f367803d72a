"""The settings that are part of a stage's key for some recipes only; `Stage.more` names them.

Where a recipe has the defaults they name nothing, so that keys are those of runs that had no such settings.
"""

from __future__ import annotations

from collections.abc import Sequence

from distill.recipe import Recipe
from distill.recipe.gguf import CHANGES_LOGITS


def _gguf(recipe: Recipe, *roles: str, only: Sequence[str] = ()) -> tuple[str, ...]:
    """llama.cpp's options of these models that differ from their defaults (with `only`, of those); the defaults name
    nothing, so that keys are those of runs that had no such options."""
    return tuple(
        f"gguf.{role}.{name}"
        for role in roles
        for name in getattr(recipe.gguf, role).given()
        if name in only or not only
    )


def _timed_files(recipe: Recipe) -> tuple[str, ...]:
    """The options under which GGUF files are timed; none where none is."""
    return _gguf(recipe, "target", "draft") if "gguf" in recipe.speedup.backends else ()


def timed_pairs(recipe: Recipe) -> tuple[str, ...]:
    """How both backends decode, for the stages that time them; the defaults of PyTorch name no run's key."""
    pytorch = () if recipe.pytorch == type(recipe.pytorch)() else ("pytorch",)
    return *_timed_files(recipe), *pytorch


def writer_settings(recipe: Recipe) -> tuple[str, ...]:
    """The options that change what a GGUF file of the target writes; the others change rounding alone."""
    writer = recipe.answers.writer
    return () if writer is None or writer.gguf is None else _gguf(recipe, "target", only=CHANGES_LOGITS)


def teacher_settings(recipe: Recipe) -> tuple[str, ...]:
    """The options that change the distributions of the teacher's GGUF file; the others change rounding alone."""
    return () if recipe.teacher.gguf is None else _gguf(recipe, "target", only=CHANGES_LOGITS)


def search_settings(recipe: Recipe) -> tuple[str, ...]:
    """The settings that measuring cuts depends on, beside section cut; none where no cut is measured."""
    by_price = recipe.cut.trim is not None and recipe.cut.trim.size is None and recipe.cut.trim.by == "price"
    if recipe.cut.search is None and not by_price:
        return ()
    return (
        *("seed", "train", "sampler", "profile", "speedup.outtype", "corpus.block", "threads"),
        *("target.dtype", "target.quantise"),
        *_gguf(recipe, "target", "draft"),
        *(() if recipe.pytorch.prepack else ("pytorch.prepack",)),  # the default names no run's key
    )


def load_setting(recipe: Recipe) -> tuple[str, ...]:
    """The setting that the target is not loaded, for the stages that do less then; it names no other run's key."""
    return () if recipe.target.load else ("target.load",)


def question_settings(recipe: Recipe) -> tuple[str, ...]:
    """What the target's questions depend on for some recipes only: further turns are written behind its answers."""
    further = any(source.turns > 1 for source in recipe.corpus.asked)
    answers = ("new_tokens", "stop", "repetition_penalty", "presence_penalty", "frequency_penalty")
    return (
        *writer_settings(recipe),
        *(("sampler", "corpus.block", *(f"answers.{name}" for name in answers)) if further else ()),
    )
