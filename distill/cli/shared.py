"""Parts that several commands share: options, the search for runs, printing."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer

from distill.errors import RecipeError, RunError
from distill.files import LARGEST, as_json, is_gguf, over, parts_of, require_path
from distill.machine import keep_freed_memory, thread_count
from distill.progress import is_verbose, note
from distill.recipe import (
    Corpus,
    Gguf,
    GgufOptions,
    PyTorch,
    Recipe,
    Sampler,
    Section,
    load_recipe,
    parse_section,
    resolve_model,
)
from distill.recipe.configuration import DrafterName, RuleName, VerifierName
from distill.recipe.measuring import OUTTYPES, SHORT
from distill.recipe.recipe import all_assigned, read_yaml
from distill.run import Run
from distill.tables import Block, records, rendered


def values(kind: Any) -> str:
    """Return the values of a Literal or a sequence as help texts name them."""
    return ", ".join(get_args(kind) or kind)


CONFIGURED = (
    f"drafter ({values(DrafterName)}), rule ({values(RuleName)}), verifier ({values(VerifierName)}), length, nodes and "
    "others (docs/recipes.md)."
)
FILE_TYPES = values(OUTTYPES)

Number = TypeVar("Number", int, float, int | None, float | None)


def finite(value: Number) -> Number:
    """Return an option's number; BadParameter for NaN, infinity and numbers beyond 64 bits."""
    if value is not None and not abs(value) <= LARGEST:
        raise typer.BadParameter("the number must be finite and below 2^63")
    return value


def number_option(*names: str, **settings: Any) -> Any:
    """Return an option that takes a finite number."""
    return typer.Option(*names, callback=finite, **settings)


RunsOption = Annotated[Path, typer.Option("--runs", help="Folder that holds the run directories.")]
RunArgument = Annotated[
    str | None, typer.Argument(metavar="RUN", help="Name or folder of a run. The default is the newest run.")
]
PairArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN | TARGET [DRAFT]]",
        help="A run (by default the newest), or models: Hugging Face folders, hub names or GGUF files.",
    ),
]
AdapterOption = Annotated[
    str | None,
    typer.Option("--adapter", metavar="FOLDER", help="PEFT adapter to merge into TARGET (docs/tuned-target.md)."),
]


@dataclass(frozen=True)
class RunState:
    """A run: its finished stages, the next one (None after the last), and the minute of its last change."""

    name: str
    done: int
    stages: int
    next: str | None
    changed: str
    bytes: int


@dataclass(frozen=True)
class RunList:
    """The result of `distill runs`."""

    runs: list[RunState]
    version: Literal[1] = 1


def _print_schema(invocation: typer.Context, output: str) -> str:
    """Print the JSON schema of a command's `-o json` and end the command, if --output asks for that."""
    if output != "schema":
        return output
    from pydantic import TypeAdapter

    from distill.measuring.evaluation_results import EvaluationReport
    from distill.measuring.speedup_results import SpeedupReport
    from distill.planning.plan import SpeedupPlan
    from distill.serving.results import ServeReport

    kinds: dict[str | None, Any] = {"eval": EvaluationReport, "speedup": SpeedupReport, "plan": SpeedupPlan}
    kinds |= {"runs": RunList, "serve-check": ServeReport}
    rows = list[dict[str, str | float | None]]  # The other commands print the rows of their tables.
    print_schema(TypeAdapter(kinds.get(invocation.info_name, rows)).json_schema(mode="serialization"))
    raise typer.Exit


def print_schema(schema: dict[str, Any]) -> None:
    """Print a JSON schema."""
    print(json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema, indent=1))


FormatOption = Annotated[
    Literal["md", "json", "jsonl", "csv", "schema"],
    typer.Option(
        "--output",
        "-o",
        callback=_print_schema,
        is_eager=True,
        help="Format of the results. schema prints the JSON schema of json and runs nothing.",
    ),
]
PromptsOption = Annotated[
    list[Path] | None,
    typer.Option("--prompts", help="File or folder of text or records (docs/prompts.md). Repeatable."),
]
CountOption = Annotated[
    int | None,
    number_option(
        min=1,
        help="Maximum number of prompts (eval: 32, at least 4; speedup: 12). With --suite: questions of each category.",
    ),
]
SeedOption = Annotated[int | None, number_option(min=0, help="Seed of all random draws. The default is 0.")]
SuiteOption = Annotated[
    Path | None, typer.Option("--suite", help="File of Spec-Bench, MT-Bench or SPEED-Bench, as published.")
]
SamplerOption = Annotated[
    str | None,
    typer.Option("--sampler", metavar="K=V,...", help="Keys: temperature, top_k, top_p, min_p. The default is greedy."),
]
PyTorchOption = Annotated[
    str | None,
    typer.Option(
        "--pytorch",
        metavar="K=V,...",
        help=f"How PyTorch decodes, such as static=true. Keys: {values(PyTorch.model_fields)}.",
    ),
]
TableOption = Annotated[
    Path | None, typer.Option("--table", help="Drafter table: a run or a file with n-grams of the target.")
]
LossyOption = Annotated[
    bool,
    typer.Option("--allow-lossy", help="Allow decoding that changes the target's distribution. It is labelled LOSSY."),
]
LLAMA = "llama.cpp's options, for GGUF files"
LlamaOption = Annotated[
    list[str] | None,
    typer.Option(
        "--llama",
        metavar="K=V,...",
        help="By llama.cpp's names: ngl=99,ctk=q8_0. library=ik selects ik_llama.cpp (docs/recipes.md#gguf).",
        rich_help_panel=LLAMA,
    ),
]
LlamaDraftOption = Annotated[
    list[str] | None,
    typer.Option("--llama-draft", metavar="K=V", help="The same for the draft.", rich_help_panel=LLAMA),
]
ThreadsOption = Annotated[
    int | None, typer.Option(min=1, max=4096, help="CPU threads. The default is OMP_NUM_THREADS, else all cores.")
]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
DtypeOption = Annotated[
    Dtype | None, typer.Option("--dtype", help="Number type of folders. The default is auto, the checkpoint's own.")
]
DEFAULT_RUNS = Path("runs")


def find_run(name: str | None, runs: Path) -> tuple[Recipe, Run]:
    """Return the run of this name or folder. Without a name, return the newest run and print its folder to stderr."""
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
    """Return a recipe with overrides. Its `auto` types become those of the config.yaml `begun`, if that exists, else
    those of this machine."""
    recipe = load_recipe(path, overrides)
    if "auto" not in (recipe.target.dtype, recipe.train.dtype):
        return recipe
    from distill.engines.torch.hugging_face import settle_types

    return settle_types(recipe, load_recipe(begun) if begun is not None and begun.is_file() else None)


def prepare(threads: int | None) -> None:
    """Set the thread count (None: OMP_NUM_THREADS, else all cores) and the libraries' log level.

    It must be called before the first heavy import.
    """
    count = thread_count(threads)
    keep_freed_memory()
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
    """Raise RunError if a run's draft is not trained. Only `distill train` starts a training, which can take hours."""
    if run.done("train") is not None:
        return
    steps = [int(path.name.removeprefix("step-")) for path in run.path("checkpoints").glob("step-[0-9]*")]
    at = f" (the last checkpoint is at step {max(steps)} of {run.recipe.train.steps})" if steps else ""
    raise RunError(f"{run.folder} has no trained draft yet{at}", f"`{run.again()}` trains it")


def run_until(recipe: Recipe, run: Run, stage: str, threads: int | None = None) -> None:
    """Run the stages up to `stage` of a run with a trained draft, on `threads` (None: the recipe's).

    The run keeps its recipe and its time of change.
    """
    from distill.pipeline.running import run_pipeline

    require_draft(run)
    prepare(threads or recipe.threads)
    with contextlib.closing(run):
        run.open()
        run_pipeline(recipe, run, until=stage)


def print_blocks(blocks: Sequence[Block], result: Any, output: str) -> None:
    """Print results to stdout in the format `output`. json prints `result`, or the rows of tables if it is None."""
    print(rendered(blocks, records(blocks) if result is None else as_json(result), output), end="")


def read_texts(paths: list[Path]) -> list[str]:
    """Return the texts of files, of records in them, and of all UTF-8 files in folders.

    The number of texts that are left out is printed with the reasons. DataError for a path that does not exist, and
    for a named file that cannot be read.
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
    """Return the numbers of an option, separated by commas; RecipeError for anything else."""
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
    """Raise RecipeError if a value of an option is not one of these names."""
    unknown = next((value for value in values or () if value not in names), None)
    if unknown is not None:
        raise RecipeError(f"{option} {unknown or 'an empty name'} is unknown", f"use one of {', '.join(names)}")


def refuse(invocation: typer.Context, mode: str, *names: str, hint: str = "leave it out") -> None:
    """Raise RecipeError if options of these names were given, because the `mode` of the command does not read them."""
    given = [
        max(parameter.opts, key=len)
        for parameter in invocation.command.params
        if parameter.name in names
        and getattr(invocation.get_parameter_source(parameter.name), "name", "") == "COMMANDLINE"
    ]
    if given:
        raise RecipeError(f"{', '.join(given)}: without effect {mode}", hint)


def place_of_table(given: Path | None, run: Run | None) -> Path | None:
    """Return the place of the target's n-grams for drafter table: `given`, or the run's folder.

    None means that only the text's own n-grams exist. A line on stderr says so.
    """
    if given is None and run is not None and run.path("table").is_dir():
        return run.folder
    if given is None:
        note("no table of n-grams (--table): drafter table knows those of the text so far alone")
    return given


def is_run(word: str, runs: Path) -> bool:
    """Whether a word of the command line is the name or folder of a run."""
    return any((folder / "config.yaml").exists() for folder in (Path(word), runs / word))


def models_of(
    invocation: typer.Context, words: Sequence[str] | None, runs: Path, most: int = 2, adapter: str | None = None
) -> list[str]:
    """Return the references of the models in RUN | TARGET [DRAFT], the adapter merged into the target's; none for a
    run, which can be left out."""
    words = words or []
    for word in words:
        require_path(word, "the run or model")
    if len(words) > most:
        raise RecipeError(f"{len(words)} models are named: {' '.join(words)}", "give RUN, or TARGET and DRAFT")
    if len(words) < 2 and not any(_is_model(word) and not is_run(word, runs) for word in words):
        refuse(invocation, "with a run, whose recipe names the adapter", "adapter", hint="name TARGET, a model")
        return []
    return [model_of(words[0], adapter), *map(resolve_model, words[1:])]


def model_of(word: str, adapter: str | None) -> str:
    """Return the reference of a model of the command line, with an adapter if there is one."""
    return resolve_model(word if adapter is None else over(word, adapter))


def _is_model(word: str) -> bool:
    path = Path(word)
    return (
        parts_of(word)[1] is not None
        or is_gguf(word)
        or path.is_dir()
        or (HUB.fullmatch(word) is not None and not path.parent.is_dir())
    )


HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+")


# ── Options that hold keys of a recipe's section: as KEY=VALUE,... or as a mapping in YAML ──


def keys_of(
    section: type[Section], text: str | None, option: str, short: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the unchecked keys of a section that an option sets. `short` maps other names to keys."""
    if text is None:
        return {}
    if text.lstrip().startswith("{"):
        found = read_yaml(text, option)
        return found if isinstance(found, dict) else {}
    found = {}
    for name, value in all_assigned(text, option):
        name = short.get(name, name.replace("-", "_"))
        field = section.model_fields.get(name)
        kinds = () if field is None else (field.annotation, *get_args(field.annotation))
        listed = any(get_origin(kind) is tuple for kind in kinds) and not value.startswith("[")
        found[name] = read_yaml(f"[{value}]" if listed else value, f"{option} {name}")
    return found


def sampler_of(text: str | None, temperature: float | None = None, greedy: bool = False) -> Sampler:
    """Return the sampler of --sampler and --temperature. Without both it is greedy.

    `greedy` allows a --sampler of temperature 0. It has a meaning where sampling is the default.
    """
    own = {"temperature": 0.0 if temperature is None else temperature}
    sampler = parse_section(Sampler, own | keys_of(Sampler, text, "--sampler"), "--sampler")
    if text and not sampler.temperature and not greedy:
        raise RecipeError(f"--sampler {text} draws nothing", "give it a temperature, or leave it out for greedy")
    return sampler


def pytorch_of(invocation: typer.Context, text: str | None, own: PyTorch, models: Sequence[str]) -> PyTorch:
    """Return a run's settings or the defaults, with those of --pytorch instead.

    RecipeError if all models are GGUF files that llama.cpp runs.
    """
    found = parse_section(PyTorch, own.model_dump() | keys_of(PyTorch, text, "--pytorch"), "--pytorch")
    if models and all(map(is_gguf, models)) and found.target_weights != "file":
        hint = "leave it out, or decode the file's own bits in PyTorch: target_weights=file"
        refuse(invocation, f"on {models[0]}, which runs in llama.cpp", "pytorch", hint=hint)
    return found


def require_folders(invocation: typer.Context, models: Sequence[str]) -> None:
    """Raise RecipeError for a --dtype if all models are GGUF files."""
    if models and all(map(is_gguf, models)):
        refuse(invocation, f"on {models[0]}, a GGUF file, which has its own types", "dtype")


def gguf_of(
    invocation: typer.Context, models: Sequence[str], target: Sequence[str] | None, draft: Sequence[str] | None = None
) -> Gguf | None:
    """Return llama.cpp's options, or None if none was given. RecipeError if PyTorch runs a model, and for options of a
    draft that is not loaded."""
    if foreign := next((model for model in models if not is_gguf(model)), None):
        refuse(invocation, f"because PyTorch runs {foreign}", "llama", "llama_draft")
    if len(models) == 1:
        refuse(invocation, "because no draft is loaded", "llama_draft")
    short = {spelt: name for name, spelt in SHORT.items()}
    found: dict[str, dict[str, Any]] = {}
    for role, option, texts in (("target", "--llama", target), ("draft", "--llama-draft", draft)):
        for text in texts or ():
            found[role] = found.get(role, {}) | keys_of(GgufOptions, text, option, short)
    return parse_section(Gguf, found, "the options of llama.cpp") if found else None


def merged(recipe: Gguf, given: Gguf | None) -> Gguf:
    """Return a recipe's options, replaced by those of the command line; RecipeError if they contradict each other."""
    if given is None:
        return recipe
    roles = {
        role: getattr(recipe, role).given() | getattr(given, role).model_dump(mode="json", exclude_unset=True)
        for role in ("target", "draft")
    }
    return parse_section(Gguf, roles, "the options of llama.cpp")


def size_and_change(folder: Path) -> tuple[int, str]:
    """Return the bytes of the files in a folder, and the minute of its last change."""
    files = [folder, *folder.rglob("*")]
    changed = max(path.lstat().st_mtime for path in files)
    minute = time.strftime("%Y-%m-%d %H:%M", time.localtime(changed))
    return sum(path.stat().st_size for path in files if path.is_file()), minute
