"""A tokenizer as the tokenizer.ggml.* keys of a GGUF file, and whether llama.cpp gives the same ids for them."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.errors import DataError
from distill.models.gguf.file_head import write_head
from distill.models.gguf.special_tokens import token_key
from distill.vocabulary.byte_map import SPACE

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PROBE = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n🚀 (normal) 😶 (multiple emojis) ✅ 🦙🦙 3 33 333 3333 33333",
    "33333333 3.3 3..3 3...3 កាន់តែពិសេសអាច😁 ?我想在apple工作1314151天～ ------======= нещо на Български ```````",
    "\"\"\"\"......!!!!!!?????? I've been 'told he's there, 'RE you sure? 'M not sure I'll make it, We'Ve a'lL",
    "camelCase HTTPServer snake_case __init__  x = y+1;\r\n\r\n\tif (a&&b) {return -1e9;} // ñandú नमस्ते עִבְרִית é",
    " leading  and trailing  ١٢٣ ½ x²  Straße ǅ don't DON'T 12ab34 a1b2 /path/to/file.txt\n",
)


@dataclass(frozen=True)
class GgufTokenizer:
    """The values of the tokenizer.ggml.* keys; `types` are gguf.TokenType values, one per token.

    `model` is llama.cpp's name: gpt2 (byte-level BPE) or llama (SentencePiece BPE). `ids`: role (bos, eos, unk, sep,
    pad, cls, mask) to id. `scores` are of SentencePiece, `merges` of byte-level BPE.
    """

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float] | None = None
    merges: list[str] = field(default_factory=list)
    ids: dict[str, int] = field(default_factory=dict)
    add_bos: bool = False
    add_eos: bool = False
    add_space_prefix: bool | None = None
    chat_template: str | list[dict[str, str]] | None = None


def add_tokenizer(writer: Any, tokenizer: GgufTokenizer) -> None:
    """Write the tokenizer's keys to a gguf.GGUFWriter."""
    writer.add_tokenizer_model(tokenizer.model)
    writer.add_tokenizer_pre(tokenizer.pre)
    writer.add_token_list(tokenizer.tokens)
    if tokenizer.scores is not None:
        writer.add_token_scores(tokenizer.scores)
    writer.add_token_types(tokenizer.types)
    if tokenizer.merges:
        writer.add_token_merges(tokenizer.merges)
    for role, number in tokenizer.ids.items():
        writer.add_uint32(token_key(role), number)
    writer.add_add_bos_token(tokenizer.add_bos)
    writer.add_add_eos_token(tokenizer.add_eos)
    if tokenizer.add_space_prefix is not None:
        writer.add_add_space_prefix(tokenizer.add_space_prefix)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)


def write_vocabulary(path: Path, add: Callable[[Any], None]) -> None:
    """Write a GGUF file that holds a vocabulary alone: the keys that `add` gives to a gguf.GGUFWriter."""
    import gguf

    writer = gguf.GGUFWriter(path=None, arch="llama")
    add(writer)
    write_head(path, writer, [])


def same_ids(tokenizer: Tokenizer, exported: GgufTokenizer) -> bool:
    """Whether llama.cpp gives the tokenizer's ids for all of PROBE, with the keys in `found`.

    False for a vocabulary that this build of llama.cpp does not load. Raises DataError without llama-cpp-python.
    """
    from distill.models.gguf.file import GgufFile
    from distill.models.gguf.library import library

    library()  # fails here without llama-cpp-python, not as a vocabulary that does not load
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "vocabulary.gguf"
        write_vocabulary(path, lambda writer: add_tokenizer(writer, exported))
        try:
            file = GgufFile(path, vocabulary_only=True)
        except DataError:
            return False
        with contextlib.closing(file):
            return all(
                file.tokenize(as_llama_reads(tokenizer, text), True)
                == tokenizer.encode(text, add_special_tokens=False).ids
                for text in PROBE
            )


def as_llama_reads(tokenizer: Any, text: str) -> str:
    """The text that llama.cpp has to be given for the ids of Hugging Face: it never normalises by Unicode's forms.

    Where Metaspace puts a space before a text that begins with none, llama.cpp puts one before every text.
    """
    name = type(tokenizer.normalizer).__name__
    if name in ("NFC", "NFD", "NFKC", "NFKD"):
        return str(tokenizer.normalizer.normalize_str(text))
    spaced = type(tokenizer.pre_tokenizer).__name__ == "Metaspace" and tokenizer.pre_tokenizer.prepend_scheme != "never"
    return text[1:] if spaced and text[:1] in (" ", SPACE) else text
