"""The compact teacher store: per position the top-K log-probabilities of the target and the log of the rest's mass.

Legend: n blocks of a shard, S positions, K entries, V vocabulary. A shard is a safetensors file with the packed blocks
(ids, documents, positions, mask) and top_ids int32 [n, S, K], top_log_probabilities fp16 [n, S, K], log_tail fp32 [n,
S].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distill.errors import DataError
from distill.packing import Packed
from distill.run import Run, read_json, verify_artifact

EMPTY = -1e4  # log of a tail that holds nothing: finite, so that 0 · log stays 0


@dataclass(frozen=True)
class TeacherChunk:
    """The target's laws at N positions: ids [N, K], log_probabilities fp32 [N, K], log_tail fp32 [N]."""

    ids: Tensor
    log_probabilities: Tensor
    log_tail: Tensor


def compress(logits: Tensor, k: int, vocabulary: int) -> TeacherChunk:
    """The compact form of laws given as logits [N, V], at temperature 1.

    Columns from `vocabulary` on are padding and hold no mass. The tail is summed over the logits outside the top K,
    never as one minus the sum of the others.
    """
    logits = logits.float()
    if vocabulary < logits.shape[-1]:
        logits = logits.clone()
        logits[:, vocabulary:] = -math.inf
    normaliser = logits.logsumexp(-1, keepdim=True)
    values, ids = logits.topk(k, dim=-1)
    outside = logits.scatter(-1, ids, -math.inf).logsumexp(-1, keepdim=True)
    tail = (outside - normaliser).squeeze(-1).clamp(min=EMPTY)
    return TeacherChunk(ids.to(torch.int32), values - normaliser, tail)


def bytes_per_position(k: int) -> int:
    """What a position costs on disk: ids, log-probabilities and tail, plus the packed columns."""
    return k * (4 + 2) + 4 + 3 * 4 + 1


class TeacherStore:
    """The finished shards of a run, each checked against its checksum when it is first read."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.folder = run.path("teacher")
        self.manifest: dict[str, Any] = read_json(self.folder / "manifest.json")
        self.blocks = sum(self.manifest["shard_blocks"])
        packs: list[Packed] = []
        self._laws: list[dict[str, Tensor]] = []
        for number in range(len(self.manifest["shard_blocks"])):
            found = self._read(shard_path(self.folder, number))
            packs.append(Packed(found["ids"], found["documents"], found["positions"], found["mask"]))
            self._laws.append({name: found[name] for name in ("top_ids", "top_log_probabilities", "log_tail")})
        from distill.packing import concatenate

        self.packed = concatenate(packs)
        starts = [0]
        for blocks in self.manifest["shard_blocks"]:
            starts.append(starts[-1] + blocks)
        self._starts = starts

    def _read(self, path: Path) -> dict[str, Tensor]:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        verify_artifact(self.run, "teacher", path)
        try:
            return load_file(str(path))
        except (SafetensorError, OSError) as error:
            raise DataError(f"{path} is damaged: {error}", "run `distill train RECIPE --redo teacher`") from error

    def laws(self, blocks: Tensor) -> dict[str, Tensor]:
        """top_ids, top_log_probabilities [b, S, K] and log_tail [b, S] of the blocks at `blocks`."""
        rows: dict[str, list[Tensor]] = {"top_ids": [], "top_log_probabilities": [], "log_tail": []}
        for block in blocks.tolist():
            shard = next(i for i, start in enumerate(self._starts[1:]) if block < start)
            for name, values in rows.items():
                values.append(self._laws[shard][name][block - self._starts[shard]])
        return {name: torch.stack(values) for name, values in rows.items()}


def shard_path(folder: Path, number: int) -> Path:
    """Where a shard stands."""
    return folder / f"shard-{number:05d}.safetensors"
