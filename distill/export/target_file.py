"""The target as llama.cpp serves it: the GGUF file that it is, or one that is written of its folder."""

from __future__ import annotations

from pathlib import Path

from distill.export.writer import export_gguf
from distill.models.hugging_face import local_folder
from distill.models.imported.importing import file_type, is_gguf
from distill.recipe import Recipe


def own_file(recipe: Recipe) -> Path | None:
    """The GGUF file that the recipe's target is; None for a folder or a hub name."""
    return Path(recipe.target.model) if is_gguf(recipe.target.model) else None


def target_file(recipe: Recipe, place: Path) -> tuple[Path, str]:
    """The target's GGUF file and its type: its own, or one of type speedup.outtype that is written to `place`."""
    own = own_file(recipe)
    if own is not None:
        return own, file_type(own)
    export_gguf(local_folder(recipe.target.model), place, recipe.speedup.outtype)
    return place, recipe.speedup.outtype
