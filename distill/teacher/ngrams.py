"""Stage `table`: n-grams of the target's answers, counted by its distributions; and the same n-grams as files from
which servers draft without a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn.functional import pad

from distill.data.samples import Sample, Samples, decoded, how_to_redo
from distill.decoding.ngrams import ORDER, Expected, NGramTable, count_ngrams, write_table
from distill.devices import as_float64, pick_device
from distill.engines.server_commands import IK_INSERTED, suffix_depth
from distill.engines.torch.hugging_face import load_tokenizer
from distill.errors import DataError, RunError
from distill.files import write_atomically
from distill.recipe import Recipe
from distill.run import Run
from distill.teacher.store import TeacherStore
from distill.teacher.texts import learnt_answers, packed_order, tokenizer_digest

# ── Stage `table` ──

LIKELIEST = 12  # tokens of the target's distribution that may count
AT_ONCE = 128  # distributions that are read at once
TABLE_FILE = ("table", "ngrams.safetensors")  # in a run


def table(recipe: Recipe, run: Run) -> list[Path]:
    """Count n-grams of the run's train answers, in which the target's likeliest tokens count in the place of the drawn
    ones."""
    kept = packed_order(learnt_answers(run), recipe)
    expected = expected_tokens(TeacherStore(run), kept, pick_device(recipe.device))
    levels = count_ngrams([*map(counted_text, kept)], expected=expected)
    path = run.path(*TABLE_FILE)
    about = {"target": recipe.target.model, "tokenizer": tokenizer_digest(recipe.target.model)}
    tokens = sum(len(answer.answer) for answer in kept)
    write_table(path, levels, about | {"texts": str(len(kept)), "tokens": str(tokens)})
    ngrams = sum(len(level.tokens) for level in levels)
    size = f"{ngrams} n-grams, by the teacher's probabilities, {path.stat().st_size / 1e6:.1f} MB"
    run.say(f"  {len(kept)} answers of {tokens} tokens: {size}")
    return [path]


def counted_text(answer: Sample) -> list[int]:
    """The ids that n-grams are counted of: an answer behind the last tokens of its prompt."""
    return [*answer.prompt[-ORDER:], *answer.answer]


def expected_tokens(store: TeacherStore, answers: Samples, device: torch.device) -> list[Expected]:
    """The target's likeliest tokens at each token of the answers, which a store holds in this order, before its text;
    DataError where it holds others."""
    turns = map(answers.ids, range(len(answers)))
    scored = [answer if len(prompt) else answer[1:] for prompt, answer in turns]
    written = torch.from_numpy(numpy.concatenate(scored))
    found, ids, chances, read = list[Tensor](), list[Tensor](), list[Tensor](), 0
    for block in range(store.blocks):
        if read >= len(written):
            break
        stored = store.read(torch.tensor([block]))
        found.append(stored.blocks.labels())
        teacher = stored.distributions(device)
        for start in range(0, len(teacher), AT_ONCE):
            chunk = teacher.chunk(slice(start, start + AT_ONCE))
            missing = max(0, LIKELIEST - chunk.log_probabilities.shape[-1])  # in blocks of few entries
            logs = pad(chunk.log_probabilities, (0, missing), value=-torch.inf)
            best, tokens = logs.topk(LIKELIEST)
            if chunk.ids is not None:
                tokens = pad(chunk.ids, (0, missing), value=store.vocabulary).gather(-1, tokens)
            # An unused place stands for no token: it equals none that was drawn, and its probability counts nothing.
            ids.append(tokens.masked_fill(tokens >= store.vocabulary, -1).long().cpu())
            chances.append(as_float64(best.exp()).cpu())
        read += len(teacher)
    if not torch.equal(torch.cat(found)[: len(written)], written):
        raise DataError(f"{store.folder} holds the distributions of other answers", how_to_redo("teacher"))
    lengths = [len(one) for one in scored]
    parts = (torch.cat(some)[: len(written)].split(lengths) for some in (ids, chances))
    return [Expected(tokens.numpy(), probabilities.numpy()) for tokens, probabilities in zip(*parts, strict=True)]


def open_table(path: Path, target: str) -> NGramTable:
    """The table in a file, or of a run's folder, for this target; DataError where it is of another vocabulary, or
    damaged."""
    if path.is_dir():
        path = path.joinpath(*TABLE_FILE)
    return NGramTable.open(path, tokenizer_digest(target))


# ── Files for servers ──

NO_TOKEN = -1  # llama.cpp's places of an n-gram of four that a bigram leaves free
SHALLOWEST = 6  # tree of ik_llama.cpp's that can draft: a token behind a match of 5


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
