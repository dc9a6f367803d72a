"""Processor, cores, memory and GPU of this machine, and the package versions that figures depend on. No torch here."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import platform
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from distill.devices import accelerators, device_name
from distill.errors import RecipeError

# ── Processor, cores, memory and GPU of this machine, and the package versions that figures depend on. No torch
# here ──

PACKAGES = ("torch", "transformers", "datasets", "peft", "accelerate", "gguf", "safetensors", "llama-cpp-python")

FAST_WITH = {  # features of a processor, as /proc/cpuinfo names them, one of which makes a type fast
    "bfloat16": {"avx512_bf16", "amx_bf16", "bf16", "svebf16"},
    "float16": {"avx512_fp16", "amx_fp16", "asimdhp"},
}

VARIABLE = "OMP_NUM_THREADS"  # what torch and other libraries read
MOST_THREADS = 1024  # more crash the libraries that make them


def machine() -> dict[str, Any]:
    """Processor, cores, memory, GPU (the first accelerator, if torch is loaded and sees one) and versions."""
    import psutil

    versions = {name: version_of(name) for name in PACKAGES}
    return {
        "cpu": _described("model name") or platform.processor() or platform.machine(),
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpu": next(map(device_name, accelerators()), None),
        "platform": platform.platform(),
        "python": platform.python_version(),
        **{name: version for name, version in versions.items() if version is not None},
    }


def usable_cores() -> int:
    """Processor cores this process may run on, no more than a container's quota pays for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    limit = core_limit()
    return cores if limit is None else max(1, min(cores, int(limit)))


GROUPS = Path("/sys/fs/cgroup")


def core_limit() -> float | None:
    """The cores' worth of time that quotas leave this process, on Linux; None without one.

    Of control groups of version 2 the own one and those around it count, of version 1 the container's.
    """
    own = ""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        own = next((line.removeprefix("0::").strip("/") for line in lines if line.startswith("0::")), "")
    parts, limits = Path(own).parts, []
    for folder in (GROUPS.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)):
        with contextlib.suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
            limits.append(float(quota) / float(period))  # ValueError for `max`
    with contextlib.suppress(OSError, ValueError):
        quota, period = (
            (GROUPS / "cpu" / f"cpu.cfs_{name}_us").read_text(encoding="ascii") for name in ("quota", "period")
        )
        limits += [float(quota) / float(period)] if float(quota) > 0 else []
    return min(limits, default=None)


def thread_count(threads: int | None = None) -> int:
    """CPU threads of the models: `threads`, else OMP_NUM_THREADS where it is set, else all usable cores.

    Of a variable that lists a number for each nested level, the first counts. RecipeError for anything but 1 to
    MOST_THREADS.
    """
    name, count = ("threads", str(threads)) if threads is not None else (VARIABLE, os.environ.get(VARIABLE, ""))
    count = count.partition(",")[0].strip()
    if not count:
        return usable_cores()
    if not re.fullmatch("[0-9]{1,9}", count) or not 0 < int(count) <= MOST_THREADS:
        raise RecipeError(f"{name} is {count[:40]}", f"give a number of threads from 1 to {MOST_THREADS}")
    return int(count)


TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # as glibc's malloc.h numbers them
KEPT, LARGEST_KEPT = 2**28, 2**25  # bytes: free ones that stay the process's; the largest block taken from among them


def keep_freed_memory() -> None:
    """Let the C library keep freed memory for the next tensor. By default it returns what a step over a large
    vocabulary allocates, and the kernel clears every page of it again: 2.3 of 2.6 ms for five distributions of 152k."""
    with contextlib.suppress(OSError, AttributeError):  # other systems have other libraries
        own = ctypes.CDLL(None)
        own.gnu_get_libc_version  # noqa: B018
        own.mallopt(TRIM_THRESHOLD, KEPT)
        own.mallopt(MMAP_THRESHOLD, LARGEST_KEPT)


def _described(*names: str) -> str | None:
    """What /proc/cpuinfo says of the first processor under one of these names; None where it does not."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in names:
                return value.strip()
    return None


def cpu_features() -> set[str] | None:
    """The features that /proc/cpuinfo lists; None where it does not exist or lists none."""
    found = _described("flags", "Features")  # x86, ARM
    return None if found is None else set(found.split())


def has_instructions(dtype: str) -> bool | None:
    """Whether this processor has instructions for a type; None where its features are unknown."""
    features = cpu_features()
    return None if features is None else dtype not in FAST_WITH or bool(features & FAST_WITH[dtype])


def faster_type(dtype: str) -> str | None:
    """The type that this processor computes faster than `dtype`; None where it has instructions for it, or where its
    features are unknown."""
    if has_instructions(dtype) is not False:
        return None
    return "bfloat16" if dtype == "float16" and has_instructions("bfloat16") else "float32"


# ── The packages that distill needs or can use, as its own metadata names them, beside those installed. No torch
# here ──

DEVELOPERS = "dev"  # the extra that no user needs
COMPILE_LLAMA = "pip install --force-reinstall --no-cache-dir --no-deps --no-binary llama-cpp-python llama-cpp-python"
_NO_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"  # see scripts/compiler_flags.sh
WITHOUT_AMX = f'CFLAGS="{_NO_AMX}" CXXFLAGS="{_NO_AMX}"'


@dataclass(frozen=True)
class Package:
    """A package that the metadata names: its requirement, such as `torch>=2.11`, the extra that it is of (None for
    one that is always needed), and the version installed (None without one)."""

    name: str
    requirement: str
    extra: str | None
    installed: str | None

    @property
    def fits(self) -> bool:
        """Whether it is installed in a version that is supported."""
        if self.installed is None:
            return False
        try:
            return Requirement(self.requirement).specifier.contains(Version(self.installed), prereleases=True)
        except InvalidVersion:  # a build with a name of its own
            return True

    @property
    def found(self) -> str:
        """The version beside the oldest that is supported."""
        specifier = str(Requirement(self.requirement).specifier)
        return f"{self.installed or 'not installed'} ({specifier})" if specifier else str(self.installed)


def required_python() -> str | None:
    """The versions of Python that the metadata allows, such as `>=3.11`; None where distill is not installed."""
    return None if version_of("distill") is None else importlib.metadata.metadata("distill")["Requires-Python"]


def packages() -> list[Package]:
    """Everything that the installed metadata names but the developers' tools; empty where distill is not installed."""
    if version_of("distill") is None:
        return []
    metadata = importlib.metadata.metadata("distill")
    extras = [name for name in metadata.get_all("Provides-Extra") or [] if name != DEVELOPERS]
    found = []
    for line in metadata.get_all("Requires-Dist") or []:
        wanted = Requirement(line)
        extra = None
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            extra = next((name for name in extras if wanted.marker.evaluate({"extra": name})), DEVELOPERS)
        if extra != DEVELOPERS:
            found.append(Package(wanted.name, f"{wanted.name}{wanted.specifier}", extra, version_of(wanted.name)))
    return found


def install_extra(extra: str) -> str:
    """The command that installs what an extra, such as `llama`, names.

    It names the packages themselves: pip finds `distill[llama]` on an index alone, and many run a checkout or a wheel.
    """
    named = [one.requirement for one in packages() if one.extra == extra]
    return pip_install(*named) if named else f"{pip_install('-e', f'.[{extra}]')} in the checkout of distill"


def version_of(name: str) -> str | None:
    """The version of a package that is installed; None without one."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def pip_install(*requirements: str) -> str:
    """The command that installs packages into the environment of this interpreter, in any shell."""
    beside = shutil.which("pip")
    here = Path(sys.executable).parent
    own = beside is not None and Path(beside).parent.resolve() == here.resolve()
    pip = "pip" if own else f'"{sys.executable}" -m pip'
    return " ".join([pip, "install", *(f'"{one}"' if set(one) & set("<>=!~[]; ") else one for one in requirements)])
