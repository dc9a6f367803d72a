"""Estimated steps on a machine that a file describes: T(m) from what a step reads and computes.

T(m) = max(r, c) + (1 − overlap) · min(r, c) + overhead, of the step and of each layer, with r = bytes ÷ bandwidth and
c = operations ÷ compute.

Legend: m tokens of a step of one sequence.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from distill.engines.torch.described import empty_model
from distill.engines.torch.hugging_face import load_config
from distill.errors import DataError, RecipeError
from distill.files import read_utf8
from distill.gguf.head import open_head
from distill.gguf.importing import is_gguf
from distill.recipe import parse_section
from distill.recipe.recipe import read_yaml
from distill.recipe.target import Section
from distill.surgery.cutter import EXPERTS

CACHED_BYTES = 2  # of a cached key or value: both engines cache 16 bits by default
IN_LAYER = re.compile(r"(^blk|\blayers)\.\d+\.")
OF_A_TOKEN = ("num_experts_per_tok", "top_k_experts", "moe_top_k")  # experts that a token uses, by family
OF_EXPERT = re.compile(r"_exps\.|\.experts\.")
INPUT, HEAD = ("token_embd.weight", "embed_tokens.weight"), ("output.weight", "lm_head.weight")
# Types that models are published in, by config.json: which matrices, and the bytes of a weight. Of MXFP4, 32 weights of
# 4 bits share a scale of 8.
PUBLISHED = {"mxfp4": (OF_EXPERT, 4.25 / 8), "fp8": (IN_LAYER, 1.0)}


class Sourced(Section):
    """A figure and where it comes from."""

    value: float = Field(gt=0)
    source: str = Field(min_length=3)


class Share(Sourced):
    """A share and where it comes from."""

    value: float = Field(ge=0, le=1)


class Hardware(Section):
    """A machine.

    `overlap` is the share of the shorter of reading and computing that passes during the longer: all of it where it is
    left out. With a link, the layers that do not fit into `memory_gb`, or the share `link_share` of the weights, stream
    over it in each step (`layer_swap`). `link_jitter` is the relative spread of a transfer's time.
    """

    name: str
    memory_gb_per_s: Sourced
    compute_tflop_per_s: Sourced
    overhead_ms: Sourced
    layer_overhead_ms: Sourced | None = None
    overlap: Share | None = None
    link_gb_per_s: Sourced | None = None
    link_share: Share | None = None
    link_jitter: Sourced | None = None
    memory_gb: Sourced | None = None

    @model_validator(mode="after")
    def _a_link_has_a_share(self) -> Hardware:
        away = (self.link_share is not None) + (self.memory_gb is not None)
        if (self.link_gb_per_s is None and (away or self.link_jitter is not None)) or (
            self.link_gb_per_s and away != 1
        ):
            raise ValueError("link_gb_per_s goes together with either memory_gb or link_share, and link_jitter with it")
        return self


def read_hardware(path: Path) -> Hardware:
    """The machine that a YAML file describes; raises DataError or RecipeError for a file that cannot be used."""
    raw = read_yaml(read_utf8(path), str(path))
    try:
        return parse_section(Hardware, raw, str(path))
    except RecipeError as error:
        raise RecipeError(error.what, "docs/plan.md lists the keys") from None


@dataclass(frozen=True)
class StepWork:
    """What a step of one sequence reads and multiplies: bytes that every step reads (`shared_bytes`), those of all
    experts, of which a token uses the share `used`, and those cached for each position; `parameters` that a token is
    multiplied by. `layer_bytes` are those that one token reads of one layer.
    """

    layers: int
    layer_bytes: float
    shared_bytes: float
    expert_bytes: float
    used: float
    position_bytes: float
    parameters: float

    def weight_bytes(self, tokens: int) -> float:
        """Bytes of weights; each token is taken to use experts of its own, drawn evenly."""
        return self.shared_bytes + self.expert_bytes * (1 - (1 - self.used) ** tokens)

    def seconds(self, tokens: int, depth: int, hardware: Hardware) -> float:
        """T(tokens) behind `depth` cached tokens, where all weights lie in the device's own memory."""
        read = (self.weight_bytes(tokens) + depth * self.position_bytes) / hardware.memory_gb_per_s.value / 1e9
        computed = 2 * tokens * self.parameters / hardware.compute_tflop_per_s.value / 1e12
        layer = 0.0 if hardware.layer_overhead_ms is None else hardware.layer_overhead_ms.value
        both = max(read, computed)
        if hardware.overlap is not None:
            both += (1 - hardware.overlap.value) * min(read, computed)
        return both + (hardware.overhead_ms.value + self.layers * layer) / 1e3


def work_of(reference: str, weight_bytes: float) -> StepWork:
    """The work of a model, from a GGUF file's head or from config.json alone, as `work_of_config`."""
    if not is_gguf(reference):
        return work_of_config(load_config(reference), weight_bytes)
    head = open_head(Path(reference))
    sizes = [(name, math.prod(one), head.sizes[name]) for name, one in head.shapes.items()]
    heads = head.count("attention.head_count")
    keys = head.count("attention.key_length", max(1, head.count("embedding_length") // heads))
    # A latent attention of one cached head holds keys and values in the same numbers (files of llama.cpp since 2025).
    shared = head.size("attention.kv_lora_rank", 0, 2**20) and head.count("attention.head_count_kv", heads) == 1
    values = 0 if shared else head.count("attention.value_length", keys)
    cached = head.count("attention.head_count_kv", heads) * (keys + values) * CACHED_BYTES
    experts = head.size("expert_count", 0, 2**20) or 0
    used = (head.size("expert_used_count", 1, 2**20) or 1) / experts if experts else 1.0
    return _work(sizes, head.count("block_count"), used, cached)


def work_of_config(config: Any, weight_bytes: float) -> StepWork:
    """The work of the model that a configuration of transformers describes, each weight of `weight_bytes`, or of fewer
    where it is published so; of one that reads images too, of its language model. DataError for one without attention.
    """
    try:
        return _work_of_attention(config, weight_bytes)
    except (AttributeError, TypeError, ValueError) as error:  # each family's code says in its own way what it lacks
        kind = getattr(config, "model_type", "of no type")
        raise DataError(
            f"what a step of this model reads is not known, {kind}: {error}",
            "plan from measured steps: --target-curve (`distill profile MODEL --out FILE`) or --server",
        ) from error


def _work_of_attention(config: Any, weight_bytes: float) -> StepWork:
    stored = getattr(config, "quantization_config", None) or {}
    config = config.get_text_config()
    method = stored.get("quant_method") if isinstance(stored, dict) else getattr(stored, "quant_method", None)
    packed, fewer = PUBLISHED.get(str(method), (None, weight_bytes))
    sizes = []
    for name, one in empty_model(config).named_parameters():
        small = packed is not None and one.ndim > 1 and not name.endswith("bias") and packed.search(name)
        sizes.append((name, one.numel(), one.numel() * (min(weight_bytes, fewer) if small else weight_bytes)))
    heads = config.num_attention_heads
    if latent := getattr(config, "kv_lora_rank", None):  # what servers cache; transformers caches the heads made of it
        cached = (latent + config.qk_rope_head_dim) * CACHED_BYTES
    else:
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        cached = 2 * (getattr(config, "num_key_value_heads", None) or heads) * width * CACHED_BYTES
    experts = next((count for name in EXPERTS if (count := getattr(config, name, None))), 0)
    each = next((count for name in OF_A_TOKEN if (count := getattr(config, name, None))), None)
    if experts and not each:
        raise ValueError(f"its configuration does not say how many of {experts} experts a token uses")
    used = each / experts if each and experts else 1.0
    layers = config.num_hidden_layers
    return _work(sizes, layers, used, cached * _layers_with_keys(config) / layers)


def _layers_with_keys(config: Any) -> int:
    """The layers that cache keys and values: of a model with recurrent layers, the others."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    try:
        found = DynamicCache(config=config).layers
    except KeyError:  # of a family with a cache of its own
        found = []
    return sum(isinstance(layer, DynamicLayer) for layer in found) or int(config.num_hidden_layers)


def _work(tensors: Iterable[tuple[str, int, float]], layers: int, used: float, cached: float) -> StepWork:
    """From names, parameters and bytes. A head of its own leaves the input embedding one row a token."""
    found = list(tensors)
    if any(name in HEAD for name, *_ in found):
        found = [one for one in found if not one[0].endswith(INPUT)]
    totals = {expert: [0.0, 0.0, 0.0] for expert in (False, True)}  # parameters, bytes, bytes in layers
    for name, count, size in found:
        total = totals[OF_EXPERT.search(name) is not None]
        total[0] += count
        total[1] += size
        total[2] += size if IN_LAYER.search(name) else 0
    shared, experts = totals[False], totals[True]
    layer = (shared[2] + used * experts[2]) / layers
    return StepWork(layers, layer, shared[1], experts[1], used, layers * cached, shared[0] + used * experts[0])
