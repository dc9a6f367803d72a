"""`distill eval --target A --draft B`: what is measured behind the prompts of conversations, against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import torch

from distill import api
from distill.engines.ends import target_ends
from distill.engines.torch.hugging_face import load_model, load_tokenizer
from distill.recipe import Sampler

TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}<|assistant|>"
QUESTIONS = [f"def {word}(buffer, stream):" for word in tiny.WORDS[:4]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target/, draft/ and chat.jsonl: conversations of two classes, one too long for a block, and a plain text."""
    folder = tmp_path_factory.mktemp("chats")
    tiny.build_model(folder / "target", layers=3)
    tiny.build_model(folder / "draft", layers=1)
    (folder / "target" / "chat_template.jinja").write_text(TEMPLATE)
    records = [{"prompt": text, "category": ("odd", "even")[at % 2]} for at, text in enumerate(QUESTIONS)]
    lines = [json.dumps(one) for one in [*records, {"prompt": "def alpha beta " * 400}]]
    (folder / "chat.jsonl").write_text("\n".join(lines))
    return folder


def test_answers_stand_behind_the_template(place: Path, capsys: pytest.CaptureFixture[str], short_texts: int) -> None:
    """Greedy agreement of each class, on texts that transformers renders and generates."""
    tokenizer = load_tokenizer(str(place / "target"))
    big, small = (load_model(str(place / name), "float32", torch.device("cpu")) for name in ("target", "draft"))
    found: dict[str, list[bool]] = {"odd": [], "even": []}
    for at, text in enumerate(QUESTIONS):
        ids = tokenizer.apply_chat_template([{"role": "user", "content": text}], return_tensors="pt")["input_ids"]
        options = {"max_new_tokens": short_texts, "do_sample": False}
        whole = big.generate(ids, eos_token_id=target_ends(str(place / "target"), tokenizer).ids, **options)
        here = slice(ids.shape[1] - 1, whole.shape[1] - 1)
        own, drafted = (model(whole).logits[0, here].argmax(-1) for model in (big, small))
        found[("odd", "even")[at % 2]] += (own == drafted).tolist()
    with tiny.one_thread():
        report = api.evaluate(place / "target", place / "draft", [place / "chat.jsonl"], sampler=Sampler(temperature=0))
    assert [*report.domains] == ["answers"]  # no text was given as it is
    whole_result = report.domains["answers"]["draft"]
    classes = {one.label: one for one in report.groups if one.of == "class"}
    long = classes.pop("chat.jsonl")  # of which the last tokens are read
    assert whole_result.tokens == len(found["odd"] + found["even"]) + long.tokens and 0 < long.tokens <= short_texts
    for own in classes.values():
        assert own.tokens == len(found[own.label])
        assert own.acceptance["draft"].mean == pytest.approx(sum(found[own.label]) / len(found[own.label]))
    assert {*classes} == {*found}
    assert "1 left out: beginnings of prompts of more than" in capsys.readouterr().err


def test_a_target_without_a_template_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = tiny.refused(capsys, "eval", place / "draft", place / "draft", "--prompts", place / "chat.jsonl")
    assert "need the target's chat template, and its tokenizer has none" in said


@pytest.mark.parametrize("option", [("--temperature", 1), ("--count", 8), ("--prompts", "a.txt")])
def test_what_a_run_would_ignore_is_refused(
    option: tuple[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = tiny.refused(capsys, "eval", "run", *option, "--runs", tmp_path)
    assert option[0] in said
