"""The exchanges of one connection, put together by h11 from copies of its bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import h11

from distill.recording.exchanges import CHAT, TEXT

MAX_BYTES = 16 * 2**20  # of a request or reply that is recorded
MAX_HEADER_BYTES = 2**16
BROKEN = "broken off"
OPT_OUT = b"x-distill-record"  # the header of a request that is not to be recorded; any value but yes


@dataclass
class Exchange:
    """A request for a completion and its reply, or the reason why they are left out."""

    kind: str
    fault: str = ""
    request: bytearray = field(default_factory=bytearray)
    reply: bytearray = field(default_factory=bytearray)

    def add(self, body: bytearray, data: bytes) -> None:
        """Keep a part of a body, while the exchange is one to be kept."""
        if not self.fault and len(body) + len(data) > MAX_BYTES:
            self.fault = "too large"
        if self.fault:
            self.request.clear()
            self.reply.clear()
        else:
            body += data


class Watcher:
    """Gives `take` each successful exchange, and `leave_out` the reason of each other one; raises nothing.

    `sampled` decides whether an exchange is kept. Where h11 cannot read what passes (another protocol, several requests
    at once), the watching ends, not the connection.
    """

    def __init__(
        self, take: Callable[[Exchange], None], leave_out: Callable[[str], None], sampled: Callable[[], bool]
    ) -> None:
        self._take, self._leave_out, self._sampled = take, leave_out, sampled
        # Each event that one of them reads, the other one "sends", so that both know where the exchange is.
        self._requests = h11.Connection(h11.SERVER, MAX_HEADER_BYTES)
        self._replies = h11.Connection(h11.CLIENT, MAX_HEADER_BYTES)
        self._exchange: Exchange | None = None
        self._lost = False

    @property
    def busy(self) -> bool:
        """Whether a reply is under way, as far as it can be read."""
        return not self._lost and self._requests.our_state in (h11.SEND_RESPONSE, h11.SEND_BODY)

    def sent(self, data: bytes) -> None:
        """Look at bytes of the client; none: it sends no more."""
        self._feed(self._requests, self._replies, data)

    def replied(self, data: bytes) -> None:
        """Look at bytes of the server; none: it sends no more."""
        self._feed(self._replies, self._requests, data)

    def close(self) -> None:
        """The connection has ended."""
        self._lose(BROKEN)

    def _lose(self, reason: str) -> None:
        """End the watching; counted, but where the connection has ended between two exchanges."""
        if self._exchange is not None:
            self._leave_out(self._exchange.fault or reason)
        elif reason != BROKEN:
            self._leave_out(reason)
        self._lost, self._exchange = True, None

    def _feed(self, side: h11.Connection, other: h11.Connection, data: bytes) -> None:
        if self._lost:
            return
        try:
            side.receive_data(data)
            self._read(side, other)
        except h11.ProtocolError:
            self._lose("HTTP that h11 does not read" if data else BROKEN)
        except Exception as error:  # a fault of ours must not end a reply
            self._lose(f"a fault in distill ({type(error).__name__})")

    def _read(self, side: h11.Connection, other: h11.Connection) -> None:
        while not self._lost:
            event = side.next_event()
            if event is h11.NEED_DATA:
                return
            if event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
                if event is h11.PAUSED and side.trailing_data[0]:  # what is not read would gather in memory
                    switched = side.their_state is h11.SWITCHED_PROTOCOL
                    self._lose("another protocol" if switched else "requests before the reply")
                return
            other.send_with_data_passthrough(event)  # type: ignore[arg-type]  # an event, as the rest has returned
            self._note(side, event)
            if side.states == {h11.CLIENT: h11.DONE, h11.SERVER: h11.DONE}:
                side.start_next_cycle()
                other.start_next_cycle()

    def _note(self, side: h11.Connection, event: object) -> None:
        if isinstance(event, h11.Request):
            self._exchange = self._begin(event)
        exchange = self._exchange
        if exchange is None:
            return
        if isinstance(event, h11.Response):
            encoding = dict(event.headers).get(b"content-encoding", b"identity")
            if event.status_code != 200:
                exchange.fault = exchange.fault or f"status {event.status_code}"
            elif encoding != b"identity":
                exchange.fault = exchange.fault or "a compressed reply"
        elif isinstance(event, h11.Data):
            exchange.add(exchange.request if side is self._requests else exchange.reply, bytes(event.data))
        elif isinstance(event, h11.EndOfMessage) and side is self._replies:
            self._exchange = None
            if not exchange.fault and side.our_state not in (h11.DONE, h11.MUST_CLOSE):
                exchange.fault = BROKEN  # the server did not wait for the whole request
            if exchange.fault:
                self._leave_out(exchange.fault)
            else:
                self._take(exchange)

    def _begin(self, request: h11.Request) -> Exchange | None:
        path = request.target.partition(b"?")[0].rstrip(b"/")
        kind = CHAT if path.endswith(b"/chat/completions") else TEXT
        if request.method != b"POST" or not path.endswith((b"/completions", b"/completion")):
            self._leave_out("other requests")
            return None
        asked = dict(request.headers).get(OPT_OUT, b"yes").strip().lower()
        fault = "not to be recorded" if asked != b"yes" else "" if self._sampled() else "not sampled"
        return Exchange(kind, fault)
