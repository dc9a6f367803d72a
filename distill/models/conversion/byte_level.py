"""Byte-level BPE as llama.cpp's tokenizer.ggml.* keys: the name of its pre-tokenizer, and its merges.

llama.cpp has its own pre-tokenizers under fixed names. A wrong name loads and gives wrong ids. So the name is derived
from the rules in tokenizer.json; rules that are not known here are compared with llama.cpp's by what they do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.errors import DataError
from distill.models.conversion.llama_tokenizer import GgufTokenizer, same_ids
from distill.vocabulary.splits import IGNORE_MERGES, STEPS
from distill.vocabulary.tokenizer_files import merge_pairs

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# llama.cpp's first name for a split. A split that comes with both ways of merging has a name for each.
PRE_TYPES = {steps: names[0] for steps, names in STEPS.items()}
SAME_BUT_MERGING = {"llama-bpe": "dbrx"}

# Names of llama.cpp's pre-tokenizers for byte-level BPE, the plainest first: several have the same rules.
NAMES = (
    *("gpt-2", "llama-bpe", "dbrx", "qwen2", "qwen35", "smollm", "starcoder", "refact", "falcon", "command-r"),
    *("deepseek-llm", "deepseek-coder", "deepseek-v3", "mpt", "olmo", "stablelm2", "codeshell", "bloom", "exaone"),
    *("chameleon", "minerva-7b", "viking", "poro-chat", "tekken", "smaug-bpe", "gpt-4o", "superbpe", "trillion"),
    *("granite-docling", "bailingmoe", "llama4", "hunyuan", "kimi-k2", "seed-coder", "chatglm-bpe", "glm4", "lfm2"),
    *("minimax-m2", "megrez", "gigachat", "falcon3", "gpt3-finnish", "exaone4", "afmoe", "grok-2", "youtu"),
)
SUPPORTED = (
    "supported: byte-level BPE with a split that llama.cpp has, SentencePiece BPE, and Unigram without byte fallback"
)


def refuse_other_models(path: Path, model: Mapping[str, Any]) -> None:
    """Raise DataError for a model that is not BPE as llama.cpp computes it."""
    kind = model.get("type")
    if kind != "BPE":
        raise DataError(f"{path}: model type {kind!r} cannot be exported", hint=SUPPORTED)
    for key in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise DataError(f"{path}: BPE with {key} = {model[key]!r} cannot be exported", hint=SUPPORTED)


def refuse_normalizer(path: Path, content: Mapping[str, Any]) -> None:
    """Raise DataError for a normalizer other than NFC.

    llama.cpp never normalises; NFC alone leaves ordinary text as it is, and the parity check reports the rest.
    """
    normalizer = content.get("normalizer")
    if normalizer is not None and normalizer.get("type") != "NFC":
        raise DataError(f"{path}: normalizer {normalizer.get('type')!r} cannot be exported", hint=SUPPORTED)


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


def pre_type(path: Path, content: Mapping[str, Any], tokenizer: Tokenizer) -> str | None:
    """llama.cpp's name for the pre-tokenizer, from its rules; None for rules that are not known here.

    Raises DataError where llama.cpp has the rules, but not with this way of merging.
    """
    steps = _steps(content.get("pre_tokenizer"))
    pre = PRE_TYPES.get(steps)
    if pre is None:
        # No pre-tokenizer of llama.cpp maps bytes twice.
        if sum(step in ("bytes", "gpt-2") or step.startswith("ByteLevel") for step in steps) > 1:
            raise DataError(f"{path}: llama.cpp has no pre-tokenizer that maps bytes more than once", hint=SUPPORTED)
        return None
    ignores = bool(content["model"].get("ignore_merges"))
    if ignores == (pre in IGNORE_MERGES) or _merges_reach_every_token(content, tokenizer):
        return pre
    if pre in SAME_BUT_MERGING:
        return SAME_BUT_MERGING[pre]
    raise DataError(
        f"{path}: ignore_merges has no counterpart for pre-tokenizer {pre!r}", hint="export to another format"
    )


def find_pre_type(path: Path, tokenizer: Tokenizer, exported: GgufTokenizer) -> str:
    """The first name under which llama.cpp gives the tokenizer's own ids for all of PROBE.

    Raises DataError when there is none, or llama-cpp-python is not installed.
    """
    for name in NAMES:
        if same_ids(tokenizer, replace(exported, pre=name)):
            return name
    raise DataError(
        f"{path}: llama.cpp has no pre-tokenizer that splits text like this one",
        hint="export to another format, or ask llama.cpp for it (convert_hf_to_gguf_update.py)",
    )


def _merges_reach_every_token(content: Mapping[str, Any], tokenizer: Tokenizer) -> bool:
    """Whether merging alone yields each token from its own bytes, so that ignore_merges changes nothing."""
    from tokenizers.models import BPE

    model = content["model"]
    plain = BPE(model["vocab"], merge_pairs(model), ignore_merges=False)
    added = {token["content"] for token in content.get("added_tokens") or []}
    return all(len(plain.tokenize(token)) == 1 for token in model["vocab"] if token not in added)


def merges_of(path: Path, model: Mapping[str, Any]) -> list[str]:
    """The merges as llama.cpp writes them: two parts and a space between."""
    merges = merge_pairs(model)
    spaced = next((merge for merge in merges if " " in "".join(merge)), None)
    if spaced is not None:
        raise DataError(f"{path}: merge {spaced!r} contains a space", hint="only byte-level merges can be exported")
    return [" ".join(merge) for merge in merges]
