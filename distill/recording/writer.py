"""The process that writes what is recorded: reads exchanges from its stdin, redacts them, and writes and rotates files.

A process, not a thread: JSON and regular expressions hold Python's lock, one bad pattern for minutes, and no reply may
wait for them. Nothing is on the disk that has not been redacted. Its stdout has the counts after each exchange, as a
line of JSON; it ends with its stdin.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import pickle
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from distill.faults import explain_write_fault
from distill.progress import warn
from distill.recording.exchanges import read_exchange, redacted

TAKEN, KEPT, BYTES, FILES, DELETED = "exchanges", "kept", "bytes", "files", "deleted files"
FAILED = "a failed write"
BINARY = getattr(os, "O_BINARY", 0)  # on Windows, or each newline becomes two characters


class Writer:
    """Files `traffic-TIME.jsonl` in a folder, mode 0600: at most `rotate_bytes` each, the newest `keep` of them.

    Names grow with time and are never used twice, so that a reader knows a file again. Files hold whole lines: what a
    failed write left of one is taken back. `counts` has what was kept, and what was left out by reason.
    """

    def __init__(self, folder: Path, rotate_bytes: int, keep: int, patterns: Sequence[str]) -> None:
        self.folder, self.rotate_bytes, self.keep = folder, rotate_bytes, keep
        self.patterns = [re.compile(pattern) for pattern in patterns]
        self.counts: Counter[str] = Counter()
        self._file: int | None = None
        self._path = folder
        self._size = 0

    def take(self, kind: str, request: bytes, reply: bytes) -> None:
        """Write the answers of one exchange (see read_exchange). A fault of the disk is said once, and counted."""
        self.counts[TAKEN] += 1
        try:
            found = [redacted(one, self.patterns) for one in read_exchange(kind, request, reply)]
            lines = [one if isinstance(one, str) else json.dumps(one, ensure_ascii=False).encode() for one in found]
        except Exception as error:  # a body that is nested too deeply, say, must not end the process
            lines = [f"a fault in distill ({type(error).__name__})"]
        for line in lines:
            if isinstance(line, str):
                self.counts[line] += 1
                continue
            try:
                self._write(line + b"\n")
            except OSError as error:
                if not self.counts[FAILED]:
                    fault = explain_write_fault(self._path, error).what
                    warn(f"distill record: {fault}; replies go on, and what cannot be written is left out")
                self.counts[FAILED] += 1

    def _write(self, line: bytes) -> None:
        if self._file is None or (self._size and self._size + len(line) > self.rotate_bytes):
            self._rotate()
        assert self._file is not None
        try:
            if os.write(self._file, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            try:
                os.ftruncate(self._file, self._size)
            except OSError:
                self.close()  # the half line stays the last of its file, where readers leave it out
            raise
        self._size += len(line)
        self.counts.update({KEPT: 1, BYTES: len(line)})

    def _rotate(self) -> None:
        self.close()
        moment = datetime.datetime.now(datetime.UTC)
        self._path = self.folder / f"traffic-{moment:%Y%m%dT%H%M%S.%f}Z.jsonl"
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | BINARY, 0o600)
        self._size = 0
        self.counts[FILES] += 1
        for old in sorted(self.folder.glob("traffic-*.jsonl"))[: -self.keep]:
            old.unlink(missing_ok=True)
            self.counts[DELETED] += 1

    def close(self) -> None:
        """End the file; the next line begins another."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
        self._file = None


def read_exchanges(source: BinaryIO) -> Iterator[tuple[str, bytes, bytes]]:
    """Kind, request and reply of each exchange that the proxy has pickled; a last one that is not whole is left out."""
    with contextlib.suppress(EOFError, pickle.UnpicklingError):
        while True:
            yield pickle.load(source)


def main() -> None:
    """Write the exchanges that stdin brings, behind a line of JSON with the arguments of Writer."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to all of a group: the proxy ends this process, by its stdin
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):  # Windows has no such call
        os.nice(5)  # the server comes first
    settings = json.loads(sys.stdin.buffer.readline())
    writer = Writer(Path(settings.pop("folder")), **settings)
    for exchange in read_exchanges(sys.stdin.buffer):
        writer.take(*exchange)
        print(json.dumps(writer.counts), flush=True)
    writer.close()
