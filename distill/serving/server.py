"""A server under test: requests to it, streamed and timed, with one message for each fault; and llama-server, started
on a free port of loopback for as long as a `with` block lasts."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from distill.engines.server_commands import pair_arguments
from distill.errors import RecipeError, ServingError
from distill.http import KEYLESS, Form, HttpClient, Received, Unanswered, proxy_hint
from distill.recipe.measuring import SHORT

# ── Requests ──

CONNECTIONS = 256
NEITHER = "is this the address of llama-server or vLLM (--url)?"


class Event(BaseModel):
    """An event of a streamed reply, which may report a fault instead of tokens."""

    error: Any = None


SomeEvent = TypeVar("SomeEvent", bound=Event)


class Http:
    """Requests to one address. No request is retried, because a failure is a finding. Threads may share an Http.

    A reply may take `seconds`. `death` returns how the server's process ended, with its last lines. It returns None
    while the process runs, and for a process that was not started here. `key` names the environment variable that holds
    the server's key.
    """

    def __init__(
        self, url: str, seconds: float, key: str | None = None, death: Callable[[], str | None] = lambda: None
    ) -> None:
        self.url, self.seconds, self.death = url.rstrip("/").removesuffix("/v1"), seconds, death
        self.client = HttpClient(seconds, CONNECTIONS, key, "--key")

    def get(self, path: str, body: dict[str, Any] | None = None) -> Received:
        """A reply of any status to a GET, or to a POST of a body. ServingError without a reply."""
        try:
            return self.client.send(self.url + path, body)
        except Unanswered as fault:
            raise self._unanswered(fault.reason) from None

    def read(self, path: str, form: type[Form], body: dict[str, Any] | None = None) -> Form:
        """The JSON object of the server's reply. ServingError for any other reply."""
        return self._read(path, self._succeeded(path, body).content, form)

    def find(self, path: str, form: type[Form]) -> Form:
        """The JSON object at a path, or an empty form. ServingError for a missing key."""
        received = self.get(path)
        if received.status in KEYLESS:
            raise self._refused(path, received.status, received.content)
        with contextlib.suppress(Unanswered):
            if received.status == 200:
                return self.client.read(received.content, form)
        return form()

    def stream(self, path: str, form: type[SomeEvent], body: dict[str, Any]) -> tuple[list[SomeEvent], Received]:
        """The events of a streamed reply.

        Events are parsed after the last event, so that this client takes little time from a server on this machine.
        """
        received, events = self._succeeded(path, body), list[SomeEvent]()
        for line in received.content.splitlines():
            name, colon, value = line.partition(b":")
            if not colon or value.strip() == b"[DONE]" or name not in (b"data", b"error"):
                continue
            event = self._read(path, value, form)
            if name == b"error" or event.error is not None:
                raise self._refused(path, received.status, value)
            events.append(event)
        if not events:
            raise self._unreadable(path, received.content)
        return events, received

    def words(self, content: bytes) -> str:
        """The server's message in a reply, without its key."""
        return self.client.words(content)

    def _succeeded(self, path: str, body: dict[str, Any] | None) -> Received:
        received = self.get(path, body)
        if received.status != 200:
            raise self._refused(path, received.status, received.content)
        return received

    def _read(self, path: str, content: bytes, form: type[Form]) -> Form:
        try:
            return self.client.read(content, form)
        except Unanswered:
            raise self._unreadable(path, content) from None

    def _unreadable(self, path: str, content: bytes) -> ServingError:
        """The error for a reply whose form is neither llama-server's nor vLLM's."""
        what = f"{self.url}{path} sent a reply that is neither llama-server's nor vLLM's: {self.words(content)}"
        return ServingError(what, NEITHER)

    def _unanswered(self, reason: str) -> ServingError:
        if reason == "no reply in time":
            hint = "ask for fewer --tokens, or wait longer (--wait)"
            return ServingError(f"{self.url} did not answer within {self.seconds:g} s", hint)
        for _ in range(20):  # The death of a process shows a moment later.
            death = self.death()
            if death is not None:
                return ServingError(f"the server died under a request: {death}", "see why in its last lines")
            time.sleep(0.01)
        if reason == "no connection":
            hint = f"start the server, or correct --url{proxy_hint(self.url)}"
            return ServingError(f"{self.url} cannot be reached", hint)
        return ServingError(f"{self.url} broke the connection under a request", "see its log: it may have died")

    def _refused(self, path: str, status: int, content: bytes) -> ServingError:
        """The error for a request that the server refused, with the server's message."""
        text, hint = self.words(content), "see the server's log"
        if status in KEYLESS:
            hint = "name the environment variable that holds its key: --key NAME"
        elif status == 404:
            hint = NEITHER
        elif "context" in text or "max_model_len" in text:
            hint = "give shorter prompts, fewer --tokens, or start the server with a larger context"
        what = f"{self.url}{path} refused a request (status {status}): {text}"
        return ServingError(what, f"{hint}{proxy_hint(self.url)}")

    def close(self) -> None:
        """Free the connections."""
        self.client.close()


# ── llama-server ──

HOST = "127.0.0.1"
TAIL_LINES = 8  # of a server's log in a message
STOP_SECONDS = 10.0
KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows has no SIGKILL.
POLL_SECONDS, HEALTH_SECONDS = 0.02, 2.0
HELP_SECONDS = 60.0  # A program may load a driver before it prints its options.
PARENT_DEATH = 1  # prctl's PR_SET_PDEATHSIG
# One cache for all slots is llama-server's default if it chooses the number of slots. `--parallel` alone gives each
# slot a cache. llama.cpp then decodes only neighbouring slots together, and two busy slots of 32 may take two passes
# over the weights.
UNIFIED = "--kv-unified"
PORTS = 3  # Another process may take a free port before the server does.


@functools.cache
def _options(binary: Path) -> str:
    """The text that a program prints about its options. Empty without such a text."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        shown = subprocess.run([str(binary), "--help"], capture_output=True, timeout=HELP_SECONDS, check=False)
        return (shown.stdout + shown.stderr).decode("utf-8", "replace")
    return ""


@dataclass(frozen=True)
class LlamaServer:
    """Settings to start a llama-server. Without `draft` it decodes plainly.

    The server takes `parallel` requests at once, each with a context of `context` tokens. `probabilistic` drafts are
    drawn from the draft and verified by rejection sampling. Otherwise the draft's best tokens are drafted. `further`
    are the user's arguments. They come last, and the last value of an option counts.
    """

    binary: Path
    target: Path
    draft: Path | None = None
    n_max: int = 4
    p_min: float | None = None
    probabilistic: bool = False
    threads: int | None = None
    parallel: int = 1
    context: int = 512
    further: tuple[str, ...] = ()

    @property
    def plain(self) -> LlamaServer:
        """The same server without a draft."""
        return replace(self, draft=None)

    @property
    def title(self) -> str:
        """The server's name in tables."""
        if self.draft is None:
            return "plain"
        floor = f", p_min {self.p_min:g}" if self.p_min else ""
        return f"n_max {self.n_max}{floor}{', probabilistic' if self.probabilistic else ''}"

    def has(self, option: str) -> bool:
        """Whether this build's list of options has an option."""
        return option in _options(self.binary)

    @property
    def served(self) -> list[str]:
        """The arguments that a user cares about: models, drafting, and the user's options."""
        drafts = self.draft is not None
        draft = str(self.draft) if drafts else None
        pair = pair_arguments(str(self.target), draft, self.n_max, self.p_min, self.probabilistic)
        further = self.further if drafts else without_options(self.further, is_of_draft)
        return [*pair, *further]

    def command(self, port: int) -> list[str]:
        """The whole command line."""
        arguments = ["--host", HOST, "--port", str(port), "--parallel", str(self.parallel)]
        arguments += ["--ctx-size", str(self.context * self.parallel), "--metrics", "--no-ui", "--cache-ram", "0"]
        arguments += [UNIFIED] if self.parallel > 1 and self.has(UNIFIED) else []
        if self.threads is not None:
            arguments += ["--threads", str(self.threads)]
        return [str(self.binary), *arguments, *self.served]


OF_DRAFT_SHORT = {"-md", "-otd", "-cmoed", "-ncmoed", *(f"-{short}d" for short in SHORT.values())}


def is_of_draft(option: str) -> bool:
    """Whether an option of llama-server concerns the draft. Such an option alone makes the server load a draft."""
    return option.startswith("--spec-") or option.endswith("-draft") or option in OF_DRAFT_SHORT


def without_options(arguments: Sequence[str], dropped: Callable[[str], bool]) -> tuple[str, ...]:
    """The user's arguments without the `dropped` options and their values."""
    kept, rest = [], list(arguments)
    while rest:
        argument = rest.pop(0)
        if not dropped(argument):
            kept.append(argument)
        elif rest and not re.match(r"-[a-zA-Z-]", rest[0]):
            rest.pop(0)
    return tuple(kept)


@dataclass(frozen=True)
class Running:
    """A started server: its address, process and log."""

    url: str
    settings: LlamaServer
    process: subprocess.Popen[bytes]
    log: Path

    def text(self) -> str:
        """The whole log."""
        with contextlib.suppress(OSError):
            return self.log.read_text(encoding="utf-8", errors="replace")
        return ""

    def tail(self) -> str:
        """The last lines of the log, indented, for a message."""
        lines = [line for line in self.text().splitlines() if line.strip()][-TAIL_LINES:]
        return "\n".join(f"    {line[:200]}" for line in lines) or "    (it wrote nothing)"

    def death(self) -> str | None:
        """The signal or status with which the process ended. None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(timeout=0)
            return f"signal {-code}" if code < 0 else f"status {code}"
        return None


def require_binary(binary: Path) -> Path:
    """The path of a program. RecipeError if it is missing or cannot be run."""
    place = shutil.which(binary)
    if place is None:
        hint = "give the path of llama-server (scripts/build_llama_cpp.sh builds one)"
        raise RecipeError(f"--server {binary}: there is no such program, or it cannot be run", hint)
    return Path(place)


@contextlib.contextmanager
def started(settings: LlamaServer, seconds: float) -> Iterator[Running]:
    """A healthy server. It ends with the block and with this process, for whatever reason these end.

    Raises ServingError, with the last lines of the log, if the server exits or is not healthy after `seconds`.
    """
    with tempfile.TemporaryDirectory(prefix="distill-serve-") as folder:
        for attempt in range(PORTS):
            port = free_port()
            log = Path(folder) / f"server-{attempt}.log"
            running = Running(f"http://{HOST}:{port}", settings, _spawn(settings, port, log), log)
            try:
                if _wait_healthy(running, seconds, last=attempt == PORTS - 1):
                    yield running
                    return
            finally:
                _stop(running.process)


def free_port() -> int:
    """A free port of loopback."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


def _spawn(settings: LlamaServer, port: int, log: Path) -> subprocess.Popen[bytes]:
    try:
        with log.open("wb") as file:
            return subprocess.Popen(
                settings.command(port),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C must not end the server during a request.
                preexec_fn=_tie_to_parent(),
            )
    except OSError as error:
        hint = "give a llama-server built for this machine"
        raise ServingError(f"{settings.binary} cannot be started: {error.strerror}", hint) from None


def _tie_to_parent() -> Callable[[], object] | None:
    """A function that makes Linux kill the server when this process dies. None on other systems."""
    if not sys.platform.startswith("linux"):
        return None
    # The library is loaded here, because the forked child must not load anything.
    return functools.partial(ctypes.CDLL(None).prctl, PARENT_DEATH, signal.SIGKILL)


def _wait_healthy(running: Running, seconds: float, last: bool) -> bool:
    """Wait until the server is healthy. False if another process took its port and another port can be tried."""
    deadline = time.monotonic() + seconds
    with contextlib.closing(HttpClient(HEALTH_SECONDS, 1)) as client:
        while time.monotonic() < deadline:
            death = running.death()
            if death is not None:
                if not last and "bind" in running.text():
                    return False
                raise _exited(running, death)
            with contextlib.suppress(Unanswered):
                if client.send(f"{running.url}/health").status == 200:
                    if running.death() is None:
                        return True
                    continue  # Another server answers at this port.
            time.sleep(POLL_SECONDS)
    raise ServingError(
        f"{shlex.join(running.settings.command(0))[:600]}\n  was not healthy after {seconds:g} s; its last lines:\n"
        f"{running.tail()}",
        "wait longer (--wait), or start it by hand and give its address (--url)",
    )


def _exited(running: Running, death: str) -> ServingError:
    log, settings = running.text(), running.settings
    hint = "correct the options, or start the command by hand"
    if "bind" in log and "port" in log:
        hint = "another program listens at this port: leave --port out, or give another"
    elif found := re.search(r"(?:invalid|unknown) argument: (\S+)", log):
        hint = f"this server does not know {found[1]}: see `{settings.binary} --help`"
    elif "has been removed" in log:
        hint = "this build no longer has that option; its message names the one in its place"
    elif "failed to load" in log or "error loading model" in log:
        hint = "the file is damaged, or this build is too old for it"
    return ServingError(f"{settings.binary} ended at once ({death}); its last lines:\n{running.tail()}", hint)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and the processes that a program around it has started. Kill them if SIGTERM does not."""
    try:
        _signal(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
    finally:  # A second signal must not leave the server running.
        _signal(process, KILL)
        process.wait()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to the process group of a server. On Windows, the process alone gets it."""
    with contextlib.suppress(OSError):
        if sys.platform == "win32":
            process.terminate()
        else:
            os.killpg(process.pid, number)
