"""Bytes and text written in the tokens of a vocabulary.

Bytes decide, never decoded text. Nothing is put in front: no space, no special token.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

from distill.vocabulary.byte_map import SPACE, to_mapped
from distill.vocabulary.tokenizer_files import added_around, open_tokenizer
from distill.vocabulary.vocabulary import Vocabulary

REPLACEMENT = "\ufffd"  # stands for a byte that a vocabulary cannot write


class Encoder:
    """Writes bytes and text in a vocabulary's tokens; raises DataError where its tokenizer.json cannot be loaded."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._tokenizer: Any = open_tokenizer(vocabulary.folder / "tokenizer.json")
        self._model: Any = self._tokenizer.model
        if getattr(self._model, "dropout", None):
            self._model.dropout = None  # the same tokens every time
        # Parts of a text that its encoding cannot write: bytes that are no text, and the one character that ▁ hides.
        apart = "\udc80-\udcff" + (SPACE if vocabulary.family == "sentencepiece" else "")
        self._apart = re.compile(f"([{apart}])")

    @cached_property
    def opening(self) -> list[int]:
        """The special ids that the tokenizer puts before a text."""
        around = added_around(self._tokenizer)
        return around[0] if around else []

    def leads(self, first: bool) -> bool:
        """Whether the tokenizer puts a space before a text: the `first` one, or one after a special token."""
        return self._leads[0 if first else 1]

    @cached_property
    def _leads(self) -> tuple[bool, bool]:
        specials = (i for i, kind in enumerate(self.vocabulary.kinds) if kind == "special")
        written = ((i, self._encode(f"{self.vocabulary.tokens[i]}a", specials=True)) for i in specials)
        after = next((ids[1:] for i, ids in written if ids[:1] == [i]), [])
        alone = self._encode("a", specials=True)
        return self.vocabulary.text_bytes(alone).startswith(b" "), self.vocabulary.text_bytes(after).startswith(b" ")

    def text(self, data: bytes) -> list[int]:
        """Ids of `data`, split as the tokenizer splits a text; special tokens in it are text.

        Bytes that the vocabulary lacks become the ids of U+FFFD or the unknown token, or none.
        """
        ids: list[int] = []
        for part in self._apart.split(data.decode(errors="surrogateescape")):
            if self._apart.fullmatch(part):
                ids += self._bytewise(part.encode(errors="surrogateescape"), self._replacement)
            elif part:
                ids += self._plain_text(part)
        return ids

    def word(self, data: bytes) -> tuple[list[int], bool]:
        """Ids of the bytes of one token, which is not split as a text is, and whether they give them exactly.

        For a vocabulary with all bytes of valid UTF-8; U+FFFD stands for the other bytes.
        """
        if self.vocabulary.family == "byte-level":
            return self._model_tokens(to_mapped(data), data)
        ids, exact = list[int](), True
        for part in filter(None, self._apart.split(data.decode(errors="surrogateescape"))):
            raw = part.encode(errors="surrogateescape")
            if self._apart.fullmatch(part):
                own, whole = self._word_bytewise(raw)
            else:
                own, whole = self._model_tokens(part.replace(" ", SPACE), raw)
            ids += own
            exact = exact and whole
        return ids, exact

    def marked_text(self, text: str) -> list[int]:
        """Ids of `text` as the tokenizer writes it, the special tokens in it included."""
        ids = self._encode(text, specials=True)
        if self.vocabulary.text_bytes(ids) == text.encode():
            return ids
        # It was normalised, or given a space in front: write it as it stands.
        ids = []
        for part in filter(None, self._named.split(text)):
            if self._named.fullmatch(part):
                ids.append(self.vocabulary.index[part])
            else:
                ids += self.word(part.encode())[0]
        return ids

    @cached_property
    def _named(self) -> re.Pattern[str]:
        """The special and added tokens, the longest first."""
        tokens = enumerate(self.vocabulary.tokens)
        named = sorted((token for i, token in tokens if token and self.vocabulary.is_named(i)), key=len, reverse=True)
        return re.compile("(" + ("|".join(map(re.escape, named)) or "(?!)") + ")")

    def _encode(self, text: str, *, specials: bool = False) -> list[int]:
        self._tokenizer.encode_special_tokens = not specials
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _plain_text(self, text: str) -> list[int]:
        """The tokenizer's own ids, unless it normalises the text; then its model's."""
        data = text.encode()
        if not self.leads(True) or text.startswith(" "):
            ids = self._encode(text.removeprefix(" ") if self.leads(True) else text)
            if self.vocabulary.text_bytes(ids) == data:
                return ids
        ids = [token.id for word in self._words(text, data) if word for token in self._model.tokenize(word)]
        if self.vocabulary.text_bytes(ids) == data or not all(byte in self.vocabulary.byte_ids for byte in data):
            return ids
        return self._bytewise(data, [])

    def _words(self, text: str, data: bytes) -> list[str]:
        """The words of a text as the model takes them, without a space put in front."""
        if self.vocabulary.family == "sentencepiece":
            return [text.replace(" ", SPACE)]
        if self._tokenizer.pre_tokenizer is None:
            return [to_mapped(data)]
        words = [word for word, _ in self._tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        if "".join(words) == to_mapped(b" " + data):
            words[0] = words[0][1:]
        return words

    def _model_tokens(self, word: str, data: bytes) -> tuple[list[int], bool]:
        """The model's own tokens of `word` where they give `data`, else its bytes one by one."""
        ids = [token.id for token in self._model.tokenize(word)]
        plain = all(self.vocabulary.kinds[number] in ("normal", "byte") for number in ids)
        return (ids, True) if plain and self.vocabulary.text_bytes(ids) == data else self._word_bytewise(data)

    def _word_bytewise(self, data: bytes) -> tuple[list[int], bool]:
        if all(byte in self.vocabulary.byte_ids for byte in data):
            return self._bytewise(data, []), True
        return self._bytewise(data, self.word(REPLACEMENT.encode())[0]), False

    def _bytewise(self, data: bytes, replacement: list[int]) -> list[int]:
        """Ids of single bytes; `replacement` for a byte without a token."""
        singles = self.vocabulary.byte_ids
        return [number for byte in data for number in ([singles[byte]] if byte in singles else replacement)]

    @cached_property
    def _replacement(self) -> list[int]:
        return self._plain_text(REPLACEMENT)
