"""A draft has its target's number of rows: only padding is appended or removed, and tokens keep their logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from toys import toy, toy_tokenizer
from transformers import AutoModelForCausalLM

from distill import machine
from distill.cli.shared import read_recipe
from distill.engines.torch.hugging_face import settled_target
from distill.machine import faster_type
from distill.pipeline.preflight import check_device
from distill.recipe import dump_recipe, parse_recipe
from distill.surgery.cutter import match_rows
from distill.surgery.results import size_of

TOKENIZER = toy_tokenizer(300)
REAL = max(TOKENIZER.get_vocab().values()) + 1
IDS = torch.tensor([[5, 9, 200, 31]])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("donor", "rows"), [(REAL, REAL + 7), (REAL + 3, REAL + 9), (REAL + 9, REAL + 2), (REAL + 5, REAL)]
)
def test_only_padding_changes(donor: int, rows: int, tied: bool, tmp_path: Path) -> None:
    model = toy("qwen2", vocabulary=donor, tie_word_embeddings=tied)
    assert match_rows(model, donor, REAL) == []
    with pytest.raises(AssertionError):
        match_rows(model, REAL - 1, REAL)  # a token never loses its row
    with torch.no_grad():
        before, old = model(IDS).logits, model.get_output_embeddings().weight.clone()
    (change,) = match_rows(model, rows, REAL)
    assert change.details == {"rows": rows, "donor_rows": donor, "tokens": REAL}
    assert (change.before.vocabulary, change.after.vocabulary) == (donor, rows)
    assert change.after == size_of(model) and change.after.tied is tied
    with torch.no_grad():
        after = model(IDS).logits
    assert after.shape[-1] == rows == model.config.vocab_size
    assert torch.equal(after[..., :REAL], before[..., :REAL])
    if rows > donor:
        expected = old[-1] if donor > REAL else old.mean(0)
        torch.testing.assert_close(model.get_output_embeddings().weight[donor:], expected.expand(rows - donor, -1))
    model.save_pretrained(tmp_path)  # from_pretrained refuses another shape than config.json's
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, after)
    assert (again.get_input_embeddings().weight is again.lm_head.weight) is tied
    model(IDS).logits.sum().backward()
    assert model.get_input_embeddings().weight.grad.shape[0] == rows


FLAGS = {
    "old": ({"avx2", "fma"}, {"bfloat16": "float32", "float16": "float32"}),
    "zen4": ({"avx512f", "avx512_bf16"}, {"bfloat16": None, "float16": "bfloat16"}),
    "sapphire": ({"amx_bf16", "avx512_fp16"}, {"bfloat16": None, "float16": None}),
    "arm": ({"asimdhp", "bf16"}, {"bfloat16": None, "float16": None}),
    "unknown": (None, {"bfloat16": None, "float16": None}),
}


@pytest.mark.parametrize("processor", FLAGS)
def test_types_that_a_processor_computes_slowly(processor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    features, expected = FLAGS[processor]
    monkeypatch.setattr(machine, "cpu_features", lambda: features)
    assert {dtype: faster_type(dtype) for dtype in expected} == expected
    assert faster_type("float32") is None
    values: dict[str, Any] = {
        "name": "slow",
        "device": "cpu",
        "target": {"model": "m", "dtype": "float16"},
        "train": {"dtype": "bfloat16"},
        "corpus": {"sources": [{"kind": "text", "path": "/t"}]},
    }
    lines = [line for line in check_device(parse_recipe(values, "test")) if "warning" in line]
    assert lines == [
        f"warning: this CPU has no instructions for {dtype} and computes it slowly: {key}={expected[dtype]} is faster"
        for key, dtype in (("target.dtype", "float16"), ("train.dtype", "bfloat16"))
        if expected[dtype]
    ]


@pytest.mark.parametrize("processor", FLAGS)
def test_auto_is_a_type_that_the_processor_computes_well(
    processor: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And a run that has begun keeps its type, wherever it goes on."""
    features, slow = FLAGS[processor]
    monkeypatch.setattr(machine, "cpu_features", lambda: features)
    expected = "bfloat16" if features is not None and slow["bfloat16"] is None else "float32"
    path, begun = tmp_path / "recipe.yaml", tmp_path / "config.yaml"
    path.write_text(
        "{name: n, device: cpu, target: {model: m, dtype: auto}, train: {dtype: auto}, "
        "corpus: {sources: [{kind: text, path: /t}]}}"
    )
    recipe = read_recipe(path, [], begun)
    assert (recipe.target.dtype, recipe.train.dtype) == (expected, expected)
    assert settled_target("m", "auto").dtype in ("bfloat16", "float32")
    begun.write_text(dump_recipe(recipe))
    monkeypatch.setattr(machine, "cpu_features", lambda: FLAGS["old" if expected == "bfloat16" else "zen4"][0])
    assert read_recipe(path, [], begun) == recipe != read_recipe(path, [])
    named = read_recipe(path, ["target.dtype=float16"], begun)
    assert (named.target.dtype, named.train.dtype) == ("float16", expected)


def test_features_are_read_from_the_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for text, expected in (
        ("model name\t: X\nflags\t\t: fpu avx2 avx512_bf16\nflags\t\t: other\n", {"fpu", "avx2", "avx512_bf16"}),
        ("Features\t: fp asimdhp bf16\n", {"fp", "asimdhp", "bf16"}),
        ("nothing\n", None),
    ):
        (tmp_path / "cpuinfo").write_text(text)
        monkeypatch.setattr(machine, "Path", lambda _: tmp_path / "cpuinfo")
        assert machine.cpu_features() == expected
    monkeypatch.setattr(machine, "Path", lambda _: tmp_path / "missing")
    assert machine.cpu_features() is None
