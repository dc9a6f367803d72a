"""Conversations for scripts/fuzz/fuzz.py. A record must be read as the template renders it, or counted as left out.

The record is written to a file and read as a source of the corpus. Each resulting prompt and answer is compared with
transformers' `apply_chat_template` on the record's messages as written, with an independent conversion.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import chat_templates
import tokenizer_kinds
from fuzz_inputs import weighted
from hypothesis import strategies as st

TEMPLATES = {**chat_templates.STYLES, **chat_templates.FURTHER}
STYLES = [*TEMPLATES, *(f"{name}{trim}" for name in chat_templates.TURNS for trim in ("", ", trimmed"))]
END = "END-OF-TURN"  # It is replaced by the style's end token.
THINKING = ("reasoning_content", "reasoning", "thinking")
ALIASES = {"human": "user", "gpt": "assistant", "developer": "system", "observation": "tool", "ipython": "tool"}
ROLES = ("user", "user", "user", "assistant", "assistant", "assistant", "system", "tool", *ALIASES)
ANSWER, WORD = "Some answer.", re.compile(r"\bw\d+")
OPEN = ("<think>", "</think>")
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@st.composite
def contents(draw: Any) -> Any:
    """Return a text of different words, sometimes with an end token, thinking, several parts, or nothing at all."""
    word = f"w{draw(st.integers(0, 10**9))}"
    text = draw(st.sampled_from(["", "", "", " ", "\n"])) + word + draw(st.sampled_from([" é!", "", "\n", "  x"]))
    form = draw(st.integers(0, 15))
    if form == 0:
        return draw(st.sampled_from(["", None, [], " ", 5, {}]))
    if form == 1:
        return [{"type": "text", "text": text}, *([{"type": "text", "text": " more"}] if draw(st.booleans()) else [])]
    if form == 2:
        return text + draw(st.sampled_from([END, END + "\n", f"{END}\n{END}", f" {END} and more", "<|eot_id|>"]))
    if form == 3:
        return f"<think>\nhm {word}\n</think>\n\n{text}"
    if form == 4:
        return draw(st.sampled_from([f"[INST] {text} [/INST]", f"### Response: {text}", f"</think>{text}"]))
    return text


@st.composite
def messages(draw: Any) -> list[Any]:
    """Return messages of roles in any order. Most are questions and answers in turn."""
    found = []
    for number in range(draw(st.integers(1, 7))):
        role = ("user", "assistant")[number % 2] if draw(st.integers(0, 2)) else draw(st.sampled_from(ROLES))
        one = {"role": role, "content": draw(contents())}
        if role in ("assistant", "gpt"):
            if draw(st.integers(0, 5)) == 0:
                one[draw(st.sampled_from(THINKING))] = f"thought {number}"
            if draw(st.integers(0, 7)) == 0:
                arguments: Any = {"a": number}
                arguments = arguments if draw(st.booleans()) else json.dumps(arguments)
                function = {"name": "add", "arguments": arguments}
                one["tool_calls"] = [{"id": "c", "type": "function", "function": function}]
            if draw(st.integers(0, 9)) == 0:
                one["weight"] = draw(st.sampled_from([0, 1]))
        found.append(one)
    return found


@st.composite
def inputs(draw: Any) -> dict[str, Any]:
    """Return a style, the form of the record, its messages, and its further fields."""
    form = draw(weighted((8, st.just("messages")), (1, st.just("text")), (2, st.just("prompt"))))
    cut = draw(st.sampled_from(["whole", "whole", "begun", "cut", "other"]))
    more: dict[str, Any] = {}
    if draw(st.integers(0, 6)) == 0:
        more["tools"] = TOOLS
    if draw(st.integers(0, 9)) == 0:
        more["documents"] = [{"title": "t", "text": "a book"}]
    if draw(st.integers(0, 9)) == 0:
        more["system"] = "Be brief, or not."
    return {
        "style": draw(st.sampled_from(STYLES)),
        "form": form,
        "cut": cut,
        "messages": draw(messages()),
        "more": more,
    }


@cache
def tokenizer_of(style: str) -> Any:
    """Return a tokenizer with a style's template."""
    from transformers import PreTrainedTokenizerFast

    own = tokenizer_kinds.byte_level("qwen2")
    found = PreTrainedTokenizerFast(tokenizer_object=own, bos_token="<s>", eos_token="<end>")
    if style in TEMPLATES:
        return chat_templates.dress(found, style)
    name, _, trim = style.partition(", ")
    return chat_templates.with_turns(found, name, bool(trim))


def as_written(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a record's messages as a template reads them: roles, thinking under each name, arguments as objects."""
    found = []
    for one in record["messages"]:
        role = ALIASES.get(one["role"], one["role"])
        content = one["content"]
        if isinstance(content, list) and len(content) == 1:
            content = content[0]["text"]
        own = {"role": role, "content": "" if content in (None, []) else content}
        thought = next((one[name] for name in THINKING if name in one), None)
        own |= {} if thought is None else dict.fromkeys(THINKING, thought)
        calls = []
        for call in one.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            calls.append({**call, "function": {**call["function"], "arguments": arguments}})
        found.append(own | ({"tool_calls": calls} if calls else {}))
    if record.get("system") and not any(one["role"] == "system" for one in found):
        found.insert(0, {"role": "system", "content": record["system"]})
    return found


def rendered(tokenizer: Any, talk: list[dict[str, Any]], record: dict[str, Any], generate: bool) -> str:
    """Return the template's own rendering. If it refuses objects, arguments of calls are text."""
    given = {name: record[name] for name in ("tools", "documents") if name in record}
    try:
        return str(tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=generate, **given))
    except Exception:
        if not any("tool_calls" in one for one in talk):
            raise
        talk = json.loads(json.dumps(talk))
        for call in (call for one in talk for call in one.get("tool_calls", ())):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        return str(tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=generate, **given))


def record_of(given: dict[str, Any], tokenizer: Any) -> dict[str, Any] | None:
    """Return an input's record: of messages, or of the text that the template renders. None if it renders none."""
    end = str(tokenizer.eos_token) if given["style"] not in TEMPLATES else TEMPLATES[given["style"]][2]
    own = json.loads(json.dumps(given["messages"]).replace(END, end))
    record = {"messages": own, **given["more"]}
    if given["form"] == "messages":
        return record
    try:
        talk = as_written({"messages": own})
        if given["form"] == "prompt":
            while talk and talk[-1]["role"] != "user":
                talk.pop()
        text = rendered(tokenizer, talk, {}, generate=given["form"] == "prompt" and given["cut"] != "cut")
    except Exception:
        return None
    if given["cut"] == "begun":
        text += "Well,"
    if given["form"] == "text":
        return {"text": text[:-3] if given["cut"] == "cut" else text}
    return {"prompt": text, "answer": "An answer of its own."}


def fault_of_conversation(given: dict[str, Any]) -> str | None:
    """Describe what of a record is neither the template's rendering nor counted. None for nothing."""
    from distill.data.chat_template import ChatTemplate, reader_of
    from distill.data.prompts import ChatPrompts
    from distill.data.sources import read_documents
    from distill.errors import DataError
    from distill.recipe import Chat, Corpus, Source

    tokenizer = tokenizer_of(given["style"])
    record = record_of(given, tokenizer)
    if record is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "r.jsonl")
        path.write_text(json.dumps(record) + "\n", encoding="utf-8")
        corpus = Corpus(sources=(Source(kind="jsonl", path=str(path), split="train"),))
        try:
            documents, dropped = read_documents(corpus, (), talk_of=reader_of(tokenizer))
        except DataError as error:
            return None if "has no text: 1 " in str(error) else f"refused: {error}"
        document = documents[0] if len(documents) else None
    if document is None:
        return None if dropped.total() else "a record is gone, and nothing is counted"
    chat = ChatPrompts(ChatTemplate(tokenizer, Chat()), 10**6, 0)
    if given["form"] == "text":
        return _fault_of_text(record["text"], document, chat, dropped)
    if given["form"] == "prompt":
        return _fault_of_prompt(record["prompt"], given, document, chat)
    return _fault_of_messages(record, document, chat, dropped)


def _fault_of_text(text: str, document: Any, chat: Any, dropped: Counter[str]) -> str | None:
    """Check that a rendered text is read as the conversation that renders to it, or is reported to look rendered."""
    if document.messages is None:
        looks = chat.template.looks_rendered(text)
        return None if dropped.total() or not looks else "a rendered text is read as plain text without a word"
    bos = chat.template.tokenizer.bos_token or ""
    forms = [rendered(chat.template.tokenizer, list(document.messages), {}, generate=begun) for begun in (False, True)]
    if text.strip().removeprefix(bos).strip() not in [form.strip().removeprefix(bos).strip() for form in forms]:
        return f"{text!r} is read as {document.messages}"
    return _fault_of_messages({"messages": list(document.messages)}, document, chat, dropped)


def _fault_of_prompt(text: str, given: dict[str, Any], document: Any, chat: Any) -> str | None:
    """Check that a rendered prompt is asked unchanged, with the beginning of an answer, or left out and counted."""
    tokenizer = chat.template.tokenizer
    sample = chat.prompt(document)
    if sample is None:
        return None if chat.dropped.total() else "a prompt is gone, and nothing is counted"
    found = tokenizer.decode(sample.prompt)
    if found in (text, text.lstrip()):
        return None
    whole = rendered(tokenizer, [{"role": "user", "content": text}], {}, generate=True)
    if found == whole and not chat.template.looks_rendered(text):
        return None
    headed = found.startswith(text.rstrip()) and given["cut"] == "cut"
    return None if headed else f"the rendered prompt {text!r} is asked as {found!r}"


def _without_ends(talk: list[dict[str, Any]], end: str) -> list[dict[str, Any]]:
    return [
        {**one, "content": one["content"].partition(end)[0]}
        if one["role"] == "assistant" and end in one["content"]
        else one
        for one in talk
    ]


def _fault_of_messages(record: dict[str, Any], document: Any, chat: Any, dropped: Counter[str]) -> str | None:
    from distill.data.chat_template import next_prompt

    tokenizer, talk = chat.template.tokenizer, as_written(record)
    if len(talk) > len(document.messages):
        if not dropped.total():
            return f"{len(talk)} messages, {len(document.messages)} read, and nothing is counted"
        talk = talk[: len(document.messages)]
    answers = [at for at, one in enumerate(talk) if one["role"] == "assistant"]
    first = answers[0] if answers else len(talk)
    sample = chat.prompt(document)
    if sample is None and not chat.dropped.total():
        return "a prompt is gone, and nothing is counted"
    if sample is not None and sample.chat is None:  # Its only question is a rendered prompt.
        return None if chat.dropped.total() else "a rendered prompt is asked without a word"
    if sample is not None:
        asked = [{"role": "assistant", "content": ANSWER} if one["role"] == "assistant" else one for one in talk]
        turns = [at for at in range(first, len(talk)) if at + 1 == len(talk) or talk[at + 1]["role"] == "assistant"]
        turns = [at + 1 for at in turns if talk[at]["role"] != "assistant"] if answers else []
        places = [first, *turns]
        for number, place in enumerate(places[: 1 + len(sample.chat["turns"])]):
            found = tokenizer.decode(next_prompt(chat.template, sample.chat, [ANSWER] * number) or [])
            own = rendered(tokenizer, asked[:place], record, generate=True)
            if found != own:
                return f"turn {number} is asked as {found!r}, and the template writes {own!r}"
            for one in asked[:place]:
                if one["role"] != "assistant" and not all(word in own for word in WORD.findall(str(one["content"]))):
                    return f"{one} is in no prompt"
        count = 1 + len(sample.chat["turns"])
        if count < min(len(places), chat.template.settings.turns) and not chat.dropped.total():
            return f"{len(places)} turns, {count} asked, and nothing is counted"
    return _fault_of_answers(record, talk, answers, document, chat)


def _fault_of_answers(
    record: dict[str, Any], talk: list[dict[str, Any]], answers: list[int], document: Any, chat: Any
) -> str | None:
    """Check that each learnt answer follows its prompt as the template writes it, and that all others are counted."""
    from distill.data.prompts import SPELLED_END

    tokenizer = chat.template.tokenizer
    end = tokenizer.decode(chat.template.end)
    learnt = [at for at in answers if document.messages[at].get("weight") != 0]
    before = Counter(chat.dropped)
    samples = [(tokenizer.decode(prompt), tokenizer.decode(answer)) for prompt, answer in chat.given(document)]
    left = sum(count for reason, count in (chat.dropped - before).items() if reason != SPELLED_END)
    if len(samples) + left < len(learnt):
        return f"{len(learnt)} answers, {len(samples)} samples, {left} counted"
    bare = _without_ends(talk, end)
    wanted = []
    for at in learnt:
        try:
            prompt = rendered(tokenizer, bare[:at], record, generate=True)
            whole = rendered(tokenizer, bare[: at + 1], record, generate=False)
        except Exception:
            continue
        wanted.append((prompt, whole, bare[at]))
    for prompt, answer in samples:
        if not any(_is_written(prompt, answer, end, *one) for one in wanted):
            return f"{answer!r} behind {prompt!r} is none of {wanted}"
    return None


def _is_written(prompt: str, answer: str, end: str, own: str, whole: str, message: dict[str, Any]) -> bool:
    """Whether a sample is what the template writes: prompt and answer of the whole chat, up to the end of the turn.

    After a thinking block that the prompt opens or closes, the answer as it was written and an end also count.
    """
    if prompt != own:
        return False
    both = prompt + answer
    if whole.startswith(both) and not whole[len(both) :].strip() and (answer.endswith(end) or "tool_calls" in message):
        return True
    opened = own.rstrip().endswith(OPEN) or "<think>" in answer or "</think>" in str(message["content"])
    said = str(message["content"]).rpartition("</think>")[2].strip()
    thought = str(message.get("thinking", "")).strip()
    return opened and answer.endswith(end) and said in answer and thought in answer
