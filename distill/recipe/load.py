"""Reading a recipe from a file and overrides, and writing it back."""

from __future__ import annotations

import difflib
import os
import types
import typing
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from distill.errors import RecipeError
from distill.recipe.section import Section
from distill.recipe.whole import Recipe


class _UniqueKeys(yaml.SafeLoader):
    """YAML that refuses duplicate keys; plain YAML silently takes the last one."""


def _mapping(loader: _UniqueKeys, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: dict[Any, int] = {}
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise RecipeError(f"line {key_node.start_mark.line + 1}: a key must be text, got {key!r}")
        line = key_node.start_mark.line + 1
        if key in seen:
            raise RecipeError(f"key `{key}` is written twice, on lines {seen[key]} and {line}", "remove one of them")
        seen[key] = line
    return loader.construct_mapping(node, deep=True)


_UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def is_path(reference: str) -> bool:
    """Whether a model or source is a path on this machine rather than a hub name."""
    return reference.startswith((".", "/", "~")) or Path(reference).is_absolute()


def resolve_model(reference: str, base: Path) -> str:
    """A model as a recipe or a command line names it: an absolute path, or a hub name.

    A path (see `is_path`) starts at `base`: the recipe's folder, or the working directory of a command. So does any
    other name under which a file or folder exists there: it wins over a hub name.
    """
    place = base / Path(reference).expanduser()
    return str(place.resolve()) if is_path(reference) or os.path.exists(place) else reference


def _resolve_paths(raw: dict[str, Any], base: Path) -> None:
    """Make every path absolute; relative paths start at the recipe's folder."""
    for section, key in (("target", "model"), ("cut", "donor")):
        part = raw.get(section)
        if isinstance(part, dict) and isinstance(part.get(key), str) and (key, part[key]) != ("donor", "target"):
            part[key] = resolve_model(part[key], base)
    answers = raw.get("answers")
    traffic = answers.get("traffic") if isinstance(answers, dict) else None
    if isinstance(traffic, dict) and isinstance(traffic.get("path"), str):
        traffic["path"] = str((base / Path(traffic["path"]).expanduser()).resolve())
    corpus = raw.get("corpus")
    sources = corpus.get("sources") if isinstance(corpus, dict) else None
    for source in sources if isinstance(sources, list) else []:
        if not (isinstance(source, dict) and isinstance(source.get("path"), str)):
            continue
        if source.get("kind") != "hub" and source["path"] != "python:stdlib":
            source["path"] = str((base / Path(source["path"]).expanduser()).resolve())


def _apply_override(raw: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    if not equals or not name.strip():
        raise RecipeError(f"override `{override}` is not of the form a.b=c", "for instance train.steps=100")
    try:
        value = yaml.load(text, Loader=_UniqueKeys)
    except yaml.YAMLError as error:
        raise RecipeError(f"the value of override `{override}` is not YAML: {error}") from error
    *path, last = name.strip().split(".")
    place: Any = raw
    for index, part in enumerate([*path, last]):
        final = index == len(path)
        if isinstance(place, list):
            if not part.isdigit() or int(part) >= len(place):
                raise RecipeError(f"override `{override}`: `{part}` is not an index of a list of {len(place)}")
            key: Any = int(part)
        elif isinstance(place, dict):
            key = part
        else:
            raise RecipeError(f"override `{override}`: `{path[index - 1]}` holds a value, not a section")
        if final:
            place[key] = value
        else:
            if isinstance(place, dict) and place.get(key) is None:
                place[key] = {}
            place = place[key]


def _section_at(location: tuple[Any, ...]) -> type[BaseModel] | None:
    """The section that the last name of an error's location belongs to."""
    place: Any = Recipe
    for part in location[:-1]:
        if isinstance(part, int):
            continue
        if not (isinstance(place, type) and issubclass(place, BaseModel)) or part not in place.model_fields:
            return None
        place = place.model_fields[part].annotation
        while typing.get_origin(place) in (tuple, list, typing.Union, types.UnionType):
            place = next(a for a in typing.get_args(place) if a not in (type(None), Ellipsis))
    return place if isinstance(place, type) and issubclass(place, BaseModel) else None


def _explain(error: Any) -> str:
    location = ".".join(str(part) for part in error["loc"]) or "recipe"
    if error["type"] == "extra_forbidden":
        section = _section_at(error["loc"])
        names = list(section.model_fields) if section else []
        near = difflib.get_close_matches(str(error["loc"][-1]), names, n=1, cutoff=0.5)
        advice = f"did you mean `{near[0]}`?" if near else f"known: {', '.join(names)}"
        return f"{location}: unknown key; {advice}"
    if error["type"] == "missing":
        return f"{location}: is missing"
    if error["type"] == "literal_error":
        known = error["ctx"]["expected"].replace(" or ", ", ").replace("'", "")
        return f"{location}: there is no {error['loc'][-1]} {error['input']!r}; known: {known}"
    message = error["msg"].removeprefix("Value error, ")
    return f"{location}: {message} (got {error['input']!r})" if error["loc"] else f"{location}: {message}"


def parse_recipe(raw: Any, where: str) -> Recipe:
    """The recipe in a mapping; raises one RecipeError with every mistake."""
    if not isinstance(raw, dict):
        raise RecipeError(f"{where}: a recipe is a mapping, got {type(raw).__name__}", "see docs/recipes.md")
    return parse_section(Recipe, raw, where)


SomeSection = typing.TypeVar("SomeSection", bound=Section)


def parse_section(section: type[SomeSection], raw: dict[str, Any], where: str = "the options") -> SomeSection:
    """A section from a mapping; raises one RecipeError with every mistake."""
    try:
        return section.model_validate(raw)
    except ValidationError as error:
        errors = error.errors()
        # pydantic also calls a list too short when its elements are faulty: report the elements alone.
        parents = {fault["loc"][:depth] for fault in errors for depth in range(len(fault["loc"]))}
        faults = [_explain(fault) for fault in errors if fault["type"] != "too_short" or fault["loc"] not in parents]
        count = f"{len(faults)} mistakes" if len(faults) > 1 else "1 mistake"
        what = f"{where}: {count}\n  - " + "\n  - ".join(faults)
        raise RecipeError(what, "docs/recipes.md lists every key") from error


def load_recipe(path: Path, overrides: typing.Sequence[str] = ()) -> Recipe:
    """Read a recipe file and apply `a.b=c` overrides.

    Relative paths in the file and in overrides start at the file's folder. Raises one RecipeError with every mistake.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecipeError(f"no recipe at {path}", "recipes/ has examples") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read the recipe {path}: {error}") from error
    try:
        raw = yaml.load(text, Loader=_UniqueKeys)
    except yaml.YAMLError as error:
        raise RecipeError(f"{path} is not YAML: {error}") from error
    except RecipeError as error:
        raise RecipeError(f"{path}: {error.what}", error.hint) from None
    if raw is None:
        raise RecipeError(f"{path} is empty", "recipes/ has examples")
    if isinstance(raw, dict):
        for override in overrides:
            _apply_override(raw, override)
        _resolve_paths(raw, path.resolve().parent)
    return parse_recipe(raw, str(path))


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as YAML with every default; `load_recipe` of it gives an equal recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
