"""Is greedy speculative output the plain output, token for token? On a finished run, for every draft length 1..8.

    python scripts/check_identity.py runs/demo --prompts 50 --tokens 100 --backend gguf

A first difference is excused where the target's two best logits lie within rounding: 1e-4 in PyTorch fp32; in GGUF the
largest logit difference measured between taking tokens one at a time and γ + 1 at once.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from distill.benchmark.compare import judge_identity, rounding_noise, run_trials
from distill.models.base import Model
from distill.models.gguf import GgufModel
from distill.models.hugging_face import TorchModel, load_model
from distill.recipe import load_recipe
from distill.run import Run
from distill.texts import read_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(range(1, 9)))
    parser.add_argument("--backend", choices=["pytorch", "gguf"], default="gguf")
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.run / "config.yaml")
    run = Run(arguments.run.resolve(), recipe)
    prompts = [prompt.ids for prompt in read_prompts(run, "report")][: arguments.prompts]
    noise = 1e-4
    target: Model
    draft: Model
    if arguments.backend == "gguf":
        target, draft = (
            GgufModel(run.path("gguf", f"{name}-{recipe.speedup.outtype}.gguf"), context=recipe.corpus.block)
            for name in ("target", "draft")
        )
    else:
        target = TorchModel(load_model(recipe.target.model, "float32", torch.device("cpu")))
        draft = TorchModel(load_model(str(run.path("draft")), "float32", torch.device("cpu")))
    trials = run_trials(target, draft, prompts, arguments.lengths, arguments.tokens, (), "prompts")
    if arguments.backend == "gguf":
        text = trials[0].decoded.tokens
        noise = max(rounding_noise(target, prompts[0], text[: length + 1]) for length in arguments.lengths)
    print(f"{arguments.backend}, {len(prompts)} prompts x {arguments.tokens} tokens, rounding {noise:.1e}")
    print("| drafted | identical | excused | different |\n|--:|--:|--:|--:|")
    for length, verdict in sorted(judge_identity(target, prompts, trials, noise).items()):
        print(f"| {length} | {verdict['identical']} | {verdict['excused']} | {verdict['different']} |")


if __name__ == "__main__":
    main()
