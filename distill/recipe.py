"""The recipe: its schema, every default, loading and overrides. No torch, so that `distill check` starts at once."""

from __future__ import annotations

import difflib
import types
import typing
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from distill.errors import RecipeError


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Source(Section):
    """One place text comes from."""

    kind: Literal["tree", "text", "jsonl", "hub"] = Field(
        description="tree: every matching file below a folder is a document; text: one file, one document; "
        "jsonl: one document a line; hub: a data set by its hub name (through `datasets`)"
    )
    path: str = Field(description="folder, file or hub name; `python:stdlib` is the running interpreter's library")
    pattern: str = Field("**/*.py", description="tree: which files")
    field: str = Field("text", description="jsonl and hub: the field that holds the text")
    subset: str | None = Field(None, description="hub: the configuration's name")
    hub_split: str = Field("train", description="hub: which split of the data set is read")
    exclude: tuple[str, ...] = Field((), description="tree: folder names that are skipped")
    split: Literal["by-name", "train", "selection", "report"] = Field(
        "by-name", description="by-name: a hash of the document's name decides; else all documents go to that split"
    )
    keep: tuple[Literal["train", "selection", "report"], ...] = Field(
        ("train", "selection", "report"), description="documents of other splits are dropped (and counted)"
    )


class Target(Section):
    """The big model that is to be made faster."""

    model: str = Field(description="folder (starting with . / or ~) or hub name")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="what it runs in")


class Corpus(Section):
    """Text, split into train, selection and report by document."""

    sources: tuple[Source, ...] = Field(min_length=1, description="read in this order; a name seen twice is dropped")
    selection: float = Field(0.04, ge=0, lt=1, description="share of by-name documents for selection")
    report: float = Field(0.04, ge=0, lt=1, description="share of by-name documents for report")
    block: int = Field(512, ge=16, description="positions per packed block")
    tokens: int = Field(400_000, ge=0, description="train-split text tokens given to the teacher beside the answers")
    max_documents: int = Field(100_000, ge=1, description="documents read per source at most (and said)")


class SamplerSettings(Section):
    """The law the target serves with; answers, evaluation and decoding all use it."""

    temperature: float = Field(1.0, ge=0, description="0 is greedy")
    top_k: int = Field(0, ge=0, description="0: off")
    top_p: float = Field(1.0, gt=0, le=1, description="1: off")
    min_p: float = Field(0.0, ge=0, lt=1, description="0: off")


class Answers(Section):
    """The target continues prompts of the train split: its own text."""

    prompts: int = Field(256, ge=1, description="train prompts")
    prompt_tokens: int = Field(64, ge=1, description="tokens of a document's beginning, or of a later piece of it")
    new_tokens: int = Field(192, ge=1, description="tokens generated at most")
    batch: int = Field(32, ge=1, description="prompts generated together; also the unit of resuming")


class TeacherStore(Section):
    """The target's distributions on the train blocks: top-k log-probabilities and the log of the tail's mass."""

    top_k: int = Field(32, ge=1, description="entries stored per position")
    shard_blocks: int = Field(64, ge=1, description="blocks per shard; also the unit of resuming")
    batch: int = Field(8, ge=1, description="blocks per forward pass")


class Profile(Section):
    """Measured cost of a step, T(m), for m tokens of one sequence."""

    max_tokens: int = Field(16, ge=2, le=64, description="m runs from 1 to this")
    depth: int = Field(128, ge=1, description="tokens already in the cache")
    repeats: int = Field(7, ge=5, description="timed repeats after the discarded first; the median is kept")


class Transplant(Section):
    """The donor gets the target's vocabulary, byte for byte."""

    method: Literal["pieces", "pursuit"] = Field(
        "pieces", description="rows that are no copies: pieces: from the donor's own pieces of the token's bytes; "
        "pursuit: orthogonal matching pursuit over the shared tokens (reads the target's embeddings)"
    )  # fmt: skip
    overrides: dict[str, str] = Field(
        {}, description="a target token, such as a turn marker, to the text whose donor tokens it starts from"
    )
    decay: float = Field(0.5, gt=0, le=1, description="pieces: weight of each piece over the one before, in the head")


class Trim(Section):
    """The draft speaks only tokens that the target writes often; our decoders compute their logits alone."""

    size: int | None = Field(None, ge=256, description="tokens kept; null: chosen `by` mass or price")
    by: Literal["mass", "price"] = Field(
        "mass", description="mass: the fewest that hold `mass` of every domain; price: the most tokens per second"
    )
    mass: float = Field(0.995, gt=0, le=1, description="share of the target-written tokens of each domain to cover")


class Search(Section):
    """Cuts tried before the draft is made: each healed for a few steps, measured and priced; the best is taken."""

    layers: tuple[int, ...] = Field(min_length=1, description="layer counts tried")
    mlp_width: tuple[int, ...] = Field((), description="MLP widths tried with each; empty: draft.mlp_width alone")
    heal_steps: int = Field(60, ge=0, description="training steps each cut gets before it is measured")
    backend: Literal["pytorch", "gguf"] = Field("pytorch", description="whose step costs count")
    outtypes: tuple[Literal["f32", "f16", "bf16", "q8_0"], ...] = Field(
        ("f16",), description="gguf: file types of the draft tried with every cut"
    )
    max_length: int = Field(16, ge=1, le=63, description="longest draft length that a prediction may choose")


class DraftCut(Section):
    """What the draft is cut from, and how far: transplant, then layers, then widths, then the head."""

    donor: str = Field("target", description="`target`, a folder, or a hub name")
    transplant: Transplant | None = Field(None, description="needed when the donor's vocabulary is another; null: off")
    layers: int | None = Field(None, ge=1, description="layers kept; null: all")
    layer_rule: Literal["auto", "greedy", "influence", "angular", "last-but-one"] = Field(
        "auto", description="greedy: remove, one by one, the layer whose loss costs the least KL to the target; "
        "influence: drop the least influential; angular: the run of layers that turns the state least; "
        "last-but-one: the last n but one; auto: greedy for up to 28 layers, influence beyond, where greedy takes long"
    )  # fmt: skip
    drop_layers: str | None = Field(None, description="layers dropped by number instead, such as `14-21` or `3,7,9-11`")
    mlp_width: int | None = Field(None, ge=32, description="MLP neurons kept per layer; null: all")
    mlp_rule: Literal["activation", "magnitude", "first"] = Field(
        "activation", description="which neurons: by what they add to the residual stream; by weights alone; the first"
    )
    mlp_repair: bool = Field(True, description="least-squares repair of down_proj for the neurons removed")
    kv_heads: int | None = Field(None, ge=1, description="KV heads kept, each with its query heads; null: all")
    hidden: int | None = Field(None, ge=64, description="hidden size kept; null: all")
    trim: Trim | None = Field(None, description="trimmed head; null: off")
    search: Search | None = Field(None, description="search over cuts, which then sets layers and mlp_width; null: off")
    score_blocks: int = Field(16, ge=1, description="blocks that scores and losses of cuts are collected on")

    @model_validator(mode="after")
    def _layers_are_said_once(self) -> DraftCut:
        if self.drop_layers is not None and (self.layers is not None or self.search is not None):
            raise ValueError("drop_layers names the layers; leave layers and search out")
        if self.search is not None and self.layers is not None:
            raise ValueError("search sets the layers; leave layers out")
        if self.search is not None and self.search.mlp_width and self.mlp_width is not None:
            raise ValueError("search.mlp_width sets the widths; leave mlp_width out")
        return self


class Sparsity(Section):
    """L1 while fine-tuning: neurons (or single weights) are driven to zero, cut, and the rest debiased."""

    method: Literal["group", "unstructured"] = Field(
        "group", description="group: whole MLP neurons, cut out at the end; unstructured: single weights, which stay "
        "as zeros and make nothing faster"
    )  # fmt: skip
    mlp_width: int | None = Field(None, ge=32, description="group: neurons left per layer")
    share: float | None = Field(None, gt=0, lt=1, description="unstructured: share of the weights that become zero")
    ramp: float = Field(0.2, gt=0, le=1, description="share of the steps over which the penalty grows")

    @model_validator(mode="after")
    def _wants_one_goal(self) -> Sparsity:
        wanted, other = ("mlp_width", "share") if self.method == "group" else ("share", "mlp_width")
        if getattr(self, wanted) is None or getattr(self, other) is not None:
            raise ValueError(f"method {self.method} needs {wanted} and no {other}")
        return self


class Train(Section):
    """Distillation of the draft."""

    steps: int = Field(300, ge=1, description="optimizer steps")
    batch: int = Field(4, ge=1, description="blocks per step")
    rate: float = Field(5e-5, gt=0, description="peak learning rate of AdamW; small demo models want more")
    warmup: float = Field(0.03, ge=0, lt=1, description="share of the steps spent warming up, linearly")
    final: float = Field(0.1, ge=0, le=1, description="the cosine ends at this share of the rate")
    loss: dict[Literal["forward_kl", "cross_entropy"], float] = Field(
        {"forward_kl": 0.9, "cross_entropy": 0.1}, description="weights of the losses"
    )
    clip: float = Field(1.0, gt=0, description="gradient norm is clipped to this")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW")
    weight_decay: float = Field(0.0, ge=0, description="AdamW, on matrices")
    chunk: int = Field(1024, ge=1, description="positions of the head computed at once")
    save_every: int = Field(100, ge=1, description="steps between checkpoints")
    keep: int = Field(2, ge=1, description="checkpoints kept")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="autocast type; the weights stay float32")
    embedding_steps: int = Field(
        0, ge=0, description="first steps that move the embeddings and head alone, as after a transplant"
    )
    sparsity: Sparsity | None = Field(None, description="L1 while training; null: off")

    @field_validator("loss")
    @classmethod
    def _loss_weighs_something(cls, value: dict[str, float]) -> dict[str, float]:
        if any(weight < 0 for weight in value.values()) or sum(value.values()) <= 0:
            raise ValueError("weights must be >= 0 and not all 0")
        return value


class Evaluate(Section):
    """Divergences and acceptance on the report split."""

    prompts: int = Field(64, ge=4, description="report prompts: continuations measured, and rounds decoded")
    new_tokens: int = Field(128, ge=8, description="tokens of each continuation")
    file_blocks: int = Field(48, ge=1, description="blocks of report files measured at most")
    length: int = Field(8, ge=1, description="draft length of the decoded rounds")
    resamples: int = Field(2000, ge=100, description="bootstrap resamples, by prompt or document")
    confidence: float = Field(0.95, gt=0.5, lt=1, description="of the intervals")


class Export(Section):
    """GGUF files of draft and target."""

    outtypes: tuple[Literal["f32", "f16", "bf16", "q8_0"], ...] = Field(("f16", "q8_0"), description="one file each")
    parity_positions: int = Field(2000, ge=1, description="report positions compared with Hugging Face fp32")


class Grown(Section):
    """The target, enlarged without changing its function, so that real text meets a real pair's cost ratio."""

    tile: int = Field(4, ge=1, description="hidden size, heads and MLP width are multiplied by this")
    layers: int = Field(24, ge=1, description="layers in all; the added ones are zero")


class Speedup(Section):
    """Plain against speculative decoding."""

    backends: tuple[Literal["pytorch", "gguf"], ...] = Field(("pytorch", "gguf"), description="who decodes")
    outtype: Literal["f32", "f16", "bf16", "q8_0"] = Field("f16", description="GGUF type of both models")
    lengths: tuple[int, ...] = Field((1, 2, 4, 6, 8), min_length=1, description="draft lengths swept")
    prompts: int = Field(12, ge=2, description="distinct report prompts")
    new_tokens: int = Field(96, ge=8, description="tokens decoded per prompt")
    grown: Grown | None = Field(None, description="also measure a grown target (demo models only)")
    grown_prompts: int = Field(4, ge=2, description="prompts for the grown target")
    grown_lengths: tuple[int, ...] = Field((2, 4, 8), min_length=1, description="draft lengths for the grown target")

    @field_validator("lengths", "grown_lengths")
    @classmethod
    def _lengths_are_positive(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if any(length < 1 or length > 63 for length in value):
            raise ValueError("draft lengths run from 1 to 63; plain decoding is always measured")
        return tuple(sorted(set(value)))


class Recipe(Section):
    """Everything a run depends on."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="the run directory's name")
    seed: int = Field(0, ge=0, description="of everything that is drawn")
    threads: int | None = Field(None, ge=1, description="CPU threads; null: all that this process may use")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:0, mps, …")
    target: Target
    corpus: Corpus
    sampler: SamplerSettings = SamplerSettings()
    answers: Answers = Answers()
    teacher: TeacherStore = TeacherStore()
    profile: Profile = Profile()
    draft: DraftCut = DraftCut()
    train: Train = Train()
    eval: Evaluate = Evaluate()
    export: Export = Export()
    speedup: Speedup = Speedup()

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        if self.answers.prompt_tokens + self.answers.new_tokens > self.corpus.block:
            raise ValueError(
                f"answers.prompt_tokens + answers.new_tokens = {self.answers.prompt_tokens + self.answers.new_tokens} "
                f"does not fit corpus.block = {self.corpus.block}"
            )
        if "gguf" in self.speedup.backends and self.speedup.outtype not in self.export.outtypes:
            raise ValueError(f"speedup.outtype {self.speedup.outtype} is not among export.outtypes")
        return self


class _UniqueKeys(yaml.SafeLoader):
    """YAML that refuses a key written twice, which plain YAML silently lets the last one win."""


def _mapping(loader: _UniqueKeys, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: dict[Any, int] = {}
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise RecipeError(f"line {key_node.start_mark.line + 1}: a key must be a word, got {key!r}")
        line = key_node.start_mark.line + 1
        if key in seen:
            raise RecipeError(f"key `{key}` is written twice, on lines {seen[key]} and {line}", "remove one of them")
        seen[key] = line
    return loader.construct_mapping(node, deep=True)


_UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def is_path(reference: str) -> bool:
    """Whether a model or source is a path on this machine rather than a hub name."""
    return reference.startswith((".", "/", "~")) or Path(reference).is_absolute()


def _absolute(reference: str, base: Path) -> str:
    return str((base / Path(reference).expanduser()).resolve()) if is_path(reference) else reference


def _resolve_paths(raw: dict[str, Any], base: Path) -> None:
    """Make every path absolute: relative ones are meant from the recipe's own folder."""
    for section, key in (("target", "model"), ("draft", "donor")):
        part = raw.get(section)
        if isinstance(part, dict) and isinstance(part.get(key), str):
            part[key] = _absolute(part[key], base)
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
                raise RecipeError(f"override `{override}`: `{part}` is no index into a list of {len(place)}")
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
    """The schema class that holds the last name of an error's location."""
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
    message = error["msg"].removeprefix("Value error, ")
    return f"{location}: {message} (got {error['input']!r})" if error["loc"] else f"{location}: {message}"


def parse_recipe(raw: Any, where: str) -> Recipe:
    """Validate a mapping; every fault is named in one RecipeError."""
    if not isinstance(raw, dict):
        raise RecipeError(f"{where}: a recipe is a mapping, got {type(raw).__name__}", "see docs/recipes.md")
    return parse_section(Recipe, raw, where)


SomeSection = typing.TypeVar("SomeSection", bound=Section)


def parse_section(section: type[SomeSection], raw: dict[str, Any], where: str = "the options") -> SomeSection:
    """Validate one section from a mapping; every fault is named in one RecipeError."""
    try:
        return section.model_validate(raw)
    except ValidationError as error:
        errors = error.errors()
        # A list is also called too short when the elements it does hold are faulty: only the latter is worth saying.
        parents = {fault["loc"][:depth] for fault in errors for depth in range(len(fault["loc"]))}
        faults = [_explain(fault) for fault in errors if fault["type"] != "too_short" or fault["loc"] not in parents]
        count = f"{len(faults)} mistakes" if len(faults) > 1 else "1 mistake"
        what = f"{where}: {count}\n  - " + "\n  - ".join(faults)
        raise RecipeError(what, "docs/recipes.md lists every key") from error


def load_recipe(path: Path, overrides: typing.Sequence[str] = ()) -> Recipe:
    """Read a recipe file and apply `a.b=c` overrides.

    Paths inside the file (and in overrides) that start with `.`, `/` or `~` are taken from the file's own folder.
    Raises RecipeError with every mistake at once.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecipeError(f"no recipe at {path}", "recipes/ holds some to start from") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read the recipe {path}: {error}") from error
    try:
        raw = yaml.load(text, Loader=_UniqueKeys)
    except yaml.YAMLError as error:
        raise RecipeError(f"{path} is not YAML: {error}") from error
    except RecipeError as error:
        raise RecipeError(f"{path}: {error.what}", error.hint) from None
    if raw is None:
        raise RecipeError(f"{path} is empty", "recipes/ holds some to start from")
    if isinstance(raw, dict):
        for override in overrides:
            _apply_override(raw, override)
        _resolve_paths(raw, path.resolve().parent)
    return parse_recipe(raw, str(path))


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML, every default written out; `load_recipe` of it gives an equal recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
