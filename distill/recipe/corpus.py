"""Recipe sections: the corpus."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from distill.files import is_utf8
from distill.recipe.section import Section


class Source(Section):
    """One source of text."""

    kind: Literal["tree", "text", "jsonl", "hub"] = Field(
        description="tree: each matching file below a folder is a document; text: a file is one document, or "
        "is cut into pieces of at least 16,384 characters that are, where it is longer than 32,768; "
        "jsonl: each line is a document; hub: a data set by its hub name (through `datasets`)"
    )
    path: str = Field(description="folder, file or hub name; `python:stdlib` is the library of the running interpreter")
    pattern: str = Field("**/*.py", description="tree: pattern of the files")
    field: str = Field("text", description="jsonl and hub: the field that holds the text")
    subset: str | None = Field(None, description="hub: name of the data set's configuration")
    hub_split: str = Field("train", description="hub: split of the data set that is read")
    exclude: tuple[str, ...] = Field((), description="tree: names of folders to skip")
    split: Literal["by-name", "train", "validation", "test"] = Field(
        "by-name", description="by-name: chosen by a hash of the document's name; otherwise the split of all documents"
    )
    keep: tuple[Literal["train", "validation", "test"], ...] = Field(
        ("train", "validation", "test"), description="documents of other splits are dropped and counted"
    )

    @field_validator("pattern")
    @classmethod
    def _pattern_can_be_matched(cls, value: str) -> str:
        try:
            usable = "\0" not in value and is_utf8(value)
            any(Path(os.devnull).glob(value))  # no folder: reads the pattern and nothing else
        except (IndexError, NotImplementedError, ValueError, re.error):
            usable = False
        if not usable or len(value) > 1000:
            raise ValueError("this is no pattern of files below a folder; such as **/*.py or docs/*.md")
        return value


class Corpus(Section):
    """Text, split into train, validation and test by document."""

    sources: tuple[Source, ...] = Field(
        min_length=1, description="read in this order; of documents with the same name, only the first is kept"
    )
    validation: float = Field(0.04, ge=0, lt=1, description="share of by-name documents for validation")
    test: float = Field(0.04, ge=0, lt=1, description="share of by-name documents for test")
    block: int = Field(512, ge=16, description="positions per packed block")
    tokens: int = Field(400_000, ge=0, description="tokens of train text for the teacher, in addition to the answers")
    max_documents: int = Field(
        100_000,
        ge=1,
        description="at most this many documents are read per source; a limit that takes effect is reported",
    )
