"""The exchanges of a connection, and the lines that `answers.traffic` reads, one for each answer, from their bodies.

What a line could not hold without loss is left out, with the reason: a prompt that is more than text or messages
(images, token ids), a tool call that the request forced. Thinking that the server parsed out has one name in a line,
whatever the server calls it.
"""

from __future__ import annotations

import functools
import itertools
import operator
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import h11

from distill.data import records
from distill.data.records import (
    CLOSING,
    OF_LINE,
    REQUEST,
    STEERING,
    THINKING,
    efforts,
    fault_of_text,
    normal,
    steered,
    unread_fields,
)
from distill.files import has_form, parse_object

CHAT, TEXT = "chat", "text"  # messages, as of /v1/chat/completions; a prompt, as of /v1/completions and /completion

# ── The exchanges of one connection ──

MAX_BYTES = 16 * 2**20  # of a request or reply that is recorded
MAX_HEADER_BYTES = 2**16
BROKEN = "broken off"
COMPLETE = {h11.DONE, h11.MUST_CLOSE, h11.CLOSED}  # states of a side that has sent its whole message
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

    `sample` is the share of exchanges that are kept. Where h11 cannot read what passes (another protocol, several
    requests at once), the watching ends, not the connection.
    """

    def __init__(self, take: Callable[[Exchange], None], leave_out: Callable[[str], None], sample: float = 1.0) -> None:
        self._take, self._leave_out, self._sample = take, leave_out, sample
        self._exchange: Exchange | None = None
        self._lost = False
        self._await_request()

    def _await_request(self) -> None:
        # Each event that one of them reads, the other one "sends", so that both know where the exchange is. New ones
        # for each exchange: h11 takes HTTP/1.0 for the last of a connection, whatever client and server agree on.
        self._requests = h11.Connection(h11.SERVER, MAX_HEADER_BYTES)
        self._replies = h11.Connection(h11.CLIENT, MAX_HEADER_BYTES)

    @property
    def busy(self) -> bool:
        """Whether a reply is under way, as far as it can be read."""
        return not self._lost and self._requests.our_state in (h11.SEND_RESPONSE, h11.SEND_BODY)

    def sent(self, data: bytes) -> None:
        """Look at bytes of the client; none: it sends no more."""
        self._feed("_requests", data)

    def replied(self, data: bytes) -> None:
        """Look at bytes of the server; none: it sends no more."""
        self._feed("_replies", data)

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

    def _feed(self, name: str, data: bytes) -> None:
        try:
            while not self._lost:
                side = getattr(self, name)
                side.receive_data(data)
                self._read(side, self._replies if side is self._requests else self._requests)
                if getattr(self, name) is side:
                    return
                data = side.trailing_data[0]  # behind the exchange that has ended
                if not data:
                    return
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
            other.send_with_data_passthrough(_sendable(event))
            self._note(side, event)
            if isinstance(event, h11.EndOfMessage) and set(side.states.values()) <= COMPLETE:
                self._await_request()
                return

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
            if not exchange.fault and side.our_state not in COMPLETE:
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
        fault = "not to be recorded" if asked != b"yes" else "" if random.random() < self._sample else "not sampled"
        return Exchange(kind, fault)


def _sendable(event: Any) -> Any:
    """The event as h11 sends it: it reads HTTP/1.0, and sends HTTP/1.1 alone, whose requests name a host."""
    if getattr(event, "http_version", b"1.1") == b"1.1":
        return event
    headers = event.headers.raw_items()
    if isinstance(event, h11.Request):
        headers += [] if b"host" in dict(event.headers) else [(b"host", b"x")]
        return h11.Request(method=event.method, headers=headers, target=event.target)
    return type(event)(status_code=event.status_code, headers=headers, reason=event.reason)


# ── From bodies to lines ──

REDACTED = "[redacted]"
UNREAD = "request field `"
OF_MESSAGE = ("role", "content", *records.OF_MESSAGE)  # what a template reads of a message
OF_TOOLS = ("id", "type", "function", "arguments", "description", "parameters", "properties", "required")
# What holds no text of a person: the names of a line's own fields, and the values that some of them usually have.
NAMES = frozenset((*OF_LINE, *OF_MESSAGE, *OF_TOOLS))
USUAL = {
    "role": ("system", "developer", "user", "assistant", "tool"),
    "type": ("function", "object", "string", "number", "integer", "boolean", "array"),
    "finish_reason": ("stop", "length", "stop_string", "tool_calls"),
}
LLAMA_ENDS = {"eos": "stop", "limit": "length", "word": "stop_string", None: None, "none": None}


def read_exchange(kind: str, request: bytes, reply: bytes) -> Iterator[dict[str, Any] | str]:
    """A line for each answer of a successful exchange, or the reason why it is left out; and the name of each field of
    its request that is not read, behind UNREAD.

    `reply` is a JSON object or a stream of server-sent events.
    """
    try:
        asked = _object(request, "a request that is not a JSON object")
        if reason := steered(asked, line=False):
            raise ValueError(reason)
        line = _messages(asked) if kind == CHAT else _prompt(asked)
        choices = _choices(kind, list(_events(reply)), asked.get("n") not in (None, 1))
    except ValueError as reason:
        yield str(reason)
        return
    except (AttributeError, KeyError, TypeError):  # a foreign body has any form
        yield "a request or reply of another form"
        return
    kept = 0
    for choice in choices:
        try:
            found = _fault(choice, line.get("prompt", "")) or _with_answer(line, asked, choice)
        except ValueError as reason:
            found = str(reason)
        kept += not isinstance(found, str)
        yield found
    if kept:
        yield from (f"{UNREAD}{name[:40]}`" for name in unread_fields(asked, {*REQUEST, *STEERING}))


def redacted(value: Any, patterns: Sequence[re.Pattern[str]]) -> Any:
    """A line with every text that a pattern matches, and a number that one matches, replaced by REDACTED, one pattern
    after the other."""
    if isinstance(value, dict):
        return {
            name if name in NAMES else redacted(name, patterns): one
            if one in USUAL.get(name, ())
            else redacted(one, patterns)
            for name, one in value.items()
        }
    if isinstance(value, list):
        return [redacted(one, patterns) for one in value]
    if value is None or isinstance(value, bool):
        return value
    text = str(value)
    for pattern in patterns:
        text = pattern.sub(REDACTED, text)
    return value if text == str(value) else text


def _object(raw: bytes, fault: str, halves: bool = False) -> dict[str, Any]:
    found = parse_object(raw, halves)
    if isinstance(found, str):
        raise ValueError(fault)
    return found


def _prompt(asked: dict[str, Any]) -> dict[str, Any]:
    prompt = asked["prompt"]
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise ValueError("several prompts, or one of token ids")
    if not prompt:
        raise ValueError("an empty prompt")
    return {"prompt": prompt}


def _messages(asked: dict[str, Any]) -> dict[str, Any]:
    tools = asked.get("tools")
    if tools and asked.get("tool_choice") not in (None, "auto"):
        raise ValueError("a tool call that is forced or forbidden")
    if tools and not has_form(tools, [{}]):
        raise ValueError("tools that are not a list of objects")
    messages = [normal({name: one[name] for name in OF_MESSAGE if name in one}) for one in asked["messages"]]
    if not messages or messages[-1]["role"] == "assistant":
        raise ValueError("no question at the end of the messages")
    line: dict[str, Any] = {"messages": messages}
    if arguments := efforts(asked) | (asked.get("chat_template_kwargs") or {}):  # a TypeError for what is no mapping
        line["chat_template_kwargs"] = arguments
    return line | ({"tools": tools} if tools else {})


def _events(reply: bytes) -> Iterator[dict[str, Any]]:
    """The objects of a reply: one of a whole reply, that of each event of a streamed one.

    A piece of a stream may hold half of a character, and the next one the other half.
    """
    if reply.lstrip()[:1] == b"{":
        yield _object(reply, "a reply that is not a JSON object", halves=True)
        return
    for raw in reply.splitlines():
        name, _, value = raw.partition(b":")
        if name == b"error":
            raise ValueError("an error within the reply")
        if name == b"data" and value.strip() != b"[DONE]":
            yield _object(value, "an event that is not a JSON object", halves=True)


def _choices(kind: str, events: list[dict[str, Any]], several: bool) -> list[dict[str, Any]]:
    """The choices of a reply in their order, put together from their events; ValueError where `several` come in pieces
    that do not say whose they are."""
    found: dict[int, dict[str, Any]] = {}
    usage: dict[str, Any] = {}
    for event in events:
        usage = event.get("usage") or usage
        if event.get("error"):
            raise ValueError("an error within the reply")
        end = LLAMA_ENDS.get(event.get("stop_type"), "unknown")
        own = {"text": event.get("content"), "finish_reason": end}  # llama-server's own API has no choices
        if end == "stop":
            own["stop_reason"] = None  # an end token: stop strings have a type of their own
        for at, piece in enumerate(event.get("choices", [own])):
            new: dict[str, Any] = {"text": [], "more": {}, "calls": {}, "end": None, "fault": "", "model": ""}
            if several and len(events) > 1 and len(event.get("choices", ())) == 1 and "index" not in piece:
                raise ValueError("pieces of several choices without an index")
            one = found.setdefault(piece.get("index", at), new)
            part = piece if kind != CHAT else piece.get("message") or piece.get("delta") or {}
            if part.get("function_call"):
                one["fault"] = "a function_call"
            for name in THINKING if kind == CHAT else ():
                if value := part.get(name):
                    one["more"].setdefault(name, []).append(value)
            for place, call in enumerate(part.get("tool_calls") or () if kind == CHAT else ()):
                _add_call(one["calls"].setdefault(call.get("index", place), {}), call)
            one["text"].append(part.get("text" if kind != CHAT else "content") or "")
            one["end"] = piece.get("finish_reason") or one["end"]
            one["ended_by"] = piece.get("stop_reason", "unknown")  # vLLM: the stop string, None for an end token
            one["model"] = event.get("model") or one["model"]
    if not found:
        raise ValueError("an empty answer")
    counted = usage.get("completion_tokens") if len(found) == 1 else None
    thought = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens")
    for one in found.values():
        one["text"], one["more"] = joined(one["text"]), {name: joined(value) for name, value in one["more"].items()}
        if not isinstance(one["text"], str if kind != CHAT else (str, list)):
            raise TypeError("an answer of another form")
        if one["end"] == "length":  # within a character, whose other bytes the target did not write
            one["text"] = one["text"].rstrip("\ufffd") if isinstance(one["text"], str) else one["text"]
        if thought and not one["more"] and CLOSING not in one["text"]:
            one["fault"] = one["fault"] or "thinking that the server hides"
        one["counted"] = counted if isinstance(counted, int) else None
    return [found[index] for index in sorted(found)]


def joined(pieces: list[Any]) -> Any:
    """One value of those that a stream's events gave a field: their texts, or lists, one after the other.

    A character that came in two halves is one. Where each piece repeats the text before it, the last is the whole;
    ValueError where two pieces may mean that or not, and for half of a character.
    """
    if not all(isinstance(piece, str) for piece in pieces):
        return functools.reduce(operator.add, filter(None, pieces))
    units = [piece.encode("utf-16-le", "surrogatepass") for piece in pieces if piece]
    whole, grown = b"".join(units), [piece for piece, _ in itertools.groupby(units)]
    repeats = len(grown) > 1 and all(later.startswith(piece) for piece, later in itertools.pairwise(grown))
    if repeats and len(grown) == 2:
        raise ValueError("a stream of two pieces, of which the second may repeat the first")
    ends_whole = len(grown) > 2 and grown[-1] == whole.removesuffix(grown[-1])
    try:
        return (grown[-1] if repeats or ends_whole else whole).decode("utf-16-le")
    except UnicodeDecodeError:
        raise ValueError("half of a character (a lone surrogate) in an answer") from None


def _add_call(whole: dict[str, Any], piece: dict[str, Any]) -> None:
    """Add a piece of a tool call: its arguments come as text in pieces, the rest once."""
    function = whole.setdefault("function", {})
    whole |= {name: value for name, value in piece.items() if name not in ("index", "function") and value is not None}
    for name, value in (piece.get("function") or {}).items():
        joined = name == "arguments" and isinstance(value, str)
        function[name] = (
            function.get(name, "") + value if joined else value if value is not None else function.get(name)
        )


def _fault(choice: dict[str, Any], prompt: str) -> str:
    if choice["fault"]:
        return str(choice["fault"])
    if isinstance(choice["text"], str) and (reason := fault_of_text(prompt, choice["text"])):
        return reason
    if choice["end"] is None:
        return "broken off"
    if choice["end"] not in USUAL["finish_reason"]:
        return "another finish reason than stop, length and tool_calls"
    if choice["calls"]:
        return "a tool call that was cut short" if choice["end"] == "length" else ""
    if not choice["text"] and (choice["end"] != "length" or not choice["more"]):
        return "an empty answer"
    return ""


def _with_answer(line: dict[str, Any], asked: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any]:
    """The line of one answer. Behind a stop string the target wrote no end token, so that the reason is not `stop`."""
    end = choice["end"]
    if end == "stop" and (asked.get("stop") or asked.get("stop_token_ids")) and choice["ended_by"] is not None:
        end = "stop_string"
    last = {"finish_reason": end, **({"model": choice["model"]} if choice["model"] else {})}
    last |= {"completion_tokens": choice["counted"]} if choice["counted"] is not None else {}
    if "messages" in line:
        calls = {"tool_calls": [choice["calls"][place] for place in sorted(choice["calls"])]} if choice["calls"] else {}
        answer = normal({"role": "assistant", "content": choice["text"], **choice["more"], **calls})
        return line | {"messages": [*line["messages"], answer], **last}
    return line | {"answer": choice["text"], **last}
