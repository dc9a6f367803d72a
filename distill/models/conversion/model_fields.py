"""The architecture's keys of a GGUF file: sizes, rotary embedding, scales and caps."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from distill.errors import DataError
from distill.models.conversion.families import (
    GRANITE_SCALES,
    LLAMA3_FACTORS,
    LONG_FACTORS,
    SHORT_FACTORS,
    YARN_KEYS,
)
from distill.models.conversion.model_shape import CORRECT, Shape
from distill.models.tensor_files import Floats

DEFAULT_THETA = 10000.0  # llama.cpp's, where a file names none


def add_model_fields(writer: Any, shape: Shape) -> None:
    """Write the architecture's keys to a gguf.GGUFWriter, those of llama.cpp's converter."""
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.mlp)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(shape.rms_epsilon)
    if shape.family.states_head_size or shape.head_size * shape.heads != shape.hidden:
        writer.add_key_length(shape.head_size)
        writer.add_value_length(shape.head_size)
    if shape.family.llama_keys:
        writer.add_vocab_size(shape.vocabulary)
    if shape.family.llama_keys or shape.architecture == "phi3":
        writer.add_rope_dimension_count(shape.rotated)
    if shape.architecture not in ("gemma", "gemma2") or shape.rope_theta != DEFAULT_THETA:
        writer.add_rope_freq_base(shape.rope_theta)
    if shape.local_theta is not None and shape.architecture == "gemma3":
        writer.add_rope_freq_base_swa(shape.local_theta)
    if shape.window is not None:
        writer.add_sliding_window(shape.window)
    elif shape.architecture == "phi3":
        writer.add_sliding_window(shape.config.get("sliding_window") or 0)
    _add_rope_scaling(writer, shape)
    _add_scales(writer, shape)


def _add_rope_scaling(writer: Any, shape: Shape) -> None:
    import gguf

    rope, kind = shape.rope, shape.rope["rope_type"]
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))
    if kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(float(rope["factor"]))
        writer.add_rope_scaling_orig_ctx_len(_original_context(shape))
        for name, key in YARN_KEYS.items():
            if rope.get(name) is not None:
                writer.add_float32(f"{shape.architecture}.rope.scaling.yarn_{key}", float(rope[name]))
    if shape.architecture == "phi3":
        original = _original_context(shape)
        writer.add_rope_scaling_orig_ctx_len(original)
        if kind == "longrope":
            scale = shape.context / original
            factor = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
            writer.add_rope_scaling_attn_factors(factor)


def _original_context(shape: Shape) -> int:
    key = "original_max_position_embeddings"
    original = shape.rope.get(key, shape.config.get(key, shape.context))
    if not isinstance(original, int) or isinstance(original, bool) or original < 2:
        raise DataError(f"config.json: {key} is {original!r}, not a number of positions", CORRECT)
    return original


def _add_scales(writer: Any, shape: Shape) -> None:
    config = shape.config
    if shape.architecture == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if shape.architecture in ("gemma2", "gemma3") and config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if shape.architecture == "granite":
        for name, key in GRANITE_SCALES.items():
            writer.add_float32(f"{shape.architecture}.{key}", float(config.get(name, 1.0)))


def rope_tensors(shape: Shape) -> dict[str, Floats]:
    """The frequency factors [D/2] of llama3 and of longrope (for long texts and for short ones) by GGUF's names."""
    rope = shape.rope
    if rope["rope_type"] == "llama3":
        try:
            factor, low, high = float(rope["factor"]), float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
            original = float(rope["original_max_position_embeddings"])
        except (KeyError, TypeError, ValueError):
            raise DataError(f"incomplete llama3 rope scaling in config.json: {dict(rope)}", hint=CORRECT) from None
        return {LLAMA3_FACTORS: llama3_divisors(shape.rope_theta, shape.head_size, factor, low, high, original)}
    if rope["rope_type"] != "longrope":
        return {}
    tensors = {}
    for key, name in (("long_factor", LONG_FACTORS), ("short_factor", SHORT_FACTORS)):
        factors = rope.get(key)
        numbers = isinstance(factors, list) and all(
            isinstance(value, int | float) and abs(value) < 1e30 for value in factors
        )
        if not numbers or len(factors or ()) != shape.rotated // 2:
            raise DataError(f"config.json: {key} of longrope must hold {shape.rotated // 2} numbers", CORRECT)
        tensors[name] = np.array(factors, dtype=np.float32)
    return tensors


def llama3_divisors(theta: float, size: int, factor: float, low: float, high: float, original: float) -> Floats:
    """Llama 3's frequency divisors [D/2] for heads of `size` D, as in transformers' `_compute_llama3_parameters`."""
    import torch

    # Single precision and torch's own power, like the converter's, so that the factors are its bits.
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    divisors = []
    for frequency in 1.0 / (theta**exponents):
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(float(1 / ((1 - smooth) / factor + smooth)))
    return np.array(divisors, dtype=np.float32)
