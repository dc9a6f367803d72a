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

# Lists of values that several keys take: named in their tables, and printed once, under this name.
NAMED = {OutType: "GGUF type", CacheType: "cache type", LossName: "loss"}

INTRODUCTION = """\
<!-- Written by `python scripts/document_recipe.py` from distill/recipe/; edit those, not this file. -->

# Recipes

A recipe is one YAML file with everything a run depends on. `distill train RECIPE` runs it stage by stage and writes to
the run directory `runs/<name>`. The smallest recipe names a target, some text and a cut; every other key has a default:

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

**Paths.** A value that starts with `.`, `/` or `~` is a path; a relative one starts at the folder of the *recipe
file*, on a command line at the working directory. Any other model name is a hub name, unless a file or folder of that
name exists there.

**null.** A key whose default is `null` takes `null`, too, which means off unless its meaning says otherwise.

**Mistakes.** One message names every unknown key, with its nearest known one, and every value out of range, before
any work starts. `distill check RECIPE` makes all checks that can be made without weights.

**Overrides.** A command that takes a recipe also takes changes to it, as `a.b=c`. The value is YAML; numbers index
into lists. Quote anything your shell would interpret:

```
distill train recipes/demo.yaml 'speedup.lengths=[2, 4]' corpus.sources.0.pattern='asyncio/*.py' name=asyncio
```

**Splits.** *train*: the draft learns from it. *validation*: choices are made on it. *test*: every printed figure
comes from it.

"""


def document() -> str:
    """The whole of docs/recipes.md."""
    return INTRODUCTION + describe_schema().rstrip() + "\n"


def describe_schema() -> str:
    """Each key with its values, default and meaning, as Markdown."""
    lines: list[str] = []
    anchors: dict[type[Section], str] = {}  # of each section, where its keys are listed
    listed: dict[tuple[type, str], str] = {}  # of each key by the class that has it, the section that lists it

    def walk(section: type[Section], title: str, prefix: str) -> None:
        lines.extend([f"## {title}", "", inspect.cleandoc(section.__doc__ or ""), ""])
        lines.extend(["| key | takes | default | meaning |", "|-|-|-|-|"])
        nested: list[tuple[type[Section], str]] = []
        shared: dict[str, list[str]] = {}  # keys that another section lists, by that section
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
                    continue  # its own heading follows
            takes, default = _takes(field.annotation, field.metadata, anchors), _default(field)
            if default == "`null`":
                takes = takes.removesuffix(" or `null`")
            if type(field.default) in (int, float):  # its kind is plain from the default
                takes = takes.removeprefix("integer ").removeprefix("number ")
            cells = (f"`{name}`", takes, default)
            meaning = field.description or (inspect.cleandoc(inner.__doc__ or "").split("\n\n")[0] if inner else "")
            lines.append(
                "| " + " | ".join(cell.replace("|", "\\|") for cell in (*cells, " ".join(meaning.split()))) + " |"
            )
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
    """The section that a key holds, alone, in a list or as an alternative to null; None for other keys."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(_section_in, typing.get_args(annotation))), None)


def _plural(name: str) -> str:
    return f"{name}es" if name.endswith("s") else f"{name}s"


def _takes(annotation: Any, metadata: typing.Sequence[Any], anchors: dict[type[Section], str]) -> str:
    """The values that a key takes: type, choices and bounds."""
    if annotation in NAMED:
        return f"[{NAMED[annotation]}](#{_plural(NAMED[annotation]).lower().replace(' ', '-')})"
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    bounds = [
        f"{sign} {getattr(bound, attribute)}"
        for bound in metadata
        for attribute, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
        if getattr(bound, attribute, None) is not None
        and abs(getattr(bound, attribute)) < 1000  # larger: any that makes sense
    ]
    if origin in (typing.Union, types.UnionType):
        some = [_takes(argument, metadata, anchors) for argument in arguments if argument is not type(None)]
        return " or ".join([*some, "`null`"] if type(None) in arguments else some)
    if origin is Literal:
        return ", ".join(map(str, arguments))
    if origin is tuple:
        return f"list of {_takes(arguments[0], (), anchors)}"
    if origin is dict:
        return f"mapping of {_takes(arguments[0], (), anchors)} to {_takes(arguments[1], (), anchors)}"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return f"[section](#{anchors[annotation]})"
    words = {str: "text", int: "integer", float: "number", bool: "true, false", Any: "any value"}
    return " ".join([words.get(annotation, str(annotation)), ", ".join(bounds)]).strip()


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    return "as listed there" if isinstance(field.default, Section) else f"`{_plain(field.default)}`"


def _plain(value: Any) -> str:
    """A value as in a recipe, on one line."""
    shown = [_short(item) for item in value] if isinstance(value, tuple) else value
    return yaml.safe_dump(shown, default_flow_style=True, width=1000, allow_unicode=True).split("\n")[0]


def _short(value: Any) -> Any:
    """An item of a list; a section without the keys that have their defaults."""
    return value.model_dump(mode="json", exclude_defaults=True) if isinstance(value, Section) else value


if __name__ == "__main__":
    path = ROOT / "docs" / "recipes.md"
    path.write_text(document(), encoding="utf-8")
    print(f"wrote {path.relative_to(ROOT)}")
