"""The families of models that are exported, and llama.cpp's names for the parts of their layers.

Source: the converter of llama.cpp (conversion/*.py) and its models (src/models/*.cpp). Shapes are written with
H hidden, Q all query heads, K all key heads, D one head, F the MLP's width.
"""

from __future__ import annotations

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
        defaults=GEMMA2,
    ),
    "gemma3_text": Family(
        "gemma3",
        {**FOUR_NORMS, **ATTENTION, **HEAD_NORMS, **MLP},
        norm_shift=1.0,
        activation=GELU,
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
