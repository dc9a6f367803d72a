"""The tokens of a tokenizer folder by id: their bytes, kinds and roles, from tokenizer.json and tokenizer_config.json.

Two families are supported: byte-level BPE and SentencePiece (`byte_map`). In both, an added token stands for its own
plain text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from distill.errors import DataError
from distill.vocabulary.files import (
    AGAIN,
    SUPPORTED,
    content_of,
    model_rows,
    named_settings,
    open_tokenizer,
    require_dense,
    tokenizer_content,
    tokens_without_row,
)

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
        "<|im_end|>",
        "<|eot_id|>",
        "<end_of_turn>",
        "<|end|>",
        "<|END_OF_TURN_TOKEN|>",
        "<|eot|>",
        "<|EOT|>",
        "<|endofturn|>",
        "<|end_of_turn|>",
        "<end_of_utterance>",
        "<turn|>",
    ),
    "turn_start": (
        "<|im_start|>",
        "<|start_header_id|>",
        "<start_of_turn>",
        "<|START_OF_TURN_TOKEN|>",
        "<|header_start|>",
        "<|start_of_role|>",
        "<|start|>",
        "<|turn>",
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
    token: str,
    kind: str,
    family: str,
    added: Mapping[str, Any] | None,
    normalise: Callable[[str], str] | None,
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
