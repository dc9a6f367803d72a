"""The results of `distill serve-check` that are kept, and the comparison of a result with the last one on the same
prompts: servers lose acceptance between builds, and nobody notices."""

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


@dataclass(frozen=True)
class KeptCheck:
    """One result: the server's own counts behind each prompt, and what they were measured with.

    `prompts` is the digest of the prompts' token ids. `served` are the server's flags. `speeds` are tokens per second
    of the server that drafts and of the plain one (None where there was none), one request at a time.
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

    def is_like(self, other: KeptCheck) -> bool:
        """Whether another result is of the same prompts, sampler and draft length, so that the two can be compared."""
        names = ("prompts", "new_tokens", "n_max", "sampler")
        return all(getattr(self, name) == getattr(other, name) for name in names)


@dataclass(frozen=True)
class History:
    """The results in the order of their times."""

    checks: list[KeptCheck] = field(default_factory=list)
    version: Literal[1] = 1


def read_history(path: Path) -> History:
    """Read the results that are kept in a file; none where there is no file."""
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
    """Return what is kept of a report."""
    alone = [one.tokens_per_second for one in report.speeds if one.concurrency == 1]
    plain = alone[0] if len(alone) > 1 else None  # which comes first
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
    )


def compared(report: ServeReport, history: History) -> ServeReport:
    """Return the report with the change since the last result that it can be compared with, if there is one."""
    found = kept(report)
    last = next((one for one in reversed(history.checks) if one.is_like(found)), None)
    if last is None:
        return report
    sides = [([text.accepted for text in one.texts], [text.drafted for text in one.texts]) for one in (last, found)]
    before, after = (summed(one.texts) for one in (last, found))
    change = Change(
        time=last.time,
        build=last.build,
        served=last.served,
        before=before.accepted / before.drafted,
        after=after.accepted / after.drafted,
        rise=paired_ratio_interval(*sides[0], *sides[1]),
        tokens_per_second=(last.speeds[0], found.speeds[0]),
    )
    return replace(report, change=change)


def keep(path: Path, history: History, report: ServeReport) -> None:
    """Add a result to those that are kept in a file."""
    write_result(path, replace(history, checks=[*history.checks, kept(report)]))
