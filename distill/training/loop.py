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
from distill.models.hugging_face import load_model, pick_device
from distill.models.kept import FILE as KEPT_FILE
from distill.models.kept import read_kept
from distill.models.tokenizer_files import copy_tokenizer
from distill.progress import duration
from distill.recipe import Recipe
from distill.run import Run, read_json, write_folder, write_json
from distill.target.store import TeacherStore
from distill.training.penalty import finish_penalty, penalty_of
from distill.training.rate import body_share, rate_at
from distill.training.step import Columns, batch_blocks, blocks_loss, parameter_groups


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


def save_checkpoint(
    run: Run, step: int, model: torch.nn.Module, optimizer: Any, keep: int, sparsity: dict[str, Any] | None = None
) -> None:
    """Write checkpoints/step-NNNNNN (with the state of a sparsity penalty) and forget all but the newest `keep`."""
    folder = run.path("checkpoints")

    def write(temporary: Path) -> None:
        torch.save(model.state_dict(), temporary / "model.pt")
        torch.save(optimizer.state_dict(), temporary / "optimizer.pt")
        torch.save({"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}, temporary / "rng.pt")
        write_json(temporary / "state.json", {"step": step, "sparsity": sparsity})

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
    model = load_model(str(run.path("init")), "float32", accelerator.device, trimmed=False)
    vocabulary = int(store.manifest["vocabulary"])
    if vocabulary > model.config.vocab_size:
        raise DataError(
            f"the teacher store covers {vocabulary} tokens, the draft {model.config.vocab_size}",
            "run `distill train RECIPE --redo teacher`",
        )
    kept = read_kept(run.path("init"))
    columns = Columns(vocabulary, kept["kept"] if kept else None, accelerator.device)
    penalty = penalty_of(model, settings)
    optimizer = torch.optim.AdamW(
        parameter_groups(model, settings.weight_decay, penalty.parameters() if penalty else ()),
        lr=settings.rate,
        betas=(settings.beta1, settings.beta2),
    )
    body = body_parameters(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    model.train()
    step = 0
    checkpoint = newest_checkpoint(run.path("checkpoints"))
    if checkpoint is not None:
        step = load_checkpoint(checkpoint, model, optimizer)
        if penalty is not None:
            penalty.load_state_dict(read_json(checkpoint / "state.json")["sparsity"])
        run.say(f"  resuming at step {step} of {settings.steps}")
    started, first, last_shown = time.monotonic(), step, 0.0
    tokens_done = 0
    while step < settings.steps:
        index = batch_blocks(step, settings.batch, store.blocks, recipe.seed)
        rate = rate_at(step, settings)
        for group in optimizer.param_groups:
            group["lr"] = rate if group["outer"] else rate * body_share(step, settings)
        with accelerator.autocast():
            total, sums, count = blocks_loss(
                model, store.packed.take(index), store.laws(index), settings, columns, accelerator.device
            )
        loss = total / max(1, count)
        accelerator.backward(loss)
        if step < settings.embedding_steps:
            for parameter in body:
                parameter.grad = None
        norm = float(accelerator.clip_grad_norm_(model.parameters(), settings.clip))
        if not math.isfinite(norm) or not math.isfinite(loss.item()):
            raise DataError(
                f"the loss or its gradient is not finite at step {step} (loss {loss.item()}, gradient norm {norm})",
                "lower train.rate, or train in float32; the last checkpoint is intact",
            )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        sparse = penalty.after_step(step, rate * body_share(step, settings)) if penalty is not None else {}
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
            **sparse,
        )
        if time.monotonic() - last_shown > 5 or step == settings.steps:
            last_shown = time.monotonic()
            run.say(
                f"  step {step}/{settings.steps} loss {loss.item():.4f} kl {kl:.4f} agreement {agreement:.3f} "
                + (f"zero {sparse['zero_share']:.2f} " if "zero_share" in sparse else "")
                + f"{tokens_done / elapsed:.0f} tok/s {memory / 2**30:.2f} GiB, {duration(eta)} left"
            )
        if step % settings.save_every == 0 or step == settings.steps:
            state = penalty.state_dict() if penalty is not None else None
            save_checkpoint(run, step, model, optimizer, settings.keep, state)
    final = accelerator.unwrap_model(model).eval()
    report = finish_penalty(final, penalty)

    def write(folder: Path) -> None:
        final.save_pretrained(folder)
        copy_tokenizer(run.path("init"), folder)
        for name in (KEPT_FILE, "surgery.json"):
            if run.path("init", name).exists():
                shutil.copyfile(run.path("init", name), folder / name)
        if report is not None:
            write_json(folder / "sparsity.json", report)

    write_folder(run.path("draft"), write)
    if report is not None:
        run.say(f"  sparsity: {report['sentence']}")
    return [run.path("draft")]


def body_parameters(model: Any) -> list[torch.nn.Parameter]:
    """All but the input embedding and the head."""
    outer = {id(model.get_input_embeddings().weight), id(model.lm_head.weight)}
    return [parameter for parameter in model.parameters() if id(parameter) not in outer]
