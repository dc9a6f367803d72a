"""Stage `train`: the draft learns the target's laws. Read it top to bottom.

Legend: b blocks of a batch, S positions, N scored positions of a batch, H hidden, V vocabulary.
"""

from __future__ import annotations

import math
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from distill.errors import DataError
from distill.models.hugging_face import load_model, load_tokenizer, pick_device
from distill.packing import attention_mask, epoch_order
from distill.progress import duration
from distill.recipe import Recipe, Train
from distill.run import Run, read_json, write_folder, write_json
from distill.target.store import TeacherStore
from distill.training.fused import head_loss


def rate_at(step: int, settings: Train) -> float:
    """Learning rate of optimizer step `step` (from 0): linear warm-up, then a cosine down to `final` of the peak."""
    warm = max(1, round(settings.warmup * settings.steps))
    if step < warm:
        return settings.rate * (step + 1) / warm
    progress = (step - warm) / max(1, settings.steps - warm)
    return settings.rate * (settings.final + (1 - settings.final) * 0.5 * (1 + math.cos(math.pi * progress)))


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay, vectors (norms, biases) do not."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def batch_blocks(step: int, batch: int, count: int, seed: int) -> torch.Tensor:
    """Indices [b] of the blocks of one step: a pure function, so that a resumed run sees the same data."""
    wanted = range(step * batch, (step + 1) * batch)
    epochs = {index // count for index in wanted}
    orders = {epoch: epoch_order(count, seed, epoch) for epoch in epochs}
    return torch.tensor([int(orders[index // count][index % count]) for index in wanted])


def peak_memory_bytes(device: torch.device) -> int:
    """Peak bytes allocated on an accelerator, else the process's peak resident size."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    import resource
    import sys

    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def newest_checkpoint(folder: Path) -> Path | None:
    """The last checkpoint whose state.json, written last, is there."""
    found = sorted(path for path in folder.glob("step-*") if (path / "state.json").exists())
    return found[-1] if found else None


def save_checkpoint(run: Run, step: int, model: torch.nn.Module, optimizer: Any, keep: int) -> None:
    """Write checkpoints/step-NNNNNN and forget all but the newest `keep`."""
    folder = run.path("checkpoints")

    def write(temporary: Path) -> None:
        torch.save(model.state_dict(), temporary / "model.pt")
        torch.save(optimizer.state_dict(), temporary / "optimizer.pt")
        torch.save({"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}, temporary / "rng.pt")
        write_json(temporary / "state.json", {"step": step})

    write_folder(folder / f"step-{step:06d}", write)
    for old in sorted(folder.glob("step-*"))[:-keep]:
        shutil.rmtree(old)


def load_checkpoint(path: Path, model: torch.nn.Module, optimizer: Any) -> int:
    """Restore model, optimizer and RNG; returns the steps done. Raises DataError when the files are damaged."""
    try:
        model.load_state_dict(torch.load(path / "model.pt", weights_only=True))
        optimizer.load_state_dict(torch.load(path / "optimizer.pt", weights_only=True))
        rng = torch.load(path / "rng.pt", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged file
        raise DataError(
            f"checkpoint {path} is damaged: {str(error).splitlines()[0]}", f"delete {path} to go on from the one before"
        ) from error
    torch.set_rng_state(rng["cpu"])
    if rng["cuda"]:
        torch.cuda.set_rng_state_all(rng["cuda"])
    return int(read_json(path / "state.json")["step"])


def train(recipe: Recipe, run: Run) -> list[Path]:
    """Train init/ into draft/ on the teacher store; resumes from the newest checkpoint, bit for bit on CPU."""
    from accelerate import Accelerator

    settings = recipe.train
    device = pick_device(recipe.device)
    torch.manual_seed(recipe.seed)
    accelerator = Accelerator(
        cpu=device.type == "cpu", mixed_precision="bf16" if settings.dtype == "bfloat16" else "no"
    )
    store = TeacherStore(run)
    model = load_model(str(run.path("init")), "float32", accelerator.device)
    if int(store.manifest["vocabulary"]) > model.config.vocab_size:
        raise DataError(
            f"the teacher store covers {store.manifest['vocabulary']} tokens, the draft {model.config.vocab_size}",
            "run `distill train RECIPE --redo teacher`",
        )
    optimizer = torch.optim.AdamW(
        parameter_groups(model, settings.weight_decay), lr=settings.rate, betas=(settings.beta1, settings.beta2)
    )
    model, optimizer = accelerator.prepare(model, optimizer)
    model.train()
    step = 0
    checkpoint = newest_checkpoint(run.path("checkpoints"))
    if checkpoint is not None:
        step = load_checkpoint(checkpoint, model, optimizer)
        run.say(f"  resuming at step {step} of {settings.steps}")
    started, first, last_shown = time.monotonic(), step, 0.0
    tokens_done = 0
    while step < settings.steps:
        index = batch_blocks(step, settings.batch, store.blocks, recipe.seed)
        blocks, laws = store.packed.take(index), store.laws(index)
        rate = rate_at(step, settings)
        for group in optimizer.param_groups:
            group["lr"] = rate
        scored = blocks.mask.to(accelerator.device)
        count = int(scored.sum())
        with accelerator.autocast():
            hidden = model.model(
                input_ids=blocks.ids.long().to(accelerator.device),
                position_ids=blocks.positions.long().to(accelerator.device),
                attention_mask=attention_mask(blocks.documents.to(accelerator.device)),
                use_cache=False,
            ).last_hidden_state[scored]  # [N, H]
        head = model.lm_head.weight
        total, sums = head_loss(
            hidden,
            head if hidden.dtype == head.dtype else head.to(hidden.dtype),
            laws["top_ids"].to(accelerator.device)[scored],
            laws["top_log_probabilities"].to(accelerator.device)[scored],
            laws["log_tail"].to(accelerator.device)[scored],
            blocks.labels().long().to(accelerator.device)[scored],
            {name: weight for name, weight in settings.loss.items()},
            int(store.manifest["vocabulary"]),
            settings.chunk,
        )
        loss = total / max(1, count)
        accelerator.backward(loss)
        norm = float(accelerator.clip_grad_norm_(model.parameters(), settings.clip))
        if not math.isfinite(norm) or not math.isfinite(loss.item()):
            raise DataError(
                f"the loss or its gradient is not finite at step {step} (loss {loss.item()}, gradient norm {norm})",
                "lower train.rate, or train in float32; the last checkpoint is intact",
            )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        tokens_done += count
        elapsed = time.monotonic() - started
        kl, ce, agreement = (sums / max(1, count)).tolist()
        eta = elapsed / (step - first) * (settings.steps - step)
        memory = peak_memory_bytes(accelerator.device)
        run.record(
            "train",
            step=step,
            loss=loss.item(),
            forward_kl=kl,
            cross_entropy=ce,
            agreement=agreement,
            gradient_norm=norm,
            rate=rate,
            tokens=count,
            tokens_per_second=tokens_done / elapsed,
            memory_bytes=memory,
            eta_seconds=eta,
        )
        if time.monotonic() - last_shown > 5 or step == settings.steps:
            last_shown = time.monotonic()
            run.say(
                f"  step {step}/{settings.steps} loss {loss.item():.4f} kl {kl:.4f} agreement {agreement:.3f} "
                f"{tokens_done / elapsed:.0f} tok/s {memory / 2**30:.2f} GiB, {duration(eta)} left"
            )
        if step % settings.save_every == 0 or step == settings.steps:
            save_checkpoint(run, step, model, optimizer, settings.keep)
    final = accelerator.unwrap_model(model).eval()
    tokenizer = load_tokenizer(str(run.path("init")))

    def write(folder: Path) -> None:
        final.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    write_folder(run.path("draft"), write)
    return [run.path("draft")]
