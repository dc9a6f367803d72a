#!/usr/bin/env bash
# Every check that a change must pass: bash scripts/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh
.venv/bin/ruff format --check .
.venv/bin/ruff check .
.venv/bin/mypy distill
# One process per core, one thread each: torch threads of several processes get in each other's way.
processes="${TEST_PROCESSES:-$(nproc 2>/dev/null || echo 2)}"
export OMP_NUM_THREADS=1  # only now, for nproc counts by it too
.venv/bin/pytest -n "$processes" --dist loadfile "$@"
