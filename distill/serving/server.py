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
    """Requests to one address, of which none is sent again: a failed one is a finding. Threads may share it.

    `seconds` are those that a reply may take. `death` says how the server's process ended and shows its last lines,
    None while it runs or where it is not ours. `key` names the environment variable that holds the server's key.
    """

    def __init__(
        self, url: str, seconds: float, key: str | None = None, death: Callable[[], str | None] = lambda: None
    ) -> None:
        self.url, self.seconds, self.death = url.rstrip("/").removesuffix("/v1"), seconds, death
        self.client = HttpClient(seconds, CONNECTIONS, key, "--key")

    def get(self, path: str, body: dict[str, Any] | None = None) -> Received:
        """A reply of any status, to a POST of a body where there is one; ServingError where none comes."""
        try:
            return self.client.send(self.url + path, body)
        except Unanswered as fault:
            raise self._unanswered(fault.reason) from None

    def read(self, path: str, form: type[Form], body: dict[str, Any] | None = None) -> Form:
        """The JSON object that the server replies with; ServingError for anything else."""
        return self._read(path, self._succeeded(path, body).content, form)

    def find(self, path: str, form: type[Form]) -> Form:
        """The JSON object at a path, empty where there is none; ServingError for a missing key."""
        received = self.get(path)
        if received.status in KEYLESS:
            raise self._refused(path, received.status, received.content)
        with contextlib.suppress(Unanswered):
            if received.status == 200:
                return self.client.read(received.content, form)
        return form()

    def stream(self, path: str, form: type[SomeEvent], body: dict[str, Any]) -> tuple[list[SomeEvent], Received]:
        """The events of a streamed reply.

        Events are parsed after the last one, so that this client takes little time from a server on the same machine.
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
        """What the server says in a reply, without its key."""
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
        """The fault of a reply whose form is none of llama-server's or vLLM's."""
        what = f"{self.url}{path} sent a reply that is neither llama-server's nor vLLM's: {self.words(content)}"
        return ServingError(what, NEITHER)

    def _unanswered(self, reason: str) -> ServingError:
        if reason == "no reply in time":
            hint = "ask for fewer --tokens, or wait longer (--wait)"
            return ServingError(f"{self.url} did not answer within {self.seconds:g} s", hint)
        for _ in range(20):  # a process that was killed is known to be dead a moment later
            death = self.death()
            if death is not None:
                return ServingError(f"the server died under a request: {death}", "see why in its last lines")
            time.sleep(0.01)
        if reason == "no connection":
            hint = f"start the server, or correct --url{proxy_hint(self.url)}"
            return ServingError(f"{self.url} cannot be reached", hint)
        return ServingError(f"{self.url} broke the connection under a request", "see its log: it may have died")

    def _refused(self, path: str, status: int, content: bytes) -> ServingError:
        """The fault of a request that the server did not take, in its own words."""
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
KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows has none
POLL_SECONDS, HEALTH_SECONDS = 0.02, 2.0
HELP_SECONDS = 60.0  # a program that prints its options takes as long, with a driver to load
PARENT_DEATH = 1  # prctl's PR_SET_PDEATHSIG
# One cache for all slots, as a llama-server has that chooses their number itself. With a cache for each slot, which
# `--parallel` alone means, llama.cpp decodes only neighbouring slots together: of 32 slots, two busy ones take two
# passes over the weights.
UNIFIED = "--kv-unified"
PORTS = 3  # free ports that are tried: another process may take one before the server does


@functools.cache
def _options(binary: Path) -> str:
    """What a program prints about its options; empty where it does not."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        shown = subprocess.run([str(binary), "--help"], capture_output=True, timeout=HELP_SECONDS, check=False)
        return (shown.stdout + shown.stderr).decode("utf-8", "replace")
    return ""


@dataclass(frozen=True)
class LlamaServer:
    """How a llama-server is started; without `draft` it decodes plainly.

    It takes `parallel` requests at once, each with a context of `context` tokens. `probabilistic` drafts are drawn from
    the draft and verified by rejection sampling; others are its best tokens. `further` are arguments of the user's,
    which come last and so win.
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
        """What it is called in tables."""
        if self.draft is None:
            return "plain"
        floor = f", p_min {self.p_min:g}" if self.p_min else ""
        return f"n_max {self.n_max}{floor}{', probabilistic' if self.probabilistic else ''}"

    def has(self, option: str) -> bool:
        """Whether this build has an option, by its own list of them."""
        return option in _options(self.binary)

    @property
    def served(self) -> list[str]:
        """The arguments that matter to a user: models, drafting, and their own options."""
        drafts = self.draft is not None
        draft = str(self.draft) if drafts else None
        pair = pair_arguments(str(self.target), draft, self.n_max, self.p_min, self.probabilistic)
        further = self.further if drafts else without_options(self.further, is_of_draft)
        return [*pair, *further]

    def command(self, port: int) -> list[str]:
        """The whole command line."""
        own = ["--host", HOST, "--port", str(port), "--parallel", str(self.parallel)]
        own += ["--ctx-size", str(self.context * self.parallel), "--metrics", "--no-ui", "--cache-ram", "0"]
        own += [UNIFIED] if self.parallel > 1 and self.has(UNIFIED) else []
        if self.threads is not None:
            own += ["--threads", str(self.threads)]
        return [str(self.binary), *own, *self.served]


OF_DRAFT_SHORT = {"-md", "-otd", "-cmoed", "-ncmoed", *(f"-{short}d" for short in SHORT.values())}


def is_of_draft(option: str) -> bool:
    """Whether an option of llama-server is of the draft: without one, the server would load it all the same."""
    return option.startswith("--spec-") or option.endswith("-draft") or option in OF_DRAFT_SHORT


def without_options(arguments: Sequence[str], dropped: Callable[[str], bool]) -> tuple[str, ...]:
    """The user's own arguments without some options and their values."""
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
        """How the process ended; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(timeout=0)
            return f"signal {-code}" if code < 0 else f"status {code}"
        return None


def require_binary(binary: Path) -> Path:
    """The program, found; RecipeError for one that is missing or cannot be run."""
    found = shutil.which(binary)
    if found is None:
        hint = "give the path of llama-server (scripts/build_llama_cpp.sh builds one)"
        raise RecipeError(f"--server {binary}: there is no such program, or it cannot be run", hint)
    return Path(found)


@contextlib.contextmanager
def started(settings: LlamaServer, seconds: float) -> Iterator[Running]:
    """The server, once it is healthy; it is ended with the block, whatever ends it, and with this process.

    Raises ServingError where it exits, or is not healthy after `seconds`, with the last lines of its log.
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
    """A port of loopback that nobody listens at."""
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
                start_new_session=True,  # a Ctrl-C is ours to handle: the server must not vanish under a request
                preexec_fn=_tie_to_parent(),
            )
    except OSError as error:
        hint = "give a llama-server built for this machine"
        raise ServingError(f"{settings.binary} cannot be started: {error.strerror}", hint) from None


def _tie_to_parent() -> Callable[[], object] | None:
    """What makes Linux kill the server when this process dies in any manner; nothing elsewhere."""
    if not sys.platform.startswith("linux"):
        return None
    # Found here: the forked child must not load anything.
    return functools.partial(ctypes.CDLL(None).prctl, PARENT_DEATH, signal.SIGKILL)


def _wait_healthy(running: Running, seconds: float, last: bool) -> bool:
    """Whether the server is healthy; False where its port was taken meanwhile and another can be tried."""
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
                    continue  # another server answers at this port
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
    """End the server, and what a program around it has started: asked first, killed where they do not listen."""
    try:
        _signal(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
    finally:  # a second signal, too, leaves no server behind
        _signal(process, KILL)
        process.wait()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to the process group that a server was started in; on Windows, to the process alone."""
    with contextlib.suppress(OSError):
        if sys.platform == "win32":
            process.terminate()
        else:
            os.killpg(process.pid, number)
