"""Recipe sections: the text."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from distill.recipe.section import Section


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
    split: Literal["by-name", "train", "validation", "test"] = Field(
        "by-name", description="by-name: a hash of the document's name decides; else all documents go to that split"
    )
    keep: tuple[Literal["train", "validation", "test"], ...] = Field(
        ("train", "validation", "test"), description="documents of other splits are dropped (and counted)"
    )


class Corpus(Section):
    """Text, split into train, validation and test by document."""

    sources: tuple[Source, ...] = Field(min_length=1, description="read in this order; a name seen twice is dropped")
    validation: float = Field(0.04, ge=0, lt=1, description="share of by-name documents for validation")
    test: float = Field(0.04, ge=0, lt=1, description="share of by-name documents for test")
    block: int = Field(512, ge=16, description="positions per packed block")
    tokens: int = Field(400_000, ge=0, description="train-split text tokens given to the teacher beside the answers")
    max_documents: int = Field(100_000, ge=1, description="documents read per source at most (and said)")
