"""llama-server, started on a free port of loopback for as long as a `with` block lasts."""

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
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx2

from distill.engines.server_commands import option_arguments, pair_arguments
from distill.errors import RecipeError, ServingError
from distill.recipe import Gguf
from distill.serving.results import DraftSettings

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
    gguf: Gguf = field(default_factory=Gguf)
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
        """The arguments that matter to a user: models, drafting, llama.cpp's options."""
        drafts = self.draft is not None
        draft = str(self.draft) if drafts else None
        pair = pair_arguments(str(self.target), draft, self.n_max, self.p_min, self.probabilistic)
        further = self.further if drafts else without_options(self.further, is_of_draft)
        return [*pair, *option_arguments(self.gguf, drafts), *further]

    def command(self, port: int) -> list[str]:
        """The whole command line."""
        own = ["--host", HOST, "--port", str(port), "--parallel", str(self.parallel)]
        own += ["--ctx-size", str(self.context * self.parallel), "--metrics", "--no-ui", "--cache-ram", "0"]
        own += [UNIFIED] if self.parallel > 1 and self.has(UNIFIED) else []
        if self.threads is not None and self.gguf.target.threads is None:
            own += ["--threads", str(self.threads)]
        return [str(self.binary), *own, *self.served]


OF_DRAFT_SHORT = {"-md", "-ctkd", "-ctvd", "-ngld", "-devd", "-td", "-tbd", "-otd", "-cmoed", "-ncmoed"}


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


def _tie_to_parent() -> Callable[[], None] | None:
    """What makes Linux kill the server when this process dies in any manner; nothing elsewhere."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl  # found here: the forked child must not load anything

    def tie() -> None:
        prctl(PARENT_DEATH, signal.SIGKILL)

    return tie


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
