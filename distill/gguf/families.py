"""The families of models that GGUF files are made of and read back from, and the sizes in a model's config.json.

llama.cpp's names, shapes and orders, from its converter (conversion/*.py) and models (src/models/*.cpp). Shapes are
written with H hidden, Q all query heads, K all key heads, D one head, F the MLP's width.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from distill.errors import DataError
from distill.folders import read_config

# Part of a layer in Hugging Face: its name in GGUF, the letters of its shape.
Parts = Mapping[str, tuple[str, str]]
ATTENTION: Parts = {
    "self_attn.q_proj": ("attn_q", "QH"),
    "self_attn.k_proj": ("attn_k", "KH"),
    "self_attn.v_proj": ("attn_v", "KH"),
    "self_attn.o_proj": ("attn_output", "HQ"),
}
MLP: Parts = {
    "mlp.gate_proj": ("ffn_gate", "FH"),
    "mlp.up_proj": ("ffn_up", "FH"),
    "mlp.down_proj": ("ffn_down", "HF"),
}
NORMS: Parts = {"input_layernorm": ("attn_norm", "H"), "post_attention_layernorm": ("ffn_norm", "H")}
HEAD_NORMS: Parts = {"self_attn.q_norm": ("attn_q_norm", "D"), "self_attn.k_norm": ("attn_k_norm", "D")}
FOUR_NORMS: Parts = {
    "input_layernorm": ("attn_norm", "H"),
    "post_attention_layernorm": ("post_attention_norm", "H"),
    "pre_feedforward_layernorm": ("ffn_norm", "H"),
    "post_feedforward_layernorm": ("post_ffw_norm", "H"),
}
PLAIN: Parts = {**NORMS, **ATTENTION, **MLP}
# Both halves of a fused tensor stay together in GGUF. G: queries, keys and values; T: gate and up.
FUSED: Parts = {
    **NORMS,
    "self_attn.qkv_proj": ("attn_qkv", "GH"),
    "self_attn.o_proj": ATTENTION["self_attn.o_proj"],
    "mlp.gate_up_proj": ("ffn_up", "TH"),
    "mlp.down_proj": MLP["mlp.down_proj"],
}
QKV = frozenset(f"self_attn.{part}_proj" for part in "qkv")


@dataclass(frozen=True)
class Family:
    """How one `model_type` is written.

    `interleaved`: q and k rows are reordered, because llama.cpp rotates neighbours where Hugging Face rotates halves.
    `norm_shift` is added to norm weights, which Gemma stores less one. `biases` must be there, `more_biases` may: all
    others are refused, because llama.cpp would ignore or refuse them. `defaults` are those of transformers for keys
    that config.json may leave out. `ropes` are the kinds of rotary embedding that llama.cpp computes alike.
    `full_every`: every so many layers see the whole context, the others a window. `large_layers` are those of the
    largest model of a family, by which llama.cpp knows it and scales its queries by hidden size over heads.
    """

    architecture: str
    parts: Parts
    biases: frozenset[str] = frozenset()
    more_biases: frozenset[str] = frozenset()
    interleaved: bool = False
    norm_shift: float = 0.0
    activation: str = "silu"
    states_head_size: bool = True
    llama_keys: bool = False
    ropes: tuple[str, ...] = ("default", "linear")
    full_every: int = 0
    large_layers: int = 0
    defaults: Mapping[str, Any] = field(default_factory=dict)


LLAMA_BIASES = frozenset(PLAIN) - frozenset(NORMS)
GELU = "gelu_pytorch_tanh"
GEMMA = {"head_dim": 256, "tie_word_embeddings": True, "hidden_activation": GELU}
GEMMA3 = {**GEMMA, "sliding_window": 4096, "query_pre_attn_scalar": 256}
GEMMA2 = {**GEMMA3, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_LLAMA = Family("llama", PLAIN, interleaved=True, llama_keys=True)
_GEMMA = Family("gemma", PLAIN, norm_shift=1.0, activation=GELU, ropes=("default",), defaults=GEMMA)
FAMILIES: Mapping[str, Family] = {
    "llama": replace(_LLAMA, more_biases=LLAMA_BIASES, ropes=("default", "linear", "llama3")),
    "mistral": replace(_LLAMA, defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "qwen2": Family("qwen2", PLAIN, biases=QKV, states_head_size=False, ropes=("default", "linear", "yarn")),
    "qwen3": Family("qwen3", {**PLAIN, **HEAD_NORMS}, ropes=("default", "linear", "yarn")),
    "gemma": _GEMMA,
    "gemma2": replace(
        _GEMMA,
        architecture="gemma2",
        parts={**FOUR_NORMS, **ATTENTION, **MLP},
        full_every=2,
        large_layers=46,
        defaults=GEMMA2,
    ),
    "gemma3_text": replace(
        _GEMMA,
        architecture="gemma3",
        parts={**FOUR_NORMS, **ATTENTION, **HEAD_NORMS, **MLP},
        ropes=("default", "linear"),
        full_every=6,
        large_layers=62,
        defaults=GEMMA3,
    ),
    "phi3": Family("phi3", FUSED, states_head_size=False, ropes=("default", "longrope")),
    "smollm3": replace(
        _LLAMA,
        architecture="smollm3",
        states_head_size=False,
        defaults={"num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "granite": replace(_LLAMA, architecture="granite", states_head_size=False, ropes=("default",)),
}
OUTER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
# Factors of the rotary embedding, which stand in config.json and not among the weights.
LLAMA3_FACTORS, LONG_FACTORS, SHORT_FACTORS = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)
# Keys below the architecture's name of what config.json has too.
YARN_KEYS = {"attention_factor": "attn_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow"}
YARN_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}  # which llama.cpp takes, whatever a file of these families says
GRANITE_SCALES = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_OWN_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.(.+)\.(weight|bias)")
_GGUF_LAYER = re.compile(r"blk\.(\d{1,9})\.(\w+)\.(weight|bias)")


@dataclass(frozen=True)
class Sizes:
    """A model's sizes, which name and shape its tensors; `tied`: the head is the embeddings."""

    family: Family
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    mlp: int
    vocabulary: int
    tied: bool

    @property
    def query_scale(self) -> int:
        """The `query_pre_attn_scalar` that llama.cpp takes for a Gemma with sliding windows."""
        return self.hidden // self.heads if self.layers == self.family.large_layers else self.head_size

    def expected_tensors(self, biases: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """Hugging Face name -> shape of every tensor that the model must have; `biases`: parts of a layer with one."""
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        lengths = {"H": self.hidden, "Q": queries, "K": keys, "D": self.head_size, "F": self.mlp}
        lengths |= {"G": queries + 2 * keys, "T": 2 * self.mlp}
        shapes = {
            part: tuple(lengths[letter] for letter in letters) for part, (_, letters) in self.family.parts.items()
        }
        expected: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        for index in range(self.layers):
            expected |= {f"model.layers.{index}.{part}.weight": shape for part, shape in shapes.items()}
            expected |= {f"model.layers.{index}.{part}.bias": shapes[part][:1] for part in sorted(biases)}
        expected["model.norm.weight"] = (self.hidden,)
        return expected if self.tied else {**expected, "lm_head.weight": (self.vocabulary, self.hidden)}

    def gguf_name(self, name: str) -> str | None:
        """llama.cpp's name of a tensor by its Hugging Face name; None for one that the family does not have."""
        match = _OWN_LAYER.fullmatch(name)
        if match and match[2] in self.family.parts and int(match[1]) < self.layers:
            return f"blk.{match[1]}.{self.family.parts[match[2]][0]}.{match[3]}"
        return OUTER_NAMES.get(name)

    def hugging_face_name(self, name: str) -> str | None:
        """The inverse of `gguf_name`."""
        match = _GGUF_LAYER.fullmatch(name)
        part = next((own for own, (theirs, _) in self.family.parts.items() if match and theirs == match[2]), None)
        if match and part is not None and int(match[1]) < self.layers:
            return f"model.layers.{match[1]}.{part}.{match[3]}"
        return next((own for own, theirs in OUTER_NAMES.items() if theirs == name), None)

    def reordered_heads(self, name: str) -> int:
        """The heads whose rows have another order in GGUF, by the Hugging Face name; 0 for tensors that keep theirs."""
        heads = {"self_attn.q_proj": self.heads, "self_attn.k_proj": self.kv_heads}
        return heads.get(part_of(name), 0) if self.family.interleaved else 0

    def norm_shift(self, name: str) -> float:
        """What is added to the values of a tensor in GGUF."""
        return self.family.norm_shift if name.endswith("norm.weight") else 0.0


def part_of(name: str) -> str:
    """The part of a layer in a tensor's name: `self_attn.q_proj` of `model.layers.0.self_attn.q_proj.bias`."""
    return name.rsplit(".", 1)[0].split(".", 3)[-1]


# ── config.json of a model that is exported; what llama.cpp would compute differently is refused ──

CORRECT = "correct config.json"
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size", "num_experts_per_tok")


@dataclass(frozen=True)
class Shape(Sizes):
    """The values of config.json that name, check and describe the tensors; `config` holds them all, with defaults.

    `window`: positions that a layer with sliding attention sees, where llama.cpp computes it too; None where there is
    none. `rotated`: dimensions of a head that its position turns. `notes`: what llama.cpp leaves out, for the reader of
    the export.
    """

    architecture: str
    rotated: int
    context: int
    rms_epsilon: float
    rope_theta: float
    rope: Mapping[str, Any]
    local_theta: float | None = None
    window: int | None = None
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


def read_shape(folder: Path) -> Shape:
    """The model's shape from `folder`/config.json; DataError for a model that llama.cpp would compute differently."""
    stated = read_config(folder)
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
    head_size = values.number("head_dim", hidden // heads)
    if kind == "granite" or kind == "phi3":
        head_size = hidden // heads
    context = values.number("max_position_embeddings")
    window, notes = _window(values, kind, context, layers)
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
        rms_epsilon=values.real("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
        tied=bool(config.get("tie_word_embeddings", False)),
        rope_theta=values.real("rope_theta", rope["rope_theta"]),
        rope=rope,
        local_theta=None if local is None else values.real("rope_local_base_freq", local),
        window=window,
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
    """The rotated dimensions of a head, as transformers counts them; llama.cpp turns a part of them in phi3 alone."""
    share = rope.get("partial_rotary_factor") or values.values.get("partial_rotary_factor") or 1.0
    rotated = int(head_size * values.real("partial_rotary_factor", share))
    if rotated != head_size and (kind != "phi3" or rotated % 2 or not 0 < rotated < head_size):
        values.refuse(f"a rotary embedding of {rotated} of {head_size} dimensions")
    return rotated


def _window(values: _Config, kind: str, context: int, layers: int) -> tuple[int | None, tuple[str, ...]]:
    """The sliding window that llama.cpp computes, and a note on one that it leaves out."""
    config, pattern = values.values, FAMILIES[kind].full_every
    types = config.get("layer_types")
    if pattern:
        expected = [
            "full_attention" if index % pattern == pattern - 1 else "sliding_attention" for index in range(layers)
        ]
        stated = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", pattern))
        if (types is not None and types != expected) or (types is None and stated != pattern):
            values.refuse(f"an order of sliding and full attention other than every {pattern}th layer full")
        return values.number("sliding_window"), ()
    if kind in ("mistral", "phi3") and config.get("sliding_window") is not None:
        size = values.number("sliding_window")
        if size < context:
            return None, (
                f"llama.cpp has no sliding window for {kind}: beyond {size} tokens its layers see more than they "
                "were trained to",
            )
        return None, ()
    if config.get("use_sliding_window") or "sliding_attention" in (types or []):
        values.refuse("sliding-window attention")
    return None, ()


def _refuse_unsupported(values: _Config, shape: Shape) -> None:
    config, rope = values.values, shape.rope
    if rope["rope_type"] not in shape.family.ropes:
        values.refuse(f"rope scaling {rope['rope_type']!r} on {shape.architecture}")
    if rope["rope_type"] in ("linear", "llama3", "yarn") and not isinstance(rope.get("factor"), int | float):
        values.refuse(f"rope scaling without a factor: {dict(rope)}; it")
    for key in ("factor", "attention_factor", "beta_fast", "beta_slow"):
        if rope.get(key) is not None:
            values.real(f"{key} of the rope scaling", rope[key])
    strange = [key for key in ("mscale", "mscale_all_dim") if rope.get(key) is not None]
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
    if shape.family.full_every:
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
        expected = [int((index + 1) % 4 != 0) for index in range(shape.layers)]
        if (stated is not None and stated != expected) or (
            stated is None and config.get("no_rope_layer_interval", 4) != 4
        ):
            values.refuse("a position-free layer other than every 4th")
    if kind == "granite":
        for key in GRANITE_SCALES:
            values.real(key, config.get(key, 1.0))
    if kind in ("granite", "phi3") and config.get("head_dim") not in (None, shape.head_size):
        values.refuse(f"head_dim {config['head_dim']!r}")
    if kind.startswith("gemma") and not shape.tied:
        values.refuse("an untied head on gemma")
