"""The public API: its names, and the examples of docs/api.md, run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
from test_documents import blocks

import distill
from distill import api

PAGE = tiny.ROOT / "docs" / "api.md"
DRAFT, TEXTS = "made/draft", "data/test/email"


def test_its_names_are_those_of_the_page() -> None:
    assert distill.__all__ == api.__all__ == sorted(api.__all__, key=lambda name: (name.islower(), name))
    assert all(getattr(distill, name) is getattr(api, name) for name in api.__all__)
    functions = {name for name in api.__all__ if name.islower()}
    assert functions == set(re.findall(r"^\| `(\w+)\(", PAGE.read_text(encoding="utf-8"), flags=re.M))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = distill.nothing


def test_importing_it_loads_nothing_heavy() -> None:
    code = (
        "import distill, sys; from distill import run; sys.exit('torch' in sys.modules or 'distill.api' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=tiny.ROOT, check=False).returncode == 0


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with what the examples name: the models, and the beginnings of some texts."""
    folder = tmp_path_factory.mktemp("api")
    for name in ("validation/json", "validation/html", "test/email"):
        (folder / "data" / name).mkdir(parents=True)
        for path in sorted((tiny.ROOT / "data" / name).glob("*.py"))[:6]:
            (folder / "data" / name / path.name).write_text(path.read_text()[:1500])
    for name in ("demo-target", "demo-donor"):
        (folder / "data" / name).symlink_to(tiny.ROOT / "data" / name)
    return folder


@pytest.mark.usefixtures("short_texts")
def test_the_examples(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(place)
    examples = blocks(PAGE, "python")
    assert len(examples) == 5
    with tiny.one_thread():
        for example in examples:
            exec(compile(example, str(PAGE), "exec"), {})
    said = capsys.readouterr().out
    assert re.search(r"layers 6 -> 3.*KL to the target \d", said) and re.search(
        r"^0\.\d+ \[0\.\d+, 0\.\d+\]$", said, re.M
    )
    assert re.search(r"^lookup [\d.]+ [\d.]+$", said, re.M) and (place / "made" / "back" / "config.json").exists()

    target = "data/demo-target"
    with distill.load_pair(target, DRAFT) as pair, tiny.one_thread():
        ids = pair.encode("def f(x):")
        assert distill.decode(pair, ids, 8).tokens == distill.decode(pair, "def f(x):", 8).tokens
        drawn = [
            distill.decode(pair, ids, 16, sampler=distill.Sampler(temperature=0.9), seed=seed).tokens
            for seed in (1, 1, 2)
        ]
        assert drawn[0] == drawn[1] != drawn[2]
        line = distill.decode(pair, ids, 32, stop=["\n"])
        whole = pair.text(distill.decode(pair, ids, 32).tokens)
        assert pair.text(line.tokens) + line.rest.decode() == whole.split("\n")[0]
        prompts = ["def f(x):", "import ", "class A:"]
        for settings in ({}, {"configuration": {"drafter": "lookup+draft", "rule": "expected-value", "length": 4}}):
            many = distill.decode_at_once(pair, prompts, 12, at_once=2, **settings)
            assert [one.tokens for one in many] == [distill.decode(pair, prompt, 12).tokens for prompt in prompts]
        with pytest.raises(distill.DistillError, match="takes no trees"):
            distill.decode_at_once(pair, prompts, 12, configuration={"drafter": "tree"})
        for settings, words in (
            ({"configuration": {"drafter": "string"}}, "reads two vocabularies"),
            ({"configuration": {"nonsense": 1}}, "nonsense"),
            (
                {"configuration": {"verifier": "greedy"}, "sampler": distill.Sampler(temperature=0.9)},
                "would change the target's",
            ),
        ):
            with pytest.raises(distill.DistillError, match=words):
                distill.decode(pair, ids, 8, **settings)
        with pytest.raises(distill.DistillError, match="0 tokens"):
            distill.decode(pair, [], 8)
        with pytest.raises(distill.DistillError, match="at least one"):
            distill.decode(pair, ids, 0)
        assert "distill.api" in sys.modules and distill.__all__ is api.__all__


def test_mistakes_are_explained(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    mistakes: list[tuple[str, Callable[[], object]]] = [
        ("vocabular", lambda: distill.load_pair("data/demo-target", "data/demo-donor")),
        ("does not exist", lambda: distill.load_pair("./nowhere")),
        ("there is no file", lambda: distill.evaluate("data/demo-target", "data/demo-target", [Path("nothing.txt")])),
        ("nothing to cut", lambda: distill.cut("data/demo-target", "made/none", ["text"])),
        ("needs a draft", lambda: distill.measure_speedup("data/demo-target", None, [TEXTS])),
        ("plain decoding", lambda: distill.measure_speedup("data/demo-target", None, [TEXTS], lengths=[])),
        ("0 texts at once", lambda: distill.measure_speedup("data/demo-target", None, [TEXTS], at_once=0)),
        (
            "no category has a time of its own",
            lambda: distill.measure_speedup("data/demo-target", "made/draft", suite="suite.jsonl", at_once=2),
        ),
        (
            "`drafter tree, .*decodes one text at a time, and 2 at once",
            lambda: distill.measure_speedup(
                "data/demo-target", "made/draft", [TEXTS], at_once=2, configurations=[{"drafter": "tree"}]
            ),
        ),
        ("is not empty", lambda: distill.import_gguf("any.gguf", "data")),
    ]
    for words, call in mistakes:
        with pytest.raises(distill.DistillError, match=words):
            call()
