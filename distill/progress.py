"""Progress of long work on stderr: a line that is rewritten on a terminal, else a new line from time to time."""

from __future__ import annotations

import sys
import time

from distill.console import is_quiet
from distill.interruption import check


def duration(seconds: float) -> str:
    """Seconds as 42s, 3m10s or 2h05m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    return f"{whole // 60}m{whole % 60:02d}s" if whole < 3600 else f"{whole // 3600}h{whole % 3600 // 60:02d}m"


class Progress:
    """Counts units of work, from `done` of `total` on, and reports them on stderr."""

    def __init__(self, title: str, total: int, done: int = 0, every_seconds: float = 10.0) -> None:
        self.title, self.total, self.done, self.first = title, total, done, done
        self.started = self.last = time.monotonic()
        self.terminal = sys.stderr.isatty()
        self.every = 0.2 if self.terminal else every_seconds

    def eta_seconds(self) -> float:
        """Seconds left at the pace so far."""
        made = self.done - self.first
        return (time.monotonic() - self.started) / made * (self.total - self.done) if made else 0.0

    def step(self, units: int = 1, note: str = "") -> None:
        """Count `units` more as done."""
        check()
        self.done += units
        moment = time.monotonic()
        if not is_quiet() and (moment - self.last >= self.every or self.done >= self.total):
            self.last = moment
            left = (
                f"{duration(self.eta_seconds())} left"
                if self.done < self.total
                else (f"in {duration(moment - self.started)}")
            )
            line = f"  {self.title} {self.done}/{self.total} {left} {note}".rstrip()
            if self.terminal:
                print(f"\r\x1b[K{line}", end="" if self.done < self.total else "\n", file=sys.stderr, flush=True)
            else:
                print(line, file=sys.stderr, flush=True)
