"""What a draft learns from the same tokens: optimisers, schedules, hidden states, or any other settings of `train`.

    python scripts/benchmarks/learning.py runs/demo --to learning/                # trains what is missing; resumes
    python scripts/benchmarks/learning.py runs/demo --to learning/ --seeds 0 --only adamw muon           # to screen
    python scripts/benchmarks/learning.py runs/demo --to learning/ \
        --add "muon, high: train.optimizer=muon train.rate=@2"
    python scripts/benchmarks/learning.py runs/demo --to learning/ --table --base adamw

RUN is a run that has cut/ (`distill train recipes/demo.yaml --until cut`); its corpus, answers, teacher and cut are
used as they are, but a configuration that names a key of `cut` makes a cut of its own. A configuration is a name and
overrides, in which @X is X times the rate of the training; what it does not name is AdamW, a cosine and no
hidden states, and for the rest the run's recipe; with --of-recipe all else is as the recipe has it. Each is
trained by stage `train` itself, for the same steps on the same blocks in the same order, in a process of its own,
whose peak memory is recorded; nothing but the last weights is taken. A stopped training goes on from its last
checkpoint.

The rate of each configuration is chosen on validation prompts, from the same grid, with the first seed; the other seeds
take only that rate (--every-rate: all). Figures are on test prompts, averaged over seeds: acceptance on texts that the
target writes, with the interval of the difference to --base, paired by prompt.

Legend: U prompts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from distill.data.texts import Prompt, prompt_seed, read_prompts
from distill.decoding.batch import continue_prompts
from distill.engines.torch.hugging_face import end_ids, load_model, load_tokenizer
from distill.errors import DistillError
from distill.files import write_json
from distill.progress import Progress
from distill.recipe import Recipe, load_recipe
from distill.run import Run
from distill.sampler import Sampler
from distill.tables import paired_ratio_interval
from distill.training.saved import TrainingStep, training_steps

# What every configuration starts from, whatever the run's recipe says: AdamW, a cosine, the last weights.
PLAIN = (
    "train.acceptance=null",
    "train.optimizer=adamw",
    "train.matrix_rate=null",
    "train.schedule=cosine",
    "train.hidden_states=null",
)
MUON = "train.optimizer=muon"
STATES = "train.hidden_states={weight: 0.1, end: 0.8}"
CONFIGURATIONS: dict[str, str] = {
    "adamw": "",
    "muon": MUON,
    "muon, matrices 2x": f"{MUON} train.matrix_rate=@2",
    "muon, matrices 0.5x": f"{MUON} train.matrix_rate=@0.5",
    "adamw, hidden states": STATES,
    "muon, hidden states": f"{MUON} {STATES}",
    "adamw, wsd": "train.schedule=wsd train.final_rate_share=0",
    "muon, wsd": f"{MUON} train.schedule=wsd train.final_rate_share=0",
}
SHARED = ("corpus", "answers", "teacher", "cut", "stages")
SPLITS = ("validation", "test")
PROTOCOLS = ("sampling", "match", "greedy")


class Texts:
    """The target's continuations of some prompts and its distributions there, on which all drafts are measured."""

    def __init__(self, target: Any, recipe: Recipe, prompts: list[Prompt], options: Any, vocabulary: int) -> None:
        sampler = Sampler.of(recipe.sampler)
        ends = end_ids(recipe.target.model, load_tokenizer(recipe.target.model))
        seeds = [prompt_seed(recipe.seed, prompt.id) for prompt in prompts]
        ids = [prompt.ids for prompt in prompts]
        limit = min(options.new_tokens, target.config.max_position_embeddings - max(map(len, ids)))
        answers: list[list[int]] = []
        for start in range(0, len(ids), recipe.answers.batch):
            some = slice(start, start + recipe.answers.batch)
            answers += continue_prompts(target, ids[some], sampler, limit, seeds[some], ends, vocabulary)
        self.rows = [(p, a) for p, a in zip(ids, answers, strict=True) if len(a) > 1]
        self.sampler, self.vocabulary = sampler, vocabulary
        self.distributions = [self._logits(target, row) for row in self.rows]

    @torch.inference_mode()
    def _logits(self, model: Any, row: tuple[list[int], list[int]]) -> torch.Tensor:
        prompt, answer = row
        ids = torch.tensor([[*prompt, *answer]])
        return model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1, : self.vocabulary].float()

    def accepted(self, draft: Any) -> dict[str, list[tuple[float, int]]]:
        """Per protocol, the sum of acceptances and the number of positions of each prompt [U]."""
        found: dict[str, list[tuple[float, int]]] = {name: [] for name in PROTOCOLS}
        for row, target in zip(self.rows, self.distributions, strict=True):
            logits = self._logits(draft, row)
            p, q = self.sampler.probabilities(target), self.sampler.probabilities(logits)
            best = logits.argmax(-1, keepdim=True)
            values = {
                "sampling": torch.minimum(p, q).sum(),
                "match": p.gather(-1, best).sum(),
                "greedy": (target.argmax(-1, keepdim=True) == best).sum(),
            }
            for name, value in values.items():
                found[name].append((float(value), len(p)))
        return found


def overrides_of(text: str, rate: float) -> list[str]:
    """The overrides of a configuration at a rate: parts that begin with `a.b=`, with @X as X · rate."""
    parts = re.split(r"\s+(?=[a-z_]+(?:\.[a-z_]+)+=)", text.strip()) if text.strip() else []
    return [re.sub(r"@([0-9.e+-]+)", lambda found: f"{float(found[1]) * rate:.6g}", part) for part in parts]


def recipe_of(options: Any, text: str, rate: float, seed: int) -> Recipe:
    """The run's recipe for one training; raises RecipeError for overrides that cannot be."""
    length = [f"train.steps={options.steps}", f"train.batch={options.batch}", f"train.rate={rate}", f"seed={seed}"]
    common = ["train.acceptance=null"] if options.of_recipe else PLAIN
    return load_recipe(options.run / "config.yaml", [*common, *length, *overrides_of(text, rate)])


def train(source: Path, folder: Path, recipe: Recipe) -> None:
    """Stage `train` in a run directory that shares everything before it with the run `source`."""
    from distill.surgery.stage import cut
    from distill.training.loop import train as stage

    folder.mkdir(parents=True, exist_ok=True)
    cuts = recipe.cut != load_recipe(source / "config.yaml").cut
    for name in SHARED:
        if cuts and name == "cut":
            continue
        if (source / name).exists() and not (folder / name).exists():
            (folder / name).symlink_to((source / name).resolve(), target_is_directory=True)
    torch.set_num_threads(recipe.threads or torch.get_num_threads())
    with open(folder / "progress.txt", "a", encoding="utf-8") as log, contextlib.redirect_stderr(log):
        run = Run(folder, recipe)
        if cuts and not (folder / "cut" / "config.json").exists():
            cut(recipe, run)
        stage(recipe, run)


def train_apart(source: Path, folder: Path, recipe: Recipe) -> None:
    """`train` in a process of its own; ends the script where that fails."""
    child = multiprocessing.get_context("spawn").Process(target=train, args=(source, folder, recipe))
    child.start()
    child.join()
    if child.exitcode:
        sys.exit(f"a training ended with status {child.exitcode}; {folder / 'progress.txt'} and its message say more")


class Trainings:
    """All trainings of one folder: each is made once."""

    def __init__(self, options: Any, texts: dict[str, Texts]) -> None:
        self.options, self.texts = options, texts

    def made(self, name: str, text: str, rate: float, seed: int) -> dict[str, Any]:
        """One training's figures; trains now if there are none."""
        options = self.options
        path = options.to / f"{name.replace(' ', '_').replace(',', '')}-{rate:g}-{seed}.json"
        same = {
            "overrides": overrides_of(text, rate),
            "steps": options.steps,
            "batch": options.batch,
            "new_tokens": options.new_tokens,
            "run": str(options.run.resolve().name),
        }
        if path.exists():
            found = dict(json.loads(path.read_text()))
            other = {key: found.get(key) for key, value in same.items() if found.get(key) != value}
            if other:
                sys.exit(f"{path} holds {name} with {other}; give another --to, or delete it")
            return found
        folder = options.to / "work" / path.stem
        started = time.time()
        train_apart(options.run, folder, recipe_of(options, text, rate, seed))
        lines = Run(folder, recipe_of(options, text, rate, seed)).metrics()
        steps = training_steps(lines)
        draft = load_model(str(folder / "draft"), "float32", torch.device("cpu"))
        found = {
            "method": name,
            "rate": rate,
            "seed": seed,
            **same,
            "seconds": time.time() - started,
            "tokens": sum(step.tokens for step in steps),
            "seconds_per_step": seconds_per_step(steps),
            "memory_bytes": max(step.memory_bytes or 0 for step in steps),
            **{split: texts.accepted(draft) for split, texts in self.texts.items()},
        }
        write_json(path, found)
        shutil.rmtree(folder)
        figures = ", ".join(f"{split} {mean([found[split]['sampling']]):.4f}" for split in self.texts)
        print(
            f"  {name}, rate {rate:g}, seed {seed}: {figures} ({found['seconds']:.0f} s)", file=sys.stderr, flush=True
        )
        return found

    def work_through(self, name: str, text: str, progress: Progress) -> None:
        """Every rate with the first seed, then the other seeds at the best of them."""
        first, *others = self.options.seeds
        scores = {}
        for rate in self.options.rates:
            scores[rate] = mean([self.made(name, text, rate, first)["validation"]["sampling"]])
            progress.step()
        best = [max(scores, key=lambda rate: scores[rate])]
        for seed in others:
            for rate in self.options.rates if self.options.every_rate else best:
                self.made(name, text, rate, seed)
                progress.step()


def seconds_per_step(steps: list[TrainingStep]) -> float:
    """The mean of the last command that trained: tokens_per_second counts from its start."""
    return sum(step.tokens for step in steps) / len(steps) / steps[-1].tokens_per_second


def mean(rows: list[list[Any]]) -> float:
    """Mean acceptance over seeds and prompts."""
    return sum(v for row in rows for v, _ in row) / sum(n for row in rows for _, n in row)


def _totals(rows: list[list[Any]]) -> tuple[Any, Any]:
    """Per prompt, over seeds, the sum of acceptances and of positions [U]."""
    values, counts = (numpy.array([[one[part] for one in row] for row in rows]).sum(0) for part in (0, 1))
    return values, counts


def table(folder: Path, base: str) -> str:
    """Every configuration on every protocol, at its best rate on validation prompts, compared with `base`, the first.

    Rates are compared on the seeds that all rates of a configuration have; the figures are of every seed at the rate
    taken.
    """
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    names = {one["method"] for one in found}
    if base not in names:
        sys.exit(f"{folder} has no training of {base}, with which the others are compared")
    seeds = len({one["seed"] for one in found})
    lines = [
        f"{seeds} seeds; in brackets the difference to {base} and its 95 % interval, paired by prompt.",
        "",
        "| method | " + " | ".join(f"{p} (rate)" for p in PROTOCOLS) + " | rates tried (seeds) | s per training |",
        "|---|" + "---|" * len(PROTOCOLS) + "---|--:|",
    ]
    compared: dict[str, Any] = {}
    for method in [base, *sorted(names - {base})]:
        cells = []
        own = [one for one in found if one["method"] == method]
        tried = {rate: {one["seed"] for one in own if one["rate"] == rate} for rate in sorted({o["rate"] for o in own})}
        common = set.intersection(*tried.values())
        rates = list(tried) if common else [max(tried, key=lambda rate: len(tried[rate]))]
        common = common or tried[rates[0]]
        for protocol in PROTOCOLS:
            scores = {
                rate: mean([o["validation"][protocol] for o in own if o["rate"] == rate and o["seed"] in common])
                for rate in rates
            }
            rate = max(rates, key=lambda rate: scores[rate])
            rows = {one["seed"]: one["test"][protocol] for one in own if one["rate"] == rate}
            figure = f"{mean(list(rows.values())):.4f} ({rate:g})"
            if method == base:
                compared[protocol] = rows
                cells.append(figure)
                continue
            shared = sorted(rows.keys() & compared[protocol].keys())  # the same seeds on both sides
            old, new = (_totals([one[seed] for seed in shared]) for one in (compared[protocol], rows))
            gap = paired_ratio_interval(*old, *new)
            few = "" if len(rows) == seeds else f" ({len(rows)} of {seeds} seeds)"
            cells.append(f"{figure} [{gap.mean:+.4f}: {gap.low:+.4f}, {gap.high:+.4f}]{few}")
        seconds = numpy.median([one["seconds"] for one in own])
        grid = ", ".join(f"{rate:g} ({len(have)})" for rate, have in tried.items())
        lines.append(f"| {method} | " + " | ".join(cells) + f" | {grid} | {seconds:.0f} |")
    return "\n".join(lines)


def costs(folder: Path, base: str) -> str:
    """Median seconds of a step and peak memory of every configuration, beside those of `base`."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    found = [one for one in found if "seconds_per_step" in one]
    lines = [
        "| configuration | s per step | of the base's | peak memory, MiB | of the base's |",
        "|---|--:|--:|--:|--:|",
    ]

    def figures(name: str) -> tuple[float, float]:
        own = [one for one in found if one["method"] == name]
        return (
            float(numpy.median([one["seconds_per_step"] for one in own])),
            float(numpy.median([one["memory_bytes"] for one in own])),
        )

    names = list(dict.fromkeys(one["method"] for one in found))
    reference = figures(base) if base in names else (float("nan"), float("nan"))
    for name in sorted(names, key=lambda name: (name != base, name)):
        seconds, memory = figures(name)
        lines.append(
            f"| {name} | {seconds:.3f} | {seconds / reference[0]:.2f} | {memory / 2**20:.0f} | "
            f"{memory / reference[1]:.2f} |"
        )
    return "\n".join(lines)


def chosen(options: Any) -> dict[str, str]:
    """The configurations asked for, by name, each readable at every rate; RecipeError for one that is not."""
    known = dict(CONFIGURATIONS)
    for one in options.add or []:
        name, colon, text = one.partition(": ")
        if not colon or not name.strip():
            sys.exit(f"--add {one!r}: write `NAME: a.b=c d.e=f`")
        known[name.strip()] = text
    names = options.only or [*known]
    unknown = [name for name in names if name not in known]
    if unknown:
        sys.exit(f"there is no configuration {', '.join(unknown)}; known: {'; '.join(known)}")
    for name in names:
        recipe_of(options, known[name], options.rates[0], options.seeds[0])
    return {name: known[name] for name in names}


def main() -> None:
    """Train what is missing, then print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--to", type=Path, default=Path("learning"))
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"of {'; '.join(CONFIGURATIONS)}, or of --add")
    parser.add_argument("--add", action="append", metavar="NAME: a.b=c", help="one more configuration")
    parser.add_argument("--of-recipe", action="store_true", help="what a configuration does not name is the recipe's")
    parser.add_argument("--base", default="adamw", help="which the others are compared with")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 2e-3, 4e-3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--every-rate", action="store_true", help="all rates with all seeds")
    parser.add_argument("--new-tokens", type=int, default=96, help="of the texts on which acceptance is measured")
    parser.add_argument("--share", default="0/1", help="i/n: this process takes every n-th configuration")
    parser.add_argument("--table", action="store_true", help="only print the tables of the folder")
    options = parser.parse_args()
    if not options.table:
        try:
            configurations = chosen(options)
        except DistillError as error:
            sys.exit(str(error))
        recipe = load_recipe(options.run / "config.yaml")
        run = Run(options.run, recipe)
        options.to.mkdir(parents=True, exist_ok=True)
        target = load_model(recipe.target.model, "float32", torch.device("cpu"))
        vocabulary = json.loads((options.run / "teacher" / "manifest.json").read_text())["vocabulary"]
        texts = {split: Texts(target, recipe, read_prompts(run, split), options, vocabulary) for split in SPLITS}
        del target
        part, parts = map(int, options.share.split("/"))
        mine = [*configurations.items()][part::parts]
        rates, others = len(options.rates), len(options.seeds) - 1
        each = rates + others * (rates if options.every_rate else 1)
        progress = Progress("trainings", each * len(mine))
        for name, text in mine:
            Trainings(options, texts).work_through(name, text, progress)
    print(table(options.to, options.base), end="\n\n")
    print(costs(options.to, options.base))


if __name__ == "__main__":
    main()
