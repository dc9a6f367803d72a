"""A vocabulary as grammars need it: the bytes of each token, the tokens that end a text, and how a text is written.

Legend: V vocabulary.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from distill.errors import DataError
from distill.models.gguf.llama_grammar import token_bytes_and_ends
from distill.models.gguf.model import GgufModel
from distill.packages import install_extra
from distill.vocabulary import Vocabulary
from distill.vocabulary.encoding import Encoder


@dataclass(frozen=True)
class Tokens:
    """A vocabulary as grammars need it: the bytes [V] of each token, none for special ones.

    `ends` are the tokens that end a text; they are allowed where the grammar is satisfied, and only there. `write`
    gives the tokens in which the tokenizer writes bytes.
    """

    bytes_of: Sequence[bytes]
    ends: tuple[int, ...]
    write: Callable[[bytes], list[int]]

    def __post_init__(self) -> None:
        if not self.ends or not all(0 <= end < len(self.bytes_of) for end in self.ends):
            raise DataError(
                f"a grammar needs a token that ends the text, got {list(self.ends)} of {len(self.bytes_of)}"
            )

    @classmethod
    def of(cls, vocabulary: Vocabulary, ends: Sequence[int]) -> Tokens:
        """From a tokenizer folder."""
        bytes_of = [
            b"" if data is None or kind in ("special", "unused") else data
            for data, kind in zip(vocabulary.bytes_of, vocabulary.kinds, strict=True)
        ]
        return cls(bytes_of, tuple(end for end in ends if end < len(bytes_of)), Encoder(vocabulary).text)

    @classmethod
    def of_gguf(cls, model: GgufModel) -> Tokens:
        """From a GGUF file; `ends` are the tokens with which llama.cpp ends a text."""
        bytes_of, ends = token_bytes_and_ends(model)
        return cls(bytes_of, tuple(ends), lambda data: model.tokenize(data.decode("utf-8", "ignore")))

    @cached_property
    def library(self) -> Any:
        """The vocabulary as llguidance's tokenizer; DataError where llguidance is not installed."""
        try:
            module: Any = importlib.import_module("llguidance")
        except ImportError as error:
            raise DataError(f"grammars need llguidance ({error})", install_extra("grammar")) from None
        ends = set(self.ends)
        # An end token has no bytes here, whatever its text: `accepting` decides where it may stand.
        texts = [b"" if number in ends else data for number, data in enumerate(self.bytes_of)]
        wrapper = _Wrapper(texts, self.ends[0], self.write)
        return module.LLTokenizer(module.TokenizerWrapper(wrapper), eos_token=self.ends[0])


class _Wrapper:
    """A tokenizer with the attributes that llguidance reads."""

    bos_token_id = None

    def __init__(self, texts: list[bytes], end: int, write: Callable[[bytes], list[int]]) -> None:
        # llguidance needs bytes for every token: those without get the bytes of a special token, which no text matches.
        self.special_token_ids = [number for number, data in enumerate(texts) if not data]
        self.tokens = [data or b"<%d>" % number for number, data in enumerate(texts)]
        self.eos_token_id, self._write = end, write

    def __call__(self, text: bytes) -> list[int]:
        return self._write(text)
