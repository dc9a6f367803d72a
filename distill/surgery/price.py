"""The price of a cut: its acceptance after a short heal, and the cost of its steps on this machine.

A round drafts γ tokens and verifies them in one step of γ + 1. With acceptance α at every position it gives
1 + α + … + α^γ tokens in T(γ + 1) + γ·D seconds (Leviathan et al. 2023, eq. 1, with measured times): the best γ gives
the cut's tokens per second, and the cut with the most is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distill.results.cut_results import Priced, SearchReport
from distill.speculative.costs.curve import predicted_speedups


def price(
    name: str,
    settings: dict[str, Any],
    parameters: int,
    kl: float | None,
    acceptance: float,
    target_seconds: Sequence[float],
    draft_seconds: float,
) -> Priced:
    """The predicted speed of one cut, with the figures it follows from; `target_seconds` are T(1) to T(γ + 1)."""
    single, longest = target_seconds[0], len(target_seconds) - 1
    speedups = predicted_speedups(target_seconds, draft_seconds, [acceptance] * longest)
    speedup, drafting = max(speedups), max(speedups[1:])
    length = speedups.index(speedup)
    figures = (length, speedup / single, speedup, drafting / single)
    return Priced(name, settings, parameters, kl, acceptance, draft_seconds, *figures)


def pareto(points: Sequence[Priced]) -> list[Priced]:
    """The cuts that no other beats in both step cost and acceptance, cheapest first."""
    front: list[Priced] = []
    for point in sorted(points, key=lambda p: (p.draft_seconds, -p.acceptance)):
        if not front or point.acceptance > front[-1].acceptance:
            front.append(point)
    return front


def explain(points: Sequence[Priced], chosen: Priced, single: float) -> list[str]:
    """The reasons for `chosen`, in sentences with measured numbers or numbers computed from them; `single` is T(1)."""
    front = pareto(points)
    sentences = [
        f"{chosen.name}: acceptance {chosen.acceptance:.3f} after the heal, a step costs "
        f"{chosen.draft_seconds / single:.3f} of the target's; with {chosen.length} drafted a round that predicts "
        f"{chosen.tokens_per_second:.1f} tokens/s, {chosen.speedup:.2f}x plain decoding."
    ]
    if chosen.length == 0:
        sentences.append(
            "No cut tried pays on this machine: plain decoding is faster. The one that loses least when it drafts is "
            f"taken: {chosen.drafting * single:.2f}x."
        )
    place = front.index(chosen) if chosen in front else len(front)
    if 0 < place < len(front):
        other = front[place - 1]
        sentences.append(
            f"The next cheaper one worth having, {other.name}, costs {other.draft_seconds / chosen.draft_seconds:.2f} "
            f"times as much a step but is accepted {other.acceptance:.3f} of the time: {other.speedup:.2f}x."
        )
    for other in front[place + 1 : place + 2]:
        sentences.append(
            f"The next better one, {other.name}, is accepted {other.acceptance:.3f} of the time but costs "
            f"{other.draft_seconds / chosen.draft_seconds:.2f} times as much a step: {other.speedup:.2f}x."
        )
    return sentences


def as_markdown(report: SearchReport) -> str:
    """The table of search.md, the best first; `front` marks cuts that no other beats in both cost and acceptance."""
    lines = [
        f"Acceptance on the validation split after {report.heal_steps} healing steps; step costs measured, "
        f"{report.backend}; tokens/s predicted from both.",
        "",
        "| cut | parameters | KL, nats | acceptance | step, ms | D/T(1) | best γ | tokens/s | speedup | |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for point in sorted(report.points, key=lambda point: -point.tokens_per_second):
        marks = ["chosen"] * (point.name == report.chosen) + ["front"] * (point.name in report.front)
        kl = "" if point.kl is None else f"{point.kl:.3f}"
        lines.append(
            f"| {point.name} | {point.parameters / 1e6:.2f}M | {kl} | {point.acceptance:.3f} "
            f"| {point.draft_seconds * 1e3:.2f} | {point.draft_seconds / report.target_seconds[0]:.3f} "
            f"| {point.length} | {point.tokens_per_second:.1f} | {point.speedup:.2f} | {', '.join(marks)} |"
        )
    lines += ["", *[f"- {sentence}" for sentence in report.explanations], "", f"`{report.command}`"]
    return "\n".join(lines) + "\n"
