"""Ctrl-C and SIGTERM while training: the current step is finished and saved, then the command ends."""

from __future__ import annotations

import contextlib
import signal
import threading
from types import FrameType
from typing import Any

from distill.interruption import deferred, end_at_once


class StopRequest:
    """Notes the first SIGINT or SIGTERM; a second one ends the program at once. A context manager."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._old: dict[int, Any] = {}
        self._deferred = contextlib.ExitStack()

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is not threading.main_thread():  # the caller stops this thread by other means
            return self
        self._deferred.enter_context(deferred())
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._old[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self._deferred.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            end_at_once(number)
        self.signal = number

    def leave(self) -> None:
        """End the command as the signal would have."""
        if self.signal == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
        raise KeyboardInterrupt
