"""Ctrl-C and SIGTERM while training: the current step is finished and saved, then the command ends."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any


class StopRequest:
    """Notes the first SIGINT or SIGTERM; a second one ends the program at once. A context manager."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._old: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._old[number] = signal.signal(number, self._note)
            except ValueError:  # not in the main thread: the caller stops this thread by other means
                return self
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number

    def leave(self) -> None:
        """End the command as the signal would have."""
        if self.signal == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
        raise KeyboardInterrupt
