"""This machine's processor, cores, memory and GPU, and the package versions that figures depend on. Without torch."""

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

# ── Processor, cores, memory and GPU ──
PACKAGES = ("torch", "transformers", "datasets", "peft", "accelerate", "gguf", "safetensors", "llama-cpp-python")

FAST_WITH = {  # A dtype is fast with one of these processor features, in the names of /proc/cpuinfo.
    "bfloat16": {"avx512_bf16", "amx_bf16", "bf16", "svebf16"},
    "float16": {"avx512_fp16", "amx_fp16", "asimdhp"},
}

VARIABLE = "OMP_NUM_THREADS"  # torch and other libraries read it too.
MOST_THREADS = 1024  # More threads crash the libraries that create them.


def machine() -> dict[str, Any]:
    """Return processor, cores, memory, GPU (the first accelerator, if torch is loaded and finds one) and versions."""
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
    """Return the number of processor cores that this process may use, limited by a container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    limit = core_limit()
    return cores if limit is None else max(1, min(cores, int(limit)))


GROUPS = Path("/sys/fs/cgroup")


def core_limit() -> float | None:
    """Return the number of cores that quotas allow this process on Linux, or None without a quota.

    For control groups of version 2, the process's group and its parents count. For version 1, the container's counts.
    """
    group = ""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        group = next((line.removeprefix("0::").strip("/") for line in lines if line.startswith("0::")), "")
    parts, limits = Path(group).parts, []
    for folder in (GROUPS.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)):
        with contextlib.suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
            limits.append(float(quota) / float(period))  # `max` raises ValueError.
    with contextlib.suppress(OSError, ValueError):
        quota, period = (
            (GROUPS / "cpu" / f"cpu.cfs_{name}_us").read_text(encoding="ascii") for name in ("quota", "period")
        )
        limits += [float(quota) / float(period)] if float(quota) > 0 else []
    return min(limits, default=None)


def thread_count(threads: int | None = None) -> int:
    """Return the CPU threads for models: `threads`, or OMP_NUM_THREADS if it is set, or all usable cores.

    If the variable lists a number for each nested level, the first counts. Raises RecipeError for anything but 1 to
    MOST_THREADS.
    """
    name, count = ("threads", str(threads)) if threads is not None else (VARIABLE, os.environ.get(VARIABLE, ""))
    count = count.partition(",")[0].strip()
    if not count:
        return usable_cores()
    if not re.fullmatch("[0-9]{1,9}", count) or not 0 < int(count) <= MOST_THREADS:
        raise RecipeError(f"{name} is {count[:40]}", f"give a number of threads from 1 to {MOST_THREADS}")
    return int(count)


TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # options in glibc's malloc.h
KEPT_BYTES = 2**28  # The process keeps at most this much freed memory.
LARGEST_KEPT_BYTES = 2**25  # Larger blocks are returned to the system at once.


def keep_freed_memory() -> None:
    """Let the C library keep freed memory for the next tensor.

    By default it returns the memory of a step over a large vocabulary, and the kernel clears every page again. That
    takes 2.3 of 2.6 ms for five distributions of 152k tokens.
    """
    with contextlib.suppress(OSError, AttributeError):  # Other systems have other C libraries.
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018
        libc.mallopt(TRIM_THRESHOLD, KEPT_BYTES)
        libc.mallopt(MMAP_THRESHOLD, LARGEST_KEPT_BYTES)


def _described(*names: str) -> str | None:
    """Return the value in /proc/cpuinfo of the first processor under one of these names, or None."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in names:
                return value.strip()
    return None


def cpu_features() -> set[str] | None:
    """Return the processor features in /proc/cpuinfo, or None if it does not exist or lists none."""
    features = _described("flags", "Features")  # the names on x86 and on ARM
    return None if features is None else set(features.split())


def has_instructions(dtype: str) -> bool | None:
    """Whether this processor has instructions for a dtype. None if its features are unknown."""
    features = cpu_features()
    return None if features is None else dtype not in FAST_WITH or bool(features & FAST_WITH[dtype])


def faster_type(dtype: str) -> str | None:
    """Return a dtype that this processor computes faster than `dtype`.

    None if it has instructions for `dtype`, or if its features are unknown.
    """
    if has_instructions(dtype) is not False:
        return None
    return "bfloat16" if dtype == "float16" and has_instructions("bfloat16") else "float32"


# ── The packages that distill needs or can use, by its own metadata, and the installed versions ──

DEVELOPERS = "dev"  # Users do not need this extra.
COMPILE_LLAMA = "pip install --force-reinstall --no-cache-dir --no-deps --no-binary llama-cpp-python llama-cpp-python"
_NO_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"  # See scripts/compiler_flags.sh.
WITHOUT_AMX = f'CFLAGS="{_NO_AMX}" CXXFLAGS="{_NO_AMX}"'


@dataclass(frozen=True)
class Package:
    """A package in distill's metadata.

    `requirement` is like `torch>=2.11`. `extra` is None if the package is always needed. `installed` is the installed
    version, or None.
    """

    name: str
    requirement: str
    extra: str | None
    installed: str | None

    @property
    def fits(self) -> bool:
        """Whether a supported version is installed."""
        if self.installed is None:
            return False
        try:
            return Requirement(self.requirement).specifier.contains(Version(self.installed), prereleases=True)
        except InvalidVersion:  # A private build may have any name.
            return True

    @property
    def found(self) -> str:
        """The installed version and the oldest supported version."""
        specifier = str(Requirement(self.requirement).specifier)
        return f"{self.installed or 'not installed'} ({specifier})" if specifier else str(self.installed)


def required_python() -> str | None:
    """Return the Python versions that the metadata allows, such as `>=3.11`. None if distill is not installed."""
    return None if version_of("distill") is None else importlib.metadata.metadata("distill")["Requires-Python"]


def packages() -> list[Package]:
    """Return the packages in the installed metadata, without developers' tools. Empty if distill is not installed."""
    if version_of("distill") is None:
        return []
    metadata = importlib.metadata.metadata("distill")
    extras = [name for name in metadata.get_all("Provides-Extra") or [] if name != DEVELOPERS]
    needed = []
    for line in metadata.get_all("Requires-Dist") or []:
        wanted = Requirement(line)
        extra = None
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            extra = next((name for name in extras if wanted.marker.evaluate({"extra": name})), DEVELOPERS)
        if extra != DEVELOPERS:
            needed.append(Package(wanted.name, f"{wanted.name}{wanted.specifier}", extra, version_of(wanted.name)))
    return needed


def install_extra(extra: str) -> str:
    """Return the command that installs an extra, such as `llama`.

    The command names the packages, because pip finds `distill[llama]` only on an index, and many users have a checkout
    or a wheel.
    """
    requirements = [package.requirement for package in packages() if package.extra == extra]
    return (
        pip_install(*requirements) if requirements else f"{pip_install('-e', f'.[{extra}]')} in the checkout of distill"
    )


def version_of(name: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def pip_install(*requirements: str) -> str:
    """Return the command that installs packages into this interpreter's environment, in any shell."""
    on_path = shutil.which("pip")
    here = Path(sys.executable).parent
    is_ours = on_path is not None and Path(on_path).parent.resolve() == here.resolve()
    pip = "pip" if is_ours else f'"{sys.executable}" -m pip'
    quoted = (f'"{name}"' if set(name) & set("<>=!~[]; ") else name for name in requirements)
    return " ".join([pip, "install", *quoted])
