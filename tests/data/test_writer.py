"""Files: what they hold, when the next one begins, which are deleted, and a disk that fails."""

from __future__ import annotations

import errno
import inspect
import io
import json
import os
import pickle
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from distill.data import recorder as module
from distill.data.exchanges import CHAT, TEXT
from distill.data.recorder import Writer, read_exchanges


def take(writer: Writer, number: int) -> bytes:
    """Write an exchange; its line."""
    prompt, answer = f"question {number:04d}", f"answer of user{number}@example.org"
    writer.take(
        TEXT, json.dumps({"prompt": prompt}).encode(), json.dumps({"content": answer, "stop_type": "eos"}).encode()
    )
    return json.dumps({"prompt": prompt, "answer": "answer of [redacted]", "finish_reason": "stop"}).encode() + b"\n"


def files(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.iterdir())]


def made(folder: Path, rotate_bytes: int = 10**6, keep: int = 100) -> Writer:
    return Writer(folder, rotate_bytes, keep, [r"\S+@\S+"])


def test_files_are_rotated_and_the_oldest_deleted(tmp_path: Path) -> None:
    other = tmp_path / "notes.jsonl"
    other.write_text("mine")
    length = len(take(made(tmp_path), 0))
    for path in tmp_path.glob("traffic*"):
        path.unlink()
    writer = made(tmp_path, rotate_bytes=3 * length, keep=2)
    names = set()
    lines = []
    for number in range(10):
        lines.append(take(writer, number))
        names |= {path.name for path in tmp_path.glob("traffic*")}
    assert len(names) == 4 and files(tmp_path) == [b"mine", b"".join(lines[6:9]), lines[9]]
    expected = {"exchanges": 10, "kept": 10, "bytes": sum(map(len, lines)), "files": 4, "deleted files": 2}
    assert writer.counts == expected and all(len(line) == length for line in lines)
    writer.close()
    again = made(tmp_path, rotate_bytes=1)  # every line is longer than a file may be; and a file is never written on
    take(again, 10)
    take(again, 11)
    assert len(files(tmp_path)) == 5 and {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob("t*")} == {0o600}
    again.close()


@pytest.mark.parametrize("fault", ["nothing", "half", "half, and it stays"])
def test_a_full_disk_is_said_once_and_leaves_whole_lines(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = made(tmp_path)
    first = take(writer, 0)
    write = os.write

    def full(file: int, data: bytes) -> int:
        if fault == "nothing":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data[: len(data) // 2])

    def stuck(*arguments: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "write", full)
        if fault == "half, and it stays":
            patch.setattr(module.os, "ftruncate", stuck)
        half = take(writer, 1)
        half = half[: len(half) // 2]
        take(writer, 2)
    last = take(writer, 3)
    writer.close()
    if fault == "half, and it stays":  # each in a file of its own
        assert files(tmp_path)[0] == first + half and files(tmp_path)[-1] == last and len(files(tmp_path)) == 3
    else:
        assert files(tmp_path) == [first + last]
    assert (writer.counts["kept"], writer.counts["a failed write"]) == (2, 2)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "the disk is full: cannot write" in said and "replies go on" in said


def test_a_folder_that_is_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "gone"
    writer = made(folder)
    take(writer, 0)
    assert writer.counts == {"exchanges": 1, "a failed write": 1} and "cannot write" in capsys.readouterr().err
    folder.mkdir()
    line = take(writer, 1)
    assert files(folder) == [line]
    writer.close()


def test_a_body_that_is_nested_too_deeply(tmp_path: Path) -> None:
    writer = made(tmp_path)
    deep: Any = "x"
    for _ in range(400):
        deep = [deep]
    asked = {"messages": [{"role": "user", "content": "a", "name": deep}], "chat_template_kwargs": {"a": deep}}
    reply = {"choices": [{"message": {"content": "b"}, "finish_reason": "stop"}]}
    limit = sys.getrecursionlimit()
    body = json.dumps(asked).encode()
    # Enough to read the body, too little to walk through it; before Python 3.12 the reader, in C, counts too.
    sys.setrecursionlimit(len(inspect.stack()) + (450 if sys.version_info < (3, 12) else 150))
    try:
        writer.take(CHAT, body, json.dumps(reply).encode())
    finally:
        sys.setrecursionlimit(limit)
    assert writer.counts == {"exchanges": 1, "a fault in distill (RecursionError)": 1}


def test_exchanges_are_read_up_to_the_last_whole_one() -> None:
    exchanges = [("text", b"{}\n\x00", b""), ("chat", b"", b"1 2 3\n")]
    first, second = map(pickle.dumps, exchanges)
    for cut in range(len(first + second) + 1):
        whole = (cut >= len(first)) + (cut == len(first + second))
        assert list(read_exchanges(io.BytesIO((first + second)[:cut]))) == exchanges[:whole]
