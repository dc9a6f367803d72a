#!/usr/bin/env bash
# Compiles ik_llama.cpp for this processor, from the source package of the tested ik-llama-cpp-python, and replaces the wheel's two
# libraries, which do not use AVX-512. With AVX-512, prompts are read 1.5× as fast (docs/benchmarks.md).
#
#   bash scripts/build_ik_llama_cpp.sh [FOLDER]      5 minutes on 2 cores, in FOLDER (default: build/ik_llama.cpp); resumes where it stopped
#   pip install --force-reinstall --no-deps ik-llama-cpp-python==0.1.5      restores the wheel's libraries
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder="${1:-build/ik_llama.cpp}"
version="$(sed -n 's/^ik-llama-cpp-python==//p' constraints.txt)"
package="ik_llama_cpp_python-$version"
python="${PYTHON:-.venv/bin/python}"

fail() {
    echo "build_ik_llama_cpp: $1" >&2
    exit 2
}

for tool in g++ cmake tar; do
    command -v "$tool" >/dev/null || fail "no \`$tool\` on this machine (Debian, Ubuntu: apt install build-essential cmake)"
done
[[ -x "$python" ]] || fail "no $python; run \`bash scripts/setup.sh\` first, or name one: PYTHON=python3"
place="$("$python" -c 'import importlib.util; found = importlib.util.find_spec("ik_llama_cpp"); print(found.submodule_search_locations[0] if found else "")')"
[[ -d "$place/lib" ]] || fail "ik-llama-cpp-python is not installed: $python -m pip install ik-llama-cpp-python==$version"

mkdir -p "$folder"
source="$folder/$package/vendor/ik_llama.cpp"
if [[ ! -f "$source/CMakeLists.txt" ]]; then
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary ik-llama-cpp-python \
        --dest "$folder" "ik-llama-cpp-python==$version" 2>/dev/null ||
        [[ -f "$folder/$package.tar.gz" ]] || fail "the source package of ik-llama-cpp-python $version could not be downloaded"
    rm -rf "$folder/unpacking" "${folder:?}/$package"  # of a script that was killed
    mkdir "$folder/unpacking"
    tar -xzf "$folder/$package.tar.gz" -C "$folder/unpacking"
    mv "$folder/unpacking/$package" "$folder/"
fi
# The package's own build fails, because the source package lacks a file of programs that are not needed here. Attention over caches of
# rarer types would take most of the compiler's time. distill uses f16 and q8_0.
# shellcheck disable=SC2086
cmake -S "$source" -B "$folder/build" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DGGML_IQK_FA_ALL_QUANTS=OFF \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DCMAKE_INSTALL_RPATH='$ORIGIN' \
    -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON ${CMAKE_ARGS:-} >"$folder/cmake.log" 2>&1 || fail "cmake refused; see $folder/cmake.log"
cmake --build "$folder/build" --target llama --parallel "${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc 2>/dev/null || echo 2)}"
cp "$folder/build/src/libllama.so" "$folder/build/ggml/src/libggml.so" "$place/lib/"
echo "$place/lib: libllama.so and libggml.so of ik-llama-cpp-python $version, compiled here"
