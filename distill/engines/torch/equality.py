"""Comparison of our decoding with transformers' own forward pass, on a small random model of the same configuration.

The small model has the class and the settings of the configuration: its kinds of layers, rotary embedding, caps and
scales. Its sizes and borders are small, so that a text of LENGTH tokens crosses every window, chunk and stretched
context that the configuration names. The comparison takes a fraction of a second. Its result is kept for the small
configuration, the sources that decode, and the versions of the libraries.
"""

from __future__ import annotations

import copy
import functools
import inspect
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
STRETCHED = 24  # tokens before a rotary embedding is stretched
LENGTH = 40  # tokens of a text
WIDTH = 32  # numbers of a head
PIECES = (5, 1, 2, 1, 3, 6, 1, 7, 1)  # tokens of the calls that read a text; the last call reads the rest
ALLOWED = 1e-3  # allowed difference at any position, relative to the spread of the logits in fp32
SIZES = {
    "vocab_size": 96,
    "intermediate_size": 48,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
KINDS = ("layer_types", "no_rope_layers", "mlp_layer_types", "attention_layers")  # lists with a value for each layer
SOURCES = [Path(__file__).with_name(f"{name}.py") for name in ("equality", "model", "static", "blocks")]
SOURCES += sorted(Path(__file__).with_name("products").glob("*.[pc]*"))


def small_config(config: Any) -> Any:
    """Return a configuration of the same class and settings with small sizes and borders."""
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
    rotary = [part for part in parameters.values() if isinstance(part, dict)] or [parameters]
    width = getattr(small, "head_dim", None) or small.hidden_size // small.num_attention_heads
    if not any(isinstance(value, list) for part in rotary for value in part.values()):  # a factor for each dimension
        width = min(width, WIDTH)
    if "head_dim" in {field.name for field in fields(type(small))}:
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
    for part in rotary:
        if part.get("rope_type") == "longrope":
            part["original_max_position_embeddings"] = STRETCHED
        if "dynamic" in str(part.get("rope_type")):
            small.max_position_embeddings = STRETCHED
    if getattr(small, "original_max_position_embeddings", None):
        small.original_max_position_embeddings = STRETCHED
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config"):
        setattr(small, key, None)
    return small


@functools.lru_cache(256)
def _judged(name: str, check: Callable[[Any], str], key: str) -> str:
    """Return the fault that `check` finds in the small model of a configuration; empty if it finds none."""
    from transformers import AutoModelForCausalLM

    place = cache_folder("weights") / f"equal-{digest([name, key])}.json"
    try:
        return str(read_json(place, {"fault": str})["fault"])
    except DataError:
        pass
    # The small model runs on the CPU and in fp32, whatever the caller's type and device are.
    with torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False), torch.no_grad(), quiet():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(_CONFIGS[key], dtype=torch.float32).eval()
        for weight in model.parameters():
            weight.mul_(4) if weight.dim() > 1 else weight.add_(0.1 * torch.randn_like(weight))
        fault = check(model)
    remember(place, {"fault": fault})
    return fault


_CONFIGS: dict[str, Any] = {}  # small configurations by their digest


def require_equal_to_transformers(model: Any, name: str, check: Callable[[Any], str]) -> bool:
    """Raise DataError if `check` finds a fault in the small model of a model's configuration.

    `name` says what is checked: decoding, or a packed block. Returns whether a small model could be made. Some classes
    need other sizes.
    """
    try:
        small = small_config(model.config)
        small._attn_implementation = model.config._attn_implementation
        versions = _versions(inspect.getfile(check))
        key = digest([small.to_dict() | {"_name_or_path": ""}, small._attn_implementation, versions])
        _CONFIGS[key] = small
        fault = _judged(name, check, key)
    except DataError:
        raise
    except Exception:  # a class that needs other sizes
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
def _versions(source: str) -> list[str]:
    """Return the texts of SOURCES and of the file `source`, and the versions of the libraries."""
    texts = [path.read_text(encoding="utf-8") for path in (*SOURCES, Path(source))]
    return [*texts, *(f"{name} {version_of(name)}" for name in ("torch", "transformers"))]


def random_ids(model: Any, length: int, seed: int = 0) -> list[int]:
    """Return random ids of a text of `length` tokens."""
    numbers = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config.vocab_size, (length,), generator=numbers).tolist()


@torch.inference_mode()
def own_logits(model: Any, ids: list[int]) -> Tensor:
    """Return transformers' logits [S, V] of a text that is read whole."""
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def difference(found: Tensor, expected: Tensor, words: str) -> str:
    """Return the first position where logits [S, V] differ by more than rounding, in words; empty if there is none."""
    off = (found.float() - expected.float()).abs().amax(-1) / expected.float().std()
    if not bool((off > ALLOWED).any() or off.isnan().any()):
        return ""
    place = int((off.nan_to_num(1e9) > ALLOWED).nonzero()[0, 0])
    return f"{words}, from token {place + 1} on (by {float(off[place]):.2g} of the logits' spread)"


def decoded_in_pieces(decoder: Any, ids: list[int]) -> Tensor:
    """Return the logits [S, V] of a text from a cache, in calls of several lengths.

    Before most calls, one token more is read and rolled back.
    """
    at, logits = 0, []
    for size in (*PIECES, len(ids)):
        piece = ids[at : at + size]
        if not piece:
            break
        if at + size < len(ids):
            decoder.extend(ids[at : at + size + 1])
            decoder.rollback([at])
        logits.append(decoder.extend(piece).full())
        at += len(piece)
    return torch.cat(logits)


def decoded_in_trees(decoder: Any, ids: list[int], other: list[int]) -> Tensor:
    """Return the logits [S, V] of a text from a cache, read as a branch of trees whose other branch is `other`.

    After each tree, four tokens of the text are committed, and the last one is rolled back and read again.
    """
    decoder.rollback([0])
    at = 4
    logits = [decoder.extend(ids[:at]).full()]
    while at + 4 <= len(ids):
        text, wrong = ids[at : at + 4], other[at : at + 2]
        nodes = [wrong[0], text[0], wrong[1], *text[1:]]
        logits.append(decoder.extend(nodes, parents=[-1, -1, 0, 1, 3, 4]).full()[[1, 3, 4]])
        decoder.keep([[1, 3, 4, 5]])
        at += 3
        decoder.rollback([at])
    logits.append(decoder.extend(ids[at:]).full())
    return torch.cat(logits)
