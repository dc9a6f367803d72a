"""Recipe sections: the target, its sampler, its answers and the store of its distributions."""

from __future__ import annotations

import difflib
import math
import re
import reprlib
import types
import typing
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import to_json

from distill.errors import RecipeError
from distill.files import LARGEST, over, parts_of

# ── The base class of recipe sections ──


class Section(BaseModel):
    """Immutable, without unknown keys, and with finite numbers, integers of 64 bits at most."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _integers_are_of_64_bits(cls, value: Any) -> Any:
        if isinstance(value, int) and abs(value) > LARGEST:
            raise ValueError(f"integers up to {LARGEST} can be used")
        return value


# ── Mistakes in a section: where, what, and the value ──

SomeSection = typing.TypeVar("SomeSection", bound=Section)

_SHORT = reprlib.Repr()
_SHORT.maxstring, _SHORT.maxother, _SHORT.maxlevel, _SHORT.maxdict, _SHORT.maxlong = 80, 80, 3, 6, 40


def shown(value: Any) -> str:
    """A value as a message shows it: short, at few levels, and as YAML writes true, false and null."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return _SHORT.repr(value).encode("utf-8", "backslashreplace").decode()


def _section_at(root: type[BaseModel], location: tuple[Any, ...]) -> type[BaseModel] | None:
    """The section that the last name of an error's location belongs to."""
    place: Any = root
    for part in location[:-1]:
        if isinstance(part, int):
            continue
        if not (isinstance(place, type) and issubclass(place, BaseModel)) or part not in place.model_fields:
            return None
        place = place.model_fields[part].annotation
        while typing.get_origin(place) in (tuple, list, typing.Union, types.UnionType):
            place = next(a for a in typing.get_args(place) if a not in (type(None), Ellipsis))
    return place if isinstance(place, type) and issubclass(place, BaseModel) else None


def _explain(root: type[BaseModel], error: Any) -> str:
    kind, given = error["type"], shown(error["input"])
    location = ".".join(str(part) for part in error["loc"]) or "recipe"
    location = location if len(location) <= 200 else f"{location[:200]}…"
    if kind == "extra_forbidden":
        section = _section_at(root, error["loc"])
        names = list(section.model_fields) if section else []
        near = difflib.get_close_matches(str(error["loc"][-1])[:100], names, n=1, cutoff=0.5)
        advice = f"did you mean `{near[0]}`?" if near else f"known: {', '.join(names)}"
        return f"{location}: unknown key; {advice}"
    if kind == "missing":
        return f"{location}: is missing"
    if kind == "literal_error":
        known = error["ctx"]["expected"].replace(" or ", ", ").replace("'", "")
        return f"{location}: there is no {error['loc'][-1]} {given}; known: {known}"
    if kind == "value_error":  # raised by a check of ours
        message = error["msg"].removeprefix("Value error, ")
        return f"{location}: {message} (got {given})" if error["loc"] else f"{location}: {message}"
    return f"{location}: {worded(error['msg'])} (got {given})"


def worded(message: str) -> str:
    """pydantic's message inside a sentence."""
    return message[0].lower() + message[1:]


def parse_section(section: type[SomeSection], raw: dict[str, Any], where: str = "the options") -> SomeSection:
    """A section from a mapping of what JSON holds, whose kinds count: neither true nor text is a number.

    Raises one RecipeError with every mistake.
    """
    try:
        return section.model_validate_json(to_json(raw, serialize_unknown=True), strict=True)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        # pydantic also calls a list too short when its elements are faulty: report the elements alone.
        parents = {fault["loc"][:depth] for fault in errors for depth in range(len(fault["loc"]))}
        found = [fault for fault in errors if fault["type"] != "too_short" or fault["loc"] not in parents]
        faults = [_explain(section, fault) for fault in found]
        count = f"{len(faults)} mistakes" if len(faults) > 1 else "1 mistake"
        what = f"{where}: {count}\n  - " + "\n  - ".join(faults)
        raise RecipeError(what, "docs/recipes.md lists every key") from error


# ── Who writes the answers and gives the distributions where the target does not run in transformers ──

VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"
LONGEST_WAIT = 86400  # seconds
CONNECTION_KEYS = ("urls", "key", "headers", "connections", "timeout", "retries")  # none of them changes a reply


class Servers(Section):
    """Servers with OpenAI's API that run one model. Keys come from the environment and are never written."""

    urls: tuple[str, ...] = Field(
        (), description="base URLs of servers that run the target, such as http://localhost:8000/v1"
    )
    model: str | None = Field(None, description="its name on the servers; null: the only model they serve")
    key: str | None = Field(None, pattern=VARIABLE, description="environment variable that holds the servers' API key")
    headers: dict[str, str] = Field(
        {}, description="additional HTTP headers: name, and environment variable that holds the value"
    )
    connections: int = Field(
        64, ge=1, le=4096, description="simultaneous requests, over all servers: their queues hold what waits"
    )
    timeout: float = Field(600, gt=0, le=LONGEST_WAIT, description="seconds that a whole reply may take")
    retries: int = Field(
        6, ge=0, le=100, description="retries after a busy server, a broken connection or an unreadable reply"
    )

    @field_validator("urls")
    @classmethod
    def _urls_hold_no_secret(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for url in value:
            try:
                parts = urlsplit(url)
                good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
            except ValueError:
                good = False
            if not good or any(ord(letter) <= 32 or ord(letter) > 126 for letter in url):
                raise ValueError("a URL such as http://localhost:8000/v1 is needed")
            if "@" in parts.netloc or parts.query or parts.fragment:
                raise ValueError(
                    "a URL ends with its path and holds no name, password or query: keys come from the environment "
                    "(key, headers)"
                )
        return tuple(url.rstrip("/") for url in value)

    @field_validator("headers")
    @classmethod
    def _headers_name_variables(cls, value: dict[str, str]) -> dict[str, str]:
        for name, variable in value.items():
            if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", name):
                raise ValueError("the name of a header is letters, digits and dashes")
            if not re.fullmatch(VARIABLE, variable):
                raise ValueError(f"header {name} needs the name of an environment variable, never the value itself")
        return value


class WriterSettings(Servers):
    """Who writes the answers: a GGUF file of the target, run by llama-cpp-python, or servers with OpenAI's API.

    Give exactly one of `gguf` and `urls`.
    """

    gguf: str | None = Field(None, description="a GGUF file of the target")
    missing: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of prompts that may stay unanswered after all retries; above it the stage stops, and the "
        "next command asks again",
    )

    @model_validator(mode="after")
    def _one_kind(self) -> WriterSettings:
        if (self.gguf is None) == (not self.urls):
            raise ValueError("give either gguf, a file, or urls, servers")
        if self.gguf is not None:
            served = ("model", *(name for name in CONNECTION_KEYS if name != "urls"), "missing")
            given = [name for name in served if getattr(self, name) != type(self).model_fields[name].default]
            if given:
                raise ValueError(f"{', '.join(given)}: for servers (urls) alone, and this is a GGUF file")
        return self


class TeacherServer(Servers):
    """Servers that run the target and return log-probabilities of prompts, as vLLM's /v1/completions does.

    The log-probabilities are those of temperature 1, whatever the server's sampler. Start vLLM with `--max-logprobs`
    `teacher.top_k`, and up to 32 more if the head has padding rows: `distill check` prints the number.
    """

    urls: tuple[str, ...] = Field(
        min_length=1, description="base URLs of servers that run the target, such as http://localhost:8000/v1"
    )
    model: str = Field(min_length=1, description="its name on the servers, as /v1/models lists it")


# ── The target, its sampler, its answers and the store of its distributions ──

HOTTEST = 100  # largest temperature; above it, every distribution is uniform
TYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 2}  # auto: what most checkpoints have


class Target(Section):
    """The large model that the draft is for."""

    model: str = Field(description="folder (`./name` for a relative one), hub name, or GGUF file")
    adapter: str | None = Field(
        None,
        description="folder of a PEFT adapter, merged into `model` on first use ([a tuned target](tuned-target.md))",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="number type; auto: the checkpoint's own (of a GGUF file bfloat16), or float32 if the device has no"
        " instructions for it. A run keeps its type",
    )
    quantise: Literal["int8", "int4"] | None = Field(
        None, description="load the weights in 8 or 4 bits with bitsandbytes"
    )
    shard: bool = Field(False, description="spread the layers over all accelerators of this machine")

    @model_validator(mode="before")
    @classmethod
    def _adapter_joins_the_model(cls, raw: Any) -> Any:
        """Read `model` and `adapter` as one reference, which every reader of models takes."""
        if isinstance(raw, dict) and isinstance(raw.get("adapter"), str) and isinstance(raw.get("model"), str):
            return raw | {"model": over(raw["model"], raw["adapter"]), "adapter": None}
        return raw

    @model_serializer(mode="wrap")
    def _as_in_a_recipe(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        base, adapter = parts_of(self.model)
        written = write(self)
        return written | {name: value for name, value in (("model", base), ("adapter", adapter)) if name in written}


class PyTorch(Section):
    """How models decode in PyTorch; GGUF files ignore this section."""

    static: bool = Field(
        False,
        description="use caches of fixed size ([decoding](decoding.md#the-static-cache))",
    )
    compile: bool = Field(
        False,
        description="static: compile a step for each number of tokens on first use (10 to 30 s each)",
    )
    draft_device: str | None = Field(None, description="the draft's device; null: the target's")
    target_weights: Literal["auto", "file"] | None = Field(
        "auto",
        description="file: a GGUF target decodes in PyTorch in its own bits ([decoding](decoding.md#on-a-cpu)); auto: "
        "file, if PyTorch decodes the target anyway and this CPU can; null: as `dtype`",
    )
    draft_weights: Literal["auto", "file", "int8", "int4"] | None = Field(
        "auto",
        description="int8, int4: round the draft's linear layers, on a CPU; file: a GGUF draft's own bits; auto: what "
        "measures best; null: not rounded",
    )
    prepack: bool = Field(
        True,
        description="compute the layers of known families in few operators, on a CPU from a repacked copy of the "
        "weights ([decoding](decoding.md#on-a-cpu))",
    )

    @model_validator(mode="after")
    def _compiled_steps_are_static(self) -> PyTorch:
        if self.compile and not self.static:
            raise ValueError("compile: a cache that grows gives each step another shape; set static, too")
        if self.compile and self.in_bits:
            raise ValueError("compile: the products of a file's own bits are not compiled; leave it or `file` off")
        if self.draft_weights in ("int8", "int4") and self.static:
            raise ValueError(f"draft_weights {self.draft_weights} is for caches that grow; leave static off")
        return self

    @property
    def in_bits(self) -> bool:
        """Whether a file decodes in its own bits, here and not in llama.cpp."""
        return "file" in (self.target_weights, self.draft_weights)

    @property
    def suffix(self) -> str:
        """What tables add to the name of a pair that decodes like this; nothing by default."""
        names = [
            ("static cache", self.static),
            ("compiled", self.compile),
            (f"draft on {self.draft_device}", self.draft_device is not None),
            ("target in its file's bits", self.target_weights == "file"),
            (f"draft in {self.draft_weights}", self.draft_weights in ("int8", "int4")),
            ("draft in its file's bits", self.draft_weights == "file"),
            ("not prepacked", not self.prepack),
        ]
        return "".join(f", {name}" for name, holds in names if holds)


class Sampler(Section):
    """The sampler of the served target; answers, evaluation and decoding use it."""

    temperature: float = Field(1.0, ge=0, le=HOTTEST, description="0: greedy")
    top_k: int = Field(0, ge=0, description="0: off")
    top_p: float = Field(1.0, gt=0, le=1, description="1: off")
    min_p: float = Field(0.0, ge=0, lt=1, description="0: off")

    _repetition_penalty: float = PrivateAttr(1.0)  # In a recipe it is a setting of `answers`.

    # The factor that makes tokens of the history less likely. 1 switches it off. Every step reads it, so it is a getter
    # without a call of Python.
    repetition_penalty: ClassVar[Any] = property(attrgetter("_repetition_penalty"))

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Yield the penalty too. pydantic leaves it out, because it is no field of the section."""
        yield from super().__repr_args__()
        if self.repetition_penalty != 1:
            yield "repetition_penalty", self.repetition_penalty

    def penalised(self, penalty: float) -> Sampler:
        """Return the same sampler with this repetition penalty. Raises RecipeError if the penalty is not finite."""
        if not math.isfinite(penalty):
            raise RecipeError(f"repetition_penalty is {penalty}", "give a finite number")
        sampler = self.model_copy()
        sampler._repetition_penalty = penalty
        return sampler

    def describe(self) -> dict[str, float]:
        """Return the settings, for tables and manifests. The penalty is included only if it is not 1."""
        penalty = {} if self.repetition_penalty == 1 else {"repetition_penalty": self.repetition_penalty}
        return self.model_dump() | penalty


FEWEST_PROMPTS = 256  # where a recipe names no number of prompts and its texts are few


class Answers(Section):
    """The target's own text: its continuations of train prompts."""

    prompts: int | None = Field(
        None,
        ge=0,
        description=f"train prompts to answer; null: all questions and conversations, of other texts one a document, "
        f"{FEWEST_PROMPTS} in all if the text has them; 0: only traffic is used",
    )
    prompt_tokens: int = Field(
        64, ge=1, description="tokens per prompt, from the beginning of a document or further on"
    )
    new_tokens: int = Field(192, ge=1, description="maximum tokens generated per prompt")
    batch: int = Field(32, ge=1, description="texts generated at a time by the target in PyTorch")
    group: int = Field(256, ge=1, description="prompts per file; in PyTorch the unit of resuming")
    writer: WriterSettings | None = Field(
        None, description="a GGUF file of the target, or servers that run it; null: the target in PyTorch"
    )
    stop: tuple[str, ...] = Field((), description="stop strings: an answer ends before the first of them")
    keep_truncated: bool = Field(True, description="also learn from answers cut short by new_tokens")
    repetition_penalty: float = Field(
        1.0, gt=0, le=100, description="as in transformers and llama.cpp, applied to prompt and answer; 1: off"
    )
    traffic: str | None = Field(
        None,
        description="a jsonl file of served prompts and answers, or a folder of them, used in addition "
        "([record](serving.md#record-your-own-traffic))",
    )

    def count(self, documents: int) -> int:
        """How many prompts are answered where the train split has this many documents."""
        return max(FEWEST_PROMPTS, documents) if self.prompts is None else self.prompts

    @field_validator("stop")
    @classmethod
    def _stops_are_texts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(value):
            raise ValueError("an empty stop string would end every answer before it begins")
        return value

    @model_validator(mode="after")
    def _can_be_written(self) -> Answers:
        if self.prompts == 0 and self.traffic is None:
            raise ValueError("prompts: 0 leaves no answers; give some prompts, or answers.traffic")
        return self


class TeacherSettings(Section):
    """How the target's distributions are stored: on the train blocks as `kind` says, on held-out ones exactly if the
    target runs in PyTorch."""

    kind: Literal["compact", "exact"] = Field(
        "compact",
        description="compact: store the likeliest tokens' log-probabilities and the mass of the rest; exact: store "
        "the last hidden states, and the head once",
    )
    top_k: int = Field(256, ge=1, description="compact: the most entries stored of a position")
    mass: float | None = Field(
        0.99, gt=0, lt=1, description="compact: store as few entries of each position as hold this mass; null: `top_k`"
    )
    shard_blocks: int = Field(64, ge=1, description="blocks per shard, the unit of resuming")
    batch: int = Field(8, ge=1, description="blocks per forward pass")
    gguf: str | None = Field(
        None, description="compact: take the distributions from this GGUF file of the target, through llama.cpp"
    )
    server: TeacherServer | None = Field(
        None, description="compact: take the distributions from servers that run the target"
    )

    @model_validator(mode="after")
    def _settings_of_other_kinds(self) -> TeacherSettings:
        if self.kind != "compact" and self.mass not in (None, type(self).model_fields["mass"].default):
            raise ValueError(f"mass is a setting of kind compact, but kind is {self.kind}")
        for name in ("gguf", "server"):
            if self.kind != "compact" and getattr(self, name) is not None:
                raise ValueError(f"{name} gives the entries of a compact store, but kind is {self.kind}")
        if self.gguf is not None and self.server is not None:
            raise ValueError("gguf and server are two teachers; give one")
        return self
