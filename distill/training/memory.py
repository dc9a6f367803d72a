"""The message when memory runs out: during which work, and which settings to lower."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from distill.errors import DistillError, RunError
from distill.recipe import Recipe
from distill.training.setup import Training

# How allocators word it where the type of the exception does not tell.
WORDS = ("out of memory", "not enough memory", "can't allocate memory", "Unable to allocate", "ALLOC_FAILED")
RESUMES = "the same command then goes on from the last checkpoint"


class OutOfMemory(RunError):
    """Memory ran out; the message has advice."""


@contextlib.contextmanager
def memory_explained(advice: Callable[..., tuple[str, str]], *subject: Any) -> Iterator[None]:
    """Turn torch's errors for exhausted memory into an OutOfMemory with the pair that `advice(*subject)` returns.

    The pair is (during which work, what to do now). `advice` is called only then; of nested ones, the innermost counts.
    Loaders report every error as a damaged file, so the causes of our own errors are examined too.
    """
    try:
        yield
    except OutOfMemory:
        raise
    except (DistillError, RuntimeError, MemoryError) as error:
        cause = error.__cause__ if isinstance(error, DistillError) else error
        text = str(cause)
        if not isinstance(cause, (torch.OutOfMemoryError, MemoryError)) and not any(word in text for word in WORDS):
            raise
        doing, hint = advice(*subject)
        first = (text.splitlines() or [type(cause).__name__])[0]
        raise OutOfMemory(f"memory ran out {doing}: {first}", hint) from error


def loading(recipe: Recipe) -> tuple[str, str]:
    """While draft and teacher are loaded, before the first step."""
    if recipe.teacher.kind == "online":
        hint = _smaller_target(recipe)
        return "while draft and target were loaded", f"{hint}; teacher.kind=compact trains without a target"
    smaller = "a smaller draft (cut.layers, cut.mlp_width)"
    if recipe.train.adapter is None:
        smaller += ", or an adapter over quantised weights (train.adapter={base: int4})"
    return "while the draft was loaded", f"free memory that other programs hold, or choose {smaller}"


def stepping(work: Training) -> tuple[str, str]:
    """In a step: the settings named first change nothing but rounding."""
    settings = work.settings
    blocks = settings.micro_batch or settings.batch // work.accelerator.num_processes
    hints = [f"lower train.micro_batch (now {blocks})"] if blocks > 1 else []
    hints += [f"lower train.chunk (now {settings.chunk})"] if settings.chunk > 1 else []
    hints += [] if settings.checkpointing else ["set train.checkpointing=true"]
    hint = f"{', or '.join(hints)}; {RESUMES}" if hints else "free memory that other programs hold"
    if blocks == 1:
        hint += f"; a lower corpus.block (now {work.recipe.corpus.block}) needs less, in a run of its own (name=…)"
    return f"at step {work.state['step']} on {work.accelerator.device}", hint


def evaluating(work: Training) -> tuple[str, str]:
    """While weights are evaluated on the validation split."""
    settings = work.settings.acceptance
    assert settings is not None
    if not work.recipe.target.load:
        return (
            f"while α was measured on validation answers after step {work.state['step']} on {work.accelerator.device}",
            f"lower train.chunk (now {work.settings.chunk}); {RESUMES}",
        )
    return _decoding(
        work,
        f"train.acceptance.prompts (now {settings.prompts}) or train.acceptance.new_tokens (now {settings.new_tokens})",
    )


def _decoding(work: Training, settings: str) -> tuple[str, str]:
    return (
        f"while target and draft decoded after step {work.state['step']} on {work.accelerator.device}",
        f"lower {settings} and train again (--redo train), or {_smaller_target(work.recipe)}",
    )


def writing(work: Training) -> tuple[str, str]:
    """While the trained draft is assembled and written."""
    return (
        f"while the draft was written, after step {work.state['step']}",
        f"free memory that other programs hold; {RESUMES}, which is the end of the training",
    )


def _smaller_target(recipe: Recipe) -> str:
    """Advice for a target that takes less memory of this accelerator."""
    spread = "" if recipe.target.shard else "set target.shard=true where one process has several accelerators, or "
    smaller = {None: "target.quantise=int8 or int4", "int8": "target.quantise=int4", "int4": ""}[recipe.target.quantise]
    if not smaller:
        return spread + "take a smaller target"
    return f"{spread}set {smaller}, which makes its answers and distributions again"
