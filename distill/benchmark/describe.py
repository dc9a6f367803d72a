"""A description of this machine for `distill plan --hardware`, from what steps of made-up models take.

Legend: m tokens of a step, r seconds of reading, c seconds of computing for each token, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy
import torch

from distill.benchmark.hardware import Hardware, StepWork, work_of_config
from distill.models.loaded import growing_decoder
from distill.progress import Progress
from distill.recipe import parse_section
from distill.speculative.costs.curve import measure_steps

COUNTS = (1, 2, 4, 8, 16)
DEPTH, REPEATS = 128, 9
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Hidden size, MLP width, layers, heads of queries and of keys, tokens: two that differ in layers alone, and one whose
# weights no cache of a CPU holds.
MODELS = ((512, 1024, 2, 8, 2, 1024), (512, 1024, 20, 8, 2, 1024), (2048, 5632, 4, 16, 4, 16384))


class Roofline(NamedTuple):
    """Seconds of reading all weights, of computing one token, and the share of the shorter that the longer hides."""

    read: float
    computed: float
    overlap: float

    def seconds(self, tokens: int) -> float:
        """Both, for so many tokens."""
        short, long = sorted((self.read, tokens * self.computed))
        return long + (1 - self.overlap) * short


def describe_machine(name: str, dtype: str, device: torch.device) -> Hardware:
    """Measure made-up models in PyTorch, as they decode for users; run it with nothing beside it."""
    works, curves = [], []
    progress = Progress("made-up models", len(MODELS) * (REPEATS + 1))
    for sizes in MODELS:
        model = made_up(*sizes).to(device, getattr(torch, dtype))
        works.append(work_of_config(model.config, BYTES[dtype]))
        with torch.inference_mode():
            steps = measure_steps(growing_decoder(model), COUNTS, DEPTH, REPEATS, model.config.vocab_size, progress)
        curves.append({m: median for m, (median, _, _) in steps.items()})
        del model
    return description(name, works, curves)


def made_up(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> Any:
    """A random Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocabulary}
    config = LlamaConfig(hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers, **sizes)
    return LlamaForCausalLM(config).eval()


def description(name: str, works: Sequence[StepWork], curves: Sequence[Mapping[int, float]]) -> Hardware:
    """The machine from the work of three models and the measured seconds of their steps, at DEPTH, of COUNTS tokens.

    T(1) = k · bytes + step + L · layer gives the overheads: three models, three unknowns. What the largest takes
    beyond them gives bandwidth, compute and overlap.
    """
    rows = [[work.weight_bytes(1) + DEPTH * work.position_bytes, 1.0, work.layers] for work in works]
    found = numpy.linalg.solve(numpy.array(rows), numpy.array([curve[1] for curve in curves]))
    step, layer = (max(float(one), 1e-9) for one in found[1:])
    large = works[-1]
    line = fitted({m: max(seconds - step - large.layers * layer, 1e-9) for m, seconds in curves[-1].items()})
    of = f"measured: steps of 1 to {max(COUNTS)} tokens of {large.parameters / 1e6:.0f}M made-up weights"
    overheads = f"measured: steps of one token of models of {', '.join(str(work.layers) for work in works)} layers"
    figures = {
        "memory_gb_per_s": (rows[-1][0] / line.read / 1e9, of),
        "compute_tflop_per_s": (2 * large.parameters / line.computed / 1e12, of),
        "overhead_ms": (1e3 * step, overheads),
        "layer_overhead_ms": (1e3 * layer, overheads),
        "overlap": (line.overlap, of),
    }
    values = {key: {"value": float(f"{value:.4g}"), "source": source} for key, (value, source) in figures.items()}
    return parse_section(Hardware, {"name": name, **values}, "the description")


def fitted(seconds: Mapping[int, float]) -> Roofline:
    """The roofline of least squared relative error, by trying all of a grid; m in `seconds` from 1 upwards."""
    longest = max(seconds)
    reads = seconds[1] * numpy.linspace(0.3, 1, 71)
    computed = seconds[longest] / longest * numpy.geomspace(0.02, 1, 80)
    tried = (Roofline(*map(float, one)) for one in product(reads, computed, numpy.linspace(0, 1, 11)))

    def error(line: Roofline) -> float:
        return sum(math.log(line.seconds(m) / taken) ** 2 for m, taken in seconds.items())

    return min(tried, key=error)
