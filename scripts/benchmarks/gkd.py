"""trl's GKD trainer beside our losses: the same cut draft, the same blocks in the same order, the same measure.

    python scripts/benchmarks/gkd.py runs/demo --to losses/ --tune            # resumes; a second process: --share 1/2
    python scripts/benchmarks/learning.py runs/demo --to losses/ --table      # the table of everything in the folder

RUN is a run that has a teacher store and cut/ (`distill train recipes/demo.yaml --until cut`); --to is the folder of
learning.py. Two methods: `trl GKD, defaults` (β .5, λ .5) and, with --tune, `trl GKD, tuned`: the β and λ whose
draft is accepted most on validation prompts (sampling) at the middle rate and the first seed. Both then take every rate
and seed, or with --narrow every rate at the first seed and the other seeds at its best rate.

From the trainer come its loss, its mixture of texts that the draft writes (temperature .9, at most 128 tokens: its
defaults) and its denominator. From us come the optimiser, each step's rate and clipping, as for every other method. Its
default rate (2e-5), meant for large models, would hardly move one this small, so the grid replaces it; gradient
checkpointing, its default, is off, and bf16 where --bf16 does not ask for it. --cut names another draft to start from,
such as one without repaired layers, which other tools lack.

Tokens are counted as positions, scored or not. A step of ours is `batch` blocks; here it is the documents of those
blocks, one a row, scored at the same positions. Where the draft writes instead, the longest pieces of the same
documents give as many prompts as fill the same positions with their answers (prompts are not scored).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from learning import Texts, mean, table

from distill.data.packing import Packed
from distill.data.texts import read_prompts
from distill.devices import pick_device
from distill.engines.torch.hugging_face import load_model, load_tokenizer
from distill.files import write_json
from distill.progress import Progress
from distill.recipe import Train, load_recipe
from distill.run import Run
from distill.teacher.store import open_teacher
from distill.training.step import batch_blocks, parameter_groups, rate_share

DEFAULTS = (0.5, 0.5)
CANDIDATES = [(beta, share) for share in (0.0, 0.5) for beta in (0.1, 0.5, 0.9)]
TEMPERATURE, NEW_TOKENS = 0.9, 128  # GKDConfig's defaults
UNSCORED = -100

Row = tuple[list[int], int]  # a document's ids, and its first token whose distribution counts


def file_stem(method: str) -> str:
    """The beginning of the names of a method's files, as learning.py names them."""
    return method.replace(" ", "_").replace(",", "")


def file_of(folder: Path, method: str, rate: float, seed: int) -> Path:
    """The file of one training's figures."""
    return folder / f"{file_stem(method)}-{rate:g}-{seed}.json"


def rows_of(blocks: Packed) -> list[Row]:
    """The documents of packed blocks, in order, except those without a scored position."""
    rows: list[Row] = []
    for ids, documents, mask in zip(blocks.ids, blocks.documents, blocks.mask, strict=True):
        for document in range(int(documents.max()) + 1):
            here = documents == document
            scored = mask[here].nonzero()
            if len(scored):
                rows.append((ids[here].tolist(), int(scored[0]) + 1))
    return rows


def prompts_of(rows: list[Row], positions: int, prompt_tokens: int, new_tokens: int) -> list[list[int]]:
    """The first tokens of the longest pieces of the rows: as many as fill `positions` together with their answers.

    A piece is as long as a prompt with its answer; of a shorter one, at most half is the prompt.
    """
    width = prompt_tokens + new_tokens
    pieces = [ids[at : at + width] for ids, _ in rows for at in range(0, len(ids), width)]
    longest = sorted(pieces, key=len, reverse=True)[: max(1, positions // width)]
    return [piece[: min(prompt_tokens, math.ceil(len(piece) / 2))] for piece in longest]


def padded(rows: list[list[int]], filler: int) -> Tensor:
    """Rows as one tensor, padded on the left as by trl's own collator and as generation needs."""
    width = max(map(len, rows))
    return torch.tensor([[filler] * (width - len(row)) + row for row in rows])


def batch_of(rows: list[Row], prompts: list[list[int]], padding: int) -> dict[str, Tensor]:
    """The input of GKDTrainer: texts with labels at scored positions, and prompts that the draft may continue instead.

    The prompts are a separate batch: the trainer replaces the texts by the draft's continuations.
    """
    return {
        "input_ids": padded([ids for ids, _ in rows], padding),
        "attention_mask": padded([[1] * len(ids) for ids, _ in rows], 0),
        "labels": padded([[UNSCORED] * first + ids[first:] for ids, first in rows], UNSCORED),
        "prompts": padded(prompts, padding),
        "prompt_attention_mask": padded([[1] * len(ids) for ids in prompts], 0),
    }


def arguments_of(options: Any, beta: float, share: float, seed: int, folder: str) -> Any:
    """GKDConfig: one batch a step, in order, fp32 on the CPU, nothing written or reported."""
    from trl.experimental.gkd import GKDConfig

    return GKDConfig(
        output_dir=folder,
        max_steps=options.steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        train_sampling_strategy="sequential",
        seed=seed,
        max_grad_norm=1.0,
        beta=beta,
        lmbda=share,
        temperature=TEMPERATURE,
        max_new_tokens=NEW_TOKENS,
        bf16=options.bf16,
        gradient_checkpointing=False,
        use_cpu=True,
        dataloader_pin_memory=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )


def train(
    draft: Any, target: Any, data: Any, options: Any, beta: float, share: float, rate: float, seed: int
) -> dict[str, int]:
    """Train `draft` in place with trl's GKDTrainer; how many positions it learnt from and how many it scored."""
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl.experimental.gkd import GKDTrainer

    packed, tokenizer, prompt_tokens = data
    counts = {"positions": 0, "scored": 0, "steps_on_own_text": 0}
    progress = Progress(f"β {beta:g} λ {share:g} rate {rate:g} seed {seed}: steps", options.steps)

    def collate(items: list[dict[str, int]]) -> dict[str, Tensor]:
        (item,) = items
        blocks = packed.take(batch_blocks(item["step"], options.batch, len(packed), seed))
        rows = rows_of(blocks)
        prompts = prompts_of(rows, blocks.ids.numel(), prompt_tokens, NEW_TOKENS)
        return batch_of(rows, prompts, tokenizer.pad_token_id)

    class Counting(GKDTrainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
            counts["positions"] += int(inputs["attention_mask"].sum())
            counts["scored"] += int((inputs["labels"][:, 1:] != UNSCORED).sum())
            begun = inputs["input_ids"][:, : inputs["prompts"].shape[1]]
            counts["steps_on_own_text"] += int(torch.equal(begun, inputs["prompts"]))
            return super().compute_loss(model, inputs, *rest, **named)

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *rest: Any, **named: Any) -> None:
            progress.step()

    optimizer = torch.optim.AdamW(parameter_groups(draft), lr=rate, betas=(0.9, 0.95))
    curve = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_share(step, options.steps, Train()))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Counting(
            model=draft,
            teacher_model=target,
            args=arguments_of(options, beta, share, seed, folder),
            data_collator=collate,
            train_dataset=Dataset.from_dict({"step": list(range(options.steps))}),
            processing_class=tokenizer,
            optimizers=(optimizer, curve),
            callbacks=[Steps()],
        )
        trainer.remove_callback(PrinterCallback)
        random.seed(seed)  # by which it decides whose text a step takes
        trainer.train()
    draft.eval()
    return counts


class Trainings:
    """All trainings of one folder: each is made once, even if the table names it twice."""

    def __init__(self, options: Any) -> None:
        recipe = load_recipe(options.run / "config.yaml")
        self.options, self.run = options, Run(options.run, recipe)
        self.target = load_model(recipe.target.model, "float32", torch.device("cpu"))
        self.cut = options.cut or self.run.path("cut")
        source = open_teacher(self.run, recipe, pick_device("cpu"))
        tokenizer = load_tokenizer(str(self.cut))
        self.data = source.packed, tokenizer, recipe.answers.prompt_tokens
        self.texts = {
            split: Texts(self.target, recipe, read_prompts(self.run, split), options, source.vocabulary)
            for split in ("validation", "test")
        }

    def path(self, beta: float, share: float, rate: float, seed: int) -> Path:
        """The file of a training's figures."""
        return Path(self.options.to) / "gkd" / f"beta-{beta:g}-lambda-{share:g}-{rate:g}-{seed}.json"

    def made(self, beta: float, share: float, rate: float, seed: int) -> dict[str, Any]:
        """One training's figures; trains now if there are none."""
        path = self.path(beta, share, rate, seed)
        if path.exists():
            return dict(json.loads(path.read_text()))
        torch.manual_seed(seed)
        draft = load_model(str(self.cut), "float32", torch.device("cpu"), trimmed=False)
        started = time.time()
        counts = train(draft, self.target, self.data, self.options, beta, share, rate, seed)
        seconds = time.time() - started
        found = {
            "rate": rate,
            "seed": seed,
            "seconds": seconds,
            "beta": beta,
            "lambda": share,
            "temperature": TEMPERATURE,
            "max_new_tokens": NEW_TOKENS,
            "trl": version("trl"),
            **counts,
            **{split: text.accepted(draft) for split, text in self.texts.items()},
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, found)
        return found

    def best(self) -> tuple[float, float]:
        """The β and λ accepted most on validation prompts; ends the script if a candidate is missing."""
        rate, seed = middle(self.options.rates), self.options.seeds[0]
        lacking = [c for c in CANDIDATES if not self.path(*c, rate, seed).exists()]
        if lacking:
            sys.exit(f"β and λ {lacking} belong to another share and are missing: run this again when they are there")
        return max(CANDIDATES, key=lambda c: mean([self.made(*c, rate, seed)["validation"]["sampling"]]))

    def publish(self, method: str, beta: float, share: float, rate: float, seed: int) -> None:
        """Make a training and put it where learning.py's table finds it."""
        found = self.made(beta, share, rate, seed)
        write_json(file_of(Path(self.options.to), method, rate, seed), {"method": method, **found})
        figures = ", ".join(f"{split} {mean([found[split]['sampling']]):.4f}" for split in self.texts)
        print(
            f"  {method}, rate {rate:g}, seed {seed}: {figures} ({found['seconds']:.0f} s)", file=sys.stderr, flush=True
        )


def middle(rates: list[float]) -> float:
    """The rate at which candidates are compared."""
    return sorted(rates)[len(rates) // 2]


def grid(trainings: Trainings, method: str, beta: float, share: float) -> list[tuple[str, float, float, float, int]]:
    """The trainings of one method that --narrow leaves; those of the first seed are made here, to choose the rate."""
    options = trainings.options
    first, *others = options.seeds
    work = [(method, beta, share, rate, seed) for seed in options.seeds for rate in options.rates]
    if not options.narrow:
        return work
    for rate in options.rates:
        trainings.publish(method, beta, share, rate, first)
    best = max(options.rates, key=lambda r: mean([trainings.made(beta, share, r, first)["validation"]["sampling"]]))
    return [(method, beta, share, best, seed) for seed in others]


def work_through(trainings: Trainings) -> None:
    """Candidates first, then the defaults, then the best candidate."""
    options = trainings.options
    part, parts = map(int, options.share.split("/"))
    if options.tune:
        progress = Progress("trl GKD: candidates", len(CANDIDATES[part::parts]))
        for candidate in CANDIDATES[part::parts]:
            found = trainings.made(*candidate, middle(options.rates), options.seeds[0])
            progress.step(note=f"validation {mean([found['validation']['sampling']]):.4f}")
    for method in ["trl GKD, defaults", *(["trl GKD, tuned"] if options.tune else [])]:
        chosen = DEFAULTS if method == "trl GKD, defaults" else trainings.best()
        mine = grid(trainings, method, *chosen)[part::parts]
        progress = Progress(f"{method} (β {chosen[0]:g}, λ {chosen[1]:g}): trainings", len(mine))
        for training in mine:
            trainings.publish(*training)
            progress.step()


def notes(folder: Path) -> str:
    """Notes on trl's rows of the table: β and λ, the seeds of each rate, positions trained on."""
    lines = []
    for method in ("trl GKD, defaults", "trl GKD, tuned"):
        found = [json.loads(path.read_text()) for path in sorted(folder.glob(f"{file_stem(method)}-*.json"))]
        if not found:
            continue
        rates = ", ".join(f"{r:g} × {sum(f['rate'] == r for f in found)}" for r in sorted({f["rate"] for f in found}))
        positions, scored = (sum(f[key] for f in found) / len(found) for key in ("positions", "scored"))
        one = found[0]
        lines.append(
            f"{method}: β {one['beta']:g}, λ {one['lambda']:g}, trl {one['trl']}; rates × seeds {rates}; "
            f"{positions:.0f} positions per training, of which {scored:.0f} scored."
        )
    return "\n".join(lines)


def main() -> None:
    """Train what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--to", type=Path, default=Path("losses"))
    parser.add_argument("--cut", type=Path, help="draft to start from; the run's cut/ where it is not given")
    parser.add_argument("--bf16", action="store_true", help="forward passes in bfloat16, as a training of ours may be")
    parser.add_argument("--tune", action="store_true", help="choose β and λ too")
    parser.add_argument("--narrow", action="store_true", help="seeds after the first take only the rate best for it")
    parser.add_argument("--base", default="adamw", help="the training in --to that the table compares with")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 2e-3, 4e-3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--new-tokens", type=int, default=96, help="of the texts on which acceptance is measured")
    parser.add_argument("--share", default="0/1", help="i/n: this process takes every n-th training")
    options = parser.parse_args()
    if options.narrow and options.share != "0/1":
        parser.error("--narrow is for one process: which trainings are left hangs on those before")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    try:
        import trl  # noqa: F401
    except ImportError:
        sys.exit("trl cannot be imported: `pip install trl`, or put a folder that has it on PYTHONPATH")
    options.to.mkdir(parents=True, exist_ok=True)
    work_through(Trainings(options))
    if list(options.to.glob("forward_KL-*.json")):  # against which the table compares
        print(table(options.to, options.base), end="\n\n")
    print(notes(options.to))


if __name__ == "__main__":
    main()
