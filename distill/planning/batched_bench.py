"""Logs of llama.cpp's `llama-batched-bench --output-format jsonl`, and the llama.cpp settings that follow from them.

For targets that only llama.cpp runs: on NUMA machines, over RPC, partly offloaded. Legend: m parallel sequences of a
line ("pl"), which stand in for m tokens of one sequence.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distill.decoding.costs import CostCurve, StepCosts, predicted_speedups, tokens_per_round
from distill.engines.server_commands import N_MAX, P_MIN, SPEC_TYPE
from distill.errors import DataError
from distill.files import has_form, parse_object

NOTE = (
    "Imported from llama-batched-bench, which times m parallel sequences, each with a cache of its own. m tokens of "
    "one sequence share one cache and usually cost a little less, most of all at great depths."
)
COUNTS, TIMES = ("pp", "tg", "pl"), ("t_tg",)  # the fields of a line that are used
MAX_NUMBER = 2**31 - 1  # of every count and time
MAX_LENGTH = 32  # drafted tokens that are considered
MAX_LISTED = 64  # costs in GGML_BATCH_COSTS


def read_log(path: Path) -> list[dict[str, Any]]:
    """The measurements of a log, in order; lines that are not JSON objects (llama.cpp's own messages) are skipped.

    Raises DataError, with the line's number, for a broken or incomplete object and for a log without any.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", "give the file with the tool's output") from error
    rows = [_measurement(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line[:1] == b"{"]
    if not rows:
        raise DataError(f"{path} holds no measurement", "run llama-batched-bench with --output-format jsonl")
    return rows


def _measurement(line: bytes, where: str) -> dict[str, Any]:
    row = parse_object(line)
    if isinstance(row, str):
        raise DataError(f"{where}: {row}", "was the run cut short? remove the line or run it again")
    for name in (*COUNTS, *TIMES):
        if name not in row:
            raise DataError(f"{where} has no `{name}`", "is this the output of llama-batched-bench?")
        number = has_form(row[name], int if name in COUNTS else (int, float)) and not isinstance(row[name], bool)
        if not number or not (0 if name == "pp" else 1e-12) <= row[name] <= MAX_NUMBER:
            what = f"{where}: `{name}` is {row[name]!r:.60}, not a number above 0"
            raise DataError(what, "run the benchmark again, with -ntg and -npl of 1 or more")
    return row


def import_curve(path: Path, model: str = "llama-batched-bench") -> CostCurve:
    """The target's curve in units of T(1) from a log; depth is the mean length of each sequence while it was timed.

    T(m) is t_tg / tg of the line with pl = m, the median where a line repeats. Depths at which the log does not hold
    m = 1, 2, ... without a gap are cut at the gap (`note` says so). Raises DataError when no depth has m = 1 and 2.
    """
    rows: dict[int, dict[int, list[float]]] = {}
    for row in read_log(path):
        depth = row["pp"] + row["tg"] // 2
        rows.setdefault(depth, {}).setdefault(row["pl"], []).append(row["t_tg"] / row["tg"])
    depths, seconds, notes = [], [], [NOTE]
    for depth, seconds_by_m in sorted(rows.items()):
        steps = 0
        while steps + 1 in seconds_by_m:
            steps += 1
        if steps < 2:
            notes.append(f"Depth {depth} was left out: it lacks m = {1 if 1 not in seconds_by_m else 2}.")
            continue
        if max(seconds_by_m) > steps:
            notes.append(
                f"Depth {depth} ends at m = {steps}: m = {steps + 1} was not measured, and gaps are not filled."
            )
        single = statistics.median(seconds_by_m[1])
        depths.append(depth)
        seconds.append(tuple(statistics.median(seconds_by_m[m]) / single for m in range(1, steps + 1)))
    if not depths:
        what = f"{path}: no prompt length was measured with 1 and 2 parallel sequences"
        raise DataError(what, "use -npl 1,2,3,...,64 (every number)")
    return CostCurve(model, "llama-batched-bench", tuple(depths), tuple(seconds), 0, "T(1)", " ".join(notes))


def settings(curve: CostCurve, accepted: Sequence[float], draft: float, depth: int) -> list[str]:
    """llama.cpp settings from the target's curve, conditional acceptance by position and the draft's D(1).

    `draft` is in units of T(1). GGML_BATCH_COSTS are T(m) / (m·T(1)) as measured, not smoothed. llama.cpp builds with
    profile-guided lengths (pull request 17034) read the environment variables, every llama-server reads the flags: the
    fixed length of greatest predicted speed, and the probability below which a token costs more time than it saves.
    """
    costs = StepCosts(curve.at(depth), draft * curve.at(depth)[0], draft * curve.at(depth)[0])
    speeds = predicted_speedups(costs.target, costs.draft, accepted[:MAX_LENGTH])
    best = speeds.index(max(speeds))
    relative = [f"{value:.3f}".rstrip("0").rstrip(".") for value in curve.relative(depth)[:MAX_LISTED]]
    environment = [
        f"GGML_BATCH_COSTS={','.join(relative)}",
        f"GGML_MAX_LOOK_AHEAD={look_ahead(costs, speeds[best])}",
    ]
    if best == 0:
        # Not --spec-draft-n-max 0: llama-server drafts a token all the same, and aborts at the first request.
        return [*environment, f"{SPEC_TYPE} none"]
    floor = probability_floor(costs, accepted, best, speeds[best])
    return [*environment, f"{N_MAX} {best}", f"{P_MIN} {floor:.2f}"]


def look_ahead(costs: StepCosts, speed: float = 1.0) -> int:
    """How many tokens a draft must look ahead to see past the steps of the curve.

    Decoding at `speed` times plain decoding, k accepted tokens save k·T(1) / speed seconds and cost
    T(n + 1 + k) − T(n + 1) + k·D. Returns the smallest k that pays, the largest such k over all lengths n; lengths from
    which no k pays do not count. At least 1.
    """
    saved, longest = costs.target[0] / speed, len(costs.target) - 1

    def pays(n: int, k: int) -> bool:
        return k * saved > costs.target[n + k] - costs.target[n] + k * costs.draft

    looks = (next((k for k in range(1, longest - n + 1) if pays(n, k)), 1) for n in range(longest))
    return max(looks, default=1)


def probability_floor(costs: StepCosts, accepted: Sequence[float], length: int, speed: float) -> float:
    """The probability of acceptance at which verifying one more token pays for itself, within [0, 0.95].

    The draft step of a drafted token is spent already. Verifying it costs (T(n + 1) − T(1)) / n seconds, averaged over
    n = `length`; in that time decoding at `speed` makes speed / T(1) tokens a second. The token is worth its own
    probability times that of all tokens before it, for which the mean over the positions is used.
    """
    reached = tokens_per_round(accepted[: length - 1])  # the mean number of positions that are reached
    cost = speed * (costs.target[length] - costs.target[0]) / (length * costs.target[0])
    return min(max(cost * length / reached, 0.0), 0.95)
