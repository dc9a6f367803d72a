"""A Hugging Face tokenizer (byte-level or SentencePiece BPE) as llama.cpp's tokenizer.ggml.* keys, and back.

llama.cpp has its own pre-tokenizers for byte-level BPE, under fixed names. A wrong name loads and gives wrong ids.
The name is therefore derived from the rules in tokenizer.json. Rules that are not known here are compared with
llama.cpp's by the ids that they give.
"""

from __future__ import annotations

import contextlib
import json
import re
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer
from tokenizers.models import BPE

from distill.errors import DataError
from distill.files import read_utf8
from distill.folders import read_config
from distill.gguf.head import (
    BYTE,
    CONTROL,
    END_NAMES,
    FILL_ROLES,
    NO_TOKEN,
    NORMAL,
    TURN_ENDS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    FileHead,
    stated_ends,
    token_key,
    types_and_ends,
    write_head,
)
from distill.vocabulary.encoding import IGNORE_MERGES, PRE_STEPS, STEPS, pre_tokenizer_of
from distill.vocabulary.vocabulary import (
    NAMED_ROLES,
    SPACE,
    added_around,
    merge_pairs,
    named_id,
    open_tokenizer,
    tokenizer_content,
    tokenizer_settings,
    tokens_without_row,
)

# ── The keys, and whether llama.cpp then gives the tokenizer's ids ──

PROBE = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n🚀 (normal) 😶 (multiple emojis) ✅ 🦙🦙 3 33 333 3333 33333",
    "33333333 3.3 3..3 3...3 កាន់តែពិសេសអាច😁 ?我想在apple工作1314151天～ ------======= нещо на Български ```````",
    "\"\"\"\"......!!!!!!?????? I've been 'told he's there, 'RE you sure? 'M not sure I'll make it, We'Ve a'lL",
    "camelCase HTTPServer snake_case __init__  x = y+1;\r\n\r\n\tif (a&&b) {return -1e9;} // ñandú नमस्ते עִבְרִית é",
    " leading  and trailing  ١٢٣ ½ x²  Straße ǅ don't DON'T 12ab34 a1b2 /path/to/file.txt\n",
)


@dataclass(frozen=True)
class GgufTokenizer:
    """The values of the tokenizer.ggml.* keys.

    `model` is llama.cpp's name: gpt2 (byte-level BPE) or llama (SentencePiece BPE). `types`: one gguf.TokenType value
    per token. `ids`: role (bos, eos, unk, sep, pad, cls, mask) -> id. Only SentencePiece has `scores`, and only
    byte-level BPE has `merges`.
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
    """Write a GGUF file with a vocabulary only. `add` writes its keys to a gguf.GGUFWriter."""
    import gguf

    writer = gguf.GGUFWriter(path=None, arch="llama")
    add(writer)
    write_head(path, writer, [])


def same_ids(tokenizer: Tokenizer, exported: GgufTokenizer) -> bool:
    """Whether llama.cpp, given the keys in `exported`, gives the tokenizer's ids for every text in PROBE.

    False if this build of llama.cpp does not load the vocabulary. Raises DataError without llama-cpp-python.
    """
    from distill.gguf.library import GgufFile, library

    library()  # If llama-cpp-python is missing, the error comes from here and is not taken for a failed load.
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
    """Return the text that makes llama.cpp give the ids of Hugging Face for `text`.

    llama.cpp never applies a Unicode normal form, so the form is applied here. Metaspace adds a space to a text that
    begins with none. llama.cpp adds a space to every text, so a space at the start is removed here.
    """
    name = type(tokenizer.normalizer).__name__
    if name in ("NFC", "NFD", "NFKC", "NFKD"):
        return str(tokenizer.normalizer.normalize_str(text))
    spaced = type(tokenizer.pre_tokenizer).__name__ == "Metaspace" and tokenizer.pre_tokenizer.prepend_scheme != "never"
    return text[1:] if spaced and text[:1] in (" ", SPACE) else text


# ── SentencePiece BPE in llama.cpp's terms: spaces as ▁ and bytes as <0x..> ──
# `tokenizer.model` is SentencePiece's file (protobuf ModelProto). Only this file has the scores of the pieces.

PIECES, TEXT, SCORE, KIND = 1, 1, 2, 3  # field numbers of ModelProto and of ModelProto.SentencePiece
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
HINT = "supported: SentencePiece BPE that writes spaces as ▁ and leaves the rest of a text as it is"


class Piece(NamedTuple):
    """A token of a vocabulary: text, score, and kind. gguf.TokenType and SentencePiece number the kinds alike."""

    text: str
    score: float
    kind: int


def space_prefix(path: Path, tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer puts a space before a text. DataError if it changes texts in other ways."""
    normalizers, splits = _parts_of(tokenizer.normalizer), _parts_of(tokenizer.pre_tokenizer)
    for part in normalizers:
        replaces = part.get("type") == "Replace" and part.get("pattern") == {"String": " "}
        if not (replaces and part.get("content") == SPACE) and part != {"type": "Prepend", "prepend": SPACE}:
            raise DataError(f"{path}: normalizer {part.get('type')!r} cannot be exported", hint=HINT)
    for part in splits:
        spaces = part.get("type") == "Split" and part.get("pattern") == {"String": " "}
        whole = part.get("type") == "Metaspace" and not part["split"]
        if not whole and not (spaces and normalizers):  # After a normalizer no space is left to split at.
            raise DataError(f"{path}: pre-tokenizer {part.get('type')!r} cannot be exported", hint=HINT)
    if not normalizers and not splits:
        raise DataError(f"{path}: spaces are not written as {SPACE}, but llama.cpp would do so", hint=HINT)
    return tokenizer.encode("a", add_special_tokens=False).tokens[0].startswith(SPACE)


def _parts_of(part: Any) -> list[dict[str, Any]]:
    """Return the steps of a tokenizer's normalizer or pre-tokenizer, each with all its settings."""
    return [] if part is None else _flat(json.loads(part.__getstate__()))


def _flat(part: dict[str, Any]) -> list[dict[str, Any]]:
    if part["type"] != "Sequence":
        return [part]
    steps = part.get("pretokenizers") or part.get("normalizers") or []
    return [inner for step in steps for inner in _flat(step)]


def pieces_of_merges(content: Mapping[str, Any]) -> dict[int, Piece]:
    """Return the pieces, by id, of a tokenizer.json without a `tokenizer.model`.

    A token's score is minus the rank of its first merge: llama.cpp merges the pair whose token has the highest score,
    Hugging Face the pair with the lowest rank.
    """
    model = content["model"]
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merge_pairs(model)):
        ranks.setdefault(left + right, rank)
    pieces = {}
    for token, number in model["vocab"].items():
        if BYTE_TOKEN.fullmatch(token):
            pieces[number] = Piece(token, 0.0, BYTE)
        elif token == (model.get("unk_token") or "<unk>"):
            pieces[number] = Piece(token, 0.0, UNKNOWN)
        else:  # Tokens without a merge are single characters, which llama.cpp finds without a score.
            pieces[number] = Piece(token, float(-ranks.get(token, len(ranks))), NORMAL)
    return pieces


def read_pieces(path: Path, vocabulary: Mapping[str, int]) -> dict[int, Piece] | None:
    """Return the pieces of a `tokenizer.model` by id, or None if there is no such file.

    Raises DataError for a damaged file, and for pieces that differ from tokenizer.json's `vocabulary`.
    """
    if not path.is_file():
        return None
    data = path.read_bytes()
    try:
        bodies = [value for number, kind, value in _fields(data) if (number, kind) == (PIECES, 2)]
        pieces = {number: _piece(bytes(body)) for number, body in enumerate(bodies)}
    except (ValueError, IndexError, struct.error, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not a SentencePiece model: {error}", "copy the tokenizer again") from None
    texts = {number: token for token, number in vocabulary.items()}
    for number, piece in pieces.items():
        if texts.get(number, piece.text) != piece.text:
            hint = "the two files belong to different tokenizers: delete the wrong one"
            what = f"{path} has {piece.text!r} as token {number}, but tokenizer.json has {texts[number]!r}"
            raise DataError(what, hint)
    missing = sorted(set(texts) - set(pieces))
    pieces |= {number: Piece(texts[number], 0.0, NORMAL) for number in missing}
    return pieces


def _piece(body: bytes) -> Piece:
    text, score, kind = "", 0.0, NORMAL
    for number, _, value in _fields(body):
        if number == TEXT and isinstance(value, bytes):
            text = value.decode()
        elif number == SCORE and isinstance(value, bytes):
            score = struct.unpack("<f", value)[0]
        elif number == KIND and isinstance(value, int):
            kind = value
    return Piece(text, score, kind)


def _fields(data: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """Yield number, wire type and value of each field. The value is an integer for varints, and bytes otherwise."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        value, at = _varint(data, at) if kind in (0, 2) else ({1: 8, 5: 4}.get(kind, -1), at)
        if kind == 0:
            yield tag >> 3, kind, value
            continue
        if value < 0:
            raise ValueError(f"wire type {kind} at byte {at}")
        if at + value > len(data):
            raise ValueError("it is cut short")
        yield tag >> 3, kind, data[at : at + value]
        at += value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
    raise ValueError(f"a number at byte {at} is too long")


# ── A Hugging Face tokenizer as the values of the keys ──

STATES_PREFIX = ("llama", "smollm3", "granite")  # architectures whose files repeat the settings' add_prefix_space
GEMMA_TURN_END = (107, "<end_of_turn>")
ADDED_SCORE, PADDING_SCORE = -1000.0, -10000.0  # the converter's scores for tokens that are never merged
# Steps of a pre-tokenizer, as JSON -> llama.cpp's first name for them. Two names differ only in their way of merging.
PRE_TYPES = {json.dumps(_flat(pre_tokenizer_of(steps))): names[0] for steps, names in STEPS.items()}
SAME_BUT_MERGING = {"llama-bpe": "dbrx"}

# llama.cpp's names for pre-tokenizers of byte-level BPE that behave differently, the plainest first.
NAMES = (
    *("gpt-2", "llama-bpe", "dbrx", "qwen2", "qwen35", "smollm", "falcon", "deepseek-llm", "deepseek-coder"),
    *("deepseek-v3", "bloom", "chameleon", "viking", "tekken", "superbpe", "gpt-4o", "bailingmoe", "kimi-k2"),
    *("seed-coder", "afmoe", "youtu"),
)
SUPPORTED = "supported: byte-level BPE with a split that llama.cpp has, and SentencePiece BPE"


def read_tokenizer(folder: Path, vocabulary: int, architecture: str = "") -> GgufTokenizer:
    """Return the tokenizer of a Hugging Face folder, padded to `vocabulary` rows.

    `architecture` is llama.cpp's name of the model's architecture, which decides on some keys. Raises DataError if the
    tokenizer is missing, of a kind that llama.cpp lacks or larger than the model's vocabulary, or if llama.cpp has no
    name for its splitting rules. For rules that are not known here, it also raises DataError without llama-cpp-python.
    """
    path = folder / "tokenizer.json"
    content = tokenizer_content(path)
    settings = tokenizer_settings(folder)
    config = read_config(folder) if (folder / "config.json").exists() else {}
    model = content["model"]
    spaced = bool(model.get("byte_fallback"))
    for key in (
        "dropout",
        "continuing_subword_prefix",
        "end_of_word_suffix",
        "ignore_merges" if spaced else "unk_token",
    ):
        if model.get(key):  # llama.cpp has none of these.
            raise DataError(f"{path}: BPE with {key} = {model[key]!r} cannot be exported", hint=SUPPORTED)
    tokenizer = open_tokenizer(path)  # Opening also checks the form of the parts that are read below.
    stated = settings.get("add_prefix_space")
    prefix = stated if architecture in STATES_PREFIX and isinstance(stated, bool) else None
    merges: list[str] = []
    if spaced:
        behaves = space_prefix(path, tokenizer)
        prefix = None if prefix is None and behaves else behaves
        pieces = read_pieces(folder / "tokenizer.model", model["vocab"]) or pieces_of_merges(content)
    else:
        # llama.cpp never normalises. NFC leaves ordinary text as it is. The parity check reports other differences.
        kind = (content.get("normalizer") or {}).get("type")
        if kind not in (None, "NFC"):
            raise DataError(f"{path}: normalizer {kind!r} cannot be exported", hint=SUPPORTED)
        pieces = {number: Piece._make((token, 0.0, NORMAL)) for token, number in model["vocab"].items()}
        merges = _merges_of(path, model)
    _refuse_flags(path, content, spaced)
    listed = _tokens(path, content, pieces, vocabulary, spaced)
    pre = "default" if spaced else _pre_type(path, content, tokenizer)
    tokens = [piece.text for piece in listed]
    numbers = {token: index for index, token in enumerate(tokens)}
    ids: dict[str, int | None] = {role: named_id(role, settings, config, numbers, vocabulary) for role in NAMED_ROLES}
    if architecture == "gemma" and numbers.get(GEMMA_TURN_END[1]) == GEMMA_TURN_END[0]:
        ids["eot"] = GEMMA_TURN_END[0]
    eos = ids["eos"]
    if eos is None:
        # Without the key, llama.cpp would take token 11 for the end of text.
        raise DataError(f"{folder} names no end-of-text token", hint='set "eos_token" in tokenizer_config.json')
    add_bos, add_eos, ids["bos"] = _text_ends(path, tokenizer, ids["bos"], eos)
    exported = GgufTokenizer(
        model="llama" if spaced else "gpt2",
        pre=pre or "",
        tokens=tokens,
        types=[piece.kind for piece in listed],
        scores=[piece.score for piece in listed] if spaced else None,
        merges=merges,
        ids={role: number for role, number in ids.items() if number is not None},
        add_bos=add_bos,
        add_eos=add_eos,
        add_space_prefix=prefix,
        chat_template=_chat_template(folder, settings),
    )
    if pre is not None:
        return exported
    # Take the first name under which llama.cpp gives the tokenizer's ids for every text in PROBE.
    for named in (replace(exported, pre=name) for name in NAMES):
        if same_ids(tokenizer, named):
            return named
    hint = "export to another format, or ask llama.cpp for it (convert_hf_to_gguf_update.py)"
    raise DataError(f"{path}: llama.cpp has no pre-tokenizer that splits text like this one", hint)


def _refuse_flags(path: Path, content: Mapping[str, Any], spaced: bool) -> None:
    for token in content.get("added_tokens") or []:
        # llama.cpp also removes the space after Phi-3's markers. The check of the file reports other differences.
        flags = [flag for flag in ("lstrip", "rstrip", "single_word") if token.get(flag)]
        if flags and not (spaced and flags == ["rstrip"]):
            hint = "llama.cpp has no such rule; remove the flag if no text depends on it"
            raise DataError(f"{path}: added token {token['content']!r} with {flags[0]} cannot be exported", hint)


def _tokens(
    path: Path, content: Mapping[str, Any], pieces: Mapping[int, Piece], vocabulary: int, spaced: bool
) -> list[Piece]:
    """Return the tokens in the order of their ids, including added tokens and padding."""
    by_id = dict(pieces)
    ids = {piece.text: number for number, piece in pieces.items()}
    ids |= {token["content"]: token["id"] for token in content["added_tokens"]}
    flagged = {token["content"] for token in content["added_tokens"] if token.get("special")}
    rowless = tokens_without_row(path.parent, ids, flagged, vocabulary)
    for token in content.get("added_tokens") or []:
        text = token["content"]
        if text in rowless:
            continue
        special = token.get("special") or _looks_special(text)
        # llama.cpp finds these tokens in the text before it writes spaces as SentencePiece does.
        by_id[token["id"]] = Piece(
            text if special else text.replace(SPACE, " "), ADDED_SCORE, CONTROL if special else USER_DEFINED
        )
    taken = {piece.text for piece in by_id.values()}
    for index in range(vocabulary):
        if index not in by_id:
            name = f"[PAD{index}]"
            if name in taken:
                raise DataError(f"{path} already has a token {name}, which padding needs", hint="rename that token")
            by_id[index] = Piece(name, PADDING_SCORE, UNUSED)
    if len({piece.text for piece in by_id.values()}) != len(by_id):
        raise DataError(f"{path} has two ids for one token string", hint="GGUF needs unique token strings")
    return [by_id[index] for index in range(vocabulary)]


def _looks_special(token: str) -> bool:
    """Whether a token's name makes it a control token (llama.cpp's converter: `does_token_look_special`)."""
    marked = any(token.startswith(a) and token.endswith(b) for a, b in (("<|", "|>"), ("<｜", "｜>"), ("<unused", ">")))
    return marked or token in ("<pad>", "<mask>", "<2mass>", "[@BOS@]")


def _text_ends(path: Path, tokenizer: Tokenizer, bos: int | None, eos: int) -> tuple[bool, bool, int | None]:
    """Whether the post-processor puts a token before a text, and `eos` after it. The third value is its id.

    If no token is added before a text, the third value is `bos`.
    """
    around = added_around(tokenizer)
    if around is None or len(around[0]) > 1 or around[1] not in ([], [eos]):
        what = f"{path} adds more to a text than one token before it and the end-of-text token after it"
        raise DataError(what, "GGUF can add these two tokens and nothing else")
    before, after = around
    return bool(before), bool(after), before[0] if before else bos


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | list[dict[str, str]] | None:
    """Return the chat template, or several as a list of objects with `name` and `template`."""
    file = folder / "chat_template.jinja"
    template = read_utf8(file) if file.is_file() else settings.get("chat_template")
    more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    if isinstance(template, str) and more:
        named = [{"name": path.stem, "template": read_utf8(path)} for path in more]
        return [{"name": "default", "template": template}, *named]
    if isinstance(template, list):  # Older tokenizers name templates. Their form was checked when they were read.
        return [{"name": entry["name"], "template": entry["template"]} for entry in template] or None
    return template if isinstance(template, str) else None


def _pre_type(path: Path, content: Mapping[str, Any], tokenizer: Tokenizer) -> str | None:
    """Return llama.cpp's name for the pre-tokenizer, from its rules, or None for rules that are not known here.

    Raises DataError if llama.cpp has the rules, but not in combination with this way of merging.
    """
    steps = _parts_of(tokenizer.pre_tokenizer)
    pre = PRE_TYPES.get(
        json.dumps([step | {"trim_offsets": True} if "trim_offsets" in step else step for step in steps])
    )
    if pre is None:
        # llama.cpp has no pre-tokenizer that maps bytes twice.
        if sum(step["type"] == "ByteLevel" for step in steps) > 1:
            raise DataError(f"{path}: llama.cpp has no pre-tokenizer that maps bytes more than once", hint=SUPPORTED)
        return None
    ignores = bool(content["model"].get("ignore_merges"))
    if ignores == (pre in IGNORE_MERGES) or _merges_reach_every_token(content, tokenizer):
        return pre
    if pre in SAME_BUT_MERGING:
        return SAME_BUT_MERGING[pre]
    hint = "export to another format"
    raise DataError(f"{path}: ignore_merges has no counterpart for pre-tokenizer {pre!r}", hint)


def _merges_reach_every_token(content: Mapping[str, Any], tokenizer: Tokenizer) -> bool:
    """Whether merging yields each token from its own bytes. If so, ignore_merges changes nothing."""
    model = content["model"]
    plain = BPE(model["vocab"], merge_pairs(model), ignore_merges=False)
    added = {token["content"] for token in content.get("added_tokens") or []}
    return all(len(plain.tokenize(token)) == 1 for token in model["vocab"] if token not in added)


def _merges_of(path: Path, model: Mapping[str, Any]) -> list[str]:
    """Return the merges as llama.cpp writes them: two parts with a space between them."""
    merges = merge_pairs(model)
    spaced = next((merge for merge in merges if " " in "".join(merge)), None)
    if spaced is not None:
        raise DataError(f"{path}: merge {spaced!r} contains a space", hint="only byte-level merges can be exported")
    return [" ".join(merge) for merge in merges]


# ── The tokenizer of a GGUF file as tokenizer.json and tokenizer_config.json ──
# The ids are llama.cpp's for the file. They can differ from those of the tokenizer that the model was trained with:
# llama.cpp never normalises, and SentencePiece adds its space after every special token. The file does not show it.

READ_KINDS = ("gpt2", "llama")
# The model of a tokenizer.json without its vocabulary and merges.
PLAIN_BPE: dict[str, Any] = {
    "type": "BPE",
    **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")),
    **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False),
}


@dataclass(frozen=True)
class ImportedTokenizer:
    """The content of tokenizer.json and tokenizer_config.json, and config.json's entries about the vocabulary.

    `ids`: role -> id. `ends`: the ids that end an answer. `templates`: chat templates by name, the main one as
    `default`. `retyped`: tokens whose names make llama.cpp change their type.
    """

    content: dict[str, Any]
    settings: dict[str, Any]
    ids: dict[str, int]
    ends: list[int]
    templates: dict[str, str]
    tokens: list[str]
    retyped: list[str]


def imported_tokenizer(head: FileHead) -> ImportedTokenizer:
    """Return the tokenizer of a file for which `require_loadable` passed.

    Raises DataError, with the name, for an unknown kind of tokenizer or pre-tokenizer.
    """
    kind = head.text("tokenizer.ggml.model") or head.refuse("it holds no tokenizer")
    if kind not in READ_KINDS:
        head.refuse(
            f"its tokenizer is of the kind {kind!r}", f"known: {', '.join(READ_KINDS)}; give the model's folder"
        )
    named = head.texts("tokenizer.ggml.tokens") or head.refuse("it holds no tokens")
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(named)]
    types = head.numbers("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    scores = head.numbers("tokenizer.ggml.scores") or [0.0] * len(tokens)
    real = [token != f"[PAD{index}]" for index, token in enumerate(tokens)]  # older converters call them user-defined
    ids = _ids(head, tokens, types)
    file_types, (types, ends) = types, types_and_ends(tokens, types, ids)
    listed = [(token, index) for index, token in enumerate(tokens) if real[index]]
    added = {token: index for token, index in listed if types[index] in (CONTROL, USER_DEFINED, UNKNOWN)}
    strips = _stripping(head, added)
    parts = _byte_level(head, listed) if kind == "gpt2" else _spaced(head, listed, types, scores, ids)
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(token, index, types[index], token in strips) for token, index in added.items()],
        **parts,
        "post_processor": _template_around(head, tokens, ids),
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": head.count("context_length"),
        **{f"{role}_token": tokens[number] for role, number in ids.items() if role in NAMED_ROLES},
    }
    retyped = [token for token, index in listed if types[index] != file_types[index]]
    return ImportedTokenizer(content, settings, ids, ends, chat_templates(head), tokens, retyped)


def _added(token: str, index: int, kind: int, strips: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": strips, "normalized": False}
    return {"id": index, "content": token, **flags, "special": kind != USER_DEFINED}


def _ids(head: FileHead, tokens: Sequence[str], types: Sequence[int]) -> dict[str, int]:
    """Return the ids that the file names, by role, and always an eos.

    If the file names no eos, a token is used whose name llama.cpp takes for an end. The next choice is llama.cpp's
    default, if that is a control token. In most vocabularies of BPE the default is a comma.
    """
    ids: dict[str, int] = {}
    for role in (*NAMED_ROLES, *TURN_ENDS, *FILL_ROLES):
        number = head.values.get(token_key(role), NO_TOKEN)
        if number != NO_TOKEN:
            ids[role] = number
    if "eos" not in ids:
        default = stated_ends(head).eos or 0
        known = [number for number, token in enumerate(tokens) if token in END_NAMES]
        known += [default] if default < len(tokens) and types[default] == CONTROL else []
        if not known:
            head.refuse("it names no token that ends a text (tokenizer.ggml.eos_token_id)")
        ids["eos"] = known[0]
    return ids


def _stripping(head: FileHead, added: Mapping[str, int]) -> set[str]:
    """Return the tokens that remove the spaces after them, for models that llama.cpp recognises by name."""
    name = (head.text("general.name") or "").lower()
    return added.keys() - {"<unk>", "<s>", "<|endoftext|>"} if "phi-3" in name or "phi3" in name else set()


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
        space = merge.find(" ", 1)  # A part may begin with a space.
        left, right = merge[:space], merge[space + 1 :]
        if space < 0 or left + right not in vocabulary or left not in vocabulary or right not in vocabulary:
            head.refuse(f"merge {merge!r:.40} joins strings that are not tokens", "copy the file again")
        merges.append([left, right])
    return {
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer_of(PRE_STEPS[pre]),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {**PLAIN_BPE, "ignore_merges": pre in IGNORE_MERGES, "vocab": dict(listed), "merges": merges},
    }


def _spaced(
    head: FileHead, listed: list[tuple[str, int]], types: list[Any], scores: list[Any], ids: Mapping[str, int]
) -> dict[str, Any]:
    """Return the parts of tokenizer.json for SentencePiece BPE.

    llama.cpp merges the pair whose token has the highest score. Hugging Face merges the pair that is listed first, so
    the pairs are sorted by score.
    """
    merged = {token: index for token, index in listed if types[index] not in (CONTROL, UNKNOWN, BYTE)}
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
            **PLAIN_BPE,
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": dict(listed),
            "merges": [[left, right] for *_, left, right in pairs],
        },
    }


def _template_around(head: FileHead, tokens: list[str], ids: Mapping[str, int]) -> dict[str, Any] | None:
    """Return the post-processor that adds bos before and eos after a text, if the file or llama.cpp adds them."""
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


def chat_templates(head: FileHead) -> dict[str, str]:
    """Return the chat templates of a file by name. The main one is `default`."""
    start = "tokenizer.chat_template"
    named = (key.removeprefix(f"{start}.") for key in head.values if key.startswith(f"{start}."))
    templates = {"default": head.text(start), **{name: head.text(f"{start}.{name}") for name in named}}
    wrong = [name for name in templates if not name.replace("_", "").replace("-", "").isalnum()]
    if wrong:
        head.refuse(f"chat template {wrong[0]!r:.40} has a name that no file can have", "copy the file again")
    if len(templates) > 1 and templates["default"] is None:
        head.refuse("it has no main chat template (tokenizer.chat_template)", "copy the file again")
    return {name: text for name, text in templates.items() if text is not None}
