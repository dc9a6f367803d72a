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

NO_TOKEN = -1  # llama.cpp's places of an n-gram of four that a bigram leaves free
SHALLOWEST = 6  # tree of ik_llama.cpp's that can draft: a token behind a match of 5


def counted_text(answer: Sample) -> list[int]:
    """The ids that n-grams are counted of: an answer behind the last tokens of its prompt."""
    return [*answer.prompt[-ORDER:], *answer.answer]


def export_lookup(recipe: Recipe, run: Run, server: str, path: Path) -> tuple[str, int, int]:
    """Write the file of one of `FORMS`; returns what it has, from how many answers and tokens.

    Raises RunError for a run whose answers are not finished, DataError where nothing is left of them or the server
    does not take so much.
    """
    if run.done("answers") is None:
        raise RunError(f"{run.folder} has no finished answers", f"`{run.again('--until', 'answers')}` writes them")
    run.verify("answers", "answers/train/*")
    answers = learnt_answers(run)
    data, content, tokens = FORMS[server][1](recipe, answers)
    write_atomically(path, lambda temporary: temporary.write_bytes(data))
    return content, len(answers), tokens


Written = tuple[bytes, str, int]  # the file, what it has, and how many tokens


def _static_cache(recipe: Recipe, answers: Sequence[Sample]) -> Written:
    """llama.cpp's static lookup cache: of each bigram int32 ids[4], the number of tokens that follow it, and of each
    of those its id and count."""
    texts = [counted_text(answer) for answer in answers]
    first, second, third = count_ngrams(texts)[:3]
    starts, sizes = second.first[:-1], numpy.diff(second.first)  # [G], of the tokens that follow each
    heads = numpy.stack([first.tokens.repeat(numpy.diff(first.first)), second.tokens], 1)  # [G, 2]
    known = sizes > 0
    starts, sizes, heads = starts[known], sizes[known], heads[known]
    lengths = 5 + 2 * sizes
    places = numpy.cumsum(lengths) - lengths
    found = numpy.empty(int(lengths.sum()), "<i4")
    for offset, values in enumerate((heads[:, 0], heads[:, 1], NO_TOKEN, NO_TOKEN, sizes)):
        found[places + offset] = values
    following = (places + 5 - 2 * starts).repeat(sizes) + 2 * numpy.arange(len(third.tokens))  # [F]
    found[following], found[following + 1] = third.tokens, third.counts
    return found.tobytes(), f"{len(sizes)} bigrams, {len(third.tokens)} tokens after them", sum(map(len, texts))


def _suffix_corpus(recipe: Recipe, answers: Sequence[Sample]) -> Written:
    """ik_llama.cpp's binary corpus: int32 ids, one text after the other; it knows no mark between them."""
    ids = numpy.concatenate([numpy.asarray(counted_text(answer), "<i4") for answer in answers])
    if suffix_depth(len(ids)) < SHALLOWEST:
        most = IK_INSERTED // SHALLOWEST
        raise DataError(f"{len(ids)} tokens of answers: ik_llama.cpp reads at most {most}", "export from a smaller run")
    return ids.tobytes(), f"{len(ids)} ids", len(ids)


def _external_corpus(recipe: Recipe, answers: Sequence[Sample]) -> Written:
    """SGLang's JSON lines: the text of each, special tokens included, which SGLang tokenizes again."""
    tokenizer = load_tokenizer(recipe.target.model)
    texts = [counted_text(answer) for answer in answers]
    lines = [decoded(tokenizer, ids) for ids in texts]
    again = [list(tokenizer.encode(line, add_special_tokens=False)) for line in lines]
    other = sum(left != right for left, right in zip(texts, again, strict=True))
    content = f"{len(lines)} texts" + (f", {other} of which have other ids when they are tokenized again" * bool(other))
    return _json_lines(lines), content, sum(map(len, again))


def _requests(recipe: Recipe, answers: Sequence[Sample]) -> Written:
    """Requests to /v1/completions for texts like the answers: vLLM's cache holds what it wrote itself, nothing else."""
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
