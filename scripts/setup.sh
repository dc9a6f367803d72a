#!/usr/bin/env bash
# Makes .venv and installs distill into it, with the tested versions; does nothing when that has been done.
#
#   PYTHON=python3.12 bash scripts/setup.sh      another interpreter (it must be 3.11 or newer)
#   TORCH_INDEX=URL bash scripts/setup.sh        torch from another package index, such as its CPU builds
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${PYTHON:-python3}"
stamp=.venv/.distill-installed

fail() {
    echo "setup: $1" >&2
    exit 2
}

command -v "$python" >/dev/null || fail "no \`$python\` on this machine; install Python 3.11 or newer, or name one: PYTHON=/path/to/python3"
wanted="$("$python" -c '
import hashlib, pathlib
print(hashlib.sha256(b"".join(pathlib.Path(name).read_bytes() for name in ("pyproject.toml", "constraints.txt"))).hexdigest())')"

if [[ -x .venv/bin/python && -f "$stamp" && "$(cat "$stamp")" == "$wanted" ]]; then
    exit 0
fi

if [[ ! -x .venv/bin/pip ]]; then
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "\`$python\` is $("$python" -V 2>&1); Python 3.11 or newer is needed: PYTHON=/path/to/python3 bash $0"
    "$python" -c 'import ensurepip' 2>/dev/null ||
        fail "\`$python\` cannot make virtual environments; install its venv package (Debian, Ubuntu: apt install python3-venv)"
fi
for tool in gcc g++ cmake; do
    command -v "$tool" >/dev/null ||
        fail "no \`$tool\`, which compiles llama-cpp-python; install it (Debian, Ubuntu: apt install build-essential cmake) and run this again"
done

[[ -x .venv/bin/pip ]] || { echo "setup: making .venv with $("$python" -V 2>&1)"; "$python" -m venv .venv; }
rm -f "$stamp"
pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt)

echo "setup: installing torch (hundreds of MB; a CUDA build is several GB)"
"${pip[@]}" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' constraints.txt)"

echo "setup: installing the rest; llama-cpp-python is compiled, which takes about 7 minutes on 2 cores"
CMAKE_BUILD_PARALLEL_LEVEL="${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc 2>/dev/null || echo 2)}" "${pip[@]}" -e ".[dev]"

echo "$wanted" >"$stamp"
echo "setup: done"
