"""Shared by the commands: options, finding runs, quiet libraries, tables on stdout."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
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
    SamplerSettings,
    Section,
    load_recipe,
    parse_section,
    resolve_model,
)
from distill.recipe.configuration import DrafterName, RuleName, VerifierName
from distill.recipe.measuring import OUTTYPES, SHORT
from distill.recipe.recipe import read_yaml
from distill.run import Run
from distill.tables import Block, records, rendered


def values(kind: Any) -> str:
    """The values of a Literal, or of a list of them, as help texts name them."""
    return ", ".join(get_args(kind) or kind)


CONFIGURED = (
    f"drafter ({values(DrafterName)}), rule ({values(RuleName)}), verifier ({values(VerifierName)}), length, nodes and "
    "others (docs/recipes.md)."
)
FILE_TYPES = values(OUTTYPES)

RunsOption = Annotated[Path, typer.Option("--runs", help="Folder that holds the run directories.")]
RunArgument = Annotated[str | None, typer.Argument(metavar="RUN", help="Name or folder; by default the newest.")]
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
FormatOption = Annotated[
    Literal["md", "json", "jsonl", "csv"], typer.Option("--output", "-o", help="Format of the results.")
]
PromptsOption = Annotated[
    list[Path] | None, typer.Option("--prompts", help="Text or records (docs/prompts.md); repeatable.")
]
SuiteOption = Annotated[
    Path | None, typer.Option("--suite", help="Spec-Bench, MT-Bench or SPEED-Bench, as its file is published.")
]
SamplerOption = Annotated[
    str | None,
    typer.Option("--sampler", metavar="K=V,...", help="Of temperature, top_k, top_p, min_p; greedy if left out."),
]
PyTorchOption = Annotated[
    str | None,
    typer.Option("--pytorch", metavar="K=V,...", help=f"Folders: static=true; of {values(PyTorch.model_fields)}."),
]
TableOption = Annotated[
    Path | None, typer.Option("--table", help="For drafter table: a run, or a file, with n-grams of the target.")
]
LossyOption = Annotated[
    bool, typer.Option("--allow-lossy", help="Allow what changes the target's distribution (labelled LOSSY).")
]
LLAMA = "llama.cpp's options, for GGUF files"
LlamaOption = Annotated[
    list[str] | None,
    typer.Option(
        "--llama",
        metavar="K=V,...",
        help="As llama.cpp names them: ngl=99,ctk=q8_0; library=ik: ik_llama.cpp (docs/recipes.md#gguf).",
        rich_help_panel=LLAMA,
    ),
]
LlamaDraftOption = Annotated[
    list[str] | None, typer.Option("--llama-draft", metavar="K=V", help="The same of the draft.", rich_help_panel=LLAMA)
]
ThreadsOption = Annotated[
    int | None, typer.Option(min=1, max=4096, help="CPU threads; by default OMP_NUM_THREADS, or all cores.")
]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
DtypeOption = Annotated[
    Dtype | None, typer.Option("--dtype", help="Folders: number type; by default auto, the checkpoint's own.")
]
DEFAULT_RUNS = Path("runs")
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


def prepare(threads: int | None) -> None:
    """Set the thread count (None: OMP_NUM_THREADS, else all cores) and silence libraries (with --verbose, let them
    speak), before the first heavy import."""
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
    """Raise RunError for a run whose draft is not trained: that may take hours, which `distill train` alone begins."""
    if run.done("train") is not None:
        return
    steps = [int(path.name.removeprefix("step-")) for path in run.path("checkpoints").glob("step-[0-9]*")]
    at = f" (its training stands at step {max(steps)} of {run.recipe.train.steps})" if steps else ""
    raise RunError(f"{run.folder} has no trained draft yet{at}", f"`{run.again()}` trains it")


def run_until(recipe: Recipe, run: Run, stage: str, threads: int | None = None) -> None:
    """Bring a run with a trained draft up to `stage`, on `threads` (None: the recipe's); its recipe stays as
    it is, and the run as old as it was."""
    from distill.pipeline.running import run_pipeline

    require_draft(run)
    prepare(threads or recipe.threads)
    with contextlib.closing(run):
        run.open()
        run_pipeline(recipe, run, until=stage)


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


def place_of_table(given: Path | None, run: Run | None) -> Path | None:
    """Where drafter table finds n-grams of the target: as `given`, or of the run; None, which stderr says, where there
    are none but the text's own."""
    if given is None and run is not None and run.path("table").is_dir():
        return run.folder
    if given is None:
        note("no table of n-grams (--table): drafter table knows those of the text so far alone")
    return given


def is_run(word: str, runs: Path) -> bool:
    """Whether a word of the command line is the name or folder of a run."""
    return any((folder / "config.yaml").exists() for folder in (Path(word), runs / word))


def models_of(words: Sequence[str] | None, runs: Path, most: int = 2, adapter: str | None = None) -> list[str]:
    """RUN | TARGET [DRAFT]: the references of the models; none of a run, which may be left out. An `adapter` joins the
    target."""
    words = words or []
    for word in words:
        require_path(word, "the run or model")
    if len(words) > most:
        raise RecipeError(f"{len(words)} models are named: {' '.join(words)}", "give RUN, or TARGET and DRAFT")
    if len(words) < 2 and not any(_is_model(word) and not is_run(word, runs) for word in words):
        if adapter is not None:
            raise RecipeError(
                "--adapter goes with a model", "name TARGET; a run's adapter is its recipe's (target.adapter)"
            )
        return []
    return [model_of(words[0], adapter), *map(resolve_model, words[1:])]


def model_of(word: str, adapter: str | None) -> str:
    """The reference of a model of the command line, with the adapter that joins it, if any."""
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

NEXT = re.compile(r",(?=\s*[\w-]+\s*=)")


def keys_of(
    section: type[Section], text: str | None, option: str, short: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """The keys of a section that an option gives, not yet checked; `short` are other names of keys."""
    if text is None:
        return {}
    if text.lstrip().startswith("{"):
        found = read_yaml(text, option)
        return found if isinstance(found, dict) else {}
    found = {}
    for part in NEXT.split(text):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not name:
            raise RecipeError(f"{option} {text}: expected KEY=VALUE,...", "docs/recipes.md lists the keys")
        name = short.get(name, name.replace("-", "_"))
        field = section.model_fields.get(name)
        kinds = () if field is None else (field.annotation, *get_args(field.annotation))
        listed = any(get_origin(kind) is tuple for kind in kinds) and not value.startswith("[")
        found[name] = read_yaml(f"[{value}]" if listed else value, f"{option} {name}")
    return found


def sampler_of(text: str | None, temperature: float | None = None) -> SamplerSettings:
    """The sampler of --sampler, and of --temperature in a command that has it; greedy without."""
    own = {"temperature": 0.0 if temperature is None else temperature}
    sampler = parse_section(SamplerSettings, own | keys_of(SamplerSettings, text, "--sampler"), "--sampler")
    if text and not sampler.temperature:
        raise RecipeError(f"--sampler {text} draws nothing", "give it a temperature, or leave it out for greedy")
    return sampler


def pytorch_of(text: str | None, own: PyTorch, models: Sequence[str | None]) -> PyTorch:
    """A run's settings, or the defaults, with what --pytorch says instead; RecipeError for GGUF files that run in
    llama.cpp, which it does not concern."""
    found = parse_section(PyTorch, own.model_dump() | keys_of(PyTorch, text, "--pytorch"), "--pytorch")
    files = models and all(model is None or is_gguf(model) for model in models)
    if text is not None and files and found.target_weights != "file":
        hint = "leave it out, or decode the files' own bits in PyTorch: target_weights=file"
        raise RecipeError(f"--pytorch {text}: {models[0]} runs in llama.cpp, not in PyTorch", hint)
    return found


def require_folders(dtype: str | None, models: Sequence[str | None]) -> None:
    """Raise RecipeError for a --dtype of GGUF files alone, which have their own types."""
    if dtype is not None and models and all(model is None or is_gguf(model) for model in models):
        raise RecipeError(f"--dtype {dtype}: {models[0]} is a GGUF file, which has its own types", "leave it out")


def gguf_of(
    models: Sequence[str | None], target: Sequence[str] | None, draft: Sequence[str] | None = None
) -> Gguf | None:
    """llama.cpp's options; None where none was given. RecipeError where PyTorch runs the models, or for options of a
    draft where none is."""
    short = {spelt: name for name, spelt in SHORT.items()}
    found: dict[str, dict[str, Any]] = {}
    for role, option, texts in (("target", "--llama", target), ("draft", "--llama-draft", draft)):
        for text in texts or ():
            found[role] = found.get(role, {}) | keys_of(GgufOptions, text, option, short)
    if not found:
        return None
    gguf = parse_section(Gguf, found, "the options of llama.cpp")
    if foreign := next((model for model in models if model is not None and not is_gguf(model)), None):
        raise RecipeError(f"options of llama.cpp: {gguf.described() or 'defaults'}, but PyTorch runs {foreign}")
    if models and len(models) < 2 and gguf.draft.given():
        raise RecipeError(f"options of llama.cpp for the draft: {gguf.draft.described()}, but none is loaded")
    return gguf


def merged(recipe: Gguf, given: Gguf | None) -> Gguf:
    """A recipe's options with those of the command line in their place; RecipeError where they do not go together."""
    if given is None:
        return recipe
    roles = {
        role: getattr(recipe, role).given() | getattr(given, role).model_dump(mode="json", exclude_unset=True)
        for role in ("target", "draft")
    }
    return parse_section(Gguf, roles, "the options of llama.cpp")
