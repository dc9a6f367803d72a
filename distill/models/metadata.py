"""A model's vocabulary and context as the pair rules compare them, read from a folder or a GGUF file; no weights.

Legend: V rows of the model's vocabulary, padding included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from distill.errors import DataError
from distill.models.gguf.file_head import FileHead, open_head
from distill.models.gguf.special_tokens import (
    ALWAYS_ADDS_BOS,
    DEFAULTS,
    Defaults,
    stated_ends,
    token_key,
)
from distill.models.hugging_face import load_config, load_tokenizer, text_folder
from distill.models.model_files import read_config
from distill.models.trimmed_head import read_kept
from distill.vocabulary.roles import named_id
from distill.vocabulary.tokenizer_files import added_around, open_tokenizer, tokenizer_settings


@dataclass(frozen=True)
class VocabularyMetadata:
    """A model's vocabulary and context as llama.cpp and vLLM see them.

    `tokens` [V] are the raw token strings, padding rows named [PAD<id>] as every converter does; `bos` and `eos` are
    added to a text where `add_bos` and `add_eos` are true; `beyond` counts ids of the tokenizer that have no row, and
    `kept` those of a trimmed head (None: the whole head); `context` is the training context in tokens.
    """

    reference: str
    kind: str
    tokens: list[str] = field(repr=False)
    bos: int | None
    eos: int | None
    add_bos: bool
    add_eos: bool
    context: int | None
    architecture: str
    chat_template: bool
    beyond: int = 0
    kept: int | None = None

    @classmethod
    def read(cls, reference: str) -> VocabularyMetadata:
        """The metadata of a Hugging Face folder, a hub name or a .gguf file; DataError where it cannot be read."""
        return _from_gguf(Path(reference)) if reference.endswith(".gguf") else _from_folder(reference)

    @property
    def rows(self) -> int:
        """V: Hugging Face's vocab_size."""
        return len(self.tokens)

    def real(self, index: int) -> str | None:
        """The string of a token, None for a padding row."""
        if index >= len(self.tokens) or self.tokens[index] == f"[PAD{index}]":
            return None
        return self.tokens[index]

    def with_rows(self, rows: int) -> VocabularyMetadata:
        """The same with padding rows appended, or rows at the end removed."""
        padding = [f"[PAD{index}]" for index in range(len(self.tokens), rows)]
        return replace(self, tokens=self.tokens[:rows] + padding)

    @property
    def real_tokens(self) -> int:
        """Rows that hold tokens."""
        return sum(self.real(index) is not None for index in range(self.rows))


def _from_folder(reference: str) -> VocabularyMetadata:
    place = str(text_folder(reference))
    folder, config = Path(place), load_config(place).get_text_config()
    rows = getattr(config, "vocab_size", None)
    if not isinstance(rows, int) or rows < 1:
        raise DataError(f"{folder}/config.json: vocab_size is {rows!r}", "correct config.json")
    tokenizer, settings, raw = _tokenizer(place), tokenizer_settings(folder), read_config(folder)
    ids: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    model = _gguf_model(place, tokenizer, config.model_type)
    named = {role: named_id(role, settings, raw, ids, rows) for role in ("bos", "eos")}
    ends = _text_ends(tokenizer, settings, named, DEFAULTS[model])
    context = getattr(config, "max_position_embeddings", None)
    kept = read_kept(folder)
    return VocabularyMetadata(
        reference=reference,
        tokens=_padded_tokens(ids, rows),
        **ends._replace(add_bos=ends.add_bos or model == ALWAYS_ADDS_BOS)._asdict(),
        context=context if isinstance(context, int) and context > 0 else None,
        architecture=config.model_type,
        chat_template=_has_chat_template(folder, settings),
        beyond=sum(index >= rows for index in ids.values()),
        kept=None if kept is None else len(kept["kept"]),
    )


def _tokenizer(place: str) -> Any:
    """The tokenizers.Tokenizer of a folder."""
    path = Path(place) / "tokenizer.json"
    if path.is_file():
        return open_tokenizer(path)
    backend = getattr(load_tokenizer(place), "backend_tokenizer", None)
    if backend is None:
        raise DataError(f"{place}: its tokenizer has no fast version to read", "save it with a tokenizer.json")
    return backend


def _padded_tokens(ids: Mapping[str, int], rows: int) -> list[str]:
    """The token of each row; [PAD<id>], as converters name it, where there is none."""
    tokens = [f"[PAD{index}]" for index in range(rows)]
    for token, index in ids.items():
        if index < rows:
            tokens[index] = token
    return tokens


def _gguf_model(place: str, tokenizer: Any, architecture: str) -> str:
    """The tokenizer.ggml.model that llama.cpp's converter would write."""
    model = type(tokenizer.model).__name__
    if architecture.startswith("gemma4"):
        return "gemma4"
    if model == "BPE":
        return "llama" if tokenizer.model.byte_fallback else "gpt2"
    if model == "WordPiece":
        return "bert"
    raise DataError(f"{place}: tokenizers of the kind {model} are not supported", "use another tokenizer")


def _text_ends(
    tokenizer: Any, settings: Mapping[str, Any], named: Mapping[str, int | None], defaults: Defaults
) -> Defaults:
    """The tokens that begin and end a text, and whether they are added to it, in the place of llama.cpp's `defaults`.

    By the tokenizer's post-processor first, then by the ids that the files name. Whether they are added is a setting
    (add_bos_token, add_eos_token) before it is the post-processor's.
    """
    before, after = added_around(tokenizer) or ([], [])
    bos = next((number for number in (*before[:1], named["bos"]) if number is not None), defaults.bos)
    eos = next((number for number in (*after[-1:], named["eos"]) if number is not None), defaults.eos)
    add_bos, add_eos = (settings.get(f"add_{role}_token") for role in ("bos", "eos"))
    return Defaults(
        defaults.kind,
        bos,
        eos,
        add_bos if isinstance(add_bos, bool) else bool(before) or defaults.add_bos,
        add_eos if isinstance(add_eos, bool) else bool(after) or defaults.add_eos,
    )


def _has_chat_template(folder: Path, settings: Mapping[str, Any]) -> bool:
    files = (folder / f"chat_template.{kind}" for kind in ("jinja", "json"))
    return bool(settings.get("chat_template")) or any(file.is_file() for file in files)


def _from_gguf(path: Path) -> VocabularyMetadata:
    head = open_head(path)
    model, tokens = head.text("tokenizer.ggml.model"), head.texts("tokenizer.ggml.tokens", "surrogateescape")
    if model is None or "tokenizer.ggml.tokens" not in head.values:
        raise DataError(f"{path} holds no tokenizer", "give a whole model file, of a split model the first part")
    if model not in DEFAULTS:
        raise DataError(f"{path}: tokenizer.ggml.model is {model!r}, which is unknown", f"known: {', '.join(DEFAULTS)}")
    # One row per token, or llama.cpp does not load the file.
    embedding = head.shapes.get("token_embd.weight", [0, len(tokens)])
    if embedding[-1:] != [len(tokens)]:
        embedded = embedding[-1] if embedding else "none"
        raise DataError(f"{path} names {len(tokens)} tokens but embeds {embedded}", "export the model again")
    ends = stated_ends(head)
    bos, eos = (_token_id(head, role, len(tokens), getattr(ends, role)) for role in ("bos", "eos"))
    return VocabularyMetadata(
        reference=str(path),
        tokens=tokens,
        **ends._replace(bos=bos, eos=eos)._asdict(),
        context=head.size("context_length", 1, 2**31 - 1),
        architecture=head.architecture,
        chat_template="tokenizer.chat_template" in head.values,
    )


def _token_id(head: FileHead, role: str, count: int, default: int | None) -> int | None:
    """The id that a file names for a role; the default for one that is no id, as llama.cpp has it."""
    number = head.values.get(token_key(role))
    return number if isinstance(number, int) and not isinstance(number, bool) and 0 <= number < count else default
