"""Disks that are full, read-only or failing: which file, and what to do next. No torch here."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

from distill.errors import DataError, DistillError, RunError

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
            "choose a folder that can be written; --runs names the one for runs",
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
        if fault is not None and fault.errno in (*FAILED, *FULL, errno.EROFS):
            if isinstance(error, DistillError):
                return type(error)(error.what, FAILED_HINT) if fault.errno in FAILED else error
            if fault.errno in FAILED:
                return DataError(
                    f"{fault.filename or 'a file'} cannot be read or written: {fault.strerror}", FAILED_HINT
                )
            return explain_write_fault(Path(os.fsdecode(fault.filename or "a file")), fault)
        cause = cause.__cause__ or cause.__context__
    return None
