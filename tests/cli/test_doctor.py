"""`distill doctor`: versions, devices, cores, memory and disk, each fine or with the command that mends it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import types
from email.message import Message
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny
from tiny import Capture, Patch

from distill import __version__, machine
from distill.cli import check as doctor_module
from distill.errors import DataError
from distill.gguf.library import library
from distill.machine import core_limit, thread_count, usable_cores

HIDDEN = "import sys\nfor name in {names!r}: sys.modules[name] = None\nfrom distill.__main__ import main\nmain()\n"


@pytest.fixture(autouse=True)
def quiet(monkeypatch: Patch) -> None:
    """Cores that nobody uses."""
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def metadata(monkeypatch: Patch, *requirements: str, python: str = ">=3.11", **versions: str | None) -> None:
    """Give distill these requirements, and packages (`_` for `-`) these versions, None for one that is missing."""
    real_metadata, real_version = importlib.metadata.metadata, importlib.metadata.version
    own = Message()
    own["Requires-Python"] = python
    for extra in ("llama", "trackers", "dev"):
        own["Provides-Extra"] = extra
    for line in requirements:
        own["Requires-Dist"] = line

    def version(name: str) -> str:
        found = versions.get(name.replace("-", "_"), "")
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found or (__version__ if name == "distill" else real_version(name))

    monkeypatch.setattr(importlib.metadata, "metadata", lambda name: own if name == "distill" else real_metadata(name))
    monkeypatch.setattr(importlib.metadata, "version", version)


def findings(capsys: Capture, *options: object, status: int = 0) -> dict[str, dict[str, Any]]:
    """The rows by the first word of what they look at."""
    capsys.readouterr()
    assert tiny.call("doctor", "-o", "json", *options) == status
    rows = json.loads(capsys.readouterr().out)
    assert len({row["what"] for row in rows}) == len(rows)
    assert all(row["state"] in ("fine", "optional", "warning", "needed") for row in rows)
    assert all(bool(row["remedy"]) == (row["state"] != "fine") for row in rows)
    return {row["what"]: row for row in rows}


def test_here_nothing_is_needed(capsys: Capture, tmp_path: Path) -> None:
    found = findings(capsys, "--runs", tmp_path / "runs")
    assert "(>=2.11)" in found["torch"]["found"] and found["cores"]["found"].startswith(str(usable_cores()))
    assert found["load"]["state"] == "fine" and "AVX" in found["llama.cpp"]["found"] + "AVX"
    assert not list(tmp_path.iterdir())
    assert tiny.call("doctor") == 0 and "| torch |" in capsys.readouterr().out


def test_the_cache_is_listed_and_emptied(capsys: Capture, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("DISTILL_CACHE", str(tmp_path / "cache"))
    for name, size in (("imported/m-12/model.safetensors", 30_000_000), ("weights/a.json", 3), ("own.txt", 1)):
        (tmp_path / "cache" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cache" / name).write_bytes(bytes(size))
    found = findings(capsys)
    assert "models imported from GGUF files, 30.0 MB, last changed " in found["cache: imported"]["found"]
    assert "cache: weights" in found and "cache: merged" not in found
    assert "--clear cost is unknown" in tiny.refused(capsys, "doctor", "--clear", "cost")
    assert tiny.shown(capsys, "doctor", "--clear", "imported").startswith(
        "deleted: models imported from GGUF files, 30.0"
    )
    tiny.shown(capsys, "doctor", "--clear", "all")
    assert [path.name for path in (tmp_path / "cache").rglob("*")] == ["own.txt"]
    assert not tiny.shown(capsys, "doctor", "--clear", "all")


def test_the_metadata_is_the_one_source(monkeypatch: Patch, capsys: Capture) -> None:
    every = importlib.metadata.requires("distill") or []
    names = {package.name for package in machine.packages()}
    assert names == {re.split("[>=\\[]", line)[0] for line in every if 'extra == "dev"' not in line}
    unasked = ('elsewhere; sys_platform == "nowhere"', 'pytest-such>=1; extra == "dev"')
    metadata(monkeypatch, "torch>=999", "nothing-such>=1.5", "numpy>=2", *unasked, python=">=99")
    found = findings(capsys, status=2)
    states = {name: found[name]["state"] for name in ("Python", "torch", "nothing-such", "numpy")}
    assert states == dict.fromkeys(states, "needed") | {"numpy": "fine"}
    assert not {"elsewhere", "pytest-such"} & found.keys()
    assert found["torch"]["remedy"].endswith('install "torch>=999"')
    assert found["nothing-such"]["found"] == "not installed (>=1.5)"
    assert "torch, nothing-such" in tiny.refused(capsys, "doctor")


def test_extras_are_optional(monkeypatch: Patch, capsys: Capture) -> None:
    lines = ('llama-cpp-python>=0.3; extra == "llama"', 'one>=1; extra == "trackers"', 'two>=2; extra == "trackers"')
    metadata(monkeypatch, *lines, llama_cpp_python=None, one="1.1", two="1.9")
    found = findings(capsys)
    one, two = (found[f"{name}, of extra trackers"] for name in ("one", "two"))
    assert one["state"] == "fine"
    assert two["state"] == "warning" and two["remedy"].endswith('install "two>=2"')
    assert found["llama.cpp"]["state"] == "optional" and "llama-cpp-python>=0.3" in found["llama.cpp"]["remedy"]


def test_a_torch_that_is_broken(monkeypatch: Patch, capsys: Capture) -> None:
    def fails(name: str) -> Any:
        raise OSError("libtorch.so: cannot open\nshared object")

    monkeypatch.setattr(doctor_module.importlib, "import_module", fails)
    row = findings(capsys, status=2)["torch's devices"]
    assert row["state"] == "needed" and "libtorch.so: cannot open shared object" in row["found"]


@pytest.mark.parametrize("build", ["CPU", "12.8"])
def test_a_gpu_that_torch_does_not_use(monkeypatch: Patch, capsys: Capture, build: str) -> None:
    off = types.SimpleNamespace(current_accelerator=lambda check_available: None)
    version = types.SimpleNamespace(hip=None, cuda=None if build == "CPU" else build, xpu=None)
    torch = types.SimpleNamespace(accelerator=off, version=version, __version__="2.13.0")
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(doctor_module.shutil, "which", lambda name: f"/bin/{name}")
    row = doctor_module._torch()
    assert row.state == "warning" and ("--index-url" if build == "CPU" else "driver") in row.remedy


def refused_without(names: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command in a process that cannot import these packages, which ends as a user error."""
    command = [sys.executable, "-c", HIDDEN.format(names=names), *arguments]
    result = subprocess.run(command, cwd=tiny.ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr
    return result


def test_packages_that_are_not_there_give_rows() -> None:
    names = ["torch", "transformers", "llama_cpp", "psutil", "gguf", "datasets", "httpx2", "h11", "pyarrow"]
    result = refused_without(names, "doctor")
    rows = {line.split(" | ")[0].strip("| "): line for line in result.stdout.splitlines()}
    assert "needed" in rows["torch's devices"] and "warning" in rows["llama.cpp"]
    assert "cannot be imported" in rows["memory"]


@pytest.mark.parametrize(("name", "words"), [("torch", "`distill doctor`"), ("numpy", "install distill again")])
def test_a_command_without_a_package_says_so(name: str, words: str) -> None:
    said = refused_without([name], "profile", "./nothing").stderr
    assert f"the package {name} is not installed" in said and words in said


def test_threads_and_load(monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(usable_cores() + 1))
    monkeypatch.setattr(os, "getloadavg", lambda: (1e3, 0.0, 0.0))
    monkeypatch.setattr("distill.machine.core_limit", lambda: 0.5)  # a container's
    found = findings(capsys)
    assert found["threads"]["state"] == found["load"]["state"] == "warning"
    assert found["cores"]["found"] == f"1 of {os.cpu_count()} are usable, by a quota of 0.5"
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert "OMP_NUM_THREADS is many" in findings(capsys, status=2)["threads"]["found"]


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "250000 100000"}, 2.5),
        ({"cpu.max": "max 100000", "a/cpu.max": "300000 100000", "a/b/cpu.max": "150000 100000"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4.0),
        ({"cpu.max": "nonsense"}, None),
    ],
)
def test_quotas_bound_the_threads(
    files: dict[str, str], cores: float | None, tmp_path: Path, monkeypatch: Patch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    read = Path.read_text
    own = {"/proc/self/cgroup": "1:cpu:/x\n0::/a/b\n"}
    monkeypatch.setattr(Path, "read_text", lambda self, **more: own.get(str(self)) or read(self, **more))
    monkeypatch.setattr("distill.machine.GROUPS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert core_limit() == cores
    assert thread_count() == usable_cores() == (8 if cores is None else int(cores))
    assert thread_count(5) == 5


def test_little_disk_and_memory(monkeypatch: Patch, capsys: Capture, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor_module.shutil, "disk_usage", lambda place: types.SimpleNamespace(free=10**9))
    memory = types.SimpleNamespace(available=2**30, total=2**34)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    (tmp_path / "file").write_text("")
    for folder, said in (("a", "1.0 GB are free"), ("file", "cannot be written")):
        found = findings(capsys, "--runs", tmp_path / folder / "runs")
        (disk,) = (row for what, row in found.items() if what.startswith("disk"))
        assert disk["state"] == "warning" and said in disk["found"] and found["memory"]["state"] == "warning"


def test_a_build_that_leaves_instructions_unused(monkeypatch: Patch) -> None:
    module = pytest.importorskip("llama_cpp")
    monkeypatch.setattr(doctor_module.machine, "cpu_features", lambda: {"avx2", "fma", "avx512f"})
    for more, state in ((b"", "warning"), (b" | AVX512 = 1", "fine")):
        found = b"CPU : AVX2 = 1 | FMA = 1" + more + b" | "
        monkeypatch.setattr(module, "llama_print_system_info", lambda found=found: found)
        row = doctor_module._llama()
        assert row.state == state and (state == "fine" or "without avx512f" in row.remedy)


def test_the_wheel_of_ik_leaves_instructions_unused(monkeypatch: Patch) -> None:
    """As it comes it knows no AVX-512; a script compiles it for the processor."""
    pytest.importorskip("ik_llama_cpp")
    monkeypatch.setattr(doctor_module.machine, "cpu_features", lambda: {"avx2", "fma", "avx512f"})
    for built, state in ((["AVX2", "FMA"], "warning"), (["AVX2", "FMA", "AVX512"], "fine")):
        monkeypatch.setattr("distill.gguf.library.compiled_with", lambda library, built=built: built)
        (row,) = doctor_module._ik()
        assert row.state == state and (state == "fine" or "scripts/build_ik_llama_cpp.sh" in row.remedy)
    monkeypatch.setattr(doctor_module.machine, "version_of", lambda name: None)
    assert not list(doctor_module._ik())


def test_a_build_with_amx_is_refused(monkeypatch: Patch, capsys: Capture) -> None:
    """PyTorch releases AMX's tiles, and llama.cpp configures them once in a thread."""
    module = pytest.importorskip("llama_cpp")
    monkeypatch.setattr(module, "llama_print_system_info", lambda: b"CPU : AVX2 = 1 | AMX_INT8 = 1 | ")
    flags = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
    command = f'CFLAGS="{flags}" CXXFLAGS="{flags}" pip install --force-reinstall --no-cache-dir'
    row = findings(capsys)["llama.cpp"]
    assert row["state"] == "warning" and "compiled with AMX" in row["found"] and row["remedy"].startswith(command)
    with pytest.raises(DataError, match="compiled with AMX") as refused:
        library.__wrapped__()
    assert command in str(refused.value.hint)
