"""Model families that GGUF files are written for and read from, and the sizes in a model's config.json.

Names, shapes and orders are llama.cpp's (conversion/*.py, src/models/*.cpp). Letters of shapes: H hidden size, Q all
query heads, K all key heads, D one head, F width of the MLP, G queries, keys and values, T gate and up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
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
MLP: Parts = {"mlp.gate_proj": ("ffn_gate", "FH"), "mlp.up_proj": ("ffn_up", "FH"), "mlp.down_proj": ("ffn_down", "HF")}
NORMS: Parts = {"input_layernorm": ("attn_norm", "H"), "post_attention_layernorm": ("ffn_norm", "H")}
HEAD_NORMS: Parts = {"self_attn.q_norm": ("attn_q_norm", "D"), "self_attn.k_norm": ("attn_k_norm", "D")}
WHOLE_NORMS: Parts = {"self_attn.q_norm": ("attn_q_norm", "Q"), "self_attn.k_norm": ("attn_k_norm", "K")}
FOUR_NORMS: Parts = {
    "input_layernorm": ("attn_norm", "H"),
    "post_attention_layernorm": ("post_attention_norm", "H"),
    "pre_feedforward_layernorm": ("ffn_norm", "H"),
    "post_feedforward_layernorm": ("post_ffw_norm", "H"),
}
OUTPUT_NORMS: Parts = {  # norms of the outputs of attention and MLP, none of their inputs
    "post_attention_layernorm": ("post_attention_norm", "H"),
    "post_feedforward_layernorm": ("post_ffw_norm", "H"),
}
USUAL_PARTS: Parts = {**NORMS, **ATTENTION, **MLP}
# Both halves of a fused tensor stay together in GGUF.
FUSED: Parts = {
    **NORMS,
    "self_attn.qkv_proj": ("attn_qkv", "GH"),
    "self_attn.o_proj": ATTENTION["self_attn.o_proj"],
    "mlp.gate_up_proj": ("ffn_up", "TH"),
    "mlp.down_proj": MLP["mlp.down_proj"],
}
FUSED_MLP: Parts = {"mlp.gate_up_proj": FUSED["mlp.gate_up_proj"], "mlp.down_proj": MLP["mlp.down_proj"]}
QKV = frozenset(f"self_attn.{part}_proj" for part in "qkv")


@dataclass(frozen=True)
class Family:
    """How llama.cpp writes the models of one `model_type`.

    `interleaved`: rows of q and k are reordered, because llama.cpp rotates neighbours and Hugging Face rotates halves.
    `norm_shift` is added to norm weights (Gemma stores them minus 1). Parts of a layer in `biases` must have a bias.
    Those in `more_biases` may have one. Other biases are refused, because llama.cpp ignores or refuses them.
    `defaults`: transformers' values for keys that config.json may omit. `constants`: values of config.json that every
    imported file gets. `ropes`: the rope types that llama.cpp computes like transformers. `rotates_part`: so does a
    rotary embedding of only a part of each head. `full_every`: by default, every n-th layer sees the whole context and
    the others a window. A file may state another n. `window_layers`: if not 0, llama.cpp computes windows only in
    models with this number of layers. `no_positions_every`: every n-th layer has no rotary embedding. `large_layers`:
    number of layers of the family's largest model. llama.cpp recognises that model by the number, and scales its
    queries by hidden size / heads. `epsilon`: config.json's key for the epsilon of the norms. `scales` and `caps` (of
    logits, optional): keys in config.json and, below the architecture's name, in GGUF. `tied`: the head must be (True)
    or must not be (False) the embeddings. `free_head_size`: head size × heads may differ from the hidden size.
    """

    parts: Parts
    architecture: str = ""  # by default the model_type
    biases: frozenset[str] = frozenset()
    more_biases: frozenset[str] = frozenset()
    interleaved: bool = False
    norm_shift: float = 0.0
    activation: str = "silu"
    states_head_size: bool = True
    llama_keys: bool = False
    ropes: tuple[str, ...] = ("default",)
    full_every: int = 0
    large_layers: int = 0
    window_layers: int = 0
    no_positions_every: int = 0
    rotates_part: bool = False
    epsilon: str = "rms_norm_eps"
    scales: Mapping[str, str] = field(default_factory=dict)
    caps: tuple[str, ...] = ()
    tied: bool | None = None
    free_head_size: bool = True
    defaults: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)


LLAMA_BIASES = frozenset(USUAL_PARTS) - frozenset(NORMS)
GRANITE_SCALES = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
GELU = "gelu_pytorch_tanh"
GEMMA = {"head_dim": 256, "tie_word_embeddings": True, "hidden_activation": GELU}
GEMMA3 = {**GEMMA, "sliding_window": 4096, "query_pre_attn_scalar": 256}
GEMMA2 = {**GEMMA3, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_LLAMA = Family(USUAL_PARTS, interleaved=True, llama_keys=True, ropes=("default", "linear"))
_GEMMA = Family(USUAL_PARTS, norm_shift=1.0, activation=GELU, tied=True, defaults=GEMMA)
_QWEN = Family(
    USUAL_PARTS, ropes=("default", "linear", "yarn"), constants={"use_sliding_window": False, "sliding_window": None}
)
NO_BIASES = {"attention_bias": False}
_BY_TYPE = {
    "llama": replace(_LLAMA, more_biases=LLAMA_BIASES, ropes=("default", "linear", "llama3")),
    "mistral": replace(_LLAMA, architecture="llama", defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "qwen2": replace(_QWEN, biases=QKV, states_head_size=False),
    "qwen3": replace(_QWEN, parts={**USUAL_PARTS, **HEAD_NORMS}),
    "gemma": _GEMMA,
    "gemma2": replace(
        _GEMMA,
        parts={**FOUR_NORMS, **ATTENTION, **MLP},
        full_every=2,
        large_layers=46,
        caps=("attn_logit_softcapping", "final_logit_softcapping"),
        defaults=GEMMA2,
    ),
    "gemma3_text": replace(
        _GEMMA,
        architecture="gemma3",
        parts={**FOUR_NORMS, **ATTENTION, **HEAD_NORMS, **MLP},
        ropes=("default", "linear"),
        full_every=6,
        large_layers=62,
        caps=("final_logit_softcapping",),
        defaults=GEMMA3,
    ),
    "phi3": Family(
        FUSED, states_head_size=False, ropes=("default", "longrope"), rotates_part=True, free_head_size=False
    ),
    "smollm3": replace(
        _LLAMA,
        no_positions_every=4,
        states_head_size=False,
        defaults={"num_key_value_heads": 4, "tie_word_embeddings": True},
        constants=NO_BIASES | {"no_rope_layer_interval": 4},
    ),
    "granite": replace(
        _LLAMA,
        states_head_size=False,
        ropes=("default",),
        scales=GRANITE_SCALES,
        free_head_size=False,
        defaults=dict.fromkeys(GRANITE_SCALES, 1.0),
        constants=NO_BIASES,
    ),
    "olmo2": Family(
        {**OUTPUT_NORMS, **ATTENTION, **WHOLE_NORMS, **MLP},
        states_head_size=False,
        tied=False,
        free_head_size=False,
        defaults={"rms_norm_eps": 1e-5},
        constants=NO_BIASES,
    ),
    "exaone4": Family(
        {**OUTPUT_NORMS, **ATTENTION, **HEAD_NORMS, **MLP},
        ropes=("default", "llama3"),
        full_every=4,
        window_layers=64,
        free_head_size=False,
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096},
    ),
    "seed_oss": Family(
        {**USUAL_PARTS, "post_attention_layernorm": ("post_attention_norm", "H")},
        more_biases=QKV,
        defaults={"num_key_value_heads": 8, "head_dim": 128},
    ),
    "ministral3": replace(
        _LLAMA,
        architecture="mistral3",
        ropes=("default", "yarn"),
        defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
    ),
    "glm4": Family(
        {
            "input_layernorm": NORMS["input_layernorm"],
            **ATTENTION,
            "post_self_attn_layernorm": ("post_attention_norm", "H"),
            "post_attention_layernorm": ("ffn_norm", "H"),
            **FUSED_MLP,
            "post_mlp_layernorm": ("post_ffw_norm", "H"),
        },
        more_biases=QKV,
        rotates_part=True,
        defaults={"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1.5625e-7, "partial_rotary_factor": 0.5},
    ),
    "cohere2": Family(
        {"input_layernorm": NORMS["input_layernorm"], **ATTENTION, **MLP},
        states_head_size=False,
        full_every=4,
        epsilon="layer_norm_eps",
        scales={"logit_scale": "logit_scale"},
        tied=True,
        free_head_size=False,
        defaults={"tie_word_embeddings": True, "sliding_window": 4096, "logit_scale": 0.0625, "layer_norm_eps": 1e-5},
        constants=NO_BIASES,
    ),
}
FAMILIES: Mapping[str, Family] = {
    kind: replace(family, architecture=family.architecture or kind) for kind, family in _BY_TYPE.items()
}
# llama.cpp's architecture -> model_type. "llama" stands for two families, and the first one in the table wins.
MODEL_TYPES = {family.architecture: kind for kind, family in reversed(list(FAMILIES.items()))}
# Keys of config.json -> keys below the architecture's name in GGUF, in the order in which files are written.
SIZES = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
}
EPSILONS = {"rms_norm_eps": "attention.layer_norm_rms_epsilon", "layer_norm_eps": "attention.layer_norm_epsilon"}
OUTER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_KINDS = {"full_attention", "sliding_attention"}  # the kinds that can be exported
# Tensors with factors of the rotary embedding. Hugging Face keeps the factors in config.json, not in the weights.
LLAMA3_FACTORS, LONG_FACTORS, SHORT_FACTORS = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)
# Settings of yarn: keys in config.json -> keys below rope.scaling. in GGUF.
YARN_KEYS = {"attention_factor": "yarn_attn_factor", "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
YARN_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}  # llama.cpp uses these for the families here and ignores the file's
_HUGGING_FACE_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.(.+)\.(weight|bias)")
_GGUF_LAYER = re.compile(r"blk\.(\d{1,9})\.(\w+)\.(weight|bias)")


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model, from which the names and shapes of its tensors follow. `tied`: the head is the embeddings."""

    family: Family
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    mlp: int
    vocabulary: int
    tied: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Sizes:
        """Read the sizes from a config.json with all keys. Only head_dim has a default: hidden size / heads."""
        family, hidden, heads = FAMILIES[config["model_type"]], config["hidden_size"], config["num_attention_heads"]
        return Sizes(
            family=family,
            hidden=hidden,
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config["num_key_value_heads"],
            head_size=(family.free_head_size and config.get("head_dim")) or hidden // heads,
            mlp=config["intermediate_size"],
            vocabulary=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
        )

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the family."""
        return self.family.architecture

    @property
    def query_scale(self) -> int:
        """The `query_pre_attn_scalar` that llama.cpp assumes for a Gemma with sliding windows."""
        return self.hidden // self.heads if self.layers == self.family.large_layers else self.head_size

    def expected_tensors(self, biases: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """Hugging Face name -> shape of every tensor of the model. `biases`: parts of a layer that have a bias."""
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
        """llama.cpp's name for a tensor's Hugging Face name, or None if the family has no such tensor."""
        match = _HUGGING_FACE_LAYER.fullmatch(name)
        if match and match[2] in self.family.parts and int(match[1]) < self.layers:
            return f"blk.{match[1]}.{self.family.parts[match[2]][0]}.{match[3]}"
        return OUTER_NAMES.get(name)

    def hugging_face_name(self, name: str) -> str | None:
        """The inverse of `gguf_name`: the Hugging Face name, or None."""
        match = _GGUF_LAYER.fullmatch(name)
        part = next((part for part, (gguf, _) in self.family.parts.items() if match and gguf == match[2]), None)
        if match and part is not None and int(match[1]) < self.layers:
            return f"model.layers.{match[1]}.{part}.{match[3]}"
        return next((outer for outer, gguf in OUTER_NAMES.items() if gguf == name), None)

    def reordered_heads(self, name: str) -> int:
        """Number of heads whose rows are reordered in GGUF, by Hugging Face name. 0 if the rows keep their order."""
        heads = {"self_attn.q_proj": self.heads, "self_attn.k_proj": self.kv_heads}
        return heads.get(layer_part(name), 0) if self.family.interleaved else 0

    def norm_shift(self, name: str) -> float:
        """The number that is added to the values of a tensor in GGUF, by Hugging Face name."""
        return self.family.norm_shift if name.endswith("norm.weight") else 0.0


def period_of(full: Sequence[bool], usual: int) -> int | None:
    """The n of an order in which every n-th layer is full, or None for another order. llama.cpp states orders by n.

    If several n fit, the family's `usual` n wins.
    """
    for period in (usual, *range(2, len(full) + 2)):  # llama.cpp aborts if every layer is full (1).
        if list(full) == [index % period == period - 1 for index in range(len(full))]:
            return period
    return None


def kinds_of(config: Any) -> list[bool]:
    """Whether each layer has no window (or no rotary embedding). Empty if all layers of the family are alike."""
    family = FAMILIES.get(config.model_type)
    if family is None or not (family.full_every or family.no_positions_every):
        return []
    if family.full_every:
        return [kind == "full_attention" for kind in config.layer_types]
    return [not rotates for rotates in config.no_rope_layers]


def orders(model_type: str, layers: int) -> list[list[bool]]:
    """The orders of layers, as in `kinds_of`, that a GGUF file of a model with this many layers can state."""
    family = FAMILIES[model_type]
    periods: Iterable[int] = [family.no_positions_every] if family.no_positions_every else ()
    if family.full_every and family.window_layers in (0, layers):
        periods = range(2, layers + 2)
    return [[index % period == period - 1 for index in range(layers)] for period in periods]


def layer_part(name: str) -> str:
    """The part of a layer in a Hugging Face name: `self_attn.q_proj` for `model.layers.0.self_attn.q_proj.bias`."""
    return name.rsplit(".", 1)[0].split(".", 3)[-1]
