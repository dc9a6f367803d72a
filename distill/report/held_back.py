"""What holds a pair's ways of decoding back, and what to do about it: from the seconds of their rounds, as measured.

Legend: τ tokens of a round; t, d and r what a round pays in the target, in the draft and beside both, in plain steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from distill.recipe.configuration import PLAIN
from distill.results.run_results import RunResults
from distill.results.speedup_results import Measurement, RoundFigures, SpeedupReport
from distill.tables import Row, Table

NOTE = (
    "What a round gives and costs, in plain steps; then the speedup of its rounds with one thing changed: every "
    "drafted token accepted, a draft at no cost, verification at the cost of a plain step, nothing spent beside the "
    "models."
)
PAYS = 1.02  # what would raise a speedup by less is no advice

# What might change, what it would mean, and how to go about it.
ADVICE = {
    "acceptance": (
        "with every drafted token accepted",
        "train longer, or on answers to prompts like those that are served",
    ),
    "draft": (
        "with a draft that costs nothing",
        "a smaller draft costs less: fewer layers, q8_0 instead of f16, or, in PyTorch only, a trimmed head; `distill "
        "plan` says which pays",
    ),
    "verification": (
        "if verifying cost no more than a plain step",
        "draft fewer tokens a round, or serve the target in a type or build whose steps over several tokens cost less "
        "(`distill profile`)",
    ),
    "rest": (
        "with nothing spent beside the models",
        "the models are too small for what surrounds them: a larger target, or more prompts at once",
    ),
}


@dataclass(frozen=True)
class Setting:
    """A way of decoding: its measurement, and its round in plain steps (t, d, r)."""

    measured: Measurement
    figures: RoundFigures
    target: float
    draft: float
    rest: float

    @property
    def without(self) -> dict[str, float]:
        """The speedup behind the prompt if one thing were free: everything accepted, a draft at no cost, verifying as
        cheap as a plain step, nothing spent beside the models."""
        tokens, most = self.figures.tokens, self.figures.most
        cost = self.target + self.draft + self.rest
        found = {} if most is None else {"acceptance": max(most, tokens) / cost}
        return found | {
            "draft": tokens / (cost - self.draft),
            "verification": tokens / (min(self.target, 1.0) + self.draft + self.rest),
            "rest": tokens / (cost - max(self.rest, 0.0)),
        }

    @property
    def changeable(self) -> dict[str, float]:
        """`without`, less the acceptance of tokens that are looked up: no training changes it."""
        looked_up = self.measured.drafter == "lookup"
        return {name: speed for name, speed in self.without.items() if not (looked_up and name == "acceptance")}

    @property
    def most(self) -> float:
        """The speedup behind the prompt that the best of these changes gives."""
        return max(self.changeable.values())

    @property
    def speedup(self) -> float:
        """Over plain decoding behind the prompt, τ ÷ (t + d + r)."""
        return self.figures.tokens / (self.target + self.draft + self.rest)


def settings(report: SpeedupReport) -> list[Setting]:
    """The fastest way and the fastest fixed length of each pair and backend, where the parts of a round were timed."""
    found = []
    for part in report.parts:
        rounds = {one.configuration: one for one in part.rounds}
        base = rounds.get(PLAIN.title)
        if base is None or not base.seconds:
            continue
        chosen = [one for one in (*report.best, *report.fastest) if one in part.measurements]
        for place, measured in enumerate(chosen):
            figures = rounds.get(measured.configuration)
            if measured in chosen[:place] or figures is None or figures.target_seconds is None:
                continue
            paid = (figures.target_seconds, figures.draft_seconds or 0.0, figures.overhead_seconds or 0.0)
            if sum(paid) > 0:  # texts of one token have no rounds
                found.append(Setting(measured, figures, *(seconds / base.seconds for seconds in paid)))
    return found


def table(report: SpeedupReport) -> Table | None:
    """What a round of each way costs and gives, and what it would give if one thing were free; None without figures."""
    found = settings(report)
    if not found:
        return None
    heads = ["pair", "backend", "way", "tokens of a round", "its steps: target", "draft", "the rest"]
    heads += ["speedup of rounds", "all accepted", "a free draft", "verifying in one step", "nothing else"]
    rows: list[Row] = [
        [
            *(setting.measured.pair, setting.measured.backend, setting.measured.configuration),
            *(setting.figures.tokens, setting.target, setting.draft, setting.rest, setting.speedup),
            *(setting.without.get(name) for name in ADVICE),
        ]
        for setting in found
    ]
    return Table(heads, rows, report.command, note=NOTE)


def advice(results: RunResults) -> list[str]:
    """For each pair and backend: what raises the speedup of its fastest way most, and how to go about it."""
    report = results.speedup
    assert report is not None
    best, found, sentences = report.best, settings(report), []
    for fastest in found:
        if fastest.measured not in best:
            continue
        place = f"{fastest.measured.pair}, {fastest.measured.backend}"
        group = [one for one in found if f"{one.measured.pair}, {one.measured.backend}" == place]
        # A way that hardly drafts has little to gain, whatever its pair has.
        setting = fastest if fastest.most >= 1 else max(group, key=lambda one: one.most)
        if setting.most < PAYS * setting.speedup:
            continue
        name = next(name for name, speed in setting.changeable.items() if speed == setting.most)
        free, todo = ADVICE[name]
        rounds = "its fastest way" if setting is fastest else f"`{setting.measured.configuration}`"
        if setting.most < 1:
            sentences.append(
                f"{place}: no change of one thing makes drafting pay. The most, {free}, would give "
                f"{setting.most:.2f}× instead of {setting.speedup:.2f}×. What to do: decode plainly there; `distill "
                "plan` says what another type, build or machine would have to cost."
            )
            continue
        sentences.append(
            f"{place}: {free}, the rounds of {rounds} would give {setting.most:.2f}× instead of "
            f"{setting.speedup:.2f}×. What to do: {todo}."
        )
    return sentences


def explain(results: RunResults) -> str:
    """The draft in one sentence: its size, what it was cut from, and for which target."""
    draft, donor, target = results.draft, results.donor, results.target
    sentence = f"A draft of {draft.parameters / 1e6:,.1f} million parameters"
    if donor is not None:
        same = donor.path == target.path
        kept = f"{draft.layers} of {donor.layers} layers" if draft.layers != donor.layers else "all layers"
        sentence += f", {kept} of {'the target' if same else donor.path},"
    return f"{sentence} for {target.path}."
