"""Scripts that no other test runs: each can be imported."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny

SCRIPTS = tiny.ROOT / "scripts"
NAMES = sorted(path.relative_to(SCRIPTS).with_suffix("").as_posix() for path in SCRIPTS.rglob("*.py"))


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A script by its path below scripts/, imported as it imports its neighbours: by name."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    monkeypatch.syspath_prepend(str((SCRIPTS / name).parent))
    return importlib.import_module(Path(name).name)


def run(module: Any, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    """A script's main with these arguments, on one thread."""
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
    with tiny.one_thread():
        module.main()


@pytest.mark.parametrize("name", NAMES)
def test_it_finds_what_it_uses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (script(name, monkeypatch).__doc__ or "").strip()
