"""The one table of fields of requests, as `distill record` and the reader of served logs read it; and in the documents.

`distill serve`: tests/serving/test_completions.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from distill.data.recorder import read_exchange
from distill.data.requests import CHAT, KNOWN, TEXT
from distill.data.traffic import Line, parse_line

ROOT = Path(__file__).resolve().parents[2]
ANSWER = {"choices": [{"message": {"content": "4"}, "text": "4", "finish_reason": "stop"}]}
ASKED: dict[str, dict[str, Any]] = {CHAT: {"messages": [{"role": "user", "content": "2 + 2?"}]}, TEXT: {"prompt": "a"}}
ODD = (True, 0, 7, 0.37, "x", ["x"], {"x": 1})
# Fields that a line of an answer has of its own.
READ = {
    "messages",
    "prompt",
    "tools",
    "documents",
    "chat_template_kwargs",
    "model",
    "tool_choice",
    "reasoning",
    "thinking",
}


def recorded(form: str, more: dict[str, Any]) -> Any:
    (found,) = read_exchange(form, json.dumps(ASKED[form] | more).encode(), json.dumps(ANSWER).encode())
    return found


@pytest.mark.parametrize("form", [CHAT, TEXT])
def test_no_field_of_a_recorded_request_is_passed_over(form: str) -> None:
    """A field that steers at any other value than a neutral one, one of another type, and an unknown one."""
    for name, field in KNOWN.items():
        for value in ODD:
            found, known = recorded(form, {name: value}), field.fits(value)
            like = [one for one in field.neutral or () if isinstance(one, bool) == isinstance(value, bool)]
            if not known or (field.steers and value not in like):
                assert isinstance(found, str) and (f"`{name}`" in found or name in READ), (name, value)
            elif name not in READ and name != "reasoning_effort":
                assert isinstance(found, dict), (name, value, found)
    assert recorded(form, {"mood": 1}) == "a request with `mood`, a field that is not known"
    assert recorded(form, {"reasoning_effort": 0.37}) == "a request with `reasoning_effort` of another form"


def test_no_field_of_a_log_is_passed_over() -> None:
    """What steers leaves a line out; a column of another type, or that is not known, is counted by its name."""
    for name, field in KNOWN.items():
        if name in READ or name in ("reasoning_effort", "enable_thinking"):
            continue
        for value in ODD:
            line = {"prompt": "a", "answer": "b", "finish_reason": "stop", name: value}
            found = parse_line(json.dumps(line).encode(), 1)
            like = [one for one in field.neutral or () if isinstance(one, bool) == isinstance(value, bool)]
            if field.steers and value not in like:
                assert isinstance(found, str) and f"`{name}`" in found
            else:
                assert isinstance(found, Line)
                assert found.unread == (() if field.fits(value) or name.endswith("_id") else (name,)), (name, value)


def test_the_documents_name_what_is_honoured() -> None:
    table = (ROOT / "docs" / "serving.md").read_text().partition("## This decoder as a server")[2]
    rows = [row for row in table.splitlines() if row.startswith("| `")]
    named = {name for row in rows[:-1] for name in re.findall(r"`([a-z_]+)", row.split("|")[1])}
    assert named == {name for name, field in KNOWN.items() if field.honoured}
    assert {name for name in re.findall(r"`([a-z_]+)`", rows[-1])} <= {
        name for name, field in KNOWN.items() if not field.honoured
    }
