"""`distill check` refuses what `distill train` would refuse later, before the first stage and without the weights."""

from __future__ import annotations

import json
import shutil
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from tiny import Capture, Patch

from distill.data.sources import PIECE, cut_text, read_documents
from distill.errors import RunError
from distill.export import ExportReport, export
from distill.files import read_result
from distill.pipeline import preflight
from distill.recipe import Corpus, Source, load_recipe
from distill.recipe.target import Answers
from distill.run import Run

Change = Callable[[dict[str, Any], Path], object]


def refused(world: Path, folder: Path, capsys: Capture, change: Change, command: str) -> str:
    """The message of a command on the world's recipe, changed; nothing may be written before it."""
    values = tiny.recipe_values(world, elsewhere=True)
    change(values, folder)
    recipe = tiny.write_recipe(folder / "changed.yaml", values)
    more = ["--runs", folder / "runs"] if command == "train" else []
    said = tiny.refused(capsys, command, recipe, *more)
    assert not (folder / "runs").exists(), "refused before the run folder is made"
    return said


def source(values: dict[str, Any], **new: Any) -> None:
    values["corpus"]["sources"].append(new)


def traffic(values: dict[str, Any], folder: Path, *lines: dict[str, Any]) -> None:
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    values["answers"]["traffic"] = str(path)


def lines_of(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


@pytest.mark.parametrize("command", ["check", "train"])
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda v, f: v.update(device="cuda:7"), ["cuda:7", "device=auto"]),
        (lambda v, f: v["target"].update(shard=True), ["sharding needs accelerators"]),
        (lambda v, f: v["corpus"]["sources"][0].update(pattern="*.rs"), ["no file that matches *.rs"]),
        (
            lambda v, f: v["corpus"]["sources"][0].update(exclude=[f"part0_{n}.py" for n in range(12)]),
            ["no file that matches **/*.py outside part0_0.py"],
        ),
        (lambda v, f: source(v, kind="text", path=lines_of(f, "empty.txt", " \n")), ["empty.txt has no text"]),
        (lambda v, f: source(v, kind="jsonl", path=lines_of(f, "none.jsonl", "")), ["none.jsonl", "empty"]),
        (
            lambda v, f: source(v, kind="jsonl", path=lines_of(f, "torn.jsonl", '{"text": "a"}\n{"text": torn}\n')),
            ["torn.jsonl", "line 2"],
        ),
        (lambda v, f: source(v, kind="text", path=str(f / "no.txt")), ["no.txt", "does not exist"]),
        (
            lambda v, f: v["target"].update(model="./x.gguf"),
            ["target.model: /", "x.gguf does not exist", "is relative to"],
        ),
        (lambda v, f: v["cut"].update(donor=str(f / "nowhere")), ["cut.donor: /", "nowhere does not exist"]),
        (lambda v, f: v["corpus"]["sources"].pop(), ["no test document (", " all: 12 train, 3 validation, 0 test"]),
        (lambda v, f: v["corpus"].update(block=1024), ["corpus.block is 1024", "context is 512"]),
        (lambda v, f: v["cut"].update(layers=4), ["cut.layers: 4 layers", "the donor has 3", "ask for 1 to 2;"]),
        (lambda v, f: v["cut"].update(mlp_width=50), ["cut.mlp_width: ", "cannot be cut to 50", "multiple of 32"]),
        (lambda v, f: traffic(v, f, {"question": "a", "answer": "b"}), ["no answer in lines 1 to 1", "question"]),
    ],
)
def test_refused_before_the_first_stage(
    world: Path, tmp_path: Path, capsys: Capture, command: str, change: Change, expected: list[str]
) -> None:
    said = refused(world, tmp_path, capsys, change, command)
    assert all(words in said for words in expected), said


def test_a_target_that_gguf_cannot_hold(world: Path, tmp_path: Path, capsys: Capture) -> None:
    """Known from tokenizer.json; training would have ended before stage export said so."""
    shutil.copytree(world / "target", tmp_path / "target")
    path = tmp_path / "target" / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"normalizer": {"type": "Lowercase"}}))
    said = refused(world, tmp_path, capsys, lambda v, f: v["target"].update(model=str(f / "target")), "train")
    assert "export: " in said and "'Lowercase' cannot be exported" in said and "export.outtypes=[]" in said
    without = ("export.outtypes=[]", "speedup.backends=[pytorch]")
    assert tiny.call("check", tmp_path / "changed.yaml", *without) == 0
    assert tiny.call("train", tmp_path / "changed.yaml", "--until", "corpus", "--runs", tmp_path / "r") == 0
    recipe = load_recipe(tmp_path / "changed.yaml", without)
    run = Run(tmp_path / "r" / recipe.name, recipe)
    assert export(recipe, run) == [run.path("gguf")]  # the stage opens neither model
    assert read_result(run.path("gguf", "export.json"), ExportReport).files == []


def test_a_pair_whose_path_looks_like_a_value(world: Path, tmp_path: Path, capsys: Capture) -> None:
    """Runs of a sweep are called NAME-KEY=VALUE."""
    draft = tmp_path / "tiny-train.steps=20"
    shutil.copytree(world / "target", draft)
    said = tiny.shown(capsys, "check", world / "target", draft)
    assert "recipe" not in said and str(draft) in said


def test_without_llama_cpp(world: Path, tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    real = preflight.importlib.util.find_spec
    monkeypatch.setattr(
        preflight.importlib.util, "find_spec", lambda name, *rest: None if name == "llama_cpp" else real(name, *rest)
    )
    said = refused(world, tmp_path, capsys, lambda v, f: None, "train")
    assert "llama-cpp-python is not installed" in said and "speedup.backends=[pytorch]" in said


def test_processes_that_cannot_share_a_step(world: Path, tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setattr("distill.training.setup.process_count", lambda: 3)
    said = refused(world, tmp_path, capsys, lambda v, f: None, "check")
    assert "4 blocks cannot be shared evenly by 3 processes" in said


def test_what_a_check_says_of_the_corpus(world: Path, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps({"text": f"text {number}"}) + "\n" for number in range(1200)))
    sources = [{"kind": "jsonl", "path": str(path)}]
    said = tiny.shown(capsys, "check", world / "recipe.yaml", f"corpus.sources={json.dumps(sources)}")
    assert "many.jsonl: 1000 documents and more" in said and "not checked" in said and "beyond its first 1000" in said
    few = [
        {"kind": "text", "path": lines_of(tmp_path, f"{split}.txt", f"text of {split}"), "split": split}
        for split in ("train", "validation", "test")
    ]
    found = preflight.preflight(
        load_recipe(world / "recipe.yaml", [f"corpus.sources={json.dumps(few)}", "train.steps=1"])
    )
    assert len(found.lines) > 5, "of which a training shows the warning alone"
    assert [line.partition(",")[0] for line in found.warnings] == ["warning: 1 documents go to the test split"]


def test_a_store_that_a_run_holds_needs_no_room_again(world: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    """What is free is asked of the disk of the run, whose own shards are not counted twice."""
    recipe, asked = load_recipe(world / "recipe.yaml", ["corpus.tokens=1000000"]), list[Path]()
    (line,) = preflight.check_disk(recipe, 12)
    needed = float(line.split()[7]) * 1e6

    def usage(place: Path) -> Any:
        asked.append(place)
        return types.SimpleNamespace(free=needed / 2)

    monkeypatch.setattr(preflight.shutil, "disk_usage", usage)
    run = tmp_path / "runs" / "new"
    with pytest.raises(RunError, match=f"B more in {tmp_path}, but only"):
        preflight.check_disk(recipe, 12, run)
    (run / "teacher" / "train").mkdir(parents=True)
    with open(run / "teacher" / "train" / "shard-00000.safetensors", "wb") as shard:
        shard.truncate(round(needed * 0.6))  # a file of holes
    preflight.check_disk(recipe, 12, run)
    assert asked == [tmp_path, run]


def test_how_often_the_text_is_seen(world: Path, finished: Path, capsys: Capture) -> None:
    """Before a run by the most text that there can be, after it by the blocks; more than ten times is warned about."""
    check = (capsys, "check", world / "recipe.yaml")
    few = "epochs: about 1.1 over the answers to 12 prompts and given text"  # 8·4·64 ÷ (1500 + 12·32)
    assert f"\n{few}\n" in tiny.shown(*check)
    assert "\nwarning: epochs: about 108.7 over" in tiny.shown(*check, "train.steps=800")
    bounded = tiny.shown(*check, "train.steps=800", "train.acceptance={every: 10, patience: 2}")
    assert (
        f"\n{few.replace('1.1', '108.7')}; fewer if acceptance stops rising (train.acceptance.patience 2)\n" in bounded
    )
    trained, store = (
        json.loads((finished / name).read_text()) for name in ("training.json", "teacher/train/manifest.json")
    )
    assert trained["epochs"] == 8 * 4 / sum(store["shard_blocks"])
    assert 0 < trained["answers"] == store["answer_positions"] / store["scored_positions"] < 1
    assert f"{trained['epochs']:.1f} epochs of the training text, " in (finished / "log.txt").read_text()
    assert [Answers().count(4000), Answers().count(9), Answers(prompts=5).count(4000)] == [4000, 256, 5]


def test_the_first_records_of_a_hub_data_set(world: Path, capsys: Capture, monkeypatch: Patch) -> None:
    """Only a check without --offline reads them."""
    asked: list[str] = []

    def records(source: Source) -> Any:
        asked.append(source.path)
        yield from ((f"record {number}", {"content": f"text {number}"}) for number in range(1, 100))

    monkeypatch.setattr("distill.data.sources._hub", records)
    check = (capsys, "check", world / "recipe.yaml")
    text, content = (
        f"corpus.sources=[{{kind: hub, path: some/data, fields: {{text: {name}}}}}]" for name in ("text", "content")
    )
    assert "not checked: data set some/data (--offline)" in tiny.shown(*check, "--offline", text) and not asked
    assert "record 1 has no text in field `text` (it has: content)" in tiny.refused(*check, text)
    assert "some/data: 20 documents and more" in tiny.shown(*check, content)


# ── one large text ──


def test_a_large_text_has_all_splits(tmp_path: Path) -> None:
    text = "\n\n".join(f"Paragraph {number}: " + "word " * 100 for number in range(2000))
    (tmp_path / "book.txt").write_text(text)
    corpus = Corpus(sources=(Source(kind="text", path=str(tmp_path / "book.txt")),), validation=0.2, test=0.2)
    documents, dropped = read_documents(corpus)
    assert "".join(document.text for document in documents) == text and not dropped
    assert {document.split for document in documents} == {"train", "validation", "test"}
    assert all(PIECE <= len(document.text) <= 2 * PIECE for document in documents[:-1])
    assert all(document.text.startswith("Paragraph") for document in documents)
    (tmp_path / "book.txt").write_text(text + "\n\n" + "More. " * 20_000)
    grown, _ = read_documents(corpus)
    assert grown[: len(documents) - 1] == documents[:-1], "a file that grows keeps its pieces and their splits"


@pytest.mark.parametrize("text", ["", "short", "x" * 200, "ab\n" * 70, "x" * 15 + "\n\n" + "y" * 100])
def test_pieces_are_the_text(text: str) -> None:
    found = list(cut_text(text, 16))
    assert "".join(found) == text and all(len(piece) <= 32 for piece in found)
    assert len(found) == 1 or all(len(piece) >= 16 for piece in found[:-1])


def test_a_small_text_says_why_it_has_one_split(tmp_path: Path, world: Path, capsys: Capture) -> None:
    (tmp_path / "note.txt").write_text("A short text.")
    override = f"corpus.sources=[{{kind: text, path: {tmp_path / 'note.txt'}}}]"
    assert "at most 32,768 characters is one document" in tiny.refused(capsys, "check", world / "recipe.yaml", override)
