"""Atomic writes, JSON, and digests of files and values. This module does not import torch."""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import json
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, TypeAdapter, ValidationError, WithJsonSchema

from distill.errors import (
    DataError,
    DistillError,
    RecipeError,
    RunError,
    explain_write_fault,
    faults_explained,
    system_error,
)
from distill.progress import warn_once

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

STALE = 600  # A process that wrote nothing for this many seconds may be dead.
LARGE = 8 * 2**20  # The digests of files of at least this many bytes are cached.


def is_utf8(text: str) -> bool:
    """Whether a text can be written as UTF-8. A text with lone surrogates cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def require_path(path: str | Path, where: str) -> None:
    """Raise RecipeError, naming `where`, for a path or hub name that no file can have."""
    text = str(path)
    if "\0" in text:
        fault = "holds a NUL character"
    elif not is_utf8(text):
        fault = "is not UTF-8"
    elif len(os.fsencode(text)) > 4095 or max(len(os.fsencode(part)) for part in text.split("/")) > 255:
        fault = f"is too long: {len(text)} characters"
    else:
        return
    raise RecipeError(f"{where}: the path {text[:60]!a} {fault}", "correct the path")


def parse_json(raw: bytes, largest: int | None = None, halves: bool = False) -> Any:
    """Return the value of a JSON text.

    Raises ValueError, in words for a message, if the text is not UTF-8 or not JSON, for lone surrogates (unless
    `halves` allows them), and for integers beyond ±`largest`, which libraries do not accept.
    """
    many = largest is not None and _MANY_DIGITS.search(raw)
    try:
        text = raw.decode("utf-8-sig" if raw.startswith(b"\xef\xbb\xbf") else "utf-8")
        value = json.loads(text, parse_int=(lambda digits: _integer(digits, largest)) if many else None)
        if not halves and _SURROGATE.search(raw):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start + 1})") from None
    except UnicodeEncodeError:
        raise ValueError("a lone surrogate (\\ud800 to \\udfff), which is not text") from None
    except RecursionError:
        raise ValueError("not JSON (nested too deeply)") from None
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise ValueError(f"not JSON ({line}character {error.colno}: {error.msg})") from None
    except ValueError:
        raise ValueError("not JSON (a number with too many digits)") from None
    return value


def _integer(digits: str, largest: int | None) -> int:
    value = int(digits)
    if largest is not None and abs(value) > largest:
        raise ValueError
    return value


def has_halves(value: Any) -> bool:
    """Whether a JSON value contains a lone surrogate, which is half of a character."""
    return not is_utf8(json.dumps(value, ensure_ascii=False, default=str))


def parse_object(raw: bytes, halves: bool = False) -> dict[str, Any] | str:
    """Return the JSON object in a line of a jsonl file, or the line's fault. `halves` is that of `parse_json`."""
    try:
        value = parse_json(raw, halves=halves)
    except ValueError as error:
        return str(error)
    return value if isinstance(value, dict) else f"a JSON object is needed, got {kind_of(value)}"


def kind_of(value: Any) -> str:
    """Return the kind of a JSON or YAML value, in the words of these formats."""
    kinds = {type(None): "null", bool: "true or false", int: "number", float: "number", str: "text", dict: "object"}
    return kinds.get(type(value), type(value).__name__)


def read_utf8(path: Path) -> str:
    """Return the text of a file. Raises DataError, with the line, if it cannot be read or is not UTF-8."""
    try:
        return utf8_text(path.read_bytes(), str(path)).replace("\r\n", "\n").replace("\r", "\n")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", "give a text file") from error


def utf8_text(content: bytes, where: str) -> str:
    """Decode a text. Raises DataError, naming `where` and the line, if it is not UTF-8."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{where} is not UTF-8, in line {line}", "convert it, or use another file") from error


def names_of(record: dict[str, Any]) -> str:
    """Return the names of a record's fields for a message, at most twelve."""
    names = [name[:40] for name in list(record)[:12]]
    return ", ".join([*names, *(["…"] if len(record) > 12 else [])]) or "none"


_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_MANY_DIGITS = re.compile(rb"[0-9]{19}")
# The largest integer of artifacts, recipes and options. Tokenizers have larger ones (model_max_length).
LARGEST = 2**63 - 1


@contextlib.contextmanager
def _replacing(path: Path, temporary: Path) -> Iterator[None]:
    """If the block fails, remove what was begun under the temporary name. Raises RunError for a fault of the disk."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(OSError):
            if temporary.is_dir():
                shutil.rmtree(temporary, ignore_errors=True)
            else:
                temporary.unlink(missing_ok=True)
        fault = system_error(error, writing=True)
        if fault is None:
            raise
        raise explain_write_fault(path, fault) from error


def _fsync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    if os.name == "nt" and path.is_dir():  # Windows cannot open folders.
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)  # Windows flushes only writable files.
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, write: Callable[[Path], object], *, several: bool = False) -> None:
    """Let `write` fill a temporary file. See `written_atomically`."""
    with written_atomically(path, several=several) as temporary:
        write(temporary)


@contextlib.contextmanager
def written_atomically(path: Path, *, several: bool = False) -> Iterator[Path]:
    """Give a `with` block a temporary file to fill, then fsync it and rename it to `path`.

    Readers never see half a file. With `several`, more than one process may write `path` at a time. Raises RunError if
    the disk is full or the folder is not writable. An old file then stays intact.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp" if several else f".{path.name}.tmp")
    if several:
        remove_left(path.parent, path.name, "tmp")
    with _replacing(path, temporary):
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        _fsync(temporary)
        os.replace(temporary, path)
        _fsync(path.parent)


def remove_left(folder: Path, name: str, ending: str) -> None:
    """Remove the files and folders `.NAME.PID.ENDING` of processes that were killed.

    The process must be gone, and nothing written for STALE seconds, because another machine may share the folder.
    """
    import psutil

    for path in folder.glob(f".{glob.escape(name)}.*.{ending}"):
        number = path.name.removeprefix(f".{name}.").removesuffix(f".{ending}")
        with contextlib.suppress(OSError):
            old = time.time() - path.stat().st_mtime > STALE
            if number.isdecimal() and old and not psutil.pid_exists(int(number)):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def write_folder(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary folder and rename it to `path`, replacing an old folder.

    If the process is killed between the two renames, there is no folder. The next reader calls `finish_folder`.
    """
    temporary, old = _besides(path)
    with _replacing(path, temporary):
        finish_folder(path)
        for stale in (temporary, old):
            if stale.exists():
                shutil.rmtree(stale)
        temporary.mkdir(parents=True)
        write(temporary)
        for file in temporary.rglob("*"):
            if file.is_file():
                _fsync(file)
        try:
            if path.exists():
                os.replace(path, old)
                finish_folder(path)
            else:
                os.replace(temporary, path)
        except BaseException:
            if old.exists() and not path.exists():
                os.replace(old, path)
            raise
        _fsync(path.parent)
        if old.exists():
            shutil.rmtree(old)


def finish_folder(path: Path) -> None:
    """Rename a complete folder if `write_folder` was killed after it had moved the old folder away."""
    temporary, old = _besides(path)
    if old.is_dir() and temporary.is_dir() and not path.exists():
        with contextlib.suppress(FileNotFoundError):  # Another process may just have done it.
            os.replace(temporary, path)


def finish_folders(parent: Path) -> None:
    """Call `finish_folder` for every folder below `parent`."""
    for old in parent.rglob(".*.old"):
        finish_folder(old.with_name(old.name[1:].removesuffix(".old")))


def _besides(path: Path) -> tuple[Path, Path]:
    """Return the folder that is written before it replaces `path`, and the folder for the replaced content."""
    return path.with_name(f".{path.name}.tmp"), path.with_name(f".{path.name}.old")


def require_inside(name: str, record: Path, single: bool = False) -> None:
    """Raise DataError for a file name in a `record` that lies outside the record's folder, because it may be removed.

    With `single`, names with folders are refused too.
    """
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or ".." in parts or "\0" in name or (single and len(parts) > 1):
        raise DataError(f"{record} names {name[:80]!r}, which is outside its folder", "do not use this folder")


def take_lock(file: IO[str]) -> bool:
    """Whether this process got the lock of an open file. It holds the lock until the file is closed."""
    try:
        if sys.platform == "win32":
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # The first is raised by Linux and macOS, the second by Windows.
        return False
    return True


def require_new_folder(path: Path) -> None:
    """Raise DataError if a folder that will be written contains anything, or is a file."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise DataError(f"{path} is not empty", "name a new folder")


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8, atomically."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically. NaN and infinities become null."""
    write_text(path, json.dumps(without_nan(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def without_nan(value: Any) -> Any:
    """Return `value` with None instead of NaN and infinities, which JSON lacks."""
    if isinstance(value, dict):
        return {name: without_nan(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def copy_file(source: Path, destination: Path) -> None:
    """Copy a file's content into a folder that is being written. An error names the file that is at fault."""
    content = open(source, "rb")  # noqa: SIM115 - It is closed below. Only faults of opening are the source's.
    with content, faults_explained(destination), open(destination, "wb") as copy:
        shutil.copyfileobj(content, copy, 2**20)


def link_file(source: str | Path, place: str | Path) -> None:
    """Give a finished file a second name, which stays if the first is removed. Without hard links, copy the file."""
    source, place = Path(source).resolve(), Path(place)
    with faults_explained(place):
        place.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, place)
    except OSError:
        write_atomically(place, functools.partial(copy_file, source))


def _read(path: Path, missing: tuple[str, str], unreadable: str, damaged: str, largest: int | None = None) -> Any:
    """Return the value of a JSON file. DataError if it is missing (`missing`: words, remedy), unreadable or damaged."""
    try:
        return parse_json(path.read_bytes(), largest)
    except FileNotFoundError:
        raise DataError(f"{path} {missing[0]}", missing[1]) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", unreadable) from error
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}", damaged) from error


def read_json(path: Path, form: Any = None) -> Any:
    """Read a JSON artifact. Raises DataError if it is missing, damaged or not of this form (see `has_form`)."""
    again = "delete it and run `distill train` again"
    absent = ("is missing", "run `distill train` on its recipe again")
    value = _read(path, absent, "correct its permissions, or the disk", again, LARGEST)
    if form is not None and not has_form(value, form):
        raise DataError(f"{path} is damaged: it does not have the form that this version writes", again)
    return value


def read_object(path: Path, hint: str = "copy the folder again") -> dict[str, Any]:
    """Read the JSON object in a file of a model folder. DataError if it is missing, damaged or not an object."""
    value = _read(path, ("does not exist", "give a complete Hugging Face folder"), hint, hint)
    if not isinstance(value, dict):
        raise DataError(f"{path} is damaged: a JSON object is needed, got {kind_of(value)}", hint)
    return value


def has_form(value: Any, form: Any) -> bool:
    """Whether a JSON value has a form.

    A form is a type, a list with one form (for lists of it), or a mapping of required keys to forms (`...` stands for
    all keys).
    """
    if isinstance(form, list):
        if isinstance(form[0], type) and isinstance(value, list):  # Long lists of token ids need the speed of C.
            return set(map(type, value)) <= {form[0]}
        return isinstance(value, list) and all(has_form(item, form[0]) for item in value)
    if isinstance(form, dict):
        if not isinstance(value, dict):
            return False
        named = {name: inner for name, inner in form.items() if name is not ...}
        every = [has_form(inner, form[...]) for inner in value.values()] if ... in form else []
        return all(every) and all(name in value and has_form(value[name], inner) for name, inner in named.items())
    return isinstance(value, form) and (form is not int or not isinstance(value, bool))


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


OVER, ADAPTER = " + ", "adapter_config.json"


def over(base: str, adapter: str) -> str:
    """Return the reference of a model with a PEFT adapter merged into it. Every reader of models accepts it."""
    return f"{base}{OVER}{adapter}"


def parts_of(reference: str) -> tuple[str, str | None]:
    """Split a reference into a model's base and the folder of its adapter (see `over`), or None without one."""
    base, mark, adapter = reference.rpartition(OVER)
    return (base, adapter) if mark and not os.path.exists(reference) else (reference, None)


def reference_digest(reference: str, kind: HubKind = "model") -> str:
    """Return the digest of a local model's or source's content. For a hub name, return the name with its commit."""
    base, adapter = parts_of(reference)
    if adapter is not None:
        return joint_digest({"base": reference_digest(base), "adapter": reference_digest(adapter)})
    files = file_digests(reference)
    if files is not None:
        return joint_digest(files)
    commit = hub_commit(reference, kind)
    return reference if commit is None else f"{reference}@{commit}"


HubKind = Literal["model", "dataset"]
HUB_SECONDS = 10


def hub_reference(name: str, kind: HubKind = "model") -> Path:
    """Return the file of the hub's cache that holds the commit of a hub name."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type=kind) / "refs" / "main"


@functools.cache
def hub_commit(name: str, kind: HubKind, /) -> str | None:
    """Return the commit of a hub name; None if it cannot be found. It stays the same until the process ends.

    A model in the hub's cache has the commit of its files there. Otherwise the commit is the newest on the hub.
    """
    from huggingface_hub import HfApi, constants

    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        return None
    place = hub_reference(name, kind)
    with contextlib.suppress(OSError):
        if kind == "model" or constants.HF_HUB_OFFLINE:
            return place.read_text(encoding="utf-8").strip()
    with contextlib.suppress(Exception):  # The hub client raises many kinds. Whoever needs the files names the fault.
        return HfApi().repo_info(name, repo_type=kind, timeout=HUB_SECONDS).sha
    with contextlib.suppress(OSError):
        return place.read_text(encoding="utf-8").strip()
    return None


def file_digests(reference: str) -> dict[str, str] | None:
    """Return the digest of each file of a local model or source, by name ("" for one file). None for a hub name.

    Hidden files and folders do not count. git, the hub's client and file managers rewrite theirs.
    """
    path = Path(reference)
    if not path.exists():
        return None
    if path.is_dir():
        files = {place.relative_to(path): place for place in sorted(path.rglob("*")) if place.is_file()}
        seen = {name.as_posix(): place for name, place in files.items() if not any(p[0] == "." for p in name.parts)}
        return digests_of(seen)
    return digests_of({"" if part == path else part.name: part for part in split_parts(path) if part.is_file()})


def is_gguf(reference: str) -> bool:
    """Whether a model's reference names a GGUF file, by its ending or (as in stores of other programs) by its content.

    A piece of a file that was cut up for an upload counts too. See `distill.gguf.head.open_head`.
    """
    path = Path(reference)
    if OVER in reference and parts_of(reference)[1] is not None:
        return False
    with contextlib.suppress(OSError, ValueError):  # A name that no file can have raises them too.
        if path.is_dir():
            return False
        if path.is_file():
            with path.open("rb") as file:
                if file.read(4) == b"GGUF":
                    return True
    return _GGUF.search(path.name) is not None


_GGUF = re.compile(r"\.gguf([.-](part|split)[\w-]*)?$", re.IGNORECASE)


def split_parts(path: Path) -> list[Path]:
    """Return all parts of a split GGUF file by llama-gguf-split's names (NAME-00001-of-00003.gguf), or the file."""
    match = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path.name)
    if match is None or int(match[2]) < 1:
        return [path]
    return [path.with_name(f"{match[1]}-{number:05}-of-{match[2]}.gguf") for number in range(1, int(match[2]) + 1)]


def digests_of(files: Mapping[str, Path]) -> dict[str, str]:
    """Return the digests of files, by name.

    Files that Python compiled (`__pycache__`) do not count, because they differ between installations.
    """
    return {name: _remembered_digest(file) for name, file in files.items() if "__pycache__" not in name.split("/")}


def joint_digest(files: Mapping[str, str]) -> str:
    """Return one digest of several files, given by name and digest."""
    lines = "".join(f"{name}\0{file_sha256}\n" for name, file_sha256 in files.items())
    return hashlib.sha256(lines.encode()).hexdigest()


def _remembered_digest(path: Path) -> str:
    """Return a file's digest. A large file's digest is cached with the state that shows a change without reading it."""
    state = path.stat()
    if state.st_size < LARGE:
        return file_digest(path)
    return _digest_at(path.resolve(), (state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino, state.st_dev))


@functools.lru_cache(1024)
def _digest_at(path: Path, state: tuple[int, ...]) -> str:
    """Return the digest of a file in this state, from the cache if it is there. The cache is written if possible."""
    place = cache_folder("digests") / f"{digest(str(path))}.json"
    with contextlib.suppress(DistillError, OSError):
        known = read_json(place, {"state": [int], "sha256": str})
        if known["state"] == [*state]:
            return str(known["sha256"])
    sha256 = file_digest(path)
    remember(place, {"state": state, "sha256": sha256})
    return sha256


CacheKind = Literal["imported", "merged", "batches", "digests", "weights", "kernels"]


def cache_folder(kind: CacheKind) -> Path:
    """Return the folder for imported files or facts about files: below DISTILL_CACHE or the user's cache folder."""
    configured = os.environ.get("DISTILL_CACHE")
    base = os.path.expanduser(configured or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "distill"))
    if base.startswith("~"):  # A container's user may have no home.
        base = base.replace("~", os.path.join(os.sep, "nonexistent"), 1)
    return Path(base).absolute() / kind


def remember(place: Path, value: Any) -> None:
    """Keep a JSON value in the cache for later commands, several of which may run at once.

    If the cache is not writable, the work continues, and a warning says once how to change this.
    """
    try:
        text = json.dumps(without_nan(value), allow_nan=False)
        write_atomically(place, lambda temporary: temporary.write_text(text, encoding="utf-8"), several=True)
    except (RunError, OSError) as error:
        fault = getattr(error.__cause__ or error, "strerror", None) or error
        folder = place.parent.parent
        warn_once(
            f"not kept for later commands: {folder} is not writable ({fault}). Set DISTILL_CACHE to another folder"
        )


def digest(value: Any) -> str:
    """Return a short hash of any value that JSON can store."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:20]


# ── Results between dataclasses and JSON artifacts: written once, read back with every field checked ──

Result = TypeVar("Result")

# A number that may be unknown: NaN in a dataclass, and null in JSON, which has no NaN.
Figure = Annotated[
    float,
    BeforeValidator(lambda value: math.nan if value is None else value),
    WithJsonSchema({"type": ["number", "null"]}),
]


def as_json(result: Any) -> Any:
    """Return a dataclass as plain JSON values. An unknown figure (NaN) becomes None."""
    return without_nan(asdict(result))


def write_result(path: Path, result: Any) -> None:
    """Write a dataclass as JSON, atomically."""
    write_json(path, asdict(result))


def read_result(path: Path, kind: type[Result]) -> Result:
    """Read what `write_result` wrote. DataError if it is missing, damaged or of another version's form."""
    return from_json(read_json(path), kind, str(path))


_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}  # by the kinds that were read, because making a TypeAdapter takes a while


def from_json(value: Any, kind: type[Result], source: str) -> Result:
    """Make a dataclass, with nested ones, from JSON values. Raises DataError, naming `source`, for another form."""
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    try:
        return _ADAPTERS[kind].validate_python(value)
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise DataError(
            f"{source} does not have the form that this version writes: {where or 'it'} is missing or has a wrong type",
            "make it again: `distill train RECIPE --redo STAGE`, with the stage that wrote it",
        ) from error
