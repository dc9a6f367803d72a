"""README and docs: recipes parse, commands and options exist, links lead somewhere, figures can be filled in."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import tiny
import yaml
from typer.main import get_command

from distill.commands.app import app
from distill.recipe import parse_recipe
from distill.results.speedup_results import (
    ChosenLength,
    Measurement,
    Noise,
    PlainReference,
    RoundCosts,
    SpeedupPart,
    SpeedupReport,
)

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


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for place in re.findall(r"[^!]\[[^]]*\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8")):
        assert place.startswith("http") or (path.parent / place).exists(), f"{path.name}: {place}"


def measured(grown: bool, speedup: float) -> SpeedupPart:
    pair = "draft + target grown to 306M" if grown else "draft + target"
    where: Any = {"pair": pair, "backend": "pytorch", "grown": grown}
    figures: Any = {"speedup": speedup, "speedup_low": 1.0, "speedup_high": 2.0, "tokens_per_second": 1.0}
    row = Measurement(
        **where,
        **figures,
        configuration="draft, expected value context, ≤ 8",
        length=None,
        drafter="draft",
        rule="expected-value",
        verifier="greedy",
        sampler=None,
        tokens=1,
        seconds=1.0,
        plain_tokens_per_second=1.0,
        tokens_per_round=1.0,
        acceptance=1.0,
        predicted=None,
        identical=3,
        excused=1,
        different=0,
        lossy=None,
    )
    reference = PlainReference(**where, library="x", plain_tokens_per_second=1.0, library_tokens_per_second=1, ratio=1)
    return SpeedupPart(
        [row],
        ChosenLength(**where, **figures, length=1),
        reference,
        Noise(**where, **NOISE),
        RoundCosts(**where, **COSTS),
    )


NOISE: Any = {"largest_logit_difference": 0.1}
PAID: Any = {"token": 1.0, "lengths": [1], "verify": [1.2], "target_prompt": 0.5, "draft_prompt": 0.1}
COSTS: Any = PAID | {"by_argmax": [0.1] * 3, "by_distribution": [0.2] * 3}


def test_figures_find_their_place() -> None:
    specification = importlib.util.spec_from_file_location("fill_figures", tiny.ROOT / "scripts" / "fill_figures.py")
    assert specification is not None and specification.loader is not None
    script = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(script)
    machine: Any = {"command": "c", "machine": {}, "prompts": 4, "new_tokens": 8, "sampler": {}}
    rows = script._speedups(SpeedupReport(**machine, parts=[measured(False, 1.5), measured(True, 1.75)])).splitlines()
    assert rows[2:] == [
        "| target as shipped, 4 prompts: adaptive length | 1.50 [1.00, 2.00] |",
        "| target grown to 306M, 4 prompts: adaptive length | 1.75 [1.00, 2.00] |",
    ]
    own = ["evaluation", "speedup", "parity"]
    for name, run, markers in (
        ("README.md", "smollm2-demo", ["headline"]),
        ("docs/benchmarks.md", "smollm2-demo", own),
        ("docs/benchmarks/toy.md", "demo", ["headline", *own]),
    ):
        text = (tiny.ROOT / name).read_text(encoding="utf-8")
        for marker in markers:
            once = script.filled(text, run, {marker: "A TABLE"})
            assert once.count("A TABLE") == 1 and once.count("<!-- end -->") == text.count("<!-- end -->")
        assert script.filled(text, run, {"nothing": "A TABLE"}) == text
