"""The report's plots: each function takes measured figures and returns one inline SVG, drawn by matplotlib.

Text has the colour of the page around it and the background is transparent, so that one drawing fits light and dark.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from html import escape
from statistics import fmean
from typing import TYPE_CHECKING, Any

from distill.errors import DataError
from distill.machine import install_extra
from distill.measuring.evaluation_results import MEASURES
from distill.measuring.speedup_results import Measurement
from distill.report.tables import TRAINED
from distill.tables import Interval, clean, known, ratio_interval
from distill.training.saved import STORED, Evaluation, TrainingStep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Mid tones that can be distinguished on white and on near-black and, with the markers, by colour-blind readers.
COLOURS = ("#2f81d6", "#e0792b", "#2f9e77", "#a86bd1", "#d6455d", "#8a8f98", "#b59a1d", "#3aa8b8")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
INK = "#010203"  # stands for the page's own text colour until the drawing is done
POINTS = 400
LONGEST = 52  # letters of a label

DRAWN = ("loss", MEASURES["forward_kl"], "cross-entropy, nats")  # rows of the table of training steps


def training_curve(steps: Sequence[TrainingStep]) -> str:
    """The loss and its parts, over the steps of training batches."""
    block = block_length(steps)
    with _figure("plot-loss", "Training loss over steps") as (axes, done):
        for index, label in enumerate(DRAWN):
            points = [(step.step, TRAINED[label](step)) for step in steps if known(TRAINED[label](step))]
            blocks = [points[at : at + block] for at in range(0, len(points), block)]
            if blocks:
                means = [tuple(map(fmean, zip(*part, strict=True))) for part in blocks]
                axes.plot(
                    *zip(*means, strict=True),
                    color=COLOURS[index],
                    label=label,
                    linewidth=1.6 if index == 0 else 1.1,
                    marker="o" if len(blocks) == 1 else None,
                )
        axes.set(xlabel="step", ylabel="nats per token")
        _whole_ticks(axes)
    return done[0]


def validation_curve(evaluated: Sequence[Evaluation]) -> str:
    """Acceptance on validation prompts over steps, by which weights are chosen: decoded, or stored."""
    if not evaluated:
        raise DataError("no weights were evaluated while training", "set train.acceptance to have them chosen")
    with _figure("plot-validation", "Acceptance on validation prompts over training steps") as (axes, done):
        stored = any(weights.measure == STORED for weights in evaluated)
        label = "acceptance probability, stored" if stored else "conditional acceptance, decoded"
        intervals = [
            Interval(one.acceptance, one.acceptance, one.most)
            if stored
            else replace(ratio_interval(one.accepted, one.reached), mean=one.acceptance)
            for one in evaluated
        ]
        _measured(axes, 0, label, [one.step for one in evaluated], intervals)
        expected = [(one.step, one.expected_acceptance) for one in evaluated if known(one.expected_acceptance)]
        if expected:
            axes.plot(
                *zip(*expected, strict=True),
                color=COLOURS[1],
                marker=MARKERS[1],
                label="acceptance probability, same texts",
            )
        axes.set(xlabel="step", ylabel="acceptance")
        _whole_ticks(axes)
    return done[0]


def block_length(steps: Sequence[TrainingStep]) -> int:
    """The number of steps that one drawn point averages."""
    return max(1, -(-len(steps) // POINTS))


def speedup_by_length(sweep: Sequence[Measurement], backend: str) -> str:
    """Speedup over plain decoding by draft length γ, one line per pair: measured, and predicted dashed."""
    drafted = [one for one in sweep if one.backend == backend and one.length and known(one.speedup)]
    with _figure(f"plot-speedup-{_slug(backend)}", f"Speedup by draft length, {backend}") as (axes, done):
        axes.axhline(1, color=INK, linewidth=1, alpha=0.7, label="plain = 1")
        label: str | None = "predicted (dashed)"
        for index, pair in enumerate(dict.fromkeys(one.pair for one in drafted)):
            line = sorted((one for one in drafted if one.pair == pair), key=lambda one: one.length or 0)
            lengths = [one.length or 0 for one in line]
            _measured(
                axes, index, pair, lengths, [Interval(one.speedup, one.speedup_low, one.speedup_high) for one in line]
            )
            predicted = [(one.length, one.predicted) for one in line if known(one.predicted)]
            if predicted:
                style: Any = {"color": COLOURS[index % len(COLOURS)], "linestyle": (0, (3, 2)), "linewidth": 1.3}
                axes.plot(*zip(*predicted, strict=True), label=label, **style)
                label = None  # once in the legend
        axes.set(xlabel="draft length γ", ylabel="speedup, times plain")
        _from_zero(axes)
        _whole_ticks(axes)
    return done[0]


def _measured(axes: Axes, index: int, label: str, x: Sequence[float], found: Sequence[Interval]) -> None:
    below = [max(0.0, one.mean - one.low) if known(one.low) else 0.0 for one in found]
    above = [max(0.0, one.high - one.mean) if known(one.high) else 0.0 for one in found]
    axes.errorbar(
        x,
        [one.mean for one in found],
        yerr=[below, above],
        color=COLOURS[index % len(COLOURS)],
        label=_label(label),
        capsize=2.5,
        marker=MARKERS[index % len(MARKERS)],
        elinewidth=1,
    )


def _label(text: str) -> str:
    """One line, never longer than the plot; matplotlib hides a label that begins with an underscore."""
    text = clean(text).replace("\n", " ").lstrip("_") or "unnamed"
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "x"


def _whole_ticks(axes: Axes) -> None:
    axes.locator_params("x", nbins=8, integer=True, min_n_ticks=1)


def _from_zero(axes: Axes) -> None:
    """A scale from 0 with room above: the usual margin is a share of the spread, which may be small."""
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])


@contextmanager
def _figure(name: str, title: str) -> Iterator[tuple[Axes, list[str]]]:
    """Axes to draw on; after the block the second value holds the finished SVG.

    Raises DataError without matplotlib.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DataError("matplotlib is not installed", install_extra("report")) from error
    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "text.parse_math": False,
        "font.size": 9,
        "lines.markersize": 3.5,
        "grid.alpha": 0.25,
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
        **dict.fromkeys(("axes.edgecolor", "grid.color"), COLOURS[5]),
        **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
        **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    }
    done: list[str] = []
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(5.0, 3.3), layout="constrained")
        axes = figure.add_subplot()
        yield axes, done
        handles, labels = axes.get_legend_handles_labels()
        if labels:
            longest = max(map(len, labels))
            columns = 1 if longest > 30 else 2 if longest > 17 else 3
            figure.legend(handles, labels, loc="outside lower center", ncols=min(columns, len(labels)))
        drawn = io.StringIO()
        unsaid: Any = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(drawn, format="svg", transparent=True, metadata=unsaid)
    done.append(_inline(drawn.getvalue(), name, title))


def _inline(drawn: str, name: str, title: str) -> str:
    """A matplotlib SVG file as an element of a page: ids of its own, the page's colour and width."""
    svg = drawn[drawn.index("<svg") :].strip().replace(INK, "currentColor")
    # Ids and references begin with the name; labels, between tags, stay as they are.
    reference = re.compile(r'(\bid="|href="#|url\(#)')
    svg = re.sub(r"<[^>]+>", lambda tag: reference.sub(rf"\g<1>{name}-", tag[0]), svg)
    opening = re.match(r"<svg[^>]*?(viewBox=\"[^\"]*\")[^>]*>", svg)
    assert opening is not None
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {opening[1]} '
        f'role="img" aria-label="{escape(title)}">'
    )
    return head + svg[opening.end() :]
