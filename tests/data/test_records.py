"""Records as data sets have them: what each form asks and answers, and that what is not read is named and counted."""

from __future__ import annotations

import copy
import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import chat_templates
import pyarrow.parquet
import pytest
from tiny import Capture

from distill.cli.shared import read_texts
from distill.data.chat_template import ChatTemplate, next_prompt
from distill.data.corpus import weights_of
from distill.data.prompts import ChatPrompts, sources_of
from distill.data.records import ANSWERS, JUDGEMENTS, LEARNT, LISTS, OF_ANSWER, PREFILLS, PROMPTS, SYSTEMS, THINKING
from distill.data.records import REJECTED as REJECTED_ANSWERS
from distill.data.sources import Document, cut_text, read_documents, source_names
from distill.data.traffic import Line, parse_line
from distill.errors import DataError
from distill.recipe import Chat, Corpus, Source

Q, A = {"role": "user", "content": "ask"}, {"role": "assistant", "content": "say"}
TOOL = {"type": "function", "function": {"name": "add"}}


def read(path: Path, **settings: Any) -> tuple[list[Document], Counter[str]]:
    """The documents of a file as `--prompts` reads it, or as a source with these settings."""
    sources = (Source(path=str(path), split="train", **settings),) if settings else sources_of([path])
    return read_documents(Corpus(sources=sources), needed=())


def record(tmp_path: Path, *records: Any, **settings: Any) -> tuple[list[Document], Counter[str]]:
    path = tmp_path / "r.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return read(path, **{"kind": "jsonl", **settings})


def talk(document: Document) -> list[tuple[str, str]]:
    assert document.messages is not None
    return [(one["role"], one["content"]) for one in document.messages]


# ── what a field means to its makers ──


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"instruction": "do", "input": "this", "output": "say"}, [("user", "do\nthis"), ("assistant", "say")]),
        ({"instruction": "do", "input": "", "output": "say"}, [("user", "do"), ("assistant", "say")]),
        ({"instruction": "do", "input": "<noinput>"}, [("user", "do")]),
        ({"instruction": "", "input": "this"}, [("user", "this")]),
        ({"input": "this", "output": "say"}, [("user", "this"), ("assistant", "say")]),
        ({"instruction": "do", "context": "with", "response": "say"}, [("user", "do\nwith"), ("assistant", "say")]),
        ({"question": "who", "context": "he", "answers": {"text": ["he"]}}, [("user", "who\nhe"), ("assistant", "he")]),
        ({"question": "who: he", "context": "he", "answer": "he"}, [("user", "who: he"), ("assistant", "he")]),
        ({"system_prompt": "be", "question": "who"}, [("system", "be"), ("user", "who")]),
        ({"prompt": ["who", "and he"], "category": "c"}, [("user", "who"), ("assistant", ""), ("user", "and he")]),
        (
            {"instruction": "do", "input": "it", "output": "done", "system": "be", "history": [["a", "b"], ["c", "d"]]},
            [
                *(("system", "be"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")),
                *(("user", "do\nit"), ("assistant", "done")),
            ],
        ),
        ({"messages": [Q, A], "prompt": "ask"}, [("user", "ask"), ("assistant", "say")]),
        ({"conversation": [Q, A]}, [("user", "ask"), ("assistant", "say")]),
        ({"messages": json.dumps([Q, A])}, [("user", "ask"), ("assistant", "say")]),
        ({"messages": [Q | {"content": [{"type": "text", "text": "a"}, {"text": "b"}]}]}, [("user", "ab")]),
        (
            {"question_id": 1, "category": "math", "turns": ["a", "b"]},
            [("user", "a"), ("assistant", ""), ("user", "b")],
        ),
        ({"prompt": [Q], "completion": [A]}, [("user", "ask"), ("assistant", "say")]),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"},
            [("system", "s"), ("user", "a"), ("assistant", "b")],
        ),
        # Alpaca's other column is its fields as one text; a prompt alone beside a text is no conversation.
        ({"instruction": "do", "input": "", "output": "say", "text": ""}, [("user", "do"), ("assistant", "say")]),
        # Lists that a table holds as text: JSON, or as pandas writes them.
        ({"prompt": '["who", "and he"]'}, [("user", "who"), ("assistant", ""), ("user", "and he")]),
        ({"prompt": json.dumps([Q]), "completion": json.dumps([A])}, [("user", "ask"), ("assistant", "say")]),
        ({"prompt": str([Q]), "completion": "say"}, [("user", "ask"), ("assistant", "say")]),
        ({"messages": str([Q, A])}, [("user", "ask"), ("assistant", "say")]),
        (
            {"prompt": "[1, 2]: which is larger?", "answer": "[2]"},
            [("user", "[1, 2]: which is larger?"), ("assistant", "[2]")],
        ),
        # Roles in any order stay where they were.
        (
            {"messages": [Q, Q, A, {"role": "system", "content": "be"}, Q, A]},
            [*(("user", "ask"),) * 2, ("assistant", "say"), ("system", "be"), ("user", "ask"), ("assistant", "say")],
        ),
        # Preferences: the chosen answer; UltraFeedback's is the whole conversation.
        ({"prompt": "ask", "chosen": "say"}, [("user", "ask"), ("assistant", "say")]),
        ({"prompt": "ask", "chosen": [Q, A]}, [("user", "ask"), ("assistant", "say")]),
        ({"prompt": [Q], "chosen": [A]}, [("user", "ask"), ("assistant", "say")]),
        ({"prompt": "ask", "completion": "say", "label": True}, [("user", "ask"), ("assistant", "say")]),
        ({"messages": [Q, A], "label": "True"}, [("user", "ask"), ("assistant", "say")]),
    ],
)
def test_the_messages_of_a_record(given: dict[str, Any], wanted: Any, tmp_path: Path) -> None:
    (document,), dropped = record(tmp_path, given)
    assert not dropped and talk(document) == wanted


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"messages": [{"role": "system", "content": "s"}]}, "no user's turn"),
        ({"messages": [A, Q]}, "an answer before the first question"),
        ({"messages": [Q | {"content": "  "}]}, "an empty question"),
        ({"messages": [Q | {"role": "narrator"}]}, "a message of the unknown role 'narrator'"),
        ({"messages": [Q | {"content": [{"type": "image"}]}]}, "a message whose content is not text"),
        ({"messages": ["a"]}, "a message that is not a mapping"),
        ({"messages": "["}, "messages that are not a list"),
        ({"question": "who", "choices": ["a", "b"], "answer": "a"}, "a field `choices` with the prompt"),
        ({"instruction": "answer", "question": "who"}, "a field `question` with the prompt"),
        ({"prompt": "what is it", "image": "x.png"}, "a field `image` with the prompt"),
        ({"messages": [Q, A], "context": "text"}, "a field `context` with the messages"),
        ({"messages": [Q, A], "reasoning": "hm"}, "a field `reasoning` with the messages"),
        ({"question": "who", "context": {"sentences": [["a"]]}}, "a field `context` that is not text"),
        ({"instruction": "do", "history": ["a"]}, "a `history` that is not pairs"),
        ({"prompt": "do", "system": ["a"]}, "a system prompt that is not text"),
        ({"messages": [{"role": "system", "content": "x"}, Q], "system": "be"}, "two system prompts"),
        ({"messages": [Q, A | {"weight": 0.5}]}, "a message whose `weight` is neither 0 nor 1"),
        ({"messages": [Q, A], "tools": "add"}, "`tools` that are not a list of objects"),
        ({"messages": [Q, A], "documents": ["text"]}, "`documents` that are not a list of objects"),
        ({"messages": [Q, A], "chat_template_kwargs": [1]}, "`chat_template_kwargs` that are not an object"),
        ({"messages": [Q, A | {"content": None, "function_call": {"name": "f"}}]}, "a message with a `function_call`"),
        ({"prompt": 5}, "a prompt that is not text"),
        ({"messages": [Q, A | {"prefix": True}]}, "a message that only begins an answer (`prefix`)"),
        ({"messages": [Q, A], "finish_reason": "length"}, "an answer that was cut short"),
        ({"prompt": ["a", "b"], "answer": "c"}, "an answer after several turns without answers"),
        ({"prompt": "ask", "chosen": [Q | {"content": "x"}, A]}, "an answer that holds other questions"),
        ({"prompt": "[{'role': 'user' 'content': 'x'}]"}, "a list of messages that is neither JSON nor Python"),
    ],
)
def test_what_would_mean_something_else_is_left_out(given: dict[str, Any], reason: str, tmp_path: Path) -> None:
    documents, dropped = record(tmp_path, given, {"prompt": "other"})
    assert [talk(one) for one in documents] == [[("user", "other")]]
    assert dropped.total() == 1 and next(iter(dropped)).startswith(reason)
    if " beside " in reason:  # unless its source says what it is
        kind = "prompt" if "prompt" in reason else "messages"
        (document,), dropped = record(tmp_path, given, form=kind)
        assert talk(document)[0][0] == "user" and dropped.total() == 1 and "which is not read" in next(iter(dropped))


def test_fields_that_are_not_read_are_named_once_with_their_count(tmp_path: Path) -> None:
    read_or_empty = {"id": 1, "source_id": 1, "category": "c", "note": ""}
    rows: list[Any] = [{"prompt": f"p{n}", "answer": 5, "score": n} | read_or_empty for n in range(3)]
    rows += [{"messages": [Q, A | {"rating": 5, "id": "x", "value": "y"}], "meta": {"a": 1}}]
    rows += [{"text": "plain", "url": "u"}]
    documents, dropped = record(tmp_path, *rows)
    assert len(documents) == 5 and documents[0].label == "c"
    of = {"answer": 3, "score": 3, "meta": 1, "url": 1}
    wanted = {f"field `{name}` of records, which is not read": count for name, count in of.items()}
    assert dropped == wanted | {f"field `{name}` of messages, which is not read": 1 for name in ("rating", "value")}
    hostile = [{"text": f"t{n}", f"x{n}": "y"} for n in range(50)]
    _, dropped = record(tmp_path, *hostile)
    assert len(dropped) == 21 and dropped["further fields, which are not read"] == 30


def test_answers_beyond_the_first_and_messages_that_nothing_follows_are_counted(tmp_path: Path) -> None:
    squad = {"question": "who", "context": "he", "answers": {"text": ["he", "he", "him"]}}
    documents, dropped = record(tmp_path, squad, {"messages": [Q, A, {"role": "tool", "content": "r"}]})
    assert talk(documents[0])[-1] == ("assistant", "he") and talk(documents[1])[-1] == ("assistant", "say")
    reasons = ("answers of a question beyond its first", "messages of the role tool that nothing follows")
    assert dropped == dict.fromkeys(reasons, 1)


def test_messages_have_their_normal_form(tmp_path: Path) -> None:
    """All forms: tests/data/test_chat.py."""
    for row in ({"messages": [Q, A | {"reasoning": "hm"}]}, {"prompt": "ask", "answer": "say", "reasoning": "hm"}):
        (document,), dropped = record(tmp_path, row)
        assert document.messages == (Q, A | {"reasoning_content": "hm"}) and not dropped
    _, dropped = record(tmp_path, {"messages": [Q, A | {"reasoning": "hm", "thinking": "ha"}]}, {"text": "a"})
    assert dropped == {"a message whose thinking stands in two fields and differs": 1}


REJECTED = "answers marked as rejected (`{}`), which are not learnt"


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"label": False}, REJECTED.format("label")),
        ({"label": "False"}, REJECTED.format("label")),
        ({"label": 0}, REJECTED.format("label")),
        ({"kto_tag": False}, REJECTED.format("kto_tag")),
        ({"chosen": False}, REJECTED.format("chosen")),
        ({"rejected": True}, REJECTED.format("rejected")),
        ({"accepted": "rejected"}, REJECTED.format("accepted")),
    ],
)
def test_a_rejected_answer_is_not_learnt(more: dict[str, Any], reason: str, tmp_path: Path) -> None:
    """Its question is asked."""
    rows = [{"prompt": "ask", "completion": "say"}, {"messages": [Q, A, Q | {"content": "more"}, A]}]
    for row in rows:
        (document,), dropped = record(tmp_path, row | more)
        talks = [one for one in talk(document) if one[0] == "user"]
        assert not document.has_answer and document.messages and document.messages[-1]["role"] == "user"
        assert dropped == {reason: 1 if "prompt" in row else 2} and len(talks) == (1 if "prompt" in row else 2)
    (document,), dropped = record(tmp_path, {"prompt": "ask", "chosen": "say", "rejected": "no"})
    assert talk(document)[-1] == ("assistant", "say") and "no" not in document.plain_text
    assert dropped == {"rejected answers (`rejected`), which are not learnt": 1}
    (document,), dropped = record(tmp_path, rows[0] | {"label": 0}, fields={"label": "label"})  # which is a class
    assert document.has_answer


# Every field that is read, with a value that says something, one that is not known, and one of another type.
KNOWN: dict[str, tuple[dict[str, Any], list[Any]]] = {
    **{name: ({"prompt": "ask"}, [5, {"a": 1}, [1], True]) for name in (*ANSWERS, "answers", *SYSTEMS)},
    **{name: ({}, [5, {"a": 1}, [1], True]) for name in PROMPTS},
    **{name: ({"prompt": "ask"}, [5, {"a": 1}, [1], True]) for name in ("context", "passage", *LISTS)},
    **{name: ({"messages": [Q, A]}, [5, "x", {"a": 1}, True]) for name in ("tools", "documents", "history")},
    **{name: ({"messages": [Q, A]}, [5, {"a": 1}, [1]]) for name in (*THINKING, "chat_template_kwargs", "category")},
    **{name: ({"messages": [Q, A]}, ["maybe", 7, [1], {"a": 1}]) for name in (*JUDGEMENTS, *REJECTED_ANSWERS)},
    **{name: ({"messages": [Q, A]}, ["x", [1]]) for name in (*OF_ANSWER, "choices", "image", "functions")},
    **{name: ({"messages": [Q, A]}, [5, "x", [1], True]) for name in ("nonsense", "Messages", "answers_")},
}


def test_a_field_that_is_not_known_or_of_another_type_is_never_passed_over(tmp_path: Path) -> None:
    """It changes what is read, as a list of turns does, or it is counted by its name, or its record is left out."""
    passed = []
    for name, (rest, values) in KNOWN.items():
        for value in values:
            before = record(tmp_path, *filter(None, [rest]), {"prompt": "other"})[0]
            documents, dropped = record(tmp_path, rest | {name: value}, {"prompt": "other"})
            same = [(one.messages, one.arguments) for one in documents] == [(one.messages, {}) for one in before]
            if not dropped.total() and same:
                passed.append((name, value))
    assert not passed


OF_A_MESSAGE: dict[str, list[Any]] = {
    "role": [5, None, "narrator", ["user"]],
    "content": [5, True, {"a": 1}, [1], [{"type": "image"}], [{"type": "text", "text": 5}], [], None],
    "weight": [0.5, "1", True, [1]],
    **{name: [5, "false", [1]] for name in LEARNT},
    **{name: [5, True, [1], {"a": 1}, [{"type": "reasoning.encrypted"}]] for name in THINKING},
    **{name: [True, "x", [1]] for name in PREFILLS},
    "tool_calls": [5, "x", {"a": 1}, [1], [{"name": 5}], [{"name": "f", "arguments": [1]}]],
    **{name: [5, [1], {"a": 1}, True] for name in ("tool_call_id", "name")},
    "function_call": [{"name": "f"}, "f", 5],
    "nonsense": [5, "x", [1], False],
}


@pytest.mark.parametrize("name", OF_A_MESSAGE)
def test_a_part_of_a_message_is_never_passed_over(name: str, tmp_path: Path) -> None:
    for value in OF_A_MESSAGE[name]:
        message = A | {name: value}
        documents, dropped = record(tmp_path, {"messages": [Q, message]}, {"prompt": "other"})
        assert dropped.total() == 1 and len(documents) == (2 if name == "nonsense" else 1), (value, dropped)
        line = parse_line(json.dumps({"messages": [Q, message]}).encode(), 1)
        assert line.noted if name == "nonsense" and isinstance(line, Line) else isinstance(line, str), (value, line)


def test_a_row_with_a_null_is_left_out(tmp_path: Path) -> None:
    rows: list[Any] = [{"text": text} for text in ("first text", None, "second text")]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "t.parquet")
    for documents, dropped in (read(tmp_path / "t.parquet"), record(tmp_path, *rows), record(tmp_path, *rows[::-1])):
        assert sorted(one.text for one in documents) == ["first text", "second text"]
        assert dropped == {"records whose `text` is null": 1}
    rows = [{"prompt": "a", "answer": None}, {"prompt": None, "answer": "b"}, {"messages": None}]
    documents, dropped = record(tmp_path, *rows)
    assert [talk(one) for one in documents] == [[("user", "a")]]
    assert dropped == {"records whose `prompt` is null": 1, "records whose `messages` is null": 1}
    documents, dropped = record(tmp_path, {"text": "a"}, {"body": "b"})
    assert dropped == {"records without a text in `text` or another field that is read": 1} and len(documents) == 1
    with pytest.raises(DataError, match="has no text: 2 records whose `text` is null"):
        record(tmp_path, {"text": None}, {"text": None})


@pytest.mark.parametrize("kind", ["tree", "text", "jsonl", "csv"])
def test_line_ends_are_kept(kind: Any, tmp_path: Path) -> None:
    text = "if (a)\r\n{\r\n}\rb\r\n"
    path = tmp_path / "f"
    if kind == "csv":
        with open(path, "w", newline="") as file:
            csv.writer(file).writerows([["text"], [text]])
    else:
        path.write_bytes(json.dumps({"text": text}).encode() + b"\r\n" if kind == "jsonl" else text.encode())
    more = {"pattern": "*"} if kind == "tree" else {}
    (document,), dropped = read(tmp_path if kind == "tree" else path, kind=kind, **more)
    assert document.text == text and not dropped
    pieces = list(cut_text("line\r\n" * 3000 + "\r\n" + "line\r\n" * 9000))
    assert "".join(pieces).count("\r\n") == 12_001 and pieces[0].endswith("\r\n\r\n")


# ── what a record gives the template ──


def chat_of(plain: Any, style: str, **settings: Any) -> ChatPrompts:
    return ChatPrompts(ChatTemplate(chat_templates.dress(copy.deepcopy(plain), style), Chat(**settings)), 500, 0)


def test_tools_documents_and_arguments_reach_the_template(plain: Any, tmp_path: Path) -> None:
    chat = chat_of(plain, "qwen-3")
    tokenizer = chat.template.tokenizer
    tokenizer.chat_template = "{% for d in documents or [] %}[{{ d.text }}]{% endfor %}" + tokenizer.chat_template
    given = {"messages": [Q, A, Q], "tools": json.dumps([TOOL]), "documents": [{"text": "a book"}]}
    given["chat_template_kwargs"] = {"enable_thinking": False, "mood": "calm"}
    (document,), dropped = record(tmp_path, given)
    assert not dropped
    offered: Any = {"tools": [TOOL], "documents": [{"text": "a book"}], "enable_thinking": False}
    wanted = tokenizer.apply_chat_template([Q], **offered, add_generation_prompt=True, tokenize=False)
    prompt = chat.prompt(document)
    assert prompt is not None and prompt.chat is not None and prompt.label == "no thinking"
    assert tokenizer.decode(prompt.prompt) == wanted and '"add"' in wanted and "[a book]" in wanted
    assert next(chat.given(document))[0] == prompt.prompt
    further = tokenizer.decode(next_prompt(chat.template, prompt.chat, ["say"]) or [])
    assert '"add"' in further and "[a book]" in further
    assert chat.dropped == {"template argument `mood` of a record, which the target's template lacks": 1}


def test_the_same_question_with_other_documents_is_another_one(tmp_path: Path) -> None:
    rows = [{"prompt": "ask", "documents": [{"text": text}]} for text in ("a", "b", "a")]
    documents, dropped = record(tmp_path, *rows)
    assert len(documents) == 2 and dropped == {"duplicate": 1}


def test_a_template_without_tools_takes_no_record_that_has_them(plain: Any, tmp_path: Path) -> None:
    chat = chat_of(plain, "llama-3")
    (document,), _ = record(tmp_path, {"messages": [Q, A], "tools": [TOOL]})
    assert chat.prompt(document) is None and not list(chat.given(document))
    assert list(chat.dropped) == ["`tools` that the target's chat template does not write"]


def test_a_tools_result_ends_questions_without_answers_too(plain: Any, tmp_path: Path) -> None:
    """With `given: false` as with it: the messages of tools are there where they are looked for."""
    messages = [Q, A, Q, {"role": "tool", "content": "x"}, Q]
    for given in (True, False):
        (document,), _ = record(tmp_path, {"messages": messages}, given=given)
        chat = chat_of(plain, "qwen-3")
        prompt = chat.prompt(document)
        assert prompt is not None and prompt.chat is not None and prompt.chat["turns"] == []
        assert chat.dropped == {"turns of conversations after a tool's result": 1}


@pytest.mark.parametrize("array", [False, True])
def test_half_of_a_character_spoils_its_own_record(array: bool, tmp_path: Path) -> None:
    records = [
        '{"prompt": "a\\ud83d"}',
        '{"prompt": "b"}',
        '{"prompt": "\\ud83d\\ude80"}',
        '{"prompt": "c", "x\\ude80": 1}',
    ]
    path = tmp_path / "r.jsonl"
    path.write_text(f"[{', '.join(records)}]" if array else "\n".join(records))
    documents, dropped = read(path)
    assert [talk(one)[0][1] for one in documents] == ["b", "🚀"]
    assert dropped == {"records with half of a character (a lone surrogate)": 2}


def test_an_answer_of_weight_0_is_not_learnt(plain: Any, tmp_path: Path) -> None:
    chat = chat_of(plain, "llama-3")
    messages = [Q, A | {"weight": 0}, Q, A | {"train": False}, Q, A | {"content": "more", "weight": 1}]
    (document,), dropped = record(tmp_path, {"messages": messages})
    found = [chat.template.tokenizer.decode(answer) for _, answer in chat.given(document)]
    assert found == ["more<|eot_id|>"] and not dropped
    (document,), _ = record(tmp_path, {"messages": messages[:2]})
    assert not list(chat.given(document)) and chat.prompt(document) is not None


# ── files ──


def test_files_of_every_kind(tmp_path: Path) -> None:
    rows = [{"ask": f"question {n}", "say": f"answer {n}"} for n in range(4)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "b.jsonl").write_text(json.dumps({"ask": "question 9", "say": "x"}) + "\n")
    with open(tmp_path / "a.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["ask", "say"])
        writer.writeheader()
        writer.writerows([*rows, {"ask": 'two\nlines, "quoted"', "say": "y" * 200_000}])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    fields = {"prompt": "ask", "answer": "say"}

    def of(kind: Any, name: str, **more: Any) -> list[Any]:
        return [one.messages for one in read(tmp_path / name, kind=kind, fields=fields, **more)[0]]

    one = of("jsonl", "a.jsonl")
    asked = [({"role": "user", "content": row["ask"]},) for row in rows]
    assert one == [(*q, {"role": "assistant", "content": row["say"]}) for q, row in zip(asked, rows, strict=True)]
    assert of("parquet", "a.parquet") == one
    table = of("csv", "a.csv")
    assert table[:4] == one and table[4][0]["content"] == 'two\nlines, "quoted"'
    assert len(of("jsonl", "*.jsonl")) == 5 and of("jsonl", "a.jsonl", given=False) == asked
    with pytest.raises(DataError, match="matches no file"):
        of("jsonl", "none*.jsonl")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="not a readable parquet file"):
        of("parquet", "bad.parquet")


def test_equal_questions_are_one_and_stay_in_their_split(tmp_path: Path) -> None:
    """Splits and names hang on the questions: another answer to the same question is in the same split."""
    path = tmp_path / "log.jsonl"
    rows = [{"prompt": f"question {n}", "response": f"answer {a}"} for n in range(50) for a in range(2)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"messages": []}\n')
    corpus = Corpus(sources=(Source(kind="jsonl", path=str(path)),), validation=0.3, test=0.3)
    found, dropped = read_documents(corpus)
    assert len(found) == 50 and dropped == {"duplicate": 50, "no user's turn": 1}


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.txt", "folder/a.json"])
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_an_array_of_conversations(name: str, indent: int | None, mark: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    human, gpt = {"from": "human", "value": "ask"}, {"from": "gpt", "value": "say"}
    rows = [{"conversations": [human, gpt]}, [Q | {"content": "again"}, A], {"prompt": "who"}]
    path.write_text(mark + json.dumps(rows, indent=indent))
    documents, dropped = read(path if path.parent == tmp_path else path.parent)
    assert [talk(one)[0][1] for one in documents] == ["ask", "again", "who"]
    assert talk(documents[0]) == [("user", "ask"), ("assistant", "say")]
    assert dropped == ({"byte order mark before a text that is kept": 1} if mark and "/" in name else {})
    if "/" in name:  # a source may say that it is text
        (document,), _ = read(path.parent, kind="tree", pattern="*", form="text")
        assert document.messages is None and document.text == json.dumps(rows, indent=indent)
    (document,), _ = read(path, kind="text")
    assert document.messages is None and document.text.startswith("[")


def test_lines_that_are_lists_of_messages_and_one_indented_record(tmp_path: Path) -> None:
    (tmp_path / "lists.jsonl").write_text(f"{json.dumps([Q, A])}\n{json.dumps([Q | {'content': 'b'}])}\n")
    assert [talk(one)[0][1] for one in read(tmp_path / "lists.jsonl")[0]] == ["ask", "b"]
    (tmp_path / "one.json").write_text(json.dumps([Q, A], indent=1))
    assert [talk(one) for one in read(tmp_path / "one.json")[0]] == [[("user", "ask"), ("assistant", "say")]]


def test_texts_of_records_for_a_cut(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"conversations": [Q, A]}], indent=1))
    (tmp_path / "b.txt").write_text("\ufeffplain")
    (tmp_path / "c.bin").write_bytes(b"\xff")
    (tmp_path / "d.json").write_text('{"a": 1}')
    assert read_texts([tmp_path / "a.json"]) == ["ask\n\nsay"]
    assert read_texts([tmp_path]) == ["ask\n\nsay", "plain", '{"a": 1}']
    said = capsys.readouterr().err
    assert "1 left out: byte order mark before a text that is kept" in said and "1 left out: not UTF-8" in said
    with pytest.raises(DataError, match="has no text in field"):
        read_texts([tmp_path / "d.json"])


TABLE = [("a, b; c", "one"), ('quo"ted', "two")]


@pytest.mark.parametrize("sign", [",", ";", "\t", "|"])
@pytest.mark.parametrize("first", ["", "\ufeff", "sep={}\r\n"])
def test_a_table_with_any_delimiter(sign: str, first: str, tmp_path: Path) -> None:
    rows = "".join('"{}"{}"{}"\n'.format(a.replace('"', '""'), sign, b) for a, b in TABLE)
    (tmp_path / "t.csv").write_text(f"{first.format(sign)}prompt{sign} answer\n{rows}")
    documents, dropped = read(tmp_path / "t.csv")
    assert [talk(one) for one in documents] == [[("user", a), ("assistant", b)] for a, b in TABLE] and not dropped


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", '{"a": {"b": 1}}', "has no text in field `text` (it has: a)"),
        ("a.json", "[1, 2]", "a JSON object is needed, got list"),
        ("a.json", '[\n{"prompt": "a"},\n{"prompt": }\n]', "line 3, character"),
        ("a.json", "[]", "the file is empty"),
        ("a.json", "plain", "line 1: not JSON"),
        ("t.csv", "text\na, b, c\n", "line 2 has 3 fields, and the header 1: text"),
        ("t.csv", 'prompt,answer\n"a",b\n"c\nd",e,f\n', "line 4 has 3 fields, and the header 2: prompt, answer"),
        ("t.csv", '"Sort, please",Done\n', "the first line names no column that is read: Sort, please | Done"),
        ("t.csv", "frage;antwort\na;b\n", "the first line names no column that is read: frage | antwort"),
        ("t.csv", "text,text\na,b\n", "the first line names the column 'text' twice"),
        ("t.csv", 'prompt,answer\n"a" b,c\n', "line 2: "),
    ],
)
def test_files_that_cannot_be_read(name: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError) as caught:
        read(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value) and said in str(caught.value)
    if name == "a.json":
        (tmp_path / "a.txt").write_text(text)
        assert read(tmp_path / "a.txt")[0][0].text == text


def test_rows_that_are_longer_or_shorter_by_nothing(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(",prompt,answer,\n0,a,b,\n1,c,d,,\n\n2,e\n")
    documents, dropped = read(tmp_path / "t.csv")
    assert [[text for _, text in talk(one)] for one in documents] == [["a", "b"], ["c", "d"], ["e"]]
    short = "csv rows shorter than their header: the fields that they lack"
    assert dropped == {"field `column 1` of records, which is not read": 3, short: 1}


def test_a_mark_at_the_beginning_of_a_text_is_dropped_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(b"\xef\xbb\xbfx = 1\n")
    for kind, path in (("tree", tmp_path), ("text", tmp_path / "a.py")):
        (document,), dropped = read(path, kind=kind)
        assert document.text == "x = 1\n" and dropped == {"byte order mark before a text that is kept": 1}


def test_nulls_of_parquet_are_no_part_of_a_record(tmp_path: Path) -> None:
    tools = [TOOL, {"type": "function", "function": {"name": "sub", "strict": True}}]
    rows = [{"messages": [Q | {"content": f"{n}"}], "tools": [tool]} for n, tool in enumerate(tools)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "t.parquet")
    documents, dropped = read(tmp_path / "t.parquet")
    assert [one.arguments["tools"] for one in documents] == [[tool] for tool in tools] and not dropped


def test_sources_that_end_alike_are_told_apart(tmp_path: Path) -> None:
    """Each keeps its own weight. Under one name the weights were added, and 0 gave prompts."""
    paths = [tmp_path / folder / "train.jsonl" for folder in ("one", "two")]
    for number, path in enumerate(paths):
        path.parent.mkdir()
        path.write_text("".join(json.dumps({"prompt": f"ask {number}, {n}"}) + "\n" for n in range(40)))
    given: list[Any] = [{"kind": "jsonl", "path": str(path), "weight": 3 - 3 * n} for n, path in enumerate(paths)]
    corpus = Corpus(sources=[Source(**one) for one in given])
    assert weights_of(corpus) == {"one/train.jsonl": 3, "two/train.jsonl": 0}
    documents, _ = read_documents(corpus)
    assert Counter(document.source for document in documents) == {"one/train.jsonl": 40, "two/train.jsonl": 40}
    hub: list[Any] = [{"kind": "hub", "path": "a/set", "subset": name} for name in ("x", "y")]
    other: list[Any] = [{"kind": "text", "path": "b/notes.txt"}]
    assert source_names(Corpus(sources=[Source(**one) for one in (*hub, *other)])) == [
        *("a/set (1)", "a/set (2)", "notes.txt")
    ]
