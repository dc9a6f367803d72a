"""config.json and the tokenizer from the metadata of a GGUF file: the inverses of fields.py and tokenizer.py."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from distill.folders import Floats
from distill.gguf.families import (
    FAMILIES,
    GELU,
    LLAMA3_FACTORS,
    LONG_FACTORS,
    SHORT_FACTORS,
    YARN_BETAS,
    Family,
    Sizes,
)
from distill.gguf.fields import DEFAULT_THETA, llama3_divisors, longrope_attention, yarn_attention
from distill.gguf.head import (
    BYTE,
    CONTROL,
    FILL_ROLES,
    NO_TOKEN,
    NORMAL,
    TURN_ENDS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    FileHead,
    shortest,
    stated_ends,
    token_key,
    types_and_ends,
)
from distill.vocabulary.encoding import IGNORE_MERGES, PRE_STEPS, pre_tokenizer_of
from distill.vocabulary.vocabulary import NAMED_ROLES, SPACE

# ── config.json from the metadata of a GGUF file: the inverse of fields.py ──

# model_type by llama.cpp's architecture: the first family that is written as it (mistral is written as llama).
MODEL_TYPES = {family.architecture: kind for kind, family in reversed(list(FAMILIES.items()))}
EPSILONS = {"rms_norm_eps": "attention.layer_norm_rms_epsilon", "layer_norm_eps": "attention.layer_norm_epsilon"}
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
LLAMA3_CONTEXT = 8192  # original context of every Llama 3; any other gives the same factors with other low and high


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


def sizes_of(config: Mapping[str, Any]) -> Sizes:
    """The sizes of an imported model from its config.json."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    return Sizes(
        family=FAMILIES[config["model_type"]],
        hidden=hidden,
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config["num_key_value_heads"],
        head_size=config.get("head_dim") or hidden // heads,
        mlp=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        tied=config["tie_word_embeddings"],
    )


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
    heads, hidden = head.count("attention.head_count"), head.count("embedding_length")
    size = head.count("attention.key_length", hidden // heads)
    if head.count("attention.value_length", size) != size:
        head.refuse("its keys and values differ in width, which transformers cannot hold")
    config: dict[str, Any] = {
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": head.count("feed_forward_length"),
        "num_hidden_layers": head.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": head.count("attention.head_count_kv", heads),
        "vocab_size": embedding[1],
        "max_position_embeddings": head.count("context_length"),
        family.epsilon: head.real(EPSILONS[family.epsilon]),
        "tie_word_embeddings": "output.weight" not in head.shapes,
        "use_cache": True,
    }
    activation = "hidden_activation" if family.activation == GELU else "hidden_act"
    config[activation] = family.activation
    if not family.own_head_size:
        if size * heads != hidden:
            head.refuse(f"heads of {size} do not make up a hidden size of {hidden}, as {kind} has them in transformers")
    elif family.states_head_size or size * heads != hidden:
        config["head_dim"] = size
    rope = _rope(head, family, config, size, factors)
    return config | {"rope_parameters": rope} | _by_family(head, kind, config, rope)


def _rope(
    head: FileHead, family: Family, config: Mapping[str, Any], size: int, factors: Mapping[str, Floats]
) -> dict[str, Any]:
    """The parameters of the rotary embedding."""
    theta, stated = head.real("rope.freq_base", DEFAULT_THETA), head.text(f"{head.architecture}.rope.scaling.type")
    # llama.cpp divides all frequencies by the factor, whatever the kind but `none`, and those of two kinds by tensors.
    scaled = next((key for key in ("rope.scaling.factor", "rope.scale_linear") if head.own(key) is not None), "")
    factor = head.real(scaled) if stated != "none" and scaled and head.own(scaled) else 1.0
    attention = head.real("rope.scaling.attn_factor", 1.0)
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
    original, usual = _original_context(head), 1.0
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
    rotated = head.count("rope.dimension_count", size)
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
        neutral["freq_base_swa"] = (head.real("rope.freq_base", DEFAULT_THETA),)
    start = f"{head.architecture}.rope."
    for key in (name.removeprefix(start) for name in head.values if name.startswith(start)):
        value, allowed = head.own(f"rope.{key}"), neutral.get(key, (0.0,))
        same = isinstance(value, int | float) and any(math.isclose(value, one, rel_tol=1e-6) for one in allowed)
        if allowed and not same:
            head.refuse(f"{start}{key} is {value!r:.40}, which llama.cpp does not read and transformers may", FOLDER)


def _original_context(head: FileHead) -> int | None:
    """Positions that the embedding was made for before it was scaled; None where the file does not say."""
    key = "rope.scaling.original_context_length"
    return head.count(key) if head.own(key) else None


def _llama3(head: FileHead, divisors: Floats, theta: float, size: int, original: int) -> dict[str, Any]:
    """The settings of Llama 3's rope scaling that give these divisors [D/2] of the frequencies.

    Between two wavelengths, 1 / divisor runs linearly in the frequency from 1 / factor to 1: two points give the line,
    and with it low and high for a given original context. Raises DataError for divisors of another rule.
    """
    frequencies = theta ** -(np.arange(0, size, 2, dtype=np.float64) / size)
    factor = shortest(float(divisors.max()))
    expected = divisors.astype(np.float64)
    between = (divisors > 1) & (divisors < divisors.max())
    candidates = [(1.0, 4.0)]
    if between.sum() >= 2 and len(divisors) == len(frequencies):
        share = (1 / expected[between] - 1 / factor) / (1 - 1 / factor)
        slope, start = np.polyfit(original * frequencies[between] / (2 * math.pi), share, 1)
        candidates.append((round(-start / slope, 4), round((1 - start) / slope, 4)))
    for low, high in candidates:
        if len(divisors) != len(frequencies) or not 0 < low < high or factor <= 0:
            continue
        if np.allclose(llama3_divisors(theta, size, factor, low, high, original), divisors, rtol=1e-4, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    head.refuse("its rope_freqs.weight is not of Llama 3's rule, the only one that transformers has for it")


def _by_family(head: FileHead, kind: str, config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """What one family alone has in its config.json."""
    family = FAMILIES[kind]
    values: dict[str, Any] = {name: head.real(key, family.defaults[name]) for name, key in family.scales.items()}
    if family.full_every:
        values |= _windows(head, family, config["num_hidden_layers"])
    if kind in ("llama", "seed_oss", "glm4"):
        biases = {name.split(".")[2] for name in head.shapes if name.startswith("blk.") and name.endswith(".bias")}
        return values | {
            "attention_bias": bool(biases & {"attn_q", "attn_k", "attn_v", "attn_output"}),
            "mlp_bias": bool(biases & {"ffn_gate", "ffn_up", "ffn_down"}),
        }
    if kind in ("qwen2", "qwen3"):
        return {"use_sliding_window": False, "sliding_window": None}
    if kind in ("gemma2", "gemma3_text"):
        values["query_pre_attn_scalar"] = sizes_of(config).query_scale
        if kind == "gemma2":
            values["attn_logit_softcapping"] = head.real("attn_logit_softcapping")
            values["final_logit_softcapping"] = head.real("final_logit_softcapping")
            return values
        cap = head.own("final_logit_softcapping")
        local = {"rope_type": "default", "rope_theta": head.real("rope.freq_base_swa", DEFAULT_THETA)}
        both = {"full_attention": rope, "sliding_attention": local}
        return {**values, "final_logit_softcapping": None if cap is None else shortest(cap), "rope_parameters": both}
    if kind == "phi3":
        return {
            "original_max_position_embeddings": _original_context(head) or config["max_position_embeddings"],
            "sliding_window": head.own("attention.sliding_window") or None,
        }
    if kind == "ministral3":
        beta, scale = "attention.temperature_scale", "rope.scaling.yarn_log_multiplier"
        more: dict[str, Any] = {"llama_4_scaling_beta": head.real(beta) if head.own(beta) else 0.0}
        more["original_max_position_embeddings"] = _original_context(head) or config["max_position_embeddings"]
        more |= {"mscale": 1.0, "mscale_all_dim": head.real(scale)} if head.own(scale) else {}
        return values | {"rope_parameters": {**rope, **more}}
    if kind in ("granite", "smollm3", "cohere2", "olmo2"):
        values["attention_bias"] = False
    return values | ({"no_rope_layer_interval": 4} if kind == "smollm3" else {})


def _windows(head: FileHead, family: Family, layers: int) -> dict[str, Any]:
    """The window and the kinds of layers of a family that mixes them.

    llama.cpp reads every how many layers one has no window (0: all have one), and passes over a list of layers.
    """
    if family.window_layers not in (0, layers):
        return {"sliding_window": None, "layer_types": ["full_attention"] * layers}
    key = "attention.sliding_window_pattern"
    stated, period = head.values.get(f"{head.architecture}.{key}"), family.full_every
    if stated is not None and not isinstance(stated, list):
        if not isinstance(stated, int) or isinstance(stated, bool) or stated < 0:
            head.refuse_value(key, "be a number of layers")
        period = stated
    full = [period > 0 and index % period == period - 1 for index in range(layers)]
    if isinstance(stated, list) and [not one for one in stated] != full:
        head.refuse(
            f"{key} lists another order of windows than every {period}th layer without, which llama.cpp computes"
        )
    usual = DEFAULT_WINDOW if head.architecture in ("gemma2", "exaone4") else None
    kinds = ["full_attention" if one else "sliding_attention" for one in full]
    return {"sliding_window": head.count("attention.sliding_window", usual), "layer_types": kinds}


# ── The tokenizer of a GGUF file as tokenizer.json and tokenizer_config.json: the inverse of tokenizer.py ──
# The ids are llama.cpp's for the file. Where llama.cpp treats a text otherwise than the tokenizer that the model
# was trained with (it never normalises; SentencePiece gets its space after every special token), the file cannot
# tell.

KINDS = ("gpt2", "llama")
# The model of a tokenizer.json, but for its vocabulary and merges.
BPE: dict[str, Any] = {
    "type": "BPE",
    **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")),
    **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False),
}


@dataclass(frozen=True)
class ImportedTokenizer:
    """The content of tokenizer.json and of tokenizer_config.json, and what config.json says of the vocabulary.

    `ids`: role to id. `ends`: the ids that end an answer. `templates`: chat templates by name, the main one `default`.
    `retyped`: tokens whose type llama.cpp changes by their names.
    """

    content: dict[str, Any]
    settings: dict[str, Any]
    ids: dict[str, int]
    ends: list[int]
    templates: dict[str, str]
    tokens: list[str]
    retyped: list[str]


def read_tokenizer(head: FileHead) -> ImportedTokenizer:
    """The tokenizer of a loadable file's head (see require_loadable); DataError, with the name, for a kind or a
    pre-tokenizer that is not known."""
    kind = head.text("tokenizer.ggml.model") or head.refuse("it holds no tokenizer")
    if kind not in KINDS:
        head.refuse(f"its tokenizer is of the kind {kind!r}", f"known: {', '.join(KINDS)}; give the model's folder")
    named = head.texts("tokenizer.ggml.tokens") or head.refuse("it holds no tokens")
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(named)]
    types = head.numbers("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    scores = head.numbers("tokenizer.ggml.scores") or [0.0] * len(tokens)
    real = [types[index] != UNUSED or token != f"[PAD{index}]" for index, token in enumerate(tokens)]
    if len({token for index, token in enumerate(tokens) if real[index]}) < sum(real):
        head.refuse("two of its tokens are the same text", "no tokenizer of transformers can hold such a vocabulary")
    ids = _ids(head, len(tokens))
    stated, (types, ends) = types, types_and_ends(tokens, types, ids)
    listed = [(token, index) for index, token in enumerate(tokens) if real[index]]
    added = {token: index for token, index in listed if types[index] in (CONTROL, USER_DEFINED, UNKNOWN)}
    strips = _stripping(head, added)
    parts = _byte_level(head, listed) if kind == "gpt2" else _spaced(head, listed, types, scores, ids)
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(token, index, types[index], token in strips) for token, index in added.items()],
        **parts,
        "post_processor": _text_ends(head, tokens, ids),
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": head.count("context_length"),
        **{f"{role}_token": tokens[number] for role, number in ids.items() if role in NAMED_ROLES},
    }
    retyped = [token for token, index in listed if types[index] != stated[index]]
    return ImportedTokenizer(content, settings, ids, ends, _templates(head), tokens, retyped)


def _added(token: str, index: int, kind: int, strips: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": strips, "normalized": False}
    return {"id": index, "content": token, **flags, "special": kind != USER_DEFINED}


def _ids(head: FileHead, tokens: int) -> dict[str, int]:
    """The ids that the file names, by role; eos by llama.cpp's default where it names none."""
    ids: dict[str, int] = {}
    for role in (*NAMED_ROLES, *TURN_ENDS, *FILL_ROLES):
        number = head.values.get(token_key(role), NO_TOKEN)
        if number != NO_TOKEN:
            ids[role] = number
    if "eos" not in ids:
        default = stated_ends(head).eos
        if default is None or default >= tokens:
            head.refuse("it names no token that ends a text (tokenizer.ggml.eos_token_id)")
        ids["eos"] = default
    return ids


def _stripping(head: FileHead, added: Mapping[str, int]) -> set[str]:
    """The tokens that take the spaces behind them away, in models that llama.cpp knows by their name."""
    name = (head.text("general.name") or "").lower()
    return added.keys() - {"<unk>", "<s>", "<|endoftext|>"} if "phi-3" in name or "phi3" in name else set()


def _byte_level(head: FileHead, listed: list[tuple[str, int]]) -> dict[str, Any]:
    pre = head.text("tokenizer.ggml.pre") or "default"
    if pre not in PRE_STEPS:
        head.refuse(
            f"its pre-tokenizer {pre!r} is not known here",
            f"give the model's Hugging Face folder; known: {', '.join(sorted(PRE_STEPS))}",
        )
    vocabulary = {token for token, _ in listed}
    merges = []
    for merge in head.texts("tokenizer.ggml.merges"):
        space = merge.find(" ", 1)  # a part may begin with a space
        left, right = merge[:space], merge[space + 1 :]
        if space < 0 or left + right not in vocabulary or left not in vocabulary or right not in vocabulary:
            head.refuse(f"merge {merge!r:.40} joins what are no tokens", "copy the file again")
        merges.append([left, right])
    return {
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer_of(PRE_STEPS[pre]),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {**BPE, "ignore_merges": pre in IGNORE_MERGES, "vocab": dict(listed), "merges": merges},
    }


def _spaced(
    head: FileHead, listed: list[tuple[str, int]], types: list[Any], scores: list[Any], ids: Mapping[str, int]
) -> dict[str, Any]:
    """SentencePiece BPE: llama.cpp merges the pair whose token has the highest score, tokenizers the first listed."""
    merged = {token: index for token, index in listed if types[index] not in (CONTROL, UNKNOWN, BYTE)}
    pairs = []
    for token, index in merged.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in merged and right in merged:
                pairs.append((-scores[index], index, merged[left], merged[right], left, right))
    pairs.sort(key=lambda pair: pair[:4])
    spaced = head.flag("tokenizer.ggml.add_space_prefix", True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prepend = [{"type": "Prepend", "prepend": SPACE}] if spaced else []
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if spaced else []),
    ]
    unknown = next((token for token, index in listed if types[index] == UNKNOWN or index == ids.get("unk")), None)
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            **BPE,
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": dict(listed),
            "merges": [[left, right] for *_, left, right in pairs],
        },
    }


def _text_ends(head: FileHead, tokens: list[str], ids: Mapping[str, int]) -> dict[str, Any] | None:
    """The post-processor that puts bos before a text and eos after it, where the file or llama.cpp says so."""
    stated = stated_ends(head)
    bos = ids.get("bos", stated.bos) if stated.add_bos else None
    before, after = [] if bos is None else [bos], [ids["eos"]] if stated.add_eos else []
    if not before and not after:
        return None
    first, last = (
        [{"SpecialToken": {"id": tokens[number], "type_id": 0}} for number in side] for side in (before, after)
    )
    single = [*first, {"Sequence": {"id": "A", "type_id": 0}}, *last]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            tokens[number]: {"id": tokens[number], "ids": [number], "tokens": [tokens[number]]}
            for number in (*before, *after)
        },
    }


def _templates(head: FileHead) -> dict[str, str]:
    """Chat templates by name."""
    templates = {"default": head.text("tokenizer.chat_template")}
    for name in head.texts("tokenizer.chat_templates"):
        templates[name] = head.text(f"tokenizer.chat_template.{name}")
    wrong = [name for name in templates if not name.replace("_", "").replace("-", "").isalnum()]
    if wrong:
        head.refuse(f"chat template {wrong[0]!r:.40} has a name that no file can have", "copy the file again")
    return {name: text for name, text in templates.items() if text is not None}
