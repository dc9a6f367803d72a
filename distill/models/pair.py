"""Do a target and a draft fit each other? The rules of our decoder, llama.cpp and vLLM, read from files alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distill.errors import PairError
from distill.models.hugging_face import load_config, load_tokenizer

LLAMA_CPP_SIZE_DIFFERENCE = 128  # llama.cpp's SPEC_VOCAB_MAX_SIZE_DIFFERENCE
LLAMA_CPP_FIRST_ID = 5  # token strings are compared from this id up


@dataclass(frozen=True)
class PairReport:
    """What was compared; the three verdicts are None when fine, else the reason against."""

    target_vocabulary: int
    draft_vocabulary: int
    distill: str | None
    llama_cpp: str | None
    vllm: str | None


def _first_difference(target: dict[str, int], draft: dict[str, int], start: int) -> str | None:
    names = {index: token for token, index in target.items()}
    others = {index: token for token, index in draft.items()}
    for index in range(start, min(len(names), len(others))):
        if names.get(index) != others.get(index):
            return f"token {index} is {names.get(index)!r} in the target and {others.get(index)!r} in the draft"
    return None


def compare_pair(target: str, draft: str) -> PairReport:
    """Compare two Hugging Face models' vocabularies by the rules of each decoder; loads no weights."""
    sizes = [int(load_config(reference).vocab_size) for reference in (target, draft)]
    tokenizers: list[Any] = [load_tokenizer(reference) for reference in (target, draft)]
    ours, theirs = (tokenizer.get_vocab() for tokenizer in tokenizers)
    any_difference = _first_difference(ours, theirs, 0)
    if any_difference is None and len(ours) != len(theirs):
        any_difference = f"the target has {len(ours)} tokens, the draft {len(theirs)}"
    llama = _first_difference(ours, theirs, LLAMA_CPP_FIRST_ID)
    if abs(sizes[0] - sizes[1]) > LLAMA_CPP_SIZE_DIFFERENCE:
        llama = f"vocabulary sizes {sizes[0]} and {sizes[1]} differ by more than {LLAMA_CPP_SIZE_DIFFERENCE}"
    vllm = None if sizes[0] == sizes[1] else f"vocab_size is {sizes[0]} in the target and {sizes[1]} in the draft"
    return PairReport(sizes[0], sizes[1], any_difference, llama, vllm)


def require_pair(target: str, draft: str) -> PairReport:
    """`compare_pair`, raising PairError where our own decoder could not use the two together."""
    report = compare_pair(target, draft)
    if report.distill is not None:
        raise PairError(
            f"{draft} does not fit the target {target}: {report.distill}",
            "choose a donor with the target's tokenizer (transplanting vocabularies is not there yet)",
        )
    return report
