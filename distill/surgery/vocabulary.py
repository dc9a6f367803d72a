"""The vocabulary of a draft: a donor is given that of the target, and trimmed to the tokens that the target writes.

Transplant: folder to folder, without building the model; only the embedding and the head are made anew. Legend: D
donor rows, R rows written, P subtokens, H hidden; V vocabulary, K kept tokens. A domain is one source of the corpus;
its counts [V] are of target-written tokens.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from huggingface_hub import save_torch_state_dict
from numpy.typing import NDArray
from torch import Tensor

from distill.data.samples import Sample
from distill.devices import doubled
from distill.engines.torch.hugging_face import load_config, local_folder, text_folder
from distill.errors import DataError, RecipeError
from distill.files import read_object, write_folder, write_json
from distill.folders import copy_tokenizer
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

SHARD_BYTES = 5 * 10**9
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def transplant(
    donor: Path,
    target: Path,
    destination: Path,
    *,
    overrides: Mapping[str, str] | None = None,
    dtype: str | None = None,
) -> Change:
    """Write `destination`: the donor with the target's tokenizer, and rows for it made from the donor's rows.

    A token with the same bytes as a donor token gets its row. For another, the input row is that of its last subtoken
    and the head row the mean of its subtokens. Ids without a token get zero rows. `dtype`
    casts the weights (None: as stored). What stood there is replaced. Raises DataError before any work where the
    transplant is impossible.
    """
    if dtype is not None and dtype not in DTYPES:
        raise DataError(f"dtype `{dtype}` cannot be written", f"choose {', '.join(DTYPES)}")
    inputs = check_transplant(donor, target, overrides)
    subtokens = map_subtokens(inputs.donor, inputs.target, overrides)
    details = describe_subtokens(subtokens, inputs.donor, inputs.target)
    mixtures = {EMBEDDING: subtokens.last(), HEAD: subtokens.mean()}
    same = inputs.donor.same_as(inputs.target)
    mixtures = {name: _with_padding(mixture, inputs, same) for name, mixture in mixtures.items()}
    tied = inputs.tied and mixtures[EMBEDDING].same_as(mixtures[HEAD])
    tensors = _tensors(inputs, mixtures, tied, dtype)
    written = {name: numpy.diff(mixture.offsets) > 0 for name, mixture in mixtures.items() if name in tensors}
    zeros = [int((torch.from_numpy(used) & ~tensors[name].any(1)).sum()) for name, used in written.items()]
    details |= {"padding_rows": inputs.rows - inputs.target.size, "same_vocabulary": same, "zero_rows": sum(zeros)}
    config = _new_config(inputs, tied, dtype)
    before = _size(inputs.config, {name: (t.numel, t.bytes) for name, t in inputs.tensors.items()}, inputs.tied)
    after = _size(config, {name: (t.numel(), t.nbytes) for name, t in tensors.items()}, tied)
    before_this, done = read_changes(donor), Change("transplant", before, after, details=details)

    def save(folder: Path) -> None:
        save_torch_state_dict(tensors, folder, max_shard_size=SHARD_BYTES)
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


def _tensors(
    inputs: TransplantInputs, mixtures: Mapping[str, Mixture], tied: bool, dtype: str | None
) -> dict[str, Tensor]:
    """Every tensor of the new model; DataError for values that its type does not hold."""

    def cast(name: str, tensor: Tensor) -> Tensor:
        tensor = tensor.to(DTYPES[dtype]) if dtype is not None and tensor.is_floating_point() else tensor
        if tensor.dtype == torch.float16 and not bool(tensor.isfinite().all()):
            raise DataError(f"values of {name} do not fit float16", "write bfloat16 or float32")
        return tensor

    def mixed(name: str, source: str) -> Tensor:
        matrix = inputs.tensors[source].read()
        kind = matrix.dtype if dtype is None else DTYPES[dtype]
        return cast(name, mixed_rows(matrix, mixtures[name], 0, inputs.rows, kind))

    new = {name: cast(name, t.read()) for name, t in inputs.tensors.items() if name not in (EMBEDDING, HEAD)}
    new[EMBEDDING] = mixed(EMBEDDING, EMBEDDING)
    if not tied:
        new[HEAD] = mixed(HEAD, EMBEDDING if inputs.tied else HEAD)
    return new


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


def _size(config: Mapping[str, Any], tensors: Mapping[str, tuple[int, int]], tied: bool) -> Size:
    """Sizes of a model from its config.json and the values and bytes of its tensors."""
    own = [size for name, size in tensors.items() if not name.endswith("inv_freq") and not (tied and name == HEAD)]
    row = tensors[EMBEDDING][1] // config["vocab_size"]
    return sizes_by(config, sum(values for values, _ in own), sum(size for _, size in own), row, tied)


# ── Trim: the tokens that the target writes, and those that every text may need ──

EXPECTED_AT = 16_384  # positions: about ten seconds on two cores for a head of 49,152 × 576
CHUNK = 256
HEAD_MULTIPLE = 256  # sizes that suit matrix products and GGUF's block types

Counts = NDArray[numpy.int64]
Shares = NDArray[numpy.float64]


def count_tokens(answers: Sequence[Sample], vocabulary: int) -> dict[str, Counts]:
    """Counts [V] of the tokens that the target wrote, by domain; DataError where it wrote none."""
    tokens: dict[str, list[Any]] = {}
    for answer in answers:
        tokens.setdefault(answer.source or "answers", []).append(numpy.asarray(answer.answer, numpy.int32))
    counts = {domain: numpy.bincount(numpy.concatenate(ids), minlength=vocabulary) for domain, ids in tokens.items()}
    counts = {domain: found for domain, found in counts.items() if found.any()}
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


def expected_shares(teacher: TeacherSource, device: torch.device, apart: Container[int] = ()) -> Shares:
    """The mean of the stored distributions at temperature 1 [V], at about EXPECTED_AT positions, evenly spread over the
    blocks that are not `apart`.

    A token that few answers would hold has its share here before it was ever written. Entries that a compact store
    does not name have none.
    """
    scored = teacher.packed.scored
    scored *= torch.tensor([block not in apart for block in range(teacher.blocks)])
    step = max(1, math.ceil(int(scored.sum()) / EXPECTED_AT))
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
    size = -(-max(enough, forced) // HEAD_MULTIPLE) * HEAD_MULTIPLE
    return min(size, len(order))


def check_size(size: int | None, forced: int, vocabulary: int, stored: int) -> None:
    """Raise RecipeError for an impossible size."""
    least = max(forced, stored + 1)
    if size is not None and (size % HEAD_MULTIPLE or not least <= size <= vocabulary):
        low = -(-least // HEAD_MULTIPLE) * HEAD_MULTIPLE
        raise RecipeError(
            f"cut.trim is {size}; it must be a multiple of {HEAD_MULTIPLE}, at least the {forced} tokens that are "
            f"always kept, more than the teacher's top {stored}, and at most the vocabulary's {vocabulary}",
            f"ask for {low} to {vocabulary // HEAD_MULTIPLE * HEAD_MULTIPLE}",
        )
