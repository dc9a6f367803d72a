"""Stage `eval`: target against draft, before and after training, on the test split."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distill.errors import DataError
from distill.evaluation.from_store import evaluate_stored
from distill.evaluation.measure import as_report, block_values, decode_rounds, sum_by_document
from distill.evaluation.slices import SlicedValues
from distill.files import write_atomically, write_text
from distill.models.hugging_face import (
    end_ids,
    load_model,
    load_target,
    load_tokenizer,
    pick_device,
    real_tokens,
    text_folder,
)
from distill.models.loaded import growing_decoder
from distill.models.trimmed_head import read_kept
from distill.packing import Packed, pack
from distill.recipe import Recipe
from distill.recipe.recipe import REASON
from distill.results.evaluation_results import EvaluationReport
from distill.results.evaluation_tables import evaluation_blocks
from distill.results.serialise import write_result
from distill.run import Run
from distill.sampler import Sampler
from distill.speculative.decode import Round
from distill.speculative.sample import continue_prompts
from distill.tables import document
from distill.texts import prompt_seed, read_prompts
from distill.vocabulary import Vocabulary


def continue_all(
    target: Any,
    prompts: Sequence[Sequence[int]],
    sampler: Sampler,
    limit: int,
    seeds: Sequence[int],
    ends: Sequence[int],
    batch: int,
    vocabulary: int,
) -> list[list[int]]:
    """The target's own continuations of prompts, in batches."""
    limit = min(limit, target.config.max_position_embeddings - max(len(prompt) for prompt in prompts))
    if limit < 1:
        raise DataError("the prompts fill the target's context", "lower answers.prompt_tokens")
    texts: list[list[int]] = []
    for start in range(0, len(prompts), batch):
        rows = slice(start, start + batch)
        texts += continue_prompts(target, prompts[rows], sampler, limit, seeds[rows], ends, vocabulary)
    return texts


def pack_answers(prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], block: int) -> Packed:
    """Prompts in blocks, each with the target's text behind it, which alone is scored."""
    return pack((([*prompt, *text], len(prompt)) for prompt, text in zip(prompts, texts, strict=True)), block, False)


def write_rounds(path: Path, rounds: dict[str, list[list[Round]]]) -> None:
    """rounds.parquet: one row per round (draft, prompt, depth, drafted, accepted, seconds)."""
    import pyarrow
    import pyarrow.parquet

    rows = [
        {"draft": name, "prompt": prompt, **r._asdict()}
        for name, prompts in rounds.items()
        for prompt, own in enumerate(prompts)
        for r in own
    ]
    kinds = {"draft": pyarrow.string(), "prompt": pyarrow.int64()} | dict.fromkeys(Round._fields, pyarrow.int64())
    # Named columns, so that a table without a round has them too.
    table = pyarrow.Table.from_pylist(rows, pyarrow.schema(kinds | {"seconds": pyarrow.float64()}))
    write_atomically(path, lambda temporary: pyarrow.parquet.write_table(table, temporary))


def evaluate(recipe: Recipe, run: Run) -> list[Path]:
    """Write eval.json, eval.md and rounds.parquet: the draft before (cut/) and after (draft/) training.

    Where the target is not loaded there are no rounds, and the rest is measured on its stored distributions.
    """
    if not recipe.target.load:
        run.say(f"  measured on stored distributions of test/, no rounds are decoded: {REASON}")
        return _written(run, evaluate_stored(recipe, run))
    device = pick_device(recipe.device)
    target, tokenizer = load_target(recipe.target, device), load_tokenizer(recipe.target.model)
    load = functools.partial(load_model, dtype=recipe.target.dtype, device=device)
    drafts = {"before": load(str(run.path("cut"))), "after": load(str(run.path("draft")))}
    if read_kept(run.path("draft")) is not None:  # as llama.cpp and others run it, without the trimmed head
        drafts["after, full head"] = load(str(run.path("draft")), trimmed=False)
    ends = end_ids(recipe.target.model, tokenizer)
    vocabulary = real_tokens(target.config, tokenizer)
    sampler = Sampler.of(recipe.sampler)
    prompts = read_prompts(run, "test")[: recipe.eval.prompts]
    ids = [prompt.ids for prompt in prompts]
    seeds = [prompt_seed(recipe.seed, prompt.id) for prompt in prompts]
    run.say(f"  the target continues {len(ids)} test prompts")
    limit = min(recipe.eval.new_tokens, recipe.corpus.block - max(map(len, ids)))  # served prompts may be long
    texts = continue_all(target, ids, sampler, limit, seeds, ends, recipe.answers.batch, vocabulary)
    own = pack_answers(ids, texts, recipe.corpus.block)
    files = Packed.load(run.path("corpus", "text-test.safetensors")).take(slice(0, recipe.eval.file_blocks))
    domains = {"answers": own, **({"files": files} if len(files) else {})}  # a corpus of questions has no given text
    bytes_of = Vocabulary.read(text_folder(recipe.target.model)).bytes_of
    sliced = SlicedValues.of(own, lambda token: bytes_of[token] or b"", ends)
    measured = {}
    for name, blocks in domains.items():
        values = block_values(target, drafts, blocks, sampler, vocabulary)
        measured[name] = sum_by_document(sliced.watch(values) if name == "answers" else values)
    # Almost nothing of an untrained cut is accepted, so decoding with it would take minutes for no information.
    big, small = (growing_decoder(model, vocabulary, recipe.pytorch.prepack) for model in (target, drafts["after"]))
    rounds = {"after": decode_rounds(big, small, ids, recipe.eval, ends, "rounds after, prompts")}
    classes = [prompt.kind for prompt in prompts] if all(texts) else ()
    report = as_report(measured, rounds, sampler, recipe.eval, run.command, classes, sliced=sliced)
    write_rounds(run.path("rounds.parquet"), {name: own.rounds for name, own in rounds.items()})
    return [*_written(run, report), run.path("rounds.parquet")]


def _written(run: Run, report: EvaluationReport) -> list[Path]:
    """The files of a report."""
    write_result(run.path("eval.json"), report)
    write_text(run.path("eval.md"), document(evaluation_blocks(report)))
    return [run.path("eval.json"), run.path("eval.md")]
