"""A Hugging Face tokenizer.json (byte-level BPE) as llama.cpp's tokenizer.ggml.* keys.

llama.cpp has its own pre-tokenizers under fixed names. A wrong name loads and gives wrong ids. So the name is derived
from the rules in tokenizer.json, and rules without a name there are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.errors import DataError
from distill.files import read_utf8
from distill.models.config_file import read_config
from distill.vocabulary.encoding import added_around, open_tokenizer
from distill.vocabulary.reading import tokenizer_content, tokenizer_settings
from distill.vocabulary.roles import named_id

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + REST
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + REST
QWEN35 = (
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The steps of a pre-tokenizer, written by `_steps`, and llama.cpp's name for them.
PRE_TYPES: dict[tuple[str, ...], str] = {
    ("gpt-2",): "gpt-2",
    (f"split {QWEN2}", "bytes"): "qwen2",
    (f"split {LLAMA3}", "bytes"): "llama-bpe",
    (f"split {QWEN35}", "bytes"): "qwen35",
    ("digits", "gpt-2"): "smollm",
}
# Of these names only llama-bpe takes a word that is itself a token, without merging.
IGNORES_MERGES = {"llama-bpe"}
SAME_BUT_MERGING = {"llama-bpe": "dbrx"}


@dataclass(frozen=True)
class GgufTokenizer:
    """The values of the tokenizer.ggml.* keys; `types` are gguf.TokenType values, one per token."""

    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    bos: int | None
    eos: int
    pad: int | None
    add_bos: bool
    add_eos: bool
    chat_template: str | None
    padding_tokens: int


def read_tokenizer(folder: Path, vocabulary: int) -> GgufTokenizer:
    """The tokenizer of a Hugging Face folder, padded to `vocabulary` rows.

    Raises DataError when it is missing, not byte-level BPE, larger than the model's vocabulary, or splits text by
    rules that llama.cpp has no name for.
    """
    path = folder / "tokenizer.json"
    content = tokenizer_content(path)
    settings = tokenizer_settings(folder)
    config = read_config(folder) if (folder / "config.json").exists() else {}
    model = content["model"]
    _refuse_other_models(path, model)
    tokenizer = open_tokenizer(path)  # which also proves the forms of the parts that are read below
    _refuse_other_parts(path, content)
    tokens, types, padding = _tokens(path, content, vocabulary)
    pre = _pre_type(path, content, tokenizer)
    ids = {token: index for index, token in enumerate(tokens)}
    bos, eos, pad = (named_id(role, settings, config, ids, vocabulary) for role in ("bos", "eos", "pad"))
    if eos is None:
        # Without it llama.cpp would take token 11 for the end of text.
        raise DataError(f"{folder} names no end-of-text token", hint='set "eos_token" in tokenizer_config.json')
    add_bos, add_eos, bos = _text_ends(path, tokenizer, bos, eos)
    return GgufTokenizer(
        pre=pre,
        tokens=tokens,
        types=types,
        merges=_merges(path, model),
        bos=bos,
        eos=eos,
        pad=pad,
        add_bos=add_bos,
        add_eos=add_eos,
        chat_template=_chat_template(folder, settings),
        padding_tokens=padding,
    )


def add_tokenizer(writer: Any, tokenizer: GgufTokenizer) -> None:
    """Write the tokenizer's keys to a gguf.GGUFWriter."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(tokenizer.pre)
    writer.add_token_list(tokenizer.tokens)
    writer.add_token_types(tokenizer.types)
    writer.add_token_merges(tokenizer.merges)
    if tokenizer.bos is not None:
        writer.add_bos_token_id(tokenizer.bos)
    writer.add_eos_token_id(tokenizer.eos)
    if tokenizer.pad is not None:
        writer.add_pad_token_id(tokenizer.pad)
    writer.add_add_bos_token(tokenizer.add_bos)
    writer.add_add_eos_token(tokenizer.add_eos)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)


SUPPORTED = "supported: byte-level BPE with the splits of GPT-2, Qwen2, Qwen3.5, Llama 3 or SmolLM"


def _refuse_other_models(path: Path, model: Mapping[str, Any]) -> None:
    hint = SUPPORTED
    kind = model.get("type")
    if model.get("byte_fallback"):
        raise DataError(f"{path} is a SentencePiece tokenizer; its space prefix has no exact twin in GGUF", hint=hint)
    if kind != "BPE":
        raise DataError(f"{path}: model type {kind!r} cannot be exported", hint=hint)
    for key in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise DataError(f"{path}: BPE with {key} = {model[key]!r} cannot be exported", hint=hint)


def _refuse_other_parts(path: Path, content: Mapping[str, Any]) -> None:
    hint = SUPPORTED
    # llama.cpp never normalises; NFC alone leaves ordinary text as it is, and the parity check reports the rest.
    normalizer = content.get("normalizer")
    if normalizer is not None and normalizer.get("type") != "NFC":
        raise DataError(f"{path}: normalizer {normalizer.get('type')!r} cannot be exported", hint=hint)
    for token in content.get("added_tokens") or []:
        flags = [flag for flag in ("lstrip", "rstrip", "single_word") if token.get(flag)]
        if flags:
            raise DataError(f"{path}: added token {token['content']!r} with {flags[0]} cannot be exported", hint=hint)


def _steps(pre_tokenizer: Mapping[str, Any] | None) -> tuple[str, ...]:
    """A pre-tokenizer as a tuple of steps, to be looked up in PRE_TYPES."""
    if pre_tokenizer is None:
        return ()
    if not isinstance(pre_tokenizer, dict):  # tokenizers reads parts written as lists too
        return (repr(pre_tokenizer),)
    kind = pre_tokenizer.get("type")
    if kind == "Sequence":
        return tuple(step for part in pre_tokenizer.get("pretokenizers") or () for step in _steps(part))
    if kind == "ByteLevel" and not pre_tokenizer.get("add_prefix_space"):
        return ("gpt-2",) if pre_tokenizer.get("use_regex", True) else ("bytes",)
    if kind == "Split" and pre_tokenizer.get("behavior") == "Isolated" and not pre_tokenizer.get("invert"):
        pattern = pre_tokenizer.get("pattern")
        return (f"split {pattern.get('Regex') if isinstance(pattern, dict) else pattern}",)
    if kind == "Digits" and pre_tokenizer.get("individual_digits"):
        return ("digits",)
    return (f"{kind} {sorted(pre_tokenizer.items())}",)


def _pre_type(path: Path, content: Mapping[str, Any], tokenizer: Tokenizer) -> str:
    steps = _steps(content.get("pre_tokenizer"))
    pre = PRE_TYPES.get(steps)
    if pre is None:
        raise DataError(
            f"{path}: no name is known in llama.cpp for this pre-tokenizer: {list(steps)}",
            hint="supported: the splits of GPT-2, Qwen2, Qwen3.5, Llama 3 and SmolLM",
        )
    ignores = bool(content["model"].get("ignore_merges"))
    if ignores == (pre in IGNORES_MERGES) or _merges_reach_every_token(content, tokenizer):
        return pre
    if pre in SAME_BUT_MERGING:
        return SAME_BUT_MERGING[pre]
    raise DataError(
        f"{path}: ignore_merges has no counterpart for pre-tokenizer {pre!r}", hint="export to another format"
    )


def _merges_reach_every_token(content: Mapping[str, Any], tokenizer: Tokenizer) -> bool:
    """Whether merging alone yields each token from its own bytes, so that ignore_merges changes nothing."""
    from tokenizers.models import BPE

    model = content["model"]
    pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]
    merges = [(str(left), str(right)) for left, right in pairs]
    plain = BPE(model["vocab"], merges, ignore_merges=False)
    added = {token["content"] for token in content.get("added_tokens") or []}
    return all(len(plain.tokenize(token)) == 1 for token in model["vocab"] if token not in added)


def _tokens(path: Path, content: Mapping[str, Any], vocabulary: int) -> tuple[list[str], list[int], int]:
    """Token strings, gguf token types, and how many padding tokens were appended."""
    import gguf

    by_id: dict[int, tuple[str, int]] = {i: (t, gguf.TokenType.NORMAL) for t, i in content["model"]["vocab"].items()}
    for token in content.get("added_tokens") or []:
        kind = gguf.TokenType.CONTROL if token.get("special") else gguf.TokenType.USER_DEFINED
        by_id[token["id"]] = (token["content"], kind)
    size = max(by_id) + 1
    if size > vocabulary:
        raise DataError(
            f"{path} has {size} token ids, the model only {vocabulary} rows",
            hint="use the tokenizer the model was trained with, or resize the model's embeddings",
        )
    padding = vocabulary - len(by_id)
    taken = {token for token, _ in by_id.values()}
    for index in range(vocabulary):
        if index not in by_id:
            name = f"[PAD{index}]"
            if name in taken:
                raise DataError(f"{path} already has a token {name}, which padding needs", hint="rename that token")
            by_id[index] = (name, gguf.TokenType.UNUSED)
    tokens = [by_id[index][0] for index in range(vocabulary)]
    if len(set(tokens)) != len(tokens):
        raise DataError(f"{path} has two ids for one token string", hint="GGUF needs every token string once")
    return tokens, [int(by_id[index][1]) for index in range(vocabulary)], padding


def _merges(path: Path, model: Mapping[str, Any]) -> list[str]:
    merges = []
    for merge in model.get("merges") or []:
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        if " " in left or " " in right:
            raise DataError(f"{path}: merge {merge!r} contains a space", hint="only byte-level merges can be exported")
        merges.append(f"{left} {right}")
    return merges


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


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return read_utf8(file)
    template = settings.get("chat_template")
    if isinstance(template, list):  # named templates of older tokenizers
        template = next((t["template"] for t in template if t.get("name") == "default"), None)
    return template if isinstance(template, str) else None
