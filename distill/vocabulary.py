"""What the tokens of a Hugging Face tokenizer mean: their bytes, kinds and roles. No torch here.

Read from tokenizer.json and tokenizer_config.json as `tokenizers` defines them. Two families are known. Byte-level BPE
writes every byte as a printable character (GPT-2's byte map); SentencePiece writes a space as ▁ and, where it must, a
byte as <0xNN>. What an added token says is plain text in both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from distill.errors import DataError

SPACE = "▁"
KINDS = ("normal", "special", "byte", "added", "unused")
# Bytes that no valid UTF-8 holds; real vocabularies leave them out without losing a text.
NEVER_IN_UTF8 = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})
# In the order in which transformers adds those that tokenizer.json lacks.
NAMED_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
# Tokens that families of models know under their own names; the first one a vocabulary has takes the role.
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
    ),
    "turn_start": (
        "<|im_start|>",
        "<|start_header_id|>",
        "<start_of_turn>",
        "<|START_OF_TURN_TOKEN|>",
        "<|header_start|>",
        "<|start_of_role|>",
        "<|start|>",
    ),
    "header_end": ("<|end_header_id|>", "<|header_end|>", "<|end_of_role|>", "<|message|>"),
    "system": ("<|system|>", "<|SYSTEM_TOKEN|>"),
    "user": ("<|user|>", "<|USER_TOKEN|>", "<｜User｜>", "<|User|>"),
    "assistant": ("<|assistant|>", "<|CHATBOT_TOKEN|>", "<｜Assistant｜>", "<|Assistant|>"),
    "fim_prefix": ("<|fim_prefix|>", "<fim_prefix>", "<fim-prefix>", "<｜fim▁begin｜>", "▁<PRE>"),
    "fim_suffix": ("<|fim_suffix|>", "<fim_suffix>", "<fim-suffix>", "<｜fim▁hole｜>", "▁<SUF>"),
    "fim_middle": ("<|fim_middle|>", "<fim_middle>", "<fim-middle>", "<｜fim▁end｜>", "▁<MID>"),
}
# Of several roles of one token the first counts. What models mark themselves comes before what a tokenizer's settings
# call it: eos is often the end of a turn.
ROLE_ORDER = (*MARKERS, "eos", "bos", "unk", "pad", "sep", "cls", "mask")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CONTROL = re.compile(r"[<\[].+[>\]]", re.DOTALL)
_HINT = "byte-level BPE and SentencePiece (BPE or Unigram) are supported"


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
    """The bytes of a byte-level token; one that holds characters outside the byte map is plain text."""
    try:
        return token.translate(_FROM_MAPPED).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a tokenizer folder, by id from 0 to `size` - 1.

    `tokens` are the strings of tokenizer.json, None where an id is missing; `bytes_of` what they stand for; `kinds` are
    those of KINDS: byte is <0xNN>, added an added token without the special flag, unused a missing id. `roles` map bos,
    eos, unk, sep, pad, cls, mask and the names in MARKERS to ids.
    """

    folder: Path
    family: str  # "byte-level" or "sentencepiece"
    tokens: tuple[str | None, ...]
    bytes_of: tuple[bytes | None, ...]
    kinds: tuple[str, ...]
    roles: Mapping[str, int]
    chat_template: str | None = None

    @classmethod
    def read(cls, folder: Path) -> Vocabulary:
        """Read a tokenizer folder; raises DataError when it is missing, damaged or of an unknown kind."""
        return _read(folder)

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
        """Bytes to the id that says them best: a normal token before <0xNN> before an added one; never a special."""
        found: dict[bytes, int] = {}
        for kind in ("added", "byte", "normal"):  # later ones win; within a kind the lowest id does
            for number in range(self.size - 1, -1, -1):
                data = self.bytes_of[number]
                if data and self.kinds[number] == kind:
                    found[data] = number
        return found

    @cached_property
    def byte_ids(self) -> dict[int, int]:
        """Each byte that one token can say, to that token.

        Some byte-level vocabularies hold bytes that UTF-8 never uses as added tokens named by the byte's character.
        """
        found: dict[int, int] = {}
        for byte in range(256):
            number = self.by_bytes.get(bytes([byte]))
            if number is None and self.family == "byte-level":
                number = self.index.get(BYTE_MAP[byte])
            if number is not None:
                found[byte] = number
        return found

    @property
    def missing_bytes(self) -> list[int]:
        """Bytes of valid UTF-8 that no token says alone."""
        return [byte for byte in range(256) if byte not in self.byte_ids and byte not in NEVER_IN_UTF8]

    def text_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of `ids`, one after the other; raises ValueError for an id that stands for nothing."""
        parts = []
        for number in ids:
            data = self.bytes_of[number] if 0 <= number < self.size else None
            if data is None:
                raise ValueError(f"token {number} does not exist in {self.folder}; its ids end at {self.size - 1}")
            parts.append(data)
        return b"".join(parts)

    def same_as(self, other: Vocabulary) -> bool:
        """Whether every id is the same token in both, in the same roles."""
        return (self.family, self.tokens, self.bytes_of, self.kinds, dict(self.roles)) == (
            (other.family, other.tokens, other.bytes_of, other.kinds, dict(other.roles))
        )


def read_settings(path: Path) -> dict[str, Any]:
    """A JSON object of a model folder; raises DataError when it is missing, damaged or something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", "give a whole Hugging Face folder") from None
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}", "copy the folder again") from None
    if not isinstance(found, dict):
        raise DataError(f"{path} holds a {type(found).__name__}, not an object", "copy the folder again")
    return found


def _read(folder: Path) -> Vocabulary:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise DataError(
            f"{folder} has no tokenizer.json",
            "give the folder of a fast tokenizer; AutoTokenizer.from_pretrained(...).save_pretrained(...) writes one",
        )
    content = read_settings(path)
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            settings |= {key: value for key, value in read_settings(folder / name).items() if value is not None}
    model = content.get("model") or {}
    family = _family(path, content, model)
    by_id, added = _tokens(path, content, model, settings)
    named = {role: _content(settings.get(f"{role}_token")) or "" for role in NAMED_ROLES}
    numbers = {token: number for number, token in by_id.items()}
    roles = {role: numbers[name] for role, name in named.items() if name in numbers}
    unknown = _unknown(model) or ""
    if unknown in numbers:
        roles.setdefault("unk", numbers[unknown])
    for role, names in MARKERS.items():
        marker = next((name for name in names if name in numbers), None)
        if marker is not None:
            roles[role] = numbers[marker]
    size = max(by_id, default=-1) + 1
    tokens = tuple(by_id.get(number) for number in range(size))
    # What the settings name is special even without the flag; but an ordinary token may serve as, say, padding.
    serving = {roles[role] for role in NAMED_ROLES if role in roles}
    byte_tokens = bool(model.get("byte_fallback")) or "ByteFallback" in _steps(content.get("decoder"))
    kinds = tuple(_kind(number, token, added, serving, byte_tokens) for number, token in enumerate(tokens))
    normalise = _normaliser(content, added)
    return Vocabulary(
        folder=folder,
        family=family,
        tokens=tokens,
        bytes_of=tuple(
            None if token is None else _bytes(token, kind, family, added.get(number), normalise)
            for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        ),
        kinds=kinds,
        roles=roles,
        chat_template=_chat_template(folder, settings),
    )


def _steps(part: Any) -> set[str]:
    """The types of a normalizer, pre-tokenizer or decoder and of everything inside it."""
    if isinstance(part, list):
        return {kind for inner in part for kind in _steps(inner)}
    if not isinstance(part, dict):
        return set()
    own = {part["type"]} if isinstance(part.get("type"), str) else set()
    return own | {kind for inner in part.values() for kind in _steps(inner)}


def _family(path: Path, content: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    kind = model.get("type") or ("BPE" if "merges" in model else None)
    if kind not in ("BPE", "Unigram"):
        raise DataError(f"{path} is a {kind or 'tokenizer without a named'} model, which has no byte tokens", _HINT)
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise DataError(f"{path} marks words with {key} = {model[key]!r}, which is not supported", _HINT)
    parts = [content.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")]
    steps = {kind for part in parts for kind in _steps(part)}
    if "ByteLevel" in steps:
        return "byte-level"
    written = json.dumps(parts, ensure_ascii=False)
    if kind == "Unigram" or model.get("byte_fallback") or SPACE in written:
        if "Metaspace" in steps and SPACE not in written:
            raise DataError(f"{path} writes a space by another character than {SPACE}", _HINT)
        return "sentencepiece"
    raise DataError(f"{path} is a BPE that maps neither bytes nor spaces", _HINT)


def _content(token: Any) -> str | None:
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _unknown(model: Mapping[str, Any]) -> str | None:
    number = model.get("unk_id")
    if isinstance(number, int) and isinstance(model.get("vocab"), list):
        return str(model["vocab"][number][0])
    return _content(model.get("unk_token"))


def _tokens(
    path: Path, content: Mapping[str, Any], model: Mapping[str, Any], settings: Mapping[str, Any]
) -> tuple[dict[int, str], dict[int, dict[str, Any]]]:
    """Strings by id, and the added tokens by id, as transformers has them once it has loaded the folder."""
    words = model.get("vocab")
    if isinstance(words, dict):
        by_id = {int(number): str(token) for token, number in words.items()}
    elif isinstance(words, list):
        by_id = {number: str(entry[0]) for number, entry in enumerate(words)}
    else:
        raise DataError(f"{path} has no vocabulary", "copy the tokenizer again")
    added: dict[int, dict[str, Any]] = {}
    later = settings.get("added_tokens_decoder") or {}
    for token in [*({"id": int(number), **entry} for number, entry in later.items()), *content["added_tokens"]]:
        added[token["id"]] = token
    for number, token in added.items():
        by_id[number] = token["content"]
    if not by_id:
        raise DataError(f"{path} holds no tokens", "copy the tokenizer again")
    known = set(by_id.values())
    for role in NAMED_ROLES:
        name = _content(settings.get(f"{role}_token"))
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
    if number in added and added[number].get("special"):
        return "special"
    if number in serving and _CONTROL.fullmatch(token):
        return "special"
    if number in added:
        return "added"
    return "byte" if byte_tokens and _BYTE_TOKEN.fullmatch(token) else "normal"


def _normaliser(content: Mapping[str, Any], added: Mapping[int, Mapping[str, Any]]) -> Callable[[str], str] | None:
    """The tokenizer's normaliser, where added tokens are matched in text that went through it."""
    part = content.get("normalizer")
    if part is None or "ByteLevel" in _steps(part) or not any(token.get("normalized") for token in added.values()):
        return None
    from tokenizers import Tokenizer

    alone = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": part,
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    found: Callable[[str], str] = Tokenizer.from_str(json.dumps(alone)).normalizer.normalize_str
    return found


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


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = settings.get("chat_template")
    if isinstance(found, list):  # several, by name
        found = next((entry.get("template") for entry in found if entry.get("name") == "default"), None)
    return found if isinstance(found, str) else None
