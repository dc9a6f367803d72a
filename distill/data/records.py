"""Records and their messages, in the forms that data sets, clients and servers write, are converted to one form.

A field is read in the meaning of its origin: chat messages and `tools`, `documents`, `chat_template_kwargs` (TRL),
`weight` (OpenAI); ShareGPT's `conversations`; `instruction`, `input`, `system`, `history` (Alpaca, LLaMA-Factory);
`context` (Dolly, SQuAD). An unread field is counted by its name. If the question depends on it, the record is left out.
A message's thinking is text in `reasoning_content`, its content is text, and the arguments of its tool calls are
objects. A known field with an unknown value is an error of its record. Nothing here imports torch.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from distill.files import has_form
from distill.recipe import Source

# ── One message ──

# Names of thinking: of DeepSeek, Qwen and llama-server; vLLM and OpenRouter; gpt-oss and Ollama; OpenRouter's list.
THINKING = ("reasoning_content", "reasoning", "thinking", "reasoning_details")
THOUGHT = THINKING[0]
ARGUMENTS = ("arguments", "parameters", "input")  # of a tool call: OpenAI, Llama, Anthropic
TEXT_PARTS = ("text", "input_text", "output_text")  # kinds of a message's parts
OPENING, CLOSING = "<think>", "</think>"
PREFILLS = ("prefix", "partial")  # of a message that the target is to continue: DeepSeek and Mistral, Moonshot


def normal(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its thinking, content and tool calls in one form. Other fields are kept.

    Raises ValueError, with the reason, for a message that cannot be converted without loss, or only begins an answer.
    """
    if name := next((name for name in PREFILLS if message.get(name)), None):
        raise ValueError(f"a message that only begins an answer (`{name}`)")
    texts, thoughts = _parts(message.get("content"))
    thoughts += [text for name in THINKING if (text := _thought(message.get(name)))]
    if len({text.strip() for text in thoughts}) > 1:
        raise ValueError("a message whose thinking stands in two fields and differs")
    if len(texts) > 1 or not isinstance(message.get("role"), str):
        raise ValueError("a message of several parts" if len(texts) > 1 else "a message without a role")
    content = texts[0] if texts else ""
    if thoughts and CLOSING in content:
        within, _, rest = content.partition(CLOSING)
        if within.strip().removeprefix(OPENING).strip() != thoughts[0].strip():
            raise ValueError("a message whose thinking stands in two fields and differs")
        content = rest.lstrip("\n")
    calls = message.get("tool_calls")
    calls = _decoded(calls, "tool calls that are not JSON") if isinstance(calls, str) else calls
    if calls and not isinstance(calls, list):
        raise ValueError("tool calls that are not a list")
    if not texts and not thoughts and not calls:
        raise ValueError("a message without content")
    if wrong := next((name for name in ("name", "tool_call_id") if not isinstance(message.get(name, ""), str)), None):
        raise ValueError(f"a message whose `{wrong}` is not text")
    converted = {name: value for name, value in message.items() if name not in (*THINKING, *PREFILLS, "tool_calls")}
    converted |= {"content": content} | ({THOUGHT: thoughts[0]} if thoughts else {})
    return converted | ({"tool_calls": [_call(call) for call in calls]} if calls else {})


def _parts(content: Any) -> tuple[list[str], list[str]]:
    """The texts of a content and of its thinking. A list has several parts (Anthropic, Mistral)."""
    if content is None:
        return [], []
    if isinstance(content, str):
        return [content], []
    texts, thoughts = [], []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type", "text") if isinstance(part, dict) else None
        text = part.get("text") if kind in TEXT_PARTS else None
        if kind in ("thinking", "reasoning"):
            thoughts.append(_thought(part.get(kind, part.get("text"))))
        elif isinstance(text, str):
            texts.append(text)
        else:
            raise ValueError("a message whose content is not text")
    return texts, list(filter(None, thoughts))


def _thought(value: Any) -> str:
    """The text of a thinking field: a text, or a list with parts of text. Empty without a text."""
    if not value or isinstance(value, str):
        return value or ""
    parts = value if isinstance(value, list) else [value]
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    thought = "".join(text for text in texts if isinstance(text, str))
    if not thought:
        raise ValueError("a message whose thinking is not text (encrypted, or a summary)")
    return thought


def _call(call: Any) -> dict[str, Any]:
    """A tool call with an object as its arguments. Servers send the arguments as JSON text."""
    inner = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise ValueError("a tool call without a name")
    given = next((name for name in ARGUMENTS if name in inner), "arguments")
    arguments = inner.get(given) or {}
    if isinstance(arguments, str):
        arguments = _decoded(arguments, "tool-call arguments that are not JSON") if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise ValueError("tool-call arguments that are not a JSON object")
    function = {"arguments" if name == given else name: value for name, value in inner.items()}
    function |= {"arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def _decoded(text: str, fault: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(fault) from None


# ── One request: its effort of thinking ──

EFFORTS = ("reasoning_effort", "reasoning", "enable_thinking", "thinking")
OF_LINE = (
    *("prompt", "messages", "answer", "finish_reason", "model", "chat_template_kwargs", "tools", "documents"),
    "completion_tokens",
)


def efforts(request: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that servers give the chat template for a request's effort of thinking."""
    inner = {name: value for name in ("reasoning", "thinking") if isinstance(value := request.get(name), dict)}
    effort = request.get("reasoning_effort") or inner.get("reasoning", {}).get("effort")
    if isinstance(effort, str):
        return {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    kind = inner.get("thinking", {}).get("type")  # of DeepSeek's, GLM's and Kimi's servers
    switch = {"enabled": True, "disabled": False}.get(str(kind), request.get("enable_thinking"))
    return {"enable_thinking": switch} if isinstance(switch, bool) else {}


ENDED = ("stop", "tool_calls", "eos", "eos_token", "end_turn")  # servers' names for an end token
CUT_SHORT = ("length", "max_tokens", "stop_string", "stop_sequence")  # and for an end without an end token
LONG = 20  # characters of a prompt that no answer repeats by chance
SPELLED_END = "answers that spell their end token: learnt with one end"


def fault_of_text(prompt: str, answer: str) -> str:
    """The reason why the target cannot have written a text. Empty without a reason."""
    if "\ufffd" in answer:
        return "bytes that are no UTF-8 (U+FFFD) in an answer"
    return "an answer that begins with its whole prompt" if len(prompt) >= LONG and answer.startswith(prompt) else ""


# ── One record as a conversation: its fields ──

Messages = tuple[dict[str, Any], ...]  # role, content, and whatever else the template reads

# Names of roles in data sets.
SPEAKERS = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "ipython"), "tool"),
}
LISTS = ("messages", "conversation", "conversations", "turns")  # Lists of messages. `turns` may hold a user's texts.
PROMPTS = ("prompt", "instruction", "question", "query", "input")
CONTEXTS = ("input", "context", "passage")  # texts that a prompt is about
ANSWERS = ("answer", "completion", "response", "output", "chosen")
SYSTEMS = ("system", "system_prompt")
OF_MESSAGE = (*THINKING, *PREFILLS, "tool_calls", "tool_call_id", "name")  # kept for the template
REPEATED = {*PROMPTS, *CONTEXTS, *SYSTEMS}  # They often repeat a part of the messages.
# The question depends on these fields.
OF_QUESTION = {
    *(*REPEATED, "history", "documents", "tools", "functions", "choices", "options"),
    *("image", "images", "video", "videos", "audio", "audios"),
}
LEARNT = ("train", "training", "loss")  # Whether a message is learnt from, like weight 0 and 1.
# Whether an answer is good: KTO's `label`, LLaMA-Factory's `kto_tag`. `chosen` may also be the answer.
JUDGEMENTS = {"label": True, "kto_tag": True, "accepted": True, "chosen": True, "rejected": False}
VERDICTS = {
    **dict.fromkeys(("true", "1", "chosen", "accepted", "good"), True),
    **dict.fromkeys(("false", "0", "rejected", "bad"), False),
}
REJECTED = ("rejected", "rejected_response", "rejected_messages")  # answers that are not learnt
# The answer depends on these fields, unless they have one of these neutral values.
OF_ANSWER: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("prefill", "suffix", "chat_template"), ()),
    **{"continue_final_message": (False,), "add_generation_prompt": (True,), "response_format": ({"type": "text"},)},
}
# Marks that chat templates write around turns. A text with a mark looks rendered.
RENDERED = re.compile(
    r"<\|im_start\|>|<\|start_header_id\|>|\[/INST\]|<start_of_turn>|<\|(?:user|assistant)\|>|<\|start_of_role\|>"
    r"|<｜(?:User|Assistant)｜>|<\|(?:User|Assistant)\|>|<\|start\|>(?:user|assistant)|<\|turn>(?:user|model)"
    r"|^(?:### (?:Response|Assistant)|Assistant|ASSISTANT):",
    re.M,
)
BEGINNING = 2000  # A mark in these first characters shows that a template has rendered the text.
UNANSWERED = {"role": "assistant", "content": "", "weight": 0}  # in place of an answer that a record lacks
NAMING = ("id", "idx", "index", "uuid")  # Names of a record, like fields that end in _id. They are not read.
MAX_FIELDS = 20  # More fields are not named, because each hostile record has a new field.


def form_of(record: Mapping[str, Any], source: Source) -> str | None:
    """The form of a record: the source's `form`, or the form that its fields show. None without a known field."""
    if source.form != "auto":
        return source.form
    fields = Fields(record, source)
    messages = fields.first("messages", LISTS)
    if isinstance(messages, list) or (isinstance(messages, str) and messages.lstrip()[:1] == "["):
        return "messages"
    prompt = fields.first("prompt", PROMPTS)
    # Alpaca's `text` repeats the other fields.
    whole = _has_content(prompt) and ("instruction" in fields.read or _has_content(fields.first("answer", ANSWERS)))
    is_text = isinstance(record.get(source.fields.get("text", "text")), str)
    if is_text and "prompt" not in source.fields and ("text" in source.fields or not whole):
        return "text"
    return None if prompt is None else "prompt"


class Fields:
    """The fields of a record under the source's names, and the names of the fields that were read."""

    def __init__(self, record: Mapping[str, Any], source: Source) -> None:
        self.record, self.names = record, source.fields
        self.read: set[str] = set()

    def first(self, kind: Any, known: Iterable[str]) -> Any:
        """The first field of a kind that has content, or else the first field that is present. None without a field."""
        names = [self.names[kind]] if kind in self.names else known
        present = [name for name in names if self.record.get(name) is not None]
        first = next((name for name in present if _has_content(self.record[name])), present[0] if present else None)
        self.read.update([first] if first is not None else [])
        return None if first is None else self.record[first]


def _has_content(value: Any) -> bool:
    """Whether a field has content. Alpaca writes `<noinput>` for no input."""
    if isinstance(value, str):
        return value.strip().lower() not in ("", "<noinput>")
    return value is not None and not (isinstance(value, (list, dict)) and not value)


def unread_fields(record: Mapping[str, Any], read: Container[str]) -> list[str]:
    """The names of the unread fields that have content and do not name the record."""
    rest = (name for name, value in record.items() if name not in read and _has_content(value))
    return [name for name in rest if name not in NAMING and not name.endswith("_id")]


def count_fields(names: Iterable[str], of: str, dropped: Counter[str]) -> None:
    """Count unread fields by their names, up to MAX_FIELDS names."""
    for name in names:
        reason = f"field `{name[:40]}` of {of}, which is not read"
        if reason not in dropped and sum(known.startswith("field `") for known in dropped) >= MAX_FIELDS:
            reason = "further fields, which are not read"
        dropped[reason] += 1


def read_conversation(
    record: Mapping[str, Any], form: str, source: Source, dropped: Counter[str]
) -> tuple[Messages, dict[str, Any]]:
    """The messages of a record up to an answer or a question, and its arguments for the chat template.

    `dropped` counts unread parts. ValueError, with the reason, for a record that is no conversation.
    """
    fields, noted = Fields(record, source), Counter[str]()  # added to `dropped` if the whole record is read
    if form == "prompt":
        messages = _asked(fields, noted)
    else:
        given = fields.first("messages", LISTS)
        parsed = _parsed(given)
        texts = parsed if given is record.get("turns") and has_form(parsed, [str]) else None
        messages = _messages(parsed, noted) if texts is None else turns_of(texts)
    system = fields.first("system", SYSTEMS)
    if system is not None and not isinstance(system, str):
        raise ValueError("a system prompt that is not text")
    if system and system.strip():
        given = [message["content"] for message in messages if message["role"] == "system"]
        if given and system not in given:
            raise ValueError("two system prompts: a field and a message")
        if not given:
            messages.insert(0, {"role": "system", "content": system})
    arguments = template_arguments(fields)
    present = (name for name in OF_ANSWER if _has_content(record.get(name)))
    steering = (name for name in present if record[name] not in OF_ANSWER[name])
    if source.form == "auto" and (name := next(steering, None)):
        raise ValueError(f"a field `{name}`, which steers the answer")
    if record.get("finish_reason") in CUT_SHORT and messages[-1]["role"] == "assistant":
        raise ValueError("an answer that was cut short (`finish_reason`)")
    fields.read.update(OF_ANSWER)
    fields.read.update(["finish_reason"] if record.get("finish_reason") in ENDED else [])
    asked = _usable(tuple(_without_rejected(messages, fields, noted)), noted)
    if isinstance(record.get(fields.names.get("label", "category")), str):
        fields.read.add(fields.names.get("label", "category"))
    text = "\n".join(message["content"] for message in asked)
    unread = [
        name
        for name in unread_fields(record, fields.read)
        if not (name in REPEATED and str(record[name]).strip() in text)
    ]
    lost = OF_QUESTION | (set(THINKING) if asked[-1]["role"] == "assistant" else set())
    if missing := next((name for name in unread if name in lost and source.form == "auto"), None):
        raise ValueError(f"a field `{missing}` with the {form}: name it in the source's `fields`, or set its `form`")
    count_fields(unread, "records", noted)
    dropped.update(noted)
    return asked, arguments


def _parsed(value: Any) -> Any:
    """A value that some data sets store as text: JSON, or Python's form of a list, which pandas writes into csv."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
        if value.lstrip()[:2] in ("[{", "['", '["'):
            with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                return ast.literal_eval(value.strip())
    return value


def _listed(value: Any) -> Any:
    """A prompt or an answer. A list of messages or texts may be stored as text. Other texts are returned unchanged."""
    parsed = _parsed(value) if isinstance(value, str) and value.lstrip()[:1] == "[" else value
    if isinstance(parsed, list) and parsed and (has_form(parsed, [{}]) or has_form(parsed, [str])):
        return parsed
    if isinstance(value, str) and re.match(r"\s*\[\s*\{\s*[\"'](role|from|content|value)[\"']", value):
        raise ValueError("a list of messages that is neither JSON nor Python")
    return value


def turns_of(texts: Sequence[str]) -> list[dict[str, Any]]:
    """The messages of a user's turns. The target answers each turn."""
    messages: list[dict[str, Any]] = []
    for text in texts:
        messages += [{"role": "user", "content": text}, UNANSWERED]
    return messages[:-1]


def _without_rejected(messages: list[dict[str, Any]], fields: Fields, dropped: Counter[str]) -> list[dict[str, Any]]:
    """The messages without an answer that the record rejects. Earlier answers of such a record get weight 0."""
    for name in REJECTED:
        if _has_content(fields.record.get(name)) and not isinstance(fields.record[name], bool):
            fields.read.add(name)
            dropped[f"rejected answers (`{name}`), which are not learnt"] += 1
    for name, good in JUDGEMENTS.items():
        value = fields.record.get(name)
        if name == fields.names.get("label") or (name in ("chosen", "rejected") and not isinstance(value, bool)):
            continue
        whole = isinstance(value, (bool, int, float, str)) and value == value and str(value).lower().removesuffix(".0")
        verdict = VERDICTS.get(whole or "")
        if verdict is None:
            continue
        fields.read.add(name)
        answers = sum(message["role"] == "assistant" for message in messages)
        if verdict is good or not answers:
            continue
        dropped[f"answers marked as rejected (`{name}`), which are not learnt"] += answers
        if messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        messages = [each | ({"weight": 0} if each["role"] == "assistant" else {}) for each in messages]
    return messages


# ── A prompt, its context, and an answer ──


def _asked(fields: Fields, dropped: Counter[str]) -> list[dict[str, Any]]:
    """The messages of the `history`, of the prompt with its context, and of the answer."""
    prompt = _listed(fields.first("prompt", PROMPTS))
    if has_form(prompt, [str]) and prompt:  # the user's turns, as in MT-Bench
        messages = turns_of(prompt)
    elif isinstance(prompt, list):  # messages before the answer, as in preference data sets
        messages = _messages(prompt, dropped)
    elif isinstance(prompt, str):
        parts = [prompt, *_contexts(fields, prompt)]
        messages = [{"role": "user", "content": "\n".join(parts)}]
    else:
        raise ValueError("a prompt that is not text")
    history = _parsed(fields.first("history", ("history",)))
    if history and not (has_form(history, [[str]]) and all(len(pair) == 2 for pair in history)):
        raise ValueError("a `history` that is not pairs of a question and an answer")
    turns = [text for pair in history or [] for text in pair]
    roles = ("user", "assistant") * (len(turns) // 2)
    messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=True)] + messages
    answer = _answer(fields, dropped)
    if answer and UNANSWERED in messages:
        raise ValueError("an answer after several turns without answers")
    if answer[: len(messages)] == messages:  # UltraFeedback's `chosen` is the whole conversation.
        return answer
    if any(message["role"] == "user" for message in answer):
        raise ValueError("an answer that holds other questions")
    return messages + answer


def _contexts(fields: Fields, prompt: str) -> list[str]:
    """The texts that a prompt is about, without texts that the prompt holds."""
    contexts = []
    names = [fields.names["context"]] if "context" in fields.names else CONTEXTS
    for name in names:
        text = fields.record.get(name)
        if name in fields.read or not _has_content(text):
            continue
        if not isinstance(text, str):
            raise ValueError(f"a field `{name}` that is not text")
        fields.read.add(name)
        contexts += [text] if text.strip() not in prompt else []
    return contexts


def _answer(fields: Fields, dropped: Counter[str]) -> list[dict[str, Any]]:
    """The messages of an answer, with its thinking. Empty if the record has no answer that is text."""
    answer = _listed(fields.first("answer", ANSWERS))
    if isinstance(answer, list) and not has_form(answer, [str]):
        return _messages(answer, dropped)
    if answer is None:  # SQuAD's answers, and lists of right answers
        several = fields.first("answers", ("answers",))
        answer = several.get("text") if isinstance(several, dict) else several
    if isinstance(answer, list) and answer and has_form(answer, [str]):
        if further := len(set(answer[1:]) - {answer[0]}):
            dropped["answers of a question beyond its first"] += further
        answer = answer[0]
    if not isinstance(answer, str):
        fields.read -= {*ANSWERS, "answers", fields.names.get("answer", "")}
        return []
    thinking = {name: fields.record[name] for name in THINKING if _has_content(fields.record.get(name))}
    if not answer.strip() and not thinking:
        return []
    fields.read.update(thinking)
    return [normal({"role": "assistant", "content": answer, **thinking})]


def template_arguments(fields: Fields) -> dict[str, Any]:
    """The arguments that a record gives the chat template. ValueError for arguments of another form."""
    arguments = _parsed(fields.first("chat_template_kwargs", ("chat_template_kwargs",))) or {}
    if not isinstance(arguments, dict):
        raise ValueError("`chat_template_kwargs` that are not an object")
    arguments = efforts(fields.record) | arguments
    fields.read.update(name for name in EFFORTS if efforts({name: fields.record.get(name)}))
    for name in ("tools", "documents"):
        if (given := _parsed(fields.first(name, (name,)))) and not has_form(given, [{}]):
            raise ValueError(f"`{name}` that are not a list of objects")
        arguments |= {name: given} if given else {}
    try:
        json.dumps(arguments)
    except (TypeError, ValueError):
        raise ValueError("template arguments that JSON cannot hold") from None
    return arguments


# ── Messages ──


def _messages(value: Any, dropped: Counter[str]) -> list[dict[str, Any]]:
    """Messages of role and content, or of ShareGPT's from and value."""
    value = _parsed(value)
    if not isinstance(value, list):
        raise ValueError("messages that are not a list")
    return [message_of(message, dropped) for message in value]


def message_of(given: Any, dropped: Counter[str]) -> dict[str, Any]:
    """Convert a message of any known form with `normal`. The role is one that templates know.

    A message that is not learnt has weight 0. `parts` holds several parts of text. `dropped` counts unread fields.
    ValueError, with the reason, for a message that cannot be kept.
    """
    if not isinstance(given, dict):
        raise ValueError("a message that is not a mapping")
    role = str(given.get("role", given.get("from"))).lower()
    if role not in SPEAKERS:
        raise ValueError(f"a message of the unknown role {role[:20]!r}")
    if given.get("function_call"):
        raise ValueError("a message with a `function_call`: write it as `tool_calls`")
    kept = {name: given[name] for name in OF_MESSAGE if _has_content(given.get(name))}
    content, parts = _joined(given["content"] if "content" in given else given.get("value"))
    message = normal({"role": SPEAKERS[role], "content": content, **kept})
    message |= {"parts": parts} if len(parts) > 1 else {}
    weight = given.get("weight")
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        raise ValueError("a message whose `weight` is neither 0 nor 1")
    if wrong := next((name for name in LEARNT if not isinstance(given.get(name, False), bool | None)), None):
        raise ValueError(f"a message whose `{wrong}` is neither true nor false")
    if message["role"] == "assistant" and (weight == 0 or any(given.get(name) is False for name in LEARNT)):
        message["weight"] = 0
    if role == "developer":
        dropped["messages of the role developer, read as the system's"] += 1
    read = {"role", "from", "weight", *LEARNT, "content" if "content" in given else "value", *OF_MESSAGE}
    count_fields(unread_fields(given, read), "messages", dropped)
    return message


def _joined(content: Any) -> tuple[Any, list[str]]:
    """A message's content with its parts of text joined, and these parts."""
    if not has_form(content, [{}]):
        return content, []
    texts = [part for part in content if part.get("type", "text") in TEXT_PARTS and isinstance(part.get("text"), str)]
    others = [part for part in content if part not in texts]
    parts = [part["text"] for part in texts]
    return ([*others, {"text": "".join(parts)}] if texts else content), parts


def _usable(messages: Messages, dropped: Counter[str]) -> Messages:
    """The messages up to the last question or answer. ValueError for messages that no model can be asked."""
    roles = [message["role"] for message in messages]
    while roles and roles[-1] in ("system", "tool"):
        dropped[f"messages of the role {roles.pop()} that nothing follows"] += 1
    if "user" not in roles:
        raise ValueError("no user's turn")
    if "assistant" in roles and roles.index("assistant") < roles.index("user"):
        raise ValueError("an answer before the first question")
    if not all(message["content"].strip() for message in messages[: len(roles)] if message["role"] == "user"):
        raise ValueError("an empty question")
    return messages[: len(roles)]


def questions(messages: Messages, arguments: Mapping[str, Any] | None = None) -> str:
    """The text that names a conversation: all of it without the answers."""
    given = {name: value for name, value in (arguments or {}).items() if name in ("tools", "documents")}
    asked: list[Any] = []
    before = ""
    for message in messages:
        if message["role"] != "assistant":  # Messages in a row are another question than messages in turn.
            asked.append([message["role"], message["content"], *(["together"] if before == "user" else [])])
        before = message["role"]
    return json.dumps([*asked, given] if given else asked)
