"""config.json as keys of a GGUF file (sizes, rotary embedding, scales), and back. Keys general.* of every file."""

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
from distill.files import has_form
from distill.folders import Floats, read_config
from distill.gguf.families import (
    ATTENTION,
    EPSILONS,
    FAMILIES,
    GELU,
    LAYER_KINDS,
    LLAMA3_FACTORS,
    LONG_FACTORS,
    MLP,
    MODEL_TYPES,
    SHORT_FACTORS,
    SIZES,
    YARN_BETAS,
    YARN_KEYS,
    Family,
    Sizes,
    orders,
    period_of,
)
from distill.gguf.head import ARRAY, COPY_AGAIN, FILL_ROLES, NO_TOKEN, STRING, TURN_ENDS, FileHead, shortest, token_key
from distill.vocabulary.vocabulary import NAMED_ROLES

# ── Sizes and settings from config.json. Models that llama.cpp would compute differently are refused. ──

CORRECT = "correct config.json"
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size", "num_experts_per_tok")


@dataclass(frozen=True)
class Shape(Sizes):
    """The values of config.json that name, check and describe the tensors. `config` holds all values and defaults.

    `window`: positions that a layer with sliding attention sees, or None. It is set only if llama.cpp computes the
    window too. `period`: every n-th layer has no window. `rotated`: dimensions of a head that the rotary embedding
    turns. `notes`: what llama.cpp ignores, for the user's report of the export.
    """

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
    """config.json with a family's defaults. Every error names the key."""

    def __init__(self, folder: Path, values: Mapping[str, Any]) -> None:
        self.folder, self.values = folder, values

    def number(self, key: str) -> int:
        value = self.values.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            fault = f"{key} is missing" if value is None else f"{key} is {value!r}, not a positive integer"
            raise DataError(f"{self.folder}/config.json: {fault}", CORRECT)
        return value

    def real(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise DataError(f"{self.folder}/config.json: {key} is {value!r}, not a positive number", CORRECT)
        return float(value)

    def refuse(self, what: str) -> NoReturn:
        raise DataError(f"{self.folder}: {what} cannot be exported to GGUF faithfully", hint="export another model")


def read_shape(folder: Path, changes: Mapping[str, Any] = MappingProxyType({})) -> Shape:
    """Read a model's shape from `folder`/config.json, with `changes` applied.

    Raises DataError for a model that llama.cpp would compute differently.
    """
    stated = {**read_config(folder), **changes}
    kind = stated.get("model_type")
    if kind == "gemma3" and isinstance(stated.get("text_config"), dict):
        hint = "save the language model alone (Gemma3ForCausalLM) and export that folder"
        raise DataError(f"{folder}: this gemma3 also reads images; only its language model can be exported", hint)
    if any(stated.get(key) for key in EXPERT_KEYS) or (isinstance(kind, str) and "moe" in kind) or kind == "mixtral":
        hint = "use llama.cpp's convert_hf_to_gguf.py; a draft should be dense"
        raise DataError(f"{folder}: {kind!r} is a mixture of experts, which cannot be exported to GGUF here", hint)
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise DataError(
            f"{folder}: model_type {kind!r} cannot be exported to GGUF", hint=f"supported: {', '.join(FAMILIES)}"
        )
    family = FAMILIES[kind]
    config = {**family.defaults, **{key: value for key, value in stated.items() if value is not None}}
    # An explicit null overrides the default: a Mistral whose sliding_window is null has no window.
    config |= {key: None for key in ("sliding_window",) if key in stated and stated[key] is None}
    values = _Config(folder, config)
    config.setdefault("num_key_value_heads", config.get("num_attention_heads"))
    for key in (*SIZES, "vocab_size", *(("head_dim",) if family.free_head_size and "head_dim" in config else ())):
        values.number(key)
    sizes, context = Sizes.of(config), config["max_position_embeddings"]
    rope, local = _rope(config)
    window, period, notes = _window(values, kind, context, sizes.layers)
    shape = Shape(
        **vars(sizes),
        rotated=_rotated(values, kind, rope, sizes.head_size),
        context=context,
        epsilon=values.real(family.epsilon, config.get(family.epsilon, 1e-6)),
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
    """Return the rotary parameters, from any spelling of the keys, and the base for layers with sliding attention."""
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
    if rope["rope_type"] == "su":  # the older name
        rope["rope_type"] = "longrope"
    return rope, local


def yarn_attention(factor: float) -> float:
    """Return yarn's attention factor for a config.json that states none."""
    return 0.1 * math.log(factor) + 1 if factor > 1 else 1.0


def _rotated(values: _Config, kind: str, rope: Mapping[str, Any], head_size: int) -> int:
    """Dimensions of a head that are rotated. DataError if llama.cpp cannot rotate only a part of each head."""
    share = rope.get("partial_rotary_factor") or values.values.get("partial_rotary_factor") or 1.0
    rotated = int(head_size * values.real("partial_rotary_factor", share))
    if rotated != head_size and (not FAMILIES[kind].rotates_part or rotated % 2 or not 0 < rotated < head_size):
        values.refuse(f"a rotary embedding of {rotated} of {head_size} dimensions")
    return rotated


def _window(values: _Config, kind: str, context: int, layers: int) -> tuple[int | None, int, tuple[str, ...]]:
    """Return the sliding window that llama.cpp computes, the period of layers without one, and notes for the user."""
    config, family = values.values, FAMILIES[kind]
    types = config.get("layer_types")
    if family.full_every and (config.get("sliding_window") is not None or not family.window_layers):
        period = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", family.full_every))
        if types is not None:
            fits = isinstance(types, list) and len(types) == layers and {*types} <= LAYER_KINDS
            period = period_of([layer == "full_attention" for layer in types], family.full_every) if fits else None
        if not isinstance(period, int) or period < 1:
            values.refuse("an order of layers in which full attention is not every n-th layer")
        if family.window_layers not in (0, layers):
            values.refuse(
                f"sliding attention in {layers} layers (llama.cpp computes it only in models with "
                f"{family.window_layers} layers)"
            )
        unread = "older builds of llama.cpp ignore the key that states the order of its windows"
        return values.number("sliding_window"), period, (unread,) if period != family.full_every else ()
    if kind in ("mistral", "phi3") and config.get("sliding_window") is not None:
        size = values.number("sliding_window")
        note = f"llama.cpp has no sliding window for {kind}: beyond {size} tokens, layers see more than in training"
        return None, 0, (note,) if size < context else ()
    if config.get("use_sliding_window") or "sliding_attention" in (types or []):
        values.refuse("sliding-window attention")
    return None, 0, ()


def _refuse_unsupported(values: _Config, shape: Shape) -> None:
    config, rope = values.values, shape.rope
    if rope["rope_type"] not in shape.family.ropes:
        values.refuse(f"rope scaling {rope['rope_type']!r} on {shape.architecture}")
    if rope["rope_type"] in ("linear", "llama3", "yarn") and not isinstance(rope.get("factor"), int | float):
        values.refuse(f"rope scaling without a factor ({dict(rope)})")
    for key in ("factor", "attention_factor", "beta_fast", "beta_slow"):
        if rope.get(key) is not None:
            values.real(f"{key} of the rope scaling", rope[key])
    read = {"mscale": 1, "mscale_all_dim": rope.get("mscale_all_dim")} if shape.architecture == "mistral3" else {}
    scales = {key: rope[key] for key in ("mscale", "mscale_all_dim") if rope.get(key) is not None}
    strange = [key for key in scales if scales != read]
    if rope["rope_type"] == "yarn" and (strange or rope.get("truncate") is False):
        values.refuse(f"yarn with {(strange or ['truncate'])[0]}")
    betas = [key for key, usual in YARN_BETAS.items() if rope.get(key) not in (None, usual)]
    if rope["rope_type"] == "yarn" and betas:
        values.refuse(f"yarn with {betas[0]} {rope[betas[0]]} (llama.cpp uses {YARN_BETAS[betas[0]]})")
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
            values.refuse(f"query_pre_attn_scalar {stated!r} (llama.cpp uses {shape.query_scale})")
        for key in shape.family.caps:
            if config.get(key) is not None or kind == "gemma2":
                values.real(key, config.get(key))
        if kind == "gemma3_text" and config.get("attn_logit_softcapping"):
            values.refuse("attn_logit_softcapping on gemma3")
        if config.get("use_bidirectional_attention"):
            values.refuse("bidirectional attention")
    if kind == "smollm3":
        stated = config.get("no_rope_layers")
        expected = [int(not without) for without in orders(kind, shape.layers)[0]]
        if (stated is not None and stated != expected) or (
            stated is None and config.get("no_rope_layer_interval", 4) != 4
        ):
            values.refuse("an order of layers in which a layer without rotary embedding is not every 4th")
    for key in shape.family.scales:
        values.real(key, config.get(key))
    if not shape.family.free_head_size and config.get("head_dim") not in (None, shape.head_size):
        values.refuse(f"head_dim {config['head_dim']!r}")
    if shape.family.tied is not None and shape.tied != shape.family.tied:
        values.refuse(f"{'an untied' if shape.family.tied else 'a tied'} head on {shape.architecture}")


# ── The architecture's keys, from config.json. The next section reads the same keys back. ──

DEFAULT_THETA = 10000.0  # llama.cpp's value for a file that states none
HEAD_SIZES = ("attention.key_length", "attention.value_length")
WINDOW, PERIOD = "attention.sliding_window", "attention.sliding_window_pattern"
ROTATED, THETA, LOCAL_THETA = "rope.dimension_count", "rope.freq_base", "rope.freq_base_swa"
SCALING, FACTOR, ORIGINAL = "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"
ATTENTION_FACTOR, MSCALE = "rope.scaling.attn_factor", "rope.scaling.yarn_log_multiplier"
BETA = "attention.temperature_scale"


def add_model_fields(writer: Any, shape: Shape) -> None:
    """Write the architecture's keys to a gguf.GGUFWriter, as llama.cpp's converter does."""
    for key, value in _model_fields(shape).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{shape.architecture}.{key}", value)


def _model_fields(shape: Shape) -> dict[str, int | float | str]:
    family, config, rope, kind = shape.family, shape.config, shape.rope, shape.rope["rope_type"]
    fields: dict[str, int | float | str] = {gguf_key: config[key] for key, gguf_key in SIZES.items()}
    fields[EPSILONS[family.epsilon]] = shape.epsilon
    if family.states_head_size or shape.head_size * shape.heads != shape.hidden:
        fields |= dict.fromkeys(HEAD_SIZES, shape.head_size)
    if family.llama_keys:
        fields["vocab_size"] = shape.vocabulary
    if family.llama_keys or family.rotates_part:
        fields[ROTATED] = shape.rotated
    if shape.architecture not in ("gemma", "gemma2") or shape.rope_theta != DEFAULT_THETA:
        fields[THETA] = shape.rope_theta
    if shape.local_theta is not None and shape.architecture == "gemma3":
        fields[LOCAL_THETA] = shape.local_theta
    if shape.window is not None:
        fields[WINDOW] = shape.window
        if shape.period != family.full_every:
            fields[PERIOD] = shape.period
    elif shape.architecture == "phi3":
        fields[WINDOW] = config.get("sliding_window") or 0
    if kind in ("linear", "yarn"):
        fields |= {SCALING: kind, FACTOR: float(rope["factor"])}
    if kind == "yarn":
        fields |= _yarn_fields(rope)
    beta = rope.get("llama_4_scaling_beta")
    if kind == "yarn" or beta or shape.architecture == "phi3":
        fields[ORIGINAL] = _original_context(shape)
    if beta:
        fields[BETA] = float(beta)
    if kind == "longrope":
        fields[ATTENTION_FACTOR] = longrope_attention(shape.context, _original_context(shape))
    scales = {**{key: key for key in family.caps}, **family.scales}
    return fields | {gguf_key: float(config[key]) for key, gguf_key in scales.items() if config.get(key)}


def _yarn_fields(rope: Mapping[str, Any]) -> dict[str, float]:
    given = {key: float(rope[key]) for key in YARN_KEYS if rope.get(key) is not None}
    factor, usual = given.get("attention_factor"), yarn_attention(float(rope["factor"]))
    other = factor is not None and not math.isclose(factor, usual, rel_tol=1e-6)
    # llama.cpp multiplies its own yarn factor by the value of this key.
    fields = {ATTENTION_FACTOR: given.pop("attention_factor") / usual} if other else {}
    fields |= {f"rope.scaling.{YARN_KEYS[key]}": value for key, value in given.items()}
    return fields | ({MSCALE: float(rope["mscale_all_dim"])} if rope.get("mscale_all_dim") else {})


def longrope_attention(context: int, original: int) -> float:
    """Return longrope's attention factor for a config.json that states none, as transformers computes it.

    `context` is the extended number of positions and `original` the number before it.
    """
    return math.sqrt(1 + math.log(context / original) / math.log(original)) if context > original else 1.0


def _original_context(shape: Shape) -> int:
    key = "original_max_position_embeddings"
    original = shape.rope.get(key, shape.config.get(key, shape.context))
    if not isinstance(original, int) or isinstance(original, bool) or original < 2:
        raise DataError(f"config.json: {key} is {original!r}, not a number of positions", CORRECT)
    return original


def rope_tensors(shape: Shape) -> dict[str, Floats]:
    """Return the frequency factors [D/2] of llama3 or longrope (one tensor for long texts, one for short) by GGUF name.

    Raises DataError if config.json lacks a factor or holds one that is no number.
    """
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
    """Return Llama 3's frequency divisors [D/2] for heads of `size` D (transformers' `_compute_llama3_parameters`)."""
    import torch

    # Single precision and torch's power make the factors bit-identical to those of llama.cpp's converter.
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


# ── config.json from the metadata of a GGUF file ──

FOLDER = "give the Hugging Face folder of this model"
DEFAULT_WINDOW = 4096  # llama.cpp's default
READ_ROPE_KEYS = (
    *("freq_base", "freq_base_swa", "dimension_count", "scale_linear"),
    *(f"scaling.{key}" for key in ("type", "factor", "attn_factor", "original_context_length", "finetuned")),
)
# Keys below rope.scaling. and the values that change nothing.
UNREAD_YARN: dict[str, tuple[float, ...]] = {
    "yarn_ext_factor": (1.0, -1.0),
    "yarn_log_multiplier": (0.0,),
    **{f"{start}{name}": (value,) for name, value in YARN_BETAS.items() for start in ("", "yarn_")},
}
# The sizes in the order in which config.json is written.
CONFIG_ORDER = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "max_position_embeddings"),
)
LLAMA3_CONTEXT = 8192  # original context of every Llama 3


# ── Each key of a file is read, known to be harmless, or refused by name ──
# A key that is false, 0 or empty asks for nothing. Most general.* keys state where a file comes from. Keys of other
# programs are harmless too, because llama.cpp reads no key outside these namespaces.

OTHER_FILES = {  # namespaces that llama.cpp reads in other kinds of files, and what those files are
    **{"adapter": "an adapter (LoRA)", "clip": "an encoder of images or sounds", "imatrix": "an importance matrix"},
    **{"diffusion": "a diffusion model", "xielu": "a model with xIELU"},
}
READ_OWN = (
    *(*SIZES.values(), *EPSILONS.values(), *HEAD_SIZES, WINDOW, PERIOD, "vocab_size", "expert_count"),
    *("attention.causal", "nextn_predict_layers"),
)
HARMLESS_OWN = {  # with the reason
    "tensor_data_layout": "names the order of an old converter. llama.cpp does not read it",
    "expert_used_count": "applies to mixtures of experts, which expert_count shows",
    "pooling_type": "applies to embeddings of texts",
}
READ_TOKENIZER = {
    *(f"ggml.{key}" for key in ("model", "pre", "tokens", "token_type", "scores", "merges", "add_bos_token")),
    *("ggml.add_eos_token", "ggml.add_space_prefix", "chat_template", "chat_templates"),
    *(token_key(role).removeprefix("tokenizer.") for role in (*NAMED_ROLES, *TURN_ENDS, *FILL_ROLES)),
}
HARMLESS_TOKENIZER = {  # with the reason
    "huggingface.json": "is a copy of the tokenizer for transformers. llama.cpp does not read it",
    "ggml.token_type_count": "applies to models that read pairs of texts",
    "ggml.remove_extra_whitespaces": "applies to Unigram, which is refused",
    "ggml.precompiled_charsmap": "applies to Unigram, which is refused",
}


def refuse_unknown_keys(head: FileHead) -> None:
    """Raise DataError for a key that is neither read nor harmless, or that contradicts the shapes of the tensors."""
    import gguf

    architecture, others = head.architecture, set(gguf.MODEL_ARCH_NAMES.values())
    family = FAMILIES[family_of(head)[0]]
    read = {
        *READ_OWN,
        *HARMLESS_OWN,
        *family.scales.values(),
        *family.caps,
        *([BETA] if architecture == "mistral3" else []),
    }
    rows, hidden = head.shapes["token_embd.weight"][1], head.count(SIZES["hidden_size"])
    expected: dict[str, Any] = {"vocab_size": rows, "embedding_length_out": hidden, "attention.causal": True}
    size = head.count(HEAD_SIZES[0], hidden // head.count(SIZES["num_attention_heads"]))
    expected |= dict.fromkeys(("attention.key_length_swa", "attention.value_length_swa"), size)
    unread = {WINDOW, PERIOD} - (
        {WINDOW, PERIOD} if family.full_every else {WINDOW} if architecture == "phi3" else set()
    )
    for name, value in head.values.items():
        space, _, key = name.partition(".")
        off = (value in (False, 0, b"", []) and not isinstance(value, bytes | list)) or value in (b"", [])
        if space == "tokenizer" and key not in READ_TOKENIZER | HARMLESS_TOKENIZER.keys():
            template = key.startswith("chat_template.") or (key.endswith("_token_id") and value == NO_TOKEN)
            if not off and not template:
                head.refuse(f"{name} is {_shown(value)}, which is not read here and may change the tokens", FOLDER)
        elif space == architecture and key in expected:
            if value != expected[key] or isinstance(value, bool) != isinstance(expected[key], bool):
                head.refuse(f"{name} is {_shown(value)}, but the tensors give {expected[key]}", COPY_AGAIN)
        elif space == architecture and key.startswith("rope."):
            continue  # `_refuse_unread` checks these keys.
        elif space == architecture and (key not in read or key in unread) and not off:
            if key != WINDOW or not isinstance(value, int) or value < head.count(SIZES["max_position_embeddings"]):
                what = f"{name} is {_shown(value)}, which is not read for {architecture} and may change the text"
                head.refuse(what, FOLDER)
        elif space in OTHER_FILES and not off:
            head.refuse(f"{name}: the file is {OTHER_FILES[space]}, or says that it is", FOLDER)
        elif space != architecture and space in others and not off:
            head.refuse(f"{name} is {_shown(value)}, but the file's architecture is {architecture}", COPY_AGAIN)


def _shown(value: Any) -> str:
    return f"{value.decode('utf-8', 'replace') if isinstance(value, bytes) else value!r:.40}"


def family_of(head: FileHead) -> tuple[str, Family]:
    """The model_type of a file, and its family. DataError, with the name, for an unknown architecture."""
    kind = MODEL_TYPES.get(head.architecture)
    if kind is None:
        head.refuse(
            f"architecture {head.architecture!r} cannot be imported",
            f"known: {', '.join(sorted(MODEL_TYPES))}; give the Hugging Face folder of this model",
        )
    if head.architecture_value("expert_count"):
        head.refuse(
            f"a mixture of {head.architecture_value('expert_count')} experts cannot be imported", "give its folder"
        )
    return kind, FAMILIES[kind]


def configuration(head: FileHead, factors: Mapping[str, Floats]) -> dict[str, Any]:
    """Return the values of config.json, without ids of special tokens and the dtype of the weights.

    `factors`: the tensors of rotary factors by name (rope_freqs, rope_factors_long, rope_factors_short). Raises
    DataError for an unknown architecture and for values that transformers cannot express.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    kind, family = family_of(head)
    embedding = head.shapes.get("token_embd.weight")
    if embedding is None or len(embedding) != 2:
        head.refuse("it has no matrix token_embd.weight")
    refuse_unknown_keys(head)
    heads, hidden = head.count(SIZES["num_attention_heads"]), head.count(SIZES["hidden_size"])
    size = head.count(HEAD_SIZES[0], hidden // heads)
    if head.count(HEAD_SIZES[1], size) != size:
        head.refuse("its keys and values differ in width, which transformers cannot express")
    config: dict[str, Any] = {"architectures": [CLASSES[kind]], "model_type": kind}
    for key in CONFIG_ORDER:
        default = heads if key == "num_key_value_heads" else None
        config[key] = head.count(SIZES[key], default) if key in SIZES else embedding[1]
    config |= {
        family.epsilon: head.real(EPSILONS[family.epsilon]),
        "tie_word_embeddings": "output.weight" not in head.shapes,
        "use_cache": True,
        "hidden_activation" if family.activation == GELU else "hidden_act": family.activation,
    }
    if not family.free_head_size:
        if size * heads != hidden:
            what = (
                f"its heads of size {size} do not add up to a hidden size of {hidden}, as {kind} needs in transformers"
            )
            head.refuse(what)
    elif family.states_head_size or size * heads != hidden:
        config["head_dim"] = size
    rope = _read_rope(head, family, config, size, factors)
    return config | {"rope_parameters": rope} | _by_family(head, kind, config, rope)


def _read_rope(
    head: FileHead, family: Family, config: Mapping[str, Any], size: int, factors: Mapping[str, Floats]
) -> dict[str, Any]:
    """Return the parameters of the rotary embedding for config.json."""
    theta, stated = head.real(THETA, DEFAULT_THETA), head.text(f"{head.architecture}.{SCALING}")
    # llama.cpp divides all frequencies by this factor unless the kind is `none`. Two kinds also divide by tensors.
    scaled = next((key for key in (FACTOR, "rope.scale_linear") if head.architecture_value(key) is not None), "")
    factor = head.real(scaled) if stated != "none" and scaled and head.architecture_value(scaled) else 1.0
    attention = head.real(ATTENTION_FACTOR, 1.0)
    kind = "yarn" if stated == "yarn" else "default" if factor == 1 else "linear"
    tensor = next((name for name in (LLAMA3_FACTORS, LONG_FACTORS) if name in factors), None)
    if tensor is not None:
        if kind != "default":
            head.refuse(f"it scales the rotary embedding twice, by {tensor} and by rope scaling {kind!r}", FOLDER)
        kind = "llama3" if tensor == LLAMA3_FACTORS else "longrope"
    elif stated == "longrope":
        head.refuse(f"its rope scaling is longrope, but it has no {LONG_FACTORS}")
    if kind not in family.ropes:
        head.refuse(f"rope scaling {kind!r} on {head.architecture} cannot be imported", FOLDER)
    if attention != 1 and kind not in ("yarn", "longrope"):
        head.refuse(f"rope.scaling.attn_factor {attention} on rope scaling {kind!r} cannot be imported", FOLDER)
    _refuse_unread(head, kind, factor)
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": theta}
    original, usual = _stated_context(head), 1.0
    if kind == "llama3":
        rope |= _llama3(head, factors[LLAMA3_FACTORS], theta, size, original or LLAMA3_CONTEXT)
    if kind in ("linear", "yarn"):
        rope["factor"] = factor
    if kind == "longrope":
        for key, name in (("long_factor", LONG_FACTORS), ("short_factor", SHORT_FACTORS)):
            if name not in factors:
                head.refuse(f"it has no {name}")
            rope[key] = [shortest(value) for value in factors[name]]
    if kind in ("yarn", "longrope"):
        context = config["max_position_embeddings"]
        rope["original_max_position_embeddings"] = original = original or context
        usual = longrope_attention(context, original) if kind == "longrope" else 1.0
        # llama.cpp multiplies its own yarn factor in. transformers' longrope has an own factor that llama.cpp lacks.
        if not math.isclose(attention, usual, rel_tol=1e-6):
            rope["attention_factor"] = shortest(attention * (yarn_attention(factor) if kind == "yarn" else 1))
    rotated = head.count(ROTATED, size)
    if rotated != size or "partial_rotary_factor" in family.defaults:
        if not family.rotates_part:
            head.refuse(
                f"it rotates {rotated} of {size} dimensions of a head, which {head.architecture} does not allow"
            )
        rope["partial_rotary_factor"] = rotated / size
    return rope


def _refuse_unread(head: FileHead, kind: str, factor: float) -> None:
    """Raise DataError for rotary settings that llama.cpp ignores for these architectures and transformers may apply.

    Nothing in the file shows whether the model was trained with them.
    """
    unread = UNREAD_YARN | {"yarn_attn_factor": (1.0, yarn_attention(factor))}
    neutral: dict[str, tuple[float, ...]] = dict.fromkeys(READ_ROPE_KEYS, ())  # No values mean that any value will do.
    neutral |= {f"scaling.{key}": values if kind == "yarn" else () for key, values in unread.items()}
    if head.architecture == "mistral3":
        neutral["scaling.yarn_log_multiplier"] = ()
    if head.architecture != "gemma3":
        neutral["freq_base_swa"] = (head.real(THETA, DEFAULT_THETA),)
    start = f"{head.architecture}.rope."
    for key in (name.removeprefix(start) for name in head.values if name.startswith(start)):
        value, allowed = head.architecture_value(f"rope.{key}"), neutral.get(key, (0.0,))
        same = isinstance(value, int | float) and any(math.isclose(value, other, rel_tol=1e-6) for other in allowed)
        if allowed and not same:
            head.refuse(f"{start}{key} is {value!r:.40}, which llama.cpp ignores and transformers may apply", FOLDER)


def _stated_context(head: FileHead) -> int | None:
    """Positions that the embedding was made for before it was scaled, or None if the file does not say."""
    return head.count(ORIGINAL) if head.architecture_value(ORIGINAL) else None


def _llama3(head: FileHead, divisors: Floats, theta: float, size: int, original: int) -> dict[str, Any]:
    """Return the settings of Llama 3's rope scaling that give these divisors [D/2] of the frequencies.

    Raises DataError if no factor gives them with the other settings of every Llama 3.
    """
    rule = {"factor": shortest(float(divisors.max())), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    expected = llama3_divisors(theta, size, rule["factor"], 1.0, 4.0, original)
    if expected.shape != divisors.shape or not np.allclose(expected, divisors, rtol=1e-4, atol=0):
        head.refuse("its rope_freqs.weight does not follow Llama 3's rule, the only one that transformers has for it")
    return {**rule, "original_max_position_embeddings": original}


def _by_family(head: FileHead, kind: str, config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of config.json that only some families have."""
    family = FAMILIES[kind]
    values: dict[str, Any] = {key: head.real(gguf_key, family.defaults[key]) for key, gguf_key in family.scales.items()}
    if family.full_every:
        values |= _read_windows(head, family, config["num_hidden_layers"])
    if "query_pre_attn_scalar" in family.defaults:
        values["query_pre_attn_scalar"] = Sizes.of(config).query_scale
    for key in family.caps:
        default = family.defaults.get(key)
        values[key] = None if head.architecture_value(key) is default is None else head.real(key, default)
    if family.more_biases:
        biases = {name.split(".")[2] for name in head.shapes if name.startswith("blk.") and name.endswith(".bias")}
        for key, parts in (("attention_bias", ATTENTION), ("mlp_bias", MLP)):
            values[key] = any(gguf_name in biases for gguf_name, _ in parts.values())
    values |= family.constants
    original = _stated_context(head) or config["max_position_embeddings"]
    if kind == "gemma3_text":
        local = {"rope_type": "default", "rope_theta": head.real(LOCAL_THETA, DEFAULT_THETA)}
        values["rope_parameters"] = {"full_attention": rope, "sliding_attention": local}
    if kind == "phi3":
        values |= {
            "original_max_position_embeddings": original,
            "sliding_window": head.size(WINDOW, 0, 2**31 - 1) or None,
        }
    if kind == "ministral3":
        more: dict[str, Any] = {"llama_4_scaling_beta": head.real(BETA) if head.architecture_value(BETA) else 0.0}
        more["original_max_position_embeddings"] = original
        more |= {"mscale": 1.0, "mscale_all_dim": head.real(MSCALE)} if head.architecture_value(MSCALE) else {}
        values["rope_parameters"] = {**rope, **more}
    return values


def _read_windows(head: FileHead, family: Family, layers: int) -> dict[str, Any]:
    """Return the window and the kinds of layers for a family that mixes full and sliding attention.

    llama.cpp reads n, and every n-th layer has no window (0: all layers have one). It ignores a list of layers.
    """
    if family.window_layers not in (0, layers):
        return {"sliding_window": None, "layer_types": ["full_attention"] * layers}
    stated, period = head.values.get(f"{head.architecture}.{PERIOD}"), family.full_every
    if stated is not None and not isinstance(stated, list):
        if not isinstance(stated, int) or isinstance(stated, bool) or stated < 0:
            head.refuse_value(PERIOD, "be a number of layers")
        period = stated
    full = [period > 0 and index % period == period - 1 for index in range(layers)]
    if isinstance(stated, list) and [not sliding for sliding in stated] != full:
        head.refuse(
            f"{PERIOD} lists layers with windows, and llama.cpp ignores the list: it leaves every {period}th layer "
            f"without a window"
        )
    usual = DEFAULT_WINDOW if head.architecture in ("gemma2", "exaone4") else None
    kinds = ["full_attention" if is_full else "sliding_attention" for is_full in full]
    return {"sliding_window": head.count(WINDOW, usual), "layer_types": kinds}


# ── Keys general.* of every file ──

INTEGERS = (4, 5)  # the 32-bit integers of gguf.GGUFValueType


@dataclass(frozen=True)
class Origin:
    """What is known of a model besides the files of its folder. The files win, except for `name`.

    `base_model` and `datasets` are hub names. `licence` is the base model's.
    """

    name: str | None = None
    recipe: str | None = None
    base_model: str | None = None
    licence: str | None = None
    datasets: tuple[str, ...] = ()


NO_ORIGIN = Origin()


def add_general_fields(writer: Any, folder: Path, origin: Origin, outtype: str, parameters: int) -> None:
    """Write the general.* keys to a gguf.GGUFWriter.

    The gguf package reads most of them from the folder's model card, config.json, generation_config.json and name, as
    llama.cpp's converter does. `origin` completes them, and distill adds its own. Raises DataError for a model card
    whose YAML block cannot be read, or that holds values which GGUF cannot store.
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
        what = f"{folder}: README.md or generation_config.json cannot be read as a model card: {first}"
        raise DataError(what, "correct the block between the --- lines of README.md, or remove it") from None
    _require_forms(folder, writer)
    writer.add_file_type(file_type_number(outtype))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_string("distill.version", distill.__version__)
    if origin.recipe is not None:
        writer.add_string("distill.recipe", origin.recipe)


def file_type_number(outtype: str) -> int:
    """llama.cpp's number for a type of files (gguf.LlamaFileType)."""
    import gguf

    return int(gguf.LlamaFileType["ALL_F32" if outtype == "f32" else f"MOSTLY_{outtype.upper()}"])


def _complete(metadata: Any, origin: Origin) -> None:
    """Fill what the model card omits, in the form that the gguf package gives to such a card."""
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
    """Raise DataError for values that the gguf package took unchecked from the files and cannot write."""
    for key, entry in writer.kv_data[0].items():
        whole, value = entry.type in INTEGERS, entry.value
        form = {ARRAY: [str], STRING: str}.get(entry.type, int if whole else int | float)
        fits = has_form(value, form) and value != [] and not isinstance(value, bool)
        if not fits or (whole and not -(2**31) <= value < 2**31):
            hint = "correct that entry, or remove it"
            raise DataError(f"{folder}: README.md or generation_config.json gives {value!r:.60} for {key}", hint)
