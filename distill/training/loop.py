"""Stage `train`: the draft learns the target's distributions. Read `train` from top to bottom.

A step adds up the gradients of Σ ℓ over its micro-batches and processes and divides them once by the scored positions,
so that neither the split into micro-batches nor the number of processes changes anything but rounding.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from distill.devices import CPU, any_process, barrier, is_main, memory_explained, peak_memory_bytes
from distill.engines.loaded import context_of
from distill.engines.torch.hugging_face import FILE as KEPT_FILE
from distill.errors import DataError
from distill.files import copy_file, from_json, link_file, write_folder, write_json, write_result
from distill.folders import copy_tokenizer
from distill.progress import duration, noting
from distill.recipe import Recipe
from distill.run import BEGIN, Run
from distill.training.optimizer import rate_share, set_rates
from distill.training.saved import (
    MOST_EPOCHS,
    EvaluatedWeights,
    TrainingSummary,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)
from distill.training.setup import Training, merge, set_up
from distill.training.validation import advice, ended, evaluate_weights, evaluation_due, take_best

CLIP = 1.0  # the largest norm of a gradient
STOPPING = "interrupted: the training stops after this step and is saved; a second signal ends it at once"


def train(recipe: Recipe, run: Run) -> list[Path]:
    """Train cut/ into draft/ on the teacher; resumes from the newest checkpoint, bit for bit on CPU.

    training.json records the choice of weights. Raises DataError for a loss that is not finite, RunError where memory
    runs out; KeyboardInterrupt or SystemExit after Ctrl-C or SIGTERM, with all saved.
    """
    if not recipe.train.steps:
        return leave_untrained(run)
    with memory_explained(advice, recipe, "while the draft was loaded"):
        work = set_up(recipe, run)
        resumed = resume(work)
    if is_main() and not resumed:
        run.record(BEGIN)
    settings, state = work.settings, work.state
    planned = summary_of(work)
    many = planned.epochs > MOST_EPOCHS
    run.say(f"  {'warning: ' if many else ''}{planned.text}", warning=many)
    if words := beyond_blocks(recipe):
        run.say(f"  {words}")
    if not resumed and settings.acceptance is not None:
        evaluate_weights(work)  # the untrained draft is a candidate too, so that nothing worse is ever taken
    clock = Clock(state["step"])
    signals: list[int] = []  # the first one, which ends the command after the step
    pending, began = list[Pending](), 0.0
    with noting(signals.append, STOPPING), memory_explained(advice, recipe, "in a step", state):
        while state["step"] < work.settings.steps:
            step = state["step"]
            # For a draft with dropout, so that a resumed training draws the same.
            torch.manual_seed(hash((recipe.seed, step, work.accelerator.process_index)) % 2**31)
            rate = work.rate * rate_share(step, settings.steps)
            began = began if pending else time.monotonic()
            figures = one_step(work, step, rate)
            more = {} if work.penalty is None else work.penalty.after_step(step, rate)
            pending.append(Pending(step, rate, figures, more))
            state["step"] = step + 1
            state["tokens"] += work.scored(step)
            saving = state["step"] % settings.save_every == 0 or state["step"] == settings.steps
            due = saving or evaluation_due(work) or state["step"] % reported_every(work) == 0
            if not (due or (signals and work.accelerator.num_processes == 1)):
                continue
            report_steps(work, pending, clock, began)
            pending.clear()
            if evaluation_due(work):
                evaluate_weights(work)
            last = ended(work)
            stopping = any_process(bool(signals))
            if saving or last or stopping:
                save(work)
            if stopping:
                end_stopped(work, signals)
    with memory_explained(advice, recipe, "while the draft was written", state):
        take_best(work)
        return write_draft(work)


def beyond_blocks(recipe: Recipe) -> str:
    """Return the sentence about a target that serves longer contexts than the blocks of training; empty for others."""
    context, block = context_of(recipe.target.model), recipe.corpus.block
    if context is None or context <= block:
        return ""
    return (
        f"blocks have {block:,} tokens, and the target takes up to {context:,}: acceptance may fall beyond the blocks. "
        "If you serve longer contexts, raise corpus.block; `distill serve-check` shows acceptance by length"
    )


def leave_untrained(run: Run) -> list[Path]:
    """The cut as it is as draft/, for a recipe of 0 steps."""
    if is_main():
        run.say("  train.steps is 0: the draft is the cut as it is")
        options: Any = {"ignore": shutil.ignore_patterns("cut.json"), "copy_function": link_file, "dirs_exist_ok": True}
        write_folder(run.path("draft"), lambda folder: shutil.copytree(run.path("cut"), folder, **options))
        write_result(run.path("training.json"), TrainingSummary(0, 1, 0.0, {}, None, 0.0))
    return [run.path("draft"), run.path("training.json")]


def resume(work: Training) -> bool:
    """Continue from the newest checkpoint; False where there is none."""
    checkpoint = newest_checkpoint(work.run.path("checkpoints"))
    if checkpoint is None:
        return False
    work.state.update(load_checkpoint(checkpoint, work.learner, work.optimizer))
    if work.penalty is not None:
        work.penalty.load_state_dict(work.state["sparsity"])
    work.run.say(f"  resuming at step {work.state['step']} of {work.settings.steps}")
    return True


def save(work: Training) -> None:
    """Write a checkpoint."""
    state, began = work.state, time.monotonic()
    state["sparsity"] = work.penalty.state_dict() if work.penalty is not None else None
    save_checkpoint(work.run, state["step"], work.learner, work.optimizer, state)
    work.run.record("checkpoint", step=state["step"], seconds=time.monotonic() - began)


def end_stopped(work: Training, signals: list[int]) -> NoReturn:
    """End the command as the signal would have, with everything saved, in all processes, whichever got the signal."""
    step = work.state["step"]
    work.run.say(f"  stopped and saved at step {step} of {work.settings.steps}; the same command goes on there")
    barrier()  # torchrun ends all processes with the first, even one that is still writing the checkpoint
    if signal.SIGTERM in signals:
        raise SystemExit(128 + signal.SIGTERM)
    raise KeyboardInterrupt


def one_step(work: Training, step: int, rate: float) -> dict[str, torch.Tensor]:
    """Take one optimizer step at `rate`, with the gradients of all micro-batches and processes.

    Returns this process's sums and the gradient's norm. They stay on the device, and nothing here waits for it.
    """
    accelerator, learner = work.accelerator, work.learner
    device = accelerator.device
    micro_batches = work.batches(step)
    sums: dict[str, torch.Tensor] = {}
    for number, stored in enumerate(micro_batches, 1):
        blocks, teacher = stored.blocks.to(device), stored.distributions(device)
        # Processes exchange gradients once, with the last micro-batch.
        with contextlib.nullcontext() if number == len(micro_batches) else accelerator.no_sync(learner):
            with accelerator.autocast():
                total, part = learner(blocks, teacher, work.loss)
            accelerator.backward(total)
        sums = {name: value + sums.get(name, 0) for name, value in part.items()}
    gradients = [parameter.grad for parameter in learner.parameters() if parameter.grad is not None]
    # The exchange took the mean over processes.
    torch._foreach_mul_(gradients, accelerator.num_processes / max(1, work.scored(step)))
    sums["gradient_norm"] = torch.nn.utils.clip_grad_norm_(learner.parameters(), CLIP)
    set_rates(work.optimizer, rate * work.outer, rate)
    work.optimizer.step()
    work.optimizer.zero_grad(set_to_none=True)
    return sums


# Steps whose figures are fetched from an accelerator at once, because each fetch waits for it.
TOGETHER = 10


def reported_every(work: Training) -> int:
    """Steps between reports."""
    return 1 if work.accelerator.device.type == CPU else TOGETHER


@dataclass(frozen=True)
class Pending:
    """A step that was taken at a rate and is not reported: its figures on the device, and `more` of the host's."""

    step: int
    rate: float
    figures: dict[str, torch.Tensor]
    more: dict[str, Any]


def fetched(work: Training, pending: list[Pending]) -> list[dict[str, Any]]:
    """The means over each step for the log, by one transfer to the host; DataError where one is not finite."""
    sums = torch.stack([torch.stack([*own.figures.values()][:-1]) for own in pending])
    norms = torch.stack([own.figures["gradient_norm"] for own in pending])
    rows = torch.cat([work.accelerator.reduce(sums, "sum"), norms.unsqueeze(-1)], -1).tolist()
    shares, means = work.loss.losses, []
    for own, row in zip(pending, rows, strict=True):
        totals = dict(zip(own.figures, row, strict=True))
        norm, positions = totals.pop("gradient_norm"), totals.pop("positions")
        scored = max(1.0, positions)
        losses = {name: totals.pop(f"loss/{name}") / scored for name in shares}
        loss = sum(shares[name] * value for name, value in losses.items())
        if not math.isfinite(norm) or not math.isfinite(loss):
            checkpoint = newest_checkpoint(work.run.path("checkpoints"))
            left = "nothing was saved yet" if checkpoint is None else f"the last checkpoint, {checkpoint.name}, is kept"
            what = f"the loss or its gradient is not finite at step {own.step} (loss {loss}, gradient norm {norm})"
            raise DataError(what, f"{left}; lower train.rate, or train in float32")
        figures = {name: value / scored for name, value in totals.items()}
        means.append({"loss": loss, "losses": losses, **figures, "gradient_norm": norm, "tokens": int(positions)})
    return means


class Clock:
    """Pace and remaining time of a training that this command began at step `first`."""

    def __init__(self, first: int) -> None:
        self.first, self.tokens = first, 0
        self.started, self.shown = time.monotonic(), 0.0

    def count(self, step: int, steps: int, tokens: int) -> tuple[float, float]:
        """Tokens per second so far and seconds left, after `step` steps of `steps`."""
        self.tokens += tokens
        elapsed = time.monotonic() - self.started
        return self.tokens / elapsed, elapsed / max(1, step - self.first) * (steps - step)


def report_steps(work: Training, pending: list[Pending], clock: Clock, began: float) -> None:
    """One line of metrics.jsonl for every pending step, of which the first began then."""
    means = fetched(work, pending)
    seconds = (time.monotonic() - began) / len(pending)
    memory = peak_memory_bytes(work.accelerator.device)
    for own, figures in zip(pending, means, strict=True):
        report_step(work, own.step + 1, own.rate, {**figures, "seconds": seconds, **own.more}, clock, memory)


def report_step(work: Training, step: int, rate: float, figures: dict[str, Any], clock: Clock, memory: int) -> None:
    """The line of metrics.jsonl for one step, and perhaps that on the screen."""
    pace, left = clock.count(step, work.settings.steps, figures["tokens"])
    timing = {"tokens_per_second": pace, "memory_bytes": memory, "eta_seconds": left}
    work.run.record("train", step=step, rate=rate, **figures, **timing)
    if time.monotonic() - clock.shown > 5 or step == work.settings.steps:
        clock.shown = time.monotonic()
        work.run.say(
            f"  step {step}/{work.settings.steps} loss {figures['loss']:.4f} kl {figures['forward_kl']:.4f} "
            f"acceptance probability {figures['acceptance']:.3f} "
            + (f"zero {figures['zero_share']:.2f} " if "zero_share" in figures else "")
            + f"{pace:.0f} tok/s {memory / 2**30:.2f} GiB, {duration(left)} left"
        )


def write_draft(work: Training) -> list[Path]:
    """Write draft/ and training.json with the present weights, adapters merged and removed neurons cut out."""
    run = work.run
    with work.draft() as final:
        if is_main():
            write_whole(work, final.eval())
    return [run.path("draft"), run.path("training.json")]


def write_whole(work: Training, final: Any) -> None:
    """The files of `write_draft`, of a draft with all its rows."""
    run = work.run
    if work.settings.adapter is not None:
        final = merge(final, run.path("cut"))
    report = None
    if work.penalty is not None:
        before = final.num_parameters()
        sentence, details = work.penalty.finish(final)
        report = {"parameters": [before, final.num_parameters()], "details": details, "sentence": sentence}
    final.config.use_cache = True

    def write(folder: Path) -> None:
        final.save_pretrained(folder)
        copy_tokenizer(run.path("cut"), folder)
        for name in (KEPT_FILE, "surgery.json"):
            if run.path("cut", name).exists():
                copy_file(run.path("cut", name), folder / name)
        if report is not None:
            write_json(folder / "sparsity.json", report)

    write_folder(run.path("draft"), write)
    if report is not None:
        run.say(f"  sparsity: {report['sentence']}")
    write_result(run.path("training.json"), summary_of(work))


def summary_of(work: Training) -> TrainingSummary:
    """What training.json says of a training that is over."""
    # Under a sparsity penalty the last weights stay, however earlier ones were accepted.
    best = work.state["best"] if work.penalty is None else None
    steps = work.state["ended"] or work.settings.steps  # patience may end it early
    stored = work.source.manifest
    return TrainingSummary(
        steps=steps,
        processes=work.accelerator.num_processes,
        rate=work.rate,
        loss=dict(work.loss.losses),
        best=None if best is None else from_json(best, EvaluatedWeights, "the last checkpoint"),
        epochs=steps * work.settings.batch / work.source.blocks,
        answers=stored.get("answer_positions", stored["scored_positions"]) / stored["scored_positions"],
    )
