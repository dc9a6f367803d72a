"""Records and the messages in them, in the forms that data sets, clients and servers write, read as one form.

A field is read as its maker defines it: chat messages and `tools`, `documents`, `chat_template_kwargs` (TRL), `weight`
(OpenAI); ShareGPT's `conversations`; `instruction`, `input`, `system`, `history` (Alpaca, LLaMA-Factory); `context`
(Dolly, SQuAD). A field that is not read is counted by its name. A record that would ask something else without such a
field is left out. A message's thinking is text in `reasoning_content`, its content is text, and the arguments of its
tool calls are objects. A known field with a value that is not known is an error of its record. No torch here.
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

# One thing: as DeepSeek, Qwen and llama-server name it; vLLM and OpenRouter; gpt-oss and Ollama; OpenRouter's list.
THINKING = ("reasoning_content", "reasoning", "thinking", "reasoning_details")
THOUGHT = THINKING[0]
ARGUMENTS = ("arguments", "parameters", "input")  # of a tool call: OpenAI, Llama, Anthropic
TEXT_PARTS = ("text", "input_text", "output_text")  # kinds of a message's parts
OPENING, CLOSING = "<think>", "</think>"
PREFILLS = ("prefix", "partial")  # of a message that the target is to continue: DeepSeek and Mistral, Moonshot


def normal(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its thinking, content and tool calls in one form; other fields as they are.

    Raises ValueError, with the reason, for one that cannot be put so without loss, or that only begins an answer.
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
        within, _, behind = content.partition(CLOSING)
        if within.strip().removeprefix(OPENING).strip() != thoughts[0].strip():
            raise ValueError("a message whose thinking stands in two fields and differs")
        content = behind.lstrip("\n")
    calls = message.get("tool_calls")
    calls = _decoded(calls, "tool calls that are not JSON") if isinstance(calls, str) else calls
    if calls and not isinstance(calls, list):
        raise ValueError("tool calls that are not a list")
    if not texts and not thoughts and not calls:
        raise ValueError("a message without content")
    if wrong := next((one for one in ("name", "tool_call_id") if not isinstance(message.get(one, ""), str)), None):
        raise ValueError(f"a message whose `{wrong}` is not text")
    found = {name: value for name, value in message.items() if name not in (*THINKING, *PREFILLS, "tool_calls")}
    found |= {"content": content} | ({THOUGHT: thoughts[0]} if thoughts else {})
    return found | ({"tool_calls": [_call(one) for one in calls]} if calls else {})


def _parts(content: Any) -> tuple[list[str], list[str]]:
    """The texts of a content and those of its thinking: of a text itself, of a list its parts (Anthropic, Mistral)."""
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
    """The text of a thinking field: a text, or a list with parts of text; empty where there is none."""
    if not value or isinstance(value, str):
        return value or ""
    parts = value if isinstance(value, list) else [value]
    texts = [one.get("text") for one in parts if isinstance(one, dict)]
    found = "".join(text for text in texts if isinstance(text, str))
    if not found:
        raise ValueError("a message whose thinking is not text (encrypted, or a summary)")
    return found


def _call(call: Any) -> dict[str, Any]:
    """A tool call, whose arguments may be JSON text, as on the wire, with an object in their place."""
    inner = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise ValueError("a tool call without a name")
    given = next((name for name in ARGUMENTS if name in inner), "arguments")
    arguments = inner.get(given) or {}
    if isinstance(arguments, str):
        arguments = _decoded(arguments, "tool-call arguments that are not JSON") if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise ValueError("tool-call arguments that are not a JSON object")
    found = {"arguments" if name == given else name: value for name, value in inner.items()} | {"arguments": arguments}
    return {**call, "function": found} if "function" in call else found


def _decoded(text: str, fault: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(fault) from None


# ── One request: how much it wants the target to think ──

EFFORTS = ("reasoning_effort", "reasoning", "enable_thinking", "thinking")
OF_LINE = (
    *("prompt", "messages", "answer", "finish_reason", "model", "chat_template_kwargs", "tools", "documents"),
    "completion_tokens",
)


def efforts(request: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the chat template that servers make of how much a request wants the target to think."""
    inner = {name: one for name in ("reasoning", "thinking") if isinstance(one := request.get(name), dict)}
    effort = request.get("reasoning_effort") or inner.get("reasoning", {}).get("effort")
    if isinstance(effort, str):
        return {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    kind = inner.get("thinking", {}).get("type")  # of DeepSeek's, GLM's and Kimi's servers
    switch = {"enabled": True, "disabled": False}.get(str(kind), request.get("enable_thinking"))
    return {"enable_thinking": switch} if isinstance(switch, bool) else {}


LONG = 20  # characters of a prompt that no answer repeats by chance


def fault_of_text(prompt: str, answer: str) -> str:
    """The reason why a text is not what the target wrote; empty where nothing speaks against it."""
    if "\ufffd" in answer:
        return "bytes that are no UTF-8 (U+FFFD) in an answer"
    return "an answer that begins with its whole prompt" if len(prompt) >= LONG and answer.startswith(prompt) else ""


# ── One record as a conversation: its fields ──

Messages = tuple[dict[str, Any], ...]  # role, content, and whatever else the template reads

# The names under which data sets keep a speaker.
SPEAKERS = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "ipython"), "tool"),
}
LISTS = ("messages", "conversation", "conversations", "turns")  # fields of messages; `turns` may be the user's texts
PROMPTS = ("prompt", "instruction", "question", "query", "input")
CONTEXTS = ("input", "context", "passage")  # texts that a prompt is about
ANSWERS = ("answer", "completion", "response", "output", "chosen")
SYSTEMS = ("system", "system_prompt")
OF_MESSAGE = (*THINKING, *PREFILLS, "tool_calls", "tool_call_id", "name")  # kept for the template
REPEATED = {*PROMPTS, *CONTEXTS, *SYSTEMS}  # often hold a part of the messages again
# A question is another one without these.
OF_QUESTION = {
    *(*REPEATED, "history", "documents", "tools", "functions", "choices", "options"),
    *("image", "images", "video", "videos", "audio", "audios"),
}
LEARNT = ("train", "training", "loss")  # of a message: whether it is learnt from, as weight 0 and 1
# Whether an answer is a good one: KTO's `label`, LLaMA-Factory's `kto_tag`. `chosen` may also be the answer itself.
JUDGEMENTS = {"label": True, "kto_tag": True, "accepted": True, "chosen": True, "rejected": False}
VERDICTS = {
    **dict.fromkeys(("true", "1", "chosen", "accepted", "good"), True),
    **dict.fromkeys(("false", "0", "rejected", "bad"), False),
}
REJECTED = ("rejected", "rejected_response", "rejected_messages")  # answers that are not learnt
# Without these an answer is another one than the target's own.
OF_ANSWER: dict[str, tuple[Any, ...]] = {  # with the values at which they ask for nothing
    **dict.fromkeys(("prefill", "suffix", "chat_template"), ()),
    **{"continue_final_message": (False,), "add_generation_prompt": (True,), "response_format": ({"type": "text"},)},
}
# What chat templates write around turns. A text that holds one looks rendered.
RENDERED = re.compile(
    r"<\|im_start\|>|<\|start_header_id\|>|\[/INST\]|<start_of_turn>|<\|(?:user|assistant)\|>|<\|start_of_role\|>"
    r"|<｜(?:User|Assistant)｜>|<\|(?:User|Assistant)\|>|<\|start\|>(?:user|assistant)|<\|turn>(?:user|model)"
    r"|^(?:### (?:Response|Assistant)|Assistant|ASSISTANT):",
    re.M,
)
BEGINNING = 2000  # characters of a text in which it shows that a template has rendered it
UNANSWERED = {"role": "assistant", "content": "", "weight": 0}  # stands for an answer that a record lacks
NAMING = ("id", "idx", "index", "uuid")  # fields that name a record and say nothing about it, like those in _id
MOST_FIELDS = 20  # that are named; hostile records have a new one each


def form_of(record: Mapping[str, Any], source: Source) -> str | None:
    """How a record holds its text: the source's `form`, or what its fields say; None where no field is known."""
    if source.form != "auto":
        return source.form
    fields = Fields(record, source)
    found = fields.first("messages", LISTS)
    if isinstance(found, list) or (isinstance(found, str) and found.lstrip()[:1] == "["):
        return "messages"
    prompt = fields.first("prompt", PROMPTS)
    # Alpaca's `text` is its other fields as one text.
    whole = _says(prompt) and ("instruction" in fields.read or _says(fields.first("answer", ANSWERS)))
    is_text = isinstance(record.get(source.fields.get("text", "text")), str)
    if is_text and "prompt" not in source.fields and ("text" in source.fields or not whole):
        return "text"
    return None if prompt is None else "prompt"


class Fields:
    """The fields of a record by the source's names for them, and the names of those that were read."""

    def __init__(self, record: Mapping[str, Any], source: Source) -> None:
        self.record, self.names = record, source.fields
        self.read: set[str] = set()

    def first(self, kind: Any, known: Iterable[str]) -> Any:
        """The first of a kind's fields that says something, else the first that is there; None where none is."""
        names = [self.names[kind]] if kind in self.names else known
        there = [name for name in names if self.record.get(name) is not None]
        found = next((name for name in there if _says(self.record[name])), there[0] if there else None)
        self.read.update([found] if found is not None else [])
        return None if found is None else self.record[found]


def _says(value: Any) -> bool:
    """Whether a field holds anything; Alpaca writes `<noinput>` where there is none."""
    if isinstance(value, str):
        return value.strip().lower() not in ("", "<noinput>")
    return value is not None and not (isinstance(value, (list, dict)) and not value)


def unread_fields(record: Mapping[str, Any], read: Container[str]) -> list[str]:
    """The names of the fields that say something, were not read, and are more than a name of the record."""
    rest = (name for name, value in record.items() if name not in read and _says(value))
    return [name for name in rest if name not in NAMING and not name.endswith("_id")]


def count_fields(names: Iterable[str], of: str, dropped: Counter[str]) -> None:
    """Count fields that are not read, by their names up to MOST_FIELDS."""
    for name in names:
        reason = f"field `{name[:40]}` of {of}, which is not read"
        if reason not in dropped and sum(one.startswith("field `") for one in dropped) >= MOST_FIELDS:
            reason = "further fields, which are not read"
        dropped[reason] += 1


def read_conversation(
    record: Mapping[str, Any], form: str, source: Source, dropped: Counter[str]
) -> tuple[Messages, dict[str, Any]]:
    """The messages of a record, ending with an answer or with a question, and its own arguments of the chat template,
    `tools` and `documents` among them.

    Counts in `dropped` what is not read of it. ValueError, with the reason, where it is no conversation.
    """
    fields, noted = Fields(record, source), Counter[str]()  # counted where the whole record is read
    if form == "prompt":
        messages = _asked(fields, noted)
    else:
        given = fields.first("messages", LISTS)
        found = _parsed(given)
        texts = found if given is record.get("turns") and has_form(found, [str]) else None
        messages = _messages(found, noted) if texts is None else turns_of(texts)
    system = fields.first("system", SYSTEMS)
    if system is not None and not isinstance(system, str):
        raise ValueError("a system prompt that is not text")
    if system and system.strip():
        given = [one["content"] for one in messages if one["role"] == "system"]
        if given and system not in given:
            raise ValueError("two system prompts: a field and a message")
        if not given:
            messages.insert(0, {"role": "system", "content": system})
    arguments = template_arguments(fields)
    steering = (name for name, usual in OF_ANSWER.items() if _says(record.get(name)) and record[name] not in usual)
    if source.form == "auto" and (name := next(steering, None)):
        raise ValueError(f"a field `{name}`, which steers the answer")
    fields.read.update(OF_ANSWER)
    asked = _usable(tuple(_without_rejected(messages, fields, noted)), noted)
    if isinstance(record.get(fields.names.get("label", "category")), str):
        fields.read.add(fields.names.get("label", "category"))
    text = "\n".join(one["content"] for one in asked)
    unread = [
        name
        for name in unread_fields(record, fields.read)
        if not (name in REPEATED and str(record[name]).strip() in text)
    ]
    lost = OF_QUESTION | (set(THINKING) if asked[-1]["role"] == "assistant" else set())
    if missing := next((name for name in unread if name in lost and source.form == "auto"), None):
        raise ValueError(f"a field `{missing}` beside the {form}: name it in the source's `fields`, or set its `form`")
    count_fields(unread, "records", noted)
    dropped.update(noted)
    return asked, arguments


def _parsed(value: Any) -> Any:
    """A value that some data sets keep as text: JSON, or Python's spelling of a list, as pandas writes it into csv."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
        if value.lstrip()[:2] in ("[{", "['", '["'):
            with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                return ast.literal_eval(value.strip())
    return value


def _listed(value: Any) -> Any:
    """A prompt or an answer, which may be a list of messages or of texts written as text; other texts as they are."""
    found = _parsed(value) if isinstance(value, str) and value.lstrip()[:1] == "[" else value
    if isinstance(found, list) and found and (has_form(found, [{}]) or has_form(found, [str])):
        return found
    if isinstance(value, str) and re.match(r"\s*\[\s*\{\s*[\"'](role|from|content|value)[\"']", value):
        raise ValueError("a list of messages that is neither JSON nor Python")
    return value


def turns_of(texts: Sequence[str]) -> list[dict[str, Any]]:
    """The messages of a user's turns, each of which the target is to answer."""
    found: list[dict[str, Any]] = []
    for text in texts:
        found += [{"role": "user", "content": text}, UNANSWERED]
    return found[:-1]


def _without_rejected(messages: list[dict[str, Any]], fields: Fields, dropped: Counter[str]) -> list[dict[str, Any]]:
    """The messages without an answer that the record calls a bad one, and with the answers before it not learnt."""
    for name in REJECTED:
        if _says(fields.record.get(name)) and not isinstance(fields.record[name], bool):
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
        answers = sum(one["role"] == "assistant" for one in messages)
        if verdict is good or not answers:
            continue
        dropped[f"answers marked as rejected (`{name}`), which are not learnt"] += answers
        if messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        messages = [one | ({"weight": 0} if one["role"] == "assistant" else {}) for one in messages]
    return messages


# ── A prompt, what it is about, and an answer ──


def _asked(fields: Fields, dropped: Counter[str]) -> list[dict[str, Any]]:
    """The messages of a prompt with its context, after the turns of its `history`, and of its answer."""
    prompt = _listed(fields.first("prompt", PROMPTS))
    if has_form(prompt, [str]) and prompt:  # the user's turns, as MT-Bench has them
        messages = turns_of(prompt)
    elif isinstance(prompt, list):  # messages before the answer, as preference data sets have them
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
        raise ValueError("an answer behind several turns, of which the others have none")
    if answer[: len(messages)] == messages:  # UltraFeedback's `chosen` is the whole conversation
        return answer
    if any(one["role"] == "user" for one in answer):
        raise ValueError("an answer that holds other questions")
    return messages + answer


def _contexts(fields: Fields, prompt: str) -> list[str]:
    """The texts that a prompt is about; those that it already holds left out."""
    found = []
    names = [fields.names["context"]] if "context" in fields.names else CONTEXTS
    for name in names:
        text = fields.record.get(name)
        if name in fields.read or not _says(text):
            continue
        if not isinstance(text, str):
            raise ValueError(f"a field `{name}` that is not text")
        fields.read.add(name)
        found += [text] if text.strip() not in prompt else []
    return found


def _answer(fields: Fields, dropped: Counter[str]) -> list[dict[str, Any]]:
    """The messages of an answer, with the thinking before it; none where the record has no answer that is text."""
    answer = _listed(fields.first("answer", ANSWERS))
    if isinstance(answer, list) and not has_form(answer, [str]):
        return _messages(answer, dropped)
    if answer is None:  # SQuAD's, and lists of answers that all are right
        several = fields.first("answers", ("answers",))
        answer = several.get("text") if isinstance(several, dict) else several
    if isinstance(answer, list) and answer and has_form(answer, [str]):
        if further := len(set(answer[1:]) - {answer[0]}):
            dropped["answers of a question beyond its first"] += further
        answer = answer[0]
    if not isinstance(answer, str):
        fields.read -= {*ANSWERS, "answers", fields.names.get("answer", "")}
        return []
    thinking = {name: fields.record[name] for name in THINKING if _says(fields.record.get(name))}
    if not answer.strip() and not thinking:
        return []
    fields.read.update(thinking)
    return [normal({"role": "assistant", "content": answer, **thinking})]


def template_arguments(fields: Fields) -> dict[str, Any]:
    """The arguments that a record gives the chat template; ValueError where they are of another kind."""
    arguments = _parsed(fields.first("chat_template_kwargs", ("chat_template_kwargs",))) or {}
    if not isinstance(arguments, dict):
        raise ValueError("`chat_template_kwargs` that are not an object")
    arguments = efforts(fields.record) | arguments
    fields.read.update(name for name in EFFORTS if efforts({name: fields.record.get(name)}))
    for name in ("tools", "documents"):
        if (found := _parsed(fields.first(name, (name,)))) and not has_form(found, [{}]):
            raise ValueError(f"`{name}` that are not a list of objects")
        arguments |= {name: found} if found else {}
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
    return [message_of(one, dropped) for one in value]


def message_of(one: Any, dropped: Counter[str]) -> dict[str, Any]:
    """A message of any known form: `normal`, with the role that templates know, and with weight 0 where it is not
    learnt. Of several parts of text, `parts` has each.

    Counts in `dropped` the fields that are not read. ValueError, with the reason, for one that cannot be kept.
    """
    if not isinstance(one, dict):
        raise ValueError("a message that is not a mapping")
    role = str(one.get("role", one.get("from"))).lower()
    if role not in SPEAKERS:
        raise ValueError(f"a message of the unknown role {role[:20]!r}")
    if one.get("function_call"):
        raise ValueError("a message with a `function_call`: write it as `tool_calls`")
    kept = {name: one[name] for name in OF_MESSAGE if _says(one.get(name))}
    content, parts = _joined(one["content"] if "content" in one else one.get("value"))
    message = normal({"role": SPEAKERS[role], "content": content, **kept})
    message |= {"parts": parts} if len(parts) > 1 else {}
    weight = one.get("weight")
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        raise ValueError("a message whose `weight` is neither 0 nor 1")
    if wrong := next((name for name in LEARNT if not isinstance(one.get(name, False), bool | None)), None):
        raise ValueError(f"a message whose `{wrong}` is neither true nor false")
    if message["role"] == "assistant" and (weight == 0 or any(one.get(name) is False for name in LEARNT)):
        message["weight"] = 0
    if role == "developer":
        dropped["messages of the role developer, read as the system's"] += 1
    read = {"role", "from", "weight", *LEARNT, "content" if "content" in one else "value", *OF_MESSAGE}
    count_fields(unread_fields(one, read), "messages", dropped)
    return message


def _joined(content: Any) -> tuple[Any, list[str]]:
    """A message's content with its parts of text as one, and these parts."""
    if not has_form(content, [{}]):
        return content, []
    texts = [part for part in content if part.get("type", "text") in TEXT_PARTS and isinstance(part.get("text"), str)]
    others = [part for part in content if part not in texts]
    parts = [part["text"] for part in texts]
    return ([*others, {"text": "".join(parts)}] if texts else content), parts


def _usable(messages: Messages, dropped: Counter[str]) -> Messages:
    """The messages up to the last question or answer; ValueError where a model cannot be asked them."""
    roles = [one["role"] for one in messages]
    while roles and roles[-1] in ("system", "tool"):
        dropped[f"messages of the role {roles.pop()} that nothing follows"] += 1
    if "user" not in roles:
        raise ValueError("no user's turn")
    if "assistant" in roles and roles.index("assistant") < roles.index("user"):
        raise ValueError("an answer before the first question")
    if not all(one["content"].strip() for one in messages[: len(roles)] if one["role"] == "user"):
        raise ValueError("an empty question")
    return messages[: len(roles)]


def questions(messages: Messages, arguments: Mapping[str, Any] | None = None) -> str:
    """The text that names a conversation: all but its answers."""
    given = {name: value for name, value in (arguments or {}).items() if name in ("tools", "documents")}
    asked: list[Any] = []
    before = ""
    for one in messages:
        if one["role"] != "assistant":  # what is asked together is another question than what is asked in turn
            asked.append([one["role"], one["content"], *(["together"] if before == "user" else [])])
        before = one["role"]
    return json.dumps([*asked, given] if given else asked)
