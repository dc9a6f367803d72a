"""What servers draft from without a model, out of a run's train answers: the texts whose n-grams stage `table` counts.

The forms are those that the programs themselves read: llama.cpp's common/ngram-cache, ik_llama.cpp's
common/suffix-tree, SGLang's cpp_ngram/external_corpus, vLLM's requests. Legend: G bigrams, F tokens that follow them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from distill.data.texts import Answer, decoded
from distill.decoding.ngrams import count_ngrams
from distill.engines.server_commands import IK_INSERTED, suffix_depth
from distill.engines.torch.hugging_face import load_tokenizer
from distill.errors import DataError, RunError
from distill.files import write_atomically
from distill.recipe import Recipe
from distill.run import Run
from distill.teacher.table import counted_text, learnt_answers

NO_TOKEN = -1  # llama.cpp's places of an n-gram of four that a bigram leaves free
SHALLOWEST = 6  # tree of ik_llama.cpp's that can draft: a token behind a match of 5


@dataclass(frozen=True)
class LookupFile:
    """A file that a server reads: what it has, from how many answers and tokens."""

    path: Path
    content: str
    texts: int
    tokens: int


def export_lookup(recipe: Recipe, run: Run, server: str, path: Path) -> LookupFile:
    """Write the file of one of `FORMS`.

    Raises RunError for a run whose answers are not finished, DataError where nothing is left of them or the server
    does not take so much.
    """
    if run.done("answers") is None:
        raise RunError(f"{run.folder} has no finished answers", f"`{run.again('--until', 'answers')}` writes them")
    run.verify("answers", "answers/train-*")
    answers = learnt_answers(run)
    data, content, tokens = FORMS[server][1](recipe, answers)
    write_atomically(path, lambda temporary: temporary.write_bytes(data))
    return LookupFile(path, content, len(answers), tokens)


Written = tuple[bytes, str, int]  # the file, what it has, and how many tokens


def _static_cache(recipe: Recipe, answers: Sequence[Answer]) -> Written:
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


def _suffix_corpus(recipe: Recipe, answers: Sequence[Answer]) -> Written:
    """ik_llama.cpp's binary corpus: int32 ids, one text after the other; it knows no mark between them."""
    ids = numpy.concatenate([numpy.asarray(counted_text(answer), "<i4") for answer in answers])
    if suffix_depth(len(ids)) < SHALLOWEST:
        most = IK_INSERTED // SHALLOWEST
        raise DataError(f"{len(ids)} tokens of answers: ik_llama.cpp reads at most {most}", "export from a smaller run")
    return ids.tobytes(), f"{len(ids)} ids", len(ids)


def _external_corpus(recipe: Recipe, answers: Sequence[Answer]) -> Written:
    """SGLang's JSON lines: the text of each, special tokens included, which SGLang tokenizes again."""
    tokenizer = load_tokenizer(recipe.target.model)
    texts = [counted_text(answer) for answer in answers]
    lines = [decoded(tokenizer, ids) for ids in texts]
    again = [list(tokenizer.encode(line, add_special_tokens=False)) for line in lines]
    other = sum(left != right for left, right in zip(texts, again, strict=True))
    content = f"{len(lines)} texts" + (f", {other} of which have other ids when they are tokenized again" * bool(other))
    return _json_lines(lines), content, sum(map(len, again))


def _requests(recipe: Recipe, answers: Sequence[Answer]) -> Written:
    """Requests to /v1/completions for texts like the answers: vLLM's cache holds what it wrote itself, nothing else."""
    sampler = recipe.sampler.model_dump(mode="json") | {"repetition_penalty": recipe.answers.repetition_penalty}
    stop = {"stop": list(recipe.answers.stop)} if recipe.answers.stop else {}
    requests = [
        {"prompt": answer.prompt, "max_tokens": len(answer.answer), **sampler, **stop, "seed": number}
        for number, answer in enumerate(answers)
    ]
    return _json_lines(requests), f"{len(requests)} requests", sum(len(answer.answer) for answer in answers)


def _json_lines(values: Sequence[Any]) -> bytes:
    return "".join(json.dumps(value) + "\n" for value in values).encode()


FORMS: dict[str, tuple[str, Callable[[Recipe, Sequence[Answer]], Written]]] = {  # by server: the file's usual name
    "llama.cpp": ("llama.cpp-static.bin", _static_cache),
    "ik_llama": ("ik_llama-corpus.bin", _suffix_corpus),
    "sglang": ("sglang-corpus.jsonl", _external_corpus),
    "vllm": ("vllm-requests.jsonl", _requests),
}
