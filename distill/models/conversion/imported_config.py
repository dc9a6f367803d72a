"""config.json from the metadata of a GGUF file: the inverse of model_fields.py."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from distill.models.conversion.families import (
    FAMILIES,
    GELU,
    GRANITE_SCALES,
    LLAMA3_FACTORS,
    LONG_FACTORS,
    SHORT_FACTORS,
    YARN_KEYS,
    Family,
    Sizes,
)
from distill.models.conversion.fields import DEFAULT_THETA, llama3_divisors
from distill.models.gguf.file_head import FileHead, shortest
from distill.models.tensor_files import Floats

# model_type by llama.cpp's architecture: the first family that is written as it (mistral is written as llama).
MODEL_TYPES = {family.architecture: kind for kind, family in reversed(list(FAMILIES.items()))}
WITHOUT_HEAD_SIZE = ("phi3", "granite")  # hidden size over heads, in transformers too
LLAMA3_CONTEXT = 8192  # original context of every Llama 3; any other gives the same factors with other low and high


def family_of(head: FileHead) -> tuple[str, Family]:
    """The model_type of a file and its family; DataError for an architecture that is not known, by its name."""
    kind = MODEL_TYPES.get(head.architecture)
    if kind is None:
        head.refuse(
            f"architecture {head.architecture!r} cannot be imported",
            f"known: {', '.join(sorted(MODEL_TYPES))}; give the Hugging Face folder of this model",
        )
    if head.own("expert_count"):
        head.refuse(f"a mixture of {head.own('expert_count')} experts cannot be imported", "give its folder")
    if head.values.get("split.count", 0) not in (0, 1):
        head.refuse(
            f"it is one of {head.values['split.count']} parts of a model",
            "join the parts first: llama-gguf-split --merge FIRST_PART OUT.gguf",
        )
    return kind, FAMILIES[kind]


def sizes_of(config: Mapping[str, Any]) -> Sizes:
    """The sizes of an imported model from its config.json."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    return Sizes(
        family=FAMILIES[config["model_type"]],
        hidden=hidden,
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config["num_key_value_heads"],
        head_size=config.get("head_dim") or hidden // heads,
        mlp=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        tied=config["tie_word_embeddings"],
    )


def configuration(head: FileHead, factors: Mapping[str, Floats]) -> dict[str, Any]:
    """The values of config.json, without the ids of special tokens and the type of the weights.

    `factors`: the tensors of rotary factors by name (rope_freqs, rope_factors_long, rope_factors_short).
    Raises DataError for an architecture that is not known, and for values that transformers cannot hold.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    kind, family = family_of(head)
    embedding = head.shapes.get("token_embd.weight")
    if embedding is None or len(embedding) != 2:
        head.refuse("it has no matrix token_embd.weight")
    heads, hidden = head.count("attention.head_count"), head.count("embedding_length")
    size = head.count("attention.key_length", hidden // heads)
    if head.count("attention.value_length", size) != size:
        head.refuse("its keys and values differ in width, which transformers cannot hold")
    config: dict[str, Any] = {
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": head.count("feed_forward_length"),
        "num_hidden_layers": head.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": head.count("attention.head_count_kv", heads),
        "vocab_size": embedding[1],
        "max_position_embeddings": head.count("context_length"),
        "rms_norm_eps": head.real("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in head.shapes,
        "use_cache": True,
    }
    activation = "hidden_activation" if family.activation == GELU else "hidden_act"
    config[activation] = family.activation
    if kind in WITHOUT_HEAD_SIZE:
        if size * heads != hidden:
            head.refuse(f"heads of {size} do not make up a hidden size of {hidden}, as {kind} has them in transformers")
    elif family.states_head_size or size * heads != hidden:
        config["head_dim"] = size
    rope = _rope(head, family, config, size, factors)
    return config | {"rope_parameters": rope} | _by_family(head, kind, config, rope)


def _rope(
    head: FileHead, family: Family, config: Mapping[str, Any], size: int, factors: Mapping[str, Floats]
) -> dict[str, Any]:
    """The parameters of the rotary embedding."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": head.real("rope.freq_base", DEFAULT_THETA)}
    stated = head.text(f"{head.architecture}.rope.scaling.type")
    scaled = next((key for key in ("rope.scaling.factor", "rope.scale_linear") if head.own(key)), None)
    factor = 1.0 if scaled is None else head.real(scaled)
    original = _original_context(head)
    if stated in ("linear", "yarn") or (stated is None and factor != 1):
        rope |= {"rope_type": stated or "linear", "factor": factor}
    if rope["rope_type"] == "yarn":
        rope["original_max_position_embeddings"] = original or config["max_position_embeddings"]
        for name, key in YARN_KEYS.items():
            for place in (f"rope.scaling.yarn_{key}", f"rope.scaling.{key}"):
                if head.own(place) is not None:
                    rope[name] = head.real(place)
                    break
    if LLAMA3_FACTORS in factors:
        rope |= _llama3(head, factors[LLAMA3_FACTORS], rope["rope_theta"], size, original or LLAMA3_CONTEXT)
    if LONG_FACTORS in factors:
        rope["rope_type"] = "longrope"
        for key, name in (("long_factor", LONG_FACTORS), ("short_factor", SHORT_FACTORS)):
            if name not in factors:
                head.refuse(f"it has no {name}")
            rope[key] = [shortest(value) for value in factors[name]]
        rope["original_max_position_embeddings"] = original or config["max_position_embeddings"]
    if rope["rope_type"] not in family.ropes:
        head.refuse(f"rope scaling {rope['rope_type']!r} on {head.architecture} cannot be imported")
    rotated = head.count("rope.dimension_count", size)
    if rotated != size:
        if head.architecture != "phi3":
            head.refuse(f"a rotary embedding of {rotated} of {size} dimensions on {head.architecture}")
        rope["partial_rotary_factor"] = rotated / size
    return rope


def _original_context(head: FileHead) -> int | None:
    """Positions that the embedding was made for before it was scaled; None where the file does not say."""
    key = "rope.scaling.original_context_length"
    return head.count(key) if head.own(key) else None


def _llama3(head: FileHead, divisors: Floats, theta: float, size: int, original: int) -> dict[str, Any]:
    """The settings of Llama 3's rope scaling that give these divisors [D/2] of the frequencies.

    Between two wavelengths, 1 / divisor runs linearly in the frequency from 1 / factor to 1: two points give the line,
    and with it low and high for a given original context. Raises DataError for divisors of another rule.
    """
    frequencies = theta ** -(np.arange(0, size, 2, dtype=np.float64) / size)
    factor = shortest(float(divisors.max()))
    expected = divisors.astype(np.float64)
    between = (divisors > 1) & (divisors < divisors.max())
    candidates = [(1.0, 4.0)]
    if between.sum() >= 2 and len(divisors) == len(frequencies):
        share = (1 / expected[between] - 1 / factor) / (1 - 1 / factor)
        slope, start = np.polyfit(original * frequencies[between] / (2 * math.pi), share, 1)
        candidates.append((round(-start / slope, 4), round((1 - start) / slope, 4)))
    for low, high in candidates:
        if len(divisors) != len(frequencies) or not 0 < low < high or factor <= 0:
            continue
        if np.allclose(llama3_divisors(theta, size, factor, low, high, original), divisors, rtol=1e-4, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    head.refuse("its rope_freqs.weight is not of Llama 3's rule, the only one that transformers has for it")


def _by_family(head: FileHead, kind: str, config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """What one family alone has in its config.json."""
    if kind == "llama":
        biases = {name.split(".")[2] for name in head.shapes if name.startswith("blk.") and name.endswith(".bias")}
        return {
            "attention_bias": bool(biases & {"attn_q", "attn_k", "attn_v", "attn_output"}),
            "mlp_bias": bool(biases & {"ffn_gate", "ffn_up", "ffn_down"}),
        }
    if kind in ("qwen2", "qwen3"):
        return {"use_sliding_window": False, "sliding_window": None}
    if kind in ("gemma2", "gemma3_text"):
        values: dict[str, Any] = {
            "query_pre_attn_scalar": sizes_of(config).query_scale,
            "sliding_window": head.count("attention.sliding_window"),
        }
        if kind == "gemma2":
            values["attn_logit_softcapping"] = head.real("attn_logit_softcapping")
            values["final_logit_softcapping"] = head.real("final_logit_softcapping")
            return values
        cap = head.own("final_logit_softcapping")
        local = {"rope_type": "default", "rope_theta": head.real("rope.freq_base_swa", DEFAULT_THETA)}
        both = {"full_attention": rope, "sliding_attention": local}
        return {**values, "final_logit_softcapping": None if cap is None else shortest(cap), "rope_parameters": both}
    if kind == "phi3":
        return {
            "original_max_position_embeddings": _original_context(head) or config["max_position_embeddings"],
            "sliding_window": head.own("attention.sliding_window") or None,
        }
    if kind == "granite":
        return {name: head.real(key, 1.0) for name, key in GRANITE_SCALES.items()} | {"attention_bias": False}
    return {"no_rope_layer_interval": 4, "attention_bias": False} if kind == "smollm3" else {}
