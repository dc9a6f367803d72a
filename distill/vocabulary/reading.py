"""What the tokens of a Hugging Face tokenizer stand for, read from tokenizer.json and tokenizer_config.json.

Two families are supported: byte-level BPE and SentencePiece (`byte_map`). In both, an added token stands for its own
plain text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from distill.errors import DataError
from distill.files import has_form, kind_of, read_object
from distill.vocabulary.byte_map import SPACE, from_mapped
from distill.vocabulary.charsmap import require_tables
from distill.vocabulary.roles import NAMED_ROLES, content_of, roles_in

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CONTROL = re.compile(r"[<\[].+[>\]]", re.DOTALL)
ADDED: dict[Any, Any] = {"id": int, "content": str}  # the form of an added token
PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding")
MOST_BYTE_STEPS = 4  # each doubles what is no ASCII, so that a short text fills the memory; real tokenizers have one
_ID = re.compile("[0-9]{1,7}")
_HINT = "byte-level BPE and SentencePiece (BPE or Unigram) are supported"


class Contents(NamedTuple):
    """A tokenizer's tokens by id; the fields of Vocabulary."""

    family: str
    tokens: tuple[str | None, ...]
    bytes_of: tuple[bytes | None, ...]
    kinds: tuple[str, ...]
    roles: dict[str, int]


def read_folder(folder: Path) -> Contents:
    """The tokens of a tokenizer folder; raises DataError when it is missing, damaged or of an unknown kind."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise DataError(
            f"{folder} has no tokenizer.json",
            "give the folder of a fast tokenizer; AutoTokenizer.from_pretrained(...).save_pretrained(...) writes one",
        )
    content, settings = tokenizer_content(path), _settings(folder)
    model = content["model"]
    family = _family(path, content, model)
    by_id, added = _tokens(path, content, model, settings)
    roles = roles_in({token: number for number, token in by_id.items()}, settings, _unknown(path, model))
    tokens = tuple(by_id.get(number) for number in range(max(by_id) + 1))
    # Tokens that the settings name are special even without the flag; but an ordinary token may serve as, say, padding.
    serving = {roles[role] for role in NAMED_ROLES if role in roles}
    byte_tokens = bool(model.get("byte_fallback")) or "ByteFallback" in _steps(content.get("decoder"))
    kinds = tuple(_kind(number, token, added, serving, byte_tokens) for number, token in enumerate(tokens))
    normalise = _normaliser(content, added)
    bytes_of = tuple(
        None if token is None else _bytes(token, kind, family, added.get(number), normalise)
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
    )
    return Contents(family, tokens, bytes_of, kinds, roles)


def tokenizer_content(path: Path) -> dict[str, Any]:
    """The object in a tokenizer.json, with the forms of tokens checked; raises DataError for a damaged file."""
    content, hint = read_object(path), "copy the tokenizer again"
    content["model"] = content.get("model") or {}
    content["added_tokens"] = content.get("added_tokens") or []
    if not has_form(content, {"model": dict, "added_tokens": [ADDED]}):
        raise DataError(f"{path} is damaged: `model` or `added_tokens` is of another kind", hint)
    parts = [key for key in PARTS if not isinstance(content.get(key) or {}, dict)]
    if parts:
        raise DataError(f"{path} is damaged: {parts[0]} must be an object, got {kind_of(content[parts[0]])}", hint)
    if json.dumps(content.get("pre_tokenizer")).count('"ByteLevel"') > MOST_BYTE_STEPS:
        raise DataError(f"{path} is damaged: its pre_tokenizer maps bytes more than {MOST_BYTE_STEPS} times", hint)
    words, merges = content["model"].get("vocab"), content["model"].get("merges") or []
    pairs = isinstance(words, list) and all(isinstance(one, list) and one and isinstance(one[0], str) for one in words)
    if not (pairs or has_form(words, {...: int})):
        raise DataError(f"{path} is damaged: it has no vocabulary of tokens and their ids", hint)
    if not isinstance(merges, list) or not all(isinstance(one, str) or _is_pair(one) for one in merges):
        raise DataError(f"{path} is damaged: a merge is a pair of tokens", hint)
    ids = [*(words.values() if isinstance(words, dict) else ()), *(token["id"] for token in content["added_tokens"])]
    _require_dense(path, ids)
    require_tables(path, content)
    return content


def _require_dense(path: Path, ids: Collection[int]) -> None:
    """Raise DataError for ids far beyond their number: they are the rows of lists."""
    if ids and not 0 <= min(ids) <= max(ids) <= 4 * len(ids) + 2**16:
        fault = f"{len(ids)} tokens have ids from {min(ids)} to {max(ids)}"
        raise DataError(f"{path} is damaged: {fault}", "copy the tokenizer again")


def merge_pairs(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The merges of a BPE, which older files write as texts with a space between the two tokens."""
    pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model.get("merges") or [])
    return [(left, right) for left, right in pairs]


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(one, str) for one in value)


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json of a folder, {} where there is none; raises DataError for a damaged one."""
    path = folder / "tokenizer_config.json"
    found = read_object(path, "copy the tokenizer again") if path.is_file() else {}
    later, named = found.get("added_tokens_decoder"), found.get("tokenizer_class")
    decoded = later is None or (has_form(later, {...: {"content": str}}) and all(map(_ID.fullmatch, later)))
    template = found.get("chat_template")
    templates = template is None or isinstance(template, str) or has_form(template, [{"name": str, "template": str}])
    whole = {
        "added_tokens_decoder": decoded,
        "tokenizer_class": named is None or isinstance(named, str),
        "chat_template": templates,
    }
    wrong = next((key for key, right in whole.items() if not right), None)
    if wrong is not None:
        raise DataError(f"{path} is damaged: {wrong} is of another kind", "copy the tokenizer again")
    return found


def _settings(folder: Path) -> dict[str, Any]:
    """The tokenizer's settings that have a value; tokenizer_config.json before special_tokens_map.json."""
    special = folder / "special_tokens_map.json"
    found = {**(read_object(special) if special.is_file() else {}), **tokenizer_settings(folder)}
    return {key: value for key, value in found.items() if value is not None}


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


def _unknown(path: Path, model: Mapping[str, Any]) -> str | None:
    number = model.get("unk_id")
    if isinstance(number, int) and isinstance(model["vocab"], list):
        if not 0 <= number < len(model["vocab"]):
            raise DataError(f"{path} is damaged: unk_id is {number}", "copy the tokenizer again")
        return str(model["vocab"][number][0])
    return content_of(model.get("unk_token"))


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
    _require_dense(path, by_id)
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
