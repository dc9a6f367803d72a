"""Compare an older commit's training with today's on the same answers, cut, seed and steps: tokens/s and acceptance.

    python scripts/benchmarks/beside_old.py runs/qwen-coder-1.5b --old c306903f --steps 12

RUN has answers/, cut/ and prompts of a test split (`distill train RECIPE --until cut`). Nothing in it is changed. Each
side reads the run's answers, makes its own store of the target's distributions and trains the run's cut, in processes
of its own. The old side goes first. A step's tokens are its scored positions, which both sides must count alike.
Acceptance under the run's sampler is measured by today's code on texts that the target writes to test prompts, for the
untrained draft and both trained ones. `--repeat 2` trains again in the opposite order. The old code goes to a temporary
folder.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
# A training reads these keys of a recipe. Both versions know them.
SECTIONS = {
    "target": ("model", "dtype"),
    "corpus": ("block",),
    "sampler": ("temperature", "top_k", "top_p", "min_p"),
    "cut": ("donor", "layers", "mlp_width", "trim"),
    "train": ("batch", "optimizer", "rate", "loss", "dtype", "micro_batch"),
}
CHILD = """
import importlib, sys, time
from pathlib import Path
from distill.data.packing import pack
from distill.data.samples import write_samples
from distill.pipeline.stages import find_stage
from distill.recipe import load_recipe
from distill.run import Run
folder = Path(sys.argv[1])
recipe = load_recipe(folder / "recipe.yaml")
run = Run(folder, recipe)
if sys.argv[2] == "teacher":  # The stage also reads given text and held-out prompts. There are none.
    run.path("corpus").mkdir()
    for split in ("train", "validation", "test"):
        pack([], recipe.corpus.block, False).save(run.path("corpus", f"text-{split}.safetensors"))
        write_samples(run.path("corpus", f"prompts-{split}.arrow"), [])
module, function = find_stage(sys.argv[2]).function.split(":")
made = getattr(importlib.import_module(module), function)(recipe, run)
if sys.argv[2] == "teacher":
    run.finish("teacher", "", {}, made, time.time())
"""


def recipe_of(run: Path, steps: int) -> dict[str, Any]:
    """Return a recipe for the run's answers that both versions read."""
    import yaml

    given = yaml.safe_load((run / "config.yaml").read_text())
    recipe: dict[str, Any] = {"name": "beside", "seed": given["seed"], "threads": given["threads"]}
    recipe |= {section: {name: given[section][name] for name in names} for section, names in SECTIONS.items()}
    recipe["corpus"] |= {"sources": [{"kind": "text", "path": str(run / "recipe.yaml")}], "tokens": 0}
    recipe["teacher"] = {"kind": "exact"}
    recipe["train"] |= {"steps": steps, "acceptance": None, "save_every": 10**6}
    return recipe


def make(side: str, run: Path, folder: Path, answers: int | None, steps: int) -> None:
    """Make the folder of a side. Each version finds the shared answers where it looks for them."""
    from distill.data.samples import read_answers, write_samples
    from distill.files import write_json
    from distill.recipe import load_recipe
    from distill.run import Run

    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "recipe.yaml", recipe_of(run, steps))  # JSON is YAML, too.
    (folder / "cut").symlink_to((run / "cut").resolve(), target_is_directory=True)
    written = read_answers(Run(run, load_recipe(run / "config.yaml")), "train")
    kept = [sample for sample in written if not sample.dropped][:answers]
    for name in ("train-00000.arrow", "train/00000.arrow"):
        write_samples(folder / "answers" / name, kept)
    shutil.copy(run / "answers/manifest.json", folder / "answers")
    print(f"{side}: {len(kept)} answers of {sum(len(sample.answer) for sample in kept)} tokens", flush=True)


def stage(name: str, tree: Path, folder: Path) -> None:
    """Run a stage by the code in `tree`, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    subprocess.run([sys.executable, "-c", CHILD, str(folder), name], check=True, env=environment, cwd=tree)


def trained(folder: Path) -> tuple[list[int], float, float]:
    """Return tokens of each step, tokens/s from the second step on, and peak memory in bytes."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["stage"] == "train"]
    timed = steps[1:] or steps
    rate = sum(line["tokens"] for line in timed) / sum(line["seconds"] for line in timed)
    return [line["tokens"] for line in steps], rate, steps[-1]["memory_bytes"]


def acceptances(run: Path, drafts: dict[str, Path], prompts: int, new_tokens: int) -> dict[str, Any]:
    """Return, for each draft, the sum of acceptances and the number of positions by prompt."""
    import torch
    from learning import Texts

    from distill.data.samples import read_prompts
    from distill.engines.torch.hugging_face import load_model, load_target
    from distill.recipe import load_recipe
    from distill.run import Run

    recipe = load_recipe(run / "config.yaml")
    cpu = torch.device("cpu")
    target = load_target(recipe.target, cpu)
    vocabulary = target.config.get_text_config().vocab_size
    asked = list(read_prompts(Run(run, recipe), "test"))[:prompts]
    texts = Texts(target, recipe, asked, SimpleNamespace(new_tokens=new_tokens), vocabulary)
    return {name: texts.accepted(load_model(str(path), "float32", cpu))["sampling"] for name, path in drafts.items()}


def shown(estimate: Any) -> str:
    """Return a mean with its interval."""
    return f"{estimate.mean:.4f} [{estimate.low:.4f}, {estimate.high:.4f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--old", default="c306903f", help="a commit")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--answers", type=int, help="use the first answers of the run (default: all)")
    parser.add_argument("--repeat", type=int, default=1, help="trainings of each side")
    parser.add_argument("--prompts", type=int, default=12, help="prompts of the test split")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens of the texts that measure acceptance")
    given = parser.parse_args()
    sys.path[:0] = [str(ROOT)]
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        trees = {given.old: place / "code", "today": ROOT}
        trees[given.old].mkdir()
        packed = subprocess.run(["git", "archive", given.old], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "x", "-C", str(trees[given.old])], input=packed, check=True)
        for side, tree in trees.items():
            make(side, given.run.resolve(), place / side, given.answers, given.steps)
            stage("teacher", tree, place / side)
        trainings: dict[str, list[Any]] = {side: [] for side in trees}
        for turn in range(given.repeat):
            for side in list(trees)[:: -1 if turn % 2 else 1]:
                folder = place / side
                for old in ("metrics.jsonl", "training.json"):
                    (folder / old).unlink(missing_ok=True)
                shutil.rmtree(folder / "draft", ignore_errors=True)
                stage("train", trees[side], folder)
                shutil.rmtree(folder / "checkpoints")
                trainings[side].append(trained(folder))
                tokens, rate, memory = trainings[side][-1]
                print(f"{side}: {rate:.1f} tokens/s, {sum(tokens)} tokens, {memory / 2**30:.1f} GiB", flush=True)
        before, after = (trainings[side] for side in trees)
        assert before[0][0] == after[0][0], f"the steps have other tokens: {before[0][0]}, {after[0][0]}"
        ratios = [new[1] / old[1] for old, new in zip(before, after, strict=True)]
        print("today / old, tokens/s:", ", ".join(f"{ratio:.2f}" for ratio in ratios), flush=True)
        from distill.tables import paired_ratio_interval, ratio_interval

        drafts = {"untrained": given.run / "cut", **{side: place / side / "draft" for side in trees}}
        accepted = acceptances(given.run.resolve(), drafts, given.prompts, given.new_tokens)
        columns = {side: tuple(zip(*rows, strict=True)) for side, rows in accepted.items()}
        for side, (sums, counts) in columns.items():
            print(f"acceptance, {side}: {shown(ratio_interval(sums, counts))}")
        print(f"today - old: {shown(paired_ratio_interval(*columns[given.old], *columns['today']))}")


if __name__ == "__main__":
    main()
