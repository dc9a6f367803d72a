"""Stage `train`: the draft learns the target's distributions. Read `train` from top to bottom.

A step adds up the gradients of Σ ℓ over its micro-batches and processes, and divides them once by the scored positions.
The split into micro-batches and the number of processes therefore change results only by rounding.
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
STOPPING = (
    "interrupted: training saves a checkpoint after this step and stops. A second signal ends the process at once"
)


def train(recipe: Recipe, run: Run) -> list[Path]:
    """Train cut/ into draft/ on the stored distributions, and record the choice of weights in training.json.

    The training resumes from the newest checkpoint, on a CPU bit for bit. Raises DataError for a loss that is not
    finite, and RunError if memory runs out. Ctrl-C raises KeyboardInterrupt and SIGTERM raises SystemExit, after a
    checkpoint was saved.
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
    many = planned.epochs > MOST_EPOCHS and settings.patience is None
    run.say(f"  {'warning: ' if many else ''}{planned.words(settings.patience)}", warning=many)
    if words := beyond_blocks(recipe):
        run.say(f"  {words}")
    if not resumed and settings.acceptance is not None:
        evaluate_weights(work)  # The untrained draft is a candidate, so that no worse weights are chosen.
    clock = Clock(state["step"])
    signals: list[int] = []  # The first signal ends the command after the step.
    pending, began = list[Pending](), 0.0
    with noting(signals.append, STOPPING), memory_explained(advice, recipe, "in a step", state):
        while state["step"] < work.settings.steps:
            step = state["step"]
            # A resumed training of a draft with dropout draws the same random numbers.
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
    """Warn about a target that serves longer contexts than the blocks of training; empty for other targets."""
    context, block = context_of(recipe.target.model), recipe.corpus.block
    if context is None or context <= block:
        return ""
    return (
        f"blocks have {block:,} tokens, and the target takes up to {context:,}: acceptance may fall beyond the blocks. "
        "If you serve longer contexts, raise corpus.block; `distill serve-check` shows acceptance by length"
    )


def leave_untrained(run: Run) -> list[Path]:
    """Link the cut as draft/, for a recipe of 0 steps."""
    if is_main():
        run.say("  train.steps is 0: the draft is the cut as it is")
        options: Any = {"ignore": shutil.ignore_patterns("cut.json"), "copy_function": link_file, "dirs_exist_ok": True}
        write_folder(run.path("draft"), lambda folder: shutil.copytree(run.path("cut"), folder, **options))
        write_result(run.path("training.json"), TrainingSummary(0, 1, 0.0, {}, None, 0.0))
    return [run.path("draft"), run.path("training.json")]


def resume(work: Training) -> bool:
    """Continue from the newest checkpoint. Returns whether there is one."""
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
    """End the command in all processes as the signal would have, after a checkpoint was saved."""
    step = work.state["step"]
    work.run.say(f"  stopped and saved at step {step} of {work.settings.steps}; the same command goes on there")
    barrier()  # torchrun ends all processes with the first one, even while another still writes the checkpoint.
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


STEPS_PER_FETCH = 10  # The host waits for an accelerator once for the figures of so many steps.


def reported_every(work: Training) -> int:
    """The number of steps between reports."""
    return 1 if work.accelerator.device.type == CPU else STEPS_PER_FETCH


@dataclass(frozen=True)
class Pending:
    """A step at a rate that is not reported yet: its figures on the device, and `more` figures on the host."""

    step: int
    rate: float
    figures: dict[str, torch.Tensor]
    more: dict[str, Any]


def fetched(work: Training, pending: list[Pending]) -> list[dict[str, Any]]:
    """The means of each step for the log, by one transfer to the host. Raises DataError if one is not finite."""
    sums = torch.stack([torch.stack([*step.figures.values()][:-1]) for step in pending])
    norms = torch.stack([step.figures["gradient_norm"] for step in pending])
    rows = torch.cat([work.accelerator.reduce(sums, "sum"), norms.unsqueeze(-1)], -1).tolist()
    shares, means = work.loss, []
    for step, row in zip(pending, rows, strict=True):
        totals = dict(zip(step.figures, row, strict=True))
        norm, positions = totals.pop("gradient_norm"), totals.pop("positions")
        scored = max(1.0, positions)
        losses = {name: totals.pop(f"loss/{name}") / scored for name in shares}
        loss = sum(shares[name] * value for name, value in losses.items())
        if not math.isfinite(norm) or not math.isfinite(loss):
            checkpoint = newest_checkpoint(work.run.path("checkpoints"))
            left = "nothing was saved yet" if checkpoint is None else f"the last checkpoint, {checkpoint.name}, is kept"
            what = f"the loss or its gradient is not finite at step {step.step} (loss {loss}, gradient norm {norm})"
            raise DataError(what, f"{left}; lower train.rate, or train in float32")
        figures = {name: value / scored for name, value in totals.items()}
        means.append({"loss": loss, "losses": losses, **figures, "gradient_norm": norm, "tokens": int(positions)})
    return means


class Clock:
    """Pace and remaining time of a training that this command continues from step `first`."""

    def __init__(self, first: int) -> None:
        self.first, self.tokens = first, 0
        self.started, self.shown = time.monotonic(), 0.0

    def count(self, step: int, steps: int, tokens: int) -> tuple[float, float]:
        """Count the tokens of a step. Returns tokens per second and the seconds left, after `step` of `steps` steps."""
        self.tokens += tokens
        elapsed = time.monotonic() - self.started
        return self.tokens / elapsed, elapsed / max(1, step - self.first) * (steps - step)


def report_steps(work: Training, pending: list[Pending], clock: Clock, began: float) -> None:
    """Write a line of metrics.jsonl for each pending step. The first of them began at the time `began`."""
    means = fetched(work, pending)
    seconds = (time.monotonic() - began) / len(pending)
    memory = peak_memory_bytes(work.accelerator.device)
    for step, figures in zip(pending, means, strict=True):
        report_step(work, step.step + 1, step.rate, {**figures, "seconds": seconds, **step.more}, clock, memory)


def report_step(work: Training, step: int, rate: float, figures: dict[str, Any], clock: Clock, memory: int) -> None:
    """Write a step's line of metrics.jsonl, and a line on the screen every 5 seconds."""
    pace, left = clock.count(step, work.settings.steps, figures["tokens"])
    most = "" if work.settings.patience is None else "at most "
    timing = {"tokens_per_second": pace, "memory_bytes": memory, "eta_seconds": left}
    work.run.record("train", step=step, rate=rate, **figures, **timing)
    if time.monotonic() - clock.shown > 5 or step == work.settings.steps:
        clock.shown = time.monotonic()
        work.run.say(
            f"  step {step}/{work.settings.steps} loss {figures['loss']:.4f} kl {figures['forward_kl']:.4f} "
            f"acceptance probability {figures['acceptance']:.3f} "
            + (f"zero {figures['zero_share']:.2f} " if "zero_share" in figures else "")
            + f"{pace:.0f} tok/s {memory / 2**30:.2f} GiB, {most}{duration(left)} left"
        )


def write_draft(work: Training) -> list[Path]:
    """Write draft/ and training.json with the present weights, with adapters merged and removed neurons cut out."""
    run = work.run
    with work.draft() as final:
        if is_main():
            write_whole(work, final.eval())
    return [run.path("draft"), run.path("training.json")]


def write_whole(work: Training, final: Any) -> None:
    """Write the files of `write_draft` for a draft with all its rows."""
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
    """The content of training.json for a training that has ended."""
    # Under a sparsity penalty, the last weights stay even if earlier weights were accepted more often.
    best = work.state["best"] if work.penalty is None else None
    steps = work.state["ended"] or work.settings.steps  # Patience may end the training early.
    stored = work.source.manifest
    return TrainingSummary(
        steps=steps,
        processes=work.accelerator.num_processes,
        rate=work.rate,
        loss=dict(work.loss),
        best=None if best is None else from_json(best, EvaluatedWeights, "the last checkpoint"),
        epochs=steps * work.settings.batch / work.source.blocks,
        answers=stored.get("answer_positions", stored["scored_positions"]) / stored["scored_positions"],
    )
