"""Disks that are full, read-only or failing: which file, and what to do next. No torch here."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

from distill.errors import DataError, DistillError, RunError

# Errors of the disk itself, or of its connection, which say nothing about the content of a file.
# Not every system has a number for each of them: macOS and Windows lack EREMOTEIO.
_NAMES = ("EIO", "ESTALE", "ENXIO", "ENODEV", "ETIMEDOUT", "ENOTCONN", "EREMOTEIO")
_DISK_FAULTS = {getattr(errno, name) for name in _NAMES if hasattr(errno, name)}
_TORCH_WRITES = ("inline_container", "PytorchStreamWriter", "iostream error")
_DISK_HINT = "the disk or its connection has failed: see `dmesg`; when it works, run the same command again"


def explain_write_fault(path: Path, error: OSError) -> RunError:
    """The message for a failed write."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return RunError(f"the disk is full: cannot write {path}", "free some space and run the same command again")
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return RunError(
            f"no permission to write {path}: {error.strerror}",
            "choose a folder that can be written; --runs names the one for runs",
        )
    hint = _DISK_HINT if error.errno in _DISK_FAULTS else "remove the cause and run the same command again"
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
    if writing and any(words in str(error) for words in _TORCH_WRITES):
        return OSError(errno.EIO, "the file could not be written whole; is the disk full?")
    return None


@contextlib.contextmanager
def faults_explained(path: Path) -> Iterator[None]:
    """Turn an OSError of a failed write into a RunError that names `path`."""
    try:
        yield
    except OSError as error:
        raise explain_write_fault(path, error) from error


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn the error of a disk that fails while `path` is read, by whatever library, into a DataError that names it.

    Other errors pass: a caller knows what a missing or damaged file means.
    """
    try:
        yield
    except DistillError:
        raise
    except Exception as error:
        fault = system_error(error)
        if fault is None and isinstance(error, FileNotFoundError) and path.is_file():
            fault = OSError(
                errno.EIO, "it is there, but could not be opened"
            )  # safetensors calls every such file missing
        if fault is None or fault.errno not in _DISK_FAULTS:
            raise
        raise DataError(f"{path} cannot be read: {fault.strerror}", _DISK_HINT) from error


def disk_fault(error: Exception) -> DistillError | None:
    """The message for an error that a failing or full disk caused, at whatever depth; None for another cause.

    The last resort, for readers and writers that have no context of their own, and for those whose advice would be
    wrong: a file that cannot be read now is not to be deleted.
    """
    cause: BaseException | None = error
    while cause is not None:
        fault = system_error(cause)
        if fault is not None and fault.errno in (*_DISK_FAULTS, errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            if isinstance(error, DistillError):
                return type(error)(error.what, _DISK_HINT) if fault.errno in _DISK_FAULTS else error
            place = Path(os.fsdecode(fault.filename)) if isinstance(fault.filename, str | bytes) else None
            if fault.errno in _DISK_FAULTS:
                return DataError(f"{place or 'a file'} cannot be read or written: {fault.strerror}", _DISK_HINT)
            return explain_write_fault(place or Path("a file"), fault)
        cause = cause.__cause__ or cause.__context__
    return None
