"""The teacher store: the packed blocks and the target's distributions on them, in checksummed shards.

Legend: n blocks of a shard, S positions, N of them scored, K entries, V vocabulary, H the target's hidden size. A shard
is a safetensors file with the packed blocks (ids int32, documents int16 where that holds their numbers, mask), `rows`
int64 [n + 1], the first of each block's scored positions among all of the shard, and of these alone, where its kind is

- compact: top_ids int32 [N, K], top_log_probabilities fp16 [N, K], log_tails fp32 [N];
- exact: hidden [N, H], after the final norm; the head stands in head.safetensors, once;
- online: nothing else.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy
import torch
from torch import Tensor

from distill.data.packing import Blocks, Deferred, Packed, concatenate, pack, scored_states
from distill.data.samples import TEXT_FAULTS, Samples, how_to_redo, joined_samples, listed, read_answers, read_prompts
from distill.engines.torch.hugging_face import load_config, load_target, load_tokenizer
from distill.errors import DataError
from distill.files import digest, read_json, reference_digest
from distill.recipe import Recipe
from distill.recipe.target import TYPE_BYTES, TeacherSettings
from distill.run import Run
from distill.sampler import require_finite
from distill.teacher.distributions import EMPTY, CompactTeacher, Head, LogitForm, Teacher, TeacherChunk, require_head

FORMAT = 3
FAINT = 1e-30  # sums of exponentials below this have lost bits in fp32
PACKED_BYTES = 4 + 2 + 1  # a position's id, document and mask


def compress(logits: Tensor, k: int, vocabulary: int) -> TeacherChunk:
    """The compact form of distributions given as logits [N, V], at temperature 1, its ids int32.

    Columns from `vocabulary` on are padding and hold no mass. The tail is summed over the tokens outside the top K,
    never as one minus the sum of the others. DataError for logits that are not finite.
    """
    logits = logits.float()
    if vocabulary < logits.shape[-1]:
        logits = logits.clone()
        logits[:, vocabulary:] = -math.inf
    values, ids = logits.topk(k, dim=-1)
    if not bool(values[:, 0].isfinite().all()):
        require_finite(values[:, 0].tolist(), lambda row: f"the target at scored position {row} of a batch")
    shares = (logits - values[:, :1]).exp_()  # once for both sums: exponentials are most of the work
    total = shares.sum(-1, keepdim=True)
    outside = shares.scatter_(-1, ids, 0).sum(-1, keepdim=True)
    tail = (outside / total).log().squeeze(-1)
    deep = (outside.squeeze(-1) < FAINT).nonzero().squeeze(-1)
    if len(deep):  # too small for fp32 beside the largest: summed by itself
        left = logits[deep].scatter(-1, ids[deep], -torch.inf).logsumexp(-1)
        tail[deep] = left - values[deep, 0] - total[deep, 0].log()
    return TeacherChunk(ids.to(torch.int32), values - values[:, :1] - total.log(), tail.clamp(min=EMPTY))


def bytes_per_row(settings: TeacherSettings, hidden: int, dtype: str, k: int | None = None) -> int:
    """Bytes of a scored position's distribution in a store of these settings, with a target of that hidden size and
    type; PACKED_BYTES of each position come to them.

    `k` is the number of entries of a compact store, where it is known to be below `top_k`.
    """
    if settings.kind == "compact":
        return (k or settings.top_k) * (4 + 2) + 4
    return hidden * TYPE_BYTES[dtype] if settings.kind == "exact" else 0


def planned_bytes(recipe: Recipe, prompts: int) -> dict[str, int]:
    """What the stores that a run writes take on disk, by stage, each of the answers to `prompts` as long as it may get:
    for training, and held out where the target is not loaded."""
    answers, block = recipe.answers, recipe.corpus.block
    hidden = load_config(recipe.target.model).get_text_config().hidden_size
    each = bytes_per_row(recipe.teacher, hidden, recipe.target.dtype)
    asked = {"teacher": (prompts, answers.new_tokens, recipe.corpus.tokens)}
    splits: tuple[Split, ...] = () if recipe.target.load else ("validation", "test")
    for split in splits:
        count, tokens, blocks = sizes(recipe, split)
        asked[split] = (count, tokens, blocks * block)
    return {
        stage: (count * tokens + given) * (each + PACKED_BYTES) + count * answers.prompt_tokens * PACKED_BYTES
        for stage, (count, tokens, given) in asked.items()
    }


def read_manifest(run: Run, stage: str = "teacher") -> dict[str, Any]:
    """manifest.json of a teacher store; raises DataError when it is missing, or not as its stage wrote it."""
    path = run.path(stage, "manifest.json")
    if run.done(stage) is None:
        raise DataError(f"{path} was not written by a finished `{stage}` stage", "run `distill train` again")
    run.verify(stage, f"{stage}/manifest.json")
    return read_json(path)


class TeacherStore:
    """The finished shards of a run, mapped and read where they are asked for; each is the one that its stage recorded.

    `stage` wrote them: `teacher` those of the train blocks, others those of held-out ones.
    """

    def __init__(self, run: Run, stage: str = "teacher") -> None:
        self.folder = run.path(stage)
        self.manifest = read_manifest(run, stage)
        run.verify(stage, f"{stage}/*.safetensors")
        self.vocabulary: int = self.manifest["vocabulary"]
        self._shards = [
            _mapped(shard_path(self.folder, number)) for number in range(len(self.manifest["shard_blocks"]))
        ]
        self.blocks: int = sum(self.manifest["shard_blocks"])
        self.packed = Deferred(
            self.blocks, self._packed, lambda: torch.cat([one["rows"].diff() for one in self._shards])
        )
        self._head: Head | None = None
        self._sums: dict[int, Tensor] = {}  # by block
        if self.manifest["kind"] == "exact":
            found = _mapped(head_path(self.folder))
            self._head = Head(found["weight"], found.get("bias"), LogitForm(**self.manifest["logit_form"]))

    def _places(self, blocks: list[int]) -> list[tuple[dict[str, Tensor], int]]:
        """The shard of each block, and its number there; all shards but the last have the same number of blocks."""
        size = self.manifest["shard_blocks"][0]
        return [(self._shards[block // size], block % size) for block in blocks]

    def _packed(self, blocks: list[int]) -> Packed:
        """These blocks, read from the maps."""
        names = ("ids", "documents", "mask")
        ids, documents, mask = (torch.stack([shard[name][at] for shard, at in self._places(blocks)]) for name in names)
        return Packed(ids, documents.int(), mask)

    def _scored(self, names: tuple[str, ...], index: Tensor) -> list[Tensor]:
        """Tensors [N, …] of the scored positions of the blocks at `index` [b]."""
        places = self._places(index.tolist())
        rows = [(shard, slice(*shard["rows"][block : block + 2].tolist())) for shard, block in places]
        return [torch.cat([shard[name][own] for shard, own in rows]) for name in names]

    def teacher(self, index: Tensor, device: torch.device) -> Teacher:
        """The distributions of the N scored positions of the blocks at `index` [b], block by block, on a device."""
        if self.manifest["kind"] == "compact":
            names = ("top_ids", "top_log_probabilities", "log_tails")
            ids, logs, tails = (found.to(device) for found in self._scored(names, index))
            return CompactTeacher(ids, logs, tails, self.vocabulary)
        assert self._head is not None, "an online teacher has no distributions on disk"
        self._head = self._head.to(device)
        (hidden,) = self._scored(("hidden",), index)
        return replace(self._head.teacher(hidden.to(device)), log_sums=partial(self._sums_of, index, device))

    @torch.no_grad()
    def _sums_of(self, index: Tensor, device: torch.device) -> Tensor:
        """The log of Σ exp over the logits [N] at the scored positions of the blocks at `index`.

        Computed when a block is first asked for, and block by block: a resumed training finds the same numbers.
        """
        for block in {*index.tolist()} - self._sums.keys():
            (hidden,) = self._scored(("hidden",), torch.tensor([block]))
            assert self._head is not None
            self._sums[block] = self._head.log_sums(hidden.to(device)).cpu()
        return torch.cat([self._sums[block] for block in index.tolist()]).to(device)


def _mapped(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file as views of its mapped content."""
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - a handle, no mapping


def shard_path(folder: Path, number: int) -> Path:
    """The path of a shard."""
    return folder / f"shard-{number:05d}.safetensors"


def head_path(folder: Path) -> Path:
    """The path of the head of an exact store."""
    return folder / "head.safetensors"


# ── Held-out texts of a run that never loads the target ──

Split = Literal["validation", "test"]
ANSWERS = "answers"  # the name of the files of answers
# Reasons for which an answer is not learnt from, but says what the target wrote.
READABLE = ("", "truncated", *TEXT_FAULTS)


@dataclass(frozen=True)
class HeldOut:
    """Held-out texts: the answers, and their blocks, one document each; the given text's blocks; what was left out."""

    answers: Samples
    own: Packed
    given: Packed
    dropped: dict[str, int]

    @property
    def blocks(self) -> Packed:
        """All blocks, the answers' first; their documents are numbered where those of the given text are."""
        return concatenate([part for part in (self.own, self.given) if len(part)])


def held_out(recipe: Recipe, run: Run, split: Split) -> HeldOut:
    """The texts of a finished or begun held-out stage, a pure function of its files and those of stage `corpus`.

    An answer counts as the target wrote it, also where it ends in a loop or was cut short. Raises DataError where no
    answer is left.
    """
    count, _, blocks = sizes(recipe, split)
    found = joined_samples([served_answers(run, split)[:count], read_answers(run, ANSWERS, split)])
    reasons = found.column("dropped")
    readable = numpy.isin(reasons, READABLE) & (found.column("answer") > 0)
    answers, dropped = found.take(readable), Counter(reason or "empty" for reason in reasons[~readable])
    if not answers:
        raise DataError(
            f"no answer to a {split} prompt is left: {listed(dropped, ' × ') or 'there was none'}",
            f"correct answers.writer and use --redo {split}, or give more served lines (answers.traffic)",
        )
    texts = [(numpy.concatenate(turn), len(turn[0])) for turn in map(answers.ids, range(len(answers)))]
    own = pack(texts, recipe.corpus.block, split_long=False)
    given = Packed.load(run.path("corpus", f"text-{split}.safetensors")).take(slice(0, blocks))
    return HeldOut(answers, own, given, dict(sorted(dropped.items())))


def sizes(recipe: Recipe, split: Split) -> tuple[int, int, int]:
    """How many prompts are answered, with at most how many tokens each, and how many blocks of given text there are."""
    if split == "test":
        return recipe.eval.prompts, recipe.eval.new_tokens, recipe.eval.file_blocks
    assert recipe.train.acceptance is not None, "recipes without it are refused"
    return recipe.train.acceptance.prompts, recipe.train.acceptance.new_tokens, recipe.cut.score_blocks


def served_answers(run: Run, split: Split) -> Samples:
    """Held-out answers of served traffic: the target has written them already."""
    prompts = read_prompts(run, split)
    return prompts.take(prompts.column("answer") > 0)


# ── The distributions that a draft learns ──


class OnlineTarget:
    """A loaded target on packed blocks; raises DataError where its head and hidden states do not give its logits."""

    def __init__(self, model: Any, packed: Blocks, manifest: dict[str, Any], batch: int) -> None:
        self.model, self.packed, self.manifest, self.batch = model, packed, manifest, batch
        self.blocks = len(packed)
        self.vocabulary: int = manifest["vocabulary"]
        self._head = Head.of(model, self.vocabulary)
        require_head(model, self._head, packed.take(slice(0, 1)))

    @torch.no_grad()
    def teacher(self, index: Tensor, device: torch.device) -> Teacher:
        """The distributions of the N scored positions of the blocks at `index` [b], block by block, on a device.

        The target takes `batch` blocks at once; its logits exist only chunk by chunk.
        """
        parts = self.packed.take(index).batches(self.batch)
        states = [scored_states(self.model, part).to(device) for part in parts]
        self._head = self._head.to(device)
        return self._head.teacher(torch.cat(states))


# Packed blocks, and the target's distributions on them.
TeacherSource = TeacherStore | OnlineTarget


def open_teacher(run: Run, recipe: Recipe, device: torch.device, model: Any = None) -> TeacherSource:
    """The teacher that stage `teacher` wrote into a run.

    An online one runs `model`, the target, which is loaded onto `device` when none is given. Raises DataError when a
    file is damaged.
    """
    store = TeacherStore(run)
    if store.manifest["kind"] != "online":
        return store
    target = load_target(recipe.target, device) if model is None else model
    return OnlineTarget(target, store.packed, store.manifest, recipe.teacher.batch)


def tokenizer_digest(target: str) -> str:
    """Of the vocabulary that a target's texts are written in."""
    return digest(load_tokenizer(target).get_vocab())


def target_metadata(recipe: Recipe) -> dict[str, Any]:
    """The identity of a target: its content, its tokenizer's vocabulary, and how it runs."""
    return {
        "target": recipe.target.model,
        "target_digest": reference_digest(recipe.target.model),
        "tokenizer_digest": tokenizer_digest(recipe.target.model),
        "dtype": recipe.target.dtype,
        "quantise": recipe.target.quantise,
    }


def require_fit(manifest: dict[str, Any], recipe: Recipe) -> None:
    """Raise DataError where a teacher's tokenizer is not the target's as it is now: of a hub name, another revision may
    have come since. All else that a teacher was made with is part of its stage's key."""
    if manifest["tokenizer_digest"] != tokenizer_digest(recipe.target.model):
        raise DataError(
            f"the teacher was made with another tokenizer of {manifest['target']} than the recipe has now",
            how_to_redo("teacher"),
        )
