"""The donor tokens that write each token of a target, byte for byte, and rows as weighted sums of donor rows.

Legend: R target ids, D donor ids, P subtokens or entries of all rows together.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy
from numpy.typing import ArrayLike, NDArray

from distill.engines.torch.hugging_face import check_folder, check_weights, load_config
from distill.errors import DataError
from distill.files import has_form
from distill.folders import Stored, read_config, stored_tensors
from distill.surgery.layers import FAMILIES, require_floats, require_supported
from distill.vocabulary.encoding import Encoder
from distill.vocabulary.vocabulary import RARE, Vocabulary, role_counterparts, stand_ins

# How a row came about: no token there; the same bytes; several subtokens; the user's override; the same role; the same
# string, special in the donor too; a special token's own text, in subtokens.
ORIGINS = ("unused", "copy", "mean", "override", "role", "same", "text")
UNUSED, COPY, MEAN, OVERRIDE, ROLE, SAME, TEXT = range(len(ORIGINS))
WORST = 10  # rows with most subtokens that are described


def offsets_of(counts: ArrayLike) -> NDArray[numpy.int64]:
    """Where the entries of each row begin, and the end of the last: [R + 1] from the counts [R]."""
    return numpy.concatenate([[0], numpy.cumsum(counts, dtype=numpy.int64)]).astype(numpy.int64)


@dataclass(frozen=True)
class Mixture:
    """Every new row as a weighted sum of donor rows: row r has entries offsets[r] to offsets[r + 1] of ids, weights.

    offsets [R + 1], ids [P], weights [P]; a row without entries is zero.
    """

    offsets: NDArray[numpy.int64]
    ids: NDArray[numpy.int32]
    weights: NDArray[numpy.float32]

    def same_as(self, other: Mixture) -> bool:
        """Whether both make the same rows of the same matrix."""
        return all(numpy.array_equal(a, b) for a, b in zip(vars(self).values(), vars(other).values(), strict=True))


@dataclass(frozen=True)
class Subtokens:
    """Donor ids of every target id: offsets [R + 1], ids [P]; origin [R] indexes ORIGINS.

    `unwritable` target ids hold bytes that the donor has no token for (RARE, or never used by UTF-8); U+FFFD stands in.
    """

    offsets: NDArray[numpy.int64]
    ids: NDArray[numpy.int32]
    origin: NDArray[numpy.uint8]
    unwritable: tuple[int, ...] = ()

    def of(self, row: int) -> list[int]:
        """The donor ids of one target id."""
        return [int(number) for number in self.ids[self.offsets[row] : self.offsets[row + 1]]]

    def last(self) -> Mixture:
        """The mixture of the input embedding: the row of the last subtoken."""
        counts = numpy.diff(self.offsets)
        ids = self.ids[self.offsets[1:][counts > 0] - 1]
        return Mixture(offsets_of(counts > 0), ids, numpy.ones(len(ids), numpy.float32))

    def mean(self) -> Mixture:
        """The mixture of the head: the mean of the subtokens."""
        counts = numpy.diff(self.offsets)
        starts = self.offsets[:-1]
        row_of = numpy.repeat(numpy.arange(len(counts)), counts)
        weights = 1.0 / counts[row_of]
        # A row of one repeated subtoken is that subtoken's row, to the bit.
        repeats = (self.ids == self.ids[starts[row_of]]) | (counts[row_of] == 1)
        single = numpy.bincount(row_of, ~repeats, len(counts)) == 0
        keep = ~single[row_of] | (numpy.arange(len(self.ids)) == starts[row_of])
        weights[single[row_of]] = 1.0
        return Mixture(
            offsets_of(numpy.bincount(row_of[keep], minlength=len(counts))),
            self.ids[keep],
            weights[keep].astype(numpy.float32),
        )


def require_bytes(donor: Vocabulary) -> None:
    """Raise DataError for a donor that lacks tokens for bytes of ordinary texts: it could not write some tokens."""
    missing = [byte for byte in donor.missing_bytes if byte not in RARE]
    if missing:
        shown = ", ".join(f"{byte:#04x}" for byte in missing[:6]) + (", ..." if len(missing) > 6 else "")
        raise DataError(
            f"the tokenizer in {donor.folder} has no token for {len(missing)} of the 256 bytes ({shown})",
            "choose a donor with byte-level BPE or with byte fallback",
        )


def check_overrides(target: Vocabulary, overrides: Mapping[str, str]) -> None:
    """Raise DataError for an override of a token that the target does not have, or by an empty text.

    A token is named by its text, or as tokenizer.json writes it.
    """
    for token, text in overrides.items():
        if target.find(token) is None:
            numbers = [number for number, name in enumerate(target.tokens) if name is not None]
            named = [target.shown(number) for number in numbers if target.kinds[number] != "normal"]
            similar = [name for name in map(target.shown, numbers) if abs(len(name) - len(token)) < 3]
            near = [match for names in (named, similar) for match in difflib.get_close_matches(token, names, 1, 0.5)]
            hint = f"did you mean {near[0]!r}?" if near else "see the tokens in its tokenizer.json"
            raise DataError(f"the override {token!r} is no token of the target {target.folder}", hint)
        twin = next((other for other in overrides if other != token and target.find(other) == target.find(token)), None)
        if twin is not None:
            raise DataError(f"the overrides {token!r} and {twin!r} are of one token", "leave one of them out")
        if not text:
            raise DataError(
                f"the override of {token!r} is empty", "give the text whose donor tokens replace it, such as '</s>'"
            )


def map_subtokens(donor: Vocabulary, target: Vocabulary, overrides: Mapping[str, str] | None = None) -> Subtokens:
    """Map every target id to donor ids.

    An ordinary token with the same bytes as a donor token is a copy of it, otherwise its bytes are encoded by the
    donor's model. A special token goes by override, role, same string, own text, in that order. The overrides and the
    donor have been checked (`check_overrides`, `require_bytes`); raises DataError for an override without donor tokens.
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
    """The donor ids of one target id, and whether they have exactly its bytes."""

    origin: int
    ids: list[int]
    exact: bool = True


class _Mapper:
    """Finds the donor ids of one target id after the other."""

    def __init__(self, donor: Vocabulary, target: Vocabulary, overrides: Mapping[str, str]) -> None:
        self.donor, self.target = donor, target
        self.overrides = {target.find(token): text for token, text in overrides.items()}
        self.encoder = Encoder(donor)
        # Of several roles of one token the last pair counts; a role comes before a stand-in.
        self.roles = stand_ins(target.roles, donor.roles) | dict(role_counterparts(target.roles, donor.roles))
        self._written: dict[bytes, tuple[list[int], bool]] = {}

    def row(self, number: int) -> _Row:
        """The first that applies: override, role, same bytes, same name, the donor's own subtokens."""
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
            raise DataError(
                f"the override of {self.target.shown(number)!r} by {text!r} gives no donor tokens",
                "give text that the donor's tokenizer keeps",
            )
        return ids

    def _same_bytes(self, number: int, token: str, data: bytes) -> int | None:
        """The donor id with these bytes; where several have them, the same token of the same kind, else the best."""
        twin = self.donor.index.get(token)
        if twin is None or (self.donor.kinds[twin], self.donor.bytes_of[twin]) != (self.target.kinds[number], data):
            return self.donor.by_bytes.get(data)
        return twin

    def _subtokens(self, data: bytes) -> tuple[list[int], bool]:
        """The donor's tokens of these bytes, and whether they give them exactly; a token of no bytes becomes eos."""
        if data not in self._written:
            self._written[data] = self.encoder.word(data)
        ids, exact = self._written[data]
        return ids or [self.donor.roles.get("eos", self.donor.byte_ids[ord(" ")])], exact


def describe_subtokens(subtokens: Subtokens, donor: Vocabulary, target: Vocabulary) -> dict[str, Any]:
    """Counts by origin, duplicates, rows without subtokens, every special token, and the rows with most subtokens."""
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


# ── Whether a transplant is possible, and all that it needs from the files of both models; no weights are read ──

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


@dataclass(frozen=True)
class TransplantInputs:
    """A transplant found possible, with everything read from the files of both models."""

    donor: Vocabulary
    target: Vocabulary
    tensors: dict[str, Stored]
    config: dict[str, Any]
    target_config: dict[str, Any]
    tied: bool
    rows: int


def check_transplant(donor: Path, target: Path, overrides: Mapping[str, str] | None = None) -> TransplantInputs:
    """Read the files that a transplant needs, no weights; raises DataError for an impossible transplant.

    `donor` is a model folder, `target` a model or tokenizer folder.
    """
    check_folder(str(donor.absolute()))
    config = read_config(donor)
    if config.get("model_type") not in FAMILIES:
        require_supported(load_config(str(donor.absolute())))
    for key in SIZES:
        if not has_form(config.get(key), int):
            raise DataError(f"{donor}/config.json: {key} must be an integer", "give a whole folder")
    require_floats(str(donor.absolute()))
    # Families have defaults of their own.
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
        raise DataError(f"{count} rows are too few for the {target.size} tokens of {folder}")
    return count
