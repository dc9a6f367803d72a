"""Which keys of its recipe each stage reads while it runs."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from distill.pipeline.stages import STAGES, Stage, conditional_settings
from distill.recipe import Recipe, Section
from distill.run import Run

Reads = dict[str, set[str]]  # dotted keys, by stage


class Recorder:
    """The keys that are read of the sections of one recipe, and of changed copies of them."""

    def __init__(self, recipe: Recipe) -> None:
        self.found: set[str] = set()
        self.places: dict[int, tuple[Section, str]] = {}  # by identity, which the section itself keeps from reuse
        self._note(recipe, "")

    def _note(self, section: Section, place: str) -> None:
        self.places[id(section)] = section, place
        for name, value in vars(section).items():
            for inner in value if isinstance(value, tuple) else (value,):
                if isinstance(inner, Section):
                    self._note(inner, f"{place}{name}.")

    def copied(self, old: Section, new: Section) -> None:
        if id(old) in self.places:
            self._note(new, self.places[id(old)][1])

    def read(self, section: Section, name: str, value: Any) -> None:
        parts = value if isinstance(value, tuple) else (value,)
        if id(section) in self.places and not any(isinstance(part, Section) for part in parts):
            self.found.add(self.places[id(section)][1] + name)


@contextlib.contextmanager
def recorded(patch: pytest.MonkeyPatch) -> Iterator[Reads]:
    """Within the block, what each stage reads; a key that it only writes out with the whole recipe is none."""
    found: Reads = defaultdict(set)
    recorders: list[Recorder] = []
    load, get, copy = Stage.load, Section.__getattribute__, Section.model_copy

    def read(self: Section, name: str) -> Any:
        value = get(self, name)
        if recorders and name in type(self).model_fields:
            recorders[-1].read(self, name, value)
        return value

    def copied(self: Section, **options: Any) -> Any:
        new = copy(self, **options)
        for recorder in recorders:
            recorder.copied(self, new)
        return new

    def loaded(stage: Stage) -> Callable[[Recipe, Run], list[Path]]:
        function = load(stage)

        def run(recipe: Recipe, run: Run) -> list[Path]:
            recorders.append(Recorder(recipe))
            try:
                return function(recipe, run)
            finally:
                found[stage.name] |= recorders.pop().found

        return run

    with patch.context() as patched:
        patched.setattr(Section, "__getattribute__", read)
        patched.setattr(Section, "model_copy", copied)
        patched.setattr(Stage, "load", loaded)
        yield found


def undeclared(recipe: Recipe, found: Reads) -> Reads:
    """The keys that stages read and do not declare."""
    more = conditional_settings(recipe)
    left = {}
    for stage in STAGES:
        declared = (*stage.settings, *more.get(stage.name, ()), *stage.ignores)
        left[stage.name] = {key for key in found.get(stage.name, ()) if not _within(key, declared)}
    return {name: keys for name, keys in left.items() if keys}


def _within(key: str, names: Sequence[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)
