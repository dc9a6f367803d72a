"""A GGUF file as llama.cpp loads it: its weights, its rows, and its own tokenizer.

llama.cpp aborts the process where a file breaks its assumptions, so `require_loadable` checks them on the head first:
the assertions of llama-model.cpp and of the graphs of the architectures that this project exports.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distill.errors import DataError
from distill.models.gguf.build import model_settings, require_possible
from distill.models.gguf.file_head import NO_TOKEN, FileHead, open_head
from distill.models.gguf.library import ERRORS, last_errors, library
from distill.recipe import GgufOptions
from distill.recipe.gguf import ON_CPU

MAX_LAYERS, MAX_EXPERTS = 512, 512  # LLAMA_MAX_LAYERS, LLAMA_MAX_EXPERTS
MAX_ROWS = 2**22  # tokens; the rows of many lists
ROTATES_ALL = ("llama", "qwen2", "qwen3")  # every dimension of a head is rotated, and keys are as wide as values
AGAIN = "export or copy the file again"


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


def require_loadable(head: FileHead) -> None:
    """Raise DataError, with the key, for a file on which llama.cpp would end the process."""
    head.size("block_count", 1, MAX_LAYERS)
    head.size("embedding_length", 1, 2**20)
    head.size("feed_forward_length", 1, 2**24)
    head.size("context_length", 1, 2**31 - 1)
    head.size("expert_count", 0, MAX_EXPERTS)
    heads, groups = head.size("attention.head_count", 1, 2**16), head.size("attention.head_count_kv", 1, 2**16)
    if heads and groups and heads % groups:
        head.refuse_value("attention.head_count_kv", f"divide attention.head_count, which is {heads}")
    epsilon = head.values.get(f"{head.architecture}.attention.layer_norm_rms_epsilon")
    if epsilon is not None and not (isinstance(epsilon, float) and 0 <= epsilon < math.inf):
        head.refuse_value("attention.layer_norm_rms_epsilon", "be a number of at least 0")
    size, _ = head.head_sizes
    if head.architecture in ROTATES_ALL and size is not None:
        for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
            if head.size(key, 1, 2**20) not in (None, size):
                head.refuse_value(key, f"be {size}, the size of a head")
        if heads and groups:
            _check_widths(head, heads * size, groups * size)
    _check_vocabulary(head)


def _check_widths(head: FileHead, queries: int, keys: int) -> None:
    """The projections are as wide as all heads together."""
    for name, shape in head.shapes.items():
        part = name.split(".")[-2] if name.endswith(".weight") and name.startswith("blk.") else ""
        wide = {"attn_q": queries, "attn_k": keys, "attn_v": keys}.get(part)
        if wide is not None and shape[1:] != [wide]:
            head.refuse(f"{name} is {shape}, by its heads {wide} wide", AGAIN)


def _check_vocabulary(head: FileHead) -> None:
    tokens = head.values.get("tokenizer.ggml.tokens")
    count = len(tokens) if isinstance(tokens, list) else None
    wrong = None
    if count is not None and (not 0 < count <= MAX_ROWS or not all(isinstance(token, bytes) for token in tokens or ())):
        wrong = "tokenizer.ggml.tokens"
    for key in ("tokenizer.ggml.token_type", "tokenizer.ggml.scores"):
        listed = head.values.get(key)
        if count is not None and listed is not None and (not isinstance(listed, list) or len(listed) != count):
            wrong = key
    for key, value in head.values.items():
        if key.startswith("tokenizer.ggml.") and key.endswith("token_id"):
            absent = not isinstance(value, int) or isinstance(value, bool)
            if absent or (count is not None and not 0 <= value < count and value != NO_TOKEN):
                wrong = key
    for name, shape in head.shapes.items():
        if not 1 <= len(shape) <= 4 or not all(0 < length < 2**40 for length in shape):
            wrong = f"the shape of {name}"
    if wrong is not None:
        head.refuse(f"{wrong} is not one that a model can have", AGAIN)
