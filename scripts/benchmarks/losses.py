"""Every loss on every protocol, at equal tokens: the acceptance of the draft it trains.

    python scripts/benchmarks/losses.py runs/demo --to losses/      # a folder that keeps every training; resumes
    python scripts/benchmarks/losses.py runs/demo --to losses/ --share 0/2 & ... --share 1/2     # in two processes

RUN is a run that has a teacher store and cut/ (`distill train recipes/demo.yaml --until cut`). Every method starts
from the same cut draft and sees the same blocks in the same order. `KL, then B` is forward KL for 70 % of the steps and
B for the rest, under one learning-rate curve. The rate of each method and protocol is chosen on validation prompts,
from the same grid; figures are on test prompts: acceptance on texts that the target writes, averaged over seeds, with
the interval of the difference to forward KL, paired by prompt (its seeds together).

Legend: U prompts.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from distill.evaluation.stage import continue_all
from distill.files import write_json
from distill.intervals import paired_ratio_interval
from distill.models.hugging_face import end_ids, load_model, load_tokenizer, pick_device
from distill.recipe import Recipe, Train, load_recipe
from distill.run import Run
from distill.sampler import Sampler
from distill.teacher.source import open_teacher
from distill.texts import Prompt, prompt_seed, read_prompts
from distill.training.losses.settings import LossSettings
from distill.training.optimizer import parameter_groups
from distill.training.plan import PlannedPart, rate_share
from distill.training.step import Columns, Learner, batch_blocks, on_device

SWITCH = 0.7
KL = {"forward_kl": 1.0}
Way = tuple[dict[str, float], float]  # losses, β of a JSD
ALONE: dict[str, Way] = {
    "forward KL": (KL, 0.5),
    "forward KL and 0.1 cross-entropy": ({"forward_kl": 0.9, "cross_entropy": 0.1}, 0.5),
    "JSD(0.1)": ({"jsd": 1.0}, 0.1),
    "JSD(0.5)": ({"jsd": 1.0}, 0.5),
    "reverse KL": ({"reverse_kl": 1.0}, 0.5),
    "cross-entropy": ({"cross_entropy": 1.0}, 0.5),
}
SECOND: dict[str, Way] = {
    "JSD(0.5)": ({"jsd": 1.0}, 0.5),
    "TV": ({"total_variation": 1.0}, 0.5),
    "NLA": ({"nla": 1.0}, 0.5),
    "LK": ({"lk_hybrid": 1.0}, 0.5),
}
METHODS = [*ALONE, *(f"KL, then {name}" for name in SECOND)]
PROTOCOLS = ("sampling", "match", "greedy")


class Texts:
    """The target's continuations of some prompts and its distributions there, on which all drafts are measured."""

    def __init__(self, target: Any, recipe: Recipe, prompts: list[Prompt], options: Any, vocabulary: int) -> None:
        sampler = Sampler.of(recipe.sampler)
        ends = end_ids(target.config, load_tokenizer(recipe.target.model))
        seeds = [prompt_seed(recipe.seed, prompt.id) for prompt in prompts]
        ids = [prompt.ids for prompt in prompts]
        answers = continue_all(target, ids, sampler, options.new_tokens, seeds, ends, recipe.answers.batch, vocabulary)
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


def steps_of(
    learner: Learner, optimizer: Any, source: Any, options: Any, seed: int, rate: float, first: int, last: int, way: Way
) -> None:
    """Train from step `first` to `last` of one curve."""
    losses, beta = way
    part = PlannedPart("x", 0, options.steps, rate, LossSettings(losses, jsd_beta=beta))
    learner.train()
    for step in range(first, last):
        for group in optimizer.param_groups:
            group["lr"] = rate * rate_share(step, options.steps, Train())
        index = batch_blocks(step, options.batch, source.blocks, seed)
        blocks = on_device(source.packed.take(index), torch.device("cpu"))
        total, sums = learner(blocks, source.teacher(index, torch.device("cpu")), part)
        (total / sums["positions"].clamp(min=1)).backward()
        torch.nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    learner.eval()


def trainings(options: Any, run: Run, source: Any, seed: int, rate: float, texts: dict[str, Texts]) -> None:
    """All methods of one seed and rate; a first part that several share is trained once."""
    folder = Path(options.to)
    wanted = [method for method in METHODS if not options.methods or method in options.methods]
    names = {method: file_of(folder, method, rate, seed) for method in wanted}
    if all(path.exists() for path in names.values()):
        return

    def fresh() -> tuple[Learner, Any]:
        torch.manual_seed(seed)
        model = load_model(str(run.path("cut")), "float32", torch.device("cpu"), trimmed=False)
        learner = Learner(model, Columns(source.vocabulary, None, torch.device("cpu")), 1024)
        return learner, torch.optim.AdamW(parameter_groups(model, 0.0), lr=rate, betas=(0.9, 0.95))

    def measure(method: str, learner: Learner, seconds: float) -> None:
        found = {split: text.accepted(learner.draft) for split, text in texts.items()}
        means = {p: sum(v for v, _ in found["test"][p]) / sum(n for _, n in found["test"][p]) for p in PROTOCOLS}
        write_json(names[method], {"method": method, "rate": rate, "seed": seed, "seconds": seconds, **found})
        print(
            f"seed {seed} rate {rate:g} {method}: "
            + ", ".join(f"{p} {v:.4f}" for p, v in means.items())
            + f" ({seconds:.0f} s)",
            file=sys.stderr,
            flush=True,
        )

    switch = round(SWITCH * options.steps)
    learner, optimizer = fresh()
    started = time.time()
    steps_of(learner, optimizer, source, options, seed, rate, 0, switch, ALONE["forward KL"])
    weights, moments = copy.deepcopy(learner.state_dict()), copy.deepcopy(optimizer.state_dict())
    common = time.time() - started
    for method in wanted:
        if names[method].exists():
            continue
        started = time.time()
        learner, optimizer = fresh()
        if method in ALONE and method != "forward KL":
            steps_of(learner, optimizer, source, options, seed, rate, 0, options.steps, ALONE[method])
            measure(method, learner, time.time() - started)
            continue
        learner.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(moments))
        way = ALONE[method] if method in ALONE else SECOND[method.removeprefix("KL, then ")]
        steps_of(learner, optimizer, source, options, seed, rate, switch, options.steps, way)
        measure(method, learner, common + time.time() - started)


def file_stem(method: str) -> str:
    """The beginning of the names of a method's files."""
    return method.replace(" ", "_").replace(",", "")


def file_of(folder: Path, method: str, rate: float, seed: int) -> Path:
    """The file of one training's figures."""
    return folder / f"{file_stem(method)}-{rate:g}-{seed}.json"


def mean(rows: list[list[Any]]) -> float:
    """Mean acceptance over seeds and prompts."""
    return sum(v for row in rows for v, _ in row) / sum(n for row in rows for _, n in row)


def _totals(rows: list[list[Any]]) -> tuple[Any, Any]:
    """Per prompt, over seeds, the sum of acceptances and of positions [U]."""
    values, counts = (numpy.array([[one[part] for one in row] for row in rows]).sum(0) for part in (0, 1))
    return values, counts


def table(folder: Path, resamples: int = 2000, base: str = "forward KL") -> str:
    """Every method on every protocol, at its best rate on validation prompts, compared with `base`, which comes first.

    Rates are compared on the seeds that all rates of a method have; the figures are of every seed at the rate taken.
    """
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    names = {f["method"] for f in found}
    if base not in names:
        sys.exit(f"{folder} has no training of {base}, with which the others are compared")
    methods = list(dict.fromkeys([base, *(m for m in METHODS if m in names), *sorted(names)]))
    seeds = len({f["seed"] for f in found})
    lines = [
        f"{seeds} seeds; in brackets the difference to {base} and its 95 % interval, paired by prompt.",
        "",
        "| method | " + " | ".join(f"{p} (rate)" for p in PROTOCOLS) + " | rates tried (seeds) | s per training |",
        "|---|" + "---|" * len(PROTOCOLS) + "---|--:|",
    ]
    compared: dict[str, Any] = {}
    for method in methods:
        cells = []
        own = [f for f in found if f["method"] == method]
        tried = {rate: {f["seed"] for f in own if f["rate"] == rate} for rate in sorted({f["rate"] for f in own})}
        common = set.intersection(*tried.values())
        rates = list(tried) if common else [max(tried, key=lambda rate: len(tried[rate]))]
        common = common or tried[rates[0]]
        for protocol in PROTOCOLS:
            scores = {
                rate: mean([f["validation"][protocol] for f in own if f["rate"] == rate and f["seed"] in common])
                for rate in rates
            }
            rate = max(rates, key=lambda r: scores[r])
            rows = {f["seed"]: f["test"][protocol] for f in own if f["rate"] == rate}
            figure = f"{mean(list(rows.values())):.4f} ({rate:g})"
            if method == base:
                compared[protocol] = rows
                cells.append(figure)
                continue
            shared = sorted(rows.keys() & compared[protocol].keys())  # the same seeds on both sides
            old, new = (_totals([one[seed] for seed in shared]) for one in (compared[protocol], rows))
            gap = paired_ratio_interval(*old, *new, resamples, 0.95)
            change = f"{gap.mean:+.4f}: {gap.low:+.4f}, {gap.high:+.4f}"
            few = "" if len(rows) == seeds else f" ({len(rows)} of {seeds} seeds)"
            cells.append(f"{figure} [{change}]{few}")
        seconds = numpy.median([f["seconds"] for f in own])
        grid = ", ".join(f"{rate:g} ({len(have)})" for rate, have in sorted(tried.items()))
        lines.append(f"| {method} | " + " | ".join(cells) + f" | {grid} | {seconds:.0f} |")
    return "\n".join(lines)


def main() -> None:
    """Train what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--to", type=Path, default=Path("losses"))
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 2e-3, 4e-3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="only these")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--share", default="0/1", help="i/n: this process takes every n-th training")
    parser.add_argument("--table", action="store_true", help="only print the table of the trainings in the folder")
    options = parser.parse_args()
    if not options.table:
        recipe = load_recipe(options.run / "config.yaml")
        run = Run(options.run, recipe)
        options.to.mkdir(parents=True, exist_ok=True)
        source = open_teacher(run, recipe, pick_device("cpu"))
        target = load_model(recipe.target.model, "float32", torch.device("cpu"))
        texts = {
            split: Texts(target, recipe, read_prompts(run, split), options, source.vocabulary)
            for split in ("validation", "test")
        }
        part, parts = map(int, options.share.split("/"))
        work = [(seed, rate) for seed in options.seeds for rate in options.rates]
        for seed, rate in work[part::parts]:
            trainings(options, run, source, seed, rate, texts)
    print(table(options.to))


if __name__ == "__main__":
    main()
