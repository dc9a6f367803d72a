"""The families of models that GGUF files are made of and read back from: llama.cpp's names, shapes and orders.

Source: the converter of llama.cpp (conversion/*.py) and its models (src/models/*.cpp). Shapes are written with
H hidden, Q all query heads, K all key heads, D one head, F the MLP's width.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

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
