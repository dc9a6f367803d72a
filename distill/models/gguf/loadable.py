"""What llama.cpp takes for granted about a GGUF file, checked on its head: where it is false, llama.cpp aborts.

The assertions are those of llama-model.cpp and of the graphs of the architectures that this project exports.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from distill.errors import DataError
from distill.models.gguf.file_head import FileHead

MOST_LAYERS, MOST_EXPERTS = 512, 512  # LLAMA_MAX_LAYERS, LLAMA_MAX_EXPERTS
MOST_ROWS = 2**22  # tokens; the rows of many lists
ROTATES_ALL = ("llama", "qwen2", "qwen3")  # every dimension of a head is rotated, and keys are as wide as values


def require_loadable(path: Path, head: FileHead) -> None:
    """Raise DataError, with the key, for a file on which llama.cpp would end the process."""
    name = head.values.get("general.architecture")
    if not isinstance(name, bytes):
        raise DataError(f"{path} names no architecture", "export or copy the file again")
    keys = _Keys(path, name.decode("utf-8", "replace"), head.values)
    keys.number("block_count", 1, MOST_LAYERS)
    hidden = keys.number("embedding_length", 1, 2**20)
    keys.number("feed_forward_length", 1, 2**24)
    keys.number("context_length", 1, 2**31 - 1)
    keys.number("expert_count", 0, MOST_EXPERTS)
    heads, groups = keys.number("attention.head_count", 1, 2**16), keys.number("attention.head_count_kv", 1, 2**16)
    if heads and groups and heads % groups:
        keys.refuse("attention.head_count_kv", groups, f"divide attention.head_count, which is {heads}")
    epsilon = keys.own("attention.layer_norm_rms_epsilon")
    if epsilon is not None and not (isinstance(epsilon, float) and 0 <= epsilon < math.inf):
        keys.refuse("attention.layer_norm_rms_epsilon", epsilon, "be a number of at least 0")
    size = keys.number("attention.key_length", 1, 2**20)
    size = size if size is not None else hidden // heads if hidden and heads else None
    if keys.architecture in ROTATES_ALL and size is not None:
        for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
            found = keys.number(key, 1, 2**20)
            if found is not None and found != size:
                keys.refuse(key, found, f"be {size}, the size of a head")
        if heads and groups:
            _check_widths(path, head, heads * size, groups * size)
    _check_vocabulary(path, head)


class _Keys:
    """The metadata of one architecture; a value that is a list, one number a layer, is left to llama.cpp."""

    def __init__(self, path: Path, architecture: str, values: dict[str, Any]) -> None:
        self.path, self.architecture, self.values = path, architecture, values

    def own(self, key: str) -> Any:
        """The value of a key below the architecture's name; None for one that is not there."""
        return self.values.get(f"{self.architecture}.{key}")

    def number(self, key: str, least: int, most: int) -> int | None:
        """An integer within bounds; None where there is none or a list."""
        found = self.own(key)
        if found is None or isinstance(found, list):
            return None
        if not isinstance(found, int) or isinstance(found, bool) or not least <= found <= most:
            self.refuse(key, found, f"lie between {least} and {most}")
        return int(found)

    def refuse(self, key: str, found: Any, rule: str) -> None:
        """Raise DataError for a value."""
        raise DataError(
            f"{self.path}: {self.architecture}.{key} is {found!r:.60}, must {rule}", "export the file again"
        )


def _check_widths(path: Path, head: FileHead, queries: int, keys: int) -> None:
    """The projections are as wide as all heads together."""
    for name, shape in head.shapes.items():
        part = name.split(".")[-2] if name.endswith(".weight") and name.startswith("blk.") else ""
        wide = {"attn_q": queries, "attn_k": keys, "attn_v": keys}.get(part)
        if wide is not None and shape[1:] != [wide]:
            raise DataError(f"{path}: {name} is {shape}, by its heads {wide} wide", "export or copy the file again")


def _check_vocabulary(path: Path, head: FileHead) -> None:
    tokens = head.values.get("tokenizer.ggml.tokens")
    count = len(tokens) if isinstance(tokens, list) else None
    wrong = None
    if count is not None and (not 0 < count <= MOST_ROWS or not all(isinstance(one, bytes) for one in tokens or ())):
        wrong = "tokenizer.ggml.tokens"
    for key in ("tokenizer.ggml.token_type", "tokenizer.ggml.scores"):
        listed = head.values.get(key)
        if count is not None and listed is not None and (not isinstance(listed, list) or len(listed) != count):
            wrong = key
    for key, value in head.values.items():
        if key.startswith("tokenizer.ggml.") and key.endswith("token_id"):
            absent = not isinstance(value, int) or isinstance(value, bool)
            if absent or (count is not None and not 0 <= value < count and value != 2**32 - 1):
                wrong = key
    for name, shape in head.shapes.items():
        if not 1 <= len(shape) <= 4 or not all(0 < length < 2**40 for length in shape):
            wrong = f"the shape of {name}"
    if wrong is not None:
        raise DataError(f"{path}: {wrong} is not one that a model can have", "export or copy the file again")
