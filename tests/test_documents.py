"""README and docs: recipes parse, commands and options exist, links lead somewhere, figures can be filled in."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import question_worlds
import tiny
import yaml
from typer.main import get_command

from distill.cli.app import app
from distill.gguf.writer import export_gguf
from distill.measuring.speedup_results import Measurement, SpeedupPart, SpeedupReport
from distill.recipe import parse_recipe

DOCUMENTS = [tiny.ROOT / "README.md", *sorted((tiny.ROOT / "docs").rglob("*.md"))]
COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
SMALLEST = {"name": "a", "target": {"model": "a"}, "corpus": {"sources": [{"kind": "text", "path": "a"}]}}


def blocks(path: Path, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), flags=re.M | re.S)


def commands(path: Path) -> list[list[str]]:
    """Every `distill …` line of the blocks without a language or of bash, split into words; comments are left out."""
    lines = "".join(blocks(path, "bash") + blocks(path, "")).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("distill ")]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_and_options_exist(path: Path) -> None:
    for name, *arguments in commands(path):
        assert name in COMMANDS, f"{path.name}: distill {name}"
        arguments = arguments[: arguments.index("--")] if "--" in arguments else arguments  # the rest is passed on
        known = {option for parameter in COMMANDS[name].params for option in parameter.opts + parameter.secondary_opts}
        unknown = {argument for argument in arguments if argument.startswith("-")} - known
        assert not unknown, f"{path.name}: distill {name} has no {unknown}"


def test_the_readme_names_every_command() -> None:
    text = DOCUMENTS[0].read_text(encoding="utf-8")
    assert not [name for name in COMMANDS if f"`distill {name}" not in text]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_recipes_parse(path: Path) -> None:
    for block in blocks(path, "yaml"):
        found = yaml.safe_load(block)
        assert parse_recipe({**SMALLEST, **found}, path.name)


@tiny.needs_llama
@pytest.mark.usefixtures("one_thread")
def test_the_recipe_of_the_readme_runs_as_it_stands(tmp_path: Path) -> None:
    """At most ten lines, with a small chat model's file in its place, and fewer texts and steps."""
    server, recipe = blocks(DOCUMENTS[0], "yaml")
    assert server.count("\n") <= 10 and recipe.count("\n") <= 10
    question_worlds.build_instruct(tmp_path, question_worlds.biased, layers=5)
    export_gguf(tmp_path / "target", tmp_path / "my-model-q4_k_m.gguf", "q8_0")
    (tmp_path / "my-draft.yaml").write_text(recipe, encoding="utf-8")
    small = ("corpus.sources.0.questions=60", "corpus.validation=0.25", "corpus.test=0.25")
    fewer = ("answers.new_tokens=16", "train.steps=2", "eval.prompts=4", "speedup.prompts=3", "speedup.new_tokens=8")
    assert tiny.call("train", tmp_path / "my-draft.yaml", "--runs", tmp_path, "threads=1", *small, *fewer) == 0
    assert (tmp_path / "my-draft" / "report.html").exists()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for link in re.findall(r"[^!]\[[^]]*\]\(([^)]+)\)", path.read_text(encoding="utf-8")):
        place, _, anchor = link.partition("#")
        if place.startswith("http"):
            continue
        found = path.parent / place if place else path
        assert found.exists(), f"{path.name}: {place}"
        assert not anchor or anchor in anchors(found), f"{path.name}: {link}"


def anchors(path: Path) -> set[str]:
    """What GitHub makes of a document's headings."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = [re.sub(r"\]\([^)]*\)", "", line) for line in re.findall(r"^#+ +(.*)$", text, flags=re.M)]
    return {re.sub(r"[^\w\- ]", "", line.strip().lower()).replace(" ", "-") for line in headings}


def test_files_that_documents_name_exist() -> None:
    for path in [*DOCUMENTS, tiny.ROOT / "CONTRIBUTING.md"]:
        for name in re.findall(r"`((?:distill|tests|scripts|data)/[\w/.-]+)`", path.read_text(encoding="utf-8")):
            assert (tiny.ROOT / name).exists(), f"{path.name}: {name}"


def test_places_in_documents_that_recipes_and_messages_name() -> None:
    files = [path for name in ("recipes", "distill", "scripts") for path in (tiny.ROOT / name).rglob("*.*")]
    for path in [*files, tiny.ROOT / "CONTRIBUTING.md", tiny.ROOT / "CHANGELOG.md"]:
        if path.suffix not in (".yaml", ".py", ".sh", ".md"):
            continue
        for name, anchor in re.findall(
            r"(?<!ggml's )(docs/[\w/-]+\.md)(?:#([\w-]+))?", path.read_text(encoding="utf-8")
        ):
            assert (tiny.ROOT / name).exists(), f"{path}: {name}"
            assert not anchor or anchor in anchors(tiny.ROOT / name), f"{path}: {name}#{anchor}"


def measured(backend: str, speedup: float) -> SpeedupPart:
    where = ("draft + target", backend)
    unused: Any = None
    row = Measurement(
        *(*where, "draft adaptive", None, "draft", "expected-value", None),
        *(1.0, 1.0, 1.0, 1.0, speedup, 1.0, 2.0, None, 3, 1, 0, None, 0.0, 0.1, unused),
    )
    return SpeedupPart(*where, [row], unused)


def test_figures_find_their_place(tmp_path: Path) -> None:
    script = tiny.script("fill_figures")
    machine: Any = {"command": "c", "machine": {}, "prompts": 4, "new_tokens": 8, "sampler": {}}
    rows = script._speedups(
        SpeedupReport(**machine, parts=[measured("pytorch", 1.5), measured("gguf", 1.75)])
    ).splitlines()
    assert rows[0].startswith("| speedup over plain decoding, greedy, 4 prompts | PyTorch |") and rows[2:] == [
        "| adaptive length | 1.50 [1.00, 2.00] | 1.75 [1.00, 2.00] |",
    ]
    page = tmp_path / "eval.md"
    page.write_text(
        "Sampler: greedy.\n\n- Measured on a store.\n\n**answers**\n\n| a |\n\n- Said of a row.\n", encoding="utf-8"
    )
    assert script._without_command(page) == "Sampler: greedy.\n\n- Measured on a store.\n\n**answers**\n\n| a |"
    own = ["evaluation", "speedup", "parity"]
    for name, run, markers in (
        ("README.md", "smollm2-demo", ["headline"]),
        ("docs/benchmarks.md", "smollm2-demo", own),
    ):
        text = (tiny.ROOT / name).read_text(encoding="utf-8")
        for marker in markers:
            once = script.filled(text, run, {marker: "A TABLE"})
            assert once.count("A TABLE") == 1 and once.count("<!-- end -->") == text.count("<!-- end -->")
        assert script.filled(text, run, {"nothing": "A TABLE"}) == text
