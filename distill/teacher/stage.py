"""Stage `teacher`: the target's distributions on its own answers and on corpus text, in checksummed shards.

Legend: n blocks, S positions, N scored positions, K stored entries, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distill.data.packing import Packed, concatenate, fitted_order, hidden_states, pack
from distill.data.texts import Answer, drop_reason, listed, read_answers
from distill.devices import barrier, pick_device, process_count, process_index, share_of
from distill.engines.torch.hugging_face import DTYPES, load_config, load_shared, load_tokenizer, real_tokens
from distill.errors import DataError, RunError
from distill.files import read_json, write_atomically, write_json
from distill.progress import Progress
from distill.recipe import Recipe
from distill.run import Run
from distill.teacher.distributions import Head, require_head
from distill.teacher.likeliest import Reader, compact_distributions, mean_masses, open_reader
from distill.teacher.store import FORMAT, bytes_per_position, head_path, shard_path, target_metadata

Distributions = Callable[[Packed], dict[str, Tensor]]


def training_blocks(recipe: Recipe, run: Run) -> tuple[Packed, str]:
    """The blocks that the draft learns from: the target's answers (prompts masked), then the corpus text.

    Also a sentence about dropped answers, or an empty string. Raises DataError when no position is left.
    """
    answers = read_answers(run, "train")
    kept = [answer for answer in answers if not drop_reason(answer)]
    reasons = Counter(filter(None, map(drop_reason, answers)))
    texts = [(one.prompt + one.answer, len(one.prompt)) for one in packed_order(kept, recipe)]
    own = pack(texts, recipe.corpus.block, split_long=False)
    text = Packed.load(run.path("corpus", "text-train.safetensors"))
    blocks = concatenate([part for part in (own, text) if len(part)] or [own])
    dropped = f"{reasons.total()} of {len(answers)} answers dropped: {listed(reasons)}" if reasons else ""
    if not int(blocks.mask.sum()):
        what = "no answer and no corpus text is left to learn from"
        hint = "see the answers in answers/train-*.jsonl; ask for more (answers.prompts), or give text (corpus.tokens)"
        raise DataError(f"{what}: {dropped}" if dropped else what, hint)
    return blocks, dropped


def packed_order(answers: Sequence[Answer], recipe: Recipe) -> list[Answer]:
    """The answers in the order in which blocks hold them."""
    lengths = [len(one.prompt) + len(one.answer) for one in answers]
    return [answers[index] for index in fitted_order(lengths, recipe.corpus.block)]


def teacher(recipe: Recipe, run: Run, share: tuple[int, int] | None = None) -> list[Path]:
    """Write teacher/shard-NNNNN.safetensors and manifest.json; the unit of resuming is the shard.

    With several processes, `share` = (index, count) makes this one write every count-th shard; the first process writes
    the manifest when all are done. None: the share of this process among those it was launched with.
    """
    share = share or (process_index(), process_count())
    blocks, dropped = training_blocks(recipe, run)
    if dropped and share[0] == 0:
        run.say(f"  {dropped}")
    return write_store(recipe, run, blocks, share)


def write_store(
    recipe: Recipe, run: Run, blocks: Packed, share: tuple[int, int], stage: str = "teacher", all_entries: bool = False
) -> list[Path]:
    """Write this process's share of the shards of a stage's blocks, and as the first process manifest.json.

    `all_entries`: of a compact store, teacher.top_k entries a position, whatever teacher.mass says.
    """
    main, settings, folder = share[0] == 0, recipe.teacher, run.path(stage)
    config = load_config(recipe.target.model)
    vocabulary = real_tokens(config.get_text_config(), load_tokenizer(recipe.target.model))
    size = settings.shard_blocks
    parts = [(shard_path(folder, at // size), slice(at, at + size)) for at in range(0, len(blocks), size)]
    mine = share_of(parts, share, "teacher shards", "teacher.shard_blocks")
    # A server is sent a whole shard at once, so that it always has requests waiting.
    batch = settings.batch if settings.server is None else size
    with ExitStack() as opened:
        blocks, metadata, distributions = _maker(recipe, run, blocks, vocabulary, main, all_entries, opened)
        if main:
            hidden = config.get_text_config().hidden_size
            each = bytes_per_position(settings, hidden, recipe.target.dtype, metadata.get("k"))
            run.say(
                f"  {int(blocks.mask.sum())} scored positions in {len(blocks)} blocks; the store takes "
                f"{blocks.ids.numel() * each / 1e6:.0f} MB in {len(parts)} shards"
            )
        progress = Progress(f"{stage}, shards" + (f" of process {share[0]}" if share[1] > 1 else ""), len(mine))
        for path, part in mine:
            exists = path.exists()
            if not exists:
                save_shard(path, shard_tensors(blocks.take(part), distributions, batch))
            progress.step(note="(exists)" if exists else "")
        if share[1] > 1:
            barrier()
        if main:
            lacking = next((path for path, _ in parts if not path.exists()), None)
            if lacking is not None:
                what = f"{lacking} was not written by the process it was assigned to"
                raise RunError(what, "run the same command again")
            manifest = {
                "format": FORMAT,
                "kind": settings.kind,
                **metadata,
                "vocabulary": vocabulary,
                **target_metadata(recipe),
                "sampler": read_json(run.path("answers", "manifest.json"), {"sampler": dict})["sampler"],
                "shard_blocks": [len(blocks.ids[part]) for _, part in parts],
                "scored_positions": int(blocks.mask.sum()),
            }
            write_json(folder / "manifest.json", manifest)
    return [folder]


def _maker(
    recipe: Recipe, run: Run, blocks: Packed, vocabulary: int, main: bool, all_entries: bool, opened: ExitStack
) -> tuple[Packed, dict[str, Any], Distributions]:
    """The blocks that can be scored, the manifest's entries for a kind of store, and the function from blocks to the
    tensors of their shard."""
    settings = recipe.teacher
    if settings.kind == "online":
        return blocks, {}, lambda part: {}
    if settings.kind == "exact":
        model = load_shared(recipe.target, pick_device(recipe.device))
        head = Head.of(model, vocabulary)
        require_head(model, head, blocks)
        path = head_path(run.path("teacher"))
        if main and not path.exists():
            tensors = {"weight": head.weight} | ({} if head.bias is None else {"bias": head.bias})
            save_shard(path, {name: value.cpu().clone() for name, value in tensors.items()})
        dtype = settings.dtype or recipe.target.dtype
        metadata: dict[str, Any] = {"hidden_dtype": dtype, "logit_form": asdict(head.form)}
        return blocks, metadata, lambda part: exact_distributions(model, part, DTYPES[dtype])
    reader, blocks = open_reader(recipe, run, blocks, vocabulary, opened)
    opened.callback(reader.close)
    k, temperatures = min(settings.top_k, vocabulary - 1), settings.temperatures
    mass = None if all_entries else settings.mass
    if mass is not None:
        k = _entries(recipe, run, reader, blocks, k, mass, main)
    metadata = {"k": k, "mass": mass, "temperatures": list(temperatures), "origin": reader.origin}
    return blocks, metadata, lambda part: compact_distributions(reader, part, k, temperatures)


def shard_tensors(blocks: Packed, distributions: Distributions, batch: int) -> dict[str, Tensor]:
    """The tensors of one shard: its blocks and the target's distributions on them, made `batch` blocks at a time."""
    parts = [distributions(part) for part in blocks.batches(batch)]
    tensors = blocks.tensors() | {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    if blocks.documents.shape[1] <= torch.iinfo(torch.int16).max:
        tensors["documents"] = blocks.documents.to(torch.int16)
    return {name: value.contiguous() for name, value in tensors.items()}


@torch.no_grad()
def exact_distributions(model: Any, blocks: Packed, dtype: torch.dtype) -> dict[str, Tensor]:
    """hidden [n, S, H] in `dtype`; raises DataError where that type cannot hold them."""
    scored = blocks.mask.unsqueeze(-1)
    hidden = hidden_states(model, blocks).cpu().masked_fill(~scored, 0).to(dtype)
    if not bool(hidden.isfinite().all()):
        raise DataError(
            f"hidden states of the target are not finite in {str(dtype).removeprefix('torch.')}",
            "set teacher.dtype to bfloat16 or float32 (and target.dtype, if that is float16)",
        )
    return {"hidden": hidden.contiguous()}


def _entries(recipe: Recipe, run: Run, reader: Reader, blocks: Packed, cap: int, mass: float, main: bool) -> int:
    """K of a compact store: the fewest entries, up to `cap`, that hold the mass on average over some blocks.

    The main process chooses, once, for all processes and for a run that goes on later.
    """
    path = run.path("teacher", "entries.json")
    if main and not path.exists():
        count = min(len(blocks), recipe.teacher.batch)
        sample = blocks.take(torch.linspace(0, len(blocks) - 1, count).round().long().unique())
        masses = mean_masses(reader, sample, cap)
        enough = (masses >= mass).nonzero().flatten().tolist()
        k = enough[0] + 1 if enough else cap
        run.say(
            f"  {k} entries hold {float(masses[k - 1]):.4f} of the mass on average over {int(sample.mask.sum())} "
            "positions" + ("" if enough else f", less than teacher.mass = {mass:g}: teacher.top_k is the cap")
        )
        write_json(path, {"k": k, "mass": float(masses[k - 1]), "positions": int(sample.mask.sum())})
    barrier()
    return int(read_json(path, {"k": int})["k"])


def save_shard(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file."""
    from safetensors.torch import save_file

    write_atomically(path, lambda temporary: save_file(tensors, str(temporary)))
