"""Public Python API, for notebooks and other programs. docs/api.md shows every name at work.

Models are named as on the command line: a Hugging Face folder, a hub name, or a GGUF file. Paths are relative to the
working directory. A caller's mistake raises a DistillError: `what` says what is wrong, `hint` what to do next.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from distill.data.prompts import sources_of
from distill.data.suites import read_suite
from distill.decoding.batch import at_once as run_at_once
from distill.decoding.batch import rows_of
from distill.decoding.configured import check_configurations, pair_costs
from distill.decoding.decode import Decoded
from distill.engines import loaded
from distill.engines.loaded import GROWING, LoadedPair
from distill.engines.pairs import pair_references, require_pair
from distill.engines.torch.hugging_face import local_folder, settle_types, settled_target
from distill.errors import DataError, DistillError, RecipeError
from distill.files import read_utf8, require_new_folder
from distill.gguf.importing import Import, read_import, write_import
from distill.gguf.writer import WrittenFile
from distill.gguf.writer import export_gguf as write_gguf
from distill.machine import machine, thread_count
from distill.measuring.compare import PairSettings
from distill.measuring.evaluation import EvaluationOptions, Grid, evaluate_grid, prompts_of, prompts_of_suite
from distill.measuring.evaluation_results import EvaluationReport, evaluation_blocks
from distill.measuring.speedup import measure_any_pair
from distill.measuring.speedup_results import SpeedupReport
from distill.measuring.speedup_tables import speedup_blocks
from distill.pipeline.preflight import preflight
from distill.pipeline.running import plan_run, require_allowed, run_pipeline
from distill.planning.cases import PlanRequest, measured_cases
from distill.planning.order import decide
from distill.planning.plan import SpeedupPlan, forecast
from distill.progress import note, warn
from distill.recipe import (
    Chat,
    Configuration,
    Corpus,
    Cut,
    Evaluate,
    Gguf,
    PyTorch,
    Recipe,
    Sampler,
    Speedup,
    Target,
    dump_recipe,
    load_recipe,
    parse_section,
    recipe_of,
    resolve_model,
)
from distill.recipe.configuration import USUAL_LENGTH
from distill.recipe.measuring import fixed_length
from distill.report.page import section
from distill.report.plots import acceptance_by_position, speeds
from distill.run import Run
from distill.serving.answering import Continuation, begin
from distill.surgery.cutter import cut_folder
from distill.surgery.results import Change
from distill.surgery.vocabulary import folders_of
from distill.surgery.vocabulary import transplant as transplanted
from distill.tables import Plot

__all__ = [
    "Change",
    "Configuration",
    "Decoded",
    "DistillError",
    "EvaluationReport",
    "LoadedPair",
    "Recipe",
    "Run",
    "Sampler",
    "SpeedupPlan",
    "SpeedupReport",
    "check",
    "cut",
    "decode",
    "decode_at_once",
    "evaluate",
    "export_gguf",
    "import_gguf",
    "load_pair",
    "measure_speedup",
    "plan",
    "train",
    "transplant",
]

Floats = Literal["float32", "bfloat16", "float16"]
Dtype = Literal["auto"] | Floats
Paths = Sequence[str | Path]
BLOCK: int = Corpus.model_fields["block"].default  # tokens of a text, unless a prompt is longer


Texts = Sequence[str | Path]  # A str is a text. A Path is a file of text, or a folder of such files.


# ── A draft from a recipe: the stages that `distill train` runs ──


def train(
    recipe: str | Path | Mapping[str, Any] | Recipe,
    *,
    runs: str | Path = "runs",
    until: str | None = None,
    redo: Sequence[str] = (),
    **overrides: Any,
) -> Run:
    """Run every stage of a recipe up to `until` in runs/NAME, and return that run.

    Finished stages are skipped, so the same call resumes an interrupted run. `redo` names stages to run again. `recipe`
    is a file, its content as a mapping, or a Recipe. `overrides` are keys of docs/recipes.md: `seed=1`, or a mapping
    for some keys of a section, `train={"steps": 100}`.

    Raises RecipeError for mistakes in the recipe, and RunError if finished work would be lost. Both are raised before
    anything is written.
    """
    settled, text = _recipe(recipe, overrides, Path(runs))
    run = Run(Path(runs) / settled.name, settled, command="distill.train")
    require_allowed(plan_run(settled, run, until, redo))
    corpus_open, teacher_open = run.done("corpus") is None, run.done("teacher") is None
    for line in preflight(settled, corpus_open, until=until, teacher=teacher_open, folder=run.folder).warnings:
        warn(line)
    torch.set_num_threads(thread_count(settled.threads))
    with closing(run):
        run.open(text)
        run_pipeline(settled, run, until, redo)
    return run


def check(recipe: str | Path | Mapping[str, Any] | Recipe, *, offline: bool = False, **overrides: Any) -> list[str]:
    """Return the output of `distill check`, a line for each check that passed.

    No weights are loaded. `recipe` and `overrides` are those of `train`. Raises DistillError for the first check that
    failed.
    """
    return preflight(_recipe(recipe, overrides, None)[0], offline=offline).lines


def plan(
    target: str | Path,
    draft: str | Path,
    *,
    acceptance: Sequence[float] = (),
    lengths: Sequence[int] = (1, 2, 3, 4, 6, 8),
    prompt_tokens: int = 128,
    max_new_tokens: int = 96,
    dtype: str = "auto",
    threads: int | None = None,
    gguf: Gguf | None = None,
) -> SpeedupPlan:
    """Predict the speedup by draft length and conditional acceptance, from costs that are measured now.

    `acceptance` are conditional acceptances by drafted position. The last one holds for all later positions. Without
    them, the plan says what acceptance a draft needs for a gain.
    """
    big, small = resolve_model(str(target)), resolve_model(str(draft))
    place = settled_target(big, dtype)
    request = PlanRequest(place, small, None, None, lengths, prompt_tokens, max_new_tokens, threads, gguf)
    given = {"acceptance": list(acceptance)} if acceptance else {}
    cases = list(measured_cases(request))
    forecasts = [forecast(case, given) for case in cases]
    return SpeedupPlan("distill.plan", machine(), forecasts, decision=decide(big, cases[0]))


def _recipe(
    recipe: str | Path | Mapping[str, Any] | Recipe, overrides: Mapping[str, Any], runs: Path | None
) -> tuple[Recipe, str]:
    """Return a recipe with its overrides, and its text.

    Number types that the recipe leaves open are those of the existing run, or else those for this machine.
    """
    changes = [f"{name}={json.dumps(value)}" for name, value in _flat(overrides)]
    if isinstance(recipe, (str, Path)):
        loaded_recipe, text = load_recipe(Path(recipe), changes), read_utf8(Path(recipe))
    else:
        values = recipe.model_dump(mode="json") if isinstance(recipe, Recipe) else dict(recipe)
        loaded_recipe = recipe_of(copy.deepcopy(values), "the recipe", Path.cwd(), changes)
        text = dump_recipe(loaded_recipe)
    begun = None if runs is None else runs / loaded_recipe.name / "config.yaml"
    earlier = load_recipe(begun) if begun is not None and begun.is_file() else None
    return settle_types(loaded_recipe, earlier), text


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and their values. A mapping has the keys of a section."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


# ── A pair of models ──


def load_pair(
    target: str | Path,
    draft: str | Path | None = None,
    *,
    dtype: Dtype = "auto",
    device: str = "auto",
    tokens: int | None = None,
    nodes: int = 0,
    threads: int | None = None,
    gguf: Gguf | None = None,
    pytorch: PyTorch = GROWING,
) -> LoadedPair:
    """Load a target, alone or with a draft of its vocabulary. Use the pair in a `with` statement, or `close` it.

    `tokens` is the length of the context, and `nodes` the largest number of nodes that a tree has in GGUF files. The
    other options are those of `distill.engines.loaded.load_pair`. Raises PairError for a draft of another vocabulary.
    """
    big, small = resolve_model(str(target)), None if draft is None else resolve_model(str(draft))
    if small is not None:
        require_pair(big, small)
    settings = settled_target(big, dtype, device)
    return loaded.load_pair(
        settings, small, device=device, tokens=tokens, nodes=nodes, threads=threads, gguf=gguf, pytorch=pytorch
    )


def decode(
    pair: LoadedPair,
    prompt: str | Sequence[int],
    max_new_tokens: int = 128,
    *,
    configuration: Configuration | Mapping[str, Any] | None = None,
    sampler: Sampler | None = None,
    seed: int = 0,
    stop: Sequence[str] = (),
    table: str | Path | None = None,
) -> Decoded:
    """Continue a prompt, given as a text or as token ids, by at most `max_new_tokens`.

    `pair.text(decoded.tokens)` is the new text. It is the target's own text, whatever drafts. `configuration` is one of
    docs/recipes.md, as an object or a mapping. With None, the draft proposes four tokens a round, and a pair without a
    draft decodes plainly. `sampler` None is greedy. `table` (a file, or a run that has one) holds n-grams of the target
    for drafter table.

    Raises DataError for a configuration that would change the target's distribution, and for a prompt that is empty or
    fills the context.
    """
    request, ids, room = _asked(pair, prompt, max_new_tokens, configuration, sampler, seed, stop, table)
    return begin(pair, None, request).text(ids, room)


def decode_at_once(
    pair: LoadedPair,
    prompts: Sequence[str | Sequence[int]],
    max_new_tokens: int = 128,
    *,
    at_once: int = 8,
    seed: int = 0,
    **options: Any,
) -> list[Decoded]:
    """Continue prompts as `decode` does, `at_once` of them at a time: one call of a model serves all their texts.

    PyTorch alone can do this, by chains. `options` are those of `decode`. Text number n is drawn with `seed` + n, and
    each text is the one that it would be alone. DataError for models that decode one text at a time.
    """
    if at_once < 2:
        raise RecipeError(f"{at_once} texts at once are requested", "request at least two, or use `decode`")
    asked = [_asked(pair, prompt, max_new_tokens, seed=seed + n, **options) for n, prompt in enumerate(prompts)]
    target = loaded.require_rows(pair.target, at_once)
    draft = target if pair.draft is pair.target else loaded.require_rows(pair.draft, at_once)
    rows = [replace(pair, target=big, draft=small) for big, small in zip(rows_of(target), rows_of(draft), strict=True)]
    texts: list[Decoded] = []
    for start in range(0, len(asked), at_once):
        running = []
        for row, (request, ids, room) in zip(rows, asked[start:], strict=False):
            if request.configuration.needs_costs:  # those of a text alone, which its rounds correct
                pair_costs(pair, request.configuration.longest_round)
                row.costs.update(pair.costs)
            running.append(partial(begin(row, None, request).text, ids, room))
        texts += run_at_once(running, (draft, target))
    for model in {id(model): model for model in (draft, target)}.values():
        model.close()
    return texts


def _asked(
    pair: LoadedPair,
    prompt: str | Sequence[int],
    max_new_tokens: int,
    configuration: Configuration | Mapping[str, Any] | None = None,
    sampler: Sampler | None = None,
    seed: int = 0,
    stop: Sequence[str] = (),
    table: str | Path | None = None,
) -> tuple[Continuation, list[int], int]:
    """The request of `decode`, the ids of its prompt, and the room for new tokens."""
    sampler = sampler or Sampler(temperature=0)
    if configuration is None:
        configuration = {"drafter": "none"} if pair.draft is pair.target else {"length": USUAL_LENGTH}
    if not isinstance(configuration, Configuration):
        sampled = {"sampler": "recipe" if sampler.temperature else "greedy"}
        configuration = parse_section(Configuration, sampled | dict(configuration))
    if configuration.other_vocabulary:
        raise RecipeError(f"drafter {configuration.drafter} reads two vocabularies", "use `distill generate`")
    if max_new_tokens < 1:
        raise RecipeError(f"{max_new_tokens} new tokens are requested", "request at least one")
    if configuration.branches and pair.backend != "pytorch" and not pair.target.max_leaves:
        raise RecipeError("these GGUF files were loaded without room for trees", "load_pair(…, nodes=N)")
    ids = pair.encode(prompt) if isinstance(prompt, str) else list(prompt)
    if not ids or len(ids) >= pair.target.capacity:
        raise DataError(f"a prompt of {len(ids)} tokens in a context of {pair.target.capacity}", "give some, and fewer")
    room = min(max_new_tokens, pair.target.capacity - len(ids))
    request = Continuation(configuration, sampler, seed, stop, table=None if table is None else Path(table))
    return request, ids, room


def evaluate(
    target: str | Path,
    draft: str | Path | Paths,
    texts: Texts = (),
    *,
    suite: str | Path | None = None,
    sampler: Sampler | None = None,
    count: int | None = None,
    seed: int = 0,
    kl: bool = True,
    acceptance: bool = True,
    types: Sequence[str] = (),
    dtype: Dtype = "auto",
    threads: int | None = None,
    gguf: Gguf | None = None,
    command: str = "",
) -> EvaluationReport:
    """Measure divergences and acceptance of a pair, with intervals.

    The target continues `count` prompts that are cut from texts (None: 32), or `count` questions of each category of a
    `suite` (None: all). `sampler` None is temperature 1. Several drafts, or the draft in several GGUF `types`, are
    compared with the first one. `dtype` is the number type of folders. "auto" is that of the checkpoint.

    Raises DataError for missing files and for texts of fewer than 4 prompts, and PairError for a draft of another
    vocabulary.
    """
    if bool(texts) == (suite is not None):
        raise RecipeError("eval measures prompts or a suite", "give one of them")
    if suite is None and count is not None and count < 4:
        raise RecipeError(f"{count} prompts are too few for an interval", "measure 4 or more")
    drafts = [resolve_model(str(name)) for name in ([draft] if isinstance(draft, (str, Path)) else draft)]
    grid = Grid(resolve_model(str(target)), drafts, BLOCK, types, threads=threads, gguf=gguf, dtype=dtype)
    options = EvaluationOptions(
        sampler or Sampler(temperature=1.0), Evaluate(), command, kl, seed=seed, grid=acceptance
    )
    with tempfile.TemporaryDirectory() as scratch:
        if suite is None:
            given = prompts_of(Corpus(sources=sources_of(_files(texts, Path(scratch)))), count or 32)
        else:
            given = prompts_of_suite(read_suite(Path(suite)), count, seed)
        return evaluate_grid(grid, given, options)


def _files(texts: Texts, scratch: Path) -> list[Path]:
    """Return texts as files: the caller's files, and a new file in `scratch` for each text that is a str."""
    files = []
    for number, text in enumerate(texts):
        path = text if isinstance(text, Path) else scratch / f"text-{number}.txt"
        if isinstance(text, str):
            path.write_text(text, encoding="utf-8", newline="")
        files.append(path)
    return files


def measure_speedup(
    target: str | Path | Target,
    draft: str | Path | None,
    prompts: Paths = (),
    *,
    suite: str | Path | None = None,
    lengths: Iterable[int] = (1, 2, 4),
    configurations: Iterable[Configuration | Mapping[str, Any]] = (),
    sampler: Sampler | None = None,
    count: int | None = None,
    max_new_tokens: int = 96,
    prompt_tokens: int = 64,
    at_once: int = 1,
    dtype: Dtype = "auto",
    seed: int = 0,
    device: str = "auto",
    threads: int | None = None,
    gguf: Gguf | None = None,
    pytorch: PyTorch | None = None,
    chat: Chat | None = None,
    table: Path | None = None,
    allow_lossy: bool = False,
    command: str = "",
) -> SpeedupReport:
    """Measure speculative against plain decoding, end to end, on the prompts in files, as `distill speedup` does.

    A section `target` of a recipe keeps its number type, quantisation and devices; `dtype` is that of other targets.
    The draft's fixed `lengths` and the other `configurations` take turns with plain decoding on every prompt. With a
    `sampler`, all of them are sampled. `count` prompts are measured, by default 12. A `suite` (a file in Spec-Bench's
    form) replaces `prompts`: `count` questions of each category, by default all, with all turns, are decoded both
    greedily and sampled (by default at temperature 1). `table` holds n-grams of the target. PyTorch decodes `at_once`
    texts at once, plain and speculative ones, the latter by chains.

    Raises DataError or RecipeError for prompts, contexts and configurations that do not go together. Lossy
    configurations, if they are allowed, are named on stderr.
    """
    if bool(prompts) == (suite is not None):
        raise RecipeError("speedup measures prompts or a suite", "give one of them")
    pytorch = pytorch or PyTorch()
    drawn = sampler or Sampler(temperature=0.0 if suite is None else 1.0)
    kinds = ["greedy"] if suite is not None or not drawn.temperature else []
    kinds += ["recipe"] if drawn.temperature else []
    fixed = tuple(lengths)
    configured = [Configuration(length=length, sampler="recipe") for length in fixed if "recipe" in kinds]
    for one in configurations:
        if isinstance(one, Configuration):
            configured.append(one)
        else:
            samplers = [one["sampler"]] if "sampler" in one else kinds
            configured += [parse_section(Configuration, {"sampler": kind, **one}) for kind in samplers]
    counts: dict[str, Any] = {
        "prompts": 12 if count is None or suite is not None else count,
        "new_tokens": max_new_tokens,
    }
    counts |= {"allow_lossy": allow_lossy, "configurations": configured}
    speedup = parse_section(Speedup, counts | {"lengths": fixed if "greedy" in kinds else ()})
    every = (*map(fixed_length, speedup.lengths), *configured)
    unasked = next((one for one in every if one.sampler == "recipe" and "recipe" not in kinds), None)
    if unasked is not None:
        raise RecipeError(f"`{unasked.described}` is sampled", "give a sampler (--sampler temperature=1)")
    if at_once < 1:
        raise RecipeError(f"{at_once} texts at once are requested", "request at least one")
    if at_once > 1 and suite is not None:
        what = "--at-once decodes questions of several categories together, so no category has a time of its own"
        raise RecipeError(what, "leave it out, or give the questions as --prompts")
    alone = next((one for one in every if one.branches or one.other_vocabulary), None)
    if at_once > 1 and alone is not None:
        what = f"`{alone.described}` decodes one text at a time, and {at_once} at once are asked for"
        raise RecipeError(what, "leave --at-once out, or choose drafters draft, lookup, lookup+draft or table")
    for line in check_configurations(speedup, drawn, "the options"):
        warn(line)
    section = target if isinstance(target, Target) else settled_target(resolve_model(str(target)), dtype, device)
    own, other = section.model, None if draft is None else resolve_model(str(draft))
    place, pytorch = loaded.settled_decoding(section, other, pytorch, device)
    big, small = pair_references(own, other, every, pytorch.in_bits)
    if table is None and any(one.counts_ngrams for one in every):
        note("no table of n-grams (--table): drafter table knows those of the text so far alone")
    place = place.model_copy(update={"model": big})
    settings = PairSettings(place, small, device, threads, gguf or Gguf(), pytorch, speedup, drawn, seed, at_once)
    names = own if isinstance(target, Target) else str(target), None if draft is None else str(draft)
    more: dict[str, Any] = {"chat": chat, "table": table, "command": command}
    more |= {} if suite is None else {"suite": Path(suite), "count": count}
    return measure_any_pair(settings, names, prompts, prompt_tokens=prompt_tokens, **more)


def cut(
    source: str | Path, out: str | Path, texts: Texts, *, target: str | Path | None = None, **settings: Any
) -> list[Change]:
    """Write `source` with fewer layers or neurons to a new folder, and return the changes.

    `settings` are keys of the recipe's section `cut` (layers, mlp_width). Layers and neurons are scored on `texts`. KL
    is measured against `target`, or against the uncut model if that is None.

    Raises RecipeError for impossible cuts, and DataError for too little text or a folder that is not empty.
    """
    cuts = parse_section(Cut, {name: value for name, value in settings.items() if value is not None})
    if cuts.layers is None and cuts.mlp_width is None:
        raise RecipeError("nothing to cut", "give layers or mlp_width")
    compared = None if target is None else resolve_model(str(target))
    with tempfile.TemporaryDirectory() as scratch:
        files = [file for path in _files(texts, Path(scratch)) for file in _below(path)]
        contents = [read_utf8(file) for file in files]
    return cut_folder(resolve_model(str(source)), Path(out), cuts, contents, compared)


def _below(path: Path) -> list[Path]:
    """Return a file, or all files of a folder. Raises DataError if it does not exist."""
    if not path.exists():
        raise DataError(f"there is no file {path}", "give texts as str, files and folders as pathlib.Path")
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def transplant(donor: str | Path, target: str | Path, out: str | Path, **settings: Any) -> Change:
    """Write `donor` with the vocabulary of `target` to a new folder, so that it can draft for it.

    `settings` are those of `distill.surgery.vocabulary.transplant`: rows, overrides, dtype. Raises DataError for an
    impossible transplant, and for a folder that is not empty.
    """
    require_new_folder(Path(out))
    return transplanted(*folders_of(resolve_model(str(donor)), resolve_model(str(target))), Path(out), **settings)


def export_gguf(model: str | Path, out: str | Path, outtype: str = "f16") -> WrittenFile:
    """Write a model as a GGUF file of type `outtype` (f32, f16, bf16, q8_0, q4_k_m, …).

    Quantised types need llama-cpp-python.
    """
    return write_gguf(local_folder(resolve_model(str(model))), Path(out), outtype)


def import_gguf(file: str | Path, out: str | Path, dtype: Floats | None = None) -> Import:
    """Write a GGUF file as a Hugging Face folder.

    With `dtype` None, floats keep their type and quantised weights become float32. Raises DataError for a folder that
    is not empty.
    """
    require_new_folder(Path(out))
    imported = read_import(Path(file), dtype)
    write_import(imported, Path(out))
    return imported


# ── In a notebook: a measurement shows its picture and tables ──


def _html(report: SpeedupReport | EvaluationReport) -> str:
    if isinstance(report, SpeedupReport):
        return section([report.verdict, Plot(partial(speeds, report), ""), *speedup_blocks(report)])
    drawn = [Plot(partial(acceptance_by_position, report.by_position), "")] if report.positions else []
    return section([*drawn, *evaluation_blocks(report)])


for _kind in (SpeedupReport, EvaluationReport):
    setattr(_kind, "_repr_html_", _html)  # noqa: B010
