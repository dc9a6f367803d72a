"""Errors that a user can correct: one message with the fault, its place and the next step."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

# ── Errors that a user can correct: one message with the fault, its place and the next step ──

MOST_CHARACTERS = 3000  # of a message: it may quote a foreign file
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """A text as a terminal can show it: control characters and lone surrogates are written as escapes; cut if long."""
    shown = _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)
    return shown if len(shown) <= MOST_CHARACTERS else f"{shown[:MOST_CHARACTERS]}…"


SERVER_CHARACTERS = 300  # of a server's own words
_KEY = re.compile(r"(?i:(\bbearer\s+))[^\s\"',}]+|\b(?:sk|pk|hf|gsk|xai|nvapi)[-_][\w*.-]{6,}")


def server_words(content: bytes, secrets: Sequence[str] = ()) -> str:
    """What a server says in the body of a reply: its error message where there is one, else the body as it is.

    One line of at most SERVER_CHARACTERS, without our `secrets` and without what looks like a key: servers repeat them.
    """
    text, said = content.decode("utf-8", "replace"), None
    with contextlib.suppress(ValueError, RecursionError):
        said = json.loads(text)
    while isinstance(said, dict):
        said = next((said[name] for name in ("error", "detail", "message") if said.get(name)), None)
    if said:
        text = said if isinstance(said, str) else json.dumps(said, ensure_ascii=False)
    for secret in filter(None, secrets):
        text = text.replace(secret, "***")
    # Cut last: a part of a key would not be found.
    text = " ".join("".join(c if c.isprintable() else " " for c in _KEY.sub(r"\1***", text)).split())
    return text[:SERVER_CHARACTERS] or "no message"


class DistillError(Exception):
    """A fault outside our code; the command line prints it without a traceback and exits with 2.

    What the message quotes of a file or an option is made printable here, for all of them.
    """

    def __init__(self, what: str, hint: str | None = None) -> None:
        what, hint = printable(what), None if hint is None else printable(hint)
        super().__init__(what)
        self.what = what
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.what}\n  {self.hint}" if self.hint else self.what


class RecipeError(DistillError):
    """The recipe, an override or an option cannot be used as written."""


class PairError(DistillError):
    """Target and draft (or donor) do not fit each other."""


class DataError(DistillError):
    """A model, tokenizer, corpus or artifact on disk is missing, empty, damaged or of an unknown kind."""


class RunError(DistillError):
    """The run directory cannot be written, is in use, or holds work that a command would supersede."""


class EndpointError(DistillError):
    """A server did not return the target's text or distributions as requested."""


class ServingError(DistillError):
    """A server under test did not start, stopped, refused, or does not draft."""


# ── Disks that are full, read-only or failing: which file, and what to do next. No torch here ──

FULL = (errno.ENOSPC, errno.EDQUOT)
FAILED = (errno.EIO, errno.ESTALE, errno.ENXIO, errno.ENODEV, errno.ETIMEDOUT, errno.ENOTCONN)  # disk or connection
FAILED_HINT = "the disk or its connection has failed: see `dmesg`; when it works, run the same command again"
TORCH_WRITES = ("inline_container", "PytorchStreamWriter", "iostream error")


def explain_write_fault(path: Path, error: OSError) -> RunError:
    """The message for a failed write."""
    if error.errno in FULL:
        return RunError(f"the disk is full: cannot write {path}", "free some space and run the same command again")
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return RunError(
            f"no permission to write {path}: {error.strerror}",
            "choose a folder that can be written: --runs names that of runs, DISTILL_CACHE (a variable) of imports",
        )
    hint = FAILED_HINT if error.errno in FAILED else "remove the cause and run the same command again"
    return RunError(f"cannot write {path}: {error}", hint)


def system_error(error: BaseException, writing: bool = False) -> OSError | None:
    """The operating system's error behind an exception that a library raised; None for other exceptions.

    safetensors and tokenizers only put the number of the error into their message, torch not even that: its errors
    are the disk's where it was `writing`.
    """
    if isinstance(error, DistillError) or not isinstance(error, Exception):
        return None  # explained already, or an interruption
    if isinstance(error, OSError) and error.errno is not None:
        return error
    number = re.search(r"\(os error (\d+)\)|\[Errno (\d+)\]", str(error))
    if number:
        found = int(number[1] or number[2])
        return OSError(found, os.strerror(found))
    if writing and any(words in str(error) for words in TORCH_WRITES):
        return OSError(errno.EIO, "the file could not be written whole; is the disk full?")
    return None


@contextlib.contextmanager
def faults_explained(path: Path) -> Iterator[None]:
    """Turn an OSError of a failed write into a RunError that names `path`."""
    try:
        yield
    except OSError as error:
        raise explain_write_fault(path, error) from error


def disk_fault(error: Exception) -> DistillError | None:
    """The message for an error that a failing or full disk caused, at whatever depth; None for another cause.

    The last resort, for readers and writers that have no context of their own, and for those whose advice would be
    wrong: a file that cannot be read now is not to be deleted.
    """
    cause: BaseException | None = error
    while cause is not None:
        fault = system_error(cause)
        if fault is not None and fault.errno in (*FAILED, *FULL, errno.EROFS, errno.EACCES, errno.EPERM):
            if isinstance(error, DistillError):
                return type(error)(error.what, FAILED_HINT) if fault.errno in FAILED else error
            if isinstance(fault, PermissionError):  # to read or to write
                return RunError(f"no permission: {fault.filename or fault}", "correct it, or choose another folder")
            if fault.errno in FAILED:
                return DataError(f"{fault.filename or 'a file'} cannot be used: {fault.strerror}", FAILED_HINT)
            return explain_write_fault(Path(os.fsdecode(fault.filename or "a file")), fault)
        cause = cause.__cause__ or cause.__context__
    return None
