"""The run directory: stages and their artifacts, metrics, provenance. This module does not import torch."""

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cache
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
from distill.progress import announce, command_line, note, resumes, shows_stages, warn
from distill.recipe import Recipe, dump_recipe

BEGIN = "begin"  # A line of metrics.jsonl with this stage begins a training.

PARENT = {"generation": int, "run": str, "digest": str, "files": {...: str}}  # the form of parent.json
# The form of a record of what was read from a traffic file or folder.
TRAFFIC_FORM = {"path": str, "lines": int, "parts": [{"path": str, "bytes": int, "lines": int, "sha256": str}]}
# The form of stages/NAME.json.
RECORD = {"key": str, "inputs": {}, "artifacts": {...: {"bytes": int, "sha256": str}}, "digest": str}


def _git_revision() -> str | None:
    """Return the checkout's revision. None for an installation, which may lie in a repository of the user."""
    checkout = Path(__file__).parent.parent
    if not (checkout / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None


def _artifacts_digest(record: dict[str, Any] | None, pattern: str) -> str | None:
    """Return the digest of a stage's artifacts that match `pattern`, by its record. None without a record."""
    if record is None:
        return None
    return digest({file: entry["sha256"] for file, entry in record["artifacts"].items() if fnmatch(file, pattern)})


def now() -> str:
    """Return the time in UTC, to the second, in ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@dataclass
class Run:
    """A run directory and its recipe."""

    folder: Path
    recipe: Recipe
    _log: IO[str] | None = None
    _lock: IO[str] | None = None
    silent: bool = False  # Processes other than the main one write and print nothing.
    whole: bool = False  # Planning reads finished artifacts completely.
    read_only: bool = False  # The directory is not writable. Finished stages can be shown.
    command: str = field(default_factory=lambda: command_line(sys.argv))

    def path(self, *parts: str) -> Path:
        """Return a path inside the run directory."""
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
        """Return the command that brings this run up to date."""
        folder = self.folder
        return shlex.join(["distill", "train", str(folder / "config.yaml"), "--runs", str(folder.parent), *more])

    def _take_lock(self) -> None:
        self._lock = open(self.folder / ".lock", "w")  # noqa: SIM115 - The run holds it until it is closed.
        if not take_lock(self._lock):
            self.close()
            raise RunError(f"another process is working in {self.folder}", "wait for it, or use another run (name=…)")
        finish_folders(self.folder)

    def can_be_written(self) -> bool:
        """Whether the operating system says that files can be made and the lock opened. An attempt may still fail."""
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
        """Hold the lock of an existing directory. Raises RunError if another process has it."""
        with faults_explained(self.folder):
            self._take_lock()
        try:
            yield
        finally:
            self.close()

    def open(self, recipe_text: str | None = None) -> None:
        """Create the directory, take its lock, and write recipe, resolved configuration and provenance.

        With None for the text, the run keeps its recipe and configuration. If the run exists and is not writable, only
        `read_only` is set: there is no lock, log or provenance.
        """
        with faults_explained(self.folder):
            if self.path("config.yaml").exists() and not self.can_be_written():
                self.read_only = True
                note(f"{self.folder} is not writable: finished stages are shown")
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
        """Return the origin of a refreshed run (parent.json), or None for a run that began with a cut."""
        path = self.path("parent.json")
        if not path.exists():
            return None
        parent: dict[str, Any] = read_json(path, PARENT)
        require_inside(parent["run"], path, single=True)
        if parent.get("traffic") is not None and not has_form(parent["traffic"], TRAFFIC_FORM):
            raise DataError(f"{path} is damaged: `traffic` has a wrong form", "copy the run again")
        return parent

    def close(self) -> None:
        """Release the lock and the log."""
        for handle in (self._log, self._lock):
            if handle is not None:
                with contextlib.suppress(OSError):  # A full disk was reported when the line was written.
                    handle.close()
        self._log = self._lock = None

    def say(self, message: str, *, warning: bool = False) -> None:
        """Write one line to stderr and log.txt.

        Only a warning goes to stderr with --quiet, and on a terminal that shows one line for each stage.
        """
        if self.silent:
            return
        if warning:
            warn(message)
        elif not shows_stages():
            note(message)
        if self._log is not None:
            with faults_explained(self.path("log.txt")):
                self._log.write(f"{now()} {message}\n")
                self._log.flush()

    def record(self, stage: str, **values: Any) -> None:
        """Append one object to metrics.jsonl and flush it."""
        if self.silent:
            return
        line = json.dumps({"stage": stage, "time": now(), **values}) + "\n"
        path = self.path("metrics.jsonl")
        with faults_explained(path), open(path, "a+b") as handle:
            if handle.tell():
                handle.seek(-1, os.SEEK_END)
                if handle.read(1) != b"\n":  # A kill cut the last line off, and this line must not continue it.
                    handle.write(b"\n")
            handle.write(line.encode())

    def metrics(self) -> list[dict[str, Any]]:
        """Return the objects of metrics.jsonl since the training last began: the last line for each stage and step.

        A truncated last line is left out. A run that was killed after a step but before its checkpoint repeats the
        step and writes its line again.
        """
        path = self.path("metrics.jsonl")
        if not path.exists():
            return []
        latest: dict[Any, dict[str, Any]] = {}
        for number, line in enumerate(path.read_bytes().splitlines()):
            value = parse_object(line)
            if isinstance(value, dict) and value.get("stage") == BEGIN:
                latest.clear()  # After --redo train, another training follows.
            elif isinstance(value, dict) and has_form(value, {"stage": str}):
                latest[(value["stage"], str(value.get("step", -number)))] = value
        return list(latest.values())

    # ── Stages ──

    def done_path(self, stage: str) -> Path:
        """Return the path of the record of a finished stage."""
        return self.path("stages", f"{stage}.json")

    def done(self, stage: str) -> dict[str, Any] | None:
        """Return the record of a finished stage, or None for an unfinished one."""
        path = self.done_path(stage)
        if not path.exists():
            return None
        record: dict[str, Any] = read_json(path, RECORD)
        for name in record["artifacts"]:
            require_inside(name, path)
        return record

    def artifacts_digest(self, stage: str, pattern: str) -> str | None:
        """Return the digest of a finished stage's artifacts that match `pattern`. None for an unfinished stage."""
        return _artifacts_digest(self.done(stage), pattern)

    def outdated(self, stage: str) -> bool:
        """Whether a stage's artifacts are missing, or were made from artifacts that have been replaced since.

        A stage is outdated if training was redone and the stage was not.
        """
        done = cache(self.done)  # Many stages read the same ones. Each record is read once.

        @cache
        def is_old(stage: str) -> bool:
            if (record := done(stage)) is None:
                return True
            read = [(*name.split(": ", 1), value) for name, value in record["inputs"].items() if ": " in name]
            return any(
                value != _artifacts_digest(done(source), pattern) or (value is not None and is_old(source))
                for source, pattern, value in read
            )

        return is_old(stage)

    def damaged_artifacts(self, record: dict[str, Any], pattern: str = "*", read: bool = False) -> dict[str, str]:
        """Return the faults of a record's artifacts that match `pattern`, by name: missing, or of another size.

        With `read`, a file whose time of change differs from the record (as after a copy) is also compared by checksum.
        If `self.whole` is set, every checksum is compared.
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
                faults[name] = f"{name} is damaged: its checksum differs from the one recorded when it was written"
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
        """Raise DataError for a matching artifact of a finished stage that is missing or has changed."""
        for fault in self.damaged_artifacts(self.done(stage) or {"artifacts": {}}, pattern, read=True).values():
            hint = f"make it again with `{self.again('--verify')}`, or copy the run again"
            raise DataError(f"{self.folder}/{fault}", hint)
