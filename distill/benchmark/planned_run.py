"""Hours and disk of the run that a recipe plans, on a machine that is described: its four loops of computation.

A forward pass of m tokens takes T(m) as in hardware.py; a training step three of the draft's, one forward and two
backward, and the target's head or the whole target where the teacher asks for it. Loading, measuring and writing files
are left out; `distill train --rehearse` measures all of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from distill.benchmark.hardware import Hardware, StepWork
from distill.benchmark.plan import PlannedStage
from distill.benchmark.planned import PlanRequest, planned_config
from distill.models.hugging_face import load_config
from distill.recipe import Recipe
from distill.teacher.store import bytes_per_position

USABLE = 0.75  # of the texts that a target writes as questions: SmolLM2's, docs/benchmarks.md#smollm2
MOMENTS = 12  # bytes a parameter of a checkpoint: float32 weights and two moments; Muon has one


def planned_stages(recipe: Recipe, hardware: Hardware) -> list[PlannedStage]:
    """Of each loop its tokens, seconds (None where others compute, as the note says) and bytes on disk."""
    big, small = PlanRequest.of(recipe).works()
    assert small is not None  # that of the recipe's cut
    return [
        *_written(recipe, hardware, big),
        _teacher(recipe, hardware, big),
        _training(recipe, hardware, big, small),
    ]


def _written(recipe: Recipe, hardware: Hardware, big: StepWork) -> Iterator[PlannedStage]:
    """Questions and answers, every text as long as it may get."""
    batch, answers = recipe.answers.batch, recipe.answers
    asked = [(round((source.questions or 0) / USABLE), source.tokens or 0) for source in recipe.corpus.asked]
    for stage, texts in (("questions", asked), ("answers", [(answers.prompts, answers.new_tokens)])):
        tokens = sum(count * length for count, length in texts)
        if not tokens:
            continue
        if answers.writer is not None:
            yield PlannedStage(stage, tokens, None, 0, "written by the file or servers of answers.writer")
            continue
        # The mean depth of a text, of as many texts as are written at once.
        seconds = sum(
            math.ceil(count / batch)
            * length
            * big.seconds(min(batch, count), min(batch, count) * (answers.prompt_tokens + length // 2), hardware)
            for count, length in texts
        )
        yield PlannedStage(stage, tokens, seconds, 4 * tokens)


def _teacher(recipe: Recipe, hardware: Hardware, big: StepWork) -> PlannedStage:
    answers, settings = recipe.answers, recipe.teacher
    positions = recipe.corpus.tokens + answers.prompts * (answers.prompt_tokens + answers.new_tokens)
    if settings.kind == "online":
        return PlannedStage("teacher", positions, None, 0, "computed in every training step")
    hidden = load_config(recipe.target.model).get_text_config().hidden_size
    disk = positions * bytes_per_position(settings, hidden, recipe.target.dtype)
    if settings.server is not None or settings.gguf is not None:
        return PlannedStage("teacher", positions, None, disk, "computed by teacher.gguf or teacher.server")
    size = settings.batch * recipe.corpus.block
    return PlannedStage("teacher", positions, positions / size * big.seconds(size, 0, hardware), disk)


def _training(recipe: Recipe, hardware: Hardware, big: StepWork, small: StepWork) -> PlannedStage:
    train, config, trim = recipe.train, planned_config(recipe), recipe.cut.trim
    rows = config.vocab_size if trim is None or trim.size is None else trim.size
    positions = train.batch * recipe.corpus.block
    step = 3 * small.seconds(positions, 0, hardware)
    if recipe.teacher.kind == "online":
        step += big.seconds(positions, 0, hardware)
    elif recipe.teacher.kind == "exact":
        hidden = load_config(recipe.target.model).get_text_config().hidden_size
        step += 2 * positions * rows * hidden / hardware.compute_tflop_per_s.value / 1e12
    # A step leaves out the rows that a trimmed head drops, and an input embedding beside a head of its own.
    left_out = config.vocab_size - rows + (0 if config.tie_word_embeddings else config.vocab_size)
    disk = (train.keep + 1) * MOMENTS * (small.parameters + left_out * config.hidden_size)  # one is being written
    return PlannedStage("train", train.steps * positions, train.steps * step, round(disk))
