"""A server under test: requests to it, one greedy completion at a time, streamed and timed, with one message for each
fault; and llama-server, started on a free port of loopback for as long as a `with` block lasts.

Nothing here sends a request again: a failed one is a finding, not noise.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
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
from typing import Any, NamedTuple

import httpx2

from distill.engines.server_commands import pair_arguments
from distill.errors import RecipeError, ServingError, server_words
from distill.files import parse_object
from distill.recipe.measuring import SHORT
from distill.serving.results import DraftSettings
from distill.teacher.endpoint import secret

# ── Requests ──

CONNECT_SECONDS = 10.0
CONNECTIONS = 256
KEYLESS = (401, 403)  # statuses of a request without the server's key


class Timing(NamedTuple):
    """Seconds of a streamed reply until its first event and until its end, and the moments of request and events."""

    first_seconds: float
    seconds: float
    started: float
    times: list[float]


class Http:
    """Requests to one address; threads may share it.

    `seconds` are those that a reply may take. `death` says how the server's process ended and shows its last lines,
    None while it runs or where it is not ours. `key` names the environment variable that holds the server's key.
    """

    def __init__(
        self, url: str, seconds: float, key: str | None = None, death: Callable[[], str | None] = lambda: None
    ) -> None:
        self.url, self.seconds, self.death = url.rstrip("/").removesuffix("/v1"), seconds, death
        self._key = "" if key is None else secret(key, "--key")
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        try:
            # A connection for each request: llama-server closes those that streamed, without a word, and one that is
            # taken again then breaks.
            self.client = httpx2.Client(
                base_url=self.url,
                headers=headers,
                trust_env=False,
                timeout=httpx2.Timeout(seconds, connect=min(CONNECT_SECONDS, seconds)),
                limits=httpx2.Limits(max_connections=CONNECTIONS, max_keepalive_connections=0),
            )
        except httpx2.InvalidURL:
            raise RecipeError(f"{url} is not the address of a server", "such as http://127.0.0.1:8080") from None

    def get(self, path: str) -> httpx2.Response:
        """A reply of any status; ServingError where none comes."""
        with self._explained():
            return self.client.get(path)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The JSON object that the server replies with; ServingError for anything else."""
        with self._explained():
            response = self.client.post(path, json=body)
        if response.status_code != 200:
            raise self.refused(path, response.status_code, response.content)
        return self._object(path, response.content)

    def stream(self, path: str, body: dict[str, Any]) -> tuple[list[dict[str, Any]], Timing]:
        """The events of a streamed reply.

        Events are parsed after the last one, so that this client takes little time from a server on the same machine.
        """
        parts: list[bytes] = []
        times: list[float] = []
        started = time.perf_counter()
        with self._explained(), self.client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                raise self.refused(path, response.status_code, response.read())
            for part in response.iter_raw():
                parts.append(part)
                times += [time.perf_counter()] * part.count(b"data: ")
        seconds = time.perf_counter() - started
        events = []
        whole = b"".join(parts)
        for line in whole.splitlines():
            name, colon, value = line.partition(b": ")
            if not colon or value.strip() == b"[DONE]" or name not in (b"data", b"error"):
                continue
            event = self._object(path, value)
            if name == b"error" or "error" in event:
                raise self.refused(path, 200, value)
            events.append(event)
        if not events:
            raise self.unreadable(path, whole)
        return events, Timing(times[0] - started if times else seconds, seconds, started, times)

    def object(self, path: str, optional: bool = True) -> dict[str, Any]:
        """The JSON object at a path; of an optional one empty where there is none. ServingError for a missing key."""
        response = self.get(path)
        if response.status_code in KEYLESS or (response.status_code != 200 and not optional):
            raise self.refused(path, response.status_code, response.content)
        found = parse_object(response.content) if response.status_code == 200 else {}
        return {} if isinstance(found, str) else found

    def _object(self, path: str, content: bytes) -> dict[str, Any]:
        found = parse_object(content)
        if isinstance(found, str):
            raise self.unreadable(path, content)
        return found

    def words(self, content: bytes) -> str:
        """What the server says in a reply, without its key."""
        return server_words(content, [self._key])

    def unreadable(self, path: str, content: bytes) -> ServingError:
        """The fault of a reply whose form is none of llama-server's or vLLM's."""
        return ServingError(
            f"{self.url}{path} sent a reply that is neither llama-server's nor vLLM's: {self.words(content)}",
            "is this the address of llama-server or vLLM (--url), and its --kind?",
        )

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise the faults of a request as ServingError."""
        try:
            yield
        except httpx2.ConnectTimeout:
            raise ServingError(f"{self.url} cannot be reached", "start the server, or correct --url") from None
        except httpx2.TimeoutException:
            raise ServingError(
                f"{self.url} did not answer within {self.seconds:g} s",
                "ask for fewer --tokens, or wait longer (--reply-seconds)",
            ) from None
        except (httpx2.InvalidURL, httpx2.UnsupportedProtocol):
            raise RecipeError(f"{self.url} is not the address of a server", "such as http://127.0.0.1:8080") from None
        except (httpx2.TransportError, httpx2.DecodingError) as error:
            raise self._broken(error) from None

    def _broken(self, error: Exception) -> ServingError:
        for _ in range(20):  # a process that was killed is known to be dead a moment later
            death = self.death()
            if death is not None:
                return ServingError(f"the server died under a request: {death}", "see why in its last lines")
            time.sleep(0.01)
        if isinstance(error, httpx2.ConnectError):
            return ServingError(f"{self.url} cannot be reached", "start the server, or correct --url")
        return ServingError(f"{self.url} broke the connection under a request", "see its log: it may have died")

    def refused(self, path: str, status: int, content: bytes) -> ServingError:
        """The fault of a request that the server did not take, in its own words."""
        text, hint = self.words(content), "see the server's log"
        if status in KEYLESS:
            hint = "name the environment variable that holds its key: --key NAME"
        elif status == 404:
            hint = "is this the address of llama-server or vLLM (--url), and its --kind?"
        elif "context" in text or "max_model_len" in text:
            hint = "give shorter prompts, fewer --tokens, or start the server with a larger context"
        return ServingError(f"{self.url}{path} refused a request (status {status}): {text}", hint)

    def close(self) -> None:
        """Free the connections."""
        self.client.close()


# ── llama-server ──

HOST = "127.0.0.1"
TAIL_LINES = 8  # of a server's log in a message
STOP_SECONDS = 10.0
POLL_SECONDS = 0.02
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
        drafting = DraftSettings(self.n_max, self.p_min or 0.0, self.probabilistic)
        return "plain" if self.draft is None else drafting.title

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
        raise RecipeError(
            f"--server {binary}: there is no such program, or it cannot be run",
            "give the path of llama-server (scripts/build_llama_cpp.sh builds one)",
        )
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
        raise ServingError(
            f"{settings.binary} cannot be started: {error.strerror}", "give a llama-server built for this machine"
        ) from None


def _tie_to_parent() -> Callable[[], object] | None:
    """What makes Linux kill the server when this process dies in any manner; nothing elsewhere."""
    if not sys.platform.startswith("linux"):
        return None
    # Found here: the forked child must not load anything.
    return functools.partial(ctypes.CDLL(None).prctl, PARENT_DEATH, signal.SIGKILL)


def _wait_healthy(running: Running, seconds: float, last: bool) -> bool:
    """Whether the server is healthy; False where its port was taken meanwhile and another can be tried."""
    deadline = time.monotonic() + seconds
    with httpx2.Client(timeout=2.0, trust_env=False) as client:
        while time.monotonic() < deadline:
            death = running.death()
            if death is not None:
                if not last and "bind" in running.text():
                    return False
                raise _exited(running, death)
            with contextlib.suppress(httpx2.HTTPError):
                if client.get(f"{running.url}/health").status_code == 200:
                    if running.death() is None:
                        return True
                    continue  # another server answers at this port
            time.sleep(POLL_SECONDS)
    raise ServingError(
        f"{shlex.join(running.settings.command(0))[:600]}\n  was not healthy after {seconds:g} s; its last lines:\n"
        f"{running.tail()}",
        "wait longer (--start-seconds), or start it by hand and give its address (--url)",
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
    """End the server: asked first, killed where it does not listen."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    except BaseException:  # a second signal, too, leaves no server behind
        process.kill()
        raise
