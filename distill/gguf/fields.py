"""What config.json says of a model that is exported, and the keys of a GGUF file for it: general.*, and the
architecture's (sizes, rotary embedding, scales)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np

import distill
from distill.errors import DataError
from distill.folders import Floats, read_config
from distill.gguf.families import (
    FAMILIES,
    LLAMA3_FACTORS,
    LONG_FACTORS,
    SHORT_FACTORS,
    YARN_BETAS,
    YARN_KEYS,
    Sizes,
    orders,
    period_of,
)
from distill.gguf.head import ARRAY, STRING

# ── Sizes and settings by config.json; what llama.cpp would compute differently is refused ──

CORRECT = "correct config.json"
KINDS = {"full_attention", "sliding_attention"}
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size", "num_experts_per_tok")


@dataclass(frozen=True)
class Shape(Sizes):
    """The values of config.json that name, check and describe the tensors; `config` holds them all, with defaults.

    `window`: positions that a layer with sliding attention sees, where llama.cpp computes it too; None where there is
    none. `period`: every so many layers there is none. `rotated`: dimensions of a head that its position turns.
    `notes`: what llama.cpp leaves out, for the reader of the export.
    """

    architecture: str
    rotated: int
    context: int
    epsilon: float
    rope_theta: float
    rope: Mapping[str, Any]
    local_theta: float | None = None
    window: int | None = None
    period: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class _Config:
    """config.json with a family's defaults; every reader names the key in its error."""

    def __init__(self, folder: Path, values: Mapping[str, Any]) -> None:
        self.folder, self.values = folder, values

    def number(self, key: str, default: int | None = None) -> int:
        value = default if (stated := self.values.get(key)) is None else stated
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise DataError(f"{self.folder}/config.json: {key} is {value!r}, not a positive integer", CORRECT)
        return value

    def real(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise DataError(f"{self.folder}/config.json: {key} is {value!r}, not a positive number", CORRECT)
        return float(value)

    def refuse(self, what: str) -> NoReturn:
        raise DataError(f"{self.folder}: {what} cannot be exported to GGUF faithfully", hint="export another model")


def read_shape(folder: Path, changes: Mapping[str, Any] = MappingProxyType({})) -> Shape:
    """The model's shape from `folder`/config.json with some changes; DataError for a model that llama.cpp would compute
    differently."""
    stated = {**read_config(folder), **changes}
    kind = stated.get("model_type")
    if kind == "gemma3" and isinstance(stated.get("text_config"), dict):
        raise DataError(
            f"{folder}: this gemma3 also reads images; only its language model can be exported",
            "save the language model alone (Gemma3ForCausalLM) and export that folder",
        )
    if any(stated.get(key) for key in EXPERT_KEYS) or (isinstance(kind, str) and "moe" in kind) or kind == "mixtral":
        raise DataError(
            f"{folder}: {kind!r} is a mixture of experts, which cannot be exported to GGUF here",
            hint="use llama.cpp's convert_hf_to_gguf.py; a draft should be dense",
        )
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise DataError(
            f"{folder}: model_type {kind!r} cannot be exported to GGUF", hint=f"supported: {', '.join(FAMILIES)}"
        )
    family = FAMILIES[kind]
    config = {**family.defaults, **{key: value for key, value in stated.items() if value is not None}}
    # An explicit null is no default: the layers of a Mistral without a window see everything.
    config |= {key: None for key in ("sliding_window",) if key in stated and stated[key] is None}
    values = _Config(folder, config)
    hidden, heads, layers = (values.number(key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    rope, local = _rope(config)
    head_size = values.number("head_dim", hidden // heads) if family.own_head_size else hidden // heads
    context = values.number("max_position_embeddings")
    window, period, notes = _window(values, kind, context, layers)
    notes += _unread_by_llama(rope, family.architecture)
    shape = Shape(
        architecture=family.architecture,
        family=family,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=values.number("num_key_value_heads", heads),
        head_size=head_size,
        rotated=_rotated(values, kind, rope, head_size),
        mlp=values.number("intermediate_size"),
        vocabulary=values.number("vocab_size"),
        context=context,
        epsilon=values.real(family.epsilon, config.get(family.epsilon, 1e-6)),
        tied=bool(config.get("tie_word_embeddings", False)),
        rope_theta=values.real("rope_theta", rope["rope_theta"]),
        rope=rope,
        local_theta=None if local is None else values.real("rope_local_base_freq", local),
        window=window,
        period=period,
        config=config,
        notes=notes,
    )
    _refuse_unsupported(values, shape)
    _refuse_by_family(values, kind, shape)
    return shape


def _rope(config: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """The rotary embedding's parameters, in any of the spellings, and the base of layers with sliding attention."""
    theta = config.get("rope_theta", 1_000_000.0 if config.get("model_type") == "gemma3_text" else 10000.0)
    local = config.get("rope_local_base_freq", 10000.0 if config.get("model_type") == "gemma3_text" else None)
    rope = dict(config.get("rope_parameters") or {})  # transformers >= 5
    if isinstance(rope.get("full_attention"), dict):  # one entry for each kind of layer
        local = (rope.get("sliding_attention") or {}).get("rope_theta", local)
        rope = dict(rope["full_attention"])
    if not rope:
        rope = dict(config.get("rope_scaling") or {})
    rope.setdefault("rope_theta", theta)
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    if rope["rope_type"] == "su":  # an older name
        rope["rope_type"] = "longrope"
    return rope, local


def yarn_attention(factor: float) -> float:
    """What attention is multiplied by in yarn, where config.json does not say."""
    return 0.1 * math.log(factor) + 1 if factor > 1 else 1.0


def _unread_by_llama(rope: Mapping[str, Any], architecture: str) -> tuple[str, ...]:
    """Notes on settings of yarn that a file holds and llama.cpp does not read."""
    factor = rope.get("factor")
    if rope["rope_type"] != "yarn" or not isinstance(factor, int | float):
        return ()
    usual = YARN_BETAS | {"attention_factor": yarn_attention(factor)}
    return tuple(
        f"llama.cpp reads no {key} of yarn for {architecture}: it computes with {value:.4g} instead of {rope[key]}"
        for key, value in usual.items()
        if isinstance(rope.get(key), int | float) and not math.isclose(rope[key], value, rel_tol=1e-6)
    )


def _rotated(values: _Config, kind: str, rope: Mapping[str, Any], head_size: int) -> int:
    """The rotated dimensions of a head, as transformers counts them; llama.cpp turns a part of them in few families."""
    share = rope.get("partial_rotary_factor") or values.values.get("partial_rotary_factor") or 1.0
    rotated = int(head_size * values.real("partial_rotary_factor", share))
    if rotated != head_size and (not FAMILIES[kind].rotates_part or rotated % 2 or not 0 < rotated < head_size):
        values.refuse(f"a rotary embedding of {rotated} of {head_size} dimensions")
    return rotated


def _window(values: _Config, kind: str, context: int, layers: int) -> tuple[int | None, int, tuple[str, ...]]:
    """The sliding window that llama.cpp computes, every how many layers there is none, and a note on a window that it
    leaves out."""
    config, family = values.values, FAMILIES[kind]
    types = config.get("layer_types")
    if family.full_every and (config.get("sliding_window") is not None or not family.window_layers):
        period = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", family.full_every))
        if types is not None:
            fits = isinstance(types, list) and len(types) == layers and {*types} <= KINDS
            period = period_of([one == "full_attention" for one in types], family.full_every) if fits else None
        if not isinstance(period, int) or period < 1:
            values.refuse("an order of sliding and full attention other than every n-th layer full")
        if family.window_layers not in (0, layers):
            values.refuse(
                f"sliding attention in {layers} layers, where llama.cpp computes it in models of "
                f"{family.window_layers} alone,"
            )
        unread = "the order of its windows is a key that older builds of llama.cpp do not read"
        return values.number("sliding_window"), period, (unread,) if period != family.full_every else ()
    if kind in ("mistral", "phi3") and config.get("sliding_window") is not None:
        size = values.number("sliding_window")
        unread = f"llama.cpp has no sliding window for {kind}: beyond {size} tokens its layers see more than they were "
        return None, 0, (f"{unread}trained to",) if size < context else ()
    if config.get("use_sliding_window") or "sliding_attention" in (types or []):
        values.refuse("sliding-window attention")
    return None, 0, ()


def _refuse_unsupported(values: _Config, shape: Shape) -> None:
    config, rope = values.values, shape.rope
    if rope["rope_type"] not in shape.family.ropes:
        values.refuse(f"rope scaling {rope['rope_type']!r} on {shape.architecture}")
    if rope["rope_type"] in ("linear", "llama3", "yarn") and not isinstance(rope.get("factor"), int | float):
        values.refuse(f"rope scaling without a factor: {dict(rope)}; it")
    for key in ("factor", "attention_factor", "beta_fast", "beta_slow"):
        if rope.get(key) is not None:
            values.real(f"{key} of the rope scaling", rope[key])
    read = {"mscale": 1, "mscale_all_dim": rope.get("mscale_all_dim")} if shape.architecture == "mistral3" else {}
    scales = {key: rope[key] for key in ("mscale", "mscale_all_dim") if rope.get(key) is not None}
    strange = [key for key in scales if scales != read]
    if rope["rope_type"] == "yarn" and (strange or rope.get("truncate") is False):
        values.refuse(f"yarn with {(strange or ['truncate'])[0]}")
    activation = config.get("hidden_activation") or config.get("hidden_act", shape.family.activation)
    if activation != shape.family.activation:
        values.refuse(f"activation {activation!r}")
    if config.get("quantization_config"):
        values.refuse("an already quantised checkpoint")
    if shape.heads % shape.kv_heads:
        values.refuse(f"{shape.heads} heads over {shape.kv_heads} key-value heads")


def _refuse_by_family(values: _Config, kind: str, shape: Shape) -> None:
    config = values.values
    if kind in ("gemma2", "gemma3_text"):
        stated = config["query_pre_attn_scalar"]
        if stated != shape.query_scale:
            values.refuse(f"query_pre_attn_scalar {stated!r} (llama.cpp takes {shape.query_scale}): it")
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if config.get(key) is not None or kind == "gemma2":
                values.real(key, config.get(key))
        if kind == "gemma3_text" and config.get("attn_logit_softcapping"):
            values.refuse("attn_logit_softcapping on gemma3")
        if config.get("use_bidirectional_attention"):
            values.refuse("bidirectional attention")
    if kind == "smollm3":
        stated = config.get("no_rope_layers")
        expected = [int(not own) for own in orders(kind, shape.layers)[0]]
        if (stated is not None and stated != expected) or (
            stated is None and config.get("no_rope_layer_interval", 4) != 4
        ):
            values.refuse("a position-free layer other than every 4th")
    for key in shape.family.scales:
        values.real(key, config.get(key))
    if not shape.family.own_head_size and config.get("head_dim") not in (None, shape.head_size):
        values.refuse(f"head_dim {config['head_dim']!r}")
    if shape.family.tied is not None and shape.tied != shape.family.tied:
        values.refuse(f"{'an untied' if shape.family.tied else 'a tied'} head on {shape.architecture}")


# ── The keys ──

DEFAULT_THETA = 10000.0  # llama.cpp's, where a file names none
INTEGERS = (4, 5)  # of gguf.GGUFValueType, 32 bits


@dataclass(frozen=True)
class Origin:
    """What the files of a model's folder do not say. What they do say wins, except for the name.

    `base_model` and `datasets` are hub names; `licence` is that of the base model.
    """

    name: str | None = None
    recipe: str | None = None
    base_model: str | None = None
    licence: str | None = None
    datasets: tuple[str, ...] = ()


PLAIN = Origin()  # nothing but what the folder's files say


def add_general_fields(writer: Any, folder: Path, origin: Origin, outtype: str, parameters: int) -> None:
    """Write the keys to a gguf.GGUFWriter: those that the gguf package reads from the folder's model card, config.json,
    generation_config.json and name, as llama.cpp's converter does, what `origin` adds to them, and keys of our own.

    Raises DataError for a model card whose head is no YAML, or holds values that GGUF has no place for.
    """
    import gguf
    import yaml

    folder = folder.resolve()
    try:
        metadata = gguf.Metadata.load(None, folder, origin.name, parameters)
        if metadata.name is None:
            metadata.name = folder.name
        _complete(metadata, origin)
        if metadata.size_label is None and parameters > 0:
            metadata.size_label = gguf.size_label(parameters, parameters, 0, 0)
        writer.add_type(gguf.GGUFType.MODEL)
        metadata.set_gguf_meta_model(writer)
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, UnicodeDecodeError) as error:
        first = str(error).split("\n", 1)[0]
        raise DataError(
            f"{folder}: README.md or generation_config.json cannot be read as a model card: {first}",
            "correct the block between the --- lines of README.md, or remove it",
        ) from None
    _require_forms(folder, writer)
    writer.add_file_type(file_type_number(outtype))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_string("distill.version", distill.__version__)
    if origin.recipe is not None:
        writer.add_string("distill.recipe", origin.recipe)


def file_type_number(outtype: str) -> int:
    """llama.cpp's number of a type of files (gguf.LlamaFileType)."""
    import gguf

    return int(gguf.LlamaFileType["ALL_F32" if outtype == "f32" else f"MOSTLY_{outtype.upper()}"])


def _complete(metadata: Any, origin: Origin) -> None:
    """Fill what the model card leaves out, in the words that the gguf package makes of such a card."""
    import gguf

    card: dict[str, Any] = {
        "license": origin.licence,
        "datasets": list(origin.datasets),
        "base_model": origin.base_model,
    }
    made = gguf.Metadata.apply_metadata_heuristic(gguf.Metadata(), {key: value for key, value in card.items() if value})
    for key in ("license", "datasets", "base_models"):
        if not getattr(metadata, key):
            setattr(metadata, key, getattr(made, key))


def _require_forms(folder: Path, writer: Any) -> None:
    """The gguf package takes values as they stand in the files and would fail while it writes them."""
    for key, entry in writer.kv_data[0].items():
        values = entry.value if entry.type == ARRAY else [entry.value]
        kind = str if entry.type in (STRING, ARRAY) else int if entry.type in INTEGERS else (int, float)
        if (
            not isinstance(values, list)
            or not values
            or not all(isinstance(value, kind) and not isinstance(value, bool) for value in values)
        ):
            raise DataError(
                f"{folder}: README.md or generation_config.json gives {entry.value!r:.60} for {key}",
                "correct that entry, or remove it",
            )
        if entry.type in INTEGERS and not -(2**31) <= entry.value < 2**31:
            raise DataError(f"{folder}: {key} is {entry.value}, too large for GGUF", "correct that entry, or remove it")


def add_model_fields(writer: Any, shape: Shape) -> None:
    """Write the architecture's keys to a gguf.GGUFWriter, those of llama.cpp's converter."""
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.mlp)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    add_epsilon = writer.add_layer_norm_rms_eps if shape.family.epsilon == "rms_norm_eps" else writer.add_layer_norm_eps
    add_epsilon(shape.epsilon)
    if shape.family.states_head_size or shape.head_size * shape.heads != shape.hidden:
        writer.add_key_length(shape.head_size)
        writer.add_value_length(shape.head_size)
    if shape.family.llama_keys:
        writer.add_vocab_size(shape.vocabulary)
    if shape.family.llama_keys or shape.family.rotates_part:
        writer.add_rope_dimension_count(shape.rotated)
    if shape.architecture not in ("gemma", "gemma2") or shape.rope_theta != DEFAULT_THETA:
        writer.add_rope_freq_base(shape.rope_theta)
    if shape.local_theta is not None and shape.architecture == "gemma3":
        writer.add_rope_freq_base_swa(shape.local_theta)
    if shape.window is not None:
        writer.add_sliding_window(shape.window)
        if shape.period != shape.family.full_every:
            writer.add_sliding_window_pattern(shape.period)
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
        for name, key in YARN_KEYS.items():
            if rope.get(name) is not None:
                writer.add_float32(f"{shape.architecture}.rope.scaling.yarn_{key}", float(rope[name]))
        if rope.get("mscale_all_dim"):
            writer.add_rope_scaling_yarn_log_mul(float(rope["mscale_all_dim"]))
    if kind == "yarn" or rope.get("llama_4_scaling_beta") or shape.architecture == "phi3":
        writer.add_rope_scaling_orig_ctx_len(_original_context(shape))
    if rope.get("llama_4_scaling_beta"):
        writer.add_attn_temperature_scale(float(rope["llama_4_scaling_beta"]))
    if kind == "longrope":
        writer.add_rope_scaling_attn_factors(longrope_attention(shape.context, _original_context(shape)))


def longrope_attention(context: int, original: int) -> float:
    """What transformers multiplies attention by, where config.json does not say, in a longrope of `context` positions
    over `original` ones."""
    return math.sqrt(1 + math.log(context / original) / math.log(original)) if context > original else 1.0


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
    for name, key in shape.family.scales.items():
        writer.add_float32(f"{shape.architecture}.{key}", float(config[name]))


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
