"""Lines on stderr, depending on `--quiet` and `--verbose`, and the progress of long work.

`--quiet` hides progress, but never warnings and errors.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

# ── Ctrl-C and SIGTERM: the first signal ends the command in order, the second ends the process at once ──
# Files are written under temporary names, so that no signal, not even SIGKILL, leaves half a file.

SIGNALS = (signal.SIGINT, signal.SIGTERM)
START_AGAIN = "nothing was left half-written; start the same command again"
RESUMES = "the same command resumes"
_first: list[int] = []  # the first signal that this command received
_ending = START_AGAIN  # how the user can continue


class Interrupted(KeyboardInterrupt):
    """The first SIGINT or SIGTERM, in the main thread."""


def signalled() -> int | None:
    """Return the first signal that this command received, or None."""
    return _first[0] if _first else None


def resumes() -> None:
    """Say from now on that the same command resumes after an interruption, because its work is in a run directory."""
    global _ending
    _ending = RESUMES


def farewell() -> str:
    """Return the line for a command that a signal ended. Empty in all but the first of several processes."""
    return f"\ndistill: interrupted; {_ending}\n" if os.environ.get("RANK", "0") == "0" else ""


def check() -> None:
    """Raise Interrupted if a signal came and a library swallowed its exception."""
    if _first and threading.current_thread() is threading.main_thread():
        raise Interrupted


@contextlib.contextmanager
def noting(note: Callable[[int], object], message: str = "") -> Iterator[None]:
    """Within the context, pass the first SIGINT or SIGTERM to `note`. The second one ends the process.

    The first of several processes prints `message`. Ignored signals stay ignored. Only the main thread handles signals.
    """
    if threading.current_thread() is not threading.main_thread():  # The caller stops this thread by other means.
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        for handled_signal in before:
            signal.signal(handled_signal, signal.SIG_DFL)
        if message and os.environ.get("RANK", "0") == "0":
            with contextlib.suppress(OSError):  # print takes a lock, which the interrupted code may hold.
                os.write(2, f"\ndistill: {message}\n".encode())
        note(number)

    before = {number: signal.signal(number, handle) for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def handled() -> Iterator[None]:
    """Within the context, the first SIGINT or SIGTERM raises Interrupted in the main thread."""
    global _ending
    _first.clear()
    _ending = START_AGAIN

    def interrupt(number: int) -> None:
        _first.append(number)
        raise Interrupted

    with noting(interrupt):
        yield


# ── Lines on stderr, and the progress of long work ──

EVERY = 60.0  # seconds between two lines of progress that is not on a terminal
BRIEF = 10.0  # A `brief` loop that ends within these seconds shows nothing.
ERASE = "\r\x1b[K"  # erases a terminal's line


@dataclass
class _Console:
    quiet: bool = False
    verbose: bool = False
    announced: set[Path] = field(default_factory=set)
    stages: bool = False  # a terminal shows one line for each stage
    passing: bool = False  # The terminal's last line is replaced by the next one.
    last: float = 0.0  # time of the last line of progress that was not on a terminal


_console = _Console()


def set_console(quiet: bool, verbose: bool) -> None:
    """Choose what goes to stderr: no progress (`quiet`), or also the log lines of libraries (`verbose`)."""
    global _console
    _console = _Console(quiet, verbose)


def is_verbose() -> bool:
    """Whether the libraries' log lines, and the traceback of a bug, go to stderr."""
    return _console.verbose


def command_line(argv: Sequence[str]) -> str:
    """Return a command as a shell takes it, from its arguments. The first argument is the program's name."""
    return shlex.join(["distill", *argv[1:]])


def note(line: str) -> None:
    """Print a line of progress to stderr, unless --quiet was given."""
    if not _console.quiet:
        warn(line)


def warn(line: str) -> None:
    """Print a warning to stderr."""
    print(f"{ERASE if _console.passing else ''}{line}", file=sys.stderr, flush=True)
    _console.passing = False


def show_passing(line: str) -> None:
    """Show a line on the terminal until the next line replaces it."""
    print(f"{ERASE}{line}", end="", file=sys.stderr, flush=True)
    _console.passing = True


@contextlib.contextmanager
def one_line_per_stage() -> Iterator[None]:
    """Within the block, a terminal shows one line for each stage, unless --quiet or --verbose was given."""
    _console.stages = sys.stderr.isatty() and not (_console.quiet or _console.verbose)
    try:
        yield
    finally:
        if _console.passing:
            show_passing("")
        _console.stages = _console.passing = False


def shows_stages() -> bool:
    """Whether the terminal shows one line for each stage, and no others."""
    return _console.stages


warn_once = functools.cache(warn)  # once in each process
note_once = functools.cache(note)


class Caution(str):
    """A line of a check that the user should see even if the check passed."""


def announce(place: Path) -> None:
    """Say once for each place where the command will write."""
    if place not in _console.announced:
        _console.announced.add(place)
        note(f"writing to {place}")


def duration(seconds: float) -> str:
    """Return seconds as 42s, 3m10s or 2h05m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    return f"{whole // 60}m{whole % 60:02d}s" if whole < 3600 else f"{whole // 3600}h{whole % 3600 // 60:02d}m"


_watched: list[list[Progress]] = []


@contextlib.contextmanager
def watched() -> Iterator[list[Progress]]:
    """Collect the loops that begin within the context, so that their seconds can be told from the rest of a stage."""
    _watched.append([])
    try:
        yield _watched[-1]
    finally:
        _watched.pop()


class Progress:
    """Counts units of work, from `done` to `total`, and reports them on stderr.

    A terminal shows one line that is rewritten. Otherwise all loops together print at most one line per minute.

    `together` units are worked on at once. A `brief` loop is part of a longer one. It is not `watched`, and it shows
    nothing during its first `BRIEF` seconds.
    """

    def __init__(self, title: str, total: int, done: int = 0, together: int = 1, brief: bool = False) -> None:
        self.title, self.total, self.done, self.first, self.together = title, total, done, done, together
        self.started = self.last = self.stepped = time.monotonic()
        self.terminal, self.waits = sys.stderr.isatty(), brief
        if _watched and not brief:
            _watched[-1].append(self)

    @property
    def seconds(self) -> float:
        """Seconds from the start to the last unit."""
        return self.stepped - self.started

    def eta_seconds(self) -> float:
        """Return the seconds left at the pace so far. Each unit that is being worked on counts as half done."""
        left = self.total - self.done
        begun = min(self.together - 1, left) / 2
        made = self.done - self.first + begun
        return (time.monotonic() - self.started) / made * (left - begun) if made else 0.0

    def step(self, units: int = 1, note: str = "") -> None:
        """Count `units` more as done."""
        check()
        self.done += units
        self.stepped = moment = time.monotonic()
        over = self.done >= self.total
        self.waits = self.waits and moment - self.started < BRIEF
        every, last = (0.2, self.last) if self.terminal else (EVERY, max(self.last, _console.last))
        if _console.quiet or self.waits or (moment - last < every and not (over and self.terminal)):
            return
        self.last = moment
        left = f"in {duration(moment - self.started)}" if over else f"{duration(self.eta_seconds())} left"
        line = f"  {self.title} {self.done}/{self.total} {left} {note}".rstrip()
        if self.terminal and (not over or _console.stages):
            show_passing(line)
        else:
            _console.last = moment
            warn(line)
