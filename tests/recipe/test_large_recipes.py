"""The shipped recipes for large targets at small width: every stage, real tokenizers, rows of the data sets' forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import yaml
from chat_templates import GEMMA, LLAMA_3, QWEN_3, R1
from toys import toy
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3Config
from unloaded_worlds import AnsweringServer

from distill.data.texts import read_answers, read_prompts
from distill.files import read_result
from distill.measuring.evaluation_results import EvaluationReport
from distill.recipe import load_recipe

SHARED = tiny.ROOT.parent / "shared"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not SHARED.is_dir(), reason="the shared tokenizers are not here")]
RECIPES = tiny.ROOT / "recipes"


def questions(count: int) -> list[str]:
    lines = (SHARED / "prompts" / "spec-bench.jsonl").read_text().splitlines()
    return [json.loads(line)["turns"][0][:200] for line in lines[:: len(lines) // count]][:count]


def record(path: str, number: int, question: str) -> dict[str, Any]:
    """A row as the data set on the hub has it."""
    asked, again = ({"role": "user", "content": text} for text in (question, f"And then, {number}?"))
    said = {"role": "assistant", "content": f"Answer {number}."}
    chat = {"prompt": question, "prompt_id": str(number), "messages": [asked, said, again, said]}
    maths = {"problem": question, "solution": f"It is {number}.", "answer": str(number), "problem_type": "Algebra"}
    code = {"lang": "python", "index": number, "seed": "x", "problem": question}
    file = {"repo_name": "a/b", "path": f"{number}.py", "size": "2000", "license": "mit"}
    return {
        "HuggingFaceH4/ultrachat_200k": chat,
        "open-r1/OpenR1-Math-220k": {**maths, "messages": [asked, said]},
        "ise-uiuc/Magicoder-OSS-Instruct-75K": {**code, "solution": f"```python\nprint({number})\n```"},
        "codeparrot/codeparrot-clean-valid": {**file, "content": tiny.document(number)},
    }[path]


def local_sources(recipe: Path, folder: Path) -> list[dict[str, Any]]:
    """The recipe's sources with made-up rows instead of the hub's; whatever else they say stays."""
    found = []
    for number, source in enumerate(yaml.safe_load(recipe.read_text())["corpus"]["sources"]):
        assert source.pop("kind") == "hub"
        source.pop("hub_split", None)
        rows = [record(source["path"], n, f"{number}: {q}") for n, q in enumerate(questions(30))]
        path = folder / f"source-{number}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        found.append(source | {"kind": "jsonl", "path": str(path)})
    return found


def save(folder: Path, kind: str, tokenizer: Any, rows: int, layers: int, seed: int) -> None:
    """A random model of a real vocabulary, 32 wide."""
    end = tokenizer.convert_tokens_to_ids(tokenizer.eos_token)
    sizes = {"max_position_embeddings": 4096, "tie_word_embeddings": True, "initializer_range": 0.02}
    model = toy(kind, vocabulary=rows, layers=layers, seed=seed, eos_token_id=end, **sizes)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def qwen(template: str | None) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(SHARED / "tokenizers" / "qwen2.5")
    if template is not None:  # Qwen3 adds tokens to Qwen2.5's, and has another template
        tokenizer.add_tokens(["<think>", "</think>", "<tool_response>", "</tool_response>"])
        tokenizer.chat_template = template.replace("{G}", "").replace("{E}", "")
    tokenizer.eos_token = "<|im_end|>"
    return tokenizer


SMALL = """
    threads=1 device=cpu target.dtype=float32 train.dtype=float32 corpus.block=256 corpus.tokens=1500
    corpus.validation=0.2 corpus.test=0.25 answers.prompts=10 answers.new_tokens=8 teacher.top_k=16
    teacher.shard_blocks=8 cut.score_blocks=1 train.steps=3 train.batch=2 train.micro_batch=1
    train.save_every=2 train.acceptance.prompts=2 train.acceptance.new_tokens=8 eval.file_blocks=2
    speedup.max_tokens=3 speedup.depth=16 speedup.repeats=5 eval.prompts=6 eval.new_tokens=8 eval.length=2
    export.outtypes=[f16] speedup.outtype=f16
    speedup.lengths=[2] speedup.prompts=2 speedup.new_tokens=8
"""


def run_whole(recipe: Path, folder: Path, *overrides: str) -> Path:
    """`distill train` of a recipe at small width; its run directory."""
    sources = json.dumps(local_sources(recipe, folder))
    models = [f"target.model={folder / 'target'}", f"cut.donor={folder / 'donor'}"]
    given = [*SMALL.split(), *models, f"corpus.sources={sources}", *overrides]
    assert tiny.call("check", recipe, "--offline", *given) == 0
    assert tiny.call("train", recipe, "--runs", folder / "runs", *given) == 0
    return folder / "runs" / recipe.stem


def require_whole(run: Path, rows: int, classes: set[str], modes: set[str]) -> None:
    """Answers by class and mode, a draft with the target's rows, figures and files."""
    from distill.recipe import load_recipe
    from distill.run import Run

    opened = Run(run, load_recipe(run / "config.yaml"))
    prompts = read_prompts(opened, "train")
    assert {one.label for one in prompts} == classes and {one.mode for one in prompts} == modes
    assert len(read_answers(opened, "train")) >= len(prompts) == 10
    config = json.loads((run / "draft" / "config.json").read_text())
    assert config["vocab_size"] == rows
    report = read_result(run / "eval.json", EvaluationReport)
    assert report.classes and set(report.domains["answers"]) == {"before", "after"}
    page = (run / "report.html").read_text()
    assert "Texts" in page and all(name in page for name in classes)


def test_qwen_coder(tmp_path: Path) -> None:
    """The donor has the target's tokens in fewer rows."""
    tokenizer = qwen(None)
    save(tmp_path / "target", "qwen2", tokenizer, 152064, 20, 0)
    save(tmp_path / "donor", "qwen2", tokenizer, 151936, 18, 1)
    run = run_whole(RECIPES / "qwen-coder.yaml", tmp_path)
    require_whole(run, 152064, {"instructions", "completion"}, {""})
    assert list((run / "gguf").glob("*.gguf"))


def test_qwen_3(tmp_path: Path) -> None:
    """Thinking in half of the prompts, several turns."""
    tokenizer = qwen(QWEN_3)
    save(tmp_path / "target", "qwen3", tokenizer, 152064, 20, 0)
    save(tmp_path / "donor", "qwen3", tokenizer, 152064, 18, 1)
    run = run_whole(RECIPES / "qwen3-32b.yaml", tmp_path)
    require_whole(run, 152064, {"chat", "math", "code"}, {"thinking", "no thinking"})
    assert list((run / "gguf").glob("*.gguf"))


def test_llama_behind_a_server(tmp_path: Path) -> None:
    """The target is nowhere here: a server answers and gives distributions; three turns of conversations."""
    tokenizer = AutoTokenizer.from_pretrained(SHARED / "tokenizers" / "llama-3")
    tokenizer.chat_template = LLAMA_3.replace("{G}", "").replace("{E}", "")
    tokenizer.eos_token = "<|eot_id|>"
    save(tmp_path / "target", "llama", tokenizer, 128256, 20, 0)
    save(tmp_path / "donor", "llama", tokenizer, 128256, 4, 1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    (tmp_path / "target" / "model.safetensors").unlink()
    name = "meta-llama/Llama-3.3-70B-Instruct"
    with AnsweringServer(model, name=name, tokenizer=tokenizer, max_logprobs=300).running() as server:
        urls = [f"answers.writer.urls=[{server.url}]", f"teacher.server.urls=[{server.url}]"]
        settings = [*urls, "answers.writer.concurrency=4", "teacher.server.concurrency=4"]
        run = run_whole(RECIPES / "llama-3.3-70b-server.yaml", tmp_path, *settings)
    require_whole(run, 128256, {"chat", "code"}, {""})
    assert [path.name for path in (run / "gguf").glob("*.gguf")] == ["draft-f16.gguf"]
    assert json.loads((run / "eval.json").read_text())["tokens_per_round"] == {}


@pytest.mark.parametrize("recipe", ["gemma-3-27b", "deepseek-v3-server"])
def test_a_transplant_behind_a_server(recipe: str, tmp_path: Path) -> None:
    """Targets of families that are never cut, behind a server: Qwen2.5's real vocabulary gives way to another one. The
    Gemma's config.json describes a model that reads images, too, as the published one does."""
    gemma = recipe.startswith("gemma")
    tokenizer = AutoTokenizer.from_pretrained(SHARED / "tokenizers" / ("llama-2" if gemma else "deepseek-llm"))
    markers = ["<start_of_turn>", "<end_of_turn>"] if gemma else ["<｜User｜>", "<｜Assistant｜>"]
    tokenizer.add_tokens(markers, special_tokens=True)
    template = GEMMA if gemma else R1.replace("<|User|>", markers[0]).replace("<|Assistant|>", markers[1])
    tokenizer.chat_template = template.replace("{G}", "").replace("{E}", "")
    if gemma:
        tokenizer.eos_token = "<end_of_turn>"
    rows = len(tokenizer) + 62
    save(tmp_path / "target", "gemma3" if gemma else "llama", tokenizer, rows, 2, 0)
    save(tmp_path / "donor", "qwen2", qwen(None), 151936, 24, 1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    (tmp_path / "target" / "model.safetensors").unlink()
    if gemma:
        Gemma3Config(text_config=model.config.to_dict(), eos_token_id=model.config.eos_token_id).save_pretrained(
            tmp_path / "target"
        )
    name = load_recipe(RECIPES / f"{recipe}.yaml").target.model
    with AnsweringServer(model, name=name, tokenizer=tokenizer, max_logprobs=300).running() as server:
        urls = [f"answers.writer.urls=[{server.url}]", f"teacher.server.urls=[{server.url}]"]
        settings = [*urls, "answers.writer.concurrency=4", "teacher.server.concurrency=4", "train.embedding_steps=1"]
        settings.append("cut.allow_full_size=true")  # beside a target of two layers
        run = run_whole(RECIPES / f"{recipe}.yaml", tmp_path, *settings)
    require_whole(run, rows, {"chat", "code"} | (set() if gemma else {"math"}), {""})
    assert [path.name for path in (run / "gguf").glob("*.gguf")] == ["draft-f16.gguf"]
    changes = json.loads((run / "cut" / "surgery.json").read_text())["changes"]
    assert changes[0]["after"]["vocabulary"] == rows
