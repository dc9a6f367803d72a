"""Requests for `distill serve` with fields of the forms of OpenAI, vLLM, SGLang and llama-server.

Each field is honoured, has a value for which its server does nothing, or is refused by name. The values for which
servers do nothing are written here from their documentation, and not read from distill's own table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from fuzz_inputs import SCALARS, dumped, values, weighted
from hypothesis import strategies as st

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
# Values of each field as clients send them. OpenAI:
OPENAI: dict[str, list[Any]] = {
    "model": ["gpt-4o", "m"],
    "stream": [True, False],
    "stream_options": [{"include_usage": True}, {"include_usage": False, "include_obfuscation": False}, {}],
    "max_tokens": [1, 16, 4096],
    "max_completion_tokens": [1, 16, 4096],
    "temperature": [0, 0.7, 1, 2.0],
    "top_p": [1, 0.9, 0.1],
    "n": [1, 2],
    "best_of": [1, 3],
    "stop": ["\n", ["a", "b"], [], None],
    "seed": [0, 7, 2**31],
    "presence_penalty": [0, 0.0, 1, 1.0, -2.0],
    "frequency_penalty": [0, 0.0, 1, 1.0, 0.5],
    "logit_bias": [{}, {"50256": -100}],
    "logprobs": [True, False, 0, 1, 5],
    "top_logprobs": [0, 1, 5],
    "echo": [True, False],
    "suffix": ["", "x"],
    "user": ["u"],
    "metadata": [{"a": "b"}],
    "store": [True, False],
    "service_tier": ["auto", "default", "flex"],
    "tools": [[], [{"type": "function", "function": {"name": "f"}}]],
    "tool_choice": ["auto", "none", "required", {"type": "function", "function": {"name": "f"}}],
    "parallel_tool_calls": [True, False],
    "functions": [[], [{"name": "f"}]],
    "function_call": ["auto", "none", {"name": "f"}],
    "modalities": [["text"], ["text", "audio"]],
    "audio": [{"voice": "alloy", "format": "wav"}],
    "prediction": [{"type": "content", "content": "x"}],
    "verbosity": ["low", "medium", "high"],
    "web_search_options": [{}, {"search_context_size": "low"}],
    "reasoning_effort": ["none", "low", "high", "xhigh"],
    "response_format": [
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
        {"type": "grammar"},
    ],
    "safety_identifier": ["s"],
    "prompt_cache_key": ["k"],
}
VLLM: dict[str, list[Any]] = {
    "top_k": [-1, 0, 1, 40],
    "min_p": [0, 0.0, 0.05, 1],
    "repetition_penalty": [1, 1.0, 1.1],
    "length_penalty": [1.0, 2.0],
    "use_beam_search": [True, False],
    "stop_token_ids": [[], [3]],
    "include_stop_str_in_output": [True, False],
    "ignore_eos": [True, False],
    "min_tokens": [0, 4],
    "skip_special_tokens": [True, False],
    "spaces_between_special_tokens": [True, False],
    "truncate_prompt_tokens": [-1, 5],
    "allowed_token_ids": [[1, 2]],
    "bad_words": [[], ["x"]],
    "prompt_logprobs": [0, 1],
    "add_special_tokens": [True, False],
    "add_generation_prompt": [True, False],
    "continue_final_message": [True, False],
    "chat_template": ["{{ 1 }}"],
    "chat_template_kwargs": [{}, {"enable_thinking": False}, {"x": 1}, {"chat_template": "{{ 1 }}"}, {"messages": []}],
    "documents": [[], [{"title": "a", "text": "b"}]],
    "structured_outputs": [{"regex": "[ab]"}, {"choice": ["a", "b"]}, {"json": SCHEMA}, {"structural_tag": "x"}],
    "guided_json": [SCHEMA, json.dumps(SCHEMA)],
    "guided_choice": [["yes", "no"]],
    "guided_regex": ["[0-9]+"],
    "guided_grammar": ['root ::= "a"'],
    "priority": [0, 1],
    "request_id": ["r"],
    "cache_salt": ["s"],
    "return_token_ids": [True, False],
    "return_tokens_as_token_ids": [True, False],
    "kv_transfer_params": [{"a": 1}],
    "vllm_xargs": [{"a": 1}],
    "thinking_token_budget": [-1, 10],
    "include_reasoning": [True, False],
    "logits_processors": [[], ["x"]],
    "repetition_detection": [{"a": 1}],
}
SGLANG: dict[str, list[Any]] = {
    "regex": ["[ab]{2}"],
    "ebnf": ['root ::= "a" | "b"'],
    "json_schema": [json.dumps(SCHEMA), SCHEMA],
    "structural_tag": ["x"],
    "no_stop_trim": [True, False],
    "stop_regex": ["x"],
    "lora_path": ["x"],
    "session_params": [{"id": "x"}],
    "separate_reasoning": [True, False],
    "stream_reasoning": [True, False],
    "return_hidden_states": [True, False],
    "custom_logit_processor": ["x"],
    "custom_params": [{"a": 1}],
    "input_ids": [[1, 2]],
    "rid": ["x"],
    "bootstrap_room": [3],
    "data_parallel_rank": [0],
    "reasoning": [{"effort": "none"}, {"effort": "low"}, {"exclude": True}],
}
LLAMA: dict[str, list[Any]] = {
    "n_predict": [-1, 5, 0],
    "repeat_penalty": [1, 1.0, 1.1],
    "repeat_last_n": [64, 0, -1],
    "dry_multiplier": [0, 0.0, 0.8],
    "dry_base": [1.75],
    "dry_sequence_breakers": [["\n"]],
    "mirostat": [0, 2],
    "mirostat_tau": [5.0],
    "typical_p": [1, 1.0, 0.5],
    "xtc_probability": [0, 0.0, 0.5],
    "xtc_threshold": [0.1],
    "top_n_sigma": [-1, -1.0, 1.0],
    "dynatemp_range": [0, 0.0, 0.5],
    "grammar": ['root ::= "a"', ""],
    "samplers": [["top_k"]],
    "n_probs": [0, 3],
    "min_keep": [0, 2],
    "id_slot": [-1, 0],
    "cache_prompt": [True, False],
    "n_keep": [0, -1],
    "n_indent": [0, 4],
    "t_max_predict_ms": [0, -1, 100],
    "return_tokens": [True, False],
    "timings_per_token": [True, False],
    "return_progress": [True, False],
    "response_fields": [[], ["content"]],
    "post_sampling_probs": [True, False],
    "lora": [[], [{"id": 0, "scale": 1}]],
    "reasoning_format": ["none", "deepseek"],
    "thinking_forced_open": [True, False],
    "parse_tool_calls": [True, False],
    "image_data": [[], [{"data": "x"}]],
    "enable_thinking": [True, False],
}
FORMS = OPENAI | VLLM | SGLANG | LLAMA
UNKNOWN = ["mood", "Temperature", "temprature", "max_new_tokens", "guided_what", "x-trace", "", "seed ", "é", "a" * 90]
# Values for which a server does nothing.
NOTHING: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("n", "best_of", "length_penalty", "repeat_penalty", "typical_p"), (1,)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "dry_multiplier", "mirostat", "xtc_probability"), (0,)),
    **dict.fromkeys(("dynatemp_range", "n_probs", "min_keep", "n_indent", "min_tokens", "priority"), (0,)),
    **{"top_n_sigma": (-1, 0), "t_max_predict_ms": (-1, 0), "thinking_token_budget": (-1,), "logit_bias": ({}, [])},
    **dict.fromkeys(("tools", "functions", "stop_token_ids", "bad_words", "logits_processors", "lora"), ([],)),
    **dict.fromkeys(("response_fields", "image_data"), ([],)),
    **dict.fromkeys(("kv_transfer_params", "vllm_xargs", "custom_params", "repetition_detection"), ({},)),
    "session_params": ({},),
    **dict.fromkeys(
        ("tool_choice", "function_call"),
        (
            "none",
            "auto",
        ),
    ),
    **{"service_tier": ("auto", "default"), "verbosity": ("medium",), "modalities": (["text"],), "suffix": ("",)},
    **{"skip_special_tokens": (True,), "add_generation_prompt": (True,), "include_reasoning": (True,)},
    "reasoning_format": ("none",),
    **dict.fromkeys(("store", "echo", "use_beam_search", "ignore_eos", "continue_final_message"), (False,)),
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids", "return_tokens", "return_progress"), (False,)),
    **dict.fromkeys(("include_stop_str_in_output", "no_stop_trim", "separate_reasoning"), (False,)),
    **dict.fromkeys(("return_hidden_states", "timings_per_token", "post_sampling_probs"), (False,)),
    "thinking_forced_open": (False,),
}
# Harmless at every value of a kind.
FREE: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("user", "safety_identifier", "prompt_cache_key"), str),
    **dict.fromkeys(("parallel_tool_calls", "spaces_between_special_tokens", "stream_reasoning"), bool),
    **dict.fromkeys(("cache_prompt", "parse_tool_calls"), bool),
    **dict.fromkeys(("repeat_last_n", "id_slot", "n_keep"), int),
    **dict.fromkeys(("dry_base", "mirostat_tau", "xtc_threshold"), (int, float)),
    **{"metadata": dict, "dry_sequence_breakers": list},
}
GRAMMARS = (
    *("response_format", "structured_outputs", "guided_json", "guided_choice", "guided_regex", "guided_grammar"),
    *("regex", "ebnf", "json_schema", "grammar"),
)
PROMPTS = ["alpha", [1, 2, 3], ["alpha"], [[1, 2]], "", [], ["a", "b"], [10**6], [True], 3]
MESSAGES = [
    [{"role": "user", "content": "alpha"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "alpha"}]}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
    [{"role": "user", "content": "a", "name": "n"}, {"role": "owner", "content": "b"}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    [{"role": "user", "content": "a", "mood": 1}],
    [],
]


@st.composite
def requests(draw: Callable[..., Any]) -> tuple[str, dict[str, Any]]:
    """Return the form and the fields of a request: usual values, any values, and unknown fields."""
    chat = draw(st.booleans())
    usual = draw(st.integers(0, 5)) > 0
    own = MESSAGES if chat else PROMPTS
    found = {"messages" if chat else "prompt": own[draw(st.integers(0, 2 if usual else len(own) - 1))]}
    for name in draw(st.lists(st.sampled_from(list(FORMS)), max_size=5, unique=True)):
        found[name] = draw(weighted((6, st.sampled_from(FORMS[name])), (1, st.sampled_from(SCALARS)), (1, values)))
    if draw(st.integers(0, 9)) == 0:
        found[draw(st.sampled_from(UNKNOWN))] = draw(st.sampled_from([1, None, "x"]))
    return "chat" if chat else "text", found


def same(value: Any, other: Any) -> bool:
    """Whether two values are equal. True is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def passed_over(name: str, value: Any, job: Any) -> bool:
    """Whether a field of an accepted request is neither honoured nor at a value that does nothing."""
    if value is None:
        return name not in FORMS and name not in ("messages", "prompt")
    if name in HONOURED:
        return not HONOURED[name](value, job)
    if name in FREE:
        return not isinstance(value, FREE[name]) or (isinstance(value, bool) and FREE[name] is not bool)
    return not any(same(value, one) for one in NOTHING.get(name, ()))


def limited(value: Any, job: Any) -> bool:
    """Whether a limit is kept. -1 means no limit."""
    return not isinstance(value, bool) and (value < 0 or 0 < job.limit <= value)


def drawn_with(value: Any, job: Any) -> bool:
    """Whether a seed is used. There is none if nothing is drawn, or for a random seed."""
    drawn = job.request.sampler.temperature > 0 and value != -1
    return not isinstance(value, bool) and (not drawn or job.request.seed == value)


def under_grammar(value: Any, job: Any) -> bool:
    """Whether a field's grammar is that of the text."""
    return value in ("", {}) or same(value, {"type": "text"}) or job.request.grammar is not None


def thinks(value: Any, job: Any) -> bool:
    """Whether the prompt closes an empty thinking block exactly if thinking is switched off."""
    return (value in ("none", {"effort": "none"}) or value is False) is job.closed


# Fields that are honoured, and the test of whether they are.
HONOURED: dict[str, Callable[[Any, Any], bool]] = {
    **dict.fromkeys(("messages", "prompt", "model"), lambda value, job: True),
    "top_k": lambda value, job: same(job.request.sampler.top_k, 0 if value == -1 else value),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "n_predict"), limited),
    "stream": lambda value, job: job.stream is value,
    "stream_options": lambda value, job: {**value}.pop("include_usage", None) is job.usage and len(value) < 3,
    "stop": lambda value, job: job.request.stop == ((value,) if isinstance(value, str) else tuple(value)),
    "seed": drawn_with,
    **dict.fromkeys(GRAMMARS, under_grammar),
    **dict.fromkeys(("reasoning_effort", "reasoning", "enable_thinking"), thinks),
    "chat_template_kwargs": lambda value, job: value.keys() <= {"enable_thinking", "tools", "documents"},
    "documents": lambda value, job: not value or job.documents,
    "add_special_tokens": lambda value, job: value is (job.form == "text"),
    "logprobs": lambda value, job: job.form == "chat" and value is False,
    "top_logprobs": lambda value, job: job.form == "chat" and same(value, 0),
}
HONOURED |= {
    name: lambda value, job, name=name: same(getattr(job.request.sampler, name), value)
    for name in ("temperature", "top_p", "min_p", "repetition_penalty")
}


def fault_of_served(server: Any, given: tuple[str, dict[str, Any]]) -> str | None:
    """Describe what `distill serve` ignores of a request, or refuses without naming it. None for nothing.

    Raises DistillError if it refuses a field by name.
    """
    from distill.errors import DistillError
    from distill.files import parse_object

    form, fields = given
    body = dumped(fields)
    asked = parse_object(body)
    try:
        job = server._job(body, form)
    except DistillError as error:
        known = isinstance(asked, dict) and re.search(r"`([^`]*?)[\[.`]", str(error))
        named = bool(known) and any(name[:60].startswith(known[1]) or known[1] == name for name in asked)
        whole = not isinstance(asked, dict) or "tokens in a context" in str(error) or "the request is" in str(error)
        missing = {"messages", "prompt"} & {known[1] if known else ""}
        if named or whole or missing:
            raise
        return f"refused without a name: {error}"
    text = server.answerer.template.tokenizer.decode(job.ids)
    job.form, job.closed, job.documents = form, "</think>" in text, "title" in text
    assert isinstance(asked, dict)
    wrong = [name for name, value in asked.items() if passed_over(name, value, job)]
    return f"{wrong[0]!r}: {asked[wrong[0]]!r:.200}" if wrong else None
