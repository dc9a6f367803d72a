"""Ctrl-C and SIGTERM: the first ends the command in order, the second ends the process at once.

Files are written under temporary names, so an end at any moment, also by SIGKILL, leaves no half file.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ANEW = "nothing was left half-written; start the same command again"
RESUMES = "the same command resumes"
_first: list[int] = []  # the signal that this command received first
_ending = ANEW  # how to go on


class Interrupted(KeyboardInterrupt):
    """The first SIGINT or SIGTERM, in the main thread."""


def signalled() -> int | None:
    """The signal that this command received first; None without one."""
    return _first[0] if _first else None


def resumes() -> None:
    """From here on, the same command resumes after an interruption: its work is in a run directory."""
    global _ending
    _ending = RESUMES


def farewell() -> str:
    """The line for a command that a signal ended: how to go on; empty in all but the first of several processes."""
    return f"\ndistill: interrupted; {_ending}\n" if os.environ.get("RANK", "0") == "0" else ""


def check() -> None:
    """Raise Interrupted where a signal came whose exception a library has dropped."""
    if _first and threading.current_thread() is threading.main_thread():
        raise Interrupted


@contextlib.contextmanager
def noting(note: Callable[[int], object], said: str = "") -> Iterator[None]:
    """Within a `with` block of the main thread, the first SIGINT or SIGTERM is given to `note`, `said` is printed by
    the first of several processes, and the second ends the process; a signal that is ignored stays so."""
    if threading.current_thread() is not threading.main_thread():  # the caller stops this thread by other means
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        for one in before:
            signal.signal(one, signal.SIG_DFL)
        if said and os.environ.get("RANK", "0") == "0":
            with contextlib.suppress(OSError):  # not print: its lock may be held by the code that was interrupted
                os.write(2, f"\ndistill: {said}\n".encode())
        note(number)

    before = {number: signal.signal(number, handle) for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def handled() -> Iterator[None]:
    """Within a `with` block of the main thread, the first SIGINT or SIGTERM raises Interrupted."""
    global _ending
    _first.clear()
    _ending = ANEW

    def interrupt(number: int) -> None:
        _first.append(number)
        raise Interrupted

    with noting(interrupt):
        yield
