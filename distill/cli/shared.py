"""Shared by the commands: options, finding runs, quiet libraries, tables on stdout."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer

from distill.errors import DataError, RecipeError, RunError
from distill.files import LARGEST, as_json, read_utf8, require_path
from distill.machine import thread_count
from distill.progress import is_verbose, note
from distill.recipe import Gguf, PyTorch, Recipe, SamplerSettings, Target, load_recipe, parse_section, resolve_model
from distill.run import Run
from distill.tables import Block, records, rendered

RunsOption = Annotated[Path, typer.Option("--runs", help="Folder that holds the run directories.")]
RunArgument = Annotated[
    str | None, typer.Argument(metavar="RUN", help="Run name or folder; by default the newest run.")
]
FormatOption = Annotated[
    Literal["md", "json", "jsonl", "csv"], typer.Option("--output", "-o", help="Format of the results.")
]
TextOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--text", help="Standalone pair: file or folder with prompts, read as `distill speedup --prompts` reads them."
    ),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option("--threads", min=1, max=4096, help="CPU threads; by default OMP_NUM_THREADS, else all cores."),
]
STATIC_HELP = "PyTorch: caches of fixed size, and rounds that stay on the device (docs/decoding.md)."
COMPILE_HELP = "With --static: compile the step of each number of tokens, 10 to 30 s each."
DRAFT_DEVICE_HELP = "PyTorch: the draft's device; the target's if left out."
DRAFT_WEIGHTS_HELP = "PyTorch on a CPU: round the draft's weights to int8 or int4; as they are if left out."
PREPACK_HELP = "PyTorch: layers of few operators; on a CPU, weights repacked for few tokens (their memory again)."
DTYPE_HELP = "Type of folders: float32, bfloat16, float16, or auto: bfloat16 where the device has instructions for it."
DEFAULT_RUNS = Path("runs")
TYPES_OF_ITS_OWN = "is for folders; a GGUF file has types of its own"  # why --dtype does nothing
NO_RUN = "is the folder of runs, and a pair of models is none"  # why --runs does nothing
Number = TypeVar("Number", int, float, int | None, float | None)


def find_run(name: str | None, runs: Path) -> tuple[Recipe, Run]:
    """The run of this name or folder; without one the newest run, whose folder is then printed to stderr."""
    require_path(runs, "--runs")
    if name is not None:
        require_path(name, "the run")
        folder = Path(name) if (Path(name) / "config.yaml").exists() else runs / name
        if not (folder / "config.yaml").exists():
            what = f"there is no run at {folder}" + (f" and no folder {name}" if "/" in name else "")
            raise RunError(what, "`distill runs` lists the runs")
    else:
        found = sorted(runs.glob("*/config.yaml"), key=lambda path: path.stat().st_mtime)
        if not found:
            raise RunError(f"there are no runs in {runs.resolve()}", "make one with `distill train RECIPE`")
        folder = found[-1].parent
        note(f"run: {folder}")
    recipe = load_recipe(folder / "config.yaml")
    return recipe, Run(folder, recipe)


def read_recipe(path: Path, overrides: Sequence[str], begun: Path | None = None) -> Recipe:
    """A recipe with overrides, and the types that its `auto` stands for: those in the config.yaml `begun` of its run,
    where that exists, else this machine's."""
    recipe = load_recipe(path, overrides)
    if "auto" not in (recipe.target.dtype, recipe.train.dtype):
        return recipe
    from distill.engines.torch.hugging_face import settle_types

    return settle_types(recipe, load_recipe(begun) if begun is not None and begun.is_file() else None)


def target_settings(model: str, dtype: str) -> Target:
    """A target that the command line names, in a type that this machine has instructions for where that is `auto`."""
    from distill.devices import pick_device
    from distill.engines.torch.hugging_face import settled_type

    target = parse_section(Target, {"model": model, "dtype": dtype})
    return target.model_copy(update={"dtype": settled_type(target.dtype, pick_device("auto"))})


def pytorch_settings(settings: PyTorch, model: str, **given: bool | str | None) -> PyTorch:
    """The settings with what options say instead, None where they say nothing.

    Raises RecipeError for settings that do not go together, and for any of a GGUF file, which they do not concern.
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    if chosen and model.endswith(".gguf"):
        names = ", ".join("--" + name.replace("_", "-") for name in chosen)
        raise RecipeError(f"{names}: {model} runs in llama.cpp, not in PyTorch", "leave them out, or give folders")
    return parse_section(PyTorch, settings.model_dump() | chosen)


def prepare(threads: int | None) -> None:
    """Set the thread count (None: OMP_NUM_THREADS, else all cores) and silence libraries (with --verbose, let them
    speak), before the first heavy import."""
    count = thread_count(threads)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    import torch
    import transformers

    torch.set_num_threads(count)
    if is_verbose():
        transformers.utils.logging.set_verbosity_info()
    else:
        transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def require_draft(run: Run) -> None:
    """Raise RunError for a run whose draft is not trained: that may take hours, which `distill train` alone begins."""
    if run.done("train") is not None:
        return
    steps = [int(path.name.removeprefix("step-")) for path in run.path("checkpoints").glob("step-[0-9]*")]
    at = f" (its training stands at step {max(steps)} of {run.recipe.train.steps})" if steps else ""
    raise RunError(f"{run.folder} has no trained draft yet{at}", f"`{run.again()}` trains it")


def run_until(recipe: Recipe, run: Run, stage: str, redo: Sequence[str] = (), threads: int | None = None) -> None:
    """Bring a run with a trained draft up to `stage`, with so many `threads` (None: the recipe's)."""
    from distill.pipeline.running import run_pipeline

    require_draft(run)
    if threads is not None and run.done("speedup") is None:  # costs belong to the threads that they are measured with
        recipe = recipe.model_copy(update={"threads": threads})
        run = Run(run.folder, recipe)
    prepare(threads or recipe.threads)
    text, before = run.path("recipe.yaml").read_text(encoding="utf-8"), run.done(stage)
    try:
        run.open(text)
        run_pipeline(recipe, run, until=stage, redo=redo)
    finally:
        run.close()
    if threads is not None and before is not None and run.done(stage) == before:
        note(f"--threads: stage {stage} was done before, and this is what it found")


def require_place(to: Path | None, where: str = "--to") -> None:
    """Raise an error, which names `where`, for a file that cannot be written, before hours of measuring."""
    if to is not None:
        require_path(to, where)
        if not to.resolve().parent.is_dir():
            raise DataError(f"there is no folder {to.resolve().parent}", f"make it, or correct {where}")


def print_blocks(blocks: Sequence[Block], result: Any, output: str) -> None:
    """Print results to stdout as `output` says: tables as md, jsonl or csv, a dataclass (None: rows) as json."""
    print(rendered(blocks, records(blocks) if result is None else as_json(result), output), end="")


def read_texts(paths: list[Path]) -> list[str]:
    """The texts of files and of all UTF-8 files below folders; of records, what they hold.

    Says how many were left out, and why. Raises DataError for a path that does not exist and for a file given by name
    that cannot be read.
    """
    from distill.data.prompts import KINDS
    from distill.data.record_files import holds_records

    found: list[str] = []
    left: Counter[str] = Counter()
    for path in paths:
        require_path(path, "--text")
        if not path.exists():
            raise DataError(f"text {path} does not exist", "correct --text")
        if path.is_file():
            found += _texts_of(path, path.suffix.lower() in KINDS or holds_records(path), left)
        for file in sorted(path.rglob("*")):
            try:
                found += _texts_of(file, holds_records(file), left) if file.is_file() else []
            except DataError as error:
                left["not UTF-8" if "not UTF-8" in error.what else error.what] += 1
    for reason, count in left.items():
        print(f"{count} left out: {reason}", file=sys.stderr)
    return found


def _texts_of(path: Path, records: bool, left: Counter[str]) -> list[str]:
    from distill.data.prompts import sources_of
    from distill.data.sources import read_documents, without_mark
    from distill.recipe import Corpus

    if not records:
        return [without_mark(read_utf8(path), left)]
    documents, dropped = read_documents(Corpus(sources=sources_of([path], "--text")), ("test",))
    left.update(dropped)
    return [document.plain_text for document in documents]


def numbers(text: str, option: str, kind: type, example: str = "64,512") -> list[Any]:
    """The value of an option that takes numbers separated by commas; raises RecipeError for anything else."""
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        raise RecipeError(
            f"{option} {text}: expected numbers separated by commas", f"for instance {option} {example}"
        ) from None
    if not all(0 <= number <= LARGEST for number in found):
        raise RecipeError(f"{option} {text}: numbers must be finite and not negative", "give numbers of at least 0")
    return found


def rates(text: str, option: str) -> list[float]:
    """The rates by position of an option, from 0 to 1, separated by commas; raises RecipeError for anything else."""
    example = "0.8,0.75,0.7"
    found = numbers(text, option, float, example)
    if not all(0 <= rate <= 1 for rate in found):
        raise RecipeError(f"{option} {text}: rates lie between 0 and 1", f"for instance {option} {example}")
    return found


def finite(value: Number) -> Number:
    """The value of an option that takes a number; raises BadParameter for NaN, infinity and what overflows."""
    if value is not None and not abs(value) <= LARGEST:
        raise typer.BadParameter("the number must be finite and below 2^63")
    return value


def number_option(*names: str, **settings: Any) -> Any:
    """An option that takes a number, which must be finite."""
    return typer.Option(*names, callback=finite, **settings)


def first_given(context: typer.Context, names: Iterable[str]) -> str | None:
    """The first of these parameters that the command line gives, as it is spelt there; None where it gives none.

    The name `gguf` stands for all of llama.cpp's options.
    """
    asked = {*names}
    for parameter in context.command.params:
        name = str(parameter.name)
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE":
            continue
        if name in asked or ("gguf" in asked and name.startswith("gguf_")):
            return (parameter.secondary_opts if context.params.get(name) is False else parameter.opts)[0]
    return None


def refuse_idle(context: typer.Context, *idle: tuple[object, str, str]) -> None:
    """Raise RecipeError for an option of the command line that would do nothing.

    Each of `idle` has a condition, the names of the parameters that do nothing where it holds, with spaces between
    them, and why.
    """
    for condition, names, why in idle:
        option = first_given(context, names.split()) if condition else None
        if option is not None:
            raise RecipeError(f"{option} {why}", "leave it out")


def place_of_table(given: Path | None, run: Run | None) -> Path | None:
    """Where drafter table finds n-grams of the target: as `given`, or of the run; None, which stderr says, where there
    are none but the text's own."""
    if given is None and run is not None and run.path("table").is_dir():
        return run.folder
    if given is None:
        note("no table of n-grams (--table): drafter table knows those of the text so far alone")
    return given


def require_sampler_used(sampler: SamplerSettings) -> None:
    """Raise RecipeError for settings that do nothing, because nothing is sampled."""
    for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
        if not sampler.temperature and getattr(sampler, name) != off:
            raise RecipeError(f"--{name.replace('_', '-')} does nothing without --temperature", "give both, or neither")


def local_reference(reference: str) -> str:
    """A model as the command line names it (`recipe.resolve_model`); paths start at the working directory."""

    return resolve_model(reference, Path.cwd())


# ── llama.cpp's options by its own names: `--NAME` for the target, `--NAME-draft` for the draft ──

PANEL = "llama.cpp's options, for GGUF files"
# Name, kind, short name of the target's and of the draft's, help. `threads` is an option of the commands themselves.
OPTIONS: tuple[tuple[str, Any, str, str, str], ...] = (
    ("library", str, "", "", "What computes: llama.cpp (the default), or ik: ik_llama.cpp, on CPUs often faster."),
    ("n_gpu_layers", int, "-ngl", "-ngld", "Layers on GPUs; all if llama.cpp was built for GPUs."),
    ("device", str, "-dev", "-devd", "GPUs, such as CUDA0,CUDA1; none: the CPU alone."),
    ("tensor_split", str, "-ts", "", "Share of the layers for each GPU, such as 3,1."),
    ("flash_attn", str, "-fa", "", "on, off (the default) or auto."),
    ("cache_type_k", str, "-ctk", "-ctkd", "Type of the cached keys: f32, f16 (the default), bf16, q8_0, q5_1, …"),
    ("cache_type_v", str, "-ctv", "-ctvd", "Type of the cached values; quantised ones need --flash-attn on."),
    ("threads_batch", int, "-tb", "-tbd", "CPU threads of steps of several tokens; as --threads if left out."),
    ("ubatch_size", int, "-ub", "", "Tokens computed at once (micro-batch)."),
)
OF_DRAFT = (*OPTIONS, ("threads", int, "", "-td", "CPU threads of the draft."))


def takes_gguf_options(*roles: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator: the command takes llama.cpp's options of these roles, and gets them as its argument `gguf`.

    The argument is a `distill.recipe.Gguf`, or None where none of the options was given.
    """
    options = [
        _option(role, "draft" in roles, *row) for role in roles for row in (OF_DRAFT if role == "draft" else OPTIONS)
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [parameter for parameter in signature.parameters.values() if parameter.name != "gguf"]

        @functools.wraps(command)
        def wrapped(*args: Any, **values: Any) -> None:
            given = {option.name: values.pop(option.name) for option in options}
            return command(*args, **values, gguf=_collected(given, roles))

        changed: Any = wrapped
        changed.__signature__ = signature.replace(parameters=[*own, *options])
        changed.__annotations__ = {each.name: each.annotation for each in (*own, *options)} | {"return": None}
        return wrapped

    return decorate


def _option(
    role: str, both: bool, name: str, kind: Any, short: str, short_of_draft: str, words: str
) -> inspect.Parameter:
    draft = role == "draft"
    if both and name == OPTIONS[0][0]:
        words += " This and each option below is also --NAME-draft, for the draft."
    spelt = name.replace("_", "-") + ("-draft" if draft else "")
    names = [f"--{spelt}", short_of_draft if draft else short]
    # A group of their own, in which the draft's, the same once more, are not shown.
    info = typer.Option(*filter(None, names), help=words, rich_help_panel=PANEL, hidden=draft)
    return inspect.Parameter(
        f"gguf_{role}_{name}", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, info]
    )


def _collected(given: Mapping[str, Any], roles: tuple[str, ...]) -> Gguf | None:
    """The options that were given, checked as a recipe's; RecipeError for values that cannot be."""
    found: dict[str, dict[str, Any]] = {}
    for role in roles:
        prefix = f"gguf_{role}_"  # commands have options of their own by such names
        own = {name.removeprefix(prefix): value for name, value in given.items() if name.startswith(prefix)}
        own = {name: _listed(name, value) for name, value in own.items() if value is not None}
        if own:
            found[role] = own
    return parse_section(Gguf, found, "the options of llama.cpp") if found else None


def _listed(name: str, value: Any) -> Any:
    if name == "tensor_split":
        return numbers(value, "--tensor-split", float, "3,1")
    return [part.strip() for part in value.split(",")] if name == "device" else value


def require_used(gguf: Gguf | None, target: str, draft: str | None) -> None:
    """Raise RecipeError for options that would do nothing: PyTorch runs the models, or there is no draft."""
    if gguf is None:
        return
    if not target.endswith(".gguf"):
        raise RecipeError(
            f"options of llama.cpp were given ({gguf.described() or 'defaults'}), and PyTorch runs {target}"
        )
    if draft is None and gguf.draft.given():
        raise RecipeError(
            f"options of llama.cpp were given for the draft ({gguf.draft.described()}), and no draft is loaded"
        )


def merged(recipe: Gguf, given: Gguf) -> Gguf:
    """A recipe's options with those of the command line in their place; RecipeError where they do not go together."""
    roles = {
        role: getattr(recipe, role).given() | getattr(given, role).model_dump(mode="json", exclude_unset=True)
        for role in ("target", "draft")
    }
    return parse_section(Gguf, roles, "the options of llama.cpp")
