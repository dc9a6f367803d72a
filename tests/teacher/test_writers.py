"""Writers of answers on this machine: refilled rows, groups, journals, GGUF files, conversations."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from question_worlds import scripted
from tiny import Capture, Patch
from toys import KINDS, random_prompts, toy
from writing_worlds import Interrupted, answer_lines, begin, interrupt_after

from distill.data.texts import Answer, Prompt, Reply, Request, drop_reason, read_answers
from distill.decoding.batch import continue_prompts, refill
from distill.decoding.rules import stop_before
from distill.engines.loaded import BatchedTorchModel
from distill.engines.torch.model import TorchModel
from distill.errors import DataError, RecipeError
from distill.files import read_json
from distill.recipe import parse_recipe
from distill.sampler import Sampler
from distill.teacher.answers import AnswerRules, answers, groups_of, open_writer
from distill.teacher.writers import GgufWriter, TorchWriter

torch.set_num_threads(1)

V = 61
SAMPLERS = [Sampler(0.0), Sampler(1.0, 20, 0.95, 0.01), Sampler(0.8, 0, 1.0, 0.0, 1.3)]


def requests(count: int, seed: int, longest: int = 12) -> list[Request]:
    prompts = random_prompts(count, V, seed, longest=longest)
    return [Request(f"r{n}", ids, 11 * n, 3 + 7 * n % 23) for n, ids in enumerate(prompts)]


def written(model: Any, asked: list[Request], *rest: Any) -> dict[str, Reply]:
    found = {reply.id: reply for reply in refill(model, deque(asked), *rest)}
    assert len(found) == len(asked)
    return found


# ── refilled rows ──


@pytest.mark.parametrize(("kind", "sampler"), list(zip(KINDS, [*SAMPLERS, SAMPLERS[1]], strict=True)))
def test_refilled_rows_equal_each_text_alone(kind: str, sampler: Sampler) -> None:
    """fp32; each text has its own limit, so rows end at different steps and are filled again."""
    model, asked, ends = toy(kind), requests(9, seed=3), range(5, 12)
    together = written(BatchedTorchModel(model, 3, V), asked, sampler, ends)
    for request in asked:
        alone = written(TorchModel(model, V), [request], sampler, ends)[request.id]
        assert together[request.id] == alone
        assert len(alone.ids) <= request.limit and alone.ended == (alone.ids[-1] in ends)
        if sampler.repetition_penalty == 1:
            batch = continue_prompts(model, [request.ids], sampler, request.limit, [request.seed], ends)
            assert alone.ids == batch[0], "the same seeds mean the same text in every loop"
    assert written(BatchedTorchModel(model, 4, V), asked[::-1], sampler, ends) == together
    assert {reply.ended for reply in together.values()} == {True, False}


def test_long_prompts_are_read_in_chunks(monkeypatch: Patch) -> None:
    model, asked = toy(), requests(6, seed=4, longest=40)
    whole = written(BatchedTorchModel(model, 3, V), asked, Sampler(), [])
    monkeypatch.setattr("distill.decoding.batch.CHUNK", 7)
    assert written(BatchedTorchModel(model, 3, V), asked, Sampler(), []) == whole
    assert max(len(request.ids) for request in asked) > 4 * 7


def test_requests_that_come_later_are_answered() -> None:
    model, (first, *rest) = toy(), requests(5, seed=5)
    waiting, order = deque([first]), []
    for reply in refill(BatchedTorchModel(model, 2, V), waiting, Sampler(), []):
        order.append(reply.id)
        waiting.extend(rest[:2])
        rest = rest[2:]
    assert sorted(order) == [f"r{n}" for n in range(5)] and order[0] == "r0"


def test_a_stop_string_ends_a_text_before_it() -> None:
    model, asked = toy(), [Request("r", [4, 9, 2], 1, 30)]
    free = written(TorchModel(model, V), asked, Sampler(), [])["r"]

    def bytes_of(token: int) -> bytes:
        return f"<{token}>".encode()

    text = "".join(f"<{token}>" for token in free.ids)
    wanted = f"{free.ids[6]}><{free.ids[7]}"  # begins and ends within tokens
    place = text.index(wanted)
    stop = stop_before(bytes_of, [wanted])
    stopped = written(TorchModel(model, V), asked, Sampler(), [], None, stop)["r"]
    assert stopped.ended and free.ids[: len(stopped.ids)] == stopped.ids
    assert len("".join(f"<{token}>" for token in stopped.ids)) <= place


def test_a_request_that_the_context_cannot_hold() -> None:
    model = toy()
    with pytest.raises(ValueError, match="do not fit a context of 160"):
        written(TorchModel(model, V), [Request("r", [1] * 150, 0, 12)], Sampler(), [])
    assert len(written(TorchModel(model, V), [Request("r", [1] * 150, 0, 11)], Sampler(0.0), [])["r"].ids) == 11


# ── groups and files ──


def test_groups_are_a_function_of_the_prompts(tmp_path: Path) -> None:
    prompts = [Prompt(f"p{n}", [1] * (1 + n * 7 % 5)) for n in range(23)]
    groups = groups_of(prompts, 5, tmp_path)
    assert [len(group.prompts) for group in groups] == [5, 5, 5, 5, 3]
    flat = [item for group in groups for item in group.prompts]
    assert sorted(number for number, _ in flat) == list(range(23))
    lengths = [len(prompt.ids) for _, prompt in flat]
    assert lengths == sorted(lengths, reverse=True)
    assert all(prompts[number] is prompt for number, prompt in flat)


def test_answers_are_read_in_prompt_order(world: Path, tmp_path: Path) -> None:
    recipe, run = begin(world, tmp_path, 13)
    answers(recipe, run)
    assert [one.id for one in read_answers(run, "train")] == [f"p{n}" for n in range(13)]
    assert [line["number"] for line in answer_lines(run)] != list(range(13)), "files are sorted by length"
    manifest = read_json(run.path("answers", "manifest.json"))
    assert manifest["answers"] == 13 and manifest["groups"] == 4 and manifest["writer"] == "transformers"
    assert manifest["answer_tokens"] == sum(len(line["answer"]) for line in answer_lines(run))


def test_old_files_of_answers_load() -> None:
    old = Answer("a", [1], [2, 3], False)
    assert old.ended and not drop_reason(old)
    assert drop_reason(Answer("a", [1], [2], False)) == "empty"
    assert drop_reason(Answer("a", [1], [2] * 9, True)) == "looping"
    assert drop_reason(Answer("a", [1], [2] * 9, True, dropped="truncated")) == "truncated"


def test_interrupted_answers_end_in_equal_bytes(world: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    """In bfloat16, where the texts of other rows matter; test_resume.py kills processes, in fp32."""
    overrides = ("target.dtype=bfloat16", "answers.group=6", "answers.batch=3")
    recipe, whole = begin(world, tmp_path / "whole", 20, *overrides)
    answers(recipe, whole)
    _, run = begin(world, tmp_path / "run", 20, *overrides)
    for replies in (3, 8, 9):
        with monkeypatch.context() as patch:
            interrupt_after(patch, TorchWriter, replies)
            with pytest.raises(Interrupted):
                answers(recipe, run)
    answers(recipe, run)
    assert tiny.contents(run.path("answers")) == tiny.contents(whole.path("answers"))


def test_truncated_answers_are_dropped_by_choice(world: Path, tmp_path: Path) -> None:
    recipe, run = begin(world, tmp_path, 6, "answers.keep_truncated=false")
    answers(recipe, run)
    cut = [line for line in answer_lines(run) if not line["ended"]]
    assert cut and all(line["dropped"] == "truncated" for line in cut)
    assert read_json(run.path("answers", "manifest.json"))["dropped"]["truncated"] == len(cut)


def test_prompts_of_one_name_are_refused(world: Path, tmp_path: Path) -> None:
    recipe, run = begin(world, tmp_path, 4)
    path = run.path("corpus", "prompts-train.jsonl")
    path.write_text(path.read_text() + path.read_text().splitlines()[0] + "\n")
    with pytest.raises(DataError, match="1 prompts have the name of another one, such as p0"):
        answers(recipe, run)


def test_a_model_that_takes_no_rows_is_asked_batch_by_batch(
    world: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    recipe, run = begin(world, tmp_path / "rows", 9)
    answers(recipe, run)

    def refuse(*_: Any) -> None:
        raise ValueError("a window of 8")

    monkeypatch.setattr("distill.teacher.writers.BatchedTorchModel", refuse)
    _, other = begin(world, tmp_path / "batches", 9)
    answers(recipe, other)
    assert "batches were not refilled: a window of 8" in capsys.readouterr().err
    assert answer_lines(other) == answer_lines(run)
    recipe, penal = begin(world, tmp_path / "penalty", 3, "answers.repetition_penalty=1.2")
    with pytest.raises(DataError, match="repetition_penalty is not possible with this target: a window of 8"):
        answers(recipe, penal)


# ── conversations ──


def echo(request: Request) -> Reply:
    """The prompt's first and last token and an end."""
    return Reply(request.id, [request.ids[0], request.ids[-1], 0], True)


def test_each_turn_is_an_answer_of_its_own(world: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    recipe, run = begin(world, tmp_path, 5)
    seen: list[tuple[str, list[str]]] = []

    def following(_: AnswerRules, prompt: Prompt, texts: list[str]) -> list[int] | None:
        seen.append((prompt.id, texts))
        turns = int(prompt.id[1:]) % 3  # p0 and p3 have one turn, p1 and p4 two, p2 three
        return [*prompt.ids, 40 + len(texts)] if len(texts) <= turns else None

    script = scripted(monkeypatch, recipe, echo)
    monkeypatch.setattr(AnswerRules, "next_prompt", following)
    answers(recipe, run)
    found = [(one.id, one.prompt[-1]) for one in read_answers(run, "train") if one.id.startswith("p2")]
    assert [name for name, _ in found] == ["p2", "p2/1", "p2/2"] and [last for _, last in found[1:]] == [41, 42]
    assert len(script.asked) == 5 + 0 + 1 + 2 + 0 + 1 == len(answer_lines(run))
    assert len({request.seed for request in script.asked}) == len(script.asked)
    assert ("p2", seen[-1][1]) and all(isinstance(text, str) for _, texts in seen for text in texts)
    first = {one["id"]: one for one in answer_lines(run)}["p2/1"]
    assert first["number"] == 2 and first["source"] == "code" and first["ended"]


def test_a_turn_that_does_not_fit_the_block_is_not_asked(world: Path, tmp_path: Path, monkeypatch: Any) -> None:
    recipe, run = begin(world, tmp_path, 2)
    scripted(monkeypatch, recipe, echo)
    monkeypatch.setattr(AnswerRules, "next_prompt", lambda *_: [7] * recipe.corpus.block)
    answers(recipe, run)
    assert [line["id"] for line in answer_lines(run)] in (["p0", "p1"], ["p1", "p0"])


# ── GGUF files ──


@pytest.fixture(scope="module")
def gguf(world: Path) -> Path:
    from distill.gguf.writer import export_gguf

    path = world / "target-f32.gguf"
    export_gguf(world / "target", path, "f32")
    return path


def test_a_gguf_file_writes_what_the_target_writes(world: Path, gguf: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    """The same sampler and seeds; llama.cpp's cache is in f16, so a few texts part ways. Kills change no byte."""
    overrides = (f"answers.writer.gguf={gguf}", "answers.repetition_penalty=1.1", "answers.stop=[buffer]")
    recipe, whole = begin(world, tmp_path / "gguf", 20, *overrides)
    answers(recipe, whole)
    local, torch_run = begin(world, tmp_path / "torch", 20, *overrides[1:])
    answers(local, torch_run)
    pairs = list(zip(read_answers(whole, "train"), read_answers(torch_run, "train"), strict=True))
    same = sum(ours == theirs for ours, theirs in pairs)
    assert same >= 15, f"{same} of 20"
    assert read_json(whole.path("answers", "manifest.json"))["writer"] == "gguf"

    _, run = begin(world, tmp_path / "run", 20, *overrides)
    for replies in (3, 6):
        with monkeypatch.context() as patch:
            interrupt_after(patch, GgufWriter, replies)
            with pytest.raises(Interrupted):
                answers(recipe, run)
    journals = list(run.path("answers").glob(".*.journal"))
    assert journals, "replies of unfinished groups are kept"
    with journals[0].open("ab") as handle:
        handle.write(b'{"id": "p1", "ids": [1')  # a kill in the middle of a line
    with monkeypatch.context() as patch:
        asked = interrupt_after(patch, GgufWriter, 10**6)
        answers(recipe, run)
    assert len(asked) == 20 - 3 - 6, "every kept reply is used"
    assert tiny.contents(run.path("answers")) == tiny.contents(whole.path("answers"))


def test_a_gguf_file_of_another_model_is_refused(world: Path, gguf: Path, tmp_path: Path, capsys: Capture) -> None:
    from distill.gguf.writer import export_gguf

    assert "which has the target's tokens" in tiny.shown(
        capsys, "check", world / "recipe.yaml", f"answers.writer.gguf={gguf}"
    )
    assert "answers.writer.gguf: there is no file" in tiny.refused(
        capsys, "check", world / "recipe.yaml", "answers.writer.gguf=nowhere.gguf"
    )
    tiny.build_model(tmp_path / "other", layers=1, vocabulary=420, seeds=range(50, 60))
    export_gguf(tmp_path / "other", tmp_path / "other.gguf", "f16")
    assert "has other tokens than" in tiny.refused(
        capsys, "check", world / "recipe.yaml", f"answers.writer.gguf={tmp_path / 'other.gguf'}"
    )
    assert tiny.call("train", world / "recipe.yaml", f"answers.writer.gguf={tmp_path / 'other.gguf'}") == 2


# ── recipes ──

SMALL = {"name": "a", "target": {"model": "a"}, "corpus": {"sources": [{"kind": "text", "path": "a"}]}}


@pytest.mark.parametrize(
    ("section", "fault"),
    [
        ({"writer": {}}, "either gguf, a file, or urls"),
        ({"writer": {"gguf": "a", "urls": ["http://a/v1"]}}, "either gguf, a file, or urls"),
        ({"writer": {"gguf": "a", "concurrency": 2}}, "concurrency: for servers"),
        ({"writer": {"urls": ["localhost:8000"]}}, "a URL such as"),
        ({"writer": {"urls": ["http://user:secret@a/v1"]}}, "keys come from the environment"),
        ({"writer": {"urls": ["http://a/v1?key=secret"]}}, "keys come from the environment"),
        ({"writer": {"urls": ["http://a:port/v1"]}}, "a URL such as"),
        ({"writer": {"urls": ["http://a:99999/v1"]}}, "a URL such as"),
        ({"writer": {"urls": ["ftp://a/v1"]}}, "a URL such as"),
        ({"writer": {"urls": ["http://a/v1"], "key": "sk-123"}}, "answers.writer.key"),
        ({"writer": {"urls": ["http://a/v1"], "headers": {"X-Key": "sk-123"}}}, "never the value itself"),
        ({"stop": [""]}, "an empty stop string"),
    ],
)
def test_recipes_that_no_writer_can_follow(section: dict[str, Any], fault: str) -> None:
    with pytest.raises(RecipeError, match=fault) as error:
        parse_recipe({**SMALL, "answers": section}, "recipe")
    assert "secret" not in json.dumps(str(error.value)) or "http" not in fault


def test_a_recipe_with_servers() -> None:
    server = {"urls": ["https://host:8000/v1/"], "key": "KEY"}
    recipe = parse_recipe({**SMALL, "answers": {"writer": server}}, "x")
    found = recipe.answers.writer
    assert found is not None and found.urls == ("https://host:8000/v1",)
    assert found.retries == 6 and found.missing == 0 and recipe.answers.group_size == 256


def test_the_target_itself_is_the_default(world: Path, tmp_path: Path) -> None:
    recipe, _ = begin(world, tmp_path, 1)
    writer = open_writer(recipe)
    assert isinstance(writer, TorchWriter) and not writer.by_prompt and writer.close() == []
