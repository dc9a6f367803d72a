"""Special tokens that llama.cpp takes for each kind of vocabulary where a GGUF file names none (llama-vocab.cpp)."""

from __future__ import annotations

from typing import NamedTuple


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
PRE_ADDS_BOS = {
    "llama3",
    "llama-v3",
    "llama-bpe",
    "falcon3",
    "falcon-h1",
    "pixtral",
    "midm-2.0",
    "lfm2",
    "jina-v5-nano",
    "tekken",
    "chameleon",
    "gemma4",
}
PRE_WITHOUT_BOS = {"chatglm-bpe", "glm4", "glm5"}
ALWAYS_ADDS_BOS = "gemma4"  # whatever the file says
# Architectures whose Unigram tokenizers keep that kind in GGUF; others are written as SentencePiece.
UNIGRAM_IS_UGM = {"t5", "umt5", "mt5", "xlm-roberta", "xlm-roberta-xl"}
