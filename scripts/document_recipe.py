"""Write docs/recipes.md from the schema in distill/recipe/.

python scripts/document_recipe.py
"""

from __future__ import annotations

import inspect
import sys
import types
import typing
from pathlib import Path
from typing import Any, Literal

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from distill.recipe import Recipe, Section  # noqa: E402
from distill.recipe.measuring import CacheType, OutType  # noqa: E402
from distill.recipe.training import LossName  # noqa: E402

# Several keys take these lists of values. Tables name the list, and it is printed once, under this name.
NAMED = {OutType: "GGUF type", CacheType: "cache type", LossName: "loss"}
PLAIN = ("text", "integer", "number", "true, false")

INTRODUCTION = """\
<!-- Written by `python scripts/document_recipe.py` from distill/recipe/; edit those, not this file. -->

# Recipes

**Which keys does a recipe have, and what are their defaults?** A recipe is one YAML file with everything a run
depends on. `distill train RECIPE` runs it and writes to `runs/<name>`. The smallest recipe names a target, some text
and a cut:

```yaml
name: first
target:
  model: ../models/my-target        # a folder, or a hub name such as Qwen/Qwen2.5-Coder-14B-Instruct
corpus:
  sources:
    - {kind: tree, path: ~/code, pattern: "**/*.py"}
cut:
  layers: 8                         # fewer than the target has: a draft of the target's own size saves nothing
```

- **Paths.** A value that starts with `.`, `/` or `~` is a path. Relative paths start at the folder of the *recipe
  file*, and at the working directory on a command line. Any other model name is a hub name, unless a file or folder
  of that name exists there.
- **null** means off, unless the key's text says otherwise.
- **Mistakes.** One message names them all. `distill recipes --schema` prints the range of each number.
- **Overrides.** Commands that take a recipe also take changes to it, as `a.b=c`. The value is YAML, and numbers index
  into lists. Quote what your shell would interpret.

```
distill train recipes/demo.yaml 'speedup.lengths=[2, 4]' corpus.sources.0.pattern='asyncio/*.py' name=asyncio
```

A line gives a key with its default, then in brackets the values that it takes.

"""


def document() -> str:
    """Return the complete docs/recipes.md."""
    return INTRODUCTION + describe_schema().rstrip() + "\n"


def describe_schema() -> str:
    """Return each key with its default, values and meaning, as Markdown."""
    lines: list[str] = []
    anchors: dict[type[Section], str] = {}  # section class -> where its keys are listed
    listed: dict[tuple[type, str], str] = {}  # (class that has the key, key) -> section that lists it

    def walk(section: type[Section], title: str, prefix: str) -> None:
        lines.extend([f"## {title}", "", inspect.cleandoc(section.__doc__ or ""), ""])
        nested: list[tuple[type[Section], str]] = []
        shared: dict[str, list[str]] = {}  # other section -> keys that it lists
        for name, field in section.model_fields.items():
            owner = next(base for base in section.__mro__ if name in inspect.get_annotations(base))
            if (owner, name) in listed:
                shared.setdefault(listed[owner, name], []).append(f"`{name}`")
                continue
            listed[owner, name] = title
            inner = _section_in(field.annotation)
            if inner is not None and inner not in anchors:
                nested.append((inner, prefix + name))
                anchors[inner] = (prefix + name).replace(".", "")
                if section is Recipe:
                    continue  # The section has its own heading.
            takes, default = _takes(field.annotation, anchors), _default(field)
            if field.default is None:
                takes = takes.removesuffix(" or null")
            described = all(f"{choice}:" in (field.description or "") for choice in takes.split(", "))
            if described or (type(field.default) in (bool, int, float, str) and takes in PLAIN):
                takes = ""  # The default shows the type, or each choice has its own meaning.
            written = f"`{name}`" if default is None else f"`{name}: {default}`"
            meaning = field.description or (inspect.cleandoc(inner.__doc__ or "").split("\n\n")[0] if inner else "")
            noted = ", ".join(filter(None, [takes, "required" * field.is_required()]))
            lines.append(f"- {written}{f' ({noted})' if noted else ''}: {' '.join(meaning.split())}")
        lines.append("")
        for other, names in shared.items():
            lines.extend([f"{', '.join(names)}: as in [{other}](#{other.replace('.', '')}).", ""])
        for inner, name in nested:
            walk(inner, name, f"{name}.")

    walk(Recipe, "The recipe itself", "")
    for values, name in NAMED.items():
        lines.extend([f"## {_plural(name)}", "", ", ".join(f"`{value}`" for value in typing.get_args(values)), ""])
    return "\n".join(lines)


def _section_in(annotation: Any) -> type[Section] | None:
    """Return the section that a key holds, alone, in a list or as an alternative to null. None for other keys."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(_section_in, typing.get_args(annotation))), None)


def _plural(name: str) -> str:
    return f"{name}es" if name.endswith("s") else f"{name}s"


def _takes(annotation: Any, anchors: dict[type[Section], str]) -> str:
    """Return the values that a key takes: its type, or its choices."""
    if annotation in NAMED:
        return f"[{NAMED[annotation]}](#{_plural(NAMED[annotation]).lower().replace(' ', '-')})"
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        some = [_takes(argument, anchors) for argument in arguments if argument is not type(None)]
        return " or ".join([*some, "null"] if type(None) in arguments else some)
    if origin is typing.Annotated:
        return _takes(arguments[0], anchors)
    if origin is Literal:
        return ", ".join(map(str, arguments))
    if origin is tuple:
        return f"list of {_takes(arguments[0], anchors)}"
    if origin is dict:
        return f"mapping of {_takes(arguments[0], anchors)} to {_takes(arguments[1], anchors)}"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return f"[section](#{anchors[annotation]})"
    words = {str: "text", int: "integer", float: "number", bool: "true, false", Any: "any value"}
    return words.get(annotation, str(annotation))


def _default(field: Any) -> str | None:
    """Return a key's default as in a recipe. None if the key is required, or is a section with its own list."""
    return None if field.is_required() or isinstance(field.default, Section) else _plain(field.default)


def _plain(value: Any) -> str:
    """Return a value as in a recipe, on one line."""
    shown = [_short(item) for item in value] if isinstance(value, tuple) else value
    return yaml.safe_dump(shown, default_flow_style=True, width=1000, allow_unicode=True).split("\n")[0]


def _short(value: Any) -> Any:
    """Return an item of a list. A section omits the keys that have their defaults."""
    return value.model_dump(mode="json", exclude_defaults=True) if isinstance(value, Section) else value


if __name__ == "__main__":
    path = ROOT / "docs" / "recipes.md"
    path.write_text(document(), encoding="utf-8")
    print(f"wrote {path.relative_to(ROOT)}")
