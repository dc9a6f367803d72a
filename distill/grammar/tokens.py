"""What a grammar must know of a vocabulary: the bytes of each token, what ends a text, and how a text is written.

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
from distill.speculative.other_vocabulary.translation import Writer
from distill.vocabulary import Vocabulary


@dataclass(frozen=True)
class Tokens:
    """What a grammar must know of a vocabulary: the bytes [V] that each token says, none for special ones.

    `ends` end a text; they are allowed where the grammar is satisfied, and there alone. `write` gives the tokens that
    the tokenizer would say bytes with.
    """

    said: Sequence[bytes]
    ends: tuple[int, ...]
    write: Callable[[bytes], list[int]]

    def __post_init__(self) -> None:
        if not self.ends or not all(0 <= end < len(self.said) for end in self.ends):
            raise DataError(
                f"a grammar needs a token that ends the text, got {list(self.ends)} of {len(self.said)}",
                "name the model's eos_token_id",
            )

    @classmethod
    def of(cls, vocabulary: Vocabulary, ends: Sequence[int]) -> Tokens:
        """Those of a tokenizer folder."""
        said = [
            b"" if data is None or kind in ("special", "unused") else data
            for data, kind in zip(vocabulary.bytes_of, vocabulary.kinds, strict=True)
        ]
        return cls(said, tuple(end for end in ends if end < len(said)), Writer(vocabulary).write)

    @classmethod
    def of_gguf(cls, model: GgufModel, ends: Sequence[int] | None = None) -> Tokens:
        """Those of a GGUF file; `ends` are by default those that llama.cpp ends texts with."""
        said, known = token_bytes_and_ends(model)
        chosen = tuple(known if ends is None else ends)
        return cls(said, chosen, lambda data: model.tokenize(data.decode("utf-8", "ignore")))

    @classmethod
    def of_bytes(cls, said: Sequence[bytes], ends: Sequence[int]) -> Tokens:
        """Those of a vocabulary without a tokenizer: a text is written with the longest tokens, from the left."""
        known = {data: number for number, data in reversed(list(enumerate(said))) if data}
        longest = max(map(len, known), default=0)

        def write(text: bytes) -> list[int]:
            found: list[int] = []
            while text:
                size = next((size for size in range(longest, 0, -1) if text[:size] in known), None)
                if size is None:
                    return found
                found.append(known[text[:size]])
                text = text[size:]
            return found

        return cls(said, tuple(ends), write)

    @cached_property
    def library(self) -> Any:
        """llguidance's own view of them; DataError where it is not installed."""
        try:
            module: Any = importlib.import_module("llguidance")
        except ImportError as error:
            raise DataError(f"grammars need llguidance ({error})", "pip install 'distill[grammar]'") from None
        ends = set(self.ends)
        # An end token says nothing, whatever its bytes: the grammar is asked about it by `accepting`.
        said = [b"" if number in ends else data for number, data in enumerate(self.said)]
        wrapper = _Wrapper(said, self.ends[0], self.write)
        return module.LLTokenizer(module.TokenizerWrapper(wrapper), eos_token=self.ends[0])


class _Wrapper:
    """The attributes that llguidance reads a tokenizer by."""

    bos_token_id = None

    def __init__(self, said: list[bytes], end: int, write: Callable[[bytes], list[int]]) -> None:
        # A token without bytes needs some all the same: those of a special token, which no text matches.
        self.special_token_ids = [number for number, data in enumerate(said) if not data]
        self.tokens = [data or b"<%d>" % number for number, data in enumerate(said)]
        self.eos_token_id, self._write = end, write

    def __call__(self, text: bytes) -> list[int]:
        return self._write(text)
