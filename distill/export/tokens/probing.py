"""llama.cpp's pre-tokenizers told apart by what they do to a text."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.errors import DataError
from distill.vocabulary.byte_map import SPACE

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Names of llama.cpp's pre-tokenizers for byte-level BPE, the plainest first: several have the same rules.
NAMES = (
    *("gpt-2", "llama-bpe", "dbrx", "qwen2", "qwen35", "smollm", "starcoder", "refact", "falcon", "command-r"),
    *("deepseek-llm", "deepseek-coder", "deepseek-v3", "mpt", "olmo", "stablelm2", "codeshell", "bloom", "exaone"),
    *("chameleon", "minerva-7b", "viking", "poro-chat", "tekken", "smaug-bpe", "gpt-4o", "superbpe", "trillion"),
    *("granite-docling", "bailingmoe", "llama4", "hunyuan", "kimi-k2", "seed-coder", "chatglm-bpe", "glm4", "lfm2"),
    *("minimax-m2", "megrez", "gigachat", "falcon3", "gpt3-finnish", "exaone4", "afmoe", "grok-2", "youtu"),
)
PROBE = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n🚀 (normal) 😶 (multiple emojis) ✅ 🦙🦙 3 33 333 3333 33333",
    "33333333 3.3 3..3 3...3 កាន់តែពិសេសអាច😁 ?我想在apple工作1314151天～ ------======= нещо на Български ```````",
    "\"\"\"\"......!!!!!!?????? I've been 'told he's there, 'RE you sure? 'M not sure I'll make it, We'Ve a'lL",
    "camelCase HTTPServer snake_case __init__  x = y+1;\r\n\r\n\tif (a&&b) {return -1e9;} // ñandú नमस्ते עִבְרִית é",
    " leading  and trailing  ١٢٣ ½ x²  Straße ǅ don't DON'T 12ab34 a1b2 /path/to/file.txt\n",
)


def find_pre_type(path: Path, tokenizer: Tokenizer, tokens: list[str], types: list[int], merges: list[str]) -> str:
    """The first name under which llama.cpp gives the tokenizer's own ids for all of PROBE.

    Raises DataError when there is none, or llama-cpp-python is not installed.
    """
    for name in NAMES:

        def add(writer: Any, name: str = name) -> None:
            add_byte_level(writer, name, tokens, types, merges)

        if same_ids(tokenizer, add):
            return name
    raise DataError(
        f"{path}: llama.cpp has no pre-tokenizer that splits text like this one",
        hint="export to another format, or ask llama.cpp for it (convert_hf_to_gguf_update.py)",
    )


def same_ids(tokenizer: Tokenizer, add: Callable[[Any], None]) -> bool:
    """Whether llama.cpp gives the tokenizer's ids for all of PROBE, with the vocabulary that `add` writes.

    False for a vocabulary that this build of llama.cpp does not load. Raises DataError without llama-cpp-python.
    """
    from distill.models.gguf.file import GgufFile

    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "vocabulary.gguf"
        write_vocabulary(path, add)
        try:
            found = GgufFile(path, vocabulary_only=True)
        except DataError as error:
            if "llama-cpp-python" in str(error):
                raise
            return False
        try:
            return all(
                found.tokenize(as_llama_reads(tokenizer, text), True)
                == tokenizer.encode(text, add_special_tokens=False).ids
                for text in PROBE
            )
        finally:
            found.close()


def as_llama_reads(tokenizer: Any, text: str) -> str:
    """The text that llama.cpp has to be given for the ids of Hugging Face: it never normalises by Unicode's forms.

    Where Metaspace puts a space before a text that begins with none, llama.cpp puts one before every text.
    """
    name = type(tokenizer.normalizer).__name__
    if name in ("NFC", "NFD", "NFKC", "NFKD"):
        return str(tokenizer.normalizer.normalize_str(text))
    spaced = type(tokenizer.pre_tokenizer).__name__ == "Metaspace" and tokenizer.pre_tokenizer.prepend_scheme != "never"
    return text[1:] if spaced and text[:1] in (" ", SPACE) else text


def add_byte_level(writer: Any, pre: str, tokens: list[str], types: list[int], merges: list[str]) -> None:
    """Write the keys of a byte-level BPE to a gguf.GGUFWriter."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)


def write_vocabulary(path: Path, add: Callable[[Any], None]) -> None:
    """Write a GGUF file that holds a vocabulary alone: the keys that `add` gives to a gguf.GGUFWriter."""
    import gguf

    from distill.export.head.gguf_head import write_head

    writer = gguf.GGUFWriter(path=None, arch="llama")
    add(writer)
    with path.open("wb") as file:
        write_head(file, writer, [])
    writer.close()
