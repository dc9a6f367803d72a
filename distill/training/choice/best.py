"""The choice of weights: those whose drafts are accepted most on validation prompts, with the served verification."""

from __future__ import annotations

import time

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
    """Evaluate the present weights and keep them if they are the best so far."""
    state, began = work.state, time.monotonic()
    with memory_explained(lambda: choosing(work)):
        found = work.acceptance()
    work.run.record("acceptance", step=state["step"], **found, seconds=time.monotonic() - began)
    work.accelerator.log({f"validation/{name}": value for name, value in found.items()}, step=state["step"])
    best = state["best"]
    better = best is None or found["acceptance"] > best["acceptance"]
    if better:
        state["best"], state["misses"] = {"step": state["step"], **found}, 0
        save_weights(work.run, BEST, work.learner, work.accelerator.is_main_process)
    else:
        state["misses"] += 1
    work.run.say(
        f"  accepted on validation prompts at step {state['step']}: {found['acceptance']:.3f}, "
        f"{found['tokens_per_round']:.2f} tokens per round"
        + (" (the best so far)" if better else f" (best {best['acceptance']:.3f} at step {best['step']})")
    )


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
    """Go back to the best weights; without evaluations, or under a sparsity penalty, the last ones stay."""
    best = work.state["best"]
    if best is None or work.penalty is not None:
        return
    load_weights(work.run, BEST, work.learner)
    work.run.say(f"  the weights of step {best['step']} are taken: {best['acceptance']:.3f} accepted")
