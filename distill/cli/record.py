"""`distill record`: your server's prompts and answers, recorded by a proxy in front of it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from distill.cli import shared
from distill.errors import RecipeError, explain_write_fault, faults_explained
from distill.files import require_path
from distill.progress import note, warn

if TYPE_CHECKING:
    from distill.data.recorder import Recording


def record(
    upstream: Annotated[str, typer.Option(help="Your server, such as http://127.0.0.1:8000.")],
    to: Annotated[Path, typer.Option(help="Folder for the files; answers.traffic.path of a recipe.")] = Path("traffic"),
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0: any free one.")] = 8100,
    redact: Annotated[list[str] | None, typer.Option(help="Regular expression to black out; repeatable.")] = None,
    sample: Annotated[float, shared.number_option(min=0, max=1, help="Share of the exchanges to keep.")] = 1.0,
    rotate_mb: Annotated[float, shared.number_option(min=0.001, max=1e6, help="Size of a full file, in MB.")] = 64.0,
    keep: Annotated[int, typer.Option(min=1, max=10**6, help="Files to keep; older ones are deleted.")] = 16,
) -> None:
    """Record your server's requests and answers through a proxy, for answers.traffic and --refresh.

    Everything passes unchanged. Headers and keys are never recorded, nor requests with `X-Distill-Record: no`.
    """
    address = _address(upstream)
    if address == (host, port):
        raise RecipeError(f"--upstream {upstream} is the address of the proxy itself", "choose another --port")
    for pattern in redact or ():
        _require_pattern(pattern)
    require_path(to, "--to")
    with faults_explained(to):
        to.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.access(to, os.W_OK | os.X_OK):
        raise explain_write_fault(to, PermissionError(13, os.strerror(13)))
    from distill.data.recorder import Recording, record, summary

    settings = Recording(address, (host, port), to.resolve(), tuple(redact or ()), sample, int(rotate_mb * 1e6), keep)
    for line in _consent(settings):
        warn(line)
    counts = record(settings, lambda port: note(f"ready: http://{host}:{port}; Ctrl-C ends it"))
    print(summary(counts))


def _address(upstream: str) -> tuple[str, int]:
    """Host and port of the server; raises RecipeError for an address that cannot be given requests as they are."""
    hint = "give http://HOST:PORT of your server, without a path"
    try:
        parts = urlsplit(upstream)
        host, port = parts.hostname, parts.port or 80
    except ValueError:
        raise RecipeError(f"--upstream {upstream} is not the address of a server", hint) from None
    if parts.scheme == "https":
        raise RecipeError(
            f"--upstream {upstream}: https cannot be passed on, as the proxy changes no byte",
            "put the proxy behind what ends TLS, next to the server: http://HOST:PORT",
        )
    more = parts.path.rstrip("/") not in ("", "/v1") or parts.query or parts.fragment or parts.username is not None
    if parts.scheme != "http" or not host or more:
        raise RecipeError(f"--upstream {upstream} is not the address of a server", hint)
    return host, port


def _require_pattern(pattern: str) -> None:
    try:
        empty = re.compile(pattern).search("")
    except (re.error, RecursionError, OverflowError) as error:
        raise RecipeError(f"--redact {pattern}: {error}", "correct the regular expression") from None
    if empty:
        raise RecipeError(f"--redact {pattern} matches the empty text", "let it match at least one character")


def _consent(settings: Recording) -> list[str]:
    """What is written where, and what never is."""
    size = f"{settings.keep} files of {settings.rotate_bytes / 1e6:g} MB"
    share = "all" if settings.sample == 1 else f"a share of {settings.sample:g} of all"
    count = len(settings.patterns)
    removed = f"matches of {count} patterns are replaced" if count else "nothing: --redact PATTERN replaces matches"
    lines = [
        f"recording prompts and answers of http://{settings.upstream[0]}:{settings.upstream[1]}, as they are, into",
        f"  {settings.folder}/traffic-*.jsonl, readable by you alone, the newest {size} at most",
        f"  {share} successful /v1/chat/completions, /v1/completions and /completion",
        "  never written: headers, keys, other requests, and those with the header X-Distill-Record: no",
        f"  redacted: {removed}",
    ]
    if settings.listen[0] not in ("127.0.0.1", "localhost", "::1"):
        lines.append(f"  {settings.listen[0]} can be reached from outside: requests are neither encrypted nor checked")
    return lines
