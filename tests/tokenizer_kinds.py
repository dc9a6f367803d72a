"""Small stand-ins for the tokenizers that people have: byte-level BPE with each split, and SentencePiece's forms."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from distill.vocabulary.encoding import PRE_STEPS, STEPS, pre_tokenizer_of

TEXT = (
    "The lighthouse keeper's log: wind, sea, visibility; 12345 ships in 1999. DON'T we'll I'm naïve\n\n    x + 1\n"
    "你好，世界。 こんにちは 한국어 नमस्ते ไทย שלום مرحبا café Ünïcödé 🙂 _name_ (a|b) [1, 2]!\r\n\t tabs  and   spaces\n"
)
TEXTS = (
    TEXT,
    "",
    " ",
    "a",
    "  lead",
    "e\u0301 o\u0308",
    "<s> a<end>b <tool>x </tool>",
    "▁b Ġc\u2028\u00a0d",
    "1234567 ½ Ⅷ",
)
SPECIAL = ["<unk>", "<s>", "<end>"]


def byte_level(split: str, normalizer: Any = None) -> Tokenizer:
    """Byte-level BPE that splits text as llama.cpp's pre-tokenizer of this name does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    content = json.loads(tokenizer.to_str()) | {"pre_tokenizer": pre_tokenizer_of(PRE_STEPS[split])}
    tokenizer = Tokenizer.from_str(json.dumps(content))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=360, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("</tool>", normalized=True)])
    return tokenizer


def sentencepiece(form: str) -> Tokenizer:
    """BPE with byte fallback whose spaces are ▁: `prepended` (Llama 2's normalizer), `metaspace`, or `gemma`."""
    words = sorted({*TEXT.replace(" ", "▁").replace("\n", "")} - {"日"} | {"▁"})
    pairs = [("t", "h"), ("th", "e"), ("▁", "a"), ("▁", "▁"), ("▁▁", "▁▁"), ("i", "n"), ("in", "g")]
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *words, *(left + right for left, right in pairs)]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("</tool>", normalized=False)])
    space: Any = normalizers.Replace(" ", "▁")
    if form == "prepended":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
    elif form == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = space
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps if form == "gemma" else [*steps, decoders.Strip(" ", 1, 0)])
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    **{f"byte-level {names[0]}": (lambda name=names[0]: byte_level(name)) for names in STEPS.values()},
    "byte-level qwen2 with NFC": lambda: byte_level("qwen2", normalizers.NFC()),
    **{form: (lambda form=form: sentencepiece(form)) for form in ("prepended", "metaspace", "gemma")},
}


def with_bos(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with a post-processor that puts <s> before a text."""
    number = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", number)])
    return tokenizer


def save(
    tokenizer: Tokenizer, folder: Path, model_type: str = "llama", rows: int | None = None, **settings: Any
) -> Path:
    """A folder with the tokenizer, its settings, and a config.json whose vocab_size is `rows` (None: one each)."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "<end>", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    config = {"model_type": model_type, "vocab_size": rows or tokenizer.get_vocab_size()}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
