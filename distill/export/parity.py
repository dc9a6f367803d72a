"""Parity of a GGUF file with the Hugging Face folder that it was exported from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from distill.errors import DataError
from distill.export.tensors import read_shape
from distill.models.finite import place_of, require_finite
from distill.models.gguf.model import GgufModel
from distill.models.hugging_face import load_model, load_tokenizer
from distill.models.torch_model import model_name
from distill.results.export_results import Parity
from distill.texts import first_difference

WINDOW = 256


def compare(folder: Path, gguf: Path, texts: list[str], positions: int) -> Parity:
    """Compare ids on all `texts` and logits on the first `positions` positions, in windows of at most 256 tokens.

    Raises DataError when either model cannot be loaded, the vocabularies differ in size, or the texts hold no position.
    """
    folder = Path(folder)
    shape = read_shape(folder)
    window = min(WINDOW, shape.context)
    with GgufModel(gguf, context=window, batch=window) as quantised:
        if quantised.head_rows != shape.vocabulary:
            raise DataError(
                f"{gguf} has {quantised.head_rows} rows, {folder} has {shape.vocabulary}",
                hint="compare a GGUF file with the folder it was exported from",
            )
        tokenizer = load_tokenizer(str(folder))
        model = load_model(str(folder), "float32", torch.device("cpu"), trimmed=False)
        mismatches, normalized = _compare_ids(tokenizer, quantised, texts)
        same_top, differences = _compare_logits(tokenizer, model, quantised, texts, positions, window)
    if not differences:
        raise DataError("the texts hold no two consecutive tokens to compare", hint="give longer texts")
    return Parity(
        positions=len(differences),
        top1_agreement=same_top / len(differences),
        mean_abs_dlogprob=sum(differences) / len(differences),
        max_abs_dlogprob=max(differences),
        tokenizer_texts=len(texts),
        tokenizer_mismatches=mismatches,
        tokenizer_normalized=normalized,
    )


def _compare_ids(tokenizer: Any, quantised: GgufModel, texts: list[str]) -> tuple[list[tuple[int, int]], int]:
    normalizer = tokenizer.backend_tokenizer.normalizer
    mismatches, normalized = [], 0
    for index, text in enumerate(texts):
        plain = normalizer.normalize_str(text) if normalizer is not None else text
        normalized += plain != text
        expected = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        position = first_difference(expected, quantised.tokenize(plain, parse_special=True))
        if position is not None:
            mismatches.append((index, position))
    return mismatches, normalized


def _compare_logits(
    tokenizer: Any, model: Any, quantised: GgufModel, texts: list[str], positions: int, window: int
) -> tuple[int, list[float]]:
    """How many argmaxes agree, and the absolute difference of the next token's log-probability at each position."""
    same_top, differences = 0, list[float]()
    for text in texts:
        ids = tokenizer(text, verbose=False)["input_ids"]
        for start in range(0, len(ids) - 1, window - 1):
            # One token of overlap, so that every token but the first is predicted once.
            part = ids[start : start + window][: positions - len(differences) + 1]
            if len(part) < 2:
                return same_top, differences
            with torch.inference_mode():
                logits = model(torch.tensor([part])).logits[0, :-1, : quantised.vocabulary_size]
            require_finite(logits.amax(-1).tolist(), place_of(model_name(model), range(1, len(part))))
            reference = logits.float().log_softmax(-1)
            quantised.reset()
            found = quantised.extend(part, want=range(len(part) - 1))
            actual = found.full().log_softmax(-1)
            require_finite(actual.amax(-1).tolist(), found.place)
            following = torch.tensor(part[1:])[:, None]
            differences += (reference.gather(1, following) - actual.gather(1, following)).abs()[:, 0].tolist()
            same_top += int((reference.argmax(-1) == actual.argmax(-1)).sum())
    return same_top, differences
