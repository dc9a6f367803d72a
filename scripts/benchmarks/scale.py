"""Measure time, memory and disk for millions of answer tokens, from a file of questions to the training's loader.

    python scripts/benchmarks/scale.py --tokens 5e6

A made-up server that replies like vLLM stands for the target. Its answers, and the top-k at each of their tokens, are
functions of the requested ids. It therefore answers at once, and everything that is stored can be checked.
`distill train --until teacher` reads the questions, requests answers, packs and stores. The script kills it (SIGKILL)
`--kills` times and starts it again. Then one epoch of the loader reads all blocks with their distributions.

The script checks that each prompt is answered once with the server's ids, and that each scored position is read once
with the server's entries. Only requests that were under way at a kill may be sent twice. The figures count them.

Memory is the largest of any process. RssAnon is the memory that the process holds. VmHWM adds the pages of mapped
files, which the system can take back. With `--small`, the script first measures a part of that size. The slopes between
the two sizes predict the needs of ten times as many tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy

ROOT = Path(__file__).resolve().parent.parent.parent
MODEL, VOCABULARY, END = "made-up", 4093, 4093  # Ids of texts are below VOCABULARY. END ends an answer.
SHORTEST, LONGEST = 16, 784  # tokens of an answer
K, BLOCK, BATCH = 8, 1024, 8
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


# ── The made-up target: functions of ids ──


def answer_of(ids: list[int]) -> list[int]:
    """Return the answer to a prompt, including the end token."""
    generator = numpy.random.default_rng(ids)
    return [*generator.integers(0, VOCABULARY, generator.integers(SHORTEST, LONGEST)).tolist(), END]


def entries_of(tokens: Any) -> Any:
    """Return the K likeliest ids [N, K] at tokens [N], the likeliest first."""
    return (numpy.asarray(tokens)[:, None] + 37 * numpy.arange(K)) % VOCABULARY


LOGS = numpy.log(numpy.array([0.5 / 1.7**rank for rank in range(K)]) * 0.8)  # log-probabilities of the entries [K]


# ── The server, in a process of its own ──


class Server(BaseHTTPRequestHandler):
    """vLLM's /v1/models and /v1/completions. /counts returns how often prompts were requested."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    asked: ClassVar[Counter[bytes]] = Counter()
    places: ClassVar[dict[int, str]] = {}

    def log_message(self, *arguments: object) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        """Return the model, or the counts."""
        if self.path == "/counts":
            counts = [*self.asked.values()]
            self.reply(json.dumps({"asked": sum(counts), "of": len(counts)}))
        else:
            self.reply(json.dumps({"data": [{"id": MODEL, "owned_by": "vllm", "max_model_len": 4 * BLOCK}]}))

    def do_POST(self) -> None:
        """Return an answer with the entries at each of its tokens."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids = body["prompt"]
        new = answer_of(ids)[: body["max_tokens"]]
        if body["max_tokens"] > 1:  # Tests of the server ask for one token.
            self.asked[numpy.asarray(ids, "<i4").tobytes()] += 1
        tokens, tops = (", ".join(map(text_of, new)) for text_of in ('"token_id:{}"'.format, self.place))
        self.reply(
            f'{{"model": "{MODEL}", "choices": [{{"text": "", "finish_reason": "stop", "stop_reason": null, '
            f'"logprobs": {{"tokens": [{tokens}], "top_logprobs": [{tops}]}}, '
            f'"token_ids": {new}, "prompt_token_ids": {ids}}}]}}'
        )

    def place(self, token: int) -> str:
        """Return the entries at one token, as text."""
        if token not in self.places:
            entries = zip(entries_of([token])[0].tolist(), LOGS.tolist(), strict=True)
            self.places[token] = json.dumps({f"token_id:{entry}": log for entry, log in entries})
        return self.places[token]

    def reply(self, text: str) -> None:
        """Send JSON at once."""
        data = text.encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # The client may have been killed.
            self.wfile.write(data)


def serve() -> None:
    """Print the port, and serve until killed."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    print(server.server_address[1], flush=True)
    server.serve_forever()


@contextlib.contextmanager
def running() -> Iterator[int]:
    """Run the server and yield its port."""
    command = [sys.executable, __file__, "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


def counts_of(port: int) -> dict[str, int]:
    """Return the number of requests so far."""
    connection = HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/counts")
    counts: dict[str, int] = json.loads(connection.getresponse().read())
    connection.close()
    return counts


# ── The run ──


def build(folder: Path, tokens: int, port: int) -> Path:
    """Write the target's folder without weights, the questions and the recipe. Return the recipe's path."""
    target = folder / "target"
    changes = {
        "config.json": {"max_position_embeddings": 4 * BLOCK},
        "tokenizer_config.json": {"chat_template": TEMPLATE},
    }
    for name in ("donor", "target"):
        shutil.copytree(ROOT / "data/demo-target", folder / name)
        for file, more in changes.items():
            path = folder / name / file
            path.write_text(json.dumps(json.loads(path.read_text()) | more))
    (target / "model.safetensors").unlink()
    count = round(2 * tokens / (SHORTEST + LONGEST + 1))  # An answer also has its end.
    for split, number in (("train", count), ("validation", 16), ("test", 16)):
        lines = (json.dumps({"prompt": question(split, index)}) + "\n" for index in range(number))
        (folder / f"{split}.jsonl").write_text("".join(lines))
    server = {"urls": [f"http://127.0.0.1:{port}/v1"], "model": MODEL}
    recipe = {
        "name": "scale",
        "target": {"model": str(target)},
        "corpus": {
            "sources": [
                {"kind": "jsonl", "path": str(folder / f"{split}.jsonl"), "split": split}
                for split in ("train", "validation", "test")
            ],
            "max_documents": 10 * count,
            "block": BLOCK,
            "tokens": 0,
        },
        "answers": {"prompts": count, "new_tokens": LONGEST, "writer": server},
        "teacher": {"top_k": K, "mass": None},
        "cut": {"donor": str(folder / "donor"), "layers": 2},
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe))  # JSON is YAML, too.
    return path


def question(split: str, number: int) -> str:
    """Return a unique question."""
    generator = numpy.random.default_rng([len(split), number])
    words = generator.choice(
        ("return", "the", "list", "of", "values", "open", "class", "None"), generator.integers(8, 60)
    )
    return f"{number}: {' '.join(words)}"


@dataclass
class Spent:
    """Seconds of the commands, and the largest memory of a process in bytes: what it holds, and with mapped files."""

    seconds: float = 0.0
    held: int = 0
    memory: int = 0
    kills: int = 0


def run(recipe: Path, kills: int, tokens: int, positions: int) -> Spent:
    """Run `distill train --until teacher`. Kill it at equal parts of its output, and start it again each time."""
    spent, folder = Spent(), recipe.parent / "runs/scale"
    command = [
        sys.executable,
        "-m",
        "distill",
        "train",
        str(recipe),
        "--runs",
        str(folder.parent),
        "--until",
        "teacher",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    while True:
        started, log = time.monotonic(), open(recipe.parent / "log.txt", "a")  # noqa: SIM115 - It is closed below.
        with log, subprocess.Popen(command, stdout=log, stderr=log, env=environment) as process:
            while process.poll() is None:
                with contextlib.suppress(OSError, IndexError):
                    held, memory = memory_of(process.pid)
                    spent.held, spent.memory = max(spent.held, held), max(spent.memory, memory)
                if spent.kills < kills and written(folder, tokens, positions) > (spent.kills + 1) / (kills + 1):
                    process.send_signal(signal.SIGKILL)
                    spent.kills += 1
                    break
                time.sleep(0.1)
        spent.seconds += time.monotonic() - started
        if process.returncode != -signal.SIGKILL:
            assert process.returncode == 0, (recipe.parent / "log.txt").read_text()[-2000:]
            return spent


def memory_of(process: int | str) -> tuple[int, int]:
    """Return the bytes that a process holds now, and its peak with the pages of mapped files."""
    status = Path(f"/proc/{process}/status").read_text()
    held, memory = (1024 * int(status.partition(f"{name}:")[2].split()[0]) for name in ("RssAnon", "VmHWM"))
    return held, memory


def written(folder: Path, tokens: int, positions: int) -> float:
    """Return the share of answers and shards that is on disk, by bytes."""
    answers, shards = 0, 0
    for path in (*folder.glob("answers/train/*"), *folder.glob("teacher/train/*")):  # Hidden journals are included.
        with contextlib.suppress(FileNotFoundError):  # A temporary file may be renamed meanwhile.
            size = path.stat().st_size
            answers, shards = answers + size * ("answers" in path.parts), shards + size * ("teacher" in path.parts)
    return min(1.0, answers / ((4.5 + 6 * K + 8) * tokens)) / 2 + min(1.0, shards / (positions * (6 * K + 12))) / 2


def read_once(recipe: Path) -> dict[str, Any]:
    """Run one epoch of the loader in a process of its own: seconds, memory, scored positions, and wrong readings."""
    command = [sys.executable, __file__, "--load", str(recipe)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    figures: dict[str, Any] = json.loads(
        subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    )
    return figures


def load(path: Path) -> None:
    """Open the store, read every block once in the order of an epoch, and print the figures."""
    import torch

    from distill.recipe import load_recipe
    from distill.run import Run
    from distill.teacher.store import TeacherStore
    from distill.training.setup import epoch_order

    torch.set_num_threads(1)
    run = Run(path.parent / "runs/scale", load_recipe(path))
    started = time.monotonic()
    store = TeacherStore(run)
    opened = time.monotonic() - started
    positions = wrong = 0
    for index in epoch_order(store.blocks, 0, 0).split(BATCH):
        stored = store.read(index)
        blocks, teacher = stored.blocks, stored.distributions(torch.device("cpu"))
        labels = blocks.labels().numpy()
        chunk = teacher.chunk(slice(0, len(teacher)))
        assert chunk.ids is not None
        wrong += int((chunk.ids.numpy() != entries_of(labels)).any(1).sum())
        positions += len(labels)
    held, memory = memory_of("self")
    figures = {"opened": opened, "seconds": time.monotonic() - started, "positions": positions, "wrong": wrong}
    print(json.dumps(figures | {"held": held, "memory": memory}))


def check_answers(recipe: Path) -> tuple[int, int]:
    """Return the number of answers and of their tokens. AssertionError unless each prompt has the server's answer."""
    from distill.data.samples import read_answers, read_prompts
    from distill.recipe import load_recipe
    from distill.run import Run

    run = Run(recipe.parent / "runs/scale", load_recipe(recipe))
    prompts, answers = read_prompts(run, "train"), read_answers(run, "train")
    ids = [prompt.id for prompt in prompts]
    assert [answer.id for answer in answers] == ids, "an answer is missing, or there twice"
    tokens = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = answer_of(list(prompt.prompt))[:LONGEST]
        assert list(prompt.prompt) == list(answer.prompt) and list(answer.answer) == expected, f"{prompt.id} differs"
        tokens += len(expected)
    return len(answers), tokens


def measure(tokens: int, kills: int, folder: Path) -> dict[str, Any]:
    """Run everything for this many tokens, and return the figures."""
    with running() as port:
        recipe = build(folder, tokens, port)
        spent = run(recipe, kills, tokens, tokens)
        asked = counts_of(port)
    answers, written_tokens = check_answers(recipe)
    loaded = read_once(recipe)
    assert loaded["positions"] == written_tokens and not loaded["wrong"], loaded
    store = sum(path.stat().st_size for path in (folder / "runs/scale").rglob("*") if path.is_file())
    return {
        "tokens": written_tokens,
        "answers": answers,
        "kills": spent.kills,
        "asked twice": asked["asked"] - asked["of"],
        "seconds": round(spent.seconds),
        "loader": round(loaded["seconds"], 1),
        "opened": round(loaded["opened"], 2),
        "MiB": round(max(spent.held, loaded["held"]) / 2**20),
        "MiB with mapped files": round(max(spent.memory, loaded["memory"]) / 2**20),
        "MiB of the loader": round(loaded["held"] / 2**20),
        "MB on disk": round(store / 1e6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, default=2e5, help="approximate tokens of answers")
    parser.add_argument(
        "--small", type=float, help="measure this many tokens first, and extrapolate to ten times --tokens"
    )
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--folder", type=Path, help="an empty folder to keep (default: a temporary one)")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve()
    elif given.load:
        load(given.load)
    else:
        measured = []
        for tokens in filter(None, (given.small, given.tokens)):
            with contextlib.ExitStack() as stack:
                folder = given.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
                place = folder / f"{tokens:.0f}"
                place.mkdir(parents=True)
                measured.append(measure(int(tokens), given.kills, place))
                print(json.dumps(measured[-1]), flush=True)
        if len(measured) > 1:
            small, large = measured
            many = 10 * large["tokens"]
            share = (many - large["tokens"]) / (large["tokens"] - small["tokens"])
            names = ("seconds", "loader", "MiB", "MiB with mapped files", "MB on disk")
            print(json.dumps({"tokens": many, **{n: round(large[n] + share * (large[n] - small[n])) for n in names}}))


if __name__ == "__main__":
    main()
