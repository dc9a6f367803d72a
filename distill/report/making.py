"""The sections on how the draft came about: its cuts, its training and its sparsity."""

from __future__ import annotations

from collections.abc import Callable

from distill.recipe.text.unloaded import REASON
from distill.report import plots
from distill.report.html import Html, as_list, as_plot, as_plots, as_table, as_text, not_run
from distill.report.text import known, number, percent, significant, size
from distill.results.cut_results import Change, Priced, SearchReport
from distill.results.evaluation_results import MEASURES
from distill.results.run_results import RunResults
from distill.results.training_results import (
    STORED,
    Evaluation,
    LearningCurve,
    ReplayDecision,
    TrainingStep,
    TrainingSummary,
    trained_tokens,
)

# Rows of the training table: the label, and the figure of a step.
TRAINED: dict[str, Callable[[TrainingStep], float]] = {
    "loss": lambda step: step.loss,
    MEASURES["forward_kl"]: lambda step: step.forward_kl,
    "cross-entropy, nats": lambda step: step.cross_entropy,
    MEASURES["top1_agreement"]: lambda step: step.agreement,
    "learning rate": lambda step: step.rate,
}


def cuts(results: RunResults) -> Html:
    """Sizes and KL after each operation on the donor, and the search over cuts where there was one."""
    heads = [
        "operation",
        "parameters",
        "bytes per step",
        "layers",
        "MLP",
        "tokens in the head",
        "change",
        "KL before, nats",
        "KL after",
    ]
    table = as_table(heads, [_cut_row(change) for change in results.cuts], results.command)
    return Html(table + _search(results.search)) if results.search else table


def _cut_row(change: Change) -> list[object]:
    before, after = change.before, change.after
    return [
        change.operation,
        number(after.parameters),
        size(after.bytes_per_step),
        number(after.layers),
        number(max(after.mlp)),
        number(after.kept_vocabulary),
        percent(after.parameters / before.parameters - 1),
        significant(change.kl_before),
        significant(change.kl_after),
    ]


def _search(search: SearchReport) -> Html:
    heads = [
        "cut",
        "parameters",
        "KL, nats",
        "acceptance",
        "step, ms",
        "best γ",
        "predicted tokens/s",
        "predicted speedup",
    ]

    def row(point: Priced) -> list[object]:
        chosen = Html(f"{as_text(point.name)} <b>chosen</b>")
        return [
            chosen if point.name == search.chosen else point.name,
            number(point.parameters),
            significant(point.kl),
            percent(point.acceptance),
            significant(1e3 * point.draft_seconds),
            number(point.length),
            significant(point.tokens_per_second),
            significant(point.speedup),
        ]

    points = sorted(search.points, key=lambda point: -point.tokens_per_second)
    caption = (
        "Every cut tried: the cost of its step, and its acceptance on the validation split after a short training. "
        "The line joins the cuts that no other beats in both."
    )
    drawing = as_plots(as_plot(lambda: plots.search_front(search), caption))
    table = as_table(heads, [row(point) for point in points], search.command)
    return Html(drawing + table + as_list(search.explanations))


def sparsity(results: RunResults) -> Html:
    """How the penalty spread over the layers and, for single weights, over the tensors."""
    assert results.sparsity is not None
    details, command = results.sparsity.details, results.command
    parts = [f"<p>{as_text(results.sparsity.sentence)}</p>"]
    if details.by_layer is not None:
        rows = [[str(layer), percent(share)] for layer, share in enumerate(details.by_layer)]
        tensors = [[name, percent(share)] for name, share in (details.by_tensor or {}).items()]
        parts += [
            as_table(["layer", "zero weights"], rows, command),
            as_table(["tensor", "zero weights"], tensors, command),
        ]
    else:
        shares, strengths = details.removed_zero_share or [], details.lambda_by_layer or []
        rows = [
            [str(layer), percent(share), significant(strength)]
            for layer, (share, strength) in enumerate(zip(shares, strengths, strict=True))
        ]
        heads = ["layer", "removed neurons that were exactly zero", "mean λ of the ramp"]
        parts.append(as_table(heads, rows, command))
    return Html("".join(parts))


def training(results: RunResults) -> Html:
    """The curves of the training, its first and last step, and the weights that were taken."""
    steps = results.steps
    if not steps:
        return not_run("train")
    block = plots.block_length(steps)
    each = "every step" if block == 1 else f"each point the mean of {block} steps"
    first, last = steps[0], steps[-1]
    rows = [[label, significant(figure(first)), significant(figure(last))] for label, figure in TRAINED.items()]
    return Html(
        as_plots(
            as_plot(lambda: plots.loss_curve(steps), f"Loss on training batches, {each}."),
            as_plot(lambda: plots.agreement_curve(steps), f"Agreement on training batches, {each}."),
            as_plot(lambda: plots.validation_curve(results.evaluated), _chosen_by(results.evaluated)),
            *([_learning(results.training.curve)] if results.training and results.training.curve else []),
        )
        + f"<p>{as_text(_pace(steps))}</p>"
        + (_chosen(results.training, results.command) if results.training else "")
        + as_table(["", f"step {first.step}", f"step {last.step}"], rows, results.command)
    )


def _chosen_by(evaluated: list[Evaluation]) -> str:
    if any(weights.measure == STORED for weights in evaluated):
        return "α of validation answers on stored distributions; bars show its bounds. No rounds were decoded."
    return "Acceptance decoded on validation prompts; bars are 95 % intervals."


def _learning(curve: LearningCurve) -> Html:
    drawn = (
        "Expected acceptance on texts that the target wrote for validation prompts, the same for all points; bars and "
        f"band are {percent(curve.confidence)} intervals. "
    )
    if curve.line:
        drawn += "Longer trainings would give at most what the line shows, the end of the fitted curve's interval."
    return as_plot(lambda: plots.learning_curve(curve), drawn)


def _pace(steps: list[TrainingStep]) -> str:
    """One line on the length, speed and memory of the training."""
    rates = sorted(step.tokens_per_second for step in steps if known(step.tokens_per_second))
    memory = [step.memory_bytes for step in steps if step.memory_bytes is not None]
    return (
        f"{number(len(steps))} steps, {number(trained_tokens(steps))} tokens, median "
        f"{number(rates[len(rates) // 2] if rates else None, 0)} tokens/s, peak memory "
        f"{size(max(memory, default=None))}; first step {steps[0].time}, last step {steps[-1].time}."
    )


def _chosen(training: TrainingSummary, command: str) -> Html:
    """The parts of the training, the weights that were taken, and the outcome of a replay."""
    rows = [
        [
            part.name,
            f"{part.first + 1}–{part.first + part.steps}",
            significant(part.rate),
            ", ".join(f"{weight:g} {name}" for name, weight in part.loss.items()),
        ]
        for part in training.parts
    ]
    sentences = []
    if best := training.best:
        figures = (
            f"{best.words}, {REASON}"
            if best.measure == STORED
            else f"{percent(best.acceptance)} accepted, {number(best.tokens_per_round)} tokens per round on validation "
            "prompts"
        )
        sentences.append(f"The weights of step {number(best.step)} were taken: {figures}.")
    if training.warning:
        sentences.append(training.warning)
    if training.curve:
        sentences.append(training.curve.sentence)
    if training.replay:
        sentences.append(_replay(training.replay))
    return Html(as_table(["part", "steps", "peak rate", "loss"], rows, command, words=4) + as_list(sentences))


def _replay(replay: ReplayDecision) -> str:
    collected, gain = replay.collected, replay.difference
    if gain is None:
        return (
            f"Replay: nothing was rejected in {number(collected.rounds)} rounds of "
            f"{number(collected.prompts)} prompts, so there was nothing to learn."
        )
    return (
        f"Replay: trained on {number(collected.rejected)} rejected positions; tokens per round went from "
        f"{number(replay.before, 3)} to {number(replay.after, 3)} on {number(replay.prompts)} other validation "
        f"prompts, a difference of {number(gain.mean, 3)} [{number(gain.low, 3)}, {number(gain.high, 3)}]: "
        f"{'kept' if replay.kept else 'not kept'}."
    )
