"""Questions that the target itself writes: headers, filters, rounds, resuming, every writer, reports."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import question_worlds as worlds
import tiny
from tiny import Capture, Patch
from writing_worlds import BadServer, interrupted

from distill.data.chat_template import ChatTemplate
from distill.data.corpus import corpus
from distill.data.samples import AskedQuestions, QuestionTexts, Reply, Request, read_prompts
from distill.data.sources import question_name, read_documents, split_of, with_questions
from distill.engines.torch.hugging_face import encode, load_tokenizer
from distill.errors import DataError, RecipeError
from distill.files import read_json, read_result
from distill.gguf.writer import export_gguf
from distill.pipeline.running import plan_run
from distill.pipeline.stages import find_stage, key_parts
from distill.recipe import Chat, Recipe, load_recipe, parse_recipe
from distill.run import Run
from distill.teacher.answers import (
    ALIKE,
    EQUAL,
    LOOPING,
    NOT_ENDED,
    SHORT,
    SIMILAR,
    SPECIAL,
    WORDLESS,
    QuestionRequests,
    grams,
    questions,
    repeats,
    words,
)
from distill.teacher.writers import GgufWriter, TorchWriter

WORDS = [
    f"{first}{second}" for first in ("ba", "ke", "lo", "mi", "nu", "ra") for second in ("den", "fil", "gor", "tam")
]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A world whose target writes questions; nobody changes it."""
    folder = tmp_path_factory.mktemp("talking")
    worlds.build(folder)
    return folder


@pytest.fixture(scope="module")
def asked(talking: Path) -> Path:
    """A run whose questions and corpus are there; nobody changes it."""
    with tiny.one_thread():
        assert tiny.call("train", talking / "recipe.yaml", "--runs", talking / "runs", "--until", "corpus") == 0
    return talking / "runs" / "tiny"


def sentence(request: Request) -> str:
    """Six words drawn by a request's own seed."""
    return " ".join(random.Random(request.seed).choices(WORDS, k=6)) + "?"


@pytest.fixture
def told_to(talking: Path, tmp_path: Path, monkeypatch: Patch) -> Callable[..., tuple[Recipe, Run, worlds.Script]]:
    """A run, by name, whose questions a writer with this script wrote."""

    def write(text: Any, *overrides: str, name: str = "run") -> tuple[Recipe, Run, worlds.Script]:
        recipe, run = worlds.begin(talking, tmp_path / name, *overrides)
        script = worlds.scripted(monkeypatch, recipe, text)
        questions(recipe, run)
        return recipe, run, script

    return write


def lines_of(run: Run, name: str = "target.jsonl") -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in run.path("questions", name).read_text().splitlines()]


def summary_of(run: Run) -> AskedQuestions:
    return read_result(run.path("questions", "summary.json"), QuestionTexts).sources[0]


# ── the recipe ──

ASKING = {"kind": "target", "questions": 5}


@pytest.mark.parametrize(
    ("source", "more", "fault"),
    [
        ({"kind": "target"}, {}, "questions is missing"),
        (ASKING | {"path": "x"}, {}, r"sources.0.path: a source of kind target reads no file .* leave path out"),
        (ASKING | {"pattern": "*"}, {}, "pattern: for files and data sets alone, and this source is of kind target"),
        (ASKING | {"given": False, "form": "text"}, {}, "form, given: for files and data sets alone"),
        ({"kind": "jsonl", "path": "a", "top_p": 1}, {}, "top_p: for kind target alone, and this source is of kind j"),
        ({"kind": "tree", "path": "a", "tokens": 96}, {}, "tokens: for kind target alone"),
        ({"kind": "jsonl"}, {}, "corpus.sources.0.path: is missing"),
        (ASKING | {"temperature": 0}, {}, "temperature: input should be greater than 0"),
        (ASKING, {"target": {"model": "m", "load": False}, "answers": {"prompts": 0, "traffic": "t"}}, "qu"),
        (ASKING | {"openings": ["How", "Translate "]}, {}, "ends in a space"),
        (ASKING | {"openings": ["How", " \n"]}, {}, "has no words"),
    ],
)
def test_mistakes(source: dict[str, Any], more: dict[str, Any], fault: str) -> None:
    with pytest.raises(RecipeError, match=fault):
        parse_recipe({"name": "a", "target": {"model": "m"}, "corpus": {"sources": [source]}, **more}, "it")


def test_other_runs_keep_their_keys_and_stages(world: Path, tmp_path: Path) -> None:
    recipe = load_recipe(world / "recipe.yaml")
    run = Run(tmp_path, recipe)
    assert plan_run(recipe, run)[0].stage.name == "corpus"
    parts = key_parts(find_stage("corpus"), recipe, run)
    keys = "kind path pattern form fields given label weight subset hub_split exclude split keep"
    assert set(parts["corpus"]["sources"][0]) == set(keys.split()) and "questions" not in str([*parts])


def test_the_key_holds_what_the_questions_depend_on(talking: Path, tmp_path: Path) -> None:
    def parts(*overrides: str) -> dict[str, Any]:
        recipe, run = worlds.begin(talking, tmp_path, *overrides)
        return key_parts(find_stage("questions"), recipe, run)

    before = parts()
    assert before["corpus.sources.questions"] == [24] and before["corpus.sources.top_p"] == [0.99]
    same = ("corpus.sources.0.label=a", "corpus.sources.0.weight=2", "answers.new_tokens=20", "sampler.temperature=0.5")
    for override in (*same, "corpus.block=256", "chat.turns=6"):
        assert parts(override) == before, override
    for override in ("corpus.sources.0.temperature=0.7", "chat.system=[]", "seed=1", "answers.group=4"):
        assert parts(override) != before, override


# ── headers ──


@pytest.mark.parametrize(
    ("style", "header", "end"),
    [
        ("llama-3", "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n", None),
        ("mistral", "<s>[INST] ", "[/INST]"),
        ("gemma", "<bos><start_of_turn>user\n", "<end_of_turn>"),
        ("r1", "<|begin|><|User|>", "<|Assistant|>"),
        ("qwen-3", "<|im_start|>user\n", None),
    ],
)
def test_headers_and_ends(talking: Path, style: str, header: str, end: str | None) -> None:
    tokenizer = worlds.dressed(talking, style)
    template = ChatTemplate(tokenizer, Chat())
    found = template.user_header([], [tokenizer.eos_token_id])
    assert (found.text, found.end) == (header, end)
    for text in ("value", "What is this?", "é", "7"):
        prompt = template.prompt([{"role": "user", "content": text}])
        assert prompt[: len(found.ids)] == found.ids, "the tokens of the header are those of every prompt"
    assert tokenizer.decode(found.ids) == (header.rstrip(" ") if style == "mistral" else header)


EVERY = "{% for m in messages %}"


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        (EVERY + "<|im_start|>{{ m['content'] | upper }}{% endfor %}", "leaves out a message of the user"),
        (EVERY + "{{ m['content'] }}<|im_end|>{% endfor %}", "writes nothing before a user's message"),
        (EVERY + "<|im_start|>{{ m['content'] | length }} {{ m['content'] }}{% endfor %}", "depends on the message"),
        ("{{ raise_exception('only tools') }}", "only tools"),
    ],
)
def test_templates_without_a_header(talking: Path, monkeypatch: Patch, template: str, fault: str) -> None:
    tokenizer = worlds.dressed(talking, "qwen-3", template)
    monkeypatch.setattr("distill.teacher.answers.load_tokenizer", lambda _: tokenizer)
    recipe = load_recipe(talking / "recipe.yaml", ["chat.system=[]"])
    with pytest.raises(DataError, match=f"no user header that the target could continue: .*{fault}"):
        QuestionRequests(recipe, recipe.corpus.asked[0], 0)


def test_what_check_refuses(talking: Path, capsys: Capture) -> None:
    plain = f"target.model={talking / 'plain'}"
    opened = (plain, "chat.system=[]", "corpus.sources.0.openings=[The]")
    for overrides, said in (
        ((plain,), "chat.system: the target has no chat template"),
        (opened[:2], "begin with no fixed token"),
        ((*opened, "answers.prompt_tokens=64"), "(answers.prompt_tokens 64)"),
        (("corpus.sources.0.tokens=90",), "a question of corpus.sources may have 90 tokens"),
    ):
        assert said in tiny.refused(capsys, "check", talking / "recipe.yaml", *overrides)


# ── filters ──


def test_words_and_grams() -> None:
    assert words("What's THE time, 你好?") == ["what", "s", "the", "time", "你", "好"]
    assert list(grams("a b c d", 3)) == [("a", "b", "c"), ("b", "c", "d")]
    assert list(grams("a b", 3)) == [("a", "b")]


def brute(texts: list[str]) -> list[str]:
    kept: list[tuple[str, set[tuple[str, ...]]]] = []
    found = []
    for text in texts:
        plain, own = " ".join(text.casefold().split()), set(grams(text, 3))
        if any(plain == other for other, _ in kept):
            found.append(EQUAL)
        elif any(len(own & other) / len(own | other) >= SIMILAR for _, other in kept):
            found.append(ALIKE)
        else:
            found.append("")
            kept.append((plain, own))
    return found


@pytest.mark.parametrize("seed", range(4))
def test_repeats_are_those_of_comparing_all_pairs(seed: int) -> None:
    draw = random.Random(seed)
    texts: list[str] = []
    for _ in range(400):
        found = draw.choices(WORDS[:9], k=draw.randrange(1, 24))
        if texts and draw.random() < 0.5:
            found = draw.choice(texts).split()
            found[draw.randrange(len(found))] = draw.choice(WORDS)
        texts.append(" ".join(found))
    verdicts = repeats(texts)
    assert verdicts == brute(texts)
    assert min(Counter(verdicts)[kind] for kind in (EQUAL, ALIKE, "")) > 5


def test_every_reason_is_counted(talking: Path, told_to: Any, monkeypatch: Patch) -> None:
    """Constructed texts, one per reason and three that stay."""
    tokenizer = load_tokenizer(str(talking / "target"))
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    long = "tell me why the buffer of the parser is a stream"
    texts: list[str | list[int]] = [
        "What is the total of alpha and beta?",
        "what  is the TOTAL of alpha and beta?\n",
        encode(tokenizer, "and so on and on"),
        "",
        " ?!",
        "ab",
        "value\x07 of index",
        [*encode(tokenizer, "value of"), start, *encode(tokenizer, "index"), tokenizer.eos_token_id],
        "a text with <|im_end|> spelled out",
        "value " * 12,
        f"{long} of the index",
        f"{long} of the value",
        "Why?  Because of the token.",
        "refuse this text please",
    ]
    refusing = "{% if 'refuse' in messages[-1]['content'] %}{{ raise_exception('no') }}{% endif %}"
    dressed = worlds.dressed(talking, "qwen-3", refusing + tokenizer.chat_template)
    monkeypatch.setattr("distill.teacher.answers.load_tokenizer", lambda _: dressed)

    def text(request: Request) -> str | Reply:
        number = int(request.id.partition("/")[0].rpartition("-")[2])
        found = texts[number] if number < len(texts) else []
        if isinstance(found, str):
            return found
        return Reply(request.id, found, found[-1:] == [tokenizer.eos_token_id])

    _, run, script = told_to(text, "answers.batch=20")
    found = summary_of(run)
    kept = [messages[-1]["content"] for messages in lines_of(run)]
    assert kept == [texts[0], f"{long} of the index", "Why?  Because of the token."]
    assert (found.wanted, found.asked, found.usable, found.kept) == (24, 72, 3, 3)
    once = dict.fromkeys((EQUAL, ALIKE, SHORT, LOOPING, "the target's chat template refuses it (no)"), 1)
    assert found.dropped == once | {NOT_ENDED: 1 + 72 - len(texts), WORDLESS: 2, SPECIAL: 3}
    assert found.examples == kept
    one = script.recipes[0].sampler
    assert (one.temperature, one.top_p, one.top_k, script.asked[0].limit) == (1.0, 0.99, 0, 32)


# ── rounds ──


def test_rounds_go_on_until_enough_are_usable(told_to: Any, capsys: Capture) -> None:
    """Every third text is empty; system prompts and seeds are each text's own."""

    def text(request: Request) -> str:
        return "" if request.seed % 3 == 0 else sentence(request)

    _, run, script = told_to(text, "answers.batch=4")
    found = summary_of(run)
    assert found.kept == 24 and found.asked == len(script.asked) and found.asked % 4 == 0
    assert 24 < found.asked < 72 and found.usable == found.asked - found.dropped[WORDLESS]
    by_number = sorted(script.asked, key=lambda request: request.id)
    usable = [text(request) for request in by_number if text(request)]
    assert [messages[-1]["content"] for messages in lines_of(run)] == usable[:24], "the first usable ones"
    assert {messages[0]["content"] for messages in lines_of(run)} == {"Be short.", "Be kind."}
    assert len({request.seed for request in script.asked}) == found.asked
    told = f"24 of 24 questions: {found.usable} of {found.asked} texts that the target wrote are usable"
    assert told in capsys.readouterr().err


def test_too_few_are_told_and_none_refused(told_to: Any, capsys: Capture) -> None:
    _, run, _ = told_to(lambda request: sentence(request) if request.seed % 8 == 0 else "")
    found = summary_of(run)
    assert found.asked == 3 * 24 and found.kept == found.usable < 24
    assert f"warning: only {found.kept} of 24 questions" in capsys.readouterr().err
    with pytest.raises(DataError, match="no usable question in 72 texts: 72 without words"):
        told_to(lambda request: "", name="none")


def test_questions_begin_with_an_opening_drawn_for_each(told_to: Any) -> None:
    """The target continues the opening, and what it adds is checked together with it."""
    openings = ["Translate into French:", "List the names in this text:\n\n"]
    more = [f"corpus.sources.0.openings={json.dumps(openings)}", "corpus.block=256"]
    recipe, run, script = told_to(lambda asked: "" if asked.seed % 5 == 0 else f" {sentence(asked)}", *more)
    tokenizer = load_tokenizer(recipe.target.model)
    written = [tokenizer.decode(one.ids).partition("<|im_start|>user\n")[2] for one in script.asked]
    assert set(written) == set(openings), "nothing but the opening stands behind the header"
    found = [next(one["content"] for one in messages if one["role"] == "user") for messages in lines_of(run)]
    assert len(found) == 24 and all(text.startswith(tuple(openings)) for text in found)
    assert all(text.endswith("?") for text in found), "an opening with nothing behind it is no question"
    assert summary_of(run).dropped[WORDLESS] > 0


# ── resuming ──


@pytest.fixture(scope="module")
def gguf(talking: Path) -> Path:
    export_gguf(talking / "target", talking / "target.gguf", "f32")
    return talking / "target.gguf"


@pytest.mark.parametrize("kind", [TorchWriter, GgufWriter])
def test_interrupted_questions_end_in_equal_bytes(
    talking: Path, gguf: Path, tmp_path: Path, monkeypatch: Patch, kind: Any
) -> None:
    more = ["corpus.sources.0.questions=16"]
    if kind is GgufWriter:
        more.append(f"answers.writer={json.dumps({'gguf': str(gguf)})}")
    recipe, whole = worlds.begin(talking, tmp_path / "whole", *more)
    questions(recipe, whole)
    _, run = worlds.begin(talking, tmp_path / "run", *more)
    interrupted(monkeypatch, kind, (1, 7, 5), lambda: questions(recipe, run))
    questions(recipe, run)
    assert tiny.contents(run.path("questions")) == tiny.contents(whole.path("questions"))


# ── writers ──


def test_a_gguf_file_and_a_server_write_questions(talking: Path, gguf: Path, tmp_path: Path) -> None:
    """Of a target whose weights are elsewhere, too."""
    never = ["teacher.server={urls: [http://localhost:1/v1], model: m}", f"cut.donor={tmp_path}"]
    more = [f"answers.writer={json.dumps({'gguf': str(gguf)})}", "corpus.sources.0.questions=6", *never]
    recipe, run = worlds.begin(talking, tmp_path / "gguf", *more)
    questions(recipe, run)
    assert len(lines_of(run)) == 6
    assert read_json(run.path("questions", "summary.json"))["writer"] == "gguf"
    tokenizer = load_tokenizer(recipe.target.model)

    class Asked(BadServer):
        def completion(self, body: dict[str, Any], prompt: Any, kind: str) -> dict[str, Any]:
            text = sentence(Request("", [], body.get("seed", 0), 0))
            choice = {"text": text, "finish_reason": "stop", "index": 0}
            usage = {"prompt_tokens": len(prompt), "completion_tokens": len(encode(tokenizer, text)) + 1}
            return {"model": body["model"], "choices": [choice], "usage": usage}

    with Asked(tokenizer, lambda *_: "ok") as server:
        served = {"urls": [server.url], "model": "tiny", "connections": 2}
        recipe, run = worlds.begin(talking, tmp_path / "server", f"answers.writer={json.dumps(served)}", *more[1:])
        questions(recipe, run)
        body = server.bodies[0]
        assert (body["temperature"], body["top_p"], body["max_tokens"]) == (1.0, 0.99, 32) and "stop" not in body
        header = tokenizer.decode(body["prompt"])
        assert header.endswith("<|im_start|>user\n") and header.startswith("<|im_start|>system\nBe ")
    assert len(lines_of(run)) == 6 and all(len(one[-1]["content"].split()) == 6 for one in lines_of(run))


def test_a_template_whose_users_end_otherwise_is_stopped_there(talking: Path, told_to: Any, monkeypatch: Patch) -> None:
    tokenizer = worlds.dressed(talking, "mistral")
    monkeypatch.setattr("distill.teacher.answers.load_tokenizer", lambda _: tokenizer)
    _, _, script = told_to(sentence, "chat={system: []}", "answers.repetition_penalty=1.3", "answers.stop=[x]")
    assert {(one.answers.stop, one.answers.repetition_penalty) for one in script.recipes} == {(("[/INST]",), 1.0)}


# ── conversations and splits ──


def asked_of(document: Any) -> str:
    return next(one["content"] for one in document.messages if one["role"] == "user")


def test_a_hash_of_the_question_gives_its_split(asked: Path, talking: Path) -> None:
    recipe = load_recipe(talking / "recipe.yaml")
    run = Run(asked, recipe)
    documents, dropped = read_documents(with_questions(recipe.corpus, run.path("questions")))
    assert not dropped and len(documents) == 24 and {one.source for one in documents} == {"target.jsonl"}
    assert all(one.split == split_of(question_name(asked_of(one)), 0.25, 0.25) and one.own for one in documents)
    for split in ("train", "validation", "test"):
        prompts = [prompt.chat["messages"] for prompt in read_prompts(run, split) if prompt.chat]
        assert prompts and all(messages in lines_of(run) for messages in prompts)
        own = [list(one.messages or ()) for one in documents if one.split == split]
        assert all(messages in own for messages in prompts)


def test_labels_weights_and_other_sources(told_to: Any, tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text("".join(json.dumps({"prompt": f"ask {n} of them"}) + "\n" for n in range(40)))
    sources = [
        {"kind": "target", "questions": 24, "tokens": 32, "label": "own", "weight": 1},
        {"kind": "jsonl", "path": str(tmp_path / "other.jsonl"), "label": "given", "weight": 3},
        {"kind": "target", "questions": 5, "tokens": 20, "label": "more", "weight": 0, "temperature": 0.5},
    ]
    recipe, run, script = told_to(sentence, f"corpus.sources={json.dumps(sources)}")
    assert len(lines_of(run)) == 24 and len(lines_of(run, "target-2.jsonl")) == 5
    assert {one.sampler.temperature for one in script.recipes} == {1.0, 0.5}
    assert {request.limit for request in script.asked} == {32, 20}
    corpus(recipe, run)
    assert Counter(one.label for one in read_prompts(run, "train")) == {"given": 9, "own": 3}


# ── rehearsals and reports ──


def test_a_target_without_a_template_writes_texts(talking: Path, tmp_path: Path, capsys: Capture) -> None:
    """From first words here, because its texts begin with no token; prompts are the beginnings of the texts."""
    base = shutil.copytree(talking / "target", tmp_path / "base")
    (base / "chat_template.jinja").unlink()
    changes = (f"target.model={base}", "chat.system=[]", "corpus.sources.0.openings=[The ,A module]")
    changes = (*changes, "answers.prompt_tokens=12", "corpus.tokens=100000")
    shown = tiny.shown(capsys, "check", talking / "recipe.yaml", *changes)
    assert "no chat template: 24 continuations of first words by the target, from at most 72 texts" in shown
    assert tiny.call("train", talking / "recipe.yaml", "--runs", tmp_path, "--until", "corpus", *changes) == 0
    run, tokenizer = tmp_path / "tiny", load_tokenizer(str(base))
    lines = [json.loads(line) for line in (run / "questions" / "target.jsonl").read_text().splitlines()]
    texts = {line["text"] for line in lines}
    assert len(texts) == len(lines) == 24 and all(text.startswith(("The", "A module")) for text in texts)
    prompts = read_prompts(Run(run, load_recipe(run / "config.yaml")), "train")
    assert prompts and all(one.chat is None and len(one.prompt) == 12 for one in prompts)
    assert all(any(text.startswith(tokenizer.decode(one.prompt)) for text in texts) for one in prompts)


@pytest.mark.slow
def test_a_whole_run_without_any_data(talking: Path, tmp_path: Path, capsys: Capture) -> None:
    recipe = talking / "recipe.yaml"
    assert tiny.call("train", recipe, "--runs", tmp_path) == 0
    page = (tmp_path / "tiny" / "report.html").read_text()
    assert "self-asked questions" in page
    capsys.readouterr()
    assert "| questions |" in tiny.shown(capsys, "train", recipe, "--runs", tmp_path, "--rehearse")
    changed = "corpus.sources.0.questions=30"
    assert "corpus.sources.0.questions: 24 -> 30" in tiny.refused(capsys, "train", recipe, "--runs", tmp_path, changed)
