"""A sweep: one run for each combination of values of some recipe keys.

Stages that do not depend on these keys are done once. The other runs take them over (`running.Planner`).
"""

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
from distill.pipeline.stages import value_of
from distill.recipe.recipe import assigned, read_yaml
from distill.run import Run
from distill.surgery.cutter import planned_sizes, weights_of
from distill.tables import size

MAX_RUNS = 12  # More runs need --yes.
MAX_LETTERS = 24  # letters of a value in the name of a run
# Runs of one table must agree on these keys: the target, and what is measured on which prompts.
ALIKE = (
    *("target", "seed", "corpus", "chat", "sampler", "answers.prompt_tokens", "answers.new_tokens", "eval"),
    *("speedup.prompts", "speedup.new_tokens"),
)
# Bytes that a run keeps for each weight: cut, draft and files, and with training best weights, checkpoints and moments.
TRAINED, UNTRAINED = 40, 8


def combinations(options: Sequence[str], most: int | None) -> dict[str, list[str]]:
    """Return the overrides of each combination of options KEY=V1,V2,…, by the end of its run's name (`-cut.layers=8`).

    Raises RecipeError for an option of another form, and for more than `most` combinations.
    """
    values: dict[str, list[Any]] = {}
    for option in options:
        form = "KEY=V1,V2,..., such as cut.layers=8,12,null"
        key, text = assigned(option, "--sweep", form)
        listed = read_yaml(f"[{text}]", f"--sweep {key}")
        if not listed:
            raise RecipeError(f"--sweep {option}: expected {form}", "name at least one value")
        if key in ("name", *values):
            raise RecipeError(f"--sweep {key}: each key can be given once, and `name` cannot", "leave it out")
        values[key] = listed
    if most is not None and math.prod(map(len, values.values())) > most:
        raise RecipeError(f"--sweep asks for more than {most} runs", "allow them with --yes")
    every = itertools.product(*([(key, value) for value in listed] for key, listed in values.items()))
    return {
        "".join(f"-{key}={_word(value)}" for key, value in pairs): [
            f"{key}={json.dumps(value)}" for key, value in pairs
        ]
        for pairs in every
    }


def _word(value: Any) -> str:
    """Return a value as part of a folder's name. A long value, or one with other characters, ends with a digest."""
    text = value if isinstance(value, str) else json.dumps(value)
    word = re.sub(r"[^A-Za-z0-9.-]+", "_", text)[-MAX_LETTERS:]
    return word if word == text else f"{word}_{digest(value)[:4]}"


def require_alike(runs: Sequence[Run]) -> None:
    """Raise RecipeError for runs that do not belong in one table, RunError if their drafts do not fit on the disk."""
    for key in ALIKE:
        if any(value_of(run.recipe, key) != value_of(runs[0].recipe, key) for run in runs):
            what = f"--sweep changes {key}: the target, the prompts, or what is measured on them"
            raise RecipeError(f"{what}, so the runs could not be compared", "give one value to all runs (KEY=VALUE)")
    needed = 0
    for run in runs:
        cut = planned_sizes(run.recipe, load_config(run.recipe.target.model), load_config(run.recipe.donor_model))
        if cut is not None and run.done("train") is None:
            needed += sum(weights_of(cut)) * (TRAINED if run.recipe.train.steps else UNTRAINED)
    place = next(parent for parent in runs[0].folder.absolute().parents if parent.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        what = f"the drafts of {len(runs)} runs take about {size(needed)} with their checkpoints"
        raise RunError(f"{what}, but only {size(free)} are free", "free some space, or name another disk (--runs)")
