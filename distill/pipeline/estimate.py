"""From what a rehearsal measured to what the whole run takes: hours from a low to a high bound, memory, disk.

A stage's loops (its Progress lines, a training's steps) grow with the recipe's counts; loading does not. Where a stage
has work outside its loops that grows too, the low bound takes it as it was, the high one in proportion.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from distill.progress import duration
from distill.recipe import Recipe
from distill.results.rehearsal_results import Expected, Rehearsed
from distill.results.training_results import ACCEPTANCE_STAGE, CURVE_STAGE
from distill.run import Run
from distill.target.traffic import SOURCE, measure
from distill.texts import read_answers

FLOAT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def expect(recipe: Recipe, short: Recipe, run: Run, measured: Sequence[Rehearsed]) -> list[Expected]:
    """What each measured stage takes in the whole run; the recipe was shortened to `short` and rehearsed in `run`."""
    found = []
    for stage in measured:
        low, high = _seconds(stage, recipe, short, run)
        same = Expected(stage.stage, low, high, stage.memory_bytes, stage.device_bytes, stage.disk_bytes)
        found.append(_sizes(same, recipe, short, run))
    return found


def _positions(recipe: Recipe, run: Run) -> float:
    """Positions that the teacher reads, answers counted at the mean length of those rehearsed in `run`."""
    found = read_answers(run, "train")
    lengths = {
        served: [len(one.prompt) + len(one.answer) for one in found if (one.source == SOURCE) == served]
        for served in (False, True)
    }
    traffic = recipe.answers.traffic
    lines = measure(Path(traffic.path))["lines"] if traffic is not None else 0
    counts = {False: recipe.answers.prompts, True: lines}
    return recipe.corpus.tokens + sum(counts[served] * fmean(own) for served, own in lengths.items() if own)


def _ratio(whole: float, part: float) -> float:
    return whole / part if part else 1.0


def _blocks(recipe: Recipe, short: Recipe, run: Run) -> float:
    """How many times more positions the teacher reads in the whole run."""
    return _ratio(_positions(recipe, run), _positions(short, run))


def _seconds(stage: Rehearsed, recipe: Recipe, short: Recipe, run: Run) -> tuple[float, float]:
    """The low and the high bound of a stage's seconds."""
    fixed, loop = stage.seconds - stage.loop_seconds, stage.loop_seconds
    if stage.stage in ("questions", "answers"):
        counts = [_questions(one) if stage.stage == "questions" else one.answers.prompts for one in (recipe, short)]
        low, high = _written(recipe, *counts)
        return fixed + low * loop, fixed + high * loop
    if stage.stage == "teacher":
        return (fixed + _blocks(recipe, short, run) * loop,) * 2
    if stage.stage == "test":
        return (fixed + _ratio(recipe.eval.prompts, short.eval.prompts) * loop,) * 2
    if stage.stage == "cut":
        factor = _ratio(recipe.cut.score_blocks, short.cut.score_blocks)
        cuts = 1
        if recipe.cut.search is not None and short.cut.search is not None:
            cuts = len(recipe.cut.search.layers) * max(1, len(recipe.cut.search.mlp_width))
            heal = _ratio(recipe.cut.search.heal_steps, short.cut.search.heal_steps)
            return fixed + cuts * loop, factor * fixed + cuts * heal * loop
        return stage.seconds, factor * stage.seconds
    if stage.stage == "profile":
        return stage.seconds, _ratio(recipe.profile.repeats + 1, short.profile.repeats + 1) * stage.seconds
    if stage.stage == "train":
        return (_training(stage, recipe, run),) * 2
    if stage.stage == "eval":
        more = max(
            _ratio(recipe.eval.prompts, short.eval.prompts), _ratio(recipe.eval.file_blocks, short.eval.file_blocks)
        )
        return fixed + _ratio(recipe.eval.prompts, short.eval.prompts) * loop, more * stage.seconds
    if stage.stage == "speedup":
        configurations = _ratio(
            1 + len(recipe.speedup.lengths) + len(recipe.speedup.configurations),
            1 + len(short.speedup.lengths) + len(short.speedup.configurations),
        )
        more = configurations * max(1.0, _ratio(recipe.speedup.prompts, short.speedup.prompts))
        return fixed + more * loop, more * stage.seconds
    return stage.seconds, stage.seconds


def _questions(recipe: Recipe) -> int:
    return sum(source.questions or 0 for source in recipe.corpus.asked)


def _written(recipe: Recipe, whole: int, part: int) -> tuple[float, float]:
    """How many times longer the target writes `whole` texts than `part`, from a low to a high bound."""
    texts = _ratio(whole, part)
    if recipe.answers.writer is not None:  # text by text, or as many at once as the servers take
        return texts * min(part, recipe.answers.writer.concurrency) / recipe.answers.writer.concurrency, texts
    size = recipe.answers.batch
    batches = _ratio(math.ceil(whole / size), math.ceil(part / size))
    # A batch of many prompts takes as long as one of few where the device is not busy, else longer in proportion.
    return batches, max(texts, batches)


def _training(stage: Rehearsed, recipe: Recipe, run: Run) -> float:
    """Seconds of the whole training: steps, evaluations of weights and checkpoints at the pace of those rehearsed."""
    from distill.training.learning_curve import curve_steps
    from distill.training.plan import last_step, planned

    lines = [line for line in run.metrics() if "seconds" in line]
    own: dict[Any, list[float]] = {
        kind: [float(line["seconds"]) for line in lines if line["stage"] == kind]
        for kind in ("train", ACCEPTANCE_STAGE, CURVE_STAGE, "checkpoint")
    }
    parts = planned(recipe.train, recipe.sampler.temperature, recipe.corpus.block)
    steps, trained = parts[-1].end, last_step(parts)
    every = recipe.train.acceptance.every if recipe.train.acceptance is not None else None
    judged = 1 + math.ceil(steps / every) + len(recipe.train.parts) if every is not None else 0
    counts = {
        "train": steps,
        ACCEPTANCE_STAGE: judged,
        CURVE_STAGE: len(curve_steps(trained) | {*range(every, trained, every)}) if every else 0,
        "checkpoint": math.ceil(steps / recipe.train.save_every),
    }
    rest = stage.seconds - sum(sum(seconds) for seconds in own.values())
    # The first step warms up caches and, with train.compile, compiles.
    paces = {kind: fmean(found[1:] or found) for kind, found in own.items() if found}
    return rest + sum(counts[kind] * pace for kind, pace in paces.items())


def _sizes(found: Expected, recipe: Recipe, short: Recipe, run: Run) -> Expected:
    """With memory and disk where they grow with the recipe's counts."""
    if found.stage == "corpus":
        return replace(found, disk_bytes=_scaled(found, _ratio(recipe.corpus.tokens, short.corpus.tokens)))
    if found.stage == "answers":
        rows = min(recipe.answers.batch, recipe.answers.prompts) - short.answers.prompts
        more = 0 if recipe.answers.writer is not None else _more_rows(recipe, rows)
        grown = _with_memory(found, more)
        return replace(grown, disk_bytes=_scaled(found, _ratio(recipe.answers.prompts, short.answers.prompts)))
    if found.stage == "questions":
        return replace(found, disk_bytes=_scaled(found, _ratio(_questions(recipe), _questions(short))))
    if found.stage == "teacher":
        return replace(found, disk_bytes=_scaled(found, _blocks(recipe, short, run)))
    if found.stage == "train":
        return replace(found, disk_bytes=found.disk_bytes * (1 + recipe.train.keep) // 2)
    if found.stage == "eval":
        return _with_memory(found, _more_rows(recipe, min(recipe.answers.batch, recipe.eval.prompts) - 4))
    return found


def _scaled(found: Expected, factor: float) -> int:
    return round(max(1.0, factor) * found.disk_bytes)


def _with_memory(found: Expected, more: int) -> Expected:
    if found.device_bytes:
        return replace(found, device_bytes=found.device_bytes + more)
    return replace(found, memory_bytes=found.memory_bytes + more)


def _more_rows(recipe: Recipe, rows: int) -> int:
    """Bytes of keys, values and fp32 probabilities of so many more prompts in a batch of the target."""
    from distill.models.hugging_face import load_config

    config = load_config(recipe.target.model).get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    tokens = recipe.answers.prompt_tokens + recipe.answers.new_tokens
    cache = 2 * config.num_hidden_layers * heads * head * FLOAT_BYTES[recipe.target.dtype] * tokens
    return max(0, rows) * (cache + 4 * 4 * config.vocab_size)


def as_markdown(measured: Sequence[Rehearsed], expected: Sequence[Expected]) -> str:
    """The table that the command prints: what was rehearsed and what the whole run is expected to take."""
    device = any(stage.device_bytes for stage in expected)
    head = ["stage", "rehearsed", "whole run", "peak memory", *(["GPU memory"] if device else []), "disk"]
    rows = []
    for stage, whole in zip(measured, expected, strict=True):
        memory = [_gigabytes(whole.memory_bytes), *([_gigabytes(whole.device_bytes)] if device else [])]
        rows.append(
            [stage.stage, duration(stage.seconds), _span(whole.low, whole.high), *memory, _gigabytes(whole.disk_bytes)]
        )
    most = [_gigabytes(max(stage.memory_bytes for stage in expected))]
    if device:
        most.append(_gigabytes(max(stage.device_bytes for stage in expected)))
    span = _span(sum(stage.low for stage in expected), sum(stage.high for stage in expected))
    disk = _gigabytes(sum(stage.disk_bytes for stage in expected))
    rows.append(["**all**", duration(sum(stage.seconds for stage in measured)), span, *most, disk])
    lines = [f"| {' | '.join(head)} |", f"|---|{'--:|' * (len(head) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def _span(low: float, high: float) -> str:
    first, last = duration(low), duration(high)
    return first if first == last else f"{first} to {last}"


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB" if size >= 1e6 else "< 1 MB"


def verdicts(expected: Sequence[Expected], place: Path) -> list[str]:
    """A line each on memory and disk: whether this machine has what the whole run is expected to take."""
    import psutil

    disk, free = sum(stage.disk_bytes for stage in expected), shutil.disk_usage(place).free
    memory, total = max(stage.memory_bytes for stage in expected), psutil.virtual_memory().total
    lines = []
    for what, wanted, there in (("disk", disk, free), ("memory", memory, total)):
        fits = "fits" if wanted <= there else "warning: does not fit"
        own = "free here" if what == "disk" else "in this machine"
        lines.append(f"{what}: {fits}, {_gigabytes(wanted)} to expect, {_gigabytes(there)} {own}")
    return lines
