"""Kinds of tokens, roles of special ones, and what llama.cpp takes where a GGUF file names none (llama-vocab.cpp)."""

from __future__ import annotations

from typing import NamedTuple

from distill.models.gguf.file_head import FileHead
from distill.vocabulary.splits import LLAMA3_NAMES

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # gguf.TokenType, and SentencePiece's own numbers
# Roles whose word in tokenizer.ggml.WORD_token_id is another.
WORDS = {"unk": "unknown", "sep": "seperator", "pad": "padding"}
TURN_ENDS = ("eot", "eom")  # further ids that end a turn or a message, under their own words


def token_key(role: str) -> str:
    """The key of a GGUF file that names the token of a role."""
    return f"tokenizer.ggml.{WORDS.get(role, role)}_token_id"


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


def stated_ends(head: FileHead) -> Defaults:
    """llama.cpp's defaults for a file's vocabulary, with what the file says of added tokens in their place.

    Some pre-tokenizers of BPE change the defaults. The file's own bos and eos are not read here.
    """
    model, pre = head.text("tokenizer.ggml.model") or "", head.text("tokenizer.ggml.pre")
    defaults = DEFAULTS[model]
    if defaults.kind == "BPE" and pre in PRE_ADDS_BOS:
        defaults = defaults._replace(add_bos=True)
    if defaults.kind == "BPE" and pre in PRE_WITHOUT_BOS:
        defaults = defaults._replace(bos=None)
    add_bos = head.flag("tokenizer.ggml.add_bos_token", defaults.add_bos) or ALWAYS_ADDS_BOS in (model, pre)
    return defaults._replace(add_bos=add_bos, add_eos=head.flag("tokenizer.ggml.add_eos_token", defaults.add_eos))
