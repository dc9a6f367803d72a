"""Time and peak memory of a loss over the head and its backward pass, ours beside the usual ones.

    python scripts/benchmarks/training.py --threads 2
    python scripts/benchmarks/training.py --device cuda --dtype bfloat16 --tokens 8192

Every variant is a process of its own, run `--repeats` times after one warm-up: the median of the seconds, and the peak
of the memory above what stood before (the inputs: weights, hidden states, the target's distributions in the form that
the variant takes) less the bytes of the gradients of weights and hidden states. The processes of the variants take
turns (`--rounds`). Values are random; the target's distribution is nobody's, but its cost is the same. trl and Liger
take part where they can be imported; Liger needs a GPU.
"""

from __future__ import annotations

import argparse
import json
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

from distill.devices import CPU, device_name, peak_memory_bytes, synchronise, take_peaks
from distill.teacher.distributions import CompactTeacher, DenseTeacher, Head
from distill.teacher.store import compress
from distill.training.losses import LossSettings, head_loss

Step = Callable[[], Tensor | None]  # a loss to take back, or None where there is nothing to


class Peak:
    """The highest memory of a block above what was held before it, in `bytes`: resident, on a GPU torch's own count."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.bytes = device, 0

    def now(self) -> int:
        """The bytes that are held."""
        if self.device.type != CPU:
            return int(torch.accelerator.memory_allocated(self.device))
        return int(psutil.Process().memory_info().rss)

    def __enter__(self) -> Peak:
        synchronise(self.device)
        take_peaks()
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
        if self.device.type != CPU:
            self.bytes = peak_memory_bytes(self.device) - self.start


class Inputs:
    """Draft's hidden states [N, H] and head [V, H], and the target's, which has the same shape."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.device = torch.device(arguments.device)
        kind = getattr(torch, arguments.dtype)
        generator = torch.Generator(self.device).manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=self.device).to(kind)

        shape = (arguments.tokens, arguments.hidden)
        self.hidden = random(*shape).requires_grad_()
        self.head = random(arguments.vocabulary, arguments.hidden).mul_(0.05).requires_grad_()
        self.target = random(*shape)
        self.labels = torch.randint(0, arguments.vocabulary, shape[:1], generator=generator, device=self.device)

    def target_head(self) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(1)
        head = torch.randn(self.head.shape, generator=generator, device=self.device) * 0.05
        return head.to(self.head.dtype)

    def logits(self, out: Tensor | None = None) -> Tensor:
        """The target's logits [N, V]."""
        return torch.mm(self.target, self.target_head().T, out=out)

    def parts(self) -> list[slice]:
        count, chunk = self.arguments.tokens, self.arguments.chunk
        return [slice(start, start + chunk) for start in range(0, count, chunk)]


def ours(inputs: Inputs, teacher: CompactTeacher | DenseTeacher, losses: dict[str, float]) -> Step:
    settings = LossSettings(losses)
    chunk = inputs.arguments.chunk
    return lambda: head_loss(inputs.hidden, inputs.head, teacher, inputs.labels, settings, chunk)[0]


def compact(inputs: Inputs, losses: dict[str, float]) -> Step:
    a = inputs.arguments
    head = inputs.target_head()
    found = [compress(inputs.target[part] @ head.T, a.k, a.vocabulary) for part in inputs.parts()]
    ids, logs, tail = (torch.cat([getattr(x, n) for x in found]) for n in ("ids", "log_probabilities", "log_tail"))
    return ours(inputs, CompactTeacher(ids, logs.half(), {1.0: tail}, a.vocabulary), losses)


def whole(inputs: Inputs, losses: dict[str, float]) -> Step:
    head = Head(inputs.target_head()[: inputs.arguments.vocabulary])
    return ours(inputs, head.teacher(inputs.target), losses)


def plain(inputs: Inputs) -> Step:
    given = inputs.logits()

    def step() -> Tensor:
        log_q = (inputs.hidden @ inputs.head.T).float().log_softmax(-1)
        return kl_div(log_q, given.float().log_softmax(-1), reduction="sum", log_target=True)

    return step


def naive(inputs: Inputs) -> Step:
    """Chunks under activation checkpointing: their logits are computed a second time on the way back."""
    from torch.utils.checkpoint import checkpoint

    given = inputs.logits()

    def one(hidden: Tensor, target: Tensor) -> Tensor:
        log_q = (hidden @ inputs.head.T).float().log_softmax(-1)
        return kl_div(log_q, target.float().log_softmax(-1), reduction="sum", log_target=True)

    def step() -> Tensor:
        parts = [checkpoint(one, inputs.hidden[part], given[part], use_reentrant=False) for part in inputs.parts()]
        return torch.stack(parts).sum()

    return step


def gkd(inputs: Inputs) -> Step:
    """trl's generalised JSD at its default β, 0.5, on whole logits; ImportError without trl."""
    try:
        from trl.experimental.gkd import GKDTrainer
    except ImportError:  # before it moved
        from trl import GKDTrainer

    given = inputs.logits()
    loss: Any = GKDTrainer.generalized_jsd_loss
    return lambda: loss((inputs.hidden @ inputs.head.T).unsqueeze(0), given.unsqueeze(0), beta=0.5)


def liger(inputs: Inputs) -> Step:
    """Liger's fused linear JSD, β = 0.5; ImportError without it or without a GPU."""
    if inputs.device.type == "cpu":
        raise ImportError("needs a GPU")
    from liger_kernel.transformers.fused_linear_jsd import LigerFusedLinearJSD

    loss, head = LigerFusedLinearJSD(0.5), inputs.target_head()
    return lambda: loss(inputs.hidden, inputs.head, inputs.target, head, inputs.labels)


def products(inputs: Inputs) -> Step:
    """The three matrix products of a loss over the head, in the same chunks, and nothing else."""
    hidden, head = inputs.hidden.detach(), inputs.head.detach()
    buffer = torch.empty(inputs.arguments.chunk, len(head), dtype=head.dtype, device=head.device)

    def step() -> None:
        d_hidden, d_head = torch.empty_like(hidden), torch.zeros_like(head)
        for part in inputs.parts():
            own = hidden[part]
            logits = torch.mm(own, head.T, out=buffer[: len(own)])
            torch.mm(logits, head, out=d_hidden[part])
            d_head.addmm_(logits.T, own)
        inputs.hidden.grad, inputs.head.grad = d_hidden, d_head

    return step


KL, MIXTURE = {"forward_kl": 1.0}, {"forward_kl": 0.9, "cross_entropy": 0.1}
VARIANTS: dict[str, tuple[str, Callable[[Inputs], Step]]] = {
    "plain": ("plain forward KL, the target's full logits given", plain),
    "naive": ("forward KL in checkpointed chunks, full logits given", naive),
    "trl": ("trl's GKD loss (JSD), full logits given", gkd),
    "liger": ("Liger's fused linear JSD, hidden states given", liger),
    "products": ("the three matrix products alone, in chunks", products),
    "compact": ("ours, forward KL, compact store", lambda inputs: compact(inputs, KL)),
    "compact-mixture": ("ours, .9 forward KL + .1 CE, compact store", lambda inputs: compact(inputs, MIXTURE)),
    "compact-lk": ("ours, LK hybrid, compact store", lambda inputs: compact(inputs, {"lk_hybrid": 1.0})),
    "compact-jsd": ("ours, JSD, compact store", lambda inputs: compact(inputs, {"jsd": 1.0})),
    "whole": ("ours, forward KL, exact store or online target*", lambda inputs: whole(inputs, KL)),
    "whole-jsd": ("ours, JSD, exact store or online target*", lambda inputs: whole(inputs, {"jsd": 1.0})),
}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each repeat, and the peak bytes, of the one variant named."""
    torch.set_num_threads(arguments.threads)
    inputs = Inputs(arguments)
    try:
        step = VARIANTS[arguments.variant][1](inputs)
    except ImportError as error:
        return {"missing": str(error)}
    peak = Peak(inputs.device)

    def run() -> float:
        inputs.hidden.grad = inputs.head.grad = None
        start = time.perf_counter()
        loss = step()
        if loss is not None:
            loss.backward()
        synchronise(inputs.device)
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
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--only", nargs="*", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.variant:
        print(json.dumps(measure(arguments)))
        return
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in arguments.only}
    for _ in range(arguments.rounds):
        for name in arguments.only:
            found[name].append(in_own_process(name))
            print(f"{name}: {found[name][-1]}", file=sys.stderr, flush=True)
    device = torch.device(arguments.device)
    name = device.type if device.type == CPU else device_name(device)
    print(
        f"V = {arguments.vocabulary:,}, H = {arguments.hidden}, {arguments.tokens:,} tokens, K = {arguments.k}, "
        f"chunks of {arguments.chunk}, {arguments.dtype}, {name}, {arguments.threads} threads, "
        f"torch {torch.__version__}\n"
    )
    print(table(found))
    print("\n*: with the product of the target's hidden states and its head; without the target's forward pass.")


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Seconds, memory and their ratios as Markdown; a variant that could not run has the reason in its row."""
    times: dict[str, float] = {}
    sizes: dict[str, int] = {}
    for name, runs in found.items():
        if all("seconds" in run for run in runs):
            times[name] = statistics.median(second for run in runs for second in run["seconds"])
            sizes[name] = max(run["bytes"] for run in runs)

    def ratio(values: dict[str, Any], name: str, base: str) -> str:
        return f"{values[name] / values[base]:.2f}" if values.get(base) else "–"

    lines = [
        "| loss and backward | seconds | GiB above weights and gradients | time of plain | time of the products "
        "| memory of plain |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, runs in found.items():
        if name not in times:
            why = next(run["missing"] for run in runs if "missing" in run)
            lines.append(f"| {VARIANTS[name][0]} | not run: {why} | | | | |")
            continue
        lines.append(
            f"| {VARIANTS[name][0]} | {times[name]:.3g} | {sizes[name] / 2**30:.3f} | {ratio(times, name, 'plain')} "
            f"| {ratio(times, name, 'products')} | {ratio(sizes, name, 'plain')} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
