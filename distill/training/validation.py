"""The choice of weights by the draft's expected acceptance on the target's stored validation answers.

At each position, the stored distribution and the draft's give the chance that a drafted token is accepted, under the
served sampler and the recipe's verifier. Nothing is decoded, and the target does not run. All weights are measured at
the same positions and without random numbers, so that small differences show.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy
import torch

from distill.data.packing import scored_documents
from distill.devices import agree, as_float64, is_main, memory_explained
from distill.engines.torch.blocks import scored_states
from distill.engines.torch.hugging_face import trimmed_head
from distill.files import from_json
from distill.recipe import Recipe, Sampler
from distill.recipe.training import Protocol
from distill.run import Run
from distill.tables import paired_ratio_interval, ratio_interval
from distill.teacher.acceptance import acceptance_chances
from distill.teacher.distributions import head_logits
from distill.teacher.store import TeacherStore
from distill.training.learner import CHUNK_POSITIONS
from distill.training.losses import protocol_of
from distill.training.saved import ACCEPTANCE_STAGE, BEST, EvaluatedWeights, load_weights, save_weights, step_of_weights
from distill.training.setup import Training

# ── Advice if memory runs out ──

FREE = "free memory that other programs hold, and the same command goes on from the last checkpoint"


def advice(recipe: Recipe, doing: str, state: dict[str, Any] | None = None) -> tuple[str, str]:
    """Describe what was done when memory ran out, after which step of `state`, and which settings to lower."""
    place = doing if state is None else f"{doing}, after step {state['step']}"
    settings = recipe.train
    if doing == "in a step":  # These settings change results only by rounding.
        blocks = f"lower train.micro_batch (now {settings.micro_batch or settings.batch})"
        return place, f"{blocks}, or set train.checkpointing=true; {FREE}"
    if doing == "while the draft was loaded":
        return place, "choose a smaller draft (cut.layers, cut.mlp_width) or train.adapter={base: int4}"
    return place, FREE


def smaller_target(recipe: Recipe) -> str:
    """Advice to make the target take less memory of this accelerator."""
    spread = "" if recipe.target.shard else "set target.shard=true where one process has several accelerators, or "
    smaller = {None: "target.quantise=int8 or int4", "int8": "target.quantise=int4", "int4": ""}[recipe.target.quantise]
    if not smaller:
        return spread + "take a smaller target"
    first = "questions" if recipe.corpus.asked else "answers"
    return f"{spread}set {smaller} with --redo {first}, which makes its answers and distributions again"


# ── Acceptance on the stored validation answers ──

Sums = list[tuple[float, float, int]]  # by answer: Σ of the lower and of the upper bounds, and the number of positions


@torch.inference_mode()
def stored_acceptance(run: Run, draft: Any, sampler: Sampler, protocol: Protocol) -> Sums:
    """The acceptance of a draft in each of a run's validation answers, which come first in their store."""
    store, sums = TeacherStore(run, "validation"), Sums()
    for block in range(store.answer_blocks):
        stored = store.read(torch.tensor([block]))
        hidden = scored_states(draft, stored.blocks)
        teacher = stored.distributions(hidden.device)
        parts = []
        for start in range(0, len(hidden), CHUNK_POSITIONS):
            rows = slice(start, start + CHUNK_POSITIONS)
            logits = head_logits(draft, hidden[rows])[:, : store.vocabulary]
            least, most = acceptance_chances(teacher.chunk(rows), logits, sampler, protocol)
            parts.append(as_float64(torch.stack([least, most])))
        chances, end = torch.cat(parts, 1).cpu() if parts else torch.zeros(2, 0), 0
        for _, _, here in scored_documents(stored.blocks):
            start, end = end, end + int(here.sum())
            least, most = chances[:, start:end].sum(1).tolist()
            sums.append((round(least, 6), round(most, 6), end - start))
    return sums


# ── Acceptance of a training in progress ──


@contextmanager
def served_form(draft: Any, kept: Sequence[int] | None) -> Iterator[Any]:
    """Yield the draft in its served form: in evaluation mode, and a trimmed draft with the kept head only."""
    training, caching = draft.training, draft.config.use_cache
    draft.eval()
    try:
        with contextlib.nullcontext() if kept is None else trimmed_head(draft, kept):
            yield draft
    finally:
        draft.config.use_cache = caching
        draft.train(training)


def measure_acceptance(work: Training) -> Sums:
    """The acceptance of the present weights in their served form, by validation answer.

    The main process computes it for all processes. Every process must call this.
    """
    recipe, value = work.recipe, None
    protocol = protocol_of(work.settings, recipe.sampler.temperature)
    with work.draft() as present:
        if is_main():
            with served_form(present, work.kept) as draft, torch.compiler.set_stance("force_eager"):
                value = stored_acceptance(work.run, draft, recipe.sampler, protocol)
    sums: Sums = agree(value)
    return sums


def evaluated(step: int, sums: Sums, best: Sums | None) -> EvaluatedWeights:
    """The figures of weights, compared with the best earlier weights."""
    least, most, counts = numpy.array(sums, float).reshape(-1, 3).T
    if not counts.sum():
        return EvaluatedWeights(step, math.nan)
    before = None if best is None else numpy.array(best, float).T
    return EvaluatedWeights(
        step,
        acceptance=float(least.sum() / counts.sum()),
        most=float(most.sum() / counts.sum()),
        positions=int(counts.sum()),
        answers=len(counts),
        interval=ratio_interval(least, counts),
        gain=None if before is None else paired_ratio_interval(before[0], before[2], least, counts),
    )


# ── The choice of weights ──


def evaluation_due(work: Training) -> bool:
    """Whether the weights are evaluated after this step: at intervals and at the end."""
    settings, step = work.settings.acceptance, work.state["step"]
    return settings is not None and (step == work.settings.steps or step % settings.every == 0)


def evaluate_weights(work: Training) -> None:
    """Measure the present weights, and save them if they are the best so far."""
    state, step, began = work.state, work.state["step"], time.monotonic()
    with memory_explained(advice, work.recipe, "while weights were evaluated", state):
        sums = measure_acceptance(work)
    weights = evaluated(step, sums, state["sums"])
    seconds = time.monotonic() - began
    figures = {name: value for name, value in asdict(weights).items() if name != "step"}
    work.run.record(ACCEPTANCE_STAGE, step=step, **figures, tokens=state["tokens"], seconds=seconds)
    if math.isnan(weights.acceptance):
        work.run.say(f"  step {step}: {weights.words}; nothing is chosen by it", warning=True)
        return
    best = None if state["best"] is None else from_json(state["best"], EvaluatedWeights, "the last checkpoint")
    better = best is None or weights.acceptance > best.acceptance
    # These weights were saved as the best before a kill. With other rounding they might not be better now.
    better |= step_of_weights(work.run, BEST) == step
    state["misses"] = 0 if better else state["misses"] + 1
    if better:
        state["best"], state["sums"] = {"step": step, **figures}, sums
        save_weights(work.run, BEST, work.learner, step)
    before = "" if best is None or better else f" (best {best.acceptance:.3f} at step {best.step})"
    work.run.say(f"  step {step}: {weights.words}{' (the best so far)' if better else before}")


def ended(work: Training) -> bool:
    """Whether the training has ended by its steps or by patience. Notes the last step."""
    settings, state = work.settings.acceptance, work.state
    if state["step"] < work.settings.steps:
        if settings is None or settings.patience is None or state["misses"] < settings.patience:
            return False
        work.run.say(f"  the training ends early: {state['misses']} evaluations without a better one")
    state["ended"], state["step"] = state["step"], work.settings.steps
    return True


def take_best(work: Training) -> None:
    """Load the best weights. Without evaluations, and under a sparsity penalty, the last weights stay."""
    best = work.state["best"]
    if best is None or work.penalty is not None:
        return
    load_weights(work.run, BEST, work.learner)
    shown = from_json(best, EvaluatedWeights, "the last checkpoint").words
    work.run.say(f"  the weights of step {best['step']} are taken: {shown}")
    if best["step"] == 0:
        work.run.say("  training gained nothing on the validation prompts", warning=True)
