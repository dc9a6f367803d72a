"""The kept results of `distill serve-check`, and the comparison of a result with the last result on the same prompts.

Servers may lose acceptance between builds, and nobody notices.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from distill.errors import DataError
from distill.files import read_result, write_result
from distill.run import now
from distill.serving.results import Change, Counts, ServeReport, summed
from distill.tables import paired_ratio_interval

# What two results must have in common.
COMPARED = {
    "prompts": "prompts",
    "new_tokens": "numbers of new tokens",
    "n_max": "draft lengths",
    "sampler": "samplers",
}


@dataclass(frozen=True)
class KeptCheck:
    """One result: the server's counts after each prompt, and the settings of the measurement.

    `prompts` is the digest of the prompts' token ids. `served` are the server's flags. `speeds` are the tokens per
    second of the drafting server and of the plain server (None without one), one request at a time. `fell` says that
    acceptance had fallen, so that later results are not compared with this one.
    """

    time: str
    server: str
    build: str
    served: str
    prompts: str
    new_tokens: int
    n_max: int
    sampler: dict[str, Any]
    texts: list[Counts]
    speeds: tuple[float, float | None]
    fell: bool = False

    def is_like(self, other: KeptCheck) -> bool:
        """Whether another result has the same prompts, sampler and draft length, so that both can be compared."""
        return not self.unlike(other)

    def unlike(self, other: KeptCheck) -> list[str]:
        """Return what differs from another result, so that both cannot be compared."""
        return [what for name, what in COMPARED.items() if getattr(self, name) != getattr(other, name)]


@dataclass(frozen=True)
class History:
    """The results in the order of their times."""

    checks: list[KeptCheck] = field(default_factory=list)
    version: Literal[1] = 1


def read_history(path: Path) -> History:
    """Read the kept results of a file. A missing file has none."""
    if not path.exists():
        return History()
    try:
        return read_result(path, History)
    except DataError as error:
        raise DataError(error.what, "move the file away: the next check begins a new one") from error


def digest_of(prompts: Sequence[Sequence[int]]) -> str:
    """Return a digest of the prompts' token ids, in their order."""
    return hashlib.sha256(json.dumps([[*ids] for ids in prompts]).encode()).hexdigest()[:16]


def kept(report: ServeReport) -> KeptCheck:
    """Return the part of a report that is kept."""
    alone = [speed.tokens_per_second for speed in report.speeds if speed.concurrency == 1]
    plain = alone[0] if len(alone) > 1 else None  # The plain server comes first.
    return KeptCheck(
        time=now(),
        server=report.server,
        build=report.build,
        served=report.served,
        prompts=report.digest,
        new_tokens=report.new_tokens,
        n_max=report.n_max,
        sampler=report.sampler,
        texts=report.by_prompt,
        speeds=(alone[-1], plain),
        fell=report.change is not None and report.change.fell,
    )


def compared(report: ServeReport, history: History) -> ServeReport:
    """Return the report with the change since the last comparable result that had not fallen, if there is one."""
    latest = kept(report)
    last = next((check for check in reversed(history.checks) if check.is_like(latest) and not check.fell), None)
    if last is None:
        return report
    checks = (last, latest)
    sides = [([text.accepted for text in check.texts], [text.drafted for text in check.texts]) for check in checks]
    before, after = (summed(check.texts) for check in checks)
    change = Change(
        time=last.time,
        build=last.build,
        served=last.served,
        before=before.accepted / before.drafted,
        after=after.accepted / after.drafted,
        rise=paired_ratio_interval(*sides[0], *sides[1]),
        tokens_per_second=(last.speeds[0], latest.speeds[0]),
    )
    return replace(report, change=change)


def not_compared(report: ServeReport, history: History) -> str | None:
    """Return what the last result had otherwise, if there are results and none is comparable."""
    if not history.checks:
        return None
    latest = kept(report)
    comparable = any(check.is_like(latest) for check in history.checks)
    return None if comparable else " and ".join(history.checks[-1].unlike(latest))


def keep(path: Path, history: History, report: ServeReport) -> None:
    """Add a result to the kept results in a file."""
    write_result(path, replace(history, checks=[*history.checks, kept(report)]))
