"""Chats and recorded requests for scripts/fuzz/fuzz.py, each with what is right.

A chat must give the same answer ids as the whole rendered chat (tests/chat_templates.py). A request must give lines
with the target's words, in whatever pieces they came. What steers an answer is left out by name. Unknown fields are
named.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import chat_templates
import tokenizer_kinds
from hypothesis import strategies as st

WORDS = ("The", "bridge", "a", "4", "1999", "naïve", "你好", "🙂", "e\u0301", "it's", "x=1", "_n_", "ไทย", "שלום", "½")
BETWEEN = (" ", " ", " ", "  ", "\n", "\n\n", "\t", "", ". ", ", ", ":", "▁", "<tool>", "<end>", "</s>", "\u00a0")
STYLES = [*chat_templates.TURNS, *(style for style in chat_templates.STYLES if style != "r1")]


@st.composite
def texts(draw: Any) -> str:
    """Return words with anything between, before and after them."""
    pieces = draw(st.lists(st.tuples(st.sampled_from(BETWEEN), st.sampled_from(WORDS)), min_size=1, max_size=8))
    return "".join(between + word for between, word in pieces) + draw(st.sampled_from(BETWEEN))


chats = st.tuples(
    st.sampled_from(list(tokenizer_kinds.KINDS)),
    st.sampled_from(STYLES),
    st.booleans(),
    st.lists(texts(), min_size=1, max_size=3),
    texts(),
    st.booleans(),
)


@cache
def tokenizer_of(kind: str, style: str, trim: bool) -> Any:
    """Return a tokenizer of a kind with a template."""
    from transformers import PreTrainedTokenizerFast

    own = tokenizer_kinds.with_bos(tokenizer_kinds.KINDS[kind]())
    found = PreTrainedTokenizerFast(tokenizer_object=own, bos_token="<s>", eos_token="<end>")
    if style in chat_templates.TURNS:
        return chat_templates.with_turns(found, style, trim)
    return chat_templates.dress(found, style)


def fault_of_chat(given: tuple[Any, ...]) -> str | None:
    """Describe how the ids of an answer differ from those of the whole chat. None if they do not."""
    from distill.data.chat_template import ChatTemplate
    from distill.recipe import Chat

    kind, style, trim, asked, content, ended = given
    messages = [{"role": "user", "content": asked[0]}]
    for text in asked[1:]:
        messages += [{"role": "assistant", "content": "Four."}, {"role": "user", "content": text}]
    template = ChatTemplate(tokenizer_of(kind, style, trim), Chat())
    return chat_templates.fault_of_answer(template, [*messages, {"role": "assistant", "content": content}], ended)


# ── Requests ──

STEER: dict[str, Any] = {
    **{name: {"a": 1} for name in ("structured_outputs", "guided_json", "guided_choice", "json_schema")},
    **dict.fromkeys(("grammar", "ebnf", "regex", "guided_regex", "suffix", "chat_template", "prefill"), "x"),
    **dict.fromkeys(("continue_final_message", "echo", "ignore_eos"), True),
    **{"response_format": {"type": "json_object"}, "logit_bias": {"1": 5}, "add_generation_prompt": False},
    **{"bad_words": ["x"], "allowed_token_ids": [1], "functions": [{"name": "f"}], "min_tokens": 4},
}
PLAIN: dict[str, Any] = {
    **{"temperature": 0.0, "top_k": 0, "top_p": 1, "seed": 3, "n": 1, "user": "u", "stream": True, "max_tokens": 9},
    **{"response_format": {"type": "text"}, "logit_bias": {}, "min_tokens": 0, "echo": False, "grammar": None},
    **{"ignore_eos": False, "guided_json": None, "add_generation_prompt": True, "suffix": ""},
}
UNKNOWN = {"mood": "sad", "guides": [1], "x-trace": {"a": 1}, "Grammar": "y", "colour": 3}
EFFORTS = (None, "low", "none", "high")


@st.composite
def requests(draw: Any) -> dict[str, Any]:
    """Return a request with some of these fields, a reply of one or two choices, and how it is cut into events."""
    fields = {name: PLAIN[name] for name in draw(st.sets(st.sampled_from(list(PLAIN)), max_size=4))}
    unknown = draw(st.sets(st.sampled_from(list(UNKNOWN)), max_size=2))
    steer = draw(st.none() | st.none() | st.sampled_from(list(STEER)))
    effort = draw(st.sampled_from(EFFORTS))
    fields |= {name: UNKNOWN[name] for name in unknown} | ({} if steer is None else {steer: STEER[steer]})
    fields |= {} if effort is None else {"reasoning_effort": effort}
    number = iter(range(100))
    said = [
        {
            # No text begins with the same character twice.
            # A piece that repeats the one before it is dropped.
            name: "So, "
            + " ".join(f"{next(number)}{draw(st.sampled_from(WORDS))}" for _ in range(draw(st.integers(3, 6))))
            for name in ("content", *(["reasoning_content"] if draw(st.booleans()) else []))
        }
        for _ in range(draw(st.integers(1, 2)))
    ]
    cuts = draw(st.lists(st.integers(1, 3), min_size=2, max_size=12))
    how = draw(st.sampled_from(["whole", "pieces", "pieces", "cumulative", "whole at the end"]))
    return {"fields": fields, "steer": steer, "unknown": unknown, "said": said, "cuts": cuts, "how": how,
            "index": draw(st.booleans()), "finish": draw(st.sampled_from(["stop", "length"]))}  # fmt: skip


def _pieces(text: str, cuts: list[int], how: str) -> list[str]:
    """Cut a text into pieces of UTF-16. A cut may halve a character."""
    units = text.encode("utf-16-le")
    found, start = [], 0
    for size in [*cuts, len(units)]:
        found.append(units[start : start + 2 * size].decode("utf-16-le", "surrogatepass"))
        start += 2 * size
    found = [one for one in found if one]
    if how == "cumulative":
        return ["".join(found[: at + 1]) for at in range(len(found))]
    return [*found, text] if how == "whole at the end" else found


def bodies(given: dict[str, Any]) -> tuple[bytes, bytes]:
    """Return the request and the reply as they pass the recorder."""
    asked = {"messages": [{"role": "user", "content": "2 + 2?"}], **given["fields"]}
    several = given["index"] or (len(given["said"]) > 1 and given["how"] != "whole")

    def choice(at: int, part: dict[str, Any], key: str, finish: str | None) -> dict[str, Any]:
        return {key: part, "finish_reason": finish} | ({"index": at} if several else {})

    if given["how"] == "whole":
        choices = [choice(at, dict(one), "message", given["finish"]) for at, one in enumerate(given["said"])]
        return json.dumps(asked).encode(), json.dumps({"choices": choices}).encode()
    events = []
    for at, one in enumerate(given["said"]):
        for name in sorted(one, reverse=True):  # Thinking comes first.
            for piece in _pieces(one[name], given["cuts"], given["how"]):
                events.append({"choices": [choice(at, {name: piece}, "delta", None)]})
        events.append({"choices": [choice(at, {}, "delta", given["finish"])]})
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    return json.dumps(asked).encode(), stream.encode()


def fault_of_request(given: dict[str, Any]) -> str | None:
    """Describe how a recorder changes an exchange. None if it does not."""
    from distill.data.recorder import CHAT, read_exchange
    from distill.data.traffic import Line, parse_line

    found = list(read_exchange(CHAT, *bodies(given)))
    if out := given["unknown"] | ({given["steer"]} - {None}):
        named = len(found) == 1 and isinstance(found[0], str) and any(f"`{name}`" in found[0] for name in out)
        return None if named else f"steered by {out}: {found}"
    lines = [one for one in found if not isinstance(one, str)]
    own = [
        {name: line["messages"][-1].get(name) for name in one} for line, one in zip(lines, given["said"], strict=False)
    ]
    if own != given["said"] or len(lines) != len(given["said"]):
        return f"said {given['said']}, recorded {lines}"
    effort = given["fields"].get("reasoning_effort")
    wanted = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    for line in lines:
        read = parse_line(json.dumps(line).encode(), 1)
        if not isinstance(read, Line) or read.arguments != wanted or read.ended != (given["finish"] == "stop"):
            return f"{line} is read as {read}"
    return None
