"""What `distill record` adds to a request: the same requests to a trivial server, directly and through it, in turns.

    python scripts/benchmarks/record.py --pairs 2000

Server, proxy and client are processes of their own on loopback; the client sends one request at a time, by plain
sockets, so that little but the proxy is measured. Every pair of requests is in random order. Given are the medians and
the median of the paired differences, with a bootstrap interval over pairs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np

EVENTS, GAP_SECONDS = 64, 0.002


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(text: str, end: str | None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": end}
    body = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return chunk(f"data: {json.dumps(body)}\n\n".encode())


def replies() -> tuple[bytes, list[bytes]]:
    """A whole reply, and the pieces of a streamed one, each sent by itself."""
    choice = {"index": 0, "message": {"role": "assistant", "content": "word " * 64}, "finish_reason": "stop"}
    body = json.dumps({"id": "chatcmpl-1", "model": "m", "choices": [choice]}).encode()
    whole = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    last = event("", "stop") + chunk(b"data: [DONE]\n\n") + chunk(b"")
    return whole, [head, *(event("word ", None) for _ in range(EVENTS)), last]


async def serve() -> None:
    """The trivial server: prints its port."""
    whole, pieces = replies()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                body = await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split()[0]))
                if b'"stream": true' not in body[:64]:
                    writer.write(whole)
                    continue
                for piece in pieces:
                    writer.write(piece)
                    await asyncio.sleep(GAP_SECONDS)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, limit=2**24)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def request(stream: bool, prompt_bytes: int) -> bytes:
    asked = {"stream": stream, "messages": [{"role": "user", "content": "word " * (prompt_bytes // 5)}]}
    body = json.dumps(asked).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


class Client:
    """One address; a connection that stays, or one for each request."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.kept = self.connect()

    def connect(self) -> socket.socket:
        found = socket.create_connection(("127.0.0.1", self.port))
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return found

    def seconds(self, raw: bytes, size: int, anew: bool) -> tuple[float, float]:
        """Seconds until the first byte and until the last one of a reply of so many bytes."""
        started = time.perf_counter()
        place = self.connect() if anew else self.kept
        place.sendall(raw)
        got, first = len(place.recv(2**16)), time.perf_counter()
        while got < size:
            got += len(place.recv(2**16))
        ended = time.perf_counter()
        if anew:
            place.close()
        return first - started, ended - started


def measure(clients: list[Client], pairs: int, ask: Callable[[Client], tuple[float, float]]) -> np.ndarray:
    """Milliseconds, shape (pairs, direct or proxied, first or last byte)."""
    found = np.zeros((pairs, 2, 2))
    for row in found:
        for place in random.sample((0, 1), 2):
            row[place] = ask(clients[place])
    return found * 1000


def median_interval(differences: np.ndarray) -> str:
    draws = np.random.default_rng(0).integers(0, len(differences), (1000, len(differences)))
    low, high = np.quantile(np.median(differences[draws], axis=1), (0.025, 0.975))
    return f"{np.median(differences):.3f} [{low:.3f}, {high:.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=2000)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve())
        return
    random.seed(0)
    server = subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    upstream = int(server.stdout.readline())
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "distill", "record", "--upstream", f"http://127.0.0.1:{upstream}"]
        command += ["--to", folder, "--port", "0", "--redact", r"[\w.+-]+@[\w.-]+", "--redact", r"\b\d{6,}\b"]
        proxy = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert proxy.stderr is not None and proxy.stdout is not None
        ready = next(line for line in proxy.stderr if line.startswith("ready: "))
        clients = [Client(upstream), Client(int(ready.split()[1].rstrip(";").rpartition(":")[2]))]
        whole, pieces = replies()
        print("| request | | direct, ms | through the proxy, ms | difference, ms |\n|---|---|---|---|---|")
        cases = [
            ("whole reply", False, 1000, False),
            ("whole reply, a connection of its own", False, 1000, True),
            ("whole reply, prompt of 100 kB", False, 100_000, False),
            (f"streamed reply, {EVENTS} events, 2 ms apart", True, 1000, False),
        ]
        for name, stream, prompt, anew in cases:
            raw, size = request(stream, prompt), sum(map(len, pieces)) if stream else len(whole)

            def ask(client: Client, raw: bytes = raw, size: int = size, anew: bool = anew) -> tuple[float, float]:
                return client.seconds(raw, size, anew)

            pairs = arguments.pairs // 10 if stream else arguments.pairs
            measure(clients, pairs // 10, ask)
            found = measure(clients, pairs, ask)
            for place, byte in enumerate(("first byte", "last byte")):
                if stream or byte == "last byte":
                    direct, proxied = found[:, 0, place], found[:, 1, place]
                    medians = f"{np.median(direct):.3f} | {np.median(proxied):.3f}"
                    print(f"| {name} | {byte} | {medians} | {median_interval(proxied - direct)} |", flush=True)
        proxy.send_signal(signal.SIGINT)
        out, err = proxy.communicate(timeout=60)
        print(f"\nproxy: {out.strip()} {err.strip()}")
    server.kill()
    server.wait()


if __name__ == "__main__":
    main()
