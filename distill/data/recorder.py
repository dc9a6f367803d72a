"""`distill record`: a proxy that passes bytes on, and gives copies of the exchanges to the process that writes them.

Each piece is passed on as it came, and only then parsed. Nothing here can change a reply, or delay it for longer than
parsing one piece takes.
"""

from __future__ import annotations

import asyncio
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from distill.data.exchanges import UNREAD, Exchange, Watcher, read_exchange, redacted
from distill.errors import RecipeError, explain_write_fault
from distill.files import is_utf8
from distill.progress import note, noting, warn

# ── The process that redacts exchanges and writes them ──
# A process, not a thread: JSON and regular expressions hold Python's lock, one bad pattern for minutes, and no
# reply may wait for them. Nothing is on the disk that has not been redacted. Its stdout has the counts after each
# exchange, as a line of JSON; it ends with its stdin.

TAKEN, KEPT, BYTES, FILES = "exchanges", "kept", "bytes", "files"
FAILED = "a failed write"
MOST_REASONS, OTHER = 100, "other reasons"  # that are counted by name: hostile requests have new fields each
FILE_BYTES = 64_000_000  # of a full file
BINARY = getattr(os, "O_BINARY", 0)  # on Windows, or each newline becomes two characters


class Writer:
    """Files `traffic-TIME.jsonl` in a folder, mode 0600, of at most FILE_BYTES; none is ever deleted.

    Names grow with time and are never used twice, so that a reader knows a file again. Files hold whole lines: what a
    failed write left of one is taken back. `counts` has what was kept, and what was left out by reason.
    """

    def __init__(self, folder: Path, patterns: Sequence[str]) -> None:
        self.folder = folder
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
            lines = [one if isinstance(one, str) else _encoded(one) for one in found]
        except Exception as error:  # a body that is nested too deeply, say, must not end the process
            lines = [f"a fault in distill ({type(error).__name__})"]
        for line in lines:
            if isinstance(line, str):
                self.counts[line if line in self.counts or len(self.counts) < MOST_REASONS else OTHER] += 1
                continue
            try:
                self._write(line + b"\n")
            except OSError as error:
                if not self.counts[FAILED]:
                    fault = explain_write_fault(self._path, error).what
                    warn(f"distill record: {fault}; replies go on, and what cannot be written is left out")
                self.counts[FAILED] += 1

    def _write(self, line: bytes) -> None:
        if self._file is None or (self._size and self._size + len(line) > FILE_BYTES):
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

    def close(self) -> None:
        """End the file; the next line begins another."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
        self._file = None


def _encoded(line: dict[str, Any]) -> bytes | str:
    """A line as it is written, or the reason why it cannot be."""
    text = json.dumps(line, ensure_ascii=False)
    return text.encode() if is_utf8(text) else "half of a character (a lone surrogate)"


def read_exchanges(source: BinaryIO) -> Iterator[tuple[str, bytes, bytes]]:
    """Kind, request and reply of each exchange that the proxy has pickled; a last one that is not whole is left out."""
    with contextlib.suppress(EOFError, pickle.UnpicklingError):
        while True:
            yield pickle.load(source)


def main() -> None:
    """Write the exchanges that stdin brings, behind a line of JSON with the folder and the patterns."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to all of a group: the proxy ends this process, by its stdin
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):  # Windows has no such call
        os.nice(5)  # the server comes first
    folder, patterns = json.loads(sys.stdin.buffer.readline())
    writer = Writer(Path(folder), patterns)
    for exchange in read_exchanges(sys.stdin.buffer):
        writer.take(*exchange)
        print(json.dumps(writer.counts), flush=True)
    writer.close()


# ── The proxy ──

MODULE = "distill.data.recorder"
PIECE_BYTES = 2**16
QUEUE_BYTES = 64 * 2**20  # of exchanges that wait to be written
PARTING_SECONDS = 10.0  # for replies under way when the command ends, and for what waits to be written
PROGRESS_SECONDS = 10.0
MAX_OPEN_FILES = 65_536
UNREACHED, ENDED, LATE = "the server cannot be reached", "no process that writes", "too late to be written"
NOT_LEFT_OUT = (TAKEN, KEPT, BYTES, FILES)


@dataclass(frozen=True)
class Recording:
    """What `record` does: where it listens, where it passes requests on, and what it writes where.

    `patterns` are regular expressions, whose matches are redacted; `sample` is the share of exchanges that are kept.
    """

    upstream: tuple[str, int]
    listen: tuple[str, int]
    folder: Path
    patterns: tuple[str, ...] = ()
    sample: float = 1.0


class Proxy:
    """Connections to one server, and the process that writes their exchanges; `counts` has what became of them."""

    def __init__(self, settings: Recording, queue_bytes: int = QUEUE_BYTES) -> None:
        self.settings, self.queue_bytes = settings, queue_bytes
        self._own: Counter[str] = Counter()
        self._written: Counter[str] = Counter()
        self._handed = 0
        self._open: dict[asyncio.Task[None], Watcher] = {}

    @property
    def counts(self) -> Counter[str]:
        """Answers, bytes and files written, and the number of exchanges or answers left out for each reason."""
        return self._own + self._written

    async def run(self, stop: asyncio.Event, ready: Callable[[int], None]) -> None:
        """Serve until `stop` is set, then let replies under way come to their end; `ready` is told the port.

        Raises RecipeError for an address that cannot be listened at.
        """
        try:
            server = await asyncio.start_server(self._connect, *self.settings.listen, backlog=1024, start_serving=False)
        except OSError as error:
            address = "{}:{}".format(*self.settings.listen)
            raise RecipeError(f"{address} cannot be listened at: {error.strerror}") from error
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", f"import sys; sys.path[:] = {sys.path}; from {MODULE} import main; main()"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the proxy alone
        )
        self._queue = self._process.stdin
        assert self._queue is not None
        self._queue.write(json.dumps([str(self.settings.folder), self.settings.patterns]).encode() + b"\n")
        told = [asyncio.create_task(self._read_counts()), asyncio.create_task(self._show())]
        await server.start_serving()
        ready(server.sockets[0].getsockname()[1])
        await stop.wait()
        server.close()
        await self._part()
        self._queue.close()
        try:
            await asyncio.wait_for(asyncio.gather(told[0], self._process.wait()), PARTING_SECONDS)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        if lost := self._handed - self._written[TAKEN]:
            warn(f"distill record: {lost} exchanges are lost: does a pattern of --redact, or the disk, take too long?")
            self._own[LATE] = lost
        told[1].cancel()

    async def _part(self) -> None:
        """End connections, those with a reply under way when it has ended or PARTING_SECONDS have passed."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PARTING_SECONDS
        busy = sum(watcher.busy for watcher in self._open.values())
        if busy:
            note(f"replies under way: {busy}; another signal ends them")
        told: set[asyncio.Task[None]] = set()
        while self._open:
            for task, watcher in self._open.items():
                if loop.time() > deadline or not (watcher.busy or task in told):
                    told.add(task)
                    task.cancel()
            await asyncio.sleep(0.02)

    async def _connect(self, client_in: asyncio.StreamReader, client_out: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = watcher = Watcher(self._take, self._leave_out, self.settings.sample)
        try:
            try:
                server_in, server_out = await asyncio.open_connection(*self.settings.upstream)
            except OSError as error:
                await self._refuse(client_in, client_out, error)
                return
            there = asyncio.create_task(_pass(client_in, server_out, watcher.sent))
            try:
                await _pass(server_in, client_out, watcher.replied)
            finally:  # the server has ended the connection, or the client is gone, and the server is to stop
                there.cancel()
                server_out.transport.abort()
        except asyncio.CancelledError:
            pass  # by _part
        finally:
            watcher.close()
            client_out.close()
            with contextlib.suppress(OSError, asyncio.CancelledError):  # until the client has all of it
                await client_out.wait_closed()
            del self._open[task]

    async def _refuse(self, client_in: asyncio.StreamReader, client_out: asyncio.StreamWriter, error: OSError) -> None:
        """Reply with status 502 to a request for a server that cannot be reached."""
        fault = "distill record cannot reach http://{}:{}".format(*self.settings.upstream)
        if not self._own[UNREACHED]:
            warn(f"{fault}: {os.strerror(error.errno) if error.errno and error.errno > 0 else error}")
        self._leave_out(UNREACHED)
        body = json.dumps({"error": {"message": fault, "type": "upstream_unreachable", "code": 502}}).encode()
        head = f"HTTP/1.1 502 Bad Gateway\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(PARTING_SECONDS):
                if await client_in.read(PIECE_BYTES):
                    client_out.write(head.encode() + b"connection: close\r\n\r\n" + body)
                    client_out.write_eof()
                    while await client_in.read(PIECE_BYTES):  # closed with unread bytes, the reply would be lost
                        pass

    def _leave_out(self, reason: str) -> None:
        self._own[reason] += 1

    def _take(self, exchange: Exchange) -> None:
        """Hand an exchange to the process that writes, unless too many bytes wait there already."""
        assert self._queue is not None
        if self._queue.transport.is_closing():
            if not self._own[ENDED]:
                warn("distill record: the process that writes has ended; replies go on, nothing more is recorded")
            self._leave_out(ENDED)
            return
        piece = pickle.dumps((exchange.kind, bytes(exchange.request), bytes(exchange.reply)))
        if self._queue.transport.get_write_buffer_size() + len(piece) > self.queue_bytes:
            self._leave_out("a full queue")
        else:
            self._queue.write(piece)
            self._handed += 1

    async def _read_counts(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self._written = Counter(json.loads(line))

    async def _show(self) -> None:
        shown = self.counts
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            if shown != self.counts:
                shown = self.counts
                await asyncio.to_thread(note, f"so far: {summary(shown)}")  # nobody may be reading stderr


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, look: Callable[[bytes], None]) -> None:
    """Send on what comes, and the end; where either side is gone, the other one gets to know."""
    try:
        while data := await reader.read(PIECE_BYTES):
            writer.write(data)
            look(data)
            await writer.drain()
        look(b"")
        writer.write_eof()
    except OSError:
        writer.transport.abort()


def summary(counts: Counter[str]) -> str:
    """The counts of a proxy on one line."""
    every = {reason: count for reason, count in counts.most_common() if reason not in NOT_LEFT_OUT}
    left = {reason: count for reason, count in every.items() if not reason.startswith(UNREAD)}
    unread = ", ".join(f"{reason} {every[reason]}" for reason in every if reason not in left)
    kept = f"kept {counts[KEPT]} answers, {counts[BYTES] / 1e6:.1f} MB in {counts[FILES]} files"
    reasons = ", ".join(f"{reason} {count}" for reason, count in left.items())
    lines = [f"{kept}; left out {sum(left.values())}" + (f": {reasons}" if reasons else "")]
    return "; not read: ".join([*lines, *([unread] if unread else [])])


def record(settings: Recording, ready: Callable[[int], None]) -> Counter[str]:
    """Proxy and record until SIGINT or SIGTERM, in the main thread; the counts. See Proxy.run."""
    proxy = Proxy(settings)

    async def serve() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        with noting(lambda number: loop.call_soon_threadsafe(stop.set)):
            await proxy.run(stop, ready)

    _allow_connections()
    asyncio.run(serve())
    return proxy.counts


def _allow_connections() -> None:
    """Allow this process as many open files as it may have: each connection takes two."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (max(soft, min(hard, MAX_OPEN_FILES)) if hard > 0 else MAX_OPEN_FILES, hard)
        )
