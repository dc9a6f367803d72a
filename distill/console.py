"""Lines on stderr, as `--quiet` and `--verbose` ask: progress can be left out, warnings and errors never are."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class _Console:
    quiet: bool = False
    verbose: bool = False
    announced: set[Path] = field(default_factory=set)


_console = _Console()


def set_console(quiet: bool, verbose: bool) -> None:
    """What the lines of this command are to be: without progress, or with the libraries' own log lines."""
    global _console
    _console = _Console(quiet, verbose)


def is_quiet() -> bool:
    """Whether progress stays off stderr."""
    return _console.quiet


def is_verbose() -> bool:
    """Whether the libraries' log lines go to stderr, and the traceback of a bug."""
    return _console.verbose


def note(line: str) -> None:
    """Print a line of progress to stderr, unless --quiet was given."""
    if not _console.quiet:
        print(line, file=sys.stderr, flush=True)


def warn(line: str) -> None:
    """Print a warning to stderr."""
    print(line, file=sys.stderr, flush=True)


def announce(place: Path) -> None:
    """Say where the command writes, before it does; once for each place."""
    if place not in _console.announced:
        _console.announced.add(place)
        note(f"writing to {place}")
