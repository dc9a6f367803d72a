"""The vocabulary of a draft: a donor gets the target's vocabulary, and its head is trimmed to tokens the target writes.

Transplant works from folder to folder without building the model. Only embedding and head are made anew. Legend: D
donor rows, R written rows (one per target id), P subtokens or entries of all rows together, H hidden, V vocabulary, K
kept tokens. A domain is one source of the corpus. Its counts [V] are of tokens that the target wrote.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from huggingface_hub import save_torch_state_dict
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from distill.data.samples import Samples
from distill.devices import as_float64
from distill.engines.torch.hugging_face import check_folder, check_weights, load_config, local_folder, text_folder
from distill.errors import DataError, RecipeError
from distill.files import has_form, read_object, write_folder, write_json
from distill.folders import Stored, copy_tokenizer, read_config, stored_tensors
from distill.surgery.layers import FAMILIES, require_floats, require_supported
from distill.surgery.results import Change, Size, read_changes, record_change, sizes_by
from distill.teacher.store import TeacherStore
from distill.vocabulary.encoding import Encoder
from distill.vocabulary.vocabulary import RARE, Vocabulary, role_counterparts, stand_ins

# ── The donor tokens that write each target token, byte for byte, and rows as weighted sums of donor rows ──

# Origins of rows: no token at this id; a donor token with the same bytes; several subtokens; the user's override; the
# same role; the same string, special in the donor too; a special token's text, in subtokens.
ORIGINS = ("unused", "copy", "mean", "override", "role", "same", "text")
UNUSED, COPY, MEAN, OVERRIDE, ROLE, SAME, TEXT = range(len(ORIGINS))
WORST = 10  # The report describes this many rows, those with the most subtokens.


def offsets_of(counts: ArrayLike) -> NDArray[numpy.int64]:
    """Return where the entries of each row begin, and the end of the last row: [R + 1] from the counts [R]."""
    return numpy.concatenate([[0], numpy.cumsum(counts, dtype=numpy.int64)]).astype(numpy.int64)


@dataclass(frozen=True)
class Mixture:
    """Every new row as a weighted sum of donor rows. Row r has entries offsets[r] to offsets[r + 1] of ids and weights.

    offsets [R + 1], ids [P], weights [P]. A row without entries is zero.
    """

    offsets: NDArray[numpy.int64]
    ids: NDArray[numpy.int32]
    weights: NDArray[numpy.float32]

    def same_as(self, other: Mixture) -> bool:
        """Whether both mixtures make the same rows from the same matrix."""
        return all(numpy.array_equal(a, b) for a, b in zip(vars(self).values(), vars(other).values(), strict=True))


@dataclass(frozen=True)
class Subtokens:
    """Donor ids of every target id: offsets [R + 1], ids [P]. origin [R] indexes ORIGINS.

    `unwritable` target ids hold bytes without a donor token (RARE, or never used by UTF-8). U+FFFD replaces them.
    """

    offsets: NDArray[numpy.int64]
    ids: NDArray[numpy.int32]
    origin: NDArray[numpy.uint8]
    unwritable: tuple[int, ...] = ()

    def of(self, row: int) -> list[int]:
        """Return the donor ids of one target id."""
        return [int(number) for number in self.ids[self.offsets[row] : self.offsets[row + 1]]]

    def last(self) -> Mixture:
        """Return the mixture of the input embedding: the row of the last subtoken."""
        counts = numpy.diff(self.offsets)
        ids = self.ids[self.offsets[1:][counts > 0] - 1]
        return Mixture(offsets_of(counts > 0), ids, numpy.ones(len(ids), numpy.float32))

    def mean(self) -> Mixture:
        """Return the mixture of the head: the mean of the subtokens."""
        counts = numpy.diff(self.offsets)
        starts = self.offsets[:-1]
        row_of = numpy.repeat(numpy.arange(len(counts)), counts)
        weights = 1.0 / counts[row_of]
        # A row of one repeated subtoken is exactly that subtoken's row.
        repeats = (self.ids == self.ids[starts[row_of]]) | (counts[row_of] == 1)
        single = numpy.bincount(row_of, ~repeats, len(counts)) == 0
        entries = ~single[row_of] | (numpy.arange(len(self.ids)) == starts[row_of])
        weights[single[row_of]] = 1.0
        return Mixture(
            offsets_of(numpy.bincount(row_of[entries], minlength=len(counts))),
            self.ids[entries],
            weights[entries].astype(numpy.float32),
        )


def require_bytes(donor: Vocabulary) -> None:
    """Raise DataError for a donor that lacks tokens for bytes of ordinary texts. It could not write all tokens."""
    missing = [byte for byte in donor.missing_bytes if byte not in RARE]
    if missing:
        shown = ", ".join(f"{byte:#04x}" for byte in missing[:6]) + (", ..." if len(missing) > 6 else "")
        what = f"the tokenizer in {donor.folder} has no token for {len(missing)} of the 256 bytes ({shown})"
        raise DataError(what, "choose a donor with byte-level BPE or with byte fallback")


def check_overrides(target: Vocabulary, overrides: Mapping[str, str]) -> None:
    """Raise DataError for an override of a token that the target lacks, or with an empty text.

    A token is named by its text, or as tokenizer.json writes it.
    """
    for token, text in overrides.items():
        if target.find(token) is None:
            numbers = [number for number, name in enumerate(target.tokens) if name is not None]
            named = [target.shown(number) for number in numbers if target.kinds[number] != "normal"]
            similar = [name for name in map(target.shown, numbers) if abs(len(name) - len(token)) < 3]
            near = [match for names in (named, similar) for match in difflib.get_close_matches(token, names, 1, 0.5)]
            hint = f"did you mean {near[0]!r}?" if near else "see the tokens in its tokenizer.json"
            raise DataError(f"the override {token!r} is not a token of the target {target.folder}", hint)
        twin = next((other for other in overrides if other != token and target.find(other) == target.find(token)), None)
        if twin is not None:
            raise DataError(f"the overrides {token!r} and {twin!r} name the same token", "leave one of them out")
        if not text:
            raise DataError(
                f"the override of {token!r} is empty", "give the text whose donor tokens replace it, such as '</s>'"
            )


def map_subtokens(donor: Vocabulary, target: Vocabulary, overrides: Mapping[str, str] | None = None) -> Subtokens:
    """Map every target id to donor ids.

    An ordinary token with the same bytes as a donor token copies it. Other tokens are encoded by the donor's model.
    A special token goes by override, role, same string, or its text, in this order. The caller has checked the
    overrides (`check_overrides`) and the donor (`require_bytes`). Raises DataError for an override that gives no donor
    tokens.
    """
    mapper = _Mapper(donor, target, overrides or {})
    rows = [mapper.row(number) for number in range(target.size)]
    return Subtokens(
        offsets=offsets_of([len(row.ids) for row in rows]),
        ids=numpy.fromiter((subtoken for row in rows for subtoken in row.ids), numpy.int32),
        origin=numpy.array([row.origin for row in rows], numpy.uint8),
        unwritable=tuple(number for number, row in enumerate(rows) if not row.exact),
    )


class _Row(NamedTuple):
    """The donor ids of one target id. `exact`: they have exactly its bytes."""

    origin: int
    ids: list[int]
    exact: bool = True


class _Mapper:
    """Finds the donor ids of target ids, one at a time."""

    def __init__(self, donor: Vocabulary, target: Vocabulary, overrides: Mapping[str, str]) -> None:
        self.donor, self.target = donor, target
        self.overrides = {target.find(token): text for token, text in overrides.items()}
        self.encoder = Encoder(donor)
        # If a token has several roles, the last pair counts. A role wins over a stand-in.
        self.roles = stand_ins(target.roles, donor.roles) | dict(role_counterparts(target.roles, donor.roles))
        self._written: dict[bytes, tuple[list[int], bool]] = {}

    def row(self, number: int) -> _Row:
        """Return the row by the first rule that applies: override, role, same bytes, same name, donor subtokens."""
        token, data = self.target.tokens[number], self.target.bytes_of[number]
        if token is None or data is None:
            return _Row(UNUSED, [])
        if number in self.overrides:
            return _Row(OVERRIDE, self._overridden(number))
        named, special = self.target.is_named(number), self.target.kinds[number] == "special"
        if named and number in self.roles:
            return _Row(ROLE, [self.roles[number]])
        if not special and (same := self._same_bytes(number, token, data)) is not None:
            return _Row(COPY, [same])
        if named and token in self.donor.index and self.donor.is_named(self.donor.index[token]):
            return _Row(SAME, [self.donor.index[token]])
        ids, exact = self._subtokens(data)
        return _Row(TEXT if special else MEAN, ids, exact)

    def _overridden(self, number: int) -> list[int]:
        ids = self.encoder.marked_text(text := self.overrides[number])
        if not ids:
            hint = "give text that the donor's tokenizer keeps"
            shown = self.target.shown(number)
            raise DataError(f"the override of {shown!r} by {text!r} gives no donor tokens", hint)
        return ids

    def _same_bytes(self, number: int, token: str, data: bytes) -> int | None:
        """Return a donor id with these bytes: the same token of the same kind, if it is among several, or the best."""
        twin = self.donor.index.get(token)
        if twin is None or (self.donor.kinds[twin], self.donor.bytes_of[twin]) != (self.target.kinds[number], data):
            return self.donor.by_bytes.get(data)
        return twin

    def _subtokens(self, data: bytes) -> tuple[list[int], bool]:
        """Return the donor's tokens for these bytes, and whether they are exact. A token without bytes becomes eos."""
        if data not in self._written:
            self._written[data] = self.encoder.word(data)
        ids, exact = self._written[data]
        return ids or [self.donor.roles.get("eos", self.donor.byte_ids[ord(" ")])], exact


def describe_subtokens(subtokens: Subtokens, donor: Vocabulary, target: Vocabulary) -> dict[str, Any]:
    """Count rows by origin, duplicates and rows without subtokens. List special tokens and the WORST rows."""
    counts = Counter(ORIGINS[how] for how in subtokens.origin)
    lengths = numpy.diff(subtokens.offsets)
    ordinary = [b for b, kind in zip(target.bytes_of, target.kinds, strict=True) if b is not None and kind != "special"]

    def shown(row: int) -> dict[str, Any]:
        return {
            "id": row,
            "token": target.shown(row),
            "how": ORIGINS[subtokens.origin[row]],
            "subtokens": [donor.shown(subtoken) for subtoken in subtokens.of(row)],
        }

    by_name = (OVERRIDE, ROLE, SAME)
    named = [row for row, kind in enumerate(target.kinds) if kind == "special" or subtokens.origin[row] in by_name]
    return {
        "rows": target.size,
        "copies": counts["copy"],
        "copy_share": counts["copy"] / target.size,
        "means": counts["mean"],
        "overrides": counts["override"],
        "roles": counts["role"],
        "same_special": counts["same"],
        "special_as_text": counts["text"],
        "unused": counts["unused"],
        "zeros": int(((lengths == 0) & (subtokens.origin != UNUSED)).sum()),
        "duplicates": len(ordinary) - len(set(ordinary)),
        "not_utf8_alone": sum(data.decode(errors="ignore").encode() != data for data in ordinary),
        "unwritable": len(subtokens.unwritable),
        "subtokens_per_mean": float(lengths[subtokens.origin == MEAN].mean()) if counts["mean"] else 0.0,
        "special_tokens": [shown(row) for row in named],
        "worst": [shown(int(row)) for row in numpy.argsort(-lengths, kind="stable")[:WORST] if lengths[row] > 1],
    }


# ── Whether a transplant is possible, and everything that it reads from the files of both models except weights ──

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


@dataclass(frozen=True)
class TransplantInputs:
    """A possible transplant, with everything that was read from the files of both models."""

    donor: Vocabulary
    target: Vocabulary
    tensors: dict[str, Stored]
    config: dict[str, Any]
    target_config: dict[str, Any]
    tied: bool
    rows: int


def check_transplant(donor: Path, target: Path, overrides: Mapping[str, str] | None = None) -> TransplantInputs:
    """Read the files that a transplant needs, without weights. Raises DataError for an impossible transplant.

    `donor` is a model folder, `target` a model or tokenizer folder.
    """
    check_folder(str(donor.absolute()))
    config = read_config(donor)
    if config.get("model_type") not in FAMILIES:
        require_supported(load_config(str(donor.absolute())))
    for key in SIZES:
        if not has_form(config.get(key), int):
            raise DataError(f"{donor}/config.json: {key} must be an integer", "give a complete model folder")
    require_floats(str(donor.absolute()))
    # The default of tie_word_embeddings depends on the family.
    tied = bool(config.setdefault("tie_word_embeddings", load_config(str(donor.absolute())).tie_word_embeddings))
    tensors = stored_tensors(donor, tied)
    check_weights(str(donor.absolute()))
    target_config = read_config(target) if (target / "config.json").is_file() else {}
    ours, theirs = Vocabulary.read(donor), Vocabulary.read(target)
    require_bytes(ours)
    check_overrides(theirs, overrides or {})
    return TransplantInputs(
        donor=ours,
        target=theirs,
        tensors=tensors,
        config=config,
        target_config=target_config,
        tied=tied,
        rows=_row_count(target, theirs, target_config),
    )


def _row_count(folder: Path, target: Vocabulary, config: Mapping[str, Any]) -> int:
    count = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size") or target.size
    if not isinstance(count, int):
        raise DataError(f"{folder}/config.json: vocab_size must be an integer", "correct config.json")
    if count < target.size:
        raise DataError(f"{folder}: config.json states {count} rows, too few for the {target.size} tokens")
    return count


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

    A token with the same bytes as a donor token gets its row. Another token gets the input row of its last subtoken and
    the mean of the head rows of its subtokens. Ids without a token get zero rows. `dtype` casts the weights (None keeps
    the stored types). An existing folder is replaced. Raises DataError before any work if the transplant is impossible.
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
    changes_before, change = read_changes(donor), Change("transplant", before, after, details=details)

    def save(folder: Path) -> None:
        save_torch_state_dict(tensors, folder, max_shard_size=SHARD_BYTES)
        write_json(folder / "config.json", config)
        copy_tokenizer(target, folder)
        write_json(folder / "generation_config.json", _generation(target, config))
        record_change(folder, changes_before, change)

    write_folder(destination, save)
    return change


def folders_of(donor: str, target: str) -> tuple[Path, Path]:
    """Return the folders of a donor and a target, given by path or name.

    A donor that cannot be cut is refused before its weights are imported or fetched.
    """
    require_supported(load_config(donor))
    return local_folder(donor), text_folder(target)


def _with_padding(mixture: Mixture, inputs: TransplantInputs, same: bool) -> Mixture:
    """Add the padding rows that are written: zero rows, or the donor's own padding if its vocabulary stays."""
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
    """Return rows `first` to `last` of the mixture of `matrix` [D, H]. Sums are fp32. A row of one entry is a copy."""
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
    """Return every tensor of the new model. DataError for values that do not fit its dtype."""

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
    """Return the target's generation settings: its sampling settings, and its end tokens (one or more)."""
    path = target / "generation_config.json"
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {key: config[key] for key in keys if config[key] is not None}
    return ids | (read_object(path) if path.is_file() else {})


def _size(config: Mapping[str, Any], tensors: Mapping[str, tuple[int, int]], tied: bool) -> Size:
    """Return the sizes of a model from its config.json and the number of values and bytes of its tensors."""
    counted = [size for name, size in tensors.items() if not name.endswith("inv_freq") and not (tied and name == HEAD)]
    row = tensors[EMBEDDING][1] // config["vocab_size"]
    return sizes_by(config, sum(values for values, _ in counted), sum(size for _, size in counted), row, tied)


# ── Trim: the tokens that the target writes, and those that every text may need ──

MAX_POSITIONS = 16_384  # About ten seconds on two cores for a head of 49,152 × 576.
CHUNK_POSITIONS = 256
HEAD_MULTIPLE = 256  # Multiples of this suit matrix products and GGUF's block types.

Counts = NDArray[numpy.int64]
Shares = NDArray[numpy.float64]


def count_tokens(answers: Samples, vocabulary: int) -> dict[str, Counts]:
    """Return the counts [V] of the tokens that the target wrote, by domain. DataError if it wrote none."""
    counts: dict[str, Counts] = {}
    for number, source in enumerate(answers.column("source")):
        domain = counts.setdefault(source or "answers", numpy.zeros(vocabulary, numpy.int64))
        numpy.add.at(domain, answers.ids(number)[1], 1)
    counts = {domain: column for domain, column in counts.items() if column.any()}
    if not counts:
        raise DataError("there are no target-written tokens to count", "raise answers.prompts, or leave cut.trim out")
    return counts


def always_kept(vocabulary: Vocabulary) -> list[int]:
    """Return the ids that always stay: special and added tokens, the 256 bytes, numbers and runs of white space."""

    def needed(kind: str, content: bytes | None) -> bool:
        if kind in ("special", "added", "byte"):
            return True
        return content is not None and (len(content) == 1 or not content.strip() or content.strip().isdigit())

    return [i for i, content in enumerate(vocabulary.bytes_of) if needed(vocabulary.kinds[i], content)]


def expected_shares(teacher: TeacherStore, device: torch.device, apart: Container[int] = ()) -> Shares:
    """Return the mean of the stored distributions at temperature 1 [V], over about MAX_POSITIONS positions.

    The positions spread evenly over the blocks that are not in `apart`. A token that the target rarely writes has a
    share here even if no answer contains it. A compact store gives no share to tokens outside its entries.
    """
    scored = teacher.packed.scored
    scored *= torch.tensor([block not in apart for block in range(teacher.blocks)])
    step = max(1, math.ceil(int(scored.sum()) / MAX_POSITIONS))
    total = torch.zeros(teacher.vocabulary + 1, dtype=torch.float64)  # The last id marks unused compact entries.
    count = 0
    for block in range(0, teacher.blocks, step):
        if not scored[block]:
            continue
        distributions = teacher.read(torch.tensor([block])).distributions(device)
        for first in range(0, len(distributions), CHUNK_POSITIONS):
            chunk = distributions.chunk(slice(first, min(first + CHUNK_POSITIONS, len(distributions))))
            values = as_float64(chunk.log_probabilities.exp()).cpu()
            if chunk.ids is None:
                total[:-1] += values.sum(0)
            else:
                total.scatter_add_(0, chunk.ids.long().cpu().flatten(), values.flatten())
        count += len(distributions)
    return (total[:-1] / max(1, count)).numpy()


def rank_tokens(counts: Mapping[str, Counts], forced: Sequence[int], expected: Shares | None = None) -> list[int]:
    """Return ids in the order in which they are kept: the forced ids, then the others by share.

    The share is the largest one in any domain, plus `expected`.
    """
    shares = numpy.max([column / column.sum() for column in counts.values()], axis=0)
    if expected is not None:
        shares = shares + expected
    shares[list(forced)] = numpy.inf
    # The sort is stable. Of equal shares, the smaller id (an earlier merge of byte pairs) comes first.
    return numpy.argsort(-shares, kind="stable").tolist()


def largest_shares(counts: Mapping[str, Counts], order: Sequence[int], size: int) -> tuple[list[int], dict[str, float]]:
    """Return the first `size` ids of the order, ascending, and the share of each domain's tokens that they hold."""
    ids = sorted(order[:size])
    return ids, {domain: float(column[ids].sum() / column.sum()) for domain, column in counts.items()}


def smallest_size(counts: Mapping[str, Counts], order: Sequence[int], forced: int, mass: float) -> int:
    """Return the smallest multiple of 256 that holds `mass` of every domain and all forced ids, or the vocabulary."""
    reached = numpy.min([numpy.cumsum(column[list(order)]) / column.sum() for column in counts.values()], axis=0)
    enough = int(numpy.searchsorted(reached, mass - 1e-12)) + 1
    size = -(-max(enough, forced) // HEAD_MULTIPLE) * HEAD_MULTIPLE
    return min(size, len(order))


def check_size(size: int | None, forced: int, vocabulary: int, stored: int) -> None:
    """Raise RecipeError for an impossible size of a trimmed head."""
    least = max(forced, stored + 1)
    if size is not None and (size % HEAD_MULTIPLE or not least <= size <= vocabulary):
        low = -(-least // HEAD_MULTIPLE) * HEAD_MULTIPLE
        raise RecipeError(
            f"cut.trim is {size}; it must be a multiple of {HEAD_MULTIPLE}, at least the {forced} tokens that are "
            f"always kept, more than the teacher's top {stored}, and at most the vocabulary's {vocabulary}",
            f"ask for {low} to {vocabulary // HEAD_MULTIPLE * HEAD_MULTIPLE}",
        )
