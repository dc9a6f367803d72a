"""A pretend accelerator: a device of torch, called `pretend`, that computes on the CPU (pretend.cpp) and counts.

It is compiled once per source and version of torch, into torch's folder for extensions. Once loaded, `pretend:0` and
`pretend:1` can be named in this process. Only inside `available()` does torch say that it has an accelerator, so that
`auto` and the libraries mean the CPU everywhere else.

Load it before the first backward pass of a process: autograd counts the devices once.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import gc
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils.cpp_extension import _get_build_directory, include_paths, library_paths

SOURCE = Path(__file__).parent / "pretend.cpp"
NAME = "pretend"
SORTS = "int64 sort"  # in `without`, beside float64 and names of operations


@dataclass
class Counts:
    """What happened inside `counting()`. Launches are operations on the device; views are none.

    A wait is a point where the host needs a number of the device: `.item()`, a copy to the host that is not
    asynchronous into pinned memory, or an operation whose result has a shape that depends on the numbers.
    """

    launches: int = 0
    waits: int = 0
    synchronisations: int = 0
    to_host: int = 0
    bytes_to_host: int = 0
    to_device: int = 0
    unpinned_to_device: int = 0  # of to_device: copies for which the host may wait, from other memory or asked to
    bytes_to_device: int = 0
    operations: dict[str, int] = field(default_factory=dict)  # launches by name, and `wait: …` by what waited


class _State:
    library: Any = None
    devices = 0  # that torch says are available


class _Module(ModuleType):
    """What torch calls as `torch.pretend`."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the pretend device has no {name}")

    def is_available(self) -> bool:
        return _State.devices > 0

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return _State.devices

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def set_device(self, device: Any) -> None:
        torch.accelerator.set_device_index(device)

    def device(self, index: Any) -> Any:
        return torch.accelerator.device_index(index if isinstance(index, int) else torch.device(index).index)

    def get_device_name(self, index: Any = 0) -> str:
        return "Pretend Accelerator"

    def synchronize(self, device: Any = None) -> None:
        torch.accelerator.synchronize(device)

    def empty_cache(self) -> None:
        return None

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return torch.accelerator.get_memory_info(device)

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return False  # the CPU's products in it may be slow

    def get_amp_supported_dtype(self) -> list[Any]:
        return [torch.bfloat16, torch.float16]

    # Random numbers are the CPU's generator's, which torch seeds itself.
    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed(self, seed: int) -> None:
        return None

    def manual_seed_all(self, seed: int) -> None:
        return None

    def get_rng_state(self, device: Any = None) -> Any:
        return torch.get_rng_state()

    def set_rng_state(self, state: Any, device: Any = None) -> None:
        torch.set_rng_state(state)


def absent() -> str | None:
    """The reason why the device cannot be compiled here; None where it can."""
    if sys.platform == "win32":
        return "the pretend device is compiled on Linux and macOS alone"
    return None if _compiler() else "the pretend device needs a C++ compiler: install g++, or name one in CXX"


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX") or "g++")


def load() -> None:
    """Compile the device where that was not done before, and register it with torch; RuntimeError where it fails."""
    if _State.library is not None:
        return
    torch.utils.rename_privateuse1_backend(NAME)
    library = ctypes.CDLL(str(_compiled()))
    library.pretend_counts.restype = ctypes.c_char_p
    library.pretend_limit.argtypes = [ctypes.c_int, ctypes.c_longlong]
    library.pretend_mode.argtypes = [ctypes.c_bool, ctypes.c_bool, ctypes.c_char_p]
    library.pretend_register()
    torch._register_device_module(NAME, _Module(f"torch.{NAME}"))
    _State.library = library


def _compiled() -> Path:
    """The library; processes that want it at once wait for the one that compiles."""
    made_of = SOURCE.read_bytes() + f"{torch.__version__} {torch.version.git_version}".encode()
    folder = Path(_get_build_directory("distill_pretend", verbose=False))
    path = folder / f"pretend_{hashlib.sha256(made_of).hexdigest()[:16]}.so"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            made = path.with_suffix(".part")
            command = [_compiler(), "-shared", "-fPIC", "-O1", "-std=c++20", str(SOURCE), "-o", str(made)]
            command += [f"-I{place}" for place in include_paths()] + [f"-L{place}" for place in library_paths()]
            command += ["-lc10", "-ltorch_cpu", "-ltorch"]
            outcome = subprocess.run(command, capture_output=True, text=True, check=False)
            if outcome.returncode:
                raise RuntimeError(f"{SOURCE} does not compile:\n{outcome.stderr[-4000:]}")
            os.replace(made, path)
    return path


@contextlib.contextmanager
def available(devices: int = 1) -> Iterator[None]:
    """Let torch say inside that it has so many (1 or 2) accelerators of this kind."""
    load()
    before, _State.devices = _State.devices, devices
    try:
        yield
    finally:
        _State.devices = before


@contextlib.contextmanager
def counting() -> Iterator[Counts]:
    """What the device is asked inside; the figures are there after the block. Blocks may be nested."""
    load()
    found = Counts()
    events, operations = _counts()
    yield found
    for name, value in _counts()[0].items():
        setattr(found, name.replace(" ", "_"), value - events.get(name, 0))
    changed = {name: value - operations.get(name, 0) for name, value in _counts()[1].items()}
    found.operations = {name: value for name, value in changed.items() if value}


def _counts() -> list[dict[str, int]]:
    counts: list[dict[str, int]] = json.loads(_State.library.pretend_counts())
    return counts


@contextlib.contextmanager
def memory(more: int | None = None, device: int = 0) -> Iterator[None]:
    """Let the device have so many bytes inside, beyond those that are used now; more raise torch.OutOfMemoryError."""
    load()
    gc.collect()  # what is garbage would be given back inside
    _State.library.pretend_limit(device, 0 if more is None else torch.accelerator.memory_allocated(device) + more)
    try:
        yield
    finally:
        _State.library.pretend_limit(device, 0)


@contextlib.contextmanager
def without(*names: str) -> Iterator[None]:
    """Take away `float64`, SORTS, or operations by name (`aten::sort`, `aten::sort.values`) inside."""
    load()
    refused = "\n".join(name for name in names if name.startswith("aten::"))
    torch.accelerator.get_device_capability.cache_clear()
    _State.library.pretend_mode("float64" not in names, SORTS not in names, refused.encode())
    try:
        yield
    finally:
        torch.accelerator.get_device_capability.cache_clear()
        _State.library.pretend_mode(True, True, b"")


@functools.cache
def lacking(backend: str = "MPS") -> Sequence[str]:
    """Operations for which torch has kernels on CPU but not on this backend, as its own list of them says."""
    import torchgen

    path = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    kernels: dict[str, set[str]] = {}
    delegates: dict[str, str] = {}
    for entry in re.split(r"^- func: ", path.read_text(encoding="utf-8"), flags=re.M)[1:]:
        name = entry.split("(", 1)[0]
        kernels[name] = set(re.split(r"[,\s]+", " ".join(re.findall(r"^    ([\w, ]+):", entry, flags=re.M))))
        if delegate := re.search(r"structured_delegate: (\S+)", entry):
            delegates[name] = delegate[1]
    found = []
    for name, own in kernels.items():
        have = own | kernels.get(delegates.get(name, ""), set())
        if "CPU" in have and not {backend, "CompositeExplicitAutograd", "CompositeImplicitAutograd"} & have:
            found.append(f"aten::{name}")
    return found
