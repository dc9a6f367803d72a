"""The files of a Hugging Face tokenizer, with the forms checked that every reader relies on."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from distill.errors import DataError, DistillError
from distill.files import has_form, kind_of, read_object

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
