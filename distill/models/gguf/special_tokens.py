"""Kinds of tokens, roles of special ones, and what llama.cpp takes where a GGUF file names none (llama-vocab.cpp)."""

from __future__ import annotations

from typing import NamedTuple

from distill.vocabulary.splits import LLAMA3_NAMES

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # gguf.TokenType, and SentencePiece's own numbers
# The role of a token: its word in tokenizer.ggml.WORD_token_id.
ROLES = {
    "bos": "bos",
    "eos": "eos",
    "unk": "unknown",
    "sep": "seperator",
    "pad": "padding",
    "cls": "cls",
    "mask": "mask",
}
TURN_ENDS = ("eot", "eom")  # further ids that end a turn or a message, under their own words


def token_key(role: str) -> str:
    """The key of a GGUF file that names the token of a role."""
    return f"tokenizer.ggml.{ROLES.get(role, role)}_token_id"


class Defaults(NamedTuple):
    """The bos and eos of a kind of vocabulary, and whether llama.cpp adds them to a text."""

    kind: str
    bos: int | None
    eos: int | None
    add_bos: bool
    add_eos: bool


# By tokenizer.ggml.model; llama.cpp's llama_vocab_type has one value per kind.
DEFAULTS = {
    "gpt2": Defaults("BPE", 11, 11, False, False),
    "gemma4": Defaults("BPE", None, None, True, False),
    "whitespace": Defaults("BPE", 11, 11, False, False),
    "llama": Defaults("SPM", 1, 2, True, False),
    "bert": Defaults("WPM", 101, None, True, False),
    "t5": Defaults("UGM", None, 1, False, True),
    "rwkv": Defaults("RWKV", None, None, False, False),
    "plamo2": Defaults("PLAMO2", 1, 2, False, False),
}
# Pre-tokenizers of BPE, by tokenizer.ggml.pre, that change those defaults.
PRE_ADDS_BOS = {*LLAMA3_NAMES, "tekken", "chameleon", "gemma4"}
PRE_WITHOUT_BOS = {"chatglm-bpe", "glm4", "glm5"}
ALWAYS_ADDS_BOS = "gemma4"  # whatever the file says
# Architectures whose Unigram tokenizers keep that kind in GGUF; others are written as SentencePiece.
UNIGRAM_IS_UGM = {"t5", "umt5", "mt5", "xlm-roberta", "xlm-roberta-xl"}


def defaults_of(model: str, pre: str | None) -> Defaults:
    """llama.cpp's defaults for a tokenizer.ggml.model, which some pre-tokenizers of BPE change."""
    found = DEFAULTS[model]
    if found.kind == "BPE" and pre in PRE_ADDS_BOS:
        found = found._replace(add_bos=True)
    if found.kind == "BPE" and pre in PRE_WITHOUT_BOS:
        found = found._replace(bos=None)
    return found
