"""The one HTTP client: what it never asks, how long it waits, what it reads."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

import pytest
from loopback import LoopbackHandler, running
from pydantic import BaseModel
from tiny import Patch

from distill.errors import EndpointError
from distill.http import HttpClient, Unanswered, proxy_hint, proxy_of


class Pieces(LoopbackHandler):
    """Sends its owner's pieces, a moment apart."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.close_connection = True
        with contextlib.suppress(ConnectionError):
            for piece in self.owner:
                self.wfile.write(piece)
                self.wfile.flush()
                time.sleep(0.05)


@contextlib.contextmanager
def client(seconds: float) -> Iterator[HttpClient]:
    with contextlib.closing(HttpClient(seconds, 1)) as found:
        yield found


def test_a_reply_that_trickles_ends_in_time() -> None:
    with running(Pieces, [b"x"] * 400) as port, client(0.3) as own:
        started = time.monotonic()
        with pytest.raises(Unanswered, match="no reply in time"):
            own.send(f"http://127.0.0.1:{port}/")
        assert time.monotonic() - started < 10


class Trickling(Pieces):
    """Its header never ends."""

    def send_response(self, code: int, message: str | None = None) -> None:
        with contextlib.suppress(ConnectionError):
            for piece in b"HTTP/1.1 200 OK\r\nx-long: " + 400 * b"x":
                self.wfile.write(bytes([piece]))
                time.sleep(0.02)


def test_a_header_that_trickles_ends_in_time() -> None:
    with running(Trickling, []) as port, client(0.3) as own:
        started = time.monotonic()
        with pytest.raises(Unanswered, match="no reply in time"):
            own.send(f"http://127.0.0.1:{port}/")
        assert time.monotonic() - started < 5


def test_an_event_may_be_split() -> None:
    with running(Pieces, [b"da", b"ta: 1\n\ndata", b":2 data: \n\n"]) as port, client(20) as own:
        found = own.send(f"http://127.0.0.1:{port}/")
    assert found.content == b"data: 1\n\ndata:2 data: \n\n" and len(found.times) == 2
    assert found.started < found.times[0] < found.times[1]


def test_no_proxy_stands_before_this_machine(monkeypatch: Patch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with running(Pieces, [b"here"]) as port, client(20) as own:
        for host in ("127.0.0.1", "localhost"):
            assert own.send(f"http://{host}:{port}/").content == b"here"
        with pytest.raises(Unanswered, match="no connection"):  # of the proxy, which is not there
            own.send("http://server.invalid/")


@pytest.mark.parametrize(("variable", "value"), [("all_proxy", "socks5h://127.0.0.1:9"), ("http_proxy", "ftp://a:9")])
def test_a_proxy_that_cannot_be_used_stops_only_its_own_requests(monkeypatch: Patch, variable: str, value: str) -> None:
    monkeypatch.setitem(sys.modules, "socksio", None)
    monkeypatch.setenv(variable, value)
    with running(Pieces, [b"here"]) as port, client(20) as own:
        assert own.send(f"http://127.0.0.1:{port}/").content == b"here"
        with pytest.raises(EndpointError, match=f"proxy of the environment \\({value}\\) cannot be used") as error:
            own.send("http://server.invalid/")
        assert "unset it" in str(error.value)


def test_a_proxy_is_named_without_its_password(monkeypatch: Patch) -> None:
    for name, value in (("http_proxy", "http://me:secret@proxy.invalid:3128"), ("no_proxy", "near.invalid,10.0.0.7")):
        monkeypatch.setenv(name, value)
    assert proxy_of("http://far.invalid/v1") == "http://proxy.invalid:3128"
    assert "http://proxy.invalid:3128: NO_PROXY=far.invalid avoids it" in proxy_hint("http://far.invalid/v1")
    for direct in ("http://near.invalid:8000", "http://10.0.0.7", "http://localhost:1", "https://far.invalid"):
        assert proxy_of(direct) == proxy_hint(direct) == ""


def test_a_reply_has_a_limit_of_bytes() -> None:
    with running(Pieces, [b"x" * 600] * 4) as port, client(20) as own:
        assert len(own.send(f"http://127.0.0.1:{port}/", most_bytes=2400).content) == 2400
        with pytest.raises(Unanswered, match="a reply of more than 2399 bytes"):
            own.send(f"http://127.0.0.1:{port}/", most_bytes=2399)


def test_forms_are_read_whole() -> None:
    class Form(BaseModel):
        number: int
        text: str = ""

    with client(1) as own:
        assert own.read(b'{"number": 3, "more": 1}', Form).number == 3
        cut = own.read(b'{"number": 3, "text": "a\\ud83d"}', Form).text  # within a character
        assert cut.rstrip("\ufffd") == "a" != cut
        for content, reason in ((b"<html>", "not a JSON object"), (b'{"number": "x"}', "usable number")):
            with pytest.raises(Unanswered, match=reason):
                own.read(content, Form)
