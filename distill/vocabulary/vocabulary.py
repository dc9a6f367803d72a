"""The tokens of a tokenizer folder by id: their bytes, kinds and roles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from distill.vocabulary.byte_map import BYTE_MAP, NEVER_IN_UTF8
from distill.vocabulary.reading import read_folder


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a tokenizer folder, by id from 0 to `size` - 1.

    `family` is "byte-level" or "sentencepiece". `tokens` are the strings of tokenizer.json, None where an id is
    missing; `bytes_of` the bytes they stand for. Each of `kinds` is normal, special, byte (<0xNN>), added (an added
    token without the special flag) or unused (a missing id). `roles` map bos, eos, unk, sep, pad, cls, mask and the
    names in MARKERS to ids.
    """

    folder: Path
    family: str
    tokens: tuple[str | None, ...]
    bytes_of: tuple[bytes | None, ...]
    kinds: tuple[str, ...]
    roles: Mapping[str, int]

    @classmethod
    def read(cls, folder: Path) -> Vocabulary:
        """Read a tokenizer folder; raises DataError when it is missing, damaged or of an unknown kind."""
        return cls(folder, *read_folder(folder))

    @property
    def size(self) -> int:
        """Number of ids, the missing ones among them."""
        return len(self.tokens)

    @cached_property
    def index(self) -> dict[str, int]:
        """Token string to id."""
        return {token: number for number, token in enumerate(self.tokens) if token is not None}

    @cached_property
    def by_bytes(self) -> dict[bytes, int]:
        """Bytes to their best id: a normal token before <0xNN> before an added one; never a special token."""
        found: dict[bytes, int] = {}
        for kind in ("added", "byte", "normal"):  # later ones win; within a kind the lowest id does
            for number in range(self.size - 1, -1, -1):
                data = self.bytes_of[number]
                if data and self.kinds[number] == kind:
                    found[data] = number
        return found

    @cached_property
    def byte_ids(self) -> dict[int, int]:
        """Each byte that is a token of its own, to that token.

        Some byte-level vocabularies hold bytes that UTF-8 never uses as added tokens named by the byte's character.
        """
        found: dict[int, int] = {}
        for byte in range(256):
            number = self.by_bytes.get(bytes([byte]))
            if number is None and self.family == "byte-level":
                number = self.index.get(BYTE_MAP[byte])
            if number is not None:
                found[byte] = number
        return found

    @property
    def missing_bytes(self) -> list[int]:
        """Bytes of valid UTF-8 that are no token of their own."""
        return [byte for byte in range(256) if byte not in self.byte_ids and byte not in NEVER_IN_UTF8]

    def text_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of `ids`, one after the other; none for an id without a token."""
        return b"".join(self.bytes_of[number] or b"" for number in ids if 0 <= number < self.size)

    def shown(self, number: int) -> str:
        """A token for a message: the text it stands for, and not the letters by which byte-level BPE writes bytes.

        Bytes that are no UTF-8 alone are written as \\xNN.
        """
        data = self.bytes_of[number]
        return f"[{number}]" if data is None else data.decode("utf-8", "backslashreplace")

    def find(self, text: str) -> int | None:
        """The token of this string in tokenizer.json, or else of this text; None where there is none."""
        return self.index.get(text, self.by_bytes.get(text.encode()))

    def is_named(self, number: int) -> bool:
        """Whether a token is special or added: and so found in a text by its name."""
        return self.kinds[number] in ("special", "added")

    def is_text(self, number: int) -> bool:
        """Whether a token stands for bytes of a text."""
        return bool(self.bytes_of[number]) and self.kinds[number] in ("normal", "byte", "added")

    def same_as(self, other: Vocabulary) -> bool:
        """Whether every id is the same token in both, in the same roles."""
        return (self.family, self.tokens, self.bytes_of, self.kinds, dict(self.roles)) == (
            (other.family, other.tokens, other.bytes_of, other.kinds, dict(other.roles))
        )
