"""The walks in docs/architecture.md: their functions are called in this order, and no other room lies on the way."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import tiny
from toys import blurred, toy
from trainings import trained

from distill.engines.loaded import LoadedPair
from distill.engines.torch.model import TorchModel
from distill.recipe import Configuration, Sampler
from distill.serving.answering import Continuation, begin

PACKAGE = tiny.ROOT / "distill"
Place = tuple[str, str]  # the file of a function below distill/, and its qualified name


def walk(heading: str) -> list[tuple[str, list[str]]]:
    """The steps below a heading of docs/architecture.md: a file and the names of its functions."""
    text = (tiny.ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    steps = re.findall(r"^\d+\. `([\w/]+\.py)`((?: `[\w.]+`)+)", section, re.M)
    return [(file, re.findall(r"[\w.]+", names)) for file, names in steps]


class Trace:
    """The functions of distill that are called, in the order of their first calls, in all threads that begin later.

    The order begins anew with each call of the function `window`. `inside` has the files of the second one, in which
    nothing is set up any more.
    """

    def __init__(self, window: str) -> None:
        self.called: list[Place] = []
        self.inside: set[str] = set()
        self._window, self._calls = window, 0
        self._seen: dict[int, CodeType] = {}  # by identity: their hashes take long

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and id(code) not in self._seen:
            self._seen[id(code)] = code
            if code.co_filename.startswith(str(PACKAGE)):
                file = Path(code.co_filename).relative_to(PACKAGE).as_posix()
                self.called.append((file, code.co_qualname))
                if self._calls == 2:
                    self.inside.add(file)
        if code.co_name == self._window and event in ("call", "return"):
            self._calls += event == "call" or self._calls == 2
            self._seen.clear()


@contextmanager
def traced(window: str) -> Iterator[Trace]:
    """Trace what is called within the block."""
    trace, before = Trace(window), sys.getprofile()
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        yield trace
    finally:
        sys.setprofile(before)
        threading.setprofile(None)  # type: ignore[arg-type]


def require_walked(heading: str, trace: Trace) -> None:
    """The functions of a walk were called, the first of each step in order, and inside no other file of a room."""
    steps = walk(heading)
    missing = [(file, name) for file, names in steps for name in names if (file, name) not in trace.called]
    assert steps and not missing
    called, late = iter(trace.called), []
    for file, names in steps:
        late += [] if (file, names[0]) in called else [names[0]]
    assert not late
    assert {file for file in trace.inside if "/" in file} <= {file for file, _ in steps}


def test_a_round() -> None:
    models = toy(), blurred(toy(), 6, 0.03)
    for model in models:
        model.set_attn_implementation("eager")  # sdpa passes through blocks.py once a process has packed a text
    pair = LoadedPair("pytorch", "p", *map(TorchModel, models), [7])
    request = Continuation(Configuration(length=3, sampler="recipe"), Sampler(temperature=1.0))
    with traced("decode") as trace:
        begin(pair, None, request).text([1, 2, 3], 12)
    require_walked("A round", trace)
    assert len(walk("A round")) == 12


def test_a_batch(world: Path, ready: Path, tmp_path: Path) -> None:
    with traced("one_step") as trace:
        trained(world, ready, tmp_path, "train.steps=2", "train.acceptance=null")
    require_walked("A batch", trace)
    assert len(walk("A batch")) == 12
