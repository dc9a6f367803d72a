"""The choice of weights: those whose drafts are accepted most on validation prompts, with the served verification, or
on stored distributions where the target is not loaded."""

from __future__ import annotations

import time

from distill.results.serialise import from_json
from distill.results.training_results import ACCEPTANCE_STAGE, AVERAGE_STAGE, EvaluatedWeights
from distill.training.checkpoint import BEST, load_weights, save_weights
from distill.training.memory import choosing, memory_explained
from distill.training.plan import REPLAY, PlannedPart
from distill.training.setup import Training


def evaluation_due(work: Training, part: PlannedPart) -> bool:
    """Whether the weights are evaluated after this step: at intervals and at the end of each part but the replay."""
    settings, step = work.settings.acceptance, work.state["step"]
    if settings is None or part.name == REPLAY:
        return False
    return step == part.end or (step - part.first) % settings.every == 0


def consider(work: Training) -> None:
    """Evaluate the present weights, and their average if there is one, and keep the best so far."""
    better = _candidate(work, averaged=False)
    if work.average is not None and work.average.is_candidate:
        with work.average.in_place():
            better = _candidate(work, averaged=True) or better
    work.state["misses"] = 0 if better else work.state["misses"] + 1


def _candidate(work: Training, averaged: bool) -> bool:
    """Evaluate the weights that are in place and keep them if they are the best so far."""
    state, step, began = work.state, work.state["step"], time.monotonic()
    with memory_explained(lambda: choosing(work)):
        measured = work.acceptance()
    found = {name: value for name, value in measured.items() if not isinstance(value, list)}
    # A name of its own: of a stage's lines, Run.metrics keeps one for each step.
    seconds = time.monotonic() - began
    stage = AVERAGE_STAGE if averaged else ACCEPTANCE_STAGE
    work.run.record(stage, step=step, averaged=averaged, **measured, tokens=state["tokens"], seconds=seconds)
    prefix = "validation/averaged/" if averaged else "validation/"
    work.accelerator.log({f"{prefix}{name}": value for name, value in found.items() if name != "measure"}, step=step)
    shown = from_json({"step": step, **found}, EvaluatedWeights, "the evaluation")
    best = state["best"]
    better = best is None or found["acceptance"] > best["acceptance"]
    if better:
        state["best"] = {"step": step, "averaged": averaged, **found}
        save_weights(work.run, BEST, work.learner, work.accelerator.is_main_process)
    work.run.say(
        f"  step {step}{', the average' if averaged else ''}: {shown.words}"
        + (" (the best so far)" if better else f" (best {best['acceptance']:.3f} at step {best['step']})")
    )
    return better


def end_of(work: Training, part: PlannedPart) -> bool:
    """Whether the part is over, by its steps or because patience ran out; misses then count from 0 again."""
    settings, state = work.settings.acceptance, work.state
    if state["step"] < part.end:
        if settings is None or settings.patience is None or state["misses"] < settings.patience:
            return False
        work.run.say(f"  this part ends early: {state['misses']} evaluations without a better one")
    state["step"], state["misses"] = part.end, 0
    return True


def take_best(work: Training) -> None:
    """Go back to the best weights; without evaluations, or under a sparsity penalty, the last ones stay.

    Without evaluations, the average of the weights replaces the last ones where there is one.
    """
    best = work.state["best"]
    if best is None and work.average is not None:
        work.average.take()
        work.run.say(f"  the average of the weights of {work.average.count} steps is taken")
    if best is None or work.penalty is not None:
        return
    load_weights(work.run, BEST, work.learner)
    kind = "averaged weights" if best["averaged"] else "weights"
    shown = from_json(best, EvaluatedWeights, "the last checkpoint").words
    work.run.say(f"  the {kind} of step {best['step']} are taken: {shown}")
