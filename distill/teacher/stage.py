"""Stage `teacher`: the target's distributions on its own answers and on corpus text, in checksummed shards; and
stage `table`: n-grams of those answers, from which `drafter: table` drafts, and files from which servers draft.

The forms of these files are what the programs themselves read: llama.cpp's common/ngram-cache, ik_llama.cpp's
common/suffix-tree, SGLang's cpp_ngram/external_corpus, vLLM's requests. Legend: n blocks, S positions, N scored
positions, K stored entries, V vocabulary; G bigrams, F tokens that follow them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from distill.data.packing import Blocks, Deferred, Packed, planned, scored_states
from distill.data.samples import Sample, Samples, decoded, how_to_redo, read_answers
from distill.decoding.ngrams import ORDER, Expected, NGramTable, count_ngrams, write_table
from distill.devices import barrier, doubled, pick_device, process_count, process_index, share_of
from distill.engines.server_commands import IK_INSERTED, suffix_depth
from distill.engines.torch.hugging_face import DTYPES, load_config, load_target, load_tokenizer, real_tokens
from distill.errors import DataError, RunError
from distill.files import read_json, write_atomically, write_json
from distill.progress import Progress
from distill.recipe import Recipe
from distill.run import Run
from distill.teacher.distributions import Head, require_head
from distill.teacher.likeliest import Reader, ServerReader, compact_distributions, mean_masses, open_reader
from distill.teacher.store import (
    FORMAT,
    PACKED_BYTES,
    TeacherStore,
    bytes_per_row,
    head_path,
    read_manifest,
    shard_path,
    target_metadata,
    tokenizer_digest,
)

# ── Stage `teacher` ──

Distributions = Callable[[Packed], dict[str, Tensor]]


def training_blocks(recipe: Recipe, run: Run) -> tuple[Blocks, int]:
    """The blocks that the draft learns from: the target's answers (prompts masked), then the corpus text; and the
    scored positions of the answers."""
    own = answer_blocks(learnt_answers(run), recipe)[0]
    text = Packed.load(run.path("corpus", "text-train.safetensors"))
    return own.before(text), int(own.scored.sum())


def learnt_answers(run: Run) -> Samples:
    """The answers that training learns from, never held-out ones; at least one."""
    answers = read_answers(run, "train")
    return answers.take(answers.column("dropped") == "")


def answer_blocks(answers: Samples, recipe: Recipe) -> tuple[Deferred, list[list[list[int]]]]:
    """Answers in the blocks in which they are learnt from; and the numbers of those in each document of each block."""
    return planned(answers.ids, len(answers), recipe.corpus.block)


def packed_order(answers: Samples, recipe: Recipe) -> Samples:
    """The answers in the order in which blocks hold them."""
    rows = answer_blocks(answers, recipe)[1]
    return answers.take([one for row in rows for own in row for one in own])


def teacher(recipe: Recipe, run: Run, share: tuple[int, int] | None = None) -> list[Path]:
    """Write teacher/shard-NNNNN.safetensors and manifest.json; the unit of resuming is the shard.

    With several processes, `share` = (index, count) makes this one write every count-th shard; the first process writes
    the manifest when all are done. None: the share of this process among those it was launched with.
    """
    share = share or (process_index(), process_count())
    blocks, own = training_blocks(recipe, run)
    return write_store(recipe, run, blocks, share, answers=own)


def write_store(
    recipe: Recipe,
    run: Run,
    blocks: Blocks,
    share: tuple[int, int],
    stage: str = "teacher",
    all_entries: bool = False,
    answers: int = 0,
) -> list[Path]:
    """Write this process's share of the shards of a stage's blocks, and as the first process manifest.json.

    `answers` are the scored positions of answers. `all_entries`: of a compact store, teacher.top_k entries a position,
    whatever teacher.mass says.
    """
    main, settings, folder = share[0] == 0, recipe.teacher, run.path(stage)
    config = load_config(recipe.target.model)
    vocabulary = real_tokens(config.get_text_config(), load_tokenizer(recipe.target.model))
    size, scored = settings.shard_blocks, int(blocks.scored.sum())
    parts = [(shard_path(folder, at // size), slice(at, at + size)) for at in range(0, len(blocks), size)]
    mine = share_of(parts, share, "teacher shards", "teacher.shard_blocks")
    # A server is sent a whole shard at once, so that it always has requests waiting.
    batch = settings.batch if settings.server is None else size
    with ExitStack() as opened:
        metadata, distributions = _maker(recipe, run, blocks, vocabulary, main, all_entries, opened, folder)
        if main:
            hidden = config.get_text_config().hidden_size
            each = bytes_per_row(settings, hidden, recipe.target.dtype, metadata.get("k"))
            mixed = f", {scored - answers} of them of given text" if answers and scored > answers else ""
            taken = scored * each + len(blocks) * recipe.corpus.block * PACKED_BYTES
            run.say(
                f"  {scored} scored positions in {len(blocks)} blocks{mixed}; the store takes {taken / 1e6:.0f} MB in "
                f"{len(parts)} shards"
            )
        progress = Progress(f"{stage}, shards" + (f" of process {share[0]}" if share[1] > 1 else ""), len(mine))
        for path, part in mine:
            exists = path.exists()
            if not exists:
                save_shard(path, shard_tensors(blocks.take(part), distributions, batch))
            progress.step(note="(exists)" if exists else "")
        if share[1] > 1:
            barrier()
        if main:
            lacking = next((path for path, _ in parts if not path.exists()), None)
            if lacking is not None:
                what = f"{lacking} was not written by the process it was assigned to"
                raise RunError(what, "run the same command again")
            manifest = {
                "format": FORMAT,
                "kind": settings.kind,
                **metadata,
                "vocabulary": vocabulary,
                **target_metadata(recipe),
                "sampler": read_json(run.path("answers", "manifest.json"), {"sampler": dict})["sampler"],
                "shard_blocks": [len(range(len(blocks))[part]) for _, part in parts],
                "scored_positions": scored,
                "answer_positions": answers,
            }
            write_json(folder / "manifest.json", manifest)
    return [folder]


def _maker(
    recipe: Recipe,
    run: Run,
    blocks: Blocks,
    vocabulary: int,
    main: bool,
    all_entries: bool,
    opened: ExitStack,
    folder: Path,
) -> tuple[dict[str, Any], Distributions]:
    """The manifest's entries for a kind of store, and the function from blocks to the tensors of their shard."""
    settings = recipe.teacher
    if settings.kind == "online":
        return {}, lambda part: {}
    if settings.kind == "exact":
        model = load_target(recipe.target, pick_device(recipe.device))
        head = Head.of(model, vocabulary)
        require_head(model, head, blocks.take(slice(0, 1)))
        path = head_path(folder)
        if main and not path.exists():
            tensors = {"weight": head.weight} | ({} if head.bias is None else {"bias": head.bias})
            save_shard(path, {name: value.cpu().clone() for name, value in tensors.items()})
        dtype = recipe.target.dtype
        metadata: dict[str, Any] = {"hidden_dtype": dtype, "logit_form": asdict(head.form)}
        return metadata, lambda part: exact_distributions(model, part, DTYPES[dtype])
    reader = open_reader(recipe, run, vocabulary)
    opened.callback(reader.close)
    if isinstance(reader, ServerReader):
        reader.endpoint.require_same(folder)
    k = min(settings.top_k, vocabulary - 1)
    mass = None if all_entries else settings.mass
    if mass is not None:
        k = _entries(recipe, run, reader, blocks, k, mass, main)
    metadata = {"k": k, "mass": mass, "origin": reader.origin}
    return metadata, lambda part: compact_distributions(reader, part, k)


def shard_tensors(blocks: Packed, distributions: Distributions, batch: int) -> dict[str, Tensor]:
    """The tensors of one shard: its blocks and the target's distributions on them, made `batch` blocks at a time."""
    parts = [distributions(part) for part in blocks.batches(batch)]
    tensors = blocks.tensors() | {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    tensors["rows"] = torch.cat([torch.zeros(1, dtype=torch.int64), blocks.scored.cumsum(0)])
    if blocks.documents.shape[1] <= torch.iinfo(torch.int16).max:
        tensors["documents"] = blocks.documents.to(torch.int16)
    return {name: value.contiguous() for name, value in tensors.items()}


@torch.no_grad()
def exact_distributions(model: Any, blocks: Packed, dtype: torch.dtype) -> dict[str, Tensor]:
    """hidden [N, H] in `dtype`; raises DataError where that type cannot hold them."""
    hidden = scored_states(model, blocks).cpu().to(dtype)
    if not bool(hidden.isfinite().all()):
        raise DataError(
            f"hidden states of the target are not finite in {str(dtype).removeprefix('torch.')}",
            "set target.dtype to bfloat16 or float32",
        )
    return {"hidden": hidden.contiguous()}


def _entries(recipe: Recipe, run: Run, reader: Reader, blocks: Blocks, cap: int, mass: float, main: bool) -> int:
    """K of a compact store: the fewest entries, up to `cap`, that hold the mass on average over some blocks.

    The main process chooses, once, for all processes and for a run that goes on later.
    """
    path = run.path("teacher", "entries.json")
    if main and not path.exists():
        count = min(len(blocks), recipe.teacher.batch)
        sample = blocks.take(torch.linspace(0, len(blocks) - 1, count).round().long().unique())
        masses = mean_masses(reader, sample, cap)
        enough = (masses >= mass).nonzero().flatten().tolist()
        k = enough[0] + 1 if enough else cap
        run.say(
            f"  {k} entries hold {float(masses[k - 1]):.4f} of the mass on average over {int(sample.mask.sum())} "
            "positions" + ("" if enough else f", less than teacher.mass = {mass:g}: teacher.top_k is the cap")
        )
        write_json(path, {"k": k, "mass": float(masses[k - 1]), "positions": int(sample.mask.sum())})
    barrier()
    return int(read_json(path, {"k": int})["k"])


def save_shard(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file."""
    from safetensors.torch import save_file

    write_atomically(path, lambda temporary: save_file(tensors, str(temporary)))


# ── Stage `table` ──

LIKELIEST = 12  # tokens of the target's distribution that may count
ROWS = 128  # distributions that are read at once
TABLE_FILE = ("table", "ngrams.safetensors")  # in a run


def table(recipe: Recipe, run: Run) -> list[Path]:
    """Count n-grams of the run's train answers.

    Where the teacher store has the target's distributions, its likeliest tokens count in place of the drawn ones.
    """
    kept = packed_order(learnt_answers(run), recipe)
    expected = None
    if read_manifest(run)["kind"] != "online":
        expected = expected_tokens(TeacherStore(run), kept, pick_device(recipe.device))
    levels = count_ngrams([*map(counted_text, kept)], expected=expected)
    path = run.path(*TABLE_FILE)
    about = {"target": recipe.target.model, "tokenizer": tokenizer_digest(recipe.target.model)}
    tokens = sum(len(answer.answer) for answer in kept)
    write_table(path, levels, about | {"texts": str(len(kept)), "tokens": str(tokens)})
    ngrams = sum(len(level.tokens) for level in levels)
    kind = "" if expected is None else ", by the teacher's probabilities"
    run.say(f"  {len(kept)} answers of {tokens} tokens: {ngrams} n-grams{kind}, {path.stat().st_size / 1e6:.1f} MB")
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
        own = store.packed.take(torch.tensor([block]))
        found.append(own.labels()[own.mask])
        teacher = store.teacher(torch.tensor([block]), device)
        for start in range(0, len(teacher), ROWS):
            chunk = teacher.chunk(slice(start, start + ROWS))
            best, columns = chunk.log_probabilities.topk(min(LIKELIEST, chunk.log_probabilities.shape[-1]))
            ids.append((columns if chunk.ids is None else chunk.ids.gather(-1, columns)).long().cpu())
            chances.append(doubled(best.exp()).cpu())
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
    run.verify("answers", "answers/train-*")
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
