"""The recorder: bytes as they were, at the time they were, on raw connections; what is kept, and in which files."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import json
import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import Capture, Patch

from distill.data import recorder as module
from distill.data.recorder import NOT_LEFT_OUT, TEXT, Proxy, Recording, Watcher, Writer, summary

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
BODY = b'{"messages": [{"role": "user", "content": "Hi"}]}'
EVENTS = [
    b'data: {"choices": [{"index": 0, "delta": {"content": "He"}, "finish_reason": null}]}\n\n',
    b'data: {"choices": [{"index": 0, "delta": {"content": "llo"}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n',
]
HELLO = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
STREAMED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
WHOLE = b'{"choices":[{"index":0,"message":{"role":"assistant","content":"Hello"},"finish_reason":"stop"}]}'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def request(path: str = "/v1/chat/completions", body: bytes = BODY, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Authorization: Bearer sk-secret", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


def reply(body: bytes = WHOLE, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", "X-OdD: One ", "x-odd: two", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def as_1_0(raw: bytes) -> bytes:
    return raw.replace(b"HTTP/1.1", b"HTTP/1.0", 1)


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next((line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), b":0")
    return head + await reader.readexactly(int(length.partition(b":")[2]))


def in_a_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A test that runs in a loop of its own, a minute at most."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **named), 60))

    return run


class Served:
    """An imitation server at `upstream`, and the proxy in front of it at `port`."""

    def __init__(self, proxy: Proxy, upstream: int, folder: Path) -> None:
        self.proxy, self.upstream, self.port, self.folder = proxy, upstream, 0, folder
        self.stop, self.writers = asyncio.Event(), list[asyncio.StreamWriter]()

    async def connect(self, port: int | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection, which is closed at the end of `served`."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port or self.port, limit=2**16)
        self.writers.append(writer)
        return reader, writer

    async def ask(self, raw: bytes, port: int | None = None) -> bytes:
        """All bytes of the reply to one request, until the server closes."""
        reader, writer = await self.connect(port)
        writer.write(raw)
        return await reader.read(-1)

    async def ask_streams(self, count: int, body: bytes = BODY) -> None:
        """Several requests on one connection, each behind the end of a streamed reply to the last."""
        reader, writer = await self.connect()
        for _ in range(count):
            writer.write(request("/v1/chat/completions", body))
            await reader.readuntil(b"\r\n0\r\n\r\n")

    def lines(self) -> list[dict[str, Any]]:
        """What was recorded; whole only behind the end of `served`."""
        return [json.loads(line) for path in sorted(self.folder.glob("*")) for line in path.read_bytes().splitlines()]

    def left_out(self) -> dict[str, int]:
        return {name: n for name, n in self.proxy.counts.items() if name not in NOT_LEFT_OUT}


@contextlib.asynccontextmanager
async def served(folder: Path, handle: Handler | None, queue_bytes: int = 2**20, **more: Any) -> AsyncIterator[Served]:
    """The proxy, which has ended behind the block; without a handler, in front of nothing."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await handle(reader, writer)  # type: ignore[misc]
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0) if handle else None
    port = server.sockets[0].getsockname()[1] if server else 1
    proxy = Proxy(Recording(("127.0.0.1", port), ("127.0.0.1", 0), folder, **more), queue_bytes)
    ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    found = Served(proxy, port, folder)
    running = asyncio.create_task(proxy.run(found.stop, ready.set_result))
    try:
        await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
        found.port = ready.result()
        yield found
    finally:
        for writer in found.writers:
            writer.close()
        found.stop.set()
        await asyncio.wait_for(running, 10)
        if server is not None:
            server.close()


def replying(raw: bytes, seen: list[bytes]) -> Handler:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await read_request(reader))
        writer.write(raw)

    return handle


def staying(next_reply: Callable[[], bytes]) -> Handler:
    """A reply to each request, until the client closes."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            writer.write(next_reply())

    return handle


stream = staying(lambda: STREAMED + b"".join(map(chunk, (*EVENTS, b""))))


REQUESTS = [
    request(),
    b"GET /v1/models?a=%2F%20&b HTTP/1.1\r\nhOsT: y\r\nX-A: 1\r\nX-A:  2\r\n\r\n",
    b"PUT //odd/../path%2fx HTTP/1.1\r\nHost: y\r\nContent-Length: 3\r\n\r\n\x00\xff\n",
    b"DELETE * HTTP/1.0\r\nConnection: close\r\n\r\n",
    b"no HTTP at all\r\n\r\n",
]
REPLIES = [
    reply(),
    reply(b"nope", "404 Not Found", "WWW-Authenticate: Basic"),
    reply(b'{"error": 1}', "503 Try  Later", "Retry-After: 1"),
    b"HTTP/1.0 200 OK\r\n\r\nuntil the end",
    STREAMED + chunk(b"a") + b"1;ext=1\r\nb\r\n0\r\nTrailer: 1\r\n\r\n",
    b"HTTP/1.1 204 No Content\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort",
    b"no HTTP at all",
    b"",
]


@in_a_loop
async def test_every_byte_passes_as_it_is(tmp_path: Path) -> None:
    seen: list[bytes] = []
    raw = b""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await replying(raw, seen)(reader, writer)

    async with served(tmp_path, handle) as found:
        for raw in REPLIES:
            for sent in REQUESTS:
                direct = await found.ask(sent, found.upstream)
                assert await found.ask(sent) == direct == raw
                assert seen[-2:] == [sent, sent]
    assert found.proxy.counts["kept"] == 1 and found.left_out()["HTTP that h11 does not read"] >= len(REPLIES)


CLOSE, STAY = "Connection: close", "Connection: keep-alive"
NO_LENGTH = b"HTTP/1.%d 200 OK\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize("half_closed", [False, True])
@pytest.mark.parametrize(
    ("sent", "raw"),
    [
        (request("/v1/chat/completions", BODY, CLOSE), reply(WHOLE, "200 OK", CLOSE)),
        (request("/v1/chat/completions", BODY, CLOSE), NO_LENGTH % 1 + WHOLE),
        (request(), STREAMED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + chunk(WHOLE) + chunk(b"")),
        (as_1_0(request("/v1/chat/completions", BODY, CLOSE)), reply(WHOLE, "200 OK", CLOSE)),
        (as_1_0(request().replace(b"Host: x\r\n", b"")), as_1_0(reply())),
        (as_1_0(request()), NO_LENGTH % 0 + WHOLE),
        (as_1_0(request()), NO_LENGTH % 1 + b"".join(EVENTS)),
        (request(), NO_LENGTH % 0 + b"".join(EVENTS)),
    ],
)
@in_a_loop
async def test_the_last_exchange_of_a_connection_is_kept(
    tmp_path: Path, sent: bytes, raw: bytes, half_closed: bool
) -> None:
    """Of HTTP/1.0, as nginx speaks it to its upstream, and with `Connection: close`, which ends a reply."""
    async with served(tmp_path, replying(raw, [])) as found:
        reader, writer = await found.connect()
        writer.write(sent)
        if half_closed:
            writer.write_eof()
        assert await reader.read() == raw
    assert [line["messages"] for line in found.lines()] == [HELLO] and found.left_out() == {}


@in_a_loop
async def test_pieces_pass_when_they_come(tmp_path: Path) -> None:
    """The first piece reaches the client before the server sends the second one, and likewise on the way there."""
    client_has = asyncio.Event(), asyncio.Event()
    server_has = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(5) == BODY[:5]
        server_has.set()
        assert await reader.readexactly(len(BODY) - 5) == BODY[5:]
        writer.write(STREAMED)
        for event, has in zip(EVENTS, client_has, strict=True):
            writer.write(chunk(event)[:7])  # the pieces are not the chunks
            await asyncio.sleep(0)
            writer.write(chunk(event)[7:])
            await has.wait()
        writer.write(chunk(b""))

    async with served(tmp_path, handle) as found:
        reader, writer = await found.connect()
        writer.write(request()[: -len(BODY) + 5])
        await server_has.wait()
        writer.write(BODY[5:])
        got = b""
        for event, has in zip(EVENTS, client_has, strict=True):
            while not got.endswith(chunk(event)):
                got += await reader.read(100)
            has.set()
        assert got + await reader.read(-1) == STREAMED + b"".join(map(chunk, (*EVENTS, b"")))
    assert found.lines() == [{"messages": HELLO, "finish_reason": "stop"}]


@in_a_loop
async def test_what_is_kept_and_what_is_counted(tmp_path: Path, capfd: Capture) -> None:
    folder = tmp_path / "traffic"
    folder.mkdir()
    raws: list[bytes] = []

    async with served(folder, staying(lambda: raws.pop(0))) as found:
        tools = WHOLE.replace(b'"content":"Hello"', b'"content":null,"tool_calls":[{}]')
        asked_not = request("/v1/chat/completions", BODY, "x-distill-RECORD:  No")
        head = b"HEAD /health HTTP/1.1\r\nHost: x\r\n\r\n"
        pairs = [
            (request(), reply()),
            (request("/chat/completions/?a=b", BODY, "X-Distill-Record: yes"), STREAMED + chunk(EVENTS[0])),
            (asked_not, reply()),
            (request(), reply(b"{}", "400 Bad Request")),
            (request(), reply(tools)),
            (request(), reply(WHOLE, "200 OK", "Content-Encoding: gzip")),
            (request("/v1/embeddings"), reply()),
            (head, b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"),
            (request("/completion", b'{"prompt": "Hi"}'), reply(b'{"content": "Hello", "stop_type": "limit"}')),
            (request(), b"HTTP/1.1 100 Continue\r\n\r\n" + reply()),
            *[(as_1_0(request("/v1/chat/completions", BODY, STAY)), as_1_0(reply(WHOLE, "200 OK", STAY)))] * 2,
        ]
        # all on one connection
        reader, writer = await found.connect()
        for sent, raw in pairs:
            raws.append(raw)
            writer.write(sent)
            assert await reader.readexactly(len(raw)) == raw
            if raw.endswith(chunk(EVENTS[0])):
                rest = chunk(EVENTS[1]) + chunk(b"")
                raws.append(rest)
                writer.write(head)  # answered by the rest of the reply: two requests at once
                assert await reader.readexactly(len(rest)) == rest
                writer.close()
                reader, writer = await found.connect()
    hello = {"messages": HELLO, "finish_reason": "stop"}
    assert found.lines() == [hello, {"prompt": "Hi", "answer": "Hello", "finish_reason": "length"}, *[hello] * 3]
    assert found.left_out() == {
        "requests before the reply": 1,
        "not to be recorded": 1,
        "status 400": 1,
        "a tool call without a name": 1,
        "a compressed reply": 1,
        "other requests": 2,
    }
    (path,) = folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and "secret" not in path.read_text()
    assert summary(found.proxy.counts).startswith("kept 5 answers, 0.0 MB in 1 files; left out 7: ")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("abort", [False, True])
@in_a_loop
async def test_a_client_that_goes_ends_the_request_of_the_server(tmp_path: Path, abort: bool) -> None:
    ended = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(STREAMED + chunk(EVENTS[0]))
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        ended.set()

    async with served(tmp_path, handle) as found:
        reader, writer = await found.connect()
        writer.write(request())
        await reader.readuntil(EVENTS[0])
        if abort:
            writer.transport.abort()
        writer.close()
        await ended.wait()
    assert found.lines() == [] and found.left_out() == {"broken off": 1}


@in_a_loop
async def test_a_server_that_cannot_be_reached(tmp_path: Path, capsys: Capture) -> None:
    async with served(tmp_path, None) as found:
        for _ in range(2):
            got = await found.ask(request("/v1/chat/completions", b" " * 300_000))
            head, _, body = got.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 502 ") and b"connection: close" in head
            assert "cannot reach http://127.0.0.1:1" in json.loads(body)["error"]["message"]
    assert found.left_out() == {"the server cannot be reached": 2}
    assert capsys.readouterr().err == "distill record cannot reach http://127.0.0.1:1: Connection refused\n"


@in_a_loop
async def test_a_full_queue_and_a_writer_that_has_ended_cost_no_reply(tmp_path: Path, capsys: Capture) -> None:
    async with served(tmp_path, stream, queue_bytes=10) as found:
        await found.ask_streams(3)
        assert found.left_out() == {"a full queue": 3} and found.proxy._held == 0
        found.proxy.queue_bytes = 2**20
        found.proxy._process.kill()
        await found.proxy._process.wait()
        await found.ask_streams(2)
    assert found.left_out() == {"a full queue": 3, "no process that writes": 2} and not found.lines()
    assert capsys.readouterr().err.count("the process that writes has ended") == 1


@in_a_loop
async def test_the_sample_and_the_size(tmp_path: Path, monkeypatch: Patch) -> None:
    (sampled := tmp_path / "sampled").mkdir()
    async with served(sampled, stream, sample=0.5) as found:
        await found.ask_streams(40)
    counts = found.proxy.counts
    assert counts["kept"] + counts["not sampled"] == 40 and 5 < counts["kept"] < 35  # fails once in 10^6
    monkeypatch.setattr("distill.data.recorder.MAX_BYTES", len(BODY))
    async with served(tmp_path / "large", stream) as found:
        await found.ask_streams(40, BODY + b" ")
    assert found.proxy.counts == {"too large": 40}


@in_a_loop
async def test_another_protocol_passes(tmp_path: Path) -> None:
    """As WebSockets do, behind their upgrade."""
    switched = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n"

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(switched)
        while data := await reader.read(100):
            writer.write(data[::-1])

    async with served(tmp_path, handle) as found:
        reader, writer = await found.connect()
        writer.write(b"GET /x HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
        assert await reader.readexactly(len(switched)) == switched
        for data in (b"\x00abc", b"POST /v1/chat/completions HTTP/1.1\r\n\r\n"):
            writer.write(data)
            assert await reader.readexactly(len(data)) == data[::-1]
    assert found.left_out() == {"other requests": 1, "another protocol": 1}


@in_a_loop
async def test_replies_under_way_end_in_order(tmp_path: Path) -> None:
    go_on = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(STREAMED + chunk(EVENTS[0]))
        await go_on.wait()
        writer.write(chunk(EVENTS[1]) + chunk(b""))
        assert await reader.read() == b""  # the connection stays open

    async with served(tmp_path, handle) as found:
        idle, _ = await found.connect()
        reader, writer = await found.connect()
        writer.write(request())
        await reader.readuntil(EVENTS[0])
        found.stop.set()
        assert await idle.read() == b""
        with pytest.raises(ConnectionError):
            await found.connect()
        go_on.set()
        assert (await reader.read()).endswith(chunk(EVENTS[1]) + chunk(b""))
    assert len(found.lines()) == 1 and found.left_out() == {}


@in_a_loop
async def test_a_pattern_that_never_ends_costs_no_reply(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setattr("distill.data.recorder.PARTING_SECONDS", 0.3)
    body = BODY.replace(b"Hi", b"a" * 60)
    async with served(tmp_path, stream, patterns=("(a+)+b",)) as found:
        await found.ask_streams(3, body)
    assert found.left_out() == {"too late to be written": 3} and not found.lines()
    assert "3 exchanges are lost: does a pattern of --redact" in capsys.readouterr().err


def test_open_exchanges_share_one_limit(tmp_path: Path) -> None:
    """Of bytes; what is finished or broken off gives its bytes back."""
    proxy, left = Proxy(Recording(("127.0.0.1", 1), ("127.0.0.1", 0), tmp_path), 1000), list[str]()
    watchers = [Watcher(lambda exchange: None, left.append, reserve=proxy._reserve) for _ in range(4)]
    for watcher in watchers[:3]:
        watcher.sent(request("/v1/completions", b"x" * 400))
    assert proxy._held == 800 and not left  # the third one is not kept
    watchers[2].replied(reply(b"y" * 100))
    assert left == ["a full queue"]
    watchers[0].replied(reply(b"y" * 100))
    watchers[1].close()
    assert proxy._held == 0 and left == ["a full queue", "broken off"]
    watchers[3].sent(request("/v1/completions", b"x" * 900))
    assert proxy._held == 900


@in_a_loop
async def test_a_slow_client_gets_the_whole_reply_at_the_end(tmp_path: Path) -> None:
    raw = reply(b"x" * 20_000_000)
    async with served(tmp_path, replying(raw, [])) as found:
        reader, writer = await found.connect()
        writer.write(request("/v1/embeddings"))
        await asyncio.sleep(0.1)
        found.stop.set()
        await asyncio.sleep(0.1)
        assert await reader.read() == raw


@in_a_loop
async def test_what_the_writer_had_not_read_is_written_at_the_end(tmp_path: Path) -> None:
    """More than a pipe holds, to a process that is stopped meanwhile."""
    body = BODY.replace(b"Hi", b"x" * 100_000)
    async with served(tmp_path, stream) as found:
        os.kill(found.proxy._process.pid, 19)  # SIGSTOP
        await found.ask_streams(15, body)
        os.kill(found.proxy._process.pid, 18)  # SIGCONT
    full = found.left_out()["a full queue"]
    assert full >= 3 and len(found.lines()) == 15 - full == found.proxy.counts["kept"]


# ── files ──


def take(writer: Writer, number: int) -> bytes:
    """Write an exchange; its line."""
    prompt, reply = f"question {number:04d}", {"content": f"answer of user{number}@example.org", "stop_type": "eos"}
    writer.take(TEXT, json.dumps({"prompt": prompt}).encode(), json.dumps(reply).encode())
    return json.dumps({"prompt": prompt, "answer": "answer of [redacted]", "finish_reason": "stop"}).encode() + b"\n"


def files(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.iterdir())]


def made(folder: Path) -> Writer:
    return Writer(folder, [r"\S+@\S+"])


def test_full_files_are_followed_by_others(tmp_path: Path, monkeypatch: Patch) -> None:
    writer = made(tmp_path)
    lines = [take(writer, 0)]
    monkeypatch.setattr(module, "FILE_BYTES", 3 * len(lines[0]))
    lines += [take(writer, number) for number in range(1, 7)]
    assert files(tmp_path) == [b"".join(lines[:3]), b"".join(lines[3:6]), lines[6]]
    assert writer.counts == {"exchanges": 7, "kept": 7, "bytes": sum(map(len, lines)), "files": 3}
    writer.close()
    monkeypatch.setattr(module, "FILE_BYTES", 1)  # each line is longer than a file; and a file is never written on
    again = made(tmp_path)
    assert files(tmp_path)[3:] == [] and [take(again, 7), take(again, 8)] == files(tmp_path)[3:]
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}
    again.close()


@pytest.mark.parametrize("fault", ["nothing", "half", "half, and it stays"])
def test_a_full_disk_is_said_once_and_leaves_whole_lines(
    tmp_path: Path, fault: str, monkeypatch: Patch, capsys: Capture
) -> None:
    writer = made(tmp_path)
    first = take(writer, 0)
    write = os.write

    def full(file: int, data: bytes) -> int:
        if fault == "nothing":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data[: len(data) // 2])

    def stuck(*arguments: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "write", full)
        if fault == "half, and it stays":
            patch.setattr(module.os, "ftruncate", stuck)
        half = take(writer, 1)
        half = half[: len(half) // 2]
        take(writer, 2)
    last = take(writer, 3)
    writer.close()
    if fault == "half, and it stays":  # each in a file of its own
        assert files(tmp_path)[0] == first + half and files(tmp_path)[-1] == last and len(files(tmp_path)) == 3
    else:
        assert files(tmp_path) == [first + last]
    assert (writer.counts["kept"], writer.counts["a failed write"]) == (2, 2)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "the disk is full: cannot write" in said and "replies go on" in said


def test_a_folder_that_is_gone(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "gone"
    writer = made(folder)
    take(writer, 0)
    assert writer.counts == {"exchanges": 1, "a failed write": 1} and "cannot write" in capsys.readouterr().err
    folder.mkdir()
    line = take(writer, 1)
    assert files(folder) == [line]
    writer.close()


def test_a_fault_of_ours_is_counted(tmp_path: Path, monkeypatch: Patch) -> None:
    """As of a body that is nested too deeply."""
    writer = made(tmp_path)
    monkeypatch.setattr(module, "redacted", lambda *_: [][0])
    take(writer, 0)
    assert writer.counts == {"exchanges": 1, "a fault in distill (IndexError)": 1}
