"""A sweep: a run for each combination of values of some recipe keys. Stages that these keys do not reach are done once:
the other runs take them over (`running.Planner`)."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
from collections.abc import Sequence
from typing import Any

from distill.engines.torch.hugging_face import load_config
from distill.errors import RecipeError, RunError
from distill.files import digest
from distill.pipeline.stages import NAMES, STAGES, consumers, settings_of, value_of
from distill.recipe import Recipe
from distill.recipe.recipe import left_out, read_yaml
from distill.run import Run
from distill.surgery.cutter import planned_sizes
from distill.tables import size
from distill.training.saved import KEPT

MOST = 12  # runs that need no --yes
LONGEST = 24  # letters of a value in the name of a run
# Keys on which runs must agree to stand in one table, and what they decide.
ALIKE = {"target": "the target"} | dict.fromkeys(
    (
        *("seed", "corpus", "chat", "sampler", "answers.prompt_tokens", "answers.new_tokens", "eval"),
        *("speedup.prompts", "speedup.new_tokens"),
    ),
    "what is measured: the test prompts, or how",
)


def combinations(options: Sequence[str], most: int | None) -> dict[str, list[str]]:
    """Of options KEY=V1,V2,… the overrides of each combination, by the end of its run's name: `-cut.layers=8`.

    Raises RecipeError for an option of another form, and for more than `most` combinations.
    """
    values: dict[str, list[Any]] = {}
    for option in options:
        key, equals, text = option.partition("=")
        found = read_yaml(f"[{text}]", f"--sweep {key}") if equals and key else None
        if not found or key in ("name", *values):
            raise RecipeError(
                f"--sweep {option}: expected KEY=V1,V2,…, each key once and none of them name",
                "such as --sweep cut.layers=8,12,null",
            )
        values[key] = found
    if most is not None and math.prod(map(len, values.values())) > most:
        raise RecipeError(f"--sweep asks for more than {most} runs", "--yes makes them")
    every = itertools.product(*([(key, one) for one in found] for key, found in values.items()))
    return {
        "".join(f"-{key}={_word(one)}" for key, one in pairs): [f"{key}={json.dumps(one)}" for key, one in pairs]
        for pairs in every
    }


def _word(value: Any) -> str:
    """A value as a part of a folder's name; one that is long or has other signs ends with a digest."""
    text = value if isinstance(value, str) else json.dumps(value)
    word = re.sub(r"[^A-Za-z0-9.-]+", "_", text)[-LONGEST:]
    return word if word == text else f"{word}_{digest(value)[:4]}"


def beside(every: Sequence[Run], name: str) -> list[Run]:
    """These runs of a sweep, and those there of the recipe's `name` and of other sweeps over it."""
    others = sorted(every[0].folder.parent.glob(f"{name}*"))
    return [*every, *(Run(one, every[0].recipe) for one in others if one.name[len(name) :][:1] in ("", "-"))]


def require_alike(recipes: Sequence[Recipe]) -> list[str]:
    """The stages whose keys all these recipes agree on, so that they are done once.

    Raises RecipeError for recipes whose runs would not belong in one table.
    """
    first, *others = recipes
    for key, what in ALIKE.items():
        if any(value_of(one, key) != value_of(first, key) for one in others):
            raise RecipeError(
                f"--sweep changes {key}, which decides {what}: the runs could not be compared",
                "give it to all runs (KEY=VALUE), or make runs of their own (name=…)",
            )
    differing = [one.name for one in STAGES if any(settings_of(one, first) != settings_of(one, x) for x in others)]
    absent = {name for one in recipes for name in left_out(one)}
    return [name for name in NAMES if name not in absent | consumers(differing)]


def require_room(runs: Sequence[Run]) -> str:
    """What the drafts that these runs have yet to make take on disk, in a line; RunError where they do not fit."""
    needed = 0
    for run in runs:
        cut = planned_sizes(run.recipe, load_config(run.recipe.target.model), load_config(run.recipe.donor_model))
        if cut is not None and run.done("train") is None:
            layers, hidden, mlp, _, rows = cut.values()
            # The cut; if it is trained the draft, the best weights and checkpoints with two moments; 16 bits of a file.
            each = 4 + (4 * (2 + 3 * KEPT) if run.recipe.train.steps else 0) + 2 * len(run.recipe.export.outtypes)
            needed += each * (layers * hidden * (4 * hidden + 3 * mlp) + rows * hidden)
    place = next(one for one in runs[0].folder.absolute().parents if one.exists())
    free = shutil.disk_usage(place).free
    what = f"drafts, checkpoints and GGUF files take about {size(needed)}, and {size(free)} are free in {place}"
    if needed > free:
        raise RunError(f"{what}, too little", "free some, name another disk (--runs), or sweep over fewer values")
    return what
