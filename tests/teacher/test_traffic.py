"""Served logs as a source: what a run reads of a growing file, and a run that goes on from its own draft."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import random
import shutil
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import chat_templates
import pytest
import tiny
import torch
from tiny import Capture, Patch

from distill.data import traffic
from distill.data.chat_template import ChatTemplate
from distill.data.recorder import TEXT, Writer
from distill.data.samples import read_prompts, read_samples
from distill.data.sources import read_documents, split_of
from distill.engines.torch.hugging_face import encode, load_tokenizer
from distill.errors import DataError
from distill.recipe import Chat, Source, load_recipe, parse_recipe
from distill.run import Run

torch.set_num_threads(1)

SHARES = {"validation": 0.2, "test": 0.3}


def served(count: int, seed: int) -> list[dict[str, Any]]:
    """Prompts and answers of made-up code, with some prompts that come twice."""
    draw = random.Random(seed)
    texts = [tiny.document(seed * 100 + index) for index in range(count)]
    lines = [{"prompt": text[:40], "answer": text[40 : 100 + draw.randrange(40)]} for text in texts]
    return [*lines, {**lines[0], "answer": "    return total\n", "finish_reason": "length"}]


def text_of(lines: list[Any]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def split_name(prompt: str) -> str:
    """The split of a prompt, worked out apart from the code under test."""
    name = f"question#{hashlib.sha256(prompt.strip().encode()).hexdigest()[:16]}"
    return split_of(name, SHARES["validation"], SHARES["test"])


def values_with(log: Path) -> dict[str, Any]:
    values = tiny.recipe_values(log.parent)
    values["corpus"] |= SHARES | {"tokens": 300}
    values["answers"] = {"prompts": 0, "new_tokens": 24, "prompt_tokens": 8, "traffic": str(log)}
    values["train"] |= {"steps": 4, "acceptance": None}  # the last weights, better or not
    values["name"] = "served"
    return values


@pytest.fixture(scope="module")
def log(world: Path) -> Path:
    """A recipe over a served log; the log is at the time of the first run as `first` leaves it."""
    path = world / "served.jsonl"
    torn = '{"prompt": "def torn(", "ans'
    path.write_text(text_of([*served(30, 1), "no object", {"prompt": "x"}]) + torn)
    tiny.write_recipe(world / "served.yaml", values_with(path))
    return path


def train(world: Path, runs: Path, *more: str) -> int:
    return tiny.call("train", world / "served.yaml", "--runs", runs, *more)


@pytest.fixture(scope="module")
def first(world: Path, log: Path) -> Iterator[Path]:
    """A finished run on the log; the log then gains the rest of its torn line and 20 more."""
    with tiny.one_thread():
        assert train(world, world / "served-runs", "--until", "train") == 0
        with open(log, "a") as handle:
            handle.write('wer": "self):\\n    return 1\\n"}\n' + text_of(served(20, 2)))
        yield world / "served-runs" / "served"


@pytest.fixture
def runs(first: Path, tmp_path: Path) -> Path:
    shutil.copytree(first.parent, tmp_path / "runs")
    return tmp_path / "runs"


def pin_read(run: Path) -> dict[str, Any]:
    """What a run noted of the lines that it read."""
    return dict(json.loads((run / "answers" / "traffic.json").read_text()))


def learnt_pairs(run: Path) -> list[tuple[list[int], list[int]]]:
    """Prompt and answer of every answer that a run learns from."""
    samples = [one for path in sorted(run.glob("answers/train/*.arrow")) for one in read_samples(path, "answers")]
    return [(one.prompt, one.answer) for one in samples]


def train_pairs(tokenizer: Any, lines: list[dict[str, Any]]) -> list[tuple[list[int], list[int]]]:
    """The same of served lines, uncut."""
    own = [line for line in lines if split_name(line["prompt"]) == "train"]
    ends = [[] if "finish_reason" in line else [tokenizer.eos_token_id] for line in own]
    return [
        (encode(tokenizer, line["prompt"]), encode(tokenizer, line["answer"]) + end)
        for line, end in zip(own, ends, strict=True)
    ]


def test_a_run_learns_from_what_stood_there(world: Path, log: Path, first: Path) -> None:
    tokenizer = load_tokenizer(str(world / "target"))
    lines = served(30, 1)
    pinned = pin_read(first)
    whole = text_of([*lines, "no object", {"prompt": "x"}]).encode()
    expected = {"lines": 33, "bytes": len(whole), "sha256": hashlib.sha256(whole).hexdigest()}
    assert pinned["lines"] == 33 and expected.items() <= pinned["parts"][0].items()
    expected = train_pairs(tokenizer, lines)
    assert learnt_pairs(first) == [(p, a[: 64 - len(p)]) for p, a in expected]
    cut = sum(len(p) + len(a) > 64 for p, a in expected)
    left = {name: count for name, count in pinned["left"].items() if name != traffic.REPEATED}
    assert (pinned["train"], pinned["bad"], left) == (len(expected), 2, {traffic.CUT: cut} if cut else {})
    assert not list(first.glob("answers/train/0*"))  # answers.prompts is 0: nothing was generated
    for split in ("validation", "test"):
        prompts = read_samples(first / "answers" / f"prompts-{split}.arrow", "answers")
        own = {line["prompt"]: None for line in lines if split_name(line["prompt"]) == split}
        assert [one.prompt for one in prompts] == [encode(tokenizer, prompt) for prompt in own] and prompts
    log_text = (first / "log.txt").read_text()
    assert "1 bad lines left out, first line 32: a JSON object is needed, got text" in log_text
    assert "1 bad lines left out, first line 33: no text in field `answer` (it has: prompt)" in log_text
    assert f"line 34 of {log} has no newline at its end and was not read" in log_text


def test_growth_does_not_supersede_and_held_out_prompts_are_measured(
    world: Path, log: Path, runs: Path, capsys: Capture
) -> None:
    run = runs / "served"
    before = tiny.contents(run / "answers")
    said = tiny.told(capsys, "train", world / "served.yaml", "--runs", runs, "--until", "eval")
    assert "answers: up to date" in said and "train: up to date" in said
    assert tiny.contents(run / "answers") == before
    report = json.loads((run / "eval.json").read_text())
    prompts = [one.prompt for one in read_samples(run / "answers" / "prompts-test.arrow", "answers")]
    assert prompts and report["domains"]["answers"]["after"]["prompts"] == 6  # eval.prompts
    first = read_prompts(Run(run, load_recipe(run / "config.yaml")), "test")
    assert [one.prompt for one in first[: len(prompts)]] == prompts and len(first) > len(prompts)
    log.rename(log.with_suffix(".gone"))  # the logs of a finished run may go
    try:
        assert train(world, runs, "--until", "train") == 0
    finally:
        log.with_suffix(".gone").rename(log)


def test_a_refreshed_run_goes_on_from_the_draft(world: Path, log: Path, runs: Path, capsys: Capture) -> None:
    old = tiny.contents(runs / "served", ".lock")
    assert train(world, runs, "--refresh", "--until", "train") == 0
    said = capsys.readouterr().err
    assert str(runs / "served.1") in said and "generation 2: starts from served.1/draft, without cuts" in said
    assert tiny.contents(runs / "served.1", ".lock") == old
    run = runs / "served"
    assert tiny.digest(run / "cut" / "model.safetensors") == tiny.digest(runs / "served.1/draft/model.safetensors")
    assert tiny.digest(run / "draft" / "model.safetensors") != tiny.digest(run / "cut" / "model.safetensors")
    tokenizer = load_tokenizer(str(world / "target"))
    lines = [{"prompt": "def torn("}, *served(20, 2)]
    expected = [encode(tokenizer, line["prompt"]) for line in lines if split_name(line["prompt"]) == "train"]
    found, before = learnt_pairs(run), learnt_pairs(runs / "served.1")
    assert [prompt for prompt, _ in found[: len(expected)]] == expected
    again = found[len(expected) :]
    assert len(again) == min(len(expected), len(before)) > 5 and all(pair in before for pair in again), "old answers"
    assert json.loads((run / "training.json").read_text())["rate"] == 1.5e-5, "as a whole donor's, not as a cut one's"
    pinned = pin_read(run)
    assert (pinned["start_line"], pinned["lines"]) == (33, 55) and pinned["parts"][0]["bytes"] == log.stat().st_size
    parent = json.loads((run / "parent.json").read_text())
    cut = tiny.digest(run / "cut" / "model.safetensors")
    assert (parent["generation"], parent["files"]["model.safetensors"]) == (2, cut)
    assert tiny.call("report", "served", "--runs", runs) == 0
    for page in ("report.html", "draft/README.md"):
        text = (run / page).read_text()
        assert parent["digest"] in text and "served.1" in text
    # The same command again finds all done; nothing new stands in the file, so there is nothing to refresh on.
    again = (capsys, "train", world / "served.yaml", "--runs", runs)
    assert tiny.told(*again, "--until", "train").count(": up to date\n") == 5
    before = tiny.contents(runs)
    assert "no new line after line 55" in tiny.refused(*again, "--refresh") and tiny.contents(runs) == before


def test_a_retuned_target_learns_no_old_answers(
    world: Path, log: Path, runs: Path, tmp_path: Path, capsys: Capture
) -> None:
    """They are another model's. Without prompts to answer there must be new lines, and that is said before a rename."""
    shutil.copytree(world / "target", tmp_path / "target")
    (tmp_path / "target" / "README.md").write_text("tuned again")
    tuned = (f"target.model={tmp_path / 'target'}", "--refresh", "--until", "train")
    assert train(world, runs, *tuned) == 0
    assert "the served answers of served.1 are those of another target" in capsys.readouterr().err
    pairs, old = learnt_pairs(runs / "served"), learnt_pairs(runs / "served.1")
    assert pairs and not any(pair in old for pair in pairs)
    (tmp_path / "target" / "README.md").write_text("tuned once more")
    before = tiny.contents(runs)
    said = tiny.refused(capsys, "train", world / "served.yaml", "--runs", runs, *tuned)
    assert "no new line after line 55" in said and tiny.contents(runs) == before
    assert train(world, runs, *tuned, "answers.prompts=6") == 0
    pinned = pin_read(runs / "served")
    assert pinned["start_line"] == pinned["lines"] == 55 and learnt_pairs(runs / "served")


def test_a_log_too_short_for_the_held_out_splits(world: Path, tmp_path: Path, capsys: Capture) -> None:
    """If nothing else is measured, the check refuses the log. Otherwise training would end first."""
    values = values_with(tmp_path / "short.jsonl") | {"name": "short"}
    values["corpus"] |= {"sources": [{"kind": "target", "questions": 8}], "tokens": 0}
    values["train"] |= {"acceptance": {"every": 2, "prompts": 2}}
    lines = [line for line in served(12, 8) if split_name(line["prompt"]) == "train"]
    (tmp_path / "short.jsonl").write_text(text_of(lines))
    said = tiny.refused(capsys, "check", tiny.write_recipe(world / "short.yaml", values))
    assert (
        f"none of its {len(lines)} lines falls into the validation split" in said and "raise corpus.validation" in said
    )


def test_a_third_generation(world: Path, log: Path, runs: Path, tmp_path: Path, capsys: Capture) -> None:
    """With a file of its own, which is new as a whole; and after a kill inside the answers stage."""
    assert train(world, runs, "--refresh", "--until", "train") == 0
    other = tmp_path / "other.jsonl"
    other.write_text(text_of(served(12, 3)))
    override = f"answers.traffic={other}"
    assert train(world, runs, override, "--refresh", "--until", "corpus") == 0
    assert json.loads((runs / "served" / "parent.json").read_text())["generation"] == 3
    assert sorted(path.name for path in runs.iterdir()) == ["served", "served.1", "served.2"]

    def grown(*arguments: Any) -> None:  # between the key and the reading
        with open(other, "a") as handle:
            handle.write(text_of(served(9, 4)))
        traffic.write_traffic(*arguments)
        raise KeyboardInterrupt

    with mock.patch("distill.teacher.answers.write_traffic", grown):
        assert train(world, runs, override, "--until", "train") == 130
    assert train(world, runs, override, "--until", "train") == 0
    assert "answers: resumes" in capsys.readouterr().err
    pinned = pin_read(runs / "served")
    assert (pinned["start_line"], pinned["lines"]) == (0, 13)
    assert train(world, runs, override, "--until", "train") == 0  # the growth is for the next refresh
    assert train(world, runs, override, "--refresh", "--until", "answers") == 0
    assert pin_read(runs / "served")["start_line"] == 13


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("answers={prompts: 4, new_tokens: 24, prompt_tokens: 8}",), "set answers.traffic"),
        (("cut.layers=1",), "--refresh makes no cuts"),
        (("train.sparsity={mlp_width: 32}",), "--refresh makes no cuts"),
        (("name=other",), "no finished draft"),
        ((), "finish it"),
    ],
)
def test_refusals(world: Path, log: Path, runs: Path, capsys: Capture, more: tuple[str, ...], words: str) -> None:
    if words == "finish it":
        (runs / "served" / "stages" / "train.json").unlink()
    before = tiny.contents(runs)
    said = tiny.refused(capsys, "train", world / "served.yaml", "--runs", runs, *more, "--refresh")
    assert words in said and tiny.contents(runs) == before


def test_rotated_and_bad_files(world: Path, runs: Path, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "log.jsonl"
    recipe = tiny.write_recipe(world / "rotated.yaml", values_with(path) | {"name": "rotated"})
    call = ("train", recipe, "--runs", runs, "--until", "train")
    assert "cannot be read: No such file" in tiny.refused(capsys, *call)
    path.write_text("")
    assert f"{path}: the file is empty" in tiny.refused(capsys, *call)
    path.write_text('{"prompt": 3, "answer": "a"}\n\n[1]\n')
    said = tiny.refused(capsys, *call)
    assert "1 bad lines left out, first line 1: no text in field `prompt` (it has: prompt, answer)" in said
    path.write_text(text_of(served(20, 5)))

    def rotated(*arguments: Any) -> None:  # between the key and the reading
        path.write_text(text_of(served(20, 6)))
        traffic.write_traffic(*arguments)

    with mock.patch("distill.teacher.answers.write_traffic", rotated):
        said = tiny.refused(capsys, *call)
    assert "was it rotated?" in said and "the same command reads the present file" in said
    assert tiny.call(*call) == 0
    with open(path, "a") as handle:
        handle.write("{}\n")
    assert "all 1 new lines" in tiny.refused(capsys, *call, "--refresh")
    path.write_text(text_of(served(30, 7)))
    said = tiny.refused(capsys, *call, "--refresh")
    assert "no longer begins with the 21 lines" in said and "answers.traffic=" in said
    assert not (runs / "rotated.1").exists()


def test_a_folder_of_recorded_files(world: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    """What `distill record` wrote is read without loss, and a refresh reads what came since, in old and new files; a
    file that was deleted meanwhile had been read."""
    folder, lines = tmp_path / "recorded", served(26, 9)
    folder.mkdir()
    monkeypatch.setattr("os.fsync", lambda file: None)
    monkeypatch.setattr("distill.data.recorder.FILE_BYTES", 1500)
    writer = Writer(folder, [])

    def record(some: list[dict[str, Any]]) -> None:
        for line in some:
            choice = {"text": line["answer"], "finish_reason": line.get("finish_reason", "stop")}
            request = json.dumps({"prompt": line["prompt"]}).encode()
            writer.take(TEXT, request, json.dumps({"choices": [choice]}).encode())

    def read(run: Path, new: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What the run pinned, part by part, where it learnt from these lines."""
        expected = train_pairs(load_tokenizer(str(world / "target")), new)
        found, count = learnt_pairs(run), len(expected)  # a refreshed run's, and then as many of its parent's
        assert found[:count] == [(prompt, answer[: 64 - len(prompt)]) for prompt, answer in expected] and expected
        assert len(found[count:]) == (min(count, len(learnt_pairs(parent))) if parent.exists() else 0)
        pinned = pin_read(run)
        assert pinned["path"] == str(folder) and pinned["lines"] - pinned["start_line"] == len(new)
        return [{name: part[name] for name in ("path", "start_line", "lines")} for part in pinned["parts"]]

    record(lines[:14])
    recipe = tiny.write_recipe(world / "recorded.yaml", values_with(folder) | {"name": "recorded"})
    assert tiny.call("check", recipe) == 0 and "14 lines" in capsys.readouterr().out
    call = ("train", recipe, "--runs", tmp_path / "runs", "--until", "train")
    run, parent = tmp_path / "runs" / "recorded", tmp_path / "runs" / "recorded.1"
    assert tiny.call(*call) == 0
    first = read(run, lines[:14])
    assert len(first) == 2 and all(part["start_line"] == 0 for part in first)
    record(lines[14:26])  # the third file begins, and a fourth
    min(folder.iterdir()).unlink()
    assert tiny.call(*call, "--refresh") == 0
    second = read(run, lines[14:26])
    paths = [str(path) for path in sorted(folder.iterdir())]
    assert [part["path"] for part in second] == paths and len(paths) == 3 and first[0]["path"] not in paths
    assert second[0] == {**first[1], "start_line": first[1]["lines"], "lines": second[0]["lines"]}
    assert second[0]["lines"] > first[1]["lines"] and not second[1]["start_line"]
    assert "has no new line" in tiny.refused(capsys, *call, "--refresh")
    damaged = Path(paths[0])
    damaged.write_bytes(b"{}" + damaged.read_bytes())
    assert f"{damaged} no longer begins with the {second[0]['lines']} lines" in tiny.refused(capsys, *call, "--refresh")
    writer.close()


def test_a_folder_without_files_and_with_bad_lines(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no "):
        traffic.pin_of(tmp_path)
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(DataError, match=r"its \*.jsonl files are empty\n.* then `again` reads"):
        raise traffic.no_answers(traffic.Sorted(), traffic.pin_of(tmp_path), "`again`")
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "a", "answer": "b"}\n')
    (tmp_path / "b.jsonl").write_text('{}\n{"prompt": "a", "answer": "b"}\n{"pro')
    (tmp_path / "c.txt").write_text("other")
    pin = traffic.pin_of(tmp_path)
    found = list(traffic.read_lines(pin))
    assert [line.number for line in found if isinstance(line, traffic.Line)] == [1, 2, 4]  # names of answers stay apart
    assert found[2] == traffic.BadLine("b.jsonl, line 1", "no text in field `prompt` (it has: none)")
    assert "line 3 of" in str(traffic.unfinished_line(pin)) and traffic.first_lines(tmp_path, 3).endswith(b"\n{}\n")
    assert list(traffic.read_lines(traffic.pin_of(tmp_path, pin))) == []
    assert traffic.pin_of(tmp_path, pin)["start_line"] == 4
    assert traffic.pin_of(tmp_path / "b.jsonl", pin)["start_line"] == 2  # a file of a folder that was read


def test_a_refresh_killed_between_its_renames(world: Path, log: Path, runs: Path, monkeypatch: Patch) -> None:
    replace = os.replace

    def killed(source: Any, target: Any) -> None:
        replace(source, target)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("distill.pipeline.running.os.replace", killed)
        # Only the second half of `refresh` may fail: parent.json itself is written by files.py with the same function.
        patch.setattr("distill.pipeline.running.write_json", lambda path, value: path.write_text(json.dumps(value)))
        assert train(world, runs, "--refresh", "--until", "cut") == 130
    assert not (runs / "served").exists() and (runs / "served.1").exists()
    assert train(world, runs, "--until", "cut") == 0
    assert json.loads((runs / "served" / "parent.json").read_text())["run"] == "served.1"
    assert (runs / "served" / "cut" / "model.safetensors").exists()
    assert not [path for path in runs.iterdir() if path.name.startswith(".")]


def test_an_altered_parent_is_refused(world: Path, log: Path, runs: Path, capsys: Capture) -> None:
    assert train(world, runs, "--refresh", "--until", "teacher") == 0
    path = runs / "served.1" / "draft" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))
    said = tiny.refused(capsys, "train", world / "served.yaml", "--runs", runs, "--until", "cut")
    assert "has changed since this run's refresh began" in said


@pytest.mark.parametrize(
    ("more", "expected"),
    [("", None), (" \r", None), ('{"a": 1}', "line 2 of"), ('{"a": 1}\n', None), ('{"a": 1}\n{"b"', None)],
)
def test_a_last_line_without_a_newline_is_named(tmp_path: Path, more: str, expected: str | None) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("{}\n" + more)
    found = traffic.unfinished_line({"parts": [{"path": str(path), "bytes": 3, "lines": 1}]})
    assert found is None if expected is None else found is not None and found.startswith(expected)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 30])
def test_measure_counts_whole_lines(tmp_path: Path, size: int) -> None:
    path, text = tmp_path / "x", b"one\n\nthree\nfour and more\nfive"[:size]
    path.write_bytes(text)
    whole = text[: text.rfind(b"\n") + 1]
    found = traffic.measure(path)
    assert found == {"bytes": len(whole), "lines": whole.count(b"\n"), "sha256": hashlib.sha256(whole).hexdigest()}
    path.write_bytes(text + b"more\n")
    assert traffic.begins_with(path, found)
    path.write_bytes(b"x" + text[1:])
    assert traffic.begins_with(path, found) == (not whole)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ("{", "not JSON"),
        ("3", "got number"),
        ('{"answer": "a"}', "field `prompt` (it has: answer)"),
        ('{"prompt": "a", "answer": ""}', "an empty answer"),
        ('{"prompt": "", "answer": "a"}', "an empty prompt"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "at least a question and an answer"),
        ('{"messages": "a"}', "at least a question"),
        ('{"prompt": "a", "answer": "b", "thinking": "c"}', "a field `thinking` that is not a message's"),
        ('{"prompt": "a", "answer": "b", "finish_reason": "content_filter"}', "a `finish_reason` of another kind"),
        ('{"prompt": "a", "answer": "b", "finish_reason": 5}', "a `finish_reason` of another kind"),
        ('{"prompt": "a", "answer": "b", "completion_tokens": "9"}', "`completion_tokens` that are not a whole number"),
        ('{"prompt": "a", "answer": "b", "usage": 9}', "`completion_tokens` that are not a whole number"),
        (
            '{"prompt": "a", "answer": "b", "usage": {"completion_tokens_details": {"reasoning_tokens": 9}}}',
            "thinking that the server hides",
        ),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]}',
            "an answer of weight 0",
        ),
        ('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "reasoning": "b"}]}', "an empty ans"),
        ('{"messages": [{"role": "user", "content": ["a"]}, {"role": "assistant"}]}', "content is not text"),
        ('{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}', "the user's, not"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "tools": "x"}',
            "`tools` that are not a list of objects",
        ),
    ],
)
def test_bad_lines(raw: str, words: str) -> None:
    found = traffic.parse_line(raw.encode(), 5)
    assert isinstance(found, str) and words in found
    assert isinstance(traffic.parse_line(b"\xff\xfe", 1), str)


def test_messages_go_through_the_chat_template(world: Path) -> None:
    tokenizer = load_tokenizer(str(world / "target"))

    def encoded(left: Any = None, **more: Any) -> Any:
        line = traffic.parse_line(json.dumps(more).encode(), 1)
        assert isinstance(line, traffic.Line)
        template = ChatTemplate(tokenizer, Chat()) if tokenizer.chat_template else None
        return traffic.encode_line(line, tokenizer, template, left)

    messages = [{"role": "user", "content": "total"}, {"role": "assistant", "content": " + 1"}]
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        encoded(messages=messages)
    turn = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    tokenizer.chat_template = turn + "{% if add_generation_prompt %}<assistant>{% endif %}"
    expected = encode(tokenizer, "<user>total\n<assistant>"), [*encode(tokenizer, " + 1"), tokenizer.eos_token_id]
    assert encoded(messages=messages) == expected
    tokenizer.chat_template += "{% if quiet %}!{% endif %}"
    assert encoded(messages=messages) == expected
    left: Counter[str] = Counter()
    ids = encoded(left, messages=messages, chat_template_kwargs={"quiet": 1, "x": 2})
    assert ids == (encode(tokenizer, "<user>total\n<assistant>!"), expected[1])
    assert left == {"requests with the template argument `x`, which the template lacks": 1}
    with pytest.raises(ValueError, match="`documents` that the target's chat template does not write"):
        encoded(messages=messages, documents=[{"a": 1}])
    tokenizer.chat_template = "{{ raise_exception('no users') }}"
    with pytest.raises(ValueError, match=r"refuses it \(no users\)"):
        encoded(messages=messages)
    cut = encoded(prompt="a", answer="b", finish_reason="length")
    assert cut == (encode(tokenizer, "a"), encode(tokenizer, "b"))


def test_long_prompts_and_answers(world: Path) -> None:
    recipe = parse_recipe(values_with(world / "served.jsonl"), "the recipe")
    tokenizer = load_tokenizer(str(world / "target"))
    texts = [tiny.document(3)[:length] for length in (20, 60, 200, 2000)]
    texts += [tiny.document(number)[:length] for number in (4, 5) for length in (20, 60, 2000)]
    lines = [traffic.Line(number, text, tiny.document(9), True) for number, text in enumerate(texts)]
    found = traffic.Sorted()
    samples = [*traffic.sort_lines(recipe, lines, tokenizer, found)]
    trained = [one for one in samples if one.split == "train"]
    for answer in trained:
        assert len(answer.prompt) + len(answer.answer) == 64 and not answer.ended  # cut where the block ends
        assert len(answer.answer) >= 2
    whole = {line.name: encode(tokenizer, str(line.prompt)) for line in lines}
    for one in samples:  # a long prompt keeps its last tokens
        assert whole[one.id.partition("@")[0]][-len(one.prompt) :] == one.prompt
    lengths = {line.name: len(encode(tokenizer, str(line.prompt))) for line in lines}
    limits = {"train": 62, "validation": 64 - 24, "test": 64 - 24}
    long = sum(lengths[line.name] > limits[split_name(str(line.prompt))] for line in lines)
    kept = [one.id.partition("@")[0] for one in samples]
    left = {traffic.BEGUN: long, traffic.CUT: len(trained)}
    assert sorted(kept) == sorted(lengths) and found.left == left and min(left.values()) > 0


def test_a_conversation_is_in_one_split(world: Path) -> None:
    """Its first question decides, in the corpus and in traffic, as messages and as rendered text."""
    values = values_with(world / "served.jsonl")
    values["corpus"] |= {"block": 512, "validation": 0.3, "test": 0.3}
    recipe = parse_recipe(values, "the recipe")
    tokenizer = chat_templates.dress(copy.deepcopy(load_tokenizer(str(world / "target"))), "qwen-3")
    template = ChatTemplate(tokenizer, recipe.chat)
    splits = set()
    for number in range(12):
        first = {"role": "user", "content": f"total {number}?"}
        said, second = {"role": "assistant", "content": "It is."}, {"role": "user", "content": f"and {number * 7}?"}
        talks = [[first], [first, said, second], [first, {**said, "content": "No."}, second]]
        raw = [{"messages": [*talk, said]} for talk in talks]
        raw += [{"prompt": template.text(talk), "answer": "It is."} for talk in talks]
        lines = [traffic.parse_line(json.dumps(one).encode(), at) for at, one in enumerate(raw)]
        found = traffic.Sorted()
        held = {one.split for one in traffic.sort_lines(recipe, lines, tokenizer, found)}
        assert not found.bad and set(found.left) <= {traffic.REPEATED}
        source = world / "talks.jsonl"
        source.write_text("".join(json.dumps({"messages": [*talk, said]}) + "\n" for talk in talks))
        corpus = recipe.corpus.model_copy(update={"sources": (Source(kind="jsonl", path=str(source)),)})
        documents, _ = read_documents(corpus, ())
        assert len(documents) == 2 and {one.split for one in documents} == held and len(held) == 1
        splits |= held
    assert splits == {"train", "validation", "test"}


@pytest.mark.parametrize(
    ("prompt", "answer", "more", "fault"),
    [
        ("2 + 2 =", "2 + 2 = 4", {"usage": {"completion_tokens": 2}}, "begins with its whole prompt"),
        ("2 + 2 =", "2 + 2 = 4", {}, None),  # nothing counted it
        ("2 + 2 =", "2 + 2 = 4", {"completion_tokens": 9}, None),
        ("total", "x " * 40, {"completion_tokens": 9}, "the server counted fewer tokens"),
    ],
)
def test_a_prompt_that_a_server_repeats(
    world: Path, prompt: str, answer: str, more: dict[str, Any], fault: str | None
) -> None:
    tokenizer = load_tokenizer(str(world / "target"))
    line = traffic.parse_line(json.dumps({"prompt": prompt, "answer": answer, **more}).encode(), 1)
    assert isinstance(line, traffic.Line) and not line.unread
    with contextlib.nullcontext() if fault is None else pytest.raises(ValueError, match=fault):
        traffic.encode_line(line, tokenizer, None)


def test_a_chat_that_repeats_its_rendered_prompt(world: Path) -> None:
    """As it stands, or without its special tokens."""
    tokenizer = chat_templates.dress(copy.deepcopy(load_tokenizer(str(world / "target"))), "qwen-3")
    template = ChatTemplate(tokenizer, Chat())
    asked = {"role": "user", "content": "What is two and two?"}
    for said in (template.text([asked]) + "Four", "user\nWhat is two and two?\nassistant\nFour"):
        line = traffic.parse_line(json.dumps({"messages": [asked, {"role": "assistant", "content": said}]}).encode(), 1)
        assert isinstance(line, traffic.Line)
        with pytest.raises(ValueError, match="begins with its whole prompt"):
            traffic.encode_line(line, tokenizer, template)


def test_a_log_is_never_held_as_a_whole(world: Path) -> None:
    """One file is written while lines are read; of samples some are alive."""
    recipe, tokenizer = (
        parse_recipe(values_with(world / "served.jsonl"), "the recipe"),
        load_tokenizer(str(world / "target")),
    )
    lines = (traffic.Line(number, f"prompt {number}", "total" * 9, True) for number in range(400))
    alive: list[weakref.ref[Any]] = []

    def watched(samples: Any) -> Iterator[Any]:
        for sample in samples:
            alive.append(weakref.ref(sample))
            yield sample
            del sample
            assert sum(one() is not None for one in alive[:-2]) == 0

    found = traffic.Sorted()
    for sample in watched(traffic.sort_lines(recipe, lines, tokenizer, found)):
        del sample
    assert len(alive) == found.samples.total() == 400 and not found.bad


def test_thinking_that_a_server_hides(world: Path) -> None:
    tokenizer = load_tokenizer(str(world / "target"))
    raw: dict[str, Any] = {"prompt": "def f(", "answer": "x): return x"}
    for tokens, fits in ((12, True), (60, False)):
        line = traffic.parse_line(json.dumps(raw | {"completion_tokens": tokens}).encode(), 1)
        assert isinstance(line, traffic.Line)
        with contextlib.nullcontext() if fits else pytest.raises(ValueError, match="the server may hide thinking"):
            traffic.encode_line(line, tokenizer, None)
