"""Conversations, rendered by the target's template, with the answer alone scored."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import chat_templates
import pytest
import tiny
from question_worlds import build_instruct
from transformers import AutoTokenizer

from distill.data.chat_template import ChatTemplate, next_prompt
from distill.data.corpus import pack_given
from distill.data.prompts import ChatPrompts, cut_prompts
from distill.data.sources import Document
from distill.data.texts import read_answers, read_prompts
from distill.engines.torch.hugging_face import encode
from distill.errors import DataError, RecipeError
from distill.files import read_result
from distill.measuring.evaluation_results import EvaluationReport
from distill.recipe import Chat, load_recipe
from distill.run import Run

SHARED = tiny.ROOT.parent / "shared"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared tokenizers are not here")
QUESTIONS = tiny.ROOT / "data" / "questions.jsonl"
TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": " Six, I think. \n"},
]
QUESTION = {"role": "user", "content": "hello"}


pytestmark = pytest.mark.usefixtures("one_thread")


def dressed(plain: Any, style: str, marked: bool = False) -> Any:
    return chat_templates.dress(copy.deepcopy(plain), style, marked)


def talk(style: str) -> list[dict[str, Any]]:
    return TALK[1:] if style == "gemma" else TALK  # whose template refuses a system prompt


# ── templates ──


def answered(template: ChatTemplate, messages: list[dict[str, Any]], thinking: bool | None = None) -> list[str]:
    """Prompt and answer as text."""
    return [template.tokenizer.decode(ids) for ids in template.answered(messages, thinking)]


@pytest.mark.parametrize("style", ["llama-3", "mistral", "gemma"])
def test_scored_tokens_are_those_that_the_template_marks(plain: Any, style: str) -> None:
    """Against transformers' own masks of the same templates with generation marks."""
    marked = dressed(plain, style, marked=True)
    for count in (3, 5) if style != "gemma" else (2, 4):
        messages = talk(style)[:count]
        whole = marked.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        for tokenizer in (marked, dressed(plain, style)):
            prompt, answer = ChatTemplate(tokenizer, Chat()).answered(messages)
            ids = prompt + answer
            end = len(whole["assistant_masks"]) - whole["assistant_masks"][::-1].index(1)
            assert ids == whole["input_ids"][: len(ids)] and end == len(ids)
            assert all(whole["assistant_masks"][len(prompt) : end])
            assert not whole["assistant_masks"][len(prompt) - 1]


@needs_shared
def test_qwen_2_5() -> None:
    tokenizer = AutoTokenizer.from_pretrained(SHARED / "tokenizers" / "qwen2.5")
    template = ChatTemplate(tokenizer, Chat())
    whole = tokenizer.apply_chat_template(TALK, tokenize=False)
    for count in (3, 5):
        prompt, answer = answered(template, TALK[:count])
        assert whole.startswith(prompt + answer) and answer == str(TALK[count - 1]["content"]) + "<|im_end|>"
    prompt, _ = answered(template, TALK[1:3])
    assert prompt.startswith("<|im_start|>system\nYou are a helpful assistant<|im_end|>")


@pytest.mark.parametrize("style", list(chat_templates.STYLES))
def test_the_end_of_an_answer(plain: Any, style: str) -> None:
    tokenizer = dressed(plain, style)
    end = chat_templates.STYLES[style][2]
    assert ChatTemplate(tokenizer, Chat()).end == [tokenizer.convert_tokens_to_ids(end)]


def test_thinking_is_part_of_its_own_answer_and_of_no_later_prompt(plain: Any) -> None:
    r1, qwen = (ChatTemplate(dressed(plain, style), Chat()) for style in ("r1", "qwen-3"))
    thought = {"role": "assistant", "content": "<think>\nsum\n</think>\n\nFour."}
    apart = {"role": "assistant", "content": "Four.", "reasoning_content": "sum"}
    more = {"role": "user", "content": "And 3?"}
    for answer in (thought, apart):
        prompt, text = answered(r1, [QUESTION, answer])
        assert prompt.endswith("<|Assistant|><think>\n")
        assert text == "sum\n</think>\n\nFour.<|end_of_sentence|>"
    assert "sum" not in answered(r1, [QUESTION, thought, more, thought])[0]
    assert answered(qwen, [QUESTION, apart], thinking=True)[1] == "<think>\nsum\n</think>\n\nFour.<|im_end|>"
    prompt, text = answered(qwen, [QUESTION, {"role": "assistant", "content": "Four."}], thinking=False)
    assert prompt.endswith("assistant\n<think>\n\n</think>\n\n") and text == "Four.<|im_end|>"


def test_tools(plain: Any) -> None:
    tools = ({"type": "function", "function": {"name": "add"}},)
    template = ChatTemplate(dressed(plain, "qwen-3"), Chat(tools=tools))
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {"a": 1}}]}
    prompt, written = answered(template, [QUESTION, call])
    assert prompt.startswith("<|im_start|>system\nTools: ")
    assert written.startswith("\n<tool_call>\n") and written.endswith("</tool_call><|im_end|>")
    result = {"role": "tool", "content": "2"}
    prompt, after = answered(template, [QUESTION, call, result, {"role": "assistant", "content": "Two."}])
    assert after == "Two.<|im_end|>" and "<tool_call>" in prompt


def test_a_template_that_cannot_do_it_is_refused(plain: Any) -> None:
    with pytest.raises(DataError, match="chat template, and its tokenizer has none"):
        ChatTemplate(copy.deepcopy(plain), Chat())
    with pytest.raises(RecipeError, match="does not read enable_thinking"):
        ChatTemplate(dressed(plain, "gemma"), Chat(thinking=0.5))
    with pytest.raises(RecipeError, match="does not read date"):
        ChatTemplate(dressed(plain, "qwen-3"), Chat(thinking=1.0, arguments={"date": "today"}))
    with pytest.raises(ValueError, match=r"refuses it \(no system role\)"):
        ChatTemplate(dressed(plain, "gemma"), Chat()).prompt(TALK)


# ── prompts and given answers ──


def document(name: str, messages: list[dict[str, Any]], source: str = "a", split: Any = "train") -> Document:
    return Document(name, split, name, source, tuple(messages))


def prompts_of(plain: Any, style: str, settings: Chat, longest: int = 500) -> ChatPrompts:
    return ChatPrompts(ChatTemplate(dressed(plain, style), settings), longest, 0)


def test_further_turns_are_asked_one_after_another(plain: Any) -> None:
    chat = prompts_of(plain, "qwen-3", Chat(system=("S one.", "S two."), thinking=0.5, turns=2))
    asked = [{"role": "user", "content": text} for text in ("first", "second", "third")]
    found = [chat.prompt(document(f"d{n}", asked)) for n in range(60)]
    assert all(one is not None and one.chat is not None for one in found)
    described = [one.chat for one in found if one is not None and one.chat is not None]
    assert Counter(one["messages"][0]["content"] for one in described).keys() == {"S one.", "S two."}
    assert 15 < sum(one["thinking"] for one in described) < 45
    assert all(one["turns"] == ["second"] for one in described), "two turns at most"
    one = next(one for one in described if not one["thinking"])
    tokenizer = chat.template.tokenizer
    second = tokenizer.decode(next_prompt(chat.template, one, ["An answer."]) or [])
    assert second.count("<|im_start|>user") == 2 and "An answer.<|im_end|>" in second
    assert second.endswith("<think>\n\n</think>\n\n") and next_prompt(chat.template, one, ["A.", "B."]) is None
    assert [chat.prompt(document(f"d{n}", asked)) for n in range(60)] == found, "drawn by the seed and the name"


def test_a_tools_result_ends_what_can_be_asked(plain: Any) -> None:
    chat = prompts_of(plain, "qwen-3", Chat())
    messages = [*TALK, {"role": "tool", "content": "x"}, {"role": "user", "content": "later"}]
    assert chat.describe(document("d", messages))["turns"] == ["And 3 + 3?"]
    assert chat.dropped == {"turns of conversations after a tool's result": 1}


def test_prompts_are_mixed_by_weight_and_long_ones_left_out(plain: Any) -> None:
    chat = prompts_of(plain, "llama-3", Chat(), longest=40)
    few = [document(f"a{n}", [QUESTION | {"content": f"question {n}"}]) for n in range(40)]
    more = [document(f"b{n}", [QUESTION | {"content": f"other {n}"}], "b") for n in range(400)]
    text = [Document("t", "train", "word " * 500, "t")]
    long = [document("long", [QUESTION | {"content": "word " * 100}])]
    documents = few + more + text + long
    weights = {"a": 3.0, "b": 1.0, "t": 0.0}
    found = cut_prompts(documents, lambda text: [1] * len(text), 40, 8, 8, 0, chat, weights)
    assert Counter(one.source for one in found) == {"a": 30, "b": 10}
    all_of_them = cut_prompts(documents, lambda text: [1] * len(text), 1000, 8, 8, 0, chat, weights)
    assert Counter(one.source for one in all_of_them) == {"a": 40, "b": 400}
    assert chat.dropped["prompts too long for corpus.block"] >= 1


def test_only_answers_are_scored(plain: Any) -> None:
    chat = prompts_of(plain, "llama-3", Chat())
    tokenizer = chat.template.tokenizer
    documents = [
        document("d", TALK),
        Document("t", "train", "plain text", "t"),
        document("long", TALK[1:2] + TALK[2:3]),
    ]
    dropped: Counter[str] = Counter()
    packed, counts = pack_given(documents, 160, 10_000, lambda text: encode(tokenizer, text), ([], [0]), chat, dropped)
    scored = packed.labels()[packed.mask].tolist()
    text = [*encode(tokenizer, "plain text")[1:], 0]
    own = [str(one["content"]) for one in TALK if one["role"] == "assistant"]
    answers = [encode(tokenizer, content) + chat.template.end for content in own]
    assert scored == text + answers[0] + answers[1] + answers[0]
    assert sum(sum(count.values()) for count in counts.values()) == int((packed.documents >= 0).sum())
    assert packed.first is not None and packed.first.tolist()[0] == 0
    held_out, _ = pack_given(
        [document("d", TALK, split="test")], 160, 10_000, lambda text: [], ([], [0]), chat, dropped
    )
    assert held_out.labels()[held_out.mask].tolist() == answers[1], "one answer of a conversation is independent"


# ── a whole stage ──


def test_questions_from_the_file_to_the_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nonsense content, real path: questions, template, answers, store, training, evaluation by class and mode."""
    recipe = chat_recipe(tmp_path)
    said = tiny.shown(capsys, "check", recipe)
    assert (
        f"{len(QUESTIONS.read_text().splitlines())} documents" in said
        and "a prompt, as the target's template writes it" in said
    ), said
    assert "<|im_start|>user" in said
    assert tiny.call("train", recipe, "--runs", tmp_path, "--until", "eval") == 0
    run = Run(tmp_path / "tiny", load_recipe(recipe))
    found = read_prompts(run, "train")
    assert len(found) == 12 and all(one.chat is not None and one.label for one in found)
    written = {one.id: one for one in read_answers(run, "train")}
    for prompt in found:
        assert prompt.chat is not None
        own, more = written[prompt.id], written.get(f"{prompt.id}/1")
        assert (own.label, own.mode, own.prompt) == (prompt.label, prompt.mode, prompt.ids)
        if more is not None:  # the target ended its first answer, and was asked the second question
            assert prompt.chat["turns"] and own.ended and more.prompt[:4] == prompt.ids[:4]
    manifest = json.loads(run.path("answers", "manifest.json").read_text())
    assert sum(one["texts"] for one in manifest["by_class"]) == len(written) - sum(manifest["dropped"].values())
    assert {one.mode for one in found} == {"thinking", "no thinking"}
    summary = json.loads(run.path("corpus", "summary.json").read_text())
    asked = summary["train"]["asked"]
    assert sum(one["texts"] for one in asked) == 12
    assert sum(one["tokens"] for one in asked) == sum(len(one.ids) for one in found)
    report = read_result(run.path("eval.json"), EvaluationReport)
    own = report.domains["answers"]["after"]
    assert "files" not in report.domains, "a corpus of questions has no given text"
    assert sum(one.prompts for one in report.classes) == own.prompts == 6
    assert sum(one.tokens for one in report.classes) == own.tokens
    mean = sum(one.tokens * one.acceptance["after"].mean for one in report.classes) / own.tokens
    assert mean == pytest.approx(own.acceptance_sampling.mean)
    assert "by class of prompt" in run.path("eval.md").read_text()


def chat_recipe(folder: Path) -> Path:
    """A recipe on the repository's questions for a tiny target with a template."""
    build_instruct(folder)
    values = tiny.recipe_values(folder)
    values["corpus"] |= {
        "sources": [{"kind": "jsonl", "path": str(QUESTIONS)}],
        "validation": 0.1,
        "test": 0.1,
        "block": 256,
    }
    values["chat"] = {"thinking": 0.5}
    return tiny.write_recipe(folder / "recipe.yaml", values)
