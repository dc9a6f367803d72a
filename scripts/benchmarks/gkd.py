"""Compare trl's GKD trainer with our losses: the same cut draft, the same blocks in the same order, the same measure.

    python scripts/benchmarks/learning.py runs/demo --to learning/      # trains the configurations to compare with
    python scripts/benchmarks/gkd.py runs/demo --to learning/           # resumes, and prints the folder's table

RUN has a teacher store and cut/ (`distill train recipes/demo.yaml --until cut`). --to is the folder of learning.py,
which chooses rates in the same way. β and λ are trl's defaults.

The loss, the mixture with texts that the draft writes (temperature 0.9, at most 128 tokens: trl's defaults) and the
denominator come from the trainer. The optimiser, each step's rate and clipping come from us, as for every other method.
trl's default rate (2e-5) is meant for large models and would hardly move one this small, so the grid replaces it.
Gradient checkpointing, trl's default, is off, and so is bf16 without --bf16.

Tokens are counted as positions, scored or not. A step of ours is `batch` blocks. Here it is the documents of those
blocks, one per row, scored at the same positions. If the draft writes instead, the longest pieces of the same documents
give as many prompts as fill the same positions with their answers (prompts are not scored).
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from learning import Trainings, table, texts_of

from distill.engines.torch.blocks import Packed
from distill.engines.torch.hugging_face import load_model, load_tokenizer
from distill.progress import Progress
from distill.recipe import load_recipe
from distill.run import Run
from distill.teacher.store import TeacherStore
from distill.training.optimizer import parameter_groups, rate_share
from distill.training.setup import batch_blocks

NEW_TOKENS = 128  # GKDConfig's default
UNSCORED = -100

Row = tuple[list[int], int]  # a document's ids, and its first token whose distribution counts


def rows_of(blocks: Packed) -> list[Row]:
    """Return the documents of packed blocks, in order, except those without a scored position."""
    rows: list[Row] = []
    for ids, documents, mask in zip(blocks.ids, blocks.documents, blocks.mask, strict=True):
        for document in range(int(documents.max()) + 1):
            here = documents == document
            scored = mask[here].nonzero()
            if len(scored):
                rows.append((ids[here].tolist(), int(scored[0]) + 1))
    return rows


def prompts_of(rows: list[Row], positions: int, prompt_tokens: int, new_tokens: int) -> list[list[int]]:
    """Return the first tokens of the rows' longest pieces: as many as fill `positions` together with their answers.

    A piece is as long as a prompt with its answer. If a piece is shorter, at most half of it is the prompt.
    """
    width = prompt_tokens + new_tokens
    pieces = [ids[at : at + width] for ids, _ in rows for at in range(0, len(ids), width)]
    longest = sorted(pieces, key=len, reverse=True)[: max(1, positions // width)]
    return [piece[: min(prompt_tokens, math.ceil(len(piece) / 2))] for piece in longest]


def padded(rows: list[list[int]], filler: int) -> Tensor:
    """Return rows as one tensor, padded on the left as by trl's own collator, because generation needs it."""
    width = max(map(len, rows))
    return torch.tensor([[filler] * (width - len(row)) + row for row in rows])


def batch_of(rows: list[Row], prompts: list[list[int]], padding: int) -> dict[str, Tensor]:
    """Return GKDTrainer's input: texts with labels at scored positions, and prompts that the draft may continue.

    The prompts are a separate batch, because the trainer replaces the texts by the draft's continuations.
    """
    return {
        "input_ids": padded([ids for ids, _ in rows], padding),
        "attention_mask": padded([[1] * len(ids) for ids, _ in rows], 0),
        "labels": padded([[UNSCORED] * first + ids[first:] for ids, first in rows], UNSCORED),
        "prompts": padded(prompts, padding),
        "prompt_attention_mask": padded([[1] * len(ids) for ids in prompts], 0),
    }


def arguments_of(options: Any, seed: int, folder: Path) -> Any:
    """Return the GKDConfig: one batch per step, in order, fp32 on the CPU, nothing written or reported."""
    from trl.experimental.gkd import GKDConfig

    return GKDConfig(
        output_dir=str(folder),
        max_steps=options.steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        train_sampling_strategy="sequential",
        seed=seed,
        max_grad_norm=1.0,
        bf16=options.bf16,
        gradient_checkpointing=False,
        use_cpu=True,
        dataloader_pin_memory=False,
        max_new_tokens=NEW_TOKENS,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )


class GkdTrainings(Trainings):
    """The trainings of learning.py, made by trl's trainer from the run's cut draft."""

    def __init__(self, options: Any) -> None:
        super().__init__(options, texts_of(options))
        self.run = Run(options.run, load_recipe(options.run / "config.yaml"))
        self.target = load_model(self.run.recipe.target.model, "float32", torch.device("cpu"))
        self.tokenizer = load_tokenizer(str(self.run.path("cut")))
        self.packed = TeacherStore(self.run).packed

    def trained(self, folder: Path, text: str, rate: float, seed: int) -> tuple[Any, dict[str, Any]]:
        """Return a draft that GKDTrainer trained, and how many positions it learnt from and scored."""
        from datasets import Dataset
        from transformers import PrinterCallback, TrainerCallback
        from trl.experimental.gkd import GKDTrainer

        options, packed = self.options, self.packed
        torch.manual_seed(seed)
        draft = load_model(str(self.run.path("cut")), "float32", torch.device("cpu"), trimmed=False)
        counts = {"positions": 0, "scored": 0, "steps_on_own_text": 0}
        progress = Progress(f"rate {rate:g} seed {seed}: steps", options.steps)

        def collate(items: list[dict[str, int]]) -> dict[str, Tensor]:
            (item,) = items
            blocks = packed.take(batch_blocks(item["step"], options.batch, len(packed), seed))
            rows = rows_of(blocks)
            prompts = prompts_of(rows, blocks.ids.numel(), self.run.recipe.answers.prompt_tokens, NEW_TOKENS)
            return batch_of(rows, prompts, self.tokenizer.pad_token_id)

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
        curve = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_share(step, options.steps))
        started = time.time()
        trainer = Counting(
            model=draft,
            teacher_model=self.target,
            args=arguments_of(options, seed, folder),
            data_collator=collate,
            train_dataset=Dataset.from_dict({"step": list(range(options.steps))}),
            processing_class=self.tokenizer,
            optimizers=(optimizer, curve),
            callbacks=[Steps()],
        )
        trainer.remove_callback(PrinterCallback)
        random.seed(seed)  # The trainer draws from it whose text a step takes.
        trainer.train()
        draft.eval()
        seconds = (time.time() - started) / options.steps
        return draft, {"trl": version("trl"), **counts, "tokens": counts["scored"], "seconds_per_step": seconds}


def main() -> None:
    """Train what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--to", type=Path, default=Path("learning"))
    parser.add_argument("--bf16", action="store_true", help="forward passes in bfloat16, as a training of ours may be")
    parser.add_argument("--base", default="adamw", help="the training in --to that the table compares with")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 2e-3, 4e-3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--new-tokens", type=int, default=96, help="of the texts on which acceptance is measured")
    options = parser.parse_args()
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    try:
        import trl  # noqa: F401
    except ImportError:
        sys.exit("trl cannot be imported: `pip install trl`, or put a folder that has it on PYTHONPATH")
    progress = Progress("trainings", len(options.rates) + len(options.seeds) - 1)
    GkdTrainings(options).work_through("trl GKD, defaults", "", progress)
    print(table(options.to, options.base))


if __name__ == "__main__":
    main()
