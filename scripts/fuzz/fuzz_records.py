"""Records of any fields for scripts/fuzz/fuzz.py, and the proof that nothing in them is lost silently.

Every text and number of a record is a unique mark. A mark must be in the record's document, in the role of its field,
or its field must be among the dropped ones. Otherwise the whole record was left out and counted.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from fuzz_inputs import scalars, weighted
from hypothesis import strategies as st

TEXT, NUMBER = "@", -7  # They are replaced by marks.
KINDS = ("type", "role", "from")  # Texts of these keys are not content.
PROMPTS = ("prompt", "instruction", "question", "query", "input", "context", "passage")
ANSWERS = ("answer", "completion", "response", "output")
THINKING = ("reasoning", "reasoning_content", "thinking", "reasoning_details")
UNKNOWN = ("score", "meta", "Reasoning", "thoughts", "notes", "source", "chosen", "rationale")
QUESTION = ("choices", "options", "image", "audio", "functions")
COUNTED = ("field `", "further fields", "answers of", "messages of", "template argument")  # counts of kept records

HOLDERS = ("messages", "conversations", "conversation", "turns", *PROMPTS, *ANSWERS, "answers")  # keys with messages
ROLES = ("system", "user", "assistant", "tool")

text = st.just(TEXT)
thought = st.sampled_from([TEXT, TEXT, [{"type": "reasoning.text", "text": TEXT}], [{"type": "thinking"}], None, ""])
parts = st.lists(
    st.fixed_dictionaries({"type": st.sampled_from(["text", "thinking", "reasoning", "image_url"]), "text": text}),
    max_size=3,
)
odd = weighted((3, scalars), (2, st.just(NUMBER)), (2, st.just({"a": TEXT})), (2, st.just([TEXT, NUMBER])), (1, text))
turn = st.fixed_dictionaries(
    {"content": weighted((12, text), (2, parts), (1, odd))},
    optional={
        **dict.fromkeys(THINKING, weighted((4, thought), (1, odd))),
        "weight": st.sampled_from([0, 1, 0.5, "0", None]),
        "tool_calls": weighted(
            (3, st.just([{"type": "function", "function": {"name": TEXT, "arguments": '{"a": "@"}'}}])), (1, odd)
        ),
        **dict.fromkeys(("rating", "value", "function_call"), weighted((3, text), (1, odd))),
    },
)
speakers = ["user", "human", "assistant", "gpt", "system", "tool", "function", "narrator", "User"]


@st.composite
def conversations(draw: Any) -> Any:
    """Return lists of messages: mostly questions and answers in turn, with a few fields of a message kept."""
    found = []
    for number in range(draw(st.integers(0, 4))):
        one = dict(draw(turn))
        few = draw(st.sampled_from([0, 0, 1, 2, 9]))
        kept = {name: one[name] for at, name in enumerate(one) if name == "content" or at <= few}
        usual = ("user", "assistant")[number % 2]
        role = usual if draw(st.integers(0, 5)) else draw(st.sampled_from(speakers))
        names = ("role", "content") if draw(st.integers(0, 3)) else ("from", "value")
        found.append({**kept, names[0]: role, names[1]: kept["content"]})
        if names[1] == "value":
            del found[-1]["content"]
    return json.dumps(found) if draw(st.integers(0, 9)) == 0 else found


FIELDS = {
    **dict.fromkeys(PROMPTS, weighted((6, text), (1, conversations()), (1, odd))),
    **dict.fromkeys(ANSWERS, weighted((6, text), (1, conversations()), (1, odd))),
    **dict.fromkeys(("messages", "conversations", "conversation"), weighted((6, conversations()), (1, odd))),
    "turns": weighted((3, st.just([TEXT, TEXT])), (1, conversations()), (1, odd)),
    **dict.fromkeys(THINKING, weighted((4, thought), (1, odd))),
    **dict.fromkeys((*UNKNOWN, *QUESTION), weighted((3, text), (2, odd))),
    **dict.fromkeys(("system", "system_prompt", "category", "text"), weighted((4, text), (1, odd))),
    "history": weighted((3, st.just([[TEXT, TEXT]])), (1, odd)),
    "answers": weighted((3, st.just({"text": [TEXT, TEXT], "answer_start": [0, 1]})), (1, odd)),
    "tools": weighted((3, st.just([{"type": "function", "function": {"name": TEXT}}])), (1, odd)),
    "documents": weighted((3, st.just([{"title": TEXT, "text": TEXT}])), (1, odd)),
    "chat_template_kwargs": weighted((3, st.just({"enable_thinking": True, "mood": TEXT})), (1, odd)),
    "id": odd,
}
FORMS = [("messages",), ("conversations",), ("turns",), ("prompt",), ("instruction", "input"), ("question", "context")]


@st.composite
def records(draw: Any) -> list[Any]:
    """Return a few records, most of a known form with up to four further fields. Every text and number is a mark."""
    found = []
    for _ in range(draw(st.integers(1, 3))):
        names = list(draw(st.sampled_from(FORMS))) if draw(st.integers(0, 40)) else []
        names += [*draw(st.sampled_from([(), ("answer",), ("output",)]))]
        names += draw(st.lists(st.sampled_from(list(FIELDS)), max_size=4))
        found.append({name: draw(FIELDS[name]) for name in dict.fromkeys(names)})
    number = iter(range(1, 10_000))
    return [_marked(one, number) for one in found]


def _marked(value: Any, number: Iterator[int]) -> Any:
    if isinstance(value, dict):
        return {name: inner if name in KINDS else _marked(inner, number) for name, inner in value.items()}
    if isinstance(value, list):
        return [_marked(inner, number) for inner in value]
    if isinstance(value, str):
        whole = value if TEXT in value or not value.strip() else f"{value[:300]} {TEXT}"
        return re.sub(TEXT, lambda _: f"mark{next(number):04d}", whole)
    return int(f"77{next(number):04d}77") if value == NUMBER and not isinstance(value, bool) else value


MARK = re.compile(r"mark\d{4}|77\d{4}77")


def marks(value: Any) -> set[str]:
    """Return all marks in a JSON value."""
    return set(MARK.findall(json.dumps(value)))


def lost(given: list[Any], documents: list[Any], dropped: Counter[str]) -> str | None:
    """Describe what of the records is in no document and no count, or in a wrong role. None for nothing."""
    held = [(document, marks([document.text, document.messages, document.arguments])) for document in documents]
    unread: Counter[str] = Counter()
    left_out = 0
    for record in given:
        own = [(document, found) for document, found in held if found & marks(record)]
        if not own:
            left_out += 1
            continue
        document, found = own[0]
        missing = {name for name, value in record.items() if marks(value) - found and name not in ("id", "category")}
        unread.update(missing)
        if wrong := _in_another_role(record, document):
            return wrong
    for name, count in unread.items():
        named = dropped[f"field `{name}` of records, which is not read"]
        inside = any(of in reason for reason in dropped for of in ("of messages", "messages of", "answers of"))
        if named < count and not (name in HOLDERS and inside):
            return f"{count} values of `{name}` are nowhere, and {named} are counted"
    reasons = sum(number for reason, number in dropped.items() if not reason.startswith(COUNTED))
    return None if reasons == left_out else f"{left_out} records left out, and {reasons} counted"


def _in_another_role(record: dict[str, Any], document: Any) -> str | None:
    """Return a mark of a question, an answer or thinking that the document has elsewhere."""
    if document.messages is None:
        return None
    by_role = {role: marks([one["content"] for one in document.messages if one["role"] == role]) for role in ROLES}
    contents = set().union(*by_role.values())
    for names, role in ((PROMPTS, "user"), (ANSWERS, "assistant")):
        for name in names:
            value = record.get(name)
            if isinstance(value, str) and value[:1] != "[" and marks(value) & contents - by_role[role]:
                return f"`{name}` stands in another role than {role}"
    spelled = [record.get(name) for name in THINKING]
    for name in ("messages", "conversations", "conversation"):
        inner = record.get(name)
        spelled += [one.get(key) for one in inner for key in THINKING] if isinstance(inner, list) and inner else []
    return "thinking stands in the text of a message" if marks(spelled) & contents else None


def learnt_without(document: Any, chat: Any) -> str | None:
    """Describe what of a document's answers is neither in the learnt samples nor counted. None for nothing."""
    before = chat.dropped.total()
    answers = [one for one in document.messages if one["role"] == "assistant" and one.get("weight") != 0]
    samples = [chat.template.tokenizer.decode(answer) for _, answer in chat.given(document)]
    if len(samples) + chat.dropped.total() - before < len(answers):
        return f"{len(answers)} answers, {len(samples)} samples, {chat.dropped.total() - before} counted"
    for one in answers:
        wanted = marks({name: one.get(name) for name in ("content", "tool_calls", *THINKING)})
        if not any(wanted <= marks(sample) for sample in samples) and chat.dropped.total() == before:
            return f"{wanted} of an answer are in no sample"
    return None
