"""Every field of a request for a completion: OpenAI's form (chat and text), vLLM's, SGLang's and llama-server's.

`distill serve`, `distill record` and the reader of served logs read requests by this one table. A field is honoured by
`serve`, or harmless at named values or at each value of its kind. `serve` refuses every other value and every other
field by name. A recorded answer is left out if a field steers it, because the target alone would write another answer.

Sources: openai-python's types of parameters, vLLM's and SGLang's protocol.py and llama-server's server-schema.cpp, of
November 2026, with fields of earlier versions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from distill.data.records import EFFORTS, efforts, unread_fields
from distill.files import has_form, kind_of

CHAT, TEXT = "chat", "text"  # messages, as of /v1/chat/completions; a prompt, as of /v1/completions and /completion

# Kinds of values.
Kinds = tuple[Any, ...]
SWITCH, WHOLE, NUMBER, WORDS, LIST = (bool,), (int,), (int, float), (str,), (list,)
OBJECT: Kinds = ({},)
WORDS_OR_LIST, WORDS_OR_OBJECT = (*WORDS, [str]), (*WORDS, *OBJECT)
PROMPT = (str, [int], [str], [[int]])


@dataclass(frozen=True)
class Field:
    """A field of a request. Null is no value.

    `kinds` are the forms of its value (`files.has_form`). At `neutral` values it asks for nothing (None: at every value
    of its kind). `serve` fulfils an `honoured` field. Other values of a field that `steers` change the answer.
    """

    kinds: Kinds
    neutral: tuple[Any, ...] | None = ()
    honoured: bool = False
    steers: bool = False

    def fits(self, value: Any) -> bool:
        """Whether a value is of the field's kind. True and False are no numbers."""
        finite = not isinstance(value, float) or math.isfinite(value)
        return finite and any(has_form(value, kind) for kind in self.kinds)

    def asks(self, value: Any) -> bool:
        """Whether a value asks for something. 1 and 1.0 are equal, and True differs from both."""
        if value is None or (self.neutral is None and self.fits(value)):
            return False
        same_type = (one for one in self.neutral or () if isinstance(value, bool) == isinstance(one, bool))
        return value not in same_type


def _fields(names: str, kinds: Kinds, *neutral: Any, **more: Any) -> dict[str, Field]:
    return {name: Field(kinds, neutral, **more) for name in names.split()}


def _free(names: str, kinds: Kinds) -> dict[str, Field]:
    return {name: Field(kinds, None) for name in names.split()}


# The least and the largest value of numbers that `serve` honours.
LIMITS: dict[str, tuple[float, float]] = {
    **{"max_tokens": (1, 2**31), "max_completion_tokens": (1, 2**31), "n_predict": (-1, 2**31)},
    **{"temperature": (0, 100), "top_k": (-1, 2**31), "top_p": (1e-9, 1), "min_p": (0, 1)},
    **{"repetition_penalty": (0.01, 100), "seed": (-1, 2**64)},
}
_HONOURED = {
    **_fields("model", WORDS, honoured=True),
    **_fields("stream", SWITCH, honoured=True),
    **_fields("stream_options", OBJECT, honoured=True),
    **_fields("max_tokens max_completion_tokens n_predict top_k seed", WHOLE, honoured=True),
    **_fields("temperature top_p min_p repetition_penalty", NUMBER, honoured=True),
    **_fields("stop", WORDS_OR_LIST, honoured=True),
}
GRAMMARS = {
    **_fields("response_format", OBJECT, {"type": "text"}, honoured=True, steers=True),
    **_fields("structured_outputs", OBJECT, {}, honoured=True, steers=True),
    **_fields("guided_json json_schema", WORDS_OR_OBJECT, honoured=True, steers=True),
    **_fields("guided_json_object", SWITCH, False, honoured=True, steers=True),
    **_fields("guided_choice", ([str],), honoured=True, steers=True),
    **_fields("guided_regex regex guided_grammar ebnf", WORDS, honoured=True, steers=True),
    **_fields("grammar", WORDS, "", honoured=True, steers=True),
}
_TEMPLATE = {
    **_fields("chat_template_kwargs", OBJECT, honoured=True),
    **_fields("documents", ([{}],), [], honoured=True, steers=True),
    **_fields("reasoning_effort", (*WORDS, *NUMBER), honoured=True),
    **_fields("reasoning", OBJECT, honoured=True),
    **_fields("enable_thinking", SWITCH, honoured=True),
    **_fields("thinking", (*SWITCH, *OBJECT), honoured=True),
}

# Harmless at every value: names, settings of methods that are off, and settings of a server's caches.
_FREE = {
    **_free("user safety_identifier prompt_cache_key prompt_cache_retention session_id", WORDS),
    **_free("metadata custom_labels", OBJECT),
    **_free("cache_prompt backend_sampling penalize_nl spaces_between_special_tokens", SWITCH),
    **_free("parallel_tool_calls parse_tool_calls stream_reasoning return_mm_kwargs", SWITCH),
    **_free("id_slot slot_id n_keep n_discard n_cache_reuse repeat_last_n", WHOLE),
    **_free("dry_allowed_length dry_penalty_last_n", WHOLE),
    **_free("dry_base mirostat_tau mirostat_eta dynatemp_exponent xtc_threshold adaptive_decay", NUMBER),
    **_free("dry_sequence_breakers", ([str],)),
    **_free("truncation_side reasoning_budget_start_tag reasoning_budget_end_tag", WORDS),
    **_free("reasoning_budget_end_tags", ([str],)),
}

# Harmless at the named values.
_SAMPLERS = {
    **_fields("presence_penalty frequency_penalty dry_multiplier mirostat xtc_probability dynatemp_range", NUMBER, 0),
    **_fields("repeat_penalty typical_p tfs_z length_penalty", NUMBER, 1),
    **_fields("top_n_sigma", NUMBER, -1, 0),
    **_fields("adaptive_target", NUMBER, -1),
    **_fields("min_keep", WHOLE, 0),
    **_fields("samplers", WORDS_OR_LIST),
}
_REPLY = {
    **_fields("n n_cmpl best_of stream_interval", WHOLE, 1),
    **_fields("prompt_logprobs", WHOLE),
    **_fields("logprob_token_ids", ([int],)),
    **_fields("n_probs routed_experts_start_len routed_experts_prompt_start", WHOLE, 0),
    **_fields("post_sampling_probs return_tokens return_token_ids return_tokens_as_token_ids", SWITCH, False),
    **_fields("return_prompt_token_ids return_prompt_text return_token_offsets return_meta_info", SWITCH, False),
    **_fields("return_routed_experts return_cached_tokens_details return_progress timings_per_token", SWITCH, False),
    **_fields("verbose include_stop_str_in_output reasoning_in_content store", SWITCH, False),
    **_fields("return_hidden_states", (*SWITCH, *WORDS), False),
    **_fields("skip_special_tokens", SWITCH, True),
    **_fields("response_fields stop_token_ids", LIST, []),
    **_fields("reasoning_format", WORDS, "none"),
    **_fields("service_tier", WORDS, "auto", "default"),
    **_fields("sse_ping_interval", WHOLE, -1),
    **_fields("request_id cache_salt", WORDS),
    **_fields("rid extra_key ngram_corpus_id", WORDS_OR_LIST),
    **_fields("priority", WHOLE, 0),
    **_fields("kv_transfer_params ec_transfer_params session_params", OBJECT, {}),
    **_fields("bootstrap_host bootstrap_port bootstrap_room", (*WORDS, *WHOLE, *LIST)),
    **_fields("routed_dp_rank disagg_prefill_dp_rank data_parallel_rank", WHOLE),
    **_fields("speculative.n_max speculative.n_min speculative.p_min", NUMBER),
    **_fields("speculative.type", WORDS),
    **_fields("chat_format", WHOLE),
    **_fields("chat_parser", WORDS, ""),
}
_STEERING = {
    **_fields("logit_bias", (*OBJECT, *LIST), {}, [], steers=True),
    **_fields("bad_words logits_processors lora", LIST, [], steers=True),
    **_fields("allowed_token_ids", ([int],), steers=True),
    **_fields("custom_logit_processor lora_path stop_regex", WORDS_OR_LIST, steers=True),
    **_fields("custom_params vllm_xargs repetition_detection", OBJECT, {}, steers=True),
    **_fields("mm_processor_kwargs media_io_kwargs images_config", OBJECT, {}, steers=True),
    **_fields("min_tokens n_indent", WHOLE, 0, steers=True),
    **_fields("t_max_predict_ms", WHOLE, -1, 0, steers=True),
    **_fields(
        "thinking_budget thinking_budget_tokens max_thinking_tokens thinking_token_budget", WHOLE, -1, steers=True
    ),
    **_fields("reasoning_budget reasoning_budget_tokens", WHOLE, -1, steers=True),
    **_fields("reasoning_budget_message generation_prompt prefill suffix system_prompt", WORDS, "", steers=True),
    **_fields("ignore_eos no_stop_trim use_beam_search early_stopping watermarking", SWITCH, False, steers=True),
    **_fields("reasoning_control thinking_forced_open use_audio_in_video", SWITCH, False, steers=True),
    **_fields("return_full_text echo grammar_lazy", SWITCH, False, steers=True),
    **_fields("continue_final_message", (*SWITCH, *WORDS), False, steers=True),
    **_fields("truncate_prompt_tokens max_dynamic_patch min_dynamic_patch", WHOLE, steers=True),
    **_fields("prompt_embeds", WORDS_OR_LIST, steers=True),
    **_fields("input_prefix input_suffix", WORDS, "", steers=True),
    **_fields("input_extra grammar_triggers preserved_tokens image_data", LIST, [], steers=True),
    **_fields("grammar_type task chat_template", WORDS, steers=True),
    **_fields("structural_tag json multimodal_data", WORDS_OR_OBJECT, steers=True),
    **_fields("input_ids", ([int],), steers=True),
    **_fields("guided_decoding guided_options", OBJECT, {}, steers=True),
    **_fields("guided_decoding_backend", WORDS, "auto", "guidance"),
    **_fields("guided_whitespace_pattern", WORDS),
}
_TOOLS = {
    **_fields("tools", LIST, []),
    **_fields("tool_choice", WORDS_OR_OBJECT, "none", "auto"),
    **_fields("functions", LIST, [], steers=True),
    **_fields("function_call", WORDS_OR_OBJECT, "none", "auto", steers=True),
}
_OF_CHAT = {
    **_fields("add_generation_prompt", SWITCH, True, steers=True),
    **_fields("separate_reasoning", SWITCH, False),
    **_fields("include_reasoning", SWITCH, True),
    **_fields("verbosity", WORDS, "medium"),
    **_fields("modalities", ([str],), ["text"]),
    **_fields("audio prediction", OBJECT),
    **_fields("web_search_options moderation", OBJECT, steers=True),
}
_BOTH = {**_HONOURED, **GRAMMARS, **_FREE, **_SAMPLERS, **_REPLY, **_STEERING}
FIELDS: dict[str, dict[str, Field]] = {
    CHAT: {
        **_BOTH,
        **_TEMPLATE,
        **_TOOLS,
        **_OF_CHAT,
        **_fields("messages", ([{}],), honoured=True),
        **_fields("logprobs", SWITCH, False),
        **_fields("top_logprobs", WHOLE, 0),
        **_fields("add_special_tokens", SWITCH, False),
    },
    TEXT: {
        **_BOTH,
        **_fields("prompt", PROMPT, honoured=True),
        **_fields("logprobs", WHOLE),
        **_fields("add_special_tokens", SWITCH, True),
    },
}
# The fields of both forms, because clients also send a form the other form's fields.
KNOWN = {
    **FIELDS[TEXT],
    **FIELDS[CHAT],
    "logprobs": replace(FIELDS[CHAT]["logprobs"], kinds=(bool, int)),
    "add_special_tokens": Field(SWITCH, None),
}


def fault_of_request(request: Mapping[str, Any], form: str) -> tuple[str, str] | None:
    """The first field that `serve` does not fulfil, with a hint. None if it fulfils the request."""
    for name, value in request.items():
        field = FIELDS[form].get(name)
        if field is None:
            here = "chat" if form == CHAT else "text"
            elsewhere = f" of {here} completions" if name in KNOWN else ""
            return f"`{name[:60]}` is no known field{elsewhere}", "leave it out"
        if value is None:
            continue
        if not field.fits(value):
            return f"`{name}` cannot be {_shown(value)}", "see the table of fields in docs/serving.md"
        if field.honoured:
            low, high = LIMITS.get(name, (-math.inf, math.inf))
            if isinstance(value, (int, float)) and not low <= value <= high:
                return f"`{name}` is {_shown(value)}", f"give {low:g} to {high:g}"
        elif field.asks(value):
            usual = " or ".join(map(json.dumps, field.neutral or ()))
            return (
                f"`{name}` is not supported with {_shown(value)}",
                f"leave it out{f', or give {usual}' * bool(usual)}",
            )
    return None


def _shown(value: Any) -> str:
    """A value for a message. A long value is shown by its kind."""
    text = json.dumps(value)
    return text if len(text) <= 40 else kind_of(value)


def steered(request: Mapping[str, Any], line: bool = True) -> str:
    """The reason why the target may not write a request's answer by itself. Empty if it does.

    A `line` of a log may have documents, which are given to the template, and unknown columns. Empty values ask for
    nothing.
    """
    for name, value in request.items():
        field = KNOWN.get(name)
        if value is None or (line and (field is None or name == "documents")):
            continue
        if field is None:
            if unread_fields({name: value}, ()):
                return f"a request with `{name[:40]}`, a field that is not known"
        elif field.steers and field.asks(value) and value not in ("", [], {}):
            return f"a request with `{name}`, which steers its answer"
        elif not line and (not field.fits(value) or (name in EFFORTS and not efforts({name: value}))):
            return f"a request with `{name}` of another form"
    return ""
