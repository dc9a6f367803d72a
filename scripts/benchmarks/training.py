"""Compare our loss over the head with the usual ones: time and peak memory of the loss and its backward pass.

    python scripts/benchmarks/training.py --threads 2

Every variant runs in a process of its own, `--repeats` times after one warm-up. The seconds are medians. The memory is
the peak above the inputs, which are the weights, the hidden states, and the target's distributions in the variant's
form. The gradients of weights and hidden states do not count. The processes of the variants take turns (`--rounds`).
All values are random. Random distributions of the target have no meaning, but they cost the same as real ones. trl
takes part if it can be imported.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.nn.functional import kl_div

from distill.tables import Cell, Row, Table, document
from distill.teacher.distributions import CompactTeacher, DenseTeacher, Head, compress
from distill.training.losses import head_loss

Step = Callable[[], Tensor]  # computes a loss for the backward pass


class Peak:
    """The peak resident memory within a context above what was held before it, in `bytes`."""

    bytes = 0

    def now(self) -> int:
        """Return the bytes that are held."""
        return int(psutil.Process().memory_info().rss)

    def __enter__(self) -> Peak:
        self.start, self.ended = self.now(), threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self

    def _watch(self) -> None:
        while not self.ended.wait(0.002):
            self.bytes = max(self.bytes, self.now() - self.start)

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()


class Inputs:
    """The draft's hidden states [N, H] and head [V, H], and the target's with the same shapes."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        generator = torch.Generator().manual_seed(0)
        shape, rows = (arguments.tokens, arguments.hidden), (arguments.vocabulary, arguments.hidden)
        self.hidden = torch.randn(shape, generator=generator).requires_grad_()
        self.head = torch.randn(rows, generator=generator).mul_(0.05).requires_grad_()
        self.target = torch.randn(shape, generator=generator)
        self.labels = torch.randint(0, arguments.vocabulary, shape[:1], generator=generator)

    def target_head(self) -> Tensor:
        return torch.randn(self.head.shape, generator=torch.Generator().manual_seed(1)) * 0.05

    def logits(self) -> Tensor:
        """Return the target's logits [N, V]."""
        return self.target @ self.target_head().T

    def parts(self) -> list[slice]:
        count, chunk = self.arguments.tokens, self.arguments.chunk
        return [slice(start, start + chunk) for start in range(0, count, chunk)]


def ours(inputs: Inputs, teacher: CompactTeacher | DenseTeacher) -> Step:
    settings = {"forward_kl": 1.0}
    chunk = inputs.arguments.chunk
    return lambda: head_loss(inputs.hidden, inputs.head, teacher, inputs.labels, settings, chunk)[0]


def compact(inputs: Inputs) -> Step:
    a = inputs.arguments
    head = inputs.target_head()
    compressed = [compress(inputs.target[part] @ head.T, a.k, a.vocabulary) for part in inputs.parts()]
    ids, logs, tail = (torch.cat([getattr(x, n) for x in compressed]) for n in ("ids", "log_probabilities", "log_tail"))
    return ours(inputs, CompactTeacher(ids, logs.half(), tail, a.vocabulary))


def whole(inputs: Inputs) -> Step:
    head = Head(inputs.target_head()[: inputs.arguments.vocabulary])
    return ours(inputs, DenseTeacher(inputs.target, head))


def plain(inputs: Inputs) -> Step:
    given = inputs.logits()

    def step() -> Tensor:
        log_q = (inputs.hidden @ inputs.head.T).float().log_softmax(-1)
        return kl_div(log_q, given.float().log_softmax(-1), reduction="sum", log_target=True)

    return step


def gkd(inputs: Inputs) -> Step:
    """Return trl's generalised JSD at its default β, 0.5, on whole logits. ImportError without trl."""
    from trl.experimental.gkd import GKDTrainer

    given = inputs.logits()
    loss: Any = GKDTrainer.generalized_jsd_loss
    return lambda: loss((inputs.hidden @ inputs.head.T).unsqueeze(0), given.unsqueeze(0), beta=0.5)


VARIANTS: dict[str, tuple[str, Callable[[Inputs], Step]]] = {
    "plain": ("plain forward KL, the target's full logits given", plain),
    "trl": ("trl's GKD loss (JSD), full logits given", gkd),
    "compact": ("ours, forward KL, compact store", compact),
    "whole": ("ours, forward KL, exact store*", whole),
}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of each repeat, and the peak bytes, of the one variant named."""
    torch.set_num_threads(arguments.threads)
    inputs = Inputs(arguments)
    try:
        step = VARIANTS[arguments.variant][1](inputs)
    except ImportError as error:
        return {"missing": str(error)}
    peak = Peak()

    def run() -> float:
        inputs.hidden.grad = inputs.head.grad = None
        start = time.perf_counter()
        step().backward()
        return time.perf_counter() - start

    with peak:
        run()
    seconds = [run() for _ in range(arguments.repeats)]
    gradients = sum(x.grad.nbytes for x in (inputs.hidden, inputs.head) if x.grad is not None)
    return {"seconds": seconds, "bytes": peak.bytes - gradients}


def in_own_process(variant: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, *sys.argv[1:], "--variant", variant], capture_output=True, text=True
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"ended with {done.returncode}; out of memory?"]
        return {"missing": lines[-1]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--k", type=int, default=64, help="entries of the compact store")
    parser.add_argument("--chunk", type=int, default=256, help="positions whose logits exist at once")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=3, help="timed repeats of a process, after one warm-up")
    parser.add_argument("--rounds", type=int, default=1, help="processes of each variant, taking turns")
    parser.add_argument("--only", nargs="*", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.variant:
        print(json.dumps(measure(arguments)))
        return
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in arguments.only}
    for _ in range(arguments.rounds):
        for name in arguments.only:
            results[name].append(in_own_process(name))
            print(f"{name}: {results[name][-1]}", file=sys.stderr, flush=True)
    note = (
        f"V = {arguments.vocabulary:,}, H = {arguments.hidden}, {arguments.tokens:,} tokens, K = {arguments.k}, "
        f"chunks of {arguments.chunk}, {arguments.threads} threads, "
        f"torch {torch.__version__}. *: with the product of the target's hidden states and its head; without the "
        f"target's forward pass."
    )
    heads = ["loss and backward", "seconds", "GiB above weights and gradients", "time of plain", "memory of plain"]
    print(document([Table(heads, rows_of(results), note=note)]))


def rows_of(results: dict[str, list[dict[str, Any]]]) -> list[Row]:
    """Return seconds, memory and their ratios. A variant that could not run has the reason in its row."""
    measured = {}
    for name, runs in results.items():
        if all("seconds" in run for run in runs):
            seconds = statistics.median(second for run in runs for second in run["seconds"])
            measured[name] = seconds, max(run["bytes"] for run in runs)
    base = measured.get("plain", (math.nan, math.nan))
    rows: list[Row] = []
    for name, runs in results.items():
        if name in measured:
            seconds, size = measured[name]
            figures = [Cell(seconds, "significant"), Cell(size / 2**30, ".3f"), seconds / base[0], size / base[1]]
            rows.append([VARIANTS[name][0], *figures])
        else:
            why = next(run["missing"] for run in runs if "missing" in run)
            rows.append([f"{VARIANTS[name][0]}, not run: {why}", *[None] * 4])
    return rows


if __name__ == "__main__":
    main()
