"""Models, teachers and memory of benchmarks whose values are random: only shapes cost time and memory."""

from __future__ import annotations

import math
import threading
from typing import Any

import psutil
import torch

from distill.teacher.distributions import CompactTeacher


def random_model(
    kind: str, hidden: int, mlp: int, layers: int, heads: tuple[int, int], vocabulary: int, tied: bool = True
) -> Any:
    """A Qwen2 or Llama (`kind`) with so many heads of queries and of keys; its seed makes it the same everywhere."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        max_position_embeddings=8192,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def random_teacher(positions: int, k: int, vocabulary: int, generator: torch.Generator, device: Any) -> CompactTeacher:
    """A compact teacher of `k` random entries a position, whose ids differ in each row."""
    part = vocabulary // k
    top = torch.randint(0, part, (positions, k), generator=generator) + torch.arange(k) * part
    logs = torch.randn(positions, k, generator=generator).log_softmax(-1) - 0.05
    tail = torch.full((positions,), math.log(-math.expm1(-0.05)))
    return CompactTeacher(top.int().to(device), logs.half().to(device), {1.0: tail.to(device)}, vocabulary)


class Peak:
    """The highest memory of a block above what was held before it, in `bytes`: resident, on a GPU torch's own count."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.bytes = device, 0

    def now(self) -> int:
        """The bytes that are held."""
        if self.device.type == "cuda":
            return int(torch.cuda.memory_allocated(self.device))
        return int(psutil.Process().memory_info().rss)

    def __enter__(self) -> Peak:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
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
        if self.device.type == "cuda":
            self.bytes = int(torch.cuda.max_memory_allocated(self.device)) - self.start
