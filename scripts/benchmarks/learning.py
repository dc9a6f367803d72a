"""Measure what a draft learns from the same tokens with different optimisers, or other settings of `train`.

    python scripts/benchmarks/learning.py runs/demo --to learning/                # trains what is missing; resumes
    python scripts/benchmarks/learning.py runs/demo --to learning/ --seeds 0 --only adamw muon           # to screen
    python scripts/benchmarks/learning.py runs/demo --to learning/ \
        --add "muon, high: train.optimizer=muon train.rate=@2"
    python scripts/benchmarks/learning.py runs/demo --to learning/ --table --base adamw

RUN has cut/ (`distill train recipes/demo.yaml --until cut`). Its corpus, answers, teacher and cut are used. A
configuration is a name and overrides. @X means X times the rate of the training. Overrides start from AdamW, a cosine
and the other settings of the run's recipe. With --of-recipe they start from the recipe alone. A configuration that
names a key of `cut` makes a cut of its own.

Stage `train` itself trains each configuration in a process of its own, for the same steps on the same blocks in the
same order. The last weights are used. A stopped training continues from its checkpoint.

The first seed trains every rate of the grid, and the rate with the most acceptance under sampling on validation prompts
is chosen. The other seeds use only that rate. Figures are acceptances on texts that the target writes to test prompts,
averaged over seeds. The interval is that of the difference to --base, paired by prompt.

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
from collections import deque
from pathlib import Path
from typing import Any

import numpy
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from distill.data.samples import Request, Sample, prompt_seed, read_prompts
from distill.decoding.batch import refill
from distill.engines.ends import target_ends
from distill.engines.loaded import BatchedTorchModel
from distill.engines.torch.hugging_face import load_model, load_tokenizer
from distill.errors import DistillError
from distill.files import write_json
from distill.progress import Progress
from distill.recipe import Recipe, load_recipe
from distill.run import Run
from distill.sampler import probabilities_of
from distill.tables import Cell, Row, Table, document, paired_ratio_interval
from distill.training.saved import training_steps

# Every configuration starts from these settings, even if the run's recipe differs: AdamW, and the last weights.
PLAIN = (
    "train.acceptance=null",
    "train.optimizer=adamw",
)
CONFIGURATIONS = {"adamw": "", "muon": "train.optimizer=muon"}
SHARED = ("corpus", "answers", "teacher", "cut", "stages")
SPLITS = ("validation", "test")
PROTOCOLS = ("sampling", "match", "greedy")


class Texts:
    """The target's continuations of some prompts, with its distributions. All drafts are measured on them."""

    def __init__(self, target: Any, recipe: Recipe, prompts: list[Sample], options: Any, vocabulary: int) -> None:
        sampler = recipe.sampler
        ends = target_ends(recipe.target.model, load_tokenizer(recipe.target.model)).ids
        longest = max(len(sample.prompt) for sample in prompts)
        limit = min(options.new_tokens, target.config.max_position_embeddings - longest)
        rows = BatchedTorchModel(target, recipe.answers.batch, vocabulary)
        seeds = {sample.id: prompt_seed(recipe.seed, sample.id) for sample in prompts}
        requests = deque(Request(sample.id, sample.prompt, seeds[sample.id], limit) for sample in prompts)
        answers = {reply.id: reply.ids for reply in refill(rows, requests, sampler, ends)}
        self.rows = [(sample.prompt, answers[sample.id]) for sample in prompts if len(answers[sample.id]) > 1]
        self.sampler, self.vocabulary = sampler, vocabulary
        self.distributions = [self._logits(target, row) for row in self.rows]

    @torch.inference_mode()
    def _logits(self, model: Any, row: tuple[list[int], list[int]]) -> torch.Tensor:
        prompt, answer = row
        ids = torch.tensor([[*prompt, *answer]])
        return model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1, : self.vocabulary].float()

    def accepted(self, draft: Any) -> dict[str, list[tuple[float, int]]]:
        """Return, by protocol, the sum of acceptances and the number of positions of each prompt [U]."""
        sums: dict[str, list[tuple[float, int]]] = {name: [] for name in PROTOCOLS}
        for row, target in zip(self.rows, self.distributions, strict=True):
            logits = self._logits(draft, row)
            p, q = probabilities_of(self.sampler, target), probabilities_of(self.sampler, logits)
            best = logits.argmax(-1, keepdim=True)
            values = {
                "sampling": torch.minimum(p, q).sum(),
                "match": p.gather(-1, best).sum(),
                "greedy": (target.argmax(-1, keepdim=True) == best).sum(),
            }
            for name, value in values.items():
                sums[name].append((float(value), len(p)))
        return sums


def texts_of(options: Any) -> dict[str, Texts]:
    """Return the texts of both splits on which drafts are measured."""
    run = Run(options.run, load_recipe(options.run / "config.yaml"))
    options.to.mkdir(parents=True, exist_ok=True)
    target = load_model(run.recipe.target.model, "float32", torch.device("cpu"))
    vocabulary = json.loads((options.run / "teacher" / "train" / "manifest.json").read_text())["vocabulary"]
    return {split: Texts(target, run.recipe, read_prompts(run, split), options, vocabulary) for split in SPLITS}


def overrides_of(text: str, rate: float) -> list[str]:
    """Return the overrides of a configuration at a rate: parts that begin with `a.b=`, with @X as X · rate."""
    parts = re.split(r"\s+(?=[a-z_]+(?:\.[a-z_]+)+=)", text.strip()) if text.strip() else []
    return [re.sub(r"@([0-9.e+-]+)", lambda multiple: f"{float(multiple[1]) * rate:.6g}", part) for part in parts]


def recipe_of(options: Any, text: str, rate: float, seed: int) -> Recipe:
    """Return the run's recipe for one training. Raises RecipeError for impossible overrides."""
    length = [f"train.steps={options.steps}", f"train.batch={options.batch}", f"train.rate={rate}", f"seed={seed}"]
    common = ["train.acceptance=null"] if options.of_recipe else PLAIN
    return load_recipe(options.run / "config.yaml", [*common, *length, *overrides_of(text, rate)])


def train(source: Path, folder: Path, recipe: Recipe) -> None:
    """Run stage `train` in a run directory that shares everything before it with the run `source`."""
    from distill.surgery.cutter import cut
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
    """Call `train` in a process of its own. End the script if it fails."""
    child = multiprocessing.get_context("spawn").Process(target=train, args=(source, folder, recipe))
    child.start()
    child.join()
    if child.exitcode:
        sys.exit(f"a training ended with status {child.exitcode}; {folder / 'progress.txt'} and its message say more")


class Trainings:
    """All trainings of one folder. Each is made once."""

    def __init__(self, options: Any, texts: dict[str, Texts]) -> None:
        self.options, self.texts = options, texts

    def trained(self, folder: Path, text: str, rate: float, seed: int) -> tuple[Any, dict[str, Any]]:
        """Return a draft that was trained in this folder, and the figures of its training."""
        recipe = recipe_of(self.options, text, rate, seed)
        train_apart(self.options.run, folder, recipe)
        steps = training_steps(Run(folder, recipe).metrics())
        tokens = sum(step.tokens for step in steps)
        # The last command that trained counts, because tokens_per_second is measured from its start.
        seconds = tokens / len(steps) / steps[-1].tokens_per_second
        draft = load_model(str(folder / "draft"), "float32", torch.device("cpu"))
        return draft, {"tokens": tokens, "seconds_per_step": seconds}

    def made(self, name: str, text: str, rate: float, seed: int) -> dict[str, Any]:
        """Return one training's figures. Train now if there are none."""
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
            saved = dict(json.loads(path.read_text()))
            other = {key: saved.get(key) for key, value in same.items() if saved.get(key) != value}
            if other:
                sys.exit(f"{path} holds {name} with {other}; give another --to, or delete it")
            return saved
        folder = options.to / "work" / path.stem
        draft, figures = self.trained(folder, text, rate, seed)
        accepted = {split: texts.accepted(draft) for split, texts in self.texts.items()}
        result = {"method": name, "rate": rate, "seed": seed, **same, **figures, **accepted}
        write_json(path, result)
        shutil.rmtree(folder, ignore_errors=True)
        return result

    def work_through(self, name: str, text: str, progress: Progress) -> None:
        """Train every rate with the first seed, then the other seeds at the best rate."""
        first, *others = self.options.seeds
        trainings = []
        for rate in self.options.rates:
            trainings.append(self.made(name, text, rate, first))
            score = mean([trainings[-1]["validation"]["sampling"]])
            progress.step(note=f"{name}, rate {rate:g}: {score:.4f}")
        rate = at_best_rate(trainings)[0]["rate"]
        for seed in others:
            self.made(name, text, rate, seed)
            progress.step()


def mean(rows: list[list[Any]]) -> float:
    """Return the mean acceptance over seeds and prompts."""
    return sum(v for row in rows for v, _ in row) / sum(n for row in rows for _, n in row)


def at_best_rate(trainings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one configuration's trainings at the rate with the most acceptance on validation prompts, by seed.

    Rates are compared on the seeds that all of them have.
    """
    rates = {training["rate"] for training in trainings}
    by_rate = {rate: [training for training in trainings if training["rate"] == rate] for rate in rates}
    common = set.intersection(*({training["seed"] for training in group} for group in by_rate.values()))

    def score(rate: float) -> float:
        return mean([training["validation"]["sampling"] for training in by_rate[rate] if training["seed"] in common])

    return sorted(by_rate[max(by_rate, key=score)], key=lambda training: training["seed"])


def _totals(rows: list[list[Any]]) -> tuple[Any, Any]:
    """Return, by prompt, the sum of acceptances and of positions over seeds [U]."""
    values, counts = (numpy.array([[pair[part] for pair in row] for row in rows]).sum(0) for part in (0, 1))
    return values, counts


def table(folder: Path, base: str) -> str:
    """Return every configuration on every protocol at its best rate, compared with `base`, which comes first."""
    trainings = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    names = {training["method"] for training in trainings}
    if base not in names:
        sys.exit(f"{folder} has no training of {base}, with which the others are compared")
    order = [base, *sorted(names - {base})]
    taken = {name: at_best_rate([training for training in trainings if training["method"] == name]) for name in order}
    compared = {training["seed"]: training for training in taken[base]}
    base_seconds = numpy.median([training["seconds_per_step"] for training in taken[base]])
    rows: list[Row] = []
    for name, of_method in taken.items():
        seconds = float(numpy.median([training["seconds_per_step"] for training in of_method]))
        rate = f"{of_method[0]['rate']:g}"
        cells: list[Any] = [name, rate, len(of_method), Cell(seconds, ".3f"), float(seconds / base_seconds)]
        shared = [training for training in of_method if training["seed"] in compared]  # Both sides have these seeds.
        for protocol in PROTOCOLS:
            old = _totals([compared[training["seed"]]["test"][protocol] for training in shared])
            new = _totals([training["test"][protocol] for training in shared])
            gap = None if name == base else Cell(paired_ratio_interval(*old, *new), "+.4f")
            cells += [Cell(mean([training["test"][protocol] for training in of_method]), ".4f"), gap]
        rows.append(cells)
    heads = ["method", "rate", "seeds", "s per step", "of the base's"]
    heads += [head for protocol in PROTOCOLS for head in (protocol, f"{protocol}, difference")]
    note = f"The difference is to {base}, with its 95 % interval, paired by prompt."
    return document([Table(heads, rows, note=note)])


def chosen(options: Any) -> dict[str, str]:
    """Return the requested configurations by name. RecipeError if a configuration has impossible overrides."""
    known = dict(CONFIGURATIONS)
    for added in options.add or []:
        name, colon, text = added.partition(": ")
        if not colon or not name.strip():
            sys.exit(f"--add {added!r}: write `NAME: a.b=c d.e=f`")
        known[name.strip()] = text
    names = options.only or [*known]
    unknown = [name for name in names if name not in known]
    if unknown:
        sys.exit(f"there is no configuration {', '.join(unknown)}; known: {'; '.join(known)}")
    for name in names:
        recipe_of(options, known[name], options.rates[0], options.seeds[0])
    return {name: known[name] for name in names}


def main() -> None:
    """Train what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--to", type=Path, default=Path("learning"))
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"of {'; '.join(CONFIGURATIONS)}, or of --add")
    parser.add_argument("--add", action="append", metavar="NAME: a.b=c", help="one more configuration")
    parser.add_argument("--of-recipe", action="store_true", help="keys that a configuration omits are the recipe's")
    parser.add_argument("--base", default="adamw", help="the configuration to compare with")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 2e-3, 4e-3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--new-tokens", type=int, default=96, help="of the texts on which acceptance is measured")
    parser.add_argument("--table", action="store_true", help="only print the table of the folder")
    options = parser.parse_args()
    if not options.table:
        try:
            configurations = chosen(options)
        except DistillError as error:
            sys.exit(str(error))
        trainings = Trainings(options, texts_of(options))
        progress = Progress("trainings", (len(options.rates) + len(options.seeds) - 1) * len(configurations))
        for name, text in configurations.items():
            trainings.work_through(name, text, progress)
    print(table(options.to, options.base))


if __name__ == "__main__":
    main()
