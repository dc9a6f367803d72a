"""The families of models that GGUF files are made of and read back from: llama.cpp's names, shapes and orders.

Source: the converter of llama.cpp (conversion/*.py) and its models (src/models/*.cpp). Shapes are written with
H hidden, Q all query heads, K all key heads, D one head, F the MLP's width.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

# Part of a layer in Hugging Face: its name in GGUF, the letters of its shape.
Parts = Mapping[str, tuple[str, tuple[str, ...]]]
ATTENTION: Parts = {
    "self_attn.q_proj": ("attn_q", ("Q", "H")),
    "self_attn.k_proj": ("attn_k", ("K", "H")),
    "self_attn.v_proj": ("attn_v", ("K", "H")),
    "self_attn.o_proj": ("attn_output", ("H", "Q")),
}
MLP: Parts = {
    "mlp.gate_proj": ("ffn_gate", ("F", "H")),
    "mlp.up_proj": ("ffn_up", ("F", "H")),
    "mlp.down_proj": ("ffn_down", ("H", "F")),
}
NORMS: Parts = {"input_layernorm": ("attn_norm", ("H",)), "post_attention_layernorm": ("ffn_norm", ("H",))}
HEAD_NORMS: Parts = {"self_attn.q_norm": ("attn_q_norm", ("D",)), "self_attn.k_norm": ("attn_k_norm", ("D",))}
FOUR_NORMS: Parts = {
    "input_layernorm": ("attn_norm", ("H",)),
    "post_attention_layernorm": ("post_attention_norm", ("H",)),
    "pre_feedforward_layernorm": ("ffn_norm", ("H",)),
    "post_feedforward_layernorm": ("post_ffw_norm", ("H",)),
}
PLAIN: Parts = {**NORMS, **ATTENTION, **MLP}
# Both halves of a fused tensor stay together in GGUF. G: queries, keys and values; T: gate and up.
FUSED: Parts = {
    **NORMS,
    "self_attn.qkv_proj": ("attn_qkv", ("G", "H")),
    "self_attn.o_proj": ATTENTION["self_attn.o_proj"],
    "mlp.gate_up_proj": ("ffn_up", ("T", "H")),
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
GEMMA = MappingProxyType({"head_dim": 256, "tie_word_embeddings": True, "hidden_activation": GELU})
GEMMA2 = MappingProxyType(
    {
        **GEMMA,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }
)
GEMMA3 = MappingProxyType({**GEMMA, "sliding_window": 4096, "query_pre_attn_scalar": 256})
FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        "llama",
        PLAIN,
        more_biases=LLAMA_BIASES,
        interleaved=True,
        llama_keys=True,
        ropes=("default", "linear", "llama3"),
    ),
    "mistral": Family(
        "llama",
        PLAIN,
        interleaved=True,
        llama_keys=True,
        defaults=MappingProxyType({"num_key_value_heads": 8, "sliding_window": 4096}),
    ),
    "qwen2": Family("qwen2", PLAIN, biases=QKV, states_head_size=False, ropes=("default", "linear", "yarn")),
    "qwen3": Family("qwen3", {**PLAIN, **HEAD_NORMS}, ropes=("default", "linear", "yarn")),
    "gemma": Family("gemma", PLAIN, norm_shift=1.0, activation=GELU, ropes=("default",), defaults=GEMMA),
    "gemma2": Family(
        "gemma2",
        {**FOUR_NORMS, **ATTENTION, **MLP},
        norm_shift=1.0,
        activation=GELU,
        ropes=("default",),
        full_every=2,
        large_layers=46,
        defaults=GEMMA2,
    ),
    "gemma3_text": Family(
        "gemma3",
        {**FOUR_NORMS, **ATTENTION, **HEAD_NORMS, **MLP},
        norm_shift=1.0,
        activation=GELU,
        full_every=6,
        large_layers=62,
        defaults=GEMMA3,
    ),
    "phi3": Family("phi3", FUSED, states_head_size=False, ropes=("default", "longrope")),
    "smollm3": Family(
        "smollm3",
        PLAIN,
        interleaved=True,
        llama_keys=True,
        states_head_size=False,
        defaults=MappingProxyType({"num_key_value_heads": 4, "tie_word_embeddings": True}),
    ),
    "granite": Family(
        "granite",
        PLAIN,
        interleaved=True,
        llama_keys=True,
        states_head_size=False,
        ropes=("default",),
    ),
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
GRANITE_SCALES = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_OWN_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.(.+)\.(weight|bias)")
_GGUF_LAYER = re.compile(r"blk\.(\d{1,9})\.(\w+)\.(weight|bias)")


def query_scale(family: Family, layers: int, hidden: int, heads: int, head_size: int) -> int:
    """The `query_pre_attn_scalar` that llama.cpp takes for a Gemma with sliding windows."""
    return hidden // heads if layers == family.large_layers else head_size


def tensor_shapes(
    family: Family, *, hidden: int, heads: int, kv_heads: int, head_size: int, mlp: int, rows: int
) -> dict[str, tuple[int, ...]]:
    """Shapes by Hugging Face's names: of the outer tensors, and of a layer's parts (their weights)."""
    queries, keys = heads * head_size, kv_heads * head_size
    sizes = {"H": hidden, "Q": queries, "K": keys, "D": head_size, "F": mlp, "G": queries + 2 * keys, "T": 2 * mlp}
    outer = {"model.embed_tokens.weight": (rows, hidden), "lm_head.weight": (rows, hidden)}
    parts = {part: tuple(sizes[letter] for letter in letters) for part, (_, letters) in family.parts.items()}
    return {**outer, "model.norm.weight": (hidden,), **parts}


def part_of(name: str) -> str:
    """The part of a layer in a tensor's name: `self_attn.q_proj` of `model.layers.0.self_attn.q_proj.bias`."""
    return name.rsplit(".", 1)[0].split(".", 3)[-1]


def gguf_name(name: str, family: Family, layers: int) -> str | None:
    """llama.cpp's name of a tensor by its Hugging Face name; None for one that the family does not have."""
    match = _OWN_LAYER.fullmatch(name)
    if match and match[2] in family.parts and int(match[1]) < layers:
        return f"blk.{match[1]}.{family.parts[match[2]][0]}.{match[3]}"
    return OUTER_NAMES.get(name)


def hugging_face_name(name: str, family: Family, layers: int) -> str | None:
    """The inverse of `gguf_name`."""
    match = _GGUF_LAYER.fullmatch(name)
    part = next((own for own, (theirs, _) in family.parts.items() if match and theirs == match[2]), None)
    if match and part is not None and int(match[1]) < layers:
        return f"model.layers.{match[1]}.{part}.{match[3]}"
    return next((own for own, theirs in OUTER_NAMES.items() if theirs == name), None)


def reordered_heads(name: str, family: Family, heads: int, kv_heads: int) -> int:
    """The heads whose rows stand in another order in GGUF, by the Hugging Face name; 0 for tensors that keep theirs."""
    part = part_of(name)
    if not family.interleaved or part not in ("self_attn.q_proj", "self_attn.k_proj"):
        return 0
    return heads if part == "self_attn.q_proj" else kv_heads


def norm_shift(name: str, family: Family) -> float:
    """What is added to the values of a tensor in GGUF."""
    return family.norm_shift if name.endswith("norm.weight") else 0.0
