"""A whole recipe, with the checks that span several sections, and the stages that not every recipe's run has. It is
read from a file and overrides, and written back."""

from __future__ import annotations

import contextlib
import copy
import difflib
import os
import re
import typing
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, model_validator

from distill.errors import DataError, RecipeError
from distill.files import (
    ADAPTER,
    is_gguf,
    is_utf8,
    kind_of,
    over,
    parts_of,
    read_object,
    read_utf8,
    require_path,
    split_parts,
)
from distill.machine import MOST_THREADS
from distill.recipe.corpus import Chat, Corpus
from distill.recipe.measuring import ON_CPU, Evaluate, Export, Gguf, GgufOptions, Speedup
from distill.recipe.target import Answers, PyTorch, Sampler, Section, Target, TeacherSettings, parse_section, shown
from distill.recipe.training import Cut, Train

QUESTIONS = "questions"  # the stage in which the target writes questions
TIMED = "speedup"  # the stage that times the target
COUNTED = "table"  # the stage that counts n-grams of the answers
LARGE_FILE = (
    4e9  # bytes of a GGUF file that is asked in llama.cpp: PyTorch's copy of it would take several times as much
)


class Recipe(Section):
    """Everything a run depends on."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._=-]*$", max_length=100, description="the run directory's name")
    seed: int = Field(0, ge=0, description="seed of all random choices")
    threads: int | None = Field(
        None,
        ge=1,
        le=MOST_THREADS,
        description="CPU threads; null: OMP_NUM_THREADS, else all cores of this process",
    )
    device: str = Field("auto", description="auto, cpu, cuda, cuda:0, mps, …")
    target: Target
    corpus: Corpus
    chat: Chat = Chat()
    sampler: Sampler = Sampler()
    pytorch: PyTorch = PyTorch()
    answers: Answers = Answers()
    teacher: TeacherSettings = TeacherSettings()
    cut: Cut = Cut()
    train: Train = Train()
    eval: Evaluate = Evaluate()
    export: Export = Export()
    speedup: Speedup = Speedup()
    gguf: Gguf = Gguf()

    @property
    def donor_model(self) -> str:
        """The model that the draft is cut from: cut.donor, or the target's folder or hub name."""
        return self.target.model if self.cut.donor == "target" else self.cut.donor

    @property
    def sampling(self) -> dict[str, float]:
        """The sampler that answers are written with, by the names that servers take."""
        return {**self.sampler.model_dump(mode="json"), "repetition_penalty": self.answers.repetition_penalty}

    def gguf_options(self, role: Literal["target", "draft"]) -> GgufOptions:
        """How llama.cpp opens a file of the target or the draft: null options follow `threads` and `device`."""
        options = self.gguf.of(role)
        threads = options.threads or self.threads
        if self.device == "cpu" and options.n_gpu_layers is None and not options.device and not options.tensor_split:
            return options.model_copy(update={"threads": threads, "device": ON_CPU.device})
        return options.model_copy(update={"threads": threads})

    def gguf_pair(self, backend: str) -> Gguf:
        """How a backend that opens GGUF files opens both models."""
        own = {"library": "ik"} if backend.startswith("ik") else {}
        target, draft = (self.gguf_options(role).model_copy(update=own) for role in ("target", "draft"))
        return Gguf(target=target, draft=draft)

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        if self.answers.prompt_tokens + self.answers.new_tokens > self.corpus.block:
            raise ValueError(
                f"answers.prompt_tokens + answers.new_tokens = {self.answers.prompt_tokens + self.answers.new_tokens} "
                f"does not fit corpus.block = {self.corpus.block}"
            )
        given = [
            name
            for name, there in (("corpus.tokens", self.corpus.tokens), ("answers.traffic", self.answers.traffic))
            if there
        ]
        if self.writer_teaches and given:
            raise ValueError(
                f"{given[0]}: the servers of answers.writer give the distributions of texts that they write, and this "
                "is other text: also name who reads it (teacher.server, teacher.gguf, or teacher.kind: exact for the "
                "weights)"
            )
        if self.train.acceptance is None and not self.keeps_given_text and self.answers.traffic is None:
            raise ValueError(
                "train.acceptance: null asks for no answers to validation prompts, and "
                + ("a server that teaches keeps no given text" if self.writer_teaches else "no source gives text")
                + ", so nothing is left to measure the cut on: leave train.acceptance out"
            )
        for foreign in (one.described for one in self.speedup.configurations if one.other_vocabulary):
            raise ValueError(f"`{foreign}` is for a draft of another vocabulary; a run's draft has the target's")
        if self.train.adapter is not None and self.train.embedding_rate and self.cut.transplant is None:
            raise ValueError("train.embedding_rate: adapters freeze embeddings and head, without a cut.transplant")
        for backend, kind in self.speedup.files.items():
            if kind not in self.export.outtypes:
                raise ValueError(f"speedup measures {backend} in {kind}, which is not among export.outtypes")
        return self

    @property
    def keeps_given_text(self) -> bool:
        """Whether held-out splits may hold text that the target did not write."""
        return not self.writer_teaches and any(one.kind != "target" and one.given for one in self.corpus.sources)

    @property
    def target_runs_here(self) -> bool:
        """Whether a stage before `speedup` loads the target in PyTorch."""
        asked = self.answers.writer is None and (self.answers.prompts != 0 or bool(self.corpus.asked))
        return asked or self.teacher_reads_weights

    @property
    def teacher_reads_weights(self) -> bool:
        """Whether the distributions come from the target in PyTorch, so that they can be stored exactly."""
        return self.teacher.gguf is None and self.teacher.server is None and not self.writer_teaches

    @property
    def writer_teaches(self) -> bool:
        """Whether the servers that write the answers give the distributions with them."""
        writer, teacher = self.answers.writer, self.teacher
        named = teacher.kind == "exact" or teacher.gguf is not None or teacher.server is not None
        return writer is not None and bool(writer.urls) and self.answers.prompts != 0 and not named


def not_loadable(recipe: Recipe) -> str | None:
    """Why this machine cannot load the target; None if it can. Only the target's speed and its GGUF file ask this."""
    if recipe.target_runs_here:
        return None
    import psutil  # `distill doctor` reads recipes, and says what is missing

    weights = local_weights(recipe.target.model)
    taken, memory = sum(path.stat().st_size for path in weights), psutil.virtual_memory().total
    if not weights:
        return f"the weights of {recipe.target.model} are not on this machine"
    if taken > memory:
        return f"the target's weights take {taken / 1e9:.0f} GB, and this machine has {memory / 1e9:.0f} GB of memory"
    return None


def local_weights(model: str) -> list[Path]:
    """The files of a model's weights on this machine; none if it is a hub name whose weights were never downloaded."""
    model, _ = parts_of(model)
    if is_gguf(model):
        return split_parts(Path(model)) if Path(model).exists() else []
    folder = Path(model)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            config = None if is_path(model) else try_to_load_from_cache(model, "config.json")
        except HFValidationError:
            return []
        if not isinstance(config, str):
            return []
        folder = Path(config).parent
    from distill.folders import weight_files

    with contextlib.suppress(DataError):  # Whoever loads the folder names its fault.
        if found := [path for path in weight_files(folder) if path.is_file()]:
            return found
    return sorted(folder.glob("pytorch_model*.bin"))


def left_out(recipe: Recipe) -> dict[str, str]:
    """The stages that a recipe's run does not have, each with the reason."""
    absent = {} if recipe.corpus.asked else {QUESTIONS: "its corpus has no source of kind target"}
    absent |= not_run(recipe)
    if TIMED in absent or not any(one.counts_ngrams for one in recipe.speedup.configurations):
        absent[COUNTED] = "no configuration that it measures drafts from a table of n-grams"
    return absent


def not_run(recipe: Recipe) -> dict[str, str]:
    """Those of them that runs have as a rule, so that a user should hear of each."""
    reason = not_loadable(recipe)
    return {} if reason is None else {TIMED: reason}


# ── Reading a recipe from a file and overrides, and writing it back ──

TAGS = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null", "seq", "map"))
DEEPEST, MOST = 60, 100_000  # levels of nesting and values of a recipe, repeated ones included


class _UniqueKeys(yaml.SafeLoader):
    """YAML of text, numbers, true, false, null, lists and mappings that refuses duplicate keys; plain YAML silently
    takes the last one. Dates are text."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """The value of a node; raises RecipeError with its line for a tag or value that recipes cannot hold."""
        line = f"line {node.start_mark.line + 1}"
        if node.tag not in TAGS:
            kind = node.tag.removeprefix("tag:yaml.org,2002:")
            hint = "write text, a number, true, false, null, a list or a mapping; put text into quotes"
            raise RecipeError(f"{line}: a recipe cannot hold a value of the YAML type {shown(kind)}", hint)
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            kind = node.tag.rpartition(":")[2]
            raise RecipeError(
                f"{line}: {shown(node.value)} cannot be read as {kind}", "quote it if it is text"
            ) from error


def _mapping(loader: _UniqueKeys, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: dict[Any, int] = {}
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        line = key_node.start_mark.line + 1
        if not isinstance(key, str):
            raise RecipeError(f"line {line}: a key must be text, got {shown(key)}")
        if key in seen:
            raise RecipeError(f"key `{key}` is written twice, on lines {seen[key]} and {line}", "remove one of them")
        seen[key] = line
    return loader.construct_mapping(node, deep=True)


_UniqueKeys.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if not tag.endswith(":timestamp")]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# 5e-4 and 1e3 are numbers, as in YAML 1.2 and JSON.
_UniqueKeys.add_implicit_resolver(TAGS[2], re.compile(r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$"), list("-+0123456789"))
_UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read_yaml(text: str, where: str) -> Any:
    """The value of a YAML text; raises RecipeError, which names `where` and the line, for one that cannot be used."""
    try:
        value = yaml.load(text, Loader=_UniqueKeys)
        _require_plain(value)
    except RecipeError as error:
        raise RecipeError(f"{where}: {error.what}", error.hint) from None
    except RecursionError:
        raise RecipeError(f"{where} is nested too deeply", f"at most {DEEPEST} levels are possible") from None
    except yaml.reader.ReaderError as error:
        number = text.count("\n", 0, error.position) + 1
        fault = f"line {number}: the character {text[error.position]!a} is not allowed"
        raise RecipeError(f"{where} is not YAML: {fault}", "remove it") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        fault = error.problem or error.context or "it cannot be read"
        raise RecipeError(f"{where} is not YAML: {line}{fault}", "correct this line") from error
    return value


def _require_plain(value: Any) -> None:
    """Raise RecipeError for a value that is too large once aliases are written out, or text that is not UTF-8."""
    waiting, count = [(value, 0)], 0
    while waiting:
        part, depth = waiting.pop()
        count += 1
        if depth > DEEPEST or count > MOST:
            limits = f"at most {DEEPEST} levels and {MOST} values are possible"
            raise RecipeError("it is nested too deeply, or too large", limits)
        if isinstance(part, dict):
            waiting += [(inner, depth + 1) for pair in part.items() for inner in pair]
        elif isinstance(part, list):
            waiting += [(inner, depth + 1) for inner in part]
        elif isinstance(part, str) and not is_utf8(part):
            raise RecipeError(f"{shown(part)} holds a lone surrogate, which is no text", "remove it")


def is_path(reference: str) -> bool:
    """Whether a model or source is a path on this machine rather than a hub name."""
    return reference.startswith((".", "/", "~")) or Path(reference).is_absolute()


def _absolute(reference: str, base: Path, where: str) -> str:
    """A path from `base` on; raises RecipeError, which names the key `where`, for one that no file can have."""
    require_path(reference, where)
    try:
        place = base / Path(reference).expanduser()
        # A hub's snapshot links NAME.gguf to a blob, whose name tells neither the model nor its parts.
        linked = place.is_symlink() and is_gguf(str(place))
        return str(place.parent.resolve() / place.name if linked else place.resolve())
    except RuntimeError:
        user = reference.split("/")[0]
        raise RecipeError(f"{where}: there is no user {shown(user)} on this machine", "write the path out") from None
    except OSError as error:  # a loop of links
        raise RecipeError(f"{where}: the path {shown(reference)} cannot be used: {error.strerror}") from None


def resolve_model(reference: str, base: Path = Path(), where: str = "the model") -> str:
    """A model as a recipe or a command line names it: an absolute path, or a hub name.

    A path (see `is_path`) starts at `base`: the recipe's folder, or the working directory of a command. So does any
    other name under which a file or folder exists there: it wins over a hub name. A folder with a PEFT adapter alone is
    the adapter over the base that it names. Raises RecipeError, which names `where`, for a path that no file can have.
    """
    under, adapter = parts_of(reference)
    if adapter is not None:
        return over(resolve_model(under, base, where), _absolute(adapter, base, f"{where}, its adapter"))
    place = _absolute(reference, base, where)
    if (named := _base_of(Path(place))) is not None:
        return over(resolve_model(named, base, f"{where}, the base of its adapter"), place)
    return place if is_path(reference) or os.path.exists(place) else reference


def _base_of(folder: Path) -> str | None:
    """The model that an adapter's folder says it was made for; None of a folder with a model, or without an adapter."""
    path = folder / ADAPTER
    if not path.is_file() or (folder / "config.json").is_file():
        return None
    base = read_object(path, "copy the folder again").get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        hint = "name both: target.adapter in a recipe, --adapter with the base as TARGET on the command line"
        raise DataError(f"{path} does not name the model that the adapter is for (base_model_name_or_path)", hint)
    return base


# The keys that hold a path or a model, and how each is resolved.
PATHS = {
    **dict.fromkeys(("target.model", "cut.donor"), resolve_model),
    **dict.fromkeys(("target.adapter", "answers.traffic", "answers.writer.gguf", "teacher.gguf"), _absolute),
}


def _section(raw: Any, dotted: str) -> dict[str, Any]:
    """A section of a raw recipe; an empty one where it is missing or no mapping, which parsing then reports."""
    for name in dotted.split("."):
        raw = raw.get(name) if isinstance(raw, dict) else None
    return raw if isinstance(raw, dict) else {}


def _resolve_paths(raw: dict[str, Any], base: Path) -> None:
    """Make every path absolute; relative paths start at the recipe's folder."""
    for name, resolve in PATHS.items():
        dotted, _, key = name.rpartition(".")
        section = _section(raw, dotted)
        if isinstance(section.get(key), str) and (name, section[key]) != ("cut.donor", "target"):
            section[key] = resolve(section[key], base, name)
    sources = _section(raw, "corpus").get("sources")
    for index, source in enumerate(sources if isinstance(sources, list) else []):
        if not (isinstance(source, dict) and isinstance(source.get("path"), str)):
            continue
        where = f"corpus.sources.{index}.path"
        require_path(source["path"], where)
        if source.get("kind") != "hub" and source["path"] != "python:stdlib":
            source["path"] = _absolute(source["path"], base, where)
    _ask_the_file(raw)


def _ask_the_file(raw: dict[str, Any]) -> None:
    """A target that is a large GGUF file writes its answers and distributions itself, through llama.cpp, unless the
    recipe names another writer or teacher. Servers that write the answers are also the teacher."""
    model = _section(raw, "target").get("model")
    if not isinstance(model, str) or not is_gguf(model) or not Path(model).exists():
        return
    if sum(path.stat().st_size for path in split_parts(Path(model))) < LARGE_FILE:
        return
    answers = raw.setdefault("answers", {})
    if isinstance(answers, dict) and answers.get("writer") is None:
        answers["writer"] = {"gguf": model}
    writer = answers.get("writer") if isinstance(answers, dict) else None
    if isinstance(writer, dict) and writer.get("urls") and answers.get("prompts") != 0:
        return
    teacher = raw.setdefault("teacher", {})
    if isinstance(teacher, dict) and teacher.get("gguf") is None and teacher.get("server") is None:
        teacher["gguf"] = model


NEXT = re.compile(r",(?=\s*[\w-]+\s*=)")


def assigned(text: str, where: str, form: str = "KEY=VALUE") -> tuple[str, str]:
    """Split KEY=VALUE at its first equals sign; RecipeError, which names `where`, for a text of another form."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise RecipeError(f"{where} {shown(text)}: expected {form}", "write it without spaces")
    return key.strip(), value.strip()


def all_assigned(text: str, where: str) -> list[tuple[str, str]]:
    """Split KEY=VALUE,... into pairs. A value can contain commas."""
    return [assigned(part, where, "KEY=VALUE,...") for part in NEXT.split(text)]


def _apply_override(raw: dict[str, Any], override: str) -> None:
    name, text = assigned(override, "override", "a.b=c, such as train.steps=100")
    if len(name) > 500:
        raise RecipeError(f"override `{name[:100]}…` has {len(name)} characters before the =", "see docs/recipes.md")
    value = read_yaml(text, f"the value of override `{name[:100]}`")
    *path, last = name.split(".")
    if len(path) > DEEPEST:
        raise RecipeError(f"override `{name[:100]}…` is nested too deeply", f"at most {DEEPEST} levels are possible")
    place: Any = raw
    for index, part in enumerate([*path, last]):
        if isinstance(place, list):
            if not (part.isascii() and part.isdigit() and len(part) <= 9 and int(part) < len(place)):
                raise RecipeError(f"override `{override}`: `{part}` is not an index of a list of {len(place)}")
            key: Any = int(part)
        elif isinstance(place, dict):
            key = part
        else:
            raise RecipeError(f"override `{override}`: `{path[index - 1]}` holds a value, not a section")
        if index == len(path):
            place[key] = value
            return
        if isinstance(place, dict) and place.get(key) is None:
            place[key] = {}
        place = place[key]


def of_older_version(run: Path) -> tuple[str, str]:
    """Return the refusal of a run that an older version made, and how to keep its draft."""
    draft = run.resolve() / "draft"
    uses = f"`distill eval TARGET {draft} --prompts FILE`, `distill export-gguf {draft}`"
    other = f"`distill train RECIPE name=OTHER cut.donor={draft}`"
    hint = f"its draft loads on its own: {uses}, {other}; or move the whole run aside (--fresh)"
    return f"{run} was made by an older version of distill, whose recipes and stages were others", hint


def parse_recipe(raw: Any, where: str) -> Recipe:
    """The recipe in a mapping; raises one RecipeError with every mistake."""
    if not isinstance(raw, dict):
        raise RecipeError(f"{where}: a recipe is a mapping, got {kind_of(raw)}", "see docs/recipes.md")
    return parse_section(Recipe, raw, where)


def load_recipe(path: Path, overrides: typing.Sequence[str] = ()) -> Recipe:
    """Read a recipe file and apply `a.b=c` overrides.

    Relative paths in the file and in overrides start at the file's folder. Raises one RecipeError with every mistake,
    DataError for a file that cannot be read.
    """
    require_path(path, "the recipe")
    if path.is_dir():
        raise RecipeError(f"{path} is a folder, not a recipe", "give a .yaml file, or two models: TARGET DRAFT")
    if not path.exists():
        beside = {one.stem: one for one in path.parent.glob("*.yaml")}
        near = difflib.get_close_matches(path.stem, beside, n=1)
        hint = f"did you mean {beside[near[0]]}?" if near else "`distill recipes` lists examples"
        raise RecipeError(f"no recipe at {path}", hint)
    raw = read_yaml(read_utf8(path), str(path))
    if raw is None:
        raise RecipeError(f"{path} is empty", "`distill recipes` lists examples")
    if path.name == "config.yaml" and (path.parent / "stages").is_dir():  # A run wrote it, so it was valid.
        try:
            recipe_of(copy.deepcopy(raw), str(path), path.resolve().parent)
        except RecipeError as error:
            raise RecipeError(*of_older_version(path.parent)) from error
    return recipe_of(raw, str(path), path.resolve().parent, overrides)


def recipe_of(raw: Any, where: str, folder: Path, overrides: typing.Sequence[str] = ()) -> Recipe:
    """The recipe in what YAML or a caller gave, with overrides applied; relative paths start at `folder`."""
    if isinstance(raw, dict):
        for override in overrides:
            _apply_override(raw, override)
        _resolve_paths(raw, folder)
    return parse_recipe(raw, where)


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as YAML with every default; `load_recipe` of it gives an equal recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
