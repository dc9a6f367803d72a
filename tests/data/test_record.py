"""`distill record` from command to file: what it says, refuses and leaves behind. Covers distill/cli/measure.py."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest
import tiny
from loopback import LoopbackHandler, running
from tiny import Capture, Patch

from distill.cli.measure import _consent, _reaches
from distill.data.recorder import Recording
from distill.files import take_lock


class Handler(LoopbackHandler):
    owner: None

    def do_POST(self) -> None:
        asked = self.body()
        answer = f"You said: {asked['messages'][-1]['content']}"
        if not asked.get("stream"):
            choice = {"index": 0, "message": {"role": "assistant", "content": answer}, "finish_reason": "stop"}
            self.reply(200, {"choices": [choice]})
            return
        choices = [{"index": 0, "delta": {"content": text}, "finish_reason": None} for text in answer]
        choices.append({"index": 0, "delta": {}, "finish_reason": "stop"})
        self.stream(f"data: {json.dumps({'choices': [choice]})}" for choice in choices)


def start(*arguments: object) -> tuple[subprocess.Popen[str], str, list[str]]:
    """The command when it listens, its address, and what it has said."""
    command = [sys.executable, "-m", "distill", "record", *map(str, arguments), "--port", "0"]
    process = subprocess.Popen(
        command, cwd=tiny.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    )
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if line.startswith("ready: "):
            return process, line.split()[1].removesuffix(";"), said
    raise AssertionError(said)


def end(process: subprocess.Popen[str], number: int) -> tuple[int, str, str]:
    """Status, stdout and stderr after a signal to the whole group, as a terminal or a service manager sends it."""
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def test_the_command(tmp_path: Path) -> None:
    """Ended as a service manager does; tests/serving/test_real_server.py presses Ctrl-C."""
    folder = tmp_path / "logs"
    with running(Handler, None) as port:
        upstream = f"http://127.0.0.1:{port}/v1"
        process, url, said = start("--upstream", upstream, "--to", folder, "--redact", r"\d{4,}")
        text = "".join(said)
        assert f"http://127.0.0.1:{port}, as they are" in text and f"{folder}/traffic-*.jsonl" in text
        assert "X-Distill-Record: no" in text and "matches of 1 patterns" in text
        messages = [{"role": "user", "content": "My PIN is 1234"}]
        with httpx2.Client(base_url=url, headers={"Authorization": "Bearer sk-1"}, trust_env=False) as client:
            asked: dict[str, Any] = {"messages": messages}
            whole = client.post("/v1/chat/completions", json=asked)
            assert whole.json()["choices"][0]["message"]["content"] == "You said: My PIN is 1234"
            with client.stream("POST", "/v1/chat/completions", json=asked | {"stream": True}) as streamed:
                assert len(list(streamed.iter_lines())) == 2 * (len("You said: My PIN is 1234") + 1)
        code, out, err = end(process, signal.SIGTERM)
    assert (code, err) == (0, "")
    assert out.startswith("kept 2 answers, 0.0 MB in 1 files; left out 0")
    (path,) = folder.glob("*.jsonl")
    answer = {"role": "assistant", "content": "You said: My PIN is [redacted]"}
    expected = {"messages": [{"role": "user", "content": "My PIN is [redacted]"}, answer], "finish_reason": "stop"}
    assert [json.loads(line) for line in path.read_text().splitlines()] == [expected] * 2


def test_what_is_said_of_a_share_and_of_an_open_address() -> None:
    settings = Recording(("gpu", 8000), ("0.0.0.0", 1), Path("/logs"), sample=0.1)
    said = "\n".join(_consent(settings))
    for words in ("http://gpu:8000,", "a share of 0.1 of all", "nothing: --redact", "from outside"):
        assert words in said


def test_one_recorder_a_folder(tmp_path: Path, capsys: Capture) -> None:
    with (tmp_path / ".lock").open("w") as lock:
        assert take_lock(lock)
        said = tiny.refused(capsys, "record", "--upstream", "http://127.0.0.1:9", "--to", tmp_path)
    assert f"another `distill record` writes into {tmp_path}" in said and not list(tmp_path.glob("*.jsonl"))


def test_another_server_is_not_the_proxy() -> None:
    for upstream, listen in (
        (("127.0.0.1", 8000), ("127.0.0.1", 8100)),
        (("192.0.2.1", 8100), ("0.0.0.0", 8100)),
        (("no.such.host.invalid", 8100), ("0.0.0.0", 8100)),
    ):
        assert not _reaches(upstream, listen)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--redact", "a", "--redact", "(b"], ["--redact (b: missing )", "correct the regular expression"]),
        (["--redact", "a*"], ["--redact a* matches the empty text"]),
        (["--upstream", "https://x"], ["https cannot be passed on", "http://HOST:PORT"]),
        (["--upstream", "127.0.0.1:8000"], ["127.0.0.1:8000 is not the address of a server", "http://HOST:PORT"]),
        (["--upstream", "http://x:99999"], ["is not the address of a server"]),
        (["--upstream", "http://x/api/v2"], ["is not the address of a server", "without a path"]),
        (["--upstream", "http://u:p@x"], ["is not the address of a server"]),
        *(
            (["--upstream", f"http://{spelt}:8100"], ["is the address of the proxy itself", "--port"])
            for spelt in ("127.0.0.1", "localhost", "LOCALHOST", "127.1", "0.0.0.0")
        ),
        (["--host", "0.0.0.0", "--upstream", "http://127.0.0.5:8100/v1"], ["is the address of the proxy itself"]),
        (["--to", "FILE"], ["FILE", "File exists"]),
        (["--to", "x" * 300], ["--to: the path", "too long"]),
        (["--sample", "2"], ["--sample"]),
        (["--port", "TAKEN"], ["cannot be listened at: ", "in use"]),
        (["--host", "no.such.host.invalid"], ["no.such.host.invalid:8100 cannot be listened at"]),
    ],
)
def test_mistakes(tmp_path: Path, more: list[str], words: list[str], monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    Path("FILE").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        more = [port if word == "TAKEN" else word for word in more]
        assert tiny.call("record", "--upstream", "http://127.0.0.1:9", *more) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words) and "Traceback" not in said, said
