#!/usr/bin/env bash
# Makes .venv and installs distill into it, with the tested versions; does nothing when that has been done.
#
#   PYTHON=python3.12 bash scripts/setup.sh      another interpreter (it must be 3.11 or newer)
#   TORCH_INDEX=URL bash scripts/setup.sh        torch from another package index, such as its CPU builds
#   CMAKE_ARGS="-DGGML_CUDA=on" bash scripts/setup.sh     llama.cpp for NVIDIA's GPUs (needs nvcc); -DGGML_METAL=on: Apple's
#
# llama-cpp-python is compiled, with other CMAKE_ARGS than before again. Without compilers it is left out, and everything but GGUF works; the next call installs
# it once the compilers are there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${PYTHON:-python3}"
stamp=.venv/.distill-installed
built=.venv/.distill-llama-built # the CMAKE_ARGS that llama.cpp was compiled with, where some were given

fail() {
    echo "setup: $1" >&2
    exit 2
}

command -v "$python" >/dev/null || fail "no \`$python\` on this machine; install Python 3.11 or newer, or name one: PYTHON=/path/to/python3"
versions="$("$python" -c '
import hashlib, pathlib
print(hashlib.sha256(b"".join(pathlib.Path(name).read_bytes() for name in ("pyproject.toml", "constraints.txt"))).hexdigest())')"

missing=()
for tool in gcc g++ cmake; do
    command -v "$tool" >/dev/null || missing+=("$tool")
done
extras=dev
[[ ${#missing[@]} -eq 0 ]] && extras=dev,llama

installed=none
[[ -x .venv/bin/python && -f "$stamp" ]] && installed="$(cat "$stamp")"
again=
[[ "$extras" != dev && -n "${CMAKE_ARGS:-}" && "$(cat "$built" 2>/dev/null)" != "${CMAKE_ARGS:-}" ]] && again=yes
if [[ -z "$again" && ("$installed" == "$versions $extras" || "$installed" == "$versions dev,llama") ]]; then
    exit 0
fi

if [[ ! -x .venv/bin/pip ]]; then
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "\`$python\` is $("$python" -V 2>&1); Python 3.11 or newer is needed: PYTHON=/path/to/python3 bash $0"
    "$python" -c 'import ensurepip' 2>/dev/null ||
        fail "\`$python\` cannot make virtual environments; install its venv package (Debian, Ubuntu: apt install python3-venv)"
fi
if [[ ${#missing[@]} -gt 0 ]]; then
    echo "setup: missing: ${missing[*]}. llama-cpp-python is left out, because it has to be compiled: the demo runs in"
    echo "setup: PyTorch alone, without GGUF files. For those, install what is missing (Debian, Ubuntu:"
    echo "setup: apt install build-essential cmake) and run this again."
fi

[[ -x .venv/bin/pip ]] || { echo "setup: making .venv with $("$python" -V 2>&1)"; "$python" -m venv .venv; }
rm -f "$stamp"
pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt)

export CMAKE_BUILD_PARALLEL_LEVEL="${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc 2>/dev/null || echo 2)}"
echo "setup: installing torch (hundreds of MB; a CUDA build is several GB)"
"${pip[@]}" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' constraints.txt)"

if [[ -n "$again" ]]; then
    # pip keeps wheels whatever CMAKE_ARGS they were compiled with.
    echo "setup: compiling llama-cpp-python with CMAKE_ARGS=$CMAKE_ARGS"
    "${pip[@]}" --force-reinstall --no-cache-dir --no-deps "$(grep '^llama-cpp-python==' constraints.txt)"
    echo "$CMAKE_ARGS" >"$built"
fi

if [[ "$extras" == dev || -n "$again" ]]; then
    echo "setup: installing the rest"
else
    echo "setup: installing the rest; llama-cpp-python is compiled, which takes about 7 minutes on 2 cores"
fi
"${pip[@]}" -e ".[$extras]"

echo "$versions $extras" >"$stamp"
echo "setup: done"
