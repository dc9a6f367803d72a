"""config.json of a model that is exported: sizes and settings; what llama.cpp would compute differently is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from distill.errors import DataError
from distill.folders import read_config
from distill.gguf.families import FAMILIES, YARN_BETAS, Sizes, orders, period_of

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
        value = self.values.get(key)
        value = default if value is None and default is not None else value
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
