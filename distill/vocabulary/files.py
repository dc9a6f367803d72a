"""The files of a Hugging Face tokenizer, with the forms checked that every reader relies on."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.errors import DataError, DistillError
from distill.files import has_form, kind_of, read_object

if TYPE_CHECKING:
    from tokenizers import Tokenizer

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
    ids = [*words.values(), *(token["id"] for token in content["added_tokens"])]
    require_dense(path, ids)
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
    return settings


def named_settings(folder: Path) -> dict[str, Any]:
    """The tokenizer's settings that have a value; tokenizer_config.json before special_tokens_map.json."""
    special = folder / "special_tokens_map.json"
    settings = {**(read_object(special) if special.is_file() else {}), **tokenizer_settings(folder)}
    return {key: value for key, value in settings.items() if value is not None}


def require_dense(path: Path, ids: Collection[int]) -> None:
    """Raise DataError for ids far beyond their number: they are the rows of lists."""
    if ids and not 0 <= min(ids) <= max(ids) <= 4 * len(ids) + 2**16:
        fault = f"{len(ids)} tokens have ids from {min(ids)} to {max(ids)}"
        raise DataError(f"{path} is damaged: {fault}", AGAIN)


def merge_pairs(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The merges of a BPE, which older files write as texts with a space between the two tokens."""
    pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model.get("merges") or [])
    return [(left, right) for left, right in pairs]


def _is_pair(value: Any) -> bool:
    return has_form(value, [str]) and len(value) == 2


def open_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json, without its truncation and padding, which make texts of any length.

    Raises DataError where it cannot be loaded.
    """
    from tokenizers import Tokenizer

    try:
        with without_panic(str(path)):
            refuse_tables(path)
            tokenizer = Tokenizer.from_file(str(path))
    except DistillError:
        raise
    except Exception as error:  # tokenizers raises the bare class for every kind of damage
        raise DataError(f"{path} cannot be loaded: {error}", AGAIN) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


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
    alone: list[int] = tokenizer.encode("a", add_special_tokens=False).ids
    whole: list[int] = tokenizer.encode("a", add_special_tokens=True).ids
    for start in range(len(whole) - len(alone) + 1):
        if whole[start : start + len(alone)] == alone:
            return whole[:start], whole[start + len(alone) :]
    return None


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
