"""Errors that a user can correct: one message with the fault, its place and the next step."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

MOST_CHARACTERS = 3000  # characters of a message, which may quote a foreign file
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Return a text that a terminal can show: control characters and lone surrogates escaped, and cut if it is long."""
    shown = _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)
    return shown if len(shown) <= MOST_CHARACTERS else f"{shown[:MOST_CHARACTERS]}…"


SERVER_CHARACTERS = 300  # characters of a server's message
_KEY = re.compile(r"(?i:(\bbearer\s+))[^\s\"',}]+|\b(?:sk|pk|hf|gsk|xai|nvapi)[-_][\w*.-]{6,}")


def server_words(content: bytes, secrets: Sequence[str] = ()) -> str:
    """Return a server's message from the body of a reply: its error message if there is one, or the body.

    The result is one line of at most SERVER_CHARACTERS. Our `secrets`, and words that look like keys, are removed,
    because servers repeat them.
    """
    text, message = content.decode("utf-8", "replace"), None
    with contextlib.suppress(ValueError, RecursionError):
        message = json.loads(text)
    while isinstance(message, dict):
        message = next((message[name] for name in ("error", "detail", "message") if message.get(name)), None)
    if message:
        text = message if isinstance(message, str) else json.dumps(message, ensure_ascii=False)
    for secret in filter(None, secrets):
        text = text.replace(secret, "***")
    # The text is cut last, because a part of a key would not be recognised.
    text = " ".join("".join(c if c.isprintable() else " " for c in _KEY.sub(r"\1***", text)).split())
    return text[:SERVER_CHARACTERS] or "no message"


class DistillError(Exception):
    """A fault outside our code. The command line prints it without a traceback and exits with status 2.

    Quotes from files and options are made printable here, for all messages.
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
    """The run directory is not writable, is in use, or holds work that a command would replace."""


class EndpointError(DistillError):
    """A server did not return the target's text or distributions as requested."""


class ServingError(DistillError):
    """A server under test did not start, stopped, refused, or does not draft."""


# ── Full, read-only and failing disks: which file is affected, and what to do next ──

FULL = (errno.ENOSPC, errno.EDQUOT)
FAILED = (errno.EIO, errno.ESTALE, errno.ENXIO, errno.ENODEV, errno.ETIMEDOUT, errno.ENOTCONN)  # disk or connection
FAILED_HINT = "the disk or its connection has failed: see `dmesg`, repair it, and run the same command again"
TORCH_WRITES = ("inline_container", "PytorchStreamWriter", "iostream error")


def explain_write_fault(path: Path, error: OSError) -> RunError:
    """Return the message for a failed write."""
    if error.errno in FULL:
        return RunError(f"the disk is full: cannot write {path}", "free some space and run the same command again")
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return RunError(
            f"no permission to write {path}: {error.strerror}",
            "choose a writable folder: --runs for runs, DISTILL_CACHE (environment) for imports",
        )
    hint = FAILED_HINT if error.errno in FAILED else "remove the cause and run the same command again"
    return RunError(f"cannot write {path}: {error}", hint)


def system_error(error: BaseException, writing: bool = False) -> OSError | None:
    """Return the operating system's error behind an exception of a library, or None for other exceptions.

    safetensors and tokenizers only put the number of the error into their message. torch does not even do that: its
    errors count as the disk's if it was `writing`.
    """
    if isinstance(error, DistillError) or not isinstance(error, Exception):
        return None  # It is explained already, or an interruption.
    if isinstance(error, OSError) and error.errno is not None:
        return error
    number = re.search(r"\(os error (\d+)\)|\[Errno (\d+)\]", str(error))
    if number:
        code = int(number[1] or number[2])
        return OSError(code, os.strerror(code))
    if writing and any(words in str(error) for words in TORCH_WRITES):
        return OSError(errno.EIO, "the file could not be written completely; is the disk full?")
    return None


@contextlib.contextmanager
def faults_explained(path: Path) -> Iterator[None]:
    """Turn the OSError of a failed write into a RunError that names `path`."""
    try:
        yield
    except OSError as error:
        raise explain_write_fault(path, error) from error


def disk_fault(error: Exception) -> DistillError | None:
    """Return the message for an error that a failing or full disk caused, at any depth. None for other causes.

    This is the last resort for readers and writers without context of their own, and for readers whose advice would be
    wrong: the user must not delete a file that cannot be read at the moment.
    """
    cause: BaseException | None = error
    while cause is not None:
        fault = system_error(cause)
        if fault is not None and fault.errno in (*FAILED, *FULL, errno.EROFS, errno.EACCES, errno.EPERM):
            if isinstance(error, DistillError):
                return type(error)(error.what, FAILED_HINT) if fault.errno in FAILED else error
            if isinstance(fault, PermissionError):  # It may concern reading or writing.
                return RunError(f"no permission: {fault.filename or fault}", "correct it, or choose another folder")
            if fault.errno in FAILED:
                return DataError(f"{fault.filename or 'a file'} cannot be used: {fault.strerror}", FAILED_HINT)
            return explain_write_fault(Path(os.fsdecode(fault.filename or "a file")), fault)
        cause = cause.__cause__ or cause.__context__
    return None
