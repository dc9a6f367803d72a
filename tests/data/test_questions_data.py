"""data/questions.jsonl: read as a recipe reads it, as many questions of each class, and no two alike."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import tiny

from distill.data.record_files import read_records
from distill.data.records import form_of, questions, read_conversation
from distill.files import file_digest
from distill.recipe import Source

PATH = tiny.ROOT / "data" / "questions.jsonl"
CLASSES = {"everyday", "mathematics", "code", "translation", "rewriting", "extraction", "summary", "dialogue"}
SHARED_WORDS = 7  # two questions of one class may begin alike, but have no longer run of words in common
SOURCE = Source(kind="jsonl", path=str(PATH), split="test")
RECORDS = [record for _, record in read_records(SOURCE, [PATH], Counter())]


def conversation(record: dict[str, object]) -> tuple[dict[str, Any], ...]:
    form = form_of(record, SOURCE)
    assert form in ("prompt", "turns")
    return read_conversation(record, form, SOURCE, Counter())[0]


def test_thirteen_of_each_class() -> None:
    assert Counter(record["category"] for record in RECORDS) == dict.fromkeys(CLASSES, 13)
    for record in RECORDS:
        found = conversation(record)
        assert [one["role"] for one in found] == ["user"] * (2 if record["category"] == "dialogue" else 1)
        assert all(one["content"] == one["content"].strip() for one in found)


def test_given_texts_are_of_a_paragraphs_length() -> None:
    for record in RECORDS:
        if record["category"] in ("rewriting", "extraction", "summary"):
            _, _, text = record["prompt"].partition("\n\n")
            assert 60 <= len(text.split()) <= 150, record["prompt"][:60]


def test_no_two_are_alike() -> None:
    assert len({questions(conversation(record)) for record in RECORDS}) == len(RECORDS)
    seen: dict[tuple[str, ...], int] = {}
    for place, record in enumerate(RECORDS):
        for message in conversation(record):
            words = re.findall(r"\w+", message["content"].lower())
            for start in range(len(words) - SHARED_WORDS):
                run = tuple(words[start : start + SHARED_WORDS + 1])
                assert seen.setdefault(run, place) == place, " ".join(run)


def test_its_hash_is_in_the_readme() -> None:
    assert file_digest(PATH) in (tiny.ROOT / "data" / "README.md").read_text()
