"""`distill record`: a proxy that passes bytes on, and gives copies of the exchanges to the process that writes them.

Each piece is passed on unchanged and parsed afterwards. The proxy cannot change a reply, and delays it by no more than
the parsing of one piece. Each answer becomes a line that `answers.traffic` reads. An answer that no line can hold
without loss is left out with a reason, such as a prompt with images or token ids, or a tool call that the request
forced. Thinking that the server parsed out has the same name in all lines.
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

MAX_BYTES = 16 * 2**20  # of a recorded request or reply
MAX_HEADER_BYTES = 2**16
BROKEN, FULL = "broken off", "a full queue"
COMPLETE = {h11.DONE, h11.MUST_CLOSE, h11.CLOSED}  # states of a side that has sent its whole message
OPT_OUT = b"x-distill-record"  # A request with this header and another value than yes is not recorded.


@dataclass
class Exchange:
    """A request for a completion and its reply, or the fault for which they are left out.

    `reserve` returns whether a number of further bytes may be kept. `reserved` bytes are released in the end.
    """

    kind: str
    fault: str = ""
    reserve: Callable[[int], bool] = lambda count: True
    request: bytearray = field(default_factory=bytearray)
    reply: bytearray = field(default_factory=bytearray)
    reserved: int = 0

    def add(self, body: bytearray, data: bytes) -> None:
        """Keep a part of a body, unless the exchange has a fault."""
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
        """Release the reserved bytes."""
        self.reserve(-self.reserved)
        self.reserved = 0


class Watcher:
    """Calls `take` with each successful exchange, and `leave_out` with the reason for any other. Raises nothing.

    `sample` is the share of exchanges that are kept. `reserve` is that of Exchange. If h11 cannot read the bytes
    (another protocol, several requests at once), the watching ends and the connection goes on.
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
        # Each side "sends" the events that the other side reads, so that both know the state of the exchange. Each
        # exchange has new sides, because h11 takes an HTTP/1.0 exchange for the last of its connection.
        self._requests = h11.Connection(h11.SERVER, MAX_HEADER_BYTES)
        self._replies = h11.Connection(h11.CLIENT, MAX_HEADER_BYTES)

    @property
    def busy(self) -> bool:
        """Whether a reply that can be read is under way."""
        return not self._lost and self._requests.our_state in (h11.SEND_RESPONSE, h11.SEND_BODY)

    def sent(self, data: bytes) -> None:
        """Read bytes of the client. No bytes mean that it sends no more."""
        self._feed("_requests", data)

    def replied(self, data: bytes) -> None:
        """Read bytes of the server. No bytes mean that it sends no more."""
        self._feed("_replies", data)

    def close(self) -> None:
        """Note the end of the connection."""
        self._lose(BROKEN)

    def _lose(self, reason: str) -> None:
        """End the watching, and count the reason unless the connection has ended between two exchanges."""
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
                data = side.trailing_data[0]  # after the exchange that has ended
                if not data:
                    return
        except h11.ProtocolError:
            self._lose("HTTP that h11 does not read" if data else BROKEN)
        except Exception as error:  # A bug in distill must not end a reply.
            self._lose(f"a fault in distill ({type(error).__name__})")

    def _read(self, side: h11.Connection, other: h11.Connection) -> None:
        while not self._lost:
            event = side.next_event()
            if event is h11.NEED_DATA:
                return
            if event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
                if event is h11.PAUSED and side.trailing_data[0]:  # Unread bytes would gather in memory.
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
                exchange.fault = BROKEN  # The server did not wait for the whole request.
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
    """The event in HTTP/1.1. h11 reads HTTP/1.0 and sends HTTP/1.1, whose requests name a host."""
    if getattr(event, "http_version", b"1.1") == b"1.1":
        return event
    headers = event.headers.raw_items()
    if isinstance(event, h11.Request):
        headers += [] if b"host" in dict(event.headers) else [(b"host", b"x")]
        return h11.Request(method=event.method, headers=headers, target=event.target)
    return type(event)(status_code=event.status_code, headers=headers, reason=event.reason)


# ── From bodies to lines ──

REDACTED = "[redacted]"
OF_MESSAGE = ("role", "content", *records.OF_MESSAGE)  # fields of a message that a template reads
OF_TOOLS = ("id", "type", "function", "arguments", "description", "parameters", "properties", "required")
# Names of a line's fields, and usual values of these fields. They hold no text of a person.
NAMES = frozenset((*OF_LINE, *OF_MESSAGE, *OF_TOOLS))
USUAL = {
    "role": ("system", "developer", "user", "assistant", "tool"),
    "type": ("function", "object", "string", "number", "integer", "boolean", "array"),
    "finish_reason": ("stop", "length", "stop_string", "tool_calls"),
}
SAME_INDEX = "several choices under one index"
LLAMA_ENDS = {"eos": "stop", "limit": "length", "word": "stop_string", None: None, "none": None}


def read_exchange(kind: str, request: bytes, reply: bytes) -> Iterator[dict[str, Any] | str]:
    """Yield a line for each answer of a successful exchange, or the reason why the answer is left out.

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
    except (AttributeError, KeyError, TypeError):  # A foreign body has any form.
        yield "a request or reply of another form"
        return
    for choice in choices:
        try:
            yield _fault(choice, line.get("prompt", "")) or _with_answer(line, asked, choice)
        except ValueError as reason:
            yield str(reason)


def redacted(value: Any, patterns: Sequence[re.Pattern[str]]) -> Any:
    """A line in which REDACTED replaces each match of the patterns in texts, and each number with a match."""
    if isinstance(value, dict):
        return {
            name if name in NAMES else redacted(name, patterns): inner
            if inner in USUAL.get(name, ())
            else redacted(inner, patterns)
            for name, inner in value.items()
        }
    if isinstance(value, list):
        return [redacted(inner, patterns) for inner in value]
    if value is None or isinstance(value, bool):
        return value
    text = str(value)
    for pattern in patterns:
        text = pattern.sub(REDACTED, text)
    return value if text == str(value) else text


def _object(raw: bytes, fault: str, halves: bool = False) -> dict[str, Any]:
    content = parse_object(raw, halves)
    if isinstance(content, str):
        raise ValueError(fault)
    return content


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
    messages = [_as_asked(message) for message in asked["messages"]]
    if not messages or messages[-1]["role"] == "assistant":
        raise ValueError("no question at the end of the messages")
    line: dict[str, Any] = {"messages": messages}
    if arguments := efforts(asked) | (asked.get("chat_template_kwargs") or {}):  # TypeError if it is no mapping
        line["chat_template_kwargs"] = arguments
    return line | ({"tools": tools} if tools else {})


def _as_asked(message: dict[str, Any]) -> dict[str, Any]:
    """A message of a request in the form of a line."""
    read = message_of(message, Counter())
    if "parts" in read:
        raise ValueError("a message of several parts")
    if unknown := unread_fields(message, OF_MESSAGE):
        raise ValueError(f"a message with `{unknown[0][:40]}`, a field that is not known")
    return {**{name: read[name] for name in read if name != "weight"}, "role": message["role"]}


def _events(reply: bytes) -> Iterator[dict[str, Any]]:
    """The object of a whole reply, or the objects of a stream's events.

    An event may hold half of a character, and the next event the other half.
    """
    if reply.lstrip()[:1] == b"{":
        yield _object(reply, "a reply that is not a JSON object", halves=True)
        return
    for raw in reply.splitlines():
        name, _, value = raw.partition(b":")
        if name == b"error" or (name == b"event" and value.strip() == b"error"):
            raise ValueError("an error within the reply")
        if name == b"data" and value.strip() != b"[DONE]":
            yield _object(value, "an event that is not a JSON object", halves=True)


def _choices(kind: str, events: list[dict[str, Any]], several: bool) -> list[dict[str, Any]]:
    """The choices of a reply in their order, joined from their events.

    ValueError if `several` choices come in pieces that cannot be told apart.
    """
    choices: dict[int, dict[str, Any]] = {}
    usage: dict[str, Any] = {}
    for event in events:
        usage = event.get("usage") or usage
        if event.get("error"):
            raise ValueError("an error within the reply")
        end = LLAMA_ENDS.get(event.get("stop_type"), "unknown")
        native = {"text": event.get("content"), "finish_reason": end}  # llama-server's native API has no choices.
        if end == "stop":
            native["stop_reason"] = None  # an end token, because stop strings have another type
        pieces = event.get("choices", [native])
        for place, piece in zip(_places(pieces, len(events) == 1, several), pieces, strict=True):
            new: dict[str, Any] = {"text": [], "more": {}, "calls": [], "end": None, "fault": "", "model": ""}
            choice = choices.setdefault(place, new)
            if several and choice["end"] is not None and piece.get("finish_reason"):
                raise ValueError(SAME_INDEX)
            part = piece if kind != CHAT else piece.get("message") or piece.get("delta") or {}
            if kind == CHAT and (unknown := unread_fields(part, OF_MESSAGE)):
                choice["fault"] = f"an answer with `{unknown[0][:40]}`, a field that is not known"
            for name in THINKING if kind == CHAT else ():
                if value := part.get(name):
                    choice["more"].setdefault(name, []).append(value)
            for at, call in enumerate(part.get("tool_calls") or () if kind == CHAT else ()):
                _add_call(choice["calls"], at, call, whole=len(events) == 1)
            choice["text"].append(part.get("text" if kind != CHAT else "content") or "")
            choice["end"] = piece.get("finish_reason") or choice["end"]
            choice["ended_by"] = piece.get("stop_reason", "unknown")  # vLLM: the stop string, None for an end token
            choice["model"] = event.get("model") or choice["model"]
    if not choices:
        raise ValueError("an empty answer")
    counted = usage.get("completion_tokens") if len(choices) == 1 else None
    thought = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens")
    for choice in choices.values():
        choice["text"] = joined(choice["text"])
        choice["more"] = {name: joined(value) for name, value in choice["more"].items()}
        if not isinstance(choice["text"], str if kind != CHAT else (str, list)):
            raise TypeError("an answer of another form")
        if choice["end"] == "length" and isinstance(choice["text"], str):
            choice["text"] = choice["text"].rstrip("\ufffd")  # The limit cut a character.
        if thought and not choice["more"] and CLOSING not in choice["text"]:
            choice["fault"] = choice["fault"] or "thinking that the server hides"
        choice["counted"] = counted if isinstance(counted, int) else None
    return [choices[index] for index in sorted(choices)]


def _places(pieces: list[dict[str, Any]], whole: bool, several: bool) -> list[int]:
    """The places of an event's choices: their indices, or their order in a `whole` reply if two indices are equal.

    ValueError if `several` choices come in pieces that cannot be told apart.
    """
    places = [piece.get("index", at) for at, piece in enumerate(pieces)]
    if not whole and len(pieces) == 1 and several and "index" not in pieces[0]:
        raise ValueError("pieces of several choices without an index")
    if len(set(places)) == len(places):
        return places
    if not whole:
        raise ValueError(SAME_INDEX)
    return list(range(len(pieces)))


def joined(pieces: list[Any]) -> Any:
    """Join the values that a stream's events gave a field: texts or lists.

    The two halves of a character are joined. If each piece repeats the text before it, the last piece is the whole.
    ValueError if two pieces may or may not be repeated so, and for half of a character.
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
    """Add a piece of a tool call to the calls with their indices. Arguments come as text in pieces, other fields once.

    Each piece of a `whole` reply is a call. In a stream, another id under the same index begins another call.
    ValueError for pieces that may belong to one call or to two.
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
    joined_function = last["function"]
    last |= {key: value for key, value in piece.items() if key not in ("index", "function") and value not in (None, "")}
    for key, value in function.items():
        before = joined_function.get(key)
        if key == "arguments" and value and isinstance(before, dict):
            raise ValueError(MIXED_CALLS)  # a second object, or text after an object
        text = key == "arguments" and isinstance(value, str)
        joined_function[key] = (before or "") + value if text else before if value is None else value


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
    """The line of an answer. The target writes no end token before a stop string, so the reason is then not `stop`."""
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
# JSON and regular expressions hold Python's lock, and a bad pattern holds it for minutes. A separate process keeps
# replies from waiting. Nothing is written before it is redacted. After each exchange, stdout has the counts as a
# line of JSON. The process ends with its stdin.

TAKEN, KEPT, BYTES, FILES = "exchanges", "kept", "bytes", "files"
FAILED = "a failed write"
MAX_REASONS, OTHER = 100, "other reasons"  # More reasons are not named, because hostile requests have new fields.
FILE_BYTES = 64_000_000  # of a full file
BINARY = getattr(os, "O_BINARY", 0)  # Without it, Windows writes two characters for each newline.


class Writer:
    """Files `traffic-TIME.jsonl` in a folder, mode 0600, of at most FILE_BYTES. No file is ever deleted.

    Names grow with time and are never used twice, so that a reader recognises a file. Files hold whole lines. The part
    of a line that a failed write leaves is removed. `counts` has what was kept, and what was left out by reason.
    """

    def __init__(self, folder: Path, patterns: Sequence[str]) -> None:
        self.folder = folder
        self.patterns = [re.compile(pattern) for pattern in patterns]
        self.counts: Counter[str] = Counter()
        self._file: int | None = None
        self._path = folder
        self._size = 0

    def take(self, kind: str, request: bytes, reply: bytes) -> None:
        """Write the answers of one exchange (see read_exchange). A disk fault is warned of once, and counted."""
        self.counts[TAKEN] += 1
        try:
            answers = [redacted(answer, self.patterns) for answer in read_exchange(kind, request, reply)]
            lines = [answer if isinstance(answer, str) else _encoded(answer) for answer in answers]
        except Exception as error:  # A body, such as one that is nested too deeply, must not end the process.
            lines = [f"a fault in distill ({type(error).__name__})"]
        for line in lines:
            if isinstance(line, str):
                self.counts[line if line in self.counts or len(self.counts) < MAX_REASONS else OTHER] += 1
                continue
            try:
                self._write(line + b"\n")
            except OSError as error:
                if not self.counts[FAILED]:
                    fault = explain_write_fault(self._path, error).what
                    warn(f"distill record: {fault}; replies go on, and answers that cannot be written are left out")
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
                self.close()  # The half line stays the last line of its file, which readers skip.
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
        """End the file. The next line begins another file."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
        self._file = None


def _encoded(line: dict[str, Any]) -> bytes | str:
    """The bytes of a line, or the reason why it cannot be written."""
    text = json.dumps(line, ensure_ascii=False)
    return text.encode() if is_utf8(text) else "half of a character (a lone surrogate)"


def read_exchanges(source: BinaryIO) -> Iterator[tuple[str, bytes, bytes]]:
    """Kind, request and reply of each exchange that the proxy has pickled. An incomplete last exchange is skipped."""
    with contextlib.suppress(EOFError, pickle.UnpicklingError):
        while True:
            yield pickle.load(source)


def main() -> None:
    """Write the exchanges from stdin, after a line of JSON with the folder and the patterns."""
    for number in (signal.SIGINT, signal.SIGTERM):  # They go to the whole group. The proxy ends this process by stdin.
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):  # Windows has no such call.
        os.nice(5)  # The server has priority.
    folder, patterns = json.loads(sys.stdin.buffer.readline())
    writer = Writer(Path(folder), patterns)
    for exchange in read_exchanges(sys.stdin.buffer):
        writer.take(*exchange)
        print(json.dumps(writer.counts), flush=True)
    writer.close()


# ── The proxy ──

MODULE = "distill.data.recorder"
PIECE_BYTES = 2**16
QUEUE_BYTES = 64 * 2**20  # of open exchanges and of exchanges that wait to be written
PARTING_SECONDS = 10.0  # for replies under way and for waiting exchanges when the command ends
PROGRESS_SECONDS = 10.0
MAX_OPEN_FILES = 65_536
UNREACHED, ENDED, LATE = "the server cannot be reached", "no process that writes", "too late to be written"
NOT_LEFT_OUT = (TAKEN, KEPT, BYTES, FILES)


@dataclass(frozen=True)
class Recording:
    """Settings of `record`: the addresses of the server and of the proxy, and the folder to write to.

    Matches of the regular expressions in `patterns` are redacted. `sample` is the share of exchanges that are kept.
    """

    upstream: tuple[str, int]
    listen: tuple[str, int]
    folder: Path
    patterns: tuple[str, ...] = ()
    sample: float = 1.0


class Proxy:
    """Connections to one server, and the process that writes their exchanges."""

    def __init__(self, settings: Recording, queue_bytes: int = QUEUE_BYTES) -> None:
        self.settings, self.queue_bytes = settings, queue_bytes
        self._own: Counter[str] = Counter()
        self._written: Counter[str] = Counter()
        self._handed = self._held = 0
        self._queue: asyncio.StreamWriter | None = None
        self._open: dict[asyncio.Task[None], Watcher] = {}

    @property
    def counts(self) -> Counter[str]:
        """Written answers, bytes and files, and the number of exchanges or answers left out for each reason."""
        return self._own + self._written

    async def run(self, stop: asyncio.Event, ready: Callable[[int], None]) -> None:
        """Serve until `stop` is set, then wait for replies under way. `ready` is called with the port.

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
            start_new_session=True,  # Ctrl-C reaches the proxy alone.
        )
        self._queue = self._process.stdin
        assert self._queue is not None
        self._queue.write(json.dumps([str(self.settings.folder), self.settings.patterns]).encode() + b"\n")
        reading, showing = asyncio.create_task(self._read_counts()), asyncio.create_task(self._show())
        await server.start_serving()
        ready(server.sockets[0].getsockname()[1])
        await stop.wait()
        server.close()
        await self._part()
        self._queue.close()
        try:
            await asyncio.wait_for(asyncio.gather(reading, self._process.wait()), PARTING_SECONDS)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        if lost := self._handed - self._written[TAKEN]:
            warn(f"distill record: {lost} exchanges are lost: does a pattern of --redact, or the disk, take too long?")
            self._own[LATE] = lost
        showing.cancel()

    async def _part(self) -> None:
        """End connections. A reply under way may take PARTING_SECONDS more."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PARTING_SECONDS
        busy = sum(watcher.busy for watcher in self._open.values())
        if busy:
            note(f"replies under way: {busy}; another signal ends them")
        cancelled: set[asyncio.Task[None]] = set()
        while self._open:
            for task, watcher in self._open.items():
                if loop.time() > deadline or not (watcher.busy or task in cancelled):
                    cancelled.add(task)
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
            finally:  # The server has ended the connection, or the client is gone and the server must stop.
                there.cancel()
                server_out.transport.abort()
        except asyncio.CancelledError:
            pass  # by _part
        finally:
            watcher.close()
            client_out.close()
            with contextlib.suppress(OSError, asyncio.CancelledError):  # until the client has received everything
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
                    while await client_in.read(PIECE_BYTES):  # Closing with unread bytes would lose the reply.
                        pass

    def _leave_out(self, reason: str) -> None:
        self._own[reason] += 1

    def _reserve(self, count: int) -> bool:
        """Whether `count` more bytes of open exchanges may be kept."""
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
                await asyncio.to_thread(note, f"so far: {summary(shown)}")  # Perhaps nobody reads stderr.


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, look: Callable[[bytes], None]) -> None:
    """Send on all bytes and the end. If one side is gone, the other side's connection is aborted."""
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
    """Proxy and record in the main thread until SIGINT or SIGTERM. Return the counts. See Proxy.run."""
    proxy = Proxy(settings)

    async def serve() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        with noting(lambda number: loop.call_soon_threadsafe(stop.set)):
            await proxy.run(stop, ready)

    _allow_connections()
    asyncio.run(serve())
    return proxy.counts


def _allow_connections() -> None:
    """Raise this process's limit of open files, because each connection takes two."""
    try:
        import resource
    except ImportError:  # Windows has no such limit.
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (max(soft, min(hard, MAX_OPEN_FILES)) if hard > 0 else MAX_OPEN_FILES, hard)
        )
