"""The run directory: stages and their artifacts, metrics, provenance. No torch here."""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any

from distill.errors import DataError, RunError, faults_explained
from distill.files import (
    digest,
    file_digest,
    finish_folders,
    has_form,
    parse_object,
    read_json,
    require_inside,
    take_lock,
    write_json,
    write_text,
)
from distill.machine import machine
from distill.progress import announce, command_line, note, resumes, warn
from distill.recipe import Recipe, dump_recipe

BEGIN = "begin"  # the line of metrics.jsonl with which a training begins

PARENT = {"generation": int, "run": str, "digest": str, "files": {...: str}}  # the form of parent.json
# The form of what was read of a traffic file or folder.
TRAFFIC_FORM = {"path": str, "lines": int, "parts": [{"path": str, "bytes": int, "lines": int, "sha256": str}]}
# The form of stages/NAME.json.
RECORD = {"key": str, "inputs": {}, "artifacts": {...: {"bytes": int, "sha256": str}}, "digest": str}


def _git_revision() -> str | None:
    """The checkout's revision; None for an installation, which may lie in a repository of the user's own."""
    checkout = Path(__file__).parent.parent
    if not (checkout / ".git").exists():
        return None
    try:
        asked = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12"]
        result = subprocess.run(asked, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None


def now() -> str:
    """The time, UTC, to the second, in ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@dataclass
class Run:
    """A run directory and its recipe."""

    folder: Path
    recipe: Recipe
    _log: IO[str] | None = None
    _lock: IO[str] | None = None
    silent: bool = False  # for all but the main process of a command: writes and prints nothing
    whole: bool = False  # finished artifacts are read whole when the stages are planned
    read_only: bool = False  # the directory cannot be written: what is finished can be shown
    command: str = field(default_factory=lambda: command_line(sys.argv))
    redraw: Callable[[], str] = lambda: ""  # writes the page on how far the run has come; returns what is left

    def path(self, *parts: str) -> Path:
        """A path inside the run directory."""
        return self.folder.joinpath(*parts)

    @property
    def draft(self) -> Path:
        """The folder of the trained draft, which `from_pretrained` loads."""
        return self.path("draft")

    @property
    def report(self) -> Path:
        """The page of the run."""
        return self.path("report.html")

    def again(self, *more: str) -> str:
        """The command that brings this run up to date."""
        folder = self.folder
        return shlex.join(["distill", "train", str(folder / "config.yaml"), "--runs", str(folder.parent), *more])

    def _take_lock(self) -> None:
        self._lock = open(self.folder / ".lock", "w")  # noqa: SIM115 - held for the life of the run
        if not take_lock(self._lock):
            self.close()
            raise RunError(f"another process is working in {self.folder}", "wait for it, or use another run (name=…)")
        finish_folders(self.folder)

    def can_be_written(self) -> bool:
        """Whether files can be made and the lock can be opened, as the operating system says; it may not know before
        the attempt."""
        if not os.access(self.folder, os.W_OK | os.X_OK):
            return False
        try:
            open(self.folder / ".lock", "a").close()
        except OSError as error:
            if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
                return False
            raise
        return True

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of an existing directory; raises RunError when another process has it."""
        with faults_explained(self.folder):
            self._take_lock()
        try:
            yield
        finally:
            self.close()

    def open(self, recipe_text: str | None = None) -> None:
        """Create the directory, take its lock and write recipe, resolved configuration and provenance; without a text
        the run keeps its recipe and configuration.

        Where a run exists and cannot be written, only `read_only` is set: no lock, no log, no provenance.
        """
        with faults_explained(self.folder):
            if self.path("config.yaml").exists() and not self.can_be_written():
                self.read_only = True
                note(f"{self.folder} cannot be written: finished stages are shown")
                return
            announce(self.folder)
            self.folder.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            self._log = open(self.folder / "log.txt", "a", encoding="utf-8")  # noqa: SIM115
        resumes()
        if recipe_text is not None:
            write_text(self.path("recipe.yaml"), recipe_text)
            write_text(self.path("config.yaml"), dump_recipe(self.recipe))
        history_path = self.path("provenance.json")
        history = read_json(history_path, [dict]) if history_path.exists() else []
        history.append({"time": now(), "argv": sys.argv, "git": _git_revision(), "machine": machine()})
        write_json(history_path, history)

    def parent(self) -> dict[str, Any] | None:
        """The origin of a refreshed run (parent.json); None for a run that began with a cut."""
        path = self.path("parent.json")
        if not path.exists():
            return None
        found: dict[str, Any] = read_json(path, PARENT)
        require_inside(found["run"], path, single=True)
        if found.get("traffic") is not None and not has_form(found["traffic"], TRAFFIC_FORM):
            raise DataError(f"{path} is damaged: `traffic` is of another kind", "copy the run again")
        return found

    def close(self) -> None:
        """Release the lock and the log."""
        for handle in (self._log, self._lock):
            if handle is not None:
                with contextlib.suppress(OSError):  # a full disk was already reported when the line was written
                    handle.close()
        self._log = self._lock = None

    def say(self, message: str, *, warning: bool = False) -> None:
        """Write one line to stderr and log.txt; with --quiet, only a warning goes to stderr."""
        if self.silent:
            return
        (warn if warning else note)(message)
        if self._log is not None:
            with faults_explained(self.path("log.txt")):
                self._log.write(f"{now()} {message}\n")
                self._log.flush()

    def record(self, stage: str, **values: Any) -> None:
        """Append one object to metrics.jsonl, flushed."""
        if self.silent:
            return
        line = json.dumps({"stage": stage, "time": now(), **values}) + "\n"
        path = self.path("metrics.jsonl")
        with faults_explained(path), open(path, "a+b") as handle:
            if handle.tell():
                handle.seek(-1, os.SEEK_END)
                if handle.read(1) != b"\n":  # a kill left the last line torn: this one must not continue it
                    handle.write(b"\n")
            handle.write(line.encode())

    def metrics(self) -> list[dict[str, Any]]:
        """The objects of metrics.jsonl since the training last began: for each stage and step the last line written; a
        torn last line is left out.

        A run that was killed after a step but before its checkpoint repeats that step and writes its line again.
        """
        path = self.path("metrics.jsonl")
        if not path.exists():
            return []
        latest: dict[Any, dict[str, Any]] = {}
        for number, line in enumerate(path.read_bytes().splitlines()):
            value = parse_object(line)
            if isinstance(value, dict) and value.get("stage") == BEGIN:
                latest.clear()  # what follows is another training, after --redo train
            elif isinstance(value, dict) and has_form(value, {"stage": str}):
                latest[(value["stage"], str(value.get("step", -number)))] = value
        return list(latest.values())

    # ── stages ──

    def done_path(self, stage: str) -> Path:
        """Path of the record of a finished stage."""
        return self.path("stages", f"{stage}.json")

    def done(self, stage: str) -> dict[str, Any] | None:
        """The record of a finished stage; None for an unfinished one."""
        path = self.done_path(stage)
        if not path.exists():
            return None
        record: dict[str, Any] = read_json(path, RECORD)
        for name in record["artifacts"]:
            require_inside(name, path)
        return record

    def artifacts_digest(self, stage: str, pattern: str) -> str | None:
        """Digest of a finished stage's artifacts whose names match `pattern`; None for an unfinished stage."""
        record = self.done(stage)
        if record is None:
            return None
        return digest({file: entry["sha256"] for file, entry in record["artifacts"].items() if fnmatch(file, pattern)})

    def outdated(self, stage: str) -> bool:
        """Whether a stage's artifacts are missing, or were made from others that have been replaced since.

        So it is where a training was redone and the stages behind it were not.
        """
        record = self.done(stage)
        if record is None:
            return True
        read = [(*name.split(": ", 1), value) for name, value in record["inputs"].items() if ": " in name]
        return any(
            value != self.artifacts_digest(source, pattern) or (value is not None and self.outdated(source))
            for source, pattern, value in read
        )

    def damaged_artifacts(self, record: dict[str, Any], pattern: str = "*", read: bool = False) -> dict[str, str]:
        """The faults of a record's artifacts whose names match, by name: missing, or of another size; to `read` them
        also of another checksum, where the time of change is not that of the record (a copy may have new ones).

        With `whole`, the checksum of every one is compared.
        """
        faults = {}
        for name, entry in record["artifacts"].items():
            if not fnmatch(name, pattern):
                continue
            path = self.path(name)
            state = path.stat() if path.is_file() else None
            if state is None:
                faults[name] = f"{name} is missing"
            elif state.st_size != entry["bytes"]:
                faults[name] = f"{name} is damaged: it has {state.st_size} bytes instead of {entry['bytes']}"
            elif (self.whole or (read and state.st_mtime_ns != entry.get("mtime"))) and (
                file_digest(path) != entry["sha256"]
            ):
                faults[name] = f"{name} is damaged: its checksum is not the one recorded when it was written"
        return faults

    def finish(self, stage: str, key: str, inputs: dict[str, Any], artifacts: Sequence[Path], started: float) -> None:
        """Write the record of a finished stage, after all its artifacts."""
        files: dict[str, dict[str, Any]] = {}
        for artifact in artifacts:
            for file in sorted(artifact.rglob("*")) if artifact.is_dir() else [artifact]:
                if file.is_file() and not file.name.startswith("."):
                    name = file.relative_to(self.folder).as_posix()
                    state = file.stat()
                    files[name] = {"bytes": state.st_size, "mtime": state.st_mtime_ns, "sha256": file_digest(file)}
        write_json(
            self.done_path(stage),
            {
                "stage": stage,
                "key": key,
                "inputs": inputs,
                "artifacts": files,
                "digest": digest({name: entry["sha256"] for name, entry in files.items()}),
                "seconds": round(time.time() - started, 3),
                "time": now(),
            },
        )

    def verify(self, stage: str, pattern: str = "*") -> None:
        """Raise DataError for an artifact of a finished stage that matches and is missing or not what was written."""
        for fault in self.damaged_artifacts(self.done(stage) or {"artifacts": {}}, pattern, read=True).values():
            hint = f"`{self.again('--verify')}` makes it again, or copy the run again"
            raise DataError(f"{self.folder}/{fault}", hint)
