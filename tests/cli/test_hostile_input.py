"""Input that no user means to write: one message with exit 2 each, in this project's words, and never a traceback."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.feather
import pytest
import tiny
import yaml
from pydantic import ValidationError
from tiny import Capture, Patch

from distill.cli import app as application
from distill.cli.shared import find_run, numbers, read_texts
from distill.data.samples import Sample, read_prompts, write_samples
from distill.data.sources import read_documents
from distill.data.traffic import parse_line
from distill.errors import DataError, DistillError, RecipeError
from distill.recipe import Corpus, Sampler, Source, load_recipe, parse_recipe, resolve_model
from distill.run import Run
from distill.tables import RESAMPLES, edge_of, paired_ratio_interval, ratio_interval

SMALLEST = "name: a\ntarget: {model: ./target}\ncorpus: {sources: [{kind: tree, path: ./code}]}\n"
FOREIGN = ("Input should", "Extra inputs", "pydantic", "validation error", "unicode string", "Traceback")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALLEST)
    return path


def mistake(path: Path, *overrides: str) -> str:
    with pytest.raises(DistillError) as caught:
        load_recipe(path, overrides)
    found = str(caught.value)
    assert not any(words in found for words in FOREIGN), found
    assert len(found) < 1500 and found.encode(), "short, and fit to print"
    return found


# ── YAML ──


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("seed: !!python/object/apply:os.system [ls]", ["line 4", "python/object/apply:os.system"]),
        ("seed: !mine 3", ["line 4", "!mine"]),
        ("seed: !!binary aGk=", ["line 4", "binary"]),
        ("seed: !!int many", ["line 4", "'many' cannot be read as int"]),
        (f"seed: {'9' * 5000}", ["line 4", "cannot be read as int"]),
        ("<<: {seed: 1}", ["line 4", "merge"]),
        ("seed: 2026-13-45", ["seed: input should be a valid integer"]),
        (f"seed: {'[' * 3000}{']' * 3000}", ["nested too deeply"]),
        (f"seed: {'[' * 70}{']' * 70}", ["nested too deeply"]),
        ("seed: &loop [*loop]", ["line 4", "recursive"]),
        ('seed: "\\ud800"', ["lone surrogate"]),
        ("seed: a: b", ["is not YAML", "line 4, column 8"]),
        ("seed: \x07", ["is not YAML", "line 4", "\\x07"]),
        ("? [1, 2]\n: 3", ["line 4: a key must be text, got [1, 2]"]),
    ],
)
def test_yaml(recipe: Path, line: str, expected: list[str]) -> None:
    recipe.write_text(f"{SMALLEST}{line}\n")
    found = mistake(recipe)
    assert "small.yaml" in found and all(words in found for words in expected), found


def test_repeated_parts_that_grow_without_bound(recipe: Path) -> None:
    levels = "\n".join(f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9)}]" for i in range(1, 12))
    recipe.write_text(f"{SMALLEST}x0: &x0 [1]\n{levels}\n")
    assert "too large" in mistake(recipe)


# ── overrides and paths ──


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("corpus.sources.٣.path=x", "is not an index"),
        (f"corpus.sources.{'9' * 300}.path=x", "is not an index"),
        ("a" * 5000 + "=1", "characters before the ="),
        (".".join("a" * 400) + "=1", "characters before the ="),
        ("train.steps" + ".a" * 200 + "=1", "nested too deeply"),
        ("train.steps" + ".a" * 50 + "=1", "train.steps: input should be a valid integer"),
        ("train.steps=!!python/name:os.system x", "line 1"),
        ("train.steps=" + "[" * 3000, "nested too deeply"),
        ("target.model=" + "a" * 5000, "too long"),
        ("corpus.sources.0.pattern=''", "corpus.sources.0.pattern: not a valid pattern"),
        ("corpus.sources.0.pattern=/etc/*", "corpus.sources.0.pattern: not a valid pattern"),
        (f"corpus.sources.0.pattern='{'*' * 5000}'", "corpus.sources.0.pattern: not a valid pattern"),
        ("train.rate=1.0e+300", "train.rate: input should be less than or equal to 10"),
        ("train.rate=.inf", "train.rate: input should be a finite number"),
        ("train.loss={jsd: 1.0e+300}", "must lie between 0 and 1e6"),
        ("speedup.lengths=[1, .inf]", "speedup.lengths.1: input should be a valid integer"),
        ("threads=100000", "threads: input should be less than or equal to 1024"),
        (f"seed={2**64}", "integers up to"),
        (f"train.steps='{'9' * 5000}'", "train.steps: input should be a valid integer"),
        ("train.steps=true", "train.steps: input should be a valid integer (got true)"),
        ("speedup.lengths=[true, 2]", "speedup.lengths.0: input should be a valid integer"),
        ("train.loss={jsd: true}", "train.loss.jsd: input should be a valid number"),
        ("train.steps='100'", "train.steps: input should be a valid integer (got '100')"),
        ("train.steps=1.5", "train.steps: input should be a valid integer (got 1.5)"),
        ("train.compile=3", "train.compile: input should be a valid boolean"),
        ("device=3", "device: input should be a valid string"),
        ("train=3", "train: input should be an object"),
        ("speedup.lengths=3", "speedup.lengths: input should be a valid array"),
        ("speedup={lengths: [], configurations: []}", "lengths and configurations are empty: nothing is measured"),
        ("name=" + "a" * 101, "name: string should have at most 100 characters"),
    ],
)
def test_overrides(recipe: Path, override: str, expected: str) -> None:
    assert expected in mistake(recipe, override)


@pytest.mark.parametrize("key", ["target.model", "corpus.sources.0.path", "answers.traffic"])
@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ('"./a\\0b"', "holds a NUL character"),
        ("./" + "a" * 5000, "too long: 5002 characters"),
        ("./" + "a/" * 2500, "too long"),
        ("~nobody-has-this-name/model", "there is no user '~nobody-has-this-name'"),
    ],
)
def test_paths(recipe: Path, key: str, path: str, expected: str) -> None:
    found = mistake(recipe, f"{key}={path}")
    assert expected in found and key in found


def test_paths_of_the_command_line(tmp_path: Path) -> None:
    long = "a" * 5000
    for read in (resolve_model, lambda p: find_run(p, tmp_path), lambda p: find_run(None, Path(p))):
        with pytest.raises(RecipeError, match="too long: 5000 characters"):
            read(long)
    with pytest.raises(RecipeError, match="too long"):
        read_texts([Path(long)])
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\xff\n")
    with pytest.raises(DataError, match=r"a.txt is not UTF-8, in line 2"):
        read_texts([tmp_path / "a.txt"])


@pytest.mark.parametrize(
    "raw", [None, 3, [], "x", {"train": []}, {"corpus": {"sources": {}}}, {"target": {"model": 3}}]
)
def test_other_shapes(raw: Any) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(raw, "here")
    assert str(caught.value).startswith("here: ") and not any(words in str(caught.value) for words in FOREIGN)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty"])
def test_samplers(name: str, value: float) -> None:
    if name == "repetition_penalty":
        with pytest.raises(RecipeError, match=name):
            Sampler().penalised(value)
    else:
        with pytest.raises(ValidationError, match=name):
            Sampler(**{name: value})


@pytest.mark.parametrize("text", ["inf", "nan", "1e400", "-1"])
def test_lists_of_numbers(text: str) -> None:
    with pytest.raises(RecipeError, match="finite, at least 0"):
        numbers(text, "--acceptance", float)


@pytest.mark.parametrize(
    "options",
    [
        ("generate", "x", "--temperature", "inf"),
        ("generate", "x", "--sampler", "temperature=1,top_p=.nan"),
        ("generate", "x", "--seed", str(2**64)),
        ("generate", "x", "--repetition-penalty", "inf"),
        ("plan", "x", "nan"),
        ("profile", "x", "--threads", "100000"),
        ("eval", "a" * 5000),
        ("generate", "\udcff"),
        ("check", "\udcff.yaml"),
    ],
)
def test_options(capsys: Capture, options: tuple[str, ...]) -> None:
    tiny.refused(capsys, *options)


def test_many_resamples_take_little_memory() -> None:
    """Draws come in parts; the figures are those of one large draw."""
    draw = numpy.random.default_rng(3)
    sums, counts, more = draw.random(3000), draw.integers(1, 9, 3000).astype(float), draw.random(3000)
    drawn = numpy.random.default_rng(0).integers(0, 3000, size=(RESAMPLES, 3000))
    edges = [edge_of(3000), 1 - edge_of(3000)]
    single = ratio_interval(sums, counts)
    assert (single.low, single.high) == tuple(numpy.quantile(sums[drawn].sum(1) / counts[drawn].sum(1), edges))
    rises = (more[drawn].sum(1) - sums[drawn].sum(1)) / counts[drawn].sum(1)
    paired = paired_ratio_interval(list(sums), list(counts), list(more), list(counts))
    assert paired.high == pytest.approx(float(numpy.quantile(rises, edges[1])), rel=1e-12)


# ── jsonl ──

DEEP = b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
LINES = [
    (b'{"text": "\xff"}', "not UTF-8 (byte 11"),
    (DEEP, "nested too deeply"),
    (b'{"text": "a\\ud800b"}', "lone surrogate"),
    (b'{"\\uDFFF": 1}', "lone surrogate"),
    (b'{"text": ' + b"9" * 5000 + b"}", "too many digits"),
    (b'{"text": ', "not JSON"),
    (b"[1]", "a JSON object is needed, got list"),
    (b"\x00", "not JSON"),
]


@pytest.mark.parametrize(("line", "expected"), LINES)
def test_lines_of_a_corpus_and_of_served_traffic(tmp_path: Path, line: bytes, expected: str) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_bytes(b'{"text": "a b c"}\n\n' + line + b"\n")
    corpus = Corpus(sources=(Source(kind="jsonl", path=str(path), split="train"),))
    if expected == "lone surrogate":  # it spoils its line, not the file
        documents, left = read_documents(corpus, ("train",))
        assert [one.text for one in documents] == ["a b c"] and sum(left.values()) == 1, left
    else:
        with pytest.raises(DataError) as caught:
            read_documents(corpus, ("train",))
        assert all(words in str(caught.value) for words in ("texts.jsonl", "line 3", expected))
    found = parse_line(line, 3)
    assert isinstance(found, str) and expected in found


@pytest.mark.parametrize(
    ("record", "settings", "mended"),
    [
        ({"id": 1, "body": "b"}, {}, [{"fields": {"text": "body"}}, {"fields": {"prompt": "body"}}]),
        ({"body": "b"}, {"form": "text"}, [{"fields": {"text": "body"}}]),
        ({"body": "b"}, {"fields": {"prompt": "x"}}, [{"fields": {"prompt": "body"}}]),
        ({"body": "b", "head": "h"}, {}, []),
    ],
)
def test_the_line_that_mends_a_source(
    tmp_path: Path, record: dict[str, Any], settings: dict[str, Any], mended: list[dict[str, Any]]
) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text(json.dumps(record) + "\n")

    def read(**more: Any) -> int:
        return len(read_documents(Corpus(sources=(Source(kind="jsonl", path=str(path), **settings | more),)), ())[0])

    with pytest.raises(DataError) as caught:
        read()
    found = [yaml.safe_load(line) for line in str(caught.value.hint).split("`")[1::2] if ":" in line]
    assert found == mended and all(read(**line) == 1 for line in found)


def test_pairs_of_surrogates_and_a_byte_order_mark_are_text(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a\\ud83d\\ude00b"}\n{"text": "2020-01-01", "other": 3}\n')
    documents, dropped = read_documents(Corpus(sources=(Source(kind="jsonl", path=str(path), split="train"),)), ())
    assert [document.text for document in documents] == ["a\U0001f600b", "2020-01-01"]
    assert dropped == {"field `other` of records, which is not read": 1}


# ── standard input, records, and the net for bugs ──


def test_standard_input_that_is_not_utf8(monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\ntwo \xff"), encoding="utf-8"))
    assert "standard input is not UTF-8, in line 2" in tiny.refused(capsys, "generate", "-")


WRONG = ["{}", "[]", "null", "3", '{"key": 3}', "[" * 100_000, "\ud800"]
WRONG += ['{"key": "a", "inputs": {}, "artifacts": {"a": 1}}']


@pytest.mark.parametrize("text", WRONG)
@pytest.mark.parametrize("name", ["corpus.json", "train.json", "redo.json"])
def test_wrong_records(world: Path, tmp_path: Path, capsys: Capture, text: str, name: str) -> None:
    stages = tmp_path / "tiny" / "stages"
    stages.mkdir(parents=True)
    (stages / name).write_bytes(text.encode("utf-8", "surrogatepass"))
    assert f"{name} is damaged" in tiny.refused(capsys, "train", world / "recipe.yaml", "--runs", tmp_path, "--dry-run")


def test_damaged_files_of_prompts(recipe: Path, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", load_recipe(recipe))
    path = run.path("corpus", "prompts-test.arrow")
    samples = [Sample("a", [1, 2], chat={"messages": [{"role": "user", "content": "\ud800"}]}), Sample("b", [3])]
    write_samples(path, samples)
    assert [*read_prompts(run, "test")] == samples
    whole = path.read_bytes()
    other = pyarrow.table({"id": ["a"], "prompt": [[1]]})
    pyarrow.feather.write_feather(other, str(tmp_path / "other"))
    for data in (b"", b"{}", whole[:100], whole[:-30], b"\0" * len(whole), (tmp_path / "other").read_bytes()):
        path.write_bytes(data)
        with pytest.raises(DataError, match=r"prompts-test.arrow is damaged: "):
            read_prompts(run, "test")


def test_metrics_of_other_forms_are_left_out(recipe: Path, tmp_path: Path) -> None:
    run = Run(tmp_path, load_recipe(recipe))
    run.path("metrics.jsonl").write_text('[]\n3\n{}\n{"stage": []}\n{"stage": "train", "step": [1]}\n{"stage": "train"')
    assert [line["stage"] for line in run.metrics()] == ["train"]


def test_a_bug_is_one_line_and_its_traceback_a_file(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    """The place is a line of the package, also for a bug below a folder of its name: tests and .venv of a checkout."""
    outside: dict[str, Any] = {}
    program = 'def fail(**_): raise KeyError("an odd\\nkey \\ud800")'
    exec(compile(program, str(tmp_path / "distill" / "tests" / "a.py"), "exec"), outside)
    monkeypatch.setattr(application, "app", outside["fail"])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert tiny.call("runs") == 1
    (found,) = capsys.readouterr().err.splitlines()
    assert found.startswith("distill: this is a bug in distill: KeyError: ") and "please report it" in found
    (file,) = tmp_path.iterdir()
    assert str(file) in found and "(app.py:" in found
    assert "Traceback" in file.read_text() and "app.py" in file.read_text() and "a.py" in file.read_text()
