"""A Hugging Face folder (qwen2, qwen3, llama) under the names, shapes and metadata that llama.cpp reads.

Legend: H hidden, A attention heads, D head size, F MLP width, V vocabulary rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from distill.errors import DataError
from distill.faults import reading
from distill.models.config_file import read_config
from distill.models.tensor_files import read_header, weight_files

ARCHITECTURES = ("qwen2", "qwen3", "llama")

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
# llama.cpp ignores or refuses all other biases; a model that has them would silently compute something else.
ALLOWED_BIASES: dict[str, set[str]] = {
    "qwen2": {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"},
    "qwen3": set(),
    "llama": {f"self_attn.{p}_proj" for p in "qkvo"} | {f"mlp.{p}_proj" for p in ("gate", "up", "down")},
}
LAYER_PATTERN = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


@dataclass(frozen=True)
class Shape:
    """The values of config.json that name, check and describe the tensors."""

    architecture: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    mlp: int
    vocabulary: int
    context: int
    rms_epsilon: float
    tied: bool
    rope_theta: float
    rope: Mapping[str, Any]


@dataclass(frozen=True)
class GgufTensor:
    """One tensor under its GGUF name; `load()` reads it as fp32 only when asked."""

    name: str
    shape: tuple[int, ...]
    load: Callable[[], NDArray[np.float32]]


def read_shape(folder: Path) -> Shape:
    """The model's shape from `folder`/config.json; DataError for a model that llama.cpp would compute differently."""
    config = read_config(folder)
    architecture = config.get("model_type")
    if architecture not in ARCHITECTURES:
        raise DataError(
            f"{folder}: model_type {architecture!r} cannot be exported to GGUF",
            hint=f"supported: {', '.join(ARCHITECTURES)}",
        )

    def number(key: str) -> int:
        value = config.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise DataError(
                f"{folder}/config.json: {key} is {value!r}, not a positive integer", hint="correct config.json"
            )
        return value

    def real(key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise DataError(f"{folder}/config.json: {key} is {value!r}, not a positive number", "correct config.json")
        return float(value)

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    rope = dict(config.get("rope_parameters") or {})  # transformers >= 5
    if not rope:
        rope = dict(config.get("rope_scaling") or {})
        rope["rope_theta"] = config.get("rope_theta", 10000.0)
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    shape = Shape(
        architecture=architecture,
        hidden=hidden,
        layers=number("num_hidden_layers"),
        heads=heads,
        kv_heads=number("num_key_value_heads") if config.get("num_key_value_heads") is not None else heads,
        head_size=number("head_dim") if config.get("head_dim") is not None else hidden // heads,
        mlp=number("intermediate_size"),
        vocabulary=number("vocab_size"),
        context=number("max_position_embeddings"),
        rms_epsilon=real("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
        tied=bool(config.get("tie_word_embeddings", False)),
        rope_theta=real("rope_theta", rope["rope_theta"]),
        rope=rope,
    )
    _refuse_unsupported(folder, config, shape)
    return shape


def _refuse_unsupported(folder: Path, config: Mapping[str, Any], shape: Shape) -> None:
    def refuse(what: str) -> None:
        raise DataError(f"{folder}: {what} cannot be exported to GGUF faithfully", hint="export another model")

    if shape.rope["rope_type"] not in ("default", "linear", "llama3"):
        refuse(f"rope scaling {shape.rope['rope_type']!r}")
    if shape.rope["rope_type"] != "default" and not isinstance(shape.rope.get("factor"), int | float):
        refuse(f"rope scaling without a factor: {dict(shape.rope)}; it")
    # llama.cpp reads llama3's frequency factors for the llama architecture only.
    if shape.rope["rope_type"] == "llama3" and shape.architecture != "llama":
        refuse(f"rope scaling 'llama3' on {shape.architecture}")
    if (shape.rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1.0:
        refuse("a partial rotary embedding")
    if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or []):
        refuse("sliding-window attention")
    if config.get("hidden_act", "silu") != "silu":
        refuse(f"activation {config['hidden_act']!r}")
    if config.get("quantization_config"):
        refuse("an already quantised checkpoint")
    if shape.heads % shape.kv_heads:
        refuse(f"{shape.heads} heads over {shape.kv_heads} key-value heads")


def add_metadata(writer: Any, shape: Shape) -> None:
    """Write the architecture's keys (context, widths, heads, rope, epsilon, vocabulary) to a gguf.GGUFWriter."""
    import gguf

    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.mlp)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_rope_freq_base(shape.rope_theta)
    if shape.rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(shape.rope["factor"]))
    writer.add_layer_norm_rms_eps(shape.rms_epsilon)
    writer.add_vocab_size(shape.vocabulary)


def expected_tensors(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every tensor the architecture must have (biases and untied heads aside)."""
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (shape.hidden,),
        "post_attention_layernorm": (shape.hidden,),
        "self_attn.q_proj": (queries, shape.hidden),
        "self_attn.k_proj": (keys, shape.hidden),
        "self_attn.v_proj": (keys, shape.hidden),
        "self_attn.o_proj": (shape.hidden, queries),
        "mlp.gate_proj": (shape.mlp, shape.hidden),
        "mlp.up_proj": (shape.mlp, shape.hidden),
        "mlp.down_proj": (shape.hidden, shape.mlp),
    }
    if shape.architecture == "qwen3":
        layer |= {"self_attn.q_norm": (shape.head_size,), "self_attn.k_norm": (shape.head_size,)}
    expected: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocabulary, shape.hidden)}
    for index in range(shape.layers):
        expected |= {f"model.layers.{index}.{name}.weight": size for name, size in layer.items()}
        if shape.architecture == "qwen2":
            biased = {name: layer[name][:1] for name in ALLOWED_BIASES["qwen2"]}
            expected |= {f"model.layers.{index}.{name}.bias": size for name, size in sorted(biased.items())}
    expected["model.norm.weight"] = (shape.hidden,)
    if not shape.tied:
        expected["lm_head.weight"] = (shape.vocabulary, shape.hidden)
    return expected


def _gguf_name(name: str, expected: bool, shape: Shape, folder: Path) -> str:
    if expected and name in OUTER_NAMES:
        return OUTER_NAMES[name]
    match = LAYER_PATTERN.fullmatch(name)
    if match and match[2] in LAYER_NAMES and int(match[1]) < shape.layers:
        layer, part, kind = match.groups()
        # The weights of the architecture are all expected; of the rest only some biases are read by llama.cpp.
        if expected or (kind == "bias" and part in ALLOWED_BIASES[shape.architecture]):
            return f"blk.{layer}.{LAYER_NAMES[part]}.{kind}"
    raise DataError(
        f"{folder}: tensor {name} has no place in a GGUF {shape.architecture}",
        hint="check that config.json belongs to these weights; adapters must be merged first",
    )


def permute_for_llama(weights: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorder q or k rows [A*D, ...] from Hugging Face's half-split rope to llama.cpp's interleaved one."""
    half = weights.shape[0] // heads // 2
    return weights.reshape(heads, 2, half, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def rope_factors(shape: Shape) -> NDArray[np.float32]:
    """Llama 3's frequency divisors [D/2], as in transformers' `_compute_llama3_parameters`."""
    rope = shape.rope
    try:
        factor, low, high = float(rope["factor"]), float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        original = float(rope["original_max_position_embeddings"])
    except (KeyError, TypeError, ValueError):
        raise DataError(
            f"incomplete llama3 rope scaling in config.json: {dict(rope)}", hint="correct config.json"
        ) from None
    factors = []
    for dimension in range(0, shape.head_size, 2):
        wavelength = 2 * math.pi * shape.rope_theta ** (dimension / shape.head_size)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


@contextmanager
def open_tensors(folder: Path, shape: Shape) -> Iterator[list[GgufTensor]]:
    """The folder's tensors under their GGUF names, readable while the context is open.

    Raises DataError when a tensor is missing, has another shape than config.json gives, or has no place in GGUF.
    """
    from safetensors import SafetensorError, safe_open

    with ExitStack() as stack:
        handles: dict[str, Any] = {}
        for file in weight_files(folder):
            read_header(file)  # names a fault in words of ours
            try:
                with reading(file):
                    handle = stack.enter_context(safe_open(file, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise DataError(f"{file} is damaged: {error}", hint="copy or train the model again") from None
            handles |= {name: handle for name in handle.keys()}  # noqa: SIM118 - not a dict
        if shape.tied:
            handles.pop("lm_head.weight", None)  # a tied checkpoint may still carry the copy
        names = [name for name in handles if not name.endswith("rotary_emb.inv_freq")]
        expected = expected_tensors(shape)
        missing = [name for name in expected if name not in handles]
        if missing:
            raise DataError(
                f"{folder}: {len(missing)} tensors are missing, first {missing[0]}",
                hint="check that config.json belongs to these weights",
            )
        yield [*_in_order(names, handles, expected, shape, folder), *_rope_tensor(shape)]


def _in_order(
    names: list[str], handles: Mapping[str, Any], expected: Mapping[str, tuple[int, ...]], shape: Shape, folder: Path
) -> list[GgufTensor]:
    extra = sorted(name for name in names if name not in expected)
    tensors = []
    for name in [*expected, *extra]:
        size = tuple(handles[name].get_slice(name).get_shape())
        if name in expected and size != expected[name]:
            raise DataError(
                f"{folder}: {name} has shape {list(size)}, by config.json it is {list(expected[name])}",
                hint="check that config.json belongs to these weights",
            )
        tensors.append(
            GgufTensor(
                _gguf_name(name, name in expected, shape, folder), size, _loader(name, handles[name], shape, folder)
            )
        )
    return tensors


def _loader(name: str, handle: Any, shape: Shape, folder: Path) -> Callable[[], NDArray[np.float32]]:
    def load() -> NDArray[np.float32]:
        tensor: torch.Tensor = handle.get_tensor(name).to(torch.float32)
        if not bool(torch.isfinite(tensor).all()):
            raise DataError(f"{folder}: {name} holds NaN or infinity", hint="export an earlier checkpoint")
        array: NDArray[np.float32] = tensor.contiguous().numpy()
        if shape.architecture == "llama" and ".self_attn.q_proj." in name:
            return permute_for_llama(array, shape.heads)
        if shape.architecture == "llama" and ".self_attn.k_proj." in name:
            return permute_for_llama(array, shape.kv_heads)
        return array

    return load


def _rope_tensor(shape: Shape) -> list[GgufTensor]:
    if shape.rope["rope_type"] != "llama3":
        return []
    factors = rope_factors(shape)
    return [GgufTensor("rope_freqs.weight", factors.shape, lambda: factors)]
