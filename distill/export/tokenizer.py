"""A Hugging Face tokenizer (byte-level BPE, SentencePiece BPE and Unigram) as llama.cpp's tokenizer.ggml.* keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.errors import DataError
from distill.export.tokens.byte_level import merges_of, pre_type, refuse_normalizer, refuse_other_models
from distill.export.tokens.pieces_file import Piece, read_pieces
from distill.export.tokens.probing import find_pre_type
from distill.export.tokens.spaced_pieces import pieces_of_merges, space_prefix
from distill.export.tokens.unigram import Spacing, add_spacing, find_spacing, unigram_pieces
from distill.files import read_utf8
from distill.models.config_file import read_config
from distill.vocabulary.byte_map import SPACE
from distill.vocabulary.encoding import added_around, open_tokenizer
from distill.vocabulary.reading import tokenizer_content, tokenizer_settings
from distill.vocabulary.roles import NAMED_ROLES, named_id

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# gguf.TokenType
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
STATES_PREFIX = ("llama", "smollm3", "granite")  # architectures whose files repeat the settings' add_prefix_space
GEMMA_TURN_END = (107, "<end_of_turn>")
ADDED_SCORE, PADDING_SCORE = -1000.0, -10000.0  # the converter's, for tokens that are never merged


@dataclass(frozen=True)
class GgufTokenizer:
    """The values of the tokenizer.ggml.* keys; `types` are gguf.TokenType values, one per token.

    `model` is llama.cpp's name: gpt2 (byte-level BPE), llama (SentencePiece BPE) or t5 (Unigram). `ids`: role (bos,
    eos, unk, sep, pad, cls, mask) to id. `scores` are of SentencePiece, `merges` of byte-level BPE, `spacing` of
    Unigram.
    """

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float] | None
    merges: list[str]
    ids: dict[str, int]
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool | None
    chat_template: str | list[dict[str, str]] | None
    padding_tokens: int
    spacing: Spacing | None = None

    @property
    def eos(self) -> int:
        """The token that ends a text."""
        return self.ids["eos"]


def read_tokenizer(folder: Path, vocabulary: int, architecture: str = "") -> GgufTokenizer:
    """The tokenizer of a Hugging Face folder, padded to `vocabulary` rows.

    `architecture` is llama.cpp's name of the model's, by which the converter chooses some keys. Raises DataError when
    the tokenizer is missing, of a kind that llama.cpp has not, larger than the model's vocabulary, or splits text by
    rules that llama.cpp has no name for.
    """
    path = folder / "tokenizer.json"
    content = tokenizer_content(path)
    settings = tokenizer_settings(folder)
    config = read_config(folder) if (folder / "config.json").exists() else {}
    model = content["model"]
    kind = "t5" if model.get("type") == "Unigram" else "llama" if _is_spaced(model) else "gpt2"
    if kind == "gpt2":
        refuse_other_models(path, model)
    tokenizer = open_tokenizer(path)  # which also proves the forms of the parts that are read below
    stated = settings.get("add_prefix_space")
    prefix = stated if architecture in STATES_PREFIX and isinstance(stated, bool) else None
    merges: list[str] = []
    if kind == "llama":
        behaves = space_prefix(path, content, tokenizer)
        prefix = None if prefix is None and behaves else behaves
        pieces = read_pieces(folder / "tokenizer.model", model["vocab"]) or pieces_of_merges(content)
    elif kind == "t5":
        pieces = unigram_pieces(path, model)
    else:
        refuse_normalizer(path, content)
        pieces = {number: Piece._make((token, 0.0, NORMAL)) for token, number in model["vocab"].items()}
        merges = merges_of(path, model)
    spaced = kind != "gpt2"
    _refuse_flags(path, content, spaced)
    listed, padding = _tokens(path, content, pieces, vocabulary, spaced)
    tokens = [piece.text for piece in listed]
    types = [piece.kind for piece in listed]
    pre, spacing = "default", None
    if kind == "gpt2":
        pre = pre_type(path, content, tokenizer) or find_pre_type(path, tokenizer, tokens, types, merges)
    elif kind == "t5":
        spacing = find_spacing(path, content, tokenizer, listed, model["unk_id"])
        prefix = spacing.space_prefix
    numbers = {token: index for index, token in enumerate(tokens)}
    ids: dict[str, int | None] = {role: named_id(role, settings, config, numbers, vocabulary) for role in NAMED_ROLES}
    if architecture == "gemma" and numbers.get(GEMMA_TURN_END[1]) == GEMMA_TURN_END[0]:
        ids["eot"] = GEMMA_TURN_END[0]
    if kind == "t5":
        ids["unk"] = model["unk_id"]  # llama.cpp would take 2
    eos = ids["eos"]
    if eos is None:
        # Without it llama.cpp would take token 11 for the end of text.
        raise DataError(f"{folder} names no end-of-text token", hint='set "eos_token" in tokenizer_config.json')
    add_bos, add_eos, ids["bos"] = _text_ends(path, tokenizer, ids["bos"], eos)
    return GgufTokenizer(
        model=kind,
        pre=pre,
        tokens=tokens,
        types=types,
        scores=[piece.score for piece in listed] if spaced else None,
        merges=merges,
        ids={role: number for role, number in ids.items() if number is not None},
        add_bos=add_bos,
        add_eos=add_eos,
        add_space_prefix=prefix,
        chat_template=_chat_template(folder, settings),
        padding_tokens=padding,
        spacing=spacing,
    )


def _is_spaced(model: Mapping[str, Any]) -> bool:
    return bool(model.get("byte_fallback")) and model.get("type") == "BPE"


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
        getattr(writer, f"add_{role}_token_id")(number)
    writer.add_add_bos_token(tokenizer.add_bos)
    writer.add_add_eos_token(tokenizer.add_eos)
    if tokenizer.spacing is not None:
        add_spacing(writer, tokenizer.spacing)
    elif tokenizer.add_space_prefix is not None:
        writer.add_add_space_prefix(tokenizer.add_space_prefix)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)


def _refuse_flags(path: Path, content: Mapping[str, Any], spaced: bool) -> None:
    for token in content.get("added_tokens") or []:
        # llama.cpp takes the space after Phi-3's markers away too; the check of the file reports other tokens.
        flags = [flag for flag in ("lstrip", "rstrip", "single_word") if token.get(flag)]
        if flags and not (spaced and flags == ["rstrip"]):
            raise DataError(
                f"{path}: added token {token['content']!r} with {flags[0]} cannot be exported",
                hint="llama.cpp has no such rule; remove the flag where no text depends on it",
            )


def _tokens(
    path: Path, content: Mapping[str, Any], pieces: Mapping[int, Piece], vocabulary: int, spaced: bool
) -> tuple[list[Piece], int]:
    """The tokens by id, added and padding ones included, and how many of the latter there are."""
    by_id = dict(pieces)
    for token in content.get("added_tokens") or []:
        text = token["content"]
        special = token.get("special") or _looks_special(text)
        # llama.cpp finds such tokens in the text itself, before its spaces are written as SentencePiece does.
        by_id[token["id"]] = Piece(
            text if special else text.replace(SPACE, " "), ADDED_SCORE, CONTROL if special else USER_DEFINED
        )
    size = max(by_id) + 1
    if size > vocabulary:
        raise DataError(
            f"{path} has {size} token ids, the model only {vocabulary} rows",
            hint="use the tokenizer the model was trained with, or resize the model's embeddings",
        )
    padding = vocabulary - len(by_id)
    taken = {piece.text for piece in by_id.values()}
    for index in range(vocabulary):
        if index not in by_id:
            name = f"[PAD{index}]"
            if name in taken:
                raise DataError(f"{path} already has a token {name}, which padding needs", hint="rename that token")
            by_id[index] = Piece(name, PADDING_SCORE, UNUSED)
    if len({piece.text for piece in by_id.values()}) != len(by_id):
        raise DataError(f"{path} has two ids for one token string", hint="GGUF needs every token string once")
    return [by_id[index] for index in range(vocabulary)], padding


def _looks_special(token: str) -> bool:
    """Whether a token is a control token by its name, as llama.cpp's converter has it (`does_token_look_special`)."""
    marked = any(token.startswith(a) and token.endswith(b) for a, b in (("<|", "|>"), ("<｜", "｜>"), ("<unused", ">")))
    return marked or token in ("<pad>", "<mask>", "<2mass>", "[@BOS@]")


def _text_ends(path: Path, tokenizer: Tokenizer, bos: int | None, eos: int) -> tuple[bool, bool, int | None]:
    """Whether the post-processor begins a text with a token, whether it ends it with `eos`, and the id of the first.

    The id is `bos` where none is added.
    """
    around = added_around(tokenizer)
    if around is None or len(around[0]) > 1 or around[1] not in ([], [eos]):
        raise DataError(
            f"{path} does more to a text than to put one token before it and the end-of-text token after it",
            hint="GGUF can add these two tokens and nothing else",
        )
    before, after = around
    return bool(before), bool(after), before[0] if before else bos


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | list[dict[str, str]] | None:
    """The chat template; several as a list of objects with `name` and `template`, like tokenizer_config.json's."""
    file = folder / "chat_template.jinja"
    template = read_utf8(file) if file.is_file() else settings.get("chat_template")
    more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    if isinstance(template, str) and more:
        named = [{"name": one.stem, "template": read_utf8(one)} for one in more]
        return [{"name": "default", "template": template}, *named]
    if isinstance(template, list):  # named templates of older tokenizers
        found = [
            {"name": one["name"], "template": one["template"]}
            for one in template
            if isinstance(one, dict) and isinstance(one.get("name"), str) and isinstance(one.get("template"), str)
        ]
        return found or None
    return template if isinstance(template, str) else None
