"""What the test servers share: an HTTP handler that replies with JSON or text, and a server of it on loopback."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class LoopbackHandler(BaseHTTPRequestHandler):
    """The requests of one connection; `owner` is the server's state."""

    owner: Any
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body waits 40 ms for the client to acknowledge its headers

    def log_message(self, *arguments: object) -> None:
        pass

    def body(self) -> dict[str, Any]:
        """The JSON object that was sent."""
        found: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        return found

    def reply(self, status: int, value: Any, **headers: str) -> None:
        """Bytes and texts as they are, anything else as JSON; `Retry_After="0"` is the header Retry-After."""
        text = value if isinstance(value, str | bytes) else json.dumps(value)
        data = text.encode() if isinstance(text, str) else text
        self.send_response(status)
        for name, header in headers.items():
            self.send_header(name.replace("_", "-"), header)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def stream(self, events: Iterable[str]) -> None:
        """Server-sent events, a chunk each."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in events:
            data = f"{event}\n\n".encode()
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.write(b"0\r\n\r\n")


def server_of(handler: type[LoopbackHandler], owner: Any, port: int = 0) -> ThreadingHTTPServer:
    """A server whose requests belong to `owner`; port 0 takes a free one."""
    server = ThreadingHTTPServer(("127.0.0.1", port), type("Bound", (handler,), {"owner": owner}))
    server.daemon_threads = True
    return server


@contextlib.contextmanager
def running(handler: type[LoopbackHandler], owner: Any) -> Iterator[int]:
    """Serve in a thread; the port."""
    server = server_of(handler, owner)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
