#!/usr/bin/env bash
# Builds llama-server, llama-speculative-simple and llama-perplexity from the source package of the tested llama-cpp-python,
# so that scripts/benchmarks/beside_llama_cpp.py, `distill serve-check` and the evaluation's KL can be tested with the llama.cpp that
# distill uses.
#
#   bash scripts/build_llama_cpp.sh [FOLDER]      binaries in FOLDER/bin (default: build/llama.cpp); resumes where it stopped
#   CMAKE_ARGS="-DGGML_CUDA=on" bash scripts/build_llama_cpp.sh      with the options of llama-cpp-python
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/compiler_flags.sh

folder="${1:-build/llama.cpp}"
version="$(sed -n 's/^llama-cpp-python==//p' constraints.txt)"
package="llama_cpp_python-$version"
python="${PYTHON:-.venv/bin/python}"

fail() {
    echo "build_llama_cpp: $1" >&2
    exit 2
}

[[ -n "$version" ]] || fail "constraints.txt names no llama-cpp-python"
for tool in g++ cmake tar; do
    command -v "$tool" >/dev/null || fail "no \`$tool\` on this machine (Debian, Ubuntu: apt install build-essential cmake)"
done
[[ -x "$python" ]] || fail "no $python; run \`bash scripts/setup.sh\` first, or name one: PYTHON=python3"

mkdir -p "$folder"
source="$folder/$package/vendor/llama.cpp"
if [[ ! -f "$source/CMakeLists.txt" ]]; then
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python \
        --dest "$folder" "llama-cpp-python==$version" 2>/dev/null ||
        [[ -f "$folder/$package.tar.gz" ]] || fail "the source package of llama-cpp-python $version could not be downloaded"
    rm -rf "$folder/unpacking" "${folder:?}/$package"  # of a script that was killed
    mkdir "$folder/unpacking"
    tar -xzf "$folder/$package.tar.gz" -C "$folder/unpacking"
    mv "$folder/unpacking/$package" "$folder/"
fi
# The web page of the server would be downloaded from a hub, and nothing here needs it.
flags="$(without_amx)"
export CFLAGS="${CFLAGS:+$CFLAGS }$flags" CXXFLAGS="${CXXFLAGS:+$CXXFLAGS }$flags"
# shellcheck disable=SC2086
cmake -S "$source" -B "$folder/build" -DCMAKE_BUILD_TYPE=Release -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_APP=OFF \
    -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF -DBUILD_SHARED_LIBS=OFF ${CMAKE_ARGS:-} >"$folder/cmake.log" 2>&1 ||
    fail "cmake refused; see $folder/cmake.log"
programs=(llama-server llama-speculative-simple llama-perplexity)
cmake --build "$folder/build" --target "${programs[@]}" --parallel "${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc 2>/dev/null || echo 2)}"
mkdir -p "$folder/bin"
for program in "${programs[@]}"; do cp "$folder/build/bin/$program" "$folder/bin/"; done
echo "$folder/bin: ${programs[*]} of llama-cpp-python $version"
