"""Conversations, rendered by the target's template, with the answer alone scored; thinking and calls in every form."""

from __future__ import annotations

import copy
import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import chat_templates
import pytest
import tiny
import tokenizer_kinds
from question_worlds import build_instruct
from tiny import Capture, edit
from transformers import PreTrainedTokenizerFast

from distill.data.chat_template import ChatTemplate, PlainTexts, next_prompt, reader_of
from distill.data.corpus import pack_given
from distill.data.prompts import SPELLED_END, ChatPrompts, cut_prompts
from distill.data.records import THINKING, message_of, normal, turns_of
from distill.data.samples import read_answers, read_prompts
from distill.data.sources import Document
from distill.data.traffic import encode_line, parse_line
from distill.engines.ends import target_ends
from distill.engines.torch.hugging_face import encode, load_tokenizer
from distill.errors import DataError, RecipeError
from distill.files import read_result
from distill.measuring.evaluation_results import EvaluationReport
from distill.recipe import Chat, load_recipe
from distill.run import Run

QUESTIONS = tiny.ROOT / "data" / "questions.jsonl"
TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": " Six, I think. \n"},
]


USER = {"role": "user", "content": "2 + 2?"}
pytestmark = pytest.mark.usefixtures("one_thread")


def dressed(plain: Any, style: str, marked: bool = False) -> Any:
    tokenizer = copy.deepcopy(plain)
    return chat_templates.dress(tokenizer, style, marked)


def talk(style: str) -> list[dict[str, Any]]:
    return TALK[1:] if style == "gemma" else TALK  # whose template refuses a system prompt


# ── templates ──


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


@pytest.mark.parametrize("style", list(chat_templates.STYLES))
def test_the_end_of_an_answer(plain: Any, style: str) -> None:
    tokenizer = dressed(plain, style)
    end = chat_templates.STYLES[style][2]
    assert ChatTemplate(tokenizer, Chat()).end == [tokenizer.convert_tokens_to_ids(end)]


def test_a_template_that_cannot_do_it_is_refused(plain: Any) -> None:
    with pytest.raises(DataError, match="chat template, and its tokenizer has none"):
        ChatTemplate(copy.deepcopy(plain), Chat())
    with pytest.raises(RecipeError, match="does not read enable_thinking"):
        ChatTemplate(dressed(plain, "gemma"), Chat(thinking=0.5))
    with pytest.raises(RecipeError, match="does not read date"):
        ChatTemplate(dressed(plain, "qwen-3"), Chat(thinking=1.0, arguments={"date": "today"}))
    with pytest.raises(ValueError, match=r"refuses it \(no system role\)"):
        ChatTemplate(dressed(plain, "gemma"), Chat()).prompt(TALK)


@pytest.mark.parametrize("kind", tokenizer_kinds.KINDS)
def test_an_answer_is_tokenised_where_it_stands(kind: str) -> None:
    """Against the ids of the whole rendered chat; encoded alone, SentencePiece puts a space before the first word."""
    own = tokenizer_kinds.with_bos(tokenizer_kinds.KINDS[kind]())
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=own, bos_token="<s>", eos_token="<end>")
    contents = [text for text in tokenizer_kinds.TEXTS if text.strip()]
    for style, trim in itertools.product(chat_templates.TURNS, (False, True)):
        template = ChatTemplate(chat_templates.with_turns(tokenizer, style, trim), Chat())
        for content, ended in itertools.product(contents, (True, False)):
            fault = chat_templates.fault_of_answer(template, [USER, answer(content=content)], ended)
            assert fault is None, (style, trim, content, ended, fault)


def test_a_space_that_the_template_writes_is_learnt_once(plain: Any) -> None:
    """DeepSeek's prompts end with `Assistant:`; logs hold its answers with the space or without."""
    template = ChatTemplate(chat_templates.with_turns(dressed(plain, "llama-3"), "colon", False), Chat())
    lines = [json.dumps({"messages": [USER, answer(content=f"{space}The bridge")]}).encode() for space in ("", " ")]
    read = [parse_line(one, 1) for one in lines]
    found = [encode_line(one, template.tokenizer, template) for one in read if not isinstance(one, str)]
    assert found[0] == found[1] and template.tokenizer.decode(found[0][1]).startswith(" The bridge")
    prompt = template.tokenizer.decode(found[0][0])
    line = parse_line(json.dumps({"prompt": prompt, "answer": " The bridge"}).encode(), 1)
    assert not isinstance(line, str) and encode_line(line, template.tokenizer, template) == found[0]


def test_a_rendered_prompt_of_a_log_ends_a_turn(plain: Any) -> None:
    """Its end is the template's, another one than that of texts."""
    template = ChatTemplate(dressed(plain, "gemma"), Chat())
    assert template.end != [template.tokenizer.eos_token_id]
    turn = template.tokenizer.decode(template.end)
    line = parse_line(json.dumps({"prompt": template.text([USER]), "answer": f"4{turn}\n5{turn}"}).encode(), 1)
    assert not isinstance(line, str)
    assert encode_line(line, template.tokenizer, template)[1] == [*encode(template.tokenizer, "4"), *template.end]
    for prompt, end in ((template.text([USER]), template.end), ("2 + 2 = ", [template.tokenizer.eos_token_id])):
        line = parse_line(json.dumps({"prompt": prompt, "answer": "4"}).encode(), 1)
        assert not isinstance(line, str) and encode_line(line, template.tokenizer, template)[1][-1:] == end


@pytest.mark.parametrize("named", ["nothing", "a list", "the tokenizer"])
def test_a_turn_ends_where_the_template_ends_it(tmp_path: Path, named: str) -> None:
    """Whatever the files name: a base model trained on chats keeps its own end of a text in all of them."""
    folder = tokenizer_kinds.save(tokenizer_kinds.byte_level("qwen2"), tmp_path / "m", eos_token="<s>")
    edit(folder / "config.json", eos_token_id=None if named == "nothing" else [1, 3])
    if named != "the tokenizer":
        edit(folder / "tokenizer_config.json", eos_token=None)
    tokenizer = load_tokenizer(str(folder))
    numbers = {name: tokenizer.convert_tokens_to_ids(name) for name in ("<s>", "<end>", "<tool>")}
    assert tokenizer.eos_token_id == (None if named == "nothing" else 1)
    chat_templates.with_turns(tokenizer, "tokens", False)
    ends = target_ends(str(folder), tokenizer).ids
    assert numbers["<end>"] in ends and (named == "nothing" or {1, 3} <= {*ends})
    assert ChatTemplate(tokenizer, Chat()).end == [numbers["<end>"]] != [tokenizer.eos_token_id]


# ── prompts and given answers ──


def document(name: str, messages: list[dict[str, Any]], source: str = "a", split: Any = "train") -> Document:
    return Document(name, split, name, source, tuple(messages))


def prompts_of(plain: Any, style: str, settings: Chat, longest: int = 500) -> ChatPrompts:
    return ChatPrompts(ChatTemplate(dressed(plain, style), settings), longest, 0)


def test_further_turns_are_asked_one_after_another(plain: Any) -> None:
    chat = prompts_of(plain, "qwen-3", Chat(system=("S one.", "S two."), thinking=0.5, turns=2))
    asked = [*turns_of(["first", "second", "third"])]
    found = [chat.prompt(document(f"d{n}", asked)) for n in range(60)]
    described = [one.chat for one in found if one is not None and one.chat is not None]
    assert len(described) == 60 and {one["messages"][0]["content"] for one in described} == {"S one.", "S two."}
    assert 15 < sum(one["thinking"] for one in described) < 45
    assert all(one["turns"] == ["second"] for one in described), "two turns at most"
    one = next(one for one in described if not one["thinking"])
    tokenizer = chat.template.tokenizer
    second = tokenizer.decode(next_prompt(chat.template, one, ["An answer."]) or [])
    assert second.count("<|im_start|>user") == 2 and "An answer.<|im_end|>" in second
    assert second.endswith("<think>\n\n</think>\n\n") and next_prompt(chat.template, one, ["A.", "B."]) is None
    assert [chat.prompt(document(f"d{n}", asked)) for n in range(60)] == found, "drawn by the seed and the name"


def test_a_rendered_prompt_is_not_rendered_again(plain: Any) -> None:
    for style in chat_templates.STYLES:
        chat = prompts_of(plain, style, Chat())
        text = chat.template.text([USER])
        own, other = document("a", [USER | {"content": text}, answer(content="x")]), document("b", [USER])
        prompt, plainly = chat.prompt(own), chat.prompt(other)
        assert prompt is not None and plainly is not None and prompt.prompt == plainly.prompt
        assert chat.dropped == {"prompts that were rendered already: kept as they are": 1}
        ids = encode(chat.template.tokenizer, "x")
        assert [*chat.given(own)] == [(plainly.prompt, ids + chat.template.end)]


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def test_what_is_asked_together_stays_together(plain: Any) -> None:
    """Two questions before one answer, and a system message between turns: as the template writes the whole record."""
    chat = prompts_of(plain, "llama-3", Chat())
    tokenizer = chat.template.tokenizer
    talk = [
        system("Be kind."),
        USER,
        USER | {"content": "In one word."},
        answer(),
        system("In capitals."),
        USER,
        answer(),
    ]
    prompt = chat.prompt(document("d", talk))
    assert prompt is not None and prompt.chat is not None and not chat.dropped
    for count, given in ((3, []), (6, ["4"])):
        wanted = tokenizer.apply_chat_template(talk[:count], tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(next_prompt(chat.template, prompt.chat, given) or []) == wanted
    assert next_prompt(chat.template, prompt.chat, ["4", "4"]) is None
    samples = [*chat.given(document("d", talk))]
    for (asked, said), count in zip(samples, (4, 7), strict=True):
        whole = tokenizer.apply_chat_template(talk[:count], tokenize=False)
        assert tokenizer.decode([*asked, *said]) == whole
    old = {"messages": [USER], "turns": ["and?"], "thinking": None}  # of runs of before
    assert tokenizer.decode(next_prompt(chat.template, old, ["4"]) or []).count("and?") == 1


def test_a_message_that_the_template_leaves_out_is_counted(plain: Any) -> None:
    """As gpt-oss's, which reads the first system message alone."""
    chat = prompts_of(plain, "first system", Chat())
    late = "the target's chat template leaves out a message of the system"
    talk = [system("Be kind."), USER, answer(), system("In capitals."), USER, answer()]
    prompt = chat.prompt(document("d", talk))
    assert prompt is not None and prompt.chat is not None and prompt.chat["turns"] == []
    assert chat.dropped == {f"later turns: {late}": 1}
    assert len([*chat.given(document("d", talk))]) == 1 and chat.dropped[late] == 1
    assert chat.prompt(document("d", [USER, system("In capitals."), answer()])) is None and chat.dropped[late] == 2
    # One that changes a text writes it: SmolLM3 takes its switches out of a system prompt.
    switch = prompts_of(plain, "qwen-3", Chat())
    switch.template.tokenizer.chat_template = chat_templates.PARTS.replace(
        "{{ m.content }}", "{{ m.content | replace('/no_think', '') }}"
    )
    assert switch.prompt(document("d", [system("Be kind. /no_think now"), USER])) is not None and not switch.dropped


def test_an_answer_that_spells_its_end_has_one(plain: Any) -> None:
    chat = prompts_of(plain, "qwen-3", Chat())
    decode = chat.template.tokenizer.decode
    for spelled in ("{}<|im_end|>", "{}<|im_end|>\n", "{}<|endoftext|>", "{}<|im_end|>\n<|endoftext|>"):
        talk = [USER, answer(content=spelled.format("Four.")), USER, answer(content=spelled.format("Five."))]
        samples = [(decode(asked), decode(said)) for asked, said in chat.given(document("d", talk))]
        assert [said for _, said in samples] == ["Four.<|im_end|>", "Five.<|im_end|>"]
        assert samples[1][0].count("<|im_end|>") == 3 and "<|endoftext|>" not in samples[1][0]
        assert chat.dropped == {SPELLED_END: 2}
        chat.dropped.clear()
        rendered = document("r", [USER | {"content": chat.template.text([USER])}, talk[1]])
        assert [decode(said) for _, said in chat.given(rendered)] == ["Four.<|im_end|>"]
        chat.dropped.clear()
    for content, reason in (
        ("Four.<|im_end|>\n<|im_start|>user\nAnd?", "an answer that goes on after an end token"),
        ("Four.<|eot_id|>", "an answer that ends with `<|eot_id|>`, which is no token of the target"),
        ("Four.</s>", "an answer that ends with `</s>`, which is no token of the target"),
    ):
        assert not [*chat.given(document("d", [USER, answer(content=content)]))] and chat.dropped == {reason: 1}
        chat.dropped.clear()
    html = answer(content="Write <s>4</s>")  # no end of this target
    assert [decode(said) for _, said in chat.given(document("d", [USER, html]))] == ["Write <s>4</s><|im_end|>"]


@pytest.mark.parametrize("style", [*chat_templates.STYLES, *chat_templates.FURTHER])
def test_a_rendered_text_is_the_conversation_that_it_is(plain: Any, style: str) -> None:
    tokenizer = dressed(plain, style)
    template, read = ChatTemplate(tokenizer, Chat()), reader_of(tokenizer)
    talks = [[USER, answer()], [USER, answer(), USER | {"content": "And 3?"}, answer(content="Six.\nYes.")], [USER]]
    talks += [] if style == "gemma" else [[system("Be kind."), *talks[1]]]
    for talk in talks:
        text = template.text(talk, None, False)
        found = read(text)
        assert found is not None and template.text(found, None, False) == text
        assert list(found) == talk or style == "mistral"  # which writes the system prompt into the question
        if style != "qwen-3" and (bos := tokenizer.bos_token) and text.startswith(bos):  # there it begins each turn
            assert read(text.removeprefix(bos)) == found
    assert read("A plain text, with a ratio of 1:2.") is None
    with pytest.raises(ValueError, match="look rendered by the target's chat template, and are not"):
        read(template.text(talks[1], None, False)[:-12] + " and more")


def test_rendered_prompts_are_never_rendered_again(plain: Any) -> None:
    """Without the beginning of an answer it is added; one that begins or holds its answer is left out."""
    for style in ("llama-3", "qwen-3", "gemma", "mistral"):
        chat = prompts_of(plain, style, Chat())
        decode, text = chat.template.tokenizer.decode, chat.template.text
        whole, headless = text([USER]), text([USER], None, False)
        own = chat.prompt(document("a", [USER | {"content": headless}, answer()]))
        assert own is not None and decode(own.prompt) == whole and len(chat.lengths) == 1
        assert [decode(asked) for asked, _ in chat.given(document("a", [USER | {"content": headless}, answer()]))] == [
            whole
        ]
        for content, words in (
            (whole + "Well,", "rendered"),
            (text([USER, answer()], None, False), "a rendered prompt that holds its answer"),
        ):
            chat.dropped.clear()
            assert chat.prompt(document("b", [USER | {"content": content}])) is None
            assert chat.dropped.total() == 1 and words in next(iter(chat.dropped)), (style, chat.dropped)
    chat.dropped.clear()
    other = document("c", [USER | {"content": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"}])
    assert chat.prompt(other) is not None  # of another family: asked as it stands, and said
    assert chat.dropped == {"prompts that hold marks of a chat template (`<|im_start|>`): asked unchanged": 1}


def test_documents_need_the_template_that_servers_take(plain: Any) -> None:
    """Of several templates by name, the one for documents is never taken by itself."""
    tokenizer = dressed(plain, "named")
    template, tools = ChatTemplate(tokenizer, Chat()), [{"type": "function", "function": {"name": "add"}}]
    with pytest.raises(ValueError, match="`documents` that the target's chat template does not write"):
        template.of_conversation({"documents": [{"text": "a book"}]})
    own, lacking = template.of_conversation({"tools": tools})
    assert not lacking and '"add"' in own.text([USER]) and '"add"' not in template.text([USER])
    chat = ChatPrompts(template, 500, 0)
    given = replace(document("d", [USER, answer()]), arguments={"documents": [{"text": "a book"}]})
    assert chat.prompt(given) is None and not [*chat.given(given)] and chat.dropped.total() == 2


@pytest.mark.parametrize("lost", [{"contents": "a page"}, {}])
def test_a_document_that_the_template_leaves_out(plain: Any, lost: dict[str, str]) -> None:
    tokenizer = dressed(plain, "named")
    tokenizer.chat_template = "{% for d in documents %}{{ d.text }}{% endfor %}{{ messages[0].content }}"
    template, book = ChatTemplate(tokenizer, Chat()), {"text": 'a "book"'}
    assert book["text"] in template.with_arguments({"documents": [book]}).text([USER])
    with pytest.raises(ValueError, match="`documents` that the target's chat template does not write"):
        template.with_arguments({"documents": [book, lost]}).text([USER])


def test_parts_of_a_text_are_joined_as_the_template_joins_them(plain: Any) -> None:
    parts = [{"type": "text", "text": "2 + "}, {"type": "text", "text": "2?"}]
    message, written = message_of(USER | {"content": parts}, Counter()), USER | {"content": parts}
    tokenizer = dressed(plain, "parts")
    wanted = tokenizer.apply_chat_template([written], tokenize=False, add_generation_prompt=True)
    assert ChatTemplate(tokenizer, Chat()).text([message]) == wanted and "2 + 2?" in wanted
    with pytest.raises(ValueError, match="a message of several parts, which the target's chat template does not write"):
        ChatTemplate(dressed(plain, "llama-3"), Chat()).text([message])


def test_equal_prompts_are_asked_once(plain: Any) -> None:
    """Of texts and conversations, in all splits together; a conversation that goes on is learnt from."""
    chat, dropped, taken = prompts_of(plain, "llama-3", Chat()), Counter[str](), set[bytes]()
    texts = [Document(name, "train", "licence " * 20 + name, "t") for name in "ab"]
    asked = {name: [USER, answer(content="4"), USER | {"content": name}] for name in "cd"}
    for split, counts in (("test", (1, 1)), ("train", (0, 2))):
        documents = [replace(one, split=split) for one in texts]
        documents += [document(name, messages, split=split) for name, messages in asked.items()]
        encode = lambda text: [ord(sign) for sign in text]  # noqa: E731
        found = [*cut_prompts(documents, encode, 9, 8, 400, 0, chat, None, taken, dropped)]
        assert (sum(one.chat is None for one in found), sum(one.chat is not None for one in found)) == counts
    assert dropped == {"prompts equal to another": 4}


def test_a_tools_result_ends_what_can_be_asked(plain: Any) -> None:
    chat = prompts_of(plain, "qwen-3", Chat())
    messages = [*TALK, {"role": "tool", "content": "x"}, {"role": "user", "content": "later"}]
    prompt = chat.prompt(document("d", messages))
    assert prompt is not None and prompt.chat is not None and prompt.chat["turns"] == ["And 3 + 3?"]
    assert chat.dropped == {"turns of conversations after a tool's result": 1}


def test_prompts_are_mixed_by_weight_and_long_ones_cut(plain: Any) -> None:
    chat = prompts_of(plain, "llama-3", Chat(), longest=40)
    few = [document(f"a{n}", [USER | {"content": f"question {n}"}]) for n in range(40)]
    more = [document(f"b{n}", [USER | {"content": f"other {n}"}], "b") for n in range(400)]
    text = [Document("t", "train", "word " * 500, "t")]
    long = [document("long", [USER | {"content": "word " * 100}])]
    documents = few + more + text + long
    weights = {"a": 3.0, "b": 1.0, "t": 0.0}
    found = cut_prompts(documents, lambda text: [1] * len(text), 40, 8, 8, 0, chat, weights)
    assert Counter(one.source for one in found) == {"a": 30, "b": 10}
    all_of_them = cut_prompts(documents, lambda text: [1] * len(text), 1000, 8, 8, 0, chat, weights)
    assert Counter(one.source for one in all_of_them) == {"a": 41, "b": 400}
    cutting = ChatPrompts(chat.template, 40, 0)
    prompt, whole = cutting.prompt(long[0]), chat.template.prompt(long[0].messages or ())
    assert prompt is not None and cutting.lengths == [len(whole)] and cutting.dropped.total() == 1
    begun = len(cutting.opening)
    assert prompt.prompt == [*cutting.opening, *whole[len(whole) - 40 + begun :]] and len(prompt.prompt) == 40


def test_only_answers_are_scored(plain: Any) -> None:
    chat = prompts_of(plain, "llama-3", Chat())
    tokenizer = chat.template.tokenizer
    documents = [document("d", TALK), Document("t", "train", "plain text", "t"), document("long", TALK[1:3])]
    dropped: Counter[str] = Counter()
    rest: Any = (160, 10_000, lambda text: encode(tokenizer, text), ([], [0]), chat, dropped)
    packed, total = pack_given(documents, *rest)
    scored = packed.labels().tolist()
    text = [*encode(tokenizer, "plain text")[1:], 0]
    own = [str(one["content"]) for one in TALK if one["role"] == "assistant"]
    answers = [encode(tokenizer, content) + chat.template.end for content in own]
    assert scored == text + answers[0] + answers[1] + answers[0]
    assert total == int((packed.documents >= 0).sum())
    assert packed.first is not None and packed.first.tolist()[0] == 0
    held_out, _ = pack_given([document("d", TALK, split="test")], *rest)
    assert held_out.labels().tolist() == answers[1], "one answer of a conversation is independent"


# ── a whole stage ──


def test_questions_from_the_file_to_the_evaluation(tmp_path: Path, capsys: Capture) -> None:
    """Nonsense content, real path: questions, template, answers, store, training, evaluation by class and mode."""
    build_instruct(tmp_path)
    values = tiny.recipe_values(tmp_path) | {"chat": {"thinking": 0.5}}
    sources = [{"kind": "jsonl", "path": str(QUESTIONS)}]
    values["corpus"] |= {"sources": sources, "validation": 0.1, "test": 0.1, "block": 256}
    recipe = tiny.write_recipe(tmp_path / "recipe.yaml", values)
    said = tiny.shown(capsys, "check", recipe)
    assert f"{len(QUESTIONS.read_text().splitlines())} documents" in said
    assert "a prompt, as the target's template writes it" in said and "<|im_start|>user" in said
    assert tiny.call("train", recipe, "--runs", tmp_path, "--until", "eval") == 0
    run = Run(tmp_path / "tiny", load_recipe(recipe))
    found = read_prompts(run, "train")
    assert len(found) == 12 and all(one.chat is not None and one.label for one in found)
    written = {one.id: one for one in read_answers(run, "train")}
    for prompt in found:
        assert prompt.chat is not None
        own, more = written[prompt.id], written.get(f"{prompt.id}/1")
        assert (own.label, own.prompt) == (prompt.label, prompt.prompt)
        if more is not None:  # the target ended its first answer, and was asked the second question
            assert prompt.chat["turns"] and own.ended and more.prompt[:4] == prompt.prompt[:4]
    manifest = json.loads(run.path("answers", "manifest.json").read_text())
    assert sum(one["texts"] for one in manifest["by_class"].values()) == len(written) - sum(
        manifest["dropped"].values()
    )
    assert {one.label.rpartition(", ")[2] for one in found} == {"thinking", "no thinking"}
    asked = json.loads(run.path("corpus", "summary.json").read_text())["train"]["asked"]
    assert sum(one["texts"] for one in asked.values()) == 12
    assert sum(one["tokens"] for one in asked.values()) == sum(len(one.prompt) for one in found)
    report = read_result(run.path("eval.json"), EvaluationReport)
    own = report.domains["answers"]["after"]
    assert "files" not in report.domains, "a corpus of questions has no given text"
    assert sum(one.prompts for one in report.groups if one.of == "class") == own.prompts == 6
    assert sum(one.tokens for one in report.groups if one.of == "class") == own.tokens
    mean = sum(one.tokens * one.acceptance["after"].mean for one in report.groups if one.of == "class") / own.tokens
    assert mean == pytest.approx(own.acceptance_sampling.mean)
    assert "class: " in run.path("eval.md").read_text()


# ── every form of thinking and of tool calls ──

SUM = "Two and two."
DETAILS = [{"type": "reasoning.text", "text": "Two and "}, {"type": "reasoning.text", "text": "two."}]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": "zwölf"}}}
TEXT_CALL = CALL | {"function": {"name": "add", "arguments": json.dumps(CALL["function"]["arguments"])}}


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
    ids = template.answered([*map(normal, messages)])
    line = parse_line(json.dumps({"messages": messages, **more}).encode(), 1)
    assert not isinstance(line, str), line
    assert encode_line(line, template.tokenizer, template) == ids
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
    own = normal(message)
    if style == "llama-3":
        with pytest.raises(ValueError, match=expected):
            template.answered([USER, own])
        return
    assert by_every_way(template, [USER, message]) == expected
    earlier = template.text([USER, own, USER])
    assert earlier == template.text([USER, normal(SPELLINGS[0]), USER]) and (SUM in earlier) is (style == "channels")


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


def test_check_of_a_corpus_of_rendered_prompts(tmp_path: Path, capsys: Capture) -> None:
    """Each is asked as it stands, and counted; one text column of rendered conversations is conversations."""
    build_instruct(tmp_path)
    template = ChatTemplate(load_tokenizer(str(tmp_path / "target")), Chat())
    texts = [template.text([USER | {"content": f"{n} + 2?"}]) for n in range(30)]
    rows = [{"prompt": text, "answer": "4"} for text in texts]
    rows += [{"text": template.text([USER | {"content": f"{n} + 3?"}, answer()], None, False)} for n in range(30)]
    rows += [{"text": "### Human: hi\n### Assistant: hello"}]
    for number, some in enumerate((rows[:30], rows[30:])):
        (tmp_path / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
        values = tiny.recipe_values(tmp_path)
        sources = [{"kind": "jsonl", "path": str(tmp_path / "talks.jsonl")}]
        values["corpus"] |= {"sources": sources, "block": 256, "validation": 0.3, "test": 0.3}
        code = tiny.call("check", tiny.write_recipe(tmp_path / "recipe.yaml", values))
        said = "".join(capsys.readouterr())
        assert code == 0 and "corpus.block 256 covers 100.0% of 30 prompts" in said, said
        kept = "30 prompts that were rendered already: kept as they are"
        other = "1 dropped: texts that look rendered by another chat template (`### Assistant:`): read as plain text"
        assert (kept in said, other in said) == (not number, bool(number))


def test_check_says_which_answers_are_left_out(tmp_path: Path, capsys: Capture) -> None:
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
    thought = [USER, normal(answer(reasoning=SUM))]
    on = joined.with_arguments({"thinking": True})
    assert joined.tokenizer.decode(on.answered(thought)[1]).startswith(f"{SUM}</think>4")
    with pytest.raises(ValueError, match=r"does not write the thinking|begins this answer differently"):
        joined.answered(thought)  # whose prompt has closed the thinking
    # Logs of a template that opens the thinking, for one that does not.
    closed = [USER, answer(content=f"{SUM}\n</think>\n\n4")]
    assert qwen.answered(closed) == qwen.answered(thought)
    # Cut short: within the thinking, and behind it.
    cut = [USER, normal(answer(content="", reasoning=SUM))]
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
        template.answered([*map(normal, both)], ended=False)
    with pytest.raises(ValueError, match="does not write the tool calls"):
        ChatTemplate(dressed(plain, "gemma"), Chat()).answered([*map(normal, messages)])


def test_tools_of_a_served_line_are_offered(plain: Any) -> None:
    tokenizer = dressed(plain, "qwen-3")
    tools = [{"type": "function", "function": {"name": "add"}}]
    messages = [USER, answer(content=None, tool_calls=[TEXT_CALL])]
    line = parse_line(json.dumps({"messages": messages, "tools": tools}).encode(), 1)
    assert not isinstance(line, str)
    own = ChatTemplate(tokenizer, Chat(tools=tuple(tools)))
    expected = own.answered([*map(normal, messages)])
    assert encode_line(line, tokenizer, ChatTemplate(tokenizer, Chat())) == expected and "Tools: " in tokenizer.decode(
        expected[0]
    )


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


def test_tags_of_html_are_plain_text(plain: Any) -> None:
    """Gemma's vocabulary holds them whole, as added tokens that are not special; other such tokens mark structure."""
    tokenizer = copy.deepcopy(plain)
    tokenizer.add_tokens(["<h1>", "</em>", "<think>", "<tool_call>", "\n\n"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    number = tokenizer.get_added_vocab()
    special = PlainTexts(tokenizer, Chat()).special
    assert {number["<tool_call>"], number["<image>"]} <= special
    assert not special & {number[text] for text in ("<h1>", "</em>", "<think>", "\n\n")}
    tokenizer.chat_template = chat_templates.JOINED  # which writes it
    assert number["<think>"] in ChatTemplate(tokenizer, Chat()).special
