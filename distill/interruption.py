"""Ctrl-C and SIGTERM outside training: the first ends the command in order, the second at once; none is lost.

Python calls a signal's handler between two steps of its interpreter, in whatever code runs then. Three places would
lose a Ctrl-C, and each is covered here: a `__del__` or a C library's callback, whose exceptions Python prints and drops
(the signal is sent again); a library's bare `except:` (`check` looks again where files are written and progress is
shown); a long call into C, which no handler interrupts (a thread ends the process where the main thread has not after
GRACE_SECONDS). Files are written under temporary names, so that an end at any moment leaves no half file.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACE_SECONDS = 10.0  # for closing models and removing temporary files
LAUNCHED_SECONDS = 1.0  # the same where a launcher ends several processes: they wait for each other inside C
AGAIN_SECONDS = 0.05  # until a signal that was lost is sent again
ANEW = "nothing was left half-written; start the same command again"
RESUMES = "the same command resumes"


class Interrupted(KeyboardInterrupt):
    """The first SIGINT or SIGTERM, in the main thread."""


@dataclass
class _State:
    number: int | None = None  # the first signal
    ending: str = ANEW  # how to go on
    again: bool = False  # the next signal is the first one, sent again
    echoes: int = 0  # signals sent again that the watching thread has not seen yet


_state = _State()


def signalled() -> int | None:
    """The signal that this command received first; None without one."""
    return _state.number


def resumes() -> None:
    """From here on, the same command resumes after an interruption: its work is in a run directory."""
    _state.ending = RESUMES


def farewell() -> str:
    """The line for a command that a signal ended: how to go on; empty in all but the first of several processes."""
    return f"\ndistill: interrupted; {_state.ending}\n" if os.environ.get("RANK", "0") == "0" else ""


def check() -> None:
    """Raise Interrupted where a signal came whose exception a library has dropped."""
    if _state.number is not None and threading.current_thread() is threading.main_thread():
        raise Interrupted


def end_at_once(number: int) -> None:
    """End the process now, with the exit status of the signal."""
    with contextlib.suppress(OSError):  # not print: its lock may be held by the code that was interrupted
        os.write(2, farewell().encode())
    os._exit(128 + number)


def _handle(number: int, frame: FrameType | None) -> None:
    if _state.number is not None and not _state.again:
        end_at_once(number)
    _state.again = False
    _state.number = _state.number or number
    raise Interrupted


def _send_again() -> None:
    if _state.number is not None:
        _state.again = True
        _state.echoes += 1
        if hasattr(signal, "pthread_kill"):
            signal.pthread_kill(threading.main_thread().ident or 0, _state.number)
        else:  # Windows, where Python's main thread calls the handler whichever thread raises the signal
            signal.raise_signal(_state.number)


def _watch(reader: int) -> None:
    """End the process at the second signal, or where the first has not ended it in time.

    A thread of its own: the main one may be inside a long call into C, where Python calls no handler.
    """
    timer: threading.Timer | None = None
    with open(reader, "rb", buffering=0) as signals:
        while byte := signals.read(1):
            number = byte[0]
            if number not in SIGNALS:
                continue
            if _state.echoes:
                _state.echoes -= 1
            elif timer is not None:
                end_at_once(number)
            else:
                grace = LAUNCHED_SECONDS if "WORLD_SIZE" in os.environ else GRACE_SECONDS
                timer = threading.Timer(grace, end_at_once, [number])
                timer.daemon = True
                timer.start()
    if timer is not None:
        timer.cancel()


@contextlib.contextmanager
def handled() -> Iterator[None]:
    """Within a `with` block of the main thread, SIGINT and SIGTERM raise Interrupted; a signal that is ignored stays
    so."""
    global _state
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _state = _State()
    reader, writer = os.pipe()
    if hasattr(signal, "pthread_kill"):  # Windows takes a pipe that blocks
        os.set_blocking(writer, False)
    hook = sys.unraisablehook

    def unraisable(dropped: Any) -> None:
        if isinstance(dropped.exc_value, Interrupted) or dropped.exc_type is Interrupted:
            timer = threading.Timer(AGAIN_SECONDS, _send_again)
            timer.daemon = True
            timer.start()
        else:
            hook(dropped)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    sys.unraisablehook = unraisable
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=[reader], daemon=True).start()
    for number in SIGNALS:
        if before[number] not in (signal.SIG_IGN, None):  # `nohup`, and `&` in a script, ignore SIGINT
            signal.signal(number, _handle)
    try:
        yield
    finally:
        for number in SIGNALS:
            if signal.getsignal(number) is _handle:
                signal.signal(number, before[number])
        signal.set_wakeup_fd(wakeup)
        sys.unraisablehook = hook
        os.close(writer)  # ends the thread
        _state = _State()


@contextlib.contextmanager
def noting(note: Callable[[int], object], said: str = "") -> Iterator[None]:
    """Within a `with` block of the main thread, the first SIGINT or SIGTERM is given to `note`, `said` is printed by
    the first of several processes, and the second ends the process at once; a signal that is ignored stays so."""
    if threading.current_thread() is not threading.main_thread():  # the caller stops this thread by other means
        yield
        return
    noted: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if noted:
            end_at_once(number)
        noted.append(number)
        note(number)
        if said and os.environ.get("RANK", "0") == "0":
            with contextlib.suppress(OSError):  # not print: see end_at_once
                os.write(2, f"\ndistill: {said}\n".encode())

    writer = signal.set_wakeup_fd(-1)  # the watching thread does not end the process
    before = {number: signal.signal(number, handle) for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if writer >= 0:
            signal.set_wakeup_fd(writer, warn_on_full_buffer=False)


def _in_child() -> None:
    """A forked child must not report its own signals to the parent's thread."""
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)


if hasattr(os, "register_at_fork"):  # Windows cannot fork
    os.register_at_fork(after_in_child=_in_child)
