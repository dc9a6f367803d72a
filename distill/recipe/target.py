"""Recipe sections: the target, its sampler, its answers and the store of its distributions."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from distill.recipe.section import Section
from distill.recipe.servers import TeacherServer, Writer

HOTTEST = 100  # largest temperature; above it, every distribution is uniform
TYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Target(Section):
    """The large model that the draft is for."""

    model: str = Field(
        description="folder (`./name` for a relative one), hub name, or GGUF file, which is imported; a file or folder "
        "takes precedence over a hub name"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "float32",
        description="number type it runs in; auto: bfloat16 if the device has instructions for it, else float32 (a run "
        "keeps the type it began with)",
    )
    load: bool = Field(
        True,
        description="false: never load or download its weights; only its tokenizer and config.json are read. Answers "
        "and distributions come from servers or GGUF files (answers.writer, teacher; if the target is a GGUF file, "
        "from that file by default), and steps that need the weights are skipped",
    )
    quantise: Literal["int8", "int4"] | None = Field(
        None, description="load the weights in 8 or 4 bits with bitsandbytes; null: not quantised"
    )
    shard: bool = Field(False, description="spread the layers over all accelerators of this machine, in one process")


class PyTorch(Section):
    """How models decode in PyTorch; GGUF files ignore this section."""

    static: bool = Field(
        False,
        description="use caches of fixed size, which roll back by length. Rounds stay on the device: the host "
        "synchronises once a round, or once a drafted token if the length rule needs it (docs/decoding.md)",
    )
    compile: bool = Field(
        False,
        description="static: compile the step for each number of tokens on first use (10 to 30 s each); recorded as "
        "graphs on CUDA",
    )
    draft_device: str | None = Field(None, description="the draft's device; null: the target's")
    prepack: bool = Field(
        True,
        description="CPU: store the weights of linear layers a second time, in the layout of oneDNN's kernels for few "
        "tokens; skipped, with a message, if they would take more than half of the free memory",
    )

    @model_validator(mode="after")
    def _compiled_steps_are_static(self) -> PyTorch:
        if self.compile and not self.static:
            raise ValueError("compile: a cache that grows gives each step another shape; set static, too")
        return self

    @property
    def suffix(self) -> str:
        """What tables add to the name of a pair that decodes like this; nothing by default."""
        names = [
            ("static cache", self.static),
            ("compiled", self.compile),
            (f"draft on {self.draft_device}", self.draft_device is not None),
            ("not prepacked", not self.prepack),
        ]
        return "".join(f", {name}" for name, holds in names if holds)


class SamplerSettings(Section):
    """The sampler of the served target; answers, evaluation and decoding use it."""

    temperature: float = Field(1.0, ge=0, le=HOTTEST, description="0: greedy")
    top_k: int = Field(0, ge=0, description="0: off")
    top_p: float = Field(1.0, gt=0, le=1, description="1: off")
    min_p: float = Field(0.0, ge=0, lt=1, description="0: off")


class Traffic(Section):
    """Served prompts with the target's answers: a jsonl file, which may still be growing, or a folder of such files.

    `distill record` writes them (docs/serving.md). A line is `{"prompt": …, "answer": …}` or `{"messages": […]}`. The
    last message is the assistant's answer; the others are rendered with the target's chat template, which receives
    `chat.arguments` and the line's own `chat_template_kwargs`. An answer ends with the target's end token, unless the
    line has a `finish_reason` other than `stop`. A hash of the prompt decides its split, by the shares of the corpus:
    the draft learns from answers to train prompts and is measured on prompts of the other splits.
    """

    path: str = Field(description="the jsonl file or folder")


class Answers(Section):
    """The target's own text: its continuations of train prompts."""

    prompts: int = Field(256, ge=0, description="train prompts to answer; 0: only traffic is used")
    prompt_tokens: int = Field(
        64, ge=1, description="tokens per prompt, taken from the beginning of a document or further on"
    )
    new_tokens: int = Field(192, ge=1, description="maximum tokens generated per prompt")
    batch: int = Field(32, ge=1, description="texts generated at a time by the target in PyTorch")
    group: int | None = Field(
        None,
        ge=1,
        description="PyTorch: prompts per file, the unit of resuming; within a group, a finished text makes room for "
        "the next prompt; null: 8 × batch",
    )
    writer: Writer | None = Field(
        None, description="a GGUF file of the target, or servers that run it; null: the target in PyTorch"
    )
    stop: tuple[str, ...] = Field((), description="stop strings: an answer ends before the first of them")
    keep_truncated: bool = Field(True, description="also learn from answers cut short by new_tokens")
    repetition_penalty: float = Field(
        1.0, gt=0, le=100, description="as in transformers and llama.cpp, applied to prompt and answer; 1: off"
    )
    traffic: Traffic | None = Field(
        None, description="served answers, used in addition to the generated ones; null: off"
    )

    @property
    def group_size(self) -> int:
        """Prompts per file."""
        return self.group or 8 * self.batch

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


class TeacherStore(Section):
    """How the target's distributions on the train blocks are stored."""

    kind: Literal["compact", "exact", "online"] = Field(
        "compact",
        description="compact: store the top-k log-probabilities and the log of the remaining mass; exact: store the "
        "last hidden states and the head, which give full distributions; online: store nothing and run the target "
        "during training",
    )
    top_k: int = Field(256, ge=1, description="compact: entries stored per position; with `mass`, the maximum")
    mass: float | None = Field(
        0.99,
        gt=0,
        lt=1,
        description="compact: store as few entries as cover this mass, on average over a sample of positions; "
        "null: store `top_k`",
    )
    temperatures: tuple[float, ...] = Field(
        (1.0,),
        description="compact: temperatures for which the remaining mass is stored; must include 1. Losses can use only "
        "these",
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="exact: number type of the stored hidden states; null: the target's"
    )
    shard_blocks: int = Field(64, ge=1, description="blocks per shard, the unit of resuming")
    batch: int = Field(8, ge=1, description="blocks per forward pass")
    gguf: str | None = Field(
        None,
        description="compact: take the distributions from this GGUF file of the target, through llama.cpp, including "
        "its quantisation error; null: from target.model",
    )
    server: TeacherServer | None = Field(
        None, description="compact: take the distributions from servers that run the target; null: from target.model"
    )

    @field_validator("temperatures")
    @classmethod
    def _temperatures_hold_one(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if any(not 0 < temperature <= HOTTEST for temperature in value):
            raise ValueError(f"temperatures must be positive and at most {HOTTEST}")
        if 1 not in value or len(set(value)) < len(value):
            raise ValueError("temperatures must include 1, and none twice")
        return value

    @model_validator(mode="after")
    def _settings_of_other_kinds(self) -> TeacherStore:
        for name, kind in (("mass", "compact"), ("temperatures", "compact"), ("dtype", "exact")):
            if self.kind != kind and getattr(self, name) not in (None, type(self).model_fields[name].default):
                raise ValueError(f"{name} is a setting of kind {kind}, but kind is {self.kind}")
        for name in ("gguf", "server"):
            if self.kind != "compact" and getattr(self, name) is not None:
                raise ValueError(f"{name} gives the entries of a compact store, but kind is {self.kind}")
        if self.gguf is not None and self.server is not None:
            raise ValueError("gguf and server are two teachers; give one")
        if self.server is not None and self.temperatures != (1.0,):
            raise ValueError("a server gives distributions at temperature 1 alone: leave temperatures at [1.0]")
        return self
