#!/usr/bin/env bash
# Every check that a change must pass: bash scripts/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh
.venv/bin/ruff check .
.venv/bin/mypy distill
.venv/bin/pytest "$@"
