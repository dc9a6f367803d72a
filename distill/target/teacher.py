"""Stage `teacher`: the target's distributions on its own answers and on corpus text, in checksummed shards."""

from __future__ import annotations

from pathlib import Path

import torch

from distill.errors import DataError
from distill.models.hugging_face import load_model, load_tokenizer, pick_device, real_tokens
from distill.packing import Packed, attention_mask, concatenate, pack
from distill.progress import Progress
from distill.recipe import Recipe
from distill.run import Run, file_digest, read_json, write_atomically, write_json
from distill.target.store import bytes_per_position, compress, shard_path
from distill.texts import read_answers


def training_blocks(recipe: Recipe, run: Run) -> Packed:
    """What the draft learns from: the target's answers (their prompts masked), then the corpus text."""
    found = read_answers(run, "train")
    kept = [answer for answer in found if not answer.looping and len(answer.answer) > 1]
    if len(kept) < len(found):
        run.say(f"  {len(found) - len(kept)} of {len(found)} answers dropped: looping or empty")
    own = pack(((a.prompt + a.answer, len(a.prompt)) for a in kept), recipe.corpus.block, split_long=False)
    text = Packed.load(run.path("corpus", "text-train.safetensors"))
    blocks = concatenate([part for part in (own, text) if len(part)])
    if not int(blocks.mask.sum()):
        raise DataError("there is nothing to learn from: no answer and no corpus text is left", "raise corpus.tokens")
    return blocks


def teacher(recipe: Recipe, run: Run) -> list[Path]:
    """Write teacher/shard-NNNNN.safetensors and manifest.json; the unit of resuming is the shard."""
    from safetensors.torch import save_file

    folder = run.path("teacher")
    device = pick_device(recipe.device)
    model = load_model(recipe.target.model, recipe.target.dtype, device)
    vocabulary = real_tokens(model.config, load_tokenizer(recipe.target.model))
    k = min(recipe.teacher.top_k, vocabulary - 1)
    blocks = training_blocks(recipe, run)
    size = recipe.teacher.shard_blocks
    parts = [(number, slice(start, start + size)) for number, start in enumerate(range(0, len(blocks), size))]
    positions = blocks.ids.numel()
    run.say(
        f"  {int(blocks.mask.sum())} scored positions in {len(blocks)} blocks; the store takes "
        f"{positions * bytes_per_position(k) / 1e6:.0f} MB in {len(parts)} shards"
    )
    progress = Progress("teacher, shards", len(parts))
    for number, part in parts:
        path = shard_path(folder, number)
        receipt = path.with_suffix(".json")
        if path.exists() and receipt.exists() and read_json(receipt)["sha256"] == file_digest(path):
            progress.step(note="(was there)")
            continue
        tensors = shard_tensors(model, blocks.take(part), k, vocabulary, recipe.teacher.batch, device)
        write_atomically(path, lambda temporary, t=tensors: save_file(t, str(temporary)))  # type: ignore[misc]
        write_json(receipt, {"sha256": file_digest(path)})
        progress.step()
    counts = [min(size, len(blocks) - number * size) for number, _ in parts]
    manifest = {
        "format": 1,
        "k": k,
        "temperature": 1.0,
        "vocabulary": vocabulary,
        "target": recipe.target.model,
        "dtype": recipe.target.dtype,
        "shard_blocks": counts,
        "scored_positions": int(blocks.mask.sum()),
    }
    write_json(folder / "manifest.json", manifest)
    return [folder]


@torch.inference_mode()
def shard_tensors(
    model: torch.nn.Module, blocks: Packed, k: int, vocabulary: int, batch: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """The tensors of one shard: the blocks and the target's compact laws on them."""
    top, logs, tails = [], [], []
    for start in range(0, len(blocks), batch):
        part = blocks.take(slice(start, start + batch))
        logits = model(
            input_ids=part.ids.long().to(device),
            position_ids=part.positions.long().to(device),
            attention_mask=attention_mask(part.documents.to(device)),
            use_cache=False,
        ).logits
        chunk = compress(logits.flatten(0, 1), k, vocabulary)
        shape = (*part.ids.shape, k)
        top.append(chunk.ids.view(shape).cpu())
        logs.append(chunk.log_probabilities.half().view(shape).cpu())
        tails.append(chunk.log_tail.view(part.ids.shape).cpu())
    return {
        **{name: value.contiguous() for name, value in blocks.tensors().items()},
        "top_ids": torch.cat(top),
        "top_log_probabilities": torch.cat(logs),
        "log_tail": torch.cat(tails),
    }
