"""Whether our decoding of a configuration equals transformers' own forward pass, shown once on a small random model.

The small model has the configuration's class and settings: its kinds of layers, its rotary embedding, its caps and
scales. Sizes and borders are small: every window, chunk and stretched context that the configuration names is crossed
within LENGTH tokens. So the check takes a fraction of a second where weights take seconds to load, and its result is
remembered for the small configuration, the sources that decode and the versions of the libraries.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distill.engines.torch.hugging_face import UNDECODABLE, quiet
from distill.errors import DataError
from distill.files import cache_folder, digest, read_json, remember
from distill.machine import version_of

BORDER = 8  # tokens of a window or a chunk
STRETCHED = 24  # tokens up to which a rotary embedding stays as it is
LENGTH = 40  # tokens of a text
WIDTH = 32  # numbers of a head
ALLOWED = 1e-3  # of the logits' spread in fp32, at the position that differs most
SIZES = {
    "vocab_size": 96,
    "intermediate_size": 48,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
KINDS = ("layer_types", "no_rope_layers", "mlp_layer_types", "attention_layers")  # a value a layer
SOURCES = [Path(__file__).with_name(f"{name}.py") for name in ("equality", "model", "static", "products", "blocks")]


def small_config(config: Any) -> Any:
    """A configuration of the same class and settings with small sizes and borders."""
    small = copy.deepcopy(config.get_text_config())
    small._name_or_path = ""  # Messages name files, and no small model in their place.
    kinds = [value for key in KINDS if isinstance(value := getattr(small, key, None), list)]
    layers = list(zip(*kinds, strict=False)) or [()] * small.num_hidden_layers
    count = max(2, *(layers.index(kind) + 1 for kind in set(layers)))
    for key in KINDS:
        if isinstance(value := getattr(small, key, None), list):
            setattr(small, key, value[:count])
    small.num_hidden_layers = count
    shared = getattr(small, "num_key_value_heads", None) or small.num_attention_heads
    pairs, groups = min(shared, 2), 2 if small.num_attention_heads > shared else 1
    parameters = getattr(small, "rope_parameters", None) or {}
    rotary = [one for one in parameters.values() if isinstance(one, dict)] or [parameters]
    width = getattr(small, "head_dim", None) or small.hidden_size // small.num_attention_heads
    if not any(isinstance(value, list) for one in rotary for value in one.values()):  # of a number each dimension
        width = min(width, WIDTH)
    if "head_dim" in {one.name for one in fields(type(small))}:
        small.head_dim = width
    small.num_attention_heads = pairs * groups
    if hasattr(small, "num_key_value_heads"):
        small.num_key_value_heads = pairs
    small.hidden_size = pairs * groups * width
    for key, size in SIZES.items():
        if isinstance(getattr(small, key, None), int):
            setattr(small, key, size)
    for key in ("sliding_window", "attention_chunk_size"):
        if getattr(small, key, None):
            setattr(small, key, BORDER)
    small.max_position_embeddings = 4 * LENGTH
    for one in rotary:
        if one.get("rope_type") == "longrope":
            one["original_max_position_embeddings"] = STRETCHED
        if "dynamic" in str(one.get("rope_type")):
            small.max_position_embeddings = STRETCHED
    if getattr(small, "original_max_position_embeddings", None):
        small.original_max_position_embeddings = STRETCHED
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config"):
        setattr(small, key, None)
    return small


@functools.lru_cache(256)
def _judged(name: str, check: Callable[[Any], str], key: str) -> str:
    """The fault that `check` finds in the small model of a configuration; empty where there is none."""
    from transformers import AutoModelForCausalLM

    place = cache_folder("weights") / f"equal-{digest([name, key])}.json"
    try:
        return str(read_json(place, {"fault": str})["fault"])
    except DataError:
        pass
    # On the CPU and in fp32, whatever the caller computes in.
    with torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False), torch.no_grad(), quiet():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(_CONFIGS[key], dtype=torch.float32).eval()
        for weight in model.parameters():
            weight.mul_(4) if weight.dim() > 1 else weight.add_(0.1 * torch.randn_like(weight))
        fault = check(model)
    remember(place, {"fault": fault})
    return fault


_CONFIGS: dict[str, Any] = {}  # small ones, by their digest


def require_equal_to_transformers(model: Any, name: str, check: Callable[[Any], str]) -> bool:
    """Raise DataError where `check` (of decoding, of packed blocks: `name`) finds a fault in the small model of a
    model's configuration. Whether there is a small model: of some classes none can be made."""
    try:
        small = small_config(model.config)
        small._attn_implementation = model.config._attn_implementation
        key = digest([small.to_dict() | {"_name_or_path": ""}, small._attn_implementation, _versions()])
        _CONFIGS[key] = small
        fault = _judged(name, check, key)
    except DataError:
        raise
    except Exception:  # a class with sizes of its own, which asks for others
        return False
    finally:
        _CONFIGS.clear()
    if fault:
        kind = model.config.model_type
        raise DataError(
            f"{getattr(model.config, '_name_or_path', '') or kind} cannot be used here: {name} of a {kind} with these "
            f"settings differs from transformers' own forward pass {fault}",
            UNDECODABLE,
        )
    return True


@functools.cache
def _versions() -> list[str]:
    texts = [path.read_text(encoding="utf-8") for path in SOURCES]
    return [*texts, *(f"{name} {version_of(name)}" for name in ("torch", "transformers"))]


def random_ids(model: Any, length: int, seed: int = 0) -> list[int]:
    """Ids of a text of at most this length."""
    numbers = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config.vocab_size, (length,), generator=numbers).tolist()


@torch.inference_mode()
def own_logits(model: Any, ids: list[int]) -> Tensor:
    """transformers' logits [S, V] of a text read whole."""
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def difference(found: Tensor, expected: Tensor, words: str) -> str:
    """The place where logits [S, V] differ by more than rounding, in words; empty where they do not."""
    off = (found.float() - expected.float()).abs().amax(-1) / expected.float().std()
    if not bool((off > ALLOWED).any() or off.isnan().any()):
        return ""
    place = int((off.nan_to_num(1e9) > ALLOWED).nonzero()[0, 0])
    return f"{words}, from token {place + 1} on (by {float(off[place]):.2g} of the logits' spread)"


def decoded_in_pieces(decoder: Any, ids: list[int]) -> Tensor:
    """The logits [S, V] of a text from a cache, in calls of several lengths; more is read first and rolled back."""
    at, found = 0, []
    for size in (5, 1, 2, 1, 3, 6, 1, 7, 1, len(ids)):
        piece = ids[at : at + size]
        if not piece:
            break
        if at + size < len(ids):
            decoder.extend(ids[at : at + size + 1])
            decoder.rollback([at])
        found.append(decoder.extend(piece).full())
        at += len(piece)
    return torch.cat(found)
