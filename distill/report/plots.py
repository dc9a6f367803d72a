"""The report's plots. Each function takes measured figures and returns one inline SVG, drawn by matplotlib.

Text has the colour of the page around it, and the background is transparent. The same drawing then fits light and dark
pages.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from statistics import fmean
from typing import TYPE_CHECKING, Any

from distill.data.samples import SEEN
from distill.errors import DataError
from distill.machine import install_extra
from distill.measuring.evaluation_results import MEASURES, ByText
from distill.measuring.speedup_results import InTurns, Measurement, SpeedupPart, SpeedupReport
from distill.measuring.verdict import engine_of, leader
from distill.tables import Interval, clean, known, shown
from distill.training.saved import Evaluation, TrainingStep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Mid tones that can be distinguished on white and on near-black and, with the markers, by colour-blind readers.
COLOURS = ("#2f81d6", "#e0792b", "#2f9e77", "#a86bd1", "#d6455d", "#8a8f98", "#b59a1d", "#3aa8b8")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
HATCHES = ("", "////", "..")
INK = "#010203"  # A placeholder, which `_inline` replaces by the colour of the page's text.
BEST: Any = {"color": COLOURS[0]}
OTHERS: Any = {"color": COLOURS[5], "alpha": 0.45}
DASHED: Any = {"linestyle": (0, (3, 2)), "linewidth": 1.4}  # plain decoding
POINTS = 400  # the most points of a training curve
LONGEST, NAME = 52, 26  # maximum letters of a label, and of a name next to a bar

# The drawn figures of a training step, by label.
DRAWN: dict[str, Callable[[TrainingStep], float]] = {
    "loss": lambda step: step.loss,
    MEASURES["forward_kl"]: lambda step: step.forward_kl,
    "cross-entropy, nats": lambda step: step.cross_entropy,
}


def training_curve(steps: Sequence[TrainingStep]) -> str:
    """Draw the loss and its parts over the training steps."""
    block = block_length(steps)
    with _figure("plot-loss", "Training loss over steps") as (axes, done):
        for index, (label, figure) in enumerate(DRAWN.items()):
            points = [(step.step, figure(step)) for step in steps if known(figure(step))]
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
    """Draw the acceptance probability on validation answers, which decides what weights are taken, over the steps.

    Raises DataError if no weights were evaluated.
    """
    if not evaluated:
        raise DataError("no weights were evaluated while training", "set train.acceptance to have them chosen")
    with _figure("plot-validation", "Acceptance on validation answers over training steps") as (axes, done):
        intervals = [
            weights.interval or Interval(weights.acceptance, weights.acceptance, weights.most) for weights in evaluated
        ]
        _measured(axes, 0, "acceptance probability", [weights.step for weights in evaluated], intervals)
        axes.set(xlabel="step", ylabel="acceptance")
        _whole_ticks(axes)
    return done[0]


def block_length(steps: Sequence[TrainingStep]) -> int:
    """Return the number of steps that one drawn point averages."""
    return max(1, -(-len(steps) // POINTS))


def speeds(report: SpeedupReport) -> str:
    """Tokens per second of every configuration in every engine, with plain decoding as a dashed line.

    The fastest way is in colour. It is a bar of the engines' turns, if they took any: only these compare engines.
    """
    part, best, *_ = leader(report)
    Bar = tuple[str, Measurement | InTurns, float, bool]  # name, figures, plain tokens/s, fastest
    groups: dict[str, list[Bar]] = {}
    if report.in_turns:
        plain = next(one.tokens_per_second for one in report.in_turns if one.speedup == 1)
        groups["engines in turns"] = [
            (
                f"{one.configuration}, {engine_of(one)}",
                one,
                plain,
                one.key == best.key and part.measurements[one.place] is best,
            )
            for one in report.in_turns
        ]
    for own in report.parts:
        drafting = [one for one in own.measurements if not one.is_plain]
        decides = not report.in_turns
        groups[engine_of(own)] = [
            (one.configuration, one, one.plain_tokens_per_second, decides and one is best) for one in drafting
        ]
    rows = [f"{bar[0]} in {group} {bar[1].tokens_per_second:.1f}" for group, bars in groups.items() for bar in bars]
    height, place, ticks = 0.9 + 0.21 * (len(rows) + len(groups)), 0, dict[int, str]()
    with _figure("plot-speeds", f"Tokens per second: {', '.join(rows)}", height) as (axes, done):
        for group, bars in groups.items():
            axes.text(0, place, _label(group), va="center", fontweight="bold")
            for name, one, plain, fastest in bars:
                place, weight, speed = place + 1, "bold" if fastest else "normal", one.tokens_per_second
                high = one.speedup_high * plain
                ticks[place] = f"▸ {name}" if fastest else name
                axes.barh(place, speed, 0.72, **(BEST if fastest else OTHERS))
                axes.hlines(place, one.speedup_low * plain, high, color=INK, linewidth=1.2)
                axes.vlines(plain, place - 0.5, place + 0.5, color=INK, **DASHED)
                end = max(speed, plain, high)  # the last may be NaN
                label = f"{speed:.1f} ({shown(one.speedup, '×')})"
                axes.annotate(label, (end, place), (4, 0), textcoords="offset points", va="center", fontweight=weight)
            place += 1
        axes.plot([], [], color=INK, label="plain decoding", **DASHED)
        _rows(axes, "tokens per second", ticks)
        axes.set_xlim(0, 1.9 * axes.get_xlim()[1])  # Labels stand to the right of the bars.
    return done[0]


def _rows(axes: Axes, label: str, ticks: dict[int, str]) -> None:
    """Set the names of horizontal bars, and the axes around them."""
    axes.set_yticks([*ticks], [_label(name, NAME) for name in ticks.values()])
    axes.set(xlabel=label, ylim=(max(ticks, default=0) + 0.6, -0.6))
    axes.grid(visible=False, axis="y")


def acceptance_by_position(drafts: Mapping[str, ByText]) -> str:
    """Draw the conditional acceptance at each drafted position of each draft, on new and on repeated text."""
    with _figure("plot-positions", "Acceptance by drafted position, on new and repeated text") as (axes, done):
        for index, (draft, kind) in enumerate((draft, kind) for draft, kinds in drafts.items() for kind in kinds):
            reached = [position for position in drafts[draft][kind] if position.drafted]
            places, rates = [position.position for position in reached], [position.rate for position in reached]
            label = f"{draft}, {kind} text" if kind else draft
            _measured(axes, index, label, places, rates, linestyle="--" if kind == SEEN else "-")
        axes.set(xlabel="drafted position", ylabel="acceptance", ylim=(0, 1))
        _whole_ticks(axes)
    return done[0]


def time_of_rounds(part: SpeedupPart) -> str:
    """Draw the milliseconds per token of a round, split into those of the target, of the draft, and the rest."""
    title = f"Milliseconds for each token in {engine_of(part)}, by what takes them"
    rows = [row for row in part.measurements if known(row.rounds.seconds / row.rounds.tokens)]
    with _figure("plot-rounds", title, 1.1 + 0.21 * len(rows)) as (axes, done):
        starts, figures = [0.0] * len(rows), [row.rounds for row in rows]
        seconds = {
            "target": [rounds.target_seconds for rounds in figures],
            "draft": [rounds.draft_seconds for rounds in figures],
            "the rest": [
                rounds.seconds if rounds.target_seconds is None else rounds.overhead_seconds for rounds in figures
            ],
        }
        for index, (label, spent) in enumerate(seconds.items()):
            taken = [1e3 * max(value or 0.0, 0.0) / rounds.tokens for value, rounds in zip(spent, figures, strict=True)]
            style: Any = {"color": COLOURS[index], "hatch": HATCHES[index], "alpha": 0.8, "label": label}
            axes.barh(range(len(rows)), taken, 0.72, starts, **style)
            starts = [start + more for start, more in zip(starts, taken, strict=True)]
        _rows(axes, "milliseconds for each token", {place: row.configuration for place, row in enumerate(rows)})
    return done[0]


def drafts(points: Sequence[tuple[str, float, Interval]], speed: Callable[[float, float], float], engine: str) -> str:
    """Draw the greedy acceptance of drafts against the cost of a step, over lines of equal tokens per second.

    `points` are names, costs of a step in plain steps, and acceptances. `speed` returns tokens per second for a cost
    and an acceptance. Raises DataError without points.
    """
    if not points:
        raise DataError(f"no draft was measured in {engine}", "distill train RUN")
    title = f"Acceptance by cost of a step in {engine}"
    with _figure(f"plot-drafts-{engine.replace(' ', '-')}", title, 3.4) as (axes, done):
        rates = [at / 40 for at in range(41)]
        costs = [1.2 * max(cost for _, cost, _ in points) * rate for rate in rates]
        lines = axes.contour(
            costs, rates, [[speed(cost, rate) for cost in costs] for rate in rates], 5, colors=COLOURS[5]
        )
        axes.clabel(lines, fmt=lambda level: f"{level:,.3g}" if level < 100 else f"{level:,.0f}")
        _measured(axes, 0, "drafts", *zip(*((cost, rate) for _, cost, rate in points), strict=True), linestyle="none")
        for name, cost, rate in points:
            axes.annotate(name, (cost, rate.mean), (4, 3), textcoords="offset points")
        axes.set(xlabel="cost of a draft step, D, in plain steps", ylabel="acceptance probability, greedy")
    return done[0]


def _measured(axes: Axes, index: int, label: str, x: Sequence[float], y: Sequence[Interval], **style: Any) -> None:
    """Draw the line number `index`, with intervals as bars."""
    below = [max(0.0, value.mean - value.low) if known(value.low) else 0.0 for value in y]
    above = [max(0.0, value.high - value.mean) if known(value.high) else 0.0 for value in y]
    means = [value.mean for value in y]
    look: Any = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)], **style}
    axes.errorbar(x, means, yerr=[below, above], label=_label(label), capsize=2.5, elinewidth=1, **look)


def _label(text: str, most: int = LONGEST) -> str:
    """Return a label of one line that fits the plot. matplotlib would hide it if it began with an underscore."""
    text = clean(text).replace("\n", " ").lstrip("_") or "unnamed"
    return text if len(text) <= most else text[: most - 1] + "…"


def _whole_ticks(axes: Axes) -> None:
    axes.locator_params("x", nbins=8, integer=True, min_n_ticks=1)


@contextmanager
def _figure(name: str, title: str, height: float = 2.7) -> Iterator[tuple[Axes, list[str]]]:
    """Yield axes to draw on, and a list, to which the finished SVG is added after the block.

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
        figure = Figure(figsize=(4.0, height), layout="constrained")
        axes = figure.add_subplot()
        yield axes, done
        handles, labels = axes.get_legend_handles_labels()
        if labels:
            longest = max(map(len, labels))
            columns = 1 if longest > 30 else 2 if longest > 17 else 3
            figure.legend(handles, labels, loc="outside lower center", ncols=min(columns, len(labels)))
        drawn = io.StringIO()
        no_metadata: Any = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(drawn, format="svg", transparent=True, metadata=no_metadata)
    done.append(_inline(drawn.getvalue(), name, title))


def _inline(drawn: str, name: str, title: str) -> str:
    """Return a matplotlib SVG file as an element of a page, with ids of its own and the page's colour and width."""
    svg = drawn[drawn.index("<svg") :].strip().replace(INK, "currentColor")
    # Ids and references get the name as their beginning. Labels stand between tags and stay as they are.
    reference = re.compile(r'(\bid="|href="#|url\(#)')
    svg = re.sub(r"<[^>]+>", lambda tag: reference.sub(rf"\g<1>{name}-", tag[0]), svg)
    opening = re.match(r"<svg[^>]*?(viewBox=\"[^\"]*\")[^>]*>", svg)
    assert opening is not None
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {opening[1]} '
        f'role="img" aria-label="{escape(clean(title))}">'
    )
    return head + svg[opening.end() :]
