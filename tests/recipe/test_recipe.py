"""Recipes: loading, overrides, and messages that name every mistake."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import yaml

from distill.errors import DataError, RecipeError
from distill.recipe import Recipe, Section, dump_recipe, load_recipe

RECIPES = sorted((tiny.ROOT / "recipes").glob("*.yaml"))
SMALLEST = """\
name: small
target:
  model: ./target
corpus:
  sources:
    - {kind: tree, path: ./code}
    - {kind: hub, path: some/data, fields: {text: content}}
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write(tmp_path, SMALLEST)


def write(folder: Path, text: str) -> Path:
    path = folder / "small.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def mistake(path: Path, *overrides: str) -> str:
    with pytest.raises((RecipeError, DataError)) as caught:
        load_recipe(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_round_trip(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path, ["seed=7", "train.rate=1e-4", "teacher.batch=2"])
    assert recipe.name == path.stem
    resolved = dump_recipe(recipe)
    again = load_recipe(write(tmp_path, resolved))
    assert again == recipe
    assert dump_recipe(again) == resolved


def test_resolved_form_writes_every_default_out(small: Path) -> None:
    raw = yaml.safe_load(dump_recipe(load_recipe(small)))
    assert set(raw) == set(Recipe.model_fields)
    for name, field in Recipe.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            assert set(raw[name]) == set(field.annotation.model_fields), name


def test_relative_paths_start_at_the_recipe(small: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir("/")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    recipe = load_recipe(small, ["cut.donor=../donor"])
    folder = small.parent.resolve()
    assert recipe.target.model == str(folder / "target")
    assert recipe.cut.donor == str(folder.parent / "donor")
    assert recipe.corpus.sources[0].path == str(folder / "code")
    assert load_recipe(small, ["target.model=~/model"]).target.model == str(tmp_path.resolve() / "home" / "model")


def test_source_paths_need_no_dot_and_hub_names_stay(small: Path) -> None:
    recipe = load_recipe(small, ["corpus.sources.0.path=code/deep"])
    assert recipe.corpus.sources[0].path == str(small.parent.resolve() / "code" / "deep")
    assert recipe.corpus.sources[1].path == "some/data"
    assert load_recipe(small, ["target.model=Qwen/Some"]).target.model == "Qwen/Some"
    assert load_recipe(small, ["corpus.sources.0.path=python:stdlib"]).corpus.sources[0].path == "python:stdlib"
    assert load_recipe(small).cut.donor == "target"


# Overrides


def test_overrides(small: Path) -> None:
    recipe = load_recipe(
        small,
        [
            "train.steps=7",
            "train.rate=1e-4",
            "speedup.lengths=[4, 2, 4]",
            "train.adapter={rank: 20}",
            "corpus.sources.1.fields.text=body",
            "name=other",
        ],
    )
    assert (recipe.train.steps, recipe.train.rate, recipe.name) == (7, 1e-4, "other")
    assert recipe.speedup.lengths == (2, 4)
    assert recipe.train.adapter is not None
    assert recipe.train.adapter.rank == 20
    assert [source.fields for source in recipe.corpus.sources] == [{}, {"text": "body"}]


def test_null_switches_off_and_the_last_override_wins(small: Path) -> None:
    assert load_recipe(small, ["train.adapter={rank: 20}", "train.adapter=null"]).train.adapter is None
    assert load_recipe(small, ["threads=3", "threads="]).threads is None
    assert load_recipe(small, ["seed=1", "seed=2"]).seed == 2


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.steps", "expected a.b=c, such as train.steps=100\n  write it without spaces"),
        ("=3", "expected a.b=c"),
        ("train.steps=[1", "is not YAML"),
        ("corpus.sources.5.path=x", "`5` is not an index of a list of 2"),
        ("name.first=x", "`name` holds a value"),
        ("train.loss={forward_kl: 1, forward_kl: 2}", "`forward_kl` is written twice"),
        ("train.stepz=3", "train.stepz: unknown key; did you mean `steps`?"),
        ("target.load=false", "target.load: unknown key"),
        ("teacher.kind=online", "teacher.kind: there is no kind 'online'; known: compact, exact"),
        ("trian.steps=3", "trian: unknown key; did you mean `train`?"),
        ("sampler.xyzzy=1", "known: temperature, top_k, top_p, min_p"),
        ("train.steps=-1", "train.steps: input should be greater than or equal to 0 (got -1)"),
        ("train.steps=many", "got 'many'"),
        ("train.loss={forward_kl: 0}", "not all 0"),
        ("train.loss={forward_lk: 1}", "train.loss.forward_lk"),
        ("speedup.lengths=[0]", "draft lengths run from 1 to 63"),
        ("speedup.outtype=bf16", "speedup measures gguf in bf16, which is not among export.outtypes"),
        ("speedup.backends=[gguf, 'ik:q4_0']", "speedup measures ik:q4_0 in q4_0, which is not among export.outtypes"),
        ("speedup.backends=[vllm]", "vllm is none of pytorch, gguf, ik, gguf:TYPE and ik:TYPE"),
        ("speedup.backends=['pytorch:f16']", "pytorch:f16 is none of"),
        ("speedup.backends=[ik, ik]", "each decoder is named once"),
        ("corpus.block=100", "does not fit corpus.block = 100"),
        ("name=../elsewhere", "name: "),
        ("corpus.sources=[]", "corpus.sources: "),
        ("cut.trim=200", "trim is a share up to 1, or a number of tokens from 256 on"),
    ],
)
def test_bad_override(small: Path, override: str, said: str) -> None:
    assert said in mistake(small, override)


# Mistakes


def test_all_mistakes_at_once(tmp_path: Path) -> None:
    text = """\
name: small
sampelr: {temperature: 1}
target: {dtype: float33}
corpus:
  sources: [{kind: tree, path: ./code, patern: "*.c"}]
train: {stesp: 3, rate: -1}
"""
    said = mistake(write(tmp_path, text))
    for fault in (
        "sampelr: unknown key; did you mean `sampler`?",
        "target.model: is missing",
        "target.dtype: ",
        "corpus.sources.0.patern: unknown key; did you mean `pattern`?",
        "train.stesp: unknown key; did you mean `steps`?",
        "train.rate: ",
        "6 mistakes",
        "small.yaml",
        "docs/recipes.md",
    ):
        assert fault in said


def test_a_faulty_element_does_not_make_its_list_too_short(tmp_path: Path) -> None:
    said = mistake(write(tmp_path, "name: a\ntarget: {model: ./t}\ncorpus: {sources: [{kind: tree}]}\n"))
    assert "1 mistake\n" in said
    assert "corpus.sources.0.path: is missing" in said


@pytest.mark.parametrize(
    ("addition", "lines"), [("name: again\n", (1, 8)), ("train:\n  steps: 3\n  rate: 1.0\n  steps: 4\n", (9, 11))]
)
def test_duplicate_key_names_both_lines(tmp_path: Path, addition: str, lines: tuple[int, int]) -> None:
    said = mistake(write(tmp_path, SMALLEST + addition))
    assert f"is written twice, on lines {lines[0]} and {lines[1]}" in said
    assert "small.yaml" in said


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"- a\n- b\n", "a recipe is a mapping, got list"),
        (b"name: [", "is not YAML"),
        (b"name: a\ndevice: \xff\xfe", "is not UTF-8, in line 2"),
    ],
)
def test_not_a_recipe(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "small.yaml"
    path.write_bytes(content)
    message = mistake(path)
    assert said in message
    assert "small.yaml" in message


def test_no_file(tmp_path: Path) -> None:
    write(tmp_path, SMALLEST)
    assert "`distill recipes`" in mistake(tmp_path / "none.yaml")
    for name in ("smal.yaml", "small"):
        assert f"no recipe at {tmp_path / name}\n  did you mean {tmp_path / 'small.yaml'}?" in mistake(tmp_path / name)
    assert "is a folder, not a recipe" in mistake(tmp_path)


# Documentation


def test_documentation_is_up_to_date() -> None:
    script = tiny.script("document_recipe")
    shipped = (tiny.ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert shipped == script.document(), "run: python scripts/document_recipe.py"
    assert (
        "\n- `seed: 0`: seed of all random choices\n" in shipped and "\n- `model` (text, required): folder" in shipped
    )


def test_every_key_is_described() -> None:
    def walk(section: type[Section]) -> None:
        assert section.__doc__, section
        for name, field in section.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
                walk(field.annotation)
            else:
                assert field.description, f"{section.__name__}.{name}"

    walk(Recipe)
