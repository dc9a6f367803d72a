"""Shared by the commands: options, finding runs, quiet libraries, tables on stdout."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer

from distill.errors import DataError, RecipeError, RunError
from distill.files import LARGEST, as_json, require_path
from distill.machine import thread_count
from distill.progress import is_verbose, note
from distill.recipe import (
    Corpus,
    Gguf,
    GgufOptions,
    PyTorch,
    Recipe,
    SamplerSettings,
    Section,
    load_recipe,
    parse_section,
    resolve_model,
)
from distill.recipe.measuring import SPELLINGS
from distill.run import Run
from distill.tables import Block, records, rendered

RunsOption = Annotated[Path, typer.Option("--runs", help="Folder that holds the run directories.")]
RunArgument = Annotated[str | None, typer.Argument(metavar="RUN", help="Name or folder; by default the newest.")]
FormatOption = Annotated[
    Literal["md", "json", "jsonl", "csv"], typer.Option("--output", "-o", help="Format of the results.")
]
TextOption = Annotated[list[Path] | None, typer.Option("--text", help="Standalone pair: prompts (docs/prompts.md).")]
ThreadsOption = Annotated[
    int | None, typer.Option(min=1, max=4096, help="CPU threads; by default OMP_NUM_THREADS, or all cores.")
]
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


def pytorch_settings(settings: PyTorch, model: str, given: dict[str, Any]) -> PyTorch:
    """The settings with what options say instead.

    Raises RecipeError for settings that do not go together, and for any of a GGUF file, which they do not concern.
    """
    if given and model.endswith(".gguf"):
        names = ", ".join("--" + name.replace("_", "-") for name in given)
        raise RecipeError(f"{names}: {model} runs in llama.cpp, not in PyTorch", "leave them out, or give folders")
    return parse_section(PyTorch, settings.model_dump() | given)


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


def run_until(recipe: Recipe, run: Run, stage: str, threads: int | None = None) -> None:
    """Bring a run with a trained draft up to `stage`, with so many `threads` (None: the recipe's)."""
    from distill.pipeline.running import run_pipeline

    require_draft(run)
    if threads is not None and run.done("speedup") is None:  # costs belong to the threads that they are measured with
        recipe = recipe.model_copy(update={"threads": threads})
        run = Run(run.folder, recipe)
    prepare(threads or recipe.threads)
    text, before = run.path("recipe.yaml").read_text(encoding="utf-8"), run.done(stage)
    with contextlib.closing(run):
        run.open(text)
        run_pipeline(recipe, run, until=stage)
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
    from distill.data.prompts import sources_of
    from distill.data.sources import read_documents

    documents, left = read_documents(Corpus(sources=sources_of(paths, "--text")), ("test",))
    for reason, count in left.items():
        print(f"{count} left out: {reason}", file=sys.stderr)
    return [document.plain_text for document in documents]


def numbers(
    text: str, option: str, kind: type, example: str = "64,512", least: float = 0, most: float = LARGEST
) -> list[Any]:
    """The value of an option that takes numbers separated by commas; raises RecipeError for anything else."""
    hint = f"for instance {option} {example}"
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        raise RecipeError(f"{option} {text}: expected numbers separated by commas", hint) from None
    if not all(least <= number <= most for number in found):
        bounds = f"at least {least:g}" if most == LARGEST else f"from {least:g} to {most:g}"
        raise RecipeError(f"{option} {text}: numbers must be finite, {bounds}", hint)
    return found


def require_known(option: str, values: Iterable[str] | None, names: Sequence[str]) -> None:
    """Raise RecipeError for a value of an option that is none of these names."""
    unknown = next((value for value in values or () if value not in names), None)
    if unknown is not None:
        raise RecipeError(f"{option} {unknown or 'an empty name'} is unknown", f"use one of {', '.join(names)}")


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


def local_reference(reference: str) -> str:
    """A model as the command line names it (`recipe.resolve_model`); paths start at the working directory."""

    return resolve_model(reference, Path.cwd())


# ── Options that are keys of a recipe's section: name, kind and words are the key's, which is checked as a recipe's ──


def section_options(
    section: type[Section],
    names: str,
    *,
    panel: str | None = None,
    prefix: str = "",
    suffix: str = "",
    words: str = "",
    short: Mapping[str, str] | None = None,
    shown: bool = True,
    defaults: bool = True,
) -> list[inspect.Parameter]:
    """Parameters of a command for these keys, with spaces between them; of a list, values separated by commas.

    `prefix` stands before the names of the parameters, `suffix` behind those of the options, `words` before their help;
    `defaults` says whether a key's own default holds where the option is left out.
    """
    found = []
    for name in names.split():
        field = section.model_fields[name]
        kinds = (field.annotation, *get_args(field.annotation))
        spelt = f"--{name.replace('_', '-')}{suffix}"
        listed = next((get_args(kind)[0] for kind in kinds if get_origin(kind) is tuple), None)
        kind: Any = str if listed else next((kind for kind in (bool, int, float) if kind in kinds), str)
        choices = next((get_args(one) for one in kinds if get_origin(one) is Literal), ())
        text = _help(words + str(field.description), field.default if defaults else None)
        info = typer.Option(
            f"{spelt}/--no{spelt[1:]}" if kind is bool else spelt,
            *filter(None, [(short or {}).get(name)]),
            metavar="|".join(choices) or None,
            help=text,
            rich_help_panel=panel,
            hidden=not shown,
            callback=listed and _listed(spelt, listed),
        )
        keyword = inspect.Parameter.KEYWORD_ONLY
        found.append(inspect.Parameter(prefix + name, keyword, default=None, annotation=Annotated[kind | None, info]))
    return found


LINK = re.compile(r" ?\(\[[^]]*]\([^)]*\)\)")  # to a page, as recipes' documents have them


def _help(text: str, default: Any) -> str:
    """A key's description as the help of an option: sentences without links, and its default, if any."""
    text = LINK.sub("", text).replace("null:", "if left out:").replace("[none]", "none").replace("[]:", "if left out:")
    text = re.sub(r"(?<=[.] )i(?=f left out)", "I", text)
    first = text.split(" ")[0].rstrip(":")
    text = text if "_" in first else text[0].upper() + text[1:]
    said = ("yes" if default else "no") if isinstance(default, bool) else default
    shown = "" if said in (None, ()) else f" [default: {said}]"
    return f"{text}.{shown}".replace("[", "\\[")


def _listed(option: str, kind: type) -> Callable[[str | None], list[Any] | None]:
    def split(value: str | None) -> list[Any] | None:
        if value is None:
            return None
        return [part.strip() for part in value.split(",")] if kind is str else numbers(value, option, kind, "3,1")

    return split


def takes(
    argument: str, options: Sequence[inspect.Parameter], collect: Callable[[dict[str, Any]], Any] = dict
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator: the command takes these options, and gets as one argument what `collect` makes of those given."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [parameter for parameter in signature.parameters.values() if parameter.name != argument]

        @functools.wraps(command)
        def wrapped(*args: Any, **values: Any) -> None:
            found = {option.name: values.pop(option.name) for option in options}
            given = {name: value for name, value in found.items() if value is not None}
            return command(*args, **values, **{argument: collect(given)})

        changed: Any = wrapped
        changed.__signature__ = signature.replace(parameters=[*own, *options])
        changed.__annotations__ = {each.name: each.annotation for each in (*own, *options)} | {"return": None}
        return wrapped

    return decorate


def takes_sampler(panel: str | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator: the command takes a sampler's options, and gets them as its argument `sampler`; greedy without
    any. RecipeError for settings that do nothing, because nothing is sampled."""

    def collected(given: dict[str, Any]) -> SamplerSettings:
        sampler = parse_section(SamplerSettings, {"temperature": 0.0} | given)
        idle = next((name for name in given if name != "temperature" and not sampler.temperature), None)
        if idle is not None:
            raise RecipeError(f"--{idle.replace('_', '-')} does nothing without --temperature", "give both, or neither")
        return sampler

    names, words = " ".join(SamplerSettings.model_fields), "of the sampler, greedy by default; "
    options = section_options(SamplerSettings, names, panel=panel, words=words, defaults=False)
    return takes("sampler", options, collected)


def takes_gguf_options(*roles: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator: the command takes llama.cpp's options of these roles by its own names, `--NAME` for the target and
    `--NAME-draft` for the draft, and gets them as its argument `gguf`.

    The argument is a `distill.recipe.Gguf`, or None where none of the options was given.
    """
    panel = "llama.cpp's options, for GGUF files" + "; each is also --NAME-draft, for the draft" * ("draft" in roles)
    names = " ".join(name for name in GgufOptions.model_fields if name != "threads")  # an option of the commands
    short = {name: f"-{one.short}" for name, one in SPELLINGS.items()}
    options = section_options(GgufOptions, names, panel=panel, prefix="gguf_target_", short=short)
    if "draft" in roles:  # the same once more: not shown
        every, of_draft = f"{names} threads", "gguf_draft_"
        short = {name: f"-{one.short}d" for name, one in SPELLINGS.items() if one.of_draft}
        options += section_options(GgufOptions, every, prefix=of_draft, suffix="-draft", short=short, shown=False)

    def collected(given: dict[str, Any]) -> Gguf | None:
        found: dict[str, dict[str, Any]] = {}
        for name, value in given.items():
            _, role, key = name.split("_", 2)
            found.setdefault(role, {})[key] = value
        return parse_section(Gguf, found, "the options of llama.cpp") if found else None

    return takes("gguf", options, collected)


def require_used(gguf: Gguf | None, target: str, draft: str | None) -> None:
    """Raise RecipeError for options that would do nothing: PyTorch runs the models, or there is no draft."""
    if gguf is None:
        return
    if not target.endswith(".gguf"):
        raise RecipeError(f"options of llama.cpp: {gguf.described() or 'defaults'}, but PyTorch runs {target}")
    if draft is None and gguf.draft.given():
        raise RecipeError(f"options of llama.cpp for the draft: {gguf.draft.described()}, but none is loaded")


def merged(recipe: Gguf, given: Gguf) -> Gguf:
    """A recipe's options with those of the command line in their place; RecipeError where they do not go together."""
    roles = {
        role: getattr(recipe, role).given() | getattr(given, role).model_dump(mode="json", exclude_unset=True)
        for role in ("target", "draft")
    }
    return parse_section(Gguf, roles, "the options of llama.cpp")
