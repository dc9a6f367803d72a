"""A program with the options, replies and log lines of llama-server (llama-cpp-python 0.3.36's sources), no model.

Its text is a function of the prompt, its acceptance of the options: q4_0 keys of the draft lower it, a p_min ends
drafts early. FAKE names a fault; FAKE_PID is a file that gets the process id. `install` makes it a program of its own.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from loopback import LoopbackHandler, server_of

SOURCE = Path(__file__)
TEMPLATES = {"chatml": ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"), "llama2": ("[INST] ", " [/INST]")}
FLAGS = {"--metrics": 0, "--no-ui": 0, "--host": 1, "--port": 1, "--parallel": 1, "--ctx-size": 1, "--cache-ram": 1}
FLAGS |= {"--threads": 1, "-m": 1, "-md": 1, "--spec-type": 1, "--spec-draft-n-max": 1, "--spec-draft-p-min": 1}
FLAGS |= {"--spec-draft-type-k": 1, "--spec-draft-type-v": 1, "-ctkd": 1, "--chat-template": 1, "--spec-draft-n-min": 1}
FLAGS |= {"--cache-type-k": 1, "--cache-type-v": 1, "--spec-draft-sampling": 1, "--kv-unified": 0}
NEW = ("--spec-draft-sampling", "--kv-unified")
STEP_SECONDS = 0.001  # between two tokens of a server that does not answer at once
EVERY = 4  # of four drafted tokens that may be accepted, one is refused at each place


def install(folder: Path) -> Path:
    """The program, to be started as a llama-server."""
    (folder / "loopback.py").write_text(SOURCE.with_name("loopback.py").read_text(encoding="utf-8"), encoding="utf-8")
    path = folder / "llama-server"
    path.write_text(f"#!{sys.executable} -S\n" + SOURCE.read_text(encoding="utf-8"), encoding="utf-8")
    path.chmod(0o755)
    return path


def parse(arguments: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    place = 0
    while place < len(arguments):
        name = arguments[place]
        if name not in FLAGS:
            print(f"error: invalid argument: {name}", flush=True)
            sys.exit(1)
        found["--spec-draft-type-k" if name == "-ctkd" else name] = arguments[place + 1] if FLAGS[name] else ""
        place += 1 + FLAGS[name]
    return found


class Server:
    """The state of one process."""

    def __init__(self, options: dict[str, str], fault: str) -> None:
        self.options, self.fault, self.lock = options, fault, threading.Lock()
        self.requests = self.rounds = self.drafted = self.accepted = 0
        self.n_max = int(options.get("--spec-draft-n-max", "3"))
        self.positions = [0] * self.n_max
        self.drafts = "-md" in options and fault != "draft-less"

    def text(self, prompt: list[int], limit: int) -> tuple[list[int], int, int, list[tuple[int, int]]]:
        """Tokens, and the drafted and accepted tokens of each round."""
        tokens = [(sum(prompt) * 31 + 7 * place) % 199 for place in range(limit)]
        rounds = []
        place = 1
        while self.drafts and place < limit:
            most = min(self.n_max, limit - place - 1)
            if float(self.options.get("--spec-draft-p-min", "0")) > 0:
                most = min(most, 1)
            good = (sum(prompt) + place) % EVERY
            if self.options.get("--spec-draft-sampling") == "probabilistic":
                good += 1
            if self.options.get("--spec-draft-type-k", "f16") == "q4_0":
                good //= 3
            accepted = min(most, good)
            if most:
                rounds.append((most, accepted))
            place += accepted + 1
        return tokens, sum(n for n, _ in rounds), sum(n for _, n in rounds), rounds

    def complete(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        prompt, limit = body["prompt"], body["n_predict"]
        tokens, drafted, accepted, rounds = self.text(prompt, limit)
        with self.lock:
            if self.fault == "balanced" and self.requests % 2:  # another server's counters
                rounds = []
            self.rounds += len(rounds)
            self.drafted += sum(n for n, _ in rounds)
            self.accepted += sum(n for _, n in rounds)
            for _, count in rounds:
                for place in range(count):
                    self.positions[place] += 1
        shown = {"index": 0, "stop": False, "id_slot": -1, "tokens_evaluated": len(prompt)}
        events = [
            shown | {"content": "x", "tokens": [token], "tokens_predicted": place}
            for place, token in enumerate(tokens, 1)
        ]
        timings: dict[str, Any] = {"cache_n": 5 if self.fault == "warm" else 0, "prompt_n": len(prompt)}
        timings |= {"prompt_ms": 1.0, "predicted_n": limit, "predicted_ms": 10.0}
        if drafted:
            timings |= {"draft_n": drafted, "draft_n_accepted": accepted}
        last = shown | {"content": "", "tokens": [], "stop": True, "tokens_predicted": limit, "stop_type": "limit"}
        return [*events, last if self.fault == "no timings" else last | {"timings": timings}]

    def metrics(self) -> str:
        values = {"num_draft_tokens": self.drafted, "num_accepted_tokens": self.accepted, "num_drafts": self.rounds}
        lines = []
        for name, value in values.items():
            full = f"llamacpp:spec_decode_{name}_total"
            lines += [f"# HELP {full} Speculative", f"# TYPE {full} counter", f"{full} {value}"]
        name = "llamacpp:spec_decode_num_accepted_tokens_per_pos_total"
        lines += [f"# TYPE {name} counter"] * bool(self.rounds)
        lines += [f'{name}{{position="{i}"}} {n}' for i, n in enumerate(self.positions)] * bool(self.rounds)
        return "\n".join(lines) + "\n"


class Handler(LoopbackHandler):
    owner: Server

    def do_GET(self) -> None:
        state = self.owner
        before, behind = TEMPLATES[state.options.get("--chat-template", "chatml")]
        if self.path == "/health":
            if state.fault == "never healthy":
                self.reply(503, {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}})
            else:
                self.reply(200, {"status": "ok"})
        elif self.path == "/props":
            found = {"build_info": "b1-0c1e570", "total_slots": 1, "chat_template": before + behind}
            self.reply(200, found | {"model_path": state.options["-m"]})
        elif self.path == "/slots":
            self.reply(200, [{"id": 0, "n_ctx": 512, "speculative": state.drafts, "is_processing": False}])
        elif self.path == "/metrics" and "--metrics" in state.options:
            self.reply(200, state.metrics())
        elif self.path == "/v1/models":
            self.reply(200, {"data": [{"id": "m", "owned_by": "llamacpp", "meta": {"n_vocab": 400}}]})
        else:
            self.reply(404, {"error": {"message": "File Not Found", "type": "not_found_error", "code": 404}})

    def do_POST(self) -> None:
        state = self.owner
        body = self.body()
        before, behind = TEMPLATES[state.options.get("--chat-template", "chatml")]
        if self.path == "/apply-template":
            self.reply(200, {"prompt": before + body["messages"][0]["content"] + behind})
        elif self.path == "/completion":
            with state.lock:
                state.requests += 1
                number = state.requests
            self.completion(body, number)
        else:
            self.reply(404, {"error": {"message": "File Not Found", "type": "not_found_error", "code": 404}})

    def completion(self, body: dict[str, Any], number: int) -> None:
        state = self.owner
        if state.fault == "refuses":
            message = "request (160 tokens) exceeds the available context size (128 tokens), try increasing it"
            error = {"code": 400, "message": message, "type": "exceed_context_size_error", "n_ctx": 128}
            self.reply(400, {"error": error})
            return
        if state.fault == "slow" and number > 1:
            time.sleep(30)
        self.stream(self.events(body, number))
        self.close_connection = True  # as llama-server does, without a word

    def events(self, body: dict[str, Any], number: int) -> Iterator[str]:
        state = self.owner
        for place, event in enumerate(state.complete(body)):
            if state.fault == "killed" and number > 2 and place == 3:
                print("0.01.000 E srv  update_slots: decode failed: out of memory", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            if state.fault in ("paced", "balanced"):
                time.sleep(STEP_SECONDS)
            name = "error" if state.fault == "fails later" and place == 2 else "data"
            value = {"message": "compute error", "code": 500} if name == "error" else event
            yield f"{name}: {json.dumps(value)}"


def main() -> None:
    fault = os.environ.get("FAKE", "")
    if path := os.environ.get("FAKE_PID"):
        with open(path, "a") as file:
            file.write(f"{os.getpid()}\n")
    if "--help" in sys.argv:
        print("\n".join(flag for flag in FLAGS if fault != "old" or flag not in NEW))
        return
    options = parse(sys.argv[1:])
    print(f"0.00.005 I srv    load_model: loading model '{options['-m']}'", flush=True)
    if fault == "exits":
        print("0.00.010 E srv    load_model: failed to load model", flush=True)
        sys.exit(1)
    state = Server(options, fault)
    if "-md" in options and fault == "draft-less":
        print("0.00.030 E spec: the target and draft vocabs are not compatible", flush=True)
    if fault == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        server = server_of(Handler, state, int(options["--port"]))
    except OSError:
        where = f"hostname: 127.0.0.1, port: {options['--port']}"
        print(f"0.00.040 E srv  start: couldn't bind HTTP server socket, {where}", flush=True)
        sys.exit(1)
    server.serve_forever(0.02)


if __name__ == "__main__":
    main()
