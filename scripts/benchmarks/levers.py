"""Measure acceptance on held-out answers by settings of a training in equal seconds, and by the number of answers.

    python scripts/benchmarks/levers.py RUN --to FOLDER --seconds 240 "muon:" "adamw: train.optimizer=adamw"
    python scripts/benchmarks/levers.py RUN --to FOLDER --blocks 25,50,100,0 "adamw: train.optimizer=adamw"
    python scripts/benchmarks/levers.py RUN --to FOLDER --table --base muon
    python scripts/benchmarks/levers.py RUN --to FOLDER --table --seen --base zero         # zero: train.rate=1e-9

RUN has answers/, teacher/ (kind exact) and cut/ (`distill train RECIPE --until cut`). The script changes nothing in it.
A configuration is a name, a colon and overrides of the run's recipe. Each configuration trains the run's cut with the
steps of stage `train`, in a process of its own. Steps go on for --seconds. With --blocks, a training is instead one
epoch of that many blocks of answers (0: all). --held blocks, the same for all configurations, are never trained on.

The measure is the chance that rejection sampling accepts the draft's token under the recipe's sampler, at each position
of the held blocks. A configuration with a result in FOLDER is not trained again. --save keeps the last weights as
FOLDER/NAME.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from distill.engines.torch.blocks import scored_states
from distill.recipe import load_recipe
from distill.run import Run
from distill.sampler import probabilities_of
from distill.tables import Table, document, paired_ratio_interval, ratio_interval
from distill.training import loop
from distill.training.optimizer import rate_share
from distill.training.saved import plain
from distill.training.setup import Training, batch_blocks, set_up

CPU = torch.device("cpu")
PART = 64  # positions whose distributions are computed at once
PARTS = 1000  # parts of a training's seconds, for the rate
SEEN = ("acceptance", "agreement", "forward_kl")  # figures of a step's blocks before they are learnt, at temperature 1


@torch.no_grad()
def accepted(work: Training, held: torch.Tensor) -> list[list[float]]:
    """Return sums by held block: acceptance under the recipe's sampler, argmax agreement, forward KL, positions."""
    learner: Any = plain(work.learner).eval()
    sampler, columns, by_block = work.recipe.sampler, learner.columns, []
    for block in held.split(1):
        stored = work.source.read(block)
        blocks, teacher = stored.blocks, stored.distributions(CPU)
        with work.accelerator.autocast():
            _, sums = learner(blocks, teacher, work.loss)
            narrow = blocks if learner.place is None else replace(blocks, ids=learner.place[blocks.ids.long()])
            rows = columns.rows if learner.place is None else columns.first
            hidden = scored_states(learner.draft, narrow)
            head = rows(learner.draft.lm_head.weight)[: columns.count]
            shares = agree = 0.0
            for start in range(0, len(hidden), PART):
                part = slice(start, min(start + PART, len(hidden)))
                logits = (hidden[part].to(torch.bfloat16) @ head.T.to(torch.bfloat16)).float()
                target = teacher.chunk(part, 1.0).log_probabilities.float()
                if columns.kept is not None:
                    logits = torch.full_like(target, -torch.inf).index_copy_(1, columns.kept, logits)
                agree += float((logits.argmax(-1) == target.argmax(-1)).sum())
                shares += float(probabilities_of(sampler, logits).minimum(probabilities_of(sampler, target)).sum())
        by_block.append([shares, agree, float(sums["forward_kl"]), float(sums["positions"])])
    learner.train()
    return by_block


def train(given: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    """Train one configuration and return its figures."""
    recipe = load_recipe(given.run / "config.yaml", ["train.steps=1000000", "train.acceptance=null", *overrides])
    torch.set_num_threads(given.threads)
    work = set_up(recipe, Run(given.run, recipe))
    order = torch.randperm(len(work.source.packed), generator=torch.Generator().manual_seed(7))
    held, learnt = order[: given.held], order[given.held :]
    learnt = learnt[: given.count or None]
    batch = recipe.train.batch
    steps = -(-len(learnt) // batch)
    before, spent, step, tokens, shown = accepted(work, held), 0.0, 0, 0, time.monotonic()
    seen: list[list[float]] = []
    work.blocks = lambda step: learnt[batch_blocks(step, batch, len(learnt), recipe.seed)]  # type: ignore[method-assign]
    while spent < given.seconds if given.seconds else step < steps:
        share = rate_share(int(spent / given.seconds * PARTS), PARTS) if given.seconds else rate_share(step, steps)
        began = time.monotonic()
        taken = loop.Pending(step, share, loop.one_step(work, step, work.rate * share), {})
        (figures,) = loop.fetched(work, [taken])
        spent, step, tokens = spent + time.monotonic() - began, step + 1, tokens + figures["tokens"]
        seen.append([figures[name] for name in SEEN])
        if time.monotonic() - shown > 20:
            shown = time.monotonic()
            pace = f"step {step}, {spent:.0f} s: {tokens / spent:.0f} tokens/s"
            print(f"  {pace}, acceptance {figures['acceptance']:.3f} on what it learns from", flush=True)
    if given.save:
        with work.draft() as final:
            final.config.use_cache = True
            final.save_pretrained(given.to / given.name)
    epochs = step * batch / len(learnt)
    after = accepted(work, held)
    made = {"steps": step, "tokens": tokens, "seconds": spent, "epochs": epochs}
    return made | {"before": before, "after": after, "seen": seen}


def table(folder: Path, base: str | None) -> Table:
    """Return all results, with differences to `base` or to the untrained cut, paired by block."""
    results = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    rows = []
    for name, result in results.items():
        first, last = (list(zip(*result[when], strict=True)) for when in ("before", "after"))
        other = first if base is None else list(zip(*results[base]["after"], strict=True))
        mean, gain = ratio_interval(last[0], last[3]), paired_ratio_interval(other[0], other[3], last[0], last[3])
        positions = sum(last[3])
        accepted, rise = f"{mean.mean:.4f}", f"{gain.mean:+.4f} [{gain.low:+.4f}, {gain.high:+.4f}]"
        pace, epochs = result["tokens"] / max(result["seconds"], 1), f"{result['epochs']:.1f}"
        agreed, kl = f"{sum(last[1]) / positions:.3f}", f"{sum(last[2]) / positions:.3f}"
        rows.append([name, f"{result['tokens']:,}", epochs, f"{pace:.0f}", accepted, rise, agreed, kl])
    heads = ["configuration", "tokens", "epochs", "tokens/s", "acceptance"]
    return Table([*heads, f"difference to {base or 'the untrained cut'}", "argmaxes agree", "KL"], rows)


def seen_table(folder: Path, base: str) -> Table:
    """Return each configuration's acceptance on blocks that it has not learnt yet, compared with `base`.

    Figures are means over the steps from the fifth on that both made. A training at a rate of almost 0 stands for the
    cut.
    """
    by_name = {path.stem: json.loads(path.read_text())["seen"] for path in sorted(folder.glob("*.json"))}
    rows: list[list[Any]] = []
    for name, steps in by_name.items():
        pairs = list(zip(steps, by_name[base], strict=False))[4:]
        rises = [sum(step[i] - other[i] for step, other in pairs) / len(pairs) for i in range(len(SEEN))]
        rows.append([name, len(steps), *(f"{rise:+.3f}" for rise in rises)])
    return Table(["configuration", "steps", *(f"{figure}, difference to {base}" for figure in SEEN)], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("configurations", nargs="*", help="NAME: KEY=VALUE ...")
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=0)
    parser.add_argument("--blocks", default="0", help="blocks of answers, separated by commas")
    parser.add_argument("--held", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--base", help="the configuration to compare with")
    parser.add_argument(
        "--seen", action="store_true", help="a table of blocks during training, for trainings of under an epoch"
    )
    parser.add_argument("--name", help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_intermixed_args()
    given.run, given.to = given.run.resolve(), given.to.resolve()
    if given.name:
        result = train(given, given.configurations)
        (given.to / f"{given.name}.json").write_text(json.dumps(result))
        return
    given.to.mkdir(parents=True, exist_ok=True)
    counts = [int(count) for count in given.blocks.split(",")]
    for configuration in given.configurations:
        name, _, overrides = configuration.partition(":")
        for count in counts:
            label = name if len(counts) == 1 else f"{name}-{count or 'all'}"
            if (given.to / f"{label}.json").exists():
                continue
            print(label, flush=True)
            options = ["--to", given.to, "--held", given.held, "--threads", given.threads, "--seconds", given.seconds]
            command = [
                sys.executable,
                __file__,
                given.run,
                *overrides.split(),
                *options,
                "--name",
                label,
                "--count",
                count,
            ]
            subprocess.run([*map(str, command), *["--save"] * given.save], check=True)
    print(document([seen_table(given.to, given.base) if given.seen else table(given.to, given.base)]))


if __name__ == "__main__":
    main()
