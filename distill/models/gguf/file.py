"""A GGUF file as llama.cpp loads it: its weights, its rows, and its own tokenizer."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distill.errors import DataError
from distill.models.gguf.build import model_settings, require_possible
from distill.models.gguf.file_head import open_head
from distill.models.gguf.library import ERRORS, WARNINGS, last_errors, library
from distill.models.gguf.loadable import require_loadable
from distill.recipe import GgufOptions
from distill.recipe.gguf import ON_CPU


class GgufFile:
    """The loaded file, or with `vocabulary_only` its tokenizer without the weights.

    Its functions raise ValueError once it is closed.
    `head_rows` are the rows of the head, `vocabulary_size` those of them that stand for tokens; `model` and
    `vocabulary` are llama.cpp's handles, valid while it is open.
    Raises DataError when llama-cpp-python is missing or the file is missing, damaged or of an unsupported kind,
    RecipeError for `options` that this build or this file does not allow.
    """

    def __init__(self, path: Path, *, vocabulary_only: bool = False, options: GgufOptions = ON_CPU) -> None:
        self.path = path
        self.library = library()
        head = open_head(path)
        require_loadable(head)
        require_possible(head, options)
        ERRORS.clear()
        WARNINGS.clear()
        llama = self.library
        parameters, kept = model_settings(options)
        parameters.vocab_only = vocabulary_only
        parameters.check_tensors = True  # damaged weights load silently otherwise
        self.model: Any = llama.llama_model_load_from_file(os.fsencode(path), parameters)
        del kept  # what the parameters point to
        if not self.model:
            raise DataError(
                f"{path} cannot be loaded: {last_errors()}",
                hint="see that its disk works; else export or copy it again",
            )
        unlocked = next((line for line in WARNINGS if "mlock" in line), None)
        if options.mlock and unlocked is not None:
            self.close()
            raise DataError(
                f"{path} cannot be kept in RAM (mlock): {unlocked}",
                "raise the limit of locked memory (`ulimit -l unlimited`), free memory, or leave mlock out",
            )
        if llama.llama_model_is_recurrent(self.model) or llama.llama_model_is_hybrid(self.model):
            self.close()
            raise DataError(f"{path} is a recurrent model, which cannot be rolled back", hint="use a transformer")
        self.vocabulary: Any = llama.llama_model_get_vocab(self.model)
        self.head_rows = int(llama.llama_vocab_n_tokens(self.vocabulary))
        self.vocabulary_size = self.head_rows - self._padding_rows()

    def _padding_rows(self) -> int:
        """Rows at the end that stand for no token: converters name them `[PAD<id>]` and mark them unused."""
        llama, count = self.library, 0
        for index in range(self.head_rows - 1, -1, -1):
            unused = llama.llama_vocab_get_attr(self.vocabulary, index) & llama.LLAMA_TOKEN_ATTR_UNUSED
            if not unused or llama.llama_vocab_get_text(self.vocabulary, index) != b"[PAD%d]" % index:
                break
            count += 1
        return count

    def tokenize(self, text: str, parse_special: bool = False) -> list[int]:
        """The file's own ids for `text`, without added tokens; `parse_special` reads control tokens in the text."""
        self.require_open()
        data = text.encode("utf-8")
        size = len(data) + 8
        while True:
            ids = (ctypes.c_int32 * size)()
            count = self.library.llama_tokenize(self.vocabulary, data, len(data), ids, size, False, parse_special)
            if count >= 0:
                return list(ids[:count])
            size = -count

    def detokenize(self, ids: Sequence[int]) -> bytes:
        """The exact bytes of `ids`, special tokens as written; ValueError for ids outside the rows."""
        self.require_open()
        if len(ids) and (min(ids) < 0 or max(ids) >= self.head_rows):
            raise ValueError(f"token ids must lie in [0, {self.head_rows})")
        # Token by token, because llama_detokenize cleans up spaces for some tokenizers.
        return b"".join(self._token_bytes(int(token)) for token in ids)

    def _token_bytes(self, token: int) -> bytes:
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            count = self.library.llama_token_to_piece(self.vocabulary, token, buffer, size, 0, True)
            if count >= 0:
                return buffer.raw[:count]
            size = -count

    def require_open(self) -> None:
        """Raise ValueError once the file is closed."""
        if not self.model:
            raise ValueError(f"{self.path} is closed")

    def close(self) -> None:
        """Free the weights; safe to call twice."""
        if self.model:
            self.library.llama_model_free(self.model)
        self.model = None
