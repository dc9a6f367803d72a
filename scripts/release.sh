#!/usr/bin/env bash
# Builds the sdist, and the wheel from it, tests the wheel in an empty environment outside this checkout, and leaves both in dist/.
#
#   bash scripts/release.sh                      every command's help, doctor, recipes, and a rehearsed training of the demo recipe
#   PYTHON=python3.12 bash scripts/release.sh    another interpreter (3.11 or newer)
#   TORCH_INDEX=URL bash scripts/release.sh      torch from another package index, such as its CPU builds
#
# llama-cpp-python is tested too if pip has its wheel in the cache, or if gcc, g++ and cmake can compile it (7 minutes on 2 cores).
# WITHOUT_LLAMA=1 leaves it out. The recipe is then rehearsed only in PyTorch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/compiler_flags.sh

python="${PYTHON:-python3}"
checkout="$PWD"
unset PYTHONPATH

fail() {
    echo "release: $1" >&2
    exit 2
}

command -v "$python" >/dev/null || fail "no \`$python\` on this machine; name one: PYTHON=/path/to/python3"
version="$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' distill/__init__.py)"
grep -q "^## .*\b$version\b" CHANGELOG.md || fail "CHANGELOG.md has no heading with $version, the version in distill/__init__.py"

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

echo "release: building distill $version"
"$python" -m venv "$work/tools"
"$work/tools/bin/python" -m pip install --quiet --disable-pip-version-check build twine
"$work/tools/bin/python" -m build --outdir "$work/dist" . >"$work/build.log" 2>&1 || { tail -n 30 "$work/build.log" >&2; fail "the build failed"; }
"$work/tools/bin/python" -m twine check --strict "$work"/dist/*
wheel="$(echo "$work"/dist/distill-"$version"-*.whl)"
[[ -f "$wheel" ]] || fail "the build left no wheel of distill $version"

llama=
if [[ -z "${WITHOUT_LLAMA:-}" ]]; then
    pinned="$(sed -n 's/^llama-cpp-python==//p' constraints.txt)"
    if command -v gcc >/dev/null && command -v g++ >/dev/null && command -v cmake >/dev/null; then
        llama=yes
    elif "$work/tools/bin/python" -m pip cache list llama_cpp_python 2>/dev/null | grep -q "llama_cpp_python-$pinned"; then
        llama=yes
    fi
fi
settings=('speedup.lengths=[2,4]') # More lengths would take most of a rehearsal's time.
if [[ -z "$llama" ]]; then
    echo "release: llama-cpp-python is left out: PyTorch alone. Not tried: GGUF files."
    settings+=('speedup.backends=[pytorch]' 'export.outtypes=[]')
fi

echo "release: installing the wheel into an empty environment"
"$python" -m venv "$work/environment"
pip=("$work/environment/bin/python" -m pip install --quiet --disable-pip-version-check -c "$checkout/constraints.txt")
"${pip[@]}" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' constraints.txt)"
mending="$(without_amx)"
if [[ -n "$llama" && -n "$mending" ]]; then # The wheel in pip's cache may use AMX, so it is not used.
    CFLAGS="$mending" CXXFLAGS="$mending" "${pip[@]}" --no-cache-dir "$(grep '^llama-cpp-python==' "$checkout/constraints.txt")"
fi
"${pip[@]}" "$wheel${llama:+[llama]}"

export PATH="$work/environment/bin:$PATH" DISTILL_CACHE="$work/cache"
mkdir "$work/user"
cd "$work/user"
python -I -c 'import distill, sys; assert distill.__file__.startswith(sys.prefix), distill.__file__'
[[ "$(distill --version)" == "distill $version" ]] || fail "the wheel says $(distill --version)"
for command in $(python -I -c 'from distill.cli.app import COMMANDS; print(*COMMANDS)'); do
    distill "$command" --help >/dev/null || fail "distill $command --help failed"
done
distill doctor
distill recipes
distill recipes demo
distill check demo.yaml "${settings[@]}"
distill train demo.yaml --rehearse "${settings[@]}"

cd "$checkout"
rm -rf dist
mv "$work/dist" dist
python -I - dist/* <<'END'
import hashlib, pathlib, sys
for path in map(pathlib.Path, sys.argv[1:]):
    content = path.read_bytes()
    print(f"release: {path}  {len(content) / 1e6:.1f} MB  sha256 {hashlib.sha256(content).hexdigest()}")
END
