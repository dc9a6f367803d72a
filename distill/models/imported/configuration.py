"""config.json from the metadata of a GGUF file: the inverse of the exporter's model_fields.py."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distill.models.gguf.families import FAMILIES, GELU, Family
from distill.models.gguf.file_head import FileHead
from distill.models.imported.keys import Keys, shortest

# model_type by llama.cpp's architecture: the first family that is written as it (mistral is written as llama).
MODEL_TYPES = {family.architecture: kind for kind, family in reversed(list(FAMILIES.items()))}
CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "granite": "GraniteForCausalLM",
}
WITHOUT_HEAD_SIZE = ("phi3", "granite")  # hidden size over heads, in transformers too
LLAMA3_CONTEXT = 8192  # original context of every Llama 3; any other gives the same factors with other low and high


def family_of(keys: Keys) -> tuple[str, Family]:
    """The model_type of a file and its family; DataError for an architecture that is not known, by its name."""
    kind = MODEL_TYPES.get(keys.architecture)
    if kind is None:
        keys.refuse(
            f"architecture {keys.architecture!r} cannot be imported",
            f"known: {', '.join(sorted(MODEL_TYPES))}; give the Hugging Face folder of this model",
        )
    if keys.own("expert_count"):
        keys.refuse(f"a mixture of {keys.own('expert_count')} experts cannot be imported", "give its folder")
    if keys.values.get("split.count", 0) not in (0, 1):
        keys.refuse(
            f"it is one of {keys.values['split.count']} parts of a model",
            "join the parts first: llama-gguf-split --merge FIRST_PART OUT.gguf",
        )
    return kind, FAMILIES[kind]


def configuration(keys: Keys, head: FileHead, factors: Mapping[str, NDArray[np.float32]]) -> dict[str, Any]:
    """The values of config.json, without the ids of special tokens and the type of the weights.

    `factors`: the tensors of rotary factors by name (rope_freqs, rope_factors_long, rope_factors_short).
    Raises DataError for an architecture that is not known, and for values that transformers cannot hold.
    """
    kind, family = family_of(keys)
    embedding = head.shapes.get("token_embd.weight")
    if embedding is None or len(embedding) != 2:
        keys.refuse("it has no matrix token_embd.weight")
    heads, hidden = keys.count("attention.head_count"), keys.count("embedding_length")
    size = keys.count("attention.key_length", hidden // heads)
    if keys.count("attention.value_length", size) != size:
        keys.refuse("its keys and values differ in width, which transformers cannot hold")
    found: dict[str, Any] = {
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": keys.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", heads),
        "vocab_size": embedding[1],
        "max_position_embeddings": keys.count("context_length"),
        "rms_norm_eps": keys.real("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in head.shapes,
        "use_cache": True,
    }
    activation = "hidden_activation" if family.activation == GELU else "hidden_act"
    found[activation] = family.activation
    if kind in WITHOUT_HEAD_SIZE:
        if size * heads != hidden:
            keys.refuse(f"heads of {size} do not make up a hidden size of {hidden}, as {kind} has them in transformers")
    elif family.states_head_size or size * heads != hidden:
        found["head_dim"] = size
    rope = _rope(keys, family, found, size, factors)
    return found | {"rope_parameters": rope} | _by_family(keys, kind, found, head, rope)


def _rope(
    keys: Keys, family: Family, config: Mapping[str, Any], size: int, factors: Mapping[str, NDArray[np.float32]]
) -> dict[str, Any]:
    """The parameters of the rotary embedding."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": keys.real("rope.freq_base", 10000.0)}
    stated = keys.text(f"{keys.architecture}.rope.scaling.type")
    factor = keys.own("rope.scaling.factor") or keys.own("rope.scale_linear")
    original = keys.own("rope.scaling.original_context_length")
    if stated in ("linear", "yarn") or (stated is None and factor not in (None, 0, 1.0)):
        rope |= {"rope_type": stated or "linear", "factor": shortest(factor or 1.0)}
    if rope["rope_type"] == "yarn":
        rope["original_max_position_embeddings"] = original or config["max_position_embeddings"]
        for key, name in (
            ("attn_factor", "attention_factor"),
            ("beta_fast", "beta_fast"),
            ("beta_slow", "beta_slow"),
        ):
            value = keys.own(f"rope.scaling.yarn_{key}")
            value = keys.own(f"rope.scaling.{key}") if value is None else value
            if value is not None:
                rope[name] = shortest(value)
    if "rope_freqs.weight" in factors:
        rope |= _llama3(keys, factors["rope_freqs.weight"], rope["rope_theta"], size, original or LLAMA3_CONTEXT)
    if "rope_factors_long.weight" in factors:
        rope["rope_type"] = "longrope"
        for name in ("long", "short"):
            values = factors.get(f"rope_factors_{name}.weight")
            if values is None:
                keys.refuse(f"it has no rope_factors_{name}.weight")
            rope[f"{name}_factor"] = [shortest(value) for value in values]
        rope["original_max_position_embeddings"] = original or config["max_position_embeddings"]
    if rope["rope_type"] not in family.ropes:
        keys.refuse(f"rope scaling {rope['rope_type']!r} on {keys.architecture} cannot be imported")
    rotated = keys.count("rope.dimension_count", size)
    if rotated != size:
        if keys.architecture != "phi3":
            keys.refuse(f"a rotary embedding of {rotated} of {size} dimensions on {keys.architecture}")
        rope["partial_rotary_factor"] = rotated / size
    return rope


def _llama3(keys: Keys, divisors: NDArray[np.float32], theta: float, size: int, original: int) -> dict[str, Any]:
    """The settings of Llama 3's rope scaling that give these divisors [D/2] of the frequencies.

    Between two wavelengths, 1 / divisor runs linearly in the frequency from 1 / factor to 1: two points give the line,
    and with it low and high for a given original context. Raises DataError for divisors of another rule.
    """
    frequencies = theta ** -(np.arange(0, size, 2, dtype=np.float64) / size)
    factor = shortest(float(divisors.max()))
    wanted = divisors.astype(np.float64)
    between = (divisors > 1) & (divisors < divisors.max())
    candidates = [(1.0, 4.0)]
    if between.sum() >= 2:
        share = (1 / wanted[between] - 1 / factor) / (1 - 1 / factor)
        slope, start = np.polyfit(original * frequencies[between] / (2 * math.pi), share, 1)
        candidates.append((round(-start / slope, 4), round((1 - start) / slope, 4)))
    for low, high in candidates:
        if len(divisors) != len(frequencies) or not 0 < low < high:
            continue
        turns = original * frequencies / (2 * math.pi)
        share = np.clip((turns - low) / (high - low), 0, 1)
        if np.allclose(1 / ((1 - share) / factor + share), wanted, rtol=1e-4, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    keys.refuse("its rope_freqs.weight is not of Llama 3's rule, the only one that transformers has for it")


def _by_family(
    keys: Keys, kind: str, config: Mapping[str, Any], head: FileHead, rope: Mapping[str, Any]
) -> dict[str, Any]:
    """What one family alone has in its config.json."""
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    heads = config["num_attention_heads"]
    if kind == "llama":
        biases = {name.split(".")[2] for name in head.shapes if name.startswith("blk.") and name.endswith(".bias")}
        return {
            "attention_bias": bool(biases & {"attn_q", "attn_k", "attn_v", "attn_output"}),
            "mlp_bias": bool(biases & {"ffn_gate", "ffn_up", "ffn_down"}),
        }
    if kind in ("qwen2", "qwen3"):
        return {"use_sliding_window": False, "sliding_window": None}
    if kind in ("gemma2", "gemma3_text"):
        # llama.cpp knows the 27B models by their layers and scales their queries by hidden size over heads.
        large = layers == {"gemma2": 46, "gemma3_text": 62}[kind]
        found: dict[str, Any] = {
            "query_pre_attn_scalar": hidden // heads if large else config["head_dim"],
            "sliding_window": keys.count("attention.sliding_window"),
        }
        if kind == "gemma2":
            found["attn_logit_softcapping"] = keys.real("attn_logit_softcapping")
            found["final_logit_softcapping"] = keys.real("final_logit_softcapping")
            return found
        cap = keys.own("final_logit_softcapping")
        local = {"rope_type": "default", "rope_theta": keys.real("rope.freq_base_swa", 10000.0)}
        both = {"full_attention": rope, "sliding_attention": local}
        return {**found, "final_logit_softcapping": None if cap is None else shortest(cap), "rope_parameters": both}
    if kind == "phi3":
        original = keys.own("rope.scaling.original_context_length")
        return {
            "original_max_position_embeddings": original or config["max_position_embeddings"],
            "sliding_window": keys.own("attention.sliding_window") or None,
        }
    if kind == "granite":
        return {
            "attention_multiplier": keys.real("attention.scale", 1.0),
            "embedding_multiplier": keys.real("embedding_scale", 1.0),
            "residual_multiplier": keys.real("residual_scale", 1.0),
            "logits_scaling": keys.real("logit_scale", 1.0),
            "attention_bias": False,
        }
    return {"no_rope_layer_interval": 4, "attention_bias": False} if kind == "smollm3" else {}
