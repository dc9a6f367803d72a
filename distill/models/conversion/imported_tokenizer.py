"""The tokenizer of a GGUF file as tokenizer.json and tokenizer_config.json: the inverse of tokenizer.py.

The ids are llama.cpp's for the file. Where llama.cpp treats a text otherwise than the tokenizer that the model was
trained with (it never normalises; SentencePiece gets its space after every special token), the file cannot tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distill.models.gguf.file_head import NO_TOKEN, FileHead
from distill.models.gguf.special_tokens import (
    CONTROL,
    NORMAL,
    TURN_ENDS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    stated_ends,
    token_key,
)
from distill.vocabulary.byte_map import SPACE
from distill.vocabulary.roles import MARKERS, NAMED_ROLES
from distill.vocabulary.splits import IGNORE_MERGES, PRE_STEPS, pre_tokenizer_of

KINDS = ("gpt2", "llama")
# The model of a tokenizer.json, but for its vocabulary and merges.
BPE: dict[str, Any] = {
    "type": "BPE",
    **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")),
    **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False),
}


@dataclass(frozen=True)
class ImportedTokenizer:
    """The content of tokenizer.json and of tokenizer_config.json, and what config.json says of the vocabulary.

    `ids`: role to id. `ends`: the ids that end an answer. `templates`: chat templates by name, the main one `default`.
    """

    content: dict[str, Any]
    settings: dict[str, Any]
    ids: dict[str, int]
    ends: list[int]
    templates: dict[str, str]
    tokens: list[str]


def read_tokenizer(head: FileHead) -> ImportedTokenizer:
    """The tokenizer of a file's head; DataError, with the name, for a kind or a pre-tokenizer that is not known."""
    kind = head.text("tokenizer.ggml.model") or head.refuse("it holds no tokenizer")
    if kind not in KINDS:
        head.refuse(f"its tokenizer is of the kind {kind!r}", f"known: {', '.join(KINDS)}; give the model's folder")
    tokens = head.texts("tokenizer.ggml.tokens")
    types = head.numbers("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    scores = head.numbers("tokenizer.ggml.scores") or [0.0] * len(tokens)
    if not tokens or len(types) != len(tokens) or len(scores) != len(tokens):
        head.refuse(f"{len(tokens)} tokens, {len(types)} types and {len(scores)} scores do not belong together")
    real = [types[index] != UNUSED or token != f"[PAD{index}]" for index, token in enumerate(tokens)]
    if len({token for index, token in enumerate(tokens) if real[index]}) < sum(real):
        head.refuse("two of its tokens are the same text", "no tokenizer of transformers can hold such a vocabulary")
    ids, ends = _ids(head, tokens, types)
    listed = [(token, index) for index, token in enumerate(tokens) if real[index]]
    added = {CONTROL, USER_DEFINED} if kind == "gpt2" else {CONTROL, USER_DEFINED, UNKNOWN}
    parts = _byte_level(head, listed) if kind == "gpt2" else _spaced(head, listed, types, scores, ids)
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(token, index, types[index]) for token, index in listed if types[index] in added],
        **parts,
        "post_processor": _text_ends(head, tokens, ids),
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": head.count("context_length"),
        **{f"{role}_token": tokens[number] for role, number in ids.items()},
    }
    return ImportedTokenizer(content, settings, ids, ends, _templates(head), tokens)


def _added(token: str, index: int, kind: int) -> dict[str, Any]:
    special = kind != USER_DEFINED
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": index, "content": token, **flags, "special": special}


def _ids(head: FileHead, tokens: list[str], types: list[Any]) -> tuple[dict[str, int], list[int]]:
    """Ids by role, and those that end an answer: eos, and the end of a turn where the chat template writes it."""
    ids: dict[str, int] = {}
    for role in (*NAMED_ROLES, *TURN_ENDS):
        number = head.values.get(token_key(role))
        if number is None or number == NO_TOKEN:
            continue
        if not isinstance(number, int) or not 0 <= number < len(tokens):
            head.refuse(f"{token_key(role)} is {number!r}, and it has {len(tokens)} tokens")
        ids[role] = number
    if "eos" not in ids:
        default = stated_ends(head).eos
        if default is None or default >= len(tokens):
            head.refuse("it names no token that ends a text (tokenizer.ggml.eos_token_id)")
        ids["eos"] = default
    template = head.text("tokenizer.chat_template") or ""
    numbers = {token: index for index, token in enumerate(tokens) if types[index] == CONTROL}
    turns = [numbers[marker] for marker in MARKERS["turn_end"] if marker in numbers and marker in template]
    ends = [ids["eos"], *(ids[end] for end in TURN_ENDS if end in ids), *turns]
    return {role: number for role, number in ids.items() if role in NAMED_ROLES}, list(dict.fromkeys(ends))


def _byte_level(head: FileHead, listed: list[tuple[str, int]]) -> dict[str, Any]:
    pre = head.text("tokenizer.ggml.pre") or "default"
    if pre not in PRE_STEPS:
        head.refuse(
            f"its pre-tokenizer {pre!r} is not known here",
            f"give the model's Hugging Face folder; known: {', '.join(sorted(PRE_STEPS))}",
        )
    vocabulary = {token for token, _ in listed}
    merges = []
    for merge in head.texts("tokenizer.ggml.merges"):
        space = merge.find(" ", 1)  # a part may begin with a space
        left, right = merge[:space], merge[space + 1 :]
        if space < 0 or left + right not in vocabulary or left not in vocabulary or right not in vocabulary:
            head.refuse(f"merge {merge!r:.40} joins what are no tokens", "copy the file again")
        merges.append([left, right])
    return {
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer_of(PRE_STEPS[pre]),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {**BPE, "ignore_merges": pre in IGNORE_MERGES, "vocab": dict(listed), "merges": merges},
    }


def _spaced(
    head: FileHead, listed: list[tuple[str, int]], types: list[Any], scores: list[Any], ids: Mapping[str, int]
) -> dict[str, Any]:
    """SentencePiece BPE: llama.cpp merges the pair whose token has the highest score, tokenizers the first listed."""
    merged = {token: index for token, index in listed if types[index] in (NORMAL, USER_DEFINED)}
    pairs = []
    for token, index in merged.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in merged and right in merged:
                pairs.append((-scores[index], index, merged[left], merged[right], left, right))
    pairs.sort(key=lambda pair: pair[:4])
    spaced = head.flag("tokenizer.ggml.add_space_prefix", True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prepend = [{"type": "Prepend", "prepend": SPACE}] if spaced else []
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if spaced else []),
    ]
    unknown = next((token for token, index in listed if types[index] == UNKNOWN or index == ids.get("unk")), None)
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            **BPE,
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": dict(listed),
            "merges": [[left, right] for *_, left, right in pairs],
        },
    }


def _text_ends(head: FileHead, tokens: list[str], ids: Mapping[str, int]) -> dict[str, Any] | None:
    """The post-processor that puts bos before a text and eos after it, where the file or llama.cpp says so."""
    stated = stated_ends(head)
    bos = ids.get("bos", stated.bos) if stated.add_bos else None
    before, after = [] if bos is None else [bos], [ids["eos"]] if stated.add_eos else []
    if not before and not after:
        return None
    first, last = (
        [{"SpecialToken": {"id": tokens[number], "type_id": 0}} for number in side] for side in (before, after)
    )
    single = [*first, {"Sequence": {"id": "A", "type_id": 0}}, *last]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            tokens[number]: {"id": tokens[number], "ids": [number], "tokens": [tokens[number]]}
            for number in (*before, *after)
        },
    }


def _templates(head: FileHead) -> dict[str, str]:
    """Chat templates by name."""
    templates = {"default": head.text("tokenizer.chat_template")}
    for name in head.texts("tokenizer.chat_templates"):
        templates[name] = head.text(f"tokenizer.chat_template.{name}")
    wrong = [name for name in templates if not name.replace("_", "").replace("-", "").isalnum()]
    if wrong:
        head.refuse(f"chat template {wrong[0]!r:.40} has a name that no file can have", "copy the file again")
    return {name: text for name, text in templates.items() if text is not None}
