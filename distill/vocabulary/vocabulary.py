"""The tokenizer of a folder: its files, and its tokens by id: their bytes, kinds and roles, from tokenizer.json and
tokenizer_config.json.

Two families are supported: byte-level BPE and SentencePiece (`byte_map`). In both, an added token stands for its own
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

AGAIN = "copy the tokenizer again"
SUPPORTED = "byte-level BPE and SentencePiece BPE are supported"
ADDED: dict[Any, Any] = {"id": int, "content": str}  # the form of an added token
PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding")
MAX_BYTE_STEPS = 4  # each doubles what is no ASCII, so that a short text fills the memory; real tokenizers have one
_ID = re.compile("[0-9]{1,7}")


def tokenizer_content(path: Path) -> dict[str, Any]:
    """The object in a tokenizer.json, with the forms of tokens checked; raises DataError for a damaged file."""
    content = read_object(path)
    content["model"] = content.get("model") or {}
    content["added_tokens"] = content.get("added_tokens") or []
    if not has_form(content, {"model": dict, "added_tokens": [ADDED]}):
        raise DataError(f"{path} is damaged: `model` or `added_tokens` is of another kind", AGAIN)
    parts = [key for key in PARTS if not isinstance(content.get(key) or {}, dict)]
    if parts:
        raise DataError(f"{path} is damaged: {parts[0]} must be an object, got {kind_of(content[parts[0]])}", AGAIN)
    if json.dumps(content.get("pre_tokenizer")).count('"ByteLevel"') > MAX_BYTE_STEPS:
        raise DataError(f"{path} is damaged: its pre_tokenizer maps bytes more than {MAX_BYTE_STEPS} times", AGAIN)
    words, merges = content["model"].get("vocab"), content["model"].get("merges") or []
    kind = content["model"].get("type") or "BPE"
    if kind != "BPE":
        raise DataError(f"{path} is a {kind} model, which is not supported", SUPPORTED)
    if not has_form(words, {...: int}):
        raise DataError(f"{path} is damaged: it has no vocabulary of tokens and their ids", AGAIN)
    if not isinstance(merges, list) or not all(isinstance(merge, str) or _is_pair(merge) for merge in merges):
        raise DataError(f"{path} is damaged: a merge is a pair of tokens", AGAIN)
    require_dense(path, [*words.values(), *(token["id"] for token in content["added_tokens"])])
    refuse_tables(path, content)
    return content


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json of a folder, {} where there is none; raises DataError for a damaged one."""
    path = folder / "tokenizer_config.json"
    settings = read_object(path, AGAIN) if path.is_file() else {}
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
        raise DataError(f"{path} is damaged: {wrong} is of another kind", AGAIN)
    check_tokenizer(path, settings)
    return settings


def named_settings(folder: Path) -> dict[str, Any]:
    """The tokenizer's settings that have a value; tokenizer_config.json before special_tokens_map.json."""
    special = folder / "special_tokens_map.json"
    settings = {**(read_object(special) if special.is_file() else {}), **tokenizer_settings(folder)}
    return {key: value for key, value in settings.items() if value is not None}


def content_of(token: Any) -> str | None:
    """The string of a token in a tokenizer's settings, where it may stand alone or as an object with `content`."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def require_dense(path: Path, ids: Collection[int]) -> None:
    """Raise DataError for ids far beyond their number: they are the rows of lists."""
    if ids and not 0 <= min(ids) <= max(ids) <= 4 * len(ids) + 2**16:
        raise DataError(f"{path} is damaged: {len(ids)} tokens have ids from {min(ids)} to {max(ids)}", AGAIN)


def merge_pairs(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The merges of a BPE, which older files write as texts with a space between the two tokens."""
    pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model.get("merges") or [])
    return [(left, right) for left, right in pairs]


def _is_pair(value: Any) -> bool:
    return has_form(value, [str]) and len(value) == 2


def open_tokenizer(path: Path, without: Collection[str] = ()) -> Tokenizer:
    """The tokenizer of a tokenizer.json, with the bos and eos around a text that the settings beside it ask for.

    It makes texts of any length: truncation and padding are left out, and so is a dropout of merges. Added tokens in
    `without` are read as text. Raises DataError where it cannot be loaded.
    """
    try:
        with without_panic(str(path)):
            refuse_tables(path)
            if without:
                content = tokenizer_content(path)
                content["added_tokens"] = [one for one in content["added_tokens"] if one["content"] not in without]
                tokenizer = Tokenizer.from_str(json.dumps(content))
            else:
                tokenizer = Tokenizer.from_file(str(path))
            tokenizer.no_truncation()
            tokenizer.no_padding()
            model: Any = tokenizer.model
            if getattr(model, "dropout", None):
                model.dropout = None  # the same tokens every time
            _set_ends(tokenizer, path.parent)
    except DistillError:
        raise
    except Exception as error:  # tokenizers raises the bare class for every kind of damage
        raise DataError(f"{path} cannot be loaded: {error}", AGAIN) from None
    return tokenizer


def _set_ends(tokenizer: Any, folder: Path) -> None:
    """Follow add_bos_token and add_eos_token of the settings where the post-processor does otherwise.

    transformers from 5.0 on reads neither beside a tokenizer.json, llama.cpp's converter and older releases read both.
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
    """Within a `with` block, turn a panic of tokenizers' Rust code, which is no Python Exception, into a DataError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{what} cannot be loaded: its parts do not fit together", AGAIN) from None


def added_around(tokenizer: Any) -> tuple[list[int], list[int]] | None:
    """The ids that a tokenizer's post-processor puts before and after a text; None where it changes the text itself."""
    alone, whole = (tokenizer.encode("a", add_special_tokens=added).ids for added in (False, True))
    return ids_around(alone, whole)


def ids_around(alone: list[int], whole: list[int]) -> tuple[list[int], list[int]] | None:
    """What stands before and after the ids `alone` in `whole`; None where they do not stand there."""
    for start in range(len(whole) - len(alone) + 1):
        if whole[start : start + len(alone)] == alone:
            return whole[:start], whole[start + len(alone) :]
    return None


def with_opening(ids: list[int], opening: list[int]) -> list[int]:
    """The ids of a text after what its tokenizer puts before it, once where the text itself begins with that."""
    return ids if ids[: len(opening)] == opening else [*opening, *ids]


_MEDIA = re.compile("image|img|audio|video|vision", re.IGNORECASE)


def model_rows(folder: Path) -> int | None:
    """The rows of the model beside a tokenizer (`vocab_size` of its config.json); None where that names none."""
    path = folder / "config.json"
    config = read_object(path) if path.is_file() else {}
    inner = config.get("text_config")
    rows = (inner if isinstance(inner, dict) else {}).get("vocab_size", config.get("vocab_size"))
    return rows if isinstance(rows, int) and not isinstance(rows, bool) and rows > 0 else None


def tokens_without_row(folder: Path, ids: Mapping[str, int], special: Collection[str], rows: int | None) -> set[str]:
    """The markers of images and sounds among the tokens `ids` that a model of `rows` rows has no row for.

    Models of text alone keep them in their tokenizer (Gemma 3), and read them as text. Raises DataError with the names
    of all other tokens without a row: the model cannot read them.
    """
    beyond = {token: number for token, number in ids.items() if rows is not None and number >= rows}
    media = {token for token in beyond if token in special and _MEDIA.search(token)}
    if wrong := sorted((number, token) for token, number in beyond.items() if token not in media):
        named = ", ".join(f"{token!r} ({number})" for number, token in wrong[:5])
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise DataError(
            f"{folder}: tokens of the tokenizer have no row in the model, which has {rows} (vocab_size): {named}{more}",
            "copy the model's own tokenizer, take the tokens out of tokenizer.json and tokenizer_config.json, or give "
            "them rows and train those: model.resize_token_embeddings(len(tokenizer))",
        )
    return media


def opening_of(tokenizer: Any) -> list[int]:
    """The ids that a tokenizer puts before a text: bos, where its files ask for one."""
    both = [tokenizer("a", add_special_tokens=added, verbose=False)["input_ids"] for added in (False, True)]
    around = ids_around(*both)
    return around[0] if around else []


def follow_file(tokenizer: Any, folder: Path) -> None:
    """Give a tokenizer of transformers the ids of its folder's tokenizer.json, where there is one.

    Without what transformers changes: flags of added tokens, add_bos_token, fix_mistral_regex. Raises DataError for
    tokens without a row in the model.
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
    """Raise DataError for a tokenizer.json with a table of replacements; `content` is what it holds, if that was read.

    Such tables (`precompiled_charsmap`) are of Unigram tokenizers. tokenizers follows their steps unchecked, and ends
    the process on one that leads outside.
    """
    if content is None:
        if not path.is_file() or b"Precompiled" not in path.read_bytes():
            return
        content = read_object(path, AGAIN)
    if '"Precompiled"' in json.dumps(content.get("normalizer")):
        raise DataError(f"{path}: a table of replacements (Precompiled) is not supported", SUPPORTED)


# ── How the two families of tokenizers write bytes as characters ──
# Byte-level BPE writes every byte as a printable character (GPT-2's byte map); SentencePiece writes a space as ▁
# and bytes without a token of their own as <0xNN>.

SPACE = "▁"
# Bytes that no valid UTF-8 holds; real vocabularies leave them out without losing a text.
NEVER_IN_UTF8 = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})
# Bytes that texts hardly hold, and real vocabularies lack (SmolLM2's eight of them): control characters but tab, line
# feed and carriage return, and what begins characters of planes that Unicode has not assigned.
RARE = frozenset({*range(0x09), 0x0B, 0x0C, *range(0x0E, 0x20), 0x7F, 0xF1, 0xF2})


def _byte_map() -> tuple[str, ...]:
    """The character that stands for each byte in byte-level BPE (GPT-2's `bytes_to_unicode`)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte) if byte in printable else chr(next(others)) for byte in range(256))


BYTE_MAP = _byte_map()
_TO_MAPPED = str.maketrans({chr(byte): character for byte, character in enumerate(BYTE_MAP)})
# Back to Latin-1; characters below 256 that stand for no byte become one that Latin-1 cannot encode.
_FROM_MAPPED = str.maketrans(
    {chr(code): "\uffff" for code in range(256)} | {character: chr(byte) for byte, character in enumerate(BYTE_MAP)}
)


def to_mapped(data: bytes) -> str:
    """Bytes as byte-level BPE writes them."""
    return data.decode("latin-1").translate(_TO_MAPPED)


def from_mapped(token: str) -> bytes:
    """The bytes of a byte-level token; a token with characters outside the byte map is plain text."""
    try:
        return token.translate(_FROM_MAPPED).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


# ── Roles of special tokens: their names, the tokens that take them, and the counterparts of two vocabularies ──

# In the order in which transformers adds those that tokenizer.json lacks.
NAMED_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
# Fill in the middle, by Qwen, StarCoder and Granite, SantaCoder, DeepSeek, CodeLlama, Falcon, Codestral and GLM.
FILL = {
    word: (
        *(f"<|fim_{word}|>", f"<fim-{word}>", f"<fim_{word}>", f"<｜fim▁{place}｜>", f"<{short}>", f"▁<{short}>"),
        *(f"<|code_{word}|>", f"<|{word}|>"),
    )
    for word, place, short in (("prefix", "begin", "PRE"), ("suffix", "hole", "SUF"), ("middle", "end", "MID"))
}
# Names under which families of models know a token; the first one that a vocabulary has takes the role.
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
# Of several roles of one token the first counts. Markers come before the roles that a tokenizer's settings name: eos is
# often the end of a turn.
ROLE_ORDER = (*MARKERS, "eos", "bos", "unk", "pad", "sep", "cls", "mask")


def roles_in(ids: Mapping[str, int], settings: Mapping[str, Any], unknown: str | None) -> dict[str, int]:
    """Role to id: those that the tokenizer's settings name, the model's unknown token, then the markers."""
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
    """The id of bos, eos or pad in a model of `rows` rows; None where the files name none.

    The token in tokenizer_config.json (`settings`) comes before the number in config.json (of several the first).
    """
    key = f"{role}_token_id"
    number = config.get(key, (config.get("text_config") or {}).get(key))
    number = number[0] if isinstance(number, list) and number else number
    token = content_of(settings.get(f"{role}_token"))
    number = number if token is None else ids.get(token, number)
    return number if isinstance(number, int) and 0 <= number < rows else None


def role_counterparts(source: Mapping[str, int], destination: Mapping[str, int]) -> list[tuple[int, int]]:
    """Pairs of ids with the same role in two vocabularies' `roles`; of several for one source id the last counts."""
    both = [role for role in reversed(ROLE_ORDER) if role in source and role in destination]
    return [(source[role], destination[role]) for role in both]


def stand_ins(source: Mapping[str, int], destination: Mapping[str, int]) -> dict[int, int]:
    """Eos for the source's bos and pad where the destination has no such token.

    The token that ends a text also stands before the next one, and pads, in models without tokens of their own for it.
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

    `family` is "byte-level" or "sentencepiece". `tokens` are the strings of tokenizer.json, None where an id is
    missing; `bytes_of` the bytes they stand for. Each of `kinds` is normal, special, byte (<0xNN>), added (an added
    token without the special flag) or unused (a missing id). `roles` map bos, eos, unk, sep, pad, cls, mask and the
    names in MARKERS to ids.
    """

    folder: Path
    family: str
    tokens: tuple[str | None, ...]
    bytes_of: tuple[bytes | None, ...]
    kinds: tuple[str, ...]
    roles: Mapping[str, int]

    @classmethod
    def read(cls, folder: Path) -> Vocabulary:
        """Read a tokenizer folder; raises DataError when it is missing, damaged, of an unknown kind, or has tokens
        without a row in the model beside it."""
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
        # Tokens that the settings name are special even without the flag; but an ordinary token may serve as padding.
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
        """Number of ids, the missing ones among them."""
        return len(self.tokens)

    @cached_property
    def index(self) -> dict[str, int]:
        """Token string to id."""
        return {token: number for number, token in enumerate(self.tokens) if token is not None}

    @cached_property
    def by_bytes(self) -> dict[bytes, int]:
        """Bytes to their best id: a normal token before <0xNN> before an added one; never a special token."""
        ids: dict[bytes, int] = {}
        for kind in ("added", "byte", "normal"):  # later ones win; within a kind the lowest id does
            for number in range(self.size - 1, -1, -1):
                data = self.bytes_of[number]
                if data and self.kinds[number] == kind:
                    ids[data] = number
        return ids

    @cached_property
    def byte_ids(self) -> dict[int, int]:
        """Each byte that is a token of its own, to that token.

        Some byte-level vocabularies hold bytes that UTF-8 never uses as added tokens named by the byte's character.
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
        """Bytes of valid UTF-8 that are no token of their own."""
        return [byte for byte in range(256) if byte not in self.byte_ids and byte not in NEVER_IN_UTF8]

    def text_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of `ids`, one after the other; none for an id without a token."""
        return b"".join(self.bytes_of[number] or b"" for number in ids if 0 <= number < self.size)

    def shown(self, number: int) -> str:
        """A token for a message: the text it stands for, and not the letters by which byte-level BPE writes bytes.

        Bytes that are no UTF-8 alone are written as \\xNN.
        """
        data = self.bytes_of[number]
        return f"[{number}]" if data is None else data.decode("utf-8", "backslashreplace")

    def find(self, text: str) -> int | None:
        """The token of this string in tokenizer.json, or else of this text; None where there is none."""
        return self.index.get(text, self.by_bytes.get(text.encode()))

    def is_named(self, number: int) -> bool:
        """Whether a token is special or added: and so found in a text by its name."""
        return self.kinds[number] in ("special", "added")

    def is_text(self, number: int) -> bool:
        """Whether a token stands for bytes of a text."""
        return bool(self.bytes_of[number]) and self.kinds[number] in ("normal", "byte", "added")

    def same_as(self, other: Vocabulary) -> bool:
        """Whether every id is the same token in both, in the same roles."""
        return replace(self, folder=other.folder) == other


def _steps(part: Any) -> set[str]:
    """The types of a normalizer, pre-tokenizer or decoder and of everything inside it."""
    if isinstance(part, list):
        return {kind for inner in part for kind in _steps(inner)}
    if not isinstance(part, dict):
        return set()
    own = {part["type"]} if isinstance(part.get("type"), str) else set()
    return own | {kind for inner in part.values() for kind in _steps(inner)}


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
            raise DataError(f"{path} writes a space by another character than {SPACE}", SUPPORTED)
        return "sentencepiece"
    raise DataError(f"{path} is a BPE that maps neither bytes nor spaces", SUPPORTED)


def _tokens(
    path: Path, content: Mapping[str, Any], model: Mapping[str, Any], settings: Mapping[str, Any]
) -> tuple[dict[int, str], dict[int, dict[str, Any]]]:
    """Strings by id, and the added tokens by id, as transformers has them once it has loaded the folder."""
    by_id = {int(number): str(token) for token, number in model["vocab"].items()}
    added: dict[int, dict[str, Any]] = {}
    later = settings.get("added_tokens_decoder") or {}
    for token in [*({"id": int(number), **entry} for number, entry in later.items()), *content["added_tokens"]]:
        added[token["id"]] = token
    by_id |= {number: token["content"] for number, token in added.items()}
    if not by_id:
        raise DataError(f"{path} holds no tokens", AGAIN)
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
    """The tokenizer's normaliser, where added tokens are matched in text that went through it."""
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
            token = normalise(token)  # the text it stands for is the one it is matched in
        return (token.replace(SPACE, " ") if family == "sentencepiece" else token).encode()
    return from_mapped(token) if family == "byte-level" else token.replace(SPACE, " ").encode()
