"""Stage `teacher`: the packed blocks of the three splits and the target's distributions on them, in checksummed shards.

teacher/train, teacher/validation and teacher/test are stores of one form. teacher/head.safetensors is the target's
head, if a store holds hidden states. Training, choice of weights and evaluation read these files, so that the target
runs here for the last time before its speed is measured.

Legend: n blocks of a shard, S positions, N of them scored, K the most entries of a position, M entries of all
positions, V vocabulary, H the target's hidden size.

A shard is a safetensors file. It has the packed blocks: ids int32, documents int16 if their numbers fit, and mask.
`rows` int64 [n + 1] is the first scored position of each block. The distributions at the scored positions are, by kind,

- compact: entries int32 [N] counts the entries of each position; top_ids int32 [M] and top_log_probabilities fp16 [M]
  have the entries, position by position, likeliest first; log_tails fp32 [N] is the log of the mass of all other
  tokens; block_entries int64 [n + 1] is the first entry of each block;
- exact: hidden [N, H] are the states after the final norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distill.data.packing import Deferred
from distill.data.samples import SPLITS, Split
from distill.devices import barrier, copied, pick_device, process_count, process_index, process_share
from distill.engines.torch.blocks import Packed, scored_states
from distill.engines.torch.hugging_face import (
    DTYPES,
    load_config,
    load_target,
    load_tokenizer,
    real_tokens,
    tokenizer_digest,
)
from distill.errors import DataError, RunError
from distill.files import read_json, write_atomically, write_json
from distill.progress import Progress
from distill.recipe import Recipe
from distill.recipe.target import TYPE_BYTES
from distill.run import Run
from distill.teacher.distributions import CompactTeacher, DenseTeacher, Head, LogitForm, Teacher, require_head
from distill.teacher.readers import AnswerReader, Entries, ModelReader, Reader, ServerReader, open_reader
from distill.teacher.texts import SplitBlocks, held_out_sizes, renew, split_blocks, target_metadata

FORMAT = 4
PACKED_BYTES = 4 + 2 + 1  # a position's id, document and mask
ENTRY_BYTES, TAIL_BYTES = 4 + 2, 4 + 4  # an entry's id and logarithm; a position's count and tail
HEAD = "head.safetensors"


# ── Sizes, before anything is written ──


def kind_of(recipe: Recipe, split: Split) -> str:
    """The kind of a split's store. Held-out splits are small, and exact if the target's weights are read."""
    return "exact" if split != "train" and recipe.teacher_reads_weights else recipe.teacher.kind


def bytes_per_row(recipe: Recipe, split: Split, hidden: int) -> int:
    """The most bytes of a scored position's distribution, without the PACKED_BYTES of each position."""
    if kind_of(recipe, split) == "exact":
        return hidden * TYPE_BYTES[recipe.target.dtype]
    return recipe.teacher.top_k * ENTRY_BYTES + TAIL_BYTES


def planned_bytes(recipe: Recipe, prompts: int) -> dict[Split, int]:
    """The most bytes of each split's store on disk, if all answers have their full length.

    The head of exact stores counts with the test split. Distributions that come with the answers are stored twice.
    """
    config = load_config(recipe.target.model).get_text_config()
    answers, block = recipe.answers, recipe.corpus.block
    asked: dict[Split, tuple[int, int, int]] = {"train": (prompts, answers.new_tokens, recipe.corpus.tokens)}
    for split in SPLITS[1:]:
        sizes = held_out_sizes(recipe, split)
        asked[split] = sizes.prompts, sizes.new_tokens, sizes.blocks * block
    planned = {}
    for split, (count, tokens, given) in asked.items():
        each = bytes_per_row(recipe, split, config.hidden_size) * (1 + recipe.writer_teaches) + PACKED_BYTES
        planned[split] = (count * tokens + given) * each + count * answers.prompt_tokens * PACKED_BYTES
    if "exact" in {kind_of(recipe, split) for split in SPLITS}:
        planned["test"] += config.vocab_size * config.hidden_size * TYPE_BYTES[recipe.target.dtype]
    return planned


# ── What is on disk ──


def read_manifest(run: Run, split: Split = "train") -> dict[str, Any]:
    """Read manifest.json of a split's store. Raises DataError if it is missing or differs from the record."""
    path = run.path("teacher", split, "manifest.json")
    if run.done("teacher") is None:
        raise DataError(f"{path} was not written by a finished `teacher` stage", "run `distill train` again")
    run.verify("teacher", f"teacher/{split}/manifest.json")
    return read_json(path)


def require_fit(manifest: dict[str, Any], recipe: Recipe) -> None:
    """Raise DataError if a store was made with another tokenizer than the target has now.

    A hub name may have a new revision. The stage's key holds everything else that a store was made with.
    """
    if manifest["tokenizer_digest"] != tokenizer_digest(recipe.target.model):
        what = f"the distributions were stored with another tokenizer of {manifest['target']} than it has now"
        raise DataError(what, "make it again with `distill train RECIPE --redo teacher`")


@dataclass(frozen=True)
class StoredBlocks:
    """Blocks of a store on the host, with what it holds of the target's distributions at their N scored positions."""

    store: TeacherStore
    numbers: Tensor  # of the blocks in the store [b]
    blocks: Packed
    tensors: list[Tensor]

    def pinned(self) -> StoredBlocks:
        """The same in pinned memory, from which a copy to a device does not wait."""
        return replace(self, blocks=self.blocks.pinned(), tensors=[tensor.pin_memory() for tensor in self.tensors])

    def distributions(self, device: torch.device) -> Teacher:
        """The distributions on a device, at the scored positions of the blocks in turn."""
        tensors = [copied(tensor, device) for tensor in self.tensors]
        head = self.store.head(device)
        if head is None:
            ids, logs, tails = tensors
            return CompactTeacher(ids, logs, tails, self.store.vocabulary)
        (hidden,) = tensors
        return DenseTeacher(hidden, head, log_sums=partial(self.store.log_sums, self.numbers, hidden))


class TeacherStore:
    """The finished shards of a split, mapped into memory. Each shard is the one that its stage recorded.

    The first `answer_blocks` of its `blocks` hold the target's answers.
    """

    def __init__(self, run: Run, split: Split = "train") -> None:
        self.folder = run.path("teacher", split)
        self.manifest = read_manifest(run, split)
        run.verify("teacher", f"teacher/{split}/*.safetensors")
        self.vocabulary: int = self.manifest["vocabulary"]
        self._shards = [
            _mapped(shard_path(self.folder, number)) for number in range(len(self.manifest["shard_blocks"]))
        ]
        self.blocks: int = sum(self.manifest["shard_blocks"])
        self.answer_blocks: int = self.manifest["answer_blocks"]
        self.packed = Deferred(self.blocks, lambda numbers: self._packed(self._places(numbers)), self.scored)
        self._head: Head | None = None
        self._sums: dict[int, Tensor] = {}  # the results of `log_sums` by block
        if self.manifest["kind"] == "exact":
            run.verify("teacher", f"teacher/{HEAD}")
            tensors = _mapped(run.path("teacher", HEAD))
            self._head = Head(tensors["weight"], tensors.get("bias"), LogitForm(**self.manifest["logit_form"]))

    @property
    def exact(self) -> bool:
        """Whether the store gives whole distributions."""
        return self._head is not None

    def head(self, device: torch.device) -> Head | None:
        """The target's head on a device, where it stays; None if the store is compact."""
        if self._head is not None:
            self._head = self._head.to(device)
        return self._head

    def scored(self) -> Tensor:
        """The number of scored positions of each block."""
        return torch.cat([torch.empty(0, dtype=torch.int64), *(shard["rows"].diff() for shard in self._shards)])

    def _places(self, blocks: list[int]) -> list[tuple[dict[str, Tensor], int]]:
        """The shard of each block, and the block's number there. All shards but the last have the same size."""
        size = self.manifest["shard_blocks"][0] if self._shards else 1
        return [(self._shards[block // size], block % size) for block in blocks]

    def _packed(self, places: Sequence[tuple[dict[str, Tensor], int]]) -> Packed:
        """The blocks at these places."""
        if not places:
            return Packed(*(torch.empty(0, 1, dtype=kind) for kind in (torch.int32, torch.int32, torch.bool)))
        names = ("ids", "documents", "mask")
        ids, documents, mask = (torch.stack([shard[name][at] for shard, at in places]) for name in names)
        return Packed(ids, documents.int(), mask)

    def read(self, numbers: Tensor) -> StoredBlocks:
        """The blocks with these numbers [b], read from the disk."""
        places = self._places(numbers.tolist())

        def scored(name: str, ends: str = "rows") -> Tensor:
            """A tensor [N, …] of the scored positions, or [M] of their entries."""
            parts = [(shard[name], shard[ends][block : block + 2].tolist()) for shard, block in places]
            return torch.cat([tensor[first:end] for tensor, (first, end) in parts])

        if self._head is not None:
            return StoredBlocks(self, numbers, self._packed(places), [scored("hidden")])
        ids, logs = (scored(name, "block_entries") for name in ("top_ids", "top_log_probabilities"))
        entries = padded_entries(ids, logs, scored("entries"), self.vocabulary)
        return StoredBlocks(self, numbers, self._packed(places), [*entries, scored("log_tails")])

    @torch.no_grad()
    def log_sums(self, numbers: Tensor, hidden: Tensor) -> Tensor:
        """The log of Σ exp over the logits [N] of the states `hidden` [N, H] at the scored positions of some blocks.

        A block's sums are computed when the block is first read, and for the block alone, so that a resumed training
        computes the same numbers. The sums stay on the device and take 4 bytes a position.
        """
        counts = [int(shard["rows"][block : block + 2].diff()) for shard, block in self._places(numbers.tolist())]
        for block, states in zip(numbers.tolist(), hidden.split(counts), strict=True):
            if block not in self._sums:
                assert self._head is not None
                self._sums[block] = self._head.log_sums(states)
        return torch.cat([self._sums[block] for block in numbers.tolist()])


def padded_entries(ids: Tensor, logs: Tensor, counts: Tensor, absent: int) -> tuple[Tensor, Tensor]:
    """The entries [M] of N positions as tables [N, K].

    Unused places hold the id `absent`, which no token has, and the log of 0.
    """
    width = int(counts.max()) if len(counts) else 0
    used = torch.arange(width) < counts.unsqueeze(-1)
    table = torch.full((len(counts), width), absent, dtype=ids.dtype)
    table_logs = torch.full((len(counts), width), -torch.inf, dtype=logs.dtype)
    table[used], table_logs[used] = ids, logs
    return table, table_logs


def _mapped(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file as views of its mapped content."""
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - a handle, no mapping


def shard_path(folder: Path, number: int) -> Path:
    """The path of a shard."""
    return folder / f"shard-{number:05d}.safetensors"


# ── The stage ──

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Shard:
    """A shard to write: the blocks `rows` of a split."""

    split: Split
    path: Path
    rows: slice


def teacher(recipe: Recipe, run: Run, part: tuple[int, int] | None = None) -> list[Path]:
    """Store the target's distributions on the blocks of all splits. Finished shards are kept.

    `part` = (index, count) makes this process write every count-th shard. By default it is the process's own part. The
    first process writes the manifests after all processes have finished.
    """
    part = part or (process_index(), process_count())
    main = part[0] == 0
    texts = {split: split_blocks(recipe, run, split) for split in SPLITS}
    if main:
        for split in SPLITS:
            renew(run.path("teacher", split), origin_of(recipe, run, split))
    barrier()
    size = recipe.teacher.shard_blocks
    shards = [
        Shard(split, shard_path(run.path("teacher", split), at // size), slice(at, at + size))
        for split, blocks in texts.items()
        for at in range(0, len(blocks.blocks), size)
    ]
    mine = process_share(shards, part, "teacher shards", "teacher.shard_blocks")
    whole = _whole(run, shards)
    barrier()  # All processes look before one of them writes.
    if not whole:
        with ExitStack() as opened:
            maker = Maker(recipe, run, texts, main, opened)
            progress = Progress("teacher, shards" + (f" of process {part[0]}" if part[1] > 1 else ""), len(mine))
            for shard in mine:
                exists = shard.path.exists()
                if not exists:
                    maker.write(shard)
                progress.step(note="(exists)" if exists else "")
            if part[1] > 1:
                barrier()
            if main:
                maker.describe(shards)
    return [run.path("teacher")]


def _whole(run: Run, shards: Sequence[Shard]) -> bool:
    """Whether all files of the stage exist."""
    manifests = [run.path("teacher", split, "manifest.json") for split in SPLITS]
    if not all(path.exists() for path in (*manifests, *(shard.path for shard in shards))):
        return False
    exact = "exact" in {read_json(path, {"kind": str})["kind"] for path in manifests}
    return not exact or run.path("teacher", HEAD).exists()


def origin_of(recipe: Recipe, run: Run, split: Split) -> dict[str, Any]:
    """The digests of what the blocks of a split are made from."""
    return {
        "answers": run.artifacts_digest("answers", f"answers/{split}/*"),
        "served": run.artifacts_digest("answers", f"answers/prompts-{split}.arrow"),
        "text": run.artifacts_digest("corpus", f"corpus/text-{split}.safetensors"),
        "sizes": None if split == "train" else asdict(held_out_sizes(recipe, split)),
    }


class Maker:
    """Makes the shards of all splits with one open target."""

    def __init__(
        self, recipe: Recipe, run: Run, texts: dict[Split, SplitBlocks], main: bool, opened: ExitStack
    ) -> None:
        self.recipe, self.run, self.texts = recipe, run, texts
        settings, config = recipe.teacher, load_config(recipe.target.model)
        self.vocabulary = real_tokens(config.get_text_config(), load_tokenizer(recipe.target.model))
        self.kinds: dict[Split, str] = {split: kind_of(recipe, split) for split in SPLITS}
        self.about: dict[str, Any] = {}  # what the manifests of exact stores add
        self.model: Any = None
        if recipe.teacher_reads_weights:
            self.model = load_target(recipe.target, pick_device(recipe.device))
            self.reader: Reader = ModelReader(self.model, self.vocabulary)
            self._prepare_exact(main)
        elif recipe.writer_teaches:
            run.say("  distributions came with the answers")
            self.reader = AnswerReader(run, texts)
        else:
            self.reader = open_reader(recipe, run, self.vocabulary)
            if main and isinstance(self.reader, ServerReader):
                self.reader.endpoint.require_same(run.path("teacher"))
        opened.callback(self.reader.close)
        self.cap = min(settings.top_k, self.vocabulary - 1)
        # A server gets a whole shard at once, so that requests are always waiting.
        self.batch = settings.batch if settings.server is None else settings.shard_blocks

    def _prepare_exact(self, main: bool) -> None:
        """Write the head. If it does not give the target's own logits, held-out stores become compact."""
        head = Head.of(self.model, self.vocabulary)
        sample = next(texts.blocks for texts in self.texts.values() if len(texts.blocks)).take(slice(0, 1))
        try:
            require_head(self.model, head, sample)
        except DataError as error:
            if self.recipe.teacher.kind == "exact":
                raise
            self.run.say(f"  held-out distributions are stored as their likeliest tokens: {error.what}")
            self.kinds = dict.fromkeys(SPLITS, "compact")
            return
        path = self.run.path("teacher", HEAD)
        if main and not path.exists():
            tensors = {"weight": head.weight} | ({} if head.bias is None else {"bias": head.bias})
            save_shard(path, {name: value.cpu().clone() for name, value in tensors.items()})
        self.about = {"hidden_dtype": self.recipe.target.dtype, "logit_form": asdict(head.form)}

    def write(self, shard: Shard) -> None:
        """Write a shard, with the target's distributions on `batch` blocks at a time."""
        blocks = self.texts[shard.split].blocks.take(shard.rows)
        if isinstance(self.reader, AnswerReader):
            mass = self.recipe.teacher.mass if shard.split == "train" else None
            blocks, tensors = self.reader.scored(shard.split, shard.rows.start, blocks, mass, self.cap)
            save_shard(shard.path, shard_tensors(blocks, lambda _: tensors, len(blocks)))
        else:
            save_shard(shard.path, shard_tensors(blocks, partial(self._distributions, shard.split), self.batch))

    def _distributions(self, split: Split, blocks: Packed) -> Tensors:
        """The tensors of the scored positions of some blocks."""
        if self.kinds[split] == "exact":
            return exact_distributions(self.model, blocks, DTYPES[self.recipe.target.dtype])
        # Held-out stores keep every entry, because they are small and more entries give tighter bounds.
        mass = self.recipe.teacher.mass if split == "train" else None
        assert not isinstance(self.reader, AnswerReader)
        return compact_distributions(self.reader(blocks, self.cap), mass)

    def describe(self, shards: Sequence[Shard]) -> None:
        """Write the manifests, which mark whole splits. Raises RunError if another process wrote too few shards."""
        lacking = next((shard.path for shard in shards if not shard.path.exists()), None)
        if lacking is not None:
            what = f"{lacking} was not written by the process it was assigned to"
            raise RunError(what, "run the same command again")
        for split, texts in self.texts.items():
            written = [shard for shard in shards if shard.split == split]
            scored = sum(int(_mapped(shard.path)["rows"][-1]) for shard in written)
            given = int(texts.blocks.scored.sum()) - texts.answer_positions
            kind = self.kinds[split]
            compact = {"cap": self.cap, "mass": self.recipe.teacher.mass if split == "train" else None}
            manifest = {
                "format": FORMAT,
                "kind": kind,
                **(self.about if kind == "exact" else compact | {"entries": _mean_entries(written, scored)}),
                "origin": self.reader.origin,
                "vocabulary": self.vocabulary,
                **target_metadata(self.recipe),
                "sampler": read_json(self.run.path("answers", "manifest.json"), {"sampler": dict})["sampler"],
                "shard_blocks": [len(range(len(texts.blocks))[shard.rows]) for shard in written],
                "scored_positions": scored,
                "answer_positions": scored - given,
                "answer_blocks": texts.answer_blocks,
            }
            write_json(self.run.path("teacher", split, "manifest.json"), manifest)
            self.run.say(f"  {split}: {described(manifest, written)}")


def described(manifest: dict[str, Any], shards: Sequence[Shard]) -> str:
    """Describe a split's store."""
    scored, answers = manifest["scored_positions"], manifest["answer_positions"]
    given = f", {scored - answers} of them of given text" if scored > answers else ""
    size = sum(shard.path.stat().st_size for shard in shards)
    form = "whole distributions" if manifest["kind"] == "exact" else f"{manifest['entries']:.1f} entries a position"
    blocks = sum(manifest["shard_blocks"])
    return f"{scored} scored positions{given} in {blocks} blocks, {form}, {size / 1e6:.1f} MB in {len(shards)} shards"


def _mean_entries(shards: Sequence[Shard], scored: int) -> float:
    """The mean number of entries per position of a compact store."""
    return sum(len(_mapped(shard.path)["top_ids"]) for shard in shards) / max(1, scored)


def shard_tensors(blocks: Packed, distributions: Callable[[Packed], Tensors], batch: int) -> Tensors:
    """The tensors of a shard: its blocks, and the target's distributions, computed `batch` blocks at a time."""
    parts = [distributions(part) for part in blocks.batches(batch)]
    tensors = blocks.tensors() | {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    tensors["rows"] = torch.cat([torch.zeros(1, dtype=torch.int64), blocks.scored.cumsum(0)])
    if "entries" in tensors:
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), tensors["entries"].long().cumsum(0)])
        tensors["block_entries"] = ends[tensors["rows"]]
    if blocks.documents.shape[1] <= torch.iinfo(torch.int16).max:
        tensors["documents"] = blocks.documents.to(torch.int16)
    return {name: value.contiguous() for name, value in tensors.items()}


@torch.no_grad()
def exact_distributions(model: Any, blocks: Packed, dtype: torch.dtype) -> Tensors:
    """The tensor hidden [N, H] in `dtype`. Raises DataError if a state overflows in that type."""
    hidden = scored_states(model, blocks).cpu().to(dtype)
    if not bool(hidden.isfinite().all()):
        hint = "set target.dtype to bfloat16 or float32"
        raise DataError(f"hidden states of the target are not finite in {str(dtype).removeprefix('torch.')}", hint)
    return {"hidden": hidden.contiguous()}


def compact_distributions(entries: Entries, mass: float | None) -> Tensors:
    """The tensors of N positions from their entries.

    Each position keeps the fewest likeliest entries that hold `mass`, or all entries if `mass` is None. The mass of the
    others is added to the tail.
    """
    ids, logs, tails = entries
    if mass is None:
        counts = torch.full((len(ids),), ids.shape[-1], dtype=torch.int32)
    else:
        before = logs.double().exp().cumsum(-1).roll(1, -1)
        before[:, 0] = 0
        counts = (before < mass).sum(-1).clamp(min=1).to(torch.int32)
        outside = torch.arange(ids.shape[-1]) >= counts.unsqueeze(-1)
        left = logs.masked_fill(~outside, -torch.inf).double().logsumexp(-1)
        tails = torch.logaddexp(left, tails.double())
    used = torch.arange(ids.shape[-1]) < counts.unsqueeze(-1)
    return {
        "entries": counts,
        "top_ids": ids[used].to(torch.int32),
        "top_log_probabilities": logs[used].half(),
        "log_tails": tails.float(),
    }


def save_shard(path: Path, tensors: Tensors) -> None:
    """Write a safetensors file."""
    from safetensors.torch import save_file

    write_atomically(path, lambda temporary: save_file(tensors, str(temporary)))
