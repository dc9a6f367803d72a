"""Check model folders. Each key of their JSON files is used, harmless, or refused by name.

A key of config.json is used if the configuration class of its `model_type` declares or reads it. Its value must have
the declared type, and be a value that transformers computes. A key in `HARMLESS` changes no logits, for the reason
given there. A key that is off (null, false, empty) requests nothing.

transformers reads none of the other keys for this model_type. If another of its language models computes with a key,
the key is refused, because the weights may need it. If `AS_COMPUTED` has the value of the key, the key is accepted. A
key that hides a part of the class is refused, too. All other keys are named once on stderr and not read, because no
model of transformers has them.

generation_config.json and tokenizer_config.json hold settings of requests, and of classes that tokenizer.json replaces.
Keys that transformers does not know are named on stderr. Values of another type are refused.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin

from distill.errors import DataError
from distill.files import has_form, kind_of
from distill.progress import warn_once

HINT = "correct config.json, or copy the folder again"
PROVENANCE = "says where the model comes from"
OF_TRAINING = "is read in training alone"
OF_REQUESTS = "is of requests, not of the model"
OF_OTHER_HEADS = "is of heads that no language model has"
OF_PROGRAMS = "is of programs, not of the model"
HARMLESS = {
    **dict.fromkeys(
        (
            *("_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "architectures", "model_type"),
            *("auto_map", "author", "license", "language", "tags", "base_model", "model_name", "is_llama_config"),
            *("unsloth_version", "unsloth_fixed", "finetuning_task", "custom_pipelines", "seed", "mlx_version"),
            *("torch_dtype", "dtype", "pretraining_tp", "tokenizer_class", "model_max_length", "library_name"),
        ),
        PROVENANCE,
    ),
    **dict.fromkeys(
        (
            *("initializer_range", "initializer_factor", "init_std", "initializer_cutoff_factor", "use_reentrant"),
            *("gradient_checkpointing", "router_aux_loss_coef", "output_router_logits", "z_loss_coefficient"),
            *("router_z_loss_coef", "router_jitter_noise", "layerdrop", "rescale_prenorm_residual", "mup_base"),
        ),
        OF_TRAINING,
    ),
    **dict.fromkeys(
        (
            *("use_cache", "cache_implementation", "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id"),
            *("bos_token", "eos_token", "pad_token", "unk_token", "unk_token_id", "decoder_start_token_id"),
            *("image_token_id", "image_token_index", "video_token_id", "audio_token_id", "vision_start_token_id"),
            *("vision_end_token_id", "boi_token_index", "eoi_token_index", "prefix", "chat_template"),
        ),
        OF_REQUESTS,
    ),
    **dict.fromkeys(
        (
            *("id2label", "label2id", "num_labels", "problem_type", "task_specific_params", "classifier_dropout"),
            *("summary_type", "summary_use_proj", "summary_activation", "summary_first_dropout"),
            *("summary_proj_to_labels", "num_nextn_predict_layers", "mtp_num_hidden_layers", "vision_config"),
            *("audio_config", "mm_tokens_per_image"),
        ),
        OF_OTHER_HEADS,
    ),
    **dict.fromkeys(
        (
            *("_attn_implementation_autoset", "_flash_attn_2_enabled", "use_flash_attn", "flash_attn", "onnx"),
            *("transformers.js_config", "torchscript", "return_dict", "output_attentions", "output_hidden_states"),
            *("chunk_size_feed_forward", "is_encoder_decoder", "is_decoder", "add_cross_attention"),
            *("tie_encoder_decoder", "cross_attention_hidden_size", "use_bfloat16", "pruned_heads", "text_config"),
            *("attn_implementation", "experts_implementation"),
            *("reorder_and_upcast_attn", "scale_attn_by_inverse_layer_idx", "attention_softmax_in_fp32"),
            *("scale_attention_softmax_in_fp32", "transformers_weights"),
        ),
        OF_PROGRAMS,
    ),
}
DROPOUT = re.compile(r"dropout|drop_rate|_pdrop$|droprate")  # Only training reads these, under any name.
# For each model_type ("" for all): keys that its class does not read, with the values that the class computes anyway.
AS_COMPUTED: dict[str, dict[str, tuple[Any, ...]]] = {
    "": {
        **dict.fromkeys(("rotary_pct", "partial_rotary_factor", "rope_percent", "interpolate_factor"), (1, 1.0)),
        **dict.fromkeys(("full_attn_mod", "norm_eps_factor", "n_shared_head"), (1,)),
        "scale_attn_weights": (True,),
        "position_embedding_type": ("rope", "rotary"),
        "tie_word_embeddings": (False,),
    },
    "gemma": {"hidden_activation": ("gelu_pytorch_tanh",)},
    "gemma2": {"hidden_act": ("gelu_pytorch_tanh",)},
    "gemma3_text": {"hidden_act": ("gelu_pytorch_tanh",)},
    "cohere2": {
        **dict.fromkeys(("use_embedding_sharing", "use_gated_activation", "use_parallel_block"), (True,)),
        **dict.fromkeys(("use_parallel_embedding", "use_parallel_attention"), (True, False)),
        "order_of_interleaved_layers": ("local_attn_first",),
        "position_embedding_type": ("rope_gptj",),
        "layer_switch": (4,),
    },
    "starcoder2": {
        "activation_function": ("gelu", "gelu_pytorch_tanh"),  # The class reads hidden_act instead.
        "norm_type": ("layer_norm",),
        "mlp_type": ("default",),
        "layer_norm_epsilon": (1e-5,),
    },
    "phi3": {"tie_word_embeddings": (True, False)},
}
REFUSED = {
    "quantization": "MLX stores quantised weights with this key, and transformers does not read them",
    "per_layer_config": "layers that differ from each other are not decoded here",
    "compression_config": "older compressed-tensors store weights with this key, and they are not read",
}
# transformers reads these keys of a rotary embedding for all kinds (ROTARY_KEYS), and for each kind (BY_KIND).
ORIGINAL = "original_max_position_embeddings"
ROTARY_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
YARN = {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"}
BY_KIND = {
    "default": {"mrope_section", "mrope_interleaved"},
    "linear": {"factor"},
    "dynamic": {"factor"},
    "yarn": {*YARN, "mscale", "mscale_all_dim", "truncate", "llama_4_scaling_beta"},
    "longrope": {"factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"},
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "proportional": {"factor"},
}
OLD_KINDS = {"su": "longrope", "mrope": "default"}
ROTARY_LISTS = ("short_factor", "long_factor", "mrope_section")
ROTARY_FLAGS = ("mrope_interleaved", "truncate")
ROTARY_TEXTS = ("rope_type", "type")
ROTARY_MAY_BE_ZERO = ("llama_4_scaling_beta", "mscale", "mscale_all_dim")
UNSCALED = {"factor": 1, "attention_factor": 1, "mscale": 1}  # These values change nothing, as int or float.
POSITIVE = (  # Each of these sizes is at least 1.
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "max_position_embeddings", "sliding_window", "attention_chunk_size"),
    *("original_max_position_embeddings",),
)
_READ = re.compile(r"""(?:kwargs\.(?:get|pop)\(|(?:get|has)attr\(\s*(?:self\.)?config, )\s*["'](\w+)["']""")
_COMPUTED_WITH = re.compile(r"\bconfig\.(\w+)|attr\(\s*(?:self\.)?config, [\"'](\w+)")


def is_off(value: Any) -> bool:
    """Whether a value requests nothing: null, false, or empty."""
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)


@functools.cache
def declared(model_type: str) -> Mapping[str, Any]:
    """Return the keys that the configuration class of a model_type declares or reads, with their types.

    The type of an undeclared key is Any.
    """
    import torch
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    if model_type not in CONFIG_MAPPING:
        return {}
    kind = CONFIG_MAPPING[model_type]
    # The types of the common fields are texts, and their module imports torch only for type checkers.
    common = inspect.get_annotations(PreTrainedConfig, locals={"torch": torch}, eval_str=True)
    types = {
        field.name: common.get(field.name, Any) if isinstance(field.type, str) else field.type for field in fields(kind)
    }
    bases = [base for base in kind.__mro__ if base.__module__.startswith("transformers.models.")]
    modules = {inspect.getmodule(base) for base in bases}
    read = {name for module in modules if module for name in _READ.findall(inspect.getsource(module))}
    with contextlib.suppress(Exception):  # Some classes have no defaults. The others show the keys that they save.
        read |= kind().to_dict().keys()
    older = ("rope_scaling", "rope_theta", "partial_rotary_factor") if "rope_parameters" in types else ()
    return dict.fromkeys((*read, *kind.attribute_map, *kind.attribute_map.values(), *older), Any) | types


@functools.cache
def computed_with(model_type: str) -> frozenset[str]:
    """Return the keys that the source code of a model_type's layers reads. Empty if the source is not available."""
    from transformers import CONFIG_MAPPING

    place = CONFIG_MAPPING[model_type].__module__.replace(".configuration_", ".modeling_")
    try:
        text = inspect.getsource(importlib.import_module(place))
    except (ImportError, OSError, TypeError):
        return frozenset()
    return frozenset(name for pair in _COMPUTED_WITH.findall(text) for name in pair if name)


@functools.cache
def _owners(key: str) -> list[str]:
    """Return language models of transformers that declare a key and whose code computes with it.

    Only the first four models that declare the key are looked at.
    """
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    declaring = [kind for kind in NAMES if any(field.name == key for field in fields(CONFIG_MAPPING[kind]))]
    return [kind for kind in declaring[:4] if key in computed_with(kind)]


def kind_of_key(model_type: str, key: str) -> str:
    """Return what the tables say of a key of config.json: `used`, `harmless: WHY`, `refused: WHY` or `unknown`."""
    if key in REFUSED and key not in declared(model_type):
        return f"refused: {REFUSED[key]}"
    if key in HARMLESS or DROPOUT.search(key) or key.startswith("_"):
        return f"harmless: {HARMLESS.get(key, OF_TRAINING if DROPOUT.search(key) else OF_PROGRAMS)}"
    if key in declared(model_type) or key == "quantization_config":
        return "used"
    if key in _generation_keys():
        return f"harmless: {OF_REQUESTS}"
    return "used" if key in computed_with(model_type) else "unknown"


@functools.cache
def _generation_keys() -> frozenset[str]:
    from transformers import GenerationConfig

    return frozenset(vars(GenerationConfig()))


def check_types(path: Path, config: Mapping[str, Any], prefix: str = "") -> None:
    """Raise DataError for a value of config.json that has a wrong type, or that transformers does not compute.

    A model_type that transformers does not have is left to transformers.
    """
    from huggingface_hub.dataclasses import type_validator

    for key, kind in _known(config).items():
        value = config.get(key)
        if (
            value is None
            or kind is Any
            or (isinstance(value, int) and not isinstance(value, bool) and float in _parts(kind))
        ):
            continue
        try:
            type_validator(key, value, kind)
        except (TypeError, ValueError):
            # JSON writes a tuple as a list.
            if not (isinstance(value, list) and any(get_origin(part) is tuple for part in _parts(kind))):
                _wrong(path, prefix + key, f"be {_words(kind)}", value)
    for key in POSITIVE:
        if isinstance(value := config.get(key), int) and value < 1 and not (key == "sliding_window" and value == 0):
            _wrong(path, prefix + key, "be at least 1", value)
    if config.get("return_dict") is False:
        _wrong(path, f"{prefix}return_dict", "be true", False)
    _check_values(path, config, prefix)
    for key in ("rope_parameters", "rope_scaling"):
        for name, settings in _rotary(config.get(key)):
            _check_rotary(path, f"{prefix}{key}{name}", settings, config)
    if isinstance(config.get("text_config"), dict):
        check_types(path, config["text_config"], f"{prefix}text_config.")


def _known(config: Mapping[str, Any]) -> Mapping[str, Any]:
    kind = config.get("model_type")
    return declared(kind) if isinstance(kind, str) else {}


def _parts(kind: Any) -> tuple[Any, ...]:
    return (kind, *get_args(kind))


def _words(kind: Any) -> str:
    names = {
        int: "an integer",
        float: "a number",
        bool: "true or false",
        str: "text",
        dict: "an object",
        list: "a list",
    }
    parts = [part for part in get_args(kind) or (kind,) if part is not type(None)]
    return " or ".join(dict.fromkeys(names.get(getattr(part, "__origin__", part), str(part)) for part in parts))


def _wrong(path: Path, key: str, rule: str, value: Any) -> NoReturn:
    shown = kind_of(value) if isinstance(value, list | dict) else f"{value!r:.60}"
    raise DataError(f"{path}: {key} must {rule}, got {shown}", HINT)


def _check_values(path: Path, config: Mapping[str, Any], prefix: str) -> None:
    from transformers.activations import ACT2FN
    from transformers.configuration_utils import ALLOWED_LAYER_TYPES

    for key in ("hidden_act", "hidden_activation", "activation_function"):
        if isinstance(value := config.get(key), str) and value not in ACT2FN:
            _wrong(path, prefix + key, "name an activation of transformers", value)
    known = {*ALLOWED_LAYER_TYPES, "attention", "mamba", "recurrent", "mlp", "hybrid"}
    if unknown := [layer for layer in config.get("layer_types") or () if layer not in known]:
        _wrong(path, f"{prefix}layer_types", "name kinds of layers of transformers", unknown[0])
    if isinstance(value := config.get("dtype", config.get("torch_dtype")), str):
        import torch

        if not isinstance(getattr(torch, value.removeprefix("torch."), None), torch.dtype):
            _wrong(path, f"{prefix}dtype", "name a type of torch", value)


def _rotary(parameters: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the settings of the rotary embedding with their names. Each nested group belongs to a kind of layers."""
    if isinstance(parameters, dict):
        nested = {key: value for key, value in parameters.items() if isinstance(value, dict)}
        yield from ((f".{key}", settings) for key, settings in nested.items())
        if len(nested) < len(parameters):
            yield "", {key: value for key, value in parameters.items() if key not in nested}


def _check_rotary(path: Path, place: str, settings: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = settings.get("rope_type", settings.get("type", "default"))
    if not isinstance(kind, str) or OLD_KINDS.get(kind, kind) not in {*ROPE_INIT_FUNCTIONS, *BY_KIND}:
        _wrong(path, f"{place}.rope_type", "name a rotary embedding of transformers", kind)
    read = ROTARY_KEYS | BY_KIND.get(OLD_KINDS.get(kind, kind), set())
    family = _class_of(config)
    stated = settings.get(ORIGINAL)
    used = config.get(ORIGINAL, getattr(family, ORIGINAL, None))  # Phi-3's key or default replaces a nested key.
    if None not in (stated, used) and stated != used:
        _wrong(path, f"{place}.{ORIGINAL}", f"be {used}, with which transformers computes", stated)
    of_class = getattr(family, "ignore_keys_at_rope_validation", None) or ()
    for key, value in settings.items():
        if key not in {*read, *of_class, "finetuned"}:
            same = key in UNSCALED and value == UNSCALED[key] and not isinstance(value, bool)
            same |= key == "original_max_position_embeddings" and value == config.get("max_position_embeddings")
            if not is_off(value) and not same:
                unread = f"{path}: {place}.{key} is {value!r:.60}, which transformers does not read"
                raise DataError(
                    f"{unread} in a rotary embedding of the kind {kind}",
                    "name the kind that the model was made with, or delete it",
                )
        elif value is not None and key not in (*ROTARY_TEXTS, "finetuned"):
            _check_number(path, f"{place}.{key}", key, value)


def _check_number(path: Path, place: str, key: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if key in ROTARY_FLAGS:
        if not isinstance(value, bool):
            _wrong(path, place, "be true or false", value)
    elif key in ROTARY_LISTS:
        if not isinstance(value, list) or not all(isinstance(number, int | float) for number in value):
            _wrong(path, place, "be a list of numbers", value)
    elif not is_number or not 0 <= value < 2**40 or (value == 0 and key not in ROTARY_MAY_BE_ZERO):
        _wrong(path, place, "be a positive number", value)


def _class_of(config: Mapping[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type")
    return CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else None  # noqa: SIM401 - `get` finds only loaded classes


def check_keys(path: Path, config: Mapping[str, Any], prefix: str = "") -> None:
    """Raise DataError for a key of config.json that this module refuses. Name unknown keys on stderr."""
    kind, unread = str(config.get("model_type")), []
    if _class_of(config) is None:
        return
    for key, value in config.items():
        place = kind_of_key(kind, key)
        if place.startswith("refused") and not is_off(value):
            raise DataError(
                f"{path}: {prefix}{key}: {place.removeprefix('refused: ')}", "give the model as it was made"
            )
        if place != "unknown" or is_off(value) or _as_computed(kind, key, value):
            continue
        shown = f"{path}: {prefix}{key} is {kind_of(value) if isinstance(value, list | dict) else repr(value)[:60]}"
        if hasattr(_class_of(config), key):
            raise DataError(f"{shown}, and hides a part of transformers' own configuration", f"delete {key}")
        if owners := _owners(key):
            why = f"which a {kind} of transformers does not read, and a {owners[0]} computes with"
            hint = f"name the model_type that the weights were made for; if they need no {key}, delete it"
            raise DataError(f"{shown}, {why}", hint)
        unread.append(prefix + key)
    if unread:
        more = f" and {len(unread) - 6} more" if len(unread) > 6 else ""
        warn_once(
            f"warning: {path}: not read, because no model of transformers has them: {', '.join(unread[:6])}{more}"
        )
    if isinstance(config.get("text_config"), dict):
        check_keys(path, config["text_config"], f"{prefix}text_config.")


def _as_computed(kind: str, key: str, value: Any) -> bool:
    if key == "layer_types":
        return isinstance(value, list) and set(map(str, value)) == {"full_attention"}
    return any(value in table.get(key, ()) for table in (AS_COMPUTED[""], AS_COMPUTED.get(kind, {})))


# ── quantization_config: applied by transformers, or refused by name ──

# These keys of a method's configuration are no arguments of its class, and change nothing.
QUANTISED_WITH = {
    *(
        "quant_method",
        "version",
        "meta",
        "quantization_status",
        "global_compression_ratio",
        "producer",
        "fmt",
        "format",
    ),
    *("model_name_or_path", "model_file_base_name", "is_marlin_format", "pack_dtype", "damp_percent", "static_groups"),
    *("true_sequential", "checkpoint_format", "autoround_version", "low_gpu_mem_usage", "nsamples", "iters", "seqlen"),
}


def quantisation_refusal(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return why the quantised weights of a config.json are not read here, and a remedy. None if they are read."""
    settings = config.get("quantization_config")
    if settings is None:
        return None
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as METHODS
    from transformers.quantizers.auto import AutoHfQuantizer

    remedy = "give the model as it was before, or a GGUF file of it"
    if not isinstance(settings, Mapping):
        return f"quantization_config must be an object, got {kind_of(settings)}", HINT
    method = settings.get("quant_method")
    if method is None and (settings.get("load_in_8bit") or settings.get("load_in_4bit")):
        method = "bitsandbytes"
    if method is None:
        writer = "MLX, " if {"bits", "group_size"} <= settings.keys() else ""
        return f"quantization_config names no quant_method ({writer}not a method of transformers)", remedy
    known = method if method in METHODS else f"{method}_{8 if settings.get('load_in_8bit') else 4}bit"
    if known not in METHODS:
        return (
            f"quant_method is {method!r:.40}, which transformers does not apply (it applies {_listed(METHODS)})",
            remedy,
        )
    taken = {*inspect.signature(METHODS[known].__init__).parameters, *QUANTISED_WITH}
    if unread := [key for key, value in settings.items() if not (key in taken or key[:1] == "_" or is_off(value))]:
        return f"quantization_config.{unread[0]} is not read by {method} of transformers", remedy
    try:
        AutoHfQuantizer.from_config(dict(settings), pre_quantized=True).validate_environment(device_map=None)
    except Exception as error:  # Each library raises other kinds for missing packages and wrong values.
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"its weights are quantised by {method}, which cannot be read on this machine: {lines[0][:300]}", remedy
    return None


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(sorted(names)[:40])


# ── generation_config.json and tokenizer_config.json ──

NUMBERS = (
    *("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "length_penalty", "top_h"),
    *("presence_penalty", "frequency_penalty", "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size", "num_beams"),
    *("encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "diversity_penalty", "num_beam_groups"),
    *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "num_return_sequences", "guidance_scale"),
    *("penalty_alpha", "max_time", "bos_token_id", "decoder_start_token_id", "num_assistant_tokens"),
)
SWITCHES = ("do_sample", "use_cache", "renormalize_logits", "remove_invalid_values", "token_healing", "output_scores")
TOKENIZER_FORMS: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("bos", "eos", "unk", "pad", "sep", "cls", "mask"), ((str, dict), "a token")),
    **dict.fromkeys(("add_bos_token", "add_eos_token", "add_prefix_space", "legacy"), (bool, "true or false")),
    **dict.fromkeys(("clean_up_tokenization_spaces", "split_special_tokens"), (bool, "true or false")),
    **dict.fromkeys(("padding_side", "truncation_side", "tokenizer_class"), (str, "text")),
    "model_max_length": ((int, float), "a number"),
}
# These keys of tokenizer_config.json are read, or tokenizer.json replaces them, or only other programs read them.
TOKENIZER_KEYS = {
    *("added_tokens_decoder", "additional_special_tokens", "extra_special_tokens", "chat_template", "auto_map"),
    *("model_input_names", "tokenizer_file", "name_or_path", "special_tokens_map_file", "vocab_file", "merges_file"),
    *("errors", "sp_model_kwargs", "use_default_system_prompt", "spaces_between_special_tokens", "add_dummy_prefix"),
    *("processor_class", "backend", "is_local", "local_files_only", "max_length", "stride", "pad_to_multiple_of"),
    *(
        "truncation",
        "padding",
        "max_seq_length",
        "unk_id",
        "do_lower_case",
        "image_token",
        "video_token",
        "audio_token",
    ),
    *("response_schema", "response_template", "tool_parser_type", "mode", "from_slow", "trim_offsets", "init_inputs"),
    *("boi_token", "eoi_token", "model_specific_special_tokens", "fix_mistral_regex", "force_bos_token_to_empty"),
}


def check_generation(path: Path, content: Mapping[str, Any]) -> None:
    """Raise DataError for a value of a wrong type in generation_config.json. Name unknown keys on stderr."""
    for key, value in content.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and (
            (key in NUMBERS and not is_number) or (key in SWITCHES and not isinstance(value, bool))
        ):
            rule = "be a number" if key in NUMBERS else "be true or false"
            shown = kind_of(value) if isinstance(value, list | dict) else f"{value!r:.60}"
            raise DataError(f"{path}: {key} must {rule}, got {shown}", "correct it, or copy the file again")
        if key in ("eos_token_id", "pad_token_id") and not (
            value is None or has_form(value, int) or has_form(value, [int])
        ):
            raise DataError(
                f"{path}: {key} is {value!r:.60}", "an id, or a list of ids, is needed; copy the file again"
            )
    known = {*_generation_keys(), *NUMBERS, *SWITCHES, *HARMLESS}
    _name_unread(path, [key for key, value in content.items() if not (key in known or key[:1] == "_" or is_off(value))])


def check_tokenizer(path: Path, settings: Mapping[str, Any]) -> None:
    """Raise DataError for a value of a wrong type in tokenizer_config.json. Name unknown keys on stderr."""
    for key, (form, words) in TOKENIZER_FORMS.items():
        key = f"{key}_token" if key in ("bos", "eos", "unk", "pad", "sep", "cls", "mask") else key
        value = settings.get(key)
        if value is not None and (not isinstance(value, form) or (isinstance(value, bool) and form is not bool)):
            raise DataError(
                f"{path} is damaged: {key} must be {words}, got {kind_of(value)}", "copy the tokenizer again"
            )
    known = {*TOKENIZER_KEYS, *TOKENIZER_FORMS, *HARMLESS}
    unread = [key for key, value in settings.items() if not (key in known or key.endswith("_token") or is_off(value))]
    _name_unread(path, [key for key in unread if key[:1] != "_"])


def _name_unread(path: Path, keys: list[str]) -> None:
    if keys:
        more = f" and {len(keys) - 6} more" if len(keys) > 6 else ""
        warn_once(f"warning: {path}: not read, because nothing here knows them: {', '.join(keys[:6])}{more}")
