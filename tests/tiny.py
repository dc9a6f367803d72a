"""A whole job that takes seconds: a random Qwen2 of 0.1M parameters, a corpus of made-up code, a small recipe."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import random
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
needs_llama = pytest.mark.skipif(not importlib.util.find_spec("llama_cpp"), reason="needs llama-cpp-python")
ROOT = Path(__file__).resolve().parent.parent
TOKENIZERS = Path(os.environ.get("DISTILL_SHARED", ROOT.parent / "shared")) / "tokenizers"
STAGES = ("corpus", "answers", "teacher", "cut", "train", "eval", "export", "speedup", "report")
WORDS = ["alpha", "beta", "gamma", "delta", "value", "total", "index", "result", "buffer", "stream", "parser", "token"]
DOCUMENTS = {"train": 12, "validation": 3, "test": 8}


def script(name: str) -> Any:
    """scripts/NAME.py as a module."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def real_tokenizer(name: str) -> Path:
    """The folder of a real model's tokenizer, without which a test is skipped."""
    if not (TOKENIZERS / name).is_dir():
        pytest.skip(f"no tokenizer {name} in {TOKENIZERS}; set DISTILL_SHARED")
    return TOKENIZERS / name


def document(seed: int) -> str:
    """A made-up module, about 2 KB, the same for the same seed."""
    draw = random.Random(seed)
    lines = [f'"""Module {seed}."""', ""]
    for _ in range(12):
        first, second, third = draw.sample(WORDS, 3)
        lines += [
            f"def {first}_{second}({third}, {first}=None):",
            f"    {second} = {third} + {draw.randrange(100)}",
            f"    for {first} in range({draw.randrange(50)}):",
            f"        {second} += {first} * {draw.choice(WORDS)}({third})",
            f"    return {second}",
            "",
        ]
    return "\n".join(lines)


def build_corpus(folder: Path) -> None:
    """One folder per split, so that the split does not hang on hashes of names."""
    for number, (split, count) in enumerate(DOCUMENTS.items()):
        for index in range(count):
            path = folder / split / f"part{number}_{index}.py"  # of two documents of one name, one is dropped
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(document(1000 * number + index), encoding="utf-8")


def build_model(
    folder: Path, layers: int = 3, vocabulary: int = 400, seeds: range = range(20), width: int = 64
) -> None:
    """A Qwen2 folder with random weights, wide enough that its distributions are not flat, and a tokenizer of its
    own."""
    import torch
    from transformers.utils import logging

    maker = script("make_demo_models")  # its builders make the tiny tokenizers and models too
    logging.disable_progress_bar()
    made = maker.DemoModel(width, layers, 4, 2, 128, vocabulary, "qwen2", 0, 0.0)
    tokenizer = maker.train_tokenizer(made, [document(seed) for seed in seeds])
    model = maker.build_model(made, tokenizer).float()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.1, generator=generator)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def recipe_values(world: Path, elsewhere: bool = False) -> dict[str, Any]:
    """The small recipe, as the mapping that is written to a file; with whole paths where that file lies elsewhere."""
    place = f"{world}/" if elsewhere else "./"
    sources = [{"kind": "tree", "path": f"{place}corpus/{split}", "split": split} for split in DOCUMENTS]
    return {
        "name": "tiny",
        "threads": 1,
        "device": "cpu",
        "target": {"model": f"{place}target", "dtype": "float32"},
        "corpus": {"sources": sources, "block": 64, "tokens": 1500},
        "answers": {"prompts": 12, "prompt_tokens": 8, "new_tokens": 24, "batch": 2, "group": 4},
        "teacher": {"top_k": 8, "shard_blocks": 8},
        "cut": {"layers": 2, "mlp_width": 64, "score_blocks": 4},
        "train": {
            "steps": 8,
            "batch": 4,
            "rate": 1e-3,
            "dtype": "float32",  # as bf16 would hide what more than rounding changes; Muon computes in it
            "optimizer": "adamw",
            "save_every": 2,
            "acceptance": {"every": 4, "prompts": 2},
        },
        "eval": {"prompts": 6, "new_tokens": 12, "file_blocks": 4, "length": 3},
        "export": {"outtypes": ["f16"]},
        "speedup": {
            "turns": 2,
            "lengths": [1, 3],
            "prompts": 4,
            "new_tokens": 12,
        },
    }


def write_recipe(path: Path, values: dict[str, Any]) -> Path:
    """Write a recipe file."""
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    return path


def edit(path: Path, **values: Any) -> None:
    """Write these values into an object of JSON; a file that is not there begins empty."""
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | values))


def build_world(folder: Path) -> Path:
    """target/, corpus/ and recipe.yaml in `folder`; returns the recipe."""
    build_corpus(folder / "corpus")
    build_model(folder / "target")
    return write_recipe(folder / "recipe.yaml", recipe_values(folder))


def call(*arguments: object) -> int:
    """`distill ARGUMENTS` in this process; returns the exit status."""
    from distill.cli.app import main

    with mock.patch.object(sys, "argv", ["distill", *map(str, arguments)]):
        try:
            main()
        except SystemExit as exit:
            return int(exit.code or 0)
    raise AssertionError("main() came back without an exit status")


def refused(capsys: Any, *arguments: object) -> str:
    """The one message of `distill ARGUMENTS`, which a user error ends; typer begins its own with `Error: `."""
    capsys.readouterr()
    code, said = call(*arguments), capsys.readouterr().err
    assert code == 2 and "Traceback" not in said and "bug in distill" not in said, said
    begin = "Error: " if said.startswith("Usage: ") else "distill: "
    assert said.count(begin) == 1, said
    return str(said[said.index(begin) :])


def shown(capsys: Any, *arguments: object) -> str:
    """What `distill ARGUMENTS`, which succeeds, prints as its result."""
    return _said(capsys, *arguments)[0]


def told(capsys: Any, *arguments: object) -> str:
    """What it says to stderr meanwhile."""
    return _said(capsys, *arguments)[1]


def _said(capsys: Any, *arguments: object) -> tuple[str, str]:
    capsys.readouterr()
    code, (out, err) = call(*arguments), capsys.readouterr()
    assert code == 0, err
    return out, err


def require_form(capsys: Any, command: str, value: Any) -> None:
    """That a command's `-o json` has the form of its schema, and a version."""
    form = json.loads(shown(capsys, command, "-o", "schema"))
    _require(value, form, form)
    assert value["version"] >= 1


def _require(value: Any, form: dict[str, Any], whole: dict[str, Any]) -> None:
    """JSON schema, as far as ours use it; an object has no key beside those that it names."""
    while "$ref" in form:
        form = whole["$defs"][form["$ref"].rpartition("/")[2]]
    if "anyOf" in form:
        kinds = {"null" if one.get("type") == "null" else "other": one for one in form["anyOf"]}
        return None if value is None and "null" in kinds else _require(value, kinds["other"], whole)
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
    kind, allowed = names.get(type(value), "null"), form.get("type", [])
    allowed = [allowed] if isinstance(allowed, str) else allowed
    assert not allowed or kind in allowed or (kind == "integer" and "number" in allowed), (value, form)
    assert "const" not in form or value == form["const"]
    if kind == "array":
        for place, one in enumerate(value):
            _require(one, form["prefixItems"][place] if "prefixItems" in form else form["items"], whole)
    elif kind == "object":
        named, more = form.get("properties", {}), form.get("additionalProperties", not form.get("properties"))
        assert value.keys() >= set(form.get("required", [])) and (more or value.keys() <= named.keys())
        for name, one in value.items():
            _require(one, named.get(name, more if isinstance(more, dict) else {}), whole)
    return None


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def contents(folder: Path, *but: str) -> dict[str, str]:
    """Digest of every file below a folder, by name; files named in `but` are left out."""
    return {
        path.relative_to(folder).as_posix(): digest(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in but
    }


@contextlib.contextmanager
def one_thread() -> Any:
    """torch with one thread, as the tiny recipe asks, and as before afterwards."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
