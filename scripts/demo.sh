#!/usr/bin/env bash
# The whole demo, from text to a measured speedup, on a CPU: bash scripts/demo.sh [--full] [a.b=c ...]
#
#   --full    more text, more training, more prompts and a larger grown target; takes longer
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh
settings=()
if [[ "${1:-}" == --full ]]; then
    shift
    settings+=(corpus.tokens=400000 answers.prompts=256 train.steps=300 eval.prompts=64 eval.new_tokens=96
        eval.file_blocks=48 speedup.prompts=12 'speedup.lengths=[1,2,4,6,8]' 'speedup.grown={tile: 4, layers: 24}')
fi
if ! .venv/bin/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("llama_cpp") is None)'; then
    settings+=('speedup.backends=[pytorch]' 'export.outtypes=[]')
    without_llama="demo: llama-cpp-python is not installed: PyTorch alone. Not checked: GGUF files and llama.cpp's speed."
    echo "$without_llama"
fi
.venv/bin/distill train recipes/demo.yaml ${settings[@]+"${settings[@]}"} "$@"
[[ -z "${without_llama:-}" ]] || echo "$without_llama"
