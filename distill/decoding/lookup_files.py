"""Files of the target's own n-grams, from which servers draft without a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy

from distill.data.samples import Sample, decoded, learnt_answers
from distill.decoding.ngrams import ORDER, count_ngrams
from distill.engines.server_commands import IK_INSERTED, suffix_depth
from distill.engines.torch.hugging_face import load_tokenizer
from distill.errors import DataError, RunError
from distill.files import write_atomically
from distill.recipe import Recipe
from distill.run import Run

NO_TOKEN = -1  # llama.cpp's n-grams have four places, of which a bigram leaves two free.
MIN_DEPTH = 6  # ik_llama.cpp's tree must hold a match of 5 tokens and the token after it.


def counted_text(answer: Sample) -> list[int]:
    """The ids whose n-grams are counted: the last tokens of a prompt, and its answer."""
    return [*answer.prompt[-ORDER:], *answer.answer]


def export_lookup(recipe: Recipe, run: Run, server: str, path: Path) -> tuple[str, int, int]:
    """Write a run's file for a server of `FORMS`. Returns its content in words, and the counts of answers and tokens.

    Raises RunError for a run without finished answers, and DataError if the server does not read so many tokens.
    """
    if run.done("answers") is None:
        raise RunError(f"{run.folder} has no finished answers", f"`{run.again('--until', 'answers')}` writes them")
    run.verify("answers", "answers/train/*")
    answers = learnt_answers(run)
    data, content, tokens = FORMS[server][1](recipe, answers)
    write_atomically(path, lambda temporary: temporary.write_bytes(data))
    return content, len(answers), tokens


Written = tuple[bytes, str, int]  # the file, its content in words, and the number of tokens


def _static_cache(recipe: Recipe, answers: Sequence[Sample]) -> Written:
    """llama.cpp's static lookup cache.

    It has, in int32, the four ids of each bigram, the number of tokens that follow it, and their ids and counts.
    """
    texts = [counted_text(answer) for answer in answers]
    first, second, third = count_ngrams(texts)[:3]
    starts, sizes = second.first[:-1], numpy.diff(second.first)  # [G], for the tokens that follow each bigram
    heads = numpy.stack([first.tokens.repeat(numpy.diff(first.first)), second.tokens], 1)  # [G, 2]
    known = sizes > 0
    starts, sizes, heads = starts[known], sizes[known], heads[known]
    lengths = 5 + 2 * sizes
    places = numpy.cumsum(lengths) - lengths
    cells = numpy.empty(int(lengths.sum()), "<i4")
    for offset, values in enumerate((heads[:, 0], heads[:, 1], NO_TOKEN, NO_TOKEN, sizes)):
        cells[places + offset] = values
    following = (places + 5 - 2 * starts).repeat(sizes) + 2 * numpy.arange(len(third.tokens))  # [F]
    cells[following], cells[following + 1] = third.tokens, third.counts
    return cells.tobytes(), f"{len(sizes)} bigrams, {len(third.tokens)} tokens after them", sum(map(len, texts))


def _suffix_corpus(recipe: Recipe, answers: Sequence[Sample]) -> Written:
    """ik_llama.cpp's binary corpus: the int32 ids of all texts, without separators."""
    ids = numpy.concatenate([numpy.asarray(counted_text(answer), "<i4") for answer in answers])
    if suffix_depth(len(ids)) < MIN_DEPTH:
        most = IK_INSERTED // MIN_DEPTH
        raise DataError(f"{len(ids)} tokens of answers: ik_llama.cpp reads at most {most}", "export from a smaller run")
    return ids.tobytes(), f"{len(ids)} ids", len(ids)


def _external_corpus(recipe: Recipe, answers: Sequence[Sample]) -> Written:
    """SGLang's JSON lines: each text with its special tokens. SGLang tokenizes the texts again."""
    tokenizer = load_tokenizer(recipe.target.model)
    texts = [counted_text(answer) for answer in answers]
    lines = [decoded(tokenizer, ids) for ids in texts]
    again = [list(tokenizer.encode(line, add_special_tokens=False)) for line in lines]
    other = sum(left != right for left, right in zip(texts, again, strict=True))
    content = f"{len(lines)} texts" + (f", {other} of which have other ids when they are tokenized again" * bool(other))
    return _json_lines(lines), content, sum(map(len, again))


def _requests(recipe: Recipe, answers: Sequence[Sample]) -> Written:
    """Requests to /v1/completions for texts like the answers, because vLLM's cache only holds its own texts."""
    stop = {"stop": list(recipe.answers.stop)} if recipe.answers.stop else {}
    requests = [
        {"prompt": answer.prompt, "max_tokens": len(answer.answer), **recipe.sampling, **stop, "seed": number}
        for number, answer in enumerate(answers)
    ]
    return _json_lines(requests), f"{len(requests)} requests", sum(len(answer.answer) for answer in answers)


def _json_lines(values: Sequence[Any]) -> bytes:
    return "".join(json.dumps(value) + "\n" for value in values).encode()


FORMS: dict[str, tuple[str, Callable[[Recipe, Sequence[Sample]], Written]]] = {  # by server: the file's usual name
    "llama.cpp": ("llama.cpp-static.bin", _static_cache),
    "ik_llama": ("ik_llama-corpus.bin", _suffix_corpus),
    "sglang": ("sglang-corpus.jsonl", _external_corpus),
    "vllm": ("vllm-requests.jsonl", _requests),
}
