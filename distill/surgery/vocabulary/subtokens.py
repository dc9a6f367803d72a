"""Which tokens of a donor say what each token of a target says, byte for byte.

Legend: R target ids, D donor ids, P subtokens of all rows together.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import ArrayLike, NDArray

from distill.errors import DataError
from distill.vocabulary import ROLE_ORDER, SPACE, Vocabulary, to_mapped

# How a row came about: nothing stands there; the same bytes; several subtokens; what the user said; the same role; the
# same string, special in the donor too; a special token's own text, in subtokens.
ORIGINS = ("unused", "copy", "mean", "override", "role", "same", "text")
UNUSED, COPY, MEAN, OVERRIDE, ROLE, SAME, TEXT = range(len(ORIGINS))
REPLACEMENT = "\ufffd".encode()  # what an impossible byte is shown as
_APART = re.compile(f"([\udc80-\udcff{SPACE}])")  # bytes that are no text, and the one character ▁ cannot write


Entries = tuple[NDArray[numpy.int32], NDArray[numpy.float32]]  # donor ids and weights of one row


@dataclass(frozen=True)
class Mixture:
    """Every new row as a weighted sum of donor rows: row r takes entries offsets[r] to offsets[r + 1] of ids, weights.

    offsets [R + 1], ids [P], weights [P]; a row without entries is zero.
    """

    offsets: NDArray[numpy.int64]
    ids: NDArray[numpy.int32]
    weights: NDArray[numpy.float32]

    def replaced(self, rows: Mapping[int, Entries]) -> Mixture:
        """The mixture with other entries for some rows."""
        entries = [
            rows.get(row) or (self.ids[first:last], self.weights[first:last])
            for row, (first, last) in enumerate(itertools.pairwise(self.offsets))
        ]
        return Mixture(
            _offsets([len(ids) for ids, _ in entries]),
            numpy.concatenate([ids for ids, _ in entries]).astype(numpy.int32),
            numpy.concatenate([weights for _, weights in entries]).astype(numpy.float32),
        )

    def same_as(self, other: Mixture) -> bool:
        """Whether both make the same rows of the same matrix."""
        return all(
            numpy.array_equal(getattr(self, part), getattr(other, part)) for part in ("offsets", "ids", "weights")
        )


@dataclass(frozen=True)
class Subtokens:
    """Donor ids of every target id: offsets [R + 1], ids [P]; origin [R] indexes ORIGINS.

    `unwritable` target ids hold bytes that UTF-8 never uses and the donor has no token for; U+FFFD stands in for them.
    """

    offsets: NDArray[numpy.int64]
    ids: NDArray[numpy.int32]
    origin: NDArray[numpy.uint8]
    unwritable: tuple[int, ...] = ()

    def of(self, row: int) -> list[int]:
        """The donor ids of one target id."""
        return [int(number) for number in self.ids[self.offsets[row] : self.offsets[row + 1]]]

    @property
    def copies(self) -> NDArray[numpy.int64]:
        """The target ids that are exact byte copies."""
        return numpy.flatnonzero(self.origin == COPY)

    def last(self) -> Mixture:
        """The input embedding's rule: the row of the last subtoken."""
        counts = numpy.diff(self.offsets)
        ids = self.ids[self.offsets[1:][counts > 0] - 1]
        return Mixture(_offsets(counts > 0), ids, numpy.ones(len(ids), numpy.float32))

    def front_loaded(self, decay: float) -> Mixture:
        """The head's rule: the mean of the subtokens, the j-th weighing decay**j."""
        counts = numpy.diff(self.offsets)
        starts = self.offsets[:-1]
        row_of = numpy.repeat(numpy.arange(len(counts)), counts)
        weights = decay ** (numpy.arange(len(self.ids)) - starts[row_of]).astype(numpy.float64)
        weights /= numpy.bincount(row_of, weights, len(counts))[row_of]
        # A row of one repeated subtoken is that subtoken's row, to the bit.
        repeats = (self.ids == self.ids[starts[row_of]]) | (counts[row_of] == 1)
        single = numpy.bincount(row_of, ~repeats, len(counts)) == 0
        keep = ~single[row_of] | (numpy.arange(len(self.ids)) == starts[row_of])
        weights[single[row_of]] = 1.0
        return Mixture(
            _offsets(numpy.bincount(row_of[keep], minlength=len(counts))),
            self.ids[keep],
            weights[keep].astype(numpy.float32),
        )


def _offsets(counts: ArrayLike) -> NDArray[numpy.int64]:
    return numpy.concatenate([[0], numpy.cumsum(counts, dtype=numpy.int64)]).astype(numpy.int64)


class Encoder:
    """Writes bytes and text in a donor's tokens. Raises DataError for a donor that cannot write every byte."""

    def __init__(self, donor: Vocabulary) -> None:
        from tokenizers import Tokenizer

        require_bytes(donor)
        self.donor = donor
        try:
            self._tokenizer = Tokenizer.from_file(str(donor.folder / "tokenizer.json"))
        except Exception as error:  # tokenizers raises the bare class for every kind of damage
            raise DataError(f"{donor.folder / 'tokenizer.json'} cannot be loaded: {error}", "copy it again") from None
        self._model: Any = self._tokenizer.model
        if getattr(self._model, "dropout", None):
            self._model.dropout = None  # the same subtokens every time
        marked = zip(donor.tokens, donor.kinds, strict=True)
        named = sorted(
            (token for token, kind in marked if token and kind in ("special", "added")), key=len, reverse=True
        )
        self._named = re.compile("(" + ("|".join(map(re.escape, named)) or "(?!)") + ")")

    def write(self, data: bytes) -> tuple[list[int], bool]:
        """Donor ids that say `data`, and whether they say it exactly (else U+FFFD stands for impossible bytes)."""
        if self.donor.family == "byte-level":
            return self._exact(to_mapped(data), data)
        parts = [part for part in _APART.split(data.decode(errors="surrogateescape")) if part]
        written = [
            self._singly(raw) if _APART.fullmatch(part) else self._exact(part.replace(" ", SPACE), raw)
            for part in parts
            for raw in [part.encode(errors="surrogateescape")]
        ]
        return [number for ids, _ in written for number in ids], all(exact for _, exact in written)

    def _exact(self, word: str, data: bytes) -> tuple[list[int], bool]:
        """The model's own subtokens of `word` where they say `data`, else its bytes one by one."""
        ids = [token.id for token in self._model.tokenize(word)]
        said = [self.donor.bytes_of[number] or b"" for number in ids]
        plain = all(self.donor.kinds[number] in ("normal", "byte") for number in ids)
        return (ids, True) if plain and b"".join(said) == data else self._singly(data)

    def _singly(self, data: bytes) -> tuple[list[int], bool]:
        ids, exact = [], True
        for byte in data:
            if byte in self.donor.byte_ids:
                ids.append(self.donor.byte_ids[byte])
            else:
                ids += self.write(REPLACEMENT)[0]
                exact = False
        return ids, exact

    def text(self, text: str) -> list[int]:
        """Donor ids of `text` as its tokenizer writes it, special tokens included, but nothing put around it."""
        ids = [int(number) for number in self._tokenizer.encode(text, add_special_tokens=False).ids]
        if self.donor.text_bytes(ids) == text.encode():
            return ids
        # It was normalised, or given a space in front: write it as it stands.
        parts = [part for part in self._named.split(text) if part]
        return [
            number
            for part in parts
            for number in ([self.donor.index[part]] if self._named.fullmatch(part) else self.write(part.encode())[0])
        ]


def require_bytes(donor: Vocabulary) -> None:
    """Raise DataError for a donor that lacks tokens for single bytes: some tokens could not be written in it."""
    missing = donor.missing_bytes
    if missing:
        shown = ", ".join(f"{byte:#04x}" for byte in missing[:6]) + (", ..." if len(missing) > 6 else "")
        raise DataError(
            f"the tokenizer in {donor.folder} has no token for {len(missing)} of the 256 bytes ({shown})",
            "choose a donor with byte-level BPE or with byte fallback",
        )


def check_overrides(target: Vocabulary, overrides: Mapping[str, str]) -> None:
    """Raise DataError for an override of a token that the target does not have, or by nothing."""
    for token, text in overrides.items():
        if token not in target.index:
            named = [t for t, kind in zip(target.tokens, target.kinds, strict=True) if t and kind != "normal"]
            near = difflib.get_close_matches(token, named, 1, 0.5) or difflib.get_close_matches(
                token, [t for t in target.index if abs(len(t) - len(token)) < 3], 1, 0.5
            )
            hint = f"did you mean {near[0]!r}?" if near else "see the tokens in its tokenizer.json"
            raise DataError(f"the override {token!r} is no token of the target {target.folder}", hint)
        if not text:
            raise DataError(
                f"the override of {token!r} is empty", "give the text whose donor tokens shall stand in, such as '</s>'"
            )


def map_subtokens(donor: Vocabulary, target: Vocabulary, overrides: Mapping[str, str] | None = None) -> Subtokens:
    """Map every target id to donor ids.

    An ordinary token with the same bytes as a donor token is a copy of it, otherwise its bytes are encoded by the
    donor's model. A special token goes by override, role, same string, own text, in that order. Raises DataError for
    overrides that cannot be applied and for donors without byte tokens.
    """
    overrides = overrides or {}
    check_overrides(target, overrides)
    encoder = Encoder(donor)
    role_ids = {
        target.roles[role]: donor.roles[role]
        for role in reversed(ROLE_ORDER)  # the first of several roles is written last
        if role in target.roles and role in donor.roles
    }
    # What ends a text also stands before the next one, and pads, in models that have no token of their own for it.
    for role in ("bos", "pad"):
        if role in target.roles and role not in donor.roles and "eos" in donor.roles:
            role_ids.setdefault(target.roles[role], donor.roles["eos"])
    encoded: dict[bytes, tuple[list[int], bool]] = {}

    def written(data: bytes) -> tuple[list[int], bool]:
        if data not in encoded:
            encoded[data] = encoder.write(data)
        return encoded[data]

    def overridden(token: str) -> list[int]:
        ids = encoder.text(overrides[token])
        if not ids:
            raise DataError(
                f"the override of {token!r} by {overrides[token]!r} gives no donor tokens",
                "give text that the donor's tokenizer keeps",
            )
        return ids

    rows: list[list[int]] = []
    origin = numpy.zeros(target.size, numpy.uint8)
    unwritable: list[int] = []
    for number, (token, data, kind) in enumerate(zip(target.tokens, target.bytes_of, target.kinds, strict=True)):
        exact = True
        if token is None or data is None:
            how, ids = UNUSED, []
        elif token in overrides:
            how, ids = OVERRIDE, overridden(token)
        elif number in role_ids and kind in ("special", "added"):
            how, ids = ROLE, [role_ids[number]]
        elif kind != "special" and (same := _same_bytes(donor, token, data, kind)) is not None:
            how, ids = COPY, [same]
        elif kind in ("special", "added") and _is_named(donor, token):
            how, ids = SAME, [donor.index[token]]
        else:
            how = TEXT if kind == "special" else MEAN
            ids, exact = written(data)
            if not ids:  # a token of no bytes at all
                ids = [donor.roles.get("eos", donor.byte_ids[ord(" ")])]
        origin[number] = how
        rows.append(ids)
        if not exact:
            unwritable.append(number)
    flat = numpy.fromiter((subtoken for ids in rows for subtoken in ids), numpy.int32)
    return Subtokens(_offsets([len(ids) for ids in rows]), flat, origin, tuple(unwritable))


def _same_bytes(donor: Vocabulary, token: str, data: bytes, kind: str) -> int | None:
    """The donor id with these bytes; where several have them, the same token of the same kind, else the best."""
    twin = donor.index.get(token)
    if twin is not None and donor.kinds[twin] == kind and donor.bytes_of[twin] == data:
        return twin
    return donor.by_bytes.get(data)


def _is_named(donor: Vocabulary, token: str) -> bool:
    return token in donor.index and donor.kinds[donor.index[token]] in ("special", "added")


def describe_subtokens(subtokens: Subtokens, donor: Vocabulary, target: Vocabulary, worst: int = 10) -> dict[str, Any]:
    """Counts by origin, duplicates, rows without subtokens, the special tokens one by one, and the longest rows."""
    counts = Counter(ORIGINS[how] for how in subtokens.origin)
    lengths = numpy.diff(subtokens.offsets)
    ordinary = [b for b, kind in zip(target.bytes_of, target.kinds, strict=True) if b is not None and kind != "special"]

    def shown(row: int) -> dict[str, Any]:
        return {
            "id": row,
            "token": target.tokens[row],
            "how": ORIGINS[subtokens.origin[row]],
            "subtokens": [donor.tokens[subtoken] for subtoken in subtokens.of(row)],
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
        "not_utf8_alone": sum(not _is_utf8(data) for data in ordinary),
        "unwritable": len(subtokens.unwritable),
        "subtokens_per_mean": float(lengths[subtokens.origin == MEAN].mean()) if counts["mean"] else 0.0,
        "special_tokens": [shown(row) for row in named],
        "worst": [shown(int(row)) for row in numpy.argsort(-lengths, kind="stable")[:worst] if lengths[row] > 1],
    }


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
