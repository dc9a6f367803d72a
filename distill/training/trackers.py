"""The figures of a training for the trackers that the recipe asks for, through accelerate."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any

from distill.errors import RecipeError
from distill.recipe import Recipe
from distill.run import Run


def require_trackers(names: tuple[str, ...]) -> None:
    """Raise RecipeError for a tracker whose package is missing."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise RecipeError(
                f"train.trackers names {name}, which is not installed",
                f"`pip install {name}`, or leave it out; metrics.jsonl is written in any case",
            )


def start_trackers(accelerator: Any, recipe: Recipe, run: Run) -> None:
    """Open a run with the recipe's name and files in trackers/ (trackio: in its own folder, for its dashboard).

    Called last, when no check is left to fail, so that a mistake in the recipe leaves no empty run behind.
    """
    settings = recipe.train
    if not settings.trackers:
        return
    folder = run.path("trackers")
    folder.mkdir(parents=True, exist_ok=True)  # else wandb takes a temporary one
    options = {"wandb": {"name": recipe.name, "dir": str(folder)}, "trackio": {"name": recipe.name}}
    metadata = {
        name: value for name, value in settings.model_dump(mode="json").items() if not isinstance(value, (dict, list))
    }
    accelerator.init_trackers(
        "distill", config=metadata, init_kwargs={name: options[name] for name in settings.trackers if name in options}
    )


@contextlib.contextmanager
def tracked(accelerator: Any) -> Iterator[None]:
    """Close the trackers' runs at the end of a block: they record only the training, no later stage.

    accelerate's end_training would also dissolve the process group, which later stages still need.
    """
    try:
        yield
    finally:
        for tracker in accelerator.trackers:
            tracker.finish()
        accelerator.trackers.clear()
