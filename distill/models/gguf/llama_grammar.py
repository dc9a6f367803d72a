"""llama.cpp's own grammars (GBNF) over the vocabulary of an open GGUF model.

llama.cpp aborts the process on a token that its grammar does not allow, so it is only ever given allowed ones.
Legend: V vocabulary.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distill.errors import DataError
from distill.models.gguf.library import ERRORS
from distill.models.gguf.model import GgufModel

_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data


def token_bytes_and_ends(model: GgufModel) -> tuple[list[bytes], list[int]]:
    """The bytes [V] of each token, empty for control tokens and unused ones, and the ids that end a text."""
    llama, vocabulary = model.library_and_vocabulary()
    silent = llama.LLAMA_TOKEN_ATTR_CONTROL | llama.LLAMA_TOKEN_ATTR_UNUSED | llama.LLAMA_TOKEN_ATTR_UNKNOWN
    token_bytes = [
        b"" if llama.llama_vocab_get_attr(vocabulary, token) & silent else model.detokenize([token])
        for token in range(model.vocabulary_size)
    ]
    return token_bytes, ends_of(model)


def ends_of(model: GgufModel) -> list[int]:
    """The ids that end a text."""
    llama, vocabulary = model.library_and_vocabulary()
    return [token for token in range(model.vocabulary_size) if llama.llama_vocab_is_eog(vocabulary, token)]


class GrammarPlace:
    """A place in a grammar; it never changes. The model must stay open as long as it is used."""

    def __init__(self, model: GgufModel, sampler: Any, candidates: NDArray[Any], end: int) -> None:
        self._model, self._sampler, self._candidates, self._end = model, sampler, candidates, end
        self._library, _ = model.library_and_vocabulary()
        weakref.finalize(self, self._library.llama_sampler_free, sampler)

    def allowed(self) -> NDArray[np.uint8]:
        """One bit per token, the lowest id first: whether it may follow; one end token represents all."""
        llama, _ = self._model.library_and_vocabulary()
        candidates = self._candidates.copy()
        data = candidates.ctypes.data_as(ctypes.POINTER(llama.llama_token_data))
        array = llama.llama_token_data_array(data, len(candidates), -1, False)
        llama.llama_sampler_apply(self._sampler, ctypes.byref(array))
        mask = np.zeros(self._model.vocabulary_size, dtype=bool)
        mask[candidates["id"][np.isfinite(candidates["logit"])]] = True
        return np.packbits(mask, bitorder="little")

    def accepting(self) -> bool:
        """Whether the text may end here."""
        return bool(self.allowed()[self._end >> 3] >> (self._end & 7) & 1)

    def after(self, token: int) -> GrammarPlace:
        """The place after one more token, which must be allowed and not an end."""
        llama, _ = self._model.library_and_vocabulary()
        sampler = llama.llama_sampler_clone(self._sampler)
        llama.llama_sampler_accept(sampler, token)
        return GrammarPlace(self._model, sampler, self._candidates, self._end)


def open_grammar(model: GgufModel, text: str) -> GrammarPlace:
    """The start of a GBNF grammar, whose first rule is `root`.

    DataError for a grammar that llama.cpp refuses, or a model that has no token to end a text with.
    """
    llama, vocabulary = model.library_and_vocabulary()
    token_bytes, ends = token_bytes_and_ends(model)
    if not ends:
        raise DataError(f"{model.path} has no token that ends a text", "export it with an eos token")
    ERRORS.clear()
    sampler = llama.llama_sampler_init_grammar(vocabulary, text.encode(), b"root")
    if not sampler:
        reason = "; ".join(ERRORS) or "it gave no reason"
        raise DataError(f"llama.cpp refuses the grammar: {reason}", "see the grammars README of llama.cpp")
    # Text tokens and one end; the names of control tokens would be matched as text.
    ids = sorted({ends[0], *(token for token, data in enumerate(token_bytes) if data and token not in ends)})
    candidates = np.zeros(len(ids), dtype=_CANDIDATE)
    candidates["id"] = ids
    return GrammarPlace(model, sampler, candidates, ends[0])
