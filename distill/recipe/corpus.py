"""Recipe sections: the corpus, and how conversations in it are rendered."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from distill.files import is_utf8
from distill.recipe.target import HOTTEST, Section

SourceKind = Literal["tree", "text", "jsonl", "csv", "parquet", "hub", "target"]
# The keys that sources of kind target alone have, and those that they lack.
OF_TARGET = ("questions", "openings", "tokens", "temperature", "top_p")
OF_FILES = ("path", "pattern", "form", "fields", "given", "subset", "hub_split", "exclude")


class Source(Section):
    """One source of text."""

    kind: SourceKind = Field(
        description="tree: every matching file below a folder is a document; text: a file is one document, or several "
        "beyond 32,768 characters; jsonl (or one JSON array), csv, parquet: every line or row is a record; "
        "hub: a data set's hub name (through `datasets`); target: the target writes the questions "
        "([prompts](prompts.md#questions-from-the-target-itself))"
    )
    path: str = Field(
        "",
        validate_default=True,
        description="folder, file or hub name, for all kinds but target. `python:stdlib` is the running interpreter's "
        "library. text, jsonl, csv and parquet take a pattern such as logs/*.jsonl",
    )
    questions: int | None = Field(
        None, ge=1, le=10_000_000, description="target: usable questions to collect; required"
    )
    openings: tuple[str, ...] = Field(
        (),
        description="target: beginnings of its questions, such as `Translate into English:`; the seed draws one for "
        "each",
    )
    tokens: int = Field(
        96,
        ge=4,
        description="target: maximum tokens of a question with its end; longer questions are dropped, longer texts cut",
    )
    temperature: float = Field(1.0, gt=0, le=HOTTEST, description="target: sampling temperature of its questions")
    top_p: float = Field(0.99, gt=0, le=1, description="target: top-p of its questions; 1: off")
    pattern: str = Field("**/*.py", description="tree: pattern that file paths must match")
    form: Literal["auto", "text", "prompt", "messages"] = Field(
        "auto",
        description="what a record holds ([prompts](prompts.md#sources)); auto: its fields decide. In tree and text, "
        "prompt makes every file a user message",
    )
    fields: dict[Literal["text", "prompt", "context", "answer", "messages", "system", "label"], str] = Field(
        {}, description="records: names of these fields, where they differ"
    )
    given: bool = Field(
        True, description="records: also learn the answers that they contain; false: use only their questions"
    )
    label: str | None = Field(
        None, max_length=100, description="class of its prompts in reports; null: the record's `category`"
    )
    weight: float | None = Field(
        None,
        ge=0,
        le=1e6,
        description="share of the prompts, relative to the other sources; 0: none; null in every source: by size",
    )
    subset: str | None = Field(None, description="hub: configuration of the data set")
    hub_split: str = Field("train", description="hub: split of the data set to read")
    exclude: tuple[str, ...] = Field((), description="tree: folder names to skip")
    split: Literal["by-name", "train", "validation", "test"] = Field(
        "by-name",
        description="by-name: a hash of each document's name or first question decides; otherwise the split of all "
        "documents",
    )
    keep: tuple[Literal["train", "validation", "test"], ...] = Field(
        ("train", "validation", "test"), description="splits to keep; documents of others are dropped and counted"
    )

    @field_validator("path")
    @classmethod
    def _path_is_given_or_not_needed(cls, value: str, info: ValidationInfo) -> str:
        if info.data.get("kind") == "target":
            if value:
                raise ValueError("a source of kind target reads no file or data set: leave path out")
        elif not value:
            raise PydanticCustomError("missing", "Field required")
        return value

    @field_validator("openings")
    @classmethod
    def _openings_can_be_continued(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            if not text.strip() or not is_utf8(text):
                raise ValueError(f"{text!r} is no opening of a question: it has no words")
            if text.endswith(" "):  # a word's token holds the space before it, so nothing usual could follow
                raise ValueError(f"{text!r} ends in a space, which belongs to the next word: leave it out")
        return value

    @model_validator(mode="after")
    def _only_keys_of_its_kind(self) -> Source:
        foreign = OF_FILES if self.kind == "target" else OF_TARGET
        given = [name for name in foreign if name in self.model_fields_set]
        if given:
            other = "files and data sets" if self.kind == "target" else "kind target"
            raise ValueError(f"{', '.join(given)}: for {other} alone, and this source is of kind {self.kind}")
        if self.kind == "target" and self.questions is None:
            raise ValueError("questions is missing: the number of questions that the target is to write")
        return self

    @model_serializer(mode="wrap")
    def _keys_of_its_kind(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # A key that a kind lacks is not written: the keys of stages, and config.yaml, name what is read alone.
        foreign = OF_FILES if self.kind == "target" else OF_TARGET
        return {name: value for name, value in write(self).items() if name not in foreign}

    @field_validator("pattern")
    @classmethod
    def _pattern_can_be_matched(cls, value: str) -> str:
        try:
            usable = "\0" not in value and is_utf8(value)
            any(Path(os.devnull).glob(value))  # no folder: reads the pattern and nothing else
        except (IndexError, NotImplementedError, ValueError, re.error):
            usable = False
        if not usable or len(value) > 1000:
            raise ValueError("not a valid pattern of files below a folder; valid are **/*.py or docs/*.md")
        return value


class Chat(Section):
    """How conversations are rendered: by the target's own chat template."""

    system: tuple[str, ...] = Field(
        (), description="system prompts; the seed draws one for each conversation that has none"
    )
    thinking: float | None = Field(
        None, ge=0, le=1, description="share of conversations with thinking on; null: the template's default"
    )
    arguments: dict[str, Any] = Field({}, description="other template arguments")
    tools: tuple[dict[str, Any], ...] = Field((), description="JSON schemas of tools offered in every conversation")
    turns: int = Field(4, ge=1, description="maximum user turns that the target answers per conversation")


class Corpus(Section):
    """Text, split into train, validation and test by document."""

    sources: tuple[Source, ...] = Field(
        min_length=1, description="read in this order; if several documents share a name, the first is kept"
    )
    validation: float = Field(0.04, ge=0, lt=1, description="share of by-name documents for validation")
    test: float = Field(0.04, ge=0, lt=1, description="share of by-name documents for test")
    block: int = Field(512, ge=16, description="positions per packed block")
    tokens: int = Field(
        0, ge=0, description="tokens of given train text to learn in addition to the answers, which teach more"
    )
    max_documents: int = Field(100_000, ge=1, description="maximum documents read per source; reported when reached")

    @field_validator("sources")
    @classmethod
    def _weights_for_all_or_none(cls, value: tuple[Source, ...]) -> tuple[Source, ...]:
        if len({source.weight is None for source in value}) > 1:
            raise ValueError("give every source a weight, or none")
        return value

    @property
    def asked(self) -> tuple[Source, ...]:
        """The sources whose questions the target itself writes."""
        return tuple(source for source in self.sources if source.kind == "target")
