"""The door for model folders: a key that nobody knows, a value that nobody computes, and a value of another kind, for
every key of the three files, are refused or named, and real families' files pass."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from tiny import Capture, edit
from transformers import CONFIG_MAPPING

from distill.checkpoints import (
    BY_KIND,
    HARMLESS,
    NUMBERS,
    POSITIVE,
    REFUSED,
    SWITCHES,
    TOKENIZER_FORMS,
    check_generation,
    check_keys,
    check_tokenizer,
    check_types,
    declared,
    kind_of_key,
    quantisation_refusal,
)
from distill.engines.torch.hugging_face import check_weights, load_config
from distill.errors import DataError
from distill.gguf.families import FAMILIES

CONFIG = Path("config.json")
ENDS = {"eos_token_id": 2, "architectures": None, "torch_dtype": "bfloat16", "transformers_version": "4.45.0"}
# What the files of real models say beside the keys that every class has.
REAL: dict[str, dict[str, Any]] = {
    "llama": {  # SmolLM2, Llama 3.2, and one that was saved by a trainer
        "is_llama_config": True,
        "rope_interleaved": False,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        "rope_scaling": {
            **{"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"},
            "original_max_position_embeddings": 8192,
        },
        "unsloth_fixed": True,
        "_attn_implementation_autoset": True,
    },
    "qwen2": {
        "use_mrope": False,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
    },
    "phi3": {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "auto_map": {"AutoConfig": "x.Y"}},
    "gemma2": {"hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid"},
    "gemma3_text": {"sliding_window_pattern": 6, "rope_local_base_freq": 10000, "attn_logit_softcapping": None},
    "cohere2": {
        **{
            "layer_switch": 4,
            "order_of_interleaved_layers": "local_attn_first",
            "rotary_pct": 1.0,
            "use_qk_norm": False,
        },
        **{"position_embedding_type": "rope_gptj", "use_parallel_block": True, "use_gated_activation": True},
        "sliding_window_pattern": 4,
    },
    "starcoder2": {"activation_function": "gelu", "norm_type": "layer_norm", "mlp_type": "default", "resid_pdrop": 0.1},
}


LONGROPE = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0], "original_max_position_embeddings": 64}


def named(values: Mapping[str, Any]) -> str:
    """The message of the door for these values of a Llama's config.json; empty where they pass."""
    config = {"model_type": "llama", **values}
    try:
        check_types(CONFIG, config)
        check_keys(CONFIG, config)
    except DataError as error:
        return error.what
    return ""


@pytest.mark.parametrize("kind", sorted({*FAMILIES, *REAL}))
def test_real_families_pass(kind: str, capsys: Capture) -> None:
    """As transformers saves them, and with the keys that real files have."""
    saved = json.loads(CONFIG_MAPPING[kind]().to_json_string(use_diff=False))
    for config in (saved, {**saved, **ENDS, **REAL.get(kind, {})}):
        if "rope_scaling" in config:
            del config["rope_parameters"]
        check_types(CONFIG, config)
        check_keys(CONFIG, config)
    assert capsys.readouterr().err == ""


def test_every_declared_key_of_another_type() -> None:
    typed = {one.name: one.type for one in fields(CONFIG_MAPPING["llama"])}
    assert len(typed) > 25 and typed.keys() <= declared("llama").keys()
    for key in typed.keys() - {"transformers_version"}:
        wrong = 3 if key == "dtype" else {"a": {"b": [1]}} if "dict" not in str(typed[key]) else "text"
        if key in ("id2label", "label2id"):
            wrong = "text"
        assert key in named({key: wrong}), key
    for key in POSITIVE:
        if key in typed:
            assert all(key in named({key: wrong}) for wrong in (0, -1)), key


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_act": "swiglu9"}, "hidden_act must name an activation"),
        ({"layer_types": ["full_attention", "square_attention"]}, "layer_types must name kinds of layers"),
        ({"dtype": "float99"}, "dtype must name a type of torch"),
        ({"return_dict": False}, "return_dict must be true"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "rope_scaling.rope_type must name a rotary"),
        (
            {"attn_logit_softcapping": 50.0},
            "attn_logit_softcapping is 50.0, which a llama of transformers does not read",
        ),
        ({"residual_multiplier": 0.22}, "residual_multiplier is 0.22"),
        (
            {"model_type": "phi3", "rope_scaling": LONGROPE},
            "rope_scaling.original_max_position_embeddings must be 4096",
        ),
        ({"layer_types": ["sliding_attention"]}, "layer_types is list"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ({"to_dict": "x"}, "hides a part of transformers"),
        *(({key: {"bits": 4}}, key) for key in REFUSED),
    ],
)
def test_values_and_keys_that_are_not_computed(values: dict[str, Any], message: str) -> None:
    assert message in named(values)


def test_a_key_that_no_model_has_is_named_once(capsys: Capture) -> None:
    assert named({"house_style": "plain", "favourite": [], "nothing": None, "off": False}) == ""
    said = capsys.readouterr().err
    assert "no model of transformers has them: house_style" in said and "favourite" not in said
    assert kind_of_key("llama", "house_style") == "unknown" and kind_of_key("llama", "rms_norm_eps") == "used"
    assert kind_of_key("qwen2", "head_dim") == "used"  # which the code of its layers asks for
    assert all(kind_of_key("llama", key).startswith("harmless: ") for key in HARMLESS if key not in REFUSED)


@pytest.mark.parametrize("kind", sorted(BY_KIND))
def test_every_key_of_a_rotary_embedding(kind: str) -> None:
    def message(**values: Any) -> str:
        return named({"rope_scaling": {"rope_type": kind, **values}, "max_position_embeddings": 64})

    assert "rope_scaling.twist is 2, which transformers does not read" in message(twist=2)
    assert message(finetuned=True) == message(twist=None) == ""
    for key in sorted({key for keys in BY_KIND.values() for key in keys} | {"rope_theta", "partial_rotary_factor"}):
        assert f"rope_scaling.{key}" in message(**{key: {"text": 1}}), key
        if key not in BY_KIND[kind] and key not in ("rope_theta", "partial_rotary_factor"):
            assert f"rope_scaling.{key}" in message(**{key: [0.5]}), key
    assert "rope_type" in named({"rope_scaling": {"rope_type": 3}})


def test_the_length_of_the_stretch_may_be_said_again() -> None:
    stretched = {"rope_type": "linear", "factor": 2.0, "original_max_position_embeddings": 64}
    assert named({"rope_scaling": stretched, "max_position_embeddings": 64}) == ""
    assert "original_max_position_embeddings is 64" in named(
        {"rope_scaling": stretched, "max_position_embeddings": 128}
    )


def test_generation_and_tokenizer(capsys: Capture) -> None:
    path = Path("generation_config.json")
    for key in (*NUMBERS, *SWITCHES, "eos_token_id", "pad_token_id"):
        with pytest.raises(DataError, match=key):
            check_generation(path, {key: {"a": 1}})
        with pytest.raises(DataError, match=key):
            check_generation(path, {key: "text"})
    check_generation(path, dict.fromkeys(NUMBERS, 1) | dict.fromkeys(SWITCHES, True) | {"eos_token_id": [1, 2]})
    assert capsys.readouterr().err == ""
    check_generation(path, {"tempreature": 0.5, "nothing": None})
    assert "nothing here knows them: tempreature" in capsys.readouterr().err
    path = Path("tokenizer_config.json")
    for key in TOKENIZER_FORMS:
        key = f"{key}_token" if len(key) <= 4 else key
        with pytest.raises(DataError, match=key):
            check_tokenizer(path, {key: [1]})
    check_tokenizer(path, {"lowercase_all": True, "eos_token": "</s>", "model_max_length": 10**30})
    assert "nothing here knows them: lowercase_all" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"quant_method": "modelopt", "quant_algo": "FP8"},
            "quant_method is 'modelopt', which transformers does not apply",
        ),
        ({"group_size": 64, "bits": 4}, "names no quant_method (MLX"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128},
            "quantised by gptq, which cannot be read on this machine",
        ),
        ({"quant_method": "awq", "bits": 4, "zero_point": True}, "quantised by awq, which cannot be read"),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128], "swap_halves": True},
            "swap_halves is not read by fp8",
        ),
        ({"quant_method": 8}, "quant_method is 8"),
        ("fp8", "must be an object"),
    ],
)
def test_quantised_weights_are_applied_or_refused_by_name(settings: Any, message: str) -> None:
    refusal = quantisation_refusal({"quantization_config": settings})
    assert refusal is not None and message in refusal[0]
    assert quantisation_refusal({}) is None
    assert quantisation_refusal({"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}) is None


def test_commands_come_through_the_door(world: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(world / "target", tmp_path / "model"))
    edit(folder / "config.json", attn_logit_softcapping=30.0)
    load_config(str(folder))  # a target that is never loaded computes nothing
    with pytest.raises(DataError, match=r"attn_logit_softcapping is 30\.0"):
        check_weights(str(folder))
    edit(folder / "config.json", attn_logit_softcapping=None, num_hidden_layers="3")
    with pytest.raises(DataError, match="num_hidden_layers must be an integer, got '3'"):
        load_config(str(folder))
