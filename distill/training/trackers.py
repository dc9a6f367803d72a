"""The figures of a training for the trackers that the recipe asks for, through accelerate."""

from __future__ import annotations

import configparser
import contextlib
import importlib.util
import netrc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from distill.errors import RecipeError
from distill.packages import packages
from distill.recipe import Recipe
from distill.run import Run


def require_trackers(names: tuple[str, ...]) -> None:
    """Raise RecipeError for a tracker whose package or key is missing, or with which accelerate is too old; opens no
    connection."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise RecipeError(
                f"train.trackers names {name}, which is not installed",
                f"`pip install {name}`, or leave it out; metrics.jsonl is written in any case",
            )
    through = next((one for one in packages() if (one.extra, one.name) == ("trackers", "accelerate")), None)
    of_steps = [name for name in names if name in ("wandb", "trackio")]
    if of_steps and through is not None and not through.fits:
        raise RecipeError(
            f"train.trackers names {of_steps[0]}, to which accelerate {through.installed} gives wrong steps or runs",
            f"`pip install '{through.requirement}'`, or leave it out; metrics.jsonl is written in any case",
        )
    if "wandb" in names and not _wandb_can_log():
        raise RecipeError(
            "train.trackers names wandb, which has no key on this machine",
            "`wandb login`, or set WANDB_API_KEY; WANDB_MODE=offline logs to files; or leave wandb out",
        )


def _wandb_can_log() -> bool:
    """Whether wandb needs no key, or finds one: in its environment variables or in the netrc file that it writes."""
    home = Path(os.environ.get("WANDB_CONFIG_DIR") or Path.home() / ".config" / "wandb")
    settings = configparser.ConfigParser(interpolation=None)
    with contextlib.suppress(configparser.Error, OSError, UnicodeDecodeError):
        settings.read([home / "settings", Path("wandb") / "settings"])
    mode = os.environ.get("WANDB_MODE") or settings.get("default", "mode", fallback="online")
    if mode != "online" or os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    server = os.environ.get("WANDB_BASE_URL") or settings.get("default", "base_url", fallback="https://api.wandb.ai")
    host = str(urlsplit(server).netloc)
    named = os.environ.get("NETRC")
    for path in [Path(named)] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]:
        with contextlib.suppress(netrc.NetrcParseError, OSError):
            login = netrc.netrc(path).authenticators(host)
            if login is not None and login[2]:
                return True
    return False


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
