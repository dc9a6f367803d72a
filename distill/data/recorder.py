"""`distill record`: a proxy that passes bytes on, and gives copies of the exchanges to the process that writes them.

Each piece is passed on as it came, and only then parsed. Nothing here can change a reply, or delay it for longer than
parsing one piece takes. One line for each answer, as `answers.traffic` reads them, is made of the bodies of an
exchange. What a line could not hold without loss is left out, with the reason: a prompt that is more than text or
messages (images, token ids), a tool call that the request forced. Thinking that the server parsed out has one name in a
line, whatever the server calls it.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import errno
import functools
import itertools
import json
import operator
import os
import pickle
import random
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import h11

from distill.data import records
from distill.data.records import CLOSING, OF_LINE, THINKING, efforts, fault_of_text, message_of, normal, unread_fields
from distill.data.requests import CHAT, TEXT, steered
from distill.errors import RecipeError, explain_write_fault
from distill.files import has_form, is_utf8, parse_object
from distill.progress import note, noting, warn

# ── The exchanges of one connection ──

MAX_BYTES = 16 * 2**20  # of a request or reply that is recorded
MAX_HEADER_BYTES = 2**16
BROKEN, FULL = "broken off", "a full queue"
COMPLETE = {h11.DONE, h11.MUST_CLOSE, h11.CLOSED}  # states of a side that has sent its whole message
OPT_OUT = b"x-distill-record"  # the header of a request that is not to be recorded; any value but yes


@dataclass
class Exchange:
    """A request for a completion and its reply, or the reason why they are left out.

    `reserve` says whether so many more bytes may be kept; those that `reserved` counts are given back in the end.
    """

    kind: str
    fault: str = ""
    reserve: Callable[[int], bool] = lambda count: True
    request: bytearray = field(default_factory=bytearray)
    reply: bytearray = field(default_factory=bytearray)
    reserved: int = 0

    def add(self, body: bytearray, data: bytes) -> None:
        """Keep a part of a body, while the exchange is one to be kept."""
        if not self.fault and len(body) + len(data) > MAX_BYTES:
            self.fault = "too large"
        if not self.fault and not self.reserve(len(data)):
            self.fault = FULL
        if self.fault:
            self.request.clear()
            self.reply.clear()
            self.release()
        else:
            self.reserved += len(data)
            body += data

    def release(self) -> None:
        """Give back the bytes that were reserved."""
        self.reserve(-self.reserved)
        self.reserved = 0


class Watcher:
    """Gives `take` each successful exchange, and `leave_out` the reason of each other one; raises nothing.

    `sample` is the share of exchanges that are kept, `reserve` as of Exchange. Where h11 cannot read what passes
    (another protocol, several requests at once), the watching ends, not the connection.
    """

    def __init__(
        self,
        take: Callable[[Exchange], None],
        leave_out: Callable[[str], None],
        sample: float = 1.0,
        reserve: Callable[[int], bool] = lambda count: True,
    ) -> None:
        self._take, self._leave_out, self._sample, self._reserve = take, leave_out, sample, reserve
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
            self._exchange.release()
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
            exchange.release()

    def _begin(self, request: h11.Request) -> Exchange | None:
        path = request.target.partition(b"?")[0].rstrip(b"/")
        kind = CHAT if path.endswith(b"/chat/completions") else TEXT
        if request.method != b"POST" or not path.endswith((b"/completions", b"/completion")):
            self._leave_out("other requests")
            return None
        asked = dict(request.headers).get(OPT_OUT, b"yes").strip().lower()
        fault = "not to be recorded" if asked != b"yes" else "" if random.random() < self._sample else "not sampled"
        return Exchange(kind, fault, self._reserve)


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
OF_MESSAGE = ("role", "content", *records.OF_MESSAGE)  # what a template reads of a message
OF_TOOLS = ("id", "type", "function", "arguments", "description", "parameters", "properties", "required")
# What holds no text of a person: the names of a line's own fields, and the values that some of them usually have.
NAMES = frozenset((*OF_LINE, *OF_MESSAGE, *OF_TOOLS))
USUAL = {
    "role": ("system", "developer", "user", "assistant", "tool"),
    "type": ("function", "object", "string", "number", "integer", "boolean", "array"),
    "finish_reason": ("stop", "length", "stop_string", "tool_calls"),
}
SAME_INDEX = "several choices under one index"
LLAMA_ENDS = {"eos": "stop", "limit": "length", "word": "stop_string", None: None, "none": None}


def read_exchange(kind: str, request: bytes, reply: bytes) -> Iterator[dict[str, Any] | str]:
    """A line for each answer of a successful exchange, or the reason why it is left out.

    `reply` is a JSON object or a stream of server-sent events.
    """
    try:
        asked = _object(request, "a request that is not a JSON object")
        if reason := steered(asked, line=False):
            raise ValueError(reason)
        line = _messages(asked) if kind == CHAT else _prompt(asked)
        several = any(asked.get(name) not in (None, 1) for name in ("n", "n_cmpl"))
        choices = _choices(kind, list(_events(reply)), several)
    except ValueError as reason:
        yield str(reason)
        return
    except (AttributeError, KeyError, TypeError):  # a foreign body has any form
        yield "a request or reply of another form"
        return
    for choice in choices:
        try:
            found = _fault(choice, line.get("prompt", "")) or _with_answer(line, asked, choice)
        except ValueError as reason:
            found = str(reason)
        yield found


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
    messages = [_as_asked(one) for one in asked["messages"]]
    if not messages or messages[-1]["role"] == "assistant":
        raise ValueError("no question at the end of the messages")
    line: dict[str, Any] = {"messages": messages}
    if arguments := efforts(asked) | (asked.get("chat_template_kwargs") or {}):  # a TypeError for what is no mapping
        line["chat_template_kwargs"] = arguments
    return line | ({"tools": tools} if tools else {})


def _as_asked(message: dict[str, Any]) -> dict[str, Any]:
    """A message of a request in the form of a line."""
    found = message_of(message, Counter())
    if "parts" in found:
        raise ValueError("a message of several parts")
    if unknown := unread_fields(message, OF_MESSAGE):
        raise ValueError(f"a message with `{unknown[0][:40]}`, a field that is not known")
    return {**{name: found[name] for name in found if name != "weight"}, "role": message["role"]}


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
        pieces = event.get("choices", [own])
        for place, piece in zip(_places(pieces, len(events) == 1, several), pieces, strict=True):
            new: dict[str, Any] = {"text": [], "more": {}, "calls": [], "end": None, "fault": "", "model": ""}
            one = found.setdefault(place, new)
            if several and one["end"] is not None and piece.get("finish_reason"):
                raise ValueError(SAME_INDEX)
            part = piece if kind != CHAT else piece.get("message") or piece.get("delta") or {}
            if part.get("function_call"):
                one["fault"] = "a function_call"
            for name in THINKING if kind == CHAT else ():
                if value := part.get(name):
                    one["more"].setdefault(name, []).append(value)
            for at, call in enumerate(part.get("tool_calls") or () if kind == CHAT else ()):
                _add_call(one["calls"], at, call, whole=len(events) == 1)
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


def _places(pieces: list[dict[str, Any]], whole: bool, several: bool) -> list[int]:
    """The places of an event's choices: their indices, or those in the list of a `whole` reply whose indices are not
    distinct. ValueError where `several` come in pieces that do not say whose they are."""
    found = [piece.get("index", at) for at, piece in enumerate(pieces)]
    if not whole and len(pieces) == 1 and several and "index" not in pieces[0]:
        raise ValueError("pieces of several choices without an index")
    if len(set(found)) == len(found):
        return found
    if not whole:
        raise ValueError(SAME_INDEX)
    return list(range(len(pieces)))


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


def _add_call(calls: list[tuple[int, dict[str, Any]]], at: int, piece: dict[str, Any], whole: bool) -> None:
    """Add a piece of a tool call to the calls, each with its index: arguments come as text in pieces, the rest once.

    Of a `whole` reply each piece is a call. Else an id that is not that of the last call under its index begins another
    one. ValueError for pieces that may be of one call or of two.
    """
    index, function = piece.get("index", at), piece.get("function") or {}
    last = None if whole else next((call for place, call in reversed(calls) if place == index), None)
    name, known = function.get("name"), last and last["function"].get("name")
    another = last is not None and bool(piece.get("id")) and piece["id"] != last.get("id")
    if another and not (name and last and last.get("id")):
        raise ValueError(MIXED_CALLS)
    if last is None or another:
        last, known = {"function": {}}, None
        calls.append((index, last))
    if name and known and (name != known or not piece.get("id")):
        raise ValueError(MIXED_CALLS)
    own = last["function"]
    last |= {key: value for key, value in piece.items() if key not in ("index", "function") and value not in (None, "")}
    for key, value in function.items():
        if key == "arguments" and value and isinstance(own.get(key), dict):
            raise ValueError(MIXED_CALLS)  # a second object, or text behind one
        text = key == "arguments" and isinstance(value, str)
        own[key] = (own.get(key) or "") + value if text else own.get(key) if value is None else value


MIXED_CALLS = "pieces of tool calls that cannot be told apart"


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
        calls = {"tool_calls": [call for _, call in choice["calls"]]} if choice["calls"] else {}
        answer = normal({"role": "assistant", "content": choice["text"], **choice["more"], **calls})
        return line | {"messages": [*line["messages"], answer], **last}
    return line | {"answer": choice["text"], **last}


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
QUEUE_BYTES = 64 * 2**20  # of open exchanges, and of those that wait to be written
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
        self._handed = self._held = 0
        self._queue: asyncio.StreamWriter | None = None
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
        self._open[task] = watcher = Watcher(self._take, self._leave_out, self.settings.sample, self._reserve)
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

    def _reserve(self, count: int) -> bool:
        """Whether `count` more bytes of open exchanges may be kept beside all others and those that wait."""
        waiting = 0 if self._queue is None else self._queue.transport.get_write_buffer_size()
        if count > 0 and self._held + count + waiting > self.queue_bytes:
            return False
        self._held += count
        return True

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
            self._leave_out(FULL)
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
    left = {reason: count for reason, count in counts.most_common() if reason not in NOT_LEFT_OUT}
    kept = f"kept {counts[KEPT]} answers, {counts[BYTES] / 1e6:.1f} MB in {counts[FILES]} files"
    reasons = ", ".join(f"{reason} {count}" for reason, count in left.items())
    return f"{kept}; left out {sum(left.values())}" + (f": {reasons}" if reasons else "")


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
