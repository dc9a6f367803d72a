"""The choice of weights: those whose drafts are accepted most on the validation split are kept and taken at the end."""

from __future__ import annotations

import time

from distill.results.serialise import from_json
from distill.results.training_results import ACCEPTANCE_STAGE, EvaluatedWeights
from distill.training.checkpoint import BEST, load_weights, save_weights
from distill.training.memory import evaluating, memory_explained
from distill.training.plan import REPLAY, PlannedPart
from distill.training.setup import Training
from distill.training.validation import measure_acceptance


def evaluation_due(work: Training, part: PlannedPart) -> bool:
    """Whether the weights are evaluated after this step: at intervals and at the end before a replay."""
    settings, step = work.settings.acceptance, work.state["step"]
    if settings is None or part.name == REPLAY:
        return False
    return step == part.end or step % settings.every == 0


def evaluate_weights(work: Training) -> None:
    """Measure the present weights and keep them if they are the best so far."""
    state, step, began = work.state, work.state["step"], time.monotonic()
    with memory_explained(lambda: evaluating(work)):
        measured = measure_acceptance(work)
    found = {name: value for name, value in measured.items() if not isinstance(value, list)}
    seconds = time.monotonic() - began
    work.run.record(ACCEPTANCE_STAGE, step=step, **measured, tokens=state["tokens"], seconds=seconds)
    sent = {f"validation/{name}": value for name, value in found.items() if name != "measure"}
    work.accelerator.log(sent, step=step)
    shown = from_json({"step": step, **found}, EvaluatedWeights, "the evaluation")
    best = state["best"]
    better = best is None or found["acceptance"] > best["acceptance"]
    state["misses"] = 0 if better else state["misses"] + 1
    if better:
        state["best"] = {"step": step, **found}
        save_weights(work.run, BEST, work.learner, work.is_main)
    work.run.say(
        f"  step {step}: {shown.words}"
        + (" (the best so far)" if better else f" (best {best['acceptance']:.3f} at step {best['step']})")
    )


def part_ended(work: Training, part: PlannedPart) -> bool:
    """Whether the training or its replay is over, by its steps or because patience ran out."""
    settings, state = work.settings.acceptance, work.state
    if state["step"] < part.end:
        if settings is None or settings.patience is None or state["misses"] < settings.patience:
            return False
        work.run.say(f"  the training ends early: {state['misses']} evaluations without a better one")
    state["step"], state["misses"] = part.end, 0
    return True


def take_best(work: Training) -> None:
    """Go back to the best weights; without evaluations, or under a sparsity penalty, the last ones stay."""
    best = work.state["best"]
    if best is None or work.penalty is not None:
        return
    load_weights(work.run, BEST, work.learner)
    shown = from_json(best, EvaluatedWeights, "the last checkpoint").words
    work.run.say(f"  the weights of step {best['step']} are taken: {shown}")
