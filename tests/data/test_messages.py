"""Thinking and tool calls in every form that is written: one message, and one text for the template, whatever the form.

The expected texts are written out here; ../shared/inputs, where it is, holds longer files of the same forms.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chat_templates
import pytest
import tiny
from question_worlds import build_instruct

from distill.data.chat_template import ChatTemplate, PlainTexts
from distill.data.records import THINKING, normal
from distill.data.sources import read_documents
from distill.data.traffic import encode_line, parse_line
from distill.recipe import Chat, Corpus, Source

INPUTS = Path(os.environ.get("DISTILL_SHARED", tiny.ROOT.parent / "shared")) / "inputs"
USER = {"role": "user", "content": "2 + 2?"}
SUM = "Two and two."
DETAILS = [{"type": "reasoning.text", "text": "Two and "}, {"type": "reasoning.text", "text": "two."}]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": "zwölf"}}}
TEXT_CALL = CALL | {"function": {"name": "add", "arguments": json.dumps(CALL["function"]["arguments"])}}

# As gpt-oss reads it: `thinking`, channels, and an end of its own behind a call. Written for this test.
CHANNELS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant"
    "{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>assistant{% endif %}"
    "{% if m.tool_calls %}<|channel|>commentary to={{ m.tool_calls[0].function.name }}<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% else %}<|channel|>final<|message|>{{ m.content }}<|return|>{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# As DeepSeek's joins it: arguments that are text; no line break around the closed thinking.
JOINED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|Assistant|></think>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '<call>' + call.function.name + ' ' + call.function.arguments }}"
    "{% endfor %}"
    "<|end_of_sentence|>{% else %}<|User|>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|>{{ '<think>' if thinking else '</think>' }}{% endif %}"
)
SPECIAL = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"]


def dressed(plain: Any, style: str) -> Any:
    tokenizer = copy.deepcopy(plain)
    if style in chat_templates.STYLES:
        return chat_templates.dress(tokenizer, style)
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL, "<|end_of_sentence|>"]})
    tokenizer.chat_template = {"channels": CHANNELS, "joined": JOINED}[style]
    return tokenizer


def answer(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "4", **fields}


SPELLINGS = [
    *(answer(**{name: SUM}) for name in THINKING[:3]),
    answer(reasoning_details=DETAILS),
    answer(reasoning=SUM, reasoning_content=SUM, reasoning_details=DETAILS),
    answer(content=[{"type": "thinking", "thinking": SUM}, {"type": "text", "text": "4"}]),
    answer(content=[{"type": "thinking", "thinking": [{"type": "text", "text": SUM}]}, {"type": "text", "text": "4"}]),
    answer(content=f"<think>\n{SUM}\n</think>\n\n4", reasoning=SUM),
]


def by_every_way(template: ChatTemplate, messages: list[dict[str, Any]], **more: Any) -> str:
    """The text of an answer, the same from a conversation and from a served line."""
    ids = template.answered(messages)
    line = parse_line(json.dumps({"messages": messages, **more}).encode(), 1)
    assert not isinstance(line, str), line
    assert encode_line(line, template.tokenizer, Chat()) == ids
    return str(template.tokenizer.decode(ids[1]))


@pytest.mark.parametrize("message", SPELLINGS)
@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("r1", f"{SUM}\n</think>\n\n4<|end_of_sentence|>"),
        ("qwen-3", f"<think>\n{SUM}\n</think>\n\n4<|im_end|>"),
        (
            "channels",
            f"<|channel|>analysis<|message|>{SUM}<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>",
        ),
        ("llama-3", "the target's chat template does not write the thinking of an answer"),
    ],
)
def test_thinking_is_one_thing(plain: Any, style: str, expected: str, message: dict[str, Any]) -> None:
    template = ChatTemplate(dressed(plain, style), Chat())
    if style == "llama-3":
        with pytest.raises(ValueError, match=expected):
            template.answered([USER, message])
        return
    assert by_every_way(template, [USER, message]) == expected


def test_thinking_of_earlier_turns_reaches_the_template(plain: Any) -> None:
    template = ChatTemplate(dressed(plain, "channels"), Chat())
    prompts = {template.text([USER, message, USER]) for message in SPELLINGS[:4]}
    assert len(prompts) == 1 and SUM in prompts.pop()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("I add.\n</think>\n\n4", "I add.\n</think>\n\n4<|end_of_sentence|>"),
        ("<think>\nI add.\n</think>\n\n4", "I add.\n</think>\n\n4<|end_of_sentence|>"),
        ("4", None),
        ("<think>\n4", None),
    ],
)
@pytest.mark.parametrize("opening", ["<think>", "[THINK]", "<seed:think>"])
def test_an_open_thinking_is_closed_by_the_answer(plain: Any, opening: str, content: str, expected: str | None) -> None:
    tokenizer = dressed(plain, "r1")
    closing = opening.replace("<", "</").replace("[", "[/")

    def own(text: str) -> str:
        return text.replace("</think>", closing).replace("<think>", opening)

    tokenizer.chat_template = own(tokenizer.chat_template)
    template, messages = ChatTemplate(tokenizer, Chat()), [USER, answer(content=own(content))]
    if expected is not None:
        assert by_every_way(template, messages) == own(expected)
        return
    with pytest.raises(ValueError, match=r"an answer that never closes the .* that its prompt ends with"):
        template.answered(messages)


def test_check_says_which_answers_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_instruct(tmp_path)
    target = tmp_path / "target"
    template = target / "chat_template.jinja"
    opened = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    template.write_text(opened + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}")
    rows = [{"messages": [USER | {"content": f"{n} + 2?"}, answer()]} for n in range(30)]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = tiny.recipe_values(tmp_path)
    values["corpus"] |= {"sources": [{"kind": "jsonl", "path": str(tmp_path / "talks.jsonl")}], "block": 256}
    assert tiny.call("check", tiny.write_recipe(tmp_path / "recipe.yaml", values)) == 0
    said = "".join(capsys.readouterr())
    assert "30 given answers left out: an answer that never closes the <think>" in said, said


def test_where_the_thinking_begins_and_ends(plain: Any) -> None:
    joined, qwen = (ChatTemplate(dressed(plain, style), Chat()) for style in ("joined", "qwen-3"))
    thought = [USER, answer(reasoning=SUM)]
    on = joined.with_arguments({"thinking": True})
    assert joined.tokenizer.decode(on.answered(thought)[1]).startswith(f"{SUM}</think>4")
    with pytest.raises(ValueError, match=r"does not write the thinking|otherwise than it begins one"):
        joined.answered(thought)  # whose prompt has closed the thinking
    # Logs of a template that opens the thinking, for one that does not.
    closed = [USER, answer(content=f"{SUM}\n</think>\n\n4")]
    assert qwen.answered(closed) == qwen.answered(thought)
    # Cut short: within the thinking, and behind it.
    cut = [USER, answer(content="", reasoning=SUM)]
    assert qwen.tokenizer.decode(qwen.answered(cut, ended=False)[1]) == f"<think>\n{SUM}"
    r1 = ChatTemplate(dressed(plain, "r1"), Chat())
    assert r1.tokenizer.decode(r1.answered(cut, ended=False)[1]) == SUM
    assert r1.tokenizer.decode(r1.answered(thought, ended=False)[1]) == f"{SUM}\n</think>\n\n4"


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("qwen-3", f"I add.\n<tool_call>\n{json.dumps(CALL, ensure_ascii=False)}\n</tool_call><|im_end|>"),
        ("channels", '<|channel|>commentary to=add<|message|>{"a": 2, "b": "zwölf"}<|call|>'),
        ("joined", 'I add.<call>add {"a": 2, "b": "zwölf"}<|end_of_sentence|>'),
    ],
)
def test_arguments_of_calls_are_parsed(plain: Any, style: str, expected: str) -> None:
    """As servers do before they render; a template that joins texts gets text in both cases."""
    template = ChatTemplate(dressed(plain, style), Chat())
    content = "" if style == "channels" else "I add."
    for call in (CALL, TEXT_CALL, json.dumps([TEXT_CALL])):
        calls = call if isinstance(call, str) else [call]
        messages = [USER, answer(content=content, tool_calls=calls)]
        assert by_every_way(template, messages, finish_reason="tool_calls") == expected
    both = [USER, answer(content=content, tool_calls=[TEXT_CALL], reasoning=SUM)]
    if style == "qwen-3":
        assert by_every_way(template, both) == f"<think>\n{SUM}\n</think>\n\n{expected}"
    with pytest.raises(ValueError, match="cut short"):
        template.answered(both, ended=False)
    with pytest.raises(ValueError, match="does not write the tool calls"):
        ChatTemplate(dressed(plain, "gemma"), Chat()).answered(messages)


def test_tools_of_a_served_line_are_offered(plain: Any) -> None:
    tokenizer = dressed(plain, "qwen-3")
    tools = [{"type": "function", "function": {"name": "add"}}]
    messages = [USER, answer(content=None, tool_calls=[TEXT_CALL])]
    line = parse_line(json.dumps({"messages": messages, "tools": tools}).encode(), 1)
    assert not isinstance(line, str)
    own = ChatTemplate(tokenizer, Chat(tools=tuple(tools)))
    assert encode_line(line, tokenizer, Chat()) == own.answered(messages)
    assert "Tools: " in tokenizer.decode(own.answered(messages)[0])


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"reasoning": SUM, "thinking": "Three."}, "two fields and differs"),
        ({"content": "<think>Three.</think>4", "reasoning": SUM}, "two fields and differs"),
        ({"reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}]}, "encrypted"),
        ({"reasoning": SUM, "reasoning_details": [{"type": "reasoning.summary", "summary": "x"}]}, "summary"),
        ({"thinking": True}, "is not text"),
        ({"content": [{"type": "image_url"}]}, "content is not text"),
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "several parts"),
        ({"content": None}, "without content"),
        ({"role": None}, "without a role"),
        ({"tool_calls": {"name": "f"}}, "tool calls that are not a list"),
        ({"tool_calls": "["}, "tool calls that are not JSON"),
        ({"tool_calls": ["f"]}, "a tool call without a name"),
        ({"tool_calls": [{"name": "f", "arguments": '{"a"'}]}, "arguments that are not JSON"),
        ({"tool_calls": [{"name": "f", "arguments": "[1]"}]}, "arguments that are not a JSON object"),
    ],
)
def test_what_is_no_message(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        normal(answer(**fields))


def test_other_forms_of_calls() -> None:
    found = normal(answer(tool_calls=[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "arguments": ""}]))
    assert found["tool_calls"] == [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]
    assert normal(found) == found


def files() -> Iterator[Path]:
    for folder in ("reasoning", "tool-arguments", "open-think"):
        yield from sorted((INPUTS / folder).glob("*.jsonl"))


@pytest.mark.skipif(not INPUTS.is_dir(), reason="the shared inputs are not here; set DISTILL_SHARED")
@pytest.mark.parametrize("style", ["r1", "qwen-3"])
def test_shared_inputs(plain: Any, style: str) -> None:
    """Every record of a file in every spelling gives the same tokens, as corpus and as served log."""
    template = ChatTemplate(dressed(plain, style), Chat())
    texts: dict[str, list[str]] = {}
    for path in files():
        documents, _ = read_documents(Corpus(sources=(Source(kind="jsonl", path=str(path), split="train"),)), needed=())
        assert len(documents) == 60
        found = texts.setdefault(path.stem, [])
        for raw, document in zip(path.read_bytes().splitlines(), documents, strict=True):
            line = parse_line(raw, 1)
            assert not isinstance(line, str) and document.messages is not None
            try:
                served = encode_line(line, template.tokenizer, Chat())
            except ValueError as error:
                found.append(str(error))
                continue
            found.append(template.tokenizer.decode(served[1]))
            if "tools" not in json.loads(raw):
                assert template.answered(document.messages) == served
    spellings = [texts[name] for name in texts if name.startswith("corpus-")]
    assert len(spellings) == 4 and all(one == spellings[0] == texts["traffic-reasoning"] for one in spellings)
    assert all(
        f"I add {n} and 5 in my head first.\n</think>\n\nThe total is" in one for n, one in enumerate(spellings[0])
    )
    assert texts["object"] == texts["text"]
    if style == "r1":
        assert set(texts["plain"]) == {"an answer that never closes the <think> that its prompt ends with"}
    else:
        assert all('"arguments": {"a": ' in one for one in texts["traffic-calls"])
    assert texts["closed"] == texts["field"]


def test_tags_of_html_are_plain_text(plain: Any) -> None:
    """Gemma's vocabulary holds them whole, as added tokens that are not special; other such tokens mark structure."""
    tokenizer = copy.deepcopy(plain)
    tokenizer.add_tokens(["<h1>", "</em>", "<think>", "<tool_call>", "\n\n"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    number = tokenizer.get_added_vocab()
    special = PlainTexts(tokenizer, Chat()).special
    assert {number["<tool_call>"], number["<image>"]} <= special
    assert not special & {number[text] for text in ("<h1>", "</em>", "<think>", "\n\n")}
    tokenizer.chat_template = JOINED  # which writes it
    assert number["<think>"] in ChatTemplate(tokenizer, Chat()).special
