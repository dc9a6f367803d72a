"""The tokenizer of a folder: its files, and the bytes, kind and role of each token by id.

Two families are supported: byte-level BPE and SentencePiece (`byte_map`). In both, an added token stands for its
plain text.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from distill.checkpoints import check_tokenizer
from distill.errors import DataError, DistillError
from distill.files import has_form, kind_of, read_object

# ── The files of a Hugging Face tokenizer, with the forms checked that every reader relies on ──

COPY_TOKENIZER = "copy the tokenizer again"
SUPPORTED = "byte-level BPE and SentencePiece BPE are supported"
ADDED: dict[Any, Any] = {"id": int, "content": str}  # the form of an added token
PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding")
# Each byte step doubles all characters that are not ASCII, so that a short text could fill the memory. Real tokenizers
# have one.
MAX_BYTE_STEPS = 4
_ID = re.compile("[0-9]{1,7}")


def tokenizer_content(path: Path) -> dict[str, Any]:
    """Return the object in a tokenizer.json, with the forms of tokens checked. DataError for a damaged file."""
    content = read_object(path)
    content["model"] = content.get("model") or {}
    content["added_tokens"] = content.get("added_tokens") or []
    if not has_form(content, {"model": dict, "added_tokens": [ADDED]}):
        raise DataError(f"{path} is damaged: `model` or `added_tokens` has a wrong type", COPY_TOKENIZER)
    parts = [key for key in PARTS if not isinstance(content.get(key) or {}, dict)]
    if parts:
        raise DataError(
            f"{path} is damaged: {parts[0]} must be an object, got {kind_of(content[parts[0]])}", COPY_TOKENIZER
        )
    if json.dumps(content.get("pre_tokenizer")).count('"ByteLevel"') > MAX_BYTE_STEPS:
        raise DataError(
            f"{path} is damaged: its pre_tokenizer maps bytes more than {MAX_BYTE_STEPS} times", COPY_TOKENIZER
        )
    words, merges = content["model"].get("vocab"), content["model"].get("merges") or []
    kind = content["model"].get("type") or "BPE"
    if kind != "BPE":
        raise DataError(f"{path} is a {kind} model, which is not supported", SUPPORTED)
    if not has_form(words, {...: int}):
        raise DataError(f"{path} is damaged: it has no vocabulary of tokens and their ids", COPY_TOKENIZER)
    if not isinstance(merges, list) or not all(isinstance(merge, str) or _is_pair(merge) for merge in merges):
        raise DataError(f"{path} is damaged: a merge is not a pair of tokens", COPY_TOKENIZER)
    require_dense(path, [*words.values(), *(token["id"] for token in content["added_tokens"])])
    refuse_tables(path, content)
    return content


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json of a folder, or {} if there is none. DataError for a damaged file."""
    path = folder / "tokenizer_config.json"
    settings = read_object(path, COPY_TOKENIZER) if path.is_file() else {}
    later, named = settings.get("added_tokens_decoder"), settings.get("tokenizer_class")
    decoded = later is None or (has_form(later, {...: {"content": str}}) and all(map(_ID.fullmatch, later)))
    template = settings.get("chat_template")
    templates = template is None or isinstance(template, str) or has_form(template, [{"name": str, "template": str}])
    whole = {
        "added_tokens_decoder": decoded,
        "tokenizer_class": named is None or isinstance(named, str),
        "chat_template": templates,
    }
    wrong = next((key for key, right in whole.items() if not right), None)
    if wrong is not None:
        raise DataError(f"{path} is damaged: {wrong} has a wrong type", COPY_TOKENIZER)
    check_tokenizer(path, settings)
    return settings


def named_settings(folder: Path) -> dict[str, Any]:
    """Return the tokenizer's settings that have a value. tokenizer_config.json wins over special_tokens_map.json."""
    special = folder / "special_tokens_map.json"
    settings = {**(read_object(special) if special.is_file() else {}), **tokenizer_settings(folder)}
    return {key: value for key, value in settings.items() if value is not None}


def content_of(token: Any) -> str | None:
    """Return the string of a token in a tokenizer's settings, which is a string or an object with `content`."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def require_dense(path: Path, ids: Collection[int]) -> None:
    """Raise DataError for ids far above their number, because lists have a row for each id."""
    if ids and not 0 <= min(ids) <= max(ids) <= 4 * len(ids) + 2**16:
        raise DataError(f"{path} is damaged: {len(ids)} tokens have ids from {min(ids)} to {max(ids)}", COPY_TOKENIZER)


def merge_pairs(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the merges of a BPE. Older files write them as texts with a space between the two tokens."""
    pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model.get("merges") or [])
    return [(left, right) for left, right in pairs]


def _is_pair(value: Any) -> bool:
    return has_form(value, [str]) and len(value) == 2


def open_tokenizer(path: Path, without: Collection[str] = ()) -> Tokenizer:
    """Load a tokenizer.json, with the bos and eos around a text that the folder's settings request.

    Truncation, padding and dropout of merges are removed, so that texts of any length get the same ids every time.
    Added tokens in `without` are read as text. Raises DataError if the file cannot be loaded.
    """
    try:
        with without_panic(str(path)):
            refuse_tables(path)
            if without:
                content = tokenizer_content(path)
                content["added_tokens"] = [
                    token for token in content["added_tokens"] if token["content"] not in without
                ]
                tokenizer = Tokenizer.from_str(json.dumps(content))
            else:
                tokenizer = Tokenizer.from_file(str(path))
            tokenizer.no_truncation()
            tokenizer.no_padding()
            model: Any = tokenizer.model
            if getattr(model, "dropout", None):
                model.dropout = None
            _set_ends(tokenizer, path.parent)
    except DistillError:
        raise
    except Exception as error:  # tokenizers raises the bare class for every kind of damage.
        raise DataError(f"{path} cannot be loaded: {error}", COPY_TOKENIZER) from None
    return tokenizer


def _set_ends(tokenizer: Any, folder: Path) -> None:
    """Follow add_bos_token and add_eos_token of the settings if the post-processor does something else.

    transformers from 5.0 on ignores both next to a tokenizer.json. llama.cpp's converter and older releases read both.
    """
    settings, around = named_settings(folder), added_around(tokenizer)
    if around is None:
        return
    sides = list(around)
    for index, role in enumerate(("bos", "eos")):
        asked, name = settings.get(f"add_{role}_token"), content_of(settings.get(f"{role}_token"))
        number = None if name is None else tokenizer.token_to_id(name)
        if asked is False:
            sides[index] = []
        elif asked is True and not sides[index] and number is not None:
            sides[index] = [number]
    if sides == list(around):
        return
    names = {number: tokenizer.id_to_token(number) for side in sides for number in side}
    before, after = ([names[number] for number in side] for side in sides)
    single, pair = [*before, "$A", *after], [*before, "$A", *after, *before, "$B", *after]
    tokenizer.post_processor = TemplateProcessing(
        single=single, pair=pair, special_tokens=[(name, number) for number, name in names.items()]
    )


@contextlib.contextmanager
def without_panic(what: str) -> Iterator[None]:
    """Within the context, turn a panic of tokenizers' Rust code into a DataError. A panic is no Python Exception."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{what} cannot be loaded: its parts do not fit together", COPY_TOKENIZER) from None


def added_around(tokenizer: Any) -> tuple[list[int], list[int]] | None:
    """Return the ids that the post-processor puts before and after a text, or None if it changes the text itself."""
    alone, whole = (tokenizer.encode("a", add_special_tokens=added).ids for added in (False, True))
    return ids_around(alone, whole)


def ids_around(alone: list[int], whole: list[int]) -> tuple[list[int], list[int]] | None:
    """Return the ids before and after `alone` in `whole`, or None if `alone` is absent."""
    for start in range(len(whole) - len(alone) + 1):
        if whole[start : start + len(alone)] == alone:
            return whole[:start], whole[start + len(alone) :]
    return None


def with_opening(ids: list[int], opening: list[int]) -> list[int]:
    """Return a text's ids after the ids that its tokenizer puts before texts. A text that starts with them stays."""
    return ids if ids[: len(opening)] == opening else [*opening, *ids]


_MEDIA = re.compile("image|img|audio|video|vision", re.IGNORECASE)


def model_rows(folder: Path) -> int | None:
    """Return the rows of the model in the tokenizer's folder (`vocab_size` in config.json), or None if unknown."""
    path = folder / "config.json"
    config = read_object(path) if path.is_file() else {}
    inner = config.get("text_config")
    rows = (inner if isinstance(inner, dict) else {}).get("vocab_size", config.get("vocab_size"))
    return rows if isinstance(rows, int) and not isinstance(rows, bool) and rows > 0 else None


def tokens_without_row(folder: Path, ids: Mapping[str, int], special: Collection[str], rows: int | None) -> set[str]:
    """Return the markers of images and sounds among the tokens `ids` for which a model of `rows` rows has no row.

    Text models keep such markers in their tokenizer (Gemma 3) and read them as text. Raises DataError, with the names,
    for other tokens without a row, because the model cannot read them.
    """
    beyond = {token: number for token, number in ids.items() if rows is not None and number >= rows}
    media = {token for token in beyond if token in special and _MEDIA.search(token)}
    if wrong := sorted((number, token) for token, number in beyond.items() if token not in media):
        named = ", ".join(f"{token!r} ({number})" for number, token in wrong[:5])
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise DataError(
            f"{folder}: tokens of the tokenizer have no row in the model, which has {rows} (vocab_size): {named}{more}",
            "copy the model's own tokenizer, remove the tokens from tokenizer.json and tokenizer_config.json, or give "
            "them rows and train the rows: model.resize_token_embeddings(len(tokenizer))",
        )
    return media


def opening_of(tokenizer: Any) -> list[int]:
    """Return the ids that a tokenizer of transformers puts before a text: bos, if its files ask for it."""
    both = [tokenizer("a", add_special_tokens=added, verbose=False)["input_ids"] for added in (False, True)]
    around = ids_around(*both)
    return around[0] if around else []


def follow_file(tokenizer: Any, folder: Path) -> None:
    """Make a tokenizer of transformers give the ids of its folder's tokenizer.json, if there is one.

    This undoes transformers' changes to flags of added tokens, add_bos_token and fix_mistral_regex. Raises DataError
    for tokens without a row in the model.
    """
    added = tokenizer.added_tokens_decoder.values()
    special = {token.content for token in added if token.special}
    rowless = tokens_without_row(folder, tokenizer.get_vocab(), special, model_rows(folder))
    if (path := folder / "tokenizer.json").is_file():
        backend = open_tokenizer(path, without=rowless)
        known = {*backend.get_vocab(), *rowless}
        backend.add_tokens([token for token in added if token.content not in known])
        tokenizer._tokenizer, tokenizer.split_special_tokens = backend, False


def refuse_tables(path: Path, content: Any = None) -> None:
    """Raise DataError for a tokenizer.json with a table of replacements. `content` is the file's object, if known.

    Such tables (`precompiled_charsmap`) belong to Unigram tokenizers. tokenizers does not check their offsets, and an
    offset outside the table ends the process.
    """
    if content is None:
        if not path.is_file() or b"Precompiled" not in path.read_bytes():
            return
        content = read_object(path, COPY_TOKENIZER)
    if '"Precompiled"' in json.dumps(content.get("normalizer")):
        raise DataError(f"{path}: a table of replacements (Precompiled) is not supported", SUPPORTED)


# ── How the two families of tokenizers write bytes as characters ──
# Byte-level BPE writes every byte as a printable character (GPT-2's byte map). SentencePiece writes a space as ▁, and
# bytes that no other token covers as <0xNN>.

SPACE = "▁"
# Bytes that valid UTF-8 never contains. Real vocabularies may lack them and can still write every text.
NEVER_IN_UTF8 = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})
# Bytes that texts rarely contain and real vocabularies lack (SmolLM2 lacks eight of them): control characters except
# tab, line feed and carriage return, and the first bytes of planes that Unicode has not assigned.
RARE = frozenset({*range(0x09), 0x0B, 0x0C, *range(0x0E, 0x20), 0x7F, 0xF1, 0xF2})


def _byte_map() -> tuple[str, ...]:
    """Return the character that stands for each byte in byte-level BPE (GPT-2's `bytes_to_unicode`)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte) if byte in printable else chr(next(others)) for byte in range(256))


BYTE_MAP = _byte_map()
_TO_MAPPED = str.maketrans({chr(byte): character for byte, character in enumerate(BYTE_MAP)})
# Back to Latin-1. Characters below 256 that stand for no byte become a character that Latin-1 cannot encode.
_FROM_MAPPED = str.maketrans(
    {chr(code): "\uffff" for code in range(256)} | {character: chr(byte) for byte, character in enumerate(BYTE_MAP)}
)


def to_mapped(data: bytes) -> str:
    """Write bytes as byte-level BPE does."""
    return data.decode("latin-1").translate(_TO_MAPPED)


def from_mapped(token: str) -> bytes:
    """Return the bytes of a byte-level token. A token with characters outside the byte map is plain text."""
    try:
        return token.translate(_FROM_MAPPED).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


# ── Roles of special tokens: their names, their tokens, and the counterparts in two vocabularies ──

# transformers adds roles that tokenizer.json lacks in this order.
NAMED_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
# Fill-in-the-middle tokens of Qwen, StarCoder and Granite, SantaCoder, DeepSeek, CodeLlama, Falcon, Codestral and GLM.
FILL = {
    word: (
        *(f"<|fim_{word}|>", f"<fim-{word}>", f"<fim_{word}>", f"<｜fim▁{place}｜>", f"<{short}>", f"▁<{short}>"),
        *(f"<|code_{word}|>", f"<|{word}|>"),
    )
    for word, place, short in (("prefix", "begin", "PRE"), ("suffix", "hole", "SUF"), ("middle", "end", "MID"))
}
# Names of tokens in families of models, by role. The first name that a vocabulary has takes the role.
MARKERS: dict[str, tuple[str, ...]] = {
    "turn_end": (
        *("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|END_OF_TURN_TOKEN|>", "<|eot|>", "<|EOT|>"),
        *("<|endofturn|>", "<|end_of_turn|>", "<end_of_utterance>", "<turn|>"),
    ),
    "turn_start": (
        *("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "<|START_OF_TURN_TOKEN|>", "<|header_start|>"),
        *("<|start_of_role|>", "<|start|>", "<|turn>"),
    ),
    "header_end": ("<|end_header_id|>", "<|header_end|>", "<|end_of_role|>", "<|message|>", "<|im_sep|>"),
    "system": ("<|system|>", "<|SYSTEM_TOKEN|>", "[SYSTEM_PROMPT]"),
    "user": ("<|user|>", "<|USER_TOKEN|>", "<｜User｜>", "<|User|>", "[INST]"),
    "assistant": ("<|assistant|>", "<|CHATBOT_TOKEN|>", "<｜Assistant｜>", "<|Assistant|>", "[/INST]"),
    **{f"fim_{word}": (*names, f">>{word.upper()}<<", f"[{word.upper()}]") for word, names in FILL.items()},
    "fim_pad": ("<|fim_pad|>", "<fim_pad>", "<fim-pad>"),
    "repository": ("<|repo_name|>", "<repo_name>", "<reponame>", "<|fim_repo|>", "<fim-repo>", "<REPO>"),
    "file": ("<|file_sep|>", "<file_sep>"),
}
# If a token has several roles, the first of these counts. Markers come before the roles in a tokenizer's settings,
# because eos is often the end of a turn.
ROLE_ORDER = (*MARKERS, "eos", "bos", "unk", "pad", "sep", "cls", "mask")


def roles_in(ids: Mapping[str, int], settings: Mapping[str, Any], unknown: str | None) -> dict[str, int]:
    """Return role -> id: the roles in the tokenizer's settings, the model's unknown token, then the markers."""
    named = {role: content_of(settings.get(f"{role}_token")) or "" for role in NAMED_ROLES}
    roles = {role: ids[name] for role, name in named.items() if name in ids}
    if unknown and unknown in ids:
        roles.setdefault("unk", ids[unknown])
    for role, names in MARKERS.items():
        marker = next((name for name in names if name in ids), None)
        if marker is not None:
            roles[role] = ids[marker]
    return roles


def named_id(
    role: str, settings: Mapping[str, Any], config: Mapping[str, Any], ids: Mapping[str, int], rows: int
) -> int | None:
    """Return the id of bos, eos or pad in a model of `rows` rows, or None if the files name none.

    The token in tokenizer_config.json (`settings`) wins over the number in config.json (the first of several).
    """
    key = f"{role}_token_id"
    number = config.get(key, (config.get("text_config") or {}).get(key))
    number = number[0] if isinstance(number, list) and number else number
    token = content_of(settings.get(f"{role}_token"))
    number = number if token is None else ids.get(token, number)
    return number if isinstance(number, int) and 0 <= number < rows else None


def role_counterparts(source: Mapping[str, int], destination: Mapping[str, int]) -> list[tuple[int, int]]:
    """Return pairs of ids with the same role in two vocabularies. If a source id has several pairs, the last counts."""
    both = [role for role in reversed(ROLE_ORDER) if role in source and role in destination]
    return [(source[role], destination[role]) for role in both]


def stand_ins(source: Mapping[str, int], destination: Mapping[str, int]) -> dict[int, int]:
    """Map the source's bos and pad to the destination's eos, if the destination lacks these roles.

    In models without bos or pad, the token that ends a text also stands before the next text, and pads.
    """
    if "eos" not in destination:
        return {}
    return {source[role]: destination["eos"] for role in ("bos", "pad") if role in source and role not in destination}


# ── The vocabulary of a folder ──

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CONTROL = re.compile(r"[<\[].+[>\]]", re.DOTALL)


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a tokenizer folder, by id from 0 to `size` - 1.

    `family` is "byte-level" or "sentencepiece". `tokens` are the strings of tokenizer.json, or None for a missing id.
    `bytes_of` are the bytes that they stand for. `kinds` are normal, special, byte (<0xNN>), added (an added token
    without the special flag) or unused (a missing id). `roles` map bos, eos, unk, sep, pad, cls, mask and the names in
    MARKERS to ids.
    """

    folder: Path
    family: str
    tokens: tuple[str | None, ...]
    bytes_of: tuple[bytes | None, ...]
    kinds: tuple[str, ...]
    roles: Mapping[str, int]

    @classmethod
    def read(cls, folder: Path) -> Vocabulary:
        """Read a tokenizer folder.

        Raises DataError if it is missing, damaged or of an unknown kind, or has tokens without a row in the folder's
        model.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise DataError(
                f"{folder} has no tokenizer.json",
                "give the folder of a fast tokenizer; "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...) writes one",
            )
        content, settings = tokenizer_content(path), named_settings(folder)
        model = content["model"]
        family = _family(path, content, model)
        by_id, added = _tokens(path, content, model, settings)
        ids = {token: number for number, token in by_id.items()}
        special = {token["content"] for token in added.values() if token.get("special")}
        for token in tokens_without_row(folder, ids, special, model_rows(folder)):
            del by_id[ids.pop(token)]
        roles = roles_in(ids, settings, content_of(model.get("unk_token")))
        tokens = tuple(by_id.get(number) for number in range(max(by_id) + 1))
        # Tokens that the settings name are special even without the flag, but an ordinary token may serve as padding.
        serving = {roles[role] for role in NAMED_ROLES if role in roles}
        byte_tokens = bool(model.get("byte_fallback")) or "ByteFallback" in _steps(content.get("decoder"))
        kinds = tuple(_kind(number, token, added, serving, byte_tokens) for number, token in enumerate(tokens))
        normalise = _normaliser(path, content, added)
        bytes_of = tuple(
            None if token is None else _bytes(token, kind, family, added.get(number), normalise)
            for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        )
        return cls(folder, family, tokens, bytes_of, kinds, roles)

    @property
    def size(self) -> int:
        """Number of ids, including the missing ones."""
        return len(self.tokens)

    @cached_property
    def index(self) -> dict[str, int]:
        """Token string -> id."""
        return {token: number for number, token in enumerate(self.tokens) if token is not None}

    @cached_property
    def by_bytes(self) -> dict[bytes, int]:
        """Bytes -> best id: a normal token, then <0xNN>, then an added token. Special tokens never count."""
        ids: dict[bytes, int] = {}
        for kind in ("added", "byte", "normal"):  # Later kinds win. Within a kind, the lowest id wins.
            for number in range(self.size - 1, -1, -1):
                data = self.bytes_of[number]
                if data and self.kinds[number] == kind:
                    ids[data] = number
        return ids

    @cached_property
    def byte_ids(self) -> dict[int, int]:
        """Byte -> id of the token that stands for this byte alone.

        Some byte-level vocabularies have added tokens for bytes that UTF-8 never uses, named by the byte's character.
        """
        ids: dict[int, int] = {}
        for byte in range(256):
            number = self.by_bytes.get(bytes([byte]))
            if number is None and self.family == "byte-level":
                number = self.index.get(BYTE_MAP[byte])
            if number is not None:
                ids[byte] = number
        return ids

    @property
    def missing_bytes(self) -> list[int]:
        """Bytes of valid UTF-8 for which no single token exists."""
        return [byte for byte in range(256) if byte not in self.byte_ids and byte not in NEVER_IN_UTF8]

    def text_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the bytes of `ids`, joined. An id without a token adds none."""
        return b"".join(self.bytes_of[number] or b"" for number in ids if 0 <= number < self.size)

    def shown(self, number: int) -> str:
        """Return a token for a message: the text it stands for, not the characters by which byte-level BPE writes it.

        Bytes that are not UTF-8 appear as \\xNN.
        """
        data = self.bytes_of[number]
        return f"[{number}]" if data is None else data.decode("utf-8", "backslashreplace")

    def find(self, text: str) -> int | None:
        """Return the token with this string in tokenizer.json, or with this text, or None."""
        return self.index.get(text, self.by_bytes.get(text.encode()))

    def is_named(self, number: int) -> bool:
        """Whether a token is special or added, and therefore found in a text by its name."""
        return self.kinds[number] in ("special", "added")

    def is_text(self, number: int) -> bool:
        """Whether a token stands for bytes of a text."""
        return bool(self.bytes_of[number]) and self.kinds[number] in ("normal", "byte", "added")

    def same_as(self, other: Vocabulary) -> bool:
        """Whether every id is the same token with the same roles in both vocabularies."""
        return replace(self, folder=other.folder) == other


def _steps(part: Any) -> set[str]:
    """Return the types of a normalizer, pre-tokenizer or decoder and of everything inside it."""
    if isinstance(part, list):
        return {kind for inner in part for kind in _steps(inner)}
    if not isinstance(part, dict):
        return set()
    types = {part["type"]} if isinstance(part.get("type"), str) else set()
    return types | {kind for inner in part.values() for kind in _steps(inner)}


def _family(path: Path, content: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise DataError(f"{path} marks words with {key} = {model[key]!r}, which is not supported", SUPPORTED)
    parts = [content.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")]
    steps = {kind for part in parts for kind in _steps(part)}
    if "ByteLevel" in steps:
        return "byte-level"
    written = json.dumps(parts, ensure_ascii=False)
    if model.get("byte_fallback") or SPACE in written:
        if "Metaspace" in steps and SPACE not in written:
            raise DataError(f"{path} writes a space as another character than {SPACE}", SUPPORTED)
        return "sentencepiece"
    raise DataError(f"{path} is a BPE that maps neither bytes nor spaces", SUPPORTED)


def _tokens(
    path: Path, content: Mapping[str, Any], model: Mapping[str, Any], settings: Mapping[str, Any]
) -> tuple[dict[int, str], dict[int, dict[str, Any]]]:
    """Return strings by id, and added tokens by id, as transformers has them after loading the folder."""
    by_id = {int(number): str(token) for token, number in model["vocab"].items()}
    added: dict[int, dict[str, Any]] = {}
    later = settings.get("added_tokens_decoder") or {}
    for token in [*({"id": int(number), **entry} for number, entry in later.items()), *content["added_tokens"]]:
        added[token["id"]] = token
    by_id |= {number: token["content"] for number, token in added.items()}
    if not by_id:
        raise DataError(f"{path} holds no tokens", COPY_TOKENIZER)
    require_dense(path, by_id)
    known = set(by_id.values())
    for role in NAMED_ROLES:
        name = content_of(settings.get(f"{role}_token"))
        if name is not None and name not in known:
            number = max(by_id) + 1
            by_id[number], added[number] = name, {"id": number, "content": name, "special": True}
            known.add(name)
    return by_id, added


def _kind(
    number: int, token: str | None, added: Mapping[int, Mapping[str, Any]], serving: set[int], byte_tokens: bool
) -> str:
    if token is None:
        return "unused"
    if (number in added and added[number].get("special")) or (number in serving and _CONTROL.fullmatch(token)):
        return "special"
    if number in added:
        return "added"
    return "byte" if byte_tokens and _BYTE_TOKEN.fullmatch(token) else "normal"


def _normaliser(
    path: Path, content: Mapping[str, Any], added: Mapping[int, Mapping[str, Any]]
) -> Callable[[str], str] | None:
    """Return the tokenizer's normaliser if added tokens are matched in normalised text, or None."""
    part = content.get("normalizer")
    if part is None or "ByteLevel" in _steps(part) or not any(token.get("normalized") for token in added.values()):
        return None
    return open_tokenizer(path).normalizer.normalize_str


def _bytes(
    token: str, kind: str, family: str, added: Mapping[str, Any] | None, normalise: Callable[[str], str] | None
) -> bytes:
    if kind == "byte":
        return bytes([int(token[3:5], 16)])
    if kind == "special":
        return token.encode()
    if added is not None:
        if normalise is not None and added.get("normalized"):
            token = normalise(token)  # The token is matched in normalised text, so it stands for that text.
        return (token.replace(SPACE, " ") if family == "sentencepiece" else token).encode()
    return from_mapped(token) if family == "byte-level" else token.replace(SPACE, " ").encode()
