"""Answers from servers: one that misbehaves in every known manner, and a llama-server."""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import wheel_server
from tenacity import Future
from tiny import Capture, Patch
from writing_worlds import BadServer, answer_lines, begin

from distill import http
from distill.data.samples import Request, read_answers
from distill.engines.torch.hugging_face import encode, load_config, load_tokenizer
from distill.errors import DataError, EndpointError, RunError, faults_explained
from distill.files import read_json
from distill.pipeline.stages import difference, find_stage, key_parts
from distill.run import Run
from distill.serving.server import LlamaServer, started
from distill.teacher.answers import Group, answers
from distill.teacher.forms import Choice, Completion
from distill.teacher.writers import OTHER_PROMPT, ServerWriter


@pytest.fixture(scope="module")
def tokenizer(world: Path) -> Any:
    return load_tokenizer(str(world / "target"))


@pytest.fixture(autouse=True)
def quick(monkeypatch: Patch) -> None:
    monkeypatch.setattr(http, "FIRST_DELAY", 0.001)


def served(*urls: str, **more: Any) -> str:
    return "answers.writer=" + json.dumps({"urls": list(urls), "model": "tiny", "connections": 4, **more})


def ok(prompt: Any, attempt: int) -> str:
    return "ok"


@pytest.fixture
def write(world: Path, tmp_path: Path) -> Callable[..., Run]:
    """So many prompts are answered by servers, in a run of this name, which goes on where it is there."""

    def answered(prompts: int, *servers: BadServer, overrides: Any = (), name: str = "run", **settings: Any) -> Run:
        place = served(*(one.url for one in servers), **settings)
        recipe, run = begin(world, tmp_path / name, prompts, place, *overrides)
        answers(recipe, run)
        return run

    return answered


# ── a server that misbehaves ──


def test_every_fault_that_passes_loses_nothing(tokenizer: Any, write: Any, capsys: Capture) -> None:
    """The same answers, in the same order, as from a server without faults; each fault is counted."""
    faults = ["429", "500", "cut", "slow", "no json", "no choice", "ok"]

    def behave(prompt: Any, attempt: int) -> str:
        return faults[(len(str(prompt)) + attempt) % len(faults)] if attempt < 3 else "ok"

    with BadServer(tokenizer, lambda *_: "a moment") as good:
        whole = write(30, good, name="good")
        assert good.asked.total() == 30
        assert 1 < good.most <= 4, "requests run at once, and no more than asked for"
        assert isinstance(good.bodies[0]["prompt"], list)
    capsys.readouterr()
    with BadServer(tokenizer, behave) as bad:
        run = write(30, bad, timeout=1, retries=20)
    assert tiny.contents(run.path("answers")) == tiny.contents(whole.path("answers"))
    told = capsys.readouterr().err
    reasons = ("status 429", "status 500", "broken connection", "no reply in time", "JSON object", "usable choices")
    assert all(reason in told for reason in reasons), told
    assert "30 answers of" in told
    body = bad.bodies[0]
    assert body["top_k"] == 0 and body["min_p"] == 0 and body["repeat_penalty"] == body["repetition_penalty"] == 1
    for one in read_answers(run, "train"):
        assert one.answer == [*encode(tokenizer, bad.text(one.prompt)), tokenizer.eos_token_id][:24]


def test_several_servers_share_the_work(tokenizer: Any, write: Any) -> None:
    """Where one of them is broken, its requests go to the other."""
    with BadServer(tokenizer, ok) as first, BadServer(tokenizer, ok) as second:
        whole = write(12, first, second, name="whole")
        assert first.asked.total() == second.asked.total() == 6
    with BadServer(tokenizer, ok) as first, BadServer(tokenizer, lambda *_: "503") as second:
        run = write(12, first, second)
        assert first.asked.total() == 12 and 1 <= second.asked.total() <= 12
    assert len(answer_lines(run)) == 12 and tiny.contents(run.path("answers")) == tiny.contents(whole.path("answers"))


def test_another_model_than_before_is_refused(tokenizer: Any, write: Any) -> None:
    """One message, and nothing is mixed; the first model's server goes on."""
    broken = {"on": True}

    def behave(prompt: Any, attempt: int) -> str:
        return "500" if broken["on"] and len(prompt) == 8 else "ok"

    with BadServer(tokenizer, behave) as server:
        more: Any = {"model": None, "retries": 0, "overrides": ["answers.group=10"]}
        with pytest.raises(EndpointError, match="prompts have no reply"):
            write(24, server, **more)
        before, broken["on"], server.names = server.asked.copy(), False, ["other"]
        with pytest.raises(EndpointError, match=r'serve \["other".* come from \["tiny"[\s\S]*--redo answers'):
            write(24, server, **more)
        assert server.asked == before
        server.names = ["tiny"]
        assert len(answer_lines(write(24, server, **more))) == 24


def test_a_full_disk_loses_nothing_that_is_whole(tokenizer: Any, write: Any, monkeypatch: Patch) -> None:
    noted, note = [], Group.note

    def full(group: Group, reply: Any) -> None:
        if len(noted) == 9:
            with faults_explained(group.journal):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(group.journal))
        noted.append(reply.id)
        note(group, reply)

    with BadServer(tokenizer, lambda prompt, _: "ok") as server:
        monkeypatch.setattr(Group, "note", full)
        with pytest.raises(RunError, match="the disk is full"):
            write(24, server, overrides=["answers.group=10"])
        monkeypatch.setattr(Group, "note", note)
        server.asked.clear()
        lines = answer_lines(write(24, server, overrides=["answers.group=10"]))
        assert len({line["id"] for line in lines}) == len(lines) == 24 and server.asked.total() == 24 - 9


def test_two_answers_to_one_request_are_none(tokenizer: Any, write: Any, monkeypatch: Patch) -> None:
    whole = BadServer.completion

    def twice(self: BadServer, body: Any, prompt: Any, kind: str) -> dict[str, Any]:
        found = whole(self, body, prompt, kind)
        return found | {"choices": found["choices"] * (2 if kind == "twice" else 1)}

    monkeypatch.setattr(BadServer, "completion", twice)
    with BadServer(tokenizer, lambda prompt, attempt: "ok" if attempt else "twice") as server:
        assert len(answer_lines(write(6, server, retries=2))) == 6 and server.asked.total() == 12


def test_prompts_without_a_reply_are_asked_again(tokenizer: Any, write: Any) -> None:
    hopeless = {"on": True}

    def behave(prompt: Any, attempt: int) -> str:
        return "500" if hopeless["on"] and len(prompt) == 8 else "ok"

    with BadServer(tokenizer, behave) as server:
        settings: Any = {"retries": 2, "connections": 1, "overrides": ["answers.group=10"]}
        with pytest.raises(EndpointError, match=r"4 of 24 .* no reply .*4 × no reply \(status 500\)") as error:
            write(24, server, **settings)
        assert "answers.writer.missing" in str(error.value)
        before = server.asked.copy()
        hopeless["on"] = False
        run = write(24, server, **settings)
        again = server.asked - before
        assert len(again) == 4 and again.total() == 4, "only those are asked again"
        assert len(answer_lines(run)) == 24 and not list(run.path("answers", "train").glob(".*.journal"))

        hopeless["on"] = True
        lenient = write(24, server, name="lenient", missing=0.2, **settings)
        assert read_json(lenient.path("answers", "manifest.json"))["dropped"] == {"no reply (status 500)": 4}


def test_answers_to_other_prompts_are_asked_again(tokenizer: Any, write: Any) -> None:
    """Of a server that mixes prompts up for a while, nothing is taken and nothing is lost."""
    mixed = {"on": True}
    with BadServer(tokenizer, lambda prompt, _: "other ids" if mixed["on"] and len(prompt) == 8 else "ok") as server:
        with pytest.raises(EndpointError, match=r"4 of 24 .* no reply .*4 × the server read other tokens"):
            write(24, server, connections=1)
        mixed["on"], before = False, server.asked.copy()
        run = write(24, server, connections=1)
        assert (server.asked - before).total() == 4 and not any(line["dropped"] for line in answer_lines(run))


@pytest.mark.parametrize(
    ("kind", "retries", "fault"),
    [
        ("400", 6, r"the last 8 requests brought no answer; the last: refused by the server \(status 400\): no: "),
        ("404", 6, r"gives no completions \(status 404\): no: None"),
        ("other model", 6, r"a server answers for the model another, and tiny was asked"),
        ("other tokens", 6, r"the last: the server read other tokens than the prompt's"),
        ("other ids", 6, r"the last: the server read other tokens than the prompt's"),
        ("no json", 0, r"no reply \(a reply that is not a JSON object\): <html>busy</html>"),
        ("no choice", 0, r'no reply \(a reply without usable choices\): \{"model": "tiny", "choices": \[\]'),
        ("503", 0, r"the last 8 requests brought no answer; the last: no reply \(status 503\): no: None"),
    ],
)
def test_faults_that_do_not_pass_are_shown(tokenizer: Any, write: Any, kind: str, retries: int, fault: str) -> None:
    with BadServer(tokenizer, lambda *_: kind) as server:
        with pytest.raises(EndpointError, match=fault):
            write(12, server, retries=retries)
        assert server.asked.total() < 13, "none is asked twice"


def test_prompts_that_a_wrong_setting_refused_are_asked_again(tokenizer: Any, write: Any) -> None:
    """A server that takes none of the first requests is set up wrongly: nothing was answered, nothing is dropped."""
    refusing = {"on": True}
    with BadServer(tokenizer, lambda *_: "400" if refusing["on"] else "ok") as server:
        settings: Any = {"connections": 3, "overrides": ["answers.group=4"]}
        with pytest.raises(EndpointError, match="the last 8 requests brought no answer"):
            write(24, server, **settings)
        refusing["on"] = False
        run = write(24, server, **settings)
        assert read_json(run.path("answers", "manifest.json"))["dropped"] == {}
        assert len(answer_lines(run)) == 24
        for body in server.bodies:  # llama.cpp's -1 for the whole text is refused by some of its servers
            assert 0 <= body.get("repeat_last_n", 0) < 2**31


def test_some_refused_prompts_are_dropped_and_counted(tokenizer: Any, write: Any) -> None:
    def behave(prompt: Any, attempt: int) -> str:
        return {3: "400", 4: "other tokens", 5: "empty text", 6: "length"}.get(len(prompt), "ok")

    with BadServer(tokenizer, behave) as server:
        run = write(24, server, overrides=["answers.keep_truncated=false"])
    reasons = ("empty", "truncated", "refused by the server (status 400)", OTHER_PROMPT)
    assert read_json(run.path("answers", "manifest.json"))["dropped"] == dict.fromkeys(reasons, 4)


def test_answers_that_were_all_dropped_end_the_stage(tokenizer: Any, write: Any, capsys: Capture) -> None:
    with BadServer(tokenizer, lambda *_: "empty text") as server:
        for _ in range(2):  # also where all files are there
            with pytest.raises(DataError, match=r"all 12 answers .* dropped: 12 × empty[\s\S]*--redo answers"):
                write(12, server)
    with BadServer(tokenizer, lambda prompt, _: "ok" if len(prompt) == 3 else "empty text") as server:
        write(12, server, name="few")
    assert "warning: most were dropped: 12 answers of" in capsys.readouterr().err


def test_ids_of_the_server_win_over_its_text(tokenizer: Any, write: Any) -> None:
    with BadServer(tokenizer, lambda *_: "ids") as server:
        for one in read_answers(write(3, server), "train"):
            assert one.answer[:-1] == encode(tokenizer, server.text(one.prompt))[::-1]
            assert one.answer[-1] == tokenizer.eos_token_id and one.ended


def test_a_server_that_goes_on_behind_the_end_of_a_turn(tokenizer: Any, world: Path, tmp_path: Path) -> None:
    """It knows what the target's files name; the template alone names the end of a turn."""
    own = copy.deepcopy(tokenizer)
    own.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    own.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|turn|>{% endfor %}"
    end = own.convert_tokens_to_ids("<|turn|>")
    with BadServer(tokenizer, ok) as server:
        recipe, _ = begin(world, tmp_path / "run", 1, served(server.url))
        config = load_config(recipe.target.model)
        config.vocab_size = end + 1
        writer = ServerWriter(recipe, own, config)
        request = Request("a", encode(own, "total"), 0, 40)
        assert writer._body(request)["stop_token_ids"] == [end]
        for reason in ("stop", "length"):
            given = Completion(choices=[Choice(finish_reason=reason, text="total<|turn|><user>next<|turn|>")])
            reply = writer._reply(request, given)
            assert reply.ended and reply.ids == [*encode(own, "total"), end]
        writer.close()


FORMS: dict[str, Callable[[list[int], list[int], int | None], dict[str, Any]]] = {
    # What stands beside text and finish_reason, of a prompt, an answer and the end token where it ended.
    "vLLM 0.32": lambda prompt, new, end: {
        "stop_reason": None, "token_ids": new, "prompt_token_ids": prompt, "prompt_logprobs": None
    },
    "SGLang that returns ids": lambda prompt, new, end: {
        "matched_stop": end, "token_ids": new, "prompt_token_ids": prompt, "hidden_states": None
    },
    "SGLang before": lambda prompt, new, end: {"matched_stop": end, "hidden_states": None},
    "llama-server": lambda prompt, new, end: {},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ended", [True, False])
def test_every_servers_form_of_a_reply_is_the_same_answer(
    tokenizer: Any, world: Path, tmp_path: Path, form: str, ended: bool
) -> None:
    """By the sources of vLLM 0.32 and of SGLang of November 2026 (protocol.py of both)."""
    text, prompt = "parser.token(self):", encode(tokenizer, "total")
    end = tokenizer.eos_token_id if ended else None
    new = encode(tokenizer, text) + ([end] if ended else [])
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": "stop" if ended else "length"}
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(new), "total_tokens": len(prompt) + len(new)}
    reply = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "tiny", "usage": usage}
    reply |= {"choices": [choice | FORMS[form](prompt, new, end)], "metadata": {"weight_version": "default"}}
    with BadServer(tokenizer, ok) as server:
        recipe, _ = begin(world, tmp_path / "run", 1, served(server.url))
        with contextlib.closing(ServerWriter(recipe, tokenizer, load_config(recipe.target.model))) as writer:
            read = Completion.model_validate_json(json.dumps(reply))
            found = writer._reply(Request("a", prompt, 0, 40), read)
    assert read.is_of(prompt) and not read.is_of([*prompt, 1]) and not writer.miscounted
    assert found.ids == new and found.ended is ended and not found.dropped


def test_stop_strings_are_sent_and_penalties_are_off(tokenizer: Any, write: Any) -> None:
    """Where a stop string may have ended a text, no end token is added to it."""
    with BadServer(tokenizer, ok) as server:
        run = write(8, server, overrides=['answers.stop=["\\n\\n"]'])
        assert server.bodies[0]["stop"] == ["\n\n"] and server.bodies[0]["presence_penalty"] == 0
        for one in read_answers(run, "train"):
            assert one.ended and one.answer == encode(tokenizer, server.text(one.prompt))


def test_keys_come_from_the_environment_and_stay_there(
    world: Path, tokenizer: Any, write: Any, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    """In the requests, and in no file, no message: not even where the server repeats them."""
    monkeypatch.setenv("SOME_KEY", "sk-secret-1")
    monkeypatch.setenv("SOME_HEADER", "hdr-secret-2")
    more: Any = {"key": "SOME_KEY", "headers": {"X-Team": "SOME_HEADER"}}

    def behave(prompt: Any, attempt: int) -> str:
        return "400" if len(prompt) == 3 else "ok"

    with BadServer(tokenizer, behave) as server:
        recipe, run = begin(world, tmp_path, 12, served(server.url, **more))
        run.open("")
        answers(recipe, run)
        run.close()
        assert server.headers[0]["Authorization"] == "Bearer sk-secret-1"
        assert server.headers[0]["X-Team"] == "hdr-secret-2"
    written = b"".join(path.read_bytes() for path in run.folder.rglob("*") if path.is_file())
    shown = "".join(capsys.readouterr())
    assert b"secret" not in written and "secret" not in shown and "Bearer ***" in shown
    with BadServer(tokenizer, lambda *_: "401") as server:
        with pytest.raises(EndpointError, match=r"refuses this client \(status 401\): no: Bearer \*\*\*") as error:
            write(3, server, name="refused", **more)
        assert "the key in SOME_KEY" in str(error.value)
        monkeypatch.delenv("SOME_KEY")
        with pytest.raises(EndpointError, match=r"answers\.writer\.key: the environment variable SOME_KEY is not set"):
            write(3, server, name="refused", **more)


def test_check_asks_the_servers(world: Path, tokenizer: Any, capsys: Capture) -> None:
    check = (capsys, "check", world / "recipe.yaml", "teacher.kind=exact")
    with BadServer(tokenizer, ok) as server:
        url = server.url
        assert f"{url} serves tiny" in tiny.shown(*check, served(url, model=None))
        assert "does not serve other, but tiny" in tiny.refused(*check, served(url, model="other"))
        server.names = ["tiny", "second"]
        assert "serves 2 models: tiny, second" in tiny.refused(*check, served(url, model=None))
        offline = tiny.shown(*check, served(url, model="other"), "--offline")
        assert f"not checked: server {url} (--offline)" in offline
    assert "cannot be reached" in tiny.refused(*check, served(url))


def test_retry_after_and_delays(monkeypatch: Patch) -> None:
    assert http.retry_after(None) is None and http.retry_after("soon") is None
    assert http.retry_after("7") == 7
    assert http.retry_after("Wed, 21 Oct 2015 07:28:00 GMT") is None
    monkeypatch.setattr(http, "FIRST_DELAY", 0.5)
    for attempt in range(1, 200):
        for asked, least, most in ((None, 0, min(60, 0.25 * 2**attempt)), (100, 100, 100), (10**9, 600, 600)):
            outcome: Future[None] = Future(attempt)
            outcome.set_exception(http.Unanswered("busy", "", asked))
            state: Any = SimpleNamespace(attempt_number=attempt, outcome=outcome)
            assert least <= http.delay_seconds(state) <= most


def test_processes_note_the_servers_model_once(tokenizer: Any, world: Path, tmp_path: Path) -> None:
    """Two processes of one launch begin the stage at once; the main one writes the note, and both go on."""
    with BadServer(tokenizer, ok) as server:
        overrides = (served(server.url), "answers.group=2", "teacher.kind=exact")
        _, run = begin(world, tmp_path / "run", 12, *overrides)
        command = [sys.executable, "-c", JOB, str(world / "recipe.yaml"), str(run.folder), *overrides]
        with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as free:
            port = free.getsockname()[1]
        launch = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "1"}
        jobs = [
            subprocess.Popen(
                command,
                cwd=tiny.ROOT,
                stderr=subprocess.PIPE,
                env={**os.environ, **launch, "RANK": rank, "LOCAL_RANK": rank},
            )
            for rank in "01"
        ]
        told = [job.communicate(timeout=120)[1].decode() for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], told
    assert read_json(run.path("answers", ".served.json")) == ['["tiny", null, null, null]']
    assert len(answer_lines(run)) == 12 and server.asked.total() == 12


# ── kills, and a server as users run it ──


DEMO = tiny.ROOT / "data" / "demo-target"  # trained: random weights give bytes that are no UTF-8 and break the server


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from distill.gguf.writer import export_gguf

    path = tmp_path_factory.mktemp("served") / "demo-f16.gguf"
    export_gguf(DEMO, path, "f16")
    return path


JOB = """
import sys
from pathlib import Path
from distill.recipe import load_recipe
from distill.run import Run
from distill.teacher.answers import Group, answers
recipe = load_recipe(Path(sys.argv[1]), sys.argv[3:])
answers(recipe, Run(Path(sys.argv[2]), recipe))
"""


def journalled(run: Run) -> dict[str, Any]:
    """All replies that are on disk, by prompt."""
    found = {}
    for path in run.path("answers", "train").glob(".*.journal"):
        text = ""
        with contextlib.suppress(FileNotFoundError):  # its group was finished meanwhile: its file is read below
            text = path.read_text()
        for line in text.splitlines():
            if line.endswith("}"):
                record = json.loads(line)
                found[record["id"]] = record["ids"]
    return found | {line["id"]: line["answer"] for line in answer_lines(run)}


def test_a_killed_client_asks_for_what_is_missing(world: Path, tokenizer: Any, tmp_path: Path) -> None:
    """100 prompts over 8 connections, killed in the middle and started again."""
    killed = threading.Event()

    def behave(prompt: Any, attempt: int) -> str:
        if server.asked.total() > 50:
            killed.wait(120)
        return "ok"

    with BadServer(tokenizer, behave) as server:
        overrides = (served(server.url, connections=8), "answers.group=30", "teacher.kind=exact")
        recipe, run = begin(world, tmp_path / "run", 100, *overrides)
        command = [sys.executable, "-c", JOB, str(world / "recipe.yaml"), str(run.folder), *overrides]
        with subprocess.Popen(command, cwd=tiny.ROOT, stderr=subprocess.DEVNULL) as job:
            while len(journalled(run)) < 35:
                assert job.poll() is None
                time.sleep(0.02)
            job.kill()
        killed.set()
        before = journalled(run)
        server.asked.clear()
        answers(recipe, run)
        assert server.asked.total() == 100 - len(before), "none that was there is asked for again"
    found = {line["id"]: line["answer"] for line in answer_lines(run)}
    assert len(answer_lines(run)) == len(found) == 100 and before.items() <= found.items()
    assert not list(run.path("answers", "train").glob(".*.journal"))


@pytest.mark.skipif(not wheel_server.INSTALLED, reason="needs xllamacpp")
def test_a_llama_server_of_today_answers(world: Path, gguf: Path, tmp_path: Path) -> None:
    """llama.cpp of October 2026, with all that a request sends: greedily the texts of the GGUF writer, and sampled."""
    settings = (f"target.model={DEMO}", "answers.new_tokens=5", "answers.repetition_penalty=1.1")
    with started(LlamaServer(wheel_server.program(tmp_path), gguf, threads=1, parallel=4), 60) as running:
        for temperature in (0.0, 0.8):
            own = (*settings, f"sampler.temperature={temperature}", "sampler.min_p=0.05")
            place = served(f"{running.url}/v1", model=str(gguf), connections=4)
            recipe, run = begin(world, tmp_path / f"run-{temperature}", 24, place, *own)
            answers(recipe, run)
            assert len(answer_lines(run)) == 24 and not any(line["dropped"] for line in answer_lines(run))
            local, beside = begin(world, tmp_path / f"own-{temperature}", 24, f"answers.writer.gguf={gguf}", *own)
            answers(local, beside)
            pairs = list(zip(read_answers(run, "train"), read_answers(beside, "train"), strict=True))
            same = sum(theirs.answer == ours.answer for theirs, ours in pairs)
            assert same >= 20 if temperature == 0 else same < 20, f"{same} of 24"


@pytest.mark.parametrize(("stage", "section"), [("answers", "answers.writer"), ("teacher", "teacher.server")])
def test_the_address_of_a_server_is_not_part_of_the_key(stage: str, section: str, world: Path, tmp_path: Path) -> None:
    """A run goes on where the server moved; another model or another file is another target."""

    def parts(where: str = section, **settings: Any) -> dict[str, Any]:
        value = settings.get("path") or json.dumps({"urls": ["http://a/v1"], "model": "tiny"} | settings)
        recipe, run = begin(world, tmp_path, 1, f"{where}={value}")
        return key_parts(find_stage(stage), recipe, run)

    first = parts()
    assert "http" not in json.dumps(first)
    assert parts(urls=["http://b/v1"], connections=9, key="K", retries=1, timeout=3) == first
    assert difference(first, parts(model="other")) == [f"{section}.model: 'tiny' -> 'other'"]
    file = "answers.writer.gguf" if stage == "answers" else "teacher.gguf"
    found = []
    for content in ("GGUF1", "GGUF2"):
        (tmp_path / "x.gguf").write_text(content)
        found.append(parts(file, path=tmp_path / "x.gguf"))
    assert difference(*found) == [f"{file} (content) has other content"]


def test_what_asks_for_nothing_is_left_out_for_servers_that_refuse_it(
    tokenizer: Any, write: Callable[..., Run]
) -> None:
    """One name after the other, and only where the recipe asks for nothing."""
    names = ("min_p", "frequency_penalty", "repeat_penalty", "repetition_penalty")

    class Strict(BadServer):
        def reply(self, handler: Any, body: dict[str, Any], prompt: Any, kind: str) -> None:
            if found := [name for name in names if name in body]:
                handler.reply(400, {"message": f"Unrecognized request argument supplied: {found[0]}"})
            else:
                super().reply(handler, body, prompt, kind)

    with Strict(tokenizer, ok) as server:
        run = write(6, server)
    assert len(answer_lines(run)) == 6 and not {*names} & server.bodies[-1].keys()
    assert server.bodies[-1]["presence_penalty"] == 0
    with Strict(tokenizer, ok) as server, pytest.raises(EndpointError, match="supplied: min_p"):
        write(40, server, overrides=["sampler.min_p=0.1", "sampler.temperature=0.7"], name="other")


@pytest.mark.parametrize("refused", [(), (0,), (0, -1), (0, -1, None)])
def test_a_server_is_told_that_there_is_no_top_k_as_it_takes_it(
    tokenizer: Any, write: Callable[..., Run], refused: tuple[int | None, ...]
) -> None:
    class Strict(BadServer):
        def reply(self, handler: Any, body: dict[str, Any], prompt: Any, kind: str) -> None:
            if body.get("top_k") in refused:
                handler.reply(400, {"message": f"top_k must be right, got {body.get('top_k')}"})
            else:
                super().reply(handler, body, prompt, kind)

    with Strict(tokenizer, ok) as server:
        if len(refused) == 3:
            with pytest.raises(EndpointError, match=r"top_k must be right, got None"):
                write(40, server)
            return
        run = write(6, server)
    forms = [0, -1, None]
    assert len(answer_lines(run)) == 6 and server.bodies[-1].get("top_k") == forms[len(refused)]
    assert all(body.get("top_k") in forms[: len(refused) + 1] for body in server.bodies)
    with Strict(tokenizer, ok) as server:  # one that the recipe asks for is never changed
        if refused:
            return
        write(3, server, overrides=["sampler.top_k=40", "sampler.temperature=0.7"], name="other")
        assert {body["top_k"] for body in server.bodies} == {40}
