"""Readers of the fields of a request to `distill serve`: messages or a prompt, sampler, end of the answer, grammar.

Each function raises RecipeError with the field's name if a value cannot be honoured. distill/data/requests.py has the
table of fields.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from distill.data.records import EFFORTS, OF_MESSAGE, efforts, normal
from distill.data.requests import GRAMMARS
from distill.errors import RecipeError
from distill.files import kind_of
from distill.machine import install_extra
from distill.recipe import Sampler

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# Keys of a message that may be empty. No template reads them.
EMPTY_OF_MESSAGE = ("refusal", "audio", "annotations", "function_call", "weight")
LEVELS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
LENGTHS = ("max_tokens", "max_completion_tokens", "n_predict")
STREAM_OPTIONS = {"include_usage": (True, False), "continuous_usage_stats": (False,), "include_obfuscation": (False,)}


def messages_of(asked: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages of a request in the form of records."""
    messages = []
    for number, message in enumerate(asked.get("messages") or []):
        place = f"messages[{number}]"
        for name, value in message.items():
            known = name in ("role", "content", *OF_MESSAGE) or (name in EMPTY_OF_MESSAGE and not value)
            if not known:
                raise RecipeError(f"`{place}.{name[:60]}` is not supported", "leave it out")
        if message.get("role") not in ROLES:
            raise RecipeError(f"`{place}.role` is {message.get('role')!r:.40}", f"give one of {', '.join(ROLES)}")
        for part in message["content"] if isinstance(message.get("content"), list) else ():
            if isinstance(part, dict) and (more := next((name for name in part if name not in ("type", "text")), None)):
                raise RecipeError(f"`{place}.content`: the key `{more[:60]}` of a part is not supported", "send text")
        try:
            messages.append(normal({name: value for name, value in message.items() if name not in EMPTY_OF_MESSAGE}))
        except ValueError as error:
            raise RecipeError(f"`{place}`: {error}") from None
    if not messages:
        raise RecipeError("`messages` is missing or empty", "send a question")
    return messages


def prompt_of(asked: Mapping[str, Any]) -> str | list[int]:
    """The prompt of a text completion: a text or token ids. A list of one prompt is read, too."""
    prompt = asked.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise RecipeError(f"`prompt` has {len(prompt)} prompts", "send one in a request")
        prompt = prompt[0]
    if not prompt:
        raise RecipeError("`prompt` is missing or empty", "send some text to continue")
    text_or_ids: str | list[int] = prompt
    return text_or_ids


def template_arguments(asked: Mapping[str, Any], declared: Collection[str]) -> dict[str, Any]:
    """The arguments for a chat template with these `declared` variables: kwargs, documents and efforts of thinking."""
    arguments = asked.get("chat_template_kwargs") or {}
    given = [name for name in EFFORTS if asked.get(name) is not None]
    if len(given) > 1:
        raise RecipeError(f"`{given[0]}` and `{given[1]}` both set the effort of thinking", "send one of them")
    thinking = efforts(asked)
    for name in given:
        value, keys = asked[name], {"reasoning": {"effort"}, "thinking": {"type"}}.get(name, set())
        effort = thinking.get("reasoning_effort", LEVELS[0])
        if (isinstance(value, dict) and value.keys() != keys) or not thinking or effort not in LEVELS:
            raise RecipeError(f"`{name}` cannot be {json.dumps(value)[:60]}", "see the table in docs/serving.md")
        thinking = {argument: setting for argument, setting in thinking.items() if argument in declared}
        if not thinking or ("reasoning_effort" not in thinking and effort != LEVELS[0]):
            raise RecipeError(f"`{name}`: the target's chat template does not read it", "leave it out")
    places = {name: f"chat_template_kwargs.{name[:60]}" for name in arguments}
    places |= {"documents": "documents"} if asked.get("documents") else {}
    for name, place in places.items():
        if name not in declared:
            raise RecipeError(f"`{place}`: the target's chat template does not read it", "leave it out")
    outside = thinking | ({"documents": asked["documents"]} if asked.get("documents") else {})
    if twice := next((name for name in outside if name in arguments and arguments[name] != outside[name]), None):
        place = twice if twice == "documents" else given[0]
        raise RecipeError(f"`{place}` and `chat_template_kwargs.{twice}` differ", "send one of them")
    return outside | arguments


def sampler_of(asked: Mapping[str, Any], usual: Sampler) -> Sampler:
    """The sampler of a request: `usual` with the settings of the request. A top-k of -1 means no limit."""
    given = {name: asked[name] for name in Sampler.model_fields if asked.get(name) is not None}
    # `fault_of_request` checked the values. The recipe's bounds are narrower: a min-p of 1 is legal in a request.
    sampler = usual.model_copy(update=given | ({"top_k": 0} if given.get("top_k") == -1 else {}))
    penalty = asked.get("repetition_penalty")
    return sampler if penalty is None else sampler.penalised(penalty)


def limit_of(asked: Mapping[str, Any], room: int) -> int:
    """The maximum of new tokens."""
    given = {name: asked[name] for name in LENGTHS if asked.get(name) is not None}
    if len({*given.values()}) > 1:
        raise RecipeError(f"{' and '.join(f'`{name}`' for name in given)} differ", "send one of them")
    limit = next(iter(given.values()), -1)
    if limit == 0:
        raise RecipeError(f"`{next(iter(given))}` is 0", "request at least one token")
    return room if limit < 0 else min(limit, room)


def stops_of(asked: Mapping[str, Any]) -> tuple[str, ...]:
    """The texts before which an answer ends."""
    stop = asked.get("stop")
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if not all(stops):
        raise RecipeError("`stop`: an empty stop string would end every text before it begins", "leave it out")
    return stops


def usage_of(asked: Mapping[str, Any]) -> bool | None:
    """Whether a stream ends with a separate event for the usage. None if the request does not set that."""
    options = asked.get("stream_options") or {}
    for name, value in options.items():
        if value is not None and not any(value is known for known in STREAM_OPTIONS.get(name, ())):
            raise RecipeError(f"`stream_options.{name[:60]}` is not supported with {json.dumps(value)[:40]}")
    include: bool | None = options.get("include_usage")
    return include


# ── Grammars ──


def grammar_of(asked: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """The field that gives a grammar, its kind and its text (see `decoding.grammar`). None without a grammar."""
    given = [name for name, field in GRAMMARS.items() if field.asks(asked.get(name))]
    if not given:
        return None
    if len(given) > 1:
        raise RecipeError(f"`{given[0]}` and `{given[1]}` are two grammars", "send one of them")
    (name,) = given
    if importlib.util.find_spec("llguidance") is None:
        raise RecipeError(f"`{name}`: grammars need llguidance on the server", install_extra("grammar"))
    kind, text = _grammar(name, asked[name], name)
    return name, kind, text


def _grammar(name: str, value: Any, place: str) -> tuple[str, str]:
    """Kind and text of the grammar in a field `name` at a `place` of the request."""
    if name == "response_format":
        return _format(value)
    if name == "structured_outputs":
        return _structured(value)
    if name in ("guided_regex", "regex"):
        return "regex", value
    if name == "guided_choice":
        return _choice(place, value)
    if name == "guided_json_object":
        return "json", '{"type": "object"}'
    if name in ("guided_json", "json_schema"):
        return "json", value if isinstance(value, str) else json.dumps(value)
    return _written(value, lark=name == "guided_grammar")


def _written(text: str, lark: bool) -> tuple[str, str]:
    """A grammar in GBNF, or in llguidance's notation if the text or the field (`lark`) shows that."""
    return "lark" if text.startswith("%llguidance") or (lark and "::=" not in text) else "gbnf", text


def _choice(place: str, texts: Any) -> tuple[str, str]:
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise RecipeError(f"`{place}` must be a list of texts that are not empty")
    return "choice", json.dumps(texts)


def _format(value: Mapping[str, Any]) -> tuple[str, str]:
    """The grammar of OpenAI's `response_format`, or of llama-server's with the schema of a json_object."""
    kind, place = value.get("type"), "response_format"
    if kind == "json_object":
        _require_known(value, place, ("type", "schema"))
        return "json", json.dumps(value.get("schema") or {"type": "object"})
    if kind != "json_schema":
        raise RecipeError(f"`{place}.type` cannot be {json.dumps(kind)[:40]}", "give text, json_object or json_schema")
    _require_known(value, place, ("type", "json_schema"))
    inner = value.get("json_schema")
    if not isinstance(inner, dict):
        raise RecipeError(f"`{place}.json_schema` must be an object, got {kind_of(inner)}")
    _require_known(inner, f"{place}.json_schema", ("name", "description", "schema", "strict"))
    if not isinstance(inner.get("schema"), dict):
        raise RecipeError(f"`{place}.json_schema.schema` must be an object, got {kind_of(inner.get('schema'))}")
    return "json", json.dumps(inner["schema"])


def _structured(value: Mapping[str, Any]) -> tuple[str, str]:
    """The grammar of vLLM's `structured_outputs`. Settings of other grammar libraries are accepted at usual values."""
    place = "structured_outputs"
    kinds = {"json": "guided_json", "regex": "regex", "grammar": "guided_grammar", "choice": "guided_choice"}
    kinds |= {"json_object": "guided_json_object"}
    usual: dict[str, tuple[bool, ...]] = {"disable_any_whitespace": (True, False), "disable_fallback": (True, False)}
    usual |= {"disable_additional_properties": (False,)}
    _require_known(value, place, (*kinds, *usual))
    for name, values in usual.items():
        if value.get(name) is not None and not any(value[name] is known for known in values):
            raise RecipeError(f"`{place}.{name}` is not supported with {json.dumps(value[name])[:40]}")
    given = [name for name in kinds if value.get(name) is not None]
    if len(given) != 1:
        raise RecipeError(f"`{place}` needs one of {', '.join(kinds)}, got {len(given)}")
    (name,) = given
    inner = value[name]
    if not GRAMMARS[kinds[name]].fits(inner) or inner is False:
        raise RecipeError(f"`{place}.{name}` cannot be {json.dumps(inner)[:60]}")
    return _grammar(kinds[name], inner, f"{place}.{name}")


def _require_known(value: Mapping[str, Any], place: str, names: Sequence[str]) -> None:
    if more := next((name for name in value if name not in names and value[name] is not None), None):
        raise RecipeError(f"`{place}.{more[:60]}` is not supported", "leave it out")
