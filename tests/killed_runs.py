"""A program, not a test: runs `distill` in forked children with everything imported, and kills some of them.

    python tests/killed_runs.py JOBS.json    (a list of {"argv": [...]}, some with "event" or "after")

Event 2i is the moment just before the i-th rename of a job, 2i+1 the moment just
after it. "after" is the moment when the job has printed that text; it may come with "signal", the number of another
signal than SIGKILL. A job without any runs to its end.

One line of JSON per job goes to stdout: its exit status (-9 when killed), how many events it saw, and its output.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def preload() -> None:
    """Every heavy import, but no work: a fork must happen before any thread is started."""
    import accelerate  # noqa: F401
    import gguf  # noqa: F401
    import llama_cpp  # noqa: F401
    import matplotlib.figure  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import torch
    import transformers.models.auto.modeling_auto
    import transformers.models.qwen2.modeling_qwen2
    import transformers.models.qwen2.tokenization_qwen2  # noqa: F401

    import distill.report.page  # noqa: F401
    from distill.pipeline.stages import STAGES

    for stage in STAGES:
        stage.load()
    torch.set_num_threads(1)


def kill_at(event: int | None, counter: io.BufferedRandom) -> None:
    """Count the renames of this process and die at the event asked for."""
    seen = 0
    replace = os.replace

    def tick() -> None:
        nonlocal seen
        if seen == event:
            os.kill(os.getpid(), signal.SIGKILL)
        seen += 1
        counter.seek(0)
        counter.write(f"{seen:8d}".encode())
        counter.flush()

    def counted(source: Any, target: Any, **rest: Any) -> None:
        tick()
        replace(source, target, **rest)
        tick()

    os.replace = counted  # type: ignore[assignment]


def read_log(log: str) -> str:
    """The output of all jobs so far."""
    return Path(log).read_text(encoding="utf-8", errors="replace") if Path(log).exists() else ""


def run(job: dict[str, Any], counter: io.BufferedRandom, log: str) -> int:
    """Exit status of one job."""
    before = len(read_log(log))
    child = os.fork()
    if child == 0:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.argv = ["distill", *job["argv"]]
        kill_at(job.get("event"), counter)
        from distill.cli.app import main

        try:
            main()
        except SystemExit as exit:
            sys.stdout.flush()
            os._exit(int(exit.code or 0))
    while job.get("after", "\0") not in read_log(log)[before:]:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, job.get("signal", signal.SIGKILL))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run_jobs(folder: Path, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """This program's report on each job, for tests."""
    path = folder / "jobs.json"
    path.write_text(json.dumps(jobs))
    log = f"{path}.log"
    result = subprocess.run([sys.executable, __file__, str(path)], capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stderr + read_log(log)
    return [json.loads(line) for line in result.stdout.splitlines()]


def main() -> None:
    jobs = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    log = sys.argv[1] + ".log"
    preload()
    for job in jobs:
        with open(sys.argv[1] + ".count", "w+b") as counter:
            counter.write(b"       0")
            counter.flush()
            before = len(read_log(log))
            code = run(job, counter, log)
            counter.seek(0)
            print(
                json.dumps({"code": code, "events": int(counter.read()), "output": read_log(log)[before:]}), flush=True
            )


if __name__ == "__main__":
    main()
