#!/usr/bin/env bash
# Runs every check that a change must pass: bash scripts/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh
if ! .venv/bin/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("llama_cpp") is None)'; then
    echo "test: the tests need llama-cpp-python; install gcc, g++ and cmake and run this again" >&2
    exit 2
fi
.venv/bin/ruff format --check .
.venv/bin/ruff check .
# Tests start some hundred processes. With this variable set, each would compile the package again.
unset PYTHONDONTWRITEBYTECODE
# The checks of types need one core. Meanwhile the other compiles the tests, which each process would else do again.
PYTEST_ADDOPTS="" .venv/bin/pytest --collect-only -q >/dev/null 2>&1 &
.venv/bin/mypy distill
wait  # for the compilation, whose errors the tests show again
# Each core gets one process with one thread, because torch threads of several processes slow each other down.
processes="${TEST_PROCESSES:-$(nproc 2>/dev/null || echo 2)}"
export OMP_NUM_THREADS=1  # It is set after nproc, which reads it too.
.venv/bin/pytest -n "$processes" --dist loadfile --no-loadscope-reorder "$@"
