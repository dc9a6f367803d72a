"""What llama.cpp takes for granted about a GGUF file, checked on its head: where it is false, llama.cpp aborts.

The assertions are those of llama-model.cpp and of the graphs of the architectures that this project exports.
"""

from __future__ import annotations

import math

from distill.models.gguf.file_head import NO_TOKEN, FileHead

MOST_LAYERS, MOST_EXPERTS = 512, 512  # LLAMA_MAX_LAYERS, LLAMA_MAX_EXPERTS
MOST_ROWS = 2**22  # tokens; the rows of many lists
ROTATES_ALL = ("llama", "qwen2", "qwen3")  # every dimension of a head is rotated, and keys are as wide as values
AGAIN = "export or copy the file again"


def require_loadable(head: FileHead) -> None:
    """Raise DataError, with the key, for a file on which llama.cpp would end the process."""
    head.size("block_count", 1, MOST_LAYERS)
    head.size("embedding_length", 1, 2**20)
    head.size("feed_forward_length", 1, 2**24)
    head.size("context_length", 1, 2**31 - 1)
    head.size("expert_count", 0, MOST_EXPERTS)
    heads, groups = head.size("attention.head_count", 1, 2**16), head.size("attention.head_count_kv", 1, 2**16)
    if heads and groups and heads % groups:
        head.refuse_value("attention.head_count_kv", f"divide attention.head_count, which is {heads}")
    epsilon = head.values.get(f"{head.architecture}.attention.layer_norm_rms_epsilon")
    if epsilon is not None and not (isinstance(epsilon, float) and 0 <= epsilon < math.inf):
        head.refuse_value("attention.layer_norm_rms_epsilon", "be a number of at least 0")
    size, _ = head_sizes(head)
    if head.architecture in ROTATES_ALL and size is not None:
        for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
            if head.size(key, 1, 2**20) not in (None, size):
                head.refuse_value(key, f"be {size}, the size of a head")
        if heads and groups:
            _check_widths(head, heads * size, groups * size)
    _check_vocabulary(head)


def head_sizes(head: FileHead) -> tuple[int | None, int | None]:
    """Sizes of a head's keys and values by the metadata; None where they give one number a layer, or none."""
    hidden, heads = head.size("embedding_length", 1, 2**20), head.size("attention.head_count", 1, 2**16)
    default = hidden // heads if hidden and heads else None
    keys, values = (head.size(f"attention.{part}_length", 1, 2**20) for part in ("key", "value"))
    return keys or default, values or default


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
    if count is not None and (not 0 < count <= MOST_ROWS or not all(isinstance(one, bytes) for one in tokens or ())):
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
