"""The vocabulary of a draft: a donor is given that of the target, and trimmed to the tokens that the target writes.

Transplant: folder to folder, without building the model. Tensors stream from one safetensors file to the next; only the
embedding and the head are made anew. Legend: D donor rows, R rows written, P subtokens, H hidden; V vocabulary, K kept
tokens. A domain is one source of the corpus; its counts [V] are of target-written tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from distill.data.samples import Sample
from distill.devices import doubled
from distill.engines.torch.hugging_face import load_config, local_folder, text_folder
from distill.errors import DataError, RecipeError
from distill.files import read_object, write_folder, write_json
from distill.folders import ITEM_BYTES, NUMPY_FLOATS, Stored, copy_tokenizer, torch_type, write_header
from distill.progress import Progress
from distill.surgery.layers import require_supported
from distill.surgery.results import Change, Size, read_changes, record_change, sizes_by
from distill.surgery.subtokens import (
    EMBEDDING,
    HEAD,
    Mixture,
    TransplantInputs,
    check_transplant,
    describe_subtokens,
    map_subtokens,
)
from distill.teacher.store import TeacherSource
from distill.vocabulary.vocabulary import Vocabulary

# ── Transplant ──

CHUNK_BYTES = 2**24
CHUNK_ROWS = 2048
SHARD_BYTES = 5 * 10**9
WRITTEN = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@dataclass(frozen=True)
class Written:
    """A tensor to be written: its type, its shape, and its values a part at a time."""

    dtype: str
    shape: tuple[int, ...]
    parts: Callable[[], Iterator[Tensor]]

    @property
    def bytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def transplant(
    donor: Path,
    target: Path,
    destination: Path,
    *,
    rows: int | None = None,
    overrides: Mapping[str, str] | None = None,
    dtype: str | None = None,
) -> Change:
    """Write `destination`: the donor with the target's tokenizer, and rows for it made from the donor's rows.

    A token with the same bytes as a donor token gets its row. For another, the input row is that of its last subtoken
    and the head row the mean of its subtokens. Ids without a token get zero rows. `dtype`
    casts the weights (None: as stored). What stood there is replaced. Raises DataError before any work where the
    transplant is impossible.
    """
    if dtype is not None and dtype not in WRITTEN:
        raise DataError(f"dtype `{dtype}` cannot be written", f"choose {', '.join(WRITTEN)}")
    inputs = check_transplant(donor, target, rows=rows, overrides=overrides)
    subtokens = map_subtokens(inputs.donor, inputs.target, overrides)
    details = describe_subtokens(subtokens, inputs.donor, inputs.target)
    mixtures = {EMBEDDING: subtokens.last(), HEAD: subtokens.mean()}
    same = inputs.donor.same_as(inputs.target)
    mixtures = {name: _with_padding(mixture, inputs, same) for name, mixture in mixtures.items()}
    details |= {"padding_rows": inputs.rows - inputs.target.size, "same_vocabulary": same, "zero_rows": 0}
    tied = inputs.tied and mixtures[EMBEDDING].same_as(mixtures[HEAD])
    outputs = _outputs(inputs, mixtures, tied, dtype, details)
    config = _new_config(inputs, tied, dtype)
    before, after = _size(inputs.config, inputs.tensors, inputs.tied), _size(config, outputs, tied)
    before_this, done = read_changes(donor), Change("transplant", before, after, details=details)

    def save(folder: Path) -> None:
        _write_tensors(folder, outputs)
        write_json(folder / "config.json", config)
        copy_tokenizer(target, folder)
        write_json(folder / "generation_config.json", _generation(target, config))
        record_change(folder, before_this, done)

    write_folder(destination, save)
    return done


def folders_of(donor: str, target: str) -> tuple[Path, Path]:
    """The folders of a donor and of a target, by path or name; a donor that cannot be cut is refused before its weights
    are imported or fetched."""
    require_supported(load_config(donor))
    return local_folder(donor), text_folder(target)


def _with_padding(mixture: Mixture, inputs: TransplantInputs, same: bool) -> Mixture:
    """The mixture with as many rows as are written: zero rows, or the donor's own padding for its own vocabulary."""
    extra = inputs.rows - inputs.target.size
    kept = min(extra, inputs.tensors[EMBEDDING].shape[0] - inputs.donor.size) if same else 0
    ids = numpy.arange(inputs.target.size, inputs.target.size + kept, dtype=numpy.int32)
    steps = numpy.minimum(numpy.arange(1, extra + 1), kept)
    return Mixture(
        numpy.concatenate([mixture.offsets, mixture.offsets[-1] + steps]),
        numpy.concatenate([mixture.ids, ids]),
        numpy.concatenate([mixture.weights, numpy.ones(kept, numpy.float32)]),
    )


def mixed_rows(matrix: Tensor, mixture: Mixture, first: int, last: int, dtype: torch.dtype) -> Tensor:
    """Rows `first` to `last` of the mixture of `matrix` [D, H]; sums in float32, a row of one entry is a copy."""
    starts, counts = mixture.offsets[first:last], numpy.diff(mixture.offsets[first : last + 1])

    def taken(entries: NDArray[numpy.int64]) -> Tensor:
        return matrix.index_select(0, torch.from_numpy(mixture.ids[entries]))

    alone = counts == 1
    alone[alone] = mixture.weights[starts[alone]] == 1
    if alone.all():
        return taken(starts).to(dtype)
    rows = torch.zeros(last - first, matrix.shape[1], dtype=dtype)
    rows[torch.from_numpy(numpy.flatnonzero(alone))] = taken(starts[alone]).to(dtype)
    several = numpy.flatnonzero((counts > 0) & ~alone)
    total = torch.zeros(len(several), matrix.shape[1])
    for step in range(counts[several].max(initial=0)):
        longer = numpy.flatnonzero(counts[several] > step)
        entries = starts[several[longer]] + step
        total[torch.from_numpy(longer)] += taken(entries).float() * torch.from_numpy(mixture.weights[entries])[:, None]
    rows[torch.from_numpy(several)] = total.to(dtype)
    return rows


def _outputs(
    inputs: TransplantInputs, mixtures: Mapping[str, Mixture], tied: bool, dtype: str | None, details: dict[str, Any]
) -> dict[str, Written]:
    """Every tensor of the new model, in the order of its file."""

    def copied(tensor: Stored) -> Written:
        kind = WRITTEN[dtype] if dtype is not None and tensor.dtype in NUMPY_FLOATS else tensor.dtype
        step = CHUNK_BYTES // ITEM_BYTES[tensor.dtype]

        def parts() -> Iterator[Tensor]:
            for first in range(0, tensor.numel, step):
                yield tensor.read(first, min(step, tensor.numel - first)).to(torch_type(kind))

        return Written(kind, tensor.shape, parts)

    def mixed(tensor: Stored, mixture: Mixture) -> Written:
        kind = tensor.dtype if dtype is None else WRITTEN[dtype]

        def parts() -> Iterator[Tensor]:
            matrix = tensor.read()
            for first in range(0, inputs.rows, CHUNK_ROWS):
                last = min(first + CHUNK_ROWS, inputs.rows)
                rows = mixed_rows(matrix, mixture, first, last, torch_type(kind))
                used = torch.from_numpy(numpy.diff(mixture.offsets[first : last + 1]) > 0)
                details["zero_rows"] += int((used & ~rows.any(1)).sum())
                yield rows

        return Written(kind, (inputs.rows, tensor.shape[1]), parts)

    new = {name: copied(t) for name, t in inputs.tensors.items() if name not in (EMBEDDING, HEAD)}
    new[EMBEDDING] = mixed(inputs.tensors[EMBEDDING], mixtures[EMBEDDING])
    if not tied:
        new[HEAD] = mixed(inputs.tensors[EMBEDDING if inputs.tied else HEAD], mixtures[HEAD])
    # The format aligns values: wide types first.
    return dict(sorted(new.items(), key=lambda item: (-ITEM_BYTES[item[1].dtype], item[0])))


def _write_tensors(folder: Path, outputs: Mapping[str, Written]) -> None:
    """Write tensors to safetensors files of about SHARD_BYTES each, with an index where there are several."""
    shards: list[dict[str, Written]] = [{}]
    for name, tensor in outputs.items():
        if shards[-1] and sum(t.bytes for t in shards[-1].values()) + tensor.bytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = tensor
    progress = Progress("transplant: tensors", len(outputs))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        single = len(shards) == 1
        path = folder / ("model.safetensors" if single else f"model-{number:05d}-of-{len(shards):05d}.safetensors")
        weight_map |= dict.fromkeys(shard, path.name)
        with path.open("wb") as file:
            write_header(file, {name: (tensor.dtype, tensor.shape) for name, tensor in shard.items()})
            for name, tensor in shard.items():
                for part in tensor.parts():
                    if tensor.dtype == "F16" and not bool(part.isfinite().all()):
                        raise DataError(f"values of {name} do not fit float16", "write bfloat16 or float32")
                    file.write(part.contiguous().view(-1).view(torch.uint8).numpy().data)
                progress.step()
    if len(shards) > 1:
        total = sum(tensor.bytes for tensor in outputs.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(folder / "model.safetensors.index.json", index)


def _new_config(inputs: TransplantInputs, tied: bool, dtype: str | None) -> dict[str, Any]:
    config = {**inputs.config, "vocab_size": inputs.rows, "tie_word_embeddings": tied}
    for role in ("bos", "eos", "pad"):
        key = f"{role}_token_id"
        configured = inputs.target_config.get(key)
        config[key] = inputs.target.roles.get(role) if configured is None else configured
    if dtype is not None:
        key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
        config[key] = dtype
    return config


def _generation(target: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The target's generation settings: its sampling, and its end tokens, of which there may be several."""
    path = target / "generation_config.json"
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    own = {key: config[key] for key in keys if config[key] is not None}
    return own | (read_object(path) if path.is_file() else {})


def _size(config: Mapping[str, Any], tensors: Mapping[str, Stored] | Mapping[str, Written], tied: bool) -> Size:
    """Sizes of a model from its config.json and its tensors."""
    own = [t for name, t in tensors.items() if not name.endswith("inv_freq") and not (tied and name == HEAD)]
    parameters, row = sum(math.prod(tensor.shape) for tensor in own), tensors[EMBEDDING].bytes // config["vocab_size"]
    return sizes_by(config, parameters, sum(tensor.bytes for tensor in own), row, tied)


# ── Trim: the tokens that the target writes, and those that every text may need ──

EXPECTED_AT = 16_384  # positions: about ten seconds on two cores for a head of 49,152 × 576
CHUNK = 256
MULTIPLE = 256  # sizes that suit matrix products and GGUF's block types

Counts = NDArray[numpy.int64]
Shares = NDArray[numpy.float64]


def count_tokens(answers: Sequence[Sample], vocabulary: int) -> dict[str, Counts]:
    """Counts [V] of the tokens that the target wrote, by domain; DataError where it wrote none."""
    tokens: dict[str, list[int]] = {}
    for answer in answers:
        tokens.setdefault(answer.source or "answers", []).extend(answer.answer)
    counts = {domain: numpy.bincount(ids, minlength=vocabulary) for domain, ids in tokens.items() if ids}
    if not counts:
        raise DataError("there are no target-written tokens to count", "raise answers.prompts, or leave cut.trim out")
    return counts


def always_kept(vocabulary: Vocabulary) -> list[int]:
    """Ids kept whatever their counts: special and added tokens, the 256 bytes, numbers and runs of white space."""

    def needed(kind: str, content: bytes | None) -> bool:
        if kind in ("special", "added", "byte"):
            return True
        return content is not None and (len(content) == 1 or not content.strip() or content.strip().isdigit())

    return [i for i, content in enumerate(vocabulary.bytes_of) if needed(vocabulary.kinds[i], content)]


def expected_shares(teacher: TeacherSource, device: torch.device, positions: int = EXPECTED_AT) -> Shares:
    """The mean of the stored distributions at temperature 1 [V], at about so many positions, evenly spread.

    A token that few answers would hold has its share here before it was ever written. Entries that a compact store
    does not name have none.
    """
    scored = teacher.packed.mask.sum(-1)
    step = max(1, math.ceil(int(scored.sum()) / positions))
    total = torch.zeros(teacher.vocabulary, dtype=torch.float64)
    count = 0
    for block in range(0, teacher.blocks, step):
        if not scored[block]:
            continue
        own = teacher.teacher(torch.tensor([block]), device)
        for first in range(0, len(own), CHUNK):
            chunk = own.chunk(slice(first, min(first + CHUNK, len(own))))
            values = doubled(chunk.log_probabilities.exp()).cpu()
            if chunk.ids is None:
                total += values.sum(0)
            else:
                total.scatter_add_(0, chunk.ids.long().cpu().flatten(), values.flatten())
        count += len(own)
    return (total / max(1, count)).numpy()


def rank_tokens(counts: Mapping[str, Counts], forced: Sequence[int], expected: Shares | None = None) -> list[int]:
    """Ids in the order in which they are kept: the forced ones, then by their largest share in any domain, to which
    their `expected` share is added."""
    shares = numpy.max([column / column.sum() for column in counts.values()], axis=0)
    if expected is not None:
        shares = shares + expected
    shares[list(forced)] = numpy.inf
    # Stable: of equal shares the smaller id, an earlier merge of byte pairs, comes first.
    return numpy.argsort(-shares, kind="stable").tolist()


def keep(counts: Mapping[str, Counts], order: Sequence[int], size: int) -> tuple[list[int], dict[str, float]]:
    """The first `size` ids of the order, ascending, and the share of each domain's tokens that they hold."""
    ids = sorted(order[:size])
    return ids, {domain: float(column[ids].sum() / column.sum()) for domain, column in counts.items()}


def smallest_size(counts: Mapping[str, Counts], order: Sequence[int], forced: int, mass: float) -> int:
    """The smallest multiple of 256 (or the whole vocabulary) that holds `mass` of every domain and all forced ids."""
    reached = numpy.min([numpy.cumsum(column[list(order)]) / column.sum() for column in counts.values()], axis=0)
    enough = int(numpy.searchsorted(reached, mass - 1e-12)) + 1
    size = -(-max(enough, forced) // MULTIPLE) * MULTIPLE
    return min(size, len(order))


def check_size(size: int | None, forced: int, vocabulary: int, stored: int) -> None:
    """Raise RecipeError for an impossible size."""
    least = max(forced, stored + 1)
    if size is not None and (size % MULTIPLE or not least <= size <= vocabulary):
        low = -(-least // MULTIPLE) * MULTIPLE
        raise RecipeError(
            f"cut.trim.size is {size}; it must be a multiple of {MULTIPLE}, at least the {forced} tokens that are "
            f"always kept, more than the teacher's top {stored}, and at most the vocabulary's {vocabulary}",
            f"ask for {low} to {vocabulary // MULTIPLE * MULTIPLE}",
        )
