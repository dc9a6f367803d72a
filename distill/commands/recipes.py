"""`distill recipes`: lists the recipes that come with the package, or copies one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from distill.commands.shared import FormatOption, print_blocks, require_place
from distill.errors import RecipeError
from distill.files import write_text
from distill.progress import note
from distill.shipped import recipe_text
from distill.shipped import recipes as shipped_recipes
from distill.tables import Table


def recipes(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Copy this recipe; without it, list all.")
    ] = None,
    to: Annotated[
        Path | None, typer.Argument(metavar="[TO]", help="File or folder of the copy; by default NAME.yaml, here.")
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
