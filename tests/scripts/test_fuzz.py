"""A part of scripts/fuzz/fuzz.py, with its own table of kinds: each input is read or refused in one clear message."""

from __future__ import annotations

import faulthandler
import importlib
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import tiny
from hypothesis import strategies

from distill.errors import DataError, DistillError

sys.path.insert(0, str(tiny.ROOT / "scripts" / "fuzz"))

from fuzz_kinds import KINDS

INPUTS = {"model folders": 4, "tokenizers in transformers": 4, "command lines": 12}  # of a slow kind; else 25


@pytest.fixture(scope="module")
def fuzz() -> Any:
    return importlib.import_module("fuzz")


@pytest.fixture
def place(finished: Path, tmp_path: Path, fuzz: Any) -> Any:
    (tmp_path / "place").mkdir()
    return fuzz.World(finished.parent.parent, tmp_path / "place")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.isolated], ids=lambda kind: kind.name)
def test_each_input_is_read_or_refused(fuzz: Any, place: Any, kind: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome = fuzz.batches_of(kind, place, 1, 0, INPUTS.get(kind.name, 25))
    assert not outcome.failures, outcome.failures[0]
    assert outcome.inputs == outcome.read + outcome.refused > 0


def kind_of(fuzz: Any, reader: Any) -> Any:
    return fuzz.Kind("any", 1, lambda world: strategies.just(1), lambda world, given: [reader], most_seconds=0.2)


def raising(error: BaseException) -> Any:
    def reader() -> None:
        raise error

    return reader


def out_of_memory() -> None:
    try:
        raise MemoryError
    except MemoryError:
        raise DataError("the file is damaged") from None


def endless() -> None:
    while True:
        pass


@pytest.mark.parametrize(
    ("reader", "place"),
    [
        (raising(KeyError("a")), "KeyError"),
        (raising(MemoryError()), "MemoryError"),
        (out_of_memory, "more memory than allowed"),
        (raising(DataError("cannot load a: DefaultCPUAllocator: can't allocate memory")), "more memory than allowed"),
        (endless, "Hang"),
        (raising(DataError("damaged: 'NoneType' object is not iterable")), "foreign words"),
        (raising(DataError("'utf-8' codec can't decode byte 0xff")), "foreign words"),
        (raising(DataError("a.json is damaged", "copy it again")), None),
    ],
)
def test_all_but_a_clear_refusal_is_a_failure(fuzz: Any, reader: Any, place: str | None) -> None:
    outcome = fuzz.batches_of(kind_of(fuzz, reader), None, 0, 0, 1)
    assert (outcome.refused, outcome.failed) == ((1, 0) if place is None else (0, 1))
    assert place is None or place in outcome.failures[0]["place"]


def test_a_door_that_passes_fields_over_is_seen(fuzz: Any, place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes 1 and True for one value, and one that refuses nothing."""
    kind = next(kind for kind in KINDS if kind.name == "requests")
    monkeypatch.setattr("distill.data.requests.Field.fits", lambda *given: True)
    lax = lambda self, value: value is not None and self.neutral is not None and value not in self.neutral  # noqa: E731
    monkeypatch.setattr("distill.data.requests.Field.asks", lax)
    assert fuzz.batches_of(kind, place, 1, 0, 200).failures
    monkeypatch.setattr("distill.serving.completions.fault_of_request", lambda *given: None)
    assert fuzz.batches_of(kind, place, 1, 0, 60).failed > 20


def test_a_death_is_told_from_a_refusal(fuzz: Any, tmp_path: Path) -> None:
    def die() -> None:
        faulthandler.disable()  # pytest's would print what every thread of the dying process does
        os.abort()

    verdict, failure = fuzz.feed_isolated(kind_of(fuzz, die), None, 1)
    assert verdict == "aborted" and "SIGABRT" in failure.place
    assert fuzz.feed_isolated(kind_of(fuzz, raising(DataError("no"))), None, 1)[0] == "refused"
    assert fuzz.feed_isolated(kind_of(fuzz, lambda: bytearray(2**31)), None, 1)[1].place.startswith("MemoryError")


def test_the_same_seed_gives_the_same_inputs(fuzz: Any, place: Any) -> None:
    kind = next(kind for kind in fuzz.KINDS if kind.name == "recipes")
    found: list[list[bytes]] = [[], [], []]
    for number, seed in enumerate((3, 3, 4)):
        fuzz.run_examples(found[number].append, kind.inputs(place), seed, 0, 30)
    assert found[0] == found[1] != found[2] and len(set(found[0])) > 20


def test_a_batch_in_a_child_and_one_that_dies(fuzz: Any, tmp_path: Path) -> None:
    def die() -> None:
        faulthandler.disable()
        os._exit(7)

    found = fuzz.in_child(kind_of(fuzz, raising(DataError("no"))), 0, 3, tmp_path, 0)
    assert (found.inputs, found.refused) == (3, 3)
    dead = fuzz.in_child(kind_of(fuzz, die), 0, 3, tmp_path, 0)
    assert dead.failed == 3 and dead.failures[0]["place"] == "process ended: exit status 7"


def test_messages_can_be_printed() -> None:
    found = str(DistillError("a\x1b[31m\ud800\u202eb" + "x" * 9000, "c\0"))
    assert "\\x1b[31m\\ud800\\u202eb" in found and found.endswith("c\\x00") and len(found) < 3100 and found.encode()
