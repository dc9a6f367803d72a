#!/usr/bin/env bash
# The whole way, from text to a measured speedup, on a CPU: bash scripts/demo.sh [a.b=c ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh
.venv/bin/distill train recipes/demo.yaml "$@"
