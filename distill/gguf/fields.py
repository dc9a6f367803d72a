"""config.json as keys of a GGUF file, the architecture's (sizes, rotary embedding, scales), and back; and the keys
general.* of every file."""

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

# ── Sizes and settings by config.json; what llama.cpp would compute differently is refused ──

CORRECT = "correct config.json"
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size", "num_experts_per_tok")


@dataclass(frozen=True)
class Shape(Sizes):
    """The values of config.json that name, check and describe the tensors; `config` holds them all, with defaults.

    `window`: positions that a layer with sliding attention sees, where llama.cpp computes it too; None where there is
    none. `period`: each n-th layer has none. `rotated`: dimensions of a head that its position turns.
    `notes`: what llama.cpp leaves out, for the reader of the export.
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
    """config.json with a family's defaults; every reader names the key in its error."""

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
    """The model's shape from `folder`/config.json with some changes; DataError for a model that llama.cpp would compute
    differently."""
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
    # An explicit null is no default: the layers of a Mistral without a window see everything.
    config |= {key: None for key in ("sliding_window",) if key in stated and stated[key] is None}
    values = _Config(folder, config)
    config.setdefault("num_key_value_heads", config.get("num_attention_heads"))
    for key in (*SIZES, "vocab_size", *(("head_dim",) if family.own_head_size and "head_dim" in config else ())):
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
            fits = isinstance(types, list) and len(types) == layers and {*types} <= LAYER_KINDS
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
    betas = [key for key, usual in YARN_BETAS.items() if rope.get(key) not in (None, usual)]
    if rope["rope_type"] == "yarn" and betas:
        values.refuse(f"yarn with {betas[0]} {rope[betas[0]]}, in whose place llama.cpp takes {YARN_BETAS[betas[0]]}:")
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
        for key in shape.family.caps:
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


# ── The architecture's keys, written by config.json ──
# Keys that are written here and read back below, beside the tables of families.py.

DEFAULT_THETA = 10000.0  # llama.cpp's, where a file names none
HEAD_SIZES = ("attention.key_length", "attention.value_length")
WINDOW, PERIOD = "attention.sliding_window", "attention.sliding_window_pattern"
ROTATED, THETA, LOCAL_THETA = "rope.dimension_count", "rope.freq_base", "rope.freq_base_swa"
SCALING, FACTOR, ORIGINAL = "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"
ATTENTION_FACTOR, MSCALE = "rope.scaling.attn_factor", "rope.scaling.yarn_log_multiplier"
BETA = "attention.temperature_scale"


def add_model_fields(writer: Any, shape: Shape) -> None:
    """Write the architecture's keys to a gguf.GGUFWriter, those of llama.cpp's converter."""
    for key, value in _model_fields(shape).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{shape.architecture}.{key}", value)


def _model_fields(shape: Shape) -> dict[str, int | float | str]:
    family, config, rope, kind = shape.family, shape.config, shape.rope, shape.rope["rope_type"]
    fields: dict[str, int | float | str] = {theirs: config[own] for own, theirs in SIZES.items()}
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
    return fields | {theirs: float(config[own]) for own, theirs in scales.items() if config.get(own)}


def _yarn_fields(rope: Mapping[str, Any]) -> dict[str, float]:
    given = {key: float(rope[key]) for key in YARN_KEYS if rope.get(key) is not None}
    factor, usual = given.get("attention_factor"), yarn_attention(float(rope["factor"]))
    other = factor is not None and not math.isclose(factor, usual, rel_tol=1e-6)
    # llama.cpp reads a factor of its own usual one under another key.
    fields = {ATTENTION_FACTOR: given.pop("attention_factor") / usual} if other else {}
    fields |= {f"rope.scaling.{YARN_KEYS[key]}": value for key, value in given.items()}
    return fields | ({MSCALE: float(rope["mscale_all_dim"])} if rope.get("mscale_all_dim") else {})


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


# ── config.json from the metadata of a GGUF file: the inverse ──

FOLDER = "give the Hugging Face folder of this model"
DEFAULT_WINDOW = 4096  # llama.cpp's
READ_ROPE_KEYS = (
    *("freq_base", "freq_base_swa", "dimension_count", "scale_linear"),
    *(f"scaling.{key}" for key in ("type", "factor", "attn_factor", "original_context_length", "finetuned")),
)
# Below rope.scaling., with the values that change nothing.
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


# ── The door: each key of a file is read, harmless, or refused by name ──
# A key that is off (false, 0, empty) asks for nothing. Keys general.* say where a file comes from, but for those that
# are read; so do keys of other programs, because llama.cpp reads no key outside these namespaces.

OTHER_FILES = {  # namespaces that llama.cpp reads in files of other kinds, and what those are
    **{"adapter": "an adapter (LoRA)", "clip": "an encoder of images or sounds", "imatrix": "an importance matrix"},
    **{"diffusion": "a diffusion model", "xielu": "a model with xIELU"},
}
READ_OWN = (
    *(*SIZES.values(), *EPSILONS.values(), *HEAD_SIZES, WINDOW, PERIOD, "vocab_size", "expert_count"),
    *("attention.causal", "nextn_predict_layers"),
)
HARMLESS_OWN = {
    "tensor_data_layout": "names the order of an old converter, and llama.cpp reads it not",
    "expert_used_count": "is of mixtures of experts, which expert_count tells",
    "pooling_type": "is of embeddings of texts",
}
READ_TOKENIZER = {
    *(f"ggml.{key}" for key in ("model", "pre", "tokens", "token_type", "scores", "merges", "add_bos_token")),
    *("ggml.add_eos_token", "ggml.add_space_prefix", "chat_template", "chat_templates"),
    *(token_key(role).removeprefix("tokenizer.") for role in (*NAMED_ROLES, *TURN_ENDS, *FILL_ROLES)),
}
HARMLESS_TOKENIZER = {
    "huggingface.json": "is a copy of the tokenizer of transformers, which llama.cpp does not read",
    "ggml.token_type_count": "is of models that read pairs of texts",
    "ggml.remove_extra_whitespaces": "is of Unigram, which is refused",
    "ggml.precompiled_charsmap": "is of Unigram, which is refused",
}


def refuse_unknown_keys(head: FileHead) -> None:
    """Raise DataError for a key that is neither read nor harmless, and for one that says otherwise than the tensors."""
    import gguf

    own, others = head.architecture, set(gguf.MODEL_ARCH_NAMES.values())
    family = FAMILIES[family_of(head)[0]]
    read = {*READ_OWN, *HARMLESS_OWN, *family.scales.values(), *family.caps, *([BETA] if own == "mistral3" else [])}
    rows, hidden = head.shapes["token_embd.weight"][1], head.count(SIZES["hidden_size"])
    expected: dict[str, Any] = {"vocab_size": rows, "embedding_length_out": hidden, "attention.causal": True}
    size = head.count(HEAD_SIZES[0], hidden // head.count(SIZES["num_attention_heads"]))
    expected |= dict.fromkeys(("attention.key_length_swa", "attention.value_length_swa"), size)
    unread = {WINDOW, PERIOD} - ({WINDOW, PERIOD} if family.full_every else {WINDOW} if own == "phi3" else set())
    for name, value in head.values.items():
        space, _, key = name.partition(".")
        off = (value in (False, 0, b"", []) and not isinstance(value, bytes | list)) or value in (b"", [])
        if space == "tokenizer" and key not in READ_TOKENIZER | HARMLESS_TOKENIZER.keys():
            template = key.startswith("chat_template.") or (key.endswith("_token_id") and value == NO_TOKEN)
            if not off and not template:
                head.refuse(f"{name} is {_shown(value)}, which is not read here and may change the tokens", FOLDER)
        elif space == own and key in expected:
            if value != expected[key] or isinstance(value, bool) != isinstance(expected[key], bool):
                head.refuse(f"{name} is {_shown(value)}, by the tensors it is {expected[key]}", COPY_AGAIN)
        elif space == own and key.startswith("rope."):
            continue  # `_refuse_unread` has the rules of these
        elif space == own and (key not in read or key in unread) and not off:
            if key != WINDOW or not isinstance(value, int) or value < head.count(SIZES["max_position_embeddings"]):
                head.refuse(f"{name} is {_shown(value)}, which is not read for {own} and may change the text", FOLDER)
        elif space in OTHER_FILES and not off:
            head.refuse(f"{name}: it is {OTHER_FILES[space]}, or says it is", FOLDER)
        elif space != own and space in others and not off:
            head.refuse(f"{name} is {_shown(value)}, and its architecture is {own}", COPY_AGAIN)


def _shown(value: Any) -> str:
    return f"{value.decode('utf-8', 'replace') if isinstance(value, bytes) else value!r:.40}"


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
    return kind, FAMILIES[kind]


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
    refuse_unknown_keys(head)
    heads, hidden = head.count(SIZES["num_attention_heads"]), head.count(SIZES["hidden_size"])
    size = head.count(HEAD_SIZES[0], hidden // heads)
    if head.count(HEAD_SIZES[1], size) != size:
        head.refuse("its keys and values differ in width, which transformers cannot hold")
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
    if not family.own_head_size:
        if size * heads != hidden:
            head.refuse(f"heads of {size} do not make up a hidden size of {hidden}, as {kind} has them in transformers")
    elif family.states_head_size or size * heads != hidden:
        config["head_dim"] = size
    rope = _read_rope(head, family, config, size, factors)
    return config | {"rope_parameters": rope} | _by_family(head, kind, config, rope)


def _read_rope(
    head: FileHead, family: Family, config: Mapping[str, Any], size: int, factors: Mapping[str, Floats]
) -> dict[str, Any]:
    """The parameters of the rotary embedding."""
    theta, stated = head.real(THETA, DEFAULT_THETA), head.text(f"{head.architecture}.{SCALING}")
    # llama.cpp divides all frequencies by the factor, whatever the kind but `none`, and those of two kinds by tensors.
    scaled = next((key for key in (FACTOR, "rope.scale_linear") if head.own(key) is not None), "")
    factor = head.real(scaled) if stated != "none" and scaled and head.own(scaled) else 1.0
    attention = head.real(ATTENTION_FACTOR, 1.0)
    kind = "yarn" if stated == "yarn" else "default" if factor == 1 else "linear"
    tensor = next((name for name in (LLAMA3_FACTORS, LONG_FACTORS) if name in factors), None)
    if tensor is not None:
        if kind != "default":
            head.refuse(f"it scales the rotary embedding twice, by {tensor} and by rope scaling {kind!r}", FOLDER)
        kind = "llama3" if tensor == LLAMA3_FACTORS else "longrope"
    elif stated == "longrope":
        head.refuse(f"its rope scaling is longrope, and it has no {LONG_FACTORS}")
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
        # llama.cpp's yarn has a factor of its own besides; transformers' longrope has one that llama.cpp's lacks.
        if not math.isclose(attention, usual, rel_tol=1e-6):
            rope["attention_factor"] = shortest(attention * (yarn_attention(factor) if kind == "yarn" else 1))
    rotated = head.count(ROTATED, size)
    if rotated != size or "partial_rotary_factor" in family.defaults:
        if not family.rotates_part:
            head.refuse(f"a rotary embedding of {rotated} of {size} dimensions on {head.architecture}")
        rope["partial_rotary_factor"] = rotated / size
    return rope


def _refuse_unread(head: FileHead, kind: str, factor: float) -> None:
    """Raise DataError for a rotary embedding with settings that llama.cpp does not read for these architectures, and
    transformers may: nobody could say which one the model was trained with."""
    unread = UNREAD_YARN | {"yarn_attn_factor": (1.0, yarn_attention(factor))}
    neutral: dict[str, tuple[float, ...]] = dict.fromkeys(READ_ROPE_KEYS, ())  # no values: any will do
    neutral |= {f"scaling.{key}": values if kind == "yarn" else () for key, values in unread.items()}
    if head.architecture == "mistral3":
        neutral["scaling.yarn_log_multiplier"] = ()
    if head.architecture != "gemma3":
        neutral["freq_base_swa"] = (head.real(THETA, DEFAULT_THETA),)
    start = f"{head.architecture}.rope."
    for key in (name.removeprefix(start) for name in head.values if name.startswith(start)):
        value, allowed = head.own(f"rope.{key}"), neutral.get(key, (0.0,))
        same = isinstance(value, int | float) and any(math.isclose(value, one, rel_tol=1e-6) for one in allowed)
        if allowed and not same:
            head.refuse(f"{start}{key} is {value!r:.40}, which llama.cpp does not read and transformers may", FOLDER)


def _stated_context(head: FileHead) -> int | None:
    """Positions that the embedding was made for before it was scaled; None where the file does not say."""
    return head.count(ORIGINAL) if head.own(ORIGINAL) else None


def _llama3(head: FileHead, divisors: Floats, theta: float, size: int, original: int) -> dict[str, Any]:
    """The settings of Llama 3's rope scaling that give these divisors [D/2] of the frequencies; DataError where those
    of every Llama 3, with the factor of these, give others."""
    rule = {"factor": shortest(float(divisors.max())), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    expected = llama3_divisors(theta, size, rule["factor"], 1.0, 4.0, original)
    if expected.shape != divisors.shape or not np.allclose(expected, divisors, rtol=1e-4, atol=0):
        head.refuse("its rope_freqs.weight is not of Llama 3's rule, the only one that transformers has for it")
    return {**rule, "original_max_position_embeddings": original}


def _by_family(head: FileHead, kind: str, config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """What one family alone has in its config.json."""
    family = FAMILIES[kind]
    values: dict[str, Any] = {own: head.real(theirs, family.defaults[own]) for own, theirs in family.scales.items()}
    if family.full_every:
        values |= _read_windows(head, family, config["num_hidden_layers"])
    if "query_pre_attn_scalar" in family.defaults:
        values["query_pre_attn_scalar"] = Sizes.of(config).query_scale
    for key in family.caps:
        default = family.defaults.get(key)
        values[key] = None if head.own(key) is default is None else head.real(key, default)
    if family.more_biases:
        biases = {name.split(".")[2] for name in head.shapes if name.startswith("blk.") and name.endswith(".bias")}
        for key, parts in (("attention_bias", ATTENTION), ("mlp_bias", MLP)):
            values[key] = any(theirs in biases for theirs, _ in parts.values())
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
        more: dict[str, Any] = {"llama_4_scaling_beta": head.real(BETA) if head.own(BETA) else 0.0}
        more["original_max_position_embeddings"] = original
        more |= {"mscale": 1.0, "mscale_all_dim": head.real(MSCALE)} if head.own(MSCALE) else {}
        values["rope_parameters"] = {**rope, **more}
    return values


def _read_windows(head: FileHead, family: Family, layers: int) -> dict[str, Any]:
    """The window and the kinds of layers of a family that mixes them.

    llama.cpp reads every how many layers one has no window (0: all have one), and passes over a list of layers.
    """
    if family.window_layers not in (0, layers):
        return {"sliding_window": None, "layer_types": ["full_attention"] * layers}
    stated, period = head.values.get(f"{head.architecture}.{PERIOD}"), family.full_every
    if stated is not None and not isinstance(stated, list):
        if not isinstance(stated, int) or isinstance(stated, bool) or stated < 0:
            head.refuse_value(PERIOD, "be a number of layers")
        period = stated
    full = [period > 0 and index % period == period - 1 for index in range(layers)]
    if isinstance(stated, list) and [not one for one in stated] != full:
        head.refuse(
            f"{PERIOD} lists another order of windows than every {period}th layer without, which llama.cpp computes"
        )
    usual = DEFAULT_WINDOW if head.architecture in ("gemma2", "exaone4") else None
    kinds = ["full_attention" if one else "sliding_attention" for one in full]
    return {"sliding_window": head.count(WINDOW, usual), "layer_types": kinds}


# ── The keys general.*, of every file ──

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


NO_ORIGIN = Origin()  # nothing but what the folder's files say


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
        what = f"{folder}: README.md or generation_config.json cannot be read as a model card: {first}"
        raise DataError(what, "correct the block between the --- lines of README.md, or remove it") from None
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
        whole, value = entry.type in INTEGERS, entry.value
        form = {ARRAY: [str], STRING: str}.get(entry.type, int if whole else int | float)
        fits = has_form(value, form) and value != [] and not isinstance(value, bool)
        if not fits or (whole and not -(2**31) <= value < 2**31):
            hint = "correct that entry, or remove it"
            raise DataError(f"{folder}: README.md or generation_config.json gives {value!r:.60} for {key}", hint)
