"""Stage `eval`: target against draft, before and after training, on the test split."""

from __future__ import annotations

import functools
from pathlib import Path

from distill.evaluation.from_store import evaluate_stored
from distill.evaluation.pairs import Asked, Opened, evaluate_pairs
from distill.files import write_atomically, write_text
from distill.models.hugging_face import load_model, load_target, load_tokenizer, pick_device
from distill.models.loaded import pair_of_models
from distill.models.trimmed_head import read_kept
from distill.packing import Packed
from distill.recipe import PyTorch, Recipe
from distill.recipe.recipe import REASON
from distill.results.evaluation_results import EvaluationReport
from distill.results.evaluation_tables import evaluation_blocks
from distill.results.serialise import write_result
from distill.run import Run
from distill.sampler import Sampler
from distill.speculative.decode import Round
from distill.tables import document
from distill.texts import read_prompts


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
    opened = open_run(recipe, run)
    run.say(f"  the target continues {len(opened.prompts)} test prompts")
    asked = Asked(
        Sampler.of(recipe.sampler),
        recipe.eval,
        run.command,
        seed=recipe.seed,
        batch=recipe.answers.batch,
        prepack=recipe.pytorch.prepack,
        compared=False,
    )
    report, rounds = evaluate_pairs([opened], asked)
    write_rounds(run.path("rounds.parquet"), rounds)
    return [*_written(run, report), run.path("rounds.parquet")]


def open_run(recipe: Recipe, run: Run) -> Opened:
    """A run's target with its drafts, behind the run's test prompts and beside its test texts."""
    device = pick_device(recipe.device)
    target, tokenizer = load_target(recipe.target, device), load_tokenizer(recipe.target.model)
    load = functools.partial(load_model, dtype=recipe.target.dtype, device=device)
    drafts = {"before": load(str(run.path("cut"))), "after": load(str(run.path("draft")))}
    if read_kept(run.path("draft")) is not None:  # as llama.cpp and others run it, without the trimmed head
        drafts["after, full head"] = load(str(run.path("draft")), trimmed=False)
    prompts = read_prompts(run, "test")[: recipe.eval.prompts]
    return Opened(
        {
            name: pair_of_models(recipe.target.model, target, draft, tokenizer, PyTorch(prepack=False))
            for name, draft in drafts.items()
        },
        prompts,
        recipe.corpus.block,
        [prompt.kind for prompt in prompts],
        Packed.load(run.path("corpus", "text-test.safetensors")).take(slice(0, recipe.eval.file_blocks)),
        ["after"],  # almost nothing of an untrained cut is accepted: decoding with it would take minutes
    )


def _written(run: Run, report: EvaluationReport) -> list[Path]:
    """The files of a report."""
    write_result(run.path("eval.json"), report)
    write_text(run.path("eval.md"), document(evaluation_blocks(report)))
    return [run.path("eval.json"), run.path("eval.md")]
