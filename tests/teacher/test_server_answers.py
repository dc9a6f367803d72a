"""Answers from servers: one that misbehaves in every known manner, and llama-cpp-python's own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import tiny
import wheel_server
from writing_worlds import BadServer, answer_lines, begin, llama_server

from distill.data.texts import Request, read_answers
from distill.engines.torch.hugging_face import encode, load_config, load_tokenizer
from distill.errors import DataError, EndpointError
from distill.files import read_json
from distill.recipe import Recipe
from distill.run import Run
from distill.serving.server import LlamaServer, started
from distill.teacher import endpoint
from distill.teacher.answers import answers
from distill.teacher.writers import ServerWriter, texts_of


@pytest.fixture(scope="module")
def tokenizer(world: Path) -> Any:
    return load_tokenizer(str(world / "target"))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "FIRST_DELAY", 0.001)


def served(*urls: str, **more: Any) -> str:
    return "answers.writer=" + json.dumps({"urls": list(urls), "model": "tiny", "concurrency": 4, **more})


def ok(prompt: Any, attempt: int) -> str:
    return "ok"


def write(world: Path, folder: Path, prompts: int, *overrides: str) -> tuple[Recipe, Run]:
    recipe, run = begin(world, folder, prompts, *overrides)
    answers(recipe, run)
    return recipe, run


# ── a server that misbehaves ──


@pytest.mark.parametrize("takes_ids", [pytest.param(True, marks=pytest.mark.slow), False])
def test_every_fault_that_passes_loses_nothing(
    world: Path, tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], takes_ids: bool
) -> None:
    """The same answers, in the same order, as from a server without faults; each fault is counted."""
    faults = ["429", "500", "cut", "slow", "no json", "no choice", "ok"]

    def behave(prompt: Any, attempt: int) -> str:
        return faults[(len(str(prompt)) + attempt) % len(faults)] if attempt < 3 else "ok"

    with BadServer(tokenizer, lambda *_: "a moment", takes_ids) as good:
        _, whole = write(world, tmp_path / "good", 30, served(good.url))
        assert sum(good.asked.values()) == 30
        assert 1 < good.most <= 4, "requests run at once, and no more than asked for"
        assert isinstance(good.bodies[0]["prompt"], list) is takes_ids
    capsys.readouterr()
    with BadServer(tokenizer, behave, takes_ids) as bad:
        _, run = write(world, tmp_path / "bad", 30, served(bad.url, timeout=1, retries=20))
    assert tiny.contents(run.path("answers")) == tiny.contents(whole.path("answers"))
    told = capsys.readouterr().err
    reasons = ("status 429", "status 500", "broken connection", "no reply in time", "not a JSON object", "finished")
    assert all(reason in told for reason in reasons), told
    assert "30 answers of" in told
    body = bad.bodies[0]
    assert body["top_k"] == 0 and body["min_p"] == 0 and body["repeat_penalty"] == body["repetition_penalty"] == 1
    for one in read_answers(run, "train"):
        shown = one.prompt if takes_ids else tokenizer.decode(one.prompt)
        assert one.answer == [*encode(tokenizer, bad.text(shown)), tokenizer.eos_token_id][:24]


@pytest.mark.parametrize("takes_ids", [True, False])
def test_a_busy_server_is_asked_again_whether_it_takes_token_ids(
    world: Path, tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], takes_ids: bool
) -> None:
    with BadServer(tokenizer, lambda _, attempt: "ok" if attempt else "503", takes_ids) as server:
        write(world, tmp_path / "run", 3, served(server.url, retries=2))
        assert {isinstance(body["prompt"], list) for body in server.bodies[2:]} >= {takes_ids}
        assert all(isinstance(body["prompt"], list) is takes_ids for body in server.bodies[-2:])
    assert ("prompts were sent as text" in capsys.readouterr().err) is not takes_ids


def test_several_servers_share_the_work(world: Path, tokenizer: Any, tmp_path: Path) -> None:
    """Where one of them is broken, its requests go to the other."""
    with BadServer(tokenizer, ok) as first, BadServer(tokenizer, ok) as second:
        _, whole = write(world, tmp_path / "whole", 12, served(first.url, second.url))
        assert sum(first.asked.values()) == sum(second.asked.values()) == 6
    with BadServer(tokenizer, ok) as first, BadServer(tokenizer, lambda *_: "503") as second:
        _, run = write(world, tmp_path / "run", 12, served(first.url, second.url))
        assert sum(first.asked.values()) == 12 and 1 <= sum(second.asked.values()) <= 12
    assert len(answer_lines(run)) == 12 and tiny.contents(run.path("answers")) == tiny.contents(whole.path("answers"))


def test_prompts_without_a_reply_are_asked_again(world: Path, tokenizer: Any, tmp_path: Path) -> None:
    hopeless = {"on": True}

    def behave(prompt: Any, attempt: int) -> str:
        return "500" if hopeless["on"] and len(prompt) == 8 else "ok"

    with BadServer(tokenizer, behave) as server:
        overrides = (served(server.url, retries=2, concurrency=1), "answers.group=10")
        recipe, run = begin(world, tmp_path, 24, *overrides)
        with pytest.raises(
            EndpointError, match=r"4 of 24 prompts have no reply .*4 × no reply \(status 500\)"
        ) as error:
            answers(recipe, run)
        assert "answers.writer.missing" in str(error.value)
        before = server.asked.copy()
        hopeless["on"] = False
        answers(recipe, run)
        again = server.asked - before
        assert len(again) == 4 and sum(again.values()) == 4, "only those are asked again"
        assert len(answer_lines(run)) == 24 and not list(run.path("answers").glob(".*"))

        hopeless["on"] = True
        recipe, lenient = write(
            world, tmp_path / "lenient", 24, served(server.url, retries=1, concurrency=1, missing=0.2), overrides[1]
        )
        assert read_json(lenient.path("answers", "manifest.json"))["dropped"] == {"no reply (status 500)": 4}


def test_a_dead_server_ends_the_stage_soon(world: Path, tokenizer: Any, tmp_path: Path) -> None:
    with BadServer(tokenizer, lambda *_: "500") as server:
        recipe, run = begin(world, tmp_path, 30, served(server.url, retries=1))
        with pytest.raises(EndpointError, match=r"the last 8 requests brought no answer; the last: no reply"):
            answers(recipe, run)
        assert sum(server.asked.values()) < 30


@pytest.mark.parametrize(
    ("kind", "retries", "fault"),
    [
        ("400", 6, r"the last 8 requests brought no answer; the last: refused by the server \(status 400\): no: "),
        ("404", 6, r"gives no completions \(status 404\): no: None"),
        ("other model", 6, r"a server answers for the model another, and tiny was asked"),
        ("other tokens", 6, r"the last: the server read other tokens than the prompt's"),
        ("no json", 0, r"no reply \(a reply that is not a JSON object\): <html>busy</html>"),
        ("no choice", 0, r'no reply \(a reply without a finished choice\): \{"model": "tiny", "choices": \[\]'),
        ("503", 0, r"no reply \(status 503\): no: None"),
    ],
)
def test_faults_that_do_not_pass_are_shown(
    world: Path, tokenizer: Any, tmp_path: Path, kind: str, retries: int, fault: str
) -> None:
    with BadServer(tokenizer, lambda *_: kind) as server:
        recipe, run = begin(world, tmp_path, 12, served(server.url, retries=retries))
        with pytest.raises(EndpointError, match=fault):
            answers(recipe, run)
        assert server.asked.total() < 13, "none is asked twice"


def test_prompts_that_a_wrong_setting_refused_are_asked_again(world: Path, tokenizer: Any, tmp_path: Path) -> None:
    """A server that takes none of the first requests is set up wrongly: nothing was answered, nothing is dropped."""
    refusing = {"on": True}
    with BadServer(tokenizer, lambda *_: "400" if refusing["on"] else "ok") as server:
        recipe, run = begin(world, tmp_path, 24, served(server.url, concurrency=3), "answers.group=4")
        with pytest.raises(EndpointError, match="the last 8 requests brought no answer"):
            answers(recipe, run)
        refusing["on"] = False
        answers(recipe, run)
        assert read_json(run.path("answers", "manifest.json"))["dropped"] == {}
        assert len(answer_lines(run)) == 24
        for body in server.bodies:  # llama.cpp's -1 for the whole text is refused by some of its servers
            assert 0 <= body.get("repeat_last_n", 0) < 2**31


def test_some_refused_prompts_are_dropped_and_counted(world: Path, tokenizer: Any, tmp_path: Path) -> None:
    def behave(prompt: Any, attempt: int) -> str:
        return {3: "400", 4: "other tokens", 5: "empty text", 6: "length"}.get(len(prompt), "ok")

    with BadServer(tokenizer, behave) as server:
        _, run = write(world, tmp_path, 24, served(server.url), "answers.keep_truncated=false")
    dropped = read_json(run.path("answers", "manifest.json"))["dropped"]
    assert dropped == {
        "empty": 4,
        "refused by the server (status 400)": 4,
        "the server read other tokens than the prompt's": 4,
        "truncated": 4,
    }


def test_ids_of_the_server_win_over_its_text(world: Path, tokenizer: Any, tmp_path: Path) -> None:
    with BadServer(tokenizer, lambda *_: "ids") as server:
        _, run = write(world, tmp_path, 3, served(server.url))
        for one in read_answers(run, "train"):
            assert one.answer[:-1] == encode(tokenizer, server.text(one.prompt))[::-1]
            assert one.answer[-1] == tokenizer.eos_token_id and one.ended


def test_stop_strings_are_sent_and_penalties_are_off(world: Path, tokenizer: Any, tmp_path: Path) -> None:
    """Where a stop string may have ended a text, no end token is added to it."""
    with BadServer(tokenizer, ok) as server:
        _, run = write(world, tmp_path, 3, served(server.url), 'answers.stop=["\\n\\n"]')
        assert server.bodies[0]["stop"] == ["\n\n"] and server.bodies[0]["presence_penalty"] == 0
        for one in read_answers(run, "train"):
            assert one.ended and one.answer == encode(tokenizer, server.text(one.prompt))


def test_keys_come_from_the_environment_and_stay_there(
    world: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
        recipe, run = begin(world, tmp_path / "refused", 3, served(server.url, **more))
        with pytest.raises(EndpointError, match=r"refuses this client \(status 401\): no: Bearer \*\*\*") as error:
            answers(recipe, run)
        assert "the key in SOME_KEY" in str(error.value)
    monkeypatch.delenv("SOME_KEY")
    with pytest.raises(EndpointError, match=r"answers\.writer\.key: the environment variable SOME_KEY is not set"):
        answers(recipe, run)


def test_check_asks_the_servers(world: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def check(*more: str) -> str:
        code = tiny.call("check", world / "recipe.yaml", *more)
        found = capsys.readouterr()
        assert "Traceback" not in found.err
        return f"{code} {found.out}{found.err}"

    with BadServer(tokenizer, ok) as server:
        assert f"{server.url} serves tiny" in check(served(server.url))
        assert check(served(server.url, model=None)).startswith("0")
        assert "does not serve other, but tiny" in check(served(server.url, model="other"))
        server.names = ["tiny", "second"]
        assert "serves 2 models: tiny, second" in check(served(server.url, model=None))
        found = check(served(server.url, model="other"), "--offline")
        assert found.startswith("0") and f"not checked: server {server.url} (--offline)" in found
        url = server.url
    assert check(served(url)).startswith("2") and "cannot be reached" in check(served(url))


def test_retry_after_and_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert endpoint.retry_after(None) is None and endpoint.retry_after("soon") is None
    assert endpoint.retry_after("7") == 7
    assert endpoint.retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    later = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 60))
    assert 55 < (endpoint.retry_after(later) or 0) <= 60
    monkeypatch.setattr(endpoint, "FIRST_DELAY", 0.5)
    for attempt in range(200):
        full = min(60, 0.5 * 2**attempt)
        assert full / 2 <= endpoint.delay_seconds(attempt, None) <= full
        assert endpoint.delay_seconds(attempt, 100) == 100 and endpoint.delay_seconds(attempt, 10**9) == 600


# ── chat ──


class Tagged:
    """A tokenizer of words whose ids are their hashes; `<think>` and the like are words."""

    eos_token_id = 1
    words: ClassVar[dict[int, str]] = {}

    def get_vocab(self) -> dict[str, int]:
        return {"a": 10**6 + 2}

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [self._id(word) for word in text.replace("\n", " \n ").split(" ") if word]}

    def _id(self, word: str) -> int:
        token = 2 + sum(ord(c) * 31**i for i, c in enumerate(word)) % 10**6
        self.words[token] = word
        return token

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(self.words[token] for token in ids)


@pytest.mark.parametrize(
    ("message", "prompt", "whole"),
    [
        ({"content": "so it is"}, "ask", "so it is"),
        ({"content": "yes", "reasoning_content": "why not"}, "ask", "<think>\nwhy not\n</think>\n\nyes"),
        ({"content": "yes", "reasoning": "why not\n"}, "ask <think> \n", "why not\n</think>\n\nyes"),
        ({"content": "\n\nyes", "reasoning_content": "\nwhy\n"}, "ask", "<think>\nwhy\n</think>\n\nyes"),
        (
            {"content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"a":1}'}}]},
            "ask",
            '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
        ),
    ],
)
def test_chat_replies_are_rejoined(message: dict[str, Any], prompt: str, whole: str) -> None:
    assert whole in list(texts_of(message, prompt))


@pytest.mark.parametrize("message", [{"content": 3}, {"content": None}, {"tool_calls": [{"function": {"name": 1}}]}])
def test_chat_replies_without_text(message: dict[str, Any]) -> None:
    assert not list(texts_of(message, "ask"))


def test_chat_requests_and_replies(world: Path, tokenizer: Any, tmp_path: Path) -> None:
    """A reply counts where its text has the tokens that the server counted, else it is dropped by name."""
    replies: list[tuple[dict[str, Any], int]] = []

    class Chat(BadServer):
        def completion(self, body: dict[str, Any], prompt: Any, kind: str) -> dict[str, Any]:
            message, tokens = replies.pop(0)
            choice = {"message": message, "finish_reason": "stop"}
            return {"model": "tiny", "choices": [choice], "usage": {"prompt_tokens": 4, "completion_tokens": tokens}}

    with Chat(tokenizer, ok) as server:
        tools = "chat.tools=[{type: function, function: {name: add, parameters: {type: object}}}]"
        recipe, _ = begin(world, tmp_path, 1, served(server.url, api="chat"), tools)
        writer = ServerWriter(recipe, Tagged(), load_config(recipe.target.model))
        ids = Tagged()("a b c d")["input_ids"]
        request = Request("r", ids, 1, 20, [{"role": "user", "content": "hello"}], {"enable_thinking": False})
        replies.append(({"content": "yes it is"}, 4))
        reply = writer._ask(request)
        assert reply.ended and Tagged().decode(reply.ids[:-1]) == "yes it is" and not reply.dropped
        assert server.bodies[-1]["messages"] == request.messages
        assert server.bodies[-1]["chat_template_kwargs"] == {"enable_thinking": False}
        assert server.bodies[-1]["tools"] == list(recipe.chat.tools) != []
        thinking = {"content": "yes", "reasoning_content": "hm hm"}
        replies.append((thinking, len(Tagged()("<think>\nhm hm\n</think>\n\nyes")["input_ids"]) + 1))
        assert "</think>" in Tagged().decode(writer._ask(request).ids[:-1])
        replies.append(({"content": "yes", "reasoning_content": "hm"}, 40))
        assert "cannot be rejoined" in writer._ask(request).dropped
        writer.close()


TALKING = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}"
    "{% endif %} / {% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


def test_the_chat_api_is_asked_turn_by_turn(world: Path, tokenizer: Any, tmp_path: Path) -> None:
    """Each later question comes with the reply before it, and is a sample of its own; a broken turn ends its talk."""
    model = tmp_path / "model"
    shutil.copytree(world / "target", model)
    (model / "chat_template.jinja").write_text(TALKING)
    own = load_tokenizer(str(model))

    def behave(messages: Any, attempt: int) -> str:
        if attempt == 0 and len(messages) == 3:
            return "500"
        return "other tokens" if len(messages) == 5 and messages[0]["content"] == "q2" else "ok"

    with BadServer(own, behave) as server:
        overrides = (f"target.model={model}", served(server.url, api="chat"), "corpus.block=200")
        recipe, run = begin(world, tmp_path / "run", 0, *overrides)
        lines = []
        for number in range(8):
            chat = {"messages": [{"role": "user", "content": f"q{number}"}], "turns": ["and", "then"][: number % 3]}
            rendered = own.apply_chat_template(chat["messages"], tokenize=False, add_generation_prompt=True)
            lines.append(json.dumps({"id": f"p{number}", "ids": encode(own, rendered), "chat": chat, "label": "talk"}))
        run.path("corpus", "prompts-train.jsonl").write_text("\n".join(lines) + "\n")
        answers(recipe, run)
        bodies = server.bodies
    written = {one.id: one for one in read_answers(run, "train") if not one.dropped}
    assert len(written) == 3 * 1 + 3 * 2 + 2 * 3 - 1 and "p2/2" not in written
    for one in written.values():
        assert one.ended and one.label == "talk" and own.decode(one.prompt).endswith("[assistant] ")
        shown = own.decode(one.prompt)
        assert one.answer == [*encode(own, server.text(shown)), own.eos_token_id]
    third = written["p5/2"]
    first, second = (own.decode(written[name].answer, skip_special_tokens=True) for name in ("p5", "p5/1"))
    end = own.eos_token
    assert own.decode(third.prompt) == (
        f"[user] q5 / [assistant] {first}{end} / [user] and / [assistant] {second}{end} / [user] then / [assistant] "
    )
    asked = next(body["messages"] for body in bodies if len(body["messages"]) == 5)
    assert [one["role"] for one in asked] == ["user", "assistant", "user", "assistant", "user"]
    assert server.asked.total() == len(written) + 1 + 5, "each second question again, after its status 500"


def test_chat_needs_chat_prompts(world: Path, tokenizer: Any, tmp_path: Path) -> None:
    with BadServer(tokenizer, ok) as server, pytest.raises(DataError, match="the prompts are not chats"):
        write(world, tmp_path, 3, served(server.url, api="chat"))


# ── llama-cpp-python's own server ──


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
from distill.teacher.answers import answers
recipe = load_recipe(Path(sys.argv[1]), sys.argv[3:])
answers(recipe, Run(Path(sys.argv[2]), recipe))
"""


def journalled(run: Run) -> dict[str, Any]:
    """All replies that are on disk, by prompt."""
    found = {}
    for path in run.path("answers").glob(".*.journal"):
        text = ""
        with contextlib.suppress(FileNotFoundError):  # its group was finished meanwhile: its file is read below
            text = path.read_text()
        for line in text.splitlines():
            if line.endswith("}"):
                record = json.loads(line)
                found[record["id"]] = record["ids"]
    return found | {line["id"]: line["answer"] for line in answer_lines(run)}


def until(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)


def test_a_real_server_answers_every_prompt_once(world: Path, gguf: Path, tmp_path: Path) -> None:
    """100 prompts at concurrency 8, killed in the middle and started again. The texts are those of the GGUF writer."""
    settings = (f"target.model={DEMO}", "sampler.temperature=0", "answers.new_tokens=5", "answers.group=30")
    with llama_server(gguf) as url:
        overrides = (served(url, concurrency=8), *settings)
        recipe, run = begin(world, tmp_path / "run", 100, *overrides)
        command = [sys.executable, "-c", JOB, str(world / "recipe.yaml"), str(run.folder), *overrides]
        environment = {**os.environ, "PYTHONPATH": str(tiny.ROOT)}
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as job:
            until(lambda: len(journalled(run)) >= 35 or job.poll() is not None)
            job.send_signal(signal.SIGKILL)
        before = journalled(run)
        assert 35 <= len(before) < 100 and job.returncode == -9
        answers(recipe, run)
    lines = answer_lines(run)
    assert Counter(line["id"] for line in lines) == Counter(f"p{n}" for n in range(100))
    found = {line["id"]: line["answer"] for line in lines}
    assert {name: found[name] for name in before} == before, "what was there before the kill stays"
    assert not list(run.path("answers").glob(".*"))

    local, own = begin(world, tmp_path / "own", 100, f"answers.writer.gguf={gguf}", *settings)
    answers(local, own)
    tokenizer = load_tokenizer(recipe.target.model)

    def text(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True)

    pairs = list(zip(read_answers(run, "train"), read_answers(own, "train"), strict=True))
    assert sum(theirs.prompt == ours.prompt for theirs, ours in pairs) >= 90
    same = sum(text(theirs.answer) == text(ours.answer) for theirs, ours in pairs if theirs.prompt == ours.prompt)
    assert same >= 80, f"{same} of 100"


@pytest.mark.skipif(not wheel_server.INSTALLED, reason="needs xllamacpp")
def test_a_llama_server_of_today_answers(world: Path, gguf: Path, tmp_path: Path) -> None:
    """llama.cpp of October 2026, with all that a request sends: greedily the texts of the GGUF writer, and sampled."""
    settings = (f"target.model={DEMO}", "answers.new_tokens=5", "answers.repetition_penalty=1.1")
    with started(LlamaServer(wheel_server.program(tmp_path), gguf, threads=1, parallel=4), 60) as running:
        for temperature in (0.0, 0.8):
            own = (*settings, f"sampler.temperature={temperature}", "sampler.min_p=0.05")
            place = served(f"{running.url}/v1", model=str(gguf), concurrency=4)
            recipe, run = begin(world, tmp_path / f"run-{temperature}", 24, place, *own)
            answers(recipe, run)
            assert len(answer_lines(run)) == 24 and not any(line["dropped"] for line in answer_lines(run))
            local, beside = begin(world, tmp_path / f"own-{temperature}", 24, f"answers.writer.gguf={gguf}", *own)
            answers(local, beside)
            pairs = list(zip(read_answers(run, "train"), read_answers(beside, "train"), strict=True))
            same = sum(theirs.answer == ours.answer for theirs, ours in pairs)
            assert same >= 20 if temperature == 0 else same < 20, f"{same} of 24"


def test_the_address_of_a_server_is_not_part_of_the_key(world: Path, tmp_path: Path) -> None:
    """A run goes on where the server moved; another model, another file or another API is another target."""
    from distill.pipeline.stages import Contents, difference, find_stage, key_parts

    def parts(*overrides: str) -> dict[str, Any]:
        recipe, run = begin(world, tmp_path, 1, *overrides)
        return key_parts(find_stage("answers"), recipe, run, Contents(run))

    contents = Contents(begin(world, tmp_path, 1)[1])
    first = parts(served("http://a/v1"))
    assert parts(served("http://b/v1", concurrency=9, key="K", retries=1, missing=0.1, timeout=3)) == first
    assert difference(first, parts(served("http://a/v1", api="chat")), contents) == [
        "answers.writer.api: 'completions' -> 'chat'"
    ]
    (tmp_path / "x.gguf").write_bytes(b"GGUF1")
    one = parts(f"answers.writer.gguf={tmp_path / 'x.gguf'}")
    (tmp_path / "x.gguf").write_bytes(b"GGUF2")
    two = parts(f"answers.writer.gguf={tmp_path / 'x.gguf'}")
    assert difference(one, two, contents) == ["answers.writer.gguf (content) has other content"]
