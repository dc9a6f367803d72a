"""README and docs: recipes parse, every name exists, links lead somewhere, figures can be filled in."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import question_worlds
import tiny
import yaml
from pydantic import TypeAdapter, ValidationError
from typer.main import get_command

from distill.cli.app import app
from distill.gguf.writer import export_gguf
from distill.recipe import Recipe, Section, parse_recipe

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


def test_every_command_has_its_line() -> None:
    text = (tiny.ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert not [name for name in COMMANDS if f"`distill {name}" not in text]


def test_the_documents_are_short() -> None:
    readme, *pages = (path.stat().st_size for path in DOCUMENTS)
    assert readme <= 8 * 1024 and sum(pages) <= 150 * 1024, "shorten a page before you add to one"


def test_the_speeds_of_the_readme_stand_in_the_tables() -> None:
    tables = "".join(
        (tiny.ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("benchmarks", "tuned-target")
    )
    speeds = set(re.findall(r"(\d+\.\d+)×", DOCUMENTS[0].read_text(encoding="utf-8")))
    assert len(speeds) > 5 and not {speed for speed in speeds if speed not in tables}


@pytest.mark.parametrize("path", DOCUMENTS[1:], ids=lambda path: path.name)
def test_a_page_begins_with_its_question(path: Path) -> None:
    question = path.read_text(encoding="utf-8").replace("<!--", "").partition("\n# ")[2] or path.read_text(
        encoding="utf-8"
    )
    assert re.match(r"[^\n]*\n\n\*\*[A-Z][^*]*\?\*\*", question), f"{path.name}: one question of one reader"


def keys(section: type[Section], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each key below a section, with its whole path and its field."""
    for name, field in section.model_fields.items():
        yield prefix + name, field
        if inner := section_in(field.annotation):
            yield from keys(inner, f"{prefix}{name}.")


def section_in(annotation: Any) -> type[Section] | None:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(section_in, get_args(annotation))), None)


KEYS = dict(keys(Recipe))
OPTIONS = {name for command in COMMANDS.values() for one in command.params for name in one.opts + one.secondary_opts}
# Options, keys and words of other programs, which documents name: pip, llama-server, vLLM, SGLang.
FOREIGN_OPTIONS = {
    *("-e", "--help", "--install-completion", "--strict", "--parallel", "--kv-unified", "--nproc_per_node"),
    *("--spec-type", "--spec-draft-n-max", "--spec-draft-sampling", "--lookup-cache-static"),
    *("--max-logprobs", "--logprobs-mode", "--speculative-config", "--per-request-spec-decode-metrics"),
    "--speculative-ngram-external-corpus-path",
}
FOREIGN_WORDS = {"raw_logits", "add_sep_token"}
SHIPPED = ("distill", "docs", "recipes", "scripts", "tests", "data")


def read_sources(*folders: str) -> str:
    paths = [
        path for name in folders for path in (tiny.ROOT / name).rglob("*") if path.suffix in (".py", ".sh", ".yaml")
    ]
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


def unknown_names(text: str, words: set[str], files: set[str]) -> Iterator[str]:
    """Each `code` word of a text that looks like a command, an option, a recipe's key or a file, and does not exist.

    The options of a script exist in a text that names the script.
    """
    scripts = [path for path in (tiny.ROOT / "scripts").rglob("*.*") if path.is_file() and path.name in text]
    script_options = set(
        re.findall(r"(?<![\w-])--[a-z][\w-]*", " ".join(path.read_text(encoding="utf-8") for path in scripts))
    )
    for span in re.findall(r"`([^`\n]+)`", text):
        name = re.match(r"distill ([a-z][\w-]*)", span)
        if name and name[1] not in COMMANDS:
            yield span
        options = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", span))
        if options - OPTIONS - FOREIGN_OPTIONS - script_options:
            yield span
        path = re.fullmatch(r"([a-z_]+(?:\.[a-z_0-9]+)+)(?:(?:=|: )(.+))?", span)
        if path and path[1].partition(".")[0] in Recipe.model_fields and not path[1].endswith((".py", ".json", ".md")):
            if not holds(re.sub(r"\.\d+", "", path[1]), path[2]):
                yield span
        elif re.fullmatch(r"[\w./-]+\.(py|sh|yaml|md|json|jsonl|txt)", span):
            if Path(span).name not in files and Path(span).stem not in words:
                yield span
        elif re.fullmatch(r"\{[a-z].*\}|[a-z_]+: .+", span):
            if mapping_keys(span) - {key.rpartition(".")[2] for key in KEYS}:
                yield span
        elif re.fullmatch(r"[a-z]+(_[a-z0-9]+)+", span) and span not in words | FOREIGN_WORDS:
            yield span


def holds(key: str, value: str | None) -> bool:
    """Whether a recipe has this key, and the key takes this value. A value with capitals stands for the user's own."""
    if key not in KEYS:
        return False
    if value is None or re.search(r"[A-Z…]", value) or section_in(KEYS[key].annotation):
        return True
    try:
        TypeAdapter(KEYS[key].annotation).validate_python(yaml.safe_load(value))
    except ValidationError:
        return False
    return True


def mapping_keys(text: str) -> set[str]:
    """The keys of a mapping in YAML that look like a recipe's, at any depth."""

    def walk(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            yield from (key for key in value if isinstance(key, str) and key.islower())
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from walk(item)

    try:
        return set(walk(yaml.safe_load(text)))
    except yaml.YAMLError:
        return set()


def test_every_name_exists() -> None:
    """Of documents, of recipes' comments, and of the texts that explain options and keys."""
    paths = [*DOCUMENTS, *(tiny.ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md"))]
    texts = {path.name: path.read_text(encoding="utf-8") for path in paths}
    for path in (tiny.ROOT / "recipes").rglob("*.yaml"):
        comments = " ".join(re.findall(r"#(.*)", path.read_text(encoding="utf-8")))
        texts[path.name] = re.sub(r"(?<![\w/`.-])[a-z_]+(?:\.[a-z_]+)+(?![\w/.]|=)", r"`\g<0>`", comments)
    for name, command in COMMANDS.items():
        texts[f"distill {name}"] = " ".join(str(one.help) for one in (command, *command.params) if hasattr(one, "help"))
    texts |= {f"key {key}": field.description or "" for key, field in KEYS.items()}
    words = set(re.findall(r"[\w-]+", read_sources("distill", "scripts", "recipes")))
    files = {path.name for path in tiny.ROOT.glob("*")}
    files |= {path.name for name in SHIPPED for path in (tiny.ROOT / name).rglob("*")}
    unknown = {name: found for name, text in texts.items() if (found := [*unknown_names(text, words, files)])}
    assert not unknown
    wrong = (
        "distill nothing",
        "--nothing",
        "train.nothing",
        "{nothing: 1}",
        "no_thing",
        "nothing.py",
        "train.steps: one",
    )
    text = " ".join(f"`{span}`" for span in wrong)
    assert [*unknown_names(text, words - {"nothing", "no_thing"}, files)] == list(wrong)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_pages_use_the_words_of_the_project(path: Path) -> None:
    """docs/architecture.md#words has them. Pages once used these instead, or left a place unclear with them."""
    prose = re.sub(r"^```.*?^```|`[^`]*`", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    assert not re.findall(r"(?i)\b(?:laws?|trials?|best tokens?|speed-ups?|behind|told)\b", prose)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_recipes_parse(path: Path) -> None:
    for block in blocks(path, "yaml"):
        found = yaml.safe_load(block)
        assert parse_recipe({**SMALLEST, **found}, path.name)


@tiny.needs_llama
@pytest.mark.usefixtures("one_thread")
def test_the_recipe_of_the_readme_runs_as_it_stands(tmp_path: Path) -> None:
    """Each recipe has at most eight lines. The last one runs with a small chat model's file, fewer texts and steps."""
    recipes = blocks(DOCUMENTS[0], "yaml")
    assert len(recipes) == 3 and all(one.count("\n") <= 8 for one in recipes)
    question_worlds.build_instruct(tmp_path, question_worlds.biased, layers=5)
    export_gguf(tmp_path / "target", tmp_path / "my-model-q4_k_m.gguf", "q8_0")
    (tmp_path / "my-draft.yaml").write_text(recipes[-1], encoding="utf-8")
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


def test_figures_find_their_place(tmp_path: Path) -> None:
    script = tiny.script("fill_figures")
    page = tmp_path / "eval.md"
    page.write_text(
        "Sampler: greedy.\n\n- Measured on a store.\n\n**answers**\n\n| a |\n\n- Said of a row.\n", encoding="utf-8"
    )
    assert script._without_command(page) == "Sampler: greedy.\n\n- Measured on a store.\n\n**answers**\n\n| a |"
    table = "| pair | backend | same text |\n|---|---|--:|\n| **a** | **gguf** | **2** |"
    said = f"Said.\n\nCalibrated on 4 texts.\n\n**engines**\n\n| **a** |\n\n**configurations**\n\n{table}"
    assert script._without_columns(said) == "Said.\n\n**configurations**\n\n| backend |\n|---|\n| **gguf** |"
    text = (tiny.ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for marker in ("evaluation", "speedup"):
        once = script.filled(text, "smollm2-demo", {marker: "A TABLE"})
        assert once.count("A TABLE") == 1 and once.count("<!-- end -->") == text.count("<!-- end -->")
    assert script.filled(text, "smollm2-demo", {"nothing": "A TABLE"}) == text


def test_the_picture_has_the_figures_of_the_tables() -> None:
    picture = (tiny.ROOT / "docs" / "speeds.svg").read_text(encoding="utf-8")
    script = tiny.script("draw_speeds")
    bars = [bar for bars in script.groups().values() for bar in bars]
    ends = [(name, script.cell("benchmarks.md", script.SIZES[-1], column)) for name, column in script.GROWN.items()]
    assert len(bars) == 9 and len(ends) == 3
    assert not [bar for bar in [*bars, *ends] if "{} {:.2f}×".format(*bar) not in picture]
